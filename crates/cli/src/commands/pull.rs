//! `rlood pull`: downloads a checkpoint as a folder. The folder appears only when it is complete and verified.

use std::path::{Path, PathBuf};

use clap::Args;
use rlood_client::Checkpoint;
use rlood_types::protocol::FileEntry;

use super::merged::{self, Wanted};
use crate::context::{Common, Context};
use crate::error::CliError;
use crate::names;
use crate::output::format_bytes;
use crate::transfer::{Staging, is_downloaded, with_bar};

/// File in a checkpoint that lists the checkpoint's files with their hashes.
const MANIFEST: &str = "manifest.json";
/// Files of a checkpoint that only training needs. Programs that load the weights do not read these files.
const TRAINING_FILES: [&str; 8] = [
    "optimizer.safetensors",
    "trainer_state.json",
    "rollout.json",
    "rollout.safetensors",
    "ahead.json",
    "ahead.safetensors",
    "reference.safetensors",
    MANIFEST,
];

/// Flags of `rlood pull`.
#[derive(Debug, Clone, Args)]
pub struct Pull {
    /// Checkpoint: a job (its best checkpoint, else its newest), JOB@120 for a step, JOB@last, JOB@best,
    /// or a checkpoint id (ckpt_…).
    #[arg(value_name = "JOB|CKPT", add = super::completions::jobs())]
    pub checkpoint: String,

    /// Folder to create. Default: JOB-stepN in the current directory. An existing folder must be
    /// empty, or contain this checkpoint.
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,

    /// Files to download: adapter for the checkpoint's own files, or what `rlood export` makes: merged for a complete
    /// model, gguf and gguf-adapter for llama.cpp.
    #[arg(long, value_name = "FORMAT", default_value = "adapter", value_parser = ["adapter", "merged", "gguf", "gguf-adapter"])]
    pub format: String,

    /// Precision of the weights; requires --format merged. Default: the base model's precision.
    #[arg(long, value_name = "DTYPE", value_parser = merged::DTYPES)]
    pub dtype: Option<String>,

    /// Also download the files that only training needs: the optimizer state, the trainer state and the manifest.
    #[arg(long, conflicts_with = "dtype")]
    pub all: bool,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the checkpoint does not exist, a file does not match its manifest, or the disk fails.
pub async fn run(context: &Context, args: &Pull) -> Result<u8, CliError> {
    if args.format != "adapter" {
        let wanted =
            Wanted { format: &args.format.replace('-', "_"), dtype: args.dtype.as_deref(), context_length: None };
        return merged::pull(context, &args.checkpoint, wanted, args.output.as_deref()).await;
    }
    if args.dtype.is_some() {
        return Err(CliError::Usage(
            "--dtype requires another --format: an adapter is downloaded unchanged".to_owned(),
        ));
    }
    adapter(context, &args.checkpoint, args.output.as_deref(), args.all).await
}

/// Downloads the files of a checkpoint (a LoRA adapter) as they are.
///
/// # Errors
/// Fails for the same reasons as [`run`].
pub async fn adapter(context: &Context, name: &str, output: Option<&Path>, all: bool) -> Result<u8, CliError> {
    let mut checkpoint = names::checkpoint(context, name).await?;
    let (id, step, job) = (checkpoint.id, checkpoint.step, checkpoint.job_id);
    context.out.note(format!("{id}: step {step} of {job}{}", if checkpoint.best { ", the best" } else { "" }));
    check_manifest(context, &checkpoint).await?;
    checkpoint.files.retain(|file| all || !TRAINING_FILES.contains(&file.name.as_str()));
    let target = output.map_or_else(|| PathBuf::from(format!("{job}-step{step}")), Path::to_owned);
    if is_downloaded(&target, &checkpoint.files)? {
        context.out.note("already downloaded");
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

/// Compares the server's list of a checkpoint's files with the manifest that the worker wrote.
async fn check_manifest(context: &Context, checkpoint: &Checkpoint) -> Result<(), CliError> {
    let manifest = context.client.get_manifest(checkpoint.id).await?;
    let listed: Vec<FileEntry> = serde_json::from_value(manifest["files"].clone()).map_err(|error| {
        CliError::Failed(format!("the {MANIFEST} of the checkpoint {} cannot be read: {error}", checkpoint.id))
    })?;
    let differs = |file: &&FileEntry| file.name != MANIFEST && !listed.contains(file);
    match checkpoint.files.iter().find(differs) {
        None => Ok(()),
        Some(file) => Err(CliError::Failed(format!(
            "the file {} does not match the {MANIFEST} of the checkpoint {}; nothing was downloaded",
            file.name, checkpoint.id
        ))),
    }
}

async fn download(context: &Context, checkpoint: &Checkpoint, folder: &Path) -> Result<(), CliError> {
    let total = checkpoint.files.iter().map(|file| file.size_bytes).sum();
    let files = context.client.download_files(checkpoint, folder);
    let files = with_bar(context, total, folder, files).await?;
    context.out.note(format!(
        "downloaded {} files, {}; all hashes match the checkpoint's manifest",
        files.len(),
        format_bytes(total)
    ));
    Ok(())
}
