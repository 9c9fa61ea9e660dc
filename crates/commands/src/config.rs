//! All flags and variables of the binary, with default, unit and effect.
//!
//! clap parses the command line into [`Cli`]. [`ServeArgs::resolve`] validates it and returns [`ServeConfig`], so that the rest of
//! the program need not check settings again. Short groups of flags are in this file, the others in one file each.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rlood_worker::size::parse_size;

pub use crate::protocol::HEARTBEAT_MS;
pub use rlood_worker::args::{GRACE_S, OneShotArgs, ServingArgs, WorkerArgs};
pub use rlood_worker::device::{Device, machine_memory_bytes, machine_threads, process_memory_bytes};
pub use rlood_worker::runtime::trl::environment::TrlArgs;

pub mod backup;
mod bench;
mod device;
pub mod edge;
mod env;
pub mod gc;
pub mod hub;
pub mod keys;
mod python;
pub mod retention;
mod reward;
mod runtime;
mod serve;
mod serving;
pub mod sidecar;

pub use bench::{BenchArgs, BenchPart, FourBit};
pub use device::{Isa, Precision};
pub use edge::{Edge, EdgeArgs};
pub use env::{EnvArgs, EnvCheckArgs, EnvCommand, EnvServeArgs};
pub use hub::{HubArgs, HubConfig, HubTokenFor};
pub use keys::KeysArgs;
pub use python::{PythonRewards, PythonRewardsArgs};
pub use retention::{Retention, RetentionArgs};
pub use reward::{RewardArgs, RewardCheckArgs, RewardCommand, RewardFormat, RewardServeArgs, RewardServerArgs};
pub use runtime::{RuntimeArgs, RuntimeCommand, RuntimeExtra, RuntimeInstallArgs};
pub use serve::random_token;
pub use serve::{ServeArgs, ServeConfig, no_key_for, resolve_listen};
pub use serving::{Serve, ServeModelsArgs};

/// The environment variable from which candle and rayon read the size of their thread pools.
pub const COMPUTE_THREADS: &str = "RAYON_NUM_THREADS";
/// The environment variable that limits a worker's GPU memory. The server sets it for its own workers.
pub const GPU_MEMORY: &str = "RLOOD_GPU_MEMORY";

/// Minimum length of an API key or a worker token, in characters.
pub const MIN_SECRET_CHARS: usize = 16;

/// Lease in ms of a worker's claim on a job: the job is requeued after six missed heartbeats.
pub const LEASE_MS: u64 = 30_000;

/// Default limit for the stored samples of one job, in bytes.
pub const SAMPLES_MAX_BYTES: u64 = 1 << 30;

/// RLOO training of language models as an HTTP service.
#[derive(Debug, Parser)]
#[command(name = "rlood", version, about, arg_required_else_help = true)]
pub struct Cli {
    /// The subcommand to run.
    #[command(subcommand)]
    pub command: Command,

    /// Log filter: a level (error, warn, info, debug, trace), or per module (`info,rlood_store=debug`).
    /// Logs are written to standard error.
    #[arg(long, env = "RLOOD_LOG", default_value = "info", global = true, value_name = "FILTER")]
    pub log: String,

    /// Format of the log lines: text for people, json (one object per line) for log collectors.
    #[arg(long, env = "RLOOD_LOG_FORMAT", default_value = "text", global = true, value_enum)]
    pub log_format: LogFormat,
}

/// The format of the log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Text lines for people.
    Text,
    /// One JSON object per line.
    Json,
}

impl LogFormat {
    /// Returns the value as written on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        }
    }
}

/// The subcommands of the binary.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the server: API, queue, and one worker process per device.
    Serve(ServeArgs),
    /// Train the bundled model end to end, to see everything work.
    Demo(DemoArgs),
    /// Run one worker for a server on this or another machine.
    Worker(WorkerArgs),
    /// Run beside a vLLM server that shares no folder with the workers: download the adapters of jobs with rollout servers, and pass on
    /// only the routes that such jobs need.
    AdapterSidecar(sidecar::SidecarArgs),
    /// Convert the configuration of another trainer to a job: prints the job to standard output and remarks to standard error. Exit
    /// code 1 when a setting is refused or not supported.
    Convert(ConvertArgs),
    /// Started by the server: run a preflight of the job on standard input, write a report to standard output.
    #[command(name = "probe", hide = true)]
    Preflight(OneShotArgs),
    /// Started by the server: compare the models of the task on standard input, write result lines to standard output.
    #[command(hide = true)]
    Judge(OneShotArgs),
    /// Started by the server: export the checkpoint of the task on standard input, write result lines to standard output.
    #[command(hide = true)]
    ExportCheckpoint(OneShotArgs),
    /// Started by the server: keep models loaded and generate for the requests on standard input.
    #[command(hide = true)]
    Serving(ServingArgs),
    /// Started by the server and by `rlood verify`: compute the log-probabilities of the task on standard input, write a report to
    /// standard output.
    #[command(hide = true)]
    Certifier(OneShotArgs),
    /// Serve a reward model (a sequence-classification checkpoint) over HTTP: the reward contract v1, and OpenRLHF's remote reward
    /// model at the same address.
    RewardServer(RewardServerArgs),
    /// Check reward services against the reward contract, or serve Python functions as reward services.
    Reward(RewardArgs),
    /// Check servers of environments against the environment contract, or serve Python classes as environments.
    Env(EnvArgs),
    /// Benchmark kernels, decode, training and whole RLOO steps on random weights, and compare with the limits of this machine.
    Bench(BenchArgs),
    /// Back up the data directory of a server, which may be running, with hashes of every file.
    Backup(backup::BackupArgs),
    /// Restore a data directory from a backup, verifying every byte.
    Restore(backup::RestoreArgs),
    /// Create, list and revoke API keys, over the API or in a server's data directory.
    Keys(KeysArgs),
    /// Remove unneeded data: files without a database row, data past its retention time, models in the workers' cache.
    Gc(gc::GcArgs),
    /// Install the programs beside rlood's own engine that can train jobs.
    Runtime(RuntimeArgs),
    /// Print the OpenAPI document (JSON) to standard output.
    Openapi(OpenapiArgs),
    /// Check versions, disk, devices and ports; exit code 0 if a server would start.
    Check(ServeArgs),
    /// Use a server: submit jobs, follow them, download their results.
    #[command(flatten)]
    Api(rlood_cli::Command),
}

#[derive(Debug, Clone, Args)]
pub struct ConvertArgs {
    /// TRL's RLOOConfig as YAML, JSON or TOML; `-` reads standard input. Either bare, or as the `config` of {config, peft_config,
    /// model, dataset, eval_dataset, rewards}.
    #[arg(long, value_name = "FILE")]
    pub trl: PathBuf,

    /// PEFT's LoraConfig (`adapter_config.json`), if it is a separate file.
    #[arg(long, value_name = "FILE")]
    pub peft: Option<PathBuf>,

    /// Format of the printed job: json, yaml or toml.
    #[arg(long, default_value = "json", value_enum)]
    pub format: ConvertFormat,
}

/// The format of a printed job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ConvertFormat {
    Json,
    Yaml,
    Toml,
}

#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Loopback address to listen on, HOST:PORT; port 0 chooses a free one. Default: 127.0.0.1:8080, or a free port if that
    /// one is in use.
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,

    /// Directory for the demo's data. Default: a new folder in the user's cache directory.
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,

    /// Number of optimizer steps; more steps take longer and learn more. Default: enough to reach the demo's goal.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub steps: Option<u64>,

    /// Seed of sampling, order and initialization: the same seed gives the same run on the same machine.
    #[arg(long, default_value_t = 42, value_name = "N")]
    pub seed: u64,

    /// Exit when the job has ended, with code 0 only if held-out accuracy reached 0.9 and rose by 0.2. Default:
    /// keep serving until Ctrl-C.
    #[arg(long)]
    pub exit: bool,

    /// Train the bundled model that learns to call a calculator, in episodes of several turns. With --exit the code is 0 only if at most
    /// 0.2 of the held-out sums were right before and at least 0.9 after.
    #[arg(long)]
    pub agent: bool,

    /// Let the calculator answer with random numbers, so that calling it brings nothing. With --exit the code is 0 only if at most 0.3 of
    /// the held-out sums are right after the training.
    #[arg(long, requires = "agent")]
    pub noise: bool,

    /// Instruction set of the CPU kernels: auto (the fastest one that the machine supports), portable, avx2, avx512, avx512_bf16 or amx.
    #[arg(long, env = "RLOOD_ISA", default_value = "auto", value_enum)]
    pub isa: Isa,
}

#[derive(Debug, Clone, Args)]
pub struct OpenapiArgs {
    /// Write the contracts of rewards and environments as JSON Schema files (request, answer, env-step, …) to this directory instead.
    #[arg(long, value_name = "DIR")]
    pub schemas: Option<PathBuf>,
}

/// An invalid setting. The text names the setting, the reason, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl ConfigError {
    fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

/// Limit of this process's GPU memory from `RLOOD_GPU_MEMORY`, in bytes; None = no limit.
///
/// # Errors
/// Fails when the value is not a size.
pub fn gpu_memory_limit() -> Result<Option<u64>, ConfigError> {
    match std::env::var(GPU_MEMORY) {
        Ok(size) if !size.is_empty() => parse_size_of(GPU_MEMORY, &size),
        _ => Ok(None),
    }
}

/// Parses a size: bytes, or `512M`, `12G`. None = 0, no limit. The error names `flag`.
pub(crate) fn parse_size_of(flag: &str, text: &str) -> Result<Option<u64>, ConfigError> {
    let bytes = parse_size(text).map_err(|why| ConfigError::new(format!("{flag} {why}; 0 = no limit")))?;
    Ok((bytes > 0).then_some(bytes))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_of_every_role_is_documented() {
        for role in Cli::command().get_subcommands() {
            for argument in role.get_arguments().filter(|argument| !argument.is_hide_set()) {
                let documented = argument.get_help().is_some_and(|help| help.to_string().len() > 20);
                assert!(documented, "{} {}", role.get_name(), argument.get_id());
            }
        }
    }
}
