//! Reports figures next to their limits.

use std::path::Path;

use serde_json::{Value, json};

use super::Size;
use super::stock::metric_names;

pub struct Report {
    slack: f64,
    lines: Vec<String>,
    figures: Vec<Value>,
    pub missed: Vec<String>,
}

impl Report {
    pub fn new(slack: f64) -> Self {
        Self { slack, lines: Vec::new(), figures: Vec::new(), missed: Vec::new() }
    }

    pub fn at_most(&mut self, what: &str, found: f64, bar: f64, unit: &str) {
        self.line(what, found, ("≤", bar), unit, found <= bar * self.slack);
    }

    pub fn at_least(&mut self, what: &str, found: f64, bar: f64, unit: &str) {
        self.line(what, found, ("≥", bar), unit, found * self.slack >= bar);
    }

    fn line(&mut self, what: &str, found: f64, (sign, bar): (&str, f64), unit: &str, held: bool) {
        let line = format!("| {what} | {found:.1} {unit} | {sign} {bar} {unit} |");
        println!("{line}");
        if !held {
            self.missed.push(line.clone());
        }
        self.lines.push(line);
        self.figures.push(json!({"what": what, "found": found, "bar": bar, "sign": sign, "unit": unit, "held": held}));
    }

    /// Writes the report to the directory in `RLOOD_SCALE_RESULTS`.
    pub fn write(&self, size: &Size) {
        let Ok(path) = std::env::var("RLOOD_SCALE_RESULTS") else { return };
        let points = ((size.jobs - 1) * size.steps + size.long_run) * metric_names().len();
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        let head = format!(
            "# A large database\n\n{} jobs, {points} metric points, one run of {} steps, {} queued jobs; {cores} cores for server and \
             clients. Measured over HTTP on the binary, while another client reports steps, beats and reads.\n\n```text\n\
             cargo build --release\n\
             RLOOD_SCALE=full RLOOD_SCALE_RESULTS=benches/results/scale RLOOD_BINARY=target/release/rlood \\\n  \
             cargo test --release --test it -- scale:: --nocapture\n```\n\n| what | found | bar |\n|---|---|---|\n",
            size.jobs, size.long_run, size.queued,
        );
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        std::fs::write(path.with_extension("md"), head + &self.lines.join("\n") + "\n").unwrap();
        let all = json!({
            "jobs": size.jobs, "metric_points": points, "long_run_steps": size.long_run, "queued_jobs": size.queued,
            "cores": cores, "figures": self.figures,
        });
        std::fs::write(path.with_extension("json"), serde_json::to_string_pretty(&all).unwrap() + "\n").unwrap();
    }
}
