//! Reads the cache that huggingface_hub maintains, in place and without writing: `models--org--name/` with `refs/<revision>` (a
//! commit) and `snapshots/<commit>/<path>`, links to `blobs/<hash>`. A snapshot may lack files after an interruption, so every
//! file that a model needs is located and compared with the hash in its blob's name.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::hash::FileHash;
use crate::id::{Repo, RepoKind, is_safe_path};
use crate::part::hash;

/// A model in the cache of huggingface_hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cached {
    /// Commit of the model as 40 hexadecimal digits.
    pub commit: String,
    /// Folder with the model's files at this commit.
    pub path: PathBuf,
}

/// Finds the cached files of a model if config, tokenizer and weights are all there. Reads only the config and the weights' index;
/// [`verify_cached`] checks the content.
pub fn find_cached(cache: &Path, repo: &Repo) -> Option<Cached> {
    let kind = match repo.kind {
        RepoKind::Model => "models",
        RepoKind::Dataset => return None,
    };
    let folder = cache.join(format!("{kind}--{}", repo.id().replace('/', "--")));
    let named = std::fs::read_to_string(folder.join("refs").join(repo.revision())).ok();
    let commit = named.map_or_else(|| repo.revision().to_owned(), |commit| commit.trim().to_owned());
    if commit.len() != 40 || !commit.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let path = folder.join("snapshots").join(&commit);
    required_files(&path).map(|_| Cached { commit, path })
}

/// Reads all files that a cached model needs and compares them with the hashes in their blobs' names. Returns the name of the
/// first file that differs. A file that is not a link to a blob (some systems have no links) is not compared.
///
/// # Errors
/// Fails when a file cannot be read.
pub async fn verify_cached(cached: &Cached) -> Result<Option<String>, crate::HubError> {
    for name in required_files(&cached.path).unwrap_or_default() {
        let path = cached.path.join(&name);
        let Ok(blob) = std::fs::canonicalize(&path) else { return Ok(Some(name)) };
        let blob_name = blob.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(expected) = FileHash::sha256(blob_name).or_else(|| FileHash::git(blob_name)) else { continue };
        let file = File::open(&blob).map_err(crate::HubError::disk("open", &blob))?;
        let size_bytes = file.metadata().map_err(crate::HubError::disk("read", &blob))?.len();
        if hash(file, blob, expected, size_bytes).await? != expected {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Returns the file names of a cached model's config, tokenizer and weights; `None` if one of these files is missing.
fn required_files(folder: &Path) -> Option<Vec<String>> {
    let mut names = vec!["config.json".to_owned(), "tokenizer.json".to_owned()];
    if let Ok(index) = std::fs::read(folder.join("model.safetensors.index.json")) {
        let index: Value = serde_json::from_slice(&index).ok()?;
        names.push("model.safetensors.index.json".to_owned());
        let mut shards: Vec<&str> = index["weight_map"].as_object()?.values().filter_map(Value::as_str).collect();
        shards.sort_unstable();
        shards.dedup();
        if shards.is_empty() || !shards.iter().all(|shard| is_safe_path(shard)) {
            return None;
        }
        names.extend(shards.into_iter().map(str::to_owned));
    } else {
        names.push("model.safetensors".to_owned());
    }
    // A link to a blob that is missing has no metadata, so `is_file` returns false for it.
    names.iter().all(|name| folder.join(name).is_file()).then_some(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Hasher;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    /// Creates a cache folder in the layout of huggingface_hub 2.4.0.
    fn cache(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("models--org--name");
        for folder in ["refs", "blobs"] {
            std::fs::create_dir_all(model.join(folder)).unwrap();
        }
        std::fs::create_dir_all(model.join("snapshots").join(COMMIT)).unwrap();
        std::fs::write(model.join("refs/main"), COMMIT).unwrap();
        for (name, bytes) in files {
            let mut hasher = Hasher::new(&FileHash::Git([0; 20]), bytes.len() as u64);
            hasher.update(bytes);
            let blob = hasher.finish().to_string();
            std::fs::write(model.join("blobs").join(&blob), bytes).unwrap();
            let link = model.join("snapshots").join(COMMIT).join(name);
            std::os::unix::fs::symlink(format!("../../blobs/{blob}"), link).unwrap();
        }
        dir
    }

    const WHOLE: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("tokenizer.json", b"{}{}"), ("model.safetensors", b"weights")];

    #[tokio::test]
    async fn a_whole_snapshot_is_found_and_verified() {
        let dir = cache(&WHOLE);
        for revision in ["main", COMMIT] {
            let repo = Repo::new(RepoKind::Model, "org/name", revision).unwrap();
            let cached = find_cached(dir.path(), &repo).unwrap();
            assert_eq!(cached.commit, COMMIT);
            assert_eq!(verify_cached(&cached).await.unwrap(), None);
        }
        let other = Repo::new(RepoKind::Model, "org/name", "v2").unwrap();
        assert_eq!(find_cached(dir.path(), &other), None);
    }

    #[tokio::test]
    async fn a_snapshot_that_lacks_a_file_or_holds_other_bytes_is_not_taken() {
        let repo = Repo::parse(RepoKind::Model, "org/name").unwrap();
        assert_eq!(find_cached(cache(&WHOLE[..2]).path(), &repo), None);
        let dir = cache(&[
            ("config.json", b"{}"),
            ("tokenizer.json", b"{}{}"),
            ("model.safetensors.index.json", br#"{"weight_map": {"a": "model-1.safetensors"}}"#),
        ]);
        assert_eq!(find_cached(dir.path(), &repo), None);

        let dir = cache(&WHOLE);
        let cached = find_cached(dir.path(), &repo).unwrap();
        let blob = std::fs::canonicalize(cached.path.join("model.safetensors")).unwrap();
        std::fs::write(blob, b"weighty").unwrap();
        assert_eq!(verify_cached(&cached).await.unwrap(), Some("model.safetensors".to_owned()));
    }
}
