//! What is computed on and with: devices, instruction sets, precision.

use clap::ValueEnum;

use super::{ConfigError, Device};

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
    /// 512-bit vectors with the bf16 instructions of AVX-512.
    #[value(name = "avx512_bf16")]
    Avx512Bf16,
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
            Isa::Avx512Bf16 => "avx512_bf16",
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
