//! The remote reward model of slime and miles (`slime/rollout/rm_hub`): `{prompt, response, label}` for one sample → a number,
//! or an object with the number under a key that the user configures.

use serde_json::{Value, json};

use super::label_of;
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::spec::SlimePlan;
use crate::webhook::answer::{Answer, name, number, parse};
use crate::webhook::dialect::{Batch, Batching, Dialect};

pub(super) struct Slime {
    label_column: Option<String>,
    reward_key: Option<String>,
}

impl Slime {
    pub(super) fn new(plan: &SlimePlan) -> Self {
        Self { label_column: plan.label_column.clone(), reward_key: plan.reward_key.clone() }
    }
}

impl Dialect for Slime {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        let label = label_of(sample, self.label_column.as_deref())?;
        Ok(json!({"prompt": sample.prompt, "response": sample.completion, "label": label}))
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        batch.pieces[0].to_string()
    }

    fn read(&self, body: &[u8], _: &str, _: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let value = match (&self.reward_key, &answer) {
            (Some(key), Value::Object(fields)) => {
                fields.get(key).ok_or_else(|| format!("the answer has no '{key}'"))?
            }
            (None, Value::Object(fields)) => {
                let keys = fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                return Err(format!("the answer is an object with {keys}: set 'reward_key' to the key of the reward"));
            }
            (_, Value::Array(_)) => return Err(format!("the answer is {}, not a number", name(&answer))),
            (_, value) => value,
        };
        Ok(Answer::of(vec![number(value)]))
    }

    fn batching(&self) -> Batching {
        Batching::One
    }
}
