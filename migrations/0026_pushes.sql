-- Pushes to a hub are tasks like verdicts and exports. SQLite cannot change a CHECK, so both tables are written again, the one that
-- refers to the other first dropped: else the foreign key would delete its rows. From here on the program alone knows the kinds.
CREATE TABLE tasks_with_pushes (
    -- vrd_…, exp_…, psh_…
    id TEXT PRIMARY KEY,
    -- verdict, export, push
    kind TEXT NOT NULL,
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
INSERT INTO tasks_with_pushes
SELECT id, kind, job_id, checkpoint_id, step, state, attempt, request, done, total, result, error, created_at, started_at, finished_at,
       expires_at
FROM tasks;

CREATE TABLE verdict_rows_kept (
    verdict_id TEXT NOT NULL REFERENCES tasks_with_pushes (id) ON DELETE CASCADE,
    -- Counts from 1 per verdict.
    seq INTEGER NOT NULL,
    row_set TEXT NOT NULL,
    outcome TEXT NOT NULL,
    row TEXT NOT NULL,
    PRIMARY KEY (verdict_id, seq)
) STRICT, WITHOUT ROWID;
INSERT INTO verdict_rows_kept SELECT verdict_id, seq, row_set, outcome, row FROM verdict_rows;

DROP TABLE verdict_rows;
DROP TABLE tasks;
ALTER TABLE tasks_with_pushes RENAME TO tasks;
ALTER TABLE verdict_rows_kept RENAME TO verdict_rows;
CREATE INDEX tasks_queued ON tasks (kind, created_at, id) WHERE state = 'queued';
CREATE INDEX tasks_job ON tasks (job_id, kind, created_at DESC, id DESC);
CREATE INDEX tasks_expire ON tasks (expires_at) WHERE expires_at IS NOT NULL;
