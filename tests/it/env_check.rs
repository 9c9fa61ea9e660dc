//! `rlood env check` against a server that keeps the contract of environments, and against one server for each way to break it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::Response;
use rlood::commands::env_check::examine;
use rlood::commands::reward_check::{Outcome, Report};
use rlood::config::EnvCheckArgs;
use serde_json::{Value, json};

use crate::env_serve::env_args;
use crate::server::SECRET;
use crate::service::{ok, text};

/// A server of environments that keeps the contract but for one flaw.
struct Game {
    flaw: &'static str,
    count: AtomicU64,
    /// The last turn of each episode's attempt: its number, the id of its request, its answer, and whether the episode is over.
    last: Mutex<BTreeMap<String, (i64, Value, Value, bool)>>,
}

impl Game {
    /// Starts it and returns its URL.
    async fn start(flaw: &'static str) -> String {
        let game = Arc::new(Game { flaw, count: AtomicU64::new(0), last: Mutex::default() });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/play", listener.local_addr().unwrap());
        let answer = |State(game): State<Arc<Game>>, body: Bytes| async move { game.answer(&body) };
        let app = Router::new().fallback(answer).layer(axum::extract::DefaultBodyLimit::disable()).with_state(game);
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        url
    }

    fn has(&self, flaw: &str) -> bool {
        self.flaw == flaw
    }

    /// What a flaw adds to a text that should always be the same.
    fn noise(&self, flaw: &str, of: &Value) -> String {
        if self.has(flaw) { of.to_string() } else { String::new() }
    }

    fn answer(&self, body: &[u8]) -> Response<Body> {
        let Ok(request) = serde_json::from_slice::<Value>(body) else {
            return if self.has("malformed") { text(500, "oops") } else { text(400, "no JSON") };
        };
        let kind = request["type"].as_str().unwrap_or_default();
        if kind == "env.ping" {
            return match self.flaw {
                "ping" => text(500, "oops"),
                "async" | "calls back" => ok(&json!({"version": "1", "reply_modes": ["sync", "async"]})),
                "reply_modes" => ok(&json!({"version": "1", "reply_modes": "async"})),
                _ => ok(&json!({"version": "1"})),
            };
        }
        if request["version"] != "1" {
            let fails = self.has("unknown_version") && request["version"] == "2";
            return if fails { text(500, "oops") } else { text(422, "version") };
        }
        if !request["episode"].is_object() || (self.has("unknown_fields") && !request["from_the_future"].is_null()) {
            return text(422, "not such a request");
        }
        let count = json!(self.count.fetch_add(1, Ordering::SeqCst));
        let (id, episode) = (&request["id"], &request["episode"]);
        let key = format!("{} {}", episode["id"], episode["attempt"]);
        match kind {
            "env.reset.request" => {
                let mut last = self.last.lock().unwrap();
                if let Some((_, known, answer, _)) = last.get(&key).filter(|_| !self.has("reset_repeat"))
                    && known == id
                {
                    return ok(answer);
                }
                let repeat = if last.contains_key(&key) { self.noise("reset_repeat", &count) } else { String::new() };
                let [equal, restart] = [("equal_resets", &episode["id"]), ("restart", &episode["attempt"])]
                    .map(|(flaw, of)| self.noise(flaw, of));
                let content = json!(format!("Play with {}.{repeat}{equal}{restart}", episode["seed"]));
                let tool = json!({"type": "function", "function": {"name": "look", "parameters": {
                    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}});
                let role = if self.has("reset") { "assistant" } else { "user" };
                let answer = json!({"version": "1", "id": id, "messages": [{"role": role, "content": content}], "tools": [tool]});
                last.insert(key, (-1, id.clone(), answer.clone(), false));
                if let Some(url) = request["reply"]["callback_url"].as_str() {
                    let token = if self.has("async") { "forged" } else { request["reply"]["token"].as_str().unwrap() };
                    let call = reqwest::Client::builder().no_proxy().build().unwrap().post(url).bearer_auth(token);
                    let expected = if self.has("async") { 401 } else { 200 };
                    tokio::spawn(async move {
                        assert_eq!(call.json(&answer).send().await.unwrap().status(), expected);
                    });
                    return text(202, "");
                }
                ok(&answer)
            }
            "env.step.request" => self.step(&request, &key, &count),
            "env.close.request" => {
                if self.has("close") {
                    text(500, "oops")
                } else {
                    text(204, "")
                }
            }
            _ => text(422, "no such request"),
        }
    }

    fn step(&self, request: &Value, key: &str, count: &Value) -> Response<Body> {
        let mut last = self.last.lock().unwrap();
        let known = last.get(key).cloned();
        if known.is_none() && !self.has("unknown_episode") {
            return text(404, "no such episode");
        }
        let (turn, id) = (request["turn"].as_i64().unwrap(), &request["id"]);
        let (last_turn, last_id, answer, is_over) = known.unwrap_or((-1, Value::Null, Value::Null, false));
        if last_turn == turn && last_id == *id && !self.has("step_repeat") {
            return ok(&answer);
        }
        let repeats = last_turn == turn && last_id == *id;
        if turn <= last_turn && !self.has("out_of_order") && !repeats {
            return text(409, "another turn");
        }
        if is_over && !self.has("after_done") && !repeats {
            return text(409, "it is over");
        }
        let content = request["message"]["content"].as_str().unwrap();
        if self.has("huge_text") && content.len() > 100_000 {
            return text(413, "too long");
        }
        if self.has("special_text") && content.contains('\u{0}') {
            return text(500, "oops");
        }
        if self.has("step") {
            return ok(&json!({"reward": "1"}));
        }
        let calls = request["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
        if self.has("unknown_tool") && calls.iter().any(|call| call["function"]["name"] != "look") {
            return text(400, "no such tool");
        }
        let called = calls.iter().filter(|_| !self.has("tool_calls"));
        let mut messages: Vec<Value> =
            called.map(|call| json!({"role": "tool", "tool_call_id": call["id"], "content": "dark"})).collect();
        let noise = [("step_repeat", count), ("out_of_order", count), ("concurrency", &request["episode"]["id"])]
            .map(|(flaw, of)| self.noise(flaw, of))
            .concat();
        messages.push(json!({"role": "user", "content": format!("turn {turn}{noise}")}));
        let is_final = request["final"] == true;
        let reward = if is_final && !self.has("final") { json!(0.5) } else { Value::Null };
        let done = turn >= 2;
        let answer = json!({"version": "1", "id": id, "messages": messages, "reward": reward, "done": done});
        last.insert(key.to_owned(), (turn, id.clone(), answer.clone(), done));
        ok(&answer)
    }
}

/// Names of the checks with this outcome, in order.
fn named(report: &Report<Value>, outcome: Outcome) -> Vec<&'static str> {
    report.findings.iter().filter(|finding| finding.outcome == outcome).map(|finding| finding.check).collect()
}

async fn examined(flaw: &'static str) -> Report<Value> {
    examine(&env_args(&Game::start(flaw).await), false).await.unwrap()
}

#[tokio::test]
async fn a_server_that_keeps_the_contract_passes_everything() {
    let report = examined("").await;
    assert!(report.ok, "{:#?}", report.findings);
    assert_eq!(named(&report, Outcome::Warning), Vec::<&str>::new(), "{:#?}", report.findings);
    assert_eq!(named(&report, Outcome::Skipped), ["secret"], "{:#?}", report.findings);
    assert!(named(&report, Outcome::Ok).len() >= 20, "{:#?}", report.findings);
    assert!(report.summary().contains("follows the environment contract"), "{}", report.summary());
    assert!(report.latency_ms.unwrap().requests > 20);
}

#[tokio::test]
async fn a_server_that_answers_later_is_called_back() {
    let report = examined("calls back").await;
    assert!(report.ok, "{:#?}", report.findings);
    let finding = report.findings.iter().find(|finding| finding.check == "async").unwrap();
    assert!(finding.detail.contains("answered 202, and called back"), "{finding:#?}");
}

#[tokio::test]
async fn every_broken_rule_is_named() {
    for (flaw, outcome) in [
        ("ping", Outcome::Failed),
        ("reset", Outcome::Failed),
        ("reset_repeat", Outcome::Failed),
        ("equal_resets", Outcome::Failed),
        ("restart", Outcome::Failed),
        ("step", Outcome::Failed),
        ("step_repeat", Outcome::Failed),
        ("out_of_order", Outcome::Failed),
        ("after_done", Outcome::Failed),
        ("final", Outcome::Warning),
        ("tool_calls", Outcome::Failed),
        ("unknown_tool", Outcome::Warning),
        ("huge_text", Outcome::Failed),
        ("special_text", Outcome::Failed),
        ("unknown_fields", Outcome::Failed),
        ("unknown_version", Outcome::Failed),
        ("unknown_episode", Outcome::Failed),
        ("concurrency", Outcome::Warning),
        ("close", Outcome::Warning),
        ("malformed", Outcome::Failed),
        ("async", Outcome::Failed),
        ("reply_modes", Outcome::Warning),
    ] {
        let report = examined(flaw).await;
        let found = named(&report, outcome);
        assert!(found.contains(&flaw), "{flaw}: {:#?}", report.findings);
        assert_eq!(report.ok, outcome != Outcome::Failed, "{flaw}");
        let finding = report.findings.iter().find(|finding| finding.check == flaw && finding.outcome == outcome);
        assert!(finding.unwrap().fix.is_some(), "{flaw}: says what to do");
        let others: Vec<_> = found.iter().filter(|found| **found != flaw).collect();
        // Answers that are never the same break several rules at once.
        let may_break_others = matches!(flaw, "equal_resets" | "step_repeat" | "tool_calls");
        assert!(others.is_empty() || may_break_others, "{flaw}: {others:?}");
    }
}

#[tokio::test]
async fn signatures_are_tried_and_secrets_never_shown() {
    let args = EnvCheckArgs {
        secret: Some(SECRET.to_owned()),
        headers: vec!["authorization: Bearer hidden-token".to_owned()],
        ..env_args(&Game::start("").await)
    };
    let report = examine(&args, false).await.unwrap();
    assert!(report.ok);
    assert_eq!(
        named(&report, Outcome::Warning),
        ["unsigned", "wrong_signature", "tampered_body", "stale_timestamp", "future_timestamp"],
        "it verifies nothing"
    );
    let shown = serde_json::to_string(&report).unwrap();
    assert!(!shown.contains(SECRET) && !shown.contains("hidden-token"), "{shown}");

    let nobody = examine(&env_args("http://127.0.0.1:9/"), false).await.unwrap();
    assert_eq!(named(&nobody, Outcome::Failed), ["ping"]);
    for (change, part) in [
        (EnvCheckArgs { url: "nowhere".to_owned(), ..env_args("") }, "url"),
        (EnvCheckArgs { params: Some("{".to_owned()), ..env_args("http://127.0.0.1:9/") }, "--params"),
        (EnvCheckArgs { columns: vec!["answer".to_owned()], ..env_args("http://127.0.0.1:9/") }, "NAME=VALUE"),
        (EnvCheckArgs { headers: vec!["token".to_owned()], ..env_args("http://127.0.0.1:9/") }, "has no colon"),
        (EnvCheckArgs { secret: Some("short".to_owned()), ..env_args("http://127.0.0.1:9/") }, "secret"),
    ] {
        let error = examine(&change, false).await.unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
}
