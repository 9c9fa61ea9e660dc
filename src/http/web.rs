//! The dashboard, from the files in `web/`.
//!
//! `/` is the page. Its files are under `/web/VERSION/`, where VERSION is a hash of all of them: browsers cache them permanently,
//! and a new binary has new addresses. The build compresses the files and changes nothing in them. The page lists every module, so
//! that a browser requests all of them at once.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::{LazyLock, OnceLock};

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use tower_http::set_header::SetResponseHeaderLayer;

use super::AppState;
use super::error::Problem;

/// Content security policy of the dashboard: all resources come from this server, nothing is inline, and text never
/// becomes markup or script.
pub(super) const DASHBOARD_POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; \
     frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
);

/// A hash of all files of the dashboard, and the name and the gzip-compressed bytes of each file.
static SENT: (&str, &[(&str, &[u8])]) = include!(concat!(env!("OUT_DIR"), "/web_files.rs"));
static FILES: LazyLock<BTreeMap<&str, WebFile>> = LazyLock::new(|| {
    let (version, files) = SENT;
    let file = |(name, bytes): &(&'static str, &'static [u8])| match *name {
        PAGE => {
            let text = WebFile::gzipped(PAGE, bytes);
            (PAGE, WebFile::new(PAGE, page(version, files, &String::from_utf8_lossy(text.plain())).into()))
        }
        name => (name, WebFile::gzipped(name, bytes)),
    };
    files.iter().map(file).collect()
});

const PAGE: &str = "index.html";

/// Returns the URL of a file of the dashboard, for pages of other modules.
pub(super) fn address(name: &str) -> String {
    format!("/web/{}/{name}", SENT.0)
}

/// The dashboard's HTML with this version's URLs and a preload link for each module.
fn page(version: &str, files: &[(&str, &[u8])], text: &str) -> String {
    let modules = files.iter().map(|(name, _)| name).filter(|name| name.ends_with(".js"));
    let links: String = modules.map(|name| format!("<link rel=\"modulepreload\" href=\"/web/{name}\">\n")).collect();
    text.replacen("<script ", &format!("{links}<script "), 1).replace("\"/web/", &format!("\"/web/{version}/"))
}

pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/", get(get_page))
        .route("/web/{version}/{*name}", get(get_web_file))
        .layer(SetResponseHeaderLayer::overriding(header::CONTENT_SECURITY_POLICY, DASHBOARD_POLICY))
}

/// A file as it is sent. Of its two forms one is given, and the other one is made at the first request for it.
pub(super) struct WebFile {
    kind: &'static str,
    etag: String,
    plain: OnceLock<Bytes>,
    gzipped: OnceLock<Bytes>,
}

impl WebFile {
    pub(super) fn new(name: &str, plain: Bytes) -> Self {
        Self { plain: plain.clone().into(), ..Self::of_kind(name, &plain) }
    }

    /// A file of which only the gzip-compressed bytes are at hand.
    pub(super) fn gzipped(name: &str, gzipped: &'static [u8]) -> Self {
        Self { gzipped: Bytes::from_static(gzipped).into(), ..Self::of_kind(name, gzipped) }
    }

    fn of_kind(name: &str, bytes: &[u8]) -> Self {
        let kind = match name.rsplit('.').next() {
            Some("html") => "text/html; charset=utf-8",
            Some("md") => "text/markdown; charset=utf-8",
            Some("txt") => "text/plain; charset=utf-8",
            Some("png") => "image/png",
            Some("js") => "text/javascript; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            _ => "image/svg+xml",
        };
        let etag = format!("\"{}\"", hex::encode(&Sha256::digest(bytes)[..16]));
        Self { kind, etag, plain: OnceLock::new(), gzipped: OnceLock::new() }
    }

    pub(super) fn plain(&self) -> &Bytes {
        let unpack = || {
            let mut plain = Vec::new();
            let packed = self.gzipped.get().cloned().unwrap_or_default();
            // No error is possible: the build wrote these bytes, and a test unpacks them.
            let _ = GzDecoder::new(&*packed).read_to_end(&mut plain);
            plain.into()
        };
        self.plain.get_or_init(unpack)
    }

    fn packed(&self) -> &Bytes {
        let pack = || {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
            // The errors of compression are ignored, because writing to a Vec cannot fail.
            let _ = encoder.write_all(self.plain());
            encoder.finish().unwrap_or_default().into()
        };
        self.gzipped.get_or_init(pack)
    }

    pub(super) fn answer(&self, asked: &HeaderMap, cache: &'static str) -> Response {
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
            return (head, kind, [(header::CONTENT_ENCODING, "gzip")], self.packed().clone()).into_response();
        }
        (head, kind, self.plain().clone()).into_response()
    }
}

/// Whether `Accept-Encoding` allows gzip: names `gzip` or `*` with a weight other than 0.
fn takes_gzip(accepted: &str) -> bool {
    accepted.split(',').any(|coding| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, ""));
        let refused = weight.trim().strip_prefix("q=").is_some_and(|weight| weight.parse::<f64>() == Ok(0.0));
        ["gzip", "*"].contains(&name.trim()) && !refused
    })
}

async fn get_page(headers: HeaderMap) -> Response {
    match FILES.get(PAGE) {
        Some(page) => page.answer(&headers, "no-cache"),
        None => Problem::not_found("page", "/").into_response(),
    }
}

/// A URL with another version comes from a page that was loaded before the server was replaced. The answer is this
/// version's file, without caching.
async fn get_web_file(Path((version, name)): Path<(String, String)>, headers: HeaderMap) -> Response {
    match FILES.get(name.as_str()) {
        Some(file) if version == SENT.0 => file.answer(&headers, "public, max-age=31536000, immutable"),
        Some(file) => file.answer(&headers, "no-store"),
        None => Problem::not_found("file of the dashboard", name).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_dashboard_stays_below_160_kb_gzipped() {
        let total: usize = FILES.values().map(|file| file.packed().len()).sum();
        assert!(total > 60_000, "{total} bytes: something is missing");
        assert!(total <= 160_000, "{total} bytes gzipped");
        for (name, file) in FILES.iter() {
            let mut read = Vec::new();
            GzDecoder::new(&**file.packed()).read_to_end(&mut read).unwrap();
            assert!(&read == file.plain(), "{name}");
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
        let page = String::from_utf8_lossy(FILES[PAGE].plain());
        assert!(!page.contains("<style") && page.matches("<script").count() == page.matches("src=\"/web/").count());
    }

    #[test]
    fn the_page_names_every_module_of_this_version_and_each_import_is_one_of_them() {
        let page = String::from_utf8_lossy(FILES[PAGE].plain());
        let root = format!("/web/{}/", SENT.0);
        let modules: Vec<&str> = FILES.keys().copied().filter(|name| name.ends_with(".js")).collect();
        assert!(modules.len() > 60, "{modules:?}");
        for name in &modules {
            let link = format!("<link rel=\"modulepreload\" href=\"{root}{name}\">");
            assert_eq!(page.matches(&link).count(), 1, "{name}");
            let text = String::from_utf8_lossy(FILES[name].plain());
            for from in text.split("from \"").skip(1).filter_map(|rest| rest.split('"').next()) {
                let mut path: Vec<&str> = name.split('/').collect();
                path.pop();
                for part in from.split('/') {
                    match part {
                        "." => {}
                        ".." => drop(path.pop()),
                        part => path.push(part),
                    }
                }
                assert!(modules.contains(&path.join("/").as_str()), "{name} imports {from}");
            }
        }
        assert_eq!(page.matches("\"/web/").count(), page.matches(&root).count(), "an address of no version");
        let chart = String::from_utf8_lossy(FILES["vendor/uplot.js"].plain());
        assert!(chart.starts_with("/*! https://github.com/leeoniya/uPlot"), "the licence of what is not ours");
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
