//! Checks answers that come later: 202 first, the answer by callback or at a status address.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::super::contract_check::wire::Signing;
use super::{AnswerKind, Check, Outcome, Question, RequestReply, read_reply};
use crate::reward::signature::Key;
use crate::reward::webhook::environment_wire::read_callback;

const BODY: &str =
    "POST the answer, as in a response, to reply.callback_url, with 'authorization: Bearer ' and reply.token";
/// Interval between two checks for the callback.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The answers that came by callback.
struct Inbox {
    id: String,
    kind: AnswerKind,
    token: String,
    /// The first callback: valid, or the reason why it is not.
    callback: Option<Result<(), String>>,
}

type Shared = Arc<Mutex<Inbox>>;

impl Check {
    /// Checks the modes that the server announces in its answer to `env.ping`, and an answer that comes later if it announces `async`.
    pub(super) async fn asynchronous(&mut self) {
        let Some(modes) = self.ping.as_ref().and_then(|ping| ping.get("reply_modes")).cloned() else { return };
        let known = |mode: &Value| matches!(mode.as_str(), Some("sync" | "async"));
        if !modes.as_array().is_some_and(|modes| !modes.is_empty() && modes.iter().all(known)) {
            let detail =
                format!("env.ping announces the reply_modes {modes}, which must be [\"sync\"], [\"async\"] or both");
            return self.find("reply_modes", Outcome::Warning, detail, "name the modes that the server uses");
        }
        if !modes.as_array().is_some_and(|modes| modes.contains(&json!("async"))) {
            return;
        }
        let here = self.wire.url.host_str().is_some_and(|host| {
            let address: Option<std::net::IpAddr> = host.trim_matches(['[', ']']).parse().ok();
            host == "localhost" || address.is_some_and(|address| address.is_loopback())
        });
        if !here {
            let detail = "the server is on another machine, which cannot call this machine's loopback address back";
            let fix = "run the check on the server's machine to check its callbacks";
            return self.find("async", Outcome::Skipped, detail, fix);
        }
        let listener = TcpListener::bind(("127.0.0.1", 0)).await;
        let Some((listener, address)) = listener.ok().and_then(|on| on.local_addr().ok().map(|at| (on, at))) else {
            return self.find("async", Outcome::Skipped, "cannot listen on 127.0.0.1 for callbacks", "");
        };
        let Ok(token) = Key::generate() else { return };
        let token = token.trim_start_matches("whsec_").to_owned();
        self.findings.secrets.push(token.clone());
        let play = self.new_play();
        let plain = self.reset_question(&play);
        let Some(kind) = AnswerKind::of(&plain.ask) else { return };
        let reply = RequestReply {
            callback_url: Some(format!("http://{address}/environment-callbacks/{}", plain.id)),
            modes: vec!["async".to_owned(), "sync".to_owned()],
            token: Some(token.clone()),
        };
        let mut body: Value = serde_json::from_str(&plain.body).unwrap_or_default();
        body["reply"] = json!(reply);
        let question = Question { body: body.to_string(), ..plain };
        let inbox: Shared = Arc::new(Mutex::new(Inbox { id: question.id.clone(), kind, token, callback: None }));
        let app = Router::new().route("/environment-callbacks/{id}", post(take)).with_state(inbox.clone());
        let server = tokio::spawn(async move { axum::serve(listener, app).await });
        match self.answer_later(&question, &inbox).await {
            Ok(detail) => self.find("async", Outcome::Ok, detail, ""),
            Err(why) => self.find("async", Outcome::Failed, format!("a reset that offers callbacks: {why}"), BODY),
        }
        server.abort();
    }

    /// Sends a question and waits for its answer, however it comes. Returns how it came.
    async fn answer_later(&self, question: &Question, inbox: &Shared) -> Result<String, String> {
        let start = Instant::now();
        let got = self.send(question, Signing::Right).await?;
        if got.status != 202 {
            read_reply(&got, question)?;
            return Ok("env.ping announces async, and a reset was answered without a callback".to_owned());
        }
        while start.elapsed() < self.wire.timeout {
            if let Some(callback) = &inbox.lock().unwrap_or_else(PoisonError::into_inner).callback {
                callback.clone().map_err(|why| format!("202, then a callback: {why}"))?;
                return Ok(format!(
                    "the server answered 202, and called back after {} ms",
                    start.elapsed().as_millis()
                ));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Err(format!("202, then no callback within {} ms (deadline_ms)", self.wire.timeout.as_millis()))
    }
}

/// Receives a callback and answers it as the server does.
async fn take(State(inbox): State<Shared>, Path(id): Path<String>, headers: HeaderMap, body: Bytes) -> Response {
    let mut inbox = inbox.lock().unwrap_or_else(PoisonError::into_inner);
    let given = headers.get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let (status, outcome) = if id != inbox.id {
        (StatusCode::NOT_FOUND, Err("it went to the callback address of another request".to_owned()))
    } else if given != format!("Bearer {}", inbox.token) {
        let why = "it does not carry 'authorization: Bearer TOKEN' with this request's reply.token";
        (StatusCode::UNAUTHORIZED, Err(why.to_owned()))
    } else {
        match read_callback(&body, &inbox.id, inbox.kind) {
            Ok(_) => (StatusCode::OK, Ok(())),
            Err(flaws) => {
                let why: Vec<String> =
                    flaws.iter().map(|flaw| format!("{} {}", flaw.pointer, flaw.detail).trim().to_owned()).collect();
                (StatusCode::UNPROCESSABLE_ENTITY, Err(why.join("; ")))
            }
        }
    };
    let is_first = inbox.callback.is_none();
    if is_first {
        inbox.callback = Some(outcome);
    }
    let counts = json!({"accepted": u64::from(is_first), "duplicate": u64::from(!is_first), "unknown": 0});
    (status, axum::Json(counts)).into_response()
}
