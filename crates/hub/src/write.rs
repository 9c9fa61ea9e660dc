//! Requests that change something on the Hub, and the meaning of its refusals.

use std::time::Duration;

use reqwest::StatusCode;
use reqwest::header::{ACCEPT, CONTENT_TYPE, LOCATION};
use tokio::time::timeout;
use url::Url;

use crate::error::HubError;
use crate::http::{Attempts, Failed, Hub, MAX_HOPS, is_same_origin, read_whole, text, with_causes};
use crate::id::Repo;

/// Media type of most requests.
pub(crate) const JSON: &str = "application/json";
/// Media type of Git LFS.
pub(crate) const LFS: &str = "application/vnd.git-lfs+json";
/// Maximum time until the Hub or its storage answers a complete request. A large commit, or a large object put together from
/// parts, takes minutes.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

/// Answer to a request that changes something.
pub(crate) struct Answered {
    /// Whether the answer is 409: what the request creates exists.
    pub(crate) is_conflict: bool,
    pub(crate) body: Vec<u8>,
}

impl Hub {
    /// Sends a POST request, and repeats it after errors that may pass.
    pub(crate) async fn post_until_answered(
        &self,
        repo: &Repo,
        url: &Url,
        media: &str,
        body: Vec<u8>,
    ) -> Result<Answered, HubError> {
        let mut attempts = Attempts::new(self.settings.first_delay);
        loop {
            match self.post(repo, url, media, body.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(failed) => attempts.pause_after(failed).await?,
            }
        }
    }

    /// Sends a POST request with the token if the address is the Hub's, and without it otherwise. Redirects within the Hub are
    /// followed: repositories may be renamed.
    pub(crate) async fn post(&self, repo: &Repo, url: &Url, media: &str, body: Vec<u8>) -> Result<Answered, Failed> {
        let mut at = url.clone();
        for _ in 0..=MAX_HOPS {
            let is_hub = is_same_origin(&at, &self.settings.endpoint);
            let accept = if media == LFS { LFS } else { JSON };
            let request = self.client().post(at.clone()).header(CONTENT_TYPE, media).header(ACCEPT, accept);
            let request = if is_hub { self.with_authorization(request) } else { request }.body(body.clone());
            let response = match timeout(ANSWER_TIMEOUT, request.send()).await {
                Ok(Ok(response)) => response,
                Ok(Err(error)) => return Err(Failed::transient(&at, with_causes(&error.without_url()))),
                Err(_) => {
                    let waited = format!("the server sent no answer for {} s", ANSWER_TIMEOUT.as_secs());
                    return Err(Failed::transient(&at, waited));
                }
            };
            let status = response.status();
            if status.is_redirection() {
                let to = self.follow(&at, text(response.headers(), LOCATION.as_str()))?;
                if !is_same_origin(&to, &self.settings.endpoint) {
                    return Err(
                        HubError::BadRedirect("a request that changes the repository was sent elsewhere").into()
                    );
                }
                at = to;
                continue;
            }
            let is_conflict = status == StatusCode::CONFLICT;
            if !status.is_success() && !is_conflict {
                return Err(self.error_of_response(repo, &at, is_hub, response).await);
            }
            let body = read_whole(response).await.map_err(|detail| Failed::transient(&at, detail))?;
            return Ok(Answered { is_conflict, body });
        }
        Err(HubError::BadRedirect("there are more than five redirects in a row").into())
    }
}

/// Explains a refused request that changes something; `exists` says whether the repository is known to exist.
pub(crate) fn of_write(error: HubError, repo: &Repo, exists: bool) -> HubError {
    let repo_id = repo.id().to_owned();
    match error {
        HubError::Refused { status, detail } if is_about_space(status, &detail) => {
            HubError::NoRoom { repo: repo_id, detail }
        }
        HubError::Refused { status: 403, detail } => HubError::MayNotWrite { repo: repo_id, exists, detail },
        HubError::NoRepository { .. } => {
            let detail = "it has no such repository for this token".to_owned();
            HubError::MayNotWrite { repo: repo_id, exists, detail }
        }
        other => other,
    }
}

/// Returns whether a refusal means that the account has no storage left.
pub(crate) fn is_about_space(status: u16, message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    let names_a_limit = ["limit", "quota", "exceeded"].iter().any(|word| message.contains(word));
    matches!(status, 402 | 413 | 507) || (status == 403 && message.contains("storage") && names_a_limit)
}
