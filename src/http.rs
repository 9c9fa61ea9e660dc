//! Router, state, layers.

pub mod artifacts;
pub mod auth;
pub mod datasets;
pub mod error;
pub mod events;
pub mod jobs;
pub mod models;
pub mod rewards;
pub mod system;
pub mod web;
pub mod worker;
