//! Jobs from submission to deletion, and the exit code of every end.

use serde_json::{Value, json};

use super::{endless, named, start};
use crate::processes::model_copy;

#[tokio::test]
async fn a_job_is_submitted_waited_for_shown_asked_and_deleted() {
    let (server, user) = start("cpu");
    user.write("job.json", named("mine", 4).to_string());
    let submitted = user.run(&["submit", "job.json", "--wait"]);
    assert!(submitted.err.contains("succeeded") && submitted.err.contains("rlood pull"), "{submitted:?}");
    let id = submitted.ok().trim().to_owned();
    assert!(id.starts_with("job_") && id.len() == 30, "{id}: the id alone");
    user.run(&["wait", &id]).ok();

    let list = user.run(&["list"]).ok();
    assert!(list.lines().next().unwrap().starts_with("id ") && list.contains(&id) && list.contains("4/4"), "{list}");
    assert_eq!(user.run(&["list", "-q"]).ok().trim(), id);
    assert_eq!(user.run(&["list", "-q", "--state", "queued,running"]).ok(), "");
    assert_eq!(user.run(&["list", "-q", "--state", "failed,succeeded", "--name", "in"]).ok().trim(), id);
    let shown = user.run(&["show", "mine"]).ok();
    assert!(shown.contains("succeeded") && shown.contains("4 of 4") && shown.contains("ckpt_"), "{shown}");
    let config = user.run(&["show", "mine", "--config", "toml"]).ok();
    assert!(config.contains("[rloo]"), "{config}");
    user.write("again.toml", config);
    assert!(user.run(&["submit", "again.toml", "--dry-run"]).ok().contains("valid; nothing was submitted"));

    let retried = user.run(&["retry", "mine"]).ok();
    let retried = retried.trim();
    assert_eq!(server.get(&format!("/jobs/{retried}")).await["parent"], json!(id));
    user.run(&["wait", retried]).ok();
    let origins = ["2", "last", "4"].map(|step| format!("{id}@{step}"));
    user.run(&["fork", &origins[0], &format!("{id}@3")]).failed(3, "steps 4, 2");
    let forked = user.run(&["fork", &origins[0], &origins[1], &origins[2], "--set", "training.max_steps=5"]);
    assert!(forked.err.contains("of step 2") && forked.err.contains("of step 4"), "{forked:?}");
    let all = forked.ok();
    let all: Vec<&str> = all.lines().collect();
    assert_eq!(all.len(), 2, "a checkpoint that is named twice is one: {all:?}");
    user.run(&["wait", all[0], "@last"]).ok();
    for forked in &all {
        assert_eq!(server.get(&format!("/jobs/{forked}")).await["step"], json!(5));
    }
    let forked = all[0].to_owned();
    let compared = user.run(&["compare", &id, &forked]).ok();
    assert!(compared.contains("/training/max_steps") && compared.contains("reward last"), "{compared}");

    let generated = user.run(&["generate", &id, "-p", "Say one.", "-n", "2", "--temperature", "0"]);
    assert!(generated.err.contains("ckpt_"), "{generated:?}");
    let generated = generated.ok();
    assert!(["base 1", "base 2", "trained 1", "trained 2"].iter().all(|head| generated.contains(head)), "{generated}");

    user.run(&["delete", &id]).failed(2, "--yes");
    user.run(&["show", &id]).ok();
    user.run(&["delete", &id, retried, "--yes"]).ok();
    user.run(&["show", &id]).failed(3, "");
    assert!(user.run(&["delete", &id, "--yes"]).err.contains("does not exist"));
    user.run(&["delete", &id, "--yes"]).ok();
}

#[tokio::test]
async fn one_job_that_cannot_be_retried_does_not_stop_the_others() {
    let (server, user) = start("none");
    let queued = user.submit(&named("queued", 2));
    let ended = user.submit(&named("ended", 2));
    user.run(&["cancel", "ended"]).ok();
    let retried = user.run(&["retry", "queued", "ended"]);
    retried.failed(1, &format!("{queued}: "));
    assert!(retried.err.contains("succeeded for 1 of 2 jobs"), "{retried:?}");
    assert_eq!(server.get(&format!("/jobs/{}", retried.out.trim())).await["parent"], json!(ended));
}

#[tokio::test]
async fn every_end_has_its_exit_code_and_moves_may_be_repeated() {
    let (server, user) = start("cpu");
    let changing = model_copy(&user.path("changing"));
    user.run(&["models", "add", "changing", changing.to_str().unwrap()]).ok();
    let first = user.submit(&endless("first"));
    server.job_when(&first, "a checkpoint", |job| job["step"].as_u64() >= Some(2)).await;

    user.run(&["wait", &first, "--timeout", "0.5s"]).failed(124, "--timeout");
    assert!(user.run(&["pause", "first"]).ok().contains(&first));
    user.run(&["wait", &first, "--until-paused"]).failed(7, "rlood resume");
    user.run(&["pause", "first"]).ok();
    assert!(
        user.run(&["resume", "first"]).ok().contains("queued")
            || !user.run(&["list", "--state", "running"]).out.is_empty()
    );
    user.run(&["resume", "first"]).ok();

    // The second job waits in the queue while its model is replaced.
    let mut second = named("second", 4);
    second["model"] = json!("changing");
    let second = user.submit(&second);
    let config = std::fs::read_to_string(changing.join("config.json")).unwrap();
    std::fs::write(changing.join("config.json"), format!("{config}\n")).unwrap();
    user.run(&["cancel", "first", "second@"]).failed(3, "second@");
    user.run(&["cancel", "first"]).ok();
    user.run(&["wait", &first]).failed(6, "cancelled");
    let failed = user.run(&["wait", &second]);
    failed.failed(1, "model_changed");
    assert!(failed.err.contains("rlood retry"), "{failed:?}");
    user.run(&["wait", &first, &second]).failed(1, "model_changed");
    user.run(&["watch", &first]).failed(6, "cancelled");
    user.run(&["events", "-f", &second]).failed(1, "");
    user.run(&["logs", "-f", &second]).failed(1, "");
    assert!(user.run(&["cancel", &first]).ok().contains("cancelled"), "it is cancelled already");
    user.run(&["cancel", &second, &first]).failed(1, &second);
}

#[tokio::test]
async fn a_server_that_is_not_there_or_not_open_has_its_own_exit_code() {
    let (_server, mut user) = start("none");
    user.run(&["show", "job_01jd0000000000000000000000"]).failed(3, "request req_");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    user.run(&["list", "--server", &format!("http://{free}")]).failed(5, "cannot connect");
    user.run(&["list", "--server", "nonsense"]).failed(2, "'nonsense'");
    user.run(&["list", "--state", "asleep"]).failed(2, "asleep");
    user.run(&["keys", "create", "--scopes", "admin", "--data-dir", "data"]).ok();
    let refused = user.run(&["list"]);
    refused.failed(4, "API key");
    assert!(refused.err.contains("rlood login"), "{refused:?}");
    user.variables.push(("RLOOD_KEY".to_owned(), "rld_of_nobody_at_all_000".to_owned()));
    user.run(&["list"]).failed(4, "");
}

#[tokio::test]
async fn without_a_profile_a_local_server_is_tried() {
    let user = super::User::new();
    let done = user.run(&["list"]);
    // Another server may be listening at the default address of this machine.
    assert!(done.code == 0 || done.err.contains("http://127.0.0.1:8080") || done.code == 4, "{done:?}");
    let help: Value = json!(user.run(&["submit", "--help"]).ok());
    assert!(help.as_str().unwrap().contains("http://127.0.0.1:8080"));
}
