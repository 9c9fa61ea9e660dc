//! Warm starts: finds the checkpoint or the adapter that a job starts from, and keeps its files for the job.

use std::path::{Path, PathBuf};

use super::AppState;
use super::adapters::{import, inspect_hub_adapter};
use super::auth::Caller;
use super::auth::models::plain_id;
use super::error::{Code, Problem};
use crate::files::{FilesError, StagedDir};
use crate::id::JobId;
use crate::modelcard::{ModelDescription, adapter};
use crate::protocol::FileEntry;
use crate::spec::{AdapterPlan, FieldError, JobSpec, Plan, WarmStartFacts, Warning};
use crate::store::background::spawn_blocking;
use crate::store::{AdapterRow, CheckpointRow, StoreError};

const AT: &str = "/warm_start/checkpoint";
const AT_ADAPTER: &str = "/warm_start/adapter";
/// The files of a checkpoint that contain the weights: an adapter, or a whole model.
const ADAPTER: [&str; 2] = super::adapters::FILES;
const MODEL: [&str; 1] = ["model.safetensors"];

/// The weights that a job with a warm start begins with.
pub(super) enum Start {
    /// A checkpoint of a job on this server.
    Checkpoint(WarmStartFacts),
    /// A PEFT adapter. Whether it matches the job's model is not checked yet.
    Adapter { row: Box<AdapterRow>, files: AdapterFiles },
}

/// Location of an adapter's files.
pub(super) enum AdapterFiles {
    /// The adapter is stored on the server.
    Kept(PathBuf),
    /// The adapter was downloaded for this request only.
    Staged(StagedDir),
}

/// Finds the checkpoint or adapter that a job starts from, with an error if it does not exist. A hub adapter is downloaded, and
/// stored if `keeps` is set.
pub(super) async fn find(
    state: &AppState,
    caller: &Caller,
    spec: &JobSpec,
    keeps: bool,
    errors: &mut Vec<FieldError>,
) -> Result<Option<Start>, Problem> {
    let Some(warm_start) = &spec.warm_start else { return Ok(None) };
    if let Some(wanted) = &warm_start.adapter {
        return find_adapter(state, caller, wanted, keeps, errors).await;
    }
    let Some(checkpoint) = warm_start.checkpoint else { return Ok(None) };
    let found = match state.store.checkpoint_get(checkpoint).await {
        Ok(row) => Ok(state.store.job_get(row.job).await?),
        Err(error) => Err(error),
    };
    match found {
        Ok(job) if caller.may_see(&job.owner) => Ok(Some(Start::Checkpoint(facts(&job.plan()?)))),
        Ok(_) | Err(StoreError::NotFound { .. }) => {
            let detail = format!(
                "the checkpoint '{checkpoint}' does not exist or was deleted: GET /jobs/{{id}}/checkpoints lists the checkpoints of a job"
            );
            errors.push(FieldError::new(AT, "unknown_checkpoint", detail));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

async fn find_adapter(
    state: &AppState,
    caller: &Caller,
    wanted: &AdapterPlan,
    keeps: bool,
    errors: &mut Vec<FieldError>,
) -> Result<Option<Start>, Problem> {
    let Some(id) = wanted.upload else {
        let imported = match keeps {
            true => import(state, caller, wanted).await.map(|row| {
                let files = AdapterFiles::Kept(state.files.adapter_dir(row.id));
                (row, files)
            }),
            false => {
                inspect_hub_adapter(state, caller, wanted).await.map(|(row, dir)| (row, AdapterFiles::Staged(dir)))
            }
        };
        return match imported {
            Ok((row, files)) => Ok(Some(Start::Adapter { row: Box::new(row), files })),
            Err(problem) if matches!(problem.code(), Code::InvalidAdapter | Code::InvalidBody) => {
                errors.push(FieldError::new(format!("{AT_ADAPTER}/hub"), "invalid_adapter", problem.detail()));
                Ok(None)
            }
            Err(problem) => Err(problem),
        };
    };
    match state.store.adapter_get(id).await {
        Ok(row) if caller.may_see(&row.owner) => {
            let files = AdapterFiles::Kept(state.files.adapter_dir(row.id));
            Ok(Some(Start::Adapter { row: Box::new(row), files }))
        }
        Ok(_) | Err(StoreError::NotFound { .. }) => {
            let detail = format!("the adapter '{id}' does not exist or was deleted: GET /adapters lists all adapters");
            errors.push(FieldError::new(format!("{AT_ADAPTER}/upload"), "unknown_adapter", detail));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

impl Start {
    /// Returns the properties of the checkpoint or adapter that the resolved job needs; an error if the adapter does not match
    /// the model. Reads files.
    pub(super) fn inspect(
        self,
        model: Option<(&str, &ModelDescription)>,
        errors: &mut Vec<FieldError>,
        warnings: &mut Vec<Warning>,
    ) -> Option<WarmStartFacts> {
        let (row, files) = match self {
            Start::Checkpoint(facts) => return Some(facts),
            Start::Adapter { row, files } => (row, files),
        };
        let (model_id, description) = model?;
        let (dir, id) = match &files {
            AdapterFiles::Kept(dir) => (dir.as_path(), Some(row.id)),
            AdapterFiles::Staged(dir) => (dir.path(), None),
        };
        let lora = match adapter::read_for(dir, description) {
            Ok(lora) => Some(lora),
            Err(error) => {
                let detail = format!("the adapter does not match '{model_id}': {error}");
                errors.push(FieldError::new(AT_ADAPTER, "adapter_differs", detail));
                return None;
            }
        };
        let base = row.config["base_model_name_or_path"].as_str().unwrap_or("");
        if !is_same_base(base, plain_id(model_id)) {
            warnings.push(Warning {
                pointer: AT_ADAPTER.to_owned(),
                code: "adapter_base_differs".to_owned(),
                detail: format!(
                    "the adapter's config says that it was trained on '{base}', and this job's model is '{model_id}': the shapes match; \
                     check that it is the same model"
                ),
            });
        }
        let text = |key: &str| row.origin.as_ref().and_then(|origin| origin[key].as_str()).map(str::to_owned);
        let here = AdapterPlan { upload: id, hub: text("hub"), revision: text("commit") };
        Some(WarmStartFacts { model: None, lora, adapter: Some(here) })
    }
}

/// Whether two names probably refer to the same model: compares without the organization and without suffixes
/// for the storage format.
fn is_same_base(base: &str, model: &str) -> bool {
    let plain = |name: &str| {
        let last = name
            .trim_end_matches('/')
            .rsplit('/')
            .next()
            .unwrap_or(name)
            .split('@')
            .next()
            .unwrap_or("")
            .to_lowercase();
        let mut last = last.as_str();
        while let Some(shorter) = ["-bnb", "-4bit", "-8bit", "-unsloth", "-fp8", "-bf16", "-nf4"]
            .iter()
            .find_map(|end| last.strip_suffix(end))
        {
            last = shorter;
        }
        last.to_owned()
    };
    base.is_empty() || plain(base) == plain(model)
}

/// Returns the properties of a checkpoint that a job that starts from it needs.
pub(super) fn facts(plan: &Plan) -> WarmStartFacts {
    let model = (plan.model.sha256.clone(), plan.model.id.clone());
    WarmStartFacts { model: Some(model), lora: plan.lora.clone(), adapter: None }
}

/// Returns the directory and the list of the files that a job starts from.
pub(super) async fn source(state: &AppState, plan: &Plan) -> Result<Option<(PathBuf, Vec<FileEntry>)>, Problem> {
    let Some(warm_start) = &plan.warm_start else { return Ok(None) };
    if let Some(adapter) = &warm_start.adapter {
        let Some(id) = adapter.upload else {
            let detail = "the job starts from a hub adapter that is not downloaded yet: send POST /adapters {\"hub\": …} first, \
                          or validate without probe";
            return Err(Problem::new(Code::NotReady, detail));
        };
        let files = state.store.adapter_get(id).await?.files;
        return Ok(Some((state.files.adapter_dir(id), files)));
    }
    let Some(checkpoint) = warm_start.checkpoint else { return Ok(None) };
    let CheckpointRow { job, step, attempt, files, .. } = state.store.checkpoint_get(checkpoint).await?;
    Ok(Some((state.files.checkpoint_dir(job, step, attempt), files)))
}

/// Links the files of a warm start into the directory of a job that is about to be created.
pub(super) async fn pin_files(state: &AppState, job: JobId, plan: &Plan) -> Result<(), Problem> {
    let Some((from, files)) = source(state, plan).await? else { return Ok(()) };
    let wanted: &[&str] = if plan.lora.is_some() { &ADAPTER } else { &MODEL };
    let files: Vec<FileEntry> = files.into_iter().filter(|file| wanted.contains(&file.name.as_str())).collect();
    if files.len() != wanted.len() {
        return Err(Problem::new(Code::InvalidSpec, format!("the checkpoint has no {}", wanted.join(", "))));
    }
    blocking(state, move |data| data.initial_keep(job, Path::new(&from), &files)).await
}

/// Links the warm-start files of an old job into the directory of a job that is created from it.
pub(super) async fn pin_files_of_parent(state: &AppState, parent: JobId, job: JobId) -> Result<(), Problem> {
    blocking(state, move |data| data.initial_copy(parent, job)).await
}

/// Removes the linked files of a job whose creation failed.
pub(super) async fn unpin_files(state: &AppState, job: JobId) {
    if let Err(problem) = blocking(state, move |data| data.job_remove(job)).await {
        tracing::warn!(%job, ?problem, "could not remove the files of a job that was not created; the next start removes them");
    }
}

pub(super) async fn blocking<T: Send + 'static>(
    state: &AppState,
    work: impl FnOnce(&crate::files::DataDir) -> Result<T, FilesError> + Send + 'static,
) -> Result<T, Problem> {
    let files = state.files.clone();
    Ok(spawn_blocking(move || work(&files)).await.map_err(Problem::internal)??)
}

#[cfg(test)]
mod tests {
    use super::is_same_base;

    #[test]
    fn a_base_is_the_same_under_the_names_that_say_how_it_is_stored() {
        assert!(is_same_base("unsloth/Qwen3-0.6B-unsloth-bnb-4bit", "Qwen/Qwen3-0.6B"));
        assert!(is_same_base("/home/me/models/qwen3-0.6b/", "Qwen/Qwen3-0.6B@main"));
        assert!(is_same_base("", "Qwen/Qwen3-0.6B"));
        assert!(!is_same_base("Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"));
    }
}
