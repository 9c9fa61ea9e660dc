//! `rlood cancel`, `pause`, `resume`, `retry`, `fork`, `delete`: several jobs at once, each as if alone.

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
    /// The jobs: ids, beginnings of ids, names, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// Flags of `rlood pause`.
#[derive(Debug, Clone, Args)]
pub struct Pause {
    /// The jobs: ids, beginnings of ids, names, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// Flags of `rlood resume`.
#[derive(Debug, Clone, Args)]
pub struct Resume {
    /// The jobs: ids, beginnings of ids, names, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// Flags of `rlood retry`.
#[derive(Debug, Clone, Args)]
pub struct Retry {
    /// The jobs: ids, beginnings of ids, names, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// Where the new job begins: latest checkpoint, or start. Default: latest after a failure that was not the job's own, else
    /// start.
    #[arg(long, value_name = "WHERE", value_parser = ["latest", "start"])]
    pub from: Option<String>,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// Flags of `rlood fork`.
#[derive(Debug, Clone, Args)]
pub struct Fork {
    /// The job, with the step that the new one begins at: JOB@120, JOB@last, JOB@best, or a checkpoint, ckpt_….
    #[arg(value_name = "JOB[@STEP]", add = super::completions::jobs())]
    pub job: String,

    /// Change a setting of the new job, as `rlood submit --set` does. May be given several times.
    #[arg(long = "set", value_name = "PATH=VALUE", value_parser = Setting::parse)]
    pub settings: Vec<Setting>,

    /// File with the settings that the new job has of its own, as JSON, YAML or TOML; the rest is the old job's.
    #[arg(long, value_name = "FILE")]
    pub overrides: Option<PathBuf>,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// Flags of `rlood delete`.
#[derive(Debug, Clone, Args)]
pub struct Delete {
    /// The jobs: ids, beginnings of ids, names, or @last. They must be over.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// Delete without asking.
    #[arg(short, long)]
    pub yes: bool,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// When a job does not exist or is over.
pub async fn cancel(context: &Context, args: &Cancel) -> Result<u8, CliError> {
    let done = |job: &Value| text(job, "state") == "cancelled" || text(job, "requested") == "cancel";
    move_all(context, &args.jobs, "cancel", done).await
}

/// # Errors
/// When a job does not exist or is over.
pub async fn pause(context: &Context, args: &Pause) -> Result<u8, CliError> {
    let done = |job: &Value| text(job, "state") == "paused" || text(job, "requested") == "pause";
    move_all(context, &args.jobs, "pause", done).await
}

/// # Errors
/// When a job does not exist or is over.
pub async fn resume(context: &Context, args: &Resume) -> Result<u8, CliError> {
    let done = |job: &Value| matches!(text(job, "state"), "queued" | "running") && job["requested"].is_null();
    move_all(context, &args.jobs, "resume", done).await
}

/// Moves each of the jobs. One that is there already counts as moved.
async fn move_all(
    context: &Context,
    words: &[String],
    verb: &str,
    is_done: impl Fn(&Value) -> bool,
) -> Result<u8, CliError> {
    let ids = names::jobs(context, words).await?;
    each(context, &ids, async |id| {
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

/// Does something to each of the jobs and prints what became of it. All are tried; the first error is returned, the others are said.
async fn each(
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
            context.out.note(format!("{done} of {all} jobs were done"));
            Err(error)
        }
    }
}

fn print(context: &Context, answer: &RawAnswer) -> Result<(), CliError> {
    if context.out.json {
        return context.out.json(&answer.text);
    }
    let job = &answer.value;
    let requested = job["requested"].as_str().map(|wish| format!(", {wish} requested")).unwrap_or_default();
    context.out.line(format!("{}  {}{requested}", shown(&job["id"]), shown(&job["state"])))
}

/// Prints a job that was made: its id alone where a program reads it.
fn print_made(context: &Context, answer: &RawAnswer) -> Result<(), CliError> {
    let id = text(&answer.value, "id");
    if let Err(error) = profiles::keep_last_job(&context.target.name(), id) {
        context.out.note(format!("@last will not name this job: {error}"));
    }
    if context.out.json || context.out.is_terminal { print(context, answer) } else { context.out.line(id) }
}

/// # Errors
/// When a job does not exist or is not over.
pub async fn retry(context: &Context, args: &Retry) -> Result<u8, CliError> {
    for id in names::jobs(context, &args.jobs).await? {
        let call = context.client.raw_post(&["jobs", &id.to_string(), "retry"]);
        let call = match &args.from {
            Some(from) => call.body(&json!({"from": from})),
            None => call,
        };
        print_made(context, &call.send().await?)?;
    }
    Ok(0)
}

/// # Errors
/// When there is no such checkpoint, or the new job is not valid.
pub async fn fork(context: &Context, args: &Fork) -> Result<u8, CliError> {
    let Fork { job, settings, overrides, common: _ } = args;
    let checkpoint = names::checkpoint(context, job).await?;
    let mut own = match overrides {
        Some(path) => JobFile::read(path)?.document,
        None => json!({}),
    };
    for setting in settings {
        // A list is replaced whole: an item of it can only be changed in the old job's list.
        setting.apply(&mut own).map_err(|error| {
            CliError::Usage(format!("{error}; a list of the old job is replaced whole: set the list itself"))
        })?;
    }
    let body = json!({"from_step": checkpoint.step, "overrides": own});
    let call = context.client.raw_post(&["jobs", &checkpoint.job_id.to_string(), "fork"]).body(&body);
    let answer = call.send().await?;
    context.out.note(format!("from {} of step {}", checkpoint.id, checkpoint.step));
    print_made(context, &answer)?;
    Ok(0)
}

/// # Errors
/// When a job does not exist or is not over, or the user does not confirm.
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
