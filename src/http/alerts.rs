//! The alerts of a job, and the reason why a job ended early.

use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::error::{Problem, ProblemBody};
use super::extract::{Json, Path, Query};
use super::list::{List, Time};
use crate::doctor::Alert;
use crate::id::{CheckpointId, JobId};
use crate::job::Ending;
use crate::store::{AlertRow, CheckpointRow};

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list_alerts))
}

/// One episode of an alert of a job.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = JobAlert)]
pub struct AlertView {
    /// The rule, its evidence and the suggested fix.
    #[serde(flatten)]
    alert: Alert,
    /// When the alert was stored.
    time: Time,
    /// The step at which the condition cleared; null while the alert is active.
    cleared_step: Option<u64>,
}

impl From<AlertRow> for AlertView {
    fn from(AlertRow { alert, time, cleared_step }: AlertRow) -> Self {
        Self { alert, time: Time(time), cleared_step }
    }
}

/// A checkpoint and its step.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub struct Marked {
    id: CheckpointId,
    /// Number of optimizer steps completed.
    step: u64,
}

impl From<CheckpointRow> for Marked {
    fn from(row: CheckpointRow) -> Self {
        Self { id: row.id, step: row.step }
    }
}

/// Why a job ended before its last step.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = JobEnding)]
pub struct EndingView {
    /// The reason, with its figures.
    #[serde(flatten)]
    ending: Ending,
    /// The checkpoint that is the job's result: the best one after early stopping, the newest one from before the evidence after an
    /// alert; null if no such checkpoint is kept.
    checkpoint: Option<Marked>,
}

impl EndingView {
    /// Combines the reason why a job ended early with the id and the step of the checkpoint that is its result.
    pub(super) fn new(ending: Ending, result: Option<(CheckpointId, u64)>) -> Self {
        Self { ending, checkpoint: result.map(|(id, step)| Marked { id, step }) }
    }
}

/// Filter of the alerts of a job.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AlertQuery {
    /// Whether to return only alerts that are active.
    #[serde(default)]
    active: bool,
}

/// List a job's alerts, latest first, each with its evidence and a suggested fix.
#[utoipa::path(get, path = "/jobs/{id}/alerts", tag = "Jobs",
    params(("id" = JobId, Path, description = "The job"), AlertQuery),
    responses((status = 200, description = "All alerts of the job", body = List<AlertView>),
        (status = 404, description = "There is no such job", body = ProblemBody)))]
async fn list_alerts(
    State(state): State<AppState>,
    Path(id): Path<JobId>,
    Query(AlertQuery { active }): Query<AlertQuery>,
) -> Result<Json<List<AlertView>>, Problem> {
    state.store.job_get(id).await?;
    let data = state.store.alert_list(id, active).await?.into_iter().map(AlertView::from).collect();
    Ok(Json(List { data, next: None }))
}
