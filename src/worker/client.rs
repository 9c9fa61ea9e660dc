//! The worker protocol, the worker's side: typed calls, and which errors are worth another try.

use std::path::Path;
use std::time::Duration;

use reqwest::{Method, RequestBuilder, Response, StatusCode, Url};
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;

use super::clock;
use crate::causes::with_causes;
use crate::failpoint::fail_point;
use crate::id::{DatasetId, JobId};
use crate::protocol::{
    CallbackNews, Claim, ClaimError, ClaimRequest, EventBatch, FileEntry, Finish, Heartbeat, HeartbeatReply,
    JournalBatch, JournalPage, Publish, Published, Register, Registered, RewardReports, read_claim,
};

/// How long a worker goes on without an answer from the server.
pub(super) const OUTAGE: Duration = Duration::from_secs(15 * 60);
/// Of a call that moves little.
const CALL: Duration = Duration::from_secs(30);
/// Of a heartbeat: a few fit into a lease.
const BEAT: Duration = Duration::from_secs(8);
/// Of the pause between two pieces of a transfer.
const STALL: Duration = Duration::from_secs(60);
/// Tries of a download that arrives damaged.
const DAMAGED_TRIES: u32 = 3;
/// The first pause before another try; it doubles.
const FIRST_DELAY: Duration = Duration::from_millis(200);
/// The longest pause.
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// Why the server did not do what a worker asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Another attempt owns the job, or nobody.
    #[error("the claim is lost")]
    LeaseLost,
    /// The token is not the server's.
    #[error("the server refuses the worker token; set RLOOD_WORKER_TOKEN to the server's")]
    Unauthorized,
    /// The server's disk is full.
    #[error("the server's disk is full")]
    StorageFull,
    /// Another try makes no difference.
    #[error("the server refuses the call ({status} {code}): {detail}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// The problem's code.
        code: String,
        /// The problem's text.
        detail: String,
    },
    /// The server is busy or in trouble.
    #[error("the server answers {0}")]
    Unavailable(u16),
    /// No answer.
    #[error("the server cannot be reached")]
    Unreachable(#[source] reqwest::Error),
    /// The answer is not what the protocol says.
    #[error("the server's answer is not understood; are both of the same version?")]
    Protocol(#[source] reqwest::Error),
    /// One of the two is of another version.
    #[error("{0}")]
    OtherProtocol(String),
    /// A job was handed out that this version does not understand.
    #[error("the job is not understood; update this worker to the rlood of the server")]
    Claim {
        /// The claim, as far as it can be read.
        held: Option<Box<Held>>,
        /// What is not understood.
        #[source]
        source: ClaimError,
    },
    /// The local disk.
    #[error("cannot {doing}")]
    Disk {
        /// What was tried.
        doing: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// What arrived is not what was announced.
    #[error("{name} arrived damaged: its sha256 differs")]
    Damaged {
        /// The file.
        name: String,
    },
}

impl ClientError {
    /// The same call may succeed later.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            ClientError::Unavailable(_) | ClientError::Unreachable(_) | ClientError::StorageFull => true,
            ClientError::Damaged { .. }
            | ClientError::LeaseLost
            | ClientError::Unauthorized
            | ClientError::Refused { .. }
            | ClientError::Protocol(_)
            | ClientError::OtherProtocol(_)
            | ClientError::Claim { .. }
            | ClientError::Disk { .. } => false,
        }
    }
}

/// Repeats a call while its error is worth `another` try, for up to [`OUTAGE`].
pub(super) async fn persist<T, F>(
    mut call: impl FnMut() -> F,
    another: impl Fn(&ClientError) -> bool,
) -> Result<T, ClientError>
where
    F: Future<Output = Result<T, ClientError>>,
{
    let begun = clock::now();
    let mut delay = FIRST_DELAY;
    loop {
        match call().await {
            Err(error) if another(&error) && clock::now() - begun < OUTAGE => {
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
    error.is_transient() && !matches!(error, ClientError::StorageFull)
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
}

/// A claim, as the calls name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The job.
    pub(super) job: JobId,
    /// The fence.
    pub(super) attempt: u64,
}

impl Held {
    fn named_in(claim: &Value) -> Option<Self> {
        Some(Self { job: claim.get("job")?.as_str()?.parse().ok()?, attempt: claim.get("attempt")?.as_u64()? })
    }
}

impl Client {
    /// For a server's address (http or https). The server's own children ignore the environment's proxies.
    pub(super) fn new(server: &str, token: &str, child: bool) -> Result<Self, String> {
        let base = Url::parse(server).map_err(|error| format!("--server '{server}' is not a URL: {error}"))?;
        if !matches!(base.scheme(), "http" | "https") || base.cannot_be_a_base() {
            return Err(format!("--server '{server}' is neither http:// nor https://"));
        }
        let mut builder = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(5))
            .read_timeout(STALL)
            .user_agent(concat!("rlood-worker/", env!("CARGO_PKG_VERSION")));
        if child {
            builder = builder.no_proxy();
        }
        let http = builder.build().map_err(|error| format!("the HTTP client cannot be made: {error}"))?;
        Ok(Self { http, base, token: token.to_owned() })
    }

    pub(super) async fn register(&self, register: &Register) -> Result<Registered, ClientError> {
        json(answer("register", self.request(Method::POST, &["register"], None).timeout(CALL).json(register)).await?)
            .await
    }

    /// None = nothing to do.
    pub(super) async fn claim(&self, request: &ClaimRequest) -> Result<Option<Claim>, ClientError> {
        let limit = CALL + Duration::from_millis(request.wait_ms);
        let response =
            answer("claim", self.request(Method::POST, &["claim"], None).timeout(limit).json(request)).await?;
        if response.status() == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        let sent: Value = json(response).await?;
        read_claim(&sent)
            .map(Some)
            .map_err(|source| ClientError::Claim { held: Held::named_in(&sent).map(Box::new), source })
    }

    pub(super) async fn heartbeat(&self, held: Held, beat: &Heartbeat) -> Result<HeartbeatReply, ClientError> {
        json(answer("heartbeat", self.on_job(Method::POST, held, &["heartbeat"]).timeout(BEAT).json(beat)).await?).await
    }

    pub(super) async fn events(&self, held: Held, batch: &EventBatch) -> Result<(), ClientError> {
        answer("events", self.on_job(Method::POST, held, &["events"]).timeout(CALL).json(batch)).await.map(drop)
    }

    pub(super) async fn journal(&self, held: Held, after: i64) -> Result<JournalPage, ClientError> {
        json(
            answer("journal_read", self.fenced(Method::GET, held, &["journal", &after.to_string()]).timeout(STALL))
                .await?,
        )
        .await
    }

    pub(super) async fn journal_append(&self, held: Held, batch: &JournalBatch) -> Result<(), ClientError> {
        answer("journal", self.on_job(Method::POST, held, &["journal"]).timeout(STALL).json(batch)).await.map(drop)
    }

    pub(super) async fn rewards(&self, held: Held, reports: &RewardReports) -> Result<(), ClientError> {
        answer("rewards", self.on_job(Method::POST, held, &["rewards"]).timeout(CALL).json(reports)).await.map(drop)
    }

    /// What reward services sent after `after`; the server holds the call while there is nothing.
    pub(super) async fn callbacks(&self, held: Held, after: i64) -> Result<CallbackNews, ClientError> {
        json(
            answer("callbacks", self.fenced(Method::GET, held, &["callbacks", &after.to_string()]).timeout(STALL))
                .await?,
        )
        .await
    }

    pub(super) async fn finish(&self, held: Held, finish: &Finish) -> Result<(), ClientError> {
        answer("finish", self.on_job(Method::POST, held, &["finish"]).timeout(CALL).json(finish)).await.map(drop)
    }

    pub(super) async fn publish(&self, held: Held, step: u64, publish: &Publish) -> Result<Published, ClientError> {
        let path = ["checkpoints", &step.to_string()];
        // The server verifies every hash before it answers: large files take their time.
        let limit = Duration::from_secs(300);
        json(answer("publish", self.on_job(Method::POST, held, &path).timeout(limit).json(publish)).await?).await
    }

    /// Streams one file of a checkpoint to the server.
    pub(super) async fn upload(&self, held: Held, step: u64, dir: &Path, file: &FileEntry) -> Result<(), ClientError> {
        let disk = |source| ClientError::Disk { doing: "read a file of a checkpoint", source };
        let bytes = tokio::fs::File::open(dir.join(&file.name)).await.map_err(disk)?;
        let path = ["checkpoints", &step.to_string(), &file.name];
        let request = self
            .fenced(Method::PUT, held, &path)
            .header(reqwest::header::CONTENT_LENGTH, file.size_bytes)
            .header(reqwest::header::CONTENT_TYPE, "application/octet-stream")
            .body(reqwest::Body::from(bytes));
        answer("upload", request).await.map(drop)
    }

    pub(super) async fn dataset(&self, held: Held, id: DatasetId, sha256: &str, to: &Path) -> Result<(), ClientError> {
        let request = self.fenced(Method::GET, held, &["datasets", &id.to_string()]);
        download(request, "the dataset", sha256, to).await
    }

    /// A file of the checkpoint to go on from (`resume`) or to begin with (`initial`).
    pub(super) async fn checkpoint_file(
        &self,
        held: Held,
        route: &str,
        file: &FileEntry,
        to: &Path,
    ) -> Result<(), ClientError> {
        let request = self.fenced(Method::GET, held, &[route, &file.name]);
        download(request, &file.name, &file.sha256, to).await
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

/// Sends; an error status becomes its [`ClientError`]. `call` is what it is for.
#[cfg_attr(
    not(any(test, feature = "failpoints")),
    expect(unused_variables, reason = "only tests ask which call it is")
)]
async fn answer(call: &'static str, request: RequestBuilder) -> Result<Response, ClientError> {
    #[derive(serde::Deserialize)]
    struct Problem {
        code: String,
        detail: String,
    }
    fail_point!("client.before", call).map_err(|_| ClientError::Unavailable(503))?;
    let response = request.send().await.map_err(ClientError::Unreachable)?;
    fail_point!("client.after", call).map_err(|_| ClientError::Unavailable(503))?;
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let problem = response.json::<Problem>().await;
    let code = problem.as_ref().map_or("", |problem| problem.code.as_str());
    Err(match (status.as_u16(), code) {
        (409, "lease_lost") => ClientError::LeaseLost,
        (409, "protocol_mismatch") => {
            ClientError::OtherProtocol(problem.map_or_else(|_| String::new(), |problem| problem.detail))
        }
        (401, _) => ClientError::Unauthorized,
        (507, _) => ClientError::StorageFull,
        (status @ (408 | 425 | 429 | 500..), _) => ClientError::Unavailable(status),
        // The body ended early: our connection, not our bytes.
        (status, "body_interrupted") => ClientError::Unavailable(status),
        (status, _) => {
            let (code, detail) = problem.map_or_else(
                |_| (String::new(), "no reason given".to_owned()),
                |problem| (problem.code, problem.detail),
            );
            ClientError::Refused { status, code, detail }
        }
    })
}

async fn json<T: DeserializeOwned>(response: Response) -> Result<T, ClientError> {
    response
        .json()
        .await
        .map_err(|error| if error.is_decode() { ClientError::Protocol(error) } else { ClientError::Unreachable(error) })
}

/// Streams an answer into a file and compares its hash.
async fn download(request: RequestBuilder, name: &str, sha256: &str, to: &Path) -> Result<(), ClientError> {
    let disk = |source| ClientError::Disk { doing: "write to the scratch directory", source };
    let mut response = answer("download", request).await?;
    let mut file = tokio::fs::File::create(to).await.map_err(disk)?;
    let mut hash = Sha256::new();
    while let Some(piece) = response.chunk().await.map_err(ClientError::Unreachable)? {
        hash.update(&piece);
        file.write_all(&piece).await.map_err(disk)?;
    }
    file.flush().await.map_err(disk)?;
    let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if found == sha256 { Ok(()) } else { Err(ClientError::Damaged { name: name.to_owned() }) }
}
