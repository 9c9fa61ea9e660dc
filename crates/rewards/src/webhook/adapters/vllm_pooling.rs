//! vLLM, `/pooling`: `{model, input: [text], task}` → `{data: [{index, data}]}`. `data` is a list of numbers, or one list per
//! token; the last number is the reward.

use serde_json::{Map, Value, json};

use super::{Text, body, by_index, list_in};
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::spec::VllmPoolingPlan;
use crate::webhook::answer::{Answer, Found, number, parse};
use crate::webhook::dialect::{Batch, Dialect};

pub(super) struct VllmPooling {
    text: Text,
    model: Option<String>,
    task: String,
    extra_body: Map<String, Value>,
}

impl VllmPooling {
    pub(super) fn new(plan: &VllmPoolingPlan) -> Result<Self, String> {
        Ok(Self {
            text: Text::new(plan.template.as_deref())?,
            model: plan.model.clone(),
            task: plan.task.clone(),
            extra_body: plan.extra_body.clone(),
        })
    }
}

impl Dialect for VllmPooling {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        self.text.of(sample).map(Value::from)
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        let fields =
            json!({"input": batch.all(), "task": self.task, "use_activation": false, "add_special_tokens": false});
        body(fields, self.model.as_deref(), &self.extra_body)
    }

    fn read(&self, body: &[u8], _: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let entries = by_index(list_in(&answer, "data")?, samples.len())?;
        Ok(Answer::of(entries.into_iter().map(|entry| last(entry.get("data").unwrap_or(&Value::Null))).collect()))
    }
}

/// Returns the last number of a list that may contain lists.
fn last(data: &Value) -> Found {
    match data {
        Value::Array(values) => {
            values.last().map_or_else(|| Found::Invalid("the answer's 'data' is empty".to_owned()), last)
        }
        value => number(value),
    }
}
