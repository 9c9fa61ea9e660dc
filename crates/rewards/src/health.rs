//! Tracks the share of samples without a value of one reward over recent rollouts: when to warn, and when to pause the job instead
//! of training on few values.

use std::collections::VecDeque;

use serde_json::json;

use super::{Judged, RewardFailure};
use crate::event::Event;
use crate::rollout::RewardValue;

/// Number of recent rollouts over which the share of missing values is computed.
const WINDOW: usize = 5;
/// Share of missing values over the recent rollouts above which a warning states this share.
const WARN_FRACTION: f64 = 0.2;
/// Share of missing values over five rollouts that pauses the job, unless the plan sets another.
const STOP_FRACTION: f64 = 0.5;

/// Counts of missing values of one reward in each of the last rollouts.
#[derive(Debug, Default)]
pub struct Health {
    window: VecDeque<(u64, u64)>,
    ever_valid: bool,
    stop_fraction: Option<f64>,
}

/// Decision about the job after a rollout was scored.
#[derive(Debug)]
pub enum Verdict {
    /// The job continues without a warning.
    Good,
    /// The job continues, with a warning.
    Warn(Event),
    /// The job must pause, because too many rewards are missing.
    Stop(RewardFailure),
}

impl Health {
    /// Creates counts that pause the job at this share of missing values; `None` uses the default of 0.5.
    pub fn pausing_at(stop_fraction: Option<f64>) -> Self {
        Self { stop_fraction, ..Self::default() }
    }

    /// Adds the counts of one rollout. Returns [`Verdict::Stop`] when the share of missing values over the last five rollouts
    /// reaches the limit, or when the first rollout got no valid answer at all, since such a service never worked.
    pub fn record(&mut self, reward: &str, judged: &Judged) -> Verdict {
        // A number with an error is a 0 that replaces an invalid answer (`on_invalid: zero`). The error is reported, but the value
        // does not count as missing.
        let failed = judged.judgements.iter().filter(|judgement| judgement.error.is_some());
        let example = failed.clone().next().and_then(|judgement| judgement.error.as_ref());
        let example = example.map(|error| format!("{}: {}", error.code, error.message)).unwrap_or_default();
        let reported = failed.count() as u64;
        let is_missing = |value| matches!(value, RewardValue::Missing);
        let missing = judged.judgements.iter().filter(|judgement| is_missing(judgement.value)).count() as u64;
        let total_samples = judged.judgements.len() as u64;
        self.ever_valid |= missing < total_samples;
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back((missing, total_samples));

        let invalid: u64 = self.window.iter().map(|(missing, _)| missing).sum();
        let total: u64 = self.window.iter().map(|(_, total_samples)| total_samples).sum();
        let fraction = invalid as f64 / (total.max(1)) as f64;
        let full = self.window.len() == WINDOW && fraction >= self.stop_fraction.unwrap_or(STOP_FRACTION);
        if total_samples > 0 && (full || !self.ever_valid) {
            return Verdict::Stop(RewardFailure::TooManyInvalid { reward: reward.to_owned(), invalid, total, example });
        }
        if reported == 0 {
            return Verdict::Good;
        }
        let zero = reported - missing.min(reported);
        let mut message = format!("reward '{reward}': {missing} of {total_samples} samples have no value");
        if zero > 0 {
            message.push_str(&format!(", {zero} invalid answers count as 0 (on_invalid: zero)"));
        }
        if fraction >= WARN_FRACTION {
            message.push_str(&format!("; {:.0} % over the last {} rollouts", fraction * 100.0, self.window.len()));
        }
        Verdict::Warn(Event::Warning {
            code: "reward_invalid".to_owned(),
            message: format!("{message}; for example: {example}"),
            data: json!({"reward": reward, "missing": missing, "zeroed": zero, "samples": total_samples, "window_fraction": fraction}),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Counts, Judgement};

    fn judged(valid: usize, missing: usize) -> Judged {
        let mut judgements = vec![Judgement::value(RewardValue::Number(1.0)); valid];
        judgements.extend(vec![Judgement::missing("nan", "NaN at index 0"); missing]);
        Judged { judgements, counts: Counts::default() }
    }

    #[test]
    fn a_service_that_never_worked_pauses_the_job_with_a_reason() {
        let Verdict::Stop(failure) = Health::default().record("r", &judged(0, 4)) else { panic!("should stop") };
        assert_eq!(failure.pause_reason(), Some("reward_invalid"));
        assert!(failure.to_string().contains("NaN at index 0"), "{failure}");
    }

    #[test]
    fn half_of_the_window_stops_less_warns_nothing_is_good() {
        let mut health = Health::default();
        assert!(matches!(health.record("r", &judged(4, 0)), Verdict::Good));
        for _ in 0..3 {
            assert!(matches!(health.record("r", &judged(1, 3)), Verdict::Warn(_)));
        }
        let Verdict::Stop(failure) = health.record("r", &judged(3, 1)) else { panic!("10 of 20 should stop") };
        assert!(failure.to_string().contains("10 of the last 20"), "{failure}");
        assert!(matches!(Health::default().record("r", &judged(4, 0)), Verdict::Good));
    }

    #[test]
    fn the_plan_may_say_at_which_fraction_it_stops() {
        let verdict = |fraction| {
            let mut health = Health::pausing_at(Some(fraction));
            health.record("r", &judged(4, 0));
            (0..3).for_each(|_| drop(health.record("r", &judged(3, 1))));
            health.record("r", &judged(3, 1))
        };
        assert!(matches!(verdict(0.2), Verdict::Stop(_)), "4 of 20");
        assert!(matches!(verdict(0.21), Verdict::Warn(_)));
        let mut health = Health::pausing_at(Some(1.0));
        health.record("r", &judged(1, 3));
        assert!((0..9).all(|_| matches!(health.record("r", &judged(1, 3)), Verdict::Warn(_))));
    }

    #[test]
    fn a_whole_rollout_lost_later_is_only_a_warning() {
        let mut health = Health::default();
        health.record("r", &judged(4, 0));
        assert!(matches!(health.record("r", &judged(0, 4)), Verdict::Warn(_)));
    }
}
