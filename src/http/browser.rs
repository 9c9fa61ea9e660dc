//! Refuses requests that only a hostile web page would send: an unknown host name (DNS rebinding), or a change requested by a page
//! of another site. Pages from origins that the operator allowed may call the API with a key (CORS).

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::AppState;
use super::auth;
use super::error::{Code, Problem, shortened};
use crate::config::ServeConfig;
use crate::listen::host::{self, Name, names_of};

/// Methods that pages from allowed origins may use.
const CORS_METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, PATCH, PUT, DELETE");
const CORS_HEADERS: HeaderValue = HeaderValue::from_static(
    "authorization, content-type, content-encoding, idempotency-key, if-match, if-none-match, if-range, last-event-id, \
     range, x-request-id",
);
/// Response headers that pages from allowed origins may read.
const CORS_EXPOSED: HeaderValue = HeaderValue::from_static(
    "accept-ranges, content-disposition, content-range, etag, idempotency-replayed, location, repr-digest, retry-after, \
     x-request-id",
);

/// Layer that checks the `Host` and `Origin` headers.
pub(crate) async fn guard_browser(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let origin = permitted_origin(&state.config, request.headers());
    let (method, uri, headers) = (request.method().clone(), request.uri().clone(), request.headers().clone());
    let names = match names_of(&request) {
        Ok(names) => names,
        Err(detail) => return Problem::new(Code::InvalidRequest, detail).into_response(),
    };
    // Workers are not browsers. They may use any host name that reaches the server, with a token.
    if !uri.path().starts_with("/worker/")
        && let Err(problem) = check_browser(&state, &method, &headers, &names).await
    {
        return problem.into_response();
    }
    let Some(origin) = origin else { return next.run(request).await };
    let preflight = method == Method::OPTIONS && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = if preflight { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if preflight {
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, CORS_METHODS);
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, CORS_HEADERS);
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    } else {
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, CORS_EXPOSED);
    }
    response
}

/// Returns the request's origin if the operator allowed it.
fn permitted_origin(config: &ServeConfig, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let text = origin.to_str().ok()?;
    config.edge.cors_origins.iter().any(|permitted| permitted.eq_ignore_ascii_case(text)).then(|| origin.clone())
}

async fn check_browser(state: &AppState, method: &Method, headers: &HeaderMap, names: &[Name]) -> Result<(), Problem> {
    let config = &state.config;
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    for Name { whole, host } in names {
        // DNS rebinding needs a host name, so literal IP addresses are safe. Without keys, only this server's own addresses are
        // accepted.
        if is_ours(config, host) || (host.parse::<IpAddr>().is_ok() && auth::keys_are_on(state).await?) {
            continue;
        }
        let detail = format!(
            "'{}' is not a name of this server; use its address, or have the operator add the name to --allowed-hosts \
             (RLOOD_ALLOWED_HOSTS)",
            shortened(whole)
        );
        return Err(Problem::new(Code::WrongHost, detail));
    }
    if [Method::GET, Method::HEAD, Method::OPTIONS].contains(method) || permitted_origin(config, headers).is_some() {
        return Ok(());
    }
    let foreign_site =
        text(HeaderName::from_static("sec-fetch-site")).is_some_and(|site| !["same-origin", "none"].contains(&site));
    let host = names.first().map(|name| name.whole.as_str());
    let ours = |origin: &str| {
        let public = config
            .public_url
            .as_deref()
            .is_some_and(|url| reqwest_origin(url).is_some_and(|public| public.eq_ignore_ascii_case(origin)));
        public || origin.split_once("://").is_some_and(|(_, authority)| Some(authority) == host)
    };
    if foreign_site || text(header::ORIGIN).is_some_and(|origin| !ours(origin)) {
        let detail = "a page of another origin may not change anything here; the operator can allow an origin with --cors-origins";
        return Err(Problem::new(Code::Forbidden, detail));
    }
    Ok(())
}

/// Returns the origin (scheme, host, port) of a URL that was validated before.
fn reqwest_origin(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    Some(format!("{}://{}", uri.scheme_str()?, uri.authority()?))
}

fn is_ours(config: &ServeConfig, host: &str) -> bool {
    let public = config.public_url.as_deref().and_then(|url| url.parse::<Uri>().ok());
    let is_public = public.as_ref().and_then(Uri::host);
    host::is_own(host, config.listen.ip(), &config.edge.allowed_hosts)
        || is_public.is_some_and(|ours| ours.eq_ignore_ascii_case(host.trim_end_matches('.')))
}
