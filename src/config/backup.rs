//! Flags of `rlood backup` and `rlood restore`.

use std::path::PathBuf;

use clap::Args;

/// Flags of `rlood backup`.
#[derive(Debug, Clone, Args)]
pub struct BackupArgs {
    /// Directory to write the backup to: new, or empty. It will hold secrets; keep it as you keep the data directory.
    #[arg(value_name = "DIR")]
    pub to: PathBuf,

    /// The server's data directory. A server may be running on it.
    #[arg(long, env = "RLOOD_DATA_DIR", default_value = "rlood-data", value_name = "DIR")]
    pub data_dir: PathBuf,
}

/// Flags of `rlood restore`.
#[derive(Debug, Clone, Args)]
pub struct RestoreArgs {
    /// Directory that `rlood backup` wrote.
    #[arg(value_name = "DIR")]
    pub from: PathBuf,

    /// Data directory to make: new, or empty; never one in use.
    #[arg(long, env = "RLOOD_DATA_DIR", default_value = "rlood-data", value_name = "DIR")]
    pub data_dir: PathBuf,

    /// Remove every API key and browser session from what is restored. Without it a key that was revoked since the backup
    /// is valid again. Requests still need a key: create one with `rlood keys create`.
    #[arg(long)]
    pub drop_keys: bool,
}
