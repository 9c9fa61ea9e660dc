//! `rlood backup` and `rlood restore`: the database as it was at one moment, every file that it names, and a manifest with
//! their hashes, written last.
//!
//! A backup is made while the server runs. A checkpoint or dataset that the server removed in the meantime is left out, in
//! the copied database too, so that what is restored holds together.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::config::backup::{BackupArgs, RestoreArgs};
use crate::files::copy::{copy_hashed, files_below, is_vacant, make_private_dir, sync_tree};
use crate::files::{DataDir, FilesError, hash_file};
use crate::store::{Store, StoreError};

const MANIFEST: &str = "manifest.json";
const DATABASE: &str = "rlood.db";
/// The form of the manifest.
const FORMAT: u32 = 1;

/// Why there is no backup, or nothing was restored.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// A file or directory.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The target is taken.
    #[error("{} is not empty: name a directory that is new or empty", .0.display())]
    NotEmpty(PathBuf),
    /// The target is something else.
    #[error("{} is not a directory: name a directory that is new or empty", .0.display())]
    NotADirectory(PathBuf),
    /// What is restored would become a part of the backup.
    #[error("{} lies inside the backup: name a directory outside of it", .0.display())]
    Inside(PathBuf),
    /// A server runs on the target.
    #[error("a server is running on {}: stop it, or restore to another --data-dir", .0.display())]
    Live(PathBuf),
    /// There is no database to copy.
    #[error("{} holds no database of rlood: name the server's --data-dir", .0.display())]
    NoDatabase(PathBuf),
    /// What a backup says of itself cannot be used.
    #[error("{}: {what}", .path.display())]
    Manifest {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A file is not what the manifest says.
    #[error("the backup is damaged: {path}: {what}")]
    Damaged {
        /// The file, in the backup.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// The manifest cannot be written, or the restored directory not be put in place.
    #[error("could not {doing} {}", .path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// What a backup holds.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    format: u32,
    /// Of the rlood that wrote it.
    version: String,
    created_at: String,
    /// By path, relative to the backup.
    files: BTreeMap<String, Entry>,
    /// What was named by the database, but gone or damaged: path and reason.
    left_out: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Entry {
    size_bytes: u64,
    sha256: String,
}

/// `rlood backup`.
///
/// # Errors
/// When something cannot be read or written, or the target is not empty.
pub async fn backup(args: BackupArgs) -> Result<ExitCode, BackupError> {
    let BackupArgs { to, data_dir } = args;
    if !data_dir.join(DATABASE).is_file() {
        return Err(BackupError::NoDatabase(data_dir));
    }
    if !is_vacant(&to)? {
        return Err(taken(to));
    }
    make_private_dir(&to)?;
    let (files, store) = match DataDir::open(&data_dir) {
        Ok(files) => {
            let store = Store::open(&files.database()).await?;
            (files, store)
        }
        Err(FilesError::Locked { root, .. }) => {
            let files = DataDir::beside(&root)?;
            let store = Store::open_beside(&files.database()).await?;
            (files, store)
        }
        Err(error) => return Err(error.into()),
    };
    let database = to.join(DATABASE);
    let copied = store.snapshot_to(&database).await;
    store.close().await;
    copied?;

    // From here on the copy says what there is.
    let snapshot = Store::open_beside(&database).await?;
    let taken = take_files(&snapshot, &files, &to).await;
    snapshot.close().await;
    let (mut entries, left_out) = taken?;
    set_private(&database)?;
    let (size_bytes, sha256) = hash_file(&database)?;
    entries.insert(DATABASE.to_owned(), Entry { size_bytes, sha256 });
    sync_tree(&to)?;
    let bytes: u64 = entries.values().map(|entry| entry.size_bytes).sum();
    let manifest = Manifest {
        format: FORMAT,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        created_at: format!("{:.3}", Timestamp::now()),
        files: entries,
        left_out,
    };
    write_manifest(&to, &manifest)?;
    for (path, why) in &manifest.left_out {
        eprintln!("rlood: left out {path}: {why}");
    }
    println!("{} files, {bytes} bytes in {}", manifest.files.len(), to.display());
    Ok(ExitCode::SUCCESS)
}

fn taken(target: PathBuf) -> BackupError {
    if target.is_dir() { BackupError::NotEmpty(target) } else { BackupError::NotADirectory(target) }
}

type Taken = (BTreeMap<String, Entry>, BTreeMap<String, String>);

/// Copies what the snapshot names; forgets there what is not to be had.
async fn take_files(snapshot: &Store, files: &DataDir, to: &Path) -> Result<Taken, BackupError> {
    let (mut taken, mut left_out) = (BTreeMap::new(), BTreeMap::new());
    let mut after = None;
    loop {
        let page = snapshot.dataset_list(None, after.as_deref(), 1000).await?;
        for dataset in page.data {
            let path = files.dataset(dataset.id);
            let wanted = Entry { size_bytes: dataset.size_bytes, sha256: dataset.sha256 };
            if let Err(why) = take(files, to, &path, Some(&wanted), &mut taken)? {
                left_out.insert(relative(files, &path), why);
                snapshot.dataset_forget(dataset.id).await?;
            }
        }
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    for checkpoint in snapshot.checkpoint_all().await? {
        let dir = files.checkpoint_dir(checkpoint.job, checkpoint.step, checkpoint.attempt);
        let mut of_it = BTreeMap::new();
        let mut missing = None;
        for file in &checkpoint.files {
            let wanted = Entry { size_bytes: file.size_bytes, sha256: file.sha256.clone() };
            if let Err(why) = take(files, to, &dir.join(&file.name), Some(&wanted), &mut of_it)? {
                missing = Some(format!("{}: {why}", file.name));
                break;
            }
        }
        match missing {
            None => taken.append(&mut of_it),
            Some(why) => {
                for path in of_it.keys() {
                    remove(&to.join(path))?;
                }
                left_out.insert(relative(files, &dir), why);
                snapshot.checkpoint_forget(checkpoint.id).await?;
            }
        }
    }
    for job in snapshot.warm_start_jobs().await? {
        for path in files_below(&files.initial_of(job))? {
            if let Err(why) = take(files, to, &path, None, &mut taken)? {
                left_out.insert(relative(files, &path), why);
            }
        }
    }
    Ok((taken, left_out))
}

/// Copies a file; the inner error says why it is not to be had as it should be.
fn take(
    files: &DataDir,
    to: &Path,
    path: &Path,
    wanted: Option<&Entry>,
    taken: &mut BTreeMap<String, Entry>,
) -> Result<Result<(), String>, BackupError> {
    let name = relative(files, path);
    let target = to.join(&name);
    let (size_bytes, sha256) = match copy_hashed(path, &target) {
        Ok(copied) => copied,
        Err(FilesError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Err("removed by the server in the meantime".to_owned()));
        }
        Err(error) => return Err(error.into()),
    };
    let copied = Entry { size_bytes, sha256 };
    if wanted.is_some_and(|wanted| *wanted != copied) {
        remove(&target)?;
        return Ok(Err("its bytes are not those that were stored".to_owned()));
    }
    taken.insert(name, copied);
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

/// Last of all: a backup without it is none.
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

/// `rlood restore`.
///
/// # Errors
/// When the backup is incomplete or damaged, or the target is in use or not empty; then the target is as it was.
pub async fn restore(args: RestoreArgs) -> Result<ExitCode, BackupError> {
    let RestoreArgs { from, data_dir } = args;
    if !is_vacant(&data_dir)? {
        let live =
            data_dir.join(DATABASE).is_file() && matches!(DataDir::open(&data_dir), Err(FilesError::Locked { .. }));
        return Err(if live { BackupError::Live(data_dir) } else { taken(data_dir) });
    }
    let manifest = read_manifest(&from)?;
    let target = std::path::absolute(&data_dir).map_err(io("find", &data_dir))?;
    let backup = from.canonicalize().map_err(io("find", &from))?;
    let above = target.ancestors().find_map(|dir| dir.canonicalize().ok());
    if above.is_some_and(|dir| dir.starts_with(&backup)) {
        return Err(BackupError::Inside(data_dir));
    }
    let parent = target.parent().unwrap_or(Path::new("/")).to_owned();
    make_private_dir(&parent)?;
    // Beside the target, so that it appears at once and whole; removed when anything fails.
    let staged = tempfile::Builder::new()
        .prefix(".rlood-restore-")
        .tempdir_in(&parent)
        .map_err(io("make a directory in", &parent))?;
    let root = staged.path().join("data");
    make_private_dir(&root)?;
    let mut bytes = 0;
    for (name, entry) in &manifest.files {
        let damaged = |what: &str| BackupError::Damaged { path: name.clone(), what: what.to_owned() };
        if !is_plain(name) {
            return Err(damaged("the path leads out of the backup"));
        }
        let (size_bytes, sha256) = match copy_hashed(&from.join(name), &root.join(name)) {
            Ok(copied) => copied,
            Err(FilesError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Err(damaged("it is not there"));
            }
            Err(error) => return Err(error.into()),
        };
        if (Entry { size_bytes, sha256 }) != *entry {
            return Err(damaged("its bytes are not those of the manifest"));
        }
        bytes += size_bytes;
    }
    verify(&root, &manifest).await?;
    sync_tree(&root)?;
    std::fs::rename(&root, &target).map_err(io("put the restored data at", &target))?;
    crate::files::sync_dir(&parent)?;
    println!("{} files, {bytes} bytes from {} in {}", manifest.files.len(), manifest.created_at, data_dir.display());
    Ok(ExitCode::SUCCESS)
}

fn read_manifest(from: &Path) -> Result<Manifest, BackupError> {
    let path = from.join(MANIFEST);
    let bad = |what: String| BackupError::Manifest { path: path.clone(), what };
    let text = std::fs::read(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => bad("there is none: this is no backup, or one that was interrupted".to_owned()),
        _ => bad(error.to_string()),
    })?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| bad(format!("cannot be read: {error}")))?;
    if manifest.format != FORMAT {
        return Err(bad(format!("format {} is not known here: use the rlood that wrote it", manifest.format)));
    }
    if !manifest.files.contains_key(DATABASE) {
        return Err(bad(format!("it lists no {DATABASE}")));
    }
    Ok(manifest)
}

/// Downward only.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

/// The database is whole, and every file that it names is there.
async fn verify(root: &Path, manifest: &Manifest) -> Result<(), BackupError> {
    let store = Store::open(&root.join(DATABASE)).await?;
    let named = async {
        store.check_integrity().await?;
        let mut names = Vec::new();
        for row in store.checkpoint_all().await? {
            let dir = format!("checkpoints/{}/{}-{}", row.job, row.step, row.attempt);
            names.extend(row.files.iter().map(|file| format!("{dir}/{}", file.name)));
        }
        names.extend(store.dataset_ids().await?.iter().map(|id| format!("datasets/{id}.ndjson")));
        Ok::<_, StoreError>(names)
    };
    let named = named.await;
    store.close().await;
    match named?.into_iter().find(|name| !manifest.files.contains_key(name)) {
        Some(path) => {
            Err(BackupError::Damaged { path, what: "the database names it, the manifest does not".to_owned() })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_below_the_backup_are_followed() {
        assert!(is_plain("rlood.db") && is_plain("checkpoints/job_x/1-1/manifest.json"));
        for bad in ["", "/etc/passwd", "../x", "a/../../x", "./x/.."] {
            assert!(!is_plain(bad), "{bad}");
        }
    }
}
