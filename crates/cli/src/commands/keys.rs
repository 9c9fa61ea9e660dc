//! Keys of a server over its API. `rlood keys` itself stands beside the server: it also works on a data directory.

use std::process::ExitCode;

use rlood_types::access::Scope;
use rlood_types::id::KeyId;
use serde_json::{Value, json};

use crate::context::{Common, Context, with};
use crate::error::CliError;
use crate::follow::text;
use crate::listing::Listing;
use crate::output::{Table, ago, clean, shown};

/// What to do with keys.
#[derive(Debug, Clone)]
pub enum Action {
    /// Make a key.
    Create {
        /// For people.
        name: String,
        /// What it permits.
        scopes: Vec<Scope>,
        /// Whose jobs, datasets and models it sees; by default its own.
        owner: Option<String>,
        /// Seconds until it ends by itself.
        expires_in_s: Option<i64>,
    },
    /// List all keys.
    List,
    /// End a key.
    Revoke(KeyId),
}

/// Does something with keys over the API. Errors go to standard error.
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
            "the answer that showed the key was lost: revoke {id} with `rlood keys revoke {id}` and create another one"
        )));
    };
    context.out.line(secret)?;
    context.out.note(format!(
        "{} '{}' of {}: {}; the text above is not shown again",
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
        let used = if key["used_at"].is_null() { "never".to_owned() } else { ago(&key["used_at"]) };
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
            "webhook {id} of {} still sends to {url}: DELETE /webhooks/{id} ends it",
            shown(&key["owner"])
        ));
    }
    Ok(())
}

fn scopes_of(key: &Value) -> String {
    key["scopes"].as_array().into_iter().flatten().map(shown).collect::<Vec<_>>().join(", ")
}
