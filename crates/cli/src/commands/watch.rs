//! `rlood watch`: jobs as they go on.

use clap::Args;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::{detached, exit_code, live, report_outcome};
use crate::names;

/// Flags of `rlood watch`.
#[derive(Debug, Clone, Args)]
pub struct Watch {
    /// The jobs: ids, beginnings of ids, names, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// End with exit code 7 when a job is paused, in place of waiting for it to go on.
    #[arg(long)]
    pub until_paused: bool,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// When one of the jobs does not exist, or on Ctrl-C.
pub async fn run(context: &Context, args: &Watch) -> Result<u8, CliError> {
    let ids = names::jobs(context, &args.jobs).await?;
    let jobs = detached(&ids, "watch", live::watch(context, &ids, args.until_paused)).await?;
    jobs.iter().for_each(|job| report_outcome(&context.out, job));
    Ok(exit_code(&jobs))
}
