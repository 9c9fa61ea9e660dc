//! The guide as a server shows it: public, as HTML and as Markdown, under the dashboard's policy.

use axum::body::Body;
use axum::http::{Request, header};
use axum::response::Response;
use tower::ServiceExt;

use super::{pages, read, root};
use crate::server::Server;

/// The answer of a router, whose body may be a picture.
async fn response(server: &Server, path: &str) -> Response {
    server.router.clone().oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap()
}

#[tokio::test]
async fn the_guide_is_public_as_pages_and_as_markdown() {
    let server = crate::access::with_operator().await;
    assert_eq!(server.get("/jobs").await.status, 401);
    let moved = server.get("/guide").await;
    assert_eq!((moved.status.as_u16(), &moved.headers[header::LOCATION]), (308, &"/guide/".parse().unwrap()));
    for (path, heading) in
        [("/guide/", "rlood documentation"), ("/guide/guides/data", "Data"), ("/guide/reference/errors", "Error codes")]
    {
        let page = server.get(path).await;
        assert_eq!(page.status, 200, "{path}");
        assert_eq!(page.headers[header::CONTENT_TYPE], "text/html; charset=utf-8");
        let policy = page.headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(policy.contains("script-src 'self'; style-src 'self';") && !policy.contains("unsafe"), "{policy}");
        assert!(page.text.contains(&format!(">{heading}</h1>")), "{path}: {}", page.text);
        assert_eq!(page.text.matches("aria-current=\"page\"").count(), 2, "{path}");
    }
    let markdown = server.get("/guide/guides/data.md").await;
    assert_eq!(markdown.headers[header::CONTENT_TYPE], "text/markdown; charset=utf-8");
    assert_eq!(markdown.text, read(&root().join("docs/guides/data.md")));
    assert_eq!(response(&server, "/guide/images/run.png").await.headers()[header::CONTENT_TYPE], "image/png");
    for wrong in ["/guide/nothing", "/guide/../README.md", "/guide/images/pages/README.md", "/guide/guides"] {
        assert_eq!(server.get(wrong).await.status, 404, "{wrong}");
    }
}

#[tokio::test]
async fn every_address_in_the_guide_answers() {
    let server = Server::start().await;
    let mut addresses = std::collections::BTreeSet::new();
    for page in pages().iter().filter_map(|page| page.strip_prefix(root().join("docs")).ok()) {
        let name = page.to_str().unwrap().trim_end_matches(".md").trim_start_matches("README");
        if name == "SUMMARY" || name.starts_with("images/") {
            continue;
        }
        let text = server.get(&format!("/guide/{name}")).await.text;
        for attribute in ["href=\"/", "src=\"/"] {
            let found = text.split(attribute).skip(1).filter_map(|rest| rest.split(['"', '#']).next());
            addresses.extend(found.map(|address| format!("/{address}")));
        }
    }
    assert!(addresses.len() > 40, "{addresses:?}");
    for address in addresses {
        assert_eq!(response(&server, &address).await.status(), 200, "{address}");
    }
}

#[tokio::test]
async fn llms_txt_lists_every_page_with_its_description() {
    let server = Server::start().await;
    let list = server.get("/llms.txt").await;
    assert_eq!(list.headers[header::CONTENT_TYPE], "text/plain; charset=utf-8");
    assert!(list.text.starts_with("# rlood\n\n> RLOO"), "{}", list.text);
    let lines: Vec<&str> = list.text.lines().filter(|line| line.starts_with("- [")).collect();
    assert!(lines.len() > 30, "{}", list.text);
    for line in &lines {
        let address = line.split("](").nth(1).unwrap().split(')').next().unwrap();
        assert_eq!(server.get(address).await.status, 200, "{line}");
    }
    let expected =
        "- [Data](/guide/guides/data.md): File formats, the mapping from your columns to prompts, several sources";
    assert!(lines.contains(&expected), "{}", list.text);
}
