//! Types of the contracts v1 of rewards and environments, for the `webhooks` section of the OpenAPI document. The code that implements
//! the contracts is in `reward`; it uses the types of the environment contract itself.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::openapi::path::Paths;
use utoipa::openapi::{Components, OpenApi};
use utoipa::{OpenApi as _, ToSchema};

use super::list::Time;
use crate::environment::EpisodeTurn;
use crate::event::FinishReason;
use crate::id::{JobId, RewardRequestId};
use crate::reward::webhook::environment_wire::{
    AcceptedReply, CloseRequest, PingReply, PingRequest, ResetReply, ResetRequest, StepReply, StepRequest,
};

/// A request to score completions.
#[derive(Serialize, ToSchema)]
struct RewardRequest {
    /// Type of the request: always `reward.score.request`.
    #[serde(rename = "type")]
    #[schema(pattern = "^reward\\.score\\.request$", example = "reward.score.request")]
    kind: String,
    /// Version of the contract: `1`.
    #[schema(pattern = "^1$", example = "1")]
    version: String,
    /// Unique id of the request, also in `webhook-id` and `idempotency-key`. All attempts of a request use the same id.
    id: RewardRequestId,
    /// When the request was created. Retries repeat the same bytes.
    #[schema(value_type = Time)]
    timestamp: Time,
    /// The job that sends the request.
    job: RewardRequestJob,
    /// The job's reward that is requested.
    reward: RewardRequestReward,
    /// Time limit for results in ms, counted from the first attempt. Later results are ignored.
    #[schema(example = 300_000)]
    deadline_ms: u64,
    /// How the service may respond.
    reply: RewardRequestReply,
    /// Completions to score, in whole groups: all completions of a prompt together, unless a group
    /// is larger than `max_batch_samples`.
    #[schema(min_items = 1)]
    samples: Vec<RewardRequestSample>,
}

/// The job that sends a request.
#[derive(Serialize, ToSchema)]
struct RewardRequestJob {
    /// The job's id, `job_…`.
    id: JobId,
    /// Number of optimizer steps completed when the completions were sampled.
    step: u64,
    /// The purpose of the scores.
    phase: RewardPhase,
}

/// The purpose of the scores of a request.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[expect(dead_code, reason = "only describes the reward contract in the OpenAPI document")]
enum RewardPhase {
    /// Training of the job's model.
    Train,
    /// An evaluation on held-out prompts.
    Eval,
    /// A test before the job exists: `POST /jobs/validate?probe=true` or `POST /rewards/test`. The job id is a placeholder.
    Probe,
}

/// The job's reward that is requested.
#[derive(Serialize, ToSchema)]
struct RewardRequestReward {
    /// The name of the reward.
    #[schema(example = "helpful")]
    name: String,
    /// The reward's `params` from the job, unchanged.
    params: Value,
}

/// How the service may respond.
#[derive(Serialize, ToSchema)]
struct RewardRequestReply {
    /// Response modes that the server accepts. `sync`: scores in the response to this request. `async`: a 202 response now, scores
    /// later at `callback_url`. A 202 with a `status_url` is always accepted.
    #[schema(example = json!(["sync", "async"]))]
    modes: Vec<String>,
    /// Address for results that are sent later (`POST /reward-callbacks/{id}`). Absent if the server has no public address.
    #[schema(example = "https://rlood.example/reward-callbacks/rwr_01jd0000000000000000000000")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    callback_url: Option<String>,
    /// Token for `callback_url`, to send as `Authorization: Bearer TOKEN`. Valid for this request only, until its
    /// deadline. Absent without `callback_url`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    token: Option<String>,
}

/// One completion to score.
#[derive(Serialize, ToSchema)]
struct RewardRequestSample {
    /// Id of the sample, unique in the request. The answer repeats it.
    #[schema(example = "s_0")]
    sample_id: String,
    /// Id of the group. Completions of one prompt share it.
    #[schema(example = "g_0")]
    group_id: String,
    /// Id of the dataset row.
    #[schema(example = "row_17")]
    prompt_id: String,
    /// The prompt as chat messages; null if the dataset has plain text.
    #[schema(value_type = Option<Vec<Value>>)]
    messages: Option<Value>,
    /// The prompt as text, with the chat template applied.
    prompt: String,
    /// The text of the completion, without special tokens.
    completion: String,
    /// Why the completion ended.
    finish_reason: FinishReason,
    /// Number of tokens in the completion.
    num_tokens: u32,
    /// Token ids of the completion. Present if the reward has `completion_ids: true`.
    completion_ids: Option<Vec<u32>>,
    /// All other columns of the dataset row.
    #[schema(value_type = std::collections::BTreeMap<String, Value>)]
    columns: Value,
    /// The images of the prompt, in order. Absent if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    images: Option<Vec<RewardImage>>,
    /// The turns of the episode. Present in jobs with an environment; `messages` is then the whole chat, and `completion` is
    /// the last answer of the model.
    turns: Option<Vec<EpisodeTurn>>,
}

/// A reference to an image of a prompt.
#[derive(Serialize, ToSchema)]
struct RewardImage {
    /// SHA-256 of the image's bytes, in lower-case hex.
    sha256: String,
    /// Format of the image: `image/png`, `image/jpeg`, `image/webp` or `image/gif`.
    #[schema(example = "image/png")]
    media_type: String,
    /// Width of the image, in pixels.
    width: u32,
    /// Height of the image, in pixels.
    height: u32,
    /// Address of the image, readable for a week without a key. Absent if the server has no public address.
    url: Option<String>,
}

/// The scores, in any of these forms.
#[derive(Deserialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "only describes the reward contract in the OpenAPI document")]
enum RewardAnswer {
    /// Scores by sample id (recommended).
    Results(RewardResults),
    /// One score per sample, in the order of the request.
    Rewards {
        /// One value per sample; null = the reward does not apply to the sample.
        rewards: Vec<Option<f64>>,
    },
    /// One score per sample, in the order of the request.
    Scores {
        /// One value per sample; null = the reward does not apply to the sample.
        scores: Vec<Option<f64>>,
    },
    /// One score per sample, in the order of the request.
    Array(Vec<Option<f64>>),
    /// A single score, for a request with one sample.
    One {
        /// The score; null = the reward does not apply to the sample.
        #[schema(required)]
        reward: Option<f64>,
    },
}

/// The request is accepted and will be answered later.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only describes the reward contract in the OpenAPI document")]
struct RewardAccepted {
    /// Id of the request, or an id of the service.
    id: Option<String>,
    /// Estimated time until the results are ready, in ms. `Retry-After` has the same meaning.
    eta_ms: Option<u64>,
    /// Address that the server polls with GET. 200 with `results` (and `done`) has the meaning of a callback; 202 or 204 = not yet;
    /// 404 or 410 = the service no longer knows the request, so the server sends it again. May be relative. The reward's `headers`
    /// are sent only if it has the scheme, host and port of the reward's `url`.
    status_url: Option<String>,
}

/// Scores by sample id. Unknown ids are ignored and counted, the first of duplicate results counts, and missing
/// samples are requested again.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only describes the reward contract in the OpenAPI document")]
struct RewardResults {
    /// Version of the contract: `1`.
    version: Option<String>,
    /// The id of the request.
    id: Option<String>,
    /// Results in any order.
    results: Vec<RewardResult>,
}

/// The score of one sample, or the reason why it is missing.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only describes the reward contract in the OpenAPI document")]
pub(super) struct RewardResult {
    /// The id of the sample in the request.
    sample_id: String,
    /// A finite number. Null without `error`: the reward does not apply to this sample. Null with `error`: the reward is missing,
    /// which is never treated as 0.
    reward: Option<f64>,
    /// Why the reward is missing.
    error: Option<RewardError>,
    /// Additional figures from the service.
    #[schema(value_type = Option<std::collections::BTreeMap<String, Value>>)]
    metrics: Option<Value>,
    /// An explanation from the service.
    reason: Option<String>,
}

/// Why a reward is missing.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only describes the reward contract in the OpenAPI document")]
struct RewardError {
    /// An error code of the service.
    #[schema(example = "judge_timeout")]
    code: String,
    /// Whether the server should request this sample again.
    #[serde(default)]
    retryable: bool,
}

/// Some or all scores of a request.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only describes the reward contract in the OpenAPI document")]
struct RewardCallback {
    /// The id of the request; optional.
    id: Option<RewardRequestId>,
    /// Results in any order. Several calls may deliver them in parts. Optional with `done`.
    results: Option<Vec<RewardResult>>,
    /// No more results will come. The server requests samples without a result again.
    #[serde(default)]
    done: bool,
}

/// How many results of one call were accepted.
#[derive(Serialize, ToSchema)]
struct RewardCallbackTaken {
    /// Number of results that were stored.
    accepted: u64,
    /// Number of results for samples that already have one; the first result counts.
    duplicate: u64,
    /// Number of results for samples that are not part of the request.
    unknown: u64,
}

/// A check that the service is reachable.
#[derive(Serialize, ToSchema)]
struct RewardPing {
    /// Type of the request: always `reward.ping`.
    #[serde(rename = "type")]
    #[schema(pattern = "^reward\\.ping$", example = "reward.ping")]
    kind: String,
    /// Version of the contract: `1`.
    #[schema(pattern = "^1$", example = "1")]
    version: String,
    /// Unique id of this request.
    id: RewardRequestId,
}

/// Optional capabilities of a service.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "only describes the reward contract in the OpenAPI document")]
struct RewardPong {
    /// Maximum number of samples in one request.
    max_batch_samples: Option<u32>,
    /// Supported response modes: `sync`, `async`.
    modes: Option<Vec<String>>,
    /// Lowest and highest reward that the service returns.
    range: Option<Vec<f64>>,
}

/// Score a batch of completions
///
/// The server sends this request to the `url` of each `webhook` reward, once per batch of whole groups.
///
/// With a `secret` (`whsec_…`) the server signs requests by Standard Webhooks: `webhook-signature` is `v1,` and the base64
/// HMAC-SHA256 of `id.timestamp.body` under the decoded secret. Connection errors, timeouts, 408, 425, 429 and 5xx are retried with
/// the same id and bytes (fresh timestamp and signature), and `Retry-After` is honored. 413 splits the request, 410 pauses the job,
/// and redirects are never followed. A missing reward is never treated as 0.
///
/// A service that needs longer answers 202. It then sends the results to `reply.callback_url`, in parts if necessary, or offers
/// them at its `status_url`, until `deadline_ms` after the first attempt (days, if the job allows it). The server does not repeat
/// the request while it waits, even after a restart of the server or of the worker. Results that are missing at the
/// deadline are requested again.
#[utoipa::path(
    post, path = "/reward.score.request", tag = "Reward contract", operation_id = "reward_score_request",
    params(
        ("webhook-id" = String, Header, description = "The id of the reward request"),
        ("webhook-timestamp" = String, Header, description = "The Unix time of this delivery attempt, in seconds"),
        ("webhook-signature" = Option<String>, Header, description = "The signature `v1,BASE64`; two signatures, separated by a space, while a secret is rotated (`previous_secret`): accept the request if one of them is valid"),
        ("idempotency-key" = String, Header, description = "The id of the reward request"),
    ),
    request_body = RewardRequest,
    responses(
        (status = 200, description = "The scores", body = RewardAnswer,
            example = json!({"version": "1", "id": "rwr_01jd0000000000000000000000", "results": [
                {"sample_id": "s_0", "reward": 0.73, "reason": "short and right"},
                {"sample_id": "s_1", "reward": null, "error": {"code": "judge_timeout", "retryable": true}}]})),
        (status = 202, description = "The service will send the scores later", body = Option<RewardAccepted>,
            example = json!({"id": "rwr_01jd0000000000000000000000", "eta_ms": 60000, "status_url": "https://rm.example/status/rwr_01jd0000000000000000000000"})),
        (status = 410, description = "The reward service is gone for good: the job pauses"),
        (status = 413, description = "The request is too large: the server splits it into halves"),
        (status = 429, description = "The service gets too many requests: the server retries after `Retry-After`"),
        (status = "5XX", description = "The request failed: the server retries it with growing pauses"),
    ),
)]
#[expect(dead_code, reason = "only describes the reward contract in the OpenAPI document")]
fn reward_score_request() {}

/// Check that a service is reachable
///
/// Sent by the reward test endpoint and by job validation. Any 2xx status means success; the body is optional.
#[utoipa::path(
    post, path = "/reward.ping", tag = "Reward contract", operation_id = "reward_ping",
    request_body = RewardPing,
    responses((status = "2XX", description = "The reward service is reachable", body = Option<RewardPong>)),
)]
#[expect(dead_code, reason = "only describes the reward contract in the OpenAPI document")]
fn reward_ping() {}

/// Begin an episode
///
/// The server sends this request to the `url` of the job's `environment`, signed and retried as requests to rewards, with the header
/// `rlood-episode`. A repeated request has the same id and bytes and must get the same answer. The same row and `episode.seed` must
/// always begin with the same messages and tools.
///
/// An environment that needs longer answers 202, here and to `env.step.request`. It then sends the answer to `reply.callback_url`, or offers
/// it at its `status_url`, until `deadline_ms` after the 202. The server does not repeat the request while it waits, even after a restart of
/// the server or of the worker. Without an answer at the deadline the episode has no reward, which is never treated as 0.
#[utoipa::path(
    post, path = "/env.reset.request", tag = "Environment contract", operation_id = "env_reset",
    request_body = ResetRequest,
    responses(
        (status = 200, description = "The beginning of the episode", body = ResetReply),
        (status = 202, description = "The environment will send the answer later", body = Option<AcceptedReply>,
            example = json!({"eta_ms": 60000, "status_url": "/status/env_0123456789abcdef0123456789"})),
        (status = 410, description = "The episode cannot begin; it is tried again as its next attempt"),
        (status = 429, description = "The environment gets too many requests: the server retries after `Retry-After`"),
        (status = "5XX", description = "The request failed: the server retries it with growing pauses"),
    ),
)]
#[expect(dead_code, reason = "only describes the environment contract in the OpenAPI document")]
fn env_reset() {}

/// Answer a turn of the model
///
/// Each tool call of the message is answered by one message of role `tool`, in order; messages of role `user` may follow. A repeated
/// request has the same id and bytes: the turn must not be taken twice, and its answer is given again. Numbers of turns grow, and may
/// leave some out: a turn whose calls are not valid is answered by the server itself.
#[utoipa::path(
    post, path = "/env.step.request", tag = "Environment contract", operation_id = "env_step",
    request_body = StepRequest,
    responses(
        (status = 200, description = "What follows the turn", body = StepReply),
        (status = 202, description = "The environment will send the answer later", body = Option<AcceptedReply>,
            example = json!({"eta_ms": 60000, "status_url": "/status/env_0123456789abcdef0123456789"})),
        (status = 404, description = "The environment has forgotten the episode: it begins again as its next attempt"),
        (status = 409, description = "The turn was answered already under another id, or the episode is over"),
        (status = 429, description = "The environment gets too many requests: the server retries after `Retry-After`"),
        (status = "5XX", description = "The request failed: the server retries it with growing pauses"),
    ),
)]
#[expect(dead_code, reason = "only describes the environment contract in the OpenAPI document")]
fn env_step() {}

/// Learn that an episode is over
///
/// Sent once, after the last turn. The answer changes nothing.
#[utoipa::path(
    post, path = "/env.close.request", tag = "Environment contract", operation_id = "env_close",
    request_body = CloseRequest,
    responses((status = "2XX", description = "Taken note of")),
)]
#[expect(dead_code, reason = "only describes the environment contract in the OpenAPI document")]
fn env_close() {}

/// Check that an environment is reachable
///
/// Sent by the environment test endpoint, and by a job that waits for its environment. Any 2xx status means success; the body is
/// optional.
#[utoipa::path(
    post, path = "/env.ping", tag = "Environment contract", operation_id = "env_ping",
    request_body = PingRequest,
    responses((status = "2XX", description = "The environment is reachable", body = Option<PingReply>)),
)]
#[expect(dead_code, reason = "only describes the environment contract in the OpenAPI document")]
fn env_ping() {}

#[derive(utoipa::OpenApi)]
#[openapi(
    paths(reward_score_request, reward_ping, env_reset, env_step, env_close, env_ping),
    components(schemas(RewardCallback, RewardCallbackTaken))
)]
struct Contract;

/// Returns the requests of the contracts by name, for the OpenAPI section `webhooks`, and the schemas that they refer to.
pub(super) fn webhooks() -> (Paths, Option<Components>) {
    let OpenApi { mut paths, components, .. } = Contract::openapi();
    paths.paths = paths.paths.into_iter().map(|(path, item)| (path.trim_start_matches('/').to_owned(), item)).collect();
    (paths, components)
}
