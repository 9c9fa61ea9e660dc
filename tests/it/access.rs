//! Access control: every route of the OpenAPI document with every kind of credential; ownership; sessions; the audit log.

use axum::body::Body;
use axum::http::{HeaderMap, Request, header};
use rlood::id::KeyId;
use rlood::scopes::{Access, Scope, Scopes, of_route};
use rlood::store::{NewKey, clock_ms};
use serde_json::{Value, json};

use crate::server::{Answer, Server, job, records, with};

/// The operator's key, set as `RLOOD_API_KEY`.
pub const OPERATOR: &str = "operator-key-0123456789";

pub struct Key {
    pub id: KeyId,
    pub text: String,
}

pub async fn key(server: &Server, owner: &str, scopes: &[Scope]) -> Key {
    let scopes = Scopes::of(scopes.iter().copied());
    let new = NewKey { name: format!("key of {owner}"), owner: Some(owner.to_owned()), scopes, expires_at: None };
    let (row, text) = server.state.store.api_key_create(new, clock_ms()).await.unwrap();
    Key { id: row.id, text }
}

pub fn request(method: &str, path: &str, key: Option<&str>, body: Option<&Value>) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    if let Some(key) = key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    match body {
        None => request.body(Body::empty()).unwrap(),
        Some(body) => {
            request.header(header::CONTENT_TYPE, "application/json").body(Body::from(body.to_string())).unwrap()
        }
    }
}

pub async fn call(server: &Server, method: &str, path: &str, key: &str, body: Option<&Value>) -> Answer {
    server.send(request(method, path, Some(key), body)).await
}

pub async fn with_operator() -> Server {
    // Models are registered before the first key exists, so they are shared by all owners.
    let mut server = Server::start().await;
    let mut config = (*server.state.config).clone();
    config.api_key = Some(OPERATOR.to_owned());
    server.state.config = std::sync::Arc::new(config);
    server.router = rlood::http::router(server.state.clone());
    server
}

/// Returns every operation of the document: method, route template, and a path with ids that do not exist.
fn operations() -> Vec<(String, String, String)> {
    let document = serde_json::to_value(rlood::http::openapi()).unwrap();
    let mut operations = Vec::new();
    for (route, item) in document["paths"].as_object().unwrap() {
        let path = route.split('/').map(|part| if part.starts_with('{') { "x" } else { part }).collect::<Vec<_>>();
        for method in ["get", "post", "patch", "delete", "head", "put"].into_iter().filter(|m| item.get(*m).is_some()) {
            operations.push((method.to_uppercase(), route.clone(), path.join("/")));
        }
    }
    assert!(operations.len() > 45, "{} operations", operations.len());
    operations
}

#[test]
fn every_route_of_the_document_says_what_it_asks_for() {
    let unclassified: Vec<String> = operations()
        .into_iter()
        .filter(|(method, route, _)| of_route(method, route).is_none())
        .map(|(method, route, _)| format!("(\"{method}\", \"{route}\", …)"))
        .collect();
    assert!(unclassified.is_empty(), "add to ROUTES in src/access.rs:\n{}", unclassified.join("\n"));
}

#[tokio::test]
async fn every_route_answers_each_credential_as_it_says() {
    let server = with_operator().await;
    let keys = [
        (Some(Scope::Read), key(&server, "a", &[Scope::Read]).await),
        (Some(Scope::Submit), key(&server, "a", &[Scope::Submit]).await),
        (Some(Scope::Admin), key(&server, "a", &[Scope::Admin]).await),
        (Some(Scope::Worker), key(&server, "a", &[Scope::Worker]).await),
    ];
    let revoked = key(&server, "a", &[Scope::Admin]).await;
    server.state.store.api_key_revoke(revoked.id, clock_ms()).await.unwrap();
    let over = NewKey { name: "over".into(), owner: None, scopes: Scopes::of([Scope::Admin]), expires_at: Some(1) };
    let (_, expired) = server.state.store.api_key_create(over, 0).await.unwrap();
    let mut almost = keys[2].1.text.clone();
    let last = if almost.pop() == Some('0') { '1' } else { '0' };
    almost.push(last);
    let worker_token = server.state.config.worker_token.clone();
    let bad = [Some(revoked.text.as_str()), Some(&expired), Some(&almost), Some("rld_"), Some(&worker_token), None];

    let mut pairs = 0;
    for (method, route, path) in operations() {
        let access = of_route(&method, &route).unwrap();
        let status = async |key: Option<&str>| server.send(request(&method, &path, key, None)).await;
        for key in bad {
            pairs += 1;
            let answer = status(key).await;
            if access == Access::Open {
                assert!(![401, 403].contains(&answer.status.as_u16()), "{method} {route}: {}", answer.text);
            } else {
                assert_eq!(answer.status, 401, "{method} {route} with {key:?}: {}", answer.text);
                assert!(answer.headers[header::WWW_AUTHENTICATE].to_str().unwrap().starts_with("Bearer"));
            }
        }
        for (scope, key) in &keys {
            pairs += 1;
            let answer = status(Some(&key.text)).await;
            let Access::Needs(needed) = access else { continue };
            let allowed = Scopes::of(*scope).has(needed);
            assert_eq!(
                answer.status == 403,
                !allowed,
                "{method} {route} with {scope:?}: {} {}",
                answer.status,
                answer.text
            );
            assert_ne!(answer.status, 401, "{method} {route} with {scope:?}");
            assert!(!answer.status.is_server_error(), "{method} {route} with {scope:?}: {}", answer.text);
        }
        pairs += 1;
        let answer = status(Some(OPERATOR)).await;
        assert!(![401, 403].contains(&answer.status.as_u16()), "{method} {route}: {}", answer.text);
    }
    println!("{pairs} pairs of route and credential");
    // Unknown routes need a key too, so that clients without one cannot learn which routes exist.
    assert_eq!(server.send(request("GET", "/nowhere", None, None)).await.status, 401);
    assert_eq!(server.send(request("PUT", "/jobs", None, None)).await.status, 401);
    for (method, route) in
        [("TRACE", "/livez"), ("POST", "/readyz"), ("PUT", "/session"), ("GET", "/reward-callbacks/rwr_1")]
    {
        let answer = server.send(request(method, route, None, None)).await;
        assert_eq!(answer.status, 405, "{method} {route}: open to whoever comes, but not so");
    }
    assert_eq!(call(&server, "PUT", "/jobs", &keys[0].1.text, None).await.status, 405);
    assert_eq!(call(&server, "PUT", "/jobs", OPERATOR, None).await.status, 405);
    assert_eq!(call(&server, "GET", "/nowhere", &keys[0].1.text, None).await.status, 404);
}

#[tokio::test]
async fn worker_routes_take_the_token_or_a_key_for_workers_and_no_other() {
    let server = with_operator().await;
    let claim = async |key: &str| call(&server, "POST", "/worker/claim", key, Some(&json!({}))).await.status;
    for scopes in [&[Scope::Read][..], &[Scope::Submit], &[Scope::Admin]] {
        assert_eq!(claim(&key(&server, "a", scopes).await.text).await, 401, "{scopes:?}");
    }
    assert_eq!(claim(OPERATOR).await, 401);
    assert_eq!(claim(&key(&server, "a", &[Scope::Worker]).await.text).await, 422);
    assert_eq!(claim(&server.state.config.worker_token).await, 422);
}

#[tokio::test]
async fn a_key_sees_its_owners_things_and_no_others() {
    let server = with_operator().await;
    let alice = key(&server, "alice", &[Scope::Submit]).await.text;
    let again = key(&server, "alice", &[Scope::Read]).await.text;
    let bob = key(&server, "bob", &[Scope::Submit]).await.text;
    let admin = key(&server, "carol", &[Scope::Admin]).await.text;

    let created = call(&server, "POST", "/jobs", &alice, Some(&job())).await;
    assert_eq!(created.status, 201, "{}", created.text);
    assert_eq!(created.body["owner"], "alice");
    let id = created.body["id"].as_str().unwrap();
    let dataset = created.body["plan"]["dataset"]["id"].as_str().unwrap();
    let mine = [
        format!("/jobs/{id}"),
        format!("/jobs/{id}/config"),
        format!("/jobs/{id}/events"),
        format!("/datasets/{dataset}"),
    ];
    for path in &mine {
        for key in [&alice, &again, &admin, &OPERATOR.to_owned()] {
            assert_eq!(call(&server, "GET", path, key, None).await.status, 200, "{path}");
        }
        let hidden = call(&server, "GET", path, &bob, None).await;
        assert_eq!((hidden.status.as_u16(), &hidden.body["code"]), (404, &json!("not_found")), "{path}");
    }
    // The text is the same as for a job that does not exist.
    let other = "job_01jd0000000000000000000000";
    let absent = call(&server, "GET", &format!("/jobs/{other}"), &bob, None).await.body["detail"].clone();
    let hidden = call(&server, "GET", &mine[0], &bob, None).await.body["detail"].clone();
    assert_eq!(absent.as_str().unwrap().replace(other, id), hidden.as_str().unwrap());

    for action in ["cancel", "pause", "resume", "retry"] {
        assert_eq!(call(&server, "POST", &format!("/jobs/{id}/{action}"), &bob, None).await.status, 404, "{action}");
    }
    assert_eq!(call(&server, "DELETE", &mine[0], &bob, None).await.status, 404);
    assert_eq!(call(&server, "DELETE", &mine[3], &bob, None).await.status, 404);
    assert_eq!(call(&server, "GET", &format!("/jobs/compare?ids={id}"), &bob, None).await.status, 404);
    for list in ["/jobs", "/datasets"] {
        let seen = async |key: &str| call(&server, "GET", list, key, None).await.body["data"].as_array().unwrap().len();
        assert_eq!((seen(&alice).await, seen(&bob).await, seen(&admin).await), (1, 0, 1), "{list}");
    }

    // Ids in a body are checked with the same permissions.
    let mut named = job();
    named["dataset"] = json!({"id": dataset});
    let refused = call(&server, "POST", "/jobs", &bob, Some(&named)).await;
    assert_eq!((refused.status.as_u16(), &refused.body["errors"][0]["code"]), (422, &json!("unknown_dataset")));
    assert_eq!(call(&server, "POST", "/jobs", &alice, Some(&named)).await.status, 201);
    // The same rows become a separate dataset of his own; deleting one does not affect the other.
    let copied = call(&server, "POST", "/jobs", &bob, Some(&job())).await;
    assert_ne!(copied.body["plan"]["dataset"]["id"], dataset);
    // A job that an admin derives from hers keeps her as the owner.
    assert_eq!(call(&server, "POST", &format!("/jobs/{id}/cancel"), &admin, None).await.status, 200);
    let retried = call(&server, "POST", &format!("/jobs/{id}/retry"), &admin, None).await;
    assert_eq!((retried.status.as_u16(), &retried.body["owner"]), (201, &json!("alice")));
}

#[tokio::test]
async fn models_of_an_admin_are_for_everybody_and_of_a_key_its_own() {
    let server = with_operator().await;
    let alice = key(&server, "alice", &[Scope::Submit]).await.text;
    let bob = key(&server, "bob", &[Scope::Submit]).await.text;
    let source = server.dir.path().join("plain");
    let register = async |key: &str, id: &str| {
        call(&server, "POST", "/models", key, Some(&json!({"id": id, "source": source}))).await.status.as_u16()
    };
    assert_eq!(call(&server, "GET", "/models/chat", &alice, None).await.status, 200);
    assert_eq!(call(&server, "DELETE", "/models/chat", &alice, None).await.status, 403);
    assert_eq!(register(&alice, "hers/one").await, 201);
    assert_eq!(register(&alice, "hers/one").await, 200);
    assert_eq!(register(&bob, "hers/one").await, 409);
    let body = json!({"id": "hers/one", "source": source});
    let refused = call(&server, "POST", "/models", &bob, Some(&body)).await.body["detail"].as_str().unwrap().to_owned();
    assert!(refused.contains("is taken") && !refused.contains("delete") && !refused.contains("alice"), "{refused}");
    assert_eq!(call(&server, "GET", "/models/hers%2Fone", &bob, None).await.status, 404);
    assert_eq!(call(&server, "DELETE", "/models/hers%2Fone", &bob, None).await.status, 404);
    let mut named = job();
    named["model"] = json!("hers/one");
    let refused = call(&server, "POST", "/jobs", &bob, Some(&named)).await;
    assert_eq!((refused.status.as_u16(), &refused.body["errors"][0]["code"]), (422, &json!("unknown_model")));
    assert!(!refused.text.contains("hers/one is"), "{}", refused.text);
    let ids = |answer: Answer| {
        let data = answer.body["data"].as_array().unwrap().clone();
        data.iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(ids(call(&server, "GET", "/models", &bob, None).await), ["plain", "chat"]);
    assert_eq!(ids(call(&server, "GET", "/models", &alice, None).await), ["hers/one", "plain", "chat"]);
    assert_eq!(call(&server, "DELETE", "/models/hers%2Fone", &alice, None).await.status, 204);
}

#[tokio::test]
async fn an_idempotency_key_is_the_owners() {
    let server = with_operator().await;
    let alice = key(&server, "alice", &[Scope::Submit]).await.text;
    let bob = key(&server, "bob", &[Scope::Submit]).await.text;
    let submit = async |key: &str| {
        let mut request = request("POST", "/jobs", Some(key), Some(&job()));
        request.headers_mut().insert("idempotency-key", "same".parse().unwrap());
        server.send(request).await.body["id"].clone()
    };
    let first = submit(&alice).await;
    assert_eq!(submit(&alice).await, first);
    assert_ne!(submit(&bob).await, first);
}

#[tokio::test]
async fn from_the_first_key_on_nobody_comes_in_without_one() {
    let server = Server::start().await;
    assert_eq!(server.get("/jobs").await.status, 200);
    let session = server.get("/session").await;
    assert_eq!(session.body["keys_required"], false);
    assert_eq!(session.body["scopes"], json!(["read", "submit", "admin"]));

    let make = |scopes: Value| json!({"name": "first", "scopes": scopes});
    let refused = server.post("/keys", make(json!(["submit"]))).await;
    assert_eq!((refused.status.as_u16(), &refused.body["errors"][0]["code"]), (422, &json!("first_key_not_admin")));
    assert_eq!(
        server.post("/keys", json!({"name": "", "scopes": [], "expires_in_s": 0})).await.body["errors"]
            .as_array()
            .unwrap()
            .len(),
        3
    );
    let made = server.post("/keys", make(json!(["admin"]))).await;
    assert_eq!(made.status, 201, "{}", made.text);
    let (id, text) = (made.body["id"].as_str().unwrap().to_owned(), made.body["key"].as_str().unwrap().to_owned());
    assert!(text.starts_with("rld_") && text.len() == 68 && made.body["owner"] == id.as_str());

    assert_eq!(server.get("/jobs").await.status, 401);
    let listed = call(&server, "GET", "/keys", &text, None).await;
    assert_eq!(listed.body["data"][0]["id"], id.as_str());
    assert!(!listed.text.contains(&text), "the text is shown once");
    let raw = std::fs::read(server.state.files.database()).unwrap();
    let wal = std::fs::read(server.state.files.database().with_extension("db-wal")).unwrap_or_default();
    for bytes in [raw, wal] {
        assert!(!bytes.windows(text.len()).any(|window| window == text.as_bytes()), "the text is in the database");
    }
    // A revoked key is refused, and does not turn authentication off. The response lists webhooks of its owner that keep sending.
    let webhook = json!({"url": "https://hooks.example/hook", "events": ["job.failed"]});
    let webhook = call(&server, "POST", "/webhooks", &text, Some(&webhook)).await;
    assert_eq!(webhook.status, 201, "{}", webhook.text);
    let revoked = call(&server, "DELETE", &format!("/keys/{id}"), &text, None).await;
    assert_eq!((revoked.status.as_u16(), &revoked.body["state"]), (200, &json!("revoked")), "{}", revoked.text);
    let left = &revoked.body["webhooks"];
    assert_eq!((left.as_array().unwrap().len(), &left[0]["id"]), (1, &webhook.body["id"]), "{}", revoked.text);
    assert_eq!((&left[0]["url"], &left[0]["enabled"]), (&json!("https://hooks.example/hook"), &json!(true)));
    assert!(!revoked.text.contains("whsec_"));
    assert_eq!(call(&server, "GET", "/jobs", &text, None).await.status, 401);
    assert_eq!(server.get("/jobs").await.status, 401);
}

/// Returns the session cookie of a response, and whether it may be sent over http.
fn cookie(headers: &HeaderMap) -> String {
    let text = headers[header::SET_COOKIE].to_str().unwrap();
    for attribute in ["Path=/", "HttpOnly", "SameSite=Strict"] {
        assert!(text.contains(attribute), "{text}");
    }
    text.split(';').next().unwrap().to_owned()
}

async fn with_cookie(server: &Server, method: &str, path: &str, cookie: &str, csrf: Option<&str>) -> Answer {
    let mut request = Request::builder().method(method).uri(path).header(header::COOKIE, cookie);
    if let Some(csrf) = csrf {
        request = request.header("x-csrf-token", csrf);
    }
    server.send(request.body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn a_key_becomes_a_session_that_ends_with_it() {
    let server = with_operator().await;
    let alice = key(&server, "alice", &[Scope::Submit]).await;
    assert_eq!(server.post("/session", json!({"key": "rld_wrong"})).await.status, 401);
    let worker = key(&server, "alice", &[Scope::Worker]).await;
    assert_eq!(server.post("/session", json!({"key": worker.text})).await.status, 403);
    let opened = server.post("/session", json!({"key": alice.text})).await;
    assert_eq!(opened.status, 201, "{}", opened.text);
    assert!(!opened.headers[header::SET_COOKIE].to_str().unwrap().contains("Secure"), "reached by http");
    let cookie = cookie(&opened.headers);
    assert!(!cookie.contains(&alice.text) && !opened.text.contains(&alice.text));
    assert_eq!(opened.body["owner"], "alice");
    let csrf = opened.body["csrf_token"].as_str().unwrap();

    let me = with_cookie(&server, "GET", "/session", &cookie, None).await;
    assert_eq!((&me.body["csrf_token"], &me.body["key_id"]), (&json!(csrf), &json!(alice.id)));
    assert_eq!(me.body["scopes"], json!(["read", "submit"]));
    let created = call(&server, "POST", "/jobs", &alice.text, Some(&job())).await;
    let cancel = format!("/jobs/{}/cancel", created.body["id"].as_str().unwrap());
    for wrong in [None, Some(""), Some("0"), Some(&csrf[..60])] {
        let answer = with_cookie(&server, "POST", &cancel, &cookie, wrong).await;
        assert_eq!((answer.status.as_u16(), &answer.body["code"]), (403, &json!("invalid_csrf_token")), "{wrong:?}");
    }
    assert_eq!(with_cookie(&server, "POST", &cancel, &cookie, Some(csrf)).await.status, 200);
    assert_eq!(with_cookie(&server, "GET", "/keys", &cookie, None).await.status, 403);
    assert_eq!(with_cookie(&server, "GET", "/jobs", "rlood_session=nonsense", None).await.status, 401);

    server.state.store.api_key_revoke(alice.id, clock_ms()).await.unwrap();
    assert_eq!(with_cookie(&server, "GET", "/session", &cookie, None).await.status, 401);
}

#[tokio::test]
async fn signing_out_and_another_operators_key_end_a_session() {
    let server = with_operator().await;
    let opened = server.post("/session", json!({"key": OPERATOR})).await;
    let (first, csrf) = (cookie(&opened.headers), opened.body["csrf_token"].as_str().unwrap().to_owned());
    assert_eq!(with_cookie(&server, "DELETE", "/session", &first, None).await.status, 403);
    let out = with_cookie(&server, "DELETE", "/session", &first, Some(&csrf)).await;
    assert_eq!(out.status, 204);
    assert!(out.headers[header::SET_COOKIE].to_str().unwrap().contains("Max-Age=0"));
    assert_eq!(with_cookie(&server, "GET", "/jobs", &first, None).await.status, 401);

    let second = cookie(&server.post("/session", json!({"key": OPERATOR})).await.headers);
    assert_eq!(with_cookie(&server, "GET", "/keys", &second, None).await.status, 200);
    let mut state = server.state.clone();
    let mut config = (*state.config).clone();
    config.api_key = Some("another-key-0123456789".to_owned());
    config.public_url = Some("https://rlood.example".to_owned());
    state.config = std::sync::Arc::new(config);
    let server = Server { router: rlood::http::router(state.clone()), state, dir: server.dir };
    assert_eq!(with_cookie(&server, "GET", "/keys", &second, None).await.status, 401);
    let opened = server.post("/session", json!({"key": "another-key-0123456789"})).await;
    assert!(opened.headers[header::SET_COOKIE].to_str().unwrap().contains("; Secure"));
    assert!(opened.headers.contains_key("strict-transport-security"));
}

#[tokio::test]
async fn every_change_is_on_record_with_who_made_it() {
    let server = with_operator().await;
    let alice = key(&server, "alice", &[Scope::Submit]).await;
    let created = call(&server, "POST", "/jobs", &alice.text, Some(&job())).await;
    let path = format!("/jobs/{}", created.body["id"].as_str().unwrap());
    call(&server, "GET", &path, &alice.text, None).await;
    call(&server, "POST", "/jobs/validate", &alice.text, Some(&job())).await;
    call(&server, "POST", &format!("{path}/cancel"), &alice.text, None).await;
    call(&server, "POST", &format!("{path}/resume"), &alice.text, None).await; // Refused: it is over.
    call(&server, "DELETE", &path, OPERATOR, None).await;
    let body = json!({"records": records(2)});
    call(&server, "POST", "/datasets", &alice.text, Some(&body)).await;

    assert_eq!(call(&server, "GET", "/audit", &alice.text, None).await.status, 403);
    let of_job = call(&server, "GET", &format!("/audit?target={path}"), OPERATOR, None).await;
    let rows: Vec<(&str, &str, &str)> = of_job.body["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| ["actor", "action", "target"].map(|field| row[field].as_str().unwrap()).into())
        .collect();
    let (id, cancel) = (alice.id.to_string(), format!("{path}/cancel"));
    assert_eq!(
        rows,
        [
            ("operator", "DELETE /jobs/{id}", path.as_str()),
            (&id, "POST /jobs/{id}/cancel", &cancel),
            (&id, "POST /jobs", &path),
        ]
    );
    let hers = call(&server, "GET", &format!("/audit?actor={id}&limit=2"), OPERATOR, None).await;
    assert_eq!(hers.body["data"].as_array().unwrap().len(), 2);
    assert_eq!(hers.body["data"][0]["action"], "POST /datasets");
    assert_eq!(hers.body["data"][0]["owner"], "alice");
    assert!(hers.body["data"][0]["time"].is_string() && hers.body["next"].is_string());
}

#[tokio::test]
async fn what_was_answered_before_and_what_failed_are_no_changes() {
    let mut server = with_operator().await;
    let alice = key(&server, "alice", &[Scope::Submit]).await;
    let submit = async |server: &Server, name: &str| {
        let mut request = request("POST", "/jobs", Some(&alice.text), Some(&with(job(), "name", json!(name))));
        request.headers_mut().insert("idempotency-key", name.parse().unwrap());
        server.send(request).await.status.as_u16()
    };
    assert_eq!((submit(&server, "once").await, submit(&server, "once").await), (201, 201));
    let mut config = (*server.state.config).clone();
    config.edge.disk_reserve_bytes = u64::MAX;
    server.state.config = std::sync::Arc::new(config);
    server.router = rlood::http::router(server.state.clone());
    assert_eq!(submit(&server, "full").await, 507);
    let hers = call(&server, "GET", &format!("/audit?actor={}", alice.id), OPERATOR, None).await;
    let rows = hers.body["data"].as_array().unwrap();
    assert_eq!((rows.len(), &rows[0]["status"]), (1, &json!(201)), "{}", hers.text);
}
