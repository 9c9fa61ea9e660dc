//! Every flag and variable: default, unit, consequence.
//!
//! The command line is parsed into [`Cli`] by clap; [`ServeArgs::resolve`] checks it and returns [`ServeConfig`], which
//! is true: the rest of the program checks nothing of it again. The roles and the small ones' flags are here; the others'
//! stand each in a file.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rlood_worker::size::parse_size;

pub use crate::protocol::HEARTBEAT_MS;
pub use rlood_worker::args::{GRACE_S, ProbeArgs, WorkerArgs};
pub use rlood_worker::device::{Device, machine_memory_bytes, machine_threads, process_memory_bytes};

pub mod backup;
mod bench;
mod device;
pub mod edge;
pub mod gc;
pub mod hub;
pub mod keys;
mod python;
pub mod retention;
mod reward;
mod serve;

pub use bench::{BenchArgs, BenchPart};
pub use device::{Isa, Precision};
pub use edge::{Edge, EdgeArgs};
pub use hub::{HubArgs, HubConfig, HubTokenFor};
pub use keys::KeysArgs;
pub use python::{PythonRewards, PythonRewardsArgs};
pub use retention::{Retention, RetentionArgs};
pub use reward::{RewardArgs, RewardCheckArgs, RewardCommand, RewardFormat, RewardServeArgs, RewardServerArgs};
pub(crate) use serve::random_token;
pub use serve::{ServeArgs, ServeConfig, no_key_for, resolve_listen};

/// The variable from which candle and rayon take the size of their pools.
pub const COMPUTE_THREADS: &str = "RAYON_NUM_THREADS";
/// The variable that tells a worker how much it may use of its GPU; the server sets it for its own ones.
pub const GPU_MEMORY: &str = "RLOOD_GPU_MEMORY";

/// Fewest characters of an API key or a worker token.
pub const MIN_SECRET_CHARS: usize = 16;

/// Of a claim without heartbeat, ms: six heartbeats.
pub const LEASE_MS: u64 = 30_000;

/// What the samples of one job may take, bytes.
pub const SAMPLES_MAX_BYTES: u64 = 1 << 30;

/// RLOO training of language models as an HTTP service.
#[derive(Debug, Parser)]
#[command(name = "rlood", version, about, arg_required_else_help = true)]
pub struct Cli {
    /// Which role to run.
    #[command(subcommand)]
    pub command: Command,

    /// Log filter: a level (error, warn, info, debug, trace), or per module (`info,rlood_store=debug`). Logs go to
    /// standard error.
    #[arg(long, env = "RLOOD_LOG", default_value = "info", global = true, value_name = "FILTER")]
    pub log: String,

    /// Form of the log lines: text for people, json (one object a line) for collectors.
    #[arg(long, env = "RLOOD_LOG_FORMAT", default_value = "text", global = true, value_enum)]
    pub log_format: LogFormat,
}

/// The form of the log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

impl LogFormat {
    /// The word of the flag.
    pub fn as_str(self) -> &'static str {
        match self {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        }
    }
}

/// The roles of the binary.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the server: API, queue, and one worker process per device.
    Serve(ServeArgs),
    /// Train the bundled model end to end, to see everything work.
    Demo(DemoArgs),
    /// Run one worker by hand, for a server on this or another machine.
    Worker(WorkerArgs),
    /// Translate a run of another trainer into a job: printed to standard output, what is to be said of it to standard
    /// error. Exit code 1 when something in it is refused or not supported.
    Convert(ConvertArgs),
    /// Set up by the server: look at the job on standard input, write a report to standard output.
    #[command(hide = true)]
    Probe(ProbeArgs),
    /// Set up by the server: complete the prompt on standard input, write a report to standard output.
    #[command(hide = true)]
    Generator(ProbeArgs),
    /// Set up by the server: compare the models of the task on standard input, write lines to standard output.
    #[command(hide = true)]
    Judge(ProbeArgs),
    /// Set up by the server: write the checkpoint of the task on standard input in another form, write lines to standard output.
    #[command(hide = true)]
    ExportCheckpoint(ProbeArgs),
    /// Serve a reward model (a sequence-classification checkpoint) over HTTP: the reward contract v1, and OpenRLHF's remote
    /// reward model on the same address.
    RewardServer(RewardServerArgs),
    /// Reward services of your own: whether they keep the contract.
    Reward(RewardArgs),
    /// Measure kernels, decode, training and whole RLOO steps on random weights, against the limits of this machine.
    Bench(BenchArgs),
    /// Copy the data directory of a server, which may be running, with hashes of every file.
    Backup(backup::BackupArgs),
    /// Make a data directory of a backup, every byte of it verified.
    Restore(backup::RestoreArgs),
    /// Create, list and revoke API keys, over the API or in a server's data directory.
    Keys(KeysArgs),
    /// Remove what nothing needs: files without a row, what is kept for longer than asked, models in the cache of workers.
    Gc(gc::GcArgs),
    /// Print the OpenAPI document (JSON) to standard output.
    Openapi(OpenapiArgs),
    /// Check versions, disk, devices and ports; exit code 0 when a server would start.
    Check(ServeArgs),
    /// Talk to a server: submit jobs, follow them, fetch what they made.
    #[command(flatten)]
    Api(rlood_cli::Command),
}

/// Flags of `rlood convert`.
#[derive(Debug, Clone, Args)]
pub struct ConvertArgs {
    /// TRL's RLOOConfig as YAML, JSON or TOML; `-` reads standard input. It may be bare, or the `config` of
    /// {config, peft_config, model, dataset, eval_dataset, rewards}.
    #[arg(long, value_name = "FILE")]
    pub trl: PathBuf,

    /// PEFT's LoraConfig (`adapter_config.json`), when it is a file of its own.
    #[arg(long, value_name = "FILE")]
    pub peft: Option<PathBuf>,

    /// The form of the printed job: json, yaml or toml.
    #[arg(long, default_value = "json", value_enum)]
    pub format: ConvertFormat,
}

/// The form of a printed job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ConvertFormat {
    /// JSON.
    Json,
    /// YAML.
    Yaml,
    /// TOML.
    Toml,
}

/// Flags of `rlood demo`.
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Loopback address to listen on, HOST:PORT; port 0 takes a free one. Default: 127.0.0.1:8080, or a free port when
    /// that one is in use.
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,

    /// Directory for the demo's data. Default: a fresh folder under the user's cache directory.
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,

    /// Optimizer steps; more steps take longer and learn more. Default: enough for the demo's goal.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub steps: Option<u64>,

    /// Seed of sampling, order and initialisation: the same seed gives the same run on the same machine.
    #[arg(long, default_value_t = 42, value_name = "N")]
    pub seed: u64,

    /// Leave when the job is done, with code 0 only if held-out accuracy reached 0.9 and rose by 0.2. Default: keep
    /// serving until Ctrl-C.
    #[arg(long)]
    pub exit: bool,
}

/// Flags of `rlood openapi`.
#[derive(Debug, Clone, Args)]
pub struct OpenapiArgs {
    /// Write the reward contract as JSON Schema files (request, answer, callback, ping, …) into this directory instead.
    #[arg(long, value_name = "DIR")]
    pub schemas: Option<PathBuf>,
}

/// A setting that cannot be used: which one, why, what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl ConfigError {
    fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

/// What this process may take of a GPU, bytes, as `RLOOD_GPU_MEMORY` says; None = all of it.
///
/// # Errors
/// It is not a size.
pub fn gpu_memory_limit() -> Result<Option<u64>, ConfigError> {
    match std::env::var(GPU_MEMORY) {
        Ok(size) if !size.is_empty() => parse_size_of(GPU_MEMORY, &size),
        _ => Ok(None),
    }
}

/// `512M`, `12G`, bytes; None = 0, no limit. The error names `flag`.
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
