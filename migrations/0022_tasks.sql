-- Long work on a checkpoint that is no job: verdicts, exports. A server that starts begins those again that were running.
CREATE TABLE tasks (
    -- vrd_…, exp_…
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind IN ('verdict', 'export')),
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    checkpoint_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')),
    -- Counts the times that it was begun: what a former attempt says is refused.
    attempt INTEGER NOT NULL DEFAULT 0,
    -- What was asked for, as JSON.
    request TEXT NOT NULL,
    done INTEGER NOT NULL DEFAULT 0,
    total INTEGER NOT NULL DEFAULT 0,
    -- What came of it, as JSON; error is {code, message}.
    result TEXT,
    error TEXT,
    created_at INTEGER NOT NULL,
    started_at INTEGER,
    finished_at INTEGER,
    -- When what it left on the disk is removed; NULL = it left nothing.
    expires_at INTEGER
) STRICT;
CREATE INDEX tasks_queued ON tasks (kind, created_at, id) WHERE state = 'queued';
CREATE INDEX tasks_job ON tasks (job_id, kind, created_at DESC, id DESC);
CREATE INDEX tasks_expire ON tasks (expires_at) WHERE expires_at IS NOT NULL;

-- The rows that a verdict judged.
CREATE TABLE verdict_rows (
    verdict_id TEXT NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    -- Counts from 1 per verdict.
    seq INTEGER NOT NULL,
    row_set TEXT NOT NULL,
    outcome TEXT NOT NULL,
    row TEXT NOT NULL,
    PRIMARY KEY (verdict_id, seq)
) STRICT, WITHOUT ROWID;
