//! LoRA adapters: PEFT's names, layout and initialization.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::backend::Flat;
pub use super::backend::Module;
use super::error::{EngineError, Result};
use super::load;
use super::random::{Key, Stream};
use super::tensors;
use crate::modelcard::adapter::{self, AdapterTensor};
pub use crate::modelcard::adapter::{CONFIG, WEIGHTS};
use crate::modelcard::{self, ModelDescription};
use crate::spec::LoraPlan;

impl Module {
    /// Number of outputs and inputs of a linear layer.
    pub fn shape(self, model: &ModelDescription) -> (usize, usize) {
        model.projection_shape(self.path())
    }

    /// The linear layers that LoRA can adapt in a model, in the order of [`Module::ALL`].
    pub fn of_model(model: &ModelDescription) -> Vec<Module> {
        let mut modules: Vec<Module> = model.module_paths().into_iter().filter_map(Module::from_path).collect();
        modules.sort();
        modules
    }
}

/// One LoRA tensor in the flat parameter buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterInfo {
    /// PEFT's name, as in adapter_model.safetensors.
    pub name: String,
    /// The tensor's shape: `[r, in]` for A, `[out, r]` for B.
    pub shape: Vec<usize>,
    /// Index of the tensor's first value in the flat buffer.
    pub offset: usize,
}

/// The positions of a linear layer's A and B in the flat buffer, and their scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slot {
    /// Index of the first value of A `[r, in]`.
    pub a: usize,
    /// Index of the first value of B `[out, r]`.
    pub b: usize,
    /// Rank of the LoRA factors.
    pub r: usize,
    /// The scaling `s` in y = W x + b + s·B(A x).
    pub scaling: f64,
}

/// A LoRA adapter: its config and all its values in one flat buffer.
#[derive(Debug)]
pub(super) struct Lora {
    pub config: LoraPlan,
    pub parameters: Vec<Parameter>,
    pub values: Flat,
}

/// One LoRA tensor of the flat buffer.
#[derive(Debug)]
pub(super) struct Parameter {
    pub info: ParameterInfo,
    layer: usize,
    module: Module,
    is_b: bool,
}

impl Parameter {
    fn len(&self) -> usize {
        self.info.shape.iter().product()
    }

    fn range(&self) -> std::ops::Range<usize> {
        self.info.offset..self.info.offset + self.len()
    }
}

impl Lora {
    /// Initializes an adapter as PEFT does: A uniform in ±1/√in (Kaiming with a = √5), B zero.
    pub fn fresh(config: &LoraPlan, model: &ModelDescription, seed: u64) -> Result<Lora> {
        let (mut lora, mut values) = Lora::zeros(config, model)?;
        let key = Key::new(seed, Stream::Init);
        for parameter in lora.parameters.iter().filter(|p| !p.is_b) {
            let bound = (parameter.info.shape[1] as f64).powf(-0.5);
            for (i, value) in values[parameter.range()].iter_mut().enumerate() {
                let u = key.with((parameter.info.offset + i) as u64).uniform();
                *value = ((2.0 * u - 1.0) * bound) as f32;
            }
        }
        lora.values = Flat::Host(values);
        Ok(lora)
    }

    /// Reads the LoRA tensors of a PEFT file.
    pub fn read(config: &LoraPlan, model: &ModelDescription, file: &Path) -> Result<Lora> {
        let (mut lora, mut all) = Lora::zeros(config, model)?;
        let (Some(dir), Some(name)) = (file.parent(), file.file_name().and_then(|n| n.to_str())) else {
            return Err(EngineError::Adapter(format!("{} is not a file", file.display())));
        };
        let mut tensors = adapter::read_tensors(dir, name).map_err(|e| EngineError::Adapter(e.to_string()))?;
        let failed = |source| EngineError::Io { path: file.to_owned(), source };
        let reader = modelcard::open(dir, name).map_err(|e| EngineError::Adapter(e.to_string()))?;
        for parameter in &lora.parameters {
            let info = &parameter.info;
            let Some(location) = tensors.remove(&info.name) else {
                return Err(EngineError::Adapter(format!("{name}: tensor {} is missing", info.name)));
            };
            if location.shape != info.shape {
                return Err(EngineError::Adapter(format!(
                    "{name}: tensor {} has shape {:?}; this model and the adapter's config ask for {:?}",
                    info.name, location.shape, info.shape
                )));
            }
            let values = load::read_values(&reader, &location).map_err(failed)?;
            if !values.iter().all(|value| value.is_finite()) {
                return Err(EngineError::Adapter(format!("{name}: tensor {} holds NaN or infinite values", info.name)));
            }
            all[parameter.range()].copy_from_slice(&values);
        }
        if let Some(other) = tensors.keys().next() {
            let detail = format!("{name}: tensor {other} belongs to no module of target_modules in this model");
            return Err(EngineError::Adapter(detail));
        }
        lora.values = Flat::Host(all);
        Ok(lora)
    }

    /// Creates the layout of an adapter, and a flat buffer of zeros for its values.
    fn zeros(config: &LoraPlan, model: &ModelDescription) -> Result<(Lora, Vec<f32>)> {
        let LoraPlan { r, alpha, target_modules, .. } = config;
        if *r == 0 || target_modules.is_empty() || !alpha.is_finite() {
            let detail = format!(
                "r = {r}, alpha = {alpha}, {} target modules: r must be at least 1, alpha finite, target_modules not empty",
                target_modules.len()
            );
            return Err(EngineError::Adapter(detail));
        }
        let of_model = Module::of_model(model);
        let keys: Vec<String> = (0..model.num_hidden_layers)
            .flat_map(|layer| of_model.iter().map(move |module| (layer, module.path())))
            .filter(|(layer, path)| model.has_module(*layer, path))
            .map(|(layer, path)| format!("layers.{layer}.{path}"))
            .collect();
        let is_there = |name: &&String| keys.iter().any(|key| key == *name || key.ends_with(&format!(".{name}")));
        if let Some(other) = target_modules.iter().find(|name| !is_there(name)) {
            let names: Vec<&str> = of_model.iter().map(|module| module.name()).collect();
            let detail =
                format!("target_modules contains {other}, which is not in this model; it has {}", names.join(", "));
            return Err(EngineError::Adapter(detail));
        }
        let paths: Vec<&'static str> = of_model.iter().map(|module| module.path()).collect();
        let mut offset = 0;
        let parameter = |tensor: AdapterTensor| {
            let AdapterTensor { layer, path, is_b, name, shape } = tensor;
            let info = ParameterInfo { name, shape, offset };
            offset += info.shape.iter().product::<usize>();
            Some(Parameter { info, layer, module: Module::from_path(path)?, is_b })
        };
        let parameters = adapter::tensors(config, model, &paths).into_iter().filter_map(parameter).collect();
        Ok((Lora { config: config.clone(), parameters, values: Flat::Host(Vec::new()) }, vec![0.0; offset]))
    }

    /// The positions of one linear layer's factors, if the layer is adapted.
    pub fn slot(&self, layer: usize, module: Module) -> Option<Slot> {
        let rank = self.config.of(layer, module.path())?;
        let is_here = |parameter: &&Parameter| parameter.layer == layer && parameter.module == module;
        let a = self.parameters.iter().find(is_here)?.info.offset;
        let b = self.parameters.iter().filter(|parameter| parameter.is_b).find(is_here)?.info.offset;
        Some(Slot { a, b, r: rank.r as usize, scaling: self.config.scaling(rank) })
    }

    /// Writes the two files of a PEFT adapter.
    pub fn write(&self, dir: &Path, base_model_name_or_path: &str) -> Result<()> {
        let values = self.values.values()?;
        let tensors: Vec<tensors::Tensor<'_>> = self
            .parameters
            .iter()
            .map(|parameter| tensors::Tensor {
                name: &parameter.info.name,
                shape: &parameter.info.shape,
                data: tensors::Data::F32(&values[parameter.range()]),
            })
            .collect();
        tensors::write_finite(&dir.join(WEIGHTS), &tensors)?;
        let write = |name: &str, bytes: &[u8]| {
            let path = dir.join(name);
            std::fs::write(&path, bytes).map_err(|source| EngineError::Io { path, source })
        };
        let config = format!("{:#}\n", peft_config(&self.config, base_model_name_or_path));
        write(CONFIG, config.as_bytes())
    }
}

/// Reads from a PEFT directory which linear layers its adapter covers, and with which ranks.
pub fn read_config(dir: &Path, model: &ModelDescription) -> Result<LoraPlan> {
    adapter::read_for(dir, model).map_err(|error| EngineError::Adapter(error.to_string()))
}

/// Creates adapter_config.json with every key that PEFT writes.
fn peft_config(lora: &LoraPlan, base_model_name_or_path: &str) -> Value {
    let LoraPlan { r, alpha, use_rslora, target_modules, dropout, rank_pattern, alpha_pattern } = lora;
    let whole =
        |alpha: f64| if alpha.fract() == 0.0 && alpha.abs() < 1e15 { json!(alpha as i64) } else { json!(alpha) };
    let alpha = whole(*alpha);
    let alpha_pattern: Map<String, Value> =
        alpha_pattern.iter().map(|(name, alpha)| (name.clone(), whole(*alpha))).collect();
    json!({
        "alora_invocation_tokens": null,
        "alpha_pattern": alpha_pattern,
        "arrow_config": null,
        "auto_mapping": null,
        "base_model_name_or_path": base_model_name_or_path,
        "bias": "none",
        "corda_config": null,
        "ensure_weight_tying": false,
        "eva_config": null,
        "exclude_modules": null,
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "kasa_config": null,
        "layer_replication": null,
        "layers_pattern": null,
        "layers_to_transform": null,
        "loftq_config": {},
        "lora_alpha": alpha,
        "lora_bias": false,
        "lora_dropout": dropout,
        "lora_ga_config": null,
        "megatron_config": null,
        "megatron_core": "megatron.core",
        "modules_to_save": null,
        "monteclora_config": null,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": r,
        "rank_pattern": rank_pattern,
        "revision": null,
        "target_modules": target_modules,
        "target_parameters": null,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": null,
        "use_bdlora": null,
        "use_dora": false,
        "use_qalora": false,
        "use_rslora": use_rslora,
        "velora_config": null,
    })
}
