//! Delivers lifecycle messages to webhooks: signed by Standard Webhooks, to addresses that the operator allows.
//! Every attempt is recorded.
//!
//! The outbox is in the database, so no message is lost in a crash: a message in delivery is sent again with the same `webhook-id`.
//! Each subscription delivers one message at a time, independent of other subscriptions.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use tokio::sync::Notify;

use crate::error_text::with_causes;
use crate::id::WebhookId;
use crate::outgoing::OutgoingPolicy;
use crate::reward::http_client::restricted_client_builder;
use crate::reward::signature::Key;
use crate::reward::signed_post::{self, SendError, Signed, retry_after};
use crate::store::webhooks::WebhookRow;
use crate::store::{DeliveryRow, MessageEvent, Next, TryRow};
use crate::store::{Store, StoreError, clock_ms};
use crate::webhooks::message::{LifecycleData, Message, TestData};
use crate::webhooks::retry_in_ms;

/// Time limit for an endpoint to answer.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Interval at which the outbox is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum delay that an endpoint's Retry-After can request, in ms.
const MAX_RETRY_AFTER_MS: i64 = 24 * 60 * 60 * 1000;

/// The HTTP client could not be created.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP client for webhook messages could not be created")]
pub struct WebhookSenderError(#[source] reqwest::Error);

/// An HTTP client that reaches only the addresses that its policy allows.
#[derive(Clone)]
struct Outgoing {
    policy: OutgoingPolicy,
    client: reqwest::Client,
}

impl Outgoing {
    fn new(policy: OutgoingPolicy) -> Result<Self, WebhookSenderError> {
        // Connections are not reused: every attempt resolves the name and checks the address.
        let client = restricted_client_builder(&policy)
            .timeout(TIMEOUT)
            .pool_max_idle_per_host(0)
            .build()
            .map_err(WebhookSenderError)?;
        Ok(Self { policy, client })
    }
}

/// Sends due messages. Cheap to clone.
#[derive(Clone)]
pub struct WebhookSender {
    store: Store,
    outgoing: Outgoing,
    /// HTTP client with the stricter address policy that applies once the database contains API keys.
    with_keys: Outgoing,
    busy: Arc<Mutex<HashSet<WebhookId>>>,
    free: Arc<Notify>,
}

impl WebhookSender {
    /// Creates a sender for a server's outbox.
    ///
    /// # Errors
    /// Fails when the HTTP client cannot be created.
    pub fn new(store: Store, policy: OutgoingPolicy) -> Result<Self, WebhookSenderError> {
        let outgoing = Outgoing::new(policy)?;
        let with_keys = outgoing.clone();
        Ok(Self { store, outgoing, with_keys, busy: Arc::default(), free: Arc::default() })
    }

    /// Sets the stricter address policy that applies once the database contains an API key.
    ///
    /// # Errors
    /// Fails when the HTTP client cannot be created.
    pub fn narrowed_by_keys(self, policy: OutgoingPolicy) -> Result<Self, WebhookSenderError> {
        Ok(Self { with_keys: Outgoing::new(policy)?, ..self })
    }

    /// Sends due messages until the future is dropped.
    pub async fn run(self) {
        loop {
            if let Err(error) = self.send_due(clock_ms()).await {
                tracing::error!(error = with_causes(&error), "the queued webhook messages cannot be read");
            }
            tokio::select! {
                () = self.free.notified() => {}
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
    }

    /// Starts delivery for each subscription with a due message and no delivery in progress. Returns the
    /// number of started deliveries.
    async fn send_due(&self, now: i64) -> Result<usize, StoreError> {
        let mut begun = 0;
        for (hook, message) in self.store.deliveries_due(now).await? {
            if !self.busy.lock().unwrap_or_else(PoisonError::into_inner).insert(hook.id) {
                continue;
            }
            begun += 1;
            let sender = self.clone();
            tokio::spawn(async move {
                let id = hook.id;
                if let Err(error) = sender.deliver(&hook, &message).await {
                    tracing::error!(webhook = %id, error = with_causes(&error), "could not store the attempt to deliver a webhook message");
                    // Pauses this webhook: otherwise the message would be sent again immediately, because its attempt was not
                    // recorded.
                    tokio::time::sleep(TIMEOUT).await;
                }
                sender.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
                sender.free.notify_one();
            });
        }
        Ok(begun)
    }

    /// Makes one delivery attempt and records it.
    async fn deliver(&self, hook: &WebhookRow, message: &DeliveryRow) -> Result<(), StoreError> {
        let (time, begun) = (clock_ms(), Instant::now());
        let outgoing = if self.store.api_keys_exist().await? { &self.with_keys } else { &self.outgoing };
        let answered = outgoing.post(hook, message, time).await;
        let now = clock_ms();
        let duration_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (status, error, asked_ms) = match answered {
            Ok(Answered { status, retry_after_ms }) => (Some(status), None, retry_after_ms),
            Err(error) => (None, Some(error), 0),
        };
        let taken = status.is_some_and(|status| (200..300).contains(&status));
        let gone = status == Some(410);
        let next = match retry_in_ms(message.tries + 1, jitter_from_id(&message.id)) {
            _ if taken => Next::Delivered,
            Some(pause) if !gone => Next::Retry(now + pause.max(asked_ms)),
            Some(_) | None => Next::GiveUp,
        };
        let error = error.or_else(|| status.filter(|_| !taken).map(|status| format!("answered {status}")));
        if !taken {
            let error = error.as_deref().unwrap_or("");
            tracing::info!(webhook = %hook.id, message = message.id, tries = message.tries + 1, error, "not delivered");
        }
        if gone {
            let reason = "the endpoint answered 410 Gone";
            self.store.webhook_disable(hook.id, reason, now).await?;
        }
        self.store.delivery_tried(&message.id, TryRow { time, duration_ms, status, error }, next, now).await
    }
}

impl Outgoing {
    async fn post(&self, hook: &WebhookRow, message: &DeliveryRow, now: i64) -> Result<Answered, String> {
        let url = self.policy.check_url(&hook.url).map_err(|error| error.to_string())?;
        let body = body_of(message).map_err(|_| "the webhook message could not be written as JSON".to_owned())?;
        let seconds = now.div_euclid(1000).unsigned_abs();
        let keys = keys(hook, now)?;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Signed { id: &message.id, timestamp: seconds, body: &body }.set_headers(&keys, &mut headers);
        let request = self.client.post(url).body(body);
        let answer = signed_post::send(request, headers).await.map_err(describe_without_url)?;
        let pause =
            retry_after(answer.headers()).map_or(0, |pause| i64::try_from(pause.as_millis()).unwrap_or(i64::MAX));
        Ok(Answered { status: answer.status().as_u16(), retry_after_ms: pause.min(MAX_RETRY_AFTER_MS) })
    }
}

/// Returns the outcome of a delivery attempt that got a response.
struct Answered {
    status: u16,
    retry_after_ms: i64,
}

/// Returns the signing keys of all valid secrets of a webhook; several during a rotation.
fn keys(hook: &WebhookRow, now: i64) -> Result<Vec<Key>, String> {
    let old = hook.old_secrets.iter().filter(|(_, until)| now < *until).map(|(secret, _)| secret);
    let keys: Result<Vec<Key>, _> = std::iter::once(&hook.secret).chain(old).map(|secret| Key::parse(secret)).collect();
    keys.map_err(|_| "the stored secret of the webhook cannot be read".to_owned())
}

/// Serializes a message. The bytes are the same for every delivery attempt.
fn body_of(message: &DeliveryRow) -> serde_json::Result<Vec<u8>> {
    let timestamp = Timestamp::from_millisecond(message.time).map(|time| format!("{time:.3}")).unwrap_or_default();
    let kind = message.kind.as_str();
    let Some(event) = &message.event else {
        return serde_json::to_vec(&Message { kind, timestamp, data: TestData { webhook_id: message.webhook } });
    };
    let MessageEvent { job, seq, attempt, event, detail, job_name, job_state, model, step, total_steps, metadata } =
        event.clone();
    let data = LifecycleData {
        job_id: job,
        job_name,
        job_state,
        model,
        step,
        total_steps,
        metadata,
        event,
        seq,
        attempt,
        detail,
    };
    serde_json::to_vec(&Message { kind, timestamp, data })
}

/// Describes an HTTP error without the webhook's URL, which may contain secrets.
fn describe_without_url(error: SendError) -> String {
    match error {
        SendError::Refused(why) => why,
        SendError::Failed { is_timeout: true, .. } => {
            format!("the webhook's endpoint sent no answer within {} s", TIMEOUT.as_secs())
        }
        SendError::Failed { is_connect, cause, .. } => {
            let kind = if is_connect { "no connection" } else { "no answer" };
            cause.map_or(kind.to_owned(), |cause| format!("{kind}: {cause}"))
        }
    }
}

/// Derives a value from 0 to 1 from a message's random id, to vary the retry delay.
fn jitter_from_id(id: &str) -> f64 {
    let last = id.get(id.len().saturating_sub(4)..).and_then(|text| u16::from_str_radix(text, 16).ok());
    f64::from(last.unwrap_or(0)) / 65_536.0
}
