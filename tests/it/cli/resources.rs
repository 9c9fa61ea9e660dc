//! Models, datasets and completion.

use std::collections::BTreeMap;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::json;

use super::{User, named, start};
use crate::hub::{self, COMMIT, Faults};
use crate::hub_dataset_downloads::{NUM_ROWS, release, rows};
use crate::hub_models::{TOKEN, held, repository, serve};
use crate::processes::model_copy;

#[tokio::test]
async fn models_are_added_listed_shown_and_removed() {
    let (server, user) = start("none");
    model_copy(&user.path("relative"));
    assert_eq!(user.run(&["models", "add", "second", "relative"]).ok(), "second\n");
    assert_eq!(user.run(&["models", "list", "-q"]).ok(), "second\ntiny\n");
    let list = user.run(&["models", "list"]).ok();
    assert!(list.contains("qwen3") && list.contains("ready"), "{list}");
    let shown = user.run(&["models", "show", "second"]).ok();
    assert!(shown.contains("qwen3") && shown.contains("relative"), "{shown}");
    user.run(&["models", "remove", "second"]).ok();
    user.run(&["models", "show", "second"]).failed(3, "");
    user.run(&["models", "add", "third", "no-such-folder"]).failed(2, "no-such-folder");
    user.run(&["models", "add", "org/unknown", "--wait"]).failed(2, "");
    let id = user.submit(&named("uses it", 2));
    let refused = user.run(&["models", "remove", "tiny"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert_eq!(server.get(&format!("/jobs/{id}")).await["state"], json!("queued"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_of_the_hub_is_sent_from_the_variable_or_the_flag() {
    let fake = hub::start(repository(), Faults { gated: Some(TOKEN), ..Faults::default() }).await;
    let mut user = User::new();
    let server = serve(&user.path("data"), &fake, &[]);
    user.variables.push(("RLOOD_SERVER".to_owned(), server.url.clone()));
    let add = ["models", "add", "fake/tiny", "--wait"];
    user.run(&add).failed(2, "gated");
    let with_flag = user.run(&[&add[..], &["--hub-token", TOKEN]].concat());
    assert!(!format!("{with_flag:?}").contains(TOKEN));
    let id = with_flag.ok();
    user.run(&["models", "remove", id.trim()]).ok();
    // The user's own token is sent only where the user asks for it.
    user.run(&[&add[..], &["--hf-token"]].concat()).failed(2, "no token found");
    user.variables.push(("HF_TOKEN".to_owned(), TOKEN.to_owned()));
    user.run(&add).failed(2, "gated");
    let with_own = user.run(&[&add[..], &["--hf-token"]].concat());
    assert!(!format!("{with_own:?}").contains(TOKEN));
    user.run(&["models", "remove", with_own.ok().trim()]).ok();
    user.variables.pop();
    user.variables.push(("RLOOD_HUB_TOKEN".to_owned(), TOKEN.to_owned()));
    user.run(&add).ok();
    assert!(
        !user
            .command(&["models", "--help"])
            .output()
            .unwrap()
            .stdout
            .windows(TOKEN.len())
            .any(|part| part == TOKEN.as_bytes())
    );
    user.run(&["models", "list", "--hub-token", "a\nb"]).failed(2, "Hugging Face token");
}

#[tokio::test]
async fn datasets_are_uploaded_mapped_listed_shown_and_removed() {
    let (server, user) = start("none");
    user.write("rows.csv", "question,answer\nOne?,1\nTwo?,2\nThree?,3\n");
    user.run(&["datasets", "upload", "rows.csv"]).failed(2, "prompt");
    let upload = ["datasets", "upload", "rows.csv", "--prompt", "question", "--limit", "2", "--name", "asked"];
    let id = user.run(&upload).ok();
    let id = id.trim();
    assert!(id.starts_with("ds_"), "{id}");
    assert_eq!(user.run(&["datasets", "list", "-q"]).ok().trim(), id);
    assert!(user.run(&["datasets", "list"]).ok().contains("asked"));
    let shown = user.run(&["datasets", "show", "asked"]).ok();
    assert!(shown.contains(id) && shown.contains("question") && shown.contains("rows         2"), "{shown}");
    let rows = user.run(&["datasets", "rows", "asked"]).ok();
    assert_eq!(rows.lines().count(), 2);
    assert!(rows.contains("One?"), "{rows}");
    assert_eq!(user.run(&["datasets", "rows", id, "--limit", "1"]).ok().lines().count(), 1);
    user.write("map.yaml", "prompt: \"{{ question }} Answer briefly.\"\n");
    let mapped = user.run(&["datasets", "upload", "rows.csv", "--map", "map.yaml", "--name", "asked"]).ok();
    assert_ne!(mapped.trim(), id);
    user.run(&["datasets", "show", "asked"]).failed(2, id);
    user.run(&["datasets", "show", "nobody"]).failed(3, "nobody");
    user.run(&["datasets", "upload", "rows.csv", "--map", "{\"promt\": 1}"]).failed(2, "--map");
    user.run(&["datasets", "upload", "missing.csv"]).failed(2, "missing.csv");
    user.run(&["datasets", "remove", id, mapped.trim()]).ok();
    assert_eq!(server.get("/datasets").await["data"], json!([]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn datasets_of_the_hub_are_imported_with_their_settings_and_a_token() {
    let lines = |folder: &str, answer: u32| {
        let row = |index: u32| format!("{{\"question\":\"{folder} {index}?\",\"answer\":\"{}\"}}\n", index + answer);
        ((0..5).map(row).collect::<String>()).into_bytes()
    };
    let readme = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n  - split: test\n    \
                  path: main/test.jsonl\n- config_name: other\n  data_files: other/train.jsonl\n---\n";
    let mut files = BTreeMap::from([("README.md".to_owned(), readme.as_bytes().to_vec())]);
    for (folder, answer) in [("main/train", 1), ("main/test", 2), ("other/train", 3)] {
        files.insert(format!("{folder}.jsonl"), lines(folder, answer));
    }
    let fake = hub::start(files, Faults { gated: Some(TOKEN), ..Faults::default() }).await;
    let mut user = User::new();
    let server = serve(&user.path("data"), &fake, &[]);
    user.variables.push(("RLOOD_SERVER".to_owned(), server.url.clone()));
    user.write("map.yaml", "columns: {answer: answer}\n");
    let add = ["datasets", "add", "fake/rows", "--config", "main", "--map", "map.yaml", "--prompt", "question"];
    user.run(&add).failed(2, "gated");
    user.variables.push(("RLOOD_HUB_TOKEN".to_owned(), TOKEN.to_owned()));
    user.run(&[&add[..4], &["none", "--prompt", "question"]].concat()).failed(2, "main");
    user.run(&[&add[..], &["--revision", "nope"]].concat()).failed(2, "nope");
    user.run(&[&add[..], &["--seed", "1"]].concat()).failed(2, "--limit");
    let settings = ["--split", "test", "--name", "tests", "--limit", "2", "--seed", "7", "--revision", COMMIT];
    let imported = user.run(&[&add[..], &settings].concat());
    assert!(!format!("{imported:?}").contains(TOKEN) && imported.err.contains("ready"), "{imported:?}");
    let id = imported.ok();
    let id = id.trim();
    let dataset = server.get(&format!("/datasets/{id}")).await;
    let origin = &dataset["origin"];
    assert_eq!((&dataset["name"], &dataset["num_rows"]), (&json!("tests"), &json!(2)), "{dataset}");
    assert_eq!(
        (&origin["config"], &origin["split"], &origin["commit"]),
        (&json!("main"), &json!("test"), &json!(COMMIT))
    );
    let recipe = json!({"map": {"prompt": "question", "columns": {"answer": "answer"}}, "limit": 2, "seed": 7});
    assert_eq!(origin["recipe"], recipe, "{dataset}");
    assert!(user.run(&["datasets", "rows", "tests"]).ok().contains("main/test"));
    let shown = user.run(&["datasets", "show", "tests"]).ok();
    assert!(shown.contains(&format!("fake/rows at {COMMIT}")), "{shown}");
    // The same settings are the same dataset. The revision can be a part of the name.
    let again = ["datasets", "add", &format!("fake/rows@{COMMIT}"), "--config", "main", "--map", "map.yaml", "--json"];
    let again = user.run(&[&again[..], &["--prompt", "question"], &settings[..8]].concat()).json();
    assert_eq!((&again["id"], &again["state"]), (&json!(id), &json!("ready")), "{again}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dataset_of_the_hub_is_followed_until_it_is_downloaded() {
    let fake = hub::start(rows(), held()).await;
    let mut user = User::new();
    let server = serve(&user.path("data"), &fake, &[]);
    user.variables.push(("RLOOD_SERVER".to_owned(), server.url.clone()));
    let add = ["datasets", "add", "fake/rows", "--map", r#"{"prompt": "question", "drop": ["pad"]}"#];
    let begun = user.run(&[&add[..], &["--no-wait", "--json"]].concat()).json();
    assert_eq!(begun["state"], "downloading", "{begun}");
    let listed = user.run(&["datasets", "list"]).ok();
    assert!(listed.contains("downloading"), "{listed}");
    let follow = |arguments: &[&str]| {
        let mut command = user.command(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let (following, failing) = (follow(&add), follow(&["datasets", "add", "fake/rows", "--prompt", "nope"]));
    while server.get("/datasets").await["data"].as_array().unwrap().len() < 2 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    release(&fake);
    let end = async |child: Child| tokio::task::spawn_blocking(|| child.wait_with_output().unwrap()).await.unwrap();
    let (followed, failed) = (end(following).await, end(failing).await);
    let problem = String::from_utf8_lossy(&failed.stderr);
    assert!(failed.status.code() == Some(1) && problem.contains("nope"), "{problem}");
    let (out, err) = (String::from_utf8_lossy(&followed.stdout), String::from_utf8_lossy(&followed.stderr));
    assert!(followed.status.success() && err.contains("downloading") && err.contains("ready"), "{err}");
    assert_eq!(out.trim(), begun["id"], "{err}");
    assert_eq!(server.get(&format!("/datasets/{}", out.trim())).await["num_rows"], NUM_ROWS);
    assert_eq!(user.run(&add).ok(), out);
}

#[tokio::test]
async fn a_shell_gets_a_script_and_asks_the_program_for_ids() {
    let (_server, user) = start("none");
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = user.run(&["completions", shell]).ok();
        assert!(script.contains("rlood") && script.contains("COMPLETE"), "{shell}: {script}");
    }
    user.run(&["completions", "csh"]).failed(2, "csh");
    let id = user.submit(&named("completed", 2));
    let complete = |words: &[&str]| {
        let mut command = user.command(&["--"]);
        let last = (words.len() - 1).to_string();
        command.args(words).env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", last);
        command.env("_CLAP_COMPLETE_COMP_TYPE", "9").env("_CLAP_COMPLETE_SPACE", "true").env("_CLAP_IFS", "\n");
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    assert!(complete(&["rlood", "wat"]).lines().any(|word| word.starts_with("watch")));
    assert!(complete(&["rlood", "show", ""]).contains(&id));
    assert!(complete(&["rlood", "cancel", &id, &id[..8]]).contains(&id));
    assert!(complete(&["rlood", "models", ""]).contains("add"));
}

#[tokio::test]
async fn a_server_that_does_not_answer_keeps_no_shell_waiting() {
    // The system accepts connections, but no server answers them.
    let hanging = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let user = super::User::of(&format!("http://{}", hanging.local_addr().unwrap()));
    let begun = std::time::Instant::now();
    let mut command = user.command(&["--", "rlood", "show", ""]);
    command.env("COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", "2").env("_CLAP_COMPLETE_COMP_TYPE", "9");
    let output = command.env("_CLAP_COMPLETE_SPACE", "true").env("_CLAP_IFS", "\n").output().unwrap();
    assert!(begun.elapsed().as_secs() < 5 && output.stderr.is_empty(), "{:?} {output:?}", begun.elapsed());
}
