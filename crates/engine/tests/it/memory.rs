//! Compares the memory estimate with the peak of a run: each case runs in a child process, whose peak memory (VmHWM) is
//! compared with the arithmetic of `spec::footprint`.
//!
//! The table of `benches/results/memory.md` is printed by
//! `cargo test --release --test it -- --ignored --exact memory::three_sizes_of_models --nocapture`.

use std::num::NonZeroU32;

use std::path::{Path, PathBuf};
use std::process::Command;

use rlood_engine::host::{Host, RunEnd, SavedCheckpoint, Score, ScoreRequest, StopReason};
use rlood_engine::memory::peak_resident_bytes;
use rlood_engine::random::{Key, Stream};
use rlood_engine::tensors::{self, Data};
use rlood_model_files::ModelDescription;
use rlood_types::event::Event;
use rlood_types::rollout::RewardValue;
use rlood_types::spec::footprint::Footprint;
use rlood_types::spec::{OptimizerKind, Plan};
use serde_json::{Map, json};

use crate::train::{Start, model_dir, plan, train_model};

/// Maximum deviation from the measured peak, as a fraction, in both directions.
const TOLERANCE: f64 = 0.15;

#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub name: &'static str,
    pub hidden: usize,
    pub inter: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub vocab: usize,
}

const SMALL: Size = Size { name: "6M", hidden: 256, inter: 768, layers: 6, heads: 4, kv_heads: 2, vocab: 4096 };
const MEDIUM: Size = Size { name: "19M", hidden: 384, inter: 1024, layers: 8, heads: 6, kv_heads: 2, vocab: 16384 };
const LARGE: Size = Size { name: "88M", hidden: 768, inter: 2048, layers: 10, heads: 12, kv_heads: 4, vocab: 32768 };

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Lora,
    Full,
    Full8bit,
    /// An adapter on a Qwen3.5: 3 layers of Gated DeltaNet to one of attention.
    Hybrid,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Lora => "lora",
            Kind::Full => "full",
            Kind::Full8bit => "full8bit",
            Kind::Hybrid => "hybrid",
        }
    }

    pub fn parse(name: &str) -> Kind {
        [Kind::Lora, Kind::Full, Kind::Full8bit, Kind::Hybrid].into_iter().find(|kind| kind.name() == name).unwrap()
    }
}

/// Creates a model with random weights and the tokenizer of a small model.
pub fn make(size: Size, kind: Kind, dir: &Path) {
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        if model_dir().join(file).exists() {
            std::fs::copy(model_dir().join(file), dir.join(file)).unwrap();
        }
    }
    let config = match kind {
        Kind::Hybrid => hybrid_config(size),
        _ => config(size, &model_dir()),
    };
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let tensors = ModelDescription::from_json("config.json", &config).unwrap().tensors();
    let values: Vec<Vec<f32>> = tensors
        .iter()
        .enumerate()
        .map(|(index, (name, shape))| {
            let key = Key::new(1, Stream::Init).with(index as u64);
            let count: u64 = shape.iter().product::<usize>() as u64;
            match name.ends_with("norm.weight") {
                true => vec![1.0; count as usize],
                false => (0..count).map(|i| ((key.with(i).uniform() - 0.5) * 0.04) as f32).collect(),
            }
        })
        .collect();
    let tensors: Vec<tensors::Tensor<'_>> = tensors
        .iter()
        .zip(&values)
        .map(|((name, shape), values)| tensors::Tensor { name, shape, data: Data::F32(values) })
        .collect();
    tensors::write(&dir.join("model.safetensors"), &tensors).unwrap();
}

/// The config of this folder's model with this size.
fn config(size: Size, of: &Path) -> serde_json::Value {
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(of.join("config.json")).unwrap()).unwrap();
    let Size { hidden, inter, layers, heads, kv_heads, vocab, .. } = size;
    for (key, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", inter),
        ("num_hidden_layers", layers),
        ("num_attention_heads", heads),
        ("num_key_value_heads", kv_heads),
        ("vocab_size", vocab),
        ("max_position_embeddings", 1024),
        ("max_window_layers", layers),
    ] {
        config[key] = json!(value);
    }
    config["tie_word_embeddings"] = json!(true);
    let object = config.as_object_mut().unwrap();
    object.remove("layer_types");
    object.remove("head_dim");
    config
}

/// The config of a Qwen3.5 of this size, with heads of 64 in its layers of Gated DeltaNet.
fn hybrid_config(size: Size) -> serde_json::Value {
    let mut config = config(size, &rlood_test_support::fixture("parity/qwen3_5"));
    config["head_dim"] = json!(size.hidden / size.heads);
    let kind_of = |layer: usize| if layer % 4 == 3 { "full_attention" } else { "linear_attention" };
    config["layer_types"] = (0..size.layers).map(kind_of).collect();
    for name in ["linear_num_key_heads", "linear_num_value_heads"] {
        config[name] = json!(size.heads);
    }
    for name in ["linear_key_head_dim", "linear_value_head_dim"] {
        config[name] = json!(64);
    }
    for name in ["eos_token_id", "pad_token_id"] {
        config[name] = self::config(size, &model_dir())[name].clone();
    }
    config
}

const PROMPT_TOKENS: u64 = 24;

pub fn plan_of(kind: Kind) -> Plan {
    let mut plan = plan();
    plan.rloo.num_generations = NonZeroU32::new(4).unwrap();
    plan.training.prompts_per_step = 4;
    plan.training.max_steps = 2;
    plan.sampling.max_completion_length = 72;
    let lora = plan.lora.as_mut().unwrap();
    lora.r = 16;
    lora.target_modules =
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"].map(String::from).to_vec();
    if kind == Kind::Hybrid {
        let linear = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"].map(String::from);
        lora.target_modules.extend(linear);
    }
    if matches!(kind, Kind::Full | Kind::Full8bit) {
        plan.lora = None;
        plan.optimizer.learning_rate = 1e-6;
    }
    if kind == Kind::Full8bit {
        plan.optimizer.kind = OptimizerKind::Adamw8bit;
    }
    plan
}

fn estimate(kind: Kind, dir: &Path) -> Footprint {
    let card = rlood_model_files::read(dir).unwrap();
    let plan = plan_of(kind);
    let micro_batch_tokens = u64::from(plan.training.micro_batch_tokens);
    Footprint::of(&plan, card.num_parameters, &card.shape(), Some(PROMPT_TOKENS), micro_batch_tokens)
}

/// A host that keeps nothing, like a worker.
#[derive(Default)]
struct Quiet {
    longest: u32,
}

impl Host for Quiet {
    fn score(&mut self, request: &ScoreRequest<'_>) -> Result<Vec<Score>, RunEnd> {
        self.longest = request.samples.iter().map(|sample| sample.num_tokens).fold(self.longest, u32::max);
        let score = |length: usize| Score { values: vec![RewardValue::Number((length % 7) as f64)] };
        Ok(request.samples.iter().map(|sample| score(sample.completion.len())).collect())
    }

    fn event(&mut self, _event: Event) -> Result<(), RunEnd> {
        Ok(())
    }

    fn saved(&mut self, _checkpoint: &SavedCheckpoint<'_>) -> Result<(), RunEnd> {
        Ok(())
    }

    fn stop(&self) -> Option<StopReason> {
        None
    }
}

const CHILD: &str = "RLOOD_TEST_MEMORY_CHILD";

/// Does something only in a process that [`measure`] started.
#[test]
fn child() {
    let Some(argument) = std::env::var_os(CHILD) else { return };
    let argument = argument.into_string().unwrap();
    let (kind, dir) = argument.split_once(':').unwrap();
    let prompt: Vec<String> = (0..PROMPT_TOKENS).map(|i| format!("w{}", i % 20)).collect();
    let row = |i: usize| rlood_engine::host::PromptRow {
        prompt: json!(prompt[i..].iter().chain(&prompt[..i]).cloned().collect::<Vec<_>>().join(" ")),
        columns: Map::new(),
    };
    let before = peak_resident_bytes().unwrap();
    let mut host = Quiet::default();
    let dir = PathBuf::from(dir);
    train_model(&dir, &plan_of(Kind::parse(kind)), (0..8).map(row).collect(), Start::default(), &mut host).unwrap();
    assert!(host.longest >= 60, "completions are long enough to compare: {}", host.longest);
    std::fs::write(dir.join("peak"), format!("{} {before}", peak_resident_bytes().unwrap())).unwrap();
}

/// Returns the peak of a run in a child process, and the memory before the run.
fn measure(kind: Kind, dir: &Path) -> (u64, u64) {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::child", "--test-threads=1"])
        .env(CHILD, format!("{}:{}", kind.name(), dir.display()))
        .output()
        .unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
    let text = std::fs::read_to_string(dir.join("peak")).unwrap();
    let (peak, before) = text.split_once(' ').unwrap();
    (peak.parse().unwrap(), before.parse().unwrap())
}

fn compare(size: Size, kind: Kind) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    make(size, kind, dir.path());
    let needs = estimate(kind, dir.path());
    let (peak, before) = measure(kind, dir.path());
    let ratio = needs.total as f64 / peak as f64;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "| {} | {} | {:.0} | {:.0} | {:+.1} % | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} |",
        size.name,
        kind.name(),
        mib(peak),
        mib(needs.total),
        (ratio - 1.0) * 100.0,
        mib(before),
        mib(needs.weights),
        mib(needs.reference),
        mib(needs.trained + needs.gradient),
        mib(needs.optimizer),
        mib(needs.kv_cache),
        mib(needs.logits),
        mib(needs.activations),
        mib(needs.allocator),
    );
    ratio
}

#[test]
fn the_estimate_is_near_the_measured_peak() {
    for (size, kind) in [(SMALL, Kind::Lora), (SMALL, Kind::Full), (MEDIUM, Kind::Full8bit), (MEDIUM, Kind::Hybrid)] {
        let ratio = compare(size, kind);
        assert!((ratio - 1.0).abs() < TOLERANCE, "{size:?} {kind:?}: estimate / measured = {ratio:.3}");
    }
}

#[test]
#[ignore = "minutes: prints the table of benches/results/memory.md"]
fn three_sizes_of_models() {
    println!(
        "| model | trained | measured MiB | estimate MiB | error | before the run | weights | reference | trained + gradient | optimizer | KV cache | logits | activations | allocator |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let mut worst = 0f64;
    for size in [SMALL, MEDIUM, LARGE] {
        for kind in [Kind::Lora, Kind::Full, Kind::Full8bit, Kind::Hybrid] {
            worst = worst.max((compare(size, kind) - 1.0).abs());
        }
    }
    println!("worst: {:.1} %", worst * 100.0);
    assert!(worst < TOLERANCE);
}
