//! Counts every request to a reward service, and records the failed ones for the reward's health report.

use std::time::Duration;

use reqwest::header::HeaderMap;
use serde_json::json;

use super::Webhook;
use super::breaker::Change;
use super::request::Request;
use super::wire::{NotSent, OVERSIZE, Outcome, TIMED_OUT};
use crate::event::{Event, RewardChange};
use crate::meter::Failure;
use crate::protocol::RawMessage;

/// One attempt to send a request to a reward service, with its outcome.
pub(super) struct Wire<'a> {
    pub request: &'a Request,
    /// Request headers as they were sent.
    pub headers: &'a HeaderMap,
    pub outcome: &'a Outcome,
    pub took: Duration,
}

impl Webhook {
    /// Counts one attempt to send a request, except health checks.
    pub(super) fn record_request(&self, wire: &Wire<'_>) {
        let Wire { request, headers, outcome, took } = wire;
        if request.about.samples.is_empty() {
            return;
        }
        let sent = || RawMessage {
            url: Some(self.redactor.url(&self.url)),
            status: None,
            headers: self.redactor.headers(headers),
            body: self.redactor.body(request.body.as_bytes()),
        };
        let received = || {
            let (status, headers, body) = outcome.as_ref().ok()?;
            let body = body.as_ref().map(|body| self.redactor.body(body)).unwrap_or_default();
            Some(RawMessage { url: None, status: Some(status.as_u16()), headers: self.redactor.headers(headers), body })
        };
        let event = match self.class(outcome) {
            None => self.meter.answered(&self.name, *took, &request.about, || (sent(), received())),
            Some((class, message)) => {
                let message = self.redactor.text(&message);
                let (request, response) = (sent(), received());
                let about = &wire.request.about;
                self.meter.failed(&self.name, Failure { class, message, took: *took, about, request, response })
            }
        };
        if let Some(event) = event {
            self.status.notify(event);
        }
    }

    /// Counts a service's answer that arrived but cannot be used.
    pub(super) fn record_unusable(&self, request: &Request, body: &[u8], problem: &str) {
        let failure = Failure {
            class: "invalid_answer",
            message: self.redactor.text(problem),
            took: Duration::ZERO,
            about: &request.about,
            request: RawMessage {
                url: Some(self.redactor.url(&self.url)),
                body: self.redactor.body(request.body.as_bytes()),
                ..RawMessage::default()
            },
            response: Some(RawMessage { status: Some(200), body: self.redactor.body(body), ..RawMessage::default() }),
        };
        if let Some(event) = self.meter.unusable(&self.name, failure) {
            self.status.notify(event);
        }
    }

    /// Returns the error class (as in the health report) and the message of a failed request; `None` if the request succeeded.
    fn class(&self, outcome: &Outcome) -> Option<(&'static str, String)> {
        let (status, body) = match outcome {
            Ok((status, _, body)) => (*status, body),
            Err(NotSent(why, true)) => return Some(("address_refused", why.clone())),
            Err(NotSent(why, false)) if why.starts_with(TIMED_OUT) => return Some(("timeout", why.clone())),
            Err(NotSent(why, false)) if why.starts_with("cannot connect") => return Some(("connect", why.clone())),
            Err(NotSent(why, false)) => return Some(("connection", why.clone())),
        };
        let answered = || format!("the service answered {status}");
        let class = match status.as_u16() {
            // If an answer with status 2xx turns out to be unusable, `record_unusable` counts it later.
            200..=299 => match body {
                Ok(_) => return None,
                Err(why) if why == OVERSIZE => return None,
                Err(why) => return Some(("connection", why.clone())),
            },
            408 | 425 => "busy",
            429 => "rate_limited",
            410 => "gone",
            413 => "too_large",
            300..=399 => "redirect",
            500..=599 => "server_error",
            _ => "rejected",
        };
        Some((class, answered()))
    }

    /// Reports when the circuit breaker of the endpoint opens or closes.
    pub(super) fn report_breaker(&self, change: Change, cause: &str) {
        let (change, message, data) = match change {
            Change::Nothing => return,
            Change::Opened(lasts) => {
                let seconds = lasts.as_secs_f64();
                let message = format!(
                    "reward '{}': the service failed too often (last error: {cause}); no requests for {seconds} s, then one test request",
                    self.name
                );
                (RewardChange::BreakerOpened, message, json!({ "cause": cause, "open_s": seconds }))
            }
            Change::Closed => {
                let message = format!("reward '{}': the service answers again", self.name);
                (RewardChange::BreakerClosed, message, json!({}))
            }
        };
        self.status.notify(Event::Reward { reward: self.name.clone(), change, message, data });
    }
}
