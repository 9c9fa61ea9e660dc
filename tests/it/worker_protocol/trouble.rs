//! Server errors during a claim, and checkpoints damaged on disk: neither counts against a job.

use std::time::Instant;

use rlood::id::JobId;
use rlood::protocol::FileEntry;
use rlood::store::{EventRow, JobRow};

use super::*;

impl Server {
    async fn claim_of(&self, worker: WorkerId) -> (StatusCode, Value) {
        self.post("/worker/claim", json!({"worker": worker, "wait_ms": 0, "protocol": PROTOCOL})).await
    }

    async fn another_worker(&self) -> WorkerId {
        self.setting.worker().await
    }

    async fn report(&self, job: JobId, attempt: u64, list: &str, step: u64, file: &str) -> (StatusCode, Value) {
        let body = json!({"attempt": attempt, "list": list, "step": step, "file": file});
        self.post(&format!("/worker/jobs/{job}/damaged"), body).await
    }

    async fn row(&self, job: JobId) -> JobRow {
        self.setting.store.job_get(job).await.unwrap()
    }

    async fn events(&self, job: JobId, kind: &str) -> Vec<EventRow> {
        let events = self.setting.store.event_page(job, 0, 1000).await.unwrap();
        events.into_iter().filter(|event| event.kind == kind).collect()
    }

    /// A job with checkpoints of these steps, claimed again as attempt 2.
    async fn job_with_checkpoints(&self, steps: &[u64]) -> (JobId, Value) {
        let job = self.setting.job().await;
        assert_eq!(self.claim(0).await.1["job"], json!(job));
        for step in steps {
            let bytes = format!("weights of {step}");
            let files: [(&str, &[u8]); 2] = [("w", bytes.as_bytes()), ("manifest.json", b"{}")];
            assert_eq!(self.publish(job, 1, *step, &files).await.0, StatusCode::OK);
        }
        let finish = json!({"attempt": 1, "outcome": {"outcome": "requeued"}});
        self.post(&format!("/worker/jobs/{job}/finish"), finish).await;
        let (status, claim) = self.claim(0).await;
        assert_eq!((status, &claim["job"]), (StatusCode::OK, &json!(job)));
        (job, claim)
    }
}

#[tokio::test]
async fn a_claim_reads_no_byte_of_a_checkpoint_and_what_a_worker_reports_damaged_falls_back_to_the_older_one() {
    let server = Server::new().await;
    let Setting { store, files, .. } = &server.setting;
    let (job, _) = server.job_with_checkpoints(&[1, 2]).await;
    let finish = json!({"attempt": 2, "outcome": {"outcome": "requeued"}});
    server.post(&format!("/worker/jobs/{job}/finish"), finish).await;
    std::fs::write(files.checkpoint_file(job, 2, 1, "w").unwrap(), b"weights of ?").unwrap();

    let (_, claim) = server.claim(0).await;
    assert_eq!((&claim["attempt"], &claim["resume"]["step"]), (&json!(3), &json!(2)), "nothing is compared here");
    let (status, found) = server.report(job, 3, "resume", 2, "w").await;
    assert_eq!((status, &found["verdict"]), (StatusCode::OK, &json!("damaged")));
    assert_eq!((&found["resume"]["step"], &found["resume"]["files"][0]["name"]), (&json!(1), &json!("w")));
    assert_eq!(server.row(job).await.step, 1);
    assert_eq!(store.checkpoint_list(job).await.unwrap().len(), 1);
    assert!(!files.checkpoint_dir(job, 2, 1).exists());
    let warning = &server.events(job, "warning").await[0].data;
    assert_eq!(warning["code"], "checkpoint_damaged");
    assert!(warning["message"].as_str().unwrap().contains("does not match its hashes"), "{warning}");
    let (status, bytes) = server.send("GET", &format!("/worker/jobs/{job}/resume/w?attempt=3"), "").await;
    assert_eq!((status, bytes.as_slice()), (StatusCode::OK, b"weights of 1".as_slice()));
    // The response was lost: the same report gets the same answer.
    assert_eq!(server.report(job, 3, "resume", 2, "w").await, (status, found));
    assert_eq!(server.events(job, "warning").await.len(), 1);
    assert_eq!(server.row(job).await.failed_attempts, 0);
}

#[tokio::test]
async fn a_worker_that_reports_a_whole_file_damages_nothing() {
    let server = Server::new().await;
    let (job, _) = server.job_with_checkpoints(&[1, 2]).await;
    for _ in 0..2 {
        let (status, found) = server.report(job, 2, "resume", 2, "w").await;
        assert_eq!((status, &found["verdict"]), (StatusCode::OK, &json!("whole")));
    }
    assert_eq!(server.setting.store.checkpoint_list(job).await.unwrap().len(), 2);
    assert_eq!(server.report(job, 2, "resume", 2, "none").await.0, StatusCode::NOT_FOUND);
    let (status, problem) = server.report(job, 1, "resume", 2, "w").await;
    assert_eq!((status, &problem["code"]), (StatusCode::CONFLICT, &json!("lease_lost")), "the fence holds");
}

#[tokio::test]
async fn a_checkpoint_that_the_disk_does_not_give_falls_back_like_one_that_differs() {
    let server = Server::new().await;
    let files = &server.setting.files;
    let (job, _) = server.job_with_checkpoints(&[1, 2]).await;
    // Reading a directory is an error of the operating system, for every user.
    let path = files.checkpoint_file(job, 2, 1, "w").unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let (_, found) = server.report(job, 2, "resume", 2, "w").await;
    assert_eq!((&found["verdict"], &found["resume"]["step"]), (&json!("damaged"), &json!(1)));
    let warning = &server.events(job, "warning").await[0].data;
    assert!(warning["message"].as_str().unwrap().contains("cannot be read"), "{warning}");

    // The last checkpoint is damaged too: the job starts from the beginning.
    std::fs::remove_file(files.checkpoint_file(job, 1, 1, "w").unwrap()).unwrap();
    let (_, found) = server.report(job, 2, "resume", 1, "w").await;
    assert_eq!((&found["verdict"], &found["resume"]), (&json!("damaged"), &Value::Null));
    assert_eq!(server.row(job).await.step, 0);
}

#[tokio::test]
async fn a_disk_that_gives_nothing_takes_the_job_back_and_throws_no_checkpoint_away() {
    let server = Server::new().await;
    let files = &server.setting.files;
    let (job, _) = server.job_with_checkpoints(&[1, 2]).await;
    let (dir, away) = (files.checkpoint_dir(job, 2, 1), server.setting.dir.path().join("away"));
    let all = dir.parent().unwrap();
    std::fs::rename(all, &away).unwrap();
    let (status, problem) = server.report(job, 2, "resume", 2, "w").await;
    assert_eq!((status, &problem["code"]), (StatusCode::CONFLICT, &json!("lease_lost")));
    let row = server.row(job).await;
    assert_eq!((row.state, row.status_reason.as_deref()), (State::Queued, Some("server_error")));
    assert_eq!((row.failed_attempts, row.server_errors), (0, 1));
    assert_eq!(server.setting.store.checkpoint_list(job).await.unwrap().len(), 2);
    std::fs::rename(&away, all).unwrap();
    let (_, claim) = server.claim(5000).await;
    assert_eq!((&claim["job"], &claim["resume"]["step"]), (&json!(job), &json!(2)));
}

#[tokio::test]
async fn a_damaged_file_of_a_warm_start_is_told_and_nothing_is_discarded() {
    let server = Server::new().await;
    let files = &server.setting.files;
    let from = tempfile::tempdir().unwrap();
    std::fs::write(from.path().join("w"), b"1234").unwrap();
    let entry: FileEntry = serde_json::from_value(entry("w", b"1234")).unwrap();
    let job = server.setting.job().await;
    files.initial_keep(job, from.path(), &[entry]).unwrap();
    let (_, claim) = server.claim(0).await;
    assert_eq!(claim["initial"][0]["name"], "w");
    assert_eq!(server.report(job, 1, "initial", 0, "w").await.1["verdict"], "whole");
    std::fs::write(files.initial_file(job, "w").unwrap(), b"1235").unwrap();
    let (_, found) = server.report(job, 1, "initial", 0, "w").await;
    assert_eq!((&found["verdict"], &found["resume"]), (&json!("damaged"), &Value::Null));
}

#[tokio::test]
async fn an_error_of_the_server_during_a_claim_releases_it_costs_the_job_nothing_and_the_next_job_is_handed_out() {
    let server = Server::new().await;
    let Setting { files, .. } = &server.setting;
    let bad = server.setting.job().await;
    let good = server.setting.job().await;
    let list = files.initial_of(bad).join("files.json");
    std::fs::create_dir_all(list.parent().unwrap()).unwrap();
    std::fs::write(&list, "{").unwrap();

    let (status, claim) = server.claim(0).await;
    assert_eq!((status, &claim["job"]), (StatusCode::OK, &json!(good)), "the first one waits");
    let row = server.row(bad).await;
    assert_eq!((row.state, row.status_reason.as_deref()), (State::Queued, Some("server_error")));
    assert_eq!((row.failed_attempts, row.server_errors, row.attempt), (0, 1, 1));
    let requeued = server.events(bad, "job.requeued").await;
    assert_eq!(
        (&requeued[0].data["reason"], &requeued[0].data["failed_attempts"]),
        (&json!("server_error"), &json!(0))
    );

    // Repeated server errors cost no attempts; from the fifth on the owner is notified.
    for errors in 2..=12 {
        server.setting.sql("UPDATE jobs SET claim_not_before = 0").await.unwrap();
        assert_eq!(server.claim_of(server.another_worker().await).await.0, StatusCode::NO_CONTENT);
        let row = server.row(bad).await;
        assert_eq!((row.state, row.failed_attempts, row.server_errors), (State::Queued, 0, errors));
        assert_eq!(server.events(bad, "warning").await.len(), usize::from(errors >= 5), "{errors}");
    }
    let warning = &server.events(bad, "warning").await[0].data;
    assert_eq!(warning["code"], "server_error");
    let text = warning["message"].as_str().unwrap();
    assert!(!text.contains('/') && !text.contains("files.json"), "no path: {text}");

    // The server is repaired: the job runs, and the error count is reset.
    std::fs::write(&list, "[]").unwrap();
    server.setting.sql("UPDATE jobs SET claim_not_before = 0").await.unwrap();
    let (status, claim) = server.claim_of(server.another_worker().await).await;
    assert_eq!((status, &claim["job"]), (StatusCode::OK, &json!(bad)));
    let row = server.row(bad).await;
    assert_eq!((row.state, row.server_errors, row.status_reason), (State::Running, 0, None));
}

#[tokio::test]
async fn a_call_that_waits_gets_the_job_when_its_pause_is_over() {
    let server = Server::new().await;
    let job = server.setting.job().await;
    let list = server.setting.files.initial_of(job).join("files.json");
    std::fs::create_dir_all(list.parent().unwrap()).unwrap();
    std::fs::write(&list, "{").unwrap();
    assert_eq!(server.claim(0).await.0, StatusCode::NO_CONTENT);
    std::fs::write(&list, "[]").unwrap();
    assert_eq!(server.claim(0).await.0, StatusCode::NO_CONTENT, "not yet");
    let begun = Instant::now();
    let (status, claim) = server.claim(20_000).await;
    assert_eq!((status, &claim["job"]), (StatusCode::OK, &json!(job)));
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_broken_disk_does_not_go_through_the_whole_queue() {
    let server = Server::new().await;
    let mut jobs = Vec::new();
    for _ in 0..8 {
        let job = server.setting.job().await;
        let list = server.setting.files.initial_of(job).join("files.json");
        std::fs::create_dir_all(list.parent().unwrap()).unwrap();
        std::fs::write(&list, "{").unwrap();
        jobs.push(job);
    }
    for _ in 0..3 {
        assert_eq!(server.claim(0).await.0, StatusCode::NO_CONTENT);
    }
    let mut errors = Vec::new();
    for job in &jobs {
        errors.push(server.row(*job).await.server_errors);
    }
    assert_eq!(errors, [1, 1, 1, 0, 0, 0, 0, 0]);
}

#[tokio::test]
async fn what_the_user_asked_for_is_honoured_when_a_claim_is_released() {
    let server = Server::new().await;
    let store = &server.setting.store;
    let job = server.setting.job().await;
    server.claim(0).await;
    store.job_pause(job, T0).await.unwrap();
    store.claim_release(job, 1, T0).await.unwrap();
    let row = server.row(job).await;
    assert_eq!((row.state, row.status_reason), (State::Paused, None));
    // A resumed job is offered immediately.
    store.job_resume(job, T0).await.unwrap();
    assert_eq!(server.claim(0).await.1["job"], json!(job));
}

#[tokio::test]
async fn a_heartbeat_is_answered_with_the_bytes_that_have_arrived() {
    let server = Server::new().await;
    let job = server.setting.job().await;
    server.claim(0).await;
    let beat = json!({"attempt": 1, "phase": "checkpoint", "status_reason": null, "step": 0, "eta_s": null});
    let beat = async || server.post(&format!("/worker/jobs/{job}/heartbeat"), beat.clone()).await.1;
    assert_eq!(beat().await["received_bytes"], Value::Null, "as it was before there was anything to say");
    let path = format!("/worker/jobs/{job}/checkpoints/1/w?attempt=1");
    assert_eq!(server.send("PUT", &path, vec![7; 1000]).await.0, StatusCode::NO_CONTENT);
    assert_eq!(beat().await["received_bytes"], 1000);
    assert_eq!(server.send("PUT", &path, vec![7; 1000]).await.0, StatusCode::NO_CONTENT);
    assert_eq!(beat().await["received_bytes"], 2000);
}

#[tokio::test]
async fn a_workers_upload_may_pause_as_long_as_the_worker_itself_waits_and_other_bodies_may_not() {
    let server = Server::with(|config| {
        config.edge.body_pause = Duration::from_millis(100);
        config.edge.transfer_pause = Duration::from_secs(20);
    })
    .await;
    let job = server.setting.job().await;
    server.claim(0).await;
    let slow = || {
        let pieces = futures::stream::iter(["{", "}"]);
        Body::from_stream(futures::StreamExt::then(pieces, async |piece| {
            tokio::time::sleep(Duration::from_millis(400)).await;
            std::io::Result::Ok(piece)
        }))
    };
    let path = format!("/worker/jobs/{job}/checkpoints/1/manifest.json?attempt=1");
    assert_eq!(server.send("PUT", &path, slow()).await.0, StatusCode::NO_CONTENT);
    assert_eq!(server.send("POST", "/jobs", slow()).await.0, StatusCode::REQUEST_TIMEOUT);
}
