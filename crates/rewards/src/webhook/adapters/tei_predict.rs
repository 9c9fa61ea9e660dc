//! text-embeddings-inference, `/predict`: `{inputs: [["text"], …], raw_scores: true, …}` → `[[{label, score}, …], …]`.
//!
//! Each text goes in a list of its own: a flat list of two would be one *pair*. Labels come sorted by score, so they are
//! told apart by name. A batch that is too large is a 413, which is split; `/info` says how many it takes.

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
        suspect_softmax(&mut answer, labels, "this server does not honour raw_scores");
        Ok(answer)
    }

    fn is_transient(&self, status: u16) -> bool {
        is_transient(status)
    }

    fn greeting(&self, url: &Url, _: &str) -> Greeting {
        greeting(url)
    }
}

/// 424 is a failure of the backend, which may be another request's fault.
pub(super) fn is_transient(status: u16) -> bool {
    status == 424
}

/// `/info` beside the endpoint.
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
