//! A browser signs in with a key and gets a cookie for it: the key itself is in no URL and in no storage of the page.
//!
//! The cookie is a random text, `HttpOnly`, `SameSite=Strict`, and `Secure` where the server is reached by https. A request
//! that changes something must repeat, in a header, a token that only a page of this server can have read.

use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::{self, Actor, Caller};
use super::error::{Code, Problem, ProblemBody};
use super::extract::Json;
use super::list::Time;
use super::submit::hex;
use super::throttle::Client;
use crate::access::Scope;
use crate::id::KeyId;
use crate::store::{self, NewAudit, SessionKey, SessionRow, StoreError, clock_ms};

/// The cookie's name.
const COOKIE: &str = "rlood_session";
/// What a request with the cookie repeats the token in.
pub(super) const CSRF_HEADER: HeaderName = HeaderName::from_static("x-csrf-token");
/// How long a session lasts: a week, so that a page may stay open during a run.
const SESSION_S: i64 = 7 * 24 * 60 * 60;

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(open_session, get_session, end_session))
}

/// The value of a session's cookie.
#[derive(Clone)]
pub(super) struct Cookie(String);

impl std::fmt::Debug for Cookie {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cookie(redacted)")
    }
}

impl Cookie {
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let pairs = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut pairs = pairs.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
        pairs.find(|(name, _)| *name == COOKIE).map(|(_, value)| Self(value.to_owned()))
    }

    fn sha256(&self) -> Vec<u8> {
        Sha256::digest(&self.0).to_vec()
    }

    /// Follows from the cookie, which pages cannot read; so it need not be kept.
    fn csrf_token(&self) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.as_bytes()).expect("HMAC takes keys of any length");
        mac.update(b"rlood csrf token");
        hex(&mac.finalize().into_bytes())
    }

    /// 403 when the request changes something and does not repeat the token.
    pub(super) fn check_csrf(&self, method: &Method, given: Option<&HeaderValue>) -> Result<(), Problem> {
        if matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) {
            return Ok(());
        }
        let expected = self.csrf_token();
        if given.is_some_and(|given| bool::from(given.as_bytes().ct_eq(expected.as_bytes()))) {
            return Ok(());
        }
        let detail = "with the session's cookie, send the csrf_token of GET /session as 'x-csrf-token'";
        Err(Problem::new(Code::InvalidCsrfToken, detail))
    }

    /// What the browser sent.
    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// For `Set-Cookie`.
    fn header(&self, state: &AppState, seconds: i64) -> String {
        let https = state.config.public_url.as_deref().is_some_and(|url| url.starts_with("https:"));
        let secure = if https { "; Secure" } else { "" };
        format!("{COOKIE}={}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}", self.0)
    }
}

/// The session behind a cookie, while it and its key are good.
pub(super) async fn find(state: &AppState, cookie: &Cookie) -> Result<Option<SessionRow>, StoreError> {
    let found = state.store.session_find(&cookie.sha256(), clock_ms()).await?;
    Ok(found.filter(|session| match &session.operator_sha256 {
        None => session.key.is_some(),
        Some(sha256) => state
            .config
            .api_key
            .as_deref()
            .is_some_and(|key| bool::from(Sha256::digest(key).as_slice().ct_eq(sha256.as_slice()))),
    }))
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
    let cookie = Cookie(store::api_keys::random_text().map_err(Problem::internal)?);
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
        Some(cookie) => find(&state, cookie).await?.map(|session| (cookie, session.expires_at)),
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
    let gone = Cookie(String::new()).header(&state, 0);
    Ok((StatusCode::NO_CONTENT, [(header::SET_COOKIE, gone)]).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cookie_is_found_among_others() {
        let mut headers = HeaderMap::new();
        headers.append(header::COOKIE, HeaderValue::from_static("a=1; rlood_session=xyz; rlood_session_2=q"));
        assert_eq!(Cookie::of(&headers).unwrap().0, "xyz");
        assert!(Cookie::of(&HeaderMap::new()).is_none());
    }

    #[test]
    fn only_the_cookies_own_token_passes() {
        let cookie = Cookie("xyz".to_owned());
        let token = HeaderValue::from_str(&cookie.csrf_token()).unwrap();
        assert!(cookie.check_csrf(&Method::POST, Some(&token)).is_ok());
        assert!(cookie.check_csrf(&Method::GET, None).is_ok());
        assert!(cookie.check_csrf(&Method::DELETE, None).is_err());
        assert!(Cookie("xyy".to_owned()).check_csrf(&Method::POST, Some(&token)).is_err());
    }
}
