//! One module a subcommand that is neither a server nor a worker.

pub mod backup;
pub mod bench;
pub mod convert;
pub mod gc;
pub mod keys;
pub mod reward_check;
pub mod reward_serve;
