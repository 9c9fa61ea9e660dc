//! Whole RLOO steps: the engine's own loop with a reward that costs nothing, an adapter on every linear layer and AdamW.

use std::path::Path;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::decode::peak_mib;
use super::random_model::word;
use super::timing::Timing;
use super::{BenchError, Setting, io};
use crate::config::{Device, machine_memory_bytes};
use crate::engine;
use crate::engine::host::{
    Host, HostError, PromptRow, RewardValue, SavedCheckpoint, Score, ScoreRequest, Stop, TrainInput, TrainOutcome,
};
use crate::engine::text::Text;
use crate::event::{Event, Metrics, SamplePhase};
use crate::spec::footprint::Place;
use crate::spec::{Context, DatasetFacts, FieldError, JobSpec, ModelFacts, Plan, resolve};

/// What whole steps took.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepFigures {
    /// Completion tokens of a step (the mean, where completions end by themselves).
    pub completion_tokens: f64,
    /// Prompt and completion tokens of a step, as TRL counts them.
    pub tokens: f64,
    /// The step of the fastest of each part.
    pub fastest: StepTimes,
    /// The medians.
    pub median: StepTimes,
    /// Measured steps.
    pub steps: usize,
    /// Until the first step began: weights and tokenizer.
    pub load_s: f64,
    /// The process's peak, MiB.
    pub peak_mib: f64,
    /// The device's peak, MiB, where it is not the processor.
    pub device_peak_mib: Option<f64>,
    /// Of the measured steps, the largest difference between the sampler's log-prob of a token and training's, nats;
    /// None where both are the same by construction.
    pub logp_difference_max: Option<f64>,
}

/// Seconds of a step.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct StepTimes {
    /// By the wall, from the end of one step to the end of the next: metrics and samples included.
    pub step_s: f64,
    /// Sampling, prefill included.
    pub generate_s: f64,
    /// Rewards.
    pub reward_s: f64,
    /// Log-probs without gradient.
    pub reference_s: f64,
    /// Forward, backward, optimizer.
    pub train_s: f64,
    /// Completion tokens over sampling.
    pub decode_tok_s: f64,
    /// Prompt and completion tokens over forward, backward, optimizer.
    pub train_tok_s: f64,
}

/// Runs one step to warm up and the measured ones.
///
/// # Errors
/// When the settings are no job, or the engine fails.
pub fn measure(setting: &Setting<'_>) -> Result<StepFigures, BenchError> {
    let args = setting.args;
    let steps = u64::from(args.steps) + 1;
    let rows = rows(setting, (steps * u64::from(args.prompts)) as usize)?;
    let plan = plan(setting, &rows, steps)?;
    let scratch = tempfile::tempdir().map_err(io("make a temporary directory"))?;
    let mut clock = Clock { begun: Instant::now(), phase_begun: None, ends: Vec::new(), completion_tokens: Vec::new() };
    let device = args.device.to_string();
    let outcome = engine::train(input(setting, &plan, rows, scratch.path(), &device), &mut clock)?;
    if outcome != TrainOutcome::Finished {
        return Err(BenchError::Job(format!("it ended early: {outcome:?}")));
    }
    Ok(clock.figures(setting))
}

fn input<'a>(
    setting: &'a Setting<'_>,
    plan: &'a Plan,
    rows: Vec<PromptRow>,
    scratch_dir: &'a Path,
    device: &'a str,
) -> TrainInput<'a> {
    TrainInput {
        plan,
        model_dir: &setting.model_dir,
        model_name: "bench",
        rows,
        eval_rows: Vec::new(),
        resume: None,
        initial_adapter: None,
        scratch_dir,
        device,
        backend: None,
    }
}

/// Prompts of exactly the asked number of tokens: words of the random model, or decoded tokens of a given one.
fn rows(setting: &Setting<'_>, count: usize) -> Result<Vec<PromptRow>, BenchError> {
    let random = setting.tokens(0, 1).first().map(|token| word(*token as usize)).unwrap_or_default();
    let text = Text::load(&setting.model_dir).map_err(engine::error::EngineError::from)?;
    let ours = text.token_to_id(&random).is_some();
    let row = |prompt: Vec<u32>| {
        let text = match ours {
            true => prompt.iter().map(|token| word(*token as usize)).collect::<Vec<_>>().join(" "),
            false => text.decode(&prompt, false).map_err(engine::error::EngineError::from)?,
        };
        Ok(PromptRow { prompt: json!(text), columns: Map::new() })
    };
    setting.prompts(count).into_iter().map(row).collect()
}

/// The plan that the server would make of this job.
fn plan(setting: &Setting<'_>, rows: &[PromptRow], steps: u64) -> Result<Plan, BenchError> {
    let args = setting.args;
    let (spec, errors) = JobSpec::read(json!({
        "model": "bench",
        "dataset": {"id": crate::id::DatasetId::new()},
        "rewards": [{"type": "length", "name": "bench", "min_words": 1, "max_words": 2}],
        "rloo": {"num_generations": args.generations, "beta": args.beta},
        "sampling": {"max_completion_length": args.completion, "temperature": 1.0},
        "lora": {"r": args.lora_r, "alpha": args.lora_r, "target_modules": "all-linear"},
        "optimizer": {"learning_rate": 1e-4, "lr_scheduler_type": "constant"},
        "training": {"prompts_per_step": args.prompts, "max_steps": steps, "dtype": args.dtype.as_str(),
                     "gradient_checkpointing": args.gradient_checkpointing.then_some(true),
                     "micro_batch_tokens": args.micro_batch_tokens},
        "checkpoints": {"every_steps": steps},
    }));
    let refused = |errors: Vec<FieldError>| {
        let lines: Vec<String> = errors.iter().map(|error| format!("{}: {}", error.pointer, error.detail)).collect();
        BenchError::Job(lines.join("; "))
    };
    if !errors.is_empty() {
        return Err(refused(errors));
    }
    let card = &setting.card;
    let records: Vec<Value> = rows.iter().map(|row| json!({"prompt": row.prompt})).collect();
    let context = Context {
        model: Some(ModelFacts {
            id: "bench".to_owned(),
            sha256: String::new(),
            max_position_embeddings: card.max_position_embeddings as u64,
            num_parameters: card.num_parameters,
            size_bytes: card.files.iter().map(|file| file.size_bytes).sum(),
            has_chat_template: false,
            shape: Some(card.config.shape()),
        }),
        dataset: Some(DatasetFacts::of_records(&records)),
        memory_limit_bytes: machine_memory_bytes(),
        places: vec![place(args.device)],
        ..Context::default()
    };
    Ok(resolve(&spec, &context).map_err(refused)?.plan)
}

/// What the job must fit.
fn place(device: Device) -> Place {
    match device {
        Device::Cpu => Place::Cpu,
        Device::Cuda(ordinal) => Place::Cuda { memory_bytes: engine::gpu::smallest(&[ordinal]).ok() },
    }
}

/// The host: rewards by a formula, and the time of every step's end.
struct Clock {
    begun: Instant,
    /// Of the first phase after loading.
    phase_begun: Option<Instant>,
    ends: Vec<(Instant, Metrics)>,
    /// Of each step.
    completion_tokens: Vec<f64>,
}

impl Host for Clock {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, HostError> {
        self.completion_tokens.push(request.samples.iter().map(|sample| f64::from(sample.num_tokens)).sum());
        // Different for different texts, the same for the same.
        let reward =
            |text: &str| f64::from(text.bytes().fold(0_u32, |sum, byte| (sum * 31 + u32::from(byte)) % 97)) / 97.0;
        let score = |text: &str| Score { values: vec![RewardValue::Number(reward(text))] };
        Ok(request.samples.iter().map(|sample| score(&sample.completion)).collect())
    }

    fn event(&mut self, event: Event) -> Result<(), HostError> {
        match event {
            Event::Phase { phase: crate::event::Phase::Rollout, .. } if self.phase_begun.is_none() => {
                self.phase_begun = Some(Instant::now());
            }
            Event::Step { kind: SamplePhase::Train, metrics, .. } => self.ends.push((Instant::now(), metrics)),
            _ => {}
        }
        Ok(())
    }

    fn saved(&mut self, _checkpoint: &SavedCheckpoint<'_>) -> Result<(), HostError> {
        Ok(())
    }

    fn stop(&self) -> Option<Stop> {
        None
    }
}

impl Clock {
    /// Of every step but the first.
    fn figures(&self, setting: &Setting<'_>) -> StepFigures {
        let measured = &self.ends[1.min(self.ends.len())..];
        let walls = self.ends.windows(2).map(|pair| pair[1].0.duration_since(pair[0].0).as_secs_f64());
        let wall = Timing::of(walls.collect());
        let part = |name: &str| {
            let seconds = measured.iter().filter_map(|(_, metrics)| metrics.get(name).copied().flatten());
            Timing::of(seconds.collect())
        };
        let part_max = |name: &str| {
            measured.iter().filter_map(|(_, metrics)| metrics.get(name).copied().flatten()).reduce(f64::max)
        };
        let counted = &self.completion_tokens[1.min(self.completion_tokens.len())..];
        let completion_tokens = counted.iter().sum::<f64>() / counted.len().max(1) as f64;
        let args = setting.args;
        let prompt_tokens = f64::from(args.prompts * args.generations) * f64::from(args.prompt_len);
        let tokens = completion_tokens + prompt_tokens;
        let (generate, reward) = (part("step_time/generate"), part("step_time/reward"));
        let (reference, train) = (part("step_time/reference"), part("step_time/train"));
        let times = |of: fn(&Timing) -> f64| StepTimes {
            step_s: of(&wall),
            generate_s: of(&generate),
            reward_s: of(&reward),
            reference_s: of(&reference),
            train_s: of(&train),
            decode_tok_s: completion_tokens / of(&generate),
            train_tok_s: tokens / of(&train),
        };
        StepFigures {
            completion_tokens,
            tokens,
            fastest: times(|timing| timing.min_s),
            median: times(|timing| timing.median_s),
            steps: measured.len(),
            load_s: self.phase_begun.map_or(0.0, |begun| begun.duration_since(self.begun).as_secs_f64()),
            peak_mib: peak_mib(),
            device_peak_mib: part_max("memory/peak_device_bytes").map(|bytes| bytes / (1 << 20) as f64),
            logp_difference_max: part_max("sampling/sampling_logp_difference/max"),
        }
    }
}
