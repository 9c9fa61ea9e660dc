//! `/docs`: the API's document in Swagger UI, which works offline. Its files are those of the crate `utoipa-swagger-ui-vendored`;
//! `build.rs` takes the two that the page needs, as they are compressed there.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use bytes::Bytes;
use tower_http::set_header::SetResponseHeaderLayer;

use super::AppState;
use super::error::Problem;
use super::web::WebFile;

/// The page requests only its own files and /openapi.json; Swagger UI writes styles into the page.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; \
     frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
);

const PAGE: &str = "index.html";
const HTML: &str = r##"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rlood API</title>
<link rel="stylesheet" href="swagger-ui.css">
<link rel="icon" href="data:,">
<style>body { margin: 0; }</style>
</head>
<body>
<div id="swagger-ui"></div>
<script src="swagger-ui-bundle.js"></script>
<script src="swagger-initializer.js"></script>
</body>
</html>
"##;
/// `validatorUrl: "none"` disables a badge that would call an external validation service.
const START: &str = r##"window.ui = SwaggerUIBundle({
  dom_id: "#swagger-ui",
  url: "/openapi.json",
  deepLinking: true,
  tryItOutEnabled: true,
  validatorUrl: "none",
  presets: [SwaggerUIBundle.presets.apis],
  plugins: [SwaggerUIBundle.plugins.DownloadUrl],
});
"##;

/// The name of each file of Swagger UI, and its bytes compressed by gzip.
static GZIPPED: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/swagger_files.rs"));
static FILES: LazyLock<BTreeMap<&str, WebFile>> = LazyLock::new(|| {
    let own = [(PAGE, HTML), ("swagger-initializer.js", START)];
    let own = own.map(|(name, text)| (name, WebFile::new(name, Bytes::from_static(text.as_bytes()))));
    let packed = GZIPPED.iter().map(|(name, bytes)| (*name, WebFile::gzipped(name, bytes)));
    own.into_iter().chain(packed).collect()
});

pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/docs", get(|| async { Redirect::to("/docs/") }))
        .route("/docs/", get(|headers: HeaderMap| async move { answer(PAGE, &headers) }))
        .route(
            "/docs/{name}",
            get(|Path(name): Path<String>, headers: HeaderMap| async move { answer(&name, &headers) }),
        )
        .layer(SetResponseHeaderLayer::overriding(header::CONTENT_SECURITY_POLICY, POLICY))
}

fn answer(name: &str, headers: &HeaderMap) -> Response {
    match FILES.get(name) {
        Some(file) => file.answer(headers, "no-cache"),
        None => Problem::not_found("file of the API's page", name).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn the_page_names_its_files_and_each_is_what_it_was_before_compression() {
        for name in FILES.keys().filter(|name| **name != PAGE) {
            assert!(HTML.contains(&format!("=\"{name}\"")), "{name}");
        }
        for (name, bytes) in GZIPPED {
            // Also compares the length and the checksum that the zip had.
            let mut read = Vec::new();
            flate2::read::GzDecoder::new(*bytes).read_to_end(&mut read).unwrap();
            assert!(&read == FILES[name].plain(), "{name}");
        }
        let text = |name: &str| String::from_utf8(FILES[name].plain().to_vec()).unwrap();
        assert!(text("swagger-ui-bundle.js").contains("SwaggerUIBundle"));
        assert!(text("swagger-ui.css").contains(".swagger-ui"));
        let packed: usize = GZIPPED.iter().map(|(_, bytes)| bytes.len()).sum();
        assert!(packed < 600_000, "{packed} bytes");
    }
}
