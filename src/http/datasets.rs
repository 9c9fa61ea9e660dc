//! Datasets: uploaded as a stream, checked row by row, immutable, addressed by id and by the hash of their bytes.
//!
//! Longer than other files until receiving an upload (forms, bodies, their limits) has a module of its own.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::time::{Duration, Instant};

use axum::RequestExt;
use axum::body::Bytes;
use axum::extract::multipart::{Field, Multipart, MultipartError};
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::Response;
use futures::{Stream, StreamExt, stream};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::dataset_sources::{Files, check_disk, convert_files, fetch, rejected, uploaded};
use super::download::{Download, RangeHeaders, send_file};
use super::error::{Code, Problem, ProblemBody, shortened};
use super::extract::{Json, Path, Query, announced_bytes, body_fault, body_problem, media_type};
use super::idempotency::{Answer, once};
use super::list::{List, PageQuery, Time};
use super::storage::check_limit;
use crate::dataset::{Format, Reader, Recipe, Summary};
use crate::digest::Sha256Digest;
use crate::files::StagedDone;
use crate::id::DatasetId;
use crate::spec::HubDataset;
use crate::storage::StorageKind;
use crate::store::{DatasetRow, NewDataset, StoreError, clock_ms};

/// The largest dataset a server accepts when nothing else is set, in bytes, before and after it is made canonical.
pub const DEFAULT_LIMIT_BYTES: u64 = 1 << 30;
/// Canonical bytes held before they are written to the file.
const WRITE_BYTES: usize = 256 * 1024;
/// For a whole dataset to arrive. Pauses end an upload much earlier.
const UPLOAD_DEADLINE: Duration = Duration::from_secs(3600);
/// A page of rows ends here, however few they are.
const PAGE_BYTES: usize = 4 * 1024 * 1024;
const LONGEST_NAME: usize = 200;
/// What is kept of an upload that is only looked at, bytes.
const LOOK_BYTES: u64 = 8 << 20;
/// A request for a data set of the hub, or a mapping, bytes.
const MAX_DOCUMENT_BYTES: usize = 256 * 1024;

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        // Streamed to disk and counted there.
        .routes(routes!(create_dataset, list_datasets).layer(DefaultBodyLimit::disable()))
        .routes(routes!(get_dataset, delete_dataset))
        .routes(routes!(list_rows))
        .routes(routes!(get_content))
}

/// A dataset.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Dataset {
    /// Its id.
    pub id: DatasetId,
    /// As given at upload.
    pub name: Option<String>,
    /// Rows.
    pub num_rows: u64,
    /// Bytes of the canonical rows.
    pub size_bytes: u64,
    /// Of the canonical rows, lower-case hex.
    pub sha256: String,
    /// Column names, in order of first appearance.
    pub columns: Vec<String>,
    /// The owner of the key that uploaded it; empty = the operator.
    pub owner: String,
    /// When it was uploaded first.
    pub created_at: Time,
    /// Where it comes from: the hub's repository, commit, files with hashes; and what was made of the rows (`recipe`).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub origin: Option<Value>,
}

impl From<DatasetRow> for Dataset {
    fn from(row: DatasetRow) -> Self {
        let DatasetRow { id, name, sha256, num_rows, size_bytes, columns, owner, created_at, origin } = row;
        Self { id, name, num_rows, size_bytes, sha256, columns, owner, created_at: Time(created_at), origin }
    }
}

/// `?name=`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct CreateQuery {
    /// For people; at most 200 characters. A multipart part `name` does the same.
    #[param(min_length = 1, max_length = 200)]
    pub(super) name: Option<String>,
    /// The column, path or template that is the prompt. These keys are the simple ones of a mapping; the part `mapping` has all.
    #[param(example = "question")]
    pub(super) prompt: Option<String>,
    /// The system message.
    pub(super) system: Option<String>,
    /// Whether a text becomes a user's message.
    pub(super) chat: Option<String>,
    /// Only rows for which this expression over the source's columns is true.
    pub(super) r#where: Option<String>,
    /// Of rows that agree in these columns (names by commas) the first one stays.
    pub(super) unique: Option<String>,
    /// Only these columns stay (names by commas).
    pub(super) keep: Option<String>,
    /// These columns go (names by commas).
    pub(super) drop: Option<String>,
    /// A prompt that ends with assistant messages loses them.
    pub(super) cut_answer: Option<String>,
    /// So many rows at most.
    pub(super) limit: Option<String>,
    /// A sample of all rows in place of the first ones.
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

/// A dataset as multipart form.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes the multipart body in the document")]
struct DatasetForm {
    /// The rows; the part's content type or file name (.ndjson, .jsonl, .csv, .json) says in which form.
    #[schema(value_type = String, format = Binary)]
    file: Vec<u8>,
    /// For people.
    name: Option<String>,
    /// What each row becomes, as JSON: `{map, limit, seed}`.
    mapping: Option<Recipe>,
}

/// Upload a dataset.
///
/// Rows are JSON objects with a `prompt` (a non-empty string or a list of chat messages); every other column travels to the rewards.
/// A key that stands twice in one object, and an integer beyond 64 bits (write it as a string), are refused.
/// As ndjson, one a line: `{"prompt": "What is 2+2?", "answer": "4"}`. The body is read as it arrives and checked row by row: all bad rows are reported, the first 100 with their line. The same rows again
/// give the old dataset (200).
///
/// Also CSV, TSV, JSON and parquet, each of the texts also inside gzip or zstd, told by their content; or, as JSON, a data set of the hub:
/// `{"hub": "openai/gsm8k", "config": "main", "map": {"prompt": "question"}}`. With a mapping (the part `mapping`, or the keys of the
/// query) other columns than `prompt` can be the prompt, and rows can be left out.
#[utoipa::path(
    post, path = "/datasets", tag = "Datasets",
    params(CreateQuery, ("Idempotency-Key" = Option<String>, Header, description = "The same key and rows give the same answer for 24 hours")),
    request_body(
        description = "The rows",
        content(
            (String = "application/x-ndjson"),
            (String = "text/csv", example = "prompt,answer\nWhat is 2+2?,4\n"),
            (Value = "application/json", example = json!({"records": [{"prompt": "What is 2+2?", "answer": "4"}]})),
            (String = "application/vnd.apache.parquet"),
            (DatasetForm = "multipart/form-data"),
        )
    ),
    responses(
        (status = 201, description = "Created", body = Dataset, headers(("Location" = String, description = "Its path"))),
        (status = 200, description = "These rows exist already", body = Dataset),
    ),
)]
async fn create_dataset(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<CreateQuery>,
    request: Request,
) -> Result<Response, Problem> {
    let headers = request.headers().clone();
    let Sent { name, rows } = receive(&state, &caller, query, request, Purpose::Keep).await?;
    let rows = match rows {
        SentRows::Ready(summary, staged) => (summary, staged, None),
        SentRows::Files(files, recipe) => {
            let (summary, staged, origin) = convert_files(&state, *files, recipe, true).await?;
            (summary, staged, Some(origin))
        }
    };
    let identity = Sha256Digest::of(format!("{}{}", rows.1.sha256, name.as_deref().unwrap_or(""))).to_string();
    let work = store_dataset(state.clone(), caller.clone(), name, rows);
    once(&state, &caller, &headers, "POST /datasets", &identity, work).await
}

async fn store_dataset(
    state: AppState,
    caller: Caller,
    name: Option<String>,
    rows: (Summary, StagedDone, Option<Value>),
) -> Result<Answer, Problem> {
    let (row, is_new) = keep_rows(&state, caller.owner(), name, rows).await?;
    let location = format!("/datasets/{}", row.id);
    Answer::new(if is_new { StatusCode::CREATED } else { StatusCode::OK }, Some(location), &Dataset::from(row))
}

/// Bytes first, then the row; the same bytes are one dataset of an owner: the row, and whether it is new.
pub(super) async fn keep_rows(
    state: &AppState,
    owner: &str,
    name: Option<String>,
    (summary, staged, origin): (Summary, StagedDone, Option<Value>),
) -> Result<(DatasetRow, bool), Problem> {
    if let Some(row) = state.store.dataset_by_sha256(owner, &staged.sha256.to_string()).await? {
        return Ok((row, false));
    }
    let (id, Summary { num_rows, columns }) = (DatasetId::new(), summary);
    let (sha256, size_bytes, owner) = (staged.sha256.to_string(), staged.size_bytes, owner.to_owned());
    let new = NewDataset { id, name, sha256, num_rows, size_bytes, columns, owner };
    staged.publish(&state.files.dataset(id)).await?;
    let created = state.store.dataset_create(new, clock_ms()).await;
    if !matches!(created, Ok((_, true))) {
        remove_file(state, id).await?; // Another upload of the same rows was first, or there is no row.
    }
    let (mut row, is_new) = created?;
    if let Some(origin) = origin.filter(|_| is_new) {
        state.store.dataset_note_origin(row.id, &origin).await?;
        row.origin = Some(origin);
    }
    Ok((row, is_new))
}

async fn remove_file(state: &AppState, id: DatasetId) -> Result<(), Problem> {
    let files = state.files.clone();
    tokio::task::spawn_blocking(move || files.dataset_remove(id))
        .await
        .map_err(Problem::internal)?
        .map_err(Problem::from)
}

/// What rows are received for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To become a dataset.
    Keep,
    /// To be looked at: their beginning is enough, and they stay as they came.
    Look,
}

/// What a request sent: a name, and rows.
pub(super) struct Sent {
    pub(super) name: Option<String>,
    pub(super) rows: SentRows,
}

pub(super) enum SentRows {
    /// Checked and written as they came.
    Ready(Summary, StagedDone),
    /// To be converted.
    Files(Box<Files>, Recipe),
}

/// Receives the rows of a request, in whatever form.
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
        let rows = SentRows::Files(Box::new(fetch(state, caller, &wanted).await?), wanted.recipe());
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

/// A file on its way.
struct Upload {
    name: Option<String>,
    format: Option<Format>,
    recipe: Recipe,
    /// Its first bytes; the stream has them too.
    start: Vec<u8>,
    purpose: Purpose,
}

/// Streams plain rows through the checks; what is packed or mapped is kept as it is first.
async fn read_upload<E>(
    state: &AppState,
    upload: Upload,
    pieces: impl Stream<Item = Result<Bytes, E>> + Unpin,
    failed: impl Fn(E) -> Problem,
) -> Result<SentRows, Problem> {
    let Upload { name, format, recipe, start, purpose } = upload;
    let is_streamed = purpose == Purpose::Keep && recipe.is_plain() && !is_packed(&start);
    if let Some(format) = format.filter(|_| is_streamed) {
        let (summary, staged) = read_rows(state, format, pieces, failed).await?;
        return Ok(SentRows::Ready(summary, staged));
    }
    let staged = keep_raw(state, pieces, failed, enough(purpose, &start)).await?;
    Ok(SentRows::Files(Box::new(uploaded(name.as_deref(), format, staged)), recipe))
}

/// Writes an upload to a file as it comes; as large as the disk permits.
async fn keep_raw<E>(
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
            return Err(Problem::new(Code::RequestTimeout, "the dataset took more than an hour to arrive"));
        }
        unchecked += piece.len();
        if unchecked >= WRITE_BYTES {
            check_disk(state)?;
            unchecked = 0;
        }
        // What follows is received and left: the parts of a form stand behind each other.
        if received < enough_bytes {
            staged.write(&piece).await?;
        }
        received += piece.len() as u64;
    }
    Ok(staged.finish().await?)
}

/// Bytes of an upload that are kept. A parquet file's index is at its end.
fn enough(purpose: Purpose, start: &[u8]) -> u64 {
    match purpose {
        Purpose::Look if !start.starts_with(b"PAR1") => LOOK_BYTES,
        Purpose::Look | Purpose::Keep => u64::MAX,
    }
}

/// The first bytes of a body: a few, or of a document all it may have.
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

/// Parquet, gzip or zstd, by their first bytes.
fn is_packed(start: &[u8]) -> bool {
    [&b"PAR1"[..], b"\x1f\x8b", b"\x28\xb5\x2f\xfd"].iter().any(|magic| start.starts_with(magic))
}

/// `{"hub": …}`: a request for a data set of the hub, in place of rows; with its name.
fn hub_document(kind: &str, start: &[u8]) -> Option<Result<(Option<String>, HubDataset), Problem>> {
    let is_document = kind == "application/json" && start.trim_ascii_start().starts_with(b"{");
    let mut document: Value = is_document.then(|| serde_json::from_slice(start).ok()).flatten()?;
    document.get("hub")?;
    let name = document.as_object_mut()?.shift_remove("name");
    let refuse = |detail: String| Problem::new(Code::InvalidBody, detail.clone()).item("", "invalid", detail);
    let name = match name {
        None | Some(Value::Null) => None,
        Some(Value::String(name)) => Some(name),
        Some(_) => return Some(Err(refuse("name must be a text".to_owned()))),
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
    let mut raw: Option<(Option<String>, Option<Format>, StagedDone)> = None;
    let mut rows = None;
    while let Some(mut part) = form.next_field().await.map_err(broken_form)? {
        match part.name() {
            Some("name") => name = checked_name(Some(short_text(part).await?))?,
            Some("mapping") if mapping.is_none() => mapping = Some(read_mapping(part).await?),
            Some("file") if rows.is_none() && raw.is_none() => {
                let (file, format) = (part.file_name().map(str::to_owned), format_of_part(&part));
                let start = peek(&mut part, broken_form, false).await?;
                let pieces = stream::iter([Ok(Bytes::from(start.clone()))]).chain(part);
                let is_plain = mapping.as_ref().unwrap_or(&of_query).is_plain() && purpose == Purpose::Keep;
                match format {
                    // A mapping that comes later is refused below.
                    Ok(format) if is_plain && !is_packed(&start) => {
                        let (summary, staged) = read_rows(state, format, pieces, broken_form).await?;
                        rows = Some((summary, staged));
                    }
                    Err(problem) if is_plain && !is_packed(&start) => return Err(problem),
                    format => {
                        raw = Some((
                            file,
                            format.ok(),
                            keep_raw(state, pieces, broken_form, enough(purpose, &start)).await?,
                        ))
                    }
                }
            }
            Some("file") => {
                return Err(bad_form("there are two parts 'file': upload one dataset a request".to_owned()));
            }
            Some("mapping") => return Err(bad_form("there are two parts 'mapping'".to_owned())),
            other => {
                let other = shortened(other.unwrap_or(""));
                return Err(bad_form(format!(
                    "unknown part '{other}': send 'file', and 'name' and 'mapping' if you like"
                )));
            }
        }
    }
    let recipe = mapping.unwrap_or(of_query);
    let rows = match (rows, raw) {
        (Some(_), _) if !recipe.is_plain() => {
            return Err(bad_form("the part 'mapping' comes after the file: send it first".to_owned()));
        }
        (Some((summary, staged)), _) => SentRows::Ready(summary, staged),
        (None, Some((file, format, staged))) => {
            SentRows::Files(Box::new(uploaded(file.as_deref(), format, staged)), recipe)
        }
        (None, None) => return Err(bad_form("there is no part 'file': put the rows there".to_owned())),
    };
    Ok(Sent { name, rows })
}

/// The part `mapping`.
async fn read_mapping(mut part: Field<'_>) -> Result<Recipe, Problem> {
    let mut bytes = Vec::new();
    while let Some(chunk) = part.chunk().await.map_err(broken_form)? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > MAX_DOCUMENT_BYTES {
            return Err(bad_form(format!("the part 'mapping' may have {MAX_DOCUMENT_BYTES} bytes")));
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
            "the part 'file' needs a content type, or a file name that ends with .ndjson, .jsonl, .csv or .json";
        Problem::new(Code::UnsupportedMediaType, detail).header(header::ACCEPT, Format::ACCEPTED)
    })
}

async fn short_text(mut part: Field<'_>) -> Result<String, Problem> {
    let mut bytes = Vec::new();
    while let Some(chunk) = part.chunk().await.map_err(broken_form)? {
        bytes.extend_from_slice(&chunk);
        if bytes.len() > 4 * LONGEST_NAME {
            return Err(bad_name());
        }
    }
    String::from_utf8(bytes).map_err(|_| bad_name())
}

/// Reads rows as they arrive, checks them, and writes the canonical ones to a staged file. Memory: one row and one piece.
/// Nothing is read while the disk is nearly full.
pub(super) async fn read_rows<E>(
    state: &AppState,
    format: Format,
    mut pieces: impl Stream<Item = Result<Bytes, E>> + Unpin,
    failed: impl Fn(E) -> Problem,
) -> Result<(Summary, StagedDone), Problem> {
    check_disk(state)?;
    let limit = state.dataset_limit_bytes;
    let mut staged = state.files.stage(limit).await?;
    let mut reader = Reader::new(format);
    let mut out = Vec::new();
    let mut received = 0_u64;
    let deadline = Instant::now() + UPLOAD_DEADLINE;
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(&failed)?;
        if Instant::now() > deadline {
            return Err(Problem::new(Code::RequestTimeout, "the dataset took more than an hour to arrive"));
        }
        received += piece.len() as u64;
        if received > limit {
            return Err(too_large(limit));
        }
        reader.push(&piece, &mut out);
        if out.len() >= WRITE_BYTES {
            check_disk(state)?;
            check_limit(state, StorageKind::Datasets, received).await?;
            staged.write(&out).await?;
            out.clear();
        }
    }
    let summary = reader.finish(&mut out).map_err(rejected)?;
    check_limit(state, StorageKind::Datasets, received).await?;
    staged.write(&out).await?;
    Ok((summary, staged.finish().await?))
}

/// What is to be mapped may be larger than a dataset, but not than the disk: 413 before the first byte.
fn check_room(state: &AppState, headers: &HeaderMap) -> Result<(), Problem> {
    let room = state.files.free_bytes()?.saturating_sub(state.config.edge.disk_reserve_bytes);
    match announced_bytes(headers) {
        Some(length) if length > room => {
            let detail = format!("the upload has {length} bytes, and the server's disk has room for {room}");
            Err(Problem::new(Code::BodyTooLarge, detail))
        }
        Some(_) | None => Ok(()),
    }
}

/// 413 before the first byte when the client says that there will be too many; `more` = what may come beside the rows.
fn check_length(state: &AppState, headers: &HeaderMap, more: u64) -> Result<(), Problem> {
    match announced_bytes(headers) {
        Some(length) if length > state.dataset_limit_bytes.saturating_add(more) => {
            Err(too_large(state.dataset_limit_bytes))
        }
        Some(_) | None => Ok(()),
    }
}

fn too_large(limit: u64) -> Problem {
    Problem::new(Code::BodyTooLarge, format!("a dataset may have at most {limit} bytes; split it"))
}

fn wrong_type(kind: &str) -> Problem {
    let found = if kind.is_empty() { "there is none".to_owned() } else { format!("'{}' is not one", shortened(kind)) };
    let detail =
        format!("send a content type of {}, or multipart/form-data with a part 'file' ({found})", Format::ACCEPTED);
    Problem::new(Code::UnsupportedMediaType, detail).header(header::ACCEPT, Format::ACCEPTED)
}

pub(super) fn bad_form(detail: String) -> Problem {
    Problem::new(Code::InvalidRequest, detail)
}

pub(super) fn broken_form(error: MultipartError) -> Problem {
    let broken = || bad_form("the multipart form is broken or ended early".to_owned()).because(error.body_text());
    body_fault(&error).unwrap_or_else(broken)
}

fn checked_name(name: Option<String>) -> Result<Option<String>, Problem> {
    match name {
        Some(name)
            if name.trim().is_empty() || name.chars().count() > LONGEST_NAME || name.chars().any(char::is_control) =>
        {
            Err(bad_name())
        }
        other => Ok(other),
    }
}

fn bad_name() -> Problem {
    let detail = format!("a name has 1 to {LONGEST_NAME} characters, none of them a control character");
    Problem::new(Code::InvalidQuery, detail.clone()).item("?name", "invalid", detail)
}

/// List datasets, newest first.
#[utoipa::path(get, path = "/datasets", tag = "Datasets", params(PageQuery),
    responses((status = 200, description = "A page", body = List<Dataset>)))]
async fn list_datasets(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<PageQuery>,
) -> Result<Json<List<Dataset>>, Problem> {
    let page = state.store.dataset_list(caller.sees(), query.after.as_deref(), query.limit()?).await?;
    Ok(Json(List::of(page, Dataset::from)))
}

/// One dataset.
#[utoipa::path(get, path = "/datasets/{id}", tag = "Datasets", params(("id" = DatasetId, Path, description = "The dataset")),
    responses((status = 200, description = "The dataset", body = Dataset)))]
async fn get_dataset(State(state): State<AppState>, Path(id): Path<DatasetId>) -> Result<Json<Dataset>, Problem> {
    Ok(Json(state.store.dataset_get(id).await?.into()))
}

/// Delete a dataset.
///
/// Refused (409) while a job that is not over needs it.
#[utoipa::path(delete, path = "/datasets/{id}", tag = "Datasets", params(("id" = DatasetId, Path, description = "The dataset")),
    responses((status = 204, description = "Deleted")))]
async fn delete_dataset(State(state): State<AppState>, Path(id): Path<DatasetId>) -> Result<StatusCode, Problem> {
    state.store.dataset_delete(id).await?;
    remove_file(&state, id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Rows of a dataset, in order.
#[derive(Debug, Serialize, ToSchema)]
struct RowPage {
    /// The rows.
    data: Vec<Row>,
    /// What to send as `after` for the next page; null on the last one.
    next: Option<String>,
}

/// A row of a dataset.
#[derive(Debug, Serialize, ToSchema)]
struct Row {
    /// Counted from 0; `prompt_id` of a sample is `row_` and this number.
    row: u64,
    /// As uploaded.
    #[schema(value_type = std::collections::BTreeMap<String, Value>)]
    record: Value,
}

/// Rows of a dataset, in order.
#[utoipa::path(get, path = "/datasets/{id}/rows", tag = "Datasets",
    params(("id" = DatasetId, Path, description = "The dataset"), PageQuery),
    responses((status = 200, description = "A page", body = RowPage)))]
async fn list_rows(
    State(state): State<AppState>,
    Path(id): Path<DatasetId>,
    Query(query): Query<PageQuery>,
) -> Result<Json<RowPage>, Problem> {
    let dataset = state.store.dataset_get(id).await?;
    let limit = query.limit()?;
    let begin = match query.after.as_deref().map(|after| parse_cursor(after, &dataset)) {
        None => Cursor { row: 0, offset: 0 },
        Some(Some(cursor)) => cursor,
        Some(None) => return Err(StoreError::BadCursor.into()),
    };
    let path = state.files.dataset(id);
    let page = tokio::task::spawn_blocking(move || read_page(&path, begin, limit, dataset.num_rows)).await;
    match page.map_err(Problem::internal)?.map_err(Problem::internal)? {
        Some(page) => Ok(Json(page)),
        None => Err(StoreError::BadCursor.into()),
    }
}

/// Where a page begins: the row's number and its offset in the file.
struct Cursor {
    row: u64,
    offset: u64,
}

fn parse_cursor(text: &str, dataset: &DatasetRow) -> Option<Cursor> {
    let (row, offset) = text.strip_prefix('r')?.split_once('b')?;
    let cursor = Cursor { row: row.parse().ok()?, offset: offset.parse().ok()? };
    (cursor.row < dataset.num_rows && cursor.offset < dataset.size_bytes && cursor.row <= cursor.offset)
        .then_some(cursor)
}

/// `None` when no row begins there: a cursor of somebody's own making.
fn read_page(path: &std::path::Path, begin: Cursor, limit: u32, num_rows: u64) -> std::io::Result<Option<RowPage>> {
    let Cursor { mut row, mut offset } = begin;
    let mut reader = BufReader::new(std::fs::File::open(path)?);
    if offset > 0 {
        let mut before = [0];
        reader.seek(SeekFrom::Start(offset - 1))?;
        reader.read_exact(&mut before)?;
        if before != *b"\n" {
            return Ok(None);
        }
    }
    let (mut data, mut line, mut page_bytes) = (Vec::new(), Vec::new(), 0);
    while data.len() < limit as usize && row < num_rows && page_bytes < PAGE_BYTES {
        line.clear();
        page_bytes += reader.read_until(b'\n', &mut line)?;
        if line.is_empty() {
            break;
        }
        let record = serde_json::from_slice(&line).map_err(std::io::Error::other)?;
        data.push(Row { row, record });
        row += 1;
        offset += line.len() as u64;
    }
    let next = (row < num_rows && !data.is_empty()).then(|| format!("r{row}b{offset}"));
    Ok(Some(RowPage { data, next }))
}

/// All rows as ndjson, as they are stored: the bytes whose hash is `sha256`, which is their ETag.
#[utoipa::path(method(get, head), path = "/datasets/{id}/content", tag = "Datasets",
    params(("id" = DatasetId, Path, description = "The dataset"), RangeHeaders),
    responses(
        (status = 200, description = "The rows", body = String, content_type = "application/x-ndjson", headers(
            ("ETag" = String, description = "The SHA-256, quoted"),
            ("Accept-Ranges" = String, description = "bytes"),
            ("Repr-Digest" = String, description = "RFC 9530, of all rows"),
        )),
        (status = 206, description = "A part of them", body = String, content_type = "application/x-ndjson"),
        (status = 304, description = "The client has them"),
        (status = 416, description = "The range lies outside", body = ProblemBody),
    ))]
async fn get_content(
    State(state): State<AppState>,
    Path(id): Path<DatasetId>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let DatasetRow { sha256, size_bytes, .. } = state.store.dataset_get(id).await?;
    let sha256 = sha256.parse().map_err(Problem::internal)?;
    let file = Download { path: state.files.dataset(id), name: format!("{id}.ndjson"), size_bytes, sha256 };
    send_file(&method, &headers, &file).await
}
