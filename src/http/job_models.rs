//! The models of a job: the checkpoint that a request selects, and the base model with the files that the job trained on.

use super::AppState;
use super::artifacts::no_checkpoint;
use super::auth::Caller;
use super::error::{Code, Problem};
use super::jobs::invalid;
use super::models::is_as_registered;
use crate::modelcard;
use crate::spec::{CheckpointChoice, FieldError, Plan};
use crate::store::background::spawn_blocking;
use crate::store::{CheckpointRow, JobRow, ModelRow, StoreError};

/// Finds the checkpoint that a request selects.
pub(super) async fn find(state: &AppState, job: &JobRow, choice: CheckpointChoice) -> Result<CheckpointRow, Problem> {
    let found = match choice {
        CheckpointChoice::Id(id) => match state.store.checkpoint_get(id).await {
            Ok(row) if row.job == job.id => Some(row),
            Ok(_) | Err(StoreError::NotFound { .. }) => {
                let detail =
                    format!("the job has no checkpoint '{id}': GET /jobs/{}/checkpoints lists its checkpoints", job.id);
                return Err(invalid(
                    Code::InvalidBody,
                    vec![FieldError::new("/checkpoint", "unknown_checkpoint", detail)],
                ));
            }
            Err(error) => return Err(error.into()),
        },
        CheckpointChoice::Result => state.store.checkpoint_result(job.id, job.ending.as_ref()).await?,
        CheckpointChoice::Last => state.store.checkpoint_latest(job.id).await?,
        CheckpointChoice::Best => state.store.checkpoint_best(job.id).await?,
        CheckpointChoice::Step(step) => {
            let rows = state.store.checkpoint_list(job.id).await?;
            let mut steps: Vec<u64> = rows.iter().map(|row| row.step).collect();
            steps.sort_unstable();
            let found = rows.into_iter().find(|row| row.step == step);
            if found.is_none() && !steps.is_empty() {
                let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
                let detail = format!("the job has no checkpoint of step {step}; available steps: {}", steps.join(", "));
                return Err(invalid(
                    Code::InvalidBody,
                    vec![FieldError::new("/checkpoint", "unknown_checkpoint", detail)],
                ));
            }
            found
        }
    };
    found.ok_or_else(|| no_checkpoint(state, job))
}

/// Returns the job's base model, if its files are the same as when the job was accepted.
pub(super) async fn find_model(state: &AppState, caller: &Caller, plan: &Plan) -> Result<ModelRow, Problem> {
    let id = plan.model.id.clone();
    let refused = |detail: String| Problem::new(Code::InvalidModel, detail);
    let row = match state.store.model_get(&id).await {
        Ok(row) if caller.may_use_model(&row) => row,
        Ok(_) | Err(StoreError::NotFound { .. }) => {
            return Err(refused(format!(
                "the job's model '{id}' is no longer registered: register it again with POST /models"
            )));
        }
        Err(error) => return Err(error.into()),
    };
    unchanged(row, plan.model.sha256.clone()).await
}

/// Returns the row of a model if the hash of its files is unchanged.
pub(super) async fn unchanged(row: ModelRow, sha256: String) -> Result<ModelRow, Problem> {
    let refused = |detail: String| Problem::new(Code::InvalidModel, detail);
    let check = move || {
        // The error names only the model, because not every caller may see its path on the server.
        let unusable = |error: &dyn std::fmt::Display| {
            format!("the model '{}' cannot be used: {}", row.id, error.to_string().replace(&row.source, "its folder"))
        };
        let card = modelcard::read(std::path::Path::new(&row.source)).map_err(|error| unusable(&error))?;
        match is_as_registered(&row, &card.files) {
            Ok(true) if row.sha256 == sha256 => Ok(row),
            Ok(_) => Err(format!(
                "the files of model '{}' have changed since the job was trained: restore them, and register the model again",
                row.id
            )),
            Err(error) => Err(unusable(&error)),
        }
    };
    spawn_blocking(check).await.map_err(Problem::internal)?.map_err(refused)
}
