//! API keys, and the record of who changed what.

use jiff::Timestamp;
use reqwest::Method;
use rlood_types::access::Scope;
use rlood_types::id::{KeyId, WebhookId};
use serde::Deserialize;
use serde_json::json;

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;

/// An API key, without its text.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ApiKey {
    /// Its id.
    pub id: KeyId,
    /// For people.
    pub name: String,
    /// Whose jobs, datasets and models it sees.
    pub owner: String,
    /// What it permits: each scope with those it holds.
    pub scopes: Vec<Scope>,
    /// What its text begins with.
    pub prefix: String,
    /// Whether it is good.
    pub state: KeyState,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it ends by itself.
    pub expires_at: Option<Timestamp>,
    /// When it was revoked.
    pub revoked_at: Option<Timestamp>,
    /// When it was used last, to the minute.
    pub used_at: Option<Timestamp>,
}

/// Whether a key is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyState {
    /// It is.
    Active,
    /// Its time is over.
    Expired,
    /// It was revoked.
    Revoked,
}

/// A key that was just made.
#[derive(Clone, Deserialize)]
pub struct NewApiKey {
    /// The key's text. `None` when the answer that showed it was lost and the request repeated: revoke the key and make another.
    pub key: Option<String>,
    /// The rest.
    #[serde(flatten)]
    pub view: ApiKey,
}

impl std::fmt::Debug for NewApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NewApiKey({:?}, {:?})", self.key.as_ref().map(|_| "redacted"), self.view)
    }
}

/// A key that was revoked.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RevokedApiKey {
    /// The key.
    #[serde(flatten)]
    pub view: ApiKey,
    /// The webhooks of its owner, which outlive it.
    pub webhooks: Vec<RevokedKeyWebhook>,
}

/// A webhook of a revoked key's owner.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RevokedKeyWebhook {
    /// Its id.
    pub id: WebhookId,
    /// Where messages go.
    pub url: String,
    /// For people.
    pub description: Option<String>,
    /// Whether anything is sent.
    pub enabled: bool,
    /// When it was made.
    pub created_at: Timestamp,
}

/// A key to make.
#[derive(Debug, Clone)]
pub struct NewKey {
    /// For people.
    pub name: String,
    /// What it permits.
    pub scopes: Vec<Scope>,
    /// Whose jobs, datasets and models it sees; by default its own.
    pub owner: Option<String>,
    /// Seconds until it ends by itself.
    pub expires_in_s: Option<u64>,
}

/// A change that somebody made.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct AuditEvent {
    /// Counts up.
    pub id: i64,
    /// When.
    pub time: Timestamp,
    /// Who: the id of a key, or `operator`, `anonymous`, `command_line`, `server`.
    pub actor: String,
    /// The key's name.
    pub actor_name: Option<String>,
    /// The key's owner; empty = the operator.
    pub owner: String,
    /// What: method and route, or the command.
    pub action: String,
    /// Of what: a path.
    pub target: String,
    /// The answer's status; `None` for commands.
    pub status: Option<u16>,
    /// As in the answer and in the log.
    pub request_id: Option<String>,
    /// The address that it came from.
    pub address: Option<String>,
}

/// Which changes.
#[derive(Debug, Clone, Default)]
pub struct AuditFilter {
    /// Of this actor.
    pub actor: Option<String>,
    /// Of this thing and what lies below it: `/jobs/job_…`.
    pub target: Option<String>,
}

impl Client {
    /// All keys, newest first, revoked ones too.
    pub fn list_keys(&self) -> Pages<ApiKey> {
        Pages::new(self, self.get(&["keys"]))
    }

    /// Makes a key.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn create_key(&self, key: &NewKey) -> Result<NewApiKey, Error> {
        let NewKey { name, scopes, owner, expires_in_s } = key;
        let body = json!({"name": name, "scopes": scopes, "owner": owner, "expires_in_s": expires_in_s});
        self.json(self.post_once(&["keys"]).json(&body)).await
    }

    /// One key.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn get_key(&self, id: KeyId) -> Result<ApiKey, Error> {
        self.json(self.get(&["keys", &id.to_string()])).await
    }

    /// Revokes a key, and ends every session that was opened with it.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn revoke_key(&self, id: KeyId) -> Result<RevokedApiKey, Error> {
        self.json(self.call(Method::DELETE, &["keys", &id.to_string()])).await
    }

    /// Who changed what, newest first.
    pub fn list_changes(&self, filter: &AuditFilter) -> Pages<AuditEvent> {
        let AuditFilter { actor, target } = filter;
        Pages::new(self, self.get(&["audit"]).query_if("actor", actor.as_ref()).query_if("target", target.as_ref()))
    }
}
