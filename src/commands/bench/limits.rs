//! What the machine can do at most: sequential reads of memory and multiply-adds in registers, or on a GPU copies and
//! matrix products.

#[cfg(feature = "cuda")]
mod gpu;

use serde::{Deserialize, Serialize};

use super::BenchError;
use crate::config::{Device, Precision};
use crate::engine::error::EngineError;
use crate::engine::kernels::isa::Isa;
use crate::engine::kernels::limits::{peak_gflops, read_gb_s};
use crate::engine::kernels::threads::Threads;

/// Bytes that are read in one go.
const READ_BYTES: usize = 1 << 30;

/// The limits of what is measured on.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Limits {
    /// `cpu`.
    Processor(ProcessorLimits),
    /// `cuda:N`.
    Gpu(GpuLimits),
}

/// The processor's, all threads together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProcessorLimits {
    /// The rung of kernels that this machine runs.
    pub isa: String,
    /// Compute threads.
    pub threads: usize,
    /// Sequential read of 1 GiB, 1e9 bytes a second.
    pub read_gb_s: f64,
    /// Multiply-adds of 32 bits, 1e9 operations a second.
    pub fma_gflop_s: f64,
    /// Products of bf16 tiles, where the machine has them.
    pub amx_gflop_s: Option<f64>,
    /// Multiply-adds of pairs of bf16 (AVX512-BF16), 1e9 operations a second, where that rung is used.
    #[serde(default)]
    pub avx512_bf16_gflop_s: Option<f64>,
}

/// A GPU's, as its driver and cuBLAS reach them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GpuLimits {
    /// `cuda:N`.
    pub device: String,
    /// As the driver names it.
    pub name: String,
    /// As in 9.0.
    pub compute_capability: String,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Of CUDA that the driver supports, as 1000 major + 10 minor.
    pub driver_version: u32,
    /// These are not a GPU's figures: the CPU emulates one, for tests.
    pub emulated: bool,
    /// Seconds until it was ready: long where the driver had to compile the kernels.
    pub open_s: f64,
    /// Its memory, bytes.
    pub memory_bytes: u64,
    /// Bytes that were copied in one go.
    pub copy_bytes: u64,
    /// Copies within its memory, bytes read and written together, 1e9 a second.
    pub copy_gb_s: f64,
    /// Products of bf16 matrices with sums of 32 bits; None where another part has no use for them.
    pub bf16: Option<GemmPeak>,
    /// Products of f32 matrices; the same.
    pub f32: Option<GemmPeak>,
}

/// The fastest product of square matrices.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct GemmPeak {
    /// Their side.
    pub n: usize,
    /// 1e9 operations a second.
    pub gflop_s: f64,
}

/// Measures all of them; of a GPU with `only` the products of this precision, of one size.
///
/// # Errors
/// When `RLOOD_ISA` names no rung of this machine, or the device cannot be used.
pub fn measure(device: Device, threads: usize, only: Option<Precision>) -> Result<Limits, BenchError> {
    match device {
        Device::Cpu => Ok(Limits::Processor(processor(threads)?)),
        Device::Cuda(ordinal) => gpu(ordinal, only),
    }
}

fn processor(threads: usize) -> Result<ProcessorLimits, BenchError> {
    let team = Threads::new(threads);
    let isa = Isa::chosen().map_err(EngineError::Input)?;
    Ok(ProcessorLimits {
        isa: isa.name().to_owned(),
        threads,
        read_gb_s: read_gb_s(&team, READ_BYTES),
        fma_gflop_s: peak_gflops(isa.vectors(), &team),
        amx_gflop_s: (isa == Isa::Amx).then(|| peak_gflops(Isa::Amx, &team)),
        avx512_bf16_gflop_s: (isa == Isa::Avx512Bf16).then(|| peak_gflops(isa, &team)),
    })
}

#[cfg(feature = "cuda")]
fn gpu(ordinal: u32, only: Option<Precision>) -> Result<Limits, BenchError> {
    Ok(Limits::Gpu(gpu::measure(ordinal, only)?))
}

#[cfg(not(feature = "cuda"))]
fn gpu(ordinal: u32, _only: Option<Precision>) -> Result<Limits, BenchError> {
    let detail = format!("cuda:{ordinal} cannot be measured: this build has no CUDA");
    Err(EngineError::Input(detail).into())
}

impl Limits {
    /// Memory that a pass over the weights is bound by, 1e9 bytes a second.
    pub fn memory_gb_s(&self) -> f64 {
        match self {
            Limits::Processor(limits) => limits.read_gb_s,
            Limits::Gpu(limits) => limits.copy_gb_s,
        }
    }

    /// Operations that matrix products of this precision are bound by, 1e9 a second; None where that was not measured.
    pub fn peak_gflop_s(&self, dtype: Precision) -> Option<f64> {
        match (self, dtype) {
            (Limits::Processor(limits), Precision::Bf16) => {
                Some(limits.amx_gflop_s.or(limits.avx512_bf16_gflop_s).unwrap_or(limits.fma_gflop_s))
            }
            (Limits::Processor(limits), Precision::F32) => Some(limits.fma_gflop_s),
            (Limits::Gpu(limits), Precision::Bf16) => limits.bf16.map(|peak| peak.gflop_s),
            (Limits::Gpu(limits), Precision::F32) => limits.f32.map(|peak| peak.gflop_s),
        }
    }

    /// The processor's, where that was measured.
    pub fn processor(&self) -> Option<&ProcessorLimits> {
        match self {
            Limits::Processor(limits) => Some(limits),
            Limits::Gpu(_) => None,
        }
    }

    /// The GPU's, where one was measured.
    pub fn gpu(&self) -> Option<&GpuLimits> {
        match self {
            Limits::Processor(_) => None,
            Limits::Gpu(limits) => Some(limits),
        }
    }
}
