//! Jobs that paused because a reward service was away go on when it is back: it is asked now and then, in its own way.
//!
//! Only `reward_outage` ends by itself. Which jobs wait stands in the database, so that a restart forgets none.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures::StreamExt;

use crate::id::JobId;
use crate::reward::client::RewardClient;
use crate::reward::webhook::Webhook;
use crate::spec::{Plan, RewardPlan, RewardSecrets, eval_secret_name};
use crate::store::{Store, StoreError, clock_ms};

/// Between two looks for such jobs.
const LOOK: Duration = Duration::from_secs(1);
/// From the pause (or the server's start) to the first ping; it doubles to the longest.
const FIRST_PING: Duration = Duration::from_secs(5);
const LONGEST_PING: Duration = Duration::from_secs(30);
/// Of one ping, ms.
const PING_TIMEOUT_MS: u64 = 10_000;
/// Jobs whose services are asked at once.
const AT_ONCE: usize = 8;

/// When a job's services are asked next, and how long after that again.
struct Due {
    at: Instant,
    then: Duration,
}

/// Looks after such jobs for as long as the server runs.
pub(super) async fn watch(store: Store, client: RewardClient) {
    let pace = client.pace();
    let mut due: HashMap<JobId, Due> = HashMap::new();
    let mut interval = tokio::time::interval(pace.of(LOOK));
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let waiting = match store.jobs_in_outage().await {
            Ok(waiting) => waiting,
            Err(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "nobody looks after jobs in an outage");
                continue;
            }
        };
        due.retain(|job, _| waiting.contains(job));
        let mut asked = Vec::new();
        for job in waiting {
            let first = pace.of(FIRST_PING);
            let due = due.entry(job).or_insert_with(|| Due { at: Instant::now() + first, then: first });
            if due.at <= Instant::now() {
                due.then = (due.then * 2).min(pace.of(LONGEST_PING));
                due.at = Instant::now() + due.then;
                asked.push(job);
            }
        }
        let looks = asked.into_iter().map(|job| look_after(&store, &client, job));
        futures::stream::iter(looks).buffer_unordered(AT_ONCE).collect::<()>().await;
    }
}

async fn look_after(store: &Store, client: &RewardClient, job: JobId) {
    match resume_if_back(store, client, job).await {
        Ok(true) => tracing::info!(%job, "its reward service is back; it is queued again"),
        Ok(false) => {}
        // Deleted meanwhile, or the database is in trouble: the next look tells.
        Err(error) => tracing::warn!(%job, error = &error as &dyn std::error::Error, "its reward service is not asked"),
    }
}

async fn resume_if_back(store: &Store, client: &RewardClient, job: JobId) -> Result<bool, StoreError> {
    let plan = store.job_get(job).await?.plan()?;
    let secrets = store.job_secrets(job).await?;
    let none = RewardSecrets::default();
    for (reward, secret_name) in services(&plan) {
        let secrets = secrets.get(&secret_name).unwrap_or(&none);
        if !is_back(reward, secrets, client, job).await {
            return Ok(false);
        }
    }
    store.job_resume_after_outage(job, clock_ms()).await
}

/// The rewards that can pause the job, and the names of their secrets.
fn services(plan: &Plan) -> impl Iterator<Item = (&RewardPlan, String)> {
    let of_eval = plan.eval.iter().filter_map(|eval| eval.rewards.as_ref()).flatten();
    let of_eval = of_eval.map(|reward| (reward, eval_secret_name(&reward.name)));
    let of_job = plan.rewards.iter().map(|reward| (reward, reward.name.clone()));
    of_job.chain(of_eval).filter(|(reward, _)| reward.required && reward.kind.service().is_some())
}

async fn is_back(reward: &RewardPlan, secrets: &RewardSecrets, client: &RewardClient, job: JobId) -> bool {
    let hasty = reward.kind.with_service(|service| service.timeout_ms = service.timeout_ms.min(PING_TIMEOUT_MS));
    match Webhook::sharing(&reward.name, &hasty, secrets, client) {
        Ok(webhook) => match webhook.is_there().await {
            Ok(()) => true,
            Err(why) => {
                tracing::debug!(%job, reward = reward.name, why, "a reward service is still away");
                false
            }
        },
        // The worker says why, and the job fails.
        Err(error) => {
            tracing::warn!(%job, %error, "a reward service cannot be asked");
            true
        }
    }
}
