//! Webhooks, which subscribe to lifecycle messages.

use jiff::Timestamp;
use reqwest::Method;
use rlood_types::id::{JobId, WebhookId};
use rlood_types::webhooks::MessageType;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// The server's time limit for an endpoint's response to a test.
const SERVER_TIME_LIMIT: std::time::Duration = std::time::Duration::from_secs(10);

/// A webhook. Its secret is not shown.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Webhook {
    /// Id of the webhook.
    pub id: WebhookId,
    /// URL that messages are sent to.
    pub url: String,
    /// Human-readable description, set by the user.
    pub description: Option<String>,
    /// Types of messages to send.
    pub events: Vec<MessageType>,
    /// Whether messages are sent.
    pub enabled: bool,
    /// Why the server disabled the webhook.
    pub disabled_reason: Option<String>,
    /// Whether the webhook reports on the jobs of all owners.
    pub all_jobs: bool,
    /// Owner of the key that created the webhook; empty = the operator.
    pub owner: String,
    /// Time until which the previous secret signs messages too.
    pub old_secret_until: Option<Timestamp>,
    /// Time at which the webhook was created.
    pub created_at: Timestamp,
    /// Time at which the webhook was last changed.
    pub updated_at: Timestamp,
}

/// A webhook with the secret that the server created for it.
#[derive(Clone, Deserialize)]
pub struct WebhookWithSecret {
    /// The secret. `None` if the caller supplied one, or if the response that contained it was lost and the request was
    /// repeated: rotate it then.
    pub secret: Option<String>,
    /// The other properties of the webhook.
    #[serde(flatten)]
    pub webhook: Webhook,
}

impl std::fmt::Debug for WebhookWithSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WebhookWithSecret({:?}, {:?})", self.secret.as_ref().map(|_| "redacted"), self.webhook)
    }
}

/// Properties of a webhook to create.
#[derive(Clone, Default)]
pub struct NewWebhook {
    /// URL that messages are sent to.
    pub url: String,
    /// Types of messages to send; default: all.
    pub events: Option<Vec<MessageType>>,
    /// Human-readable description, set by the user.
    pub description: Option<String>,
    /// Signing secret, `whsec_…`; default: the server creates one.
    pub secret: Option<String>,
    /// Whether messages are sent; default: yes.
    pub enabled: Option<bool>,
    /// Whether it reports on the jobs of all owners; default: yes with the scope admin.
    pub all_jobs: Option<bool>,
}

/// Changes to a webhook; `None` = unchanged.
#[derive(Debug, Clone, Default)]
pub struct WebhookPatch {
    /// URL that messages are sent to.
    pub url: Option<String>,
    /// Types of messages to send.
    pub events: Option<Vec<MessageType>>,
    /// Human-readable description; `Some(None)` removes it.
    pub description: Option<Option<String>>,
    /// Whether messages are sent.
    pub enabled: Option<bool>,
}

/// A message and its delivery attempts.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct WebhookDelivery {
    /// Id of the message, which every attempt sends as `webhook-id`.
    pub id: String,
    /// Type of the message.
    #[serde(rename = "type")]
    pub kind: String,
    /// Time of the reported event.
    pub time: Timestamp,
    /// Id of the job; `None` for a test.
    pub job_id: Option<JobId>,
    /// State of the delivery: `pending`, `delivered` or `failed`.
    pub state: String,
    /// Time of the next delivery attempt.
    pub next_try_at: Option<Timestamp>,
    /// Delivery attempts, oldest first.
    pub tries: Vec<WebhookTry>,
}

/// One attempt to deliver a message.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct WebhookTry {
    /// Time at which the delivery attempt started.
    pub time: Timestamp,
    /// Duration of the delivery attempt, in milliseconds.
    pub duration_ms: u64,
    /// HTTP status of the endpoint's response; `None` = no response.
    pub status: Option<u16>,
    /// Why the delivery attempt failed.
    pub error: Option<String>,
}

impl Client {
    /// Lists webhooks, newest first.
    pub fn list_webhooks(&self) -> Pages<Webhook> {
        Pages::new(self, self.get(&["webhooks"]))
    }

    /// Creates a webhook for lifecycle messages.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn create_webhook(&self, new: &NewWebhook) -> Result<WebhookWithSecret, Error> {
        let NewWebhook { url, events, description, secret, enabled, all_jobs } = new;
        let body = json!({"url": url, "events": events, "description": description, "secret": secret, "enabled": enabled,
                          "all_jobs": all_jobs});
        self.json(self.post_once(&["webhooks"]).json(&body)).await
    }

    /// Returns the webhook with this id.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_webhook(&self, id: WebhookId) -> Result<Webhook, Error> {
        self.json(self.get(&["webhooks", &id.to_string()])).await
    }

    /// Changes the settings of a webhook.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn patch_webhook(&self, id: WebhookId, patch: &WebhookPatch) -> Result<Webhook, Error> {
        let WebhookPatch { url, events, description, enabled } = patch;
        let mut body = json!({"url": url, "events": events, "enabled": enabled});
        if let Some(description) = description {
            body["description"] = Value::from(description.clone());
        }
        self.json(self.call(Method::PATCH, &["webhooks", &id.to_string()]).json(&body)).await
    }

    /// Deletes a webhook and its messages.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn delete_webhook(&self, id: WebhookId) -> Result<(), Error> {
        self.delete(&["webhooks", &id.to_string()]).await
    }

    /// Replaces a webhook's signing secret with the given one, or one that the server creates. The previous secret also
    /// signs messages for `keep_old_s` seconds, a day by default.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn rotate_secret(
        &self,
        id: WebhookId,
        secret: Option<&str>,
        keep_old_s: Option<u32>,
    ) -> Result<WebhookWithSecret, Error> {
        let body = json!({"secret": secret, "keep_old_s": keep_old_s});
        self.json(self.post_once(&["webhooks", &id.to_string(), "secret"]).json(&body)).await
    }

    /// Sends a test message and returns its delivery.
    ///
    /// # Errors
    /// Fails with `conflict` if the webhook is disabled, or with any other [`Error`].
    pub async fn test_webhook(&self, id: WebhookId) -> Result<WebhookDelivery, Error> {
        self.json(self.post_once(&["webhooks", &id.to_string(), "test"]).work(SERVER_TIME_LIMIT)).await
    }

    /// Lists a webhook's messages with their delivery attempts, newest first; with `state`, only those that are
    /// `pending`, `delivered` or `failed`.
    pub fn list_deliveries(&self, id: WebhookId, state: Option<&str>) -> Pages<WebhookDelivery> {
        Pages::new(self, self.get(&["webhooks", &id.to_string(), "deliveries"]).query_if("state", state))
    }

    /// Queues a message for delivery again.
    ///
    /// # Errors
    /// Fails with `conflict` if the webhook is disabled, or with any other [`Error`].
    pub async fn redeliver(&self, id: WebhookId, delivery: &str) -> Result<WebhookDelivery, Error> {
        self.json(self.post_once(&["webhooks", &id.to_string(), "deliveries", delivery, "redeliver"])).await
    }
}
