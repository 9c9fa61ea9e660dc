//! Runs queued verdicts, one after another: selects the rows, samples both models, passes the answers to a separate process that
//! computes the rewards, and stores its results.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};

use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::super::job_models::unchanged;
use super::super::tasks::{self, Work};
use super::super::{AppState, python_rewards, reach};
use super::sampling::{Compared, Row, Unanswered, failed};
use crate::error_text::with_causes;
use crate::files::DataDir;
use crate::one_shot::{ChildLine, OneShotError};
use crate::spec::{DatasetPlan, EvalPlan, Plan, PromptKey, held_out_rows, prompt_key, test_rows};
use crate::store::background::spawn_blocking;
use crate::store::{StoreError, TaskEnd, TaskKind, TaskRow};
use crate::supervisor::one_shot::Verdicts;
use crate::verdict::{JudgeLine, JudgeReport, JudgeTask, RowSet, RowsFrom, VerdictError, VerdictSampling};

/// Number of compared rows to store in one transaction.
const ROWS_PER_TRANSACTION: usize = 64;

/// Runs queued verdicts until the server stops.
pub(crate) async fn run(state: AppState, verdicts: Verdicts) {
    tasks::run(state, Judging(verdicts)).await;
}

struct Judging(Verdicts);

impl Work for Judging {
    const KIND: TaskKind = TaskKind::Verdict;

    async fn run(&self, state: &AppState, row: &TaskRow) -> Result<Option<TaskEnd>, StoreError> {
        Ok(match judge(state, &self.0, row).await? {
            Some(JudgeReport::Judged(result)) => Some(match serde_json::to_value(result) {
                Ok(result) => TaskEnd::Succeeded(result, None),
                Err(error) => TaskEnd::Failed(json!(failed(
                    "internal",
                    format!("the result of the verdict could not be stored: {error}")
                ))),
            }),
            Some(JudgeReport::Failed(error)) => Some(TaskEnd::Failed(json!(error))),
            None => None,
        })
    }
}

/// Samples both models and runs the process that judges them; returns its report, or `None` when the server stops.
async fn judge(state: &AppState, verdicts: &Verdicts, row: &TaskRow) -> Result<Option<JudgeReport>, StoreError> {
    let task = match prepare(state, row).await {
        Ok(task) => task,
        Err(Unanswered::Failed(error)) => return Ok(Some(JudgeReport::Failed(error))),
        Err(Unanswered::Stopping) => return Ok(None),
    };
    let (sender, receiver) = mpsc::channel(ROWS_PER_TRANSACTION);
    let (report, kept) = tokio::join!(verdicts.follow(&task, sender), store_rows(state, row, receiver));
    kept?;
    Ok(match report {
        Ok(report) => Some(report),
        Err(OneShotError::Stopping) => None,
        Err(OneShotError::Killed(_)) => Some(JudgeReport::Failed(failed(
            "killed",
            "the process that judged the answers was killed, most likely because it ran out of memory; try again when no job runs",
        ))),
        Err(error) => Some(JudgeReport::Failed(failed("process_failed", error.to_string()))),
    })
}

async fn store_rows(state: &AppState, row: &TaskRow, mut lines: mpsc::Receiver<JudgeLine>) -> Result<(), StoreError> {
    let mut batch = Vec::new();
    while lines.recv_many(&mut batch, ROWS_PER_TRANSACTION).await > 0 {
        let (mut rows, mut progress) = (Vec::new(), None);
        for line in batch.drain(..) {
            match line {
                ChildLine::Item(judged) => rows.push(judged),
                ChildLine::Progress { done, total } => progress = Some((done, total)),
                ChildLine::Report(_) => {}
            }
        }
        if !rows.is_empty() {
            state.store.verdict_rows_append(row, &rows).await?;
        }
        if let Some((done, total)) = progress {
            state.store.task_progress(&row.id, row.attempt, done, total).await?;
        }
    }
    Ok(())
}

/// Collects what the process that judges needs, the answers of both models among it.
async fn prepare(state: &AppState, row: &TaskRow) -> Result<JudgeTask, Unanswered> {
    let store = &state.store;
    let internal = |error: StoreError| {
        tracing::error!(error = with_causes(&error), "the comparison for a verdict cannot be prepared");
        failed("internal", "the server's database failed: try again")
    };
    let plan = store.job_get(row.job).await.and_then(|job| job.plan()).map_err(internal)?;
    if let Some(withdrawn) = python_rewards::withdrawn(state, row.job, &plan).await.map_err(internal)? {
        return Err(failed("python_rewards_off", withdrawn.detail).into());
    }
    let checkpoint = store.checkpoint_get(row.checkpoint).await.map_err(|error| match error {
        StoreError::NotFound { .. } => failed("no_such_checkpoint", "the checkpoint was removed in the meantime"),
        error => internal(error),
    })?;
    let model = store.model_get(&plan.model.id).await.map_err(|error| match error {
        StoreError::NotFound { .. } => failed(
            "invalid_model",
            format!("the job's model '{}' is no longer registered: register it again with POST /models", plan.model.id),
        ),
        error => internal(error),
    })?;
    let model = unchanged(model, plan.model.sha256.clone()).await;
    let model = model.map_err(|problem| failed("invalid_model", problem.detail()))?;
    let mut reward_models = BTreeMap::new();
    for id in plan.reward_models.keys() {
        reward_models.insert(id.clone(), store.model_get(id).await.map_err(internal)?.source);
    }
    let allow_outgoing = reach::allow_outgoing(state).await;
    let allow_outgoing = allow_outgoing.map_err(|problem| failed("internal", problem.detail()))?;
    let (files, of_plan) = (state.files.clone(), plan.clone());
    let read = spawn_blocking(move || read_rows(&files, &of_plan)).await;
    let read = read.map_err(|error| {
        failed("internal", format!("the dataset rows to compare the models on could not be read: {error}"))
    })?;
    let Read { rows_from, rows, guard_rows } = read?;
    let sampling: VerdictSampling = serde_json::from_value(row.request.clone())
        .map_err(|error| failed("internal", format!("the stored request for the verdict cannot be read: {error}")))?;
    let compared = Compared { state, task: row, plan: &plan, model, checkpoint, sampling };
    let rows = compared.answer([(RowSet::Test, rows), (RowSet::Guard, guard_rows)]).await?;
    Ok(JudgeTask {
        job: row.job,
        step: row.step,
        secrets: store.job_secrets(row.job).await.map_err(internal)?,
        allow_outgoing,
        reward_models,
        rows_from,
        rows,
        sampling,
        plan,
    })
}

/// The dataset rows on which a verdict compares the models.
struct Read {
    rows_from: RowsFrom,
    rows: Vec<Row>,
    guard_rows: Vec<Row>,
}

/// Reads the dataset rows on which the models are compared. Blocking.
fn read_rows(files: &DataDir, plan: &Plan) -> Result<Read, VerdictError> {
    let Some(eval) = &plan.eval else {
        return Err(failed(
            "no_evaluation",
            "the job has no evaluation, so there are no rows to compare the models on",
        ));
    };
    let guard_rows = match &eval.guard {
        Some(guard) => rows_of(files, &guard.dataset, None)?,
        None => Vec::new(),
    };
    let (rows_from, rows) = match &eval.test_dataset {
        Some(test) => (RowsFrom::TestDataset, rows_of(files, test, None)?),
        None => set_aside(files, plan, eval)?,
    };
    Ok(Read { rows_from, rows, guard_rows })
}

/// Returns the rows of the training dataset that only the verdict reads, or those of the evaluation if there are none.
fn set_aside(files: &DataDir, plan: &Plan, eval: &EvalPlan) -> Result<(RowsFrom, Vec<Row>), VerdictError> {
    if eval.fraction.is_none() && eval.test_fraction.is_none() {
        return Ok((RowsFrom::Eval, rows_of(files, &eval.dataset, None)?));
    }
    let mut keys: Vec<PromptKey> = Vec::new();
    each_row(files, &plan.dataset, |_, row| keys.push(prompt_key(row.get("prompt").unwrap_or(&Value::Null))))?;
    let seed = plan.training.seed;
    let held_out = eval.fraction.map(|fraction| held_out_rows(plan.arithmetic.split, &keys, fraction, seed));
    if let Some(fraction) = eval.test_fraction {
        let tested = test_rows(&keys, held_out.as_deref().unwrap_or_default(), fraction, seed);
        if !tested.is_empty() {
            return Ok((RowsFrom::TestFraction, rows_of(files, &plan.dataset, Some(&tested))?));
        }
    }
    let rows = match held_out {
        Some(held_out) => rows_of(files, &plan.dataset, Some(&held_out))?,
        None => rows_of(files, &eval.dataset, None)?,
    };
    Ok((RowsFrom::Eval, rows))
}

/// Returns the dataset rows with these numbers (ascending), or all.
fn rows_of(files: &DataDir, dataset: &DatasetPlan, numbers: Option<&[u64]>) -> Result<Vec<Row>, VerdictError> {
    let mut rows = Vec::new();
    each_row(files, dataset, |number, row| {
        if numbers.is_none_or(|numbers| numbers.binary_search(&number).is_ok()) {
            rows.push((number, row));
        }
    })?;
    Ok(rows)
}

fn each_row(
    files: &DataDir,
    dataset: &DatasetPlan,
    mut visit: impl FnMut(u64, Map<String, Value>),
) -> Result<(), VerdictError> {
    let unreadable = |error: &dyn std::fmt::Display| {
        let message = format!("the dataset '{}' cannot be read: {error}", dataset.id);
        failed("dataset_unreadable", message)
    };
    let file = std::fs::File::open(files.dataset(dataset.id)).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            let message = format!("the dataset '{}' was deleted: its rows are no longer available", dataset.id);
            failed("dataset_missing", message)
        }
        _ => unreadable(&error),
    })?;
    for (number, line) in (0..).zip(BufReader::new(file).lines()) {
        let line = line.map_err(|error| unreadable(&error))?;
        visit(number, serde_json::from_str(&line).map_err(|error| unreadable(&error))?);
    }
    Ok(())
}
