//! Hashes by which the Hub identifies files.

use std::fmt;
use std::str::FromStr;

use rlood_types::digest::Sha256Digest;
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The hash that the Hub announces for a file, used to verify its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FileHash {
    /// SHA-256 of the content, for a file in LFS or Xet.
    Sha256(Sha256Digest),
    /// Git's SHA-1 of `blob <length>\0<bytes>`, for a file in git itself.
    Git([u8; 20]),
}

impl FileHash {
    /// Parses a hash as [`fmt::Display`] writes it: 40 hexadecimal digits are git's SHA-1, 64 are SHA-256.
    pub fn parse(text: &str) -> Option<FileHash> {
        FileHash::git(text).or_else(|| FileHash::sha256(text))
    }

    /// Creates an expected git hash from 40 hexadecimal digits.
    pub(crate) fn git(text: &str) -> Option<FileHash> {
        let mut bytes = [0; 20];
        hex::decode_to_slice(text, &mut bytes).ok()?;
        Some(FileHash::Git(bytes))
    }

    /// Creates an expected SHA-256 hash from 64 hexadecimal digits.
    pub(crate) fn sha256(text: &str) -> Option<FileHash> {
        Sha256Digest::from_str(text).ok().map(FileHash::Sha256)
    }
}

impl fmt::Display for FileHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileHash::Sha256(digest) => digest.fmt(f),
            FileHash::Git(bytes) => f.write_str(&hex::encode(bytes)),
        }
    }
}

/// Computes the hash of a file, SHA-256 or git's, whichever the Hub announced.
pub(crate) enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
}

impl Hasher {
    /// Creates a hasher for a file of this size in bytes.
    pub(crate) fn new(expected: &FileHash, size_bytes: u64) -> Hasher {
        match expected {
            FileHash::Sha256(_) => Hasher::Sha256(Sha256::new()),
            FileHash::Git(_) => Hasher::Git(Sha1::new().chain_update(format!("blob {size_bytes}\0"))),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hasher) => hasher.update(bytes),
            Hasher::Git(hasher) => hasher.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> FileHash {
        match self {
            Hasher::Sha256(hasher) => FileHash::Sha256(hasher.into()),
            Hasher::Git(hasher) => FileHash::Git(hasher.finalize().into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_in_git_has_the_hash_that_git_gives_it() {
        // The expected hash is the output of `printf 'hello\n' | git hash-object --stdin`.
        let expected = FileHash::git("ce013625030ba8dba906f756967f9e9ca394464a").unwrap();
        let mut hasher = Hasher::new(&expected, 6);
        hasher.update(b"hello\n");
        assert_eq!(hasher.finish(), expected);
        assert_eq!(expected.to_string(), "ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(FileHash::git("ce01"), None);
        let sha256 = FileHash::Sha256(Sha256Digest::of(b"hello\n"));
        for hash in [expected, sha256] {
            assert_eq!(FileHash::parse(&hash.to_string()), Some(hash));
        }
        assert_eq!(FileHash::parse("ce01"), None);
    }
}
