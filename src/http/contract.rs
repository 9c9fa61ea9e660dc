//! The reward contract v1 as types: what the document says under `webhooks`. The code that speaks it is in `reward`.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::openapi::path::Paths;
use utoipa::openapi::{Components, OpenApi};
use utoipa::{OpenApi as _, ToSchema};

use super::list::Time;
use crate::event::FinishReason;
use crate::id::{JobId, RewardRequestId};

/// Score these completions.
#[derive(Serialize, ToSchema)]
struct RewardRequest {
    /// `reward.score.request`.
    #[serde(rename = "type")]
    #[schema(pattern = "^reward\\.score\\.request$", example = "reward.score.request")]
    kind: String,
    /// Of the contract: `1`.
    #[schema(pattern = "^1$", example = "1")]
    version: String,
    /// Also in `webhook-id` and `idempotency-key`: the same over all tries of this request.
    id: RewardRequestId,
    /// When the request was made; tries repeat the same bytes.
    #[schema(value_type = Time)]
    timestamp: Time,
    /// Who asks.
    job: RewardRequestJob,
    /// Which reward of the job.
    reward: RewardRequestReward,
    /// From the first try, ms: later answers are of no use.
    #[schema(example = 300_000)]
    deadline_ms: u64,
    /// How to answer.
    reply: RewardRequestReply,
    /// Whole groups: all completions of a prompt together, unless a group is larger than `max_batch_samples`.
    #[schema(min_items = 1)]
    samples: Vec<RewardRequestSample>,
}

/// Who asks.
#[derive(Serialize, ToSchema)]
struct RewardRequestJob {
    /// The job.
    id: JobId,
    /// Optimizer steps done when the completions were sampled.
    step: u64,
    /// What the values are for.
    phase: RewardPhase,
}

/// What the values of a request are for.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[expect(dead_code, reason = "describes the contract in the document")]
enum RewardPhase {
    /// Training.
    Train,
    /// An evaluation.
    Eval,
    /// A look before the job exists: `POST /jobs/validate?probe=true` or `POST /rewards/test`. The job's id is made up.
    Probe,
}

/// Which reward of the job.
#[derive(Serialize, ToSchema)]
struct RewardRequestReward {
    /// Its name.
    #[schema(example = "helpful")]
    name: String,
    /// `params` of the job's reward, as given.
    params: Value,
}

/// How to answer.
#[derive(Serialize, ToSchema)]
struct RewardRequestReply {
    /// `sync`: in the answer to this request. `async`: with a 202, and later at `callback_url`. Whatever stands here, a 202 with a
    /// `status_url` is good too.
    #[schema(example = json!(["sync", "async"]))]
    modes: Vec<String>,
    /// Where results may be sent later (`POST /reward-callbacks/{id}`); absent where the server has no public address.
    #[schema(example = "https://rlood.example/reward-callbacks/rwr_01jd0000000000000000000000")]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    callback_url: Option<String>,
    /// Goes with them as `Authorization: Bearer TOKEN`; for this request only, until its deadline. Absent without `callback_url`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    token: Option<String>,
}

/// A completion to score.
#[derive(Serialize, ToSchema)]
struct RewardRequestSample {
    /// Unique in the request; the answer names it.
    #[schema(example = "s_0")]
    sample_id: String,
    /// Completions of one prompt share it.
    #[schema(example = "g_0")]
    group_id: String,
    /// The dataset's row.
    #[schema(example = "row_17")]
    prompt_id: String,
    /// The prompt as chat messages, if it came as such.
    #[schema(value_type = Option<Vec<Value>>)]
    messages: Option<Value>,
    /// The prompt as text, chat template applied.
    prompt: String,
    /// The completion, without special tokens.
    completion: String,
    /// Why it ended.
    finish_reason: FinishReason,
    /// Completion tokens.
    num_tokens: u32,
    /// Their ids, where the reward has `completion_ids: true`.
    completion_ids: Option<Vec<u32>>,
    /// The other columns of the row.
    #[schema(value_type = std::collections::BTreeMap<String, Value>)]
    columns: Value,
}

/// The scores; any of these forms.
#[derive(Deserialize, ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes the contract in the document")]
enum RewardAnswer {
    /// By sample id.
    Results(RewardResults),
    /// One a sample, in the request's order.
    Rewards {
        /// Null = the reward does not apply to this sample.
        rewards: Vec<Option<f64>>,
    },
    /// One a sample, in the request's order.
    Scores {
        /// Null = the reward does not apply to this sample.
        scores: Vec<Option<f64>>,
    },
    /// One a sample, in the request's order.
    Array(Vec<Option<f64>>),
    /// For a request of one sample.
    One {
        /// Null = the reward does not apply to this sample.
        #[schema(required)]
        reward: Option<f64>,
    },
}

/// I took it, and answer later.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "describes the contract in the document")]
struct RewardAccepted {
    /// The request's, or the service's own.
    id: Option<String>,
    /// When it expects to be done, ms from now; also `Retry-After`.
    eta_ms: Option<u64>,
    /// Looked at (GET) from time to time: 200 with `results` (and `done`), as a callback; 202 or 204 = not yet; 404 or 410 = the
    /// request is not known any more, and is sent again. May be relative. The reward's `headers` go there only if it has the
    /// scheme, host and port of its `url`.
    status_url: Option<String>,
}

/// Scores by sample id. Unknown ids are ignored and counted, of duplicates the first wins, missing samples are asked for again.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "describes the contract in the document")]
struct RewardResults {
    /// `1`.
    version: Option<String>,
    /// The request's.
    id: Option<String>,
    /// In any order.
    results: Vec<RewardResult>,
}

/// The score of one sample, or why there is none.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "describes the contract in the document")]
pub(super) struct RewardResult {
    /// As in the request.
    sample_id: String,
    /// A finite number. Null without `error`: the reward does not apply to this sample. Null with `error`: it is missing, which is never 0.
    reward: Option<f64>,
    /// Why the reward is missing.
    error: Option<RewardError>,
    /// The service's own figures.
    #[schema(value_type = Option<std::collections::BTreeMap<String, Value>>)]
    metrics: Option<Value>,
    /// The service's own words.
    reason: Option<String>,
}

/// Why a reward is missing.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "describes the contract in the document")]
struct RewardError {
    /// The service's own word.
    #[schema(example = "judge_timeout")]
    code: String,
    /// Whether to ask for this sample again.
    #[serde(default)]
    retryable: bool,
}

/// A part of the scores, or all of them.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "describes the contract in the document")]
struct RewardCallback {
    /// The request's, if given.
    id: Option<RewardRequestId>,
    /// In any order; several calls may bring parts. May be left out with `done`.
    results: Option<Vec<RewardResult>>,
    /// Nothing else will come: samples without a result are asked for again.
    #[serde(default)]
    done: bool,
}

/// What became of the results of one call.
#[derive(Serialize, ToSchema)]
struct RewardCallbackTaken {
    /// Kept.
    accepted: u64,
    /// For samples that have a result already: the first one stays.
    duplicate: u64,
    /// For samples that were not asked for.
    unknown: u64,
}

/// Are you there?
#[derive(Serialize, ToSchema)]
struct RewardPing {
    /// `reward.ping`.
    #[serde(rename = "type")]
    #[schema(pattern = "^reward\\.ping$", example = "reward.ping")]
    kind: String,
    /// Of the contract: `1`.
    #[schema(pattern = "^1$", example = "1")]
    version: String,
    /// Of this request.
    id: RewardRequestId,
}

/// What a service may say of itself.
#[derive(Deserialize, ToSchema)]
#[expect(dead_code, reason = "describes the contract in the document")]
struct RewardPong {
    /// Most samples of a request.
    max_batch_samples: Option<u32>,
    /// `sync`, `async`.
    modes: Option<Vec<String>>,
    /// Lowest and highest reward.
    range: Option<Vec<f64>>,
}

/// Score completions
///
/// Sent to each `webhook` reward's `url`, once for a batch of whole groups.
///
/// With a `secret` (`whsec_…`) requests are signed by Standard Webhooks: `webhook-signature` is `v1,` and the base64 HMAC-SHA256 of
/// `id.timestamp.body` under the decoded secret. Connect errors, time-outs, 408, 425, 429 and 5xx are tried again with the same id and
/// bytes (fresh timestamp and signature), `Retry-After` is honoured; 413 splits the request; a redirect is never followed; 410 pauses the
/// job. A missing reward is never 0.
///
/// A service that needs longer answers 202 and sends the results to `reply.callback_url`, in parts if it likes, or shows them at its
/// `status_url`, until `deadline_ms` after the request's first try (days, if the job says so). The request is not sent again while
/// it is waited for, also when this server or the worker restarts. What is missing at the deadline is asked for again.
#[utoipa::path(
    post, path = "/reward.score.request", tag = "Reward contract", operation_id = "reward_score_request",
    params(
        ("webhook-id" = String, Header, description = "The request's id"),
        ("webhook-timestamp" = String, Header, description = "Unix seconds of this try"),
        ("webhook-signature" = Option<String>, Header, description = "`v1,BASE64`; two, separated by a space, while a secret is rotated (`previous_secret`): accept the request if one fits"),
        ("idempotency-key" = String, Header, description = "The request's id"),
    ),
    request_body = RewardRequest,
    responses(
        (status = 200, description = "The scores", body = RewardAnswer,
            example = json!({"version": "1", "id": "rwr_01jd0000000000000000000000", "results": [
                {"sample_id": "s_0", "reward": 0.73, "reason": "short and right"},
                {"sample_id": "s_1", "reward": null, "error": {"code": "judge_timeout", "retryable": true}}]})),
        (status = 202, description = "The scores come later", body = Option<RewardAccepted>,
            example = json!({"id": "rwr_01jd0000000000000000000000", "eta_ms": 60000, "status_url": "https://rm.example/status/rwr_01jd0000000000000000000000"})),
        (status = 410, description = "This service is gone: the job pauses"),
        (status = 413, description = "Too much at once: the request is split in halves"),
        (status = 429, description = "Too fast: tried again after `Retry-After`"),
        (status = "5XX", description = "Tried again"),
    ),
)]
#[expect(dead_code, reason = "describes the contract in the document")]
fn reward_score_request() {}

/// Handshake
///
/// Sent by the test endpoint and by validation. Any 2xx is a yes; the body is optional.
#[utoipa::path(
    post, path = "/reward.ping", tag = "Reward contract", operation_id = "reward_ping",
    request_body = RewardPing,
    responses((status = "2XX", description = "I am", body = Option<RewardPong>)),
)]
#[expect(dead_code, reason = "describes the contract in the document")]
fn reward_ping() {}

#[derive(utoipa::OpenApi)]
#[openapi(paths(reward_score_request, reward_ping), components(schemas(RewardCallback, RewardCallbackTaken)))]
struct Contract;

/// The contract's webhooks by name, and the schemas they name.
pub(super) fn webhooks() -> (Paths, Option<Components>) {
    let OpenApi { mut paths, components, .. } = Contract::openapi();
    paths.paths = paths.paths.into_iter().map(|(path, item)| (path.trim_start_matches('/').to_owned(), item)).collect();
    (paths, components)
}
