//! Flags of `rlood bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Device, Precision};

/// Flags of `rlood bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// What to measure on: cpu or cuda:N.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,

    /// Dimensions of the random model: tiny, small, qwen3-0.6b, qwen3-4b or qwen3-8b, with changes if wanted, as in
    /// `small,layers=2,vocab=4096` (hidden, layers, heads, kv, head_dim, inter, vocab, pos, tie).
    #[arg(long, default_value = "tiny", value_name = "NAME[,KEY=N…]")]
    pub shape: String,

    /// A model directory to measure, instead of random weights. Its completions may end early in whole steps.
    #[arg(long, value_name = "DIR", conflicts_with = "shape")]
    pub model: Option<PathBuf>,

    /// Prompts of a step, each a group of completions.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub prompts: u32,

    /// Completions of a prompt (G), sampled together; whole steps need two at least.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub generations: u32,

    /// Tokens of a prompt, the same for all.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prompt_len: u32,

    /// Tokens of a completion, exactly: no end of sequence is sampled.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    pub completion: u32,

    /// Precision of weights and of the inputs of matrix products.
    #[arg(long, default_value = "bf16", value_enum)]
    pub dtype: Precision,

    /// Measured steps, after one to warm up; the other parts repeat as often at least.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub steps: u32,

    /// Weight of the KL penalty; 0 = no reference pass.
    #[arg(long, default_value_t = 0.05, value_name = "BETA")]
    pub beta: f64,

    /// Rank of the adapter, which sits on every linear layer.
    #[arg(long, default_value_t = 16, value_name = "R", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub lora_r: u32,

    /// Compute activations again in the backward instead of keeping them, in training and step.
    #[arg(long)]
    pub gradient_checkpointing: bool,

    /// Tokens of a forward and backward, at most, but for one group. Default: as a job would have them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    pub micro_batch_tokens: Option<u32>,

    /// Lengths for the part requests: a JSON array of [prompt tokens, completion tokens], one pair a request; all of them
    /// are decoded together, each until it has its length.
    #[arg(long, value_name = "FILE")]
    pub requests: Option<PathBuf>,

    /// Compute threads. Default: the machine's cores.
    #[arg(long, env = "RLOOD_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,

    /// On a GPU, in decode and training: carry the work out once more and note how long each kernel takes.
    #[arg(long)]
    pub profile: bool,

    /// Measure this part only (and the machine's limits, which everything is compared with). Default: kernels (of the
    /// processor), decode, training and step.
    #[arg(long, value_enum)]
    pub only: Option<BenchPart>,

    /// Write the figures to this file as JSON, anew whenever more is known: whoever stops a measurement keeps what was
    /// measured until then.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Write the random model to this directory and keep it. Default: a temporary directory.
    #[arg(long, value_name = "DIR", conflicts_with = "model")]
    pub save_model: Option<PathBuf>,

    /// Set by the command for its own processes: measure one part, print its figures to standard output, a line whenever
    /// more is known.
    #[arg(long, hide = true, requires = "only")]
    pub child: bool,

    /// Set by the command for its own processes: of a GPU's limits, only what the other parts are compared with.
    #[arg(long, hide = true)]
    pub brief: bool,
}

/// What `rlood bench` measures, each in a process of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchPart {
    /// The machine: memory reads and multiply-adds.
    Limits,
    /// Matrix products and attention at the model's sizes.
    Kernels,
    /// Generation, by batch.
    Decode,
    /// Forward and backward, and log-probs without gradient.
    Training,
    /// Whole RLOO steps of the engine's own loop.
    Step,
    /// Generation of the lengths in --requests.
    Requests,
    /// How far the log-probs recorded in sampling are from those of the training forward.
    Mismatch,
    /// Generation beside one other busy process, against generation alone.
    Busy,
}

impl BenchPart {
    /// The word of the flag.
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
        }
    }
}
