//! Samples, the completions of a job: search, paging, and removal of the oldest ones when they take too much space.
//!
//! One sample is one row with its JSON. Ids and reasons are found in the text of that JSON, which is always in serde's compact
//! form. A search first narrows by a LIKE over the text (a superset: ASCII case, other letters as wildcards) and then compares
//! prompt and completion exactly. Every order walks an index, so the cost of a page is proportional to what it reads. A search also
//! reads rows that it does not return. It has separate connections, and may end early with its results so far and its position.

use std::time::Instant;

use futures::TryStreamExt;
use futures::future::BoxFuture;
use serde_json::json;
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Sqlite};

use super::events::event_insert;
use super::{
    Doing, Page, Store, StoreError, column, count_column, cursor, cursor_key, int, json_column, parse_cursor, to_json,
    variant_name,
};
use crate::event::{FinishReason, Sample, SamplePhase};
use crate::id::JobId;

/// A sample in the database.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRow {
    /// Number of the row, ascending in the order of arrival.
    pub id: i64,
    /// The sample as the worker reported it.
    pub sample: Sample,
}

/// The order of returned samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SampleSort {
    /// The latest samples come first.
    #[default]
    Recent,
    /// Highest reward first; unscorable samples last.
    Best,
    /// Lowest reward first; unscorable samples last.
    Worst,
}

/// Filter and order of samples; `None` = any.
#[derive(Debug, Clone, Default)]
pub struct SampleQuery {
    /// First step whose samples are returned.
    pub min_step: Option<u64>,
    /// Last step whose samples are returned.
    pub max_step: Option<u64>,
    /// Only samples of training, or only those of evaluations.
    pub phase: Option<SamplePhase>,
    /// Only samples of this dataset row: `row_N`.
    pub prompt_id: Option<String>,
    /// Only samples of this group.
    pub group_id: Option<String>,
    /// Only completions that ended for this reason.
    pub finish_reason: Option<FinishReason>,
    /// Minimum reward; unscorable samples are left out.
    pub min_reward: Option<f64>,
    /// Maximum reward; unscorable samples are left out.
    pub max_reward: Option<f64>,
    /// Order of the samples.
    pub sort: SampleSort,
    /// Only samples whose prompt or completion contains this text, ignoring case.
    pub contains: Option<String>,
    /// Cursor of the previous page.
    pub after: Option<String>,
    /// Number of rows per page.
    pub limit: u32,
    /// Time at which a search ends its page early.
    pub until: Option<Instant>,
}

impl SampleQuery {
    /// Whether samples are read that are not on the page.
    pub fn is_search(&self) -> bool {
        let SampleQuery {
            min_step,
            max_step,
            phase,
            prompt_id,
            group_id,
            finish_reason,
            min_reward,
            max_reward,
            sort,
            contains,
            after: _,
            limit: _,
            until: _,
        } = self;
        let by_text = prompt_id.is_some() || group_id.is_some() || finish_reason.is_some() || contains.is_some();
        let by_step = (min_step.or(*max_step).is_some() || phase.is_some()) && !self.has_few_steps();
        let by_reward = (min_reward.is_some() || max_reward.is_some()) && *sort == SampleSort::Recent;
        by_text || by_step || by_reward
    }

    fn steps(&self) -> (u64, u64) {
        (self.min_step.unwrap_or(0), self.max_step.unwrap_or(i64::MAX as u64))
    }

    fn has_few_steps(&self) -> bool {
        let (min, max) = self.steps();
        max.saturating_sub(min) < FEW_STEPS
    }
}

/// Samples that were removed to free space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplesRemoved {
    /// Number of removed samples.
    pub samples: u64,
    /// Former size of the removed samples, in bytes.
    pub size_bytes: u64,
    /// Last training step (inclusive) with removed samples.
    pub to_step: Option<u64>,
}

/// Maximum number of steps per removal, because a longer transaction would block other writers.
const MAX_REMOVED_STEPS: usize = 64;
/// Maximum number of steps of a range that is read by step and sorted; a longer range is filtered in the requested order.
const FEW_STEPS: u64 = 64;

/// Number of rows that a search reads before it yields its thread.
const ROWS_PER_TURN: u32 = 64;

/// The position at which a page continues: the last row's reward (by its bits) and id.
enum After {
    Start,
    Scored(f64, i64),
    Unscored(i64),
}

impl Store {
    /// Returns a page of samples. Ties of rewards are broken by age, so that no sample is missed or shown twice unless some are
    /// removed. A search that ends early has a `next`, possibly without samples.
    pub async fn sample_page(&self, job: JobId, query: &SampleQuery) -> Result<Page<SampleRow>, StoreError> {
        let list = format!("samples {:?}", query.sort);
        let after = match &query.after {
            None => After::Start,
            Some(after) => {
                let [reward, id] = parse_cursor(&list, after)?;
                let id = cursor_key(&id)?;
                match reward.as_str() {
                    "" => After::Unscored(id),
                    bits => After::Scored(f64::from_bits(cursor_key(bits)?), id),
                }
            }
        };
        let limit = query.limit.clamp(1, 1000) as usize;
        let mut found: Vec<(Option<f64>, SampleRow)> = Vec::new();
        // Scored samples first, then unscorable ones; the order by time makes no difference between them.
        let by_reward = query.sort != SampleSort::Recent;
        let bounded = query.min_reward.is_some() || query.max_reward.is_some();
        let mut stopped_at = None;
        if !matches!((by_reward, &after), (true, After::Unscored(_))) {
            stopped_at = self.sample_scan(job, query, by_reward.then_some(true), &after, limit + 1, &mut found).await?;
        }
        if by_reward && !bounded && found.len() <= limit && stopped_at.is_none() {
            let after = if matches!(after, After::Scored(..)) { After::Start } else { after };
            stopped_at = self.sample_scan(job, query, Some(false), &after, limit + 1, &mut found).await?;
        }
        let more = found.len() > limit;
        found.truncate(limit);
        let last = found.last().filter(|_| more).map(|(reward, row)| (*reward, row.id));
        let next = last.or(stopped_at).map(|(reward, id)| {
            let bits = reward.filter(|_| by_reward).map(|reward| reward.to_bits().to_string()).unwrap_or_default();
            cursor(&list, [&bits, &id.to_string()])
        });
        Ok(Page { data: found.into_iter().map(|(_, row)| row).collect(), next })
    }

    /// Appends matching samples in order until `found` has `enough` of them; `scored` selects samples with a reward, samples
    /// without one, or both. Returns the reward and the id of the row at which a search ended early.
    async fn sample_scan(
        &self,
        job: JobId,
        query: &SampleQuery,
        scored: Option<bool>,
        after: &After,
        enough: usize,
        found: &mut Vec<(Option<f64>, SampleRow)>,
    ) -> Result<Option<(Option<f64>, i64)>, StoreError> {
        let doing = "read samples";
        let mut sql = scan(job, query, scored, after)?;
        let wanted = query.contains.as_deref().map(str::to_lowercase);
        let readers = if query.is_search() {
            &self.searchers
        } else {
            sql.push(" LIMIT ").push_bind(int((enough - found.len()) as u64));
            &self.readers
        };
        let mut rows = sql.build().fetch(readers);
        for count in 1_u32.. {
            if found.len() >= enough {
                break;
            }
            let Some(row) = rows.try_next().await.doing(doing)? else { break };
            if count % ROWS_PER_TURN == 0 {
                tokio::task::yield_now().await;
            }
            let (reward, id) = (column(&row, "reward")?, column(&row, "id")?);
            let is_late = || query.until.is_some_and(|until| Instant::now() >= until);
            if column::<Option<&str>>(&row, "sample")?.is_none() {
                if is_late() {
                    return Ok(Some((reward, id)));
                }
                continue;
            }
            let sample: Sample = json_column(&row, "sample")?;
            let holds = |wanted: &String| {
                sample.completion.to_lowercase().contains(wanted) || sample.prompt.to_lowercase().contains(wanted)
            };
            if wanted.as_ref().is_none_or(holds) {
                found.push((reward, SampleRow { id, sample }));
            }
            if query.is_search() && found.len() < enough && is_late() {
                return Ok(Some((reward, id)));
            }
        }
        Ok(None)
    }

    /// Returns how many of a job's samples were removed to stay within the limit; `None` = none.
    pub async fn samples_removed(&self, job: JobId) -> Result<Option<SamplesRemoved>, StoreError> {
        sqlx::query(
            "SELECT removed_samples, removed_bytes, removed_to_step FROM sample_usage WHERE job_id = ? AND removed_samples > 0",
        )
        .bind(job.to_string())
        .fetch_optional(&self.readers)
        .await
        .doing("read the number of removed samples of a job")?
        .as_ref()
        .map(SamplesRemoved::read)
        .transpose()
    }

    /// Removes the oldest samples, whole steps at a time, until they take at most `max_bytes` minus 1/64: samples of training
    /// first, then of evaluations. The newest step of either is never removed. The event `samples.removed` reports the removal.
    /// `None` if nothing was removed. 0 = no limit.
    pub fn samples_retain(
        &self,
        job: JobId,
        max_bytes: u64,
        now: i64,
    ) -> BoxFuture<'_, Result<Option<SamplesRemoved>, StoreError>> {
        Box::pin(async move {
            let doing = "remove old samples of a job";
            let size = "SELECT COALESCE(MAX(size_bytes), 0) FROM sample_usage WHERE job_id = ?";
            let used: i64 =
                sqlx::query_scalar(size).bind(job.to_string()).fetch_one(&self.readers).await.doing(doing)?;
            if max_bytes == 0 || used <= int(max_bytes) {
                return Ok(None);
            }
            let goal = int(max_bytes - max_bytes / 64);
            let mut tx = self.begin(doing).await?;
            let (mut samples, mut to_step, mut left) = (0, None, MAX_REMOVED_STEPS);
            let before: i64 = sqlx::query_scalar(size).bind(job.to_string()).fetch_one(&mut *tx).await.doing(doing)?;
            let mut used = before;
            for phase in [SamplePhase::Train, SamplePhase::Eval] {
                while used > goal && left > 0 {
                    let oldest: Option<i64> = sqlx::query_scalar(
                        "SELECT MIN(step) FROM samples WHERE job_id = ?1 AND phase = ?2 \
                     AND step < (SELECT MAX(step) FROM samples WHERE job_id = ?1 AND phase = ?2)",
                    )
                    .bind(job.to_string())
                    .bind(variant_name(&phase)?)
                    .fetch_one(&mut *tx)
                    .await
                    .doing(doing)?;
                    let Some(oldest) = oldest else { break };
                    let done = sqlx::query("DELETE FROM samples WHERE job_id = ? AND phase = ? AND step = ?")
                        .bind(job.to_string())
                        .bind(variant_name(&phase)?)
                        .bind(oldest)
                        .execute(&mut *tx)
                        .await
                        .doing(doing)?;
                    samples += done.rows_affected();
                    left -= 1;
                    if phase == SamplePhase::Train {
                        to_step = Some(oldest);
                    }
                    used = sqlx::query_scalar(size).bind(job.to_string()).fetch_one(&mut *tx).await.doing(doing)?;
                }
            }
            if samples == 0 {
                return Ok(None);
            }
            let size_bytes = before - used;
            sqlx::query(
                "UPDATE sample_usage SET removed_samples = removed_samples + ?, removed_bytes = removed_bytes + ?, \
             removed_to_step = COALESCE(?, removed_to_step) WHERE job_id = ?",
            )
            .bind(int(samples))
            .bind(size_bytes)
            .bind(to_step)
            .bind(job.to_string())
            .execute(&mut *tx)
            .await
            .doing(doing)?;
            let data =
                json!({ "samples": samples, "size_bytes": size_bytes, "to_step": to_step, "limit_bytes": max_bytes });
            event_insert(&mut tx, job, "samples.removed", now, data).await?;
            self.commit(tx, doing).await?;
            self.wake_job(job);
            let to_step = to_step.map(i64::unsigned_abs);
            Ok(Some(SamplesRemoved { samples, size_bytes: size_bytes.unsigned_abs(), to_step }))
        })
    }
}

/// Iterates over the rows of samples in the order of an index. A search also reads the rows that do not match, without their
/// samples, so that it knows its position. The query on its connection ends when the caller stops reading rows.
fn scan(
    job: JobId,
    query: &SampleQuery,
    scored: Option<bool>,
    after: &After,
) -> Result<QueryBuilder<Sqlite>, StoreError> {
    let index = match (query.has_few_steps(), query.sort) {
        (true, _) => "samples_step",
        (false, SampleSort::Recent) => "samples_job",
        (false, SampleSort::Best | SampleSort::Worst) => "samples_reward",
    };
    let mut sql = QueryBuilder::<Sqlite>::new("SELECT id, reward, CASE WHEN ");
    push_conditions(&mut sql, query)?;
    sql.push(" THEN sample END AS sample FROM samples INDEXED BY ")
        .push(index)
        .push(" WHERE job_id = ")
        .push_bind(job.to_string());
    match query.phase.filter(|_| query.has_few_steps()) {
        Some(phase) => sql.push(" AND phase = ").push_bind(variant_name(&phase)?),
        None => sql.push(" AND phase IN ('train', 'eval')"),
    };
    if query.has_few_steps() {
        let (min, max) = query.steps();
        sql.push(" AND step BETWEEN ").push_bind(int(min)).push(" AND ").push_bind(int(max));
    }
    match scored {
        Some(true) => sql.push(" AND reward IS NOT NULL"),
        Some(false) => sql.push(" AND reward IS NULL"),
        None => &mut sql,
    };
    if query.sort != SampleSort::Recent {
        push_rewards(&mut sql, query);
    }
    let newest_first = " ORDER BY id DESC";
    let oldest_first = " ORDER BY id";
    match (query.sort, scored) {
        (SampleSort::Best, Some(true)) => {
            if let After::Scored(reward, id) = *after {
                sql.push(" AND reward <= ").push_bind(reward).push(" AND (reward < ").push_bind(reward);
                sql.push(" OR id > ").push_bind(id).push(")");
            }
            sql.push(" ORDER BY reward DESC, id");
        }
        (SampleSort::Worst, Some(true)) => {
            if let After::Scored(reward, id) = *after {
                sql.push(" AND reward >= ").push_bind(reward).push(" AND (reward > ").push_bind(reward);
                sql.push(" OR id < ").push_bind(id).push(")");
            }
            sql.push(" ORDER BY reward, id DESC");
        }
        (SampleSort::Best, _) => {
            if let After::Unscored(id) = *after {
                sql.push(" AND id > ").push_bind(id);
            }
            sql.push(oldest_first);
        }
        (SampleSort::Worst | SampleSort::Recent, _) => {
            if let After::Unscored(id) = *after {
                sql.push(" AND id < ").push_bind(id);
            }
            sql.push(newest_first);
        }
    }
    Ok(sql)
}

/// Adds the conditions on a row that no index covers.
fn push_conditions(sql: &mut QueryBuilder<Sqlite>, query: &SampleQuery) -> Result<(), StoreError> {
    sql.push("TRUE");
    if let Some(phase) = query.phase.filter(|_| !query.has_few_steps()) {
        sql.push(" AND phase = ").push_bind(variant_name(&phase)?);
    }
    if (query.min_step.is_some() || query.max_step.is_some()) && !query.has_few_steps() {
        let (min, max) = query.steps();
        sql.push(" AND step BETWEEN ").push_bind(int(min)).push(" AND ").push_bind(int(max));
    }
    if query.sort == SampleSort::Recent {
        push_rewards(sql, query);
    }
    for (name, value) in [("prompt_id", &query.prompt_id), ("group_id", &query.group_id)] {
        if let Some(value) = value {
            sql.push(" AND instr(sample, ").push_bind(format!("\"{name}\":{}", to_json(name, value)?)).push(") > 0");
        }
    }
    if let Some(reason) = query.finish_reason {
        sql.push(" AND instr(sample, ")
            .push_bind(format!("\"finish_reason\":\"{}\"", variant_name(&reason)?))
            .push(") > 0");
    }
    if let Some(text) = &query.contains {
        sql.push(" AND sample LIKE ").push_bind(superset(text)?).push(" ESCAPE '~'");
    }
    Ok(())
}

fn push_rewards(sql: &mut QueryBuilder<Sqlite>, query: &SampleQuery) {
    if let Some(least) = query.min_reward {
        sql.push(" AND reward >= ").push_bind(least);
    }
    if let Some(most) = query.max_reward {
        sql.push(" AND reward <= ").push_bind(most);
    }
}

/// Returns a LIKE pattern that matches every sample with this text in its JSON form, with wildcards for non-ASCII letters (SQLite
/// knows only ASCII case, and a letter in another case may even have another length).
fn superset(text: &str) -> Result<String, StoreError> {
    let quoted = to_json("search", &text)?;
    let mut pattern = "%".to_owned();
    for character in quoted[1..quoted.len() - 1].chars() {
        match character {
            '%' | '_' | '~' => pattern.extend(['~', character]),
            ascii if ascii.is_ascii() => pattern.push(ascii),
            _ => pattern.push('%'),
        }
    }
    pattern.push('%');
    Ok(pattern)
}

impl SamplesRemoved {
    fn read(row: &SqliteRow) -> Result<Self, StoreError> {
        Ok(Self {
            samples: count_column(row, "removed_samples")?,
            size_bytes: count_column(row, "removed_bytes")?,
            to_step: column::<Option<i64>>(row, "removed_to_step")?.map(i64::unsigned_abs),
        })
    }
}
