//! Datasets: uploaded as a stream, checked row by row, immutable, addressed by id and by the hash of their bytes.
//!
//! Longer than other files until receiving an upload (forms, bodies, their limits) has a module of its own.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::dataset_downloads::{Conversion, Fetched, fetch, stored};
use super::dataset_sources::convert_files;
use super::download::{Download, RangeHeaders, send_file};
use super::error::{Problem, ProblemBody};
use super::extract::{Json, Path, Query};
use super::idempotency::{Answer, once};
use super::jobs::bad_query;
use super::list::{self, List, Time};
use super::named_models::UseOfHub;
use super::rows::{remove_file, store_rows};
use super::uploads::{CreateQuery, Purpose, Sent, SentRows, receive};
use crate::dataset::{Recipe, Summary};
use crate::digest::Sha256Digest;
use crate::downloads::dataset_key;
use crate::files::StagedDone;
use crate::id::DatasetId;
use crate::spec::HubDataset;
use crate::store::background::spawn_blocking;
use crate::store::{DatasetDownloadRow, DatasetFilter, DatasetRow, StoreError};

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
    /// Current state: `ready`; for hub datasets also `downloading` and `failed`. Until a dataset is ready it has no rows and no
    /// columns, and `sha256` is the one of zero bytes.
    pub state: String,
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
    /// Downloads from the hub: number of bytes downloaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_done: Option<u64>,
    /// Downloads from the hub: total number of bytes of all files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_total: Option<u64>,
    /// Running downloads: transfer rate over the last seconds, in bytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<f64>,
    /// Running downloads: estimated seconds remaining.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eta_s: Option<f64>,
    /// Why the download failed, and what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl From<DatasetRow> for Dataset {
    fn from(row: DatasetRow) -> Self {
        let DatasetRow { id, name, sha256, num_rows, size_bytes, columns, owner, created_at, origin } = row;
        Self {
            id,
            state: "ready".to_owned(),
            name,
            num_rows,
            size_bytes,
            sha256,
            columns,
            owner,
            created_at: Time(created_at),
            origin,
            bytes_done: None,
            bytes_total: None,
            bytes_per_second: None,
            eta_s: None,
            problem: None,
        }
    }
}

impl Dataset {
    /// Converts a download to the JSON form of the dataset that it will be, with its progress.
    fn of_download(state: &AppState, row: DatasetDownloadRow) -> Self {
        let advance = state.downloads.advance(&dataset_key(row.id));
        Self {
            id: row.id,
            state: row.state,
            name: row.name,
            num_rows: 0,
            size_bytes: 0,
            // The hash of the rows that are there: none.
            sha256: Sha256Digest::of("").to_string(),
            columns: Vec::new(),
            owner: row.owner,
            created_at: Time(row.created_at),
            origin: Some(row.origin),
            bytes_done: Some(advance.map_or(0, |advance| advance.bytes_done)),
            bytes_total: Some(row.bytes_total),
            bytes_per_second: advance.and_then(|advance| advance.bytes_per_second),
            eta_s: advance.and_then(|advance| advance.eta_s),
            problem: row.problem,
        }
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
    /// A zip with the images that rows name: `{"images": [{"file": "a/b.png"}]}`.
    #[schema(value_type = Option<String>, format = Binary)]
    images: Option<Vec<u8>>,
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
///
/// Rows may have images, for vision-language models: `images: [{"bytes_b64": "…"}]`, or `[{"file": "a/b.png"}]` with a zip in the form
/// field `images`. PNG, JPEG, WebP and GIF are accepted. The stored rows have `{sha256, media_type, width, height}` in their place;
/// `GET /datasets/{id}/images/{sha256}` returns the image. Links, absolute names and `..` in a zip are rejected, and so are images of more
/// than 16 MiB or 50 million pixels.
///
/// A hub dataset whose files arrive within five seconds is stored during the request. Otherwise the server downloads it afterwards
/// (202, state `downloading`); jobs may refer to it meanwhile and start when it is stored. Send a hub token for this request in the
/// header `x-hub-token`.
#[utoipa::path(
    post, path = "/datasets", tag = "Datasets",
    params(CreateQuery, ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key and rows gets the same answer for 24 hours"),
        ("x-hub-token" = Option<String>, Header, description = "A hub token for this download; the server does not store it")),
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
        (status = 202, description = "The server is downloading the dataset from the hub", body = Dataset, headers(("Location" = String, description = "Its path"))),
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
        SentRows::Hub(wanted) => {
            let identity = serde_json::to_string(&(&name, &wanted)).map_err(Problem::internal)?;
            let work = import(state.clone(), caller.clone(), name, *wanted);
            let identity = Sha256Digest::of(identity).to_string();
            return once(&state, &caller, &headers, "POST /datasets", &identity, work).await;
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
    let (row, is_new) = store_rows(&state, caller.owner(), (DatasetId::new(), name), rows).await?;
    answer(if is_new { StatusCode::CREATED } else { StatusCode::OK }, &row.into())
}

fn answer(status: StatusCode, dataset: &Dataset) -> Result<Answer, Problem> {
    Answer::new(status, Some(format!("/datasets/{}", dataset.id)), dataset)
}

/// Stores a hub dataset, or starts its download.
async fn import(state: AppState, caller: Caller, name: Option<String>, wanted: HubDataset) -> Result<Answer, Problem> {
    let conversion = Conversion { recipe: wanted.recipe(), chat_default: true, answers: false };
    match fetch(&state, &caller, (name.clone(), &wanted), &conversion, UseOfHub::Register).await? {
        Fetched::Files(files) => {
            let (summary, staged, origin) = convert_files(&state, *files, conversion.recipe, (true, false)).await?;
            store_dataset(state, caller, name, (summary, staged, Some(origin))).await
        }
        Fetched::Downloading(row) => answer(StatusCode::ACCEPTED, &Dataset::of_download(&state, *row)),
        Fetched::Stored(row) => answer(StatusCode::OK, &(*row).into()),
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DatasetQuery {
    /// Only datasets with exactly this name.
    name: Option<String>,
    /// Only datasets whose canonical rows have this SHA-256, in hex.
    sha256: Option<String>,
    /// The cursor `next` of the previous page.
    after: Option<String>,
    /// Items per page, 1 to 100.
    #[param(minimum = 1, maximum = 100, default = 20)]
    limit: Option<u32>,
}

/// List datasets, newest first.
#[utoipa::path(get, path = "/datasets", tag = "Datasets", params(DatasetQuery),
    responses((status = 200, description = "A page", body = List<Dataset>), (status = 400, description = "A query parameter is not valid", body = ProblemBody)))]
async fn list_datasets(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<DatasetQuery>,
) -> Result<Json<List<Dataset>>, Problem> {
    let DatasetQuery { name, sha256, after, limit } = query;
    let limit = list::limit(limit)?;
    let parsed = sha256.map(|text| text.to_ascii_lowercase().parse::<Sha256Digest>()).transpose();
    let sha256 = parsed.map_err(|error| bad_query("sha256", "invalid_value", error.to_string()))?;
    let sha256 = sha256.map(|sha256| sha256.to_string());
    let filter = DatasetFilter { owner: caller.sees(), name: name.as_deref(), sha256: sha256.as_deref() };
    let page = state.store.dataset_list(filter, after.as_deref(), limit).await?;
    let mut downloads = HashMap::new();
    // Only a dataset that is not stored has no hash.
    for id in page.data.iter().filter(|row| row.sha256.is_empty()).map(|row| row.id) {
        downloads.extend(state.store.dataset_download_get(id).await?.map(|row| (id, row)));
    }
    let view = |row: DatasetRow| match downloads.remove(&row.id) {
        Some(download) => Dataset::of_download(&state, download),
        None => row.into(),
    };
    Ok(Json(List::of(page, view)))
}

/// Get a dataset by its id.
#[utoipa::path(get, path = "/datasets/{id}", tag = "Datasets", params(("id" = DatasetId, Path, description = "The dataset")),
    responses((status = 200, description = "The dataset", body = Dataset)))]
async fn get_dataset(State(state): State<AppState>, Path(id): Path<DatasetId>) -> Result<Json<Dataset>, Problem> {
    match state.store.dataset_get(id).await {
        Err(StoreError::NotFound { .. }) => {
            let row = state.store.dataset_download_get(id).await?;
            let row = row.ok_or_else(|| Problem::not_found("dataset", id))?;
            Ok(Json(Dataset::of_download(&state, row)))
        }
        row => Ok(Json(row?.into())),
    }
}

/// Delete a dataset and its rows.
///
/// A download from the hub stops; partial files are kept for a day. Refused (409) while an unfinished job needs the dataset.
#[utoipa::path(delete, path = "/datasets/{id}", tag = "Datasets", params(("id" = DatasetId, Path, description = "The dataset")),
    responses((status = 204, description = "Deleted")))]
async fn delete_dataset(State(state): State<AppState>, Path(id): Path<DatasetId>) -> Result<StatusCode, Problem> {
    state.store.dataset_delete(id).await?;
    state.downloads.cancel(&dataset_key(id)).await;
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

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RowQuery {
    /// The cursor `next` of the previous page.
    after: Option<String>,
    /// Items per page, 1 to 100.
    #[param(minimum = 1, maximum = 100, default = 20)]
    limit: Option<u32>,
    /// Number of the first row, in place of `after`. The server reads the rows before it.
    from: Option<u64>,
}

/// List the rows of a dataset, in order.
#[utoipa::path(get, path = "/datasets/{id}/rows", tag = "Datasets",
    params(("id" = DatasetId, Path, description = "The dataset"), RowQuery),
    responses((status = 200, description = "A page", body = RowPage)))]
async fn list_rows(
    State(state): State<AppState>,
    Path(id): Path<DatasetId>,
    Query(RowQuery { after, limit, from }): Query<RowQuery>,
) -> Result<Json<RowPage>, Problem> {
    let dataset = stored(&state, id).await?;
    let id = dataset.id;
    let limit = list::limit(limit)?;
    let begin = match after.as_deref().map(|after| parse_cursor(after, &dataset)) {
        None => Cursor { row: 0, offset: 0 },
        Some(Some(cursor)) => cursor,
        Some(None) => return Err(StoreError::BadCursor.into()),
    };
    let path = state.files.dataset(id);
    let page = spawn_blocking(move || {
        let begin = match from.filter(|_| after.is_none()) {
            Some(row) => find_row(&path, row.min(dataset.num_rows))?,
            None => begin,
        };
        read_page(&path, begin, limit, dataset.num_rows)
    });
    let page = page.await;
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

/// Returns the cursor of a row, by reading the rows before it.
fn find_row(path: &std::path::Path, row: u64) -> std::io::Result<Cursor> {
    let mut reader = BufReader::new(std::fs::File::open(path)?);
    let mut offset = 0;
    for _ in 0..row {
        offset += reader.skip_until(b'\n')? as u64;
    }
    Ok(Cursor { row, offset })
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
    let DatasetRow { id, sha256, size_bytes, .. } = stored(&state, id).await?;
    let sha256 = sha256.parse().map_err(Problem::internal)?;
    let file = Download { path: state.files.dataset(id), name: format!("{id}.ndjson"), size_bytes, sha256 };
    send_file(&method, &headers, &file).await
}
