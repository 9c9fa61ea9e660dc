//! Forks: creates the document of a new job from another job's plan, and decides whether its run may resume from the other job's
//! checkpoint.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::settings::{LORA, OPTIMIZER, RLOO, Resume, Section, TRAINING};
use super::{Estimator, Plan, RewardPlan, SplitRule, submittable};

/// Returns the settings that a run must share with the run whose checkpoint it resumes from: model, data, adapter, optimizer state,
/// batches, seed. Learning rate, steps, rewards and other settings may differ. The checkpoint stores the hash of this value.
pub fn resume_identity(plan: &Plan) -> Value {
    let mut shared = Map::new();
    shared.insert("model".to_owned(), json!(plan.model.sha256));
    shared.insert("dataset".to_owned(), json!(plan.dataset.sha256));
    if !plan.dataset.sources.is_empty() {
        shared.insert("dataset_sources".to_owned(), json!(plan.dataset.sources));
    }
    shared.insert("lora".to_owned(), json!(plan.lora.as_ref().map(|lora| fixed(&LORA, lora))));
    shared.extend(fixed(&RLOO, &plan.rloo));
    shared.extend(fixed(&TRAINING, &plan.training));
    shared.extend(fixed_later(&OPTIMIZER, &plan.optimizer));
    if plan.lora.is_none() {
        // Full fine-tuning: a checkpoint stores the optimizer moments in this order of the parameters.
        shared.insert("parameters".to_owned(), json!("decayed first"));
    }
    shared.extend(fixed_later(&TRAINING, &plan.training));
    let mut shared = Value::Object(shared);
    let rloo = &plan.rloo;
    if rloo.overlap {
        // A checkpoint of a run with overlap contains the next generation block, already sampled.
        shared["overlap"] = json!({"temperature": plan.sampling.temperature, "beta": rloo.beta, "remax": rloo.estimator == Estimator::Remax});
    }
    if let Some(fraction) = plan.eval.as_ref().and_then(|eval| eval.fraction) {
        shared["eval_fraction"] = json!(fraction);
        if plan.arithmetic.split != SplitRule::RowNumber {
            shared["split"] = json!(plan.arithmetic.split);
        }
    }
    if let Some(fraction) = plan.eval.as_ref().and_then(|eval| eval.test_fraction) {
        shared["eval_test_fraction"] = json!(fraction);
    }
    if let Some(warm_start) = &plan.warm_start {
        shared["warm_start"] = json!(warm_start);
    }
    if !plan.runtime.is_own() {
        let runtime = &plan.runtime;
        let settings = (runtime.name, runtime.load_in_8bit, runtime.zero_stage, runtime.offload);
        shared["runtime"] = json!({"settings": settings, "devices": plan.resources.devices});
    }
    if let Some(warm_up) = &plan.warm_up {
        let mut identity = json!(warm_up);
        identity["dataset"] = json!(warm_up.dataset.sha256);
        identity["longest_row_tokens"] = Value::Null;
        // A checkpoint contains the reference weights if the run's KL penalty needs them.
        identity["keeps_reference"] = json!(plan.has_warmed_reference());
        shared["warm_up"] = identity;
    }
    shared
}

/// Returns the settings of a section that must be equal for a run to resume from the checkpoint.
fn fixed(section: &Section, plan: &impl Serialize) -> Map<String, Value> {
    let plan = json!(plan);
    let fixed = section.settings.iter().filter(|setting| setting.resume == Resume::Fixed);
    fixed.map(|setting| (setting.name.to_owned(), plan[setting.name].clone())).collect()
}

/// Returns the settings of a section that must be equal for a run to resume and were added in a later version, if their value
/// differs from the earlier behavior. The plan leaves some of them out then.
fn fixed_later(section: &Section, plan: &impl Serialize) -> Map<String, Value> {
    let plan = json!(plan);
    let named = section.settings.iter().filter_map(|setting| {
        let Resume::FixedUnless { key, value } = setting.resume else { return None };
        Some((key.to_owned(), plan[setting.name].clone())).filter(|(_, chosen)| !chosen.is_null() && chosen != value)
    });
    named.collect()
}

/// Checks whether a run of this plan may resume from a checkpoint of the parent's plan; the error is the reason why not.
pub fn continues(plan: &Plan, parent: &Plan, step: u64) -> Result<(), String> {
    let (new, old) = (resume_identity(plan), resume_identity(parent));
    let mut differ = differing(&new, &old);
    // Within a generation block, the checkpoint contains the block's rewards and log-probabilities.
    let uses = u64::from(parent.rloo.num_iterations) * u64::from(parent.rloo.steps_per_generation);
    if !parent.rloo_step(step).unwrap_or(0).is_multiple_of(uses.max(1)) {
        let inside = |plan: &Plan, rewards: &[RewardPlan]| json!({"rewards": rewards, "rloo": plan.rloo, "temperature": plan.sampling.temperature});
        let rewards = as_old_as(&plan.rewards, &parent.rewards);
        differ.extend(differing(&inside(plan, &rewards), &inside(parent, &parent.rewards)));
    }
    if differ.is_empty() { Ok(()) } else { Err(differ.join(", ")) }
}

/// Returns the rewards without settings that the parent's rewards are too old to have. New values are judged by these settings, and
/// those of the current block stay unchanged.
fn as_old_as(rewards: &[RewardPlan], parent: &[RewardPlan]) -> Vec<RewardPlan> {
    let mut rewards = rewards.to_vec();
    for (reward, old) in rewards.iter_mut().zip(parent) {
        reward.max_abs_reward = reward.max_abs_reward.filter(|_| old.max_abs_reward.is_some());
        reward.blank_reference = reward.blank_reference.filter(|_| old.blank_reference.is_some());
    }
    rewards
}

fn differing(new: &Value, old: &Value) -> Vec<String> {
    let (Some(new), Some(old)) = (new.as_object(), old.as_object()) else { return Vec::new() };
    let mut keys: Vec<String> =
        new.keys().chain(old.keys()).filter(|key| new.get(*key) != old.get(*key)).cloned().collect();
    keys.sort();
    keys.dedup();
    keys
}

/// Returns a job's plan as a document with `overrides` merged into it by RFC 7396: objects key by key, null = back to the
/// default, anything else replaces the value. `lora: null` is kept (full fine-tuning); `dataset`, `warm_start` and
/// `warm_up` are replaced as a whole.
pub fn forked_document(parent: &Plan, overrides: &Value) -> Value {
    let mut document = submittable(parent);
    if let Some(document) = document.as_object_mut() {
        document.shift_remove("warm_start");
    }
    let by_epochs = overrides.pointer("/training/num_train_epochs").is_some_and(|epochs| !epochs.is_null());
    if let Some(training) = document.pointer_mut("/training").and_then(Value::as_object_mut).filter(|_| by_epochs) {
        training.shift_remove("max_steps");
    }
    merge(&mut document, overrides, 0);
    document
}

fn merge(into: &mut Value, overrides: &Value, depth: usize) {
    let (Some(into), Some(overrides)) = (into.as_object_mut(), overrides.as_object()) else { return };
    for (key, value) in overrides {
        let whole = matches!(key.as_str(), "dataset" | "warm_start" | "warm_up");
        match (into.get_mut(key), value) {
            (_, Value::Null) if depth == 0 && key == "lora" => {
                into.insert(key.clone(), Value::Null);
            }
            (_, Value::Null) => {
                into.shift_remove(key);
            }
            (Some(old @ Value::Object(_)), Value::Object(_)) if !whole => merge(old, value, depth + 1),
            (_, value) => {
                into.insert(key.clone(), value.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::example::resolved;

    #[test]
    fn the_identity_of_a_checkpoint_is_written_as_it_always_was() {
        let mut document = json!({
            "model": "m", "dataset": {"records": vec![json!({"prompt": "p"}); 8]}, "rewards": [{"type": "length"}],
        });
        // The expected text must not change, because every existing checkpoint contains the hash of it.
        let mut written = |changes: Value| {
            merge(&mut document, &changes, 0);
            let mut plan = resolved(document.clone());
            plan.dataset.sha256 = "data".to_owned();
            resume_identity(&plan).to_string()
        };
        let usual = r#"{"model":"","dataset":"data","lora":{"r":16,"alpha":32.0,"dropout":0.0,"target_modules":["q_proj","v_proj"],"use_rslora":false},"num_generations":4,"num_iterations":1,"steps_per_generation":1,"prompts_per_step":8,"seed":42,"shuffle_dataset":true}"#;
        assert_eq!(written(json!({"lora": {"target_modules": ["q_proj", "v_proj"]}})), usual);
        assert_eq!(written(json!({"optimizer": {"learning_rate": 1e-3}, "rloo": {"beta": 0.1}})), usual);
        let later = r#"{"model":"","dataset":"data","lora":null,"num_generations":4,"num_iterations":1,"steps_per_generation":1,"prompts_per_step":8,"seed":42,"shuffle_dataset":true,"optimizer":"adamw_8bit","parameters":"decayed first","dtype":"bf16"}"#;
        let changes = json!({"lora": null, "optimizer": {"kind": "adamw_8bit"}, "training": {"dtype": "bf16"}});
        assert_eq!(written(changes), later);
    }
}
