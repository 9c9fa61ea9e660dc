//! Subscriptions to lifecycle messages.

use jiff::Timestamp;
use reqwest::Method;
use rlood_types::id::{JobId, WebhookId};
use rlood_types::lifecycle::MessageType;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// What the server may wait for an endpoint's answer to a test.
const WORK: std::time::Duration = std::time::Duration::from_secs(10);

/// A subscription. Its secret is not shown.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Webhook {
    /// Its id.
    pub id: WebhookId,
    /// Where messages go.
    pub url: String,
    /// For people.
    pub description: Option<String>,
    /// Which messages.
    pub events: Vec<MessageType>,
    /// Whether anything is sent.
    pub enabled: bool,
    /// Why the server stopped sending.
    pub disabled_reason: Option<String>,
    /// Whether it is about every owner's jobs.
    pub all_jobs: bool,
    /// The owner of the key that made it; empty = the operator.
    pub owner: String,
    /// Until when an older secret signs too.
    pub old_secret_until: Option<Timestamp>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was changed last.
    pub updated_at: Timestamp,
}

/// A subscription with the secret that the server made for it.
#[derive(Clone, Deserialize)]
pub struct WebhookWithSecret {
    /// The secret. `None` when the caller gave one, and when the answer that showed it was lost and the request repeated: rotate
    /// it then.
    pub secret: Option<String>,
    /// The rest.
    #[serde(flatten)]
    pub webhook: Webhook,
}

impl std::fmt::Debug for WebhookWithSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WebhookWithSecret({:?}, {:?})", self.secret.as_ref().map(|_| "redacted"), self.webhook)
    }
}

/// A subscription to make.
#[derive(Clone, Default)]
pub struct NewWebhook {
    /// Where messages go.
    pub url: String,
    /// Which messages; by default all.
    pub events: Option<Vec<MessageType>>,
    /// For people.
    pub description: Option<String>,
    /// `whsec_…`; by default the server makes one.
    pub secret: Option<String>,
    /// Whether anything is sent; by default it is.
    pub enabled: Option<bool>,
    /// Whether it is about every owner's jobs; by default with the scope admin.
    pub all_jobs: Option<bool>,
}

/// What to change of a subscription.
#[derive(Debug, Clone, Default)]
pub struct WebhookPatch {
    /// Where messages go.
    pub url: Option<String>,
    /// Which messages.
    pub events: Option<Vec<MessageType>>,
    /// For people; `Some(None)` takes it away.
    pub description: Option<Option<String>>,
    /// Whether anything is sent.
    pub enabled: Option<bool>,
}

/// A message and how its sending went.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct WebhookDelivery {
    /// The `webhook-id` of every try.
    pub id: String,
    /// What it tells.
    #[serde(rename = "type")]
    pub kind: String,
    /// When that happened.
    pub time: Timestamp,
    /// Of which job; `None` for a test.
    pub job_id: Option<JobId>,
    /// `pending`, `delivered` or `failed`.
    pub state: String,
    /// When it is tried next.
    pub next_try_at: Option<Timestamp>,
    /// Its tries, oldest first.
    pub tries: Vec<WebhookTry>,
}

/// One try to send a message.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct WebhookTry {
    /// When it began.
    pub time: Timestamp,
    /// How long it took.
    pub duration_ms: u64,
    /// The endpoint's answer, if there was one.
    pub status: Option<u16>,
    /// What was wrong.
    pub error: Option<String>,
}

impl Client {
    /// Subscriptions, newest first.
    pub fn list_webhooks(&self) -> Pages<Webhook> {
        Pages::new(self, self.get(&["webhooks"]))
    }

    /// Subscribes to lifecycle messages.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn create_webhook(&self, new: &NewWebhook) -> Result<WebhookWithSecret, Error> {
        let NewWebhook { url, events, description, secret, enabled, all_jobs } = new;
        let body = json!({"url": url, "events": events, "description": description, "secret": secret, "enabled": enabled,
                          "all_jobs": all_jobs});
        self.json(self.post_once(&["webhooks"]).json(&body)).await
    }

    /// One subscription.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get_webhook(&self, id: WebhookId) -> Result<Webhook, Error> {
        self.json(self.get(&["webhooks", &id.to_string()])).await
    }

    /// Changes a subscription.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn patch_webhook(&self, id: WebhookId, patch: &WebhookPatch) -> Result<Webhook, Error> {
        let WebhookPatch { url, events, description, enabled } = patch;
        let mut body = json!({"url": url, "events": events, "enabled": enabled});
        if let Some(description) = description {
            body["description"] = Value::from(description.clone());
        }
        self.json(self.call(Method::PATCH, &["webhooks", &id.to_string()]).json(&body)).await
    }

    /// Ends a subscription.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn delete_webhook(&self, id: WebhookId) -> Result<(), Error> {
        self.delete(&["webhooks", &id.to_string()]).await
    }

    /// Signs with another secret from now on: this one, or one that the server makes. The old one signs too for `keep_old_s`
    /// seconds, a day by default.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn rotate_secret(
        &self,
        id: WebhookId,
        secret: Option<&str>,
        keep_old_s: Option<u32>,
    ) -> Result<WebhookWithSecret, Error> {
        let body = json!({"secret": secret, "keep_old_s": keep_old_s});
        self.json(self.post_once(&["webhooks", &id.to_string(), "secret"]).json(&body)).await
    }

    /// Sends a test message and says how it went.
    ///
    /// # Errors
    /// `conflict` when the subscription is not enabled, or any other [`Error`].
    pub async fn test_webhook(&self, id: WebhookId) -> Result<WebhookDelivery, Error> {
        self.json(self.post_once(&["webhooks", &id.to_string(), "test"]).work(WORK)).await
    }

    /// A subscription's messages with their tries, newest first; with a `state` those that are `pending`, `delivered` or `failed`.
    pub fn list_deliveries(&self, id: WebhookId, state: Option<&str>) -> Pages<WebhookDelivery> {
        Pages::new(self, self.get(&["webhooks", &id.to_string(), "deliveries"]).query_if("state", state))
    }

    /// Sends a message again.
    ///
    /// # Errors
    /// `conflict` when the subscription is not enabled, or any other [`Error`].
    pub async fn redeliver(&self, id: WebhookId, delivery: &str) -> Result<WebhookDelivery, Error> {
        self.json(self.post_once(&["webhooks", &id.to_string(), "deliveries", delivery, "redeliver"])).await
    }
}
