//! The results of the demo's job, read over HTTP.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use rlood_client::{Client, MetricsQuery, SampleQuery};

use super::{DemoError, system};
use crate::bundle;
use crate::digest::Sha256Digest;
use crate::event::{Sample, SamplePhase};
use crate::files;
use crate::id::JobId;

/// Held-out accuracy that `--exit` requires.
const GOAL_ACCURACY: f64 = 0.9;
/// Rise of the held-out accuracy that `--exit` requires.
const GOAL_RISE: f64 = 0.2;
/// Number of prompts that are shown with their answers.
const SHOWN: usize = 5;
/// The adapter file whose hash is compared with the one that the server lists.
const WEIGHTS: &str = "adapter_model.safetensors";
/// Name of the held-out metric: the mean of the built-in reward with weight 0.
const ACCURACY: &str = "eval_rewards/exact_match/mean";

/// Results of the demo's job, before and after training.
pub struct Outcome {
    job: JobId,
    before: f64,
    after: f64,
    shown: Vec<Shown>,
    /// Training metrics such as `reward` and `kl`, at the first and the last step.
    metrics: Vec<(String, Option<f64>, Option<f64>)>,
    adapter: Adapter,
}

/// The trained adapter as a user gets it.
pub(super) struct Adapter {
    dir: PathBuf,
    sha256: Sha256Digest,
}

/// One held-out prompt with its answers.
struct Shown {
    question: String,
    right: String,
    before: String,
    after: String,
}

impl Outcome {
    /// Reads all results of the job over HTTP, and unpacks the adapter to `data_dir/adapter`.
    pub async fn read(client: &Client, job: JobId, steps: u64, data_dir: &Path) -> Result<Self, DemoError> {
        let rows = client.get_metrics(job, &MetricsQuery::default()).collect().await?;
        let value = |step: u64, key: &str| rows.iter().find(|row| row.step == step)?.get(key);
        let accuracy = |step| value(step, ACCURACY).ok_or_else(|| missing_metric(job, ACCURACY, step));
        let keys =
            ["reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "grad_norm", "completions/mean_length"];
        let metrics = keys.iter().map(|key| ((*key).to_owned(), value(1, key), value(steps, key))).collect();
        let (before, after) = (accuracy(0)?, accuracy(steps)?);

        let mut shown = Vec::with_capacity(SHOWN);
        for index in 0..SHOWN {
            let row = index * (bundle::held_out_rows() / SHOWN);
            let Some((question, right)) = bundle::held_out_row(row) else { continue };
            let before = sample(client, job, 0, row, &question).await?.completion;
            let after = sample(client, job, steps, row, &question).await?.completion;
            shown.push(Shown { question, right, before, after });
        }

        let adapter = Adapter::download(client, job, data_dir).await?;
        Ok(Self { job, before, after, shown, metrics, adapter })
    }

    /// Prints the results for people.
    pub fn print(&self, base: &str, took: Duration) {
        let Self { job, before, after, shown, metrics, adapter } = self;
        println!(
            "\nheld-out exact match, greedy, {} prompts: {before:.3} before, {after:.3} after ({:.0} s in all)\n",
            bundle::held_out_rows(),
            took.as_secs_f64()
        );
        println!("  {:<34} {:>6}   {:>8}   {:>8}", "prompt", "right", "before", "after");
        for Shown { question, right, before, after } in shown {
            let mark = |given: &str| {
                if given.trim() == right { format!("{} ✓", given.trim()) } else { format!("{} ✗", given.trim()) }
            };
            println!("  {question:<34} {right:>6}   {:>8}   {:>8}", mark(before), mark(after));
        }
        print_metrics(metrics);
        adapter.print();
        println!("\nnext      {base} (the dashboard), {base}/docs (the API)");
        println!("          rlood verdict {job} --server {base}");
        println!("          rlood samples {job} --server {base} --phase eval --worst 3");
        println!("          rlood metrics {job} --server {base} --keys reward,kl");
        println!("          rlood generate {job} --server {base} --chat -p 'What is 12 + 30?'");
        println!("          rlood pull {job} --server {base} -o adapter");
        println!("          curl {base}/jobs/{job}");
    }

    /// Returns the exit code of `--exit`, and prints the reason.
    pub fn judge(&self) -> ExitCode {
        let Self { before, after, .. } = self;
        if *after >= GOAL_ACCURACY && after - before >= GOAL_RISE {
            println!("\ngoal reached: {after:.3} ≥ {GOAL_ACCURACY}, risen by {:.3} ≥ {GOAL_RISE}", after - before);
            return ExitCode::SUCCESS;
        }
        println!(
            "\ngoal missed: held-out accuracy {after:.3} (goal ≥ {GOAL_ACCURACY}), risen by {:.3} (goal ≥ {GOAL_RISE}); try more --steps or another --seed",
            after - before
        );
        ExitCode::FAILURE
    }
}

impl Adapter {
    /// Downloads the newest adapter, unpacks it to `data_dir/adapter`, and checks that it has the hash that the server lists.
    pub(super) async fn download(client: &Client, job: JobId, data_dir: &Path) -> Result<Self, DemoError> {
        let dir = data_dir.join("adapter");
        let archive = data_dir.join("adapter.tar");
        client.download_adapter(job, None, &archive).await?;
        let unpacked = std::fs::File::open(&archive).and_then(|tar| tar::Archive::new(tar).unpack(&dir));
        unpacked.map_err(system(format!("unpack the trained adapter into {}", dir.display())))?;
        std::fs::remove_file(&archive).map_err(system(format!("remove {}", archive.display())))?;
        let weights = dir.join(WEIGHTS);
        let (_, sha256) = files::hash_file(&weights).map_err(system(format!("read {}", weights.display())))?;
        let page = client.list_checkpoints(job).next_page().await?;
        let newest = page.and_then(|page| page.data.into_iter().next());
        let listed = newest.map(|checkpoint| checkpoint.files).unwrap_or_default();
        if listed.iter().any(|file| file.name == WEIGHTS && file.sha256 == sha256) {
            return Ok(Self { dir, sha256 });
        }
        Err(DemoError::Job("the downloaded adapter does not have the sha256 that the checkpoint lists".to_owned()))
    }

    /// Prints where the adapter is.
    pub(super) fn print(&self) {
        println!("\nadapter   {} (PEFT: PeftModel.from_pretrained loads it)", self.dir.display());
        println!("          {WEIGHTS} sha256 {}", self.sha256);
    }
}

/// Prints metrics with their values at the first and the last step.
pub(super) fn print_metrics(metrics: &[(String, Option<f64>, Option<f64>)]) {
    println!("\n  {:<34} {:>10}   {:>10}", "metric", "first step", "last step");
    let number = |value: &Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.4}"));
    for (name, first, last) in metrics {
        println!("  {name:<34} {:>10}   {:>10}", number(first), number(last));
    }
}

/// The error of a metric that the server does not have.
pub(super) fn missing_metric(job: JobId, name: &str, step: u64) -> DemoError {
    DemoError::Job(format!("the response of /jobs/{job}/metrics has no {name} at step {step}"))
}

/// Returns the model's greedy completion of a held-out prompt after `step` optimizer steps.
pub(super) async fn sample(
    client: &Client,
    job: JobId,
    step: u64,
    row: usize,
    question: &str,
) -> Result<Sample, DemoError> {
    let (prompt_id, contains) = (format!("row_{row}"), Some(question.to_owned()));
    let phase = Some(SamplePhase::Eval);
    let query = SampleQuery { phase, step: Some(step), contains, limit: Some(100), ..SampleQuery::default() };
    let mut pages = client.list_samples(job, &query);
    while let Some(page) = pages.next_page().await? {
        if let Some(sample) = page.data.into_iter().find(|sample| sample.prompt_id == prompt_id) {
            return Ok(sample);
        }
    }
    Err(DemoError::Job(format!("the response of /jobs/{job}/samples has no completion for {prompt_id} at step {step}")))
}
