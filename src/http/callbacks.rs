//! Callbacks of reward services, `POST /reward-callbacks/{id}`, and of environments, `POST /environment-callbacks/{id}`. The request's
//! own token authorizes the call, no key is needed. The results are on disk before the server acknowledges them.

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, header};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouterExt as _};
use utoipa_axum::routes;

use super::AppState;
use super::auth::check_bearer;
use super::contract::RewardResult;
use super::error::{Code, FieldError, Problem, ProblemBody};
use super::extract::{Json, Path, read_admitted_body};
use crate::callback::{CallbackTerms, Chunk, Flaw};
use crate::config::random_token;
use crate::id::RewardRequestId;
use crate::reward::webhook::MAX_ANSWER_BYTES;
use crate::reward::webhook::environment_wire::{AnswerKind, StepReply, read_callback};
use crate::store::{Counted, Received, StoreError, clock_ms};

pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(take_callback))
        .routes(routes!(take_environment_callback).layer(DefaultBodyLimit::max(MAX_ANSWER_BYTES)))
}

/// Returns the base URL for callbacks of reward services, and the secret from which callback tokens are derived.
pub(super) async fn terms(state: &AppState) -> Result<CallbackTerms, Problem> {
    let fresh = random_token().map_err(Problem::internal)?;
    let key = state.store.server_secret("reward_callbacks", &fresh).await?;
    Ok(CallbackTerms { public_url: state.config.public_url.clone(), key })
}

/// Some or all results of a request.
#[derive(Deserialize, ToSchema)]
#[schema(as = RewardCallback)]
#[expect(dead_code, reason = "only the schema in the OpenAPI document; the handler reads the body entry by entry")]
struct CallbackBody {
    /// The id of the reward request; optional.
    id: Option<RewardRequestId>,
    /// Results in any order. Several calls may deliver them in parts. Optional with `done`.
    results: Option<Vec<RewardResult>>,
    /// No more results will come. The server requests samples without a result again.
    #[serde(default)]
    done: bool,
}

/// How many results of one call were accepted.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardCallbackTaken)]
struct TakenView {
    /// Number of results that were stored.
    accepted: u64,
    /// Number of results for samples that already have one; the first result counts.
    duplicate: u64,
    /// Number of results for samples that are not part of the request.
    unknown: u64,
}

/// The answer to a question, as in a response.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only the schema in the OpenAPI document; the handler knows which question is answered")]
struct EnvironmentCallback {
    /// The answer to a turn; that to a reset has its `messages` and `session`.
    #[serde(flatten)]
    answer: StepReply,
    /// The tools that the model may call, in the answer to a reset.
    #[serde(default)]
    #[schema(value_type = Vec<Object>)]
    tools: Vec<serde_json::Value>,
}

/// Answer a request to a reward service later
///
/// For services that answered 202. The address and the token are in the request's `reply`. The token is valid for this request,
/// until its deadline. Call as often as results become available. The request ends with `done: true`, or when every sample has a
/// result. A 200 means that the results are stored, whatever happens to this server or to the job's worker. A body with any error
/// is rejected as a whole: correct it and send it again.
#[utoipa::path(
    post, path = "/reward-callbacks/{id}", tag = "Reward contract", operation_id = "take_reward_callback", security(()),
    params(("id" = RewardRequestId, Path, description = "The id of the reward request"),
           ("authorization" = String, Header, description = "The word `Bearer`, a space and the `reply.token` of the reward request")),
    request_body = CallbackBody,
    responses(
        (status = 200, description = "Kept", body = TakenView),
        (status = 401, description = "The token does not belong to this reward request", body = ProblemBody),
        (status = 404, description = "There is no such reward request", body = ProblemBody),
        (status = 410, description = "The results are too late: the deadline has passed, the reward request is complete, or the job has ended", body = ProblemBody),
        (status = 413, description = "The body is larger than 16 MiB: send the results in several parts", body = ProblemBody),
        (status = 422, description = "The request's body is not valid; `errors` lists the invalid fields", body = ProblemBody),
    )
)]
async fn take_callback(
    State(state): State<AppState>,
    Path(id): Path<String>,
    headers: HeaderMap,
    request: Request,
) -> Result<Json<TakenView>, Problem> {
    let read = |body: &[u8], id: &str, parts: &[String]| match parts.first().and_then(|part| AnswerKind::of_part(part))
    {
        Some(_) if is_question(id) => Err(unknown(id)),
        _ => Chunk::read(body, id).map_err(refused),
    };
    take(&state, &id, &headers, request, read).await
}

/// Answer a request to an environment later
///
/// For environments that answered 202 to `env.reset.request` or `env.step.request`. The address and the token are in the request's `reply`.
/// The token is valid for this request, until its deadline. The body is the answer, as in a response; an error must not be retryable. A 200
/// means that the answer is stored, whatever happens to this server or to the job's worker; of several answers the first counts. A body with
/// any error is rejected: correct it and send it again.
#[utoipa::path(
    post, path = "/environment-callbacks/{id}", tag = "Environment contract", operation_id = "take_environment_callback", security(()),
    params(("id" = String, Path, description = "The id of the request to the environment"),
           ("authorization" = String, Header, description = "The word `Bearer`, a space and the `reply.token` of the request")),
    request_body = EnvironmentCallback,
    responses(
        (status = 200, description = "Kept", body = TakenView),
        (status = 401, description = "The token does not belong to this request", body = ProblemBody),
        (status = 404, description = "There is no such request to an environment", body = ProblemBody),
        (status = 410, description = "The answer is too late: the deadline has passed, the request is answered, or the job has ended", body = ProblemBody),
        (status = 413, description = "The body is larger than 1 MiB", body = ProblemBody),
        (status = 422, description = "The request's body is not valid; `errors` lists the invalid fields", body = ProblemBody),
    )
)]
async fn take_environment_callback(
    State(state): State<AppState>,
    Path(id): Path<String>,
    headers: HeaderMap,
    request: Request,
) -> Result<Json<TakenView>, Problem> {
    let read = |body: &[u8], id: &str, parts: &[String]| match parts.first().and_then(|part| AnswerKind::of_part(part))
    {
        Some(kind) if is_question(id) => read_callback(body, id, kind).map_err(refused),
        Some(_) | None => Err(unknown(id)),
    };
    take(&state, &id, &headers, request, read).await
}

/// Whether an id is that of a question to an environment.
fn is_question(id: &str) -> bool {
    id.starts_with("env_")
}

/// Stores a part of the answer to a request, or the whole of it. `read` checks the body; it gets the body, the request's id, and the names of
/// the parts of the answer.
async fn take(
    state: &AppState,
    id: &str,
    headers: &HeaderMap,
    request: Request,
    read: impl FnOnce(&[u8], &str, &[String]) -> Result<Chunk, Problem>,
) -> Result<Json<TakenView>, Problem> {
    let token = check_bearer(headers, &terms(state).await?.token(id));
    let parts = match (state.store.callback_parts(id).await?, token) {
        (Some(parts), token) => {
            token.map_err(|_| unauthorized(headers))?;
            parts
        }
        // The token is valid, so this server created the request, which is no longer open: it is complete, or its job has
        // ended.
        (None, Ok(())) => {
            return Err(gone(match is_question(id) {
                true => "no job is waiting for this answer: the request is answered, or its job has ended",
                false => "no job is waiting for this answer: the reward request is complete, or its job has ended",
            }));
        }
        (None, Err(_)) => return Err(unknown(id)),
    };
    let chunk = read(&read_admitted_body(request).await?, id, &parts)?;
    match state.store.callback_receive(id, &chunk, clock_ms()).await {
        Ok(Received::Counted(Counted { accepted, duplicate, unknown })) => {
            tracing::debug!(
                request = id,
                accepted,
                duplicate,
                unknown,
                done = chunk.done,
                "a service sent late results"
            );
            Ok(Json(TakenView { accepted, duplicate, unknown }))
        }
        Ok(Received::Late) => Err(gone(match is_question(id) {
            true => "the deadline of the request has passed: its episode has no reward",
            false => "the deadline of the reward request has passed; the server requests missing results again",
        })),
        Ok(Received::Over) => Err(gone(match is_question(id) {
            true => "the request is answered",
            false => "the reward request is complete; the server requests missing results again",
        })),
        Err(StoreError::NotFound { .. }) => Err(gone("no job is waiting for the answer to this request")),
        Err(error) => Err(error.into()),
    }
}

fn unknown(id: &str) -> Problem {
    Problem::not_found(if is_question(id) { "request to an environment" } else { "reward request" }, id)
}

fn gone(detail: &str) -> Problem {
    Problem::new(Code::Gone, detail)
}

fn unauthorized(headers: &HeaderMap) -> Problem {
    let detail = match headers.contains_key(header::AUTHORIZATION) {
        true => "the bearer token belongs to another request: send the 'token' of this request's 'reply'",
        false => "send 'authorization: Bearer TOKEN' with the 'token' of the request's 'reply'",
    };
    Problem::new(Code::Unauthorized, detail).header(header::WWW_AUTHENTICATE, "Bearer realm=\"rlood\"")
}

fn refused(flaws: Vec<Flaw>) -> Problem {
    let item = |Flaw { pointer, code, detail }: Flaw| FieldError { pointer, code: code.to_owned(), detail };
    let detail = "the server stored no result of this body; see 'errors', correct the body and send it again";
    Problem::new(Code::InvalidBody, detail).items(flaws.into_iter().map(item).collect())
}
