//! `rlood samples`: prints completions with their rewards.

use clap::Args;
use serde_json::Value;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::text;
use crate::listing::Listing;
use crate::names;
use crate::output::{clean, clean_lines, format_number, shown};

/// Maximum number of characters of a prompt or completion that are shown without --full.
const MAX_SHOWN_CHARS: usize = 300;

/// Flags of `rlood samples`.
#[derive(Debug, Clone, Args)]
pub struct Samples {
    /// Job: its id, at least 6 characters of the id after job_, its name, or @last.
    #[arg(value_name = "JOB", add = super::completions::jobs())]
    pub job: String,

    /// Show only samples of this optimizer step; 0 is the state before training.
    #[arg(long, value_name = "N")]
    pub step: Option<u64>,

    /// Show only samples from training (train) or from evaluations (eval).
    #[arg(long, value_name = "PHASE", value_parser = ["train", "eval"])]
    pub phase: Option<String>,

    /// Show only samples whose prompt or completion contains this text.
    #[arg(long, value_name = "TEXT")]
    pub contains: Option<String>,

    /// Show the N samples with the lowest reward.
    #[arg(long, value_name = "N", conflicts_with_all = ["best", "limit"], value_parser = clap::value_parser!(u64).range(1..))]
    pub worst: Option<u64>,

    /// Show the N samples with the highest reward.
    #[arg(long, value_name = "N", conflicts_with = "limit", value_parser = clap::value_parser!(u64).range(1..))]
    pub best: Option<u64>,

    /// Maximum number of samples to show, latest first; 0 shows all.
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub limit: usize,

    /// Show texts in full, with their line breaks. Default: the beginning and the end, on one line.
    #[arg(long)]
    pub full: bool,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the job does not exist.
pub async fn run(context: &Context, args: &Samples) -> Result<u8, CliError> {
    let Samples { job, step, phase, contains, worst, best, limit, full, common: _ } = args;
    let id = names::job(context, job).await?;
    let call = context.client.raw_get(&["jobs", &id.to_string(), "samples"]);
    let call = call.query_if("step", *step).query_if("phase", phase.as_ref()).query_if("q", contains.as_ref());
    let (call, limit) = match (worst, best) {
        (Some(count), _) => (call.query("sort", "worst"), *count as usize),
        (None, Some(count)) => (call.query("sort", "best"), *count as usize),
        (None, None) => (call, *limit),
    };
    let listing = Listing::read(call, limit).await?;
    if context.out.json {
        context.out.json(&listing.document)?;
        return Ok(0);
    }
    if listing.items.is_empty() {
        context.out.note("no samples");
    }
    for sample in &listing.items {
        print(context, sample, *full)?;
    }
    Ok(0)
}

fn print(context: &Context, sample: &Value, full: bool) -> Result<(), CliError> {
    let out = &context.out;
    let head = format!(
        "step {}  {}  {}  reward {}  advantage {}  {} tokens, {}",
        shown(&sample["step"]),
        shown(&sample["phase"]),
        shown(&sample["prompt_id"]),
        shown(&sample["reward"]),
        shown(&sample["advantage"]),
        shown(&sample["num_tokens"]),
        shown(&sample["finish_reason"])
    );
    out.line(console::style(head).bold().to_string())?;
    let rewards = sample["rewards"].as_object().into_iter().flatten();
    let rewards: Vec<String> = rewards
        .map(|(name, value)| format!("{} {}", clean(name), value.as_f64().map_or_else(|| shown(value), format_number)))
        .collect();
    if rewards.len() > 1 {
        out.line(format!("  {}", rewards.join("  ")))?;
    }
    for (mark, key) in [(">", "prompt"), ("<", "completion")] {
        let given = match &sample[key] {
            Value::String(_) => text(sample, key).to_owned(),
            other => other.to_string(),
        };
        let shown = if full { clean_lines(&given) } else { shorten(&given) };
        for line in shown.lines() {
            out.line(format!("  {mark} {line}"))?;
        }
    }
    out.line("")
}

/// Puts a text on one line, and replaces its middle by an ellipsis if it is longer than the limit.
fn shorten(text: &str) -> String {
    let text = clean(text);
    let count = text.chars().count();
    if count <= MAX_SHOWN_CHARS {
        return text;
    }
    let begin: String = text.chars().take(MAX_SHOWN_CHARS / 2).collect();
    let end: String = text.chars().skip(count - MAX_SHOWN_CHARS / 2).collect();
    format!("{begin} … {end}")
}
