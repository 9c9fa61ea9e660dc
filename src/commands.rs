//! The subcommands other than servers and workers, one module each.

pub mod adapter_sidecar;
pub mod backup;
pub mod bench;
pub mod convert;
pub mod gc;
pub mod keys;
pub mod reward_check;
pub mod reward_serve;
pub mod runtime;
