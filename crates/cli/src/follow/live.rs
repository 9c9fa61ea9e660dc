//! `watch`: a table on a terminal that is drawn again as the jobs go on; lines elsewhere; with `--json` the job's document each
//! time it changes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use futures::future::join_all;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use rlood_types::id::JobId;
use serde_json::Value;

use super::figures::Figures;
use super::{Patience, is_settled, text};
use crate::context::Context;
use crate::error::CliError;
use crate::output::{clean, figure, shown, sparkline};

/// How long the server holds a request for a job that goes on.
const WAIT_S: u64 = 1;
/// Between two lines of a job that only makes steps.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// Width of a sparkline.
const COURSE: usize = 32;
/// Width of the bar of steps.
const BAR: usize = 20;

/// Shows jobs until each of them is over, or paused if `until_paused`. Returns them as they are then.
///
/// # Errors
/// When a job does not exist, or the server is away for too long.
pub async fn watch(context: &Context, ids: &[JobId], until_paused: bool) -> Result<Vec<Value>, CliError> {
    let mut view: Box<dyn View> = if context.out.json {
        Box::new(Documents::default())
    } else if context.out.is_terminal {
        Box::new(Frame::new(ids.len()))
    } else {
        Box::new(Lines::new(ids))
    };
    let mut jobs: Vec<Figures> = ids.iter().map(|id| Figures::new(*id)).collect();
    let mut patience = Patience::default();
    let mut wait_s = 0;
    loop {
        let begun = Instant::now();
        let open = jobs.iter_mut().filter(|figures| !is_settled(&figures.job, until_paused));
        let updated = join_all(open.map(|figures| figures.update(context, wait_s))).await;
        let updated: Result<(), _> = updated.into_iter().collect();
        let is_there = patience.take(&context.out, updated).await?.is_some();
        if is_there {
            view.show(context, &jobs)?;
            if jobs.iter().all(|figures| is_settled(&figures.job, until_paused)) {
                view.close();
                return Ok(jobs.into_iter().map(|figures| figures.job).collect());
            }
        }
        wait_s = WAIT_S;
        // A paused job is answered at once.
        let pause = Duration::from_secs(WAIT_S).saturating_sub(begun.elapsed());
        tokio::time::sleep(pause).await;
    }
}

/// How the jobs are shown.
trait View {
    fn show(&mut self, context: &Context, jobs: &[Figures]) -> Result<(), CliError>;
    /// Nothing comes any more.
    fn close(&mut self) {}
}

/// Each job's document when it has changed, one a line.
#[derive(Default)]
struct Documents {
    shown: Vec<String>,
}

impl View for Documents {
    fn show(&mut self, context: &Context, jobs: &[Figures]) -> Result<(), CliError> {
        self.shown.resize(jobs.len(), String::new());
        for (figures, shown) in jobs.iter().zip(&mut self.shown) {
            if *shown != figures.json {
                shown.clone_from(&figures.json);
                context.out.json(shown)?;
            }
        }
        Ok(())
    }
}

/// Lines for a pipe or a log.
struct Lines {
    jobs: Vec<Told>,
}

/// What was said of a job.
struct Told {
    doing: String,
    step: Value,
    at: Option<Instant>,
    alerts: BTreeSet<String>,
}

impl Lines {
    fn new(ids: &[JobId]) -> Self {
        let told = || Told { doing: String::new(), step: Value::Null, at: None, alerts: BTreeSet::new() };
        Self { jobs: ids.iter().map(|_| told()).collect() }
    }
}

impl View for Lines {
    fn show(&mut self, context: &Context, jobs: &[Figures]) -> Result<(), CliError> {
        let several = jobs.len() > 1;
        for (figures, told) in jobs.iter().zip(&mut self.jobs) {
            let name = if several { format!("{}  ", figures.id) } else { String::new() };
            for (key, line) in alerts(&figures.job) {
                if told.alerts.insert(key) {
                    context.out.line(format!("{name}{line}"))?;
                }
            }
            // The phases of a step are no news.
            let doing = format!("{} {}", text(&figures.job, "state"), shown(&figures.job["status_reason"]));
            let step = &figures.job["step"];
            let is_due = told.at.is_none_or(|at| at.elapsed() >= LINE_EVERY);
            if told.doing != doing || (told.step != *step && is_due) {
                context.out.line(format!("{name}{}", figures.line()))?;
                (told.doing, told.step, told.at) = (doing, step.clone(), Some(Instant::now()));
            }
        }
        Ok(())
    }
}

/// Alerts that are on: what tells them apart, and a line.
fn alerts(job: &Value) -> Vec<(String, String)> {
    let alerts = job["alerts"].as_array().map_or(&[][..], Vec::as_slice);
    let line = |alert: &Value| {
        let key = format!("{} {}", alert["rule"], alert["step"]);
        let (severity, rule) = (text(alert, "severity"), text(alert, "rule"));
        (key, format!("! {severity} {rule}, step {}: {}", shown(&alert["step"]), clean(text(alert, "message"))))
    };
    alerts.iter().map(line).collect()
}

/// A few lines a job, drawn again in place.
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
    fn show(&mut self, context: &Context, jobs: &[Figures]) -> Result<(), CliError> {
        for (figures, bar) in jobs.iter().zip(&self.bars) {
            let lines = block(figures);
            bar.set_message(lines.iter().map(|line| context.out.fit(line)).collect::<Vec<_>>().join("\n"));
        }
        Ok(())
    }

    fn close(&mut self) {
        self.bars.iter().for_each(ProgressBar::abandon);
    }
}

/// What a terminal shows of a job.
fn block(figures: &Figures) -> Vec<String> {
    let job = &figures.job;
    let name = job["name"].as_str().map(|name| format!("  {}", clean(name))).unwrap_or_default();
    let mut lines = vec![format!("{}{name}  {}", console::style(&figures.id).bold(), figures.doing())];
    let (step, total) = (job["step"].as_u64().unwrap_or(0), job["total_steps"].as_u64().unwrap_or(0));
    let done = (step * BAR as u64).checked_div(total).unwrap_or(0).min(BAR as u64) as usize;
    lines.push(format!("  {}{}  {}", "━".repeat(done), "─".repeat(BAR - done), figures.pace()));
    for (label, key) in [("reward", "reward"), ("eval reward", "eval_reward")] {
        let course = figures.course(key);
        if let (Some(first), Some(last)) = (course.first(), course.last()) {
            let line = sparkline(&course, COURSE);
            lines.push(format!(
                "  {label:<11} {}  {} → {}",
                console::style(line).cyan(),
                figure(*first),
                figure(*last)
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
        let mut figures = Figures::new(JobId::new());
        let alert = json!({"rule": "reward_flat", "severity": "warning", "step": 7, "message": "no\u{1b}[2J spread"});
        figures.job = json!({"name": "sums", "state": "running", "step": 5, "total_steps": 10, "alerts": [alert]});
        let lines = block(&figures);
        assert_eq!(lines[0], format!("{}  sums  running", figures.id));
        assert!(lines[1].starts_with("  ━━━━━━━━━━──────────  step 5/10"), "{lines:?}");
        assert_eq!(lines[2], "  ! warning reward_flat, step 7: no\u{fffd}[2J spread");
    }
}
