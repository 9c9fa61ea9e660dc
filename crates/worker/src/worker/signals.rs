//! Signals between the tasks of one attempt at a job: the reason to stop the attempt, and its progress.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::engine::host::StopReason;
use crate::event::Phase;
use crate::job::Requested;

/// A server that answered a heartbeat within this time counts as reachable.
const REACHABLE_WITHIN: Duration = Duration::from_secs(60);

/// The reason to stop the attempt (cancel, pause, shutdown, lost claim), once there is one. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct StopSignal(watch::Sender<Option<StopReason>>);

impl StopSignal {
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(None))
    }

    /// Requests the stop of the attempt. A weaker reason, such as a pause, does not replace a stronger one, such as a cancel.
    pub(super) fn raise(&self, stop: StopReason) {
        self.0.send_if_modified(|current| {
            let stronger = current.as_ref().is_none_or(|current| strength(&stop) > strength(current));
            if stronger {
                *current = Some(stop);
            }
            stronger
        });
    }

    /// Requests the stop of the attempt that a user asked for; the server passes it on in its answer to a heartbeat.
    pub(super) fn request(&self, requested: Requested) {
        self.raise(match requested {
            Requested::Cancel => StopReason::Cancel,
            Requested::Pause => StopReason::Pause { reason: None },
        });
    }

    pub(super) fn get(&self) -> Option<StopReason> {
        self.0.borrow().clone()
    }

    /// Waits until a stop is requested for a reason that satisfies `matters`.
    pub(super) async fn wait_for(&self, matters: impl Fn(&StopReason) -> bool) -> StopReason {
        let mut receiver = self.0.subscribe();
        let found = receiver.wait_for(|stop| stop.as_ref().is_some_and(&matters)).await;
        match found.ok().and_then(|stop| stop.clone()) {
            Some(stop) => stop,
            // The sender of the channel is part of `self`, so the channel cannot be closed.
            None => std::future::pending().await,
        }
    }
}

fn strength(stop: &StopReason) -> u8 {
    match stop {
        StopReason::Pause { .. } => 1,
        StopReason::Shutdown => 2,
        StopReason::Cancel => 3,
        StopReason::LeaseLost => 4,
    }
}

/// Returns whether a stop for this reason discards the work since the last checkpoint.
pub(super) fn drops_work(stop: &StopReason) -> bool {
    match stop {
        StopReason::Cancel | StopReason::LeaseLost => true,
        StopReason::Pause { .. } | StopReason::Shutdown => false,
    }
}

/// Progress of the training, for heartbeats and failure reports. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Progress(Arc<Mutex<Position>>);

/// A point in the training: phase and step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Position {
    /// Phase of the training loop.
    pub(super) phase: Phase,
    /// Number of completed optimizer steps.
    pub(super) step: u64,
    /// Total number of optimizer steps.
    total: u64,
    /// First optimizer step that this attempt completed, and the time of its completion.
    since: Option<(u64, Instant)>,
    /// Time of the server's last answer to a heartbeat.
    last_answer: Option<Instant>,
    /// Whether the worker is downloading a model.
    pub(super) is_fetching_model: bool,
}

impl Progress {
    /// Creates the progress of an attempt that is loading its inputs and will resume after `step`.
    pub(super) fn new(step: u64, total: u64) -> Self {
        Self(Arc::new(Mutex::new(Position {
            phase: Phase::Loading,
            step,
            total,
            since: None,
            last_answer: None,
            is_fetching_model: false,
        })))
    }

    pub(super) fn get(&self) -> Position {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enter(&self, phase: Phase) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).phase = phase;
    }

    /// Sets whether the worker is downloading a model.
    pub(super) fn set_fetching_model(&self, is_fetching: bool) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_fetching_model = is_fetching;
    }

    /// Resets the progress to the step of an older checkpoint, from which the attempt resumes.
    pub(super) fn reset_to(&self, step: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).step = step;
    }

    /// Records that the server has answered a heartbeat.
    pub(super) fn record_answer(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).last_answer = Some(Instant::now());
    }

    /// Returns whether the server answers heartbeats.
    pub(super) fn is_server_reachable(&self) -> bool {
        self.get().last_answer.is_some_and(|last_answer| last_answer.elapsed() < REACHABLE_WITHIN)
    }

    /// Records a completed optimizer step.
    pub(super) fn complete_step(&self, step: u64) {
        let mut position = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        position.step = step;
        position.since.get_or_insert((step, Instant::now()));
    }
}

impl Position {
    /// Returns the estimated remaining seconds of the training at the pace of this attempt; `None` before its second step.
    pub(super) fn eta_s(&self) -> Option<f64> {
        let (first, at) = self.since?;
        let done = self.step.checked_sub(first).filter(|done| *done > 0)?;
        let remaining = self.total.saturating_sub(self.step);
        Some(at.elapsed().as_secs_f64() / done as f64 * remaining as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stronger_reason_wins_in_either_order() {
        let signal = StopSignal::new();
        signal.raise(StopReason::Shutdown);
        signal.request(Requested::Pause);
        assert_eq!(signal.get(), Some(StopReason::Shutdown));
        signal.request(Requested::Cancel);
        assert_eq!(signal.get(), Some(StopReason::Cancel));
        signal.raise(StopReason::LeaseLost);
        signal.request(Requested::Cancel);
        assert_eq!(signal.get(), Some(StopReason::LeaseLost));
    }

    #[tokio::test]
    async fn a_wait_ends_only_for_matching_reasons() {
        let signal = StopSignal::new();
        let waiting = tokio::spawn({
            let signal = signal.clone();
            async move { signal.wait_for(drops_work).await }
        });
        signal.request(Requested::Pause);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        signal.request(Requested::Cancel);
        assert_eq!(waiting.await.unwrap(), StopReason::Cancel);
    }

    #[test]
    fn the_eta_needs_two_steps_and_ends_at_zero() {
        let progress = Progress::new(4, 10);
        assert_eq!(progress.get().eta_s(), None);
        progress.complete_step(5);
        assert_eq!(progress.get().eta_s(), None);
        progress.complete_step(6);
        assert!(progress.get().eta_s().is_some_and(|eta| eta >= 0.0));
        progress.complete_step(10);
        assert_eq!(progress.get().eta_s(), Some(0.0));
    }
}
