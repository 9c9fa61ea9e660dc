//! How a service is spoken to: what a request says and how an answer is read. Packing, retries, limits, the outgoing
//! policy and the journal are the same for all (`delivery`); contract v1 is one dialect, `adapters` has the others.

use std::time::Duration;

use reqwest::Url;
use serde_json::{Map, Value, json};

use super::PingReply;
use super::answer::{self, Answer};
pub(crate) use super::request::Batching;
use super::request::{Envelope, ping_body, sample_json, score_body};
use crate::hidden::Legible;
use crate::sample::RewardSample;
use crate::spec::{PythonPlan, WebhookPlan};
use crate::{JobContext, SampleError};

/// One way to ask for rewards over HTTP.
pub(crate) trait Dialect: Send + Sync {
    /// What a request says of one sample: its size counts when samples are packed, and it names the sample in the journal.
    /// The error is the sample's, which is then not asked about.
    fn piece(&self, sample: &RewardSample) -> Result<Value, SampleError>;

    /// The body of a request about some samples; never of none.
    fn body(&self, ask: &Ask<'_>) -> String;

    /// Reads an answer with suspicion. `Err` says why the whole is none.
    fn read(&self, body: &[u8], id: &str, samples: &[&RewardSample]) -> Result<Answer, String>;

    /// What of an answer must stay as it is for [`Dialect::read`], besides the ids that were sent: a secret may look the same.
    fn legible(&self) -> Legible {
        Legible::default()
    }

    /// What may stand in one request.
    fn batching(&self) -> Batching {
        Batching::Groups
    }

    /// Whether requests carry the headers of Standard Webhooks.
    fn is_signed(&self) -> bool {
        false
    }

    /// Whether a service may take a request (202) and answer later.
    fn answers_later(&self) -> bool {
        false
    }

    /// Whether a status besides 408, 425, 429 and 5xx means that the same request may go better later.
    fn is_transient(&self, _status: u16) -> bool {
        false
    }

    /// How long to wait, where the body of a transient failure says it.
    fn wait_hint(&self, _body: &[u8]) -> Option<Duration> {
        None
    }

    /// How the service is asked, under `id`, whether it is there.
    fn greeting(&self, _url: &Url, _id: &str) -> Greeting {
        Greeting::None
    }
}

/// A request to be written.
pub(crate) struct Ask<'a> {
    /// `rwr_…`
    pub id: &'a str,
    /// The reward's name.
    pub reward: &'a str,
    /// For which run.
    pub job: &'a JobContext,
    /// Where the answer may be sent later.
    pub callback_url: Option<&'a str>,
    /// Of its samples.
    pub pieces: &'a [&'a Value],
}

impl Ask<'_> {
    /// A list of one field of each piece.
    pub fn each(&self, field: &str) -> Value {
        self.pieces.iter().map(|piece| piece[field].clone()).collect()
    }

    /// A list of the pieces.
    pub fn all(&self) -> Value {
        self.pieces.iter().copied().cloned().collect()
    }
}

/// How a service is asked whether it is there.
pub(crate) enum Greeting {
    /// It is not.
    None,
    /// A body to POST; the answer may be a [`PingReply`].
    Post(String),
    /// An address to GET, and how its answer is read.
    Get(Url, ReadGreeting),
}

/// Reads what a service says of itself.
pub(crate) type ReadGreeting = fn(&[u8]) -> Option<PingReply>;

/// Contract v1.
pub(super) struct Contract(pub WebhookPlan);

impl Contract {
    /// Contract v1 as the Python server of this machine is asked: with the ids of tokens.
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

    fn body(&self, ask: &Ask<'_>) -> String {
        let envelope = Envelope { reward: ask.reward, plan: &self.0, job: ask.job, callback_url: ask.callback_url };
        score_body(&envelope, ask.id, ask.pieces)
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

    fn greeting(&self, _: &Url, id: &str) -> Greeting {
        Greeting::Post(ping_body(id))
    }
}
