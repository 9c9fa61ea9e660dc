//! `rlood events`: prints a job's events.

use clap::Args;
use rlood_client::JobUpdate;
use rlood_types::id::JobId;
use serde_json::Value;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::{OutageRetry, detached, exit_code, is_finished, report_outcomes};
use crate::listing::Listing;
use crate::names;
use crate::output::{clean, shown};

/// Flags of `rlood events`.
#[derive(Debug, Clone, Args)]
pub struct Events {
    /// Job: its id, at least 6 characters of the id after job_, its name, or @last.
    #[arg(value_name = "JOB", add = super::completions::jobs())]
    pub job: String,

    /// Print new events until the job finishes, then exit with the job's exit code. Ctrl-C detaches without stopping the job.
    #[arg(short, long)]
    pub follow: bool,

    /// Print only events after this sequence number.
    #[arg(long, default_value_t = 0, value_name = "SEQ", value_parser = clap::value_parser!(i64).range(0..))]
    pub after: i64,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the job does not exist, or on Ctrl-C.
pub async fn run(context: &Context, args: &Events) -> Result<u8, CliError> {
    let id = names::job(context, &args.job).await?;
    if args.follow {
        let job = detached(&[id], "events -f", follow(context, id, args.after)).await?;
        report_outcomes(context, std::slice::from_ref(&job)).await;
        return Ok(exit_code([&job]));
    }
    let call = context.client.raw_get(&["jobs", &id.to_string(), "events"]);
    let listing =
        Listing::read_after(call, Some(args.after).filter(|after| *after > 0).map(|after| after.to_string())).await?;
    if context.out.json {
        context.out.json(&listing.document)?;
        return Ok(0);
    }
    listing.items.iter().try_for_each(|event| print(context, event))?;
    Ok(0)
}

/// Prints events until the job finishes, and returns the job. The server ends its stream later if the job has
/// a verdict: when that is complete.
async fn follow(context: &Context, id: JobId, after: i64) -> Result<Value, CliError> {
    let mut outage = OutageRetry::default();
    let mut updates = context.client.follow_job(id, after);
    let mut job = read_job(context, &mut outage, id).await?;
    loop {
        let last = job["last_seq"].as_i64().filter(|last| is_finished(&job) && after <= *last);
        if last.is_some_and(|last| updates.last_seq() >= last) {
            return Ok(job);
        }
        let update = updates.next().await;
        let Some(update) = outage.unwrap_or_wait(&context.out, update).await? else {
            updates = context.client.follow_job(id, updates.last_seq());
            continue;
        };
        match update {
            Some(JobUpdate::Event(event)) => {
                if context.out.json {
                    context.out.json(updates.last_json())?;
                } else {
                    // The client parsed the event's text before, so parsing it again cannot fail.
                    print(context, &serde_json::from_str(updates.last_json()).unwrap_or_default())?;
                }
                if matches!(event.kind.as_str(), "job.succeeded" | "job.failed" | "job.cancelled") {
                    job = read_job(context, &mut outage, id).await?;
                }
            }
            Some(JobUpdate::Removed { to_seq }) => {
                context.out.note(format!("the server removed the job's events up to number {to_seq}, because they were past its retention time"));
            }
            Some(JobUpdate::End { .. }) | None => return read_job(context, &mut outage, id).await,
        }
    }
}

async fn read_job(context: &Context, outage: &mut OutageRetry, id: JobId) -> Result<Value, CliError> {
    loop {
        let job = context.client.raw_get(&["jobs", &id.to_string()]).send().await;
        if let Some(job) = outage.unwrap_or_wait(&context.out, job).await? {
            return Ok(job.value);
        }
    }
}

fn print(context: &Context, event: &Value) -> Result<(), CliError> {
    let (seq, time, kind) = (shown(&event["seq"]), shown(&event["time"]), shown(&event["type"]));
    let data = match &event["data"] {
        Value::Null => String::new(),
        data => clean(&data.to_string()),
    };
    let line = format!("{seq:>5} {time} {kind:<20} {data}");
    context.out.line(context.out.fit(line.trim_end()))
}
