//! What can go wrong in the engine, and whose fault it is.

use std::path::PathBuf;

use crate::job;
use crate::modelcard::ModelCardError;
use crate::modelcard::text::TextError;
use crate::trajectory::NotOneCompletion;

/// Who has to act on a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureClass {
    /// The model, the adapter, the prompts or the settings: trying again changes nothing.
    User,
    /// The machine: disk, memory, device.
    Infra,
}

/// An engine failure: the variant is what was being done, the source is why.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The model directory is missing something or uses something unsupported.
    #[error("the model cannot be used")]
    Model(#[from] ModelCardError),
    /// The tokenizer or the chat template refused.
    #[error("the text cannot be processed")]
    Text(#[from] TextError),
    /// A LoRA adapter is damaged, or does not fit the model.
    #[error("the LoRA adapter cannot be used: {0}")]
    Adapter(String),
    /// Where only a completion has a meaning, a trajectory has context segments or several model segments.
    #[error(transparent)]
    Trajectory(#[from] NotOneCompletion),
    /// A row cannot be computed as asked.
    #[error("{0}")]
    Input(String),
    /// A log-prob, loss or gradient is NaN or infinite.
    #[error("{what} is not finite; lower the learning rate, or check the model's weights")]
    NonFinite {
        /// What was computed.
        what: String,
    },
    /// The state of the rewards, the weights or the moments is NaN or infinite, so that no checkpoint of it could be read back.
    #[error("{what} is not finite, so the run can neither go on nor be saved")]
    StateNotFinite {
        /// Which number.
        what: String,
    },
    /// The base model itself holds or computes NaN or infinite values: no step can train it.
    #[error("the base model is not finite: {what}")]
    ModelNotFinite {
        /// Where it showed.
        what: String,
    },
    /// A tensor operation failed.
    #[error("a tensor operation failed")]
    Tensor(#[from] candle_core::Error),
    /// A GPU's memory does not hold what a computation takes. The device is well, and smaller pieces may fit.
    #[error("the memory of the GPU is full: {0}")]
    OutOfMemory(String),
    /// A GPU or its driver is not there, or failed: nothing that this process has on it can be used any more.
    #[error("the GPU cannot be used: {0}")]
    Device(String),
    /// Prompts do not fit the model.
    #[error("{0}")]
    Prompts(String),
    /// Too many updates in a row were not finite.
    #[error(
        "{updates} updates in a row were skipped because the loss or the gradient was not finite (up to step {step})"
    )]
    Diverged {
        /// Skipped in a row.
        updates: u32,
        /// The last of them.
        step: u64,
    },
    /// The doctor raised an alert that ends the run.
    #[error("{message}")]
    Alert {
        /// Its rule.
        rule: crate::doctor::Rule,
        /// The step it was raised at.
        step: u64,
        /// What is wrong.
        message: String,
        /// What to change.
        fix: String,
    },
    /// A checkpoint is damaged, or belongs to another run.
    #[error("the checkpoint cannot be used: {0}")]
    Checkpoint(String),
    /// The host gave up.
    #[error("{}", .0.message)]
    Host(crate::job::Failure),
    /// A file could not be read or written.
    #[error("cannot access {}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl EngineError {
    /// Whose fault it is.
    pub fn class(&self) -> FailureClass {
        match self {
            EngineError::Model(_)
            | EngineError::Text(_)
            | EngineError::Adapter(_)
            | EngineError::Trajectory(_)
            | EngineError::Input(_)
            | EngineError::Prompts(_)
            | EngineError::Diverged { .. }
            | EngineError::ModelNotFinite { .. }
            | EngineError::StateNotFinite { .. }
            | EngineError::Alert { .. }
            | EngineError::NonFinite { .. } => FailureClass::User,
            EngineError::Host(failure) => match failure.class {
                job::FailureClass::User => FailureClass::User,
                job::FailureClass::Reward | job::FailureClass::Infra => FailureClass::Infra,
            },
            EngineError::Checkpoint(_)
            | EngineError::Tensor(_)
            | EngineError::OutOfMemory(_)
            | EngineError::Device(_)
            | EngineError::Io { .. } => FailureClass::Infra,
        }
    }
}

/// The engine's result.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;
