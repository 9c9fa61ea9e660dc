//! The engine's errors, and whether the user or the operator has to act.

use std::path::PathBuf;

use crate::job;
use crate::modelcard::ModelCardError;
use crate::modelcard::gguf::Refused;
use crate::modelcard::text::TextError;
use crate::trajectory::NotOneCompletion;

/// Who has to act on a failure: the user or the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureClass {
    /// The user: the model, the adapter, the prompts or the settings are wrong, and a retry changes nothing.
    User,
    /// The operator: disk, memory or device failed.
    Infra,
}

/// An engine failure. The variant says what was being done; the source says why it failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The model directory is missing something or uses something unsupported.
    #[error("the model cannot be used")]
    Model(#[from] ModelCardError),
    /// The tokenizer or the chat template rejected a text.
    #[error("the text cannot be processed")]
    Text(#[from] TextError),
    /// A LoRA adapter is damaged, or does not match the model.
    #[error("the LoRA adapter cannot be used: {0}")]
    Adapter(String),
    /// A trajectory has context segments or several model segments where a single completion is required.
    #[error(transparent)]
    Trajectory(#[from] NotOneCompletion),
    /// A checkpoint cannot be written in a format, because another program would compute something else from it.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// An input cannot be computed as requested, such as an empty prompt.
    #[error("{0}")]
    Input(String),
    /// A log-prob, loss or gradient is NaN or infinite.
    #[error("{what} is not finite; lower the learning rate, or check the model's weights")]
    NonFinite {
        /// Names the value that is NaN or infinite.
        what: String,
    },
    /// Rewards, weights or optimizer moments are NaN or infinite: a checkpoint of them could not be read back.
    #[error("{what} is not finite, so the run can neither continue nor be saved")]
    StateNotFinite {
        /// Names the value that is NaN or infinite.
        what: String,
    },
    /// The base model itself holds or computes NaN or infinite values: training cannot work.
    #[error("the base model computes values that are not finite: {what}")]
    ModelNotFinite {
        /// Names the value in which the problem appeared.
        what: String,
    },
    /// A tensor operation failed.
    #[error("a tensor operation failed")]
    Tensor(#[from] candle_core::Error),
    /// A GPU has too little memory for a computation. The device still works, and smaller batches may fit.
    #[error("the GPU is out of memory: {0}")]
    OutOfMemory(String),
    /// A GPU or its driver is missing or failed: this process cannot use anything on it any more.
    #[error("the GPU cannot be used: {0}")]
    Device(String),
    /// The processes that train in place of this engine ended, or stopped making progress. A new attempt may succeed.
    #[error("the training processes failed: {0}")]
    Ranks(String),
    /// The prompts do not fit into the model's context.
    #[error("{0}")]
    Prompts(String),
    /// Too many consecutive updates were not finite.
    #[error(
        "{updates} updates in a row were skipped because the loss or the gradient was not finite (up to step {step})"
    )]
    Diverged {
        /// Number of consecutive skipped updates.
        updates: u32,
        /// The last optimizer step that was skipped.
        step: u64,
    },
    /// An alert rule of the job ended the run.
    #[error("{message}")]
    Alert {
        /// The alert rule that ended the run.
        rule: crate::doctor::Rule,
        /// The optimizer step at which the alert was raised.
        step: u64,
        /// The problem that the alert reports, in one sentence.
        message: String,
        /// The job setting that the user should change.
        fix: String,
    },
    /// The log-probs of the rollout servers differ too much from those of the trained model.
    #[error(
        "the log-probs of the rollout servers differ from those of the trained model by {kl:.2e} nats per token at step {step} (limit {limit})"
    )]
    RolloutMismatch {
        /// The optimizer step that trained on the servers' completions.
        step: u64,
        /// The measured mismatch, `sampling/mismatch_kl`.
        kl: f64,
        /// The largest mismatch that the job's correction accepts.
        limit: f64,
    },
    /// A checkpoint is damaged, or belongs to another run.
    #[error("the checkpoint cannot be used: {0}")]
    Checkpoint(String),
    /// The host ended the run with a failure.
    #[error("{}", .0.message)]
    Host(crate::job::Failure),
    /// A file could not be read or written.
    #[error("cannot access {}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
}

impl EngineError {
    /// Who has to act on this failure.
    pub fn class(&self) -> FailureClass {
        match self {
            EngineError::Model(_)
            | EngineError::Text(_)
            | EngineError::Adapter(_)
            | EngineError::Trajectory(_)
            | EngineError::Refused(_)
            | EngineError::Input(_)
            | EngineError::Prompts(_)
            | EngineError::Diverged { .. }
            | EngineError::ModelNotFinite { .. }
            | EngineError::StateNotFinite { .. }
            | EngineError::Alert { .. }
            | EngineError::RolloutMismatch { .. }
            | EngineError::NonFinite { .. } => FailureClass::User,
            EngineError::Host(failure) => match failure.class {
                job::FailureClass::User => FailureClass::User,
                job::FailureClass::Reward | job::FailureClass::Infra => FailureClass::Infra,
            },
            EngineError::Checkpoint(_)
            | EngineError::Tensor(_)
            | EngineError::OutOfMemory(_)
            | EngineError::Device(_)
            | EngineError::Ranks(_)
            | EngineError::Io { .. } => FailureClass::Infra,
        }
    }
}

/// Result type of the engine.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;
