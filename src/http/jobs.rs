//! Jobs: list, read, patch, delete, and change state. Submission is in `submit`.
//!
//! This file is longer than others: most of it is the descriptions that become the API document.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::alerts::{AlertView, EndingView};
use super::auth::Caller;
use super::auth::models::find;
use super::error::{Code, Problem, ProblemBody};
use super::extract::{Json, Path, Query};
use super::idempotency::{Answer, identity, once};
use super::list::{self, List, Time};
use super::python_rewards;
use crate::doctor::PhaseChange;
use crate::event::Phase;
use crate::files::DataDir;
use crate::id::JobId;
use crate::job::{Action, Failure, Requested, State as JobState};
use crate::spec::format::{Format, write_job};
use crate::spec::{
    ENVIRONMENT_SECRET, FieldError, Guarantees, Labels, Plan, RewardKind, RewardSecrets, RuntimeName, RuntimePlan,
    read_labels, rollout_secret_name, submittable,
};
use crate::store::{JobBeside, JobFilter, JobPatch, JobRow, clock_ms};

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(list_jobs))
        .routes(routes!(get_job, patch_job, delete_job))
        .routes(routes!(cancel_job))
        .routes(routes!(pause_job))
        .routes(routes!(resume_job))
        .routes(routes!(get_config))
}

/// A training job and its progress.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Job)]
pub struct JobView {
    /// The job's id, `job_…`.
    id: JobId,
    /// The job's display name; null if none.
    name: Option<String>,
    /// Current state of the job.
    state: JobState,
    /// A state change that the worker has not carried out yet; set only while the job is running.
    requested: Option<Requested>,
    /// Phase of the training loop, now or when the job stopped.
    phase: Option<Phase>,
    /// Why the job waits or was paused: `waiting_for_reward`, `reward_outage`, `server_error`, ….
    status_reason: Option<String>,
    /// Number of times that a worker has claimed the job.
    attempt: u64,
    /// Number of consecutive times that the server failed to hand the job to a worker because of its own error. They do not count
    /// as attempts; meanwhile the job is queued with the `status_reason` `server_error`.
    server_errors: u32,
    /// Device that the job runs on: `cpu`, `cuda:0`; null while it is not running.
    device: Option<String>,
    /// The `seq` of the latest event. `/jobs/{id}/events` after this number returns events newer than this response.
    last_seq: i64,
    /// Number of optimizer steps completed.
    step: u64,
    /// Total number of optimizer steps.
    total_steps: u64,
    /// Estimated seconds remaining; null if unknown.
    eta_s: Option<f64>,
    /// Position in the queue, 1 = next; null when the job is not queued.
    queue_position: Option<u64>,
    /// Why the job failed; null otherwise.
    failure: Option<Failure>,
    /// Why the job ended before its last step, and which checkpoint is its result; null otherwise.
    ending: Option<EndingView>,
    /// Active alerts, latest first; `/jobs/{id}/alerts` lists all.
    alerts: Vec<AlertView>,
    /// Exploration, exploitation or convergence, with the metrics that determine it; null before the first rollouts.
    training_phase: Option<PhaseChange>,
    /// The program that trains the job, and the guarantees for a job that is interrupted.
    runtime: JobRuntime,
    /// The settings of the job, with every default applied.
    #[schema(value_type = Plan)]
    plan: Box<RawValue>,
    /// The job that this one was created from; null if none.
    parent: Option<JobId>,
    /// When the job was submitted.
    created_at: Time,
    /// When a worker first claimed the job; null before that.
    started_at: Option<Time>,
    /// When the job reached a final state; null before that.
    finished_at: Option<Time>,
    /// Labels set by the client.
    metadata: BTreeMap<String, String>,
    /// Owner of the key that created the job; empty = the operator.
    owner: String,
}

/// The program that trains a job.
#[derive(Debug, Serialize, ToSchema)]
pub struct JobRuntime {
    /// Name of the program.
    name: RuntimeName,
    /// Versions of the Python packages when the job was accepted, by name; empty for rlood's own engine.
    versions: BTreeMap<String, String>,
    /// The guarantees for a job that is interrupted.
    guarantees: Guarantees,
}

impl JobRuntime {
    /// Reads the runtime from a stored plan. A plan without one is trained by rlood's own engine.
    fn of(plan: &RawValue) -> Self {
        #[derive(Deserialize)]
        struct OfPlan {
            #[serde(default)]
            runtime: RuntimePlan,
        }
        let plan: Option<OfPlan> = serde_json::from_str(plan.get()).ok();
        let RuntimePlan { name, versions, guarantees, .. } = plan.map(|plan| plan.runtime).unwrap_or_default();
        Self { name, versions, guarantees }
    }
}

impl JobView {
    /// Converts a job's database row to its JSON form in the API.
    pub(super) async fn of(state: &AppState, row: JobRow) -> Result<Self, Problem> {
        let beside = state.store.jobs_beside(&[row.id]).await?.remove(&row.id);
        Ok(Self::with(row, beside.unwrap_or_default()))
    }

    /// Converts the database rows of a page of jobs to their JSON form in the API.
    async fn all(state: &AppState, rows: Vec<JobRow>) -> Result<Vec<Self>, Problem> {
        let ids: Vec<JobId> = rows.iter().map(|row| row.id).collect();
        let mut beside = state.store.jobs_beside(&ids).await?;
        Ok(rows
            .into_iter()
            .map(|row| {
                let beside = beside.remove(&row.id).unwrap_or_default();
                Self::with(row, beside)
            })
            .collect())
    }

    fn with(row: JobRow, beside: JobBeside) -> Self {
        let JobBeside { queue_position, alerts, training_phase, device, result } = beside;
        Self {
            ending: row.ending.map(|ending| EndingView::new(ending, result)),
            alerts: alerts.into_iter().map(AlertView::from).collect(),
            training_phase,
            id: row.id,
            name: row.name,
            state: row.state,
            requested: row.requested,
            phase: row.phase,
            status_reason: row.status_reason,
            attempt: row.attempt,
            server_errors: row.server_errors,
            device,
            last_seq: row.last_seq,
            step: row.step,
            total_steps: row.total_steps,
            eta_s: row.eta_s,
            queue_position: queue_position.filter(|_| row.state == JobState::Queued),
            failure: row.failure,
            runtime: JobRuntime::of(&row.plan_json),
            plan: row.plan_json,
            parent: row.parent,
            created_at: Time(row.created_at),
            started_at: row.started_at.map(Time),
            finished_at: row.finished_at.map(Time),
            metadata: row.metadata,
            owner: row.owner,
        }
    }
}

/// Creates a 400 response for an invalid query parameter.
pub(super) fn bad_query(name: &str, code: &str, detail: impl Into<String>) -> Problem {
    let detail = detail.into();
    Problem::new(Code::InvalidQuery, format!("{name}: {detail}")).item(format!("?{name}"), code, detail)
}

/// Creates a problem that lists the errors in a submitted document.
pub(super) fn invalid(code: Code, errors: Vec<FieldError>) -> Problem {
    let detail = match errors.as_slice() {
        [] => "the job in the request is not valid".to_owned(),
        [error] if error.pointer.is_empty() => error.detail.clone(),
        [error] => format!("{}: {}", error.pointer, error.detail),
        [first, rest @ ..] => format!("{}: {} (and {} more; see errors)", first.pointer, first.detail, rest.len()),
    };
    Problem::new(code, detail).items(errors)
}

/// List jobs, newest first. Filter by label with `metadata.KEY=VALUE`.
#[utoipa::path(get, path = "/jobs", tag = "Jobs", params(
    ("state" = Option<Vec<JobState>>, Query, style = Form, explode = false, description = "List only jobs in one of these states, comma-separated"),
    ("name" = Option<String>, Query, description = "List only jobs with exactly this name"),
    ("name_contains" = Option<String>, Query, description = "List only jobs whose name contains this text"),
    ("id_prefix" = Option<String>, Query, description = "List only jobs whose id begins with this text"),
    ("model" = Option<String>, Query, description = "List only jobs that train this model"),
    ("metadata.KEY" = Option<String>, Query, description = "List only jobs with this label; the parameter may be given several times"),
    ("after" = Option<String>, Query, description = "The cursor: the `next` of the previous page"),
    ("limit" = Option<u32>, Query, description = "The number of jobs on a page, 1 to 100; default 20"),
), responses((status = 200, description = "A page of jobs", body = List<JobView>), (status = 400, description = "A query parameter is not valid", body = ProblemBody)))]
async fn list_jobs(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<Vec<(String, String)>>,
) -> Result<Json<List<JobView>>, Problem> {
    let (mut filter, mut after, mut limit) = (JobFilter::default(), None, None);
    let mut seen = BTreeSet::new();
    for (name, value) in query {
        if !seen.insert(name.clone()) {
            return Err(bad_query(
                &super::error::shortened(&name),
                "duplicate",
                "the parameter is given twice: give it once",
            ));
        }
        match name.as_str() {
            "state" => {
                let names = || JobState::ALL.map(JobState::as_str).join(", ");
                let states = value.split(',').map(JobState::parse).collect::<Option<Vec<_>>>();
                filter.states = states.ok_or_else(|| {
                    bad_query("state", "invalid_value", format!("must be one or several of {}", names()))
                })?;
            }
            "name" => filter.name = Some(value),
            "name_contains" => filter.name_contains = Some(value),
            "id_prefix" => filter.id_prefix = Some(value.to_ascii_lowercase()),
            "model" => {
                let row = find(&state, &caller, &value).await?;
                filter.model = Some(row.map_or(value, |row| row.id));
            }
            "after" => after = Some(value),
            "limit" => {
                let number = value.parse().map_err(|_| bad_query("limit", "invalid_type", "must be a whole number"))?;
                limit = Some(number);
            }
            other => match other.strip_prefix("metadata.") {
                Some(label) => {
                    filter.metadata.insert(label.to_owned(), value);
                }
                None => {
                    let detail = "unknown parameter; known ones: state, name, name_contains, id_prefix, model, metadata.KEY, after, limit";
                    return Err(bad_query(&super::error::shortened(other), "unknown_parameter", detail));
                }
            },
        }
    }
    filter.owner = caller.sees().map(str::to_owned);
    page_of_jobs(&state, &filter, after.as_deref(), list::limit(limit)?).await.map(Json)
}

/// Returns the first page of the jobs that the caller sees.
pub(super) async fn newest_jobs(state: &AppState, caller: &Caller) -> Result<List<JobView>, Problem> {
    let filter = JobFilter { owner: caller.sees().map(str::to_owned), ..JobFilter::default() };
    page_of_jobs(state, &filter, None, list::limit(None)?).await
}

async fn page_of_jobs(
    state: &AppState,
    filter: &JobFilter,
    after: Option<&str>,
    limit: u32,
) -> Result<List<JobView>, Problem> {
    let page = state.store.job_list(filter, after, limit).await?;
    Ok(List { data: JobView::all(state, page.data).await?, next: page.next })
}

/// How long to wait for a job.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Wait {
    /// Wait for up to this many seconds (at most 3600). The response comes when the job has ended or is paused, the server stops,
    /// or the time is up. Default: no waiting.
    #[param(maximum = 3600)]
    wait: Option<u64>,
}

/// Get a job, optionally after waiting for its end.
#[utoipa::path(get, path = "/jobs/{id}", tag = "Jobs", params(("id" = JobId, Path), Wait), responses(
    (status = 200, description = "The job", body = JobView), (status = 404, description = "There is no such job", body = ProblemBody)))]
async fn get_job(
    State(state): State<AppState>,
    Path(id): Path<JobId>,
    Query(Wait { wait }): Query<Wait>,
) -> Result<Json<JobView>, Problem> {
    let wait = wait.unwrap_or(0);
    if wait > 3600 {
        return Err(bad_query(
            "wait",
            "out_of_range",
            format!("the time to wait must be at most 3600 seconds, not {wait}"),
        ));
    }
    let deadline = tokio::time::Instant::now() + Duration::from_secs(wait);
    let mut changes = state.store.changed(id);
    loop {
        changes.borrow_and_update();
        let row = state.store.job_get(id).await?;
        let settled = row.state.is_terminal() || row.state == JobState::Paused;
        if settled || tokio::time::Instant::now() >= deadline || state.stopping.is_cancelled() {
            return Ok(Json(JobView::of(&state, row).await?));
        }
        // When the waiting time is up, the job is read once more, because a heartbeat changes phase and progress without an
        // event.
        let changed = async {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            _ = tokio::time::timeout_at(deadline, changed) => {}
            () = state.stopping.cancelled() => {}
        }
    }
}

/// The fields of a job that can be changed; all are optional.
#[derive(Debug, ToSchema)]
#[schema(as = JobPatch)]
#[expect(dead_code, reason = "only the schema in the OpenAPI document; the handler reads the body field by field")]
struct PatchBody {
    /// 1 to 200 characters, none of them a control character; null removes the name.
    name: Option<String>,
    /// Replaces all labels; {} removes them.
    #[schema(value_type = BTreeMap<String, String>, required = false)]
    metadata: Option<BTreeMap<String, String>>,
    /// Jobs with a higher priority run first. Matters only while the job is queued.
    #[schema(value_type = i64, required = false)]
    priority: Option<i64>,
    /// New secrets of HTTP rewards, by reward name. They take effect at the next claim: pause and resume a running job. A reward of
    /// the evaluation alone is `eval:NAME`, or `NAME` if the job has no reward of that name.
    #[schema(value_type = BTreeMap<String, SecretsBody>, required = false)]
    reward_secrets: Option<BTreeMap<String, SecretsBody>>,
}

/// The secrets to replace. They are never shown again.
#[derive(Debug, ToSchema)]
#[schema(as = RewardSecretsPatch)]
#[expect(dead_code, reason = "only the schema in the OpenAPI document; the handler reads the body field by field")]
struct SecretsBody {
    /// New signing secret, `whsec_…`.
    #[schema(write_only)]
    secret: Option<String>,
    /// The previous secret, while the service still verifies with it. If absent, requests are signed with `secret` alone.
    #[schema(write_only)]
    previous_secret: Option<String>,
    /// Replaces all headers of the reward.
    #[schema(write_only)]
    headers: Option<BTreeMap<String, String>>,
}

/// Change a job's name, labels, priority, or the secrets of its rewards.
#[utoipa::path(patch, path = "/jobs/{id}", tag = "Jobs", params(("id" = JobId, Path)), request_body = PatchBody, responses(
    (status = 200, description = "The job", body = JobView), (status = 404, description = "There is no such job", body = ProblemBody),
    (status = 422, description = "A field of the request is not valid", body = ProblemBody)))]
async fn patch_job(
    State(state): State<AppState>,
    Path(id): Path<JobId>,
    Json(document): Json<Value>,
) -> Result<Json<JobView>, Problem> {
    let labels = read_labels(&document).map_err(|errors| invalid(Code::InvalidBody, errors))?;
    let Labels { name, metadata, priority, reward_secrets } = labels;
    let reward_secrets = read_renewed(&state, id, reward_secrets).await?;
    let patch = JobPatch { name, metadata, priority, reward_secrets };
    let row = state.store.job_patch(id, patch, clock_ms()).await?;
    Ok(Json(JobView::of(&state, row).await?))
}

/// Checks the new secrets of a PATCH, and returns them by the names under which they are stored. Only HTTP rewards have
/// headers, and only `webhook` rewards and environments sign requests.
async fn read_renewed(
    state: &AppState,
    id: JobId,
    given: BTreeMap<String, RewardSecrets>,
) -> Result<BTreeMap<String, RewardSecrets>, Problem> {
    if given.is_empty() {
        return Ok(given);
    }
    let plan = state.store.job_get(id).await?.plan()?;
    let (mut secrets, mut errors) = (BTreeMap::new(), Vec::new());
    for (name, renewed) in given {
        let pointer = format!("/reward_secrets/{}", name.replace('~', "~0").replace('/', "~1"));
        let num_servers = plan.rollout.as_ref().map_or(0, |rollout| rollout.servers.len());
        if name == ENVIRONMENT_SECRET && plan.environment.is_some() {
            secrets.insert(name, renewed);
            continue;
        }
        if plan.tools().any(|tool| tool.secret_name() == name) && renewed.secret.is_none() {
            secrets.insert(name, renewed);
            continue;
        }
        if (0..num_servers).any(|server| rollout_secret_name(server) == name) && renewed.secret.is_none() {
            secrets.insert(name, renewed);
            continue;
        }
        let Some((kept_as, reward)) = plan.reward_of_secret(&name) else {
            let known: Vec<String> = plan.rewards_by_secret_name().map(|(name, _)| name).collect();
            let detail = format!("the job has no reward of this name; its rewards are: {}", known.join(", "));
            errors.push(FieldError::new(pointer, "unknown_reward", detail));
            continue;
        };
        let is_webhook = matches!(reward.kind, RewardKind::Webhook(_));
        let is_http = reward.kind.service().is_some() && !matches!(reward.kind, RewardKind::Python(_));
        if !is_webhook && (!is_http || renewed.secret.is_some()) {
            let detail = "only webhooks sign their requests with secrets, and only rewards over HTTP have headers";
            errors.push(FieldError::new(pointer, "conflict", detail));
            continue;
        }
        match secrets.entry(kept_as) {
            Entry::Vacant(vacant) => drop(vacant.insert(renewed)),
            Entry::Occupied(taken) => {
                let detail = format!("'{name}' and '{}' are the same reward: give its secrets once", taken.key());
                errors.push(FieldError::new(pointer, "conflict", detail));
            }
        }
    }
    if errors.is_empty() { Ok(secrets) } else { Err(invalid(Code::InvalidBody, errors)) }
}

/// Delete a finished job, with its events, metrics, samples and checkpoints.
#[utoipa::path(delete, path = "/jobs/{id}", tag = "Jobs", params(("id" = JobId, Path)), responses(
    (status = 204, description = "The job was deleted"), (status = 404, description = "There is no such job", body = ProblemBody),
    (status = 409, description = "The job has not ended", body = ProblemBody)))]
async fn delete_job(State(state): State<AppState>, Path(id): Path<JobId>) -> Result<StatusCode, Problem> {
    let exports = state.store.job_delete(id).await?;
    let remove = move |files: &DataDir| {
        exports.iter().try_for_each(|export| files.export_remove(export))?;
        files.job_remove(id)
    };
    state.files.in_background(remove).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Cancel a job: immediately while it waits, within seconds while it runs. Checkpoints are kept. Idempotent.
#[utoipa::path(post, path = "/jobs/{id}/cancel", tag = "Jobs", params(("id" = JobId, Path), ("idempotency-key" = Option<String>, Header)), responses(
    (status = 200, description = "The job", body = JobView), (status = 404, description = "There is no such job", body = ProblemBody),
    (status = 409, description = "The job's state does not allow this change", body = ProblemBody)))]
async fn cancel_job(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<JobId>,
) -> Result<Response, Problem> {
    move_job(state, caller, headers, id, Action::Cancel, "POST /jobs/{id}/cancel").await
}

/// Pause a job at a checkpoint; `resume` continues from there.
#[utoipa::path(post, path = "/jobs/{id}/pause", tag = "Jobs", params(("id" = JobId, Path), ("idempotency-key" = Option<String>, Header)), responses(
    (status = 200, description = "The job; while it runs `requested` is `pause` until its worker has stopped", body = JobView),
    (status = 404, description = "There is no such job", body = ProblemBody), (status = 409, description = "The job's state does not allow this change", body = ProblemBody)))]
async fn pause_job(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<JobId>,
) -> Result<Response, Problem> {
    move_job(state, caller, headers, id, Action::Pause, "POST /jobs/{id}/pause").await
}

/// Resume a paused job: it is queued again.
#[utoipa::path(post, path = "/jobs/{id}/resume", tag = "Jobs", params(("id" = JobId, Path), ("idempotency-key" = Option<String>, Header)), responses(
    (status = 200, description = "The job", body = JobView), (status = 404, description = "There is no such job", body = ProblemBody),
    (status = 409, description = "The job's state does not allow this change", body = ProblemBody)))]
async fn resume_job(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<JobId>,
) -> Result<Response, Problem> {
    move_job(state, caller, headers, id, Action::Resume, "POST /jobs/{id}/resume").await
}

async fn move_job(
    state: AppState,
    caller: Caller,
    headers: HeaderMap,
    id: JobId,
    action: Action,
    route: &'static str,
) -> Result<Response, Problem> {
    let of = state.clone();
    let by = caller.clone();
    let work = async move {
        let now = clock_ms();
        let row = match action {
            Action::Cancel => state.store.job_cancel(id, now).await?,
            Action::Pause => state.store.job_pause(id, now).await?,
            Action::Resume => {
                python_rewards::check_plan(&state, &by, id, &state.store.job_get(id).await?.plan()?).await?;
                state.store.job_resume(id, now).await?
            }
            Action::Retry | Action::Delete => {
                return Err(Problem::internal(
                    "retry and delete are not changes of a job's state: they have routes of their own",
                ));
            }
        };
        Answer::new(StatusCode::OK, None, &JobView::of(&state, row).await?)
    };
    once(&of, &caller, &headers, route, &identity(id), work).await
}

/// The format of a job's configuration.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ConfigQuery {
    /// Format of the response: `json` (default), `yaml` or `toml`.
    #[param(pattern = "^(json|yaml|toml)$")]
    format: Option<String>,
}

/// Get a job's resolved configuration, in a form that can be submitted again. Secrets and header values are left out; `retry`
/// copies them inside the server.
#[utoipa::path(get, path = "/jobs/{id}/config", tag = "Jobs", params(("id" = JobId, Path), ConfigQuery), responses(
    (status = 200, description = "The job as a body for POST /jobs",
        content((crate::spec::JobDocument = "application/json"), (crate::spec::JobDocument = "application/yaml"), (String = "application/toml"))),
    (status = 400, description = "The format is not one of json, yaml and toml, or TOML cannot represent the job", body = ProblemBody),
    (status = 404, description = "There is no such job", body = ProblemBody)))]
async fn get_config(
    State(state): State<AppState>,
    Path(id): Path<JobId>,
    Query(query): Query<ConfigQuery>,
) -> Result<Response, Problem> {
    let word = query.format.as_deref().unwrap_or("json");
    let format = Format::parse(word).ok_or_else(|| {
        let detail = format!("must be json, yaml or toml, not '{}'", super::error::shortened(word));
        bad_query("format", "invalid_value", detail)
    })?;
    let document = resolved_config(&state.store.job_get(id).await?)?;
    if format == Format::Json {
        return Ok(Json(document).into_response());
    }
    let text = write_job(&document, format).map_err(|error| bad_query("format", "unsupported", error.message))?;
    Ok(([(header::CONTENT_TYPE, format.media_type())], text).into_response())
}

/// Returns a job's current configuration, ready to be submitted again.
pub(super) fn resolved_config(row: &JobRow) -> Result<Value, Problem> {
    let mut plan = row.plan()?;
    plan.name = row.name.clone();
    plan.metadata = row.metadata.clone();
    let mut document = submittable(&plan);
    if row.priority != 0 {
        document["priority"] = row.priority.into();
    }
    Ok(document)
}
