//! Flags of `rlood bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Device, Precision};
use crate::spec::QuantType;

#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// Device to measure: cpu or cuda:N.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,

    /// Dimensions of the random model: tiny, small, qwen3-0.6b, qwen3-4b, qwen3-8b or qwen3.5-0.8b, optionally with changes, as in
    /// `small,layers=2,vocab=4096` (hidden, layers, heads, kv, head_dim, inter, vocab, pos, tie).
    #[arg(long, default_value = "tiny", value_name = "NAME[,KEY=N…]")]
    pub shape: String,

    /// A model directory to measure instead of random weights. In whole steps its completions may end early.
    #[arg(long, value_name = "DIR", conflicts_with = "shape")]
    pub model: Option<PathBuf>,

    /// Number of prompts per step, each with a group of completions.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub prompts: u32,

    /// Number of completions per prompt (G), sampled together; whole steps need at least two.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub generations: u32,

    /// Number of tokens per prompt, the same for all.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prompt_len: u32,

    /// Exact number of tokens per completion: the end-of-sequence token is never sampled.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    pub completion: u32,

    /// Precision of weights and of the inputs of matrix products.
    #[arg(long, default_value = "bf16", value_enum)]
    pub dtype: Precision,

    /// Quantize linear layers to 4 bits: nf4 or fp4, with `-nested` also their scales to 8 bits.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub load_in_4bit: Option<FourBit>,

    /// Number of measured steps, after one to warm up; other parts are repeated at least as often.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub steps: u32,

    /// Weight of the KL penalty; 0 = no reference pass.
    #[arg(long, default_value_t = 0.05, value_name = "BETA")]
    pub beta: f64,

    /// Rank of the LoRA adapter on every linear layer.
    #[arg(long, default_value_t = 16, value_name = "R", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub lora_r: u32,

    /// Recompute activations in the backward pass instead of storing them, in the parts training and step.
    #[arg(long)]
    pub gradient_checkpointing: bool,

    /// Maximum number of tokens per forward and backward pass; a single group may exceed it. Default: as in a job.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    pub micro_batch_tokens: Option<u32>,

    /// Lengths for the part requests: a JSON file with an array of [prompt tokens, completion tokens], one pair per request. All
    /// requests are decoded together, each until it has its length.
    #[arg(long, value_name = "FILE")]
    pub requests: Option<PathBuf>,

    /// Compute threads. Default: the machine's cores.
    #[arg(long, env = "RLOOD_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,

    /// Profile the parts decode and training on a GPU: run the work once more and record how long each kernel takes.
    #[arg(long)]
    pub profile: bool,

    /// Measure only this part (and the machine's limits, with which everything is compared). Default: kernels (CPU only),
    /// decode, training and step.
    #[arg(long, value_enum)]
    pub only: Option<BenchPart>,

    /// Write the figures to this file as JSON, and update it after each measurement, so that an interrupted run keeps its results.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Write the random model to this directory and keep it. Default: a temporary directory.
    #[arg(long, value_name = "DIR", conflicts_with = "model")]
    pub save_model: Option<PathBuf>,

    /// Set by the command for its own processes: measure one part and print its figures to standard output, one line per update.
    #[arg(long, hide = true, requires = "only")]
    pub child: bool,

    /// Set by the command for its own processes: measure only those GPU limits that the other parts are compared with.
    #[arg(long, hide = true)]
    pub brief: bool,
}

/// The formats of `--load-in-4bit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FourBit {
    /// NF4, with scales in f32.
    Nf4,
    /// NF4, with double quantization.
    Nf4Nested,
    /// FP4, with scales in f32.
    Fp4,
    /// FP4, with double quantization.
    Fp4Nested,
}

impl FourBit {
    /// Returns the value as written on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            FourBit::Nf4 => "nf4",
            FourBit::Nf4Nested => "nf4-nested",
            FourBit::Fp4 => "fp4",
            FourBit::Fp4Nested => "fp4-nested",
        }
    }

    /// Returns the 4-bit format, and whether scales are quantized too.
    pub fn quantization(self) -> (QuantType, bool) {
        match self {
            FourBit::Nf4 => (QuantType::Nf4, false),
            FourBit::Nf4Nested => (QuantType::Nf4, true),
            FourBit::Fp4 => (QuantType::Fp4, false),
            FourBit::Fp4Nested => (QuantType::Fp4, true),
        }
    }
}

/// The parts of `rlood bench`. Each runs in its own process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchPart {
    /// The machine: memory reads and multiply-adds.
    Limits,
    /// Matrix products and attention at the model's sizes.
    Kernels,
    /// Generation, by batch size.
    Decode,
    /// Forward and backward passes, and log-probs without gradient.
    Training,
    /// Whole RLOO steps of the engine's own loop.
    Step,
    /// Generation of the lengths in --requests.
    Requests,
    /// Differences between the log-probs recorded in sampling and those of the training forward pass.
    Mismatch,
    /// Generation next to another busy process, compared with generation alone.
    Busy,
    /// Generation over /v1 for 16 clients at once, compared with generation without HTTP.
    Serving,
}

impl BenchPart {
    /// Returns the value as written on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            BenchPart::Limits => "limits",
            BenchPart::Kernels => "kernels",
            BenchPart::Decode => "decode",
            BenchPart::Training => "training",
            BenchPart::Step => "step",
            BenchPart::Requests => "requests",
            BenchPart::Mismatch => "mismatch",
            BenchPart::Busy => "busy",
            BenchPart::Serving => "serving",
        }
    }
}
