//! API keys. The text of a key is shown once at creation, and only its hash is stored.

use futures::future::BoxFuture;
use sha2::{Digest, Sha256};
use sqlx::sqlite::SqliteRow;
use subtle::ConstantTimeEq;

use super::{Doing, Newest, Page, Store, StoreError, column, id_column, json_column, to_json};
use crate::id::KeyId;
use crate::scopes::Scopes;

/// Prefix of every key.
const KEY_PREFIX: &str = "rld_";
/// Name of the row in `server_secrets` which records that restoring a backup removed all API keys.
const KEYS_DROPPED: &str = "keys_dropped";
/// Number of characters of a key's text that are stored readably: the prefix and 32 of its 256 bits.
const SHOWN_CHARS: usize = KEY_PREFIX.len() + 8;

/// A key without its secret text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRow {
    /// Id of the key.
    pub id: KeyId,
    /// Display name of the key.
    pub name: String,
    /// Owner whose jobs, datasets and models the key can see. Several keys may share an owner.
    pub owner: String,
    /// Scopes of the key.
    pub scopes: Scopes,
    /// Beginning of the key's text.
    pub prefix: String,
    /// Time of creation, Unix time in milliseconds.
    pub created_at: i64,
    /// Time from which the key is no longer valid, Unix time in milliseconds; `None` = never.
    pub expires_at: Option<i64>,
    /// Time of revocation, Unix time in milliseconds; `None` = not revoked.
    pub revoked_at: Option<i64>,
    /// Time of the last use to the minute, Unix time in milliseconds.
    pub used_at: Option<i64>,
}

impl KeyRow {
    /// Whether the key is valid now.
    pub fn is_usable(&self, now: i64) -> bool {
        self.revoked_at.is_none() && self.expires_at.is_none_or(|expires_at| now < expires_at)
    }
}

/// How many credentials were removed by [`Store::api_keys_drop`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dropped {
    /// Number of API keys, valid or not.
    pub keys: u64,
    /// Number of browser sessions.
    pub sessions: u64,
}

/// Properties of a key to create.
#[derive(Debug, Clone)]
pub struct NewKey {
    /// Display name of the key.
    pub name: String,
    /// Owner; `None` = the key's own id.
    pub owner: Option<String>,
    /// Scopes of the key.
    pub scopes: Scopes,
    /// Time at which the key expires, Unix time in milliseconds; `None` = never.
    pub expires_at: Option<i64>,
}

/// Returns 256 random bits from the operating system as hexadecimal digits.
///
/// # Errors
/// Fails if the operating system gives no random numbers.
pub fn random_text() -> std::io::Result<String> {
    let mut bytes = [0_u8; 32];
    rustls::crypto::ring::default_provider()
        .secure_random
        .fill(&mut bytes)
        .map_err(|_| std::io::Error::other("the operating system provided no random numbers for a key"))?;
    Ok(hex::encode(bytes))
}

impl Store {
    /// Creates a key. Returns its row and its text, which cannot be read again.
    pub fn api_key_create(&self, new: NewKey, now: i64) -> BoxFuture<'_, Result<(KeyRow, String), StoreError>> {
        Box::pin(async move {
            let doing = "create an API key";
            let NewKey { name, owner, scopes, expires_at } = new;
            let random =
                random_text().map_err(|error| StoreError::Database { doing, source: sqlx::Error::Io(error) })?;
            let text = format!("{KEY_PREFIX}{random}");
            let id = KeyId::new();
            let row = sqlx::query(
                "INSERT INTO api_keys (id, name, owner, scopes, prefix, sha256, created_at, expires_at) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING *",
            )
            .bind(id.to_string())
            .bind(name)
            .bind(owner.unwrap_or_else(|| id.to_string()))
            .bind(to_json("scopes", &scopes)?)
            .bind(&text[..SHOWN_CHARS])
            .bind(Sha256::digest(&text).to_vec())
            .bind(now)
            .bind(expires_at)
            .fetch_one(&self.writer)
            .await
            .doing(doing)?;
            Ok((KeyRow::read(&row)?, text))
        })
    }

    /// Returns the valid key with this text. The hashes are compared in constant time.
    pub async fn api_key_find(&self, text: &str, now: i64) -> Result<Option<KeyRow>, StoreError> {
        if !text.starts_with(KEY_PREFIX) {
            return Ok(None);
        }
        let Some(prefix) = text.get(..SHOWN_CHARS) else { return Ok(None) };
        let given = Sha256::digest(text);
        let rows = sqlx::query("SELECT * FROM api_keys WHERE prefix = ?")
            .bind(prefix)
            .fetch_all(&self.readers)
            .await
            .doing("look up an API key")?;
        for row in &rows {
            let kept: &[u8] = column(row, "sha256")?;
            if bool::from(kept.ct_eq(given.as_slice())) {
                return Ok(Some(KeyRow::read(row)?).filter(|key| key.is_usable(now)));
            }
        }
        Ok(None)
    }

    /// Returns one key, or `NotFound`.
    pub async fn api_key_get(&self, id: KeyId) -> Result<KeyRow, StoreError> {
        let row = sqlx::query("SELECT * FROM api_keys WHERE id = ?")
            .bind(id.to_string())
            .fetch_optional(&self.readers)
            .await
            .doing("read an API key")?
            .ok_or_else(|| StoreError::NotFound { kind: "key", id: id.to_string() })?;
        KeyRow::read(&row)
    }

    /// Lists all keys including revoked ones, newest first.
    pub async fn api_key_list(&self, after: Option<&str>, limit: u32) -> Result<Page<KeyRow>, StoreError> {
        let sql = "SELECT * FROM api_keys WHERE (created_at, id) < (?1, ?2) AND ?3 IS NULL \
                   ORDER BY created_at DESC, id DESC LIMIT ?4";
        self.newest(Newest { list: "keys", sql, owner: None, after, limit, more: &[] }, KeyRow::read).await
    }

    /// Revokes a key and ends every session that was opened with it. Repeating the call has no effect.
    pub fn api_key_revoke(&self, id: KeyId, now: i64) -> BoxFuture<'_, Result<KeyRow, StoreError>> {
        Box::pin(async move {
            let doing = "revoke a key";
            let mut tx = self.begin(doing).await?;
            let row = sqlx::query("UPDATE api_keys SET revoked_at = COALESCE(revoked_at, ?) WHERE id = ? RETURNING *")
                .bind(now)
                .bind(id.to_string())
                .fetch_optional(&mut *tx)
                .await
                .doing(doing)?
                .ok_or_else(|| StoreError::NotFound { kind: "key", id: id.to_string() })?;
            let row = KeyRow::read(&row)?;
            sqlx::query("DELETE FROM sessions WHERE key_id = ?")
                .bind(id.to_string())
                .execute(&mut *tx)
                .await
                .doing(doing)?;
            tx.commit().await.doing(doing)?;
            Ok(row)
        })
    }

    /// Records the time at which an API key was used.
    pub async fn api_key_used(&self, id: KeyId, now: i64) -> Result<(), StoreError> {
        sqlx::query("UPDATE api_keys SET used_at = ? WHERE id = ?")
            .bind(now)
            .bind(id.to_string())
            .execute(&self.writer)
            .await
            .doing("record the use of an API key")?;
        Ok(())
    }

    /// Removes every API key and session. If there was a key, the server still requires one for every request.
    pub async fn api_keys_drop(&self) -> Result<Dropped, StoreError> {
        let doing = "remove all keys";
        let mut tx = self.begin(doing).await?;
        let sessions = sqlx::query("DELETE FROM sessions").execute(&mut *tx).await.doing(doing)?.rows_affected();
        let keys = sqlx::query("DELETE FROM api_keys").execute(&mut *tx).await.doing(doing)?.rows_affected();
        if keys > 0 {
            sqlx::query("INSERT INTO server_secrets (name, value) VALUES (?, '') ON CONFLICT (name) DO NOTHING")
                .bind(KEYS_DROPPED)
                .execute(&mut *tx)
                .await
                .doing(doing)?;
        }
        self.commit(tx, doing).await?;
        Ok(Dropped { keys, sessions })
    }

    /// Whether an API key was ever created on this server, even if it was revoked or removed. From the first key on,
    /// every request needs one.
    pub async fn api_keys_exist(&self) -> Result<bool, StoreError> {
        sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM api_keys) OR EXISTS (SELECT 1 FROM server_secrets WHERE name = ?)",
        )
        .bind(KEYS_DROPPED)
        .fetch_one(&self.readers)
        .await
        .doing("count API keys")
    }

    /// Returns the number of keys that are valid now.
    pub async fn api_keys_usable(&self, now: i64) -> Result<u64, StoreError> {
        let count: i64 = sqlx::query_scalar(
            "SELECT COUNT(*) FROM api_keys WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?)",
        )
        .bind(now)
        .fetch_one(&self.readers)
        .await
        .doing("count API keys")?;
        Ok(count.unsigned_abs())
    }
}

impl KeyRow {
    pub(super) fn read(row: &SqliteRow) -> Result<KeyRow, StoreError> {
        Ok(KeyRow {
            id: id_column(row, "id")?,
            name: column(row, "name")?,
            owner: column(row, "owner")?,
            scopes: json_column(row, "scopes")?,
            prefix: column(row, "prefix")?,
            created_at: column(row, "created_at")?,
            expires_at: column(row, "expires_at")?,
            revoked_at: column(row, "revoked_at")?,
            used_at: column(row, "used_at")?,
        })
    }
}
