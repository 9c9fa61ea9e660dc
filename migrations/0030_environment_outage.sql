-- Jobs that paused because their environment gave no answer resume by themselves, like those that wait for a reward service.
DROP INDEX jobs_outage;
CREATE INDEX jobs_outage ON jobs (id)
    WHERE state = 'paused' AND status_reason IN ('reward_outage', 'rollout_outage', 'environment_outage');
