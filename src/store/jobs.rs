//! Jobs as rows: create, read, list, patch, delete, retry. Moves lie in `moves`, claims in `claims`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Page, Store, StoreError};
use crate::event::Phase;
use crate::id::{JobId, WorkerId};
use crate::job::{Failure, Requested, State};
use crate::spec::{Plan, RewardSecrets};

/// A job to create; name, model, metadata, datasets and length are read from the plan.
#[derive(Debug)]
pub struct NewJob<'a> {
    /// Its id.
    pub id: JobId,
    /// As sent, secrets redacted.
    pub spec: &'a Value,
    /// As resolved.
    pub plan: &'a Plan,
    /// By reward name; never read back over the API.
    pub secrets: &'a BTreeMap<String, RewardSecrets>,
    /// The job it was made from.
    pub parent: Option<JobId>,
    /// Higher first; 0 is usual.
    pub priority: i64,
}

/// A job's row.
#[derive(Debug, Clone)]
pub struct JobRow {
    /// Its id.
    pub id: JobId,
    /// For people.
    pub name: Option<String>,
    /// Where it stands.
    pub state: State,
    /// A mark its owner has still to honour; only while running.
    pub requested: Option<Requested>,
    /// Where the loop is (or was, when it stopped).
    pub phase: Option<Phase>,
    /// Why it waits or paused: `waiting_for_reward`, `reward_outage`, ….
    pub status_reason: Option<String>,
    /// Higher first.
    pub priority: i64,
    /// Claims so far.
    pub attempt: u64,
    /// Claims that ended badly since the last checkpoint.
    pub failed_attempts: u32,
    /// Who runs it.
    pub worker: Option<WorkerId>,
    /// When the claim lapses, Unix ms.
    pub lease_until: Option<i64>,
    /// Optimizer steps done.
    pub step: u64,
    /// Optimizer steps in all.
    pub total_steps: u64,
    /// Seconds to go, if known.
    pub eta_s: Option<f64>,
    /// The base model's id.
    pub model: String,
    /// As sent, secrets redacted.
    pub spec: Value,
    /// As resolved, as JSON; [`JobRow::plan`] parses it.
    pub plan_json: Value,
    /// The client's labels.
    pub metadata: BTreeMap<String, String>,
    /// Why it failed.
    pub failure: Option<Failure>,
    /// The job it was made from.
    pub parent: Option<JobId>,
    /// Unix ms.
    pub created_at: i64,
    /// First claim, Unix ms.
    pub started_at: Option<i64>,
    /// Terminal state reached, Unix ms.
    pub finished_at: Option<i64>,
}

/// Which jobs to list.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// In this state.
    pub state: Option<State>,
    /// Of this model id.
    pub model: Option<String>,
    /// With all these labels.
    pub metadata: BTreeMap<String, String>,
}

/// What a patch changes; `None` = leave it.
#[derive(Debug, Clone, Default)]
pub struct JobPatch {
    /// `Some(None)` removes the name.
    pub name: Option<Option<String>>,
    /// Replaces all labels.
    pub metadata: Option<BTreeMap<String, String>>,
    /// Of the queue.
    pub priority: Option<i64>,
}

impl JobRow {
    /// The resolved plan.
    pub fn plan(&self) -> Result<Plan, StoreError> {
        todo!()
    }
}

impl Store {
    /// Queues a job. `NotFound` (dataset) when one of its datasets is gone.
    pub async fn job_create(&self, new: NewJob<'_>, now: i64) -> Result<JobRow, StoreError> {
        let _ = (new, now);
        todo!()
    }

    /// One job, or `NotFound`.
    pub async fn job_get(&self, id: JobId) -> Result<JobRow, StoreError> {
        let _ = id;
        todo!()
    }

    /// Jobs, newest first.
    pub async fn job_list(
        &self,
        filter: &JobFilter,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Page<JobRow>, StoreError> {
        let _ = (filter, after, limit);
        todo!()
    }

    /// Changes what may be changed at any time. A priority matters only while the job is queued.
    pub async fn job_patch(&self, id: JobId, patch: JobPatch, now: i64) -> Result<JobRow, StoreError> {
        let _ = (id, patch, now);
        todo!()
    }

    /// Removes a job that is over, with everything that hangs on it; the caller then removes its files.
    pub async fn job_delete(&self, id: JobId) -> Result<(), StoreError> {
        let _ = id;
        todo!()
    }

    /// A new queued job with the same spec, plan and secrets; only of a job that is over.
    pub async fn job_retry(&self, id: JobId, new_id: JobId, now: i64) -> Result<JobRow, StoreError> {
        let _ = (id, new_id, now);
        todo!()
    }

    /// 1 = next; `None` when the job is not queued.
    pub async fn job_queue_position(&self, id: JobId) -> Result<Option<u64>, StoreError> {
        let _ = id;
        todo!()
    }

    /// The secrets by reward name: for a worker's claim and for copies of a job.
    pub async fn job_secrets(&self, id: JobId) -> Result<BTreeMap<String, RewardSecrets>, StoreError> {
        let _ = id;
        todo!()
    }

    /// Jobs in each state, all six.
    pub async fn job_counts(&self) -> Result<Vec<(State, u64)>, StoreError> {
        todo!()
    }
}
