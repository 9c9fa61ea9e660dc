//! `rlood push`: lets the server upload a checkpoint to the model hub, and follows it.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::{OutageRetry, interruptible, report_progress, text};
use crate::hub_token::user_token;
use crate::names;
use crate::output::{clean, clean_lines, shown};

/// How often the server is asked for the state of a push.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Flags of `rlood push`.
#[derive(Debug, Clone, Args)]
pub struct Push {
    /// Checkpoint: a job (its best checkpoint, else its newest), JOB@120 for a step, JOB@last, JOB@best,
    /// or a checkpoint id (ckpt_…).
    #[arg(value_name = "CKPT|JOB", add = super::completions::jobs())]
    pub checkpoint: String,

    /// The repository on the model hub. It is created if it does not exist, as public unless --private is given.
    #[arg(value_name = "ORG/NAME")]
    pub repo: String,

    /// Push the adapter merged into the base model. Default: the adapter alone; after full fine-tuning the model.
    #[arg(long)]
    pub merged: bool,

    /// Precision of the weights of a merged model. Default: the base model's precision.
    #[arg(long, value_name = "DTYPE", value_parser = ["float32", "float16", "bfloat16"])]
    pub dtype: Option<String>,

    /// Create the repository as private. An existing public repository is then refused.
    #[arg(long)]
    pub private: bool,

    /// Branch that gets the commit. It is created if it does not exist. Default: main.
    #[arg(long, value_name = "BRANCH")]
    pub revision: Option<String>,

    /// Show some prompts and completions on the model card. Without this flag it contains none.
    #[arg(long, conflicts_with = "no_card")]
    pub with_samples: bool,

    /// Write no model card, and keep the README.md that the repository has.
    #[arg(long)]
    pub no_card: bool,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// Returns the flags of the connection with the user's hub token: that of --hub-token, else the one that huggingface_hub would use.
pub fn with_token(common: &Common) -> Common {
    let mut common = common.clone();
    if common.hub_token.as_deref().is_none_or(|token| token.trim().is_empty())
        && let Some((token, place)) = user_token(|name| std::env::var(name).ok())
    {
        common.out().note(format!("the hub token of {} is sent to the server, which does not store it", clean(&place)));
        common.hub_token = Some(token);
    }
    common
}

/// # Errors
/// Fails when the checkpoint does not exist, there is no token, the hub refuses the push, or it cannot be reached.
pub async fn run(context: &Context, args: &Push) -> Result<u8, CliError> {
    let checkpoint = names::checkpoint(context, &args.checkpoint).await?;
    let (id, step, job) = (checkpoint.id.to_string(), checkpoint.step, checkpoint.job_id);
    context.out.note(format!("{id}: step {step} of {job}{}", if checkpoint.best { ", the best" } else { "" }));
    let body = json!({
        "repo": args.repo,
        "revision": args.revision,
        "format": args.merged.then_some("merged"),
        "dtype": args.dtype,
        "private": args.private,
        "with_samples": args.with_samples,
        "card": !args.no_card,
    });
    let push = context.client.raw_post(&["checkpoints", &id, "pushes"]).body(&body).send().await?.value;
    let push_id = text(&push, "id").to_owned();
    let (push, document) = interruptible(&again(args, &id), finished(context, &push_id)).await?;
    if text(&push, "state") != "succeeded" {
        let error = &push["error"];
        let why = match error.is_object() {
            true => format!(": {}: {}", shown(&error["code"]), clean_lines(text(error, "message"))),
            false => String::new(),
        };
        return Err(CliError::Failed(format!("{push_id} {}{why}", shown(&push["state"]))));
    }
    let commit = shown(&push["commit"]);
    context.out.note(match push["is_new"].as_bool() {
        Some(false) => format!("the repository has these files already, in commit {commit}"),
        _ => format!("pushed as commit {commit}"),
    });
    if context.out.json {
        context.out.json(&document)?
    } else {
        context.out.line(clean(text(&push, "url")))?
    }
    Ok(0)
}

/// Returns the command that follows the same push again.
fn again(args: &Push, checkpoint: &str) -> String {
    let mut command = format!("rlood push {checkpoint} {}", clean(&args.repo));
    for (is_set, flag) in [
        (args.merged, "--merged"),
        (args.private, "--private"),
        (args.with_samples, "--with-samples"),
        (args.no_card, "--no-card"),
    ] {
        if is_set {
            command.push_str(&format!(" {flag}"));
        }
    }
    for (flag, value) in [("--dtype", &args.dtype), ("--revision", &args.revision)] {
        if let Some(value) = value {
            command.push_str(&format!(" {flag} {}", clean(value)));
        }
    }
    command
}

/// Asks the server for the state of a push until it has ended. Returns the push as JSON and as the response's text.
async fn finished(context: &Context, id: &str) -> Result<(Value, String), CliError> {
    let mut outage = OutageRetry::default();
    let mut last_line = String::new();
    loop {
        let answer = context.client.raw_get(&["pushes", id]).send().await;
        let Some(answer) = outage.unwrap_or_wait(&context.out, answer).await? else { continue };
        let mut push = answer.value;
        if !matches!(text(&push, "state"), "queued" | "running") {
            return Ok((push, answer.text));
        }
        if text(&push, "state") == "running" || text(&push, "stage") == "exporting" {
            push["state"] = push["stage"].clone();
        }
        report_progress(context, &push, &mut last_line);
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
