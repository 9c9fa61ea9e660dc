//! The audit log, for admins.

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

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(list_changes))
}

/// Filter of the audit log.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AuditQuery {
    /// Only changes by this actor: the id of a key, or `operator`, `anonymous`, `command_line` or `server`.
    actor: Option<String>,
    /// Only changes of this resource and the resources below it, as a path: `/jobs/job_…`.
    target: Option<String>,
    /// The cursor `next` of the previous page.
    after: Option<String>,
    /// Items per page, 1 to 100.
    #[param(minimum = 1, maximum = 100, default = 20)]
    limit: Option<u32>,
}

/// One entry of the audit log.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AuditEvent)]
struct Change {
    /// Ascending number of the entry.
    id: i64,
    /// When the change was made.
    time: Time,
    /// Who made the change: the id of a key, or `operator` (RLOOD_API_KEY), `anonymous` (no keys), `command_line`, `server`.
    actor: String,
    /// Name of the key; null if the actor is not a key.
    actor_name: Option<String>,
    /// Owner of the key; empty = the operator.
    owner: String,
    /// The change: method and route of the request, or the command.
    #[schema(example = "POST /jobs/{id}/cancel")]
    action: String,
    /// Path of the resource that was changed or created.
    #[schema(example = "/jobs/job_01jd0000000000000000000000")]
    target: String,
    /// HTTP status of the response; null for commands.
    status: Option<u16>,
    /// The request id, as in the response and in the server's log; null for commands.
    request_id: Option<String>,
    /// Client address; null if unknown.
    address: Option<String>,
}

impl From<AuditRow> for Change {
    fn from(AuditRow { id, time, change }: AuditRow) -> Self {
        let NewAudit { actor, actor_name, owner, action, target, status, request_id, address } = change;
        Self { id, time: Time(time), actor, actor_name, owner, action, target, status, request_id, address }
    }
}

/// List changes with the actor of each, newest first.
///
/// Contains every successful request that changed something, and every `rlood keys` command that did. A repeated request with the
/// same `Idempotency-Key` is recorded once.
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
