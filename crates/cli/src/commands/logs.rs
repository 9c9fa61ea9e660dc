//! `rlood logs`: what the workers logged.

use std::collections::VecDeque;
use std::time::Duration;

use clap::Args;
use rlood_types::id::JobId;
use serde_json::Value;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::{Patience, detached, exit_code, is_over, report_outcome, text};
use crate::listing::Listing;
use crate::names;
use crate::output::{clean_lines, shown};

/// Between two looks for new lines.
const POLL: Duration = Duration::from_secs(1);
/// Lines of a page; the API's most.
const PAGE: usize = 100;

/// Flags of `rlood logs`.
#[derive(Debug, Clone, Args)]
pub struct Logs {
    /// The job: its id, at least 6 characters of it after job_, its name, or @last.
    #[arg(value_name = "JOB", add = super::completions::jobs())]
    pub job: String,

    /// Go on until the job is over, and end with its exit code. Ctrl-C detaches: the job goes on.
    #[arg(short, long)]
    pub follow: bool,

    /// Only the last N lines, and with --follow those that come.
    #[arg(long, value_name = "N")]
    pub tail: Option<usize>,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// When there is no such job, or on Ctrl-C.
pub async fn run(context: &Context, args: &Logs) -> Result<u8, CliError> {
    let id = names::job(context, &args.job).await?;
    if args.follow {
        let job = detached(&[id], "logs -f", follow(context, id, args.tail)).await?;
        report_outcome(&context.out, &job);
        return Ok(exit_code([&job]));
    }
    let mut listing = Listing::read(context.client.raw_get(&["jobs", &id.to_string(), "logs"]), 0).await?;
    if let Some(tail) = args.tail {
        listing.keep_last(tail);
    }
    if context.out.json {
        context.out.json(&listing.document)?;
        return Ok(0);
    }
    listing.items.iter().try_for_each(|line| print(context, line))?;
    Ok(0)
}

/// Prints lines until the job is over; returns the job.
async fn follow(context: &Context, id: JobId, tail: Option<usize>) -> Result<Value, CliError> {
    let mut patience = Patience::default();
    let mut lines = NewLines { id, after: None, seen: 0 };
    let mut first = true;
    loop {
        // The job first: what was logged before it was over is then among the lines.
        let job = context.client.raw_get(&["jobs", &id.to_string()]).send().await;
        let Some(job) = patience.take(&context.out, job).await? else { continue };
        let mut new = VecDeque::new();
        let read = lines.read(context, &mut new).await;
        if first && let Some(tail) = tail {
            new.drain(..new.len().saturating_sub(tail));
        }
        for line in &new {
            print(context, line)?;
        }
        if patience.take(&context.out, read).await?.is_none() {
            continue;
        }
        first = false;
        if is_over(&job.value) {
            return Ok(job.value);
        }
        tokio::time::sleep(POLL).await;
    }
}

/// The lines of a job that were not read yet.
struct NewLines {
    id: JobId,
    /// The cursor of the page that lines are added to.
    after: Option<String>,
    /// Lines of this page that were read.
    seen: usize,
}

impl NewLines {
    async fn read(&mut self, context: &Context, new: &mut VecDeque<Value>) -> Result<(), rlood_client::Error> {
        loop {
            let call = context.client.raw_get(&["jobs", &self.id.to_string(), "logs"]).query("limit", PAGE);
            let (page, _) = call.page(self.after.as_deref()).await?;
            let count = page.data.len();
            new.extend(page.data.into_iter().skip(self.seen));
            match page.next {
                Some(next) => (self.after, self.seen) = (Some(next), 0),
                None => {
                    self.seen = count;
                    return Ok(());
                }
            }
        }
    }
}

fn print(context: &Context, line: &Value) -> Result<(), CliError> {
    if context.out.json {
        return context.out.json(&line.to_string());
    }
    let line = format!("{} {}", shown(&line["time"]), clean_lines(text(line, "line")));
    context.out.line(line)
}
