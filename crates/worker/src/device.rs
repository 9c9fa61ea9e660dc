//! What is computed on: devices, the machine's cores and memory.

use std::fmt;
use std::str::FromStr;

/// A device to train on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    Cpu,
    /// The GPU of this number.
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
        let unknown = || DeviceError(format!("'{text}' is not a device: use cpu or cuda:N (cuda:0, cuda:1, …)"));
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
                        "{device} was asked for, but this rlood was built without CUDA: use cpu, or a build with CUDA"
                    )))
                }
            }
        }
    }
}

/// A text that names no device of this build: which, and what to write.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(String);

/// The machine's cores, at least 1.
pub fn machine_threads() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX))
}

/// Memory this process may use, bytes: the control group's limit (version 2 or 1), else all of the machine's. None where
/// the system does not say (not Linux).
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

/// Resident memory of this process, bytes. None where the system does not say (not Linux).
pub fn process_memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().strip_suffix("kB")?.trim();
    line.parse::<u64>().ok().map(|kibibytes| kibibytes * 1024)
}
