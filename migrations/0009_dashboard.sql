-- The reward of a step outside its JSON, so that the courses of many jobs are read from an index and nothing else.
ALTER TABLE steps ADD COLUMN reward REAL;
UPDATE steps SET reward = json_extract(metrics, '$.reward') WHERE kind = 'train';
CREATE INDEX steps_reward ON steps (job_id, kind, step, reward);
