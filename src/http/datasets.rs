//! Datasets: uploaded as a stream, checked row by row, immutable, addressed by id and by the hash of their bytes.
//!
//! Longer than other files until receiving an upload (forms, bodies, their limits) has a module of its own.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::dataset_sources::convert_files;
use super::download::{Download, RangeHeaders, send_file};
use super::error::{Problem, ProblemBody};
use super::extract::{Json, Path, Query};
use super::idempotency::{Answer, once};
use super::list::{List, PageQuery, Time};
use super::uploads::{CreateQuery, Purpose, Sent, SentRows, receive};
use crate::dataset::{Recipe, Summary};
use crate::digest::Sha256Digest;
use crate::files::StagedDone;
use crate::id::DatasetId;
use crate::store::{DatasetRow, NewDataset, StoreError, clock_ms};

/// Maximum size of a page of rows, in bytes, whatever the number of rows.
const PAGE_BYTES: usize = 4 * 1024 * 1024;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        // No body limit here: uploaded rows are streamed to disk, and their size is checked there.
        .routes(routes!(create_dataset, list_datasets).layer(DefaultBodyLimit::disable()))
        .routes(routes!(get_dataset, delete_dataset))
        .routes(routes!(list_rows))
        .routes(routes!(get_content))
}

/// A dataset of prompts.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Dataset {
    /// The dataset's id, `ds_…`.
    pub id: DatasetId,
    /// The name given at upload; null if none.
    pub name: Option<String>,
    /// Number of rows in the dataset.
    pub num_rows: u64,
    /// Size of the canonical rows, in bytes.
    pub size_bytes: u64,
    /// SHA-256 of the canonical rows, in lower-case hex.
    pub sha256: String,
    /// Column names, in order of first appearance.
    pub columns: Vec<String>,
    /// Owner of the key that uploaded the dataset; empty = the operator.
    pub owner: String,
    /// When the dataset was first uploaded.
    pub created_at: Time,
    /// Origin of the rows: hub repository, commit, files with hashes, and the conversion that was applied (`recipe`); null if
    /// they were uploaded unchanged.
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

/// A dataset as a multipart form.
#[derive(ToSchema)]
#[expect(dead_code, reason = "only describes the multipart body in the OpenAPI document")]
struct DatasetForm {
    /// The rows. The content type of the field or its file name (.ndjson, .jsonl, .csv, .json) determines the format.
    #[schema(value_type = String, format = Binary)]
    file: Vec<u8>,
    /// A display name, at most 200 characters.
    name: Option<String>,
    /// How to convert each row, as JSON: `{map, limit, seed}`.
    mapping: Option<Recipe>,
}

/// Upload or import a dataset.
///
/// Rows are JSON objects with a `prompt` (a non-empty string or a list of chat messages). All other columns are passed to the
/// rewards. An object with a duplicate key, or with an integer beyond 64 bits (write it as a string), is rejected. The default
/// format is ndjson, one object per line: `{"prompt": "What is 2+2?", "answer": "4"}`. The server reads the body as it arrives and
/// checks every row. It reports all invalid rows, the first 100 with their line (ndjson) or row (CSV, TSV, JSON). Uploading the same rows again returns
/// the existing dataset (200).
///
/// CSV, TSV, JSON and parquet are accepted too, and the text formats also compressed with gzip or zstd; the server detects the
/// format from the content. Send JSON to use a dataset on the hub: `{"hub": "openai/gsm8k", "config": "main", "map": {"prompt":
/// "question"}}`. A mapping (the form field `mapping`, or the keys of the query) uses another column as the
/// prompt, and filters rows.
#[utoipa::path(
    post, path = "/datasets", tag = "Datasets",
    params(CreateQuery, ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key and rows gets the same answer for 24 hours")),
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
        (status = 200, description = "The dataset already exists", body = Dataset),
    ),
)]
async fn create_dataset(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<CreateQuery>,
    request: Request,
) -> Result<Response, Problem> {
    let headers = request.headers().clone();
    let Sent { name, rows } = receive(&state, &caller, query, request, Purpose::Store).await?;
    let rows = match rows {
        SentRows::Ready(summary, staged) => (summary, staged, None),
        SentRows::Files(files, recipe) => {
            let (summary, staged, origin) = convert_files(&state, *files, recipe, (true, false)).await?;
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
    let (row, is_new) = store_rows(&state, caller.owner(), name, rows).await?;
    let location = format!("/datasets/{}", row.id);
    Answer::new(if is_new { StatusCode::CREATED } else { StatusCode::OK }, Some(location), &Dataset::from(row))
}

/// Stores a dataset's file, then its database row. The same bytes are stored once per owner. Returns the row, and
/// whether it is new.
pub(super) async fn store_rows(
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
        remove_file(state, id).await?; // A concurrent upload of the same rows was first, or the insert failed.
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

/// Get a dataset by its id.
#[utoipa::path(get, path = "/datasets/{id}", tag = "Datasets", params(("id" = DatasetId, Path, description = "The dataset")),
    responses((status = 200, description = "The dataset", body = Dataset)))]
async fn get_dataset(State(state): State<AppState>, Path(id): Path<DatasetId>) -> Result<Json<Dataset>, Problem> {
    Ok(Json(state.store.dataset_get(id).await?.into()))
}

/// Delete a dataset and its rows.
///
/// Refused (409) while an unfinished job needs the dataset.
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
    /// The rows of this page.
    data: Vec<Row>,
    /// The cursor to send as `after` for the next page; null on the last page.
    next: Option<String>,
}

/// A row of a dataset.
#[derive(Debug, Serialize, ToSchema)]
struct Row {
    /// Row number, counted from 0. The `prompt_id` of a sample is `row_` followed by this number.
    row: u64,
    /// The row as it is stored.
    #[schema(value_type = std::collections::BTreeMap<String, Value>)]
    record: Value,
}

/// List the rows of a dataset, in order.
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

/// Cursor of the list of rows: the number of the first row of a page, and its byte offset in the file.
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

/// Reads a page of rows. `None` when no row begins at the offset, so the cursor is not one of this server's.
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

/// Download all rows as ndjson, as they are stored. Their SHA-256 is `sha256`, which is also their ETag.
#[utoipa::path(method(get, head), path = "/datasets/{id}/content", tag = "Datasets",
    params(("id" = DatasetId, Path, description = "The dataset"), RangeHeaders),
    responses(
        (status = 200, description = "The rows", body = String, content_type = "application/x-ndjson", headers(
            ("ETag" = String, description = "The SHA-256 of the dataset's rows, in quotes"),
            ("Accept-Ranges" = String, description = "bytes"),
            ("Repr-Digest" = String, description = "The digest of all rows of the dataset (RFC 9530)"),
        )),
        (status = 206, description = "The requested range of bytes", body = String, content_type = "application/x-ndjson"),
        (status = 304, description = "Not modified: the client's copy is current"),
        (status = 416, description = "The requested range is outside the dataset's rows", body = ProblemBody),
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
