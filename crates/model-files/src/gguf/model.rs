//! The keys and tensors of a model or an adapter in llama.cpp's names.
//!
//! Names and keys: `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py` of llama.cpp. Only what was measured is written: each
//! architecture here gives transformers' log-probs within 1e-4 in f32 (tests/gguf).

use super::{Refused, Value};
use crate::{ModelDescription, Rope, RopeKind};

/// llama.cpp's name of the architecture (`general.architecture`).
///
/// # Errors
/// Fails for a family that was not compared with llama.cpp.
pub fn architecture(model: &ModelDescription) -> Result<&'static str, Refused> {
    match model.family {
        "llama" | "mistral" => Ok("llama"),
        "qwen2" => Ok("qwen2"),
        "qwen3" => Ok("qwen3"),
        family => Err(Refused(format!(
            "model_type '{family}' cannot be written as GGUF: llama.cpp was compared for llama, mistral, qwen2 and qwen3 only; \
             export the merged model, and convert it with llama.cpp's convert_hf_to_gguf.py"
        ))),
    }
}

/// Whether llama.cpp's architecture has the rows of q and k in another order ([`interleaved`]).
pub fn interleaves(architecture: &str) -> bool {
    architecture == "llama"
}

/// The row of the checkpoint's q or k that is row `row` in llama.cpp, which rotates neighbouring rows of a head; transformers rotates
/// row i of a head with row i + head_dim / 2.
pub fn interleaved(row: usize, head_dim: usize) -> usize {
    let (head, within) = (row / head_dim, row % head_dim);
    head * head_dim + within % 2 * (head_dim / 2) + within / 2
}

/// llama.cpp's name of a tensor of the checkpoint, without the ending `.weight` or `.bias` of both; None for one that it has not.
pub fn tensor_name(name: &str) -> Option<String> {
    let (stem, ending) = name.rsplit_once('.')?;
    let of_layer = |rest: &str| -> Option<String> {
        let (layer, part) = rest.split_once('.')?;
        let part = match part {
            "input_layernorm" => "attn_norm",
            "post_attention_layernorm" => "ffn_norm",
            "self_attn.q_proj" => "attn_q",
            "self_attn.k_proj" => "attn_k",
            "self_attn.v_proj" => "attn_v",
            "self_attn.o_proj" => "attn_output",
            "self_attn.q_norm" => "attn_q_norm",
            "self_attn.k_norm" => "attn_k_norm",
            "mlp.gate_proj" => "ffn_gate",
            "mlp.up_proj" => "ffn_up",
            "mlp.down_proj" => "ffn_down",
            _ => return None,
        };
        Some(format!("blk.{layer}.{part}"))
    };
    let stem = match stem {
        "model.embed_tokens" => "token_embd".to_owned(),
        "model.norm" => "output_norm".to_owned(),
        "lm_head" => "output".to_owned(),
        other => of_layer(other.strip_prefix("model.layers.")?)?,
    };
    Some(format!("{stem}.{ending}"))
}

/// The keys of a model's architecture.
///
/// # Errors
/// Fails for what llama.cpp does not compute as transformers does: a context beyond an attention window, rope types, biases.
pub fn keys(model: &ModelDescription, context_length: Option<usize>) -> Result<Vec<(String, Value)>, Refused> {
    let name = architecture(model)?;
    if model.o_bias || model.mlp_bias {
        return Err(Refused(
            "a bias of o_proj or of the MLP is not written as GGUF: llama.cpp was not compared with one".into(),
        ));
    }
    let context = context(model, context_length)?;
    let key = |key: &str, value: Value| (format!("{name}.{key}"), value);
    let count = |value: usize| Value::U32(value as u32);
    let mut keys = vec![
        ("general.architecture".to_owned(), Value::String(name.into())),
        key("block_count", count(model.num_hidden_layers)),
        key("context_length", count(context)),
        key("embedding_length", count(model.hidden_size)),
        key("feed_forward_length", count(model.intermediate_size)),
        key("attention.head_count", count(model.num_attention_heads)),
        key("attention.head_count_kv", count(model.num_key_value_heads)),
        key("attention.key_length", count(model.head_dim)),
        key("attention.value_length", count(model.head_dim)),
        key("attention.layer_norm_rms_epsilon", Value::F32(model.rms_norm_eps as f32)),
        key("rope.freq_base", Value::F32(model.rope.theta as f32)),
        key("rope.dimension_count", count(model.rope.rotary_dim)),
        key("vocab_size", count(model.vocab_size)),
    ];
    match &model.rope.kind {
        RopeKind::Default | RopeKind::Llama3 { .. } => {}
        RopeKind::Linear { factor } => {
            keys.push(key("rope.scaling.type", Value::String("linear".into())));
            keys.push(key("rope.scaling.factor", Value::F32(*factor as f32)));
        }
        RopeKind::Dynamic { .. } | RopeKind::Yarn { .. } | RopeKind::LongRope { .. } => {
            let kind = match &model.rope.kind {
                RopeKind::Dynamic { .. } => "dynamic",
                RopeKind::Yarn { .. } => "yarn",
                _ => "longrope",
            };
            return Err(Refused(format!(
                "rope_type '{kind}' is not written as GGUF: llama.cpp was not compared with it; supported are default, linear and llama3"
            )));
        }
    }
    Ok(keys)
}

/// The context length to write: llama.cpp ignores the attention windows of these architectures.
fn context(model: &ModelDescription, asked: Option<usize>) -> Result<usize, Refused> {
    let context = asked.unwrap_or(model.max_position_embeddings);
    if context == 0 || context > model.max_position_embeddings {
        return Err(Refused(format!(
            "context_length {context} is not between 1 and the model's max_position_embeddings {}",
            model.max_position_embeddings
        )));
    }
    match model.windows.iter().flatten().min() {
        Some(window) if *window < context => Err(Refused(format!(
            "the model attends to {window} positions (sliding_window), which llama.cpp ignores for it, and has a context of {context}: set \
             context_length to {window} or less"
        ))),
        _ => Ok(context),
    }
}

/// The divisor of each frequency of llama 3's rope, the tensor `rope_freqs.weight`; None for other rope types.
pub fn rope_divisors(rope: &Rope) -> Option<Vec<f32>> {
    let RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings: original } =
        rope.kind
    else {
        return None;
    };
    let divisor = |pair: usize| {
        let frequency = rope.theta.powf(-2.0 * pair as f64 / rope.rotary_dim as f64);
        let wavelength = 2.0 * std::f64::consts::PI / frequency;
        let smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
        match () {
            () if wavelength < original / high_freq_factor => 1.0,
            () if wavelength > original / low_freq_factor => factor,
            () => 1.0 / ((1.0 - smooth) / factor + smooth),
        }
    };
    Some((0..rope.rotary_dim / 2).map(|pair| divisor(pair) as f32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_head_come_in_the_order_of_the_pairs_that_rotate() {
        let rows: Vec<usize> = (0..16).map(|row| interleaved(row, 8)).collect();
        assert_eq!(rows, [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]);
    }

    #[test]
    fn names_are_llama_cpps() {
        let named = |name: &str| tensor_name(name);
        assert_eq!(named("model.layers.11.self_attn.q_proj.bias").unwrap(), "blk.11.attn_q.bias");
        assert_eq!(named("model.embed_tokens.weight").unwrap(), "token_embd.weight");
        assert_eq!(named("lm_head.weight").unwrap(), "output.weight");
        assert_eq!(named("model.layers.0.mlp.experts.weight"), None);
    }
}
