//! vLLM's tokenizer routes, with which evaluation harnesses work without the model's files: `/tokenize`, `/detokenize`,
//! `/tokenizer_info`. They are at the root beside `/v1`, and under `/serve/{model}` for a server with several base models.

use std::sync::Arc;

use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::Facts;
use super::chat::rendered;
use super::fields::{check_ids, invalid};
use super::names::resolve;
use super::tools::ToolUse;
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::error::Problem;
use crate::http::extract::{Json, Path};
use crate::openai::{ChatFields, DetokenizeRequest, Detokenized, OpenAiError, TokenizeRequest, Tokenized};
use crate::store::background::spawn_blocking;

/// The facts of a tokenizer that clients ask for.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = TokenizerInfo)]
pub(super) struct Info {
    /// Always `rlood`.
    tokenizer_class: &'static str,
    /// The text of the end-of-sequence token.
    eos_token: Option<String>,
    /// The text of the beginning-of-sequence token.
    bos_token: Option<String>,
    /// The text of the padding token.
    pad_token: Option<String>,
    /// The chat template, as Jinja source.
    chat_template: Option<String>,
    /// Maximum number of tokens of prompt and answer.
    model_max_length: u64,
}

/// The model of a request without a name: the only base model that the caller sees.
async fn facts(state: &AppState, caller: &Caller, model: Option<&str>) -> Result<Arc<Facts>, Problem> {
    if let Some(model) = model {
        return Ok(resolve(state, caller, model).await?.facts);
    }
    let rows = state.store.model_list(caller.sees(), None, 2).await?.data;
    let mut ready = rows.into_iter().filter(|row| row.state == "ready");
    match (ready.next(), ready.next()) {
        (Some(only), None) => state.texts.of(only.clone(), only.sha256).await,
        (None, _) => Err(invalid("model", "missing", "the server has no base model: register one with POST /models")),
        (Some(_), Some(_)) => {
            let detail =
                "the server has several base models: name one in 'model', or use /serve/{model}/v1 as the base URL";
            Err(invalid("model", "missing", detail))
        }
    }
}

/// Convert a text or a chat to token ids.
#[utoipa::path(post, path = "/tokenize", tag = "Serving", request_body = TokenizeRequest,
    responses(
        (status = 200, description = "The token ids", body = Tokenized),
        (status = 400, description = "The request is not valid; `param` names the field", body = OpenAiError),
        (status = 404, description = "There is no such model: `model_not_found`", body = OpenAiError)))]
pub(super) async fn tokenize(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<TokenizeRequest>,
) -> Result<Json<Tokenized>, Problem> {
    let facts = facts(&state, &caller, body.model.as_deref()).await?;
    let encode = move || {
        let failed = |error: &dyn std::fmt::Display| invalid("prompt", "prompt_not_encodable", error.to_string());
        let tokens = match (body.prompt, body.messages) {
            (Some(text), None) => facts.text.encode(&text, body.add_special_tokens.unwrap_or(true)),
            (None, Some(messages)) => {
                let chat = ChatFields {
                    messages,
                    tools: body.tools,
                    add_generation_prompt: body.add_generation_prompt,
                    chat_template_kwargs: body.chat_template_kwargs,
                    ..ChatFields::default()
                };
                let tools = ToolUse::of(&chat, &facts)?;
                let text = rendered(&facts, &chat, tools.as_ref().map_or(&[], ToolUse::schemas))?;
                facts.text.encode(&text, body.add_special_tokens.unwrap_or(false))
            }
            _ => return Err(invalid("prompt", "invalid", "give either 'prompt' or 'messages'")),
        };
        let tokens = tokens.map_err(|error| failed(&error))?;
        let max_model_len = facts.card.max_position_embeddings as u64;
        Ok(Json(Tokenized { count: tokens.len(), tokens, max_model_len }))
    };
    spawn_blocking(encode).await.map_err(Problem::internal)?
}

/// Convert token ids to text.
#[utoipa::path(post, path = "/detokenize", tag = "Serving", request_body = DetokenizeRequest,
    responses(
        (status = 200, description = "The text", body = Detokenized),
        (status = 400, description = "The request is not valid; `param` names the field", body = OpenAiError),
        (status = 404, description = "There is no such model: `model_not_found`", body = OpenAiError)))]
pub(super) async fn detokenize(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<DetokenizeRequest>,
) -> Result<Json<Detokenized>, Problem> {
    let facts = facts(&state, &caller, body.model.as_deref()).await?;
    check_ids("tokens", &body.tokens, &facts)?;
    let decode = move || {
        let text = facts.text.decode(&body.tokens, false);
        text.map_err(|error| invalid("tokens", "invalid_token", error.to_string()))
    };
    let prompt = spawn_blocking(decode).await.map_err(Problem::internal)??;
    Ok(Json(Detokenized { prompt }))
}

/// Get facts of the tokenizer.
#[utoipa::path(get, path = "/tokenizer_info", tag = "Serving",
    responses(
        (status = 200, description = "The facts", body = Info),
        (status = 400, description = "The server has several base models, or none", body = OpenAiError)))]
pub(super) async fn tokenizer_info(State(state): State<AppState>, caller: Caller) -> Result<Json<Info>, Problem> {
    Ok(Json(info(&*facts(&state, &caller, None).await?)))
}

fn info(facts: &Facts) -> Info {
    let special = |name: &str| facts.text.special_token(name).map(str::to_owned);
    Info {
        tokenizer_class: "rlood",
        eos_token: special("eos_token"),
        bos_token: special("bos_token"),
        pad_token: special("pad_token"),
        chat_template: facts.card.chat_template.clone(),
        model_max_length: facts.card.max_position_embeddings as u64,
    }
}

/// Convert a text or a chat to token ids of the path's model.
#[utoipa::path(post, path = "/serve/{model}/tokenize", tag = "Serving",
    params(("model" = String, Path, description = "The model; a slash in it is written %2F")), request_body = TokenizeRequest,
    responses((status = 200, description = "The token ids", body = Tokenized),
        (status = 404, description = "There is no such model: `model_not_found`", body = OpenAiError)))]
pub(super) async fn tokenize_of(
    state: State<AppState>,
    caller: Caller,
    Path(model): Path<String>,
    Json(body): Json<TokenizeRequest>,
) -> Result<Json<Tokenized>, Problem> {
    tokenize(state, caller, Json(TokenizeRequest { model: Some(model), ..body })).await
}

/// Convert token ids of the path's model to text.
#[utoipa::path(post, path = "/serve/{model}/detokenize", tag = "Serving",
    params(("model" = String, Path, description = "The model; a slash in it is written %2F")), request_body = DetokenizeRequest,
    responses((status = 200, description = "The text", body = Detokenized),
        (status = 404, description = "There is no such model: `model_not_found`", body = OpenAiError)))]
pub(super) async fn detokenize_of(
    state: State<AppState>,
    caller: Caller,
    Path(model): Path<String>,
    Json(body): Json<DetokenizeRequest>,
) -> Result<Json<Detokenized>, Problem> {
    detokenize(state, caller, Json(DetokenizeRequest { model: Some(model), ..body })).await
}

/// Get facts of the tokenizer of the path's model.
#[utoipa::path(get, path = "/serve/{model}/tokenizer_info", tag = "Serving",
    params(("model" = String, Path, description = "The model; a slash in it is written %2F")),
    responses((status = 200, description = "The facts", body = Info),
        (status = 404, description = "There is no such model: `model_not_found`", body = OpenAiError)))]
pub(super) async fn tokenizer_info_of(
    State(state): State<AppState>,
    caller: Caller,
    Path(model): Path<String>,
) -> Result<Json<Info>, Problem> {
    Ok(Json(info(&*facts(&state, &caller, Some(&model)).await?)))
}
