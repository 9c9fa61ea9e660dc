-- Datasets of a hub whose files are downloaded after the request, or could not be. A row is removed when the dataset is stored under
-- the same id. It stays, with the state `ready`, if the owner had the same rows already: then `dataset_id` names that dataset.
CREATE TABLE dataset_downloads (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    name TEXT,
    state TEXT NOT NULL CHECK (state IN ('downloading', 'failed', 'ready')),
    -- Repository, commit, files with their hashes: as in `datasets`.
    origin TEXT NOT NULL,
    -- The conversion of the rows, as JSON.
    conversion TEXT NOT NULL,
    -- Whether the repository can be read only with a token.
    is_restricted INTEGER NOT NULL CHECK (is_restricted IN (0, 1)),
    bytes_total INTEGER NOT NULL,
    -- Why the download failed.
    problem TEXT,
    dataset_id TEXT,
    created_at INTEGER NOT NULL,
    UNIQUE (owner, origin, conversion)
) STRICT;
-- Whether a job cannot start yet, because its plan is provisional until the rows of its datasets are known.
ALTER TABLE jobs ADD COLUMN waits_for_data INTEGER NOT NULL DEFAULT 0 CHECK (waits_for_data IN (0, 1));
