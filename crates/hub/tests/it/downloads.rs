use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rlood_hub::{HubError, Progress, Token};

use super::fake::{Faults, Running, model, start};
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
    assert_eq!(rlood_hub::clean_parts(&dir.path().join("none"), now).unwrap(), 0);
}
