//! Rollout servers: engines outside of the worker (vLLM) that sample the completions of a job with its current adapter.
//!
//! | module | content |
//! |---|---|
//! | `client` | the operations of any server, as a trait |
//! | `vllm` | these operations over vLLM's HTTP API |
//! | `colocated` | a vLLM server that the worker starts itself |
//! | `prepare` | the checks of a server |
//! | `publish` | writes adapters to the folder that servers read |
//! | `fleet` | spreads the prompts, keeps the servers' state |
//! | `requests`, `failure` | conversions of requests, and of errors to failures of the job |
//!
//! Nothing here knows the training loop.

mod client;
mod colocated;
mod failure;
mod fleet;
mod prepare;
mod publish;
mod requests;
#[cfg(test)]
mod tests;
mod vllm;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use reqwest::header::HeaderValue;
use tokio::sync::{mpsc, watch};

use crate::device::Device;
use crate::event::Event;
use crate::id::JobId;
use crate::job::{Failure, FailureClass};
use crate::outgoing::OutgoingPolicy;
use crate::reward::client::Pace;
use crate::reward::http_client::{client_builder, restricted_client_builder};
use crate::reward::signature;
use crate::spec::{Plan, RewardSecrets, RolloutPlan, RolloutServerPlan, rollout_secret_name};

use client::RolloutClient;
use colocated::{Launch, free_port};
use failure::failure;
use fleet::Settings;
pub(crate) use fleet::{Fleet, Upload};
use prepare::Tolerance;
use vllm::Vllm;

/// Facts of the worker that a job's servers need.
pub(crate) struct FleetContext<'a> {
    pub job: JobId,
    pub attempt: u64,
    /// The folder that worker and servers share.
    pub folder: PathBuf,
    pub policy: &'a OutgoingPolicy,
    pub pace: Pace,
    /// Uploads an adapter to the server, if the folder is the worker's own.
    pub upload: Option<Upload>,
    /// Python that has vLLM, for a server that the worker starts.
    pub vllm_python: Option<PathBuf>,
    pub device: Device,
    pub threads: u32,
    pub model_dir: &'a Path,
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
    let colocated = if rollout.colocate { Some(launch(plan, rollout, &worker)?) } else { None };
    let clients = match &colocated {
        Some(launch) => vec![own_server(launch)?],
        None => rollout
            .servers
            .iter()
            .enumerate()
            .map(|(index, server)| client(index, server, secrets, worker.policy))
            .collect::<Result<_, _>>()?,
    };
    let settings = Settings {
        job: worker.job,
        attempt: worker.attempt,
        folder: worker.folder,
        upload: worker.upload.filter(|_| !rollout.colocate),
        max_concurrency: rollout.max_concurrency as usize,
        timeout: Duration::from_secs(rollout.timeout_s),
        tolerance: Tolerance::of(plan.training.dtype),
        colocated,
        pace: worker.pace,
    };
    Ok(Some(Fleet::new(settings, clients, worker.notices, worker.is_waiting)))
}

/// A server and how to call it.
type Client = (RolloutServerPlan, Arc<dyn RolloutClient>);

/// Creates the client of a server that the job names.
fn client(
    index: usize,
    server: &RolloutServerPlan,
    secrets: &BTreeMap<String, RewardSecrets>,
    policy: &OutgoingPolicy,
) -> Result<Client, Failure> {
    policy.check_url(&server.url).map_err(|refused| {
        let advice = "use another url, or ask the operator to add the address to --allow-outgoing";
        let message = format!("the rollout server {}: {refused}", server.url);
        failure(FailureClass::User, "rollout_address_refused", message, Some(advice))
    })?;
    let http = restricted_client_builder(policy).http1_only().build().map_err(|error| no_client(&error))?;
    let secrets = secrets.get(&rollout_secret_name(index));
    let authorization = secrets.and_then(|secrets| secrets.headers.get("authorization"));
    let authorization = authorization.and_then(|value| sensitive(value));
    Ok((server.clone(), Arc::new(Vllm::new(http, &server.url, authorization))))
}

/// Describes the server that the worker starts itself.
fn launch(plan: &Plan, rollout: &RolloutPlan, worker: &FleetContext<'_>) -> Result<Launch, Failure> {
    let Some(python) = worker.vllm_python.clone() else {
        let advice = "ask the operator to set RLOOD_VLLM_PYTHON to a Python that has vLLM, or list rollout.servers instead of colocate";
        let message = "rollout.colocate needs vLLM, and this worker has none".to_owned();
        return Err(failure(FailureClass::User, "rollout_vllm_missing", message, Some(advice)));
    };
    let Some(lora) = plan.lora.clone() else {
        let message = "rollout servers load an adapter after every step, and this job trains all weights".to_owned();
        return Err(failure(FailureClass::User, "rollout_servers_unfit", message, Some("set lora")));
    };
    let failed = |error: std::io::Error| {
        failure(FailureClass::Infra, "rollout_client", format!("cannot start a vLLM server: {error}"), None)
    };
    Ok(Launch {
        python,
        model_dir: worker.model_dir.to_owned(),
        device: worker.device,
        dtype: plan.training.dtype,
        lora,
        memory_share: rollout.memory_share,
        threads: worker.threads,
        port: free_port().map_err(failed)?,
        key: signature::Key::generate().map_err(failed)?,
    })
}

/// Creates the client of the server that the worker starts. It is on the loopback address, whatever the policy says about that.
fn own_server(launch: &Launch) -> Result<Client, Failure> {
    let http = client_builder().build().map_err(|error| no_client(&error))?;
    let plan = RolloutServerPlan { url: format!("http://127.0.0.1:{}", launch.port), path_map: None };
    let authorization = sensitive(&format!("Bearer {}", launch.key));
    let client = Vllm::new(http, &plan.url, authorization);
    Ok((plan, Arc::new(client)))
}

fn sensitive(value: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(value).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn no_client(error: &reqwest::Error) -> Failure {
    failure(FailureClass::Infra, "rollout_client", format!("cannot create an HTTP client: {error}"), None)
}
