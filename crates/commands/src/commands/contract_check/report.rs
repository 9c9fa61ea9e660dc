//! The findings of a check.

use std::fmt;
use std::process::ExitCode;

use serde::Serialize;

use super::CheckError;
use crate::reward::webhook::PingReply;

/// The outcome of one check of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The service follows the contract in this check.
    Ok,
    /// The service works, but should be improved.
    Warning,
    /// The service violates the contract: jobs will fail or lose samples.
    Failed,
    /// The check did not run; the detail says why.
    Skipped,
}

/// The result of one check of a service.
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

/// Latency of requests, in ms.
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
    pub(in super::super) fn of(latencies: &[f64]) -> Option<Self> {
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

/// The findings so far. Each is printed as soon as it is made, if `show` is set.
#[derive(Debug, Default)]
pub(in super::super) struct Findings {
    /// Whether findings are printed.
    pub show: bool,
    /// Texts that must never be printed: secrets and header values.
    pub secrets: Vec<String>,
    /// The findings, in order.
    pub list: Vec<Finding>,
}

impl Findings {
    /// Adds a finding, with secrets redacted.
    pub fn add(&mut self, check: &'static str, outcome: Outcome, detail: String, fix: &str) {
        let redact =
            |text: String| self.secrets.iter().fold(text, |text, secret| text.replace(secret.as_str(), "(redacted)"));
        let fix = (outcome != Outcome::Ok && !fix.is_empty()).then(|| redact(fix.to_owned()));
        let finding = Finding { check, outcome, detail: redact(detail), fix };
        if self.show {
            println!("{finding}");
        }
        self.list.push(finding);
    }
}

/// All results of a check for one service. `P` is what a service of the contract announces.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report<P = PingReply> {
    /// The contract that was checked, for the summary.
    #[serde(skip)]
    pub contract: &'static str,
    /// URL of the service without its query.
    pub url: String,
    /// Whether the service passed: no check has failed.
    pub ok: bool,
    /// Results in the order of the checks.
    pub findings: Vec<Finding>,
    /// The service's announced capabilities; null if none.
    pub ping: Option<P>,
    /// Latency of all valid answers; null without any.
    pub latency_ms: Option<Latency>,
}

impl<P: Serialize> Report<P> {
    pub(in super::super) fn new(
        contract: &'static str,
        url: String,
        findings: Vec<Finding>,
        ping: Option<P>,
        latencies: &[f64],
    ) -> Self {
        let ok = findings.iter().all(|finding| finding.outcome != Outcome::Failed);
        Self { contract, url, ok, findings, ping, latency_ms: Latency::of(latencies) }
    }

    /// Prints the report as JSON, or its summary. Returns exit code 0 if there are no failures, nor warnings with `strict`; else 1.
    pub(in super::super) fn finish(&self, json: bool, strict: bool) -> Result<ExitCode, CheckError> {
        if json {
            let text = serde_json::to_string_pretty(self).map_err(|error| CheckError(error.to_string()))?;
            println!("{text}");
        } else {
            println!("{}", self.summary());
        }
        let good = self.ok && !(strict && self.count(Outcome::Warning) > 0);
        Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// Returns the number of checks with this outcome.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.findings.iter().filter(|finding| finding.outcome == outcome).count()
    }

    /// Returns the last line of the report: the verdict and the counts.
    pub fn summary(&self) -> String {
        let [ok, warnings, failed, skipped] =
            [Outcome::Ok, Outcome::Warning, Outcome::Failed, Outcome::Skipped].map(|outcome| self.count(outcome));
        let verdict = if self.ok { "follows" } else { "does not follow" };
        format!(
            "{} {verdict} the {} contract: {ok} ok, {warnings} warnings, {failed} failed, {skipped} skipped",
            self.url, self.contract
        )
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
