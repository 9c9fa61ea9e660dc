//! OpenRLHF's remote reward model (`openrlhf/cli/serve_rm.py`): `{query, prompts, labels}` → `{rewards, scores?, extra_logs?}`.
//! Rewards may be nested (`[[0.1], [0.2]]`, a column of a tensor). Scores and logs become metrics.

use serde_json::{Value, json};

use super::{Text, check_length, label_of, list_in};
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::spec::OpenrlhfPlan;
use crate::webhook::answer::{Answer, Found, number, parse};
use crate::webhook::dialect::{Batch, Dialect};

pub(super) struct Openrlhf {
    text: Text,
    label_column: Option<String>,
}

impl Openrlhf {
    pub(super) fn new(plan: &OpenrlhfPlan) -> Result<Self, String> {
        Ok(Self { text: Text::new(plan.template.as_deref())?, label_column: plan.label_column.clone() })
    }
}

impl Dialect for Openrlhf {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        let label = match label_of(sample, self.label_column.as_deref())? {
            // OpenRLHF sends an empty string for rows without a label.
            Value::Null => json!(""),
            label => label,
        };
        Ok(json!({"query": self.text.of(sample)?, "prompt": sample.prompt, "label": label}))
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        json!({"query": batch.each("query"), "prompts": batch.each("prompt"), "labels": batch.each("label")})
            .to_string()
    }

    fn read(&self, body: &[u8], _: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let rewards = flat(list_in(&answer, "rewards")?);
        check_length(rewards.len(), samples.len())?;
        let mut found: Vec<Found> = rewards.into_iter().map(number).collect();
        let logs = answer.get("extra_logs").and_then(Value::as_object).into_iter().flatten();
        let scores = answer.get("scores").map(|scores| ("scores", scores));
        for (name, values) in logs.map(|(name, values)| (name.as_str(), values)).chain(scores) {
            let values = values.as_array().map(|values| flat(values)).unwrap_or_default();
            // A list in `extra_logs` whose length differs from the number of samples is ignored, because its values cannot be
            // assigned to samples.
            if values.len() == samples.len() {
                for (found, value) in found.iter_mut().zip(values) {
                    if let Found::Judged(judgement) = found {
                        judgement.metrics.insert(name.to_owned(), value.clone());
                    }
                }
            }
        }
        Ok(Answer::of(found))
    }
}

/// Flattens a list of lists by one level; a list with other entries is returned as it is.
fn flat(values: &[Value]) -> Vec<&Value> {
    if values.iter().all(Value::is_array) {
        values.iter().filter_map(Value::as_array).flatten().collect()
    } else {
        values.iter().collect()
    }
}
