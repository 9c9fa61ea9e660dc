//! The record of changes, for admins.

use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::error::Problem;
use super::extract::{Json, Query};
use super::list::{self, List, Time};
use crate::store::{AuditRow, NewAudit};

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list_changes))
}

/// Which changes.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AuditQuery {
    /// By this key's id, or: operator, anonymous, command_line, server.
    actor: Option<String>,
    /// Of this thing and what lies below it: `/jobs/job_…`.
    target: Option<String>,
    /// The cursor `next` of the page before.
    after: Option<String>,
    /// Items on a page, 1 to 100.
    #[param(minimum = 1, maximum = 100, default = 20)]
    limit: Option<u32>,
}

/// A change that somebody made.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AuditEvent)]
struct Change {
    /// Counts up.
    id: i64,
    /// When.
    time: Time,
    /// Who: the id of a key, or `operator` (RLOOD_API_KEY), `anonymous` (no keys), `command_line`, `server`.
    actor: String,
    /// The key's name.
    actor_name: Option<String>,
    /// The key's owner; empty = the operator.
    owner: String,
    /// What: method and route, or the command.
    #[schema(example = "POST /jobs/{id}/cancel")]
    action: String,
    /// Of what: the path, or that of what was made.
    #[schema(example = "/jobs/job_01jd0000000000000000000000")]
    target: String,
    /// The answer's status; null for commands.
    status: Option<u16>,
    /// As in the answer and in the log.
    request_id: Option<String>,
    /// Where it came from.
    address: Option<String>,
}

impl From<AuditRow> for Change {
    fn from(AuditRow { id, time, change }: AuditRow) -> Self {
        let NewAudit { actor, actor_name, owner, action, target, status, request_id, address } = change;
        Self { id, time: Time(time), actor, actor_name, owner, action, target, status, request_id, address }
    }
}

/// Who changed what, newest first.
///
/// Every request that was not a question, was not refused and did not fail, and every `rlood keys`. A repetition with the same
/// `Idempotency-Key` is no second change.
#[utoipa::path(get, path = "/audit", tag = "Keys", params(AuditQuery),
    responses((status = 200, description = "A page", body = List<Change>)))]
async fn list_changes(
    State(state): State<AppState>,
    Query(query): Query<AuditQuery>,
) -> Result<Json<List<Change>>, Problem> {
    let AuditQuery { actor, target, after, limit } = query;
    let limit = list::limit(limit)?;
    let page = state.store.audit_list(actor.as_deref(), target.as_deref(), after.as_deref(), limit).await?;
    Ok(Json(List::of(page, Change::from)))
}
