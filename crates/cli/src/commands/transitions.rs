//! `rlood cancel`, `pause`, `resume`, `retry`, `fork` and `delete`. Each job is handled separately: one failure
//! does not stop the others.

use std::path::PathBuf;

use clap::Args;
use rlood_client::RawAnswer;
use rlood_types::id::JobId;
use serde_json::{Value, json};

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::text;
use crate::job_file::{JobFile, Setting};
use crate::names;
use crate::output::shown;
use crate::profiles;

/// Flags of `rlood cancel`.
#[derive(Debug, Clone, Args)]
pub struct Cancel {
    /// Jobs to cancel: an id, the beginning of an id, a name, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// Flags of `rlood pause`.
#[derive(Debug, Clone, Args)]
pub struct Pause {
    /// Jobs to pause: an id, the beginning of an id, a name, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// Flags of `rlood resume`.
#[derive(Debug, Clone, Args)]
pub struct Resume {
    /// Jobs to resume: an id, the beginning of an id, a name, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// Flags of `rlood retry`.
#[derive(Debug, Clone, Args)]
pub struct Retry {
    /// Jobs to retry: an id, the beginning of an id, a name, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// Where the new job starts: its latest checkpoint, or the start. Default: latest after a failure that the job
    /// did not cause, else start.
    #[arg(long, value_name = "WHERE", value_parser = ["latest", "start"])]
    pub from: Option<String>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// Flags of `rlood fork`.
#[derive(Debug, Clone, Args)]
pub struct Fork {
    /// Checkpoint that the new job starts from: JOB@120 for a step, JOB@last, JOB@best, or a checkpoint id (ckpt_…).
    #[arg(value_name = "JOB[@STEP]", add = super::completions::jobs())]
    pub job: String,

    /// Change a setting of the new job, as in `rlood submit --set`. Can be given several times.
    #[arg(long = "set", value_name = "PATH=VALUE", value_parser = Setting::parse)]
    pub settings: Vec<Setting>,

    /// JSON, YAML or TOML file with settings that replace those of the old job.
    #[arg(long, value_name = "FILE")]
    pub overrides: Option<PathBuf>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// Flags of `rlood delete`.
#[derive(Debug, Clone, Args)]
pub struct Delete {
    /// Jobs to delete: an id, the beginning of an id, a name, or @last. The jobs must be finished.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// Delete without asking for confirmation.
    #[arg(short, long)]
    pub yes: bool,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when a job does not exist or is finished.
pub async fn cancel(context: &Context, args: &Cancel) -> Result<u8, CliError> {
    let done = |job: &Value| text(job, "state") == "cancelled" || text(job, "requested") == "cancel";
    send_transitions(context, &args.jobs, "cancel", done).await
}

/// # Errors
/// Fails when a job does not exist or is finished.
pub async fn pause(context: &Context, args: &Pause) -> Result<u8, CliError> {
    let done = |job: &Value| text(job, "state") == "paused" || text(job, "requested") == "pause";
    send_transitions(context, &args.jobs, "pause", done).await
}

/// # Errors
/// Fails when a job does not exist or is finished.
pub async fn resume(context: &Context, args: &Resume) -> Result<u8, CliError> {
    let done = |job: &Value| matches!(text(job, "state"), "queued" | "running") && job["requested"].is_null();
    send_transitions(context, &args.jobs, "resume", done).await
}

/// Sends a request such as `cancel` for each job. A job that is already in the requested state counts as done.
async fn send_transitions(
    context: &Context,
    words: &[String],
    verb: &str,
    is_done: impl Fn(&Value) -> bool,
) -> Result<u8, CliError> {
    let ids = names::jobs(context, words).await?;
    for_each_job(context, &ids, async |id| {
        let path = ["jobs", &id.to_string()];
        match context.client.raw_post(&[path[0], path[1], verb]).send().await {
            Ok(answer) => Ok(answer),
            Err(error) if error.code() == "illegal_move" => {
                let answer = context.client.raw_get(&path).send().await?;
                if is_done(&answer.value) { Ok(answer) } else { Err(error.into()) }
            }
            Err(error) => Err(error.into()),
        }
    })
    .await?;
    Ok(0)
}

/// Runs `work` for each job and prints the resulting job. All jobs are tried; the first error is returned, and every error is
/// printed when there are several jobs.
async fn for_each_job(
    context: &Context,
    ids: &[JobId],
    work: impl AsyncFn(JobId) -> Result<RawAnswer, CliError>,
) -> Result<Vec<RawAnswer>, CliError> {
    let (mut answers, mut failed) = (Vec::new(), None);
    for id in ids {
        match work(*id).await {
            Ok(answer) => {
                print(context, &answer)?;
                answers.push(answer);
            }
            Err(error) if ids.len() == 1 => return Err(error),
            Err(error) => {
                context.out.note(format!("{id}: {error}"));
                failed.get_or_insert(error);
            }
        }
    }
    match failed {
        None => Ok(answers),
        Some(error) => {
            let (done, all) = (answers.len(), ids.len());
            context.out.note(format!("the command succeeded for {done} of {all} jobs"));
            Err(error)
        }
    }
}

fn print(context: &Context, answer: &RawAnswer) -> Result<(), CliError> {
    if context.out.json {
        return context.out.json(&answer.text);
    }
    let job = &answer.value;
    let requested = job["requested"].as_str().map(|request| format!(", {request} requested")).unwrap_or_default();
    context.out.line(format!("{}  {}{requested}", shown(&job["id"]), shown(&job["state"])))
}

/// Prints a job that was created by a retry or fork. Prints only the id when standard output is not a terminal.
fn print_created(context: &Context, answer: &RawAnswer) -> Result<(), CliError> {
    let id = text(&answer.value, "id");
    if let Err(error) = profiles::save_last_job(&context.target.name(), id) {
        context.out.note(format!("cannot save this job as @last: {error}"));
    }
    if context.out.json || context.out.is_terminal { print(context, answer) } else { context.out.line(id) }
}

/// # Errors
/// Fails when a job does not exist or is not finished.
pub async fn retry(context: &Context, args: &Retry) -> Result<u8, CliError> {
    for id in names::jobs(context, &args.jobs).await? {
        let call = context.client.raw_post(&["jobs", &id.to_string(), "retry"]);
        let call = match &args.from {
            Some(from) => call.body(&json!({"from": from})),
            None => call,
        };
        print_created(context, &call.send().await?)?;
    }
    Ok(0)
}

/// # Errors
/// Fails when the checkpoint does not exist or the new job is not valid.
pub async fn fork(context: &Context, args: &Fork) -> Result<u8, CliError> {
    let Fork { job, settings, overrides, common: _ } = args;
    let checkpoint = names::checkpoint(context, job).await?;
    let mut own = match overrides {
        Some(path) => JobFile::read(path)?.document,
        None => json!({}),
    };
    for setting in settings {
        // The server replaces a list of the old job's settings as a whole, so `--set` cannot change a single item of a list.
        setting.apply(&mut own).map_err(|error| {
            CliError::Usage(format!("{error}; to change a list of the old job, set the whole list"))
        })?;
    }
    let body = json!({"from_step": checkpoint.step, "overrides": own});
    let call = context.client.raw_post(&["jobs", &checkpoint.job_id.to_string(), "fork"]).body(&body);
    let answer = call.send().await?;
    context.out.note(format!("the new job starts from the checkpoint {} of step {}", checkpoint.id, checkpoint.step));
    print_created(context, &answer)?;
    Ok(0)
}

/// # Errors
/// Fails when a job does not exist or is not finished, or the user does not confirm.
pub async fn delete(context: &Context, args: &Delete) -> Result<u8, CliError> {
    let ids = names::jobs(context, &args.jobs).await?;
    if !args.yes {
        let what = match ids.as_slice() {
            [id] => id.to_string(),
            several => format!("{} jobs", several.len()),
        };
        let question = format!("Delete {what} with all checkpoints, samples and events?");
        context.out.confirm(&question, "--yes")?;
    }
    let mut failed = None;
    for id in &ids {
        match context.client.raw_delete(&["jobs", &id.to_string()]).send().await {
            Ok(_) => context.out.note(format!("deleted {id}")),
            Err(error) if ids.len() == 1 => return Err(error.into()),
            Err(error) => {
                context.out.note(format!("{id}: {error}"));
                failed.get_or_insert(CliError::from(error));
            }
        }
    }
    failed.map_or(Ok(0), Err)
}
