//! `rlood verdict`: reports whether training improved the model.

use std::time::Duration;

use clap::Args;
use rlood_client::Which;
use serde_json::{Value, json};

use crate::context::{Common, Context};
use crate::error::{CliError, EXIT_CANCELLED, EXIT_FAILED};
use crate::follow::{OutageRetry, interruptible, report_progress, text};
use crate::names::{self, CheckpointName, Pick};
use crate::output::{clean_lines, format_number, shown};

/// How often the server is asked for the state of a verdict (the comparison of trained model and base model).
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of characters of a completion that are shown.
const MAX_SHOWN_CHARS: usize = 160;
/// Maximum number of example rows that are shown: of those that the trained model won, and of those that it lost.
const MAX_SHOWN_ROWS: usize = 2;

/// Flags of `rlood verdict`.
#[derive(Debug, Clone, Args)]
pub struct Verdict {
    /// Job, or one of its checkpoints: JOB, JOB@120, JOB@last or JOB@best.
    #[arg(value_name = "JOB", add = super::completions::jobs())]
    pub job: String,

    /// Checkpoint to compare with the base model: best, last, result, a step, or a checkpoint id (ckpt_…). Default:
    /// the best, else the newest; for a job that ended early, its result.
    #[arg(long, value_name = "WHICH")]
    pub checkpoint: Option<String>,

    /// Completions per row and model; their rewards are averaged. Default: as in the job's evaluation.
    #[arg(short = 'k', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub num_generations: Option<u32>,

    /// Sampling temperature; 0 is greedy. Default: as in the job's evaluation, or as in training
    /// with several completions per row.
    #[arg(long, value_name = "T")]
    pub temperature: Option<f64>,

    /// Start a new comparison. Default: show the newest verdict, if there is one.
    #[arg(long)]
    pub new: bool,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the job does not exist or has no checkpoint to compare, or on Ctrl-C.
pub async fn run(context: &Context, args: &Verdict) -> Result<u8, CliError> {
    let (job, pick) = match CheckpointName::parse(&args.job)? {
        CheckpointName::Id(id) => {
            let checkpoint = context.client.get_checkpoint(id).await?;
            (checkpoint.job_id, Some(json!(id)))
        }
        CheckpointName::OfJob(job, pick) => {
            let pick = match pick {
                Pick::Result => None,
                Pick::Which(Which::Last) => Some(json!("last")),
                Pick::Which(Which::Best) => Some(json!("best")),
                Pick::Step(step) => Some(json!(step)),
            };
            (names::job(context, &job).await?, pick)
        }
    };
    let checkpoint =
        args.checkpoint.as_deref().map(|word| word.parse::<u64>().map_or_else(|_| json!(word), Value::from));
    if checkpoint.is_some() && pick.is_some() {
        return Err(CliError::Usage("the checkpoint is given twice: use either JOB@STEP or --checkpoint".to_owned()));
    }
    let job = job.to_string();
    let verdict = start_or_find(context, &job, args, checkpoint.or(pick)).await?;
    let id = text(&verdict, "id").to_owned();
    let (verdict, document) = interruptible(&format!("rlood verdict {job}"), finished(context, &id)).await?;
    if context.out.json {
        context.out.json(&document)?;
    } else {
        print(context, &verdict)?;
    }
    Ok(exit_code(&verdict))
}

/// Returns the newest verdict of a job, or starts a new comparison.
async fn start_or_find(
    context: &Context,
    job: &str,
    args: &Verdict,
    checkpoint: Option<Value>,
) -> Result<Value, CliError> {
    let mut body = json!({});
    for (name, value) in [
        ("checkpoint", checkpoint),
        ("num_generations", args.num_generations.map(Value::from)),
        ("temperature", args.temperature.map(Value::from)),
    ] {
        if let Some(value) = value {
            body[name] = value;
        }
    }
    // An existing verdict may have used other settings, so it is not returned when a flag sets one of them.
    if !args.new && body == json!({}) {
        match context.client.raw_get(&["jobs", job, "verdict"]).send().await {
            Ok(answer) => return Ok(answer.value),
            Err(error) if error.code() == "no_verdict" => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(context.client.raw_post(&["jobs", job, "verdict"]).body(&body).send().await?.value)
}

async fn finished(context: &Context, id: &str) -> Result<(Value, String), CliError> {
    let mut outage = OutageRetry::default();
    let mut last_line = String::new();
    loop {
        let answer = context.client.raw_get(&["verdicts", id]).send().await;
        let Some(answer) = outage.unwrap_or_wait(&context.out, answer).await? else { continue };
        match text(&answer.value, "state") {
            "queued" | "running" => report_progress(context, &answer.value, &mut last_line),
            _ => return Ok((answer.value, answer.text)),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn exit_code(verdict: &Value) -> u8 {
    match (text(verdict, "state"), text(&verdict["result"], "verdict")) {
        ("succeeded", "better") => 0,
        ("succeeded", "no_difference") => 10,
        ("succeeded", "worse") => 11,
        ("succeeded", "guard_fell") => 12,
        ("succeeded", "too_few_rows") => 13,
        ("cancelled", _) => EXIT_CANCELLED,
        _ => EXIT_FAILED,
    }
}

fn print(context: &Context, verdict: &Value) -> Result<(), CliError> {
    let out = &context.out;
    let line = |label: &str, value: String| out.line(format!("{label:<12} {value}"));
    let result = &verdict["result"];
    let Some(word) = result["verdict"].as_str() else {
        let error = &verdict["error"];
        out.note(format!(
            "{} {}: {}",
            shown(&verdict["id"]),
            shown(&verdict["state"]),
            clean_lines(text(error, "message"))
        ));
        out.note("start a new comparison with `rlood verdict --new`");
        return Ok(());
    };
    let sentence = match word {
        "better" => "better: training improved the model",
        "no_difference" => "no difference: the rows show no difference between the trained model and the base model",
        "worse" => "worse: training made the model worse",
        "guard_fell" => "guard failed: better on the task, but worse on the guard dataset",
        "too_few_rows" => "the dataset has too few rows to decide",
        other => other,
    };
    line("verdict", console::style(sentence).bold().to_string())?;
    line("checkpoint", format!("{}, step {}", shown(&verdict["checkpoint_id"]), shown(&verdict["step"])))?;
    line("rows", format!("{} ({})", shown(&result["rows"]), shown(&result["rows_from"])))?;
    let mean = |model: &str| result[model]["mean"].as_f64().map_or_else(|| "none".to_owned(), format_number);
    line("mean reward", format!("base {}, trained {}", mean("base"), mean("trained")))?;
    line("difference", difference(result))?;
    if result["p_value"].is_number() {
        line("p", shown(&result["p_value"]))?;
    }
    line(
        "result",
        format!("won {}, lost {}, tied {}", shown(&result["won"]), shown(&result["lost"]), shown(&result["tied"])),
    )?;
    let passes = |model: &str| result[model]["pass_at"].as_array().cloned().unwrap_or_default();
    for (base, trained) in passes("base").iter().zip(passes("trained")) {
        let chance = |of: &Value| of["chance"].as_f64().map_or_else(|| "none".to_owned(), format_number);
        line(&format!("pass@{}", shown(&base["k"])), format!("base {}, trained {}", chance(base), chance(&trained)))?;
    }
    if result["guard"].is_object() {
        line("guard", guard(&result["guard"]))?;
    }
    if let Some(note) = result["note"].as_str() {
        line("note", clean_lines(note))?;
    }
    for (label, key) in [("won", "won_examples"), ("lost", "lost_examples")] {
        for row in result[key].as_array().into_iter().flatten().take(MAX_SHOWN_ROWS) {
            out.line("")?;
            let difference = row["difference"].as_f64().unwrap_or_default();
            out.line(format!(
                "  row {} {label}, {}{}",
                shown(&row["row"]),
                sign(difference),
                format_number(difference)
            ))?;
            out.line(format!("    prompt   {}", beginning(text(row, "prompt"))))?;
            for model in ["base", "trained"] {
                let completion = text(&row[model]["completions"][0], "completion");
                out.line(format!("    {model:<8} {}", beginning(completion)))?;
            }
        }
    }
    Ok(())
}

/// Returns the beginning of a completion, on one line.
fn beginning(text: &str) -> String {
    let line = clean_lines(text).split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

fn difference(result: &Value) -> String {
    let difference = result["difference"].as_f64();
    let text = difference
        .map_or_else(|| shown(&result["difference"]), |value| format!("{}{}", sign(value), format_number(value)));
    match (result["interval"][0].as_f64(), result["interval"][1].as_f64()) {
        (Some(low), Some(high)) => {
            format!(
                "{text}, 95 % interval {} to {} ({})",
                format_number(low),
                format_number(high),
                shown(&result["method"])
            )
        }
        _ => text,
    }
}

fn sign(value: f64) -> &'static str {
    if value > 0.0 { "+" } else { "" }
}

fn guard(guard: &Value) -> String {
    let fell = match guard["fell"].as_bool() {
        Some(true) => "the reward on the guard dataset may have fallen by more than that",
        Some(false) => "the reward on the guard dataset did not fall by more than that",
        None => "the dataset has too few rows to decide",
    };
    let margin = guard["margin"].as_f64().unwrap_or_default();
    format!(
        "{} on {} rows of the guard dataset; the reward may fall by {}: {fell}",
        difference(guard),
        shown(&guard["rows"]),
        format_number(margin)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_verdict_has_an_exit_code() {
        for (state, word, code) in [
            ("succeeded", "better", 0),
            ("succeeded", "no_difference", 10),
            ("succeeded", "worse", 11),
            ("succeeded", "guard_fell", 12),
            ("succeeded", "too_few_rows", 13),
            ("failed", "", 1),
            ("cancelled", "", 6),
        ] {
            assert_eq!(exit_code(&json!({"state": state, "result": {"verdict": word}})), code, "{state} {word}");
        }
    }

    #[test]
    fn a_difference_is_shown_with_its_interval() {
        let result = json!({"difference": 0.118, "interval": [0.07, 0.16], "method": "bca"});
        assert_eq!(difference(&result), "+0.118, 95 % interval 0.07 to 0.16 (bca)");
        assert_eq!(difference(&json!({"difference": -0.5, "interval": null})), "-0.5");
    }
}
