//! API keys over REST, for admins. `rlood keys` does the same on the server's machine.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::{self, Caller};
use super::error::{Code, FieldError, Problem, ProblemBody};
use super::extract::{HashedJson, Json, Path, Query};
use super::idempotency::{Answer, once};
use super::list::{List, PageQuery, Time};
use crate::id::{KeyId, WebhookId};
use crate::scopes::{Scope, Scopes};
use crate::store::webhooks::WebhookRow;
use crate::store::{KeyRow, NewKey, clock_ms};

/// Maximum length of the name of a key or an owner, in characters.
const MAX_NAME_CHARS: usize = 100;
/// Maximum lifetime of a key that expires: ten years, in seconds.
const MAX_LIFETIME_S: i64 = 10 * 366 * 24 * 60 * 60;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(create_key, list_keys)).routes(routes!(get_key, revoke_key))
}

/// An API key, without its text.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ApiKey)]
struct KeyView {
    /// The key's id, `key_…`.
    id: KeyId,
    /// Display name of the key.
    name: String,
    /// Owner whose jobs, datasets and models the key sees (all owners with the scope admin). Keys may share an owner.
    owner: String,
    /// Permitted scopes, including implied ones.
    #[schema(value_type = Vec<Scope>)]
    scopes: Scopes,
    /// The first characters of the key.
    #[schema(example = "rld_0a1b2c3d")]
    prefix: String,
    /// Current state: `active`, `expired` or `revoked`.
    state: KeyState,
    /// When the key was created.
    created_at: Time,
    /// When the key expires; null = never.
    expires_at: Option<Time>,
    /// When the key was revoked; null if it was not.
    revoked_at: Option<Time>,
    /// When the key was last used, to the minute; null = never.
    used_at: Option<Time>,
}

/// Whether a key is valid.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum KeyState {
    /// The key is valid.
    Active,
    /// The key has expired.
    Expired,
    /// The key was revoked.
    Revoked,
}

impl From<KeyRow> for KeyView {
    fn from(row: KeyRow) -> Self {
        let state = match row.revoked_at {
            Some(_) => KeyState::Revoked,
            None if row.is_usable(clock_ms()) => KeyState::Active,
            None => KeyState::Expired,
        };
        let KeyRow { id, name, owner, scopes, prefix, created_at, expires_at, revoked_at, used_at } = row;
        Self {
            id,
            name,
            owner,
            scopes,
            prefix,
            state,
            created_at: Time(created_at),
            expires_at: expires_at.map(Time),
            revoked_at: revoked_at.map(Time),
            used_at: used_at.map(Time),
        }
    }
}

/// A newly created key.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NewApiKey)]
struct Made {
    /// The key itself, shown only in this response. Null if the request is repeated with the same `Idempotency-Key`: if the first
    /// response was lost, revoke the key and create another.
    #[schema(example = "rld_…")]
    key: Option<String>,
    /// The properties of the key.
    #[serde(flatten)]
    view: KeyView,
}

/// A key that was revoked.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RevokedApiKey)]
struct Revoked {
    #[serde(flatten)]
    view: KeyView,
    /// Webhooks of the key's owner. They outlive the key and keep sending: if the key was stolen, delete webhooks that you do
    /// not recognize (`DELETE /webhooks/{id}`).
    webhooks: Vec<OwnersWebhook>,
}

/// A webhook of a key's owner.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RevokedKeyWebhook)]
struct OwnersWebhook {
    /// The webhook's id, `whk_…`.
    id: WebhookId,
    /// Address that messages are sent to.
    url: String,
    /// Description of the webhook; null if none.
    description: Option<String>,
    /// Whether messages are sent.
    enabled: bool,
    /// When the webhook was created.
    created_at: Time,
}

impl From<WebhookRow> for OwnersWebhook {
    fn from(row: WebhookRow) -> Self {
        let WebhookRow { id, url, description, enabled, created_at, .. } = row;
        Self { id, url, description, enabled, created_at: Time(created_at) }
    }
}

/// A key to create.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct CreateKey {
    /// Display name of the key, 1 to 100 characters.
    #[schema(example = "ci", min_length = 1, max_length = 100)]
    name: String,
    /// Scopes that the key permits.
    #[schema(min_items = 1)]
    scopes: Vec<Scope>,
    /// Owner whose jobs, datasets and models the key sees. Keys with one owner share them. Default: an owner of its own.
    #[serde(default)]
    #[schema(min_length = 1, max_length = 100)]
    owner: Option<String>,
    /// Lifetime in seconds; null = does not expire.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 316224000)]
    expires_in_s: Option<i64>,
}

/// Checks a name; `what` is its field.
pub(super) fn check_name(what: &str, name: &str) -> Option<FieldError> {
    let good = !name.trim().is_empty() && name.chars().count() <= MAX_NAME_CHARS && !name.chars().any(char::is_control);
    let detail = format!("must have 1 to {MAX_NAME_CHARS} characters, none of them a control character");
    (!good).then(|| FieldError { pointer: format!("/{what}"), code: "invalid".to_owned(), detail })
}

/// Create an API key. The response shows the key once.
///
/// From the first key on, every request needs a key. The first key must therefore have the scope `admin`,
/// unless RLOOD_API_KEY is set.
#[utoipa::path(post, path = "/keys", tag = "Keys", request_body = CreateKey,
    params(("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same Idempotency-Key and body gets the same answer for 24 hours, except for the API key itself: only the first answer shows it")), responses(
    (status = 201, description = "Created", body = Made, headers(("Location" = String, description = "Its path"))),
    (status = 422, description = "A field of the request is not valid", body = ProblemBody)))]
async fn create_key(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    HashedJson(body, sha256): HashedJson<CreateKey>,
) -> Result<Response, Problem> {
    let work = make(state.clone(), body);
    once(&state, &caller, &headers, "POST /keys", &sha256, work).await
}

async fn make(state: AppState, body: CreateKey) -> Result<Answer, Problem> {
    let CreateKey { name, scopes, owner, expires_in_s } = body;
    let mut errors: Vec<FieldError> = check_name("name", &name).into_iter().collect();
    errors.extend(owner.as_deref().and_then(|owner| check_name("owner", owner)));
    let mut wrong = |pointer: &str, code: &str, detail: &str| {
        errors.push(FieldError { pointer: pointer.to_owned(), code: code.to_owned(), detail: detail.to_owned() });
    };
    if scopes.is_empty() {
        wrong("/scopes", "required", "name at least one of the scopes read, submit, admin, worker");
    } else if !scopes.contains(&Scope::Admin) && !auth::keys_are_on(&state).await? {
        let detail = "the first key of a server must have the scope admin: otherwise no further key could be created";
        wrong("/scopes", "first_key_not_admin", detail);
    }
    if expires_in_s.is_some_and(|seconds| !(1..=MAX_LIFETIME_S).contains(&seconds)) {
        wrong("/expires_in_s", "out_of_range", "must be between 1 second and ten years (316224000)");
    }
    if !errors.is_empty() {
        return Err(Problem::new(Code::InvalidBody, "the API key cannot be created; see 'errors'").items(errors));
    }
    let now = clock_ms();
    let expires_at = expires_in_s.map(|seconds| now + seconds * 1000);
    let new = NewKey { name, owner, scopes: Scopes::of(scopes), expires_at };
    let (row, key) = state.store.api_key_create(new, now).await?;
    let location = format!("/keys/{}", row.id);
    let mut made = Made { key: Some(key), view: row.into() };
    let answer = Answer::new(StatusCode::CREATED, Some(location), &made)?;
    made.key = None;
    answer.repeated_as(&made)
}

/// List all keys, newest first, including revoked ones.
#[utoipa::path(get, path = "/keys", tag = "Keys", params(PageQuery),
    responses((status = 200, description = "A page", body = List<KeyView>)))]
async fn list_keys(
    State(state): State<AppState>,
    Query(query): Query<PageQuery>,
) -> Result<Json<List<KeyView>>, Problem> {
    let page = state.store.api_key_list(query.after.as_deref(), query.limit()?).await?;
    Ok(Json(List::of(page, KeyView::from)))
}

/// Get an API key by its id.
#[utoipa::path(get, path = "/keys/{id}", tag = "Keys", params(("id" = KeyId, Path, description = "The key")),
    responses((status = 200, description = "The key", body = KeyView)))]
async fn get_key(State(state): State<AppState>, Path(id): Path<KeyId>) -> Result<Json<KeyView>, Problem> {
    Ok(Json(state.store.api_key_get(id).await?.into()))
}

/// Revoke a key. The key and every session opened with it end immediately. Its row stays. Idempotent.
///
/// Webhooks outlive the key that created them: the response lists those of the key's owner.
#[utoipa::path(delete, path = "/keys/{id}", tag = "Keys", params(("id" = KeyId, Path, description = "The key")),
    responses((status = 200, description = "The API key, which is revoked, and the webhooks of its owner", body = Revoked)))]
async fn revoke_key(State(state): State<AppState>, Path(id): Path<KeyId>) -> Result<Json<Revoked>, Problem> {
    let row = state.store.api_key_revoke(id, clock_ms()).await?;
    let webhooks = state.store.webhooks_of(&row.owner).await?.into_iter().map(OwnersWebhook::from).collect();
    Ok(Json(Revoked { view: row.into(), webhooks }))
}
