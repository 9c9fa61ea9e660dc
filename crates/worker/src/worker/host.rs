//! The engine's host inside a worker: computes rewards for the engine, and sends its events and checkpoints to the server.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::checkpoint_schedule::CheckpointSchedule;
use super::client::{ClaimRef, Client, ClientError, unless_disk_full, with_retries};
use super::clock;
use super::environments::{environment_failure, forgotten_episodes};
use super::events::Events;
use super::failure;
use super::journal::Journal;
use super::signals::{Progress, StopSignal, drops_work};
use crate::engine::error::EngineError;
use crate::engine::host::{Generated, Host, RunEnd, SampleRequest, SavedCheckpoint, Score, ScoreRequest, StopReason};
use crate::environment::{Ask, EpisodeCall, Reply};
use crate::error_text::with_causes;
use crate::event::{Event, Metrics, Phase, SamplePhase};
use crate::job::Failure;
use crate::protocol::Publish;
use crate::reward::episodes::EpisodeServer;
use crate::reward::{JobContext, RewardFailure, Rewards, Scored};
use crate::rollout::{RolloutId, SampledGroup};
use crate::rollout_servers::Fleet;
use crate::runtime::trl::TrlHost;

/// Time that a user's pause waits for rewards, if the run cannot be saved before the end of the step.
const SCORING_GRACE: Duration = Duration::from_secs(5);
/// Maximum number of times that a checkpoint is uploaded if the server rejects it.
const MAX_PUBLISH_ATTEMPTS: u32 = 5;

/// Time limit for unloading a job's adapters from rollout servers, and for closing sessions, at the end of an attempt.
const SERVERS_FINISH_TIMEOUT: Duration = Duration::from_secs(5);

/// Implements [`Host`] (the engine's callbacks) for one attempt at a job. The methods run on the engine's thread and block until
/// the async tasks have finished.
pub(super) struct JobHost {
    pub(super) runtime: Handle,
    pub(super) client: Client,
    pub(super) claim_ref: ClaimRef,
    pub(super) stop: StopSignal,
    pub(super) progress: Progress,
    pub(super) events: Events,
    pub(super) rewards: Arc<Rewards>,
    /// Warnings that rewards send while a rollout is being scored.
    pub(super) notices: mpsc::UnboundedReceiver<Event>,
    pub(super) journal: Journal,
    pub(super) checkpoint_schedule: CheckpointSchedule,
    /// Rewards of the evaluation, if the job has separate ones.
    pub(super) eval_rewards: Option<Arc<Rewards>>,
    /// Whether a pause waits a little for rewards that are being computed, because the run cannot be saved inside a step.
    pub(super) finishes_steps: bool,
    /// Tasks that compute rewards of a rollout while the engine does other work; cancelled when the host is dropped.
    pub(super) begun: HashMap<RolloutId, AbortOnDropHandle<Result<Scored, RewardFailure>>>,
    /// The servers that sample the job's completions; `None` = the engine samples.
    pub(super) servers: Option<Fleet>,
    /// The environment of the job's episodes, or its tools, if it has any.
    pub(super) environment: Option<Arc<EpisodeServer>>,
    /// Warnings of these servers while a rollout is being sampled.
    pub(super) server_notices: mpsc::UnboundedReceiver<Event>,
    /// Reward metrics of the current step, for training and for evaluation, until the step's metrics are sent.
    pub(super) reward_metrics: [Metrics; 2],
}

impl JobHost {
    /// Requests the stop of the attempt and returns it as the end of the run.
    fn stop_with(&self, stop: StopReason) -> RunEnd {
        self.stop.raise(stop.clone());
        RunEnd::Stopped(stop)
    }

    fn run_end_of(&mut self, error: &ClientError) -> RunEnd {
        match error {
            ClientError::StorageFull { detail } => {
                self.events.log(format!("the server's storage is full: {detail}"));
                self.stop_with(StopReason::Pause { reason: Some("disk_full".to_owned()) })
            }
            ClientError::LeaseLost => self.stop_with(StopReason::LeaseLost),
            transient if transient.is_transient() && self.progress.is_server_reachable() => {
                failure::transfer_failed(transient, self.progress.get()).into()
            }
            transient if transient.is_transient() => self.stop_with(StopReason::LeaseLost),
            other => failure::of_client(other, self.progress.get()).into(),
        }
    }

    fn send(&mut self, event: Event) -> Result<(), RunEnd> {
        self.events.send(event).map_err(|_| self.undelivered())
    }

    /// Returns the end of the run after events could not be sent. If no stop was requested, the attempt takes the reason from the
    /// result of the task that sends events.
    fn undelivered(&mut self) -> RunEnd {
        match self.stop.get() {
            Some(stop) if drops_work(&stop) => RunEnd::Stopped(stop),
            Some(_) | None => failure::events_refused(self.progress.get()).into(),
        }
    }

    /// Returns the end of the run after the journal could not be written.
    fn unrecorded(&mut self) -> RunEnd {
        let journal = self.journal.clone();
        match (self.stop.get(), journal.failure()) {
            (Some(stop), _) => RunEnd::Stopped(stop),
            (None, Some(error)) => self.run_end_of(error),
            (None, None) => self.stop_with(StopReason::LeaseLost),
        }
    }

    async fn publish(&self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), ClientError> {
        let mut tries = 1;
        loop {
            match self.publish_once(checkpoint).await {
                // A server that was restarted has removed the uploaded files of unpublished checkpoints, so
                // they are uploaded again.
                Err(error @ ClientError::Refused { status: 422, .. }) if tries < MAX_PUBLISH_ATTEMPTS => {
                    tracing::warn!(
                        step = checkpoint.step,
                        error = with_causes(&error),
                        "the server rejected the checkpoint; uploading it again"
                    );
                    tries += 1;
                }
                other => return other,
            }
        }
    }

    async fn publish_once(&self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), ClientError> {
        for file in checkpoint.files {
            with_retries(
                || self.client.upload(self.claim_ref, checkpoint.step, checkpoint.dir, file),
                unless_disk_full,
            )
            .await?;
        }
        let publish = Publish {
            attempt: self.claim_ref.attempt,
            files: checkpoint.files.to_vec(),
            metrics: checkpoint.metrics.clone(),
            temporary: self.checkpoint_schedule.is_temporary(),
        };
        with_retries(|| self.client.publish(self.claim_ref, checkpoint.step, &publish), unless_disk_full)
            .await
            .map(drop)
    }
}

impl Host for JobHost {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        let (job, rewards) = self.scoring_context(request.id);
        let begun = self.begun.remove(&request.id);
        let runtime = self.runtime.clone();
        let scored = runtime.block_on(async {
            let mut scoring = std::pin::pin!(async {
                match begun {
                    None => rewards.score(&job, request.samples).await,
                    // A panic of the task that computes the rewards continues on this thread.
                    Some(task) => task.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic())),
                }
            });
            loop {
                tokio::select! {
                    biased;
                    stop = stop_of_scoring(&self.stop, self.finishes_steps) => break Err(stop),
                    scored = &mut scoring => break Ok(scored),
                    Some(notice) = self.notices.recv() => {
                        log_warning(&self.events, &notice);
                        // If the warning cannot be sent, the attempt is stopped, which also ends this loop.
                        let _ = self.events.send(notice);
                    }
                }
            }
        });
        while let Ok(notice) = self.notices.try_recv() {
            log_warning(&self.events, &notice);
            self.send(notice)?;
        }
        let scored = match scored {
            Ok(Ok(scored)) => scored,
            Ok(Err(failure)) => return Err(self.on_reward_failure(&failure, request.id.step)),
            Err(stop) => return Err(RunEnd::Stopped(stop)),
        };
        for warning in scored.warnings {
            self.send(warning)?;
        }
        self.reward_metrics[phase_index(request.id.phase)].extend(scored.metrics);
        Ok(scored.scores)
    }

    fn begin_score(&mut self, request: &ScoreRequest<'_>) -> Result<(), RunEnd> {
        let (job, rewards) = self.scoring_context(request.id);
        let samples = request.samples.to_vec();
        let task = self.runtime.spawn(async move { rewards.score(&job, &samples).await });
        self.begun.insert(request.id, AbortOnDropHandle::new(task));
        Ok(())
    }

    fn event(&mut self, mut event: Event) -> Result<(), RunEnd> {
        match &mut event {
            Event::Phase { phase, .. } => self.progress.enter(*phase),
            Event::Step { step, kind, metrics } => {
                let prefix = match kind {
                    SamplePhase::Train => "",
                    SamplePhase::Eval => "eval_",
                };
                let rewards = std::mem::take(&mut self.reward_metrics[phase_index(*kind)]);
                metrics.extend(rewards.into_iter().map(|(name, value)| (format!("{prefix}{name}"), value)));
                if *kind == SamplePhase::Train {
                    metrics.extend(self.servers.iter_mut().flat_map(Fleet::take_metrics));
                    self.progress.complete_step(*step);
                }
                self.events.log(step_line(*step, *kind, metrics));
            }
            Event::Samples { .. } => {}
            Event::Warning { .. } | Event::Reward { .. } => log_warning(&self.events, &event),
            Event::Alert { alert } => {
                self.events.log(format!("alert {}: {}; fix: {}", alert.rule.as_str(), alert.message, alert.fix));
            }
            Event::AlertCleared { rule, raised_step, step } => {
                self.events.log(format!("alert {} of step {raised_step} was cleared at step {step}", rule.as_str()));
            }
            Event::TrainingPhase { change } => {
                self.events.log(format!("the training is now in the phase {:?}", change.phase))
            }
            Event::Diverged { first_step, step } => {
                self.events.log(format!(
                    "the training diverged: loss or gradients were not finite in steps {first_step} to {step}"
                ));
            }
            Event::EarlyStopping { step, metric, evaluations, .. } => self.events.log(format!(
                "early stopping after step {step}: {metric} had no new best for {evaluations} evaluations"
            )),
        }
        self.send(event)
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        self.progress.enter(Phase::Checkpoint);
        let published = self.runtime.block_on(async {
            tokio::select! {
                // The events of the steps before the checkpoint are sent first, because a resumed attempt does not send them again.
                published = async {
                    match self.events.flush().await {
                        Ok(()) => Some(self.publish(checkpoint).await),
                        Err(_) => None,
                    }
                } => Ok(published),
                stop = self.stop.wait_for(drops_work) => Err(stop),
            }
        });
        match published {
            Ok(Some(Ok(()))) => {
                self.journal.drop_covered(checkpoint.step);
                self.checkpoint_schedule.published(clock::now());
                self.events.log(format!("checkpoint of step {} published", checkpoint.step));
                Ok(())
            }
            Ok(Some(Err(error))) => Err(self.run_end_of(&error)),
            Ok(None) => Err(self.undelivered()),
            Err(stop) => Err(RunEnd::Stopped(stop)),
        }
    }

    fn stop(&self) -> Option<StopReason> {
        self.stop.get()
    }

    fn recorded(&mut self, id: RolloutId) -> Result<Option<Vec<SampledGroup>>, RunEnd> {
        Ok(self.journal.rollout(id).map(|(groups, _)| groups))
    }

    fn sampled(&mut self, id: RolloutId, groups: &[SampledGroup]) -> Result<(), RunEnd> {
        if self.journal.failure().is_some() {
            return Err(self.unrecorded());
        }
        self.journal.sampled(id, groups, &[]);
        Ok(())
    }

    fn sample(&mut self, request: &SampleRequest<'_>) -> Result<Vec<Vec<Generated>>, RunEnd> {
        let Some(servers) = &mut self.servers else {
            return Err(RunEnd::Failed(EngineError::Input("the job has no rollout servers".to_owned())));
        };
        let sampled = self.runtime.block_on(async {
            let mut sampling = std::pin::pin!(servers.sample(request));
            loop {
                tokio::select! {
                    biased;
                    stop = self.stop.wait_for(|_| true) => break Err(stop),
                    sampled = &mut sampling => break Ok(sampled),
                    Some(notice) = self.server_notices.recv() => {
                        log_warning(&self.events, &notice);
                        // If the warning cannot be sent, the attempt is stopped, which also ends this loop.
                        let _ = self.events.send(notice);
                    }
                }
            }
        });
        while let Ok(notice) = self.server_notices.try_recv() {
            log_warning(&self.events, &notice);
            self.send(notice)?;
        }
        match sampled {
            Ok(Ok(sampled)) => Ok(sampled),
            Ok(Err(error)) => {
                let step = request.id.step;
                Err(self.pause_or_fail(error.pause_reason(), error.to_failure(step), step))
            }
            Err(stop) => Err(RunEnd::Stopped(stop)),
        }
    }

    fn environment(&mut self, id: RolloutId, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RunEnd> {
        let Some(environment) = self.environment.clone() else {
            return Err(RunEnd::Failed(EngineError::Input("the job has no environment".to_owned())));
        };
        if calls.iter().all(|call| matches!(call.ask, Ask::Close(_))) {
            // Nothing depends on the answers, so a slow server does not hold up the training.
            let closing = calls.to_vec();
            drop(self.runtime.spawn(async move { environment.close_episodes(id, &closing).await }));
            return Ok(vec![Reply::Closed; calls.len()]);
        }
        let started = Instant::now();
        let replies = self.runtime.block_on(async {
            let mut asking = std::pin::pin!(environment.ask(id, calls));
            loop {
                tokio::select! {
                    biased;
                    stop = self.stop.wait_for(|_| true) => break Err(stop),
                    replies = &mut asking => break Ok(replies),
                    Some(notice) = self.notices.recv() => {
                        log_warning(&self.events, &notice);
                        // If the warning cannot be sent, the attempt is stopped, which also ends this loop.
                        let _ = self.events.send(notice);
                    }
                }
            }
        });
        let seconds = self.reward_metrics[phase_index(id.phase)].entry("environment/seconds".to_owned()).or_default();
        *seconds = Some(seconds.unwrap_or(0.0) + started.elapsed().as_secs_f64());
        match replies {
            Ok(Ok(replies)) => {
                if let Some(warning) = forgotten_episodes(id, calls, &replies) {
                    self.event(warning)?;
                }
                Ok(replies)
            }
            Ok(Err(RewardFailure::JournalClosed { .. })) => Err(self.unrecorded()),
            Ok(Err(failure)) => {
                let reason = matches!(failure, RewardFailure::Outage { .. }).then_some("environment_outage");
                Err(self.pause_or_fail(reason, environment_failure(&failure, id.step), id.step))
            }
            Err(stop) => Err(RunEnd::Stopped(stop)),
        }
    }

    fn wants_checkpoint(&self) -> bool {
        self.checkpoint_schedule.is_due(clock::now(), self.journal.is_large())
    }
}

impl TrlHost for JobHost {
    fn recorded_by_ranks(&mut self, id: RolloutId) -> Option<(Vec<SampledGroup>, Vec<Value>)> {
        self.journal.rollout(id)
    }

    fn sampled_by_ranks(&mut self, id: RolloutId, groups: &[SampledGroup], samplers: &[Value]) -> Result<(), RunEnd> {
        if self.journal.failure().is_some() {
            return Err(self.unrecorded());
        }
        self.journal.sampled(id, groups, samplers);
        Ok(())
    }
}

impl JobHost {
    /// Ends the use of rollout servers and of the environment, as far as the servers answer in time.
    pub(super) fn close(&mut self) {
        if let Some(environment) = self.environment.take() {
            let close = async { tokio::time::timeout(SERVERS_FINISH_TIMEOUT, environment.close()).await };
            // A server that does not answer ends the sessions by itself.
            let _ = self.runtime.block_on(close);
        }
        if let Some(servers) = self.servers.take() {
            let finish = async { tokio::time::timeout(SERVERS_FINISH_TIMEOUT, servers.finish()).await };
            let finished = self.runtime.block_on(finish);
            if finished.is_err() {
                self.events.log("the rollout servers did not unload the job's adapters in time");
            }
        }
    }

    /// Returns the job and rollout of a scoring request, and the rewards that score it: those of the training or of the evaluation.
    fn scoring_context(&self, id: RolloutId) -> (JobContext, Arc<Rewards>) {
        let rewards = match id.phase {
            SamplePhase::Train => &self.rewards,
            SamplePhase::Eval => self.eval_rewards.as_ref().unwrap_or(&self.rewards),
        };
        (JobContext { job: self.claim_ref.job, rollout: id, probe: false }, rewards.clone())
    }

    fn on_reward_failure(&mut self, failure: &RewardFailure, step: u64) -> RunEnd {
        if matches!(failure, RewardFailure::JournalClosed { .. }) {
            return self.unrecorded();
        }
        self.pause_or_fail(failure.pause_reason(), failure.to_failure(step), step)
    }

    /// Pauses the job for this reason; without one, fails it.
    fn pause_or_fail(&mut self, reason: Option<&'static str>, explained: Failure, step: u64) -> RunEnd {
        let Some(reason) = reason else {
            self.events.log(&explained.message);
            return explained.into();
        };
        // The job's pause contains only a code, so a warning with the full message is sent before it.
        let data = json!({ "suggestion": explained.suggestion, "step": step });
        let warning = Event::Warning { code: reason.to_owned(), message: explained.message, data };
        match self.event(warning) {
            Ok(()) => self.stop_with(StopReason::Pause { reason: Some(reason.to_owned()) }),
            Err(error) => error,
        }
    }
}

fn log_warning(events: &Events, event: &Event) {
    match event {
        Event::Warning { code, message, .. } => events.log(format!("warning {code}: {message}")),
        Event::Reward { change, message, .. } => events.log(format!("{}: {message}", change.event())),
        _ => {}
    }
}

/// Waits for a stop that ends the scoring of a rollout.
async fn stop_of_scoring(signal: &StopSignal, finishes_steps: bool) -> StopReason {
    let stop = signal.wait_for(|_| true).await;
    if finishes_steps && stop == (StopReason::Pause { reason: None }) {
        let stronger = signal.wait_for(|stop| !matches!(stop, StopReason::Pause { .. }));
        return tokio::time::timeout(SCORING_GRACE, stronger).await.unwrap_or(stop);
    }
    stop
}

fn phase_index(phase: SamplePhase) -> usize {
    match phase {
        SamplePhase::Train => 0,
        SamplePhase::Eval => 1,
    }
}

/// Formats the line of the job's log about a step: `step 12 reward 0.5000 kl 0.0031 …`, with the most important metrics.
fn step_line(step: u64, kind: SamplePhase, metrics: &Metrics) -> String {
    let (word, prefix) = match kind {
        SamplePhase::Train => ("step", ""),
        SamplePhase::Eval => ("eval after step", "eval_"),
    };
    let mut line = format!("{word} {step}");
    for name in ["reward", "reward_std", "kl", "loss", "grad_norm", "warm_up/loss"] {
        if let Some(Some(value)) = metrics.get(&format!("{prefix}{name}")) {
            line.push_str(&format!(" {name} {value:.4}"));
        }
    }
    line
}
