//! Warm starts: does the checkpoint that a job begins with belong to its model, and is its adapter the one asked for?

use super::{FieldError, JobSpec, LoraPlan, ModelFacts};

/// A checkpoint, as far as a plan depends on it.
#[derive(Debug, Clone)]
pub struct WarmStartFacts {
    /// SHA-256 of the base model it was trained from.
    pub model_sha256: String,
    /// That model's id.
    pub model_id: String,
    /// Its adapter; None = it holds all weights.
    pub lora: Option<LoraPlan>,
}

/// The adapter of a job that begins with a checkpoint: what the job leaves open is the checkpoint's, what it says must be
/// the same. Dropout is the job's own.
pub(super) fn adapter(
    spec: &JobSpec,
    facts: &WarmStartFacts,
    model: &ModelFacts,
    errors: &mut Vec<FieldError>,
) -> Option<LoraPlan> {
    const AT: &str = "/warm_start/checkpoint";
    if facts.model_sha256 != model.sha256 {
        let detail = format!(
            "the checkpoint was trained from model '{}' ({}…), this job uses '{}' ({}…): give that model, or a checkpoint of this one",
            facts.model_id,
            facts.model_sha256.get(..12).unwrap_or(&facts.model_sha256),
            model.id,
            model.sha256.get(..12).unwrap_or(&model.sha256),
        );
        errors.push(FieldError::new(AT, "model_differs", detail));
    }
    let (asked, theirs) = match (&spec.lora, &facts.lora) {
        (None, None) => return None,
        (Some(asked), Some(theirs)) => (asked, theirs),
        (Some(asked), None) => {
            let detail = "the checkpoint holds all weights of a full fine-tuning, not an adapter: give \"lora\": null to go on with them, or register its files as a model to train an adapter on top";
            errors.push(FieldError::new(AT, "kind_differs", detail));
            return Some(asked.clone());
        }
        (None, Some(_)) => {
            let detail = "the checkpoint holds a LoRA adapter, but \"lora\": null asks for full fine-tuning: leave lora out to go on with the adapter";
            errors.push(FieldError::new("/lora", "kind_differs", detail));
            return None;
        }
    };
    let given = |key: &str| spec.redacted.pointer(&format!("/lora/{key}")).is_some_and(|value| !value.is_null());
    let mut differs = |key: &str, asked: String, theirs: String| {
        if given(key) && asked != theirs {
            let detail = format!(
                "the checkpoint's adapter has {key} {theirs}, not {asked}: leave it out to take over the checkpoint's"
            );
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
