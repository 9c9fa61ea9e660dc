//! Settings of the models that the server serves over `/v1`.

use std::time::Duration;

use clap::Args;

use super::device::{Precision, parse_devices};
use super::{ConfigError, Device};
use crate::spec::ComputeDtype;

/// Flags of the served models.
#[derive(Debug, Clone, Args)]
pub struct ServeModelsArgs {
    /// Devices that serve models over /v1, comma-separated: auto, cpu, cuda:N, or none (no serving). Each has one process, which starts
    /// with the first request. auto = the devices of --devices; a GPU only if --gpu-memory leaves room beside its worker, otherwise
    /// the cpu.
    #[arg(long, env = "RLOOD_SERVE_DEVICES", default_value = "auto", value_name = "LIST")]
    pub serve_devices: String,

    /// Share of the cores that serving gets while a job trains on them, above 0 and below 1. Serving uses all cores while no job
    /// computes, and training uses all while nothing is served.
    #[arg(long, env = "RLOOD_SERVE_SHARE", default_value_t = 0.25, value_name = "SHARE")]
    pub serve_share: f64,

    /// Precision in which base models are served: f32 or bf16. A checkpoint is served in the precision that its job trained in.
    #[arg(long, env = "RLOOD_SERVE_DTYPE", value_enum, default_value_t = Precision::F32, value_name = "DTYPE")]
    pub serve_dtype: Precision,

    /// Maximum number of answers that are generated at once on a device; others wait.
    #[arg(long, env = "RLOOD_SERVE_BATCH", default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub serve_batch: u32,

    /// Maximum number of answers that run or wait on this server. Further requests are refused (429).
    #[arg(long, env = "RLOOD_SERVE_MAX_ANSWERS", default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub serve_max_answers: u32,

    /// The same for all keys of one owner. Further requests are refused (429).
    #[arg(long, env = "RLOOD_SERVE_MAX_ANSWERS_PER_OWNER", default_value_t = 128, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub serve_max_answers_per_owner: u32,

    /// Seconds without a request after which a serving process ends, which frees the memory of its models.
    #[arg(long, env = "RLOOD_SERVE_IDLE_S", default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub serve_idle_s: u64,
}

/// Validated settings of the served models.
#[derive(Debug, Clone, PartialEq)]
pub struct Serve {
    /// Devices with one serving process each; empty = the server serves no models.
    pub devices: Vec<Device>,
    /// Share of the cores beside training.
    pub share: f64,
    /// Precision of base models.
    pub dtype: ComputeDtype,
    /// Maximum number of answers that a device generates at once.
    pub max_rows: usize,
    /// Maximum number of answers that run or wait.
    pub max_answers: usize,
    /// Maximum number of answers of one owner that run or wait.
    pub max_answers_per_owner: usize,
    /// Time without a request after which a serving process ends.
    pub idle: Duration,
}

impl Default for Serve {
    fn default() -> Self {
        Self {
            devices: vec![Device::Cpu],
            share: 0.25,
            dtype: ComputeDtype::F32,
            max_rows: 64,
            max_answers: 256,
            max_answers_per_owner: 128,
            idle: Duration::from_secs(600),
        }
    }
}

impl ServeModelsArgs {
    /// Checks the settings. `workers` are the devices of the workers; `shares_gpus` says whether their GPU memory is limited.
    ///
    /// # Errors
    /// Returns the first invalid setting.
    pub(super) fn resolve(&self, workers: &[Device], shares_gpus: bool) -> Result<Serve, ConfigError> {
        let share = self.serve_share;
        if !(share > 0.0 && share < 1.0) {
            return Err(ConfigError::new(format!("--serve-share {share}: the share must be above 0 and below 1")));
        }
        let mut devices = Vec::new();
        let given = match self.serve_devices.trim() {
            "auto" => {
                let of_worker = |device: &Device| if shares_gpus { *device } else { Device::Cpu };
                match workers.is_empty() {
                    true => vec![Device::Cpu],
                    false => workers.iter().map(of_worker).collect(),
                }
            }
            list => parse_devices(list)?,
        };
        for device in given {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        Ok(Serve {
            devices,
            share,
            dtype: match self.serve_dtype {
                Precision::F32 => ComputeDtype::F32,
                Precision::Bf16 => ComputeDtype::Bf16,
            },
            max_rows: self.serve_batch as usize,
            max_answers: self.serve_max_answers as usize,
            max_answers_per_owner: self.serve_max_answers_per_owner as usize,
            idle: Duration::from_secs(self.serve_idle_s),
        })
    }
}
