//! Trains the bundled model from scratch and writes it with its data files.
//!
//! `cargo run --release --example make_tiny_model` writes `assets/tiny`, `assets/tiny-data` and `assets/SHA256SUMS`;
//! the same seed gives the same bytes on the same machine. `-- --report` only measures what is there.

mod model;
mod report;
mod text;
mod tokenizer;
mod train;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokenizers::Tokenizer;

use crate::model::{Model, Shape};
use crate::text::{Problem, Text};
use crate::tokenizer::{END, PAD};

/// Any error: an example may end with it.
type Failure = Box<dyn Error + Send + Sync>;

/// The text's seed is fixed, so that held-out problems stay held out whatever the model's seed.
const TEXT_SEED: u64 = 20;
const JOB_SEED: u64 = 21;

#[derive(Parser)]
#[command(about = "Trains the bundled tiny model and writes it with its data files")]
struct Args {
    /// Where `tiny/` and `tiny-data/` are written.
    #[arg(long, default_value = "assets")]
    out: PathBuf,
    /// Seed of the first weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Optimizer steps.
    #[arg(long, default_value_t = 1500)]
    steps: usize,
    /// Examples a step.
    #[arg(long, default_value_t = 128)]
    batch: usize,
    /// Highest learning rate.
    #[arg(long, default_value_t = 2e-3)]
    learning_rate: f64,
    /// Measures the model that lies in `--out` and trains nothing.
    #[arg(long)]
    report: bool,
}

fn main() -> Result<(), Failure> {
    let args = Args::parse();
    let model_dir = args.out.join("tiny");
    let mut text = Text::new(TEXT_SEED, 256);
    if args.report {
        let tokenizer = Tokenizer::from_file(model_dir.join("tokenizer.json"))?;
        return report::print(&tokenizer, shape(&tokenizer), &model_dir, &text);
    }
    fs::create_dir_all(&model_dir)?;
    fs::create_dir_all(args.out.join("tiny-data"))?;
    let job = text.job_rows(JOB_SEED, 1024);
    write_rows(&args.out.join("tiny-data/train.jsonl"), &job)?;
    write_rows(&args.out.join("tiny-data/heldout.jsonl"), text.held_out())?;

    let lines: Vec<String> = job.iter().map(Problem::question).collect();
    let tokenizer = tokenizer::train(&lines)?;
    tokenizer.save(model_dir.join("tokenizer.json"), true)?;
    let shape = shape(&tokenizer);
    let end = tokenizer.token_to_id(END).ok_or("no end token")?;
    let pad = tokenizer.token_to_id(PAD).ok_or("no pad token")?;
    write_json(&model_dir.join("tokenizer_config.json"), &tokenizer::tokenizer_config(shape.max_position_embeddings))?;
    write_json(&model_dir.join("config.json"), &shape.config(end, pad))?;
    write_json(
        &model_dir.join("generation_config.json"),
        &serde_json::json!({"eos_token_id": end, "pad_token_id": pad, "transformers_version": "5.23.0"}),
    )?;

    let settings =
        train::Settings { seed: args.seed, steps: args.steps, batch: args.batch, learning_rate: args.learning_rate };
    let model: Model = train::train(&tokenizer, shape, &mut text, &settings)?;
    model.save(&model_dir.join("model.safetensors"))?;
    write_sums(&args.out)?;
    report::print(&tokenizer, shape, &model_dir, &text)
}

/// About a million parameters.
fn shape(tokenizer: &Tokenizer) -> Shape {
    Shape {
        vocab_size: tokenizer.get_vocab_size(true),
        hidden_size: 160,
        intermediate_size: 480,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 32,
        max_position_embeddings: 128,
        rope_theta: 10_000.0,
        rms_norm_eps: 1e-6,
    }
}

fn write_rows(path: &Path, problems: &[Problem]) -> Result<(), Failure> {
    let rows: Vec<String> = problems.iter().map(|problem| problem.row().to_string() + "\n").collect();
    Ok(fs::write(path, rows.concat())?)
}

fn write_json(path: &Path, value: &Value) -> Result<(), Failure> {
    Ok(fs::write(path, serde_json::to_string_pretty(value)? + "\n")?)
}

/// SHA256SUMS of all bundled files, as `sha256sum -c` reads it. scripts/make_agent_model.py makes those of the agent.
fn write_sums(out: &Path) -> Result<(), Failure> {
    let mut lines = Vec::new();
    for dir in ["agent", "agent-data", "tiny", "tiny-data"].into_iter().filter(|dir| out.join(dir).is_dir()) {
        for entry in fs::read_dir(out.join(dir))? {
            let path = entry?.path();
            let digest: String = Sha256::digest(fs::read(&path)?).iter().map(|byte| format!("{byte:02x}")).collect();
            let name = path.strip_prefix(out)?.to_string_lossy().replace('\\', "/");
            lines.push((name, digest));
        }
    }
    lines.sort();
    let text: String = lines.iter().map(|(name, digest)| format!("{digest}  {name}\n")).collect();
    Ok(fs::write(out.join("SHA256SUMS"), text)?)
}
