//! What keys close: private addresses for outgoing requests, and models outside `--model-root`. Asked at each use, so that
//! the first key that is created closes them at once.

use std::path::PathBuf;

use super::AppState;
use super::auth::keys_are_on;
use super::error::Problem;
use crate::outgoing::OutgoingPolicy;

/// The private addresses that outgoing requests may reach now, as `--allow-outgoing` lists them.
pub(super) async fn allow_outgoing(state: &AppState) -> Result<Vec<String>, Problem> {
    Ok(state.config.outgoing_allowed(keys_are_on(state).await?).to_vec())
}

/// The rules for addresses of rewards and webhooks, as they are now.
pub(super) async fn outgoing(state: &AppState) -> Result<OutgoingPolicy, Problem> {
    let allowed = state.config.outgoing_allowed(keys_are_on(state).await?);
    OutgoingPolicy::parse(allowed).map_err(Problem::internal)
}

/// The directories that a model must lie under now; None = anywhere.
pub(super) async fn model_roots(state: &AppState) -> Result<Option<Vec<PathBuf>>, Problem> {
    Ok(state.config.model_roots_allowed(keys_are_on(state).await?).map(<[PathBuf]>::to_vec))
}
