//! Redacts requests and answers for display: removes secrets, credentials and tokens, and truncates long texts.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::{Captures, Regex};
use reqwest::Url;
use reqwest::header::HeaderMap;

use super::secret_filter::SecretFilter;
use crate::spec::RewardSecrets;

/// Text that replaces a redacted value.
const REDACTED: &str = "(redacted)";
/// Maximum number of bytes of a body that are searched for secrets, and that are shown.
const READ_BYTES: usize = 64 * 1024;
const SHOWN_BYTES: usize = 4 * 1024;
/// Maximum number of headers that are shown, and of bytes of one header.
const HEADERS: usize = 40;
const HEADER_BYTES: usize = 256;

/// Matches JSON fields whose value is a credential.
static FIELDS: LazyLock<Option<Regex>> = LazyLock::new(|| {
    let names = "[a-z_-]*(?:token|secret|password|passwd|api[_-]?key|authorization|cookie|credentials?)";
    Regex::new(&format!(r#"(?i)("{names}"\s*:\s*")((?:[^"\\]|\\.)*)"#)).ok()
});
/// Matches credentials in text, plain or escaped.
static WORDS: LazyLock<Option<Regex>> = LazyLock::new(|| {
    let escape = r"\\+/|\\+u[0-9a-f]{4}|%[0-9a-f]{2}";
    Regex::new(&format!(r"(?i)\b((?:bearer|basic)(?: |\+|%20)|whsec_|rld_|sk-)(?:[A-Za-z0-9._~+/=-]|{escape}){{4,}}"))
        .ok()
});

/// Redacts the secrets of one reward in texts, bodies and headers.
#[derive(Clone, Default)]
pub(super) struct Redactor(SecretFilter);

impl Redactor {
    /// Creates a redactor for a reward's signing secrets and header values.
    pub fn new(secrets: &RewardSecrets) -> Self {
        Self(SecretFilter::new(secrets))
    }

    /// Redacts and truncates a text.
    pub fn text(&self, text: &str) -> String {
        let text = text.get(..text.floor_char_boundary(READ_BYTES)).unwrap_or(text);
        without_credentials(&self.0.redact_text(text.as_bytes().to_vec()))
    }

    /// Redacts and truncates a body.
    pub fn body(&self, body: &[u8]) -> String {
        without_credentials(&self.0.redact_body(body[..body.len().min(READ_BYTES)].to_vec()))
    }

    /// Redacts and truncates headers.
    pub fn headers(&self, headers: &HeaderMap) -> BTreeMap<String, String> {
        let shown = |(name, value): (&reqwest::header::HeaderName, &reqwest::header::HeaderValue)| {
            let credential = ["authorization", "cookie", "token", "secret", "key", "signature"];
            let hidden = value.is_sensitive()
                || (credential.iter().any(|word| name.as_str().contains(word)) && name != "idempotency-key");
            let value = String::from_utf8_lossy(value.as_bytes());
            (name.to_string(), if hidden { REDACTED.to_owned() } else { cut(self.text(&value), HEADER_BYTES) })
        };
        headers.iter().take(HEADERS).map(shown).collect()
    }

    /// Redacts a URL: the values of its query are replaced.
    pub fn url(&self, url: &Url) -> String {
        let mut shown = url.clone();
        if url.query().is_some() {
            let names: Vec<String> = url.query_pairs().map(|(name, _)| format!("{name}={REDACTED}")).collect();
            shown.set_query(Some(&names.join("&")));
        }
        self.text(shown.as_str())
    }
}

/// Replaces text that looks like a credential, and truncates the result.
fn without_credentials(text: &[u8]) -> String {
    let mut text = String::from_utf8_lossy(text).into_owned();
    let field = |found: &Captures<'_>| format!("{}{REDACTED}", &found[1]);
    for pattern in [&FIELDS, &WORDS] {
        if let Some(pattern) = &**pattern {
            text = pattern.replace_all(&text, field).into_owned();
        }
    }
    cut(text, SHOWN_BYTES)
}

fn cut(text: String, bytes: usize) -> String {
    if text.len() <= bytes { text } else { format!("{}…", &text[..text.floor_char_boundary(bytes)]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redactor() -> Redactor {
        let headers = serde_json::json!({"authorization": "Bearer hidden-one"});
        let secrets = serde_json::json!({"secret": "whsec_SGlkZGVuVHdv", "headers": headers});
        Redactor::new(&serde_json::from_value(secrets).unwrap())
    }

    #[test]
    fn no_secret_is_shown_wherever_a_service_repeats_it() {
        for text in [
            "401: the key 'hidden-one' is not known",
            "Authorization: Bearer hidden-one",
            r#"{"headers": {"Authorization": "Bearer hidden-one"}}"#,
            "you signed with whsec_SGlkZGVuVHdv",
            "base64 SGlkZGVuVHdv",
            r#"{"reply": {"token": "hidden-three"}}"#,
            r#"{"access_token":"hidden-\"three"}"#,
            "use Bearer hidden-three",
            r"Bearer abcd\/hidden-three",
            r#"{"said": "Bearer ab\u002fhidden-three"}"#,
            "q=bearer+ab%2Fhidden-three",
            r"\u0068idden-one",
            "%68idden%2Done",
        ] {
            let shown = redactor().text(text);
            assert!(!shown.contains("hidden") && !shown.contains("SGlkZGVu"), "{text} → {shown}");
            assert!(shown.contains(REDACTED), "{text} → {shown}");
        }
        let harmless = r#"{"num_tokens": 5, "samples": [{"prompt": "What is a token?"}]}"#;
        assert_eq!(redactor().text(harmless), harmless);
    }

    #[test]
    fn headers_and_queries_are_shown_by_name() {
        let mut headers = HeaderMap::new();
        for (name, value) in [("set-cookie", "session=hidden"), ("x-api-key", "hidden"), ("content-type", "text/html")]
        {
            headers.insert(name, value.parse().unwrap());
        }
        let shown = redactor().headers(&headers);
        assert_eq!((shown["set-cookie"].as_str(), shown["x-api-key"].as_str()), (REDACTED, REDACTED));
        assert_eq!(shown["content-type"], "text/html");
        let url = redactor().url(&Url::parse("https://x/score?key=hidden&v=1").unwrap());
        assert!(!url.contains("hidden") && url.contains("key="), "{url}");
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let text = redactor().body("é".repeat(100_000).as_bytes());
        assert!(text.len() <= SHOWN_BYTES + 4 && text.ends_with('…'));
    }
}
