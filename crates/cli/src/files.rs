//! Reads local files in pieces, so that large ones need little memory.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rlood_types::digest::Sha256Digest;
use sha2::{Digest, Sha256};

const READ_BYTES: usize = 256 * 1024;

/// Returns the SHA-256 hash and the size in bytes of a file.
///
/// # Errors
/// Fails when the file cannot be read.
pub fn hash_of(path: &Path) -> std::io::Result<(Sha256Digest, u64)> {
    let (mut hash, mut size_bytes) = (Sha256::new(), 0);
    read_pieces(path, |piece| {
        hash.update(piece);
        size_bytes += piece.len() as u64;
    })?;
    Ok((hash.into(), size_bytes))
}

/// Reads a file and passes its bytes to `take`, piece by piece.
///
/// # Errors
/// Fails when the file cannot be read.
pub fn read_pieces(path: &Path, mut take: impl FnMut(&[u8])) -> std::io::Result<()> {
    let (mut file, mut piece) = (File::open(path)?, vec![0; READ_BYTES]);
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(()),
            count => take(&piece[..count]),
        }
    }
}
