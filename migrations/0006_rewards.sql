-- How each reward of a job has done, over all its attempts; the last word of the worker stays when the job is over.
CREATE TABLE reward_health (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    -- 1: one of the evaluation's own rewards, which may have the names of the job's.
    evaluation INTEGER NOT NULL CHECK (evaluation IN (0, 1)),
    name TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    time INTEGER NOT NULL,
    -- JSON of protocol::RewardHealth.
    health TEXT NOT NULL,
    PRIMARY KEY (job_id, evaluation, name)
) STRICT;
CREATE INDEX reward_health_time ON reward_health (time);

-- Jobs that wait for a reward service; the server asks it now and then.
CREATE INDEX jobs_outage ON jobs (id) WHERE state = 'paused' AND status_reason = 'reward_outage';
