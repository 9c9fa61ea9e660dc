//! The runtimes beside rlood's own engine that jobs can have.

use super::AppState;
use super::error::Problem;
use crate::spec::RuntimeFacts;

/// Returns the runtimes that workers can start which are not lost.
pub(super) async fn known_runtimes(state: &AppState) -> Result<Vec<RuntimeFacts>, Problem> {
    let workers = state.store.worker_list().await?;
    Ok(workers.into_iter().filter(|worker| !worker.lost).flat_map(|worker| worker.runtimes).collect())
}
