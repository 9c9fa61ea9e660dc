//! `rlood export`: a checkpoint merged into its base model, made by the server and downloaded.

use std::path::PathBuf;

use clap::Args;

use super::{merged, pull};
use crate::context::{Common, Context};
use crate::error::CliError;

/// Flags of `rlood export`.
#[derive(Debug, Clone, Args)]
pub struct Export {
    /// The checkpoint: a job (its result: the best checkpoint, else the newest), JOB@120 for a step, JOB@last, JOB@best, or
    /// ckpt_….
    #[arg(value_name = "CKPT|JOB", add = super::completions::jobs())]
    pub checkpoint: String,

    /// Merge the adapter into the base model: a folder that transformers loads. Without it the adapter is downloaded as it is,
    /// as `rlood pull` does.
    #[arg(long)]
    pub merged: bool,

    /// With --merged: precision of the weights. Default: as the base model has them.
    #[arg(long, value_name = "DTYPE", value_parser = merged::DTYPES, requires = "merged")]
    pub dtype: Option<String>,

    /// Folder to make. Default: JOB-stepN-merged here.
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// When there is no such checkpoint, the server cannot merge it, or the download fails.
pub async fn run(context: &Context, args: &Export) -> Result<u8, CliError> {
    match args.merged {
        true => merged::pull(context, &args.checkpoint, args.dtype.as_deref(), args.output.as_deref()).await,
        false => pull::adapter(context, &args.checkpoint, args.output.as_deref(), false).await,
    }
}
