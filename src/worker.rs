//! One process, one device: claim, engine thread, heartbeats and events, finish.

use std::process::ExitCode;

use crate::config::WorkerArgs;

/// Why a worker could not run.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {}

/// `rlood worker`.
///
/// # Errors
/// When the server refuses this worker.
pub async fn run(_args: WorkerArgs) -> Result<ExitCode, WorkerError> {
    Ok(ExitCode::SUCCESS)
}
