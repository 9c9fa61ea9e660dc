//! Jobs as rows: create, read, patch, delete, retry. Lists lie in `listing`, moves in `moves`, claims in `claims`.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde_json::value::RawValue;
use serde_json::{Value, json};
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::attempts::{Cursor, reached_column};
use super::events::event_insert;
use super::{
    Doing, Store, StoreError, column, corrupt, count_column, id_column, int, json_column, to_json, word_column,
};
use crate::event::Phase;
use crate::id::{IdError, JobId, WorkerId};
use crate::job::{Action, Ending, Failure, Requested, State};
use crate::lifecycle::message::QueuedDetail;
use crate::spec::{Plan, RewardSecrets};

/// `status_reason` of a queued job whose model is on its way.
pub const MODEL_DOWNLOADING: &str = "model_downloading";

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
    /// Whose it is; empty = the operator's.
    pub owner: &'a str,
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
    /// Why the server asked for a pause; `None` = a user did, or nobody.
    pub requested_reason: Option<String>,
    /// Where the loop is (or was, when it stopped).
    pub phase: Option<Phase>,
    /// Why it waits or paused: `waiting_for_reward`, `reward_outage`, ….
    pub status_reason: Option<String>,
    /// Higher first.
    pub priority: i64,
    /// The `seq` of its latest event.
    pub last_seq: i64,
    /// Claims so far.
    pub attempt: u64,
    /// Attempts in a row that failed without progress.
    pub failed_attempts: u32,
    /// The highest point that any attempt had reached when the present one began; `None` = of an older version.
    pub reached: Option<Cursor>,
    /// Resident memory of its worker, as last said.
    pub memory_bytes: Option<u64>,
    /// Claims in a row that an error of the server ended.
    pub server_errors: u32,
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
    /// As resolved, as JSON; [`JobRow::plan`] parses it.
    pub plan_json: Box<RawValue>,
    /// The client's labels.
    pub metadata: BTreeMap<String, String>,
    /// Why it failed.
    pub failure: Option<Failure>,
    /// Why it ended before its last step.
    pub ending: Option<Ending>,
    /// The job it was made from.
    pub parent: Option<JobId>,
    /// Whose it is; empty = the operator's.
    pub owner: String,
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
    /// Of this owner; None = of all.
    pub owner: Option<String>,
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
    /// By reward name; from the next claim on.
    pub reward_secrets: BTreeMap<String, RewardSecrets>,
}

impl JobRow {
    /// The resolved plan.
    pub fn plan(&self) -> Result<Plan, StoreError> {
        serde_json::from_str(self.plan_json.get()).map_err(corrupt("plan"))
    }

    pub(super) fn read(row: &SqliteRow) -> Result<JobRow, StoreError> {
        Ok(JobRow {
            id: id_column(row, "id")?,
            name: column(row, "name")?,
            state: word_column(row, "state")?.ok_or_else(|| corrupt("state")("NULL"))?,
            requested: word_column(row, "requested")?,
            requested_reason: column(row, "requested_reason")?,
            phase: word_column(row, "phase")?,
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

fn optional_id<T: FromStr<Err = IdError>>(row: &SqliteRow, name: &'static str) -> Result<Option<T>, StoreError> {
    column::<Option<&str>>(row, name)?.map(str::parse).transpose().map_err(corrupt(name))
}

impl Store {
    /// Queues a job. `NotFound` (dataset) when one of its datasets is gone.
    pub async fn job_create(&self, new: NewJob<'_>, now: i64) -> Result<JobRow, StoreError> {
        let doing = "create a job";
        let mut tx = self.begin(doing).await?;
        let row = self.job_insert(&mut tx, new, now).await?;
        self.commit(tx, doing).await?;
        self.wake_job(row.id);
        self.wake_queue();
        Ok(row)
    }

    /// A new job's row, datasets and first event.
    pub(super) async fn job_insert(
        &self,
        tx: &mut SqliteConnection,
        new: NewJob<'_>,
        now: i64,
    ) -> Result<JobRow, StoreError> {
        let doing = "create a job";
        let NewJob { id, spec, plan, secrets, parent, priority, owner } = new;
        sqlx::query(
            "INSERT INTO jobs (id, name, state, priority, queue_order, total_steps, model, spec, plan, secrets, metadata, \
             parent, owner, created_at, status_reason) \
             VALUES (?, ?, 'queued', ?, (SELECT COALESCE(MAX(queue_order), 0) + 1 FROM jobs), ?, ?, ?, ?, ?, ?, ?, ?, ?, \
             (SELECT ? FROM models WHERE id = ? AND state = 'downloading'))",
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
        .bind(MODEL_DOWNLOADING)
        .bind(&plan.model.id)
        .execute(&mut *tx)
        .await
        .doing(doing)?;
        let of_eval = plan.eval.iter().flat_map(|eval| eval.datasets());
        let of_warm_up = plan.warm_up.iter().map(|warm_up| &warm_up.dataset);
        for dataset in std::iter::once(&plan.dataset).chain(of_eval).chain(of_warm_up).map(|dataset| dataset.id) {
            sqlx::query("INSERT OR IGNORE INTO job_datasets (job_id, dataset_id) VALUES (?, ?)")
                .bind(id.to_string())
                .bind(dataset.to_string())
                .execute(&mut *tx)
                .await
                .doing(doing)?;
        }
        self.job_created(tx, id, (parent, None), now).await
    }

    /// Common to every way of making a job: its datasets exist, and its first event, which names the job it was made from and
    /// the step it begins at where that is the parent's.
    pub(super) async fn job_created(
        &self,
        tx: &mut SqliteConnection,
        id: JobId,
        (parent, from_step): (Option<JobId>, Option<u64>),
        now: i64,
    ) -> Result<JobRow, StoreError> {
        let missing: Option<String> = sqlx::query_scalar(
            "SELECT dataset_id FROM job_datasets WHERE job_id = ? AND dataset_id NOT IN (SELECT id FROM datasets) LIMIT 1",
        )
        .bind(id.to_string())
        .fetch_optional(&mut *tx)
        .await
        .doing("look for a job's datasets")?;
        if let Some(id) = missing {
            return Err(StoreError::NotFound { kind: "dataset", id });
        }
        let row = job_row(tx, id).await?;
        let data = QueuedDetail { model: Some(row.model.clone()), parent, from_step, ..QueuedDetail::default() };
        event_insert(tx, id, "job.created", now, data).await?;
        // Again, with the event.
        job_row(tx, id).await
    }

    /// One job, or `NotFound`.
    pub async fn job_get(&self, id: JobId) -> Result<JobRow, StoreError> {
        let mut reader = self.readers.acquire().await.doing("read a job")?;
        job_row(&mut reader, id).await
    }

    /// Changes what may be changed at any time. A priority matters only while the job is queued.
    pub async fn job_patch(&self, id: JobId, patch: JobPatch, now: i64) -> Result<JobRow, StoreError> {
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
    }

    /// Removes a job that is over with all its rows. Returns the ids of its exports: the caller then removes the files of the job and
    /// of these.
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

    /// The secrets by reward name: for a worker's claim and for copies of a job.
    pub async fn job_secrets(&self, id: JobId) -> Result<BTreeMap<String, RewardSecrets>, StoreError> {
        let row = sqlx::query("SELECT secrets FROM jobs WHERE id = ?")
            .bind(id.to_string())
            .fetch_optional(&self.readers)
            .await
            .doing("read a job's secrets")?
            .ok_or_else(|| StoreError::NotFound { kind: "job", id: id.to_string() })?;
        json_column(&row, "secrets")
    }

    /// Jobs in each state, all six.
    pub async fn job_counts(&self) -> Result<Vec<(State, u64)>, StoreError> {
        let rows = sqlx::query("SELECT state, COUNT(*) AS jobs FROM jobs GROUP BY state")
            .fetch_all(&self.readers)
            .await
            .doing("count jobs")?;
        let mut counts = State::ALL.map(|state| (state, 0)).to_vec();
        for row in &rows {
            let state: Option<State> = word_column(row, "state")?;
            let jobs = count_column(row, "jobs")?;
            counts.iter_mut().filter(|(of, _)| Some(*of) == state).for_each(|(_, count)| *count = jobs);
        }
        Ok(counts)
    }
}

/// One job, read over any connection.
pub(super) async fn job_row(connection: &mut SqliteConnection, id: JobId) -> Result<JobRow, StoreError> {
    let row = sqlx::query("SELECT * FROM jobs WHERE id = ?")
        .bind(id.to_string())
        .fetch_optional(connection)
        .await
        .doing("read a job")?
        .ok_or_else(|| StoreError::NotFound { kind: "job", id: id.to_string() })?;
    JobRow::read(&row)
}
