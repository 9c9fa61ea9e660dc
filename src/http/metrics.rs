//! A job's metrics by step, as JSON, CSV or NDJSON, downsampled so that no peak is lost.

mod table;
mod thin;

use std::collections::{BTreeMap, BTreeSet};

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::error::{Problem, ProblemBody, shortened};
use super::extract::{Path, Query, count};
use super::jobs::bad_query;
use crate::event::Metrics;
use crate::id::JobId;
use crate::store::StepLines;
use crate::store::background::spawn_blocking;
use table::{Broken, Columns, Rows, entries, from_json, in_json};

pub(super) use thin::kept_rows;

/// Maximum number of rows in one response.
const MAX_ROWS: usize = 10_000;
/// Number of stored metric lines read from the database at a time: slightly more than a page.
const LINES: u32 = MAX_ROWS as u32 + 2;
/// Maximum number of metric rows whose text is kept while downsampling. For longer runs the selected rows are read again.
const MAX_KEPT: usize = 2 * MAX_ROWS;
/// Metrics whose peaks are kept first when the limit is too low for all metrics and the client named none.
const LEADING_KEYS: [&str; 6] = ["reward", "eval_reward", "kl", "grad_norm", "loss", "completions/mean_length"];

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_metrics))
}

/// The format of the response.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Form {
    /// A JSON object `{data, next}`.
    #[default]
    Json,
    /// A header line, then one line per step; undefined values are empty.
    Csv,
    /// One JSON object per line.
    Ndjson,
}

/// Selects metrics and steps.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MetricsQuery {
    /// Metric names, comma-separated. Default: all.
    keys: Option<String>,
    /// First step to return, inclusive.
    #[serde(default, deserialize_with = "count")]
    min_step: Option<u64>,
    /// Last step to return, inclusive.
    #[serde(default, deserialize_with = "count")]
    max_step: Option<u64>,
    /// Downsample to at most this number of steps. The lowest and highest value of every metric in each interval are kept, in the
    /// order of `keys` as far as the limit allows. Default: every step, in pages of 10,000.
    #[param(minimum = 2, maximum = 10000)]
    max_points: Option<usize>,
    /// The cursor `next` of the previous page.
    after: Option<String>,
    /// The format of the response.
    #[serde(default)]
    #[param(inline)]
    format: Form,
}

/// The metrics of one step.
#[derive(Debug, Serialize, ToSchema)]
struct MetricsRow {
    /// Optimizer step. An evaluation belongs to the step it follows (0 = before training).
    step: u64,
    /// Values by TRL's metric names, evaluation with the prefix `eval_`; null = undefined. Metrics without a value at
    /// this step are absent.
    #[serde(flatten)]
    metrics: Metrics,
}

/// A page of metrics.
#[derive(Debug, Serialize, ToSchema)]
struct MetricsPage {
    /// Steps in order; training and evaluation of a step share one row.
    data: Vec<MetricsRow>,
    /// The cursor to send as `after` for the next page; null on the last page.
    next: Option<String>,
    /// Requested metrics that do not exist, with the available ones; absent if all exist.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// Get a job's metrics by step. A metric that no step has is not an error, since a later step may have it: `warnings` names it and
/// lists the available metrics.
#[utoipa::path(get, path = "/jobs/{id}/metrics", tag = "Jobs", params(("id" = JobId, Path, description = "The job"), MetricsQuery), responses(
    (status = 200, description = "The metrics of the steps in order; training and evaluation of a step are in one row",
        content((MetricsPage = "application/json"), (String = "text/csv"), (String = "application/x-ndjson"))),
    (status = 400, description = "A query parameter is not valid", body = ProblemBody), (status = 404, description = "There is no such job", body = ProblemBody)))]
async fn get_metrics(
    State(state): State<AppState>,
    Path(id): Path<JobId>,
    Query(query): Query<MetricsQuery>,
) -> Result<Response, Problem> {
    let keys: Option<Vec<String>> = query
        .keys
        .as_ref()
        .map(|keys| keys.split(',').map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect());
    if let Some(points) = query.max_points.filter(|points| !(2..=MAX_ROWS).contains(points)) {
        return Err(bad_query("max_points", "out_of_range", format!("must be between 2 and {MAX_ROWS}, not {points}")));
    }
    let after = match &query.after {
        None => None,
        Some(text) => {
            let step = text.parse::<u64>().map_err(|_| Problem::from(crate::store::StoreError::BadCursor))?;
            Some(step)
        }
    };
    state.store.job_get(id).await?;
    let min = query.min_step.unwrap_or(0).max(after.map_or(0, |step| step.saturating_add(1)));
    let range = (min, query.max_step.unwrap_or(i64::MAX as u64));
    let wanted: Option<Vec<String>> = keys.as_ref().map(|keys| keys.iter().map(|key| in_json(key)).collect());
    let (rows, next) = match query.max_points {
        Some(points) => (thinned(&state, id, range, wanted.clone(), points).await?, None),
        None => page(&state, id, range, wanted.clone()).await?,
    };
    let warnings = match &wanted {
        Some(wanted) => unknown_keys(&state, id, range, wanted, &rows).await?,
        None => Vec::new(),
    };
    let form = query.format;
    spawn_blocking(move || written(&rows, next, warnings, form)).await.map_err(Problem::internal)?
}

/// First and last step, both inclusive.
type Range = (u64, u64);

/// Metric rows and columns that are being collected. The async task that reads the database and the thread that parses text
/// pass them back and forth.
#[derive(Default)]
struct Gathered {
    rows: Rows,
    columns: Option<Columns>,
}

impl Gathered {
    async fn take(mut self, lines: StepLines, keys: Option<Vec<String>>) -> Result<Self, Problem> {
        let work = move || -> Result<Self, Broken> {
            self.rows.take(&lines, keys.as_deref(), self.columns.as_mut())?;
            if self.columns.is_some() && self.rows.len() > MAX_KEPT {
                self.rows.drop_text();
            }
            Ok(self)
        };
        spawn_blocking(work).await.map_err(Problem::internal)?.map_err(unreadable)
    }
}

fn unreadable(what: Broken) -> Problem {
    Problem::internal(format!("the stored metrics of a step cannot be read: {what}"))
}

/// Returns the first [`MAX_ROWS`] steps, and the cursor of the next page.
async fn page(
    state: &AppState,
    id: JobId,
    (mut min, max): Range,
    keys: Option<Vec<String>>,
) -> Result<(Rows, Option<String>), Problem> {
    let mut gathered = Gathered::default();
    loop {
        let (lines, next) = state.store.step_lines(id, min, max, LINES).await?;
        gathered = gathered.take(lines, keys.clone()).await?;
        if gathered.rows.len() > MAX_ROWS {
            gathered.rows.truncate(MAX_ROWS);
            let next = gathered.rows.step(MAX_ROWS - 1).map(|step| step.to_string());
            return Ok((gathered.rows, next));
        }
        match next {
            Some(next) => min = next,
            None => return Ok((gathered.rows, None)),
        }
    }
}

/// Returns at most `max_points` steps, keeping the lowest and highest value of every metric in each interval.
async fn thinned(
    state: &AppState,
    id: JobId,
    (mut min, max): Range,
    keys: Option<Vec<String>>,
    max_points: usize,
) -> Result<Rows, Problem> {
    let mut gathered = Gathered { columns: Some(Columns::default()), ..Gathered::default() };
    loop {
        let (lines, next) = state.store.step_lines(id, min, max, LINES).await?;
        gathered = gathered.take(lines, keys.clone()).await?;
        match next {
            Some(next) => min = next,
            None => break,
        }
    }
    let Gathered { rows, columns } = gathered;
    let Some(mut columns) = columns.filter(|_| rows.len() > max_points) else { return Ok(rows) };
    let first = keys.clone().unwrap_or_else(|| LEADING_KEYS.map(str::to_owned).to_vec());
    let choose = move || {
        let first: Vec<&str> = first.iter().map(String::as_str).collect();
        let kept = kept_rows(&columns.ordered(&first, rows.len()), rows.len(), max_points);
        if rows.has_text() {
            Ok(rows.chosen(&kept))
        } else {
            Err(kept.iter().filter_map(|row| rows.step(*row)).collect())
        }
    };
    let chosen: Result<Rows, Vec<u64>> = spawn_blocking(choose).await.map_err(Problem::internal)?;
    match chosen {
        Ok(rows) => Ok(rows),
        Err(steps) => {
            let lines = state.store.some_step_lines(id, &steps).await?;
            Ok(Gathered::default().take(lines, keys).await?.rows)
        }
    }
}

/// Returns a warning for each requested metric that no step has; no warnings while there are no steps.
async fn unknown_keys(
    state: &AppState,
    id: JobId,
    (mut min, max): Range,
    keys: &[String],
    shown: &Rows,
) -> Result<Vec<String>, Problem> {
    // Usually the first rows contain all requested metrics, and the search for missing ones can stop here.
    let seen: BTreeSet<&str> =
        shown.iter().take(8).flat_map(|row| entries(row).flatten()).map(|(key, _)| key).collect();
    if keys.iter().all(|key| seen.contains(key.as_str())) {
        return Ok(Vec::new());
    }
    let mut known = BTreeSet::new();
    loop {
        let (lines, next) = state.store.step_lines(id, min, max, LINES).await?;
        for line in lines.iter() {
            for entry in entries(line?.metrics) {
                let (key, _) = entry.map_err(unreadable)?;
                if !known.contains(key) {
                    known.insert(key.to_owned());
                }
            }
        }
        match next.filter(|_| !keys.iter().all(|key| known.contains(key))) {
            Some(next) => min = next,
            None => break,
        }
    }
    let unknown = keys.iter().filter(|key| !known.is_empty() && !known.contains(*key));
    let list = || known.iter().map(|key| from_json(key)).collect::<Vec<_>>().join(", ");
    Ok(unknown
        .map(|key| {
            format!("no step of the job has the metric '{}' so far; it has: {}", shortened(&from_json(key)), list())
        })
        .collect())
}

fn written(rows: &Rows, next: Option<String>, warnings: Vec<String>, form: Form) -> Result<Response, Problem> {
    match form {
        Form::Json => {
            let mut text = String::with_capacity(rows.size_bytes() + rows.len() + 64);
            text.push_str("{\"data\":[");
            for (place, row) in rows.iter().enumerate() {
                if place > 0 {
                    text.push(',');
                }
                text.push_str(row);
            }
            text.push_str("],\"next\":");
            text.push_str(&serde_json::to_string(&next).map_err(Problem::internal)?);
            if !warnings.is_empty() {
                text.push_str(",\"warnings\":");
                text.push_str(&serde_json::to_string(&warnings).map_err(Problem::internal)?);
            }
            text.push('}');
            Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
        }
        Form::Ndjson => {
            let mut text = String::with_capacity(rows.size_bytes() + rows.len());
            for row in rows.iter() {
                text.push_str(row);
                text.push('\n');
            }
            Ok(with_link(text, "application/x-ndjson", next))
        }
        Form::Csv => Ok(with_link(csv_of(rows).map_err(Problem::internal)?, "text/csv; charset=utf-8", next)),
    }
}

/// Adds a `Link` header with the next page, because CSV and NDJSON have no field `next`.
fn with_link(text: String, kind: &'static str, next: Option<String>) -> Response {
    let mut response = ([(header::CONTENT_TYPE, kind)], text).into_response();
    if let Some(Ok(next)) = next.map(|next| format!("<?after={next}>; rel=\"next\"").parse()) {
        response.headers_mut().insert(header::LINK, next);
    }
    response
}

/// Writes metric values to CSV as they are stored: the shortest digits that read back as the same number.
fn csv_of(rows: &Rows) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
    let mut keys = BTreeSet::new();
    for row in rows.iter() {
        for entry in entries(row) {
            let (key, _) = entry?;
            if !keys.contains(key) {
                keys.insert(key);
            }
        }
    }
    keys.remove("step");
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(std::iter::once("step".to_owned()).chain(keys.iter().map(|key| from_json(key))))?;
    for row in rows.iter() {
        let values: BTreeMap<&str, &str> = entries(row).collect::<Result<_, _>>()?;
        let value = |key: &str| values.get(key).copied().filter(|value| *value != "null").unwrap_or_default();
        writer.write_record(std::iter::once("step").chain(keys.iter().copied()).map(value))?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_has_a_column_a_key_and_leaves_undefined_values_empty() {
        let mut rows = Rows::default();
        for (step, metrics) in
            [(1, r#"{"kl":null,"reward":0.1}"#), (2, r#"{"eval_reward":0.30000000000000004,"reward":2.0}"#)]
        {
            rows.take_row(step, metrics, None, None).unwrap();
        }
        assert_eq!(csv_of(&rows).unwrap(), "step,eval_reward,kl,reward\n1,,,0.1\n2,0.30000000000000004,,2.0\n");
    }
}
