//! Equal budgets, five seeds: what each estimator has learned on prompts it never saw.

use std::fmt::Write;

use rlood::engine::host::{Host, RunEnd, SavedCheckpoint, Score, ScoreRequest, StopReason, TrainInput};
use rlood::engine::train;
use rlood::event::{Event, SamplePhase};
use rlood::rollout::RewardValue;
use rlood::spec::Estimator;
use serde_json::{Value, json};

use crate::variance::{Baseline, Setting, of_estimator, spreads};
use crate::{Failure, mean, std, task};

/// Name, `rloo.estimator`, and its advantages; all else is equal.
const ESTIMATORS: [(&str, &str, Baseline); 4] = [
    ("RLOO", "rloo", |rewards, _| of_estimator(rewards, Estimator::Rloo)),
    ("GRPO", "grpo", |rewards, _| of_estimator(rewards, Estimator::Grpo)),
    ("REINFORCE++", "reinforce_pp", |rewards, _| of_estimator(rewards, Estimator::ReinforcePp)),
    ("REINFORCE", "reinforce", |rewards, _| of_estimator(rewards, Estimator::Reinforce)),
];

/// Prompts a step, of so many that were drawn from the job's, where the gradient's noise is measured.
const PROMPTS_PER_STEP: usize = 16;
const POOL: usize = 64;

/// Scores by the task's reward and keeps what the table needs.
#[derive(Default)]
struct Ledger {
    /// Held-out accuracy at each evaluation, before the start first.
    held_out: Vec<f64>,
    reward: Vec<f64>,
    /// Of the rewards of a step.
    reward_variance: Vec<f64>,
    grad_norm: Vec<f64>,
}

impl Host for Ledger {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        let score = |sample| Score { values: vec![RewardValue::Number(task::reward(sample))] };
        Ok(request.samples.iter().map(score).collect())
    }

    fn event(&mut self, event: Event) -> Result<(), RunEnd> {
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

    fn saved(&mut self, _checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        Ok(())
    }

    fn stop(&self) -> Option<StopReason> {
        None
    }
}

/// The table, as Markdown.
pub fn measure(seeds: u64, steps: u64, rollouts: usize) -> Result<String, Failure> {
    let setting = Setting::load()?;
    let baselines: Vec<Baseline> = ESTIMATORS.iter().map(|(_, _, baseline)| *baseline).collect();
    let (_, spreads) = spreads(&setting, &setting.some_rows(POOL), PROMPTS_PER_STEP, rollouts, &baselines)?;
    let mut report = format!(
        "\n## Learning\n\n{seeds} seeds, {steps} steps of {PROMPTS_PER_STEP} prompts × 4 completions, AdamW 1.5e-3 constant, LoRA r 16 all-linear, beta 0, each estimator with its default loss, the same settings for all (chosen for none of them). Held-out accuracy: 256 greedy completions, exact match. Mean ± sample std over the seeds. Reward variance: of the rewards within a step, mean over the steps. Gradient variance: tr Cov / ‖mean‖² of the first step's gradient at the initial weights, over {rollouts} independent rollouts of {PROMPTS_PER_STEP} prompts out of {POOL} (the choice of prompts is part of it), the same completions for all.\n\n| estimator | held-out before | held-out after | mean train reward | reward variance | gradient variance | grad_norm |\n|---|---|---|---|---|---|---|\n"
    );
    for ((name, estimator, _), spread) in ESTIMATORS.iter().zip(&spreads) {
        let rloo = json!({"num_generations": 4, "beta": 0.0, "estimator": estimator});
        let mut columns: [Vec<f64>; 5] = Default::default();
        for seed in 1..=seeds {
            let ledger = run(&rloo, steps, seed)?;
            let (Some(before), Some(after)) = (ledger.held_out.first(), ledger.held_out.last()) else {
                return Err("the run was not evaluated".into());
            };
            let of_steps = [&ledger.reward, &ledger.reward_variance, &ledger.grad_norm].map(|values| mean(values));
            let values = [*before, *after].into_iter().chain(of_steps);
            for (column, value) in columns.iter_mut().zip(values) {
                column.push(value);
            }
        }
        let [before, after, reward, variance, grad_norm] =
            columns.each_ref().map(|column| format!("{:.3} ± {:.3}", mean(column), std(column)));
        let noise = spread.noise();
        writeln!(report, "| {name} | {before} | {after} | {reward} | {variance} | {noise:.3} | {grad_norm} |")?;
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
        warm_up_rows: Vec::new(),
        judged_keys: Vec::new(),
        resume: None,
        initial_adapter: None,
        scratch_dir: scratch.path(),
        device: "cpu",
        backend: None,
    };
    train(input, &mut ledger)?;
    Ok(ledger)
}
