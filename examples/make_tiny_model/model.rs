//! Qwen3 by plain differentiable ops, weights and all, as HF transformers computes and names it.
//!
//! Written apart from the engine on purpose: a model trained here and read there checks both.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use serde_json::{Value, json};

use crate::text::Random;

/// The shape of the model.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    pub rope_theta: f64,
    pub rms_norm_eps: f64,
}

impl Shape {
    /// config.json as transformers 5 writes it for Qwen3ForCausalLM.
    pub fn config(&self, eos_token_id: u32, pad_token_id: u32) -> Value {
        json!({
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": null,
            "dtype": "bfloat16",
            "eos_token_id": eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": vec!["full_attention"; self.num_hidden_layers],
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "pad_token_id": pad_token_id,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "sliding_window": null,
            "tie_word_embeddings": true,
            "transformers_version": "5.23.0",
            "use_cache": true,
            "use_sliding_window": false,
            "vocab_size": self.vocab_size,
        })
    }
}

struct Layer {
    input_norm: Var,
    q_proj: Var,
    k_proj: Var,
    v_proj: Var,
    o_proj: Var,
    q_norm: Var,
    k_norm: Var,
    post_attention_norm: Var,
    gate_proj: Var,
    up_proj: Var,
    down_proj: Var,
}

/// The trainable model; embeddings are tied.
pub struct Model {
    shape: Shape,
    embed_tokens: Var,
    layers: Vec<Layer>,
    norm: Var,
    /// Every parameter under its HF name, in a fixed order.
    parameters: Vec<(String, Var)>,
}

/// Where a new model's tensors come from.
enum Source<'a> {
    Random(&'a mut Random),
    File(HashMap<String, Tensor>),
}

impl Source<'_> {
    /// A tensor from the file, or random with the given deviation (ones where there is none).
    fn var(&mut self, name: &str, dims: &[usize], deviation: Option<f32>) -> Result<Var> {
        match self {
            Self::File(tensors) => match tensors.get(name) {
                Some(tensor) if tensor.dims() == dims => Var::from_tensor(&tensor.to_dtype(DType::F32)?),
                Some(tensor) => candle_core::bail!("{name} has shape {:?}, not {dims:?}", tensor.dims()),
                None => candle_core::bail!("{name} is missing"),
            },
            Self::Random(random) => {
                let count: usize = dims.iter().product();
                let values: Vec<f32> =
                    (0..count).map(|_| deviation.map_or(1.0, |deviation| random.normal() * deviation)).collect();
                Var::from_vec(values, dims, &Device::Cpu)
            }
        }
    }
}

impl Model {
    /// Freshly drawn weights.
    pub fn random(shape: Shape, random: &mut Random) -> Result<Self> {
        Self::build(shape, Source::Random(random))
    }

    /// The weights of a safetensors file, widened to f32.
    pub fn load(shape: Shape, path: &Path) -> Result<Self> {
        Self::build(shape, Source::File(candle_core::safetensors::load(path, &Device::Cpu)?))
    }

    fn build(shape: Shape, mut source: Source) -> Result<Self> {
        let (hidden, inner) = (shape.hidden_size, shape.intermediate_size);
        let (queries, keys) = (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim);
        let fan_in = |size: usize| Some((size as f32).sqrt().recip());
        // What is added to the residual stream starts smaller, as in GPT-2.
        let residual = |size: usize| Some(((2 * shape.num_hidden_layers * size) as f32).sqrt().recip());
        let mut parameters = Vec::new();
        let mut var = |name: String, dims: &[usize], deviation| -> Result<Var> {
            let var = source.var(&name, dims, deviation)?;
            parameters.push((name, var.clone()));
            Ok(var)
        };
        let embed_tokens = var("model.embed_tokens.weight".to_string(), &[shape.vocab_size, hidden], fan_in(hidden))?;
        let mut layers = Vec::with_capacity(shape.num_hidden_layers);
        for index in 0..shape.num_hidden_layers {
            let name = |part: &str| format!("model.layers.{index}.{part}.weight");
            layers.push(Layer {
                input_norm: var(name("input_layernorm"), &[hidden], None)?,
                q_proj: var(name("self_attn.q_proj"), &[queries, hidden], fan_in(hidden))?,
                k_proj: var(name("self_attn.k_proj"), &[keys, hidden], fan_in(hidden))?,
                v_proj: var(name("self_attn.v_proj"), &[keys, hidden], fan_in(hidden))?,
                o_proj: var(name("self_attn.o_proj"), &[hidden, queries], residual(queries))?,
                q_norm: var(name("self_attn.q_norm"), &[shape.head_dim], None)?,
                k_norm: var(name("self_attn.k_norm"), &[shape.head_dim], None)?,
                post_attention_norm: var(name("post_attention_layernorm"), &[hidden], None)?,
                gate_proj: var(name("mlp.gate_proj"), &[inner, hidden], fan_in(hidden))?,
                up_proj: var(name("mlp.up_proj"), &[inner, hidden], fan_in(hidden))?,
                down_proj: var(name("mlp.down_proj"), &[hidden, inner], residual(inner))?,
            });
        }
        let norm = var("model.norm.weight".to_string(), &[hidden], None)?;
        Ok(Self { shape, embed_tokens, layers, norm, parameters })
    }

    /// Every parameter under its HF name, in a fixed order.
    pub fn parameters(&self) -> &[(String, Var)] {
        &self.parameters
    }

    /// Writes the weights as bf16 safetensors.
    pub fn save(&self, path: &Path) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let mut tensors = Vec::with_capacity(self.parameters.len());
        for (name, var) in &self.parameters {
            tensors.push((name.clone(), var.as_detached_tensor().to_dtype(DType::BF16)?));
        }
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        Ok(std::fs::write(path, safetensors::serialize(tensors, Some(metadata))?)?)
    }

    /// Logits (N, vocabulary) at the flat positions `at` (row * length + column) of right-padded `tokens` (B, T).
    pub fn logits(&self, tokens: &Tensor, at: &Tensor) -> Result<Tensor> {
        let Shape { hidden_size, rms_norm_eps: eps, .. } = self.shape;
        let (batch, length) = tokens.dims2()?;
        let rope = Rope::new(&self.shape, length)?;
        let mut x =
            self.embed_tokens.index_select(&tokens.flatten_all()?, 0)?.reshape((batch * length, hidden_size))?;
        for (index, layer) in self.layers.iter().enumerate() {
            let mut mixed = self.attention(layer, &rms_norm(&x, &layer.input_norm, eps)?, batch, &rope)?;
            if index + 1 == self.layers.len() {
                // Nobody reads the other positions from here on.
                mixed = mixed.index_select(at, 0)?;
                x = x.index_select(at, 0)?;
            }
            x = (x + linear(&mixed, &layer.o_proj)?)?;
            let input = rms_norm(&x, &layer.post_attention_norm, eps)?;
            let gate = linear(&input, &layer.gate_proj)?.silu()?;
            let inner = (gate * linear(&input, &layer.up_proj)?)?;
            x = (x + linear(&inner, &layer.down_proj)?)?;
        }
        linear(&rms_norm(&x, &self.norm, eps)?, &self.embed_tokens)
    }

    /// Causal self-attention with grouped key-value heads; `x` is (B * T, hidden), the result (B * T, heads * head_dim).
    fn attention(&self, layer: &Layer, x: &Tensor, batch: usize, rope: &Rope) -> Result<Tensor> {
        let Shape { num_attention_heads: heads, num_key_value_heads: kv_heads, head_dim, .. } = self.shape;
        let (length, group) = (rope.length, heads / kv_heads);
        let eps = self.shape.rms_norm_eps;
        let q = linear(x, &layer.q_proj)?.reshape((batch * length * heads, head_dim))?;
        let k = linear(x, &layer.k_proj)?.reshape((batch * length * kv_heads, head_dim))?;
        let v = linear(x, &layer.v_proj)?.reshape((batch, length, kv_heads, head_dim))?;
        let q = rope.apply(&rms_norm(&q, &layer.q_norm, eps)?, batch, heads)?;
        let k = rope.apply(&rms_norm(&k, &layer.k_norm, eps)?, batch, kv_heads)?;
        // The queries that share a key-value head stand under one another: one matmul a head.
        let q = q.reshape((batch, length, kv_heads, group, head_dim))?.permute((0, 2, 3, 1, 4))?.reshape((
            batch,
            kv_heads,
            group * length,
            head_dim,
        ))?;
        let k = k.reshape((batch, length, kv_heads, head_dim))?.permute((0, 2, 3, 1))?.contiguous()?;
        let v = v.transpose(1, 2)?.contiguous()?;
        let scores = (q.matmul(&k)? * (head_dim as f64).sqrt().recip())?;
        let scores = scores.broadcast_add(&rope.mask(group)?)?;
        let exp = scores.broadcast_sub(&scores.detach().max_keepdim(D::Minus1)?)?.exp()?;
        let weights = exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?;
        weights
            .matmul(&v)?
            .reshape((batch, kv_heads, group, length, head_dim))?
            .permute((0, 3, 1, 2, 4))?
            .reshape((batch * length, heads * head_dim))
    }
}

/// x (N, in) times a weight (out, in).
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.matmul(&weight.t()?)
}

/// Root-mean-square normalisation over the last dimension.
fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
    x.broadcast_mul(&scale)?.broadcast_mul(weight)
}

/// Rotary position embedding, the halves rotated against each other.
struct Rope {
    length: usize,
    head_dim: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// (head_dim, head_dim): times it, (x1, x2) becomes (-x2, x1).
    rotate_half: Tensor,
}

impl Rope {
    fn new(shape: &Shape, length: usize) -> Result<Self> {
        let (head_dim, half) = (shape.head_dim, shape.head_dim / 2);
        let angle = |position: usize, i: usize| {
            let frequency = shape.rope_theta.powf(-((i % half) as f64) / half as f64);
            position as f64 * frequency
        };
        let table = |f: fn(f64) -> f64| -> Vec<f32> {
            (0..length)
                .flat_map(|position| (0..head_dim).map(move |i| (position, i)))
                .map(|(position, i)| f(angle(position, i)) as f32)
                .collect()
        };
        let mut rotate = vec![0f32; head_dim * head_dim];
        for i in 0..half {
            rotate[(i + half) * head_dim + i] = -1.0;
            rotate[i * head_dim + i + half] = 1.0;
        }
        let rotate_half = Tensor::from_vec(rotate, (head_dim, head_dim), &Device::Cpu)?;
        Ok(Self { length, head_dim, cos: table(f64::cos), sin: table(f64::sin), rotate_half })
    }

    /// Rotates (B * T * heads, head_dim) by its positions; gives (B, T * heads * head_dim).
    fn apply(&self, x: &Tensor, batch: usize, heads: usize) -> Result<Tensor> {
        let width = self.length * heads * self.head_dim;
        let wide = |table: &[f32]| {
            let rows: Vec<f32> = table.chunks(self.head_dim).flat_map(|row| row.repeat(heads)).collect();
            Tensor::from_vec(rows, (1, width), &Device::Cpu)
        };
        let rotated = x.matmul(&self.rotate_half)?.reshape((batch, width))?;
        let kept = x.reshape((batch, width))?;
        kept.broadcast_mul(&wide(&self.cos)?)? + rotated.broadcast_mul(&wide(&self.sin)?)?
    }

    /// The causal mask (1, 1, group * T, T).
    fn mask(&self, group: usize) -> Result<Tensor> {
        let row = |t: usize| (0..self.length).map(move |s| if s <= t { 0f32 } else { -1e9 });
        let mask: Vec<f32> = (0..group).flat_map(|_| (0..self.length).flat_map(row)).collect();
        Tensor::from_vec(mask, (1, 1, group * self.length, self.length), &Device::Cpu)
    }
}
