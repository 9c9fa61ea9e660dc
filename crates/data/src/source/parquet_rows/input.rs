//! The bytes of a parquet file: a local file, or a remote file of which only the needed parts are fetched.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;

use super::super::ranges::Remote;

/// Where the bytes of a parquet file come from.
#[derive(Debug)]
pub enum Input {
    File(File),
    Remote(Arc<Remote>),
}

impl Input {
    pub fn size(&self) -> io::Result<u64> {
        match self {
            Input::File(file) => Ok(file.metadata()?.len()),
            Input::Remote(remote) => Ok(remote.size()),
        }
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        match self {
            Input::File(file) => file.read_at(into, offset),
            Input::Remote(remote) => remote.read_at(into, offset),
        }
    }

    /// Reads exactly `length` bytes of the file at `offset`.
    pub fn bytes(&self, offset: u64, length: u64) -> io::Result<Bytes> {
        if offset.checked_add(length).is_none_or(|end| self.size().is_ok_and(|size| end > size)) {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file ends before the bytes that its metadata refers to",
            ));
        }
        if let Input::Remote(remote) = self {
            // The whole range is fetched in one piece first; reading would fetch several smaller pieces.
            remote.fetch(std::slice::from_ref(&(offset..offset + length)))?;
        }
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let mut bytes = Vec::with_capacity(length);
        let read = self.reader(offset).take(length as u64).read_to_end(&mut bytes)?;
        if read < length { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(bytes.into()) }
    }

    /// Creates a reader of the file that starts at `offset`.
    pub fn reader(&self, offset: u64) -> At<'_> {
        At { input: self, offset }
    }

    /// Fetches ranges of a remote file that will be needed soon, several in one call.
    pub fn expect(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        match self {
            Input::File(_) => Ok(()),
            Input::Remote(remote) => remote.fetch(ranges),
        }
    }

    /// Returns why fetching parts of a remote file failed since the last call, if it failed.
    pub fn take_failure(&self) -> Option<String> {
        match self {
            Input::File(_) => None,
            Input::Remote(remote) => remote.take_failure(),
        }
    }
}

/// A reader at a position of a parquet file.
#[derive(Debug)]
pub struct At<'i> {
    input: &'i Input,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read_at(into, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}
