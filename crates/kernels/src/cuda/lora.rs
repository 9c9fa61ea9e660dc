//! Products with frozen or trained weights and their adapters: y = residual + x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ,
//! and its vector-Jacobian product.

use std::ops::Range;

use super::driver::{Buffer, Device};
use super::gemm::{Form, Gemm, Product, outer, outer_parts, product, product_over};
use super::rows::{Dropout, Dtype, Result, Rows, check, check_rows, column_sums, copy, copy_scaled, drop_out};

/// LoRA factors of a fused weight on the device: A stacked, B block-diagonal and scaled by s.
#[derive(Debug)]
pub struct Adapter {
    /// The factors A of all modules, stacked: `[blocks · r, in]`.
    a: Buffer,
    /// The factors B of all modules on a block diagonal, `[out, blocks · r]`.
    b: Buffer,
    dtype: Dtype,
    inputs: usize,
    outputs: usize,
    r: usize,
    scaling: f32,
    /// The range of outputs of each adapted module.
    parts: Vec<Range<usize>>,
}

/// The LoRA factors of a fused weight, as positions in the flat parameters; see `engine::backend::AdapterShape`.
#[derive(Clone, Debug)]
pub struct Factors<'a> {
    /// The flat parameters in f32, which hold the factors.
    pub values: &'a Buffer,
    /// Number of inputs of A.
    pub inputs: usize,
    /// Number of outputs of the fused weight.
    pub outputs: usize,
    /// Rank of the LoRA factors.
    pub r: usize,
    /// The scaling `s` in the product s·B·A.
    pub scaling: f64,
    /// Each module: its outputs, and the offsets of A `[r, in]` and B `[out, r]`.
    pub blocks: Vec<(Range<usize>, usize, usize)>,
}

impl Adapter {
    /// Creates the factors of an adapter, in the layout and type that products read.
    ///
    /// # Errors
    /// [`CudaError::Input`](super::driver::CudaError::Input) if a factor is outside of the buffer.
    pub fn new(device: &Device, dtype: Dtype, factors: &Factors<'_>) -> Result<Adapter> {
        let Factors { values, inputs, outputs, r, scaling, blocks } = factors;
        let scaling = *scaling as f32;
        let rank = blocks.len() * r;
        let fits = |range: &Range<usize>| range.start <= range.end && range.end <= *outputs;
        check(blocks.iter().all(|(range, ..)| fits(range)), || {
            format!("an adapter of rank {r} does not match a weight of {outputs} x {inputs}")
        })?;
        let a = device.alloc(rank * inputs * dtype.bytes())?;
        // Each module's rows of B are zero in the columns of other modules' ranks.
        let b = device.zeros(outputs * rank * dtype.bytes())?;
        let (all_a, all_b) = (Rows::new(&a, rank, *inputs, dtype), Rows::new(&b, *outputs, rank, dtype));
        for (index, (range, at_a, at_b)) in blocks.iter().enumerate() {
            let ranks = index * r..(index + 1) * r;
            copy(device, Rows::within(values, *at_a, *r, *inputs), all_a.part(ranks.clone()))?;
            let block = all_b.part(range.clone()).columns(ranks);
            copy_scaled(device, Rows::within(values, *at_b, range.len(), *r), scaling, block)?;
        }
        Ok(Adapter {
            a,
            b,
            dtype,
            inputs: *inputs,
            outputs: *outputs,
            r: *r,
            scaling,
            parts: blocks.iter().map(|(range, ..)| range.clone()).collect(),
        })
    }

    /// Sum of the ranks of all modules.
    pub fn rank(&self) -> usize {
        self.parts.len() * self.r
    }

    fn a(&self) -> Rows<'_> {
        Rows::new(&self.a, self.rank(), self.inputs, self.dtype)
    }

    fn b(&self) -> Rows<'_> {
        Rows::new(&self.b, self.outputs, self.rank(), self.dtype)
    }

    /// The range of a module's ranks among those of all modules.
    fn ranks(&self, block: usize) -> Range<usize> {
        block * self.r..(block + 1) * self.r
    }

    /// Computes x·Aᵀ `[rows, rank]` in x's type, each block with x after its module's dropout.
    fn hidden(&self, device: &Device, gemm: Gemm, x: Rows<'_>, dropout: &[Dropout<'_>]) -> Result<Buffer> {
        let hidden = device.alloc(x.rows * self.rank() * self.dtype.bytes())?;
        let all = Rows::new(&hidden, x.rows, self.rank(), self.dtype);
        if dropout.is_empty() {
            product(device, gemm, &Product { settled: true, ..Product::new(Form::Nt, x, self.a()) }, all)?;
        }
        for (block, dropout) in dropout.iter().enumerate() {
            let left = dropped(device, x, *dropout)?;
            let left = Rows::new(&left, x.rows, x.width, x.dtype);
            let a = self.a().part(self.ranks(block));
            product(device, gemm, &Product::new(Form::Nt, left, a), all.columns(self.ranks(block)))?;
        }
        Ok(hidden)
    }
}

/// Applies LoRA dropout to x, in its type.
fn dropped(device: &Device, x: Rows<'_>, dropout: Dropout<'_>) -> Result<Buffer> {
    let left = device.alloc(x.rows * x.width * x.dtype.bytes())?;
    drop_out(device, x, dropout, false, Rows::new(&left, x.rows, x.width, x.dtype))?;
    Ok(left)
}

/// A linear layer: its weight and the terms added to it.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// The weight `[out, in]`, in the compute type.
    pub weight: Rows<'a>,
    /// The bias: one row of f32.
    pub bias: Option<Rows<'a>>,
    /// The LoRA adapter of the weight.
    pub adapter: Option<&'a Adapter>,
    /// The dropout of each module's input; empty without dropout.
    pub dropout: &'a [Dropout<'a>],
}

impl Linear<'_> {
    fn check(&self) -> Result<()> {
        let Linear { weight, bias: _, adapter, dropout } = self;
        let Some(adapter) = adapter else { return Ok(()) };
        let fits = (adapter.outputs, adapter.inputs, adapter.dtype) == (weight.rows, weight.width, weight.dtype);
        let masked = dropout.is_empty() || dropout.len() == adapter.parts.len();
        check_rows(fits && masked, "the shapes of a weight and its adapter", &[*weight, adapter.a(), adapter.b()])
    }
}

/// Computes the output of a linear layer, out = residual + x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ. x has the compute type; the residual
/// is f32, and may be the memory of out; out is f32 or has the compute type. Nothing may have written to the weight or the
/// adapter since the last but one launch.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the shapes or types do not match.
pub fn linear(
    device: &Device,
    gemm: Gemm,
    linear: &Linear<'_>,
    x: Rows<'_>,
    residual: Option<Rows<'_>>,
    out: Rows<'_>,
) -> Result<()> {
    linear.check()?;
    let Linear { weight, bias, adapter, dropout } = *linear;
    let plain = Product { bias, add: residual, settled: true, ..Product::new(Form::Nt, x, weight) };
    let Some(adapter) = adapter else { return product(device, gemm, &plain, out) };
    if dropout.is_empty() {
        let hidden = device.alloc(x.rows * adapter.rank() * adapter.dtype.bytes())?;
        let hidden = Rows::new(&hidden, x.rows, adapter.rank(), adapter.dtype);
        let whole = Product { more: Some((hidden, adapter.b())), ..plain };
        return product_over(device, gemm, &whole, adapter.a(), out);
    }
    let hidden = adapter.hidden(device, gemm, x, dropout)?;
    let hidden = Rows::new(&hidden, x.rows, adapter.rank(), adapter.dtype);
    product(device, gemm, &Product { more: Some((hidden, adapter.b())), ..plain }, out)
}

/// A module of a fused weight that is trained in full fine-tuning: its outputs, and the offsets of the gradients
/// of W and b.
#[derive(Clone, Debug)]
pub struct Trained {
    /// The module's range of outputs in the fused weight.
    pub outputs: Range<usize>,
    /// Offset of the gradient of W in the flat gradient, row-major.
    pub weight: usize,
    /// Offset of the gradient of b in the flat gradient.
    pub bias: Option<usize>,
}

/// The inputs of the backward pass of [`linear`], and the destination of its gradients.
#[derive(Clone, Copy, Debug)]
pub struct LinearBackward<'a> {
    /// The weight and adapter of the forward pass.
    pub linear: Linear<'a>,
    /// The input x of the layer, in the compute type.
    pub x: Rows<'a>,
    /// The gradient dL/dout of the layer's output, f32 or in the compute type.
    pub dy: Rows<'a>,
    /// Offsets of the gradients of each module's A and B; empty if no adapter is trained.
    pub slots: &'a [(usize, usize)],
    /// The trained modules in full fine-tuning; empty otherwise.
    pub full: &'a [Trained],
    /// The flat f32 gradient buffer, to which the layer's gradients are added.
    pub gradient: &'a Buffer,
}

/// Computes dx (f32 or in the compute type) = dL/dx of [`linear`] without the residual's part.
///
/// # Errors
/// [`CudaError::Input`](super::driver::CudaError::Input) if the shapes or types do not match.
pub fn linear_vjp(device: &Device, gemm: Gemm, backward: &LinearBackward<'_>, dx: Rows<'_>) -> Result<()> {
    let LinearBackward { linear, x, dy, slots, full, gradient } = *backward;
    linear.check()?;
    let Linear { weight, bias: _, adapter, dropout } = linear;
    // Products round their inputs to the compute type, as in the forward pass.
    let rounded = if dy.dtype == weight.dtype {
        None
    } else {
        let rounded = device.alloc(dy.rows * dy.width * weight.dtype.bytes())?;
        copy(device, dy, Rows::new(&rounded, dy.rows, dy.width, weight.dtype))?;
        Some(rounded)
    };
    let dy_read = rounded.as_ref().map_or(dy, |rounded| Rows::new(rounded, dy.rows, dy.width, weight.dtype));
    for Trained { outputs, weight: weight_at, bias: bias_at } in full {
        let slot = Rows::within(gradient, *weight_at, outputs.len(), x.width);
        outer(device, gemm, dy_read.columns(outputs.clone()), x, 1.0, slot)?;
        if let Some(at) = bias_at {
            let slot = Rows::flat(gradient, *at, outputs.len(), Dtype::F32);
            column_sums(device, dy.columns(outputs.clone()), slot)?;
        }
    }
    let plain = Product::new(Form::Nn, dy_read, weight);
    let Some(adapter) = adapter else { return product(device, gemm, &plain, dx) };
    let rank = adapter.rank();
    let dh = device.alloc(x.rows * rank * adapter.dtype.bytes())?;
    let dh = Rows::new(&dh, x.rows, rank, adapter.dtype);
    let a_slot = |(at, _): &(usize, usize)| Rows::within(gradient, *at, adapter.r, x.width);
    check(slots.is_empty() || slots.len() == adapter.parts.len(), || {
        format!("{} modules of an adapter have {} places in the gradient", adapter.parts.len(), slots.len())
    })?;
    if dropout.is_empty() {
        product_over(device, gemm, &Product { more: Some((dh, adapter.a())), ..plain }, adapter.b(), dx)?;
        if !slots.is_empty() {
            let slots: Vec<Rows<'_>> = slots.iter().map(a_slot).collect();
            outer_parts(device, gemm, dh, x, 1.0, &slots)?;
        }
    } else {
        product(device, gemm, &Product::new(Form::Nn, dy_read, adapter.b()), dh)?;
        dropped_vjp(device, gemm, &LinearBackward { dy: dy_read, ..*backward }, adapter, dh, dx)?;
    }
    if slots.is_empty() {
        return Ok(());
    }
    let hidden = adapter.hidden(device, gemm, x, dropout)?;
    let hidden = Rows::new(&hidden, x.rows, rank, adapter.dtype);
    for (block, (outputs, (_, at))) in adapter.parts.iter().zip(slots).enumerate() {
        // The loss L depends on B through s·B, so dB = s·dyᵀ·h with h = x·Aᵀ.
        let slot = Rows::within(gradient, *at, outputs.len(), adapter.r);
        let (dy, hidden) = (dy_read.columns(outputs.clone()), hidden.columns(adapter.ranks(block)));
        outer(device, gemm, dy, hidden, adapter.scaling, slot)?;
    }
    Ok(())
}

/// Computes dL/dx and dL/dA if each module's input had a different dropout: summed in f32 before dx is rounded.
fn dropped_vjp(
    device: &Device,
    gemm: Gemm,
    backward: &LinearBackward<'_>,
    adapter: &Adapter,
    dh: Rows<'_>,
    dx: Rows<'_>,
) -> Result<()> {
    let LinearBackward { linear, x, dy, slots, full: _, gradient } = *backward;
    let sums = |device: &Device| device.alloc(x.rows * x.width * size_of::<f32>());
    let (sum, through) = (sums(device)?, sums(device)?);
    let sum = Rows::new(&sum, x.rows, x.width, Dtype::F32);
    let through = Rows::new(&through, x.rows, x.width, Dtype::F32);
    product(device, gemm, &Product::new(Form::Nn, dy, linear.weight), sum)?;
    for (block, dropout) in linear.dropout.iter().enumerate() {
        let ranks = adapter.ranks(block);
        let dh = dh.columns(ranks.clone());
        product(device, gemm, &Product::new(Form::Nn, dh, adapter.a().part(ranks)), through)?;
        drop_out(device, through, *dropout, true, sum)?;
        if let Some((at, _)) = slots.get(block) {
            let left = dropped(device, x, *dropout)?;
            let left = Rows::new(&left, x.rows, x.width, x.dtype);
            outer(device, gemm, dh, left, 1.0, Rows::within(gradient, *at, adapter.r, x.width))?;
        }
    }
    copy(device, sum, dx)
}

#[cfg(test)]
mod tests;
