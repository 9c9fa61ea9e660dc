//! Converts errors of the worker to the job failure that a user sees: its class, a stable code, a message without
//! paths, and a suggestion.

use super::client::ClientError;
use super::signals::Position;
use crate::engine::error::{EngineError, FailureClass as EngineClass};
use crate::error_text::with_causes;
use crate::job::{Failure, FailureClass};
use crate::model_cache::CacheFull;

fn failure(class: FailureClass, code: &str, message: String, position: Position, suggestion: Option<&str>) -> Failure {
    Failure {
        class,
        code: code.to_owned(),
        message,
        phase: Some(position.phase),
        step: Some(position.step),
        suggestion: suggestion.map(str::to_owned),
    }
}

/// Failure for a job of the runtime `trl` on a worker without its environment.
pub(super) fn no_runtime(position: Position) -> Failure {
    failure(
        FailureClass::Infra,
        "runtime_unavailable",
        "this worker has no environment for the runtime trl".to_owned(),
        position,
        Some("run `rlood runtime install trl` on the worker's machine and restart the worker, then retry the job"),
    )
}

/// The HTTP client for rewards could not be created.
pub(super) fn no_reward_client(detail: &str, position: Position) -> Failure {
    failure(
        FailureClass::Infra,
        "reward_client",
        format!("the worker cannot call reward services: {detail}"),
        position,
        None,
    )
}

/// Failure for an error of the engine. Errors from rewards, events and checkpoints already contain their failure.
pub(super) fn of_engine(error: EngineError, position: Position) -> Failure {
    let error = match error {
        EngineError::Host(failure) => return failure,
        error => error,
    };
    let class = match error.class() {
        EngineClass::User => FailureClass::User,
        EngineClass::Infra => FailureClass::Infra,
    };
    let (code, suggestion) = match &error {
        EngineError::Model(_) => {
            ("model_invalid", Some("check the model's files, register the model again, then submit the job again"))
        }
        EngineError::Text(_) => ("text_invalid", Some("check the prompts, the tokenizer and the chat template")),
        EngineError::Adapter(_) => ("adapter_invalid", None),
        EngineError::Input(_) | EngineError::Refused(_) | EngineError::Trajectory(_) => ("invalid_input", None),
        EngineError::Prompts(_) => {
            ("prompts_invalid", Some("drop or shorten these prompts, then submit the job again"))
        }
        EngineError::NonFinite { .. } | EngineError::Diverged { .. } => (
            "diverged",
            Some(
                "lower optimizer.learning_rate or raise rloo.beta; the last checkpoint is from before the failure; if there is none, check the model",
            ),
        ),
        EngineError::StateNotFinite { .. } => (
            "state_not_finite",
            Some(
                "fork the job from its last checkpoint; if the message names its rewards, bound them (max_abs_reward, weight), else lower optimizer.learning_rate",
            ),
        ),
        EngineError::ModelNotFinite { .. } => (
            "model_not_finite",
            Some("the model's files are damaged: download the model again, register it, then submit the job again"),
        ),
        EngineError::Alert { fix, .. } => ("alert_stop", Some(fix.as_str())),
        EngineError::RolloutMismatch { .. } => (
            "rollout_mismatch",
            Some(
                "start every rollout server with the job's base model and precision and --logprobs-mode processed_logprobs, or set rollout.correction.mode; then resume the job from its last checkpoint",
            ),
        ),
        EngineError::Checkpoint(_) => {
            ("checkpoint_invalid", Some("resume the job from an older checkpoint, or submit it again"))
        }
        EngineError::Host(_) => ("host", None),
        EngineError::Tensor(_) => {
            ("tensor_error", Some("see the job's log, then retry the job, with smaller batches if memory was short"))
        }
        EngineError::OutOfMemory(_) => (
            "out_of_memory",
            Some(
                "lower training.micro_batch_tokens, sampling.max_completion_length or rloo.num_generations, or use training.gradient_checkpointing",
            ),
        ),
        EngineError::Ranks(_) => {
            ("runtime_lost", Some("see the job's events and the log of the worker's machine, then retry the job"))
        }
        EngineError::Device(_) => {
            ("device_failed", Some("see the logs of the worker and of its machine, then retry the job"))
        }
        EngineError::Io { .. } => {
            ("file_error", Some("see the worker's log and check the worker's disk, then retry the job"))
        }
    };
    let message = match &error {
        // The engine's error message is not used, because it contains a path on the worker.
        EngineError::Io { source, .. } => format!("the worker cannot access one of its files: {source}"),
        EngineError::Alert { rule, step, message, .. } => {
            format!("alert {} at step {step} ended the job: {message}", rule.as_str())
        }
        other => with_causes(other),
    };
    failure(class, code, message, position, suggestion)
}

/// Failure for a call to the server that failed.
pub(super) fn of_client(error: &ClientError, position: Position) -> Failure {
    let code = match error {
        ClientError::Disk { .. } => "scratch_error",
        ClientError::Damaged { .. } => "transfer_damaged",
        ClientError::LeaseLost
        | ClientError::Unauthorized
        | ClientError::StorageFull { .. }
        | ClientError::Refused { .. }
        | ClientError::Unavailable(_)
        | ClientError::Unreachable(_)
        | ClientError::Interrupted(_)
        | ClientError::Stalled { .. }
        | ClientError::Protocol(_)
        | ClientError::OtherProtocol(_)
        | ClientError::Claim { .. } => "worker_protocol",
    };
    failure(FailureClass::Infra, code, with_causes(error), position, Some("see the worker's log, then retry the job"))
}

/// Failure for a transfer that failed for [`MAX_OUTAGE`](super::client::OUTAGE), although the server answers other calls.
pub(super) fn transfer_failed(error: &ClientError, position: Position) -> Failure {
    let message = format!(
        "a file transfer between worker and server failed for 15 minutes, while the server answers other calls: {}",
        with_causes(error)
    );
    let suggestion =
        "see the worker's log; check the network and the proxies between worker and server, then retry the job";
    failure(FailureClass::Infra, "transfer_failed", message, position, Some(suggestion))
}

/// Failure for a warm start whose file is damaged on the server's disk, where no other copy exists.
pub(super) fn initial_damaged(file: &str, position: Position) -> Failure {
    let message = format!("{file} of the checkpoint that this job starts from is damaged on the server's disk");
    let suggestion = "submit the job again with another checkpoint to start from, and check the server's disk";
    failure(FailureClass::Infra, "initial_damaged", message, position, Some(suggestion))
}

/// Failure for events that the server rejects.
pub(super) fn events_refused(position: Position) -> Failure {
    let message = "the server rejected the events of this run".to_owned();
    failure(FailureClass::Infra, "events_refused", message, position, Some("see the worker's log, then retry the job"))
}

/// Failure for a model that differs from the one the job was accepted with.
pub(super) fn model_changed(position: Position) -> Failure {
    let message = "the model's files have changed since the job was accepted".to_owned();
    let suggestion = "restore the model's files and retry the job, or register the model again and submit a new job";
    failure(FailureClass::User, "model_changed", message, position, Some(suggestion))
}

/// Failure for a model that cannot be read.
pub(super) fn model_unreadable(error: &crate::modelcard::ModelCardError, position: Position) -> Failure {
    let suggestion = "check the model's files on the worker's machine, then retry the job";
    failure(
        FailureClass::User,
        "model_invalid",
        format!("the model cannot be used: {error}"),
        position,
        Some(suggestion),
    )
}

/// Failure for a model that the server no longer has or cannot read.
pub(super) fn model_not_sent(id: &str, detail: &str, position: Position) -> Failure {
    let message = format!("the model '{id}' is not on the worker's machine, and the server cannot send it: {detail}");
    let suggestion = "check the model's files on the server, register the model again, then retry the job";
    failure(FailureClass::User, "model_invalid", message, position, Some(suggestion))
}

/// Failure for a model that does not fit into the worker's cache.
pub(super) fn model_cache_full(id: &str, error: &CacheFull, position: Position) -> Failure {
    let message = format!("the model '{id}' cannot be downloaded: {}", with_causes(error));
    failure(FailureClass::Infra, "model_cache_full", message, position, Some(error.advice()))
}

/// Failure for a dataset that differs from the uploaded one.
pub(super) fn dataset_unreadable(line: usize, why: &str, position: Position) -> Failure {
    let message = format!("line {line} of the dataset cannot be read: {why}");
    failure(
        FailureClass::Infra,
        "dataset_damaged",
        message,
        position,
        Some("upload the dataset again and submit a new job"),
    )
}

/// Failure for a dataset that the server no longer has.
pub(super) fn dataset_missing(detail: &str, position: Position) -> Failure {
    let suggestion = "upload the dataset again and submit a new job";
    failure(
        FailureClass::User,
        "dataset_missing",
        format!("the dataset cannot be downloaded: {detail}"),
        position,
        Some(suggestion),
    )
}
