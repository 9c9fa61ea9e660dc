//! The worker protocol, the server's side.

use utoipa_axum::router::OpenApiRouter;

use super::AppState;

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
}
