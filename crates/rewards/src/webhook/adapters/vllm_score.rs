//! vLLM's `/score`, which scores pairs of a query and a text: `{model, text_1: [query], text_2: [text]}` → `{data: [{index,
//! score}]}`.

use serde_json::{Map, Value, json};

use super::{Pair, body, by_index, list_in};
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::spec::PairPlan;
use crate::webhook::answer::{Answer, number, parse};
use crate::webhook::dialect::{Batch, Dialect};

pub(super) struct VllmScore {
    pair: Pair,
    model: Option<String>,
    extra_body: Map<String, Value>,
}

impl VllmScore {
    pub(super) fn new(plan: &PairPlan) -> Result<Self, String> {
        let pair = Pair::new(plan.query.as_deref(), plan.text.as_deref())?;
        Ok(Self { pair, model: plan.model.clone(), extra_body: plan.extra_body.clone() })
    }
}

impl Dialect for VllmScore {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        self.pair.of(sample)
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        let fields = json!({"text_1": batch.each("query"), "text_2": batch.each("text")});
        body(fields, self.model.as_deref(), &self.extra_body)
    }

    fn read(&self, body: &[u8], _: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let entries = by_index(list_in(&answer, "data")?, samples.len())?;
        Ok(Answer::of(entries.into_iter().map(|entry| number(entry.get("score").unwrap_or(&Value::Null))).collect()))
    }
}
