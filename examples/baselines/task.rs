//! The bundled model and data, and the reward: 1 for the right answer, 0 for any other.

use std::fs;
use std::path::{Path, PathBuf};

use rlood::engine::host::PromptRow;
use rlood::rollout::RewardSample;
use rlood::spec::{Context, DatasetFacts, JobSpec, ModelFacts, Plan, resolve};
use serde_json::{Value, json};

use crate::Failure;

pub fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny")
}

/// `train` or `heldout`.
pub fn rows(name: &str) -> Result<Vec<PromptRow>, Failure> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("assets/tiny-data/{name}.jsonl"));
    let text = fs::read_to_string(path)?;
    let row = |line: &str| -> Result<PromptRow, Failure> {
        let mut record: serde_json::Map<String, Value> = serde_json::from_str(line)?;
        let prompt = record.shift_remove("prompt").ok_or("a row has no prompt")?;
        Ok(PromptRow { prompt, columns: record })
    };
    text.lines().map(row).collect()
}

pub fn reward(sample: &RewardSample) -> f64 {
    let right = sample.columns.get("answer").and_then(Value::as_str) == Some(sample.completion.trim());
    f64::from(u8::from(right))
}

/// A job of these settings, as the server would resolve it.
pub fn plan(rloo: &Value, steps: u64, seed: u64) -> Result<Plan, Failure> {
    let (train, held_out) = (rows("train")?, rows("heldout")?);
    let facts = |rows: &[PromptRow]| {
        let records: Vec<Value> = rows.iter().map(|row| json!({"prompt": row.prompt, "answer": ""})).collect();
        DatasetFacts::of_records(&records)
    };
    let (train, held_out) = (facts(&train), facts(&held_out));
    let (spec, errors) = JobSpec::read(json!({
        "model": "rlood/tiny",
        "dataset": {"id": train.id},
        "eval": {"dataset": {"id": held_out.id}, "every_steps": steps, "before_start": true, "num_generations": 1, "temperature": 0},
        "rewards": [{"type": "exact_match", "name": "correct", "column": "answer"}],
        "rloo": rloo,
        "sampling": {"max_completion_length": 8},
        "lora": {"r": 16, "alpha": 32},
        "optimizer": {"learning_rate": 1.5e-3},
        "training": {"prompts_per_step": 16, "max_steps": steps, "seed": seed},
        "checkpoints": {"every_steps": steps},
    }));
    let card = rlood::modelcard::read(&model_dir())?;
    let context = Context {
        model: Some(ModelFacts {
            id: "rlood/tiny".to_owned(),
            sha256: String::new(),
            max_position_embeddings: card.config.max_position_embeddings as u64,
            num_parameters: card.num_parameters,
            size_bytes: 0,
            has_chat_template: true,
            removes_reasoning: false,
            shape: None,
            modules: Vec::new(),
            beyond_gpu: None,
            foreign: None,
            reads_images: false,
        }),
        dataset: Some(train),
        eval_dataset: Some(held_out),
        ..Context::default()
    };
    let problems = |errors: Vec<rlood::spec::FieldError>| -> Failure {
        let lines: Vec<String> = errors.iter().map(|error| format!("{}: {}", error.pointer, error.detail)).collect();
        lines.join("; ").into()
    };
    if !errors.is_empty() {
        return Err(problems(errors));
    }
    Ok(resolve(&spec, &context).map_err(problems)?.plan)
}
