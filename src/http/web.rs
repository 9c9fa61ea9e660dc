//! The browser's pages: a first page with links, and /docs, which works offline.

use axum::Router;
use axum::http::{HeaderValue, header};
use axum::response::Html;
use axum::routing::get;
use tower_http::set_header::SetResponseHeaderLayer;
use utoipa_swagger_ui::{Config, SwaggerUi};

use super::AppState;

/// Everything from here; the page asks for its own files and for /openapi.json, nothing else.
const CONTENT_SECURITY_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; \
     frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
);

/// The routes of this module.
pub fn routes() -> Router<AppState> {
    // The badge of a validator on the internet stays off.
    let config = Config::from("/openapi.json").validator_url("none").try_it_out_enabled(true);
    Router::from(SwaggerUi::new("/docs").config(config))
        .route("/", get(async || Html(include_str!("../../web/index.html"))))
        .layer(SetResponseHeaderLayer::overriding(header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY))
}
