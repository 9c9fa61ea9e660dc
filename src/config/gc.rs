//! Flags of `rlood gc`.

use std::path::PathBuf;

use clap::Args;

use super::keys::{Life, parse_life};

/// Flags of `rlood gc`.
#[derive(Debug, Clone, Args)]
pub struct GcArgs {
    /// List what would be removed, with its bytes, and remove nothing.
    #[arg(long)]
    pub dry_run: bool,

    /// Only the models that workers of this machine fetched: on a machine without a server.
    #[arg(long)]
    pub cache_only: bool,

    /// The server's data directory. A server may be running on it.
    #[arg(long, env = "RLOOD_DATA_DIR", default_value = "rlood-data", value_name = "DIR")]
    pub data_dir: PathBuf,

    /// Also remove datasets that no job has used for so long: 90d, 12h. Default: they stay.
    #[arg(long, env = "RLOOD_RETAIN_DATASETS", value_parser = parse_life, value_name = "TIME")]
    pub retain_datasets: Option<Life>,

    /// Also remove downloaded models that no job has used for so long, unless adapters need them. Default: they stay.
    #[arg(long, env = "RLOOD_RETAIN_MODELS", value_parser = parse_life, value_name = "TIME")]
    pub retain_models: Option<Life>,

    /// Also remove checkpoints, but for pinned ones, of jobs that ended so long ago. Default: they stay.
    #[arg(long, env = "RLOOD_RETAIN_CHECKPOINTS", value_parser = parse_life, value_name = "TIME")]
    pub retain_checkpoints: Option<Life>,

    /// Directory of models that workers of this machine fetched; see `rlood worker`. Default: `rlood` in the user's cache
    /// directory.
    #[arg(long, env = "RLOOD_WORKER_CACHE_DIR", value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,

    /// Remove fetched models that no worker of this machine has used for so long.
    #[arg(long, env = "RLOOD_RETAIN_CACHE", value_parser = parse_life, default_value = "30d", value_name = "TIME")]
    pub retain_cache: Life,
}
