//! `POST /jobs/{id}/retry`: creates a job with the same plan from a finished one. It resumes from the newest
//! checkpoint or starts over.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Problem, ProblemBody, chain};
use super::extract::{OptionalJson, Path};
use super::idempotency::{Answer, identity, once};
use super::jobs::JobView;
use super::python_rewards;
use super::warm_start::{self, blocking};
use crate::id::JobId;
use crate::job::{Action, RetryFrom};
use crate::store::{CheckpointRow, Continuation, StoreError, clock_ms};

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(retry_job))
}

/// Where the new job starts.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetryRequest {
    /// `latest`: the newest valid checkpoint of the old job, with optimizer, schedule and cursor, and with the reward answers that
    /// the old job received after it. `start`: step 0. Default: `latest` after a failure of class `infra`
    /// or `reward`, else `start`.
    #[serde(default, deserialize_with = "read_from")]
    from: Option<RetryFrom>,
}

/// Deserializes `from` through a JSON value, so that a value of the wrong type is reported as an invalid field, not
/// as a syntax error.
fn read_from<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<RetryFrom>, D::Error> {
    let given = Value::deserialize(deserializer)?;
    serde_json::from_value(given).map_err(|_| D::Error::custom("must be \"latest\" or \"start\""))
}

/// Retry a finished job: create a new job with the same plan and secrets.
///
/// After a failure of class `infra` or `reward` the new job resumes: it starts from the newest valid checkpoint, reuses the reward
/// answers since then, and requests the missing ones under its own ids. Its adapter is then identical, byte for byte, to that of an
/// uninterrupted run. Without a checkpoint it starts at step 0 and still reuses the answers. After other ends it starts over.
#[utoipa::path(post, path = "/jobs/{id}/retry", tag = "Jobs", request_body = Option<RetryRequest>,
    params(("id" = JobId, Path), ("idempotency-key" = Option<String>, Header)), responses(
    (status = 201, description = "The new job; its `parent` is the old job, its `step` is where it starts", body = JobView, headers(("location" = String))),
    (status = 404, description = "There is no such job", body = ProblemBody), (status = 409, description = "The job has not ended", body = ProblemBody),
    (status = 422, description = "A field of the request is not valid", body = ProblemBody)))]
async fn retry_job(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<JobId>,
    OptionalJson(request): OptionalJson<RetryRequest>,
) -> Result<Response, Problem> {
    let RetryRequest { from } = request.unwrap_or_default();
    // Without `from` the request's identity for `Idempotency-Key` is the same as before that field existed, so that older keys
    // stay valid.
    let identity = match from {
        None => identity(id),
        Some(RetryFrom::Latest) => identity(format_args!("{id} latest")),
        Some(RetryFrom::Start) => identity(format_args!("{id} start")),
    };
    let work = retry(state.clone(), caller.clone(), id, from);
    once(&state, &caller, &headers, "POST /jobs/{id}/retry", &identity, work).await
}

/// Links the checkpoint files first, then inserts the new job's row. If the insertion fails, the links are removed, at the
/// latest at the next start of the server.
async fn retry(state: AppState, caller: Caller, id: JobId, from: Option<RetryFrom>) -> Result<Answer, Problem> {
    let old = state.store.job_get(id).await?;
    python_rewards::check_plan(&state, &caller, id, &old.plan()?).await?;
    if !old.state.is_terminal() {
        return Err(StoreError::IllegalMove { state: old.state, action: Action::Retry }.into());
    }
    let new = JobId::new();
    let made = async {
        warm_start::pin_files_of_parent(&state, id, new).await?;
        match from.unwrap_or_else(|| RetryFrom::after(old.failure.as_ref())) {
            RetryFrom::Start => state.store.job_retry(id, new, clock_ms()).await.map_err(Problem::from),
            RetryFrom::Latest => {
                let continuation = adopt_checkpoints(&state, id, new).await?;
                Ok(state.store.job_retry_latest(id, new, &continuation, clock_ms()).await?)
            }
        }
    };
    let row = match made.await {
        Ok(row) => row,
        Err(problem) => {
            warm_start::unpin_files(&state, new).await;
            return Err(problem);
        }
    };
    Answer::new(StatusCode::CREATED, Some(format!("/jobs/{}", row.id)), &JobView::of(&state, row).await?)
}

/// Links the files of the old job's checkpoints into the new one's directory: those of the newest valid one, which the new job
/// starts with, and of the older ones, which may include the best of the run.
async fn adopt_checkpoints(state: &AppState, parent: JobId, job: JobId) -> Result<Continuation, Problem> {
    let mut continuation = Continuation::default();
    for checkpoint in state.store.checkpoint_list(parent).await? {
        let CheckpointRow { step, attempt, files, .. } = checkpoint.clone();
        let is_newest = continuation.checkpoints.is_empty();
        if is_newest {
            let listed = files.clone();
            let verified =
                blocking(state, move |data| Ok(data.checkpoint_verify(parent, step, attempt, &listed))).await?;
            if let Err(error) = verified {
                tracing::error!(job = %parent, step, error = chain(&error), "a checkpoint is damaged: the retry of the job starts from an older one");
                continuation.damaged.push(checkpoint);
                continue;
            }
        }
        match blocking(state, move |data| Ok(data.checkpoint_adopt((parent, step, attempt), job, &files))).await? {
            Ok(()) => continuation.checkpoints.push(checkpoint),
            Err(error) if is_newest => return Err(error.into()),
            Err(error) => {
                tracing::warn!(job = %parent, step, error = chain(&error), "a retry of a job continues without an older checkpoint");
            }
        }
    }
    Ok(continuation)
}
