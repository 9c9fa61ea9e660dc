//! What a service must not get into our records by saying it back: the secrets it was asked with.

use reqwest::header::{HeaderMap, HeaderValue};

use crate::spec::RewardSecrets;

const INSTEAD: &[u8] = b"(redacted)";
/// Shorter values are no secrets, and may stand in an answer for their own reasons.
const SHORTEST: usize = 8;

/// The secrets of one reward, to be looked for.
pub(super) struct Hidden(Vec<Vec<u8>>);

impl Hidden {
    /// Every value as a whole, and its words: a service may repeat a token without its `Bearer`.
    pub(super) fn new(secrets: &RewardSecrets) -> Self {
        let keys = secrets.secret.iter().chain(&secrets.previous_secret);
        let key = keys.flat_map(|secret| [Some(secret.as_str()), secret.strip_prefix("whsec_")]);
        let values = secrets
            .headers
            .values()
            .flat_map(|value| std::iter::once(Some(value.as_str())).chain(value.split_whitespace().map(Some)));
        let mut hidden: Vec<Vec<u8>> = key
            .chain(values)
            .flatten()
            .filter(|text| text.len() >= SHORTEST)
            .map(|text| text.as_bytes().to_vec())
            .collect();
        // The whole before its parts.
        hidden.sort_by_key(|text| std::cmp::Reverse(text.len()));
        hidden.dedup();
        Self(hidden)
    }

    /// The bytes without them.
    pub(super) fn bytes(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        for secret in &self.0 {
            let mut from = 0;
            while let Some(place) = bytes[from..].windows(secret.len()).position(|window| window == secret) {
                let start = from + place;
                bytes.splice(start..start + secret.len(), INSTEAD.iter().copied());
                from = start + INSTEAD.len();
            }
        }
        bytes
    }

    /// The headers without them.
    pub(super) fn headers(&self, mut headers: HeaderMap) -> HeaderMap {
        for value in headers.values_mut() {
            let clean = self.bytes(value.as_bytes().to_vec());
            if clean != value.as_bytes()
                && let Ok(clean) = HeaderValue::from_bytes(&clean)
            {
                *value = clean;
            }
        }
        headers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_taken_out_wherever_and_however_often_they_stand() {
        let secrets = RewardSecrets {
            secret: Some("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=".to_owned()),
            headers: [("authorization", "Bearer sk-12345678"), ("x-version", "1")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            previous_secret: None,
        };
        let hidden = Hidden::new(&secrets);
        let clean = |text: &str| String::from_utf8(hidden.bytes(text.as_bytes().to_vec())).unwrap();
        assert_eq!(
            clean("no 'Bearer sk-12345678' here, sk-12345678sk-12345678"),
            "no '(redacted)' here, (redacted)(redacted)"
        );
        assert_eq!(clean("AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="), "(redacted)");
        assert_eq!(clean("{\"version\": 1}"), "{\"version\": 1}", "what is short stays");
    }
}
