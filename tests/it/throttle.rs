//! Invalid keys from one address: 429 after a while, for that address only, and not for keys that it has used successfully before.

use std::net::SocketAddr;

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{Request, StatusCode, header};
use rlood::outgoing::Net;
use rlood::scopes::{Scope, Scopes};
use rlood::store::{NewKey, clock_ms};
use serde_json::{Value, json};

use crate::server::{Answer, Server};

const OPERATOR: &str = "operator-key-0123456789";
const OFFICE: &str = "198.51.100.7:4000";
const ELSEWHERE: &str = "203.0.113.9:4000";

/// A request that arrives over a socket from this peer.
fn from(peer: &str, request: axum::http::request::Builder, body: Option<Value>) -> Request<Body> {
    let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
    let request = request.header(header::HOST, "localhost").header(header::CONTENT_TYPE, "application/json");
    let mut request = request.body(body).unwrap();
    request.extensions_mut().insert(ConnectInfo::<SocketAddr>(peer.parse().unwrap()));
    request
}

async fn list(server: &Server, peer: &str, key: &str) -> Answer {
    let request = Request::get("/jobs").header(header::AUTHORIZATION, format!("Bearer {key}"));
    server.send(from(peer, request, None)).await
}

async fn sign_in(server: &Server, peer: &str, key: &str) -> Answer {
    server.send(from(peer, Request::post("/session"), Some(json!({"key": key})))).await
}

async fn keyed(trusted_proxies: Vec<Net>) -> Server {
    let mut server = Server::start().await;
    let mut config = (*server.state.config).clone();
    config.api_key = Some(OPERATOR.to_owned());
    config.edge.trusted_proxies = trusted_proxies;
    server.state.config = std::sync::Arc::new(config);
    server.router = rlood::http::router(server.state.clone());
    server
}

#[track_caller]
fn must_wait(answer: &Answer) {
    assert_eq!((answer.status, &answer.body["code"]), (StatusCode::TOO_MANY_REQUESTS, &json!("too_many_requests")));
    let seconds: u64 = answer.headers[header::RETRY_AFTER].to_str().unwrap().parse().unwrap();
    assert!((1..=66).contains(&seconds), "{seconds}");
    assert_eq!(answer.body["retryable"], true);
}

#[tokio::test]
async fn an_address_that_guesses_waits_and_nobody_else_does() {
    let server = keyed(Vec::new()).await;
    let colleague = Scopes::of([Scope::Read]);
    let new = NewKey { name: "colleague".to_owned(), owner: None, scopes: colleague, expires_at: None };
    let (_, colleague) = server.state.store.api_key_create(new, clock_ms()).await.unwrap();
    assert_eq!(list(&server, OFFICE, &colleague).await.status, 200);

    for n in 0..20 {
        // Headers, sign-ins and cookies share one limit.
        let answer = match n % 3 {
            0 => list(&server, OFFICE, &format!("rld_guess{n}")).await,
            1 => sign_in(&server, OFFICE, &format!("rld_guess{n}")).await,
            _ => {
                let cookie = Request::get("/jobs").header(header::COOKIE, format!("rlood_session=guess{n}"));
                server.send(from(OFFICE, cookie, None)).await
            }
        };
        assert_eq!(answer.status, 401, "{n}: {}", answer.text);
    }
    must_wait(&list(&server, OFFICE, "rld_guess20").await);
    must_wait(&sign_in(&server, OFFICE, "rld_guess21").await);
    let worker = Request::post("/worker/claim").header(header::AUTHORIZATION, "Bearer guess22");
    must_wait(&server.send(from(OFFICE, worker, Some(json!({})))).await);
    // The right key is refused too: otherwise further guesses would find it.
    must_wait(&sign_in(&server, OFFICE, OPERATOR).await);

    assert_eq!(list(&server, OFFICE, &colleague).await.status, 200, "a key that this address has shown before");
    assert_eq!(sign_in(&server, ELSEWHERE, OPERATOR).await.status, 201, "another address");
    assert_eq!(list(&server, ELSEWHERE, OPERATOR).await.status, 200);
    let nothing = server.send(from(OFFICE, Request::get("/jobs"), None)).await;
    assert_eq!(nothing.status, 401, "who shows no key guesses none");
    assert_eq!(server.send(from(OFFICE, Request::get("/livez"), None)).await.status, 200);
}

#[tokio::test]
async fn this_machine_is_not_limited_and_behind_a_proxy_the_client_counts() {
    let server = keyed(Vec::new()).await;
    for n in 0..50 {
        assert_eq!(list(&server, "127.0.0.1:4000", &format!("rld_guess{n}")).await.status, 401);
    }
    let server = keyed(vec![Net::parse("127.0.0.1").unwrap()]).await;
    let through = async |client: &str, key: &str| {
        let request = Request::get("/jobs").header(header::AUTHORIZATION, format!("Bearer {key}"));
        // The part that the client itself wrote comes first.
        server.send(from("127.0.0.1:4000", request.header("x-forwarded-for", format!("9.9.9.9, {client}")), None)).await
    };
    for n in 0..20 {
        assert_eq!(through("198.51.100.7", &format!("rld_guess{n}")).await.status, 401);
    }
    must_wait(&through("198.51.100.7", OPERATOR).await);
    assert_eq!(through("198.51.100.8", OPERATOR).await.status, 200);
    // Only trusted proxies are believed.
    let request = Request::get("/jobs").header(header::AUTHORIZATION, format!("Bearer {OPERATOR}"));
    let answer = server.send(from(ELSEWHERE, request.header("x-forwarded-for", "198.51.100.7"), None)).await;
    assert_eq!(answer.status, 200);
}
