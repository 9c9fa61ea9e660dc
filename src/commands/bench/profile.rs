//! Times of a GPU's kernels during one piece of work.

use serde::{Deserialize, Serialize};

use super::BenchError;
use crate::engine::model::Policy;

/// Maximum number of kernels to list, the slowest first.
#[cfg(feature = "cuda")]
const NAMED: usize = 25;

/// The profile of one piece of work, by kernel. It runs without CUDA graphs, so that it takes longer than usual.
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

/// All launches of one kernel.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KernelTime {
    /// Name of the kernel, or `cublas`, `upload`, `copy`, `zero`.
    pub name: String,
    /// Number of times that the kernel was launched.
    pub count: u64,
    /// Total time in seconds.
    pub seconds: f64,
    /// Fraction of the time of all kernels.
    pub share: f64,
}

/// Runs some work under a profile. Does not run it without `--profile`, or on the CPU.
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

/// Returns None: this build has no GPU support.
#[cfg(not(feature = "cuda"))]
pub(super) fn profile(
    _policy: &Policy,
    _work: impl FnOnce() -> Result<(), BenchError>,
) -> Result<Option<ProfileFigures>, BenchError> {
    Ok(None)
}
