//! The output of `rlood watch`: on a terminal a table that is redrawn, else lines, and with `--json` the job as JSON
//! each time it changes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use futures::future::join_all;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use rlood_types::id::JobId;
use serde_json::Value;

use super::job_metrics::JobMetrics;
use super::{OutageRetry, is_settled, text};
use crate::context::Context;
use crate::error::CliError;
use crate::output::{clean, format_number, shown, sparkline};

/// Seconds that the server may hold a request for a running job.
const WAIT_S: u64 = 1;
/// Minimum time between two lines about a job whose state has not changed.
const MIN_LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Width of a sparkline, in characters.
const SPARKLINE_WIDTH: usize = 32;
/// Width of the progress bar, in characters.
const BAR_WIDTH: usize = 20;

/// Shows the progress of jobs until each of them has finished, or is paused if `until_paused` is set. Returns the jobs
/// in their final state.
///
/// # Errors
/// Fails when a job does not exist, or the server is unreachable for too long.
pub async fn watch(context: &Context, ids: &[JobId], until_paused: bool) -> Result<Vec<Value>, CliError> {
    let mut view: Box<dyn View> = if context.out.json {
        Box::new(Documents::default())
    } else if context.out.is_terminal {
        Box::new(Frame::new(ids.len()))
    } else {
        Box::new(Lines::new(ids))
    };
    let mut jobs: Vec<JobMetrics> = ids.iter().map(|id| JobMetrics::new(*id)).collect();
    let mut outage = OutageRetry::default();
    let mut wait_s = 0;
    loop {
        let begun = Instant::now();
        let open = jobs.iter_mut().filter(|metrics| !is_settled(&metrics.job, until_paused));
        let updated = join_all(open.map(|metrics| metrics.update(context, wait_s))).await;
        let updated: Result<(), _> = updated.into_iter().collect();
        let is_updated = outage.unwrap_or_wait(&context.out, updated).await?.is_some();
        if is_updated {
            view.show(context, &jobs)?;
            if jobs.iter().all(|metrics| is_settled(&metrics.job, until_paused)) {
                view.close();
                return Ok(jobs.into_iter().map(|metrics| metrics.job).collect());
            }
        }
        wait_s = WAIT_S;
        // The server answers immediately if a job is paused, so the loop waits between requests.
        let pause = Duration::from_secs(WAIT_S).saturating_sub(begun.elapsed());
        tokio::time::sleep(pause).await;
    }
}

/// A format in which the progress of jobs is shown: JSON, lines or a live table.
trait View {
    fn show(&mut self, context: &Context, jobs: &[JobMetrics]) -> Result<(), CliError>;
    /// Finishes the output; `show` is not called again.
    fn close(&mut self) {}
}

/// Prints a job as one line of JSON each time it changes.
#[derive(Default)]
struct Documents {
    shown: Vec<String>,
}

impl View for Documents {
    fn show(&mut self, context: &Context, jobs: &[JobMetrics]) -> Result<(), CliError> {
        self.shown.resize(jobs.len(), String::new());
        for (metrics, shown) in jobs.iter().zip(&mut self.shown) {
            if *shown != metrics.json {
                shown.clone_from(&metrics.json);
                context.out.json(shown)?;
            }
        }
        Ok(())
    }
}

/// Prints one line for each change of a job, for a pipe or a log file.
struct Lines {
    jobs: Vec<LastPrinted>,
}

/// The values of a job in the line that was printed last.
struct LastPrinted {
    activity: String,
    step: Value,
    at: Option<Instant>,
    alerts: BTreeSet<String>,
}

impl Lines {
    fn new(ids: &[JobId]) -> Self {
        let nothing_printed =
            || LastPrinted { activity: String::new(), step: Value::Null, at: None, alerts: BTreeSet::new() };
        Self { jobs: ids.iter().map(|_| nothing_printed()).collect() }
    }
}

impl View for Lines {
    fn show(&mut self, context: &Context, jobs: &[JobMetrics]) -> Result<(), CliError> {
        let several = jobs.len() > 1;
        for (metrics, last) in jobs.iter().zip(&mut self.jobs) {
            let name = if several { format!("{}  ", metrics.id) } else { String::new() };
            for (key, line) in alerts(&metrics.job) {
                if last.alerts.insert(key) {
                    context.out.line(format!("{name}{line}"))?;
                }
            }
            // The phases within a training step (sampling, scoring, …) are not printed, since they change too often.
            let activity = format!("{} {}", text(&metrics.job, "state"), shown(&metrics.job["status_reason"]));
            let step = &metrics.job["step"];
            let is_due = last.at.is_none_or(|at| at.elapsed() >= MIN_LINE_INTERVAL);
            if last.activity != activity || (last.step != *step && is_due) {
                context.out.line(format!("{name}{}", metrics.line()))?;
                (last.activity, last.step, last.at) = (activity, step.clone(), Some(Instant::now()));
            }
        }
        Ok(())
    }
}

/// Returns the active alerts of a job: for each alert a key that identifies it, and the line to print.
fn alerts(job: &Value) -> Vec<(String, String)> {
    let alerts = job["alerts"].as_array().map_or(&[][..], Vec::as_slice);
    let line = |alert: &Value| {
        let key = format!("{} {}", alert["rule"], alert["step"]);
        let (severity, rule) = (text(alert, "severity"), text(alert, "rule"));
        (key, format!("! {severity} {rule}, step {}: {}", shown(&alert["step"]), clean(text(alert, "message"))))
    };
    alerts.iter().map(line).collect()
}

/// Shows a few lines for each job on the terminal and redraws them in place.
struct Frame {
    bars: Vec<ProgressBar>,
}

impl Frame {
    fn new(jobs: usize) -> Self {
        let frame = MultiProgress::with_draw_target(ProgressDrawTarget::stdout());
        let style = ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = |_| frame.add(ProgressBar::new(1).with_style(style.clone()));
        Self { bars: (0..jobs).map(bar).collect() }
    }
}

impl View for Frame {
    fn show(&mut self, context: &Context, jobs: &[JobMetrics]) -> Result<(), CliError> {
        for (metrics, bar) in jobs.iter().zip(&self.bars) {
            let lines = job_lines(metrics);
            bar.set_message(lines.iter().map(|line| context.out.fit(line)).collect::<Vec<_>>().join("\n"));
        }
        Ok(())
    }

    fn close(&mut self) {
        self.bars.iter().for_each(ProgressBar::abandon);
    }
}

/// Returns the lines that the live table shows for a job.
fn job_lines(metrics: &JobMetrics) -> Vec<String> {
    let job = &metrics.job;
    let name = job["name"].as_str().map(|name| format!("  {}", clean(name))).unwrap_or_default();
    let mut lines = vec![format!("{}{name}  {}", console::style(&metrics.id).bold(), metrics.activity())];
    let (step, total) = (job["step"].as_u64().unwrap_or(0), job["total_steps"].as_u64().unwrap_or(0));
    let done = (step * BAR_WIDTH as u64).checked_div(total).unwrap_or(0).min(BAR_WIDTH as u64) as usize;
    lines.push(format!("  {}{}  {}", "━".repeat(done), "─".repeat(BAR_WIDTH - done), metrics.progress()));
    for (label, key) in [("reward", "reward"), ("eval reward", "eval_reward")] {
        let series = metrics.series(key);
        if let (Some(first), Some(last)) = (series.first(), series.last()) {
            let line = sparkline(&series, SPARKLINE_WIDTH);
            lines.push(format!(
                "  {label:<11} {}  {} → {}",
                console::style(line).cyan(),
                format_number(*first),
                format_number(*last)
            ));
        }
    }
    lines.extend(alerts(job).into_iter().map(|(_, line)| format!("  {}", console::style(line).yellow())));
    lines
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_block_has_the_bar_the_figures_and_the_alerts() {
        console::set_colors_enabled(false);
        let mut metrics = JobMetrics::new(JobId::new());
        let alert = json!({"rule": "reward_flat", "severity": "warning", "step": 7, "message": "no\u{1b}[2J spread"});
        metrics.job = json!({"name": "sums", "state": "running", "step": 5, "total_steps": 10, "alerts": [alert]});
        let lines = job_lines(&metrics);
        assert_eq!(lines[0], format!("{}  sums  running", metrics.id));
        assert!(lines[1].starts_with("  ━━━━━━━━━━──────────  step 5/10"), "{lines:?}");
        assert_eq!(lines[2], "  ! warning reward_flat, step 7: no\u{fffd}[2J spread");
    }
}
