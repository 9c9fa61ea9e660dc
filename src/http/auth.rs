//! Who may call what.
//!
//! With `RLOOD_API_KEY` every route but the open ones needs `Authorization: Bearer KEY`. Without a key the server listens on
//! loopback only, and a browser's requests are checked instead: the `Host` must be ours (DNS rebinding), and a request that
//! changes something must not come from another site's page. Worker routes need the worker token, never the key.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::AppState;
use super::error::{Code, Problem, shortened};
use crate::config::ServeConfig;

/// Routes that answer without a key: they show nothing of anybody.
const OPEN: &[&str] = &["/livez", "/readyz", "/openapi.json", "/docs", "/"];
/// Paths that carry another credential: the worker token, or a reward request's own.
const OTHER_CREDENTIALS: [&str; 2] = ["/worker/", "/reward-callbacks/"];

/// Layer: 401 unless the request carries the API key, if one is set.
pub async fn require_key(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let open = OPEN.contains(&path) || ["/docs/", "/web/"].iter().any(|prefix| path.starts_with(prefix));
    let open = open || OTHER_CREDENTIALS.iter().any(|prefix| path.starts_with(prefix));
    match &state.config.api_key {
        Some(key) if !open => match check_bearer(request.headers(), key) {
            Ok(()) => next.run(request).await,
            Err(problem) => problem.into_response(),
        },
        Some(_) | None => next.run(request).await,
    }
}

/// Layer of the worker routes: 401 unless the request carries the worker token.
pub async fn require_worker(State(state): State<AppState>, request: Request, next: Next) -> Response {
    match check_bearer(request.headers(), &state.config.worker_token) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    }
}

/// `Ok` when the request carries this bearer token.
pub(super) fn check_bearer(headers: &HeaderMap, expected: &str) -> Result<(), Problem> {
    let challenge = |problem: Problem| problem.header(header::WWW_AUTHENTICATE, "Bearer realm=\"rlood\"");
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let Some(given) = given else {
        return Err(challenge(Problem::new(Code::Unauthorized, "send 'authorization: Bearer KEY'")));
    };
    let token = match given.split_once(' ') {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => token.trim(),
        Some(_) | None => "",
    };
    // Digests have one length, so that the comparison takes the same time for every input.
    let same: bool = Sha256::digest(token).ct_eq(&Sha256::digest(expected)).into();
    if same && !expected.is_empty() {
        return Ok(());
    }
    Err(challenge(Problem::new(Code::Unauthorized, "the bearer token is not a valid key")))
}

/// Layer: refuses what only a hostile web page would send.
pub async fn guard_browser(State(state): State<AppState>, request: Request, next: Next) -> Response {
    match check_browser(&state.config, request.method(), request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    }
}

fn check_browser(config: &ServeConfig, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), Problem> {
    if config.api_key.is_some() {
        return Ok(()); // A page of another site does not know the key, and no cookie carries it.
    }
    let text = |name| headers.get(name).and_then(|value: &axum::http::HeaderValue| value.to_str().ok());
    let host = uri.authority().map(|authority| authority.as_str()).or_else(|| text(header::HOST));
    if let Some(host) = host
        && !is_ours(config, host)
    {
        let detail = format!("'{}' is not a name of this server; use localhost or its listen address", shortened(host));
        return Err(Problem::new(Code::WrongHost, detail));
    }
    let safe = [Method::GET, Method::HEAD, Method::OPTIONS].contains(method);
    let foreign_site = text(header::HeaderName::from_static("sec-fetch-site"))
        .is_some_and(|site| !["same-origin", "none"].contains(&site));
    let foreign_origin = text(header::ORIGIN)
        .is_some_and(|origin| origin.split_once("://").is_none_or(|(_, authority)| Some(authority) != host));
    if !safe && (foreign_site || foreign_origin) {
        return Err(Problem::new(Code::Forbidden, "a page of another origin may not change anything here"));
    }
    Ok(())
}

fn is_ours(config: &ServeConfig, authority: &str) -> bool {
    let host = host_of(authority);
    let loopback = host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let public = config.public_url.as_deref().and_then(|url| url.parse::<Uri>().ok());
    loopback
        || host.eq_ignore_ascii_case("localhost")
        || host == config.listen.ip().to_string()
        || public.as_ref().and_then(Uri::host).is_some_and(|ours| ours.eq_ignore_ascii_case(host))
}

/// The host of `host`, `host:port`, `[v6]` or `[v6]:port`, without brackets.
fn host_of(authority: &str) -> &str {
    match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => authority.rsplit_once(':').map_or(authority, |(host, _)| host),
    }
}
