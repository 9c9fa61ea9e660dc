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
    refused.failed(2, "the server rejected the dataset");
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
    let set =
        ["--set", "training.max_steps=7", "--set", "rewards.0.weight=0.5", "--set", "name=2024", "--set", "name=007"];
    let id = user.run(&[&["submit", "job.toml"][..], &set].concat()).ok();
    let job = server.get(&format!("/jobs/{}", id.trim())).await;
    assert_eq!((&job["total_steps"], &job["name"]), (&json!(7), &json!("007")));
    assert_eq!(job["plan"]["rewards"][0]["weight"], json!(0.5));

    for (set, said) in [
        ("rloo.beta", "no '='"),
        ("rewards.4.weight=1", "--set rewards.4.weight=1"),
        ("model.name=1", "--set model.name=1"),
        ("rloo.beta=-1", "--set rloo.beta=-1: must be at least 0"),
        ("rloo.beta=.5", "--set rloo.beta=.5"),
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
async fn a_dry_run_leaves_nothing_on_the_server() {
    let (server, user) = start("none");
    crate::processes::model_copy(&user.path("folder-model"));
    user.write("rows.jsonl", ROWS);
    user.write("held.csv", "question,answer\nOne?,1\nTwo?,2\n");
    let mut job = with_dataset(json!("rows.jsonl"));
    job["model"] = json!("./folder-model");
    job["eval"] = json!({"every_steps": 1, "dataset": {"file": "held.csv", "map": {"prompt": "question"}}});
    user.write("job.json", job.to_string());
    let ids = async |path: &str| -> Vec<String> {
        let list = server.get(path).await["data"].clone();
        list.as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect()
    };
    let done = user.run(&["submit", "job.json", "--dry-run"]);
    // The rows of a small file are part of the request; a mapped file is converted by the server.
    assert!(!done.err.contains("uploading rows.jsonl") && done.err.contains("uploading held.csv"), "{done:?}");
    assert!(done.out.contains("dataset  3 rows"), "{done:?}");
    done.ok();
    assert_eq!((ids("/datasets").await, ids("/models").await), (vec![], vec!["tiny".to_owned()]));
    assert!(!user.path(".local").exists(), "nothing is recorded of datasets that are gone");
    let json = user.run(&["submit", "job.json", "--dry-run", "--json"]).json();
    assert_eq!(json["plan"]["eval"]["dataset"]["num_rows"], json!(2));

    // Files that are too large for a request are uploaded and removed. Invalid rows are reported as by a real submission.
    let large: String = (0..9000).map(|row| format!("{{\"prompt\":\"Say {row}.\",\"x\":\"{:1000}\"}}\n", "")).collect();
    user.write("large.jsonl", large);
    let done = user.run(&["submit", "job.json", "--dry-run", "--dataset", "large.jsonl"]);
    assert!(done.err.contains("uploading large.jsonl") && done.out.contains("dataset  9000 rows"), "{done:?}");
    user.write("broken.csv", "answer\n1\n");
    let refused = user.run(&["submit", "job.json", "--dry-run", "--dataset", "broken.csv"]);
    refused.failed(2, "the server rejected the dataset");
    assert_eq!((ids("/datasets").await, ids("/models").await), (vec![], vec!["tiny".to_owned()]));

    // Datasets and models from before the check stay on the server.
    let id = user.run(&["datasets", "upload", "held.csv", "--prompt", "question"]).ok();
    std::fs::remove_dir_all(user.path(".local")).unwrap();
    user.run(&["models", "add", "folder-model", "folder-model"]).ok();
    user.run(&["submit", "job.json", "--dry-run"]).ok();
    assert_eq!(ids("/datasets").await, [id.trim()]);
    assert_eq!(ids("/models").await.len(), 2);
}

#[tokio::test]
async fn the_chats_of_a_warm_up_file_are_the_rows_that_the_server_makes_of_them() {
    let (server, user) = start("none");
    let chat = |question: &str, answer: &str| json!([{"role": "user", "content": question}, {"role": "assistant", "content": answer}]);
    let rows = [
        json!({"level": 1, "messages": chat("What is up?", "The sky.")}),
        json!({"messages": chat("Say yes", "yes"), "level": 2}),
    ];
    user.write("chats.jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    let with = |dataset: Value, map: &Value| {
        let mut job = named("warm", 2);
        job["warm_up"] = json!({"dataset": dataset, "steps": 2, "batch_size": 1, "learning_rate": 1e-3});
        if map.is_object() {
            job["warm_up"]["map"] = map.clone();
        }
        job
    };
    for map in [Value::Null, json!({"keep": []}), json!({"system": "Be brief."})] {
        let mut warm_ups = Vec::new();
        for dataset in [json!("chats.jsonl"), json!({"records": rows})] {
            let id = user.submit(&with(dataset, &map));
            warm_ups.push(server.get(&format!("/jobs/{id}")).await["plan"]["warm_up"].clone());
        }
        assert_eq!(warm_ups[0]["dataset"]["num_rows"], json!(2));
        assert_eq!(warm_ups[0]["dataset"]["sha256"], warm_ups[1]["dataset"]["sha256"], "{map}: {warm_ups:?}");
        user.write("job.json", with(json!("chats.jsonl"), &map).to_string());
        assert!(user.run(&["submit", "job.json", "--dry-run"]).ok().contains("the job is valid"));
    }
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
