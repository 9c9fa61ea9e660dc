//! The data directory: write to temp, hash, fsync, rename. The one place that builds paths.

/// The data directory.
#[derive(Clone)]
pub struct DataDir;
