//! `POST /datasets/preview`: shows how a mapping would convert rows, and how a model would read their prompts. Nothing is
//! stored.

use axum::extract::{DefaultBodyLimit, Request, State};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt};
use utoipa_axum::routes;

use super::AppState;
use super::auth::Caller;
use super::auth::models::find as find_model;
use super::dataset_sources::preview_files;
use super::error::{Code, FieldError, Problem, ProblemBody, shortened};
use super::extract::{Json, Query};
use super::rows::row_errors;
use super::uploads::{CreateQuery, Purpose, Sent, SentRows, receive};
use crate::data::Preview;
use crate::modelcard::text::{Prompt, Text};
use crate::store::ModelRow;
use crate::store::background::spawn_blocking;

/// Default and maximum number of rows to show.
const ROWS: u32 = 5;
const MAX_ROWS: u32 = 50;
/// Maximum number of characters of a rendered prompt to show.
const SHOWN_CHARS: usize = 20_000;

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(preview_dataset).layer(DefaultBodyLimit::disable()))
}

/// Options of a preview.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PreviewQuery {
    /// Number of rows to show, 1 to 50. Default: 5.
    #[param(minimum = 1, maximum = 50, example = 5)]
    rows: Option<u32>,
    /// Id of a registered model. Prompts are then shown with its chat template applied, and with their token counts.
    #[param(example = "rlood/tiny")]
    model: Option<String>,
    /// Column or template of the prompt, as in POST /datasets. The keys below have the same meaning as there.
    prompt: Option<String>,
    /// Text of the system message.
    system: Option<String>,
    /// Whether a text prompt becomes a user message.
    chat: Option<String>,
    /// Keep only rows for which this expression is true.
    r#where: Option<String>,
    /// Keep one of the rows that are equal in these columns.
    unique: Option<String>,
    /// Keep only these columns.
    keep: Option<String>,
    /// Remove these columns from the rows.
    drop: Option<String>,
    /// Whether to remove assistant messages at the end of the prompt.
    cut_answer: Option<String>,
    /// Maximum number of rows.
    limit: Option<String>,
    /// Seed of a random sample of all rows.
    seed: Option<String>,
}

/// A preview of a dataset.
#[derive(Debug, Serialize, ToSchema)]
struct DatasetPreview {
    /// The columns of the first rows.
    columns: Vec<ColumnView>,
    /// The first rows, unchanged. A row that is not an object is among them; `errors` names it.
    source_rows: Vec<Value>,
    /// The first rows that pass the filters, as they would be stored.
    rows: Vec<MappedRow>,
    /// A `map` that would work, if the rows have no prompt; null otherwise. The preview does not apply it.
    #[schema(value_type = Option<Object>)]
    suggested_map: Option<Value>,
    /// Errors in the first rows.
    errors: Vec<FieldError>,
    /// Hub repository, commit, config, split and files; null for an upload.
    #[schema(value_type = Object)]
    origin: Value,
}

/// A column of the source.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PreviewColumn)]
struct ColumnView {
    /// Name of the column.
    name: String,
    /// Type of the values: `text`, `number`, `boolean`, `list`, `object` or `null`.
    kind: &'static str,
}

/// A row as it would be stored.
#[derive(Debug, Serialize, ToSchema)]
struct MappedRow {
    /// The row as JSON.
    #[schema(value_type = Object)]
    record: Value,
    /// The prompt as the model reads it, with the chat template applied to a chat.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// Number of tokens in the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    num_tokens: Option<usize>,
    /// Why the model cannot read the prompt; null if it can.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Preview the rows of a dataset.
///
/// Accepts the same bodies as POST /datasets: a file (the beginning is enough, except for parquet), a form with `mapping` and
/// `file`, or JSON that names a dataset on the hub. Nothing is stored. Errors in the first rows are listed in `errors`, and the
/// other rows are still shown.
#[utoipa::path(
    post, path = "/datasets/preview", tag = "Datasets",
    params(PreviewQuery),
    request_body(description = "The rows of the dataset, or a dataset on the hub (`HubDataset`)", content(
        (String = "application/x-ndjson"), (String = "text/csv"), (Value = "application/json", example = json!({"hub": "openai/gsm8k", "config": "main", "map": {"prompt": "question"}})),
        (String = "application/vnd.apache.parquet"), (Vec<u8> = "multipart/form-data"),
    )),
    responses(
        (status = 200, description = "The first rows of the dataset", body = DatasetPreview),
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
        let detail = format!("the parameter 'rows' must be between 1 and {MAX_ROWS}, not {wanted}");
        return Err(Problem::new(Code::InvalidQuery, detail.clone()).item("?rows", "out_of_range", detail));
    }
    let model = match model {
        None => None,
        Some(id) => Some(find(&state, &caller, &id).await?),
    };
    let Sent { name: _, rows } = receive(&state, &caller, create, request, Purpose::Preview).await?;
    let SentRows::Files(files, recipe) = rows else {
        return Err(Problem::internal("the preview of a dataset must not convert its files"));
    };
    let origin = files.origin.clone();
    let chat_default = model.as_ref().is_none_or(|row| row.card["has_chat_template"] != Value::Bool(false));
    let preview = preview_files(&state, *files, recipe, chat_default, wanted as usize).await?;
    let folder = model.map(|row| state.downloads.readable(&row));
    let shown = spawn_blocking(move || {
        let text = folder.map(|folder| Text::load(&folder)).transpose();
        text.map(|text| view(preview, text.as_ref(), origin)).map_err(|error| error.to_string())
    });
    let unusable =
        |detail: String| Problem::new(Code::InvalidModel, detail.clone()).item("?model", "unusable_model", detail);
    Ok(Json(shown.await.map_err(Problem::internal)?.map_err(unusable)?))
}

async fn find(state: &AppState, caller: &Caller, id: &str) -> Result<ModelRow, Problem> {
    find_model(state, caller, id).await?.ok_or_else(|| {
        let detail =
            format!("the model '{}' is not registered: register it with POST /models, or omit 'model'", shortened(id));
        Problem::new(Code::InvalidQuery, detail.clone()).item("?model", "unknown_model", detail)
    })
}

fn view(preview: Preview, text: Option<&Text>, origin: Value) -> DatasetPreview {
    let Preview { columns, source_rows, rows, suggested_map, rejected } = preview;
    let columns = columns.into_iter().map(|column| ColumnView { name: column.name, kind: column.kind }).collect();
    let rows = rows.into_iter().map(|record| read_as(text, record)).collect();
    let errors = rejected.map_or_else(Vec::new, |rejected| row_errors(rejected.errors));
    DatasetPreview { columns, source_rows, rows, suggested_map, errors, origin }
}

/// Renders the prompt of a mapped row as the model reads it, and counts its tokens.
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
