//! The files of a merged model besides the weights: index, config, tokenizer.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::layout::FilePlan;
use super::{INDEX, MergedDtype, io};
use crate::error::Result;
use crate::modelcard;

/// Names of the files that the merge writes itself instead of copying them.
const OWN: [&str; 2] = ["config.json", INDEX];
/// Extensions of the files that are copied from the base model.
const COPIED: [&str; 5] = [".json", ".txt", ".jinja", ".model", ".tiktoken"];

/// Writes `model.safetensors.index.json`, which names the file of each tensor.
pub(super) fn write_index(plans: &[FilePlan], dtype: MergedDtype, out: &Path) -> Result<()> {
    let mut map = Map::new();
    for plan in plans {
        map.extend(plan.tensors.iter().map(|tensor| (tensor.name.clone(), json!(plan.file))));
    }
    let total: u64 = plans.iter().map(|plan| plan.size_bytes(dtype)).sum();
    write_json(&out.join(INDEX), &json!({"metadata": {"total_size": total}, "weight_map": map}))
}

/// Writes the base model's config with the new dtype, and without the quantization that no longer applies.
pub(super) fn write_config(model_dir: &Path, dtype: MergedDtype, out: &Path) -> Result<()> {
    let mut config = modelcard::read_json(model_dir, "config.json", 1 << 24)?;
    let set = |config: &mut Map<String, Value>, always: bool| {
        config.shift_remove("quantization_config");
        config.shift_remove("_name_or_path");
        for key in ["dtype", "torch_dtype"] {
            if always || config.contains_key(key) {
                config.insert(key.to_owned(), json!(dtype.as_str()));
            }
        }
    };
    if let Some(config) = config.as_object_mut() {
        set(config, true);
        if let Some(text) = config.get_mut("text_config").and_then(Value::as_object_mut) {
            set(text, false);
        }
    }
    write_json(&out.join("config.json"), &config)
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut file = File::create(path).map_err(io(path))?;
    file.write_all(format!("{value:#}\n").as_bytes()).and_then(|()| file.sync_all()).map_err(io(path))
}

/// Copies all other files of the base model unchanged: tokenizer, chat template, generation config.
pub(super) fn copy_others(model_dir: &Path, out: &Path) -> Result<()> {
    for entry in std::fs::read_dir(model_dir).map_err(io(model_dir))? {
        let entry = entry.map_err(io(model_dir))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let is_copied = COPIED.iter().any(|ending| name.ends_with(ending)) && !OWN.contains(&name.as_str());
        let path = entry.path();
        if is_copied && std::fs::metadata(&path).map_err(io(&path))?.is_file() {
            std::fs::copy(&path, out.join(&name)).map_err(io(&path))?;
        }
    }
    Ok(())
}
