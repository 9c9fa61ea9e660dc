//! Pushes to a hub with real processes: adapter and merged model, model card, resumption, cancellation, refusals, secrets.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rlood_types::digest::Sha256Digest;
use serde_json::{Value, json};

use crate::cli::User;
use crate::hub::uploads::{OTHERS, READ_TOKEN, WRITE_TOKEN};
use crate::hub::{COMMIT, Faults, Running, start};
use crate::hub_models::{post, repository, serve};
use crate::processes::{Server, signal, spec};

const PATIENCE: Duration = Duration::from_secs(120);

/// The model `fake/tiny` and the dataset `fake/rows`.
fn hub_files() -> BTreeMap<String, Vec<u8>> {
    let mut files = repository();
    let rows: String = (0..12).map(|n| format!("{{\"question\":\"Say the secret number {n} in words.\"}}\n")).collect();
    files.insert("train.jsonl".to_owned(), rows.into_bytes());
    files
}

/// Trains four steps on the hub's model and dataset, with an evaluation. Returns the job and its best checkpoint.
async fn train(server: &Server) -> (String, String) {
    let mut job = spec("fake/tiny", 4);
    job["name"] = json!("words");
    job["dataset"] = json!({"hub": "fake/rows", "map": {"prompt": "question"}});
    job["rewards"] = json!([
        {"type": "regex", "name": "letters", "pattern": "[a-m]"},
        {"type": "length", "min_words": 1, "max_words": 3, "weight": 0.5}
    ]);
    job["eval"] = json!({"fraction": 0.34, "every_steps": 2});
    let job = server.submit(&job).await;
    server.job_in_state(&job, "succeeded").await;
    let checkpoints = server.get(&format!("/jobs/{job}/checkpoints")).await;
    let best = checkpoints["data"].as_array().unwrap().iter().find(|one| one["best"] == true).unwrap();
    (job, best["id"].as_str().unwrap().to_owned())
}

async fn push_when(server: &Server, id: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let begun = Instant::now();
    loop {
        let push = server.get(&format!("/pushes/{id}")).await;
        if is_so(&push) {
            return push;
        }
        assert!(begun.elapsed() < PATIENCE, "{push}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn ended(server: &Server, id: &str) -> Value {
    push_when(server, id, |push| !matches!(push["state"].as_str(), Some("queued" | "running"))).await
}

async fn request(server: &Server, checkpoint: &str, token: &str, body: &Value) -> (u16, Value) {
    post(server, &format!("/checkpoints/{checkpoint}/pushes"), &[("x-hub-token", token)], body).await
}

fn sees_no_secret(of: &str, text: &str) {
    for secret in [WRITE_TOKEN, READ_TOKEN, "signature=x"] {
        assert!(!text.contains(secret), "{of}: {text}");
    }
}

/// Every prompt and completion of a job, without those that are too short to tell.
async fn texts(server: &Server, job: &str) -> Vec<String> {
    let page = server.get(&format!("/jobs/{job}/samples?limit=100")).await;
    let samples = page["data"].as_array().unwrap().clone();
    let texts = samples.iter().flat_map(|sample| [&sample["prompt"], &sample["completion"]]);
    texts.filter_map(|text| Some(text.as_str()?.to_owned())).filter(|text| text.chars().count() >= 6).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adapter_and_a_merged_model_are_pushed_with_a_card_by_the_command_line() {
    let hub = start(hub_files(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let server = serve(&dir.path().join("data"), &hub, &[]);
    let (job, checkpoint) = train(&server).await;
    let verdict = server.post(&format!("/jobs/{job}/verdict"), &json!({})).await;
    let judged = format!("/verdicts/{}", verdict["id"].as_str().unwrap());
    while !matches!(server.get(&judged).await["state"].as_str(), Some("succeeded" | "failed")) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let summary = server.get(&judged).await["result"]["summary"].as_str().unwrap().to_owned();

    let mut user = User::of(&server.url);
    user.run(&["push", "words", "ann/adapter"]).failed(2, "needs a token of the hub with write permission");
    user.variables.push(("HF_TOKEN".to_owned(), WRITE_TOKEN.to_owned()));
    let done = user.run(&["push", "words", "ann/adapter"]);
    assert!(done.err.contains(&checkpoint) && done.err.contains("pushed as commit"), "{done:?}");
    sees_no_secret("output", &format!("{done:?}"));
    assert_eq!(done.ok().trim(), format!("{}/ann/adapter", hub.url));
    let mut files = hub.fake.uploads.files("ann/adapter", "main");
    let card = String::from_utf8(files.remove("README.md").unwrap()).unwrap();
    assert_eq!(files.keys().collect::<Vec<_>>(), ["adapter_config.json", "adapter_model.safetensors"]);
    for (name, bytes) in &files {
        assert!(server.bytes(&format!("/checkpoints/{checkpoint}/files/{name}")).await == *bytes, "{name}");
    }
    for part in [
        "base_model: \"fake/tiny\"\nbase_model_relation: \"adapter\"\nlibrary_name: \"peft\"\n",
        "tags: [\"rlood\",\"reinforcement-learning\",\"rloo\",\"lora\"]\n",
        "datasets: [\"fake/rows\"]\n",
        &format!("`fake/rows` (commit {COMMIT}, config default, split train); 12 rows"),
        "`letters` (weight 1, type `regex`), `length` (weight 0.5)",
        "| Training |",
        "| Evaluation |",
        &summary,
        "PeftModel.from_pretrained(model, \"ann/adapter\")",
        "vllm serve fake/tiny --enable-lora --max-lora-rank 8 --lora-modules adapter=ann/adapter",
    ] {
        assert!(card.contains(part), "{part}: {card}");
    }
    let texts = texts(&server, &job).await;
    assert!(texts.len() > 10 && !texts.iter().any(|text| card.contains(text.as_str())), "{card}");
    assert!(!card.contains("secret number") && !card.contains("[a-m]") && !card.contains(dir.path().to_str().unwrap()));
    let again = user.run(&["push", "words@best", "ann/adapter"]);
    assert!(again.ok().contains("ann/adapter") && hub.fake.uploads.commits("ann/adapter") == 2);

    user.run(&["push", "words", "ann/adapter", "--with-samples"]).ok();
    let card = String::from_utf8(hub.fake.uploads.files("ann/adapter", "main").remove("README.md").unwrap()).unwrap();
    assert!(card.contains("## Samples") && card.contains("Say the secret number"), "{card}");
    assert!(texts.iter().filter(|text| card.contains(text.as_str())).count() >= 2, "{card}");
    user.run(&["push", "words", "ann/adapter", "--private"]).failed(1, "is public, but a private repository");
    user.run(&["push", "words", "ann/adapter", "--merged"]).failed(1, "already holds another kind of model");

    merged(&server, &user, &hub, &checkpoint).await;
    read_by_the_real_client(&hub).await;
    let events = server.get(&format!("/jobs/{job}/events?limit=100")).await.to_string();
    assert!(events.contains("push.succeeded") && events.contains("push.failed"), "{events}");
    sees_no_secret("events", &events);
}

async fn merged(server: &Server, user: &User, hub: &Running, checkpoint: &str) {
    let merged = ["push", "words", "ann/merged", "--merged", "--dtype", "float32", "--private", "--revision", "f32"];
    let done = user.run(&merged);
    assert_eq!(done.ok().trim(), format!("{}/ann/merged/tree/f32", hub.url));
    assert!(hub.fake.uploads.repos.lock().unwrap()["ann/merged"].private);
    let mut files = hub.fake.uploads.files("ann/merged", "f32");
    let card = String::from_utf8(files.remove("README.md").unwrap()).unwrap();
    for part in [
        "base_model_relation: \"finetune\"\nlibrary_name: \"transformers\"\n",
        "Weights in float32. 100 % of the adapter's update survive",
        "AutoModelForCausalLM.from_pretrained(\"ann/merged\", dtype=\"auto\", revision=\"f32\")",
        "vllm serve ann/merged --revision f32",
    ] {
        assert!(card.contains(part), "{part}: {card}");
    }
    let exports = server.get(&format!("/checkpoints/{checkpoint}/exports")).await;
    let exports = exports["data"].as_array().unwrap();
    let export = exports.iter().find(|export| export["dtype"] == "float32").unwrap();
    let names: Vec<&str> =
        export["files"].as_array().unwrap().iter().map(|file| file["name"].as_str().unwrap()).collect();
    assert_eq!(files.keys().collect::<Vec<_>>(), names);
    for (name, bytes) in &files {
        let path = format!("/exports/{}/files/{name}", export["id"].as_str().unwrap());
        assert!(server.bytes(&path).await == *bytes, "{name}");
    }
    // A push without a card keeps the one that is there.
    let edited = hub.fake.uploads.commits("ann/merged");
    user.run(&[&merged[..], &["--no-card"]].concat()).ok();
    assert_eq!(hub.fake.uploads.commits("ann/merged"), edited);
}

const READ: &str = "
import sys
from huggingface_hub import ModelCard, snapshot_download
library, base, relation = sys.argv[3:]
card = ModelCard.load(sys.argv[1], token=sys.argv[2]) if sys.argv[1].endswith('adapter') else None
folder = snapshot_download(sys.argv[1], token=sys.argv[2], revision='main' if card else 'f32')
card = card or ModelCard.load(folder + '/README.md')
data = card.data
assert (data.library_name, data.base_model) == (library, base), data
assert (data.base_model_relation, data.pipeline_tag) == (relation, 'text-generation'), data
assert data.tags == ['rlood', 'reinforcement-learning', 'rloo', 'lora'] and data.datasets == ['fake/rows'], data
assert '## Load it' in card.text and '## Rewards' in card.text
print(folder)
";

/// Reads both repositories with huggingface_hub, if RLOOD_HUB_PYTHON names a Python that has it.
async fn read_by_the_real_client(hub: &Running) {
    let Ok(python) = std::env::var("RLOOD_HUB_PYTHON") else { return };
    for (repo, branch, library, relation) in
        [("ann/adapter", "main", "peft", "adapter"), ("ann/merged", "f32", "transformers", "finetune")]
    {
        let home = tempfile::tempdir().unwrap();
        let mut command = std::process::Command::new(&python);
        command.args(["-c", READ, repo, READ_TOKEN, library, "fake/tiny", relation]);
        command.env("HF_ENDPOINT", &hub.url).env("HF_HOME", home.path()).env("HF_HUB_DISABLE_XET", "1");
        command.env("NO_PROXY", "*");
        let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let folder = String::from_utf8(output.stdout).unwrap();
        for (path, bytes) in hub.fake.uploads.files(repo, branch) {
            assert!(std::fs::read(Path::new(folder.trim()).join(&path)).unwrap() == bytes, "{repo}: {path}");
        }
        println!("{repo} was read by huggingface_hub");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_survives_a_restart_with_the_server_s_token_and_asks_again_for_a_request_s() {
    let held = Arc::new(AtomicBool::new(true));
    let hub = start(hub_files(), Faults { uploads_held: held.clone(), ..Faults::default() }).await;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let mut server = serve(&data, &hub, &[("HF_TOKEN", WRITE_TOKEN)]);
    let (_, checkpoint) = train(&server).await;
    let path = format!("/checkpoints/{checkpoint}/pushes");
    let body = json!({"repo": "ann/kept", "format": "merged", "dtype": "float32"});
    let (status, kept) = post(&server, &path, &[], &body).await;
    assert_eq!((status, &kept["format"], &kept["state"]), (202, &json!("merged"), &json!("queued")), "{kept}");
    let (status, same) = post(&server, &path, &[], &body).await;
    assert_eq!((status, &same["id"]), (200, &kept["id"]));
    let kept = kept["id"].as_str().unwrap();
    let uploading = push_when(&server, kept, |push| push["progress"]["done"].as_u64() > Some(1_000)).await;
    assert!(
        matches!(uploading["stage"].as_str(), Some("uploading" | "exporting"))
            && uploading["progress"]["done"].as_u64() <= uploading["progress"]["total"].as_u64(),
        "{uploading}"
    );
    push_when(&server, kept, |push| push["stage"] == "uploading" && push["progress"]["done"].as_u64() > Some(0)).await;
    let (_, lost) = request(&server, &checkpoint, WRITE_TOKEN, &json!({"repo": "ann/lost"})).await;
    let lost = lost["id"].as_str().unwrap();
    push_when(&server, lost, |push| push["state"] == "running").await;
    signal("KILL", server.child.id());
    server.child.wait().unwrap();
    held.store(false, Ordering::SeqCst);
    // One of the objects arrived before.
    let weights = std::fs::read_dir(data.join("exports")).unwrap().next().unwrap().unwrap().path();
    let weights = std::fs::read(weights.join("model.safetensors")).unwrap();
    let sha256 = Sha256Digest::of(&weights).to_string();
    hub.fake.uploads.objects.lock().unwrap().insert(sha256.clone(), weights);
    let before = hub.seen().len();

    let server = serve(&data, &hub, &[("HF_TOKEN", WRITE_TOKEN)]);
    let done = ended(&server, kept).await;
    assert_eq!((&done["state"], &done["is_new"]), (&json!("succeeded"), &json!(true)), "{done}");
    assert_eq!(done["progress"]["done"], done["progress"]["total"]);
    assert_eq!(hub.fake.uploads.commits("ann/kept"), 2);
    assert!(!hub.seen().split_off(before).iter().any(|seen| seen.path == format!("/lfs/{sha256}")));
    let failed = ended(&server, lost).await;
    assert_eq!((&failed["state"], &failed["error"]["code"]), (&json!("failed"), &json!("no_hub_token")), "{failed}");
    assert!(failed["error"]["message"].as_str().unwrap().contains("push again; what was uploaded is kept"));
    let (_, again) = request(&server, &checkpoint, WRITE_TOKEN, &json!({"repo": "ann/lost"})).await;
    let done = ended(&server, again["id"].as_str().unwrap()).await;
    assert_eq!(done["state"], "succeeded", "{done}");
    let listed = server.get(&path).await;
    assert_eq!(listed["data"].as_array().unwrap().len(), 3);
    has_no_secret(&data);
}

fn has_no_secret(data: &Path) {
    let mut files = vec![data.to_owned()];
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            let bytes = std::fs::read(&path).unwrap();
            for secret in [WRITE_TOKEN, READ_TOKEN] {
                let found = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
                assert!(!found, "{}", path.display());
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_pushed_says_why_and_no_token_is_kept() {
    let held = Arc::new(AtomicBool::new(false));
    let hub = start(hub_files(), Faults { uploads_held: held.clone(), ..Faults::default() }).await;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let server = serve(&data, &hub, &[("RLOOD_LOG", "trace")]);
    let (_, checkpoint) = train(&server).await;
    for (body, field, says) in [
        (json!({}), "/repo", "must be set"),
        (json!({"repo": "adapter"}), "/repo", "give org/adapter"),
        (json!({"repo": "a/b/c"}), "/repo", "more than one '/'"),
        (json!({"repo": "datasets/ann/x"}), "/repo", "a repository of a model"),
        (json!({"repo": "ann/x@main"}), "/repo", "belongs into revision"),
        (json!({"repo": "ann/x", "revision": "../x"}), "/revision", "name of a branch"),
        (json!({"repo": "ann/x", "format": "gguf"}), "/format", "must be `adapter` or `merged`"),
        (json!({"repo": "ann/x", "dtype": "float16"}), "/dtype", "set format to merged"),
        (json!({"repo": "ann/x", "format": "merged", "dtype": "q8_0"}), "/dtype", "q8_0"),
        (json!({"repo": "ann/x", "with_samples": true, "card": false}), "/with_samples", "part of the model card"),
    ] {
        let (status, answer) = request(&server, &checkpoint, WRITE_TOKEN, &body).await;
        assert_eq!(status, 422, "{body}: {answer}");
        let text = answer.to_string();
        assert!(text.contains(field) && text.contains(says), "{body}: {text}");
    }
    let path = format!("/checkpoints/{checkpoint}/pushes");
    let (status, answer) = post(&server, &path, &[], &json!({"repo": "ann/x"})).await;
    assert_eq!((status, &answer["code"]), (422, &json!("no_hub_token")), "{answer}");
    for (repo, token, code, says) in [
        ("ann/x", READ_TOKEN, "may_not_write", "may not create ann/x: use a token with write permission"),
        ("ann/x", "hf_wrong", "bad_token", "rejects the token"),
        (OTHERS, WRITE_TOKEN, "may_not_write", "may not write to bob/taken"),
        ("eve/x", WRITE_TOKEN, "may_not_write", "may create repositories in eve"),
    ] {
        let (status, push) = request(&server, &checkpoint, token, &json!({"repo": repo})).await;
        assert_eq!(status, 202, "{push}");
        let failed = ended(&server, push["id"].as_str().unwrap()).await;
        assert_eq!((&failed["state"], &failed["error"]["code"]), (&json!("failed"), &json!(code)), "{failed}");
        assert!(failed["error"]["message"].as_str().unwrap().contains(says), "{failed}");
        sees_no_secret("push", &failed.to_string());
    }
    // A cancelled push makes no commit.
    held.store(true, Ordering::SeqCst);
    let (_, push) = request(&server, &checkpoint, WRITE_TOKEN, &json!({"repo": "ann/cancelled"})).await;
    let id = push["id"].as_str().unwrap();
    push_when(&server, id, |_| hub.fake.received_bytes.load(Ordering::SeqCst) > 0).await;
    let cancelled = server.post(&format!("/pushes/{id}/cancel"), &json!({})).await;
    assert_eq!((&cancelled["state"], &cancelled["stage"]), (&json!("cancelled"), &json!(null)), "{cancelled}");
    held.store(false, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(hub.fake.uploads.commits("ann/cancelled"), 1);
    drop(server);
    has_no_secret(&data);

    let offline = serve(&data, &hub, &[("HF_HUB_OFFLINE", "1")]);
    let (status, answer) = request(&offline, &checkpoint, WRITE_TOKEN, &json!({"repo": "ann/x"})).await;
    assert_eq!((status, &answer["code"]), (422, &json!("unsupported")), "{answer}");
    assert!(answer["detail"].as_str().unwrap().contains("offline mode is on"), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_s_token_and_another_owner_s_pushes_are_not_for_everyone() {
    let hub = start(hub_files(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let admin = "an-admin-key-of-the-test";
    let variables = [("RLOOD_API_KEY", admin), ("RLOOD_ALLOW_OUTGOING", "loopback"), ("HF_TOKEN", WRITE_TOKEN)];
    let server = serve(&dir.path().join("data"), &hub, &variables);
    let bearer = format!("Bearer {admin}");
    let key = async |owner: &str| {
        let body = json!({"name": owner, "owner": owner, "scopes": ["read", "submit"]});
        let (_, made) = post(&server, "/keys", &[("authorization", &bearer)], &body).await;
        format!("Bearer {}", made["key"].as_str().unwrap())
    };
    let (ann, bob) = (key("ann").await, key("bob").await);
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let get = async |path: &str, bearer: &str| {
        let answer = http.get(format!("{}{path}", server.url)).header("authorization", bearer).send().await.unwrap();
        (answer.status().as_u16(), answer.json::<Value>().await.unwrap())
    };
    let (_, job) = post(&server, "/jobs", &[("authorization", &ann)], &spec("fake/tiny", 2)).await;
    let job = job["id"].as_str().unwrap().to_owned();
    let begun = Instant::now();
    while get(&format!("/jobs/{job}"), &ann).await.1["state"] != "succeeded" {
        assert!(begun.elapsed() < PATIENCE, "{}", get(&format!("/jobs/{job}"), &ann).await.1);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (_, checkpoints) = get(&format!("/jobs/{job}/checkpoints"), &ann).await;
    let path = format!("/checkpoints/{}/pushes", checkpoints["data"][0]["id"].as_str().unwrap());
    let body = json!({"repo": "ann/x"});
    let (status, refused) = post(&server, &path, &[("authorization", &ann)], &body).await;
    assert_eq!((status, &refused["code"]), (422, &json!("no_hub_token")), "{refused}");
    let (status, _) = post(&server, &path, &[("authorization", &bob), ("x-hub-token", WRITE_TOKEN)], &body).await;
    assert_eq!(status, 404);
    let (status, push) = post(&server, &path, &[("authorization", &bearer)], &body).await;
    assert_eq!(status, 202, "{push}");
    let push = format!("/pushes/{}", push["id"].as_str().unwrap());
    assert_eq!((get(&push, &ann).await.0, get(&push, &bob).await.0), (200, 404));
    assert_eq!(post(&server, &format!("{push}/cancel"), &[("authorization", &bob)], &json!({})).await.0, 404);
}
