//! Datasets of a hub that take longer than a request: downloaded afterwards, waited for by jobs, resumed, cancelled.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use crate::hub::{COMMIT, Running, start};
use crate::hub_models::{delete, held, post, serve};
use crate::processes::{Server, model_copy, register, spec};

pub const NUM_ROWS: usize = 200;

/// A dataset of one file that is larger than what the hub sends before it is released.
pub fn rows() -> BTreeMap<String, Vec<u8>> {
    let row = |index: usize| {
        format!("{{\"question\":\"{index}?\",\"answer\":\"{index}\",\"pad\":\"{}\"}}\n", "x".repeat(9000))
    };
    BTreeMap::from([("train.jsonl".to_owned(), (0..NUM_ROWS).map(row).collect::<String>().into_bytes())])
}

fn wanted() -> Value {
    json!({"hub": "fake/rows", "map": {"prompt": "question", "drop": ["pad"]}})
}

pub fn release(hub: &Running) {
    hub.fake.faults.released.store(true, Ordering::SeqCst);
}

async fn when(server: &Server, path: &str, state: &str) -> Value {
    for _ in 0..600 {
        let found = server.get(path).await;
        if found["state"] == state {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("not {state}: {}", server.get(path).await);
}

async fn status(server: &Server, path: &str) -> u16 {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    http.get(format!("{}{path}", server.url)).send().await.unwrap().status().as_u16()
}

async fn with_model(data: &Path, hub: &Running, folder: &Path) -> Server {
    let server = serve(data, hub, &[]);
    register(&server, "tiny", &model_copy(folder)).await;
    server
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_waits_for_its_dataset_and_gets_its_plan_from_the_rows() {
    let hub = start(rows(), held()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = with_model(&dir.path().join("data"), &hub, &dir.path().join("model")).await;

    // A validation starts no download.
    let mut job = spec("tiny", 1);
    job["dataset"] = wanted();
    job["rewards"] = json!([{"type": "number_match", "column": "answer"}]);
    job["training"] = json!({"prompts_per_step": 100});
    let checked = server.post("/jobs/validate", &job).await;
    assert_eq!((&checked["valid"], &checked["errors"]), (&json!(true), &json!([])), "{checked}");
    let warned =
        checked["warnings"].as_array().unwrap().iter().any(|warning| warning["code"] == "dataset_not_downloaded");
    assert!(warned && checked["plan"]["dataset"]["id"].is_null(), "{checked}");
    assert_eq!(server.get("/datasets").await["data"], json!([]));

    let mut named = wanted();
    named["name"] = json!("mine");
    let (answered, dataset) = post(&server, "/datasets", &[], &named).await;
    assert_eq!(
        (answered, &dataset["state"], &dataset["name"]),
        (202, &json!("downloading"), &json!("mine")),
        "{dataset}"
    );
    let path = format!("/datasets/{}", dataset["id"].as_str().unwrap());
    let total = rows()["train.jsonl"].len();
    assert_eq!((&dataset["bytes_total"], &dataset["origin"]["commit"]), (&json!(total), &json!(COMMIT)));
    // The same dataset again is the same download.
    let (answered, again) = post(&server, "/datasets", &[], &wanted()).await;
    assert_eq!((answered, &again["id"]), (202, &dataset["id"]), "{again}");

    let by_hub = server.submit(&job).await;
    job["dataset"] = json!({"id": dataset["id"]});
    let by_id = server.submit(&job).await;
    for job in [&by_hub, &by_id] {
        let view = server.get(&format!("/jobs/{job}")).await;
        assert_eq!(
            (&view["state"], &view["status_reason"]),
            (&json!("queued"), &json!("dataset_downloading")),
            "{view}"
        );
        assert_eq!(view["plan"]["dataset"]["num_rows"], 0);
    }
    tokio::time::sleep(Duration::from_secs(6)).await;
    let listed = server.get("/datasets").await["data"][0].clone();
    let done = listed["bytes_done"].as_u64().unwrap();
    assert!(listed["state"] == "downloading" && done > 0 && done < total as u64, "{listed}");
    assert_eq!(listed["eta_s"].is_number(), listed["bytes_per_second"].as_f64() > Some(0.0), "{listed}");
    assert_eq!(
        (status(&server, &format!("{path}/rows")).await, status(&server, &format!("{path}/content")).await),
        (409, 409)
    );
    assert_eq!(delete(&server, &path).await, 409);

    release(&hub);
    for job in [&by_hub, &by_id] {
        let view = server.job_in_state(job, "succeeded").await;
        assert_eq!(view["plan"]["dataset"]["num_rows"], NUM_ROWS, "{view}");
        assert_eq!((&view["step"], &view["plan"]["dataset"]["id"]), (&json!(2), &dataset["id"]), "{view}");
        let events = server.get(&format!("/jobs/{job}/events?limit=100")).await;
        let told = |kind: &str| events["data"].as_array().unwrap().iter().find(|event| event["type"] == kind).cloned();
        assert_eq!(told("dataset.downloading").unwrap()["data"]["bytes_total"], total);
        assert_eq!(told("dataset.ready").unwrap()["data"]["dataset"], dataset["id"]);
        assert_eq!(told("job.planned").unwrap()["data"]["total_steps"], 2);
    }
    let ready = when(&server, &path, "ready").await;
    assert_eq!(
        (&ready["num_rows"], &ready["name"], &ready["columns"]),
        (&json!(NUM_ROWS), &json!("mine"), &json!(["prompt", "question", "answer"]))
    );
    let asked = hub.seen().iter().filter(|seen| seen.cdn).count();
    let (answered, again) = post(&server, "/datasets", &[], &wanted()).await;
    assert_eq!((answered, &again["id"]), (200, &dataset["id"]), "{again}");
    assert_eq!(hub.seen().iter().filter(|seen| seen.cdn).count(), asked);
    assert_eq!(delete(&server, &path).await, 204);
    assert_eq!(status(&server, &path).await, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_resumes_a_dataset_and_the_jobs_that_wait() {
    let hub = start(rows(), held()).await;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let mut server = with_model(&data, &hub, &dir.path().join("model")).await;
    // One of several sources is downloaded; the rows of the others are stored with the job.
    let mut wanted_job = spec("tiny", 1);
    wanted_job["dataset"] = json!([
        {"hub": "fake/rows", "map": {"prompt": "question"}, "limit": 40, "weight": 2},
        {"records": [{"q": "One?", "answer": "1"}, {"q": "Two?", "answer": "2"}], "map": {"prompt": "q"}, "name": "own"},
    ]);
    wanted_job["eval"] = json!({"dataset": {"records": [{"prompt": "Three?", "answer": "3"}]}, "every_steps": 1});
    wanted_job["rewards"] = json!([{"type": "number_match", "column": "answer"}]);
    let job = server.submit(&wanted_job).await;
    assert_eq!(server.get(&format!("/jobs/{job}")).await["status_reason"], "dataset_downloading");
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    drop(server);
    let before = hub.seen().len();
    release(&hub);
    let server = serve(&data, &hub, &[]);
    let view = server.job_in_state(&job, "succeeded").await;
    let sources = view["plan"]["dataset"]["sources"].as_array().unwrap();
    let source = |index: usize| {
        (sources[index]["name"].clone(), sources[index]["num_rows"].clone(), sources[index]["weight"].clone())
    };
    assert_eq!(source(0), (json!("rows"), json!(40), json!(2.0)), "{view}");
    assert_eq!(source(1), (json!("own"), json!(2), json!(2.0)), "{view}");
    let again = hub.seen().split_off(before);
    // Each connection brought 60,000 bytes: one during the request, and one in the background.
    let range = again.iter().find(|seen| seen.cdn).and_then(|seen| seen.range.clone());
    assert!(matches!(range.as_deref(), Some("bytes=60000-" | "bytes=120000-")), "{again:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dataset_that_cannot_be_used_fails_the_jobs_that_wait_and_cancelling_keeps_the_parts() {
    let hub = start(rows(), held()).await;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let server = with_model(&data, &hub, &dir.path().join("model")).await;
    let parts = || std::fs::read_dir(data.join("hub/parts")).unwrap().count();

    let (answered, cancelled) = post(&server, "/datasets", &[], &wanted()).await;
    let path = format!("/datasets/{}", cancelled["id"].as_str().unwrap());
    assert_eq!((answered, delete(&server, &path).await, status(&server, &path).await, parts()), (202, 204, 404, 1));

    let mut job = spec("tiny", 1);
    job["rewards"] = json!([{"type": "number_match", "column": "answer"}]);
    job["dataset"] = json!({"hub": "fake/rows", "map": {"prompt": "quesiton"}});
    let unmapped = server.submit(&job).await;
    job["dataset"] = json!({"hub": "fake/rows", "map": {"prompt": "question", "keep": ["pad"]}});
    let columnless = server.submit(&job).await;
    let planless = server.submit(&job).await;
    assert_eq!(post(&server, &format!("/jobs/{planless}/cancel"), &[], &json!({})).await.0, 200);
    release(&hub);

    let failed = server.job_in_state(&unmapped, "failed").await;
    assert_eq!(failed["failure"]["code"], "dataset_download_failed", "{failed}");
    assert!(failed["failure"]["message"].as_str().unwrap().contains("did you mean 'question'?"), "{failed}");
    let id = failed["plan"]["dataset"]["id"].as_str().unwrap();
    let dataset = when(&server, &format!("/datasets/{id}"), "failed").await;
    assert!(dataset["problem"].as_str().unwrap().contains("quesiton"), "{dataset}");
    job["dataset"] = json!({"id": id});
    let checked = server.post("/jobs/validate", &job).await;
    assert_eq!(checked["errors"][0]["code"], "dataset_download_failed", "{checked}");

    // A new request replaces the failed download, and names the error at once.
    let (answered, refused) =
        post(&server, "/datasets", &[], &json!({"hub": "fake/rows", "map": {"prompt": "quesiton"}})).await;
    assert_eq!((answered, &refused["code"]), (422, &json!("invalid_dataset")), "{refused}");
    assert_eq!(status(&server, &format!("/datasets/{id}")).await, 404);

    let failed = server.job_in_state(&columnless, "failed").await;
    assert_eq!(failed["failure"]["code"], "invalid_spec", "{failed}");
    let message = failed["failure"]["message"].as_str().unwrap();
    assert!(message.contains("/rewards/0/column") && message.contains("no column 'answer'"), "{failed}");
    for job in [unmapped, planless] {
        let (answered, refused) = post(&server, &format!("/jobs/{job}/retry"), &[], &json!({})).await;
        assert_eq!((answered, &refused["code"]), (409, &json!("conflict")), "{refused}");
    }
}
