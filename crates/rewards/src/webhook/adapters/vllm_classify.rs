//! vLLM, `/classify`: `{model, input: [text], use_activation: false, add_special_tokens: false}` →
//! `{data: [{index, label, probs, num_classes}]}`.
//!
//! Without `use_activation: false` a model with one label returns 1.0 for everything. Older vLLM servers call this setting
//! `activation` or `softmax` and ignore the new name. The adapter detects and reports that; `extra_body` can add the old name.

use serde_json::{Value, json};

use super::{Text, body, by_index, detect_softmax, list_in};
use crate::SampleError;
use crate::rollout::RewardSample;
use crate::spec::LabelPlan;
use crate::webhook::answer::{Answer, Found, name, number, parse};
use crate::webhook::dialect::{Batch, Dialect};

pub(super) struct VllmClassify {
    text: Text,
    label: Option<usize>,
    plan: LabelPlan,
}

impl VllmClassify {
    pub(super) fn new(plan: &LabelPlan) -> Result<Self, String> {
        let label = label_number(plan.label.as_deref())?;
        Ok(Self { text: Text::new(plan.template.as_deref())?, label, plan: plan.clone() })
    }
}

impl Dialect for VllmClassify {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        self.text.of(sample).map(Value::from)
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        let fields = json!({"input": batch.all(), "use_activation": false, "add_special_tokens": false});
        body(fields, self.plan.model.as_deref(), &self.plan.extra_body)
    }

    fn read(&self, body: &[u8], _: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let answer = parse(body)?;
        let entries = by_index(list_in(&answer, "data")?, samples.len())?;
        let probs = |entry: &Value| entry.get("probs").cloned().unwrap_or_default();
        let labels = entries.first().and_then(|entry| probs(entry).as_array().map(Vec::len)).unwrap_or(0);
        let mut answer = Answer::of(entries.into_iter().map(|entry| numbered(&probs(entry), self.label)).collect());
        let advice = "for this server version set \"extra_body\": {\"activation\": false} (or \"softmax\")";
        detect_softmax(&mut answer, labels, advice);
        Ok(answer)
    }
}

/// Parses the plan's label as a number, because vLLM names only the most likely label and lists the others' scores by number.
pub(super) fn label_number(label: Option<&str>) -> Result<Option<usize>, String> {
    label
        .map(|label| {
            label
                .parse()
                .map_err(|_| format!("'label' must be a number for rewards of type vllm_classify, not '{label}'"))
        })
        .transpose()
}

/// Returns the score of a label by its number, or the only score if the model has one label.
pub(super) fn numbered(values: &Value, label: Option<usize>) -> Found {
    let Some(values) = values.as_array() else {
        return Found::Invalid(format!("the scores of the labels are {}, not a list", name(values)));
    };
    let chosen = match label {
        Some(label) => values.get(label),
        None if values.len() == 1 => values.first(),
        None => None,
    };
    match (chosen, label) {
        (Some(value), _) => number(value),
        (None, Some(label)) => {
            Found::Invalid(format!("the answer has no label number {label}; it has {} labels", values.len()))
        }
        (None, None) => Found::Invalid(format!(
            "the model has {} labels; set 'label' to the number (from 0) of the reward",
            values.len()
        )),
    }
}
