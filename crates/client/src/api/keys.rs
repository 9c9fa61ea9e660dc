//! API keys and the audit log.

use jiff::Timestamp;
use reqwest::Method;
use rlood_types::id::{KeyId, WebhookId};
use rlood_types::scopes::Scope;
use serde::Deserialize;
use serde_json::json;

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// An API key, without its secret text.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ApiKey {
    /// Id of the key.
    pub id: KeyId,
    /// Display name of the key.
    pub name: String,
    /// Owner whose jobs, datasets and models the key can see.
    pub owner: String,
    /// Scopes of the key, including the scopes that they imply.
    pub scopes: Vec<Scope>,
    /// Prefix of the key's text.
    pub prefix: String,
    /// Whether the key is valid.
    pub state: KeyState,
    /// Time at which the key was created.
    pub created_at: Timestamp,
    /// Time at which the key expires.
    pub expires_at: Option<Timestamp>,
    /// Time at which the key was revoked.
    pub revoked_at: Option<Timestamp>,
    /// Time of the last use, to the minute.
    pub used_at: Option<Timestamp>,
}

/// Whether a key is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyState {
    /// The key is valid.
    Active,
    /// The key has expired.
    Expired,
    /// The key was revoked.
    Revoked,
}

/// A newly created key.
#[derive(Clone, Deserialize)]
pub struct NewApiKey {
    /// The key's text. `None` if the response that contained it was lost and the request was repeated: revoke the
    /// key and create another one.
    pub key: Option<String>,
    /// The other properties of the key.
    #[serde(flatten)]
    pub view: ApiKey,
}

impl std::fmt::Debug for NewApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NewApiKey({:?}, {:?})", self.key.as_ref().map(|_| "redacted"), self.view)
    }
}

/// A key that was just revoked.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RevokedApiKey {
    /// Properties of the key.
    #[serde(flatten)]
    pub view: ApiKey,
    /// Webhooks of the key's owner, which are not removed with the key.
    pub webhooks: Vec<RevokedKeyWebhook>,
}

/// A webhook of a revoked key's owner.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RevokedKeyWebhook {
    /// Id of the webhook.
    pub id: WebhookId,
    /// URL that messages are sent to.
    pub url: String,
    /// Human-readable description, set by the user.
    pub description: Option<String>,
    /// Whether messages are sent.
    pub enabled: bool,
    /// Time at which the key was created.
    pub created_at: Timestamp,
}

/// Properties of a key to create.
#[derive(Debug, Clone)]
pub struct NewKey {
    /// Display name of the key.
    pub name: String,
    /// Scopes of the key.
    pub scopes: Vec<Scope>,
    /// Owner whose jobs, datasets and models the key can see; default: a new owner of its own.
    pub owner: Option<String>,
    /// Lifetime in seconds; `None` = the key does not expire.
    pub expires_in_s: Option<u64>,
}

/// An entry of the audit log.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct AuditEvent {
    /// Number of the entry, in ascending order.
    pub id: i64,
    /// Time of the change.
    pub time: Timestamp,
    /// Who made the change: the id of a key, or `operator`, `anonymous`, `command_line`, `server`.
    pub actor: String,
    /// Name of the key.
    pub actor_name: Option<String>,
    /// Owner of the key; empty = the operator.
    pub owner: String,
    /// The action: method and route, or the command.
    pub action: String,
    /// Path of the changed object.
    pub target: String,
    /// Status of the response; `None` for commands.
    pub status: Option<u16>,
    /// Id of the request, as in the response and in the log.
    pub request_id: Option<String>,
    /// Address that the request came from.
    pub address: Option<String>,
}

/// Filter of the audit log.
#[derive(Debug, Clone, Default)]
pub struct AuditFilter {
    /// Only changes by this actor.
    pub actor: Option<String>,
    /// Only changes of this object and of objects below it, such as `/jobs/job_…`.
    pub target: Option<String>,
}

impl Client {
    /// Lists all keys, newest first, including revoked ones.
    pub fn list_keys(&self) -> Pages<ApiKey> {
        Pages::new(self, self.get(&["keys"]))
    }

    /// Creates a new API key.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn create_key(&self, key: &NewKey) -> Result<NewApiKey, Error> {
        let NewKey { name, scopes, owner, expires_in_s } = key;
        let body = json!({"name": name, "scopes": scopes, "owner": owner, "expires_in_s": expires_in_s});
        self.json(self.post_once(&["keys"]).json(&body)).await
    }

    /// Returns the key with this id.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn get_key(&self, id: KeyId) -> Result<ApiKey, Error> {
        self.json(self.get(&["keys", &id.to_string()])).await
    }

    /// Revokes a key and ends all sessions that were opened with it.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn revoke_key(&self, id: KeyId) -> Result<RevokedApiKey, Error> {
        self.json(self.call(Method::DELETE, &["keys", &id.to_string()])).await
    }

    /// Lists the audit log, newest first.
    pub fn list_changes(&self, filter: &AuditFilter) -> Pages<AuditEvent> {
        let AuditFilter { actor, target } = filter;
        Pages::new(self, self.get(&["audit"]).query_if("actor", actor.as_ref()).query_if("target", target.as_ref()))
    }
}
