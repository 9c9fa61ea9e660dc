//! Where reward services send answers later: `POST /reward-callbacks/{id}`. The token is the request's own; whoever has it
//! needs no key. An answer is durable before it is acknowledged.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::auth::check_bearer;
use super::contract::RewardResult;
use super::error::{Code, FieldError, Problem, ProblemBody};
use super::extract::{Json, Path, read_admitted_body};
use crate::callback::{CallbackTerms, Chunk, Flaw};
use crate::config::random_token;
use crate::id::RewardRequestId;
use crate::store::{Counted, Received, StoreError, clock_ms};

/// The routes of this module.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(take_callback))
}

/// Where services may answer, and how their tokens are derived.
pub(super) async fn terms(state: &AppState) -> Result<CallbackTerms, Problem> {
    let fresh = random_token().map_err(Problem::internal)?;
    let key = state.store.server_secret("reward_callbacks", &fresh).await?;
    Ok(CallbackTerms { public_url: state.config.public_url.clone(), key })
}

/// A part of an answer, or all of it.
#[derive(Deserialize, ToSchema)]
#[schema(as = RewardCallback)]
#[expect(dead_code, reason = "the document's schema; the body is read entry by entry")]
struct CallbackBody {
    /// The request's, if given.
    id: Option<RewardRequestId>,
    /// In any order; several calls may bring parts. May be left out with `done`.
    results: Option<Vec<RewardResult>>,
    /// Nothing else will come: samples without a result are asked for again.
    #[serde(default)]
    done: bool,
}

/// What became of the results of one call.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RewardCallbackTaken)]
struct TakenView {
    /// Kept.
    accepted: u64,
    /// For samples that have a result already: the first one stays.
    duplicate: u64,
    /// For samples that were not asked for.
    unknown: u64,
}

/// Answer a request to a reward service later
///
/// For services that answered 202. The address and the token stand in the request's `reply`; the token is valid for this
/// request, until its deadline. Call as often as results become known; `done: true` ends it, and so does a result for every
/// sample. A 200 means that the results are kept, whatever happens to this server or to the job's worker. A body with anything
/// wrong in it is refused as a whole: correct it and send it again.
#[utoipa::path(
    post, path = "/reward-callbacks/{id}", tag = "Reward contract", operation_id = "take_reward_callback", security(()),
    params(("id" = RewardRequestId, Path, description = "The request's id"),
           ("authorization" = String, Header, description = "`Bearer ` and the request's `reply.token`")),
    request_body = CallbackBody,
    responses(
        (status = 200, description = "Kept", body = TakenView),
        (status = 401, description = "The token is not this request's", body = ProblemBody),
        (status = 404, description = "No such request", body = ProblemBody),
        (status = 410, description = "Too late: the deadline is over, the request is answered, or the job is", body = ProblemBody),
        (status = 413, description = "More than 16 MiB: send it in parts", body = ProblemBody),
        (status = 422, description = "The body is not valid; `errors` says where", body = ProblemBody),
    )
)]
async fn take_callback(
    State(state): State<AppState>,
    Path(id): Path<String>,
    headers: HeaderMap,
    request: Request,
) -> Result<Json<TakenView>, Problem> {
    let token = check_bearer(&headers, &terms(&state).await?.token(&id));
    let unknown = || Problem::not_found("reward request", &id);
    match (state.store.callback_is_known(&id).await?, token) {
        (true, token) => token.map_err(|_| unauthorized(&headers))?,
        // Only this server can have made the token: the request was answered, or its job is over.
        (false, Ok(())) => {
            return Err(gone("nobody waits for this answer any more: the request is answered, or its job is over"));
        }
        (false, Err(_)) => return Err(unknown()),
    }
    let chunk = Chunk::read(&read_admitted_body(request).await?, &id).map_err(refused)?;
    match state.store.callback_receive(&id, &chunk, clock_ms()).await {
        Ok(Received::Counted(Counted { accepted, duplicate, unknown })) => {
            tracing::debug!(request = id, accepted, duplicate, unknown, done = chunk.done, "a reward service answered");
            Ok(Json(TakenView { accepted, duplicate, unknown }))
        }
        Ok(Received::Late) => Err(gone("the request's deadline is over: what was missing is asked for again")),
        Ok(Received::Over) => Err(gone("the request is answered: what was missing is asked for again")),
        Err(StoreError::NotFound { .. }) => Err(gone("nobody waits for this answer any more")),
        Err(error) => Err(error.into()),
    }
}

fn gone(detail: &str) -> Problem {
    Problem::new(Code::Gone, detail)
}

fn unauthorized(headers: &HeaderMap) -> Problem {
    let detail = match headers.contains_key(header::AUTHORIZATION) {
        true => "the token is not this request's: send the 'token' of its 'reply'",
        false => "send 'authorization: Bearer TOKEN' with the 'token' of the request's 'reply'",
    };
    Problem::new(Code::Unauthorized, detail).header(header::WWW_AUTHENTICATE, "Bearer realm=\"rlood\"")
}

fn refused(flaws: Vec<Flaw>) -> Problem {
    let item = |Flaw { pointer, code, detail }: Flaw| FieldError { pointer, code: code.to_owned(), detail };
    let detail = "nothing of this body is kept; see 'errors', correct it and send it again";
    Problem::new(Code::InvalidBody, detail).items(flaws.into_iter().map(item).collect())
}
