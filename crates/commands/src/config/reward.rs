//! Flags of `rlood reward-server`, `rlood reward check` and `rlood reward serve`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{Device, Precision};

#[derive(Debug, Clone, Args)]
pub struct RewardServerArgs {
    /// Directory of a …ForSequenceClassification checkpoint: Qwen2, Qwen3, Llama, Mistral, DeBERTa-v2 and
    /// v3, RoBERTa, XLM-RoBERTa, ModernBERT.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,

    /// Address to listen on, HOST:PORT; port 0 chooses a free one (printed on the first line of standard output).
    #[arg(long, env = "RLOOD_REWARD_LISTEN", default_value = "127.0.0.1:8090", value_name = "HOST:PORT")]
    pub listen: String,

    /// Signing secret `whsec_…`, the same as in the job's reward: only requests signed with it are answered. Without it every
    /// client that reaches the address is answered. OpenRLHF does not sign. Prefer the variable: flags are visible to other users.
    #[arg(long, env = "RLOOD_REWARD_SECRET", hide_env_values = true, value_name = "SECRET")]
    pub secret: Option<String>,

    /// Additional names by which clients may call this server (the Host header), comma-separated: rm.internal, or *.example.com for
    /// all subdomains. The server's addresses, localhost and the machine's name are always accepted. Other names are refused as
    /// protection against DNS rebinding.
    #[arg(long, env = "RLOOD_REWARD_ALLOWED_HOSTS", value_delimiter = ',', value_name = "HOST,…")]
    pub allowed_hosts: Option<Vec<String>>,

    /// Maximum number of connections. Beyond it the connection that has been idle longest is closed, otherwise new ones.
    #[arg(long, env = "RLOOD_REWARD_MAX_CONNECTIONS", default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=1_000_000))]
    pub max_connections: u32,

    /// The device to compute on: cpu or cuda:N.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,

    /// The model's score to use as the reward, by its name in config.json or by number. Required if the model has several.
    #[arg(long, value_name = "LABEL")]
    pub label: Option<String>,

    /// Format of the model's input. auto = chat for messages if the model has a chat template, otherwise pair for encoders
    /// and text for decoders.
    #[arg(long, default_value = "auto", value_enum)]
    pub format: RewardFormat,

    /// Maximum number of input tokens; longer texts are truncated at the beginning. Default: the model's maximum.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub max_length: Option<u32>,

    /// Precision of a decoder's matrices; encoders compute in f32.
    #[arg(long, default_value = "f32", value_enum)]
    pub dtype: Precision,

    /// Number of compute threads. Default: the number of cores.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
}

/// The input format of a reward model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RewardFormat {
    /// Chosen by the form of the prompt and by the model.
    Auto,
    /// The conversation, rendered with the model's chat template.
    Chat,
    /// Prompt and completion as one text.
    Text,
    /// Prompt and completion as a pair of texts.
    Pair,
}

#[derive(Debug, Clone, Args)]
pub struct RewardArgs {
    /// The subcommand of `rlood reward`.
    #[command(subcommand)]
    pub command: RewardCommand,
}

/// The subcommands of `rlood reward`.
#[derive(Debug, Clone, Subcommand)]
pub enum RewardCommand {
    /// Check a service against the reward contract v1: send valid and invalid requests, about 60, and print each problem with a
    /// fix. Exit code 0 if the service follows the contract, 1 if it does not, 2 for an invalid flag.
    Check(RewardCheckArgs),

    /// Serve Python functions with TRL's signature of reward functions over the reward contract v1: one endpoint per function. The
    /// first line of standard output is the address, followed by the rewards to paste into a job.
    Serve(RewardServeArgs),
}

#[derive(Debug, Clone, Args)]
pub struct RewardServeArgs {
    /// Functions to serve: FILE:FUNCTION,… or MODULE:FUNCTION,… (rewards.py:accuracy,format). May be repeated; function
    /// names must be unique.
    #[arg(required = true, value_name = "FILE:FUNCTION,…")]
    pub functions: Vec<String>,

    /// Address to listen on, HOST:PORT; port 0 chooses a free one.
    #[arg(long, env = "RLOOD_REWARD_LISTEN", default_value = "127.0.0.1:8090", value_name = "HOST:PORT")]
    pub listen: String,

    /// Signing secret `whsec_…`, the same as in the job's reward: only requests signed with it are answered. Give two, separated by
    /// a space, during a rotation. Without it every client that reaches the address is answered. Prefer the variable: flags are
    /// visible to other users.
    #[arg(long, env = "RLOOD_REWARD_SECRET", hide_env_values = true, value_name = "SECRET")]
    pub secret: Option<String>,

    /// Number of processes that run the functions, and so of concurrent calls. Each process loads the files itself.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub processes: u32,

    /// Maximum number of samples per call; a prompt's completions stay together if possible. Default: the samples of one
    /// request (the job's max_batch_samples).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub batch_size: Option<u32>,

    /// Time limit of one call, in seconds. After it the process is killed and replaced, and its samples get the error `timeout`. A
    /// call never runs past the `deadline_ms` of its request.
    #[arg(long, default_value_t = 270.0, value_name = "SECONDS", value_parser = parse_seconds)]
    pub timeout: f64,

    /// Python interpreter to run, 3.8 or newer. Default: python3, otherwise python.
    #[arg(long, env = "RLOOD_PYTHON", value_name = "PATH")]
    pub python: Option<PathBuf>,

    /// Reload the files when they, or modules that they import from the same folder, change. If a new version cannot be loaded, the
    /// error is written to standard error and the old version stays in use.
    #[arg(long)]
    pub reload: bool,

    /// Additional names by which clients may call this server (the Host header), comma-separated: rm.internal, or *.example.com for
    /// all subdomains. Addresses, localhost and the machine's name are always accepted.
    #[arg(long, env = "RLOOD_REWARD_ALLOWED_HOSTS", value_delimiter = ',', value_name = "HOST,…")]
    pub allowed_hosts: Option<Vec<String>>,

    /// Maximum number of connections; further ones are closed.
    #[arg(long, env = "RLOOD_REWARD_MAX_CONNECTIONS", default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=4096))]
    pub max_connections: u32,
}

pub(super) fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds <= 604_800.0);
    seconds.ok_or_else(|| "the number of seconds must be above 0 and at most 604800 (a week)".to_owned())
}

#[derive(Debug, Clone, Args)]
pub struct RewardCheckArgs {
    /// URL to which the service accepts POST requests, including the path. Any address is allowed, including loopback.
    pub url: String,

    /// The service's secret `whsec_…`: requests are signed with it, and the check tests whether the service verifies signatures.
    /// Prefer the variable: flags are visible to other users.
    #[arg(long, env = "RLOOD_REWARD_SECRET", hide_env_values = true, value_name = "SECRET")]
    pub secret: Option<String>,

    /// Header to send with every request, `name: value`; may be repeated. Values are never printed.
    #[arg(long = "header", value_name = "NAME: VALUE")]
    pub headers: Vec<String>,

    /// File with samples to score: a JSON list of {prompt, completion, columns}, or one object per line. Default: twelve sums with
    /// right and wrong answers; the columns `answer` and `reference` contain the right one.
    #[arg(long, value_name = "FILE")]
    pub samples: Option<PathBuf>,

    /// Column to add to every default sample, `name=value`; may be repeated.
    #[arg(long = "column", value_name = "NAME=VALUE")]
    pub columns: Vec<String>,

    /// The `params` of the job's reward, as a JSON object.
    #[arg(long, value_name = "JSON")]
    pub params: Option<String>,

    /// Time limit for one request, and for an asynchronous answer, in ms.
    #[arg(long, default_value_t = 30_000, value_name = "MS")]
    pub timeout_ms: u64,

    /// Maximum number of samples per request, as in the job.
    #[arg(long, default_value_t = 32, value_name = "N")]
    pub max_batch_samples: u32,

    /// Address to listen on for callbacks of asynchronous answers, HOST:PORT.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "HOST:PORT")]
    pub callback_listen: String,

    /// URL at which the service reaches the callback address, if it runs on another machine (http:// or https://).
    #[arg(long, value_name = "URL")]
    pub callback_url: Option<String>,

    /// Print one JSON document instead of lines.
    #[arg(long)]
    pub json: bool,

    /// Treat warnings as failures.
    #[arg(long)]
    pub strict: bool,
}
