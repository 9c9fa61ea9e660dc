//! Complete checkpoints: written to a temporary directory, hashed, fsynced, manifest last, renamed.
//!
//! | file | what |
//! |---|---|
//! | `adapter_config.json`, `adapter_model.safetensors` | the adapter, as PEFT lays it out |
//! | `model.safetensors`, `config.json`, tokenizer, … | instead of it in full fine-tuning: a model directory for transformers |
//! | `optimizer.safetensors` | AdamW's moments, flat, in parameter order; in 8 bits codes and the scale of each block |
//! | `trainer_state.json` | steps, tokens, counters, the hash of what must not change |
//! | `rollout.json`, `rollout.safetensors` | only in the middle of a block: its completions and log-probs |
//! | `ahead.json`, `ahead.safetensors` | only with overlap: the next block, sampled and not scored, and its log-probs |
//! | `reference.safetensors` | only behind a warm-up: the weights that the KL penalty is measured against, flat |
//! | `manifest.json` | size and SHA-256 of each of them; written last |

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::advantage::shape::RewardStats;
use super::ahead::Ahead;
use super::block::{Block, Logps};
use super::error::{EngineError, Result};
use super::host::Rollout;
use super::lora;
use super::model::{Policy, full};
use super::optim::blockwise::{BLOCK, Map, Quantized};
use super::optim::{AdamW, Moments};
use super::start::REFERENCE;
use super::tensors::{self, Data};
use super::watch::Evaluations;
use crate::digest::Sha256Digest;
use crate::doctor::Doctor;
use crate::event::Metrics;
use crate::failpoint::fail_point;
use crate::protocol::FileEntry;
use crate::spec::{OptimizerKind, Plan, resume_identity};

/// The last file written: a checkpoint without it is not one.
pub const MANIFEST: &str = "manifest.json";
const STATE: &str = "trainer_state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const ROLLOUT: &str = "rollout.json";
const ROLLOUT_LOGPS: &str = "rollout.safetensors";
const AHEAD: &str = "ahead.json";
const AHEAD_LOGPS: &str = "ahead.safetensors";
const FORMAT: &str = "rlood-checkpoint/1";

/// Where a run stands after an optimizer step. Randomness has no state: it is counted, not drawn in sequence.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Optimizer steps done, skipped ones included.
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
    /// The instruction set of the processor's kernels that computed the run, as `--isa` names it; None on other devices, and
    /// of runs that are older than this field. Results of another one have other bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isa: Option<String>,
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
    /// The cursor behind the last block's prompts, counted in prompts over all epochs; None = it follows from the step.
    #[serde(default)]
    pub next_prompt: Option<u64>,
    /// Mean and spread of the rewards so far, the last block's included; empty unless rewards are normalised by them.
    #[serde(default)]
    pub reward_stats: RewardStats,
}

/// A run's state in memory, to write.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// The adapter, or all weights.
    pub policy: &'a Policy,
    /// Where its tokenizer and config lie.
    pub model_dir: &'a Path,
    /// `base_model_name_or_path`.
    pub model_name: &'a str,
    /// The moments.
    pub adam: &'a AdamW,
    /// Where the run stands.
    pub state: &'a TrainerState,
    /// The block in use, when the next step goes on with it.
    pub block: Option<&'a Block>,
    /// With overlap: the block behind it.
    pub ahead: Option<&'a Ahead>,
    /// Behind a warm-up: the file with the reference's weights.
    pub reference: Option<&'a Path>,
}

/// A checkpoint read back; weights are loaded by [`Policy::load_lora`] or [`Policy::load_full`] from the same directory.
#[derive(Debug, Clone, PartialEq)]
pub struct Restored {
    /// The moments.
    pub adam: AdamW,
    /// Where the run stands.
    pub state: TrainerState,
    /// The block in use, advantages not yet filled.
    pub block: Option<Block>,
    /// With overlap: the block behind it.
    pub ahead: Option<Ahead>,
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
    Sha256Digest::of(resume_identity(plan).to_string()).to_string()
}

/// Write a complete checkpoint below `scratch_dir` and return its directory and files, the manifest last. What lies there
/// under the same name is replaced.
pub fn write(scratch_dir: &Path, snapshot: &Snapshot<'_>) -> Result<(PathBuf, Vec<FileEntry>)> {
    let Snapshot { policy, model_dir, model_name, adam, state, block, ahead, reference } = *snapshot;
    let state_bytes = state_json(state)?;
    fs::create_dir_all(scratch_dir).map_err(io(scratch_dir))?;
    let temporary = tempfile::Builder::new().prefix(".checkpoint-").tempdir_in(scratch_dir).map_err(io(scratch_dir))?;
    let dir = temporary.path();
    match policy.trains_all() {
        true => {
            policy.save_full(dir)?;
            copy_model_files(model_dir, dir)?;
        }
        false => policy.save_lora(dir, model_name)?,
    }
    write_file(&dir.join(STATE), &state_bytes)?;
    write_moments(&dir.join(OPTIMIZER), &adam.moments)?;
    if let Some(block) = block {
        let rollout = json!({ "index": block.index, "rollout": block.rollout });
        write_file(&dir.join(ROLLOUT), &to_json(&rollout)?)?;
        write_logps(&dir.join(ROLLOUT_LOGPS), &block.values.old_logps, &block.values.ref_logps)?;
    }
    if let Some(ahead) = ahead {
        write_file(&dir.join(AHEAD), &to_json(ahead)?)?;
        write_logps(&dir.join(AHEAD_LOGPS), &ahead.old_logps, &ahead.ref_logps)?;
    }

    if let Some(reference) = reference {
        fs::copy(reference, dir.join(REFERENCE)).map_err(io(reference))?;
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
    fail_point!("checkpoint.manifest").map_err(io(dir))?;
    sync(dir)?;

    let target = scratch_dir.join(format!("checkpoint-{}", state.step));
    match fs::remove_dir_all(&target) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(&target)(error)),
        Ok(()) | Err(_) => {}
    }
    let dir = temporary.keep();
    fs::rename(&dir, &target).map_err(io(&target))?;
    fail_point!("checkpoint.renamed").map_err(io(&target))?;
    sync(scratch_dir)?;
    Ok((target, files))
}

/// Compare every file with the manifest: `Ok` only for a checkpoint that is complete and undamaged.
pub fn verify(dir: &Path) -> Result<()> {
    let manifest: Manifest = from_json(dir, MANIFEST)?;
    if manifest.format != FORMAT {
        return Err(EngineError::Checkpoint(format!("its format is {}, not {FORMAT}", manifest.format)));
    }
    let names = |name: &str| manifest.files.iter().any(|file| file.name == name);
    let weights: &[&str] = if names(full::WEIGHTS) { &["config.json"] } else { &[lora::CONFIG, lora::WEIGHTS] };
    for needed in [STATE, OPTIMIZER].iter().chain(weights) {
        if !names(needed) {
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
            "it was written with another model, dataset, lora, warm start, warm-up, optimizer, dtype, batch or seed; start a new job instead".into(),
        ));
    }
    let moments = read_moments(&dir.join(OPTIMIZER), plan.optimizer.kind)?;
    let adam = AdamW { decayed: moments.len(), moments, updates: state.updates };
    let uses = u64::from(plan.rloo.num_iterations) * u64::from(plan.rloo.steps_per_generation);
    let inside_block = !plan.rloo_step(state.step).unwrap_or(0).is_multiple_of(uses.max(1));
    let block = if inside_block { Some(read_block(dir, plan)?) } else { None };
    let ahead = if plan.rloo.overlap && dir.join(AHEAD).is_file() { Some(read_ahead(dir)?) } else { None };
    Ok(Restored { adam, state, block, ahead })
}

/// A copy of the reference that a checkpoint holds, for the checkpoints to come.
pub(super) fn keep_reference(dir: &Path, scratch_dir: &Path) -> Result<tempfile::TempPath> {
    fs::create_dir_all(scratch_dir).map_err(io(scratch_dir))?;
    let file = tempfile::Builder::new().prefix(".reference-").tempfile_in(scratch_dir).map_err(io(scratch_dir))?;
    let from = dir.join(REFERENCE);
    fs::copy(&from, file.path()).map_err(io(&from))?;
    Ok(file.into_temp_path())
}

fn read_ahead(dir: &Path) -> Result<Ahead> {
    let mut ahead: Ahead = from_json(dir, AHEAD)?;
    (ahead.old_logps, ahead.ref_logps) = read_logps(dir, AHEAD_LOGPS, &ahead.lengths())?;
    Ok(ahead)
}

fn read_block(dir: &Path, plan: &Plan) -> Result<Block> {
    #[derive(Deserialize)]
    struct Stored {
        index: u64,
        rollout: Rollout,
    }
    let Stored { index, rollout } = from_json(dir, ROLLOUT)?;
    let mut block = Block::new(index, rollout, plan)?;
    let lengths = block.rollout.lengths();
    (block.values.old_logps, block.values.ref_logps) = read_logps(dir, ROLLOUT_LOGPS, &lengths)?;
    Ok(block)
}

fn write_logps(path: &Path, old: &[Vec<f32>], reference: &[Vec<f32>]) -> Result<()> {
    let (old, reference) = (old.concat(), reference.concat());
    let logps = [flat("old_logps", &old), flat("ref_logps", &reference)];
    tensors::write(path, &logps.each_ref().map(Flat::tensor))
}

/// Old and reference log-probs, one entry a completion of these lengths; empty where there are none.
fn read_logps(dir: &Path, file: &str, lengths: &[usize]) -> Result<(Logps, Logps)> {
    let logps = tensors::Reader::open(&dir.join(file))?;
    let cut = |name: &str| -> Result<Logps> {
        let flat = logps.f32s(name)?.unwrap_or_default();
        let mut flat = flat.as_slice();
        if flat.is_empty() {
            return Ok(Vec::new());
        }
        if flat.len() != lengths.iter().sum::<usize>() {
            return Err(EngineError::Checkpoint(format!("{file} holds {} {name}", flat.len())));
        }
        let mut rows = Vec::with_capacity(lengths.len());
        for &length in lengths {
            let (row, rest) = flat.split_at(length);
            rows.push(row.to_vec());
            flat = rest;
        }
        Ok(rows)
    };
    Ok((cut("old_logps")?, cut("ref_logps")?))
}

fn entry(dir: &Path, name: &str) -> Result<FileEntry> {
    let path = dir.join(name);
    let mut file = File::open(&path).map_err(io(&path))?;
    fail_point!("checkpoint.file", name).map_err(io(&path))?;
    // Durable before the manifest says so.
    file.sync_all().map_err(io(&path))?;
    let (size_bytes, sha256) = Sha256Digest::of_reader(&mut file).map_err(io(&path))?;
    Ok(FileEntry { name: name.into(), size_bytes, sha256 })
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

/// The state as JSON that reads back. JSON has no number that is not finite, and null in its place does not read as one: a
/// run would find that out when it resumes, and all its later checkpoints would be lost.
fn state_json(state: &TrainerState) -> Result<Vec<u8>> {
    let bytes = to_json(state)?;
    let mut json = serde_json::Deserializer::from_slice(&bytes);
    match serde_path_to_error::deserialize::<_, TrainerState>(&mut json) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(EngineError::StateNotFinite { what: format!("{} of {STATE}", error.path()) }),
    }
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

/// A one-dimensional tensor to write.
struct Flat<'a> {
    name: &'a str,
    shape: [usize; 1],
    data: Data<'a>,
}

impl Flat<'_> {
    fn tensor(&self) -> tensors::Tensor<'_> {
        tensors::Tensor { name: self.name, shape: &self.shape, data: self.data }
    }
}

fn flat<'a>(name: &'a str, values: &'a [f32]) -> Flat<'a> {
    Flat { name, shape: [values.len()], data: Data::F32(values) }
}

const FIRST: &str = "exp_avg";
const SECOND: &str = "exp_avg_sq";
const FIRST_SCALES: &str = "exp_avg.absmax";
const SECOND_SCALES: &str = "exp_avg_sq.absmax";

fn write_moments(path: &Path, moments: &Moments) -> Result<()> {
    match moments {
        Moments::F32 { first, second } => {
            let all = [flat(FIRST, first), flat(SECOND, second)];
            tensors::write_finite(path, &all.each_ref().map(Flat::tensor))
        }
        Moments::Blockwise { first, second } => {
            let all = [
                Flat { name: FIRST, shape: [first.codes.len()], data: Data::U8(&first.codes) },
                flat(FIRST_SCALES, &first.absmax),
                Flat { name: SECOND, shape: [second.codes.len()], data: Data::U8(&second.codes) },
                flat(SECOND_SCALES, &second.absmax),
            ];
            tensors::write_finite(path, &all.each_ref().map(Flat::tensor))
        }
    }
}

fn read_moments(path: &Path, kind: OptimizerKind) -> Result<Moments> {
    let missing = |name: &str| EngineError::Checkpoint(format!("{OPTIMIZER} holds no {name} of the plan's optimizer"));
    let file = tensors::Reader::open(path)?;
    let floats = |name: &str| file.f32s(name)?.ok_or_else(|| missing(name));
    match kind {
        OptimizerKind::Adamw => Ok(Moments::F32 { first: floats(FIRST)?, second: floats(SECOND)? }),
        OptimizerKind::Adamw8bit => {
            let quantized = |map: Map, name: &str, scales: &str| -> Result<Quantized> {
                let codes = file.u8s(name)?.ok_or_else(|| missing(name))?;
                let absmax = floats(scales)?;
                if absmax.len() != codes.len().div_ceil(BLOCK) {
                    return Err(EngineError::Checkpoint(format!("{OPTIMIZER}: {scales} has {} blocks", absmax.len())));
                }
                Ok(Quantized { map, codes, absmax })
            };
            Ok(Moments::Blockwise {
                first: quantized(Map::Signed, FIRST, FIRST_SCALES)?,
                second: quantized(Map::Unsigned, SECOND, SECOND_SCALES)?,
            })
        }
    }
}

/// What transformers needs beside the weights. The config names the type they are stored in.
fn copy_model_files(from: &Path, to: &Path) -> Result<()> {
    const FILES: [&str; 9] = [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
    ];
    for name in FILES {
        let path = from.join(name);
        match fs::copy(&path, to.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(&path)(error)),
            Ok(_) | Err(_) => {}
        }
    }
    let mut config: serde_json::Value = from_json(from, "config.json")?;
    for key in ["dtype", "torch_dtype"] {
        if let Some(dtype) = config.get_mut(key) {
            *dtype = json!("float32");
        }
    }
    write_file(&to.join("config.json"), &to_json(&config)?)
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> EngineError {
    let path = path.to_path_buf();
    move |source| EngineError::Io { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::Best;

    #[test]
    fn state_that_is_not_finite_is_named_when_it_is_saved() {
        let good = TrainerState {
            // A metric that a step could not compute is stored as null and stays null.
            step_metrics: Metrics::from([("kl".to_owned(), None), ("loss".to_owned(), Some(f64::NAN))]),
            ..TrainerState::default()
        };
        let read: TrainerState = serde_json::from_slice(&state_json(&good).unwrap()).unwrap();
        assert_eq!(read.step_metrics["loss"], None);

        let stats = |mean, squares| RewardStats { count: 2, mean, squares };
        let best = |value| Evaluations { best: Some(Best { step: 1, value }), ..Evaluations::default() };
        for (state, field) in [
            (TrainerState { reward_stats: stats(0.0, f64::INFINITY), ..good.clone() }, "reward_stats.squares"),
            (TrainerState { reward_stats: stats(f64::NAN, 0.0), ..good.clone() }, "reward_stats.mean"),
            (TrainerState { epoch: f64::NEG_INFINITY, ..good.clone() }, "epoch"),
            (TrainerState { evaluations: best(f64::NAN), ..good.clone() }, "evaluations.best.value"),
        ] {
            let error = state_json(&state).unwrap_err();
            let expected = format!("{field} of trainer_state.json");
            assert!(matches!(&error, EngineError::StateNotFinite { what } if *what == expected), "{field}: {error}");
        }
    }
}
