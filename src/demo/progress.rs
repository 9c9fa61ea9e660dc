//! The job's progress: a live bar on a terminal, plain lines elsewhere.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

use super::api::{Api, ApiError};

/// Between plain lines.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Follows one job.
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
}

/// The newest figures of a run.
#[derive(Default)]
struct Figures {
    step: u64,
    reward: Option<f64>,
    kl: Option<f64>,
    num_tokens: f64,
    tokens_per_second: Option<f64>,
}

impl Progress {
    /// For a job of `steps` optimizer steps; `live` on a terminal.
    pub fn new(steps: u64, live: bool) -> Self {
        let style = ProgressStyle::with_template("{bar:30} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = live.then(|| ProgressBar::new(steps).with_style(style));
        Self { bar, steps }
    }

    /// Shows the job's progress until it is terminal or paused; returns it as it is then.
    pub async fn follow(self, api: &Api, id: &str) -> Result<Value, ApiError> {
        let (path, metrics) = (format!("/jobs/{id}"), format!("/jobs/{id}/metrics"));
        let mut figures = Figures::default();
        let mut last_line: Option<Instant> = None;
        loop {
            let job = api.get(&path, &[("wait", "1")]).await?;
            let from = (figures.step + 1).to_string();
            let rows = api.get(&metrics, &[("min_step", &from), ("keys", "reward,kl,num_tokens,step_time")]).await?;
            let before = figures.step;
            rows["data"].as_array().into_iter().flatten().for_each(|row| figures.take(row));
            let state = job["state"].as_str().unwrap_or_default();
            let over = !matches!(state, "queued" | "running");
            let message = self.message(&job, &figures);
            if let Some(bar) = &self.bar {
                bar.set_position(figures.step);
                bar.set_message(message);
            } else if over || (figures.step > before && last_line.is_none_or(|last| last.elapsed() >= LINE_EVERY)) {
                println!("{message}");
                last_line = Some(Instant::now());
            }
            if over {
                if let Some(bar) = &self.bar {
                    bar.abandon();
                }
                return Ok(job);
            }
        }
    }

    fn message(&self, job: &Value, figures: &Figures) -> String {
        let number =
            |value: Option<f64>, digits: usize| value.map_or("–".to_owned(), |value| format!("{value:.digits$}"));
        let doing = match (job["state"].as_str(), job["phase"].as_str(), job["status_reason"].as_str()) {
            (_, _, Some(reason)) => reason,
            (Some("running"), Some(phase), None) => phase,
            (state, _, None) => state.unwrap_or_default(),
        };
        let eta = job["eta_s"].as_f64().map_or("–".to_owned(), |seconds| {
            let seconds = seconds.round() as u64;
            format!("{}:{:02}", seconds / 60, seconds % 60)
        });
        format!(
            "step {:>3}/{}  reward {}  KL {}  {} tokens/s  ETA {eta}  {doing}",
            figures.step,
            self.steps,
            number(figures.reward, 3),
            number(figures.kl, 4),
            number(figures.tokens_per_second, 0),
        )
    }
}

impl Figures {
    fn take(&mut self, row: &Value) {
        let (Some(step), Some(step_time)) = (row["step"].as_u64(), row["step_time"].as_f64()) else { return };
        self.step = step;
        self.reward = row["reward"].as_f64().or(self.reward);
        self.kl = row["kl"].as_f64().or(self.kl);
        if let Some(num_tokens) = row["num_tokens"].as_f64() {
            self.tokens_per_second = Some((num_tokens - self.num_tokens) / step_time.max(1e-9));
            self.num_tokens = num_tokens;
        }
    }
}
