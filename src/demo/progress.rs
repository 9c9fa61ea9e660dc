//! Shows the job's progress: a live bar on a terminal, plain lines elsewhere.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use rlood_client::{Client, Error, Job, MetricsQuery, MetricsRow};

use crate::event::Phase;
use crate::id::JobId;
use crate::job::State;

/// Interval between two plain progress lines.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Interval between two requests for the job's state.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Follows the progress of one job.
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
}

/// The newest metrics of the job.
#[derive(Default)]
struct Figures {
    step: u64,
    reward: Option<f64>,
    kl: Option<f64>,
    num_tokens: f64,
    tokens_per_second: Option<f64>,
}

impl Progress {
    /// Creates the progress display for a job of `steps` optimizer steps; `live` = draw a bar on a terminal.
    pub fn new(steps: u64, live: bool) -> Self {
        let style = ProgressStyle::with_template("{bar:30} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = live.then(|| ProgressBar::new(steps).with_style(style));
        Self { bar, steps }
    }

    /// Shows the job's progress until it has ended or is paused, and returns its final state.
    pub async fn follow(self, client: &Client, id: JobId) -> Result<Job, Error> {
        let keys = ["reward", "kl", "num_tokens", "step_time"].map(str::to_owned).to_vec();
        let mut query = MetricsQuery { keys, ..MetricsQuery::default() };
        let mut figures = Figures::default();
        let mut last_line: Option<Instant> = None;
        loop {
            let job = client.get_job_within(id, POLL_INTERVAL).await?;
            query.min_step = Some(figures.step + 1);
            let before = figures.step;
            client.get_metrics(id, &query).collect().await?.iter().for_each(|row| figures.take(row));
            let over = job.is_settled();
            let message = self.message(&job, &figures);
            if let Some(bar) = &self.bar {
                bar.set_position(figures.step);
                bar.set_message(message);
            } else if over || (figures.step > before && last_line.is_none_or(|last| last.elapsed() >= LINE_INTERVAL)) {
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

    fn message(&self, job: &Job, figures: &Figures) -> String {
        let number =
            |value: Option<f64>, digits: usize| value.map_or("–".to_owned(), |value| format!("{value:.digits$}"));
        let doing = match (job.state, job.phase, &job.status_reason) {
            (_, _, Some(reason)) => reason,
            (State::Running, Some(phase), None) => Phase::as_str(phase),
            (state, _, None) => state.as_str(),
        };
        let eta = job.eta_s.map_or("–".to_owned(), |seconds| {
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
    fn take(&mut self, row: &MetricsRow) {
        let Some(step_time) = row.get("step_time") else { return };
        self.step = row.step;
        self.reward = row.get("reward").or(self.reward);
        self.kl = row.get("kl").or(self.kl);
        if let Some(num_tokens) = row.get("num_tokens") {
            self.tokens_per_second = Some((num_tokens - self.num_tokens) / step_time.max(1e-9));
            self.num_tokens = num_tokens;
        }
    }
}
