//! Backups: made while the server works, verified byte for byte, restored to a server that goes on.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::processes::{Server, model_copy, register, spec};

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlood"));
    command.args(arguments).env_remove("RLOOD_API_KEY").env_remove("RLOOD_DATA_DIR").output().unwrap()
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_made_while_a_job_runs_restores_to_a_server_that_finishes_it() {
    let dir = tempfile::tempdir().unwrap();
    let (data, copy, restored) = (dir.path().join("data"), dir.path().join("copy"), dir.path().join("restored"));
    let server = Server::start(&data, "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let done = server.submit(&spec("tiny", 2)).await;
    server.job_in_state(&done, "succeeded").await;
    let running = server.submit(&spec("tiny", 100_000)).await;
    server.wait_for_checkpoint(&running).await;

    let made = run(&["backup", path(&copy), "--data-dir", path(&data)]);
    assert!(made.status.success(), "{}", said(&made));
    assert_eq!(server.get(&format!("/jobs/{running}")).await["state"], "running", "nobody waited");
    let adapter = server.bytes(&format!("/jobs/{done}/adapter")).await;
    let events = server.get(&format!("/jobs/{done}/events?limit=100")).await;
    // Not over something that is there.
    for (target, why) in [(&data, "a server is running"), (&copy, "not empty")] {
        let refused = run(&["restore", path(&copy), "--data-dir", path(target)]);
        assert!(!refused.status.success() && said(&refused).contains(why), "{}", said(&refused));
    }
    assert!(!run(&["backup", path(&copy), "--data-dir", path(&data)]).status.success(), "not into one that is there");
    drop(server);

    let back = run(&["restore", path(&copy), "--data-dir", path(&restored)]);
    assert!(back.status.success(), "{}", said(&back));
    let server = Server::start(&restored, "cpu");
    assert_eq!(server.bytes(&format!("/jobs/{done}/adapter")).await, adapter);
    assert_eq!(server.get(&format!("/jobs/{done}/events?limit=100")).await, events);
    let resumed = server.job_when(&running, "its second attempt", |view| view["attempt"].as_u64() > Some(1)).await;
    assert_eq!(resumed["state"], "running", "{resumed}");
}

#[test]
fn keys_are_listed_and_revoked_only_where_a_server_is() {
    let dir = tempfile::tempdir().unwrap();
    let typo = dir.path().join("typo");
    for action in [&["list"][..], &["revoke", "key_01jd0000000000000000000000"]] {
        let refused = run(&[&["keys"][..], action, &["--data-dir", path(&typo)]].concat());
        assert!(!refused.status.success() && said(&refused).contains("holds no database"), "{}", said(&refused));
        assert!(!typo.exists());
    }
    let made = run(&["keys", "create", "--scopes", "read", "--data-dir", path(&typo)]);
    assert!(made.status.success(), "{}", said(&made));
    assert!(run(&["keys", "list", "--data-dir", path(&typo)]).status.success());
}

#[tokio::test]
async fn a_damaged_backup_restores_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (data, copy, restored) = (dir.path().join("data"), dir.path().join("copy"), dir.path().join("restored"));
    let made = run(&["keys", "create", "--scopes", "read", "--data-dir", path(&data)]);
    assert!(made.status.success(), "{}", said(&made));
    assert!(run(&["backup", path(&copy), "--data-dir", path(&data)]).status.success());
    let restore = || {
        let output = run(&["restore", path(&copy), "--data-dir", path(&restored)]);
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(!left.iter().any(|name| name.to_string_lossy().starts_with(".rlood-restore")), "{left:?}");
        (output.status.code(), said(&output))
    };
    let manifest = copy.join("manifest.json");
    let good = std::fs::read_to_string(&manifest).unwrap();
    let written = |change: &dyn Fn(&mut Value)| {
        let mut document: Value = serde_json::from_str(&good).unwrap();
        change(&mut document);
        std::fs::write(&manifest, document.to_string()).unwrap();
    };
    for (change, why) in [
        (
            &(|d: &mut Value| d["files"]["../../evil"] = json!({"size_bytes": 1, "sha256": "00"}))
                as &dyn Fn(&mut Value),
            "leads out",
        ),
        (&|d| d["files"]["datasets/ds_x.ndjson"] = json!({"size_bytes": 1, "sha256": "00"}), "not there"),
        (&|d| d["files"]["rlood.db"]["sha256"] = json!("00"), "bytes are not those"),
        (&|d| d["format"] = json!(2), "format 2"),
        (&|d| d["files"] = json!({}), "lists no rlood.db"),
    ] {
        written(change);
        let (code, text) = restore();
        assert!(code == Some(1) && text.contains(why), "{why}: {text}");
        assert!(!restored.exists());
    }
    std::fs::remove_file(&manifest).unwrap();
    assert!(restore().1.contains("no backup, or one that was interrupted"));
    std::fs::write(&manifest, &good).unwrap();
    // Neither into the backup itself, nor over or below a file.
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    for (target, why) in [(copy.join("data"), "inside the backup"), (file.clone(), "not a directory")] {
        let refused = run(&["restore", path(&copy), "--data-dir", path(&target)]);
        assert!(!refused.status.success() && said(&refused).contains(why), "{}", said(&refused));
    }
    let refused = run(&["backup", path(&file), "--data-dir", path(&data)]);
    assert!(!refused.status.success() && said(&refused).contains("not a directory"), "{}", said(&refused));
    assert_eq!(restore().0, Some(0));
    // The key came along.
    let listed = run(&["keys", "list", "--data-dir", path(&restored)]);
    assert!(said(&listed).contains("key_") && said(&listed).contains("active"), "{}", said(&listed));
}
