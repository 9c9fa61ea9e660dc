//! The decoder families: a file each, of the names and flags that its config.json has beyond the keys which all share.
//!
//! A new family is one more file and one more entry of [`FAMILIES`]; what its computation has that no other's has is a new field of
//! [`ModelDescription`], which the decoder reads.

mod granite;
mod llama;
mod ministral;
mod mistral;
mod olmo;
mod qwen;
mod smollm3;

use serde_json::Value;

use super::ModelCardError;
use super::config::{Keys, LayerNorms, ModelDescription, QkNorm, rope};

/// A decoder family.
pub(super) struct Family {
    /// In config.json.
    pub(super) model_type: &'static str,
    /// Keys that it understands, and that are refused in families which do not.
    pub(super) reads: &'static [&'static str],
    /// Width of a head where config.json names none; None = hidden_size / num_attention_heads.
    pub(super) head_dim: Option<usize>,
    /// The base of the rotary position embedding where config.json names none.
    pub(super) rope_theta: f64,
    /// The head is the embedding where config.json does not say.
    pub(super) is_tied: bool,
    /// Without `num_key_value_heads` there are as many as query heads.
    pub(super) has_kv_heads_by_default: bool,
    /// Adds what the family has to what the common keys say.
    pub(super) describe: Describe,
}

impl Family {
    /// What most families have.
    const COMMON: Family = Family {
        model_type: "",
        reads: &[],
        head_dim: None,
        rope_theta: 10_000.0,
        is_tied: false,
        has_kv_heads_by_default: false,
        describe: |_, model| Ok(model),
    };
}

/// `attention_bias` is for all four products of attention.
fn read_attention_bias(keys: &Keys<'_>, model: &mut ModelDescription) -> Result<(), ModelCardError> {
    let bias = keys.flag("attention_bias", false)?;
    (model.qkv_bias, model.o_bias) = (bias, bias);
    Ok(())
}

type Describe = fn(&Keys<'_>, ModelDescription) -> Result<ModelDescription, ModelCardError>;

/// All of them.
pub(super) const FAMILIES: [Family; 8] = [
    qwen::QWEN3,
    qwen::QWEN2,
    llama::LLAMA,
    mistral::MISTRAL,
    smollm3::SMOLLM3,
    granite::GRANITE,
    olmo::OLMO2,
    ministral::MINISTRAL3,
];

/// Keys whose presence (not null, not false, not the neutral number) changes the computation.
const UNSUPPORTED: [(&str, Option<f64>); 26] = [
    ("attn_logit_softcapping", None),
    ("final_logit_softcapping", None),
    ("query_pre_attn_scalar", None),
    ("quantization_config", None),
    ("partial_rotary_factor", Some(1.0)),
    ("rotary_pct", Some(1.0)),
    ("rotary_dim", None),
    ("embedding_multiplier", Some(1.0)),
    ("attention_multiplier", None),
    ("residual_multiplier", Some(1.0)),
    ("logits_scaling", Some(1.0)),
    ("logit_scale", Some(1.0)),
    ("num_experts", None),
    ("num_local_experts", None),
    ("n_routed_experts", None),
    ("no_rope_layers", None),
    ("no_rope_layer_interval", None),
    ("attention_chunk_size", None),
    ("attn_temperature_tuning", None),
    ("alibi", None),
    ("is_encoder_decoder", None),
    ("add_cross_attention", None),
    ("vision_config", None),
    ("audio_config", None),
    ("kv_lora_rank", None),
    ("rope_local_base_freq", None),
];

impl ModelDescription {
    /// Parse and validate config.json; `file` is its name in errors.
    pub fn from_json(file: &str, value: &Value) -> Result<ModelDescription, ModelCardError> {
        let keys = Keys { file, value };
        let family = family_of(&keys)?;
        if let Some(value) = keys.get("architectures") {
            let causal = value.as_array().is_some_and(|list| {
                list.is_empty() || list.iter().any(|a| a.as_str().is_some_and(|a| a.ends_with("ForCausalLM")))
            });
            if !causal {
                return keys.refuse("architectures", value, "a …ForCausalLM model is needed");
            }
        }
        ModelDescription::of_family(&keys, family)
    }

    /// The decoder under a …ForSequenceClassification head; it has no language-model head.
    pub(super) fn of_backbone(keys: &Keys) -> Result<ModelDescription, ModelCardError> {
        let config = ModelDescription::of_family(keys, family_of(keys)?)?;
        Ok(ModelDescription { tie_word_embeddings: true, ..config })
    }

    fn of_family(keys: &Keys, family: &Family) -> Result<ModelDescription, ModelCardError> {
        let file = keys.file;
        for (key, neutral) in UNSUPPORTED.into_iter().filter(|(key, _)| !family.reads.contains(key)) {
            if let Some(found) = keys.get(key) {
                let harmless = match found {
                    Value::Bool(b) => !b,
                    Value::Number(n) => n.as_f64() == neutral.or(Some(0.0)),
                    _ => false,
                };
                if !harmless {
                    return keys.refuse(key, found, "this is not supported; use a model without it");
                }
            }
        }
        for key in ["hidden_act", "hidden_activation"] {
            if let Some(act) = keys.get(key)
                && !matches!(act.as_str(), Some("silu" | "swish"))
            {
                return keys.refuse(key, act, "only \"silu\" is supported");
            }
        }

        let hidden_size = keys.size("hidden_size", None)?;
        let num_attention_heads = keys.size("num_attention_heads", None)?;
        let default_kv_heads = family.has_kv_heads_by_default.then_some(num_attention_heads);
        let num_key_value_heads = keys.size("num_key_value_heads", default_kv_heads)?;
        if num_attention_heads % num_key_value_heads != 0 {
            let detail = format!(
                "num_key_value_heads is {num_key_value_heads}; it must divide num_attention_heads ({num_attention_heads})"
            );
            return Err(ModelCardError::new(file, detail));
        }
        let default_head_dim = family.head_dim.unwrap_or(hidden_size / num_attention_heads);
        // transformers' Qwen2 has no head_dim key and ignores one only by its default, so an explicit one counts.
        let head_dim = keys.size("head_dim", Some(default_head_dim))?;
        if head_dim % 2 != 0 || head_dim == 0 || head_dim > 4096 {
            return Err(ModelCardError::new(file, format!("head_dim is {head_dim}; it must be even and at most 4096")));
        }
        let num_hidden_layers = keys.size("num_hidden_layers", None)?;
        if num_hidden_layers > 10_000 {
            let detail = format!("num_hidden_layers is {num_hidden_layers}; at most 10000 are supported");
            return Err(ModelCardError::new(file, detail));
        }
        let max_position_embeddings = keys.size("max_position_embeddings", None)?;
        let common = ModelDescription {
            family: family.model_type,
            hidden_size,
            intermediate_size: keys.size("intermediate_size", None)?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: keys.size("vocab_size", None)?,
            rms_norm_eps: keys.number("rms_norm_eps", Some(1e-6))?,
            tie_word_embeddings: keys.flag("tie_word_embeddings", family.is_tied)?,
            qk_norm: QkNorm::None,
            norms: LayerNorms::BEFORE,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            rope: rope(keys, family.rope_theta, max_position_embeddings)?,
            windows: vec![None; num_hidden_layers],
            rotates: vec![true; num_hidden_layers],
            max_position_embeddings,
            attention_scale: (head_dim as f64).powf(-0.5),
            query_growth: None,
            embedding_multiplier: 1.0,
            residual_multiplier: 1.0,
            logits_divisor: 1.0,
        };
        (family.describe)(keys, common)
    }
}

fn family_of(keys: &Keys) -> Result<&'static Family, ModelCardError> {
    let names: Vec<&str> = FAMILIES.iter().map(|family| family.model_type).collect();
    let advice = format!("supported are {}", names.join(", "));
    let Some(value) = keys.get("model_type") else {
        return Err(ModelCardError::new(keys.file, format!("model_type is missing; {advice}")));
    };
    match FAMILIES.iter().find(|family| value.as_str() == Some(family.model_type)) {
        Some(family) => Ok(family),
        None => keys.refuse("model_type", value, &advice),
    }
}
