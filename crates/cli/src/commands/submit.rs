//! `rlood submit`: submits a job from a file.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use rlood_client::{Document, RawAnswer};
use rlood_types::id::JobId;
use serde_json::{Value, json};

use crate::context::{Common, Context};
use crate::error::{CliError, EXIT_USAGE};
use crate::follow::{detached, exit_code, live, report_outcomes, stoppable, text, wait_for, within};
use crate::job_file::dry_run::DryRun;
use crate::job_file::{JobFile, Setting, uploads};
use crate::output::{clean, format_bytes, parse_duration, shown};
use crate::profiles;

/// Flags of `rlood submit`.
#[derive(Debug, Clone, Args)]
pub struct Submit {
    /// JSON, YAML or TOML file with the job; `-` reads standard input. A dataset may be a local file: `"dataset": "rows.jsonl"`
    /// or `{"file": "rows.csv", "map": …}`, with a path relative to the job file's folder.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Change a setting of the job, for example `rloo.beta=0.01` or `rewards.0.weight=2`. A value that is valid JSON keeps its
    /// type; other values are strings. Can be given several times.
    #[arg(long = "set", value_name = "PATH=VALUE", value_parser = Setting::parse)]
    pub settings: Vec<Setting>,

    /// File of rows to train on, instead of the job's dataset.
    #[arg(long, value_name = "FILE")]
    pub dataset: Option<PathBuf>,

    /// Read the file as a TRL configuration, as in `rlood convert --trl`.
    #[arg(long)]
    pub trl: bool,

    /// Check the job and show its plan without submitting it. Nothing stays on the server: rows of small files are sent with the
    /// job, and what has to be uploaded or registered for the check is removed after it.
    #[arg(long)]
    pub dry_run: bool,

    /// Wait until the job finishes, and report its outcome in the exit code.
    #[arg(long, conflicts_with = "dry_run")]
    pub wait: bool,

    /// Follow the job until it finishes, as `rlood watch` does. Ctrl-C detaches without stopping it.
    #[arg(long, conflicts_with_all = ["dry_run", "wait"])]
    pub watch: bool,

    /// Time limit for --wait or --watch: 30s, 10m, 2h, 1d. At the limit the command exits with code 124,
    /// and the job keeps running.
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub timeout: Option<Duration>,

    /// Idempotency-Key of the request. Submitting again with the same key within 24 hours returns the same
    /// job. Default: a new key.
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the job is not valid, or a file that it names cannot be used.
pub async fn run(context: &Context, args: &Submit) -> Result<u8, CliError> {
    let Submit { file: _, settings, dataset: _, trl: _, dry_run, wait, watch, timeout, idempotency_key, common: _ } =
        args;
    let mut job = read_job(context, args).await?;
    if *dry_run {
        return check(context, job, settings).await;
    }
    uploads::replace_local_files(context, &mut job, None).await?;
    let document = Document::from(&job.document);
    let client = match idempotency_key {
        Some(key) => context.client.with_idempotency_key(key),
        None => context.client.clone(),
    };
    let answer = client.raw_post(&["jobs"]).document(&document).send().await;
    let answer = answer.map_err(|error| explained(context, settings, error))?;
    let id = text(&answer.value, "id").to_owned();
    // If the job cannot be saved as @last, later commands cannot use @last, but the job is submitted.
    if let Err(error) = profiles::save_last_job(&context.target.name(), &id) {
        context.out.note(format!("cannot save this job as @last: {error}"));
    }
    let id: JobId =
        id.parse().map_err(|_| CliError::Failed("the server's response does not contain the job's id".to_owned()))?;
    if context.out.json {
        context.out.json(&answer.text)?;
    } else if context.out.is_terminal {
        context.out.line(format!(
            "{id}  {}  {} steps",
            shown(&answer.value["state"]),
            shown(&answer.value["total_steps"])
        ))?;
        if !*wait && !*watch {
            context.out.note(format!("follow it with `rlood watch {id}`"));
        }
    } else {
        context.out.line(id.to_string())?;
    }
    if !*wait && !*watch {
        return Ok(0);
    }
    let followed = async {
        match watch {
            true => live::watch(context, &[id], false).await,
            false => wait_for(context, id, false).await.map(|job| vec![job]),
        }
    };
    let jobs = detached(&[id], "watch", within(*timeout, followed)).await?;
    report_outcomes(context, &jobs).await;
    Ok(exit_code(&jobs))
}

/// Reads the job file, and applies the flags that change the job.
async fn read_job(context: &Context, args: &Submit) -> Result<JobFile, CliError> {
    let Submit { file, settings, dataset, trl, .. } = args;
    let mut job = JobFile::read(file)?;
    if *trl {
        job.document = translate_trl(context, &job.document).await?;
    }
    if !job.document.is_object() {
        return Err(CliError::Usage(format!(
            "{}: a job must be an object, {{\"model\": …, \"dataset\": …, \"rewards\": […]}}",
            file.display()
        )));
    }
    if let Some(path) = dataset {
        // A dataset path on the command line is relative to the current directory; a path in the job file is relative
        // to the file's folder.
        let path = std::path::absolute(path).map_err(CliError::local("read --dataset"))?;
        job.document["dataset"] = json!(path);
    }
    for setting in settings {
        setting.apply(&mut job.document)?;
    }
    Ok(job)
}

/// Checks the job without submitting it, and removes from the server what was created for the check.
async fn check(context: &Context, mut job: JobFile, settings: &[Setting]) -> Result<u8, CliError> {
    let mut dry_run = DryRun::of(&job.document);
    let checked = stoppable("stopped; nothing was submitted", async {
        uploads::replace_local_files(context, &mut job, Some(&mut dry_run)).await?;
        let document = Document::from(&job.document);
        let answer = context.client.raw_ask(&["jobs", "validate"]).document(&document).send().await;
        answer.map_err(|error| explained(context, settings, error))
    })
    .await;
    dry_run.remove(context).await;
    show_validation(context, settings, &checked?, &dry_run)
}

/// Names the `--set` whose value the server rejected.
fn explained(context: &Context, settings: &[Setting], error: rlood_client::Error) -> CliError {
    for setting in settings {
        let errors = error.problem().map(|problem| problem.errors.as_slice()).unwrap_or_default();
        for field in errors.iter().filter(|field| setting.is_at(&field.pointer)) {
            context.out.note(format!("--set {}: {}", setting.text(), clean(&field.detail)));
        }
    }
    CliError::from(error)
}

/// Asks the server to translate a TRL configuration into a job.
async fn translate_trl(context: &Context, document: &Value) -> Result<Value, CliError> {
    let document = Document::from(document);
    let call = context.client.raw_ask(&["jobs", "validate"]).query("from", "trl");
    let answer = call.document(&document).send().await?.value;
    for (word, key) in [("not supported", "unsupported"), ("ignored", "ignored")] {
        for remark in answer[key].as_array().into_iter().flatten() {
            context.out.note(format!("{word}: {}: {}", shown(&remark["key"]), shown(&remark["reason"])));
        }
    }
    match &answer["spec"] {
        Value::Object(spec) => Ok(Value::Object(spec.clone())),
        _ => {
            let errors = answer["errors"].as_array().into_iter().flatten();
            let lines: Vec<String> =
                errors.map(|error| format!("\n  {}: {}", shown(&error["pointer"]), shown(&error["detail"]))).collect();
            Err(CliError::Usage(format!("this TRL configuration cannot be translated into a job{}", lines.concat())))
        }
    }
}

fn show_validation(
    context: &Context,
    settings: &[Setting],
    answer: &RawAnswer,
    dry_run: &DryRun,
) -> Result<u8, CliError> {
    let out = &context.out;
    let validation = &answer.value;
    let is_valid = validation["valid"] == true;
    if out.json {
        out.json(&answer.text)?;
        return Ok(if is_valid { 0 } else { EXIT_USAGE });
    }
    for error in validation["errors"].as_array().into_iter().flatten() {
        let pointer = text(error, "pointer");
        let setting = settings.iter().find(|setting| setting.is_at(pointer));
        let flag = setting.map(|setting| format!(" (--set {})", setting.text())).unwrap_or_default();
        out.note(format!("{}{flag}: {}", clean(pointer), clean(text(error, "detail"))));
    }
    for warning in validation["warnings"].as_array().into_iter().flatten() {
        out.note(format!("warning: {}: {}", shown(&warning["pointer"]), shown(&warning["detail"])));
    }
    if !is_valid {
        out.note("the job is not valid; nothing was submitted");
        return Ok(EXIT_USAGE);
    }
    let plan = &validation["plan"];
    out.line("the job is valid; nothing was submitted")?;
    out.line(format!("model    {}", shown(&plan["model"]["id"])))?;
    let dataset = &plan["dataset"];
    // Rows that were sent with the job have no id.
    let id = dataset["id"].as_str().filter(|id| !dry_run.is_temporary(id));
    let id = id.map(|id| format!("{}, ", clean(id))).unwrap_or_default();
    out.line(format!("dataset  {id}{} rows", shown(&dataset["num_rows"])))?;
    out.line(format!("steps    {}", shown(&plan["totals"]["optimizer_steps"])))?;
    if let Some(bytes) = validation["estimate"]["total_bytes"].as_u64() {
        out.line(format!("memory   {}", format_bytes(bytes)))?;
    }
    Ok(0)
}
