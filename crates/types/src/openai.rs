//! Wire types of the OpenAI API as `/v1` speaks it: the fields that rlood uses, under the names of OpenAI and vLLM.
//!
//! Sources: openai-python 3.54.0 (`types/chat`, `types/completion*.py`) and vLLM 0.32.0 (`entrypoints/openai/protocol.py`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Settings of generation that both kinds of completions have.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, ToSchema)]
pub struct SamplingFields {
    /// Divisor of the logits; 0 = greedy. Default 1.
    #[schema(minimum = 0, maximum = 2)]
    pub temperature: Option<f64>,
    /// Keep the most probable tokens whose total probability reaches this value. Default 1 = off.
    #[schema(minimum = 0, maximum = 1)]
    pub top_p: Option<f64>,
    /// Keep the K most probable tokens; 0 or -1 = off. Default off.
    pub top_k: Option<i64>,
    /// Drop tokens below this factor times the probability of the most probable one. Default 0 = off.
    #[schema(minimum = 0, maximum = 1)]
    pub min_p: Option<f64>,
    /// Divides positive and multiplies negative logits of tokens in prompt or answer. Default 1 = off.
    pub repetition_penalty: Option<f64>,
    /// Subtracted from the logits of tokens in the answer. Default 0.
    #[schema(minimum = -2, maximum = 2)]
    pub presence_penalty: Option<f64>,
    /// Subtracted from the logits of tokens in the answer, times their number. Default 0.
    #[schema(minimum = -2, maximum = 2)]
    pub frequency_penalty: Option<f64>,
    /// Values that are added to the logits of tokens, by token id.
    pub logit_bias: Option<BTreeMap<String, f64>>,
    /// Number of answers to each prompt. Default 1.
    #[schema(minimum = 1, maximum = 8)]
    pub n: Option<u32>,
    /// Random seed; the same seed gives the same answer, whatever else the server computes. Default: a random one.
    pub seed: Option<i64>,
    /// Strings that end an answer; they are not part of its text.
    pub stop: Option<TextOrList>,
    /// Whether to send the answer in pieces while it is generated.
    pub stream: Option<bool>,
    /// Settings of the stream.
    pub stream_options: Option<StreamOptions>,
    /// Whether end-of-sequence tokens do not end an answer.
    pub ignore_eos: Option<bool>,
    /// Whether texts leave out special tokens. Default true.
    pub skip_special_tokens: Option<bool>,
    /// Whether the text includes the stop string that ended it.
    pub include_stop_str_in_output: Option<bool>,
    /// Whether to send the token ids of prompt and answer.
    pub return_token_ids: Option<bool>,
    /// Whether tokens in log-probs are written as `token_id:ID`.
    pub return_tokens_as_token_ids: Option<bool>,
}

impl SamplingFields {
    /// The names of the fields.
    pub const NAMES: &[&str] = &[
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "ignore_eos",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "return_token_ids",
        "return_tokens_as_token_ids",
    ];
}

/// The fields of `POST /v1/chat/completions` besides those of sampling.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, ToSchema)]
pub struct ChatFields {
    /// A base model, a checkpoint, or a job (`job_…`, `job_…@last`, `job_…@best`, `job_…@STEP`).
    pub model: String,
    /// The messages of the chat: objects with `role` and `content`, a text or a list of text parts.
    pub messages: Vec<Map<String, Value>>,
    /// Maximum number of tokens of an answer. Default: to the end of the model's context.
    #[schema(minimum = 1)]
    pub max_completion_tokens: Option<u64>,
    /// The older name of `max_completion_tokens`, which wins if both are given.
    #[schema(minimum = 1)]
    pub max_tokens: Option<u64>,
    /// Whether to send the log-probs of the answer's tokens, before temperature, filters and penalties.
    pub logprobs: Option<bool>,
    /// How many of the most probable tokens to send for each token of the answer.
    #[schema(minimum = 0, maximum = 20)]
    pub top_logprobs: Option<u32>,
    /// Variables for the chat template, such as `enable_thinking`.
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Whether the template opens the assistant's answer. Default true.
    pub add_generation_prompt: Option<bool>,
    /// Whether the answer continues the last message instead of opening a new one.
    pub continue_final_message: Option<bool>,
    /// Tools that the model may call: function schemas, `{"type": "function", "function": {"name", "description", "parameters"}}`.
    /// The model's chat template must have a form for calls that rlood knows.
    pub tools: Option<Vec<Value>>,
    /// `auto` (the default): the model decides whether to call tools. `none`: the answer is a text, and the model does not see the tools.
    pub tool_choice: Option<Value>,
}

impl ChatFields {
    /// The names of the fields.
    pub const NAMES: &[&str] = &[
        "model",
        "messages",
        "max_completion_tokens",
        "max_tokens",
        "logprobs",
        "top_logprobs",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "tool_choice",
    ];
}

/// The body of `POST /v1/chat/completions`.
#[derive(Debug, Clone, PartialEq, Deserialize, ToSchema)]
#[schema(as = ChatCompletionRequest)]
pub struct ChatRequest {
    /// The chat and its limits.
    #[serde(flatten)]
    pub chat: ChatFields,
    /// The settings of generation.
    #[serde(flatten)]
    pub sampling: SamplingFields,
}

/// The body of `POST /v1/completions`.
#[derive(Debug, Clone, PartialEq, Deserialize, ToSchema)]
pub struct CompletionRequest {
    /// The prompts and what to send back.
    #[serde(flatten)]
    pub completion: CompletionFields,
    /// The settings of generation.
    #[serde(flatten)]
    pub sampling: SamplingFields,
}

/// The fields of `POST /v1/completions` besides those of sampling.
#[derive(Debug, Clone, PartialEq, Deserialize, ToSchema)]
pub struct CompletionFields {
    /// A base model, a checkpoint, or a job (`job_…`, `job_…@last`, `job_…@best`, `job_…@STEP`).
    pub model: String,
    /// A text, a list of texts, token ids, or a list of lists of token ids, to which no special token is added.
    pub prompt: Prompts,
    /// Maximum number of tokens of an answer. Default 16.
    #[schema(minimum = 0)]
    pub max_tokens: Option<u64>,
    /// How many of the most probable tokens to send for each token, with its log-prob before temperature, filters and
    /// penalties.
    #[schema(minimum = 0, maximum = 20)]
    pub logprobs: Option<u32>,
    /// Whether the answer begins with the prompt, and its log-probs with those of the prompt.
    pub echo: Option<bool>,
    /// Whether the tokenizer adds its special tokens, such as BOS, to a text. Default true.
    pub add_special_tokens: Option<bool>,
}

impl CompletionFields {
    /// The names of the fields.
    pub const NAMES: &[&str] = &["model", "prompt", "max_tokens", "logprobs", "echo", "add_special_tokens"];
}

/// The prompts of a completion.
#[derive(Debug, Clone, PartialEq, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Prompts {
    /// A text, which the server tokenizes.
    Text(String),
    /// Token ids, used as they are.
    Ids(Vec<u32>),
    /// Several texts, which are answered separately.
    Texts(Vec<String>),
    /// Several lists of token ids.
    IdLists(Vec<Vec<u32>>),
}

/// A text, or a list of texts.
#[derive(Debug, Clone, PartialEq, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum TextOrList {
    /// A single text, without a list around it.
    One(String),
    /// Several texts, in a list.
    Several(Vec<String>),
}

/// Settings of a stream.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, ToSchema)]
pub struct StreamOptions {
    /// Whether the stream ends with a chunk that has the numbers of tokens.
    pub include_usage: Option<bool>,
}

/// Numbers of tokens of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens of all answers.
    pub completion_tokens: u64,
    /// The sum of both.
    pub total_tokens: u64,
}

/// The answer of `POST /v1/chat/completions`; a stream sends pieces of it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ChatCompletion {
    /// Id of the answer, `chatcmpl-…`.
    pub id: String,
    /// Always `chat.completion`; in a stream `chat.completion.chunk`.
    pub object: &'static str,
    /// Time of the request, Unix time in seconds.
    pub created: i64,
    /// The model that answered: a checkpoint's id, or that of a base model.
    pub model: String,
    /// Version of the server.
    pub system_fingerprint: String,
    /// The answers, in the order of their indices.
    pub choices: Vec<ChatChoice>,
    /// Numbers of tokens of prompt and answers.
    pub usage: Usage,
    /// Token ids of the prompt, if `return_token_ids` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// An answer of a chat.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ChatChoice {
    /// Index of the answer.
    pub index: u32,
    /// The message of the assistant.
    pub message: ChatMessage,
    /// Log-probs of the answer's tokens, if they were requested.
    pub logprobs: Option<ChatLogprobs>,
    /// Why the answer ended: `stop`, `length`, or `tool_calls`.
    pub finish_reason: &'static str,
    /// The stop string that ended the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<String>,
    /// Token ids of the answer, if `return_token_ids` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// The message of an answer.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ChatMessage {
    /// Always `assistant`.
    pub role: &'static str,
    /// The text of the message; null if the message has nothing but calls of tools.
    pub content: Option<String>,
    /// The reasoning before calls of tools; absent in other answers, whose content has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The calls of tools, if the answer has any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ChatToolCall>,
    /// Always null.
    #[schema(value_type = Option<String>)]
    pub refusal: Option<String>,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct ChatToolCall {
    /// Id of the call, for `tool_call_id` of the message with its result.
    pub id: String,
    /// Kind of the call: always `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The function and its arguments.
    pub function: ChatFunctionCall,
}

/// The function that a call names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct ChatFunctionCall {
    /// Name of the tool.
    pub name: String,
    /// The arguments, a JSON object as text. They fit the tool's schema.
    pub arguments: String,
}

/// Log-probs of a chat's answer.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub struct ChatLogprobs {
    /// One entry for each token.
    pub content: Vec<ChatToken>,
    /// Always null.
    #[schema(value_type = Option<String>)]
    pub refusal: Option<String>,
}

/// A token with its log-prob.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ChatToken {
    /// The token's text; U+FFFD where it is part of a character.
    pub token: String,
    /// Log-prob in nats; -9999 stands for minus infinity.
    pub logprob: f32,
    /// The bytes of the token.
    pub bytes: Vec<u8>,
    /// The most probable tokens at this position.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(no_recursion)]
    pub top_logprobs: Option<Vec<ChatToken>>,
}

/// The answer of `POST /v1/completions`; a stream sends pieces of it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct TextCompletion {
    /// Id of the answer, `cmpl-…`.
    pub id: String,
    /// Always `text_completion`.
    pub object: &'static str,
    /// Time of the request, Unix time in seconds.
    pub created: i64,
    /// The model that answered: a checkpoint's id, or that of a base model.
    pub model: String,
    /// Version of the server.
    pub system_fingerprint: String,
    /// The answers, prompt by prompt.
    pub choices: Vec<TextChoice>,
    /// Numbers of tokens; in a stream null except in its last chunk, and absent if it was not requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

/// An answer of a completion.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct TextChoice {
    /// Index of the answer: the prompt's index times `n`, plus the number of the answer.
    pub index: u32,
    /// The text of the answer.
    pub text: String,
    /// Log-probs of the tokens, if they were requested.
    pub logprobs: Option<TextLogprobs>,
    /// Why the answer ended: `stop` or `length`; null in a stream before its end.
    pub finish_reason: Option<&'static str>,
    /// The stop string that ended the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<String>,
    /// Token ids of the answer, if `return_token_ids` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Token ids of the prompt, if `return_token_ids` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// Log-probs of a completion, one entry for each token in every list.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub struct TextLogprobs {
    /// The texts of the tokens.
    pub tokens: Vec<String>,
    /// Log-probs in nats; null for the first token of a prompt.
    pub token_logprobs: Vec<Option<f64>>,
    /// The most probable tokens and the token itself, with their log-probs; null for the first token of a prompt.
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Index of each token's first character in the text.
    pub text_offset: Vec<u64>,
}

/// A model that the server serves.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ServedModelView {
    /// The name to use as `model`.
    pub id: String,
    /// Always `model`.
    pub object: &'static str,
    /// Time of registration or publication, Unix time in seconds.
    pub created: i64,
    /// Always `rlood`.
    pub owned_by: &'static str,
    /// Id of the base model.
    pub root: String,
    /// Id of the base model of a trained model; null for a base model.
    pub parent: Option<String>,
    /// Maximum number of tokens of prompt and answer; null if the model's files cannot be read.
    pub max_model_len: Option<u64>,
    /// The checkpoint that answers now; absent for a base model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
}

/// The body of `POST /tokenize`.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct TokenizeRequest {
    /// A model; needed if the server has several base models.
    pub model: Option<String>,
    /// The text; or give `messages`.
    pub prompt: Option<String>,
    /// The messages of a chat.
    pub messages: Option<Vec<Map<String, Value>>>,
    /// The tools that the chat offers, as in a chat completion.
    #[schema(value_type = Option<Vec<Object>>)]
    pub tools: Option<Vec<Value>>,
    /// Whether the tokenizer adds its special tokens to a text. Default true; false for messages.
    pub add_special_tokens: Option<bool>,
    /// Whether the template opens the assistant's answer. Default true.
    pub add_generation_prompt: Option<bool>,
    /// Variables for the chat template.
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

/// The answer of `POST /tokenize`.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Tokenized {
    /// The token ids of the text.
    pub tokens: Vec<u32>,
    /// Number of these tokens.
    pub count: usize,
    /// Maximum number of tokens of prompt and answer.
    pub max_model_len: u64,
}

/// The body of `POST /detokenize`.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct DetokenizeRequest {
    /// A model; needed if the server has several base models.
    pub model: Option<String>,
    /// The token ids to convert.
    pub tokens: Vec<u32>,
}

/// The answer of `POST /detokenize`.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Detokenized {
    /// The text of the tokens.
    pub prompt: String,
}

/// The error of a request under `/v1`.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OpenAiError {
    /// The content of the error.
    pub error: OpenAiErrorBody,
}

/// The content of an error.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OpenAiErrorBody {
    /// The error that occurred, and the next action to take.
    pub message: String,
    /// Kind of the error, such as `invalid_request_error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The field at fault; null if it is not one field.
    pub param: Option<String>,
    /// Stable code, such as `model_not_found` or `context_length_exceeded`.
    pub code: String,
}
