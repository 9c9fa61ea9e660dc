//! `rlood submit`: a job from a file.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use rlood_client::{Document, RawAnswer};
use rlood_types::id::JobId;
use serde_json::{Value, json};

use crate::context::{Common, Context};
use crate::error::{CliError, EXIT_USAGE};
use crate::follow::{detached, exit_code, live, report_outcome, text, wait_for, within};
use crate::job_file::{JobFile, Setting, uploads};
use crate::output::{clean, parse_span, shown, size};
use crate::profiles;

/// Flags of `rlood submit`.
#[derive(Debug, Clone, Args)]
pub struct Submit {
    /// The job as JSON, YAML or TOML; `-` reads standard input. Rows may be a local file, `"dataset": "rows.jsonl"` or
    /// `{"file": "rows.csv", "map": …}`, with a path from the job file's folder on.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Change a setting of the job: `rloo.beta=0.01`, `rewards.0.weight=2`. What is JSON has its type, the rest is text. May be
    /// given several times.
    #[arg(long = "set", value_name = "PATH=VALUE", value_parser = Setting::parse)]
    pub settings: Vec<Setting>,

    /// File of rows to train on, in place of the job's dataset.
    #[arg(long, value_name = "FILE")]
    pub dataset: Option<PathBuf>,

    /// The file is a configuration of TRL, as `rlood convert --trl` reads it.
    #[arg(long)]
    pub trl: bool,

    /// Check the job and show what it would do; submit nothing. Local files are uploaded, since the check counts their rows.
    #[arg(long)]
    pub dry_run: bool,

    /// Wait until the job is over; the exit code says how it ended.
    #[arg(long, conflicts_with = "dry_run")]
    pub wait: bool,

    /// Follow the job until it is over, as `rlood watch` does. Ctrl-C detaches.
    #[arg(long, conflicts_with_all = ["dry_run", "wait"])]
    pub watch: bool,

    /// With --wait or --watch: end with exit code 124 after this time: 30s, 10m, 2h, 1d. The job goes on.
    #[arg(long, value_parser = parse_span, value_name = "TIME")]
    pub timeout: Option<Duration>,

    /// Submit under this Idempotency-Key: a second submission with it within 24 hours is the same job. Default: a new key.
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// When the job is not valid, or a file that it names cannot be used.
pub async fn run(context: &Context, args: &Submit) -> Result<u8, CliError> {
    let Submit { file, settings, dataset, trl, dry_run, wait, watch, timeout, idempotency_key, common: _ } = args;
    let mut job = JobFile::read(file)?;
    if *trl {
        job.document = translated(context, &job.document).await?;
    }
    if !job.document.is_object() {
        return Err(CliError::Usage(format!(
            "{}: a job is an object, {{\"model\": …, \"dataset\": …, \"rewards\": […]}}",
            file.display()
        )));
    }
    if let Some(path) = dataset {
        // A path of the command line starts where the user is.
        let path = std::path::absolute(path).map_err(CliError::local("read --dataset"))?;
        job.document["dataset"] = json!(path);
    }
    for setting in settings {
        setting.apply(&mut job.document)?;
    }
    uploads::replace_local_files(context, &mut job).await?;
    let document = Document::from(&job.document);
    let said = |error: rlood_client::Error| {
        for setting in settings {
            let errors = error.problem().map(|problem| problem.errors.as_slice()).unwrap_or_default();
            for field in errors.iter().filter(|field| setting.is_at(&field.pointer)) {
                context.out.note(format!("--set {}: {}", setting.text(), clean(&field.detail)));
            }
        }
        CliError::from(error)
    };
    if *dry_run {
        let answer = context.client.raw_ask(&["jobs", "validate"]).document(&document).send().await.map_err(said)?;
        return show_validation(context, settings, &answer);
    }
    let client = match idempotency_key {
        Some(key) => context.client.with_idempotency_key(key),
        None => context.client.clone(),
    };
    let answer = client.raw_post(&["jobs"]).document(&document).send().await.map_err(said)?;
    let id = text(&answer.value, "id").to_owned();
    // The next commands may say @last; that is no reason to fail.
    if let Err(error) = profiles::keep_last_job(&context.target.name(), &id) {
        context.out.note(format!("@last will not name this job: {error}"));
    }
    let id: JobId =
        id.parse().map_err(|_| CliError::Failed("the server answered without the id of the job".to_owned()))?;
    if context.out.json {
        context.out.json(&answer.text)?;
    } else if context.out.is_terminal {
        context.out.line(format!(
            "{id}  {}  {} steps",
            shown(&answer.value["state"]),
            shown(&answer.value["total_steps"])
        ))?;
        if !*wait && !*watch {
            context.out.note(format!("`rlood watch {id}` follows it"));
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
    jobs.iter().for_each(|job| report_outcome(&context.out, job));
    Ok(exit_code(&jobs))
}

/// The job that a configuration of TRL is here.
async fn translated(context: &Context, document: &Value) -> Result<Value, CliError> {
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
            Err(CliError::Usage(format!("this configuration of TRL is not a job here{}", lines.concat())))
        }
    }
}

fn show_validation(context: &Context, settings: &[Setting], answer: &RawAnswer) -> Result<u8, CliError> {
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
    out.line("valid; nothing was submitted")?;
    out.line(format!("model    {}", shown(&plan["model"]["id"])))?;
    out.line(format!("dataset  {}, {} rows", shown(&plan["dataset"]["id"]), shown(&plan["dataset"]["num_rows"])))?;
    out.line(format!("steps    {}", shown(&plan["totals"]["optimizer_steps"])))?;
    if let Some(bytes) = validation["estimate"]["total_bytes"].as_u64() {
        out.line(format!("memory   {}", size(bytes)))?;
    }
    Ok(0)
}
