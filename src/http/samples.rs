//! A job's completions, with rewards and advantages.

use axum::extract::State;
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::error::{Problem, ProblemBody};
use super::extract::{Json, Path, Query};
use super::jobs::bad_query;
use super::list::{self, List};
use crate::event::{Sample, SamplePhase};
use crate::id::JobId;
use crate::store::{self, SampleQuery};

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list_samples))
}

/// The order of samples.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum SampleSort {
    /// Latest first.
    #[default]
    Recent,
    /// Highest reward first; unscorable ones last.
    Best,
    /// Lowest reward first; unscorable ones last.
    Worst,
}

/// Which samples, in which order.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct SamplesQuery {
    /// Of this optimizer step; 0 = before the start.
    step: Option<u64>,
    /// Training or evaluation.
    #[param(inline)]
    phase: Option<SamplePhase>,
    /// The order.
    #[serde(default)]
    #[param(inline)]
    sort: SampleSort,
    /// Prompt or completion contains this (case ignored).
    q: Option<String>,
    /// The cursor `next` of the page before.
    after: Option<String>,
    /// Items on a page, 1 to 100.
    #[param(minimum = 1, maximum = 100, default = 20)]
    limit: Option<u32>,
}

/// Every completion of a job, with its rewards and its advantage.
#[utoipa::path(get, path = "/jobs/{id}/samples", tag = "Jobs", params(("id" = JobId, Path, description = "The job"), SamplesQuery), responses(
    (status = 200, description = "A page", body = List<Sample>), (status = 400, description = "A parameter is not valid", body = ProblemBody),
    (status = 404, description = "No such job", body = ProblemBody)))]
async fn list_samples(
    State(state): State<AppState>,
    Path(id): Path<JobId>,
    Query(query): Query<SamplesQuery>,
) -> Result<Json<List<Sample>>, Problem> {
    if query.q.as_ref().is_some_and(|text| text.chars().count() > 1000) {
        return Err(bad_query("q", "out_of_range", "must be at most 1000 characters long"));
    }
    state.store.job_get(id).await?;
    let sort = match query.sort {
        SampleSort::Recent => store::SampleSort::Recent,
        SampleSort::Best => store::SampleSort::Best,
        SampleSort::Worst => store::SampleSort::Worst,
    };
    let query = SampleQuery {
        step: query.step,
        phase: query.phase,
        sort,
        contains: query.q.filter(|text| !text.is_empty()),
        after: query.after,
        limit: list::limit(query.limit)?,
    };
    let page = state.store.sample_page(id, &query).await?;
    Ok(Json(List::of(page, |row| row.sample)))
}
