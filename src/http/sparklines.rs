//! Data for a list of many jobs: a downsampled reward curve per job, and a stream of the jobs' changes.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::broadcast;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Problem, ProblemBody, shortened};
use super::event_stream::{self, Sender, ServerSentEvent, send, wants_stream};
use super::extract::{Json, Query};
use super::jobs::{JobView, bad_query, newest_jobs};
use super::list::List;
use crate::id::JobId;
use crate::store::background::spawn;
use crate::store::{self, JobChange, StoreError};

/// Maximum number of jobs in one request.
const MAX_JOBS: usize = 100;
/// Default number of points of a curve.
const DEFAULT_POINTS: u32 = 48;
/// Maximum number of points of a curve.
const MAX_POINTS: u32 = 1000;
/// Changes of a job within this interval are merged into one event of the stream.
const MERGE_WITHIN: Duration = Duration::from_millis(300);

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list_courses)).routes(routes!(follow_jobs))
}

/// Selects the jobs and the number of points.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SparklineQuery {
    /// Job ids, comma-separated, at most 100.
    #[param(required = true)]
    ids: Option<String>,
    /// Approximate number of points per curve.
    #[param(minimum = 4, maximum = 1000, default = 48)]
    points: Option<u32>,
}

/// The mean reward of a job's training steps over time.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardCourse)]
struct Sparkline {
    /// The job's id, `job_…`.
    id: JobId,
    /// Reward at the first step; null before it.
    first: Option<f64>,
    /// Reward at the latest step; null before the first one.
    last: Option<f64>,
    /// Pairs `[step, reward]` in order of steps: the lowest and the highest value of each interval, and both ends.
    points: Vec<(u64, f64)>,
}

impl From<store::Sparkline> for Sparkline {
    fn from(store::Sparkline { job, points }: store::Sparkline) -> Self {
        let value = |point: Option<&(u64, f64)>| point.map(|(_, reward)| *reward);
        Self { id: job, first: value(points.first()), last: value(points.last()), points }
    }
}

/// List downsampled reward curves of several jobs. Jobs that do not exist are left out.
#[utoipa::path(get, path = "/jobs/courses", tag = "Jobs", params(SparklineQuery), responses(
    (status = 200, description = "The reward curves of the jobs, in the order of `ids`", body = List<Sparkline>),
    (status = 400, description = "A query parameter is not valid", body = ProblemBody)))]
async fn list_courses(
    State(state): State<AppState>,
    caller: Caller,
    Query(SparklineQuery { ids, points }): Query<SparklineQuery>,
) -> Result<Json<List<Sparkline>>, Problem> {
    let points = points.unwrap_or(DEFAULT_POINTS);
    if !(4..=MAX_POINTS).contains(&points) {
        return Err(bad_query("points", "out_of_range", format!("must be between 4 and {MAX_POINTS}, not {points}")));
    }
    let ids = ids.unwrap_or_default();
    let words: Vec<&str> = ids.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
    if !(1..=MAX_JOBS).contains(&words.len()) {
        let detail = format!("name 1 to {MAX_JOBS} jobs, comma-separated, not {}", words.len());
        return Err(bad_query("ids", "out_of_range", detail));
    }
    let id = |word: &&str| {
        word.parse::<JobId>()
            .map_err(|_| bad_query("ids", "invalid_value", format!("'{}' is not the id of a job", shortened(word))))
    };
    let ids = words.iter().map(id).collect::<Result<Vec<_>, _>>()?;
    let courses = state.store.reward_sparklines(&ids, caller.sees(), points / 2).await?;
    Ok(Json(List { data: courses.into_iter().map(Sparkline::from).collect(), next: None }))
}

/// Follow changes of all jobs.
///
/// With `Accept: text/event-stream` the response is a stream of server-sent events from now on: `job` with a job that is new or
/// changed (several changes in quick succession are sent as one event), `gone` with the `{id}` of a deleted job, `reload` when the
/// server had to drop events. The stream reports states, not history: request the list once the stream is open, and again after
/// every reconnect. Without that header the response is the first page of `GET /jobs`.
#[utoipa::path(get, path = "/jobs/changes", tag = "Jobs", responses(
    (status = 200, description = "The stream of job changes, which has no end; or a page of the newest jobs",
        content((List<JobView> = "application/json"), (ServerSentEvent = "text/event-stream"))),
    (status = 429, description = "The API key or the connection has too many open event streams; see `Retry-After`", body = ProblemBody)))]
async fn follow_jobs(State(state): State<AppState>, caller: Caller, headers: HeaderMap) -> Result<Response, Problem> {
    if !wants_stream(&headers) {
        return Ok(Json(newest_jobs(&state, &caller).await?).into_response());
    }
    let (sender, response) = event_stream::open();
    let changes = state.store.changed_jobs();
    spawn(async move {
        if let Err(problem) = follow(&state, &caller, changes, &sender).await {
            tracing::debug!(detail = problem.detail(), "a client's stream of job changes ended early");
        }
    });
    Ok(response)
}

async fn follow(
    state: &AppState,
    caller: &Caller,
    mut changes: broadcast::Receiver<JobChange>,
    sender: &Sender,
) -> Result<(), Problem> {
    if !send(sender, sse::Event::default().comment("changes of all jobs follow")).await {
        return Ok(());
    }
    loop {
        let first = tokio::select! {
            first = changes.recv() => first,
            () = sender.closed() => return Ok(()),
        };
        let mut changed = BTreeMap::new();
        let mut is_lost = false;
        match first {
            Ok(change) => merge_change(&mut changed, change),
            Err(broadcast::error::RecvError::Lagged(_)) => is_lost = true,
            Err(broadcast::error::RecvError::Closed) => return Ok(()),
        }
        tokio::time::sleep(MERGE_WITHIN).await;
        loop {
            match changes.try_recv() {
                Ok(change) => merge_change(&mut changed, change),
                Err(broadcast::error::TryRecvError::Lagged(_)) => is_lost = true,
                Err(_) => break,
            }
        }
        if is_lost && !send(sender, sse::Event::default().event("reload").data("{}")).await {
            return Ok(());
        }
        for (id, deleted_owner) in changed {
            // The stream does not report jobs of other owners, nor their deletion.
            let event = match deleted_owner {
                Some(owner) if caller.may_see(&owner) => {
                    sse::Event::default().event("gone").json_data(json!({"id": id}))
                }
                Some(_) => continue,
                None => match state.store.job_get(id).await {
                    Ok(row) if caller.may_see(&row.owner) => {
                        sse::Event::default().event("job").json_data(JobView::of(state, row).await?)
                    }
                    // The job was deleted in the meantime; its deletion follows as a separate change.
                    Ok(_) | Err(StoreError::NotFound { .. }) => continue,
                    Err(error) => return Err(error.into()),
                },
            };
            if !send(sender, event.map_err(Problem::internal)?).await {
                return Ok(());
            }
        }
    }
}

/// Merges the change of a job into the pending ones. A deletion overrides other changes, whichever arrives last.
fn merge_change(changed: &mut BTreeMap<JobId, Option<String>>, JobChange { id, deleted_owner }: JobChange) {
    let known = changed.entry(id).or_default();
    *known = known.take().or(deleted_owner);
}
