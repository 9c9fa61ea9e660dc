-- The size and SHA-256 of each file of a model that workers on other machines fetch, hashed once. By the model's directory;
-- `stamp` says for which state of its files (names, sizes, times of modification) the list holds.
CREATE TABLE model_files (
    source TEXT PRIMARY KEY,
    stamp TEXT NOT NULL,
    files TEXT NOT NULL
) STRICT;
