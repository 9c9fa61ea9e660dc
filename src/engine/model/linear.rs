//! A frozen linear layer, several fused into one, with LoRA applied unmerged: y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ.

use candle_core::{Device, Tensor};

use crate::engine::error::Result;
use crate::engine::load::Weights;
use crate::engine::lora::Module;
use crate::engine::ops;

/// One PEFT module's rows of a fused layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which.
    pub module: Module,
    /// Its first output.
    pub begin: usize,
    /// Its outputs.
    pub out: usize,
}

/// Some modules that read the same input, as one matrix.
#[derive(Debug)]
pub struct Linear {
    /// The modules, in order of their outputs.
    pub parts: Vec<Part>,
    weight: Tensor,
    bias: Option<Tensor>,
    lora: Option<Lora>,
}

/// The adapters of a fused layer: A stacked, B block-diagonal.
#[derive(Debug)]
struct Lora {
    /// `[parts · r, in]`
    a: Tensor,
    /// `[out, parts · r]`, scaled by s.
    b: Tensor,
    r: usize,
    scaling: f64,
    /// Indices into `parts`, in the order of the blocks.
    adapted: Vec<usize>,
}

/// The gradient of a fused layer's LoRA parameters.
#[derive(Debug)]
pub struct LoraGradient {
    /// `[blocks · r, in]`
    pub a: Vec<f32>,
    /// `[out, blocks · r]`; outside the diagonal blocks it is of no use.
    pub b: Vec<f32>,
}

/// Where one block's values lie.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Which module.
    pub part: Part,
    /// Its number among the blocks.
    pub index: usize,
}

impl Linear {
    /// Fuse the weights (and biases) of `modules` under `prefix` (`model.layers.0`).
    pub fn load(
        weights: &mut Weights,
        prefix: &str,
        modules: &[Module],
        bias: bool,
        device: &Device,
    ) -> Result<Linear> {
        let (mut parts, mut values, mut bias_values) = (Vec::new(), Vec::new(), Vec::new());
        let mut begin = 0;
        for module in modules {
            let name = format!("{prefix}.{}", module.path());
            let (weight, shape) = weights.values(&format!("{name}.weight"))?;
            if values.is_empty() {
                values = weight;
            } else {
                values.extend(weight);
            }
            if bias {
                bias_values.extend(weights.values(&format!("{name}.bias"))?.0);
            }
            parts.push(Part { module: *module, begin, out: shape[0] });
            begin += shape[0];
        }
        let input = values.len() / begin;
        let weight = Tensor::from_vec(values, (begin, input), device)?;
        let bias = if bias { Some(Tensor::from_vec(bias_values, begin, device)?) } else { None };
        Ok(Linear { parts, weight, bias, lora: None })
    }

    /// Inputs.
    pub fn input(&self) -> usize {
        self.weight.dims()[1]
    }

    /// Outputs of all modules.
    pub fn output(&self) -> usize {
        self.weight.dims()[0]
    }

    /// Set the adapters: `values(module)` gives A `[r, in]` and B `[out, r]` of adapted modules.
    pub fn set_lora<'v>(
        &mut self,
        r: usize,
        scaling: f64,
        values: impl Fn(Module) -> Option<(&'v [f32], &'v [f32])>,
    ) -> Result<()> {
        let adapted: Vec<usize> = (0..self.parts.len()).filter(|i| values(self.parts[*i].module).is_some()).collect();
        if adapted.is_empty() {
            self.lora = None;
            return Ok(());
        }
        let rank = adapted.len() * r;
        let mut a_all = Vec::with_capacity(rank * self.input());
        let mut b_all = vec![0f32; self.output() * rank];
        for (block, index) in adapted.iter().enumerate() {
            let part = self.parts[*index];
            if let Some((a, b)) = values(part.module) {
                a_all.extend_from_slice(a);
                for (row, b) in b.chunks_exact(r).enumerate() {
                    let out = &mut b_all[(part.begin + row) * rank + block * r..][..r];
                    for (out, b) in out.iter_mut().zip(b) {
                        *out = b * scaling as f32;
                    }
                }
            }
        }
        let device = self.weight.device();
        let a = Tensor::from_vec(a_all, (rank, self.input()), device)?;
        let b = Tensor::from_vec(b_all, (self.output(), rank), device)?;
        self.lora = Some(Lora { a, b, r, scaling, adapted });
        Ok(())
    }

    /// Forget the adapters.
    pub fn clear_lora(&mut self) {
        self.lora = None;
    }

    /// x `[T, in]` → y `[T, out]`.
    pub fn forward(&self, x: &Tensor, adapter: bool) -> Result<Tensor> {
        ops::padded(x, |x| {
            let y = ops::linear(x, &self.weight, self.bias.as_ref())?;
            match self.lora.as_ref().filter(|_| adapter) {
                Some(lora) => Ok((y + x.matmul(&lora.a.t()?)?.matmul(&lora.b.t()?)?)?),
                None => Ok(y),
            }
        })
    }

    /// dL/dx, and dL/dA, dL/dB where there are adapters. The frozen weight gets no gradient.
    pub fn vjp(&self, x: &Tensor, dy: &Tensor) -> Result<(Tensor, Option<LoraGradient>)> {
        let dx = dy.matmul(&self.weight)?;
        let Some(lora) = &self.lora else {
            return Ok((dx, None));
        };
        let h = x.matmul(&lora.a.t()?)?;
        let dh = dy.matmul(&lora.b)?;
        let dx = (dx + dh.matmul(&lora.a)?)?;
        let da = dh.t()?.matmul(x)?;
        // L depends on B through s·B, which is what `lora.b` holds.
        let db = (dy.t()?.matmul(&h)? * lora.scaling)?;
        let gradient = LoraGradient { a: da.flatten_all()?.to_vec1()?, b: db.flatten_all()?.to_vec1()? };
        Ok((dx, Some(gradient)))
    }

    /// The adapted modules.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        let adapted = self.lora.iter().flat_map(|lora| lora.adapted.iter());
        adapted.enumerate().map(|(index, part)| Block { part: self.parts[*part], index })
    }

    /// Add one block's gradient to the flat gradients of its A and B.
    pub fn add_gradient(&self, block: Block, gradient: &LoraGradient, a: &mut [f32], b: &mut [f32]) {
        let Some(lora) = &self.lora else { return };
        let (r, rank) = (lora.r, lora.adapted.len() * lora.r);
        let da = &gradient.a[block.index * r * self.input()..][..r * self.input()];
        ops::slices::add_scaled(a, 1.0, da);
        for (row, b) in b.chunks_exact_mut(r).enumerate() {
            let db = &gradient.b[(block.part.begin + row) * rank + block.index * r..][..r];
            ops::slices::add_scaled(b, 1.0, db);
        }
    }
}
