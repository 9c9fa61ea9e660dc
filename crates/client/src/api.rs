//! One method per API operation, named after the operation id, with the types of its requests and responses. All
//! are methods of [`crate::Client`].

pub(crate) mod adapters;
pub(crate) mod checkpoints;
pub(crate) mod compare;
pub(crate) mod datasets;
pub(crate) mod exports;
pub(crate) mod generate;
pub(crate) mod jobs;
pub(crate) mod keys;
pub(crate) mod models;
pub(crate) mod pushes;
pub(crate) mod records;
pub(crate) mod rewards;
pub(crate) mod serving;
pub(crate) mod system;
pub(crate) mod verdicts;
pub(crate) mod webhooks;
