//! `Idempotency-Key`: a repeated POST gets the first response, byte for byte, for 24 hours. Only a secret that the server created
//! is missing from it, because the database must not contain it.

use std::fmt::Display;
use std::future::Future;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::future::BoxFuture;
use serde::Serialize;

use super::AppState;
use super::auth::{Caller, REPLAYED};
use super::error::{Code, Problem, REQUEST_ID};
use crate::digest::Sha256Digest;
use crate::store::background::spawn;
use crate::store::{KeyBegin, clock_ms};

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const MAX_KEY_CHARS: usize = 255;

/// The response to a request that creates something, in a form that can be stored and sent again.
#[derive(Debug, Clone)]
pub struct Answer {
    status: StatusCode,
    location: Option<String>,
    body: String,
    kept: Option<String>,
}

impl Answer {
    /// Creates a response with a JSON body; `location` is the new resource's path.
    pub fn new(status: StatusCode, location: Option<String>, body: &impl Serialize) -> Result<Self, Problem> {
        let body = serde_json::to_string(body).map_err(Problem::internal)?;
        Ok(Self { status, location, body, kept: None })
    }

    /// Sets the body for repetitions: without the secret that only the first response shows.
    pub fn repeated_as(mut self, body: &impl Serialize) -> Result<Self, Problem> {
        self.kept = Some(serde_json::to_string(body).map_err(Problem::internal)?);
        Ok(self)
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let json = HeaderValue::from_static("application/json");
        let mut response = (self.status, [(header::CONTENT_TYPE, json)], Body::from(self.body)).into_response();
        if let Some(Ok(location)) = self.location.map(HeaderValue::try_from) {
            response.headers_mut().insert(header::LOCATION, location);
        }
        response
    }
}

/// Runs `work` at most once per `Idempotency-Key`. Without the header it runs every time. `route` is method and path (`POST
/// /jobs`). Each owner has its own keys. `body_sha256` covers everything that identifies the request. Once started, the work
/// continues even when the client leaves, so that a repetition gets its result. A failed request frees the key.
///
/// # Errors
/// Answers 409 while the first request is running, 422 when the key was used with another body, or the error of `work`.
pub fn once<'a>(
    state: &'a AppState,
    caller: &'a Caller,
    headers: &'a HeaderMap,
    route: &'static str,
    body_sha256: &'a str,
    work: impl Future<Output = Result<Answer, Problem>> + Send + 'static,
) -> BoxFuture<'a, Result<Response, Problem>> {
    // Boxed, so that the tasks below are compiled once and not for every route.
    Box::pin(once_boxed(state, caller, headers, route, body_sha256, Box::pin(work)))
}

async fn once_boxed(
    state: &AppState,
    caller: &Caller,
    headers: &HeaderMap,
    route: &'static str,
    body_sha256: &str,
    work: BoxFuture<'static, Result<Answer, Problem>>,
) -> Result<Response, Problem> {
    let Some(key) = key_of(headers)? else { return work.await.map(IntoResponse::into_response) };
    // Requests of the operator keep the stored form from before keys had owners, so that older Idempotency-Keys stay valid.
    let route = match caller.owner() {
        "" => route.to_owned(),
        owner => format!("{route} {owner}"),
    };
    match state.store.key_begin(&route, &key, body_sha256, clock_ms()).await? {
        KeyBegin::New => {}
        KeyBegin::Replay { status, location, response } => {
            let status = StatusCode::from_u16(status).map_err(Problem::internal)?;
            let mut response = Answer { status, location, body: response, kept: None }.into_response();
            response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
            return Ok(response);
        }
        KeyBegin::OtherBody => {
            let detail = "this Idempotency-Key was already used with another body; use a new key for a new request";
            return Err(Problem::new(Code::IdempotencyMismatch, detail));
        }
        KeyBegin::InFlight => {
            let detail = "the first request with this Idempotency-Key is still running; try again";
            return Err(Problem::new(Code::IdempotencyInFlight, detail).retry_after(1));
        }
    }

    let store = state.store.clone();
    let id = REQUEST_ID.try_with(String::clone).unwrap_or_default();
    let done = spawn(REQUEST_ID.scope(id, async move {
        // The request runs in a task of its own, so that its panic cannot leave the Idempotency-Key marked as in progress.
        let id = REQUEST_ID.try_with(String::clone).unwrap_or_default();
        let result = match spawn(REQUEST_ID.scope(id, work)).await {
            Ok(result) => result,
            Err(error) => Err(Problem::internal(error)),
        };
        match &result {
            Ok(Answer { status, location, body, kept }) => {
                let kept = kept.as_ref().unwrap_or(body);
                store.key_complete(&route, &key, status.as_u16(), location.as_deref(), kept).await?;
            }
            Err(_) => store.key_abandon(&route, &key).await?,
        }
        result
    }));
    done.await.map_err(Problem::internal)?.map(IntoResponse::into_response)
}

/// Returns the hash that [`once`] compares to detect a repeated request: over the ids in its path, and its body if it has one.
pub fn identity(of: impl Display) -> String {
    Sha256Digest::of(of.to_string()).to_string()
}

fn key_of(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(value) = headers.get(IDEMPOTENCY_KEY) else { return Ok(None) };
    match value.to_str() {
        Ok(key) if (1..=MAX_KEY_CHARS).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic()) => {
            Ok(Some(key.to_owned()))
        }
        Ok(_) | Err(_) => {
            let detail =
                format!("Idempotency-Key must consist of 1 to {MAX_KEY_CHARS} visible ASCII characters without spaces");
            Err(Problem::new(Code::InvalidRequest, detail))
        }
    }
}
