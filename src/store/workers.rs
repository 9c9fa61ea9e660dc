//! Worker processes: who is there, on which device, running what.

use super::{Store, StoreError};
use crate::id::{JobId, WorkerId};
use crate::protocol::Register;

/// A worker and what it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerRow {
    /// Its id.
    pub id: WorkerId,
    /// `cpu`, `cuda:0`.
    pub device: String,
    /// On its machine.
    pub pid: u32,
    /// Compute threads.
    pub threads: u32,
    /// Its rlood version.
    pub version: String,
    /// A child of this server: it ends when the server does.
    pub child: bool,
    /// Last heard of, Unix ms.
    pub seen_at: i64,
    /// Unix ms.
    pub created_at: i64,
    /// What it runs; `None` = idle.
    pub job: Option<JobId>,
}

impl Store {
    /// A worker says hello (again).
    pub async fn worker_register(&self, register: &Register, now: i64) -> Result<(), StoreError> {
        let _ = (register, now);
        todo!()
    }

    /// A worker was heard of; `NotFound` when it has to register again.
    pub async fn worker_seen(&self, worker: WorkerId, now: i64) -> Result<(), StoreError> {
        let _ = (worker, now);
        todo!()
    }

    /// All workers, oldest first.
    pub async fn worker_list(&self) -> Result<Vec<WorkerRow>, StoreError> {
        todo!()
    }

    /// Forgets a worker that left in order. Its job, if any, goes back to the queue without a charge.
    pub async fn worker_remove(&self, worker: WorkerId, now: i64) -> Result<Option<JobId>, StoreError> {
        let _ = (worker, now);
        todo!()
    }

    /// A worker is dead: its job goes back to the queue at once (a failed attempt), and the worker is forgotten. `detail` is the
    /// tail of its stderr, kept in the job's log. Returns the job it ran.
    pub async fn worker_lost(
        &self,
        worker: WorkerId,
        detail: Option<&str>,
        now: i64,
    ) -> Result<Option<JobId>, StoreError> {
        let _ = (worker, detail, now);
        todo!()
    }

    /// At boot: the former server's children died with it. Their jobs go back to the queue, no attempt charged.
    pub async fn workers_forget_children(&self, now: i64) -> Result<Vec<JobId>, StoreError> {
        let _ = now;
        todo!()
    }

    /// Forgets idle workers that were last heard of before this time.
    pub async fn workers_prune(&self, before: i64) -> Result<(), StoreError> {
        let _ = before;
        todo!()
    }
}
