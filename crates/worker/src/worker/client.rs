//! Client for the worker protocol: typed calls, their time limits, and retries. `transfer.rs` decides when a transfer
//! of a file has failed.

use std::path::Path;
use std::time::Duration;

use reqwest::header::{CONTENT_RANGE, HeaderValue, RANGE};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::watch;

pub use super::claim_ref::ClaimRef;
pub use super::client_error::ClientError;
use super::clock;
use super::transfer::{
    Download, TransferLimits, bytes_body, file_body, http_client, read_body, send_body, send_within,
};
use crate::digest::Sha256Digest;
use crate::error_text::with_causes;
use crate::failpoint::fail_point;
use crate::id::DatasetId;
use crate::protocol::{
    CallbackUpdates, Claim, ClaimRequest, DamagedFile, EventBatch, FileEntry, FileList, Finish, Heartbeat,
    HeartbeatReply, Inspection, JournalBatch, JournalPage, ModelFiles, Publish, Published, Register, Registered,
    RewardReports, read_claim,
};

/// How long a worker continues without an answer from the server.
pub(super) const MAX_OUTAGE: Duration = Duration::from_secs(15 * 60);
/// Time limit for a call with a small body.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a heartbeat, short enough for several within a lease.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(8);
/// Time limit for the response headers of a call that the server may hold until it has something to send.
const LONG_POLL_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of attempts at a download that arrives with a wrong hash.
pub(super) const MAX_DAMAGED_ATTEMPTS: u32 = 3;
/// Pause before the first retry; doubles with each further retry.
pub(super) const FIRST_DELAY: Duration = Duration::from_millis(200);
/// Longest pause before a retry.
pub(super) const MAX_DELAY: Duration = Duration::from_secs(5);

/// Retries a call to the server while `is_retryable` accepts its error, for up to [`MAX_OUTAGE`] after the first failure. The time
/// starts at the failure, so that a long transfer that fails near its end is retried too.
pub(super) async fn with_retries<T, F>(
    mut call: impl FnMut() -> F,
    is_retryable: impl Fn(&ClientError) -> bool,
) -> Result<T, ClientError>
where
    F: Future<Output = Result<T, ClientError>>,
{
    let mut failing_since = None;
    let mut delay = FIRST_DELAY;
    loop {
        match call().await {
            Err(error)
                if is_retryable(&error)
                    && clock::now() - *failing_since.get_or_insert_with(clock::now) < MAX_OUTAGE =>
            {
                tracing::debug!(error = with_causes(&error), "trying again");
                tokio::time::sleep(delay).await;
                delay = (delay * 2).min(MAX_DELAY);
            }
            other => return other,
        }
    }
}

/// Retry rule of [`with_retries`] for calls that write to the server's disk. A full disk is not retried, so
/// that the job pauses instead.
pub(super) fn unless_disk_full(error: &ClientError) -> bool {
    error.is_transient() && !matches!(error, ClientError::StorageFull { .. })
}

/// Retries a download like [`with_retries`], and a few times if its hash is wrong, since the source itself may be damaged.
pub(super) async fn fetch<F>(mut call: impl FnMut() -> F) -> Result<(), ClientError>
where
    F: Future<Output = Result<(), ClientError>>,
{
    let mut tries = 0;
    loop {
        tries += 1;
        match with_retries(&mut call, ClientError::is_transient).await {
            Err(ClientError::Damaged { name }) if tries < MAX_DAMAGED_ATTEMPTS => {
                tracing::warn!(name, "the downloaded file has a wrong hash; downloading it again");
            }
            other => return other,
        }
    }
}

/// A client for the server's worker protocol. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Client {
    http: reqwest::Client,
    base: Url,
    token: String,
    limits: TransferLimits,
    /// Number of uploaded bytes that the server has received, from its answers to heartbeats.
    received: watch::Sender<u64>,
}

impl Client {
    /// Creates a client for a server's http or https address. The server's own children ignore proxies in the environment.
    pub(super) fn new(server: &str, token: &str, child: bool) -> Result<Self, String> {
        let base = Url::parse(server).map_err(|error| format!("--server '{server}' is not a URL: {error}"))?;
        if !matches!(base.scheme(), "http" | "https") || base.cannot_be_a_base() {
            return Err(format!("--server '{server}' is neither http:// nor https://"));
        }
        let mut builder = http_client().user_agent(concat!("rlood-worker/", env!("CARGO_PKG_VERSION")));
        if child {
            builder = builder.no_proxy();
        }
        let http = builder.build().map_err(|error| format!("cannot create the HTTP client: {error}"))?;
        let (limits, received) = (TransferLimits::default(), watch::Sender::default());
        Ok(Self { http, base, token: token.to_owned(), limits, received })
    }

    /// Replaces the limits after which a transfer has failed.
    #[cfg(test)]
    pub(super) fn with_limits(self, limits: TransferLimits) -> Self {
        Self { limits, ..self }
    }

    pub(super) async fn register(&self, register: &Register) -> Result<Registered, ClientError> {
        let request = self.request(Method::POST, &["register"], None).timeout(CALL_TIMEOUT).json(register);
        self.json(answer("register", send_within(CALL_TIMEOUT, request)).await?).await
    }

    /// Requests a job from the queue; `None` means that the queue is empty.
    pub(super) async fn claim(&self, request: &ClaimRequest) -> Result<Option<Claim>, ClientError> {
        let limit = CALL_TIMEOUT + Duration::from_millis(request.wait_ms);
        let request = self.request(Method::POST, &["claim"], None).timeout(limit).json(request);
        let response = answer("claim", send_within(limit, request)).await?;
        if response.status() == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        let sent: Value = self.json(response).await?;
        read_claim(&sent)
            .map(Some)
            .map_err(|source| ClientError::Claim { claim_ref: ClaimRef::named_in(&sent).map(Box::new), source })
    }

    pub(super) async fn heartbeat(
        &self,
        claim_ref: ClaimRef,
        heartbeat: &Heartbeat,
    ) -> Result<HeartbeatReply, ClientError> {
        let request = self.on_job(Method::POST, claim_ref, &["heartbeat"]).timeout(HEARTBEAT_TIMEOUT).json(heartbeat);
        let reply: HeartbeatReply =
            self.json(answer("heartbeat", send_within(HEARTBEAT_TIMEOUT, request)).await?).await?;
        let now = reply.received_bytes;
        self.received.send_if_modified(|received| std::mem::replace(received, now) != now);
        Ok(reply)
    }

    pub(super) async fn events(&self, claim_ref: ClaimRef, batch: &EventBatch) -> Result<(), ClientError> {
        self.send_json("events", self.on_job(Method::POST, claim_ref, &["events"]), batch).await.map(drop)
    }

    pub(super) async fn journal(&self, claim_ref: ClaimRef, after: i64) -> Result<JournalPage, ClientError> {
        let request = self.fenced(Method::GET, claim_ref, &["journal", &after.to_string()]);
        self.json(answer("journal_read", send_within(LONG_POLL_TIMEOUT, request)).await?).await
    }

    pub(super) async fn journal_append(&self, claim_ref: ClaimRef, batch: &JournalBatch) -> Result<(), ClientError> {
        self.send_json("journal", self.on_job(Method::POST, claim_ref, &["journal"]), batch).await.map(drop)
    }

    pub(super) async fn rewards(&self, claim_ref: ClaimRef, reports: &RewardReports) -> Result<(), ClientError> {
        let request = self.on_job(Method::POST, claim_ref, &["rewards"]).timeout(CALL_TIMEOUT).json(reports);
        answer("rewards", send_within(CALL_TIMEOUT, request)).await.map(drop)
    }

    /// Fetches the callback results of reward services after the cursor `after`. The server holds the call while there are none.
    pub(super) async fn callbacks(&self, claim_ref: ClaimRef, after: i64) -> Result<CallbackUpdates, ClientError> {
        let request = self.fenced(Method::GET, claim_ref, &["callbacks", &after.to_string()]);
        self.json(answer("callbacks", send_within(LONG_POLL_TIMEOUT, request)).await?).await
    }

    pub(super) async fn finish(&self, claim_ref: ClaimRef, finish: &Finish) -> Result<(), ClientError> {
        let request = self.on_job(Method::POST, claim_ref, &["finish"]).timeout(CALL_TIMEOUT).json(finish);
        answer("finish", send_within(CALL_TIMEOUT, request)).await.map(drop)
    }

    pub(super) async fn publish(
        &self,
        claim_ref: ClaimRef,
        step: u64,
        publish: &Publish,
    ) -> Result<Published, ClientError> {
        let request = self.on_job(Method::POST, claim_ref, &["checkpoints", &step.to_string()]).json(publish);
        // The time limit depends on the checkpoint's size: the server moves and syncs the files before it answers, and an older
        // server also reads all of them.
        let limit = self.limits.answer(publish.files.iter().map(|file| file.size_bytes).sum());
        self.json(answer("publish", send_within(limit, request)).await?).await
    }

    /// Uploads one file of a checkpoint.
    pub(super) async fn upload(
        &self,
        claim_ref: ClaimRef,
        step: u64,
        dir: &Path,
        file: &FileEntry,
    ) -> Result<(), ClientError> {
        let body = file_body(&dir.join(&file.name), file.size_bytes).await?;
        let request = self
            .fenced(Method::PUT, claim_ref, &["checkpoints", &step.to_string(), &file.name])
            .header(reqwest::header::CONTENT_TYPE, "application/octet-stream");
        answer("upload", send_body(request, body, self.limits, self.received.subscribe())).await.map(drop)
    }

    /// Uploads a file of an adapter for rollout servers.
    pub(super) async fn upload_rollout_adapter(
        &self,
        claim_ref: ClaimRef,
        adapter: &str,
        file: &Path,
    ) -> Result<(), ClientError> {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let size_bytes = tokio::fs::metadata(file)
            .await
            .map_err(|source| ClientError::Disk { doing: "read an adapter", source })?
            .len();
        let body = file_body(file, size_bytes).await?;
        let request = self
            .fenced(Method::PUT, claim_ref, &["rollout-adapters", adapter, &name])
            .header(reqwest::header::CONTENT_TYPE, "application/octet-stream");
        answer("upload an adapter", send_body(request, body, self.limits, self.received.subscribe())).await.map(drop)
    }

    pub(super) async fn dataset(
        &self,
        claim_ref: ClaimRef,
        id: DatasetId,
        sha256: &str,
        to: &Path,
    ) -> Result<(), ClientError> {
        let request = self.fenced(Method::GET, claim_ref, &["datasets", &id.to_string()]);
        self.download(request, Download { name: "the dataset", sha256, to, received: None }).await
    }

    /// Downloads an image of a dataset.
    pub(super) async fn image(
        &self,
        claim_ref: ClaimRef,
        dataset: DatasetId,
        sha256: Sha256Digest,
        to: &Path,
    ) -> Result<(), ClientError> {
        let sha256 = sha256.to_string();
        let request = self.fenced(Method::GET, claim_ref, &["datasets", &dataset.to_string(), "images", &sha256]);
        self.download(request, Download { name: "an image of the dataset", sha256: &sha256, to, received: None }).await
    }

    /// Downloads a file of the checkpoint to resume from, or of the warm start.
    pub(super) async fn checkpoint_file(
        &self,
        claim_ref: ClaimRef,
        list: FileList,
        file: &FileEntry,
        to: &Path,
    ) -> Result<(), ClientError> {
        let route = match list {
            FileList::Resume => "resume",
            FileList::Initial => "initial",
        };
        let request = self.fenced(Method::GET, claim_ref, &[route, &file.name]);
        self.download(request, Download { name: &file.name, sha256: &file.sha256.to_string(), to, received: None })
            .await
    }

    /// Lists the files of one of the job's models. The server holds the call while it hashes the files.
    pub(super) async fn model_files(&self, claim_ref: ClaimRef, model: &str) -> Result<ModelFiles, ClientError> {
        let request = self.fenced(Method::GET, claim_ref, &["models", model]);
        self.json(answer("models", send_within(LONG_POLL_TIMEOUT, request)).await?).await
    }

    /// Downloads a file of one of the job's models.
    pub(super) async fn model_file(
        &self,
        claim_ref: ClaimRef,
        model: &str,
        download: Download<'_>,
    ) -> Result<(), ClientError> {
        self.download(self.fenced(Method::GET, claim_ref, &["models", model, download.name]), download).await
    }

    /// Asks the server to verify a file that was downloaded with a wrong hash. The server holds the call while it reads the file.
    pub(super) async fn inspect(&self, claim_ref: ClaimRef, file: &DamagedFile) -> Result<Inspection, ClientError> {
        let request = self.on_job(Method::POST, claim_ref, &["damaged"]).json(file);
        self.json(answer("damaged", send_within(LONG_POLL_TIMEOUT, request)).await?).await
    }

    /// Downloads a file, or the rest of a file that was partly downloaded before.
    async fn download(&self, request: RequestBuilder, download: Download<'_>) -> Result<(), ClientError> {
        let here = download.bytes_here().await;
        let request = if here > 0 { request.header(RANGE, format!("bytes={here}-")) } else { request };
        let response = match answer("download", send_within(self.limits.answer(0), request)).await {
            // Status 416: the partly downloaded file is not shorter than the server's, so its bytes are wrong.
            Err(ClientError::Refused { status: 416, .. }) => {
                download.start_over().await;
                return Err(ClientError::Damaged { name: download.name.to_owned() });
            }
            response => response?,
        };
        // The server must send exactly the requested rest of the file.
        let begins =
            |range: &HeaderValue| range.to_str().is_ok_and(|range| range.starts_with(&format!("bytes {here}-")));
        let is_rest = response.headers().get(CONTENT_RANGE).is_some_and(begins);
        if response.status() == StatusCode::PARTIAL_CONTENT && !is_rest {
            download.start_over().await;
            return Err(ClientError::Damaged { name: download.name.to_owned() });
        }
        download.read(response, self.limits.stall).await
    }

    /// Sends a request whose body may be large.
    async fn send_json(
        &self,
        call: &'static str,
        request: RequestBuilder,
        body: &impl Serialize,
    ) -> Result<Response, ClientError> {
        let body = bytes_body(serde_json::to_vec(body).map_err(ClientError::Protocol)?);
        let request = request.header(reqwest::header::CONTENT_TYPE, "application/json");
        answer(call, send_body(request, body, self.limits, self.received.subscribe())).await
    }

    async fn json<T: DeserializeOwned>(&self, response: Response) -> Result<T, ClientError> {
        serde_json::from_slice(&read_body(response, self.limits.stall).await?).map_err(ClientError::Protocol)
    }

    /// Builds a request about a job whose body contains the number of the attempt.
    fn on_job(&self, method: Method, claim_ref: ClaimRef, rest: &[&str]) -> RequestBuilder {
        self.request(method, &[&["jobs", &claim_ref.job.to_string()], rest].concat(), None)
    }

    /// Builds a request about a job whose URL contains the number of the attempt.
    fn fenced(&self, method: Method, claim_ref: ClaimRef, rest: &[&str]) -> RequestBuilder {
        self.request(method, &[&["jobs", &claim_ref.job.to_string()], rest].concat(), Some(claim_ref.attempt))
    }

    fn request(&self, method: Method, path: &[&str], attempt: Option<u64>) -> RequestBuilder {
        let mut url = self.base.clone();
        // Only URLs like `mailto:` have no path segments, and `new` rejects them.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("worker").extend(path);
        }
        if let Some(attempt) = attempt {
            url.query_pairs_mut().append_pair("attempt", &attempt.to_string());
        }
        self.http.request(method, url).bearer_auth(&self.token)
    }
}

/// Converts an error status of the server's answer to a [`ClientError`]. `call` is the name of the call, at which
/// tests can inject failures.
#[cfg_attr(
    not(any(test, feature = "failpoints")),
    expect(unused_variables, reason = "only tests ask which call it is")
)]
async fn answer(
    call: &'static str,
    sent: impl Future<Output = Result<Response, ClientError>>,
) -> Result<Response, ClientError> {
    #[derive(Default, serde::Deserialize)]
    #[serde(default)]
    struct Problem {
        code: String,
        detail: String,
    }
    fail_point!("client.before", call).map_err(|_| ClientError::Unavailable(503))?;
    let response = sent.await?;
    fail_point!("client.after", call).map_err(|_| ClientError::Unavailable(503))?;
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let body = read_body(response, CALL_TIMEOUT).await.unwrap_or_default();
    let Problem { code, detail } = serde_json::from_slice(&body)
        .unwrap_or_else(|_| Problem { code: String::new(), detail: "the server gave no reason".to_owned() });
    Err(match (status.as_u16(), code.as_str()) {
        (409, "lease_lost") => ClientError::LeaseLost,
        (409, "protocol_mismatch") => ClientError::OtherProtocol(detail),
        (401, _) => ClientError::Unauthorized,
        (507, _) => ClientError::StorageFull { detail },
        (status @ (408 | 425 | 429 | 500..), _) => ClientError::Unavailable(status),
        // The server received only a part of the request body because the connection broke, so a retry may succeed.
        (status, "body_interrupted") => ClientError::Unavailable(status),
        (status, _) => ClientError::Refused { status, code, detail },
    })
}
