//! Warm starts: the checkpoint that a job begins with, looked up, and its files kept for the job.

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem};
use crate::files::FilesError;
use crate::id::JobId;
use crate::protocol::FileEntry;
use crate::spec::{FieldError, JobSpec, Plan, WarmStartFacts};
use crate::store::{CheckpointRow, StoreError};

const AT: &str = "/warm_start/checkpoint";
/// What of a checkpoint makes the weights: an adapter, or a whole model.
const ADAPTER: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];
const MODEL: [&str; 1] = ["model.safetensors"];

/// The facts of the checkpoint a job names; an error when there is none.
pub(super) async fn find(
    state: &AppState,
    caller: &Caller,
    spec: &JobSpec,
    errors: &mut Vec<FieldError>,
) -> Result<Option<WarmStartFacts>, Problem> {
    let Some(warm_start) = &spec.warm_start else { return Ok(None) };
    let found = match state.store.checkpoint_get(warm_start.checkpoint).await {
        Ok(row) => Ok(state.store.job_get(row.job).await?),
        Err(error) => Err(error),
    };
    match found {
        Ok(job) if caller.may_see(&job.owner) => Ok(Some(facts(&job.plan()?))),
        Ok(_) | Err(StoreError::NotFound { .. }) => {
            let detail = format!(
                "there is no checkpoint '{}' (any more): GET /jobs/{{id}}/checkpoints lists those of a job; rotated ones are gone",
                warm_start.checkpoint
            );
            errors.push(FieldError::new(AT, "unknown_checkpoint", detail));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// What a plan needs to know of a checkpoint of this job.
pub(super) fn facts(plan: &Plan) -> WarmStartFacts {
    WarmStartFacts { model_sha256: plan.model.sha256.clone(), model_id: plan.model.id.clone(), lora: plan.lora.clone() }
}

/// Keeps the files of a plan's warm start for a job that is about to be created.
pub(super) async fn keep(state: &AppState, job: JobId, plan: &Plan) -> Result<(), Problem> {
    let Some(warm_start) = &plan.warm_start else { return Ok(()) };
    let row = state.store.checkpoint_get(warm_start.checkpoint).await?;
    let CheckpointRow { job: parent, step, attempt, files, .. } = row;
    let wanted: &[&str] = if plan.lora.is_some() { &ADAPTER } else { &MODEL };
    let files: Vec<FileEntry> = files.into_iter().filter(|file| wanted.contains(&file.name.as_str())).collect();
    if files.len() != wanted.len() {
        return Err(Problem::new(Code::InvalidSpec, format!("the checkpoint has no {}", wanted.join(", "))));
    }
    blocking(state, move |data| data.initial_keep(job, &data.checkpoint_dir(parent, step, attempt), &files)).await
}

/// Takes over the initial files of the job that a new one is made from.
pub(super) async fn keep_of_parent(state: &AppState, parent: JobId, job: JobId) -> Result<(), Problem> {
    blocking(state, move |data| data.initial_copy(parent, job)).await
}

/// Removes what was kept for a job that was not created after all.
pub(super) async fn forget(state: &AppState, job: JobId) {
    if let Err(problem) = blocking(state, move |data| data.job_remove(job)).await {
        tracing::warn!(%job, ?problem, "files of a job that was not created are left; the next start removes them");
    }
}

pub(super) async fn blocking<T: Send + 'static>(
    state: &AppState,
    work: impl FnOnce(&crate::files::DataDir) -> Result<T, FilesError> + Send + 'static,
) -> Result<T, Problem> {
    let files = state.files.clone();
    Ok(tokio::task::spawn_blocking(move || work(&files)).await.map_err(Problem::internal)??)
}
