//! `rlood verify`: checks by a certificate whether a server, or a folder, computes what a checkpoint computes.

mod ask;

use std::path::PathBuf;
use std::process::Stdio;

use clap::Args;
use rlood_client::{Client, Retry};
use rlood_types::certificate::{
    Asked, Certificate, CertifyReport, CertifyTask, Comparison, Finding, MIN_EFFECT, Measured, compare,
    default_tolerance,
};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use self::ask::{Asker, Tokens};
use crate::context::{Common, Context};
use crate::error::CliError;
use crate::names;
use crate::output::clean;
use crate::target::is_loopback;

/// Flags of `rlood verify`.
#[derive(Debug, Clone, Args)]
pub struct Verify {
    /// Checkpoint whose certificate to use: a job (its best checkpoint, else its newest), JOB@120 for a step, JOB@last,
    /// JOB@best, or a checkpoint id (ckpt_…).
    #[arg(value_name = "JOB|CKPT", add = super::completions::jobs(), required_unless_present = "certificate")]
    pub checkpoint: Option<String>,

    /// File with the certificate: the certificate.json of a checkpoint. No server of rlood is needed then.
    #[arg(long, value_name = "FILE", conflicts_with = "checkpoint")]
    pub certificate: Option<PathBuf>,

    /// Address of the server to check, with OpenAI's API, up to and including /v1. Default: the rlood server itself.
    #[arg(long, value_name = "URL", conflicts_with = "model_dir")]
    pub url: Option<String>,

    /// Name of the model at the server to check. Default: the checkpoint's id.
    #[arg(long, value_name = "NAME", conflicts_with = "model_dir")]
    pub model: Option<String>,

    /// API key of the server to check. Other users can see it in the process list: prefer the variable.
    #[arg(long, env = "RLOOD_URL_KEY", hide_env_values = true, value_name = "KEY", requires = "url")]
    pub url_key: Option<String>,

    /// Folder to check instead of a server: a complete model, such as a merged one, or the base model with --adapter.
    #[arg(long, value_name = "DIR")]
    pub model_dir: Option<PathBuf>,

    /// Folder of a PEFT adapter to apply to the model of --model-dir.
    #[arg(long, value_name = "DIR", requires = "model_dir")]
    pub adapter: Option<PathBuf>,

    /// Largest difference that counts as equal, in nats (root mean square). Default: 0.005, or 0.05 if the checkpoint was trained
    /// in bf16. A server that computes in bf16 differs by 0.01 to 0.05.
    #[arg(long, value_name = "NATS", value_parser = nats)]
    pub tolerance: Option<f64>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

fn nats(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(nats) if nats > 0.0 && nats.is_finite() => Ok(nats),
        Ok(_) | Err(_) => Err("give a number above 0, such as 0.05".to_owned()),
    }
}

/// The questions to the server, and its answers.
struct Answers {
    asked: Asked,
    logps: Vec<Measured>,
    tokens: Vec<Tokens>,
}

/// # Errors
/// Fails when the certificate cannot be read, or the server or folder cannot be asked.
pub async fn run(context: &Context, args: &Verify) -> Result<u8, CliError> {
    let (certificate, id) = certificate(context, args).await?;
    let answers = match &args.model_dir {
        Some(model_dir) => of_files(args, model_dir.clone(), certificate.clone()).await?,
        None => of_server(context, args, &certificate, id.as_deref()).await?,
    };
    let tolerance = args.tolerance.unwrap_or_else(|| default_tolerance(certificate.dtype));
    let mut comparison = compare(&certificate, &answers.logps, tolerance);
    let other = certificate.texts().zip(&answers.tokens).find(|((_, ids), tokens)| !tokens.may_be(ids));
    if other.is_some() {
        comparison.finding = Finding::OtherTokenizer;
    }
    let checked = answers.tokens.iter().any(|tokens| *tokens != Tokens::Unknown);
    if context.out.json {
        let document = json!({
            "checkpoint_id": id, "step": certificate.step, "asked": answers.asked, "is_tokenizer_checked": checked,
            "comparison": comparison,
        });
        context.out.json(&document.to_string())?;
    } else {
        for line in report(&certificate, &comparison, answers.asked, checked) {
            context.out.line(line)?;
        }
        if let Some(((text, ids), tokens)) = other {
            let found = match tokens {
                Tokens::Ids(found) => format!("{found:?}"),
                Tokens::Count(count) => format!("{count} tokens"),
                Tokens::Unknown => String::new(),
            };
            context.out.line(format!("  {:?} is {ids:?} by the certificate, and {found} here", clean(text)))?;
        }
    }
    Ok(comparison.finding.exit_code())
}

/// Reads the certificate from a file, or fetches that of a checkpoint. Returns it with the checkpoint's id, if that is known.
async fn certificate(context: &Context, args: &Verify) -> Result<(Certificate, Option<String>), CliError> {
    let unusable = |of: &str, why: String| CliError::Usage(format!("{of} cannot be used: {why}"));
    if let Some(path) = &args.certificate {
        let of = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|error| unusable(&of, error.to_string()))?;
        let certificate = Certificate::read(&bytes).map_err(|why| unusable(&of, why))?;
        return Ok((certificate, None));
    }
    let Some(name) = &args.checkpoint else {
        return Err(CliError::Usage("name a checkpoint, or give --certificate".to_owned()));
    };
    let checkpoint = names::checkpoint(context, name).await?;
    let (id, step, job) = (checkpoint.id, checkpoint.step, checkpoint.job_id);
    context.out.note(format!("{id}: step {step} of {job}{}", if checkpoint.best { ", the best" } else { "" }));
    let document = context.client.get_certificate(id).await?;
    let certificate = Certificate::read(document.to_string().as_bytes());
    let certificate = certificate.map_err(|why| unusable(&format!("the certificate of {id}"), why))?;
    Ok((certificate, Some(id.to_string())))
}

/// Asks a server over HTTP.
async fn of_server(
    context: &Context,
    args: &Verify,
    certificate: &Certificate,
    id: Option<&str>,
) -> Result<Answers, CliError> {
    let own = format!("{}/v1", context.target.server.trim_end_matches('/'));
    let url = args.url.as_deref().unwrap_or(&own).trim_end_matches('/');
    let Some(model) = args.model.as_deref().or(id) else {
        return Err(CliError::Usage("name the model at the server with --model".to_owned()));
    };
    if args.certificate.is_some() && args.url.is_none() {
        return Err(CliError::Usage("name the server to check with --url, or a folder with --model-dir".to_owned()));
    }
    let key = if args.url.is_some() { args.url_key.as_ref() } else { context.target.key.as_ref() };
    let client = |url: &str| {
        let mut builder = Client::builder(url).retry(Retry { max_retries: 2, ..Retry::default() });
        if let Some(key) = key {
            builder = builder.api_key(key);
        }
        if is_loopback(url) {
            builder = builder.no_proxy();
        }
        builder.build()
    };
    let (api, root) = (client(url)?, client(url.strip_suffix("/v1").unwrap_or(url))?);
    let asker = Asker { api: &api, root: &root, model };
    let (asked, logps) = asker.measure(certificate).await?;
    Ok(Answers { asked, logps, tokens: asker.tokenize(certificate).await? })
}

/// Computes with the files of a folder, in a process of its own.
async fn of_files(args: &Verify, model_dir: PathBuf, certificate: Certificate) -> Result<Answers, CliError> {
    let absolute = |path: &PathBuf| {
        std::fs::canonicalize(path).map_err(|error| CliError::Usage(format!("{}: {error}", path.display())))
    };
    let adapter_dir = args.adapter.as_ref().map(absolute).transpose()?;
    let model_dir = absolute(&model_dir)?;
    let task = CertifyTask::Measure { model_dir, adapter_dir, certificate: Box::new(certificate) };
    let mut line = serde_json::to_vec(&task).map_err(|error| CliError::Failed(error.to_string()))?;
    line.push(b'\n');
    let program = std::env::current_exe().map_err(CliError::local("find the program rlood"))?;
    let child = tokio::process::Command::new(program)
        .args(["certifier", "--log", "error"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn();
    let mut child = child.map_err(CliError::local("start the process that computes"))?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let (Some(mut stdin), Some(mut stdout)) = (stdin, stdout) else {
        return Err(CliError::Failed("the process that computes has no standard input or output".to_owned()));
    };
    stdin.write_all(&line).await.map_err(CliError::local("write to the process that computes"))?;
    let mut report = Vec::new();
    stdout.read_to_end(&mut report).await.map_err(CliError::local("read from the process that computes"))?;
    let status = child.wait().await.map_err(CliError::local("wait for the process that computes"))?;
    drop(stdin);
    match serde_json::from_slice(&report) {
        Ok(CertifyReport::Measured { logps, ids }) => {
            Ok(Answers { asked: Asked::Files, logps, tokens: ids.into_iter().map(Tokens::Ids).collect() })
        }
        Ok(CertifyReport::Failed(why)) => Err(CliError::Failed(format!("the folder cannot be computed: {why}"))),
        Ok(CertifyReport::Certified(_)) | Err(_) => {
            Err(CliError::Failed(format!("the process that computes ended without a report ({status})")))
        }
    }
}

/// The finding in words, and the numbers behind it.
fn report(certificate: &Certificate, comparison: &Comparison, asked: Asked, checked: bool) -> Vec<String> {
    let Comparison { finding, num_tokens, effect, difference, max_difference, scale, precision, tolerance } =
        *comparison;
    let verdict = match finding {
        Finding::Equal => "equal: it computes what the checkpoint computes".to_owned(),
        Finding::BaseModel => "base model: the adapter is not applied".to_owned(),
        Finding::AppliedTwice => {
            "applied twice: the adapter is added to a model into which it is merged already".to_owned()
        }
        Finding::WrongScale => {
            let rslora = if certificate.lora.as_ref().is_some_and(|lora| lora.use_rslora) {
                "; the adapter has use_rslora, so its scale is alpha/√r"
            } else {
                ""
            };
            format!("wrong scale: the adapter is applied with {scale:.2} times its scale{rslora}")
        }
        Finding::OtherTokenizer => "other tokenizer: a text gets other tokens here".to_owned(),
        Finding::LowPrecision => format!(
            "precision too low: the checkpoint is applied, but the difference is {difference:.2e} nats; bf16 or quantized weights do this. If that is intended, allow it with --tolerance (now {tolerance})"
        ),
        Finding::OtherWeights => {
            "other weights: no scale of the adapter and no rounding explains the difference; another base model, or weights in another order, do this".to_owned()
        }
        Finding::CannotTell => format!(
            "cannot tell: the checkpoint's effect of {effect:.2e} nats is less than {MIN_EFFECT} times the precision of this comparison, {precision:.2e}"
        ),
    };
    let way = match asked {
        Asked::PromptLogprobs => "asked with prompt_logprobs",
        Asked::Echo => "asked with echo",
        Asked::ForcedTokens => "asked token by token with logit_bias",
        Asked::SampledTokens => "asked for greedy continuations",
        Asked::Files => "computed from the files",
    };
    let mut lines = vec![
        verdict,
        format!("  {num_tokens} tokens of {} prompts, {way}", certificate.prompts.len()),
        format!("  difference to the checkpoint {difference:.2e} nats, at most {max_difference:.2e}"),
        format!("  effect of the checkpoint {effect:.2e} nats; best scale {scale:.3}, precision {precision:.2e} nats"),
    ];
    if !checked {
        lines.push("  the tokenizer was not checked: the server does not say which tokens a text has".to_owned());
    }
    lines
}
