//! One API call: its URL, its body, its retries and its response.

use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Response, StatusCode, Url};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::client::Client;
use crate::error::{Error, Problem};
use crate::retry::{Repeat, Tries, was_not_begun};
use crate::upload::{Body, Flow};

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Maximum size of an error body that is read, in bytes.
const MAX_PROBLEM_BYTES: usize = 1 << 20;

/// A request that may be sent several times.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    method: Method,
    url: Url,
    /// Method and path, for error messages.
    label: String,
    body: Body,
    accept: &'static str,
    authorization: Option<HeaderValue>,
    pub(crate) repeat: Repeat,
    /// Time that the server may work before it answers, which is added to the client's time limit.
    work: Duration,
    /// Whether "not found" counts as success for a DELETE request, because an earlier try may have deleted the object.
    gone_is_done: bool,
}

/// A response that was read completely.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
}

impl Client {
    /// Creates a request to `/a/b/c` for `["a", "b", "c"]`. By default it is safe to repeat.
    pub(crate) fn call(&self, method: Method, path: &[&str]) -> Call {
        let mut url = self.inner.base.clone();
        // The builder rejects URLs without path segments (those that cannot be a base).
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        let label = format!("{method} /{}", path.join("/"));
        let authorization = self.inner.authorization.clone();
        let (body, repeat) = (Body::empty(), Repeat::Harmless);
        Call {
            method,
            url,
            label,
            body,
            accept: "application/json",
            authorization,
            repeat,
            work: Duration::ZERO,
            gone_is_done: false,
        }
    }

    pub(crate) fn get(&self, path: &[&str]) -> Call {
        self.call(Method::GET, path)
    }

    /// Creates a request that creates or changes something. The server performs it once, however often it is sent.
    pub(crate) fn post_once(&self, path: &[&str]) -> Call {
        let key = self.idempotency_key.clone().unwrap_or_else(|| ulid::Ulid::generate().to_string().to_lowercase());
        Call { repeat: Repeat::Keyed(key), ..self.call(Method::POST, path) }
    }

    /// Deletes an object. A repeated request may find that the object is gone.
    pub(crate) async fn delete(&self, path: &[&str]) -> Result<(), Error> {
        let call = Call { gone_is_done: true, ..self.call(Method::DELETE, path) };
        self.answer(&call).await.map(drop)
    }

    /// Returns the response's JSON.
    pub(crate) async fn json<T: DeserializeOwned>(&self, call: Call) -> Result<T, Error> {
        let answer = self.answer(&call).await?;
        call.read_json(&answer.body)
    }

    /// Returns the response's text.
    pub(crate) async fn text(&self, call: Call) -> Result<String, Error> {
        let answer = self.answer(&call).await?;
        String::from_utf8(answer.body.into()).map_err(|_| call.not_understood("the server's response is not UTF-8"))
    }

    /// Sends a request until it succeeds or fails permanently, and reads the whole response.
    pub(crate) fn answer<'a>(&'a self, call: &'a Call) -> BoxFuture<'a, Result<Answer, Error>> {
        async move {
            let mut tries = Tries::new(self.inner.retry);
            let mut may_be_done = false;
            loop {
                let error = match self.answer_once(call).await {
                    Ok(answer) => return Ok(answer),
                    Err(error) => error,
                };
                if call.gone_is_done && may_be_done && error.status() == Some(404) {
                    return Ok(Answer { status: StatusCode::NO_CONTENT, body: Bytes::new() });
                }
                match tries.pause_after(&error, &call.repeat) {
                    Some(pause) => sleep(pause).await,
                    None => return Err(error),
                }
                may_be_done |= !error.problem().is_some_and(was_not_begun);
            }
        }
        .boxed()
    }

    async fn answer_once(&self, call: &Call) -> Result<Answer, Error> {
        let limit = self.inner.timeout + call.work;
        let response = self.open(call, &HeaderMap::new(), limit).await?;
        let status = response.status();
        let body = timeout(limit, response.bytes()).await.map_err(|_| call.stalled(limit))?;
        Ok(Answer { status, body: body.map_err(|source| call.interrupted(Some(source)))? })
    }

    /// Sends a request once. `limit` is the time for the response headers after the last byte of the body was sent. An
    /// error status is an error.
    pub(crate) async fn open(&self, call: &Call, headers: &HeaderMap, limit: Duration) -> Result<Response, Error> {
        let mut request = self.inner.http.request(call.method.clone(), call.url.clone()).header(ACCEPT, call.accept);
        if let Some(token) = &self.inner.hub_token {
            request = request.header("x-hub-token", token);
        }
        if let Some(authorization) = &call.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if let Repeat::Keyed(key) = &call.repeat {
            request = request.header(IDEMPOTENCY_KEY, key);
        }
        let flow = Flow::default();
        if !call.body.is_empty() {
            let pieces = call.body.open(&flow).await?;
            request = request
                .header(CONTENT_TYPE, &call.body.content_type)
                .header(CONTENT_LENGTH, call.body.size_bytes())
                .body(reqwest::Body::wrap_stream(pieces));
        }
        let sent = flow.watch(limit, request.headers(headers.clone()).send()).await;
        let response = sent
            .ok_or_else(|| call.stalled(limit))?
            .map_err(|source| Error::Unreachable { request: call.label.clone(), source: source.without_url() })?;
        match response.status() {
            status if status.is_success() => Ok(response),
            status => Err(self.refused(call, status, response).await),
        }
    }

    async fn refused(&self, call: &Call, status: StatusCode, mut response: Response) -> Error {
        let headers = response.headers().clone();
        let mut body = Vec::new();
        let read = async {
            while body.len() < MAX_PROBLEM_BYTES
                && let Ok(Some(piece)) = response.chunk().await
            {
                body.extend_from_slice(&piece);
            }
        };
        // If the body of an error response does not arrive, the error is built from the status alone.
        let _ = timeout(self.inner.timeout, read).await;
        let problem = Box::new(Problem::read(status.as_u16(), &headers, &body));
        Error::Refused { request: call.label.clone(), problem }
    }
}

impl Call {
    /// Adds a query parameter.
    pub(crate) fn query(mut self, name: &str, value: impl ToString) -> Self {
        self.url.query_pairs_mut().append_pair(name, &value.to_string());
        self
    }

    /// Adds a query parameter, if it has a value.
    pub(crate) fn query_if(self, name: &str, value: Option<impl ToString>) -> Self {
        match value {
            Some(value) => self.query(name, value),
            None => self,
        }
    }

    pub(crate) fn body(self, body: Body) -> Self {
        Self { body, ..self }
    }

    pub(crate) fn json(self, body: &Value) -> Self {
        self.body(Body::bytes("application/json", body.to_string()))
    }

    pub(crate) fn accept(self, accept: &'static str) -> Self {
        Self { accept, ..self }
    }

    pub(crate) fn repeat(self, repeat: Repeat) -> Self {
        Self { repeat, ..self }
    }

    /// Sets how long the server may work before it answers.
    pub(crate) fn work(self, work: Duration) -> Self {
        Self { work, ..self }
    }

    /// Sends this token as the credential instead of the client's key.
    pub(crate) fn bearer(self, token: &str) -> Result<Self, Error> {
        let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| {
            Error::Settings("the bearer token has characters that are not allowed in an HTTP header".to_owned())
        })?;
        value.set_sensitive(true);
        Ok(Self { authorization: Some(value), ..self })
    }

    pub(crate) fn read_json<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, Error> {
        serde_json::from_slice(body).map_err(|error| self.not_understood(error))
    }

    pub(crate) fn not_understood(&self, detail: impl ToString) -> Error {
        Error::NotUnderstood { request: self.label.clone(), detail: detail.to_string() }
    }

    pub(crate) fn damaged(&self, detail: impl Into<String>) -> Error {
        Error::Damaged { request: self.label.clone(), detail: detail.into() }
    }

    pub(crate) fn stalled(&self, limit: Duration) -> Error {
        Error::Stalled { request: self.label.clone(), limit }
    }

    pub(crate) fn interrupted(&self, source: Option<reqwest::Error>) -> Error {
        let source = source.map(reqwest::Error::without_url);
        Error::Interrupted { request: self.label.clone(), source }
    }
}
