//! The subcommands other than servers and workers, one module each.

pub mod adapter_sidecar;
pub mod backup;
pub mod bench;
mod contract_check;
pub mod convert;
pub mod env_check;
pub mod env_serve;
pub mod gc;
pub mod keys;
pub mod python_serve;
pub mod reward_check;
pub mod reward_serve;
pub mod runtime;
