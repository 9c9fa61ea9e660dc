//! Checks a reward service with repeated and concurrent requests, and measures its latency.

use futures::future::join_all;

use super::answers::NO_ANSWER;
use super::report::Latency;
use super::wire::Signing;
use super::{Check, Outcome, new_id, numbers, read};
use crate::rollout::RewardSample;

/// Number of concurrent requests.
const CONCURRENT: usize = 8;
/// Number of requests whose latency is measured.
const TIMED: usize = 12;

impl Check {
    /// Checks retries: sends the same request twice, as after a lost response, and the same samples under another request id.
    pub(super) async fn repeat(&mut self) {
        let samples = self.samples.clone();
        let id = new_id();
        let body = self.request(&id, &samples).to_string();
        let [first, second] = [self.ask_with(&id, &body, &samples).await, self.ask_with(&id, &body, &samples).await];
        match (first, second) {
            (Ok(first), Ok(second)) if numbers(&first) == numbers(&second) => {
                self.find(
                    "idempotency",
                    Outcome::Ok,
                    "a repeated request (same id) got the same rewards as the first one",
                    "",
                );
            }
            (Ok(_), Ok(_)) => {
                let fix = "a request is repeated with the same id and bytes when its answer was lost: store the answer by \
                           id until its deadline_ms has passed, and return it again";
                let detail = "repeating a request (same id, same bytes) returned different rewards";
                self.find("idempotency", Outcome::Failed, detail, fix);
            }
            (_, Err(why)) | (Err(why), _) => {
                let fix = "a request is repeated with the same id when its answer was lost: answer each repetition";
                self.find("idempotency", Outcome::Failed, format!("the same request again: {why}"), fix);
            }
        }
    }

    /// Checks concurrent requests: sends several together, each with other samples.
    pub(super) async fn concurrency(&mut self) {
        let requests: Vec<(String, Vec<RewardSample>, String)> = (0..CONCURRENT)
            .map(|at| {
                let mut samples = self.samples.clone();
                // The requests use equal sample ids for different completions, so that an answer meant for another request is
                // noticed.
                samples.rotate_left(at % self.samples.len().max(1));
                for (index, sample) in samples.iter_mut().enumerate() {
                    sample.sample_id = format!("s_{index}");
                }
                let id = new_id();
                let body = self.request(&id, &samples).to_string();
                (id, samples, body)
            })
            .collect();
        let this = &*self;
        let posts = requests.iter().map(|(id, samples, body)| async move {
            let got = this.wire.post(id, body, Signing::Right).await?;
            read(&got, id, samples).map(|answer| (numbers(&answer), this.problems(&answer, samples)))
        });
        let answers = join_all(posts).await;
        let mut wrong: Vec<String> = Vec::new();
        let mut mixed = false;
        let expected = answers.first().and_then(|first| first.as_ref().ok()).map(|(numbers, _)| numbers.clone());
        for (at, answer) in answers.iter().enumerate() {
            match answer {
                Err(why) => wrong.push(why.clone()),
                Ok((_, problems)) if !problems.is_empty() => wrong.extend(problems.iter().take(1).cloned()),
                Ok((numbers, _)) => {
                    let mut alone = expected.clone().unwrap_or_default();
                    let by = at % alone.len().max(1);
                    alone.rotate_left(by);
                    mixed |= *numbers != alone;
                }
            }
        }
        let steady =
            !self.findings.list.iter().any(|finding| finding.check == "order" && finding.outcome != Outcome::Ok);
        if let Some(example) = wrong.first() {
            let detail =
                format!("{CONCURRENT} concurrent requests: {} not answered; for example: {example}", wrong.len());
            let fix =
                "a job sends up to max_concurrency (8) concurrent requests: answer them all, or 429 with Retry-After";
            self.find("concurrency", Outcome::Failed, detail, fix);
        } else if mixed && steady {
            let detail = format!("{CONCURRENT} concurrent requests: samples got other rewards than in single requests");
            let fix = "keep the state of requests separate: sample ids (s_0, s_1, …) repeat from request to request";
            self.find("concurrency", Outcome::Failed, detail, fix);
        } else {
            self.find("concurrency", Outcome::Ok, format!("{CONCURRENT} concurrent requests, all answered"), "");
        }
    }

    /// Measures the latency of requests with one group.
    pub(super) async fn latency(&mut self) {
        let first = self.samples[0].group_id.clone();
        let group: Vec<RewardSample> = self.samples.iter().filter(|sample| sample.group_id == first).cloned().collect();
        self.latencies.clear();
        let mut failed = Vec::new();
        for _ in 0..TIMED {
            failed.extend(self.ask(&group).await.err());
        }
        let limit_ms = self.wire.timeout.as_secs_f64() * 1e3;
        let Some(Latency { p50, p95, max, .. }) = Latency::of(&self.latencies) else {
            let why = failed.first().cloned().unwrap_or_default();
            return self.find(
                "latency",
                Outcome::Failed,
                format!("none of {TIMED} requests was answered: {why}"),
                NO_ANSWER,
            );
        };
        let detail = format!("{TIMED} requests of one group: p50 {p50} ms, p95 {p95} ms, slowest {max} ms");
        if let Some(why) = failed.first() {
            let detail = format!("{detail}; {} not answered: {why}", failed.len());
            self.find("latency", Outcome::Failed, detail, NO_ANSWER);
        } else if p95 > limit_ms / 2.0 {
            let fix = "raise timeout_ms in the job's reward, send smaller batches (max_batch_samples), or answer 202 and call back";
            self.find("latency", Outcome::Warning, format!("{detail}; an attempt times out after {limit_ms} ms"), fix);
        } else {
            self.find("latency", Outcome::Ok, detail, "");
        }
    }
}
