//! The messages of a subscription: test, list deliveries, send again.

use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::error::{Code, Problem, ProblemBody};
use crate::http::extract::{Json, Path, Query};
use crate::http::idempotency::{Answer, identity, once};
use crate::http::list::{self, List, Time};
use crate::id::{JobId, WebhookId};
use crate::store::{DeliveryRow, DeliveryState, TryRow, clock_ms};

/// How long a test waits for the endpoint's response.
const TEST_WAIT: Duration = Duration::from_secs(8);

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(test_webhook)).routes(routes!(list_deliveries)).routes(routes!(redeliver))
}

/// A message and its delivery.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = WebhookDelivery)]
struct Delivery {
    /// The `webhook-id` of every attempt.
    #[schema(example = "msg_0123456789abcdef0123456789abcdef")]
    id: String,
    /// Type of the message: one of the subscription's events, or `webhook.test`.
    #[serde(rename = "type")]
    #[schema(example = "job.succeeded")]
    kind: String,
    /// When the event happened.
    time: Time,
    /// The job of the message; null for a test.
    #[schema(value_type = Option<JobId>)]
    job_id: Option<String>,
    /// Current state of the delivery.
    state: DeliveryState,
    /// When the next attempt is due; null if there is none.
    next_try_at: Option<Time>,
    /// All attempts so far, oldest first.
    tries: Vec<Try>,
}

/// One attempt to send a message.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = WebhookTry)]
struct Try {
    /// When the attempt started.
    time: Time,
    /// Duration of the attempt, in milliseconds.
    duration_ms: u64,
    /// HTTP status of the endpoint's response; null if there was none.
    status: Option<u16>,
    /// Why the attempt failed; null if the endpoint accepted the message.
    error: Option<String>,
}

async fn view(state: &AppState, row: DeliveryRow) -> Result<Delivery, Problem> {
    let tries = state.store.delivery_tries(&row.id).await?;
    let one = |TryRow { time, duration_ms, status, error }| Try { time: Time(time), duration_ms, status, error };
    Ok(Delivery {
        tries: tries.into_iter().map(one).collect(),
        id: row.id,
        kind: row.kind,
        time: Time(row.time),
        job_id: row.event.map(|event| event.job),
        next_try_at: (row.state == DeliveryState::Pending).then_some(Time(row.next_at)),
        state: row.state,
    })
}

/// Send a test message, `webhook.test`, and return the result. Waits at most 8 s; after that the result appears among the
/// deliveries, and the message is retried like any other.
#[utoipa::path(post, path = "/webhooks/{id}/test", tag = "Webhooks",
    params(("id" = WebhookId, Path, description = "The webhook"), ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key gets the same answer for 24 hours")),
    responses((status = 200, description = "The webhook message and its delivery attempts", body = Delivery),
        (status = 409, description = "The webhook's subscription is not enabled", body = ProblemBody)))]
async fn test_webhook(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<WebhookId>,
) -> Result<Response, Problem> {
    let work = send_test(state.clone(), id);
    once(&state, &caller, &headers, "POST /webhooks/{id}/test", &identity(id), work).await
}

async fn send_test(state: AppState, id: WebhookId) -> Result<Answer, Problem> {
    check_enabled(&state, id).await?;
    let mut row = state.store.delivery_test(id, clock_ms()).await?;
    let deadline = tokio::time::Instant::now() + TEST_WAIT;
    while row.tries == 0 && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(100)).await;
        row = state.store.delivery_get(id, &row.id).await?;
    }
    Answer::new(StatusCode::OK, None, &view(&state, row).await?)
}

/// Answers 409 if the webhook is not enabled, because nothing would be sent.
async fn check_enabled(state: &AppState, id: WebhookId) -> Result<(), Problem> {
    if state.store.webhook_get(id).await?.enabled {
        return Ok(());
    }
    Err(Problem::new(Code::Conflict, "the webhook is not enabled: PATCH it with {\"enabled\": true} first"))
}

/// Filter of the deliveries.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DeliveryQuery {
    /// Only deliveries in this state.
    #[param(inline)]
    state: Option<DeliveryState>,
    /// The cursor `next` of the previous page.
    after: Option<String>,
    /// Items per page, 1 to 100.
    #[param(minimum = 1, maximum = 100, default = 20)]
    limit: Option<u32>,
}

/// List a subscription's messages with their attempts, newest first.
#[utoipa::path(get, path = "/webhooks/{id}/deliveries", tag = "Webhooks",
    params(("id" = WebhookId, Path, description = "The webhook"), DeliveryQuery),
    responses((status = 200, description = "A page", body = List<Delivery>)))]
async fn list_deliveries(
    State(state): State<AppState>,
    Path(id): Path<WebhookId>,
    Query(query): Query<DeliveryQuery>,
) -> Result<Json<List<Delivery>>, Problem> {
    let DeliveryQuery { state: wanted, after, limit } = query;
    let limit = list::limit(limit)?;
    state.store.webhook_get(id).await?;
    let page = state.store.delivery_list(id, wanted, after.as_deref(), limit).await?;
    let mut data = Vec::with_capacity(page.data.len());
    for row in page.data {
        data.push(view(&state, row).await?);
    }
    Ok(Json(List { data, next: page.next }))
}

/// Send a message again, in any state: the same `webhook-id`, and earlier attempts are kept.
#[utoipa::path(post, path = "/webhooks/{id}/deliveries/{delivery}/redeliver", tag = "Webhooks",
    params(("id" = WebhookId, Path, description = "The webhook"), ("delivery" = String, Path, description = "The message"),
        ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key gets the same answer for 24 hours")),
    responses((status = 202, description = "Queued", body = Delivery),
        (status = 409, description = "The webhook's subscription is not enabled", body = ProblemBody)))]
async fn redeliver(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path((id, delivery)): Path<(WebhookId, String)>,
) -> Result<Response, Problem> {
    let identity = identity(format_args!("{id} {delivery}"));
    let of = state.clone();
    let work = async move {
        check_enabled(&state, id).await?;
        let row = state.store.delivery_again(id, &delivery, clock_ms()).await?;
        Answer::new(StatusCode::ACCEPTED, None, &view(&state, row).await?)
    };
    once(&of, &caller, &headers, "POST /webhooks/{id}/deliveries/{delivery}/redeliver", &identity, work).await
}
