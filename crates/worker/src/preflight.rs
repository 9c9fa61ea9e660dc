//! `rlood probe`: runs one preflight in its own process. It reads a task from standard input (one line of JSON) and writes a
//! report to standard output. The server closes standard input when it no longer waits for the answer.
//!
//! The preflight runs the engine's training loop with a learning rate of 0, so that its measurements apply to the job. It first
//! runs one prompt to measure the time, then as many at once as a step of the job has and the time limit allows.

mod host;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;

use self::host::PreflightRun;
use rlood_types::preflight::verdict::{combined_range, range_of, verdict};
use rlood_types::preflight::{Observed, PreflightError, PreflightReport, PreflightSample, PreflightTask, median};
use serde_json::Value;
use tokio::runtime::Handle;

use crate::args::OneShotArgs;
use crate::device::Device;
use crate::doctor::OnAlert;
use crate::engine;
use crate::engine::error::EngineError;
use crate::engine::host::{PromptRow, RunEnd, TrainInput};
use crate::engine::kernels::isa::Isa;
use crate::engine::memory::peak_resident_bytes;
use crate::engine::random::{Key, Stream};
use crate::engine::rollout::num_generations;
use crate::id::JobId;
use crate::modelcard;
use crate::one_shot::{self, OneShotError, error_text};
use crate::outgoing::OutgoingPolicy;
use crate::reward::Rewards;
use crate::reward::client::RewardClient;
use crate::reward::episodes::EpisodeServer;
use crate::reward::webhook::Webhook;
use crate::reward_model::LocalRewardModels;
use crate::spec::{ComputeDtype, OnInvalid, Plan, RewardKind, RewardPlan, RewardSecrets, ServicePlan};

/// Stack size of the engine's thread: autograd sorts its graph recursively, and the graph of a long sequence is deep. Only pages
/// that are touched use memory.
const ENGINE_STACK_BYTES: usize = 512 * 1024 * 1024;
/// Maximum number of example completions in a preflight's report.
const MAX_SAMPLES: usize = 8;
/// Maximum length in characters of a prompt or completion in a preflight's report.
const MAX_SAMPLE_CHARS: usize = 4_000;
/// Maximum number of warnings in a preflight's report.
const MAX_WARNINGS: usize = 8;
/// Number of runs of the training loop at most: one prompt, then all.
const RUNS: usize = 2;
/// Fraction of the preflight's remaining time that the second, larger run is planned to take.
const HEADROOM: f64 = 0.8;
/// Time limit for `reward.ping`; shorter if the time limit of the preflight is short.
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs `rlood probe`: reads the task, runs the preflight, and writes the report. The exit code is 0 even if the
/// report contains an error.
///
/// # Errors
/// Fails when standard input has no valid task, or the report cannot be written to standard output.
pub fn run(args: OneShotArgs) -> BoxFuture<'static, Result<ExitCode, OneShotError>> {
    Box::pin(async move {
        let begun = Instant::now();
        let task: PreflightTask = one_shot::read_task()?;
        let plan = task.plan.clone();
        let card = modelcard::read(&task.model_dir);
        let deadline = begun + Duration::from_millis(task.limit_ms);
        let mut report = match measure(task, &args.device.to_string(), deadline).await {
            Ok(report) => report,
            Err(error) => PreflightReport { error: Some(error), ..PreflightReport::default() },
        };
        report.peak_memory_bytes = peak_resident_bytes();
        report.isa = isa_name(args.device, plan.training.dtype);
        report.hidden_size = card.ok().map(|card| card.config.shape().hidden_size);
        report.verdict = verdict(&report, &plan);
        one_shot::write_report(&report)?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Name of the instruction set of the CPU kernels for jobs of this precision; `None` on a GPU.
fn isa_name(device: Device, dtype: ComputeDtype) -> Option<String> {
    let isa = Isa::chosen().ok().filter(|_| device == Device::Cpu)?;
    let isa = if dtype == ComputeDtype::F32 { isa.vectors() } else { isa };
    Some(isa.name().to_owned())
}

fn failed(code: &str, message: impl std::fmt::Display) -> PreflightError {
    PreflightError { code: code.to_owned(), message: message.to_string() }
}

async fn measure(task: PreflightTask, device: &str, deadline: Instant) -> Result<PreflightReport, PreflightError> {
    let PreflightTask { plan, secrets, allow_outgoing, model_dir, reward_models, initial, mut rows, limit_ms: _ } =
        task;
    // The dataset's rows are shuffled, so that the part that fits into the preflight's time limit represents the whole dataset.
    let order = Key::new(plan.training.seed, Stream::Probe);
    rows.sort_by_key(|(row, _)| order.with(*row).bits());
    let policy = OutgoingPolicy::parse(&allow_outgoing).map_err(|error| failed("setting", error))?;
    let limited: Vec<RewardPlan> = plan.rewards.iter().map(|reward| limit_reward(reward, deadline)).collect();
    let models = LocalRewardModels::new(device, reward_models, &plan);
    let rewards = Rewards::with_models(&limited, &secrets, &policy, None, Some(Arc::new(models)))
        .map_err(|error| failed("reward_not_usable", error))?;
    rewards.prepare().await.map_err(|error| failed("reward_not_usable", error))?;
    // Each run is a job of its own for the environment: the episodes of the second one must not have the names of the first one's.
    let environments = plan.environment.iter().flat_map(|environment| [environment; RUNS]).map(|environment| {
        let client = RewardClient::new(&policy).map_err(|error| failed("environment_not_usable", error))?;
        let mut limited = environment.clone();
        limit_service(&mut limited.service, left_ms(deadline));
        let environment = rewards.environment(&limited, &secrets, (&client, None), JobId::new());
        environment.map_err(|error| failed("environment_not_usable", error))
    });
    let environments = environments.collect::<Result<Vec<_>, _>>()?;
    let scratch = tempfile::tempdir().map_err(|error| failed("scratch_error", error))?;
    let prompts = rows.iter().map(|(_, row)| prompt_row(row)).collect::<Option<Vec<PromptRow>>>();
    let prompts = prompts.ok_or_else(|| failed("prompts_invalid", "a row of the dataset has no prompt"))?;
    let ping_timeout = PING_TIMEOUT.min(deadline.saturating_duration_since(Instant::now()) / 6);
    let (ranges, remarks): (Vec<_>, Vec<_>) =
        ping_services(&limited, &secrets, &policy, ping_timeout).await.into_iter().unzip();
    let preflight = Preflight {
        runtime: Handle::current(),
        plan,
        rewards,
        environments,
        numbers: rows.iter().map(|(row, _)| *row).collect(),
        prompts,
        model_dir,
        initial,
        device: device.to_owned(),
        scratch: scratch.path().to_owned(),
        deadline,
    };
    let (sender, receiver) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("engine".to_owned())
        .stack_size(ENGINE_STACK_BYTES)
        .spawn(move || {
            // Sending the report fails only during shutdown, when the receiver is dropped.
            let _ = sender.send(preflight.run());
        })
        .map_err(|error| failed("thread", error))?;
    let mut report =
        receiver.await.map_err(|_| failed("panicked", "the training engine panicked; see the server's log"))?;
    report.reward_range = combined_range(&limited, &ranges);
    report.warnings.splice(0..0, remarks.into_iter().flatten());
    Ok(report)
}

/// Adapts a reward for the preflight: one attempt, short timeouts, and no failure that stops the other rewards.
fn limit_reward(reward: &RewardPlan, deadline: Instant) -> RewardPlan {
    // The timeout of a reward request ends before the preflight's own time limit, so that the report can say that a
    // service does not answer.
    let left_ms = left_ms(deadline);
    let kind = reward.kind.with_service(|service| limit_service(service, left_ms));
    RewardPlan { required: false, kind, ..reward.clone() }
}

/// The time limit of one request, in milliseconds.
fn left_ms(deadline: Instant) -> u64 {
    let left = deadline.saturating_duration_since(Instant::now()) / 3;
    u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1)
}

fn limit_service(service: &mut ServicePlan, left_ms: u64) {
    service.max_tries = 1;
    service.max_invalid_tries = 0;
    service.max_outage_s = 0;
    service.on_invalid = OnInvalid::Mask;
    service.timeout_ms = service.timeout_ms.min(left_ms);
    service.deadline_ms = service.deadline_ms.min(left_ms);
}

fn prompt_row(row: &serde_json::Map<String, Value>) -> Option<PromptRow> {
    let mut columns = row.clone();
    let prompt = columns.shift_remove("prompt")?;
    Some(PromptRow { prompt, columns })
}

/// Returns each reward's range of values and a warning about differences between the service and the plan. Services
/// are asked by `reward.ping`, concurrently.
async fn ping_services(
    rewards: &[RewardPlan],
    secrets: &BTreeMap<String, RewardSecrets>,
    policy: &OutgoingPolicy,
    ping_timeout: Duration,
) -> Vec<(Option<(f64, f64)>, Option<String>)> {
    let none = RewardSecrets::default();
    let asked = rewards.iter().map(|reward| async {
        let RewardKind::Webhook(webhook) = &reward.kind else { return (range_of(reward), None) };
        let most = webhook.service.max_batch_samples;
        let secrets = secrets.get(&reward.name).unwrap_or(&none);
        let Ok(webhook) = Webhook::new(&reward.name, webhook, secrets, policy) else { return (None, None) };
        let ping = tokio::time::timeout(ping_timeout, webhook.ping()).await;
        let Some(reply) = ping.ok().and_then(|ping| ping.reply) else { return (None, None) };
        let range = match reply.range.as_deref() {
            Some([low, high]) if low.is_finite() && high.is_finite() && low < high => Some((*low, *high)),
            _ => None,
        };
        let fewer = reply.max_batch_samples.filter(|takes| *takes < most).map(|takes| {
            let name = &reward.name;
            format!("reward '{name}': the service accepts {takes} samples per request, fewer than max_batch_samples ({most}): set max_batch_samples to {takes}")
        });
        (range, fewer)
    });
    futures::future::join_all(asked).await
}

/// Inputs of a preflight that move to the engine's thread.
struct Preflight {
    runtime: Handle,
    plan: Plan,
    rewards: Rewards,
    /// The environment or the tools of the job's episodes, once for each run; empty without them.
    environments: Vec<EpisodeServer>,
    /// Indices in the dataset of the rows that the preflight uses.
    numbers: Vec<u64>,
    prompts: Vec<PromptRow>,
    model_dir: PathBuf,
    initial: Option<PathBuf>,
    device: String,
    scratch: PathBuf,
    deadline: Instant,
}

impl Preflight {
    /// Runs the preflight: one prompt first, then all prompts in batches of the job's size or of the size that
    /// the time limit allows.
    fn run(&self) -> PreflightReport {
        let asked = self.prompts.len();
        let batch = (self.plan.training.prompts_per_step as usize).clamp(1, asked.max(1));
        let first = self.run_steps(1, 1, self.environments.first());
        let left = self.deadline.saturating_duration_since(Instant::now()).as_secs_f64() - first.loading_s();
        let affordable = (left * HEADROOM / first.step_s.max(1e-3)) as usize;
        let batch = batch.min(affordable);
        // If the rewards had no value for the first prompt's completions, they are not called for the other prompts.
        let scored = first.observed.iter().any(|one| one.sample.reward.is_some());
        let runs_again = first.error.is_none() && first.is_complete() && scored && batch > 0 && asked > 1;
        let (run, error) = if runs_again {
            let second = self.run_steps(batch, asked / batch, self.environments.last());
            let error = second.error.clone();
            // If the time limit stopped the second run before it had as many completions as the first one, the
            // first one is reported.
            (if second.observed.len() >= first.observed.len() { second } else { first }, error)
        } else {
            let error = first.error.clone();
            (first, error)
        };
        let mut report = self.report(&run, error);
        report.complete = report.error.is_none() && run.is_complete() && (runs_again || asked == 1);
        report
    }

    /// Runs `steps` steps of the job's training loop with `prompts_per_step` prompts each, without learning.
    fn run_steps<'p>(
        &'p self,
        prompts_per_step: usize,
        steps: usize,
        environment: Option<&'p EpisodeServer>,
    ) -> PreflightRun<'p> {
        let plan = self.plan_of_run(prompts_per_step, steps);
        let used = (prompts_per_step * steps).min(self.prompts.len());
        let mut run = PreflightRun::new(self, environment, prompts_per_step, steps);
        let input = TrainInput {
            plan: &plan,
            model_dir: &self.model_dir,
            model_name: &self.plan.model.id,
            rows: self.prompts[..used].to_vec(),
            eval_rows: Vec::new(),
            warm_up_rows: Vec::new(),
            judged_keys: Vec::new(),
            resume: None,
            initial_adapter: self.initial.clone(),
            scratch_dir: &self.scratch,
            device: &self.device,
            backend: None,
        };
        if let Err(RunEnd::Failed(error)) = engine::train(input, &mut run) {
            run.error = Some(preflight_error(&error));
        }
        run
    }

    fn plan_of_run(&self, prompts_per_step: usize, steps: usize) -> Plan {
        let mut plan = self.plan.clone();
        plan.eval = None;
        // The preflight measures the model before any warm-up (supervised training before RLOO), so the plan's warm-up is removed.
        plan.warm_up = None;
        plan.rloo.steps_per_generation = 1;
        plan.rloo.num_iterations = 1;
        // Resampling of groups without differences in reward is turned off: it would request the same few prompts again.
        plan.rloo.min_informative_groups = 0;
        plan.rloo.overlap = false;
        // Alerts and early stopping are turned off: the run is too short for them, and they must not end it.
        plan.early_stopping = None;
        plan.doctor.on_alert = OnAlert::Note;
        plan.doctor.rules.clear();
        plan.training.prompts_per_step = u32::try_from(prompts_per_step).unwrap_or(u32::MAX);
        plan.training.max_steps = steps as u64;
        // A seed of its own gives the preflight other random numbers than the job's training, although both run the same loop.
        plan.training.seed = Key::new(plan.training.seed, Stream::Probe).bits();
        plan.training.shuffle_dataset = false;
        // The rows that were chosen for the preflight are used in order, so mixing of data sources is turned off.
        plan.dataset.sources.clear();
        plan.optimizer.learning_rate = 0.0;
        plan.optimizer.weight_decay = 0.0;
        plan.checkpoints.every_steps = u64::MAX;
        plan
    }

    fn report(&self, run: &PreflightRun<'_>, error: Option<PreflightError>) -> PreflightReport {
        let names: Vec<String> = self.plan.rewards.iter().map(|reward| reward.name.clone()).collect();
        let mut report = PreflightReport { error, warnings: run.warnings.clone(), ..PreflightReport::default() };
        report.observe(&names, num_generations(&self.plan), &run.observed);
        for (name, latencies) in &run.latencies {
            let reward = report.rewards.entry(name.clone()).or_default();
            reward.latency_p50_s = median(latencies.clone());
            reward.latency_max_s = latencies.iter().copied().reduce(f64::max);
        }
        report.step_seconds = run.step_seconds();
        let total = report.step_seconds.and_then(|seconds| seconds.total);
        report.eta_s = total.map(|total| total * self.plan.training.max_steps as f64);
        report.samples = pick(&run.observed, MAX_SAMPLES);
        report
    }
}

/// Returns `count` of the scored completions at even distances, with long texts truncated.
fn pick(observed: &[Observed], count: usize) -> Vec<PreflightSample> {
    let count = count.min(observed.len());
    let cut = |text: &str| match text.char_indices().nth(MAX_SAMPLE_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    };
    let sample = |index: usize| {
        let sample = &observed[index * observed.len() / count].sample;
        PreflightSample { prompt: cut(&sample.prompt), completion: cut(&sample.completion), ..sample.clone() }
    };
    (0..count).map(sample).collect()
}

/// Converts an error of the engine into an error of the preflight's report.
fn preflight_error(error: &EngineError) -> PreflightError {
    let code = match error {
        EngineError::Host(failure) => failure.code.as_str(),
        EngineError::ModelNotFinite { .. } => "model_not_finite",
        EngineError::Model(_) => "model_invalid",
        EngineError::Prompts(_) => "prompts_invalid",
        _ => "engine",
    };
    failed(code, error_text(error))
}
