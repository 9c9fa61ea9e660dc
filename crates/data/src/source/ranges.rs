//! A remote file, read piece by piece. Fetched pieces are kept, so that a second preview of the same file fetches nothing.

#![cfg_attr(
    not(any(feature = "parquet", test)),
    expect(dead_code, reason = "only parquet files are read piece by piece")
)]

use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Minimum number of bytes fetched from a remote file at once.
const PIECE_BYTES: u64 = 256 << 10;
/// Maximum number of bytes fetched from one remote file.
const MAX_FETCHED_BYTES: u64 = 24 << 20;

/// Fetches parts of a remote file.
pub trait Ranges: Send + Sync {
    /// Size of the whole file, in bytes.
    fn size(&self) -> u64;

    /// Returns the bytes of each of the requested ranges, complete.
    ///
    /// # Errors
    /// Fails if the ranges cannot be fetched; the user sees the message.
    fn read(&self, ranges: &[Range<u64>]) -> io::Result<Vec<Vec<u8>>>;
}

/// The pieces of a remote file fetched so far.
pub struct Remote {
    ranges: Box<dyn Ranges>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// The fetched pieces by their offset in the file; the pieces do not overlap.
    pieces: Vec<(u64, Vec<u8>)>,
    bytes: u64,
    waited: Duration,
    failure: Option<String>,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("size", &self.size()).finish_non_exhaustive()
    }
}

impl Remote {
    pub fn new(ranges: Box<dyn Ranges>) -> Remote {
        Remote { ranges, known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn size(&self) -> u64 {
        self.ranges.size()
    }

    /// How long all fetches of pieces of the file took together.
    pub fn waited(&self) -> Duration {
        self.known().waited
    }

    /// Returns why fetching failed since the last call, if it failed.
    pub fn take_failure(&self) -> Option<String> {
        self.known().failure.take()
    }

    /// Reads bytes of the file at `offset`: at least one, except at the end of the file. Fetches a piece if the byte
    /// was not fetched before.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        if into.is_empty() || offset >= self.size() {
            return Ok(0);
        }
        if self.known().find(offset).is_none() {
            self.fetch(std::slice::from_ref(&(offset..offset.saturating_add(PIECE_BYTES))))?;
        }
        let known = self.known();
        let bytes = known
            .find(offset)
            .ok_or_else(|| io::Error::other("a piece of the parquet file that was requested is missing"))?;
        let read = bytes.len().min(into.len());
        if let Some((into, bytes)) = into.get_mut(..read).zip(bytes.get(..read)) {
            into.copy_from_slice(bytes);
        }
        Ok(read)
    }

    /// Fetches those parts of the ranges that were not fetched before.
    pub fn fetch(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        let mut known = self.known();
        let fetched = known.missing(ranges, self.size()).and_then(|missing| {
            if missing.is_empty() {
                return Ok(());
            }
            let begun = Instant::now();
            let read = self.ranges.read(&missing);
            known.waited += begun.elapsed();
            for (range, bytes) in missing.iter().zip(read?) {
                if bytes.len() as u64 != range.end - range.start {
                    return Err(io::Error::other("the server returned another part of the file than requested"));
                }
                known.bytes += bytes.len() as u64;
                known.pieces.push((range.start, bytes));
            }
            known.pieces.sort_unstable_by_key(|(start, _)| *start);
            Ok(())
        });
        fetched.inspect_err(|error| {
            known.failure.get_or_insert_with(|| error.to_string());
        })
    }
}

impl Known {
    /// Returns the bytes from `offset` to the end of the fetched piece that contains it.
    fn find(&self, offset: u64) -> Option<&[u8]> {
        let after = self.pieces.partition_point(|(start, _)| *start <= offset);
        let (start, bytes) = self.pieces.get(after.checked_sub(1)?)?;
        bytes.get(usize::try_from(offset - start).ok()?..).filter(|bytes| !bytes.is_empty())
    }

    /// Returns the parts of some ranges that were not fetched before, in order, with adjacent parts merged.
    fn missing(&self, ranges: &[Range<u64>], size: u64) -> io::Result<Vec<Range<u64>>> {
        let mut wanted: Vec<Range<u64>> = ranges.iter().map(|range| range.start..range.end.min(size)).collect();
        wanted.sort_unstable_by_key(|range| range.start);
        let mut missing: Vec<Range<u64>> = Vec::new();
        for range in wanted {
            let mut at = range.start.max(missing.last().map_or(0, |last| last.end));
            while at < range.end {
                if let Some(bytes) = self.find(at) {
                    at += bytes.len() as u64;
                    continue;
                }
                let next = self.pieces.iter().map(|(start, _)| *start).find(|start| *start > at);
                let end = range.end.min(next.unwrap_or(range.end));
                match missing.last_mut().filter(|last| last.end == at) {
                    Some(last) => last.end = end,
                    None => missing.push(at..end),
                }
                at = end;
            }
        }
        let more: u64 = missing.iter().map(|range| range.end - range.start).sum();
        if self.bytes.saturating_add(more) > MAX_FETCHED_BYTES {
            return Err(io::Error::other("the first rows need more than 24 MiB of the file"));
        }
        Ok(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// A fake file whose byte at position n is n modulo 251; records the requested ranges.
    struct Counted(u64, Arc<Mutex<Vec<Range<u64>>>>);

    impl Ranges for Counted {
        fn size(&self) -> u64 {
            self.0
        }

        fn read(&self, ranges: &[Range<u64>]) -> io::Result<Vec<Vec<u8>>> {
            self.1.lock().unwrap().extend(ranges.iter().cloned());
            Ok(ranges.iter().map(|range| range.clone().map(|at| (at % 251) as u8).collect()).collect())
        }
    }

    #[test]
    fn only_missing_ranges_are_fetched() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let remote = Remote::new(Box::new(Counted(1 << 30, asked.clone())));
        let mut bytes = [0; 4];
        assert_eq!(remote.read_at(&mut bytes, 251 * 10).unwrap(), 4);
        assert_eq!(bytes, [0, 1, 2, 3]);
        remote.fetch(&[0..10, 5..3000]).unwrap();
        assert_eq!(*asked.lock().unwrap(), [2510..2510 + PIECE_BYTES, 0..2510]);
        // The first read returns the bytes already fetched; the next read fetches the rest.
        let end = 2510 + PIECE_BYTES;
        assert_eq!(remote.read_at(&mut bytes, end - 1).unwrap(), 1);
        assert_eq!(u64::from(bytes[0]), (end - 1) % 251);
        // Reading at the end of the file returns no bytes.
        assert_eq!(remote.read_at(&mut bytes, (1 << 30) - 2).unwrap(), 2);
        assert_eq!(remote.read_at(&mut bytes, 1 << 30).unwrap(), 0);
        assert_eq!(asked.lock().unwrap().last().unwrap().end, 1 << 30);
    }

    #[test]
    fn fetching_too_much_is_an_error() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let remote = Remote::new(Box::new(Counted(1 << 30, asked.clone())));
        remote.fetch(&[0..10, 10..1 << 20]).unwrap();
        assert!(remote.fetch(&[0..10, 0..MAX_FETCHED_BYTES + 1]).is_err());
        assert_eq!(asked.lock().unwrap().len(), 1);
        assert!(remote.take_failure().unwrap().contains("24 MiB"));
    }
}
