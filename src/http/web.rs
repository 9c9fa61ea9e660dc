//! The browser's pages: the dashboard from the files of `web/`, and /docs, which works offline.
//!
//! `/` is the page; its files lie under `/web/VERSION/`, where VERSION is a hash of all of them: a browser keeps them for good,
//! and a new binary is a new address. Our own modules and styles go out without their comment lines and indentation, otherwise
//! as they lie there.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::LazyLock;

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use flate2::Compression;
use flate2::write::GzEncoder;
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

/// Name below `web/`, bytes.
static FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/web_files.rs"));
static DASHBOARD: LazyLock<Dashboard> = LazyLock::new(Dashboard::new);

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

/// The files as they are sent.
struct Dashboard {
    version: String,
    files: BTreeMap<&'static str, WebFile>,
}

struct WebFile {
    kind: &'static str,
    etag: String,
    plain: Vec<u8>,
    gzipped: Vec<u8>,
}

impl Dashboard {
    fn new() -> Self {
        let mut all = Sha256::new();
        for (name, bytes) in FILES {
            all.update(name);
            all.update(bytes);
        }
        let version = hex(&all.finalize())[..16].to_owned();
        let file = |(name, bytes): &(&'static str, &'static [u8])| (*name, WebFile::new(name, bytes, &version));
        Self { files: FILES.iter().map(file).collect(), version }
    }
}

impl WebFile {
    fn new(name: &str, bytes: &[u8], version: &str) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let plain = match name {
            "index.html" => text.replace("\"/web/", &format!("\"/web/{version}/")),
            vendored if vendored.starts_with("vendor/") => text.into_owned(),
            _ => bare(&text),
        };
        let plain = plain.into_bytes();
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        // Writing to memory cannot fail.
        let gzipped = encoder.write_all(&plain).and_then(|()| encoder.finish()).unwrap_or_default();
        let kind = match name.rsplit('.').next() {
            Some("html") => "text/html; charset=utf-8",
            Some("js") => "text/javascript; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            _ => "image/svg+xml",
        };
        Self { kind, etag: format!("\"{}\"", &hex(&Sha256::digest(&plain))[..32]), plain, gzipped }
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
            return (head, kind, [(header::CONTENT_ENCODING, "gzip")], self.gzipped.clone()).into_response();
        }
        (head, kind, self.plain.clone()).into_response()
    }
}

/// Without lines that are comments and without indentation; a comment begins its line (`//`, or `/*` to a `*/` that ends one).
fn bare(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut is_comment = false;
    for line in text.lines().map(str::trim) {
        is_comment |= line.starts_with("/*");
        if !is_comment && !line.starts_with("//") && !line.is_empty() {
            out.push_str(line);
            out.push('\n');
        }
        is_comment &= !line.ends_with("*/");
    }
    out
}

/// `gzip` or `*`, not with the weight 0.
fn takes_gzip(accepted: &str) -> bool {
    accepted.split(',').any(|coding| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, ""));
        let refused = weight.trim().strip_prefix("q=").is_some_and(|weight| weight.parse::<f64>() == Ok(0.0));
        ["gzip", "*"].contains(&name.trim()) && !refused
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn get_page(headers: HeaderMap) -> Response {
    match DASHBOARD.files.get("index.html") {
        Some(page) => page.answer(&headers, "no-cache"),
        None => Problem::not_found("page", "/").into_response(),
    }
}

/// A file of another version is a page that was loaded before the server was replaced: it gets this version's, unkept.
async fn get_web_file(Path((version, name)): Path<(String, String)>, headers: HeaderMap) -> Response {
    match DASHBOARD.files.get(name.as_str()) {
        Some(file) if version == DASHBOARD.version => file.answer(&headers, "public, max-age=31536000, immutable"),
        Some(file) => file.answer(&headers, "no-store"),
        None => Problem::not_found("file of the dashboard", name).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dashboard_stays_below_80_kb_gzipped() {
        let total: usize = DASHBOARD.files.values().map(|file| file.gzipped.len()).sum();
        assert!(total > 30_000, "{total} bytes: something is missing");
        assert!(total <= 80_000, "{total} bytes gzipped");
    }

    #[test]
    fn nothing_in_the_dashboard_makes_markup_of_text_or_needs_inline_script_or_style() {
        for (name, bytes) in FILES.iter().filter(|(name, _)| !name.starts_with("vendor/")) {
            let text = String::from_utf8_lossy(bytes);
            for forbidden in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "new Function",
                "srcdoc",
                "javascript:",
                " style=\"",
            ] {
                assert!(!text.contains(forbidden), "{name} has {forbidden}");
            }
        }
        let page = DASHBOARD.files["index.html"].plain.clone();
        let page = String::from_utf8(page).unwrap();
        assert!(!page.contains("<style") && page.matches("<script").count() == page.matches("src=\"/web/").count());
    }

    #[test]
    fn what_is_sent_has_no_comments_and_no_indentation() {
        let text = "// What.\n/**\n * Of `x`.\n */\nfunction f(x) {\n  return x; // why\n}\n/* a */\n";
        assert_eq!(bare(text), "function f(x) {\nreturn x; // why\n}\n");
    }

    #[test]
    fn gzip_is_sent_to_those_who_take_it() {
        for (accepted, takes) in [
            ("gzip, br", true),
            ("br;q=1, gzip;q=0.5", true),
            ("*", true),
            ("", false),
            ("br", false),
            ("gzip;q=0", false),
        ] {
            assert_eq!(takes_gzip(accepted), takes, "{accepted}");
        }
    }
}
