//! The messages of protocol version 1: one JSON object per line.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::rollout::Generated;

/// Version of the protocol, which the runner sends in its first message.
pub(super) const PROTOCOL: u32 = 1;

/// A message of a rank. Those with an `id` are questions.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Message {
    /// The process has connected. It has not imported torch yet.
    Hello {
        /// Version of the runner's protocol.
        protocol: u32,
        /// Number of the rank, from 0.
        rank: usize,
        /// Number of ranks that the rank knows of.
        world: usize,
        /// Versions of the installed packages, by name.
        versions: BTreeMap<String, String>,
    },
    /// The process has imported its packages.
    Loaded {
        /// Seconds since the start of the process.
        import_s: f64,
    },
    /// The trainer is built and the training begins.
    Ready {
        /// Number of weights that are trained.
        trainable: u64,
        /// Number of weights of the model with its adapter.
        total: u64,
        /// Number of optimizer steps that the trainer will do.
        max_steps: u64,
        /// Number of optimizer steps that were done before.
        steps_done: u64,
        /// Seconds since the start of the process.
        build_s: f64,
    },
    /// Asks for recorded completions.
    Recorded {
        /// Number of the question.
        id: u64,
        /// Optimizer step of the rollout, from 1.
        step: u64,
        /// Dataset rows of this rank's part, one for each completion.
        rows: Vec<u64>,
    },
    /// Reports sampled completions, which must be recorded before the answer.
    Sampled {
        /// Number of the question.
        id: u64,
        /// Optimizer step of the rollout, from 1.
        step: u64,
        /// Dataset rows of this rank's part, one for each completion.
        rows: Vec<u64>,
        /// Completions and the state of the sampler after them.
        part: Part,
    },
    /// Asks for the rewards of this rank's completions.
    Score {
        /// Number of the question.
        id: u64,
        /// Optimizer step of the rollout, from 1.
        step: u64,
        /// Number of this rank's completions.
        samples: usize,
    },
    /// Reports the metrics of a step. Only rank 0 sends it.
    Metrics {
        /// Number of optimizer steps done.
        step: u64,
        /// Values by TRL's names.
        values: BTreeMap<String, Option<f64>>,
        /// Advantages of all ranks' completions in the last rollout.
        advantages: Vec<Option<f64>>,
    },
    /// A step is done. The answer says whether to save and whether to stop.
    Step {
        /// Number of the question.
        id: u64,
        /// Number of optimizer steps done.
        step: u64,
    },
    /// The rank has written its files of a checkpoint.
    Checkpoint {
        /// Number of the question.
        id: u64,
        /// Number of optimizer steps done.
        step: u64,
    },
    /// The training is over.
    Done {
        /// Number of the question.
        id: u64,
        /// Number of optimizer steps done.
        step: u64,
    },
    /// The training failed with an exception.
    Failed {
        /// Class of the exception.
        class: String,
        /// Text of the exception.
        message: String,
        /// Traceback of the exception.
        trace: String,
    },
}

/// A rank's part of a rollout.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Part {
    /// Completions, one for each row of the rank.
    pub(super) completions: Vec<Generated>,
    /// State of the rank's random number generators after sampling. The worker only stores it.
    pub(super) sampler: Value,
}

impl Message {
    /// Returns the question's number and what it asks about; `None` for a message that needs no answer. All ranks must ask the same.
    pub(super) fn question(&self) -> Option<(u64, (&'static str, u64))> {
        match self {
            Self::Recorded { id, step, .. } => Some((*id, ("recorded", *step))),
            Self::Sampled { id, step, .. } => Some((*id, ("sampled", *step))),
            Self::Score { id, step, .. } => Some((*id, ("score", *step))),
            Self::Step { id, step } => Some((*id, ("step", *step))),
            Self::Checkpoint { id, step } => Some((*id, ("checkpoint", *step))),
            Self::Done { id, step } => Some((*id, ("done", *step))),
            Self::Hello { .. }
            | Self::Loaded { .. }
            | Self::Ready { .. }
            | Self::Metrics { .. }
            | Self::Failed { .. } => None,
        }
    }
}

/// Returns the beginning of a text that a rank sent.
pub(super) fn shortened(text: &str) -> String {
    const MAX_BYTES: usize = 1000;
    text[..text.floor_char_boundary(MAX_BYTES)].to_owned()
}
