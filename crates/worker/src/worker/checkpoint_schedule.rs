//! Schedule of checkpoints by time: as configured, and more often in an attempt after an interruption.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Minimum interval between two checkpoints after an interruption.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// After an interruption, checkpoints are so frequent that another interruption loses at most 1/8 of the attempt's running time.
const MAX_LOSS_DIVISOR: u32 = 8;
/// After an interruption, writing checkpoints may take at most 1/20 of the time.
const MAX_COST_DIVISOR: u32 = 20;

/// The checkpoint schedule of one attempt at a job.
#[derive(Debug)]
pub(super) struct CheckpointSchedule {
    begun: Instant,
    /// Time of the last checkpoint; initially the start of the attempt.
    last_published: Instant,
    /// Duration of the last checkpoint.
    cost: Duration,
    /// The configured interval between checkpoints, `checkpoints.every_seconds`.
    every: Option<Duration>,
    /// Whether an earlier attempt at the job was interrupted.
    soon: bool,
    /// The checkpoint that was requested and that the server does not have yet.
    request: Cell<Option<Request>>,
}

#[derive(Debug, Clone, Copy)]
struct Request {
    at: Instant,
    temporary: bool,
}

impl CheckpointSchedule {
    pub(super) fn new(begun: Instant, every_seconds: Option<u64>, soon: bool) -> Self {
        let every = every_seconds.map(Duration::from_secs);
        Self { begun, last_published: begun, cost: Duration::ZERO, every, soon, request: Cell::new(None) }
    }

    /// Returns whether a checkpoint is due now. `large` means that the journal has become so large that only a
    /// checkpoint can shorten it.
    pub(super) fn is_due(&self, now: Instant, large: bool) -> bool {
        let unsaved = now.saturating_duration_since(self.last_published);
        let planned = large || self.every.is_some_and(|every| unsaved >= every);
        let risked = now.saturating_duration_since(self.begun) / MAX_LOSS_DIVISOR;
        let temporary = !planned && self.soon && unsaved >= MIN_INTERVAL.max(risked).max(self.cost * MAX_COST_DIVISOR);
        let due = planned || temporary;
        self.request.set(due.then_some(Request { at: now, temporary }));
        due
    }

    /// Returns whether the requested checkpoint is an additional one that is due only because of an earlier interruption.
    pub(super) fn is_temporary(&self) -> bool {
        self.request.get().is_some_and(|request| request.temporary)
    }

    /// Records that a checkpoint was published (uploaded to the server).
    pub(super) fn published(&mut self, now: Instant) {
        if let Some(request) = self.request.take() {
            self.cost = now.saturating_duration_since(request.at);
        }
        self.last_published = now;
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
        let mut schedule = CheckpointSchedule::new(begun, Some(10), false);
        assert!(!schedule.is_due(begun + seconds(9), false));
        assert!(schedule.is_due(begun + seconds(10), false) && !schedule.is_temporary());
        schedule.published(begun + seconds(12));
        assert!(!schedule.is_due(begun + seconds(21), false));
        assert!(schedule.is_due(begun + seconds(22), false));
        // A checkpoint that was due by its step (`checkpoints.every_steps`) restarts the interval too.
        schedule.published(begun + seconds(30));
        assert!(!schedule.is_due(begun + seconds(39), false) && schedule.is_due(begun + seconds(40), false));
        assert!(!CheckpointSchedule::new(begun, None, false).is_due(begun + seconds(100_000), false));
        assert!(CheckpointSchedule::new(begun, None, false).is_due(begun, true), "the journal is large");
    }

    #[test]
    fn after_an_interruption_checkpoints_come_soon_and_then_rarer() {
        let begun = Instant::now();
        let mut schedule = CheckpointSchedule::new(begun, None, true);
        assert!(!schedule.is_due(begun + Duration::from_millis(900), false));
        assert!(schedule.is_due(begun + seconds(1), false) && schedule.is_temporary());
        schedule.published(begun + seconds(1));
        assert!(!schedule.is_due(begun + Duration::from_millis(1900), false) && !schedule.is_temporary());
        // When the attempt has run for an hour, checkpoints are less frequent, because up to 1/8 of an hour may be lost.
        schedule.published(begun + seconds(3600));
        assert!(!schedule.is_due(begun + seconds(3600 + 400), false));
        assert!(schedule.is_due(begun + seconds(3600 + 520), false));
        // If writing a checkpoint takes 3 s, there is at most one per minute (1/20 of the time).
        let mut schedule = CheckpointSchedule::new(begun, None, true);
        assert!(schedule.is_due(begun + seconds(1), false));
        schedule.published(begun + seconds(4));
        assert!(!schedule.is_due(begun + seconds(63), false) && schedule.is_due(begun + seconds(64), false));
    }
}
