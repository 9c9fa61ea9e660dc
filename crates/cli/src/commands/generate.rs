//! `rlood generate`: sends a prompt to the base model and to a checkpoint.

use std::io::Read;
use std::time::Duration;

use clap::Args;
use serde_json::{Map, Value, json};

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::text;
use crate::names;
use crate::output::{clean_lines, shown};

/// The server's time limit for one generation request.
const GENERATION_TIMEOUT: Duration = Duration::from_secs(120);

/// Flags of `rlood generate`.
#[derive(Debug, Clone, Args)]
pub struct Generate {
    /// Job, or one of its checkpoints: JOB, JOB@120, JOB@last, JOB@best, or a checkpoint id (ckpt_…).
    #[arg(value_name = "JOB|CKPT", add = super::completions::jobs())]
    pub checkpoint: String,

    /// Prompt; `-` reads the prompt from standard input.
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: String,

    /// Send the prompt as a user message, formatted by the model's chat template.
    #[arg(long)]
    pub chat: bool,

    /// Number of completions from each model, 1 to 8. Default: chosen by the server.
    #[arg(short = 'n', long, value_name = "N")]
    pub num_generations: Option<u32>,

    /// Random seed; the same seed gives the same completions. Default: the job's seed.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// Sampling temperature; 0 always takes the most likely token. Default: the job's temperature.
    #[arg(long, value_name = "T")]
    pub temperature: Option<f64>,

    /// Maximum number of tokens in a completion. Default: the job's limit.
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the job has no checkpoint, or the server cannot generate.
pub async fn run(context: &Context, args: &Generate) -> Result<u8, CliError> {
    // The checkpoint's name is resolved as in `rlood pull`, so that a name means the same checkpoint in both commands.
    let checkpoint = names::checkpoint(context, &args.checkpoint).await?;
    let body = request(args, checkpoint.step)?;
    let job = checkpoint.job_id.to_string();
    let call = context.client.raw_ask(&["jobs", &job, "generate"]).body(&body).work(GENERATION_TIMEOUT);
    let answer = call.send().await?;
    if context.out.json {
        context.out.json(&answer.text)?;
        return Ok(0);
    }
    let generation = answer.value;
    context.out.note(format!("{}: step {}", shown(&generation["checkpoint_id"]), shown(&generation["step"])));
    for (label, key) in [("base", "base"), ("trained", "trained")] {
        for (index, completion) in generation[key].as_array().into_iter().flatten().enumerate() {
            let head = format!(
                "{label} {}  {} tokens, {}",
                index + 1,
                shown(&completion["num_tokens"]),
                shown(&completion["finish_reason"])
            );
            context.out.line(console::style(head).bold().to_string())?;
            context.out.line(clean_lines(text(completion, "completion")))?;
        }
    }
    Ok(0)
}

fn request(args: &Generate, step: u64) -> Result<Value, CliError> {
    let mut prompt = args.prompt.clone();
    if prompt == "-" {
        prompt.clear();
        std::io::stdin().read_to_string(&mut prompt).map_err(CliError::local("read the prompt from standard input"))?;
    }
    let prompt = if args.chat { json!([{"role": "user", "content": prompt}]) } else { Value::String(prompt) };
    let mut sampling = Map::new();
    for (name, value) in [
        ("temperature", args.temperature.map(Value::from)),
        ("max_completion_length", args.max_tokens.map(Value::from)),
    ] {
        sampling.extend(value.map(|value| (name.to_owned(), value)));
    }
    let mut body = json!({"prompt": prompt, "checkpoint": step});
    for (name, value) in [
        ("num_generations", args.num_generations.map(Value::from)),
        ("seed", args.seed.map(Value::from)),
        ("sampling", (!sampling.is_empty()).then_some(Value::Object(sampling))),
    ] {
        if let Some(value) = value {
            body[name] = value;
        }
    }
    Ok(body)
}
