//! Idempotency keys: the first answer to a request, kept 24 hours.

use super::{Store, StoreError};

/// What a key says about the request that carries it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyBegin {
    /// First seen: do it, then `key_complete` (or `key_abandon` when it failed and may be tried again).
    New,
    /// Done before: answer the same.
    Replay {
        /// HTTP status.
        status: u16,
        /// `Location` header.
        location: Option<String>,
        /// Body.
        response: String,
    },
    /// The key came with another body before: 422.
    OtherBody,
    /// The first request is still at work: 409.
    InFlight,
}

impl Store {
    /// Looks a key up and reserves it when it is new. `route` is method and path.
    pub async fn key_begin(&self, route: &str, key: &str, body_sha256: &str, now: i64) -> Result<KeyBegin, StoreError> {
        let _ = (route, key, body_sha256, now);
        todo!()
    }

    /// Stores the answer.
    pub async fn key_complete(
        &self,
        route: &str,
        key: &str,
        status: u16,
        location: Option<&str>,
        response: &str,
    ) -> Result<(), StoreError> {
        let _ = (route, key, status, location, response);
        todo!()
    }

    /// Frees a key whose request failed.
    pub async fn key_abandon(&self, route: &str, key: &str) -> Result<(), StoreError> {
        let _ = (route, key);
        todo!()
    }

    /// At boot: requests in flight died with the former server.
    pub async fn keys_free_in_flight(&self) -> Result<(), StoreError> {
        todo!()
    }

    /// Removes keys older than 24 hours.
    pub async fn keys_expire(&self, now: i64) -> Result<(), StoreError> {
        let _ = now;
        todo!()
    }
}
