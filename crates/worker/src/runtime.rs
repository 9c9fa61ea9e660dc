//! Runtimes beside rlood's own engine, which train a job in other programs.

pub mod trl;
