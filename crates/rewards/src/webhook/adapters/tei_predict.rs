//! text-embeddings-inference, `/predict`: `{inputs: [["text"], …], raw_scores: true, …}` → `[[{label, score}, …], …]`.
//!
//! Each text is sent in its own list, since a flat list of two texts would be one *pair*. Labels are sorted by score, so they
//! are found by name. A batch that is too large gets a 413 and is split; `/info` returns the maximum batch size.

use reqwest::Url;
use serde_json::{Map, Value, json};

use super::{Text, body, labelled, list, names_of_label, same_length, suspect_softmax};
use crate::SampleError;
use crate::hidden::Legible;
use crate::sample::RewardSample;
use crate::spec::LabelPlan;
use crate::webhook::PingReply;
use crate::webhook::answer::{Answer, parse};
use crate::webhook::dialect::{Ask, Dialect, Greeting};

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

    fn body(&self, ask: &Ask<'_>) -> String {
        let fields = json!({"inputs": ask.all(), "raw_scores": true, "truncate": true, "truncation_direction": "Left"});
        body(fields, self.plan.model.as_deref(), &self.plan.extra_body)
    }

    fn legible(&self) -> Legible {
        names_of_label(self.plan.label.as_deref())
    }

    fn read(&self, body: &[u8], _: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let predictions = list(&answer, "the answer")?;
        same_length(predictions.len(), samples.len())?;
        let labels = predictions.first().and_then(Value::as_array).map_or(0, Vec::len);
        let mut answer =
            Answer::of(predictions.iter().map(|labels| labelled(labels, self.plan.label.as_deref())).collect());
        suspect_softmax(&mut answer, labels, "this server does not honor raw_scores");
        Ok(answer)
    }

    fn is_transient(&self, status: u16) -> bool {
        is_transient(status)
    }

    fn greeting(&self, url: &Url, _: &str) -> Greeting {
        greeting(url)
    }
}

/// 424 is an error of the backend that another request in the same batch may have caused.
pub(super) fn is_transient(status: u16) -> bool {
    status == 424
}

/// Requests `/info`, next to the endpoint.
pub(super) fn greeting(url: &Url) -> Greeting {
    match url.join("info") {
        Ok(info) => Greeting::Get(info, |body| {
            let info: Map<String, Value> = serde_json::from_slice(body).ok()?;
            let most = info.get("max_client_batch_size").and_then(Value::as_u64);
            Some(PingReply { max_batch_samples: most.and_then(|most| most.try_into().ok()), modes: None, range: None })
        }),
        Err(_) => Greeting::None,
    }
}
