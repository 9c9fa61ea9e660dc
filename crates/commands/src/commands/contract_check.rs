//! Checks a service against a contract: what `rlood reward check` and `rlood env check` have in common.

pub(super) mod report;
pub(super) mod wire;

use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Map, Value};

use crate::outgoing::OutgoingPolicy;
use crate::reward::http_client::restricted_client_builder;
use crate::reward::signature::Key;
use crate::spec::{FieldError, RewardSecrets};
pub(super) use report::Findings;
pub use report::{Finding, Latency, Outcome, Report};
use wire::{Got, Signing, Wire};

/// A flag is invalid; no request was sent.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct CheckError(pub(super) String);

/// Parses the headers of `--header`.
///
/// # Errors
/// Fails if one has no colon.
pub(super) fn read_headers(given: &[String]) -> Result<Map<String, Value>, CheckError> {
    let mut headers = Map::new();
    for header in given {
        let Some((name, value)) = header.split_once(':') else {
            let name: String = header.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
            return Err(CheckError(format!("--header '{name}…' has no colon: it must have the form 'name: value'")));
        };
        headers.insert(name.trim().to_owned(), value.trim().into());
    }
    Ok(headers)
}

/// The error for settings that are not valid. Their pointers begin with `prefix`.
pub(super) fn refused(errors: &[FieldError], prefix: &str) -> CheckError {
    let line = |error: &FieldError| format!("{}: {}", error.pointer.trim_start_matches(prefix), error.detail);
    CheckError(errors.iter().map(line).collect::<Vec<_>>().join("; "))
}

/// Every address is allowed, because the user who runs the check controls this machine.
pub(super) fn wire(url: &str, secrets: &RewardSecrets, timeout_ms: u64) -> Result<Wire, CheckError> {
    let failed = |why: &dyn std::fmt::Display| CheckError(why.to_string());
    let policy = OutgoingPolicy::parse(&["0.0.0.0/0", "::/0"]).map_err(|why| failed(&why))?;
    let url = policy.check_url(url).map_err(|why| failed(&why))?;
    let mut headers = HeaderMap::new();
    for (name, value) in &secrets.headers {
        let name = HeaderName::try_from(name.as_str()).map_err(|why| failed(&why))?;
        let value = HeaderValue::try_from(value.as_str()).map_err(|why| failed(&why))?;
        headers.insert(name, value);
    }
    let client = restricted_client_builder(&policy)
        .http1_only()
        .connect_timeout(Duration::from_millis(timeout_ms.clamp(1, 10_000)));
    Ok(Wire {
        client: client.build().map_err(|why| failed(&why))?,
        url,
        headers,
        key: secrets.secret.as_deref().map(Key::parse).transpose().map_err(|why| failed(&why))?,
        timeout: Duration::from_millis(timeout_ms.max(1)),
    })
}

/// Returns the texts that must never be printed: the secret, header values, and the token within `Bearer TOKEN`.
pub(super) fn hidden(secrets: &RewardSecrets) -> Vec<String> {
    let values =
        secrets.headers.values().flat_map(|value| [Some(value.as_str()), value.split_once(' ').map(|(_, t)| t)]);
    let key = secrets.secret.as_deref();
    let all = values.flatten().chain(key).chain(key.and_then(|key| key.strip_prefix("whsec_")));
    all.filter(|text| text.len() > 2).map(str::to_owned).collect()
}

/// Parses `NAME=VALUE`; a value that is valid JSON is used as such.
pub(super) fn columns(given: &[String]) -> Result<Map<String, Value>, CheckError> {
    let read = |column: &String| match column.split_once('=') {
        Some((name, value)) if !name.is_empty() => {
            Ok((name.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| value.into())))
        }
        _ => Err(CheckError(format!("--column '{column}' must have the form NAME=VALUE"))),
    };
    given.iter().map(read).collect()
}

/// A request with a signature that a service must refuse.
pub(super) struct SignatureCase {
    /// Name of the check.
    pub check: &'static str,
    what: &'static str,
    /// How the request is signed.
    pub signing: Signing,
    fix: &'static str,
}

impl SignatureCase {
    /// Judges a service's response to the request.
    pub fn judge(&self, got: Result<Got, String>) -> (Outcome, String) {
        let what = self.what;
        match got {
            Err(why) => (Outcome::Failed, format!("{what}: {why}")),
            Ok(got) if got.is_success() => (Outcome::Warning, format!("{what} was accepted ({})", got.status)),
            Ok(got) if got.status >= 500 => {
                (Outcome::Warning, format!("{what} was answered {}{}", got.status, got.excerpt()))
            }
            Ok(got) => (Outcome::Ok, format!("{what} was refused ({})", got.status)),
        }
    }

    /// The suggested fix for an outcome.
    pub fn fix_of(&self, outcome: Outcome) -> &'static str {
        match outcome {
            Outcome::Failed => "answer 401 instead of closing the connection",
            Outcome::Ok | Outcome::Warning | Outcome::Skipped => self.fix,
        }
    }
}

/// Requests that a service with a secret must refuse.
pub(super) const SIGNATURE_CASES: [SignatureCase; 5] = [
    SignatureCase {
        check: "unsigned",
        what: "a request without a signature",
        signing: Signing::Missing,
        fix: "refuse (401) requests without webhook-signature",
    },
    SignatureCase {
        check: "wrong_signature",
        what: "a request signed with another secret",
        signing: Signing::Stranger,
        fix: "compare webhook-signature with your own (in constant time) and refuse (401) a mismatch",
    },
    SignatureCase {
        check: "tampered_body",
        what: "a request whose signature is of another body",
        signing: Signing::Tampered,
        fix: "compute the signature over the received bytes of the body, before parsing them",
    },
    SignatureCase {
        check: "stale_timestamp",
        what: "a well-signed request that is ten minutes old",
        signing: Signing::Aged(600),
        fix: "refuse (401) a webhook-timestamp more than five minutes from your clock: otherwise a recorded request can be replayed",
    },
    SignatureCase {
        check: "future_timestamp",
        what: "a well-signed request from ten minutes ahead",
        signing: Signing::Aged(-600),
        fix: "refuse (401) a webhook-timestamp more than five minutes from your clock",
    },
];
