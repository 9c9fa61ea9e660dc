//! A linear layer, several fused into one, with LoRA applied unmerged: y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ. Trained are the
//! adapters, or in full fine-tuning W and b.

use candle_core::{Device, Tensor};

use super::pass::{Mask, Pass};
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
#[derive(Clone, Debug)]
pub struct Linear {
    /// The modules, in order of their outputs.
    pub parts: Vec<Part>,
    weight: Tensor,
    bias: Option<Tensor>,
    lora: Option<Lora>,
    /// Inputs of matrix products are rounded to bf16; the weight is already.
    bf16: bool,
}

/// The adapters of a fused layer: A stacked, B block-diagonal.
#[derive(Clone, Debug)]
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

/// The gradients of what is trained in a fused layer.
#[derive(Debug)]
pub enum LinearGradient {
    /// Nothing is.
    None,
    /// The adapters.
    Lora(LoraGradient),
    /// All weights: W `[out, in]`, and b `[out]` where there is one.
    Full {
        /// dL/dW
        weight: Tensor,
        /// dL/db
        bias: Option<Vec<f32>>,
    },
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
        let bf16 = weights.bf16();
        let (mut parts, mut values, mut bias_values) = (Vec::new(), Vec::new(), Vec::new());
        let mut begin = 0;
        for module in modules {
            let name = format!("{prefix}.{}", module.path());
            let (weight, shape) = weights.compute_values(&format!("{name}.weight"))?;
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
        Ok(Linear { parts, weight, bias, lora: None, bf16 })
    }

    /// Replace the weights (and biases): `values(module)` gives W row-major, and b.
    pub fn set_weights<'v>(&mut self, values: impl Fn(Module) -> Result<(&'v [f32], Option<&'v [f32]>)>) -> Result<()> {
        let (mut weight, mut bias) = (Vec::with_capacity(self.output() * self.input()), Vec::new());
        for part in &self.parts {
            let (part_weight, part_bias) = values(part.module)?;
            weight.extend_from_slice(part_weight);
            bias.extend_from_slice(part_bias.unwrap_or_default());
        }
        if self.bf16 {
            ops::slices::round_bf16(&mut weight);
        }
        let device = self.weight.device().clone();
        self.weight = Tensor::from_vec(weight, (self.output(), self.input()), &device)?;
        if self.bias.is_some() {
            self.bias = Some(Tensor::from_vec(bias, self.output(), &device)?);
        }
        Ok(())
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
    pub fn forward(&self, x: &Tensor, pass: Pass<'_>) -> Result<Tensor> {
        ops::padded(x, |x| {
            let x = self.rounded(x)?;
            let y = ops::linear(&x, &self.weight, self.bias.as_ref())?;
            match self.lora.as_ref().filter(|_| pass.adapter) {
                Some(lora) => Ok((y + self.hidden(lora, &x, pass)?.matmul(&lora.b.t()?)?)?),
                None => Ok(y),
            }
        })
    }

    fn rounded(&self, x: &Tensor) -> Result<Tensor> {
        if self.bf16 { Ok(ops::round_bf16(x)?) } else { Ok(x.clone()) }
    }

    /// x·Aᵀ `[T, blocks · r]`, each block with what its module's dropout leaves of x.
    fn hidden(&self, lora: &Lora, x: &Tensor, pass: Pass<'_>) -> Result<Tensor> {
        if pass.dropout.is_none() {
            return Ok(x.matmul(&lora.a.t()?)?);
        }
        let blocks = lora.adapted.iter().enumerate().map(|(block, part)| {
            let a = lora.a.narrow(0, block * lora.r, lora.r)?;
            Ok(dropped(x, pass.mask(self.parts[*part].module))?.matmul(&a.t()?)?)
        });
        Ok(Tensor::cat(&blocks.collect::<Result<Vec<Tensor>>>()?, 1)?)
    }

    /// dL/dx, and the gradients of what this pass trains.
    pub fn vjp(&self, x: &Tensor, dy: &Tensor, pass: Pass<'_>) -> Result<(Tensor, LinearGradient)> {
        let (x, product_dy) = (self.rounded(x)?, self.rounded(dy)?);
        let dx = product_dy.matmul(&self.weight)?;
        if pass.full {
            let weight = product_dy.t()?.matmul(&x)?;
            let bias = self.bias.as_ref().map(|_| ops::column_sums(dy)).transpose()?;
            return Ok((dx, LinearGradient::Full { weight, bias }));
        }
        let Some(lora) = &self.lora else {
            return Ok((dx, LinearGradient::None));
        };
        let dy = product_dy;
        let h = self.hidden(lora, &x, pass)?;
        let dh = dy.matmul(&lora.b)?;
        let (dx, da) = match pass.dropout {
            None => ((dx + dh.matmul(&lora.a)?)?, dh.t()?.matmul(&x)?),
            Some(_) => self.dropped_vjp(lora, &x, &dh, dx, pass)?,
        };
        // L depends on B through s·B, which is what `lora.b` holds.
        let db = (dy.t()?.matmul(&h)? * lora.scaling)?;
        let gradient = LoraGradient { a: da.flatten_all()?.to_vec1()?, b: db.flatten_all()?.to_vec1()? };
        Ok((dx, LinearGradient::Lora(gradient)))
    }

    /// dL/dx and dL/dA through the masks of the blocks.
    fn dropped_vjp(
        &self,
        lora: &Lora,
        x: &Tensor,
        dh: &Tensor,
        mut dx: Tensor,
        pass: Pass<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let mut da = Vec::with_capacity(lora.adapted.len());
        for (block, part) in lora.adapted.iter().enumerate() {
            let mask = pass.mask(self.parts[*part].module);
            let a = lora.a.narrow(0, block * lora.r, lora.r)?;
            let dh = dh.narrow(1, block * lora.r, lora.r)?.contiguous()?;
            dx = (dx + dropped(&dh.matmul(&a)?, mask)?)?;
            da.push(dh.t()?.matmul(&dropped(x, mask)?)?);
        }
        Ok((dx, Tensor::cat(&da, 0)?))
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

/// What a dropout mask leaves of x; everything without one.
fn dropped(x: &Tensor, mask: Option<Mask<'_>>) -> Result<Tensor> {
    match mask {
        None => Ok(x.clone()),
        Some(mask) => Ok(ops::change_rows(x, |token, values| mask.apply(token, values))?),
    }
}
