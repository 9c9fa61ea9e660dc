//! A typed client of rlood's public HTTP API: what the dashboard's user can do, without a browser.
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
//! | module | what |
//! |---|---|
//! | `client` | [`Client`], its settings, TLS |
//! | `call` | one request: its URL, its body, its retries, its answer |
//! | `retry` | [`Retry`]: which failures deserve another try, and when |
//! | `error` | [`Error`] and [`Problem`] |
//! | `page` | [`Pages`]: lists as pages, as a stream, as a whole |
//! | `upload` | bodies that are read from files; multipart forms |
//! | `download` | transfers that resume, are verified, and appear whole |
//! | `sse`, `follow` | server-sent events; [`JobUpdates`] and [`JobChanges`] |
//! | `raw` | [`RawCall`]: requests by their path, answers as they were sent |
//! | `api` | a method for each operation of `openapi.json`, under its operation id |
//!
//! # What it promises
//!
//! - A request that failed for a passing reason is sent again, with growing pauses, as the server's `Retry-After` asks.
//! - A request that creates or moves something carries an `Idempotency-Key`, the same one on every try: it is done once.
//! - A download goes on where it broke off, and its file appears under its name only when it is whole and its hash is right.
//! - Events arrive once each, in order, over as many connections as it takes.
//! - Answers may have fields that this version does not know; they are ignored.

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
pub use api::compare::{Compared, ComparedStep, Comparison, Difference, Evaluation, MarkedMetrics, RewardCourse};
pub use api::datasets::{Dataset, DatasetPreview, DatasetUpload, PreviewColumn, PreviewRow, Row};
pub use api::exports::Export;
pub use api::generate::{Generation, GenerationRequest};
pub use api::jobs::{Fork, Job, JobAlert, JobEnding, JobFilter, Marked, Preflight, Validation};
pub use api::keys::{ApiKey, AuditEvent, AuditFilter, KeyState, NewApiKey, NewKey, RevokedApiKey, RevokedKeyWebhook};
pub use api::models::{Model, ModelCard};
pub use api::records::{
    Course, Durations, ExportForm, LogLine, MetricsQuery, MetricsRow, SampleQuery, SampleSort, Summary,
    SummaryCheckpoints,
};
pub use api::rewards::{
    CallbackTaken, JobReward, Rescore, RescoredSample, RewardTest, RewardTestResult, SampleProblem,
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
