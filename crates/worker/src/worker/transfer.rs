//! File transfers between worker and server, and the rules for when a transfer of any size and speed has failed.
//!
//! A transfer fails when no byte was transferred for a given time; there is no limit on its total time. reqwest's own limits
//! cannot express this. Its `read_timeout` starts when a request is sent and is not extended by bytes of the request's body,
//! its `timeout` covers the whole call, and its `tcp_user_timeout` (30 s unless disabled) closes a connection whose peer reads
//! so slowly that its window stays closed for a while. So each direction has its own watchdog
//! here, with limits in [`TransferLimits`].
//!
//! An upload makes progress when the socket accepts a piece of the body, or when the server's answer to a heartbeat reports
//! more received bytes: data in buffers on the way (of the kernel, of a proxy) may take long to arrive over a slow line.
//!
//! An interrupted download is resumed after its last byte, if the server supports that.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use reqwest::{ClientBuilder, RequestBuilder, Response, StatusCode};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncWriteExt, BufWriter};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::io::ReaderStream;

use super::client_error::ClientError;
use crate::digest::Sha256Digest;
use crate::protocol::TRANSFER_STALL;

/// Time limit for opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of bytes that an upload reads from a file at a time.
const READ_BYTES: usize = 256 * 1024;
/// Number of bytes that a download writes to a file at a time.
const WRITE_BYTES: usize = 1024 * 1024;
/// Size in bytes of the pieces in which an upload passes its body to the HTTP client. The client asks for more only after it has
/// sent several pieces, so small pieces show progress early.
const PIECE_BYTES: usize = 4 * 1024;

/// Limits after which a transfer has failed.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferLimits {
    /// Maximum time in which no byte is transferred, in either direction.
    pub(super) stall: Duration,
    /// Fixed part of the maximum wait for an answer after the last byte of the request; `answer_bytes_per_s` adds
    /// time for large bodies.
    pub(super) answer_base: Duration,
    /// Slowest rate at which the server may write, read and hash the bytes of a request before it answers.
    pub(super) answer_bytes_per_s: u64,
}

impl Default for TransferLimits {
    fn default() -> Self {
        Self { stall: TRANSFER_STALL, answer_base: Duration::from_secs(120), answer_bytes_per_s: 50_000_000 }
    }
}

impl TransferLimits {
    /// Returns the maximum wait for the answer to a request that makes the server process this many bytes.
    pub(super) fn answer(&self, size_bytes: u64) -> Duration {
        let work = Duration::try_from_secs_f64(size_bytes as f64 / self.answer_bytes_per_s as f64);
        self.answer_base.saturating_add(work.unwrap_or(Duration::MAX))
    }
}

/// Returns a builder of HTTP clients without reqwest's own time limits on transfers.
pub(super) fn http_client() -> ClientBuilder {
    let builder = reqwest::Client::builder().connect_timeout(CONNECT_TIMEOUT);
    #[cfg(target_os = "linux")]
    let builder = builder.tcp_user_timeout(None);
    builder.tls_backend_preconfigured(crate::reward::http_client::tls_config())
}

/// Progress of an upload: pieces that the socket has accepted.
#[derive(Debug)]
struct Flow {
    last: Instant,
    taken_bytes: u64,
}

/// Sends a request with a large body, and waits for the response headers as long as there is progress. `received` changes when the
/// server has received more bytes.
pub(super) async fn send_body<S>(
    request: RequestBuilder,
    (size_bytes, pieces): (u64, S),
    limits: TransferLimits,
    mut received: watch::Receiver<u64>,
) -> Result<Response, ClientError>
where
    S: Stream<Item = std::io::Result<Bytes>> + Send + 'static,
{
    let flow = Arc::new(Mutex::new(Flow { last: Instant::now(), taken_bytes: 0 }));
    let of_body = flow.clone();
    let pieces = pieces.inspect(move |piece| {
        let mut flow = locked(&of_body);
        flow.last = Instant::now();
        flow.taken_bytes += piece.as_ref().map_or(0, |piece| piece.len() as u64);
    });
    let request =
        request.header(reqwest::header::CONTENT_LENGTH, size_bytes).body(reqwest::Body::wrap_stream(pieces)).send();
    let mut answer = std::pin::pin!(request);
    received.mark_unchanged();
    loop {
        let (ends, limit) = {
            let flow = locked(&flow);
            let limit = if flow.taken_bytes < size_bytes { limits.stall } else { limits.answer(size_bytes) };
            (flow.last + limit, limit)
        };
        if ends <= Instant::now() {
            return Err(ClientError::Stalled { limit });
        }
        tokio::select! {
            biased;
            answer = &mut answer => return answer.map_err(ClientError::Unreachable),
            Ok(()) = received.changed() => locked(&flow).last = Instant::now(),
            () = sleep_until(ends) => {}
        }
    }
}

fn locked(flow: &Mutex<Flow>) -> MutexGuard<'_, Flow> {
    flow.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends a request with a small or no body. `limit` is the time until the response headers.
pub(super) async fn send_within(limit: Duration, request: RequestBuilder) -> Result<Response, ClientError> {
    match timeout(limit, request.send()).await {
        Ok(answer) => answer.map_err(ClientError::Unreachable),
        Err(_) => Err(ClientError::Stalled { limit }),
    }
}

/// Returns the content of a file as the body of an upload.
pub(super) async fn file_body(
    path: &Path,
    size_bytes: u64,
) -> Result<(u64, impl Stream<Item = std::io::Result<Bytes>> + use<>), ClientError> {
    let disk = |source| ClientError::Disk { doing: "read a file of a checkpoint", source };
    let file = tokio::fs::File::open(path).await.map_err(disk)?;
    let pieces = ReaderStream::with_capacity(file, READ_BYTES).flat_map(|read| match read {
        Ok(bytes) => split(bytes).left_stream(),
        Err(error) => stream::iter([Err(error)]).right_stream(),
    });
    Ok((size_bytes, pieces))
}

/// Returns bytes from memory as the body of an upload.
pub(super) fn bytes_body(bytes: Vec<u8>) -> (u64, impl Stream<Item = std::io::Result<Bytes>> + use<>) {
    (bytes.len() as u64, split(bytes.into()))
}

fn split(mut bytes: Bytes) -> impl Stream<Item = std::io::Result<Bytes>> + use<> {
    stream::iter(std::iter::from_fn(move || {
        let piece = bytes.split_to(bytes.len().min(PIECE_BYTES));
        (!piece.is_empty()).then_some(Ok(piece))
    }))
}

/// Reads the next piece of a response body.
async fn next_piece(response: &mut Response, stall: Duration) -> Result<Option<Bytes>, ClientError> {
    match timeout(stall, response.chunk()).await {
        Ok(piece) => piece.map_err(ClientError::Interrupted),
        Err(_) => Err(ClientError::Stalled { limit: stall }),
    }
}

/// Reads a whole response body.
pub(super) async fn read_body(mut response: Response, stall: Duration) -> Result<Vec<u8>, ClientError> {
    let mut body = Vec::new();
    while let Some(piece) = next_piece(&mut response, stall).await? {
        body.extend_from_slice(&piece);
    }
    Ok(body)
}

/// A file to download: its name for messages, the expected hash, and the target path.
#[derive(Debug, Clone, Copy)]
pub(super) struct Download<'a> {
    pub(super) name: &'a str,
    pub(super) sha256: &'a str,
    pub(super) to: &'a Path,
    /// Counter of the downloaded bytes, for progress reports.
    pub(super) received: Option<&'a AtomicU64>,
}

impl Download<'_> {
    /// Returns the number of bytes that an earlier download left at the target path.
    pub(super) async fn bytes_here(&self) -> u64 {
        tokio::fs::metadata(self.to).await.map_or(0, |metadata| metadata.len())
    }

    /// Removes the partly downloaded file at the target path.
    pub(super) async fn start_over(&self) {
        // If the file cannot be removed, the next download overwrites it or fails with an error.
        let _ = tokio::fs::remove_file(self.to).await;
    }

    /// Writes a response body to the target file, after the existing bytes if the server sent only the rest of the file, and
    /// compares the hash. Bytes that arrived before an interruption are kept.
    pub(super) async fn read(&self, mut response: Response, stall: Duration) -> Result<(), ClientError> {
        let disk = |source| ClientError::Disk { doing: "write to the scratch directory", source };
        let mut hash = Sha256::new();
        let continues = response.status() == StatusCode::PARTIAL_CONTENT;
        let options =
            tokio::fs::File::options().write(true).create(true).truncate(!continues).append(continues).to_owned();
        let mut file = BufWriter::with_capacity(WRITE_BYTES, options.open(self.to).await.map_err(disk)?);
        if continues {
            let mut here = ReaderStream::with_capacity(tokio::fs::File::open(self.to).await.map_err(disk)?, READ_BYTES);
            while let Some(piece) = here.next().await {
                hash.update(&piece.map_err(disk)?);
            }
        }
        let read = async {
            while let Some(piece) = next_piece(&mut response, stall).await? {
                hash.update(&piece);
                file.write_all(&piece).await.map_err(disk)?;
                if let Some(received) = self.received {
                    received.fetch_add(piece.len() as u64, Ordering::Relaxed);
                }
            }
            Ok(())
        };
        let read = read.await;
        file.flush().await.map_err(disk)?;
        read?;
        if Sha256Digest::from(hash).to_string() == self.sha256 {
            return Ok(());
        }
        self.start_over().await;
        Err(ClientError::Damaged { name: self.name.to_owned() })
    }
}

#[cfg(test)]
mod tests;
