-- What the doctor said, one row an episode; alert is the JSON of src/doctor.rs.
CREATE TABLE alerts (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    step INTEGER NOT NULL,
    rule TEXT NOT NULL,
    time INTEGER NOT NULL,
    alert TEXT NOT NULL,
    -- NULL while it is on.
    cleared_step INTEGER,
    PRIMARY KEY (job_id, step, rule)
) STRICT, WITHOUT ROWID;

-- Each training phase the run entered; the last one is where it is.
CREATE TABLE training_phases (
    job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    step INTEGER NOT NULL,
    time INTEGER NOT NULL,
    change TEXT NOT NULL,
    PRIMARY KEY (job_id, step)
) STRICT, WITHOUT ROWID;

-- Why the run ended before its last step: JSON of job::Ending.
ALTER TABLE jobs ADD COLUMN ending TEXT;
