//! Checkpoints of the trainer as rlood publishes them: a flat list of files with their hashes, and back into the trainer's folders.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::digest::Sha256Digest;
use crate::doctor::Doctor;
use crate::engine::checkpoint::{MANIFEST, plan_sha256};
use crate::engine::error::EngineError;
use crate::protocol::{FileEntry, check_file_name};
use crate::spec::Plan;

const FORMAT: &str = "rlood-trl-checkpoint/1";
/// Separates the name of a folder of DeepSpeed from that of a file in it.
const IN_FOLDER: &str = "--";
/// Files of the trainer that are not published: pickled arguments, which could run code, scripts, and a page that names
/// folders of the worker.
const DROPPED: [&str; 4] = ["training_args.bin", "zero_to_fp32.py", "zero_to_torch.py", "README.md"];
/// Files that name the directory of the base model, and the key of the name.
const NAMING_THE_BASE: [(&str, &str); 2] =
    [("adapter_config.json", "base_model_name_or_path"), ("config.json", "_name_or_path")];

/// The file that lists all others.
#[derive(Serialize, Deserialize)]
struct Manifest {
    format: String,
    step: u64,
    /// Number of ranks that wrote the checkpoint, which can only be resumed by as many.
    ranks: usize,
    plan_sha256: String,
    files: Vec<FileEntry>,
    /// The state of the alert rules after the step.
    #[serde(default)]
    doctor: Doctor,
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> EngineError {
    let path = path.to_owned();
    move |source| EngineError::Io { path, source }
}

fn unreadable(name: &str, error: &dyn std::fmt::Display) -> EngineError {
    EngineError::Checkpoint(format!("{name}: {error}"))
}

/// Prepares a checkpoint of the trainer for publication: flattens its folders, drops files, names the base model as `model_name`, and
/// writes the manifest. Returns all files, the manifest last.
pub(super) fn prepare(
    dir: &Path,
    plan: &Plan,
    (step, ranks, model_name): (u64, usize, &str),
    doctor: &Doctor,
) -> Result<Vec<FileEntry>, EngineError> {
    for name in DROPPED {
        match fs::remove_file(dir.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(dir)(error)),
            Ok(()) | Err(_) => {}
        }
    }
    flatten(dir)?;
    for (name, key) in NAMING_THE_BASE {
        let path = dir.join(name);
        if path.is_file() {
            rename_base(&path, key, model_name)?;
        }
    }
    let mut names = names_in(dir)?;
    names.retain(|name| name != MANIFEST);
    names.sort();
    if !names.iter().any(|name| name == "adapter_model.safetensors" || name.starts_with("model")) {
        return Err(EngineError::Checkpoint(format!("the trainer wrote no weights at step {step}")));
    }
    let mut files = names.iter().map(|name| entry(dir, name)).collect::<Result<Vec<_>, _>>()?;
    let manifest = Manifest {
        format: FORMAT.to_owned(),
        step,
        ranks,
        plan_sha256: plan_sha256(plan),
        files: files.clone(),
        doctor: doctor.clone(),
    };
    let bytes = serde_json::to_vec_pretty(&manifest).map_err(|error| unreadable(MANIFEST, &error))?;
    let path = dir.join(MANIFEST);
    let mut file = File::create(&path).map_err(io(&path))?;
    file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(io(&path))?;
    files.push(entry(dir, MANIFEST)?);
    Ok(files)
}

fn names_in(dir: &Path) -> Result<Vec<String>, EngineError> {
    let entries = fs::read_dir(dir).map_err(io(dir))?;
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    names.collect::<std::io::Result<_>>().map_err(io(dir))
}

/// Moves the files of folders into the checkpoint's folder, under names that say where they belong.
fn flatten(dir: &Path) -> Result<(), EngineError> {
    for name in names_in(dir)? {
        let folder = dir.join(&name);
        if !folder.is_dir() {
            continue;
        }
        for file in names_in(&folder)? {
            let from = folder.join(&file);
            if !from.is_file() {
                return Err(EngineError::Checkpoint(format!("the trainer wrote a folder in a folder: {name}/{file}")));
            }
            fs::rename(&from, dir.join(format!("{name}{IN_FOLDER}{file}"))).map_err(io(&from))?;
        }
        fs::remove_dir(&folder).map_err(io(&folder))?;
    }
    Ok(())
}

fn rename_base(path: &Path, key: &str, model_name: &str) -> Result<(), EngineError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let bytes = fs::read(path).map_err(io(path))?;
    let mut config: Value = serde_json::from_slice(&bytes).map_err(|error| unreadable(&name, &error))?;
    if config.get(key).is_some() {
        config[key] = json!(model_name);
        let bytes = serde_json::to_vec_pretty(&config).map_err(|error| unreadable(&name, &error))?;
        fs::write(path, bytes).map_err(io(path))?;
    }
    Ok(())
}

fn entry(dir: &Path, name: &str) -> Result<FileEntry, EngineError> {
    check_file_name(name).map_err(|error| EngineError::Checkpoint(error.to_string()))?;
    let path = dir.join(name);
    let mut file = File::open(&path).map_err(io(&path))?;
    file.sync_all().map_err(io(&path))?;
    let (size_bytes, sha256) = Sha256Digest::of_reader(&mut file).map_err(io(&path))?;
    Ok(FileEntry { name: name.to_owned(), size_bytes, sha256 })
}

/// Checks a downloaded checkpoint and gives it the trainer's folders. The claim has verified the hashes of its files. Returns its step
/// and the state of the alert rules after that.
///
/// # Errors
/// Fails for a checkpoint of another plan, runtime or number of ranks.
pub(super) fn restore(dir: &Path, plan: &Plan, ranks: usize) -> Result<(u64, Doctor), EngineError> {
    let path = dir.join(MANIFEST);
    let bytes = fs::read(&path).map_err(io(&path))?;
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|error| {
        EngineError::Checkpoint(format!("it was not written by the runtime trl ({error}); start a new job instead"))
    })?;
    let refused = |why: String| Err(EngineError::Checkpoint(format!("{why}; start a new job instead")));
    if manifest.format != FORMAT {
        return refused(format!("its format is {}, not {FORMAT}", manifest.format));
    }
    if manifest.plan_sha256 != plan_sha256(plan) {
        return refused("it was written by a run with other settings".to_owned());
    }
    if manifest.ranks != ranks {
        return refused(format!("it was written by {} ranks, and this run has {ranks}", manifest.ranks));
    }
    for name in names_in(dir)? {
        if let Some((folder, file)) = name.split_once(IN_FOLDER) {
            let folder = dir.join(folder);
            fs::create_dir_all(&folder).map_err(io(&folder))?;
            fs::rename(dir.join(&name), folder.join(file)).map_err(io(&folder))?;
        }
    }
    Ok((manifest.step, manifest.doctor))
}
