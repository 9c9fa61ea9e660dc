//! Images of uploaded rows: from base64 or from a zip, checked without decoding a pixel, and stored once under their SHA-256.
//!
//! Nothing of an upload decides where a file is written: the name of a stored image is its hash, and names in the zip are only compared
//! with those of the rows. Sizes that a zip claims are not believed; the bytes that come out are counted.

mod archive;
mod header;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use rlood_types::dataset::{ImageError, ImageRef, ImageSink, SentImage};
use rlood_types::digest::Sha256Digest;

use archive::Archive;

/// Limits on the images of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageLimits {
    /// Maximum size of one image, in bytes.
    pub image_bytes: u64,
    /// Maximum number of pixels of one image.
    pub pixels: u64,
    /// Maximum number of bytes of all images together, unpacked.
    pub total_bytes: u64,
    /// Maximum number of files in a zip.
    pub files: usize,
}

impl ImageLimits {
    /// Returns the limits for images that may have `total_bytes` together.
    pub fn new(total_bytes: u64) -> Self {
        Self { image_bytes: 16 << 20, pixels: 50_000_000, total_bytes, files: 100_000 }
    }
}

/// The number and size of the images of a dataset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImageCounts {
    /// Number of different images that were stored.
    pub stored: u64,
    /// Size of the stored images, in bytes.
    pub stored_bytes: u64,
    /// Number of files of the zip that no row names.
    pub unused_files: u64,
}

/// Stores the images of one dataset in a directory. Clones share it.
#[derive(Debug, Clone)]
pub struct Images(Arc<Mutex<Store>>);

#[derive(Debug)]
struct Store {
    /// The directory of the stored images; `None` = they are only checked.
    dir: Option<PathBuf>,
    archive: Option<Archive>,
    limits: ImageLimits,
    stored: HashSet<Sha256Digest>,
    stored_bytes: u64,
    /// Bytes that were unpacked so far.
    unpacked_bytes: u64,
    /// Files of the zip that a row has named already.
    by_name: HashMap<String, ImageRef>,
}

impl Images {
    /// Stores images in an existing directory.
    pub fn new(dir: &Path, limits: ImageLimits) -> Self {
        Self::with(Some(dir.to_owned()), limits)
    }

    /// Checks images, and stores nothing.
    pub fn checked_only(limits: ImageLimits) -> Self {
        Self::with(None, limits)
    }

    fn with(dir: Option<PathBuf>, limits: ImageLimits) -> Self {
        let (stored, by_name) = (HashSet::new(), HashMap::new());
        let store = Store { dir, archive: None, limits, stored, stored_bytes: 0, unpacked_bytes: 0, by_name };
        Self(Arc::new(Mutex::new(store)))
    }

    /// Opens a zip, in which rows can name files. Blocking; unpacks nothing.
    ///
    /// # Errors
    /// Fails if the file is not a zip, or if one of its entries is a link, or has a name that leads outside or occurs twice.
    pub fn open_zip(&self, path: &Path) -> Result<(), ImageError> {
        let mut store = self.lock();
        store.archive = Some(Archive::open(path, store.limits.files)?);
        Ok(())
    }

    /// Returns how many images were stored.
    pub fn counts(&self) -> ImageCounts {
        let store = self.lock();
        let files = store.archive.as_ref().map_or(0, Archive::num_files);
        ImageCounts {
            stored: store.stored.len() as u64,
            stored_bytes: store.stored_bytes,
            unused_files: (files.saturating_sub(store.by_name.len())) as u64,
        }
    }

    /// Returns whether there is a zip.
    pub fn has_zip(&self) -> bool {
        self.lock().archive.is_some()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Store> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ImageSink for Images {
    /// Blocking: writes a file, without syncing it.
    fn store(&mut self, image: SentImage<'_>) -> Result<ImageRef, ImageError> {
        self.lock().take(image)
    }
}

impl Store {
    fn take(&mut self, image: SentImage<'_>) -> Result<ImageRef, ImageError> {
        match image {
            SentImage::Base64(text) => {
                let text = text.trim_end();
                let bytes = STANDARD.decode(text).or_else(|_| STANDARD_NO_PAD.decode(text));
                let bytes = bytes.map_err(|error| {
                    let detail = format!("bytes_b64 is not base64 ({error}): send the bytes of the file in standard base64, without 'data:' and line breaks");
                    ("image_base64", detail)
                })?;
                self.add(&bytes)
            }
            SentImage::File(name) => {
                if let Some(known) = self.by_name.get(name) {
                    return Ok(known.clone());
                }
                let Some(archive) = &mut self.archive else {
                    let detail = format!(
                        "the row names the file '{}', but there is no zip: send it in the form field 'images'",
                        brief(name)
                    );
                    return Err(("missing_file", detail));
                };
                let bytes = archive.unpack(name, self.limits.image_bytes)?;
                let found = self.add(&bytes).map_err(|(code, detail)| (code, format!("{}: {detail}", brief(name))))?;
                self.by_name.insert(name.to_owned(), found.clone());
                Ok(found)
            }
        }
    }

    fn add(&mut self, bytes: &[u8]) -> Result<ImageRef, ImageError> {
        let ImageLimits { image_bytes, pixels, total_bytes, files: _ } = self.limits;
        if bytes.len() as u64 > image_bytes {
            return Err(too_large(image_bytes));
        }
        self.unpacked_bytes += bytes.len() as u64;
        if self.unpacked_bytes > total_bytes {
            let detail =
                format!("the images have more than {total_bytes} bytes together, the maximum: split the dataset");
            return Err(("too_large", detail));
        }
        let (media_type, width, height) = header::read(bytes).map_err(|detail| ("invalid_image", detail))?;
        if u64::from(width) * u64::from(height) > pixels {
            let detail =
                format!("the image has {width} × {height} pixels, but at most {pixels} are supported: scale it down");
            return Err(("too_many_pixels", detail));
        }
        let sha256 = Sha256Digest::of(bytes);
        if let Some(dir) = &self.dir
            && !self.stored.contains(&sha256)
        {
            let written = std::fs::write(dir.join(sha256.to_string()), bytes);
            written.map_err(|error| ("unwritable", format!("the image cannot be written: {error}")))?;
        }
        if self.stored.insert(sha256) {
            self.stored_bytes += bytes.len() as u64;
        }
        Ok(ImageRef { sha256, media_type, width, height })
    }
}

fn too_large(limit: u64) -> ImageError {
    ("image_too_large", format!("the image has more than {limit} bytes, the maximum: compress it or scale it down"))
}

fn brief(name: &str) -> String {
    name.chars().take(120).collect()
}

#[cfg(test)]
mod tests;
