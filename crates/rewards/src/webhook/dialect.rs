//! A dialect is the format of a reward service's requests and answers. Packing of samples, retries, limits, the policy for outgoing
//! addresses and the journal are the same for all dialects (`delivery`). rlood's own webhook format ("contract v1") is one dialect;
//! the others are in `adapters`.

use std::time::Duration;

use reqwest::Url;
use serde_json::{Map, Value, json};

use super::PingReply;
use super::answer::{self, Answer};
pub(crate) use super::request::Batching;
use super::request::{Envelope, ping_body, sample_json, score_body};
use crate::rollout::RewardSample;
use crate::secret_filter::Preserved;
use crate::spec::{PythonPlan, WebhookPlan};
use crate::{JobContext, SampleError};

/// A request and answer format for rewards over HTTP.
pub(crate) trait Dialect: Send + Sync {
    /// Converts one sample to the dialect's JSON. The size of the JSON counts when samples are packed into requests, and the JSON
    /// identifies the sample in the journal. On an error the sample is not sent and gets this error.
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError>;

    /// Builds the body of a request for one or more converted samples.
    fn body(&self, batch: &Batch<'_>) -> String;

    /// Parses and validates a service's answer. Returns an error if the answer as a whole is not valid.
    fn read(&self, body: &[u8], id: &str, samples: &[&RewardSample]) -> Result<Answer, String>;

    /// Returns strings of an answer that must not be redacted, even if they equal a secret, because [`Dialect::read`] needs them.
    /// The caller adds the sample ids.
    fn preserved(&self) -> Preserved {
        Preserved::default()
    }

    /// Returns which samples may share a request.
    fn batching(&self) -> Batching {
        Batching::Groups
    }

    /// Returns whether requests are signed according to Standard Webhooks.
    fn is_signed(&self) -> bool {
        false
    }

    /// Returns whether a service may accept a request (202) and answer later.
    fn answers_later(&self) -> bool {
        false
    }

    /// Returns whether a retry may succeed after this HTTP status; 408, 425, 429 and 5xx are retried in every dialect.
    fn is_transient(&self, _status: u16) -> bool {
        false
    }

    /// Returns how long to wait before a retry, if the body of an error answer says so.
    fn wait_hint(&self, _body: &[u8]) -> Option<Duration> {
        None
    }

    /// Returns the health check of the service; `id` is the request id of the check.
    fn health_check(&self, _url: &Url, _id: &str) -> HealthCheck {
        HealthCheck::None
    }
}

/// The content of a request, which the dialect formats.
pub(crate) struct Batch<'a> {
    /// Id of the request, `rwr_…`.
    pub id: &'a str,
    /// Name of the reward.
    pub reward: &'a str,
    /// The job and the rollout that the samples belong to.
    pub job: &'a JobContext,
    /// Callback address for asynchronous results, if callbacks are possible.
    pub callback_url: Option<&'a str>,
    /// The samples, converted by [`Dialect::piece`].
    pub pieces: &'a [&'a Value],
}

impl Batch<'_> {
    /// Returns a JSON list of one field of each converted sample.
    pub fn each(&self, field: &str) -> Value {
        self.pieces.iter().map(|piece| piece[field].clone()).collect()
    }

    /// Returns a JSON list of the converted samples.
    pub fn all(&self) -> Value {
        self.pieces.iter().copied().cloned().collect()
    }
}

/// The health check of a service.
pub(crate) enum HealthCheck {
    /// The service has no health check.
    None,
    /// The health check is a POST of this body. The answer may be a [`PingReply`].
    Post(String),
    /// The health check is a GET of this address; the function parses the answer.
    Get(Url, ReadHealthCheck),
}

/// Parses the capabilities that a service reports in the answer to a health check.
pub(crate) type ReadHealthCheck = fn(&[u8]) -> Option<PingReply>;

/// Contract v1, rlood's own format for rewards of type `webhook`.
pub(super) struct Contract(pub WebhookPlan);

impl Contract {
    /// Creates the dialect of the Python process for rewards of type `python`: contract v1 with token ids.
    pub(super) fn of_python(plan: &PythonPlan) -> Self {
        Self(WebhookPlan { service: plan.service.clone(), params: Map::new(), completion_ids: true })
    }
}

impl Dialect for Contract {
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError> {
        let mut piece = sample_json(sample);
        if let Some(ids) = sample.completion_ids.as_ref().filter(|_| self.0.completion_ids) {
            piece["completion_ids"] = json!(ids);
        }
        Ok(piece)
    }

    fn body(&self, batch: &Batch<'_>) -> String {
        let envelope =
            Envelope { reward: batch.reward, plan: &self.0, job: batch.job, callback_url: batch.callback_url };
        score_body(&envelope, batch.id, batch.pieces)
    }

    fn read(&self, body: &[u8], id: &str, samples: &[&RewardSample]) -> Result<Answer, String> {
        let ids: Vec<&str> = samples.iter().map(|sample| sample.sample_id.as_str()).collect();
        answer::read(body, id, &ids)
    }

    fn is_signed(&self) -> bool {
        true
    }

    fn answers_later(&self) -> bool {
        true
    }

    fn health_check(&self, _: &Url, id: &str) -> HealthCheck {
        HealthCheck::Post(ping_body(id))
    }
}
