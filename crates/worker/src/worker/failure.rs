//! From errors to the failure a user sees: whose fault, a stable code, a text without paths, what to do.

use super::client::ClientError;
use super::signals::Position;
use crate::causes::with_causes;
use crate::engine::error::{EngineError, FailureClass as EngineClass};
use crate::job::{Failure, FailureClass};
use crate::model_cache::NoRoom;

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

/// This machine gives no HTTP client.
pub(super) fn no_reward_client(detail: &str, position: Position) -> Failure {
    failure(FailureClass::Infra, "reward_client", format!("rewards cannot be asked: {detail}"), position, None)
}

/// The engine could not go on; where the host said so, by the host's own failure.
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
            ("model_invalid", Some("check the model's files, register it again, then submit again"))
        }
        EngineError::Text(_) => ("text_invalid", Some("check the prompts, the tokenizer and the chat template")),
        EngineError::Adapter(_) => ("adapter_invalid", None),
        EngineError::Input(_) | EngineError::Trajectory(_) => ("invalid_input", None),
        EngineError::Prompts(_) => ("prompts_invalid", Some("drop or shorten these prompts, then submit again")),
        EngineError::NonFinite { .. } | EngineError::Diverged { .. } => (
            "diverged",
            Some(
                "lower optimizer.learning_rate or raise rloo.beta; the last checkpoint is from before, check the model if there is none",
            ),
        ),
        EngineError::StateNotFinite { .. } => (
            "state_not_finite",
            Some(
                "fork the job from its last checkpoint; bound its rewards (max_abs_reward, weight) where they are named, else lower optimizer.learning_rate",
            ),
        ),
        EngineError::ModelNotFinite { .. } => (
            "model_not_finite",
            Some("the model's files are damaged: download it again, register it, then submit again"),
        ),
        EngineError::Alert { fix, .. } => ("alert_stop", Some(fix.as_str())),
        EngineError::Checkpoint(_) => ("checkpoint_invalid", Some("resume from an older checkpoint, or submit again")),
        EngineError::Host(_) => ("host", None),
        EngineError::Tensor(_) => {
            ("tensor_error", Some("see the job's log; retry, with smaller batches if memory was short"))
        }
        EngineError::OutOfMemory(_) => (
            "out_of_memory",
            Some(
                "lower training.micro_batch_tokens, sampling.max_completion_length or rloo.num_generations, or use training.gradient_checkpointing",
            ),
        ),
        EngineError::Device(_) => ("device_failed", Some("see the worker's log and the machine's; retry the job")),
        EngineError::Io { .. } => ("file_error", Some("see the worker's log; check its disk, then retry")),
    };
    let message = match &error {
        // Its own text names a path of the worker's.
        EngineError::Io { source, .. } => format!("the worker cannot access one of its files: {source}"),
        EngineError::Alert { rule, step, message, .. } => {
            format!("the doctor's alert {} of step {step} ended the job: {message}", rule.as_str())
        }
        other => with_causes(other),
    };
    failure(class, code, message, position, suggestion)
}

/// The server refused what a worker needs.
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

/// A transfer fails for [`OUTAGE`](super::client::OUTAGE), although the server answers other calls.
pub(super) fn transfer_failed(error: &ClientError, position: Position) -> Failure {
    let message = format!(
        "a transfer between worker and server failed for 15 minutes, although the server answers other calls: {}",
        with_causes(error)
    );
    let suggestion =
        "see the worker's log; check the network and the proxies between worker and server, then retry the job";
    failure(FailureClass::Infra, "transfer_failed", message, position, Some(suggestion))
}

/// A file that a job with a warm start begins with is damaged on the server's disk, and there is no other copy.
pub(super) fn initial_damaged(file: &str, position: Position) -> Failure {
    let message =
        format!("{file}, a file of the checkpoint that this job begins with, is damaged on the server's disk");
    let suggestion = "submit the job again with another checkpoint to begin with, and check the server's disk";
    failure(FailureClass::Infra, "initial_damaged", message, position, Some(suggestion))
}

/// The events of the run cannot be stored.
pub(super) fn events_refused(position: Position) -> Failure {
    let message = "the server refuses the events of this run".to_owned();
    failure(FailureClass::Infra, "events_refused", message, position, Some("see the worker's log, then retry the job"))
}

/// The model is not the one the job was accepted with.
pub(super) fn model_changed(position: Position) -> Failure {
    let message = "the model's files have changed since the job was accepted".to_owned();
    let suggestion = "restore the files and retry the job, or register the model again and submit a new job";
    failure(FailureClass::User, "model_changed", message, position, Some(suggestion))
}

/// The model cannot be read.
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

/// The server has no such model any more, or cannot read it.
pub(super) fn model_not_sent(id: &str, detail: &str, position: Position) -> Failure {
    let message = format!("the model '{id}' is not on the worker's machine, and the server cannot send it: {detail}");
    let suggestion = "check the model's files on the server, register the model again, then retry the job";
    failure(FailureClass::User, "model_invalid", message, position, Some(suggestion))
}

/// The worker's machine has no room for a model.
pub(super) fn no_room_for_model(id: &str, error: &NoRoom, position: Position) -> Failure {
    let message = format!("the model '{id}' cannot be fetched: {}", with_causes(error));
    failure(FailureClass::Infra, "model_cache_full", message, position, Some(error.advice()))
}

/// A dataset does not read back as it was accepted.
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

/// The server has the dataset no more.
pub(super) fn dataset_missing(detail: &str, position: Position) -> Failure {
    let suggestion = "upload the dataset again and submit a new job";
    failure(
        FailureClass::User,
        "dataset_missing",
        format!("the dataset cannot be fetched: {detail}"),
        position,
        Some(suggestion),
    )
}
