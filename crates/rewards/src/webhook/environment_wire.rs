//! Requests and answers of the environment contract, version 1. These types are what the client sends and reads, and the source of
//! the contract's JSON Schemas.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::callback::{Chunk, Entry, Flaw, name};
use crate::environment::{Ask, EpisodeStop, Reply, Reset, ResetAnswer, Step, StepAnswer};
use crate::event::SamplePhase;
use crate::id::JobId;

/// Maximum size of an environment's answer, in bytes.
pub const MAX_ANSWER_BYTES: usize = 1 << 20;

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
    /// How the environment may answer. Absent in `env.close.request`, whose answer changes nothing. `Request::wire` inserts the token of
    /// callbacks here, so the field comes before every value of the user.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reply: Option<RequestReply>,
    /// The job's environment.
    pub environment: RequestEnvironment,
    /// Time limit for an answer in ms, counted from the first attempt; after a 202, from the 202.
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

/// How an environment may answer.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = EnvironmentRequestReply)]
pub struct RequestReply {
    /// Address for an answer that is sent later (`POST /environment-callbacks/{id}`). Absent if the server has no public address.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "https://rlood.example/environment-callbacks/env_0123456789abcdef0123456789")]
    pub callback_url: Option<String>,
    /// Modes of answering that the server accepts. `sync`: the answer in the response to this request. `async`: a 202 response now, the
    /// answer later at `callback_url`. A 202 with a `status_url` is always accepted.
    #[schema(example = json!(["sync", "async"]))]
    pub modes: Vec<String>,
    /// Token for `callback_url`, to send as `Authorization: Bearer TOKEN`. Valid for this request only, until its deadline. Absent without
    /// `callback_url`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub token: Option<String>,
}

impl RequestReply {
    /// Returns the ways of answering of a request with this callback address, without its token.
    pub fn new(callback_url: Option<String>) -> Self {
        let modes = if callback_url.is_some() { &["sync", "async"][..] } else { &["sync"] };
        Self { modes: modes.iter().map(|mode| (*mode).to_owned()).collect(), callback_url, token: None }
    }
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

/// The answer to a ping. Every field is optional.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = EnvironmentPong)]
pub struct PingReply {
    /// Modes of answering that the environment uses: `sync`, `async`.
    #[serde(default)]
    pub reply_modes: Option<Vec<String>>,
}

/// The request is accepted and will be answered later.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = EnvironmentAccepted)]
pub struct AcceptedReply {
    /// Id of the request, or an id of the environment.
    #[serde(default)]
    pub id: Option<String>,
    /// Estimated time until the answer is ready, in ms. `Retry-After` has the same meaning.
    #[serde(default)]
    pub eta_ms: Option<u64>,
    /// Address that the server polls with GET. 200 with the answer = as in the response; 202 or 204 = not yet; 404 or 410 = the environment
    /// no longer knows the request, so the server sends it again. May be relative. The environment's `headers` are sent only if it has the
    /// scheme, host and port of the environment's `url`.
    #[serde(default)]
    pub status_url: Option<String>,
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

/// The questions that an environment may answer later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerKind {
    /// The beginning of an episode.
    Reset,
    /// A turn of the model.
    Step,
}

impl AnswerKind {
    /// Returns the kind of a question's answer; `None` if its answer changes nothing.
    pub fn of(ask: &Ask) -> Option<Self> {
        match ask {
            Ask::Reset(_) => Some(Self::Reset),
            Ask::Step(_) => Some(Self::Step),
            Ask::Close(_) => None,
        }
    }

    /// Returns the name of the answer, which has the place of a sample's id where answers are stored that come late.
    pub fn part(self) -> &'static str {
        match self {
            Self::Reset => "env.reset",
            Self::Step => "env.step",
        }
    }

    /// Returns the kind whose answer has this name.
    pub fn of_part(part: &str) -> Option<Self> {
        [Self::Reset, Self::Step].into_iter().find(|kind| kind.part() == part)
    }

    /// Returns a valid answer as the only part of an answer that comes late.
    pub(super) fn chunk(self, body: &[u8]) -> Chunk {
        let result = String::from_utf8_lossy(body).into_owned();
        Chunk { entries: vec![Entry { sample_id: self.part().to_owned(), result }], done: true }
    }
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
pub fn read(body: &[u8], id: &str, kind: AnswerKind) -> Result<Reply, Problem> {
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
    match kind {
        AnswerKind::Reset => serde_json::from_value(value)
            .map(|ResetReply { answer, .. }| Reply::Reset(answer))
            .map_err(|error| invalid(&error)),
        AnswerKind::Step => {
            let StepReply { answer, .. } = serde_json::from_value(value).map_err(|error| invalid(&error))?;
            answer.check_metrics().map_err(|error| invalid(&error))?;
            Ok(Reply::Step(answer))
        }
    }
}

/// Reads the answer that a callback carries for the question with this id.
///
/// # Errors
/// Returns what is wrong with the body, of which nothing is stored.
pub fn read_callback(body: &[u8], id: &str, kind: AnswerKind) -> Result<Chunk, Vec<Flaw>> {
    let value =
        crate::strict_json::read(body).map_err(|why| flaws("", "syntax", format!("the body is not JSON: {why}")))?;
    if !value.is_object() {
        let detail = format!("the body must be the answer, an object as in a response, not {}", name(&value));
        return Err(flaws("", "invalid_type", detail));
    }
    let AnswerHeader { version, id: given, error } = field_by_field(&value)?;
    if version.is_some_and(|version| version != VERSION) {
        return Err(flaws("/version", "invalid_value", "version must be \"1\"".to_owned()));
    }
    if given.is_some_and(|given| given != id) {
        let detail = format!("the body is for another request: this is the callback address of {id}");
        return Err(flaws("/id", "invalid_value", detail));
    }
    match (error, kind) {
        (Some(ReportedError { retryable: true, .. }), _) => {
            let detail = "a callback is the only answer to its request: call when there is one, or report an error that is not retryable";
            return Err(flaws("/error/retryable", "invalid_value", detail.to_owned()));
        }
        (Some(ReportedError { retryable: false, .. }), _) => {}
        (None, AnswerKind::Reset) => drop(field_by_field::<ResetAnswer>(&value)?),
        (None, AnswerKind::Step) => {
            let answer: StepAnswer = field_by_field(&value)?;
            answer.check_metrics().map_err(|why| flaws("/metrics", "invalid_value", why))?;
        }
    }
    Ok(kind.chunk(body))
}

fn flaws(pointer: &str, code: &'static str, detail: String) -> Vec<Flaw> {
    vec![Flaw { pointer: pointer.to_owned(), code, detail }]
}

/// Reads a part of an answer. The error names the field.
fn field_by_field<T: serde::de::DeserializeOwned>(value: &Value) -> Result<T, Vec<Flaw>> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let mut pointer = String::new();
        for segment in error.path() {
            match segment {
                serde_path_to_error::Segment::Seq { index } => pointer.push_str(&format!("/{index}")),
                serde_path_to_error::Segment::Map { key } => {
                    pointer.push_str(&format!("/{}", key.replace('~', "~0").replace('/', "~1")));
                }
                serde_path_to_error::Segment::Enum { .. } | serde_path_to_error::Segment::Unknown => {}
            }
        }
        flaws(&pointer, "invalid_type", format!("the field is not valid: {}", error.inner()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callback_is_a_whole_answer_and_every_error_has_its_pointer() {
        let read = |kind, body: &str| match read_callback(body.as_bytes(), "env_1", kind) {
            Ok(chunk) => Ok(chunk.entries[0].result.clone()),
            Err(flaws) => Err(format!("{} {}", flaws[0].pointer, flaws[0].code)),
        };
        for good in
            [r#"{"version": "1", "id": "env_1", "reward": 0.5, "done": true}"#, r#"{"error": {"code": "no_luck"}}"#]
        {
            assert_eq!(read(AnswerKind::Step, good), Ok(good.to_owned()));
            assert_eq!(read(AnswerKind::Reset, good), Ok(good.to_owned()));
        }
        for (body, flaw) in [
            ("nonsense", " syntax"),
            (r#"{"reward": NaN}"#, " syntax"),
            ("[1]", " invalid_type"),
            (r#"{"version": "2"}"#, "/version invalid_value"),
            (r#"{"version": 1}"#, "/version invalid_type"),
            (r#"{"id": "env_2"}"#, "/id invalid_value"),
            (r#"{"reward": "1"}"#, "/reward invalid_type"),
            (r#"{"messages": {}}"#, "/messages invalid_type"),
            (r#"{"metrics": {"a b": 1}}"#, "/metrics invalid_value"),
            (r#"{"metrics": {"a": "b"}}"#, "/metrics/a invalid_type"),
            (r#"{"error": {"code": "busy", "retryable": true}}"#, "/error/retryable invalid_value"),
            (r#"{"error": "busy"}"#, "/error invalid_type"),
        ] {
            assert_eq!(read(AnswerKind::Step, body), Err(flaw.to_owned()), "{body}");
        }
        assert_eq!(read(AnswerKind::Reset, r#"{"tools": 1}"#), Err("/tools invalid_type".to_owned()));
        assert_eq!(AnswerKind::of_part("env.step"), Some(AnswerKind::Step));
        assert_eq!(AnswerKind::of_part("s_0"), None);
    }
}
