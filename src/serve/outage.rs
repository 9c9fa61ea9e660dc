//! Resumes jobs that paused because a reward service, or every rollout server, was unavailable. The server pings each such service
//! until it answers. A job needs all of its reward services, but only one of its rollout servers.
//!
//! A service (the same address, contacted in the same way with the same credentials) is pinged once for all jobs that wait for it.
//! Only the reasons `reward_outage`, `rollout_outage` and `environment_outage` end automatically. The waiting jobs are in the database, so they survive a restart.

use std::collections::{HashMap, HashSet};
use std::mem::Discriminant;
use std::time::{Duration, Instant};

use futures::StreamExt;

use crate::error_text::with_causes;
use crate::id::JobId;
use crate::reward::client::{Pace, RewardClient};
use crate::reward::webhook::{EnvironmentClient, Webhook};
use crate::spec::{
    ENVIRONMENT_SECRET, EnvironmentKind, EnvironmentPlan, Plan, RewardKind, RewardPlan, RewardSecrets,
    RolloutServerPlan, ToolPlan, rollout_secret_name,
};
use crate::store::{Store, StoreError, clock_ms};

/// Interval between two checks for waiting jobs.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Delay from the pause (or the server's start) to the first ping. It doubles up to the maximum.
const FIRST_PING_DELAY: Duration = Duration::from_secs(5);
const MAX_PING_INTERVAL: Duration = Duration::from_secs(30);
/// Timeout of one ping, in ms.
const PING_TIMEOUT_MS: u64 = 10_000;
/// Maximum number of services that are pinged concurrently.
const MAX_CONCURRENT_PINGS: usize = 8;

/// Identity of a service: two rewards with equal values share one ping.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Address {
    /// Type of the reward, which determines how the service is contacted; `None` = a rollout server.
    kind: Option<Discriminant<RewardKind>>,
    url: String,
    secrets: Vec<String>,
}

/// The way in which a service is contacted.
enum Contact {
    Reward(Box<RewardPlan>),
    /// The address of a rollout server's health check.
    Rollout(String),
    /// The address of a tool, or of an environment that is no server of rlood's contract.
    Presence(String),
    /// The environment of this job.
    Environment(Box<EnvironmentPlan>, JobId),
}

/// A service that at least one paused job waits for.
struct Service {
    contact: Contact,
    secrets: RewardSecrets,
    /// Time of the next ping, and the interval to the ping after it.
    at: Instant,
    then: Duration,
    /// Whether the service answered the last ping.
    is_back: bool,
}

/// A paused job that waits for its services.
struct Waiting {
    /// Sequence number of the job's latest event: the secrets may have changed since.
    last_seq: i64,
    services: Vec<Address>,
    /// Whether the job can continue with any one of the services.
    any_is_enough: bool,
}

/// The services of a paused job, with the secrets to contact them.
#[derive(Default)]
struct Needed {
    services: Vec<(Address, Contact, RewardSecrets)>,
    any_is_enough: bool,
}

/// HTTP clients for contacting services.
pub(super) struct Clients {
    pub(super) without_keys: RewardClient,
    /// HTTP client with the stricter address rules that apply once the database contains API keys.
    pub(super) with_keys: RewardClient,
}

struct Watch {
    store: Store,
    clients: Clients,
    pace: Pace,
    jobs: HashMap<JobId, Waiting>,
    services: HashMap<Address, Service>,
}

/// Watches waiting jobs for as long as the server runs.
pub(super) async fn watch(store: Store, clients: Clients) {
    let pace = clients.without_keys.pace();
    let mut interval = tokio::time::interval(pace.of(POLL_INTERVAL));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut watch = Watch { store, clients, pace, jobs: HashMap::new(), services: HashMap::new() };
    loop {
        interval.tick().await;
        if let Err(error) = watch.check().await {
            tracing::error!(error = with_causes(&error), "could not check the jobs that wait for a service");
        }
    }
}

impl Watch {
    async fn check(&mut self) -> Result<(), StoreError> {
        let waiting: HashMap<JobId, i64> = self.store.jobs_in_outage().await?.into_iter().collect();
        self.jobs.retain(|job, known| waiting.get(job) == Some(&known.last_seq));
        let new: Vec<(JobId, i64)> = waiting.into_iter().filter(|(job, _)| !self.jobs.contains_key(job)).collect();
        for (job, last_seq) in new {
            match services(&self.store, job).await {
                Ok(services) => self.wait_for(job, last_seq, services),
                // If the job's stored settings cannot be read, the job is resumed: its next attempt reports the error, and
                // the job fails.
                Err(error @ StoreError::Corrupt { .. }) => {
                    unasked(job, &error);
                    self.wait_for(job, last_seq, Needed::default());
                }
                // The job was deleted meanwhile, or the database failed; the next check tries again.
                Err(error) => unasked(job, &error),
            }
        }
        let used: HashSet<Address> = self.jobs.values().flat_map(|job| job.services.iter().cloned()).collect();
        self.services.retain(|address, _| used.contains(address));
        self.ask().await?;
        let back: Vec<JobId> = self.jobs.iter().filter(|(_, job)| self.is_ready(job)).map(|(job, _)| *job).collect();
        for job in back {
            self.jobs.remove(&job);
            match self.store.job_resume_after_outage(job, clock_ms()).await {
                Ok(true) => tracing::info!(%job, "the service of a paused job answers again; the job is queued"),
                Ok(false) => {}
                Err(error) => unasked(job, &error),
            }
        }
        Ok(())
    }

    /// Registers a job that waits for services. They count as unavailable, whatever they answered for other jobs before.
    fn wait_for(&mut self, job: JobId, last_seq: i64, Needed { services, any_is_enough }: Needed) {
        let first = self.pace.of(FIRST_PING_DELAY);
        let at = Instant::now() + first;
        let mut addresses = Vec::with_capacity(services.len());
        for (address, contact, secrets) in services {
            let new = || Service { contact, secrets, at, then: first, is_back: false };
            let service = self.services.entry(address.clone()).or_insert_with(new);
            service.is_back = false;
            service.at = service.at.min(at);
            addresses.push(address);
        }
        self.jobs.insert(job, Waiting { last_seq, services: addresses, any_is_enough });
    }

    /// Pings the services whose next ping is due.
    async fn ask(&mut self) -> Result<(), StoreError> {
        let now = Instant::now();
        if self.services.values().all(|service| service.at > now) {
            return Ok(());
        }
        let Clients { without_keys, with_keys } = &self.clients;
        let client = if self.store.api_keys_exist().await? { with_keys } else { without_keys };
        let mut asked = Vec::new();
        for service in self.services.values_mut() {
            if service.at <= now {
                asked.push(service.ask(client, now));
            }
        }
        futures::stream::iter(asked).buffer_unordered(MAX_CONCURRENT_PINGS).collect::<()>().await;
        Ok(())
    }

    fn is_ready(&self, job: &Waiting) -> bool {
        let is_back = |address: &Address| self.services.get(address).is_some_and(|service| service.is_back);
        match job.any_is_enough && !job.services.is_empty() {
            true => job.services.iter().any(is_back),
            false => job.services.iter().all(is_back),
        }
    }
}

impl Service {
    async fn ask(&mut self, client: &RewardClient, now: Instant) {
        self.then = (self.then * 2).min(client.pace().of(MAX_PING_INTERVAL));
        self.at = now + self.then;
        self.is_back = match &self.contact {
            Contact::Reward(reward) => is_back(reward, &self.secrets, client).await,
            Contact::Environment(plan, job) => match EnvironmentClient::new(plan, &self.secrets, client, *job) {
                Ok(environment) => environment.is_reachable().await.is_ok(),
                // The worker reports the error, and the job fails.
                Err(_) => true,
            },
            Contact::Presence(url) => {
                let timeout = Duration::from_millis(PING_TIMEOUT_MS);
                client.check_presence(url, &self.secrets.headers, timeout).await.is_ok()
            }
            Contact::Rollout(url) => {
                let timeout = Duration::from_millis(PING_TIMEOUT_MS);
                client.check_answer(url, &self.secrets.headers, timeout).await.is_ok()
            }
        };
    }
}

fn unasked(job: JobId, error: &StoreError) {
    tracing::warn!(%job, error = with_causes(error), "could not ping the services of a job");
}

/// Returns the services because of which the job is paused: its required rewards, its rollout servers, or its environment.
async fn services(store: &Store, job: JobId) -> Result<Needed, StoreError> {
    let row = store.job_get(job).await?;
    let plan = row.plan()?;
    let mut secrets = store.job_secrets(job).await?;
    let any_is_enough = row.status_reason.as_deref() == Some("rollout_outage");
    let contacts: Vec<(Contact, String, String)> = match &plan.rollout {
        Some(rollout) if any_is_enough => {
            let servers = rollout.servers.iter().enumerate();
            let server = |(index, server): (usize, &RolloutServerPlan)| {
                (Contact::Rollout(format!("{}/health", server.url)), server.url.clone(), rollout_secret_name(index))
            };
            servers.map(server).collect()
        }
        _ if row.status_reason.as_deref() == Some("environment_outage") => {
            plan.environment.iter().flat_map(|environment| contacts_of(environment, job)).collect()
        }
        Some(_) | None => required(&plan)
            .map(|(reward, url, name)| (Contact::Reward(Box::new(reward.clone())), url.to_owned(), name))
            .collect(),
    };
    let found = contacts.into_iter().map(|(contact, url, name)| {
        let secrets = secrets.remove(&name).unwrap_or_default();
        let keys = [&secrets.secret, &secrets.previous_secret].map(|secret| secret.clone().unwrap_or_default());
        let headers = secrets.headers.iter().flat_map(|(name, value)| [name.clone(), value.clone()]);
        let kind = match &contact {
            Contact::Reward(reward) => Some(std::mem::discriminant(&reward.kind)),
            Contact::Rollout(_) | Contact::Presence(_) | Contact::Environment(..) => None,
        };
        let address = Address { kind, url, secrets: keys.into_iter().chain(headers).collect() };
        (address, contact, secrets)
    });
    Ok(Needed { services: found.collect(), any_is_enough })
}

/// Returns the servers of an environment or of tools, with their URLs and the names of their secrets.
fn contacts_of(plan: &EnvironmentPlan, job: JobId) -> Vec<(Contact, String, String)> {
    let url = plan.service.url.clone();
    match plan.kind {
        EnvironmentKind::Http => {
            vec![(Contact::Environment(Box::new(plan.clone()), job), url, ENVIRONMENT_SECRET.to_owned())]
        }
        EnvironmentKind::Openenv => vec![(Contact::Presence(url.clone()), url, ENVIRONMENT_SECRET.to_owned())],
        EnvironmentKind::Tools => {
            let of =
                |tool: &ToolPlan| (Contact::Presence(tool.url().to_owned()), tool.url().to_owned(), tool.secret_name());
            plan.tools.iter().map(of).collect()
        }
    }
}

/// Returns the rewards whose outage can pause the job, their URLs, and the names of their secrets.
fn required(plan: &Plan) -> impl Iterator<Item = (&RewardPlan, &str, String)> {
    let all = plan.rewards_by_secret_name().filter(|(_, reward)| reward.required);
    // The process of a Python function belongs to the worker: the next attempt starts another one.
    let all = all.filter(|(_, reward)| !matches!(reward.kind, RewardKind::Python(_)));
    all.filter_map(|(name, reward)| Some((reward, reward.kind.service()?.url.as_str(), name)))
}

async fn is_back(reward: &RewardPlan, secrets: &RewardSecrets, client: &RewardClient) -> bool {
    let hasty = reward.kind.with_service(|service| service.timeout_ms = service.timeout_ms.min(PING_TIMEOUT_MS));
    match Webhook::sharing(&reward.name, &hasty, secrets, client) {
        Ok(webhook) => match webhook.is_reachable().await {
            Ok(()) => true,
            Err(why) => {
                tracing::debug!(reward = reward.name, why, "a reward service is still unavailable");
                false
            }
        },
        // The worker reports the error, and the job fails.
        Err(error) => {
            tracing::warn!(error = with_causes(&error), "a reward service cannot be contacted");
            true
        }
    }
}
