//! How the reward of a job went, in few points: for lists of many jobs.

use sqlx::Row;

use super::{Doing, Store, StoreError, corrupt};
use crate::id::JobId;

/// The mean reward of a job's training steps, thinned out.
#[derive(Debug, Clone, PartialEq)]
pub struct Course {
    /// Whose.
    pub job: JobId,
    /// Step and value, by step: the first, the last, and of every stretch the lowest and the highest.
    pub points: Vec<(u64, f64)>,
}

impl Store {
    /// The course of a job's reward over about `stretches` equal stretches of its steps; at most 2 · `stretches` + 2 points,
    /// none before the first step. Reads an index alone.
    pub async fn reward_course(&self, job: JobId, stretches: u32) -> Result<Course, StoreError> {
        let doing = "read the course of a reward";
        let rows = sqlx::query(
            "WITH ends AS MATERIALIZED (SELECT \
               (SELECT MIN(step) FROM steps WHERE job_id = ?1 AND kind = 'train') AS first, \
               (SELECT MAX(step) FROM steps WHERE job_id = ?1 AND kind = 'train') AS last) \
             SELECT step, MIN(reward) AS reward FROM steps INDEXED BY steps_reward, ends WHERE job_id = ?1 AND kind = 'train' AND reward IS NOT NULL \
               GROUP BY (step - first) * ?2 / (last - first + 1) \
             UNION SELECT step, MAX(reward) FROM steps INDEXED BY steps_reward, ends WHERE job_id = ?1 AND kind = 'train' AND reward IS NOT NULL \
               GROUP BY (step - first) * ?2 / (last - first + 1) \
             UNION SELECT step, reward FROM steps INDEXED BY steps_reward, ends WHERE job_id = ?1 AND kind = 'train' AND step IN (first, last) \
               AND reward IS NOT NULL \
             ORDER BY step",
        )
        .bind(job.to_string())
        .bind(stretches.max(1))
        .fetch_all(&self.readers)
        .await
        .doing(doing)?;
        let point = |row: &sqlx::sqlite::SqliteRow| -> Result<(u64, f64), sqlx::Error> {
            Ok((row.try_get::<i64, _>("step")?.unsigned_abs(), row.try_get("reward")?))
        };
        let points = rows.iter().map(point).collect::<Result<_, _>>().map_err(corrupt("reward"))?;
        Ok(Course { job, points })
    }
}
