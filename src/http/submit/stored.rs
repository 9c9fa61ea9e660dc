//! The rows that were sent with a job: stored as datasets, which the job then names by their ids.

use axum::body::Bytes;
use futures::stream;
use serde_json::Value;

use super::{AppState, Prompts, Source};
use crate::dataset::{Format, Reader};
use crate::http::dataset_sources::written;
use crate::http::error::Problem;
use crate::http::lookup::EvalPrompts;
use crate::http::rows::{read_rows, store_rows};
use crate::id::DatasetId;
use crate::spec::{DatasetPlan, EvalPlan, Plan, submittable_dataset};
use crate::store::DatasetRow;

/// Stores the rows that were sent with a job, and writes the ids of their datasets to its plan and document.
pub(in crate::http) async fn store_prompts(
    state: &AppState,
    owner: &str,
    (train, eval, warm_up): (Option<Prompts>, EvalPrompts, Option<Prompts>),
    document: &mut Value,
    plan: &mut Plan,
) -> Result<(), Problem> {
    if let Some(row) = store_uploaded_dataset(state, owner, document, train).await? {
        store_in(&mut plan.dataset, &row);
        document["dataset"] = submittable_dataset(&plan.dataset);
        if let Some(eval) = plan.eval.as_mut().filter(|eval| eval.fraction.is_some()) {
            eval.dataset = plan.dataset.clone();
        }
    }
    if let Some(plan) = &mut plan.eval {
        store_eval_prompts(state, owner, eval, document, plan).await?;
    }
    if let (Some(row), Some(warm_up)) =
        (store_uploaded_dataset(state, owner, document, warm_up).await?, &mut plan.warm_up)
    {
        store_in(&mut warm_up.dataset, &row);
        document["warm_up"]["dataset"] = submittable_dataset(&warm_up.dataset);
        // The mapping is removed, because the stored warm-up rows are already mapped.
        if let Some(document) = document["warm_up"].as_object_mut() {
            document.shift_remove("map");
        }
    }
    Ok(())
}

/// Stores the rows of the `eval` section as datasets, in the same way.
async fn store_eval_prompts(
    state: &AppState,
    owner: &str,
    eval: EvalPrompts,
    document: &mut Value,
    plan: &mut EvalPlan,
) -> Result<(), Problem> {
    let EvalPrompts { eval, test, guard } = eval;
    if let Some(row) = store_uploaded_dataset(state, owner, document, eval).await? {
        store_in(&mut plan.dataset, &row);
        document["eval"]["dataset"] = submittable_dataset(&plan.dataset);
    }
    if let (Some(row), Some(dataset)) =
        (store_uploaded_dataset(state, owner, document, test).await?, &mut plan.test_dataset)
    {
        store_in(dataset, &row);
        document["eval"]["test_dataset"] = submittable_dataset(dataset);
    }
    if let (Some(row), Some(guard)) = (store_uploaded_dataset(state, owner, document, guard).await?, &mut plan.guard) {
        store_in(&mut guard.dataset, &row);
        document["eval"]["guard"]["dataset"] = submittable_dataset(&guard.dataset);
    }
    Ok(())
}

/// Sets the id and hash of a dataset in the plan to those of the stored dataset.
fn store_in(plan: &mut DatasetPlan, row: &DatasetRow) {
    *plan = DatasetPlan {
        sources: std::mem::take(&mut plan.sources),
        ..DatasetPlan::new(row.id, row.sha256.clone(), row.num_rows)
    };
}

/// Creates a dataset from rows that were sent with the job; None if they are a dataset already. The dataset gets the name that
/// the document gives it.
async fn store_uploaded_dataset(
    state: &AppState,
    owner: &str,
    document: &Value,
    prompts: Option<Prompts>,
) -> Result<Option<DatasetRow>, Problem> {
    let Some(Prompts { at, source, .. }) = prompts else { return Ok(None) };
    let name = document.pointer(&at).and_then(|dataset| dataset.get("name")?.as_str()).map(str::to_owned);
    store_source(state, owner, name, source).await
}

/// Creates a dataset from rows; None if they are a dataset already, or are still downloaded.
pub(super) async fn store_source(
    state: &AppState,
    owner: &str,
    name: Option<String>,
    source: Source,
) -> Result<Option<DatasetRow>, Problem> {
    let rows = match source {
        Source::Stored(_) | Source::Downloading(_) => return Ok(None),
        Source::Uploaded(summary, staged, origin) => (summary, staged, origin),
        Source::Records(records) => {
            let lines = records.into_iter().map(|record| Ok::<_, Problem>(Bytes::from(format!("{record}\n"))));
            let (summary, staged) =
                read_rows(state, Reader::new(Format::Ndjson), None, stream::iter(lines), |problem| problem).await?;
            (summary, staged, None)
        }
        several @ Source::Several(_) => {
            let origin = several.origin();
            let (summary, staged) =
                written(state, Reader::new(Format::Ndjson), None, move |out| several.write(out)).await?;
            (summary, staged, origin)
        }
    };
    Ok(Some(store_rows(state, owner, (DatasetId::new(), name), rows).await?.0))
}
