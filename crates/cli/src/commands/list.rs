//! `rlood list`: lists jobs, newest first.

use clap::Args;
use rlood_types::job::State;
use serde_json::Value;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::text;
use crate::listing::Listing;
use crate::output::{NONE, Table, format_age, format_duration, shown};

/// Flags of `rlood list`.
#[derive(Debug, Clone, Args)]
pub struct List {
    /// Show only jobs in these states, as a comma-separated list: queued, running, paused, succeeded, failed, cancelled.
    #[arg(long, value_delimiter = ',', value_parser = parse_state, value_name = "STATE,…")]
    pub state: Vec<&'static str>,

    /// Show only jobs whose name contains this text.
    #[arg(long, value_name = "TEXT")]
    pub name: Option<String>,

    /// Show only jobs that train this model.
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,

    /// Show only jobs with this label. Can be given several times.
    #[arg(long = "label", value_parser = parse_label, value_name = "KEY=VALUE")]
    pub labels: Vec<(String, String)>,

    /// Maximum number of jobs to show; 0 shows all.
    #[arg(long, default_value_t = 20, value_name = "N")]
    pub limit: usize,

    /// Print only the ids, one per line.
    #[arg(short, long)]
    pub quiet: bool,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

fn parse_state(text: &str) -> Result<&'static str, String> {
    let known = State::ALL.map(State::as_str);
    let found = known.into_iter().find(|state| *state == text);
    found.ok_or_else(|| format!("'{text}' is not the state of a job; must be one of {}", known.join(", ")))
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    let label = text.split_once('=').filter(|(key, _)| !key.is_empty());
    let (key, value) = label.ok_or_else(|| format!("'{text}' is not the label of a job; must be KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}

/// # Errors
/// Fails when the server does not answer with a list of jobs.
pub async fn run(context: &Context, args: &List) -> Result<u8, CliError> {
    let List { state, name, model, labels, limit, quiet, common: _ } = args;
    let states = (!state.is_empty()).then(|| state.join(","));
    let mut call = context.client.raw_get(&["jobs"]).query_if("state", states);
    call = call.query_if("name_contains", name.as_ref()).query_if("model", model.as_ref());
    for (key, value) in labels {
        call = call.query(&format!("metadata.{key}"), value);
    }
    let listing = Listing::read(call, *limit).await?;
    if context.out.json {
        context.out.json(&listing.document)?;
    } else if *quiet {
        for job in &listing.items {
            context.out.line(text(job, "id"))?;
        }
    } else if listing.items.is_empty() {
        context.out.note("no jobs");
    } else {
        table(&listing.items).print(&context.out)?;
    }
    Ok(0)
}

fn table(jobs: &[Value]) -> Table {
    let mut table = Table::new(&["id", "state", "step", "ETA", "model", "submitted", "name"]);
    for job in jobs {
        let state = match job["status_reason"].as_str() {
            Some(reason) => format!("{} ({})", shown(&job["state"]), crate::output::clean(reason)),
            None => shown(&job["state"]),
        };
        table.row([
            shown(&job["id"]),
            state,
            format!("{}/{}", shown(&job["step"]), shown(&job["total_steps"])),
            job["eta_s"].as_f64().map_or_else(|| NONE.to_owned(), format_duration),
            shown(&job["plan"]["model"]["id"]),
            format_age(&job["created_at"]),
            shown(&job["name"]),
        ]);
    }
    table
}
