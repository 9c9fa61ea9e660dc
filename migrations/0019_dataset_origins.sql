-- Where a dataset comes from: repository, commit, files with their hashes, and what was made of the rows. JSON; null of plain uploads.
ALTER TABLE datasets ADD COLUMN origin TEXT;
