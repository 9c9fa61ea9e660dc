//! Sends files to clients: conditional requests, ranges, digests (RFC 9110, RFC 9530), and tar archives built while they are sent.

use std::path::PathBuf;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncSeekExt, SeekFrom};
use tokio_util::io::ReaderStream;
use utoipa::IntoParams;

use super::error::{Code, Problem};
use crate::digest::Sha256Digest;

const PIECE_BYTES: usize = 64 * 1024;
const TAR_BLOCK: u64 = 512;
/// Maximum size of a tar that is read to compute its digest before it is sent, in bytes: some 50 ms on a CPU with SHA instructions.
const MAX_DIGESTED_BYTES: u64 = 64 << 20;

/// Request headers with which a client selects bytes of a file and names the version that it has cached.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "only describes the headers in the OpenAPI document")]
pub struct RangeHeaders {
    /// The byte range to return: `bytes=0-99`, `bytes=100-` or `bytes=-100`. Only one range is supported.
    #[param(rename = "Range")]
    range: Option<String>,
    /// An ETag. `Range` is applied only if the file still has this ETag.
    #[param(rename = "If-Range")]
    if_range: Option<String>,
    /// ETags that the client has cached. If the file has one of them, the answer is 304.
    #[param(rename = "If-None-Match")]
    if_none_match: Option<String>,
}

/// A file to send.
#[derive(Debug, Clone)]
pub struct Download {
    /// Path on the server. Never shown to clients.
    pub path: PathBuf,
    /// File name that the client sees.
    pub name: String,
    /// Size of the file in bytes.
    pub size_bytes: u64,
    /// SHA-256 of the bytes, used as the ETag.
    pub sha256: Sha256Digest,
}

/// Answers GET and HEAD of a file: 200, 206, 304, 412 or 416.
///
/// # Errors
/// Answers 412 or 416 for the request's conditions and range, 500 when the file cannot be opened.
pub async fn send_file(method: &Method, headers: &HeaderMap, file: &Download) -> Result<Response, Problem> {
    let etag = format!("\"{}\"", file.sha256);
    if let Some(response) = answered_by_condition(headers, &etag)? {
        return Ok(response);
    }
    let span = Span::from_headers(method, headers, &etag, file.size_bytes)?;
    let body = Body::from_stream(part_of(file, span.first, span.length).await?);
    let mut response = span.response(content_type(&file.name), &file.name, etag, body);
    if let Ok(digest) = digest_field(file.sha256).parse() {
        response.headers_mut().insert("repr-digest", digest);
    }
    Ok(response)
}

/// Sends files as one tar, built while it is sent: the same files give the same bytes. Answers as [`send_file`]. Only archives up
/// to 64 MiB have a digest, because it requires reading all files first.
///
/// # Errors
/// Answers 412 or 416 for the request's conditions and range, 500 when a file cannot be opened.
pub(crate) async fn send_tar(
    method: &Method,
    headers: &HeaderMap,
    archive_name: &str,
    files: &[Download],
) -> Result<Response, Problem> {
    let mut identity = Sha256::new();
    for file in files {
        identity.update(format!("{}\0{}\n", file.name, file.sha256));
    }
    let etag = format!("\"tar-{}\"", Sha256Digest::from(identity));
    if let Some(response) = answered_by_condition(headers, &etag)? {
        return Ok(response);
    }

    let mut pieces = Vec::with_capacity(3 * files.len() + 1);
    for file in files {
        let padding = file.size_bytes.next_multiple_of(TAR_BLOCK) - file.size_bytes;
        pieces.extend([Piece::Buffered(tar_header(file)?), Piece::Stored(file), Piece::zeros(padding)]);
    }
    pieces.push(Piece::zeros(2 * TAR_BLOCK));
    let size = pieces.iter().map(Piece::length).sum();
    let span = Span::from_headers(method, headers, &etag, size)?;
    let mut digest = None;
    if size <= MAX_DIGESTED_BYTES {
        let mut hasher = Sha256::new();
        let mut whole = stretch_of(&pieces, 0, size).await?;
        while let Some(piece) = whole.next().await {
            hasher.update(piece.map_err(Problem::internal)?);
        }
        digest = Some(digest_field(hasher.into()));
    }
    let body = Body::from_stream(stretch_of(&pieces, span.first, span.length).await?);
    let mut response = span.response("application/x-tar", archive_name, etag, body);
    if let Some(Ok(digest)) = digest.map(|text| text.parse()) {
        response.headers_mut().insert("repr-digest", digest);
    }
    Ok(response)
}

/// Opens all files before the first byte is sent: a missing file causes an error, not half an archive.
async fn stretch_of(pieces: &[Piece<'_>], first: u64, length: u64) -> Result<Pieces, Problem> {
    let mut parts: Vec<Pieces> = Vec::with_capacity(pieces.len());
    let mut begin = 0;
    for piece in pieces {
        let end = begin + piece.length();
        let within = |at: u64| at.clamp(begin, end) - begin;
        let (first, last) = (within(first), within(first + length));
        begin = end;
        match piece {
            _ if first == last => {}
            // The padding of a tar is at most two blocks, so these integer conversions cannot overflow.
            Piece::Buffered(bytes) => {
                let bytes = bytes.slice(first as usize..last as usize);
                parts.push(stream::once(async { Ok(bytes) }).boxed());
            }
            Piece::Stored(file) => parts.push(part_of(file, first, last - first).await?),
        }
    }
    Ok(stream::iter(parts).flatten().boxed())
}

/// One piece of a tar.
enum Piece<'f> {
    /// A tar header or padding.
    Buffered(Bytes),
    /// The contents of a file in the tar.
    Stored(&'f Download),
}

impl Piece<'_> {
    fn zeros(length: u64) -> Self {
        Self::Buffered(Bytes::from(vec![0; length as usize])) // At most two blocks.
    }

    fn length(&self) -> u64 {
        match self {
            Piece::Buffered(bytes) => bytes.len() as u64,
            Piece::Stored(file) => file.size_bytes,
        }
    }
}

/// The range of bytes to send.
#[derive(Debug, Clone, Copy)]
struct Span {
    status: StatusCode,
    first: u64,
    length: u64,
    /// Size of the whole file, in bytes.
    size: u64,
}

impl Span {
    /// Reads the request headers `Range` and `If-Range`. Answers 416 when the range is outside the file.
    fn from_headers(method: &Method, headers: &HeaderMap, etag: &str, size: u64) -> Result<Self, Problem> {
        let range = match text(headers, header::RANGE) {
            Some(range) if *method == Method::GET && range_applies(headers, etag) => parse_range(range, size),
            Some(_) | None => Range::Whole,
        };
        match range {
            Range::Whole => Ok(Self { status: StatusCode::OK, first: 0, length: size, size }),
            Range::Part { first, last } => {
                Ok(Self { status: StatusCode::PARTIAL_CONTENT, first, length: last - first + 1, size })
            }
            Range::Unsatisfiable => {
                let detail = format!("the file has {size} bytes; request a range of bytes within it");
                Err(Problem::new(Code::RangeNotSatisfiable, detail)
                    .header(header::CONTENT_RANGE, format!("bytes */{size}"))
                    .header(header::ACCEPT_RANGES, "bytes"))
            }
        }
    }

    fn response(self, content_type: &str, name: &str, etag: String, body: Body) -> Response {
        let Self { status, first, length, size } = self;
        let headers = [
            (header::CONTENT_TYPE, content_type.to_owned()),
            (header::CONTENT_LENGTH, length.to_string()),
            (header::ETAG, etag),
            (header::ACCEPT_RANGES, "bytes".to_owned()),
            (header::CACHE_CONTROL, "private, no-cache".to_owned()),
            (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{name}\"")),
        ];
        let mut response = (status, headers, body).into_response();
        if status == StatusCode::PARTIAL_CONTENT
            && let Ok(value) = format!("bytes {first}-{}/{size}", first + length - 1).parse()
        {
            response.headers_mut().insert(header::CONTENT_RANGE, value);
        }
        response
    }
}

type Pieces = BoxStream<'static, std::io::Result<Bytes>>;

async fn part_of(file: &Download, first: u64, length: u64) -> Result<Pieces, Problem> {
    let mut opened = open(file).await?;
    opened.seek(SeekFrom::Start(first)).await.map_err(Problem::internal)?;
    Ok(exactly(opened, length).boxed())
}

async fn open(file: &Download) -> Result<tokio::fs::File, Problem> {
    match tokio::fs::File::open(&file.path).await {
        Ok(opened) => Ok(opened),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(Problem::new(Code::Gone, format!("the file {} was removed in the meantime", file.name)).because(error))
        }
        Err(error) => Err(Problem::internal(error)),
    }
}

/// Reads the next `length` bytes of a file. An error closes the connection, so that a client never mistakes a truncated file
/// for a complete one.
fn exactly(file: tokio::fs::File, length: u64) -> impl Stream<Item = std::io::Result<Bytes>> {
    let mut seen = 0;
    let pieces = ReaderStream::with_capacity(file.take(length), PIECE_BYTES).map(Some);
    pieces.chain(stream::once(async { None })).filter_map(move |piece| {
        let item = match piece {
            Some(Ok(piece)) => {
                seen += piece.len() as u64;
                Some(Ok(piece))
            }
            Some(Err(error)) => Some(Err(error)),
            None if seen < length => Some(Err(std::io::ErrorKind::UnexpectedEof.into())),
            None => None,
        };
        std::future::ready(item)
    })
}

fn tar_header(file: &Download) -> Result<Bytes, Problem> {
    let mut header = tar::Header::new_gnu();
    header.set_path(&file.name).map_err(Problem::internal)?;
    header.set_size(file.size_bytes);
    header.set_mode(0o644);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_cksum();
    Ok(Bytes::copy_from_slice(header.as_bytes()))
}

/// Answers 304 by If-None-Match or 412 by If-Match, in the order of RFC 9110, 13.2.2.
fn answered_by_condition(headers: &HeaderMap, etag: &str) -> Result<Option<Response>, Problem> {
    if let Some(wanted) = text(headers, header::IF_MATCH)
        && !lists_tag(wanted, etag, false)
    {
        return Err(Problem::new(Code::PreconditionFailed, format!("the file's ETag is {etag}")));
    }
    if let Some(known) = text(headers, header::IF_NONE_MATCH)
        && lists_tag(known, etag, true)
    {
        let headers = [(header::ETAG, etag), (header::CACHE_CONTROL, "private, no-cache")];
        return Ok(Some((StatusCode::NOT_MODIFIED, headers).into_response()));
    }
    Ok(None)
}

/// Whether a request header's list of entity tags contains this tag. The server's tags contain no comma, so the list
/// is split at commas.
fn lists_tag(list: &str, etag: &str, weak: bool) -> bool {
    list.split(',')
        .map(str::trim)
        .any(|tag| tag == "*" || tag == etag || (weak && tag.strip_prefix("W/").is_some_and(|tag| tag == etag)))
}

/// Whether a range applies: only if the client's copy has the same version.
fn range_applies(headers: &HeaderMap, etag: &str) -> bool {
    text(headers, header::IF_RANGE).is_none_or(|known| known.trim() == etag)
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

#[derive(Debug, PartialEq, Eq)]
enum Range {
    Whole,
    Part { first: u64, last: u64 },
    Unsatisfiable,
}

/// Parses a `Range` header with one range of bytes. Several ranges, other units and invalid syntax are ignored,
/// as RFC 9110 permits.
fn parse_range(text: &str, size: u64) -> Range {
    let Some((unit, range)) = text.split_once('=') else { return Range::Whole };
    let Some((first, last)) = range.trim().split_once('-') else { return Range::Whole };
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if !unit.trim().eq_ignore_ascii_case("bytes") || !digits(first) || !digits(last) {
        return Range::Whole;
    }
    // A byte position that overflows u64 is beyond the end of every file.
    let number = |text: &str| text.parse::<u64>().unwrap_or(u64::MAX);
    match (first.is_empty(), last.is_empty()) {
        (true, true) => Range::Whole,
        (true, false) if number(last) == 0 || size == 0 => Range::Unsatisfiable,
        (true, false) => Range::Part { first: size.saturating_sub(number(last)), last: size - 1 },
        (false, _) if number(first) >= size => Range::Unsatisfiable,
        (false, true) => Range::Part { first: number(first), last: size - 1 },
        (false, false) if number(last) < number(first) => Range::Whole,
        (false, false) => Range::Part { first: number(first), last: number(last).min(size - 1) },
    }
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit_once('.') {
        Some((_, "json")) => "application/json",
        Some((_, "jsonl" | "ndjson")) => "application/x-ndjson",
        _ => "application/octet-stream",
    }
}

/// Formats a digest as `sha-256=:BASE64:`.
fn digest_field(sha256: Sha256Digest) -> String {
    format!("sha-256=:{}:", base64::engine::general_purpose::STANDARD.encode(sha256.bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_rfc_9110_says() {
        for (given, expected) in [
            ("bytes=0-0", Range::Part { first: 0, last: 0 }),
            ("bytes=2-", Range::Part { first: 2, last: 9 }),
            ("bytes=2-100", Range::Part { first: 2, last: 9 }),
            ("bytes=-3", Range::Part { first: 7, last: 9 }),
            ("bytes=-100", Range::Part { first: 0, last: 9 }),
            ("bytes=9-9", Range::Part { first: 9, last: 9 }),
            ("bytes=10-", Range::Unsatisfiable),
            ("bytes=-0", Range::Unsatisfiable),
            ("bytes=99999999999999999999999-", Range::Unsatisfiable),
            ("bytes=5-2", Range::Whole),
            ("bytes=-", Range::Whole),
            ("bytes=1-2,4-5", Range::Whole),
            ("bytes=+1-2", Range::Whole),
            ("items=1-2", Range::Whole),
            ("bytes", Range::Whole),
        ] {
            assert_eq!(parse_range(given, 10), expected, "{given}");
        }
        assert_eq!(parse_range("bytes=0-", 0), Range::Unsatisfiable);
        assert_eq!(parse_range("bytes=-1", 0), Range::Unsatisfiable);
    }
}
