//! The job's state machine.
//!
//! ```text
//! queued  → running | paused | cancelled | failed
//! running → succeeded | failed | cancelled | paused | queued   (queued: lease lost, shutdown, crash; attempt + 1
//! at the next claim)
//! paused  → queued | cancelled | failed
//! ```
//! Terminal states never change. The database enforces the same table with CHECKs and a trigger (see the
//! migration); a test compares them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::doctor::Rule;

/// The state of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The job waits for a worker.
    Queued,
    /// A worker runs the job.
    Running,
    /// The job stopped at a checkpoint; `resume` queues it again.
    Paused,
    /// All steps are done. Terminal.
    Succeeded,
    /// An error ended the job; see `failure`. Terminal.
    Failed,
    /// A user cancelled the job. Terminal.
    Cancelled,
}

impl State {
    /// All states, in the order of the documentation.
    pub const ALL: [State; 6] =
        [State::Queued, State::Running, State::Paused, State::Succeeded, State::Failed, State::Cancelled];

    /// Returns the states that a job may move to from this one.
    pub fn moves(self) -> &'static [State] {
        match self {
            State::Queued => &[State::Running, State::Paused, State::Cancelled, State::Failed],
            State::Running => &[State::Succeeded, State::Failed, State::Cancelled, State::Paused, State::Queued],
            State::Paused => &[State::Queued, State::Cancelled, State::Failed],
            State::Succeeded | State::Failed | State::Cancelled => &[],
        }
    }

    /// Whether the state is final.
    pub fn is_terminal(self) -> bool {
        self.moves().is_empty()
    }

    /// Returns the actions that a user may take on a job in this state.
    pub fn actions(self) -> &'static [Action] {
        match self {
            State::Queued | State::Running => &[Action::Cancel, Action::Pause],
            State::Paused => &[Action::Cancel, Action::Pause, Action::Resume],
            State::Succeeded | State::Failed => &[Action::Retry, Action::Delete],
            State::Cancelled => &[Action::Cancel, Action::Retry, Action::Delete],
        }
    }

    /// Returns the name used in the API and in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            State::Queued => "queued",
            State::Running => "running",
            State::Paused => "paused",
            State::Succeeded => "succeeded",
            State::Failed => "failed",
            State::Cancelled => "cancelled",
        }
    }

    /// Parses a state's name; the inverse of [`State::as_str`].
    pub fn parse(text: &str) -> Option<State> {
        State::ALL.into_iter().find(|state| state.as_str() == text)
    }
}

/// An action that a user can take on a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// End the job. Repeating the action has no effect.
    Cancel,
    /// Stop the job at a checkpoint and free its device.
    Pause,
    /// Queue a paused job again.
    Resume,
    /// Create a new job with the same settings.
    Retry,
    /// Remove the job and its files.
    Delete,
}

impl Action {
    /// All actions that exist.
    pub const ALL: [Action; 5] = [Action::Cancel, Action::Pause, Action::Resume, Action::Retry, Action::Delete];

    /// Returns the name used in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Action::Cancel => "cancel",
            Action::Pause => "pause",
            Action::Resume => "resume",
            Action::Retry => "retry",
            Action::Delete => "delete",
        }
    }
}

/// A request to a running job. Its worker carries it out at the next safe point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Requested {
    /// End the job; its checkpoints are kept.
    Cancel,
    /// Save a checkpoint and free the device.
    Pause,
}

/// Who can fix a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// The user: the job's own input is at fault. Such failures are never retried automatically.
    User,
    /// The operator of a reward service.
    Reward,
    /// The operator of the server: the machine, the worker or rlood itself failed.
    Infra,
}

/// Why a job failed, and how to fix it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// Who can fix the failure.
    pub class: FailureClass,
    /// Stable failure code in snake_case.
    pub code: String,
    /// Human-readable message; never contains server paths, secrets or SQL.
    pub message: String,
    /// The phase in which the job failed; null = unknown.
    #[serde(default)]
    pub phase: Option<crate::event::Phase>,
    /// Optimizer steps done when the job failed; null = unknown.
    #[serde(default)]
    pub step: Option<u64>,
    /// Suggested change; null = no suggestion.
    #[serde(default)]
    pub suggestion: Option<String>,
}

impl Failure {
    /// Returns the failure's code for the job's history, if the machine was at fault and another attempt may succeed.
    pub fn may_pass(&self) -> Option<&'static str> {
        let passing = ["file_error", "scratch_error", "transfer_damaged", "transfer_failed"];
        passing.into_iter().find(|code| self.class == FailureClass::Infra && *code == self.code)
    }
}

/// Where the job that a retry creates begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RetryFrom {
    /// The new job begins at the newest valid checkpoint, with the reward answers of the steps after it; at step 0 if there is none.
    Latest,
    /// The new job begins at step 0, with nothing from the old run.
    Start,
}

impl RetryFrom {
    /// Returns where a retry begins by default, for a job that ended with this failure or without one.
    ///
    /// After an infra or reward failure the run itself was sound, so the retry resumes it. After a user failure (including
    /// a diverged run) the same checkpoint would lead to the same failure, so the retry starts over. Cancelled and
    /// succeeded jobs also start over.
    pub fn after(failure: Option<&Failure>) -> RetryFrom {
        match failure.map(|failure| failure.class) {
            Some(FailureClass::Infra | FailureClass::Reward) => RetryFrom::Latest,
            Some(FailureClass::User) | None => RetryFrom::Start,
        }
    }
}

/// Why a run ended before its last step without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EndingCode {
    /// The evaluations no longer improved. The job succeeded, and the best checkpoint is its result.
    EarlyStopping,
    /// An alert ended the run (`on_alert: stop`). The job failed, and the newest checkpoint from before the alert's
    /// evidence is its result.
    Alert,
    /// Three updates in a row could not be used. The job failed, and the newest checkpoint from before the responsible
    /// weights is its result.
    Diverged,
}

/// Why a run ended before its last step, and which checkpoint is its result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Ending {
    /// Why the run ended.
    pub code: EndingCode,
    /// Human-readable message in English.
    pub message: String,
    /// Number of completed optimizer steps.
    pub step: u64,
    /// The alert rule that ended the run; null = not an alert.
    pub rule: Option<Rule>,
    /// The metric of early stopping; null = not early stopping.
    pub metric: Option<String>,
    /// Best value of the metric of early stopping; null = none.
    pub best: Option<f64>,
    /// Step of the best value of the metric of early stopping; null = none.
    pub best_step: Option<u64>,
    /// First step of the alert's evidence. Checkpoints of earlier steps are not affected; null = not an alert.
    pub good_before_step: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive() {
        for state in State::ALL {
            assert_eq!(State::parse(state.as_str()), Some(state));
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
        }
        for action in Action::ALL {
            assert_eq!(serde_json::to_value(action).unwrap(), action.as_str());
        }
        assert_eq!(State::parse("Queued"), None);
    }

    #[test]
    fn terminal_states_never_change_and_every_other_state_can_end() {
        let terminal: Vec<_> = State::ALL.into_iter().filter(|state| state.is_terminal()).collect();
        assert_eq!(terminal, [State::Succeeded, State::Failed, State::Cancelled]);
        for state in State::ALL.into_iter().filter(|state| !state.is_terminal()) {
            assert!(state.moves().contains(&State::Failed) && state.moves().contains(&State::Cancelled));
            assert!(!state.moves().contains(&state));
            assert!(state.actions().contains(&Action::Cancel) && !state.actions().contains(&Action::Delete));
        }
    }

    #[test]
    fn the_diagram_in_the_module_doc_is_the_table() {
        let source = include_str!("job.rs");
        for state in State::ALL.into_iter().filter(|state| !state.is_terminal()) {
            let line = source.lines().find_map(|line| line.strip_prefix(&format!("//! {:<7} →", state.as_str())));
            let line = line.unwrap().split('(').next().unwrap();
            let drawn: Vec<_> = line.split('|').map(|name| State::parse(name.trim()).unwrap()).collect();
            assert_eq!(drawn, state.moves());
        }
    }
}
