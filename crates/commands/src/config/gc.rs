//! Flags of `rlood gc`.

use std::path::PathBuf;

use clap::Args;

use super::keys::{Life, parse_life};

#[derive(Debug, Clone, Args)]
pub struct GcArgs {
    /// List what would be removed, with sizes, and remove nothing.
    #[arg(long)]
    pub dry_run: bool,

    /// Clean only the model cache of this machine's workers. For machines without a server.
    #[arg(long)]
    pub cache_only: bool,

    /// The server's data directory. A server may be running on it.
    #[arg(long, env = "RLOOD_DATA_DIR", default_value = "rlood-data", value_name = "DIR")]
    pub data_dir: PathBuf,

    /// Also remove datasets that no job has used for this long: 90d, 12h. Default: keep them.
    #[arg(long, env = "RLOOD_RETAIN_DATASETS", value_parser = parse_life, value_name = "TIME")]
    pub retain_datasets: Option<Life>,

    /// Also remove downloaded models that no job has used for this long, unless adapters need them. Default: keep them.
    #[arg(long, env = "RLOOD_RETAIN_MODELS", value_parser = parse_life, value_name = "TIME")]
    pub retain_models: Option<Life>,

    /// Also remove unpinned checkpoints of jobs that ended this long ago. Default: keep them.
    #[arg(long, env = "RLOOD_RETAIN_CHECKPOINTS", value_parser = parse_life, value_name = "TIME")]
    pub retain_checkpoints: Option<Life>,

    /// Directory of the models that this machine's workers downloaded; see `rlood worker`. Default: `rlood` in
    /// the user's cache directory.
    #[arg(long, env = "RLOOD_WORKER_CACHE_DIR", value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,

    /// Remove models from the workers' cache that no worker of this machine has used for this long.
    #[arg(long, env = "RLOOD_RETAIN_CACHE", value_parser = parse_life, default_value = "30d", value_name = "TIME")]
    pub retain_cache: Life,
}
