//! `rlood restore`: verifies every byte, assembles the data in a staging directory, and moves it into place in one step.

use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use super::{BackupError, DATABASE, Entry, FORMAT, MANIFEST, Manifest, io, lies_inside, not_empty};
use crate::config::backup::RestoreArgs;
use crate::files::FilesError;
use crate::files::copy::{Reserved, copy_hashed, is_served, is_vacant, make_private_dir, move_into, sync_tree};
use crate::store::{Dropped, Store, StoreError};
use futures::future::LocalBoxFuture;

/// Runs the subcommand `rlood restore`.
///
/// # Errors
/// Fails when the backup is incomplete or damaged, or the target is in use or not empty. The target is unchanged then.
pub fn restore(args: RestoreArgs) -> LocalBoxFuture<'static, Result<ExitCode, BackupError>> {
    Box::pin(async move {
        let RestoreArgs { from, data_dir, drop_keys } = args;
        if !is_vacant(&data_dir)? {
            return Err(if is_served(&data_dir) { BackupError::Live(data_dir) } else { not_empty(data_dir) });
        }
        let manifest = read_manifest(&from)?;
        if lies_inside(&data_dir, &from)? {
            return Err(BackupError::Inside(data_dir));
        }
        let target = std::path::absolute(&data_dir).map_err(io("find", &data_dir))?;
        let stage = Stage::open(target)?;
        let bytes = fill(&from, &manifest, &stage.root).await?;
        let dropped = if drop_keys { Some(drop_credentials(&stage.root.join(DATABASE)).await?) } else { None };
        stage.publish()?;
        println!(
            "restored {} files with {bytes} bytes from the backup of {} to {}",
            manifest.files.len(),
            manifest.created_at,
            data_dir.display()
        );
        if let Some(Dropped { keys, sessions }) = dropped {
            let data_dir = data_dir.display();
            println!("removed {keys} API keys and {sessions} browser sessions from the restored data");
            if keys > 0 {
                println!("create a key: rlood keys create --name admin --scopes admin --data-dir {data_dir}");
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

async fn drop_credentials(database: &Path) -> Result<Dropped, BackupError> {
    let store = Store::open(database).await?;
    let dropped = store.api_keys_drop().await;
    store.close().await;
    Ok(dropped?)
}

/// The staging directory, on the target's file system, so that the data can be moved into place in one step. Removed on failure.
struct Stage {
    /// The temporary directory: next to the target if the target does not exist, otherwise inside it, because it may
    /// be a separate volume.
    around: tempfile::TempDir,
    root: PathBuf,
    target: PathBuf,
    reserved: Option<Reserved>,
}

impl Stage {
    fn open(target: PathBuf) -> Result<Stage, BackupError> {
        let reserved = match target.exists() {
            true => Some(Reserved::reserve(&target).map_err(|error| match error {
                FilesError::Locked { root, .. } => BackupError::Live(root),
                error => error.into(),
            })?),
            false => None,
        };
        let parent = match &reserved {
            Some(_) => &target,
            None => target.parent().unwrap_or(Path::new("/")),
        };
        make_private_dir(parent)?;
        let around = tempfile::Builder::new()
            .prefix(".rlood-restore-")
            .tempdir_in(parent)
            .map_err(io("create a temporary directory for the restored data in", parent))?;
        let root = around.path().join("data");
        make_private_dir(&root)?;
        Ok(Stage { around, root, target, reserved })
    }

    fn publish(self) -> Result<(), BackupError> {
        let Stage { around, root, target, reserved } = self;
        sync_tree(&root)?;
        match reserved {
            // The database is moved last: without it there is nothing to serve.
            Some(reserved) => {
                move_into(&root, &target, DATABASE)?;
                reserved.keep();
            }
            None => {
                std::fs::rename(&root, &target).map_err(io("move the restored data to", &target))?;
                crate::files::sync_dir(target.parent().unwrap_or(Path::new("/")))?;
            }
        }
        drop(around);
        Ok(())
    }
}

/// Copies and verifies all files of a backup; returns the number of bytes.
async fn fill(from: &Path, manifest: &Manifest, root: &Path) -> Result<u64, BackupError> {
    let damaged = |name: &str, what: &str| BackupError::Damaged { path: name.to_owned(), what: what.to_owned() };
    if let Some(name) = manifest.files.keys().find(|name| !is_plain(name)) {
        return Err(damaged(name, "the manifest lists a path outside the backup"));
    }
    let mut bytes = 0;
    let mut named = Vec::new();
    // The database is copied first: if this version cannot use it, the error appears before the large files are copied.
    for (name, entry) in manifest
        .files
        .get_key_value(DATABASE)
        .into_iter()
        .chain(manifest.files.iter().filter(|(name, _)| *name != DATABASE))
    {
        let (size_bytes, sha256) = match copy_hashed(&from.join(name), &root.join(name)) {
            Ok(copied) => copied,
            Err(FilesError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Err(damaged(name, "the backup does not contain this file"));
            }
            Err(error) => return Err(error.into()),
        };
        if (Entry { size_bytes, sha256: sha256.to_string() }) != *entry {
            return Err(damaged(name, "the file's hash differs from the one in the backup's manifest"));
        }
        if name == DATABASE {
            named = named_files(&root.join(DATABASE)).await?;
        }
        bytes += size_bytes;
    }
    match named.into_iter().find(|name| !manifest.files.contains_key(name)) {
        Some(name) => {
            Err(damaged(&name, "the backup's database refers to this file, but the manifest does not list it"))
        }
        None => Ok(bytes),
    }
}

fn read_manifest(from: &Path) -> Result<Manifest, BackupError> {
    let path = from.join(MANIFEST);
    let bad = |what: String| BackupError::Manifest { path: path.clone(), what };
    let text = std::fs::read(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            bad("the manifest is missing: this is not a backup, or it was interrupted".to_owned())
        }
        _ => bad(error.to_string()),
    })?;
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|error| bad(format!("the backup's manifest cannot be read: {error}")))?;
    if manifest.format != FORMAT {
        return Err(bad(format!(
            "the backup has the unknown format {}: use the version of rlood that wrote it",
            manifest.format
        )));
    }
    if !manifest.files.contains_key(DATABASE) {
        return Err(bad(format!("the manifest does not list {DATABASE}")));
    }
    Ok(manifest)
}

/// Whether a relative path of the manifest stays inside the backup: no `..`, not absolute.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && Path::new(name).components().all(|part| matches!(part, Component::Normal(_)))
}

/// Returns the files that a database refers to; an error if the database is damaged.
async fn named_files(database: &Path) -> Result<Vec<String>, BackupError> {
    let store = Store::open(database).await?;
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
    Ok(named?)
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
