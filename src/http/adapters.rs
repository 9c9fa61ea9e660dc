//! PEFT adapters for warm starts: uploaded, or downloaded from a hub.

mod receive;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem};
use super::extract::{Json, Path, Query};
use super::idempotency::{Answer, once};
use super::list::{List, PageQuery, Time};
use super::models::hub::{client, parse_repo, problem};
use super::rows::check_disk;
use crate::files::StagedDir;
use crate::hub::{RepoFile, RepoInfo, RepoPlan};
use crate::id::AdapterId;
use crate::modelcard::adapter::{self, AdapterCard};
use crate::modelcard::{ModelCardError, ModelFile, fingerprint_entries, hash_files};
use crate::spec::AdapterPlan;
use crate::store::{AdapterRow, clock_ms};

/// The two files of a PEFT adapter.
pub(super) const FILES: [&str; 2] = [adapter::CONFIG, adapter::WEIGHTS];

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        // No body limit here: an uploaded adapter is streamed to disk, and its size is checked there.
        .routes(routes!(create_adapter, list_adapters).layer(DefaultBodyLimit::disable()))
        .routes(routes!(get_stored_adapter, delete_adapter))
}

/// A PEFT adapter that jobs can start from.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct StoredAdapter {
    /// The adapter's id, `adp_…`.
    pub id: AdapterId,
    /// The name given at upload; null if none.
    pub name: Option<String>,
    /// The base model that adapter_config.json names; null if it names none.
    pub base_model: Option<String>,
    /// Rank of the LoRA matrices (`r`); null if the config does not say.
    pub r: Option<u64>,
    /// Numerator of the LoRA scaling factor; null if the config does not say.
    pub lora_alpha: Option<f64>,
    /// Number of weights in the adapter.
    pub num_parameters: u64,
    /// Total size of the adapter's files, in bytes.
    pub size_bytes: u64,
    /// SHA-256 over the adapter's files, in lower-case hex.
    pub sha256: String,
    /// The contents of adapter_config.json.
    #[schema(value_type = Object)]
    pub config: Value,
    /// Owner of the key that uploaded the adapter; empty = the operator.
    pub owner: String,
    /// When the adapter was first uploaded.
    pub created_at: Time,
    /// Hub repository, revision and commit of the adapter; null if it was uploaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub origin: Option<Value>,
}

impl From<AdapterRow> for StoredAdapter {
    fn from(row: AdapterRow) -> Self {
        let AdapterRow { id, name, sha256, size_bytes, num_parameters, config, files: _, owner, created_at, origin } =
            row;
        Self {
            id,
            name,
            base_model: config["base_model_name_or_path"].as_str().map(str::to_owned),
            r: config["r"].as_u64(),
            lora_alpha: config["lora_alpha"].as_f64(),
            num_parameters,
            size_bytes,
            sha256,
            config,
            owner,
            created_at: Time(created_at),
            origin,
        }
    }
}

/// An adapter to download from a hub.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct HubAdapter {
    /// Hub repository: `org/name`, or `org/name@revision`.
    #[schema(example = "org/qwen3-gsm8k-lora")]
    hub: String,
    /// Branch, tag or commit of the repository. Default: `main`.
    revision: Option<String>,
    /// A display name, at most 200 characters.
    name: Option<String>,
}

/// An adapter as a multipart form.
#[derive(ToSchema)]
#[expect(dead_code, reason = "only describes the multipart body in the OpenAPI document")]
struct AdapterForm {
    /// Contents of the file adapter_config.json.
    #[schema(rename = "adapter_config.json", value_type = String, format = Binary)]
    config: Vec<u8>,
    /// Contents of the file adapter_model.safetensors.
    #[schema(rename = "adapter_model.safetensors", value_type = String, format = Binary)]
    weights: Vec<u8>,
    /// A display name, at most 200 characters.
    name: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct NameQuery {
    /// A display name, at most 200 characters. A multipart field `name` has the same effect.
    #[param(min_length = 1, max_length = 200)]
    name: Option<String>,
}

/// The adapter files that a request sent, in a staging directory, with their name and origin.
struct Sent {
    name: Option<String>,
    dir: StagedDir,
    origin: Option<Value>,
}

/// Upload a PEFT adapter.
///
/// Send a multipart form with the fields `adapter_config.json` and `adapter_model.safetensors`, a tar with these two files (plain
/// or gzip, as `GET /jobs/{id}/adapter` returns it), or JSON that names an adapter on the hub: `{"hub": "org/name"}`. The config
/// and the tensors must agree. A job that starts from the adapter (`warm_start.adapter`) checks that it matches the job's model.
/// Uploading the same files again returns the existing adapter (200).
#[utoipa::path(
    post, path = "/adapters", tag = "Adapters",
    params(NameQuery, ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key and files gets the same answer for 24 hours")),
    request_body(
        description = "The adapter",
        content(
            (AdapterForm = "multipart/form-data"),
            (String = "application/x-tar"),
            (String = "application/gzip"),
            (HubAdapter = "application/json", example = json!({"hub": "org/qwen3-gsm8k-lora"})),
        )
    ),
    responses(
        (status = 201, description = "Created", body = StoredAdapter, headers(("Location" = String, description = "Its path"))),
        (status = 200, description = "The adapter already exists", body = StoredAdapter),
    ),
)]
async fn create_adapter(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<NameQuery>,
    request: Request,
) -> Result<Response, Problem> {
    let headers = request.headers().clone();
    let sent = receive::receive(&state, &caller, query.name, request).await?;
    let name = sent.name.clone();
    let new = read(&state, &caller, sent).await?;
    let identity = format!("{}{}", new.row.sha256, name.as_deref().unwrap_or(""));
    let work = answer(state.clone(), new);
    once(&state, &caller, &headers, "POST /adapters", &identity, work).await
}

async fn answer(state: AppState, new: New) -> Result<Answer, Problem> {
    let (row, is_new) = store(&state, new).await?;
    let location = format!("/adapters/{}", row.id);
    Answer::new(if is_new { StatusCode::CREATED } else { StatusCode::OK }, Some(location), &StoredAdapter::from(row))
}

/// List adapters, newest first.
#[utoipa::path(get, path = "/adapters", tag = "Adapters", params(PageQuery),
    responses((status = 200, description = "A page", body = List<StoredAdapter>)))]
async fn list_adapters(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<PageQuery>,
) -> Result<Json<List<StoredAdapter>>, Problem> {
    let page = state.store.adapter_list(caller.sees(), query.after.as_deref(), query.limit()?).await?;
    Ok(Json(List::of(page, StoredAdapter::from)))
}

/// Get an adapter by its id.
#[utoipa::path(get, path = "/adapters/{id}", tag = "Adapters", params(("id" = AdapterId, Path, description = "The adapter")),
    responses((status = 200, description = "The adapter", body = StoredAdapter)))]
async fn get_stored_adapter(
    State(state): State<AppState>,
    Path(id): Path<AdapterId>,
) -> Result<Json<StoredAdapter>, Problem> {
    Ok(Json(state.store.adapter_get(id).await?.into()))
}

/// Delete an uploaded or downloaded adapter.
///
/// Jobs that started from the adapter keep its files.
#[utoipa::path(delete, path = "/adapters/{id}", tag = "Adapters", params(("id" = AdapterId, Path, description = "The adapter")),
    responses((status = 204, description = "Deleted")))]
async fn delete_adapter(State(state): State<AppState>, Path(id): Path<AdapterId>) -> Result<StatusCode, Problem> {
    state.store.adapter_delete(id).await?;
    state.files.in_background(move |files| files.adapter_remove(id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A received adapter whose files were checked, but which is not stored yet.
struct New {
    row: AdapterRow,
    dir: StagedDir,
}

/// Reads, checks and hashes the two adapter files in a staging directory.
async fn read(state: &AppState, caller: &Caller, sent: Sent) -> Result<New, Problem> {
    let Sent { name, dir, origin } = sent;
    let owner = caller.owner().to_owned();
    let read = state.files.in_background(move |_| {
        let card = adapter::read(dir.path());
        let files = FILES.map(|name| ModelFile { name: name.to_owned(), size_bytes: 0 });
        Ok(card.and_then(|card| Ok((card, hash_files(dir.path(), &files)?, dir))))
    });
    let (card, files, dir) = read.await?.map_err(|error| unusable(&error))?;
    let AdapterCard { config, num_parameters, .. } = card;
    let row = AdapterRow {
        id: AdapterId::new(),
        name,
        sha256: fingerprint_entries(&files),
        size_bytes: files.iter().map(|file| file.size_bytes).sum(),
        num_parameters,
        config,
        files,
        owner,
        created_at: clock_ms(),
        origin,
    };
    Ok(New { row, dir })
}

/// Stores the adapter's files, then its database row. The same files are stored once per owner. Returns the row, and
/// whether it is new.
async fn store(state: &AppState, new: New) -> Result<(AdapterRow, bool), Problem> {
    let New { row, dir } = new;
    let id = row.id;
    state.files.in_background(move |files| files.adapter_place(id, dir.path())).await?;
    let created = state.store.adapter_create(row).await;
    if !matches!(created, Ok((_, true))) {
        state.files.in_background(move |files| files.adapter_remove(id)).await?;
    }
    Ok(created?)
}

/// Converts an error about invalid adapter files into a problem document for the client.
pub(super) fn unusable(error: &ModelCardError) -> Problem {
    let detail = error.to_string();
    Problem::new(Code::InvalidAdapter, detail.clone()).item(format!("/{}", error.file), "invalid", detail)
}

/// Downloads the hub adapter that a job names and stores it like an upload.
pub(super) async fn import(state: &AppState, caller: &Caller, wanted: &AdapterPlan) -> Result<AdapterRow, Problem> {
    let (row, dir) = inspect_hub_adapter(state, caller, wanted).await?;
    Ok(store(state, New { row, dir }).await?.0)
}

/// Downloads the hub adapter that a job names without storing it.
pub(super) async fn inspect_hub_adapter(
    state: &AppState,
    caller: &Caller,
    wanted: &AdapterPlan,
) -> Result<(AdapterRow, StagedDir), Problem> {
    let hub = wanted.hub.clone().unwrap_or_default();
    let sent = fetch(state, caller, HubAdapter { hub, revision: wanted.revision.clone(), name: None }).await?;
    let New { row, dir } = read(state, caller, sent).await?;
    Ok((row, dir))
}

/// Downloads the two adapter files of a hub repository. Files of a commit are cached for a day.
async fn fetch(state: &AppState, caller: &Caller, wanted: HubAdapter) -> Result<Sent, Problem> {
    check_disk(state)?;
    let HubAdapter { hub, revision, name } = wanted;
    let repo = parse_repo("/hub", &hub, revision.as_deref())?;
    let hub = client(state, caller).await?;
    let info = hub.info(&repo).await.map_err(|error| of_adapter(problem(&error)))?;
    let mut files: Vec<RepoFile> = Vec::new();
    for name in FILES {
        let Some(file) = info.files.iter().find(|file| file.path == name) else {
            let detail = format!("{repo} has no {name}: the repository does not contain a PEFT adapter");
            return Err(Problem::new(Code::InvalidAdapter, detail.clone()).item("/hub", "invalid", detail));
        };
        files.push(file.clone());
    }
    if info.is_restricted
        && let Some(weights) = files.last()
    {
        // Files in the cache are served without a request, and they may have been opened by the token of another owner.
        let checked = hub.check_access(&repo, &info.commit, weights).await;
        checked.map_err(|error| of_adapter(problem(&error)))?;
    }
    let mut origin = json!({"hub": repo.id(), "revision": repo.revision(), "commit": info.commit});
    if let Some(name) = &info.renamed_to {
        origin["renamed_to"] = name.as_str().into();
    }
    let folder = state.downloads.sources(repo.id(), &info.commit);
    let RepoInfo { commit, is_restricted, is_private: _, files: _, renamed_to } = info;
    let plan = RepoPlan { repo, commit, is_restricted, files, config: Value::Null, renamed_to };
    let fetched = hub.download(&plan, &state.downloads.parts(), &folder, &Default::default()).await;
    fetched.map_err(|error| of_adapter(problem(&error)))?;
    let dir = state.files.in_background(move |files| {
        let dir = files.stage_dir()?;
        for name in FILES {
            receive::copy(&folder.join(name), &dir.path().join(name))?;
        }
        Ok(dir)
    });
    Ok(Sent { name, dir: dir.await?, origin: Some(origin) })
}

fn of_adapter(problem: Problem) -> Problem {
    match problem.code() {
        Code::InvalidModel => problem.with_code(Code::InvalidAdapter),
        _ => problem,
    }
}
