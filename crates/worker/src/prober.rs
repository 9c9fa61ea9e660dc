//! `rlood probe`: one preflight in a process of its own. A task on standard input (one line of JSON), a report on
//! standard output, then the end; standard input stays open as long as the server wants the answer.
//!
//! The probe runs the engine's own loop with a learning rate of 0, so that what it measures is what the job will do: first
//! one prompt, to learn how long it takes, then as many at once as a step of the job has and as the time limit permits.

mod look;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::look::Look;
use serde_json::Value;
use tokio::runtime::Handle;

use crate::args::ProbeArgs;
use crate::device::Device;
use crate::doctor::OnAlert;
use crate::engine;
use crate::engine::error::EngineError;
use crate::engine::host::{PromptRow, RunEnd, TrainInput};
use crate::engine::kernels::isa::Isa;
use crate::engine::memory::peak_resident_bytes;
use crate::engine::random::{Key, Stream};
use crate::engine::rollout::num_generations;
use crate::modelcard;
use crate::one_shot::{self, OneShotError, error_text};
use crate::outgoing::OutgoingPolicy;
use crate::probe::verdict::{combined_range, range_of, verdict};
use crate::probe::{Observed, ProbeError, ProbeReport, ProbeTask, ProbedSample, median};
use crate::reward::Rewards;
use crate::reward::webhook::Webhook;
use crate::reward_model::LocalRewardModels;
use crate::spec::{ComputeDtype, OnInvalid, Plan, RewardKind, RewardPlan, RewardSecrets};

/// The graph of a long sequence is sorted recursively; only what is touched is ever backed by memory.
const ENGINE_STACK_BYTES: usize = 512 * 1024 * 1024;
/// Completions shown in a report.
const MAX_SAMPLES: usize = 8;
/// Characters of a prompt or a completion in a report.
const MAX_SAMPLE_CHARS: usize = 4_000;
/// Warnings of rewards in a report.
const MAX_WARNINGS: usize = 8;
/// Part of the time left that a run may be expected to take.
const HEADROOM: f64 = 0.8;
/// Longest wait for `reward.ping`; less where the time limit is short.
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// `rlood probe`: reads a task, measures, writes the report; code 0 also when the report says that nothing could be measured.
///
/// # Errors
/// When there is no task to read, or nobody to write to.
pub async fn run(args: ProbeArgs) -> Result<ExitCode, OneShotError> {
    let begun = Instant::now();
    let task: ProbeTask = one_shot::take_task()?;
    let plan = task.plan.clone();
    let card = modelcard::read(&task.model_dir);
    let deadline = begun + Duration::from_millis(task.limit_ms);
    let mut report = match measure(task, &args.device.to_string(), deadline).await {
        Ok(report) => report,
        Err(error) => ProbeReport { error: Some(error), ..ProbeReport::default() },
    };
    report.peak_memory_bytes = peak_resident_bytes();
    report.isa = isa_of(args.device, plan.training.dtype);
    report.hidden_size = card.ok().map(|card| card.config.shape().hidden_size);
    report.verdict = verdict(&report, &plan);
    one_shot::give_report(&report)?;
    Ok(ExitCode::SUCCESS)
}

/// The instruction set of the processor's kernels that a job of this precision computes with; `None` on a GPU.
fn isa_of(device: Device, dtype: ComputeDtype) -> Option<String> {
    let isa = Isa::chosen().ok().filter(|_| device == Device::Cpu)?;
    let isa = if dtype == ComputeDtype::F32 { isa.vectors() } else { isa };
    Some(isa.name().to_owned())
}

fn failed(code: &str, message: impl std::fmt::Display) -> ProbeError {
    ProbeError { code: code.to_owned(), message: message.to_string() }
}

async fn measure(task: ProbeTask, device: &str, deadline: Instant) -> Result<ProbeReport, ProbeError> {
    let ProbeTask { plan, secrets, allow_outgoing, model_dir, reward_models, initial, mut rows, limit_ms: _ } = task;
    // In no order of theirs: what fits into the time limit then speaks for the whole dataset.
    let order = Key::new(plan.training.seed, Stream::Probe);
    rows.sort_by_key(|(row, _)| order.with(*row).bits());
    let policy = OutgoingPolicy::parse(&allow_outgoing).map_err(|error| failed("setting", error))?;
    let hasty: Vec<RewardPlan> = plan.rewards.iter().map(|reward| hasty_reward(reward, deadline)).collect();
    let models = LocalRewardModels::new(device, reward_models, &plan);
    let rewards = Rewards::with_models(&hasty, &secrets, &policy, None, Some(Arc::new(models)))
        .map_err(|error| failed("reward_not_usable", error))?;
    rewards.prepare().await.map_err(|error| failed("reward_not_usable", error))?;
    let scratch = tempfile::tempdir().map_err(|error| failed("scratch_error", error))?;
    let prompts = rows.iter().map(|(_, row)| prompt_row(row)).collect::<Option<Vec<PromptRow>>>();
    let prompts = prompts.ok_or_else(|| failed("prompts_invalid", "a row has no prompt"))?;
    let patience = PING_TIMEOUT.min(deadline.saturating_duration_since(Instant::now()) / 6);
    let (ranges, remarks): (Vec<_>, Vec<_>) = greet(&hasty, &secrets, &policy, patience).await.into_iter().unzip();
    let probe = Probe {
        runtime: Handle::current(),
        plan,
        rewards,
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
            // The receiver is gone only when the process ends.
            let _ = sender.send(probe.run());
        })
        .map_err(|error| failed("thread", error))?;
    let mut report = receiver.await.map_err(|_| failed("panicked", "the engine panicked; see the server's log"))?;
    report.reward_range = combined_range(&hasty, &ranges);
    report.warnings.splice(0..0, remarks.into_iter().flatten());
    Ok(report)
}

/// The reward as a probe asks it: one try, no long waits, and no failure that stops the other rewards.
fn hasty_reward(reward: &RewardPlan, deadline: Instant) -> RewardPlan {
    // A service that hangs is told from one that is slow while there is time left to say so.
    let left = deadline.saturating_duration_since(Instant::now()) / 3;
    let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1);
    let kind = reward.kind.with_service(|service| {
        service.max_tries = 1;
        service.max_invalid_tries = 0;
        service.max_outage_s = 0;
        service.on_invalid = OnInvalid::Mask;
        service.timeout_ms = service.timeout_ms.min(left_ms);
        service.deadline_ms = service.deadline_ms.min(left_ms);
    });
    RewardPlan { required: false, kind, ..reward.clone() }
}

fn prompt_row(row: &serde_json::Map<String, Value>) -> Option<PromptRow> {
    let mut columns = row.clone();
    let prompt = columns.shift_remove("prompt")?;
    Some(PromptRow { prompt, columns })
}

/// What each reward says of itself: its smallest and largest value, and what is at odds with the plan. Services are asked by
/// `reward.ping`, all at once.
async fn greet(
    rewards: &[RewardPlan],
    secrets: &BTreeMap<String, RewardSecrets>,
    policy: &OutgoingPolicy,
    patience: Duration,
) -> Vec<(Option<(f64, f64)>, Option<String>)> {
    let none = RewardSecrets::default();
    let asked = rewards.iter().map(|reward| async {
        let RewardKind::Webhook(webhook) = &reward.kind else { return (range_of(reward), None) };
        let most = webhook.service.max_batch_samples;
        let secrets = secrets.get(&reward.name).unwrap_or(&none);
        let Ok(webhook) = Webhook::new(&reward.name, webhook, secrets, policy) else { return (None, None) };
        let ping = tokio::time::timeout(patience, webhook.ping()).await;
        let Some(reply) = ping.ok().and_then(|ping| ping.reply) else { return (None, None) };
        let range = match reply.range.as_deref() {
            Some([low, high]) if low.is_finite() && high.is_finite() && low < high => Some((*low, *high)),
            _ => None,
        };
        let fewer = reply.max_batch_samples.filter(|takes| *takes < most).map(|takes| {
            let name = &reward.name;
            format!("reward '{name}': the service takes {takes} samples in one request, less than max_batch_samples ({most}): set it to {takes}")
        });
        (range, fewer)
    });
    futures::future::join_all(asked).await
}

/// Everything that the engine's thread needs.
struct Probe {
    runtime: Handle,
    plan: Plan,
    rewards: Rewards,
    /// Of the rows, in the dataset.
    numbers: Vec<u64>,
    prompts: Vec<PromptRow>,
    model_dir: PathBuf,
    initial: Option<PathBuf>,
    device: String,
    scratch: PathBuf,
    deadline: Instant,
}

impl Probe {
    /// A look at one prompt, then at all of them in batches of the job's size, or of what the time permits.
    fn run(&self) -> ProbeReport {
        let asked = self.prompts.len();
        let batch = (self.plan.training.prompts_per_step as usize).clamp(1, asked.max(1));
        let first = self.look(1, 1);
        let left = self.deadline.saturating_duration_since(Instant::now()).as_secs_f64() - first.loading_s();
        let affordable = (left * HEADROOM / first.step_s.max(1e-3)) as usize;
        let batch = batch.min(affordable);
        // Rewards that had no value for the first prompt are not asked for the others.
        let scored = first.observed.iter().any(|one| one.sample.reward.is_some());
        let go_on = first.error.is_none() && first.is_whole() && scored && batch > 0 && asked > 1;
        let (seen, error) = if go_on {
            let second = self.look(batch, asked / batch);
            let error = second.error.clone();
            // A second look that saw less (the limit came first) is worth less than the first.
            (if second.observed.len() >= first.observed.len() { second } else { first }, error)
        } else {
            let error = first.error.clone();
            (first, error)
        };
        let mut report = self.report(&seen, error);
        report.complete = report.error.is_none() && seen.is_whole() && (go_on || asked == 1);
        report
    }

    /// `steps` steps of `prompts_per_step` prompts each, of the loop that the job will run, without learning.
    fn look(&self, prompts_per_step: usize, steps: usize) -> Look<'_> {
        let plan = self.plan_of_look(prompts_per_step, steps);
        let used = (prompts_per_step * steps).min(self.prompts.len());
        let mut look = Look::new(self, prompts_per_step, steps);
        let input = TrainInput {
            plan: &plan,
            model_dir: &self.model_dir,
            model_name: &self.plan.model.id,
            rows: self.prompts[..used].to_vec(),
            eval_rows: Vec::new(),
            warm_up_rows: Vec::new(),
            resume: None,
            initial_adapter: self.initial.clone(),
            scratch_dir: &self.scratch,
            device: &self.device,
            backend: None,
        };
        if let Err(RunEnd::Failed(error)) = engine::train(input, &mut look) {
            look.error = Some(explained(&error));
        }
        look
    }

    fn plan_of_look(&self, prompts_per_step: usize, steps: usize) -> Plan {
        let mut plan = self.plan.clone();
        plan.eval = None;
        // The base model is looked at.
        plan.warm_up = None;
        plan.rloo.steps_per_generation = 1;
        plan.rloo.num_iterations = 1;
        // A refill would ask for the same few prompts again.
        plan.rloo.min_informative_groups = 0;
        plan.rloo.overlap = false;
        // A look is too short for a diagnosis, and must not be ended by one.
        plan.early_stopping = None;
        plan.doctor.on_alert = OnAlert::Note;
        plan.doctor.rules.clear();
        plan.training.prompts_per_step = u32::try_from(prompts_per_step).unwrap_or(u32::MAX);
        plan.training.max_steps = steps as u64;
        // The loop samples from its training stream: a seed from the stream `probe` keeps the two apart.
        plan.training.seed = Key::new(plan.training.seed, Stream::Probe).bits();
        plan.training.shuffle_dataset = false;
        // The chosen rows are taken one after another.
        plan.dataset.sources.clear();
        plan.optimizer.learning_rate = 0.0;
        plan.optimizer.weight_decay = 0.0;
        plan.checkpoints.every_steps = u64::MAX;
        plan
    }

    fn report(&self, seen: &Look<'_>, error: Option<ProbeError>) -> ProbeReport {
        let names: Vec<String> = self.plan.rewards.iter().map(|reward| reward.name.clone()).collect();
        let mut report = ProbeReport { error, warnings: seen.warnings.clone(), ..ProbeReport::default() };
        report.observe(&names, num_generations(&self.plan), &seen.observed);
        for (name, latencies) in &seen.latencies {
            let reward = report.rewards.entry(name.clone()).or_default();
            reward.latency_p50_s = median(latencies.clone());
            reward.latency_max_s = latencies.iter().copied().reduce(f64::max);
        }
        report.step_seconds = seen.step_seconds();
        let total = report.step_seconds.and_then(|seconds| seconds.total);
        report.eta_s = total.map(|total| total * self.plan.training.max_steps as f64);
        report.samples = pick(&seen.observed, MAX_SAMPLES);
        report
    }
}

/// Some completions, spread evenly, with long texts cut.
fn pick(observed: &[Observed], count: usize) -> Vec<ProbedSample> {
    let count = count.min(observed.len());
    let cut = |text: &str| match text.char_indices().nth(MAX_SAMPLE_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    };
    let sample = |index: usize| {
        let sample = &observed[index * observed.len() / count].sample;
        ProbedSample { prompt: cut(&sample.prompt), completion: cut(&sample.completion), ..sample.clone() }
    };
    (0..count).map(sample).collect()
}

/// Why a look failed.
fn explained(error: &EngineError) -> ProbeError {
    let code = match error {
        EngineError::Host(failure) => failure.code.as_str(),
        EngineError::ModelNotFinite { .. } => "model_not_finite",
        EngineError::Model(_) => "model_invalid",
        EngineError::Prompts(_) => "prompts_invalid",
        _ => "engine",
    };
    failed(code, error_text(error))
}
