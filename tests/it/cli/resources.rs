//! Models, datasets and completion.

use serde_json::json;

use super::{User, named, start};
use crate::hub::{self, Faults};
use crate::hub_models::{TOKEN, repository, serve};
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
