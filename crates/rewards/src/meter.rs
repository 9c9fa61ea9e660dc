//! Counts the requests and samples of one reward and keeps its last failures, as shown by `GET /jobs/{id}/rewards`.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::json;

use super::status::NOTICE_EVERY;
use super::{Counts, Judged};
use crate::event::{Event, RewardChange};
use crate::protocol::{BreakerState, FailedTry, RawMessage, RewardHealth, RewardLatency, SlowTry};
use crate::rollout::RewardValue;

/// Number of recent request latencies from which the percentiles are computed.
const MAX_LATENCIES: usize = 512;
/// Number of failed requests that are kept for the report.
const MAX_FAILURES: usize = 5;
/// Number of recent requests by which a reward counts as degraded: too many failures among them start the degradation, and enough
/// successes in a row end it.
const RECENT_REQUESTS: usize = 20;
const DEGRADED_AFTER_FAILURES: usize = 3;
const RECOVERED_AFTER_SUCCESSES: usize = 5;
/// Maximum number of sample ids in a recorded request.
const MAX_NAMED_SAMPLES: usize = 64;

/// The samples that a request is about.
#[derive(Debug, Clone, Default)]
pub(super) struct About {
    /// Optimizer step that the samples belong to.
    pub step: u64,
    /// Ids of the samples as `prompt_id/sample_id`.
    pub samples: Vec<String>,
}

/// Counts of the requests and samples of one reward, shared by all its requests.
#[derive(Debug, Default)]
pub(super) struct Meter(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    health: RewardHealth,
    /// Latencies of recent requests in milliseconds.
    latencies: VecDeque<f64>,
    recent: VecDeque<bool>,
    /// Time at which the job's events last reported this reward as degraded.
    last_notice: Option<Instant>,
    is_degradation_reported: bool,
    /// How often the endpoint's circuit breaker opened in previous attempts at the job.
    opened_before: u64,
    /// Whether the circuit breaker was open when the last of these attempts ended.
    open_before: bool,
}

/// A failed request, as recorded for the report.
pub(super) struct Failure<'a> {
    /// Error class, as in [`RewardHealth::errors`].
    pub class: &'static str,
    pub message: String,
    pub took: Duration,
    pub about: &'a About,
    pub request: RawMessage,
    pub response: Option<RawMessage>,
}

impl Meter {
    /// Continues the counts from the reports of previous attempts at the job.
    pub fn new(previous: Option<RewardHealth>) -> Self {
        let health = previous.unwrap_or_default();
        let opened_before = health.breaker.as_ref().map_or(0, |breaker| breaker.opened);
        let open_before = health.breaker.as_ref().is_some_and(|breaker| breaker.state != BreakerState::Closed);
        let is_degradation_reported = health.degraded;
        Self(Mutex::new(State { health, opened_before, open_before, is_degradation_reported, ..State::default() }))
    }

    /// Counts an answered request. `messages` builds the record of request and answer if the request is the slowest so far. Returns
    /// an event if the reward has recovered from a degradation or an open circuit breaker.
    pub fn answered(
        &self,
        reward: &str,
        took: Duration,
        about: &About,
        messages: impl FnOnce() -> (RawMessage, Option<RawMessage>),
    ) -> Option<Event> {
        let mut state = self.lock();
        state.health.requests += 1;
        let latency_ms = state.took(took);
        if state.health.slowest.as_ref().is_none_or(|slowest| latency_ms > slowest.latency_ms) {
            let (request, response) = messages();
            let samples = about.samples.iter().take(MAX_NAMED_SAMPLES).cloned().collect();
            let time_ms = unix_ms(SystemTime::now());
            state.health.slowest = Some(SlowTry { time_ms, latency_ms, step: about.step, samples, request, response });
        }
        let event = state.record_outcome(reward, true, "");
        if !std::mem::take(&mut state.open_before) {
            return event;
        }
        let message = format!("reward '{reward}': the service answers again");
        let (reward, change) = (reward.to_owned(), RewardChange::BreakerClosed);
        Some(Event::Reward { reward, change, message, data: json!({}) })
    }

    /// Counts a request that failed.
    pub fn failed(&self, reward: &str, failure: Failure<'_>) -> Option<Event> {
        let mut state = self.lock();
        state.health.requests += 1;
        let message = failure.message.clone();
        state.record_failure(failure);
        state.record_outcome(reward, false, &message)
    }

    /// Counts a request as failed that was counted as answered before, because its answer cannot be used.
    pub fn unusable(&self, reward: &str, failure: Failure<'_>) -> Option<Event> {
        let mut state = self.lock();
        let message = failure.message.clone();
        state.record_failure(failure);
        state.recent.pop_back();
        state.record_outcome(reward, false, &message)
    }

    /// Counts a retry of a request.
    pub fn retried(&self) {
        self.lock().health.retries += 1;
    }

    /// Counts the reward's values of a scored rollout. `took` is the time for rewards that send no requests, else `None`.
    pub fn judged(&self, judged: &Judged, took: Option<Duration>) {
        let mut state = self.lock();
        let Judged { judgements, counts: Counts { replayed, cached, .. } } = judged;
        if let Some(took) = took {
            state.took(took);
        }
        let health = &mut state.health;
        health.replayed += replayed;
        health.cached += cached;
        for judgement in judgements {
            health.samples += 1;
            match judgement.value {
                RewardValue::Number(_) => {}
                RewardValue::NotApplicable => health.not_applicable += 1,
                RewardValue::Missing => health.missing += 1,
            }
            if judgement.error.is_some() {
                *health.errors.entry("sample".to_owned()).or_default() += 1;
            }
        }
    }

    /// Returns the counts as a health report. The endpoint adds the state of its circuit breaker and its concurrency.
    pub fn health(&self) -> RewardHealth {
        let state = self.lock();
        let mut health = state.health.clone();
        if !state.latencies.is_empty() {
            health.latency_ms = latency(state.latencies.iter().copied().collect());
        }
        health
    }

    /// Returns how often the breaker opened in previous attempts.
    pub fn opened_before(&self) -> u64 {
        self.lock().opened_before
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Records the latency of a request and returns it in milliseconds.
    fn took(&mut self, took: Duration) -> f64 {
        let latency_ms = rounded(took.as_secs_f64() * 1e3);
        self.health.answers += 1;
        self.health.answers_ms += latency_ms;
        if self.latencies.len() == MAX_LATENCIES {
            self.latencies.pop_front();
        }
        self.latencies.push_back(latency_ms);
        latency_ms
    }

    fn record_failure(&mut self, failure: Failure<'_>) {
        let Failure { class, message, took, about, request, response } = failure;
        *self.health.errors.entry(class.to_owned()).or_default() += 1;
        let kept = FailedTry {
            time_ms: unix_ms(SystemTime::now()),
            class: class.to_owned(),
            message,
            latency_ms: rounded(took.as_secs_f64() * 1e3),
            step: about.step,
            samples: about.samples.iter().take(MAX_NAMED_SAMPLES).cloned().collect(),
            request,
            response,
        };
        self.health.failures.insert(0, kept);
        self.health.failures.truncate(MAX_FAILURES);
    }

    /// Records whether a request succeeded, and returns an event when the reward becomes degraded or recovers.
    fn record_outcome(&mut self, reward: &str, well: bool, cause: &str) -> Option<Event> {
        if self.recent.len() == RECENT_REQUESTS {
            self.recent.pop_front();
        }
        self.recent.push_back(well);
        let failed = self.recent.iter().filter(|well| !**well).count();
        let tries = self.recent.len();
        if !self.health.degraded && failed >= DEGRADED_AFTER_FAILURES {
            self.health.degraded = true;
            if self.last_notice.is_some_and(|at| at.elapsed() < NOTICE_EVERY) {
                return None;
            }
            self.last_notice = Some(Instant::now());
            self.is_degradation_reported = true;
            let message =
                format!("reward '{reward}': {failed} of its last {tries} requests failed; last error: {cause}");
            let data = json!({ "failed": failed, "tries": tries, "cause": cause });
            return Some(Event::Reward { reward: reward.to_owned(), change: RewardChange::Degraded, message, data });
        }
        let good_again = tries >= RECOVERED_AFTER_SUCCESSES
            && self.recent.iter().rev().take(RECOVERED_AFTER_SUCCESSES).all(|well| *well);
        if self.health.degraded && good_again {
            self.health.degraded = false;
            self.recent.clear();
            if std::mem::take(&mut self.is_degradation_reported) {
                let message = format!("reward '{reward}': its last {RECOVERED_AFTER_SUCCESSES} requests succeeded");
                let data = json!({ "tries": RECOVERED_AFTER_SUCCESSES });
                return Some(Event::Reward {
                    reward: reward.to_owned(),
                    change: RewardChange::Recovered,
                    message,
                    data,
                });
            }
        }
        None
    }
}

fn latency(mut latencies: Vec<f64>) -> Option<RewardLatency> {
    latencies.sort_by(f64::total_cmp);
    // Nearest-rank percentile: the smallest latency that at least this share of the latencies does not exceed.
    let at = |part: f64| {
        let rank = (part * latencies.len() as f64).ceil() as usize;
        latencies.get(rank.saturating_sub(1)).copied()
    };
    Some(RewardLatency { p50: at(0.5)?, p95: at(0.95)?, max: *latencies.last()? })
}

fn rounded(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// Converts a time to Unix milliseconds.
pub(crate) fn unix_ms(time: SystemTime) -> i64 {
    i64::try_from(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Judgement;
    use crate::protocol::BreakerReport;

    fn answer(meter: &Meter, ms: u64) -> Option<Event> {
        let about = About { step: ms, samples: vec![format!("row_0/s_{ms}")] };
        meter.answered("r", Duration::from_millis(ms), &about, Default::default)
    }

    fn fail(meter: &Meter) -> Option<Event> {
        let failure = Failure {
            class: "timeout",
            message: "no answer".to_owned(),
            took: Duration::from_secs(1),
            about: &About::default(),
            request: RawMessage::default(),
            response: None,
        };
        meter.failed("r", failure)
    }

    #[test]
    fn percentiles_are_of_the_last_answers_and_the_slowest_is_kept() {
        let meter = Meter::default();
        assert_eq!(meter.health().latency_ms, None);
        (1..=100).for_each(|ms| assert!(answer(&meter, ms).is_none()));
        let health = meter.health();
        assert_eq!(health.latency_ms, Some(RewardLatency { p50: 50.0, p95: 95.0, max: 100.0 }));
        assert_eq!((health.requests, health.answers, health.answers_ms), (100, 100, 5050.0));
        assert_eq!(health.slowest.unwrap().samples, ["row_0/s_100"]);
        (0..MAX_LATENCIES).for_each(|_| drop(answer(&meter, 7)));
        let health = meter.health();
        assert_eq!(health.latency_ms, Some(RewardLatency { p50: 7.0, p95: 7.0, max: 7.0 }));
        assert_eq!(health.slowest.unwrap().latency_ms, 100.0, "of all");
    }

    #[test]
    fn degradation_and_recovery_are_each_reported_once() {
        let meter = Meter::default();
        let events: Vec<bool> = (0..6).map(|_| fail(&meter).is_some()).collect();
        assert_eq!(events, [false, false, true, false, false, false]);
        let events: Vec<Option<Event>> = (0..12).map(|_| answer(&meter, 1)).collect();
        assert!(matches!(&events[4], Some(Event::Reward { change: RewardChange::Recovered, .. })), "{events:?}");
        assert_eq!(events.iter().flatten().count(), 1);
        (0..20).for_each(|_| assert!(fail(&meter).is_none(), "within the minute"));
        let health = meter.health();
        assert!(health.degraded);
        assert_eq!((health.errors["timeout"], health.failures.len(), health.requests), (26, MAX_FAILURES, 38));
    }

    #[test]
    fn counts_continue_from_a_previous_attempt() {
        let first = Meter::default();
        answer(&first, 5);
        let judgements = vec![Judgement::value(RewardValue::Number(1.0)), Judgement::missing("judge_timeout", "late")];
        let counts = Counts { cached: 1, ..Counts::default() };
        first.judged(&Judged { judgements: judgements.clone(), counts }, None);
        let breaker = BreakerReport { state: BreakerState::Open, opened: 2, ..BreakerReport::default() };
        let second = Meter::new(Some(RewardHealth { breaker: Some(breaker), ..first.health() }));
        assert_eq!(second.opened_before(), 2);
        second.judged(&Judged { judgements, counts }, None);
        let health = second.health();
        assert_eq!((health.samples, health.missing, health.cached, health.requests), (4, 2, 2, 1));
        assert_eq!(health.errors["sample"], 2);
        assert_eq!(health.latency_ms.unwrap().p50, 5.0, "until there is a newer one");
        let closed = [answer(&second, 5), answer(&second, 5)];
        assert!(
            matches!(closed, [Some(Event::Reward { change: RewardChange::BreakerClosed, .. }), None]),
            "{closed:?}"
        );
    }
}
