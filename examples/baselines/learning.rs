//! Equal budgets, five seeds: what each estimator has learned on prompts it never saw.

use std::fmt::Write;

use rlood::engine::host::{
    Host, HostError, SavedCheckpoint, Score, ScoreRequest, StepTrace, Stop, TrainInput, TrainOutcome,
};
use rlood::engine::train;
use rlood::event::{Event, SamplePhase};
use rlood::sample::RewardValue;
use serde_json::{Value, json};

use crate::{Failure, mean, std, task};

/// Name and settings; all else is equal.
fn estimators() -> Vec<(&'static str, Value)> {
    let of = |estimator: &str| json!({"num_generations": 4, "beta": 0.0, "estimator": estimator});
    vec![
        ("RLOO", of("rloo")),
        ("GRPO", of("grpo")),
        ("REINFORCE++", of("reinforce_pp")),
        ("REINFORCE", of("reinforce")),
    ]
}

/// Scores by the task's reward and keeps what the table needs.
#[derive(Default)]
struct Ledger {
    /// Held-out accuracy at each evaluation, before the start first.
    held_out: Vec<f64>,
    reward: Vec<f64>,
    /// Of the rewards of a step.
    reward_variance: Vec<f64>,
    grad_norm: Vec<f64>,
    /// Σ of the clipped gradient over the last steps, and Σ of its squared norm.
    gradients: Vec<Vec<f32>>,
}

impl Host for Ledger {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, HostError> {
        let score = |sample| Score { values: vec![RewardValue::Number(task::reward(sample))] };
        Ok(request.samples.iter().map(score).collect())
    }

    fn event(&mut self, event: Event) -> Result<(), HostError> {
        let Event::Step { kind, metrics, .. } = event else { return Ok(()) };
        let value = |name: &str| metrics.get(name).copied().flatten();
        match kind {
            SamplePhase::Eval => self.held_out.extend(value("eval_reward")),
            SamplePhase::Train => {
                self.reward.extend(value("reward"));
                self.reward_variance.extend(value("reward_std").map(|std| std * std));
                self.grad_norm.extend(value("grad_norm"));
            }
        }
        Ok(())
    }

    fn saved(&mut self, _checkpoint: &SavedCheckpoint<'_>) -> Result<(), HostError> {
        Ok(())
    }

    fn stop(&self) -> Option<Stop> {
        None
    }

    fn observe(&mut self, trace: &StepTrace<'_>) {
        self.gradients.push(trace.gradient.to_vec());
    }
}

impl Ledger {
    /// Summed variance of the gradient over the run's steps (clipped, as the optimizer gets it), relative to its mean
    /// squared norm: 1 = pure noise around no direction.
    fn relative_gradient_variance(&self) -> f64 {
        let count = self.gradients.len() as f64;
        let dimensions = self.gradients.first().map_or(0, Vec::len);
        let (mut of_mean, mut squares) = (0.0, 0.0);
        for index in 0..dimensions {
            let mut sum = 0.0;
            for gradient in &self.gradients {
                let value = f64::from(gradient[index]);
                sum += value;
                squares += value * value;
            }
            of_mean += (sum / count).powi(2);
        }
        let mean_square = squares / count;
        (mean_square - of_mean) / mean_square * count / (count - 1.0)
    }
}

/// The table, as Markdown.
pub fn measure(seeds: u64, steps: u64) -> Result<String, Failure> {
    let mut report = format!(
        "\n## Learning\n\n{seeds} seeds, {steps} steps of 16 prompts × 4 completions, AdamW 1.5e-3 constant, LoRA r 16 all-linear, beta 0, the same settings for all (chosen for none of them). Held-out accuracy: 256 greedy completions, exact match. Mean ± sample std over the seeds. Reward variance: of the rewards within a step, mean over the steps. Gradient variance: summed variance of the clipped gradient over the run's steps as a share of its mean squared norm.\n\n| estimator | held-out before | held-out after | mean train reward | reward variance | gradient variance | grad_norm |\n|---|---|---|---|---|---|---|\n"
    );
    for (name, rloo) in estimators() {
        let mut columns: [Vec<f64>; 6] = Default::default();
        for seed in 1..=seeds {
            let ledger = run(&rloo, steps, seed)?;
            let (Some(before), Some(after)) = (ledger.held_out.first(), ledger.held_out.last()) else {
                return Err("the run was not evaluated".into());
            };
            let values = [
                *before,
                *after,
                mean(&ledger.reward),
                mean(&ledger.reward_variance),
                ledger.relative_gradient_variance(),
                mean(&ledger.grad_norm),
            ];
            for (column, value) in columns.iter_mut().zip(values) {
                column.push(value);
            }
        }
        write!(report, "| {name} |")?;
        for column in &columns {
            write!(report, " {:.3} ± {:.3} |", mean(column), std(column))?;
        }
        report.push('\n');
    }
    Ok(report)
}

fn run(rloo: &Value, steps: u64, seed: u64) -> Result<Ledger, Failure> {
    let plan = task::plan(rloo, steps, seed)?;
    let scratch = tempfile::tempdir()?;
    let mut ledger = Ledger::default();
    let input = TrainInput {
        plan: &plan,
        model_dir: &task::model_dir(),
        model_name: "rlood/tiny",
        rows: task::rows("train")?,
        eval_rows: task::rows("heldout")?,
        resume: None,
        initial_adapter: None,
        scratch_dir: scratch.path(),
        device: "cpu",
    };
    match train(input, &mut ledger)? {
        TrainOutcome::Finished => Ok(ledger),
        TrainOutcome::Stopped(stop) => Err(format!("the run was stopped: {stop:?}").into()),
    }
}
