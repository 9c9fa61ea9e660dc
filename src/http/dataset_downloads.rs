//! Datasets of a hub whose download takes longer than a request: they are downloaded afterwards, and jobs wait for them.
//!
//! A job that waits has a provisional plan, because a plan depends on the rows. Once all of its datasets are stored, the job's document
//! is read again as if it had just been submitted, and the job gets its final plan.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::AppState;
use super::auth::Caller;
use super::dataset_sources::{Files, Found, convert_files, download, find, problem};
use super::datasets::store_rows;
use super::error::{Code, Problem};
use super::lookup::{Prepared, UseOfHub, prepare};
use super::models::hub::build;
use super::storage::check_room_on_disk;
use super::submit::read_spec;
use super::submit::stored::store_prompts;
use crate::config::HubTokenFor;
use crate::dataset::Recipe;
use crate::downloads::{Advance, Incomplete, Target, dataset_key};
use crate::error_text::with_causes;
use crate::hub::{HubError, Progress};
use crate::id::DatasetId;
use crate::spec::{FieldError, HubDataset, Plan, resolve};
use crate::store::{DatasetDownloadRow, DatasetRow, JobRow, NewDatasetDownload, StoreError, clock_ms};

/// How long a request waits for the files of a dataset. A download that takes longer continues after the request.
const WAIT: Duration = Duration::from_secs(5);
/// Attempts to plan a job while the server is busy, and the pause between two of them.
const MAX_PLAN_ATTEMPTS: u32 = 5;
const PLAN_RETRY_DELAY: Duration = Duration::from_secs(10);

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

/// Resumes the downloads that the previous server process did not finish, and plans the jobs whose datasets are stored. The hub
/// tokens of requests are not available, because they are never stored.
pub async fn resume(state: &AppState) -> Result<(), Problem> {
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
    tokio::spawn(plan_jobs(state.clone()));
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
        tokio::spawn(plan_jobs(self.state.clone()));
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

/// Plans all jobs that waited for datasets which are stored now.
async fn plan_jobs(state: AppState) {
    let rows = match state.store.jobs_to_plan().await {
        Ok(rows) => rows,
        Err(error) => {
            return tracing::error!(error = with_causes(&error), "jobs that wait for datasets could not be read");
        }
    };
    for row in rows {
        let planned = match plan_patiently(&state, &row).await {
            Ok(()) => Ok(()),
            Err(problem) => {
                tracing::warn!(job = %row.id, ?problem, "a job cannot start with the datasets that were downloaded");
                state.store.job_not_planned(row.id, problem.detail().to_owned(), clock_ms()).await
            }
        };
        if let Err(error) = planned {
            tracing::error!(error = with_causes(&error), "the plan of a job could not be stored");
        }
    }
}

/// Plans a job, and repeats this while the server is too busy.
async fn plan_patiently(state: &AppState, row: &JobRow) -> Result<(), Problem> {
    for _ in 1..MAX_PLAN_ATTEMPTS {
        match plan_job(state, row).await {
            Err(problem) if problem.code().retryable() => tokio::time::sleep(PLAN_RETRY_DELAY).await,
            planned => return planned,
        }
    }
    plan_job(state, row).await
}

/// Replaces the provisional plan of a job. Its document names stored datasets only, so nothing is downloaded here.
async fn plan_job(state: &AppState, row: &JobRow) -> Result<(), Problem> {
    let caller = Caller::on_behalf_of(&row.owner);
    let before = row.plan()?;
    let (mut spec, mut errors) = read_spec(state, &caller, state.store.job_document(row.id).await?).await?;
    spec.arithmetic = before.arithmetic;
    let prepared = prepare(state, &caller, &mut spec, None, UseOfHub::Register).await?;
    let Prepared { context, errors: found, warnings: _, train, eval, warm_up } = prepared;
    errors.extend(found);
    let resolved = resolve(&spec, &context).map(|resolution| resolution.plan);
    let mut plan = match resolved {
        Ok(plan) if errors.is_empty() => with_rewards_of(plan, before),
        Ok(_) => return Err(cannot_run(&errors)),
        Err(more) => {
            errors.extend(more);
            return Err(cannot_run(&errors));
        }
    };
    store_prompts(state, &row.owner, (train, eval, warm_up), &mut spec.redacted, &mut plan).await?;
    Ok(state.store.job_planned(row.id, &spec.redacted, &plan, clock_ms()).await?)
}

/// Takes the rewards of the provisional plan, which was made from the submitted document. The stored one has no secrets.
fn with_rewards_of(plan: Plan, before: Plan) -> Plan {
    let mut plan = Plan { rewards: before.rewards, ..plan };
    if let (Some(eval), Some(before)) = (&mut plan.eval, before.eval) {
        eval.rewards = before.rewards;
        if let (Some(guard), Some(before)) = (&mut eval.guard, before.guard) {
            guard.rewards = before.rewards;
        }
    }
    plan
}

fn cannot_run(errors: &[FieldError]) -> Problem {
    let listed: Vec<String> = errors.iter().map(|error| format!("{}: {}", error.pointer, error.detail)).collect();
    Problem::new(Code::InvalidSpec, format!("the job is not valid with its dataset: {}", listed.join("; ")))
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
                "the dataset '{}' could not be downloaded: {problem}; correct this, then send POST /datasets again",
                row.id
            )
        }
        None => format!("the dataset '{}' is still being downloaded: wait until its state is 'ready'", row.id),
    }
}
