//! Reads ranges of bytes of a file in a Hub repository.

use std::ops::Range;

use futures::future::BoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};
use reqwest::StatusCode;
use reqwest::header::CONTENT_RANGE;

use crate::error::HubError;
use crate::fetch::{MAX_CONCURRENT, content_range};
use crate::http::{Attempts, Failed, Hub, next_piece, text};
use crate::id::Repo;
use crate::info::RepoFile;

impl Hub {
    /// Reads ranges of bytes of a repository's file, four at a time, without verification. Returns `None` when the Hub or its CDN
    /// does not support range requests.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Hub::info`].
    pub fn read_ranges<'a>(
        &'a self,
        repo: &'a Repo,
        commit: &'a str,
        file: &'a RepoFile,
        ranges: &'a [Range<u64>],
    ) -> BoxFuture<'a, Result<Option<Vec<Vec<u8>>>, HubError>> {
        Box::pin(async move {
            let read = stream::iter(ranges.iter().cloned().map(|range| self.read_range(repo, commit, file, range)));
            read.buffered(MAX_CONCURRENT).try_collect::<Vec<_>>().await.map(|parts| parts.into_iter().collect())
        })
    }

    /// Checks with one request whether the Hub lets this client read a file of a repository. The list of a gated repository's files is
    /// public, so only a request for a file shows whether the token may read it.
    ///
    /// # Errors
    /// Fails with `Gated` or `NoRepository` when it may not, or like [`Hub::info`].
    pub fn check_access<'a>(
        &'a self,
        repo: &'a Repo,
        commit: &'a str,
        file: &'a RepoFile,
    ) -> BoxFuture<'a, Result<(), HubError>> {
        Box::pin(async move {
            let url = self.file_url(repo, commit, &file.path)?;
            let mut attempts = Attempts::new(self.settings.first_delay);
            loop {
                // One byte is asked for, and not read.
                match self.open_range(repo, &url, Some(commit), Some("bytes=0-0".to_owned())).await {
                    Ok(_) => return Ok(()),
                    // The Hub redirects to its CDN only after it has checked the token.
                    Err(failed) if failed.is_forbidden_by_cdn() => return Ok(()),
                    Err(failed) => attempts.pause_after(failed).await?,
                }
            }
        })
    }

    async fn read_range(
        &self,
        repo: &Repo,
        commit: &str,
        file: &RepoFile,
        range: Range<u64>,
    ) -> Result<Option<Vec<u8>>, HubError> {
        let mut attempts = Attempts::new(self.settings.first_delay);
        loop {
            match self.range_of(repo, commit, file, &range).await {
                Ok(part) => return Ok(part),
                Err(failed) if failed.is_forbidden_by_cdn() => return Ok(None),
                Err(failed) => attempts.pause_after(failed).await?,
            }
        }
    }

    async fn range_of(
        &self,
        repo: &Repo,
        commit: &str,
        file: &RepoFile,
        range: &Range<u64>,
    ) -> Result<Option<Vec<u8>>, Failed> {
        let Some(last) = range.end.checked_sub(1).filter(|last| *last >= range.start) else {
            return Ok(Some(Vec::new()));
        };
        let url = self.file_url(repo, commit, &file.path)?;
        let asked = format!("bytes={}-{last}", range.start);
        let mut response = self.open_range(repo, &url, Some(commit), Some(asked)).await?.response;
        let sent = text(response.headers(), CONTENT_RANGE.as_str()).and_then(content_range);
        if response.status() != StatusCode::PARTIAL_CONTENT || sent != Some((range.start, file.size_bytes)) {
            return Ok(None);
        }
        let wanted = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let mut bytes = Vec::new();
        while bytes.len() < wanted {
            match next_piece(&mut response).await.map_err(|detail| Failed::transient(&url, detail))? {
                Some(piece) => bytes.extend_from_slice(&piece),
                None => {
                    return Err(Failed::transient(&url, "the response ended before the end of the range".to_owned()));
                }
            }
        }
        bytes.truncate(wanted);
        Ok(Some(bytes))
    }
}
