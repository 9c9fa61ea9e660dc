//! Models on a hub: looks them up, reads their metadata, registers them; the files are downloaded afterwards.

use std::path::{Path as FsPath, PathBuf};

use serde_json::Value;

use super::super::AppState;
use super::super::auth::Caller;
use super::super::auth::models::{find, private_id, taken};
use super::super::error::{Code, Problem, shortened};
use super::super::reach;
use super::super::storage::check_room_for_model;
use super::{RENAMED_TO, read_card, record};
use crate::config::HubTokenFor;
use crate::error_text::with_causes;
use crate::hub::{FileHash, Hub, HubError, HubSettings, Repo, RepoKind, RepoPlan, find_cached, verify_cached};
use crate::modelcard::{self, ModelFile};
use crate::protocol::FileEntry;
use crate::reward::http_client::restricted_client;
use crate::store::background::spawn_blocking;
use crate::store::{HubOrigin, ModelRow, NewHubModel, StoreError, clock_ms};

/// The metadata of a model before its files are downloaded.
pub(in crate::http) struct Inspected {
    new: NewHubModel,
    /// Whether the files are in the operator's local cache of huggingface_hub. Otherwise they must be downloaded.
    is_here: bool,
    /// Number of bytes that must still be downloaded.
    missing_bytes: u64,
}

impl Inspected {
    /// Converts the metadata to a model row that is not stored in the database.
    pub(in crate::http) fn into_row(self) -> ModelRow {
        let NewHubModel { id, source, sha256, card, owner, is_private, origin, is_ready } = self.new;
        let state = if is_ready { "ready" } else { "downloading" };
        ModelRow {
            id,
            source,
            state: state.to_owned(),
            sha256,
            card,
            owner,
            is_private,
            created_at: clock_ms(),
            hub: Some(origin),
            problem: None,
        }
    }
}

/// Parses a hub repository's name and revision; `at` is the request field that contains the name.
pub(in crate::http) fn parse_repo(at: &str, repo: &str, revision: Option<&str>) -> Result<Repo, Problem> {
    let parsed = match revision {
        None => Repo::parse(RepoKind::Model, repo),
        Some(revision) => Repo::new(RepoKind::Model, repo, revision),
    };
    parsed.map_err(|error| {
        let detail = error.to_string();
        Problem::new(Code::InvalidBody, detail.clone()).item(at, "invalid", detail)
    })
}

/// A hub client with the caller's rights: the token of the request, else the server's own if the caller may use it.
pub(in crate::http) async fn client(state: &AppState, caller: &Caller) -> Result<Hub, Problem> {
    let environment = &state.config.hub.environment;
    let own = environment.token.clone().filter(|_| has_own_rights(state, caller));
    build(state, caller.hub_token().cloned().or(own)).await
}

/// A hub client with this token.
pub(in crate::http) async fn build(state: &AppState, token: Option<crate::hub::Token>) -> Result<Hub, Problem> {
    let environment = &state.config.hub.environment;
    let policy = reach::outgoing(state).await?;
    let client = restricted_client(&policy, state.config.hub.proxy.as_ref()).map_err(Problem::internal)?;
    let settings = HubSettings::new(&environment.endpoint, policy).map_err(|error| {
        let detail = format!(
            "the server may not connect to the hub at {} (HF_ENDPOINT): {error}; the operator can allow it with --allow-outgoing",
            environment.endpoint
        );
        Problem::new(Code::HubUnreachable, detail)
    })?;
    Ok(Hub::new(client, HubSettings { token, offline: environment.offline, ..settings }))
}

/// Returns the local cache of huggingface_hub, if the caller may use it.
pub(in crate::http) fn cache<'s>(state: &'s AppState, caller: &Caller) -> Option<&'s FsPath> {
    state.config.hub.environment.cache.as_deref().filter(|_| has_own_rights(state, caller))
}

/// Whether this caller may use the server's own token and the cache of its account.
pub(in crate::http) fn has_own_rights(state: &AppState, caller: &Caller) -> bool {
    match state.config.hub.token_for {
        HubTokenFor::Everyone => true,
        HubTokenFor::Admins => caller.sees().is_none(),
    }
}

/// Looks up a model on the hub or in the local cache; reads its small files and the headers of its weights.
pub(in crate::http) async fn inspect(
    state: &AppState,
    caller: &Caller,
    id: String,
    repo: &Repo,
) -> Result<Inspected, Problem> {
    let environment = &state.config.hub.environment;
    let cache = cache(state, caller);
    if environment.offline {
        let cached = cache.and_then(|cache| find_cached(cache, repo));
        let offline = || problem(&HubError::Offline { repo: repo.to_string() });
        let cached = cached.ok_or_else(offline)?;
        let origin = origin(repo, cached.commit, 0);
        return cached_model(Naming::shared(id), cached.path, origin).await;
    }
    let hub = client(state, caller).await?;
    let plan = hub.plan_model(repo).await.map_err(|error| problem(&error))?;
    // A token decided that the model may be read, so only the caller may see it.
    let naming = match plan.is_restricted && caller.hub_token().is_some() {
        true => Naming { id: private_id(id, caller), owner: caller.owner().to_owned(), is_private: true },
        false => Naming::shared(id),
    };
    let origin = origin(repo, plan.commit.clone(), plan.total_bytes());
    let at_commit = Repo::new(RepoKind::Model, repo.id(), &plan.commit).map_err(Problem::internal)?;
    if let Some(cached) = cache.and_then(|cache| find_cached(cache, &at_commit))
        && verify_cached(&cached).await.map_err(|error| problem(&error))?.is_none()
    {
        let mut inspected = cached_model(naming, cached.path, origin).await?;
        if let Some(name) = plan.renamed_to {
            inspected.new.card[RENAMED_TO] = name.into();
        }
        return Ok(inspected);
    }
    outline(state, &hub, naming, plan, origin).await
}

/// The id of a model, and who may use it.
struct Naming {
    id: String,
    owner: String,
    is_private: bool,
}

impl Naming {
    fn shared(id: String) -> Self {
        Naming { id, owner: String::new(), is_private: false }
    }
}

fn origin(repo: &Repo, commit: String, bytes_total: u64) -> HubOrigin {
    HubOrigin { repo: repo.id().to_owned(), revision: repo.revision().to_owned(), commit, bytes_total }
}

async fn cached_model(naming: Naming, folder: PathBuf, origin: HubOrigin) -> Result<Inspected, Problem> {
    let Naming { id, owner, is_private } = naming;
    let read = folder.clone();
    let described = spawn_blocking(move || describe(&read)).await.map_err(Problem::internal)?;
    let (card, sha256) = described.map_err(|detail| unusable(&id, &detail))?;
    let bytes_total = card["size_bytes"].as_u64().unwrap_or(origin.bytes_total);
    let (source, origin) = (folder.to_string_lossy().into_owned(), HubOrigin { bytes_total, ..origin });
    let new = NewHubModel { id, source, sha256, card, owner, is_private, origin, is_ready: true };
    Ok(Inspected { new, is_here: true, missing_bytes: 0 })
}

async fn outline(
    state: &AppState,
    hub: &Hub,
    naming: Naming,
    plan: RepoPlan,
    origin: HubOrigin,
) -> Result<Inspected, Problem> {
    let Naming { id, owner, is_private } = naming;
    let (folder, parts) = (state.downloads.outline(plan.repo.id(), &plan.commit), state.downloads.parts());
    hub.outline(&plan, &parts, &folder).await.map_err(|error| problem(&error))?;
    let source = state.downloads.folder(plan.repo.id(), &plan.commit);
    let missing_bytes = plan.missing_bytes(&parts, &source);
    let source = source.to_string_lossy().into_owned();
    let described = spawn_blocking(move || {
        let (card, files) = read_card(&folder, false).map_err(|problem| problem.detail().to_owned())?;
        let sha256 = announced_fingerprint(&folder, &files, &plan)?;
        // No stamp of the files yet, because they are not downloaded.
        let mut card = record(&card, "").map_err(|problem| problem.detail().to_owned())?;
        if let Some(name) = plan.renamed_to {
            card[RENAMED_TO] = name.into();
        }
        Ok::<_, String>((card, sha256))
    });
    let (card, sha256) = described.await.map_err(Problem::internal)?.map_err(|detail| unusable(&id, &detail))?;
    let new = NewHubModel { id, source, sha256, card, owner, is_private, origin, is_ready: false };
    Ok(Inspected { new, is_here: false, missing_bytes })
}

/// Returns the fingerprint that the complete model will have: from the weights' hashes that the hub announces, and from the
/// bytes of the small files, which are present.
fn announced_fingerprint(outline: &FsPath, files: &[ModelFile], plan: &RepoPlan) -> Result<String, String> {
    let mut hashes = Vec::with_capacity(files.len());
    for file in files {
        let announced = plan.files.iter().find(|known| known.path == file.name).map(|known| known.hash);
        let digest = match announced {
            Some(FileHash::Sha256(digest)) => digest,
            _ => {
                let read =
                    modelcard::hash_files(outline, std::slice::from_ref(file)).map_err(|error| error.to_string())?;
                read.first()
                    .map(|entry| entry.sha256)
                    .ok_or_else(|| format!("{}: the file cannot be read", file.name))?
            }
        };
        hashes.push(FileEntry { name: file.name.clone(), size_bytes: file.size_bytes, sha256: digest });
    }
    Ok(modelcard::fingerprint_entries(&hashes))
}

/// Reads the properties of the model in a folder, for the database, and its fingerprint. Blocking.
pub(in crate::http) fn describe(folder: &FsPath) -> Result<(Value, String), String> {
    let text = |problem: Problem| problem.detail().to_owned();
    let (card, files) = read_card(folder, false).map_err(text)?;
    let stamp = modelcard::stamp(folder, &files);
    let sha256 = modelcard::fingerprint_files(folder, &files).map_err(|error| error.to_string())?;
    Ok((record(&card, &stamp).map_err(text)?, sha256))
}

/// Registers a hub model, and starts its download unless its files are present. Returns the row, and whether it is new.
pub(in crate::http) async fn register(
    state: &AppState,
    caller: &Caller,
    id: Option<String>,
    repo: &Repo,
) -> Result<(ModelRow, bool), Problem> {
    let id = id.unwrap_or_else(|| repo.to_string());
    if let Some(row) = known(state, caller, &id, repo).await? {
        if row.state == "downloading" {
            state.downloads.start_model(client(state, caller).await?, &row, describe);
        }
        return Ok((row, false));
    }
    let Inspected { new, is_here, missing_bytes } = inspect(state, caller, id.clone(), repo).await?;
    let admission = state.downloads.admission().await;
    if !is_here {
        check_room_for_model(state, &new.source, new.origin.bytes_total, missing_bytes).await?;
    }
    let (row, is_new) = match state.store.hub_model_create(new, clock_ms()).await {
        Err(error @ StoreError::Exists { .. }) => return Err(taken(state, caller, &id, error.into()).await),
        created => created?,
    };
    drop(admission);
    if !is_here {
        state.downloads.start_model(client(state, caller).await?, &row, describe);
    }
    Ok((row, is_new))
}

/// Returns the caller's registered model of this id if it has the same repository and revision and its download did not fail. Such a
/// model stays at its commit.
async fn known(state: &AppState, caller: &Caller, id: &str, repo: &Repo) -> Result<Option<ModelRow>, Problem> {
    let Some(row) = find(state, caller, id).await? else { return Ok(None) };
    let conflict = |detail: String| Problem::new(Code::Conflict, detail.clone()).item("/id", "taken", detail);
    match &row.hub {
        Some(hub) if hub.repo == repo.id() && hub.revision == repo.revision() => {
            Ok(Some(row).filter(|row| row.state != "failed"))
        }
        Some(_) | None => Err(conflict(format!(
            "the id '{}' already belongs to another model: choose another id, or delete that model first",
            shortened(id)
        ))),
    }
}

/// Resumes the downloads that the previous server process did not finish. The hub tokens of their requests are not available,
/// because they are never stored.
pub(crate) async fn resume(state: &AppState) -> Result<(), Problem> {
    for row in state.store.hub_models_downloading().await? {
        let Some(hub) = &row.hub else { continue };
        let token = state.config.hub.environment.token.clone();
        if row.is_shared() || (row.owner.is_empty() && token.is_some()) {
            let client = build(state, token).await?;
            state.downloads.start_model(client, &row, describe);
            continue;
        }
        let problem = "the server was restarted and does not store the token of a request: send POST /models with \
                       x-hub-token again; downloaded data is kept for a day";
        state.store.hub_model_failed(&row.id, &hub.commit, problem, clock_ms()).await?;
    }
    Ok(())
}

fn unusable(id: &str, detail: &str) -> Problem {
    let detail = format!("{} cannot be used: {detail}", shortened(id));
    Problem::new(Code::InvalidModel, detail.clone()).item("/hub", "unusable_model", detail)
}

/// Converts an error of the hub into a problem document for the client.
pub(in crate::http) fn problem(error: &HubError) -> Problem {
    let detail = error.to_string();
    let (code, item) = match error {
        error if error.is_transient() => (Code::HubUnreachable, "hub_unreachable"),
        HubError::Offline { .. } => (Code::InvalidModel, "hub_offline"),
        HubError::Gated { .. } => (Code::InvalidModel, "gated"),
        HubError::NoRepository { .. } => (Code::InvalidModel, "unknown_repository"),
        HubError::WrongKind { .. } => (Code::InvalidModel, "wrong_kind"),
        HubError::BadToken => (Code::InvalidModel, "bad_token"),
        HubError::NoRevision { .. } => (Code::InvalidModel, "unknown_revision"),
        HubError::NoSpace { .. } => (Code::StorageFull, "too_large"),
        HubError::Disk { .. } => return Problem::internal(with_causes(error)),
        HubError::Unusable { .. } => (Code::InvalidModel, "unusable_model"),
        _ => (Code::InvalidModel, "hub_refused"),
    };
    Problem::new(code, detail.clone()).item("/hub", item, detail)
}
