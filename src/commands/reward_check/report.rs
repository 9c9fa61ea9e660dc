//! What a check found.

use std::fmt;

use serde::Serialize;

use crate::reward::webhook::PingReply;

/// How one check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// As the contract says.
    Ok,
    /// It works, but should not stay so.
    Warning,
    /// Jobs will suffer from it.
    Failed,
    /// Not looked at; the detail says why.
    Skipped,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable, snake_case.
    pub check: &'static str,
    /// How it came out.
    pub outcome: Outcome,
    /// What was seen.
    pub detail: String,
    /// What to do; null where nothing is to be done.
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

/// Of one-group requests, ms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Latency {
    /// Requests that were answered.
    pub requests: usize,
    /// Median.
    pub p50: f64,
    /// Nearest rank.
    pub p95: f64,
    /// Slowest.
    pub max: f64,
}

impl Latency {
    /// `None` of nothing.
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

/// Everything that was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Who was asked; a query is left out.
    pub url: String,
    /// Nothing failed.
    pub ok: bool,
    /// In the order they were looked at.
    pub findings: Vec<Finding>,
    /// What the service says of itself.
    pub ping: Option<PingReply>,
    /// Of all answers that could be read, ms.
    pub latency_ms: Option<Latency>,
}

impl Report {
    pub(super) fn new(url: String, findings: Vec<Finding>, ping: Option<PingReply>, latencies: &[f64]) -> Self {
        let ok = findings.iter().all(|finding| finding.outcome != Outcome::Failed);
        Self { url, ok, findings, ping, latency_ms: Latency::of(latencies) }
    }

    /// How many came out so.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.findings.iter().filter(|finding| finding.outcome == outcome).count()
    }

    /// The last line.
    pub fn summary(&self) -> String {
        let [ok, warnings, failed, skipped] =
            [Outcome::Ok, Outcome::Warning, Outcome::Failed, Outcome::Skipped].map(|outcome| self.count(outcome));
        let verdict = if self.ok { "keeps the contract" } else { "does not keep the contract" };
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
