//! Authenticates workers by the worker token or by a key, and checks the credential again while a worker waits for a job.

use axum::extract::{FromRequestParts, Request, State};
use axum::http::HeaderMap;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::{Credential, challenge, check_bearer};
use crate::http::AppState;
use crate::http::error::{Code, Problem};
use crate::http::throttle::Client;
use crate::listen::Connection;
use crate::scopes::Scope;
use crate::store::clock_ms;

/// Layer of the worker routes. Answers 401 unless the request carries the worker token or a key with the scope `worker`.
pub(crate) async fn require_worker(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let headers = request.headers().clone();
    let client = Client::of(&state, &headers, request.extensions());
    match admit_worker(&state, client, &headers).await {
        Ok(()) => {
            if let Some(connection) = request.extensions().get::<Connection>() {
                connection.mark_worker();
            }
            request.extensions_mut().insert(WorkerPass(headers));
            next.run(request).await
        }
        Err(problem) => problem.into_response(),
    }
}

/// The credential of a worker, for handlers that wait: they check it again before they hand out a job.
#[derive(Clone)]
pub struct WorkerPass(HeaderMap);

impl WorkerPass {
    /// Answers 401 if the worker's key was revoked while the request waited.
    pub async fn check(&self, state: &AppState) -> Result<(), Problem> {
        check_worker(state, &self.0).await
    }
}

impl<S: Send + Sync> FromRequestParts<S> for WorkerPass {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Problem> {
        let pass = parts.extensions.get::<WorkerPass>().cloned();
        pass.ok_or_else(|| Problem::internal("the worker authentication layer does not cover a route of workers"))
    }
}

async fn admit_worker(state: &AppState, client: Client, headers: &HeaderMap) -> Result<(), Problem> {
    let credential = Credential::of(headers);
    let Some(shown) = credential.text() else { return check_worker(state, headers).await };
    state.failures.admit(client, shown)?;
    let checked = check_worker(state, headers).await;
    match &checked {
        Ok(()) => state.failures.record(client, shown, true),
        Err(problem) if problem.code() == Code::Unauthorized => state.failures.record(client, shown, false),
        // After a database error the validity of the token is unknown, so it counts neither as success nor as failure.
        Err(_) => {}
    }
    checked
}

async fn check_worker(state: &AppState, headers: &HeaderMap) -> Result<(), Problem> {
    let refused = match check_bearer(headers, &state.config.worker_token) {
        Ok(()) => return Ok(()),
        Err(refused) => refused,
    };
    let Credential::Bearer(token) = Credential::of(headers) else { return Err(refused) };
    match state.store.api_key_find(&token, clock_ms()).await? {
        Some(key) if key.scopes.has(Scope::Worker) => Ok(()),
        Some(_) | None => {
            Err(challenge("the bearer token is neither the worker token nor a key with the scope 'worker'"))
        }
    }
}
