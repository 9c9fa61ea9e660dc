//! Flags of `rlood runtime`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

#[derive(Debug, Clone, Args)]
pub struct RuntimeArgs {
    /// The action on a runtime.
    #[command(subcommand)]
    pub command: RuntimeCommand,
}

/// The actions of `rlood runtime`.
#[derive(Debug, Clone, Subcommand)]
pub enum RuntimeCommand {
    /// Install the Python environment of a runtime: exactly the packages that this version of rlood was tested with, each verified by
    /// its hash. Needs Python 3.11 or later, about 6 GB of disk, and uv or pip.
    Install(RuntimeInstallArgs),
}

/// A runtime that can be installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Runtime {
    /// TRL of Hugging Face, for its RLOOTrainer.
    Trl,
}

/// An optional part of a runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RuntimeExtra {
    /// Models that read images.
    Vlm,
    /// Base models in 8 and 4 bits.
    Quantized,
    /// Training divided between several GPUs.
    Deepspeed,
}

impl RuntimeExtra {
    /// Returns the value as written on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vlm => "vlm",
            Self::Quantized => "quantized",
            Self::Deepspeed => "deepspeed",
        }
    }
}

#[derive(Debug, Clone, Args)]
pub struct RuntimeInstallArgs {
    /// The runtime to install.
    #[arg(value_enum)]
    pub runtime: Runtime,

    /// Optional parts, comma-separated: vlm (images), quantized (8 and 4 bits), deepspeed (several GPUs).
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST")]
    pub extras: Vec<RuntimeExtra>,

    /// Directory of the environment; parts can be added to an existing one. Default: `rlood/runtimes/trl` in the user's data
    /// directory (XDG_DATA_HOME, else ~/.local/share), where workers find it without a setting.
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,

    /// Python interpreter from which the environment is made, 3.11 or later.
    #[arg(long, default_value = "python3", value_name = "FILE")]
    pub python: PathBuf,
}
