//! Extractors that fail with a [`Problem`]: `Json`, `Query`, `Path`, and bounded reading of bodies.

mod json;

use std::time::Duration;

use axum::RequestExt;
use axum::body::{Bytes, HttpBody};
use axum::extract::path::ErrorKind;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde::de::DeserializeOwned;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use tokio::sync::{Semaphore, SemaphorePermit};
use tower_http::timeout::TimeoutError;

use super::auth::{Caller, WorkerPass};
use super::error::{Code, Problem, chain, shortened};
use super::throttle::Client;
use super::{JSON_LIMIT_BYTES, SESSION_LIMIT_BYTES};
use crate::digest::Sha256Digest;
use crate::listen::unfinished::Unfinished;
use crate::spec::format::Format;
use crate::strict_json::{Exact, error_text};
use json::parse_object;

pub use json::parse_json;

/// A JSON body, in requests and responses. In requests: 415 without a JSON content type, 413 over the route's limit, 400 for
/// invalid JSON (with line and column), 422 with a pointer for JSON of another shape.
#[derive(Debug, Clone)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Problem;
    async fn from_request(request: Request, _state: &S) -> Result<Self, Problem> {
        let body = read_json(request).await?;
        Ok(Json(parse_object(&body)?))
    }
}

/// Like [`Json`], with the SHA-256 of the body's bytes, for [`super::idempotency::once`].
#[derive(Debug, Clone)]
pub struct HashedJson<T>(pub T, pub String);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for HashedJson<T> {
    type Rejection = Problem;
    async fn from_request(request: Request, _state: &S) -> Result<Self, Problem> {
        let body = read_json(request).await?;
        Ok(HashedJson(parse_object(&body)?, Sha256Digest::of(&body).to_string()))
    }
}

/// A JSON object as [`Json`] reads it, or None: no body, an empty body or `null`.
#[derive(Debug, Clone)]
pub struct OptionalJson<T>(pub Option<T>);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for OptionalJson<T> {
    type Rejection = Problem;
    async fn from_request(request: Request, _state: &S) -> Result<Self, Problem> {
        let declared = expect_json(request.headers());
        let body = read_body(request).await?;
        if matches!(body.trim_ascii(), b"" | b"null") {
            return Ok(OptionalJson(None));
        }
        declared?;
        Ok(OptionalJson(Some(parse_object(&body)?)))
    }
}

async fn read_json(request: Request) -> Result<Bytes, Problem> {
    expect_json(request.headers())?;
    read_body(request).await
}

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        axum::Json(self.0).into_response()
    }
}

/// Query parameters. Answers 400 with the parameter's name.
#[derive(Debug, Clone)]
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match axum::extract::Query::<T>::from_request_parts(parts, state).await {
            Ok(query) => Ok(Query(query.0)),
            Err(rejection) => Err(query_problem(&rejection.body_text(), parts.uri.query())),
        }
    }
}

fn query_problem(text: &str, query: Option<&str>) -> Problem {
    let text = text.rsplit_once("query string: ").map_or(text, |(_, reason)| reason);
    let (name, reason) = text.split_once(": ").unwrap_or(("", text));
    let reason = if name.is_empty() { text } else { reason };
    let reason = describe_parse_error(reason, given(query, name).as_deref());
    let detail = if name.is_empty() { reason.clone() } else { format!("{name}: {reason}") };
    Problem::new(Code::InvalidQuery, shortened(&detail)).item(format!("?{name}"), "invalid", shortened(&reason))
}

/// Deserializes a count from a query parameter, limited to the OpenAPI document's int64; for `deserialize_with`.
pub(super) fn count<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let given = Option::<i64>::deserialize(deserializer)?;
    given.map(|number| u64::try_from(number).map_err(|_| D::Error::custom("must not be negative"))).transpose()
}

/// Returns the decoded value of a query parameter.
fn given(query: Option<&str>, name: &str) -> Option<String> {
    pairs_of(query?).into_iter().find(|(key, _)| key == name).map(|(_, value)| value)
}

fn pairs_of(query: &str) -> Vec<(String, String)> {
    let uri = format!("/?{query}").parse::<axum::http::Uri>();
    let pairs = uri.ok().and_then(|uri| axum::extract::Query::<Vec<(String, String)>>::try_from_uri(&uri).ok());
    pairs.map(|pairs| pairs.0).unwrap_or_default()
}

/// Rewrites the parse error of a query parameter, such as "invalid digit found in string", as a rule and the value.
fn describe_parse_error(reason: &str, given: Option<&str>) -> String {
    let rule = match reason {
        "invalid digit found in string"
        | "cannot parse integer from empty string"
        | "number too large to fit in target type"
        | "number too small to fit in target type" => "must be a whole number",
        "invalid float literal" | "cannot parse float from empty string" => "must be a number",
        "provided string was not `true` or `false`" => "must be true or false",
        other => return other.to_owned(),
    };
    match given {
        Some(value) if reason.starts_with("number too large") => {
            format!("{rule}; '{}' is too large", shortened(value))
        }
        Some(value) => format!("{rule}, not '{}'", shortened(value)),
        None => rule.to_owned(),
    }
}

/// Path parameters. An id of another form cannot exist, so the answer is 404.
#[derive(Debug, Clone)]
pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Problem;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match axum::extract::Path::<T>::from_request_parts(parts, state).await {
            Ok(path) => Ok(Path(path.0)),
            Err(rejection) => Err(path_problem(rejection)),
        }
    }
}

fn path_problem(rejection: PathRejection) -> Problem {
    let PathRejection::FailedToDeserializePathParams(error) = rejection else { return Problem::internal(rejection) };
    match error.into_kind() {
        ErrorKind::Message(message) | ErrorKind::DeserializeError { message, .. } => {
            Problem::new(Code::NotFound, shortened(&message))
        }
        ErrorKind::ParseError { value, expected_type }
        | ErrorKind::ParseErrorAtIndex { value, expected_type, .. }
        | ErrorKind::ParseErrorAtKey { value, expected_type, .. } => {
            Problem::new(Code::NotFound, format!("'{}' in the path is not a {expected_type}", shortened(&value)))
        }
        ErrorKind::InvalidUtf8InPathParam { .. } => {
            Problem::new(Code::NotFound, "the path of the request is not valid UTF-8")
        }
        other => Problem::internal(other),
    }
}

/// Answers 415 unless the content type is JSON (`application/json` or `application/…+json`).
pub fn expect_json(headers: &HeaderMap) -> Result<(), Problem> {
    let given = media_type(headers);
    if given == "application/json" || (given.starts_with("application/") && given.ends_with("+json")) {
        return Ok(());
    }
    let found = if given.is_empty() {
        "no content type was sent".to_owned()
    } else {
        format!("'{}' was sent", shortened(&given))
    };
    Err(Problem::new(Code::UnsupportedMediaType, format!("send 'content-type: application/json' ({found})"))
        .header(header::ACCEPT, "application/json"))
}

/// The format of a document by its content type: JSON, YAML or TOML. Answers 415 for any other.
pub fn expect_document(headers: &HeaderMap) -> Result<Format, Problem> {
    let given = media_type(headers);
    Format::of_media_type(&given).ok_or_else(|| {
        let found = if given.is_empty() {
            "no content type was sent".to_owned()
        } else {
            format!("'{}' was sent", shortened(&given))
        };
        let detail = format!("send 'content-type: application/json', application/yaml or application/toml ({found})");
        Problem::new(Code::UnsupportedMediaType, detail)
            .header(header::ACCEPT, "application/json, application/yaml, application/toml")
    })
}

/// Parses a document. Answers 400 with line and column for a syntax error, 422 where JSON contains a duplicate key or an
/// integer beyond 64 bits.
pub fn parse_document(bytes: &[u8], format: Format) -> Result<Value, Problem> {
    if format == Format::Json {
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        return parse_json::<Exact>(bytes)?.checked(bytes).map_err(|error| {
            let text = format!("{} (line {}, column {})", error_text(&error), error.line(), error.column());
            Problem::new(Code::InvalidBody, text.clone()).item("", "invalid", text)
        });
    }
    let broken = |pointer: String, detail: String| {
        Problem::new(Code::InvalidDocument, format!("invalid {}: {detail}", format.as_str().to_uppercase()))
            .item(pointer, "syntax", detail)
    };
    let text = std::str::from_utf8(bytes).map_err(|error| broken(String::new(), format!("not UTF-8: {error}")))?;
    format.read(text).map_err(|error| broken(error.pointer, error.message))
}

/// Returns the media type of the body in lower case without its parameters; empty if there is none.
pub fn media_type(headers: &HeaderMap) -> String {
    let text = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    text.split(';').next().unwrap_or("").trim().to_ascii_lowercase()
}

const MIB: usize = 1 << 20;
/// Maximum number of sign-in requests whose bodies are still arriving, in total and per IP address. The limits are high enough
/// that a flood of requests does not displace a body whose bytes are arriving.
const MAX_SIGN_INS: usize = 1024;
const MAX_SIGN_INS_PER_ADDRESS: usize = 512;

/// Limits the memory that the arriving request bodies of one kind of sender use together. Unauthenticated clients, users and
/// workers each have their own allowance, so that none of them can block another kind.
struct Allowance {
    kib: Semaphore,
    /// Time limit for a whole request body to arrive.
    deadline: Duration,
}

/// Memory allowance for bodies of unauthenticated clients: sign-ins of a few hundred bytes each. It is twice the memory that
/// [`SIGN_INS`] can use, so that the number of sign-ins is the effective limit, and a new body is never refused.
static STRANGERS: Allowance = Allowance::new(2 * MAX_SIGN_INS * SESSION_LIMIT_BYTES / MIB, 5);
static SIGN_INS: Unfinished = Unfinished::new(MAX_SIGN_INS, MAX_SIGN_INS_PER_ADDRESS);
static USERS: Allowance = Allowance::new(96, 120);
static WORKERS: Allowance = Allowance::new(96, 120);

impl Allowance {
    const fn new(mib: usize, deadline_s: u64) -> Self {
        Self { kib: Semaphore::const_new(mib * 1024), deadline: Duration::from_secs(deadline_s) }
    }

    /// Selects the memory allowance of a body by its sender: a worker, a user with a credential, or an unauthenticated client.
    fn of(request: &Request) -> &'static Self {
        let known = request.extensions();
        if known.get::<WorkerPass>().is_some() {
            &WORKERS
        } else if known.get::<Caller>().is_some() {
            &USERS
        } else {
            &STRANGERS
        }
    }

    fn acquire(&self, kib: usize) -> Result<SemaphorePermit<'_>, Problem> {
        self.kib.try_acquire_many(u32::try_from(kib).unwrap_or(u32::MAX)).map_err(|_| {
            Problem::new(Code::Overloaded, "too many request bodies are arriving concurrently; try again")
                .retry_after(2)
        })
    }
}

/// Reads the whole (decompressed) body. Answers 413 over the route's limit (that of the innermost `DefaultBodyLimit` layer), 408
/// when the body takes too long to arrive, 503 when too many bodies arrive concurrently.
pub(crate) async fn read_body(request: Request) -> Result<Bytes, Problem> {
    let allowance = Allowance::of(&request);
    if !std::ptr::eq(allowance, &STRANGERS) {
        return read_within(allowance, request).await;
    }
    let place = SIGN_INS.enter(request.extensions().get::<Client>().and_then(|client| client.network()));
    tokio::select! {
        biased;
        body = read_within(allowance, request) => body,
        () = place.lost() => {
            let detail = "too many requests from your address are incomplete: send each body together with its headers";
            Err(Problem::new(Code::TooManyRequests, detail).retry_after(2))
        }
    }
}

/// Reads the body on a public route whose handler has checked a credential of its own, such as a callback token. Bodies of
/// unauthenticated clients do not affect it.
pub(crate) async fn read_admitted_body(request: Request) -> Result<Bytes, Problem> {
    read_within(&USERS, request).await
}

async fn read_within(allowance: &Allowance, request: Request) -> Result<Bytes, Problem> {
    match tokio::time::timeout(allowance.deadline, collect(allowance, request)).await {
        Ok(result) => result,
        Err(_) => Err(too_slow()),
    }
}

async fn collect(allowance: &Allowance, request: Request) -> Result<Bytes, Problem> {
    let announced = announced_bytes(request.headers());
    let body = request.into_limited_body();
    // The announced length is checked before the first byte is read, so that a client that waits for `100 Continue` does not
    // send a large body in vain.
    let most = body.size_hint().upper();
    if announced.zip(most).is_some_and(|(announced, most)| announced > most) {
        return Err(longer_than(most));
    }
    let mut pieces = body.into_data_stream();
    let mut held = allowance.acquire(0)?;
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        let piece =
            piece.map_err(|error| if is_too_long(&error) { longer_than(most) } else { body_problem(&error) })?;
        // The memory in KiB is rounded up for the whole body, not for each chunk, because a body may arrive byte by byte.
        let kib = (bytes.len() + piece.len()).div_ceil(1024);
        held.merge(allowance.acquire(kib.saturating_sub(held.num_permits()))?);
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes.into())
}

/// Returns the length of the body from `content-length`, if the client sent it.
pub(super) fn announced_bytes(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Returns the 413 response for a body that is read into memory. Routes that stream to disk have their own.
pub fn too_large() -> Problem {
    longer_than(None)
}

/// Returns the 413 response for a body above the route's limit, or above [`JSON_LIMIT_BYTES`].
fn longer_than(limit: Option<u64>) -> Problem {
    let limit = limit.unwrap_or(JSON_LIMIT_BYTES as u64);
    Problem::new(Code::BodyTooLarge, format!("the request's body must be at most {limit} bytes (after decompression)"))
}

fn is_too_long(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source())
        .any(|error| error.is::<http_body_util::LengthLimitError>())
}

fn too_slow() -> Problem {
    Problem::new(Code::RequestTimeout, "the request's body took too long to arrive")
}

/// Converts an error while reading a request body into a problem: too large, too slow, corrupt compression, invalid
/// framing, or a disconnected client.
pub fn body_problem(error: &(dyn std::error::Error + 'static)) -> Problem {
    body_fault(error).unwrap_or_else(|| {
        Problem::new(Code::BodyInterrupted, "the request's body could not be read to its end").because(chain(error))
    })
}

/// Like [`body_problem`], but returns `None` if the cause is none of those, such as a disconnected client.
pub fn body_fault(error: &(dyn std::error::Error + 'static)) -> Option<Problem> {
    let mut next = Some(error);
    // An error inside a `hyper::Error` means invalid HTTP framing; any other comes from decompression.
    let mut of_connection = false;
    while let Some(error) = next {
        of_connection |= error.is::<hyper::Error>();
        if error.is::<http_body_util::LengthLimitError>() {
            return Some(too_large());
        }
        if error.is::<TimeoutError>() {
            return Some(too_slow());
        }
        if let Some(io) = error.downcast_ref::<std::io::Error>()
            && matches!(io.kind(), std::io::ErrorKind::InvalidData | std::io::ErrorKind::InvalidInput)
        {
            if of_connection {
                let detail =
                    "the HTTP framing of the request's body is invalid: a chunk, or the data after it, is malformed";
                return Some(Problem::new(Code::InvalidRequest, detail).because(error));
            }
            let detail = "the request's body cannot be decompressed with its content-encoding";
            return Some(Problem::new(Code::InvalidEncoding, detail).because(error));
        }
        // An `UnexpectedEof` without a message comes from the decompressor; a broken connection gives one with a message.
        if let Some(io) = error.downcast_ref::<std::io::Error>()
            && io.kind() == std::io::ErrorKind::UnexpectedEof
            && io.get_ref().is_none()
        {
            let detail = "the compressed body of the request is truncated: compress the file again";
            return Some(Problem::new(Code::InvalidEncoding, detail).because(error));
        }
        next = error.source();
    }
    None
}
