//! Stored alerts and training phases of a job, and the checkpoint that is its result.

use serde_json::{Value, json};
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::events::event_insert;
use super::{CheckpointRow, Doing, Store, StoreError, column, corrupt, int, json_column, to_json};
use crate::id::JobId;
use crate::job::{Ending, EndingCode};
use rlood_types::doctor::{Alert, OnAlert, PhaseChange, Rule};

/// One episode of an alert.
#[derive(Debug, Clone, PartialEq)]
pub struct AlertRow {
    /// The alert with its rule, evidence and fix.
    pub alert: Alert,
    /// Time at which the alert was raised, Unix time in milliseconds.
    pub time: i64,
    /// Step at which the alert ended; `None` = it is active.
    pub cleared_step: Option<u64>,
}

impl Store {
    /// Lists a job's alerts, latest first; with `only_active`, only active ones.
    pub async fn alert_list(&self, job: JobId, only_active: bool) -> Result<Vec<AlertRow>, StoreError> {
        sqlx::query(
            "SELECT time, alert, cleared_step FROM alerts WHERE job_id = ?1 AND (?2 = 0 OR cleared_step IS NULL) \
             ORDER BY step DESC, rule",
        )
        .bind(job.to_string())
        .bind(only_active)
        .fetch_all(&self.readers)
        .await
        .doing("list the alerts of a job")?
        .iter()
        .map(AlertRow::read)
        .collect()
    }

    /// Returns the current training phase of a job and its evidence; `None` before the first phase.
    pub async fn training_phase(&self, job: JobId) -> Result<Option<PhaseChange>, StoreError> {
        sqlx::query("SELECT change FROM training_phases WHERE job_id = ? ORDER BY step DESC LIMIT 1")
            .bind(job.to_string())
            .fetch_optional(&self.readers)
            .await
            .doing("read the training phase of a job")?
            .map(|row| json_column(&row, "change"))
            .transpose()
    }

    /// Returns the checkpoint that is the job's result: the newest; the best after early stopping; the newest from
    /// before the evidence after an alert that ended the job, or from before the weights that diverged. `None` if
    /// there is no such checkpoint (any more).
    pub async fn checkpoint_result(
        &self,
        job: JobId,
        ending: Option<&Ending>,
    ) -> Result<Option<CheckpointRow>, StoreError> {
        let Some(ending) = ending else { return self.checkpoint_latest(job).await };
        let mut rows = self.checkpoint_list(job).await?;
        let known: Vec<(u64, bool)> = rows.iter().map(|row| (row.step, row.best)).collect();
        Ok(result_of(ending, &known).map(|place| rows.swap_remove(place)))
    }
}

/// Returns the index of the checkpoint that is the job's result, given its checkpoints, newest first, as (step, is best).
pub(super) fn result_of(ending: &Ending, checkpoints: &[(u64, bool)]) -> Option<usize> {
    let place = |is: &dyn Fn(&(u64, bool)) -> bool| checkpoints.iter().position(is);
    match ending.code {
        EndingCode::EarlyStopping => place(&|(_, best)| *best).or_else(|| place(&|_| true)),
        EndingCode::Alert | EndingCode::Diverged => {
            let before = ending.good_before_step.unwrap_or(u64::MAX);
            // Weights that gave a non-finite loss may still be good, because a reward can be the cause.
            let perhaps = |step: &u64| ending.code == EndingCode::Diverged && *step == before;
            place(&|(step, _)| *step < before).or_else(|| place(&|(step, _)| perhaps(step)))
        }
    }
}

/// Stores a new alert. An alert that ends the job is also stored as the reason for the end.
pub(super) async fn alert_store(
    tx: &mut SqliteConnection,
    job: JobId,
    alert: &Alert,
    now: i64,
) -> Result<(), StoreError> {
    sqlx::query("INSERT OR REPLACE INTO alerts (job_id, step, rule, time, alert) VALUES (?, ?, ?, ?, ?)")
        .bind(job.to_string())
        .bind(int(alert.step))
        .bind(alert.rule.as_str())
        .bind(now)
        .bind(to_json("alert", alert)?)
        .execute(&mut *tx)
        .await
        .doing("store an alert of a job")?;
    if alert.on_alert == OnAlert::Stop {
        let ending = Ending {
            code: EndingCode::Alert,
            message: format!("the alert {} ended the job: {}", alert.rule.as_str(), alert.message),
            step: alert.step,
            rule: Some(alert.rule),
            metric: None,
            best: None,
            best_step: None,
            good_before_step: alert.rule.damages_weights().then_some(alert.since_step),
        };
        ending_store(tx, job, &ending).await?;
    }
    let data = serde_json::to_value(alert).unwrap_or_else(|_| json!({ "rule": alert.rule, "step": alert.step }));
    event_insert(tx, job, "alert", now, data).await.map(drop)
}

/// Stores that an alert ended.
pub(super) async fn alert_clear(
    tx: &mut SqliteConnection,
    job: JobId,
    rule: Rule,
    raised_step: u64,
    step: u64,
    now: i64,
) -> Result<(), StoreError> {
    sqlx::query("UPDATE alerts SET cleared_step = ? WHERE job_id = ? AND rule = ? AND step = ?")
        .bind(int(step))
        .bind(job.to_string())
        .bind(rule.as_str())
        .bind(int(raised_step))
        .execute(&mut *tx)
        .await
        .doing("clear an alert of a job")?;
    let data = json!({ "rule": rule, "raised_step": raised_step, "step": step });
    event_insert(tx, job, "alert_cleared", now, data).await.map(drop)
}

/// Stores that the run entered a training phase.
pub(super) async fn phase_store(
    tx: &mut SqliteConnection,
    job: JobId,
    change: &PhaseChange,
    now: i64,
) -> Result<(), StoreError> {
    sqlx::query("INSERT OR REPLACE INTO training_phases (job_id, step, time, change) VALUES (?, ?, ?, ?)")
        .bind(job.to_string())
        .bind(int(change.step))
        .bind(now)
        .bind(to_json("change", change)?)
        .execute(&mut *tx)
        .await
        .doing("store the training phase of a job")?;
    let data = serde_json::to_value(change).unwrap_or(Value::Null);
    event_insert(tx, job, "training_phase", now, data).await.map(drop)
}

/// Stores that the run diverged; `job_finish` follows. The weights before the first skipped update gave the first non-finite loss,
/// so the weights before them are the last good ones.
pub(super) async fn diverged_store(
    tx: &mut SqliteConnection,
    job: JobId,
    first_step: u64,
    step: u64,
    now: i64,
) -> Result<(), StoreError> {
    let message = format!(
        "the updates of steps {first_step} to {step} were skipped, because their loss or gradient was not finite"
    );
    let ending = Ending {
        code: EndingCode::Diverged,
        message: message.clone(),
        step,
        rule: None,
        metric: None,
        best: None,
        best_step: None,
        good_before_step: Some(first_step.saturating_sub(1)),
    };
    ending_store(tx, job, &ending).await?;
    let data = json!({ "first_step": first_step, "step": step, "message": message });
    event_insert(tx, job, "diverged", now, data).await.map(drop)
}

/// Stores why the run ends early; `job_finish` follows.
pub(super) async fn ending_store(tx: &mut SqliteConnection, job: JobId, ending: &Ending) -> Result<(), StoreError> {
    sqlx::query("UPDATE jobs SET ending = ? WHERE id = ?")
        .bind(to_json("ending", ending)?)
        .bind(job.to_string())
        .execute(&mut *tx)
        .await
        .doing("store why a job ends")?;
    Ok(())
}

/// Rewinds alerts and phases to a step. They will be reported again, except alerts that the server itself raised.
pub(super) async fn doctor_rewind(tx: &mut SqliteConnection, job: JobId, last_kept: i64) -> Result<(), StoreError> {
    for statement in [
        "DELETE FROM alerts WHERE job_id = ?1 AND step > ?2 AND rule <> 'many_restarts'",
        "UPDATE alerts SET cleared_step = NULL WHERE job_id = ?1 AND cleared_step > ?2",
        "DELETE FROM training_phases WHERE job_id = ?1 AND step > ?2",
        "UPDATE jobs SET ending = NULL WHERE id = ?1 AND ?2 IS NOT NULL",
    ] {
        sqlx::query(statement)
            .bind(job.to_string())
            .bind(last_kept)
            .execute(&mut *tx)
            .await
            .doing("rewind a job to its checkpoint")?;
    }
    Ok(())
}

impl AlertRow {
    fn read(row: &SqliteRow) -> Result<AlertRow, StoreError> {
        Ok(AlertRow {
            alert: json_column(row, "alert")?,
            time: column(row, "time")?,
            cleared_step: column::<Option<i64>>(row, "cleared_step")?
                .map(u64::try_from)
                .transpose()
                .map_err(corrupt("cleared_step"))?,
        })
    }
}
