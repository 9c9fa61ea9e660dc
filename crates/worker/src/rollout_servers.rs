//! Rollout servers: engines outside of the worker (vLLM) that sample the completions of a job with its current adapter.
//!
//! [`client`] is what any server can do, [`vllm`] how vLLM does it, [`prepare`] checks a server, [`publish`] writes adapters to the
//! folder that servers read, and [`fleet`] spreads the prompts and keeps the servers' state. Nothing here knows the training loop.

mod client;
mod fleet;
mod prepare;
mod publish;
#[cfg(test)]
mod tests;
mod vllm;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::HeaderValue;
use tokio::sync::{mpsc, watch};

use crate::event::{Event, Phase};
use crate::id::JobId;
use crate::job::{Failure, FailureClass};
use crate::outgoing::OutgoingPolicy;
use crate::reward::client::Pace;
use crate::reward::http_client::restricted_client_builder;
use crate::spec::{Plan, RewardSecrets, RolloutPlan, RolloutServerPlan, rollout_secret_name};

use client::RolloutClient;
use fleet::Settings;
pub(crate) use fleet::{Fleet, FleetError};
use prepare::Tolerance;
use vllm::Vllm;

/// What a job's servers need from the worker.
pub(crate) struct FleetContext<'a> {
    pub job: JobId,
    pub attempt: u64,
    /// The folder that worker and servers share.
    pub folder: PathBuf,
    pub policy: &'a OutgoingPolicy,
    pub pace: Pace,
    /// Receives warnings about servers.
    pub notices: mpsc::UnboundedSender<Event>,
    /// Whether the job waits because no server is usable.
    pub is_waiting: watch::Sender<bool>,
}

/// Creates the rollout servers of a job; `None` = the engine samples itself.
pub(crate) fn of_plan(
    plan: &Plan,
    secrets: &BTreeMap<String, RewardSecrets>,
    worker: FleetContext<'_>,
) -> Result<Option<Fleet>, Failure> {
    let Some(rollout) = &plan.rollout else { return Ok(None) };
    let RolloutPlan { servers, max_concurrency, timeout_s, .. } = rollout;
    let http = restricted_client_builder(worker.policy).http1_only().build().map_err(|error| {
        failure(FailureClass::Infra, "rollout_client", format!("cannot create an HTTP client: {error}"), None)
    })?;
    let mut clients: Vec<(RolloutServerPlan, Arc<dyn RolloutClient>)> = Vec::new();
    for (index, server) in servers.iter().enumerate() {
        worker.policy.check_url(&server.url).map_err(|refused| {
            let advice = "use another url, or ask the operator to add the address to --allow-outgoing";
            let message = format!("the rollout server {}: {refused}", server.url);
            failure(FailureClass::User, "rollout_address_refused", message, Some(advice))
        })?;
        let authorization =
            secrets.get(&rollout_secret_name(index)).and_then(|secrets| secrets.headers.get("authorization"));
        let authorization = authorization.and_then(|value| {
            let mut value = HeaderValue::from_str(value).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        clients.push((server.clone(), Arc::new(Vllm::new(http.clone(), &server.url, authorization))));
    }
    let settings = Settings {
        job: worker.job,
        attempt: worker.attempt,
        folder: worker.folder,
        max_concurrency: *max_concurrency as usize,
        timeout: Duration::from_secs(*timeout_s),
        tolerance: Tolerance::of(plan.training.dtype),
        pace: worker.pace,
    };
    Ok(Some(Fleet::new(settings, clients, worker.notices, worker.is_waiting)))
}

fn failure(class: FailureClass, code: &str, message: String, suggestion: Option<&str>) -> Failure {
    Failure {
        class,
        code: code.to_owned(),
        message,
        phase: Some(Phase::Rollout),
        step: None,
        suggestion: suggestion.map(str::to_owned),
    }
}

impl FleetError {
    /// Returns the job's `status_reason` for errors that pause the job; `None` for errors that fail it.
    pub(crate) fn pause_reason(&self) -> Option<&'static str> {
        match self {
            FleetError::Outage { .. } => Some("rollout_outage"),
            FleetError::Unfit(_) | FleetError::Publish { .. } => None,
        }
    }

    /// Converts this error into the failure of the job.
    pub(crate) fn to_failure(&self, step: u64) -> Failure {
        let message = crate::error_text::with_causes(self);
        let (class, code, suggestion) = match self {
            FleetError::Outage { .. } => {
                (FailureClass::Infra, "rollout_outage", "bring a rollout server back, then resume the job")
            }
            FleetError::Unfit(_) => (
                FailureClass::User,
                "rollout_servers_unfit",
                "correct what the message names on each server, then retry the job",
            ),
            FleetError::Publish { .. } => (
                FailureClass::Infra,
                "rollout_publish",
                "give the worker a folder that it can write to with --adapter-dir, then retry the job",
            ),
        };
        Failure { step: Some(step), ..failure(class, code, message, Some(suggestion)) }
    }
}
