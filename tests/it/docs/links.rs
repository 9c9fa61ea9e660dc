//! Every relative link leads to a file of the repository, and to a heading of it if the link names one.

use std::path::Path;

use pulldown_cmark::{Event, Options, Parser, Tag};
use rlood::http::guide::heading_ids;

use super::{pages, read, root};

fn wrong_links(page: &Path, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        let (Event::Start(Tag::Link { dest_url, .. }) | Event::Start(Tag::Image { dest_url, .. })) = event else {
            continue;
        };
        if dest_url.contains("://") || dest_url.starts_with("mailto:") {
            continue;
        }
        let (path, anchor) = dest_url.split_once('#').map_or((&*dest_url, None), |(path, anchor)| (path, Some(anchor)));
        let target = if path.is_empty() { page.to_owned() } else { page.with_file_name("").join(path) };
        if !target.exists() {
            wrong.push(format!("{dest_url}: there is no such file"));
        } else if let Some(anchor) = anchor
            && !heading_ids(&read(&target)).iter().any(|id| id == anchor)
        {
            wrong.push(format!("{dest_url}: {path} has no such heading"));
        }
    }
    wrong
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let pages = pages();
    assert!(pages.len() > 40, "{pages:?}");
    let others = ["web", "python", "examples/reward_service", "tests/fixtures", "fuzz", "crates/kernels"];
    let others = others.map(|folder| root().join(folder).join("README.md"));
    let mut wrong = Vec::new();
    for page in pages.iter().chain(&others) {
        let name = page.strip_prefix(root()).unwrap().display();
        wrong.extend(wrong_links(page, &read(page)).into_iter().map(|link| format!("{name}: {link}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_link_to_a_missing_file_or_heading_is_found() {
    let page = root().join("README.md");
    let found = wrong_links(
        &page,
        "[a](CONTRIBUTING.md) [b](CONTRIBUTING.md#set-up) [c](nothing.md) [d](CONTRIBUTING.md#nothing) [e](#x)",
    );
    assert_eq!(found.len(), 3, "{found:?}");
}
