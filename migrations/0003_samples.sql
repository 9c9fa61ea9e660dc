-- Samples of a job in the orders in which they are listed: latest first (the row's id follows job_id), by reward.
CREATE INDEX samples_job ON samples (job_id);
CREATE INDEX samples_reward ON samples (job_id, reward DESC);

-- What a job's samples take, kept by the triggers below, and what had to make room for newer ones.
CREATE TABLE sample_usage (
    job_id TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    size_bytes INTEGER NOT NULL,
    removed_samples INTEGER NOT NULL DEFAULT 0,
    removed_bytes INTEGER NOT NULL DEFAULT 0,
    -- Up to this training step (inclusive) samples are gone.
    removed_to_step INTEGER
) STRICT, WITHOUT ROWID;
INSERT INTO sample_usage (job_id, size_bytes)
SELECT job_id, SUM(octet_length(sample)) FROM samples GROUP BY job_id;

CREATE TRIGGER samples_added AFTER INSERT ON samples
BEGIN
    INSERT INTO sample_usage (job_id, size_bytes) VALUES (NEW.job_id, octet_length(NEW.sample))
    ON CONFLICT (job_id) DO UPDATE SET size_bytes = size_bytes + excluded.size_bytes;
END;
CREATE TRIGGER samples_gone AFTER DELETE ON samples
BEGIN
    UPDATE sample_usage SET size_bytes = size_bytes - octet_length(OLD.sample) WHERE job_id = OLD.job_id;
END;
