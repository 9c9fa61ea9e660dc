//! Authenticates requests and checks what each caller may do.
//!
//! A request carries a key (`Authorization: Bearer KEY`), or the cookie of a session that was opened with a key (`cookie.rs`).
//! `RLOOD_API_KEY` is one key with every scope; other keys are in the database. While no key exists, the server listens on loopback
//! only and every request is allowed; once a key was created, every request needs one. The scope that a route requires is listed in
//! [`crate::scopes`]. Ownership is checked here for every path with an id, and by the handlers for lists and for ids in a body.
//! Worker routes need the worker token, or a key with the scope `worker`.
//!
//! This file is longer than others: the rules of who owns which path are easier to review on one page.

pub(super) mod models;
mod streams;
mod workers;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::AppState;
use super::cookie::{self, CSRF_HEADER, Cookie};
use super::error::{Code, Problem, REQUEST_ID};
use super::throttle::Client;
use crate::hub::Token;
use crate::id::KeyId;
use crate::listen::Connection;
use crate::scopes::{self, Access, Scope, Scopes};
use crate::store::background::spawn;
use crate::store::{KeyRow, ModelRow, NewAudit, StoreError, clock_ms};

use models::find;
use streams::{Asker, over};

pub use streams::Streams;
pub(crate) use workers::{WorkerPass, require_worker};

/// Response header that marks the repetition of an earlier response for the same Idempotency-Key. Such a request changed
/// nothing, so the audit log does not record it.
pub(super) const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// A read request that takes longer than this has its credential checked again before it is answered.
const RECHECK_AFTER: Duration = Duration::from_millis(100);
/// Minimum interval between two updates of a key's last use, in ms.
const LAST_USE_INTERVAL_MS: i64 = 60_000;

/// Request header with the token for the Hugging Face Hub to use for this request.
const HUB_TOKEN: &str = "x-hub-token";

/// The authenticated caller. Handlers take it as an argument.
#[derive(Debug, Clone)]
pub struct Caller {
    who: Arc<Identity>,
    /// The `x-hub-token` of this request.
    hub_token: Option<Token>,
}

#[derive(Debug)]
struct Identity {
    actor: Actor,
    owner: String,
    scopes: Scopes,
}

/// The kind of credential that a request carried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Actor {
    /// No credential, on a server without keys.
    Anonymous,
    /// The key in `RLOOD_API_KEY`.
    Operator,
    /// A key from the database.
    Key { id: KeyId, name: String },
}

impl Caller {
    fn new(actor: Actor, owner: String, scopes: Scopes) -> Self {
        Self { who: Arc::new(Identity { actor, owner, scopes }), hub_token: None }
    }

    fn everything(actor: Actor) -> Self {
        Self::new(actor, String::new(), Scopes::of([Scope::Admin]))
    }

    /// Creates a caller for work that an owner's earlier request left to the server; empty = the operator.
    pub(super) fn on_behalf_of(owner: &str) -> Self {
        match owner {
            "" => Self::everything(Actor::Anonymous),
            owner => Self::new(Actor::Anonymous, owner.to_owned(), Scopes::of([Scope::Read, Scope::Submit])),
        }
    }

    fn of_key(key: &KeyRow) -> Self {
        Self::new(Actor::Key { id: key.id, name: key.name.clone() }, key.owner.clone(), key.scopes)
    }

    /// Returns the kind of credential.
    pub fn actor(&self) -> &Actor {
        &self.who.actor
    }

    /// Returns the permitted scopes.
    pub fn scopes(&self) -> Scopes {
        self.who.scopes
    }

    /// Owner of the resources that this caller creates; empty = the operator.
    pub fn owner(&self) -> &str {
        &self.who.owner
    }

    /// Owner whose resources this caller sees. None = all owners.
    pub fn sees(&self) -> Option<&str> {
        (!self.who.scopes.has(Scope::Admin)).then_some(self.who.owner.as_str())
    }

    /// Returns the hub token that came with the request. It is never stored.
    pub fn hub_token(&self) -> Option<&Token> {
        self.hub_token.as_ref()
    }

    /// Whether the caller sees resources of this owner.
    pub fn may_see(&self, owner: &str) -> bool {
        self.sees().is_none_or(|own| own == owner)
    }

    /// Whether the caller may use a model. Shared models are available to every caller.
    pub fn may_use_model(&self, model: &ModelRow) -> bool {
        model.is_shared() || self.may_see(&model.owner)
    }

    /// Returns the actor as the audit log stores it.
    pub fn audit_name(&self) -> String {
        match self.actor() {
            Actor::Anonymous => "anonymous".to_owned(),
            Actor::Operator => "operator".to_owned(),
            Actor::Key { id, .. } => id.to_string(),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Problem> {
        let caller = parts.extensions.get::<Caller>().cloned();
        let mut caller = caller.ok_or_else(|| {
            Problem::internal("a handler needs the caller, but the authentication layer does not cover its route")
        })?;
        if let Some(given) = parts.headers.get(HUB_TOKEN) {
            let token = given.to_str().ok().and_then(Token::new);
            let refused = || Problem::new(Code::InvalidRequest, "the header x-hub-token must contain a hub token");
            caller.hub_token = Some(token.ok_or_else(refused)?);
        }
        Ok(caller)
    }
}

/// The credential that a request carried, kept to check during a long request that it is still valid.
#[derive(Debug, Clone)]
pub(super) enum Credential {
    None,
    Bearer(String),
    Cookie(Cookie),
}

impl Credential {
    fn of(headers: &HeaderMap) -> Self {
        if let Some(given) = headers.get(header::AUTHORIZATION) {
            let token = match given.to_str().unwrap_or("").split_once(' ') {
                Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => token.trim(),
                Some(_) | None => "",
            };
            return Credential::Bearer(token.to_owned());
        }
        Cookie::of(headers).map_or(Credential::None, Credential::Cookie)
    }

    /// The text of the credential, if there is one.
    fn text(&self) -> Option<&str> {
        match self {
            Credential::None => None,
            Credential::Bearer(text) => Some(text),
            Credential::Cookie(cookie) => Some(cookie.text()),
        }
    }

    /// The 401 response for a credential that is invalid or no longer valid.
    fn refused(&self) -> Problem {
        challenge(match self {
            Credential::None => "send 'authorization: Bearer KEY', or sign in with POST /session",
            Credential::Bearer(_) => "the bearer token is not a valid API key",
            Credential::Cookie(_) => "the session has ended; sign in again with POST /session",
        })
    }

    /// Finds the caller that a credential belongs to. None = the credential is invalid or no longer valid.
    async fn caller(&self, state: &AppState) -> Result<Option<Caller>, StoreError> {
        let caller = match self {
            Credential::None => None,
            Credential::Bearer(text) => of_key_text(state, text).await?,
            Credential::Cookie(cookie) => {
                cookie::find_session(state, cookie).await?.map(|session| match &session.key {
                    Some(key) => Caller::of_key(key),
                    None => Caller::everything(Actor::Operator),
                })
            }
        };
        // A server without keys needs no credential, and ignores one that a client sends anyway.
        Ok(match caller {
            None if !keys_are_on(state).await? => Some(Caller::everything(Actor::Anonymous)),
            caller => caller,
        })
    }
}

/// Whether requests need a key. True from the first key on, even after that key was revoked or expired.
pub(super) async fn keys_are_on(state: &AppState) -> Result<bool, StoreError> {
    if state.config.api_key.is_some() || state.has_keys.load(Ordering::Relaxed) {
        return Ok(true);
    }
    let exist = state.store.api_keys_exist().await?;
    state.has_keys.fetch_or(exist, Ordering::Relaxed);
    Ok(exist)
}

/// Finds the caller that an API key belongs to.
pub(super) async fn of_key_text(state: &AppState, text: &str) -> Result<Option<Caller>, StoreError> {
    if state.config.api_key.as_deref().is_some_and(|key| is_equal(text, key)) {
        return Ok(Some(Caller::everything(Actor::Operator)));
    }
    let now = clock_ms();
    let Some(key) = state.store.api_key_find(text, now).await? else { return Ok(None) };
    if key.used_at.is_none_or(|used_at| now - used_at >= LAST_USE_INTERVAL_MS) {
        let (store, id) = (state.store.clone(), key.id);
        spawn(async move {
            if let Err(error) = store.api_key_used(id, now).await {
                tracing::warn!(
                    error = super::error::chain(&error),
                    "could not store the time of an API key's last use"
                );
            }
        });
    }
    Ok(Some(Caller::of_key(&key)))
}

/// Whether two secrets are equal. Compares their digests, so that the time does not depend on how much of a guess is right.
pub(super) fn is_equal(given: &str, expected: &str) -> bool {
    !expected.is_empty() && bool::from(Sha256::digest(given).ct_eq(&Sha256::digest(expected)))
}

fn challenge(detail: &str) -> Problem {
    Problem::new(Code::Unauthorized, detail).header(header::WWW_AUTHENTICATE, "Bearer realm=\"rlood\"")
}

/// Authentication layer of all routes except web pages and the worker protocol. Answers 401 without a valid credential, 403
/// without the required scope, 404 for resources of other owners. Records changes in the audit log.
pub(crate) async fn require_access(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let method = request.method().clone();
    let declared = route.as_ref().and_then(|route| scopes::of_route(method.as_str(), route));
    let others =
        route.as_ref().filter(|_| declared.is_none()).map(|route| scopes::methods_of(route)).unwrap_or_default();
    let access = match &route {
        // A public route: its existence is documented openly, so every client gets 405 for a wrong method.
        Some(_) if others.iter().any(|(_, access)| *access == Access::Open) => return not_taken(&method, &others),
        Some(_) if !others.is_empty() => Access::Needs(Scope::Read),
        Some(_) => declared.unwrap_or(Access::Needs(Scope::Admin)),
        // An unknown route requires a key like others, so that a client without a key does not learn which routes exist.
        None => Access::Needs(Scope::Read),
    };
    let headers = request.headers().clone();
    let client = Client::of(&state, &headers, request.extensions());
    let Access::Needs(scope) = access else {
        // Clients without an API key are limited per IP address.
        request.extensions_mut().insert(client);
        return next.run(request).await;
    };
    let scope = route.is_some().then_some(scope);
    let (caller, credential) = match admit(&state, client, &method, &headers, scope).await {
        Ok(admitted) => admitted,
        Err(problem) => return problem.into_response(),
    };
    if !others.is_empty() {
        return not_taken(&method, &others);
    }
    let path = request.uri().path().to_owned();
    if let Some(route) = &route
        && let Err(problem) = check_owner(&state, &caller, &method, route, &path).await
    {
        return problem.into_response();
    }
    let note = route
        .filter(|route| scopes::changes(method.as_str(), route))
        .map(|route| (format!("{method} {route}"), path, client.0.map(|address| address.to_string())));
    request.extensions_mut().insert(caller.clone());
    let connection = request.extensions().get::<Connection>().cloned();
    let response = match &note {
        None => answer_while_good(&state, &credential, next.run(request)).await,
        // Only reads are ended when the key becomes invalid. A request that changes something runs to its end, because dropping
        // its response would only hide the result.
        Some(_) => next.run(request).await,
    };
    // The audit log records only requests that changed something: not failed ones, not repeated responses.
    let changed = !response.status().is_client_error()
        && !response.status().is_server_error()
        && !response.headers().contains_key(REPLAYED);
    if let Some((action, target, address)) = note.filter(|_| changed) {
        // The path of the resource that was created, if there is one.
        let made = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
        let target = made.map_or(target, str::to_owned);
        record_change(&state, &caller, AuditEntry { action, target, address, status: response.status() }).await;
    }
    streams::bounded(&state, Asker { caller, client, credential, connection }, response)
}

/// Answers 405 for a method that this route does not support.
fn not_taken(method: &Method, others: &[(&'static str, Access)]) -> Response {
    let allowed: Vec<&str> = others
        .iter()
        .flat_map(|(method, _)| if *method == "GET" { vec!["GET", "HEAD"] } else { vec![*method] })
        .collect();
    let allowed = allowed.join(", ");
    let detail = format!("this path does not accept the method {method}; use {allowed}");
    Problem::new(Code::MethodNotAllowed, detail).header(header::ALLOW, allowed).into_response()
}

/// Checks the credential of a request and its scope. For an unknown route `scope` is None: with any valid key
/// the answer is 404.
async fn admit(
    state: &AppState,
    client: Client,
    method: &Method,
    headers: &HeaderMap,
    scope: Option<Scope>,
) -> Result<(Caller, Credential), Problem> {
    let credential = Credential::of(headers);
    let shown = credential.text();
    if let Some(shown) = shown {
        state.failures.admit(client, shown)?;
    }
    let caller = credential.caller(state).await?;
    if let Some(shown) = shown {
        state.failures.record(client, shown, caller.is_some());
    }
    let Some(caller) = caller else {
        return Err(credential.refused());
    };
    if let (Credential::Cookie(cookie), Actor::Operator | Actor::Key { .. }) = (&credential, caller.actor()) {
        cookie.check_csrf(method, headers.get(CSRF_HEADER))?;
    }
    if let Some(scope) = scope
        && !caller.scopes().has(scope)
    {
        let detail = format!(
            "this request requires an API key with the scope '{scope}'; the given key has: {}",
            caller.scopes()
        );
        return Err(Problem::new(Code::Forbidden, detail));
    }
    Ok((caller, credential))
}

/// Answers 404 when the path names a resource of another owner, with the same text as for one that does not exist.
async fn check_owner(
    state: &AppState,
    caller: &Caller,
    method: &Method,
    route: &str,
    path: &str,
) -> Result<(), Problem> {
    if caller.sees().is_none() {
        return Ok(());
    }
    let mut pattern = route.trim_start_matches('/').split('/');
    let (kind, Some("{id}")) = (pattern.next().unwrap_or(""), pattern.next()) else { return Ok(()) };
    let Some(id) = path.trim_start_matches('/').split('/').nth(1).and_then(percent_decoded) else { return Ok(()) };
    let store = &state.store;
    // An id that cannot be parsed has no owner to check; the handler answers 404 for it.
    let owner = match kind {
        "jobs" => match id.parse() {
            Ok(id) => store.job_owner(id).await?,
            Err(_) => return Ok(()),
        },
        "datasets" => match id.parse() {
            Ok(id) => store.dataset_owner(id).await?,
            Err(_) => return Ok(()),
        },
        "adapters" => match id.parse() {
            Ok(id) => store.adapter_owner(id).await?,
            Err(_) => return Ok(()),
        },
        "checkpoints" => match id.parse() {
            Ok(id) => store.checkpoint_owner(id).await?,
            Err(_) => return Ok(()),
        },
        "verdicts" | "exports" | "pushes" => store.task_owner(&id).await?,
        "webhooks" => match id.parse() {
            Ok(id) => store.webhook_owner(id).await?,
            Err(_) => return Ok(()),
        },
        // An id may mean the caller's own private model, so the handler looks it up in the same way, and answers 404.
        "models" => match find(state, caller, &id).await? {
            Some(row) if row.is_shared() && !matches!(*method, Method::GET | Method::HEAD) => {
                return Err(Problem::new(
                    Code::Forbidden,
                    "this model is shared by all owners: only a key with the scope 'admin' may change it",
                ));
            }
            Some(_) | None => return Ok(()),
        },
        _ => {
            let detail = format!("no ownership rule exists for the id in the path of {route}");
            return Err(Problem::internal(detail));
        }
    };
    match owner {
        Some(owner) if !caller.may_see(&owner) => Err(Problem::not_found(kind.trim_end_matches('s'), id)),
        Some(_) | None => Ok(()),
    }
}

fn percent_decoded(segment: &str) -> Option<String> {
    let bytes = segment.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'%' {
            decoded.push(u8::from_str_radix(segment.get(at + 1..at + 3)?, 16).ok()?);
            at += 3;
        } else {
            decoded.push(bytes[at]);
            at += 1;
        }
    }
    String::from_utf8(decoded).ok()
}

/// A change to record in the audit log, taken from the request and its response.
struct AuditEntry {
    action: String,
    target: String,
    address: Option<String>,
    status: StatusCode,
}

async fn record_change(state: &AppState, caller: &Caller, noted: AuditEntry) {
    let AuditEntry { action, target, address, status } = noted;
    let change = NewAudit {
        actor: caller.audit_name(),
        actor_name: match caller.actor() {
            Actor::Key { name, .. } => Some(name.clone()),
            Actor::Anonymous | Actor::Operator => None,
        },
        owner: caller.owner().to_owned(),
        action,
        target,
        status: Some(status.as_u16()),
        request_id: REQUEST_ID.try_with(String::clone).ok(),
        address,
    };
    if let Err(error) = state.store.audit_add(change, clock_ms()).await {
        tracing::error!(error = super::error::chain(&error), "could not write a change to the audit log");
    }
}

/// Waits for the response of a read request, and returns 401 as soon as the caller's credential is no longer valid: a long poll
/// can take an hour.
async fn answer_while_good(
    state: &AppState,
    credential: &Credential,
    answer: impl Future<Output = Response>,
) -> Response {
    let begun = Instant::now();
    let response = tokio::select! {
        response = answer => response,
        () = over(state, credential) => return credential.refused().into_response(),
    };
    if begun.elapsed() >= RECHECK_AFTER && is_over(state, credential).await {
        return credential.refused().into_response();
    }
    response
}

/// Whether a credential is no longer valid. False after a database error, so that the error does not end the request.
async fn is_over(state: &AppState, credential: &Credential) -> bool {
    matches!(credential.caller(state).await, Ok(None))
}

/// Returns `Ok` when the request carries this bearer token.
pub(super) fn check_bearer(headers: &HeaderMap, expected: &str) -> Result<(), Problem> {
    match Credential::of(headers) {
        Credential::Bearer(token) if is_equal(&token, expected) => Ok(()),
        Credential::Bearer(_) => Err(challenge("the bearer token is not valid for this route")),
        Credential::None | Credential::Cookie(_) => Err(challenge("send 'authorization: Bearer TOKEN'")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_decoded_once() {
        assert_eq!(percent_decoded("Qwen%2FQwen3"), Some("Qwen/Qwen3".to_owned()));
        assert_eq!(percent_decoded("a%252F"), Some("a%2F".to_owned()));
        for broken in ["%", "%2", "%zz", "%ff"] {
            assert_eq!(percent_decoded(broken), None, "{broken}");
        }
    }

    #[test]
    fn an_empty_key_is_not_a_key() {
        assert!(!is_equal("", "") && is_equal("a", "a") && !is_equal("a", "b"));
    }
}
