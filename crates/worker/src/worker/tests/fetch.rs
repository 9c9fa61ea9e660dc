//! Tests with checkpoint files that arrive damaged or incomplete, and with checkpoints that cannot be uploaded.

use super::*;
use crate::failpoint;
use crate::protocol::ResumePoint;

fn file(name: &str, bytes: &str) -> FileEntry {
    FileEntry { name: name.to_owned(), size_bytes: bytes.len() as u64, sha256: Sha256Digest::of(bytes) }
}

fn resume(step: u64, bytes: &str) -> ResumePoint {
    ResumePoint { step, files: vec![file("w", bytes)] }
}

fn resuming() -> Claim {
    Claim { resume: Some(resume(4, "new")), ..claim() }
}

fn files(given: &[(&str, Option<&'static str>)]) -> Mutex<BTreeMap<String, Option<&'static str>>> {
    Mutex::new(given.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect())
}

fn from_the_older_one(input: TrainInput<'_>, _: &mut dyn Host) -> Result<(), RunEnd> {
    let dir = input.resume.expect("the older checkpoint");
    assert!(dir.ends_with("resume-2"), "{}", dir.display());
    assert_eq!(std::fs::read_to_string(dir.join("w")).unwrap(), "old");
    Ok(())
}

fn from_the_beginning(input: TrainInput<'_>, _: &mut dyn Host) -> Result<(), RunEnd> {
    assert_eq!(input.resume, None);
    Ok(())
}

fn never(_: TrainInput<'_>, _: &mut dyn Host) -> Result<(), RunEnd> {
    panic!("there is nothing to train from");
}

/// Waits until the worker has asked the server to verify the file as often as the server has answers.
async fn inspected(server: &Seen) {
    let asked = async {
        while !server.inspections.lock().unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), asked).await.expect("the worker asks the server to read the file");
}

#[tokio::test]
async fn a_damaged_checkpoint_is_replaced_by_an_older_one_in_the_same_attempt() {
    // The older checkpoint's file has the same name. It appears after the server has verified the damaged one.
    let seen = Arc::new(Seen { files: files(&[("resume w", Some("dam"))]), ..Seen::default() });
    let older = json!({"verdict": "damaged", "resume": resume(2, "old")});
    seen.inspections.lock().unwrap().extend([json!({"verdict": "checking"}), older]);
    let server = seen.clone();
    let mend = async move {
        inspected(&server).await;
        server.files.lock().unwrap().insert("resume w".to_owned(), Some("old"));
    };
    let attempt = attempt_at(seen, from_the_older_one, resuming(), |_| {});
    let ((ended, seen), ()) = tokio::join!(attempt, mend);
    assert_eq!(ended, None);
    let story = seen.story();
    assert_eq!(story.last().unwrap(), "finish succeeded", "{story:?}");
    assert_eq!(
        story.iter().filter(|call| *call == "damaged resume 4 w").count(),
        2,
        "it asks until it is told: {story:?}"
    );
}

#[tokio::test]
async fn without_an_older_checkpoint_the_run_starts_from_the_beginning() {
    let seen = Seen { files: files(&[("resume w", Some("dam"))]), ..Seen::default() };
    seen.inspections.lock().unwrap().push_back(json!({"verdict": "damaged", "resume": null}));
    let (_, seen) = attempt_at(seen, from_the_beginning, resuming(), |_| {}).await;
    assert_eq!(seen.story().last().unwrap(), "finish succeeded", "{:?}", seen.story());
}

#[tokio::test]
async fn a_file_that_is_intact_on_the_server_is_downloaded_again_and_then_fails_the_transfer() {
    let seen = Seen { files: files(&[("resume w", Some("dam"))]), ..Seen::default() };
    seen.inspections.lock().unwrap().extend([(); 9].map(|()| json!({"verdict": "whole"})));
    let (_, seen) = attempt_at(seen, never, resuming(), |_| {}).await;
    let story = seen.story();
    assert_eq!(story.iter().filter(|call| *call == "resume w").count(), 3, "{story:?}");
    assert_eq!(story.last().unwrap(), "finish failed transfer_damaged");
    // An older server answers 404, and the result is the same as then.
    let seen = Seen { files: files(&[("resume w", Some("dam"))]), ..Seen::default() };
    let (_, seen) = attempt_at(seen, never, resuming(), |_| {}).await;
    assert_eq!(seen.story().last().unwrap(), "finish failed transfer_damaged");
}

#[tokio::test]
async fn repeatedly_interrupted_transfers_make_the_server_verify_the_file() {
    let seen = Arc::new(Seen { files: files(&[("resume w", None)]), ..Seen::default() });
    seen.inspections.lock().unwrap().push_back(json!({"verdict": "damaged", "resume": resume(2, "old")}));
    let server = seen.clone();
    let mend = async move {
        inspected(&server).await;
        server.files.lock().unwrap().insert("resume w".to_owned(), Some("old"));
    };
    let ((_, seen), ()) = tokio::join!(attempt_at(seen, from_the_older_one, resuming(), |_| {}), mend);
    let story = seen.story();
    let before =
        story.iter().take_while(|call| !call.starts_with("damaged")).filter(|call| *call == "resume w").count();
    assert_eq!(before, 2, "once may be the network: {story:?}");
    assert_eq!(story.last().unwrap(), "finish succeeded");
}

#[tokio::test]
async fn a_damaged_warm_start_fails_the_job_with_its_own_code() {
    let seen = Seen { files: files(&[("initial w", Some("dam"))]), ..Seen::default() };
    seen.inspections.lock().unwrap().push_back(json!({"verdict": "damaged", "resume": null}));
    let warm = Claim { initial: vec![file("w", "new")], ..claim() };
    let (ended, seen) = attempt_at(seen, never, warm, |_| {}).await;
    assert_eq!(ended, None);
    assert_eq!(seen.story().last().unwrap(), "finish failed initial_damaged");
}

#[tokio::test]
async fn a_checkpoint_that_cannot_be_uploaded_fails_the_attempt_with_its_own_code() {
    fn train(input: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
        // The upload is timed by the clock of this thread.
        failpoint::set_hook(Some(Box::new(|point| {
            if point == "client.before:upload" {
                clock::advance(Duration::from_secs(500));
            }
            None
        })));
        let saved = save(host, input.scratch_dir, 1);
        failpoint::set_hook(None);
        match saved {
            Err(end @ RunEnd::Failed(EngineError::Host(_))) => Err(end),
            other => panic!("should fail: {other:?}"),
        }
    }
    let seen = Seen { refuses_uploads: AtomicBool::new(true), ..Seen::default() };
    let (ended, seen) = attempt_with(seen, train, |_| {}).await;
    assert_eq!(ended, None);
    assert_eq!(seen.story().last().unwrap(), "finish failed transfer_failed");
}
