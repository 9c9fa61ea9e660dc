//! Visibility by owner in shared resources: webhooks, metrics, the stream of all jobs.

use std::time::Duration;

use axum::http::header;
use http_body_util::BodyExt;
use rlood::protocol::{RewardHealth, RewardReport, RewardReports};
use rlood::scopes::Scope;
use rlood::store::clock_ms;
use serde_json::json;
use tower::ServiceExt;

use crate::access::{OPERATOR, call, key, request, with_operator};
use crate::server::{job, with};

#[tokio::test]
async fn a_webhook_of_every_owners_jobs_is_nobodys_but_the_admins() {
    let server = with_operator().await;
    let lead = key(&server, "team-a", &[Scope::Admin]).await.text;
    let member = key(&server, "team-a", &[Scope::Submit]).await.text;
    let body = |url: &str| json!({"url": url, "events": ["job.queued"]});
    let all = call(&server, "POST", "/webhooks", &lead, Some(&body("https://example.com/all"))).await;
    assert_eq!((&all.body["all_jobs"], &all.body["owner"]), (&json!(true), &json!("team-a")));
    let path = format!("/webhooks/{}", all.body["id"].as_str().unwrap());
    let of_id = all.body["id"].as_str().unwrap().parse().unwrap();
    let message = server.state.store.delivery_test(of_id, clock_ms()).await.unwrap().id;
    let elsewhere = json!({"url": "https://elsewhere.example/"});
    let (redeliver, empty) = (format!("{path}/deliveries/{message}/redeliver"), json!({}));
    for (method, path, body) in [
        ("GET", path.clone(), None),
        ("PATCH", path.clone(), Some(&elsewhere)),
        ("POST", format!("{path}/secret"), Some(&empty)),
        ("POST", format!("{path}/test"), None),
        ("GET", format!("{path}/deliveries"), None),
        ("POST", redeliver, None),
        ("DELETE", path.clone(), None),
    ] {
        let refused = call(&server, method, &path, &member, body).await;
        assert_eq!((refused.status.as_u16(), &refused.body["code"]), (404, &json!("not_found")), "{method} {path}");
    }
    let same = call(&server, "GET", &path, &lead, None).await;
    assert_eq!((&same.body["url"], &same.body["updated_at"]), (&all.body["url"], &all.body["updated_at"]));

    // A webhook that an admin limits to its owner's jobs belongs to that owner.
    let own = with(body("https://example.com/own"), "all_jobs", json!(false));
    let own = call(&server, "POST", "/webhooks", &lead, Some(&own)).await.body["id"].clone();
    let own_path = format!("/webhooks/{}", own.as_str().unwrap());
    assert_eq!(call(&server, "PATCH", &own_path, &member, Some(&elsewhere)).await.status, 200);
    let listed = async |key: &str| {
        let listed = call(&server, "GET", "/webhooks", key, None).await;
        listed.body["data"].as_array().unwrap().iter().map(|hook| hook["id"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(listed(&member).await, std::slice::from_ref(&own));
    assert_eq!(listed(&lead).await, [own, all.body["id"].clone()]);
}

#[tokio::test]
async fn measurements_name_the_jobs_that_the_key_sees() {
    let server = with_operator().await;
    let alice = key(&server, "alice", &[Scope::Submit]).await.text;
    let bob = key(&server, "bob", &[Scope::Submit]).await.text;
    let mut ids = Vec::new();
    for key in [&alice, &bob] {
        let created = call(&server, "POST", "/jobs", key, Some(&job())).await;
        let (id, attempt) = server.claim().await;
        assert_eq!(created.body["id"], json!(id));
        let health = RewardHealth { samples: 8, ..RewardHealth::default() };
        let rewards = vec![RewardReport { name: "number_match".to_owned(), evaluation: false, health }];
        server.state.store.reward_reports_store(id, &RewardReports { attempt, rewards }, clock_ms()).await.unwrap();
        ids.push(id.to_string());
    }
    let named = async |key: &str| {
        let text = call(&server, "GET", "/metrics", key, None).await.text;
        assert!(text.contains("rlood_jobs{state=\"running\"} 2"), "the server's figures are for everybody");
        ids.iter().map(|id| text.contains(id.as_str())).collect::<Vec<_>>()
    };
    assert_eq!(named(&alice).await, [true, false]);
    assert_eq!(named(&bob).await, [false, true]);
    assert_eq!(named(OPERATOR).await, [true, true]);
}

#[tokio::test]
async fn an_owner_hears_that_its_jobs_are_gone_and_of_no_others() {
    let server = with_operator().await;
    let alice = key(&server, "alice", &[Scope::Submit]).await.text;
    let bob = key(&server, "bob", &[Scope::Submit]).await.text;
    let mut ids = Vec::new();
    for key in [&alice, &bob] {
        let created = call(&server, "POST", "/jobs", key, Some(&job())).await;
        let id = created.body["id"].as_str().unwrap().to_owned();
        assert_eq!(call(&server, "POST", &format!("/jobs/{id}/cancel"), key, None).await.status, 200);
        ids.push(id);
    }
    // Neither job changes before it is deleted.
    let mut request = request("GET", "/jobs/changes", Some(&alice), None);
    request.headers_mut().insert(header::ACCEPT, "text/event-stream".parse().unwrap());
    let mut body = server.router.clone().oneshot(request).await.unwrap().into_body();
    let mut text = String::new();
    let mut read_until = async |end: &str| {
        while !text.contains(end) {
            let frame = tokio::time::timeout(Duration::from_secs(20), body.frame()).await;
            let data = frame.expect("news in time").expect("an open stream").unwrap().into_data().unwrap();
            text.push_str(std::str::from_utf8(&data).unwrap());
        }
        std::mem::take(&mut text)
    };
    read_until("changes of all jobs follow").await;
    assert_eq!(call(&server, "DELETE", &format!("/jobs/{}", ids[1]), &bob, None).await.status, 204);
    assert_eq!(call(&server, "DELETE", &format!("/jobs/{}", ids[0]), OPERATOR, None).await.status, 204);
    let told = read_until(&format!("{{\"id\":\"{}\"}}", ids[0])).await;
    assert!(told.contains("event: gone") && !told.contains(&ids[1]), "{told}");
}
