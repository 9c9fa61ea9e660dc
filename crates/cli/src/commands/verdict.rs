//! `rlood verdict`: did training make the model better?

use std::time::Duration;

use clap::Args;
use rlood_client::Which;
use serde_json::{Value, json};

use crate::context::{Common, Context};
use crate::error::{CliError, EXIT_CANCELLED, EXIT_FAILED};
use crate::follow::{Patience, interruptible, say_progress, text};
use crate::names::{self, CheckpointName, Pick};
use crate::output::{clean_lines, figure, shown};

/// Between two looks at a verdict.
const POLL: Duration = Duration::from_secs(1);
/// Characters of a text that are shown.
const SHOWN_CHARS: usize = 160;
/// Rows that are shown of those that were won, and of those that were lost.
const SHOWN: usize = 2;

/// Flags of `rlood verdict`.
#[derive(Debug, Clone, Args)]
pub struct Verdict {
    /// The job, or a checkpoint of it: JOB, JOB@120, JOB@last, JOB@best.
    #[arg(value_name = "JOB", add = super::completions::jobs())]
    pub job: String,

    /// Checkpoint to judge: best, last, result, a step, or ckpt_…. Default: the best, else the
    /// newest.
    #[arg(long, value_name = "WHICH")]
    pub checkpoint: Option<String>,

    /// Completions of each row and model, averaged within the row. Default: as the
    /// job's evaluation.
    #[arg(short = 'k', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub num_generations: Option<u32>,

    /// Temperature of sampling; 0 = greedy. Default: as the job's evaluation; with several completions the training's.
    #[arg(long, value_name = "T")]
    pub temperature: Option<f64>,

    /// Judge again. Without it, the newest verdict is shown where there is one.
    #[arg(long)]
    pub new: bool,

    /// The server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// When there is no such job, it has nothing to judge, or on Ctrl-C.
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
        return Err(CliError::Usage("name the checkpoint once: after the job's @, or with --checkpoint".to_owned()));
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

/// The newest verdict, or a new one.
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
    // What asks for something of its own is not answered by what is there.
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
    let mut patience = Patience::default();
    let mut told = String::new();
    loop {
        let answer = context.client.raw_get(&["verdicts", id]).send().await;
        let Some(answer) = patience.take(&context.out, answer).await? else { continue };
        match text(&answer.value, "state") {
            "queued" | "running" => say_progress(context, &answer.value, &mut told),
            _ => return Ok((answer.value, answer.text)),
        }
        tokio::time::sleep(POLL).await;
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
        out.note("`rlood verdict --new` judges again");
        return Ok(());
    };
    let sentence = match word {
        "better" => "better: training improved the model",
        "no_difference" => "no difference shown: the rows do not tell the trained model from the base model",
        "worse" => "worse: training made the model worse",
        "guard_fell" => "the guard fell: better at its task, and worse at what it must not lose",
        "too_few_rows" => "too few rows to say",
        other => other,
    };
    line("verdict", console::style(sentence).bold().to_string())?;
    line("checkpoint", format!("{}, step {}", shown(&verdict["checkpoint_id"]), shown(&verdict["step"])))?;
    line("rows", format!("{} ({})", shown(&result["rows"]), shown(&result["rows_from"])))?;
    let mean = |model: &str| result[model]["mean"].as_f64().map_or_else(|| "none".to_owned(), figure);
    line("mean reward", format!("base {}, trained {}", mean("base"), mean("trained")))?;
    line("difference", difference(result))?;
    if result["p_value"].is_number() {
        line("p", shown(&result["p_value"]))?;
    }
    line(
        "of the rows",
        format!("won {}, lost {}, tied {}", shown(&result["won"]), shown(&result["lost"]), shown(&result["tied"])),
    )?;
    let passes = |model: &str| result[model]["pass_at"].as_array().cloned().unwrap_or_default();
    for (base, trained) in passes("base").iter().zip(passes("trained")) {
        let chance = |of: &Value| of["chance"].as_f64().map_or_else(|| "none".to_owned(), figure);
        line(&format!("pass@{}", shown(&base["k"])), format!("base {}, trained {}", chance(base), chance(&trained)))?;
    }
    if result["guard"].is_object() {
        line("guard", guard(&result["guard"]))?;
    }
    if let Some(note) = result["note"].as_str() {
        line("note", clean_lines(note))?;
    }
    for (label, key) in [("won", "won_examples"), ("lost", "lost_examples")] {
        for row in result[key].as_array().into_iter().flatten().take(SHOWN) {
            out.line("")?;
            let difference = row["difference"].as_f64().unwrap_or_default();
            out.line(format!("  row {} {label}, {}{}", shown(&row["row"]), sign(difference), figure(difference)))?;
            out.line(format!("    prompt   {}", beginning(text(row, "prompt"))))?;
            for model in ["base", "trained"] {
                let said = text(&row[model]["completions"][0], "completion");
                out.line(format!("    {model:<8} {}", beginning(said)))?;
            }
        }
    }
    Ok(())
}

/// The beginning of a text, in one line.
fn beginning(text: &str) -> String {
    let line = clean_lines(text).split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

fn difference(result: &Value) -> String {
    let difference = result["difference"].as_f64();
    let text =
        difference.map_or_else(|| shown(&result["difference"]), |value| format!("{}{}", sign(value), figure(value)));
    match (result["interval"][0].as_f64(), result["interval"][1].as_f64()) {
        (Some(low), Some(high)) => {
            format!("{text}, 95 % interval {} to {} ({})", figure(low), figure(high), shown(&result["method"]))
        }
        _ => text,
    }
}

fn sign(value: f64) -> &'static str {
    if value > 0.0 { "+" } else { "" }
}

fn guard(guard: &Value) -> String {
    let fell = match guard["fell"].as_bool() {
        Some(true) => "it may have fallen further",
        Some(false) => "it did not fall further",
        None => "too few rows to tell",
    };
    let margin = guard["margin"].as_f64().unwrap_or_default();
    format!("{} on {} rows; may fall by {}: {fell}", difference(guard), shown(&guard["rows"]), figure(margin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_has_its_exit_code() {
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
