//! A job's steps as the database stores them, thousands in one string, for responses that read or forward many at once.

use serde_json::json;

use super::{Doing, Store, StoreError, corrupt, int};
use crate::event::SamplePhase;
use crate::id::JobId;

/// Separators of lines and fields, which never occur in JSON.
const LINE_END: char = '\u{1e}';
const FIELD_END: char = '\u{1f}';

/// Selects steps of a range, in order. One row is returned for all steps. The index has this order, so nothing is sorted.
pub const STEP_LINES: &str = "SELECT group_concat(line, char(30)) FROM (\
     SELECT step || char(31) || kind || char(31) || metrics AS line FROM steps \
     WHERE job_id = ? AND step >= ? AND step <= ? ORDER BY step, kind LIMIT ?)";
/// Selects the given steps, in order.
pub const SOME_STEP_LINES: &str = "SELECT group_concat(line, char(30)) FROM (\
     SELECT steps.step || char(31) || kind || char(31) || metrics AS line FROM json_each(?2) AS wanted \
     CROSS JOIN steps ON steps.job_id = ?1 AND steps.step = wanted.value ORDER BY wanted.key, kind LIMIT -1)";

/// Steps in order; an evaluation precedes the training of its step.
#[derive(Debug, Clone, Default)]
pub struct StepLines(String);

/// One line of the steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLine<'a> {
    /// Number of the optimizer step.
    pub step: u64,
    /// Whether the line belongs to training or to evaluation.
    pub kind: SamplePhase,
    /// Metrics as a JSON object of numbers and nulls.
    pub metrics: &'a str,
}

impl StepLines {
    /// Iterates over the lines; an unreadable one is `Corrupt`.
    pub fn iter(&self) -> impl Iterator<Item = Result<StepLine<'_>, StoreError>> {
        self.0.split(LINE_END).filter(|line| !line.is_empty()).map(|line| {
            let mut fields = line.splitn(3, FIELD_END);
            let (step, kind, metrics) = (fields.next(), fields.next(), fields.next());
            let kind = match kind {
                Some("train") => Some(SamplePhase::Train),
                Some("eval") => Some(SamplePhase::Eval),
                Some(_) | None => None,
            };
            match (step.and_then(|step| step.parse().ok()), kind, metrics) {
                (Some(step), Some(kind), Some(metrics)) => Ok(StepLine { step, kind, metrics }),
                _ => Err(corrupt("step")("not a number, a kind and metrics")),
            }
        })
    }
}

impl Store {
    /// Returns about `limit` (at least 3) lines of the steps from `min_step` to `max_step` (both inclusive), always whole steps;
    /// and the step to continue from, `None` if these are all.
    pub async fn step_lines(
        &self,
        job: JobId,
        min_step: u64,
        max_step: u64,
        limit: u32,
    ) -> Result<(StepLines, Option<u64>), StoreError> {
        let limit = limit.max(3);
        let text: Option<String> = sqlx::query_scalar(STEP_LINES)
            .bind(job.to_string())
            .bind(int(min_step))
            .bind(int(max_step))
            .bind(limit)
            .fetch_one(&self.readers)
            .await
            .doing("read the training steps of a job")?;
        let mut text = text.unwrap_or_default();
        let lines = text.split(LINE_END).count();
        if text.is_empty() || lines < limit as usize {
            return Ok((StepLines(text), None));
        }
        // The last step may have another line that the limit cuts off, so this page leaves the whole step to the next one.
        let step_of = |line: &str| line.split(FIELD_END).next().and_then(|step| step.parse::<u64>().ok());
        let last = text.rsplit(LINE_END).next().and_then(step_of).ok_or_else(|| corrupt("step")("not a number"))?;
        while let Some(start) = text.rfind(LINE_END)
            && text.get(start + 1..).and_then(step_of) == Some(last)
        {
            text.truncate(start);
        }
        Ok((StepLines(text), Some(last)))
    }

    /// Returns the lines of the given steps.
    pub async fn some_step_lines(&self, job: JobId, steps: &[u64]) -> Result<StepLines, StoreError> {
        let text: Option<String> = sqlx::query_scalar(SOME_STEP_LINES)
            .bind(job.to_string())
            .bind(json!(steps).to_string())
            .fetch_one(&self.readers)
            .await
            .doing("read some training steps of a job")?;
        Ok(StepLines(text.unwrap_or_default()))
    }
}
