//! The figures of a job that goes on: what its metrics say, step by step, asked for as they come.

use std::collections::BTreeMap;

use rlood_client::Error;
use rlood_types::id::JobId;
use serde_json::Value;

use super::text;
use crate::context::Context;
use crate::output::{NONE, figure_or_none, shown, span};

/// The metrics that are asked for.
const KEYS: &str = "reward,eval_reward,kl,num_tokens,step_time";
/// Points of a course; more than a terminal is wide.
const MAX_POINTS: u32 = 400;

/// A job, and its courses so far.
#[derive(Debug)]
pub struct Figures {
    /// The job's id.
    pub id: JobId,
    /// The job as the server showed it last.
    pub job: Value,
    /// The same as text.
    pub json: String,
    /// By step.
    rows: BTreeMap<u64, Value>,
}

impl Figures {
    /// Of a job that was not asked for yet.
    pub fn new(id: JobId) -> Self {
        Self { id, job: Value::Null, json: String::new(), rows: BTreeMap::new() }
    }

    /// Asks for the job, held by the server for up to `wait_s` while nothing settles, and for its new metrics.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn update(&mut self, context: &Context, wait_s: u64) -> Result<(), Error> {
        let id = self.id.to_string();
        let call = context.client.raw_get(&["jobs", &id]).work(std::time::Duration::from_secs(wait_s));
        let answer = call.query_if("wait", Some(wait_s).filter(|wait| *wait > 0)).send().await?;
        let is_new = answer.value["last_seq"] != self.job["last_seq"];
        if is_new {
            // The evaluation of a step is added to its row later: the last row is asked for again.
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

    /// The course of a metric.
    pub fn course(&self, key: &str) -> Vec<f64> {
        self.rows.values().filter_map(|row| row[key].as_f64()).collect()
    }

    /// The latest value of a metric.
    pub fn latest(&self, key: &str) -> Option<f64> {
        self.rows.values().rev().find_map(|row| row[key].as_f64())
    }

    /// Tokens per second of the latest step.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let mut steps = self.rows.values().rev().filter(|row| row["num_tokens"].is_number());
        let last = steps.next()?;
        let before = steps.next();
        let count = |row: &Value| row["num_tokens"].as_f64();
        // Points may be thinned out: the tokens between two of them are not those of one step.
        let is_next = before.is_none_or(|before| before["step"].as_u64().map(|step| step + 1) == last["step"].as_u64());
        let tokens = count(last)? - before.and_then(count).unwrap_or(0.0);
        last["step_time"].as_f64().filter(|seconds| *seconds > 0.0 && is_next).map(|seconds| tokens / seconds)
    }

    /// What the job does: why it waits, its place in the queue, its phase.
    pub fn doing(&self) -> String {
        let job = &self.job;
        let state = text(job, "state");
        match (state, &job["status_reason"], &job["queue_position"], &job["phase"]) {
            (_, Value::String(reason), _, _) => format!("{state}: {}", crate::output::clean(reason)),
            ("queued", _, position @ Value::Number(_), _) => format!("queued, place {position}"),
            ("running", _, _, Value::String(phase)) => format!("running: {phase}"),
            _ => state.to_owned(),
        }
    }

    /// Step, remaining time, speed and KL.
    pub fn pace(&self) -> String {
        let speed = self.tokens_per_second().map_or_else(|| NONE.to_owned(), |speed| format!("{speed:.0}"));
        let eta = self.job["eta_s"].as_f64().map_or_else(|| NONE.to_owned(), span);
        let (step, total) = (shown(&self.job["step"]), shown(&self.job["total_steps"]));
        let kl = figure_or_none(self.latest("kl"));
        format!("step {step}/{total}  ETA {eta}  {speed} tokens/s  KL {kl}")
    }

    /// All of it on one line.
    pub fn line(&self) -> String {
        let eval = self.latest("eval_reward").map(|reward| format!("  eval {}", crate::output::figure(reward)));
        let reward = figure_or_none(self.latest("reward"));
        format!("{}  reward {reward}{}  {}", self.pace(), eval.unwrap_or_default(), self.doing())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_line_shows_the_latest_figures() {
        let mut figures = Figures::new(JobId::new());
        figures.job = json!({"state": "running", "phase": "reward", "step": 2, "total_steps": 9, "eta_s": 75.2});
        assert_eq!(figures.line(), "step 2/9  ETA 1m15s  – tokens/s  KL –  reward –  running: reward");
        for row in [
            json!({"step": 0, "eval_reward": 0.25}),
            json!({"step": 1, "reward": 0.5, "kl": 0.0, "num_tokens": 100.0, "step_time": 1.0}),
            json!({"step": 2, "reward": 0.75, "kl": 0.002, "num_tokens": 160.0, "step_time": 0.5}),
        ] {
            figures.rows.insert(row["step"].as_u64().unwrap(), row);
        }
        assert_eq!(
            figures.line(),
            "step 2/9  ETA 1m15s  120 tokens/s  KL 0.002  reward 0.75  eval 0.25  running: reward"
        );
        assert_eq!(figures.course("reward"), [0.5, 0.75]);
        figures.rows.remove(&1);
        figures.rows.insert(0, json!({"step": 0, "num_tokens": 1.0}));
        assert_eq!(figures.tokens_per_second(), None, "two points that are two steps apart");
    }
}
