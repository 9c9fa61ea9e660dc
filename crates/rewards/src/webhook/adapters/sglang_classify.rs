//! SGLang's native `/classify` of reward models: `{model, text: [templated]}` → `[{embedding: [score, …]}]`, in order.

use serde_json::{Value, json};

use super::vllm_classify::{label_number, numbered};
use super::{Text, body, check_length, list};
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::spec::LabelPlan;
use crate::webhook::answer::{Answer, parse};
use crate::webhook::dialect::{Batch, Dialect};

pub(super) struct SglangClassify {
    text: Text,
    label: Option<usize>,
    plan: LabelPlan,
}

impl SglangClassify {
    pub(super) fn new(plan: &LabelPlan) -> Result<Self, String> {
        let label = label_number(plan.label.as_deref())?;
        Ok(Self { text: Text::new(plan.template.as_deref())?, label, plan: plan.clone() })
    }
}

impl Dialect for SglangClassify {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        self.text.of(sample).map(Value::from)
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        body(json!({"text": batch.all()}), self.plan.model.as_deref(), &self.plan.extra_body)
    }

    fn read(&self, body: &[u8], _: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let entries = list(&answer, "the answer")?;
        check_length(entries.len(), samples.len())?;
        let embedding = |entry: &Value| entry.get("embedding").cloned().unwrap_or_default();
        Ok(Answer::of(entries.iter().map(|entry| numbered(&embedding(entry), self.label)).collect()))
    }
}
