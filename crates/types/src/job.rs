//! The job's state machine.
//!
//! ```text
//! queued  → running | paused | cancelled | failed
//! running → succeeded | failed | cancelled | paused | queued   (queued: lease lost, shutdown, crash; attempt + 1 at the next claim)
//! paused  → queued | cancelled | failed
//! ```
//! Terminal states never move. The same table stands in the migration's CHECKs and trigger; a test compares them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::doctor::Rule;

/// Where a job stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Waits for a worker.
    Queued,
    /// A worker holds its claim.
    Running,
    /// Stopped at a checkpoint; `resume` queues it again.
    Paused,
    /// All steps done. Terminal.
    Succeeded,
    /// Ended by an error; see `failure`. Terminal.
    Failed,
    /// Ended by the user. Terminal.
    Cancelled,
}

impl State {
    /// Every state, in the order of the documentation.
    pub const ALL: [State; 6] =
        [State::Queued, State::Running, State::Paused, State::Succeeded, State::Failed, State::Cancelled];

    /// The states this one may move to.
    pub fn moves(self) -> &'static [State] {
        match self {
            State::Queued => &[State::Running, State::Paused, State::Cancelled, State::Failed],
            State::Running => &[State::Succeeded, State::Failed, State::Cancelled, State::Paused, State::Queued],
            State::Paused => &[State::Queued, State::Cancelled, State::Failed],
            State::Succeeded | State::Failed | State::Cancelled => &[],
        }
    }

    /// True when no move leads out of it.
    pub fn is_terminal(self) -> bool {
        self.moves().is_empty()
    }

    /// What a user may ask of a job in this state.
    pub fn actions(self) -> &'static [Action] {
        match self {
            State::Queued | State::Running => &[Action::Cancel, Action::Pause],
            State::Paused => &[Action::Cancel, Action::Pause, Action::Resume],
            State::Succeeded | State::Failed => &[Action::Retry, Action::Delete],
            State::Cancelled => &[Action::Cancel, Action::Retry, Action::Delete],
        }
    }

    /// The name used in the API and in the database.
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

    /// The inverse of [`State::as_str`].
    pub fn parse(text: &str) -> Option<State> {
        State::ALL.into_iter().find(|state| state.as_str() == text)
    }
}

/// What a user may ask of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// End it. Idempotent.
    Cancel,
    /// Stop at a checkpoint, free the device.
    Pause,
    /// Queue it again.
    Resume,
    /// Make a new job like it.
    Retry,
    /// Remove it with its files.
    Delete,
}

impl Action {
    /// Every action.
    pub const ALL: [Action; 5] = [Action::Cancel, Action::Pause, Action::Resume, Action::Retry, Action::Delete];

    /// The name used in the API.
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

/// A mark on a running job that its owner honours at the next safe point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Requested {
    /// End it; what was checkpointed stays.
    Cancel,
    /// Checkpoint and free the device.
    Pause,
}

/// Who has to act on a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// The job's own input: never retried.
    User,
    /// A reward service.
    Reward,
    /// The machine, the worker or rlood itself.
    Infra,
}

/// Why a job failed, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// Who has to act.
    pub class: FailureClass,
    /// Stable, snake_case.
    pub code: String,
    /// For people; never a path of the server's, a secret or SQL.
    pub message: String,
    /// The phase it happened in.
    #[serde(default)]
    pub phase: Option<crate::event::Phase>,
    /// Optimizer steps done when it happened.
    #[serde(default)]
    pub step: Option<u64>,
    /// What to change.
    #[serde(default)]
    pub suggestion: Option<String>,
}

impl Failure {
    /// A fault of the machine that another attempt may not meet: its code, for the history.
    pub fn may_pass(&self) -> Option<&'static str> {
        let passing = ["file_error", "scratch_error", "transfer_damaged", "transfer_failed"];
        passing.into_iter().find(|code| self.class == FailureClass::Infra && *code == self.code)
    }
}

/// Where the job that a retry creates begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RetryFrom {
    /// At the newest checkpoint that verifies, with the reward answers of the steps after it; at step 0 when there is none.
    Latest,
    /// At step 0, with nothing of the old run.
    Start,
}

impl RetryFrom {
    /// The default after a job that ended with this failure, or without one.
    ///
    /// After an infra or reward failure the run itself was sound, so it resumes. After a user failure (a run that diverged is
    /// one) the same checkpoint would lead to the same end. Cancelled and succeeded jobs begin anew.
    pub fn after(failure: Option<&Failure>) -> RetryFrom {
        match failure.map(|failure| failure.class) {
            Some(FailureClass::Infra | FailureClass::Reward) => RetryFrom::Latest,
            Some(FailureClass::User) | None => RetryFrom::Start,
        }
    }
}

/// Why a run ended before its last step without an error of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EndingCode {
    /// Its evaluations did not get better: succeeded, the best checkpoint is its result.
    EarlyStopping,
    /// An alert of the doctor ended it (`on_alert: stop`): failed, the newest checkpoint from before the alert's evidence is
    /// its result.
    Alert,
    /// Three updates in a row could not be used: failed, the newest checkpoint from before the weights that did it is its
    /// result.
    Diverged,
}

/// Why a run ended before its last step, and which checkpoint is its result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Ending {
    /// What ended it.
    pub code: EndingCode,
    /// For people.
    pub message: String,
    /// Optimizer steps done.
    pub step: u64,
    /// The doctor's rule.
    pub rule: Option<Rule>,
    /// Early stopping's metric.
    pub metric: Option<String>,
    /// The metric's best value.
    pub best: Option<f64>,
    /// Where it was best.
    pub best_step: Option<u64>,
    /// The alert's evidence begins at this step: checkpoints of earlier steps are not touched by it.
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
    fn terminal_states_never_move_and_every_other_one_can_end() {
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
