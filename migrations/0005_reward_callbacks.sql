-- Requests to reward services whose answer may come later, and what came of it: by POST /reward-callbacks/{id}, from the
-- service itself. They go with their request's row in the journal.
CREATE TABLE reward_callbacks (
    -- rwr_…
    id TEXT PRIMARY KEY,
    -- NULL: a test of a reward (POST /rewards/test), forgotten after its deadline.
    journal_id INTEGER UNIQUE REFERENCES journal (id) ON DELETE CASCADE,
    -- A JSON list.
    sample_ids TEXT NOT NULL,
    -- Later answers are refused.
    deadline INTEGER NOT NULL,
    -- JSON of callback::Accepted; NULL until the service has taken the request.
    accepted TEXT,
    -- The service said that nothing else comes.
    done INTEGER NOT NULL DEFAULT 0 CHECK (done IN (0, 1)),
    -- Its answer stands in the journal: nothing else is used.
    closed INTEGER NOT NULL DEFAULT 0 CHECK (closed IN (0, 1))
) STRICT;

-- seq grows with time and is never used twice: workers ask for what came after the last one they saw.
CREATE TABLE reward_callback_results (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id TEXT NOT NULL REFERENCES reward_callbacks (id) ON DELETE CASCADE,
    -- NULL: that nothing else comes.
    sample_id TEXT,
    -- {sample_id, reward, …} as the service gave it; the first one of a sample stays.
    result TEXT,
    CHECK ((sample_id IS NULL) = (result IS NULL)),
    UNIQUE (request_id, sample_id)
) STRICT;

-- What this server alone knows, made when it first needs it.
CREATE TABLE server_secrets (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
