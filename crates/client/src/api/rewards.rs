//! Rewards: test one, score stored samples with another one, show the statistics of a job's rewards, and answer a request later.

use std::collections::BTreeMap;

use jiff::Timestamp;
use reqwest::Method;
use rlood_types::environment::Episode;
use rlood_types::event::SamplePhase;
use rlood_types::id::{JobId, RewardRequestId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;
use crate::retry::Repeat;

/// The server's time limit for calling a service or scoring stored samples.
const SERVER_TIME_LIMIT: std::time::Duration = std::time::Duration::from_secs(120);

/// The result of a reward test.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RewardTest {
    /// Whether the reward returned a number for every sample to which it applies.
    pub ok: bool,
    /// The test's results, one per sample, in order.
    pub results: Vec<RewardTestResult>,
    /// Total scoring time, in milliseconds.
    pub latency_ms: f64,
    /// Answer to `reward.ping`; `None` for built-in rewards.
    pub ping: Option<Value>,
    /// The HTTP requests and responses of the test.
    #[serde(default)]
    pub exchanges: Vec<Value>,
    /// Warnings about things that work but should be changed.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// The result of an environment test.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct EnvironmentTest {
    /// Whether every episode ended with a reward, and nothing went wrong.
    pub ok: bool,
    /// Id of the model that played.
    pub model: String,
    /// One episode for each row, in order; empty if they could not be played to their end.
    pub episodes: Vec<Episode>,
    /// What went wrong, in words.
    pub problems: Vec<String>,
    /// The HTTP requests and responses of the test.
    #[serde(default)]
    pub exchanges: Vec<Value>,
    /// Total time, in milliseconds.
    pub latency_ms: f64,
}

/// The result for one sample.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RewardTestResult {
    /// Id of the sample, as sent to the service.
    pub sample_id: String,
    /// Value of the reward; `None` = no value.
    pub reward: Option<f64>,
    /// Whether the reward does not apply to this sample.
    #[serde(default)]
    pub not_applicable: bool,
    /// Why the reward has no value for the sample.
    pub error: Option<SampleProblem>,
    /// Explanation that the service returned with the reward.
    pub reason: Option<String>,
    /// Metrics that the service returned with the reward.
    #[serde(default)]
    pub metrics: Map<String, Value>,
}

/// Why a sample has no value.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct SampleProblem {
    /// Stable error code in snake_case.
    pub code: String,
    /// Human-readable message in English.
    pub message: String,
}

/// A comparison of another reward with the job's own.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Rescore {
    /// Name of the new reward.
    pub reward: String,
    /// Name of the job's reward that the new one replaces; `None` = all of them together.
    pub replaces: Option<String>,
    /// Whether the samples are from training or from evaluations.
    pub phase: SamplePhase,
    /// First step of the samples.
    pub from_step: u64,
    /// Last step of the samples.
    pub to_step: u64,
    /// Number of samples that were scored.
    pub samples: usize,
    /// Whether all samples were sent to the reward and answered in time.
    pub complete: bool,
    /// Number of samples without a value.
    pub missing: usize,
    /// Number of samples to which the new reward does not apply.
    pub not_applicable: usize,
    /// Limitations of the comparison, for the user to read.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Total scoring time, in milliseconds.
    pub latency_ms: f64,
    /// The rewards of each sample, oldest sample first.
    pub results: Vec<RescoredSample>,
    /// Figures of the comparison: `errors`, `old`, `new`, `correlation`, `advantages`, `groups`.
    #[serde(flatten)]
    pub figures: Map<String, Value>,
}

/// The old and the new reward of one sample.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RescoredSample {
    /// Step of the sample.
    pub step: u64,
    /// Group of the sample.
    pub group_id: String,
    /// Dataset row of the sample.
    pub prompt_id: String,
    /// Index of the completion in its group, from 0.
    pub index: usize,
    /// The reward that is stored with the sample.
    pub old: Option<f64>,
    /// The value of the new reward.
    pub new: Option<f64>,
    /// Advantage with the stored reward.
    pub old_advantage: Option<f64>,
    /// Advantage with the new reward.
    pub new_advantage: Option<f64>,
    /// Why the new reward has no value for the sample.
    pub error: Option<SampleProblem>,
    /// Explanation that the service returned with the reward.
    pub reason: Option<String>,
}

/// Statistics of one of a job's rewards.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct JobReward {
    /// Name of the reward.
    pub name: String,
    /// Type of the reward.
    #[serde(rename = "type")]
    pub kind: String,
    /// Weight of the reward.
    pub weight: f64,
    /// Whether a sample without this reward is unscorable.
    pub required: bool,
    /// Whether the reward is a separate one of the evaluation.
    pub evaluation: bool,
    /// Time of the last report on the reward.
    pub updated_at: Option<Timestamp>,
    /// Number of the attempt that reported last.
    pub attempt: u64,
    /// Fraction of samples without a value.
    pub missing_fraction: Option<f64>,
    /// Number of requests to the reward's service that failed.
    pub failed: u64,
    /// Number of samples that the reward has scored so far.
    pub samples: u64,
    /// Number of samples without a value.
    pub missing: u64,
    /// Number of requests that were sent so far, with retries.
    pub requests: u64,
    /// Number of requests that repeated a failed one.
    pub retries: u64,
    /// Number of failed requests, by reason.
    #[serde(default)]
    pub errors: BTreeMap<String, u64>,
    /// Whether too many of the latest requests failed.
    pub degraded: bool,
    /// Other figures: `breaker`, `latency_ms`, `failures`, `slowest`, ….
    #[serde(flatten)]
    pub figures: Map<String, Value>,
}

/// How many results of a late answer the server stored or ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct CallbackCounts {
    /// Number of results that were stored.
    pub accepted: u64,
    /// Number of results for samples that already had one; these are ignored.
    pub duplicate: u64,
    /// Number of results for samples that are not in the request.
    pub unknown: u64,
}

impl Client {
    /// Tests a reward (as in a job) on samples of `{prompt, completion, columns}`. The service is called once.
    ///
    /// # Errors
    /// Fails with `invalid_body` if the reward or the samples are not valid, or with any other [`Error`]. A failure of the service
    /// is not an error.
    pub async fn test_reward(&self, reward: &Value, samples: &Value) -> Result<RewardTest, Error> {
        let call = self.call(Method::POST, &["rewards", "test"]).json(&json!({"reward": reward, "samples": samples}));
        self.json(call.repeat(Repeat::Again).work(SERVER_TIME_LIMIT)).await
    }

    /// Plays test episodes with an environment. `request` is as in the OpenAPI document: `{"environment": …, "rows": […]}`, and
    /// optionally `model`, `sampling`, `seed`. Each request to the environment is sent once.
    ///
    /// # Errors
    /// Fails with `invalid_body` if the environment or the rows are not valid, or with any other [`Error`]. A failure of the
    /// environment is not an error.
    pub async fn test_environment(&self, request: &Value) -> Result<EnvironmentTest, Error> {
        let call = self.call(Method::POST, &["environments", "test"]).json(request);
        self.json(call.repeat(Repeat::Again).work(SERVER_TIME_LIMIT)).await
    }

    /// Scores a job's stored samples with another reward. `request` is as in the OpenAPI document: `{"reward": …}`, and optionally
    /// `replaces`, `phase`, `step`, `min_step`, `max_step`, `limit`, `max_wait_s`.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn rescore_job(&self, id: JobId, request: &Value) -> Result<Rescore, Error> {
        self.json(self.post_once(&["jobs", &id.to_string(), "rescore"]).json(request).work(SERVER_TIME_LIMIT)).await
    }

    /// Returns the statistics of a job's rewards.
    ///
    /// # Errors
    /// Returns an [`Error`] if the call fails.
    pub async fn list_job_rewards(&self, id: JobId) -> Result<Vec<JobReward>, Error> {
        Pages::new(self, self.get(&["jobs", &id.to_string(), "rewards"])).collect().await
    }

    /// Answers a request to a reward service later, with the token of the request's `reply` and a `RewardCallback` of the OpenAPI
    /// document. A result that is sent twice counts once.
    ///
    /// # Errors
    /// Fails with `gone` if the request no longer waits for an answer, or with any other [`Error`].
    pub async fn take_reward_callback(
        &self,
        id: RewardRequestId,
        token: &str,
        results: &Value,
    ) -> Result<CallbackCounts, Error> {
        let call = self.call(Method::POST, &["reward-callbacks", &id.to_string()]).bearer(token)?;
        self.json(call.json(results)).await
    }

    /// Answers a request to an environment (`env_…`) later, with the token of the request's `reply` and an `EnvironmentCallback` of the
    /// OpenAPI document. The first answer counts.
    ///
    /// # Errors
    /// Fails with `gone` if the request no longer waits for an answer, or with any other [`Error`].
    pub async fn take_environment_callback(
        &self,
        id: &str,
        token: &str,
        answer: &Value,
    ) -> Result<CallbackCounts, Error> {
        let call = self.call(Method::POST, &["environment-callbacks", id]).bearer(token)?;
        self.json(call.json(answer)).await
    }
}
