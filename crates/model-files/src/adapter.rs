//! LoRA adapters in PEFT's format: lists the tensors of an adapter, and checks whether the adapter in a folder belongs to a model.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rlood_types::spec::{LoraPlan, PeftConfig, StoredModule};
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
        for path in paths.iter().copied().filter(|path| model.has_module(layer, path)) {
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
/// model has longer tensor names, which contain the path of the decoder in the model; [`TensorLocation::name`] keeps them.
///
/// # Errors
/// Fails if the file cannot be read, or contains a tensor twice under different names.
pub fn read_tensors(dir: &Path, file: &str) -> Result<BTreeMap<String, TensorLocation>, ModelCardError> {
    let header = read_header(dir, file)?;
    if let Some((name, dtype)) = header.unsupported.first_key_value() {
        let detail = format!("tensor {name} is stored as {dtype}; an adapter's are BF16, F16 or F32");
        return Err(ModelCardError::new(file, detail));
    }
    let mut tensors = BTreeMap::new();
    for (name, location) in header.tensors {
        if let Some(TensorLocation { name: other, .. }) = tensors.insert(plain_name(&name), location) {
            let detail = format!("tensors {other} and {name} are the same matrix under two names; keep one of them");
            return Err(ModelCardError::new(file, detail));
        }
    }
    Ok(tensors)
}

fn plain_name(name: &str) -> String {
    ["base_model.model.model.language_model.", "base_model.model.language_model.model."]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .map_or_else(|| name.to_owned(), |rest| format!("base_model.model.model.{rest}"))
}

/// Reads the adapter in a PEFT directory if it matches a model: its tensors belong to linear layers of the model and have their shapes,
/// and its config agrees.
///
/// # Errors
/// Fails if the adapter does not match the model; the error names the config key or tensor.
pub fn read_for(dir: &Path, model: &ModelDescription) -> Result<LoraPlan, ModelCardError> {
    let config = read_json(dir, CONFIG, 1 << 20)?;
    // An adapter of another kind has other tensors, so its kind is checked first.
    let config = PeftConfig::read(&config).map_err(refused)?;
    let found = read_tensors(dir, WEIGHTS)?;
    let stored = stored_modules(&found)?;
    let paths = model.module_paths();
    let has = |layer: usize, path: &str| model.has_module(layer, path);
    let plan = config.plan(&stored, &paths, model.num_hidden_layers, has).map_err(refused)?;
    check_complete(&config, &stored, &plan, model)?;
    for AdapterTensor { name, shape, .. } in tensors(&plan, model, &paths) {
        let found = found.get(&name).map(|location| location.shape.as_slice()).unwrap_or_default();
        if found != shape {
            let detail = format!(
                "tensor {name} has shape {found:?}; this model and {CONFIG} ask for {shape:?}: the adapter belongs to another model"
            );
            return Err(ModelCardError::new(WEIGHTS, detail));
        }
    }
    Ok(plan)
}

/// Converts an error about an adapter's config or tensors.
fn refused(detail: String) -> ModelCardError {
    match detail.strip_prefix("adapter_config.json: ") {
        Some(detail) => ModelCardError::new(CONFIG, detail),
        None => ModelCardError::new(WEIGHTS, detail),
    }
}

/// The LoRA matrices that an adapter's file has for one linear layer.
struct Found<'a> {
    /// The linear layer's name in the file.
    name: &'a str,
    /// The ranks of A and B.
    ranks: [Option<usize>; 2],
}

/// Lists the linear layers for which an adapter's file has LoRA matrices, by layer and path.
fn stored_modules(found: &BTreeMap<String, TensorLocation>) -> Result<Vec<StoredModule>, ModelCardError> {
    let failed = |detail: String| ModelCardError::new(WEIGHTS, detail);
    let mut modules: BTreeMap<(usize, &str), Found<'_>> = BTreeMap::new();
    for (name, location) in found {
        let factor = |ending: &'static str| {
            Some((name.strip_prefix("base_model.model.model.layers.")?.strip_suffix(ending)?, ending))
        };
        let (a, b) = (factor(".lora_A.weight"), factor(".lora_B.weight"));
        let Some((inside, ending)) = a.or(b) else {
            let detail = "is not a lora_A or lora_B of a decoder layer; only those are supported";
            return Err(failed(format!("tensor {} {detail}", location.name)));
        };
        let place = inside.split_once('.').and_then(|(layer, path)| Some((layer.parse::<usize>().ok()?, path)));
        let (Some(place), [rows, columns]) = (place.filter(|(layer, _)| *layer < 10_000), &location.shape[..]) else {
            return Err(failed(format!("tensor {} is not a matrix of a decoder layer", location.name)));
        };
        let original = location.name.strip_prefix("base_model.model.").and_then(|name| name.strip_suffix(ending));
        let module = modules.entry(place).or_insert(Found { name: original.unwrap_or(inside), ranks: [None; 2] });
        module.ranks[usize::from(b.is_some())] = Some(if b.is_some() { *columns } else { *rows });
    }
    let module = |((layer, path), Found { name, ranks }): ((usize, &str), Found<'_>)| match ranks {
        [Some(a), Some(b)] if a == b && (1..=1 << 16).contains(&a) => {
            Ok(StoredModule { layer, path: path.to_owned(), name: name.to_owned(), r: a as u32 })
        }
        _ => Err(failed(format!("{name} has A and B of ranks {ranks:?}; both are needed, and of the same rank"))),
    };
    modules.into_iter().map(module).collect()
}

/// Checks that the file has tensors for every linear layer of the model that the config selects.
fn check_complete(
    config: &PeftConfig<'_>,
    stored: &[StoredModule],
    plan: &LoraPlan,
    model: &ModelDescription,
) -> Result<(), ModelCardError> {
    let prefix = |module: &StoredModule| {
        let end = format!("layers.{}.{}", module.layer, module.path);
        module.name.strip_suffix(&end).map(str::to_owned)
    };
    let prefixes: BTreeSet<String> = stored.iter().filter_map(prefix).collect();
    for layer in 0..model.num_hidden_layers {
        for path in model.projections_of(layer).paths().filter(|path| plan.of(layer, path).is_none()) {
            let is_selected = |prefix: &String| config.selects(&format!("{prefix}layers.{layer}.{path}")) == Some(true);
            if prefixes.iter().any(is_selected) {
                let detail = format!("layers.{layer}.{path} has no tensors, and {CONFIG} selects it");
                return Err(ModelCardError::new(WEIGHTS, detail));
            }
        }
    }
    Ok(())
}

/// Reads an adapter from a PEFT directory without its base model: config and tensors must agree with each other.
///
/// # Errors
/// Fails if config and tensors do not agree; the error names the config key or tensor.
pub fn read(dir: &Path) -> Result<AdapterCard, ModelCardError> {
    let config = read_json(dir, CONFIG, 1 << 20)?;
    let peft = PeftConfig::read(&config).map_err(refused)?;
    let found = read_tensors(dir, WEIGHTS)?;
    let stored = stored_modules(&found)?;
    if stored.is_empty() {
        return Err(ModelCardError::new(WEIGHTS, "the file has no tensors of an adapter"));
    }
    for module in &stored {
        peft.rank_of(module).map_err(refused)?;
    }
    let num_layers = stored.iter().map(|module| module.layer + 1).max().unwrap_or(1);
    let base_model = config["base_model_name_or_path"].as_str().filter(|name| !name.is_empty()).map(str::to_owned);
    let num_parameters = found.values().map(|location| location.num_elements() as u64).sum();
    Ok(AdapterCard { config, base_model, num_layers, num_parameters })
}
