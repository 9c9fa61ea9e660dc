//! Warm starts: checks that the starting checkpoint belongs to the job's model, and that its adapter is the requested one.

use super::{AdapterPlan, Context, FieldError, JobSpec, LoraPlan, ModelFacts, WarmStartPlan};

/// Properties of a checkpoint that a plan depends on.
#[derive(Debug, Clone)]
pub struct WarmStartFacts {
    /// The base model that it was trained from, as SHA-256 and id. `None` for an imported adapter, whose
    /// shapes were compared instead.
    pub model: Option<(String, String)>,
    /// The adapter in the checkpoint; `None` = the checkpoint has all weights of the model.
    pub lora: Option<LoraPlan>,
    /// Stored location of an imported adapter; `None` for a checkpoint of a job.
    pub adapter: Option<AdapterPlan>,
}

/// Returns the adapter of a job with a warm start. Settings that the job leaves out are taken from the checkpoint; settings that it
/// gives must be equal, except dropout.
pub(super) fn adapter(
    spec: &JobSpec,
    facts: &WarmStartFacts,
    model: &ModelFacts,
    errors: &mut Vec<FieldError>,
) -> Option<LoraPlan> {
    const AT: &str = "/warm_start/checkpoint";
    // Names the starting weights in error messages: checkpoint or adapter.
    let what = if facts.adapter.is_some() { "adapter" } else { "checkpoint's adapter" };
    if let Some((theirs, id)) = facts.model.as_ref().filter(|(sha256, _)| *sha256 != model.sha256) {
        let detail = format!(
            "the checkpoint was trained from model '{}' ({}…), this job uses '{}' ({}…): give that model, or a checkpoint of this one",
            id,
            theirs.get(..12).unwrap_or(theirs),
            model.id,
            model.sha256.get(..12).unwrap_or(&model.sha256),
        );
        errors.push(FieldError::new(AT, "model_differs", detail));
    }
    let (asked, theirs) = match (&spec.lora, &facts.lora) {
        (None, None) => return None,
        (Some(asked), Some(theirs)) => (asked, theirs),
        (Some(asked), None) => {
            let detail = "the checkpoint holds all weights of a full fine-tuning, not an adapter: give \"lora\": null to continue with them, or register its files as a model to train an adapter on top";
            errors.push(FieldError::new(AT, "kind_differs", detail));
            return Some(asked.clone());
        }
        (None, Some(_)) => {
            let detail = "the job starts from a LoRA adapter, but \"lora\": null asks for full fine-tuning: leave lora out to continue with the adapter";
            errors.push(FieldError::new("/lora", "kind_differs", detail));
            return None;
        }
    };
    let given = |key: &str| spec.redacted.pointer(&format!("/lora/{key}")).is_some_and(|value| !value.is_null());
    let mut differs = |key: &str, asked: String, theirs: String| {
        if given(key) && asked != theirs {
            let detail = format!("the {what} has {key} {theirs}, not {asked}: leave it out to take over the adapter's");
            errors.push(FieldError::new(format!("/lora/{key}"), "adapter_differs", detail));
        }
    };
    differs("r", asked.r.to_string(), theirs.r.to_string());
    differs("alpha", asked.alpha.to_string(), theirs.alpha.to_string());
    let all_linear = spec.redacted.pointer("/lora/target_modules").is_some_and(serde_json::Value::is_string);
    let modules = if all_linear && !model.modules.is_empty() {
        model.modules.join(", ")
    } else {
        asked.target_modules.join(", ")
    };
    differs("target_modules", modules, theirs.target_modules.join(", "));
    differs("use_rslora", asked.use_rslora.to_string(), theirs.use_rslora.to_string());
    Some(LoraPlan { dropout: asked.dropout, ..theirs.clone() })
}

/// Returns the warm start with the stored location of its adapter.
pub(super) fn found(warm_start: WarmStartPlan, context: &Context) -> WarmStartPlan {
    let here = context.warm_start.as_ref().and_then(|facts| facts.adapter.clone());
    WarmStartPlan { adapter: here.or(warm_start.adapter), ..warm_start }
}
