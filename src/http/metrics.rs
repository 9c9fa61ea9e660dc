//! A job's metrics by step: JSON, CSV or NDJSON, thinned out so that no peak is lost.

use std::collections::BTreeSet;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::error::{Problem, ProblemBody, shortened};
use super::extract::{Json, Path, Query, count};
use super::jobs::bad_query;
use crate::event::Metrics;
use crate::id::JobId;
use crate::store::StepRow;

/// Rows of one answer.
const MAX_ROWS: usize = 10_000;
/// Whose peaks are kept first when not all fit and the client did not say.
const LEADING_KEYS: [&str; 6] = ["reward", "eval_reward", "kl", "grad_norm", "loss", "completions/mean_length"];

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(get_metrics))
}

/// The form of the answer.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Form {
    /// `{data, next}`.
    #[default]
    Json,
    /// A header line, then a line a step; undefined values are empty.
    Csv,
    /// One object a line.
    Ndjson,
}

/// Which metrics, of which steps, how many.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MetricsQuery {
    /// Comma-separated names; default: all.
    keys: Option<String>,
    /// First step.
    #[serde(default, deserialize_with = "count")]
    min_step: Option<u64>,
    /// Last step.
    #[serde(default, deserialize_with = "count")]
    max_step: Option<u64>,
    /// Thin out to at most so many steps, keeping the lowest and highest value of every key in every stretch (of as many keys
    /// as fit, in the order given). Default: every step, in pages of 10,000.
    #[param(minimum = 2, maximum = 10000)]
    max_points: Option<usize>,
    /// The cursor `next` of the page before.
    after: Option<String>,
    /// The form of the answer.
    #[serde(default)]
    #[param(inline)]
    format: Form,
}

/// The metrics of one step.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct MetricsRow {
    /// Optimizer step; an evaluation stands at the step it follows (0 = before the start).
    step: u64,
    /// By TRL's names, evaluation with the prefix `eval_`; null = undefined. A key that a step does not have is left out.
    #[serde(flatten)]
    metrics: Metrics,
}

/// A page of metrics.
#[derive(Debug, Serialize, ToSchema)]
struct MetricsPage {
    /// Steps in order; training and evaluation of a step in one row.
    data: Vec<MetricsRow>,
    /// What to send as `after` for the next page; null on the last one.
    next: Option<String>,
    /// What was asked for and does not exist, and what does; left out when there is nothing to say.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// A job's metrics by step. A key that no step has is no error, since it may come with a later step: `warnings` says so and lists
/// the keys there are.
#[utoipa::path(get, path = "/jobs/{id}/metrics", tag = "Jobs", params(("id" = JobId, Path, description = "The job"), MetricsQuery), responses(
    (status = 200, description = "Steps in order; training and evaluation of a step in one row",
        content((MetricsPage = "application/json"), (String = "text/csv"), (String = "application/x-ndjson"))),
    (status = 400, description = "A parameter is not valid", body = ProblemBody), (status = 404, description = "No such job", body = ProblemBody)))]
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
    let steps = state.store.step_page(id, None, min, query.max_step.unwrap_or(i64::MAX as u64)).await?;
    let (max_points, form) = (query.max_points, query.format);
    let work = move || {
        let warnings = keys.as_deref().map(|keys| unknown_keys(&steps, keys)).unwrap_or_default();
        let rows = merged(steps, keys.as_deref());
        let (rows, next) = match max_points {
            Some(points) => (thinned(rows, keys, points), None),
            None => page(rows),
        };
        written(rows, next, warnings, form)
    };
    tokio::task::spawn_blocking(work).await.map_err(Problem::internal)?
}

/// What to say of keys that no step has; nothing while there are no steps.
fn unknown_keys(steps: &[StepRow], keys: &[String]) -> Vec<String> {
    let known: BTreeSet<&str> = steps.iter().flat_map(|step| step.metrics.keys().map(String::as_str)).collect();
    let unknown = keys.iter().filter(|key| !known.is_empty() && !known.contains(key.as_str()));
    let list = || known.iter().copied().collect::<Vec<_>>().join(", ");
    unknown.map(|key| format!("no step so far has '{}'; there are: {}", shortened(key), list())).collect()
}

/// One row a step, with the wanted keys; steps that have none of them are left out.
fn merged(steps: Vec<StepRow>, keys: Option<&[String]>) -> Vec<MetricsRow> {
    let mut rows: Vec<MetricsRow> = Vec::new();
    for StepRow { step, kind: _, time: _, mut metrics } in steps {
        if let Some(keys) = keys {
            metrics.retain(|key, _| keys.contains(key));
        }
        match rows.last_mut() {
            Some(row) if row.step == step => row.metrics.append(&mut metrics),
            _ => rows.push(MetricsRow { step, metrics }),
        }
    }
    rows.retain(|row| !row.metrics.is_empty());
    rows
}

fn page(mut rows: Vec<MetricsRow>) -> (Vec<MetricsRow>, Option<String>) {
    let more = rows.len() > MAX_ROWS;
    rows.truncate(MAX_ROWS);
    let next = rows.last().filter(|_| more).map(|row| row.step.to_string());
    (rows, next)
}

fn thinned(rows: Vec<MetricsRow>, keys: Option<Vec<String>>, max_points: usize) -> Vec<MetricsRow> {
    if rows.len() <= max_points {
        return rows;
    }
    let keys = keys.unwrap_or_else(|| leading(&rows));
    let columns: Vec<Vec<Option<f64>>> =
        keys.iter().map(|key| rows.iter().map(|row| row.metrics.get(key).copied().flatten()).collect()).collect();
    let kept = kept_rows(&columns, rows.len(), max_points);
    rows.into_iter().enumerate().filter(|(index, _)| kept.contains(index)).map(|(_, row)| row).collect()
}

fn leading(rows: &[MetricsRow]) -> Vec<String> {
    let all: BTreeSet<&String> = rows.iter().flat_map(|row| row.metrics.keys()).collect();
    let (first, rest): (Vec<&String>, Vec<&String>) =
        all.into_iter().partition(|key| LEADING_KEYS.contains(&key.as_str()));
    let rank = |key: &&String| LEADING_KEYS.iter().position(|leading| leading == key);
    let mut first = first;
    first.sort_by_key(rank);
    first.into_iter().chain(rest).cloned().collect()
}

/// Which of `len` rows to keep, at most `max_points`: first and last, and the lowest and highest of every column in each of as
/// many equal stretches as fit.
pub(super) fn kept_rows(columns: &[Vec<Option<f64>>], len: usize, max_points: usize) -> BTreeSet<usize> {
    let mut stretches = max_points / 2;
    while stretches > 0 {
        let mut kept = BTreeSet::from([0, len - 1]);
        for stretch in 0..stretches {
            let range = stretch * len / stretches..(stretch + 1) * len / stretches;
            columns.iter().for_each(|column| kept.extend(extremes(column, range.clone())));
        }
        if kept.len() <= max_points {
            return kept;
        }
        stretches = (stretches * 3 / 4).min(stretches - 1);
    }
    // Not even the extremes of the whole fit: those of the first keys do.
    let mut kept = BTreeSet::new();
    for index in columns.iter().flat_map(|column| extremes(column, 0..len)) {
        if kept.len() < max_points {
            kept.insert(index);
        }
    }
    kept
}

/// Where the lowest and the highest value stand; nothing where there is no value.
fn extremes(column: &[Option<f64>], range: std::ops::Range<usize>) -> impl Iterator<Item = usize> {
    let values = || range.clone().filter_map(|index| column[index].map(|value| (index, value)));
    let lowest = values().min_by(|a, b| a.1.total_cmp(&b.1));
    let highest = values().max_by(|a, b| a.1.total_cmp(&b.1));
    lowest.into_iter().chain(highest).map(|(index, _)| index)
}

fn written(
    rows: Vec<MetricsRow>,
    next: Option<String>,
    warnings: Vec<String>,
    form: Form,
) -> Result<Response, Problem> {
    match form {
        Form::Json => Ok(Json(MetricsPage { data: rows, next, warnings }).into_response()),
        Form::Ndjson => {
            let mut text = String::new();
            for row in &rows {
                text.push_str(&serde_json::to_string(row).map_err(Problem::internal)?);
                text.push('\n');
            }
            Ok(with_link(text, "application/x-ndjson", next))
        }
        Form::Csv => Ok(with_link(csv_of(&rows).map_err(Problem::internal)?, "text/csv; charset=utf-8", next)),
    }
}

/// Forms that have no place for `next` carry it in a header.
fn with_link(text: String, kind: &'static str, next: Option<String>) -> Response {
    let mut response = ([(header::CONTENT_TYPE, kind)], text).into_response();
    if let Some(Ok(next)) = next.map(|next| format!("<?after={next}>; rel=\"next\"").parse()) {
        response.headers_mut().insert(header::LINK, next);
    }
    response
}

fn csv_of(rows: &[MetricsRow]) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
    let keys: BTreeSet<&str> = rows.iter().flat_map(|row| row.metrics.keys().map(String::as_str)).collect();
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(std::iter::once("step").chain(keys.iter().copied()))?;
    for row in rows {
        let number = |key: &&str| match row.metrics.get(*key).copied().flatten() {
            // serde_json writes the shortest digits that read back as the same number.
            Some(value) => Value::from(value).to_string(),
            None => String::new(),
        };
        writer.write_record(std::iter::once(row.step.to_string()).chain(keys.iter().map(number)))?;
    }
    Ok(String::from_utf8(writer.into_inner()?)?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn rows(values: impl IntoIterator<Item = f64>) -> Vec<MetricsRow> {
        let row = |(step, value)| MetricsRow { step, metrics: BTreeMap::from([("reward".to_owned(), Some(value))]) };
        (1..).zip(values).map(row).collect()
    }

    #[test]
    fn a_single_outlier_survives_thinning_in_every_place() {
        for place in [0, 1, 499, 998, 999] {
            for outlier in [-50.0, 50.0] {
                let mut values: Vec<f64> = (0..1000).map(|i| (f64::from(i) * 0.1).sin()).collect();
                values[place] = outlier;
                let thin = thinned(rows(values), Some(vec!["reward".to_owned()]), 40);
                assert!((20..=40).contains(&thin.len()), "{}", thin.len());
                assert!(thin.iter().any(|row| row.metrics["reward"] == Some(outlier)), "{place} {outlier}");
                assert_eq!((thin[0].step, thin[thin.len() - 1].step), (1, 1000));
                assert!(thin.windows(2).all(|pair| pair[0].step < pair[1].step));
            }
        }
    }

    #[test]
    fn many_keys_keep_the_extremes_of_as_many_as_fit() {
        let mut rows = rows((0..100).map(f64::from));
        for (index, row) in rows.iter_mut().enumerate() {
            for key in 0..20 {
                row.metrics.insert(format!("key{key:02}"), Some(((index * (key + 7)) % 97) as f64));
            }
        }
        let thin = thinned(rows, None, 5);
        assert!(thin.len() <= 5);
        assert!(thin.iter().any(|row| row.metrics["reward"] == Some(0.0)));
        assert!(thin.iter().any(|row| row.metrics["reward"] == Some(99.0)));
    }

    #[test]
    fn csv_has_a_column_a_key_and_leaves_undefined_values_empty() {
        let mut rows = rows([0.1, 2.0]);
        rows[1].metrics.insert("eval_reward".to_owned(), Some(0.30000000000000004));
        rows[0].metrics.insert("kl".to_owned(), None);
        assert_eq!(csv_of(&rows).unwrap(), "step,eval_reward,kl,reward\n1,,,0.1\n2,0.30000000000000004,,2.0\n");
    }
}
