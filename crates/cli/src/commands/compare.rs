//! `rlood compare`: shows jobs side by side.

use clap::Args;
use serde_json::Value;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::names;
use crate::output::{NONE, Table, clean, shown};

/// Flags of `rlood compare`.
#[derive(Debug, Clone, Args)]
pub struct Compare {
    /// Jobs to compare, two or more: an id, the beginning of an id, a name, or @last.
    #[arg(value_name = "JOB", num_args = 1.., required = true, add = super::completions::jobs())]
    pub jobs: Vec<String>,

    /// Metrics to show above the settings, as a comma-separated list.
    #[arg(long, value_delimiter = ',', default_value = "reward,eval_reward,kl", value_name = "NAME,…")]
    pub keys: Vec<String>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when one of the jobs does not exist.
pub async fn run(context: &Context, args: &Compare) -> Result<u8, CliError> {
    let ids = names::jobs(context, &args.jobs).await?;
    let ids = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let call = context.client.raw_get(&["jobs", "compare"]).query("ids", ids).query("keys", args.keys.join(","));
    let answer = call.send().await?;
    if context.out.json {
        context.out.json(&answer.text)?;
        return Ok(0);
    }
    let comparison = answer.value;
    let empty = Vec::new();
    let list = |key: &str| comparison[key].as_array().unwrap_or(&empty);
    let mut headings = vec![String::new()];
    headings.extend(list("jobs").iter().map(|job| match job["name"].as_str() {
        Some(name) => clean(name),
        None => shown(&job["id"]),
    }));
    let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    let mut row = |label: &str, value: &dyn Fn(&Value) -> String| {
        let cells = list("jobs").iter().map(value);
        table.row(std::iter::once(label.to_owned()).chain(cells));
    };
    row("id", &|job| shown(&job["id"]));
    row("state", &|job| shown(&job["state"]));
    row("step", &|job| format!("{}/{}", shown(&job["step"]), shown(&job["total_steps"])));
    row("model", &|job| shown(&job["model"]));
    row("best checkpoint", &|job| match &job["best_checkpoint"]["step"] {
        Value::Null => NONE.to_owned(),
        step => format!("step {step}"),
    });
    for key in &args.keys {
        for (label, end) in [("first", true), ("last", false)] {
            let values = |index: usize| {
                let mut steps = list("metrics").iter().filter_map(|step| step[key][index].as_f64());
                if end { steps.next() } else { steps.next_back() }
            };
            let cells: Vec<Option<f64>> = (0..list("jobs").len()).map(values).collect();
            if cells.iter().any(Option::is_some) {
                let cells = cells.into_iter().map(crate::output::format_optional);
                table.row(std::iter::once(format!("{} {label}", clean(key))).chain(cells));
            }
        }
    }
    for difference in list("config") {
        let cells = difference["values"].as_array().into_iter().flatten().map(shown);
        table.row(std::iter::once(shown(&difference["pointer"])).chain(cells));
    }
    table.print(&context.out)?;
    for key in list("unknown_keys") {
        context.out.note(format!("none of the compared jobs has the metric '{}'", shown(key)));
    }
    Ok(0)
}
