-- Keys, owners, sessions, the record of changes, lifecycle webhooks, pauses that the server asks for.

-- Who made it: the owner of the key that was used; '' = the operator (the environment's key, or a server without keys).
ALTER TABLE jobs ADD COLUMN owner TEXT NOT NULL DEFAULT '';
CREATE INDEX jobs_owner ON jobs (owner, created_at DESC, id DESC);
-- '' = everybody's.
ALTER TABLE models ADD COLUMN owner TEXT NOT NULL DEFAULT '';
-- Why the server asked for a pause; NULL = a user did.
ALTER TABLE jobs ADD COLUMN requested_reason TEXT;

-- The same bytes are one dataset of an owner, but two of two.
CREATE TABLE owned_datasets (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL DEFAULT '',
    name TEXT,
    sha256 TEXT NOT NULL,
    num_rows INTEGER NOT NULL CHECK (num_rows > 0),
    size_bytes INTEGER NOT NULL,
    columns TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    UNIQUE (owner, sha256)
) STRICT;
INSERT INTO owned_datasets (id, name, sha256, num_rows, size_bytes, columns, created_at)
SELECT id, name, sha256, num_rows, size_bytes, columns, created_at FROM datasets;
DROP TABLE datasets;
ALTER TABLE owned_datasets RENAME TO datasets;

CREATE TABLE api_keys (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    owner TEXT NOT NULL CHECK (owner <> ''),
    -- JSON list of words.
    scopes TEXT NOT NULL,
    -- What a key begins with: finds the row, and lets people tell keys apart.
    prefix TEXT NOT NULL,
    sha256 BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER,
    used_at INTEGER
) STRICT;
CREATE INDEX api_keys_prefix ON api_keys (prefix);

-- Browsers that are signed in; the cookie's value is not kept.
CREATE TABLE sessions (
    sha256 BLOB PRIMARY KEY,
    -- NULL = the environment's key, whose hash follows.
    key_id TEXT REFERENCES api_keys (id) ON DELETE CASCADE,
    operator_sha256 BLOB,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    CHECK ((key_id IS NULL) <> (operator_sha256 IS NULL))
) STRICT, WITHOUT ROWID;

-- Who changed what, and when.
CREATE TABLE audit (
    id INTEGER PRIMARY KEY,
    time INTEGER NOT NULL,
    -- The id of a key, or: operator, anonymous, command_line, server.
    actor TEXT NOT NULL,
    -- The key's name.
    actor_name TEXT,
    owner TEXT NOT NULL,
    -- `POST /jobs/{id}/cancel`, `keys revoke`.
    action TEXT NOT NULL,
    -- What it was done to: a path, or an id.
    target TEXT NOT NULL,
    status INTEGER,
    request_id TEXT,
    address TEXT
) STRICT;
CREATE INDEX audit_time ON audit (time);

CREATE TABLE webhooks (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    -- Of every owner's jobs; only an admin may have it.
    all_jobs INTEGER NOT NULL CHECK (all_jobs IN (0, 1)),
    url TEXT NOT NULL,
    description TEXT,
    -- Message types with a space around each: ' job.failed job.succeeded '.
    types TEXT NOT NULL,
    secret TEXT NOT NULL,
    -- Signs beside the new one until its time is over.
    old_secret TEXT,
    old_secret_until INTEGER,
    enabled INTEGER NOT NULL CHECK (enabled IN (0, 1)),
    disabled_reason TEXT,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
) STRICT;

-- Messages to send, and those that were sent.
CREATE TABLE deliveries (
    -- The webhook-id of every try.
    id TEXT PRIMARY KEY,
    webhook_id TEXT NOT NULL REFERENCES webhooks (id) ON DELETE CASCADE,
    type TEXT NOT NULL,
    time INTEGER NOT NULL,
    -- The event, and the job as it was then; NULL for a test.
    job_id TEXT,
    seq INTEGER,
    attempt INTEGER,
    event TEXT,
    detail TEXT,
    job_name TEXT,
    job_state TEXT,
    model TEXT,
    step INTEGER,
    total_steps INTEGER,
    metadata TEXT,
    state TEXT NOT NULL CHECK (state IN ('pending', 'delivered', 'failed')),
    -- Since it was queued (again).
    tries INTEGER NOT NULL DEFAULT 0,
    next_at INTEGER NOT NULL,
    finished_at INTEGER
) STRICT;
CREATE INDEX deliveries_due ON deliveries (webhook_id, next_at) WHERE state = 'pending';
CREATE INDEX deliveries_webhook ON deliveries (webhook_id, time DESC, id DESC);
CREATE INDEX deliveries_finished ON deliveries (finished_at) WHERE state <> 'pending';

CREATE TABLE delivery_tries (
    id INTEGER PRIMARY KEY,
    delivery_id TEXT NOT NULL REFERENCES deliveries (id) ON DELETE CASCADE,
    time INTEGER NOT NULL,
    duration_ms INTEGER NOT NULL,
    -- NULL when there was no answer; then error says why.
    status INTEGER,
    error TEXT
) STRICT;
CREATE INDEX delivery_tries_delivery ON delivery_tries (delivery_id, id);

-- The outbox: a message is written in the transaction of the event it tells of, whoever writes the event.
CREATE TRIGGER events_outbox AFTER INSERT ON events
WHEN NEW.type IN (
    'job.created', 'job.requeued', 'job.resumed', 'job.started', 'job.paused', 'job.succeeded', 'job.failed',
    'job.cancelled', 'checkpoint.saved', 'reward.degraded', 'reward.recovered'
)
BEGIN
    INSERT INTO deliveries (
        id, webhook_id, type, time, job_id, seq, attempt, event, detail, job_name, job_state, model, step, total_steps,
        metadata, state, next_at
    )
    SELECT
        'msg_' || lower(hex(randomblob(16))), webhooks.id, message.type, NEW.time, NEW.job_id, NEW.seq, NEW.attempt,
        NEW.type, NEW.data, jobs.name, jobs.state, jobs.model, jobs.step, jobs.total_steps, jobs.metadata,
        'pending', NEW.time
    FROM jobs
    JOIN (SELECT CASE NEW.type
        WHEN 'job.created' THEN 'job.queued'
        WHEN 'job.requeued' THEN 'job.queued'
        WHEN 'job.resumed' THEN 'job.queued'
        WHEN 'checkpoint.saved' THEN 'checkpoint.created'
        ELSE NEW.type END AS type) AS message
    JOIN webhooks ON webhooks.enabled = 1 AND (webhooks.all_jobs = 1 OR webhooks.owner = jobs.owner)
        AND instr(webhooks.types, ' ' || message.type || ' ') > 0
    -- A pause that was taken back before it began queues nothing.
    WHERE jobs.id = NEW.job_id AND NOT (NEW.type = 'job.resumed' AND jobs.state <> 'queued');
END;
