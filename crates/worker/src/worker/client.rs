//! The worker protocol, the worker's side: typed calls, and which errors are worth another try. How long a call may take stands
//! here; when a transfer has failed stands in `transfer.rs`.

use std::path::Path;
use std::time::Duration;

use reqwest::header::{CONTENT_RANGE, HeaderValue, RANGE};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::watch;

pub use super::client_error::ClientError;
use super::clock;
pub use super::held::Held;
use super::transfer::{
    Download, TransferLimits, bytes_body, file_body, http_client, read_body, send_body, send_within,
};
use crate::causes::with_causes;
use crate::failpoint::fail_point;
use crate::id::DatasetId;
use crate::protocol::{
    CallbackUpdates, Claim, ClaimRequest, DamagedFile, EventBatch, FileEntry, FileList, Finish, Heartbeat,
    HeartbeatReply, Inspection, JournalBatch, JournalPage, ModelFiles, Publish, Published, Register, Registered,
    RewardReports, read_claim,
};

/// How long a worker goes on without an answer from the server.
pub(super) const OUTAGE: Duration = Duration::from_secs(15 * 60);
/// Of a call that moves little.
const CALL: Duration = Duration::from_secs(30);
/// Of a heartbeat: a few fit into a lease.
const BEAT: Duration = Duration::from_secs(8);
/// The head of an answer that the server may hold back for a while because there is nothing to say yet.
const HELD_CALL: Duration = Duration::from_secs(60);
/// Tries of a download that arrives damaged.
pub(super) const DAMAGED_TRIES: u32 = 3;
/// The first pause before another try; it doubles.
pub(super) const FIRST_DELAY: Duration = Duration::from_millis(200);
/// The longest pause.
pub(super) const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// Repeats a call while its error is worth `another` try, for up to [`OUTAGE`] after the first one: a long transfer that breaks
/// off at its end has another try, too.
pub(super) async fn persist<T, F>(
    mut call: impl FnMut() -> F,
    another: impl Fn(&ClientError) -> bool,
) -> Result<T, ClientError>
where
    F: Future<Output = Result<T, ClientError>>,
{
    let mut failing_since = None;
    let mut delay = FIRST_DELAY;
    loop {
        match call().await {
            Err(error) if another(&error) && clock::now() - *failing_since.get_or_insert_with(clock::now) < OUTAGE => {
                tracing::debug!(error = with_causes(&error), "trying again");
                tokio::time::sleep(delay).await;
                delay = (delay * 2).min(LONGEST_DELAY);
            }
            other => return other,
        }
    }
}

/// [`persist`]'s rule for what fills the disk: a full disk stays full for a while, and the job pauses instead of waiting for it.
pub(super) fn full_at_once(error: &ClientError) -> bool {
    error.is_transient() && !matches!(error, ClientError::StorageFull { .. })
}

/// Repeats a download like [`persist`], and one that arrives damaged a few times: the damage may lie at its source.
pub(super) async fn fetch<F>(mut call: impl FnMut() -> F) -> Result<(), ClientError>
where
    F: Future<Output = Result<(), ClientError>>,
{
    let mut tries = 0;
    loop {
        tries += 1;
        match persist(&mut call, ClientError::is_transient).await {
            Err(ClientError::Damaged { name }) if tries < DAMAGED_TRIES => {
                tracing::warn!(name, "it arrived damaged; fetching it again");
            }
            other => return other,
        }
    }
}

/// A connection to the server. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Client {
    http: reqwest::Client,
    base: Url,
    token: String,
    limits: TransferLimits,
    /// Bytes of uploads that the server has received, as it says in its answers to heartbeats.
    received: watch::Sender<u64>,
}

impl Client {
    /// For a server's address (http or https). The server's own children ignore the environment's proxies.
    pub(super) fn new(server: &str, token: &str, child: bool) -> Result<Self, String> {
        let base = Url::parse(server).map_err(|error| format!("--server '{server}' is not a URL: {error}"))?;
        if !matches!(base.scheme(), "http" | "https") || base.cannot_be_a_base() {
            return Err(format!("--server '{server}' is neither http:// nor https://"));
        }
        let mut builder = http_client().user_agent(concat!("rlood-worker/", env!("CARGO_PKG_VERSION")));
        if child {
            builder = builder.no_proxy();
        }
        let http = builder.build().map_err(|error| format!("the HTTP client cannot be made: {error}"))?;
        let (limits, received) = (TransferLimits::default(), watch::Sender::default());
        Ok(Self { http, base, token: token.to_owned(), limits, received })
    }

    /// The same with other limits on transfers.
    #[cfg(test)]
    pub(super) fn with_limits(self, limits: TransferLimits) -> Self {
        Self { limits, ..self }
    }

    pub(super) async fn register(&self, register: &Register) -> Result<Registered, ClientError> {
        let request = self.request(Method::POST, &["register"], None).timeout(CALL).json(register);
        self.json(answer("register", send_within(CALL, request)).await?).await
    }

    /// None = nothing to do.
    pub(super) async fn claim(&self, request: &ClaimRequest) -> Result<Option<Claim>, ClientError> {
        let limit = CALL + Duration::from_millis(request.wait_ms);
        let request = self.request(Method::POST, &["claim"], None).timeout(limit).json(request);
        let response = answer("claim", send_within(limit, request)).await?;
        if response.status() == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        let sent: Value = self.json(response).await?;
        read_claim(&sent)
            .map(Some)
            .map_err(|source| ClientError::Claim { held: Held::named_in(&sent).map(Box::new), source })
    }

    pub(super) async fn heartbeat(&self, held: Held, beat: &Heartbeat) -> Result<HeartbeatReply, ClientError> {
        let request = self.on_job(Method::POST, held, &["heartbeat"]).timeout(BEAT).json(beat);
        let reply: HeartbeatReply = self.json(answer("heartbeat", send_within(BEAT, request)).await?).await?;
        let now = reply.received_bytes;
        self.received.send_if_modified(|received| std::mem::replace(received, now) != now);
        Ok(reply)
    }

    pub(super) async fn events(&self, held: Held, batch: &EventBatch) -> Result<(), ClientError> {
        self.send_json("events", self.on_job(Method::POST, held, &["events"]), batch).await.map(drop)
    }

    pub(super) async fn journal(&self, held: Held, after: i64) -> Result<JournalPage, ClientError> {
        let request = self.fenced(Method::GET, held, &["journal", &after.to_string()]);
        self.json(answer("journal_read", send_within(HELD_CALL, request)).await?).await
    }

    pub(super) async fn journal_append(&self, held: Held, batch: &JournalBatch) -> Result<(), ClientError> {
        self.send_json("journal", self.on_job(Method::POST, held, &["journal"]), batch).await.map(drop)
    }

    pub(super) async fn rewards(&self, held: Held, reports: &RewardReports) -> Result<(), ClientError> {
        let request = self.on_job(Method::POST, held, &["rewards"]).timeout(CALL).json(reports);
        answer("rewards", send_within(CALL, request)).await.map(drop)
    }

    /// What reward services sent after `after`; the server holds the call while there is nothing.
    pub(super) async fn callbacks(&self, held: Held, after: i64) -> Result<CallbackUpdates, ClientError> {
        let request = self.fenced(Method::GET, held, &["callbacks", &after.to_string()]);
        self.json(answer("callbacks", send_within(HELD_CALL, request)).await?).await
    }

    pub(super) async fn finish(&self, held: Held, finish: &Finish) -> Result<(), ClientError> {
        let request = self.on_job(Method::POST, held, &["finish"]).timeout(CALL).json(finish);
        answer("finish", send_within(CALL, request)).await.map(drop)
    }

    pub(super) async fn publish(&self, held: Held, step: u64, publish: &Publish) -> Result<Published, ClientError> {
        let request = self.on_job(Method::POST, held, &["checkpoints", &step.to_string()]).json(publish);
        // The server moves and syncs the files before it answers; an older one also reads all of them.
        let limit = self.limits.answer(publish.files.iter().map(|file| file.size_bytes).sum());
        self.json(answer("publish", send_within(limit, request)).await?).await
    }

    /// Streams one file of a checkpoint to the server.
    pub(super) async fn upload(&self, held: Held, step: u64, dir: &Path, file: &FileEntry) -> Result<(), ClientError> {
        let body = file_body(&dir.join(&file.name), file.size_bytes).await?;
        let request = self
            .fenced(Method::PUT, held, &["checkpoints", &step.to_string(), &file.name])
            .header(reqwest::header::CONTENT_TYPE, "application/octet-stream");
        answer("upload", send_body(request, body, self.limits, self.received.subscribe())).await.map(drop)
    }

    pub(super) async fn dataset(&self, held: Held, id: DatasetId, sha256: &str, to: &Path) -> Result<(), ClientError> {
        let request = self.fenced(Method::GET, held, &["datasets", &id.to_string()]);
        self.download(request, Download { name: "the dataset", sha256, to, received: None }).await
    }

    /// A file of the checkpoint to go on from, or to begin with.
    pub(super) async fn checkpoint_file(
        &self,
        held: Held,
        list: FileList,
        file: &FileEntry,
        to: &Path,
    ) -> Result<(), ClientError> {
        let route = match list {
            FileList::Resume => "resume",
            FileList::Initial => "initial",
        };
        let request = self.fenced(Method::GET, held, &[route, &file.name]);
        self.download(request, Download { name: &file.name, sha256: &file.sha256.to_string(), to, received: None })
            .await
    }

    /// The files of one of the job's models; the server holds the call while it hashes them.
    pub(super) async fn model_files(&self, held: Held, model: &str) -> Result<ModelFiles, ClientError> {
        let request = self.fenced(Method::GET, held, &["models", model]);
        self.json(answer("models", send_within(HELD_CALL, request)).await?).await
    }

    /// A file of one of the job's models.
    pub(super) async fn model_file(&self, held: Held, model: &str, download: Download<'_>) -> Result<(), ClientError> {
        self.download(self.fenced(Method::GET, held, &["models", model, download.name]), download).await
    }

    /// Has the server read a file that does not arrive whole; it holds the call while it does.
    pub(super) async fn inspect(&self, held: Held, file: &DamagedFile) -> Result<Inspection, ClientError> {
        let request = self.on_job(Method::POST, held, &["damaged"]).json(file);
        self.json(answer("damaged", send_within(HELD_CALL, request)).await?).await
    }

    /// Fetches a file, or what is missing of it.
    async fn download(&self, request: RequestBuilder, download: Download<'_>) -> Result<(), ClientError> {
        let here = download.bytes_here().await;
        let request = if here > 0 { request.header(RANGE, format!("bytes={here}-")) } else { request };
        let response = match answer("download", send_within(self.limits.answer(0), request)).await {
            // As many bytes as the file has, or more: they are not the file's, or this call would not have been made.
            Err(ClientError::Refused { status: 416, .. }) => {
                download.start_over().await;
                return Err(ClientError::Damaged { name: download.name.to_owned() });
            }
            response => response?,
        };
        // The rest of the file is what was asked for, or nothing is.
        let begins =
            |range: &HeaderValue| range.to_str().is_ok_and(|range| range.starts_with(&format!("bytes {here}-")));
        let is_rest = response.headers().get(CONTENT_RANGE).is_some_and(begins);
        if response.status() == StatusCode::PARTIAL_CONTENT && !is_rest {
            download.start_over().await;
            return Err(ClientError::Damaged { name: download.name.to_owned() });
        }
        download.read(response, self.limits.stall).await
    }

    /// A body that may be large.
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

    /// A call whose body carries the attempt.
    fn on_job(&self, method: Method, held: Held, rest: &[&str]) -> RequestBuilder {
        self.request(method, &[&["jobs", &held.job.to_string()], rest].concat(), None)
    }

    /// A call whose address carries the attempt.
    fn fenced(&self, method: Method, held: Held, rest: &[&str]) -> RequestBuilder {
        self.request(method, &[&["jobs", &held.job.to_string()], rest].concat(), Some(held.attempt))
    }

    fn request(&self, method: Method, path: &[&str], attempt: Option<u64>) -> RequestBuilder {
        let mut url = self.base.clone();
        // `new` refused what cannot be a base, the only case without segments.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("worker").extend(path);
        }
        if let Some(attempt) = attempt {
            url.query_pairs_mut().append_pair("attempt", &attempt.to_string());
        }
        self.http.request(method, url).bearer_auth(&self.token)
    }
}

/// The answer to a request that is `sent`; an error status becomes its [`ClientError`]. `call` is what it is for.
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
    let body = read_body(response, CALL).await.unwrap_or_default();
    let Problem { code, detail } = serde_json::from_slice(&body)
        .unwrap_or_else(|_| Problem { code: String::new(), detail: "no reason given".to_owned() });
    Err(match (status.as_u16(), code.as_str()) {
        (409, "lease_lost") => ClientError::LeaseLost,
        (409, "protocol_mismatch") => ClientError::OtherProtocol(detail),
        (401, _) => ClientError::Unauthorized,
        (507, _) => ClientError::StorageFull { detail },
        (status @ (408 | 425 | 429 | 500..), _) => ClientError::Unavailable(status),
        // The body ended early: our connection, not our bytes.
        (status, "body_interrupted") => ClientError::Unavailable(status),
        (status, _) => ClientError::Refused { status, code, detail },
    })
}
