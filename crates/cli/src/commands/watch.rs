//! `rlood watch`: follows jobs and shows their progress.

use clap::Args;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::{detached, exit_code, live, report_outcomes};
use crate::names;

/// Flags of `rlood watch`.
#[derive(Debug, Clone, Args)]
pub struct Watch {
    /// Jobs to follow: an id, the beginning of an id, a name, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// Exit with code 7 when a job is paused. Default: keep waiting until it is resumed and finishes.
    #[arg(long)]
    pub until_paused: bool,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when one of the jobs does not exist, or on Ctrl-C.
pub async fn run(context: &Context, args: &Watch) -> Result<u8, CliError> {
    let ids = names::jobs(context, &args.jobs).await?;
    let jobs = detached(&ids, "watch", live::watch(context, &ids, args.until_paused)).await?;
    report_outcomes(context, &jobs).await;
    Ok(exit_code(&jobs))
}
