//! `GET /v1/models`: the base models, and the result of each job.

use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::names::{Chosen, resolve};
use crate::http::AppState;
use crate::http::auth::{Caller, models::plain_id};
use crate::http::error::Problem;
use crate::http::extract::{Json, Path, Query};
use crate::id::JobId;
use crate::openai::{OpenAiError, ServedModelView};
use crate::store::{CheckpointRow, JobFilter, JobRow, ModelRow};

/// Maximum number of base models, and of jobs, that are listed.
const MOST: u32 = 200;

/// A list of served models.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ServedModelList)]
pub(super) struct ServedModels {
    /// Always `list`.
    object: &'static str,
    /// The models.
    data: Vec<ServedModelView>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ModelsQuery {
    /// Lists the checkpoints of this job instead.
    job: Option<String>,
}

fn of_base(row: &ModelRow) -> ServedModelView {
    let card = &row.card;
    ServedModelView {
        id: plain_id(&row.id).to_owned(),
        object: "model",
        created: row.created_at / 1000,
        owned_by: "rlood",
        root: plain_id(&row.id).to_owned(),
        parent: None,
        max_model_len: card.get("max_position_embeddings").and_then(serde_json::Value::as_u64),
        checkpoint: None,
    }
}

fn of_checkpoint(id: String, base: &str, row: &CheckpointRow, max_model_len: Option<u64>) -> ServedModelView {
    ServedModelView {
        id,
        object: "model",
        created: row.created_at / 1000,
        owned_by: "rlood",
        root: base.to_owned(),
        parent: Some(base.to_owned()),
        max_model_len,
        checkpoint: Some(row.id.to_string()),
    }
}

/// List the served models: the base models, and each job with a checkpoint.
///
/// A job's name means its best checkpoint by the job's metric, else its last one; `checkpoint` is the one that answers now.
#[utoipa::path(get, path = "/v1/models", tag = "Serving", params(ModelsQuery),
    responses(
        (status = 200, description = "The models, newest first", body = ServedModels),
        (status = 404, description = "There is no such job", body = OpenAiError)))]
pub(super) async fn list_served_models(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<ModelsQuery>,
) -> Result<Json<ServedModels>, Problem> {
    let mut data = Vec::new();
    if let Some(job) = &query.job {
        let id: JobId = job.parse().map_err(|_| Problem::not_found("job", job))?;
        if !state.store.job_owner(id).await?.is_some_and(|owner| caller.may_see(&owner)) {
            return Err(Problem::not_found("job", job));
        }
        let row = state.store.job_get(id).await?;
        let rows = state.store.checkpoint_list(id).await?;
        data.extend(
            rows.iter()
                .map(|checkpoint| of_checkpoint(checkpoint.id.to_string(), plain_id(&row.model), checkpoint, None)),
        );
        return Ok(Json(ServedModels { object: "list", data }));
    }
    let bases = state.store.model_list(caller.sees(), None, MOST).await?;
    data.extend(bases.data.iter().filter(|row| row.state == "ready").map(of_base));
    let filter = JobFilter { owner: caller.sees().map(str::to_owned), ..JobFilter::default() };
    let jobs: Vec<JobRow> = state.store.job_list(&filter, None, MOST).await?.data;
    for job in jobs {
        let result = match &job.ending {
            None => state.store.checkpoint_best(job.id).await?,
            ending => state.store.checkpoint_result(job.id, ending.as_ref()).await?,
        };
        if let Some(checkpoint) = result {
            data.push(of_checkpoint(job.id.to_string(), plain_id(&job.model), &checkpoint, None));
        }
    }
    Ok(Json(ServedModels { object: "list", data }))
}

/// Get a served model by its name.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "Serving",
    params(("id" = String, Path, description = "A base model's id, a checkpoint's id, or job_…[@last|@best|@STEP]")),
    responses(
        (status = 200, description = "The model", body = ServedModelView),
        (status = 404, description = "There is no such model: `model_not_found`", body = OpenAiError)))]
pub(super) async fn get_served_model(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<ServedModelView>, Problem> {
    get(&state, &caller, id).await
}

/// Get a base model whose id has a slash by its name.
#[utoipa::path(get, path = "/v1/models/{org}/{name}", tag = "Serving",
    params(("org" = String, Path, description = "The part of the id before the slash"),
        ("name" = String, Path, description = "The part of the id after the slash")),
    responses(
        (status = 200, description = "The model", body = ServedModelView),
        (status = 404, description = "There is no such model: `model_not_found`", body = OpenAiError)))]
pub(super) async fn get_served_model_of(
    State(state): State<AppState>,
    caller: Caller,
    Path((org, name)): Path<(String, String)>,
) -> Result<Json<ServedModelView>, Problem> {
    get(&state, &caller, format!("{org}/{name}")).await
}

async fn get(state: &AppState, caller: &Caller, id: String) -> Result<Json<ServedModelView>, Problem> {
    let Chosen { checkpoint, base, facts, .. } = resolve(state, caller, &id).await?;
    let most = Some(facts.card.max_position_embeddings as u64);
    Ok(Json(match checkpoint {
        Some(row) => of_checkpoint(id, plain_id(&base.id), &row, most),
        None => ServedModelView { max_model_len: most, ..of_base(&base) },
    }))
}
