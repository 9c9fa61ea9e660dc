//! The session cookie, and the session that it belongs to.
//!
//! The cookie is a random text with `HttpOnly`, `SameSite=Strict`, and `Secure` where the server is reached by https. A request
//! that changes something must send a token in a header, which only a page of this server can have read.

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::AppState;
use super::error::{Code, Problem};
use crate::store::{SessionRow, StoreError, clock_ms};

const COOKIE: &str = "rlood_session";
/// The header in which a request with the cookie repeats the CSRF token.
pub(super) const CSRF_HEADER: HeaderName = HeaderName::from_static("x-csrf-token");

/// The value of a session cookie.
#[derive(Clone)]
pub(super) struct Cookie(String);

impl std::fmt::Debug for Cookie {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cookie(redacted)")
    }
}

impl Cookie {
    pub(super) fn new(text: String) -> Self {
        Self(text)
    }

    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let pairs = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut pairs = pairs.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
        pairs.find(|(name, _)| *name == COOKIE).map(|(_, value)| Self(value.to_owned()))
    }

    pub(super) fn sha256(&self) -> Vec<u8> {
        Sha256::digest(&self.0).to_vec()
    }

    /// Derives the CSRF token from the session cookie, which scripts cannot read, so that the token need not be stored.
    pub(super) fn csrf_token(&self) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.as_bytes()).expect("HMAC takes keys of any length");
        mac.update(b"rlood csrf token");
        hex::encode(mac.finalize().into_bytes())
    }

    /// Answers 403 when the request changes something and its `x-csrf-token` is missing or wrong.
    pub(super) fn check_csrf(&self, method: &Method, given: Option<&HeaderValue>) -> Result<(), Problem> {
        if matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) {
            return Ok(());
        }
        let expected = self.csrf_token();
        if given.is_some_and(|given| bool::from(given.as_bytes().ct_eq(expected.as_bytes()))) {
            return Ok(());
        }
        let detail = "with the session's cookie, send the csrf_token of GET /session as 'x-csrf-token'";
        Err(Problem::new(Code::InvalidCsrfToken, detail))
    }

    /// Returns the session cookie as the browser sent it.
    pub(super) fn text(&self) -> &str {
        &self.0
    }

    /// Returns the value of the `Set-Cookie` header.
    pub(super) fn header(&self, state: &AppState, seconds: i64) -> String {
        let https = state.config.public_url.as_deref().is_some_and(|url| url.starts_with("https:"));
        let secure = if https { "; Secure" } else { "" };
        format!("{COOKIE}={}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}", self.0)
    }
}

/// Finds the session of a cookie, if both the session and its key are still valid.
pub(super) async fn find_session(state: &AppState, cookie: &Cookie) -> Result<Option<SessionRow>, StoreError> {
    let found = state.store.session_find(&cookie.sha256(), clock_ms()).await?;
    Ok(found.filter(|session| match &session.operator_sha256 {
        None => session.key.is_some(),
        Some(sha256) => state
            .config
            .api_key
            .as_deref()
            .is_some_and(|key| bool::from(Sha256::digest(key).as_slice().ct_eq(sha256.as_slice()))),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cookie_is_found_among_others() {
        let mut headers = HeaderMap::new();
        headers.append(header::COOKIE, HeaderValue::from_static("a=1; rlood_session=xyz; rlood_session_2=q"));
        assert_eq!(Cookie::of(&headers).unwrap().0, "xyz");
        assert!(Cookie::of(&HeaderMap::new()).is_none());
    }

    #[test]
    fn only_the_cookies_own_token_passes() {
        let cookie = Cookie("xyz".to_owned());
        let token = HeaderValue::from_str(&cookie.csrf_token()).unwrap();
        assert!(cookie.check_csrf(&Method::POST, Some(&token)).is_ok());
        assert!(cookie.check_csrf(&Method::GET, None).is_ok());
        assert!(cookie.check_csrf(&Method::DELETE, None).is_err());
        assert!(Cookie("xyy".to_owned()).check_csrf(&Method::POST, Some(&token)).is_err());
    }
}
