//! Datasets of a hub whose download takes longer than a request: they are downloaded afterwards, and jobs wait for them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::AppState;
use super::auth::Caller;
use super::dataset_sources::{Files, Found, convert_files, download, find, problem};
use super::error::{Code, Problem};
use super::models::hub::build;
use super::named_models::UseOfHub;
use super::rows::store_rows;
use super::storage::check_room_on_disk;
use crate::config::HubTokenFor;
use crate::dataset::Recipe;
use crate::downloads::{Advance, Incomplete, Target, dataset_key};
use crate::hub::{HubError, Progress};
use crate::id::DatasetId;
use crate::spec::HubDataset;
use crate::store::{DatasetDownloadRow, DatasetRow, NewDatasetDownload, StoreError, clock_ms};

/// How long a request waits for the files of a dataset. A download that takes longer continues after the request.
const WAIT: Duration = Duration::from_secs(5);
/// How the rows of a dataset are converted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Conversion {
    pub(super) recipe: Recipe,
    /// Whether a prompt that is plain text becomes a chat message, unless the recipe decides it.
    pub(super) chat_default: bool,
    /// Whether each row must have an answer.
    pub(super) answers: bool,
}

/// A dataset of a hub after a request for it.
pub(super) enum Fetched {
    /// All files are here.
    Files(Box<Files>),
    /// The download continues after the request; in a validation it does not.
    Downloading(Box<DatasetDownloadRow>),
    /// The rows were stored before.
    Stored(Box<DatasetRow>),
}

/// Looks up a dataset on the hub, and downloads its files if that takes a few seconds at most. Otherwise the download continues in the
/// background, except in a validation, which starts none.
pub(super) async fn fetch(
    state: &AppState,
    caller: &Caller,
    (name, wanted): (Option<String>, &HubDataset),
    conversion: &Conversion,
    use_of_hub: UseOfHub,
) -> Result<Fetched, Problem> {
    let found = find(state, caller, wanted).await?;
    let stored_as = serde_json::to_value(conversion).map_err(Problem::internal)?;
    let known = state.store.dataset_download_of(caller.owner(), &found.origin, &stored_as).await?;
    match known {
        Some(known) if known.state == "downloading" => {
            if use_of_hub == UseOfHub::Register {
                start(state, found, known.clone(), conversion.clone());
            }
            return Ok(Fetched::Downloading(Box::new(known)));
        }
        // The new request replaces the failed download. No job waits for it.
        Some(known) if known.state == "failed" && use_of_hub == UseOfHub::Register => {
            state.store.dataset_delete(known.id).await?;
        }
        Some(_) | None => {}
    }
    // The partial files of a download that is dropped here stay, and the next one continues them.
    if let Ok(files) = tokio::time::timeout(WAIT, download(state, found.clone(), &Arc::default())).await {
        return Ok(Fetched::Files(Box::new(files.map_err(|error| problem(&error))?)));
    }
    let new = NewDatasetDownload {
        id: DatasetId::new(),
        name,
        owner: caller.owner().to_owned(),
        origin: found.origin.clone(),
        conversion: stored_as,
        is_restricted: found.plan.is_restricted,
        bytes_total: found.plan.total_bytes(),
    };
    if use_of_hub == UseOfHub::Inspect {
        return Ok(Fetched::Downloading(Box::new(unstored(new))));
    }
    let row = {
        let _admission = state.downloads.admission().await;
        let folder = state.downloads.sources(found.plan.repo.id(), &found.plan.commit);
        let missing_bytes = found.plan.missing_bytes(&state.downloads.parts(), &folder);
        check_room_on_disk(state, state.downloads.pending("").await?, "dataset", missing_bytes)?;
        state.store.dataset_download_create(new, clock_ms()).await?
    };
    if row.state == "ready" {
        return Ok(Fetched::Stored(Box::new(state.store.dataset_get(row.id).await?)));
    }
    start(state, found, row.clone(), conversion.clone());
    Ok(Fetched::Downloading(Box::new(row)))
}

/// The row of a download that is not stored in the database.
fn unstored(new: NewDatasetDownload) -> DatasetDownloadRow {
    let NewDatasetDownload { id, name, owner, origin, conversion, is_restricted, bytes_total } = new;
    let (state, created_at) = ("downloading".to_owned(), clock_ms());
    DatasetDownloadRow {
        id,
        name,
        owner,
        state,
        origin,
        conversion,
        is_restricted,
        bytes_total,
        problem: None,
        dataset: None,
        created_at,
    }
}

fn start(state: &AppState, found: Found, row: DatasetDownloadRow, conversion: Conversion) {
    state.downloads.start(DatasetTarget { state: state.clone(), found, row, conversion, files: Mutex::default() });
}

/// Resumes the downloads that the previous server process did not finish. The hub tokens of requests are not available, because they
/// are never stored.
pub(crate) async fn resume(state: &AppState) -> Result<(), Problem> {
    let hub = &state.config.hub;
    for row in state.store.dataset_downloads_running().await? {
        let has_own_rights = hub.token_for == HubTokenFor::Everyone || row.owner.is_empty();
        let token = hub.environment.token.clone().filter(|_| has_own_rights);
        let cache = hub.environment.cache.as_deref().filter(|_| has_own_rights);
        let conversion = serde_json::from_value(row.conversion.clone());
        let problem = if row.is_restricted && token.is_none() {
            "the server was restarted and does not store the token of a request: send POST /datasets with x-hub-token again; \
             downloaded data is kept for a day"
        } else {
            let client = build(state, token).await?;
            let found = Found::of_origin(client, cache, &row.origin, row.is_restricted);
            match found.zip(conversion.ok()) {
                Some((found, conversion)) => {
                    start(state, found, row, conversion);
                    continue;
                }
                None => "the record of this download cannot be read by this version: send POST /datasets again",
            }
        };
        state.store.dataset_download_failed(row.id, problem, clock_ms()).await?;
    }
    Ok(())
}

/// The download of a dataset.
struct DatasetTarget {
    state: AppState,
    found: Found,
    row: DatasetDownloadRow,
    conversion: Conversion,
    /// The files, once they are complete.
    files: Mutex<Option<Files>>,
}

impl Target for DatasetTarget {
    fn key(&self) -> String {
        dataset_key(self.row.id)
    }

    fn size(&self) -> (String, u64) {
        (self.found.plan.commit.clone(), self.row.bytes_total)
    }

    async fn fetch(&self, progress: &Arc<Progress>) -> Result<(), HubError> {
        let files = download(&self.state, self.found.clone(), progress).await?;
        *self.files.lock().unwrap_or_else(PoisonError::into_inner) = Some(files);
        Ok(())
    }

    async fn complete(&self) -> Result<(), Incomplete> {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(files) = files else { return Err(Incomplete::Unusable("its files are missing".to_owned())) };
        let Conversion { recipe, chat_default, answers } = self.conversion.clone();
        let unusable = |problem: Problem| Incomplete::Unusable(problem.detail().to_owned());
        let rows = convert_files(&self.state, files, recipe, (chat_default, answers)).await.map_err(unusable)?;
        let (summary, staged, origin) = rows;
        let rows = (summary, staged, Some(origin));
        let named = (self.row.id, self.row.name.clone());
        let (stored, _) = store_rows(&self.state, &self.row.owner, named, rows).await.map_err(unusable)?;
        let store = &self.state.store;
        store.dataset_download_ready(self.row.id, stored.id, clock_ms()).await.map_err(Incomplete::Store)?;
        self.state.downloads.dataset_stored().notify_one();
        Ok(())
    }

    async fn report(&self, advance: Advance) -> Result<(), StoreError> {
        let Advance { bytes_done, bytes_per_second, eta_s } = advance;
        let progress = json!({"dataset": self.row.id, "bytes_done": bytes_done, "bytes_total": self.row.bytes_total,
                              "bytes_per_second": bytes_per_second, "eta_s": eta_s});
        let store = &self.state.store;
        store.dataset_download_event(self.row.id, "dataset.downloading", &progress, clock_ms()).await
    }

    async fn fail(&self, problem: &str) -> Result<(), StoreError> {
        self.state.store.dataset_download_failed(self.row.id, problem, clock_ms()).await
    }
}

/// Reads a dataset that is stored. A dataset that is being downloaded is a conflict.
pub(super) async fn stored(state: &AppState, id: DatasetId) -> Result<DatasetRow, Problem> {
    match state.store.dataset_get(id).await {
        Err(StoreError::NotFound { .. }) => match state.store.dataset_download_get(id).await? {
            Some(row) => Err(Problem::new(Code::Conflict, not_stored(&row))),
            None => Err(Problem::not_found("dataset", id)),
        },
        row => Ok(row?),
    }
}

/// Says why a dataset has no rows yet, and what to do.
pub(super) fn not_stored(row: &DatasetDownloadRow) -> String {
    match &row.problem {
        Some(problem) => {
            format!(
                "the dataset '{}' could not be imported from the hub: {problem}; correct this, then send POST /datasets again",
                row.id
            )
        }
        None => format!("the dataset '{}' is still being downloaded: wait until its state is 'ready'", row.id),
    }
}
