//! Rewards: try one, score stored samples with another one, see how a job's own do, answer a request later.

use std::collections::BTreeMap;

use jiff::Timestamp;
use reqwest::Method;
use rlood_types::event::SamplePhase;
use rlood_types::id::{JobId, RewardRequestId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::client::Client;
use crate::error::Error;
use crate::page::Pages;
use crate::retry::Repeat;

/// What the server may take to ask the service, or to score stored samples.
const WORK: std::time::Duration = std::time::Duration::from_secs(120);

/// What a reward made of the samples of a test.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RewardTest {
    /// Every sample got a number, or the reward does not apply to it.
    pub ok: bool,
    /// One a sample, in order.
    pub results: Vec<RewardTestResult>,
    /// Of all scoring, ms.
    pub latency_ms: f64,
    /// The answer to `reward.ping`; `None` for built-in rewards.
    pub ping: Option<Value>,
    /// What went over the wire.
    #[serde(default)]
    pub exchanges: Vec<Value>,
    /// What works, but should not stay as it is.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// One sample's result.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RewardTestResult {
    /// As sent to the service.
    pub sample_id: String,
    /// The value, if there is one.
    pub reward: Option<f64>,
    /// The reward does not apply to this sample.
    #[serde(default)]
    pub not_applicable: bool,
    /// Why there is no value.
    pub error: Option<SampleProblem>,
    /// The service's own words.
    pub reason: Option<String>,
    /// The service's own figures.
    #[serde(default)]
    pub metrics: Map<String, Value>,
}

/// Why a sample has no value.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct SampleProblem {
    /// A stable word.
    pub code: String,
    /// For people.
    pub message: String,
}

/// Another reward beside the job's own.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Rescore {
    /// The new reward's name.
    pub reward: String,
    /// The job's reward that it stands for; `None` = all of them together.
    pub replaces: Option<String>,
    /// Of which samples.
    pub phase: SamplePhase,
    /// The first step among them.
    pub from_step: u64,
    /// The last.
    pub to_step: u64,
    /// How many samples were scored.
    pub samples: usize,
    /// Whether all of them were asked about and answered in time.
    pub complete: bool,
    /// Samples without a value.
    pub missing: usize,
    /// Samples that the new reward does not apply to.
    pub not_applicable: usize,
    /// What limits the comparison.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Of asking, ms.
    pub latency_ms: f64,
    /// One a sample, oldest first.
    pub results: Vec<RescoredSample>,
    /// The figures of the comparison: `errors`, `old`, `new`, `correlation`, `advantages`, `groups`.
    #[serde(flatten)]
    pub figures: Map<String, Value>,
}

/// One sample, old and new.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RescoredSample {
    /// Its step.
    pub step: u64,
    /// Its group.
    pub group_id: String,
    /// Its dataset row.
    pub prompt_id: String,
    /// Which completion of its group, from 0.
    pub index: usize,
    /// As stored.
    pub old: Option<f64>,
    /// What the new reward says.
    pub new: Option<f64>,
    /// With the old value.
    pub old_advantage: Option<f64>,
    /// With the new one.
    pub new_advantage: Option<f64>,
    /// Why there is no new value.
    pub error: Option<SampleProblem>,
    /// The service's own words.
    pub reason: Option<String>,
}

/// How a reward of a job does.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct JobReward {
    /// Its name.
    pub name: String,
    /// Its type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its weight.
    pub weight: f64,
    /// Whether a sample without its value has no reward.
    pub required: bool,
    /// Whether it is one of the evaluation's own.
    pub evaluation: bool,
    /// When it was reported last.
    pub updated_at: Option<Timestamp>,
    /// The attempt that reported it.
    pub attempt: u64,
    /// Of the samples, those whose value is missing.
    pub missing_fraction: Option<f64>,
    /// Tries that failed.
    pub failed: u64,
    /// Samples so far.
    pub samples: u64,
    /// Samples without a value.
    pub missing: u64,
    /// Requests so far.
    pub requests: u64,
    /// Tries after the first one.
    pub retries: u64,
    /// Failed tries by reason.
    #[serde(default)]
    pub errors: BTreeMap<String, u64>,
    /// Whether too many of its latest tries failed.
    pub degraded: bool,
    /// The rest: `breaker`, `latency_ms`, `failures`, `slowest`, ….
    #[serde(flatten)]
    pub figures: Map<String, Value>,
}

/// What became of the results of a late answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct CallbackTaken {
    /// New ones.
    pub accepted: u64,
    /// Those that were there already.
    pub duplicate: u64,
    /// Those of samples that the request does not have.
    pub unknown: u64,
}

impl Client {
    /// Tries a reward (as in a job) on samples of `{prompt, completion, columns}`. The service is asked once.
    ///
    /// # Errors
    /// `invalid_body` when the reward or the samples are not valid, or any other [`Error`]. A service that fails is an
    /// answer.
    pub async fn test_reward(&self, reward: &Value, samples: &Value) -> Result<RewardTest, Error> {
        let call = self.call(Method::POST, &["rewards", "test"]).json(&json!({"reward": reward, "samples": samples}));
        self.json(call.repeat(Repeat::Again).work(WORK)).await
    }

    /// Scores a job's stored samples with another reward. `request` is as the API's document says: `{"reward": …}`, and optionally
    /// `replaces`, `phase`, `step`, `min_step`, `max_step`, `limit`, `max_wait_s`.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn rescore_job(&self, id: JobId, request: &Value) -> Result<Rescore, Error> {
        self.json(self.post_once(&["jobs", &id.to_string(), "rescore"]).json(request).work(WORK)).await
    }

    /// How the rewards of a job do.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn list_job_rewards(&self, id: JobId) -> Result<Vec<JobReward>, Error> {
        Pages::new(self, self.get(&["jobs", &id.to_string(), "rewards"])).collect().await
    }

    /// Answers a request to a reward service later, with the token of the request's `reply` and a `RewardCallback` of the API's
    /// document. A result that is sent twice counts once.
    ///
    /// # Errors
    /// `gone` when nobody waits for it any more, or any other [`Error`].
    pub async fn take_reward_callback(
        &self,
        id: RewardRequestId,
        token: &str,
        results: &Value,
    ) -> Result<CallbackTaken, Error> {
        let call = self.call(Method::POST, &["reward-callbacks", &id.to_string()]).bearer(token)?;
        self.json(call.json(results)).await
    }
}
