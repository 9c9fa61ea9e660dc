//! Flags of `rlood backup` and `rlood restore`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Clone, Args)]
pub struct BackupArgs {
    /// Directory to write the backup to; must be new or empty. The backup contains secrets: protect it like the data directory.
    #[arg(value_name = "DIR")]
    pub to: PathBuf,

    /// The server's data directory. A server may be running on it.
    #[arg(long, env = "RLOOD_DATA_DIR", default_value = "rlood-data", value_name = "DIR")]
    pub data_dir: PathBuf,
}

#[derive(Debug, Clone, Args)]
pub struct RestoreArgs {
    /// Directory that `rlood backup` wrote.
    #[arg(value_name = "DIR")]
    pub from: PathBuf,

    /// Data directory to create; must be new or empty, and not in use.
    #[arg(long, env = "RLOOD_DATA_DIR", default_value = "rlood-data", value_name = "DIR")]
    pub data_dir: PathBuf,

    /// Remove every API key and browser session from the restored data. Otherwise a key that was revoked after the backup is valid
    /// again. Requests still need a key: create one with `rlood keys create`.
    #[arg(long)]
    pub drop_keys: bool,
}
