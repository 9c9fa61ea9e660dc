//! Rules that become stricter when the first API key is created: private addresses for outgoing requests, and models outside
//! `--model-root`. They are evaluated at each use, so that the first key takes effect immediately.

use std::path::PathBuf;

use super::AppState;
use super::auth::keys_are_on;
use super::error::Problem;
use crate::outgoing::OutgoingPolicy;

/// Returns the private addresses that outgoing requests may reach now, as in `--allow-outgoing`.
pub(super) async fn allow_outgoing(state: &AppState) -> Result<Vec<String>, Problem> {
    Ok(state.config.outgoing_allowed(keys_are_on(state).await?).to_vec())
}

/// Returns the current rules for addresses of rewards and webhooks.
pub(super) async fn outgoing(state: &AppState) -> Result<OutgoingPolicy, Problem> {
    let allowed = state.config.outgoing_allowed(keys_are_on(state).await?);
    OutgoingPolicy::parse(allowed).map_err(Problem::internal)
}

/// Returns the directories that models must be in now. None = anywhere.
pub(super) async fn model_roots(state: &AppState) -> Result<Option<Vec<PathBuf>>, Problem> {
    Ok(state.config.model_roots_allowed(keys_are_on(state).await?).map(<[PathBuf]>::to_vec))
}
