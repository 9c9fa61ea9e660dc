use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rlood_hub::{HubError, Progress, Repo, RepoKind, Token};

use super::fake::{COMMIT, Faults, NEXT, Running, model, start};
use super::plans::tiny;

/// Plans and downloads, and checks that the folder contains exactly the files of the plan.
async fn download(running: &Running, dir: &Path) -> Result<Arc<Progress>, HubError> {
    let hub = running.client();
    let plan = hub.plan_model(&tiny()).await?;
    let progress = Arc::new(Progress::default());
    hub.download(&plan, &dir.join("parts"), &dir.join("model"), &progress).await?;
    for file in &plan.files {
        assert_eq!(
            std::fs::read(dir.join("model").join(&file.path)).unwrap(),
            running.fake.files[&file.path],
            "{}",
            file.path
        );
    }
    assert_eq!(progress.done_bytes(), plan.total_bytes());
    assert!(!dir.join("model/modeling_evil.py").exists() && !dir.join("model/pytorch_model.bin").exists());
    assert_eq!(std::fs::read_dir(dir.join("parts")).unwrap().count(), 0, "no part stays behind");
    Ok(progress)
}

fn times(count: u32) -> AtomicU32 {
    AtomicU32::new(count)
}

#[tokio::test]
async fn every_fault_that_passes_ends_with_the_right_bytes() {
    for (name, faults) in [
        ("none", Faults::default()),
        ("cuts", Faults { cut_after: Some(70_000), cuts: times(4), ..Faults::default() }),
        (
            "cuts, ranges ignored",
            Faults { cut_after: Some(70_000), cuts: times(2), ignores_ranges: true, ..Faults::default() },
        ),
        (
            "cuts, ranges forbidden",
            Faults { cut_after: Some(70_000), cuts: times(2), forbids_ranges: true, ..Faults::default() },
        ),
        (
            "cuts, ranges shifted",
            Faults { cut_after: Some(70_000), cuts: times(2), shifts_ranges: true, ..Faults::default() },
        ),
        ("unavailable", Faults { unavailable: times(3), ..Faults::default() }),
        ("limited", Faults { limited: times(2), ..Faults::default() }),
        ("damaged once", Faults { damaged: times(1), ..Faults::default() }),
        ("a byte more", Faults { longer: times(1), ..Faults::default() }),
    ] {
        let running = start(model(), faults).await;
        let dir = tempfile::tempdir().unwrap();
        let done = download(&running, dir.path()).await;
        assert!(done.is_ok(), "{name}: {}", done.unwrap_err());
    }
}

#[tokio::test]
async fn an_interrupted_download_resumes_also_in_another_process() {
    let running = start(model(), Faults { cut_after: Some(70_000), cuts: times(u32::MAX), ..Faults::default() }).await;
    let hub = running.client();
    let plan = hub.plan_model(&tiny()).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (parts, to) = (dir.path().join("parts"), dir.path().join("model"));
    // The future is dropped during the download, as by a cancel or a shutdown of the server.
    let progress = Arc::new(Progress::default());
    let watched = async {
        while progress.done_bytes() < 150_000 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        done = hub.download(&plan, &parts, &to, &progress) => done.unwrap(),
        () = watched => {}
    }
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    let before = running.seen().len();
    hub.download(&plan, &parts, &to, &Arc::new(Progress::default())).await.unwrap();
    let again: Vec<_> = running.seen().split_off(before);
    let cdn: Vec<_> = again.iter().filter(|seen| seen.cdn).collect();
    assert!(!cdn.is_empty() && cdn.iter().all(|seen| seen.range.is_some()), "{cdn:?}");

    // No request is sent for existing files.
    let before = running.seen().len();
    hub.download(&plan, &parts, &to, &Arc::new(Progress::default())).await.unwrap();
    assert_eq!(running.seen().len(), before);
}

const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// Returns the paths in the repository that were requested from the Hub.
fn asked_paths(running: &Running, from: usize) -> Vec<String> {
    let seen = running.seen().split_off(from);
    seen.iter().filter_map(|seen| Some(seen.path.split_once("/resolve/")?.1.split_once('/')?.1.to_owned())).collect()
}

#[tokio::test]
async fn a_cancelled_download_keeps_its_finished_files_also_without_their_folder() {
    let mut files = model();
    files.get_mut(SHARDS[0]).unwrap().truncate(50_000);
    let running = start(files, Faults { held_after: Some(60_000), ..Faults::default() }).await;
    let hub = running.client();
    let plan = hub.plan_model(&tiny()).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (parts, to) = (dir.path().join("parts"), dir.path().join("model"));
    // Everything but the second shard becomes complete.
    let progress = Arc::new(Progress::default());
    let watched = async {
        while progress.done_bytes() < plan.total_bytes() - 140_000
            || !plan.files.iter().all(|file| file.path == SHARDS[1] || to.join(&file.path).is_file())
        {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        done = hub.download(&plan, &parts, &to, &progress) => done.unwrap(),
        () = watched => {}
    }
    std::fs::remove_dir_all(&to).unwrap();
    running.fake.faults.released.store(true, Ordering::SeqCst);
    let before = running.seen().len();
    let progress = Arc::new(Progress::default());
    hub.download(&plan, &parts, &to, &progress).await.unwrap();
    assert_eq!(asked_paths(&running, before), [SHARDS[1]]);
    assert_eq!(progress.done_bytes(), plan.total_bytes());
    for file in &plan.files {
        assert_eq!(std::fs::read(to.join(&file.path)).unwrap(), running.fake.files[&file.path], "{}", file.path);
    }
    assert_eq!(std::fs::read_dir(&parts).unwrap().count(), 0, "no part stays behind");
}

#[tokio::test]
async fn a_second_revision_links_the_files_that_it_shares_with_the_first() {
    let mut files = model();
    files.insert("next/config.json".to_owned(), br#"{"model_type": "llama"}"#.to_vec());
    let running = start(files, Faults::default()).await;
    let hub = running.client();
    let dir = tempfile::tempdir().unwrap();
    let (parts, above) = (dir.path().join("parts"), dir.path().join("models"));
    let plan = hub.plan_model(&tiny()).await.unwrap();
    let first = above.join(COMMIT);
    hub.download(&plan, &parts, &first, &Arc::default()).await.unwrap();
    // A file of the same size whose bytes are damaged is not taken.
    let mut damaged = running.fake.files[SHARDS[1]].clone();
    damaged[7] ^= 1;
    std::fs::write(first.join(SHARDS[1]), &damaged).unwrap();

    let plan = hub.plan_model(&Repo::parse(RepoKind::Model, "fake/tiny@next").unwrap()).await.unwrap();
    assert_eq!(plan.commit, NEXT);
    let second = above.join(NEXT);
    let before = running.seen().len();
    let progress = Arc::new(Progress::default());
    hub.download(&plan, &parts, &second, &progress).await.unwrap();
    let mut asked = asked_paths(&running, before);
    asked.sort();
    assert_eq!(asked, ["config.json", SHARDS[1]]);
    assert_eq!(progress.done_bytes(), plan.total_bytes());
    let inode = |folder: &Path, path: &str| std::fs::metadata(folder.join(path)).unwrap().ino();
    assert_eq!(inode(&first, SHARDS[0]), inode(&second, SHARDS[0]), "the two share the bytes on the disk");
    assert_eq!(std::fs::read(second.join(SHARDS[1])).unwrap(), running.fake.files[SHARDS[1]]);
    assert_eq!(std::fs::read(second.join("config.json")).unwrap(), br#"{"model_type": "llama"}"#);
    assert_eq!(std::fs::read(first.join("config.json")).unwrap(), running.fake.files["config.json"]);
    assert_eq!(std::fs::read(first.join(SHARDS[1])).unwrap(), damaged, "the other folder stays as it is");
}

#[tokio::test]
async fn a_part_that_is_also_a_file_of_another_model_is_never_written_to() {
    let running = start(model(), Faults::default()).await;
    let hub = running.client();
    let plan = hub.plan_model(&tiny()).await.unwrap();
    for bytes in [vec![7; 200_000], vec![7; 1_000], vec![7; 300_000]] {
        let dir = tempfile::tempdir().unwrap();
        let (parts, to) = (dir.path().join("parts"), dir.path().join("model"));
        let other = dir.path().join("other");
        std::fs::write(&other, &bytes).unwrap();
        std::fs::create_dir(&parts).unwrap();
        let shard = plan.files.iter().find(|file| file.path == SHARDS[0]).unwrap();
        std::fs::hard_link(&other, parts.join(shard.hash.to_string())).unwrap();
        let progress = Arc::new(Progress::default());
        hub.download(&plan, &parts, &to, &progress).await.unwrap();
        assert_eq!(std::fs::read(to.join(SHARDS[0])).unwrap(), running.fake.files[SHARDS[0]]);
        assert!(std::fs::read(&other).unwrap() == bytes, "{} bytes", bytes.len());
        assert_eq!(progress.done_bytes(), plan.total_bytes());
        assert_eq!(std::fs::read_dir(&parts).unwrap().count(), 0, "no part stays behind");
    }
}

#[tokio::test]
async fn access_to_a_gated_repository_is_checked_at_a_file() {
    let running = start(model(), Faults { gated: Some("hf_right"), forbids_ranges: true, ..Faults::default() }).await;
    let repo = tiny();
    let hub = running.client();
    let info = hub.info(&repo).await.unwrap();
    assert!(info.is_restricted, "the list of its files is public");
    for path in [SHARDS[0], "tokenizer.json"] {
        let file = info.files.iter().find(|file| file.path == path).unwrap();
        let refused = hub.check_access(&repo, COMMIT, file).await.unwrap_err();
        assert!(matches!(refused, HubError::Gated { .. }), "{refused}");
        hub.with_token(Token::new("hf_right")).check_access(&repo, COMMIT, file).await.unwrap();
    }
}

#[tokio::test]
async fn the_token_goes_to_the_hub_and_nowhere_else() {
    let running = start(model(), Faults { gated: Some("hf_right"), ..Faults::default() }).await;
    let hub = running.client().with_token(Token::new("hf_right"));
    let plan = hub.plan_model(&tiny()).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    hub.download(&plan, &dir.path().join("parts"), &dir.path().join("model"), &Arc::default()).await.unwrap();
    let seen = running.seen();
    assert!(seen.iter().any(|seen| seen.cdn));
    for seen in seen {
        assert_eq!(seen.authorization.is_some(), !seen.cdn, "{seen:?}");
    }
}

#[tokio::test]
async fn what_does_not_pass_is_an_error_and_no_file() {
    let location = |location: &str| Faults { location: Some(location.to_owned()), ..Faults::default() };
    let mut longest = 0;
    for (faults, expected) in [
        (Faults { damaged: times(u32::MAX), ..Faults::default() }, "is corrupted after download"),
        (Faults { unavailable: times(u32::MAX), ..Faults::default() }, "503"),
        (Faults { longer: times(u32::MAX), ..Faults::default() }, "more than the 200000 bytes"),
        (Faults { moved: true, ..Faults::default() }, "another"),
        (Faults { refused: Some((403, "GatedRepo")), ..Faults::default() }, "license"),
        (Faults { refused: Some((404, "EntryNotFound")), ..Faults::default() }, "no file"),
        (Faults { refused: Some((418, "")), ..Faults::default() }, "418"),
        (location("http://169.254.169.254/latest/meta-data"), "not permitted"),
        (location("file:///etc/passwd"), "not permitted"),
        (
            location("/fake/tiny/resolve/0123456789abcdef0123456789abcdef01234567/model-00001-of-00002.safetensors"),
            "more than five",
        ),
    ] {
        let running = start(model(), faults).await;
        let dir = tempfile::tempdir().unwrap();
        let error = download(&running, dir.path()).await.unwrap_err().to_string();
        let expected = if expected == "another" { "instead of" } else { expected };
        assert!(error.contains(expected), "{expected}: {error}");
        assert!(!dir.path().join("model/model-00001-of-00002.safetensors").exists());
        assert!(!error.contains("signature"), "{error}");
        longest = longest.max(running.seen().len());
    }
    assert!(longest < 60, "{longest} requests");
}

#[tokio::test]
async fn a_download_that_the_disk_cannot_hold_is_refused_before_its_first_byte() {
    let running = start(model(), Faults::default()).await;
    let hub = running.client();
    let mut plan = hub.plan_model(&tiny()).await.unwrap();
    plan.files[0].size_bytes = 1 << 60;
    let dir = tempfile::tempdir().unwrap();
    let asked = running.seen().len();
    let done = hub.download(&plan, &dir.path().join("parts"), &dir.path().join("model"), &Arc::default()).await;
    let error = done.unwrap_err().to_string();
    assert!(error.starts_with("fake/tiny needs ") && error.contains("free up disk space"), "{error}");
    assert_eq!(running.seen().len(), asked);
}

#[tokio::test]
async fn an_outline_has_the_small_files_and_the_headers_of_the_weights() {
    let mut files = model();
    let header = br#"{"a":{"dtype":"F32","shape":[49000],"data_offsets":[0,196000]}}"#;
    let shard = "model-00001-of-00002.safetensors";
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header);
    let known = bytes.len();
    bytes.resize(known + 196_000, 7);
    files.insert(shard.to_owned(), bytes.clone());
    files.insert("model-00002-of-00002.safetensors".to_owned(), bytes.clone());
    let running = start(files, Faults { unavailable: times(1), ..Faults::default() }).await;
    let hub = running.client();
    let plan = hub.plan_model(&tiny()).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (parts, to) = (dir.path().join("parts"), dir.path().join("outline"));
    hub.outline(&plan, &parts, &to).await.unwrap();
    assert_eq!(std::fs::read(to.join("tokenizer.json")).unwrap(), b"{}");
    let outlined = std::fs::read(to.join(shard)).unwrap();
    assert_eq!(outlined.len(), bytes.len());
    assert_eq!(outlined[..known], bytes[..known]);
    assert!(outlined[known..].iter().all(|byte| *byte == 0), "the tensors are a hole");

    let running = start(model(), Faults::default()).await;
    let hub = running.client();
    let plan = hub.plan_model(&tiny()).await.unwrap();
    let error = hub.outline(&plan, &parts, &dir.path().join("other")).await.unwrap_err().to_string();
    assert!(error.contains("not a safetensors file"), "{error}");
}

#[tokio::test]
async fn abandoned_parts_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (mine, other) = (dir.path().join("aa"), dir.path().join("bb"));
    std::fs::write(&mine, b"x").unwrap();
    std::fs::write(&other, b"x").unwrap();
    let held = std::fs::File::open(&mine).unwrap();
    held.try_lock().unwrap();
    let hour = std::time::Duration::from_secs(3600);
    let now = std::time::SystemTime::now();
    assert_eq!(rlood_hub::clean_parts(dir.path(), now - hour).unwrap(), 0);
    assert_eq!(rlood_hub::clean_parts(dir.path(), now + hour).unwrap(), 1);
    assert!(mine.exists() && !other.exists());
    // A complete file of a model that is still being downloaded; its bytes arrived two days ago.
    let (part, published) = (dir.path().join("cc"), dir.path().join("model.safetensors"));
    let written = std::fs::File::create(&part).unwrap();
    written.set_modified(now - 48 * hour).unwrap();
    drop(written);
    std::fs::hard_link(&part, &published).unwrap();
    assert_eq!(rlood_hub::clean_parts(dir.path(), now + hour).unwrap(), 0);
    // After the model was cancelled, the file counts as one that changed just now.
    std::fs::remove_file(&published).unwrap();
    assert_eq!(rlood_hub::clean_parts(dir.path(), now - hour).unwrap(), 0);
    assert_eq!(rlood_hub::clean_parts(dir.path(), now + hour).unwrap(), 1);
    assert_eq!(rlood_hub::clean_parts(&dir.path().join("none"), now).unwrap(), 0);
}
