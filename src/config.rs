//! Every flag and variable: default, unit, consequence.
//!
//! The command line is parsed into [`Cli`] by clap; [`ServeArgs::resolve`] checks it and returns [`ServeConfig`], which
//! is true: the rest of the program checks nothing of it again. Long because every setting's help text stands here, beside
//! its check and its test.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::id::WorkerId;
use crate::spec::footprint::Place;

pub mod backup;
pub mod edge;
pub mod keys;
pub mod retention;

pub use edge::{Edge, EdgeArgs};
pub use keys::KeysArgs;
pub use retention::{Retention, RetentionArgs};

/// Fewest characters of an API key or a worker token.
pub const MIN_SECRET_CHARS: usize = 16;

/// Between a worker's heartbeats, ms. A cancel or pause travels in the reply and is honoured within 12 s of the request:
/// this leaves 7 s for the engine to stop and to save.
pub const HEARTBEAT_MS: u64 = 5_000;

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

    /// Log filter: a level (error, warn, info, debug, trace), or per module (`info,rlood::store=debug`). Logs go to
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
    Generate(ProbeArgs),
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
    /// Make, list and revoke API keys of a server's data directory.
    Keys(KeysArgs),
    /// Print the OpenAPI document (JSON) to standard output.
    Openapi(OpenapiArgs),
    /// Check versions, disk, devices and ports; exit code 0 when a server would start.
    Check(ServeArgs),
}

/// Flags of `rlood serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Address to listen on, HOST:PORT; port 0 takes a free one (printed on the first line of standard output). Any
    /// address that is not loopback needs an API key.
    #[arg(long, env = "RLOOD_LISTEN", default_value = "127.0.0.1:8080", value_name = "HOST:PORT")]
    pub listen: String,

    /// Directory for the database, datasets and checkpoints; created if absent. One server at a time may use it.
    #[arg(long, env = "RLOOD_DATA_DIR", default_value = "rlood-data", value_name = "DIR")]
    pub data_dir: PathBuf,

    /// Devices to train on, comma-separated: auto, cpu, cuda:N, or none (only workers started by hand). One worker
    /// process runs per entry, so `cpu,cpu` runs two jobs at once. auto = every GPU this build can use, else one cpu.
    #[arg(long, env = "RLOOD_DEVICES", default_value = "auto", value_name = "LIST")]
    pub devices: String,

    /// Admin key, at least 16 characters. With it, or with a key of `rlood keys create`, every request needs
    /// `Authorization: Bearer KEY`; without any the server listens on loopback only and asks for none. Prefer the variable:
    /// flags are visible to other users.
    #[arg(long, env = "RLOOD_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub api_key: Option<String>,

    /// Token that workers present, at least 16 characters. Default: a random one for each start, known only to the
    /// server's own workers; set it to let `rlood worker` connect from elsewhere.
    #[arg(long, env = "RLOOD_WORKER_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub worker_token: Option<String>,

    /// Address at which clients and reward services reach this server (http:// or https://), when it differs from
    /// --listen: behind a proxy, say. Its host is accepted in the Host header.
    #[arg(long, env = "RLOOD_PUBLIC_URL", value_name = "URL")]
    pub public_url: Option<String>,

    /// Private addresses that outgoing requests (rewards) may reach, comma-separated: CIDR blocks, addresses, host names,
    /// the word loopback. Default: loopback without an API key, nothing private with one. Public addresses are always
    /// allowed.
    #[arg(long, env = "RLOOD_ALLOW_OUTGOING", value_delimiter = ',', value_name = "CIDR|HOST,…")]
    pub allow_outgoing: Option<Vec<String>>,

    /// Directories that hold models, comma-separated. With an API key a model's path must lie under one of them;
    /// without one, and without this flag, any readable path is accepted.
    #[arg(long, env = "RLOOD_MODEL_ROOT", value_delimiter = ',', value_name = "DIR,…")]
    pub model_root: Option<Vec<PathBuf>>,

    /// Instruction set of the CPU kernels: auto (the best one the machine has), portable, avx2, avx512 or amx.
    #[arg(long, env = "RLOOD_ISA", default_value = "auto", value_enum)]
    pub isa: Isa,

    /// Bytes that the stored samples of one job may take; beyond them the oldest steps' samples are removed, of training
    /// first, never the newest (the job's history and `removed` in /jobs/{id}/samples tell). Metrics stay. 0 = no limit.
    /// Default: 1 GiB, about a million samples of 1,000 characters.
    #[arg(long, env = "RLOOD_SAMPLES_MAX_BYTES", default_value_t = SAMPLES_MAX_BYTES, value_name = "BYTES")]
    pub samples_max_bytes: u64,

    /// Factor, above 0 and at most 1, on the waits that rlood chooses itself when a reward service fails: between tries,
    /// while its breaker is open, between the server's pings. For tests: services need their rest.
    #[arg(long, env = "RLOOD_REWARD_PACE", default_value_t = 1.0, hide = true, value_name = "FACTOR")]
    pub reward_pace: f64,

    /// Compute threads of all workers together, split evenly between the cpu devices. Default: the machine's cores.
    #[arg(long, env = "RLOOD_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,

    /// Memory that all cpu workers together may use: bytes, or with a unit (512M, 12G; powers of 1024); 0 = no limit. A job
    /// whose estimate is larger than a worker's even share is refused at submission. Default: the control group's limit,
    /// else the machine's memory.
    #[arg(long, env = "RLOOD_MEMORY_LIMIT", value_name = "SIZE")]
    pub memory_limit: Option<String>,

    /// Of the edge.
    #[command(flatten)]
    pub edge: EdgeArgs,

    /// Of what is kept.
    #[command(flatten)]
    pub retention: RetentionArgs,
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

/// Flags of `rlood worker`.
#[derive(Debug, Clone, Args)]
pub struct WorkerArgs {
    /// The server's address, http:// or https://.
    #[arg(long, env = "RLOOD_SERVER", default_value = "http://127.0.0.1:8080", value_name = "URL")]
    pub server: String,

    /// The one device to train on: cpu or cuda:N.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,

    /// The server's worker token; give it by the variable, not by the flag, which other users can see.
    #[arg(long, env = "RLOOD_WORKER_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub token: String,

    /// Compute threads. Default: the machine's cores.
    #[arg(long, env = "RLOOD_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,

    /// Directory for downloads and unpublished checkpoints. Default: a folder under the system's temporary directory.
    #[arg(long, env = "RLOOD_SCRATCH_DIR", value_name = "DIR")]
    pub scratch_dir: Option<PathBuf>,

    /// Factor on the waits of reward requests; see `rlood serve`.
    #[arg(long, env = "RLOOD_REWARD_PACE", default_value_t = 1.0, hide = true, value_name = "FACTOR")]
    pub reward_pace: f64,

    /// Set by the server for its own workers: the id to register with.
    #[arg(long, hide = true)]
    pub id: Option<WorkerId>,

    /// Set by the server for its own workers: end when standard input ends.
    #[arg(long, hide = true)]
    pub child: bool,
}

/// Flags of `rlood probe` and `rlood generate`.
#[derive(Debug, Clone, Args)]
pub struct ProbeArgs {
    /// The one device to compute on: cpu or cuda:N.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,

    /// Compute threads. Default: the machine's cores.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
}

/// Flags of `rlood reward-server`.
#[derive(Debug, Clone, Args)]
pub struct RewardServerArgs {
    /// Directory of a …ForSequenceClassification checkpoint: Qwen2, Qwen3, Llama, Mistral, DeBERTa-v2 and v3, RoBERTa,
    /// XLM-RoBERTa, ModernBERT.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,

    /// Address to listen on, HOST:PORT; port 0 takes a free one (printed on the first line of standard output).
    #[arg(long, env = "RLOOD_REWARD_LISTEN", default_value = "127.0.0.1:8090", value_name = "HOST:PORT")]
    pub listen: String,

    /// `whsec_…`, the same as the job's reward has: only requests signed with it are answered. Without it everybody who
    /// reaches the address is. OpenRLHF does not sign. Prefer the variable: flags are visible to other users.
    #[arg(long, env = "RLOOD_REWARD_SECRET", hide_env_values = true, value_name = "SECRET")]
    pub secret: Option<String>,

    /// The one device to compute on: cpu or cuda:N.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,

    /// Which score is the reward, by its name in config.json or its number; needed where the model gives several.
    #[arg(long, value_name = "LABEL")]
    pub label: Option<String>,

    /// What the model reads of a prompt and its completion. auto = chat for messages where the model has a chat template,
    /// else pair for encoders and text for decoders.
    #[arg(long, default_value = "auto", value_enum)]
    pub format: RewardFormat,

    /// Tokens; longer texts lose their beginning. Default: as many as the model takes.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub max_length: Option<u32>,

    /// Precision of a decoder's matrices; encoders compute in f32.
    #[arg(long, default_value = "f32", value_enum)]
    pub dtype: Precision,

    /// Compute threads. Default: the machine's cores.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
}

/// Flags of `rlood openapi`.
#[derive(Debug, Clone, Args)]
pub struct OpenapiArgs {
    /// Write the reward contract as JSON Schema files (request, answer, callback, ping, …) into this directory instead.
    #[arg(long, value_name = "DIR")]
    pub schemas: Option<PathBuf>,
}

/// Flags of `rlood reward`.
#[derive(Debug, Clone, Args)]
pub struct RewardArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: RewardCommand,
}

/// What `rlood reward` can do.
#[derive(Debug, Clone, Subcommand)]
pub enum RewardCommand {
    /// Ask a service as a job would, and as a job never would; print what is wrong and what to do. About 60 requests. Exit
    /// code 0 when it keeps the reward contract v1, 1 when it does not, 2 when a flag cannot be used.
    Check(RewardCheckArgs),
}

/// Flags of `rlood reward check`.
#[derive(Debug, Clone, Args)]
pub struct RewardCheckArgs {
    /// Where the service takes its POSTs, path included. Any address may be asked, loopback too.
    pub url: String,

    /// `whsec_…`, the one the service has: requests are signed, and it is looked at whether signatures are verified. Prefer
    /// the variable: flags are visible to other users.
    #[arg(long, env = "RLOOD_REWARD_SECRET", hide_env_values = true, value_name = "SECRET")]
    pub secret: Option<String>,

    /// Sent with every request, `name: value`; may be repeated. Values are never printed.
    #[arg(long = "header", value_name = "NAME: VALUE")]
    pub headers: Vec<String>,

    /// Samples to ask about: a JSON list of {prompt, completion, columns}, or one a line. Default: twelve sums with right
    /// and wrong answers, the right one in the columns `answer` and `reference`.
    #[arg(long, value_name = "FILE")]
    pub samples: Option<PathBuf>,

    /// A column of every default sample, `name=value`; may be repeated.
    #[arg(long = "column", value_name = "NAME=VALUE")]
    pub columns: Vec<String>,

    /// `params` of the job's reward, a JSON object.
    #[arg(long, value_name = "JSON")]
    pub params: Option<String>,

    /// Most time for one request, ms, and for a later answer.
    #[arg(long, default_value_t = 30_000, value_name = "MS")]
    pub timeout_ms: u64,

    /// Samples in one request, as the job will send.
    #[arg(long, default_value_t = 32, value_name = "N")]
    pub max_batch_samples: u32,

    /// Where callbacks of asynchronous answers are taken, HOST:PORT.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "HOST:PORT")]
    pub callback_listen: String,

    /// How the service reaches that address, when it runs elsewhere (http:// or https://).
    #[arg(long, value_name = "URL")]
    pub callback_url: Option<String>,

    /// Print one JSON document instead of lines.
    #[arg(long)]
    pub json: bool,

    /// Warnings count as failures.
    #[arg(long)]
    pub strict: bool,
}

/// What a reward model reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RewardFormat {
    /// By prompt and model.
    Auto,
    /// The conversation through the model's chat template.
    Chat,
    /// Prompt and completion as one text.
    Text,
    /// Prompt and completion as a pair of texts.
    Pair,
}

/// Flags of `rlood bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// What to measure on: cpu or cuda:N.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,

    /// Dimensions of the random model: tiny, small, qwen3-0.6b, qwen3-4b or qwen3-8b, with changes if wanted, as in
    /// `small,layers=2,vocab=4096` (hidden, layers, heads, kv, head_dim, inter, vocab, pos, tie).
    #[arg(long, default_value = "tiny", value_name = "NAME[,KEY=N…]")]
    pub shape: String,

    /// A model directory to measure, instead of random weights. Its completions may end early in whole steps.
    #[arg(long, value_name = "DIR", conflicts_with = "shape")]
    pub model: Option<PathBuf>,

    /// Prompts of a step, each a group of completions.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub prompts: u32,

    /// Completions of a prompt (G), sampled together; whole steps need two at least.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub generations: u32,

    /// Tokens of a prompt, the same for all.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub prompt_len: u32,

    /// Tokens of a completion, exactly: no end of sequence is sampled.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    pub completion: u32,

    /// Precision of weights and of the inputs of matrix products.
    #[arg(long, default_value = "bf16", value_enum)]
    pub dtype: Precision,

    /// Measured steps, after one to warm up; the other parts repeat as often at least.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub steps: u32,

    /// Weight of the KL penalty; 0 = no reference pass.
    #[arg(long, default_value_t = 0.05, value_name = "BETA")]
    pub beta: f64,

    /// Rank of the adapter, which sits on every linear layer.
    #[arg(long, default_value_t = 16, value_name = "R", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub lora_r: u32,

    /// Compute activations again in the backward instead of keeping them, in training and step.
    #[arg(long)]
    pub gradient_checkpointing: bool,

    /// Tokens of a forward and backward, at most, but for one group. Default: as a job would have them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    pub micro_batch_tokens: Option<u32>,

    /// Lengths for the part requests: a JSON array of [prompt tokens, completion tokens], one pair a request; all of them
    /// are decoded together, each until it has its length.
    #[arg(long, value_name = "FILE")]
    pub requests: Option<PathBuf>,

    /// Compute threads. Default: the machine's cores.
    #[arg(long, env = "RLOOD_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,

    /// Measure this part only (and the machine's limits, which everything is compared with). Default: kernels (of the
    /// processor), decode, training and step.
    #[arg(long, value_enum)]
    pub only: Option<BenchPart>,

    /// Write the figures to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Write the random model to this directory and keep it. Default: a temporary directory.
    #[arg(long, value_name = "DIR", conflicts_with = "model")]
    pub save_model: Option<PathBuf>,

    /// Set by the command for its own processes: measure one part, print its figures to standard output.
    #[arg(long, hide = true, requires = "only")]
    pub child: bool,
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

/// What `rlood bench` measures, each in a process of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchPart {
    /// The machine: memory reads and multiply-adds.
    Limits,
    /// Matrix products and attention at the model's sizes.
    Kernels,
    /// Generation, by batch.
    Decode,
    /// Forward and backward, and log-probs without gradient.
    Training,
    /// Whole RLOO steps of the engine's own loop.
    Step,
    /// Generation of the lengths in --requests.
    Requests,
    /// How far the log-probs recorded in sampling are from those of the training forward.
    Mismatch,
    /// Generation beside one other busy process, against generation alone.
    Busy,
}

impl BenchPart {
    /// The word of the flag.
    pub fn as_str(self) -> &'static str {
        match self {
            BenchPart::Limits => "limits",
            BenchPart::Kernels => "kernels",
            BenchPart::Decode => "decode",
            BenchPart::Training => "training",
            BenchPart::Step => "step",
            BenchPart::Requests => "requests",
            BenchPart::Mismatch => "mismatch",
            BenchPart::Busy => "busy",
        }
    }
}

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
                        "{device} was asked for, but this rlood was built without CUDA: use --devices cpu, or a build \
                         with CUDA"
                    )))
                }
            }
        }
    }
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

/// What a server runs with; every value checked. Made by [`ServeArgs::resolve`] or [`ServeConfig::loopback`].
#[derive(Clone)]
pub struct ServeConfig {
    /// The address to bind; loopback unless there is a key.
    pub listen: SocketAddr,
    /// Where everything durable lies.
    pub data_dir: PathBuf,
    /// One worker process each; may be empty.
    pub devices: Vec<Device>,
    /// The admin key; None = no authentication, loopback only.
    pub api_key: Option<String>,
    /// What workers present.
    pub worker_token: String,
    /// Without a trailing slash.
    pub public_url: Option<String>,
    /// CIDRs and host names of private addresses that outgoing requests may reach.
    pub allow_outgoing: Vec<String>,
    /// Canonical directories models must lie under; None = anywhere.
    pub model_roots: Option<Vec<PathBuf>>,
    /// Passed on to the workers.
    pub isa: Isa,
    /// Of all workers together.
    pub threads: u32,
    /// Memory of all cpu workers together, bytes; None = unknown or not limited.
    pub memory_limit_bytes: Option<u64>,
    /// Memory of the smallest GPU of the pool, bytes; None = no GPU, or not known before the server starts.
    pub gpu_memory_bytes: Option<u64>,
    /// The `rlood` binary that workers are started from; None = this process's own.
    pub worker_program: Option<PathBuf>,
    /// What the samples of one job may take, bytes; 0 = no limit.
    pub samples_max_bytes: u64,
    /// Factor on the waits for reward services; 1 but in tests. Passed on to the workers.
    pub reward_pace: f64,
    /// Between a worker's heartbeats, ms: the longest a cancel or pause waits to be seen.
    pub heartbeat_ms: u64,
    /// Of a claim without heartbeat, ms.
    pub lease_ms: u64,
    /// Passed on to the workers.
    pub log: String,
    /// Passed on to the workers.
    pub log_format: LogFormat,
    /// Names, origins, connections, time limits, disk.
    pub edge: Edge,
    /// How long things are kept.
    pub retention: Retention,
    /// `allow_outgoing` was left to its default, which a key of the database narrows.
    pub default_outgoing: bool,
}

impl fmt::Debug for ServeConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServeConfig")
            .field("listen", &self.listen)
            .field("data_dir", &self.data_dir)
            .field("devices", &self.devices)
            .field("api_key", &self.api_key.as_ref().map(|_| "redacted"))
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl ServeConfig {
    /// A server without keys on a free loopback port with one cpu worker: for the demo and for tests, which then change
    /// what they need.
    ///
    /// # Errors
    /// When the system gives no random bytes.
    pub fn loopback(data_dir: &Path) -> Result<Self, ConfigError> {
        Ok(Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            data_dir: data_dir.to_owned(),
            devices: vec![Device::Cpu],
            api_key: None,
            worker_token: random_token()?,
            public_url: None,
            allow_outgoing: vec!["loopback".to_owned()],
            model_roots: None,
            isa: Isa::Auto,
            threads: machine_threads(),
            memory_limit_bytes: machine_memory_bytes(),
            gpu_memory_bytes: None,
            worker_program: None,
            samples_max_bytes: SAMPLES_MAX_BYTES,
            reward_pace: 1.0,
            heartbeat_ms: HEARTBEAT_MS,
            lease_ms: LEASE_MS,
            log: "warn".to_owned(),
            log_format: LogFormat::Text,
            edge: Edge::default(),
            retention: Retention::default(),
            default_outgoing: true,
        })
    }

    /// Keys are on: what was left to its default becomes what it is with a key.
    pub fn narrow(&mut self) {
        if self.default_outgoing {
            self.allow_outgoing.clear();
        }
        self.model_roots.get_or_insert_default();
    }

    /// Memory a job may use: an even share of the limit.
    pub fn memory_per_worker(&self) -> Option<u64> {
        let workers = self.devices.iter().filter(|device| **device == Device::Cpu).count() as u64;
        self.memory_limit_bytes.map(|bytes| bytes / workers.max(1))
    }

    /// What jobs may be computed on: the kinds of devices of the pool, the first one first.
    pub fn places(&self) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::new();
        for device in &self.devices {
            let place = match device {
                Device::Cpu => Place::Cpu,
                Device::Cuda(_) => Place::Cuda { memory_bytes: self.gpu_memory_bytes },
            };
            if !places.contains(&place) {
                places.push(place);
            }
        }
        places
    }

    /// The numbers of the GPUs of the pool.
    pub fn gpus(&self) -> impl Iterator<Item = u32> {
        self.devices.iter().filter_map(|device| match device {
            Device::Cpu => None,
            Device::Cuda(index) => Some(*index),
        })
    }

    /// Compute threads of each cpu worker: an even share, at least 1.
    pub fn threads_per_worker(&self) -> u32 {
        let workers = u32::try_from(self.devices.len()).unwrap_or(u32::MAX).max(1);
        (self.threads / workers).max(1)
    }
}

impl ServeArgs {
    /// Checks every setting; `cli` gives the log settings the workers inherit.
    ///
    /// # Errors
    /// The first setting that cannot be used.
    pub fn resolve(&self, log: &str, log_format: LogFormat) -> Result<ServeConfig, ConfigError> {
        let api_key = checked_secret(self.api_key.as_deref(), "RLOOD_API_KEY (--api-key)")?;
        // A database may hold keys; whether it does is known when the server opens it.
        let may_have_key = api_key.is_some() || self.data_dir.join("rlood.db").exists();
        let listen = resolve_listen(&self.listen, may_have_key)?;
        let worker_token = match checked_secret(self.worker_token.as_deref(), "RLOOD_WORKER_TOKEN (--worker-token)")? {
            Some(token) => token,
            None => random_token()?,
        };
        let allow_outgoing = match &self.allow_outgoing {
            Some(given) => {
                given.iter().map(|entry| entry.trim().to_owned()).filter(|entry| !entry.is_empty()).collect()
            }
            None if api_key.is_none() => vec!["loopback".to_owned()],
            None => Vec::new(),
        };
        Ok(ServeConfig {
            listen,
            data_dir: self.data_dir.clone(),
            devices: parse_devices(&self.devices)?,
            model_roots: resolve_model_roots(self.model_root.as_deref(), api_key.is_some())?,
            api_key,
            worker_token,
            public_url: self.public_url.as_deref().filter(|url| !url.is_empty()).map(parse_public_url).transpose()?,
            allow_outgoing,
            isa: self.isa,
            threads: self.threads.unwrap_or_else(machine_threads),
            memory_limit_bytes: match self.memory_limit.as_deref().filter(|size| !size.is_empty()) {
                Some(size) => parse_size(size)?,
                None => machine_memory_bytes(),
            },
            gpu_memory_bytes: None,
            worker_program: None,
            samples_max_bytes: self.samples_max_bytes,
            reward_pace: parse_pace(self.reward_pace)?,
            heartbeat_ms: HEARTBEAT_MS,
            lease_ms: LEASE_MS,
            log: log.to_owned(),
            log_format,
            edge: self.edge.resolve()?,
            retention: self.retention.resolve(),
            default_outgoing: self.allow_outgoing.is_none(),
        })
    }
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

/// `512M`, `12G`, bytes; None = 0, no limit.
fn parse_size(text: &str) -> Result<Option<u64>, ConfigError> {
    parse_size_of("--memory-limit", text)
}

fn parse_size_of(flag: &str, text: &str) -> Result<Option<u64>, ConfigError> {
    let refused = || ConfigError::new(format!("{flag} '{text}' is not a size: write bytes, 512M or 12G; 0 = no limit"));
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].trim().to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return Err(refused()),
    };
    let number: u64 = digits.parse().map_err(|_| refused())?;
    let bytes = number.checked_mul(1 << shift).ok_or_else(refused)?;
    Ok((bytes > 0).then_some(bytes))
}

/// A factor on waits.
fn parse_pace(factor: f64) -> Result<f64, ConfigError> {
    if factor > 0.0 && factor <= 1.0 {
        return Ok(factor);
    }
    Err(ConfigError::new(format!("--reward-pace {factor}: must be above 0 and at most 1")))
}

/// 256 random bits in hexadecimal.
/// 32 random bytes in hex.
pub(crate) fn random_token() -> Result<String, ConfigError> {
    let mut bytes = [0_u8; 32];
    rustls::crypto::ring::default_provider()
        .secure_random
        .fill(&mut bytes)
        .map_err(|_| ConfigError::new("the system gave no random bytes for a token; set RLOOD_WORKER_TOKEN"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// An empty value counts as absent: compose files pass `RLOOD_API_KEY=` for "none".
fn checked_secret(given: Option<&str>, name: &str) -> Result<Option<String>, ConfigError> {
    let Some(secret) = given.filter(|secret| !secret.is_empty()) else { return Ok(None) };
    if secret.chars().count() < MIN_SECRET_CHARS {
        return Err(ConfigError::new(format!(
            "{name} has {} characters, at least {MIN_SECRET_CHARS} are needed: make one with `openssl rand -hex 24`",
            secret.chars().count()
        )));
    }
    if !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(ConfigError::new(format!("{name} may hold only visible ASCII characters, without spaces")));
    }
    Ok(Some(secret.to_owned()))
}

/// A name with several addresses stands for its first IPv4 one.
///
/// # Errors
/// When it is not an address, or not loopback and there is no key.
pub fn resolve_listen(listen: &str, has_key: bool) -> Result<SocketAddr, ConfigError> {
    let advice = "write HOST:PORT, 127.0.0.1:8080";
    let addresses: Vec<SocketAddr> = listen
        .to_socket_addrs()
        .map_err(|error| ConfigError::new(format!("--listen '{listen}' is not an address ({error}): {advice}")))?
        .collect();
    let Some(address) = addresses.iter().find(|address| address.is_ipv4()).or(addresses.first()).copied() else {
        return Err(ConfigError::new(format!("--listen '{listen}' names no address: {advice}")));
    };
    if address.ip().is_loopback() || has_key {
        return Ok(address);
    }
    Err(no_key_for(listen))
}

/// Why an open address is refused.
pub fn no_key_for(listen: impl fmt::Display) -> ConfigError {
    ConfigError::new(format!(
        "--listen {listen} would be reachable by others, and no API key is set: set RLOOD_API_KEY (at least \
         {MIN_SECRET_CHARS} characters) or make a key with `rlood keys create` to require one, or listen on 127.0.0.1"
    ))
}

fn parse_devices(list: &str) -> Result<Vec<Device>, ConfigError> {
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

/// Every GPU the driver lists when this build can use one, else the processor.
fn detect_devices() -> Vec<Device> {
    let gpus = if cfg!(feature = "cuda") {
        std::fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, |entries| entries.flatten().count())
    } else {
        0
    };
    if gpus == 0 { vec![Device::Cpu] } else { (0_u32..).take(gpus).map(Device::Cuda).collect() }
}

fn resolve_model_roots(given: Option<&[PathBuf]>, has_key: bool) -> Result<Option<Vec<PathBuf>>, ConfigError> {
    let roots: Vec<&PathBuf> = given.unwrap_or_default().iter().filter(|root| !root.as_os_str().is_empty()).collect();
    if roots.is_empty() {
        return Ok(has_key.then(Vec::new));
    }
    let canonical = roots.into_iter().map(|root| {
        root.canonicalize().map_err(|error| {
            ConfigError::new(format!("--model-root {}: {error}; name an existing directory", root.display()))
        })
    });
    canonical.collect::<Result<_, _>>().map(Some)
}

fn parse_public_url(url: &str) -> Result<String, ConfigError> {
    let bad =
        |why: &str| ConfigError::new(format!("--public-url '{url}' {why}; write https://HOST or https://HOST/PREFIX"));
    let parsed = reqwest::Url::parse(url).map_err(|error| bad(&format!("is not a URL ({error})")))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        return Err(bad("is neither http nor https"));
    }
    if parsed.query().is_some() || parsed.fragment().is_some() || !parsed.username().is_empty() {
        return Err(bad("has a query, a fragment or a user name"));
    }
    Ok(url.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &[&str]) -> ServeArgs {
        match Cli::try_parse_from([&["rlood", "serve"], words].concat()).unwrap().command {
            Command::Serve(args) => args,
            _ => unreachable!("serve was parsed"),
        }
    }

    fn resolve(words: &[&str]) -> Result<ServeConfig, ConfigError> {
        args(words).resolve("info", LogFormat::Text)
    }

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_of_every_role_is_documented() {
        use clap::CommandFactory;
        for role in Cli::command().get_subcommands() {
            for argument in role.get_arguments().filter(|argument| !argument.is_hide_set()) {
                let documented = argument.get_help().is_some_and(|help| help.to_string().len() > 20);
                assert!(documented, "{} {}", role.get_name(), argument.get_id());
            }
        }
    }

    #[test]
    fn an_open_address_needs_a_key_of_sixteen_characters() {
        let error = resolve(&["--listen", "0.0.0.0:0"]).unwrap_err().to_string();
        assert!(error.contains("RLOOD_API_KEY"), "{error}");
        let error = resolve(&["--listen", "0.0.0.0:0", "--api-key", "fifteen-letters"]).unwrap_err().to_string();
        assert!(error.contains("15 characters"), "{error}");
        let config = resolve(&["--listen", "0.0.0.0:0", "--api-key", "sixteen-letters!"]).unwrap();
        assert!(config.allow_outgoing.is_empty());
        assert_eq!(config.model_roots, Some(Vec::new()));
    }

    #[test]
    fn without_a_key_loopback_is_reachable_and_models_may_lie_anywhere() {
        let config = resolve(&["--listen", "127.0.0.1:0", "--devices", "cpu,cpu", "--threads", "3"]).unwrap();
        assert_eq!(config.allow_outgoing, ["loopback"]);
        assert_eq!(config.model_roots, None);
        assert_eq!(config.devices, [Device::Cpu, Device::Cpu]);
        assert_eq!(config.threads_per_worker(), 1);
        assert_eq!(config.worker_token.len(), 64);
    }

    #[test]
    fn bad_devices_say_what_to_write() {
        for (given, part) in [
            ("gpu", "use cpu or cuda:N"),
            ("cuda", "cuda:0"),
            ("cuda:x", "use cpu or cuda:N"),
            ("", "empty"),
            ("cpu,auto", "stands alone"),
        ] {
            let error = resolve(&["--devices", given]).unwrap_err().to_string();
            assert!(error.contains(part), "{given}: {error}");
        }
        if !cfg!(feature = "cuda") {
            let error = resolve(&["--devices", "cuda:0"]).unwrap_err().to_string();
            assert!(error.contains("built without CUDA"), "{error}");
        }
    }

    #[test]
    fn a_public_url_is_http_without_extras() {
        assert_eq!(
            resolve(&["--public-url", "https://a.example/x/"]).unwrap().public_url.unwrap(),
            "https://a.example/x"
        );
        for bad in ["a.example", "ftp://a.example", "https://a.example/?q=1"] {
            assert!(resolve(&["--public-url", bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn debug_output_shows_no_key() {
        let config = resolve(&["--api-key", "sixteen-letters!", "--worker-token", "seventeen-letters"]).unwrap();
        let text = format!("{config:?}");
        assert!(!text.contains("letters"), "{text}");
    }
}
