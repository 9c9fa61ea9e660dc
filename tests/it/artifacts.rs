//! Models, and the results of a job: checkpoints, files, archives.

use std::io::Read;

use axum::body::Body;
use axum::http::{Request, header};
use base64::Engine;
use rlood::event::Metrics;
use rlood::id::{JobId, WorkerId};
use rlood::protocol::{FileEntry, Outcome, PROTOCOL, Register};
use rlood::store::{PublishCheckpoint, clock_ms};
use serde_json::{Value, json};

use crate::http::{Answer, Server, server, server_with};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/parity/qwen3");

async fn register(server: &Server, body: Value) -> Answer {
    server.post("/models", "application/json", body.to_string()).await
}

#[tokio::test]
async fn a_model_is_read_when_it_is_registered() {
    let server = server().await;
    let first = register(&server, json!({"id": "org/tiny", "source": MODEL})).await;
    assert_eq!(first.status, 201, "{}", first.text());
    assert_eq!(first.header("location"), "/models/org%2Ftiny");
    let model = first.json();
    assert_eq!((&model["id"], &model["state"], &model["source"]), (&json!("org/tiny"), &json!("ready"), &json!(MODEL)));
    assert_eq!((&model["card"]["architecture"], &model["card"]["precision"]), (&json!("qwen3"), &json!("f32")));
    assert!(model["card"]["num_parameters"].as_u64().unwrap() > 1000, "{model}");
    let again = register(&server, json!({"id": "org/tiny", "source": MODEL})).await;
    assert_eq!((again.status.as_u16(), again.json()), (200, model.clone()));
    assert_eq!(server.get("/models/org%2Ftiny").await.json(), model);
    assert_eq!(server.get("/models").await.json(), json!({"data": [model], "next": null}));

    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/parity/llama");
    register(&server, json!({"id": "org/tiny", "source": other})).await.problem(409, "conflict");
    assert_eq!(server.delete("/models/org%2Ftiny").await.status, 204);
    server.get("/models/org%2Ftiny").await.problem(404, "not_found");
}

#[tokio::test]
async fn a_model_that_cannot_be_used_says_why() {
    let server = server().await;
    let dir = server.dir.path().join("model");
    std::fs::create_dir(&dir).unwrap();
    for file in
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    {
        std::fs::copy(format!("{MODEL}/{file}"), dir.join(file)).unwrap();
    }
    let refused = async |source: &str, code: &str, words: &str| {
        let problem = register(&server, json!({"id": "m", "source": source})).await.problem(422, "invalid_model");
        assert_eq!(problem["errors"][0]["pointer"], "/source");
        assert_eq!(problem["errors"][0]["code"], code, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains(words), "{words} in {problem}");
    };
    let source = dir.to_str().unwrap();
    refused("/no/such/place", "not_found", "/no/such/place").await;
    refused("relative/path", "not_absolute", "absolute").await;
    refused("hf://org/name", "unsupported_source", "absolute path").await;
    refused(&format!("{source}/config.json"), "not_a_directory", "directory").await;
    std::fs::rename(dir.join("tokenizer.json"), dir.join("hidden")).unwrap();
    refused(source, "unusable_model", "tokenizer.json").await;
    std::fs::rename(dir.join("hidden"), dir.join("tokenizer.json")).unwrap();
    std::fs::write(dir.join("model.safetensors"), [0xff; 64]).unwrap();
    refused(source, "unusable_model", "model.safetensors").await;
    std::fs::write(dir.join("config.json"), "{\"model_type\": \"mamba\"}").unwrap();
    refused(source, "unusable_model", "mamba").await;
    for id in ["", "a//b", "../x", "a b", "/a", "a/", ".hidden"] {
        let answer = register(&server, json!({"id": id, "source": MODEL})).await;
        assert_eq!(answer.problem(422, "invalid_body")["errors"][0]["pointer"], "/id", "{id}");
    }
}

#[tokio::test]
async fn with_a_root_models_must_lie_under_it() {
    let fixtures = std::path::Path::new(MODEL).parent().unwrap().canonicalize().unwrap();
    let server = server_with(|config| config.model_roots = Some(vec![fixtures]), |_| {}).await;
    assert_eq!(register(&server, json!({"id": "in", "source": MODEL})).await.status, 201);
    let link = server.dir.path().join("link");
    std::os::unix::fs::symlink("/etc", &link).unwrap();
    for outside in ["/etc", "/no/such/place", &format!("{MODEL}/../../../.."), link.to_str().unwrap()] {
        let problem = register(&server, json!({"id": "out", "source": outside})).await.problem(422, "invalid_model");
        assert_eq!(problem["errors"][0]["code"], "outside_model_root", "{outside}: {problem}");
    }
}

#[tokio::test]
async fn with_a_root_no_file_of_a_model_may_lead_out_of_it() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path().canonicalize().unwrap();
    let configured = root.clone();
    let server = server_with(|config| config.model_roots = Some(vec![configured]), |_| {}).await;
    // The layout of the Hugging Face cache: every file is a link to a blob.
    let (blobs, inside, outside) = (root.join("blobs"), root.join("snapshots"), root.join("outside"));
    crate::server::copy(std::path::Path::new(MODEL), &blobs);
    for dir in [&inside, &outside] {
        std::fs::create_dir(dir).unwrap();
        for entry in std::fs::read_dir(&blobs).unwrap().map(Result::unwrap) {
            let target = std::path::Path::new("../blobs").join(entry.file_name());
            std::os::unix::fs::symlink(target, dir.join(entry.file_name())).unwrap();
        }
    }
    let made = register(&server, json!({"id": "in", "source": inside})).await;
    assert_eq!(made.status, 201, "{}", made.text());
    let tokenizer = outside.join("tokenizer.json");
    std::fs::remove_file(&tokenizer).unwrap();
    std::os::unix::fs::symlink(std::path::Path::new(MODEL).join("tokenizer.json"), &tokenizer).unwrap();
    let problem = register(&server, json!({"id": "out", "source": outside})).await.problem(422, "invalid_model");
    assert_eq!(problem["errors"][0]["code"], "outside_model_root", "{problem}");
    assert!(problem["detail"].as_str().unwrap().starts_with("tokenizer.json is a link to a file outside"), "{problem}");
}

/// A job with one published checkpoint of these files.
async fn job_with_checkpoint(server: &Server, files: &[(&str, &[u8])]) -> (JobId, String) {
    register(server, json!({"id": "tiny", "source": MODEL})).await;
    let records: Vec<Value> = (0..8).map(|n| json!({"prompt": format!("p{n}")})).collect();
    let spec = json!({"model": "tiny", "dataset": {"records": records}, "rewards": [{"type": "length"}],
        "sampling": {"max_completion_length": 4}, "training": {"prompts_per_step": 2, "max_steps": 2}});
    let answer = server.post("/jobs", "application/json", spec.to_string()).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    let job: JobId = answer.json()["id"].as_str().unwrap().parse().unwrap();
    let worker = WorkerId::new();
    let register = Register {
        worker,
        device: "cpu".into(),
        pid: 1,
        threads: 1,
        version: "0".into(),
        child: false,
        protocol: PROTOCOL,
        kernels: None,
        runtimes: Vec::new(),
    };
    let store = &server.state.store;
    store.worker_register(&register, clock_ms()).await.unwrap();
    let claim = store.job_claim(worker, clock_ms(), 30_000).await.unwrap().unwrap();
    let mut entries = Vec::new();
    for (name, bytes) in files {
        let data = &server.state.files;
        let mut staged = data.stage(1 << 20).await.unwrap();
        staged.write(bytes).await.unwrap();
        let done = staged.finish().await.unwrap();
        entries.push(FileEntry { name: (*name).to_owned(), size_bytes: done.size_bytes, sha256: done.sha256 });
        data.checkpoint_place(done, job, 1, claim.attempt, name).await.unwrap();
    }
    server.state.files.checkpoint_commit(job, 1, claim.attempt, &entries).unwrap();
    let metrics = Metrics::from([("reward".to_owned(), Some(0.5))]);
    let publish = PublishCheckpoint {
        job,
        attempt: claim.attempt,
        step: 1,
        files: &entries,
        metrics: &metrics,
        temporary: false,
    };
    let id = store.checkpoint_publish(publish, clock_ms()).await.unwrap().id;
    (job, id.to_string())
}

const WEIGHTS: &[u8] = b"0123456789abcdefghij";
const FILES: [(&str, &[u8]); 4] = [
    ("manifest.json", b"{\"files\": []}"),
    ("optimizer.safetensors", b"moments"),
    ("adapter_model.safetensors", WEIGHTS),
    ("adapter_config.json", b"{\"r\": 8}"),
];

fn ask(method: &str, path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Body::empty()).unwrap()
}

#[tokio::test]
async fn a_file_is_served_whole_in_part_or_not_at_all() {
    let server = server().await;
    let (_, id) = job_with_checkpoint(&server, &FILES).await;
    let path = format!("/checkpoints/{id}/files/adapter_model.safetensors");
    let digest = <sha2::Sha256 as sha2::Digest>::digest(WEIGHTS);
    let sha256 = hex::encode(digest);
    let etag = format!("\"{sha256}\"");

    let whole = server.get(&path).await;
    assert_eq!((whole.status.as_u16(), whole.body.as_slice()), (200, WEIGHTS));
    assert_eq!((whole.header("etag"), whole.header("accept-ranges")), (etag.as_str(), "bytes"));
    let base64 = base64::engine::general_purpose::STANDARD.encode(digest);
    assert_eq!(whole.header("repr-digest"), format!("sha-256=:{base64}:"));
    let head = server.send(ask("HEAD", &path, &[("range", "bytes=0-0")])).await;
    assert_eq!((head.status.as_u16(), head.body.len(), head.header("content-length")), (200, 0, "20"));

    for (range, status, body, content_range) in [
        ("bytes=0-3", 206, &b"0123"[..], "bytes 0-3/20"),
        ("bytes=18-99", 206, b"ij", "bytes 18-19/20"),
        ("bytes=-2", 206, b"ij", "bytes 18-19/20"),
        ("bytes=5-", 206, &WEIGHTS[5..], "bytes 5-19/20"),
        ("bytes=0-1,4-5", 200, WEIGHTS, ""),
        ("lines=0-1", 200, WEIGHTS, ""),
    ] {
        let answer = server.send(ask("GET", &path, &[("range", range)])).await;
        assert_eq!((answer.status.as_u16(), answer.body.as_slice()), (status, body), "{range}");
        assert_eq!(answer.header("content-length"), body.len().to_string());
        if status == 206 {
            assert_eq!(answer.header("content-range"), content_range);
            assert_eq!(answer.header("etag"), etag);
        }
    }
    let outside = server.send(ask("GET", &path, &[("range", "bytes=20-")])).await;
    outside.problem(416, "range_not_satisfiable");
    assert_eq!(outside.header("content-range"), "bytes */20");

    let if_range = |known: &'static str| ask("GET", &path, &[("range", "bytes=0-3"), ("if-range", known)]);
    assert_eq!(server.send(if_range("\"old\"")).await.status, 200);
    assert_eq!(server.send(if_range("Wed, 21 Oct 2015 07:28:00 GMT")).await.status, 200);
    assert_eq!(server.send(ask("GET", &path, &[("range", "bytes=0-3"), ("if-range", &etag)])).await.status, 206);
    let known = server.send(ask("GET", &path, &[("if-none-match", &format!("\"x\", W/{etag}"))])).await;
    assert_eq!((known.status.as_u16(), known.body.len()), (304, 0));
    assert_eq!(known.header("etag"), etag);
    server.send(ask("GET", &path, &[("if-match", "\"x\"")])).await.problem(412, "precondition_failed");

    for missing in ["../manifest.json", "..%2Fmanifest.json", "%2Fetc%2Fpasswd", "nothing.bin", ""] {
        server.get(&format!("/checkpoints/{id}/files/{missing}")).await.problem(404, "not_found");
    }
}

#[tokio::test]
async fn checkpoints_are_listed_and_packed() {
    let server = server().await;
    let (job, id) = job_with_checkpoint(&server, &FILES).await;
    let list = server.get(&format!("/jobs/{job}/checkpoints")).await.json();
    assert_eq!(list["data"].as_array().unwrap().len(), 1);
    let one = server.get(&format!("/checkpoints/{id}")).await.json();
    assert_eq!(list["data"][0], one);
    assert_eq!((&one["id"], &one["step"], &one["metrics"]["reward"]), (&json!(id), &json!(1), &json!(0.5)));
    assert_eq!(one["files"].as_array().unwrap().len(), FILES.len());
    let manifest = server.get(&format!("/checkpoints/{id}/manifest.json")).await;
    assert_eq!((manifest.body.as_slice(), manifest.header("content-type")), (FILES[0].1, "application/json"));

    let archive = server.get(&format!("/checkpoints/{id}/archive.tar")).await;
    assert_eq!(archive.header("content-length"), archive.body.len().to_string());
    assert_eq!(unpacked(&archive.body), FILES.map(|(name, bytes)| (name.to_owned(), bytes.to_vec())));
    assert_eq!(server.get(&format!("/checkpoints/{id}/archive.tar")).await.body, archive.body);

    let adapter = server.get(&format!("/jobs/{job}/adapter")).await;
    let expected = [FILES[3], FILES[2]].map(|(name, bytes)| (name.to_owned(), bytes.to_vec()));
    assert_eq!(unpacked(&adapter.body), expected);
    assert_eq!(adapter.header(header::CONTENT_TYPE.as_str()), "application/x-tar");
    let etag = adapter.header("etag").to_owned();
    let known = server.send(ask("GET", &format!("/jobs/{job}/adapter?which=last"), &[("if-none-match", &etag)])).await;
    assert_eq!(known.status, 304);
    server.get(&format!("/jobs/{job}/adapter?which=worst")).await.problem(400, "invalid_query");
}

#[tokio::test]
async fn an_archive_is_served_in_parts_that_make_the_whole() {
    let server = server().await;
    let (job, id) = job_with_checkpoint(&server, &FILES).await;
    for path in [format!("/checkpoints/{id}/archive.tar"), format!("/jobs/{job}/adapter")] {
        let whole = server.get(&path).await;
        let (etag, size) = (whole.header("etag").to_owned(), whole.body.len());
        let digest = <sha2::Sha256 as sha2::Digest>::digest(&whole.body);
        let digest = format!("sha-256=:{}:", base64::engine::general_purpose::STANDARD.encode(digest));
        assert_eq!((whole.header("accept-ranges"), whole.header("repr-digest")), ("bytes", digest.as_str()));
        // Cuts inside a header, a file, and padding.
        let mut joined = Vec::new();
        for (first, last) in [(0, 99), (100, 511), (512, 514), (515, 1500), (1501, size - 2), (size - 1, size + 9)] {
            let range = format!("bytes={first}-{last}");
            let part = server.send(ask("GET", &path, &[("range", &range), ("if-range", &etag)])).await;
            assert_eq!((part.status.as_u16(), part.header("etag")), (206, etag.as_str()), "{range}");
            assert_eq!(part.header("repr-digest"), digest, "of the whole");
            let content_range = format!("bytes {first}-{}/{size}", last.min(size - 1));
            assert_eq!(part.header("content-range"), content_range);
            assert_eq!(part.header("content-length"), part.body.len().to_string());
            joined.extend(part.body);
        }
        assert!(joined == whole.body, "{path}");
        server
            .send(ask("GET", &path, &[("range", &format!("bytes={size}-"))]))
            .await
            .problem(416, "range_not_satisfiable");
        let old = server.send(ask("GET", &path, &[("range", "bytes=0-3"), ("if-range", "\"old\"")])).await;
        assert_eq!((old.status.as_u16(), old.body.len()), (200, size));
        let head = server.send(ask("HEAD", &path, &[])).await;
        assert_eq!((head.status.as_u16(), head.header("content-length")), (200, size.to_string().as_str()));
        assert_eq!(server.send(ask("GET", &path, &[("if-none-match", &etag)])).await.status, 304);
    }
}

#[tokio::test]
async fn a_job_that_is_over_and_has_no_checkpoint_says_that_none_will_come() {
    const HOUR: i64 = 3_600_000;
    let server = server_with(|config| config.retention.checkpoints_ms = Some(36 * HOUR), |_| {}).await;
    let (job, _) = job_with_checkpoint(&server, &FILES).await;
    let end = clock_ms() - 37 * HOUR;
    server.state.store.job_finish(job, 1, Outcome::Succeeded, end).await.unwrap();
    assert_eq!(server.get(&format!("/jobs/{job}/adapter")).await.status, 200);
    assert_eq!(server.state.store.leftover_checkpoints_remove(end + 1).await.unwrap().len(), 1);
    for which in ["", "?which=last", "?which=best"] {
        let problem = server.get(&format!("/jobs/{job}/adapter{which}")).await.problem(404, "no_such_checkpoint");
        let detail = problem["detail"].as_str().unwrap();
        assert!(problem["retryable"] == false && detail.contains("36h after a job's end"), "{problem}");
    }
    // A job that never had a checkpoint.
    let spec = server.get(&format!("/jobs/{job}/config")).await.text();
    let second = server.post("/jobs", "application/json", spec).await.json()["id"].as_str().unwrap().to_owned();
    let path = format!("/jobs/{second}/adapter");
    let waiting = server.get(&path).await.problem(404, "no_checkpoint");
    assert!(
        waiting["retryable"] == true && waiting["detail"].as_str().unwrap().contains("checkpoint.saved"),
        "{waiting}"
    );
    server.post(&format!("/jobs/{second}/cancel"), "application/json", "").await;
    let over = server.get(&path).await.problem(404, "no_such_checkpoint");
    assert!(over["detail"].as_str().unwrap().contains("cancelled"), "{over}");
}

fn unpacked(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut archive = tar::Archive::new(bytes);
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        assert_eq!(entry.header().mtime().unwrap(), 0);
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        (entry.path().unwrap().to_str().unwrap().to_owned(), bytes)
    });
    entries.collect()
}

#[tokio::test]
async fn a_job_without_a_checkpoint_says_so() {
    let server = server().await;
    register(&server, json!({"id": "tiny", "source": MODEL})).await;
    let records: Vec<Value> = (0..8).map(|n| json!({"prompt": format!("p{n}")})).collect();
    let spec = json!({"model": "tiny", "dataset": {"records": records}, "rewards": [{"type": "length"}],
        "sampling": {"max_completion_length": 4}, "training": {"prompts_per_step": 2, "max_steps": 2}});
    let job =
        server.post("/jobs", "application/json", spec.to_string()).await.json()["id"].as_str().unwrap().to_owned();
    server.get(&format!("/jobs/{job}/adapter")).await.problem(404, "no_checkpoint");
    server.get(&format!("/jobs/{job}/adapter?which=best")).await.problem(404, "no_checkpoint");
    assert_eq!(server.get(&format!("/jobs/{job}/checkpoints")).await.json(), json!({"data": [], "next": null}));
    // A queued job prevents the deletion of its dataset and its model.
    let dataset = server.get("/datasets").await.json()["data"][0]["id"].as_str().unwrap().to_owned();
    let problem = server.delete(&format!("/datasets/{dataset}")).await.problem(409, "in_use");
    assert!(problem["detail"].as_str().unwrap().contains(&job), "{problem}");
    server.delete("/models/tiny").await.problem(409, "in_use");
}

#[tokio::test]
async fn a_checkpoint_is_pinned_and_given_back_over_http() {
    let server = server().await;
    let (job, id) = job_with_checkpoint(&server, &[("manifest.json", b"{}")]).await;
    let pin = format!("/checkpoints/{id}/pin");
    let pinned = server.post(&pin, "application/json", String::new()).await;
    assert_eq!((pinned.status.as_u16(), &pinned.json()["pinned"]), (200, &json!(true)));
    assert_eq!(server.get(&format!("/jobs/{job}/checkpoints")).await.json()["data"][0]["pinned"], true);
    let given_back = server.delete(&pin).await;
    assert_eq!((given_back.status.as_u16(), &given_back.json()["pinned"]), (200, &json!(false)));
    let unknown = rlood::id::CheckpointId::new();
    server.delete(&format!("/checkpoints/{unknown}/pin")).await.problem(404, "not_found");
    // A job without alerts has an empty list.
    assert_eq!(server.get(&format!("/jobs/{job}/alerts")).await.json(), json!({"data": [], "next": null}));
    assert_eq!(server.get(&format!("/jobs/{job}")).await.json()["alerts"], json!([]));
}
