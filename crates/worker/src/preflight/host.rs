//! The engine's host (its callbacks for rewards, events and checkpoints) during a preflight: records one run of the training loop.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rlood_types::preflight::{Observed, PreflightError, PreflightSample, StepSeconds};

use super::{MAX_WARNINGS, Preflight};
use crate::engine::advantage::{RewardWeight, combine_rewards};
use crate::engine::error::EngineError;
use crate::engine::host::{Host, RolloutId, RunEnd, SavedCheckpoint, ScoreRequest, StopReason};
use crate::environment::{EpisodeCall, Reply};
use crate::event::{Event, Metrics, Phase};
use crate::id::JobId;
use crate::job::Failure;
use crate::reward::JobContext;
use crate::reward::episodes::EpisodeServer;
use crate::rollout::{RewardSample, RolloutPart, Score};

/// One run of the training loop in a preflight, as recorded.
pub(super) struct PreflightRun<'p> {
    pub(super) preflight: &'p Preflight,
    /// The environment or the tools of this run's episodes.
    pub(super) environment: Option<&'p EpisodeServer>,
    pub(super) prompts_per_step: usize,
    pub(super) steps: usize,
    pub(super) begun: Instant,
    pub(super) rollout_began: Option<Instant>,
    pub(super) first_rollout: Option<Instant>,
    /// Scored completions in the order of the prompts.
    pub(super) observed: Vec<Observed>,
    /// Seconds that each reward took in each step, by reward name.
    pub(super) latencies: BTreeMap<String, Vec<f64>>,
    pub(super) generate_s: f64,
    pub(super) reward_s: f64,
    pub(super) scored_steps: usize,
    /// Seconds for log-probabilities without gradient, and for the training passes (forward, backward, optimizer).
    pub(super) reference_s: f64,
    pub(super) train_s: f64,
    /// Seconds that the last complete step took.
    pub(super) step_s: f64,
    pub(super) trained_steps: usize,
    pub(super) warnings: Vec<String>,
    pub(super) error: Option<PreflightError>,
}

impl<'p> PreflightRun<'p> {
    pub(super) fn new(
        preflight: &'p Preflight,
        environment: Option<&'p EpisodeServer>,
        prompts_per_step: usize,
        steps: usize,
    ) -> Self {
        Self {
            preflight,
            environment,
            prompts_per_step,
            steps,
            begun: Instant::now(),
            rollout_began: None,
            first_rollout: None,
            observed: Vec::new(),
            latencies: BTreeMap::new(),
            generate_s: 0.0,
            reward_s: 0.0,
            scored_steps: 0,
            reference_s: 0.0,
            train_s: 0.0,
            step_s: 0.0,
            trained_steps: 0,
            warnings: Vec::new(),
            error: None,
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.trained_steps == self.steps
    }

    /// Returns the seconds that loading the model took.
    pub(super) fn loading_s(&self) -> f64 {
        self.first_rollout.map_or(0.0, |at| at.duration_since(self.begun).as_secs_f64())
    }

    /// Estimates the seconds of one optimizer step of the job. The job samples a block of prompts_per_step · steps_per_generation
    /// (S) prompts once, and trains on it num_iterations (μ) · S times.
    pub(super) fn step_seconds(&self) -> Option<StepSeconds> {
        if self.scored_steps == 0 {
            return None;
        }
        let plan = &self.preflight.plan;
        let growth = f64::from(plan.training.prompts_per_step) / self.prompts_per_step as f64;
        let iterations = f64::from(plan.rloo.num_iterations.max(1));
        let (scored, trained) = (self.scored_steps as f64, self.trained_steps as f64);
        let generate = self.generate_s / scored * growth / iterations;
        let reward = self.reward_s / scored * growth / iterations;
        let train = (self.trained_steps > 0).then(|| {
            let (reference, train) = (self.reference_s / trained, self.train_s / trained);
            let reused = plan.rloo.num_iterations > 1 || plan.rloo.steps_per_generation > 1;
            // A block that is trained on more than once needs the log-probabilities from before the first update: one forward pass,
            // about a third of a training pass.
            let old = if reused { train / 3.0 } else { 0.0 };
            ((reference + old) / iterations + train) * growth
        });
        Some(StepSeconds { generate, reward, train, total: train.map(|train| generate + reward + train) })
    }

    /// Replaces a sample's row index among the preflight's rows by the row's index in the dataset.
    pub(super) fn with_dataset_index(&self, sample: &RewardSample) -> RewardSample {
        let row = sample.prompt_id.strip_prefix("row_").and_then(|row| row.parse::<usize>().ok());
        let number = row.and_then(|row| self.preflight.numbers.get(row)).copied().unwrap_or_default();
        let source = self.preflight.plan.dataset.source_of(number).map(str::to_owned);
        RewardSample { prompt_id: format!("row_{number}"), source, ..sample.clone() }
    }

    pub(super) fn observe(&mut self, samples: Vec<RewardSample>, scores: &[Score]) {
        let plan = &self.preflight.plan;
        let weights = RewardWeight::of_plan(&plan.rewards);
        for (sample, score) in samples.into_iter().zip(scores) {
            let named = plan.rewards.iter().zip(&score.values);
            let sample = PreflightSample {
                prompt_id: sample.prompt_id,
                prompt: sample.prompt,
                completion: sample.completion,
                reward: combine_rewards(&score.values, &weights, plan.rloo.combine),
                rewards: named.map(|(reward, value)| (reward.name.clone(), value.number())).collect(),
                finish_reason: sample.finish_reason,
                num_tokens: sample.num_tokens,
            };
            self.observed.push(Observed { values: score.values.clone(), sample });
        }
    }

    pub(super) fn warn(&mut self, warning: String) {
        if self.warnings.len() < MAX_WARNINGS && !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
    }

    pub(super) fn add_times(&mut self, metrics: &Metrics) {
        let seconds = |name: &str| metrics.get(name).copied().flatten().unwrap_or(0.0);
        self.reference_s += seconds("step_time/reference");
        self.train_s += seconds("step_time/train");
        self.step_s = seconds("step_time");
        self.trained_steps += 1;
    }
}

impl Host for PreflightRun<'_> {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        let asked = Instant::now();
        let samples: Vec<RewardSample> = request.samples.iter().map(|sample| self.with_dataset_index(sample)).collect();
        let generate_s = self.rollout_began.map_or(0.0, |began| asked.duration_since(began).as_secs_f64());
        let job = JobContext { job: JobId::new(), rollout: request.id, probe: true };
        // The rewards get at least 100 ms, so that built-in ones can answer even after the preflight's time limit.
        let left = self.preflight.deadline.saturating_duration_since(asked).max(Duration::from_millis(100));
        let scored = self
            .preflight
            .runtime
            .block_on(async { tokio::time::timeout(left, self.preflight.rewards.score(&job, &samples)).await });
        let scored = match scored {
            Ok(Ok(scored)) => scored,
            Ok(Err(failure)) => return Err(failure.to_failure(request.id.step).into()),
            Err(_) => {
                let rewards = "a reward did not answer within the time limit of the preflight";
                return Err(reward_timeout(rewards).into());
            }
        };
        self.rollout_began = Some(Instant::now());
        self.generate_s += generate_s;
        self.reward_s += asked.elapsed().as_secs_f64();
        if request.id.part == RolloutPart::Greedy {
            // A rollout of ReMax's greedy baseline: its time counts, but the job does not train on its completions.
            return Ok(scored.scores);
        }
        self.scored_steps += 1;
        for (name, latency) in &scored.metrics {
            let reward = name.strip_prefix("rewards/").and_then(|name| name.strip_suffix("/latency"));
            if let (Some(reward), Some(latency)) = (reward, latency) {
                self.latencies.entry(reward.to_owned()).or_default().push(*latency);
            }
        }
        for warning in scored.warnings {
            if let Event::Warning { message, .. } = warning {
                self.warn(message);
            }
        }
        self.observe(samples, &scored.scores);
        Ok(scored.scores)
    }

    fn environment(&mut self, id: RolloutId, calls: &[EpisodeCall]) -> Result<Vec<Reply>, RunEnd> {
        let Some(environment) = self.environment else {
            return Err(RunEnd::Failed(EngineError::Input("the job has no environment".to_owned())));
        };
        let left = self.preflight.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(100));
        let asked = async { tokio::time::timeout(left, environment.ask(id, calls)).await };
        match self.preflight.runtime.block_on(asked) {
            Ok(Ok(replies)) => {
                for reply in &replies {
                    if let Reply::Failed { code, message } = reply {
                        self.warn(format!("the environment broke off an episode ({code}): {message}"));
                    }
                }
                Ok(replies)
            }
            Ok(Err(failure)) => Err(failure.to_failure(id.step).into()),
            Err(_) => {
                Err(reward_timeout("the environment did not answer within the time limit of the preflight").into())
            }
        }
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
        match event {
            Event::Phase { phase: Phase::Rollout, .. } => {
                self.rollout_began = Some(Instant::now());
                self.first_rollout.get_or_insert_with(Instant::now);
            }
            // A preflight saves nothing, so the run ends here.
            Event::Phase { phase: Phase::Checkpoint, .. } => return Err(RunEnd::Stopped(StopReason::Cancel)),
            Event::Step { metrics, .. } => self.add_times(&metrics),
            Event::Warning { code, message, .. } if code.starts_with("environment_") => self.warn(message),
            Event::Phase { .. }
            | Event::Samples { .. }
            | Event::Warning { .. }
            | Event::Alert { .. }
            | Event::AlertCleared { .. }
            | Event::TrainingPhase { .. }
            | Event::Diverged { .. }
            | Event::Reward { .. }
            | Event::EarlyStopping { .. } => {}
        }
        Ok(())
    }

    fn saved(&mut self, _: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        Err(RunEnd::Stopped(StopReason::Cancel))
    }

    fn stop(&self) -> Option<StopReason> {
        (Instant::now() >= self.preflight.deadline).then_some(StopReason::Cancel)
    }
}

fn reward_timeout(message: &str) -> Failure {
    Failure {
        class: crate::job::FailureClass::Reward,
        code: "reward_timeout".to_owned(),
        message: message.to_owned(),
        phase: Some(Phase::Reward),
        step: None,
        suggestion: None,
    }
}
