//! Jobs that paused because a reward service was away go on when it is back: it is asked now and then, in its own way.
//!
//! A service (the same address, asked in the same way with the same credentials) is asked once for all jobs that wait for it.
//! Only `reward_outage` ends by itself. Which jobs wait stands in the database, so that a restart forgets none.

use std::collections::{HashMap, HashSet};
use std::mem::Discriminant;
use std::time::{Duration, Instant};

use futures::StreamExt;

use crate::causes::with_causes;
use crate::id::JobId;
use crate::reward::client::{Pace, RewardClient};
use crate::reward::webhook::Webhook;
use crate::spec::{Plan, RewardKind, RewardPlan, RewardSecrets};
use crate::store::{Store, StoreError, clock_ms};

/// Between two looks for such jobs.
const LOOK: Duration = Duration::from_secs(1);
/// From the pause (or the server's start) to the first ping; it doubles to the longest.
const FIRST_PING: Duration = Duration::from_secs(5);
const LONGEST_PING: Duration = Duration::from_secs(30);
/// Of one ping, ms.
const PING_TIMEOUT_MS: u64 = 10_000;
/// Services that are asked at once.
const AT_ONCE: usize = 8;

/// What makes two services one.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Address {
    /// How it is asked.
    kind: Discriminant<RewardKind>,
    url: String,
    secrets: Vec<String>,
}

/// A service that some job waits for.
struct Service {
    reward: RewardPlan,
    secrets: RewardSecrets,
    /// When it is asked next, and how long after that again.
    at: Instant,
    then: Duration,
    /// It answered the last time.
    is_back: bool,
}

/// A job that waits.
struct Waiting {
    /// Of its latest event: it may have got other secrets since.
    last_seq: i64,
    services: Vec<Address>,
}

/// The clients that ask services.
pub(super) struct Clients {
    pub(super) without_keys: RewardClient,
    /// Used as soon as there are keys in the database.
    pub(super) with_keys: RewardClient,
}

struct Watch {
    store: Store,
    clients: Clients,
    pace: Pace,
    jobs: HashMap<JobId, Waiting>,
    services: HashMap<Address, Service>,
}

/// Looks after such jobs for as long as the server runs.
pub(super) async fn watch(store: Store, clients: Clients) {
    let pace = clients.without_keys.pace();
    let mut interval = tokio::time::interval(pace.of(LOOK));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut watch = Watch { store, clients, pace, jobs: HashMap::new(), services: HashMap::new() };
    loop {
        interval.tick().await;
        if let Err(error) = watch.look().await {
            tracing::error!(error = with_causes(&error), "nobody looks after jobs in an outage");
        }
    }
}

impl Watch {
    async fn look(&mut self) -> Result<(), StoreError> {
        let waiting: HashMap<JobId, i64> = self.store.jobs_in_outage().await?.into_iter().collect();
        self.jobs.retain(|job, known| waiting.get(job) == Some(&known.last_seq));
        let new: Vec<(JobId, i64)> = waiting.into_iter().filter(|(job, _)| !self.jobs.contains_key(job)).collect();
        for (job, last_seq) in new {
            match services(&self.store, job).await {
                Ok(services) => self.wait_for(job, last_seq, services),
                // Whoever claims it says why, and the job fails.
                Err(error @ StoreError::Corrupt { .. }) => {
                    unasked(job, &error);
                    self.wait_for(job, last_seq, Vec::new());
                }
                // Deleted meanwhile, or the database is in trouble: the next look tells.
                Err(error) => unasked(job, &error),
            }
        }
        let used: HashSet<Address> = self.jobs.values().flat_map(|job| job.services.iter().cloned()).collect();
        self.services.retain(|address, _| used.contains(address));
        self.ask().await?;
        let back: Vec<JobId> =
            self.jobs.iter().filter(|(_, job)| self.are_back(&job.services)).map(|(job, _)| *job).collect();
        for job in back {
            self.jobs.remove(&job);
            match self.store.job_resume_after_outage(job, clock_ms()).await {
                Ok(true) => tracing::info!(%job, "its reward service is back; it is queued again"),
                Ok(false) => {}
                Err(error) => unasked(job, &error),
            }
        }
        Ok(())
    }

    /// Its services were away a moment ago, whatever they answered for others before.
    fn wait_for(&mut self, job: JobId, last_seq: i64, services: Vec<(Address, RewardPlan, RewardSecrets)>) {
        let first = self.pace.of(FIRST_PING);
        let at = Instant::now() + first;
        let mut addresses = Vec::with_capacity(services.len());
        for (address, reward, secrets) in services {
            let new = || Service { reward, secrets, at, then: first, is_back: false };
            let service = self.services.entry(address.clone()).or_insert_with(new);
            service.is_back = false;
            service.at = service.at.min(at);
            addresses.push(address);
        }
        self.jobs.insert(job, Waiting { last_seq, services: addresses });
    }

    /// Asks those whose time has come.
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
        futures::stream::iter(asked).buffer_unordered(AT_ONCE).collect::<()>().await;
        Ok(())
    }

    fn are_back(&self, services: &[Address]) -> bool {
        services.iter().all(|address| self.services.get(address).is_some_and(|service| service.is_back))
    }
}

impl Service {
    async fn ask(&mut self, client: &RewardClient, now: Instant) {
        self.then = (self.then * 2).min(client.pace().of(LONGEST_PING));
        self.at = now + self.then;
        self.is_back = is_back(&self.reward, &self.secrets, client).await;
    }
}

fn unasked(job: JobId, error: &StoreError) {
    tracing::warn!(%job, error = with_causes(error), "its reward service is not asked");
}

/// The services that can pause the job.
async fn services(store: &Store, job: JobId) -> Result<Vec<(Address, RewardPlan, RewardSecrets)>, StoreError> {
    let plan = store.job_get(job).await?.plan()?;
    let mut secrets = store.job_secrets(job).await?;
    let found = required(&plan).map(|(reward, url, name)| {
        let secrets = secrets.remove(&name).unwrap_or_default();
        let keys = [&secrets.secret, &secrets.previous_secret].map(|secret| secret.clone().unwrap_or_default());
        let headers = secrets.headers.iter().flat_map(|(name, value)| [name.clone(), value.clone()]);
        let address = Address {
            kind: std::mem::discriminant(&reward.kind),
            url: url.to_owned(),
            secrets: keys.into_iter().chain(headers).collect(),
        };
        (address, reward.clone(), secrets)
    });
    Ok(found.collect())
}

/// The rewards that can pause the job, their URLs, and the names of their secrets.
fn required(plan: &Plan) -> impl Iterator<Item = (&RewardPlan, &str, String)> {
    let all = plan.rewards_by_secret_name().filter(|(_, reward)| reward.required);
    // The process of a Python function is the worker's: the next attempt starts another one.
    let all = all.filter(|(_, reward)| !matches!(reward.kind, RewardKind::Python(_)));
    all.filter_map(|(name, reward)| Some((reward, reward.kind.service()?.url.as_str(), name)))
}

async fn is_back(reward: &RewardPlan, secrets: &RewardSecrets, client: &RewardClient) -> bool {
    let hasty = reward.kind.with_service(|service| service.timeout_ms = service.timeout_ms.min(PING_TIMEOUT_MS));
    match Webhook::sharing(&reward.name, &hasty, secrets, client) {
        Ok(webhook) => match webhook.is_reachable().await {
            Ok(()) => true,
            Err(why) => {
                tracing::debug!(reward = reward.name, why, "a reward service is still away");
                false
            }
        },
        // The worker says why, and the job fails.
        Err(error) => {
            tracing::warn!(error = with_causes(&error), "a reward service cannot be asked");
            true
        }
    }
}
