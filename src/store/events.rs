//! What a run said: events (history, SSE feed and outbox in one), steps, samples, logs.

use serde_json::Value;

use super::{Page, Store, StoreError};
use crate::event::{Metrics, Sample, SamplePhase};
use crate::id::JobId;
use crate::protocol::EventBatch;

/// One event of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct EventRow {
    /// Counts from 1 per job, without gap.
    pub seq: i64,
    /// `job.created`, `step`, ….
    pub kind: String,
    /// The attempt it belongs to; 0 before the first claim.
    pub attempt: u64,
    /// Unix ms.
    pub time: i64,
    /// By type.
    pub data: Value,
}

/// Metrics of one step or one evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRow {
    /// Optimizer step.
    pub step: u64,
    /// Training or evaluation.
    pub kind: SamplePhase,
    /// Unix ms.
    pub time: i64,
    /// TRL's names.
    pub metrics: Metrics,
}

/// One stored sample.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRow {
    /// Ascending in the order they came.
    pub id: i64,
    /// The sample.
    pub sample: Sample,
}

/// One line a worker logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRow {
    /// Ascending.
    pub id: i64,
    /// The attempt.
    pub attempt: u64,
    /// Unix ms.
    pub time: i64,
    /// The line.
    pub line: String,
}

/// The order of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SampleSort {
    /// Latest first.
    #[default]
    Recent,
    /// Highest reward first; unscorable ones last.
    Best,
    /// Lowest reward first; unscorable ones last.
    Worst,
}

/// Which samples, in which order.
#[derive(Debug, Clone, Default)]
pub struct SampleQuery {
    /// Of this step.
    pub step: Option<u64>,
    /// Training or evaluation.
    pub phase: Option<SamplePhase>,
    /// The order.
    pub sort: SampleSort,
    /// Prompt or completion contains this (ASCII case ignored).
    pub contains: Option<String>,
    /// Cursor.
    pub after: Option<String>,
    /// Rows a page.
    pub limit: u32,
}

impl Store {
    /// Appends what a worker reports, in one transaction; `Ok(false)` when this batch was stored before. `LeaseLost` when the
    /// attempt does not own the job.
    pub async fn events_append(&self, job: JobId, batch: &EventBatch, now: i64) -> Result<bool, StoreError> {
        let _ = (job, batch, now);
        todo!()
    }

    /// Events with `seq > after_seq`, in order.
    pub async fn event_page(&self, job: JobId, after_seq: i64, limit: u32) -> Result<Vec<EventRow>, StoreError> {
        let _ = (job, after_seq, limit);
        todo!()
    }

    /// The latest `seq`; 0 when there is none.
    pub async fn event_latest_seq(&self, job: JobId) -> Result<i64, StoreError> {
        let _ = job;
        todo!()
    }

    /// Steps from `min_step` to `max_step` (both inclusive), by step, training before evaluation; `kind` `None` = both.
    pub async fn step_page(
        &self,
        job: JobId,
        kind: Option<SamplePhase>,
        min_step: u64,
        max_step: u64,
    ) -> Result<Vec<StepRow>, StoreError> {
        let _ = (job, kind, min_step, max_step);
        todo!()
    }

    /// A page of samples.
    pub async fn sample_page(&self, job: JobId, query: &SampleQuery) -> Result<Page<SampleRow>, StoreError> {
        let _ = (job, query);
        todo!()
    }

    /// A page of log lines, in order.
    pub async fn log_page(&self, job: JobId, after: Option<&str>, limit: u32) -> Result<Page<LogRow>, StoreError> {
        let _ = (job, after, limit);
        todo!()
    }
}
