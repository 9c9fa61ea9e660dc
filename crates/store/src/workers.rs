//! Worker processes: which are connected, on which device, and which job each runs.

use futures::future::BoxFuture;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::claims::{Charge, job_release_seen, jobs_of_worker};
use super::events::log_insert;
use super::{Doing, Store, StoreError, column, corrupt, id_column};
use crate::id::{JobId, WorkerId};
use crate::protocol::{KernelFacts, Register};
use crate::spec::RuntimeFacts;

/// A worker and its state.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerRow {
    /// Id of the worker.
    pub id: WorkerId,
    /// Device of the worker: `cpu`, `cuda:0`.
    pub device: String,
    /// Process id on the worker's machine.
    pub pid: u32,
    /// Number of compute threads.
    pub threads: u32,
    /// Version of the worker's rlood.
    pub version: String,
    /// CPU kernels of the worker; `None` on a GPU.
    pub kernels: Option<KernelFacts>,
    /// Runtimes beside rlood's own engine that the worker can start.
    pub runtimes: Vec<RuntimeFacts>,
    /// Whether it is a child process of this server, which ends when the server does.
    pub child: bool,
    /// Time of the worker's last message, Unix time in milliseconds.
    pub seen_at: i64,
    /// Time of registration, Unix time in milliseconds.
    pub created_at: i64,
    /// Whether one of the worker's leases expired and the worker has not sent a message since.
    pub lost: bool,
    /// Id of the job that the worker runs; `None` = idle.
    pub job: Option<JobId>,
}

impl Store {
    /// Registers a worker, or updates its registration.
    pub async fn worker_register(&self, register: &Register, now: i64) -> Result<(), StoreError> {
        let Register { worker, device, pid, threads, version, child, protocol: _, kernels, runtimes } = register;
        let trl_devices =
            runtimes.iter().filter(|facts| facts.is_usable()).map(|facts| facts.devices).max().unwrap_or(0);
        let runtimes = Some(runtimes).filter(|runtimes| !runtimes.is_empty());
        let runtimes = runtimes.map(serde_json::to_string).transpose().map_err(corrupt("runtimes"))?;
        let kernels = kernels.as_ref().map(serde_json::to_string).transpose().map_err(corrupt("kernels"))?;
        sqlx::query(
            "INSERT INTO workers (id, device, pid, threads, version, child, seen_at, created_at, kernels, runtimes, trl_devices) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?8, ?9, ?10) ON CONFLICT (id) DO UPDATE SET device = excluded.device, \
             pid = excluded.pid, threads = excluded.threads, version = excluded.version, child = excluded.child, \
             kernels = excluded.kernels, runtimes = excluded.runtimes, trl_devices = excluded.trl_devices, seen_at = excluded.seen_at, lost_at = NULL",
        )
        .bind(worker.to_string())
        .bind(device)
        .bind(pid)
        .bind(threads)
        .bind(version)
        .bind(child)
        .bind(now)
        .bind(kernels)
        .bind(runtimes)
        .bind(trl_devices)
        .execute(&self.writer)
        .await
        .doing("register a worker")?;
        Ok(())
    }

    /// Records a message from a worker; `NotFound` if it has to register again.
    pub async fn worker_seen(&self, worker: WorkerId, now: i64) -> Result<(), StoreError> {
        let mut writer = self.writer.acquire().await.doing("reach the database's writer connection")?;
        worker_touch(&mut writer, worker, now).await
    }

    /// Lists all workers, oldest first.
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

    /// Removes a worker that shut down. Its job, if any, returns to the queue, and the attempt does not count as failed.
    pub async fn worker_remove(&self, worker: WorkerId, now: i64) -> Result<Option<JobId>, StoreError> {
        self.worker_forget(worker, Charge::Free("worker_shutdown"), None, now).await
    }

    /// Removes a worker that died. Its job returns to the queue immediately, with a failed attempt. `detail` is the end of the
    /// worker's stderr, which is stored in the job's log. Returns the job that it ran.
    pub async fn worker_lost(
        &self,
        worker: WorkerId,
        detail: Option<&str>,
        now: i64,
    ) -> Result<Option<JobId>, StoreError> {
        self.worker_forget(worker, Charge::Failed("worker_lost"), detail, now).await
    }

    /// Removes the former server's child workers, which ended with it. Their jobs return to the queue, and the attempts do not
    /// count as failed. Called at start.
    pub async fn workers_forget_children(&self, now: i64) -> Result<Vec<JobId>, StoreError> {
        let children = sqlx::query("SELECT id FROM workers WHERE child = 1")
            .fetch_all(&self.readers)
            .await
            .doing("find the former server's workers")?;
        let mut requeued = Vec::new();
        for child in &children {
            let worker = id_column(child, "id")?;
            requeued.extend(self.worker_forget(worker, Charge::Free("server_restart"), None, now).await?);
        }
        Ok(requeued)
    }

    /// Removes idle workers whose last message was before this time.
    pub async fn workers_prune(&self, before: i64) -> Result<(), StoreError> {
        sqlx::query(
            "DELETE FROM workers WHERE seen_at < ? \
             AND id NOT IN (SELECT worker FROM jobs WHERE state = 'running' AND worker IS NOT NULL)",
        )
        .bind(before)
        .execute(&self.writer)
        .await
        .doing("remove old workers")?;
        Ok(())
    }

    fn worker_forget<'a>(
        &'a self,
        worker: WorkerId,
        charge: Charge,
        detail: Option<&'a str>,
        now: i64,
    ) -> BoxFuture<'a, Result<Option<JobId>, StoreError>> {
        Box::pin(async move {
            let doing = "remove a worker";
            let mut tx = self.begin(doing).await?;
            let held = jobs_of_worker(&mut tx, worker).await?;
            for job in &held {
                for line in detail.unwrap_or_default().lines() {
                    log_insert(&mut tx, job.id, job.attempt, line, now).await?;
                }
                // The first line of `detail` describes how the process ended.
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
            // A worker holds at most one job, because claiming returns its previous job to the queue.
            Ok(held.first().map(|job| job.id))
        })
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
            runtimes: column::<Option<&str>>(row, "runtimes")?
                .map(serde_json::from_str)
                .transpose()
                .map_err(corrupt("runtimes"))?
                .unwrap_or_default(),
            child: column(row, "child")?,
            seen_at: column(row, "seen_at")?,
            created_at: column(row, "created_at")?,
            lost: column::<Option<i64>>(row, "lost_at")?.is_some(),
            job: column::<Option<&str>>(row, "job")?.map(str::parse).transpose().map_err(corrupt("job"))?,
        })
    }
}

/// Records a message from a worker; `NotFound` if it has to register again.
pub(super) async fn worker_touch(tx: &mut SqliteConnection, worker: WorkerId, now: i64) -> Result<(), StoreError> {
    let done = sqlx::query("UPDATE workers SET seen_at = ?, lost_at = NULL WHERE id = ?")
        .bind(now)
        .bind(worker.to_string())
        .execute(tx)
        .await
        .doing("record a message from a worker")?;
    if done.rows_affected() == 0 {
        return Err(StoreError::NotFound { kind: "worker", id: worker.to_string() });
    }
    Ok(())
}

/// Marks a worker as lost, because one of its leases expired.
pub(super) async fn worker_mark_lost(tx: &mut SqliteConnection, worker: WorkerId, now: i64) -> Result<(), StoreError> {
    sqlx::query("UPDATE workers SET lost_at = ? WHERE id = ?")
        .bind(now)
        .bind(worker.to_string())
        .execute(tx)
        .await
        .doing("store that a worker is lost")?;
    Ok(())
}
