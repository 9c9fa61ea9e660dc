//! Complete checkpoints: written to a temporary directory, hashed, fsynced, manifest last, renamed.
//!
//! | file | what |
//! |---|---|
//! | `adapter_config.json`, `adapter_model.safetensors` | the adapter, as PEFT lays it out |
//! | `optimizer.safetensors` | AdamW's moments, flat, in parameter order |
//! | `trainer_state.json` | steps, tokens, counters, the hash of what must not change |
//! | `rollout.json`, `rollout.safetensors` | only in the middle of a block: its completions and log-probs |
//! | `manifest.json` | size and SHA-256 of each of them; written last |

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::block::Block;
use super::error::{EngineError, Result};
use super::host::Rollout;
use super::model::Policy;
use super::optim::AdamW;
use super::watch::Evaluations;
use crate::doctor::Doctor;
use crate::event::Metrics;
use crate::protocol::FileEntry;
use crate::spec::Plan;

/// The last file written: a checkpoint without it is not one.
pub const MANIFEST: &str = "manifest.json";
const STATE: &str = "trainer_state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const ROLLOUT: &str = "rollout.json";
const ROLLOUT_LOGPS: &str = "rollout.safetensors";
const FORMAT: &str = "rlood-checkpoint/1";

/// Where a run stands after an optimizer step. Randomness has no state: it is counted, not drawn in sequence.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Optimizer steps done, skipped ones included; the cursor in the data follows from it.
    pub step: u64,
    /// Passes over the dataset.
    pub epoch: f64,
    /// Prompt and completion tokens so far.
    pub num_tokens: u64,
    /// Updates AdamW made; steps skipped for a loss or gradient that was not finite do not count.
    pub updates: u64,
    /// Skipped updates in all.
    pub skipped_updates: u64,
    /// Skipped updates since the last good one.
    pub skipped_in_a_row: u32,
    /// The step that the last evaluation followed.
    pub evaluated_step: Option<u64>,
    /// Metrics of the last step, times left out.
    pub step_metrics: Metrics,
    /// Metrics of the last evaluation, times left out.
    pub eval_metrics: Metrics,
    /// What the doctor remembers.
    #[serde(default)]
    pub doctor: Doctor,
    /// The best evaluation, and how long ago it was.
    #[serde(default)]
    pub evaluations: Evaluations,
    /// SHA-256 over the parts of the plan that a resumed run must share.
    pub plan_sha256: String,
}

/// A run's state in memory, to write.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// The adapter.
    pub policy: &'a Policy,
    /// `base_model_name_or_path`.
    pub model_name: &'a str,
    /// The moments.
    pub adam: &'a AdamW,
    /// Where the run stands.
    pub state: &'a TrainerState,
    /// The block in use, when the next step goes on with it.
    pub block: Option<&'a Block>,
}

/// A checkpoint read back; the adapter is loaded by [`Policy::load_lora`] from the same directory.
#[derive(Debug, Clone, PartialEq)]
pub struct Restored {
    /// The moments.
    pub adam: AdamW,
    /// Where the run stands.
    pub state: TrainerState,
    /// The block in use, advantages not yet filled.
    pub block: Option<Block>,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    format: String,
    step: u64,
    files: Vec<FileEntry>,
}

/// Hash over what a resumed run must share with the one that wrote the checkpoint: model, data, adapter, batches, seed.
/// Learning rate, steps, rewards and the rest may change.
pub fn plan_sha256(plan: &Plan) -> String {
    let rloo = &plan.rloo;
    let mut shared = json!({
        "model": plan.model.sha256,
        "dataset": plan.dataset.sha256,
        "lora": plan.lora,
        "num_generations": rloo.num_generations,
        "num_iterations": rloo.num_iterations,
        "steps_per_generation": rloo.steps_per_generation,
        "prompts_per_step": plan.training.prompts_per_step,
        "seed": plan.training.seed,
        "shuffle_dataset": plan.training.shuffle_dataset,
    });
    // Only where it is set: checkpoints of jobs without it stay what they are.
    if let Some(fraction) = plan.eval.as_ref().and_then(|eval| eval.fraction) {
        shared["eval_fraction"] = json!(fraction);
    }
    hex(&Sha256::digest(shared.to_string()))
}

/// Write a complete checkpoint below `scratch_dir` and return its directory and files, the manifest last. What lies there
/// under the same name is replaced.
pub fn write(scratch_dir: &Path, snapshot: &Snapshot<'_>) -> Result<(PathBuf, Vec<FileEntry>)> {
    let Snapshot { policy, model_name, adam, state, block } = *snapshot;
    fs::create_dir_all(scratch_dir).map_err(io(scratch_dir))?;
    let temporary = tempfile::Builder::new().prefix(".checkpoint-").tempdir_in(scratch_dir).map_err(io(scratch_dir))?;
    let dir = temporary.path();
    policy.save_lora(dir, model_name)?;
    write_file(&dir.join(STATE), &to_json(state)?)?;
    let moments = [("exp_avg", adam.first_moments.as_slice()), ("exp_avg_sq", adam.second_moments.as_slice())];
    write_file(&dir.join(OPTIMIZER), &to_safetensors(&moments)?)?;
    if let Some(block) = block {
        let rollout = json!({ "index": block.index, "rollout": block.rollout });
        write_file(&dir.join(ROLLOUT), &to_json(&rollout)?)?;
        let (old, reference) = (block.values.old_logps.concat(), block.values.ref_logps.concat());
        let logps = [("old_logps", old.as_slice()), ("ref_logps", reference.as_slice())];
        write_file(&dir.join(ROLLOUT_LOGPS), &to_safetensors(&logps)?)?;
    }

    let mut names: Vec<String> = fs::read_dir(dir)
        .map_err(io(dir))?
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect::<std::io::Result<_>>()
        .map_err(io(dir))?;
    names.sort();
    let mut files = names.iter().map(|name| entry(dir, name)).collect::<Result<Vec<_>>>()?;
    let manifest = Manifest { format: FORMAT.into(), step: state.step, files: files.clone() };
    write_file(&dir.join(MANIFEST), &to_json(&manifest)?)?;
    files.push(entry(dir, MANIFEST)?);
    sync(dir)?;

    let target = scratch_dir.join(format!("checkpoint-{}", state.step));
    match fs::remove_dir_all(&target) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(&target)(error)),
        Ok(()) | Err(_) => {}
    }
    let dir = temporary.keep();
    fs::rename(&dir, &target).map_err(io(&target))?;
    sync(scratch_dir)?;
    Ok((target, files))
}

/// Compare every file with the manifest: `Ok` only for a checkpoint that is complete and undamaged.
pub fn verify(dir: &Path) -> Result<()> {
    let manifest: Manifest = from_json(dir, MANIFEST)?;
    if manifest.format != FORMAT {
        return Err(EngineError::Checkpoint(format!("its format is {}, not {FORMAT}", manifest.format)));
    }
    for needed in [STATE, OPTIMIZER, "adapter_config.json", "adapter_model.safetensors"] {
        if !manifest.files.iter().any(|file| file.name == needed) {
            return Err(EngineError::Checkpoint(format!("its manifest does not name {needed}")));
        }
    }
    for file in &manifest.files {
        if file.name.contains(['/', '\\']) || !dir.join(&file.name).is_file() {
            return Err(EngineError::Checkpoint(format!("{} is missing", file.name)));
        }
        if entry(dir, &file.name)? != *file {
            return Err(EngineError::Checkpoint(format!("{} differs from its manifest", file.name)));
        }
    }
    Ok(())
}

/// Verify and read a checkpoint of this plan.
pub fn read(dir: &Path, plan: &Plan) -> Result<Restored> {
    verify(dir)?;
    let state: TrainerState = from_json(dir, STATE)?;
    if state.plan_sha256 != plan_sha256(plan) {
        return Err(EngineError::Checkpoint(
            "it was written with another model, dataset, lora, batch or seed; start a new job instead".into(),
        ));
    }
    let mut moments = from_safetensors(&dir.join(OPTIMIZER))?;
    let mut take = |name: &str| {
        moments.remove(name).ok_or_else(|| EngineError::Checkpoint(format!("{OPTIMIZER} holds no {name}")))
    };
    let adam = AdamW { first_moments: take("exp_avg")?, second_moments: take("exp_avg_sq")?, updates: state.updates };
    let uses = u64::from(plan.rloo.num_iterations) * u64::from(plan.rloo.steps_per_generation);
    let inside_block = !state.step.is_multiple_of(uses.max(1));
    let block = if inside_block { Some(read_block(dir, plan)?) } else { None };
    Ok(Restored { adam, state, block })
}

fn read_block(dir: &Path, plan: &Plan) -> Result<Block> {
    #[derive(Deserialize)]
    struct Stored {
        index: u64,
        rollout: Rollout,
    }
    let Stored { index, rollout } = from_json(dir, ROLLOUT)?;
    let mut block = Block::new(index, rollout, plan)?;
    let logps = from_safetensors(&dir.join(ROLLOUT_LOGPS))?;
    let lengths = block.rollout.lengths();
    let cut = |name: &str| -> Result<Vec<Vec<f32>>> {
        let mut flat = logps.get(name).map_or(&[][..], Vec::as_slice);
        if flat.is_empty() {
            return Ok(Vec::new());
        }
        if flat.len() != lengths.iter().sum::<usize>() {
            return Err(EngineError::Checkpoint(format!("{ROLLOUT_LOGPS} holds {} {name}", flat.len())));
        }
        let mut rows = Vec::with_capacity(lengths.len());
        for &length in &lengths {
            let (row, rest) = flat.split_at(length);
            rows.push(row.to_vec());
            flat = rest;
        }
        Ok(rows)
    };
    block.values.old_logps = cut("old_logps")?;
    block.values.ref_logps = cut("ref_logps")?;
    Ok(block)
}

fn entry(dir: &Path, name: &str) -> Result<FileEntry> {
    let path = dir.join(name);
    let mut file = File::open(&path).map_err(io(&path))?;
    // Durable before the manifest says so.
    file.sync_all().map_err(io(&path))?;
    let (mut hasher, mut size_bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 16]);
    loop {
        let read = file.read(&mut buffer).map_err(io(&path))?;
        if read == 0 {
            return Ok(FileEntry { name: name.into(), size_bytes, sha256: hex(&hasher.finalize()) });
        }
        hasher.update(&buffer[..read]);
        size_bytes += read as u64;
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sync(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io(dir))
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create(path).map_err(io(path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(io(path))
}

fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(value).map_err(|error| EngineError::Checkpoint(error.to_string()))
}

fn from_json<T: for<'de> Deserialize<'de>>(dir: &Path, name: &str) -> Result<T> {
    let path = dir.join(name);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(EngineError::Checkpoint(format!("{name} is missing")));
        }
        bytes => bytes.map_err(io(&path))?,
    };
    serde_json::from_slice(&bytes).map_err(|error| EngineError::Checkpoint(format!("{name}: {error}")))
}

/// One-dimensional f32 tensors.
fn to_safetensors(tensors: &[(&str, &[f32])]) -> Result<Vec<u8>> {
    let damaged = |error: safetensors::SafeTensorError| EngineError::Checkpoint(error.to_string());
    let bytes: Vec<(&str, Vec<u8>)> = tensors
        .iter()
        .map(|(name, values)| (*name, values.iter().flat_map(|value| value.to_le_bytes()).collect()))
        .collect();
    let views = bytes
        .iter()
        .map(|(name, bytes)| Ok((*name, TensorView::new(Dtype::F32, vec![bytes.len() / 4], bytes).map_err(damaged)?)))
        .collect::<Result<Vec<_>>>()?;
    safetensors::serialize(views, None).map_err(damaged)
}

fn from_safetensors(path: &Path) -> Result<HashMap<String, Vec<f32>>> {
    let bytes = fs::read(path).map_err(io(path))?;
    let damaged = |error: safetensors::SafeTensorError| EngineError::Checkpoint(error.to_string());
    let file = SafeTensors::deserialize(&bytes).map_err(damaged)?;
    let floats = |view: &TensorView<'_>| -> Vec<f32> {
        view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    Ok(file
        .iter()
        .filter(|(_, view)| view.dtype() == Dtype::F32)
        .map(|(name, view)| (name.into(), floats(&view)))
        .collect())
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> EngineError {
    let path = path.to_path_buf();
    move |source| EngineError::Io { path, source }
}
