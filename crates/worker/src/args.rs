//! The flags of the processes.

use std::path::PathBuf;

use clap::Args;

use crate::device::Device;
use crate::id::WorkerId;

/// Seconds that a worker has to save and exit after SIGTERM.
pub const GRACE_S: u64 = 24;

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

    /// Seconds from SIGTERM until this process is gone, 2 to 3600. A worker that runs a job saves a checkpoint within four fifths
    /// of them and gives the job back to the queue (`preempted`), and exits with code 0. Set it below the notice that the
    /// machine gets: Kubernetes' terminationGracePeriodSeconds, a cloud's spot notice.
    #[arg(long, env = "RLOOD_GRACE_S", default_value_t = GRACE_S, value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub grace_s: u64,

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
