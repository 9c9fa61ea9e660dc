//! Whole RLOO steps: the engine's own loop with a reward that costs nothing, an adapter on every linear layer, and AdamW.

use std::path::Path;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::decode::peak_mib;
use super::job::{estimate_mib, plan, rows};
use super::timing::Timing;
use super::{BenchError, Setting, io};
use crate::engine;
use crate::engine::host::{
    Host, PromptRow, RewardValue, RunEnd, SavedCheckpoint, Score, ScoreRequest, StopReason, TrainInput,
};
use crate::event::{Event, Metrics, SamplePhase};
use crate::spec::Plan;

/// Results of whole steps.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StepFigures {
    /// Completion tokens per step (the mean if completions end early).
    pub completion_tokens: f64,
    /// Prompt and completion tokens per step, as TRL counts them: each prompt once per completion.
    pub tokens: f64,
    /// The minimum over the measured steps of each duration.
    pub fastest: StepTimes,
    /// The median over the measured steps of each duration.
    pub median: StepTimes,
    /// Whether any step was measured; false = the figures are those of the warm-up step.
    pub warm: bool,
    /// Number of measured steps.
    pub steps: usize,
    /// Seconds until the first step started: loading weights and tokenizer.
    pub load_s: f64,
    /// Peak memory of the process, in MiB.
    pub peak_mib: f64,
    /// Peak memory of the GPU in MiB; None on the CPU.
    pub device_peak_mib: Option<f64>,
    /// The server's estimate in MiB for the memory whose peak is measured.
    pub estimate_mib: f64,
    /// The largest difference in the measured steps between the sampler's log-prob of a token and training's, in nats; None if both
    /// are equal by construction.
    pub logp_difference_max: Option<f64>,
}

/// Durations of a step, in seconds.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct StepTimes {
    /// Wall-clock time from the end of one step to the end of the next, including metrics and samples.
    pub step_s: f64,
    /// Time of sampling, including prefill.
    pub generate_s: f64,
    /// Time of computing the rewards.
    pub reward_s: f64,
    /// Time of log-probs without gradient.
    pub reference_s: f64,
    /// Time of forward pass, backward pass and optimizer.
    pub train_s: f64,
    /// Completion tokens per second of sampling.
    pub decode_tok_s: f64,
    /// Prompt and completion tokens per second of forward pass, backward pass and optimizer.
    pub train_tok_s: f64,
}

/// Runs one step to warm up, and then the steps that are measured.
///
/// # Errors
/// Fails when the settings are not a valid job, or the engine fails.
pub fn measure(setting: &Setting<'_>) -> Result<StepFigures, BenchError> {
    let args = setting.args;
    let steps = u64::from(args.steps) + 1;
    let rows = rows(setting, (steps * u64::from(args.prompts)) as usize)?;
    let plan = plan(setting, args.generations, &rows, steps)?;
    let scratch = tempfile::tempdir().map_err(io("create a temporary directory for the measured run"))?;
    let mut clock = Clock {
        setting,
        estimate_mib: estimate_mib(setting, &plan),
        begun: Instant::now(),
        phase_begun: None,
        ends: Vec::new(),
        completion_tokens: Vec::new(),
        output_closed: false,
    };
    let device = args.device.to_string();
    let ended = engine::train(input(setting, &plan, rows, scratch.path(), &device), &mut clock);
    match ended {
        Ok(()) => Ok(clock.figures()),
        Err(RunEnd::Failed(error)) => Err(error.into()),
        Err(end @ (RunEnd::Stopped(_) | RunEnd::Panicked)) => {
            Err(BenchError::Job(format!("the measured run ended early: {end}")))
        }
    }
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
        warm_up_rows: Vec::new(),
        judged_keys: Vec::new(),
        resume: None,
        initial_adapter: None,
        scratch_dir,
        device,
        backend: None,
    }
}

/// The engine's callbacks for the measured run: compute rewards by a formula, and record when each step ends.
struct Clock<'a> {
    setting: &'a Setting<'a>,
    estimate_mib: f64,
    begun: Instant,
    /// When the first phase after loading the model began.
    phase_begun: Option<Instant>,
    ends: Vec<(Instant, Metrics)>,
    /// Mean number of completion tokens of each step.
    completion_tokens: Vec<f64>,
    /// Whether the parent process has closed the pipe that the figures are written to.
    output_closed: bool,
}

impl Host for Clock<'_> {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        self.completion_tokens.push(request.samples.iter().map(|sample| f64::from(sample.num_tokens)).sum());
        // The reward depends only on the text: equal texts get equal rewards.
        let reward =
            |text: &str| f64::from(text.bytes().fold(0_u32, |sum, byte| (sum * 31 + u32::from(byte)) % 97)) / 97.0;
        let score = |text: &str| Score { values: vec![RewardValue::Number(reward(text))] };
        Ok(request.samples.iter().map(|sample| score(&sample.completion)).collect())
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
        match event {
            Event::Phase { phase: crate::event::Phase::Rollout, .. } if self.phase_begun.is_none() => {
                self.phase_begun = Some(Instant::now());
            }
            Event::Step { kind: SamplePhase::Train, metrics, .. } => {
                self.ends.push((Instant::now(), metrics));
                self.output_closed = self.setting.report_figures(&self.figures()).is_err();
            }
            _ => {}
        }
        Ok(())
    }

    fn saved(&mut self, _checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        Ok(())
    }

    fn stop(&self) -> Option<StopReason> {
        self.output_closed.then_some(StopReason::Cancel)
    }
}

impl Clock<'_> {
    /// Computes the figures from all steps but the first, which is the warm-up; from the first if there is no other.
    fn figures(&self) -> StepFigures {
        let warm = self.ends.len() > 1;
        let measured = &self.ends[usize::from(warm)..];
        let began = self.phase_begun.filter(|_| !warm).into_iter();
        let ends: Vec<Instant> = began.chain(self.ends.iter().map(|(end, _)| *end)).collect();
        let walls = ends.windows(2).map(|pair| pair[1].duration_since(pair[0]).as_secs_f64());
        let wall = Timing::of(walls.collect());
        let part = |name: &str| {
            let seconds = measured.iter().filter_map(|(_, metrics)| metrics.get(name).copied().flatten());
            Timing::of(seconds.collect())
        };
        let part_max = |name: &str| {
            measured.iter().filter_map(|(_, metrics)| metrics.get(name).copied().flatten()).reduce(f64::max)
        };
        let counted = &self.completion_tokens[usize::from(warm).min(self.completion_tokens.len())..];
        let completion_tokens = counted.iter().sum::<f64>() / counted.len().max(1) as f64;
        let args = self.setting.args;
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
            warm,
            steps: if warm { measured.len() } else { 0 },
            load_s: self.phase_begun.map_or(0.0, |begun| begun.duration_since(self.begun).as_secs_f64()),
            peak_mib: peak_mib(),
            device_peak_mib: part_max("memory/peak_device_bytes").map(|bytes| bytes / (1 << 20) as f64),
            estimate_mib: self.estimate_mib,
            logp_difference_max: part_max("sampling/sampling_logp_difference/max"),
        }
    }
}
