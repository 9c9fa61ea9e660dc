//! `rlood datasets`: lists, uploads, imports, shows and removes datasets.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use rlood_types::dataset::{Recipe, RecipeMap};
use rlood_types::id::DatasetId;
use rlood_types::spec::HubDataset;
use rlood_types::spec::format::Format;
use serde_json::{Value, json};

use crate::commands::models::{downloaded, state};
use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::{OutageRetry, interruptible, text};
use crate::job_file::local_rows::LocalRows;
use crate::job_file::uploads;
use crate::listing::Listing;
use crate::output::{Table, clean, format_age, format_bytes, shown};

/// Flags of `rlood datasets`.
#[derive(Debug, Clone, Args)]
pub struct Datasets {
    /// The action to run.
    #[command(subcommand)]
    pub action: Action,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// The actions of `rlood datasets`.
#[derive(Debug, Clone, Subcommand)]
pub enum Action {
    /// List the datasets, newest first.
    List {
        /// Print only the ids, one per line.
        #[arg(short, long)]
        quiet: bool,
    },
    /// Upload a file of rows and print the dataset's id. A file that was uploaded before is not uploaded again.
    Upload(Upload),
    /// Import a dataset of the Hugging Face Hub, which the server downloads, and print the dataset's id.
    Add(Add),
    /// Show a dataset's columns, size and hash.
    Show {
        /// Dataset: its id, or its name if the name is unique.
        dataset: String,
    },
    /// Print rows of a dataset as JSON, one row per line.
    Rows {
        /// Dataset: its id, or its name if the name is unique.
        dataset: String,
        /// Number of rows to print, from the first row; 0 prints all rows.
        #[arg(long, default_value_t = 10, value_name = "N")]
        limit: usize,
    },
    /// Delete datasets that no job uses.
    Remove {
        /// Datasets: ids, or names that are unique.
        #[arg(required = true, num_args = 1.., value_name = "DATASET")]
        datasets: Vec<String>,
    },
}

/// Flags of `rlood datasets upload`.
#[derive(Debug, Clone, Args)]
pub struct Upload {
    /// File of rows: NDJSON, JSON, CSV or TSV, optionally compressed with gzip or zstd, or Parquet.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Name of the dataset. Default: the file's name.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// How the rows are converted.
    #[command(flatten)]
    pub mapping: Mapping,
}

/// Flags of `rlood datasets add`.
#[derive(Debug, Clone, Args)]
pub struct Add {
    /// Repository on the Hub: ORG/NAME[@REVISION].
    #[arg(value_name = "ORG/NAME")]
    pub repo: String,

    /// Branch, tag or commit. Default: main.
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,

    /// Configuration (subset) of the dataset. Default: the default configuration, or the only one.
    #[arg(long, value_name = "NAME")]
    pub config: Option<String>,

    /// Split of the dataset. Default: train, or the only split.
    #[arg(long, value_name = "NAME")]
    pub split: Option<String>,

    /// Name of the dataset.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// How the rows are converted.
    #[command(flatten)]
    pub mapping: Mapping,

    /// Do not wait until the server has downloaded the dataset. Jobs may name it meanwhile, and wait for it.
    #[arg(long)]
    pub no_wait: bool,
}

/// Flags for the conversion of rows.
#[derive(Debug, Clone, Args)]
pub struct Mapping {
    /// Mapping from the source's columns to the fields of a row, like `map` of a job's dataset: inline JSON, or a
    /// JSON, YAML or TOML file.
    #[arg(long, value_name = "JSON|FILE")]
    pub map: Option<String>,

    /// Column, path or template that gives the prompt.
    #[arg(long, value_name = "COLUMN")]
    pub prompt: Option<String>,

    /// System message to put before each prompt.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,

    /// Maximum number of rows to keep, from the first row.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,

    /// Seed for a random sample of --limit rows. Default: the first rows.
    #[arg(long, value_name = "N", requires = "limit")]
    pub seed: Option<u64>,
}

/// # Errors
/// Fails when the dataset does not exist or its rows cannot be used.
pub async fn run(context: &Context, args: &Datasets) -> Result<u8, CliError> {
    match &args.action {
        Action::List { quiet } => list(context, *quiet).await?,
        Action::Upload(args) => upload(context, args).await?,
        Action::Add(args) => add(context, args).await?,
        Action::Show { dataset } => {
            let id = find(context, dataset).await?;
            let answer = context.client.raw_get(&["datasets", &id]).send().await?;
            if context.out.json { context.out.json(&answer.text)? } else { show(context, &answer.value)? }
        }
        Action::Rows { dataset, limit } => {
            let id = find(context, dataset).await?;
            let listing = Listing::read(context.client.raw_get(&["datasets", &id, "rows"]), *limit).await?;
            match context.out.json {
                true => context.out.json(&listing.document)?,
                false => listing.items.iter().try_for_each(|row| context.out.line(row["record"].to_string()))?,
            }
        }
        Action::Remove { datasets } => {
            for dataset in datasets {
                let id = find(context, dataset).await?;
                context.client.raw_delete(&["datasets", &id]).send().await?;
                context.out.note(format!("removed {id}"));
            }
        }
    }
    Ok(0)
}

/// Finds a dataset on the server by its id or name, and returns its id.
async fn find(context: &Context, word: &str) -> Result<String, CliError> {
    if word.parse::<DatasetId>().is_ok() {
        return Ok(word.to_owned());
    }
    let listing = Listing::read(context.client.raw_get(&["datasets"]).query("name", word), 0).await?;
    match listing.items.as_slice() {
        [] => Err(CliError::NotFound(format!(
            "dataset '{}' not found; `rlood datasets list` lists all datasets",
            clean(word)
        ))),
        [dataset] => Ok(text(dataset, "id").to_owned()),
        several => {
            let ids: Vec<&str> = several.iter().map(|dataset| text(dataset, "id")).collect();
            Err(CliError::Usage(format!(
                "{1} datasets have the name '{0}'; use the id of one of them: {2}",
                clean(word),
                several.len(),
                ids.join(", ")
            )))
        }
    }
}

async fn list(context: &Context, quiet: bool) -> Result<(), CliError> {
    let listing = Listing::read(context.client.raw_get(&["datasets"]), 0).await?;
    if context.out.json {
        return context.out.json(&listing.document);
    }
    if quiet {
        return listing.items.iter().try_for_each(|dataset| context.out.line(text(dataset, "id")));
    }
    if listing.items.is_empty() {
        context.out.note(
            "the server has no datasets yet; upload one with `rlood datasets upload FILE`, or import \
             one of the Hub with `rlood datasets add ORG/NAME`",
        );
        return Ok(());
    }
    let mut table = Table::new(&["id", "rows", "size", "uploaded", "name"]);
    for dataset in &listing.items {
        table.row([
            shown(&dataset["id"]),
            if dataset["bytes_total"].is_u64() { state(dataset) } else { shown(&dataset["num_rows"]) },
            format_bytes(dataset["size_bytes"].as_u64().unwrap_or(0)),
            format_age(&dataset["created_at"]),
            shown(&dataset["name"]),
        ]);
    }
    table.print(&context.out)
}

async fn upload(context: &Context, args: &Upload) -> Result<(), CliError> {
    let mapping = Some(recipe(&args.mapping)?).filter(|recipe| *recipe != Recipe::default());
    let rows = LocalRows::open(context, &args.file, mapping)?;
    let id = uploads::upload_once(context, &rows, args.name.as_deref()).await?;
    if context.out.json {
        let answer = context.client.raw_get(&["datasets", &id]).send().await?;
        return context.out.json(&answer.text);
    }
    context.out.line(id)
}

async fn add(context: &Context, args: &Add) -> Result<(), CliError> {
    let Add { repo, revision, config, split, name, mapping, no_wait } = args;
    let Recipe { map, limit, seed } = recipe(mapping)?;
    let (revision, config, split) = (revision.clone(), config.clone(), split.clone());
    let wanted = HubDataset { hub: repo.clone(), revision, config, split, map, limit, seed };
    let mut outage = OutageRetry::default();
    let id = loop {
        let created = context.client.create_hub_dataset(name.as_deref(), &wanted).await;
        if let Some(dataset) = outage.unwrap_or_wait(&context.out, created).await? {
            break dataset.id.to_string();
        }
    };
    let path = ["datasets", id.as_str()];
    let answer = match no_wait {
        true => context.client.raw_get(&path).send().await?,
        false => {
            let again = format!("rlood datasets show {id}");
            interruptible(&again, downloaded(context, &path)).await?
        }
    };
    let dataset = &answer.value;
    if context.out.json {
        context.out.json(&answer.text)?;
    } else {
        context.out.line(shown(&dataset["id"]))?;
        context.out.note(state(dataset));
    }
    match text(dataset, "state") {
        "failed" => {
            let problem = clean(text(dataset, "problem"));
            Err(CliError::Failed(format!("the download of the dataset failed: {problem}")))
        }
        _ => Ok(()),
    }
}

/// Builds the settings by which the server converts the rows from the flags.
fn recipe(args: &Mapping) -> Result<Recipe, CliError> {
    let Mapping { map, prompt, system, limit, seed } = args;
    let mut value = match map {
        None => json!({}),
        Some(text) if text.trim_start().starts_with('{') => rlood_types::strict_json::read(text.as_bytes())
            .map_err(|error| CliError::Usage(format!("--map is not valid JSON: {error}")))?,
        Some(path) => {
            let text = std::fs::read_to_string(Path::new(path));
            let text = text.map_err(|error| CliError::Usage(format!("--map: cannot read {path}: {error}")))?;
            let read = Format::of_file_name(path).read(&text);
            read.map_err(|error| CliError::Usage(format!("--map {path}: {error}")))?
        }
    };
    for (key, given) in [("prompt", prompt), ("system", system)] {
        if let (Some(given), Some(map)) = (given, value.as_object_mut()) {
            map.insert(key.to_owned(), json!(given));
        }
    }
    let is_plain = value.as_object().is_some_and(serde_json::Map::is_empty);
    let map = match is_plain {
        true => None,
        false => Some(
            serde_json::from_value::<RecipeMap>(value).map_err(|error| CliError::Usage(format!("--map: {error}")))?,
        ),
    };
    Ok(Recipe { map, limit: *limit, seed: *seed })
}

fn show(context: &Context, dataset: &Value) -> Result<(), CliError> {
    let line = |label: &str, value: String| context.out.line(format!("{label:<12} {value}"));
    line("dataset", shown(&dataset["id"]))?;
    line("name", shown(&dataset["name"]))?;
    if dataset["bytes_total"].is_u64() {
        line("state", state(dataset))?;
    }
    if dataset["problem"].is_string() {
        line("problem", shown(&dataset["problem"]))?;
    }
    let origin = &dataset["origin"];
    if origin["hub"].is_string() {
        line("hub", format!("{} at {}", shown(&origin["hub"]), shown(&origin["commit"])))?;
    }
    line("rows", shown(&dataset["num_rows"]))?;
    line("size", format_bytes(dataset["size_bytes"].as_u64().unwrap_or(0)))?;
    let columns = dataset["columns"].as_array().into_iter().flatten().map(shown);
    line("columns", columns.collect::<Vec<_>>().join(", "))?;
    line("sha256", shown(&dataset["sha256"]))?;
    line("uploaded", format_age(&dataset["created_at"]))
}
