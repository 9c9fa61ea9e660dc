//! An NVIDIA GPU: tensors stay on the device, operations are queued on its one stream, and the host waits only where a
//! result is asked for.
//!
//! Weights, and what flows between products, have the compute type (f32 or bf16); the residual stream, its gradient, the
//! statistics of norms and softmax, logits and the gradients of parameters are f32. With [`Gemm::Exact`] the products are
//! our own and a row's bits do not depend on the other rows: sampling and training agree to the bit. With [`Gemm::Fast`]
//! cuBLAS multiplies, and the old log-probs are computed again by the training forward.
//!
//! Longer than other files: one trait is implemented in one block.

mod decode;
mod flat;
mod tensor;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    AdapterBackward, AdapterPass, AdapterShape, Attention, AttentionBackward, Backend, Choice, Chosen, FullSlot,
    HeadBackward, LinearBackward, Rotation, Step, Stepped, Tokens, flat::elsewhere,
};
use crate::config::{GPU_MEMORY, parse_size_of};
use crate::engine::error::{EngineError, Result};
use crate::engine::kernels::cuda::attention::{self, Layout};
use crate::engine::kernels::cuda::driver::{Buffer, CudaError, Device};
use crate::engine::kernels::cuda::gemm::Gemm;
use crate::engine::kernels::cuda::head::{self, Head, Normalizers};
use crate::engine::kernels::cuda::lora::{self, Factors, Linear, Trained};
use crate::engine::kernels::cuda::mlp;
use crate::engine::kernels::cuda::norm::{self, NormBackward};
use crate::engine::kernels::cuda::rope::{self, QkNorm, Rope};
use crate::engine::kernels::cuda::rows::{self, Dropout, Dtype};
use crate::engine::model::pass::Mask;
use crate::engine::ops::RopeTable;
use crate::engine::ops::slices::{Heads, TokenScore};
use crate::spec::ComputeDtype;
use crate::spec::footprint::CUDA_MAX_LOGITS;

pub use decode::{Cache, Picked};
pub use flat::{Flat, Moments};
use tensor::Table;
pub use tensor::{Angles, Tensor, Vector, Weight};

/// Layouts of packed batches that are kept: one for each window of a batch.
const MAX_LAYOUTS: usize = 4;

/// The most that any GPU's buffers have taken so far, of those that are no longer in use.
static PEAK_BYTES: AtomicU64 = AtomicU64::new(0);

/// The most that the buffers of a GPU took, of all that this process has used and left, in bytes.
pub fn peak_bytes() -> u64 {
    PEAK_BYTES.load(Ordering::Relaxed)
}

/// A GPU and how it is used. Clones share the device and what is kept on it.
#[derive(Clone, Debug)]
pub struct Cuda {
    device: Device,
    dtype: ComputeDtype,
    gemm: Gemm,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    device: Device,
    /// What may be used of its memory, in bytes.
    memory_bytes: u64,
    kept: Mutex<Kept>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        PEAK_BYTES.fetch_max(self.device.memory().peak, Ordering::Relaxed);
    }
}

/// What several layers read.
#[derive(Debug, Default)]
struct Kept {
    /// The angles' table, and where it lies.
    table: Option<(Arc<RopeTable>, Arc<Table>)>,
    layouts: Vec<Arc<Layout>>,
}

impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Input(why) => EngineError::Input(why),
            CudaError::OutOfMemory { requested, used, total } => {
                let mib = |bytes: u64| bytes.div_ceil(1 << 20);
                // Pieces that are too small take less than that.
                let by_others = total.saturating_sub(used.saturating_add(requested)) > total / 4;
                let what = format!(
                    "{} MiB more than the {} in use of {} MiB{}",
                    mib(requested),
                    mib(used),
                    mib(total),
                    if by_others {
                        ", the rest of which other processes use; --gpu-memory keeps rlood to a share"
                    } else {
                        ""
                    }
                );
                EngineError::OutOfMemory(what)
            }
            CudaError::Unavailable(why) | CudaError::Failed(why) => EngineError::Device(why),
        }
    }
}

impl Cuda {
    /// The GPU of this number. f32 is exact; bf16 is fast, unless `RLOOD_CUDA_EXACT=1` asks for exact products
    /// (`RLOOD_CUDA_EXACT=0`: fast ones in f32 as well). `RLOOD_GPU_MEMORY` bounds what it may take of the GPU's memory.
    ///
    /// # Errors
    /// When there is no such device, or this build holds no kernels.
    pub fn open(ordinal: u32, dtype: ComputeDtype) -> Result<Cuda> {
        let gemm = match (std::env::var("RLOOD_CUDA_EXACT").ok().as_deref(), dtype) {
            (Some("1"), _) | (None, ComputeDtype::F32) => Gemm::Exact,
            (Some("0"), _) | (None, ComputeDtype::Bf16) => Gemm::Fast,
            (Some(other), _) => {
                return Err(EngineError::Input(format!("RLOOD_CUDA_EXACT={other:?}: use 1 (exact) or 0 (fast)")));
            }
        };
        let device = Device::open(ordinal as usize)?;
        let limit = match std::env::var(GPU_MEMORY).ok().filter(|size| !size.is_empty()) {
            Some(size) => parse_size_of(GPU_MEMORY, &size).map_err(|error| EngineError::Input(error.to_string()))?,
            None => None,
        };
        Ok(Cuda::limited(device, dtype, gemm, limit))
    }

    /// This device, with this precision and these products.
    pub fn with(device: Device, dtype: ComputeDtype, gemm: Gemm) -> Cuda {
        Cuda::limited(device, dtype, gemm, None)
    }

    fn limited(device: Device, dtype: ComputeDtype, gemm: Gemm, limit: Option<u64>) -> Cuda {
        let total = device.memory().total;
        device.set_memory_limit(limit);
        let memory_bytes = limit.map_or(total, |limit| limit.min(total));
        let shared = Shared { device: device.clone(), memory_bytes, kept: Mutex::default() };
        Cuda { device, dtype, gemm, shared: Arc::new(shared) }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The precision of its matrices.
    pub fn dtype(&self) -> ComputeDtype {
        self.dtype
    }

    /// What may be used of its memory, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.shared.memory_bytes
    }

    /// Of weights, and of what flows between products.
    fn compute(&self) -> Dtype {
        match self.dtype {
            ComputeDtype::F32 => Dtype::F32,
            ComputeDtype::Bf16 => Dtype::Bf16,
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.shared.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The table of angles on the device.
    fn table(&self, table: &Arc<RopeTable>) -> Result<Arc<Table>> {
        let mut kept = self.kept();
        if let Some((host, device)) = &kept.table
            && Arc::ptr_eq(host, table)
        {
            return Ok(device.clone());
        }
        kept.table = None;
        let device = Arc::new(Table::new(&self.device, table)?);
        kept.table = Some((table.clone(), device.clone()));
        Ok(device)
    }

    /// Where the groups of a packed batch lie.
    fn layout(&self, attention: &Attention<'_>) -> Result<Arc<Layout>> {
        let Attention { heads, packing, window } = *attention;
        let mut kept = self.kept();
        if let Some(layout) = kept.layouts.iter().find(|layout| layout.is_for(heads, &packing.groups, window)) {
            return Ok(layout.clone());
        }
        if kept.layouts.len() == MAX_LAYOUTS {
            kept.layouts.remove(0);
        }
        let layout = Arc::new(Layout::new(&self.device, heads, &packing.groups, window)?);
        kept.layouts.push(layout.clone());
        Ok(layout)
    }

    fn head<'a>(&self, weight: &'a Weight) -> Head<'a> {
        Head { weight: weight.rows(), gemm: self.gemm, max_logits: CUDA_MAX_LOGITS as usize }
    }

    /// The keys of what each module's input loses.
    fn masks(&self, masks: &[Mask<'_>]) -> Result<Vec<(Buffer, u64, f32)>> {
        let upload = |mask: &Mask<'_>| {
            let (threshold, scale) = mask.law();
            Ok((self.device.upload(&mask.words())?, threshold, scale))
        };
        masks.iter().map(upload).collect()
    }
}

fn dropouts(masks: &[(Buffer, u64, f32)]) -> Vec<Dropout<'_>> {
    masks.iter().map(|(keys, threshold, scale)| Dropout { keys, threshold: *threshold, scale: *scale }).collect()
}

fn rope<'a>(rotation: &'a Rotation<'a, Cuda>) -> Rope<'a> {
    let Angles { table, positions } = rotation.angles;
    let qk_norm = rotation.qk_norm.map(|(q, k, eps)| QkNorm { q: q.rows(), k: k.rows(), eps });
    Rope { heads: rotation.heads, qk_norm, cos: table.cos(), sin: table.sin(), positions }
}

impl Backend for Cuda {
    type Tensor = Tensor;
    type Vector = Vector;
    type Weight = Weight;
    type Adapter = Arc<lora::Adapter>;
    type Angles = Angles;
    type Cache = Cache;
    type Flat = Flat;
    type Softmax = Tensor;
    type Normalizers = Normalizers;
    type Picked = Picked;

    fn samples_exactly(&self) -> bool {
        self.gemm == Gemm::Exact
    }

    fn release(&self) {
        self.kept().layouts.clear();
        self.device.trim();
    }

    fn vector(&self, values: Vec<f32>) -> Result<Vector> {
        Vector::new(&self.device, &values)
    }

    fn weight(&self, values: Vec<f32>, inputs: usize, bias: Option<Vec<f32>>) -> Result<Weight> {
        Weight::new(&self.device, self.compute(), values, inputs, bias)
    }

    fn vector_of(&self, parameters: &Flat, place: Range<usize>) -> Result<Vector> {
        Vector::of(&self.device, parameters.vector(place.start, place.len()))
    }

    fn weight_of(&self, parameters: &Flat, modules: &[FullSlot], inputs: usize) -> Result<Weight> {
        Weight::of(&self.device, self.compute(), parameters, modules, inputs)
    }

    fn adapter(&self, parameters: &Flat, shape: &AdapterShape) -> Result<Arc<lora::Adapter>> {
        let AdapterShape { inputs, outputs, r, scaling, blocks } = shape;
        let blocks = blocks.iter().map(|block| (block.outputs.clone(), block.a, block.b)).collect();
        let values = parameters.buffer();
        let factors = Factors { values, inputs: *inputs, outputs: *outputs, r: *r, scaling: *scaling, blocks };
        Ok(Arc::new(lora::Adapter::new(&self.device, self.compute(), &factors)?))
    }

    fn zeros(&self, len: usize) -> Result<super::Flat> {
        Ok(super::Flat::Cuda(Flat::zeros(&self.device, len)?))
    }

    fn hold(&self, values: super::Flat) -> Result<super::Flat> {
        match values {
            super::Flat::Host(values) => Ok(super::Flat::Cuda(Flat::new(&self.device, &values)?)),
            super::Flat::Cuda(flat) => Ok(super::Flat::Cuda(flat)),
        }
    }

    fn held<'f>(&self, flat: &'f super::Flat) -> Result<&'f Flat> {
        match flat {
            super::Flat::Cuda(flat) => Ok(flat),
            super::Flat::Host(_) => Err(elsewhere()),
        }
    }

    fn held_mut<'f>(&self, flat: &'f mut super::Flat) -> Result<&'f mut Flat> {
        match flat {
            super::Flat::Cuda(flat) => Ok(flat),
            super::Flat::Host(_) => Err(elsewhere()),
        }
    }

    fn values(&self, x: &Tensor) -> Result<Vec<f32>> {
        x.values(&self.device)
    }

    fn embed(&self, table: &Weight, ids: &[u32]) -> Result<Tensor> {
        let out = Tensor::new(&self.device, ids.len(), table.rows().width, Dtype::F32)?;
        rows::select(&self.device, table.rows(), ids, out.rows())?;
        Ok(out)
    }

    fn embed_step(&self, table: &Weight, cache: &mut Cache, tokens: Tokens<'_>) -> Result<Tensor> {
        let out = Tensor::new(&self.device, tokens.count(), table.rows().width, Dtype::F32)?;
        rows::select_by(&self.device, table.rows(), cache.tokens()?, out.rows())?;
        Ok(out)
    }

    fn embed_vjp(&self, ids: &[u32], dy: &Tensor, gradient: &mut Flat, at: usize) -> Result<()> {
        let rows = ids.iter().max().map_or(0, |id| *id as usize + 1);
        Ok(rows::scatter_add(&self.device, dy.rows(), ids, gradient.matrix(at, rows, dy.width()))?)
    }

    fn select(&self, x: &Tensor, rows: &[u32]) -> Result<Tensor> {
        let out = Tensor::new(&self.device, rows.len(), x.width(), x.dtype())?;
        rows::select(&self.device, x.rows(), rows, out.rows())?;
        Ok(out)
    }

    fn spread(&self, x: &Tensor, rows: &[u32], count: usize) -> Result<Tensor> {
        let out = Tensor::zeros(&self.device, count, x.width(), Dtype::F32)?;
        rows::scatter_add(&self.device, x.rows(), rows, out.rows())?;
        Ok(out)
    }

    fn stack(&self, parts: &[&Tensor]) -> Result<Tensor> {
        let Some(first) = parts.first() else { return Err(EngineError::Input("nothing to stack".to_owned())) };
        let count = parts.iter().map(|part| part.count()).sum();
        let out = Tensor::new(&self.device, count, first.width(), first.dtype())?;
        let mut begin = 0;
        for part in parts {
            let end = begin + part.count();
            rows::copy(&self.device, part.rows(), out.rows().part(begin..end))?;
            begin = end;
        }
        Ok(out)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Vector, eps: f32) -> Result<Tensor> {
        let out = Tensor::new(&self.device, x.count(), x.width(), self.compute())?;
        norm::rms_norm(&self.device, x.rows(), weight.rows(), eps, out.rows())?;
        Ok(out)
    }

    fn rms_norm_vjp(
        &self,
        x: &Tensor,
        weight: &Vector,
        eps: f32,
        dy: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let dx = Tensor::new(&self.device, x.count(), x.width(), Dtype::F32)?;
        let residual = residual.map(Tensor::rows);
        let backward = NormBackward { x: x.rows(), weight: weight.rows(), eps, dy: dy.rows(), residual };
        norm::rms_norm_vjp(&self.device, backward, dx.rows())?;
        Ok(dx)
    }

    fn rms_norm_weight_vjp(&self, x: &Tensor, eps: f32, dy: &Tensor, gradient: &mut Flat, at: usize) -> Result<()> {
        Ok(norm::rms_norm_weight_vjp(&self.device, x.rows(), eps, dy.rows(), gradient.vector(at, x.width()))?)
    }

    fn linear(
        &self,
        x: &Tensor,
        weight: &Weight,
        adapter: Option<AdapterPass<'_, Self>>,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let dtype = if residual.is_some() { Dtype::F32 } else { self.compute() };
        let out = Tensor::new(&self.device, x.count(), weight.outputs(), dtype)?;
        let masks = self.masks(adapter.as_ref().map_or(&[], |pass| pass.masks))?;
        let adapter = adapter.as_ref().map(|pass| &**pass.adapter);
        let linear = Linear { weight: weight.rows(), bias: weight.bias(), adapter, dropout: &dropouts(&masks) };
        lora::linear(&self.device, self.gemm, &linear, x.rows(), residual.map(Tensor::rows), out.rows())?;
        Ok(out)
    }

    fn linear_vjp(&self, linear: &LinearBackward<'_, Self>, gradient: &mut Flat) -> Result<Tensor> {
        let LinearBackward { x, dy, weight, adapter, full } = linear;
        let dx = Tensor::new(&self.device, x.count(), x.width(), self.compute())?;
        let (pass, slots) = match adapter {
            Some(AdapterBackward { pass, slots }) => (Some(pass), *slots),
            None => (None, &[][..]),
        };
        let masks = self.masks(pass.map_or(&[], |pass| pass.masks))?;
        let trained = |slot: &FullSlot| {
            let FullSlot { outputs, weight, bias } = slot;
            Trained { outputs: outputs.clone(), weight: *weight, bias: *bias }
        };
        let backward = lora::LinearBackward {
            linear: Linear {
                weight: weight.rows(),
                bias: weight.bias(),
                adapter: pass.map(|pass| &**pass.adapter),
                dropout: &dropouts(&masks),
            },
            x: x.rows(),
            dy: dy.rows(),
            slots,
            full: &full.iter().map(trained).collect::<Vec<Trained>>(),
            gradient: gradient.buffer(),
        };
        lora::linear_vjp(&self.device, self.gemm, &backward, dx.rows())?;
        Ok(dx)
    }

    fn angles(&self, table: &Arc<RopeTable>, positions: &[usize]) -> Result<Angles> {
        let positions: Vec<u32> = positions.iter().map(|position| *position as u32).collect();
        Ok(Angles { table: self.table(table)?, positions: self.device.upload(&positions)? })
    }

    fn rotate(&self, rotation: &Rotation<'_, Self>, qkv: &Tensor) -> Result<Tensor> {
        let out = Tensor::new(&self.device, qkv.count(), qkv.width(), qkv.dtype())?;
        rope::rotate(&self.device, &rope(rotation), qkv.rows(), out.rows())?;
        Ok(out)
    }

    fn rotate_vjp(&self, rotation: &Rotation<'_, Self>, qkv: Option<&Tensor>, dy: &Tensor) -> Result<Tensor> {
        let dx = Tensor::new(&self.device, dy.count(), dy.width(), dy.dtype())?;
        rope::rotate_vjp(&self.device, &rope(rotation), qkv.map(Tensor::rows), dy.rows(), dx.rows())?;
        Ok(dx)
    }

    fn rotate_weight_vjp(
        &self,
        rotation: &Rotation<'_, Self>,
        qkv: &Tensor,
        dy: &Tensor,
        gradient: &mut Flat,
        at: (usize, usize),
    ) -> Result<()> {
        let width = rotation.heads.head_dim;
        let slots = (gradient.vector(at.0, width), gradient.vector(at.1, width));
        Ok(rope::rotate_weight_vjp(&self.device, &rope(rotation), qkv.rows(), dy.rows(), slots)?)
    }

    fn check_trainable(&self, heads: &Heads) -> Result<()> {
        Ok(attention::check_trainable(&self.device, heads, self.compute())?)
    }

    fn attend(&self, attention: &Attention<'_>, qkv: &Tensor) -> Result<(Tensor, Tensor)> {
        let layout = self.layout(attention)?;
        let heads = attention.heads;
        let out = Tensor::new(&self.device, qkv.count(), heads.q_width(), qkv.dtype())?;
        let softmax = Tensor::new(&self.device, qkv.count(), heads.num_heads, Dtype::F32)?;
        attention::attend(&self.device, &layout, qkv.rows(), out.rows(), softmax.rows())?;
        Ok((out, softmax))
    }

    fn attend_vjp(&self, backward: &AttentionBackward<'_, Self>) -> Result<Tensor> {
        let AttentionBackward { attention, qkv, out, softmax, dy } = backward;
        let layout = self.layout(attention)?;
        let d_qkv = Tensor::new(&self.device, qkv.count(), qkv.width(), qkv.dtype())?;
        let backward = attention::Backward {
            layout: &layout,
            qkv: qkv.rows(),
            out: out.rows(),
            softmax: softmax.rows(),
            dy: dy.rows(),
        };
        attention::attend_vjp(&self.device, &backward, d_qkv.rows())?;
        Ok(d_qkv)
    }

    fn cache(&self, heads: &Heads, num_layers: usize) -> Cache {
        Cache::new(heads, num_layers, self.compute())
    }

    fn cache_prompts(&self, cache: &mut Cache, lengths: &[usize]) -> Result<usize> {
        Ok(cache.made(&self.device)?.announce(lengths)?)
    }

    fn fill_prompts(&self, cache: &mut Cache, first: usize, layer: usize, qkv: &Tensor) -> Result<()> {
        Ok(cache.made(&self.device)?.fill(first, layer, qkv.rows())?)
    }

    fn cache_rows(&self, cache: &mut Cache, prompt: usize, copies: usize, max_new_tokens: usize) -> Result<()> {
        Ok(cache.made(&self.device)?.add_rows(prompt, copies, max_new_tokens)?)
    }

    fn close_prompts(&self, cache: &mut Cache) {
        cache.close();
    }

    fn attend_cached(
        &self,
        heads: &Heads,
        cache: &mut Cache,
        layer: usize,
        window: Option<usize>,
        qkv: &Tensor,
    ) -> Result<Tensor> {
        let out = Tensor::new(&self.device, qkv.count(), heads.q_width(), qkv.dtype())?;
        cache.made(&self.device)?.attend(layer, window, qkv.rows(), out.rows())?;
        Ok(out)
    }

    fn retain(&self, cache: &mut Cache, keep: &[bool]) {
        cache.retain(keep);
    }

    fn step(
        &self,
        cache: &mut Cache,
        step: &Step<'_>,
        body: impl FnMut(&mut Cache, &Step<'_>) -> Result<Stepped<Self>>,
    ) -> Result<Stepped<Self>> {
        self.recorded_step(cache, step, body)
    }

    fn silu_mul(&self, gate_up: &Tensor) -> Result<Tensor> {
        let out = Tensor::new(&self.device, gate_up.count(), gate_up.width() / 2, gate_up.dtype())?;
        mlp::silu_mul(&self.device, gate_up.rows(), out.rows())?;
        Ok(out)
    }

    fn silu_mul_vjp(&self, gate_up: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let out = Tensor::new(&self.device, gate_up.count(), gate_up.width(), gate_up.dtype())?;
        mlp::silu_mul_vjp(&self.device, gate_up.rows(), dy.rows(), out.rows())?;
        Ok(out)
    }

    fn score(
        &self,
        x: &Tensor,
        head: &Weight,
        targets: &[u32],
        temperature: f64,
    ) -> Result<(Vec<TokenScore>, Normalizers)> {
        Ok(head::score(&self.device, &self.head(head), x.rows(), targets, temperature)?)
    }

    fn score_vjp(&self, backward: &HeadBackward<'_, Self>, gradient: &mut Flat) -> Result<Tensor> {
        let HeadBackward { x, head, targets, temperature, normalizers, g, at } = *backward;
        let dx = Tensor::new(&self.device, x.count(), x.width(), x.dtype())?;
        let d_weight = at.map(|at| gradient.matrix(at, head.outputs(), x.width()));
        let backward = head::Backward { x: x.rows(), targets, temperature, normalizers, g, d_weight };
        head::score_vjp(&self.device, &self.head(head), &backward, dx.rows())?;
        Ok(dx)
    }

    fn choose(&self, x: &Tensor, head: &Weight, choice: Choice<'_>, chosen: &mut Vec<Chosen>) -> Result<()> {
        *chosen = head::choose(&self.device, &self.head(head), x.rows(), choice.picks, &choice.filters)?;
        Ok(())
    }

    fn pick_ahead(
        &self,
        cache: &mut Cache,
        x: impl FnOnce() -> Result<Tensor>,
        head: &Weight,
        choice: Choice<'_>,
    ) -> Result<Option<Picked>> {
        let Choice { picks, filters } = choice;
        head::begin_choose(&self.device, &self.head(head), x()?.rows(), picks, &filters, cache.tokens()?)?;
        Ok(Some(Picked::begun()))
    }

    fn picked(&self, picked: &Picked) -> Result<Vec<Chosen>> {
        picked.wait()
    }

    fn logits(&self, x: &Tensor, head: &Weight) -> Result<Tensor> {
        let out = Tensor::new(&self.device, x.count(), head.outputs(), Dtype::F32)?;
        head::logits(&self.device, &self.head(head), x.rows(), out.rows())?;
        Ok(out)
    }
}
