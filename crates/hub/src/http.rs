//! HTTP requests to the Hub: where the token is sent, which redirects are followed, and which errors are retried.

use std::time::Duration;

use reqwest::header::{ACCEPT_ENCODING, HeaderMap, LOCATION, RANGE, RETRY_AFTER};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use rlood_types::outgoing::OutgoingPolicy;
use tokio::time::{sleep, timeout};
use url::Url;

use crate::error::HubError;
use crate::id::{Repo, RepoKind};

/// Maximum number of redirects of one request, including those to the CDN.
pub(crate) const MAX_HOPS: usize = 5;
/// Maximum time in which a request gets no answer or no byte.
pub(crate) const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of consecutive attempts at a request or file in which no byte arrives.
const MAX_ATTEMPTS: u32 = 5;
/// Longest wait between two attempts; the Hub's rate limits apply to windows of five minutes.
const MAX_WAIT: Duration = Duration::from_secs(330);
/// Maximum size in bytes of an answer that is read into memory: the file list of a repository with 100,000 files has 20 MB.
const MAX_JSON_BYTES: usize = 64 << 20;

/// An access token of the Hub. Its debug output is `…`.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Creates a token; `None` when the text is blank or not valid in a header.
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

/// Settings of a client for the Hugging Face Hub or a mirror.
#[derive(Debug, Clone)]
pub struct HubSettings {
    /// Address of the Hub (`HF_ENDPOINT`): `https://huggingface.co` or a mirror.
    pub endpoint: Url,
    /// Token, which is sent only to the endpoint.
    pub token: Option<Token>,
    /// Policy for the addresses of redirect targets. The HTTP client also checks addresses after DNS resolution.
    pub policy: OutgoingPolicy,
    /// Whether all requests are forbidden (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// Pause before the first retry; doubles with each further retry.
    pub first_delay: Duration,
}

impl HubSettings {
    /// Creates settings for a Hub address, without a token.
    ///
    /// # Errors
    /// Fails when the address is not an http or https URL.
    pub fn new(endpoint: &str, policy: OutgoingPolicy) -> Result<HubSettings, rlood_types::outgoing::OutgoingError> {
        let endpoint = policy.check_url(endpoint.trim_end_matches('/'))?;
        Ok(HubSettings { endpoint, token: None, policy, offline: false, first_delay: Duration::from_millis(500) })
    }
}

/// A client for the Hugging Face Hub or a mirror.
#[derive(Debug, Clone)]
pub struct Hub {
    client: Client,
    pub(crate) settings: HubSettings,
}

/// A response of the Hub or its CDN with the bytes of a file or of a range.
pub(crate) struct Opened {
    pub(crate) response: Response,
    /// Whether the bytes came from another host than the Hub, that is, from a CDN.
    pub(crate) is_from_cdn: bool,
}

impl Hub {
    /// Creates a Hub client. The HTTP client `client` must not follow redirects by itself, must use no proxy, and must check
    /// addresses by the same policy.
    pub fn new(client: Client, settings: HubSettings) -> Hub {
        Hub { client, settings }
    }

    /// Returns a Hub client with the same settings but another token.
    #[must_use]
    pub fn with_token(&self, token: Option<Token>) -> Hub {
        Hub { client: self.client.clone(), settings: HubSettings { token, ..self.settings.clone() } }
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Adds the token to a request, which must go to the Hub itself.
    pub(crate) fn with_authorization(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.settings.token {
            Some(Token(token)) => request.bearer_auth(token),
            None => request,
        }
    }

    pub(crate) fn url<'a>(&self, parts: impl IntoIterator<Item = &'a str>) -> Result<Url, HubError> {
        let mut url = self.settings.endpoint.clone();
        let mut segments = url.path_segments_mut().map_err(|()| HubError::NotUnderstood("its address".to_owned()))?;
        segments.pop_if_empty().extend(parts);
        drop(segments);
        Ok(url)
    }

    /// Returns the download URL of a repository's file at a commit.
    pub(crate) fn file_url(&self, repo: &Repo, commit: &str, path: &str) -> Result<Url, HubError> {
        let id = repo.id().split('/');
        self.url(prefix(repo.kind).iter().copied().chain(id).chain(["resolve", commit]).chain(path.split('/')))
    }

    /// Reads a JSON document of the Hub's API, or a small file, into memory.
    pub(crate) async fn read(&self, repo: &Repo, url: &Url, commit: Option<&str>) -> Result<Vec<u8>, HubError> {
        let mut attempts = Attempts::new(self.settings.first_delay);
        loop {
            let failed = match self.open(repo, url, commit, 0).await {
                Ok(opened) => match read_whole(opened.response).await {
                    Ok(bytes) => return Ok(bytes),
                    Err(detail) => Failed::transient(url, detail),
                },
                Err(failed) => failed,
            };
            attempts.pause_after(failed).await?;
        }
    }

    /// Sends a request for a document or file, starting at byte `first`.
    pub(crate) async fn open(
        &self,
        repo: &Repo,
        url: &Url,
        commit: Option<&str>,
        first: u64,
    ) -> Result<Opened, Failed> {
        self.open_range(repo, url, commit, (first > 0).then(|| format!("bytes={first}-"))).await
    }

    /// Sends a request for a document or file, or a range of it, and follows redirects. The token is sent to the Hub only, not to
    /// other hosts that it redirects to.
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
            let is_hub = is_same_origin(&at, &self.settings.endpoint);
            let request = self.client.get(at.clone()).header(ACCEPT_ENCODING, "identity");
            let mut request = if is_hub { self.with_authorization(request) } else { request };
            if let Some(range) = &range {
                request = request.header(RANGE, range);
            }
            let response = match timeout(STALL_TIMEOUT, request.send()).await {
                Ok(Ok(response)) => response,
                Ok(Err(error)) => return Err(Failed::transient(&at, with_causes(&error.without_url()))),
                Err(_) => {
                    return Err(Failed::transient(
                        &at,
                        format!("the server sent no answer for {} s", STALL_TIMEOUT.as_secs()),
                    ));
                }
            };
            if let Some((expected, found)) = commit.zip(text(response.headers(), "x-repo-commit"))
                && is_hub
                && expected != found
            {
                return Err(HubError::CommitMoved { expected: expected.to_owned(), found: found.to_owned() }.into());
            }
            let status = response.status();
            if !status.is_redirection() || status == StatusCode::NOT_MODIFIED {
                if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE {
                    return Ok(Opened { response, is_from_cdn: !is_hub });
                }
                return Err(self.error_of_response(repo, &at, is_hub, response).await);
            }
            at = self.follow(&at, text(response.headers(), LOCATION.as_str()))?;
        }
        Err(HubError::BadRedirect("there are more than five redirects in a row").into())
    }

    /// Returns the address that a redirect or an answer of the Hub names, if it may be used.
    pub(crate) fn follow(&self, from: &Url, location: Option<&str>) -> Result<Url, HubError> {
        let location = location.ok_or(HubError::BadRedirect("the redirect has no target"))?;
        let to = from.join(location).map_err(|_| HubError::BadRedirect("the redirect's target is not a URL"))?;
        if is_same_origin(&to, &self.settings.endpoint) {
            return Ok(to);
        }
        if self.settings.endpoint.scheme() == "https" && to.scheme() != "https" {
            return Err(HubError::BadRedirect("the redirect leads from https to an unencrypted address"));
        }
        self.settings.policy.check_url(to.as_str()).map_err(|source| HubError::Redirect { source })
    }

    pub(crate) async fn error_of_response(&self, repo: &Repo, at: &Url, is_hub: bool, response: Response) -> Failed {
        let status = response.status();
        let wait = requested_wait(response.headers());
        let code = text(response.headers(), "x-error-code").unwrap_or_default().to_owned();
        let request_id = text(response.headers(), "x-request-id").map(str::to_owned);
        let message = text(response.headers(), "x-error-message").map(str::to_owned);
        let message = match message {
            Some(message) => message,
            None => message_of(&read_whole(response).await.unwrap_or_default()),
        };
        let mut detail: String = message.chars().filter(|c| !c.is_control()).take(300).collect();
        if let Some(id) = request_id {
            detail = format!("{detail} (request {id})");
        }
        if !is_hub {
            // An error of the CDN is about the URL that the Hub redirected to, not about the repository, so a new request to
            // the Hub may succeed.
            let again = status.is_server_error() || matches!(status.as_u16(), 403 | 404 | 408 | 410 | 429);
            let host = host_of(at);
            return match again {
                true => Failed {
                    error: HubError::Unreachable { host, detail: format!("the server answered with status {status}") },
                    is_transient: true,
                    wait,
                    cdn_forbids: status == StatusCode::FORBIDDEN,
                },
                false => HubError::Refused { status: status.as_u16(), detail: format!("{host}: {detail}") }.into(),
            };
        }
        if matches!(status.as_u16(), 408 | 429 | 500 | 502 | 503 | 504) {
            let error = HubError::Refused { status: status.as_u16(), detail };
            return Failed { error, is_transient: true, wait, cdn_forbids: false };
        }
        self.error_of_code(repo, status, &code, &message, detail).into()
    }

    /// Converts an error answer of the Hub that a retry would not fix, by its header `X-Error-Code`.
    fn error_of_code(&self, repo: &Repo, status: StatusCode, code: &str, message: &str, detail: String) -> HubError {
        let with_token = self.settings.token.is_some();
        let shown = repo.id().to_owned();
        match (status.as_u16(), code) {
            (401 | 403, "GatedRepo") => {
                let page = self.url(prefix(repo.kind).iter().copied().chain(shown.split('/')));
                HubError::Gated { page: page.map(String::from).unwrap_or_default(), repo: shown, with_token }
            }
            (404, "RevisionNotFound") => HubError::NoRevision { repo: shown, revision: repo.revision().to_owned() },
            (404, "EntryNotFound") => HubError::NoFile { repo: shown, path: detail },
            (401, _) if message.contains("Invalid credentials") => HubError::BadToken,
            (401, _) | (404, _) => HubError::NoRepository { repo: shown, kind: repo.kind.noun(), with_token },
            (403, _) if message.contains("disabled") => HubError::Disabled { repo: shown },
            (status, _) => HubError::Refused { status, detail },
        }
    }
}

/// A failed attempt at a request to the Hub.
pub(crate) struct Failed {
    pub(crate) error: HubError,
    /// Whether a retry may succeed.
    is_transient: bool,
    /// Wait that the Hub requested.
    wait: Option<Duration>,
    cdn_forbids: bool,
}

impl From<HubError> for Failed {
    fn from(error: HubError) -> Failed {
        Failed { error, is_transient: false, wait: None, cdn_forbids: false }
    }
}

impl Failed {
    /// Returns whether the failure is a 403 or 416 of the CDN.
    pub(crate) fn is_forbidden_by_cdn(&self) -> bool {
        self.cdn_forbids
    }

    pub(crate) fn transient(at: &Url, detail: String) -> Failed {
        Failed {
            error: HubError::Unreachable { host: host_of(at), detail },
            is_transient: true,
            wait: None,
            cdn_forbids: false,
        }
    }
}

/// Counts the attempts at one request or file.
pub(crate) struct Attempts {
    failed: u32,
    first_delay: Duration,
}

impl Attempts {
    pub(crate) fn new(first_delay: Duration) -> Attempts {
        Attempts { failed: 0, first_delay }
    }

    /// Records that bytes arrived, which resets the count.
    pub(crate) fn progressed(&mut self) {
        self.failed = 0;
    }

    /// Waits before the next attempt. Returns the failure as an error when no attempt is left.
    pub(crate) async fn pause_after(&mut self, failed: Failed) -> Result<(), HubError> {
        self.pause_or_return(failed).await.map_err(|failed| failed.error)
    }

    /// Waits before the next attempt. Returns the failure when no attempt is left.
    pub(crate) async fn pause_or_return(&mut self, failed: Failed) -> Result<(), Failed> {
        self.failed += 1;
        if !failed.is_transient || self.failed >= MAX_ATTEMPTS {
            return Err(failed);
        }
        let doubled = self.first_delay.saturating_mul(1 << self.failed.min(8));
        let wait = failed.wait.unwrap_or(doubled);
        if wait > MAX_WAIT {
            return Err(failed);
        }
        sleep(wait).await;
        Ok(())
    }
}

/// Returns how long the Hub asks to wait: 55 s for the header `RateLimit: "resolvers";r=0;t=55`, else `Retry-After` in seconds.
fn requested_wait(headers: &HeaderMap) -> Option<Duration> {
    let seconds = |text: &str| text.trim().parse::<u64>().ok();
    let limit = text(headers, "ratelimit").and_then(|limit| {
        let value = |name: &str| limit.split(';').find_map(|part| seconds(part.trim().strip_prefix(name)?));
        value("r=").filter(|left| *left == 0).and_then(|_| value("t="))
    });
    // One second is added to the wait because the Hub rounds it and its clock may differ.
    let asked = limit.map(|left| left + 1).or_else(|| seconds(text(headers, RETRY_AFTER.as_str())?));
    asked.map(Duration::from_secs)
}

/// Returns the Hub's error message from a body `{"error": …}`.
fn message_of(body: &[u8]) -> String {
    let document: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let message = document.as_ref().and_then(|document| document.get("error")?.as_str());
    message.unwrap_or("the server gave no reason").to_owned()
}

pub(crate) async fn read_whole(mut response: Response) -> Result<Vec<u8>, String> {
    let mut whole = Vec::new();
    while let Some(piece) = next_piece(&mut response).await? {
        if whole.len() + piece.len() > MAX_JSON_BYTES {
            return Err(format!("the answer is larger than {MAX_JSON_BYTES} bytes"));
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole)
}

/// Returns the next piece of the response body; `None` at the end.
pub(crate) async fn next_piece(
    response: &mut Response,
) -> Result<Option<impl AsRef<[u8]> + std::ops::Deref<Target = [u8]>>, String> {
    match timeout(STALL_TIMEOUT, response.chunk()).await {
        Ok(Ok(piece)) => Ok(piece),
        Ok(Err(error)) => Err(with_causes(&error.without_url())),
        Err(_) => Err(format!("the server sent no byte for {} s", STALL_TIMEOUT.as_secs())),
    }
}

pub(crate) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Returns the path segments before a repository's id in download URLs: `datasets` for datasets.
fn prefix(kind: RepoKind) -> &'static [&'static str] {
    match kind {
        RepoKind::Model => &[],
        RepoKind::Dataset => &["datasets"],
    }
}

pub(crate) fn is_same_origin(one: &Url, other: &Url) -> bool {
    one.origin() == other.origin()
}

pub(crate) fn host_of(url: &Url) -> String {
    match url.port() {
        Some(port) => format!("{}:{port}", url.host_str().unwrap_or_default()),
        None => url.host_str().unwrap_or_default().to_owned(),
    }
}

pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    rlood_types::error_text::with_causes(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_is_taken_from_the_headers() {
        let headers = |pairs: &[(&'static str, &'static str)]| -> HeaderMap {
            pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
        };
        let limited = headers(&[("ratelimit", "\"resolvers\";r=0;t=55"), ("retry-after", "7")]);
        assert_eq!(requested_wait(&limited), Some(Duration::from_secs(56)));
        let left = headers(&[("ratelimit", "\"resolvers\";r=12;t=55"), ("retry-after", "7")]);
        assert_eq!(requested_wait(&left), Some(Duration::from_secs(7)));
        assert_eq!(requested_wait(&headers(&[])), None);
    }

    #[test]
    fn a_token_is_not_printed() {
        assert_eq!(format!("{:?}", Token::new(" hf_secret ")), "Some(Token(…))");
        assert_eq!(Token::new("a\nb"), None);
        assert_eq!(Token::new("  "), None);
    }

    #[test]
    fn a_redirect_never_leads_from_https_to_an_unencrypted_address() {
        let policy = OutgoingPolicy::parse(&["loopback"]).unwrap();
        let client = rlood_rewards::http_client::restricted_client_builder(&policy).build().unwrap();
        for (endpoint, target, is_followed) in [
            ("https://hub.example", "http://cdn.example/file", false),
            ("https://hub.example", "http://hub.example/file", false),
            ("https://hub.example", "https://cdn.example/file", true),
            ("https://hub.example", "/other/file", true),
            ("http://127.0.0.1:8000", "http://127.0.0.1:9000/file", true),
        ] {
            let hub = Hub::new(client.clone(), HubSettings::new(endpoint, policy.clone()).unwrap());
            let followed = hub.follow(&hub.settings.endpoint, Some(target));
            assert_eq!(followed.is_ok(), is_followed, "{endpoint} {target}: {followed:?}");
        }
    }
}
