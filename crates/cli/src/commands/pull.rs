//! `rlood pull`: a checkpoint as a folder, which appears whole and verified.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use rlood_client::Checkpoint;
use rlood_types::protocol::FileEntry;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::files::hash_of;
use crate::names;
use crate::output::size;

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
/// Between two looks at what has arrived.
const TICK: Duration = Duration::from_millis(200);

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
    #[arg(long, value_name = "DTYPE", value_parser = super::export::DTYPES)]
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
        return super::export::merged(context, &args.checkpoint, args.dtype.as_deref(), args.output.as_deref()).await;
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

/// Whether the folder holds these files already.
///
/// # Errors
/// When it holds something else.
pub fn is_there(target: &Path, files: &[FileEntry]) -> Result<bool, CliError> {
    let entries = match std::fs::read_dir(target) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        entries => entries.map_err(CliError::local(format!("read {}", target.display())))?,
    };
    if entries.count() == 0 {
        return Ok(false);
    }
    for file in files {
        let found = hash_of(&target.join(&file.name));
        if found.ok() != Some((file.sha256, file.size_bytes)) {
            return Err(CliError::Usage(format!(
                "{} is there and holds something else: name another folder with -o, or remove it",
                target.display()
            )));
        }
    }
    Ok(true)
}

async fn download(context: &Context, checkpoint: &Checkpoint, folder: &Path) -> Result<(), CliError> {
    let total = checkpoint.files.iter().map(|file| file.size_bytes).sum();
    let files = context.client.download_files(checkpoint, folder);
    let files = with_bar(context, total, folder, files).await?;
    context.out.note(format!("{} files, {}, each with the hash of its manifest", files.len(), size(total)));
    Ok(())
}

/// Shows how much of a folder has arrived while something fills it.
pub async fn with_bar<T, E>(
    context: &Context,
    total: u64,
    folder: &Path,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, CliError>
where
    CliError: From<E>,
{
    let template = "{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    // On standard error, and only on a terminal.
    let bar = if context.out.json { ProgressBar::hidden() } else { ProgressBar::new(total).with_style(style) };
    let mut work = std::pin::pin!(work);
    let done = loop {
        tokio::select! {
            done = &mut work => break done,
            () = tokio::time::sleep(TICK) => bar.set_position(size_of(folder)),
        }
    };
    bar.finish_and_clear();
    Ok(done?)
}

fn size_of(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// A folder beside the one that is to appear; what arrived before a cut stays in it.
pub struct Staging {
    /// Where files go.
    pub path: PathBuf,
}

impl Staging {
    /// The folder for this target and content.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn beside(target: &Path, content: &str) -> Result<Self, CliError> {
        let Some(name) = target.file_name() else {
            return Err(CliError::Usage(format!("-o {}: name the folder to make", target.display())));
        };
        let path = target.with_file_name(format!(".{}.{content}.part", name.to_string_lossy()));
        std::fs::create_dir_all(&path).map_err(CliError::local(format!("create the folder {}", path.display())))?;
        Ok(Self { path })
    }

    /// Gives the folder its name.
    ///
    /// # Errors
    /// When the target is there and not empty, or the disk fails.
    pub fn publish(self, target: &Path) -> Result<(), CliError> {
        let failed = || CliError::local(format!("name the folder {}", target.display()));
        std::fs::File::open(&self.path).and_then(|folder| folder.sync_all()).map_err(failed())?;
        std::fs::rename(&self.path, target).map_err(failed())?;
        let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::File::open(parent).and_then(|folder| folder.sync_all()).map_err(failed())
    }
}
