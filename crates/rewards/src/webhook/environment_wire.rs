//! Requests and answers of the environment contract, version 1. These types are what the client sends and reads, and the source of
//! the contract's JSON Schemas.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::environment::{Ask, EpisodeStop, Reply, Reset, ResetAnswer, Step, StepAnswer};
use crate::event::SamplePhase;
use crate::id::JobId;

/// The version of the contract.
pub const VERSION: &str = "1";

/// The fields that all requests about an episode have.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = EnvironmentRequest)]
pub struct RequestHeader {
    /// Version of the contract: `1`.
    #[schema(pattern = "^1$", example = "1")]
    pub version: String,
    /// Id of the question, also in `webhook-id` and `idempotency-key`. It is the same in every retry, and in every attempt at the job.
    #[schema(pattern = "^env_")]
    pub id: String,
    /// The job that asks.
    pub job: RequestJob,
    /// The job's environment.
    pub environment: RequestEnvironment,
    /// Time limit for an answer in ms, counted from the first attempt.
    pub deadline_ms: u64,
    /// The episode that the request is about.
    pub episode: RequestEpisode,
}

/// The job that asks an environment.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = EnvironmentRequestJob)]
pub struct RequestJob {
    /// The job's id, `job_…`.
    pub id: JobId,
    /// Number of optimizer steps completed when the episode began.
    pub step: u64,
    /// Whether the episode is for training or for an evaluation.
    pub phase: SamplePhase,
}

/// The environment as the job describes it.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = EnvironmentRequestEnvironment)]
pub struct RequestEnvironment {
    /// The name of the environment.
    pub name: String,
    /// The environment's `params` from the job, unchanged.
    #[schema(value_type = Object)]
    pub params: Map<String, Value>,
}

/// The episode that a request is about.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = EnvironmentRequestEpisode)]
pub struct RequestEpisode {
    /// Id of the episode, also in the header `rlood-episode`. All its attempts have the same one.
    #[schema(pattern = "^ep_")]
    pub id: String,
    /// Id of the group. Episodes of one prompt share it.
    pub group_id: String,
    /// Id of the dataset row.
    pub prompt_id: String,
    /// Index of the episode in its group, from 0.
    pub index: u32,
    /// Number of times that the episode was begun again because its environment had forgotten it.
    pub attempt: u32,
    /// Seed of the environment's randomness, the same for all episodes of a group. Only in a reset.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub seed: Option<u64>,
}

/// Begins an episode.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EnvironmentReset)]
pub struct ResetRequest {
    /// Type of the request: always `env.reset.request`.
    #[serde(rename = "type")]
    #[schema(pattern = "^env\\.reset\\.request$", example = "env.reset.request")]
    kind: String,
    #[serde(flatten)]
    header: RequestHeader,
    /// The row's prompt as chat messages.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<Value>,
    /// The row's columns other than the prompt.
    #[schema(value_type = Object)]
    columns: Map<String, Value>,
    /// The limits of the episode.
    limits: crate::environment::EpisodeLimits,
}

/// Answers a turn of the model.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EnvironmentStep)]
pub struct StepRequest {
    /// Type of the request: always `env.step.request`.
    #[serde(rename = "type")]
    #[schema(pattern = "^env\\.step\\.request$", example = "env.step.request")]
    kind: String,
    #[serde(flatten)]
    header: RequestHeader,
    #[serde(flatten)]
    step: Step,
}

/// Says that an episode is over. The answer changes nothing, and the request is not repeated.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EnvironmentClose)]
pub struct CloseRequest {
    /// Type of the request: always `env.close.request`.
    #[serde(rename = "type")]
    #[schema(pattern = "^env\\.close\\.request$", example = "env.close.request")]
    kind: String,
    #[serde(flatten)]
    header: RequestHeader,
    /// Why the episode ended.
    reason: EpisodeStop,
}

/// Asks whether the server is there. Any 2xx answer means yes, and its body is optional.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EnvironmentPing)]
pub struct PingRequest {
    /// Type of the request: always `env.ping`.
    #[serde(rename = "type")]
    #[schema(pattern = "^env\\.ping$", example = "env.ping")]
    kind: String,
    /// Version of the contract: `1`.
    #[schema(pattern = "^1$", example = "1")]
    version: String,
    /// Id of the request.
    id: String,
}

/// The fields that every answer may have.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = EnvironmentAnswer)]
pub struct AnswerHeader {
    /// Version of the contract: `1`.
    #[serde(default)]
    #[schema(pattern = "^1$", example = "1")]
    version: Option<String>,
    /// The id of the request.
    #[serde(default)]
    id: Option<String>,
    /// Why there is no answer. The other fields are then not read.
    #[serde(default)]
    error: Option<ReportedError>,
}

/// Why an environment has no answer.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = EnvironmentError)]
pub struct ReportedError {
    /// An error code of the environment.
    #[schema(example = "sandbox_full")]
    code: String,
    /// Whether the server should ask again. Otherwise the episode has no reward.
    #[serde(default)]
    retryable: bool,
}

/// The answer to a reset.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = EnvironmentResetAnswer)]
pub struct ResetReply {
    #[serde(flatten)]
    /// The fields that every answer may have.
    pub header: AnswerHeader,
    #[serde(flatten)]
    /// The beginning of the episode.
    pub answer: ResetAnswer,
}

/// The answer to a turn.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = EnvironmentStepAnswer)]
pub struct StepReply {
    #[serde(flatten)]
    /// The fields that every answer may have.
    pub header: AnswerHeader,
    #[serde(flatten)]
    /// The answer to the turn.
    pub answer: StepAnswer,
}

/// Returns the body of a question about an episode.
pub fn request_body(mut header: RequestHeader, ask: &Ask) -> String {
    let json = match ask {
        Ask::Reset(reset) => {
            let Reset { seed, messages, columns, limits } = (**reset).clone();
            header.episode.seed = Some(seed);
            serde_json::to_string(&ResetRequest {
                kind: "env.reset.request".to_owned(),
                header,
                messages,
                columns,
                limits,
            })
        }
        Ask::Step(step) => {
            let step = (**step).clone();
            serde_json::to_string(&StepRequest { kind: "env.step.request".to_owned(), header, step })
        }
        Ask::Close(reason) => {
            let reason = *reason;
            serde_json::to_string(&CloseRequest { kind: "env.close.request".to_owned(), header, reason })
        }
    };
    // These types have no keys or numbers that JSON cannot represent.
    json.unwrap_or_default()
}

/// Returns the body of a ping.
pub fn ping_body(id: &str) -> String {
    let request = PingRequest { kind: "env.ping".to_owned(), version: VERSION.to_owned(), id: id.to_owned() };
    serde_json::to_string(&request).unwrap_or_default()
}

/// Why an answer cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// The answer breaks the contract.
    Invalid(String),
    /// The environment reports an error.
    Reported {
        /// The environment's error code.
        code: String,
        /// Whether the request should be repeated.
        is_retryable: bool,
    },
}

/// Reads an answer to a question with this id.
///
/// # Errors
/// Fails if the answer is not valid, or reports an error.
pub fn read(body: &[u8], id: &str, ask: &Ask) -> Result<Reply, Problem> {
    let invalid = |error: &dyn std::fmt::Display| Problem::Invalid(format!("the answer is not valid: {error}"));
    let value = crate::strict_json::read(body).map_err(|error| invalid(&error))?;
    let AnswerHeader { version, id: given, error } =
        serde_json::from_value(value.clone()).map_err(|error| invalid(&error))?;
    if version.is_some_and(|version| version != VERSION) {
        return Err(invalid(&"version must be \"1\""));
    }
    if given.is_some_and(|given| given != id) {
        return Err(invalid(&"it has the id of another request"));
    }
    if let Some(ReportedError { code, retryable }) = error {
        return Err(Problem::Reported { code: code.chars().take(64).collect(), is_retryable: retryable });
    }
    match ask {
        Ask::Reset(_) => serde_json::from_value(value)
            .map(|ResetReply { answer, .. }| Reply::Reset(answer))
            .map_err(|error| invalid(&error)),
        Ask::Step(_) => {
            let StepReply { answer, .. } = serde_json::from_value(value).map_err(|error| invalid(&error))?;
            answer.check_metrics().map_err(|error| invalid(&error))?;
            Ok(Reply::Step(answer))
        }
        Ask::Close(_) => Ok(Reply::Closed),
    }
}
