//! OpenEnv servers over their WebSocket: a server of the test's own, and the real package if `RLOOD_OPENENV_PYTHON` names a Python
//! that has it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures::{SinkExt, StreamExt};
use rlood_rewards::client::{Pace, RewardClient};
use rlood_rewards::episodes::EpisodeServer;
use rlood_rewards::{RewardDeps, RewardFailure, Rewards};
use rlood_types::environment::{
    Ask, EpisodeCall, EpisodeId, EpisodeLimits, EpisodeStop, Reply, Reset, Step, StepAnswer,
};
use rlood_types::event::{Event, FinishReason};
use rlood_types::id::JobId;
use rlood_types::outgoing::OutgoingPolicy;
use rlood_types::rollout::RolloutId;
use rlood_types::spec::EnvironmentPlan;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

use crate::journal::Book;

fn plan(url: &str, params: Value) -> EnvironmentPlan {
    serde_json::from_value(json!({
        "name": "environment", "type": "openenv", "params": params, "max_turns": 4, "max_episode_tokens": 100,
        "max_observation_tokens": 20, "return": "sum", "tool_parser": "auto", "on_parse_error": "reply",
        "max_parse_errors": 2, "max_restarts": 1, "url": url, "max_concurrency": 16, "max_batch_samples": 1,
        "max_batch_bytes": 1_000_000, "timeout_ms": 10_000, "deadline_ms": 10_000, "max_tries": 3,
        "max_invalid_tries": 1, "on_invalid": "mask", "max_outage_s": 30
    }))
    .unwrap()
}

/// The client of an environment, and the rewards that receive its warnings.
fn server(url: &str, params: Value, job: JobId, book: Option<Arc<Book>>) -> (EpisodeServer, Rewards) {
    let policy = OutgoingPolicy::parse(&["127.0.0.1/32"]).unwrap();
    let client = RewardClient::new(&policy).unwrap().with_pace(Pace::new(0.01).unwrap());
    let deps = RewardDeps { client: client.clone(), journal: None, models: None, previous_reports: Vec::new() };
    let rewards = Rewards::with_deps(&[], &BTreeMap::new(), deps).unwrap();
    let journal = book.map(|book| book as Arc<dyn rlood_rewards::journal::Journal>);
    let server = rewards.environment(&plan(url, params), &BTreeMap::new(), (&client, journal), job).unwrap();
    (server, rewards)
}

fn episode(index: u32) -> EpisodeId {
    EpisodeId { row: 3, index, attempt: 0 }
}

fn reset(episode: EpisodeId) -> EpisodeCall {
    let reset = Reset {
        seed: 12,
        messages: vec![json!({"role": "user", "content": "play"})],
        columns: [("level".to_owned(), json!(2))].into_iter().collect(),
        limits: EpisodeLimits { max_turns: 4, max_tokens: 100 },
    };
    EpisodeCall { episode, ask: Ask::Reset(Box::new(reset)) }
}

fn step(episode: EpisodeId, turn: u32, message: Value) -> EpisodeCall {
    let step = Step {
        turn,
        session: None,
        message,
        text: String::new(),
        finish_reason: FinishReason::Stop,
        num_tokens: 2,
        turns_left: 3,
        tokens_left: 90,
        is_final: false,
    };
    EpisodeCall { episode, ask: Ask::Step(Box::new(step)) }
}

fn says(episode: EpisodeId, turn: u32, text: &str) -> EpisodeCall {
    step(episode, turn, json!({"role": "assistant", "content": text}))
}

fn calls(episode: EpisodeId, turn: u32, name: &str, arguments: &Value) -> EpisodeCall {
    let call =
        json!({"id": "call_0_0", "type": "function", "function": {"name": name, "arguments": arguments.to_string()}});
    step(episode, turn, json!({"role": "assistant", "content": "", "tool_calls": [call]}))
}

fn close(episode: EpisodeId) -> EpisodeCall {
    EpisodeCall { episode, ask: Ask::Close(EpisodeStop::EnvDone) }
}

async fn reply(server: &EpisodeServer, call: EpisodeCall) -> Result<Reply, RewardFailure> {
    server.ask(RolloutId::train(1), &[call]).await.map(|mut replies| replies.remove(0))
}

/// The messages of a step, its reward, and whether the episode is over.
fn answer(reply: Result<Reply, RewardFailure>) -> (Vec<Value>, Option<f64>, bool) {
    let Ok(Reply::Step(StepAnswer { messages, reward, done, .. })) = reply else { panic!("{reply:?}") };
    (messages, reward, done)
}

/// A server whose episodes count their turns.
#[derive(Clone, Default)]
struct Counting(Arc<State>);

#[derive(Default)]
struct State {
    capacity: usize,
    open: AtomicUsize,
    begun: Mutex<Vec<Value>>,
}

impl Counting {
    async fn start(capacity: usize) -> (Self, String) {
        let counting = Self(Arc::new(State { capacity, ..State::default() }));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let own = counting.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(serve(own.clone(), stream));
            }
        });
        (counting, url)
    }
}

async fn serve(counting: Counting, mut stream: TcpStream) {
    let mut head = [0; 12];
    while stream.peek(&mut head).await.unwrap_or(12) < 12 {}
    if head.starts_with(b"GET /schema") {
        let schema = json!({"action": {"properties": {"guess": {"type": "string"}, "metadata": {"type": "object"}}}});
        let body = schema.to_string();
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        stream.write_all(answer.as_bytes()).await.unwrap();
        return;
    }
    let state = &counting.0;
    if state.open.fetch_add(1, Ordering::SeqCst) >= state.capacity {
        refuse(&mut stream, state.capacity).await;
        state.open.fetch_sub(1, Ordering::SeqCst);
        return;
    }
    let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
    let mut turn = 0;
    while let Some(Ok(message)) = socket.next().await {
        let Message::Text(text) = message else { continue };
        let message: Value = serde_json::from_str(&text).unwrap();
        let data = match message["type"].as_str().unwrap() {
            "reset" => {
                state.begun.lock().unwrap().push(message["data"].clone());
                json!({"observation": {"prompt": "Guess.", "left": 3}, "reward": null, "done": false})
            }
            "step" => match message["data"]["guess"].as_str() {
                Some("drop") => break,
                Some("fail") => {
                    let error = json!({"type": "error", "data": {"message": "broken", "code": "EXECUTION_ERROR"}});
                    socket.send(Message::text(error.to_string())).await.unwrap();
                    continue;
                }
                guess => {
                    turn += 1;
                    let said = format!("{turn}: {}", guess.unwrap());
                    json!({"observation": {"said": said}, "reward": 0.5, "done": turn == 3})
                }
            },
            _ => break,
        };
        // A ping before the answer, as uvicorn sends them at any time.
        socket.send(Message::Ping(Default::default())).await.unwrap();
        socket.send(Message::text(json!({"type": "observation", "data": data}).to_string())).await.unwrap();
    }
    state.open.fetch_sub(1, Ordering::SeqCst);
}

/// Accepts a WebSocket, says that there is no room, and closes it, all in one packet: the client has the answer before it asks.
async fn refuse(stream: &mut TcpStream, capacity: usize) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    let key = head.lines().find_map(|line| line.strip_prefix("sec-websocket-key: ")).expect("a key");
    let accept = derive_accept_key(key.as_bytes());
    let full =
        json!({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": capacity}});
    let full = full.to_string();
    let mut bytes = format!(
        "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: {accept}\r\n\r\n"
    )
    .into_bytes();
    bytes.extend([0x81, u8::try_from(full.len()).ok().filter(|len| *len < 126).expect("a short frame")]);
    bytes.extend(full.as_bytes());
    bytes.extend([0x88, 2, 0x03, 0xe8]);
    stream.write_all(&bytes).await.unwrap();
}

#[tokio::test]
async fn an_episode_is_one_connection_and_sixty_four_are_played_at_once() {
    let (counting, url) = Counting::start(64).await;
    let (server, _rewards) = server(&format!("{url}/ws"), json!({"reset": {"words": 5}}), JobId::new(), None);
    let all: Vec<EpisodeCall> = (0..64).map(|index| reset(episode(index))).collect();
    for begun in server.ask(RolloutId::train(1), &all).await.unwrap() {
        let Reply::Reset(begun) = begun else { panic!("{begun:?}") };
        assert_eq!(begun.messages, [json!({"role": "user", "content": "Guess."})]);
    }
    for turn in 0..3 {
        let all: Vec<EpisodeCall> = (0..64).map(|index| says(episode(index), turn, &format!("g{index}"))).collect();
        for (index, reply) in server.ask(RolloutId::train(1), &all).await.unwrap().into_iter().enumerate() {
            let said = json!({"role": "user", "content": format!("{}: g{index}", turn + 1)});
            assert_eq!(answer(Ok(reply)), (vec![said], Some(0.5), turn == 2));
        }
    }
    server.ask(RolloutId::train(1), &(0..64).map(|index| close(episode(index))).collect::<Vec<_>>()).await.unwrap();
    let begun = counting.0.begun.lock().unwrap().clone();
    assert_eq!(begun.len(), 64);
    assert_eq!((&begun[0]["level"], &begun[0]["words"], &begun[0]["seed"]), (&json!(2), &json!(5), &json!(12)));
    assert!(begun[0]["episode_id"].as_str().unwrap().starts_with("ep_"));
    let closed = async {
        while counting.0.open.load(Ordering::SeqCst) > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(5), closed).await.expect("the connections are closed");
}

#[tokio::test]
async fn a_dropped_connection_loses_its_episode_and_an_error_of_the_environment_leaves_no_reward() {
    let (_, url) = Counting::start(8).await;
    let (job, book) = (JobId::new(), Arc::new(Book::default()));
    let (server, rewards) = server(&url, json!({}), job, Some(book));
    let mut notices = rewards.notices().unwrap();
    server.ask(RolloutId::train(1), &[reset(episode(0)), reset(episode(1))]).await.unwrap();
    assert_eq!(answer(reply(&server, says(episode(0), 0, "a")).await).1, Some(0.5));
    assert_eq!(reply(&server, says(episode(0), 1, "drop")).await, Ok(Reply::Lost));
    let lost = notices.recv().await.unwrap();
    let Event::Warning { code, message, .. } = &lost else { panic!("{lost:?}") };
    assert!(code == "environment_lost" && message.contains("not the bytes of a run without the loss"), "{message}");
    // The other attempt is an episode of its own.
    let again = EpisodeId { attempt: 1, ..episode(0) };
    assert!(matches!(reply(&server, reset(again.clone())).await, Ok(Reply::Reset(_))));
    assert_eq!(answer(reply(&server, says(again, 0, "b")).await).0[0]["content"], "1: b");
    let failed = reply(&server, says(episode(1), 0, "fail")).await;
    assert!(
        matches!(&failed, Ok(Reply::Failed { message, .. }) if message.contains("EXECUTION_ERROR: broken")),
        "{failed:?}"
    );
}

#[tokio::test]
async fn a_resumed_run_replays_what_was_answered_and_begins_the_rest_again() {
    let (counting, url) = Counting::start(8).await;
    let (job, book) = (JobId::new(), Arc::new(Book::default()));
    let (first, _rewards) = server(&url, json!({}), job, Some(book.clone()));
    let begun = reply(&first, reset(episode(0))).await;
    let turn = answer(reply(&first, says(episode(0), 0, "a")).await);
    drop(first);
    let (second, _rewards) = server(&url, json!({}), job, Some(book.clone()));
    assert_eq!(reply(&second, reset(episode(0))).await, begun);
    assert_eq!(answer(reply(&second, says(episode(0), 0, "a")).await), turn);
    assert_eq!(counting.0.begun.lock().unwrap().len(), 1, "nothing was asked again");
    assert_eq!(reply(&second, says(episode(0), 1, "b")).await, Ok(Reply::Lost));
    let (third, _rewards) = server(&url, json!({}), job, Some(book));
    assert_eq!(reply(&third, says(episode(0), 1, "b")).await, Ok(Reply::Lost), "the loss is recorded too");
}

#[tokio::test]
async fn a_server_for_one_episode_is_played_one_after_another_and_refused_with_more() {
    let (_, url) = Counting::start(1).await;
    let (server, _rewards) = server(&url, json!({}), JobId::new(), None);
    for index in 0..5 {
        assert!(matches!(reply(&server, reset(episode(index))).await, Ok(Reply::Reset(_))), "episode {index}");
        assert_eq!(answer(reply(&server, says(episode(index), 0, "a")).await).0[0]["content"], "1: a");
        reply(&server, close(episode(index))).await.unwrap();
    }
    let both = server.ask(RolloutId::train(1), &[reset(episode(8)), reset(episode(9))]).await;
    let Err(RewardFailure::Unusable { detail, .. }) = &both else { panic!("{both:?}") };
    assert!(detail.contains("1 episodes at a time") && detail.contains("max_open_episodes to 1"), "{detail}");
}

#[tokio::test]
async fn a_server_that_is_away_pauses_the_job_and_one_that_is_none_fails_it() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let mut plan = plan(&url, json!({"action_field": "guess"}));
    plan.service.max_outage_s = 1;
    let policy = OutgoingPolicy::parse(&["127.0.0.1/32"]).unwrap();
    let client = RewardClient::new(&policy).unwrap().with_pace(Pace::new(0.01).unwrap());
    let deps = RewardDeps { client: client.clone(), journal: None, models: None, previous_reports: Vec::new() };
    let rewards = Rewards::with_deps(&[], &BTreeMap::new(), deps).unwrap();
    let away = rewards.environment(&plan, &BTreeMap::new(), (&client, None), JobId::new()).unwrap();
    let away = reply(&away, reset(episode(0))).await;
    assert!(matches!(away, Err(RewardFailure::Outage { .. })), "{away:?}");
    let service = crate::service::Service::start(|_, _| crate::service::text(404, "")).await;
    let (other, _rewards) = server(&service.url(), json!({}), JobId::new(), None);
    let other = reply(&other, reset(episode(0))).await;
    assert!(matches!(&other, Err(RewardFailure::Unusable { detail, .. }) if detail.contains("/schema")), "{other:?}");
}

/// A server of the real package.
struct Real(Child);

impl Drop for Real {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server of the package `openenv`; `None` if no Python with it is known.
fn real(kind: &str, capacity: usize) -> Option<(Real, String)> {
    let Ok(python) = std::env::var("RLOOD_OPENENV_PYTHON") else {
        println!("skipped: RLOOD_OPENENV_PYTHON names no Python that has the package openenv");
        return None;
    };
    let script = rlood_test_support::fixture("peers/openenv_server.py");
    let mut child = Command::new(python)
        .arg(script)
        .args([kind, &capacity.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the Python of RLOOD_OPENENV_PYTHON starts");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let port = lines
        .find_map(|line| line.unwrap().strip_prefix("port ").map(str::to_owned))
        .expect("the server says its port");
    Some((Real(child), format!("http://127.0.0.1:{port}")))
}

#[tokio::test]
async fn sixty_four_episodes_of_the_real_package_are_played_at_once() {
    let Some((_real, url)) = real("text", 64) else { return };
    let (server, _rewards) = server(&url, json!({}), JobId::new(), None);
    let all: Vec<EpisodeCall> = (0..64).map(|index| reset(episode(index))).collect();
    for begun in server.ask(RolloutId::train(1), &all).await.unwrap() {
        let Reply::Reset(begun) = begun else { panic!("{begun:?}") };
        assert_eq!(begun.messages[0]["content"], "seed 12, level 2", "the columns that the environment takes");
    }
    for turn in 0..3 {
        let all: Vec<EpisodeCall> = (0..64).map(|index| says(episode(index), turn, &format!("w{index}"))).collect();
        for (index, reply) in server.ask(RolloutId::train(1), &all).await.unwrap().into_iter().enumerate() {
            let (messages, reward, done) = answer(Ok(reply));
            assert_eq!(messages[0]["content"], format!("try {}: w{index}", turn + 1));
            assert_eq!((reward, done), ((turn == 2).then_some(1.0), turn == 2));
        }
    }
}

#[tokio::test]
async fn the_real_package_with_room_for_one_plays_one_after_another_and_loses_what_is_dropped() {
    let Some((_real, url)) = real("text", 1) else { return };
    let (server_one, _rewards) = server(&url, json!({}), JobId::new(), None);
    for index in 0..4 {
        assert!(matches!(reply(&server_one, reset(episode(index))).await, Ok(Reply::Reset(_))), "episode {index}");
        assert_eq!(answer(reply(&server_one, says(episode(index), 0, "a")).await).0[0]["content"], "try 1: a");
        reply(&server_one, close(episode(index))).await.unwrap();
    }
    let both = server_one.ask(RolloutId::train(1), &[reset(episode(8)), reset(episode(9))]).await;
    assert!(
        matches!(&both, Err(RewardFailure::Unusable { detail, .. }) if detail.contains("max_open_episodes to 1")),
        "{both:?}"
    );
    drop(server_one);
    // The server ends in the middle of an episode.
    let (real, url) = real("text", 8).unwrap();
    let (server, _rewards) = server(&url, json!({}), JobId::new(), None);
    assert!(matches!(reply(&server, reset(episode(0))).await, Ok(Reply::Reset(_))));
    assert_eq!(answer(reply(&server, says(episode(0), 0, "a")).await).0[0]["content"], "try 1: a");
    drop(real);
    assert_eq!(reply(&server, says(episode(0), 1, "b")).await, Ok(Reply::Lost));
}

#[tokio::test]
async fn the_tools_of_the_real_package_are_listed_and_called() {
    let Some((_real, url)) = real("tools", 4) else { return };
    let (server, _rewards) = server(&url, json!({}), JobId::new(), None);
    let begun = reply(&server, reset(episode(0))).await;
    let Ok(Reply::Reset(begun)) = begun else { panic!("{begun:?}") };
    assert_eq!(begun.tools[0]["function"]["name"], "add");
    assert_eq!(begun.tools[0]["function"]["parameters"]["required"], json!(["a", "b"]));
    let (messages, _, done) = answer(reply(&server, calls(episode(0), 0, "add", &json!({"a": 2, "b": 3}))).await);
    assert_eq!((messages[0]["role"].as_str(), messages[0]["content"].as_str(), done), (Some("tool"), Some("5"), false));
    let (messages, ..) = answer(reply(&server, calls(episode(0), 1, "add", &json!({"a": "x", "b": 3}))).await);
    assert!(messages[0]["content"].as_str().unwrap().to_lowercase().contains("error"), "{messages:?}");
}
