//! Sends a request to a reward service with retries: the same id and bytes each time, with a new timestamp and signature.

use std::sync::PoisonError;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Response, Url};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use super::account::Wire;
use super::asynchronous;
use super::dialect::{HealthCheck, ReadHealthCheck};
use super::endpoint::{Failing, Trouble};
use super::record::{Exchange, Received, Sent, readable_body, readable_headers};
use super::request::{Request, ping_body};
use super::wait::{MAX_WAIT, doubled, jitter, random_bits, random_fraction};
use super::wire::{Answered, NotSent, OVERSIZE, TIMED_OUT};
use super::{Counts, RewardFailure, Webhook};
use crate::callback::Accepted;
use crate::id::RewardRequestId;
use crate::secret_filter::Preserved;
use crate::signed_post::{self, SendError, Signed, retry_after, set_header};
use crate::status::Waiting;

/// Maximum size of a response in bytes. The rest of a larger one is not received.
const MAX_RESPONSE_BYTES: usize = 8 << 20;
/// Longest wait between two attempts during an outage of the service, and the longest `Retry-After` that is respected.
const MAX_OUTAGE_WAIT: Duration = Duration::from_secs(300);
/// Time after which a request counts as waiting in the job's status, like a request that is being retried.
const SLOW_REQUEST: Duration = Duration::from_secs(5);

/// Result of sending a request with retries.
#[derive(Debug)]
pub(super) enum Delivered {
    /// The body of an answer with status 200, unchanged.
    Body(Vec<u8>),
    /// An answer that cannot be used; another request may get a usable one.
    Unusable(String),
    /// An error status that a retry would not change.
    Permanent(String),
    /// The service answered 404.
    NotFound(String),
    /// The service answered 413: the request is too large.
    TooLarge,
    /// The service answered 202: it accepted the request and will send the results later.
    Accepted(Accepted),
}

/// Result of one attempt to send a request.
enum Attempt {
    Done(Delivered),
    Gone,
    Refused(String),
    Failed { why: String, trouble: Trouble, retry_after: Option<Duration> },
}

/// A service's answer to a health check.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct Ping {
    /// Whether the service answered with a 2xx status.
    pub ok: bool,
    /// HTTP status; null if there was no response.
    pub status: Option<u16>,
    /// Error message; null if the service answered with a 2xx status.
    pub error: Option<String>,
    /// Time until the response, in milliseconds.
    pub latency_ms: f64,
    /// Capabilities that the service reported; null if it reported none.
    pub reply: Option<PingReply>,
}

/// Capabilities that a service may report. Every field is optional.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PingReply {
    /// Maximum number of samples that the service accepts in one request.
    #[serde(default)]
    pub max_batch_samples: Option<u32>,
    /// Supported modes: `sync`, `async`.
    #[serde(default)]
    pub modes: Option<Vec<String>>,
    /// Smallest and largest reward that the service returns.
    #[serde(default)]
    pub range: Option<Vec<f64>>,
}

impl Webhook {
    /// Sends a request until the service answers. Connection errors, timeouts, 408, 425, 429 and 5xx are retried: `max_tries`
    /// times quickly, then at growing intervals, and never while the endpoint's circuit breaker is open. Gives up after the
    /// service has failed for `max_outage_s`.
    pub(super) async fn deliver(&self, request: &Request) -> Result<(Delivered, Counts), RewardFailure> {
        let max_outage = Duration::from_secs(self.plan.max_outage_s);
        let mut counts = Counts::default();
        let mut failures = 0;
        let mut since = None;
        let mut waiting = None;
        loop {
            let permit = match self.endpoint.try_enter() {
                Some(permit) => permit,
                None => {
                    let _waiting = Waiting::new(&self.status);
                    self.endpoint.enter(max_outage, since).await.map_err(|failing| self.outage_of(&failing))?
                }
            };
            let start = Instant::now();
            counts.requests += 1;
            let mut pending = std::pin::pin!(self.attempt(request));
            let outcome = match tokio::time::timeout(SLOW_REQUEST, &mut pending).await {
                Ok(outcome) => outcome,
                Err(_) => {
                    waiting.get_or_insert_with(|| Waiting::new(&self.status));
                    pending.await
                }
            };
            let (why, trouble, retry_after) = match outcome {
                Attempt::Done(delivered) => {
                    self.report_breaker(permit.answered(), "");
                    self.outage.end();
                    return Ok((delivered, counts));
                }
                Attempt::Gone => {
                    permit.answered();
                    return Err(RewardFailure::Gone { reward: self.name.clone() });
                }
                Attempt::Refused(detail) => return Err(RewardFailure::Refused { reward: self.name.clone(), detail }),
                Attempt::Failed { why, trouble, retry_after } => (why, trouble, retry_after),
            };
            failures += 1;
            waiting.get_or_insert_with(|| Waiting::new(&self.status));
            self.outage.failed(&self.status, &self.name, &why, self.plan.max_outage_s);
            let asked_to_wait = retry_after.map(|wait| wait.min(MAX_OUTAGE_WAIT));
            self.report_breaker(permit.failed(trouble, asked_to_wait, &why), &why);
            let own = *since.get_or_insert(start);
            let begun = self.endpoint.failing().map_or(own, |failing| own.min(failing.since));
            let left = max_outage.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(self.outage_of(&Failing { since: begun, cause: why }));
            }
            let wait = if self.endpoint.is_open() {
                // The open circuit breaker delays the next attempt, so no other wait is needed.
                Duration::ZERO
            } else if failures < self.plan.max_tries {
                jitter(failures)
            } else {
                // The circuit breaker is closed, so the service answers other requests but not this one: wait 30 s, doubling up to
                // 5 min, each time a random part between half and full.
                let longest = doubled(MAX_WAIT, failures - self.plan.max_tries, MAX_OUTAGE_WAIT);
                longest.mul_f64(0.5 + 0.5 * random_fraction())
            };
            let wait = self.client.pace.of(wait).max(asked_to_wait.unwrap_or_default()).min(left);
            tracing::info!(reward = %self.name, failures, wait_ms = wait.as_millis() as u64, "the request to the reward service failed: {why}");
            counts.retries += 1;
            self.meter.retried();
            tokio::time::sleep(wait).await;
        }
    }

    fn outage_of(&self, failing: &Failing) -> RewardFailure {
        let waited_s = failing.since.elapsed().as_secs();
        RewardFailure::Outage { reward: self.name.clone(), waited_s, cause: failing.cause.clone() }
    }

    /// Sends one `reward.ping` (a health check) without retries.
    pub async fn ping(&self) -> Ping {
        let id = RewardRequestId::new().to_string();
        let body = ping_body(&id);
        self.send_health_check(Request::new(id, body, Duration::ZERO), None, |body| serde_json::from_slice(body).ok())
            .await
    }

    /// Sends one health check in the format of the service's dialect; `None` if the dialect has no health check.
    pub async fn check_health(&self) -> Option<Ping> {
        let id = RewardRequestId::new().to_string();
        let (body, get, read): (String, Option<Url>, ReadHealthCheck) = match self.dialect.health_check(&self.url, &id)
        {
            HealthCheck::None => return None,
            HealthCheck::Post(body) => (body, None, |body| serde_json::from_slice(body).ok()),
            HealthCheck::Get(url, read) => (String::new(), Some(url), read),
        };
        Some(self.send_health_check(Request::new(id, body, Duration::ZERO), get, read).await)
    }

    /// Checks whether the service answers again after an outage. If its dialect has no health check, its address is requested.
    ///
    /// # Errors
    /// Returns why the service does not answer.
    pub async fn is_reachable(&self) -> Result<(), String> {
        let (ping, there): (Ping, fn(u16) -> bool) = match self.check_health().await {
            // A service that does not implement health checks answers with one of these errors, which also shows that it is
            // reachable.
            Some(ping) => (ping, |status| matches!(status, 200..=299 | 400 | 405 | 422)),
            None => {
                let request = Request::bare(&RewardRequestId::new().to_string());
                let reply = self.send_health_check(request, Some(self.url.clone()), |_| None).await;
                (reply, |status| status < 500 && !matches!(status, 408 | 425 | 429))
            }
        };
        match ping.status {
            Some(status) if there(status) => Ok(()),
            _ => Err(ping.error.unwrap_or_else(|| "no answer".to_owned())),
        }
    }

    async fn send_health_check(&self, request: Request, get: Option<Url>, read: ReadHealthCheck) -> Ping {
        let start = Instant::now();
        let (status, outcome) = match self.send(&request, get).await {
            Ok((status, _, body)) => {
                (Some(status), body.map(|body| self.secret_filter.redact_answer(body, Preserved::default)))
            }
            Err(failed) => (None, Err(failed.0)),
        };
        let ok = status.is_some_and(|status| status.is_success());
        Ping {
            ok,
            status: status.map(|status| status.as_u16()),
            latency_ms: milliseconds(start),
            reply: outcome.as_ref().ok().filter(|_| ok).and_then(|body| read(body)),
            error: match (status, outcome) {
                (Some(_), _) if ok => None,
                (_, Err(why)) => Some(why),
                (Some(status), Ok(_)) => Some(format!("the service answered {status}")),
                (None, Ok(_)) => None,
            },
        }
    }

    async fn attempt(&self, request: &Request) -> Attempt {
        let (status, retry_after, body) = match self.send(request, None).await {
            Ok(answered) => answered,
            Err(NotSent(why, true)) => return Attempt::Refused(why),
            Err(NotSent(why, false)) => {
                let trouble = if why.starts_with(TIMED_OUT) { Trouble::Overload } else { Trouble::Other };
                return Attempt::Failed { why, trouble, retry_after: None };
            }
        };
        let trouble = match status.as_u16() {
            429 => Trouble::TooMuch,
            503 => Trouble::Overload,
            _ => Trouble::Other,
        };
        let detail = || match &body {
            Ok(body) if !body.is_empty() => {
                // The service's error may repeat a credential. The whole body is redacted before it is truncated, because half a
                // secret would not be found.
                let shown = self.secret_filter.redact_body(body.clone());
                let said: String = String::from_utf8_lossy(&shown).trim().chars().take(120).collect();
                format!(": {}", self.redactor.text(&said))
            }
            _ => String::new(),
        };
        match status.as_u16() {
            other if self.dialect.is_transient(other) => {
                Attempt::Failed { why: format!("the service answered {status}{}", detail()), trouble, retry_after }
            }
            200 | 201 | 203 => match body {
                Ok(body) => Attempt::Done(Delivered::Body(body)),
                Err(why) if why == OVERSIZE => Attempt::Done(Delivered::Unusable(why)),
                Err(why) => Attempt::Failed { why, trouble, retry_after },
            },
            202 => {
                let body = self.secret_filter.redact_answer(body.unwrap_or_default(), Preserved::default);
                Attempt::Done(Delivered::Accepted(asynchronous::accepted(&body, retry_after)))
            }
            410 => Attempt::Gone,
            413 => Attempt::Done(Delivered::TooLarge),
            408 | 425 | 429 | 500..=599 => {
                let hint = || self.dialect.wait_hint(body.as_deref().unwrap_or_default());
                let retry_after = retry_after.or_else(hint);
                Attempt::Failed { why: format!("the service answered {status}{}", detail()), trouble, retry_after }
            }
            300..=399 => Attempt::Done(Delivered::Permanent(format!(
                "the service answered {status}: redirects are not followed"
            ))),
            404 => Attempt::Done(Delivered::NotFound(format!("the service answered {status}{}", detail()))),
            400..=499 => Attempt::Done(Delivered::Permanent(format!("the service answered {status}{}", detail()))),
            _ => Attempt::Done(Delivered::Unusable(format!("the service answered {status} without rewards"))),
        }
    }

    /// Sends one request with a time limit. The returned body is an error if it was interrupted or too large. The body may contain
    /// secrets that the service repeats, so it must be redacted before it is parsed, shown or recorded.
    pub(super) async fn send(&self, request: &Request, get: Option<Url>) -> Result<Answered, NotSent> {
        let start = Instant::now();
        let mut headers = self.request_headers(request);
        if get.as_ref().is_some_and(|url| url.origin() != self.url.origin()) {
            // The user's headers (with credentials) are for the service; its status address may be on another host, which must not
            // get them.
            self.headers.keys().for_each(|name| drop(headers.remove(name)));
        }
        let sent = self.exchanges.as_ref().map(|_| Sent {
            url: get.as_ref().unwrap_or(&self.url).to_string(),
            headers: readable_headers(&headers),
            body: readable_body(request.body.as_bytes()),
        });
        let limit = Duration::from_millis(self.plan.timeout_ms.min(self.plan.deadline_ms).max(1));
        let exchange = async {
            let builder = match get {
                Some(url) => self.client.http.get(url),
                None => self.client.http.post(self.url.clone()).body(request.wire().into_owned()),
            };
            let response = signed_post::send(builder, headers.clone()).await?;
            let (status, headers) = (response.status(), response.headers().clone());
            Ok((status, headers, read_bounded(response).await))
        };
        let timed_out = || NotSent(format!("{TIMED_OUT} {} ms", limit.as_millis()), false);
        let outcome = tokio::time::timeout(limit, exchange).await.unwrap_or_else(|_| Err(timed_out()));
        let outcome = outcome.map(|(status, headers, body)| (status, self.secret_filter.headers(headers), body));
        self.record_request(&Wire { request, headers: &headers, outcome: &outcome, took: start.elapsed() });
        if let (Some(exchanges), Some(request)) = (&self.exchanges, sent) {
            let (response, error) = match &outcome {
                Ok((status, headers, body)) => {
                    let shown = |body: &Vec<u8>| readable_body(&self.secret_filter.redact_body(body.clone()));
                    let text = body.as_ref().map(shown).unwrap_or_default();
                    let response = Received { status: status.as_u16(), headers: readable_headers(headers), body: text };
                    (Some(response), body.as_ref().err().cloned())
                }
                Err(NotSent(why, _)) => (None, Some(why.clone())),
            };
            let exchange = Exchange { request, response, error, latency_ms: milliseconds(start) };
            exchanges.lock().unwrap_or_else(PoisonError::into_inner).push(exchange);
        }
        outcome.map(|(status, headers, body)| (status, retry_after(&headers), body))
    }

    /// Builds the headers of a request. The user's headers are set first, so that they cannot replace rlood's.
    fn request_headers(&self, request: &Request) -> HeaderMap {
        let mut headers = self.headers.clone();
        if self.dialect.is_signed() {
            let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            let wire = request.wire();
            Signed { id: &request.id, timestamp: now_s, body: wire.as_bytes() }.set_headers(&self.keys, &mut headers);
        }
        if let Some(episode) = &request.episode {
            set_header(&mut headers, "rlood-episode", episode);
        }
        set_header(&mut headers, "idempotency-key", &request.id);
        set_header(&mut headers, "traceparent", &traceparent(&request.id));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers
    }
}

async fn read_bounded(mut response: Response) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| SendError::new(&error).text())? {
        if body.len() + chunk.len() > MAX_RESPONSE_BYTES {
            return Err(OVERSIZE.to_owned());
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Builds the header `traceparent` (W3C trace context): one trace per request, one span per attempt.
fn traceparent(id: &str) -> String {
    format!("00-{}-{:016x}-01", hex::encode(&Sha256::digest(id.as_bytes())[..16]), random_bits() | 1)
}

fn milliseconds(start: Instant) -> f64 {
    (start.elapsed().as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_keeps_its_trace_and_changes_its_span() {
        let (first, second) = (traceparent("rwr_1"), traceparent("rwr_1"));
        assert_eq!(first.len(), 55);
        assert_eq!(first[..35], second[..35]);
        assert_ne!(first, second);
    }
}
