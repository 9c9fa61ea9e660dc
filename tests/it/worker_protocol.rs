//! The worker protocol over the real router: from registration to the downloaded checkpoint.

mod trouble;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use http_body_util::BodyExt;
use rlood::config::ServeConfig;
use rlood::http::{AppState, router};
use rlood::id::{DatasetId, JobId, WorkerId};
use rlood::job::State;
use rlood::protocol::PROTOCOL;
use rlood::store::NewModel;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tower::ServiceExt;

use crate::setting::{Setting, T0};

struct Server {
    setting: Setting,
    router: Router,
    token: String,
    worker: WorkerId,
    disk_low: Arc<AtomicBool>,
}

impl Server {
    async fn new() -> Self {
        Self::with(|_| {}).await
    }

    /// Starts with other settings.
    async fn with(change: impl FnOnce(&mut ServeConfig)) -> Self {
        let setting = Setting::new().await;
        let mut config = ServeConfig::loopback(setting.dir.path()).unwrap();
        change(&mut config);
        let token = config.worker_token.clone();
        let model = NewModel {
            id: "org/tiny".to_owned(),
            source: "/models/tiny".to_owned(),
            sha256: "aa".to_owned(),
            card: json!({}),
            owner: String::new(),
        };
        setting.store.model_create(model, T0).await.unwrap();
        std::fs::write(setting.files.dataset(setting.dataset), b"{\"prompt\":\"a\"}\n").unwrap();
        let state = AppState::new(setting.store.clone(), setting.files.clone(), Arc::new(config));
        let disk_low = state.disk_low.clone();
        let server = Self { setting, router: router(state), token, worker: WorkerId::new(), disk_low };
        let register = json!({"worker": server.worker, "device": "cpu", "pid": 1, "threads": 1, "version": "0.1.0",
                              "protocol": PROTOCOL});
        let (status, body) = server.post("/worker/register", register).await;
        assert_eq!((status, &body["lease_ms"]), (StatusCode::OK, &json!(30_000)));
        server
    }

    async fn send(&self, method: &str, path: &str, body: impl Into<Body>) -> (StatusCode, Vec<u8>) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("authorization", format!("Bearer {}", self.token))
            .header("content-type", "application/json")
            .body(body.into())
            .unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status();
        (status, response.into_body().collect().await.unwrap().to_bytes().to_vec())
    }

    async fn post(&self, path: &str, body: Value) -> (StatusCode, Value) {
        let (status, bytes) = self.send("POST", path, body.to_string()).await;
        (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
    }

    async fn claim(&self, wait_ms: u64) -> (StatusCode, Value) {
        self.post("/worker/claim", json!({"worker": self.worker, "wait_ms": wait_ms, "protocol": PROTOCOL})).await
    }

    /// Uploads files and publishes them.
    async fn publish(&self, job: JobId, attempt: u64, step: u64, files: &[(&str, &[u8])]) -> (StatusCode, Value) {
        for (name, bytes) in files {
            let path = format!("/worker/jobs/{job}/checkpoints/{step}/{name}?attempt={attempt}");
            let (status, body) = self.send("PUT", &path, bytes.to_vec()).await;
            assert_eq!(status, StatusCode::NO_CONTENT, "{}", String::from_utf8_lossy(&body));
        }
        let entries: Vec<Value> = files.iter().map(|(name, bytes)| entry(name, bytes)).collect();
        let publish = json!({"attempt": attempt, "files": entries, "metrics": {"reward": 0.5}});
        self.post(&format!("/worker/jobs/{job}/checkpoints/{step}"), publish).await
    }
}

fn entry(name: &str, bytes: &[u8]) -> Value {
    json!({"name": name, "size_bytes": bytes.len(), "sha256": hex::encode(Sha256::digest(bytes))})
}

#[tokio::test]
async fn a_job_travels_through_the_protocol() {
    let server = Server::new().await;
    let Setting { store, dataset, .. } = &server.setting;
    let job = server.setting.job().await;
    let (status, claim) = server.claim(0).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!((&claim["job"], &claim["attempt"]), (&json!(job), &json!(1)));
    assert_eq!((&claim["model_path"], &claim["model_name"]), (&json!("/models/tiny"), &json!("org/tiny")));
    assert_eq!(claim["secrets"]["helpful"]["secret"], "whsec_x");
    assert_eq!(claim["resume"], Value::Null);

    let (status, rows) = server.send("GET", &format!("/worker/jobs/{job}/datasets/{dataset}?attempt=1"), "").await;
    assert_eq!((status, rows.as_slice()), (StatusCode::OK, b"{\"prompt\":\"a\"}\n".as_slice()));
    let foreign = format!("/worker/jobs/{job}/datasets/{}?attempt=1", DatasetId::new());
    assert_eq!(server.send("GET", &foreign, "").await.0, StatusCode::NOT_FOUND);

    let beat = json!({"attempt": 1, "phase": "rollout", "status_reason": null, "step": 0, "eta_s": null});
    let (_, reply) = server.post(&format!("/worker/jobs/{job}/heartbeat"), beat.clone()).await;
    assert_eq!(reply, json!({"requested": null, "lease_ms": 30_000}));
    store.job_pause(job, T0).await.unwrap();
    let (_, reply) = server.post(&format!("/worker/jobs/{job}/heartbeat"), beat).await;
    assert_eq!(reply["requested"], "pause");

    let step = json!({"type": "step", "step": 1, "kind": "train", "metrics": {"reward": 0.5}});
    let batch = json!({"attempt": 1, "batch": 0, "events": [step], "log": ["a line"]});
    assert_eq!(server.post(&format!("/worker/jobs/{job}/events"), batch).await.0, StatusCode::NO_CONTENT);

    let weights = vec![7_u8; 700_000];
    let files: [(&str, &[u8]); 2] = [("adapter_model.safetensors", &weights), ("manifest.json", b"{}")];
    let (status, published) = server.publish(job, 1, 1, &files).await;
    assert_eq!(status, StatusCode::OK, "{published}");
    // A repeated call gets the same response.
    let again = json!({"attempt": 1, "files": files.map(|(name, bytes)| entry(name, bytes)), "metrics": {}});
    let path = format!("/worker/jobs/{job}/checkpoints/1");
    assert_eq!(server.post(&path, again).await, (StatusCode::OK, published.clone()));

    let finish = json!({"attempt": 1, "outcome": {"outcome": "paused", "reason": null}});
    assert_eq!(server.post(&format!("/worker/jobs/{job}/finish"), finish).await.0, StatusCode::NO_CONTENT);
    assert_eq!(server.setting.state(job).await, State::Paused);
    store.job_resume(job, T0).await.unwrap();

    let (_, claim) = server.claim(0).await;
    assert_eq!((&claim["attempt"], &claim["resume"]["step"]), (&json!(2), &json!(1)));
    assert_eq!(claim["resume"]["files"][0]["name"], "adapter_model.safetensors");
    let path = format!("/worker/jobs/{job}/resume/adapter_model.safetensors?attempt=2");
    assert_eq!(server.send("GET", &path, "").await, (StatusCode::OK, weights));
    let path = format!("/worker/jobs/{job}/resume/other?attempt=2");
    assert_eq!(server.send("GET", &path, "").await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn every_call_of_a_lost_claim_is_refused() {
    let server = Server::new().await;
    let job = server.setting.job().await;
    server.claim(0).await;
    server.setting.store.worker_lost(server.worker, None, T0).await.unwrap();
    let dataset = server.setting.dataset;
    let at = |rest: &str| format!("/worker/jobs/{job}/{rest}");
    let beat = json!({"attempt": 1, "phase": "train", "status_reason": null, "step": 0, "eta_s": null});
    let calls = [
        ("POST", at("heartbeat"), beat),
        ("POST", at("events"), json!({"attempt": 1, "batch": 0, "events": [], "log": []})),
        ("POST", at("checkpoints/1"), json!({"attempt": 1, "files": [], "metrics": {}})),
        ("POST", at("finish"), json!({"attempt": 1, "outcome": {"outcome": "succeeded"}})),
        ("PUT", at("checkpoints/1/x?attempt=1"), json!({})),
        ("GET", at(&format!("datasets/{dataset}?attempt=1")), json!({})),
        ("GET", at("resume/x?attempt=1"), json!({})),
    ];
    for (method, path, body) in calls {
        let (status, body) = server.send(method, &path, body.to_string()).await;
        let problem: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!((status, &problem["code"]), (StatusCode::CONFLICT, &json!("lease_lost")), "{method} {path}");
    }
    assert_eq!(server.setting.state(job).await, State::Queued);
    // A removed worker must register again.
    assert_eq!(server.claim(0).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_claim_waits_for_work() {
    let server = Server::new().await;
    assert_eq!(server.claim(20).await.0, StatusCode::NO_CONTENT);
    let (claimed, job) = tokio::join!(server.claim(20_000), async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        server.setting.job().await
    });
    assert_eq!(claimed.1["job"], json!(job));
}

#[tokio::test]
async fn no_job_is_handed_out_while_the_disk_is_nearly_full() {
    let server = Server::new().await;
    let job = server.setting.job().await;
    server.disk_low.store(true, Ordering::Relaxed);
    assert_eq!(server.claim(0).await.0, StatusCode::NO_CONTENT);
    // A resumed job is not handed out either.
    server.setting.store.job_pause(job, T0).await.unwrap();
    server.setting.store.job_resume(job, T0 + 1).await.unwrap();
    assert_eq!(server.claim(0).await.0, StatusCode::NO_CONTENT);
    assert_eq!(server.setting.state(job).await, State::Queued);
    server.disk_low.store(false, Ordering::Relaxed);
    assert_eq!(server.claim(0).await.1["job"], json!(job));
}

#[tokio::test]
async fn checkpoints_leave_the_reserve_free_but_for_what_a_job_saves_because_it_was_asked_to_stop() {
    let upload = async |reserve: u64, pause: bool| {
        let server = Server::with(|config| config.edge.disk_reserve_bytes = reserve).await;
        let job = server.setting.job().await;
        assert_eq!(server.claim(0).await.0, StatusCode::OK);
        if pause {
            server.setting.store.job_pause(job, T0).await.unwrap();
        }
        let path = format!("/worker/jobs/{job}/checkpoints/1/manifest.json?attempt=1");
        let (status, body) = server.send("PUT", &path, "{}").await;
        let code = serde_json::from_slice(&body).map_or(Value::Null, |problem: Value| problem["code"].clone());
        (status.as_u16(), code)
    };
    let refused = (507, json!("storage_full"));
    assert_eq!(upload(u64::MAX, false).await, refused);
    assert_eq!(upload(u64::MAX, true).await, refused);
    // A reserve of twice the free space: a quarter of it is available.
    let free = Setting::new().await.files.free_bytes().unwrap();
    assert_eq!(upload(2 * free, false).await, refused);
    assert_eq!(upload(2 * free, true).await, (204, Value::Null));
    assert_eq!(upload(0, false).await, (204, Value::Null));
}

#[tokio::test]
async fn a_job_whose_model_is_gone_fails_and_the_next_one_is_claimed() {
    let server = Server::new().await;
    let mut plan = crate::setting::plan(server.setting.dataset);
    plan.model.id = "org/gone".to_owned();
    let gone = server.setting.job_of(&plan, 0, T0).await.unwrap().id;
    plan.model.id = "/models/by-path".to_owned();
    let by_path = server.setting.job_of(&plan, 0, T0).await.unwrap().id;
    let (_, claim) = server.claim(0).await;
    assert_eq!((&claim["job"], &claim["model_path"]), (&json!(by_path), &json!("/models/by-path")));
    let failure = server.setting.store.job_get(gone).await.unwrap().failure.unwrap();
    assert_eq!(failure.code, "model_missing");
}

#[tokio::test]
async fn an_upload_that_is_not_as_listed_is_never_published() {
    let server = Server::new().await;
    let job = server.setting.job().await;
    server.claim(0).await;
    let path = |name: &str| format!("/worker/jobs/{job}/checkpoints/1/{name}?attempt=1");
    assert_eq!(server.send("PUT", &path("manifest.json"), "{}").await.0, StatusCode::NO_CONTENT);
    for bad in ["..%2Fx", ".hidden", "a%20b"] {
        assert_eq!(server.send("PUT", &path(bad), "x").await.0, StatusCode::UNPROCESSABLE_ENTITY, "{bad}");
    }
    let publish = |files: Value| {
        let body = json!({"attempt": 1, "files": files, "metrics": {}});
        let path = format!("/worker/jobs/{job}/checkpoints/1");
        let server = &server;
        async move { server.post(&path, body).await }
    };
    for (files, what) in [
        (json!([]), "manifest.json"),
        (json!([entry("manifest.json", b"[]")]), "SHA-256"),
        (json!([entry("manifest.json", b"{}"), entry("more", b"")]), "not uploaded"),
    ] {
        let (status, problem) = publish(files).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
        assert!(problem["detail"].as_str().unwrap().contains(what), "{problem}");
    }
    assert_eq!(server.setting.store.checkpoint_list(job).await.unwrap(), []);
    assert_eq!(publish(json!([entry("manifest.json", b"{}")])).await.0, StatusCode::OK);
}

#[tokio::test]
async fn rotation_removes_the_bytes_too() {
    let server = Server::new().await;
    let job = server.setting.job().await;
    server.claim(0).await;
    for step in 1..=4 {
        assert_eq!(server.publish(job, 1, step, &[("manifest.json", b"{}")]).await.0, StatusCode::OK);
    }
    let kept: Vec<_> = (1..=4).map(|step| server.setting.files.checkpoint_dir(job, step, 1).exists()).collect();
    // The best (the first of equals), and the last two.
    assert_eq!(kept, [true, false, true, true]);
}

#[tokio::test]
async fn without_the_worker_token_nothing_is_answered() {
    let mut server = Server::new().await;
    server.token = "something-else".to_owned();
    assert_eq!(server.claim(0).await.0, StatusCode::UNAUTHORIZED);
    let (status, _) =
        server.send("PUT", &format!("/worker/jobs/{}/checkpoints/1/x?attempt=1", JobId::new()), "x").await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
}
