//! Receives the rows of a request: a body, a form, or the name of a hub dataset.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use axum::RequestExt;
use axum::body::Bytes;
use axum::extract::multipart::{Field, Multipart, MultipartError};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, header};
use futures::{Stream, StreamExt, stream};
use serde::Deserialize;
use serde_json::Value;
use utoipa::IntoParams;

use super::AppState;
use super::auth::Caller;
use super::dataset_sources::{Files, PREVIEW_BYTES, fetch_start, uploaded, written};
use super::error::{Code, Problem, shortened};
use super::extract::{announced_bytes, body_fault, body_problem, media_type};
use super::rows::{UPLOAD_DEADLINE, WRITE_BYTES, check_disk, read_rows, too_large};
use super::staged_images::StagedImages;
use crate::dataset::{Format, Reader, Recipe, Summary};
use crate::files::StagedDone;
use crate::spec::HubDataset;

const MAX_NAME_CHARS: usize = 200;
/// Maximum size of a JSON request for a hub dataset, or of a mapping, in bytes.
const MAX_DOCUMENT_BYTES: usize = 256 * 1024;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct CreateQuery {
    /// A display name, at most 200 characters. A multipart field `name` has the same effect.
    #[param(min_length = 1, max_length = 200)]
    pub(super) name: Option<String>,
    /// Column, path or template of the prompt. These keys are the simple ones of a mapping; the field `mapping` supports all.
    #[param(example = "question")]
    pub(super) prompt: Option<String>,
    /// Text of the system message.
    pub(super) system: Option<String>,
    /// Whether a text prompt becomes a user message.
    pub(super) chat: Option<String>,
    /// Keep only rows for which this expression over the source's columns is true.
    pub(super) r#where: Option<String>,
    /// Keep only the first of the rows that are equal in these columns (comma-separated names).
    pub(super) unique: Option<String>,
    /// Keep only these columns (comma-separated names).
    pub(super) keep: Option<String>,
    /// Remove these columns (comma-separated names).
    pub(super) drop: Option<String>,
    /// Whether to remove assistant messages at the end of a prompt.
    pub(super) cut_answer: Option<String>,
    /// Maximum number of rows.
    pub(super) limit: Option<String>,
    /// Seed of a random sample of all rows, instead of the first ones.
    pub(super) seed: Option<String>,
}

impl CreateQuery {
    fn recipe(&self) -> Result<Recipe, Problem> {
        let Self { name: _, prompt, system, chat, r#where, unique, keep, drop, cut_answer, limit, seed } = self;
        let keys = [
            ("prompt", prompt),
            ("system", system),
            ("chat", chat),
            ("where", r#where),
            ("unique", unique),
            ("keep", keep),
            ("drop", drop),
            ("cut_answer", cut_answer),
            ("limit", limit),
            ("seed", seed),
        ];
        let given = keys.into_iter().filter_map(|(key, text)| Some((key, text.as_deref()?)));
        Recipe::from_query(given).and_then(|recipe| recipe.check().map(|()| recipe)).map_err(|error| {
            let at = error.at.trim_start_matches("map.").to_owned();
            Problem::new(Code::InvalidQuery, error.to_string()).item(format!("?{at}"), "invalid", error.to_string())
        })
    }
}

/// The purpose of received rows: to be stored, or previewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The rows become a dataset.
    Store,
    /// The rows are previewed: the beginning is enough, and they stay unconverted.
    Preview,
}

/// The name and the rows of a request.
pub(super) struct Sent {
    pub(super) name: Option<String>,
    pub(super) rows: SentRows,
}

pub(super) enum SentRows {
    /// Plain rows, checked and written to a staged file as they arrived.
    Ready(Summary, StagedDone),
    /// Files that must be converted first, because they are compressed, mapped or from the hub.
    Files(Box<Files>, Recipe),
    /// A hub dataset to store.
    Hub(Box<HubDataset>),
}

/// Receives the dataset rows of a request: a plain body, a form, or the name of a hub dataset.
pub(super) async fn receive(
    state: &AppState,
    caller: &Caller,
    query: CreateQuery,
    request: Request,
    purpose: Purpose,
) -> Result<Sent, Problem> {
    let headers = request.headers().clone();
    let recipe = query.recipe()?;
    let name = checked_name(query.name)?;
    let kind = media_type(&headers);
    if kind == "multipart/form-data" {
        check_room(state, &headers)?;
        let form = Multipart::from_request(request, &()).await;
        return read_form(state, form.map_err(|error| bad_form(error.body_text()))?, name, recipe, purpose).await;
    }
    let format = Format::of_media_type(&kind);
    match format {
        Some(_) if recipe.is_plain() => check_length(state, &headers, 0)?,
        Some(_) | None => check_room(state, &headers)?,
    }
    let mut body = request.into_limited_body().into_data_stream();
    let start = peek(&mut body, |error| body_problem(&error), kind == "application/json").await?;
    if let Some(wanted) = hub_document(&kind, &start) {
        let (hub_name, wanted) = wanted?;
        let rows = match purpose {
            Purpose::Store => SentRows::Hub(Box::new(wanted)),
            Purpose::Preview => SentRows::Files(Box::new(fetch_start(state, caller, &wanted).await?), wanted.recipe()),
        };
        return Ok(Sent { name: checked_name(hub_name)?.or(name), rows });
    }
    if format.is_none() && !is_packed(&start) && recipe.is_plain() {
        return Err(wrong_type(&kind));
    }
    let body = stream::iter([Ok(Bytes::from(start.clone()))]).chain(body);
    let upload = Upload { name: None, format, recipe, start, purpose };
    let rows = read_upload(state, upload, body, |error| body_problem(&error)).await?;
    Ok(Sent { name, rows })
}

/// An uploaded file that is arriving.
struct Upload {
    name: Option<String>,
    format: Option<Format>,
    recipe: Recipe,
    /// The first bytes of the upload, from which its format is detected; `stream` yields them too.
    start: Vec<u8>,
    purpose: Purpose,
}

/// Checks and stores plain rows as they arrive. Compressed or mapped uploads are first stored unchanged.
async fn read_upload<E>(
    state: &AppState,
    upload: Upload,
    pieces: impl Stream<Item = Result<Bytes, E>> + Unpin,
    failed: impl Fn(E) -> Problem,
) -> Result<SentRows, Problem> {
    let Upload { name, format, recipe, start, purpose } = upload;
    let is_streamed = purpose == Purpose::Store && recipe.is_plain() && !is_packed(&start);
    if let Some(format) = format.filter(|_| is_streamed) {
        let images = staged_images(state, purpose).await?;
        let reader = Reader::new(format).with_images(images.sink());
        let (summary, staged) = read_rows(state, reader, name.as_deref(), pieces, failed).await?;
        let (staged, _) = images.finish(state, staged).await?;
        return Ok(SentRows::Ready(summary, staged));
    }
    let staged = store_raw(state, pieces, failed, enough(purpose, &start)).await?;
    let images = staged_images(state, purpose).await?;
    Ok(SentRows::Files(Box::new(uploaded(name.as_deref(), format, staged, images)), recipe))
}

async fn staged_images(state: &AppState, purpose: Purpose) -> Result<StagedImages, Problem> {
    match purpose {
        Purpose::Store => StagedImages::in_directory(state).await,
        Purpose::Preview => Ok(StagedImages::checked_only(state)),
    }
}

/// Writes an upload to a file as it arrives, limited only by the disk.
async fn store_raw<E>(
    state: &AppState,
    mut pieces: impl Stream<Item = Result<Bytes, E>> + Unpin,
    failed: impl Fn(E) -> Problem,
    enough_bytes: u64,
) -> Result<StagedDone, Problem> {
    check_disk(state)?;
    let mut staged = state.files.stage(u64::MAX).await?;
    let deadline = Instant::now() + UPLOAD_DEADLINE;
    let (mut unchecked, mut received) = (0, 0);
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(&failed)?;
        if Instant::now() > deadline {
            return Err(Problem::new(Code::RequestTimeout, "the upload of the dataset took more than an hour"));
        }
        unchecked += piece.len();
        if unchecked >= WRITE_BYTES {
            check_disk(state)?;
            unchecked = 0;
        }
        // The rest of the file is received and discarded, because other fields of the form may follow.
        if received < enough_bytes {
            staged.write(&piece).await?;
        }
        received += piece.len() as u64;
    }
    Ok(staged.finish().await?)
}

/// Returns how many bytes of an upload are needed: for a preview the beginning, but the whole of a parquet file, whose
/// index is at the end.
fn enough(purpose: Purpose, start: &[u8]) -> u64 {
    match purpose {
        Purpose::Preview if !start.starts_with(b"PAR1") => PREVIEW_BYTES,
        Purpose::Preview | Purpose::Store => u64::MAX,
    }
}

/// Reads the first bytes of a body: a few, or the whole of a JSON document.
async fn peek<E>(
    pieces: &mut (impl Stream<Item = Result<Bytes, E>> + Unpin),
    failed: impl Fn(E) -> Problem,
    is_json: bool,
) -> Result<Vec<u8>, Problem> {
    let mut start = Vec::new();
    let enough = |start: &[u8]| match start.trim_ascii_start().first() {
        Some(b'{') if is_json => start.len() > MAX_DOCUMENT_BYTES,
        Some(_) => start.len() >= 4,
        None => start.len() > MAX_DOCUMENT_BYTES,
    };
    while !enough(&start) {
        match pieces.next().await {
            Some(piece) => start.extend_from_slice(&piece.map_err(&failed)?),
            None => break,
        }
    }
    Ok(start)
}

/// Whether the first bytes are those of parquet, gzip or zstd.
fn is_packed(start: &[u8]) -> bool {
    [&b"PAR1"[..], b"\x1f\x8b", b"\x28\xb5\x2f\xfd"].iter().any(|magic| start.starts_with(magic))
}

/// Keys of a request for a hub dataset.
const OF_HUB_DATASET: [&str; 8] = ["hub", "revision", "config", "split", "map", "limit", "seed", "name"];

/// Parses `{"hub": …}`: a request for a hub dataset instead of rows. Returns the hub dataset and the `name` to store it under.
fn hub_document(kind: &str, start: &[u8]) -> Option<Result<(Option<String>, HubDataset), Problem>> {
    let is_document = kind == "application/json" && start.trim_ascii_start().starts_with(b"{");
    let mut document: Value = is_document.then(|| serde_json::from_slice(start).ok()).flatten()?;
    let keys = document.as_object()?;
    // A JSON object without `hub` is a row, unless all of its keys belong to a request for a hub dataset: then `hub` is
    // reported as missing.
    let is_request = !keys.is_empty() && keys.keys().all(|key| OF_HUB_DATASET.contains(&key.as_str()));
    if !keys.contains_key("hub") && !is_request {
        return None;
    }
    let name = document.as_object_mut()?.shift_remove("name");
    let refuse = |detail: String| Problem::new(Code::InvalidBody, detail.clone()).item("", "invalid", detail);
    let name = match name {
        None | Some(Value::Null) => None,
        Some(Value::String(name)) => Some(name),
        Some(_) => return Some(Err(refuse("the dataset's 'name' must be a string".to_owned()))),
    };
    let wanted = serde_json::from_value::<HubDataset>(document).map_err(|error| refuse(error.to_string()));
    let checked = wanted.and_then(|wanted| match wanted.recipe().check() {
        Ok(()) => Ok((name, wanted)),
        Err(error) => {
            let at = format!("/{}", error.at.replace('.', "/"));
            Err(Problem::new(Code::InvalidBody, error.to_string()).item(at, "invalid", error.to_string()))
        }
    });
    Some(checked)
}

async fn read_form(
    state: &AppState,
    mut form: Multipart,
    mut name: Option<String>,
    of_query: Recipe,
    purpose: Purpose,
) -> Result<Sent, Problem> {
    let mut mapping: Option<Recipe> = None;
    let mut raw = None;
    let mut zip = None;
    while let Some(mut part) = form.next_field().await.map_err(broken_form)? {
        match part.name() {
            Some("name") => name = checked_name(Some(short_text(part).await?))?,
            Some("mapping") if mapping.is_none() => mapping = Some(read_mapping(part).await?),
            Some("file") if raw.is_none() => {
                let (file, format) = (part.file_name().map(str::to_owned), format_of_part(&part));
                let start = peek(&mut part, broken_form, false).await?;
                let pieces = stream::iter([Ok(Bytes::from(start.clone()))]).chain(part);
                // The form is read to its end, because the field `mapping` may come after the file.
                let staged = store_raw(state, pieces, broken_form, enough(purpose, &start)).await?;
                raw = Some((file, format, is_packed(&start), staged));
            }
            Some("images") if zip.is_none() => zip = Some(store_raw(state, part, broken_form, u64::MAX).await?),
            Some("images") => {
                return Err(bad_form("the form field 'images' occurs twice: put all images into one zip".to_owned()));
            }
            Some("file") => {
                return Err(bad_form("the form field 'file' occurs twice: upload one dataset per request".to_owned()));
            }
            Some("mapping") => return Err(bad_form("the form field 'mapping' occurs twice: send it once".to_owned())),
            other => {
                let other = shortened(other.unwrap_or(""));
                return Err(bad_form(format!(
                    "the form has the unknown field '{other}': send 'file', and optionally 'name', 'mapping' and 'images'"
                )));
            }
        }
    }
    let recipe = mapping.unwrap_or(of_query);
    let Some((file, format, is_packed, staged)) = raw else {
        return Err(bad_form("the form field 'file' is required: it contains the dataset's rows".to_owned()));
    };
    // A zip is unpacked on the thread that converts rows.
    let is_plain = recipe.is_plain() && purpose == Purpose::Store && !is_packed && zip.is_none();
    let mut images = staged_images(state, purpose).await?;
    if let Some(zip) = zip {
        images.open_zip(state, zip).await?;
    }
    let rows = match format {
        Err(problem) if is_plain => return Err(problem),
        Ok(format) if is_plain => {
            let copy = move |out: &mut dyn Write| std::io::copy(&mut File::open(staged.path())?, out).map(drop);
            let reader = Reader::new(format).with_images(images.sink());
            let (summary, staged) = written(state, reader, file.as_deref(), copy).await?;
            let (staged, _) = images.finish(state, staged).await?;
            SentRows::Ready(summary, staged)
        }
        format => SentRows::Files(Box::new(uploaded(file.as_deref(), format.ok(), staged, images)), recipe),
    };
    Ok(Sent { name, rows })
}

/// Reads the form field `mapping`.
async fn read_mapping(mut part: Field<'_>) -> Result<Recipe, Problem> {
    let mut bytes = Vec::new();
    while let Some(chunk) = part.chunk().await.map_err(broken_form)? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > MAX_DOCUMENT_BYTES {
            return Err(bad_form(format!("the form field 'mapping' must be at most {MAX_DOCUMENT_BYTES} bytes")));
        }
    }
    let refuse = |at: String, detail: String| {
        Problem::new(Code::InvalidBody, format!("mapping: {detail}")).item(at, "invalid", detail)
    };
    let recipe: Recipe =
        serde_json::from_slice(&bytes).map_err(|error| refuse("mapping".to_owned(), error.to_string()))?;
    recipe.check().map_err(|error| refuse(format!("mapping/{}", error.at.replace('.', "/")), error.to_string()))?;
    Ok(recipe)
}

pub(super) fn format_of_part(part: &Field<'_>) -> Result<Format, Problem> {
    let kind = part.content_type().unwrap_or("");
    let kind = kind.split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    let by_name = || part.file_name().and_then(Format::of_file_name);
    Format::of_media_type(&kind).or_else(by_name).ok_or_else(|| {
        let detail =
            "the form field 'file' needs a content type, or a file name that ends with .ndjson, .jsonl, .csv or .json";
        Problem::new(Code::UnsupportedMediaType, detail).header(header::ACCEPT, Format::ACCEPTED)
    })
}

pub(super) async fn short_text(mut part: Field<'_>) -> Result<String, Problem> {
    let mut bytes = Vec::new();
    while let Some(chunk) = part.chunk().await.map_err(broken_form)? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > 4 * MAX_NAME_CHARS {
            return Err(bad_name());
        }
    }
    String::from_utf8(bytes).map_err(|_| bad_name())
}

/// Answers 413 before the body is read if it is larger than the free disk space. An upload to which a mapping is applied may be
/// larger than the limit for datasets.
fn check_room(state: &AppState, headers: &HeaderMap) -> Result<(), Problem> {
    let room = state.files.free_bytes()?.saturating_sub(state.config.edge.disk_reserve_bytes);
    match announced_bytes(headers) {
        Some(length) if length > room => {
            let detail = format!("the upload has {length} bytes, but the server's disk has only {room} bytes free");
            Err(Problem::new(Code::BodyTooLarge, detail))
        }
        Some(_) | None => Ok(()),
    }
}

/// Answers 413 before the body is read if its announced length is too large. `more` = additional bytes allowed for other
/// fields of a form.
fn check_length(state: &AppState, headers: &HeaderMap, more: u64) -> Result<(), Problem> {
    match announced_bytes(headers) {
        Some(length) if length > state.dataset_limit_bytes.saturating_add(more) => {
            Err(too_large(state.dataset_limit_bytes))
        }
        Some(_) | None => Ok(()),
    }
}

fn wrong_type(kind: &str) -> Problem {
    let found = if kind.is_empty() {
        "no content type was sent".to_owned()
    } else {
        format!("the content type '{}' is not supported", shortened(kind))
    };
    let detail =
        format!("send a content type of {}, or multipart/form-data with a field 'file' ({found})", Format::ACCEPTED);
    Problem::new(Code::UnsupportedMediaType, detail).header(header::ACCEPT, Format::ACCEPTED)
}

pub(super) fn bad_form(detail: String) -> Problem {
    Problem::new(Code::InvalidRequest, detail)
}

pub(super) fn broken_form(error: MultipartError) -> Problem {
    let broken = || bad_form("the multipart form is malformed or ended early".to_owned()).because(error.body_text());
    body_fault(&error).unwrap_or_else(broken)
}

pub(super) fn checked_name(name: Option<String>) -> Result<Option<String>, Problem> {
    match name {
        Some(name)
            if name.trim().is_empty()
                || name.chars().count() > MAX_NAME_CHARS
                || name.chars().any(char::is_control) =>
        {
            Err(bad_name())
        }
        other => Ok(other),
    }
}

fn bad_name() -> Problem {
    let detail = format!("a name must have 1 to {MAX_NAME_CHARS} characters, none of them a control character");
    Problem::new(Code::InvalidQuery, detail.clone()).item("?name", "invalid", detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_for_a_data_set_of_the_hub_is_told_from_a_row() {
        let asked = |text: &str| hub_document("application/json", text.as_bytes());
        assert!(asked(r#"{"hub": "org/data", "split": "train"}"#).is_some_and(|asked| asked.is_ok()));
        for incomplete in [r#"{"map": null, "seed": null}"#, r#"{"split": "train"}"#] {
            let refused = asked(incomplete).map(|asked| asked.map(drop));
            assert!(
                refused.is_some_and(|refused| refused.is_err_and(|problem| problem.detail().contains("hub"))),
                "{incomplete}"
            );
        }
        for row in [r#"{"prompt": "p", "seed": 3}"#, r#"{"question": "q"}"#, "{}", "[]"] {
            assert!(asked(row).is_none(), "{row}");
        }
    }
}
