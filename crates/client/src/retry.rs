//! Retries: which failures are retried, and after what delay.

use std::time::Duration;

use crate::error::{Error, Problem};

/// How often and when a failed call is retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// Maximum number of retries. A transfer or a stream of events that makes progress resets the count.
    pub max_retries: u32,
    /// Delay before the first retry. It doubles with each retry and varies randomly between half and all of it.
    pub first_delay: Duration,
    /// Maximum delay between retries.
    pub longest_delay: Duration,
    /// Maximum `Retry-After` that the client waits for. After a longer one the call fails immediately.
    pub longest_retry_after: Duration,
}

impl Default for Retry {
    /// Retries for about 20 s in total, enough for a server to restart.
    fn default() -> Self {
        Self {
            max_retries: 8,
            first_delay: Duration::from_millis(200),
            longest_delay: Duration::from_secs(5),
            longest_retry_after: Duration::from_secs(60),
        }
    }
}

impl Retry {
    /// Never retries a call.
    pub fn never() -> Self {
        Self { max_retries: 0, ..Self::default() }
    }
}

/// The effect of repeating a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// Repeating has no effect: the request only reads, or has the same result again.
    Harmless,
    /// Repeating has no effect, because the request carries this `Idempotency-Key` and the server performs it once.
    Keyed(String),
    /// Repeating would perform the request twice. It is repeated only if the server certainly did not begin to process it.
    Again,
}

/// Counts the tries of one call and decides about the next one.
#[derive(Debug)]
pub(crate) struct Tries {
    retry: Retry,
    failed: u32,
}

impl Tries {
    pub(crate) fn new(retry: Retry) -> Self {
        Self { retry, failed: 0 }
    }

    /// Resets the count after progress, so that the next failure counts as the first.
    pub(crate) fn progressed(&mut self) {
        self.failed = 0;
    }

    /// Returns the delay before the next try; `None` = the failure is final.
    pub(crate) fn pause_after(&mut self, error: &Error, repeat: &Repeat) -> Option<Duration> {
        if self.failed >= self.retry.max_retries || !may_pass(error, repeat) {
            return None;
        }
        let asked = error.problem().and_then(|problem| problem.retry_after).unwrap_or_default();
        if asked > self.retry.longest_retry_after {
            return None;
        }
        let doubled = self.retry.first_delay.saturating_mul(1 << self.failed.min(20));
        self.failed += 1;
        let delay = doubled.min(self.retry.longest_delay);
        // A random delay, so that clients whose calls failed together do not retry together.
        let varied = delay.mul_f64(0.5 + 0.5 * (ulid::Ulid::generate().random() % 1024) as f64 / 1024.0);
        Some(varied.max(asked))
    }
}

/// Whether a failed request may be repeated and may succeed soon.
fn may_pass(error: &Error, repeat: &Repeat) -> bool {
    match error {
        Error::Refused { problem, .. } => is_passing(problem) && (*repeat != Repeat::Again || was_not_begun(problem)),
        Error::Unreachable { source, .. } => !source.is_builder() && (source.is_connect() || *repeat != Repeat::Again),
        Error::Interrupted { .. } | Error::Stalled { .. } => *repeat != Repeat::Again,
        Error::Settings(_) | Error::NotUnderstood { .. } | Error::Damaged { .. } | Error::Disk { .. } => false,
    }
}

/// Whether the cause of the server's error is likely to end within seconds. A full disk or a missing checkpoint is not, although
/// it may end too.
fn is_passing(problem: &Problem) -> bool {
    match problem.status {
        408 | 425 | 429 | 500 | 502 | 503 | 504 => problem.retryable,
        400 => problem.code == "body_interrupted",
        409 => problem.code == "idempotency_in_flight",
        _ => false,
    }
}

/// Whether the server rejected the request before it began to process it.
pub(crate) fn was_not_begun(problem: &Problem) -> bool {
    matches!(problem.status, 429 | 503) || problem.code == "body_interrupted"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16, code: &str, retryable: bool, retry_after_s: Option<u64>) -> Error {
        let retry_after = retry_after_s.map(Duration::from_secs);
        let problem = Problem { status, code: code.to_owned(), retryable, retry_after, ..Problem::default() };
        Error::Refused { request: "GET /".to_owned(), problem: Box::new(problem) }
    }

    #[test]
    fn pauses_grow_to_a_limit_and_end() {
        let retry = Retry { max_retries: 6, ..Retry::default() };
        let mut tries = Tries::new(retry);
        let error = refused(503, "overloaded", true, None);
        for expected_ms in [200, 400, 800, 1600, 3200, 5000] {
            let pause = tries.pause_after(&error, &Repeat::Harmless).unwrap().as_millis();
            assert!((expected_ms / 2..=expected_ms).contains(&pause), "{pause} of {expected_ms}");
        }
        assert_eq!(tries.pause_after(&error, &Repeat::Harmless), None);
        tries.progressed();
        assert!(tries.pause_after(&error, &Repeat::Harmless).unwrap() <= Duration::from_millis(200));
    }

    #[test]
    fn the_server_may_ask_for_a_longer_pause_but_not_for_any() {
        let pause = |seconds| {
            let error = refused(429, "too_many_requests", true, Some(seconds));
            Tries::new(Retry::default()).pause_after(&error, &Repeat::Again)
        };
        assert_eq!(pause(3), Some(Duration::from_secs(3)));
        assert!(pause(0).is_some());
        assert_eq!(pause(61), None);
    }

    #[test]
    fn only_temporary_failures_are_retried() {
        for (status, code, retryable, repeat, again) in [
            (503, "overloaded", true, Repeat::Again, true),
            (500, "internal", true, Repeat::Harmless, true),
            (500, "internal", true, Repeat::Again, false),
            (409, "idempotency_in_flight", true, Repeat::Keyed("k".to_owned()), true),
            (400, "body_interrupted", true, Repeat::Harmless, true),
            (409, "conflict", false, Repeat::Harmless, false),
            (404, "no_checkpoint", true, Repeat::Harmless, false),
            (507, "storage_full", true, Repeat::Harmless, false),
            (504, "work_timeout", false, Repeat::Harmless, false),
            (422, "invalid_spec", false, Repeat::Harmless, false),
        ] {
            let pause = Tries::new(Retry::default()).pause_after(&refused(status, code, retryable, None), &repeat);
            assert_eq!(pause.is_some(), again, "{status} {code}");
        }
    }
}
