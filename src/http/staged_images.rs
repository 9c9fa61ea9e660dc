//! Images of an upload that is being received: checked, and staged until the rows are published.

use serde_json::{Value, json};

use super::AppState;
use super::error::{Code, Problem};
use super::rows::{check_disk, too_large};
use super::storage::check_limit;
use crate::data::{ImageLimits, Images};
use crate::dataset::ImageSink;
use crate::files::{StagedDir, StagedDone};
use crate::storage::StorageKind;
use crate::store::background::spawn_blocking;

/// Images of an upload that is being received.
pub(super) struct StagedImages {
    /// The directory in which images are stored; `None` = the upload is only previewed.
    dir: Option<StagedDir>,
    images: Images,
    /// The uploaded zip, kept until it was read.
    zip: Option<StagedDone>,
}

impl StagedImages {
    /// Stores images in a new directory.
    pub(super) async fn in_directory(state: &AppState) -> Result<Self, Problem> {
        let dir = state.files.in_background(|files| files.stage_dir()).await?;
        let images = Images::new(dir.path(), ImageLimits::new(state.dataset_limit_bytes));
        Ok(Self { dir: Some(dir), images, zip: None })
    }

    /// Checks images, and stores none.
    pub(super) fn checked_only(state: &AppState) -> Self {
        let images = Images::checked_only(ImageLimits::new(state.dataset_limit_bytes));
        Self { dir: None, images, zip: None }
    }

    /// Returns what stores the images of rows.
    pub(super) fn sink(&self) -> Box<dyn ImageSink> {
        Box::new(self.images.clone())
    }

    pub(super) fn images(&self) -> &Images {
        &self.images
    }

    /// Opens the zip whose files rows name. Nothing is unpacked yet.
    pub(super) async fn open_zip(&mut self, state: &AppState, zip: StagedDone) -> Result<(), Problem> {
        if zip.size_bytes > state.dataset_limit_bytes {
            return Err(too_large(state.dataset_limit_bytes));
        }
        let (images, path) = (self.images.clone(), zip.path().to_owned());
        let opened = spawn_blocking(move || images.open_zip(&path)).await.map_err(Problem::internal)?;
        opened.map_err(|(code, detail)| {
            Problem::new(Code::InvalidDataset, format!("images: {detail}")).item("images", code, detail)
        })?;
        self.zip = Some(zip);
        Ok(())
    }

    /// Adds the stored images to the file of rows. Returns what is said of them in the dataset's origin, if there was a zip.
    pub(super) async fn finish(
        self,
        state: &AppState,
        staged: StagedDone,
    ) -> Result<(StagedDone, Option<Value>), Problem> {
        let counts = self.images.counts();
        if self.zip.is_some() && counts.stored == 0 {
            let detail = "no row names a file of the zip: rows need 'images': [{\"file\": \"a/b.png\"}]";
            return Err(Problem::new(Code::InvalidDataset, detail).item("images", "unused_files", detail));
        }
        let about = self.zip.map(
            |_| json!({"stored": counts.stored, "bytes": counts.stored_bytes, "unused_files": counts.unused_files}),
        );
        match self.dir.filter(|_| counts.stored > 0) {
            None => Ok((staged, about)),
            Some(dir) => {
                check_disk(state)?;
                check_limit(state, StorageKind::Datasets, staged.size_bytes.saturating_add(counts.stored_bytes))
                    .await?;
                Ok((staged.with_images(dir), about))
            }
        }
    }
}
