//! Open, migrate, pools.

pub mod artifacts;
pub mod datasets;
pub mod events;
pub mod jobs;
pub mod keys;
pub mod models;

/// The database.
#[derive(Clone)]
pub struct Store;
