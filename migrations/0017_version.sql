-- Which rlood ran the last attempt of a job. Every version before this column was 0.1.0.
ALTER TABLE jobs ADD COLUMN version TEXT;
UPDATE jobs SET version = '0.1.0' WHERE attempt > 0;
