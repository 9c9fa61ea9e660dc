//! Sessions of browsers that are signed in. The cookie's value is stored as a hash; a session ends with its key.

use futures::future::BoxFuture;

use super::api_keys::KeyRow;
use super::{Doing, Store, StoreError, column};
use crate::id::KeyId;

/// The key that opened a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionKey {
    /// An API key in the database.
    Key(KeyId),
    /// The operator's key from the environment, by its hash. Replacing the key ends the session.
    Operator(Vec<u8>),
}

/// A session that has not expired and whose key is valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionRow {
    /// The API key; `None` = the operator's key.
    pub key: Option<KeyRow>,
    /// Hash of the operator's key when the session was opened.
    pub operator_sha256: Option<Vec<u8>>,
    /// Time at which the session expires, Unix time in milliseconds.
    pub expires_at: i64,
}

impl Store {
    /// Opens a session for a key.
    pub async fn session_create(
        &self,
        sha256: &[u8],
        key: SessionKey,
        expires_at: i64,
        now: i64,
    ) -> Result<(), StoreError> {
        let (id, operator) = match key {
            SessionKey::Key(id) => (Some(id.to_string()), None),
            SessionKey::Operator(sha256) => (None, Some(sha256)),
        };
        sqlx::query(
            "INSERT INTO sessions (sha256, key_id, operator_sha256, created_at, expires_at) VALUES (?, ?, ?, ?, ?)",
        )
        .bind(sha256)
        .bind(id)
        .bind(operator)
        .bind(now)
        .bind(expires_at)
        .execute(&self.writer)
        .await
        .doing("open a session")?;
        Ok(())
    }

    /// Returns the session with this hash, if it has not expired.
    pub fn session_find<'a>(
        &'a self,
        sha256: &'a [u8],
        now: i64,
    ) -> BoxFuture<'a, Result<Option<SessionRow>, StoreError>> {
        Box::pin(async move {
            let doing = "look up a session";
            let row = sqlx::query(
                "SELECT key_id, operator_sha256, expires_at FROM sessions WHERE sha256 = ? AND expires_at > ?",
            )
            .bind(sha256)
            .bind(now)
            .fetch_optional(&self.readers)
            .await
            .doing(doing)?;
            let Some(row) = row else { return Ok(None) };
            let key = match column::<Option<&str>>(&row, "key_id")? {
                None => None,
                Some(id) => {
                    let key = sqlx::query("SELECT * FROM api_keys WHERE id = ?")
                        .bind(id)
                        .fetch_optional(&self.readers)
                        .await
                        .doing(doing)?;
                    match key.as_ref().map(KeyRow::read).transpose()?.filter(|key| key.is_usable(now)) {
                        Some(key) => Some(key),
                        None => return Ok(None),
                    }
                }
            };
            Ok(Some(SessionRow {
                key,
                operator_sha256: column(&row, "operator_sha256")?,
                expires_at: column(&row, "expires_at")?,
            }))
        })
    }

    /// Ends a session. Repeating the call has no effect.
    pub async fn session_delete(&self, sha256: &[u8]) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM sessions WHERE sha256 = ?")
            .bind(sha256)
            .execute(&self.writer)
            .await
            .doing("end a session")?;
        Ok(())
    }

    /// Removes sessions that have expired.
    pub async fn sessions_expire(&self, now: i64) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM sessions WHERE expires_at <= ?")
            .bind(now)
            .execute(&self.writer)
            .await
            .doing("remove expired sessions")?;
        Ok(())
    }
}
