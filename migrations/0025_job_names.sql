-- Jobs by name, without reading their rows, which are large.

-- The exact name. Commands that take the name of a job look it up here.
CREATE INDEX jobs_name ON jobs (name, created_at DESC, id DESC) WHERE name IS NOT NULL;

-- With the name, so that a part of it is also compared without the jobs' rows.
DROP INDEX jobs_list;
CREATE INDEX jobs_list ON jobs (created_at DESC, id DESC, state, owner, model, name);
