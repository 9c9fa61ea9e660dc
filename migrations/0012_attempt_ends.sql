-- How far a job has ever come, and how its attempts ended: an attempt that ends is a strike only if it passed no such point.

-- The highest point that any attempt reached: [optimizer steps, journalled answers of the next step, rows and answers of the
-- evaluation]. NULL = of a job that an older version began: its step says it.
ALTER TABLE jobs ADD COLUMN reached TEXT;
-- Resident memory of the worker that runs the job, as its last heartbeat said.
ALTER TABLE jobs ADD COLUMN memory_bytes INTEGER;

-- Attempts that ended before their job was over; one that a user paused is not among them.
CREATE TABLE attempt_ends (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    time INTEGER NOT NULL,
    -- worker_lost, lease_expired, claim_abandoned, worker_shutdown, preempted, server_restart, ….
    reason TEXT NOT NULL,
    phase TEXT,
    -- Optimizer steps done.
    step INTEGER NOT NULL,
    memory_bytes INTEGER,
    -- How the process ended, where the server knows it.
    detail TEXT,
    -- 1 = a failure of the attempt; 0 = a shutdown, a preemption, a restart of the server: never a strike.
    failed INTEGER NOT NULL CHECK (failed IN (0, 1)),
    -- 1 = the attempt passed the highest point of those before it.
    progressed INTEGER NOT NULL CHECK (progressed IN (0, 1)),
    PRIMARY KEY (job_id, attempt)
) STRICT, WITHOUT ROWID;

-- 1 = saved only so that an interrupted attempt repeats less: the next checkpoint replaces it, and it is never the best.
ALTER TABLE checkpoints ADD COLUMN temporary INTEGER NOT NULL DEFAULT 0 CHECK (temporary IN (0, 1));
