//! Models on a hub with real processes: registered, downloaded, waited for, resumed; each refusal with its text.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::hub::{COMMIT, Faults, OLD_MODEL, Running, start};
use crate::kill::adapter;
use crate::processes::{Server, command, model_copy, register, spec};

pub const TOKEN: &str = "hf_right_and_secret";

/// The files of the test model, as a repository.
pub fn repository() -> BTreeMap<String, Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let folder = model_copy(&dir.path().join("model"));
    let mut files: BTreeMap<String, Vec<u8>> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect();
    files.insert("pytorch_model.bin".to_owned(), vec![0; 20_000]);
    files.insert("modeling_evil.py".to_owned(), b"print()".to_vec());
    files
}

/// A fault that delivers a file's header but holds back its tensors.
pub fn held() -> Faults {
    Faults { held_after: Some(60_000), ..Faults::default() }
}

pub fn serve(data: &Path, hub: &Running, variables: &[(&str, &str)]) -> Server {
    let mut command = command(data, "cpu");
    command.env_remove("HF_HUB_OFFLINE").env("HF_ENDPOINT", &hub.url).envs(variables.iter().copied());
    Server::start_by(&mut command)
}

pub async fn post(server: &Server, path: &str, headers: &[(&str, &str)], body: &Value) -> (u16, Value) {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let mut request = http.post(format!("{}{path}", server.url)).json(body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

pub async fn delete(server: &Server, path: &str) -> u16 {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    http.delete(format!("{}{path}", server.url)).send().await.unwrap().status().as_u16()
}

pub async fn model_when(server: &Server, state: &str) -> Value {
    for _ in 0..600 {
        let model = server.get("/models/fake%2Ftiny").await;
        if model["state"] == state {
            return model;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("not {state}: {}", server.get("/models/fake%2Ftiny").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_names_a_repository_waits_for_its_download_and_trains_as_from_a_folder() {
    let hub = start(repository(), held()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, &[]);

    // A validation stores nothing.
    let answer = server.post("/jobs/validate", &spec("fake/tiny", 2)).await;
    assert_eq!((&answer["valid"], &answer["errors"]), (&json!(true), &json!([])), "{answer}");
    assert!(answer["estimate"]["total_bytes"].as_u64() > Some(0));
    assert_eq!(server.get("/models").await["data"], json!([]));

    let job = server.submit(&spec("fake/tiny", 2)).await;
    let waiting = server.get(&format!("/jobs/{job}")).await;
    assert_eq!((&waiting["state"], &waiting["status_reason"]), (&json!("queued"), &json!("model_downloading")));
    let model = model_when(&server, "downloading").await;
    assert_eq!(
        (&model["commit"], &model["revision"], &model["hub"]),
        (&json!(COMMIT), &json!("main"), &json!("fake/tiny"))
    );
    let total = model["bytes_total"].as_u64().unwrap();
    assert!(model["bytes_done"].as_u64().unwrap() < total && model["card"]["architecture"] == "qwen3", "{model}");
    // Clients that watch the job are notified.
    server.job_when(&job, "an event", |_| true).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    let events = server.get(&format!("/jobs/{job}/events?limit=100")).await;
    let told = events["data"].as_array().unwrap().iter().find(|event| event["type"] == "model.downloading").cloned();
    assert_eq!(told.unwrap()["data"]["bytes_total"], total);
    assert_eq!(delete(&server, "/models/fake%2Ftiny").await, 409);

    hub.fake.faults.released.store(true, std::sync::atomic::Ordering::SeqCst);
    let view = server.job_in_state(&job, "succeeded").await;
    let model = model_when(&server, "ready").await;
    assert_eq!((&model["bytes_done"], model.get("problem")), (&json!(total), None));
    let source = Path::new(model["source"].as_str().unwrap());
    assert!(source.join("model.safetensors").is_file() && !source.join("modeling_evil.py").exists());
    assert!(!source.join("pytorch_model.bin").exists());

    // The same model from a folder has the same bytes.
    register(&server, "folder", &model_copy(&dir.path().join("model"))).await;
    let other = server.submit(&spec("folder", 2)).await;
    server.job_in_state(&other, "succeeded").await;
    let weights = async |job: &str| {
        let files = adapter(&server, job).await;
        files.into_iter().find(|(name, _)| name.ends_with(".safetensors")).unwrap().1
    };
    assert!(weights(&job).await == weights(&other).await, "{view}");
    assert_eq!(model["sha256"], server.get("/models/folder").await["sha256"]);

    // The model is already registered: no more requests are sent.
    let asked = hub.seen().len();
    let (status, again) = post(&server, "/models", &[], &json!({"hub": "fake/tiny"})).await;
    assert_eq!((status, &again["commit"], hub.seen().len()), (200, &json!(COMMIT), asked));
    assert_eq!(delete(&server, "/models/fake%2Ftiny").await, 204);
    assert!(!source.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_was_killed_goes_on_where_its_download_ended() {
    let hub = start(repository(), held()).await;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let mut server = serve(&data, &hub, &[]);
    let (status, model) = post(&server, "/models", &[], &json!({"id": "mine/tiny", "hub": "fake/tiny"})).await;
    assert_eq!((status, &model["state"], &model["id"]), (202, &json!("downloading"), &json!("mine/tiny")), "{model}");
    let parts = data.join("hub/parts");
    for _ in 0..200 {
        let here = std::fs::read_dir(&parts).unwrap().filter_map(|entry| entry.unwrap().metadata().ok());
        if here.map(|metadata| metadata.len()).max() >= Some(60_000) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    drop(server);
    let before = hub.seen().len();
    hub.fake.faults.released.store(true, std::sync::atomic::Ordering::SeqCst);
    let server = serve(&data, &hub, &[]);
    for _ in 0..600 {
        if server.get("/models/mine%2Ftiny").await["state"] == "ready" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(server.get("/models/mine%2Ftiny").await["state"], "ready");
    let again = hub.seen().split_off(before);
    assert!(again.iter().any(|seen| seen.cdn && seen.range.as_deref() == Some("bytes=60000-")), "{again:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_request_s_token_opens_is_its_owner_s_alone_and_the_token_is_nowhere() {
    let hub = start(repository(), Faults { gated: Some(TOKEN), ..Faults::default() }).await;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let admin = "an-admin-key-of-the-test";
    let server =
        serve(&data, &hub, &[("RLOOD_API_KEY", admin), ("RLOOD_ALLOW_OUTGOING", "loopback"), ("RLOOD_LOG", "trace")]);
    let bearer = format!("Bearer {admin}");
    let key = async |owner: &str| {
        let body = json!({"name": owner, "owner": owner, "scopes": ["read", "submit"]});
        let (status, made) = post(&server, "/keys", &[("authorization", &bearer)], &body).await;
        assert_eq!(status, 201, "{made}");
        format!("Bearer {}", made["key"].as_str().unwrap())
    };
    let (ann, bob) = (key("ann").await, key("bob").await);
    let wanted = json!({"hub": "fake/tiny"});
    let (status, refused) = post(&server, "/models", &[("authorization", &ann)], &wanted).await;
    assert_eq!((status, &refused["errors"][0]["code"]), (422, &json!("gated")), "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("accept its license at"), "{refused}");
    let with_token = [("authorization", ann.as_str()), ("x-hub-token", TOKEN)];
    let (status, model) = post(&server, "/models", &with_token, &wanted).await;
    assert_eq!((status, &model["owner"]), (202, &json!("ann")), "{model}");
    let read = async |bearer: &str| {
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        let answer =
            http.get(format!("{}/models/fake%2Ftiny", server.url)).header("authorization", bearer).send().await;
        let answer = answer.unwrap();
        (answer.status().as_u16(), answer.json::<Value>().await.unwrap())
    };
    assert_eq!(read(&bob).await.0, 404);
    for _ in 0..600 {
        if read(&ann).await.1["state"] == "ready" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(read(&ann).await.1["state"], "ready");
    let (_, answer) = post(&server, "/jobs/validate", &[("authorization", &bob)], &spec("fake/tiny", 2)).await;
    assert_eq!(answer["valid"], false, "{answer}");
    assert!(!answer.to_string().contains(TOKEN));
    for seen in hub.seen() {
        assert!(!seen.cdn || seen.authorization.is_none(), "{seen:?}");
    }
    drop(server);
    let mut files = vec![data.clone()];
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            let bytes = std::fs::read(&path).unwrap();
            assert!(!bytes.windows(TOKEN.len()).any(|window| window == TOKEN.as_bytes()), "{}", path.display());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_way_to_ask_wrongly_is_told_with_the_field_and_what_to_do() {
    let hub = start(repository(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, &[]);
    for (body, status, at, says) in [
        (json!({}), 422, "/hub", "set hub (org/name) or source"),
        (json!({"hub": "fake/tiny", "source": "/x"}), 422, "/hub", "not both"),
        (json!({"source": "/x"}), 422, "/id", "needs an id"),
        (json!({"id": "a", "source": "/x", "revision": "main"}), 422, "/revision", "no revision"),
        (json!({"hub": "fake//tiny"}), 422, "/hub", "org/name"),
        (json!({"hub": "fake/tiny", "revision": "nope"}), 422, "/hub", "no revision"),
        (json!({"hub": "fake/other"}), 422, "/hub", "or it is private"),
        (json!({"hub": "fake/rows"}), 422, "/hub", "fake/rows is a dataset, not a model"),
        (json!({"id": "../x", "hub": "fake/tiny"}), 422, "/id", "not a valid model id"),
    ] {
        let (found, answer) = post(&server, "/models", &[], &body).await;
        let error = &answer["errors"][0];
        assert_eq!((found, &error["pointer"]), (status, &json!(at)), "{body}: {answer}");
        assert!(answer["detail"].as_str().unwrap().contains(says), "{body}: {answer}");
    }
    let answer = server.post("/jobs/validate", &spec("fake/other", 2)).await;
    assert_eq!(answer["errors"][0]["pointer"], "/model", "{answer}");
    assert!(answer["errors"][0]["detail"].as_str().unwrap().contains("fake/other"), "{answer}");

    // A renamed repository keeps the id that was requested; the new name is told, also after the download.
    let checked = server.post("/jobs/validate", &spec(OLD_MODEL, 2)).await;
    assert_eq!((&checked["valid"], &checked["errors"]), (&json!(true), &json!([])), "{checked}");
    let told = checked["warnings"].as_array().unwrap().iter().find(|warning| warning["code"] == "repository_renamed");
    assert!(told.is_some_and(|told| told["detail"].as_str().unwrap().contains("'fake/tiny'")), "{checked}");
    let (status, model) = post(&server, "/models", &[], &json!({"hub": OLD_MODEL})).await;
    assert_eq!((status, &model["hub"], &model["renamed_to"]), (202, &json!(OLD_MODEL), &json!("fake/tiny")), "{model}");
    let mut ready = model;
    for _ in 0..600 {
        ready = server.get("/models/former%2Ftiny").await;
        if ready["state"] == "ready" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!((&ready["state"], &ready["renamed_to"]), (&json!("ready"), &json!("fake/tiny")), "{ready}");

    // A revision is a part of the id.
    let (status, model) = post(&server, "/models", &[], &json!({"hub": format!("fake/tiny@{COMMIT}")})).await;
    assert_eq!((status, &model["id"]), (202, &json!(format!("fake/tiny@{COMMIT}"))), "{model}");
    let (status, answer) = post(&server, "/models", &[], &json!({"id": "rlood/x", "hub": "fake/tiny"})).await;
    assert_eq!(status, 202, "{answer}");
    let (status, answer) =
        post(&server, "/models", &[], &json!({"id": "rlood/x", "hub": "fake/tiny", "revision": COMMIT})).await;
    assert_eq!((status, &answer["errors"][0]["pointer"]), (409, &json!("/id")), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_download_that_cannot_succeed_fails_the_jobs_that_wait_and_says_why() {
    let mut files = repository();
    files.insert("unused".to_owned(), vec![0]);
    // The metadata contains only the header; the later bytes differ from those that the hub announced.
    let hub = start(files, Faults { damaged_at_end: true, ..held() }).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, &[]);
    let job = server.submit(&spec("fake/tiny", 2)).await;
    hub.fake.faults.released.store(true, std::sync::atomic::Ordering::SeqCst);
    let failed = server.job_in_state(&job, "failed").await;
    assert_eq!(failed["failure"]["code"], "model_download_failed", "{failed}");
    assert!(failed["failure"]["message"].as_str().unwrap().contains("is corrupted after download"), "{failed}");
    let model = model_when(&server, "failed").await;
    assert!(model["problem"].as_str().unwrap().contains("is corrupted after download"), "{model}");
    let answer = server.post("/jobs/validate", &spec("fake/tiny", 2)).await;
    assert_eq!(answer["errors"][0]["code"], "model_download_failed", "{answer}");
}

/// Writes the test model to the local cache in `hf` of a folder, as the snapshot of a repository.
fn cached(dir: &Path, repo: &str) -> PathBuf {
    let model = model_copy(&dir.join("model"));
    let cached = dir.join(format!("hf/hub/models--{}", repo.replace('/', "--")));
    std::fs::create_dir_all(cached.join("refs")).unwrap();
    std::fs::create_dir_all(cached.join("snapshots")).unwrap();
    std::fs::write(cached.join("refs/main"), COMMIT).unwrap();
    std::os::unix::fs::symlink(&model, cached.join("snapshots").join(COMMIT)).unwrap();
    cached
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renamed_model_of_the_local_cache_has_its_new_name_too() {
    let hub = start(repository(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    cached(dir.path(), OLD_MODEL);
    let home = dir.path().join("hf");
    let server = serve(&dir.path().join("data"), &hub, &[("HF_HOME", home.to_str().unwrap())]);
    let (status, model) = post(&server, "/models", &[], &json!({"hub": OLD_MODEL})).await;
    assert_eq!((status, &model["state"], &model["renamed_to"]), (201, &json!("ready"), &json!("fake/tiny")), "{model}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offline_a_snapshot_of_the_local_cache_is_read_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let cached = cached(dir.path(), "fake/tiny");
    let mut command = command(&dir.path().join("data"), "none");
    command.env("HF_HOME", dir.path().join("hf"));
    let server = Server::start_by(&mut command);
    let (status, model) = post(&server, "/models", &[], &json!({"hub": "fake/tiny"})).await;
    assert_eq!((status, &model["state"], &model["commit"]), (201, &json!("ready"), &json!(COMMIT)), "{model}");
    assert!(model["source"].as_str().unwrap().contains("models--fake--tiny/snapshots"), "{model}");
    let (status, refused) = post(&server, "/models", &[], &json!({"hub": "fake/other"})).await;
    assert_eq!((status, &refused["errors"][0]["code"]), (422, &json!("hub_offline")), "{refused}");
    assert_eq!(delete(&server, "/models/fake%2Ftiny").await, 204);
    assert!(cached.join("snapshots").join(COMMIT).join("config.json").exists());
}

/// Forwards every request to the host of its URL; `hub.example` is the fake hub.
async fn proxy(hub: String) -> (String, std::sync::Arc<std::sync::Mutex<Vec<String>>>) {
    let asked = std::sync::Arc::<std::sync::Mutex<Vec<String>>>::default();
    let (seen, http) = (
        asked.clone(),
        reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).build().unwrap(),
    );
    let pass_on = move |request: axum::extract::Request| {
        let (seen, http, hub) = (seen.clone(), http.clone(), hub.clone());
        async move {
            let url = request.uri().to_string();
            seen.lock().unwrap().push(url.clone());
            let url = url.replace("http://hub.example", &hub);
            let answer = http.get(url).headers({
                let mut headers = request.headers().clone();
                headers.remove("host");
                headers
            });
            let answer = answer.send().await.unwrap();
            let (status, headers) = (answer.status(), answer.headers().clone());
            let mut reply = axum::response::Response::new(axum::body::Body::from(answer.bytes().await.unwrap()));
            (*reply.status_mut(), *reply.headers_mut()) = (status, headers);
            reply
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(pass_on)).await });
    (format!("http://{address}"), asked)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_a_proxy_the_hub_is_asked_through_it_alone() {
    let hub = start(repository(), Faults::default()).await;
    let (proxy, asked) = proxy(hub.url.clone()).await;
    let dir = tempfile::tempdir().unwrap();
    let mut command = command(&dir.path().join("data"), "none");
    command.env_remove("HF_HUB_OFFLINE").env("HF_ENDPOINT", "http://hub.example").env("RLOOD_HUB_PROXY", &proxy);
    let server = Server::start_by(&mut command);
    let (status, answer) = post(&server, "/models", &[], &json!({"hub": "fake/tiny"})).await;
    assert_eq!(status, 202, "{answer}");
    model_when(&server, "ready").await;
    let asked = asked.lock().unwrap();
    assert!(asked.iter().any(|url| url.starts_with("http://hub.example/api/models/fake/tiny/")), "{asked:?}");
    assert!(asked.iter().any(|url| !url.starts_with("http://hub.example/")), "the CDN too: {asked:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_in_git_itself_are_verified_by_their_git_hash() {
    let (in_git, damaged) = (true, std::sync::atomic::AtomicU32::new(0));
    let hub = start(repository(), Faults { in_git, damaged, ..Faults::default() }).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, &[]);
    // A damaged file is downloaded once more, and then refused with both hashes.
    hub.fake.faults.damaged.store(2, std::sync::atomic::Ordering::SeqCst);
    let (status, refused) = post(&server, "/models", &[], &json!({"hub": "fake/tiny"})).await;
    let detail = refused["detail"].as_str().unwrap();
    let expected = crate::hub::git_sha1(&repository()["model.safetensors"]);
    assert!(status == 422 && detail.contains("is corrupted after download") && detail.contains(&expected), "{refused}");
    hub.fake.faults.damaged.store(1, std::sync::atomic::Ordering::SeqCst);
    let (status, model) = post(&server, "/models", &[], &json!({"hub": "fake/tiny"})).await;
    assert_eq!(status, 202, "{model}");
    let model = model_when(&server, "ready").await;
    register(&server, "folder", &model_copy(&dir.path().join("model"))).await;
    assert_eq!(model["sha256"], server.get("/models/folder").await["sha256"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_says_in_its_events_that_a_repository_was_renamed() {
    let hub = start(repository(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, &[]);
    let job = server.submit(&spec(OLD_MODEL, 1)).await;
    let events = server.get(&format!("/jobs/{job}/events?limit=100")).await;
    let told = events["data"].as_array().unwrap().iter().find(|event| event["data"]["code"] == "repository_renamed");
    let message = told.unwrap_or_else(|| panic!("{events}"))["data"]["message"].as_str().unwrap();
    assert!(message.contains("/model") && message.contains("'fake/tiny'"), "{events}");
}
