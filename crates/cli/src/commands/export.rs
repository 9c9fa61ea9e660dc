//! `rlood export`: converts a checkpoint on the server, into a merged model or for llama.cpp, and downloads the result.

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

    /// Merge the adapter into the base model. The result is a folder that transformers can load. Without a format the adapter
    /// is downloaded unchanged, as by `rlood pull`.
    #[arg(long, conflicts_with_all = ["gguf", "gguf_adapter"])]
    pub merged: bool,

    /// Write the merged model as one file for llama.cpp, model.gguf, with its tokenizer.
    #[arg(long, conflicts_with = "gguf_adapter")]
    pub gguf: bool,

    /// Write the adapter alone for llama.cpp, adapter.gguf, for its option --lora beside the base model as GGUF.
    #[arg(long)]
    pub gguf_adapter: bool,

    /// Precision of the weights. Default: the base model's precision; float32 for --gguf-adapter. q8_0 needs --gguf.
    #[arg(long, value_name = "DTYPE", value_parser = merged::DTYPES)]
    pub dtype: Option<String>,

    /// Context length that --gguf writes, in tokens. llama.cpp ignores attention windows, so a model with one needs a context that is
    /// not longer. Default: the model's.
    #[arg(long, value_name = "TOKENS", requires = "gguf")]
    pub context_length: Option<u64>,

    /// Folder to create. Default: JOB-stepN-merged, JOB-stepN-gguf or JOB-stepN-gguf-adapter in the current directory.
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the checkpoint does not exist, the server cannot merge it, or the download fails.
pub async fn run(context: &Context, args: &Export) -> Result<u8, CliError> {
    let format = match (args.merged, args.gguf, args.gguf_adapter) {
        (true, ..) => "merged",
        (_, true, _) => "gguf",
        (.., true) => "gguf_adapter",
        _ if args.dtype.is_some() => {
            return Err(CliError::Usage("--dtype needs --merged, --gguf or --gguf-adapter".to_owned()));
        }
        _ => return pull::adapter(context, &args.checkpoint, args.output.as_deref(), false).await,
    };
    let wanted = merged::Wanted { format, dtype: args.dtype.as_deref(), context_length: args.context_length };
    merged::pull(context, &args.checkpoint, wanted, args.output.as_deref()).await
}
