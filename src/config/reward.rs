//! Flags of `rlood reward-server`, `rlood reward check` and `rlood reward serve`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{Device, Precision};

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

    /// Names, besides its own addresses, localhost and the machine's name, by which clients may call this server (the Host
    /// header), comma-separated: rm.internal, or *.example.com for all below it. Others are refused: a page whose name was
    /// made to point here (DNS rebinding) must not reach it.
    #[arg(long, env = "RLOOD_REWARD_ALLOWED_HOSTS", value_delimiter = ',', value_name = "HOST,…")]
    pub allowed_hosts: Option<Vec<String>>,

    /// Connections at once; beyond them the one that was idle longest makes room, else new ones are closed.
    #[arg(long, env = "RLOOD_REWARD_MAX_CONNECTIONS", default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=1_000_000))]
    pub max_connections: u32,

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

    /// Serve Python functions with TRL's signature of reward functions, by the reward contract v1: one endpoint for each
    /// function. The first line of standard output is the address, then come the rewards to paste into a job.
    Serve(RewardServeArgs),
}

/// Flags of `rlood reward serve`.
#[derive(Debug, Clone, Args)]
pub struct RewardServeArgs {
    /// What to serve: FILE:FUNCTION,… or MODULE:FUNCTION,… (rewards.py:accuracy,format). May be repeated; names of functions
    /// must differ.
    #[arg(required = true, value_name = "FILE:FUNCTION,…")]
    pub functions: Vec<String>,

    /// Address to listen on, HOST:PORT; port 0 takes a free one.
    #[arg(long, env = "RLOOD_REWARD_LISTEN", default_value = "127.0.0.1:8090", value_name = "HOST:PORT")]
    pub listen: String,

    /// `whsec_…`, the same as the job's reward has: only requests signed with it are answered. Two, separated by a space, while
    /// one is rotated. Without it everybody who reaches the address is answered. Prefer the variable: flags are visible to other
    /// users.
    #[arg(long, env = "RLOOD_REWARD_SECRET", hide_env_values = true, value_name = "SECRET")]
    pub secret: Option<String>,

    /// Processes that run the functions: as many calls run at once. Each loads the files for itself.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub processes: u32,

    /// Most samples of one call; a prompt's completions stay together where they fit. Default: those of a request
    /// (the job's max_batch_samples).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub batch_size: Option<u32>,

    /// Seconds that one call may take; its process is then ended and replaced, and its samples have the error `timeout`. A call
    /// ends in any case before the `deadline_ms` of its request.
    #[arg(long, default_value_t = 270.0, value_name = "SECONDS", value_parser = parse_seconds)]
    pub timeout: f64,

    /// The Python to run, 3.8 or newer. Default: python3, else python.
    #[arg(long, env = "RLOOD_PYTHON", value_name = "PATH")]
    pub python: Option<PathBuf>,

    /// Load the files anew when they, or modules that they import from beside them, change. A version that cannot be loaded is
    /// reported on standard error, and the one before it goes on.
    #[arg(long)]
    pub reload: bool,

    /// Names, besides addresses, localhost and the machine's name, by which clients may call this server (the Host header),
    /// comma-separated: rm.internal, or *.example.com for all below it.
    #[arg(long, env = "RLOOD_REWARD_ALLOWED_HOSTS", value_delimiter = ',', value_name = "HOST,…")]
    pub allowed_hosts: Option<Vec<String>>,

    /// Connections at once; new ones beyond them are closed.
    #[arg(long, env = "RLOOD_REWARD_MAX_CONNECTIONS", default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=4096))]
    pub max_connections: u32,
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds <= 604_800.0);
    seconds.ok_or_else(|| "must be above 0 and at most 604800".to_owned())
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
