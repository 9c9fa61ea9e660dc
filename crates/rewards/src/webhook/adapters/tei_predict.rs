//! text-embeddings-inference, `/predict`: `{inputs: [["text"], …], raw_scores: true, …}` → `[[{label, score}, …], …]`.
//!
//! Each text is sent in its own list, since a flat list of two texts would be one *pair*. Labels are sorted by score, so they
//! are found by name. A batch that is too large gets a 413 and is split; `/info` returns the maximum batch size.

use reqwest::Url;
use serde_json::{Map, Value, json};

use super::{Text, body, check_length, detect_softmax, label_names, label_score, list};
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::secret_filter::Preserved;
use crate::spec::LabelPlan;
use crate::webhook::PingReply;
use crate::webhook::answer::{Answer, parse};
use crate::webhook::dialect::{Batch, Dialect, HealthCheck};

pub(super) struct TeiPredict {
    text: Text,
    plan: LabelPlan,
}

impl TeiPredict {
    pub(super) fn new(plan: &LabelPlan) -> Result<Self, String> {
        Ok(Self { text: Text::new(plan.template.as_deref())?, plan: plan.clone() })
    }
}

impl Dialect for TeiPredict {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        Ok(json!([self.text.of(sample)?]))
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        let fields =
            json!({"inputs": batch.all(), "raw_scores": true, "truncate": true, "truncation_direction": "Left"});
        body(fields, self.plan.model.as_deref(), &self.plan.extra_body)
    }

    fn preserved(&self) -> Preserved {
        label_names(self.plan.label.as_deref())
    }

    fn read(&self, body: &[u8], _: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let predictions = list(&answer, "the answer")?;
        check_length(predictions.len(), samples.len())?;
        let labels = predictions.first().and_then(Value::as_array).map_or(0, Vec::len);
        let mut answer =
            Answer::of(predictions.iter().map(|labels| label_score(labels, self.plan.label.as_deref())).collect());
        detect_softmax(&mut answer, labels, "the reward server ignores raw_scores in the request");
        Ok(answer)
    }

    fn is_transient(&self, status: u16) -> bool {
        is_transient(status)
    }

    fn health_check(&self, url: &Url, _: &str) -> HealthCheck {
        health_check(url)
    }
}

/// Status 424 is an error of the inference backend that another request in the same batch may have caused, so a retry may succeed.
pub(super) fn is_transient(status: u16) -> bool {
    status == 424
}

/// Returns the health check of a text-embeddings-inference server: a GET of `/info` next to the reward's URL.
pub(super) fn health_check(url: &Url) -> HealthCheck {
    match url.join("info") {
        Ok(info) => HealthCheck::Get(info, |body| {
            let info: Map<String, Value> = serde_json::from_slice(body).ok()?;
            let most = info.get("max_client_batch_size").and_then(Value::as_u64);
            Some(PingReply { max_batch_samples: most.and_then(|most| most.try_into().ok()), modes: None, range: None })
        }),
        Err(_) => HealthCheck::None,
    }
}
