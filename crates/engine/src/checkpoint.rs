//! Complete checkpoints: files are written to a temporary directory, hashed and fsynced, the manifest last; then
//! the directory is renamed.
//!
//! | file | content |
//! |---|---|
//! | `adapter_config.json`, `adapter_model.safetensors` | the adapter in PEFT's layout |
//! | `model.safetensors`, `config.json`, tokenizer, … | in full fine-tuning instead: a model directory for transformers |
//! | `optimizer.safetensors` | AdamW's moments, flat, in parameter order; in 8 bits: codes and the scale of each block |
//! | `trainer_state.json` | steps, tokens, counters, the hash of the settings that must not change |
//! | `rollout.json`, `rollout.safetensors` | only in the middle of a block: its completions and log-probs |
//! | `ahead.json`, `ahead.safetensors` | only with overlap: the next block, sampled and not scored, and its log-probs |
//! | `reference.safetensors` | only after a warm-up: the reference weights of the KL penalty, flat |
//! | `certificate.json` | log-probabilities of some prompts, by which a server of the weights can be checked |
//! | `manifest.json` | size and SHA-256 of each of these files; written last |

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
use rlood_types::certificate::{self, Certificate};

/// The last file written: a directory without it is not a checkpoint.
pub const MANIFEST: &str = "manifest.json";
const STATE: &str = "trainer_state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const ROLLOUT: &str = "rollout.json";
const ROLLOUT_LOGPS: &str = "rollout.safetensors";
const AHEAD: &str = "ahead.json";
const AHEAD_LOGPS: &str = "ahead.safetensors";
/// The files that hold the trained weights, which the certificate names.
const WEIGHTS: [&str; 3] = [lora::CONFIG, lora::WEIGHTS, full::WEIGHTS];
const FORMAT: &str = "rlood-checkpoint/1";

/// The state of a run after an optimizer step. Random numbers need no state: they are computed from counters
/// such as the step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Number of optimizer steps done, including skipped ones.
    pub step: u64,
    /// Number of passes over the dataset.
    pub epoch: f64,
    /// Number of prompt and completion tokens so far.
    pub num_tokens: u64,
    /// Number of AdamW updates; steps skipped because of a non-finite loss or gradient do not count.
    pub updates: u64,
    /// Total number of skipped AdamW updates.
    pub skipped_updates: u64,
    /// Number of consecutive skipped AdamW updates up to now.
    pub skipped_in_a_row: u32,
    /// The step after which the last evaluation ran.
    pub evaluated_step: Option<u64>,
    /// Instruction set of the CPU kernels that computed the run, as in `--isa`; null on other devices, and in
    /// checkpoints of versions before this field. Another instruction set gives results with other bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isa: Option<String>,
    /// Metrics of the last step, without durations.
    pub step_metrics: Metrics,
    /// Metrics of the last evaluation, without durations.
    pub eval_metrics: Metrics,
    /// State of the alert rules.
    #[serde(default)]
    pub doctor: Doctor,
    /// The best evaluation, and the number of evaluations since.
    #[serde(default)]
    pub evaluations: Evaluations,
    /// SHA-256 over the parts of the plan that a resumed run must share.
    pub plan_sha256: String,
    /// Position in the shuffled prompts after the last block, counted over all epochs; None means that it follows from
    /// the number of steps.
    #[serde(default)]
    pub next_prompt: Option<u64>,
    /// Mean and spread of all rewards up to the last block; empty unless running statistics normalize the rewards.
    #[serde(default)]
    pub reward_stats: RewardStats,
}

/// A run's state in memory, ready to be written to a checkpoint.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// The weights to save: the adapter, or all weights.
    pub policy: &'a Policy,
    /// The directory of the base model, with tokenizer and config.
    pub model_dir: &'a Path,
    /// The value of `base_model_name_or_path` in the adapter's config.
    pub model_name: &'a str,
    /// The moments of AdamW.
    pub adam: &'a AdamW,
    /// Counters and metrics of the run.
    pub state: &'a TrainerState,
    /// The current block, if the next step continues with it.
    pub block: Option<&'a Block>,
    /// The block sampled ahead, with overlap only.
    pub ahead: Option<&'a Ahead>,
    /// The file with the reference's weights, after a warm-up only.
    pub reference: Option<&'a Path>,
    /// The certificate of the weights, without their files; None if it could not be computed.
    pub certificate: Option<Certificate>,
}

/// A checkpoint that was read. [`Policy::load_lora`] or [`Policy::load_full`] loads the weights
/// from the same directory.
#[derive(Debug, Clone, PartialEq)]
pub struct Restored {
    /// The moments of AdamW.
    pub adam: AdamW,
    /// Counters and metrics of the run.
    pub state: TrainerState,
    /// The current block, without advantages, which are recomputed.
    pub block: Option<Block>,
    /// The block sampled ahead, with overlap only.
    pub ahead: Option<Ahead>,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    format: String,
    step: u64,
    files: Vec<FileEntry>,
}

/// Hash of the settings that a resumed run must share with the run that wrote the checkpoint: model, data, adapter,
/// batches, seed. Learning rate, steps, rewards and the rest may change.
pub fn plan_sha256(plan: &Plan) -> String {
    Sha256Digest::of(resume_identity(plan).to_string()).to_string()
}

/// Writes a complete checkpoint below `scratch_dir`. Returns its directory and files, the manifest last. Replaces an
/// existing checkpoint of the same name.
pub fn write(scratch_dir: &Path, snapshot: &Snapshot<'_>) -> Result<(PathBuf, Vec<FileEntry>)> {
    let Snapshot { policy, model_dir, model_name, adam, state, block, ahead, reference, ref certificate } = *snapshot;
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
    if let Some(certificate) = certificate {
        let weights = files.iter().filter(|file| WEIGHTS.contains(&file.name.as_str())).cloned().collect();
        let certificate = Certificate { files: weights, ..certificate.clone() };
        write_file(
            &dir.join(certificate::FILE),
            &serde_json::to_vec(&certificate).map_err(|error| EngineError::Checkpoint(error.to_string()))?,
        )?;
        files.push(entry(dir, certificate::FILE)?);
        files.sort_by(|one, other| one.name.cmp(&other.name));
    }
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

/// Compares every file with the manifest: `Ok` only if the checkpoint is complete and undamaged.
pub fn verify(dir: &Path) -> Result<()> {
    let manifest: Manifest = from_json(dir, MANIFEST)?;
    if manifest.format != FORMAT {
        return Err(EngineError::Checkpoint(format!(
            "the format of the checkpoint's manifest is {}, not {FORMAT}",
            manifest.format
        )));
    }
    let names = |name: &str| manifest.files.iter().any(|file| file.name == name);
    let weights: &[&str] = if names(full::WEIGHTS) { &["config.json"] } else { &[lora::CONFIG, lora::WEIGHTS] };
    for needed in [STATE, OPTIMIZER].iter().chain(weights) {
        if !names(needed) {
            return Err(EngineError::Checkpoint(format!("the checkpoint's manifest does not name {needed}")));
        }
    }
    for file in &manifest.files {
        if file.name.contains(['/', '\\']) || !dir.join(&file.name).is_file() {
            return Err(EngineError::Checkpoint(format!("{} is missing", file.name)));
        }
        if entry(dir, &file.name)? != *file {
            return Err(EngineError::Checkpoint(format!(
                "{} differs from its entry in the checkpoint's manifest",
                file.name
            )));
        }
    }
    Ok(())
}

/// Verifies and reads a checkpoint of this plan.
pub fn read(dir: &Path, plan: &Plan) -> Result<Restored> {
    verify(dir)?;
    let state: TrainerState = from_json(dir, STATE)?;
    if state.plan_sha256 != plan_sha256(plan) {
        return Err(EngineError::Checkpoint(
            "the checkpoint was written by a run with another model, dataset, lora, warm start, warm-up, optimizer, dtype, batch or seed; start a new job instead".into(),
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

/// Copies the reference weights from a checkpoint, so that later checkpoints can include them.
pub(super) fn copy_reference(dir: &Path, scratch_dir: &Path) -> Result<tempfile::TempPath> {
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

/// Reads old and reference log-probs, one entry per completion of these lengths; empty if the file has none.
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

/// Hashes the files of a checkpoint that hold its trained weights.
///
/// # Errors
/// Fails if a file cannot be read.
pub fn weights_of(dir: &Path) -> Result<Vec<FileEntry>> {
    let there = WEIGHTS.into_iter().filter(|name| dir.join(name).is_file());
    there.map(|name| entry(dir, name)).collect()
}

fn entry(dir: &Path, name: &str) -> Result<FileEntry> {
    let path = dir.join(name);
    let mut file = File::open(&path).map_err(io(&path))?;
    fail_point!("checkpoint.file", name).map_err(io(&path))?;
    // Write the file to disk before the manifest lists it.
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

/// Serializes the state as JSON and checks that it can be read back. JSON has no non-finite numbers, and null in their
/// place does not parse as a number: the run would fail when it resumes, and all its later checkpoints would be lost.
fn state_json(state: &TrainerState) -> Result<Vec<u8>> {
    let bytes = to_json(state)?;
    let mut json = serde_json::Deserializer::from_slice(&bytes);
    match serde_path_to_error::deserialize::<_, TrainerState>(&mut json) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(EngineError::StateNotFinite { what: format!("the field {} of {STATE}", error.path()) }),
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

/// A one-dimensional tensor for serialization.
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

/// Copies the files that transformers needs besides the weights. The config names the type that the
/// weights are stored in.
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
            // A metric that a step could not compute is stored as null and read back as null.
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
            let expected = format!("the field {field} of trainer_state.json");
            assert!(matches!(&error, EngineError::StateNotFinite { what } if *what == expected), "{field}: {error}");
        }
    }
}
