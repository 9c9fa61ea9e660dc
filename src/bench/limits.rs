//! What the machine can do at most: sequential reads of memory and multiply-adds in registers.

use serde::{Deserialize, Serialize};

use super::BenchError;
use crate::engine::error::EngineError;
use crate::engine::kernels::isa::Isa;
use crate::engine::kernels::limits::{peak_gflops, read_gb_s};
use crate::engine::kernels::threads::Threads;

/// Bytes that are read in one go.
const READ_BYTES: usize = 1 << 30;

/// The limits, all threads together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Limits {
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
}

/// Measures all of them.
///
/// # Errors
/// When `RLOOD_ISA` names no rung of this machine.
pub fn measure(threads: usize) -> Result<Limits, BenchError> {
    let team = Threads::new(threads);
    let isa = Isa::chosen().map_err(EngineError::Input)?;
    Ok(Limits {
        isa: isa.name().to_owned(),
        threads,
        read_gb_s: read_gb_s(&team, READ_BYTES),
        fma_gflop_s: peak_gflops(isa.vectors(), &team),
        amx_gflop_s: (isa == Isa::Amx).then(|| peak_gflops(Isa::Amx, &team)),
    })
}
