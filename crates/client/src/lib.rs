//! A typed client of rlood's public HTTP API. It can do everything that the dashboard can.
//!
//! ```no_run
//! # async fn example() -> Result<(), rlood_client::Error> {
//! use rlood_client::{Client, JobUpdate};
//!
//! let client = Client::new("http://127.0.0.1:8080")?;
//! let job = client.create_demo().await?;
//! let mut updates = client.follow_job(job.id, 0);
//! while let Some(update) = updates.next().await? {
//!     if let JobUpdate::Event(event) = update {
//!         println!("{} {}", event.seq, event.kind);
//!     }
//! }
//! client.download_adapter(job.id, None, "adapter.tar".as_ref()).await?;
//! # Ok(())
//! # }
//! ```
//!
//! | module | content |
//! |---|---|
//! | `client` | [`Client`], its settings, TLS |
//! | `call` | one API call: its URL, its body, its retries, its response |
//! | `retry` | [`Retry`]: which failures are retried, and when |
//! | `error` | [`Error`] and [`Problem`] |
//! | `page` | [`Pages`]: lists as pages, as a stream, or as a whole |
//! | `upload` | bodies that are read from files; multipart forms |
//! | `download` | downloads that resume, are verified, and appear only when complete |
//! | `sse`, `follow` | server-sent events; [`JobUpdates`] and [`JobChanges`] |
//! | `raw` | [`RawCall`]: requests by path, responses as they were sent |
//! | `api` | one method per operation of `openapi.json`, named after its operation id |
//!
//! # Guarantees
//!
//! - A request that failed for a temporary reason is retried with increasing delays, and as the server's `Retry-After` asks.
//! - A request that creates or changes something carries an `Idempotency-Key`, the same one on every try, so that
//!   it is performed once.
//! - A download resumes where it stopped, and its file appears under its name only when it is complete and its hash is correct.
//! - Events arrive once each, in order, over as many connections as necessary.
//! - Unknown fields in responses are ignored.

mod api;
mod call;
mod client;
mod download;
mod error;
mod follow;
mod page;
mod raw;
mod retry;
mod sse;
mod upload;

pub use api::adapters::{AdapterSource, StoredAdapter};
pub use api::checkpoints::{Checkpoint, Which};
pub use api::compare::{Compared, ComparedStep, Comparison, Difference, Evaluation, MarkedMetrics, RewardSparkline};
pub use api::datasets::{Dataset, DatasetPreview, DatasetUpload, PreviewColumn, PreviewRow, Row};
pub use api::exports::Export;
pub use api::generate::{Generation, GenerationRequest};
pub use api::jobs::{Fork, Job, JobAlert, JobEnding, JobFilter, Marked, Preflight, Validation};
pub use api::keys::{ApiKey, AuditEvent, AuditFilter, KeyState, NewApiKey, NewKey, RevokedApiKey, RevokedKeyWebhook};
pub use api::models::{Model, ModelCard};
pub use api::pushes::Push;
pub use api::records::{
    Durations, ExportForm, LogLine, MetricTrend, MetricsQuery, MetricsRow, SampleQuery, SampleSort, Summary,
    SummaryCheckpoints,
};
pub use api::rewards::{
    CallbackCounts, EnvironmentTest, JobReward, Rescore, RescoredSample, RewardTest, RewardTestResult, SampleProblem,
};
pub use api::system::{Amount, Disk, KindAmount, KindStorage, OwnerStorage, Session, Storage, Worker, WorkerState};
pub use api::verdicts::{Verdict, VerdictRequest};
pub use api::webhooks::{NewWebhook, Webhook, WebhookDelivery, WebhookPatch, WebhookTry, WebhookWithSecret};
pub use client::{Client, ClientBuilder};
pub use download::{Checked, Downloaded};
pub use error::{Error, Problem};
pub use follow::{JobChange, JobChanges, JobEvent, JobUpdate, JobUpdates};
pub use page::{Page, Pages, Removed};
pub use raw::{RawAnswer, RawCall};
pub use retry::Retry;
pub use upload::{Content, Document};
