//! A zip whose files rows name. The names are never used as paths.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::CrcReader;
use flate2::read::DeflateDecoder;
use rlood_types::dataset::ImageError;
use strsim::jaro_winkler;
use zip::{CompressionMethod, ZipArchive};

use super::{brief, too_large};

/// Maximum number of bytes that are read to find the list of files. A list of 100,000 files has about 12 MB.
const MAX_LIST_BYTES: u64 = 32 << 20;

/// A zip whose list of files has been read.
#[derive(Debug)]
pub(super) struct Archive {
    zip: ZipArchive<Metered<BufReader<File>>>,
    /// Position of each file in the zip, by name.
    files: HashMap<String, usize>,
    /// Number of bytes that may still be read.
    left: Arc<AtomicU64>,
}

/// A reader that fails after a number of bytes.
#[derive(Debug)]
struct Metered<R> {
    inner: R,
    left: Arc<AtomicU64>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        let left = self.left.load(Ordering::Relaxed).checked_sub(read as u64);
        self.left.store(left.ok_or_else(|| io::Error::other("the list of files is too long"))?, Ordering::Relaxed);
        Ok(read)
    }
}

impl<R: Seek> Seek for Metered<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

fn refuse(detail: impl Into<String>) -> ImageError {
    ("invalid_zip", detail.into())
}

impl Archive {
    /// Opens a zip and checks its list of files.
    pub(super) fn open(path: &Path, max_files: usize) -> Result<Self, ImageError> {
        let file = File::open(path).map_err(|error| refuse(format!("the zip cannot be read: {error}")))?;
        let left = Arc::new(AtomicU64::new(MAX_LIST_BYTES));
        let reader = Metered { inner: BufReader::new(file), left: left.clone() };
        let zip = ZipArchive::new(reader)
            .map_err(|error| refuse(format!("the field 'images' is not a zip that can be read: {error}")))?;
        if zip.len() > max_files {
            return Err(refuse(format!("the zip has {} files, but at most {max_files} are supported", zip.len())));
        }
        if zip.has_duplicate_names() {
            return Err(refuse("two files of the zip have the same name: make a new zip"));
        }
        let mut files = HashMap::with_capacity(zip.len());
        for index in 0..zip.len() {
            let entry = zip.by_index_data(index).map_err(|error| refuse(error.to_string()))?;
            let name = entry.name().map_err(|error| refuse(error.to_string()))?.into_owned();
            check_name(&name)?;
            // The upper half of the attributes is the mode of Unix: 0o100000 is a file, 0o040000 a folder, 0 is not set.
            let kind = entry.unix_mode().unwrap_or(0) & 0o170_000;
            if entry.is_symlink() || ![0, 0o040_000, 0o100_000].contains(&kind) {
                let detail = format!("'{}' is a link or a device: only plain files are accepted", brief(&name));
                return Err(refuse(detail));
            }
            if entry.encrypted() {
                return Err(refuse(format!("'{}' is encrypted: make a zip without a password", brief(&name))));
            }
            if !entry.is_dir() && files.insert(name.clone(), index).is_some() {
                return Err(refuse(format!("two files of the zip have the name '{}': make a new zip", brief(&name))));
            }
        }
        zip.by_index_data(0).map_err(|_| refuse("the zip has no files"))?;
        Ok(Self { zip, files, left })
    }

    /// Returns the number of files, without folders.
    pub(super) fn num_files(&self) -> usize {
        self.files.len()
    }

    /// Unpacks one file, of at most `limit` bytes.
    pub(super) fn unpack(&mut self, name: &str, limit: u64) -> Result<Vec<u8>, ImageError> {
        let Some(index) = self.files.get(name).copied() else { return Err(self.missing(name)) };
        let broken =
            |error: &dyn std::fmt::Display| ("invalid_zip", format!("'{}' cannot be unpacked: {error}", brief(name)));
        // The list of files was read within its own limit.
        self.left.store(u64::MAX, Ordering::Relaxed);
        let entry = self.zip.by_index_raw(index).map_err(|error| broken(&error))?;
        let (method, crc32) = (entry.compression(), entry.crc32());
        let unpacked: Box<dyn Read> = match method {
            CompressionMethod::Stored => Box::new(entry),
            CompressionMethod::DEFLATE => Box::new(DeflateDecoder::new(entry)),
            other => return Err(broken(&format!("the compression {other} is not supported, use deflate or none"))),
        };
        let mut unpacked = CrcReader::new(unpacked.take(limit + 1));
        let mut bytes = Vec::new();
        unpacked.read_to_end(&mut bytes).map_err(|error| broken(&error))?;
        match bytes.len() as u64 > limit {
            true => Err(too_large(limit)).map_err(|(code, detail)| (code, format!("{}: {detail}", brief(name)))),
            false if unpacked.crc().sum() != crc32 => Err(broken(&"its checksum differs, the zip is damaged")),
            false => Ok(bytes),
        }
    }

    fn missing(&self, name: &str) -> ImageError {
        // Comparing a name with all others takes long if there are many.
        let files = self.files.keys().take(1000);
        let nearest = files.map(|file| (jaro_winkler(file, name), file)).max_by(|a, b| a.0.total_cmp(&b.0));
        let hint = nearest.filter(|(likeness, _)| *likeness > 0.8).map_or_else(
            || "names are those inside the zip, with its folders".to_owned(),
            |(_, file)| format!("did you mean '{}'?", brief(file)),
        );
        ("missing_file", format!("the zip has no file '{}': {hint}", brief(name)))
    }
}

/// Refuses names that would lead outside of a folder.
fn check_name(name: &str) -> Result<(), ImageError> {
    let is_absolute = name.starts_with('/') || name.as_bytes().get(1) == Some(&b':');
    let leads_outside = is_absolute || name.contains(['\\', '\0']) || name.split('/').any(|part| part == "..");
    match leads_outside {
        true => {
            Err(refuse(format!("the name '{}' leads outside of the zip: use relative names without '..'", brief(name))))
        }
        false => Ok(()),
    }
}
