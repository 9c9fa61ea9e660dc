//! POST /datasets/preview: what rows would become, and how a model would read them. Nothing is stored.

use axum::extract::{DefaultBodyLimit, Request, State};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::dataset_sources::look;
use super::error::{Code, FieldError, Problem, ProblemBody, shortened};
use super::extract::{Json, Query};
use super::rows::row_errors;
use super::uploads::{CreateQuery, Purpose, Sent, SentRows, receive};
use crate::data::Preview;
use crate::modelcard::text::{Prompt, Text};
use crate::store::{ModelRow, StoreError};

/// Rows that are shown unless asked otherwise, and at most.
const ROWS: u32 = 5;
const MAX_ROWS: u32 = 50;
/// Of a prompt as the model reads it, characters that are shown.
const SHOWN_CHARS: usize = 20_000;

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(preview_dataset).layer(DefaultBodyLimit::disable()))
}

/// What to show.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PreviewQuery {
    /// Rows, 1 to 50.
    #[param(minimum = 1, maximum = 50, example = 5)]
    rows: Option<u32>,
    /// A registered model: prompts are shown as it reads them, with their tokens.
    #[param(example = "rlood/tiny")]
    model: Option<String>,
    /// As of POST /datasets, with the keys below.
    prompt: Option<String>,
    /// The system message.
    system: Option<String>,
    /// Whether a text becomes a user's message.
    chat: Option<String>,
    /// Only rows for which this is true.
    r#where: Option<String>,
    /// One row of those that agree in these columns.
    unique: Option<String>,
    /// Only these columns.
    keep: Option<String>,
    /// Without these columns.
    drop: Option<String>,
    /// Without assistant messages at the prompt's end.
    cut_answer: Option<String>,
    /// So many rows.
    limit: Option<String>,
    /// A sample of all.
    seed: Option<String>,
}

/// A look at rows.
#[derive(Debug, Serialize, ToSchema)]
struct DatasetPreview {
    /// The columns of the first rows.
    columns: Vec<ColumnView>,
    /// The first rows as they are.
    #[schema(value_type = Vec<Object>)]
    source_rows: Vec<Value>,
    /// What the first rows that stay become.
    rows: Vec<MappedRow>,
    /// Where there is no prompt: a `map` that would fit. It is not applied.
    #[schema(value_type = Option<Object>)]
    suggested_map: Option<Value>,
    /// What is wrong with the first rows.
    errors: Vec<FieldError>,
    /// Of the hub: repository, commit, config, split and files.
    #[schema(value_type = Object)]
    origin: Value,
}

/// A column of the source.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PreviewColumn)]
struct ColumnView {
    /// Its name.
    name: String,
    /// `text`, `number`, `boolean`, `list`, `object` or `null`.
    kind: &'static str,
}

/// A row as it would be stored.
#[derive(Debug, Serialize, ToSchema)]
struct MappedRow {
    /// The row.
    #[schema(value_type = Object)]
    record: Value,
    /// The prompt as the model reads it: by its chat template where it is a chat.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// Tokens of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    num_tokens: Option<usize>,
    /// Why the model cannot read it.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Look at what rows would become.
///
/// The same bodies as POST /datasets: a file (its beginning is enough, but of parquet), a form with `mapping` and `file`, or a data set of the hub as
/// JSON. Nothing is stored. What is wrong with the first rows is in `errors`, and the rest is shown all the same.
#[utoipa::path(
    post, path = "/datasets/preview", tag = "Datasets",
    params(PreviewQuery),
    request_body(description = "The rows, or where they are", content(
        (String = "application/x-ndjson"), (String = "text/csv"), (crate::spec::HubDataset = "application/json"),
        (String = "application/vnd.apache.parquet"), (Vec<u8> = "multipart/form-data"),
    )),
    responses(
        (status = 200, description = "The first rows", body = DatasetPreview),
        (status = 422, description = "The file, or the mapping, cannot be read at all", body = ProblemBody),
    ),
)]
async fn preview_dataset(
    State(state): State<AppState>,
    caller: Caller,
    Query(query): Query<PreviewQuery>,
    request: Request,
) -> Result<Json<DatasetPreview>, Problem> {
    let PreviewQuery {
        rows: wanted,
        model,
        prompt,
        system,
        chat,
        r#where,
        unique,
        keep,
        drop,
        cut_answer,
        limit,
        seed,
    } = query;
    let create = CreateQuery { name: None, prompt, system, chat, r#where, unique, keep, drop, cut_answer, limit, seed };
    let wanted = wanted.unwrap_or(ROWS);
    if !(1..=MAX_ROWS).contains(&wanted) {
        let detail = format!("rows must be 1 to {MAX_ROWS}, not {wanted}");
        return Err(Problem::new(Code::InvalidQuery, detail.clone()).item("?rows", "out_of_range", detail));
    }
    let model = match model {
        None => None,
        Some(id) => Some(find(&state, &caller, &id).await?),
    };
    let Sent { name: _, rows } = receive(&state, &caller, create, request, Purpose::Look).await?;
    let SentRows::Files(files, recipe) = rows else {
        return Err(Problem::internal("a look keeps files as they are"));
    };
    let origin = files.origin.clone();
    let chat_default = model.as_ref().is_none_or(|row| row.card["has_chat_template"] != Value::Bool(false));
    let looked = look(&state, *files, recipe, chat_default, wanted as usize).await?;
    let folder = model.map(|row| state.downloads.readable(&row));
    let shown = tokio::task::spawn_blocking(move || {
        let text = folder.map(|folder| Text::load(&folder)).transpose();
        text.map(|text| view(looked, text.as_ref(), origin)).map_err(|error| error.to_string())
    });
    let unusable =
        |detail: String| Problem::new(Code::InvalidModel, detail.clone()).item("?model", "unusable_model", detail);
    Ok(Json(shown.await.map_err(Problem::internal)?.map_err(unusable)?))
}

async fn find(state: &AppState, caller: &Caller, id: &str) -> Result<ModelRow, Problem> {
    match state.store.model_get(id).await {
        Ok(row) if caller.may_use_model(&row.owner) => Ok(row),
        Ok(_) | Err(StoreError::NotFound { .. }) => {
            let detail = format!(
                "no model '{}' is registered: register it with POST /models, or leave model out",
                shortened(id)
            );
            Err(Problem::new(Code::InvalidQuery, detail.clone()).item("?model", "unknown_model", detail))
        }
        Err(error) => Err(error.into()),
    }
}

fn view(looked: Preview, text: Option<&Text>, origin: Value) -> DatasetPreview {
    let Preview { columns, source_rows, rows, suggested_map, rejected } = looked;
    let columns = columns.into_iter().map(|column| ColumnView { name: column.name, kind: column.kind }).collect();
    let rows = rows.into_iter().map(|record| read_as(text, record)).collect();
    let errors = rejected.map_or_else(Vec::new, |rejected| row_errors(rejected.errors));
    DatasetPreview { columns, source_rows, rows, suggested_map, errors, origin }
}

/// A row, with its prompt as the model reads it.
fn read_as(text: Option<&Text>, record: Value) -> MappedRow {
    let Some(text) = text else { return MappedRow { record, text: None, num_tokens: None, problem: None } };
    let kwargs = Map::new();
    let (rendered, prompt) = match &record["prompt"] {
        Value::Array(messages) => (text.render_chat(messages, true, &kwargs), Prompt::Chat(messages.clone())),
        other => {
            let prompt = other.as_str().unwrap_or_default().to_owned();
            (Ok(prompt.clone()), Prompt::Text(prompt))
        }
    };
    let ids = rendered.and_then(|rendered| Ok((rendered, text.prompt_ids(&prompt, &kwargs)?.len())));
    match ids {
        Ok((rendered, tokens)) => {
            let rendered = rendered.chars().take(SHOWN_CHARS).collect();
            MappedRow { record, text: Some(rendered), num_tokens: Some(tokens), problem: None }
        }
        Err(error) => MappedRow { record, text: None, num_tokens: None, problem: Some(super::error::chain(&error)) },
    }
}
