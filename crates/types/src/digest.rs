//! SHA-256 digests of files and documents.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

/// A SHA-256 digest. As text, in JSON and in the database it is 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sha256Digest([u8; 32]);

impl Sha256Digest {
    /// Returns the digest of these bytes.
    pub fn of(bytes: impl AsRef<[u8]>) -> Sha256Digest {
        Sha256::new().chain_update(bytes).into()
    }

    /// Reads to the end; returns the number of bytes and their digest. Blocking.
    ///
    /// # Errors
    /// Returns the reader's error. An interrupted read is repeated.
    pub fn of_reader(reader: &mut impl Read) -> io::Result<(u64, Sha256Digest)> {
        let (mut hasher, mut size_bytes, mut buffer) = (Sha256::new(), 0, vec![0; 256 * 1024]);
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return Ok((size_bytes, hasher.into())),
                Ok(read) => {
                    hasher.update(buffer.get(..read).unwrap_or_default());
                    size_bytes += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the 32 bytes of the digest.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl From<[u8; 32]> for Sha256Digest {
    fn from(bytes: [u8; 32]) -> Sha256Digest {
        Sha256Digest(bytes)
    }
}

impl From<Sha256> for Sha256Digest {
    fn from(hasher: Sha256) -> Sha256Digest {
        Sha256Digest(hasher.finalize().into())
    }
}

impl fmt::Display for Sha256Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Sha256Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error for a text that is not a SHA-256 digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected a SHA-256 digest: 64 lower-case hexadecimal digits")]
pub struct InvalidDigest;

impl FromStr for Sha256Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Sha256Digest, InvalidDigest> {
        let mut bytes = [0; 32];
        // Upper-case digits are valid hexadecimal, but a digest is never written with them, so they are rejected.
        if text.bytes().any(|digit| digit.is_ascii_uppercase()) || hex::decode_to_slice(text, &mut bytes).is_err() {
            return Err(InvalidDigest);
        }
        Ok(Sha256Digest(bytes))
    }
}

impl Serialize for Sha256Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Sha256Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Sha256Digest, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Digest of "abc", the example in FIPS 180-4.
    const OF_ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_digest_is_read_as_it_is_written() {
        let digest = Sha256Digest::of("abc");
        assert_eq!(digest.to_string(), OF_ABC);
        assert_eq!(OF_ABC.parse(), Ok(digest));
        assert_eq!(Sha256Digest::of_reader(&mut &b"abc"[..]).unwrap(), (3, digest));
        assert_eq!(serde_json::to_value(digest).unwrap(), OF_ABC);
        assert_eq!(serde_json::from_str::<Sha256Digest>(&format!("\"{OF_ABC}\"")).unwrap(), digest);
    }

    #[test]
    fn other_texts_are_refused() {
        let too_long = format!("{OF_ABC}0");
        for text in ["", "ba78", &OF_ABC.to_uppercase(), &too_long, &OF_ABC.replace('b', "g"), &"é".repeat(32)] {
            assert_eq!(text.parse::<Sha256Digest>(), Err(InvalidDigest), "{text}");
        }
    }
}
