//! Previews of parquet files on the hub: fetches only the byte ranges that the first rows need.

use std::io;
use std::ops::Range;

use tokio::runtime::Handle;

use crate::data::{Ranges, Source};
use crate::error_text::with_causes;
use crate::hub::{Hub, RepoFile, RepoPlan};

/// A remote file on the hub with `Read` and `Seek`, for a thread that may block.
struct HubRanges {
    hub: Hub,
    plan: RepoPlan,
    file: RepoFile,
    runtime: Handle,
}

impl Ranges for HubRanges {
    fn size(&self) -> u64 {
        self.file.size_bytes
    }

    fn read(&self, ranges: &[Range<u64>]) -> io::Result<Vec<Vec<u8>>> {
        let reading = self.hub.read_ranges(&self.plan.repo, &self.plan.commit, &self.file, ranges);
        match self.runtime.block_on(reading) {
            Ok(Some(parts)) => Ok(parts),
            Ok(None) => Err(io::Error::other("the hub does not support requests for ranges of a file")),
            Err(error) => Err(io::Error::other(with_causes(&error))),
        }
    }
}

/// Opens a file of a hub repository for range requests, without downloading it.
pub(super) fn ranged(hub: Hub, plan: RepoPlan, file: RepoFile) -> Source {
    let name = file.path.clone();
    Source::elsewhere(name, HubRanges { hub, plan, file, runtime: Handle::current() })
}
