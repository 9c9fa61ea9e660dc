//! LoRA adapters: PEFT's names, layout and initialisation.

use std::path::Path;

use serde_json::{Value, json};

use super::backend::Flat;
pub use super::backend::Module;
use super::error::{EngineError, Result};
use super::load;
use super::random::{Key, Stream};
use super::tensors;
use crate::modelcard::{self, ModelDescription, weights};
use crate::spec::LoraPlan;

impl Module {
    /// Outputs and inputs of the module.
    pub fn shape(self, model: &ModelDescription) -> (usize, usize) {
        model.projection_shape(self.path())
    }

    /// Those that a model has, in the order of [`Module::ALL`].
    pub fn of_model(model: &ModelDescription) -> Vec<Module> {
        let mut modules: Vec<Module> = model.projections.paths().filter_map(Module::from_path).collect();
        modules.sort();
        modules
    }
}

/// What an adapter is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// The rank.
    pub r: usize,
    /// The numerator of the scaling.
    pub alpha: f64,
    /// Scale by alpha/√r instead of alpha/r.
    pub use_rslora: bool,
    /// Which modules of every layer, in the order of [`Module::ALL`].
    pub target_modules: Vec<Module>,
    /// Of the adapter's input in the training forward; what the weights are does not depend on it.
    pub dropout: f64,
}

impl LoraConfig {
    /// What a plan asks.
    pub fn from_plan(plan: &LoraPlan) -> Result<LoraConfig> {
        let mut target_modules = Vec::new();
        for name in &plan.target_modules {
            target_modules.push(Module::from_name(name).ok_or_else(|| {
                let known = Module::ALL.map(Module::name).join(", ");
                EngineError::Adapter(format!("target_modules holds {name:?}; known are {known}"))
            })?);
        }
        target_modules.sort();
        target_modules.dedup();
        Ok(LoraConfig {
            r: plan.r as usize,
            alpha: plan.alpha,
            use_rslora: plan.use_rslora,
            target_modules,
            dropout: plan.dropout,
        })
    }

    /// Every linear layer of the decoder, PEFT's `all-linear`.
    pub fn all_linear(r: usize, alpha: f64) -> LoraConfig {
        LoraConfig { r, alpha, use_rslora: false, target_modules: Module::ALL.to_vec(), dropout: 0.0 }
    }

    /// Whether the weights of one are weights of the other: all but dropout is equal.
    pub fn fits(&self, other: &LoraConfig) -> bool {
        *self == LoraConfig { dropout: self.dropout, ..other.clone() }
    }

    /// `s` in y = W x + b + s·B(A x).
    pub fn scaling(&self) -> f64 {
        if self.use_rslora { self.alpha / (self.r as f64).sqrt() } else { self.alpha / self.r as f64 }
    }
}

/// One LoRA tensor in the flat parameter buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterInfo {
    /// PEFT's name, as in adapter_model.safetensors.
    pub name: String,
    /// `[r, in]` for A, `[out, r]` for B.
    pub shape: Vec<usize>,
    /// Where it starts in the flat buffer.
    pub offset: usize,
}

/// The adapter's weights in a PEFT directory.
pub const WEIGHTS: &str = "adapter_model.safetensors";
/// The adapter's config in a PEFT directory.
pub const CONFIG: &str = "adapter_config.json";

/// An adapter: its config and all its values in one flat buffer.
#[derive(Debug)]
pub(super) struct Lora {
    pub config: LoraConfig,
    pub parameters: Vec<Parameter>,
    pub values: Flat,
}

/// One tensor of the flat buffer.
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
    /// PEFT's initialisation: A uniform in ±1/√in (Kaiming with a = √5), B zero.
    pub fn fresh(config: &LoraConfig, model: &ModelDescription, seed: u64) -> Result<Lora> {
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

    /// The tensors of a PEFT file.
    pub fn read(config: &LoraConfig, model: &ModelDescription, file: &Path) -> Result<Lora> {
        let (mut lora, mut all) = Lora::zeros(config, model)?;
        let (Some(dir), Some(name)) = (file.parent(), file.file_name().and_then(|n| n.to_str())) else {
            return Err(EngineError::Adapter(format!("{} is not a file", file.display())));
        };
        let mut tensors = weights::read_header(dir, name).map_err(|e| EngineError::Adapter(e.to_string()))?.tensors;
        let failed = |source| EngineError::Io { path: file.to_owned(), source };
        let reader = modelcard::open(dir, name).map_err(|e| EngineError::Adapter(e.to_string()))?;
        for parameter in &lora.parameters {
            let info = &parameter.info;
            let Some(location) = tensors.remove(&info.name) else {
                return Err(EngineError::Adapter(format!("{name}: tensor {} is missing", info.name)));
            };
            if location.shape != info.shape {
                return Err(EngineError::Adapter(format!(
                    "{name}: tensor {} has shape {:?}; this model and r = {} ask for {:?}",
                    info.name, location.shape, config.r, info.shape
                )));
            }
            let values = load::read_values(&reader, &location).map_err(failed)?;
            all[parameter.range()].copy_from_slice(&values);
        }
        if let Some(other) = tensors.keys().next() {
            let detail = format!("{name}: tensor {other} belongs to no module of target_modules in this model");
            return Err(EngineError::Adapter(detail));
        }
        lora.values = Flat::Host(all);
        Ok(lora)
    }

    /// An adapter without values, and as many zeros as it has.
    fn zeros(config: &LoraConfig, model: &ModelDescription) -> Result<(Lora, Vec<f32>)> {
        let LoraConfig { r, alpha, use_rslora: _, target_modules, dropout: _ } = config;
        if *r == 0 || target_modules.is_empty() || !alpha.is_finite() {
            let detail =
                format!("r = {r}, alpha = {alpha}, {} target modules; each must be there", target_modules.len());
            return Err(EngineError::Adapter(detail));
        }
        let mut config = config.clone();
        config.target_modules.sort();
        config.target_modules.dedup();
        let of_model = Module::of_model(model);
        if let Some(other) = config.target_modules.iter().find(|module| !of_model.contains(module)) {
            let names: Vec<&str> = of_model.iter().map(|module| module.name()).collect();
            let detail = format!("target_modules holds {}; this model has {}", other.name(), names.join(", "));
            return Err(EngineError::Adapter(detail));
        }
        let mut parameters = Vec::new();
        let mut offset = 0;
        for layer in 0..model.num_hidden_layers {
            for module in config.target_modules.iter().copied() {
                let (out, input) = module.shape(model);
                let path = format!("base_model.model.model.layers.{layer}.{}", module.path());
                for (is_b, name, shape) in [(false, "lora_A", vec![*r, input]), (true, "lora_B", vec![out, *r])] {
                    let info = ParameterInfo { name: format!("{path}.{name}.weight"), shape, offset };
                    offset += info.shape.iter().product::<usize>();
                    parameters.push(Parameter { info, layer, module, is_b });
                }
            }
        }
        Ok((Lora { config, parameters, values: Flat::Host(Vec::new()) }, vec![0.0; offset]))
    }

    fn ranges(&self, layer: usize, module: Module) -> Option<(std::ops::Range<usize>, std::ops::Range<usize>)> {
        let index = self.config.target_modules.iter().filter(|m| **m < module).count();
        let at = 2 * (layer * self.config.target_modules.len() + index);
        match self.parameters.get(at..at + 2)? {
            [a, b] if a.layer == layer && a.module == module => Some((a.range(), b.range())),
            _ => None,
        }
    }

    /// Where A and B of one module begin in the flat buffer, if it is adapted.
    pub fn slots(&self, layer: usize, module: Module) -> Option<(usize, usize)> {
        self.ranges(layer, module).map(|(a, b)| (a.start, b.start))
    }

    /// Write PEFT's two files.
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
        let config = format!("{:#}\n", self.config.to_json(base_model_name_or_path));
        write(CONFIG, config.as_bytes())
    }
}

/// Parse and validate a PEFT directory's `adapter_config.json`.
pub fn read_config(dir: &Path) -> Result<LoraConfig> {
    let value = modelcard::read_json(dir, CONFIG, 1 << 20).map_err(|e| EngineError::Adapter(e.to_string()))?;
    LoraConfig::from_json(&value)
}

impl LoraConfig {
    /// PEFT's adapter_config.json.
    pub fn from_json(value: &Value) -> Result<LoraConfig> {
        let refuse = |key: &str, advice: &str| {
            let found = value.get(key).map_or_else(|| "missing".to_owned(), modelcard::brief);
            Err(EngineError::Adapter(format!("{CONFIG}: {key} is {found}; {advice}")))
        };
        if value.get("peft_type").and_then(Value::as_str) != Some("LORA") {
            return refuse("peft_type", "only \"LORA\" is supported");
        }
        for key in UNSUPPORTED {
            let neutral = match value.get(key) {
                None | Some(Value::Null | Value::Bool(false)) => true,
                Some(Value::Object(map)) => map.is_empty(),
                Some(Value::Array(list)) => list.is_empty(),
                Some(_) => false,
            };
            if !neutral {
                return refuse(key, "this is not supported");
            }
        }
        if !matches!(value.get("bias").map(Value::as_str), None | Some(Some("none"))) {
            return refuse("bias", "only \"none\" is supported");
        }
        if let Some(name) = value.get("init_lora_weights").and_then(Value::as_str)
            && ["pissa", "olora", "corda", "loftq"].iter().any(|n| name.starts_with(n))
        {
            return refuse("init_lora_weights", "it changes the base weights, which is not supported");
        }
        let Some(r) = value.get("r").and_then(Value::as_u64).filter(|r| (1..=1 << 16).contains(r)) else {
            return refuse("r", "it must be a positive whole number");
        };
        let Some(alpha) = value.get("lora_alpha").and_then(Value::as_f64).filter(|a| a.is_finite()) else {
            return refuse("lora_alpha", "it must be a number");
        };
        let modules = match value.get("target_modules") {
            Some(Value::String(name)) if name == "all-linear" => Some(Module::ALL.to_vec()),
            Some(Value::Array(list)) if !list.is_empty() => {
                list.iter().map(|name| name.as_str().and_then(Module::from_name)).collect::<Option<Vec<Module>>>()
            }
            _ => None,
        };
        let Some(mut target_modules) = modules else {
            return refuse(
                "target_modules",
                "it must be a list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
            );
        };
        target_modules.sort();
        target_modules.dedup();
        let use_rslora = value.get("use_rslora").and_then(Value::as_bool).unwrap_or(false);
        let dropout = value.get("lora_dropout").and_then(Value::as_f64).unwrap_or(0.0);
        if !(0.0..1.0).contains(&dropout) {
            return refuse("lora_dropout", "it must be at least 0 and less than 1");
        }
        Ok(LoraConfig { r: r as usize, alpha, use_rslora, target_modules, dropout })
    }

    /// adapter_config.json with every key PEFT writes.
    pub fn to_json(&self, base_model_name_or_path: &str) -> Value {
        let LoraConfig { r, alpha, use_rslora, target_modules, dropout } = self;
        let names: Vec<&str> = target_modules.iter().map(|m| m.name()).collect();
        let alpha = if alpha.fract() == 0.0 && alpha.abs() < 1e15 { json!(*alpha as i64) } else { json!(alpha) };
        json!({
            "alora_invocation_tokens": null,
            "alpha_pattern": {},
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
            "rank_pattern": {},
            "revision": null,
            "target_modules": names,
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
}

/// Keys of adapter_config.json that must be absent, null, false or empty.
const UNSUPPORTED: [&str; 14] = [
    "alpha_pattern",
    "rank_pattern",
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layers_to_transform",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "exclude_modules",
];
