//! Datasets: uploaded as a stream, checked row by row, immutable, addressed by id and by the hash of their bytes.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::time::{Duration, Instant};

use axum::RequestExt;
use axum::body::Bytes;
use axum::extract::multipart::{Field, Multipart, MultipartError};
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::Response;
use futures::{Stream, StreamExt};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::download::{Download, RangeHeaders, send_file};
use super::error::{Code, FieldError, Problem, ProblemBody, shortened};
use super::extract::{Json, Path, Query, announced_bytes, body_fault, body_problem, media_type};
use super::idempotency::{Answer, once};
use super::list::{List, PageQuery, Time};
use super::storage::check_limit;
use crate::dataset::{Format, Reader, Rejected, Summary};
use crate::digest::Sha256Digest;
use crate::files::StagedDone;
use crate::id::DatasetId;
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
/// What a form may have beside the rows, in bytes.
const FORM_BYTES: u64 = 64 * 1024;

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
}

impl From<DatasetRow> for Dataset {
    fn from(row: DatasetRow) -> Self {
        let DatasetRow { id, name, sha256, num_rows, size_bytes, columns, owner, created_at } = row;
        Self { id, name, num_rows, size_bytes, sha256, columns, owner, created_at: Time(created_at) }
    }
}

/// `?name=`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct CreateQuery {
    /// For people; at most 200 characters. A multipart part `name` does the same.
    #[param(min_length = 1, max_length = 200)]
    name: Option<String>,
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
}

/// Upload a dataset.
///
/// Rows are JSON objects with a `prompt` (a non-empty string or a list of chat messages); every other column travels to the rewards.
/// A key that stands twice in one object, and an integer beyond 64 bits (write it as a string), are refused.
/// As ndjson, one a line: `{"prompt": "What is 2+2?", "answer": "4"}`. The body is read as it arrives and checked row by row: all bad rows are reported, the first 100 with their line. The same rows again
/// give the old dataset (200).
#[utoipa::path(
    post, path = "/datasets", tag = "Datasets",
    params(CreateQuery, ("Idempotency-Key" = Option<String>, Header, description = "The same key and rows give the same answer for 24 hours")),
    request_body(
        description = "The rows",
        content(
            (String = "application/x-ndjson"),
            (String = "text/csv", example = "prompt,answer\nWhat is 2+2?,4\n"),
            (Value = "application/json", example = json!({"records": [{"prompt": "What is 2+2?", "answer": "4"}]})),
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
    Query(CreateQuery { name }): Query<CreateQuery>,
    request: Request,
) -> Result<Response, Problem> {
    let headers = request.headers().clone();
    let mut name = checked_name(name)?;
    let kind = media_type(&headers);
    let (summary, staged) = if kind == "multipart/form-data" {
        check_length(&state, &headers, FORM_BYTES)?;
        let form = Multipart::from_request(request, &()).await;
        let (part_name, uploaded) = read_form(&state, form.map_err(|error| bad_form(error.body_text()))?).await?;
        name = name.or(part_name);
        uploaded
    } else {
        let format = Format::of_media_type(&kind).ok_or_else(|| wrong_type(&kind))?;
        check_length(&state, &headers, 0)?;
        let body = request.into_limited_body().into_data_stream();
        read_rows(&state, format, body, |error| body_problem(&error)).await?
    };

    let identity = Sha256Digest::of(format!("{}{}", staged.sha256, name.as_deref().unwrap_or(""))).to_string();
    let work = store_dataset(state.clone(), caller.clone(), name, summary, staged);
    once(&state, &caller, &headers, "POST /datasets", &identity, work).await
}

async fn store_dataset(
    state: AppState,
    caller: Caller,
    name: Option<String>,
    summary: Summary,
    staged: StagedDone,
) -> Result<Answer, Problem> {
    let (row, is_new) = keep_rows(&state, caller.owner(), name, summary, staged).await?;
    let location = format!("/datasets/{}", row.id);
    Answer::new(if is_new { StatusCode::CREATED } else { StatusCode::OK }, Some(location), &Dataset::from(row))
}

/// Bytes first, then the row; the same bytes are one dataset of an owner: the row, and whether it is new.
pub(super) async fn keep_rows(
    state: &AppState,
    owner: &str,
    name: Option<String>,
    summary: Summary,
    staged: StagedDone,
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
    Ok(created?)
}

async fn remove_file(state: &AppState, id: DatasetId) -> Result<(), Problem> {
    let files = state.files.clone();
    tokio::task::spawn_blocking(move || files.dataset_remove(id))
        .await
        .map_err(Problem::internal)?
        .map_err(Problem::from)
}

async fn read_form(state: &AppState, mut form: Multipart) -> Result<(Option<String>, (Summary, StagedDone)), Problem> {
    let (mut name, mut uploaded) = (None, None);
    while let Some(part) = form.next_field().await.map_err(broken_form)? {
        match part.name() {
            Some("name") => name = checked_name(Some(short_text(part).await?))?,
            Some("file") if uploaded.is_none() => {
                let format = format_of_part(&part)?;
                uploaded = Some(read_rows(state, format, part, broken_form).await?);
            }
            Some("file") => {
                return Err(bad_form("there are two parts 'file': upload one dataset a request".to_owned()));
            }
            other => {
                let other = shortened(other.unwrap_or(""));
                return Err(bad_form(format!("unknown part '{other}': send 'file', and 'name' if you like")));
            }
        }
    }
    let uploaded = uploaded.ok_or_else(|| bad_form("there is no part 'file': put the rows there".to_owned()))?;
    Ok((name, uploaded))
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

/// Endless uploads must not take the space that jobs and the database need.
fn check_disk(state: &AppState) -> Result<(), Problem> {
    if state.files.free_bytes()? < state.config.edge.disk_reserve_bytes {
        return Err(Problem::new(
            Code::StorageFull,
            "the server's disk is nearly full: free some space, then try again",
        ));
    }
    Ok(())
}

fn rejected(Rejected { errors, num_errors }: Rejected) -> Problem {
    let first = errors.first().map_or_else(String::new, |error| match error.line {
        0 => error.detail.clone(),
        line => format!("line {line}: {}", error.detail),
    });
    let detail = match num_errors {
        0 | 1 => first,
        _ if num_errors > errors.len() as u64 => {
            format!("{num_errors} bad rows, of which the first {} are listed; {first}", errors.len())
        }
        _ => format!("{num_errors} bad rows; {first}"),
    };
    let items = errors.into_iter().map(|error| FieldError {
        pointer: if error.line == 0 { String::new() } else { format!("line {}", error.line) },
        code: error.code.to_owned(),
        detail: error.detail,
    });
    Problem::new(Code::InvalidDataset, detail).items(items.collect())
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
