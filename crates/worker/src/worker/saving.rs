//! When a checkpoint is due by the clock: as the plan says, and sooner in an attempt that follows an interrupted one.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// After an interruption, the least time between two checkpoints.
const SOONEST: Duration = Duration::from_secs(1);
/// After an interruption, an attempt risks to repeat at most this part of the time it has run.
const RISKED_PART: u32 = 8;
/// After an interruption, checkpoints take at most this part of the time.
const COST_PART: u32 = 20;

/// The clock of one attempt's checkpoints.
#[derive(Debug)]
pub(super) struct Saving {
    begun: Instant,
    /// When the last one was published; at first, when the attempt began.
    saved: Instant,
    /// What the last one took.
    cost: Duration,
    /// `checkpoints.every_seconds`.
    every: Option<Duration>,
    /// An earlier attempt was interrupted.
    soon: bool,
    /// The checkpoint that was asked for and is not published yet.
    asked: Cell<Option<Asked>>,
}

#[derive(Debug, Clone, Copy)]
struct Asked {
    at: Instant,
    temporary: bool,
}

impl Saving {
    pub(super) fn new(begun: Instant, every_seconds: Option<u64>, soon: bool) -> Self {
        let every = every_seconds.map(Duration::from_secs);
        Self { begun, saved: begun, cost: Duration::ZERO, every, soon, asked: Cell::new(None) }
    }

    /// Whether a checkpoint is due now; `large`: the journal has grown so large that it wants one.
    pub(super) fn is_due(&self, now: Instant, large: bool) -> bool {
        let unsaved = now.saturating_duration_since(self.saved);
        let planned = large || self.every.is_some_and(|every| unsaved >= every);
        let risked = now.saturating_duration_since(self.begun) / RISKED_PART;
        let temporary = !planned && self.soon && unsaved >= SOONEST.max(risked).max(self.cost * COST_PART);
        let due = planned || temporary;
        self.asked.set(due.then_some(Asked { at: now, temporary }));
        due
    }

    /// Whether the checkpoint that is written now was asked for by an interruption alone.
    pub(super) fn is_temporary(&self) -> bool {
        self.asked.get().is_some_and(|asked| asked.temporary)
    }

    /// A checkpoint is published.
    pub(super) fn published(&mut self, now: Instant) {
        if let Some(asked) = self.asked.take() {
            self.cost = now.saturating_duration_since(asked.at);
        }
        self.saved = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_checkpoint_is_due_every_seconds_since_the_last_one_or_the_attempts_begin() {
        let begun = Instant::now();
        let mut saving = Saving::new(begun, Some(10), false);
        assert!(!saving.is_due(begun + seconds(9), false));
        assert!(saving.is_due(begun + seconds(10), false) && !saving.is_temporary());
        saving.published(begun + seconds(12));
        assert!(!saving.is_due(begun + seconds(21), false));
        assert!(saving.is_due(begun + seconds(22), false));
        // One that the steps asked for counts too.
        saving.published(begun + seconds(30));
        assert!(!saving.is_due(begun + seconds(39), false) && saving.is_due(begun + seconds(40), false));
        assert!(!Saving::new(begun, None, false).is_due(begun + seconds(100_000), false));
        assert!(Saving::new(begun, None, false).is_due(begun, true), "the journal is large");
    }

    #[test]
    fn after_an_interruption_checkpoints_come_soon_and_then_rarer() {
        let begun = Instant::now();
        let mut saving = Saving::new(begun, None, true);
        assert!(!saving.is_due(begun + Duration::from_millis(900), false));
        assert!(saving.is_due(begun + seconds(1), false) && saving.is_temporary());
        saving.published(begun + seconds(1));
        assert!(!saving.is_due(begun + Duration::from_millis(1900), false) && !saving.is_temporary());
        // After an hour an eighth of it may be lost, not a second.
        saving.published(begun + seconds(3600));
        assert!(!saving.is_due(begun + seconds(3600 + 400), false));
        assert!(saving.is_due(begun + seconds(3600 + 520), false));
        // A checkpoint that takes 3 s comes every minute at most.
        let mut saving = Saving::new(begun, None, true);
        assert!(saving.is_due(begun + seconds(1), false));
        saving.published(begun + seconds(4));
        assert!(!saving.is_due(begun + seconds(63), false) && saving.is_due(begun + seconds(64), false));
    }
}
