//! A data directory of revision 51ddf53 (rlood 0.1.0) can be opened: everything in it can be listed and downloaded, its pending
//! messages are delivered, and its jobs end with the same bytes as with 51ddf53. `tests/fixtures/data_51ddf53/record.py` describes
//! how it was recorded.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use sqlx::Connection;

use super::kills::adapter;
use super::processes::{Server, command};
use super::service::{Service, ok, text};

/// Address of the reward service in the recorded jobs.
const REWARDS: SocketAddr = address(8651);
/// Address to which the pending messages are sent.
const RECEIVER: SocketAddr = address(8652);

const fn address(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(127, 51, 53, 83)), port)
}

fn fixtures() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/data_51ddf53")
}

/// Unpacks the data directory and sets the model's path on this machine in its database.
async fn unpack(to: &Path) -> std::path::PathBuf {
    let packed = std::fs::File::open(fixtures().join("data.tar.gz")).unwrap();
    tar::Archive::new(flate2::read::GzDecoder::new(packed)).unpack(to).unwrap();
    let data = to.join("data");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(data.join("rlood.db"));
    let mut database = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny");
    let moved = sqlx::query("UPDATE models SET source = ?").bind(model.to_str().unwrap()).execute(&mut database).await;
    assert_eq!(moved.unwrap().rows_affected(), 1);
    database.close().await.unwrap();
    data
}

fn start(data: &Path, devices: &str) -> Server {
    Server::start_by(command(data, devices).env("RLOOD_ISA", "avx2"))
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

async fn adapter_sha256(server: &Server, job: &str) -> Value {
    let mut files = adapter(server, job).await;
    // 51ddf53 wrote no certificates.
    files.remove("certificate.json");
    json!(files.iter().map(|(name, bytes)| (name.clone(), sha256(bytes))).collect::<BTreeMap<_, _>>())
}

async fn all(server: &Server, path: &str) -> Vec<Value> {
    let (mut rows, mut after) = (Vec::new(), String::new());
    loop {
        let page = server.get(&format!("{path}{after}")).await;
        rows.extend(page["data"].as_array().unwrap().iter().cloned());
        match page["next"].as_str() {
            Some(next) => after = format!("?after={next}"),
            None => return rows,
        }
    }
}

/// Lists and downloads everything of a job.
async fn read_job(server: &Server, job: &str) {
    for part in ["", "/config", "/config?format=yaml", "/summary", "/rewards", "/alerts", "/logs"] {
        server.bytes(&format!("/jobs/{job}{part}")).await;
    }
    for list in ["events", "metrics", "samples"] {
        all(server, &format!("/jobs/{job}/{list}")).await;
    }
    for checkpoint in server.get(&format!("/jobs/{job}/checkpoints")).await["data"].as_array().unwrap() {
        let id = checkpoint["id"].as_str().unwrap();
        for file in checkpoint["files"].as_array().unwrap() {
            let bytes = server.bytes(&format!("/checkpoints/{id}/files/{}", file["name"].as_str().unwrap())).await;
            assert_eq!(
                (json!(bytes.len()), json!(sha256(&bytes))),
                (file["size_bytes"].clone(), file["sha256"].clone())
            );
        }
        assert!(!server.bytes(&format!("/checkpoints/{id}/archive.tar")).await.is_empty());
    }
}

/// Lists and downloads everything in the recorded state.
async fn reads_all(server: &Server, expected: &Value) {
    let id = |name: &str| expected[name]["id"].as_str().unwrap().to_owned();
    let jobs = all(server, "/jobs").await;
    assert_eq!(jobs.len(), expected["jobs"].as_object().unwrap().len());
    for job in &jobs {
        let job_id = job["id"].as_str().unwrap();
        for (key, value) in expected["jobs"][job_id].as_object().unwrap() {
            assert_eq!(&job[key], value, "{job_id} {key}");
        }
        let view = server.get(&format!("/jobs/{job_id}")).await;
        // The default of 51ddf53, and its arithmetic.
        assert_eq!(view["plan"]["optimizer"]["learning_rate"], 1e-5);
        assert!(view["plan"].get("arithmetic").is_none(), "{view}");
        read_job(server, job_id).await;
    }
    assert_eq!(server.get(&format!("/jobs/{}", id("failed"))).await["failure"]["code"], expected["failed"]["code"]);
    assert_eq!(adapter_sha256(server, &id("succeeded")).await, expected["succeeded"]["adapter"]);
    for dataset in all(server, "/datasets").await {
        let of_dataset = format!("/datasets/{}", dataset["id"].as_str().unwrap());
        assert_eq!(json!(sha256(&server.bytes(&format!("{of_dataset}/content")).await)), dataset["sha256"]);
        server.get(&format!("{of_dataset}/rows")).await;
    }
    for list in ["/models", "/workers", "/webhooks", "/audit"] {
        server.get(list).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_directory_of_51ddf53_opens_and_its_jobs_end_with_its_bytes() {
    #[cfg(target_arch = "x86_64")]
    let has_avx2 = std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    let has_avx2 = false;
    if !has_avx2 {
        println!("NOT RUN: it was recorded with RLOOD_ISA=avx2, which this processor has not");
        return;
    }
    let expected: Value = serde_json::from_slice(&std::fs::read(fixtures().join("expected.json")).unwrap()).unwrap();
    let id = |name: &str| expected[name]["id"].as_str().unwrap().to_owned();
    let dir = tempfile::tempdir().unwrap();
    let data = unpack(dir.path()).await;
    let receiver = Service::start_at(RECEIVER, |_, _| text(204, "")).await;
    let judge = Service::start_at(REWARDS, |_, request| {
        // The same reward as in record.py.
        let result = |sample: &Value| {
            let reward = sample["completion"].as_str().unwrap().bytes().map(f64::from).sum::<f64>() % 17.0;
            json!({"sample_id": sample["sample_id"], "reward": reward})
        };
        let results: Vec<Value> = request["samples"].as_array().into_iter().flatten().map(result).collect();
        ok(&json!({"version": "1", "id": request["id"], "results": results}))
    })
    .await;

    // Without a worker the state is unchanged.
    let server = start(&data, "none");
    reads_all(&server, &expected).await;
    // The messages that could not be delivered then are delivered now, signed with the recorded secret.
    let pending = expected["pending_webhooks"].as_u64().unwrap() as usize;
    let begun = std::time::Instant::now();
    while receiver.seen.lock().unwrap().len() < pending {
        assert!(begun.elapsed().as_secs() < 60, "{} of {pending}", receiver.seen.lock().unwrap().len());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let key = rlood::reward::signature::Key::parse(expected["webhook_secret"].as_str().unwrap()).unwrap();
    for (headers, body) in receiver.seen.lock().unwrap().iter() {
        let header = |name: &str| headers[name].to_str().unwrap();
        let signature = key.sign(header("webhook-id"), header("webhook-timestamp").parse().unwrap(), body);
        assert!(header("webhook-signature").split(' ').any(|one| one == signature), "{headers:?}");
    }
    assert!(server.terminate().0.success());

    let server = start(&data, "cpu");
    let queued = server.job_in_state(&id("queued"), "succeeded").await;
    assert_eq!(queued["attempt"], 1);
    assert_eq!(adapter_sha256(&server, &id("queued")).await, expected["queued_adapter"]);
    let paused = id("paused");
    assert!(judge.seen.lock().unwrap().is_empty(), "nothing is asked while the job is paused");
    server.post(&format!("/jobs/{paused}/resume"), &json!({})).await;
    server.job_in_state(&paused, "succeeded").await;
    assert_eq!(adapter_sha256(&server, &paused).await, expected["calm_adapter"]);
    let metrics = all(&server, &format!("/jobs/{paused}/metrics")).await;
    let rewards: Vec<&Value> = metrics.iter().map(|row| &row["reward"]).filter(|reward| !reward.is_null()).collect();
    assert_eq!(json!(rewards), expected["calm_rewards"]);

    // Journaled answers are not requested again; requests without an answer keep their old ids.
    let asked: Vec<Value> =
        judge.seen.lock().unwrap().iter().map(|(_, body)| serde_json::from_slice(body).unwrap()).collect();
    let again: Vec<&Value> =
        asked.iter().filter(|request| request["job"]["step"] == 4 && request["job"]["phase"] == "train").collect();
    assert_eq!(
        json!(again.iter().map(|request| &request["id"]).collect::<Vec<_>>()),
        expected["journal"]["unanswered"]
    );
    assert!(asked.iter().all(|request| request["type"] == "reward.ping" || request["job"]["step"].as_u64() >= Some(3)));

    let events = all(&server, &format!("/jobs/{paused}/events")).await;
    let changed =
        events.iter().find(|event| event["data"]["code"] == "version_changed").expect("an event that says so");
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(changed["data"]["data"]["previous_version"], "0.1.0");
    assert_eq!(changed["data"]["data"]["version"], version);
    assert_eq!(
        changed["data"]["data"]["arithmetic"],
        json!({"split": "row_number", "ties": "std", "sums": "v1", "warm_up": "evaluated"})
    );
    let started = events.iter().rfind(|event| event["type"] == "job.started").unwrap();
    assert_eq!((&started["data"]["version"], &started["data"]["previous_version"]), (&json!(version), &json!("0.1.0")));
    // A job that starts with this version has no event about another version.
    let events = all(&server, &format!("/jobs/{}/events", id("queued"))).await;
    assert!(events.iter().all(|event| event["data"]["code"] != "version_changed"));
}
