//! `POST /demo`: submits the demonstration job.

use std::io;
use std::path::{Path, PathBuf};

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use futures::stream;
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::error::{Problem, ProblemBody};
use super::idempotency::{Answer, once};
use super::jobs::JobView;
use super::models::register;
use super::rows::read_rows;
use super::rows::store_rows;
use super::submit::submit;
use crate::bundle;
use crate::dataset::{Format, Reader};
use crate::id::DatasetId;
use crate::modelcard;
use crate::store::StoreError;
use crate::store::background::spawn_blocking;

/// The id under which the bundled model is registered.
const MODEL: &str = "rlood/tiny";
/// The bundled model's directory below the data directory.
const FOLDER: &str = "demo-model";

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(create_demo))
}

/// Submit the demonstration job.
///
/// A tiny model that comes with the server learns to add and subtract: 40 steps, less than a minute on a CPU. The request first
/// registers the model and its two datasets, if they do not exist.
#[utoipa::path(post, path = "/demo", tag = "Jobs",
    params(("Idempotency-Key" = Option<String>, Header, description = "A repeated request with the same key gets the same job for 24 hours")),
    responses(
        (status = 201, description = "Queued", body = JobView, headers(("Location" = String, description = "Its path"))),
        (status = 409, description = "The server is still answering an earlier request with this Idempotency-Key", body = ProblemBody)))]
async fn create_demo(State(state): State<AppState>, caller: Caller, headers: HeaderMap) -> Result<Response, Problem> {
    once(&state.clone(), &caller.clone(), &headers, "POST /demo", "", create(state, caller)).await
}

async fn create(state: AppState, caller: Caller) -> Result<Answer, Problem> {
    settle(&state).await?;
    match state.store.model_get(MODEL).await {
        Ok(_) => {}
        Err(StoreError::NotFound { .. }) => {
            let here = directory(&state);
            run_blocking(move || bundle::unpack_model(&here)).await?;
            // The bundled model is shared by all owners, whichever key requested the demo first.
            register(&state, String::new(), MODEL.to_owned(), source(&state), None).await?;
        }
        Err(error) => return Err(error.into()),
    }
    let train = store_dataset(&state, &caller, "sums", bundle::TRAIN).await?;
    let held_out = store_dataset(&state, &caller, "sums-held-out", bundle::HELD_OUT).await?;
    submit(state, caller, job(train, held_out), None).await
}

/// Updates the path of the bundled model in its database record, if there is one, and unpacks the model if its
/// files are missing: a backup does not contain them, and the data directory may have been moved. Call this before
/// workers can claim jobs.
pub(crate) async fn settle(state: &AppState) -> Result<(), Problem> {
    let row = match state.store.model_get(MODEL).await {
        Ok(row) if row.owner.is_empty() => row,
        // A model that a user registered under this id is left unchanged.
        Ok(_) | Err(StoreError::NotFound { .. }) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let (here, known) = (directory(state), row.clone());
    let moved = run_blocking(move || {
        let there = Path::new(&known.source);
        let gone = modelcard::read(there).is_err();
        if there == here {
            return if gone { bundle::unpack_model(&here).map(|()| true) } else { Ok(false) };
        }
        let named = there.file_name().is_some_and(|name| name == FOLDER);
        if !gone && !named {
            return Ok(false);
        }
        bundle::unpack_model(&here)?;
        let same = modelcard::fingerprint(&here).is_ok_and(|sha256| sha256 == known.sha256);
        Ok(same || (gone && named))
    })
    .await?;
    if moved {
        state.store.model_move(MODEL, &row.source, &source(state)).await?;
        register(state, String::new(), MODEL.to_owned(), source(state), None).await?;
    }
    Ok(())
}

fn directory(state: &AppState) -> PathBuf {
    state.files.root().join(FOLDER)
}

fn source(state: &AppState) -> String {
    directory(state).to_string_lossy().into_owned()
}

async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T, Problem> {
    spawn_blocking(work)
        .await
        .map_err(Problem::internal)?
        .map_err(|error| Problem::internal(format!("write the bundled model: {error}")))
}

async fn store_dataset(
    state: &AppState,
    caller: &Caller,
    name: &str,
    rows: &'static [u8],
) -> Result<DatasetId, Problem> {
    let pieces = stream::iter([Ok::<_, Problem>(Bytes::from_static(rows))]);
    let (summary, staged) = read_rows(state, Reader::new(Format::Ndjson), None, pieces, |problem| problem).await?;
    Ok(store_rows(state, caller.owner(), (DatasetId::new(), Some(name.to_owned())), (summary, staged, None))
        .await?
        .0
        .id)
}

/// Returns the demo job as a user would write it. `rlood demo` runs the same job with a reward service.
fn job(train: DatasetId, held_out: DatasetId) -> Value {
    json!({
        "name": "demo: sums",
        "model": MODEL,
        "dataset": {"id": train},
        "eval": {"dataset": {"id": held_out}, "every_steps": 10, "before_start": true, "num_generations": 1, "temperature": 0},
        "rewards": [
            {"name": "correct", "type": "exact_match", "column": "answer"},
            // A reward with weight 0 is logged but not trained on.
            {"name": "digits", "type": "regex", "pattern": "^-?[0-9]+$", "weight": 0},
        ],
        "rloo": {"num_generations": 8, "beta": 0.01},
        "sampling": {"max_completion_length": 6},
        "lora": {"r": 16, "alpha": 32},
        "optimizer": {"learning_rate": 1.5e-3, "lr_scheduler_type": "linear", "warmup_steps": 5},
        "training": {"prompts_per_step": 32, "max_steps": 40},
        "checkpoints": {"every_steps": 10},
    })
}
