-- Models that the token of a request opened. Of such a model an empty owner is the operator alone, not everyone.
ALTER TABLE models ADD COLUMN is_private INTEGER NOT NULL DEFAULT 0 CHECK (is_private IN (0, 1));
