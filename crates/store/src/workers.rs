//! Worker processes: who is there, on which device, running what.

use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::claims::{Charge, job_release_seen, jobs_of_worker};
use super::events::log_insert;
use super::{Doing, Store, StoreError, column, corrupt, id_column};
use crate::id::{JobId, WorkerId};
use crate::protocol::{KernelFacts, Register};

/// A worker and what it does.
#[derive(Debug, Clone, PartialEq)]
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
    /// The processor's kernels, where it computes there.
    pub kernels: Option<KernelFacts>,
    /// A child of this server: it ends when the server does.
    pub child: bool,
    /// Last heard of, Unix ms.
    pub seen_at: i64,
    /// Unix ms.
    pub created_at: i64,
    /// A lease of its lapsed, and it was not heard of since.
    pub lost: bool,
    /// What it runs; `None` = idle.
    pub job: Option<JobId>,
}

impl Store {
    /// A worker says hello (again).
    pub async fn worker_register(&self, register: &Register, now: i64) -> Result<(), StoreError> {
        let Register { worker, device, pid, threads, version, child, protocol: _, kernels } = register;
        let kernels = kernels.as_ref().map(serde_json::to_string).transpose().map_err(corrupt("kernels"))?;
        sqlx::query(
            "INSERT INTO workers (id, device, pid, threads, version, child, seen_at, created_at, kernels) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?8) ON CONFLICT (id) DO UPDATE SET device = excluded.device, \
             pid = excluded.pid, threads = excluded.threads, version = excluded.version, child = excluded.child, \
             kernels = excluded.kernels, seen_at = excluded.seen_at, lost_at = NULL",
        )
        .bind(worker.to_string())
        .bind(device)
        .bind(pid)
        .bind(threads)
        .bind(version)
        .bind(child)
        .bind(now)
        .bind(kernels)
        .execute(&self.writer)
        .await
        .doing("register a worker")?;
        Ok(())
    }

    /// A worker was heard of; `NotFound` when it has to register again.
    pub async fn worker_seen(&self, worker: WorkerId, now: i64) -> Result<(), StoreError> {
        let mut writer = self.writer.acquire().await.doing("reach the writer")?;
        worker_touch(&mut writer, worker, now).await
    }

    /// All workers, oldest first.
    pub async fn worker_list(&self) -> Result<Vec<WorkerRow>, StoreError> {
        sqlx::query(
            "SELECT workers.*, jobs.id AS job FROM workers \
             LEFT JOIN jobs ON jobs.state = 'running' AND jobs.worker = workers.id ORDER BY workers.created_at, workers.id",
        )
        .fetch_all(&self.readers)
        .await
        .doing("list workers")?
        .iter()
        .map(WorkerRow::read)
        .collect()
    }

    /// Forgets a worker that left in order. Its job, if any, goes back to the queue without a charge.
    pub async fn worker_remove(&self, worker: WorkerId, now: i64) -> Result<Option<JobId>, StoreError> {
        self.worker_forget(worker, Charge::Free("worker_shutdown"), None, now).await
    }

    /// A worker is dead: its job goes back to the queue at once (a failed attempt), and the worker is forgotten. `detail` is the
    /// tail of its stderr, kept in the job's log. Returns the job it ran.
    pub async fn worker_lost(
        &self,
        worker: WorkerId,
        detail: Option<&str>,
        now: i64,
    ) -> Result<Option<JobId>, StoreError> {
        self.worker_forget(worker, Charge::Failed("worker_lost"), detail, now).await
    }

    /// At boot: the former server's children died with it. Their jobs go back to the queue, no attempt charged.
    pub async fn workers_forget_children(&self, now: i64) -> Result<Vec<JobId>, StoreError> {
        let children = sqlx::query("SELECT id FROM workers WHERE child = 1")
            .fetch_all(&self.readers)
            .await
            .doing("find the former workers")?;
        let mut requeued = Vec::new();
        for child in &children {
            let worker = id_column(child, "id")?;
            requeued.extend(self.worker_forget(worker, Charge::Free("server_restart"), None, now).await?);
        }
        Ok(requeued)
    }

    /// Forgets idle workers that were last heard of before this time.
    pub async fn workers_prune(&self, before: i64) -> Result<(), StoreError> {
        sqlx::query(
            "DELETE FROM workers WHERE seen_at < ? \
             AND id NOT IN (SELECT worker FROM jobs WHERE state = 'running' AND worker IS NOT NULL)",
        )
        .bind(before)
        .execute(&self.writer)
        .await
        .doing("forget old workers")?;
        Ok(())
    }

    async fn worker_forget(
        &self,
        worker: WorkerId,
        charge: Charge,
        detail: Option<&str>,
        now: i64,
    ) -> Result<Option<JobId>, StoreError> {
        let doing = "forget a worker";
        let mut tx = self.begin(doing).await?;
        let held = jobs_of_worker(&mut tx, worker).await?;
        for job in &held {
            for line in detail.unwrap_or_default().lines() {
                log_insert(&mut tx, job.id, job.attempt, line, now).await?;
            }
            // Its first line says how the process ended.
            let ended = detail.and_then(|detail| detail.lines().next());
            job_release_seen(&mut tx, job, charge, ended, now).await?;
        }
        sqlx::query("DELETE FROM workers WHERE id = ?")
            .bind(worker.to_string())
            .execute(&mut *tx)
            .await
            .doing(doing)?;
        self.commit(tx, doing).await?;
        held.iter().for_each(|job| self.wake_job(job.id));
        self.wake_queue();
        // A worker holds one job; the claim sees to that.
        Ok(held.first().map(|job| job.id))
    }
}

impl WorkerRow {
    fn read(row: &SqliteRow) -> Result<WorkerRow, StoreError> {
        Ok(WorkerRow {
            id: id_column(row, "id")?,
            device: column(row, "device")?,
            pid: column(row, "pid")?,
            threads: column(row, "threads")?,
            version: column(row, "version")?,
            kernels: column::<Option<&str>>(row, "kernels")?
                .map(serde_json::from_str)
                .transpose()
                .map_err(corrupt("kernels"))?,
            child: column(row, "child")?,
            seen_at: column(row, "seen_at")?,
            created_at: column(row, "created_at")?,
            lost: column::<Option<i64>>(row, "lost_at")?.is_some(),
            job: column::<Option<&str>>(row, "job")?.map(str::parse).transpose().map_err(corrupt("job"))?,
        })
    }
}

/// Notes that a worker was heard of; `NotFound` when it has to register again.
pub(super) async fn worker_touch(tx: &mut SqliteConnection, worker: WorkerId, now: i64) -> Result<(), StoreError> {
    let done = sqlx::query("UPDATE workers SET seen_at = ?, lost_at = NULL WHERE id = ?")
        .bind(now)
        .bind(worker.to_string())
        .execute(tx)
        .await
        .doing("note a worker")?;
    if done.rows_affected() == 0 {
        return Err(StoreError::NotFound { kind: "worker", id: worker.to_string() });
    }
    Ok(())
}

/// A lease of its lapsed: it is not there, whatever it was last heard to be.
pub(super) async fn worker_mark_lost(tx: &mut SqliteConnection, worker: WorkerId, now: i64) -> Result<(), StoreError> {
    sqlx::query("UPDATE workers SET lost_at = ? WHERE id = ?")
        .bind(now)
        .bind(worker.to_string())
        .execute(tx)
        .await
        .doing("note a lost worker")?;
    Ok(())
}
