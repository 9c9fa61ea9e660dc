-- PEFT adapters from elsewhere, uploaded or of the hub. Their files lie under adapters/ID of the data directory; jobs that begin with
-- one keep links of their own. `config` is its adapter_config.json, `origin` the repository and commit of the hub.
CREATE TABLE adapters (
    id TEXT PRIMARY KEY,
    name TEXT,
    sha256 TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    num_parameters INTEGER NOT NULL,
    config TEXT NOT NULL,
    files TEXT NOT NULL,
    owner TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    origin TEXT,
    UNIQUE (owner, sha256)
) STRICT;
CREATE INDEX adapters_newest ON adapters (created_at DESC, id DESC);
