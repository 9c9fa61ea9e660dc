-- Models from a hub: where they come from, and how far their download is. The state could be `ready` or `failed` only, and a
-- constraint cannot be changed, so the table is made anew.
CREATE TABLE models_anew (
    id TEXT PRIMARY KEY,
    source TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('ready', 'downloading', 'failed')),
    sha256 TEXT NOT NULL,
    card TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    owner TEXT NOT NULL DEFAULT '',
    -- All four null of a directory that was registered.
    hub TEXT,
    revision TEXT,
    commit_sha TEXT,
    bytes_total INTEGER,
    -- Why the download failed.
    problem TEXT
) STRICT;
INSERT INTO models_anew (id, source, state, sha256, card, created_at, owner)
    SELECT id, source, state, sha256, card, created_at, owner FROM models;
DROP TABLE models;
ALTER TABLE models_anew RENAME TO models;
