//! Job files: their formats, `--set`, and the local files that they refer to.

use serde_json::{Value, json};

use super::{named, start};

const ROWS: &str = "{\"prompt\":\"Say one.\"}\n{\"prompt\":\"Say two.\"}\n{\"prompt\":\"Say three.\"}\n";

/// A job with this dataset.
fn with_dataset(dataset: Value) -> Value {
    let mut job = named("files", 2);
    job["dataset"] = dataset;
    job
}

#[tokio::test]
async fn local_files_become_datasets_each_content_once() {
    let (server, user) = start("none");
    std::fs::create_dir(user.path("jobs")).unwrap();
    user.write("jobs/rows.jsonl", ROWS);
    user.write("jobs/held.csv", "question,answer\nOne?,1\nTwo?,2\n");
    let mut job = with_dataset(json!("rows.jsonl"));
    job["eval"] = json!({"every_steps": 1, "dataset": {"file": "held.csv", "map": {"prompt": "question"}, "limit": 1}});
    user.write("jobs/job.json", job.to_string());
    let first = user.run(&["submit", "jobs/job.json"]);
    assert!(first.err.contains("uploading rows.jsonl") && first.err.contains("uploading held.csv"), "{first:?}");
    let id = first.ok().trim().to_owned();
    let plan = server.get(&format!("/jobs/{id}")).await["plan"].clone();
    assert_eq!((&plan["dataset"]["num_rows"], &plan["eval"]["dataset"]["num_rows"]), (&json!(3), &json!(1)));

    let again = user.run(&["submit", "jobs/job.json"]);
    assert!(!again.err.contains("uploading") && again.err.contains("uploaded before"), "{again:?}");
    // Another user with different bytes of the same rows: the server's list contains their hash.
    std::fs::remove_dir_all(user.path(".local")).unwrap();
    user.write("same.json", "[{\"prompt\": \"Say one.\"}, {\"prompt\": \"Say two.\"},\n {\"prompt\": \"Say three.\"}]");
    let found = user.run(&["datasets", "upload", "same.json"]);
    assert!(!found.err.contains("uploading"), "{found:?}");
    assert_eq!(json!(found.ok().trim()), plan["dataset"]["id"]);
    assert_eq!(server.get("/datasets").await["data"].as_array().unwrap().len(), 2);

    // A deleted dataset is uploaded again.
    for job in server.get("/jobs").await["data"].as_array().unwrap() {
        user.run(&["cancel", job["id"].as_str().unwrap()]).ok();
        user.run(&["delete", "--yes", job["id"].as_str().unwrap()]).ok();
    }
    user.run(&["datasets", "remove", plan["dataset"]["id"].as_str().unwrap()]).ok();
    assert!(user.run(&["datasets", "upload", "same.json"]).err.contains("uploading same.json"));
}

#[tokio::test]
async fn sources_of_a_list_and_a_file_of_the_command_line_are_uploaded() {
    let (server, user) = start("none");
    user.write("a.jsonl", ROWS);
    user.write("b.tsv", "prompt\tanswer\nAdd.\t1\n");
    let sources = json!([{"file": "a.jsonl", "name": "first", "weight": 3}, {"file": "b.tsv", "name": "second"}]);
    let id = user.submit(&with_dataset(sources));
    let sources = server.get(&format!("/jobs/{id}")).await["plan"]["dataset"]["sources"].clone();
    assert_eq!((&sources[0]["name"], &sources[1]["num_rows"]), (&json!("first"), &json!(1)));
    std::fs::create_dir(user.path("below")).unwrap();
    user.write("below/job.json", with_dataset(json!({"records": [{"prompt": "other"}]})).to_string());
    let id = user.run(&["submit", "below/job.json", "--dataset", "b.tsv", "--set", "training.prompts_per_step=1"]).ok();
    let rows = server.get(&format!("/jobs/{}", id.trim())).await["plan"]["dataset"]["num_rows"].clone();
    assert_eq!(rows, json!(1));

    for (dataset, said) in [
        (json!("missing.jsonl"), "not found"),
        (json!({"file": 7}), "must be the path"),
        (json!({"file": "a.jsonl", "map": {"promt": "x"}}), "unknown field `promt`"),
        (json!({"file": "a.jsonl", "name": "x"}), "name"),
    ] {
        user.write("bad.json", with_dataset(dataset).to_string());
        user.run(&["submit", "bad.json"]).failed(2, said);
    }
    user.write("broken.csv", "answer\n1\n");
    user.write("bad.json", with_dataset(json!("broken.csv")).to_string());
    let refused = user.run(&["submit", "bad.json"]);
    refused.failed(2, "the server rejected the dataset broken.csv");
    assert!(refused.err.contains("prompt"), "{refused:?}");
}

#[tokio::test]
async fn a_job_is_json_yaml_or_toml_and_settings_change_it() {
    let (server, user) = start("none");
    let toml = "model = \"tiny\"\nrewards = [{type = \"length\", min_words = 1, max_words = 3}]\n[dataset]\nrecords = [{prompt = \"Say one.\"}]\n\
                [training]\nmax_steps = 2\nprompts_per_step = 1\n[sampling]\nmax_completion_length = 6\n";
    let yaml = "model: tiny\nrewards: [{type: length, min_words: 1, max_words: 3}]\ndataset: {records: [{prompt: Say one.}]}\n\
                training: {max_steps: 2, prompts_per_step: 1}\nsampling: {max_completion_length: 6}\n";
    for text in [toml, yaml] {
        let id = user.run_with(&["submit", "-"], text).ok();
        assert_eq!(server.get(&format!("/jobs/{}", id.trim())).await["total_steps"], json!(2));
    }
    user.write("job.toml", toml);
    let set = [
        "--set",
        "training.max_steps=7",
        "--set",
        "rewards.0.weight=.5",
        "--set",
        "name=2024",
        "--set",
        "name=\"2024\"",
    ];
    let id = user.run(&[&["submit", "job.toml"][..], &set].concat()).ok();
    let job = server.get(&format!("/jobs/{}", id.trim())).await;
    assert_eq!((&job["total_steps"], &job["name"]), (&json!(7), &json!("2024")));
    assert_eq!(job["plan"]["rewards"][0]["weight"], json!(0.5));

    for (set, said) in [
        ("rloo.beta", "no '='"),
        ("rewards.4.weight=1", "--set rewards.4.weight=1"),
        ("model.name=1", "--set model.name=1"),
        ("rloo.beta=-1", "--set rloo.beta=-1: must be at least 0"),
        ("rloo.betta=1", "--set rloo.betta=1"),
    ] {
        user.run(&["submit", "job.toml", "--set", set]).failed(2, said);
        user.run(&["submit", "job.toml", "--dry-run", "--set", set]).failed(2, "");
    }
    assert_eq!(server.get("/jobs").await["data"].as_array().unwrap().len(), 3, "none of these was submitted");
    user.run_with(&["submit", "-"], "model: [").failed(2, "standard input");
    user.run_with(&["submit", "-"], "[1, 2]").failed(2, "a job must be an object");
    user.run(&["submit", "nothing.yaml"]).failed(2, "nothing.yaml");

    let mut child = user.command(&["submit", "job.toml", "--idempotency-key", "k1"]);
    let first = child.output().unwrap().stdout;
    assert_eq!(user.run(&["submit", "job.toml", "--idempotency-key", "k1"]).out.as_bytes(), first, "one job");
}

#[tokio::test]
async fn a_dry_run_shows_what_the_job_would_do_and_trl_is_translated() {
    let (server, user) = start("none");
    user.write("job.json", named("dry", 4).to_string());
    let shown = user.run(&["submit", "job.json", "--dry-run"]).ok();
    assert!(shown.contains("steps    4") && shown.contains("memory"), "{shown}");
    let json = user.run(&["submit", "job.json", "--dry-run", "--json"]).json();
    assert!(json["valid"] == true && json["estimate"]["total_bytes"].as_u64() > Some(0), "{json}");
    assert_eq!(server.get("/jobs").await["data"], json!([]));
    let trl = json!({
        "config": {"max_steps": 3, "num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 6, "report_to": "none"},
        "model": "tiny", "dataset": {"records": [{"prompt": "Say one."}, {"prompt": "Say two."}]},
        "rewards": [{"type": "length", "min_words": 1, "max_words": 3}]
    });
    user.write("trl.json", trl.to_string());
    let id = user.run(&["submit", "trl.json", "--trl"]).ok();
    assert_eq!(server.get(&format!("/jobs/{}", id.trim())).await["total_steps"], json!(3));
}

#[tokio::test]
async fn a_local_model_folder_is_registered_on_this_machine() {
    let (server, user) = start("none");
    crate::processes::model_copy(&user.path("folder-model"));
    let mut job = named("folder", 2);
    job["model"] = json!("./folder-model");
    let id = user.submit(&job);
    assert_eq!(server.get(&format!("/jobs/{id}")).await["plan"]["model"]["id"], json!("folder-model"));
    job["model"] = json!("./no-such-folder");
    user.write("job.json", job.to_string());
    user.run(&["submit", "job.json"]).failed(2, "not found");
}
