//! The cache that huggingface_hub keeps, read in place and never written to: `models--org--name/` with `refs/<revision>` (a commit) and
//! `snapshots/<commit>/<path>`, links to `blobs/<hash>`. A snapshot may lack files after an interruption, so all that a model needs is
//! looked for, and compared with the hash that its blob is named by.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::fetch::hash;
use crate::hash::FileHash;
use crate::id::{Repo, RepoKind, is_safe_path};

/// A model in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cached {
    /// 40 hexadecimal digits.
    pub commit: String,
    /// The folder of the snapshot.
    pub path: PathBuf,
}

/// The model's snapshot in the cache, when all of config, tokenizer and weights are there. Nothing is read but config and index: see
/// [`verify_cached`].
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
    needed(&path).map(|_| Cached { commit, path })
}

/// Reads all that a cached model needs and compares it with the hashes that the blobs are named by; the name of a file whose bytes are
/// others, if there is one. A file that is no link to a blob (some systems have none) is not compared.
///
/// # Errors
/// When a file cannot be read.
pub async fn verify_cached(cached: &Cached) -> Result<Option<String>, crate::HubError> {
    for name in needed(&cached.path).unwrap_or_default() {
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

/// The names of config, tokenizer and weights; none when one of them is not there.
fn needed(folder: &Path) -> Option<Vec<String>> {
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
    // Of a broken link there is no metadata.
    names.iter().all(|name| folder.join(name).is_file()).then_some(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Hasher;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    /// As huggingface_hub 2.4.0 writes it.
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
