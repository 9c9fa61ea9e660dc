//! Downloads folders, such as checkpoints: the files are collected in a staging folder, which is renamed when it is complete.

use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use rlood_types::protocol::FileEntry;

use crate::context::Context;
use crate::error::CliError;
use crate::files::hash_of;

/// How often the progress bar is updated.
const BAR_INTERVAL: Duration = Duration::from_millis(200);

/// Returns whether the target folder contains exactly the files to download already.
///
/// # Errors
/// Fails when the target folder contains anything else.
pub fn is_downloaded(target: &Path, files: &[FileEntry]) -> Result<bool, CliError> {
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
                "the folder {} exists with different content: choose another folder with -o, or remove this one",
                target.display()
            )));
        }
    }
    Ok(true)
}

/// Shows a progress bar while `work` downloads files into a folder, from the folder's size.
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
    // The crate `indicatif` draws the bar on standard error, and only if that is a terminal.
    let bar = if context.out.json { ProgressBar::hidden() } else { ProgressBar::new(total).with_style(style) };
    let mut work = std::pin::pin!(work);
    let done = loop {
        tokio::select! {
            done = &mut work => break done,
            () = tokio::time::sleep(BAR_INTERVAL) => bar.set_position(size_of(folder)),
        }
    };
    bar.finish_and_clear();
    Ok(done?)
}

fn size_of(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// A staging folder beside the target folder. It is kept after an interruption, so that the download can resume.
pub struct Staging {
    /// The path of the staging folder.
    pub path: PathBuf,
}

impl Staging {
    /// Creates the staging folder for a target folder and its files, or finds the one of an interrupted download.
    ///
    /// # Errors
    /// Fails when the folder cannot be created.
    pub fn beside(target: &Path, content: &str) -> Result<Self, CliError> {
        let Some(name) = target.file_name() else {
            return Err(CliError::Usage(format!("-o {}: the path must name a folder", target.display())));
        };
        let path = target.with_file_name(format!(".{}.{content}.part", name.to_string_lossy()));
        std::fs::create_dir_all(&path).map_err(CliError::local(format!("create the folder {}", path.display())))?;
        Ok(Self { path })
    }

    /// Renames the staging folder to the target.
    ///
    /// # Errors
    /// Fails when the target exists and is not empty, or the disk fails.
    pub fn publish(self, target: &Path) -> Result<(), CliError> {
        let failed = || CliError::local(format!("rename the downloaded folder to {}", target.display()));
        std::fs::File::open(&self.path).and_then(|folder| folder.sync_all()).map_err(failed())?;
        std::fs::rename(&self.path, target).map_err(failed())?;
        let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::File::open(parent).and_then(|folder| folder.sync_all()).map_err(failed())
    }
}
