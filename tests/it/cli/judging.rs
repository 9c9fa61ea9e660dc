//! `rlood verdict` and `rlood export --merged` against the real routes.

use serde_json::{Value, json};

use super::{User, named, start};
use crate::processes::Server;

/// A job with an evaluation of this many rows, which the model's random completions win or lose by chance.
fn evaluated(rows: u64, rate: f64) -> Value {
    let mut job = named("judged", 4);
    let records: Vec<Value> =
        (0..rows).map(|n| json!({"prompt": format!("Say the number {n} in a few words.")})).collect();
    job["eval"] = json!({"dataset": {"records": records}, "every_steps": 2});
    job["rewards"] = json!([{"type": "regex", "pattern": "[a-m]"}]);
    job["rloo"]["num_generations"] = json!(4);
    job["optimizer"]["learning_rate"] = json!(rate);
    job
}

/// Returns the id of such a job that succeeded.
async fn judged(server: &Server, user: &User, rows: u64, rate: f64) -> String {
    let id = user.submit(&evaluated(rows, rate));
    server.job_in_state(&id, "succeeded").await;
    id
}

#[tokio::test]
async fn a_verdict_is_begun_followed_and_shown_and_its_exit_code_is_its_word() {
    let (server, user) = start("cpu");
    let id = judged(&server, &user, 40, 0.05).await;
    let first = user.run(&["verdict", "judged"]);
    let known = server.get(&format!("/jobs/{id}/verdict")).await;
    let result = &known["result"];
    let code = match result["verdict"].as_str().unwrap() {
        "better" => 0,
        "no_difference" => 10,
        "worse" => 11,
        other => panic!("{other}"),
    };
    assert_eq!(first.code, code, "{first:?}");
    for said in [
        format!("won {}, lost {}, tied {}", result["won"], result["lost"], result["tied"]),
        known["checkpoint_id"].as_str().unwrap().to_owned(),
        "95 % interval".to_owned(),
        "these rows also chose this checkpoint: optimistic".to_owned(),
    ] {
        assert!(first.out.contains(&said), "{said}: {first:?}");
    }
    // It is the first thing that is shown of the job, and part of its outcome.
    let summary = result["summary"].as_str().unwrap();
    let shown = user.run(&["show", &id]).ok();
    assert!(shown.starts_with(&format!("{:<12} {summary}\n", "verdict")), "{shown}");
    assert!(shown.contains("these rows also chose this checkpoint: optimistic"), "{shown}");
    let waited = user.run(&["wait", &id]);
    assert!(waited.err.contains(&format!("verdict: {summary}")), "{waited:?}");
    // The same request shows the same verdict; other sampling settings create a new one.
    let again = user.run(&["verdict", &id, "--json"]);
    assert_eq!((again.code, serde_json::from_str::<Value>(&again.out).unwrap()), (code, known.clone()));
    let other = user.run(&["verdict", &format!("{id}@last"), "-k", "4", "--temperature", "1", "--json"]);
    let other: Value = serde_json::from_str(&other.out).unwrap();
    assert_ne!(other["id"], known["id"]);
    assert_eq!(other["sampling"]["num_generations"], 4);
    let shown = user.run(&["verdict", &id]);
    assert!(shown.out.contains("pass@4"), "{shown:?}");
}

#[tokio::test]
async fn the_events_of_a_job_are_followed_to_its_end_and_not_to_that_of_its_verdict() {
    let (server, user) = start("cpu");
    let mut job = evaluated(40, 0.05);
    job["sampling"]["max_completion_length"] = json!(64);
    let id = user.submit(&job);
    server.job_in_state(&id, "succeeded").await;
    let events = user.run(&["events", &id, "--json"]).json();
    let last = events["data"].as_array().unwrap().last().unwrap()["seq"].to_string();
    // It takes so long that it is still running when the commands below are done.
    let request = json!({"num_generations": 64, "temperature": 1.0});
    let verdict = server.post(&format!("/jobs/{id}/verdict"), &request).await["id"].as_str().unwrap().to_owned();
    let followed = user.run(&["events", &id, "-f", "--json"]).ok();
    let kinds: Vec<Value> = followed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(kinds.iter().any(|event| event["type"] == "job.succeeded"), "{followed}");
    assert_eq!(kinds.last().unwrap()["type"], "verdict.queued", "{followed}");
    let rest = user.run(&["events", &id, "-f", "--after", &last, "--json"]).ok();
    assert_eq!(rest.lines().count(), 1, "{rest}");
    user.run(&["watch", &id]).ok();
    let state = server.get(&format!("/verdicts/{verdict}")).await["state"].clone();
    assert!(state == "queued" || state == "running", "{state}");
    server.post(&format!("/verdicts/{verdict}/cancel"), &json!({})).await;
    assert!(user.run(&["events", &id, "-f"]).ok().contains("verdict.cancelled"));
}

#[tokio::test]
async fn too_few_rows_and_no_rows_have_codes_of_their_own() {
    let (server, user) = start("cpu");
    judged(&server, &user, 12, 0.05).await;
    let few = user.run(&["verdict", "judged"]);
    assert!(few.code == 13 && few.out.contains("too few rows"), "{few:?}");
    let id = user.submit(&named("plain", 2));
    server.job_in_state(&id, "succeeded").await;
    user.run(&["verdict", "plain"]).failed(1, "no evaluation");
}

#[tokio::test]
async fn a_merged_checkpoint_is_exported_once_and_downloaded_whole() {
    let (server, user) = start("cpu");
    let id = judged(&server, &user, 4, 0.05).await;
    let done = user.run(&["export", "judged@last", "--merged", "--dtype", "bfloat16", "-o", "merged"]);
    assert!(done.err.contains("of the weight update survives rounding to bfloat16"), "{done:?}");
    assert_eq!(done.ok().trim(), "merged");
    let config: Value = serde_json::from_slice(&std::fs::read(user.path("merged/config.json")).unwrap()).unwrap();
    assert_eq!(config["dtype"], "bfloat16");
    let checkpoint = server.get(&format!("/jobs/{id}/checkpoints")).await["data"][0]["id"].as_str().unwrap().to_owned();
    let exports = server.get(&format!("/checkpoints/{checkpoint}/exports")).await;
    let export = &exports["data"][0];
    for file in export["files"].as_array().unwrap() {
        let path = user.path("merged").join(file["name"].as_str().unwrap());
        assert_eq!(std::fs::metadata(path).unwrap().len(), file["size_bytes"].as_u64().unwrap(), "{file}");
    }
    // The same as `pull --format merged`; nothing is exported or downloaded twice.
    let pulled = user.run(&["pull", "judged@last", "--format", "merged", "--dtype", "bfloat16", "-o", "merged"]);
    assert!(pulled.err.contains("already downloaded"), "{pulled:?}");
    assert_eq!(server.get(&format!("/checkpoints/{checkpoint}/exports")).await["data"].as_array().unwrap().len(), 1);
    // Without --merged the adapter is downloaded.
    user.run(&["export", "judged@last", "-o", "adapter"]).ok();
    assert!(user.path("adapter/adapter_model.safetensors").is_file());
}
