//! Network limits: host names, origins, headers.

use std::net::SocketAddr;

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Method, Request, Version, header};

use crate::http::{Server, server, server_with};

const KEY: &str = "operator-key-0123456789";

async fn get(server: &Server, host: &str, key: bool) -> u16 {
    let mut request = Request::get("/jobs").header(header::HOST, host);
    if key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {KEY}"));
    }
    server.send(request.body(Body::empty()).unwrap()).await.status.as_u16()
}

#[tokio::test]
async fn only_our_own_names_are_answered_with_keys_too() {
    let keyed = server_with(
        |config| {
            config.api_key = Some(KEY.to_owned());
            config.public_url = Some("https://rlood.example/prefix".to_owned());
            config.edge.allowed_hosts = vec!["rlood.internal".to_owned(), "*.lan.example".to_owned()];
        },
        |_| {},
    )
    .await;
    // A literal address cannot be rebound; without keys only the server's own names are accepted.
    for ours in
        ["localhost:1", "rlood.example", "RLOOD.internal:80", "a.b.lan.example", "192.168.7.7:8080", "[fd00::1]:1"]
    {
        assert_eq!(get(&keyed, ours, true).await, 200, "{ours}");
    }
    for theirs in ["evil.example", "xlan.example", "lan.example", "rlood.example.evil.example", ""] {
        assert_eq!(get(&keyed, theirs, true).await, 421, "{theirs}");
        assert_eq!(get(&keyed, theirs, false).await, 421, "{theirs}");
    }
    let open = server().await;
    assert_eq!(get(&open, "192.168.7.7:8080", false).await, 421);
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    if !machine.trim().contains('.') {
        assert_eq!(get(&open, machine.trim(), false).await, 200);
    }
}

#[tokio::test]
async fn a_request_names_its_host_once_and_in_order() {
    let server = server().await;
    let request = |version: Version, target: &str, hosts: &[&str]| {
        let mut request = Request::get(target).version(version);
        for host in hosts {
            request = request.header(header::HOST, *host);
        }
        let mut request = request.body(Body::empty()).unwrap();
        request.extensions_mut().insert(ConnectInfo::<SocketAddr>("127.0.0.1:4000".parse().unwrap()));
        request
    };
    let (old, one, two) = (Version::HTTP_10, Version::HTTP_11, Version::HTTP_2);
    for (version, target, hosts) in [
        (one, "/workers", &[][..]),
        (old, "/workers", &[]),
        (two, "/workers", &[]),
        (one, "http://localhost/workers", &[]),
        (one, "/workers", &["localhost", "evil.example"]),
        (one, "/workers", &["localhost", "localhost"]),
        (one, "/workers", &["[::1"]),
        (one, "/workers", &["localhost:abc"]),
        (one, "/workers", &["localhost:99999"]),
        (one, "/workers", &["a b"]),
        (one, "/worker/claim", &[]),
    ] {
        server.send(request(version, target, hosts)).await.problem(400, "invalid_request");
    }
    for (version, target, hosts) in [
        (two, "http://localhost/workers", &["evil.example"][..]),
        (two, "http://evil.example/workers", &["localhost"]),
        (two, "http://evil.example/workers", &[]),
        (one, "http://evil.example/workers", &["localhost"]),
    ] {
        server.send(request(version, target, hosts)).await.problem(421, "wrong_host");
    }
    for (version, target, hosts) in [
        (one, "/workers", &["localhost"][..]),
        (one, "/livez", &["127.0.0.1:8080"]),
        (old, "/workers", &["localhost"]),
        (two, "http://localhost/workers", &[]),
        (two, "http://localhost/workers", &["localhost"]),
        (one, "http://localhost/workers", &["localhost"]),
    ] {
        let answer = server.send(request(version, target, hosts)).await;
        assert_eq!(answer.status, 200, "{version:?} {target} {hosts:?}: {}", answer.text());
    }
}

fn from(origin: &str, method: Method) -> Request<Body> {
    let request = Request::builder().method(method).uri("/datasets").header(header::HOST, "localhost:1");
    request.header(header::ORIGIN, origin).header("content-type", "text/csv").body(Body::from("prompt\na\n")).unwrap()
}

#[tokio::test]
async fn pages_of_other_origins_read_nothing_unless_the_operator_names_them() {
    let closed = server().await;
    for method in [Method::GET, Method::OPTIONS, Method::POST] {
        let answer = closed.send(from("https://app.example", method)).await;
        assert!(
            !answer.headers.keys().any(|name| name.as_str().starts_with("access-control-")),
            "{:?}",
            answer.headers
        );
    }
    let open = server_with(|config| config.edge.cors_origins = vec!["https://app.example".to_owned()], |_| {}).await;
    let mut preflight = from("https://app.example", Method::OPTIONS);
    preflight.headers_mut().insert("access-control-request-method", "POST".parse().unwrap());
    let answer = open.send(preflight).await;
    assert_eq!((answer.status.as_u16(), answer.header("access-control-allow-origin")), (204, "https://app.example"));
    assert!(answer.header("access-control-allow-headers").contains("authorization"));
    assert!(answer.headers.get("access-control-allow-credentials").is_none(), "cookies stay at home");
    assert_eq!(open.send(from("https://app.example", Method::POST)).await.status, 201);
    for other in ["https://app.example.evil.example", "http://app.example", "null"] {
        let answer = open.send(from(other, Method::POST)).await;
        assert_eq!(answer.status, 403, "{other}");
        assert!(answer.headers.get("access-control-allow-origin").is_none(), "{other}");
    }
}

#[tokio::test]
async fn pages_run_under_a_policy_without_inline_scripts() {
    let server = server().await;
    for path in ["/", "/livez", "/nowhere", "/docs/"] {
        let answer = server.get(path).await;
        let policy = answer.header("content-security-policy").to_owned();
        let scripts = policy.split(';').find(|part| part.trim().starts_with("script-src")).unwrap_or("");
        assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{path}: {policy}");
        assert!(!scripts.contains("unsafe") && !scripts.contains('*'), "{path}: {policy}");
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("x-frame-options", "DENY"),
            ("referrer-policy", "no-referrer"),
            ("cross-origin-opener-policy", "same-origin"),
            ("cross-origin-resource-policy", "same-origin"),
        ] {
            assert_eq!(answer.header(name), value, "{path}");
        }
    }
}
