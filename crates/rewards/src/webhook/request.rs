//! Requests to reward services: packing of samples into requests, and the body in rlood's own format (contract v1).

use std::borrow::Cow;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::JobContext;
use crate::callback::CallbackTerms;
use crate::dataset::{IMAGES, ImageRef, image_refs};
use crate::environment::EpisodeTurn;
use crate::event::FinishReason;
use crate::id::JobId;
use crate::meter::About;
use crate::rollout::RewardSample;
use crate::spec::WebhookPlan;

/// Rule of a dialect for which samples may share a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Batching {
    /// Any samples. Groups are kept together if possible.
    Groups,
    /// Only samples of the same prompt.
    OnePrompt,
    /// A request has a single sample.
    One,
}

/// Upper estimate of the size in bytes of a request body without its samples.
const HEAD_BYTES: usize = 1024;

/// Start of the JSON field `reply` in a request body of contract v1. The field comes before any text from users.
const REPLY: &str = r#""reply":{"#;
/// First field inside `reply` if the request offers a callback address.
const CALLBACK: &str = r#""callback_url":"#;

/// One request to a reward service. Its id and body are the same for all attempts to send it.
#[derive(Debug)]
pub(super) struct Request {
    pub id: String,
    /// The request's JSON without the callback token, as recorded in the journal and shown.
    pub body: String,
    /// The samples in the request; empty for a health check.
    pub about: About,
    /// The episode that the request is about, for environments.
    pub episode: Option<String>,
    /// Secret token that authorizes callbacks, if the request offers a callback address.
    token: Option<String>,
    /// Time until which the service may deliver results.
    pub deadline: Instant,
}

impl Request {
    /// Creates a request without a callback token.
    pub fn new(id: String, body: String, left: Duration) -> Self {
        // Limiting the time to one year prevents an overflow of the clock.
        let left = left.min(Duration::from_secs(365 * 86_400));
        Self { id, body, about: About::default(), episode: None, token: None, deadline: Instant::now() + left }
    }

    /// Sets the episode that the request is about.
    pub fn of_episode(self, episode: String) -> Self {
        Self { episode: Some(episode), ..self }
    }

    /// Sets the samples of the request.
    pub fn about(self, about: About) -> Self {
        Self { about, ..self }
    }

    /// Adds the callback token if the request offers a callback address.
    pub fn with_token(mut self, token: impl FnOnce(&str) -> String) -> Self {
        let offers = self.body.split_once(REPLY).is_some_and(|(_, reply)| reply.starts_with(CALLBACK));
        self.token = offers.then(|| token(&self.id));
        self
    }

    /// Creates a request without a body, for a GET health check.
    pub fn bare(id: &str) -> Self {
        Self::new(id.to_owned(), String::new(), Duration::ZERO)
    }

    /// Returns whether the answer may arrive by callback.
    pub fn has_callback(&self) -> bool {
        self.token.is_some()
    }

    /// Returns the body as sent, including the callback token.
    pub fn wire(&self) -> Cow<'_, str> {
        match (&self.token, self.body.split_once(REPLY)) {
            // The callback token is base64url, so it needs no escaping in JSON.
            (Some(token), Some((head, reply))) => format!(r#"{head}{REPLY}"token":"{token}",{reply}"#).into(),
            _ => self.body.as_str().into(),
        }
    }
}

/// Fields of contract v1 that all requests of one rollout share.
pub(super) struct Envelope<'a> {
    pub reward: &'a str,
    pub plan: &'a WebhookPlan,
    pub job: &'a JobContext,
    /// Callback address for asynchronous results, if callbacks are possible.
    pub callback_url: Option<&'a str>,
}

/// Builds the body of a `reward.score.request` from serialized samples.
pub(super) fn score_body(envelope: &Envelope<'_>, id: &str, samples: &[&Value]) -> String {
    let Envelope { reward, plan, job, callback_url } = envelope;
    let phase = if job.probe { "probe".into() } else { json!(job.rollout.phase) };
    let reply = match callback_url {
        Some(url) => json!({"callback_url": url, "modes": ["sync", "async"]}),
        None => json!({"modes": ["sync"]}),
    };
    // `Request::wire` inserts the callback token where it finds the field `reply`, so no text from users may come before that
    // field.
    let body = json!({
        "type": "reward.score.request", "version": "1", "id": id, "timestamp": now_rfc3339(),
        "job": {"id": job.job, "step": job.rollout.step, "phase": phase},
        "deadline_ms": plan.service.deadline_ms,
        "reply": reply,
        "reward": {"name": reward, "params": plan.params},
        "samples": samples,
    });
    body.to_string()
}

/// Builds the body of a `reward.ping` (health check).
pub(super) fn ping_body(id: &str) -> String {
    json!({"type": "reward.ping", "version": "1", "id": id}).to_string()
}

fn now_rfc3339() -> String {
    whole_seconds(jiff::Timestamp::now())
}

/// Formats a time without the fraction of a second: never ahead of the clock, and equal to the `webhook-timestamp` of a request
/// that is sent immediately.
fn whole_seconds(time: jiff::Timestamp) -> String {
    jiff::Timestamp::from_second(time.as_second()).unwrap_or(time).to_string()
}

/// Serializes a sample in the format of contract v1.
pub fn sample_json(sample: &RewardSample) -> Value {
    #[derive(Serialize)]
    struct Wire<'a> {
        sample_id: &'a str,
        group_id: &'a str,
        prompt_id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        messages: Option<&'a Value>,
        prompt: &'a str,
        completion: &'a str,
        finish_reason: FinishReason,
        num_tokens: u32,
        columns: Cow<'a, Map<String, Value>>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        images: Vec<ImageRef>,
        #[serde(skip_serializing_if = "Option::is_none")]
        turns: Option<&'a [EpisodeTurn]>,
    }
    let RewardSample {
        sample_id,
        group_id,
        prompt_id,
        source: _,
        prompt,
        messages,
        completion,
        finish_reason,
        num_tokens,
        completion_ids: _,
        columns,
        episode,
    } = sample;
    let images = image_refs(columns);
    let mut columns = Cow::Borrowed(columns);
    if columns.get(IMAGES).and_then(Value::as_array).is_some_and(|all| all.len() == images.len()) {
        columns.to_mut().shift_remove(IMAGES);
    }
    let wire = Wire {
        sample_id,
        group_id,
        prompt_id,
        messages: messages.as_ref(),
        prompt,
        completion,
        finish_reason: *finish_reason,
        num_tokens: *num_tokens,
        columns,
        images,
        turns: episode.as_ref().map(|episode| episode.turns.as_slice()),
    };
    serde_json::to_value(&wire).expect("strings and JSON values can be serialized")
}

/// Adds the URL of each image to a sample in the format of contract v1, if the server has a public address.
pub(super) fn add_image_urls(sample: &mut Value, terms: Option<&CallbackTerms>, job: JobId) {
    let (Some(terms), Some(images)) = (terms, sample.get_mut(IMAGES).and_then(Value::as_array_mut)) else { return };
    let now_s = jiff::Timestamp::now().as_second();
    for image in images {
        let url = image["sha256"].as_str().and_then(|sha256| terms.image_url(&job.to_string(), sha256, now_s));
        if let Some(url) = url {
            image["url"] = url.into();
        }
    }
}

/// Limits on the samples in one request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub batching: Batching,
    pub max_samples: u32,
    pub max_bytes: u64,
}

/// Splits the samples at `indices` into batches of at most `max_samples` and `max_bytes`. Groups are kept together unless a
/// single group is too large. A single sample that is too large is sent alone, and the service decides.
pub(super) fn pack(indices: &[usize], samples: &[RewardSample], wire: &[String], room: Room) -> Vec<Vec<usize>> {
    let Room { batching, max_samples, max_bytes } = room;
    let max_samples = if batching == Batching::One { 1 } else { max_samples.max(1) as usize };
    let max_bytes = usize::try_from(max_bytes).unwrap_or(usize::MAX).saturating_sub(HEAD_BYTES);
    let size = |indices: &[usize]| indices.iter().map(|&index| wire[index].len() + 1).sum::<usize>();
    let fits = |count: usize, bytes: usize| count <= max_samples && bytes <= max_bytes;

    let same_group = |left: usize, right: usize| samples[left].group_id == samples[right].group_id;
    let same_prompt =
        |left: usize, right: usize| same_group(left, right) && samples[left].prompt == samples[right].prompt;
    let groups = indices.chunk_by(|&left, &right| same_group(left, right));
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<usize> = Vec::new();
    let mut open_bytes = 0;
    for group in groups {
        let whole = fits(group.len(), size(group));
        // A group that is too large for one batch is split into samples.
        for piece in group.chunks(if whole && batching == Batching::Groups { group.len() } else { 1 }) {
            let bytes = size(piece);
            let alien = |&index: &usize| batching == Batching::OnePrompt && !same_prompt(index, piece[0]);
            if !open.is_empty() && (!fits(open.len() + piece.len(), open_bytes + bytes) || open.iter().any(alien)) {
                batches.push(std::mem::take(&mut open));
                open_bytes = 0;
            }
            open.extend_from_slice(piece);
            open_bytes += bytes;
        }
    }
    if !open.is_empty() {
        batches.push(open);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(groups: &[usize]) -> Vec<RewardSample> {
        let mut samples = Vec::new();
        for (group, &count) in groups.iter().enumerate() {
            for _ in 0..count {
                samples.push(RewardSample {
                    sample_id: format!("s_{}", samples.len()),
                    group_id: format!("g_{group}"),
                    prompt_id: "row_0".into(),
                    source: None,
                    prompt: "p".into(),
                    messages: None,
                    completion: "c".into(),
                    finish_reason: FinishReason::Stop,
                    num_tokens: 1,
                    completion_ids: None,
                    columns: Map::new(),
                    episode: None,
                });
            }
        }
        samples
    }

    fn packed(groups: &[usize], room: (u32, u64)) -> Vec<Vec<usize>> {
        packed_by(Batching::Groups, groups, room)
    }

    fn packed_by(batching: Batching, groups: &[usize], room: (u32, u64)) -> Vec<Vec<usize>> {
        let samples = samples(groups);
        let wire: Vec<_> = samples.iter().map(|sample| sample_json(sample).to_string()).collect();
        let all: Vec<usize> = (0..samples.len()).collect();
        pack(&all, &samples, &wire, Room { batching, max_samples: room.0, max_bytes: room.1 })
    }

    #[test]
    fn groups_stay_whole_while_they_fit() {
        assert_eq!(packed(&[4, 4, 4], (8, 1 << 20)), [vec![0, 1, 2, 3, 4, 5, 6, 7], vec![8, 9, 10, 11]]);
        assert_eq!(packed(&[3, 3, 3], (8, 1 << 20)), [vec![0, 1, 2, 3, 4, 5], vec![6, 7, 8]]);
    }

    #[test]
    fn a_group_larger_than_a_batch_is_split() {
        assert_eq!(packed(&[5], (2, 1 << 20)), [vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(packed(&[], (2, 1 << 20)), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn bytes_are_bounded_and_a_huge_sample_goes_alone() {
        let one = sample_json(&samples(&[1])[0]).to_string().len() as u64 + 1;
        assert_eq!(packed(&[2, 2], (32, HEAD_BYTES as u64 + 3 * one)), [vec![0, 1], vec![2, 3]]);
        assert_eq!(packed(&[2], (32, 10)), [vec![0], vec![1]]);
    }

    #[test]
    fn a_request_may_be_held_to_one_prompt_or_one_sample() {
        assert_eq!(packed_by(Batching::OnePrompt, &[2, 3], (2, 1 << 20)), [vec![0, 1], vec![2, 3], vec![4]]);
        assert_eq!(packed_by(Batching::One, &[2, 1], (32, 1 << 20)), [vec![0], vec![1], vec![2]]);
    }

    #[test]
    fn the_body_is_the_contracts() {
        let plan: WebhookPlan = serde_json::from_value(json!({
            "url": "http://x/", "params": {"k": 1}, "max_concurrency": 1, "max_batch_samples": 1, "max_batch_bytes": 1,
            "timeout_ms": 1, "deadline_ms": 300000, "max_tries": 1, "max_invalid_tries": 1, "on_invalid": "mask", "max_outage_s": 1
        }))
        .unwrap();
        let job =
            JobContext { job: crate::id::JobId::new(), rollout: crate::rollout::RolloutId::train(12), probe: false };
        let wire: Vec<_> = samples(&[2]).iter().map(sample_json).collect();
        let envelope = Envelope { reward: "helpful", plan: &plan, job: &job, callback_url: None };
        let body = score_body(&envelope, "rwr_1", &wire.iter().collect::<Vec<_>>());
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["id"], "rwr_1");
        assert_eq!(body["job"], json!({"id": job.job, "step": 12, "phase": "train"}));
        assert_eq!(body["reward"], json!({"name": "helpful", "params": {"k": 1}}));
        assert_eq!(body["reply"]["modes"], json!(["sync"]));
        assert_eq!(body["samples"][1]["sample_id"], "s_1");
        assert_eq!(body["samples"][1]["finish_reason"], "stop");
        assert!(body["timestamp"].as_str().unwrap().ends_with('Z'));
    }

    #[test]
    fn the_token_of_a_callback_is_sent_and_not_written_down() {
        let plan: WebhookPlan = serde_json::from_value(json!({
            "url": "http://x/", "params": {"reply": {"callback_url": "mine"}}, "max_concurrency": 1, "max_batch_samples": 1,
            "max_batch_bytes": 1, "timeout_ms": 1, "deadline_ms": 300000, "max_tries": 1, "max_invalid_tries": 1,
            "on_invalid": "mask", "max_outage_s": 1
        }))
        .unwrap();
        let job =
            JobContext { job: crate::id::JobId::new(), rollout: crate::rollout::RolloutId::train(12), probe: false };
        let wire = |callback_url| {
            let envelope = Envelope { reward: "helpful", plan: &plan, job: &job, callback_url };
            let body = score_body(&envelope, "rwr_1", &[&json!({"completion": "\"reply\":{\"callback_url\":\"x\""})]);
            let request = Request::new("rwr_1".into(), body, Duration::from_secs(1)).with_token(|id| format!("t-{id}"));
            assert!(!request.body.contains("t-rwr_1"));
            (request.has_callback(), serde_json::from_str::<Value>(&request.wire()).unwrap())
        };
        let (offered, body) = wire(Some("https://r.example/reward-callbacks/rwr_1"));
        let expected = json!({"token": "t-rwr_1", "callback_url": "https://r.example/reward-callbacks/rwr_1", "modes": ["sync", "async"]});
        assert!(offered && body["reply"] == expected, "{body}");
        let (offered, body) = wire(None);
        assert!(!offered && body["reply"] == json!({"modes": ["sync"]}), "{body}");
        assert_eq!(body["reward"]["params"], json!({"reply": {"callback_url": "mine"}}));
    }

    #[test]
    fn the_timestamp_is_not_ahead_of_the_clock() {
        let late: jiff::Timestamp = "2026-01-01T00:00:00.999Z".parse().unwrap();
        assert_eq!(whole_seconds(late), "2026-01-01T00:00:00Z");
    }
}
