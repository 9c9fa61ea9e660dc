//! The backend for an NVIDIA GPU: tensors stay on the device, operations are queued on its single stream, and the host
//! waits only for results it needs.
//!
//! Weights and the inputs of matrix products have the compute type (f32 or bf16). The residual stream, its gradient,
//! the statistics of norms and softmax, logits and the gradients of parameters are f32. With [`Gemm::Exact`] our own
//! kernels compute the products, and a row's bits do not depend on the other rows: sampling and training agree bit for
//! bit. With [`Gemm::Fast`] cuBLAS computes them, and the training forward recomputes the old log-probs.

mod compute;
mod decode;
mod flat;
mod tensor;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::flat::elsewhere;
use super::{Attention, Buffers, FullSlot};
use crate::error::{EngineError, Result};
use crate::kernels::cuda::attention::Layout;
use crate::kernels::cuda::driver::{CudaError, Device};
use crate::kernels::cuda::gemm::Gemm;
use crate::kernels::cuda::head::Head;
use crate::kernels::cuda::rows::Dtype;
use crate::ops::RopeTable;
use crate::spec::ComputeDtype;
use crate::spec::footprint::CUDA_MAX_LOGITS;

pub use decode::{Cache, PendingChoice};
pub use flat::{Flat, Moments};
use tensor::Table;
pub use tensor::{Angles, Tensor, Vector, Weight};

const _: () = assert!(
    crate::kernels::cuda::KEPT_FREE_BYTES == crate::spec::footprint::CUDA_KEPT_FREE_BYTES,
    "spec::footprint and the kernels must use the same amount for the GPU memory that stays free"
);

/// Maximum number of cached batch layouts: one for each attention window that a packed batch is used with.
const MAX_LAYOUTS: usize = 4;

/// Peak memory of all GPU backends that were dropped, in bytes.
static PEAK_BYTES: AtomicU64 = AtomicU64::new(0);

/// The peak memory of any GPU backend that this process has used and dropped, in bytes.
pub fn peak_bytes() -> u64 {
    PEAK_BYTES.load(Ordering::Relaxed)
}

/// A GPU and its settings. Clones share the device and its cached data.
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
    /// Maximum GPU memory that may be used, in bytes.
    memory_bytes: u64,
    kept: Mutex<Kept>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        PEAK_BYTES.fetch_max(self.device.memory().peak, Ordering::Relaxed);
    }
}

/// Data on the device that several layers read, cached.
#[derive(Debug, Default)]
struct Kept {
    /// The table of rotary angles, on the host and on the device.
    table: Option<(Arc<RopeTable>, Arc<Table>)>,
    layouts: Vec<Arc<Layout>>,
}

impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Input(why) => EngineError::Input(why),
            CudaError::OutOfMemory { requested, used, total } => {
                let mib = |bytes: u64| bytes.div_ceil(1 << 20);
                // Fragmentation accounts for less than a quarter of the GPU's memory; a larger gap
                // belongs to other processes.
                let by_others = total.saturating_sub(used.saturating_add(requested)) > total / 4;
                let what = format!(
                    "{} MiB requested, {} of {} MiB in use{}",
                    mib(requested),
                    mib(used),
                    mib(total),
                    if by_others {
                        "; other processes use the rest (--gpu-memory limits the share of rlood)"
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
    /// Opens the GPU with this index. f32 uses exact products; bf16 uses fast ones unless `RLOOD_CUDA_EXACT=1` requests
    /// exact products (`RLOOD_CUDA_EXACT=0` requests fast ones for f32 too). [`limit_memory`](crate::gpu::limit_memory)
    /// limits the GPU memory it may take.
    ///
    /// # Errors
    /// Fails if the GPU does not exist, or this build contains no kernels.
    pub fn open(ordinal: u32, dtype: ComputeDtype) -> Result<Cuda> {
        let gemm = match (std::env::var("RLOOD_CUDA_EXACT").ok().as_deref(), dtype) {
            (Some("1"), _) | (None, ComputeDtype::F32) => Gemm::Exact,
            (Some("0"), _) | (None, ComputeDtype::Bf16) => Gemm::Fast,
            (Some(other), _) => {
                return Err(EngineError::Input(format!("RLOOD_CUDA_EXACT={other:?}: use 1 (exact) or 0 (fast)")));
            }
        };
        let device = Device::open(ordinal as usize)?;
        Ok(Cuda::limited(device, dtype, gemm, crate::gpu::memory_limit()))
    }

    /// Creates a backend for this device with the given precision and products.
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

    /// The device that this backend uses.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The precision of the matrices.
    pub fn dtype(&self) -> ComputeDtype {
        self.dtype
    }

    /// Maximum GPU memory that may be used, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.shared.memory_bytes
    }

    /// The type of weights and of the inputs of matrix products: f32 or bf16.
    fn compute(&self) -> Dtype {
        match self.dtype {
            ComputeDtype::F32 => Dtype::F32,
            ComputeDtype::Bf16 => Dtype::Bf16,
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.shared.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the table of rotary angles on the device; uploads it if necessary.
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

    /// Returns the layout of a packed batch (positions of its groups) on the device; uploads it if necessary.
    fn layout(&self, attention: &Attention<'_>) -> Result<Arc<Layout>> {
        let Attention { heads, groups, visible: _, window } = *attention;
        let mut kept = self.kept();
        if let Some(layout) = kept.layouts.iter().find(|layout| layout.is_for(heads, groups, window)) {
            return Ok(layout.clone());
        }
        if kept.layouts.len() == MAX_LAYOUTS {
            kept.layouts.remove(0);
        }
        let layout = Arc::new(Layout::new(&self.device, heads, groups, window)?);
        kept.layouts.push(layout.clone());
        Ok(layout)
    }

    fn head<'a>(&self, weight: &'a Weight) -> Head<'a> {
        Head { weight: weight.rows(), gemm: self.gemm, max_logits: CUDA_MAX_LOGITS as usize }
    }
}

impl Buffers for Cuda {
    type Tensor = Tensor;
    type Vector = Vector;
    type Weight = Weight;
    type FlatBuffer = Flat;

    fn release_cached(&self) {
        self.kept().layouts.clear();
        self.device.trim();
    }

    fn upload_vector(&self, values: Vec<f32>) -> Result<Vector> {
        Vector::new(&self.device, &values)
    }

    fn upload_weight(&self, values: Vec<f32>, inputs: usize, bias: Option<Vec<f32>>) -> Result<Weight> {
        Weight::new(&self.device, self.compute(), values, inputs, bias)
    }

    fn vector_from(&self, parameters: &Flat, place: Range<usize>, offset: f32) -> Result<Vector> {
        if offset != 0.0 {
            return Err(compute::no_kernel("training the weights of norms that add an offset to them"));
        }
        Vector::of(&self.device, parameters.vector(place.start, place.len()))
    }

    fn weight_from(&self, parameters: &Flat, modules: &[FullSlot], inputs: usize) -> Result<Weight> {
        Weight::of(&self.device, self.compute(), parameters, modules, inputs)
    }

    fn alloc_zeroed(&self, len: usize) -> Result<super::Flat> {
        Ok(super::Flat::Cuda(Flat::zeros(&self.device, len)?))
    }

    fn upload(&self, values: super::Flat) -> Result<super::Flat> {
        match values {
            super::Flat::Host(values) => Ok(super::Flat::Cuda(Flat::new(&self.device, &values)?)),
            super::Flat::Cuda(flat) => Ok(super::Flat::Cuda(flat)),
        }
    }

    fn device_buffer<'f>(&self, flat: &'f super::Flat) -> Result<&'f Flat> {
        match flat {
            super::Flat::Cuda(flat) => Ok(flat),
            super::Flat::Host(_) => Err(elsewhere()),
        }
    }

    fn device_buffer_mut<'f>(&self, flat: &'f mut super::Flat) -> Result<&'f mut Flat> {
        match flat {
            super::Flat::Cuda(flat) => Ok(flat),
            super::Flat::Host(_) => Err(elsewhere()),
        }
    }

    fn download(&self, x: &Tensor) -> Result<Vec<f32>> {
        x.values(&self.device)
    }
}
