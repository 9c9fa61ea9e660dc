use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use axum::http::Method;
use rlood_hub::{HubError, Progress, Push, PushContent, PushFile, Pushed, Repo, RepoKind, Token};
use rlood_types::digest::Sha256Digest;

use super::fake::uploads::{OTHERS, READ_TOKEN, WRITE_TOKEN};
use super::fake::{Faults, Running, start};

const REPO: &str = "ann/adapter";

/// A small text, and two files that become LFS objects.
pub fn files() -> BTreeMap<String, Vec<u8>> {
    let noise = |seed: u32, length: u32| (0..length).map(|at| (at.wrapping_mul(seed) >> 9) as u8).collect::<Vec<u8>>();
    [
        ("README.md", b"---\nlibrary_name: peft\n---\n# A model\n".to_vec()),
        ("adapter_config.json", br#"{"peft_type": "LORA"}"#.to_vec()),
        ("adapter_model.safetensors", noise(2_654_435_761, 900_000)),
        ("tokenizer.json", noise(40_503, 300_001)),
        ("empty.txt", Vec::new()),
    ]
    .map(|(path, bytes)| (path.to_owned(), bytes))
    .into()
}

/// The files as a push: the README from memory, the others from a folder.
pub fn push_of(repo: &str, dir: &Path, files: &BTreeMap<String, Vec<u8>>) -> Push {
    let file = |(path, bytes): (&String, &Vec<u8>)| {
        let content = match path.as_str() {
            "README.md" => PushContent::Bytes(bytes.clone()),
            _ => {
                let at = dir.join(path);
                std::fs::write(&at, bytes).unwrap();
                PushContent::File { path: at, size_bytes: bytes.len() as u64, sha256: Sha256Digest::of(bytes) }
            }
        };
        PushFile { path: path.clone(), content }
    };
    Push {
        repo: Repo::parse(RepoKind::Model, repo).unwrap(),
        is_private: false,
        message: "Upload a model".to_owned(),
        files: files.iter().map(file).collect(),
        is_stale: |path| path.starts_with("old-"),
        is_foreign: |path| path == "model.safetensors",
    }
}

async fn pushed(running: &Running, push: &Push) -> Result<Pushed, HubError> {
    let progress = Progress::default();
    let hub = running.client().with_token(Token::new(WRITE_TOKEN));
    let done = hub.push(push, &progress).await?;
    assert_eq!(progress.done_bytes(), push.total_bytes());
    Ok(done)
}

fn times(count: u32) -> AtomicU32 {
    AtomicU32::new(count)
}

#[tokio::test]
async fn every_fault_that_passes_ends_with_the_right_bytes_in_one_commit() {
    let cut = |cuts, part_bytes| Faults {
        upload_cut_after: Some(70_000),
        upload_cuts: times(cuts),
        part_bytes,
        ..Faults::default()
    };
    for (name, faults) in [
        ("none", Faults::default()),
        ("cuts", cut(3, None)),
        ("parts", Faults { part_bytes: Some(250_000), ..Faults::default() }),
        ("parts of the whole", Faults { part_bytes: Some(900_000), ..Faults::default() }),
        ("parts, cuts", cut(4, Some(250_000))),
        ("expired addresses", Faults { uploads_expired: times(2), ..Faults::default() }),
        (
            "expired addresses of parts",
            Faults { uploads_expired: times(3), part_bytes: Some(250_000), ..Faults::default() },
        ),
        ("limited", Faults { limited: times(2), ..Faults::default() }),
        ("commit refused", Faults { commits_refused: times(2), ..Faults::default() }),
        ("commit not answered", Faults { commits_unanswered: times(1), ..Faults::default() }),
    ] {
        let running = start(BTreeMap::new(), faults).await;
        let (dir, files) = (tempfile::tempdir().unwrap(), files());
        let done = pushed(&running, &push_of(REPO, dir.path(), &files)).await;
        let done = done.unwrap_or_else(|error| panic!("{name}: {error}"));
        let uploads = &running.fake.uploads;
        assert!(uploads.files(REPO, "main") == files, "{name}");
        assert_eq!(uploads.commits(REPO), 2, "{name}");
        assert_eq!(done.url, format!("{}/{REPO}", running.url));
        for seen in running.seen() {
            assert_eq!(seen.authorization.is_some(), !seen.cdn, "{name}: {seen:?}");
        }
    }
}

#[tokio::test]
async fn a_second_push_uploads_what_changed_and_deletes_what_the_first_left() {
    let running = start(BTreeMap::new(), Faults::default()).await;
    let (dir, mut files) = (tempfile::tempdir().unwrap(), files());
    files.insert("old-1.bin".to_owned(), vec![1; 5]);
    let first = pushed(&running, &push_of(REPO, dir.path(), &files)).await.unwrap();
    assert!(first.is_new);
    let again = pushed(&running, &push_of(REPO, dir.path(), &files)).await.unwrap();
    assert_eq!(again, Pushed { is_new: false, ..first.clone() });

    let received = running.fake.received_bytes.load(Ordering::SeqCst);
    files.remove("old-1.bin");
    files.insert("tokenizer.json".to_owned(), vec![3; 20_000]);
    let second = pushed(&running, &push_of(REPO, dir.path(), &files)).await.unwrap();
    assert!(second.is_new && second.commit != first.commit);
    assert_eq!(running.fake.received_bytes.load(Ordering::SeqCst) - received, 20_000);
    let uploads = &running.fake.uploads;
    assert!(uploads.files(REPO, "main") == files);

    // A branch of its own; the main branch stays as it is.
    files.insert("adapter_config.json".to_owned(), b"{}".to_vec());
    let branch = pushed(&running, &push_of("ann/adapter@step-20", dir.path(), &files)).await.unwrap();
    assert!(branch.url.ends_with("/ann/adapter/tree/step-20"), "{}", branch.url);
    assert!(uploads.files(REPO, "step-20") == files && uploads.files(REPO, "main") != files);
}

#[tokio::test]
async fn a_push_that_was_stopped_continues_with_the_files_that_are_missing() {
    let held = Arc::new(AtomicBool::new(true));
    let running = start(BTreeMap::new(), Faults { uploads_held: held.clone(), ..Faults::default() }).await;
    let (dir, mut files) = (tempfile::tempdir().unwrap(), files());
    // More than the buffers of the connection hold, so that the storage has not got all of it when the push stops.
    files.insert("adapter_model.safetensors".to_owned(), (0..32 << 20).map(|at: u32| (at >> 8) as u8).collect());
    let push = push_of(REPO, dir.path(), &files);
    // The Hub has one of the objects from before.
    let (tokenizer, weights) = (&files["tokenizer.json"], &files["adapter_model.safetensors"]);
    let known = Sha256Digest::of(tokenizer).to_string();
    running.fake.uploads.objects.lock().unwrap().insert(known, tokenizer.clone());
    let hub = running.client().with_token(Token::new(WRITE_TOKEN));
    let progress = Progress::default();
    let watched = async {
        while running.fake.received_bytes.load(Ordering::SeqCst) < weights.len() as u64 / 2 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        done = hub.push(&push, &progress) => panic!("{done:?}"),
        () = watched => {}
    }
    assert!(progress.done_bytes() >= tokenizer.len() as u64);
    assert_eq!(running.fake.uploads.commits(REPO), 1, "an interrupted push makes no commit");
    held.store(false, Ordering::SeqCst);
    let before = running.seen().len();
    pushed(&running, &push).await.unwrap();
    let puts = running.seen().split_off(before).into_iter().filter(|seen| seen.method == Method::PUT);
    let puts: Vec<String> = puts.map(|seen| seen.path).collect();
    assert_eq!(puts, [format!("/lfs/{}", Sha256Digest::of(weights))]);
    assert!(running.fake.uploads.files(REPO, "main") == files);
}

#[tokio::test]
async fn what_does_not_pass_says_why_and_what_to_do() {
    let unavailable = Faults { commits_refused: times(u32::MAX), ..Faults::default() };
    let elsewhere = |to: &str| Faults { upload_to: Some(to.to_owned()), ..Faults::default() };
    let cut = Faults { upload_cut_after: Some(1), upload_cuts: times(u32::MAX), ..Faults::default() };
    for (repo, token, faults, expected) in [
        (REPO, None, Faults::default(), "needs a token"),
        (REPO, Some("hf_wrong"), Faults::default(), "rejects the token"),
        (REPO, Some(READ_TOKEN), Faults::default(), "may not create ann/adapter"),
        ("eve/model", Some(WRITE_TOKEN), Faults::default(), "may create repositories in eve"),
        (OTHERS, Some(WRITE_TOKEN), Faults::default(), "may not write to bob/taken"),
        (REPO, Some(WRITE_TOKEN), Faults { full: true, ..Faults::default() }, "no room for ann/adapter"),
        (REPO, Some(WRITE_TOKEN), unavailable, "503"),
        (REPO, Some(WRITE_TOKEN), cut, "cannot be reached"),
        (REPO, Some(WRITE_TOKEN), elsewhere("http://169.254.169.254"), "not permitted"),
        (REPO, Some(WRITE_TOKEN), elsewhere("file:///etc"), "not permitted"),
    ] {
        let running = start(BTreeMap::new(), faults).await;
        let (dir, files) = (tempfile::tempdir().unwrap(), files());
        let hub = running.client().with_token(token.and_then(Token::new));
        let error = hub.push(&push_of(repo, dir.path(), &files), &Progress::default()).await.unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        assert!(!text.contains("signature=") && !text.contains("_and_secret"), "{text}");
        let repos = running.fake.uploads.repos.lock().unwrap();
        let commits: usize = repos.values().map(|repo| repo.commits.len()).sum();
        assert_eq!(commits, repos.len(), "{expected}: no commit is made");
        assert_eq!(error.is_transient(), matches!(expected, "503" | "cannot be reached"), "{error}");
    }
}

#[tokio::test]
async fn a_push_never_mixes_with_another_kind_of_model_and_never_publishes_by_mistake() {
    let running = start(BTreeMap::new(), Faults::default()).await;
    let (dir, files) = (tempfile::tempdir().unwrap(), files());
    let mut push = push_of(REPO, dir.path(), &files);
    pushed(&running, &push).await.unwrap();
    push.is_foreign = |path| path == "adapter_model.safetensors";
    let error = pushed(&running, &push).await.unwrap_err().to_string();
    assert!(error.contains("another kind of model (it has the file adapter_model.safetensors)"), "{error}");

    let mut push = push_of(REPO, dir.path(), &files);
    push.is_private = true;
    let error = pushed(&running, &push).await.unwrap_err().to_string();
    assert!(error.contains("is public, but a private repository was requested"), "{error}");
    push.repo = Repo::parse(RepoKind::Model, "ann/secret").unwrap();
    pushed(&running, &push).await.unwrap();
    assert!(running.fake.uploads.repos.lock().unwrap()["ann/secret"].private);

    let mut ignored = push_of("ann/other", dir.path(), &files);
    ignored.files[0].path = "notes.ignored".to_owned();
    let error = pushed(&running, &ignored).await.unwrap_err().to_string();
    assert!(error.contains(".gitignore excludes notes.ignored"), "{error}");
}

#[tokio::test]
async fn offline_nothing_is_sent() {
    let running = start(BTreeMap::new(), Faults::default()).await;
    let dir = tempfile::tempdir().unwrap();
    let hub = running.client_with(|settings| {
        settings.offline = true;
        settings.token = Token::new(WRITE_TOKEN);
    });
    let error = hub.push(&push_of(REPO, dir.path(), &files()), &Progress::default()).await.unwrap_err();
    assert!(error.to_string().contains("offline mode is on"), "{error}");
    assert!(running.seen().is_empty());
}

#[tokio::test]
async fn a_file_that_changes_during_the_push_makes_no_commit() {
    let running = start(BTreeMap::new(), Faults::default()).await;
    let (dir, files) = (tempfile::tempdir().unwrap(), files());
    for (path, bytes) in [("adapter_config.json", b"{".to_vec()), ("tokenizer.json", vec![7; 300_001])] {
        let push = push_of(REPO, dir.path(), &files);
        std::fs::write(dir.path().join(path), bytes).unwrap();
        let error = pushed(&running, &push).await.unwrap_err().to_string();
        assert!(error.contains("changed during the push") || error.contains("400"), "{path}: {error}");
        assert_eq!(running.fake.uploads.commits(REPO), 1, "{path}");
    }
}
