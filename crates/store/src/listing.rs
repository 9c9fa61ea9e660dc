//! Pages of jobs, and the data shown with each. A page takes a fixed number of statements, whatever its length, the number
//! of jobs and the filter.

use std::collections::HashMap;

use futures::future::BoxFuture;
use serde::de::DeserializeOwned;
use serde_json::json;
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{QueryBuilder, Sqlite};

use super::doctor::result_of;
use super::{
    AlertRow, Doing, JobFilter, JobRow, Page, Store, StoreError, column, corrupt, cursor, cursor_key, id_column, page,
    parse_cursor, to_json,
};
use crate::id::{CheckpointId, JobId};
use crate::job::Ending;
use rlood_types::doctor::{Alert, PhaseChange};

/// Data about a job that is not in its row.
#[derive(Debug, Clone, Default)]
pub struct JobBeside {
    /// Position in the queue, 1 = next; `None` = not queued.
    pub queue_position: Option<u64>,
    /// Active alerts, latest first.
    pub alerts: Vec<AlertRow>,
    /// The current training phase.
    pub training_phase: Option<PhaseChange>,
    /// Device that runs the job.
    pub device: Option<String>,
    /// Checkpoint that is the job's result, and its step, if the job ended before its last step.
    pub result: Option<(CheckpointId, u64)>,
}

/// Selects additional data of some jobs. Each subquery is an index lookup.
pub const BESIDE_JOBS: &str = "SELECT jobs.id, state = 'queued' AS queued, priority, queue_order, ending, \
     (SELECT json_group_array(json_array(time, json(alert))) FROM \
       (SELECT time, alert FROM alerts WHERE job_id = jobs.id AND cleared_step IS NULL ORDER BY step DESC, rule)) AS alerts, \
     (SELECT change FROM training_phases WHERE job_id = jobs.id ORDER BY step DESC LIMIT 1) AS training_phase, \
     (SELECT device FROM workers WHERE workers.id = jobs.worker) AS device, \
     CASE WHEN ending IS NOT NULL THEN (SELECT json_group_array(json_array(id, step, best)) FROM \
       (SELECT id, step, best FROM checkpoints WHERE job_id = jobs.id ORDER BY step DESC)) END AS checkpoints \
     FROM json_each(?) AS wanted CROSS JOIN jobs ON jobs.id = wanted.value";
/// Counts the queued jobs between two positions of the queue, whose bounds `stretch` computes. One index covers the query; it is
/// named so that the planner does not read rows.
pub const BETWEEN_IN_QUEUE: &str = "SELECT \
     (SELECT COUNT(*) FROM jobs INDEXED BY jobs_queue WHERE state = 'queued' \
       AND priority = stretch.value ->> 0 AND queue_order > stretch.value ->> 1) + \
     (SELECT COUNT(*) FROM jobs INDEXED BY jobs_queue WHERE state = 'queued' \
       AND priority >= stretch.value ->> 2 AND priority <= stretch.value ->> 3) + \
     (SELECT COUNT(*) FROM jobs INDEXED BY jobs_queue WHERE state = 'queued' \
       AND priority = stretch.value ->> 4 AND queue_order > stretch.value ->> 5 AND queue_order <= stretch.value ->> 6) \
     FROM json_each(?) AS stretch ORDER BY stretch.key";

/// Returns the SQL statement for one page of jobs. One condition is evaluated by its own index. Several conditions, a part of
/// the name and the beginning of the id are evaluated by an index that covers all their columns.
pub fn list_query(filter: &JobFilter, after: Option<&(i64, String)>, limit: u32) -> QueryBuilder<Sqlite> {
    let JobFilter { states, model, metadata, owner, name, name_contains, id_prefix } = filter;
    let only_state = match states.as_slice() {
        [state] => Some(("state", state.as_str())),
        _ => None,
    };
    let conditions = [only_state, pair("model", model), pair("owner", owner), pair("name", name)];
    let conditions: Vec<(&str, &str)> = conditions.into_iter().flatten().collect();
    let is_by_index = metadata.is_empty()
        && conditions.len() < 2
        && states.len() < 2
        && name_contains.is_none()
        && id_prefix.is_none();
    let mut labels = metadata.iter();
    // The jobs of a name are few, so the other conditions are evaluated on them, labels included.
    let first_label = if name.is_none() { labels.next() } else { None };
    let mut query = QueryBuilder::<Sqlite>::new("SELECT jobs.* FROM ");
    let (time, id) = match first_label {
        None if is_by_index => {
            query.push("jobs WHERE 1");
            ("jobs.created_at", "jobs.id")
        }
        None => {
            let index = if name.is_some() { "jobs_name" } else { "jobs_list" };
            query.push(format_args!("(SELECT jobs.rowid AS place FROM jobs INDEXED BY {index} WHERE 1"));
            ("jobs.created_at", "jobs.id")
        }
        Some((key, value)) => {
            query.push(
                "(SELECT jobs.rowid AS place FROM job_labels AS label CROSS JOIN jobs INDEXED BY jobs_list \
                 ON jobs.created_at = label.created_at AND jobs.id = label.job_id WHERE label.key = ",
            );
            query.push_bind(key.as_str()).push(" AND label.value = ").push_bind(value.as_str());
            ("label.created_at", "label.job_id")
        }
    };
    for (key, value) in labels {
        query.push(" AND EXISTS (SELECT 1 FROM job_labels AS other WHERE other.key = ").push_bind(key.as_str());
        query.push(" AND other.value = ").push_bind(value.as_str());
        query.push(format_args!(" AND other.created_at = {time} AND other.job_id = {id})"));
    }
    for (name, value) in &conditions {
        query.push(format_args!(" AND jobs.{name} = ")).push_bind((*value).to_owned());
    }
    push_wide_conditions(&mut query, filter);
    if let Some((created_at, after)) = after {
        query.push(format_args!(" AND ({time}, {id}) < (")).push_bind(*created_at);
        query.push(", ").push_bind(after.clone()).push(")");
    }
    query.push(format_args!(" ORDER BY {time} DESC, {id} DESC LIMIT ")).push_bind(i64::from(limit) + 1);
    if !is_by_index {
        query.push(") AS page CROSS JOIN jobs ON jobs.rowid = page.place ORDER BY jobs.created_at DESC, jobs.id DESC");
    }
    query
}

/// Adds the conditions that more than one value of a column fulfills.
fn push_wide_conditions(query: &mut QueryBuilder<Sqlite>, filter: &JobFilter) {
    if let [first, others @ ..] = filter.states.as_slice()
        && !others.is_empty()
    {
        query.push(" AND jobs.state IN (").push_bind(first.as_str());
        for state in others {
            query.push(", ").push_bind(state.as_str());
        }
        query.push(")");
    }
    if let Some(part) = &filter.name_contains {
        query.push(" AND instr(jobs.name, ").push_bind(part.clone()).push(") > 0");
    }
    if let Some(prefix) = &filter.id_prefix {
        query.push(" AND jobs.id >= ").push_bind(prefix.clone());
        // Ids are ASCII, so this text sorts after every id with the prefix and before all later ones.
        query.push(" AND jobs.id < ").push_bind(format!("{prefix}\u{10ffff}"));
    }
}

fn pair<'a>(name: &'static str, value: &'a Option<String>) -> Option<(&'static str, &'a str)> {
    value.as_deref().map(|value| (name, value))
}

impl Store {
    /// Lists jobs, newest first.
    pub async fn job_list(
        &self,
        filter: &JobFilter,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Page<JobRow>, StoreError> {
        let after = match after {
            None => None,
            Some(after) => {
                let [created_at, id] = parse_cursor("jobs", after)?;
                Some((cursor_key::<i64>(&created_at)?, id))
            }
        };
        let limit = limit.clamp(1, 1000);
        let mut query = list_query(filter, after.as_ref(), limit);
        let rows = query.build().fetch_all(&self.readers).await.doing("list jobs")?;
        let data = rows.iter().map(JobRow::read).collect::<Result<Vec<_>, _>>()?;
        Ok(page(data, limit, |job| cursor("jobs", [&job.created_at.to_string(), &job.id.to_string()])))
    }

    /// Returns the additional data of these jobs, which is not in their rows; deleted jobs are left out.
    pub fn jobs_beside<'a>(&'a self, ids: &'a [JobId]) -> BoxFuture<'a, Result<HashMap<JobId, JobBeside>, StoreError>> {
        Box::pin(async move {
            let doing = "read the additional data of jobs";
            let mut reader = self.readers.begin().await.doing(doing)?;
            let rows =
                sqlx::query(BESIDE_JOBS).bind(to_json("ids", &ids)?).fetch_all(&mut *reader).await.doing(doing)?;
            let mut places = Vec::new();
            let mut beside = HashMap::with_capacity(rows.len());
            for row in &rows {
                let id: JobId = id_column(row, "id")?;
                beside.insert(id, JobBeside::read(row)?);
                if column(row, "queued")? {
                    places.push((column(row, "priority")?, column(row, "queue_order")?, id));
                }
            }
            for (id, position) in positions(&mut reader, places).await? {
                beside.entry(id).or_default().queue_position = Some(position);
            }
            Ok(beside)
        })
    }

    /// Returns the job's position in the queue, 1 = next; `None` = not queued.
    pub async fn job_queue_position(&self, id: JobId) -> Result<Option<u64>, StoreError> {
        Ok(self.jobs_beside(&[id]).await?.remove(&id).and_then(|beside| beside.queue_position))
    }
}

impl JobBeside {
    fn read(row: &SqliteRow) -> Result<JobBeside, StoreError> {
        let alerts: Vec<(i64, Alert)> = json(row, "alerts")?.unwrap_or_default();
        let ending: Option<Ending> = json(row, "ending")?;
        let checkpoints: Vec<(CheckpointId, u64, u8)> = json(row, "checkpoints")?.unwrap_or_default();
        let result = ending.and_then(|ending| {
            let known: Vec<(u64, bool)> = checkpoints.iter().map(|(_, step, best)| (*step, *best == 1)).collect();
            let (id, step, _) = checkpoints.get(result_of(&ending, &known)?)?;
            Some((*id, *step))
        });
        Ok(JobBeside {
            queue_position: None,
            alerts: alerts.into_iter().map(|(time, alert)| AlertRow { alert, time, cleared_step: None }).collect(),
            training_phase: json(row, "training_phase")?,
            device: column(row, "device")?,
            result,
        })
    }
}

fn json<T: DeserializeOwned>(row: &SqliteRow, name: &'static str) -> Result<Option<T>, StoreError> {
    column::<Option<&str>>(row, name)?.map(serde_json::from_str).transpose().map_err(corrupt(name))
}

/// Returns the positions in the queue (1 = next) of queued jobs given by priority and order. The queue is counted once, from each
/// job to the next.
async fn positions(
    reader: &mut SqliteConnection,
    mut places: Vec<(i64, i64, JobId)>,
) -> Result<Vec<(JobId, u64)>, StoreError> {
    if places.is_empty() {
        return Ok(Vec::new());
    }
    places.sort_by_key(|(priority, order, _)| (std::cmp::Reverse(*priority), *order));
    let mut before = None;
    let stretches: Vec<[i64; 7]> = places
        .iter()
        .map(|(priority, order, _)| stretch(before.replace((*priority, *order)), (*priority, *order)))
        .collect();
    let counts: Vec<i64> = sqlx::query_scalar(BETWEEN_IN_QUEUE)
        .bind(json!(stretches).to_string())
        .fetch_all(reader)
        .await
        .doing("find jobs' places in the queue")?;
    let mut position = 0;
    let counted = places.iter().zip(counts).map(|((_, _, id), count)| {
        position += count.unsigned_abs();
        (*id, position)
    });
    Ok(counted.collect())
}

/// Returns the three ranges of the queue between one position (exclusive; `None` = the front) and a later one (inclusive): the rest
/// of the first position's priority `[priority, after order]`, all priorities between `[lowest, highest]`, and the beginning of the
/// later position's priority `[priority, after order, up to order]`.
fn stretch(from: Option<(i64, i64)>, (priority, order): (i64, i64)) -> [i64; 7] {
    match from {
        Some((same, after)) if same == priority => [priority, i64::MAX, 1, 0, priority, after, order],
        Some((higher, after)) => [higher, after, priority.saturating_add(1), higher - 1, priority, i64::MIN, order],
        None if priority == i64::MAX => [priority, i64::MAX, 1, 0, priority, i64::MIN, order],
        None => [priority, i64::MAX, priority + 1, i64::MAX, priority, i64::MIN, order],
    }
}
