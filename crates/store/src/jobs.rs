//! Jobs as rows: create, read, patch, delete, retry. Lists are in `listing`, state changes in `moves`, claims in `claims`.

use std::collections::BTreeMap;
use std::str::FromStr;

use futures::future::BoxFuture;
use rlood_types::webhooks::message::QueuedDetail;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::attempts::{Cursor, reached_column};
use super::events::event_insert;
use super::{
    Doing, Store, StoreError, column, corrupt, count_column, id_column, int, json_column, to_json, variant_column,
};
use crate::event::Phase;
use crate::id::{DatasetId, IdError, JobId, WorkerId};
use crate::job::{Action, Ending, Failure, Requested, State};
use crate::spec::{Plan, RewardSecrets};

/// `status_reason` of a queued job whose model, or the model of a reward, is being downloaded.
pub const MODEL_DOWNLOADING: &str = "model_downloading";
/// `status_reason` of a queued job whose plan is provisional, because the files of a dataset are being downloaded.
pub const DATASET_DOWNLOADING: &str = "dataset_downloading";

/// A job to create. Name, model, metadata, datasets and length are read from the plan.
#[derive(Debug)]
pub struct NewJob<'a> {
    /// Id of the job.
    pub id: JobId,
    /// The submitted document, with secrets redacted.
    pub spec: &'a Value,
    /// The resolved plan of the job.
    pub plan: &'a Plan,
    /// Secrets by reward name; never returned by the API.
    pub secrets: &'a BTreeMap<String, RewardSecrets>,
    /// Id of the job that this job was created from.
    pub parent: Option<JobId>,
    /// Priority in the queue; higher first, 0 by default.
    pub priority: i64,
    /// Owner; empty = the operator.
    pub owner: &'a str,
}

/// The row of a job.
#[derive(Debug, Clone)]
pub struct JobRow {
    /// Id of the job.
    pub id: JobId,
    /// Display name of the job.
    pub name: Option<String>,
    /// Current state of the job.
    pub state: State,
    /// A user's request that the worker has not carried out yet; only while running.
    pub requested: Option<Requested>,
    /// Why the server requested a pause; `None` = a user requested it, or there is no request.
    pub requested_reason: Option<String>,
    /// Current phase of the training loop, or the last one if the job stopped.
    pub phase: Option<Phase>,
    /// Why the job waits or has paused: `waiting_for_reward`, `reward_outage`, ….
    pub status_reason: Option<String>,
    /// Priority in the queue; higher first.
    pub priority: i64,
    /// Sequence number (`seq`) of the job's latest event.
    pub last_seq: i64,
    /// Number of times that a worker claimed the job.
    pub attempt: u64,
    /// Number of consecutive failed attempts without progress.
    pub failed_attempts: u32,
    /// The highest point that any attempt had reached when the current one began; `None` = created by an older version.
    pub reached: Option<Cursor>,
    /// Last reported resident memory of its worker, in bytes.
    pub memory_bytes: Option<u64>,
    /// Number of consecutive claims that ended with a server error.
    pub server_errors: u32,
    /// Id of the worker that runs the job.
    pub worker: Option<WorkerId>,
    /// Time at which the claim expires, Unix time in milliseconds.
    pub lease_until: Option<i64>,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Total number of optimizer steps.
    pub total_steps: u64,
    /// Estimated seconds remaining; `None` = unknown.
    pub eta_s: Option<f64>,
    /// Id of the base model.
    pub model: String,
    /// The resolved plan as JSON; [`JobRow::plan`] parses it.
    pub plan_json: Box<RawValue>,
    /// The client's own labels.
    pub metadata: BTreeMap<String, String>,
    /// Why the job failed.
    pub failure: Option<Failure>,
    /// Why the job ended before its last step.
    pub ending: Option<Ending>,
    /// Id of the job that this job was created from.
    pub parent: Option<JobId>,
    /// Owner; empty = the operator.
    pub owner: String,
    /// Time of creation, Unix time in milliseconds.
    pub created_at: i64,
    /// Time of the first claim, Unix time in milliseconds.
    pub started_at: Option<i64>,
    /// Time at which the job ended, Unix time in milliseconds.
    pub finished_at: Option<i64>,
}

/// Filter of a list of jobs.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// Only jobs in one of these states; empty = all states.
    pub states: Vec<State>,
    /// Only jobs with this model id.
    pub model: Option<String>,
    /// Only jobs with all these labels.
    pub metadata: BTreeMap<String, String>,
    /// Only jobs of this owner; `None` = all owners.
    pub owner: Option<String>,
    /// Only jobs with exactly this name.
    pub name: Option<String>,
    /// Only jobs whose name contains this text.
    pub name_contains: Option<String>,
    /// Only jobs whose id begins with this text.
    pub id_prefix: Option<String>,
}

/// Changes to a job; `None` = unchanged.
#[derive(Debug, Clone, Default)]
pub struct JobPatch {
    /// New display name; `Some(None)` removes the name.
    pub name: Option<Option<String>>,
    /// New labels, which replace all existing ones.
    pub metadata: Option<BTreeMap<String, String>>,
    /// New priority in the queue.
    pub priority: Option<i64>,
    /// New secrets by reward name, used from the next claim on.
    pub reward_secrets: BTreeMap<String, RewardSecrets>,
}

impl JobRow {
    /// Parses the resolved plan.
    pub fn plan(&self) -> Result<Plan, StoreError> {
        serde_json::from_str(self.plan_json.get()).map_err(corrupt("plan"))
    }

    pub(super) fn read(row: &SqliteRow) -> Result<JobRow, StoreError> {
        Ok(JobRow {
            id: id_column(row, "id")?,
            name: column(row, "name")?,
            state: variant_column(row, "state")?.ok_or_else(|| corrupt("state")("NULL"))?,
            requested: variant_column(row, "requested")?,
            requested_reason: column(row, "requested_reason")?,
            phase: variant_column(row, "phase")?,
            status_reason: column(row, "status_reason")?,
            priority: column(row, "priority")?,
            last_seq: column::<i64>(row, "next_seq")? - 1,
            attempt: count_column(row, "attempt")?,
            failed_attempts: column(row, "failed_attempts")?,
            reached: reached_column(row)?,
            memory_bytes: column::<Option<i64>>(row, "memory_bytes")?.map(i64::unsigned_abs),
            server_errors: column(row, "server_errors")?,
            worker: optional_id(row, "worker")?,
            lease_until: column(row, "lease_until")?,
            step: count_column(row, "step")?,
            total_steps: count_column(row, "total_steps")?,
            eta_s: column(row, "eta_s")?,
            model: column(row, "model")?,
            plan_json: json_column(row, "plan")?,
            metadata: json_column(row, "metadata")?,
            failure: column::<Option<&str>>(row, "failure")?
                .map(serde_json::from_str)
                .transpose()
                .map_err(corrupt("failure"))?,
            ending: column::<Option<&str>>(row, "ending")?
                .map(serde_json::from_str)
                .transpose()
                .map_err(corrupt("ending"))?,
            parent: optional_id(row, "parent")?,
            owner: column(row, "owner")?,
            created_at: column(row, "created_at")?,
            started_at: column(row, "started_at")?,
            finished_at: column(row, "finished_at")?,
        })
    }
}

/// Stores which datasets a job needs.
pub(super) async fn insert_datasets(
    tx: &mut SqliteConnection,
    job: JobId,
    datasets: impl IntoIterator<Item = DatasetId>,
) -> Result<(), StoreError> {
    for dataset in datasets {
        sqlx::query("INSERT OR IGNORE INTO job_datasets (job_id, dataset_id) VALUES (?, ?)")
            .bind(job.to_string())
            .bind(dataset.to_string())
            .execute(&mut *tx)
            .await
            .doing("store which datasets a job needs")?;
    }
    Ok(())
}

/// Returns the ids of the datasets that a plan names.
pub(super) fn datasets_of(plan: &Plan) -> impl Iterator<Item = DatasetId> {
    let of_eval = plan.eval.iter().flat_map(|eval| eval.datasets());
    let of_warm_up = plan.warm_up.iter().map(|warm_up| &warm_up.dataset);
    std::iter::once(&plan.dataset).chain(of_eval).chain(of_warm_up).map(|dataset| dataset.id)
}

fn optional_id<T: FromStr<Err = IdError>>(row: &SqliteRow, name: &'static str) -> Result<Option<T>, StoreError> {
    column::<Option<&str>>(row, name)?.map(str::parse).transpose().map_err(corrupt(name))
}

impl Store {
    /// Queues a job. `NotFound` (dataset) if one of its datasets no longer exists.
    pub async fn job_create(&self, new: NewJob<'_>, now: i64) -> Result<JobRow, StoreError> {
        self.job_create_waiting(new, &[], now).await
    }

    /// Queues a job whose plan is provisional until these datasets are downloaded: [`Store::job_planned`] replaces the plan. Without
    /// datasets the plan is final.
    pub async fn job_create_waiting(
        &self,
        new: NewJob<'_>,
        waits_for: &[DatasetId],
        now: i64,
    ) -> Result<JobRow, StoreError> {
        let doing = "create a job";
        let mut tx = self.begin(doing).await?;
        let row = self.job_insert(&mut tx, new, waits_for, now).await?;
        self.commit(tx, doing).await?;
        self.wake_job(row.id);
        self.wake_queue();
        Ok(row)
    }

    /// Inserts a new job's row, datasets and first event.
    pub(super) async fn job_insert(
        &self,
        tx: &mut SqliteConnection,
        new: NewJob<'_>,
        waits_for: &[DatasetId],
        now: i64,
    ) -> Result<JobRow, StoreError> {
        let doing = "create a job";
        let NewJob { id, spec, plan, secrets, parent, priority, owner } = new;
        sqlx::query(
            "INSERT INTO jobs (id, name, state, priority, queue_order, total_steps, model, spec, plan, secrets, metadata, \
             parent, owner, created_at, waits_for_data, status_reason) \
             VALUES (?, ?, 'queued', ?, (SELECT COALESCE(MAX(queue_order), 0) + 1 FROM jobs), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, \
             COALESCE(?, (SELECT ? FROM models WHERE (id = ? OR id IN (SELECT key FROM json_each(?))) AND state = 'downloading')))",
        )
        .bind(id.to_string())
        .bind(&plan.name)
        .bind(priority)
        .bind(int(plan.total_steps()))
        .bind(&plan.model.id)
        .bind(to_json("spec", spec)?)
        .bind(to_json("plan", plan)?)
        .bind(to_json("secrets", secrets)?)
        .bind(to_json("metadata", &plan.metadata)?)
        .bind(parent.map(|parent| parent.to_string()))
        .bind(owner)
        .bind(now)
        .bind(!waits_for.is_empty())
        .bind((!waits_for.is_empty()).then_some(DATASET_DOWNLOADING))
        .bind(MODEL_DOWNLOADING)
        .bind(&plan.model.id)
        .bind(to_json("reward_models", &plan.reward_models)?)
        .execute(&mut *tx)
        .await
        .doing(doing)?;
        match waits_for {
            [] => insert_datasets(tx, id, datasets_of(plan)).await?,
            datasets => insert_datasets(tx, id, datasets.iter().copied()).await?,
        }
        self.job_created(tx, id, (parent, None), now).await
    }

    /// Completes the creation of a job by any route: checks that its datasets exist and inserts its first event, which names the
    /// parent job and, if the job starts from the parent's state, the step.
    pub(super) async fn job_created(
        &self,
        tx: &mut SqliteConnection,
        id: JobId,
        (parent, from_step): (Option<JobId>, Option<u64>),
        now: i64,
    ) -> Result<JobRow, StoreError> {
        let missing: Option<String> = sqlx::query_scalar(
            "SELECT dataset_id FROM job_datasets WHERE job_id = ? AND dataset_id NOT IN (SELECT id FROM datasets) \
             AND dataset_id NOT IN (SELECT id FROM dataset_downloads) LIMIT 1",
        )
        .bind(id.to_string())
        .fetch_optional(&mut *tx)
        .await
        .doing("look up a job's datasets")?;
        if let Some(id) = missing {
            return Err(StoreError::NotFound { kind: "dataset", id });
        }
        let row = job_row(tx, id).await?;
        let data = QueuedDetail { model: Some(row.model.clone()), parent, from_step, ..QueuedDetail::default() };
        event_insert(tx, id, "job.created", now, data).await?;
        // The insertion of the event changed the row, so the job is read again.
        job_row(tx, id).await
    }

    /// Returns one job, or `NotFound`.
    pub async fn job_get(&self, id: JobId) -> Result<JobRow, StoreError> {
        let mut reader = self.readers.acquire().await.doing("read a job")?;
        job_row(&mut reader, id).await
    }

    /// Changes fields that may be changed at any time. A priority has an effect only while the job is queued.
    pub fn job_patch(&self, id: JobId, patch: JobPatch, now: i64) -> BoxFuture<'_, Result<JobRow, StoreError>> {
        Box::pin(async move {
            let doing = "change a job";
            let mut tx = self.begin(doing).await?;
            let mut row = job_row(&mut tx, id).await?;
            let JobPatch { name, metadata, priority, reward_secrets } = patch;
            let renewed: Vec<String> = reward_secrets.keys().cloned().collect();
            row.name = name.unwrap_or(row.name);
            row.metadata = metadata.unwrap_or(row.metadata);
            row.priority = priority.unwrap_or(row.priority);
            sqlx::query("UPDATE jobs SET name = ?, metadata = ?, priority = ? WHERE id = ?")
                .bind(&row.name)
                .bind(to_json("metadata", &row.metadata)?)
                .bind(row.priority)
                .bind(id.to_string())
                .execute(&mut *tx)
                .await
                .doing(doing)?;
            if !reward_secrets.is_empty() {
                let stored = sqlx::query("SELECT secrets FROM jobs WHERE id = ?").bind(id.to_string());
                let stored = stored.fetch_one(&mut *tx).await.doing(doing)?;
                let mut secrets: BTreeMap<String, RewardSecrets> = json_column(&stored, "secrets")?;
                for (name, change) in reward_secrets {
                    let old = secrets.remove(&name).unwrap_or_default();
                    secrets.insert(name, old.changed(change));
                }
                sqlx::query("UPDATE jobs SET secrets = ? WHERE id = ?")
                    .bind(to_json("secrets", &secrets)?)
                    .bind(id.to_string())
                    .execute(&mut *tx)
                    .await
                    .doing(doing)?;
            }
            let mut data = json!({ "name": row.name, "metadata": row.metadata, "priority": row.priority });
            if !renewed.is_empty() {
                data["reward_secrets"] = renewed.into();
            }
            event_insert(&mut tx, id, "job.updated", now, data).await?;
            self.commit(tx, doing).await?;
            self.wake_job(id);
            Ok(row)
        })
    }

    /// Deletes a job that has ended, with all dependent rows. Returns the ids of its exports: the caller then removes the files of the
    /// job and of these exports.
    pub async fn job_delete(&self, id: JobId) -> Result<Vec<String>, StoreError> {
        let doing = "delete a job";
        let mut tx = self.begin(doing).await?;
        let row = job_row(&mut tx, id).await?;
        if !row.state.is_terminal() {
            return Err(StoreError::IllegalMove { state: row.state, action: Action::Delete });
        }
        let exports = sqlx::query_scalar("SELECT id FROM tasks WHERE job_id = ? AND kind = 'export'");
        let exports = exports.bind(id.to_string()).fetch_all(&mut *tx).await.doing(doing)?;
        sqlx::query("DELETE FROM jobs WHERE id = ?").bind(id.to_string()).execute(&mut *tx).await.doing(doing)?;
        self.commit(tx, doing).await?;
        self.wake_gone(id, row.owner);
        self.wake_tasks();
        Ok(exports)
    }

    /// Returns the secrets by reward name, for a worker's claim and for copies of a job.
    pub async fn job_secrets(&self, id: JobId) -> Result<BTreeMap<String, RewardSecrets>, StoreError> {
        let row = sqlx::query("SELECT secrets FROM jobs WHERE id = ?")
            .bind(id.to_string())
            .fetch_optional(&self.readers)
            .await
            .doing("read a job's secrets")?
            .ok_or_else(|| StoreError::NotFound { kind: "job", id: id.to_string() })?;
        json_column(&row, "secrets")
    }

    /// Counts the jobs in each of the six states.
    pub async fn job_counts(&self) -> Result<Vec<(State, u64)>, StoreError> {
        let rows = sqlx::query("SELECT state, COUNT(*) AS jobs FROM jobs GROUP BY state")
            .fetch_all(&self.readers)
            .await
            .doing("count jobs")?;
        let mut counts = State::ALL.map(|state| (state, 0)).to_vec();
        for row in &rows {
            let state: Option<State> = variant_column(row, "state")?;
            let jobs = count_column(row, "jobs")?;
            counts.iter_mut().filter(|(of, _)| Some(*of) == state).for_each(|(_, count)| *count = jobs);
        }
        Ok(counts)
    }
}

/// Returns one job, read over any connection.
pub(super) async fn job_row(connection: &mut SqliteConnection, id: JobId) -> Result<JobRow, StoreError> {
    let row = sqlx::query("SELECT * FROM jobs WHERE id = ?")
        .bind(id.to_string())
        .fetch_optional(connection)
        .await
        .doing("read a job")?
        .ok_or_else(|| StoreError::NotFound { kind: "job", id: id.to_string() })?;
    JobRow::read(&row)
}
