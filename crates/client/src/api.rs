//! A method for each operation of the API, under the operation's id, with what it takes and answers. [`crate::Client`] has them all.

pub(crate) mod adapters;
pub(crate) mod checkpoints;
pub(crate) mod compare;
pub(crate) mod datasets;
pub(crate) mod exports;
pub(crate) mod generate;
pub(crate) mod jobs;
pub(crate) mod keys;
pub(crate) mod models;
pub(crate) mod records;
pub(crate) mod rewards;
pub(crate) mod system;
pub(crate) mod verdicts;
pub(crate) mod webhooks;
