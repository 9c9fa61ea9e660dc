//! Requests: whom the token goes to, which redirects are followed, what is tried again and when.

use std::time::Duration;

use reqwest::header::{ACCEPT_ENCODING, HeaderMap, LOCATION, RANGE, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode};
use rlood_types::outgoing::OutgoingPolicy;
use tokio::time::{sleep, timeout};
use url::Url;

use crate::error::HubError;
use crate::id::{Repo, RepoKind};

/// Hops of redirects, the hub's own and the CDN's.
const MAX_HOPS: usize = 5;
/// Without a byte, or without an answer.
pub(crate) const STALL: Duration = Duration::from_secs(30);
/// Tries in a row without progress.
const MAX_TRIES: u32 = 5;
/// The hub's quotas are of five minutes.
const LONGEST_WAIT: Duration = Duration::from_secs(330);
/// Of an answer that is read as a whole: the list of a repository of 100,000 files has 20 MB.
const MAX_JSON_BYTES: usize = 64 << 20;

/// A token of the hub; it prints as `…`.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// None when the text is blank or cannot stand in a header.
    pub fn new(text: &str) -> Option<Token> {
        let text = text.trim();
        let fits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
        fits.then(|| Token(text.to_owned()))
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Where the hub is, and what may be asked of it.
#[derive(Debug, Clone)]
pub struct HubSettings {
    /// `HF_ENDPOINT`: `https://huggingface.co`, or a mirror.
    pub endpoint: Url,
    /// Sent to the endpoint and nowhere else.
    pub token: Option<Token>,
    /// What redirects may lead to. The client checks addresses after DNS.
    pub policy: OutgoingPolicy,
    /// `HF_HUB_OFFLINE`: nothing is asked.
    pub offline: bool,
    /// The first pause before another try; it doubles.
    pub first_delay: Duration,
}

impl HubSettings {
    /// The public hub without a token.
    ///
    /// # Errors
    /// When the endpoint is no http or https URL.
    pub fn new(endpoint: &str, policy: OutgoingPolicy) -> Result<HubSettings, rlood_types::outgoing::OutgoingError> {
        let endpoint = policy.check_url(endpoint.trim_end_matches('/'))?;
        Ok(HubSettings { endpoint, token: None, policy, offline: false, first_delay: Duration::from_millis(500) })
    }
}

/// A client of one hub.
#[derive(Debug, Clone)]
pub struct Hub {
    client: Client,
    pub(crate) settings: HubSettings,
}

/// Bytes of a file from somewhere on; and which they are.
pub(crate) struct Opened {
    pub(crate) response: Response,
    /// Whether the bytes came from another host than the hub: a CDN.
    pub(crate) from_elsewhere: bool,
}

impl Hub {
    /// `client` must follow no redirects by itself, use no proxy and check addresses by the same policy.
    pub fn new(client: Client, settings: HubSettings) -> Hub {
        Hub { client, settings }
    }

    /// The same hub, asked with another token.
    #[must_use]
    pub fn with_token(&self, token: Option<Token>) -> Hub {
        Hub { client: self.client.clone(), settings: HubSettings { token, ..self.settings.clone() } }
    }

    pub(crate) fn url<'a>(&self, parts: impl IntoIterator<Item = &'a str>) -> Result<Url, HubError> {
        let mut url = self.settings.endpoint.clone();
        let mut segments = url.path_segments_mut().map_err(|()| HubError::NotUnderstood("its address".to_owned()))?;
        segments.pop_if_empty().extend(parts);
        drop(segments);
        Ok(url)
    }

    /// Where a file of a commit is asked for.
    pub(crate) fn file_url(&self, repo: &Repo, commit: &str, path: &str) -> Result<Url, HubError> {
        let id = repo.id().split('/');
        self.url(prefix(repo.kind).iter().copied().chain(id).chain(["resolve", commit]).chain(path.split('/')))
    }

    /// A JSON document of the API, or a small file.
    pub(crate) async fn read(&self, repo: &Repo, url: &Url, commit: Option<&str>) -> Result<Vec<u8>, HubError> {
        let mut tries = Tries::new(self.settings.first_delay);
        loop {
            let failed = match self.open(repo, url, commit, 0).await {
                Ok(opened) => match read_whole(opened.response).await {
                    Ok(bytes) => return Ok(bytes),
                    Err(detail) => Failed::passing(url, detail),
                },
                Err(failed) => failed,
            };
            tries.pause_after(failed).await?;
        }
    }

    /// Opens a document or file from byte `first` on.
    pub(crate) async fn open(
        &self,
        repo: &Repo,
        url: &Url,
        commit: Option<&str>,
        first: u64,
    ) -> Result<Opened, Failed> {
        self.open_range(repo, url, commit, (first > 0).then(|| format!("bytes={first}-"))).await
    }

    /// Opens a document or file, or a range of it. Redirects within the hub keep the token; to another host it is not sent.
    pub(crate) async fn open_range(
        &self,
        repo: &Repo,
        url: &Url,
        commit: Option<&str>,
        range: Option<String>,
    ) -> Result<Opened, Failed> {
        if self.settings.offline {
            return Err(HubError::Offline { repo: repo.to_string() }.into());
        }
        let mut at = url.clone();
        for _ in 0..=MAX_HOPS {
            let at_home = is_same_origin(&at, &self.settings.endpoint);
            let mut request = self.client.get(at.clone()).header(ACCEPT_ENCODING, "identity");
            if let Some(Token(token)) = self.settings.token.as_ref().filter(|_| at_home) {
                request = request.bearer_auth(token);
            }
            if let Some(range) = &range {
                request = request.header(RANGE, range);
            }
            let response = match timeout(STALL, request.send()).await {
                Ok(Ok(response)) => response,
                Ok(Err(error)) => return Err(Failed::passing(&at, with_causes(&error.without_url()))),
                Err(_) => return Err(Failed::passing(&at, format!("no answer for {} s", STALL.as_secs()))),
            };
            if let Some((expected, found)) = commit.zip(text(response.headers(), "x-repo-commit"))
                && at_home
                && expected != found
            {
                return Err(HubError::CommitMoved { expected: expected.to_owned(), found: found.to_owned() }.into());
            }
            let status = response.status();
            if !status.is_redirection() || status == StatusCode::NOT_MODIFIED {
                if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE {
                    return Ok(Opened { response, from_elsewhere: !at_home });
                }
                return Err(self.refused(repo, &at, at_home, response).await);
            }
            at = self.follow(&at, text(response.headers(), LOCATION.as_str()))?;
        }
        Err(HubError::BadRedirect("more than five in a row").into())
    }

    fn follow(&self, from: &Url, location: Option<&str>) -> Result<Url, HubError> {
        let location = location.ok_or(HubError::BadRedirect("it names no address"))?;
        let to = from.join(location).map_err(|_| HubError::BadRedirect("its address is no URL"))?;
        if is_same_origin(&to, &self.settings.endpoint) {
            return Ok(to);
        }
        if self.settings.endpoint.scheme() == "https" && to.scheme() != "https" {
            return Err(HubError::BadRedirect("it leads from https to an unencrypted address"));
        }
        self.settings.policy.check_url(to.as_str()).map_err(|source| HubError::Redirect { source })
    }

    async fn refused(&self, repo: &Repo, at: &Url, at_home: bool, response: Response) -> Failed {
        let status = response.status();
        let wait = wait_asked(response.headers());
        let code = text(response.headers(), "x-error-code").unwrap_or_default().to_owned();
        let request_id = text(response.headers(), "x-request-id").map(str::to_owned);
        let said = text(response.headers(), "x-error-message").map(str::to_owned);
        let said = match said {
            Some(said) => said,
            None => message_of(&read_whole(response).await.unwrap_or_default()),
        };
        let mut detail: String = said.chars().filter(|c| !c.is_control()).take(300).collect();
        if let Some(id) = request_id {
            detail = format!("{detail} (request {id})");
        }
        if !at_home {
            // A CDN's word is about its address, not about the repository.
            let again = status.is_server_error() || matches!(status.as_u16(), 403 | 404 | 408 | 410 | 429);
            let host = host_of(at);
            return match again {
                true => Failed {
                    error: HubError::Unreachable { host, detail: format!("it answers {status}") },
                    passes: true,
                    wait,
                    forbidden_elsewhere: status == StatusCode::FORBIDDEN,
                },
                false => HubError::Refused { status: status.as_u16(), detail: format!("{host}: {detail}") }.into(),
            };
        }
        if matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504) {
            let error = HubError::Refused { status: status.as_u16(), detail };
            return Failed { error, passes: true, wait, forbidden_elsewhere: false };
        }
        self.named(repo, status, &code, &said, detail).into()
    }

    /// The sentence for an answer that no repetition mends (the hub's `X-Error-Code`).
    fn named(&self, repo: &Repo, status: StatusCode, code: &str, said: &str, detail: String) -> HubError {
        let with_token = self.settings.token.is_some();
        let shown = repo.id().to_owned();
        match (status.as_u16(), code) {
            (401 | 403, "GatedRepo") => {
                let page = self.url(prefix(repo.kind).iter().copied().chain(shown.split('/')));
                HubError::Gated { page: page.map(String::from).unwrap_or_default(), repo: shown, with_token }
            }
            (404, "RevisionNotFound") => HubError::NoRevision { repo: shown, revision: repo.revision().to_owned() },
            (404, "EntryNotFound") => HubError::NoFile { repo: shown, path: detail },
            (401, _) if said.contains("Invalid credentials") => HubError::BadToken,
            (401, _) | (404, _) => HubError::NoRepository { repo: shown, kind: repo.kind.noun(), with_token },
            (403, _) if said.contains("disabled") => HubError::Disabled { repo: shown },
            (status, _) => HubError::Refused { status, detail },
        }
    }
}

/// A try that failed.
pub(crate) struct Failed {
    pub(crate) error: HubError,
    /// Whether the same may succeed in a moment.
    passes: bool,
    /// As long as the hub asks to wait.
    wait: Option<Duration>,
    forbidden_elsewhere: bool,
}

impl From<HubError> for Failed {
    fn from(error: HubError) -> Failed {
        Failed { error, passes: false, wait: None, forbidden_elsewhere: false }
    }
}

impl Failed {
    /// A CDN answered 403 or 416.
    pub(crate) fn is_forbidden_elsewhere(&self) -> bool {
        self.forbidden_elsewhere
    }

    pub(crate) fn passing(at: &Url, detail: String) -> Failed {
        Failed {
            error: HubError::Unreachable { host: host_of(at), detail },
            passes: true,
            wait: None,
            forbidden_elsewhere: false,
        }
    }
}

/// The tries of one request or file.
pub(crate) struct Tries {
    failed: u32,
    first_delay: Duration,
}

impl Tries {
    pub(crate) fn new(first_delay: Duration) -> Tries {
        Tries { failed: 0, first_delay }
    }

    /// Bytes arrived: what fails next is the first failure again.
    pub(crate) fn progressed(&mut self) {
        self.failed = 0;
    }

    /// Waits for the next try; the error, when there is none.
    pub(crate) async fn pause_after(&mut self, failed: Failed) -> Result<(), HubError> {
        self.failed += 1;
        if !failed.passes || self.failed >= MAX_TRIES {
            return Err(failed.error);
        }
        let doubled = self.first_delay.saturating_mul(1 << self.failed.min(8));
        let wait = failed.wait.unwrap_or(doubled);
        if wait > LONGEST_WAIT {
            return Err(failed.error);
        }
        sleep(wait).await;
        Ok(())
    }
}

/// `RateLimit: "resolvers";r=0;t=55` = wait for 55 s; else `Retry-After` in seconds.
fn wait_asked(headers: &HeaderMap) -> Option<Duration> {
    let seconds = |text: &str| text.trim().parse::<u64>().ok();
    let limit = text(headers, "ratelimit").and_then(|limit| {
        let value = |name: &str| limit.split(';').find_map(|part| seconds(part.trim().strip_prefix(name)?));
        value("r=").filter(|left| *left == 0).and_then(|_| value("t="))
    });
    // One more: its clock is not ours.
    let asked = limit.map(|left| left + 1).or_else(|| seconds(text(headers, RETRY_AFTER.as_str())?));
    asked.map(Duration::from_secs)
}

/// The message of `{"error": …}`.
fn message_of(body: &[u8]) -> String {
    let document: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let message = document.as_ref().and_then(|document| document.get("error")?.as_str());
    message.unwrap_or("it gives no reason").to_owned()
}

async fn read_whole(mut response: Response) -> Result<Vec<u8>, String> {
    let mut whole = Vec::new();
    while let Some(piece) = next_piece(&mut response).await? {
        if whole.len() + piece.len() > MAX_JSON_BYTES {
            return Err(format!("its answer has more than {MAX_JSON_BYTES} bytes"));
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole)
}

/// None at the end.
pub(crate) async fn next_piece(
    response: &mut Response,
) -> Result<Option<impl AsRef<[u8]> + std::ops::Deref<Target = [u8]>>, String> {
    match timeout(STALL, response.chunk()).await {
        Ok(Ok(piece)) => Ok(piece),
        Ok(Err(error)) => Err(with_causes(&error.without_url())),
        Err(_) => Err(format!("no byte for {} s", STALL.as_secs())),
    }
}

pub(crate) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Before the id, in addresses outside the API.
fn prefix(kind: RepoKind) -> &'static [&'static str] {
    match kind {
        RepoKind::Model => &[],
        RepoKind::Dataset => &["datasets"],
    }
}

fn is_same_origin(one: &Url, other: &Url) -> bool {
    one.origin() == other.origin()
}

pub(crate) fn host_of(url: &Url) -> String {
    match url.port() {
        Some(port) => format!("{}:{port}", url.host_str().unwrap_or_default()),
        None => url.host_str().unwrap_or_default().to_owned(),
    }
}

fn with_causes(error: &dyn std::error::Error) -> String {
    rlood_types::causes::with_causes(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hub_says_how_long_to_wait() {
        let headers = |pairs: &[(&'static str, &'static str)]| -> HeaderMap {
            pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
        };
        let limited = headers(&[("ratelimit", "\"resolvers\";r=0;t=55"), ("retry-after", "7")]);
        assert_eq!(wait_asked(&limited), Some(Duration::from_secs(56)));
        let left = headers(&[("ratelimit", "\"resolvers\";r=12;t=55"), ("retry-after", "7")]);
        assert_eq!(wait_asked(&left), Some(Duration::from_secs(7)));
        assert_eq!(wait_asked(&headers(&[])), None);
    }

    #[test]
    fn a_token_is_not_printed() {
        assert_eq!(format!("{:?}", Token::new(" hf_secret ")), "Some(Token(…))");
        assert_eq!(Token::new("a\nb"), None);
        assert_eq!(Token::new("  "), None);
    }
}
