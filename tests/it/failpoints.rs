//! Every named point of a run, with every action: an error, a panic, the end of the process, a full disk. Whatever happens
//! where, the job ends as an undisturbed one does. Only with the feature `failpoints`:
//!
//! ```text
//! cargo test --release --features failpoints --test it -- failpoints::
//! ```

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use futures::StreamExt;

use super::kills::{STEPS, adapter, check_history, check_requests, judge, judged};
use super::processes::{Server, model_copy, register};

const ACTIONS: [&str; 4] = ["error", "panic", "exit", "no_space"];
/// At the same time: most of a run is waiting.
const AT_ONCE: usize = 4;
const PATIENCE: Duration = Duration::from_secs(180);
/// What a run must pass, of every part: a renamed or lost point is noticed.
const EXPECTED: [&str; 24] = [
    "checkpoint.file:adapter_model.safetensors",
    "checkpoint.file:manifest.json",
    "checkpoint.manifest",
    "checkpoint.renamed",
    "client.after:claim",
    "client.after:events",
    "client.after:finish",
    "client.after:journal",
    "client.after:publish",
    "client.before:upload",
    "files.renamed",
    "files.synced",
    "files.verified",
    "files.write",
    "publish.placed",
    "publish.published",
    "store.after_commit:append events",
    "store.after_commit:append to the journal",
    "store.after_commit:claim a job",
    "store.after_commit:finish a job",
    "store.after_commit:publish a checkpoint",
    "store.before_commit:finish a job",
    "store.event:checkpoint.saved",
    "store.event:job.succeeded",
];

fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_tree(&path, &target);
        } else {
            std::fs::copy(&path, target).unwrap();
        }
    }
}

/// Runs the prepared job with these points set, restarting the server and resuming the job as an operator would.
async fn run(data: &Path, notes: &Path, points: &str, job: &str) -> Server {
    std::fs::create_dir_all(notes).unwrap();
    let variables = [("RLOOD_FAILPOINTS", points), ("RLOOD_FAILPOINTS_DIR", notes.to_str().unwrap())];
    let mut server = Server::start_in(data, "cpu", &variables);
    let begun = Instant::now();
    loop {
        if let Some(view) = server.try_job(job).await {
            match view["state"].as_str().unwrap() {
                "succeeded" => return server,
                "paused" => {
                    assert_eq!(view["status_reason"], "disk_full", "{points}: {view}");
                    server.post(&format!("/jobs/{job}/resume"), &serde_json::json!({})).await;
                }
                "queued" | "running" => {}
                _ => panic!("{points}: {view}"),
            }
            assert!(begun.elapsed() < PATIENCE, "{points}: {view}");
        }
        if server.child.try_wait().unwrap().is_some() {
            server = Server::start_in(data, "cpu", &variables);
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_fails_wherever_the_job_ends_as_it_should() {
    let dir = tempfile::tempdir().unwrap();
    let prepared = dir.path().join("prepared");
    // The queued job holds the address of its service, and every run below its own service: one for each is made first.
    let model = model_copy(&dir.path().join("model"));
    let prepare = async |data: &Path, url: &str| {
        let server = Server::start(data, "none");
        register(&server, "tiny", &model).await;
        let job = server.submit(&judged(url)).await;
        assert!(server.terminate().0.success());
        job
    };
    let service = judge().await;
    let job = prepare(&prepared, &service.url()).await;
    let notes = dir.path().join("notes");
    let data = dir.path().join("undisturbed");
    copy_tree(&prepared, &data);
    let server = run(&data, &notes, "*=note", &job).await;
    let expected = adapter(&server, &job).await;
    check_history("undisturbed", &server, &job, STEPS).await;
    drop(server);
    let points: BTreeSet<String> =
        std::fs::read_dir(&notes).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    for point in EXPECTED {
        assert!(points.contains(point), "no run passes {point}: {points:?}");
    }

    let cases: Vec<(&String, &str)> =
        points.iter().flat_map(|point| ACTIONS.iter().map(move |action| (point, *action))).collect();
    let count = cases.len();
    let begun = Instant::now();
    let cases = cases.into_iter().enumerate().map(|(number, (point, action))| {
        let (dir, expected, prepare) = (dir.path(), &expected, &prepare);
        async move {
            let what = format!("{point}={action}");
            let service = judge().await;
            let (data, notes) = (dir.join(format!("data-{number}")), dir.join(format!("notes-{number}")));
            let job = prepare(&data, &service.url()).await;
            let server = run(&data, &notes, &what, &job).await;
            assert!(notes.join(point).exists(), "{what} was not reached");
            assert!(adapter(&server, &job).await == *expected, "{what}: another adapter");
            check_history(&what, &server, &job, STEPS).await;
            check_requests(&what, &service);
            drop(server);
            std::fs::remove_dir_all(&data).unwrap();
        }
    });
    futures::stream::iter(cases).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
    println!(
        "{} points × {} actions = {count} runs in {:.0} s",
        points.len(),
        ACTIONS.len(),
        begun.elapsed().as_secs_f64()
    );
}
