//! What each kernel of a GPU takes in one piece of work.

use serde::{Deserialize, Serialize};

use super::BenchError;
use crate::engine::model::Policy;

/// Kernels that are named, the longest first.
#[cfg(feature = "cuda")]
const NAMED: usize = 25;

/// One piece of work, kernel by kernel. No graphs are used meanwhile, so that the wall clock says more than usual.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProfileFigures {
    /// Seconds by the wall, moments between the kernels included.
    pub wall_s: f64,
    /// Seconds of all kernels.
    pub kernels_s: f64,
    /// Launches of all kernels.
    pub launches: u64,
    /// Different kernels.
    pub different: usize,
    /// The longest.
    pub kernels: Vec<KernelTime>,
}

/// All launches of one kernel.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KernelTime {
    /// Its name, or `cublas`, `upload`, `copy`, `zero`.
    pub name: String,
    /// Launches.
    pub count: u64,
    /// Seconds of them all.
    pub seconds: f64,
    /// Of the seconds of all kernels.
    pub share: f64,
}

/// Carries out some work under a profile; without one, and not at all, on the processor.
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

/// There is no GPU in this build.
#[cfg(not(feature = "cuda"))]
pub(super) fn profile(
    _policy: &Policy,
    _work: impl FnOnce() -> Result<(), BenchError>,
) -> Result<Option<ProfileFigures>, BenchError> {
    Ok(None)
}
