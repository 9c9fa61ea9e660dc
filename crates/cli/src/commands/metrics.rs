//! `rlood metrics`: prints a job's metrics by step.

use clap::Args;
use serde_json::Value;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::listing::Listing;
use crate::names;
use crate::output::{Table, shown};

/// Metrics that the table shows when --keys is not given.
const DEFAULT_METRICS: [&str; 8] =
    ["reward", "reward_std", "eval_reward", "kl", "entropy", "grad_norm", "completions/mean_length", "step_time"];

/// Flags of `rlood metrics`.
#[derive(Debug, Clone, Args)]
pub struct Metrics {
    /// Job: its id, at least 6 characters of the id after job_, its name, or @last.
    #[arg(value_name = "JOB", add = super::completions::jobs())]
    pub job: String,

    /// Metrics to print, as a comma-separated list. Default: all metrics with --csv and --json, else the most common ones.
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub keys: Vec<String>,

    /// First training step to print.
    #[arg(long, value_name = "STEP")]
    pub min_step: Option<u64>,

    /// Last training step to print.
    #[arg(long, value_name = "STEP")]
    pub max_step: Option<u64>,

    /// Downsample to at most N steps, 2 to 10000, keeping peaks.
    #[arg(long, value_name = "N")]
    pub points: Option<u32>,

    /// Number of table rows to print, from the end; 0 prints all. Does not apply to --csv and --json.
    #[arg(long, default_value_t = 20, value_name = "N")]
    pub tail: usize,

    /// Print CSV, as exported by the API.
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the job does not exist.
pub async fn run(context: &Context, args: &Metrics) -> Result<u8, CliError> {
    let Metrics { job, keys, min_step, max_step, points, tail, csv, common: _ } = args;
    let id = names::job(context, job).await?;
    let joined = (!keys.is_empty()).then(|| keys.join(","));
    let call = context.client.raw_get(&["jobs", &id.to_string(), "metrics"]).query_if("keys", joined);
    let call = call.query_if("min_step", *min_step).query_if("max_step", *max_step).query_if("max_points", *points);
    if *csv {
        context.out.text(&call.query("format", "csv").text().await?)?;
        return Ok(0);
    }
    let listing = Listing::whole(call).await?;
    if context.out.json {
        context.out.json(&listing.document)?;
        return Ok(0);
    }
    let has = |key: &str| listing.items.iter().any(|row| row.get(key).is_some());
    let keys: Vec<&str> = match keys.is_empty() {
        true => DEFAULT_METRICS.into_iter().filter(|key| has(key)).collect(),
        false => keys.iter().map(String::as_str).collect(),
    };
    if listing.items.is_empty() {
        context.out.note("no metrics");
        return Ok(0);
    }
    let mut headings = vec!["step"];
    headings.extend(&keys);
    let mut table = Table::new(&headings);
    let skipped = if *tail == 0 { 0 } else { listing.items.len().saturating_sub(*tail) };
    for row in &listing.items[skipped..] {
        let cell = |key: &&str| row.get(*key).map_or_else(String::new, |value: &Value| shown(value));
        table.row(std::iter::once(shown(&row["step"])).chain(keys.iter().map(cell)));
    }
    table.print(&context.out)?;
    if skipped > 0 {
        context.out.note(format!("{skipped} earlier steps are not shown; --tail 0 shows all steps"));
    }
    Ok(0)
}
