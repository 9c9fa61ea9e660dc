//! `rlood keys`: creates, lists and revokes API keys, over a server's API or directly in its data directory.

use std::path::PathBuf;
use std::process::ExitCode;

use futures::future::LocalBoxFuture;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::config::keys::{CreateKeyArgs, KeysAction, KeysArgs, KeysPlace};
use crate::files::{DataDir, FilesError};
use crate::scopes::Scopes;
use crate::store::webhooks::WebhookRow;
use crate::store::{KeyRow, NewAudit, NewKey, Store, StoreError, clock_ms};

/// Actor of changes by `rlood keys` in the audit log.
const ACTOR: &str = "command_line";

/// Why a command on keys failed.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The data directory cannot be used.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The database cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The data directory contains no keys to list or revoke.
    #[error("the directory {} contains no rlood database: use the server's --data-dir", .0.display())]
    NoDatabase(PathBuf),
    /// A name or an owner is invalid.
    #[error("--{0} must have 1 to 100 characters, none of them a control character")]
    Name(&'static str),
    /// The profile file cannot be used.
    #[error(transparent)]
    Profiles(#[from] rlood_cli::CliError),
}

/// Runs `rlood keys …`.
///
/// # Errors
/// Fails when the data directory or the database does not exist or cannot be used, or the key does not exist.
pub fn run(args: KeysArgs) -> LocalBoxFuture<'static, Result<ExitCode, KeysError>> {
    Box::pin(async move {
        let data_dir = match args.place()? {
            KeysPlace::DataDir(dir) => dir,
            KeysPlace::Api => return Ok(rlood_cli::keys::run(&args.common, &over_api(args.action)).await),
        };
        let KeysArgs { action, data_dir: _, common } = args;
        let json = common.json;
        // Without a database only `rlood keys create` is allowed: for the other commands a misspelled directory would look like one
        // without keys.
        if !matches!(action, KeysAction::Create(_)) && !data_dir.join("rlood.db").is_file() {
            return Err(KeysError::NoDatabase(data_dir));
        }
        // If a running server holds the lock of the data directory, the database is opened beside it. Otherwise this command holds
        // the lock to the end, so that no server starts in between. Only `create` may create a database or upgrade its schema,
        // because that cannot be undone.
        let (store, _lock) = match DataDir::open(&data_dir) {
            Ok(files) if matches!(action, KeysAction::Create(_)) => {
                (Store::open(&files.database()).await?, Some(files))
            }
            Ok(files) => (Store::open_beside(&files.database()).await?, Some(files)),
            Err(FilesError::Locked { root, .. }) => (Store::open_beside(&root.join("rlood.db")).await?, None),
            Err(error) => return Err(error.into()),
        };
        let done = act(&store, action, json).await;
        store.close().await;
        done?;
        Ok(ExitCode::SUCCESS)
    })
}

fn over_api(action: KeysAction) -> rlood_cli::keys::Action {
    match action {
        KeysAction::Create(CreateKeyArgs { name, scopes, owner, expires }) => {
            let expires_in_s = expires.map(|life| life.seconds);
            rlood_cli::keys::Action::Create { name, scopes, owner, expires_in_s }
        }
        KeysAction::List => rlood_cli::keys::Action::List,
        KeysAction::Revoke { id } => rlood_cli::keys::Action::Revoke(id),
    }
}

async fn act(store: &Store, action: KeysAction, json: bool) -> Result<(), KeysError> {
    let now = clock_ms();
    match action {
        KeysAction::Create(CreateKeyArgs { name, scopes, owner, expires }) => {
            for (what, text) in [("name", Some(&name)), ("owner", owner.as_ref())] {
                let bad = |text: &String| {
                    text.trim().is_empty() || text.chars().count() > 100 || text.chars().any(char::is_control)
                };
                if text.is_some_and(bad) {
                    return Err(KeysError::Name(what));
                }
            }
            let expires_at = expires.map(|life| now + life.seconds * 1000);
            let new = NewKey { name, owner, scopes: Scopes::of(scopes), expires_at };
            let (row, key) = store.api_key_create(new, now).await?;
            note(store, "keys create", &row, now).await?;
            if json {
                let mut document = view(&row, now);
                document["key"] = key.into();
                println!("{document}");
            } else {
                println!("{key}");
                eprintln!(
                    "{} '{}' of {}: {}; the key above is not shown again",
                    row.id, row.name, row.owner, row.scopes
                );
            }
        }
        KeysAction::List => list(store, json, now).await?,
        KeysAction::Revoke { id } => {
            let row = store.api_key_revoke(id, now).await?;
            note(store, "keys revoke", &row, now).await?;
            let webhooks = store.webhooks_of(&row.owner).await?;
            if json {
                let mut document = view(&row, now);
                let listed = |webhook: &WebhookRow| json!({"id": webhook.id, "url": webhook.url});
                document["webhooks"] = webhooks.iter().map(listed).collect();
                println!("{document}");
            } else {
                println!("{} '{}' is revoked", row.id, row.name);
                for WebhookRow { id, url, .. } in &webhooks {
                    eprintln!(
                        "webhook {id} of {} still sends messages to {url}: delete it with DELETE /webhooks/{id} if it is not yours",
                        row.owner
                    );
                }
            }
        }
    }
    Ok(())
}

async fn list(store: &Store, json: bool, now: i64) -> Result<(), KeysError> {
    let (mut rows, mut after) = (Vec::new(), None);
    loop {
        let page = store.api_key_list(after.as_deref(), 100).await?;
        rows.extend(page.data);
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    if json {
        // The same document as over the API, where all pages are merged into one.
        let data: Vec<Value> = rows.iter().map(|row| view(row, now)).collect();
        println!("{}", json!({"data": data, "next": null}));
        return Ok(());
    }
    println!(
        "{:<30}  {:<12}  {:<8}  {:<20}  {:<20}  {:<16}  name",
        "id", "begins with", "state", "scopes", "owner", "used"
    );
    for row in &rows {
        let used = row.used_at.and_then(minute).unwrap_or_else(|| "never".to_owned());
        let scopes = row.scopes.to_string();
        println!(
            "{}  {:<12}  {:<8}  {scopes:<20}  {:<20}  {used:<16}  {}",
            row.id,
            row.prefix,
            state(row, now),
            row.owner,
            row.name
        );
    }
    Ok(())
}

fn state(row: &KeyRow, now: i64) -> &'static str {
    match row.revoked_at {
        Some(_) => "revoked",
        None if row.is_usable(now) => "active",
        None => "expired",
    }
}

fn minute(ms: i64) -> Option<String> {
    Some(Timestamp::from_millisecond(ms).ok()?.strftime("%Y-%m-%dT%H:%MZ").to_string())
}

fn view(row: &KeyRow, now: i64) -> Value {
    let time = |ms: i64| Timestamp::from_millisecond(ms).ok().map(|time| format!("{time:.3}"));
    json!({
        "id": row.id, "name": row.name, "owner": row.owner, "scopes": row.scopes, "prefix": row.prefix,
        "state": state(row, now), "created_at": time(row.created_at), "expires_at": row.expires_at.and_then(time),
        "revoked_at": row.revoked_at.and_then(time), "used_at": row.used_at.and_then(time),
    })
}

async fn note(store: &Store, action: &str, row: &KeyRow, now: i64) -> Result<(), KeysError> {
    let change = NewAudit {
        actor: ACTOR.to_owned(),
        actor_name: None,
        owner: String::new(),
        action: action.to_owned(),
        target: format!("/keys/{}", row.id),
        status: None,
        request_id: None,
        address: None,
    };
    Ok(store.audit_add(change, now).await?)
}
