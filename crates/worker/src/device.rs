//! Compute devices, and the machine's CPU cores and memory.

use std::fmt;
use std::str::FromStr;

/// A device to train on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The CPU of this machine.
    Cpu,
    /// The GPU with this index.
    Cuda(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl FromStr for Device {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let unknown = || DeviceError(format!("'{text}' is not a device: must be cpu or cuda:N (cuda:0, cuda:1, …)"));
        match text {
            "cpu" => Ok(Device::Cpu),
            "cuda" => Err(DeviceError("'cuda' needs a number: cuda:0 is the first GPU".to_owned())),
            other => {
                let index = other.strip_prefix("cuda:").ok_or_else(unknown)?;
                if index.is_empty() || !index.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(unknown());
                }
                let device = Device::Cuda(index.parse().map_err(|_| unknown())?);
                if cfg!(feature = "cuda") {
                    Ok(device)
                } else {
                    Err(DeviceError(format!(
                        "{device} is not available: this rlood was built without CUDA; use cpu, or a build with CUDA"
                    )))
                }
            }
        }
    }
}

/// Error for a text that does not name a device, or names one that this build of rlood does not support.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(String);

/// Returns the number of CPU cores, at least 1.
pub fn machine_threads() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX))
}

/// Returns the memory in bytes that this process may use: the limit of its control group (version 2 or 1), else the machine's
/// memory. `None` if the system does not report it (not Linux).
pub fn machine_memory_bytes() -> Option<u64> {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max").or_else(|| number("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    let total = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?.trim().strip_suffix("kB")?.trim();
        line.parse::<u64>().ok().map(|kibibytes| kibibytes * 1024)
    });
    match (group, total) {
        (Some(group), Some(total)) => Some(group.min(total)),
        (group, total) => group.or(total),
    }
}

/// Returns the resident memory of this process in bytes. `None` if the system does not report it (not Linux).
pub fn process_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().strip_suffix("kB")?.trim();
    line.parse::<u64>().ok().map(|kibibytes| kibibytes * 1024)
}
