//! Flags of `rlood env serve` and `rlood env check`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::reward::parse_seconds;

#[derive(Debug, Clone, Args)]
pub struct EnvArgs {
    /// The subcommand of `rlood env`.
    #[command(subcommand)]
    pub command: EnvCommand,
}

/// The subcommands of `rlood env`.
#[derive(Debug, Clone, Subcommand)]
pub enum EnvCommand {
    /// Check a server against the environment contract v1: play short episodes, send repeated, late, forged and invalid requests, and
    /// print each problem with a fix. Exit code 0 if the server follows the contract, 1 if it does not, 2 for an invalid flag.
    Check(EnvCheckArgs),

    /// Serve Python classes over the environment contract v1: one endpoint per class. A class has reset(row, seed) and
    /// step(message), or the form of TRL's environment_factory. The first line of standard output is the address, followed by the
    /// environment to paste into a job.
    Serve(EnvServeArgs),
}

#[derive(Debug, Clone, Args)]
pub struct EnvServeArgs {
    /// Classes to serve: FILE:CLASS,… or MODULE:CLASS,… (game.py:Wordle). May be repeated; class names must be unique.
    #[arg(required = true, value_name = "FILE:CLASS,…")]
    pub classes: Vec<String>,

    /// Address to listen on, HOST:PORT; port 0 chooses a free one.
    #[arg(long, env = "RLOOD_ENV_LISTEN", default_value = "127.0.0.1:8700", value_name = "HOST:PORT")]
    pub listen: String,

    /// Signing secret `whsec_…`, the same as in the job's environment: only requests signed with it are answered. Give two, separated
    /// by a space, during a rotation. Without it every client that reaches the address is answered. Prefer the variable: flags are
    /// visible to other users.
    #[arg(long, env = "RLOOD_ENV_SECRET", hide_env_values = true, value_name = "SECRET")]
    pub secret: Option<String>,

    /// Directory that keeps the requests and answers of each episode, synced to disk before an answer is sent. After a crash or a
    /// restart an episode continues: the recorded turns are played again with a new object of the class. Without it a restart
    /// forgets all episodes, and jobs begin them again.
    #[arg(long, env = "RLOOD_ENV_STATE", value_name = "DIR")]
    pub state: Option<PathBuf>,

    /// Time in seconds without a request after which an episode is forgotten. With --state it comes back with its next
    /// request, for seven days.
    #[arg(long, default_value_t = 900.0, value_name = "SECONDS", value_parser = parse_seconds)]
    pub forget_after: f64,

    /// Python interpreter to run, 3.8 or newer. Default: python3, otherwise python.
    #[arg(long, env = "RLOOD_PYTHON", value_name = "PATH")]
    pub python: Option<PathBuf>,

    /// Additional names by which clients may call this server (the Host header), comma-separated: env.internal, or *.example.com for
    /// all subdomains. Addresses, localhost and the machine's name are always accepted.
    #[arg(long, env = "RLOOD_ENV_ALLOWED_HOSTS", value_delimiter = ',', value_name = "HOST,…")]
    pub allowed_hosts: Option<Vec<String>>,

    /// Maximum number of connections; further ones are closed.
    #[arg(long, env = "RLOOD_ENV_MAX_CONNECTIONS", default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=4096))]
    pub max_connections: u32,
}

#[derive(Debug, Clone, Args)]
pub struct EnvCheckArgs {
    /// URL to which the server accepts POST requests, including the path. Any address is allowed, including loopback.
    pub url: String,

    /// The server's secret `whsec_…`: requests are signed with it, and the check tests whether the server verifies signatures.
    /// Prefer the variable: flags are visible to other users.
    #[arg(long, env = "RLOOD_ENV_SECRET", hide_env_values = true, value_name = "SECRET")]
    pub secret: Option<String>,

    /// Header to send with every request, `name: value`; may be repeated. Values are never printed.
    #[arg(long = "header", value_name = "NAME: VALUE")]
    pub headers: Vec<String>,

    /// Prompt of the episodes, a user message.
    #[arg(long, default_value = "Let us begin.", value_name = "TEXT")]
    pub prompt: String,

    /// Column of the episodes' row, `name=value`; may be repeated. A value that is valid JSON is used as such.
    #[arg(long = "column", value_name = "NAME=VALUE")]
    pub columns: Vec<String>,

    /// The `params` of the job's environment, as a JSON object.
    #[arg(long, value_name = "JSON")]
    pub params: Option<String>,

    /// Time limit for one request, in ms.
    #[arg(long, default_value_t = 30_000, value_name = "MS")]
    pub timeout_ms: u64,

    /// Print one JSON document instead of lines.
    #[arg(long)]
    pub json: bool,

    /// Treat warnings as failures.
    #[arg(long)]
    pub strict: bool,
}
