//! Overlap: the next block is sampled while the rewards of this one are outstanding.

use std::time::Duration;

use rlood::engine::backend::BackendKind;
use rlood::engine::host::{Host, HostError, SavedCheckpoint, Score, ScoreRequest, StepTrace, Stop, TrainOutcome};
use rlood::event::Event;
use rlood::sample::RolloutId;
use rlood::spec::{Estimator, Plan};
use serde_json::{Value, json};

use crate::processes::{Server, model_copy, register, signal, spec};
use crate::server::{pointers, with};
use crate::train::{Start, TestHost, plan, rows, train};

/// Blocks of two steps, four of them.
fn overlapped() -> Plan {
    let mut plan = plan();
    plan.rloo.steps_per_generation = 2;
    plan.rloo.overlap = true;
    plan.training.max_steps = 8;
    plan
}

fn run(plan: &Plan, backend: Option<BackendKind>) -> TestHost {
    let mut host = TestHost::default();
    let start = Start { backend, ..Start::default() };
    assert_eq!(train(plan, rows(), start, &mut host).expect("trains"), TrainOutcome::Finished);
    host
}

#[test]
fn an_overlapped_block_is_sampled_by_the_policy_before_the_last_block() {
    for backend in [BackendKind::Cpu, BackendKind::Reference] {
        // Far enough that other words are sampled.
        let mut far = overlapped();
        far.optimizer.learning_rate = 0.3;
        let moving = run(&far, Some(backend));
        let mut still = overlapped();
        still.optimizer.learning_rate = 0.0;
        let still = run(&still, Some(backend));
        let mut plain = far;
        plain.rloo.overlap = false;
        let plain = run(&plain, Some(backend));
        let completions = |host: &TestHost, step: u64| -> Vec<String> {
            let of = |id: RolloutId| id == RolloutId::train(step);
            let (_, samples) = host.requests.iter().find(|(id, _)| of(*id)).unwrap();
            samples.iter().map(|sample| format!("{} {}", sample.prompt_id, sample.completion)).collect()
        };
        // The first two blocks come from the first weights; the third from those after the first block.
        for step in [1, 3] {
            assert_eq!(completions(&moving, step), completions(&still, step), "{backend:?}, step {step}");
        }
        assert_eq!(completions(&moving, 1), completions(&plain, 1));
        assert_ne!(completions(&moving, 5), completions(&still, 5), "{backend:?}");
        assert_ne!(completions(&moving, 3), completions(&plain, 3), "{backend:?}: without overlap it is on-policy");

        let trace = |host: &TestHost, step: u64| host.traces.iter().position(|trace| trace.step == step).unwrap();
        let (of_moving, of_still) = (&moving.traces[trace(&moving, 3)], &still.traces[trace(&still, 3)]);
        // Old log-probs are those of the policy that sampled; the ratio measures how far it has moved since.
        assert_eq!(of_moving.old_logps, of_still.old_logps, "{backend:?}");
        assert_ne!(of_moving.old_logps, of_moving.new_logps);
        assert_eq!(of_still.old_logps, of_still.new_logps, "the same weights give the same bits");
        let first = &moving.traces[trace(&moving, 1)];
        assert_eq!(first.old_logps, first.new_logps, "the first block is on-policy");
    }
}

/// What is begun and what is waited for, in order.
#[derive(Default)]
struct Order {
    host: TestHost,
    said: Vec<String>,
}

impl Host for Order {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, HostError> {
        self.said.push(format!("wait {}{:?}", request.id.step, request.id.part));
        self.host.score(request)
    }

    fn begin_score(&mut self, request: &ScoreRequest<'_>) -> Result<(), HostError> {
        self.said.push(format!("begin {}{:?}", request.id.step, request.id.part));
        Ok(())
    }

    fn event(&mut self, event: Event) -> Result<(), HostError> {
        if let Event::Step { step, .. } = &event {
            self.said.push(format!("step {step}"));
        }
        self.host.event(event)
    }

    fn saved(&mut self, checkpoint: &SavedCheckpoint<'_>) -> Result<(), HostError> {
        self.host.saved(checkpoint)
    }

    fn stop(&self) -> Option<Stop> {
        self.host.stop()
    }

    fn observe(&mut self, trace: &StepTrace<'_>) {
        self.host.observe(trace);
    }
}

#[test]
fn the_rewards_of_the_next_block_are_begun_before_this_one_is_waited_for() {
    let mut plan = overlapped();
    plan.training.max_steps = 6;
    let mut order = Order::default();
    train(&plan, rows(), Start::default(), &mut order).expect("trains");
    let expected = "begin 1Sampled|begin 3Sampled|wait 1Sampled|step 1|step 2|begin 5Sampled|wait 3Sampled|step 3|step 4|wait 5Sampled|step 5|step 6";
    assert_eq!(order.said.join("|"), expected);

    plan.rloo.estimator = Estimator::Remax;
    plan.training.max_steps = 3;
    let mut order = Order::default();
    train(&plan, rows(), Start::default(), &mut order).expect("trains");
    let expected = "begin 1Sampled|begin 1Greedy|begin 3Sampled|begin 3Greedy|wait 1Sampled|wait 1Greedy|step 1|step 2|wait 3Sampled|wait 3Greedy|step 3";
    assert_eq!(order.said.join("|"), expected);
}

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

/// A service that marks by the completion's length, `delay` after it was asked.
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

/// Runs it; its adapter, and how long it took.
async fn job(server: &Server, url: &str, overlap: bool) -> (Vec<u8>, Duration) {
    let job = server.submit(&six_blocks(url, overlap)).await;
    let view = server.job_in_state(&job, "succeeded").await;
    let time = |name: &str| view[name].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    let took = Duration::try_from(time("finished_at").duration_since(time("started_at"))).unwrap();
    (server.bytes(&format!("/jobs/{job}/adapter")).await, took)
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

    // Answers come late and early, in another order than they were asked for.
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
    // Inside a block, at its end, and before anything is saved.
    for step in [0, 3, 6] {
        let pid = server.worker_pids(1).await[0];
        let job = server.submit(&six_blocks(&url, true)).await;
        let reached = |view: &Value| view["state"] == "running" && view["step"].as_u64() >= Some(step);
        server.job_when(&job, "that step", reached).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        signal("KILL", pid);
        let view = server.job_in_state(&job, "succeeded").await;
        assert!(view["attempt"].as_u64() > Some(1), "step {step}: {view}");
        assert!(server.bytes(&format!("/jobs/{job}/adapter")).await == expected, "killed after step {step}");
    }
}
