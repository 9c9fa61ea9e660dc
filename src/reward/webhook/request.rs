//! What is sent: packing samples into requests, and their bytes.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::event::FinishReason;
use crate::id::RewardRequestId;
use crate::reward::JobContext;
use crate::sample::RewardSample;
use crate::spec::WebhookPlan;

/// Bytes of a body besides its samples, generously.
const HEAD_BYTES: usize = 1024;

/// One request. Its id and bytes stay the same over all its tries.
#[derive(Debug)]
pub(super) struct Request {
    pub id: String,
    /// JSON.
    pub body: String,
}

/// What all requests of a rollout have in common.
pub(super) struct Envelope<'a> {
    pub reward: &'a str,
    pub plan: &'a WebhookPlan,
    pub job: &'a JobContext,
}

impl Request {
    /// A `reward.score.request` for samples that are JSON already.
    pub fn score<'a>(envelope: &Envelope<'_>, samples: impl Iterator<Item = &'a str>) -> Self {
        let Envelope { reward, plan, job } = envelope;
        let id = RewardRequestId::new().to_string();
        let phase = if job.probe { "probe".into() } else { json!(job.rollout.phase) };
        let head = json!({
            "type": "reward.score.request", "version": "1", "id": id, "timestamp": now_rfc3339(),
            "job": {"id": job.job, "step": job.rollout.step, "phase": phase},
            "reward": {"name": reward, "params": plan.params},
            "deadline_ms": plan.deadline_ms,
            "reply": {"modes": ["sync"]},
        });
        let mut body = head.to_string();
        body.pop();
        body.push_str(",\"samples\":[");
        for (position, sample) in samples.enumerate() {
            if position > 0 {
                body.push(',');
            }
            body.push_str(sample);
        }
        body.push_str("]}");
        Self { id, body }
    }

    /// A `reward.ping`.
    pub fn ping() -> Self {
        let id = RewardRequestId::new().to_string();
        let body = json!({"type": "reward.ping", "version": "1", "id": id}).to_string();
        Self { id, body }
    }
}

fn now_rfc3339() -> String {
    whole_seconds(jiff::Timestamp::now())
}

/// Never ahead of the clock, and the same second as `webhook-timestamp` of a request that leaves at once.
fn whole_seconds(time: jiff::Timestamp) -> String {
    jiff::Timestamp::from_second(time.as_second()).unwrap_or(time).to_string()
}

/// A sample as the contract writes it.
pub(super) fn sample_json(sample: &RewardSample) -> String {
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
        columns: &'a Map<String, Value>,
    }
    let RewardSample {
        sample_id,
        group_id,
        prompt_id,
        prompt,
        messages,
        completion,
        finish_reason,
        num_tokens,
        columns,
    } = sample;
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
    };
    serde_json::to_string(&wire).expect("strings and JSON values have a JSON form")
}

/// Cuts samples into batches of at most `max_samples` and `max_bytes`. Groups stay whole unless one alone is too large.
/// A single sample that is too large goes alone: the service decides.
pub(super) fn pack(samples: &[RewardSample], wire: &[String], (max_samples, max_bytes): (u32, u64)) -> Vec<Vec<usize>> {
    let max_samples = max_samples.max(1) as usize;
    let max_bytes = usize::try_from(max_bytes).unwrap_or(usize::MAX).saturating_sub(HEAD_BYTES);
    let size = |indices: &[usize]| indices.iter().map(|&index| wire[index].len() + 1).sum::<usize>();
    let fits = |count: usize, bytes: usize| count <= max_samples && bytes <= max_bytes;

    let all: Vec<usize> = (0..samples.len()).collect();
    let groups = all.chunk_by(|&left, &right| samples[left].group_id == samples[right].group_id);
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<usize> = Vec::new();
    let mut open_bytes = 0;
    for group in groups {
        let whole = fits(group.len(), size(group));
        // A group that fits nowhere as a whole is taken sample by sample.
        for piece in group.chunks(if whole { group.len() } else { 1 }) {
            let bytes = size(piece);
            if !open.is_empty() && !fits(open.len() + piece.len(), open_bytes + bytes) {
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
                    prompt: "p".into(),
                    messages: None,
                    completion: "c".into(),
                    finish_reason: FinishReason::Stop,
                    num_tokens: 1,
                    columns: Map::new(),
                });
            }
        }
        samples
    }

    fn packed(groups: &[usize], room: (u32, u64)) -> Vec<Vec<usize>> {
        let samples = samples(groups);
        let wire: Vec<_> = samples.iter().map(sample_json).collect();
        pack(&samples, &wire, room)
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
        let one = sample_json(&samples(&[1])[0]).len() as u64 + 1;
        assert_eq!(packed(&[2, 2], (32, HEAD_BYTES as u64 + 3 * one)), [vec![0, 1], vec![2, 3]]);
        assert_eq!(packed(&[2], (32, 10)), [vec![0], vec![1]]);
    }

    #[test]
    fn the_body_is_the_contracts() {
        let plan: WebhookPlan = serde_json::from_value(json!({
            "url": "http://x/", "params": {"k": 1}, "max_concurrency": 1, "max_batch_samples": 1, "max_batch_bytes": 1,
            "timeout_ms": 1, "deadline_ms": 300000, "max_tries": 1, "max_invalid_tries": 1, "on_invalid": "mask", "max_outage_s": 1
        }))
        .unwrap();
        let job =
            JobContext { job: crate::id::JobId::new(), rollout: crate::sample::RolloutId::train(12), probe: false };
        let wire: Vec<_> = samples(&[2]).iter().map(sample_json).collect();
        let envelope = Envelope { reward: "helpful", plan: &plan, job: &job };
        let request = Request::score(&envelope, wire.iter().map(String::as_str));
        let body: Value = serde_json::from_str(&request.body).unwrap();
        assert_eq!(body["id"], request.id);
        assert_eq!(body["job"], json!({"id": job.job, "step": 12, "phase": "train"}));
        assert_eq!(body["reward"], json!({"name": "helpful", "params": {"k": 1}}));
        assert_eq!(body["reply"]["modes"], json!(["sync"]));
        assert_eq!(body["samples"][1]["sample_id"], "s_1");
        assert_eq!(body["samples"][1]["finish_reason"], "stop");
        assert!(body["timestamp"].as_str().unwrap().ends_with('Z'));
    }

    #[test]
    fn the_timestamp_is_not_ahead_of_the_clock() {
        let late: jiff::Timestamp = "2026-01-01T00:00:00.999Z".parse().unwrap();
        assert_eq!(whole_seconds(late), "2026-01-01T00:00:00Z");
    }
}
