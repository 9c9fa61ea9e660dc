-- What lists of many jobs are read from.

-- Any filter of a list is decided here, without the jobs' rows, which are large.
CREATE INDEX jobs_list ON jobs (created_at DESC, id DESC, state, owner, model);

-- The labels of jobs: metadata, one row a label.
CREATE TABLE job_labels (
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    job_id TEXT NOT NULL,
    PRIMARY KEY (key, value, created_at, job_id)
) STRICT, WITHOUT ROWID;
INSERT OR IGNORE INTO job_labels (key, value, created_at, job_id)
SELECT label.key, label.value, jobs.created_at, jobs.id FROM jobs, json_each(jobs.metadata) AS label;

CREATE TRIGGER jobs_labelled AFTER INSERT ON jobs WHEN NEW.metadata <> '{}'
BEGIN
    INSERT OR IGNORE INTO job_labels (key, value, created_at, job_id)
    SELECT label.key, label.value, NEW.created_at, NEW.id FROM json_each(NEW.metadata) AS label;
END;
CREATE TRIGGER jobs_unlabelled AFTER DELETE ON jobs WHEN OLD.metadata <> '{}'
BEGIN
    DELETE FROM job_labels WHERE (key, value, created_at, job_id) IN (
        SELECT label.key, label.value, OLD.created_at, OLD.id FROM json_each(OLD.metadata) AS label
    );
END;
CREATE TRIGGER jobs_relabelled AFTER UPDATE OF metadata ON jobs WHEN OLD.metadata <> NEW.metadata
BEGIN
    DELETE FROM job_labels WHERE (key, value, created_at, job_id) IN (
        SELECT label.key, label.value, OLD.created_at, OLD.id FROM json_each(OLD.metadata) AS label
    );
    INSERT OR IGNORE INTO job_labels (key, value, created_at, job_id)
    SELECT label.key, label.value, NEW.created_at, NEW.id FROM json_each(NEW.metadata) AS label;
END;

-- The disk watch looks for these every second.
CREATE INDEX jobs_disk_full ON jobs (queue_order) WHERE state = 'paused' AND status_reason = 'disk_full';
