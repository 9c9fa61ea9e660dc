//! Idempotency keys: the first response to a request, stored for 24 hours.

use futures::future::BoxFuture;

use super::{Doing, Store, StoreError, column};

/// Result of looking up the key of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyBegin {
    /// The key is new: process the request, then call `key_complete` (or `key_abandon` if it failed and may be retried).
    New,
    /// The request was processed before: send the same response.
    Replay {
        /// HTTP status of the response.
        status: u16,
        /// `Location` header of the response.
        location: Option<String>,
        /// Body of the response.
        response: String,
    },
    /// The key was used with another body before: 422.
    OtherBody,
    /// The first request is still being processed: 409.
    InFlight,
}

/// How long the response to a request with an idempotency key is stored, in milliseconds.
const RETENTION_MS: i64 = 24 * 60 * 60 * 1000;

impl Store {
    /// Looks up an idempotency key and reserves it if it is new. `route` is method and path.
    pub fn key_begin<'a>(
        &'a self,
        route: &'a str,
        key: &'a str,
        body_sha256: &'a str,
        now: i64,
    ) -> BoxFuture<'a, Result<KeyBegin, StoreError>> {
        Box::pin(async move {
            let doing = "look up an idempotency key";
            let mut tx = self.begin(doing).await?;
            sqlx::query("DELETE FROM idempotency_keys WHERE route = ? AND key = ? AND created_at < ?")
                .bind(route)
                .bind(key)
                .bind(now.saturating_sub(RETENTION_MS))
                .execute(&mut *tx)
                .await
                .doing(doing)?;
            let known = sqlx::query(
                "SELECT body_sha256, status, location, response FROM idempotency_keys WHERE route = ? AND key = ?",
            )
            .bind(route)
            .bind(key)
            .fetch_optional(&mut *tx)
            .await
            .doing(doing)?;
            if let Some(known) = known {
                if column::<&str>(&known, "body_sha256")? != body_sha256 {
                    return Ok(KeyBegin::OtherBody);
                }
                return Ok(match column::<Option<u16>>(&known, "status")? {
                    None => KeyBegin::InFlight,
                    Some(status) => KeyBegin::Replay {
                        status,
                        location: column(&known, "location")?,
                        response: column::<Option<String>>(&known, "response")?.unwrap_or_default(),
                    },
                });
            }
            sqlx::query("INSERT INTO idempotency_keys (route, key, body_sha256, created_at) VALUES (?, ?, ?, ?)")
                .bind(route)
                .bind(key)
                .bind(body_sha256)
                .bind(now)
                .execute(&mut *tx)
                .await
                .doing(doing)?;
            self.commit(tx, doing).await?;
            Ok(KeyBegin::New)
        })
    }

    /// Stores the response to a request with an idempotency key.
    pub async fn key_complete(
        &self,
        route: &str,
        key: &str,
        status: u16,
        location: Option<&str>,
        response: &str,
    ) -> Result<(), StoreError> {
        sqlx::query("UPDATE idempotency_keys SET status = ?, location = ?, response = ? WHERE route = ? AND key = ?")
            .bind(status)
            .bind(location)
            .bind(response)
            .bind(route)
            .bind(key)
            .execute(&self.writer)
            .await
            .doing("store the response of an idempotency key")?;
        Ok(())
    }

    /// Frees the idempotency key of a request that failed, so that it can be used again.
    pub async fn key_abandon(&self, route: &str, key: &str) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM idempotency_keys WHERE route = ? AND key = ? AND status IS NULL")
            .bind(route)
            .bind(key)
            .execute(&self.writer)
            .await
            .doing("release the idempotency key of a failed request")?;
        Ok(())
    }

    /// Frees the idempotency keys of requests that were in flight when the former server ended. Called at start.
    pub async fn keys_free_in_flight(&self) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM idempotency_keys WHERE status IS NULL")
            .execute(&self.writer)
            .await
            .doing("release the idempotency keys of interrupted requests")?;
        Ok(())
    }

    /// Removes idempotency keys older than 24 hours.
    pub async fn keys_expire(&self, now: i64) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM idempotency_keys WHERE created_at < ?")
            .bind(now.saturating_sub(RETENTION_MS))
            .execute(&self.writer)
            .await
            .doing("remove old idempotency keys")?;
        Ok(())
    }
}
