//! Compares several jobs: state, differences between their configurations, metrics by step.

use std::collections::BTreeMap;

use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Code, Problem, ProblemBody, shortened};
use super::extract::{Json, Query, count};
use super::jobs::{bad_query, resolved_config};
use super::metrics::kept_rows;
use crate::event::{Metrics, SamplePhase};
use crate::id::{CheckpointId, JobId};
use crate::job::State as JobState;
use crate::store::background::spawn_blocking;
use crate::store::{CheckpointRow, JobRow, StepRow, StoreError};

/// Maximum number of jobs in one comparison.
const MAX_JOBS: usize = 8;
/// Default number of rows of metrics.
const DEFAULT_POINTS: usize = 500;
/// Maximum number of rows of metrics.
const MAX_POINTS: usize = 10_000;
/// Metrics that are compared by default.
const DEFAULT_KEYS: [&str; 8] =
    ["reward", "eval_reward", "reward_std", "kl", "entropy", "loss", "grad_norm", "completions/mean_length"];

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(compare_jobs))
}

/// Selects the jobs and the metrics to compare.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct CompareQuery {
    /// Job ids, comma-separated, at most 8.
    #[param(required = true)]
    ids: Option<String>,
    /// Names of metrics, comma-separated. Default: reward, eval_reward, reward_std, kl, entropy,
    /// loss, grad_norm and completions/mean_length.
    keys: Option<String>,
    /// First step to return, inclusive.
    #[serde(default, deserialize_with = "count")]
    min_step: Option<u64>,
    /// Last step to return, inclusive.
    #[serde(default, deserialize_with = "count")]
    max_step: Option<u64>,
    /// Downsample to at most this number of steps. The lowest and highest value of every job and metric in each interval are kept.
    #[param(minimum = 2, maximum = 10000, default = 500)]
    max_points: Option<usize>,
}

/// A comparison of jobs. Every list is in the order of `ids`.
#[derive(Debug, Serialize, ToSchema)]
struct Comparison {
    /// State and progress of each job.
    jobs: Vec<Compared>,
    /// Settings that differ, by JSON pointer into /jobs/{id}/config.
    config: Vec<Difference>,
    /// Metrics by step. A step is listed if any of the jobs has one of the metrics at it.
    metrics: Vec<ComparedStep>,
    /// Requested metrics that no step of any job has.
    unknown_keys: Vec<String>,
}

/// One job of a comparison.
#[derive(Debug, Serialize, ToSchema)]
struct Compared {
    /// The job's id, `job_…`.
    id: JobId,
    /// The job's display name; null if none.
    name: Option<String>,
    /// Id of the base model.
    model: String,
    /// Current state of the job.
    state: JobState,
    /// Number of optimizer steps completed.
    step: u64,
    /// Total number of optimizer steps.
    total_steps: u64,
    /// The job's evaluations, by step.
    evals: Vec<Evaluation>,
    /// The checkpoint marked as best; null before the first one.
    best_checkpoint: Option<BestCheckpoint>,
}

/// One evaluation of a job.
#[derive(Debug, Serialize, ToSchema)]
struct Evaluation {
    /// The optimizer step that the evaluation follows; 0 = before training.
    step: u64,
    /// Metrics by TRL's names, with the prefix `eval_`.
    metrics: Metrics,
}

/// The best checkpoint of a job.
#[derive(Debug, Serialize, ToSchema)]
struct BestCheckpoint {
    id: CheckpointId,
    /// Number of optimizer steps completed.
    step: u64,
    /// Metrics of the checkpoint's step.
    metrics: Metrics,
}

/// One setting that differs between the jobs.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
struct Difference {
    /// JSON pointer into a job's configuration.
    pointer: String,
    /// One value per job; null if a job does not have the setting.
    #[schema(value_type = Vec<Option<Value>>)]
    values: Vec<Value>,
}

/// The metrics of one step.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
struct ComparedStep {
    /// Optimizer step, counted from 1.
    step: u64,
    /// One value per job for each metric; null if a job has no value at this step.
    #[serde(flatten)]
    metrics: BTreeMap<String, Vec<Option<f64>>>,
}

/// Compare jobs: states, settings that differ, metrics by step, evaluations, best checkpoints.
#[utoipa::path(get, path = "/jobs/compare", tag = "Jobs", params(CompareQuery), responses(
    (status = 200, description = "The comparison", body = Comparison),
    (status = 400, description = "The parameter `ids` is missing, names too many jobs, or repeats one", body = ProblemBody),
    (status = 404, description = "Some of the jobs do not exist; `errors` names each of them", body = ProblemBody)))]
async fn compare_jobs(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<CompareQuery>,
) -> Result<Json<Comparison>, Problem> {
    let max_points = query.max_points.unwrap_or(DEFAULT_POINTS);
    if !(2..=MAX_POINTS).contains(&max_points) {
        let detail = format!("must be between 2 and {MAX_POINTS}, not {max_points}");
        return Err(bad_query("max_points", "out_of_range", detail));
    }
    let rows = find(&state, &caller, &ids(query.ids.as_deref().unwrap_or(""))?).await?;
    let keys = match &query.keys {
        Some(keys) => keys.split(',').map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect(),
        None => DEFAULT_KEYS.map(str::to_owned).to_vec(),
    };
    let (min, max) = (query.min_step.unwrap_or(0), query.max_step.unwrap_or(i64::MAX as u64));
    let (mut jobs, mut configs, mut courses) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        configs.push(resolved_config(&row)?);
        let steps = state.store.step_page(row.id, None, min, max).await?;
        let evaluations = steps.iter().filter(|step| step.kind == SamplePhase::Eval);
        let evals = evaluations.map(|step| Evaluation { step: step.step, metrics: step.metrics.clone() }).collect();
        let best = state.store.checkpoint_best(row.id).await?;
        courses.push(steps);
        jobs.push(Compared {
            id: row.id,
            name: row.name,
            model: row.model,
            state: row.state,
            step: row.step,
            total_steps: row.total_steps,
            evals,
            best_checkpoint: best.map(|CheckpointRow { id, step, metrics, .. }| BestCheckpoint { id, step, metrics }),
        });
    }
    let asked = query.keys.is_some();
    let work = move || {
        let all = aligned(&courses, &keys);
        let has = |key: &String| all.iter().any(|step| step.metrics.contains_key(key));
        let unknown_keys = keys.iter().filter(|key| asked && !has(key)).cloned().collect();
        Comparison {
            jobs,
            config: differences(&configs),
            metrics: thinned(all, &keys, courses.len(), max_points),
            unknown_keys,
        }
    };
    spawn_blocking(work).await.map(Json).map_err(Problem::internal)
}

fn ids(text: &str) -> Result<Vec<JobId>, Problem> {
    let words: Vec<&str> = text.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
    match words.len() {
        0 => return Err(bad_query("ids", "required", "name the jobs to compare, comma-separated: ids=job_a,job_b")),
        1..=MAX_JOBS => {}
        many => {
            let detail = format!("at most {MAX_JOBS} jobs can be compared in one request, not {many}");
            return Err(bad_query("ids", "out_of_range", detail));
        }
    }
    let mut ids = Vec::new();
    for word in words {
        let id: JobId = word.parse().map_err(|_| {
            Problem::not_found("job", word).item(
                "?ids",
                "unknown_job",
                format!("'{}' is not the id of a job", shortened(word)),
            )
        })?;
        if ids.contains(&id) {
            return Err(bad_query("ids", "duplicate", format!("the job {id} is named twice in 'ids'")));
        }
        ids.push(id);
    }
    Ok(ids)
}

/// Returns the jobs, or a 404 that names every job that does not exist.
async fn find(state: &AppState, caller: &Caller, ids: &[JobId]) -> Result<Vec<JobRow>, Problem> {
    let (mut rows, mut missing) = (Vec::new(), Vec::new());
    for id in ids {
        match state.store.job_get(*id).await {
            Ok(row) if caller.may_see(&row.owner) => rows.push(row),
            Ok(_) | Err(StoreError::NotFound { .. }) => missing.push(id.to_string()),
            Err(error) => return Err(error.into()),
        }
    }
    if missing.is_empty() {
        return Ok(rows);
    }
    let problem = Problem::new(Code::NotFound, format!("there is no job {}", missing.join(", nor ")));
    Err(missing.into_iter().fold(problem, |problem, id| {
        let detail = format!("there is no job '{id}'");
        problem.item("?ids", "unknown_job", detail)
    }))
}

/// Finds the settings whose values differ between the jobs' configurations. Lists are compared as a whole
/// unless they contain objects.
fn differences(configs: &[Value]) -> Vec<Difference> {
    let mut found = Vec::new();
    let values: Vec<Option<&Value>> = configs.iter().map(Some).collect();
    compare_at(String::new(), &values, &mut found);
    found
}

fn compare_at(pointer: String, values: &[Option<&Value>], found: &mut Vec<Difference>) {
    if values.windows(2).all(|pair| pair[0] == pair[1]) {
        return;
    }
    let present = || values.iter().flatten();
    let opened = present().count() > 1;
    if opened && present().all(|value| value.is_object()) {
        // The keys of all configurations, in order of first appearance, beginning with the first job.
        let mut names: Vec<&String> = Vec::new();
        for name in present().filter_map(|value| value.as_object()).flat_map(|object| object.keys()) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        for name in names {
            let inner: Vec<_> = values.iter().map(|value| value.and_then(|value| value.get(name))).collect();
            let escaped = name.replace('~', "~0").replace('/', "~1");
            compare_at(format!("{pointer}/{escaped}"), &inner, found);
        }
        return;
    }
    let of_objects = |value: &Value| value.as_array().is_some_and(|items| items.iter().all(Value::is_object));
    if opened && present().all(|value| of_objects(value)) {
        let longest = present().filter_map(|value| value.as_array()).map(Vec::len).max().unwrap_or(0);
        for index in 0..longest {
            let inner: Vec<_> = values.iter().map(|value| value.and_then(|value| value.get(index))).collect();
            compare_at(format!("{pointer}/{index}"), &inner, found);
        }
        return;
    }
    found.push(Difference {
        pointer,
        values: values.iter().map(|value| value.cloned().unwrap_or(Value::Null)).collect(),
    });
}

/// Returns one row per step with the requested metrics, one value per job.
fn aligned(courses: &[Vec<StepRow>], keys: &[String]) -> Vec<ComparedStep> {
    let mut rows: BTreeMap<u64, BTreeMap<String, Vec<Option<f64>>>> = BTreeMap::new();
    for (index, steps) in courses.iter().enumerate() {
        for StepRow { step, metrics, .. } in steps {
            for key in keys {
                let Some(value) = metrics.get(key) else { continue };
                let row = rows.entry(*step).or_default();
                row.entry(key.clone()).or_insert_with(|| vec![None; courses.len()])[index] = *value;
            }
        }
    }
    rows.into_iter().map(|(step, metrics)| ComparedStep { step, metrics }).collect()
}

/// Downsamples the steps as `GET /jobs/{id}/metrics` does: every metric of every job keeps its lowest and highest values.
fn thinned(rows: Vec<ComparedStep>, keys: &[String], jobs: usize, max_points: usize) -> Vec<ComparedStep> {
    if rows.len() <= max_points {
        return rows;
    }
    let value = |row: &ComparedStep, key: &String, job: usize| row.metrics.get(key).and_then(|values| values[job]);
    let columns: Vec<Vec<f64>> = keys
        .iter()
        .flat_map(|key| (0..jobs).map(move |job| (key, job)))
        .map(|(key, job)| rows.iter().map(|row| value(row, key, job).unwrap_or(f64::NAN)).collect())
        .collect();
    let columns: Vec<&[f64]> = columns.iter().map(Vec::as_slice).collect();
    let mut kept = kept_rows(&columns, rows.len(), max_points).into_iter().peekable();
    rows.into_iter().enumerate().filter(|(index, _)| kept.next_if_eq(index).is_some()).map(|(_, row)| row).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_settings_that_differ_are_named() {
        let a = json!({"model": "m", "rloo": {"beta": 0.05, "epsilon": 0.2}, "rewards": [{"type": "length", "weight": 1.0}], "lora": {"r": 4, "target_modules": ["q_proj"]}});
        let b = json!({"model": "m", "rloo": {"beta": 0.1, "epsilon": 0.2}, "rewards": [{"type": "length", "weight": 2.0}, {"type": "regex"}], "lora": null, "name": "a/b"});
        let found = differences(&[a.clone(), b, a.clone()]);
        let named: Vec<&str> = found.iter().map(|difference| difference.pointer.as_str()).collect();
        assert_eq!(named, ["/rloo/beta", "/rewards/0/weight", "/rewards/1", "/lora", "/name"]);
        assert_eq!(found[0].values, [json!(0.05), json!(0.1), json!(0.05)]);
        assert_eq!(found[2].values, [Value::Null, json!({"type": "regex"}), Value::Null]);
        assert!(differences(&[a.clone(), a]).is_empty());
    }

    #[test]
    fn thinning_keeps_the_outlier_of_any_job() {
        let step = |step: u64, outlier: bool| ComparedStep {
            step,
            metrics: BTreeMap::from([("kl".to_owned(), vec![Some(0.1), Some(if outlier { 9.0 } else { 0.1 })])]),
        };
        let rows: Vec<_> = (0..1000).map(|index| step(index, index == 617)).collect();
        let thin = thinned(rows, &["kl".to_owned()], 2, 20);
        assert!(thin.len() <= 20 && thin.iter().any(|row| row.step == 617));
        assert_eq!((thin[0].step, thin[thin.len() - 1].step), (0, 999));
    }
}
