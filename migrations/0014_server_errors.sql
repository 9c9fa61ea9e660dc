-- Errors of the server while it hands out a job: they are counted apart from the job's own, and the job waits a little.

-- In a row; 0 after a claim that reached its worker.
ALTER TABLE jobs ADD COLUMN server_errors INTEGER NOT NULL DEFAULT 0;
-- Not offered to a worker before this time (Unix ms); 0 = at once.
ALTER TABLE jobs ADD COLUMN claim_not_before INTEGER NOT NULL DEFAULT 0;

-- With the column, so that jobs that wait are passed over without reading their rows, which are large.
DROP INDEX jobs_queue;
CREATE INDEX jobs_queue ON jobs (priority DESC, queue_order, claim_not_before) WHERE state = 'queued';
-- When the next of them is due.
CREATE INDEX jobs_claim_later ON jobs (claim_not_before) WHERE state = 'queued' AND claim_not_before > 0;
