//! Subscriptions to lifecycle messages: create, change, delete. The sent messages are in `deliveries`.

mod deliveries;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, FieldError, Problem, ProblemBody};
use super::extract::{HashedJson, Json, Path, Query};
use super::idempotency::{Answer, identity, once};
use super::list::{List, PageQuery, Time};
use super::reach;
use crate::id::WebhookId;
use crate::outgoing::OutgoingError;
use crate::reward::signature::Key;
use crate::scopes::Scope;
use crate::store::clock_ms;
use crate::store::webhooks::{KeepOld, MAX_OLD_SECRETS, NewWebhook, WebhookPatch, WebhookRow};
use crate::webhooks::MessageType;

/// Maximum number of subscriptions per owner; the same limit applies to subscriptions to all owners' jobs.
const MAX_WEBHOOKS: u64 = 100;
/// Maximum length of the URL and of the description, in characters.
const MAX_CHARS: usize = 2000;
/// Default time in seconds for which an old secret remains valid after a rotation.
const OLD_SECRET_S: u32 = 24 * 60 * 60;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(create_webhook, list_webhooks))
        .routes(routes!(get_webhook, patch_webhook, delete_webhook))
        .routes(routes!(rotate_secret))
        .merge(deliveries::routes())
}

/// A subscription to lifecycle messages. Its secret is never shown.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Webhook)]
struct WebhookView {
    /// The webhook's id, `whk_…`.
    id: WebhookId,
    /// Address that messages are sent to.
    url: String,
    /// Description of the webhook; null if none.
    description: Option<String>,
    /// Types of messages to send.
    events: Vec<MessageType>,
    /// Whether messages are sent. Events that happen while it is false are not sent later.
    enabled: bool,
    /// Why the server disabled the webhook: the endpoint answered 410. Null otherwise.
    disabled_reason: Option<String>,
    /// Whether the webhook covers all owners' jobs. Only keys with the scope admin can create, see and change such webhooks.
    all_jobs: bool,
    /// Owner of the key that created the webhook; empty = the operator.
    owner: String,
    /// Until when messages are also signed with older secrets; null if there are none.
    old_secret_until: Option<Time>,
    /// When the webhook was created.
    created_at: Time,
    /// When the webhook was last changed.
    updated_at: Time,
}

impl From<WebhookRow> for WebhookView {
    fn from(row: WebhookRow) -> Self {
        let WebhookRow {
            id,
            owner,
            all_jobs,
            url,
            description,
            types,
            secret: _,
            old_secrets,
            enabled,
            disabled_reason,
            created_at,
            updated_at,
        } = row;
        let now = clock_ms();
        let old_secret_until = old_secrets.iter().map(|(_, until)| *until).filter(|until| *until > now).max().map(Time);
        Self {
            id,
            url,
            description,
            events: types,
            enabled,
            disabled_reason,
            all_jobs,
            owner,
            old_secret_until,
            created_at: Time(created_at),
            updated_at: Time(updated_at),
        }
    }
}

/// A subscription with a secret that the server generated.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = WebhookWithSecret)]
struct WithSecret {
    /// Secret to verify messages with, shown only in this response. Null if you sent one, and if the request is repeated with the
    /// same `Idempotency-Key`: if the first response was lost, rotate the secret.
    secret: Option<String>,
    /// The properties of the webhook.
    #[serde(flatten)]
    webhook: WebhookView,
}

/// A subscription to create.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct CreateWebhook {
    /// Address for messages, http or https. The operator must allow private addresses.
    #[schema(example = "https://example.com/rlood", max_length = 2000)]
    url: String,
    /// Types of messages to send. Default: all.
    #[serde(default)]
    events: Option<Vec<MessageType>>,
    /// Description of the webhook.
    #[serde(default)]
    #[schema(max_length = 2000)]
    description: Option<String>,
    /// Signing secret: `whsec_` and base64 of 24 to 64 bytes. Default: the server generates one and shows it in the response.
    #[serde(default)]
    #[schema(example = "whsec_…", write_only)]
    secret: Option<String>,
    /// Whether messages are sent. Default: true.
    #[serde(default)]
    enabled: Option<bool>,
    /// Whether the webhook covers all owners' jobs. Default: true with the scope admin, otherwise false; true
    /// requires the scope admin.
    #[serde(default)]
    all_jobs: Option<bool>,
}

/// The fields to change; all are optional.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = WebhookPatch)]
struct PatchWebhook {
    /// Address that messages are sent to.
    #[serde(default)]
    #[schema(max_length = 2000)]
    url: Option<String>,
    /// Types of messages to send.
    #[serde(default)]
    events: Option<Vec<MessageType>>,
    /// Description of the webhook; null removes it.
    #[serde(default, with = "nullable")]
    #[schema(value_type = Option<String>, max_length = 2000)]
    description: Option<Option<String>>,
    /// Whether messages are sent.
    #[serde(default)]
    enabled: Option<bool>,
}

/// Deserializes a field that may be absent, null, or a value.
mod nullable {
    use serde::{Deserialize, Deserializer};

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<String>>, D::Error> {
        Option::<String>::deserialize(deserializer).map(Some)
    }
}

fn item(pointer: &str, code: &str, detail: impl Into<String>) -> FieldError {
    FieldError { pointer: pointer.to_owned(), code: code.to_owned(), detail: detail.into() }
}

/// Checks the URL and returns it in normalized form.
async fn read_url(state: &AppState, url: &str, errors: &mut Vec<FieldError>) -> Result<String, Problem> {
    let policy = reach::outgoing(state).await?;
    if url.len() > MAX_CHARS {
        errors.push(item("/url", "too_long", format!("at most {MAX_CHARS} characters")));
        return Ok(String::new());
    }
    if url.contains(char::is_control) {
        errors.push(item("/url", "invalid", "must not contain control characters (line breaks, tabs)"));
    }
    match policy.check_url(url) {
        Ok(parsed) => Ok(parsed.into()),
        Err(error) => {
            let detail = match error {
                OutgoingError::Credentials => {
                    "the URL must not contain a user name or password: messages are authenticated by their signature"
                        .into()
                }
                error => error.to_string(),
            };
            errors.push(item("/url", "invalid", detail));
            Ok(String::new())
        }
    }
}

fn check(events: Option<&[MessageType]>, description: Option<&str>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if events.is_some_and(<[MessageType]>::is_empty) {
        errors.push(item("/events", "required", "name at least one type of event; omit the field for all types"));
    }
    if description.is_some_and(|text| text.chars().count() > MAX_CHARS) {
        errors.push(item("/description", "too_long", format!("at most {MAX_CHARS} characters")));
    }
    errors
}

fn refuse(errors: Vec<FieldError>) -> Result<(), Problem> {
    match errors.first() {
        None => Ok(()),
        Some(first) => {
            let detail = format!("{}: {}", first.pointer, first.detail);
            Err(Problem::new(Code::InvalidBody, detail).items(errors))
        }
    }
}

/// Checks a given secret, or generates one to be shown.
fn secret_of(given: Option<String>, errors: &mut Vec<FieldError>) -> Result<(String, Option<String>), Problem> {
    match given {
        Some(secret) => {
            if let Err(error) = Key::parse(&secret) {
                errors.push(item("/secret", "invalid", error.to_string()));
            }
            Ok((secret, None))
        }
        None => {
            let secret = Key::generate().map_err(Problem::internal)?;
            Ok((secret.clone(), Some(secret)))
        }
    }
}

fn sorted(mut types: Vec<MessageType>) -> Vec<MessageType> {
    types.sort_unstable();
    types.dedup();
    types
}

/// Subscribe to lifecycle messages.
///
/// Messages are sent by POST according to Standard Webhooks: `webhook-id`, `webhook-timestamp`, `webhook-signature` (HMAC-SHA256 of
/// `id.timestamp.body`), and a body `{type, timestamp, data}`. Any response but 2xx is retried after 5 s, 5 min, 30 min, 2 h, 5 h,
/// 10 h, 14 h, 20 h and 24 h, with the same `webhook-id`; 410 disables the subscription.
#[utoipa::path(post, path = "/webhooks", tag = "Webhooks", request_body = CreateWebhook,
    params(("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key and body gets the same answer for 24 hours, except for the secret: only the first answer shows it")), responses(
    (status = 201, description = "Created", body = WithSecret, headers(("Location" = String, description = "Its path"))),
    (status = 403, description = "Only a key with the scope admin may subscribe to the jobs of all owners", body = ProblemBody),
    (status = 409, description = "The owner already has 100 webhooks", body = ProblemBody),
    (status = 422, description = "A field of the request is not valid", body = ProblemBody)))]
async fn create_webhook(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    HashedJson(body, sha256): HashedJson<CreateWebhook>,
) -> Result<Response, Problem> {
    let work = subscribe(state.clone(), caller.clone(), body);
    once(&state, &caller, &headers, "POST /webhooks", &sha256, work).await
}

async fn subscribe(state: AppState, caller: Caller, body: CreateWebhook) -> Result<Answer, Problem> {
    let CreateWebhook { url, events, description, secret, enabled, all_jobs } = body;
    let mut errors = check(events.as_deref(), description.as_deref());
    let url = read_url(&state, &url, &mut errors).await?;
    let (secret, shown) = secret_of(secret, &mut errors)?;
    refuse(errors)?;
    let is_admin = caller.scopes().has(Scope::Admin);
    if all_jobs == Some(true) && !is_admin {
        let detail = "all_jobs requires a key with the scope 'admin'; omit it to subscribe to your own jobs";
        return Err(Problem::new(Code::Forbidden, detail));
    }
    let all_jobs = all_jobs.unwrap_or(is_admin);
    if state.store.webhook_count(caller.owner(), all_jobs).await? >= MAX_WEBHOOKS {
        return Err(Problem::new(
            Code::Conflict,
            format!("there are already {MAX_WEBHOOKS} webhooks; delete one first"),
        ));
    }
    let new = NewWebhook {
        owner: caller.owner().to_owned(),
        all_jobs,
        url,
        description,
        types: sorted(events.unwrap_or_else(|| MessageType::ALL.to_vec())),
        secret,
        enabled: enabled.unwrap_or(true),
    };
    let row = state.store.webhook_create(new, clock_ms()).await?;
    let location = format!("/webhooks/{}", row.id);
    with_secret(StatusCode::CREATED, Some(location), shown, row)
}

/// Builds the response that shows a generated secret. Repetitions of it for the same `Idempotency-Key` leave the secret out.
fn with_secret(
    status: StatusCode,
    location: Option<String>,
    secret: Option<String>,
    row: WebhookRow,
) -> Result<Answer, Problem> {
    let mut view = WithSecret { secret, webhook: row.into() };
    let answer = Answer::new(status, location, &view)?;
    view.secret = None;
    answer.repeated_as(&view)
}

/// List subscriptions, newest first.
#[utoipa::path(get, path = "/webhooks", tag = "Webhooks", params(PageQuery),
    responses((status = 200, description = "A page", body = List<WebhookView>)))]
async fn list_webhooks(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<PageQuery>,
) -> Result<Json<List<WebhookView>>, Problem> {
    let page = state.store.webhook_list(caller.sees(), query.after.as_deref(), query.limit()?).await?;
    Ok(Json(List::of(page, WebhookView::from)))
}

/// Get a subscription by its id.
#[utoipa::path(get, path = "/webhooks/{id}", tag = "Webhooks", params(("id" = WebhookId, Path, description = "The webhook")),
    responses((status = 200, description = "The subscription", body = WebhookView)))]
async fn get_webhook(State(state): State<AppState>, Path(id): Path<WebhookId>) -> Result<Json<WebhookView>, Problem> {
    Ok(Json(state.store.webhook_get(id).await?.into()))
}

/// Change a subscription. When it is enabled again, pending messages are sent.
#[utoipa::path(patch, path = "/webhooks/{id}", tag = "Webhooks", request_body = PatchWebhook,
    params(("id" = WebhookId, Path, description = "The webhook")), responses(
    (status = 200, description = "The subscription", body = WebhookView),
    (status = 422, description = "A field of the request is not valid", body = ProblemBody)))]
async fn patch_webhook(
    State(state): State<AppState>,
    Path(id): Path<WebhookId>,
    Json(body): Json<PatchWebhook>,
) -> Result<Json<WebhookView>, Problem> {
    let PatchWebhook { url, events, description, enabled } = body;
    let mut errors = check(events.as_deref(), description.as_ref().and_then(Option::as_deref));
    let url = match url {
        Some(url) => Some(read_url(&state, &url, &mut errors).await?),
        None => None,
    };
    refuse(errors)?;
    let patch = WebhookPatch { url, description, types: events.map(sorted), enabled };
    Ok(Json(state.store.webhook_patch(id, patch, clock_ms()).await?.into()))
}

/// Delete a subscription. Pending messages are not sent.
#[utoipa::path(delete, path = "/webhooks/{id}", tag = "Webhooks", params(("id" = WebhookId, Path, description = "The webhook")),
    responses((status = 204, description = "Deleted")))]
async fn delete_webhook(State(state): State<AppState>, Path(id): Path<WebhookId>) -> Result<StatusCode, Problem> {
    state.store.webhook_delete(id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A request to rotate the secret.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Rotate {
    /// Signing secret: `whsec_` and base64 of 24 to 64 bytes. Default: the server generates one and shows it in the response.
    #[serde(default)]
    #[schema(example = "whsec_…", write_only)]
    secret: Option<String>,
    /// Seconds for which the old secret keeps signing too; older secrets end no later than that. 0 = only the new secret signs from
    /// now on. Default: one day, and older secrets keep their end.
    #[serde(default)]
    #[schema(maximum = 604800, example = 86400)]
    keep_old_s: Option<u32>,
}

/// Rotate the signing secret.
///
/// For a while messages also carry a signature with each older secret, so that receivers have time to switch, even if the secret
/// is rotated again meanwhile.
#[utoipa::path(post, path = "/webhooks/{id}/secret", tag = "Webhooks", request_body = Rotate,
    params(("id" = WebhookId, Path, description = "The webhook"), ("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key and body gets the same answer for 24 hours, except for the secret: only the first answer shows it")), responses(
    (status = 200, description = "The subscription", body = WithSecret),
    (status = 409, description = "Ten older secrets of the webhook are still valid", body = ProblemBody),
    (status = 422, description = "A field of the request is not valid", body = ProblemBody)))]
async fn rotate_secret(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    Path(id): Path<WebhookId>,
    HashedJson(body, sha256): HashedJson<Rotate>,
) -> Result<Response, Problem> {
    let work = rotate(state.clone(), id, body);
    let identity = identity(format_args!("{id} {sha256}"));
    once(&state, &caller, &headers, "POST /webhooks/{id}/secret", &identity, work).await
}

async fn rotate(state: AppState, id: WebhookId, Rotate { secret, keep_old_s }: Rotate) -> Result<Answer, Problem> {
    let mut errors = Vec::new();
    let (secret, shown) = secret_of(secret, &mut errors)?;
    if keep_old_s.is_some_and(|seconds| seconds > 7 * OLD_SECRET_S) {
        errors.push(item("/keep_old_s", "out_of_range", "the old secret may stay valid for at most a week: 604800"));
    }
    refuse(errors)?;
    let now = clock_ms();
    let until = |seconds: u32| now + i64::from(seconds) * 1000;
    let keep = keep_old_s.map_or(KeepOld::Until(until(OLD_SECRET_S)), |seconds| KeepOld::AtMost(until(seconds)));
    let Some(row) = state.store.webhook_rotate(id, &secret, keep, now).await? else {
        let detail = format!(
            "{MAX_OLD_SECRETS} older secrets are still valid: wait until they expire, or end them with {{\"keep_old_s\": 0}}"
        );
        return Err(Problem::new(Code::Conflict, detail));
    };
    with_secret(StatusCode::OK, None, shown, row)
}
