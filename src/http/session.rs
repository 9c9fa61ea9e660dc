//! Browser sessions: a browser signs in with a key and gets a cookie. The key itself is in no URL and in no storage of the page.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::{self, Actor, Caller};
use super::cookie::{self, Cookie};
use super::error::{Code, Problem, ProblemBody};
use super::extract::Json;
use super::list::Time;
use super::throttle::Client;
use crate::id::KeyId;
use crate::scopes::Scope;
use crate::store::{self, NewAudit, SessionKey, clock_ms};

/// Lifetime of a session in seconds: a week, so that a page can stay open during a run.
const SESSION_S: i64 = 7 * 24 * 60 * 60;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(open_session, get_session, end_session))
}

/// A key to sign in with.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SignIn {
    /// A key from `rlood keys create` or `POST /keys`, or the server's RLOOD_API_KEY.
    #[schema(example = "rld_…", min_length = 1, max_length = 4096, format = Password)]
    key: String,
}

/// The current session and its permissions.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Session)]
struct SessionView {
    /// Whether requests need a key. False on a server without keys, where every request is allowed.
    keys_required: bool,
    /// Id of the key; null for RLOOD_API_KEY and without keys.
    key_id: Option<KeyId>,
    /// Name of the key; null for RLOOD_API_KEY and without keys.
    key_name: Option<String>,
    /// Owner whose jobs, datasets and models are shown; null = all owners.
    owner: Option<String>,
    /// Permitted scopes, including implied ones: `read`, `submit`, `admin`, `worker`.
    #[schema(value_type = Vec<Scope>)]
    scopes: crate::scopes::Scopes,
    /// Token to send as `x-csrf-token` with every POST, PATCH, PUT and DELETE; null without a cookie.
    csrf_token: Option<String>,
    /// When the session expires; null without a cookie.
    expires_at: Option<Time>,
}

impl SessionView {
    fn of(caller: &Caller, keys_required: bool, session: Option<(&Cookie, i64)>) -> Self {
        let (key_id, key_name) = match caller.actor() {
            Actor::Key { id, name } => (Some(*id), Some(name.clone())),
            Actor::Anonymous | Actor::Operator => (None, None),
        };
        Self {
            keys_required,
            key_id,
            key_name,
            owner: caller.sees().map(str::to_owned),
            scopes: caller.scopes(),
            csrf_token: session.map(|(cookie, _)| cookie.csrf_token()),
            expires_at: session.map(|(_, expires_at)| Time(expires_at)),
        }
    }
}

/// Sign in with a key and get a session cookie.
///
/// The cookie is `HttpOnly` and `SameSite=Strict`. Send the response's `csrf_token` as `x-csrf-token` with every request that is
/// not GET. A session lasts a week, and ends with its key.
#[utoipa::path(post, path = "/session", tag = "System", request_body = SignIn, responses(
    (status = 201, description = "Signed in", body = SessionView, headers(("Set-Cookie" = String, description = "The cookie of the new session"))),
    (status = 401, description = "The API key is not valid", body = ProblemBody),
    (status = 403, description = "The API key has only the scope worker", body = ProblemBody),
    (status = 429, description = "Too many API keys from this client address were not valid, or too many sign-ins are unfinished; see `Retry-After`", body = ProblemBody)))]
async fn open_session(
    State(state): State<AppState>,
    client: Client,
    Json(SignIn { key }): Json<SignIn>,
) -> Result<Response, Problem> {
    let now = clock_ms();
    state.failures.admit(client, key.trim())?;
    let caller = auth::of_key_text(&state, key.trim()).await?;
    state.failures.record(client, key.trim(), caller.is_some());
    let Some(caller) = caller else {
        return Err(Problem::new(Code::Unauthorized, "the API key is not valid"));
    };
    if !caller.scopes().has(Scope::Read) {
        return Err(Problem::new(Code::Forbidden, "this API key has only the scope worker: it cannot open a session"));
    }
    let cookie = Cookie::new(store::api_keys::random_text().map_err(Problem::internal)?);
    let session_key = match caller.actor() {
        Actor::Key { id, .. } => SessionKey::Key(*id),
        Actor::Anonymous | Actor::Operator => SessionKey::Operator(Sha256::digest(key.trim()).to_vec()),
    };
    let expires_at = now + SESSION_S * 1000;
    state.store.session_create(&cookie.sha256(), session_key, expires_at, now).await?;
    let change = NewAudit {
        actor: caller.audit_name(),
        actor_name: None,
        owner: caller.owner().to_owned(),
        action: "POST /session".to_owned(),
        target: "/session".to_owned(),
        status: Some(201),
        request_id: None,
        address: client.0.map(|address| address.to_string()),
    };
    state.store.audit_add(change, now).await?;
    let view = SessionView::of(&caller, true, Some((&cookie, expires_at)));
    Ok((StatusCode::CREATED, [(header::SET_COOKIE, cookie.header(&state, SESSION_S))], Json(view)).into_response())
}

/// Get the current session, by cookie or by the key in the header.
#[utoipa::path(get, path = "/session", tag = "System", responses(
    (status = 200, description = "The client's current session", body = SessionView),
    (status = 401, description = "The client is not signed in", body = ProblemBody)))]
async fn get_session(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
) -> Result<Json<SessionView>, Problem> {
    let cookie = Cookie::of(&headers).filter(|_| !headers.contains_key(header::AUTHORIZATION));
    let session = match &cookie {
        Some(cookie) => cookie::find_session(&state, cookie).await?.map(|session| (cookie, session.expires_at)),
        None => None,
    };
    Ok(Json(SessionView::of(&caller, auth::keys_are_on(&state).await?, session)))
}

/// Sign out: end the session and remove the cookie. Idempotent.
#[utoipa::path(delete, path = "/session", tag = "System", responses(
    (status = 204, description = "Signed out", headers(("Set-Cookie" = String, description = "A header that removes the session's cookie"))),
    (status = 401, description = "The client is not signed in", body = ProblemBody)))]
async fn end_session(State(state): State<AppState>, headers: HeaderMap) -> Result<Response, Problem> {
    if let Some(cookie) = Cookie::of(&headers) {
        state.store.session_delete(&cookie.sha256()).await?;
    }
    let gone = Cookie::new(String::new()).header(&state, 0);
    Ok((StatusCode::NO_CONTENT, [(header::SET_COOKIE, gone)]).into_response())
}
