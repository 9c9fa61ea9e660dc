-- What a run did since its last published checkpoint, so that an attempt that goes on from there samples nothing twice and
-- asks nothing twice: the completions of each rollout, and each reward request with its answer. Fenced like every write of
-- a worker; rows that a newer checkpoint covers are deleted in the transaction that publishes it.
CREATE TABLE journal (
    id INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    -- Which rollout, or which samples of it asked of which reward.
    key TEXT NOT NULL,
    phase TEXT NOT NULL CHECK (phase IN ('train', 'eval')),
    step INTEGER NOT NULL,
    -- A RolloutId as JSON.
    rollout TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    time INTEGER NOT NULL,
    -- NULL for the completions of a rollout.
    reward TEXT,
    request_id TEXT,
    -- The completions; or a request as sent, until it is answered: it is never sent again then.
    body TEXT,
    -- JSON; NULL until there is one.
    answer TEXT,
    UNIQUE (job_id, key),
    CHECK ((reward IS NULL) = (request_id IS NULL)),
    CHECK (body IS NOT NULL OR answer IS NOT NULL)
) STRICT;

-- Set when a lease of the worker's lapsed, until it is heard of again.
ALTER TABLE workers ADD COLUMN lost_at INTEGER;
