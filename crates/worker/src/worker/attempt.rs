//! One attempt at one job: downloads its inputs, runs the engine on its own thread, and reports the outcome.
//!
//! This file is longer than others, because all outcomes of an attempt are decided here.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::task::AbortOnDropHandle;

use super::checkpoint_schedule::CheckpointSchedule;
use super::client::{ClaimRef, Client, ClientError, MAX_OUTAGE, fetch, with_retries};
use super::clock;
use super::events::Events;
use super::failure;
use super::host::JobHost;
use super::job_models::JobModels;
use super::journal::Journal;
use super::reports::Reports;
use super::signals::{Position, Progress, StopSignal, drops_work};
use super::{EXIT_DEVICE, EXIT_GRADING, EXIT_PANIC, Worker};
use crate::device::{Device, process_memory_bytes};
use crate::engine::error::EngineError;
use crate::engine::host::{PromptRow, RunEnd, StopReason, TrainInput};
use crate::error_text::with_causes;
use crate::event::{Event, Phase};
use crate::job::Failure;
use crate::outgoing::OutgoingPolicy;
use crate::protocol::{Claim, Finish, Heartbeat, Outcome};
use crate::reward::episodes::EpisodeServer;
use crate::reward::{RewardDeps, Rewards};
use crate::reward_model::LocalRewardModels;
use crate::rollout_servers::{self, Fleet, FleetContext};
use crate::runtime::trl;
use crate::spec::{DatasetPlan, Plan, PromptKey, RuntimeName, eval_secret_name, prompt_key};

/// Minimum interval between two heartbeats to the server.
const MIN_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Time allowed for final reports when the server may be unreachable.
const FINAL_REPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Stack size of the engine's thread: autograd sorts its graph recursively, and the graph of a long sequence is deep. Only pages
/// that are touched use memory.
const ENGINE_STACK_BYTES: usize = 512 * 1024 * 1024;

/// State of one attempt at a job, shared by preparation, training and the final report.
pub(super) struct Attempt {
    pub(super) client: Client,
    pub(super) claim_ref: ClaimRef,
    stop: StopSignal,
    pub(super) progress: Progress,
    pub(super) events: Events,
}

/// The downloaded inputs of the engine: models, dataset rows, checkpoint.
struct Prepared {
    models: JobModels,
    rows: Vec<PromptRow>,
    eval_rows: Vec<PromptRow>,
    warm_up_rows: Vec<PromptRow>,
    judged_keys: Vec<PromptKey>,
    resume: Option<PathBuf>,
    initial: Option<PathBuf>,
}

/// Folder of the attempt's directory that the engine writes to.
const ENGINE_DIR: &str = "checkpoints";
/// Time limit for threads of built-in rewards to stop after the job has ended.
const GRADER_EXIT_TIMEOUT: Duration = Duration::from_secs(2);
const GRADER_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Runs a claimed job until the attempt has ended and is reported. When the worker shuts down, this stops after `leave_within`,
/// even if the server does not accept the report. Returns the exit code if the process must not run another job.
pub(super) async fn run(worker: &Worker, claim: Claim) -> Option<u8> {
    tokio::select! {
        code = run_and_report(worker, claim) => code,
        () = leaving_since(worker, worker.leave_within) => {
            tracing::warn!("the outcome of the job is not reported: the server does not answer, and this worker exits");
            None
        }
    }
}

async fn leaving_since(worker: &Worker, time: Duration) {
    worker.leaving.cancelled().await;
    tokio::time::sleep(time).await;
}

async fn run_and_report(worker: &Worker, claim: Claim) -> Option<u8> {
    let claim_ref = ClaimRef { job: claim.job, attempt: claim.attempt };
    let stop = StopSignal::new();
    let done = claim.resume.as_ref().map_or(0, |resume| resume.step);
    let progress = Progress::new(done, claim.plan.total_steps());
    let (events, delivery) = Events::start(worker.client.clone(), claim_ref, stop.clone());
    let attempt = Attempt { client: worker.client.clone(), claim_ref, stop: stop.clone(), progress, events };
    attempt.events.log(format!("attempt {} of the job begins on {} ({})", claim_ref.attempt, worker.device, worker.id));

    let leave = {
        let (leaving, stop) = (worker.leaving.clone(), stop.clone());
        AbortOnDropHandle::new(tokio::spawn(async move {
            leaving.cancelled().await;
            stop.raise(StopReason::Shutdown);
        }))
    };
    let graders = Graders::default();
    let ended = tokio::select! {
        ended = attempt.work(worker, claim, &graders) => ended,
        // The last fifth of the time until the worker must exit is reserved for the report to the server.
        () = leaving_since(worker, worker.leave_within.mul_f64(0.8)) => {
            attempt.events.log("the engine did not stop in time: work since the last checkpoint is lost");
            Err(RunEnd::Stopped(StopReason::Shutdown))
        }
    };
    drop(leave);
    let outcome = match ended {
        Ok(()) => Outcome::Succeeded,
        Err(RunEnd::Stopped(StopReason::Cancel)) => Outcome::Cancelled,
        Err(RunEnd::Stopped(StopReason::Pause { reason })) => Outcome::Paused { reason },
        Err(RunEnd::Stopped(StopReason::Shutdown)) if worker.preempted.load(Ordering::Relaxed) => Outcome::Preempted,
        Err(RunEnd::Stopped(StopReason::Shutdown)) => Outcome::Requeued,
        Err(RunEnd::Stopped(StopReason::LeaseLost)) => {
            tracing::warn!(
                job = %claim_ref.job,
                attempt = claim_ref.attempt,
                "the worker has lost its claim on the job; this attempt is discarded"
            );
            return graders.wait_until_idle().await;
        }
        Err(RunEnd::Panicked) => {
            attempt.events.log("the training engine panicked; the worker restarts");
            let _ = tokio::time::timeout(FINAL_REPORT_TIMEOUT, attempt.events.flush()).await;
            return Some(EXIT_PANIC);
        }
        Err(RunEnd::Failed(error @ (EngineError::Device(_) | EngineError::Ranks(_)))) => {
            let why = error.to_string();
            // Written to standard error, because the server keeps the last lines of it for its report about this process.
            tracing::error!(job = %claim_ref.job, attempt = claim_ref.attempt, why, "the training failed; the worker exits");
            attempt.events.log(format!("{why}; the worker restarts, and the job resumes from its last checkpoint"));
            let _ = tokio::time::timeout(FINAL_REPORT_TIMEOUT, attempt.events.flush()).await;
            return Some(EXIT_DEVICE);
        }
        Err(RunEnd::Failed(error)) => Outcome::Failed { failure: failure::of_engine(error, attempt.progress.get()) },
    };
    attempt.events.log(outcome_line(&outcome));
    // An error of `flush` has its cause in the delivery of events, whose result is checked next.
    let flushed = attempt.events.flush().await;
    let Attempt { client, progress, events, .. } = attempt;
    drop(events);
    let outcome = match (flushed, delivery.await) {
        (Ok(()), _) => outcome,
        (Err(_), Ok(Err(ClientError::LeaseLost))) => return graders.wait_until_idle().await,
        (Err(_), ended) => {
            let error = match &ended {
                Ok(Ok(())) => "the background task that sends the job's events ended".to_owned(),
                Ok(Err(error)) => with_causes(error),
                Err(error) => with_causes(error),
            };
            tracing::error!(error, "the events of the run could not be sent to the server");
            Outcome::Failed { failure: failure::events_refused(progress.get()) }
        }
    };
    let finish = Finish { attempt: claim_ref.attempt, outcome };
    match with_retries(|| client.finish(claim_ref, &finish), ClientError::is_transient).await {
        Ok(()) => tracing::info!(job = %claim_ref.job, "the attempt of the job has ended"),
        Err(error) => {
            tracing::warn!(job = %claim_ref.job, error = with_causes(&error), "the end of the attempt could not be reported to the server")
        }
    }
    graders.wait_until_idle().await
}

/// The rewards of an attempt, whose threads may still compute after the attempt has ended.
#[derive(Default)]
struct Graders(std::sync::OnceLock<Vec<Arc<Rewards>>>);

impl Graders {
    /// Waits until the threads of built-in rewards have stopped after the job has ended. Returns the exit code of the process if
    /// they do not stop.
    async fn wait_until_idle(&self) -> Option<u8> {
        let grading = || self.0.get().is_some_and(|rewards| rewards.iter().any(|rewards| rewards.is_grading()));
        let ended = async {
            while grading() {
                tokio::time::sleep(GRADER_POLL_INTERVAL).await;
            }
        };
        match tokio::time::timeout(GRADER_EXIT_TIMEOUT, ended).await {
            Ok(()) => None,
            Err(_) => {
                tracing::error!("a built-in reward of the last job still computes; the worker exits");
                Some(EXIT_GRADING)
            }
        }
    }
}

fn outcome_line(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Succeeded => "succeeded".to_owned(),
        Outcome::Failed { failure } => format!("failed: {}: {}", failure.code, failure.message),
        Outcome::Cancelled => "cancelled".to_owned(),
        Outcome::Paused { reason: Some(reason) } => format!("paused: {reason}"),
        Outcome::Paused { reason: None } => "paused".to_owned(),
        Outcome::Requeued => "requeued: the worker shuts down".to_owned(),
        Outcome::Preempted => "requeued: the worker is preempted (SIGTERM)".to_owned(),
    }
}

impl Attempt {
    async fn work(&self, worker: &Worker, mut claim: Claim, graders: &Graders) -> Result<(), RunEnd> {
        let checkpoint_schedule =
            CheckpointSchedule::new(clock::now(), claim.plan.checkpoints.every_seconds, claim.checkpoint_soon);
        let position = || self.progress.get();
        let journal = Journal::start(self.client.clone(), self.claim_ref, self.stop.clone(), claim.callbacks.clone());
        let reward_models = Arc::new(LocalRewardModels::new(&worker.device, claim.reward_models.clone(), &claim.plan));
        let rewards = Arc::new(self.build_rewards(worker, &claim, &journal, reward_models.clone())?);
        // `notices` returns its receiver to the first caller only, which is this one.
        let notices = rewards.notices().unwrap_or_else(|| mpsc::unbounded_channel().1);
        let eval_rewards = build_eval_rewards(&claim, &rewards)?.map(Arc::new);
        // The cell with the rewards is set only here, so setting it cannot fail.
        let _ = graders.0.set(std::iter::once(&rewards).chain(&eval_rewards).cloned().collect());
        let reports = Reports::start(self.client.clone(), self.claim_ref, rewards.clone(), eval_rewards.clone());
        let waits_for_servers = watch::Sender::new(false);
        let heartbeats = heartbeat_loop(
            self.client.clone(),
            self.claim_ref,
            self.stop.clone(),
            self.progress.clone(),
            rewards.clone(),
            (interval_of_heartbeats(worker, &claim.plan), waits_for_servers.subscribe()),
        );
        let _heartbeats = AbortOnDropHandle::new(tokio::spawn(heartbeats));

        let scratch = tempfile::Builder::new()
            .prefix("attempt-")
            .tempdir_in(&worker.scratch_dir)
            .map_err(|source| ClientError::Disk { doing: "create a scratch directory for the job's files", source })
            .map_err(|error| failure::of_client(&error, position()))?;
        let prepared = tokio::select! {
            prepared = self.prepare(worker, &mut claim, &journal, scratch.path()) => prepared?,
            stop = self.stop.wait_for(|_| true) => return Err(RunEnd::Stopped(stop)),
        };
        reward_models.set_verified(prepared.models.reward_dirs());
        for rewards in std::iter::once(&rewards).chain(&eval_rewards) {
            tokio::select! {
                ready = rewards.prepare() => ready.map_err(|failure| Failure { phase: Some(Phase::Loading), step: None, ..failure.to_failure(0) })?,
                stop = self.stop.wait_for(|_| true) => return Err(RunEnd::Stopped(stop)),
            }
        }
        match claim.resume.as_ref() {
            Some(resume) => self.events.log(format!("the job resumes after step {}", resume.step)),
            None => self.events.log("the job starts from the beginning"),
        }
        let (server_warnings, server_notices) = mpsc::unbounded_channel();
        let servers =
            self.rollout_servers(worker, &claim, prepared.models.base(), (server_warnings, waits_for_servers))?;
        let environment = self.environment(worker, &claim, &journal, &rewards)?;
        let host = JobHost {
            environment,
            runtime: Handle::current(),
            client: self.client.clone(),
            claim_ref: self.claim_ref,
            stop: self.stop.clone(),
            progress: self.progress.clone(),
            events: self.events.clone(),
            rewards,
            notices,
            journal: journal.clone(),
            checkpoint_schedule,
            eval_rewards,
            servers,
            server_notices,
            finishes_steps: !claim.plan.runtime.is_own(),
            begun: Default::default(),
            reward_metrics: Default::default(),
        };
        let run =
            EngineRun { claim, prepared, scratch_dir: scratch.path().join(ENGINE_DIR), device: worker.device.clone() };
        let ended = run.with_runtime(worker, host, position()).await;
        if let Err(RunEnd::Panicked) = ended {
            return ended;
        }
        // The engine's thread has ended, so nothing uses the scratch directory anymore.
        drop(scratch);
        // Reward answers that arrived while the engine was stopping are recorded in the journal, so that the next attempt does
        // not request them again.
        let _ = tokio::time::timeout(FINAL_REPORT_TIMEOUT, journal.flush()).await;
        let _ = tokio::time::timeout(FINAL_REPORT_TIMEOUT, reports.send_final()).await;
        match ended {
            Err(RunEnd::Failed(error)) => Err(self.run_end(error)),
            ended => ended,
        }
    }

    /// Builds the job's rewards. Reward services are called under the server's policy for outgoing addresses.
    fn build_rewards(
        &self,
        worker: &Worker,
        claim: &Claim,
        journal: &Journal,
        models: Arc<LocalRewardModels>,
    ) -> Result<Rewards, Failure> {
        let position = || self.progress.get();
        let policy = self.policy(claim)?;
        let client = worker.reward_client(&policy).map_err(|detail| failure::no_reward_client(&detail, position()))?;
        let cache_scope = claim.cache_scope.clone().unwrap_or_else(|| claim.job.to_string());
        let deps = RewardDeps {
            client: client.with_cache_scope(&cache_scope),
            journal: Some(Arc::new(journal.clone())),
            models: Some(models),
            previous_reports: claim.reward_reports.clone(),
        };
        Rewards::with_deps(&claim.plan.rewards, &claim.secrets, deps).map_err(|error| error.to_failure())
    }

    /// Creates the client of the job's environment or tools, which are called as rewards are.
    fn environment(
        &self,
        worker: &Worker,
        claim: &Claim,
        journal: &Journal,
        rewards: &Rewards,
    ) -> Result<Option<Arc<EpisodeServer>>, Failure> {
        let Some(plan) = &claim.plan.environment else { return Ok(None) };
        let client = worker
            .reward_client(&self.policy(claim)?)
            .map_err(|detail| failure::no_reward_client(&detail, self.progress.get()))?;
        let journal: Arc<dyn crate::reward::journal::Journal> = Arc::new(journal.clone());
        let environment = rewards.environment(plan, &claim.secrets, (&client, Some(journal)), self.claim_ref.job);
        Ok(Some(Arc::new(environment.map_err(|error| error.to_failure())?)))
    }

    /// Creates the job's rollout servers, which are called under the server's policy for outgoing addresses.
    fn rollout_servers(
        &self,
        worker: &Worker,
        claim: &Claim,
        model_dir: &Path,
        (notices, is_waiting): (mpsc::UnboundedSender<Event>, watch::Sender<bool>),
    ) -> Result<Option<Fleet>, Failure> {
        let context = FleetContext {
            job: self.claim_ref.job,
            attempt: self.claim_ref.attempt,
            folder: worker.adapter_dir.clone(),
            upload: worker.uploads_adapters.then(|| self.upload_of_adapters()),
            policy: &self.policy(claim)?,
            pace: worker.reward_pace,
            vllm_python: worker.vllm_python.clone(),
            device: worker.device.parse().unwrap_or(Device::Cpu),
            threads: worker.threads,
            model_dir,
            notices,
            is_waiting,
        };
        rollout_servers::of_plan(&claim.plan, &claim.secrets, context)
    }

    /// Returns the function that uploads an adapter, its weights first.
    fn upload_of_adapters(&self) -> rollout_servers::Upload {
        let (client, claim_ref) = (self.client.clone(), self.claim_ref);
        Arc::new(move |adapter: String, dir: PathBuf| {
            let client = client.clone();
            Box::pin(async move {
                for name in ["adapter_model.safetensors", "adapter_config.json"] {
                    let file = dir.join(name);
                    let upload = || client.upload_rollout_adapter(claim_ref, &adapter, &file);
                    with_retries(upload, ClientError::is_transient).await.map_err(|error| with_causes(&error))?;
                }
                Ok(())
            })
        })
    }

    /// Returns the server's policy for outgoing addresses.
    fn policy(&self, claim: &Claim) -> Result<OutgoingPolicy, Failure> {
        OutgoingPolicy::parse(&claim.allow_outgoing).map_err(|error| {
            let refused =
                ClientError::Refused { status: 0, code: "allow_outgoing".to_owned(), detail: error.to_string() };
            failure::of_client(&refused, self.progress.get())
        })
    }

    /// Converts an error of the engine into the reason why the attempt ended.
    fn run_end(&self, error: EngineError) -> RunEnd {
        tracing::warn!(error = with_causes(&error), "the training engine ended with an error");
        match (error, self.stop.get()) {
            (error @ EngineError::Host(_), _) => RunEnd::Failed(error),
            // After a cancel or a lost claim the engine's error does not matter, because the work is discarded anyway.
            (_, Some(stop)) if drops_work(&stop) => RunEnd::Stopped(stop),
            (error, _) if is_disk_full(&error) => {
                RunEnd::Stopped(StopReason::Pause { reason: Some("disk_full".to_owned()) })
            }
            (error, _) => RunEnd::Failed(error),
        }
    }

    async fn prepare(
        &self,
        worker: &Worker,
        claim: &mut Claim,
        journal: &Journal,
        scratch: &Path,
    ) -> Result<Prepared, Failure> {
        let (rollouts, answers) = self.check_transfer(journal.read_previous(&self.client, self.claim_ref).await)?;
        if rollouts + answers > 0 {
            self.events.log(format!(
                "the journal contains {rollouts} rollouts and {answers} reward answers since that step; they are not repeated"
            ));
        }
        let models = self.find_models(worker, claim).await?;
        let rows = self.fetch_rows(&claim.plan.dataset, scratch).await?;
        self.fetch_images(claim.plan.dataset.id, &rows, &scratch.join(ENGINE_DIR)).await?;
        let eval_rows = match &claim.plan.eval {
            // If `eval.fraction` is set, the engine takes the evaluation rows from the training rows, so none are downloaded.
            Some(eval) if eval.fraction.is_some() => Vec::new(),
            Some(eval) if eval.dataset.id == claim.plan.dataset.id => rows.clone(),
            Some(eval) => self.fetch_rows(&eval.dataset, scratch).await?,
            None => Vec::new(),
        };
        let resume = self.fetch_checkpoint(&mut claim.resume, scratch).await?;
        let done = claim.resume.as_ref().map_or(0, |resume| resume.step);
        let warm_up_rows = match &claim.plan.warm_up {
            Some(warm_up) if done < warm_up.steps => match warm_up.dataset.id == claim.plan.dataset.id {
                true => rows.clone(),
                false => self.fetch_rows(&warm_up.dataset, scratch).await?,
            },
            // The warm-up (supervised training before RLOO) has finished before the checkpoint, so its rows are not needed.
            Some(_) | None => Vec::new(),
        };
        let judged_keys = match done < claim.plan.warm_up_steps() {
            true => self.fetch_judged_keys(&claim.plan, scratch).await?,
            false => Vec::new(),
        };
        let initial = self.fetch_initial(&claim.initial, scratch).await?;
        Ok(Prepared { models, rows, eval_rows, warm_up_rows, judged_keys, resume, initial })
    }

    /// Returns the keys of the prompts that only the verdict reads, whose rows the warm-up leaves out.
    async fn fetch_judged_keys(&self, plan: &Plan, scratch: &Path) -> Result<Vec<PromptKey>, Failure> {
        let mut keys = Vec::new();
        for dataset in plan.datasets_left_out_of_warm_up() {
            let rows = self.fetch_rows(dataset, scratch).await?;
            keys.extend(rows.iter().map(|row| prompt_key(&row.prompt)));
        }
        Ok(keys)
    }

    async fn fetch_rows(&self, dataset: &DatasetPlan, scratch: &Path) -> Result<Vec<PromptRow>, Failure> {
        // Each dataset has its own file name, because a download resumes the file that it finds under its name. A dataset with
        // several uses is downloaded once: a file that is there is complete, because a failed download ends the attempt.
        let path = scratch.join(format!("{}.ndjson", dataset.id));
        if !path.exists() {
            let download = || self.client.dataset(self.claim_ref, dataset.id, &dataset.sha256, &path);
            self.check_transfer(fetch(download).await)?;
        }
        let read = tokio::task::spawn_blocking(move || read_rows(&path)).await;
        match read {
            Ok(Ok(rows)) => Ok(rows),
            Ok(Err((line, why))) => Err(failure::dataset_unreadable(line, &why, self.progress.get())),
            Err(panicked) => Err(failure::dataset_unreadable(0, &panicked.to_string(), self.progress.get())),
        }
    }

    /// Converts a failed transfer of a file into a failure of the job. If the claim is lost or the server is gone, it also requests
    /// the stop of the attempt, which ends the preparation.
    pub(super) fn check_transfer<T>(&self, result: Result<T, ClientError>) -> Result<T, Failure> {
        result.map_err(|error| {
            let is_answered = self.progress.is_server_reachable();
            if matches!(error, ClientError::LeaseLost) || (error.is_transient() && !is_answered) {
                self.stop.raise(StopReason::LeaseLost);
            }
            match &error {
                transient if transient.is_transient() && is_answered => {
                    failure::transfer_failed(transient, self.progress.get())
                }
                ClientError::Refused { status: 404 | 410, detail, .. } => {
                    failure::dataset_missing(detail, self.progress.get())
                }
                other => failure::of_client(other, self.progress.get()),
            }
        })
    }
}

/// Returns whether an engine error means that the worker's disk is full. The job then pauses, as when the server's disk is full.
fn is_disk_full(error: &EngineError) -> bool {
    matches!(error, EngineError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull)
}

/// Builds the rewards of the evaluation, if the job has separate ones. Their secrets are stored under separate names.
fn build_eval_rewards(claim: &Claim, rewards: &Rewards) -> Result<Option<Rewards>, Failure> {
    let Some(plans) = claim.plan.eval.as_ref().and_then(|eval| eval.rewards.as_ref()) else { return Ok(None) };
    let secret_of = |name: &String| Some((name.clone(), claim.secrets.get(&eval_secret_name(name))?.clone()));
    let secrets = plans.iter().filter_map(|plan| secret_of(&plan.name)).collect();
    rewards.for_evaluation(plans, &secrets).map(Some).map_err(|error| error.to_failure())
}

/// Inputs of the training that move to the engine's thread.
struct EngineRun {
    claim: Claim,
    prepared: Prepared,
    scratch_dir: PathBuf,
    device: String,
}

impl EngineRun {
    /// Trains with the runtime of the plan.
    async fn with_runtime(self, worker: &Worker, host: JobHost, position: Position) -> Result<(), RunEnd> {
        if self.claim.plan.runtime.is_own() {
            let train = worker.train;
            return self.on_thread(move |input, host| train(input, host), host).await;
        }
        let environment = worker.trl.clone().ok_or_else(|| failure::no_runtime(position))?;
        let threads = worker.threads;
        self.on_thread(move |input, host| trl::train(input, &environment, threads, host), host).await
    }

    /// Runs the engine. Returns [`RunEnd::Panicked`] when the thread panicked (its message is on standard error)
    /// or could not be started.
    async fn on_thread(
        self,
        train: impl FnOnce(TrainInput<'_>, &mut JobHost) -> Result<(), RunEnd> + Send + 'static,
        mut host: JobHost,
    ) -> Result<(), RunEnd> {
        let (sender, receiver) = oneshot::channel();
        let started =
            std::thread::Builder::new().name("engine".to_owned()).stack_size(ENGINE_STACK_BYTES).spawn(move || {
                let EngineRun { claim, prepared, scratch_dir, device } = self;
                let input = TrainInput {
                    plan: &claim.plan,
                    model_dir: prepared.models.base(),
                    model_name: &claim.model_name,
                    rows: prepared.rows,
                    eval_rows: prepared.eval_rows,
                    warm_up_rows: prepared.warm_up_rows,
                    judged_keys: prepared.judged_keys,
                    resume: prepared.resume,
                    initial_adapter: prepared.initial,
                    scratch_dir: &scratch_dir,
                    device: &device,
                    backend: None,
                };
                let ended = train(input, &mut host);
                host.close();
                drop(host);
                // Sending the result fails only during shutdown, when the receiver is dropped.
                let _ = sender.send(ended);
            });
        match started {
            Ok(_) => receiver.await.unwrap_or(Err(RunEnd::Panicked)),
            Err(error) => {
                tracing::error!(%error, "the thread of the training engine cannot be started");
                Err(RunEnd::Panicked)
            }
        }
    }
}

/// Returns the interval between heartbeats. TRL's ranks are stopped only by a signal, so a cancelled job need not wait for the usual one.
fn interval_of_heartbeats(worker: &Worker, plan: &Plan) -> Duration {
    match plan.runtime.name {
        RuntimeName::Own => worker.heartbeat(),
        RuntimeName::Trl => worker.heartbeat().min(MIN_HEARTBEAT_INTERVAL),
    }
}

/// Sends heartbeats to the server in all phases of an attempt: reports the progress, and receives the user's
/// cancel and pause requests.
async fn heartbeat_loop(
    client: Client,
    claim_ref: ClaimRef,
    stop: StopSignal,
    progress: Progress,
    rewards: Arc<Rewards>,
    (every, waits_for_servers): (Duration, watch::Receiver<bool>),
) {
    let mut answered = clock::now();
    // The first heartbeats follow each other closely, so that the server also learns the phase and the memory of an
    // attempt that ends soon.
    let mut early_interval = MIN_HEARTBEAT_INTERVAL;
    let mut waits = rewards.waiting_changes();
    loop {
        let position = progress.get();
        let waiting = *waits.borrow_and_update() > 0;
        let heartbeat = Heartbeat {
            attempt: claim_ref.attempt,
            phase: position.phase,
            status_reason: match waiting {
                true => Some("waiting_for_reward".to_owned()),
                false if *waits_for_servers.borrow() => Some("waiting_for_rollout".to_owned()),
                false => position.is_fetching_model.then(|| "fetching_model".to_owned()),
            },
            step: position.step,
            eta_s: position.eta_s(),
            memory_bytes: process_memory_bytes(),
        };
        let pause = match client.heartbeat(claim_ref, &heartbeat).await {
            Ok(reply) => {
                answered = clock::now();
                progress.record_answer();
                if let Some(requested) = reply.requested {
                    stop.request(requested);
                }
                early_interval = early_interval.saturating_mul(2);
                every.min(early_interval / 2)
            }
            Err(error) if error.is_transient() && clock::now() - answered < MAX_OUTAGE => {
                tracing::warn!(error = with_causes(&error), "the server did not answer a heartbeat");
                every.min(Duration::from_secs(1))
            }
            Err(error) => {
                tracing::warn!(error = with_causes(&error), "heartbeats stop");
                return stop.raise(StopReason::LeaseLost);
            }
        };
        // A heartbeat is sent early when the job begins or stops waiting for a reward service.
        tokio::time::sleep(pause.min(MIN_HEARTBEAT_INTERVAL)).await;
        let changed = waits.wait_for(|number| (*number > 0) != waiting);
        let _ = tokio::time::timeout(pause.saturating_sub(MIN_HEARTBEAT_INTERVAL), changed).await;
    }
}

/// Reads the rows of a dataset: one JSON object per line, with `prompt` and any other columns.
fn read_rows(path: &Path) -> Result<Vec<PromptRow>, (usize, String)> {
    let text = std::fs::read_to_string(path).map_err(|error| (0, error.to_string()))?;
    let row = |(index, line): (usize, &str)| {
        let mut columns: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| (index + 1, error.to_string()))?;
        let prompt = columns.shift_remove("prompt").ok_or_else(|| (index + 1, "the row has no 'prompt'".to_owned()))?;
        Ok(PromptRow { prompt, columns })
    };
    text.lines().enumerate().map(row).collect()
}
