//! Warm-ups over HTTP and in real processes: rows of every form, refusals, kills, forks, and stored rows.

use std::time::Duration;

use serde_json::{Value, json};

use crate::processes;
use crate::server::{Server, pointers};

/// A model with a chat template and a separate end-of-turn token.
const CHAT: &str = "qwen3";

fn chat(question: &str, answer: &str) -> Value {
    json!([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
}

/// Rows of every form.
fn answers() -> Value {
    json!([
        {"messages": chat("What is up?", "The sky.")},
        {"prompt": chat("Say yes", "yes"), "level": 1},
        {"prompt": [{"role": "user", "content": "Say no"}], "completion": "no"},
        {"prompt": "one two", "completion": " three"},
    ])
}

fn prompts(count: usize) -> Value {
    (0..count).map(|row| json!({"prompt": [{"role": "user", "content": format!("Say {row}")}]})).collect()
}

fn document(model: &str, records: Value) -> Value {
    json!({
        "model": model, "dataset": {"records": prompts(16)}, "rewards": [{"type": "length", "min_words": 1, "max_words": 3}],
        "rloo": {"num_generations": 2, "beta": 0.05}, "sampling": {"max_completion_length": 8},
        "training": {"prompts_per_step": 2, "max_steps": 4}, "checkpoints": {"every_steps": 1, "keep_last": 20},
        "warm_up": {"dataset": {"records": records}, "steps": 3, "batch_size": 3, "learning_rate": 1e-3},
    })
}

/// A server with the chat model.
async fn server() -> Server {
    let server = Server::start().await;
    let source = rlood_test_support::fixture("parity").join(CHAT);
    let answer = server.post("/models", json!({"id": CHAT, "source": source})).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    server
}

#[tokio::test]
async fn rows_of_every_form_are_stored_and_named_in_the_plan() {
    let server = server().await;
    let created = server.post("/jobs", document(CHAT, answers())).await;
    assert_eq!(created.status, 201, "{}", created.text);
    let warm_up = &created.body["plan"]["warm_up"];
    assert_eq!(created.body["total_steps"], 7);
    assert_eq!((&warm_up["reference"], &warm_up["dataset"]["num_rows"]), (&json!("warmed"), &json!(4)));
    assert!(warm_up["longest_row_tokens"].as_u64().is_some_and(|tokens| tokens > 10), "{warm_up}");
    let dataset = warm_up["dataset"]["id"].as_str().unwrap();
    let config = server.get(&format!("/jobs/{}/config", created.body["id"].as_str().unwrap())).await.body;
    assert_eq!(config["warm_up"]["dataset"], json!({"id": dataset}), "{config}");
    let again = server.post("/jobs", config).await;
    assert_eq!(again.status, 201, "{}", again.text);
    assert_eq!(again.body["plan"]["warm_up"], *warm_up, "a clone is the same");
    // The worker gets the rows; they are kept while the job needs them.
    let (job, attempt) = server.claim().await;
    let token = format!("Bearer {}", server.state.config.worker_token);
    let request = axum::http::Request::get(format!("/worker/jobs/{job}/datasets/{dataset}?attempt={attempt}"));
    let rows = server.send(request.header("authorization", token).body(axum::body::Body::empty()).unwrap()).await;
    assert_eq!((rows.status.as_u16(), rows.text.lines().count()), (200, 4), "{}", rows.text);
    assert_eq!(server.call("DELETE", &format!("/datasets/{dataset}"), None, None).await.status, 409);

    // The same rows with a mapping: from an upload, and from records.
    let pairs = json!([{"q": "What is up?", "a": "The sky."}, {"q": "Say yes", "a": "yes"}]);
    let uploaded = json!([{"prompt": "What is up?", "a": "The sky."}, {"prompt": "Say yes", "a": "yes"}]);
    let upload = server.post("/datasets", json!({"records": uploaded})).await;
    assert_eq!(upload.status, 201, "{}", upload.text);
    let mut by_id = document(CHAT, json!([]));
    by_id["warm_up"]["dataset"] = json!({"id": upload.body["id"]});
    by_id["warm_up"]["map"] = json!({"chat": true, "completion": "a", "keep": []});
    let mut by_records = document(CHAT, pairs);
    by_records["warm_up"]["map"] = json!({"prompt": "q", "completion": "a", "keep": []});
    let mut hashes = Vec::new();
    for document in [by_id, by_records] {
        let checked = server.post("/jobs/validate", document.clone()).await.body;
        assert_eq!(checked["valid"], true, "{checked}");
        assert_eq!(checked["plan"]["warm_up"]["dataset"]["id"], Value::Null, "{checked}");
        let created = server.post("/jobs", document).await;
        assert_eq!(created.status, 201, "{}", created.text);
        hashes.push(created.body["plan"]["warm_up"]["dataset"]["sha256"].clone());
        let config = server.get(&format!("/jobs/{}/config", created.body["id"].as_str().unwrap())).await.body;
        assert!(config["warm_up"]["map"].is_null(), "the rows that are stored are mapped: {config}");
    }
    assert_eq!(hashes[0], hashes[1]);
}

#[tokio::test]
async fn rows_that_teach_nothing_are_refused_by_their_number() {
    let server = server().await;
    for (row, code, word) in [
        (json!({"prompt": [{"role": "user", "content": "?"}]}), "missing_completion", "assistant"),
        (json!({"prompt": "text only"}), "missing_completion", "completion"),
        (json!({"prompt": chat("?", " ")}), "empty_completion", "empty"),
        (json!({"prompt": chat("?", "!"), "completion": "!"}), "two_answers", "one of them"),
        (json!({"prompt": chat("?", &"word ".repeat(400))}), "row_too_long", "tokens"),
    ] {
        let mut rows = answers();
        rows[2] = row;
        let refused = server.post("/jobs", document(CHAT, rows)).await;
        assert_eq!(
            (refused.status.as_u16(), pointers(&refused)),
            (422, vec![format!("/warm_up/dataset {code}")]),
            "{}",
            refused.text
        );
        let detail = refused.body["errors"][0]["detail"].as_str().unwrap();
        assert!(detail.contains("row 2") && detail.contains(word), "{detail}");
    }
    let mut unknown = document(CHAT, json!([]));
    unknown["warm_up"]["dataset"] = json!({"id": rlood::id::DatasetId::new()});
    assert_eq!(pointers(&server.post("/jobs", unknown).await), ["/warm_up/dataset/id unknown_dataset"]);
    let mut wrong_map = document(CHAT, json!([{"q": "?", "a": "!"}]));
    wrong_map["warm_up"]["map"] = json!({"prompt": "q", "completion": "answer"});
    let refused = server.post("/jobs", wrong_map).await;
    assert_eq!(pointers(&refused), ["/warm_up/dataset invalid_dataset"], "{}", refused.text);
    assert!(refused.text.contains("map.completion") && refused.text.contains("columns are q, a"), "{}", refused.text);
}

#[tokio::test]
async fn a_killed_warm_up_ends_with_the_bytes_of_a_calm_one_and_a_fork_does_not_repeat_it() {
    let dir = tempfile::tempdir().unwrap();
    let model = rlood_test_support::fixture("parity").join(CHAT);
    let mut document = document("chat", answers());
    // Long enough to be interrupted.
    document["warm_up"]["steps"] = json!(60);
    // The verdict's own rows and the guard set contain the prompts of two of the four rows.
    let guard = json!({"dataset": {"records": [{"prompt": "one two"}]}});
    let test = json!({"records": [{"prompt": [{"role": "user", "content": "What is up?"}]}]});
    document["eval"] =
        json!({"dataset": {"records": prompts(2)}, "every_steps": 4, "test_dataset": test, "guard": guard});
    let server = processes::Server::start(dir.path(), "cpu");
    processes::register(&server, "chat", &model).await;
    let calm = server.submit(&document).await;
    let view = server.job_in_state(&calm, "succeeded").await;
    assert_eq!((&view["step"], &view["total_steps"]), (&json!(64), &json!(64)));
    let expected = server.adapter(&calm, None).await;
    let events = server.get(&format!("/jobs/{calm}/events?limit=100")).await;
    let mut warnings = events["data"].as_array().unwrap().iter().filter(|event| event["type"] == "warning");
    let left_out = warnings.find(|event| event["data"]["code"] == "warm_up_rows_left_out");
    let left_out = left_out.unwrap_or_else(|| panic!("{events}"));
    assert_eq!(left_out["data"]["data"], json!({"left_out": 2, "rows": 4}), "{left_out}");

    let metrics = server.get(&format!("/jobs/{calm}/metrics?keys=warm_up/loss,reward,eval_reward")).await;
    let rows = metrics["data"].as_array().unwrap();
    let has = |key: &str| -> Vec<u64> {
        rows.iter().filter(|row| row[key].is_number()).map(|row| row["step"].as_u64().unwrap()).collect()
    };
    assert_eq!(has("warm_up/loss"), (1..=60).collect::<Vec<_>>());
    assert_eq!(has("reward"), (61..=64).collect::<Vec<_>>());
    assert_eq!(has("eval_reward"), [0, 60, 64], "before the warm-up, behind it, at the end");
    let loss = |step: usize| rows.iter().filter_map(|row| row["warm_up/loss"].as_f64()).nth(step - 1).unwrap();
    assert!(loss(60) < 0.8 * loss(1), "it learns: {} to {}", loss(1), loss(60));

    let struck = server.submit(&document).await;
    for at in [2, 20, 45] {
        server.job_when(&struck, "a step of the warm-up", |view| view["step"].as_u64() >= Some(at)).await;
        for pid in server.worker_pids(1).await {
            processes::signal("KILL", pid);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    server.job_in_state(&struck, "succeeded").await;
    assert!(server.adapter(&struck, None).await == expected, "the killed run ends with the calm run's bytes");

    // A fork after the warm-up continues from there; a fork that starts warm has no warm-up.
    let fork = |from_step: u64, overrides: Value| json!({"from_step": from_step, "overrides": overrides});
    let path = format!("/jobs/{calm}/fork");
    let same = server.post(&path, &fork(62, json!({}))).await;
    assert_eq!((&same["step"], &same["total_steps"]), (&json!(62), &json!(64)), "{same}");
    let child = same["id"].as_str().unwrap().to_owned();
    server.job_in_state(&child, "succeeded").await;
    assert!(server.adapter(&child, None).await == expected);
    let overrides = json!({"lora": {"dropout": 0.1}, "warm_start": {"reference": "initial"}});
    let warm = server.post(&path, &fork(60, overrides)).await;
    assert!(warm["plan"]["warm_up"].is_null() && warm["spec"]["warm_up"].is_null(), "{warm}");
    assert_eq!((&warm["step"], &warm["total_steps"]), (&json!(0), &json!(4)), "{warm}");
    server.job_in_state(warm["id"].as_str().unwrap(), "succeeded").await;
}
