//! Checks that a service is reachable, and reads its capabilities.

use serde_json::{Value, json};

use super::wire::{Got, Signing};
use super::{Check, Outcome, new_id};
use crate::reward::webhook::PingReply;
use crate::reward::webhook::answer::name;

impl Check {
    /// Checks that the service answers `reward.ping`.
    pub(super) async fn ping(&mut self) -> bool {
        let id = new_id();
        let body = json!({"type": "reward.ping", "version": "1", "id": id}).to_string();
        let got = match self.wire.post(&id, &body, Signing::Right).await {
            Ok(got) => got,
            Err(why) => {
                let fix = "start the service, and give the URL at which this machine reaches it, path included";
                self.find("ping", Outcome::Failed, format!("the reward service did not answer a POST: {why}"), fix);
                return false;
            }
        };
        let detail = format!("the service answered {} to reward.ping{}", got.status, got.excerpt());
        match got.status {
            200..=299 => {
                let (outcome, detail, fix) = self.read_ping(&got);
                self.find("ping", outcome, detail, &fix);
            }
            300..=399 => {
                let to = got.location.as_deref().unwrap_or("another address").to_owned();
                let fix = format!("rlood never follows redirects: use {to} as the reward's url");
                self.find("ping", Outcome::Failed, detail, &fix);
                return false;
            }
            401 | 403 if self.wire.key.is_none() => {
                let fix =
                    "the reward service requires authentication: give its --secret, or the --header that it expects";
                self.find("ping", Outcome::Failed, detail, fix);
                return false;
            }
            401 | 403 => {
                let fix = "it refuses a valid signature: is --secret the service's own? The signature is 'v1,' and the \
                           base64 HMAC-SHA256 of \"{webhook-id}.{webhook-timestamp}.{body}\", the body's bytes as \
                           received, under the base64-decoded part after whsec_";
                self.find("ping", Outcome::Failed, detail, fix);
                return false;
            }
            404 | 405 => {
                let fix = "requests are POSTs to the URL exactly as given: is its path right?";
                self.find("ping", Outcome::Failed, detail, fix);
                return false;
            }
            _ => {
                let fix = "answer {\"type\": \"reward.ping\"} with any 2xx; validation and the test endpoint send it";
                self.find("ping", Outcome::Failed, detail, fix);
            }
        }
        true
    }

    /// Reads the capabilities that the service announces in its answer to the ping. Invalid fields become warnings with a fix.
    fn read_ping(&mut self, got: &Got) -> (Outcome, String, String) {
        if got.body.iter().all(u8::is_ascii_whitespace) {
            return (
                Outcome::Ok,
                format!("the service answered {} without announcing capabilities", got.status),
                String::new(),
            );
        }
        let fix = "answer {\"max_batch_samples\": 64, \"modes\": [\"sync\"], \"range\": [0, 1]}, or send no body";
        let warn = |detail: String| (Outcome::Warning, detail, fix.to_owned());
        let value: Value = match serde_json::from_slice(&got.body) {
            Ok(value) => value,
            Err(_) => return warn(format!("the answer to reward.ping is not JSON{}", got.excerpt())),
        };
        let Some(object) = value.as_object() else {
            return warn(format!("the answer to reward.ping is {}, not an object", name(&value)));
        };
        if let Some(given) = object.get("max_batch_samples").filter(|given| !given.is_null())
            && given.as_u64().is_none_or(|most| most == 0)
        {
            return warn(format!(
                "the service announces the max_batch_samples {given}, which must be a whole number of at least 1"
            ));
        }
        if let Some(given) = object.get("modes").filter(|given| !given.is_null()) {
            let known = |mode: &Value| matches!(mode.as_str(), Some("sync" | "async"));
            if !given.as_array().is_some_and(|modes| !modes.is_empty() && modes.iter().all(known)) {
                return warn(format!(
                    "the service announces the modes {given}, which must be [\"sync\"], [\"async\"] or both"
                ));
            }
        }
        if let Some(given) = object.get("range").filter(|given| !given.is_null()) {
            let bounds = given.as_array().map(|range| range.iter().filter_map(Value::as_f64).collect::<Vec<_>>());
            if !bounds.is_some_and(|bounds| bounds.len() == 2 && bounds[0] < bounds[1]) {
                return warn(format!(
                    "the service announces the reward range {given}, which must be [lowest, highest]"
                ));
            }
        }
        self.ping = serde_json::from_value::<PingReply>(value.clone()).ok();
        (Outcome::Ok, format!("the service answered {} and announces {value}", got.status), String::new())
    }
}
