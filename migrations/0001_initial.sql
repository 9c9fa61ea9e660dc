-- Times are Unix milliseconds. Ids are the prefixed texts of src/id.rs. JSON columns hold what serde wrote.

CREATE TABLE datasets (
    id TEXT PRIMARY KEY,
    name TEXT,
    sha256 TEXT NOT NULL UNIQUE,
    num_rows INTEGER NOT NULL CHECK (num_rows > 0),
    size_bytes INTEGER NOT NULL,
    columns TEXT NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE models (
    id TEXT PRIMARY KEY,
    source TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('ready', 'failed')),
    sha256 TEXT NOT NULL,
    card TEXT NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE workers (
    id TEXT PRIMARY KEY,
    device TEXT NOT NULL,
    pid INTEGER NOT NULL,
    threads INTEGER NOT NULL,
    version TEXT NOT NULL,
    -- Started by the server itself: it ends when the server does.
    child INTEGER NOT NULL CHECK (child IN (0, 1)),
    seen_at INTEGER NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    name TEXT,
    state TEXT NOT NULL CHECK (state IN ('queued', 'running', 'paused', 'succeeded', 'failed', 'cancelled')),
    requested TEXT CHECK (requested IN ('cancel', 'pause')),
    phase TEXT CHECK (phase IN ('loading', 'rollout', 'reward', 'train', 'eval', 'checkpoint')),
    status_reason TEXT,
    priority INTEGER NOT NULL DEFAULT 0,
    -- Ascending within a priority; a job requeued by a shutdown keeps its number and so comes first again.
    queue_order INTEGER NOT NULL,
    -- Counts claims: the fence.
    attempt INTEGER NOT NULL DEFAULT 0,
    -- Claims that ended badly since the last published checkpoint.
    failed_attempts INTEGER NOT NULL DEFAULT 0,
    worker TEXT REFERENCES workers (id),
    lease_until INTEGER,
    last_batch INTEGER,
    step INTEGER NOT NULL DEFAULT 0,
    total_steps INTEGER NOT NULL,
    eta_s REAL,
    model TEXT NOT NULL,
    spec TEXT NOT NULL,
    plan TEXT NOT NULL,
    secrets TEXT NOT NULL,
    metadata TEXT NOT NULL,
    failure TEXT,
    parent TEXT,
    next_seq INTEGER NOT NULL DEFAULT 1,
    created_at INTEGER NOT NULL,
    started_at INTEGER,
    finished_at INTEGER,
    CHECK ((state = 'running') = (lease_until IS NOT NULL)),
    CHECK ((state = 'running') = (worker IS NOT NULL)),
    CHECK (requested IS NULL OR state = 'running'),
    CHECK ((state IN ('succeeded', 'failed', 'cancelled')) = (finished_at IS NOT NULL)),
    CHECK ((state = 'failed') = (failure IS NOT NULL))
) STRICT;

CREATE INDEX jobs_queue ON jobs (priority DESC, queue_order) WHERE state = 'queued';
CREATE UNIQUE INDEX jobs_queue_order ON jobs (queue_order);
CREATE INDEX jobs_worker ON jobs (worker) WHERE state = 'running';
CREATE INDEX jobs_leases ON jobs (lease_until) WHERE state = 'running';
CREATE INDEX jobs_created ON jobs (created_at DESC, id DESC);
CREATE INDEX jobs_model ON jobs (model, created_at DESC, id DESC);
CREATE INDEX jobs_state ON jobs (state, created_at DESC, id DESC);

-- The table of src/job.rs, enforced; a job is born queued.
CREATE TRIGGER jobs_birth BEFORE INSERT ON jobs
WHEN NEW.state <> 'queued'
BEGIN
    SELECT RAISE(ABORT, 'a job begins in the queue');
END;
CREATE TRIGGER jobs_moves BEFORE UPDATE OF state ON jobs
WHEN OLD.state <> NEW.state AND (OLD.state || '>' || NEW.state) NOT IN (
    'queued>running', 'queued>paused', 'queued>cancelled', 'queued>failed',
    'running>succeeded', 'running>failed', 'running>cancelled', 'running>paused', 'running>queued',
    'paused>queued', 'paused>cancelled', 'paused>failed'
)
BEGIN
    SELECT RAISE(ABORT, 'illegal move of a job');
END;

-- Which datasets a job needs; a dataset in use by a job that is not over cannot be deleted.
CREATE TABLE job_datasets (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    dataset_id TEXT NOT NULL,
    PRIMARY KEY (job_id, dataset_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX job_datasets_dataset ON job_datasets (dataset_id);

-- History, SSE feed and outbox in one; seq counts per job from 1 without gap.
CREATE TABLE events (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    seq INTEGER NOT NULL,
    type TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    time INTEGER NOT NULL,
    data TEXT NOT NULL,
    PRIMARY KEY (job_id, seq)
) STRICT, WITHOUT ROWID;

-- One row a step and kind; metrics is a JSON object of TRL's names.
CREATE TABLE steps (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    step INTEGER NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('train', 'eval')),
    attempt INTEGER NOT NULL,
    time INTEGER NOT NULL,
    metrics TEXT NOT NULL,
    PRIMARY KEY (job_id, step, kind)
) STRICT, WITHOUT ROWID;

CREATE TABLE samples (
    id INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    step INTEGER NOT NULL,
    phase TEXT NOT NULL CHECK (phase IN ('train', 'eval')),
    attempt INTEGER NOT NULL,
    reward REAL,
    sample TEXT NOT NULL
) STRICT;
CREATE INDEX samples_step ON samples (job_id, phase, step);

CREATE TABLE logs (
    id INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    time INTEGER NOT NULL,
    line TEXT NOT NULL
) STRICT;
CREATE INDEX logs_job ON logs (job_id, id);

CREATE TABLE checkpoints (
    id TEXT PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    files TEXT NOT NULL,
    metrics TEXT NOT NULL,
    best INTEGER NOT NULL DEFAULT 0 CHECK (best IN (0, 1)),
    pinned INTEGER NOT NULL DEFAULT 0 CHECK (pinned IN (0, 1)),
    created_at INTEGER NOT NULL,
    UNIQUE (job_id, step)
) STRICT;

CREATE TABLE idempotency_keys (
    key TEXT NOT NULL,
    route TEXT NOT NULL,
    body_sha256 TEXT NOT NULL,
    -- NULL while the first request is in flight.
    status INTEGER,
    location TEXT,
    response TEXT,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (route, key)
) STRICT, WITHOUT ROWID;
