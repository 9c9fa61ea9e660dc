//! Complete checkpoints: written to a temporary directory, manifest last, renamed.
