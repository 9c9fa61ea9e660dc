//! Reads the settings that every reward over HTTP has: address, limits, headers and secret.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::super::reader::{Field, Reader, shown};
use super::super::{OnInvalid, RewardSecrets, ServicePlan, WebhookPlan};

/// Headers that the HTTP transport or the reward contract sets.
const RESERVED_HEADERS: [&str; 13] = [
    "host",
    "content-length",
    "content-type",
    "transfer-encoding",
    "connection",
    "upgrade",
    "te",
    "trailer",
    "expect",
    "idempotency-key",
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
];

/// Reads a reward that implements rlood's own request format (reward contract v1).
pub(super) fn read_webhook(reader: &Reader<'_>) -> WebhookPlan {
    WebhookPlan {
        service: read_service(reader, 32),
        params: reader.field("params").map().cloned().unwrap_or_default(),
        completion_ids: reader.field("completion_ids").bool().unwrap_or(false),
    }
}

/// Reads a service's address and limits. `batch` is the default number of samples per request; with 1, the
/// endpoint accepts only one.
pub(super) fn read_service(reader: &Reader<'_>, batch: u32) -> ServicePlan {
    let url = read_url(&reader.required("url", "give the http or https address of the reward service"));
    ServicePlan { url, ..read_limits(reader, batch) }
}

/// Reads the limits of a service whose address the client does not choose.
pub(super) fn read_limits(reader: &Reader<'_>, batch: u32) -> ServicePlan {
    let timeout = reader.field("timeout_ms");
    let service = ServicePlan {
        url: String::new(),
        max_concurrency: reader.field("max_concurrency").whole(1..=256).unwrap_or(8),
        max_batch_samples: reader
            .field("max_batch_samples")
            .hint(if batch == 1 { "this endpoint accepts one sample per request" } else { "" })
            .whole(1..=if batch == 1 { 1 } else { 10_000 })
            .unwrap_or(batch),
        max_batch_bytes: reader.field("max_batch_bytes").whole(1_024..=64_000_000).unwrap_or(1_000_000),
        timeout_ms: timeout.whole(1..=86_400_000).unwrap_or(30_000),
        deadline_ms: reader.field("deadline_ms").whole(1..=604_800_000).unwrap_or(300_000),
        max_tries: reader.field("max_tries").whole(1..=100).unwrap_or(5),
        max_invalid_tries: reader.field("max_invalid_tries").whole(1..=100).unwrap_or(2),
        on_invalid: reader
            .field("on_invalid")
            .choice(&[("mask", OnInvalid::Mask), ("zero", OnInvalid::Zero), ("fail", OnInvalid::Fail)])
            .unwrap_or(OnInvalid::Mask),
        max_outage_s: reader.field("max_outage_s").whole(1..=604_800).unwrap_or(600),
        cache: reader.field("cache").bool().unwrap_or(false),
        min_valid_per_group: reader.field("min_valid_per_group").whole(1..=10_000).unwrap_or(2),
        max_invalid_fraction: reader
            .field("max_invalid_fraction")
            .number("above 0 and at most 1", |part| part > 0.0 && part <= 1.0)
            .unwrap_or(0.5),
    };
    if service.timeout_ms > service.deadline_ms {
        let detail = format!(
            "one try ({} ms) may not take longer than all tries together (deadline_ms {})",
            service.timeout_ms, service.deadline_ms
        );
        timeout.fail("invalid_value", detail);
    }
    service
}

/// Appends the system's standard path to an address without a path.
pub(super) fn at_path(mut service: ServicePlan, path: &str) -> ServicePlan {
    if let Ok(mut url) = url::Url::parse(&service.url)
        && url.path() == "/"
    {
        url.set_path(path);
        service.url = url.to_string();
    }
    service
}

pub(in crate::spec) fn read_url(field: &Field<'_>) -> String {
    let Some(text) = field.nonempty(2_000) else { return String::new() };
    let complaint = match url::Url::parse(text) {
        Err(error) => {
            Some(format!("the url is not absolute ({error}); an absolute one looks like https://rm.example/score"))
        }
        Ok(url) if !matches!(url.scheme(), "http" | "https") => {
            Some(format!("the scheme must be http or https, not '{}'", shown(url.scheme())))
        }
        Ok(url) if !url.username().is_empty() || url.password().is_some() => {
            Some("credentials do not belong in a URL: give them in headers, which are never shown".to_owned())
        }
        Ok(url) if url.fragment().is_some() => {
            Some("a fragment (#…) is never sent to a server: remove the fragment".to_owned())
        }
        Ok(_) => None,
    };
    if let Some(detail) = complaint {
        field.fail("invalid_value", detail);
        return String::new();
    }
    text.to_owned()
}

/// Reads the signing secrets and the headers.
pub(in crate::spec) fn read_secrets(reader: &Reader<'_>) -> RewardSecrets {
    let secret = read_secret(&reader.field("secret"));
    let previous = reader.field("previous_secret");
    let previous_secret = read_secret(&previous);
    if previous.value().is_some() && reader.field("secret").value().is_none() {
        previous.fail("conflict", "previous_secret needs a current secret: give it as 'secret'");
    } else if secret.is_some() && previous_secret == secret {
        previous.fail("conflict", "previous_secret is the same as 'secret': leave it out");
    }
    RewardSecrets { secret, previous_secret, headers: read_headers(&reader.field("headers")).unwrap_or_default() }
}

fn read_secret(field: &Field<'_>) -> Option<String> {
    let valid = field.string(200).filter(|text| {
        let key = text.strip_prefix("whsec_").and_then(|key| STANDARD.decode(key).ok());
        let fits = key.is_some_and(|key| (24..=64).contains(&key.len()));
        if !fits {
            field.fail(
                "invalid_value",
                "a secret must be 'whsec_' followed by 24 to 64 random bytes in base64 (the Standard Webhooks form)",
            );
        }
        fits
    });
    valid.map(str::to_owned)
}

/// Reads the headers that are sent with every request.
pub(in crate::spec) fn read_headers(field: &Field<'_>) -> Option<BTreeMap<String, String>> {
    let headers = field.texts(32, 8_000)?;
    for (name, value) in &headers {
        let is_token = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
        if name.is_empty() || !name.chars().all(is_token) {
            field.fail_at(
                name,
                "invalid_value",
                "the text is not a header name, which has letters, digits and '-' only",
            );
        } else if RESERVED_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
            field.fail_at(name, "invalid_value", "this header is set by the reward contract itself");
        }
        if !value.chars().all(|c| c == '\t' || (' '..='~').contains(&c)) {
            field.fail_at(name, "invalid_value", "a header value has printable ASCII characters only");
        }
    }
    Some(headers)
}
