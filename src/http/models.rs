//! Models: an id for a directory on the server. The directory is read and checked when it is registered.

pub mod card;
pub mod hub;

use std::path::{Path as FsPath, PathBuf};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use self::card::Card;
use super::AppState;
use super::auth::Caller;
use super::auth::models::{check_id, find, taken};
use super::error::{Code, Problem, ProblemBody, shortened};
use super::extract::{HashedJson, Json, Path, Query};
use super::idempotency::{Answer, once};
use super::list::{List, PageQuery, Time};
use super::reach;
use super::runtimes::known_runtimes;
use crate::modelcard::classifier::is_classifier;
use crate::modelcard::text::{Text, TextError};
use crate::modelcard::{self, ClassifierCard, ForeignCard, ModelCardError, ModelFile};
use crate::spec::RuntimeFacts;
use crate::store::background::spawn_blocking;
use crate::store::{ModelRow, NewModel, clock_ms};

/// The JSON key under which a model's database record stores the stamp (sizes and modification times) of its files.
const STAMP: &str = "stamp";
/// The JSON key under which a model's database record stores the new name of a renamed repository.
pub(super) const RENAMED_TO: &str = "renamed_to";

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(create_model, list_models)).routes(routes!(get_model, delete_model))
}

/// A model to register.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct CreateModel {
    /// The id that jobs use: parts of letters, digits, `.`, `_`, `-`, joined by `/`.
    #[schema(
        example = "Qwen/Qwen3-0.6B",
        min_length = 1,
        max_length = 200,
        pattern = "^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$"
    )]
    /// Required with `source`. With `hub` the default is the repository and its revision.
    id: Option<String>,
    /// Absolute path of the model directory on the server: config.json, *.safetensors, tokenizer.json. Set either this or `hub`.
    #[schema(example = "/models/Qwen3-0.6B", min_length = 1)]
    source: Option<String>,
    /// Hub repository: `org/name`, or `org/name@revision`. Its files are downloaded.
    #[schema(example = "Qwen/Qwen3-0.6B")]
    hub: Option<String>,
    /// Branch, tag or commit of the repository. Default: `main`. The model is pinned to the current commit.
    #[schema(example = "main")]
    revision: Option<String>,
}

/// A model that jobs can use.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Model {
    /// The id that jobs use.
    pub id: String,
    /// Current state: `ready`; for hub models also `downloading` and `failed`.
    pub state: String,
    /// Path of the model directory on the server.
    pub source: String,
    /// SHA-256 over config, weights, tokenizer and chat template, in lower-case hex.
    pub sha256: String,
    /// Properties of the model; null if the server's record cannot be read.
    pub card: Option<Card>,
    /// Owner of the key that registered the model; empty = shared by all owners, or with `private` the operator's.
    pub owner: String,
    /// Whether a request's hub token opened the model, so that only its owner sees it.
    pub private: bool,
    /// When the model was first registered.
    pub created_at: Time,
    /// Hub repository of the model; absent for a local directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hub: Option<String>,
    /// The name under which the hub has the repository now, if it was renamed: use this name from now on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renamed_to: Option<String>,
    /// The requested branch, tag or commit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// The commit that the model is pinned to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Hub models: number of bytes downloaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_done: Option<u64>,
    /// Hub models: total number of bytes of all files.
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

impl Model {
    /// Converts a model's database row to its JSON form in the API, with the progress of its download.
    fn of(state: &AppState, row: ModelRow) -> Self {
        let ModelRow { id, source, state: row_state, sha256, card, owner, is_private, created_at, hub, problem } = row;
        let renamed_to = card[RENAMED_TO].as_str().map(str::to_owned);
        let card = serde_json::from_value(card).ok();
        let advance = state.downloads.advance(&id).filter(|_| row_state == "downloading");
        let bytes_total = hub.as_ref().map(|hub| hub.bytes_total);
        let bytes_done = match row_state.as_str() {
            "ready" => bytes_total,
            _ => bytes_total.map(|_| advance.map_or(0, |advance| advance.bytes_done)),
        };
        let (hub, revision, commit) = match hub {
            Some(hub) => (Some(hub.repo), Some(hub.revision), Some(hub.commit)),
            None => (None, None, None),
        };
        Self {
            id,
            state: row_state,
            source,
            sha256,
            card,
            owner,
            private: is_private,
            created_at: Time(created_at),
            hub,
            renamed_to,
            revision,
            commit,
            bytes_done,
            bytes_total,
            bytes_per_second: advance.and_then(|advance| advance.bytes_per_second),
            eta_s: advance.and_then(|advance| advance.eta_s),
            problem,
        }
    }
}

/// Register or download a model.
///
/// Accepts a causal language model, to be trained, or a sequence-classification checkpoint, to score as a `reward_model`. A
/// directory (`source`) is read and checked during the request: config, the headers of the weights, tokenizer, chat template; every
/// byte is hashed. The same id and source again read it once more (200). A model that an admin registers is shared by all owners;
/// any other belongs to the key's owner.
///
/// A hub repository (`hub`) is looked up and checked during the request, and downloaded afterwards (202, state `downloading`): only
/// safetensors, tokenizer and templates; every byte is verified. Jobs may refer to the model meanwhile and start when it is
/// complete. Send a hub token for this request in the header `x-hub-token`. A model that can be read only with this token is
/// `private`: visible only to its owner, under an id that ends with `~` and a mark of the owner; the owner's requests may omit both.
#[utoipa::path(post, path = "/models", tag = "Models", request_body = CreateModel,
    params(("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key and body gets the same answer for 24 hours"),
        ("x-hub-token" = Option<String>, Header, description = "A hub token for this download; the server does not store it")),
    responses(
        (status = 201, description = "Registered", body = Model, headers(("Location" = String, description = "Its path"))),
        (status = 202, description = "The server is downloading the model from the hub", body = Model, headers(("Location" = String, description = "Its path"))),
        (status = 200, description = "The model is already registered; the server has read its files again", body = Model),
        (status = 409, description = "The id already belongs to another model", body = ProblemBody),
        (status = 422, description = "The model cannot be used", body = ProblemBody),
        (status = 502, description = "The hub cannot be reached", body = ProblemBody),
        (status = 507, description = "The server has not enough disk space", body = ProblemBody),
    ))]
async fn create_model(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    HashedJson(body, sha256): HashedJson<CreateModel>,
) -> Result<Response, Problem> {
    let work = create(state.clone(), caller.clone(), body);
    once(&state, &caller, &headers, "POST /models", &sha256, work).await
}

async fn create(state: AppState, caller: Caller, body: CreateModel) -> Result<Answer, Problem> {
    let wrong = |at: &str, code: &str, detail: &str| Problem::new(Code::InvalidBody, detail).item(at, code, detail);
    let CreateModel { id, source, hub, revision } = body;
    if let Some(id) = &id {
        check_id(id)?;
    }
    let (row, is_new) = match (source, hub) {
        (Some(_), Some(_)) => {
            return Err(wrong("/hub", "conflict", "set source (a directory) or hub (a repository), not both"));
        }
        (None, None) => {
            let detail = "set hub (org/name) or source (a directory on the server)";
            return Err(wrong("/hub", "required", detail).item("/source", "required", detail));
        }
        (Some(_), None) if revision.is_some() => {
            return Err(wrong(
                "/revision",
                "conflict",
                "a model in a directory has no revision: omit 'revision', or set hub",
            ));
        }
        (Some(source), None) => {
            let id =
                id.ok_or_else(|| wrong("/id", "required", "a model in a directory needs an id, such as org/name"))?;
            let roots = reach::model_roots(&state).await?;
            // A model that an admin registers is shared by all owners.
            let owner = caller.sees().unwrap_or_default().to_owned();
            match register(&state, owner, id.clone(), source, roots).await {
                Err(problem) if problem.code() == Code::Conflict => {
                    return Err(taken(&state, &caller, &id, problem).await);
                }
                registered => registered?,
            }
        }
        (None, Some(repo)) => {
            let repo = hub::parse_repo("/hub", &repo, revision.as_deref())?;
            hub::register(&state, &caller, id, &repo).await?
        }
    };
    let status = match row.state.as_str() {
        "downloading" => StatusCode::ACCEPTED,
        _ if is_new => StatusCode::CREATED,
        _ => StatusCode::OK,
    };
    let location = format!("/models/{}", row.id.replace('/', "%2F"));
    Answer::new(status, Some(location), &Model::of(&state, row))
}

/// Reads and checks a model's directory, which must be below `roots` if there are any, and creates or updates its database
/// record. Returns the row, and whether it is new.
pub(super) async fn register(
    state: &AppState,
    owner: String,
    id: String,
    source: String,
    roots: Option<Vec<PathBuf>>,
) -> Result<(ModelRow, bool), Problem> {
    let runtimes = known_runtimes(state).await?;
    let has_trl = runtimes.iter().any(RuntimeFacts::is_usable);
    let path = source.clone();
    let read = move || -> Result<(Value, String), Problem> {
        let path = locate(&path, roots.as_deref())?;
        if let Some(roots) = &roots {
            check_links(&path, roots)?;
        }
        let (card, files) = read_card(&path, has_trl)?;
        // The stamp of sizes and modification times is taken before the bytes are read, so that a change of a file in the
        // meantime is noticed later.
        let stamp = modelcard::stamp(&path, &files);
        let sha256 = modelcard::fingerprint_files(&path, &files).map_err(unusable)?;
        Ok((record(&card, &stamp)?, sha256))
    };
    let (card, sha256) = spawn_blocking(read).await.map_err(Problem::internal)??;
    Ok(state.store.model_create(NewModel { id, source, sha256, card, owner }, clock_ms()).await?)
}

/// Reads and checks a model's folder, except for the bytes of its tensors. A model of an architecture that rlood's own engine does not
/// have is accepted if TRL can train it. Blocking.
fn read_card(path: &FsPath, has_trl: bool) -> Result<(Card, Vec<ModelFile>), Problem> {
    let is_classifier = is_classifier(path);
    let read = match is_classifier {
        true => {
            let card = ClassifierCard::read(path).map_err(unusable)?;
            (Card::of_classifier(&card), card.files)
        }
        false => match (modelcard::read(path), ForeignCard::read(path)) {
            (Ok(card), _) => (Card::of(&card), card.files),
            (Err(_), Ok(Some(card))) if has_trl => (Card::of_foreign(&card), card.files),
            (Err(error), Ok(Some(_))) => {
                let ModelCardError { file, detail } = error;
                let remedy = "a worker with the runtime trl could train this model (`rlood runtime install trl`)";
                return Err(unusable(ModelCardError { file, detail: format!("{detail}; {remedy}") }));
            }
            (Err(error), _) => return Err(unusable(error)),
        },
    };
    let text = if is_classifier { Text::load_classifier(path) } else { Text::load(path) };
    text.map_err(unusable_text)?;
    Ok(read)
}

/// Returns the canonical path of a model's directory, if it exists and may be used.
fn locate(source: &str, roots: Option<&[PathBuf]>) -> Result<PathBuf, Problem> {
    let refuse = |code: &str, detail: String| {
        Err(Problem::new(Code::InvalidModel, detail.clone()).item("/source", code, detail))
    };
    if source.contains("://") {
        let detail =
            "only an absolute path on the server is supported: download the model, then register its directory";
        return refuse("unsupported_source", detail.to_owned());
    }
    let path = FsPath::new(source);
    if !path.is_absolute() || source.contains('\0') {
        return refuse("not_absolute", format!("the source '{}' is not an absolute path", shortened(source)));
    }
    // Symbolic links are resolved before the path is compared with `--model-root`. For a path outside, the error does not
    // reveal whether it exists.
    let canonical = path.canonicalize();
    if let Some(roots) = roots
        && !canonical.as_ref().is_ok_and(|path| roots.iter().any(|root| path.starts_with(root)))
    {
        let detail = "the path does not exist under a --model-root of the server (RLOOD_MODEL_ROOT); \
                      with an API key, models must be below it";
        return refuse("outside_model_root", detail.to_owned());
    }
    match canonical {
        Ok(path) if path.is_dir() => Ok(path),
        Ok(_) => refuse("not_a_directory", format!("'{}' is not a directory", shortened(source))),
        Err(_) => refuse(
            "not_found",
            format!("the directory '{}' does not exist on the server or is not readable", shortened(source)),
        ),
    }
}

/// Refuses a model file that is a symbolic link out of `--model-root`. Links that stay inside are allowed, because the caches
/// of Hugging Face consist of links to `../../blobs`.
fn check_links(dir: &FsPath, roots: &[PathBuf]) -> Result<(), Problem> {
    let unreadable = |error: std::io::Error| refused(format!("the directory cannot be read: {error}"));
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        // A dangling link is skipped here and counts as a missing file later. Subdirectories are never read.
        let Ok(target) = entry.path().canonicalize() else { continue };
        if !target.is_dir() && !roots.iter().any(|root| target.starts_with(root)) {
            let detail = format!(
                "{} is a link to a file outside every --model-root of the server (RLOOD_MODEL_ROOT): \
                 put the file itself into the directory",
                shortened(&entry.file_name().to_string_lossy())
            );
            return Err(Problem::new(Code::InvalidModel, detail.clone()).item("/source", "outside_model_root", detail));
        }
    }
    Ok(())
}

fn unusable(error: ModelCardError) -> Problem {
    let ModelCardError { file, detail } = error;
    let file = file.rsplit('/').next().unwrap_or("").to_owned();
    refused(format!("{file}: {detail}"))
}

/// The problem for a tokenizer or chat template that cannot be loaded.
fn unusable_text(error: TextError) -> Problem {
    match error {
        TextError::Files(error) => unusable(error),
        other => refused(other.to_string()),
    }
}

fn refused(detail: String) -> Problem {
    Problem::new(Code::InvalidModel, detail.clone()).item("/source", "unusable_model", detail)
}

/// Builds the record that the database keeps of a model: the properties that clients see, and the stamp of its files, which
/// clients do not see.
fn record(card: &Card, stamp: &str) -> Result<Value, Problem> {
    let mut record = serde_json::to_value(card).map_err(Problem::internal)?;
    record[STAMP] = stamp.into();
    Ok(record)
}

/// Whether a model's files are unchanged since registration. Compares sizes and times, and reads every byte again only
/// if these differ. Blocking.
///
/// # Errors
/// Fails when the files cannot be read.
pub(super) fn is_as_registered(row: &ModelRow, files: &[ModelFile]) -> Result<bool, ModelCardError> {
    let dir = FsPath::new(&row.source);
    let known = row.card.get(STAMP).and_then(Value::as_str);
    Ok(known == Some(modelcard::stamp(dir, files).as_str()) || modelcard::fingerprint_files(dir, files)? == row.sha256)
}

/// List models, newest first.
#[utoipa::path(get, path = "/models", tag = "Models", params(PageQuery),
    responses((status = 200, description = "A page", body = List<Model>)))]
async fn list_models(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<PageQuery>,
) -> Result<Json<List<Model>>, Problem> {
    let page = state.store.model_list(caller.sees(), query.after.as_deref(), query.limit()?).await?;
    Ok(Json(List::of(page, |row| Model::of(&state, row))))
}

/// Get a model by its id.
#[utoipa::path(get, path = "/models/{id}", tag = "Models",
    params(("id" = String, Path, description = "The model; a slash in it is written %2F")),
    responses((status = 200, description = "The model", body = Model)))]
async fn get_model(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Model>, Problem> {
    Ok(Json(Model::of(&state, find_or_404(&state, &caller, &id).await?)))
}

async fn find_or_404(state: &AppState, caller: &Caller, id: &str) -> Result<ModelRow, Problem> {
    find(state, caller, id).await?.ok_or_else(|| Problem::not_found("model", id))
}

/// Delete a model from the server.
///
/// A registered directory is not touched. For a hub model the download stops and its files are removed; partial files are kept for
/// a day. Refused (409) while an unfinished job needs the model.
#[utoipa::path(delete, path = "/models/{id}", tag = "Models",
    params(("id" = String, Path, description = "The model; a slash in it is written %2F")),
    responses((status = 204, description = "Forgotten")))]
async fn delete_model(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<StatusCode, Problem> {
    let row = find_or_404(&state, &caller, &id).await?;
    state.store.model_delete(&row.id).await?;
    state.downloads.cancel(&row.id).await;
    state.downloads.remove_files(&row).await.map_err(Problem::internal)?;
    Ok(StatusCode::NO_CONTENT)
}
