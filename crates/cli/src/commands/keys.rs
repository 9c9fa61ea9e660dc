//! Manages API keys through a server's API, for `rlood keys`. The command itself is defined in the server's crate, because it can
//! also manage the keys in a data directory without a running server.

use std::process::ExitCode;

use rlood_types::id::KeyId;
use rlood_types::scopes::Scope;
use serde_json::{Value, json};

use crate::context::{Common, Context, with};
use crate::error::CliError;
use crate::follow::text;
use crate::listing::Listing;
use crate::output::{Table, clean, format_age, shown};

/// Action of `rlood keys`.
#[derive(Debug, Clone)]
pub enum Action {
    /// Creates an API key.
    Create {
        /// Name shown in lists and logs.
        name: String,
        /// Scopes that the key grants.
        scopes: Vec<Scope>,
        /// Owner whose jobs, datasets and models the key can access; `None` creates a new owner for the key.
        owner: Option<String>,
        /// Seconds until the key expires; `None` means never.
        expires_in_s: Option<i64>,
    },
    /// Lists all API keys.
    List,
    /// Revokes an API key.
    Revoke(KeyId),
}

/// Creates, lists or revokes API keys through the API. Errors are printed to standard error.
pub async fn run(common: &Common, action: &Action) -> ExitCode {
    let work = async |context: &Context| {
        match action {
            Action::Create { .. } => create(context, action).await?,
            Action::List => list(context).await?,
            Action::Revoke(id) => revoke(context, *id).await?,
        }
        Ok(0)
    };
    match with(common, work).await {
        Ok(code) => ExitCode::from(code),
        Err(error) => error.report(),
    }
}

async fn create(context: &Context, action: &Action) -> Result<(), CliError> {
    let Action::Create { name, scopes, owner, expires_in_s } = action else { return Ok(()) };
    let body = json!({"name": name, "scopes": scopes, "owner": owner, "expires_in_s": expires_in_s});
    let answer = context.client.raw_post(&["keys"]).body(&body).send().await?;
    if context.out.json {
        return context.out.json(&answer.text);
    }
    let key = &answer.value;
    let Some(secret) = key["key"].as_str() else {
        let id = shown(&key["id"]);
        return Err(CliError::Failed(format!(
            "the response that contained the key was lost: revoke {id} with `rlood keys revoke {id}` and create another key"
        )));
    };
    context.out.line(secret)?;
    context.out.note(format!(
        "{} '{}', owner {}, scopes {}; copy the key above, it is not shown again",
        shown(&key["id"]),
        shown(&key["name"]),
        shown(&key["owner"]),
        scopes_of(key)
    ));
    Ok(())
}

async fn list(context: &Context) -> Result<(), CliError> {
    let listing = Listing::read(context.client.raw_get(&["keys"]), 0).await?;
    if context.out.json {
        return context.out.json(&listing.document);
    }
    let mut table = Table::new(&["id", "begins with", "state", "scopes", "owner", "used", "name"]);
    for key in &listing.items {
        let used = if key["used_at"].is_null() { "never".to_owned() } else { format_age(&key["used_at"]) };
        table.row([
            shown(&key["id"]),
            shown(&key["prefix"]),
            shown(&key["state"]),
            scopes_of(key),
            shown(&key["owner"]),
            used,
            shown(&key["name"]),
        ]);
    }
    table.print(&context.out)
}

async fn revoke(context: &Context, id: KeyId) -> Result<(), CliError> {
    let answer = context.client.raw_delete(&["keys", &id.to_string()]).send().await?;
    if context.out.json {
        return context.out.json(&answer.text);
    }
    let key = &answer.value;
    context.out.line(format!("{id} '{}' is revoked", clean(text(key, "name"))))?;
    for webhook in key["webhooks"].as_array().into_iter().flatten() {
        let (id, url) = (shown(&webhook["id"]), shown(&webhook["url"]));
        context.out.note(format!(
            "webhook {id} of {} still sends to {url}; `DELETE /webhooks/{id}` removes it",
            shown(&key["owner"])
        ));
    }
    Ok(())
}

fn scopes_of(key: &Value) -> String {
    key["scopes"].as_array().into_iter().flatten().map(shown).collect::<Vec<_>>().join(", ")
}
