//! The address of a reward service with its circuit breaker, its concurrency limit, and the pause that the service requested.
//! Shared by all requests to the address.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use super::breaker::{Admission, Breaker, Change, FIRST_OPEN, LONGEST_OPEN};
use super::concurrency::Limit;
use crate::client::Pace;
use crate::meter::unix_ms;
use crate::protocol::{BreakerReport, BreakerState, ConcurrencyReport};

/// The endpoints (addresses of services) of a job's rewards, by URL.
#[derive(Debug)]
pub(crate) struct Endpoints {
    pace: Pace,
    known: Mutex<HashMap<String, Arc<Endpoint>>>,
}

impl Endpoints {
    pub fn new(pace: Pace) -> Self {
        Self { pace, known: Mutex::default() }
    }

    /// Returns the endpoint of an address, and raises its concurrency limit to at least the maximum of one more reward.
    pub fn at(&self, url: &str, max_concurrency: u32) -> Arc<Endpoint> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let endpoint =
            known.entry(url.to_owned()).or_insert_with(|| Arc::new(Endpoint::new(max_concurrency, self.pace)));
        endpoint.lock().limit.widen(max_concurrency);
        endpoint.clone()
    }
}

/// Shared state of all requests to one address.
#[derive(Debug)]
pub(crate) struct Endpoint {
    state: Mutex<State>,
    /// Counter that is incremented whenever a waiting request may be able to start.
    changed: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    breaker: Breaker,
    limit: Limit,
    /// End of the pause that the service requested (`Retry-After`).
    hold: Option<Instant>,
    /// The failed requests since the service's last answer.
    failing: Option<Failing>,
}

/// The failed requests of a service since its last answer.
#[derive(Debug, Clone)]
pub(super) struct Failing {
    /// Time of the first failed request.
    pub since: Instant,
    /// Error message of the last failed request.
    pub cause: String,
}

/// Kind of a failed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    /// 429: too many requests.
    TooMuch,
    /// 503 or a timeout, which too many concurrent requests may have caused.
    Overload,
    /// Any other kind of failure.
    Other,
}

impl Endpoint {
    fn new(max_concurrency: u32, pace: Pace) -> Self {
        let breaker = Breaker::new(pace.of(FIRST_OPEN), pace.of(LONGEST_OPEN));
        let state = State { breaker, limit: Limit::new(max_concurrency), hold: None, failing: None };
        Self { state: Mutex::new(state), changed: watch::Sender::new(0) }
    }

    /// Returns a permit if the breaker and the concurrency limit allow a request now.
    pub(super) fn try_enter(&self) -> Option<Permit<'_>> {
        self.admitted(Instant::now()).ok()
    }

    /// Waits until a request may be sent. Returns an error with the failures if the service has failed for `max_outage`, counted
    /// from its first failure or from `since`, whichever is earlier.
    pub(super) async fn enter(&self, max_outage: Duration, since: Option<Instant>) -> Result<Permit<'_>, Failing> {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let now = Instant::now();
            let not_before = match self.admitted(now) {
                Ok(pass) => return Ok(pass),
                Err(not_before) => not_before,
            };
            let failing = self.lock().failing.clone();
            let begun = failing.iter().map(|failing| failing.since).chain(since).min();
            let gives_up = begun.map(|begun| begun + max_outage);
            if let (Some(begun), true) = (begun, gives_up.is_some_and(|at| at <= now)) {
                let cause = failing.map_or_else(
                    || "the service asked rlood to wait (Retry-After)".to_owned(),
                    |failing| failing.cause,
                );
                return Err(Failing { since: begun, cause });
            }
            let wake = not_before.into_iter().chain(gives_up).min();
            let sleep = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = changed.changed() => {}
                () = sleep => {}
            }
        }
    }

    /// Returns the failed requests since the service's last answer.
    pub(super) fn failing(&self) -> Option<Failing> {
        self.lock().failing.clone()
    }

    /// Returns whether the endpoint's circuit breaker is open or half open.
    pub fn is_open(&self) -> bool {
        self.lock().breaker.state() != BreakerState::Closed
    }

    /// Returns the state of breaker and concurrency limit for the reward's health report.
    pub fn report(&self) -> (BreakerReport, ConcurrencyReport) {
        let state = self.lock();
        let breaker = BreakerReport {
            state: state.breaker.state(),
            opened: state.breaker.times_opened(),
            failures_in_a_row: state.breaker.failures_in_a_row(),
            retry_at_ms: state.breaker.retry_at().map(|at| unix_ms(SystemTime::now()) + millis_until(at)),
        };
        (breaker, ConcurrencyReport { limit: state.limit.current(), max: state.limit.max() })
    }

    /// Admits a request, or returns the earliest time for it as an error; `None` in the error means that another
    /// request must end first.
    fn admitted(&self, now: Instant) -> Result<Permit<'_>, Option<Instant>> {
        let mut state = self.lock();
        if let Some(hold) = state.hold {
            if now < hold {
                return Err(Some(hold));
            }
            state.hold = None;
        }
        if !state.limit.has_room() {
            return Err(None);
        }
        let probe = match state.breaker.admit(now) {
            Admission::Go => false,
            Admission::Probe => true,
            Admission::Wait(until) => return Err(until),
        };
        state.limit.enter();
        Ok(Permit { endpoint: self, began: now, probe, is_reported: false })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// A permit to send one request. The caller reports the request's outcome; dropping the permit means that
/// the request was abandoned.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    endpoint: &'a Endpoint,
    began: Instant,
    probe: bool,
    is_reported: bool,
}

impl Permit<'_> {
    /// Reports that the service answered.
    pub fn answered(mut self) -> Change {
        self.is_reported = true;
        let now = Instant::now();
        let mut state = self.endpoint.lock();
        state.limit.answered(self.began, now);
        state.failing = None;
        state.breaker.answered(now)
    }

    /// Reports a failed request, with the pause that the service requested.
    pub fn failed(mut self, trouble: Trouble, retry_after: Option<Duration>, cause: &str) -> Change {
        self.is_reported = true;
        let now = Instant::now();
        let mut state = self.endpoint.lock();
        if trouble != Trouble::Other {
            state.limit.overloaded(self.began, now);
        }
        if let Some(wait) = retry_after {
            state.hold = state.hold.max(Some(now + wait));
        }
        let since = state.failing.as_ref().map_or(now, |failing| failing.since);
        state.failing = Some(Failing { since, cause: cause.to_owned() });
        // A 429 while other requests are in flight means too much concurrency, which was just reduced. A 429 to the only request in
        // flight counts as a failure of the service.
        if trouble == Trouble::TooMuch && state.limit.in_flight() > 1 && !self.probe {
            return Change::Nothing;
        }
        state.breaker.failed(now, self.probe)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = self.endpoint.lock();
        state.limit.leave();
        if self.probe && !self.is_reported {
            state.breaker.abandoned();
        }
        drop(state);
        self.endpoint.wake();
    }
}

fn millis_until(at: Instant) -> i64 {
    i64::try_from(at.saturating_duration_since(Instant::now()).as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(max: u32) -> Arc<Endpoint> {
        Endpoints::new(Pace::default()).at("http://x/", max)
    }

    #[tokio::test]
    async fn an_open_breaker_stops_every_request_and_one_of_them_decides() {
        let endpoints = Endpoints::new(Pace::new(0.002).unwrap());
        let endpoint = endpoints.at("http://x/", 8);
        assert!(Arc::ptr_eq(&endpoint, &endpoints.at("http://x/", 2)));
        for number in 0..5 {
            let change = endpoint.try_enter().unwrap().failed(Trouble::Other, None, "cannot connect");
            assert_eq!(matches!(change, Change::Opened(_)), number == 4);
        }
        assert!(endpoint.is_open() && endpoint.try_enter().is_none());
        let max_outage = Duration::from_secs(30);
        let probe = endpoint.enter(max_outage, None).await.unwrap();
        assert!(probe.probe);
        let second = tokio::spawn({
            let endpoint = endpoint.clone();
            async move { endpoint.enter(max_outage, None).await.map(|pass| pass.probe) }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!second.is_finished(), "it waits for the first one");
        assert_eq!(probe.answered(), Change::Closed);
        assert!(!second.await.unwrap().unwrap());
        assert!(endpoint.failing().is_none());
    }

    #[tokio::test]
    async fn a_waiting_request_gives_up_when_the_service_has_failed_for_long_enough() {
        let endpoint = endpoint(8);
        for _ in 0..5 {
            endpoint.try_enter().unwrap().failed(Trouble::Other, None, "cannot connect");
        }
        let begun = Instant::now();
        let failing = endpoint.enter(Duration::from_millis(100), None).await.err().unwrap();
        assert_eq!(failing.cause, "cannot connect");
        assert!(begun.elapsed() < Duration::from_secs(5));
    }

    #[tokio::test]
    async fn a_storm_of_429_lowers_the_number_and_only_a_lone_one_counts_as_a_failure() {
        let endpoint = endpoint(8);
        let passes: Vec<Permit<'_>> = (0..8).map(|_| endpoint.try_enter().unwrap()).collect();
        assert!(endpoint.try_enter().is_none(), "eight at once");
        let mut changes: Vec<Change> =
            passes.into_iter().map(|pass| pass.failed(Trouble::TooMuch, None, "429")).collect();
        assert!(changes.iter().all(|change| *change == Change::Nothing), "{changes:?}");
        let (breaker, concurrency) = endpoint.report();
        assert_eq!((concurrency.limit, concurrency.max), (4, 8));
        // Only the last of the four requests counts as a failure, because the others had ended by then.
        assert_eq!(breaker.failures_in_a_row, 1);
        changes = (0..4).map(|_| endpoint.try_enter().unwrap().failed(Trouble::TooMuch, None, "429")).collect();
        assert!(matches!(changes[3], Change::Opened(_)), "{changes:?}");
    }

    #[tokio::test]
    async fn a_requested_pause_applies_to_all_requests() {
        let endpoint = endpoint(8);
        let pass = endpoint.try_enter().unwrap();
        pass.failed(Trouble::TooMuch, Some(Duration::from_millis(80)), "429");
        let begun = Instant::now();
        assert!(endpoint.try_enter().is_none());
        drop(endpoint.enter(Duration::from_secs(60), None).await.unwrap());
        assert!(begun.elapsed() >= Duration::from_millis(70));
    }

    #[tokio::test]
    async fn an_abandoned_request_is_not_counted_and_frees_its_permit() {
        let endpoint = endpoint(1);
        drop(endpoint.try_enter().unwrap());
        assert!(endpoint.try_enter().is_some());
        assert_eq!(endpoint.report().0, BreakerReport::default());
    }
}
