//! `rlood pull`: a checkpoint as a folder, which appears whole and verified.

use std::path::{Path, PathBuf};

use clap::Args;
use rlood_client::Checkpoint;
use rlood_types::protocol::FileEntry;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::names;
use crate::output::size;
use crate::transfer::{Staging, is_there, with_bar};

/// The list of a checkpoint's files, with their hashes.
const MANIFEST: &str = "manifest.json";
/// What a job needs to go on, and nothing that loads the weights does.
const OF_TRAINING: [&str; 7] = [
    "optimizer.safetensors",
    "trainer_state.json",
    "rollout.json",
    "rollout.safetensors",
    "ahead.json",
    "ahead.safetensors",
    MANIFEST,
];

/// Flags of `rlood pull`.
#[derive(Debug, Clone, Args)]
pub struct Pull {
    /// The checkpoint: a job (its result: the best checkpoint, else the newest), JOB@120 for a step, JOB@last, JOB@best, or
    /// ckpt_….
    #[arg(value_name = "JOB|CKPT", add = super::completions::jobs())]
    pub checkpoint: String,

    /// Folder to make. Default: JOB-stepN here. A folder that is there must be empty, or be this checkpoint.
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,

    /// What to download: adapter (the checkpoint's own files), or merged (a model of its own, as `rlood export --merged` makes it).
    #[arg(long, value_name = "FORMAT", default_value = "adapter", value_parser = ["adapter", "merged"])]
    pub format: String,

    /// With --format merged: precision of the weights. Default: as the base model has them.
    #[arg(long, value_name = "DTYPE", value_parser = super::merged::DTYPES)]
    pub dtype: Option<String>,

    /// All files, those with which training goes on too: the optimizer's state and the manifest.
    #[arg(long, conflicts_with = "dtype")]
    pub all: bool,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// When there is no such checkpoint, a file does not arrive as its manifest says, or the disk fails.
pub async fn run(context: &Context, args: &Pull) -> Result<u8, CliError> {
    if args.format == "merged" {
        return super::merged::pull(context, &args.checkpoint, args.dtype.as_deref(), args.output.as_deref()).await;
    }
    if args.dtype.is_some() {
        return Err(CliError::Usage(
            "--dtype belongs to --format merged: an adapter is downloaded as it is".to_owned(),
        ));
    }
    adapter(context, &args.checkpoint, args.output.as_deref(), args.all).await
}

/// Downloads a checkpoint's own files.
///
/// # Errors
/// As [`run`].
pub async fn adapter(context: &Context, name: &str, output: Option<&Path>, all: bool) -> Result<u8, CliError> {
    let mut checkpoint = names::checkpoint(context, name).await?;
    let (id, step, job) = (checkpoint.id, checkpoint.step, checkpoint.job_id);
    context.out.note(format!("{id}: step {step} of {job}{}", if checkpoint.best { ", the best" } else { "" }));
    check_manifest(context, &checkpoint).await?;
    checkpoint.files.retain(|file| all || !OF_TRAINING.contains(&file.name.as_str()));
    let target = output.map_or_else(|| PathBuf::from(format!("{job}-step{step}")), Path::to_owned);
    if is_there(&target, &checkpoint.files)? {
        context.out.note("it is there already");
    } else {
        let staging = Staging::beside(&target, &id.to_string())?;
        download(context, &checkpoint, &staging.path).await?;
        staging.publish(&target)?;
    }
    if context.out.json {
        let answer = context.client.raw_get(&["checkpoints", &id.to_string()]).send().await?;
        context.out.json(&answer.text)?;
    } else {
        context.out.line(target.display().to_string())?;
    }
    Ok(0)
}

/// Compares the server's list of files with the manifest that the worker wrote.
async fn check_manifest(context: &Context, checkpoint: &Checkpoint) -> Result<(), CliError> {
    let manifest = context.client.get_manifest(checkpoint.id).await?;
    let listed: Vec<FileEntry> = serde_json::from_value(manifest["files"].clone())
        .map_err(|error| CliError::Failed(format!("{MANIFEST} of {} cannot be read: {error}", checkpoint.id)))?;
    let differs = |file: &&FileEntry| file.name != MANIFEST && !listed.contains(file);
    match checkpoint.files.iter().find(differs) {
        None => Ok(()),
        Some(file) => Err(CliError::Failed(format!(
            "{} is not as {MANIFEST} of {} has it: nothing was downloaded",
            file.name, checkpoint.id
        ))),
    }
}

async fn download(context: &Context, checkpoint: &Checkpoint, folder: &Path) -> Result<(), CliError> {
    let total = checkpoint.files.iter().map(|file| file.size_bytes).sum();
    let files = context.client.download_files(checkpoint, folder);
    let files = with_bar(context, total, folder, files).await?;
    context.out.note(format!("{} files, {}, each with the hash of its manifest", files.len(), size(total)));
    Ok(())
}
