//! Extractors that fail with a [`Problem`]: `Json`, `Query`, `Path`, and bounded reading of bodies.

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
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;
use tower_http::timeout::TimeoutError;

use super::JSON_LIMIT_BYTES;
use super::error::{Code, Item, Problem, chain, shortened};
use super::submit::hex;
use crate::json::Exact;
use crate::spec::format::Format;

/// A JSON body, in and out. In: 415 without a JSON content type, 413 over the route's limit, 400 for broken JSON (with line
/// and column), 422 with a pointer for JSON of another shape.
#[derive(Debug, Clone)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = Problem;
    async fn from_request(request: Request, _state: &S) -> Result<Self, Problem> {
        let body = read_json(request).await?;
        Ok(Json(parse_object(&body)?))
    }
}

/// As [`Json`], with the SHA-256 of the body's bytes, for [`super::idempotency::once`].
#[derive(Debug, Clone)]
pub struct HashedJson<T>(pub T, pub String);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for HashedJson<T> {
    type Rejection = Problem;
    async fn from_request(request: Request, _state: &S) -> Result<Self, Problem> {
        let body = read_json(request).await?;
        Ok(HashedJson(parse_object(&body)?, hex(&Sha256::digest(&body))))
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

/// Query parameters; 400 with the parameter's name.
#[derive(Debug, Clone)]
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match axum::extract::Query::<T>::from_request_parts(parts, state).await {
            Ok(query) => Ok(Query(query.0)),
            Err(rejection) => {
                let text = rejection.body_text();
                let text = text.rsplit_once("query string: ").map_or(text.as_str(), |(_, reason)| reason);
                let (name, reason) = text.split_once(": ").unwrap_or(("", text));
                let reason = if name.is_empty() { text } else { reason };
                let reason = in_words(reason, given(parts.uri.query(), name).as_deref());
                let detail = if name.is_empty() { reason.clone() } else { format!("{name}: {reason}") };
                Err(Problem::new(Code::InvalidQuery, shortened(&detail)).item(
                    format!("?{name}"),
                    "invalid",
                    shortened(&reason),
                ))
            }
        }
    }
}

/// A count in a query, as large as the document's int64; for `deserialize_with`.
pub(super) fn count<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let given = Option::<i64>::deserialize(deserializer)?;
    given.map(|number| u64::try_from(number).map_err(|_| D::Error::custom("must not be negative"))).transpose()
}

/// The value a query gives to a parameter.
fn given(query: Option<&str>, name: &str) -> Option<String> {
    pairs_of(query?).into_iter().find(|(key, _)| key == name).map(|(_, value)| value)
}

fn pairs_of(query: &str) -> Vec<(String, String)> {
    let uri = format!("/?{query}").parse::<axum::http::Uri>();
    let pairs = uri.ok().and_then(|uri| axum::extract::Query::<Vec<(String, String)>>::try_from_uri(&uri).ok());
    pairs.map(|pairs| pairs.0).unwrap_or_default()
}

/// What a parser of the standard library says of a value, as a rule and the value.
fn in_words(reason: &str, given: Option<&str>) -> String {
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

/// Path parameters; an id of another form is an id that does not exist: 404.
#[derive(Debug, Clone)]
pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Problem;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match axum::extract::Path::<T>::from_request_parts(parts, state).await {
            Ok(path) => Ok(Path(path.0)),
            Err(PathRejection::FailedToDeserializePathParams(error)) => Err(match error.into_kind() {
                ErrorKind::Message(message) | ErrorKind::DeserializeError { message, .. } => {
                    Problem::new(Code::NotFound, shortened(&message))
                }
                ErrorKind::ParseError { value, expected_type }
                | ErrorKind::ParseErrorAtIndex { value, expected_type, .. }
                | ErrorKind::ParseErrorAtKey { value, expected_type, .. } => Problem::new(
                    Code::NotFound,
                    format!("'{}' in the path is not a {expected_type}", shortened(&value)),
                ),
                ErrorKind::InvalidUtf8InPathParam { .. } => Problem::new(Code::NotFound, "the path is not UTF-8"),
                other => Problem::internal(other),
            }),
            Err(other) => Err(Problem::internal(other)),
        }
    }
}

/// 415 unless the content type is JSON (`application/json` or `application/…+json`).
pub fn expect_json(headers: &HeaderMap) -> Result<(), Problem> {
    let given = media_type(headers);
    if given == "application/json" || (given.starts_with("application/") && given.ends_with("+json")) {
        return Ok(());
    }
    let found = if given.is_empty() { "none was sent".to_owned() } else { format!("'{}' was sent", shortened(&given)) };
    Err(Problem::new(Code::UnsupportedMediaType, format!("send 'content-type: application/json' ({found})"))
        .header(header::ACCEPT, "application/json"))
}

/// The form of a document by its content type: JSON, YAML or TOML; 415 for any other.
pub fn expect_document(headers: &HeaderMap) -> Result<Format, Problem> {
    let given = media_type(headers);
    Format::of_media_type(&given).ok_or_else(|| {
        let found =
            if given.is_empty() { "none was sent".to_owned() } else { format!("'{}' was sent", shortened(&given)) };
        let detail = format!("send 'content-type: application/json', application/yaml or application/toml ({found})");
        Problem::new(Code::UnsupportedMediaType, detail)
            .header(header::ACCEPT, "application/json, application/yaml, application/toml")
    })
}

/// Parses a document; 400 with line and column where it is broken, 422 where JSON holds a key twice or an integer beyond 64 bits.
pub fn parse_document(bytes: &[u8], format: Format) -> Result<Value, Problem> {
    if format == Format::Json {
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        return parse_json::<Exact>(bytes)?.checked(bytes).map_err(|error| {
            let text = format!("{} (line {}, column {})", without_position(&error), error.line(), error.column());
            Problem::new(Code::InvalidBody, text.clone()).item("", "invalid", text)
        });
    }
    let broken = |pointer: String, detail: String| {
        Problem::new(Code::InvalidDocument, format!("broken {}: {detail}", format.as_str().to_uppercase()))
            .item(pointer, "syntax", detail)
    };
    let text = std::str::from_utf8(bytes).map_err(|error| broken(String::new(), format!("not UTF-8: {error}")))?;
    format.read(text).map_err(|error| broken(error.pointer, error.message))
}

/// The media type of the body in lower case without its parameters; empty when there is none.
pub fn media_type(headers: &HeaderMap) -> String {
    let text = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    text.split(';').next().unwrap_or("").trim().to_ascii_lowercase()
}

/// What all requests together may hold of bodies that are still arriving, in KiB: many large bodies at once must not exhaust the memory.
static BODY_BUDGET_KIB: Semaphore = Semaphore::const_new(96 * 1024);
/// For a whole JSON body to arrive.
const BODY_DEADLINE: Duration = Duration::from_secs(120);

/// The whole (decompressed) body, or 413 over the route's limit: the limit of the innermost `DefaultBodyLimit` layer. 408 when it
/// takes too long to arrive, 503 when too many bodies arrive at once.
pub async fn read_body(request: Request) -> Result<Bytes, Problem> {
    match tokio::time::timeout(BODY_DEADLINE, collect(request)).await {
        Ok(result) => result,
        Err(_) => Err(too_slow()),
    }
}

async fn collect(request: Request) -> Result<Bytes, Problem> {
    let announced = announced_bytes(request.headers());
    let body = request.into_limited_body();
    // Before the first byte is asked for: a client that waits for `100 Continue` sends nothing in vain.
    if announced.zip(body.size_hint().upper()).is_some_and(|(announced, most)| announced > most) {
        return Err(too_large());
    }
    let mut pieces = body.into_data_stream();
    let mut held = Vec::new();
    let mut bytes = Vec::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| body_problem(&error))?;
        let kib = u32::try_from(piece.len().div_ceil(1024)).unwrap_or(u32::MAX);
        let permit = BODY_BUDGET_KIB.try_acquire_many(kib).map_err(|_| {
            Problem::new(Code::Overloaded, "too many large bodies are arriving at once; try again").retry_after(2)
        })?;
        held.push(permit);
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes.into())
}

/// How long the body will be, if the client says so.
pub(super) fn announced_bytes(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// The limit of every route that holds its body in memory; routes that stream name their own.
pub fn too_large() -> Problem {
    let detail = format!("the body may have {JSON_LIMIT_BYTES} bytes (after decompression), not more");
    Problem::new(Code::BodyTooLarge, detail)
}

fn too_slow() -> Problem {
    Problem::new(Code::RequestTimeout, "the body took too long to arrive")
}

/// What a failing body means: too large, too slow, broken compression, or the client went away.
pub fn body_problem(error: &(dyn std::error::Error + 'static)) -> Problem {
    body_fault(error).unwrap_or_else(|| {
        Problem::new(Code::BodyInterrupted, "the body could not be read to its end").because(chain(error))
    })
}

/// As [`body_problem`]; `None` when the error says nothing of the kind.
pub fn body_fault(error: &(dyn std::error::Error + 'static)) -> Option<Problem> {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<http_body_util::LengthLimitError>() {
            return Some(too_large());
        }
        if error.is::<TimeoutError>() {
            return Some(too_slow());
        }
        if let Some(io) = error.downcast_ref::<std::io::Error>()
            && matches!(io.kind(), std::io::ErrorKind::InvalidData | std::io::ErrorKind::InvalidInput)
        {
            let detail = "the body does not decompress as its content-encoding says";
            return Some(Problem::new(Code::InvalidEncoding, detail).because(error));
        }
        // The decoder's own, without a message; one of a connection that broke has a message.
        if let Some(io) = error.downcast_ref::<std::io::Error>()
            && io.kind() == std::io::ErrorKind::UnexpectedEof
            && io.get_ref().is_none()
        {
            let detail = "the compressed body ends too early: the file is cut off; compress it again";
            return Some(Problem::new(Code::InvalidEncoding, detail).because(error));
        }
        next = error.source();
    }
    None
}

/// As [`parse_json`], of a body that must be an object. serde would take a list for a struct's fields in order.
fn parse_object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let kind = match bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes).trim_ascii_start().first() {
        None | Some(b'{' | 0x1f) => return parse_json(bytes),
        Some(b'[') => "a list",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        Some(_) => "a number",
    };
    // What is no JSON at all is told so first.
    parse_json::<serde::de::IgnoredAny>(bytes)?;
    let detail = format!("the body must be a JSON object, not {kind}");
    Err(Problem::new(Code::InvalidBody, detail.clone()).item("", "invalid", detail))
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Parses JSON: 400 for broken JSON (with line and column), 422 with a pointer for JSON of another shape. No value of the body is
/// repeated: it may be a secret in the wrong place.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(Problem::new(Code::InvalidJson, "the body is empty: JSON is needed"));
    }
    if bytes.starts_with(b"\x1f\x8b") {
        let detail = "the body is compressed with gzip, but no 'content-encoding: gzip' says so";
        return Err(Problem::new(Code::InvalidJson, detail));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let pointer = pointer_of(error.path());
        let error = error.into_inner();
        if !error.is_data() {
            return broken(&error);
        }
        let text = without_position(&error);
        if let Some(name) = missing_name(&text) {
            return required(missing_fields::<T>(bytes, format!("{pointer}/{name}")));
        }
        let at = format!("line {}, column {}", error.line(), error.column());
        let text = shortened(&in_our_words(&text));
        Problem::new(Code::InvalidBody, format!("{text} at '{pointer}' ({at})")).item(pointer, "invalid", text)
    })?;
    deserializer.end().map_err(|error| broken(&error))?;
    Ok(value)
}

fn broken(error: &serde_json::Error) -> Problem {
    let at = format!("line {}, column {}", error.line(), error.column());
    let text = shortened(&without_position(error));
    Problem::new(Code::InvalidJson, format!("broken JSON at {at}: {text}")).items(vec![Item {
        pointer: String::new(),
        code: "syntax".to_owned(),
        detail: format!("{at}: {text}"),
    }])
}

fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.as_str(), |(text, _)| text).to_owned()
}

/// What serde says of a value of another kind, without the value and without names of this program's types.
fn in_our_words(text: &str) -> String {
    if text.starts_with("data did not match any variant of untagged enum") {
        return "has none of the forms that are known here".to_owned();
    }
    let Some((said, expected)) = text.rsplit_once(", expected ") else { return text.to_owned() };
    if said.starts_with("unknown variant ") {
        return format!("not one of the words that are known here: must be {expected}");
    }
    let expected = match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number that is not negative",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a sequence" => "a list",
        "a map" => "an object",
        "unit" => "null",
        "variant identifier" | "string or map" => "one of the words that are known here",
        other if other.starts_with("struct ") || other.contains(" enum ") => "an object",
        other if other.starts_with("enum ") => "one of the words that are known here",
        other => other,
    };
    if said.starts_with("invalid value: ") {
        return format!("must be {expected}");
    }
    let Some(found) = said.strip_prefix("invalid type: ") else { return text.to_owned() };
    // The value follows the kind: `string "…"`, `integer `7``.
    let kinds = [
        ("null", "null"),
        ("unit", "null"),
        ("boolean", "a boolean"),
        ("integer", "a whole number"),
        ("floating point", "a number with a fraction"),
        ("number", "a number"),
        ("string", "a string"),
        ("character", "a string"),
        ("sequence", "a list"),
        ("map", "an object"),
    ];
    let found = kinds.iter().find(|(kind, _)| found.starts_with(kind)).map_or("something else", |(_, words)| *words);
    format!("must be {expected}, not {found}")
}

fn missing_name(text: &str) -> Option<&str> {
    text.strip_prefix("missing field `")?.strip_suffix('`')
}

/// Bodies up to here are looked through for every field that is missing, longer ones for the first, in bytes.
const LOOKED_THROUGH_BYTES: usize = 64 * 1024;

/// Pointers of the required fields that are not there, in order. serde stops at the first one: it gets a value that fits, and is
/// asked again.
fn missing_fields<T: DeserializeOwned>(bytes: &[u8], first: String) -> Vec<String> {
    let mut found = Vec::new();
    let whole = bytes.len() <= LOOKED_THROUGH_BYTES;
    let mut value: Value = whole.then(|| serde_json::from_slice(bytes).ok()).flatten().unwrap_or_default();
    let mut next = Some(first);
    while let Some(pointer) = next.filter(|pointer| !found.contains(pointer)) {
        next = next_missing::<T>(&mut value, &pointer);
        found.push(pointer);
    }
    found
}

/// Puts a value that fits at `pointer`; the pointer of the next field that is missing then.
fn next_missing<T: DeserializeOwned>(value: &mut Value, pointer: &str) -> Option<String> {
    let (parent, name) = pointer.rsplit_once('/')?;
    for stand_in in [json!(""), json!(0), json!([]), json!({}), json!(false)] {
        value.pointer_mut(parent)?.as_object_mut()?.insert(name.to_owned(), stand_in);
        let error = serde_path_to_error::deserialize::<_, T>(&*value).err()?;
        let at = pointer_of(error.path());
        let inside = at.strip_prefix(pointer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if !inside {
            return missing_name(&error.inner().to_string()).map(|name| format!("{at}/{name}"));
        }
    }
    None
}

fn required(pointers: Vec<String>) -> Problem {
    let detail = format!("{} must be given", pointers.join(", "));
    let item = |pointer| Item { pointer, code: "required".to_owned(), detail: "must be given".to_owned() };
    Problem::new(Code::InvalidBody, detail).items(pointers.into_iter().map(item).collect())
}

fn pointer_of(path: &serde_path_to_error::Path) -> String {
    use serde_path_to_error::Segment;
    let mut pointer = String::new();
    for segment in path {
        match segment {
            Segment::Seq { index } => pointer.push_str(&format!("/{index}")),
            Segment::Map { key } => pointer.push_str(&format!("/{}", key.replace('~', "~0").replace('/', "~1"))),
            Segment::Enum { variant } => pointer.push_str(&format!("/{variant}")),
            Segment::Unknown => {}
        }
    }
    pointer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only parsed")]
    struct Body {
        list: Vec<u32>,
    }

    #[test]
    fn broken_json_says_where() {
        let problem = parse_json::<Body>(b"{\n \"list\": [1,,2]}").unwrap_err();
        assert_eq!(problem.code(), Code::InvalidJson);
        assert!(problem.detail().contains("line 2, column 13"), "{}", problem.detail());
        assert_eq!(parse_json::<Body>(b"{\"list\":[]} x").unwrap_err().code(), Code::InvalidJson);
        assert_eq!(parse_json::<Body>(b" ").unwrap_err().code(), Code::InvalidJson);
    }

    #[derive(Debug, serde::Deserialize)]
    #[expect(dead_code, reason = "only parsed")]
    struct Order {
        name: String,
        count: u32,
        kind: Kind,
        note: Option<String>,
        parts: Vec<Part>,
    }

    #[derive(Debug, serde::Deserialize)]
    #[expect(dead_code, reason = "only parsed")]
    struct Part {
        id: String,
        size: u32,
    }

    #[derive(Debug, serde::Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Kind {
        Small,
        Large,
    }

    #[test]
    fn every_missing_field_is_named_where_it_should_be() {
        let said = |body: &str| parse_json::<Order>(body.as_bytes()).unwrap_err().detail().to_owned();
        // No value stands in for a word of a list: what follows such a field is told when it is there.
        assert_eq!(said("{}"), "/name, /count, /kind must be given");
        assert_eq!(said("{\"kind\": \"small\", \"count\": 1}"), "/name, /parts must be given");
        let parts = "{\"name\": \"a\", \"count\": 1, \"kind\": \"large\", \"parts\": [{}, {\"id\": \"b\"}]}";
        assert_eq!(said(parts), "/parts/0/id, /parts/0/size, /parts/1/size must be given");
    }

    #[test]
    fn no_value_of_a_body_and_no_type_of_ours_is_repeated() {
        let secret = "rld_CANARY, expected struct X";
        for (body, words) in [
            (json!(secret), "the body must be a JSON object, not a string"),
            (json!([secret]), "the body must be a JSON object, not a list"),
            (json!(7), "the body must be a JSON object, not a number"),
            (json!({"name": 7}), "must be a string, not a whole number"),
            (json!({"name": "a", "count": secret}), "must be a whole number from 0 to 4294967295, not a string"),
            (json!({"name": "a", "count": -1}), "must be a whole number from 0 to 4294967295"),
            (json!({"name": "a", "count": 1, "kind": secret}), "must be `small` or `large`"),
            (json!({"name": "a", "count": 1, "kind": "small", "parts": secret}), "must be a list, not a string"),
            (json!({"name": "a", "count": 1, "kind": "small", "parts": [secret]}), "must be an object, not a string"),
        ] {
            let problem = parse_object::<Order>(body.to_string().as_bytes()).unwrap_err();
            assert_eq!(problem.code(), Code::InvalidBody);
            assert!(problem.detail().contains(words), "{body}: {}", problem.detail());
            let said = format!("{problem:?}");
            assert!(!said.contains("CANARY") && !said.contains("struct") && !said.contains("u32"), "{said}");
        }
        assert_eq!(parse_object::<Order>(b"nonsense").unwrap_err().code(), Code::InvalidJson);
        assert_eq!(parse_object::<Order>(b"\"open").unwrap_err().code(), Code::InvalidJson);
    }

    #[test]
    fn a_wrong_shape_says_which_field() {
        let problem = parse_json::<Body>(b"{\"list\": [1, \"x\"]}").unwrap_err();
        assert_eq!(problem.code(), Code::InvalidBody);
        assert!(problem.detail().contains("'/list/1'"), "{}", problem.detail());
        assert_eq!(parse_json::<Body>(b"{\"list\": [], \"lsit\": 1}").unwrap_err().code(), Code::InvalidBody);
    }
}
