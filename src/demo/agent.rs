//! `rlood demo --agent`: the job whose model learns to call a calculator, and its results.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rlood_client::{Client, DatasetUpload, Document, MetricsQuery};
use serde_json::{Value, json};

use super::calculator::Calculator;
use super::outcome::{Adapter, missing_metric, print_metrics, sample};
use super::{DemoError, follow, system};
use crate::bundle;
use crate::config::DemoArgs;
use crate::event::Sample;
use crate::id::{DatasetId, JobId};
use crate::reward::signature::Key;

/// The id under which the bundled model is registered.
const MODEL: &str = "rlood/tiny-agent";
/// Default number of optimizer steps, which reaches the goal with a margin (benches/results/agent_demo.md).
const STEPS: u64 = 40;
/// Number of steps between checkpoints.
const CHECKPOINT_EVERY: u64 = 20;
/// Share of the held-out sums that `--exit` allows before the training.
const GOAL_BEFORE: f64 = 0.2;
/// Share of the held-out sums that `--exit` requires after the training.
const GOAL_AFTER: f64 = 0.9;
/// Share of the held-out sums that `--exit` allows after the training with a calculator that answers with noise.
const GOAL_NOISE: f64 = 0.3;
/// The share of held-out sums that the model solved: its mean reward.
const SOLVED: &str = "eval_rewards/environment/mean";

/// Results of the demo's job, before and after training.
pub struct AgentOutcome {
    job: JobId,
    is_noisy: bool,
    before: f64,
    after: f64,
    /// The episode of one held-out sum before and after training.
    shown: [Sample; 2],
    /// Training metrics at the first and the last step.
    metrics: Vec<(String, Option<f64>, Option<f64>)>,
    adapter: Adapter,
}

/// Runs the demo over HTTP, as a user would. The calculator is returned too, because further jobs need it.
pub(crate) async fn demonstrate(
    client: &Client,
    args: &DemoArgs,
    data_dir: &Path,
    begun: Instant,
) -> Result<(AgentOutcome, Calculator), DemoError> {
    let model_dir = data_dir.join("tiny-agent");
    bundle::unpack_agent(&model_dir).map_err(system(format!("write the bundled model to {}", model_dir.display())))?;
    let secret = Key::generate().map_err(system("generate a secret"))?;
    let calculator = Calculator::start(&secret, args.noise).await.map_err(system("start the demo's calculator"))?;

    let model = client.create_model(MODEL, &model_dir.to_string_lossy()).await?;
    let train = client.create_dataset(&DatasetUpload::ndjson(bundle::AGENT_TRAIN).named("long-sums")).await?;
    let held_out = DatasetUpload::ndjson(bundle::AGENT_HELD_OUT).named("long-sums-held-out");
    let held_out = client.create_dataset(&held_out).await?;
    let steps = args.steps.unwrap_or(STEPS);
    let environment = json!({
        "name": "calculator", "url": calculator.url(), "secret": secret,
        "max_turns": 3, "max_episode_tokens": 96, "max_observation_tokens": 24,
    });
    let id = client.create_job(&Document::from(&job(train.id, held_out.id, environment, steps, args.seed))).await?.id;

    let num_parameters = model.card.map_or(0, |card| card.num_parameters);
    println!("model     {MODEL}, {num_parameters} parameters, in {}", model_dir.display());
    println!("dataset   {} sums, {} held out", train.num_rows, held_out.num_rows);
    let answers = if args.noise { "answers with random numbers" } else { "answers exactly" };
    println!("tool      calculator at {} (environment contract v1, signed), {answers}", calculator.url());
    follow(client, id, steps).await?;
    let outcome = AgentOutcome::read(client, id, steps, args.noise, data_dir).await?;
    outcome.print(client.server(), begun.elapsed());
    Ok((outcome, calculator))
}

/// Builds the job as a user would write it.
fn job(train: DatasetId, held_out: DatasetId, environment: Value, steps: u64, seed: u64) -> Value {
    json!({
        "name": "demo: calls a calculator",
        "model": MODEL,
        "dataset": {"id": train},
        "eval": {"dataset": {"id": held_out}, "every_steps": steps, "before_start": true, "num_generations": 1, "temperature": 0},
        "environment": environment,
        "rloo": {"num_generations": 8, "beta": 0.01},
        "sampling": {"max_completion_length": 24, "temperature": 1.0},
        "lora": {"r": 8, "alpha": 16, "target_modules": "all-linear"},
        "optimizer": {"learning_rate": 3e-3, "lr_scheduler_type": "linear", "warmup_steps": 2},
        "training": {"prompts_per_step": 16, "max_steps": steps, "seed": seed},
        "checkpoints": {"every_steps": steps.min(CHECKPOINT_EVERY)},
    })
}

impl AgentOutcome {
    /// Reads all results of the job over HTTP, and unpacks the adapter to `data_dir/adapter`.
    async fn read(client: &Client, job: JobId, steps: u64, is_noisy: bool, data_dir: &Path) -> Result<Self, DemoError> {
        let rows = client.get_metrics(job, &MetricsQuery::default()).collect().await?;
        let value = |step: u64, key: &str| rows.iter().find(|row| row.step == step)?.get(key);
        let solved = |step| value(step, SOLVED).ok_or_else(|| missing_metric(job, SOLVED, step));
        let (before, after) = (solved(0)?, solved(steps)?);
        let keys = [
            "reward",
            "tools/call_frequency",
            "environment/turns/mean",
            "environment/masked_fraction",
            "kl",
            "entropy",
            "grad_norm",
        ];
        let metrics = keys.iter().map(|key| ((*key).to_owned(), value(1, key), value(steps, key))).collect();
        let (question, _) = bundle::question_and_answer(bundle::AGENT_HELD_OUT, 0)
            .ok_or_else(|| DemoError::Job("the bundled dataset is empty".to_owned()))?;
        let shown = [sample(client, job, 0, 0, &question).await?, sample(client, job, steps, 0, &question).await?];
        let adapter = Adapter::download(client, job, data_dir).await?;
        Ok(Self { job, is_noisy, before, after, shown, metrics, adapter })
    }

    /// Prints the results for people.
    fn print(&self, base: &str, took: Duration) {
        let Self { job, is_noisy: _, before, after, shown, metrics, adapter } = self;
        println!(
            "\nheld-out sums solved, greedy, {} sums: {before:.3} before, {after:.3} after ({:.0} s in all)",
            bundle::num_rows(bundle::AGENT_HELD_OUT),
            took.as_secs_f64()
        );
        for (title, sample) in ["before", "after"].iter().zip(shown) {
            println!("\n  {title}: reward {}", sample.reward.map_or("–".to_owned(), |reward| reward.to_string()));
            for (role, text) in turns(&format!("{}{}", sample.prompt, sample.completion)) {
                println!("    {role:<10} {text}");
            }
        }
        print_metrics(metrics);
        adapter.print();
        println!("\nnext      {base} (the dashboard), {base}/docs (the API)");
        println!("          rlood samples {job} --server {base} --phase eval --worst 3");
        println!("          rlood metrics {job} --server {base} --keys reward,tools/call_frequency");
        println!("          rlood pull {job} --server {base} -o adapter");
        println!("          curl {base}/jobs/{job}");
    }

    /// Returns the exit code of `--exit`, and prints the reason.
    pub fn judge(&self) -> ExitCode {
        let Self { is_noisy, before, after, .. } = self;
        if *is_noisy {
            let is_low = *after <= GOAL_NOISE;
            let sign = if is_low { "goal reached: with noise" } else { "goal missed: with noise" };
            println!("\n{sign}, {after:.3} of the held-out sums are right (at most {GOAL_NOISE})");
            return if is_low { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
        if *before <= GOAL_BEFORE && *after >= GOAL_AFTER {
            println!("\ngoal reached: {before:.3} ≤ {GOAL_BEFORE} before, {after:.3} ≥ {GOAL_AFTER} after");
            return ExitCode::SUCCESS;
        }
        println!(
            "\ngoal missed: {before:.3} before (goal ≤ {GOAL_BEFORE}), {after:.3} after (goal ≥ {GOAL_AFTER}); try more --steps or another --seed"
        );
        ExitCode::FAILURE
    }
}

/// The turns of a chat in the bundled model's form, `<|role|>text<|end|>`: role and text of each.
fn turns(chat: &str) -> Vec<(String, String)> {
    let turn = |turn: &str| {
        let (role, text) = turn.strip_prefix("<|")?.split_once("|>")?;
        Some((role.to_owned(), text.replace('\n', "")))
    };
    chat.split("<|end|>").filter_map(turn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chat_is_split_into_turns() {
        let chat = "<|user|>What is 1+2?<|end|><|assistant|><tool_call>\n{}\n</tool_call><|end|><|user|>3<|end|>";
        let expected = [("user", "What is 1+2?"), ("assistant", "<tool_call>{}</tool_call>"), ("user", "3")];
        assert_eq!(turns(chat), expected.map(|(role, text)| (role.to_owned(), text.to_owned())));
    }
}
