//! A linear layer, possibly several fused into one, with LoRA applied without merging: y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ. The
//! trained parameters are the adapters, or in full fine-tuning W and b.

use std::collections::BTreeMap;
use std::ops::Range;

use super::pass::{Applied, MixedRows, Pass};
use crate::backend::{
    AdapterBackward, AdapterBlock, AdapterPass, AdapterShape, Compute, FullSlot, LinearBackward, Mask, Module,
};
use crate::error::{EngineError, Result};
use crate::load::{Matrix, Weights};
use crate::lora::Slot;

/// The rows of a fused layer that belong to one PEFT module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The PEFT module that owns the rows.
    pub module: Module,
    /// Index of the module's first output in the fused layer.
    pub begin: usize,
    /// Number of the module's outputs.
    pub out: usize,
}

impl Part {
    fn outputs(&self) -> Range<usize> {
        self.begin..self.begin + self.out
    }
}

/// Linear layers with the same input, fused into one matrix.
#[derive(Clone, Debug)]
pub struct Linear<B: Compute> {
    /// The fused modules, in order of their outputs.
    pub parts: Vec<Part>,
    inputs: usize,
    has_bias: bool,
    weight: B::Weight,
    lora: Option<Lora<B>>,
    /// The adapters that are served besides, by slot; those that do not adapt this layer are missing.
    served: BTreeMap<u32, Lora<B>>,
    /// The trained modules in full fine-tuning; empty otherwise.
    full: Vec<FullSlot>,
}

/// The LoRA adapters of a fused layer.
#[derive(Clone, Debug)]
struct Lora<B: Compute> {
    adapter: B::Adapter,
    /// The adapted modules, in order of their outputs.
    modules: Vec<Module>,
    /// Offsets of each module's A and B in the flat gradient.
    slots: Vec<(usize, usize)>,
}

impl<B: Compute> Linear<B> {
    /// Fuses the weights (and biases) of the modules at these paths under `prefix` (such as
    /// `model.layers.0`) into one layer.
    pub fn load(backend: &B, weights: &mut Weights, prefix: &str, paths: &[&str], bias: bool) -> Result<Self> {
        let (mut parts, mut matrices, mut bias_values) = (Vec::new(), Vec::new(), Vec::new());
        let mut begin = 0;
        for path in paths {
            let module = Module::from_path(path)
                .ok_or_else(|| EngineError::Input(format!("'{path}' is not the name of a linear layer")))?;
            let name = format!("{prefix}.{path}");
            let (matrix, shape) = weights.matrix(&format!("{name}.weight"))?;
            if bias {
                bias_values.extend(weights.values(&format!("{name}.bias"))?.0);
            }
            matrices.push(matrix);
            parts.push(Part { module, begin, out: shape[0] });
            begin += shape[0];
        }
        let inputs = matrices.iter().map(Matrix::len).sum::<usize>() / begin.max(1);
        let weight = backend.upload_matrices(matrices, inputs, bias.then_some(bias_values))?;
        Ok(Linear { parts, inputs, has_bias: bias, weight, lora: None, served: BTreeMap::new(), full: Vec::new() })
    }

    /// Returns the memory of the layer's matrix in bytes; None if the backend does not know it.
    pub fn matrix_bytes(&self, backend: &B) -> Option<usize> {
        backend.matrix_bytes(&self.weight)
    }

    fn outputs(&self) -> usize {
        self.parts.last().map_or(0, |part| part.outputs().end)
    }

    /// Starts training the weights (and biases) of the layer, and computes with these values. `slots(module)` returns
    /// the offsets of W and b in the flat parameters.
    pub fn set_weights(
        &mut self,
        backend: &B,
        parameters: &B::FlatBuffer,
        slots: impl Fn(Module) -> Result<(usize, Option<usize>)>,
    ) -> Result<()> {
        let slot = |part: &Part| -> Result<FullSlot> {
            let (weight, bias) = slots(part.module)?;
            Ok(FullSlot { outputs: part.outputs(), weight, bias: bias.filter(|_| self.has_bias) })
        };
        self.full = self.parts.iter().map(slot).collect::<Result<_>>()?;
        self.lora = None;
        self.weight = backend.weight_from(parameters, &self.full, self.inputs)?;
        Ok(())
    }

    /// Sets the layer's trained LoRA adapter. `slot(module)` returns the positions of an adapted module's factors in the
    /// flat parameters.
    pub fn set_lora(
        &mut self,
        backend: &B,
        parameters: &B::FlatBuffer,
        slot: impl Fn(Module) -> Option<Slot>,
    ) -> Result<()> {
        self.full.clear();
        self.lora = self.adapter(backend, parameters, slot)?;
        Ok(())
    }

    /// Adds an adapter that is served, like [`Linear::set_lora`], or replaces the one with this number.
    pub fn serve(
        &mut self,
        backend: &B,
        number: u32,
        parameters: &B::FlatBuffer,
        slot: impl Fn(Module) -> Option<Slot>,
    ) -> Result<()> {
        self.served.remove(&number);
        self.served.extend(self.adapter(backend, parameters, slot)?.map(|lora| (number, lora)));
        Ok(())
    }

    /// Removes an adapter that was served.
    pub fn stop_serving(&mut self, number: u32) {
        self.served.remove(&number);
    }

    /// Creates the layer's LoRA factors; None if the adapter has none for this layer.
    fn adapter(
        &self,
        backend: &B,
        parameters: &B::FlatBuffer,
        slot: impl Fn(Module) -> Option<Slot>,
    ) -> Result<Option<Lora<B>>> {
        let adapted: Vec<(Part, Slot)> =
            self.parts.iter().filter_map(|part| Some((*part, slot(part.module)?))).collect();
        if adapted.is_empty() {
            return Ok(None);
        }
        let blocks = adapted.iter().map(|(part, slot)| {
            let Slot { a, b, r, scaling } = *slot;
            AdapterBlock { outputs: part.outputs(), a, b, r, scaling }
        });
        let shape = AdapterShape { inputs: self.inputs, outputs: self.outputs(), blocks: blocks.collect() };
        Ok(Some(Lora {
            adapter: backend.adapter_from(parameters, &shape)?,
            modules: adapted.iter().map(|(part, _)| part.module).collect(),
            slots: adapted.iter().map(|(_, slot)| (slot.a, slot.b)).collect(),
        }))
    }

    /// Computes y `[T, out]` of the layer from x `[T, in]`, and adds it to the residual.
    pub fn forward(&self, backend: &B, x: &B::Tensor, residual: Residual<'_, B>, pass: Pass<'_>) -> Result<B::Tensor> {
        let lora = match pass.adapter {
            Applied::Nothing => None,
            Applied::Trained => self.lora.as_ref(),
            Applied::Served(number) => self.served.get(&number),
            Applied::Mixed(mixed) => return self.forward_mixed(backend, x, residual, mixed),
        };
        let masks = lora.map_or(Vec::new(), |lora| lora.masks(pass));
        let adapter = lora.map(|lora| AdapterPass { adapter: &lora.adapter, masks: &masks });
        match residual {
            Residual::None => backend.linear(x, &self.weight, adapter, None),
            Residual::Kept(residual) => backend.linear(x, &self.weight, adapter, Some(residual)),
            Residual::Consumed(residual) => backend.linear_onto(x, &self.weight, adapter, residual),
        }
    }

    /// Computes the layer with each row's own adapter.
    fn forward_mixed(
        &self,
        backend: &B,
        x: &B::Tensor,
        residual: Residual<'_, B>,
        mixed: &MixedRows,
    ) -> Result<B::Tensor> {
        let mut plain = mixed.plain.clone();
        let mut adapters = Vec::with_capacity(mixed.groups.len());
        for (number, rows) in &mixed.groups {
            match self.served.get(number) {
                Some(lora) => adapters.push((&lora.adapter, rows.as_slice())),
                None => plain.extend(rows),
            }
        }
        let residual = match &residual {
            Residual::None => None,
            Residual::Kept(residual) => Some(*residual),
            Residual::Consumed(residual) => Some(residual),
        };
        backend.linear_mixed(x, &self.weight, &adapters, &plain, residual)
    }

    /// Returns dL/dx of the layer, and adds the gradients of trained parameters to the flat gradient.
    pub fn vjp(
        &self,
        backend: &B,
        x: &B::Tensor,
        dy: &B::Tensor,
        pass: Pass<'_>,
        gradient: &mut B::FlatBuffer,
    ) -> Result<B::Tensor> {
        let masks = self.lora.as_ref().map_or(Vec::new(), |lora| lora.masks(pass));
        let adapter = self.lora.as_ref().map(|lora| AdapterBackward {
            pass: AdapterPass { adapter: &lora.adapter, masks: &masks },
            slots: &lora.slots,
        });
        backend.linear_vjp(&LinearBackward { x, dy, weight: &self.weight, adapter, full: &self.full }, gradient)
    }
}

/// The values that a layer's output is added to.
#[derive(Debug)]
pub enum Residual<'a, B: Compute> {
    /// No values are added.
    None,
    /// Values that are still needed afterwards.
    Kept(&'a B::Tensor),
    /// Values that are not needed any more, so that the sum may take their memory.
    Consumed(B::Tensor),
}

impl<B: Compute> Lora<B> {
    fn masks<'p>(&self, pass: Pass<'p>) -> Vec<Mask<'p>> {
        self.modules.iter().filter_map(move |module| pass.mask(*module)).collect()
    }
}
