//! `rlood show`: shows a job and its outcome.

use clap::Args;
use serde_json::Value;

use crate::context::{Common, Context};
use crate::error::CliError;
use crate::follow::text;
use crate::names;
use crate::output::{
    Table, between, clean, clean_lines, format_age, format_bytes, format_duration, format_number, shown,
};

/// Flags of `rlood show`.
#[derive(Debug, Clone, Args)]
pub struct Show {
    /// Job: its id, at least 6 characters of the id after job_, its name, or @last.
    #[arg(value_name = "JOB", add = super::completions::jobs())]
    pub job: String,

    /// Print the job's settings in this format instead, ready to be submitted again.
    #[arg(long, value_name = "FORMAT", value_parser = ["json", "yaml", "toml"])]
    pub config: Option<String>,

    /// Flags for the server and the output.
    #[command(flatten)]
    pub common: Common,
}

/// # Errors
/// Fails when the job does not exist.
pub async fn run(context: &Context, args: &Show) -> Result<u8, CliError> {
    let id = names::job(context, &args.job).await?.to_string();
    if let Some(format) = &args.config {
        let config = context.client.raw_get(&["jobs", &id, "config"]).query("format", format).text().await?;
        context.out.text(&config)?;
        return Ok(0);
    }
    let job = context.client.raw_get(&["jobs", &id]).send().await?;
    if context.out.json {
        context.out.json(&job.text)?;
        return Ok(0);
    }
    let summary = context.client.raw_get(&["jobs", &id, "summary"]).send().await?.value;
    let checkpoints =
        context.client.raw_get(&["jobs", &id, "checkpoints"]).query("limit", 100).pages().collect().await?;
    let job = job.value;
    print_verdict(context, &summary["verdict"])?;
    print_head(context, &job)?;
    print_rewards_and_alerts(context, &job, &summary)?;
    print_outcome(context, &job)?;
    if !checkpoints.is_empty() {
        context.out.line("")?;
        table(&checkpoints).print(&context.out)?;
    }
    Ok(0)
}

/// Prints the verdict in the summary of a job: whether the trained model is better than the base model, by how much, and the
/// limitations of the comparison.
fn print_verdict(context: &Context, verdict: &Value) -> Result<(), CliError> {
    for (label, value) in verdict_lines(verdict) {
        let line = format!("{label:<12} {value}");
        // The first of these lines has the answer, and the others explain it.
        context.out.line(if label == "verdict" { console::style(line).bold().to_string() } else { line })?;
    }
    Ok(())
}

/// Returns the lines about a verdict with their labels.
fn verdict_lines(verdict: &Value) -> Vec<(&'static str, String)> {
    if !verdict.is_object() {
        return Vec::new();
    }
    let Some(word) = verdict["verdict"].as_str() else {
        let why = verdict["error"]["message"].as_str().map(|why| format!(": {}", clean(why))).unwrap_or_default();
        let state = match text(verdict, "state") {
            state @ ("queued" | "running") => format!("the comparison with the base model is {state}"),
            _ => format!("the comparison with the base model {}", shown(&verdict["state"])),
        };
        return vec![("verdict", format!("{state}{why}"))];
    };
    let answer = verdict["summary"].as_str().unwrap_or(word);
    let compared = format!("checkpoint {} of step {}", shown(&verdict["checkpoint_id"]), shown(&verdict["step"]));
    let note = verdict["note"].as_str().map(|note| ("", clean(note)));
    [("verdict", clean(answer)), ("", compared)].into_iter().chain(note).collect()
}

fn print_head(context: &Context, job: &Value) -> Result<(), CliError> {
    let line = |label: &str, value: String| context.out.line(format!("{label:<12} {value}"));
    line("job", console::style(shown(&job["id"])).bold().to_string())?;
    if job["name"].is_string() {
        line("name", shown(&job["name"]))?;
    }
    let reason = job["status_reason"].as_str().map(|reason| format!(" ({})", clean(reason))).unwrap_or_default();
    let requested = job["requested"].as_str().map(|request| format!(", {request} requested")).unwrap_or_default();
    line("state", format!("{}{reason}{requested}", shown(&job["state"])))?;
    let eta = job["eta_s"].as_f64().map(|eta| format!(", {} remaining", format_duration(eta))).unwrap_or_default();
    line("step", format!("{} of {}{eta}", shown(&job["step"]), shown(&job["total_steps"])))?;
    line("model", shown(&job["plan"]["model"]["id"]))?;
    let rows = &job["plan"]["dataset"]["num_rows"];
    line("dataset", format!("{}, {} rows", shown(&job["plan"]["dataset"]["id"]), shown(rows)))?;
    line("submitted", format_age(&job["created_at"]))?;
    if let Some(took) = between(&job["started_at"], &job["finished_at"]) {
        line("took", format_duration(took))?;
    }
    if job["device"].is_string() {
        line("device", shown(&job["device"]))?;
    }
    if job["parent"].is_string() {
        line("created from", shown(&job["parent"]))?;
    }
    for (key, value) in job["metadata"].as_object().into_iter().flatten() {
        line("label", format!("{}={}", clean(key), shown(value)))?;
    }
    Ok(())
}

fn print_rewards_and_alerts(context: &Context, job: &Value, summary: &Value) -> Result<(), CliError> {
    for (label, series) in [("reward", &summary["reward"]), ("eval reward", &summary["eval_reward"])] {
        if let (Some(first), Some(last)) = (series["first"].as_f64(), series["last"].as_f64()) {
            let best = format!("best {} at step {}", shown(&series["best"]), shown(&series["best_step"]));
            context.out.line(format!("{label:<12} {} → {}, {best}", format_number(first), format_number(last)))?;
        }
    }
    if let Some(kl) = summary["kl"].as_f64() {
        context.out.line(format!("{:<12} {}", "KL", format_number(kl)))?;
    }
    for alert in job["alerts"].as_array().into_iter().flatten() {
        let (severity, rule, message) = (text(alert, "severity"), text(alert, "rule"), clean(text(alert, "message")));
        let line = format!("{:<12} {severity} {rule}, step {}: {message}", "alert", shown(&alert["step"]));
        context.out.line(console::style(line).yellow().to_string())?;
        context.out.line(format!("{:<12} {}", "", clean(text(alert, "fix"))))?;
    }
    Ok(())
}

fn print_outcome(context: &Context, job: &Value) -> Result<(), CliError> {
    let failure = &job["failure"];
    if failure.is_object() {
        let message = clean_lines(text(failure, "message"));
        let line = format!("{:<12} {}: {message}", "failure", shown(&failure["code"]));
        context.out.line(console::style(line).red().to_string())?;
        if let Some(suggestion) = failure["suggestion"].as_str() {
            context.out.line(format!("{:<12} {}", "", clean_lines(suggestion)))?;
        }
    }
    if let Some(message) = job["ending"]["message"].as_str() {
        context.out.line(format!("{:<12} {}", "ended early", clean(message)))?;
    }
    Ok(())
}

fn table(checkpoints: &[Value]) -> Table {
    let mut table = Table::new(&["checkpoint", "step", "size", "eval reward", "saved", ""]);
    for checkpoint in checkpoints {
        let files = checkpoint["files"].as_array().into_iter().flatten();
        let bytes = files.filter_map(|file| file["size_bytes"].as_u64()).sum();
        let marks = [("best", "best"), ("pinned", "pinned")];
        let marks: Vec<&str> = marks.iter().filter(|(key, _)| checkpoint[key] == true).map(|(_, word)| *word).collect();
        table.row([
            shown(&checkpoint["id"]),
            shown(&checkpoint["step"]),
            format_bytes(bytes),
            shown(&checkpoint["metrics"]["eval_reward"]),
            format_age(&checkpoint["created_at"]),
            marks.join(", "),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_verdict_is_its_sentence_its_checkpoint_and_its_note() {
        let mut verdict = json!({
            "checkpoint_id": "ckpt_1", "step": 20, "state": "succeeded", "verdict": "better", "error": null,
            "summary": "The trained model is better: mean reward 0.5 (difference +0.3, 95 % interval +0.1 to +0.5).",
            "note": "3 rows are left out", "rows": 100, "difference": 0.3, "interval": [0.1, 0.5]
        });
        let lines = verdict_lines(&verdict);
        assert!(lines[0].0 == "verdict" && lines[0].1.contains("95 % interval +0.1 to +0.5"), "{lines:?}");
        assert_eq!(
            lines[1..],
            [("", "checkpoint ckpt_1 of step 20".to_owned()), ("", "3 rows are left out".to_owned())]
        );
        for key in ["verdict", "summary", "note"] {
            verdict[key] = Value::Null;
        }
        verdict["state"] = json!("running");
        assert_eq!(verdict_lines(&verdict), [("verdict", "the comparison with the base model is running".to_owned())]);
        verdict["state"] = json!("failed");
        verdict["error"] = json!({"message": "no memory"});
        let failed = "the comparison with the base model failed: no memory";
        assert_eq!(verdict_lines(&verdict), [("verdict", failed.to_owned())]);
        assert!(verdict_lines(&Value::Null).is_empty());
    }
}
