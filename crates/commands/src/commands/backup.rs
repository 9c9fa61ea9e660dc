//! `rlood backup` and `rlood restore`: a consistent copy of the database, every file that it refers to, and a manifest with
//! their hashes, written last.
//!
//! A backup can be made while the server runs. It changes nothing of the server's data, and upgrades only the copied database. Hard
//! links preserve the files that the copied database refers to until they are copied. Files that are missing nevertheless are left
//! out, and removed from the copied database, so that the backup is consistent. If an unfinished job would lose the checkpoint that
//! it resumes from, the whole copy is repeated.

mod restore;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use futures::future::LocalBoxFuture;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::config::backup::BackupArgs;
use crate::files::copy::{copy_hashed, files_below, is_vacant, make_private_dir, remove_tree, sync_tree};
use crate::files::pinned::PinnedFiles;
use crate::files::{DataDir, FilesError, hash_file};
use crate::store::{CheckpointRow, DatasetFilter, Store, StoreError};

pub use restore::restore;

const MANIFEST: &str = "manifest.json";
const DATABASE: &str = "rlood.db";
/// Format version of the manifest.
const FORMAT: u32 = 1;
/// Maximum number of attempts to copy everything before giving up.
const MAX_ATTEMPTS: u32 = 5;
/// Files and directories that a backup consists of.
const PARTS: [&str; 10] = [
    DATABASE,
    "rlood.db-wal",
    "rlood.db-shm",
    "rlood.db-journal",
    "checkpoints",
    "datasets",
    "initial",
    "adapters",
    ".manifest.tmp",
    MANIFEST,
];

/// Why a backup or a restore failed.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// An operation on the data directory failed.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A database operation failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The target directory is not empty.
    #[error("the target {} is not empty: use a new or empty directory", .0.display())]
    NotEmpty(PathBuf),
    /// The target is not a directory.
    #[error("the target {} is not a directory: use a new or empty directory", .0.display())]
    NotADirectory(PathBuf),
    /// The restore target is inside the backup.
    #[error("the target {} is inside the backup: use a directory outside it", .0.display())]
    Inside(PathBuf),
    /// The backup target is inside the data directory.
    #[error("the target {} is inside the data directory, and would be lost together with it: use a directory outside it", .0.display())]
    InsideData(PathBuf),
    /// A server is running on the restore target.
    #[error("a server is running on {}: stop it, or restore to another --data-dir", .0.display())]
    Live(PathBuf),
    /// The data directory contains no database.
    #[error("the directory {} contains no rlood database: use the server's --data-dir", .0.display())]
    NoDatabase(PathBuf),
    /// The manifest of the backup is invalid.
    #[error("{}: {what}", .path.display())]
    Manifest {
        /// Path of the manifest.
        path: PathBuf,
        /// Description of the problem.
        what: String,
    },
    /// A file differs from the manifest.
    #[error("the backup is damaged: {path}: {what}")]
    Damaged {
        /// The file, relative to the backup.
        path: String,
        /// Description of the problem.
        what: String,
    },
    /// The server removed, in every attempt, a checkpoint that a job resumes from before it was copied.
    #[error(
        "jobs replace their checkpoints faster than they can be copied from {}: pause running jobs, or let them keep \
         more (checkpoints.keep_last), then try again", .0.display()
    )]
    Outrun(PathBuf),
    /// The manifest could not be written, or the restored directory could not be moved into place.
    #[error("could not {doing} {}", .path.display())]
    Io {
        /// The operation that failed.
        doing: &'static str,
        /// The path of the operation.
        path: PathBuf,
        /// Error of the underlying operation.
        #[source]
        source: std::io::Error,
    },
}

/// The manifest of a backup.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    format: u32,
    /// Version of the rlood that wrote the backup.
    version: String,
    created_at: String,
    /// Size and hash of each file, by path relative to the backup.
    files: BTreeMap<String, Entry>,
    /// Files that the database refers to but that are missing or damaged: path and reason.
    left_out: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Entry {
    size_bytes: u64,
    sha256: String,
}

/// Runs the subcommand `rlood backup`.
///
/// # Errors
/// Fails when a file cannot be read or written, or the target is not empty. No part of a backup is left in the target then.
pub fn backup(args: BackupArgs) -> LocalBoxFuture<'static, Result<ExitCode, BackupError>> {
    Box::pin(async move {
        let BackupArgs { to, data_dir } = args;
        if !data_dir.join(DATABASE).is_file() {
            return Err(BackupError::NoDatabase(data_dir));
        }
        if !is_vacant(&to)? {
            return Err(not_empty(to));
        }
        if lies_inside(&to, &data_dir)? {
            return Err(BackupError::InsideData(to));
        }
        let files = match DataDir::open(&data_dir) {
            Ok(files) => files,
            Err(FilesError::Locked { root, .. }) => DataDir::beside(&root)?,
            Err(error) => return Err(error.into()),
        };
        let source = Store::open_as_is(&files.database()).await?;
        let is_new = !to.exists();
        let made = write_backup(&source, &files, &to).await;
        source.close().await;
        let manifest = match made {
            Ok(manifest) => manifest,
            Err(error) => {
                // An error of this cleanup is ignored, because the error of the backup itself is more useful.
                let _ = clear(&to);
                if is_new {
                    let _ = std::fs::remove_dir(&to);
                }
                return Err(error);
            }
        };
        let bytes: u64 = manifest.files.values().map(|entry| entry.size_bytes).sum();
        for (path, why) in &manifest.left_out {
            eprintln!("rlood: left out {path}: {why}");
        }
        println!("{} files, {bytes} bytes in {}", manifest.files.len(), to.display());
        Ok(ExitCode::SUCCESS)
    })
}

/// Whether a path, which need not exist, is in a directory or is that directory.
fn lies_inside(path: &Path, dir: &Path) -> Result<bool, BackupError> {
    let dir = dir.canonicalize().map_err(io("find", dir))?;
    let path = std::path::absolute(path).map_err(io("find", path))?;
    let above = path.ancestors().find_map(|above| above.canonicalize().ok());
    Ok(above.is_some_and(|above| above.starts_with(&dir)))
}

async fn write_backup(source: &Store, files: &DataDir, to: &Path) -> Result<Manifest, BackupError> {
    make_private_dir(to)?;
    for _ in 0..MAX_ATTEMPTS {
        let Some((mut entries, left_out)) = copy(source, files, to).await? else {
            clear(to)?;
            continue;
        };
        let (size_bytes, sha256) = hash_file(&to.join(DATABASE))?;
        entries.insert(DATABASE.to_owned(), Entry { size_bytes, sha256: sha256.to_string() });
        sync_tree(to)?;
        let manifest = Manifest {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            created_at: format!("{:.3}", Timestamp::now()),
            files: entries,
            left_out,
        };
        write_manifest(to, &manifest)?;
        return Ok(manifest);
    }
    Err(BackupError::Outrun(files.root().to_owned()))
}

/// Copies the database and its files; `None` when an unfinished job would lose the checkpoint that it resumes from.
async fn copy(source: &Store, files: &DataDir, to: &Path) -> Result<Option<Taken>, BackupError> {
    let database = to.join(DATABASE);
    let mut held = files.pin_files();
    let mut keep = |rows: &[CheckpointRow]| {
        for row in rows {
            row.files.iter().for_each(|file| held.pin(&place(files, row).join(&file.name)));
        }
    };
    // Links the files of nearly all checkpoints now, so that the snapshot below blocks the server only briefly.
    keep(&source.checkpoint_all().await?);
    source.snapshot_to(&database, &mut keep).await?;
    // The copied database determines from here on what the backup contains. The copy is upgraded to this version's schema,
    // whatever the server's version.
    let snapshot = Store::open(&database).await?;
    let entries = copy_files(Copying { source, snapshot: &snapshot, files, to }, held).await;
    snapshot.close().await;
    entries
}

/// Removes the files of an incomplete backup from the target directory.
fn clear(to: &Path) -> Result<(), BackupError> {
    PARTS.iter().try_for_each(|name| Ok(remove_tree(&to.join(name))?))
}

fn place(files: &DataDir, row: &CheckpointRow) -> PathBuf {
    files.checkpoint_dir(row.job, row.step, row.attempt)
}

fn not_empty(target: PathBuf) -> BackupError {
    if target.is_dir() { BackupError::NotEmpty(target) } else { BackupError::NotADirectory(target) }
}

/// The files in the backup, and the files that were left out because they are missing or damaged.
type Taken = (BTreeMap<String, Entry>, BTreeMap<String, String>);

/// The data directory and the backup directory of a copy, with their databases.
#[derive(Clone, Copy)]
struct Copying<'a> {
    source: &'a Store,
    snapshot: &'a Store,
    files: &'a DataDir,
    to: &'a Path,
}

/// Copies the files that the snapshot refers to, and removes references to missing files from it.
async fn copy_files(copying: Copying<'_>, mut held: PinnedFiles) -> Result<Option<Taken>, BackupError> {
    let Copying { source, snapshot, files, to } = copying;
    let (mut entries, mut left_out) = (BTreeMap::new(), BTreeMap::new());
    // Files that jobs with a warm start begin with, stored adapters, and images of datasets.
    let mut initial = Vec::new();
    for job in snapshot.warm_start_jobs().await? {
        initial.extend(files_below(&files.initial_of(job))?);
    }
    for adapter in snapshot.adapter_ids().await? {
        initial.extend(files_below(&files.adapter_dir(adapter))?);
    }
    for dataset in snapshot.dataset_ids().await? {
        held.pin(&files.dataset(dataset));
        initial.extend(files_below(&files.dataset_images(dataset))?);
    }
    initial.iter().for_each(|path| held.pin(path));

    let needed = snapshot.checkpoints_needed().await?;
    let mut checkpoints = snapshot.checkpoint_all().await?;
    checkpoints.sort_by_key(|row| !needed.contains(&row.id));
    for checkpoint in checkpoints {
        let dir = place(files, &checkpoint);
        let mut of_it = BTreeMap::new();
        let mut missing = None;
        for file in &checkpoint.files {
            let wanted = Entry { size_bytes: file.size_bytes, sha256: file.sha256.to_string() };
            if let Err(why) = copy_file(copying, &held, &dir.join(&file.name), Some(&wanted), &mut of_it)? {
                missing = Some(format!("{}: {why}", file.name));
                break;
            }
        }
        match missing {
            None => entries.append(&mut of_it),
            Some(why) => {
                // If the server's database still has the checkpoint, its file is missing there too, and repeating the copy
                // would not help.
                let replaced = source.checkpoint_get(checkpoint.id).await;
                if needed.contains(&checkpoint.id) && matches!(replaced, Err(StoreError::NotFound { .. })) {
                    return Ok(None);
                }
                for path in of_it.keys() {
                    remove(&to.join(path))?;
                }
                left_out.insert(relative(files, &dir), why);
                snapshot.checkpoint_forget(checkpoint.id).await?;
            }
        }
    }
    let mut after = None;
    loop {
        let page = snapshot.dataset_list(DatasetFilter::default(), after.as_deref(), 1000).await?;
        for dataset in page.data {
            let path = files.dataset(dataset.id);
            let wanted = Entry { size_bytes: dataset.size_bytes, sha256: dataset.sha256 };
            if let Err(why) = copy_file(copying, &held, &path, Some(&wanted), &mut entries)? {
                left_out.insert(relative(files, &path), why);
                snapshot.dataset_forget(dataset.id).await?;
            }
        }
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    for path in &initial {
        if let Err(why) = copy_file(copying, &held, path, None, &mut entries)? {
            left_out.insert(relative(files, path), why);
        }
    }
    Ok(Some((entries, left_out)))
}

/// Copies a file into the backup. The inner error says why the source file is missing or damaged.
fn copy_file(
    copying: Copying<'_>,
    held: &PinnedFiles,
    path: &Path,
    wanted: Option<&Entry>,
    entries: &mut BTreeMap<String, Entry>,
) -> Result<Result<(), String>, BackupError> {
    let name = relative(copying.files, path);
    let target = copying.to.join(&name);
    let mut copied = None;
    // The hard link that preserves the file can be missing too, if a server started in the meantime and removed it; the
    // original is then copied.
    for from in [held.link(path), Some(path)].into_iter().flatten() {
        copied = match copy_hashed(from, &target) {
            Err(FilesError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => continue,
            copied => Some(copied?),
        };
        break;
    }
    let Some((size_bytes, sha256)) = copied else {
        return Ok(Err("the file no longer exists".to_owned()));
    };
    let copied = Entry { size_bytes, sha256: sha256.to_string() };
    if wanted.is_some_and(|wanted| *wanted != copied) {
        remove(&target)?;
        return Ok(Err("the file's hash differs from the one in the database".to_owned()));
    }
    entries.insert(name, copied);
    Ok(Ok(()))
}

fn relative(files: &DataDir, path: &Path) -> String {
    path.strip_prefix(files.root()).unwrap_or(path).to_string_lossy().into_owned()
}

fn remove(path: &Path) -> Result<(), BackupError> {
    std::fs::remove_file(path).map_err(io("remove", path))
}

fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> BackupError {
    let path = path.to_owned();
    move |source| BackupError::Io { doing, path, source }
}

fn set_private(path: &Path) -> Result<(), BackupError> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(io("protect", path))
}

/// The manifest is written last: a directory without one is not a backup.
fn write_manifest(to: &Path, manifest: &Manifest) -> Result<(), BackupError> {
    let (path, temporary) = (to.join(MANIFEST), to.join(".manifest.tmp"));
    let text = serde_json::to_vec_pretty(manifest).map_err(|error| io("write", &path)(error.into()))?;
    std::fs::write(&temporary, text).map_err(io("write", &temporary))?;
    set_private(&temporary)?;
    std::fs::File::open(&temporary).and_then(|file| file.sync_all()).map_err(io("sync", &temporary))?;
    std::fs::rename(&temporary, &path).map_err(io("write", &path))?;
    crate::files::sync_dir(to)?;
    Ok(())
}
