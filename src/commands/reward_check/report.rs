//! The findings of `rlood reward check`.

use std::fmt;

use serde::Serialize;

use crate::reward::webhook::PingReply;

/// The outcome of one check of a reward service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The service follows the reward contract in this check.
    Ok,
    /// The service works, but should be improved.
    Warning,
    /// The service violates the reward contract: jobs will fail or lose samples.
    Failed,
    /// The check did not run; the detail says why.
    Skipped,
}

/// The result of one check of a reward service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable name of the check in snake_case.
    pub check: &'static str,
    /// Outcome of the check.
    pub outcome: Outcome,
    /// Description of the observation.
    pub detail: String,
    /// Suggested fix; null if there is nothing to fix.
    pub fix: Option<String>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.outcome {
            Outcome::Ok => "ok",
            Outcome::Warning => "WARNING",
            Outcome::Failed => "FAILED",
            Outcome::Skipped => "skipped",
        };
        write!(f, "{word:<8} {:<20} {}", self.check, self.detail)?;
        match &self.fix {
            Some(fix) => write!(f, "\n{:>30}to do: {fix}", ""),
            None => Ok(()),
        }
    }
}

/// Latency of requests with one group, in ms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Latency {
    /// Number of answered requests.
    pub requests: usize,
    /// Median latency of all answered requests.
    pub p50: f64,
    /// The 95th percentile, by nearest rank.
    pub p95: f64,
    /// Latency of the slowest request.
    pub max: f64,
}

impl Latency {
    /// Computes the percentiles; `None` without latencies.
    pub(super) fn of(latencies: &[f64]) -> Option<Self> {
        let mut sorted = latencies.to_vec();
        sorted.sort_by(f64::total_cmp);
        let rank = |share: f64| sorted.get(((sorted.len() as f64 * share).ceil() as usize).saturating_sub(1)).copied();
        let rounded = |value: f64| (value * 1e3).round() / 1e3;
        Some(Self {
            requests: sorted.len(),
            p50: rounded(rank(0.5)?),
            p95: rounded(rank(0.95)?),
            max: rounded(*sorted.last()?),
        })
    }
}

/// All results of `rlood reward check` for one service.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// URL of the service without its query.
    pub url: String,
    /// Whether the service passed: no check has failed.
    pub ok: bool,
    /// Results in the order of the checks.
    pub findings: Vec<Finding>,
    /// The service's announced capabilities; null if none.
    pub ping: Option<PingReply>,
    /// Latency of all valid answers; null without any.
    pub latency_ms: Option<Latency>,
}

impl Report {
    pub(super) fn new(url: String, findings: Vec<Finding>, ping: Option<PingReply>, latencies: &[f64]) -> Self {
        let ok = findings.iter().all(|finding| finding.outcome != Outcome::Failed);
        Self { url, ok, findings, ping, latency_ms: Latency::of(latencies) }
    }

    /// Returns the number of checks with this outcome.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.findings.iter().filter(|finding| finding.outcome == outcome).count()
    }

    /// Returns the last line of the report: the verdict and the counts.
    pub fn summary(&self) -> String {
        let [ok, warnings, failed, skipped] =
            [Outcome::Ok, Outcome::Warning, Outcome::Failed, Outcome::Skipped].map(|outcome| self.count(outcome));
        let verdict = if self.ok { "follows the reward contract" } else { "does not follow the reward contract" };
        format!("{} {verdict}: {ok} ok, {warnings} warnings, {failed} failed, {skipped} skipped", self.url)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let latencies: Vec<f64> = (1..=20).rev().map(f64::from).collect();
        assert_eq!(Latency::of(&latencies), Some(Latency { requests: 20, p50: 10.0, p95: 19.0, max: 20.0 }));
        assert_eq!(Latency::of(&[7.0]).map(|latency| latency.p95), Some(7.0));
        assert_eq!(Latency::of(&[]), None);
    }
}
