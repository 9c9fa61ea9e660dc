//! Checkpoints: published rows that refer to complete files. The files are written first, then the row.

use futures::future::BoxFuture;
use rlood_types::webhooks::message::CheckpointDetail;
use serde_json::json;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::claims::owned_row;
use super::doctor::result_of;
use super::events::event_insert;
use super::journal::journal_trim;
use super::{Doing, JobRow, Store, StoreError, column, count_column, id_column, int, json_column, to_json};
use crate::event::Metrics;
use crate::id::{CheckpointId, JobId};
use crate::protocol::FileEntry;
use crate::spec::CheckpointPlan;

/// A published checkpoint. Its files are in `DataDir::checkpoint_dir(job, step, attempt)`.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointRow {
    /// Id of the checkpoint.
    pub id: CheckpointId,
    /// Id of the job.
    pub job: JobId,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// Number of the attempt that wrote the checkpoint.
    pub attempt: u64,
    /// All files of the checkpoint, including `manifest.json`.
    pub files: Vec<FileEntry>,
    /// Metrics of the checkpoint's step and of the last evaluation.
    pub metrics: Metrics,
    /// Whether the checkpoint is the best one of the job.
    pub best: bool,
    /// Whether a user pinned the checkpoint, so that rotation keeps it when it removes older ones.
    pub pinned: bool,
    /// Whether the checkpoint is temporary: it was saved only so that the next attempt repeats fewer steps if
    /// this one is interrupted.
    pub temporary: bool,
    /// Time of publication, Unix time in milliseconds.
    pub created_at: i64,
}

/// A complete checkpoint on disk that is to be published.
#[derive(Debug)]
pub struct PublishCheckpoint<'a> {
    /// Id of the job.
    pub job: JobId,
    /// Number of the attempt that wrote the checkpoint.
    pub attempt: u64,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// All files of the checkpoint.
    pub files: &'a [FileEntry],
    /// Metrics of the checkpoint's step and of the last evaluation.
    pub metrics: &'a Metrics,
    /// Whether the checkpoint is temporary: saved only so that the next attempt repeats fewer steps if this one is interrupted. The
    /// next checkpoint replaces it, and it is never the best one.
    pub temporary: bool,
}

/// The result of publishing a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Publication {
    /// Id of the checkpoint's new row, or of its existing row if the same attempt published it before.
    pub id: CheckpointId,
    /// Checkpoints whose rows rotation removed. The caller can now remove their directories.
    pub removed: Vec<CheckpointRow>,
}

impl Store {
    /// Publishes a checkpoint and rotates older ones. The newest `keep_last` and the best `keep_best` of the job's plan and all
    /// pinned ones are kept. `LeaseLost` if the attempt does not own the job.
    pub fn checkpoint_publish<'a>(
        &'a self,
        checkpoint: PublishCheckpoint<'a>,
        now: i64,
    ) -> BoxFuture<'a, Result<Publication, StoreError>> {
        Box::pin(async move {
            let doing = "publish a checkpoint";
            let PublishCheckpoint { job, attempt, step, files, metrics, temporary } = checkpoint;
            let mut tx = self.begin(doing).await?;
            let row = owned_row(&mut tx, job, attempt).await?;
            let keep = row.plan()?.checkpoints;
            let known = checkpoints(&mut tx, job).await?.into_iter().find(|known| known.step == step);
            let mut removed = Vec::new();
            match known {
                // The worker repeats this call if the response to the first one was lost.
                Some(known) if known.attempt == attempt => return Ok(Publication { id: known.id, removed }),
                Some(known) => removed.push(known),
                None => {}
            }
            delete_rows(&mut tx, &removed).await?;
            let id = CheckpointId::new();
            sqlx::query(
                "INSERT INTO checkpoints (id, job_id, step, attempt, files, metrics, pinned, temporary, created_at) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            )
            .bind(id.to_string())
            .bind(job.to_string())
            .bind(int(step))
            .bind(int(attempt))
            .bind(to_json("files", &files)?)
            .bind(to_json("metrics", metrics)?)
            // A checkpoint that is written again (after a rewind) is still the same one, so its pin is kept.
            .bind(removed.iter().any(|old| old.pinned))
            .bind(temporary)
            .bind(now)
            .execute(&mut *tx)
            .await
            .doing(doing)?;
            let rows = checkpoints(&mut tx, job).await?;
            let ranked = ranked(&rows, &keep);
            let best = ranked.first().map(|row| row.id);
            let keep_best = keep.keep_best as usize;
            // Temporary checkpoints do not count toward `keep_last` and `keep_best`. All but the newest temporary one are removed.
            let newest = rows.iter().filter(|row| !row.temporary).take(keep.keep_last as usize).map(|row| row.id);
            let newest: Vec<CheckpointId> = newest.collect();
            let surplus: Vec<CheckpointRow> = rows
                .iter()
                .filter(|row| {
                    // Rotation keeps the checkpoint that was just published, whatever the plan says.
                    let recent = newest.contains(&row.id) || row.id == id;
                    !(recent || row.pinned || ranked.iter().take(keep_best).any(|best| best.id == row.id))
                })
                .cloned()
                .collect();
            delete_rows(&mut tx, &surplus).await?;
            removed.extend(surplus);
            sqlx::query("UPDATE checkpoints SET best = (id = ?) WHERE job_id = ?")
                .bind(best.map(|best| best.to_string()).unwrap_or_default())
                .bind(job.to_string())
                .execute(&mut *tx)
                .await
                .doing(doing)?;
            sqlx::query("UPDATE jobs SET step = MAX(step, ?) WHERE id = ?")
                .bind(int(step))
                .bind(job.to_string())
                .execute(&mut *tx)
                .await
                .doing(doing)?;
            journal_trim(&mut tx, job, step).await?;
            let data = CheckpointDetail { checkpoint: id, step, best: best == Some(id) };
            event_insert(&mut tx, job, "checkpoint.saved", now, data).await?;
            self.commit(tx, doing).await?;
            self.wake_job(job);
            Ok(Publication { id, removed })
        })
    }

    /// Returns one checkpoint, or `NotFound`.
    pub async fn checkpoint_get(&self, id: CheckpointId) -> Result<CheckpointRow, StoreError> {
        let row = sqlx::query("SELECT * FROM checkpoints WHERE id = ?")
            .bind(id.to_string())
            .fetch_optional(&self.readers)
            .await
            .doing("read a checkpoint")?
            .ok_or_else(|| StoreError::NotFound { kind: "checkpoint", id: id.to_string() })?;
        CheckpointRow::read(&row)
    }

    /// Lists a job's checkpoints, newest first.
    pub async fn checkpoint_list(&self, job: JobId) -> Result<Vec<CheckpointRow>, StoreError> {
        let mut reader = self.readers.acquire().await.doing("list checkpoints")?;
        checkpoints(&mut reader, job).await
    }

    /// Returns the newest checkpoint of a job.
    pub async fn checkpoint_latest(&self, job: JobId) -> Result<Option<CheckpointRow>, StoreError> {
        let mut reader = self.readers.acquire().await.doing("read the newest checkpoint")?;
        latest_checkpoint(&mut reader, job).await
    }

    /// Returns the best checkpoint by the plan's `metric_for_best`; the newest if none has a value.
    pub async fn checkpoint_best(&self, job: JobId) -> Result<Option<CheckpointRow>, StoreError> {
        sqlx::query("SELECT * FROM checkpoints WHERE job_id = ? ORDER BY best DESC, step DESC LIMIT 1")
            .bind(job.to_string())
            .fetch_optional(&self.readers)
            .await
            .doing("read the best checkpoint")?
            .as_ref()
            .map(CheckpointRow::read)
            .transpose()
    }

    /// Pins a checkpoint so that rotation keeps it, or unpins it (which takes effect at the next publication). Repeating
    /// the call has no effect.
    pub fn checkpoint_pin(
        &self,
        id: CheckpointId,
        pinned: bool,
        now: i64,
    ) -> BoxFuture<'_, Result<CheckpointRow, StoreError>> {
        Box::pin(async move {
            let doing = "pin a checkpoint";
            let mut tx = self.begin(doing).await?;
            let changed = sqlx::query("UPDATE checkpoints SET pinned = ?1 WHERE id = ?2 AND pinned <> ?1")
                .bind(pinned)
                .bind(id.to_string())
                .execute(&mut *tx)
                .await
                .doing(doing)?;
            let row = sqlx::query("SELECT * FROM checkpoints WHERE id = ?")
                .bind(id.to_string())
                .fetch_optional(&mut *tx)
                .await
                .doing(doing)?
                .ok_or_else(|| StoreError::NotFound { kind: "checkpoint", id: id.to_string() })?;
            let row = CheckpointRow::read(&row)?;
            if changed.rows_affected() > 0 {
                let kind = if pinned { "checkpoint.pinned" } else { "checkpoint.unpinned" };
                event_insert(&mut tx, row.job, kind, now, json!({ "checkpoint": id, "step": row.step })).await?;
            }
            self.commit(tx, doing).await?;
            self.wake_job(row.job);
            Ok(row)
        })
    }

    /// Returns `(job, step, attempt)` of every published checkpoint, whose files the cleanup at server start must keep.
    pub async fn checkpoint_keys(&self) -> Result<Vec<(JobId, u64, u64)>, StoreError> {
        sqlx::query("SELECT job_id, step, attempt FROM checkpoints")
            .fetch_all(&self.readers)
            .await
            .doing("list all checkpoints")?
            .iter()
            .map(|row| Ok((id_column(row, "job_id")?, count_column(row, "step")?, count_column(row, "attempt")?)))
            .collect()
    }
}

/// Returns a job's checkpoints, newest first.
async fn checkpoints(connection: &mut SqliteConnection, job: JobId) -> Result<Vec<CheckpointRow>, StoreError> {
    sqlx::query("SELECT * FROM checkpoints WHERE job_id = ? ORDER BY step DESC")
        .bind(job.to_string())
        .fetch_all(connection)
        .await
        .doing("list checkpoints")?
        .iter()
        .map(CheckpointRow::read)
        .collect()
}

/// Returns the id and step of the checkpoint that the verdict of a job compares with the base model: the job's result if it ended
/// early, otherwise the best checkpoint, otherwise the newest.
pub(super) async fn judged_checkpoint(
    connection: &mut SqliteConnection,
    row: &JobRow,
) -> Result<Option<(CheckpointId, u64)>, StoreError> {
    let known = checkpoints(connection, row.id).await?;
    let steps: Vec<(u64, bool)> = known.iter().map(|checkpoint| (checkpoint.step, checkpoint.best)).collect();
    let place = match &row.ending {
        Some(ending) => result_of(ending, &steps),
        None => Some(steps.iter().position(|(_, best)| *best).unwrap_or(0)),
    };
    Ok(place.and_then(|place| known.get(place)).map(|checkpoint| (checkpoint.id, checkpoint.step)))
}

pub(super) async fn latest_checkpoint(
    connection: &mut SqliteConnection,
    job: JobId,
) -> Result<Option<CheckpointRow>, StoreError> {
    sqlx::query("SELECT * FROM checkpoints WHERE job_id = ? ORDER BY step DESC LIMIT 1")
        .bind(job.to_string())
        .fetch_optional(connection)
        .await
        .doing("read the newest checkpoint")?
        .as_ref()
        .map(CheckpointRow::read)
        .transpose()
}

async fn delete_rows(tx: &mut SqliteConnection, rows: &[CheckpointRow]) -> Result<(), StoreError> {
    for row in rows {
        sqlx::query("DELETE FROM checkpoints WHERE id = ?")
            .bind(row.id.to_string())
            .execute(&mut *tx)
            .await
            .doing("rotate checkpoints")?;
    }
    Ok(())
}

/// Ranks checkpoints by the plan's metric, best first. Of equal ones the earlier is first; those without a value are left out. A
/// plan without `metric_for_best`, from an older rlood, uses `eval_reward` as soon as a checkpoint has it, otherwise `reward`.
fn ranked<'r>(rows: &'r [CheckpointRow], plan: &CheckpointPlan) -> Vec<&'r CheckpointRow> {
    let score =
        |row: &CheckpointRow, key: &str| row.metrics.get(key).copied().flatten().filter(|score| !score.is_nan());
    let evaluated = rows.iter().any(|row| score(row, "eval_reward").is_some());
    let key = plan.metric_for_best.as_deref().unwrap_or(if evaluated { "eval_reward" } else { "reward" });
    let sign = if plan.greater_is_better.unwrap_or(true) { 1.0 } else { -1.0 };
    let mut scored: Vec<(f64, &CheckpointRow)> = rows
        .iter()
        .filter(|row| !row.temporary)
        .filter_map(|row| score(row, key).map(|score| (sign * score, row)))
        .collect();
    scored.sort_by(|(a, row_a), (b, row_b)| b.total_cmp(a).then(row_a.step.cmp(&row_b.step)));
    scored.into_iter().map(|(_, row)| row).collect()
}

impl CheckpointRow {
    pub(super) fn read(row: &SqliteRow) -> Result<CheckpointRow, StoreError> {
        Ok(CheckpointRow {
            id: id_column(row, "id")?,
            job: id_column(row, "job_id")?,
            step: count_column(row, "step")?,
            attempt: count_column(row, "attempt")?,
            files: json_column(row, "files")?,
            metrics: json_column(row, "metrics")?,
            best: column(row, "best")?,
            pinned: column(row, "pinned")?,
            temporary: column(row, "temporary")?,
            created_at: column(row, "created_at")?,
        })
    }
}
