//! Measures how long each GPU kernel runs during a part of the benchmark.

use serde::{Deserialize, Serialize};

use super::BenchError;
use crate::engine::model::Policy;

/// Maximum number of kernels to list, the slowest first.
#[cfg(feature = "cuda")]
const NAMED: usize = 25;

/// Kernel times of one operation, such as a backward pass. CUDA graphs are off while profiling, so the operation
/// takes longer than usual.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProfileFigures {
    /// Wall-clock time in seconds, including gaps between kernels.
    pub wall_s: f64,
    /// Total time of all kernels, in seconds.
    pub kernels_s: f64,
    /// Total number of kernel launches.
    pub launches: u64,
    /// Number of different kernels.
    pub different: usize,
    /// The slowest kernels, by total time.
    pub kernels: Vec<KernelTime>,
}

/// Launches of one GPU kernel, added up.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KernelTime {
    /// Name of the kernel, or `cublas`, `upload`, `copy`, `zero`.
    pub name: String,
    /// Number of times that the kernel was launched.
    pub count: u64,
    /// Total time in seconds.
    pub seconds: f64,
    /// Fraction of the total time of all kernels.
    pub share: f64,
}

/// Runs `work` with profiling and returns its kernel times. Without `--profile`, or on the CPU, returns None and
/// does not run `work`.
#[cfg(feature = "cuda")]
pub(super) fn profile(
    policy: &Policy,
    work: impl FnOnce() -> Result<(), BenchError>,
) -> Result<Option<ProfileFigures>, BenchError> {
    use crate::engine::error::EngineError;

    let Some(device) = policy.device() else { return Ok(None) };
    device.start_profile();
    let begun = std::time::Instant::now();
    let worked = work();
    let timings = device.take_profile();
    let wall_s = begun.elapsed().as_secs_f64();
    worked?;
    let timings = timings.map_err(EngineError::from)?;
    let kernels_s = timings.iter().map(|timing| timing.seconds).sum::<f64>();
    let kernel = |timing: &crate::engine::kernels::cuda::driver::Timing| KernelTime {
        name: timing.name.clone(),
        count: timing.count,
        seconds: timing.seconds,
        share: timing.seconds / kernels_s.max(f64::MIN_POSITIVE),
    };
    Ok(Some(ProfileFigures {
        wall_s,
        kernels_s,
        launches: timings.iter().map(|timing| timing.count).sum(),
        different: timings.len(),
        kernels: timings.iter().take(NAMED).map(kernel).collect(),
    }))
}

/// Returns None, because this build has no GPU support.
#[cfg(not(feature = "cuda"))]
pub(super) fn profile(
    _policy: &Policy,
    _work: impl FnOnce() -> Result<(), BenchError>,
) -> Result<Option<ProfileFigures>, BenchError> {
    Ok(None)
}
