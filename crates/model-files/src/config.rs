//! config.json: one description of a decoder, whatever its family and whichever transformers wrote it, and how its keys are read.
//!
//! Keys that would change the result and are not supported are refused here, with their value; never deep in a forward.

use crate::spec::ModelShape;
use serde_json::Value;

use super::{ModelCardError, brief};

/// Everything config.json says about the computation: all that a decoder, an estimate of memory and a refusal need.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelDescription {
    /// The family: config.json's `model_type`.
    pub family: &'static str,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head; not always hidden_size / num_attention_heads.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// The head is the embedding.
    pub tie_word_embeddings: bool,
    /// RMSNorm on queries and keys.
    pub qk_norm: QkNorm,
    /// The norms of a layer.
    pub norms: LayerNorms,
    /// q, k and v have a bias.
    pub qkv_bias: bool,
    /// o has a bias.
    pub o_bias: bool,
    /// gate, up and down have a bias.
    pub mlp_bias: bool,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Per layer: how many positions a token sees, itself included; None = all before it.
    pub windows: Vec<Option<usize>>,
    /// Per layer: whether the rotary position embedding turns queries and keys.
    pub rotates: Vec<bool>,
    /// The longest sequence the model was made for.
    pub max_position_embeddings: usize,
    /// Dot products of attention are multiplied by this.
    pub attention_scale: f64,
    /// Queries grow with their position.
    pub query_growth: Option<QueryGrowth>,
    /// Embeddings are multiplied by this.
    pub embedding_multiplier: f64,
    /// What attention and the MLP add to the residual stream is multiplied by this.
    pub residual_multiplier: f64,
    /// Logits are divided by this.
    pub logits_divisor: f64,
}

/// A query at position p, counted from 0, is multiplied by 1 + beta · ln(1 + ⌊p / original⌋).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// How fast.
    pub beta: f64,
    /// The context before scaling: up to it nothing grows.
    pub original_max_position_embeddings: f64,
}

impl QueryGrowth {
    /// The factor of a position.
    pub fn factor(self, position: usize) -> f32 {
        let contexts = (position as f64 / self.original_max_position_embeddings).floor();
        (1.0 + self.beta * contexts.ln_1p()) as f32
    }
}

/// RMSNorm on queries and keys, before the rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// There is none.
    None,
    /// On each head.
    Head,
    /// On all heads of a token together.
    Width,
}

/// Where a layer has norms: the names of their weights, without `.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerNorms {
    /// Of what attention reads.
    pub before_attention: Option<&'static str>,
    /// Of what attention adds to the residual stream.
    pub after_attention: Option<&'static str>,
    /// Of what the MLP reads.
    pub before_mlp: Option<&'static str>,
    /// Of what the MLP adds to the residual stream.
    pub after_mlp: Option<&'static str>,
}

impl LayerNorms {
    /// As in Llama.
    pub const BEFORE: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    };
    /// As in OLMo 2.
    pub const AFTER: Self = Self {
        before_attention: None,
        after_attention: Some("post_attention_layernorm"),
        before_mlp: None,
        after_mlp: Some("post_feedforward_layernorm"),
    };
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base.
    pub theta: f64,
    /// How long contexts are reached.
    pub kind: RopeKind,
}

/// The supported `rope_type`s.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeKind {
    /// No scaling.
    Default,
    /// Positions divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// YaRN (arXiv 2309.00071).
    Yarn {
        /// How much longer than the original context.
        factor: f64,
        /// The context before scaling.
        original_max_position_embeddings: f64,
        /// Rotations above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which a frequency is interpolated.
        beta_slow: f64,
        /// Multiplies cos and sin.
        attention_factor: f64,
        /// Whether the bounds are rounded to whole dimensions.
        truncate: bool,
    },
    /// Llama 3's frequency bands.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths longer than original/low are scaled.
        low_freq_factor: f64,
        /// Wavelengths shorter than original/high are kept.
        high_freq_factor: f64,
        /// The context before scaling.
        original_max_position_embeddings: f64,
    },
}

/// The largest dimension, number of rows, or context that can be meant.
const MAX_SIZE: u64 = 1 << 28;

/// The keys of a JSON object, read with errors that name the file, the key and its value.
pub(super) struct Keys<'a> {
    pub(super) file: &'a str,
    pub(super) value: &'a Value,
}

impl Keys<'_> {
    pub(super) fn refuse<T>(&self, key: &str, value: &Value, advice: &str) -> Result<T, ModelCardError> {
        Err(ModelCardError::new(self.file, format!("{key} is {}; {advice}", brief(value))))
    }

    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn size(&self, key: &str, default: Option<usize>) -> Result<usize, ModelCardError> {
        let Some(value) = self.get(key) else {
            return default.ok_or_else(|| ModelCardError::new(self.file, format!("{key} is missing; it must be set")));
        };
        match value.as_u64() {
            Some(n) if (1..=MAX_SIZE).contains(&n) => Ok(n as usize),
            _ => self.refuse(key, value, &format!("it must be a whole number from 1 to {MAX_SIZE}")),
        }
    }

    pub(super) fn number(&self, key: &str, default: Option<f64>) -> Result<f64, ModelCardError> {
        let Some(value) = self.get(key) else {
            return default.ok_or_else(|| ModelCardError::new(self.file, format!("{key} is missing; it must be set")));
        };
        match value.as_f64() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(x),
            _ => self.refuse(key, value, "it must be a positive number"),
        }
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool, ModelCardError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => self.refuse(key, other, "it must be true or false"),
        }
    }
}

impl ModelDescription {
    /// What of the computation has no kernel on a GPU yet, by the keys of config.json.
    pub fn beyond_gpu(&self) -> Option<&'static str> {
        let scales = [self.embedding_multiplier, self.residual_multiplier, self.logits_divisor];
        let has_scales = scales.iter().any(|scale| *scale != 1.0);
        if has_scales {
            return Some("embedding_multiplier, residual_multiplier and logits_scaling");
        }
        let has_other_norms = self.norms != LayerNorms::BEFORE || self.qk_norm == QkNorm::Width;
        if has_other_norms {
            return Some("model_type: norms after the blocks, or over all heads");
        }
        self.query_growth.is_some().then_some("llama_4_scaling_beta")
    }

    /// Query heads a key-value head serves.
    pub fn group_size(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// The sizes that memory depends on.
    pub fn shape(&self) -> ModelShape {
        ModelShape {
            hidden_size: self.hidden_size as u64,
            intermediate_size: self.intermediate_size as u64,
            num_hidden_layers: self.num_hidden_layers as u64,
            num_attention_heads: self.num_attention_heads as u64,
            num_key_value_heads: self.num_key_value_heads as u64,
            head_dim: self.head_dim as u64,
            vocab_size: self.vocab_size as u64,
        }
    }

    /// Every tensor the decoder needs, with its shape.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, inter) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let mut list = vec![("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, hidden])];
        for layer in 0..self.num_hidden_layers {
            let mut add = |name: &str, shape: Vec<usize>| list.push((format!("model.layers.{layer}.{name}"), shape));
            let LayerNorms { before_attention, after_attention, before_mlp, after_mlp } = self.norms;
            for norm in [before_attention, after_attention, before_mlp, after_mlp].into_iter().flatten() {
                add(&format!("{norm}.weight"), vec![hidden]);
            }
            for (name, out, input, bias) in [
                ("self_attn.q_proj", q, hidden, self.qkv_bias),
                ("self_attn.k_proj", kv, hidden, self.qkv_bias),
                ("self_attn.v_proj", kv, hidden, self.qkv_bias),
                ("self_attn.o_proj", hidden, q, self.o_bias),
                ("mlp.gate_proj", inter, hidden, self.mlp_bias),
                ("mlp.up_proj", inter, hidden, self.mlp_bias),
                ("mlp.down_proj", hidden, inter, self.mlp_bias),
            ] {
                add(&format!("{name}.weight"), vec![out, input]);
                if bias {
                    add(&format!("{name}.bias"), vec![out]);
                }
            }
            let (q_norm, k_norm) = match self.qk_norm {
                QkNorm::None => continue,
                QkNorm::Head => (self.head_dim, self.head_dim),
                QkNorm::Width => (q, kv),
            };
            add("self_attn.q_norm.weight", vec![q_norm]);
            add("self_attn.k_norm.weight", vec![k_norm]);
        }
        list.push(("model.norm.weight".to_owned(), vec![hidden]));
        if !self.tie_word_embeddings {
            list.push(("lm_head.weight".to_owned(), vec![self.vocab_size, hidden]));
        }
        list
    }
}

pub(super) fn rope(keys: &Keys, default_theta: f64, max_position_embeddings: usize) -> Result<Rope, ModelCardError> {
    // transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling. One that is not used must make sense too.
    let flat_theta = keys.number("rope_theta", Some(default_theta))?;
    let (name, parameters) = match keys.get("rope_parameters") {
        Some(value) => ("rope_parameters", Some(value)),
        None => ("rope_scaling", keys.get("rope_scaling")),
    };
    let Some(parameters) = parameters else {
        return Ok(Rope { theta: flat_theta, kind: RopeKind::Default });
    };
    if !parameters.is_object() {
        return keys.refuse(name, parameters, "it must be an object");
    }
    if let Some((layer_type, nested)) =
        parameters.as_object().and_then(|o| o.iter().find(|(_, v)| v.is_object())).map(|(k, v)| (k.clone(), v))
    {
        return keys.refuse(&format!("{name}.{layer_type}"), nested, "rope by layer type is not supported");
    }
    let inner = Keys { file: keys.file, value: parameters };
    let theta = match inner.get("rope_theta") {
        Some(_) => inner.number("rope_theta", None)?,
        None => flat_theta,
    };
    if let Some(factor) = inner.get("partial_rotary_factor")
        && factor.as_f64() != Some(1.0)
    {
        return keys.refuse(&format!("{name}.partial_rotary_factor"), factor, "only 1 is supported");
    }
    let rope_type = inner.get("rope_type").or_else(|| inner.get("type"));
    // transformers 4 guessed a missing one from max_position_embeddings, in ways that differ between its versions.
    let required = |key: &str| {
        inner.number(key, None).map_err(|error| ModelCardError { detail: format!("{name}.{}", error.detail), ..error })
    };
    let original = || required("original_max_position_embeddings");
    let kind = match rope_type.map(|t| t.as_str()) {
        None | Some(Some("default")) => RopeKind::Default,
        Some(Some("linear")) => RopeKind::Linear { factor: required("factor")? },
        Some(Some("llama3")) => {
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if high <= low {
                return keys.refuse(
                    &format!("{name}.high_freq_factor"),
                    &high.into(),
                    "it must be above low_freq_factor",
                );
            }
            RopeKind::Llama3 {
                factor: required("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original()?,
            }
        }
        Some(Some("yarn")) => {
            let original = original()?;
            // An explicit null asks for the ratio of the two contexts, as in transformers 5.
            let factor = match parameters.get("factor") {
                Some(Value::Null) => max_position_embeddings as f64 / original,
                Some(_) | None => required("factor")?,
            };
            yarn(&inner, factor, original)?
        }
        Some(_) => {
            let value = rope_type.unwrap_or(&Value::Null);
            return keys.refuse(&format!("{name}.rope_type"), value, "supported are default, linear, yarn and llama3");
        }
    };
    Ok(Rope { theta, kind })
}

fn yarn(keys: &Keys, factor: f64, original: f64) -> Result<RopeKind, ModelCardError> {
    let scale = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let attention_factor = match (keys.get("attention_factor"), keys.get("mscale"), keys.get("mscale_all_dim")) {
        (Some(_), _, _) => keys.number("attention_factor", None)?,
        (None, Some(a), Some(b)) if a.as_f64() != Some(0.0) && b.as_f64() != Some(0.0) => {
            scale(keys.number("mscale", None)?) / scale(keys.number("mscale_all_dim", None)?)
        }
        _ => scale(1.0),
    };
    Ok(RopeKind::Yarn {
        factor,
        original_max_position_embeddings: original,
        beta_fast: keys.number("beta_fast", Some(32.0))?,
        beta_slow: keys.number("beta_slow", Some(1.0))?,
        attention_factor,
        truncate: keys.flag("truncate", true)?,
    })
}

/// The window of each layer: `layer_types` says which layers have one, or else `slides`.
///
/// # Errors
/// When `layer_types` cannot be understood, or names windows where there is none.
pub(super) fn windows(
    keys: &Keys,
    num_layers: usize,
    window: Option<usize>,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>, ModelCardError> {
    let advice = "it must name full_attention or sliding_attention for each of num_hidden_layers layers";
    let of_name = |name: &Value| match name.as_str() {
        Some("full_attention") => Some(false),
        Some("sliding_attention") => Some(true),
        _ => None,
    };
    let sliding = match keys.get("layer_types") {
        None => (0..num_layers).map(slides).collect(),
        Some(value) => {
            let list: Option<Vec<bool>> = value.as_array().and_then(|names| names.iter().map(of_name).collect());
            let Some(list) = list.filter(|list| list.len() == num_layers) else {
                return keys.refuse("layer_types", value, advice);
            };
            if window.is_none() && list.contains(&true) {
                let detail = "layer_types names sliding_attention, but no sliding window is in use; \
                              set sliding_window (and use_sliding_window for Qwen), or name full_attention only";
                return Err(ModelCardError::new(keys.file, detail));
            }
            list
        }
    };
    Ok(sliding.into_iter().map(|slides| window.filter(|_| slides)).collect())
}
