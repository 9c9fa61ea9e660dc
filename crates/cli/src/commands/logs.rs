//! `rlood logs`: prints the log lines that workers wrote for a job.

use std::collections::VecDeque;
use std::time::Duration;

use clap::Args;
use rlood_types::id::JobId;
use serde_json::Value;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::{OutageRetry, detached, exit_code, is_finished, report_outcomes, text};
use crate::listing::Listing;
use crate::names;
use crate::output::{clean_lines, shown};

/// How often the server is polled for new lines of the job's log.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Number of log lines requested per page, the maximum that the API allows.
const PAGE: usize = 100;

/// Flags of `rlood logs`.
#[derive(Debug, Clone, Args)]
pub struct Logs {
    /// Job: its id, at least 6 characters of the id after job_, its name, or @last.
    #[arg(value_name = "JOB", add = super::completions::jobs())]
    pub job: String,

    /// Print new lines until the job finishes, then exit with the job's exit code. Ctrl-C detaches without stopping the job.
    #[arg(short, long)]
    pub follow: bool,

    /// Print only the last N lines. With --follow, new lines are printed after them.
    #[arg(long, value_name = "N")]
    pub tail: Option<usize>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the job does not exist, or on Ctrl-C.
pub async fn run(context: &Context, args: &Logs) -> Result<u8, CliError> {
    let id = names::job(context, &args.job).await?;
    if args.follow {
        let job = detached(&[id], "logs -f", follow(context, id, args.tail)).await?;
        report_outcomes(context, std::slice::from_ref(&job)).await;
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

/// Prints log lines until the job finishes, and returns the job.
async fn follow(context: &Context, id: JobId, tail: Option<usize>) -> Result<Value, CliError> {
    let mut outage = OutageRetry::default();
    let mut lines = NewLines { id, after: None, seen: 0 };
    let mut first = true;
    loop {
        // The job is read before its log lines: if the job has finished by then, the next lines are the last ones.
        let job = context.client.raw_get(&["jobs", &id.to_string()]).send().await;
        let Some(job) = outage.unwrap_or_wait(&context.out, job).await? else { continue };
        let mut new = VecDeque::new();
        let read = lines.read(context, &mut new).await;
        if first && let Some(tail) = tail {
            new.drain(..new.len().saturating_sub(tail));
        }
        for line in &new {
            print(context, line)?;
        }
        if outage.unwrap_or_wait(&context.out, read).await?.is_none() {
            continue;
        }
        first = false;
        if is_finished(&job.value) {
            return Ok(job.value);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Reads those log lines of a job that were not read before.
struct NewLines {
    id: JobId,
    /// Cursor of the last page, to which the server appends new lines.
    after: Option<String>,
    /// Number of lines of this page that were read before.
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
