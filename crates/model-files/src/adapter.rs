//! LoRA adapters in PEFT's format: lists the tensors of an adapter, and checks whether the adapter in a folder belongs to a model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rlood_types::spec::LoraPlan;
use serde_json::Value;

use super::weights::{TensorLocation, read_header};
use super::{ModelCardError, ModelDescription, read_json};

/// File name of an adapter's weights in a PEFT directory.
pub const WEIGHTS: &str = "adapter_model.safetensors";
/// File name of an adapter's config in a PEFT directory.
pub const CONFIG: &str = "adapter_config.json";

/// The LoRA matrix A or B of one linear layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterTensor {
    /// Index of the decoder layer, from 0.
    pub layer: usize,
    /// Path of the linear layer within the decoder layer, such as `self_attn.q_proj`.
    pub path: &'static str,
    /// Whether this is the LoRA matrix B; false for A.
    pub is_b: bool,
    /// The tensor's name in PEFT's format.
    pub name: String,
    /// The tensor's shape: `[r, in]` for A, `[out, r]` for B.
    pub shape: Vec<usize>,
}

/// Metadata of an adapter, read without its base model.
#[derive(Clone, Debug)]
pub struct AdapterCard {
    /// The content of adapter_config.json.
    pub config: Value,
    /// The base model that adapter_config.json names.
    pub base_model: Option<String>,
    /// Minimum number of decoder layers of the base model, from the names of the adapter's tensors.
    pub num_layers: usize,
    /// Total number of weights in the adapter.
    pub num_parameters: u64,
}

/// Lists the tensors that an adapter of a model has, layer by layer, in the order of `paths`.
pub fn tensors(plan: &LoraPlan, model: &ModelDescription, paths: &[&'static str]) -> Vec<AdapterTensor> {
    let mut tensors = Vec::new();
    for layer in 0..model.num_hidden_layers {
        for path in paths.iter().copied() {
            let Some(rank) = plan.of(layer, path) else { continue };
            let ((out, input), r) = (model.projection_shape(path), rank.r as usize);
            for (is_b, factor, shape) in [(false, "lora_A", vec![r, input]), (true, "lora_B", vec![out, r])] {
                let name = format!("base_model.model.model.layers.{layer}.{path}.{factor}.weight");
                tensors.push(AdapterTensor { layer, path, is_b, name, shape });
            }
        }
    }
    tensors
}

/// Reads the tensors of an adapter's file, each under the name that PEFT uses for a text-only model. An adapter of a multimodal
/// model has longer tensor names, which contain the path of the decoder in the model.
///
/// # Errors
/// Fails if the file cannot be read.
pub fn read_tensors(dir: &Path, file: &str) -> Result<BTreeMap<String, TensorLocation>, ModelCardError> {
    let header = read_header(dir, file)?;
    if let Some((name, dtype)) = header.unsupported.first_key_value() {
        let detail = format!("tensor {name} is stored as {dtype}; an adapter's are BF16, F16 or F32");
        return Err(ModelCardError::new(file, detail));
    }
    Ok(header.tensors.into_iter().map(|(name, location)| (plain_name(&name), location)).collect())
}

fn plain_name(name: &str) -> String {
    ["base_model.model.model.language_model.", "base_model.model.language_model.model."]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .map_or_else(|| name.to_owned(), |rest| format!("base_model.model.model.{rest}"))
}

/// Reads the adapter in a PEFT directory if it matches a model: its config selects layers that the model has, and its tensors
/// belong to these layers and have their shapes.
///
/// # Errors
/// Fails if the adapter does not match the model; the error names the config key or tensor.
pub fn read_for(dir: &Path, model: &ModelDescription) -> Result<LoraPlan, ModelCardError> {
    let paths: Vec<&'static str> = model.projections.paths().collect();
    let plan = plan_of(&read_json(dir, CONFIG, 1 << 20)?, &paths, model.num_hidden_layers)?;
    check(&read_tensors(dir, WEIGHTS)?, tensors(&plan, model, &paths), &model.module_names())?;
    Ok(plan)
}

/// Parses adapter_config.json, like [`LoraPlan::from_peft`].
///
/// # Errors
/// Fails for the same reasons as [`LoraPlan::from_peft`].
pub fn plan_of(config: &Value, paths: &[&str], num_layers: usize) -> Result<LoraPlan, ModelCardError> {
    LoraPlan::from_peft(config, paths, num_layers).map_err(|detail| {
        let detail = detail.strip_prefix("adapter_config.json: ").unwrap_or(&detail).to_owned();
        ModelCardError::new(CONFIG, detail)
    })
}

fn check(
    found: &BTreeMap<String, TensorLocation>,
    wanted: Vec<AdapterTensor>,
    modules: &[&str],
) -> Result<(), ModelCardError> {
    let mut others: BTreeSet<&String> = found.keys().collect();
    for AdapterTensor { name, shape, .. } in &wanted {
        let Some(location) = found.get(name) else {
            return Err(ModelCardError::new(WEIGHTS, format!("tensor {name} is missing, which {CONFIG} asks for")));
        };
        if location.shape != *shape {
            let detail = format!(
                "tensor {name} has shape {:?}; this model and {CONFIG} ask for {shape:?}: the adapter belongs to another model",
                location.shape
            );
            return Err(ModelCardError::new(WEIGHTS, detail));
        }
        others.remove(name);
    }
    match others.first() {
        None => Ok(()),
        Some(other) => {
            let detail = format!(
                "tensor {other} belongs to no linear layer that {CONFIG} selects in this model, which has {}",
                modules.join(", ")
            );
            Err(ModelCardError::new(WEIGHTS, detail))
        }
    }
}

/// Reads an adapter from a PEFT directory without its base model: config and tensors must agree with each other.
///
/// # Errors
/// Fails if config and tensors do not agree; the error names the config key or tensor.
pub fn read(dir: &Path) -> Result<AdapterCard, ModelCardError> {
    let config = read_json(dir, CONFIG, 1 << 20)?;
    let found = read_tensors(dir, WEIGHTS)?;
    // The ranks of the LoRA matrices A and B, by decoder layer and path of the linear layer.
    let mut ranks: BTreeMap<(usize, &str), [Option<usize>; 2]> = BTreeMap::new();
    for (name, location) in &found {
        let factor = |ending: &str| name.strip_prefix("base_model.model.model.layers.")?.strip_suffix(ending);
        let (inside, is_b) = match (factor(".lora_A.weight"), factor(".lora_B.weight")) {
            (Some(inside), _) => (inside, false),
            (None, Some(inside)) => (inside, true),
            (None, None) => {
                let detail =
                    format!("tensor {name} is not a lora_A or lora_B of a decoder layer; only those are supported");
                return Err(ModelCardError::new(WEIGHTS, detail));
            }
        };
        let place = inside.split_once('.').and_then(|(layer, path)| Some((layer.parse::<usize>().ok()?, path)));
        let (Some((layer, path)), [rows, columns]) = (place.filter(|(layer, _)| *layer < 10_000), &location.shape[..])
        else {
            return Err(ModelCardError::new(WEIGHTS, format!("tensor {name} is not a matrix of a decoder layer")));
        };
        let rank = if is_b { *columns } else { *rows };
        ranks.entry((layer, path)).or_default()[usize::from(is_b)] = Some(rank);
    }
    let paths: BTreeSet<&str> = ranks.keys().map(|(_, path)| *path).collect();
    let num_layers = ranks.keys().map(|(layer, _)| layer + 1).max().unwrap_or(0);
    let selected: Option<u64> =
        config["layers_to_transform"].as_array().and_then(|list| list.iter().map(Value::as_u64).max()?);
    let num_layers = num_layers.max(selected.map_or(0, |last| last.min(10_000) as usize + 1)).max(1);
    let plan = plan_of(&config, &paths.iter().copied().collect::<Vec<&str>>(), num_layers)?;
    for ((layer, path), found) in &ranks {
        let wanted = plan.of(*layer, path).map(|rank| rank.r as usize);
        if *found != [wanted; 2] || wanted.is_none() {
            let detail = format!(
                "layers.{layer}.{path} has A and B of ranks {found:?}, and {CONFIG} says {wanted:?}: the two do not belong together"
            );
            return Err(ModelCardError::new(WEIGHTS, detail));
        }
    }
    let base_model = config["base_model_name_or_path"].as_str().filter(|name| !name.is_empty()).map(str::to_owned);
    let num_parameters = found.values().map(|location| location.num_elements() as u64).sum();
    Ok(AdapterCard { config, base_model, num_layers, num_parameters })
}
