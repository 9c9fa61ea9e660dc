//! `POST /jobs/{id}/fork`: creates a job from any step of another job that has a checkpoint.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::artifacts::no_checkpoint;
use super::auth::Caller;
use super::error::{Code, Problem, ProblemBody};
use super::extract::{Json, Path};
use super::idempotency::{Answer, identity, once};
use super::jobs::{JobView, invalid};
use super::lookup::{Prepared, prepare};
use super::named_models::UseOfHub;
use super::submit::read_spec;
use super::submit::stored::store_prompts;
use super::warm_start;
use crate::id::JobId;
use crate::spec::{
    Arithmetic, ENVIRONMENT_SECRET, EnvironmentPlan, FieldError, JobSpec, Plan, Reference, RewardPlan, RewardSecrets,
    WarmStartPlan, continues, forked_document, resolve, rollout_secret_name,
};
use crate::store::{CheckpointRow, Fork, JobRow, NewJob, clock_ms};

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(fork_job))
}

/// The step to branch off at, and the settings to change.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkRequest {
    /// Number of completed optimizer steps to start from. The job must have a checkpoint of this step.
    from_step: u64,
    /// A partial job that is merged over the configuration of the original: objects key by key, lists and values replace, null =
    /// reset to the default (`lora: null` = full fine-tuning). `warm_start: {"reference": …}` forces a fresh start
    /// with the checkpoint's weights.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    overrides: Option<Value>,
}

/// Fork a job: create a new job that continues from a step of this one.
///
/// If model, dataset, adapter, optimizer, batch sizes and seed stay the same, the new job continues with the checkpoint's full
/// state, and its first step is `from_step` + 1. Otherwise it is a warm start: step 0, a fresh optimizer, the checkpoint's weights.
/// Its plan then has a `warm_start`, and no `warm_up` unless `overrides` set one. Secrets of unchanged rewards are
/// copied inside the server.
#[utoipa::path(post, path = "/jobs/{id}/fork", tag = "Jobs", request_body = ForkRequest,
    params(("id" = JobId, Path), ("idempotency-key" = Option<String>, Header)), responses(
    (status = 201, description = "The new job; its `parent` is the old job", body = JobView, headers(("location" = String))),
    (status = 404, description = "There is no such job, or it has no checkpoint of that step: `no_checkpoint` = not yet, `no_such_checkpoint` = no longer, or never", body = ProblemBody),
    (status = 422, description = "The new job is not valid", body = ProblemBody)))]
async fn fork_job(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<JobId>,
    Json(request): Json<ForkRequest>,
) -> Result<Response, Problem> {
    let identity = identity(format_args!("{id} {}", serde_json::to_string(&request).map_err(Problem::internal)?));
    let work = fork(state.clone(), caller.clone(), id, request);
    once(&state, &caller, &headers, "POST /jobs/{id}/fork", &identity, work).await
}

async fn fork(state: AppState, caller: Caller, id: JobId, request: ForkRequest) -> Result<Answer, Problem> {
    let ForkRequest { from_step, overrides } = request;
    let mut overrides = overrides.unwrap_or_else(|| json!({}));
    if !overrides.is_object() {
        let error =
            FieldError::new("/overrides", "invalid_type", "must be an object with the fields of the job to change");
        return Err(invalid(Code::InvalidBody, vec![error]));
    }
    let row = state.store.job_get(id).await?;
    // The new job belongs to the owner of the original, because it gets copies of that owner's secrets.
    let owner = row.owner.clone();
    let mut parent = row.plan()?;
    parent.name = row.name.clone();
    parent.metadata = row.metadata.clone();
    let checkpoints = state.store.checkpoint_list(id).await?;
    let Some(checkpoint) = checkpoints.iter().find(|checkpoint| checkpoint.step == from_step) else {
        return Err(no_such_step(&state, &row, from_step, &checkpoints));
    };
    let asked_reference = take_reference(&mut overrides)?;
    let asks_warm_up = overrides.get("warm_up").is_some_and(|warm_up| !warm_up.is_null());

    let document = forked_document(&parent, &overrides);
    let (mut spec, mut errors) = read_spec(&state, &caller, document).await?;
    // A job that continues from a checkpoint keeps the arithmetic of the job that wrote it.
    spec.arithmetic = parent.arithmetic;
    copy_secrets(&mut spec, &parent, state.store.job_secrets(id).await?);
    let prepared = prepare(&state, &caller, &mut spec, None, UseOfHub::Register).await?;
    if prepared.is_pending() {
        let detail = "the dataset is still being downloaded: wait until its state is 'ready', then fork the job";
        errors.push(FieldError::new("/dataset", "dataset_downloading", detail));
    }
    let Prepared { mut context, errors: found, warnings: _, train, eval, warm_up } = prepared;
    errors.extend(found);
    let resolved =
        resolve(&spec, &context).map(|resolution| Plan { warm_start: parent.warm_start.clone(), ..resolution.plan });
    let stands_against = match &resolved {
        Ok(plan) if asked_reference.is_none() => continues(plan, &parent, from_step).err(),
        Ok(_) | Err(_) => Some("warm_start".to_owned()),
    };
    let resolved = match (resolved, &stands_against) {
        (Ok(plan), Some(_)) => {
            let has_own_reference = parent.warm_start.is_some() || parent.has_warmed_reference();
            let reference = asked_reference.or_else(|| (!has_own_reference).then_some(Reference::Base));
            match reference {
                Some(reference) => {
                    spec.warm_start = Some(WarmStartPlan { checkpoint: Some(checkpoint.id), adapter: None, reference });
                    spec.arithmetic = Arithmetic::LATEST;
                    context.warm_start = Some(warm_start::facts(&parent));
                    if !asks_warm_up {
                        // The checkpoint's weights include the warm-up, so it is not repeated.
                        without_warm_up(&mut spec);
                    }
                    resolve(&spec, &context).map(|resolution| resolution.plan)
                }
                None => {
                    errors.push(ambiguous_reference(&stands_against));
                    Ok(plan)
                }
            }
        }
        (resolved, _) => resolved,
    };
    let mut plan = match resolved {
        Ok(plan) => plan,
        Err(more) => {
            errors.extend(more);
            return Err(refused(errors));
        }
    };
    let continues = stands_against.is_none();
    if continues && plan.total_steps() <= from_step {
        let detail = format!(
            "the new job continues after step {from_step}, but would already end at step {}: use a value above {from_step}",
            plan.total_steps()
        );
        errors.push(FieldError::new("/training/max_steps", "out_of_range", detail));
    }
    if !errors.is_empty() {
        return Err(refused(errors));
    }
    store_prompts(&state, &owner, (train, eval, warm_up), &mut spec.redacted, &mut plan).await?;
    create(&state, (id, &owner), checkpoint, continues, spec, plan).await
}

/// Links the checkpoint's files first, then inserts the new job's row. If the insertion fails, the links are removed, at the
/// latest at the next start of the server.
async fn create(
    state: &AppState,
    (parent, owner): (JobId, &str),
    checkpoint: &CheckpointRow,
    continues: bool,
    spec: JobSpec,
    plan: Plan,
) -> Result<Answer, Problem> {
    let id = JobId::new();
    let kept = async {
        if continues {
            warm_start::pin_files_of_parent(state, parent, id).await?;
            let (from, files) = ((parent, checkpoint.step, checkpoint.attempt), checkpoint.files.clone());
            warm_start::blocking(state, move |data| data.checkpoint_adopt(from, id, &files)).await
        } else {
            warm_start::pin_files(state, id, &plan).await
        }
    };
    let created = match kept.await {
        Ok(()) => {
            let new = NewJob {
                id,
                spec: &spec.redacted,
                plan: &plan,
                secrets: &spec.secrets,
                parent: Some(parent),
                priority: spec.priority,
                owner,
            };
            let fork = Fork { checkpoint, continues };
            state.store.job_fork(new, fork, clock_ms()).await.map_err(Problem::from)
        }
        Err(problem) => Err(problem),
    };
    let row = match created {
        Ok(row) => row,
        Err(problem) => {
            warm_start::unpin_files(state, id).await;
            return Err(problem);
        }
    };
    Answer::new(StatusCode::CREATED, Some(format!("/jobs/{}", row.id)), &JobView::of(state, row).await?)
}

/// Removes the warm-up, so that the job begins with RLOO's first step.
fn without_warm_up(spec: &mut JobSpec) {
    spec.warm_up = None;
    if let Some(document) = spec.redacted.as_object_mut() {
        document.shift_remove("warm_up");
    }
}

/// Takes `warm_start.reference` out of the overrides. It is the only key allowed there: a fork's checkpoint
/// is given by `from_step`.
fn take_reference(overrides: &mut Value) -> Result<Option<Reference>, Problem> {
    let Some(asked) = overrides.as_object_mut().and_then(|overrides| overrides.shift_remove("warm_start")) else {
        return Ok(None);
    };
    let reference = match asked.as_object() {
        Some(object) if object.keys().all(|key| key == "reference") => object.get("reference").cloned(),
        Some(_) | None => None,
    };
    match reference.and_then(|reference| serde_json::from_value(reference).ok()) {
        Some(reference) => Ok(Some(reference)),
        None => {
            let detail = "must be {\"reference\": \"base\"} or {\"reference\": \"initial\"}: the checkpoint is the one of from_step";
            let error = FieldError::new("/overrides/warm_start", "invalid_value", detail);
            Err(invalid(Code::InvalidSpec, vec![error]))
        }
    }
}

fn ambiguous_reference(differ: &Option<String>) -> FieldError {
    let detail = format!(
        "the new job differs from the old one in {}, so it starts warm from the checkpoint; the old one has a warm start or a warm-up of its own, so set the reference of the KL penalty: {{\"reference\": \"base\"}} or {{\"reference\": \"initial\"}} (this checkpoint)",
        differ.as_deref().unwrap_or("its start")
    );
    FieldError::new("/warm_start", "required", detail)
}

/// Copies secrets and headers of the original's rewards to the new job's rewards, including those of the evaluation, and those of
/// its rollout servers, its environment and its tools. One with a changed address gets none.
fn copy_secrets(spec: &mut JobSpec, parent: &Plan, mut secrets: BTreeMap<String, RewardSecrets>) {
    let url = |reward: &RewardPlan| reward.kind.service().map(|service| service.url.clone());
    let before: BTreeMap<String, Option<String>> =
        parent.rewards_by_secret_name().map(|(name, reward)| (name, url(reward))).collect();
    let stays = |(name, reward): &(String, &RewardPlan)| {
        let now = url(reward);
        now.is_some() && before.get(name) == Some(&now)
    };
    let same: Vec<String> = spec.rewards_by_secret_name().filter(stays).map(|(name, _)| name).collect();
    for name in same {
        if let Some(secret) = secrets.remove(&name) {
            spec.secrets.entry(name).or_insert(secret);
        }
    }
    // A rollout server keeps its key too, wherever it is in the new list.
    let before = parent.rollout.iter().flat_map(|rollout| &rollout.servers);
    let before: Vec<&str> = before.map(|server| server.url.as_str()).collect();
    for (index, server) in spec.rollout.iter().flat_map(|rollout| &rollout.servers).enumerate() {
        let old = before.iter().position(|url| *url == server.url);
        if let Some(key) = old.and_then(|old| secrets.remove(&rollout_secret_name(old))) {
            spec.secrets.entry(rollout_secret_name(index)).or_insert(key);
        }
    }
    let url = |environment: &EnvironmentPlan| environment.service.url.clone();
    let is_same = spec.environment.as_ref().map(url) == parent.environment.as_ref().map(url);
    if let Some(secret) = secrets.remove(ENVIRONMENT_SECRET).filter(|_| is_same) {
        spec.secrets.entry(ENVIRONMENT_SECRET.to_owned()).or_insert(secret);
    }
    for tool in spec.environment.iter().flat_map(|environment| &environment.tools) {
        let is_same = parent.tools().any(|old| (old.name(), old.url()) == (tool.name(), tool.url()));
        if let Some(secret) = secrets.remove(&tool.secret_name()).filter(|_| is_same) {
            spec.secrets.entry(tool.secret_name()).or_insert(secret);
        }
    }
}

fn refused(errors: Vec<FieldError>) -> Problem {
    let at_overrides = |error: FieldError| FieldError { pointer: format!("/overrides{}", error.pointer), ..error };
    invalid(Code::InvalidSpec, errors.into_iter().map(at_overrides).collect())
}

/// The 404 for a step without a checkpoint, which lists the steps that have one.
fn no_such_step(state: &AppState, job: &JobRow, from_step: u64, checkpoints: &[CheckpointRow]) -> Problem {
    const SHOWN: usize = 20;
    // The checkpoints are ordered newest first.
    let Some(newest) = checkpoints.first().map(|checkpoint| checkpoint.step) else {
        let problem = no_checkpoint(state, job);
        let (code, detail) = (problem.code(), problem.detail().to_owned());
        return problem.item("/from_step", code.as_str(), detail);
    };
    let steps: Vec<String> = checkpoints.iter().take(SHOWN).map(|checkpoint| checkpoint.step.to_string()).collect();
    let older = if checkpoints.len() > SHOWN { ", and older ones" } else { "" };
    let detail = format!("the job has no checkpoint of step {from_step}; available steps: {}{older}", steps.join(", "));
    let may_come = from_step > newest && !job.state.is_terminal();
    let code = if may_come { Code::NoCheckpoint } else { Code::NoSuchCheckpoint };
    Problem::new(code, detail.clone()).item("/from_step", code.as_str(), detail)
}
