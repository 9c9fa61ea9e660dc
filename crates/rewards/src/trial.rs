//! Tests of rewards without a job, for `POST /rewards/test` and `rlood reward check`: builds a reward from its plan, and parses
//! test samples (`[{prompt, completion, columns}]`).

use serde_json::{Map, Value};

use super::builtin::Builtin;
use super::client::RewardClient;
use super::local::Local;
use super::python::{PythonFunction, PythonFunctions};
use super::webhook::Webhook;
use super::{BuildError, Reward};
use crate::event::FinishReason;
use crate::outgoing::OutgoingPolicy;
use crate::rollout::RewardSample;
use crate::spec::{FieldError, RewardKind, RewardPlan, RewardSecrets};

/// Maximum number of samples in one test.
pub const MAX_SAMPLES: usize = 256;

/// Builds a single reward for a test; `outgoing` restricts the addresses that it may call. A reward model is an error, because it
/// needs a worker's device.
///
/// # Errors
/// Fails when the reward cannot be created from its plan.
pub fn build_reward(
    plan: &RewardPlan,
    secrets: &RewardSecrets,
    outgoing: &OutgoingPolicy,
) -> Result<Box<dyn Reward>, BuildError> {
    Ok(match &plan.kind {
        RewardKind::Python(python) => {
            let client = RewardClient::new(outgoing);
            let client = client.map_err(|detail| BuildError { reward: plan.name.clone(), detail })?;
            Box::new(PythonFunction::new(plan, python, &PythonFunctions::default(), &client, |webhook, _| webhook)?)
        }
        kind if kind.service().is_some() => {
            Box::new(Webhook::of_kind(&plan.name, kind, secrets, outgoing)?.bounded(plan.max_abs_reward))
        }
        RewardKind::RewardModel(model) => Box::new(Local::new(&plan.name, model, None)?.bounded(plan.max_abs_reward)),
        _ => Box::new(Builtin::of_plan(plan)?),
    })
}

/// Parses a list of test samples. Neighbors with the same prompt form a group, as in a job.
///
/// # Errors
/// Returns all errors in the samples, each with a JSON pointer below `/samples`.
pub fn read_samples(samples: Option<&Value>) -> Result<Vec<RewardSample>, Vec<FieldError>> {
    let Some(Value::Array(given)) = samples else {
        return Err(vec![FieldError::new(
            "/samples",
            "required",
            "a list of samples {prompt, completion, columns} is required",
        )]);
    };
    if given.is_empty() || given.len() > MAX_SAMPLES {
        let detail = format!("the list must have 1 to {MAX_SAMPLES} samples, not {}", given.len());
        return Err(vec![FieldError::new("/samples", "out_of_range", detail)]);
    }
    let mut samples: Vec<RewardSample> = Vec::with_capacity(given.len());
    let mut errors = Vec::new();
    let mut group = 0;
    for (index, value) in given.iter().enumerate() {
        match read_sample(index, value) {
            Err((name, detail)) => {
                errors.push(FieldError::new(format!("/samples/{index}{name}"), "invalid_type", detail));
            }
            Ok(mut sample) => {
                group += usize::from(samples.last().is_some_and(|last| last.prompt != sample.prompt));
                sample.group_id = format!("g_{group}");
                sample.prompt_id = format!("row_{group}");
                samples.push(sample);
            }
        }
    }
    if errors.is_empty() { Ok(samples) } else { Err(errors) }
}

fn read_sample(index: usize, value: &Value) -> Result<RewardSample, (&'static str, &'static str)> {
    let Value::Object(fields) = value else {
        return Err(("", "a sample must be an object with prompt and completion"));
    };
    let mut rest = fields.clone();
    let (prompt, messages) = match rest.shift_remove("prompt") {
        Some(Value::String(prompt)) => (prompt, None),
        Some(messages @ Value::Array(_)) => (messages.to_string(), Some(messages)),
        None => (String::new(), None),
        Some(_) => return Err(("/prompt", "the prompt must be a string or a list of chat messages")),
    };
    let Some(Value::String(completion)) = rest.shift_remove("completion") else {
        return Err(("/completion", "the completion is required and must be a string"));
    };
    let mut columns = match rest.shift_remove("columns") {
        None => Map::new(),
        Some(Value::Object(columns)) => columns,
        Some(_) => return Err(("/columns", "must be an object")),
    };
    columns.extend(rest);
    // The number of words stands in for a sample's number of tokens, because a test has no tokenizer.
    let num_tokens = u32::try_from(completion.split_whitespace().count()).unwrap_or(u32::MAX);
    Ok(RewardSample {
        sample_id: format!("s_{index}"),
        group_id: String::new(),
        prompt_id: String::new(),
        source: None,
        prompt,
        messages,
        completion,
        finish_reason: FinishReason::Stop,
        num_tokens,
        completion_ids: None,
        columns,
        episode: None,
    })
}
