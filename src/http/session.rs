//! A browser signs in with a key and gets a cookie for it: the key itself is in no URL and in no storage of the page.

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
use crate::access::Scope;
use crate::id::KeyId;
use crate::store::{self, NewAudit, SessionKey, clock_ms};

/// How long a session lasts: a week, so that a page may stay open during a run.
const SESSION_S: i64 = 7 * 24 * 60 * 60;

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(open_session, get_session, end_session))
}

/// A key, to sign in with.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SignIn {
    /// As `rlood keys create` or `POST /keys` showed it, or the server's RLOOD_API_KEY.
    #[schema(example = "rld_…", min_length = 1, max_length = 4096, format = Password)]
    key: String,
}

/// Who is signed in, and what they may do.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Session)]
struct SessionView {
    /// False on a server without keys: everybody may do everything, and nobody signs in.
    keys_required: bool,
    /// The key; null for RLOOD_API_KEY and without keys.
    key_id: Option<KeyId>,
    /// The key's name.
    key_name: Option<String>,
    /// Whose jobs, datasets and models are shown; null = everybody's.
    owner: Option<String>,
    /// `read`, `submit`, `admin`, `worker`; each with those it holds.
    #[schema(value_type = Vec<Scope>)]
    scopes: crate::access::Scopes,
    /// To be sent as `x-csrf-token` with every POST, PATCH, PUT and DELETE; null without a cookie.
    csrf_token: Option<String>,
    /// When the session ends by itself; null without a cookie.
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

/// Sign in: a key becomes a cookie.
///
/// The cookie is `HttpOnly` and `SameSite=Strict`. Send the answer's `csrf_token` as `x-csrf-token` with everything that is
/// not GET. A session lasts a week, and ends with its key.
#[utoipa::path(post, path = "/session", tag = "System", request_body = SignIn, responses(
    (status = 201, description = "Signed in", body = SessionView, headers(("Set-Cookie" = String, description = "The session's cookie"))),
    (status = 401, description = "Not a valid key", body = ProblemBody),
    (status = 403, description = "A key for workers only", body = ProblemBody),
    (status = 429, description = "Too many keys from this address were not valid, or too many sign-ins are unfinished; see `Retry-After`", body = ProblemBody)))]
async fn open_session(
    State(state): State<AppState>,
    client: Client,
    Json(SignIn { key }): Json<SignIn>,
) -> Result<Response, Problem> {
    let now = clock_ms();
    state.failures.admit(client, key.trim())?;
    let caller = auth::of_key_text(&state, key.trim()).await?;
    state.failures.note(client, key.trim(), caller.is_some());
    let Some(caller) = caller else {
        return Err(Problem::new(Code::Unauthorized, "this is not a valid key"));
    };
    if !caller.scopes().has(Scope::Read) {
        return Err(Problem::new(Code::Forbidden, "this key is for workers: it opens no session"));
    }
    let cookie = Cookie::new(store::api_keys::random_text().map_err(Problem::internal)?);
    let session_key = match caller.actor() {
        Actor::Key { id, .. } => SessionKey::Key(*id),
        Actor::Anonymous | Actor::Operator => SessionKey::Operator(Sha256::digest(key.trim()).to_vec()),
    };
    let expires_at = now + SESSION_S * 1000;
    state.store.session_create(&cookie.sha256(), session_key, expires_at, now).await?;
    let change = NewAudit {
        actor: caller.word(),
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

/// Who is signed in: by cookie, or by the key in the header.
#[utoipa::path(get, path = "/session", tag = "System", responses(
    (status = 200, description = "Who asks; on a server without keys everybody", body = SessionView),
    (status = 401, description = "Nobody is signed in", body = ProblemBody)))]
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

/// Sign out: the session ends, the cookie goes. Idempotent.
#[utoipa::path(delete, path = "/session", tag = "System", responses(
    (status = 204, description = "Signed out", headers(("Set-Cookie" = String, description = "Removes the cookie"))),
    (status = 401, description = "Nobody is signed in", body = ProblemBody)))]
async fn end_session(State(state): State<AppState>, headers: HeaderMap) -> Result<Response, Problem> {
    if let Some(cookie) = Cookie::of(&headers) {
        state.store.session_delete(&cookie.sha256()).await?;
    }
    let gone = Cookie::new(String::new()).header(&state, 0);
    Ok((StatusCode::NO_CONTENT, [(header::SET_COOKIE, gone)]).into_response())
}
