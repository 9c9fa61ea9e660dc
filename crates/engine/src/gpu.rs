//! The GPUs of this machine, as the driver reports them without opening any.

use std::sync::atomic::{AtomicU64, Ordering};

/// Memory limit in bytes; 0 = no limit.
static MEMORY_LIMIT: AtomicU64 = AtomicU64::new(0);

/// Limits the memory that this process takes on each GPU opened from now on, in bytes; None = no limit.
pub fn limit_memory(bytes: Option<u64>) {
    MEMORY_LIMIT.store(bytes.unwrap_or(0), Ordering::Relaxed);
}

/// The memory that this process may take on a GPU, in bytes; None = no limit.
pub fn memory_limit() -> Option<u64> {
    Some(MEMORY_LIMIT.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
}

/// A GPU that the driver reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Index of the GPU: the N of `cuda:N`.
    pub ordinal: u32,
    /// The driver's name for the GPU.
    pub name: String,
    /// Total memory of the GPU in bytes.
    pub memory_bytes: u64,
    /// Compute capability: major and minor number.
    pub compute_capability: (u32, u32),
}

impl std::fmt::Display for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Gpu { ordinal, name, memory_bytes, compute_capability: (major, minor) } = self;
        write!(f, "cuda:{ordinal} {name}, {} MiB, compute capability {major}.{minor}", memory_bytes >> 20)
    }
}

/// Lists all GPUs of this machine.
///
/// # Errors
/// Says why the list is not available: this build has no CUDA, or the machine has no driver.
#[cfg(feature = "cuda")]
pub fn list() -> Result<Vec<Gpu>, String> {
    use super::kernels::cuda::driver::{Device, Properties};
    let of = |ordinal: usize| {
        let Properties { name, memory_bytes, compute_capability, .. } = Device::describe(ordinal)?;
        Ok(Gpu { ordinal: ordinal as u32, name, memory_bytes, compute_capability })
    };
    let all = Device::count().and_then(|count| (0..count).map(of).collect());
    all.map_err(|error: super::kernels::cuda::driver::CudaError| error.to_string())
}

/// Lists no GPUs, because this build has no CUDA.
///
/// # Errors
/// Always fails, because this build has no CUDA.
#[cfg(not(feature = "cuda"))]
pub fn list() -> Result<Vec<Gpu>, String> {
    Err("this build has no CUDA".to_owned())
}

/// Memory in bytes of the smallest of these GPUs.
///
/// # Errors
/// Fails if one of the GPUs does not exist.
pub fn smallest(ordinals: &[u32]) -> Result<u64, String> {
    let all = list()?;
    let memory = ordinals.iter().map(|ordinal| {
        let missing = || match all.len() {
            0 => format!("there is no cuda:{ordinal}: the driver lists no GPU"),
            count => format!("there is no cuda:{ordinal}: the driver lists cuda:0 to cuda:{}", count - 1),
        };
        all.iter().find(|gpu| gpu.ordinal == *ordinal).map(|gpu| gpu.memory_bytes).ok_or_else(missing)
    });
    memory.collect::<Result<Vec<u64>, String>>().map(|memory| memory.into_iter().min().unwrap_or(0))
}

/// Opens a GPU as a worker would and loads the kernels. Returns a description of the GPU.
///
/// # Errors
/// Says why a worker could not use the GPU.
#[cfg(feature = "cuda")]
pub fn try_open(ordinal: u32) -> Result<String, String> {
    use super::kernels::cuda::driver::Device;
    let device = Device::open(ordinal as usize).map_err(|error| format!("cuda:{ordinal}: {error}"))?;
    let properties = device.properties();
    let (major, minor) = properties.compute_capability;
    Ok(format!(
        "cuda:{ordinal} {}, {} MiB, compute capability {major}.{minor}",
        properties.name,
        properties.memory_bytes >> 20
    ))
}

/// Opens no GPU, because this build has no CUDA.
///
/// # Errors
/// Always fails, because this build has no CUDA.
#[cfg(not(feature = "cuda"))]
pub fn try_open(ordinal: u32) -> Result<String, String> {
    Err(format!("cuda:{ordinal} needs a build with CUDA; this build has none"))
}
