//! Backups: created while the server runs, verified byte for byte, restored to a server that resumes its jobs.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rlood::event::Metrics;
use rlood::id::JobId;
use rlood::store::{CheckpointRow, Claimed, Store};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::processes::{Server, model_copy, register, spec};
use crate::setting::{Setting, T0, plan};

pub fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rlood"));
    command.args(arguments).env_remove("RLOOD_API_KEY").env_remove("RLOOD_DATA_DIR").output().unwrap()
}

pub fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub fn said(output: &Output) -> String {
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
    let picture = rlood_test_support::images::png(5, 5, 0);
    let text = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, &picture);
    let row = json!({"prompt": [{"role": "user", "content": "?"}], "images": [{"bytes_b64": text}]});
    let dataset = server.post("/datasets", &json!([row])).await["id"].as_str().unwrap().to_owned();
    let sha256 = hex::encode(<sha2::Sha256 as sha2::Digest>::digest(&picture));
    let image = format!("/datasets/{dataset}/images/{sha256}");
    let running = server.submit(&spec("tiny", 100_000)).await;
    server.wait_for_checkpoint(&running).await;

    let made = run(&["backup", path(&copy), "--data-dir", path(&data)]);
    assert!(made.status.success(), "{}", said(&made));
    assert_eq!(server.get(&format!("/jobs/{running}")).await["state"], "running", "nobody waited");
    let adapter = server.adapter(&done, None).await;
    let events = server.get(&format!("/jobs/{done}/events?limit=100")).await;
    // A target that is in use or not empty is refused.
    for (target, why) in [(&data, "a server is running"), (&copy, "not empty")] {
        let refused = run(&["restore", path(&copy), "--data-dir", path(target)]);
        assert!(!refused.status.success() && said(&refused).contains(why), "{}", said(&refused));
    }
    assert!(!run(&["backup", path(&copy), "--data-dir", path(&data)]).status.success(), "not into one that is there");
    drop(server);

    let back = run(&["restore", path(&copy), "--data-dir", path(&restored)]);
    assert!(back.status.success(), "{}", said(&back));
    let server = Server::start(&restored, "cpu");
    assert_eq!(server.adapter(&done, None).await, adapter);
    assert_eq!(server.bytes(&image).await, picture);
    assert_eq!(server.get(&format!("/jobs/{done}/events?limit=100")).await, events);
    let resumed = server.job_when(&running, "its second attempt", |view| view["attempt"].as_u64() > Some(1)).await;
    assert_eq!(resumed["state"], "running", "{resumed}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_running_job_goes_on_from_is_in_every_backup() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let server = Server::start(&data, "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let mut hasty = spec("tiny", 100_000);
    hasty["checkpoints"] = json!({"every_steps": 1, "keep_last": 1, "keep_best": 0});
    let running: JobId = server.submit(&hasty).await.parse().unwrap();
    // Provides data to copy while the job runs.
    let mut waiting = spec("tiny", 2);
    let filler = "x".repeat(500_000);
    let records: Vec<Value> = (0..12).map(|n| json!({"prompt": format!("Say {n}."), "filler": filler})).collect();
    waiting["dataset"] = json!({ "records": records });
    server.submit(&waiting).await;
    server.wait_for_checkpoint(&running.to_string()).await;
    for round in 0..4 {
        let copy = dir.path().join(format!("copy-{round}"));
        let made = run(&["backup", path(&copy), "--data-dir", path(&data)]);
        assert!(made.status.success() && !said(&made).contains("left out"), "{}", said(&made));
        let store = Store::open(&copy.join("rlood.db")).await.unwrap();
        let newest = store.checkpoint_latest(running).await.unwrap().expect("a checkpoint of the running job");
        store.close().await;
        let files = copy.join(format!("checkpoints/{running}/{}-{}", newest.step, newest.attempt));
        assert!(newest.files.iter().all(|file| files.join(&file.name).is_file()), "{newest:?}");
    }
    let left: Vec<_> =
        std::fs::read_dir(data.join("staging")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("backup-")), "{left:?}");
}

/// Publishes checkpoints one after the other, from step 2, until it is stopped; then the last step.
fn keep_publishing(setting: &Arc<Setting>, claimed: Claimed) -> (Arc<AtomicBool>, JoinHandle<u64>) {
    let (setting, done) = (setting.clone(), Arc::new(AtomicBool::new(false)));
    let told = done.clone();
    let publish = tokio::spawn(async move {
        let mut step = 1;
        while !told.load(Ordering::Relaxed) {
            step += 1;
            setting.publish(&claimed, step, &Metrics::new()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        step
    });
    (done, publish)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_checkpoint_that_a_copy_names_was_seen_before_it_could_go() {
    let setting = Arc::new(Setting::new().await);
    setting.job().await;
    let worker = setting.worker().await;
    let claimed = setting.claim(worker, T0).await.unwrap();
    setting.publish(&claimed, 1, &Metrics::new()).await.unwrap();
    let (done, publish) = keep_publishing(&setting, claimed);
    let source = Store::open_as_is(&setting.files.database()).await.unwrap();
    // Waits until other writes happened between ten of the copies, however slow the disk is.
    let (mut newest, end) = (HashSet::new(), Instant::now() + Duration::from_secs(120));
    while newest.len() < 10 {
        assert!(Instant::now() < end, "others write between the copies: {newest:?}");
        let copy = setting.dir.path().join("copy.db");
        let mut seen = HashSet::new();
        let mut keep = |rows: &[CheckpointRow]| {
            seen.extend(rows.iter().map(|row| row.id));
            // Leaves time for other writers.
            std::thread::sleep(Duration::from_millis(30));
        };
        source.snapshot_to(&copy, &mut keep).await.unwrap();
        let copied = Store::open(&copy).await.unwrap();
        let named = copied.checkpoint_all().await.unwrap();
        copied.close().await;
        assert!(!named.is_empty() && named.iter().all(|row| seen.contains(&row.id)), "{named:?}, seen {seen:?}");
        newest.extend(named.iter().map(|row| row.step).max());
        std::fs::remove_file(&copy).unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    done.store(true, Ordering::Relaxed);
    publish.await.unwrap();
    source.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_backup_that_a_running_job_outruns_fails_and_one_that_lacks_lost_files_says_so() {
    let setting = Arc::new(Setting::new().await);
    let mut plan = plan(setting.dataset);
    (plan.checkpoints.keep_last, plan.checkpoints.keep_best) = (1, 0);
    setting.job_of(&plan, 0, T0).await.unwrap();
    let worker = setting.worker().await;
    let claimed = setting.claim(worker, T0).await.unwrap();
    setting.publish(&claimed, 1, &Metrics::new()).await.unwrap();
    // Filler data, so that the job advances during the copy.
    setting.sql("INSERT INTO server_secrets VALUES ('filler', hex(zeroblob(40000000)))").await.unwrap();
    let other = tempfile::tempdir().unwrap();
    let copy = other.path().join("copy");
    // Rows without files: every file is missing when the backup copies it.
    let (done, publish) = keep_publishing(&setting, claimed);
    let failed = run(&["backup", path(&copy), "--data-dir", path(setting.dir.path())]);
    assert!(!failed.status.success() && said(&failed).contains("faster than they can be copied"), "{}", said(&failed));
    assert!(!copy.exists(), "nothing is left of it");
    done.store(true, Ordering::Relaxed);
    let step = publish.await.unwrap();
    // The newest file is lost in the source too, so another attempt would not find it.
    let made = run(&["backup", path(&copy), "--data-dir", path(setting.dir.path())]);
    assert!(made.status.success(), "{}", said(&made));
    assert!(said(&made).contains(&format!("/{step}-1: manifest.json: the file no longer exists")), "{}", said(&made));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_of_the_demo_goes_on_where_its_backup_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let (data, copy, restored) = (dir.path().join("data"), dir.path().join("copy"), dir.path().join("restored"));
    let server = Server::start(&data, "none");
    let job = server.post("/demo", &json!({})).await["id"].as_str().unwrap().to_owned();
    let made = run(&["backup", path(&copy), "--data-dir", path(&data)]);
    assert!(made.status.success(), "{}", said(&made));
    drop(server);
    std::fs::remove_dir_all(&data).unwrap();
    let back = run(&["restore", path(&copy), "--data-dir", path(&restored)]);
    assert!(back.status.success(), "{}", said(&back));
    let server = Server::start(&restored, "cpu");
    let begun = |view: &Value| view["state"] == "failed" || view["step"].as_u64() > Some(0);
    let view = server.job_when(&job, "a step", begun).await;
    assert_ne!(view["state"], "failed", "{view}");
    let another = server.post("/demo", &json!({})).await;
    assert_eq!(another["plan"]["model"], view["plan"]["model"], "the same bytes");
}

fn make_backup(dir: &Path) -> std::path::PathBuf {
    let (data, copy) = (dir.join("data"), dir.join("copy"));
    let made = run(&["keys", "create", "--scopes", "read", "--data-dir", path(&data)]);
    assert!(made.status.success(), "{}", said(&made));
    assert!(run(&["backup", path(&copy), "--data-dir", path(&data)]).status.success());
    copy
}

fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_backup_lies_outside_of_what_it_is_a_copy_of() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    assert!(run(&["keys", "create", "--scopes", "read", "--data-dir", path(&data)]).status.success());
    let before = names_in(&data);
    for target in [data.join("copy"), data.join("a/b"), data.join("../data/copy"), data.join("checkpoints")] {
        let refused = run(&["backup", path(&target), "--data-dir", path(&data)]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(said(&refused).contains("inside the data directory"), "{}", said(&refused));
    }
    assert_eq!(names_in(&data), before);
    // A target next to the backup, also addressed by a path through it.
    let beside = data.join("../beside");
    assert!(run(&["backup", path(&beside), "--data-dir", path(&data)]).status.success());
}

#[test]
fn a_restore_fills_a_directory_that_is_there_and_does_not_replace_it() {
    let dir = tempfile::tempdir().unwrap();
    let copy = make_backup(dir.path());
    let restore = |target: &Path| run(&["restore", path(&copy), "--data-dir", path(target)]);
    // An existing directory that cannot be renamed, like the root of a volume.
    let volume = dir.path().join("volume");
    std::fs::create_dir_all(volume.join("lost+found")).unwrap();
    let inode = std::fs::metadata(&volume).unwrap().ino();
    let back = restore(&volume);
    assert!(back.status.success(), "{}", said(&back));
    assert_eq!(std::fs::metadata(&volume).unwrap().ino(), inode);
    let names = names_in(&volume);
    assert!(names.contains(&"rlood.db".to_owned()) && names.contains(&"lost+found".to_owned()), "{names:?}");
    assert!(!names.iter().any(|name| name.starts_with('.')), "{names:?}");
    assert!(said(&run(&["keys", "list", "--data-dir", path(&volume)])).contains("active"));
    // A link to a directory, and a dangling one.
    let (behind, link, broken) = (dir.path().join("behind"), dir.path().join("link"), dir.path().join("broken"));
    std::fs::create_dir(&behind).unwrap();
    std::os::unix::fs::symlink(&behind, &link).unwrap();
    std::os::unix::fs::symlink(dir.path().join("nowhere"), &broken).unwrap();
    let back = restore(&link);
    assert!(back.status.success() && behind.join("rlood.db").is_file(), "{}", said(&back));
    assert!(link.is_symlink());
    let refused = restore(&broken);
    assert!(!refused.status.success() && said(&refused).contains("not a directory"), "{}", said(&refused));
}

#[test]
fn a_refused_restore_leaves_its_target_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let copy = make_backup(dir.path());
    let restore = |target: &Path| run(&["restore", path(&copy), "--data-dir", path(target)]);
    let stopped = dir.path().join("stopped");
    std::fs::create_dir(&stopped).unwrap();
    std::fs::copy(copy.join("rlood.db"), stopped.join("rlood.db")).unwrap();
    let refused = restore(&stopped);
    assert!(!refused.status.success() && said(&refused).contains("not empty"), "{}", said(&refused));
    assert_eq!(names_in(&stopped), ["rlood.db"]);
    // A damaged backup leaves an empty target empty.
    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let mut bytes = std::fs::read(copy.join("rlood.db")).unwrap();
    bytes.push(0);
    std::fs::write(copy.join("rlood.db"), bytes).unwrap();
    let refused = restore(&empty);
    assert!(!refused.status.success() && said(&refused).contains("damaged"), "{}", said(&refused));
    assert!(names_in(&empty).is_empty(), "{:?}", names_in(&empty));
}

#[test]
fn keys_are_listed_and_revoked_only_where_a_server_is() {
    let dir = tempfile::tempdir().unwrap();
    let typo = dir.path().join("typo");
    for action in [&["list"][..], &["revoke", "key_01jd0000000000000000000000"]] {
        let refused = run(&[&["keys"][..], action, &["--data-dir", path(&typo)]].concat());
        assert!(
            !refused.status.success() && said(&refused).contains("contains no rlood database"),
            "{}",
            said(&refused)
        );
        assert!(!typo.exists());
    }
    let made = run(&["keys", "create", "--scopes", "read", "--data-dir", path(&typo)]);
    assert!(made.status.success(), "{}", said(&made));
    assert!(run(&["keys", "list", "--data-dir", path(&typo)]).status.success());
}

#[tokio::test]
async fn a_restore_that_drops_keys_leaves_no_way_in_but_a_new_key() {
    let dir = tempfile::tempdir().unwrap();
    let (data, copy, restored) = (dir.path().join("data"), dir.path().join("copy"), dir.path().join("restored"));
    let created = run(&["keys", "create", "--scopes", "admin", "--data-dir", path(&data)]);
    let key = String::from_utf8(created.stdout).unwrap().trim().to_owned();
    assert!(run(&["backup", path(&copy), "--data-dir", path(&data)]).status.success());
    let back = run(&["restore", path(&copy), "--drop-keys", "--data-dir", path(&restored)]);
    assert!(back.status.success(), "{}", said(&back));
    assert!(said(&back).contains("removed 1 API keys") && said(&back).contains("rlood keys create"), "{}", said(&back));
    let listed = run(&["keys", "list", "--json", "--data-dir", path(&restored)]);
    assert!(listed.status.success() && !said(&listed).contains("key_"), "{}", said(&listed));

    let server = Server::start(&restored, "none");
    let status = async |key: &str| {
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        client.get(format!("{}/jobs", server.url)).bearer_auth(key).send().await.unwrap().status().as_u16()
    };
    assert_eq!(status(&key).await, 401, "requests need a key, and this one is gone");
    let created = run(&["keys", "create", "--scopes", "admin", "--data-dir", path(&restored)]);
    assert_eq!(status(String::from_utf8(created.stdout).unwrap().trim()).await, 200);
    // A server without keys has nothing to drop.
    let (data, copy, restored) = (dir.path().join("data2"), dir.path().join("copy2"), dir.path().join("restored2"));
    drop(Server::start(&data, "none"));
    assert!(run(&["backup", path(&copy), "--data-dir", path(&data)]).status.success());
    assert!(run(&["restore", path(&copy), "--drop-keys", "--data-dir", path(&restored)]).status.success());
    let open = Server::start(&restored, "none");
    assert_eq!(open.get("/jobs").await["data"], json!([]));
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
            "outside the backup",
        ),
        (
            &|d| d["files"]["datasets/ds_x.ndjson"] = json!({"size_bytes": 1, "sha256": "00"}),
            "does not contain this file",
        ),
        (&|d| d["files"]["rlood.db"]["sha256"] = json!("00"), "hash differs"),
        (&|d| d["format"] = json!(2), "format 2"),
        (&|d| d["files"] = json!({}), "does not list rlood.db"),
    ] {
        written(change);
        let (code, text) = restore();
        assert!(code == Some(1) && text.contains(why), "{why}: {text}");
        assert!(!restored.exists());
    }
    std::fs::remove_file(&manifest).unwrap();
    assert!(restore().1.contains("not a backup, or it was interrupted"));
    std::fs::write(&manifest, &good).unwrap();
    // The target may not be the backup itself, a file, or below a file.
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    for (target, why) in [(copy.join("data"), "inside the backup"), (file.clone(), "not a directory")] {
        let refused = run(&["restore", path(&copy), "--data-dir", path(&target)]);
        assert!(!refused.status.success() && said(&refused).contains(why), "{}", said(&refused));
    }
    let refused = run(&["backup", path(&file), "--data-dir", path(&data)]);
    assert!(!refused.status.success() && said(&refused).contains("not a directory"), "{}", said(&refused));
    assert_eq!(restore().0, Some(0));
    // The backup contains the key.
    let listed = run(&["keys", "list", "--data-dir", path(&restored)]);
    assert!(said(&listed).contains("key_") && said(&listed).contains("active"), "{}", said(&listed));
}
