//! LoRA adapters: PEFT's names, layout and initialisation.

use super::error::{EngineError, Result};
use crate::spec::LoraPlan;

/// A linear layer that LoRA can adapt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Module {
    /// `self_attn.q_proj`
    Q,
    /// `self_attn.k_proj`
    K,
    /// `self_attn.v_proj`
    V,
    /// `self_attn.o_proj`
    O,
    /// `mlp.gate_proj`
    Gate,
    /// `mlp.up_proj`
    Up,
    /// `mlp.down_proj`
    Down,
}

impl Module {
    /// Every module, in the order of the flat parameter buffer.
    pub const ALL: [Module; 7] = [Module::Q, Module::K, Module::V, Module::O, Module::Gate, Module::Up, Module::Down];

    /// The name in `target_modules`.
    pub fn name(self) -> &'static str {
        match self {
            Module::Q => "q_proj",
            Module::K => "k_proj",
            Module::V => "v_proj",
            Module::O => "o_proj",
            Module::Gate => "gate_proj",
            Module::Up => "up_proj",
            Module::Down => "down_proj",
        }
    }

    /// The path inside a decoder layer.
    pub fn path(self) -> &'static str {
        match self {
            Module::Q => "self_attn.q_proj",
            Module::K => "self_attn.k_proj",
            Module::V => "self_attn.v_proj",
            Module::O => "self_attn.o_proj",
            Module::Gate => "mlp.gate_proj",
            Module::Up => "mlp.up_proj",
            Module::Down => "mlp.down_proj",
        }
    }

    /// The module of that `target_modules` name.
    pub fn from_name(name: &str) -> Option<Module> {
        Module::ALL.into_iter().find(|m| m.name() == name)
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
        if plan.dropout != 0.0 {
            return Err(EngineError::Adapter(format!("lora dropout {} is not supported; use 0", plan.dropout)));
        }
        target_modules.sort();
        target_modules.dedup();
        Ok(LoraConfig { r: plan.r as usize, alpha: plan.alpha, use_rslora: plan.use_rslora, target_modules })
    }

    /// Every linear layer of the decoder, PEFT's `all-linear`.
    pub fn all_linear(r: usize, alpha: f64) -> LoraConfig {
        LoraConfig { r, alpha, use_rslora: false, target_modules: Module::ALL.to_vec() }
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
