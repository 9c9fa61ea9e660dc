//! Devices, instruction sets and precision of computations.

use clap::ValueEnum;

use super::{ConfigError, Device};

/// Parses `auto`, `none`, or a list of devices.
///
/// # Errors
/// Fails when the list is invalid; the error names a valid form.
pub(super) fn parse_devices(list: &str) -> Result<Vec<Device>, ConfigError> {
    match list.trim() {
        "auto" => Ok(detect_devices()),
        "none" => Ok(Vec::new()),
        "" => Err(ConfigError::new("--devices is empty: use auto, none, or a list like cpu or cuda:0,cuda:1")),
        given => given
            .split(',')
            .map(|name| match name.trim() {
                word @ ("auto" | "none") => {
                    Err(ConfigError::new(format!("--devices {given}: '{word}' cannot be part of a list")))
                }
                name => name.parse().map_err(|error| ConfigError::new(format!("--devices {given}: {error}"))),
            })
            .collect(),
    }
}

/// Every GPU visible to this process if the build can use one, otherwise the CPU. The driver, which may take seconds,
/// is queried later: [`super::ServeConfig::keep_found`].
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
        // GPUs are counted in /proc, otherwise in /dev, because a container may hide one of them.
        true => count("/proc/driver/nvidia/gpus", |_| true).or_else(|| count("/dev", is_device)).unwrap_or(0),
        false => 0,
    };
    let gpus = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => gpus.min(visible(&list)),
        Err(_) => gpus,
    };
    if gpus == 0 { vec![Device::Cpu] } else { (0_u32..).take(gpus).map(Device::Cuda).collect() }
}

/// Number of GPUs that a `CUDA_VISIBLE_DEVICES` exposes: the entries before the first invalid one.
fn visible(list: &str) -> usize {
    list.split(',').map(str::trim).take_while(|name| !name.is_empty() && !name.starts_with('-')).count()
}

/// Instruction sets of the CPU kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Isa {
    /// The best instruction set that the machine supports.
    Auto,
    /// Code that runs on every machine.
    Portable,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors of AVX-512.
    Avx512,
    /// 512-bit vectors with the bf16 instructions of AVX-512 (AVX512-BF16).
    #[value(name = "avx512_bf16")]
    Avx512Bf16,
    /// Tile products of bf16 matrices (AMX).
    Amx,
}

impl Isa {
    /// Returns the value as written on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Isa::Auto => "auto",
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512_bf16",
            Isa::Amx => "amx",
        }
    }
}

/// Precision of weights and of the inputs of matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    /// bfloat16 with sums in 32 bits.
    Bf16,
    /// 32-bit floating point throughout.
    F32,
}

impl Precision {
    /// Returns the value as written on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Precision::Bf16 => "bf16",
            Precision::F32 => "f32",
        }
    }
}
