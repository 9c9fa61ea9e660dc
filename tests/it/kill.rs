//! Killed processes: the job resumes from its last checkpoint, and ends with the same bytes as an uninterrupted run.

use std::io::Read;
use std::time::Duration;

use rlood_client::Which;

use super::processes::{Server, model_copy, register, signal, spec};

/// Steps of every run; every second one has a checkpoint.
const STEPS: u64 = 10;

#[tokio::test]
async fn an_interrupted_job_ends_with_the_bytes_of_an_undisturbed_one() {
    let dir = tempfile::tempdir().unwrap();
    let model = model_copy(&dir.path().join("model"));
    let data = dir.path().join("data");

    let mut server = Server::start(&data, "cpu");
    register(&server, "tiny", &model).await;
    let job = server.submit(&spec("tiny", STEPS)).await;
    assert_eq!(finished(&server, &job).await, 1);
    let expected = adapter(&server, &job).await;
    assert!(expected.iter().any(|(name, bytes)| name == "adapter_model.safetensors" && !bytes.is_empty()));

    // SIGKILL to the worker: its server starts another one.
    let job = begun(&server).await;
    signal("KILL", server.worker_pids(1).await[0]);
    assert_eq!(finished(&server, &job).await, 2, "attempts after the worker was killed");
    assert!(adapter(&server, &job).await == expected, "after the worker was killed");
    check_history(&server, &job).await;

    // SIGKILL to the server: the next one resumes the job.
    let job = begun(&server).await;
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let server = Server::start(&data, "cpu");
    assert_eq!(finished(&server, &job).await, 2, "attempts after the server was killed");
    assert!(adapter(&server, &job).await == expected, "after the server was killed");
    check_history(&server, &job).await;

    // SIGTERM: the step is completed or aborted, a checkpoint is saved, and the job is requeued.
    let job = begun(&server).await;
    let (status, took) = server.terminate();
    assert!(status.success(), "{status}");
    assert!(took < Duration::from_secs(30), "{took:?}");
    let server = Server::start(&data, "none");
    let waiting = server.get(&format!("/jobs/{job}")).await;
    assert_eq!(waiting["state"], "queued", "{waiting}");
    drop(server);
    let server = Server::start(&data, "cpu");
    assert_eq!(finished(&server, &job).await, 2, "attempts after SIGTERM");
    assert!(adapter(&server, &job).await == expected, "after SIGTERM");
    check_history(&server, &job).await;
}

/// A running job that has a checkpoint but is far from its end.
async fn begun(server: &Server) -> String {
    let job = server.submit(&spec("tiny", STEPS)).await;
    server.wait_for_checkpoint(&job).await;
    job
}

/// Waits for success; returns the number of attempts.
async fn finished(server: &Server, job: &str) -> u64 {
    let view = server.job_in_state(job, "succeeded").await;
    assert_eq!(view["step"], STEPS, "{view}");
    view["attempt"].as_u64().unwrap()
}

/// Returns name and bytes of every file of the adapter.
pub async fn adapter(server: &Server, job: &str) -> Vec<(String, Vec<u8>)> {
    let tar = server.adapter(job, Some(Which::Last)).await;
    let mut files = Vec::new();
    for entry in tar::Archive::new(tar.as_slice()).entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_string_lossy().into_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        files.push((name, bytes));
    }
    files
}

/// Checks that every step occurs once, whatever was interrupted.
async fn check_history(server: &Server, job: &str) {
    let metrics = server.get(&format!("/jobs/{job}/metrics")).await;
    let mut steps: Vec<u64> =
        metrics["data"].as_array().unwrap().iter().filter_map(|row| row["step"].as_u64()).collect();
    steps.dedup();
    assert_eq!(steps, (1..=STEPS).collect::<Vec<_>>());
}
