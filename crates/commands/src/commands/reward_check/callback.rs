//! Checks asynchronous answers: 202 first, the rewards later by callback or at a status URL.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use reqwest::Url;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::wire::{Got, Signing};
use super::{Check, Outcome, new_id, read};
use crate::reward::signature::Key;
use crate::reward::webhook::answer::{self, Found};
use crate::rollout::RewardSample;

const BODY: &str = "POST {\"version\": \"1\", \"id\": …, \"results\": [{\"sample_id\", \"reward\"}, …], \"done\": true} to \
    reply.callback_url, with 'authorization: Bearer ' and reply.token";
/// Interval between two checks for received callbacks.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Interval between two requests to the status URL.
const ASK_STATUS: Duration = Duration::from_millis(500);

/// Address that receives callbacks.
pub(super) struct Listen {
    /// Listen address HOST:PORT; port 0 = a free one.
    pub on: String,
    /// URL at which the service reaches the callback address; None = the address itself.
    pub url: Option<String>,
}

/// Results received by callback.
#[derive(Default)]
struct Inbox {
    id: String,
    token: String,
    ids: Vec<String>,
    /// Results by sample id; the first result of each sample counts.
    results: BTreeMap<String, Value>,
    done: bool,
    problems: Vec<String>,
    callbacks: usize,
}

type Shared = Arc<Mutex<Inbox>>;

impl Check {
    /// Checks asynchronous answers. The request offers both response modes, as a server with a public address does, and the
    /// service may use either.
    pub(super) async fn asynchronous(&mut self) {
        let modes = self.ping.as_ref().and_then(|ping| ping.modes.clone()).unwrap_or_default();
        let offers = modes.iter().any(|mode| mode == "async");
        let here = self.wire.url.host_str().is_some_and(|host| {
            let address: Option<std::net::IpAddr> = host.trim_matches(['[', ']']).parse().ok();
            host == "localhost" || address.is_some_and(|address| address.is_loopback())
        });
        if !here && self.callbacks.url.is_none() {
            let detail = "the service is on another machine, which cannot reach this machine's loopback address";
            let fix = "give --callback-listen HOST:PORT, and the --callback-url at which the service reaches it";
            return self.find("async", Outcome::Skipped, detail, fix);
        }
        let Ok(listener) = TcpListener::bind(&self.callbacks.on).await else {
            let detail = format!("cannot listen on {} for callbacks", self.callbacks.on);
            return self.find("async", Outcome::Skipped, detail, "give --callback-listen HOST:PORT");
        };
        let base = match (&self.callbacks.url, listener.local_addr()) {
            (Some(url), _) => url.trim_end_matches('/').to_owned(),
            (None, Ok(address)) => format!("http://{address}"),
            (None, Err(_)) => return,
        };
        let (Ok(token), id) = (Key::generate(), new_id()) else { return };
        let token = token.trim_start_matches("whsec_").to_owned();
        self.findings.secrets.push(token.clone());
        let samples = self.samples.clone();
        let inbox: Shared = Arc::new(Mutex::new(Inbox {
            id: id.clone(),
            token: token.clone(),
            ids: samples.iter().map(|sample| sample.sample_id.clone()).collect(),
            ..Inbox::default()
        }));
        let app = Router::new().route("/reward-callbacks/{id}", post(take)).with_state(inbox.clone());
        let server = tokio::spawn(async move { axum::serve(listener, app).await });
        let mut request = self.request(&id, &samples);
        // The request lists the mode first that the service announced. A service without asynchronous mode answers immediately;
        // one with both may choose.
        request["reply"] = json!({
            "modes": if offers { json!(["async", "sync"]) } else { json!(["sync", "async"]) },
            "callback_url": format!("{base}/reward-callbacks/{id}"), "token": token,
        });
        let got = self.wire.post(&id, &request.to_string(), Signing::Right).await;
        match got {
            Ok(got) if got.status == 202 => self.later(&got, &inbox, &samples).await,
            Ok(got) => match read(&got, &id, &samples) {
                Ok(_) if offers => {
                    let detail =
                        "reward.ping announces async, but the answer came immediately although async was offered first";
                    self.find("async", Outcome::Ok, detail, "");
                }
                Ok(_) => {
                    let detail = "it does not offer async (modes in reward.ping), and answers requests with both modes immediately";
                    self.find("async", Outcome::Ok, detail, "");
                }
                Err(why) => {
                    let fix = "a request may offer both ways in reply.modes: answer 200 with the rewards, or 202 and call back";
                    self.find("async", Outcome::Failed, format!("a request that offers callbacks: {why}"), fix);
                }
            },
            Err(why) => {
                let detail = format!("a request that offers callbacks: {why}");
                self.find("async", Outcome::Failed, detail, "answer 200 with the rewards, or 202 and call back");
            }
        }
        server.abort();
    }

    /// Waits after a 202 until every sample has a result, or the time is up.
    async fn later(&mut self, got: &Got, inbox: &Shared, samples: &[RewardSample]) {
        let accepted: Value = serde_json::from_slice(&got.body).unwrap_or_default();
        let status_url = accepted.get("status_url").and_then(Value::as_str).map(str::to_owned);
        let status_url = match status_url.map(|text| self.wire.url.join(&text)) {
            Some(Err(_)) => {
                let fix = "omit it, or use an absolute URL";
                self.find("async_status", Outcome::Warning, "status_url is not a URL", fix);
                None
            }
            Some(Ok(url)) => Some(url),
            None => None,
        };
        let (start, mut asked) = (Instant::now(), Instant::now());
        let mut polled = 0;
        loop {
            let (complete, done, problem) = {
                let inbox = inbox.lock().unwrap_or_else(PoisonError::into_inner);
                (inbox.results.len() == samples.len(), inbox.done, inbox.problems.first().cloned())
            };
            if let Some(problem) = problem {
                return self.find("async", Outcome::Failed, format!("202, then a callback: {problem}"), BODY);
            }
            if complete || done {
                break;
            }
            if start.elapsed() >= self.wire.timeout {
                let have = inbox.lock().unwrap_or_else(PoisonError::into_inner).results.len();
                let detail = format!(
                    "202, then {have} of {} results within {} ms (deadline_ms)",
                    samples.len(),
                    self.wire.timeout.as_millis()
                );
                return self.find("async", Outcome::Failed, detail, BODY);
            }
            if let Some(url) = status_url.as_ref().filter(|_| asked.elapsed() >= ASK_STATUS) {
                (asked, polled) = (Instant::now(), polled + 1);
                self.ask_status(url, inbox).await;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let (missing, callbacks, done, wrong) = {
            let inbox = inbox.lock().unwrap_or_else(PoisonError::into_inner);
            let missing: Vec<String> =
                inbox.ids.iter().filter(|id| !inbox.results.contains_key(*id)).take(5).cloned().collect();
            let results: Vec<Value> = inbox.results.values().cloned().collect();
            let ids: Vec<&str> = inbox.ids.iter().map(String::as_str).collect();
            let body = json!({ "results": results }).to_string();
            let wrong = match answer::read(body.as_bytes(), &inbox.id, &ids) {
                Err(why) => Some(why),
                Ok(answer) => answer.found.into_iter().find_map(|found| match found {
                    Found::Invalid(what) => Some(what),
                    Found::Judged(_) | Found::Retryable(_) | Found::Absent => None,
                }),
            };
            (missing, inbox.callbacks, inbox.done, wrong)
        };
        let ms = start.elapsed().as_millis();
        if let Some(wrong) = wrong {
            self.find("async", Outcome::Failed, format!("202, then {wrong}"), BODY);
        } else if !missing.is_empty() {
            let detail = format!("202, then done without results for {}", missing.join(", "));
            let fix = "send \"done\": true in the callback with the last results, not in an earlier one";
            self.find("async", Outcome::Failed, detail, fix);
        } else if !done && polled == 0 {
            let fix = "send \"done\": true in the last callback: otherwise the job waits for the deadline before it requests missing results again";
            let detail = format!("all results arrived after {ms} ms, but no callback had \"done\": true");
            self.find("async", Outcome::Warning, detail, fix);
        } else {
            let detail = format!(
                "the service answered 202, then sent all results within {ms} ms in {callbacks} callbacks; {polled} requests went to status_url"
            );
            self.find("async", Outcome::Ok, detail, "");
        }
    }

    async fn ask_status(&self, url: &Url, inbox: &Shared) {
        let id = inbox.lock().unwrap_or_else(PoisonError::into_inner).id.clone();
        let Ok(got) = self.wire.get_status(&id, url.clone()).await else { return };
        if got.status != 200 {
            return;
        }
        if let Ok(body) = serde_json::from_slice::<Value>(&got.body)
            && body.get("results").is_some()
        {
            inbox.lock().unwrap_or_else(PoisonError::into_inner).accept(&body);
        }
    }
}

impl Inbox {
    /// Stores the first result of each sample in a callback. Returns the numbers of accepted, duplicate and unknown results.
    fn accept(&mut self, body: &Value) -> (u64, u64, u64) {
        let (mut accepted, mut duplicate, mut unknown) = (0, 0, 0);
        for result in body.get("results").and_then(Value::as_array).into_iter().flatten() {
            let Some(id) = result.get("sample_id").and_then(Value::as_str) else {
                self.problems.push("a result in a callback has no 'sample_id'".to_owned());
                continue;
            };
            if !self.ids.iter().any(|known| known == id) {
                unknown += 1;
            } else if self.results.contains_key(id) {
                duplicate += 1;
            } else {
                self.results.insert(id.to_owned(), result.clone());
                accepted += 1;
            }
        }
        self.done |= body.get("done") == Some(&Value::Bool(true));
        (accepted, duplicate, unknown)
    }
}

/// Receives a callback and answers it as the server does.
async fn take(State(inbox): State<Shared>, Path(id): Path<String>, headers: HeaderMap, body: Bytes) -> Response {
    let mut inbox = inbox.lock().unwrap_or_else(PoisonError::into_inner);
    let given = headers.get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default();
    inbox.callbacks += 1;
    if id != inbox.id {
        inbox.problems.push("a callback went to the callback address of another request".to_owned());
        return StatusCode::NOT_FOUND.into_response();
    }
    if given != format!("Bearer {}", inbox.token) {
        inbox
            .problems
            .push("a callback does not carry 'authorization: Bearer TOKEN' with this request's reply.token".to_owned());
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        inbox.problems.push("the body of a callback is not JSON".to_owned());
        return StatusCode::UNPROCESSABLE_ENTITY.into_response();
    };
    if body.get("results").is_some_and(|results| !results.is_array()) {
        inbox.problems.push("the 'results' of a callback are not a list".to_owned());
        return StatusCode::UNPROCESSABLE_ENTITY.into_response();
    }
    let (accepted, duplicate, unknown) = inbox.accept(&body);
    axum::Json(json!({"accepted": accepted, "duplicate": duplicate, "unknown": unknown})).into_response()
}
