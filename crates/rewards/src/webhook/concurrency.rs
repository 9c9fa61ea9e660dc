//! Limit on the concurrent requests to a reward service: up to the reward's maximum, lower while the service is overloaded
//! (additive increase, multiplicative decrease, as in TCP).

use std::time::{Duration, Instant};

/// Factor by which a 429, a 503 or a timeout reduces the concurrency limit.
const OVERLOAD_FACTOR: f64 = 0.5;
/// Factor by which answers that take much longer than before reduce the concurrency limit.
const SLOWDOWN_FACTOR: f64 = 0.9;
/// Answers count as slow if their latency exceeds this multiple of the long-term average plus the margin.
const SLOW_FACTOR: f64 = 2.5;
const SLOW_MARGIN: Duration = Duration::from_millis(100);
/// Weight of a new latency in the short-term and the long-term moving average.
const SHORT_TERM_WEIGHT: f64 = 0.25;
const LONG_TERM_WEIGHT: f64 = 0.02;

/// The current concurrency limit and the average latencies that control it.
#[derive(Debug)]
pub(super) struct Limit {
    limit: f64,
    max: u32,
    in_flight: u32,
    /// Time of the last reduction. A request sent before that time used the old limit, so its failure does
    /// not reduce the limit again.
    changed: Option<Instant>,
    /// Moving averages of the latency in seconds: short-term and long-term.
    short: Option<f64>,
    long: f64,
}

impl Limit {
    /// Creates a concurrency limit that starts at its maximum.
    pub fn new(max: u32) -> Self {
        let max = max.max(1);
        Self { limit: f64::from(max), max, in_flight: 0, changed: None, short: None, long: 0.0 }
    }

    /// Raises the maximum of the concurrency limit, because another reward uses the same address.
    pub fn widen(&mut self, max: u32) {
        if max > self.max {
            self.limit += f64::from(max - self.max);
            self.max = max;
        }
    }

    pub fn has_room(&self) -> bool {
        self.in_flight < self.current()
    }

    pub fn enter(&mut self) {
        self.in_flight += 1;
    }

    pub fn leave(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Returns the current concurrency limit, at least 1.
    pub fn current(&self) -> u32 {
        self.limit as u32
    }

    pub fn max(&self) -> u32 {
        self.max
    }

    /// Records an answer to a request that was sent at `began`. The limit rises by one after as many answers as the limit itself.
    pub fn answered(&mut self, began: Instant, now: Instant) {
        let took = (now - began).as_secs_f64();
        let short = match self.short {
            Some(short) => short + SHORT_TERM_WEIGHT * (took - short),
            None => {
                self.long = took;
                took
            }
        };
        self.short = Some(short);
        let slower = short > self.long * SLOW_FACTOR && short > self.long + SLOW_MARGIN.as_secs_f64();
        // The long-term average adapts slowly, so that a permanently slower service becomes the new baseline.
        self.long += LONG_TERM_WEIGHT * (took - self.long);
        if slower && self.in_flight > 1 {
            self.cut(SLOWDOWN_FACTOR, began, now);
        } else {
            self.limit = (self.limit + 1.0 / self.limit).min(f64::from(self.max));
        }
    }

    /// Records that the service reported an overload or did not answer in time.
    pub fn overloaded(&mut self, began: Instant, now: Instant) {
        self.cut(OVERLOAD_FACTOR, began, now);
    }

    fn cut(&mut self, left: f64, began: Instant, now: Instant) {
        if self.changed.is_none_or(|changed| began >= changed) {
            self.limit = (self.limit * left).max(1.0);
            self.changed = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overload_halves_it_once_for_all_tries_of_that_time_and_answers_raise_it_one_by_one() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut limit = Limit::new(8);
        (0..8).for_each(|_| limit.overloaded(at(0), at(10)));
        assert_eq!(limit.current(), 4, "one storm, one cut");
        limit.overloaded(at(11), at(20));
        limit.overloaded(at(21), at(30));
        limit.overloaded(at(31), at(40));
        assert_eq!(limit.current(), 1, "never less");
        let mut answers = 0;
        while limit.current() < 8 {
            answers += 1;
            limit.answered(at(50), at(60));
            assert!(answers < 100);
        }
        assert!((28..=40).contains(&answers), "1 + 2 + … + 7, about: {answers}");
        (0..100).for_each(|_| limit.answered(at(50), at(60)));
        assert_eq!(limit.current(), 8, "never more");
    }

    #[test]
    fn answers_that_take_much_longer_lower_it_and_what_is_slow_for_good_becomes_the_measure() {
        let start = Instant::now();
        let mut limit = Limit::new(8);
        (0..8).for_each(|_| limit.enter());
        let mut now = start;
        let mut answer = |limit: &mut Limit, ms| {
            let began = now;
            now += Duration::from_millis(ms);
            limit.answered(began, now);
        };
        (0..50).for_each(|_| answer(&mut limit, 100));
        assert_eq!(limit.current(), 8);
        (0..30).for_each(|_| answer(&mut limit, 1000));
        assert!(limit.current() < 6, "{limit:?}");
        (0..300).for_each(|_| answer(&mut limit, 1000));
        assert_eq!(limit.current(), 8, "{limit:?}");
    }

    #[test]
    fn a_second_reward_of_the_endpoint_adds_room() {
        let mut limit = Limit::new(2);
        limit.widen(5);
        limit.widen(3);
        assert_eq!((limit.current(), limit.max()), (5, 5));
        (0..5).for_each(|_| limit.enter());
        assert!(!limit.has_room());
        limit.leave();
        assert!(limit.has_room());
    }
}
