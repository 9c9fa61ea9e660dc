-- The reward of a step outside its JSON, so that the courses of many jobs are read from an index and nothing else.
ALTER TABLE steps ADD COLUMN reward REAL AS (json_extract(metrics, '$.reward')) VIRTUAL;
CREATE INDEX steps_reward ON steps (job_id, kind, step, reward);
