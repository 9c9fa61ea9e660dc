//! Text classification on Hugging Face's inference endpoints: `{inputs, parameters: {function_to_apply: "none", top_k: null}}`
//! → `[[{label, score}, …], …]`, sorted by score. While the model is loading, the server answers 503 with an `estimated_time`.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Text, body, check_length, detect_softmax, label_names, label_score, list};
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::secret_filter::Preserved;
use crate::spec::LabelPlan;
use crate::webhook::answer::{Answer, parse};
use crate::webhook::dialect::{Batch, Dialect};

pub(super) struct HfTextClassification {
    text: Text,
    plan: LabelPlan,
}

impl HfTextClassification {
    pub(super) fn new(plan: &LabelPlan) -> Result<Self, String> {
        Ok(Self { text: Text::new(plan.template.as_deref())?, plan: plan.clone() })
    }
}

impl Dialect for HfTextClassification {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        self.text.of(sample).map(Value::from)
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        let fields = json!({"inputs": batch.all(), "parameters": {"function_to_apply": "none", "top_k": null}});
        body(fields, self.plan.model.as_deref(), &self.plan.extra_body)
    }

    fn preserved(&self) -> Preserved {
        label_names(self.plan.label.as_deref())
    }

    fn read(&self, body: &[u8], _: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let entries = list(&answer, "the answer")?;
        let is_nested = entries.first().is_some_and(Value::is_array);
        // Some servers return the labels of a single text without an outer list. Some return only the best label of each text.
        let predictions: Vec<Value> = match samples.len() {
            1 if !is_nested => vec![entries.clone().into()],
            _ if !is_nested => entries.iter().map(|entry| json!([entry])).collect(),
            _ => entries.clone(),
        };
        check_length(predictions.len(), samples.len())?;
        let labels = predictions.first().and_then(Value::as_array).map_or(0, Vec::len);
        let found = predictions.iter().map(|labels| label_score(labels, self.plan.label.as_deref())).collect();
        let mut answer = Answer::of(found);
        detect_softmax(&mut answer, labels, "the reward server ignores function_to_apply in the request");
        Ok(answer)
    }

    fn wait_hint(&self, body: &[u8]) -> Option<Duration> {
        let answer: Value = serde_json::from_slice(body).ok()?;
        let seconds = answer.get("estimated_time")?.as_f64()?;
        Duration::try_from_secs_f64(seconds).ok()
    }
}
