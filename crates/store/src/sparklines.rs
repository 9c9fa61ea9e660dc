//! Sparklines: the rewards of jobs over time, thinned out to a few points for lists of many jobs.

use serde_json::json;

use super::{Doing, Store, StoreError, column, corrupt, id_column};
use crate::id::JobId;

/// The mean reward of a job's training steps, thinned out.
#[derive(Debug, Clone, PartialEq)]
pub struct Sparkline {
    /// Id of the job.
    pub job: JobId,
    /// Points as (step, reward), in the order of the steps: the first, the last, and the lowest and the highest of every section.
    pub points: Vec<(u64, f64)>,
}

/// Selects the sparklines of the jobs ?1 (of the owner ?3), in the given order, over the ?2 sections numbered in ?4. Reads only an
/// index; all points of a short run are returned. A section is a range of the index, so that nothing is sorted or grouped.
pub const REWARD_SPARKLINES: &str = "WITH wanted AS MATERIALIZED (\
       SELECT wanted.key AS place, jobs.id, \
         (SELECT MIN(step) FROM steps INDEXED BY steps_reward WHERE job_id = jobs.id AND kind = 'train') AS first, \
         (SELECT MAX(step) FROM steps INDEXED BY steps_reward WHERE job_id = jobs.id AND kind = 'train') AS last \
       FROM json_each(?1) AS wanted CROSS JOIN jobs ON jobs.id = wanted.value WHERE ?3 IS NULL OR jobs.owner = ?3) \
     SELECT id, CASE \
       WHEN first IS NULL THEN '[]' \
       WHEN last - first < 2 * ?2 THEN (SELECT json_group_array(json_array(step, reward)) FROM steps INDEXED BY steps_reward \
         WHERE job_id = wanted.id AND kind = 'train' AND reward IS NOT NULL) \
       ELSE (SELECT json_group_array(json(point)) FROM (\
         SELECT (SELECT json_array(step, MIN(reward)) FROM steps INDEXED BY steps_reward WHERE job_id = wanted.id \
           AND kind = 'train' AND step >= first + ((last - first + 1) * section.value + ?2 - 1) / ?2 \
           AND step < first + ((last - first + 1) * (section.value + 1) + ?2 - 1) / ?2) AS point FROM json_each(?4) AS section \
         UNION ALL \
         SELECT (SELECT json_array(step, MAX(reward)) FROM steps INDEXED BY steps_reward WHERE job_id = wanted.id \
           AND kind = 'train' AND step >= first + ((last - first + 1) * section.value + ?2 - 1) / ?2 \
           AND step < first + ((last - first + 1) * (section.value + 1) + ?2 - 1) / ?2) FROM json_each(?4) AS section \
         UNION ALL \
         SELECT json_array(step, reward) FROM steps INDEXED BY steps_reward WHERE job_id = wanted.id AND kind = 'train' \
           AND step = first \
         UNION ALL \
         SELECT json_array(step, reward) FROM steps INDEXED BY steps_reward WHERE job_id = wanted.id AND kind = 'train' \
           AND step = last)) \
       END AS points FROM wanted ORDER BY place";

impl Store {
    /// Returns the sparklines of these jobs over about `sections` equal sections of their steps: at most 2 · `sections` + 2 points
    /// each, none before the first step. Jobs that do not exist or that belong to another owner (`None` = any owner) are left out.
    pub async fn reward_sparklines(
        &self,
        jobs: &[JobId],
        owner: Option<&str>,
        sections: u32,
    ) -> Result<Vec<Sparkline>, StoreError> {
        let sections = sections.max(1);
        sqlx::query(REWARD_SPARKLINES)
            .bind(json!(jobs).to_string())
            .bind(sections)
            .bind(owner)
            .bind(json!((0..sections).collect::<Vec<_>>()).to_string())
            .fetch_all(&self.readers)
            .await
            .doing("read rewards over time")?
            .iter()
            .map(|row| {
                // A section without a value has neither step nor value.
                let found: Vec<(Option<u64>, Option<f64>)> =
                    serde_json::from_str(column(row, "points")?).map_err(corrupt("reward"))?;
                let mut points: Vec<(u64, f64)> =
                    found.into_iter().filter_map(|(step, reward)| step.zip(reward)).collect();
                points.sort_unstable_by_key(|(step, _)| *step);
                points.dedup_by_key(|(step, _)| *step);
                Ok(Sparkline { job: id_column(row, "id")?, points })
            })
            .collect()
    }
}
