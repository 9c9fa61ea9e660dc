//! `rlood cancel`, `pause`, `resume`, `retry`, `fork` and `delete`. Each job is handled separately: one failure
//! does not stop the others.

use std::path::PathBuf;

use clap::Args;
use rlood_client::RawAnswer;
use rlood_types::id::{CheckpointId, JobId};
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
    /// Checkpoints that new jobs start from, one job each: JOB@120 for a step, JOB@last, JOB@best, or a checkpoint id (ckpt_…).
    #[arg(value_name = "JOB[@STEP]", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// Change a setting of each new job, as in `rlood submit --set`. Can be given several times.
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
        let answer = match context.client.raw_post(&[path[0], path[1], verb]).send().await {
            Ok(answer) => answer,
            Err(error) if error.code() == "illegal_move" => {
                let answer = context.client.raw_get(&path).send().await?;
                if !is_done(&answer.value) {
                    return Err(error.into());
                }
                answer
            }
            Err(error) => return Err(error.into()),
        };
        print(context, &answer)
    })
    .await
}

/// Runs `work` for each job, which also prints the result. All jobs are tried; the first error is returned, and every error is
/// printed when there are several jobs. The name of each job in messages is its `Display` form.
async fn for_each_job<J: std::fmt::Display>(
    context: &Context,
    jobs: &[J],
    work: impl AsyncFn(&J) -> Result<(), CliError>,
) -> Result<u8, CliError> {
    let mut failures = Vec::new();
    for job in jobs {
        match work(job).await {
            Ok(()) => {}
            // Standard output is closed, so the results of the other jobs cannot be printed either.
            Err(CliError::Closed) => return Err(CliError::Closed),
            Err(error) if jobs.len() == 1 => return Err(error),
            Err(error) => {
                context.out.note(format!("{job}: {error}"));
                failures.push(error);
            }
        }
    }
    let (done, all) = (jobs.len() - failures.len(), jobs.len());
    match failures.into_iter().next() {
        None => Ok(0),
        Some(error) => {
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
    let ids = names::jobs(context, &args.jobs).await?;
    for_each_job(context, &ids, async |id| {
        let call = context.client.raw_post(&["jobs", &id.to_string(), "retry"]);
        let call = match &args.from {
            Some(from) => call.body(&json!({"from": from})),
            None => call,
        };
        print_created(context, &call.send().await?)
    })
    .await
}

/// A checkpoint that `rlood fork` continues from.
struct Origin {
    id: CheckpointId,
    job: JobId,
    step: u64,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.job, self.step)
    }
}

/// # Errors
/// Fails when a checkpoint does not exist or a new job is not valid.
pub async fn fork(context: &Context, args: &Fork) -> Result<u8, CliError> {
    let Fork { jobs, settings, overrides, common: _ } = args;
    let mut origins: Vec<Origin> = Vec::with_capacity(jobs.len());
    for job in jobs {
        let rlood_client::Checkpoint { id, job_id, step, .. } = names::checkpoint(context, job).await?;
        if origins.iter().all(|origin| origin.id != id) {
            origins.push(Origin { id, job: job_id, step });
        }
    }
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
    for_each_job(context, &origins, async |Origin { id, job, step }| {
        let body = json!({"from_step": step, "overrides": own});
        let call = context.client.raw_post(&["jobs", &job.to_string(), "fork"]).body(&body);
        let answer = call.send().await?;
        context.out.note(format!("the new job starts from the checkpoint {id} of step {step}"));
        print_created(context, &answer)
    })
    .await
}

/// # Errors
/// Fails when a job is not finished, or the user does not confirm.
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
    for_each_job(context, &ids, async |id| {
        match context.client.raw_delete(&["jobs", &id.to_string()]).send().await {
            Ok(_) => context.out.note(format!("deleted {id}")),
            // A complete id is not looked up before, so the job may have been deleted by an earlier command.
            Err(error) if error.status() == Some(404) => context.out.note(format!("{id} does not exist (any more)")),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    })
    .await
}
