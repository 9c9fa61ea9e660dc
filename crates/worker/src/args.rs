//! Command-line flags of the processes that compute: `rlood worker`, `rlood probe` and `rlood judge`.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::device::Device;
use crate::id::WorkerId;
use crate::runtime::trl::environment::TrlArgs;
use crate::size::parse_size;

/// Default number of seconds that a worker has to save and exit after SIGTERM.
pub const GRACE_S: u64 = 24;

/// Flags of `rlood worker`.
#[derive(Debug, Clone, Args)]
pub struct WorkerArgs {
    /// Address of the server, starting with http:// or https://.
    #[arg(long, env = "RLOOD_SERVER", default_value = "http://127.0.0.1:8080", value_name = "URL")]
    pub server: String,

    /// Device to train on: cpu or cuda:N.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,

    /// The server's worker token. Pass it in the variable, because other users can see flags in the process list.
    #[arg(long, env = "RLOOD_WORKER_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub token: String,

    /// Number of compute threads. Default: the number of CPU cores.
    #[arg(long, env = "RLOOD_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,

    /// Directory for downloads and unpublished checkpoints. Default: a new folder in the system's temporary directory.
    #[arg(long, env = "RLOOD_SCRATCH_DIR", value_name = "DIR")]
    pub scratch_dir: Option<PathBuf>,

    /// Directory for models that the worker downloads because they are not at the server's path on this machine. Workers on one
    /// machine share the directory, so each model is downloaded once. Default: `cache` in --scratch-dir; without that, `rlood`
    /// in the user's cache directory (XDG_CACHE_HOME, else ~/.cache).
    #[arg(long, env = "RLOOD_WORKER_CACHE_DIR", value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,

    /// Maximum size of the directory of downloaded models: bytes, or a number with a unit (512M, 200GB); 0 means no limit.
    /// Above the limit, the least recently used models are removed, except those used by running jobs. Default:
    /// limited only by the disk.
    #[arg(long, env = "RLOOD_WORKER_CACHE_LIMIT", value_parser = parse_size, value_name = "SIZE")]
    pub cache_limit: Option<u64>,

    /// Folder in which the worker publishes the adapters of jobs with rollout servers, which must see the same folder.
    /// Default: the worker uploads them to the server, from where `rlood adapter-sidecar` downloads them.
    #[arg(long, env = "RLOOD_ADAPTER_DIR", value_name = "DIR")]
    pub adapter_dir: Option<PathBuf>,

    /// Python that has vLLM, for jobs whose completions a vLLM server of this worker samples (`rollout.colocate`). The workers of
    /// `rlood serve` read the variable.
    #[arg(long, env = "RLOOD_VLLM_PYTHON", value_name = "FILE")]
    pub vllm_python: Option<PathBuf>,

    /// Seconds from SIGTERM until the worker exits, 2 to 3600. A worker that runs a job saves a checkpoint within four fifths
    /// of this time, returns the job to the queue (`preempted`), and exits with code 0. Set it below the notice that the
    /// machine gets, such as terminationGracePeriodSeconds in Kubernetes or a cloud's spot notice.
    #[arg(long, env = "RLOOD_GRACE_S", default_value_t = GRACE_S, value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub grace_s: u64,

    /// Factor on the waits of reward requests; see `rlood serve`.
    #[arg(long, env = "RLOOD_REWARD_PACE", default_value_t = 1.0, hide = true, value_name = "FACTOR")]
    pub reward_pace: f64,

    /// Settings of the runtime `trl`.
    #[command(flatten)]
    pub trl: TrlArgs,

    /// Worker id to register with; set by the server for its own workers.
    #[arg(long, hide = true)]
    pub id: Option<WorkerId>,

    /// Exit when standard input closes; set by the server for its own workers.
    #[arg(long, hide = true)]
    pub child: bool,

    /// File through which the worker lends cores to the serving process; set by the server for its own workers on the CPU.
    #[arg(long, hide = true)]
    pub lending: Option<PathBuf>,

    /// The worker's number in that file.
    #[arg(long, hide = true, default_value_t = 0)]
    pub lending_slot: usize,
}

/// Returns the default directory of downloaded models, used without `--cache-dir`.
pub fn default_cache_dir(scratch_dir: Option<&Path>) -> PathBuf {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    match scratch_dir {
        Some(scratch) => scratch.join("cache"),
        None => absolute("XDG_CACHE_HOME")
            .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
            .unwrap_or_else(std::env::temp_dir)
            .join("rlood"),
    }
}

/// Flags of the child processes that answer one request each, such as `rlood probe` and `rlood judge`.
#[derive(Debug, Clone, Args)]
pub struct OneShotArgs {
    /// Device to compute on: cpu or cuda:N.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,

    /// Number of compute threads. Default: the number of CPU cores.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
}

/// Flags of the processes that keep models loaded, `rlood serving`.
#[derive(Debug, Clone, Args)]
pub struct ServingArgs {
    /// Device to compute on: cpu or cuda:N.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,

    /// Number of compute threads. Default: the number of CPU cores.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,

    /// File through which workers lend cores while they train. Default: the process uses all its threads.
    #[arg(long, value_name = "FILE")]
    pub lending: Option<PathBuf>,

    /// Share of the cores that the process uses while workers train, above 0 and below 1.
    #[arg(long, default_value_t = 0.25, value_name = "SHARE")]
    pub share: f64,

    /// Maximum memory of models, keys and values: bytes, or a number with a unit (512M, 200GB). Default: unknown.
    #[arg(long, value_parser = parse_size, value_name = "SIZE")]
    pub memory_limit: Option<u64>,

    /// Maximum number of answers that are generated at once.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub max_rows: usize,
}
