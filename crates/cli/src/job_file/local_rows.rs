//! A local file of rows: its hash, and its rows in the form in which the server stores them.

use std::path::{Path, PathBuf};

use rlood_types::dataset::{Format, Reader, Recipe};
use rlood_types::digest::Sha256Digest;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::context::Context;
use crate::error::CliError;
use crate::files::{hash_of, read_pieces};
use crate::profiles;

/// Name of the state file on this machine that records under which dataset id each local file was uploaded.
pub(super) const CACHE: &str = "datasets.toml";
/// Maximum size of a local file whose rows are hashed to find an existing upload on the server. Larger files are
/// uploaded without this check.
const MAX_CANONICAL_BYTES: u64 = 1 << 30;

/// A local file of rows, and how the server converts them.
pub struct LocalRows {
    /// Path of the file.
    pub(super) path: PathBuf,
    /// Name of the file without its folder.
    pub(super) name: String,
    /// Size of the file in bytes.
    pub(super) size_bytes: u64,
    /// Key under which the state file records the dataset of these rows.
    pub(super) state_key: String,
    /// How the server converts the rows; `None` = unchanged.
    pub(super) mapping: Option<Recipe>,
}

impl LocalRows {
    /// Hashes a local file.
    ///
    /// # Errors
    /// Fails when the file cannot be read.
    pub fn open(context: &Context, path: &Path, mapping: Option<Recipe>) -> Result<Self, CliError> {
        let (hash, size_bytes) = hash_of(path).map_err(|error| unreadable(path, &error))?;
        let recipe = mapping.as_ref().map(|mapping| json!(mapping).to_string()).unwrap_or_default();
        let state_key = format!("{} {}", context.target.name(), Sha256Digest::of(format!("{hash} {recipe}")));
        let name = path.file_name().map_or_else(|| path.to_string_lossy(), |name| name.to_string_lossy()).into_owned();
        Ok(Self { path: path.to_owned(), name, size_bytes, state_key, mapping })
    }

    /// Passes the rows to `take` in the form in which the server stores them, piece by piece. Returns whether the file is plain
    /// text with valid rows.
    ///
    /// # Errors
    /// Fails when the file cannot be read.
    pub(super) fn read_canonical(&self, mut take: impl FnMut(&[u8])) -> std::io::Result<bool> {
        let Some(format) = Format::of_file_name(&self.path.to_string_lossy()) else { return Ok(false) };
        let (mut reader, mut rows) = (Reader::new(format), Vec::new());
        read_pieces(&self.path, |piece| {
            reader.push(piece, &mut rows);
            take(&rows);
            rows.clear();
        })?;
        let summary = reader.finish(&mut rows);
        take(&rows);
        Ok(summary.is_ok())
    }

    /// Returns the hash that the server computes for the rows; `None` when the server has to convert them, or the file is too large to
    /// be read for that, not plain text, or not valid.
    pub(super) fn canonical_hash(&self) -> Result<Option<String>, CliError> {
        if self.mapping.is_some() || self.size_bytes > MAX_CANONICAL_BYTES {
            return Ok(None);
        }
        let mut hash = Sha256::new();
        let is_valid =
            self.read_canonical(|piece| hash.update(piece)).map_err(|error| unreadable(&self.path, &error))?;
        Ok(is_valid.then(|| Sha256Digest::from(hash).to_string()))
    }

    /// Records the dataset of these rows, so that the next command does not look for it. The uploaded dataset can be used without this
    /// record, so an error is only printed.
    pub(super) fn record(&self, context: &Context, id: &str) {
        if let Err(error) = profiles::write_state(CACHE, &self.state_key, id) {
            context.out.note(format!("cannot record that {} is the dataset {id}: {error}", self.name));
        }
    }
}

/// The error of a local file that cannot be read.
pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> CliError {
    CliError::Usage(format!("cannot read {}: {error}", path.display()))
}
