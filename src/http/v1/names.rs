//! The names of served models: a base model's id, a checkpoint's id, or `job_…[@last|@best|@STEP]`.

use std::path::PathBuf;
use std::sync::Arc;

use super::Facts;
use crate::http::AppState;
use crate::http::auth::{Caller, models::find};
use crate::http::error::{Code, Problem, shortened};
use crate::id::{CheckpointId, JobId};
use crate::serving::{ServedBase, ServedModel, ServedWeights};
use crate::spec::{CheckpointChoice, Plan};
use crate::store::{CheckpointRow, ModelRow, StoreError};

/// The model that a name means for a caller.
#[derive(Debug, Clone)]
pub struct Chosen {
    /// The immutable id that answers carry: a checkpoint's, or that of a base model.
    pub id: String,
    /// The checkpoint; None for a base model.
    pub checkpoint: Option<CheckpointRow>,
    /// The base model's row.
    pub base: ModelRow,
    /// The model as a serving process knows it.
    pub served: ServedModel,
    /// The tokenizer and card of the base model.
    pub facts: Arc<Facts>,
}

/// An error for a name that means no model, which is also that for a model of another owner.
fn not_found(name: &str) -> Problem {
    let name = shortened(name);
    let detail = format!(
        "the model '{name}' does not exist: use an id of GET /v1/models, a checkpoint's id, or job_…, job_…@last, job_…@best or job_…@STEP"
    );
    Problem::new(Code::NotFound, detail.clone()).item("/model", "model_not_found", detail)
}

/// Finds the model that a name means.
///
/// # Errors
/// Fails if there is no such model, or its files have changed.
pub(in super::super) async fn resolve(state: &AppState, caller: &Caller, name: &str) -> Result<Chosen, Problem> {
    let (job, which) = name.split_once('@').map_or((name, None), |(job, which)| (job, Some(which)));
    if let Ok(id) = job.parse::<JobId>() {
        let choice = match which {
            None => None,
            Some("best") => Some(CheckpointChoice::Best),
            Some("last") => Some(CheckpointChoice::Last),
            Some(step) => Some(CheckpointChoice::Step(step.parse().map_err(|_| not_found(name))?)),
        };
        return of_job(state, caller, name, id, choice).await;
    }
    if let Ok(id) = name.parse::<CheckpointId>() {
        let row = match state.store.checkpoint_get(id).await {
            Ok(row) => row,
            Err(StoreError::NotFound { .. }) => return Err(not_found(name)),
            Err(error) => return Err(error.into()),
        };
        return of_job(state, caller, name, row.job, Some(CheckpointChoice::Id(id))).await;
    }
    let base = find(state, caller, name).await?.ok_or_else(|| not_found(name))?;
    if base.state != "ready" {
        let detail = format!("the model '{}' is not ready ({}): see GET /models", shortened(name), base.state);
        return Err(Problem::new(Code::NotFound, detail.clone()).item("/model", "model_not_ready", detail));
    }
    let served = ServedBase {
        dir: PathBuf::from(&base.source),
        sha256: base.sha256.clone(),
        dtype: state.config.serving.dtype,
        load_in_4bit: None,
    };
    let facts = state.texts.of(base.clone(), base.sha256.clone()).await?;
    let served = ServedModel { base: served, weights: None };
    Ok(Chosen { id: base.id.clone(), checkpoint: None, base, served, facts })
}

async fn of_job(
    state: &AppState,
    caller: &Caller,
    name: &str,
    id: JobId,
    choice: Option<CheckpointChoice>,
) -> Result<Chosen, Problem> {
    let owner = state.store.job_owner(id).await?;
    if !owner.is_some_and(|owner| caller.may_see(&owner)) {
        return Err(not_found(name));
    }
    let job = state.store.job_get(id).await?;
    // Without a choice: the best checkpoint by the job's metric, else the last one; a job that an alert ended has a result.
    let of_ending = if job.ending.is_some() { CheckpointChoice::Result } else { CheckpointChoice::Best };
    let row = match crate::http::job_models::find(state, &job, choice.unwrap_or(of_ending)).await {
        Ok(row) => row,
        Err(problem) => {
            let detail = problem.detail().trim_start_matches("/checkpoint: ").to_owned();
            return Err(Problem::new(Code::NotFound, detail.clone()).item("/model", "model_not_found", detail));
        }
    };
    let plan = job.plan()?;
    let base = crate::http::job_models::find_model(state, caller, &plan).await?;
    let facts = state.texts.of(base.clone(), plan.model.sha256.clone()).await?;
    Ok(Chosen::of_plan(state, &plan, base, Some(row), facts))
}

impl Chosen {
    /// The base model of a job, or one of its checkpoints, in the precision that the job trained in.
    pub(in super::super) fn of_plan(
        state: &AppState,
        plan: &Plan,
        base: ModelRow,
        checkpoint: Option<CheckpointRow>,
        facts: Arc<Facts>,
    ) -> Chosen {
        let weights = checkpoint.as_ref().map(|row| ServedWeights {
            dir: state.files.checkpoint_dir(row.job, row.step, row.attempt),
            checkpoint: row.id.to_string(),
            full: plan.lora.is_none(),
        });
        let of_base = ServedBase {
            dir: PathBuf::from(&base.source),
            sha256: base.sha256.clone(),
            dtype: plan.training.dtype,
            load_in_4bit: plan.training.four_bit(),
        };
        let id = checkpoint.as_ref().map_or_else(|| base.id.clone(), |row| row.id.to_string());
        Chosen { id, checkpoint, base, served: ServedModel { base: of_base, weights }, facts }
    }
}
