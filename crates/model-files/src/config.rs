//! Reads config.json into one description of a decoder, for all families and for the formats of transformers 4 and 5.
//!
//! A key that would change the result and is not supported is rejected here, with its value, and never later
//! during a forward pass.

mod rope;

use crate::spec::{DeltaShape, ModelShape};
use serde_json::Value;

use super::weights::TensorDtype;
use super::{ModelCardError, brief};

pub use rope::{Rope, RopeKind};
pub(super) use rope::{Sizes, rope, ropes_by_layer_type};

/// Everything in config.json that defines a decoder's computation; used by the engine, the memory estimate and the check
/// of what is supported.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelDescription {
    /// The model family: `model_type` in config.json.
    pub family: &'static str,
    /// Width of the residual stream (`hidden_size`).
    pub hidden_size: usize,
    /// Inner width of the MLP (`intermediate_size`).
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads.
    pub num_key_value_heads: usize,
    /// Width of an attention head; not always hidden_size / num_attention_heads.
    pub head_dim: usize,
    /// Number of rows of the token embedding.
    pub vocab_size: usize,
    /// The epsilon added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Whether the language-model head shares the embedding's weights.
    pub tie_word_embeddings: bool,
    /// The kind of RMSNorm on queries and keys, if any.
    pub qk_norm: QkNorm,
    /// Which norms a decoder layer has.
    pub norms: LayerNorms,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub o_bias: bool,
    /// Whether the gate, up and down projections of the MLP have a bias.
    pub mlp_bias: bool,
    /// The paths of the linear layers within a decoder layer.
    pub projections: Projections,
    /// Activation function of the MLP's gate.
    pub activation: Activation,
    /// Value added to the stored weights of RMSNorms: 1 if the checkpoint stores them minus 1, else 0.
    pub norm_offset: f64,
    /// Rotary position embedding of the layers.
    pub rope: Rope,
    /// Rotary position embedding of layers with sliding-window attention, if different.
    pub local_rope: Option<Rope>,
    /// Attention window of each layer: the number of positions that a token attends to, itself included; None
    /// means all earlier positions.
    pub windows: Vec<Option<usize>>,
    /// Whether each layer applies the rotary position embedding.
    pub rotates: Vec<bool>,
    /// The Gated DeltaNet layers, which have a state instead of keys and values, if the model has any.
    pub delta_net: Option<DeltaNet>,
    /// Whether attention has a gate: the query projection is twice as wide, and the second half of each head's
    /// outputs gates the head's attention output.
    pub has_output_gate: bool,
    /// Length of the longest sequence that the model supports, in tokens.
    pub max_position_embeddings: usize,
    /// Factor on the dot products of queries and keys in attention.
    pub attention_scale: f64,
    /// Soft cap c of attention scores, which become c·tanh(score / c); None means no cap.
    pub attention_softcap: Option<f64>,
    /// Scaling of queries that depends on their position, if the model has it.
    pub query_growth: Option<QueryGrowth>,
    /// Factor on the token embeddings.
    pub embedding_multiplier: f64,
    /// Factor on the outputs of attention and MLP before they are added to the residual stream.
    pub residual_multiplier: f64,
    /// Number by which the logits are divided.
    pub logits_divisor: f64,
    /// Soft cap c of logits, which become c·tanh(logit / c); None means no cap.
    pub logits_softcap: Option<f64>,
    /// Whether this is the text part of a multimodal checkpoint. Such a checkpoint has other tensor
    /// names, and more tensors.
    pub is_part: bool,
    /// Rows and columns of a block of weights that shares a scale, for matrices stored in 8 bits; None means one scale
    /// per matrix, if any.
    pub fp8_block: Option<[usize; 2]>,
    /// Number format to which 8-bit weights are rounded when they are expanded.
    pub fp8_dtype: TensorDtype,
}

/// The Gated DeltaNet layers of a model (arXiv 2412.06464).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaNet {
    /// Whether each decoder layer is a Gated DeltaNet layer; the others are attention layers.
    pub layers: Vec<bool>,
    /// Number of query heads and of key heads.
    pub num_key_heads: usize,
    /// Number of value heads, a multiple of the number of key heads.
    pub num_value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Number of tokens that the causal convolution over queries, keys and values reads.
    pub kernel: usize,
}

impl DeltaNet {
    /// Returns the width of all queries, keys and values of a token together: the number of the convolution's channels.
    pub fn conv_width(&self) -> usize {
        2 * self.num_key_heads * self.key_dim + self.value_width()
    }

    /// Returns the width of all values of a token together.
    pub fn value_width(&self) -> usize {
        self.num_value_heads * self.value_dim
    }

    /// Returns the size of a sequence's state in one layer, in numbers of 32 bits.
    pub fn state_size(&self) -> usize {
        self.num_value_heads * self.key_dim * self.value_dim + (self.kernel - 1) * self.conv_width()
    }
}

/// The activation function of an MLP's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// SiLU, `silu` in config.json.
    Silu,
    /// GELU with tanh, `gelu_pytorch_tanh` in config.json.
    GeluTanh,
}

/// The paths of the linear layers within a decoder layer. Linear layers with the same input may be stored as one (fused).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Projections {
    /// The projections to queries, keys and values.
    pub qkv: &'static [&'static str],
    /// The projection of attention's output.
    pub o: &'static str,
    /// The gate and up projections of the MLP.
    pub gate_up: &'static [&'static str],
    /// The down projection of the MLP.
    pub down: &'static str,
}

impl Projections {
    /// Each projection has its own matrix, as in Llama.
    pub const SEPARATE: Self = Self {
        qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        o: "self_attn.o_proj",
        gate_up: &["mlp.gate_proj", "mlp.up_proj"],
        down: "mlp.down_proj",
    };
    /// Query, key and value share one matrix, and so do gate and up, as in Phi-3.
    pub const FUSED: Self =
        Self { qkv: &["self_attn.qkv_proj"], gate_up: &["mlp.gate_up_proj"], ..Projections::SEPARATE };
    /// The MLP's projections have the names of a mixture-of-experts model's shared MLP, as in Granite 4.
    pub const SHARED_MLP: Self =
        Self { gate_up: &["shared_mlp.input_linear"], down: "shared_mlp.output_linear", ..Projections::SEPARATE };

    /// The linear layers of a Gated DeltaNet layer, as in Qwen3.5: those with the layer's input stand in the place of `qkv`.
    pub const DELTA_NET: Self = Self {
        qkv: &["linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"],
        o: "linear_attn.out_proj",
        ..Projections::SEPARATE
    };

    /// Iterates over the paths of all linear layers.
    pub fn paths(&self) -> impl Iterator<Item = &'static str> {
        self.qkv.iter().copied().chain([self.o]).chain(self.gate_up.iter().copied()).chain([self.down])
    }
}

/// Scales a query at position p, counted from 0, by 1 + beta · ln(1 + ⌊p / original⌋).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// The factor (beta) before the logarithm.
    pub beta: f64,
    /// The original context length; queries at earlier positions are not scaled.
    pub original_max_position_embeddings: f64,
}

impl QueryGrowth {
    /// Returns the factor for a query at a position.
    pub fn factor(self, position: usize) -> f32 {
        let contexts = (position as f64 / self.original_max_position_embeddings).floor();
        (1.0 + self.beta * contexts.ln_1p()) as f32
    }
}

/// The RMSNorm on queries and keys, before the rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Queries and keys have no norm.
    None,
    /// One norm over each head separately.
    Head,
    /// One norm over all heads of a token together.
    Width,
}

/// The norms of a decoder layer by their place: the names of their weights, without `.weight`; None if the layer has no norm there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerNorms {
    /// Norm of attention's input.
    pub before_attention: Option<&'static str>,
    /// Norm of attention's output, before it is added to the residual stream.
    pub after_attention: Option<&'static str>,
    /// Norm of the MLP's input.
    pub before_mlp: Option<&'static str>,
    /// Norm of the MLP's output, before it is added to the residual stream.
    pub after_mlp: Option<&'static str>,
}

impl LayerNorms {
    /// Norms before attention and before the MLP, as in Llama.
    pub const BEFORE: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    };
    /// Norms before and after both attention and MLP, as in Gemma 2 and 3.
    pub const AROUND: Self = Self {
        before_attention: Some("input_layernorm"),
        after_attention: Some("post_attention_layernorm"),
        before_mlp: Some("pre_feedforward_layernorm"),
        after_mlp: Some("post_feedforward_layernorm"),
    };
    /// Norms after attention and MLP, as in OLMo 2.
    pub const AFTER: Self = Self {
        before_attention: None,
        after_attention: Some("post_attention_layernorm"),
        before_mlp: None,
        after_mlp: Some("post_feedforward_layernorm"),
    };
}

/// Maximum dimension, number of rows, or context length that is accepted; more would indicate a damaged config.json.
const MAX_SIZE: u64 = 1 << 28;

/// Reads the keys of config.json. Errors name the file, the key and its value.
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
            _ => self.refuse(key, value, &format!("the value must be a whole number from 1 to {MAX_SIZE}")),
        }
    }

    pub(super) fn number(&self, key: &str, default: Option<f64>) -> Result<f64, ModelCardError> {
        let Some(value) = self.get(key) else {
            return default.ok_or_else(|| ModelCardError::new(self.file, format!("{key} is missing; it must be set")));
        };
        match value.as_f64() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(x),
            _ => self.refuse(key, value, "the value must be a positive number"),
        }
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool, ModelCardError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => self.refuse(key, other, "the value must be true or false"),
        }
    }
}

impl ModelDescription {
    /// Returns the part of this model's computation that has no GPU kernel yet, named by its keys in config.json; None if a GPU
    /// can run the model.
    pub fn beyond_gpu(&self) -> Option<&'static str> {
        if self.delta_net.is_some() {
            return Some("layer_types: linear_attention");
        }
        let scales = [self.embedding_multiplier, self.residual_multiplier, self.logits_divisor];
        let has_scales = scales.iter().any(|scale| *scale != 1.0);
        if has_scales {
            return Some("embedding_multiplier, residual_multiplier and logits_scaling");
        }
        let has_other_norms = self.norms != LayerNorms::BEFORE || self.qk_norm == QkNorm::Width;
        if has_other_norms {
            return Some("model_type: norms after the blocks, or over all heads");
        }
        if self.activation != Activation::Silu {
            return Some("hidden_activation");
        }
        if self.attention_softcap.is_some() || self.logits_softcap.is_some() {
            return Some("attn_logit_softcapping and final_logit_softcapping");
        }
        if self.local_rope.is_some() {
            return Some("rope_parameters by layer type");
        }
        if self.rope.rotary_dim != self.head_dim {
            return Some("partial_rotary_factor");
        }
        if self.rope.depends_on_length() {
            return Some("rope_type");
        }
        self.query_growth.is_some().then_some("llama_4_scaling_beta")
    }

    /// Returns the number of query heads per key-value head.
    pub fn group_size(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// Returns the sizes that determine the memory that training needs, without 4-bit weights, see
    /// [`ModelCard::shape`](super::ModelCard::shape).
    pub fn shape(&self) -> ModelShape {
        let windows = || self.windows.iter().flatten();
        ModelShape {
            hidden_size: self.hidden_size as u64,
            intermediate_size: self.intermediate_size as u64,
            num_hidden_layers: self.num_hidden_layers as u64,
            num_attention_heads: self.num_attention_heads as u64,
            num_key_value_heads: self.num_key_value_heads as u64,
            head_dim: self.head_dim as u64,
            vocab_size: self.vocab_size as u64,
            num_windowed_layers: windows().count() as u64,
            window: windows().max().map_or(0, |window| *window as u64),
            delta_net: self.delta_net.as_ref().map(|net| DeltaShape {
                num_layers: net.layers.iter().filter(|is_delta| **is_delta).count() as u64,
                num_value_heads: net.num_value_heads as u64,
                conv_width: net.conv_width() as u64,
                value_width: net.value_width() as u64,
                state_size: net.state_size() as u64,
            }),
            has_output_gate: self.has_output_gate,
            four_bit_weights: 0,
            nested_four_bit_weights: 0,
        }
    }

    /// Returns the number of outputs and inputs of a linear layer, by its path or its name in PEFT's `target_modules`.
    pub fn projection_shape(&self, path: &str) -> (usize, usize) {
        let (hidden, inter) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let delta = |width: fn(&DeltaNet) -> usize| self.delta_net.as_ref().map_or(0, width);
        match path.rsplit('.').next().unwrap_or(path) {
            "q_proj" if self.has_output_gate => (2 * q, hidden),
            "q_proj" => (q, hidden),
            "in_proj_qkv" => (delta(DeltaNet::conv_width), hidden),
            "in_proj_z" => (delta(DeltaNet::value_width), hidden),
            "in_proj_b" | "in_proj_a" => (delta(|net| net.num_value_heads), hidden),
            "out_proj" => (hidden, delta(DeltaNet::value_width)),
            "k_proj" | "v_proj" => (kv, hidden),
            "qkv_proj" => (q + 2 * kv, hidden),
            "o_proj" => (hidden, q),
            "gate_up_proj" | "input_linear" => (2 * inter, hidden),
            "down_proj" | "output_linear" => (hidden, inter),
            _ => (inter, hidden),
        }
    }

    /// Whether a decoder layer is a Gated DeltaNet layer.
    pub fn is_delta_net(&self, layer: usize) -> bool {
        self.delta_net.as_ref().is_some_and(|net| net.layers.get(layer) == Some(&true))
    }

    /// Returns the paths of the linear layers within a decoder layer.
    pub fn projections_of(&self, layer: usize) -> Projections {
        if self.is_delta_net(layer) { Projections::DELTA_NET } else { self.projections }
    }

    /// Lists the paths of all linear layers that occur in any decoder layer.
    pub fn module_paths(&self) -> Vec<&'static str> {
        let mut paths: Vec<&'static str> = Vec::new();
        let has_attention = (0..self.num_hidden_layers).any(|layer| !self.is_delta_net(layer));
        let has_delta_net = (0..self.num_hidden_layers).any(|layer| self.is_delta_net(layer));
        let kinds = [(has_attention, self.projections), (has_delta_net, Projections::DELTA_NET)];
        for path in kinds.iter().filter(|(occurs, _)| *occurs).flat_map(|(_, projections)| projections.paths()) {
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
        paths
    }

    /// Whether a decoder layer has a linear layer at this path.
    pub fn has_module(&self, layer: usize, path: &str) -> bool {
        self.projections_of(layer).paths().any(|other| other == path)
    }

    /// Returns the names of the linear layers in PEFT's `target_modules`.
    pub fn module_names(&self) -> Vec<&'static str> {
        self.module_paths().into_iter().map(|path| path.rsplit('.').next().unwrap_or(path)).collect()
    }

    /// Returns whether the linear layer at a path has a bias.
    pub fn has_bias(&self, path: &str) -> bool {
        if self.projections.qkv.contains(&path) {
            return self.qkv_bias;
        }
        if Projections::DELTA_NET.qkv.contains(&path) || path == Projections::DELTA_NET.o {
            return false;
        }
        if path == self.projections.o { self.o_bias } else { self.mlp_bias }
    }

    /// Lists every tensor that the decoder needs, with its shape.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let hidden = self.hidden_size;
        let (q, kv) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let mut list = vec![("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, hidden])];
        for layer in 0..self.num_hidden_layers {
            let mut add = |name: &str, shape: Vec<usize>| list.push((format!("model.layers.{layer}.{name}"), shape));
            let LayerNorms { before_attention, after_attention, before_mlp, after_mlp } = self.norms;
            for norm in [before_attention, after_attention, before_mlp, after_mlp].into_iter().flatten() {
                add(&format!("{norm}.weight"), vec![hidden]);
            }
            for path in self.projections_of(layer).paths() {
                let (out, input) = self.projection_shape(path);
                add(&format!("{path}.weight"), vec![out, input]);
                if self.has_bias(path) {
                    add(&format!("{path}.bias"), vec![out]);
                }
            }
            if let Some(net) = self.delta_net.as_ref().filter(|_| self.is_delta_net(layer)) {
                add("linear_attn.conv1d.weight", vec![net.conv_width(), 1, net.kernel]);
                add("linear_attn.dt_bias", vec![net.num_value_heads]);
                add("linear_attn.A_log", vec![net.num_value_heads]);
                add("linear_attn.norm.weight", vec![net.value_dim]);
                continue;
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

/// Returns the attention window of each layer. `layer_types` says which layers have one; if config.json lacks
/// this key, `slides` decides.
///
/// # Errors
/// Fails if `layer_types` cannot be parsed, or if it names layers with windows but `sliding_window` is not set.
pub(super) fn windows(
    keys: &Keys,
    num_layers: usize,
    window: Option<usize>,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>, ModelCardError> {
    let advice = "the value must name full_attention or sliding_attention for each of num_hidden_layers layers";
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
