//! Dimensions of the measured models.

use serde_json::{Value, json};

use super::BenchError;
use crate::modelcard::ModelDescription;
use crate::spec::FourBitPlan;

/// The dimensions of a Qwen3 or Qwen3.5 decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width inside the MLP.
    pub inter: usize,
    /// Number of tokens in the vocabulary.
    pub vocab: usize,
    /// Maximum sequence length, in tokens.
    pub pos: usize,
    /// Whether the output head shares its weights with the embedding.
    pub tie: bool,
    /// Number of key and value heads of width 128 in Gated DeltaNet layers, which are three of four layers; 0 = a Qwen3 decoder.
    pub delta_heads: usize,
}

const TINY: Shape = Shape {
    hidden: 128,
    layers: 4,
    heads: 4,
    kv: 2,
    head_dim: 32,
    inter: 384,
    vocab: 512,
    pos: 1024,
    tie: true,
    delta_heads: 0,
};
const SMALL: Shape = Shape {
    hidden: 512,
    layers: 8,
    heads: 8,
    kv: 4,
    head_dim: 64,
    inter: 1536,
    vocab: 8192,
    pos: 2048,
    tie: true,
    delta_heads: 0,
};
const QWEN3_06B: Shape = Shape {
    hidden: 1024,
    layers: 28,
    heads: 16,
    kv: 8,
    head_dim: 128,
    inter: 3072,
    vocab: 151_936,
    pos: 40_960,
    tie: true,
    delta_heads: 0,
};
const QWEN3_4B: Shape = Shape { hidden: 2560, layers: 36, heads: 32, inter: 9728, ..QWEN3_06B };
const QWEN3_8B: Shape = Shape { hidden: 4096, inter: 12288, tie: false, ..QWEN3_4B };
/// The text of Qwen3.5-0.8B; head widths and vocabulary are the defaults of transformers' `Qwen3_5TextConfig`.
const QWEN3_5_08B: Shape = Shape {
    hidden: 1024,
    layers: 24,
    heads: 8,
    kv: 2,
    head_dim: 256,
    inter: 3584,
    vocab: 248_320,
    pos: 262_144,
    tie: true,
    delta_heads: 16,
};

impl Shape {
    /// Parses `small`, or `small,layers=2,vocab=4096`. The context is extended to `tokens` if it is shorter.
    ///
    /// # Errors
    /// Fails when the name or a key is unknown, or a dimension is invalid.
    pub fn parse(text: &str, tokens: usize) -> Result<Shape, BenchError> {
        let refused = |detail: String| BenchError::Shape(format!("--shape {text}: {detail}"));
        let mut parts = text.split(',').map(str::trim);
        let mut shape = match parts.next().unwrap_or_default() {
            "tiny" => TINY,
            "small" => SMALL,
            "qwen3-0.6b" | "0.6b" => QWEN3_06B,
            "qwen3-4b" | "4b" => QWEN3_4B,
            "qwen3-8b" | "8b" => QWEN3_8B,
            "qwen3.5-0.8b" => QWEN3_5_08B,
            other => {
                return Err(refused(format!(
                    "the model '{other}' must be one of tiny, small, qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3.5-0.8b"
                )));
            }
        };
        for part in parts {
            let (key, value) = part.split_once('=').ok_or_else(|| {
                refused(format!("the dimension '{part}' must have the form KEY=N, for example layers=2"))
            })?;
            if key == "tie" {
                shape.tie = value.parse().map_err(|_| refused("tie must be true or false".to_owned()))?;
                continue;
            }
            let number = value.parse().ok().filter(|number| (1..=1 << 24).contains(number));
            let number = number.ok_or_else(|| refused(format!("{key} must be a whole number from 1 to 2^24")))?;
            let slot = match key {
                "hidden" => &mut shape.hidden,
                "layers" => &mut shape.layers,
                "heads" => &mut shape.heads,
                "kv" => &mut shape.kv,
                "head_dim" => &mut shape.head_dim,
                "inter" => &mut shape.inter,
                "vocab" => &mut shape.vocab,
                "pos" => &mut shape.pos,
                _ => {
                    let known = "hidden, layers, heads, kv, head_dim, inter, vocab, pos, tie";
                    return Err(refused(format!("the dimension '{key}' must be one of {known}")));
                }
            };
            *slot = number;
        }
        if shape.vocab < 2 {
            return Err(refused("vocab must be at least 2: one token is the end of sequence".to_owned()));
        }
        shape.pos = shape.pos.max(tokens);
        shape.model_config()?;
        Ok(shape)
    }

    /// Returns config.json as transformers writes it.
    pub fn config_json(&self) -> Value {
        let (architecture, model_type) = match self.delta_heads {
            0 => ("Qwen3ForCausalLM", "qwen3"),
            _ => ("Qwen3_5ForCausalLM", "qwen3_5_text"),
        };
        let mut config = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "head_dim": self.head_dim,
            "intermediate_size": self.inter,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.pos,
            "tie_word_embeddings": self.tie,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "eos_token_id": self.eos(),
        });
        if self.delta_heads > 0 {
            config["full_attention_interval"] = 4.into();
            config["linear_num_key_heads"] = self.delta_heads.into();
            config["linear_num_value_heads"] = self.delta_heads.into();
        }
        config
    }

    /// Returns the model configuration that the loader derives from this config.json.
    ///
    /// # Errors
    /// Fails when the model loader would refuse the shape.
    pub fn model_config(&self) -> Result<ModelDescription, BenchError> {
        ModelDescription::from_json("config.json", &self.config_json())
            .map_err(|error| BenchError::Shape(format!("--shape: {error}")))
    }

    /// Returns the id of the end-of-sequence token, which is the last id of the vocabulary.
    pub fn eos(&self) -> usize {
        self.vocab - 1
    }
}

/// Numbers of weights by kind, from which FLOPs and bytes are computed.
#[derive(Debug, Clone, Copy)]
pub struct Weights {
    /// Weights of the linear layers.
    pub linear: u64,
    /// Weights of the output head.
    pub head: u64,
    /// Weights of a LoRA adapter on every linear layer.
    pub lora: u64,
}

impl Weights {
    /// Counts the weights of a model with a LoRA adapter of this rank.
    pub fn of(config: &ModelDescription, lora_r: u32) -> Weights {
        let sum =
            |of: fn(&LinearShape) -> usize| linear_shapes(config).iter().map(|one| of(one) * one.layers).sum::<usize>();
        Weights {
            linear: sum(|one| one.outputs * one.inputs) as u64,
            head: (config.vocab_size * config.hidden_size) as u64,
            lora: sum(|one| one.outputs + one.inputs) as u64 * u64::from(lora_r),
        }
    }

    /// Returns the minimum number of bytes that one decode step reads: every matrix with `value_bytes` per weight, and
    /// the adapter in f32. Linear layers in 4 bits have a scale per block of 64, in f32 or with double quantization in 8 bits.
    pub fn bytes_per_step(&self, value_bytes: u64, four_bit: Option<FourBitPlan>) -> u64 {
        let linear = match four_bit {
            None => self.linear * value_bytes,
            Some(FourBitPlan { is_nested, .. }) => self.linear / 2 + self.linear / 64 * if is_nested { 1 } else { 4 },
        };
        linear + self.head * value_bytes + self.lora * 4
    }

    /// Returns the FLOPs of the forward pass and dX over this many tokens, of which the output head processes `scored`. The
    /// base weights are frozen and have no gradient; recomputation is not counted.
    pub fn training_flops(&self, tokens: u64, scored: u64) -> f64 {
        // The gradient of the adapter's own weights needs a third matrix product, beside forward and dX.
        let body = 4 * self.linear + 6 * self.lora;
        body as f64 * tokens as f64 + (4 * self.head) as f64 * scored as f64
    }
}

/// A weight matrix that some layers have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearShape {
    /// Name of the matrix.
    pub name: &'static str,
    /// Number of outputs of the layer.
    pub outputs: usize,
    /// Number of inputs that are remembered.
    pub inputs: usize,
    /// Number of layers that have the matrix.
    pub layers: usize,
}

/// Lists the weight matrices of a model's layers.
pub fn linear_shapes(config: &ModelDescription) -> Vec<LinearShape> {
    let of_path = |path: &'static str| {
        let (outputs, inputs) = config.projection_shape(path);
        let layers = (0..config.num_hidden_layers).filter(|layer| config.has_module(*layer, path)).count();
        LinearShape { name: path.rsplit('.').next().unwrap_or(path), outputs, inputs, layers }
    };
    config.module_paths().into_iter().map(of_path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_presets_have_the_parameters_of_their_names() {
        let parameters = |name: &str| {
            let config = Shape::parse(name, 0).unwrap().model_config().unwrap();
            config.tensors().iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>()
        };
        assert_eq!(parameters("tiny"), 853_376);
        assert_eq!(parameters("small"), 29_369_856);
        assert_eq!(parameters("qwen3-0.6b"), 596_049_920);
        assert_eq!(parameters("qwen3-4b"), 4_022_468_096);
        assert_eq!(parameters("qwen3-8b"), 8_190_735_360);
        // Without vision tower and the layer that predicts further tokens.
        assert_eq!(parameters("qwen3.5-0.8b"), 752_393_024);
    }

    #[test]
    fn a_preset_can_be_changed_and_says_what_is_wrong() {
        let shape = Shape::parse("small,layers=2,tie=false", 4096).unwrap();
        assert_eq!(shape, Shape { layers: 2, tie: false, pos: 4096, ..SMALL });
        for (given, part) in
            [("huge", "must be one of"), ("tiny,depth=2", "must be one of"), ("tiny,layers=0", "whole number")]
        {
            let error = Shape::parse(given, 0).unwrap_err().to_string();
            assert!(error.contains(part), "{given}: {error}");
        }
        assert!(Shape::parse("tiny,heads=3", 0).unwrap_err().to_string().contains("num_key_value_heads"));
    }

    #[test]
    fn a_decode_step_reads_every_matrix_once() {
        let weights = Weights::of(&QWEN3_06B.model_config().unwrap(), 16);
        assert_eq!(weights.linear + weights.head, 595_984_384);
        assert_eq!(weights.lora, 10_092_544);
    }
}
