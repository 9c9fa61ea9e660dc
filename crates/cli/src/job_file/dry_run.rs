//! A dry run of a job with local files: nothing that the check needs stays on the server.

use rlood_types::strict_json;
use serde_json::Value;

use super::local_rows::LocalRows;
use crate::context::Context;

/// Maximum size in bytes of a job that is checked together with its rows. The server accepts twice as much.
const MAX_CHECKED_BYTES: u64 = 8 << 20;

/// The objects that a dry run creates on the server, and that it removes after the check.
pub struct DryRun {
    /// How many bytes of rows may still be sent inside the job.
    inline_bytes: u64,
    datasets: Vec<String>,
    model: Option<String>,
}

impl DryRun {
    /// Begins the dry run of a job.
    pub fn of(document: &Value) -> Self {
        let inline_bytes = MAX_CHECKED_BYTES.saturating_sub(document.to_string().len() as u64);
        Self { inline_bytes, datasets: Vec::new(), model: None }
    }

    /// Returns the rows of a local file, to be sent inside the job; `None` when they are too large for that, have to be mapped, or are
    /// not valid, so that the file has to be uploaded.
    ///
    /// # Errors
    /// Fails when the file cannot be read.
    pub fn inline(&mut self, rows: &LocalRows) -> std::io::Result<Option<Vec<Value>>> {
        if rows.mapping.is_some() || rows.size_bytes > self.inline_bytes {
            return Ok(None);
        }
        let mut canonical = Vec::new();
        let is_valid = rows.read_canonical(|piece| canonical.extend_from_slice(piece))?;
        let Some(left) = self.inline_bytes.checked_sub(canonical.len() as u64).filter(|_| is_valid) else {
            return Ok(None);
        };
        let lines = canonical.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let records: Result<Vec<Value>, _> = lines.map(strict_json::read).collect();
        self.inline_bytes = left;
        Ok(records.ok())
    }

    /// Notes a dataset that was uploaded for the check.
    pub fn uploaded(&mut self, id: &str) {
        self.datasets.push(id.to_owned());
    }

    /// Notes a model that was registered for the check.
    pub fn registered(&mut self, id: &str) {
        self.model = Some(id.to_owned());
    }

    /// Returns whether a dataset was uploaded for the check, so that its id is of no use afterwards.
    pub fn is_temporary(&self, dataset: &str) -> bool {
        self.datasets.iter().any(|id| id == dataset)
    }

    /// Removes what was created for the check. Errors are printed, because they do not change the result of the check.
    pub async fn remove(&self, context: &Context) {
        let datasets = self.datasets.iter().map(|id| ("datasets", id));
        for (kind, id) in datasets.chain(self.model.iter().map(|id| ("models", id))) {
            if let Err(error) = context.client.raw_delete(&[kind, id]).send().await {
                context.out.note(format!(
                    "{id} was created for the check and cannot be removed: {error}; try `rlood {kind} remove {id}`"
                ));
            }
        }
    }
}
