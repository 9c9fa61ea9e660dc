//! Writes a model directory with random weights in one pass, to be loaded by the ordinary loader.
//!
//! The end-of-sequence token is never sampled, so that every completion has the maximum length. For this purpose channel 0 of the
//! residual stream is 1 from the embedding to the last norm (no layer reads or writes it). In the head every token has weight 1 for
//! this channel, and the end of sequence −1000. All other logits are shifted by the same amount, which changes no probability.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use half::bf16;
use serde_json::{Map, Value, json};

use super::BenchError;
use super::shape::Shape;
use crate::config::Precision;

/// Standard deviation of the random weights, the same as transformers' default.
const STD: f64 = 0.02;

/// The end-of-sequence token's weight in the output head for channel 0, which is always 1, so that the token is never sampled.
const NEVER: f32 = -1000.0;

/// Writes config.json, model.safetensors and tokenizer.json to an existing directory.
///
/// # Errors
/// Fails when a file cannot be written.
pub fn write(dir: &Path, shape: &Shape, dtype: Precision) -> Result<(), BenchError> {
    let written = |name: &'static str| {
        move |source: io::Error| BenchError::Io {
            doing: format!("write the file {name} of the model with random weights"),
            source,
        }
    };
    let save = |name: &str, value: &Value| std::fs::write(dir.join(name), value.to_string());
    save("config.json", &shape.config_json()).map_err(written("config.json"))?;
    save("tokenizer.json", &tokenizer(shape.vocab)).map_err(written("tokenizer.json"))?;
    weights(&dir.join("model.safetensors"), shape, dtype)?.map_err(written("model.safetensors"))
}

/// Returns a token's text in the random model's tokenizer.
pub fn word(token: usize) -> String {
    format!("w{token}")
}

/// Builds a tokenizer with one word per token, separated by spaces.
fn tokenizer(vocab: usize) -> Value {
    let words: Map<String, Value> = (0..vocab).map(|token| (word(token), json!(token))).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null,
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": word(0)},
    })
}

/// Writes the tensors row by row. The outer error means that the shape is invalid, the inner one that writing failed.
fn weights(path: &Path, shape: &Shape, dtype: Precision) -> Result<io::Result<()>, BenchError> {
    let config = shape.model_config()?;
    let (tensors, norm_offset) = (config.tensors(), config.norm_offset as f32);
    let size = match dtype {
        Precision::Bf16 => 2,
        Precision::F32 => 4,
    };
    let mut header = Map::new();
    let mut begin = 0;
    for (name, dims) in &tensors {
        let end = begin + dims.iter().product::<usize>() * size;
        let dtype = dtype.as_str().to_uppercase();
        header.insert(name.clone(), json!({"dtype": dtype, "shape": dims, "data_offsets": [begin, end]}));
        begin = end;
    }
    let mut header = Value::Object(header).to_string();
    // Pads the safetensors header, so that the data starts at a multiple of 8 bytes.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut random = Random::new();
    let mut write = || -> io::Result<()> {
        let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        let (mut values, mut bytes) = (Vec::new(), Vec::new());
        for (name, dims) in &tensors {
            let (rows, columns) =
                if let [rows, columns] = dims[..] { (rows, columns) } else { (1, dims.iter().product::<usize>()) };
            for row in 0..rows {
                values.clear();
                fill(&mut values, (name, norm_offset), (row, columns), shape.eos(), &mut random);
                bytes.clear();
                match dtype {
                    Precision::Bf16 => bytes.extend(values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes())),
                    Precision::F32 => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
                }
                file.write_all(&bytes)?;
            }
        }
        file.flush()
    };
    Ok(write())
}

/// Appends the random values of one row of a weight matrix, or of a whole vector.
fn fill(
    values: &mut Vec<f32>,
    (name, norm_offset): (&str, f32),
    (row, columns): (usize, usize),
    eos: usize,
    random: &mut Random,
) {
    let is_last = ["o_proj.weight", "out_proj.weight", "down_proj.weight"].iter().any(|last| name.ends_with(last));
    if name.ends_with("linear_attn.norm.weight") {
        values.resize(columns, 1.0);
    } else if name.ends_with("norm.weight") {
        values.resize(columns, 1.0 - norm_offset);
        if name.ends_with("layernorm.weight") {
            values[0] = -norm_offset;
        }
    } else if row == 0 && is_last {
        values.resize(columns, 0.0);
    } else {
        random.extend(values, columns);
        if name.ends_with("embed_tokens.weight") || name.ends_with("lm_head.weight") {
            values[0] = if row == eos { NEVER } else { 1.0 };
        }
    }
}

/// A deterministic generator of uniform values with mean 0 and standard deviation [`STD`]: a table indexed by 16 bits of
/// xorshift64* (Vigna 2016, "An experimental exploration of Marsaglia's xorshift generators, scrambled").
struct Random {
    state: u64,
    table: Vec<f32>,
}

impl Random {
    fn new() -> Random {
        let bound = STD * 3f64.sqrt();
        let table = (0..1 << 16).map(|i| ((f64::from(i) + 0.5) / 32768.0 - 1.0) * bound);
        Random { state: 0x9e37_79b9_7f4a_7c15, table: table.map(|value| value as f32).collect() }
    }

    fn extend(&mut self, values: &mut Vec<f32>, count: usize) {
        let end = values.len() + count;
        while values.len() < end {
            self.state ^= self.state >> 12;
            self.state ^= self.state << 25;
            self.state ^= self.state >> 27;
            let bits = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d);
            for shift in [0, 16, 32, 48].into_iter().take(end - values.len()) {
                values.push(self.table[(bits >> shift & 0xffff) as usize]);
            }
        }
    }
}
