//! LLaMA-Factory's reward API (`/v1/score/evaluation`): `{model, messages: [text]}` → `{scores}`.

use serde_json::{Map, Value, json};

use super::{Text, body, check_length, list_in};
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::spec::TextPlan;
use crate::webhook::answer::{Answer, number, parse};
use crate::webhook::dialect::{Batch, Dialect};

pub(super) struct Llamafactory {
    text: Text,
    model: String,
    extra_body: Map<String, Value>,
}

impl Llamafactory {
    pub(super) fn new(plan: &TextPlan) -> Result<Self, String> {
        Ok(Self {
            text: Text::new(plan.template.as_deref())?,
            // The server requires the field `model`, but it loads a single model and ignores the name.
            model: plan.model.clone().unwrap_or_else(|| "model".to_owned()),
            extra_body: plan.extra_body.clone(),
        })
    }
}

impl Dialect for Llamafactory {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        self.text.of(sample).map(Value::from)
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        body(json!({"model": self.model, "messages": batch.all()}), None, &self.extra_body)
    }

    fn read(&self, body: &[u8], _: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let scores = list_in(&answer, "scores")?;
        check_length(scores.len(), samples.len())?;
        Ok(Answer::of(scores.iter().map(number).collect()))
    }
}
