//! Circuit breaker of a reward service's address: after too many failures no requests are sent for a while, then a single test
//! request.
//!
//! ```text
//! closed → open       5 failures in a row, or half of at least 20 requests within 60 s
//! open → half open    after 30 s, doubling up to 5 min: one test request is sent
//! half open → closed  the test request is answered
//! half open → open    the test request fails
//! ```
//! The functions get the current time as an argument, so that tests need not wait.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::protocol::BreakerState;

/// Number of consecutive failures that open the breaker.
const MAX_CONSECUTIVE_FAILURES: u32 = 5;
/// Period over which the share of failures is computed.
const WINDOW: Duration = Duration::from_secs(60);
/// Minimum number of requests in this period before the share of failures can open the breaker.
const MIN_REQUESTS: usize = 20;
/// Maximum number of recent requests that the breaker keeps to compute the share of failures.
const MAX_REQUESTS: usize = 1000;
/// How long the breaker stays open, at first and at most.
pub(super) const FIRST_OPEN: Duration = Duration::from_secs(30);
pub(super) const LONGEST_OPEN: Duration = Duration::from_secs(300);

/// The state of the circuit breaker of one endpoint.
#[derive(Debug)]
pub(super) struct Breaker {
    first_open: Duration,
    longest_open: Duration,
    consecutive_failures: u32,
    /// Time and success of the recent requests.
    requests: VecDeque<(Instant, bool)>,
    open: Option<Open>,
    times_opened: u64,
}

#[derive(Debug)]
struct Open {
    until: Instant,
    /// How long the breaker stays open this time; doubles each time the test request fails.
    duration: Duration,
    /// Whether the test request of a half-open breaker is in flight.
    is_testing: bool,
}

/// The breaker's decision about a request that is about to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    /// The request may be sent.
    Go,
    /// The request may be sent, and its outcome decides whether the breaker closes.
    Probe,
    /// The request must wait until this time; `None` means until the current test request has ended.
    Wait(Option<Instant>),
}

/// Change of the breaker's state that the outcome of a request caused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Nothing,
    /// The breaker opened (again) for this duration.
    Opened(Duration),
    Closed,
}

impl Breaker {
    /// Creates a closed breaker that opens for `first_open`, doubling up to `longest_open`.
    pub fn new(first_open: Duration, longest_open: Duration) -> Self {
        Self {
            first_open,
            longest_open,
            consecutive_failures: 0,
            requests: VecDeque::new(),
            open: None,
            times_opened: 0,
        }
    }

    /// Decides whether a request may be sent now. A caller that gets [`Admission::Probe`] must report how the request ended, or
    /// that it was abandoned.
    pub fn admit(&mut self, now: Instant) -> Admission {
        match &mut self.open {
            None => Admission::Go,
            Some(Open { is_testing: true, .. }) => Admission::Wait(None),
            Some(Open { until, .. }) if now < *until => Admission::Wait(Some(*until)),
            Some(open) => {
                open.is_testing = true;
                Admission::Probe
            }
        }
    }

    /// Records an answer with any status, which shows that the service is reachable.
    pub fn answered(&mut self, now: Instant) -> Change {
        self.consecutive_failures = 0;
        self.record(now, true);
        match self.open.take() {
            Some(_) => Change::Closed,
            None => Change::Nothing,
        }
    }

    /// Records a failed request. If the request was sent before the breaker opened, the failure changes nothing.
    pub fn failed(&mut self, now: Instant, probe: bool) -> Change {
        self.consecutive_failures = self.consecutive_failures.saturating_add(1);
        match &self.open {
            None => {
                self.record(now, false);
                let failed = self.requests.iter().filter(|(_, answered)| !answered).count();
                let share = self.requests.len() >= MIN_REQUESTS && failed * 2 >= self.requests.len();
                if self.consecutive_failures >= MAX_CONSECUTIVE_FAILURES || share {
                    self.open(now, self.first_open)
                } else {
                    Change::Nothing
                }
            }
            Some(open) if probe => self.open(now, (open.duration * 2).min(self.longest_open)),
            Some(_) => Change::Nothing,
        }
    }

    /// Records that the test request was abandoned, so that another one may be sent.
    pub fn abandoned(&mut self) {
        if let Some(open) = &mut self.open {
            open.is_testing = false;
        }
    }

    /// Returns the state of the breaker.
    pub fn state(&self) -> BreakerState {
        match &self.open {
            None => BreakerState::Closed,
            Some(Open { is_testing: true, .. }) => BreakerState::HalfOpen,
            Some(Open { is_testing: false, .. }) => BreakerState::Open,
        }
    }

    /// Returns when the next request may be sent while the breaker is open.
    pub fn retry_at(&self) -> Option<Instant> {
        self.open.as_ref().map(|open| open.until)
    }

    pub fn failures_in_a_row(&self) -> u32 {
        self.consecutive_failures
    }

    pub fn times_opened(&self) -> u64 {
        self.times_opened
    }

    fn open(&mut self, now: Instant, duration: Duration) -> Change {
        self.requests.clear();
        self.times_opened += 1;
        self.open = Some(Open { until: now + duration, duration, is_testing: false });
        Change::Opened(duration)
    }

    fn record(&mut self, now: Instant, answered: bool) {
        while self.requests.len() >= MAX_REQUESTS || self.requests.front().is_some_and(|(at, _)| now - *at > WINDOW) {
            self.requests.pop_front();
        }
        self.requests.push_back((now, answered));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn breaker() -> Breaker {
        Breaker::new(FIRST_OPEN, LONGEST_OPEN)
    }

    #[test]
    fn five_consecutive_failures_open_the_breaker() {
        let (mut breaker, now) = (breaker(), Instant::now());
        for _ in 0..4 {
            assert_eq!(breaker.failed(now, false), Change::Nothing);
        }
        breaker.answered(now);
        for _ in 0..4 {
            assert_eq!(breaker.failed(now, false), Change::Nothing);
        }
        assert_eq!(breaker.admit(now), Admission::Go);
        assert_eq!(breaker.failed(now, false), Change::Opened(FIRST_OPEN));
        assert_eq!(breaker.state(), BreakerState::Open);
        assert_eq!(breaker.admit(now + 29 * SECOND), Admission::Wait(Some(now + FIRST_OPEN)));
    }

    #[test]
    fn half_of_twenty_tries_within_a_minute_open_it_and_older_ones_do_not_count() {
        let (mut breaker, now) = (breaker(), Instant::now());
        let mut tried = |at: Instant, answered| match answered {
            true => breaker.answered(at),
            false => breaker.failed(at, false),
        };
        for number in 0..19 {
            assert_eq!(tried(now, number % 2 == 0), Change::Nothing, "{number}");
        }
        // 9 of the 19 requests so far failed. After 61 s they no longer count.
        assert_eq!(tried(now + 61 * SECOND, false), Change::Nothing);
        for number in 0..18 {
            assert_eq!(tried(now + 62 * SECOND, number % 2 == 0), Change::Nothing, "{number}");
        }
        assert_eq!(tried(now + 63 * SECOND, false), Change::Opened(FIRST_OPEN), "11 of 20 failed");
    }

    #[test]
    fn one_request_decides_and_the_wait_doubles_to_five_minutes() {
        let (mut breaker, mut now) = (breaker(), Instant::now());
        for _ in 0..5 {
            breaker.failed(now, false);
        }
        for expected in [60, 120, 240, 300, 300] {
            now = breaker.retry_at().unwrap();
            assert_eq!(breaker.admit(now), Admission::Probe);
            assert_eq!(breaker.state(), BreakerState::HalfOpen);
            assert_eq!(breaker.admit(now), Admission::Wait(None), "only one");
            assert_eq!(breaker.failed(now, false), Change::Nothing, "it had begun before");
            assert_eq!(breaker.failed(now, true), Change::Opened(expected * SECOND));
        }
        now = breaker.retry_at().unwrap();
        assert_eq!(breaker.admit(now), Admission::Probe);
        breaker.abandoned();
        assert_eq!(breaker.admit(now), Admission::Probe, "the one before was given up");
        assert_eq!(breaker.answered(now), Change::Closed);
        assert_eq!(breaker.admit(now), Admission::Go);
        for _ in 0..4 {
            breaker.failed(now, false);
        }
        assert_eq!(breaker.failed(now, false), Change::Opened(FIRST_OPEN), "from the beginning");
        assert_eq!(breaker.times_opened(), 7);
    }
}
