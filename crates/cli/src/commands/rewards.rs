//! `rlood rewards`: shows the requests and failures of a job's rewards.

use clap::Args;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::listing::Listing;
use crate::names;
use crate::output::{Table, format_age, shown};

/// Flags of `rlood rewards`.
#[derive(Debug, Clone, Args)]
pub struct Rewards {
    /// Job: its id, at least 6 characters of the id after job_, its name, or @last.
    #[arg(value_name = "JOB", add = super::completions::jobs())]
    pub job: String,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the job does not exist.
pub async fn run(context: &Context, args: &Rewards) -> Result<u8, CliError> {
    let id = names::job(context, &args.job).await?;
    let listing = Listing::whole(context.client.raw_get(&["jobs", &id.to_string(), "rewards"])).await?;
    if context.out.json {
        context.out.json(&listing.document)?;
        return Ok(0);
    }
    let mut table =
        Table::new(&["name", "type", "weight", "samples", "missing", "requests", "retries", "failed", "updated", ""]);
    for reward in &listing.items {
        let marks = [("degraded", "degraded"), ("evaluation", "evaluation only")];
        let marks: Vec<&str> = marks.iter().filter(|(key, _)| reward[key] == true).map(|(_, word)| *word).collect();
        let figures = ["name", "type", "weight", "samples", "missing", "requests", "retries", "failed"];
        let cells = figures.iter().map(|key| shown(&reward[key]));
        table.row(cells.chain([format_age(&reward["updated_at"]), marks.join(", ")]));
    }
    table.print(&context.out)?;
    Ok(0)
}
