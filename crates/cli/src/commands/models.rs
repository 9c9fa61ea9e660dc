//! `rlood models`: lists, registers, shows and removes models.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use rlood_client::RawAnswer;
use serde_json::{Value, json};

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::{OutageRetry, text};
use crate::listing::Listing;
use crate::output::{NONE, Table, clean, format_age, format_bytes, format_duration, shown};
use crate::target::is_loopback;

/// How often the server is asked for the progress of a download.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Flags of `rlood models`.
#[derive(Debug, Clone, Args)]
pub struct Models {
    /// The action to run.
    #[command(subcommand)]
    pub action: Action,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// The actions of `rlood models`.
#[derive(Debug, Clone, Subcommand)]
pub enum Action {
    /// List the registered models.
    List {
        /// Print only the names, one per line.
        #[arg(short, long)]
        quiet: bool,
    },
    /// Register a model: ORG/NAME[@REVISION] of the Hugging Face Hub, which the server downloads, or with PATH a
    /// folder on the server's machine.
    Add {
        /// Repository on the Hub; with PATH, the name that jobs use for the model.
        name: String,
        /// Folder on the server's machine that contains config.json, *.safetensors and tokenizer.json.
        path: Option<PathBuf>,
        /// Name that jobs use for a model from the Hub. Default: its repository and revision.
        #[arg(long = "as", value_name = "NAME", conflicts_with = "path")]
        alias: Option<String>,
        /// Wait until the server has downloaded the model.
        #[arg(long)]
        wait: bool,
    },
    /// Show a model's architecture, size and state.
    Show {
        /// Name of the model.
        name: String,
    },
    /// Remove models from the server's list. Files in folders that you registered by PATH are kept.
    Remove {
        /// Names of the models.
        #[arg(required = true, num_args = 1.., value_name = "NAME")]
        names: Vec<String>,
    },
}

/// # Errors
/// Fails when the model does not exist or cannot be used.
pub async fn run(context: &Context, args: &Models) -> Result<u8, CliError> {
    match &args.action {
        Action::List { quiet } => list(context, *quiet).await?,
        Action::Add { name, path, alias, wait } => {
            return add(context, name, path.as_deref(), alias.as_deref(), *wait).await;
        }
        Action::Show { name } => {
            let answer = context.client.raw_get(&["models", name]).send().await?;
            if context.out.json { context.out.json(&answer.text)? } else { show(context, &answer.value)? }
        }
        Action::Remove { names } => {
            for name in names {
                context.client.raw_delete(&["models", name]).send().await?;
                context.out.note(format!("removed {}", clean(name)));
            }
        }
    }
    Ok(0)
}

async fn list(context: &Context, quiet: bool) -> Result<(), CliError> {
    let listing = Listing::read(context.client.raw_get(&["models"]), 0).await?;
    if context.out.json {
        return context.out.json(&listing.document);
    }
    if quiet {
        return listing.items.iter().try_for_each(|model| context.out.line(text(model, "id")));
    }
    if listing.items.is_empty() {
        context.out.note("the server has no models yet; register one from the Hub with `rlood models add ORG/NAME`");
        return Ok(());
    }
    let mut table = Table::new(&["name", "state", "architecture", "parameters", "size", "registered"]);
    for model in &listing.items {
        let card = &model["card"];
        table.row([
            shown(&model["id"]),
            state(model),
            shown(&card["architecture"]),
            card["num_parameters"].as_u64().map_or_else(|| NONE.to_owned(), count),
            card["size_bytes"].as_u64().map_or_else(|| NONE.to_owned(), format_bytes),
            format_age(&model["created_at"]),
        ]);
    }
    table.print(&context.out)
}

/// Formats a number of parameters: 596M, 7.6B.
fn count(parameters: u64) -> String {
    match parameters {
        0..10_000 => parameters.to_string(),
        10_000..1_000_000 => format!("{}K", parameters / 1000),
        1_000_000..1_000_000_000 => format!("{}M", parameters / 1_000_000),
        _ => format!("{:.1}B", parameters as f64 / 1e9),
    }
}

/// Formats the state of a model or dataset, with the progress of its download.
pub fn state(model: &Value) -> String {
    let state = shown(&model["state"]);
    match (model["bytes_done"].as_u64(), model["bytes_total"].as_u64()) {
        (Some(done), Some(total)) if state == "downloading" && total > 0 => {
            format!("{state} {} %", (done as f64 / total as f64 * 100.0) as u64)
        }
        _ => state,
    }
}

async fn add(
    context: &Context,
    name: &str,
    path: Option<&Path>,
    alias: Option<&str>,
    wait: bool,
) -> Result<u8, CliError> {
    let body = match path {
        Some(path) => {
            // A server with a loopback address runs on this machine, so a relative PATH can be resolved here.
            let path = match path.is_absolute() {
                true => path.to_owned(),
                false if is_loopback(&context.target.server) => {
                    std::path::absolute(path).map_err(CliError::local("read PATH"))?
                }
                false => {
                    let path = path.display();
                    return Err(CliError::Usage(format!(
                        "PATH '{path}' must be absolute, because it is a folder on the server's machine"
                    )));
                }
            };
            json!({"id": name, "source": path})
        }
        None => match alias {
            Some(alias) => json!({"hub": name, "id": alias}),
            None => json!({"hub": name}),
        },
    };
    let mut outage = OutageRetry::default();
    let mut answer = loop {
        let created = context.client.raw_post(&["models"]).body(&body).send().await;
        if let Some(answer) = outage.unwrap_or_wait(&context.out, created).await? {
            break answer;
        }
    };
    if wait && text(&answer.value, "state") == "downloading" {
        answer = downloaded(context, &["models", text(&answer.value, "id")]).await?;
    }
    let model = &answer.value;
    if context.out.json {
        context.out.json(&answer.text)?;
    } else {
        context.out.line(shown(&model["id"]))?;
        context.out.note(state(model));
    }
    if text(model, "state") == "failed" {
        return Err(CliError::Failed(format!("the download of the model failed: {}", clean(text(model, "problem")))));
    }
    Ok(0)
}

/// Asks the server for a model or dataset until it is not downloading any more, and prints the progress.
///
/// # Errors
/// Fails when the model or dataset was deleted, or the server is unreachable for too long.
pub async fn downloaded(context: &Context, path: &[&str]) -> Result<RawAnswer, CliError> {
    let mut outage = OutageRetry::default();
    let mut last_line = String::new();
    loop {
        let answer = context.client.raw_get(path).send().await;
        let Some(answer) = outage.unwrap_or_wait(&context.out, answer).await? else { continue };
        let found = &answer.value;
        if text(found, "state") != "downloading" {
            return Ok(answer);
        }
        let eta =
            found["eta_s"].as_f64().map(|eta| format!(", {} remaining", format_duration(eta))).unwrap_or_default();
        let line = format!("{}{eta}", state(found));
        if last_line != line {
            context.out.note(&line);
            last_line = line;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn show(context: &Context, model: &Value) -> Result<(), CliError> {
    let line = |label: &str, value: String| context.out.line(format!("{label:<12} {value}"));
    line("model", shown(&model["id"]))?;
    line("state", state(model))?;
    if model["problem"].is_string() {
        line("problem", shown(&model["problem"]))?;
    }
    if model["hub"].is_string() {
        line("hub", format!("{} at {}", shown(&model["hub"]), shown(&model["commit"])))?;
    }
    if model["renamed_to"].is_string() {
        line("renamed to", shown(&model["renamed_to"]))?;
    }
    line("folder", shown(&model["source"]))?;
    let card = &model["card"];
    for (label, key) in [
        ("architecture", "architecture"),
        ("task", "task"),
        ("parameters", "num_parameters"),
        ("precision", "precision"),
        ("layers", "num_hidden_layers"),
        ("width", "hidden_size"),
        ("vocabulary", "vocab_size"),
        ("context", "max_position_embeddings"),
        ("chat", "has_chat_template"),
    ] {
        line(label, shown(&card[key]))?;
    }
    line("size", card["size_bytes"].as_u64().map_or_else(|| NONE.to_owned(), format_bytes))?;
    line("sha256", shown(&model["sha256"]))?;
    line("registered", format_age(&model["created_at"]))
}
