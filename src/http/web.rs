//! The browser's pages: /docs.

use axum::Router;

use super::AppState;

/// The routes of this module.
pub fn routes() -> Router<AppState> {
    Router::new()
}
