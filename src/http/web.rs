//! The browser's pages: the dashboard from the files of `web/`, and /docs, which works offline.
//!
//! `/` is the page; its files lie under `/web/VERSION/`, where VERSION is a hash of all of them: a browser keeps them for good,
//! and a new binary is a new address. `build/web.rs` joins the modules into one.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use sha2::{Digest, Sha256};
use tower_http::set_header::SetResponseHeaderLayer;
use utoipa_swagger_ui::{Config, SwaggerUi};

use super::AppState;
use super::error::Problem;

/// Everything from here, nothing inline, and no text ever becomes markup or script.
const DASHBOARD_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; \
     frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
);
/// The page asks for its own files and for /openapi.json, nothing else; its library writes styles into the page.
const DOCS_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; \
     frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
);

/// A file's name, its bytes, its bytes compressed.
type Sent = (&'static str, &'static [u8], &'static [u8]);

/// A hash of all files, and each of them.
static SENT: (&str, &[Sent]) = include!(concat!(env!("OUT_DIR"), "/web_files.rs"));
static FILES: LazyLock<BTreeMap<&str, WebFile>> = LazyLock::new(|| {
    let (_, files) = SENT;
    files.iter().map(|(name, plain, gzipped)| (*name, WebFile::new(name, plain, gzipped))).collect()
});

/// The routes of this module.
pub fn routes() -> Router<AppState> {
    // The badge of a validator on the internet stays off.
    let config = Config::from("/openapi.json").validator_url("none").try_it_out_enabled(true);
    let docs = Router::from(SwaggerUi::new("/docs").config(config))
        .layer(SetResponseHeaderLayer::overriding(header::CONTENT_SECURITY_POLICY, DOCS_POLICY));
    let dashboard = Router::new()
        .route("/", get(get_page))
        .route("/web/{version}/{*name}", get(get_web_file))
        .layer(SetResponseHeaderLayer::overriding(header::CONTENT_SECURITY_POLICY, DASHBOARD_POLICY));
    docs.merge(dashboard)
}

/// A file as it is sent.
struct WebFile {
    kind: &'static str,
    etag: String,
    plain: &'static [u8],
    gzipped: &'static [u8],
}

impl WebFile {
    fn new(name: &str, plain: &'static [u8], gzipped: &'static [u8]) -> Self {
        let kind = match name.rsplit('.').next() {
            Some("html") => "text/html; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            _ => "image/svg+xml",
        };
        let sha256: String = Sha256::digest(plain).iter().map(|byte| format!("{byte:02x}")).collect();
        Self { kind, etag: format!("\"{}\"", &sha256[..32]), plain, gzipped }
    }

    fn answer(&self, asked: &HeaderMap, cache: &'static str) -> Response {
        let text = |name| asked.get(name).and_then(|value: &HeaderValue| value.to_str().ok()).unwrap_or("");
        let etag = text(header::IF_NONE_MATCH);
        let known =
            etag.split(',').map(|tag| tag.trim().trim_start_matches("W/")).any(|tag| tag == self.etag || tag == "*");
        let head = [
            (header::ETAG, format!("W/{}", self.etag)),
            (header::CACHE_CONTROL, cache.to_owned()),
            (header::VARY, "accept-encoding".to_owned()),
        ];
        if known {
            return (StatusCode::NOT_MODIFIED, head).into_response();
        }
        let kind = [(header::CONTENT_TYPE, self.kind)];
        if takes_gzip(text(header::ACCEPT_ENCODING)) {
            return (head, kind, [(header::CONTENT_ENCODING, "gzip")], self.gzipped).into_response();
        }
        (head, kind, self.plain).into_response()
    }
}

/// `gzip` or `*`, not with the weight 0.
fn takes_gzip(accepted: &str) -> bool {
    accepted.split(',').any(|coding| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, ""));
        let refused = weight.trim().strip_prefix("q=").is_some_and(|weight| weight.parse::<f64>() == Ok(0.0));
        ["gzip", "*"].contains(&name.trim()) && !refused
    })
}

async fn get_page(headers: HeaderMap) -> Response {
    match FILES.get("index.html") {
        Some(page) => page.answer(&headers, "no-cache"),
        None => Problem::not_found("page", "/").into_response(),
    }
}

/// A file of another version is a page that was loaded before the server was replaced: it gets this version's, unkept.
async fn get_web_file(Path((version, name)): Path<(String, String)>, headers: HeaderMap) -> Response {
    match FILES.get(name.as_str()) {
        Some(file) if version == SENT.0 => file.answer(&headers, "public, max-age=31536000, immutable"),
        Some(file) => file.answer(&headers, "no-store"),
        None => Problem::not_found("file of the dashboard", name).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_dashboard_stays_below_80_kb_gzipped() {
        let total: usize = SENT.1.iter().map(|(_, _, gzipped)| gzipped.len()).sum();
        assert!(total > 30_000, "{total} bytes: something is missing");
        assert!(total <= 80_000, "{total} bytes gzipped");
        for (name, plain, gzipped) in SENT.1 {
            let mut read = Vec::new();
            flate2::read::GzDecoder::new(*gzipped).read_to_end(&mut read).unwrap();
            assert!(read == *plain, "{name}");
        }
    }

    #[test]
    fn nothing_in_the_dashboard_makes_markup_of_text_or_needs_inline_script_or_style() {
        const FORBIDDEN: [&str; 10] = [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
            "javascript:",
            " style=\"",
            "setAttribute(\"style\"",
        ];
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("web")];
        let mut seen = 0;
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
                if path.is_dir() {
                    folders.extend((!path.ends_with("vendor")).then_some(path));
                    continue;
                }
                seen += 1;
                let text = std::fs::read_to_string(&path).unwrap();
                for forbidden in FORBIDDEN.iter().filter(|_| path.extension().is_some_and(|end| end != "md")) {
                    assert!(!text.contains(forbidden), "{} has {forbidden}", path.display());
                }
            }
        }
        assert!(seen > 40, "{seen} files");
        let page = String::from_utf8_lossy(FILES["index.html"].plain);
        assert!(!page.contains("<style") && page.matches("<script").count() == page.matches("src=\"/web/").count());
    }

    #[test]
    fn one_script_is_sent_with_every_module_in_it_once_and_the_licence_of_what_is_not_ours() {
        let app = SENT.1.iter().find(|(name, _, _)| *name == "app.js").unwrap();
        let app = std::str::from_utf8(app.1).unwrap();
        // Of a view each, of the core, of a chart, of the form.
        for text in [
            "Nothing has been trained here yet",
            "Ask both",
            "text/event-stream",
            "double click for all",
            "Or paste rows",
        ] {
            assert_eq!(app.matches(text).count(), 1, "{text}");
        }
        assert!(app.contains("/*! https://github.com/leeoniya/uPlot"));
        assert!(!app.contains("import{") && !app.contains("export{") && !app.contains("export default"));
    }

    #[test]
    fn gzip_is_sent_to_those_who_take_it() {
        let cases = [
            ("gzip, br", true),
            ("br;q=1, gzip;q=0.5", true),
            ("*", true),
            ("", false),
            ("br", false),
            ("gzip;q=0", false),
        ];
        for (accepted, takes) in cases {
            assert_eq!(takes_gzip(accepted), takes, "{accepted}");
        }
    }
}
