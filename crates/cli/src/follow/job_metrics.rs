//! The metrics of a running job, read from the server as they change.

use std::collections::BTreeMap;

use rlood_client::Error;
use rlood_types::id::JobId;
use serde_json::Value;

use super::text;
use crate::context::Context;
use crate::output::{NONE, format_duration, format_optional, shown};

/// Names of the metrics that are requested from the server.
const KEYS: &str = "reward,eval_reward,kl,num_tokens,step_time";
/// Maximum number of points of a metric that are requested: more than a terminal has columns.
const MAX_POINTS: u32 = 400;

/// A job that is followed, with its metrics so far.
#[derive(Debug)]
pub struct JobMetrics {
    /// Id of the job.
    pub id: JobId,
    /// The job as JSON, from the server's last response.
    pub job: Value,
    /// The text of the server's last response.
    pub json: String,
    /// The metrics of each optimizer step, by step.
    rows: BTreeMap<u64, Value>,
}

impl JobMetrics {
    /// Creates an entry for a job, before its first request.
    pub fn new(id: JobId) -> Self {
        Self { id, job: Value::Null, json: String::new(), rows: BTreeMap::new() }
    }

    /// Requests the job and its new metrics from the server, which holds the request for up to `wait_s` seconds until
    /// the job's state changes.
    ///
    /// # Errors
    /// Returns the client's error when a request fails.
    pub async fn update(&mut self, context: &Context, wait_s: u64) -> Result<(), Error> {
        let id = self.id.to_string();
        let call = context.client.raw_get(&["jobs", &id]).work(std::time::Duration::from_secs(wait_s));
        let answer = call.query_if("wait", Some(wait_s).filter(|wait| *wait > 0)).send().await?;
        let is_new = answer.value["last_seq"] != self.job["last_seq"];
        if is_new {
            // The server adds evaluation metrics to the row of a step later, so the last row is requested again.
            let last = self.rows.keys().next_back().copied();
            let call = context.client.raw_get(&["jobs", &id, "metrics"]).query("keys", KEYS);
            let call = call.query_if("min_step", last).query("max_points", MAX_POINTS);
            for row in call.pages().collect().await? {
                if let Some(step) = row["step"].as_u64() {
                    self.rows.insert(step, row);
                }
            }
        }
        (self.job, self.json) = (answer.value, answer.text);
        Ok(())
    }

    /// Returns the values of a metric in the order of the steps.
    pub fn series(&self, key: &str) -> Vec<f64> {
        self.rows.values().filter_map(|row| row[key].as_f64()).collect()
    }

    /// Returns the latest value of a metric.
    pub fn latest(&self, key: &str) -> Option<f64> {
        self.rows.values().rev().find_map(|row| row[key].as_f64())
    }

    /// Returns the tokens per second of the latest step, if they are known.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let mut steps = self.rows.values().rev().filter(|row| row["num_tokens"].is_number());
        let last = steps.next()?;
        let before = steps.next();
        let count = |row: &Value| row["num_tokens"].as_f64();
        // The server may leave out steps. If the step before is missing, the number of tokens of the last step is not known.
        let is_next = before.is_none_or(|before| before["step"].as_u64().map(|step| step + 1) == last["step"].as_u64());
        let tokens = count(last)? - before.and_then(count).unwrap_or(0.0);
        last["step_time"].as_f64().filter(|seconds| *seconds > 0.0 && is_next).map(|seconds| tokens / seconds)
    }

    /// Describes the activity of the job: its state with the reason, its place in the queue, or its phase.
    pub fn activity(&self) -> String {
        let job = &self.job;
        let state = text(job, "state");
        match (state, &job["status_reason"], &job["queue_position"], &job["phase"]) {
            (_, Value::String(reason), _, _) => format!("{state}: {}", crate::output::clean(reason)),
            ("queued", _, position @ Value::Number(_), _) => format!("queued, position {position} in the queue"),
            ("running", _, _, Value::String(phase)) => format!("running: {phase}"),
            _ => state.to_owned(),
        }
    }

    /// Formats step, remaining time, speed and KL.
    pub fn progress(&self) -> String {
        let speed = self.tokens_per_second().map_or_else(|| NONE.to_owned(), |speed| format!("{speed:.0}"));
        let eta = self.job["eta_s"].as_f64().map_or_else(|| NONE.to_owned(), format_duration);
        let (step, total) = (shown(&self.job["step"]), shown(&self.job["total_steps"]));
        let kl = format_optional(self.latest("kl"));
        format!("step {step}/{total}  ETA {eta}  {speed} tokens/s  KL {kl}")
    }

    /// Formats all metrics on one line.
    pub fn line(&self) -> String {
        let eval = self.latest("eval_reward").map(|reward| format!("  eval {}", crate::output::format_number(reward)));
        let reward = format_optional(self.latest("reward"));
        format!("{}  reward {reward}{}  {}", self.progress(), eval.unwrap_or_default(), self.activity())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_line_shows_the_latest_figures() {
        let mut metrics = JobMetrics::new(JobId::new());
        metrics.job = json!({"state": "running", "phase": "reward", "step": 2, "total_steps": 9, "eta_s": 75.2});
        assert_eq!(metrics.line(), "step 2/9  ETA 1m15s  – tokens/s  KL –  reward –  running: reward");
        for row in [
            json!({"step": 0, "eval_reward": 0.25}),
            json!({"step": 1, "reward": 0.5, "kl": 0.0, "num_tokens": 100.0, "step_time": 1.0}),
            json!({"step": 2, "reward": 0.75, "kl": 0.002, "num_tokens": 160.0, "step_time": 0.5}),
        ] {
            metrics.rows.insert(row["step"].as_u64().unwrap(), row);
        }
        assert_eq!(
            metrics.line(),
            "step 2/9  ETA 1m15s  120 tokens/s  KL 0.002  reward 0.75  eval 0.25  running: reward"
        );
        assert_eq!(metrics.series("reward"), [0.5, 0.75]);
        metrics.rows.remove(&1);
        metrics.rows.insert(0, json!({"step": 0, "num_tokens": 1.0}));
        assert_eq!(metrics.tokens_per_second(), None, "two points that are two steps apart");
    }
}
