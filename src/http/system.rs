//! Health, metrics, workers.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use axum::http::{Method, StatusCode};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(livez))
}

/// Answered requests by method, route and status: how many, and how long in all.
#[derive(Debug, Default)]
pub struct RequestCounts(Mutex<BTreeMap<(String, String, u16), (u64, Duration)>>);

impl RequestCounts {
    /// Counts one answered request; `route` is a pattern (`/jobs/{id}`), never a path, so that the table stays small.
    pub fn count(&self, method: &Method, route: &str, status: StatusCode, took: Duration) {
        let method = match method.as_str() {
            known @ ("GET" | "HEAD" | "POST" | "PUT" | "PATCH" | "DELETE" | "OPTIONS") => known,
            _ => "other",
        };
        let key = (method.to_owned(), route.to_owned(), status.as_u16());
        let mut counts = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (number, time) = counts.entry(key).or_default();
        *number += 1;
        *time += took;
    }
}

/// The process answers.
#[utoipa::path(get, path = "/livez", tag = "System", responses((status = 200, description = "Alive", body = String)))]
async fn livez() -> &'static str {
    "ok\n"
}
