//! `rlood export`: merges a checkpoint into its base model on the server and downloads the result.

use std::path::PathBuf;

use clap::Args;

use super::{merged, pull};
use crate::context::{Common, Context};
use crate::error::CliError;

/// Flags of `rlood export`.
#[derive(Debug, Clone, Args)]
pub struct Export {
    /// Checkpoint: a job (its best checkpoint, else its newest), JOB@120 for a step, JOB@last, JOB@best,
    /// or a checkpoint id (ckpt_…).
    #[arg(value_name = "CKPT|JOB", add = super::completions::jobs())]
    pub checkpoint: String,

    /// Merge the adapter into the base model. The result is a folder that transformers can load. Without this flag the adapter
    /// is downloaded unchanged, as by `rlood pull`.
    #[arg(long)]
    pub merged: bool,

    /// Precision of the merged weights; requires --merged. Default: the base model's precision.
    #[arg(long, value_name = "DTYPE", value_parser = merged::DTYPES, requires = "merged")]
    pub dtype: Option<String>,

    /// Folder to create. Default: JOB-stepN-merged in the current directory.
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the checkpoint does not exist, the server cannot merge it, or the download fails.
pub async fn run(context: &Context, args: &Export) -> Result<u8, CliError> {
    match args.merged {
        true => merged::pull(context, &args.checkpoint, args.dtype.as_deref(), args.output.as_deref()).await,
        false => pull::adapter(context, &args.checkpoint, args.output.as_deref(), false).await,
    }
}
