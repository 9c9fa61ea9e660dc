//! The documents of `docs/` as web pages below /guide, as Markdown, and as the list /llms.txt.
//!
//! The pages are public: they are the same on every server of this version. An address is the file's path without `.md`, and the
//! Markdown is at the same address with it. The sidebar is `docs/SUMMARY.md`, which is also the order of the book.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::LazyLock;

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use bytes::Bytes;
use pulldown_cmark::{CowStr, Event, Options, Parser, Tag, TagEnd, html};
use tower_http::set_header::SetResponseHeaderLayer;

use super::AppState;
use super::error::Problem;
use super::web::{self, WebFile};

/// The path and the gzip-compressed content of every file of `docs/` that is part of the guide.
static GZIPPED: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/guide_files.rs"));
/// The same files, by their paths.
static SOURCES: LazyLock<BTreeMap<&str, WebFile>> =
    LazyLock::new(|| GZIPPED.iter().map(|(name, bytes)| (*name, WebFile::gzipped(name, bytes))).collect());
const STYLE: &str = include_str!("guide.css");
const STYLE_NAME: &str = "guide.css";
const SUMMARY: &str = "SUMMARY.md";
const INDEX: &str = "README.md";
const ONE_LINE: &str = "RLOO (REINFORCE Leave-One-Out) training of language models as an HTTP service: one binary with a job queue, \
    workers, a dashboard, a command line and a REST API.";

/// The rendered pages and the stylesheet, by the part of the address after `/guide/`. The first request renders all pages.
static FILES: LazyLock<BTreeMap<&str, WebFile>> = LazyLock::new(|| {
    let style = WebFile::new(STYLE_NAME, Bytes::from_static(STYLE.as_bytes()));
    let names = SOURCES.keys().filter(|name| **name != SUMMARY);
    let pages = names.filter_map(|name| Some((page_address(name)?, WebFile::new("page.html", page_html(name).into()))));
    pages.chain([(STYLE_NAME, style)]).collect()
});
static LLMS: LazyLock<WebFile> = LazyLock::new(|| WebFile::new("llms.txt", llms_txt().into()));

/// The routes of this module.
pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/guide", get(async || Redirect::permanent("/guide/")))
        .route("/guide/", get(get_index))
        .route("/guide/{*name}", get(get_file))
        .route("/llms.txt", get(async |headers: HeaderMap| LLMS.answer(&headers, "no-cache")))
        .layer(SetResponseHeaderLayer::overriding(header::CONTENT_SECURITY_POLICY, web::DASHBOARD_POLICY))
}

async fn get_index(headers: HeaderMap) -> Response {
    answer("", &headers)
}

async fn get_file(Path(name): Path<String>, headers: HeaderMap) -> Response {
    answer(&name, &headers)
}

fn answer(name: &str, headers: &HeaderMap) -> Response {
    match FILES.get(name).or_else(|| SOURCES.get(name)) {
        Some(file) => file.answer(headers, "no-cache"),
        None => Problem::not_found("page of the guide", name).into_response(),
    }
}

/// Returns the part of a page's URL after `/guide/`; empty for the first page, `None` for a file that is not Markdown.
fn page_address(file: &str) -> Option<&str> {
    let page = file.strip_suffix(".md")?;
    Some(if file == INDEX { "" } else { page })
}

fn source(file: &str) -> Option<&'static str> {
    std::str::from_utf8(SOURCES.get(file)?.plain()).ok()
}

/// A heading of `SUMMARY.md`, and the title and file of each page below it.
#[derive(Debug, Default)]
struct Section {
    heading: Option<&'static str>,
    pages: Vec<(&'static str, &'static str)>,
}

fn sections() -> Vec<Section> {
    let mut sections = vec![Section::default()];
    for line in source(SUMMARY).unwrap_or_default().lines().filter(|line| *line != "# Summary") {
        if let Some(heading) = line.strip_prefix("# ") {
            sections.push(Section { heading: Some(heading), pages: Vec::new() });
        } else if let Some((title, rest)) =
            line.trim_start_matches("- ").strip_prefix('[').and_then(|rest| rest.split_once("]("))
            && let (Some(file), Some(section)) = (rest.strip_suffix(')'), sections.last_mut())
        {
            section.pages.push((title, file));
        }
    }
    sections
}

/// The whole page: header, sidebar, text.
fn page_html(file: &str) -> String {
    let text = source(file).unwrap_or_default();
    let title = text.lines().next().unwrap_or_default().trim_start_matches("# ");
    let mut sidebar = String::new();
    for Section { heading, pages } in sections() {
        if let Some(heading) = heading {
            let _ = write!(sidebar, "<h2>{}</h2>", escaped(heading));
        }
        for (title, target) in pages {
            let current = if target == file { " aria-current=\"page\"" } else { "" };
            let address = page_address(target).unwrap_or(target);
            let _ = write!(sidebar, "<a href=\"/guide/{address}\"{current}>{}</a>", escaped(title));
        }
    }
    let (base, icon, theme) = (web::address("style/base.css"), web::address("icon.svg"), web::address("core/theme.js"));
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title} · rlood</title>\n<link rel=\"icon\" href=\"{icon}\">\n<link rel=\"stylesheet\" href=\"{base}\">\n\
         <link rel=\"stylesheet\" href=\"/guide/{STYLE_NAME}\">\n<link rel=\"alternate\" type=\"text/markdown\" href=\"/guide/{file}\">\n\
         <script type=\"module\" src=\"{theme}\"></script>\n</head>\n<body>\n<a class=\"skip\" href=\"#main\">Skip to content</a>\n\
         <header class=\"top\"><a class=\"brand\" href=\"/\"><svg viewBox=\"0 0 32 32\" aria-hidden=\"true\"><path d=\"M4 24l8-9 5 5 11-14\" />\
         </svg>rlood</a><nav aria-label=\"Main\"><a href=\"/\">Dashboard</a><a href=\"/guide/\" aria-current=\"page\">Guide</a>\
         <a href=\"/docs/\">API</a><a class=\"to-pages\" href=\"#pages\">All pages</a></nav></header>\n<div class=\"guide\">\n\
         <nav aria-label=\"Guide\" id=\"pages\">{sidebar}</nav>\n\
         <main id=\"main\" tabindex=\"-1\">\n{}<p class=\"source\">rlood {} · <a href=\"/guide/{file}\">This page as Markdown</a></p>\n</main>\n\
         </div>\n</body>\n</html>\n",
        render(file, text),
        env!("CARGO_PKG_VERSION"),
        title = escaped(title),
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn events(text: &str) -> Parser<'_> {
    Parser::new_ext(text, Options::ENABLE_TABLES)
}

/// The ids of a page's headings, in order, as the usual code hosts form them from the text.
pub fn heading_ids(text: &str) -> Vec<String> {
    let mut ids: Vec<String> = Vec::new();
    let mut heading: Option<String> = None;
    for event in events(text) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let plain = heading.take().unwrap_or_default().to_lowercase();
                let kept = plain.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
                let slug: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
                let mut id = slug.clone();
                let mut number = 0;
                while ids.contains(&id) {
                    number += 1;
                    id = format!("{slug}-{number}");
                }
                ids.push(id);
            }
            Event::Text(part) | Event::Code(part) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&part);
                }
            }
            _ => {}
        }
    }
    ids
}

/// Renders a page's Markdown as HTML. Links to other pages lead to `/guide`. A link to a file of the repository becomes
/// its text with the path as a tooltip, because the server does not have that file. HTML in the Markdown, such as a
/// comment, is left out.
fn render(file: &str, text: &str) -> String {
    let mut ids = heading_ids(text).into_iter();
    let mut are_links: Vec<bool> = Vec::new();
    let mut out = Vec::new();
    for event in events(text) {
        match event {
            Event::Start(Tag::Heading { level, classes, attrs, .. }) => {
                out.push(Event::Start(Tag::Heading { level, id: ids.next().map(CowStr::from), classes, attrs }));
            }
            Event::Start(Tag::Link { link_type, dest_url, title, id }) => match target(file, &dest_url) {
                Ok(address) => {
                    are_links.push(true);
                    out.push(Event::Start(Tag::Link { link_type, dest_url: address.into(), title, id }));
                }
                Err(path) => {
                    are_links.push(false);
                    let start = format!("<span class=\"elsewhere\" title=\"{} in the repository\">", escaped(&path));
                    out.push(Event::InlineHtml(start.into()));
                }
            },
            Event::End(TagEnd::Link) if are_links.pop() == Some(false) => out.push(Event::InlineHtml("</span>".into())),
            Event::Start(Tag::Image { link_type, dest_url, title, id }) => {
                let dest_url = target(file, &dest_url).unwrap_or_else(|path| path).into();
                out.push(Event::Start(Tag::Image { link_type, dest_url, title, id }));
            }
            Event::Start(Tag::Table(columns)) => {
                out.extend([Event::Html("<div class=\"scroll\">".into()), Event::Start(Tag::Table(columns))]);
            }
            Event::End(TagEnd::Table) => {
                out.extend([Event::End(TagEnd::Table), Event::Html("</div>\n".into())]);
            }
            Event::Html(_) | Event::InlineHtml(_) => {}
            other => out.push(other),
        }
    }
    let mut rendered = String::with_capacity(text.len() * 2);
    html::push_html(&mut rendered, out.into_iter());
    rendered
}

/// Returns the URL that a link of a page leads to; for a file of the repository that is not part of the guide, its path.
fn target(file: &str, link: &str) -> Result<String, String> {
    if link.starts_with('#') || link.contains("://") || link.starts_with('/') {
        return Ok(link.to_owned());
    }
    let (path, anchor) =
        link.split_once('#').map_or((link, String::new()), |(path, anchor)| (path, format!("#{anchor}")));
    // Paths of links are resolved from the root of the repository, because a link may lead out of `docs/`.
    let mut parts: Vec<&str> = std::iter::once("docs").chain(file.split('/')).collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "." | "" => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let path = parts.join("/");
    match path.strip_prefix("docs/").filter(|name| SOURCES.contains_key(name)) {
        Some(name) => Ok(format!("/guide/{}{anchor}", page_address(name).unwrap_or(name))),
        None => Err(path),
    }
}

/// The list of pages for language models, in the format of llmstxt.org. Descriptions come from the tables of `docs/README.md`.
fn llms_txt() -> String {
    let index = source(INDEX).unwrap_or_default();
    let description = |file: &str| -> Option<&str> {
        let row = index.lines().find(|line| line.starts_with("| [") && line.contains(&format!("]({file})")))?;
        row.split(" | ").nth(1).map(|cell| cell.trim_end_matches([' ', '|']))
    };
    let mut text = format!(
        "# rlood\n\n> {ONE_LINE}\n\nThe pages of a running server, as Markdown. `/openapi.json` describes the API.\n"
    );
    for Section { heading, pages } in sections() {
        let _ = write!(text, "\n## {}\n\n", heading.unwrap_or("Start"));
        for (title, file) in pages {
            let about = description(file).map(|about| format!(": {about}")).unwrap_or_default();
            let _ = writeln!(text, "- [{title}](/guide/{file}){about}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_takes_at_most_a_megabyte() {
        let total: usize = SOURCES.values().map(|file| file.plain().len()).sum();
        assert!(total <= 1_000_000, "{total} bytes");
    }

    #[test]
    fn every_page_is_in_the_summary_or_has_moved() {
        let listed: Vec<&str> =
            sections().iter().flat_map(|section| section.pages.iter().map(|(_, file)| *file)).collect();
        assert!(listed.len() > 30, "{listed:?}");
        for (name, file) in SOURCES.iter().filter(|(name, _)| name.ends_with(".md") && **name != SUMMARY) {
            let has_moved = String::from_utf8_lossy(file.plain()).contains("This page has moved: ");
            assert_eq!(
                listed.iter().filter(|file| *file == name).count(),
                usize::from(!has_moved),
                "{name} in docs/SUMMARY.md"
            );
        }
        for file in listed {
            assert!(source(file).is_some(), "docs/SUMMARY.md lists {file}, which does not exist");
        }
    }

    #[test]
    fn pages_have_ids_no_inline_style_and_addresses_of_the_guide() {
        for name in SOURCES.keys().filter(|name| name.ends_with(".md")) {
            let page = page_html(name);
            for forbidden in ["style=\"", "<style", "onclick", "href=\"../", ".md#"] {
                assert!(!page.contains(forbidden), "{name} contains {forbidden}");
            }
        }
        let text = "# A `b` c\n\n## Same, same\n\n## Same same\n\n[page](../README.md#guides) [code](../../src/lib.rs) <!-- no -->\n\n| a |\n|---|\n| b |\n";
        assert_eq!(heading_ids(text), ["a-b-c", "same-same", "same-same-1"]);
        let html = render("guides/data.md", text);
        for expected in [
            "<h2 id=\"same-same-1\">",
            "<a href=\"/guide/#guides\">page</a>",
            "<span class=\"elsewhere\" title=\"src/lib.rs in the repository\">code</span>",
            "<div class=\"scroll\"><table>",
        ] {
            assert!(html.contains(expected), "{expected} is not in {html}");
        }
        assert!(!html.contains("<!--"), "{html}");
    }
}
