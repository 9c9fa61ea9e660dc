//! The other side of a job's episodes: an environment's server in one of its protocols, or the job's tools.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::client::RewardClient;
use crate::environment::{EpisodeCall, Reply};
use crate::id::JobId;
use crate::journal::Journal;
use crate::openenv::OpenenvClient;
use crate::questions::Questions;
use crate::rollout::RolloutId;
use crate::spec::{ENVIRONMENT_SECRET, EnvironmentKind, EnvironmentPlan, RewardSecrets};
use crate::status::Status;
use crate::tools::ToolsClient;
use crate::webhook::EnvironmentClient;
use crate::{BuildError, RewardFailure};

/// The other side of the episodes of one job.
pub struct EpisodeServer(Kind);

enum Kind {
    Contract(Box<EnvironmentClient>),
    Tools(Box<ToolsClient>),
    Openenv(Box<OpenenvClient>),
}

/// The parts of its job that an [`EpisodeServer`] uses.
pub(crate) struct EpisodeDeps {
    pub job: JobId,
    /// Records questions and answers.
    pub journal: Option<Arc<dyn Journal>>,
    /// Receives warnings, and the number of requests that wait.
    pub status: Arc<Status>,
}

impl EpisodeServer {
    /// Creates the client of a job's environment or tools. `secrets` are all secrets of the job.
    pub(crate) fn new(
        plan: &EnvironmentPlan,
        secrets: &BTreeMap<String, RewardSecrets>,
        client: &RewardClient,
        deps: EpisodeDeps,
    ) -> Result<Self, BuildError> {
        let EpisodeDeps { job, journal, status } = deps;
        let questions = |journal| Questions { name: plan.name.clone(), job, journal };
        Ok(Self(match plan.kind {
            EnvironmentKind::Http => {
                let own = secrets.get(ENVIRONMENT_SECRET).cloned().unwrap_or_default();
                let client = EnvironmentClient::new(plan, &own, client, job)?;
                Kind::Contract(Box::new(client.with_journal(journal).with_status(status)))
            }
            EnvironmentKind::Tools => {
                Kind::Tools(Box::new(ToolsClient::new(plan, secrets, client, (questions(journal), status))?))
            }
            EnvironmentKind::Openenv => {
                let own = secrets.get(ENVIRONMENT_SECRET).cloned().unwrap_or_default();
                Kind::Openenv(Box::new(OpenenvClient::new(plan, &own, client, (questions(journal), status))?))
            }
        }))
    }

    /// Asks all these questions, as many at a time as the job's settings allow. Returns one reply for each, in order.
    ///
    /// # Errors
    /// Fails if a server is away for longer than the settings allow, cannot be used, or nothing can be recorded anymore.
    pub async fn ask(&self, rollout: RolloutId, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RewardFailure> {
        match &self.0 {
            Kind::Contract(client) => client.ask(rollout, calls).await,
            Kind::Tools(client) => client.ask(rollout, calls).await,
            Kind::Openenv(client) => client.ask(rollout, calls).await,
        }
    }

    /// Closes these episodes ([`Ask::Close`](crate::environment::Ask::Close)), as far as their servers are told. Unlike the future of
    /// [`EpisodeServer::ask`], this one can be spawned.
    pub async fn close_episodes(&self, rollout: RolloutId, calls: &[EpisodeCall]) {
        match &self.0 {
            // Best effort: an episode is over whatever the server says.
            Kind::Contract(client) => drop(client.ask(rollout, calls).await),
            Kind::Tools(client) => calls.iter().for_each(|call| client.close_episode(rollout, &call.episode)),
            Kind::Openenv(client) => calls.iter().for_each(|call| client.close_episode(rollout, &call.episode)),
        }
    }

    /// Ends the sessions with servers, as far as they answer soon.
    pub async fn close(&self) {
        match &self.0 {
            Kind::Contract(_) => {}
            Kind::Tools(client) => client.close().await,
            Kind::Openenv(client) => client.close(),
        }
    }
}
