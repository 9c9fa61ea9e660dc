//! What can go wrong in the engine, and whose fault it is.

use std::path::PathBuf;

use crate::job;
use crate::modelcard::ModelCardError;
use crate::modelcard::text::TextError;

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
    /// A row cannot be computed as asked.
    #[error("{0}")]
    Input(String),
    /// A log-prob, loss or gradient is NaN or infinite.
    #[error("{what} is not finite; lower the learning rate, or check the model's weights")]
    NonFinite {
        /// What was computed.
        what: String,
    },
    /// A tensor operation failed.
    #[error("a tensor operation failed")]
    Tensor(#[from] candle_core::Error),
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
            | EngineError::Input(_)
            | EngineError::Prompts(_)
            | EngineError::Diverged { .. }
            | EngineError::NonFinite { .. } => FailureClass::User,
            EngineError::Host(failure) => match failure.class {
                job::FailureClass::User => FailureClass::User,
                job::FailureClass::Reward | job::FailureClass::Infra => FailureClass::Infra,
            },
            EngineError::Checkpoint(_) | EngineError::Tensor(_) | EngineError::Io { .. } => FailureClass::Infra,
        }
    }

    /// What the job's page shows; the caller adds phase and step. Says no path of the server's: those stand in the source.
    pub fn failure(&self) -> job::Failure {
        if let EngineError::Host(failure) = self {
            return failure.clone();
        }
        let (code, suggestion) = match self {
            EngineError::Model(_) => ("model_invalid", "Check the model's files, or choose another model."),
            EngineError::Text(_) => ("tokenizer_failed", "Check the tokenizer, the chat template and the prompts."),
            EngineError::Adapter(_) => {
                ("adapter_invalid", "Give an adapter that was made for this model with this lora.")
            }
            EngineError::Input(_) => ("engine_input", "Check the settings named in the message."),
            EngineError::Prompts(_) => {
                ("prompts_invalid", "Drop or shorten these prompts, or lower max_completion_length.")
            }
            EngineError::NonFinite { .. } | EngineError::Diverged { .. } => (
                "diverged",
                "Lower learning_rate, raise beta, or set max_grad_norm; the last checkpoint is from before.",
            ),
            EngineError::Checkpoint(_) => ("checkpoint_invalid", "Start again, or resume from an older checkpoint."),
            EngineError::Tensor(_) => ("device_error", "Retry; if it comes again, lower the batch or the lengths."),
            EngineError::Io { .. } => ("io_error", "Check free space and permissions on the worker, then retry."),
            EngineError::Host(_) => ("host", ""),
        };
        let message = match self {
            EngineError::Model(source) => format!("{self}: {source}"),
            EngineError::Text(source) => format!("{self}: {source}"),
            EngineError::Io { source, .. } => format!("a file could not be read or written: {source}"),
            EngineError::Tensor(source) => format!("{self}: {}", source.to_string().lines().next().unwrap_or_default()),
            EngineError::Adapter(_)
            | EngineError::Input(_)
            | EngineError::Prompts(_)
            | EngineError::NonFinite { .. }
            | EngineError::Diverged { .. }
            | EngineError::Checkpoint(_)
            | EngineError::Host(_) => self.to_string(),
        };
        let class = match self.class() {
            FailureClass::User => job::FailureClass::User,
            FailureClass::Infra => job::FailureClass::Infra,
        };
        job::Failure { class, code: code.into(), message, phase: None, step: None, suggestion: Some(suggestion.into()) }
    }
}

/// The engine's result.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;
