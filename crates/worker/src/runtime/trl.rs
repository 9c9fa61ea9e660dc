//! The runtime `trl`: one Python process per device trains with TRL's RLOOTrainer, and the worker keeps everything else.
//!
//! [`train`] has the form of the engine's `train`: it calls the same [`Host`](crate::engine::host::Host), from the questions that
//! the processes ask over a socket. Rewards, secrets, the journal, the claim and checkpoints never reach Python. The runner's source
//! is part of this binary, so that it cannot be of another version.
//!
//! | file | content |
//! |---|---|
//! | `runner.py` | the program of a rank |
//! | `environment.rs` | finds and describes the Python environment |
//! | `config.rs` | translates a plan into the runner's configuration |
//! | `message.rs` | the messages of protocol version 1 |
//! | `ranks.rs` | starts the processes, reads their connections, kills them |
//! | `start.rs` | prepares a run |
//! | `drive.rs` | answers their questions |
//! | `state.rs` | the state of a run |
//! | `rollout.rs` | puts the ranks' completions together: rewards, samples, metrics |
//! | `failure.rs` | the failures of a job |
//! | `checkpoint.rs` | turns the trainer's checkpoints into published ones, and back |

mod checkpoint;
mod config;
mod drive;
pub mod environment;
mod failure;
mod message;
mod ranks;
mod rollout;
mod start;
mod state;
#[cfg(test)]
mod tests;

pub use environment::Environment;
pub use start::{IMAGES_DIR, train};
pub use state::TrlHost;
