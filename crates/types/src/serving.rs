//! Served models: the messages between the server and a serving process (`rlood serving`), which keeps models loaded and
//! generates for many requests at once.
//!
//! Both directions are lines of JSON, over the standard input and output of the process. The server sends [`ToServing`], the
//! process answers with [`FromServing`]. Prompts and answers are token ids here, except the texts of answers: the process finds
//! stop strings, so it knows the text.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::spec::{ComputeDtype, FieldError, FourBitPlan};

/// A line from the server to a serving process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToServing {
    /// Start a request.
    Start(Box<StartServing>),
    /// Stop a request whose client is gone; no more lines about it are expected.
    Cancel(u64),
}

/// A request, and the model that it is for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StartServing {
    /// Number of the request, unique within the life of the process.
    pub id: u64,
    /// The model that answers.
    pub model: ServedModel,
    /// The prompt and its settings.
    pub request: ServedRequest,
}

/// A model with its weights.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ServedModel {
    /// The base model.
    pub base: ServedBase,
    /// The trained weights; none is the base model itself.
    pub weights: Option<ServedWeights>,
}

/// A base model in a precision.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ServedBase {
    /// Directory of the model.
    pub dir: PathBuf,
    /// SHA-256 of the model's files, as registered.
    pub sha256: String,
    /// Precision of the matrix products.
    pub dtype: ComputeDtype,
    /// How linear layers are quantized when they are loaded; null means as stored.
    #[serde(default)]
    pub load_in_4bit: Option<FourBitPlan>,
}

/// Trained weights of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ServedWeights {
    /// Directory of the checkpoint.
    pub dir: PathBuf,
    /// Id of the checkpoint.
    pub checkpoint: String,
    /// Whether all weights were trained; otherwise the checkpoint is a LoRA adapter.
    pub full: bool,
}

/// A prompt, and how it is continued.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServedRequest {
    /// Token ids of the prompt; at least one.
    pub ids: Vec<u32>,
    /// Number of answers.
    pub num_choices: u32,
    /// Maximum number of tokens of an answer, its end-of-sequence token included; 0 is allowed with `echo`.
    pub max_tokens: u32,
    /// Whether `max_tokens` is the end of the model's context, because the client set no limit. The memory may limit it further.
    #[serde(default)]
    pub to_context_end: bool,
    /// Divisor of the logits; 0 = greedy.
    pub temperature: f64,
    /// Keep the most probable tokens whose total probability reaches this value; 1 = off.
    pub top_p: f64,
    /// Keep the K most probable tokens; 0 = off.
    pub top_k: u32,
    /// Drop tokens below this factor times the probability of the most probable one; 0 = off.
    pub min_p: f64,
    /// Divides positive and multiplies negative logits of tokens in prompt or answer; 1 = off.
    pub repetition_penalty: f64,
    /// Subtracted from the logits of tokens in the answer; 0 = off.
    pub presence_penalty: f64,
    /// Subtracted from the logits of tokens in the answer, times their number; 0 = off.
    pub frequency_penalty: f64,
    /// Token ids, and the values that are added to their logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Random seed: the same seed gives the same answer, whatever else the process computes.
    pub seed: u64,
    /// The purpose of the answers, which is part of the key of their random numbers.
    #[serde(default)]
    pub purpose: ServedPurpose,
    /// Strings that end an answer.
    pub stop: Vec<String>,
    /// Whether the text of an answer includes the stop string that ended it.
    pub keeps_stop: bool,
    /// Whether end-of-sequence tokens do not end an answer.
    pub ignores_eos: bool,
    /// Whether texts include special tokens.
    pub shows_special: bool,
    /// How many of the most probable tokens are reported with each token of an answer; null reports no log-probs.
    pub logprobs: Option<u32>,
    /// Whether the prompt's log-probs are computed too.
    pub echo: bool,
    /// Whether pieces of the answers are sent while they are generated; otherwise each answer is one piece.
    pub stream: bool,
}

impl Default for ServedRequest {
    /// An empty prompt and one answer without tokens, sampled from the unchanged distribution.
    fn default() -> Self {
        Self {
            ids: Vec::new(),
            num_choices: 1,
            max_tokens: 0,
            to_context_end: false,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            purpose: ServedPurpose::default(),
            stop: Vec::new(),
            keeps_stop: false,
            ignores_eos: false,
            shows_special: false,
            logprobs: None,
            echo: false,
            stream: false,
        }
    }
}

/// The purpose of the answers to a request. Each purpose has its own random numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServedPurpose {
    /// A user's request.
    #[default]
    Request,
    /// A verdict, for the prompt of this number.
    Verdict(u64),
}

/// A line from a serving process: everything that one step of generation brought.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromServing {
    /// Pieces of answers, in order.
    Pieces(Vec<ServedPiece>),
    /// A request cannot be answered; no more lines about it follow.
    Failed {
        /// Number of the request.
        id: u64,
        /// The reason.
        error: ServingError,
    },
    /// The state of the process, whenever it changed.
    State(ServingState),
}

/// A piece of an answer, or the prompt's log-probs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ServedPiece {
    /// Number of the request.
    pub id: u64,
    /// Index of the answer.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub index: u32,
    /// Log-probs of the prompt's tokens; they come first, before any answer, and the prompt's first token has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<Vec<Option<TokenLogprobs>>>,
    /// New text of the answer, in whole characters.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// New tokens of the answer. Their text may follow in a later piece.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<u32>,
    /// The log-probs of these tokens, if they were requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprobs>,
    /// Why the answer ended, in its last piece.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish: Option<ServedFinish>,
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// The log-prob of a token, and of the most probable ones at its position.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Log-probability in nats, before temperature, filters and penalties.
    #[serde(rename = "lp")]
    pub logprob: f32,
    /// Token ids and log-probs of the most probable tokens, in descending order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServedFinish {
    /// The answer has an end-of-sequence token.
    Eos(u32),
    /// The answer has this stop string.
    Stop(String),
    /// The answer has the maximum number of tokens.
    Length,
}

/// Why a request cannot be answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServingError {
    /// The request is invalid.
    Refused(FieldError),
    /// The model's files cannot be used, for this reason.
    Unusable(String),
    /// The model, or the request beside those that run, does not fit into the memory.
    OutOfMemory(String),
    /// The process failed, for this reason.
    Failed(String),
    /// The process was killed, most likely because it ran out of memory; the text is its exit status. Said by the server.
    Killed(String),
    /// The server is shutting down. Said by the server.
    Stopping,
}

/// The state of a serving process: its models and its work.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServingState {
    /// The loaded models, in order of their last use.
    pub models: Vec<ServedModel>,
    /// Number of answers that are generated now.
    pub running: u64,
    /// Number of answers that wait for room.
    pub waiting: u64,
    /// Number of prompt tokens computed since the process started.
    pub prompt_tokens: u64,
    /// Number of prompt tokens taken from earlier prompts since the process started.
    pub reused_tokens: u64,
    /// Number of tokens generated since the process started.
    pub tokens: u64,
}
