//! LoRA adapters as PEFT writes them: which tensors an adapter has, and whether a folder's belong to a model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rlood_types::spec::LoraPlan;
use serde_json::Value;

use super::weights::{TensorLocation, read_header};
use super::{ModelCardError, ModelDescription, read_json};

/// The adapter's weights in a PEFT directory.
pub const WEIGHTS: &str = "adapter_model.safetensors";
/// The adapter's config in a PEFT directory.
pub const CONFIG: &str = "adapter_config.json";

/// A or B of one linear layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterTensor {
    /// The decoder layer.
    pub layer: usize,
    /// The linear layer's path in it.
    pub path: &'static str,
    /// B, else A.
    pub is_b: bool,
    /// PEFT's name.
    pub name: String,
    /// `[r, in]` of A, `[out, r]` of B.
    pub shape: Vec<usize>,
}

/// What is known of an adapter without a model.
#[derive(Clone, Debug)]
pub struct AdapterCard {
    /// adapter_config.json.
    pub config: Value,
    /// The base model that it names.
    pub base_model: Option<String>,
    /// Its tensors say that it is on so many decoder layers at least.
    pub num_layers: usize,
    /// Weights.
    pub num_parameters: u64,
}

/// The tensors of an adapter of a model, layer by layer, in the order of `paths`.
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

/// The tensors of a file, each by the name that PEFT has for it in a model that is text alone: the names of an adapter on a
/// multimodal model have the decoder's place in it, too.
///
/// # Errors
/// When the file cannot be read.
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

/// The adapter of a PEFT directory, if it is one for this model: its config selects layers that the model has, and its tensors are
/// those layers' and of their shapes.
///
/// # Errors
/// What does not fit, by key or tensor.
pub fn read_for(dir: &Path, model: &ModelDescription) -> Result<LoraPlan, ModelCardError> {
    let paths: Vec<&'static str> = model.projections.paths().collect();
    let plan = plan_of(&read_json(dir, CONFIG, 1 << 20)?, &paths, model.num_hidden_layers)?;
    check(&read_tensors(dir, WEIGHTS)?, tensors(&plan, model, &paths))?;
    Ok(plan)
}

/// As [`LoraPlan::from_peft`].
///
/// # Errors
/// As there.
pub fn plan_of(config: &Value, paths: &[&str], num_layers: usize) -> Result<LoraPlan, ModelCardError> {
    LoraPlan::from_peft(config, paths, num_layers).map_err(|detail| {
        let detail = detail.strip_prefix("adapter_config.json: ").unwrap_or(&detail).to_owned();
        ModelCardError::new(CONFIG, detail)
    })
}

fn check(found: &BTreeMap<String, TensorLocation>, wanted: Vec<AdapterTensor>) -> Result<(), ModelCardError> {
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
            let detail = format!("tensor {other} belongs to no linear layer that {CONFIG} selects in this model");
            Err(ModelCardError::new(WEIGHTS, detail))
        }
    }
}

/// Reads a PEFT directory whose model is not known: config and tensors must agree with each other.
///
/// # Errors
/// What does not fit, by key or tensor.
pub fn read(dir: &Path) -> Result<AdapterCard, ModelCardError> {
    let config = read_json(dir, CONFIG, 1 << 20)?;
    let found = read_tensors(dir, WEIGHTS)?;
    // Of each A and B: layer, path of the linear layer, rank.
    let mut ranks: BTreeMap<(usize, &str), [Option<usize>; 2]> = BTreeMap::new();
    for (name, location) in &found {
        let factor = |ending: &str| name.strip_prefix("base_model.model.model.layers.")?.strip_suffix(ending);
        let (inside, is_b) = match (factor(".lora_A.weight"), factor(".lora_B.weight")) {
            (Some(inside), _) => (inside, false),
            (None, Some(inside)) => (inside, true),
            (None, None) => {
                let detail =
                    format!("tensor {name} is no lora_A or lora_B of a decoder layer; only those are supported");
                return Err(ModelCardError::new(WEIGHTS, detail));
            }
        };
        let place = inside.split_once('.').and_then(|(layer, path)| Some((layer.parse::<usize>().ok()?, path)));
        let (Some((layer, path)), [rows, columns]) = (place.filter(|(layer, _)| *layer < 10_000), &location.shape[..])
        else {
            return Err(ModelCardError::new(WEIGHTS, format!("tensor {name} is no matrix of a decoder layer")));
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
