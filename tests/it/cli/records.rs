//! The records of a job; and `--json`, which prints the API's own JSON.

use serde_json::{Value, json};

use super::{endless, named, start};

#[tokio::test]
async fn what_a_job_recorded_is_printed_for_people() {
    let (_server, user) = start("cpu");
    let mut job = named("told", 4);
    job["eval"] = json!({"dataset": {"records": [{"prompt": "Say nine."}]}, "every_steps": 2});
    let id = user.submit(&job);
    user.run(&["wait", &id]).ok();
    let samples = user.run(&["samples", &id, "--step", "3", "--best", "2"]).ok();
    assert_eq!(samples.matches("step 3  train").count(), 2, "{samples}");
    assert!(samples.contains("  > ") && samples.contains("Say the number"), "{samples}");
    let full = user.run(&["samples", &id, "--phase", "eval", "--limit", "0", "--full"]).ok();
    assert!(full.contains("Say nine.") && !full.contains("  train  "), "{full}");
    assert_eq!(user.run(&["samples", &id, "--contains", "no such text"]).err, "no samples\n");
    let metrics = user.run(&["metrics", &id]).ok();
    assert!(metrics.lines().count() == 6 && metrics.starts_with("step  reward"), "{metrics}");
    let two = user.run(&["metrics", &id, "--keys", "kl", "--tail", "2"]);
    assert!(two.err.contains("2 earlier steps"), "{two:?}");
    assert_eq!(two.ok().lines().count(), 3);
    let csv = user.run(&["metrics", &id, "--csv", "--keys", "reward,kl", "--min-step", "2", "--max-step", "3"]).ok();
    assert_eq!(csv.lines().map(|line| line.split(',').next().unwrap()).collect::<Vec<_>>(), ["step", "2", "3"]);
    assert!(user.run(&["rewards", &id]).ok().contains("length"));
    let logs = user.run(&["logs", &id]).ok();
    assert!(logs.contains("succeeded"), "{logs}");
    assert_eq!(user.run(&["logs", &id, "--tail", "1"]).ok().lines().next_back(), logs.lines().next_back());
    assert_eq!(user.run(&["logs", "-f", &id]).ok(), logs, "of a job that is over");
    let events = user.run(&["events", &id]).ok();
    assert!(events.contains("job.created") && events.contains("job.succeeded"), "{events}");
    assert_eq!(user.run(&["events", &id, "-f"]).ok(), events);
    let rest = user.run(&["events", &id, "--after", "3"]).ok();
    assert!(events.ends_with(&rest) && rest.lines().count() + 3 == events.lines().count());
}

#[tokio::test]
async fn json_is_the_apis_own() {
    let (server, user) = start("cpu");
    let mut job = named("json", 4);
    job["metadata"] = json!({"team": "a & b"});
    let id = user.submit(&job);
    user.run(&["wait", &id]).ok();
    let other = user.submit(&named("other", 2));
    user.run(&["wait", &other]).ok();
    let checkpoint = server.get(&format!("/jobs/{id}/checkpoints")).await["data"][0]["id"].as_str().unwrap().to_owned();
    let dataset = server.get(&format!("/jobs/{id}")).await["plan"]["dataset"]["id"].as_str().unwrap().to_owned();
    let job = format!("/jobs/{id}");
    for (arguments, path) in [
        (vec!["list"], "/jobs?limit=20".to_owned()),
        (vec!["list", "--label", "team=a & b"], "/jobs?metadata.team=a%20%26%20b".to_owned()),
        (vec!["show", &id], job.clone()),
        (vec!["events", &id], format!("{job}/events?limit=100")),
        (vec!["logs", &id], format!("{job}/logs?limit=100")),
        (vec!["metrics", &id], format!("{job}/metrics")),
        (vec!["samples", &id], format!("{job}/samples?limit=5")),
        (vec!["samples", &id, "--worst", "3"], format!("{job}/samples?limit=3&sort=worst")),
        (vec!["rewards", &id], format!("{job}/rewards")),
        (vec!["compare", &id, &other], format!("/jobs/compare?ids={id},{other}&keys=reward,eval_reward,kl")),
        (vec!["pull", &checkpoint, "-o", "pulled"], format!("/checkpoints/{checkpoint}")),
        (vec!["models", "list"], "/models".to_owned()),
        (vec!["models", "show", "tiny"], "/models/tiny".to_owned()),
        (vec!["datasets", "list"], "/datasets".to_owned()),
        (vec!["datasets", "show", &dataset], format!("/datasets/{dataset}")),
        (vec!["datasets", "rows", &dataset, "--limit", "2"], format!("/datasets/{dataset}/rows?limit=2")),
    ] {
        let printed = user.run(&[&arguments[..], &["--json"]].concat()).ok();
        let sent = String::from_utf8(server.bytes(&path).await).unwrap();
        assert_eq!(printed.trim_end(), sent.trim_end(), "{arguments:?}");
    }

    // Several pages are one document.
    let all = user.run(&["samples", &id, "--limit", "0", "--json"]).json();
    let mut expected: Vec<Value> = Vec::new();
    let mut path = format!("{job}/samples?limit=3");
    loop {
        let page = server.get(&path).await;
        expected.extend(page["data"].as_array().unwrap().iter().cloned());
        let Some(next) = page["next"].as_str() else { break };
        path = format!("{job}/samples?limit=3&after={next}");
    }
    assert_eq!(all, json!({"data": expected, "next": null}));

    // With --follow the output has one object per line.
    let events = server.get(&format!("{job}/events?limit=100")).await["data"].as_array().unwrap().clone();
    let followed = user.run(&["events", "-f", &id, "--json"]).ok();
    let lines: Vec<Value> = followed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines, events);
    let watched = user.run(&["watch", &id, &other, "--json"]).ok();
    let ids: Vec<Value> =
        watched.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone()).collect();
    assert_eq!(ids, [json!(id), json!(other)]);
}

#[tokio::test]
async fn a_list_goes_on_over_pages_and_a_closed_pipe_ends_it_quietly() {
    let (server, user) = start("none");
    for _ in 0..3 {
        user.submit(&named("many", 2));
    }
    for count in 0..120 {
        server.post("/jobs", &named(&format!("job {count}"), 2)).await;
    }
    assert_eq!(user.run(&["list", "-q"]).ok().lines().count(), 20);
    let all = user.run(&["list", "-q", "--limit", "0"]).ok();
    assert_eq!(all.lines().count(), 123);
    let some = user.run(&["list", "-q", "--limit", "110"]).ok();
    assert_eq!(some.lines().collect::<Vec<_>>(), all.lines().take(110).collect::<Vec<_>>());
    assert_eq!(user.run(&["list", "-q", "--name", "many", "--limit", "2"]).ok().lines().count(), 2);
    user.run(&["show", "many"]).failed(2, "3 jobs");

    let mut child = user.command(&["list", "--limit", "0"]);
    let mut child = child.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap()), (Some(0), String::new()));
}

#[tokio::test]
async fn a_pipe_gets_lines_as_the_job_goes_on() {
    let (server, user) = start("cpu");
    let id = user.submit(&endless("lines"));
    let mut child = user.command(&["watch", &id]);
    let mut child = child.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert!(lines.next().unwrap().unwrap().starts_with("step "));
    server.job_when(&id, "a step", |job| job["step"].as_u64() >= Some(1)).await;
    user.run(&["cancel", &id]).ok();
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(rest.last().unwrap().contains("cancelled") && !rest.concat().contains('\u{1b}'), "{rest:?}");
    assert_eq!(child.wait().unwrap().code(), Some(6));
}
