//! Live status of a job's rewards: the number of requests that are slow or being retried, and warnings about services that do not
//! answer.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::{mpsc, watch};

use crate::event::Event;

/// Minimum time between two warnings about one reward, so that a service that fails and recovers often does not
/// flood the job's events.
pub(super) const NOTICE_EVERY: Duration = Duration::from_secs(60);

/// Status shared by all rewards of a job.
#[derive(Debug)]
pub(super) struct Status {
    waiting: watch::Sender<usize>,
    notices: mpsc::UnboundedSender<Event>,
}

impl Status {
    pub(super) fn new() -> (Self, mpsc::UnboundedReceiver<Event>) {
        let (notices, receiver) = mpsc::unbounded_channel();
        (Self { waiting: watch::Sender::new(0), notices }, receiver)
    }

    /// Adds an event to the job's events. Without a receiver, as in a test of a single reward, the event is dropped.
    pub(super) fn notify(&self, event: Event) {
        let _ = self.notices.send(event);
    }

    /// Watches the number of requests that are being retried or are slow.
    pub(super) fn waiting(&self) -> watch::Receiver<usize> {
        self.waiting.subscribe()
    }
}

/// Guard that counts a request as waiting (slow or being retried) until it is dropped.
pub(super) struct Waiting<'a>(&'a Status);

impl<'a> Waiting<'a> {
    pub(super) fn new(status: &'a Status) -> Self {
        status.waiting.send_modify(|count| *count += 1);
        Self(status)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.send_modify(|count| *count = count.saturating_sub(1));
    }
}

/// Reports each outage of one reward's service once.
#[derive(Debug, Default)]
pub(super) struct Outage(Mutex<NoticeState>);

#[derive(Debug, Default)]
struct NoticeState {
    /// Whether the job's events contain a warning about the current outage.
    is_reported: bool,
    /// Time of the last warning about an outage.
    at: Option<Instant>,
}

impl Outage {
    /// Records a failed request to the service. Sends a warning if it is the first failure since the last answer.
    pub(super) fn failed(&self, status: &Status, reward: &str, why: &str, max_outage_s: u64) {
        let mut notice = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut notice.is_reported, true) || notice.at.is_some_and(|at| at.elapsed() < NOTICE_EVERY) {
            return;
        }
        notice.at = Some(Instant::now());
        let message =
            format!("reward '{reward}': {why}; the request is retried for up to {max_outage_s} s, then the job pauses");
        let data = json!({ "reward": reward, "cause": why, "max_outage_s": max_outage_s });
        status.notify(Event::Warning { code: "reward_unanswered".to_owned(), message, data });
    }

    /// Records that the service answered.
    pub(super) fn end(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_reported = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_reported_once_and_a_flapping_service_once_a_minute() {
        let (status, mut notices) = Status::new();
        let outage = Outage::default();
        for _ in 0..3 {
            outage.failed(&status, "r", "cannot connect", 600);
        }
        let Ok(Event::Warning { code, message, .. }) = notices.try_recv() else { panic!("a warning") };
        assert_eq!(code, "reward_unanswered");
        assert!(
            message.contains("'r'") && message.contains("cannot connect") && message.contains("600 s"),
            "{message}"
        );
        outage.end();
        outage.failed(&status, "r", "cannot connect", 600);
        assert!(notices.try_recv().is_err(), "within the minute");
        outage.end();
        outage.0.lock().unwrap().at = Instant::now().checked_sub(NOTICE_EVERY);
        outage.failed(&status, "r", "cannot connect", 600);
        assert!(notices.try_recv().is_ok(), "a minute later");
    }

    #[test]
    fn waiting_ends_with_the_request() {
        let (status, _notices) = Status::new();
        let waiting = status.waiting();
        let (one, two) = (Waiting::new(&status), Waiting::new(&status));
        assert_eq!(*waiting.borrow(), 2);
        drop((one, two));
        assert_eq!(*waiting.borrow(), 0);
    }
}
