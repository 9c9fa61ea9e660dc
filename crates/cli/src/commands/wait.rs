//! `rlood wait`: waits until jobs finish, and reports the outcome in the exit code.

use std::time::Duration;

use clap::Args;
use futures::future::try_join_all;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::{detached, exit_code, report_outcomes, wait_for, within};
use crate::names;
use crate::output::parse_duration;

/// Flags of `rlood wait`.
#[derive(Debug, Clone, Args)]
pub struct Wait {
    /// Jobs to wait for: an id, the beginning of an id, a name, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// Exit with code 124 after this time: 30s, 10m, 2h, 1d. The jobs keep running.
    #[arg(long, value_parser = parse_duration, value_name = "TIME")]
    pub timeout: Option<Duration>,

    /// Exit with code 7 when a job is paused. Default: keep waiting until it is resumed and finishes.
    #[arg(long)]
    pub until_paused: bool,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when one of the jobs does not exist, when the time limit is reached, or on Ctrl-C.
pub async fn run(context: &Context, args: &Wait) -> Result<u8, CliError> {
    let ids = names::jobs(context, &args.jobs).await?;
    let all = try_join_all(ids.iter().map(|id| wait_for(context, *id, args.until_paused)));
    let jobs = detached(&ids, "wait", within(args.timeout, all)).await?;
    if context.out.json {
        jobs.iter().try_for_each(|job| context.out.json(&job.to_string()))?;
    }
    report_outcomes(context, &jobs).await;
    Ok(exit_code(&jobs))
}
