//! The decoder families: one file per family, for the keys and flags of config.json that the families do not share.
//!
//! A new family is one more file and one more entry of [`FAMILIES`]. A computation that no other family has becomes a
//! new field of [`ModelDescription`], which the decoder reads.

mod gemma;
mod granite;
mod llama;
mod ministral;
mod mistral;
mod olmo;
mod phi;
mod qwen;
mod qwen3_5;
mod smollm3;
#[cfg(test)]
mod tests;

use serde_json::Value;

use super::ModelCardError;
use super::config::{Activation, Keys, LayerNorms, ModelDescription, Projections, QkNorm, Rope, RopeKind, Sizes, rope};
use super::weights::TensorDtype;

/// A decoder family and its defaults.
pub(super) struct Family {
    /// The value of `model_type` in config.json.
    pub(super) model_type: &'static str,
    /// Keys of config.json that this family reads and others do not; a family that does not read such a key rejects it.
    pub(super) reads: &'static [&'static str],
    /// Default values of sizes in config.json. A head is hidden_size / num_attention_heads wide unless this list has `head_dim`.
    pub(super) sizes: &'static [(&'static str, usize)],
    /// Default value of the epsilon in RMSNorm.
    pub(super) rms_norm_eps: f64,
    /// The config.json key of the MLP's activation function, and its default value.
    pub(super) activation: (&'static str, &'static str),
    /// Default base of the rotary position embedding.
    pub(super) rope_theta: f64,
    /// Reads the rotary position embeddings, given the default base: the embedding of all layers, and that of layers with a
    /// window if it differs.
    pub(super) ropes: ReadRopes,
    /// Default value of `partial_rotary_factor`; None if all columns of a head rotate.
    pub(super) rotary_factor: Option<f64>,
    /// Whether the language-model head shares the embedding's weights by default.
    pub(super) is_tied: bool,
    /// Whether `num_key_value_heads` defaults to the number of query heads.
    pub(super) has_kv_heads_by_default: bool,
    /// Sets the fields of [`ModelDescription`] that are specific to the family.
    pub(super) describe: Describe,
}

impl Family {
    /// Defaults that most families share.
    const COMMON: Family = Family {
        model_type: "",
        reads: &[],
        sizes: &[],
        rms_norm_eps: 1e-6,
        activation: ("hidden_act", "silu"),
        rope_theta: 10_000.0,
        ropes: |keys, theta, sizes| Ok((rope(keys, theta, sizes)?, None)),
        rotary_factor: None,
        is_tied: false,
        has_kv_heads_by_default: false,
        describe: |_, model| Ok(model),
    };
}

/// Reads the key `attention_bias`, which applies to all four projections of attention.
fn read_attention_bias(keys: &Keys<'_>, model: &mut ModelDescription) -> Result<(), ModelCardError> {
    let bias = keys.flag("attention_bias", false)?;
    (model.qkv_bias, model.o_bias) = (bias, bias);
    Ok(())
}

type ReadRopes = fn(&Keys<'_>, f64, Sizes) -> Result<(Rope, Option<Rope>), ModelCardError>;
type Describe = fn(&Keys<'_>, ModelDescription) -> Result<ModelDescription, ModelCardError>;

/// All supported decoder families.
pub(super) const FAMILIES: [Family; 14] = [
    qwen::QWEN3,
    qwen::QWEN2,
    llama::LLAMA,
    mistral::MISTRAL,
    smollm3::SMOLLM3,
    granite::GRANITE,
    granite::GRANITE_HYBRID,
    olmo::OLMO2,
    ministral::MINISTRAL3,
    olmo::OLMO3,
    gemma::GEMMA2,
    gemma::GEMMA3_TEXT,
    phi::PHI3,
    qwen3_5::QWEN3_5_TEXT,
];

/// Multimodal checkpoints with a supported text part: the `model_type` in config.json, and the types that its `text_config` may
/// have. The first type is the default.
const WITH_TEXT_PART: [(&str, &[&str]); 3] =
    [("gemma3", &["gemma3_text"]), ("mistral3", &["mistral", "ministral3"]), ("qwen3_5", &["qwen3_5_text"])];

/// Keys of config.json that change the computation, unless the value is null, false or the number given here, which has no effect.
const UNSUPPORTED: [(&str, Option<f64>); 27] = [
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
    ("use_bidirectional_attention", None),
];

impl ModelDescription {
    /// Parses and validates the content of config.json; `file` is the file name in errors.
    pub fn from_json(file: &str, value: &Value) -> Result<ModelDescription, ModelCardError> {
        let keys = Keys { file, value };
        let text_part = text_part(&keys)?;
        if text_part.is_none() {
            family_of(&keys)?;
        }
        let endings: &[&str] =
            if text_part.is_some() { &["ForCausalLM", "ForConditionalGeneration"] } else { &["ForCausalLM"] };
        if let Some(value) = keys.get("architectures") {
            let is_right =
                |name: &Value| name.as_str().is_some_and(|name| endings.iter().any(|end| name.ends_with(end)));
            if !value.as_array().is_some_and(|list| list.is_empty() || list.iter().any(is_right)) {
                return keys.refuse("architectures", value, "a …ForCausalLM model is required");
            }
        }
        match text_part {
            None => ModelDescription::of_family(&keys, family_of(&keys)?),
            Some(text) => {
                let file = format!("{file}, text_config");
                let description = ModelDescription::from_json(&file, &text)?;
                Ok(ModelDescription { is_part: true, ..description })
            }
        }
    }

    /// Describes the decoder under a …ForSequenceClassification head; such a checkpoint has no language-model head.
    pub(super) fn of_backbone(keys: &Keys) -> Result<ModelDescription, ModelCardError> {
        let config = ModelDescription::of_family(keys, family_of(keys)?)?;
        Ok(ModelDescription { tie_word_embeddings: true, ..config })
    }

    fn of_family(keys: &Keys, family: &Family) -> Result<ModelDescription, ModelCardError> {
        let file = keys.file;
        let fp8_block = fp8_block(keys)?;
        check_four_bit(keys)?;
        check_unsupported(keys, family)?;
        let usual = |key: &str| family.sizes.iter().find(|(name, _)| *name == key).map(|(_, size)| *size);
        let size = |key: &str| keys.size(key, usual(key));
        let hidden_size = size("hidden_size")?;
        let num_attention_heads = size("num_attention_heads")?;
        let default_kv_heads =
            usual("num_key_value_heads").or(family.has_kv_heads_by_default.then_some(num_attention_heads));
        let num_key_value_heads = keys.size("num_key_value_heads", default_kv_heads)?;
        if num_attention_heads % num_key_value_heads != 0 {
            let detail = format!(
                "num_key_value_heads is {num_key_value_heads}; it must divide num_attention_heads ({num_attention_heads})"
            );
            return Err(ModelCardError::new(file, detail));
        }
        let default_head_dim = usual("head_dim").unwrap_or(hidden_size / num_attention_heads);
        // The Qwen2 of transformers has no head_dim key of its own, but uses an explicit one.
        let head_dim = keys.size("head_dim", Some(default_head_dim))?;
        if head_dim % 2 != 0 || head_dim == 0 || head_dim > 4096 {
            return Err(ModelCardError::new(file, format!("head_dim is {head_dim}; it must be even and at most 4096")));
        }
        let num_hidden_layers = size("num_hidden_layers")?;
        if num_hidden_layers > 10_000 {
            let detail = format!("num_hidden_layers is {num_hidden_layers}; at most 10000 layers are supported");
            return Err(ModelCardError::new(file, detail));
        }
        let max_position_embeddings = size("max_position_embeddings")?;
        let is_phi3 = family.model_type == phi::PHI3.model_type;
        let sizes = Sizes { head_dim, max_position_embeddings, is_phi3, rotary_factor: family.rotary_factor };
        let (rope, local_rope) = (family.ropes)(keys, family.rope_theta, sizes)?;
        // `rope_type` dynamic supports sequences beyond max_position_embeddings, up to this factor.
        let reach = match rope.kind {
            RopeKind::Dynamic { factor, .. } => (max_position_embeddings as f64 * factor.max(1.0)) as usize,
            _ => max_position_embeddings,
        };
        let common = ModelDescription {
            family: family.model_type,
            hidden_size,
            intermediate_size: size("intermediate_size")?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: size("vocab_size")?,
            rms_norm_eps: keys.number("rms_norm_eps", Some(family.rms_norm_eps))?,
            tie_word_embeddings: keys.flag("tie_word_embeddings", family.is_tied)?,
            qk_norm: QkNorm::None,
            norms: LayerNorms::BEFORE,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            projections: Projections::SEPARATE,
            activation: activation(keys, family.activation)?,
            norm_offset: 0.0,
            rope,
            local_rope,
            windows: vec![None; num_hidden_layers],
            rotates: vec![true; num_hidden_layers],
            delta_net: None,
            has_output_gate: false,
            max_position_embeddings: reach,
            attention_scale: (head_dim as f64).powf(-0.5),
            attention_softcap: None,
            query_growth: None,
            embedding_multiplier: 1.0,
            residual_multiplier: 1.0,
            logits_divisor: 1.0,
            logits_softcap: None,
            is_part: false,
            fp8_block,
            fp8_dtype: fp8_dtype(keys),
        };
        (family.describe)(keys, common)
    }
}

/// Rejects keys of config.json that would change the computation and that the model's family does not read.
fn check_unsupported(keys: &Keys<'_>, family: &Family) -> Result<(), ModelCardError> {
    let is_read = |key: &str| {
        family.reads.contains(&key) || (key == "quantization_config" && (is_fp8(keys) || is_four_bit(keys)))
    };
    for (key, neutral) in UNSUPPORTED.into_iter().filter(|(key, _)| !is_read(key)) {
        if let Some(found) = keys.get(key) {
            let harmless = match found {
                Value::Bool(b) => !b,
                Value::Number(n) => n.as_f64() == neutral.or(Some(0.0)),
                _ => false,
            };
            if !harmless && key == "quantization_config" {
                let advice = "supported are fp8 and bitsandbytes in 4 bits (nf4, fp4); use the 16-bit model that this one was made from \
                              (base_model in its model card, or the name without -bnb-8bit, -GPTQ, -AWQ and the like)";
                return keys.refuse(key, found, advice);
            }
            if !harmless {
                return keys.refuse(key, found, "this setting is not supported; use a model without it");
            }
        }
    }
    Ok(())
}

/// Returns whether the checkpoint stores weights in 8 bits with separate scales: the `fp8` format of transformers.
fn is_fp8(keys: &Keys<'_>) -> bool {
    keys.get("quantization_config").is_some_and(|value| value["quant_method"] == "fp8")
}

/// Returns whether the checkpoint stores weights in bitsandbytes' 4-bit formats. The tensors in the files decide which ones.
fn is_four_bit(keys: &Keys<'_>) -> bool {
    let is_set = |config: &Value, key: &str| config[key] == Value::Bool(true);
    keys.get("quantization_config").is_some_and(|config| {
        // transformers 5 has an underscore before these two keys as well.
        let method = config.get("quant_method").is_none_or(|method| method == "bitsandbytes");
        method && (is_set(config, "load_in_4bit") || is_set(config, "_load_in_4bit")) && !is_set(config, "load_in_8bit")
    })
}

/// Rejects 4-bit codes that are stored in tensors of another format, which FSDP needs.
fn check_four_bit(keys: &Keys<'_>) -> Result<(), ModelCardError> {
    let found = &keys.value["quantization_config"]["bnb_4bit_quant_storage"];
    if !is_four_bit(keys) || found.is_null() || found == "uint8" {
        return Ok(());
    }
    keys.refuse(
        "quantization_config.bnb_4bit_quant_storage",
        found,
        "supported is uint8: quantize the model with that storage",
    )
}

/// Reads the rows and columns of a block of 8-bit weights that shares a scale; None means one scale per matrix.
fn fp8_block(keys: &Keys<'_>) -> Result<Option<[usize; 2]>, ModelCardError> {
    if !is_fp8(keys) {
        return Ok(None);
    }
    let found = &keys.value["quantization_config"]["weight_block_size"];
    let sizes: Option<Vec<u64>> =
        found.as_array().map(|list| list.iter().filter_map(Value::as_u64).filter(|size| *size > 0).collect());
    match sizes.as_deref() {
        Some([rows, columns]) => Ok(Some([*rows as usize, *columns as usize])),
        None if found.is_null() => Ok(None),
        _ => {
            keys.refuse("quantization_config.weight_block_size", found, "the value must be two positive whole numbers")
        }
    }
}

/// Reads the number format to which expanded 8-bit weights are rounded. transformers rounds them to the model's `dtype` (`torch_dtype`
/// in transformers 4).
fn fp8_dtype(keys: &Keys<'_>) -> TensorDtype {
    let dtype = keys.get("dtype").or_else(|| keys.get("torch_dtype")).and_then(Value::as_str);
    match dtype.filter(|_| is_fp8(keys)) {
        Some("float32") => TensorDtype::F32,
        Some("float16") => TensorDtype::F16,
        _ => TensorDtype::Bf16,
    }
}

/// Reads the activation function of the MLP's gate.
fn activation(keys: &Keys<'_>, (key, usual): (&str, &str)) -> Result<Activation, ModelCardError> {
    let usual = Value::from(usual);
    let value = keys.get(key).unwrap_or(&usual);
    match value.as_str() {
        Some("silu" | "swish") => Ok(Activation::Silu),
        // transformers uses the same formula for both of these names.
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        _ => keys.refuse(key, value, "supported are \"silu\" and \"gelu_pytorch_tanh\""),
    }
}

/// Returns the `text_config` of a multimodal checkpoint, merged with the top-level keys; None for other checkpoints.
///
/// # Errors
/// Fails if the text part's family is not supported.
fn text_part(keys: &Keys<'_>) -> Result<Option<Value>, ModelCardError> {
    let model_type = keys.get("model_type").and_then(Value::as_str);
    let Some((_, of_text)) = WITH_TEXT_PART.iter().find(|(name, _)| model_type == Some(name)) else { return Ok(None) };
    let Some(Value::Object(text)) = keys.get("text_config") else {
        let detail = "text_config is missing; it must describe the model's decoder";
        return Err(ModelCardError::new(keys.file, detail));
    };
    let mut text = text.clone();
    if !text.contains_key("model_type") {
        text.insert("model_type".to_owned(), of_text[0].into());
    }
    let found = &text["model_type"];
    if !found.as_str().is_some_and(|name| of_text.contains(&name)) {
        return keys.refuse("text_config.model_type", found, &format!("supported are {}", of_text.join(", ")));
    }
    // These top-level keys apply to the text part too. transformers ties the head by the top-level key alone, which is true by default in
    // Gemma3Config and Mistral3Config, and false in Qwen3_5Config.
    let is_tied = model_type != Some("qwen3_5");
    for (key, value) in [
        ("quantization_config", keys.get("quantization_config").cloned()),
        ("dtype", keys.get("dtype").or_else(|| keys.get("torch_dtype")).cloned()),
        ("tie_word_embeddings", Some(keys.flag("tie_word_embeddings", is_tied)?.into())),
    ] {
        if let Some(value) = value {
            text.insert(key.to_owned(), value);
        }
    }
    if model_type == Some("gemma3") {
        // Gemma3ForCausalLM applies this soft cap to its logits, but Gemma3ForConditionalGeneration does not (transformers 5.23.0).
        text.remove("final_logit_softcapping");
    }
    text.remove("architectures");
    Ok(Some(Value::Object(text)))
}

/// Whether rlood's own engine has this `model_type`, alone or as the text part of a multimodal checkpoint.
pub(super) fn is_known(model_type: &str) -> bool {
    FAMILIES.iter().any(|family| family.model_type == model_type)
        || WITH_TEXT_PART.iter().any(|(name, _)| *name == model_type)
}

fn family_of(keys: &Keys) -> Result<&'static Family, ModelCardError> {
    let names = FAMILIES.iter().map(|family| family.model_type).chain(WITH_TEXT_PART.iter().map(|(name, _)| *name));
    let names: Vec<&str> = names.collect();
    let advice = format!("supported are {}", names.join(", "));
    let Some(value) = keys.get("model_type") else {
        return Err(ModelCardError::new(keys.file, format!("model_type is missing; {advice}")));
    };
    match FAMILIES.iter().find(|family| value.as_str() == Some(family.model_type)) {
        Some(family) => Ok(family),
        None => keys.refuse("model_type", value, &advice),
    }
}
