//! The machine's limits: sequential memory reads and multiply-adds in registers, or on a GPU copies and matrix products.

#[cfg(feature = "cuda")]
mod gpu;

use serde::{Deserialize, Serialize};

use super::BenchError;
use crate::config::{Device, Precision};
use crate::engine::error::EngineError;
use crate::engine::kernels::isa::Isa;
use crate::engine::kernels::limits::{peak_gflops, read_gb_s};
use crate::engine::kernels::threads::Threads;

/// Number of bytes that one measurement reads from memory.
const READ_BYTES: usize = 1 << 30;

/// The limits of the measured device.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Limits {
    /// Limits of the CPU.
    Processor(ProcessorLimits),
    /// Limits of a GPU.
    Gpu(GpuLimits),
}

/// Limits of the CPU with all threads together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProcessorLimits {
    /// Name of the instruction set that the kernels use.
    pub isa: String,
    /// Number of compute threads.
    pub threads: usize,
    /// Sequential read of 1 GiB, in 1e9 bytes per second.
    pub read_gb_s: f64,
    /// Multiply-adds in f32, in 1e9 operations per second.
    pub fma_gflop_s: f64,
    /// Products of bf16 tiles, in 1e9 operations per second; None without AMX.
    pub amx_gflop_s: Option<f64>,
    /// Multiply-adds of bf16 pairs (AVX512-BF16), in 1e9 operations per second; None unless that instruction set is used.
    #[serde(default)]
    pub avx512_bf16_gflop_s: Option<f64>,
}

/// Limits of a GPU, as its driver and cuBLAS reach them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GpuLimits {
    /// Name of the device, `cuda:N`.
    pub device: String,
    /// Name of the GPU as its driver reports it.
    pub name: String,
    /// Compute capability, such as 9.0.
    pub compute_capability: String,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// CUDA version that the driver supports, as 1000 major + 10 minor.
    pub driver_version: u32,
    /// Whether the GPU is emulated on the CPU for tests, so that the figures are meaningless.
    pub emulated: bool,
    /// Seconds to open the GPU; long if the driver had to compile the kernels.
    pub open_s: f64,
    /// Memory of the device, in bytes.
    pub memory_bytes: u64,
    /// Number of bytes that one copy moves.
    pub copy_bytes: u64,
    /// Copies within the device's memory, bytes read plus bytes written, in 1e9 per second.
    pub copy_gb_s: f64,
    /// Speed of bf16 matrix products with f32 sums; None if the measured parts do not use bf16.
    pub bf16: Option<GemmPeak>,
    /// Speed of f32 matrix products; None if the measured parts do not use f32.
    pub f32: Option<GemmPeak>,
}

/// The fastest measured product of two square matrices.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct GemmPeak {
    /// Number of rows and columns of the square matrices.
    pub n: usize,
    /// Speed in 1e9 operations per second.
    pub gflop_s: f64,
}

/// Measures the limits of a device. On a GPU, `only` restricts the matrix products to this precision and one size.
///
/// # Errors
/// Fails when `RLOOD_ISA` names no instruction set of this machine, or the device cannot be used.
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
    let detail = format!("the GPU cuda:{ordinal} cannot be measured: this build of rlood has no CUDA");
    Err(EngineError::Input(detail).into())
}

impl Limits {
    /// Returns the measured memory bandwidth, which limits a pass over the weights, in 1e9 bytes per second.
    pub fn memory_gb_s(&self) -> f64 {
        match self {
            Limits::Processor(limits) => limits.read_gb_s,
            Limits::Gpu(limits) => limits.copy_gb_s,
        }
    }

    /// Returns the measured limit of matrix products of this precision, in 1e9 operations per second; None if not measured.
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

    /// The CPU's limits, if they were measured.
    pub fn processor(&self) -> Option<&ProcessorLimits> {
        match self {
            Limits::Processor(limits) => Some(limits),
            Limits::Gpu(_) => None,
        }
    }

    /// The GPU's limits, if they were measured.
    pub fn gpu(&self) -> Option<&GpuLimits> {
        match self {
            Limits::Processor(_) => None,
            Limits::Gpu(limits) => Some(limits),
        }
    }
}
