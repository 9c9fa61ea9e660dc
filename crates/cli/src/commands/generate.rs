//! `rlood generate`: a prompt to the base model and to a checkpoint.

use std::io::Read;
use std::time::Duration;

use clap::Args;
use serde_json::{Map, Value, json};

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::text;
use crate::names;
use crate::output::{clean_lines, shown};

/// The server's time limit of one question.
const WORK: Duration = Duration::from_secs(120);

/// Flags of `rlood generate`.
#[derive(Debug, Clone, Args)]
pub struct Generate {
    /// The job, or a checkpoint of it: JOB, JOB@120, JOB@last, JOB@best, ckpt_….
    #[arg(value_name = "JOB|CKPT", add = super::completions::jobs())]
    pub checkpoint: String,

    /// The prompt; `-` reads standard input.
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: String,

    /// Send the prompt as a user's chat message, through the model's template.
    #[arg(long)]
    pub chat: bool,

    /// Completions of each model, 1 to 8. Default: as the server says.
    #[arg(short = 'n', long, value_name = "N")]
    pub num_generations: Option<u32>,

    /// Seed: the same seed gives the same texts. Default: the job's.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// Temperature of sampling; 0 takes the most likely token. Default: the job's.
    #[arg(long, value_name = "T")]
    pub temperature: Option<f64>,

    /// Most tokens of a completion. Default: the job's.
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// When the job has no checkpoint, or the server cannot generate.
pub async fn run(context: &Context, args: &Generate) -> Result<u8, CliError> {
    // As `rlood pull` chooses: one name means one checkpoint.
    let checkpoint = names::checkpoint(context, &args.checkpoint).await?;
    let body = request(args, checkpoint.step)?;
    let job = checkpoint.job_id.to_string();
    let call = context.client.raw_ask(&["jobs", &job, "generate"]).body(&body).work(WORK);
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
        std::io::stdin().read_to_string(&mut prompt).map_err(CliError::local("read standard input"))?;
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
