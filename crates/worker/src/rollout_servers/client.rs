//! The operations of a rollout server: one trait, so that servers other than vLLM can be added.

use std::time::Duration;

use futures::future::BoxFuture;

/// A request for the completions of one prompt.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SampleOne {
    /// Name of the adapter to sample with.
    pub adapter: String,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Number of completions to sample of the prompt.
    pub n: usize,
    /// Seed of the first completion; that of the ith is `seed + i`.
    pub seed: u64,
    /// Sampling temperature; 0 = greedy.
    pub temperature: f64,
    /// Maximum number of tokens of a completion.
    pub max_tokens: usize,
    /// All tokens that end a completion.
    pub stop_token_ids: Vec<u32>,
    /// Number of different token ids.
    pub vocab_size: usize,
    /// Name of the request in the server's log.
    pub request_id: String,
}

/// One completion of a server.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SampledOne {
    /// Token ids up to and including the token that ended the completion.
    pub ids: Vec<u32>,
    /// Log-probs of these tokens in nats, as the server sampled them.
    pub logps: Vec<f32>,
    /// Whether one of the stop tokens ended the completion, and not the maximum length.
    pub is_stopped: bool,
}

/// The base model of a server, and the adapters that it has loaded.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Inventory {
    /// Name of the base model.
    pub base: String,
    /// Maximum number of tokens of a prompt and its completion; `None` = unknown.
    pub max_model_len: Option<usize>,
    /// Names of the loaded adapters, with the paths from which they were loaded.
    pub adapters: Vec<(String, String)>,
}

/// Why a server could not do something.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(super) enum ServerError {
    /// The server has too many requests; nothing is wrong with it.
    #[error("the server is busy")]
    Busy {
        /// How long the server asks to wait.
        retry_after: Option<Duration>,
    },
    /// The server is gone, or its engine has died.
    #[error("{0}")]
    Down(String),
    /// The server does not have the adapter.
    #[error("the server does not know the adapter: {0}")]
    NoAdapter(String),
    /// The server does not see the adapter's directory (yet).
    #[error("the server does not find the adapter's directory: {0}")]
    NoDirectory(String),
    /// Weights or log-probs on the server are not finite.
    #[error("the server computes values that are not finite: {0}")]
    NotFinite(String),
    /// The answer contradicts the request. The same request may get a right one.
    #[error("the server's answer cannot be used: {0}")]
    Invalid(String),
    /// The server cannot serve this job, whatever is tried again.
    #[error("{0}")]
    Unfit(String),
}

/// The result of a call to a server.
pub(super) type Reply<'a, T> = BoxFuture<'a, Result<T, ServerError>>;

/// The calls that a rollout server answers.
pub(super) trait RolloutClient: Send + Sync {
    /// Checks that the server is up; returns its version.
    fn health(&self) -> Reply<'_, String>;

    /// Returns the base model and the loaded adapters.
    fn inventory(&self) -> Reply<'_, Inventory>;

    /// Loads the adapter in a directory, by the path that the server sees. Loading it twice is not an error.
    fn load<'a>(&'a self, name: &'a str, path: &'a str) -> Reply<'a, ()>;

    /// Removes the name of an adapter. Removing an unknown one is not an error.
    fn unload<'a>(&'a self, name: &'a str) -> Reply<'a, ()>;

    /// Returns the log-probs of each token but the first, at temperature 1, under the base model or an adapter.
    fn score<'a>(&'a self, model: &'a str, ids: &'a [u32]) -> Reply<'a, Vec<f32>>;

    /// Samples completions of one prompt.
    fn sample<'a>(&'a self, request: &'a SampleOne) -> Reply<'a, Vec<SampledOne>>;
}
