//! What is computed on and with: devices, the machine's cores and memory, instruction sets, precision.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;

use super::ConfigError;

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
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let unknown = || ConfigError::new(format!("'{text}' is not a device: use cpu or cuda:N (cuda:0, cuda:1, …)"));
        match text {
            "cpu" => Ok(Device::Cpu),
            "cuda" => Err(ConfigError::new("'cuda' needs a number: cuda:0 is the first GPU")),
            other => {
                let index = other.strip_prefix("cuda:").ok_or_else(unknown)?;
                if index.is_empty() || !index.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(unknown());
                }
                let device = Device::Cuda(index.parse().map_err(|_| unknown())?);
                if cfg!(feature = "cuda") {
                    Ok(device)
                } else {
                    Err(ConfigError::new(format!(
                        "{device} was asked for, but this rlood was built without CUDA: use cpu, or a build with CUDA"
                    )))
                }
            }
        }
    }
}

/// `auto`, `none`, or a list.
///
/// # Errors
/// What is wrong with the list, and what to write.
pub(super) fn parse_devices(list: &str) -> Result<Vec<Device>, ConfigError> {
    match list.trim() {
        "auto" => Ok(detect_devices()),
        "none" => Ok(Vec::new()),
        "" => Err(ConfigError::new("--devices is empty: use auto, none, or a list like cpu or cuda:0,cuda:1")),
        given => given
            .split(',')
            .map(|name| match name.trim() {
                word @ ("auto" | "none") => {
                    Err(ConfigError::new(format!("--devices {given}: '{word}' stands alone, not in a list")))
                }
                name => name.parse().map_err(|error| ConfigError::new(format!("--devices {given}: {error}"))),
            })
            .collect(),
    }
}

/// Every GPU that the machine shows this process when the build can use one, else the processor. The driver is not asked
/// yet, which may take seconds: [`super::ServeConfig::keep_found`].
fn detect_devices() -> Vec<Device> {
    let count = |folder: &str, is_gpu: fn(&str) -> bool| {
        let entries = std::fs::read_dir(folder).ok()?.flatten();
        let gpus = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count();
        (gpus > 0).then_some(gpus)
    };
    let is_device = |name: &str| {
        let number = name.strip_prefix("nvidia").unwrap_or_default();
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    };
    let gpus = match cfg!(feature = "cuda") {
        // In a container the one or the other may be hidden.
        true => count("/proc/driver/nvidia/gpus", |_| true).or_else(|| count("/dev", is_device)).unwrap_or(0),
        false => 0,
    };
    let gpus = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => gpus.min(visible(&list)),
        Err(_) => gpus,
    };
    if gpus == 0 { vec![Device::Cpu] } else { (0_u32..).take(gpus).map(Device::Cuda).collect() }
}

/// How many GPUs a `CUDA_VISIBLE_DEVICES` shows: those before the first that is none.
fn visible(list: &str) -> usize {
    list.split(',').map(str::trim).take_while(|name| !name.is_empty() && !name.starts_with('-')).count()
}

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

/// Instruction sets of the CPU kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Isa {
    /// The best one the machine has.
    Auto,
    /// The one every machine has.
    Portable,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors.
    Avx512,
    /// Tiles of bf16.
    Amx,
}

impl Isa {
    /// The word of the flag.
    pub fn as_str(self) -> &'static str {
        match self {
            Isa::Auto => "auto",
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }
}

/// Precision of weights and of the inputs of matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    /// bfloat16; sums in 32 bits.
    Bf16,
    /// 32 bits throughout.
    F32,
}

impl Precision {
    /// The word of the flag.
    pub fn as_str(self) -> &'static str {
        match self {
            Precision::Bf16 => "bf16",
            Precision::F32 => "f32",
        }
    }
}
