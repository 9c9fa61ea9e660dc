//! Downloads the images of a job's rows.

use std::collections::BTreeSet;
use std::path::Path;

use futures::{StreamExt, TryStreamExt, stream};

use super::attempt::Attempt;
use super::client::fetch;
use crate::dataset::image_refs;
use crate::digest::Sha256Digest;
use crate::engine::host::PromptRow;
use crate::id::DatasetId;
use crate::job::Failure;
use crate::runtime::trl::IMAGES_DIR;

/// Number of images that are downloaded at the same time.
const CONCURRENT: usize = 8;

impl Attempt {
    /// Downloads each image of the rows once, into the folder `images` of the engine's directory. The name of a file is its SHA-256.
    pub(super) async fn fetch_images(
        &self,
        dataset: DatasetId,
        rows: &[PromptRow],
        engine_dir: &Path,
    ) -> Result<(), Failure> {
        let images: BTreeSet<Sha256Digest> =
            rows.iter().flat_map(|row| image_refs(&row.columns)).map(|image| image.sha256).collect();
        if images.is_empty() {
            return Ok(());
        }
        let dir = engine_dir.join(IMAGES_DIR);
        self.events.log(format!("downloading {} images", images.len()));
        // A file that is there may be incomplete, and a download resumes it.
        if let Err(error) = tokio::fs::create_dir_all(&dir).await {
            return Err(super::failure::dataset_missing(&error.to_string(), self.progress.get()));
        }
        let downloads = stream::iter(images.into_iter().map(|sha256| {
            let path = dir.join(sha256.to_string());
            async move {
                let download = || self.client.image(self.claim_ref, dataset, sha256, &path);
                self.check_transfer(fetch(download).await)
            }
        }));
        downloads.buffer_unordered(CONCURRENT).try_collect().await
    }
}
