//! Datasets whose files are downloaded from a hub after the request, and the jobs that wait for them.
//!
//! The plan of such a job is provisional, because it depends on the rows. The server replaces it once the rows are stored.

use futures::future::BoxFuture;
use serde_json::{Value, json};
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::claims::job_fail;
use super::events::event_insert;
use super::hub_models::DOWNLOADING;
use super::jobs::{DATASET_DOWNLOADING, MODEL_DOWNLOADING, datasets_of, insert_datasets, job_row};
use super::{Doing, JobRow, Store, StoreError, column, corrupt, count_column, id_column, int, json_column, to_json};
use crate::id::{DatasetId, JobId};
use crate::job::{Failure, FailureClass};
use crate::spec::Plan;

/// A dataset to download.
#[derive(Debug, Clone)]
pub struct NewDatasetDownload {
    /// Id under which the dataset will be stored.
    pub id: DatasetId,
    /// Display name of the dataset.
    pub name: Option<String>,
    /// Owner; empty = the operator.
    pub owner: String,
    /// Repository, commit and files with their hashes, as JSON.
    pub origin: Value,
    /// How the rows are converted, as JSON.
    pub conversion: Value,
    /// Whether the repository can be read only with a token.
    pub is_restricted: bool,
    /// Total size of the files, in bytes.
    pub bytes_total: u64,
}

/// A dataset that is downloaded, or whose download failed.
#[derive(Debug, Clone, PartialEq)]
pub struct DatasetDownloadRow {
    /// Id under which the dataset will be stored.
    pub id: DatasetId,
    /// Display name of the dataset.
    pub name: Option<String>,
    /// Owner; empty = the operator.
    pub owner: String,
    /// State: `downloading`, `failed`, or `ready` if the owner had the same rows already.
    pub state: String,
    /// Repository, commit and files with their hashes, as JSON.
    pub origin: Value,
    /// How the rows are converted, as JSON.
    pub conversion: Value,
    /// Whether the repository can be read only with a token.
    pub is_restricted: bool,
    /// Total size of the files, in bytes.
    pub bytes_total: u64,
    /// Why the download failed.
    pub problem: Option<String>,
    /// Id of the dataset with the same rows that the owner had already; only in the state `ready`.
    pub dataset: Option<DatasetId>,
    /// Time of the request, Unix time in milliseconds.
    pub created_at: i64,
}

impl DatasetDownloadRow {
    fn read(row: &SqliteRow) -> Result<Self, StoreError> {
        Ok(Self {
            id: id_column(row, "id")?,
            name: column(row, "name")?,
            owner: column(row, "owner")?,
            state: column(row, "state")?,
            origin: json_column(row, "origin")?,
            conversion: json_column(row, "conversion")?,
            is_restricted: column(row, "is_restricted")?,
            bytes_total: count_column(row, "bytes_total")?,
            problem: column(row, "problem")?,
            dataset: column::<Option<&str>>(row, "dataset_id")?
                .map(str::parse)
                .transpose()
                .map_err(corrupt("dataset_id"))?,
            created_at: column(row, "created_at")?,
        })
    }
}

impl Store {
    /// Stores a dataset to download. Returns the row, or the owner's row of the same files and conversion, whose failed download
    /// begins again.
    pub async fn dataset_download_create(
        &self,
        new: NewDatasetDownload,
        now: i64,
    ) -> Result<DatasetDownloadRow, StoreError> {
        let doing = "store the download of a dataset";
        let NewDatasetDownload { id, name, owner, origin, conversion, is_restricted, bytes_total } = new;
        let row = sqlx::query(
            "INSERT INTO dataset_downloads (id, name, owner, state, origin, conversion, is_restricted, bytes_total, created_at) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (owner, origin, conversion) DO UPDATE SET \
             problem = NULL, name = COALESCE(name, excluded.name), \
             state = CASE state WHEN 'failed' THEN excluded.state ELSE state END RETURNING *",
        )
        .bind(id.to_string())
        .bind(name)
        .bind(owner)
        .bind(DOWNLOADING)
        .bind(origin.to_string())
        .bind(conversion.to_string())
        .bind(is_restricted)
        .bind(int(bytes_total))
        .bind(now)
        .fetch_one(&self.writer)
        .await
        .doing(doing)?;
        DatasetDownloadRow::read(&row)
    }

    /// Returns the owner's download of the same files with the same conversion.
    pub async fn dataset_download_of(
        &self,
        owner: &str,
        origin: &Value,
        conversion: &Value,
    ) -> Result<Option<DatasetDownloadRow>, StoreError> {
        let query = "SELECT * FROM dataset_downloads WHERE owner = ? AND origin = ? AND conversion = ?";
        let row = sqlx::query(query).bind(owner).bind(origin.to_string()).bind(conversion.to_string());
        let row = row.fetch_optional(&self.readers).await.doing("find the download of a dataset")?;
        row.as_ref().map(DatasetDownloadRow::read).transpose()
    }

    /// Returns a download; `None` if no download has this id, or the dataset is already stored under it.
    pub async fn dataset_download_get(&self, id: DatasetId) -> Result<Option<DatasetDownloadRow>, StoreError> {
        let row = sqlx::query("SELECT * FROM dataset_downloads WHERE id = ?").bind(id.to_string());
        let row = row.fetch_optional(&self.readers).await.doing("read the download of a dataset")?;
        row.as_ref().map(DatasetDownloadRow::read).transpose()
    }

    /// Returns the datasets that are being downloaded.
    pub async fn dataset_downloads_running(&self) -> Result<Vec<DatasetDownloadRow>, StoreError> {
        sqlx::query("SELECT * FROM dataset_downloads WHERE state = 'downloading' ORDER BY created_at, id")
            .fetch_all(&self.readers)
            .await
            .doing("find downloads of datasets")?
            .iter()
            .map(DatasetDownloadRow::read)
            .collect()
    }

    /// Sets the name of a dataset that is being downloaded, unless it has one.
    pub async fn dataset_download_name(&self, id: DatasetId, name: &str) -> Result<(), StoreError> {
        sqlx::query("UPDATE dataset_downloads SET name = ? WHERE id = ? AND name IS NULL")
            .bind(name)
            .bind(id.to_string())
            .execute(&self.writer)
            .await
            .doing("name a dataset")?;
        Ok(())
    }

    /// Reports an event of a download to the jobs that wait for the dataset.
    pub async fn dataset_download_event(
        &self,
        id: DatasetId,
        kind: &'static str,
        data: &Value,
        now: i64,
    ) -> Result<(), StoreError> {
        let doing = "report an event of a download";
        let mut tx = self.begin(doing).await?;
        let waiting = jobs_waiting_for(&mut tx, id).await?;
        for job in &waiting {
            event_insert(&mut tx, job.id, kind, now, data).await?;
        }
        self.commit(tx, doing).await?;
        waiting.iter().for_each(|job| self.wake_job(job.id));
        Ok(())
    }

    /// Ends a download whose rows are stored as the dataset `stored`. Under another id than the download's, both ids mean it from
    /// now on. Jobs that wait for the dataset still wait for their plan.
    pub async fn dataset_download_ready(&self, id: DatasetId, stored: DatasetId, now: i64) -> Result<(), StoreError> {
        let doing = "end the download of a dataset";
        let mut tx = self.begin(doing).await?;
        let query = match stored == id {
            true => sqlx::query("DELETE FROM dataset_downloads WHERE id = ?1 AND ?2 IS NOT NULL"),
            false => sqlx::query("UPDATE dataset_downloads SET state = 'ready', dataset_id = ?2 WHERE id = ?1"),
        };
        query.bind(id.to_string()).bind(stored.to_string()).execute(&mut *tx).await.doing(doing)?;
        let waiting = jobs_waiting_for(&mut tx, id).await?;
        for job in &waiting {
            event_insert(&mut tx, job.id, "dataset.ready", now, json!({"dataset": id, "stored_as": stored})).await?;
        }
        self.commit(tx, doing).await?;
        waiting.iter().for_each(|job| self.wake_job(job.id));
        Ok(())
    }

    /// Marks a download as failed. Jobs that wait for the dataset fail with this problem.
    pub fn dataset_download_failed<'a>(
        &'a self,
        id: DatasetId,
        problem: &'a str,
        now: i64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let doing = "mark the download of a dataset as failed";
            let mut tx = self.begin(doing).await?;
            let done = sqlx::query(
                "UPDATE dataset_downloads SET state = 'failed', problem = ? WHERE id = ? AND state = 'downloading'",
            )
            .bind(problem)
            .bind(id.to_string())
            .execute(&mut *tx)
            .await
            .doing(doing)?;
            if done.rows_affected() == 0 {
                return Ok(());
            }
            let waiting = jobs_waiting_for(&mut tx, id).await?;
            for job in &waiting {
                let message = format!("the dataset '{id}' could not be imported from the hub: {problem}");
                let suggestion = "fix this problem, then submit the job again";
                job_fail(&mut tx, job, failure("dataset_download_failed", message, suggestion), now).await?;
            }
            self.commit(tx, doing).await?;
            waiting.iter().for_each(|job| self.wake_job(job.id));
            Ok(())
        })
    }

    /// Returns the jobs whose plan is provisional and whose datasets are all downloaded.
    pub async fn jobs_to_plan(&self) -> Result<Vec<JobRow>, StoreError> {
        sqlx::query(
            "SELECT * FROM jobs WHERE waits_for_data = 1 AND state IN ('queued', 'paused') AND NOT EXISTS (SELECT 1 \
             FROM job_datasets JOIN dataset_downloads ON dataset_downloads.id = job_datasets.dataset_id \
             WHERE job_datasets.job_id = jobs.id AND dataset_downloads.state = 'downloading') ORDER BY queue_order",
        )
        .fetch_all(&self.readers)
        .await
        .doing("find jobs whose datasets are downloaded")?
        .iter()
        .map(JobRow::read)
        .collect()
    }

    /// Returns the submitted document of a job, without secrets.
    pub async fn job_document(&self, id: JobId) -> Result<Value, StoreError> {
        let row = sqlx::query("SELECT spec FROM jobs WHERE id = ?")
            .bind(id.to_string())
            .fetch_optional(&self.readers)
            .await
            .doing("read a job's document")?
            .ok_or_else(|| StoreError::NotFound { kind: "job", id: id.to_string() })?;
        json_column(&row, "spec")
    }

    /// Replaces the provisional plan of a job that waits, so that it can start. Does nothing if the job has ended meanwhile.
    pub fn job_planned<'a>(
        &'a self,
        id: JobId,
        document: &'a Value,
        plan: &'a Plan,
        now: i64,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let doing = "store the plan of a job";
            let mut tx = self.begin(doing).await?;
            let done = sqlx::query(
            "UPDATE jobs SET waits_for_data = 0, spec = ?, plan = ?, total_steps = ?, status_reason = CASE status_reason \
             WHEN ? THEN (SELECT ? FROM models WHERE models.state = 'downloading' AND (models.id = jobs.model OR models.id IN \
             (SELECT key FROM json_each(jobs.plan, '$.reward_models')))) \
             ELSE status_reason END WHERE id = ? AND waits_for_data = 1 AND state IN ('queued', 'paused')",
        )
        .bind(to_json("spec", document)?)
        .bind(to_json("plan", plan)?)
        .bind(int(plan.total_steps()))
        .bind(DATASET_DOWNLOADING)
        .bind(MODEL_DOWNLOADING)
        .bind(id.to_string())
        .execute(&mut *tx)
        .await
        .doing(doing)?;
            if done.rows_affected() == 0 {
                return Ok(());
            }
            sqlx::query("DELETE FROM job_datasets WHERE job_id = ?")
                .bind(id.to_string())
                .execute(&mut *tx)
                .await
                .doing(doing)?;
            insert_datasets(&mut tx, id, datasets_of(plan)).await?;
            event_insert(&mut tx, id, "job.planned", now, json!({"total_steps": plan.total_steps()})).await?;
            self.commit(tx, doing).await?;
            self.wake_job(id);
            self.wake_queue();
            Ok(())
        })
    }

    /// Adds warnings to the events of a job: a code and a message each.
    pub async fn job_warn(&self, id: JobId, warnings: &[(&str, String)], now: i64) -> Result<(), StoreError> {
        if warnings.is_empty() {
            return Ok(());
        }
        let doing = "add warnings to a job";
        let mut tx = self.begin(doing).await?;
        for (code, message) in warnings {
            event_insert(&mut tx, id, "warning", now, json!({"code": code, "message": message, "data": {}})).await?;
        }
        self.commit(tx, doing).await?;
        self.wake_job(id);
        Ok(())
    }

    /// Fails a job that waits and cannot start with the rows that were downloaded.
    pub async fn job_not_planned(&self, id: JobId, message: String, now: i64) -> Result<(), StoreError> {
        let doing = "fail a job";
        let mut tx = self.begin(doing).await?;
        let row = job_row(&mut tx, id).await?;
        if row.state.is_terminal() {
            return Ok(());
        }
        let suggestion = "correct this, then submit the job again";
        job_fail(&mut tx, &row, failure("invalid_spec", message, suggestion), now).await?;
        self.commit(tx, doing).await?;
        self.wake_job(id);
        Ok(())
    }
}

fn failure(code: &str, message: String, suggestion: &str) -> Failure {
    let (code, suggestion) = (code.to_owned(), Some(suggestion.to_owned()));
    Failure { class: FailureClass::User, code, message, phase: None, step: None, suggestion }
}

async fn jobs_waiting_for(tx: &mut SqliteConnection, id: DatasetId) -> Result<Vec<JobRow>, StoreError> {
    sqlx::query(
        "SELECT jobs.* FROM job_datasets JOIN jobs ON jobs.id = job_datasets.job_id \
         WHERE job_datasets.dataset_id = ? AND jobs.waits_for_data = 1 AND jobs.state IN ('queued', 'paused')",
    )
    .bind(id.to_string())
    .fetch_all(tx)
    .await
    .doing("find jobs that wait for a dataset")?
    .iter()
    .map(JobRow::read)
    .collect()
}
