//! Tools without an environment: HTTP tools in the Azure form, MCP servers over streamable HTTP, failures and the journal.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Method, Response};
use rlood_rewards::client::{Pace, RewardClient};
use rlood_rewards::episodes::EpisodeServer;
use rlood_rewards::{JobContext, RewardDeps, RewardFailure, Rewards};
use rlood_types::environment::{Ask, Episode, EpisodeCall, EpisodeId, EpisodeLimits, EpisodeStop, Reply, Reset, Step};
use rlood_types::event::FinishReason;
use rlood_types::id::JobId;
use rlood_types::outgoing::OutgoingPolicy;
use rlood_types::rollout::{RewardValue, RolloutId};
use rlood_types::spec::{EnvironmentPlan, RewardSecrets};
use serde_json::{Value, json};

use crate::journal::Book;
use crate::service::{Service, ok, samples, text};

fn plan(tools: Value) -> EnvironmentPlan {
    serde_json::from_value(json!({
        "name": "environment", "type": "tools", "max_turns": 4, "max_episode_tokens": 100, "max_observation_tokens": 20,
        "return": "sum", "tool_parser": "auto", "on_parse_error": "reply", "max_parse_errors": 2, "max_restarts": 1,
        "url": "", "tools": tools, "max_concurrency": 4, "max_batch_samples": 1, "max_batch_bytes": 1_000_000,
        "timeout_ms": 2_000, "deadline_ms": 10_000, "max_tries": 3, "max_invalid_tries": 1, "on_invalid": "mask",
        "max_outage_s": 1
    }))
    .unwrap()
}

fn add(url: &str) -> Value {
    json!({"type": "http", "name": "add", "server_url": url, "description": "Adds.", "parameters": {"type": "object"}})
}

fn client() -> RewardClient {
    let policy = OutgoingPolicy::parse(&["127.0.0.1/32"]).unwrap();
    RewardClient::new(&policy).unwrap().with_pace(Pace::new(0.001).unwrap())
}

fn deps() -> RewardDeps {
    RewardDeps { client: client(), journal: None, models: None, previous_reports: Vec::new() }
}

fn server(tools: Value, job: JobId, book: Option<Arc<Book>>) -> EpisodeServer {
    let rewards = Rewards::with_deps(&[], &BTreeMap::new(), deps()).unwrap();
    let headers = BTreeMap::from([("authorization".to_owned(), "Bearer s3cret-of-tools".to_owned())]);
    let secret = RewardSecrets { headers, ..RewardSecrets::default() };
    let secrets = BTreeMap::from([("tool:add".to_owned(), secret.clone()), ("tool:mcp".to_owned(), secret)]);
    let journal = book.map(|book| book as Arc<dyn rlood_rewards::journal::Journal>);
    rewards.environment(&plan(tools), &secrets, (&client(), journal), job).unwrap()
}

fn episode() -> EpisodeId {
    EpisodeId { row: 3, index: 1, attempt: 0 }
}

fn reset() -> EpisodeCall {
    let reset = Reset {
        seed: 12,
        messages: vec![json!({"role": "user", "content": "What is 1 + 2?"})],
        columns: [("answer".to_owned(), json!(3))].into_iter().collect(),
        limits: EpisodeLimits { max_turns: 4, max_tokens: 100 },
    };
    EpisodeCall { episode: episode(), ask: Ask::Reset(Box::new(reset)) }
}

fn step(turn: u32, calls: &[(&str, Value)]) -> EpisodeCall {
    let call = |(index, (name, arguments)): (usize, &(&str, Value))| json!({"id": format!("call_{turn}_{index}"), "type": "function", "function": {"name": name, "arguments": arguments.to_string()}});
    let calls: Vec<Value> = calls.iter().enumerate().map(call).collect();
    let step = Step {
        turn,
        session: None,
        message: json!({"role": "assistant", "content": "", "tool_calls": calls}),
        text: String::new(),
        finish_reason: FinishReason::Stop,
        num_tokens: 2,
        turns_left: 3,
        tokens_left: 90,
        is_final: false,
    };
    EpisodeCall { episode: episode(), ask: Ask::Step(Box::new(step)) }
}

async fn reply(server: &EpisodeServer, call: EpisodeCall) -> Result<Reply, RewardFailure> {
    server.ask(RolloutId::train(1), &[call]).await.map(|mut replies| replies.remove(0))
}

/// The contents of the tool messages of a reply.
fn contents(reply: Result<Reply, RewardFailure>) -> Vec<String> {
    let Ok(Reply::Step(answer)) = reply else { panic!("{reply:?}") };
    assert_eq!((answer.reward, answer.done), (None, false), "tools pay no reward");
    answer.messages.iter().map(|message| message["content"].as_str().unwrap().to_owned()).collect()
}

/// Answers a call with the sum of `a` and `b`.
fn sum(request: &Value) -> Value {
    let arguments: Value = serde_json::from_str(request["arguments"].as_str().unwrap()).unwrap();
    let sum = arguments["a"].as_i64().unwrap() + arguments["b"].as_i64().unwrap();
    json!({"type": "function_call_output", "call_id": request["call_id"], "id": request["id"], "output": sum.to_string()})
}

#[tokio::test]
async fn an_http_tool_gets_the_body_of_azure_and_the_same_ids_in_every_attempt() {
    let service = Service::start(|_, request| ok(&sum(request))).await;
    let job = JobId::new();
    for _ in 0..2 {
        let server = server(json!([add(&service.url())]), job, None);
        let Ok(Reply::Reset(begun)) = reply(&server, reset()).await else { panic!("begun") };
        assert_eq!(begun.tools[0]["function"]["name"], "add");
        let calls = [("add", json!({"a": 1, "b": 2})), ("add", json!({"a": 3, "b": 4}))];
        let answered = reply(&server, step(0, &calls)).await;
        let Ok(Reply::Step(answer)) = &answered else { panic!("{answered:?}") };
        assert_eq!(answer.messages[1]["tool_call_id"], "call_0_1");
        assert_eq!(contents(answered), ["3", "7"]);
        assert_eq!(contents(reply(&server, step(1, &[])).await), [""; 0], "a turn without a call ends the episode");
        let EpisodeCall { episode, ask: Ask::Step(mut last) } = step(1, &calls) else { panic!("a step") };
        last.is_final = true;
        assert_eq!(contents(reply(&server, EpisodeCall { episode, ask: Ask::Step(last) }).await), [""; 0]);
    }
    let requests = service.requests();
    assert_eq!(requests.len(), 4);
    assert_eq!(requests[..2], requests[2..], "the same bytes in every attempt");
    let first = &requests[0];
    assert_eq!(first["type"], "function_call");
    assert_eq!(first["arguments"], r#"{"a":1,"b":2}"#);
    assert_eq!(first["item"], json!({"answer": 3, "messages": [{"role": "user", "content": "What is 1 + 2?"}]}));
    assert_ne!(first["call_id"], requests[1]["call_id"]);
    assert_eq!(first["trace_id"], requests[1]["trace_id"]);
    for (headers, body) in service.seen.lock().unwrap().iter() {
        let request: Value = serde_json::from_slice(body).unwrap();
        assert_eq!(headers["idempotency-key"], request["call_id"].as_str().unwrap());
        assert_eq!(headers["authorization"], "Bearer s3cret-of-tools");
    }
}

#[tokio::test]
async fn refusals_are_shown_to_the_model_and_failures_leave_no_reward() {
    let answers = |answers: Vec<Response<Body>>| {
        let answers = Mutex::new(answers);
        Service::start(move |_, request| {
            let mut answers = answers.lock().unwrap();
            if answers.is_empty() { ok(&sum(request)) } else { answers.remove(0) }
        })
    };
    let call = || step(0, &[("add", json!({"a": 1, "b": 2}))]);
    for (given, expected, requests) in [
        (vec![text(422, "b must be positive; Bearer s3cret-of-tools")], "error 422: b must be positive; (redacted)", 1),
        (vec![text(503, ""), text(500, "")], "3", 3),
        (vec![text(200, "{}"), text(200, "no JSON")], "3", 3),
        (vec![ok(&json!({"output": {"x": [1]}}))], r#"{"x":[1]}"#, 1),
        (
            vec![text(200, "x".repeat((1 << 20) + 1))],
            "error 413: the answer of the tool has more than 1048576 bytes",
            1,
        ),
    ] {
        let service = answers(given).await;
        let server = server(json!([add(&service.url())]), JobId::new(), None);
        assert_eq!(contents(reply(&server, call()).await), [expected]);
        assert_eq!(service.requests().len(), requests, "{expected}");
    }
    let service = answers(vec![text(500, ""), text(502, ""), text(500, "")]).await;
    let failed = reply(&server(json!([add(&service.url())]), JobId::new(), None), call()).await;
    assert!(matches!(&failed, Ok(Reply::Failed { code, .. }) if code == "tool_failed"), "{failed:?}");
    assert_eq!(service.requests().len(), 3);
    let service = answers(vec![text(302, "")]).await;
    let failed = reply(&server(json!([add(&service.url())]), JobId::new(), None), call()).await;
    assert!(matches!(&failed, Ok(Reply::Failed { message, .. }) if message.contains("redirects")), "{failed:?}");
    // A server that is away pauses the job.
    let url = service.url();
    drop(service);
    let away = reply(&server(json!([add(&url)]), JobId::new(), None), call()).await;
    assert!(matches!(away, Err(RewardFailure::Outage { .. })), "{away:?}");
}

#[tokio::test]
async fn a_recorded_answer_is_used_again_and_a_lost_one_is_asked_for_with_the_same_id() {
    let service = Service::start(|_, request| ok(&sum(request))).await;
    let (job, book) = (JobId::new(), Arc::new(Book::default()));
    let calls = || step(0, &[("add", json!({"a": 1, "b": 2})), ("add", json!({"a": 2, "b": 2}))]);
    let tools = json!([add(&service.url())]);
    let first = contents(reply(&server(tools.clone(), job, Some(book.clone())), calls()).await);
    assert_eq!(contents(reply(&server(tools.clone(), job, Some(book.clone())), calls()).await), first);
    assert_eq!(service.requests().len(), 2, "nothing is asked again");
    // The worker is lost after the second question was recorded, and before its answer was.
    let lost = Arc::new(Book { lost_at: Some((4, false)), ..Book::default() });
    let job = JobId::new();
    let failed = reply(&server(tools.clone(), job, Some(lost.clone())), calls()).await;
    assert!(matches!(failed, Err(RewardFailure::JournalClosed { .. })), "{failed:?}");
    let entries = Arc::new(Mutex::new(lost.entries.lock().unwrap().clone()));
    let again = Arc::new(Book { entries, ..Book::default() });
    assert_eq!(contents(reply(&server(tools, job, Some(again)), calls()).await), first);
    let requests = service.requests();
    assert_eq!(requests.len(), 5);
    assert_eq!(requests[3], requests[4], "the call whose answer was lost is repeated with the same id");
}

#[tokio::test]
async fn no_reward_judges_an_episode_that_a_tool_has_broken_off() {
    let length = json!({"reward": {"type": "length", "min_words": 0, "max_words": 5}});
    let (length, _) = rlood_types::spec::read_single_reward(&length).unwrap();
    let rewards = Rewards::with_deps(&[length], &BTreeMap::new(), deps()).unwrap();
    let mut samples = samples(2, 2);
    let episode = |stop| Episode {
        turns: Vec::new(),
        total: None,
        stop,
        restarts: 0,
        special_tokens_escaped: 0,
        opening: Vec::new(),
        num_tools: 0,
    };
    samples[0].episode = Some(Box::new(episode(EpisodeStop::Failed)));
    samples[1].episode = Some(Box::new(episode(EpisodeStop::NoCall)));
    let job = JobContext { job: JobId::new(), rollout: RolloutId::train(1), probe: false };
    let scored = rewards.score(&job, &samples).await.unwrap();
    assert_eq!(scored.scores[0].values, [RewardValue::Missing]);
    assert!(matches!(scored.scores[1].values[..], [RewardValue::Number(_)]), "{:?}", scored.scores);
    samples[1].episode = samples[0].episode.clone();
    let scored = rewards.score(&job, &samples).await.unwrap();
    assert!(scored.scores.iter().all(|score| score.values == [RewardValue::Missing]), "{:?}", scored.scores);
}

/// An MCP server with two pages of tools that forgets its sessions when told to.
#[derive(Clone, Default)]
struct Mcp(Arc<McpState>);

#[derive(Default)]
struct McpState {
    sessions: AtomicUsize,
    /// The session that the server knows.
    current: Mutex<Option<String>>,
    /// Requests as (HTTP method, JSON-RPC method, id, session).
    seen: Mutex<Vec<(String, String, Value, String)>>,
    /// Whether answers are streams of events.
    streams: bool,
    tools: Vec<&'static str>,
}

impl Mcp {
    async fn start(streams: bool, tools: Vec<&'static str>) -> (Self, String) {
        let mcp = Mcp(Arc::new(McpState { streams, tools, ..McpState::default() }));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        let app = Router::new().fallback(answer_mcp).with_state(mcp.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        (mcp, url)
    }

    fn methods(&self) -> Vec<String> {
        self.0.seen.lock().unwrap().iter().map(|(_, method, ..)| method.clone()).collect()
    }
}

async fn answer_mcp(
    State(mcp): State<Mcp>,
    method: Method,
    headers: HeaderMap,
    body: axum::body::Bytes,
) -> Response<Body> {
    let state = &mcp.0;
    let header = |name: &str| headers.get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default();
    let request: Value = serde_json::from_slice(&body).unwrap_or_default();
    let rpc = request["method"].as_str().unwrap_or_default().to_owned();
    let session = header("mcp-session-id");
    state.seen.lock().unwrap().push((method.to_string(), rpc.clone(), request["id"].clone(), session.clone()));
    if method == Method::DELETE {
        return text(204, "");
    }
    let accepted = header("accept");
    if !accepted.contains("application/json") || !accepted.contains("text/event-stream") {
        return text(406, "");
    }
    if rpc == "initialize" {
        let name = format!("session-{}", state.sessions.fetch_add(1, Ordering::SeqCst));
        *state.current.lock().unwrap() = Some(name.clone());
        let result = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "fake"}});
        let mut response = ok(&json!({"jsonrpc": "2.0", "id": request["id"], "result": result}));
        response.headers_mut().insert("content-type", "application/json".parse().unwrap());
        response.headers_mut().insert("mcp-session-id", name.parse().unwrap());
        return response;
    }
    if state.current.lock().unwrap().as_deref() != Some(session.as_str()) {
        return text(404, "unknown session");
    }
    if header("mcp-protocol-version") != "2025-06-18" {
        return text(400, "no version");
    }
    let mut answer = match rpc.as_str() {
        "notifications/initialized" => return text(202, ""),
        "tools/list" => {
            let page = usize::from(request["params"]["cursor"] == "more");
            let tool = |name: &&str| json!({"name": name, "description": "A tool.", "inputSchema": {"type": "object"}, "title": "x"});
            let tools: Vec<Value> =
                state.tools.iter().skip(page).take(if page == 0 { 1 } else { 9 }).map(tool).collect();
            let mut result = json!({"tools": tools});
            if page == 0 {
                result["nextCursor"] = json!("more");
            }
            json!({"result": result})
        }
        "tools/call" => match request["params"]["name"].as_str().unwrap() {
            "echo" => {
                json!({"result": {"content": [{"type": "text", "text": request["params"]["arguments"].to_string()}], "isError": false}})
            }
            "fail" => json!({"result": {"content": [{"type": "text", "text": "it broke"}], "isError": true}}),
            "refuse" => json!({"error": {"code": -32602, "message": "bad arguments"}}),
            _ => json!({"error": {"code": -32603, "message": "inside"}}),
        },
        _ => json!({"error": {"code": -32601, "message": "unknown method"}}),
    };
    (answer["jsonrpc"], answer["id"]) = (json!("2.0"), request["id"].clone());
    if !state.streams {
        let mut response = ok(&answer);
        response.headers_mut().insert("content-type", "application/json".parse().unwrap());
        return response;
    }
    let note = json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {}});
    let mut response =
        text(200, format!(": hello\r\n\r\nevent: message\r\ndata: {note}\r\n\r\nevent: message\ndata: {answer}\n\n"));
    response.headers_mut().insert("content-type", "text/event-stream; charset=utf-8".parse().unwrap());
    response
}

fn mcp_tools(url: &str, allow: &[&str]) -> Value {
    json!([{"type": "mcp", "name": "mcp", "url": url, "allow": allow}])
}

#[tokio::test]
async fn the_tools_of_an_mcp_server_are_listed_called_and_its_session_is_closed() {
    for streams in [false, true] {
        let (mcp, url) = Mcp::start(streams, vec!["hidden", "echo", "fail", "refuse", "inside"]).await;
        let (job, book) = (JobId::new(), Arc::new(Book::default()));
        let tools = mcp_tools(&url, &["fail", "echo", "refuse", "inside"]);
        let server_of = || server(tools.clone(), job, Some(book.clone()));
        let server = server_of();
        let Ok(Reply::Reset(begun)) = reply(&server, reset()).await else { panic!("begun") };
        let names: Vec<&Value> = begun.tools.iter().map(|tool| &tool["function"]["name"]).collect();
        assert_eq!(names, ["fail", "echo", "refuse", "inside"], "the allowed ones, in their order");
        assert_eq!(begun.tools[1]["function"]["parameters"], json!({"type": "object"}));
        reply(&server, reset()).await.unwrap();
        let calls = step(0, &[("echo", json!({"x": 1})), ("fail", json!({})), ("refuse", json!({}))]);
        let first = contents(reply(&server, calls.clone()).await);
        assert_eq!(first, [r#"{"x":1}"#, "it broke", "error: bad arguments"]);
        // The server forgets the session: another one is opened, and the call is sent again with its id.
        *mcp.0.current.lock().unwrap() = None;
        assert_eq!(contents(reply(&server, step(1, &[("echo", json!({"x": 2}))])).await), [r#"{"x":2}"#]);
        assert_eq!(mcp.0.sessions.load(Ordering::SeqCst), 2);
        let failed = reply(&server, step(2, &[("inside", json!({}))])).await;
        assert!(matches!(&failed, Ok(Reply::Failed { code, .. }) if code == "tool_failed"), "{failed:?}");
        server.close().await;
        {
            let seen = mcp.0.seen.lock().unwrap();
            let (method, _, _, session) = seen.last().unwrap();
            assert_eq!((method.as_str(), session.as_str()), ("DELETE", "session-1"));
            let lists = seen.iter().filter(|(_, method, ..)| method == "tools/list").count();
            assert_eq!(lists, 2, "two pages, once a rollout");
            let ids: Vec<&Value> =
                seen.iter().filter(|(_, method, ..)| method == "tools/call").map(|(_, _, id, _)| id).collect();
            assert_eq!((ids.len(), ids[3]), (3 + 2 + 3, ids[4]));
        }
        // A resumed run sees the same tools and answers, and asks nothing.
        let before = mcp.methods().len();
        let server = server_of();
        let Ok(Reply::Reset(again)) = reply(&server, reset()).await else { panic!("begun") };
        assert_eq!(again.tools, begun.tools);
        assert_eq!(contents(reply(&server, calls).await), first);
        assert_eq!(mcp.methods().len(), before);
    }
}

#[tokio::test]
async fn an_mcp_server_without_an_allowed_tool_fails_the_job_and_one_that_is_away_pauses_it() {
    let (_, url) = Mcp::start(false, vec!["echo", "other"]).await;
    let server_of = |url: &str| server(mcp_tools(url, &["echo", "gone"]), JobId::new(), None);
    let failed = reply(&server_of(&url), reset()).await;
    let Err(RewardFailure::Unusable { detail, .. }) = &failed else { panic!("{failed:?}") };
    assert!(detail.contains("'gone'") && detail.contains("echo, other"), "{detail}");
    let service = Service::start(|_, _| text(401, "no key")).await;
    let failed = reply(&server_of(&service.url()), reset()).await;
    assert!(matches!(&failed, Err(RewardFailure::Unusable { detail, .. }) if detail.contains("401")), "{failed:?}");
    let url = service.url();
    drop(service);
    let away = reply(&server_of(&url), reset()).await;
    assert!(matches!(away, Err(RewardFailure::Outage { .. })), "{away:?}");
    let service = Service::start(|_, _| text(503, "")).await;
    let away = reply(&server_of(&service.url()), reset()).await;
    assert!(matches!(away, Err(RewardFailure::Outage { .. })), "{away:?}");
}

/// A server of the package `fastmcp`.
struct Real(std::process::Child);

impl Drop for Real {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_server_of_the_real_package_lists_its_tools_and_answers_their_calls() {
    use std::io::BufRead;
    let Ok(python) = std::env::var("RLOOD_MCP_PYTHON") else {
        println!("skipped: RLOOD_MCP_PYTHON names no Python that has the package fastmcp");
        return;
    };
    let script = rlood_test_support::fixture("peers/fastmcp_server.py");
    let mut child = std::process::Command::new(python)
        .arg(script)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the Python of RLOOD_MCP_PYTHON starts");
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
    let port = lines.find_map(|line| line.unwrap().strip_prefix("port ").map(str::to_owned)).expect("its port");
    let _real = Real(child);
    let url = format!("http://127.0.0.1:{port}/mcp");
    let server = server(mcp_tools(&url, &["fail", "add"]), JobId::new(), None);
    let Ok(Reply::Reset(begun)) = reply(&server, reset()).await else { panic!("begun") };
    let names: Vec<&Value> = begun.tools.iter().map(|tool| &tool["function"]["name"]).collect();
    assert_eq!(names, ["fail", "add"]);
    assert_eq!(begun.tools[1]["function"]["parameters"]["required"], json!(["a", "b"]));
    let calls = [("add", json!({"a": 2, "b": 3})), ("fail", json!({})), ("add", json!({"a": 20, "b": 22}))];
    let answers = contents(reply(&server, step(0, &calls)).await);
    assert_eq!((answers[0].as_str(), answers[2].as_str()), ("5", "42"));
    assert!(answers[1].contains("it broke"), "{answers:?}");
    server.close().await;
    // After the DELETE the server does not know the session; the next call opens another one.
    assert_eq!(contents(reply(&server, step(1, &[("add", json!({"a": 1, "b": 1}))])).await), ["2"]);
}
