//! Gathers from the database what the model card of a pushed checkpoint says.

use serde_json::Value;

use super::super::AppState;
use super::super::auth::models::plain_id;
use super::failure::{Failure, internal};
use super::{MAIN, Stored};
use crate::error_text::with_causes;
use crate::event::{Sample, SamplePhase};
use crate::id::{DatasetId, JobId};
use crate::push::PushFormat;
use crate::spec::Plan;
use crate::store::{CheckpointRow, SampleQuery, StepRow, StoreError, TaskKind};
use crate::task::TaskState;
use crate::verdict::VerdictResult;

/// Maximum number of samples on a model card.
const MAX_SAMPLES: u32 = 5;

/// The base model of a checkpoint.
pub(super) struct Base {
    /// The repository on the hub; otherwise the model's name on this server, of a path its last part.
    pub(super) name: String,
    /// Commit of the repository; `None` if the base model does not come from a hub.
    pub(super) commit: Option<String>,
}

/// A dataset of training prompts.
pub(super) struct DatasetFact {
    /// The repository on the hub; otherwise the dataset's name on this server.
    pub(super) name: String,
    /// Commit, config and split of a dataset of the hub; `None` = it does not come from a hub.
    pub(super) hub: Option<String>,
}

/// Facts for a model card.
pub(super) struct Facts {
    pub(super) repo: String,
    pub(super) revision: String,
    pub(super) format: PushFormat,
    pub(super) job: JobId,
    pub(super) plan: Plan,
    pub(super) checkpoint: CheckpointRow,
    pub(super) base: Base,
    pub(super) datasets: Vec<DatasetFact>,
    /// The metrics of the steps up to the checkpoint's.
    pub(super) steps: Vec<StepRow>,
    /// The newest verdict on this checkpoint.
    pub(super) verdict: Option<VerdictResult>,
    /// Prompts and completions, only if the request asks for them.
    pub(super) samples: Vec<Sample>,
}

impl Facts {
    /// The name of the job, else its id.
    pub(super) fn job_name(&self) -> String {
        self.plan.name.clone().unwrap_or_else(|| self.job.to_string())
    }
}

/// Reads the facts about a checkpoint.
pub(super) async fn facts(state: &AppState, stored: &Stored, checkpoint: &CheckpointRow) -> Result<Facts, Failure> {
    let store = &state.store;
    let plan = store.job_get(checkpoint.job).await?.plan().map_err(|error| internal(&with_causes(&error)))?;
    let verdicts = store.task_list(TaskKind::Verdict, checkpoint.job, Some(checkpoint.id)).await?;
    let verdict = verdicts.into_iter().find(|verdict| verdict.state == TaskState::Succeeded);
    let verdict = verdict.and_then(|verdict| serde_json::from_value(verdict.result?).ok());
    let samples = match stored.request.with_samples {
        true => samples(state, checkpoint).await?,
        false => Vec::new(),
    };
    Ok(Facts {
        repo: stored.request.repo.clone(),
        revision: stored.request.revision.clone().unwrap_or_else(|| MAIN.to_owned()),
        format: stored.format,
        job: checkpoint.job,
        base: base(state, &plan).await?,
        datasets: datasets(state, plan.dataset.id).await?,
        steps: store.step_page(checkpoint.job, None, 0, checkpoint.step).await?,
        checkpoint: checkpoint.clone(),
        plan,
        verdict,
        samples,
    })
}

async fn base(state: &AppState, plan: &Plan) -> Result<Base, Failure> {
    let hub = match state.store.model_get(&plan.model.id).await {
        // A model that was registered again under this id may be another one.
        Ok(row) if row.sha256 == plan.model.sha256 => row.hub,
        Ok(_) | Err(StoreError::NotFound { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    if let Some(hub) = hub {
        return Ok(Base { name: hub.repo, commit: Some(hub.commit) });
    }
    let id = plain_id(&plan.model.id);
    // The folders of the server are not published.
    let name = match id.starts_with('/') {
        true => id.trim_end_matches('/').rsplit('/').next().unwrap_or_default(),
        false => id,
    };
    Ok(Base { name: name.to_owned(), commit: None })
}

/// Names the sources of a dataset's rows.
async fn datasets(state: &AppState, id: DatasetId) -> Result<Vec<DatasetFact>, Failure> {
    let (fact, origin) = dataset(state, id).await?;
    let sources = origin.as_ref().and_then(|origin| origin["sources"].as_array()).cloned();
    let Some(sources) = sources else { return Ok(vec![fact]) };
    let mut facts: Vec<DatasetFact> = Vec::new();
    for source in sources {
        let fact = match (of_hub(&source), source["dataset"].as_str().and_then(|id| id.parse().ok())) {
            (Some(fact), _) => fact,
            (None, Some(id)) => dataset(state, id).await?.0,
            (None, None) => DatasetFact { name: "rows uploaded with the job".to_owned(), hub: None },
        };
        if !facts.iter().any(|known| known.name == fact.name && known.hub == fact.hub) {
            facts.push(fact);
        }
    }
    Ok(facts)
}

/// Names a dataset, and returns its origin.
async fn dataset(state: &AppState, id: DatasetId) -> Result<(DatasetFact, Option<Value>), Failure> {
    let row = match state.store.dataset_get(id).await {
        Ok(row) => row,
        Err(StoreError::NotFound { .. }) => {
            return Ok((DatasetFact { name: "a dataset that was removed".to_owned(), hub: None }, None));
        }
        Err(error) => return Err(error.into()),
    };
    let fact = row.origin.as_ref().and_then(of_hub);
    let named = || DatasetFact { name: row.name.clone().unwrap_or_else(|| id.to_string()), hub: None };
    Ok((fact.unwrap_or_else(named), row.origin))
}

/// Reads the repository, commit, config and split from an origin that names a hub.
fn of_hub(origin: &Value) -> Option<DatasetFact> {
    let name = origin["hub"].as_str()?.to_owned();
    let parts = [("commit", "commit"), ("config", "config"), ("split", "split")];
    let parts = parts.iter().filter_map(|(key, word)| Some(format!("{word} {}", origin[*key].as_str()?)));
    Some(DatasetFact { name, hub: Some(parts.collect::<Vec<_>>().join(", ")) })
}

/// Returns the latest samples up to the checkpoint's step: of the evaluation, or without one of training.
async fn samples(state: &AppState, checkpoint: &CheckpointRow) -> Result<Vec<Sample>, Failure> {
    for phase in [SamplePhase::Eval, SamplePhase::Train] {
        let query = SampleQuery {
            max_step: Some(checkpoint.step),
            phase: Some(phase),
            limit: MAX_SAMPLES,
            ..SampleQuery::default()
        };
        let page = state.store.sample_page(checkpoint.job, &query).await?;
        let mut samples: Vec<Sample> = page.data.into_iter().map(|row| row.sample).collect();
        if let Some(step) = samples.first().map(|sample| sample.step) {
            samples.retain(|sample| sample.step == step);
            return Ok(samples);
        }
    }
    Ok(Vec::new())
}
