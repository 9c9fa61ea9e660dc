//! Forks: the document of a new job made from another's plan, and whether its run may go on from the other's checkpoint.

use serde_json::{Value, json};

use super::{ComputeDtype, Estimator, OptimizerKind, Plan, RewardPlan, SplitRule, submittable};

/// What a run must share with the one whose checkpoint it goes on from: model, data, adapter, optimizer state, batches,
/// seed. Learning rate, steps, rewards and the rest may differ. The checkpoint holds its hash.
pub fn resume_identity(plan: &Plan) -> Value {
    let rloo = &plan.rloo;
    let mut shared = json!({
        "model": plan.model.sha256,
        "dataset": plan.dataset.sha256,
        "lora": plan.lora,
        "num_generations": rloo.num_generations,
        "num_iterations": rloo.num_iterations,
        "steps_per_generation": rloo.steps_per_generation,
        "prompts_per_step": plan.training.prompts_per_step,
        "seed": plan.training.seed,
        "shuffle_dataset": plan.training.shuffle_dataset,
    });
    // Named where they are not the default, so that older checkpoints stay valid.
    if plan.optimizer.kind != OptimizerKind::Adamw {
        shared["optimizer"] = json!(plan.optimizer.kind);
    }
    if plan.lora.is_none() {
        // The order of the moments in a checkpoint.
        shared["parameters"] = json!("decayed first");
    }
    if plan.training.dtype != ComputeDtype::F32 {
        shared["dtype"] = json!(plan.training.dtype);
    }
    if rloo.overlap {
        // The checkpoint holds the next block, sampled.
        shared["overlap"] = json!({"temperature": plan.sampling.temperature, "beta": rloo.beta, "remax": rloo.estimator == Estimator::Remax});
    }
    if let Some(fraction) = plan.eval.as_ref().and_then(|eval| eval.fraction) {
        shared["eval_fraction"] = json!(fraction);
        if plan.arithmetic.split != SplitRule::RowNumber {
            shared["split"] = json!(plan.arithmetic.split);
        }
    }
    if let Some(warm_start) = &plan.warm_start {
        shared["warm_start"] = json!(warm_start);
    }
    shared
}

/// Whether a run of this plan may go on from a checkpoint of that one; if not, what stands against it.
pub fn continues(plan: &Plan, parent: &Plan, step: u64) -> Result<(), String> {
    let (new, old) = (resume_identity(plan), resume_identity(parent));
    let mut differ = differing(&new, &old);
    // In the middle of a block the checkpoint holds its rewards and log-probs.
    let uses = u64::from(parent.rloo.num_iterations) * u64::from(parent.rloo.steps_per_generation);
    if !step.is_multiple_of(uses.max(1)) {
        let inside = |plan: &Plan, rewards: &[RewardPlan]| json!({"rewards": rewards, "rloo": plan.rloo, "temperature": plan.sampling.temperature});
        let rewards = as_old_as(&plan.rewards, &parent.rewards);
        differ.extend(differing(&inside(plan, &rewards), &inside(parent, &parent.rewards)));
    }
    if differ.is_empty() { Ok(()) } else { Err(differ.join(", ")) }
}

/// The rewards without the rules that those of the parent are too old to have: values are judged by them from now on, and
/// those of the block under way stay as they are.
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

/// A job's plan as a document, with `overrides` merged over it as RFC 7396 says: objects key by key, null = back to the
/// default, anything else replaces. `lora: null` stays (full fine-tuning); `dataset` and `warm_start` are replaced whole.
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
        let whole = matches!(key.as_str(), "dataset" | "warm_start");
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
