//! Overlap of sampling and rewards through a server: jobs, workers, reward services. The engine's part is tested
//! in its own `overlap`.

use std::time::Duration;

use serde_json::{Value, json};

use crate::processes::{Server, model_copy, register, signal, spec};
use crate::server::{pointers, with};

#[tokio::test]
async fn overlap_is_refused_where_it_makes_no_sense() {
    let server = crate::server::Server::start().await;
    let job = |rloo: Value| with(crate::server::job(), "rloo", rloo);
    let answer = server.post("/jobs", job(json!({"overlap": true}))).await;
    assert_eq!(pointers(&answer), ["/rloo/overlap conflict"]);
    assert!(answer.text.contains("set steps_per_generation to 2 or more"), "{}", answer.text);
    let refills = json!({"overlap": true, "steps_per_generation": 2, "min_informative_groups": 1});
    let answer = server.post("/jobs", with(job(refills), "training", json!({"prompts_per_step": 2}))).await;
    assert_eq!(pointers(&answer), ["/rloo/overlap conflict"]);
    let good =
        with(job(json!({"overlap": true, "steps_per_generation": 2})), "training", json!({"prompts_per_step": 2}));
    let answer = server.post("/jobs", good).await;
    assert_eq!(answer.status, 201, "{}", answer.text);
    assert_eq!(answer.body["plan"]["rloo"]["overlap"], true);
}

/// A service that scores by the completion's length, `delay` after the request.
async fn service(delay: impl Fn(u64) -> Duration + Clone + Send + Sync + 'static) -> String {
    let count = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let answer = move |body: axum::body::Bytes| {
        let (count, delay) = (count.clone(), delay.clone());
        async move {
            let request: Value = serde_json::from_slice(&body).unwrap();
            tokio::time::sleep(delay(count.fetch_add(1, std::sync::atomic::Ordering::SeqCst))).await;
            let samples = request["samples"].as_array().unwrap();
            let mark = |sample: &Value| {
                let bytes: u64 = sample["completion"].as_str().unwrap().bytes().map(u64::from).sum();
                (bytes % 7) as f64 / 7.0
            };
            axum::Json(json!({"rewards": samples.iter().map(mark).collect::<Vec<_>>()}))
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await.unwrap() });
    url
}

/// A job of six blocks.
fn six_blocks(url: &str, overlap: bool) -> Value {
    let mut job = spec("tiny", 12);
    job["rewards"] = json!([{"name": "slow", "type": "webhook", "url": url}]);
    job["rloo"] = json!({"num_generations": 2, "beta": 0.02, "steps_per_generation": 2, "overlap": overlap});
    job["training"] = json!({"prompts_per_step": 1, "max_steps": 12, "seed": 7});
    job
}

/// Runs the job; returns its adapter and the duration.
async fn job(server: &Server, url: &str, overlap: bool) -> (Vec<u8>, Duration) {
    let job = server.submit(&six_blocks(url, overlap)).await;
    let view = server.job_in_state(&job, "succeeded").await;
    let time = |name: &str| view[name].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    let took = Duration::try_from(time("finished_at").duration_since(time("started_at"))).unwrap();
    (server.adapter(&job, None).await, took)
}

#[tokio::test]
async fn a_slow_reward_costs_less_and_what_is_learnt_does_not_depend_on_its_timing() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let slow = service(|_| Duration::from_secs(1)).await;
    let (plain, plain_took) = job(&server, &slow, false).await;
    let (overlapped, overlapped_took) = job(&server, &slow, true).await;
    println!("six blocks, each a second of reward: {plain_took:?} without overlap, {overlapped_took:?} with");
    assert!(plain_took >= Duration::from_secs(6), "{plain_took:?}");
    assert!(overlapped_took < plain_took.mul_f64(0.75), "{overlapped_took:?} of {plain_took:?}");
    assert!(plain != overlapped, "off-policy by a block is not the same run");

    // Answers arrive with varying delays, in another order than the requests.
    let jumpy = service(|count| Duration::from_millis([900, 10, 10, 700, 30, 500][count as usize % 6])).await;
    let at_once = service(|_| Duration::ZERO).await;
    for url in [jumpy, at_once] {
        assert!(job(&server, &url, true).await.0 == overlapped, "{url}");
    }
}

#[tokio::test]
async fn a_worker_killed_while_rewards_of_two_blocks_are_outstanding_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&dir.path().join("data"), "cpu");
    register(&server, "tiny", &model_copy(&dir.path().join("model"))).await;
    let url = service(|_| Duration::from_millis(300)).await;
    let (expected, _) = job(&server, &url, true).await;
    // Inside a block, at its end, and before anything was saved.
    for step in [0, 3, 6] {
        let pid = server.worker_pids(1).await[0];
        let job = server.submit(&six_blocks(&url, true)).await;
        let reached = |view: &Value| view["state"] == "running" && view["step"].as_u64() >= Some(step);
        server.job_when(&job, "that step", reached).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        signal("KILL", pid);
        let view = server.job_in_state(&job, "succeeded").await;
        assert!(view["attempt"].as_u64() > Some(1), "step {step}: {view}");
        assert!(server.adapter(&job, None).await == expected, "killed after step {step}");
    }
}
