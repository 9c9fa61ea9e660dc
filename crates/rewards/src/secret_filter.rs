//! Removes secrets from a service's answer before the answer is stored or shown, in case the service repeats the secrets it was
//! called with. The answer may contain them as they are, or encoded for JSON, URLs, forms, HTML or base64, also nested. Escapes
//! are therefore removed layer by layer, and each layer is searched.
//!
//! In JSON only strings are changed. A header's value may by chance equal digits of a reward or a field name: numbers and keys
//! are kept byte for byte, so that the answer has the same meaning before and after.

use std::cmp::Reverse;
use std::ops::Range;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use regex::bytes::{Regex, RegexBuilder};
use reqwest::header::{HeaderMap, HeaderValue};

use crate::callback::parse;
use crate::spec::RewardSecrets;

mod layer;

use layer::Layer;

const REPLACEMENT: &[u8] = b"(redacted)";
/// Minimum length of a secret in bytes. Shorter ones would match in any text.
const MIN_SECRET_BYTES: usize = 4;
/// Length in bytes from which a match is certainly the secret. Shorter matches may be part of the answer.
const CERTAIN_BYTES: usize = 8;
/// Maximum length in bytes of a number in an answer that is checked for a match.
const MAX_NUMBER_BYTES: usize = 40;
/// Maximum number of nested layers of escapes (JSON in a URL, for example) that are removed.
const MAX_LAYERS: usize = 4;
/// Size limit in bytes of the compiled search patterns. The longest permitted headers need a small part of it.
const MAX_PATTERN_BYTES: usize = 256 << 20;

/// Search patterns for the secrets of one reward.
#[derive(Clone, Default)]
pub(crate) struct SecretFilter(Vec<Regex>);

impl SecretFilter {
    /// Compiles patterns for every secret and for its words, since a service may repeat a token without its `Bearer`.
    pub(crate) fn new(secrets: &RewardSecrets) -> Self {
        let RewardSecrets { secret, previous_secret, headers } = secrets;
        let values = secret.iter().chain(previous_secret).chain(headers.values());
        Self(values.filter_map(|value| search(&forms(value))).collect())
    }

    /// Redacts an answer that is parsed and stored: changes the values of strings, except those in `preserved`. An answer that is
    /// not JSON is redacted as text. A short match that may be part of the answer is kept.
    pub(crate) fn redact_answer(&self, bytes: Vec<u8>, preserved: impl FnOnce() -> Preserved) -> Vec<u8> {
        if self.find_secrets(&bytes, |_, _| false).is_empty() {
            return bytes;
        }
        if parse(&bytes).is_err() {
            return self.redact(bytes, may_be_content);
        }
        let preserved = preserved();
        replace_strings(&bytes, |inside, is_key| {
            let clean = self.redact(inside.to_vec(), may_be_content);
            if is_key || clean == inside || preserved.is_word(inside) {
                return None;
            }
            let nested = if preserved.json_in_strings { self.redact_nested_json(inside) } else { None };
            Some(nested.unwrap_or(clean))
        })
    }

    /// Redacts a text that is shown to users.
    pub(crate) fn redact_text(&self, bytes: Vec<u8>) -> Vec<u8> {
        self.redact(bytes, |_, _| false)
    }

    /// Redacts a body that is shown to users. In JSON all strings are changed, including keys.
    pub(crate) fn redact_body(&self, bytes: Vec<u8>) -> Vec<u8> {
        let shown = self.redact_text(bytes.clone());
        if shown == bytes || parse(&bytes).is_err() {
            return shown;
        }
        replace_strings(&bytes, |inside, _| Some(self.redact_text(inside.to_vec())))
    }

    /// Redacts a JSON string that contains a JSON object among other text, as language models answer. The object's numbers and
    /// keys are kept. Returns `None` if the string contains no object.
    fn redact_nested_json(&self, inside: &[u8]) -> Option<Vec<u8>> {
        let text: String = serde_json::from_slice(&[b"\"", inside, b"\""].concat()).ok()?;
        let (start, end) = (text.find('{')?, text.rfind('}')? + 1);
        serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text.get(start..end)?).ok()?;
        let object = replace_strings(&text.as_bytes()[start..end], |inside, is_key| {
            (!is_key).then(|| self.redact(inside.to_vec(), may_be_content))
        });
        let around = |part: &str| self.redact(part.as_bytes().to_vec(), may_be_content);
        let clean = [around(&text[..start]), object, around(&text[end..])].concat();
        let written = serde_json::to_vec(&String::from_utf8_lossy(&clean)).ok()?;
        Some(written.get(1..written.len().checked_sub(1)?)?.to_vec())
    }

    /// Redacts secrets in the values of HTTP headers.
    pub(crate) fn headers(&self, mut headers: HeaderMap) -> HeaderMap {
        for value in headers.values_mut() {
            let clean = self.redact_text(value.as_bytes().to_vec());
            if clean != value.as_bytes()
                && let Ok(clean) = HeaderValue::from_bytes(&clean)
            {
                *value = clean;
            }
        }
        headers
    }

    fn redact(&self, bytes: Vec<u8>, is_kept: fn(&[u8], &Range<usize>) -> bool) -> Vec<u8> {
        let places = self.find_secrets(&bytes, is_kept);
        if places.is_empty() {
            return bytes;
        }
        let (mut clean, mut from) = (Vec::with_capacity(bytes.len()), 0);
        for Range { mut start, end } in places {
            // A replacement that starts inside a backslash escape would corrupt the text that follows.
            let backslashes = bytes[from..start].iter().rev().take_while(|byte| **byte == b'\\').count();
            start -= backslashes % 2;
            clean.extend_from_slice(&bytes[from..start]);
            clean.extend_from_slice(REPLACEMENT);
            from = end;
        }
        clean.extend_from_slice(&bytes[from..]);
        clean
    }

    /// Returns the positions of all secrets in a text, in order and without overlaps.
    fn find_secrets(&self, bytes: &[u8], is_kept: fn(&[u8], &Range<usize>) -> bool) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        let mut layers: Vec<Layer> = Vec::new();
        while !self.0.is_empty() {
            let text = layers.last().map_or(bytes, |layer| &layer.text);
            for place in self.0.iter().flat_map(|search| search.find_iter(text)) {
                if place.len() >= CERTAIN_BYTES || !is_kept(text, &place.range()) {
                    found.push(layers.iter().rev().fold(place.range(), |place, layer| layer.origin(&place)));
                }
            }
            match Layer::unescape(text).filter(|_| layers.len() < MAX_LAYERS) {
                Some(layer) => layers.push(layer),
                None => break,
            }
        }
        found.sort_by_key(|place| (place.start, Reverse(place.end)));
        let mut apart: Vec<Range<usize>> = Vec::with_capacity(found.len());
        for place in found {
            match apart.last_mut().filter(|last| place.start < last.end) {
                Some(last) => last.end = last.end.max(place.end),
                None => apart.push(place),
            }
        }
        apart
    }
}

/// Parts of an answer that must not be redacted, because rlood needs them to parse the answer.
#[derive(Debug, Default)]
pub(crate) struct Preserved {
    /// Values of JSON strings that are kept: sample ids and names of labels.
    pub words: Vec<String>,
    /// Whether the answer's strings may contain JSON that rlood parses, as in a language model's answer.
    pub json_in_strings: bool,
}

impl Preserved {
    /// Returns whether the content of a JSON string, after unescaping, is one of the values to keep.
    fn is_word(&self, inside: &[u8]) -> bool {
        let meant: Option<String> = serde_json::from_slice(&[b"\"", inside, b"\""].concat()).ok();
        meant.is_some_and(|meant| self.words.contains(&meant))
    }
}

/// Replaces the contents of strings in JSON, and keeps every other byte. `change` gets the content as written and whether it is
/// a key; it returns `None` to keep the content.
fn replace_strings(json: &[u8], change: impl Fn(&[u8], bool) -> Option<Vec<u8>>) -> Vec<u8> {
    let (mut changed, mut copied, mut at) = (Vec::with_capacity(json.len()), 0, 0);
    while let Some(skipped) = json[at..].iter().position(|byte| *byte == b'"') {
        let start = at + skipped + 1;
        let mut end = start;
        while end < json.len() && json[end] != b'"' {
            end += if json[end] == b'\\' { 2 } else { 1 };
        }
        let end = end.min(json.len());
        at = (end + 1).min(json.len());
        let is_key = json[at..].trim_ascii_start().starts_with(b":");
        if let Some(inside) = change(&json[start..end], is_key) {
            changed.extend_from_slice(&json[copied..start]);
            changed.extend_from_slice(&inside);
            copied = end;
        }
    }
    changed.extend_from_slice(&json[copied..]);
    changed
}

/// Returns the forms in which a secret may appear: the whole value, its words, and decoded base64, each
/// at every layer of escapes.
fn forms(value: &str) -> Vec<Vec<u8>> {
    let mut words: Vec<&str> = value.split_whitespace().collect();
    // The scheme of an authorization header, such as `Bearer`, is not a secret.
    if words.len() > 1 && words[0].len() < CERTAIN_BYTES {
        words.remove(0);
    }
    let mut parts: Vec<String> = Vec::new();
    for word in words {
        let word = word.strip_prefix("whsec_").unwrap_or(word);
        if let Some(inside) = STANDARD.decode(word).ok().and_then(|bytes| String::from_utf8(bytes).ok()) {
            // The decoded credential of a `Basic` authorization header contains a user name before the password.
            parts.extend(inside.split_once(':').map(|(_, password)| password.to_owned()));
            parts.push(inside);
        }
        parts.push(word.to_owned());
    }
    parts.push(value.trim().to_owned());
    let mut forms: Vec<Vec<u8>> = parts.iter().flat_map(|part| encoded(part)).collect();
    forms.extend(parts.into_iter().map(String::into_bytes));
    for mut form in forms.clone() {
        for _ in 0..MAX_LAYERS {
            let Some(layer) = Layer::unescape(&form) else { break };
            form = layer.text;
            forms.push(form.clone());
        }
    }
    forms.retain(|form| form.len() >= MIN_SECRET_BYTES);
    // Longer patterns come first, so that the whole secret matches before its parts.
    forms.sort_by(|one, other| other.len().cmp(&one.len()).then_with(|| one.cmp(other)));
    forms.dedup();
    forms
}

/// Returns the base64 forms that a secret can have inside a longer encoded text, one for each of the three alignments, without the
/// characters that depend on neighboring bytes.
fn encoded(part: &str) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    for before in 0..3 {
        let bytes = [&[0; 2][..before], part.as_bytes()].concat();
        let known = (before * 8).div_ceil(6)..bytes.len() * 8 / 6;
        for engine in [STANDARD, URL_SAFE] {
            let text = engine.encode(&bytes);
            found.extend(text.get(known.clone()).filter(|text| text.len() >= CERTAIN_BYTES).map(|text| text.into()));
        }
    }
    found
}

fn search(forms: &[Vec<u8>]) -> Option<Regex> {
    let literal = |form: &Vec<u8>| form.iter().map(|byte| format!("\\x{byte:02x}")).collect::<String>();
    let pattern = forms.iter().map(literal).collect::<Vec<_>>().join("|");
    let build = || RegexBuilder::new(&pattern).unicode(false).size_limit(MAX_PATTERN_BYTES).build().ok();
    if forms.is_empty() { None } else { build() }
}

/// Returns whether a short match of a secret may be part of the answer: inside a word, a name or a number. Redacting it could
/// make the answer unreadable.
fn may_be_content(text: &[u8], place: &Range<usize>) -> bool {
    let (before, secret, after) = (&text[..place.start], &text[place.clone()], &text[place.end..]);
    let in_word = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
    if in_word(before.last()) || in_word(after.first()) {
        return true;
    }
    let is_name = before.ends_with(b"\"")
        && after.strip_prefix(b"\"").is_some_and(|after| after.trim_ascii_start().starts_with(b":"));
    let is_digit = |byte: &u8| b"0123456789.+-eE".contains(byte);
    let is_literal = secret.iter().all(is_digit) || matches!(secret, b"true" | b"false" | b"null");
    let digits = before.iter().rev().take(MAX_NUMBER_BYTES).take_while(|byte| is_digit(byte)).count();
    let lead = before[..before.len() - digits].trim_ascii_end().last();
    is_name || is_literal && lead.is_some_and(|byte| b":[,".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hidden<const N: usize>(headers: [(&str, &str); N]) -> SecretFilter {
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        SecretFilter::new(&RewardSecrets { secret: None, previous_secret: None, headers })
    }

    fn clean(hidden: &SecretFilter, text: &str) -> String {
        String::from_utf8(hidden.redact_answer(text.as_bytes().to_vec(), Preserved::default)).unwrap()
    }

    #[test]
    fn secrets_are_redacted_everywhere() {
        let secrets = RewardSecrets {
            secret: Some("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=".to_owned()),
            headers: [("authorization", "Bearer sk-12345678"), ("x-version", "1")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
            previous_secret: None,
        };
        let hidden = SecretFilter::new(&secrets);
        assert_eq!(
            clean(&hidden, "no 'Bearer sk-12345678' here, sk-12345678sk-12345678"),
            "no '(redacted)' here, (redacted)(redacted)"
        );
        assert_eq!(clean(&hidden, "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="), "(redacted)");
        assert_eq!(clean(&hidden, "{\"version\": 1}"), "{\"version\": 1}", "what is short stays");
    }

    #[test]
    fn secrets_are_found_however_they_are_escaped() {
        let token = "CANARYab/cd&ef=gh/CANARYij";
        let found = hidden([("x-api-token", token), ("authorization", &format!("Bearer {token}"))]);
        for answer_text in [
            r"CANARYab\/cd&ef=gh\/CANARYij",
            r"CANARYab/cd\u0026ef\u003dgh/CANARYij",
            r"CANARYab\u002Fcd\u0026ef\u003Dgh\u002fCANARYij",
            r"CANARYab\\\/cd\\u0026ef=gh\\\/CANARYij",
            "CANARYab%2Fcd%26ef%3Dgh%2FCANARYij",
            "CANARYab%2fcd%26ef%3dgh%2fCANARYij",
            "CANARYab%2Fcd&ef=gh/CANARYij",
            "CANARYab%252Fcd%2526ef%253Dgh%252FCANARYij",
            "CANARYab/cd&amp;ef=gh/CANARYij",
            "CANARYab&#x2F;cd&amp;amp;ef&#61;gh&#47;CANARYij",
            r"CANARYab\/cd&amp;ef\u003dgh%2fCANARYij",
            r"\x43ANARYab\x2fcd\x26ef\x3dgh/CANARYij",
            "%43%41NARYab/cd&ef=gh/CANARYi%6A",
            r"\u0043ANARYab/cd&ef=gh/CANARYij",
        ] {
            assert_eq!(clean(&found, &format!("no {answer_text}.")), "no (redacted).");
            let bearer = clean(&found, &format!("no Bearer {answer_text}!"));
            assert_eq!(bearer, "no (redacted)!", "{answer_text}");
        }
        for (answer_text, left) in [
            ("a=Bearer+CANARYab%2Fcd%26ef%3Dgh%2FCANARYij&b=1", "a=(redacted)&b=1"),
            ("Bearer%20CANARYab%2Fcd%26ef%3Dgh%2FCANARYij", "(redacted)"),
        ] {
            assert_eq!(clean(&found, answer_text), left);
        }
        // The Base64 form of an access token, or of text such as `user:` followed by the token: redaction may leave a few characters of it.
        for lead in ["", "a", "me:", "Bearer ", "longer: "] {
            for engine in [STANDARD, URL_SAFE] {
                let answer_text = engine.encode(format!("{lead}{token}"));
                let left = clean(&found, &answer_text);
                assert!(left.contains("(redacted)"), "{answer_text} → {left}");
                let left = left.replace("(redacted)", "");
                assert!(left.len() <= lead.len() * 4 / 3 + 6, "{answer_text} → {left}");
            }
        }
    }

    #[test]
    fn redacted_json_stays_valid() {
        let secret = r#"to"ken\with+all%2Fof/it\"#;
        let found = hidden([("x-key", secret), ("x-other", "nabcdefgh")]);
        let answer_text =
            serde_json::json!({"reason": format!("bad: {secret}"), "other": "a\nnabcdefgh", "reward": 0.5});
        let mut nested = answer_text.to_string();
        for _ in 0..3 {
            for text in [nested.clone(), nested.replace('/', "\\/")] {
                let left = clean(&found, &text);
                assert!(serde_json::from_str::<serde_json::Value>(&left).is_ok(), "{text} → {left}");
                assert!(!left.contains("ken") && !left.contains("abcdefgh"), "{text} → {left}");
            }
            nested = serde_json::json!({"detail": nested, "reward": 0.5}).to_string();
        }
        let form = "to%22ken%5Cwith%2Ball%252Fof%2Fit%5C";
        assert_eq!(clean(&found, &format!("?q={form}&r=1")), "?q=(redacted)&r=1");
    }

    #[test]
    fn a_short_secret_is_hidden_and_an_answer_can_still_be_read() {
        let found = hidden([("x-key", "CANARY7"), ("x-year", "2024"), ("x-kind", "reward"), ("x-debug", "true")]);
        for (answer_text, left) in [
            (r#"{"headers":{"x-key":"CANARY7"}}"#, r#"{"headers":{"x-key":"(redacted)"}}"#),
            (r#"{"reason":"bad\nCANARY7"}"#, r#"{"reason":"bad\n(redacted)"}"#),
            ("x-year: '2024', your key is 2024", "x-year: '(redacted)', your key is (redacted)"),
            (r#"{"reward": 0.2024}"#, r#"{"reward": 0.2024}"#),
            (r#"{"reward": 2024, "ok": true}"#, r#"{"reward": 2024, "ok": true}"#),
            (r#"{"sample_id": "01J2024X"}"#, r#"{"sample_id": "01J2024X"}"#),
        ] {
            assert_eq!(clean(&found, answer_text), left);
        }
        let shown = |text: &str| String::from_utf8(found.redact_text(text.as_bytes().to_vec())).unwrap();
        assert_eq!(shown(r#"{"reward": 2024, "xCANARY7x"}"#), r#"{"(redacted)": (redacted), "x(redacted)x"}"#);
    }

    #[test]
    fn numbers_and_keys_are_kept_byte_for_byte() {
        let found = hidden([
            ("x-tenant", "10000000"),
            ("x-kind", "sample_id"),
            ("x-score", "accuracy"),
            ("x-key", "sk-123456789"),
        ]);
        for (answer_text, left) in [
            (r#"{"rewards": [0.10000000149011612, 10000000, -1.10000000e3]}"#, None),
            (
                r#"{"results":[{"sample_id":"s_0", "reward" : 1.50, "metrics": {"accuracy": 1e-2, "10000000": 3}}]}"#,
                None,
            ),
            (
                r#"{"reward": 0.10000000149011612, "reason": "for tenant 10000000 by sk-123456789", "metrics": {"accuracy": "sk-123456789"}}"#,
                Some(
                    r#"{"reward": 0.10000000149011612, "reason": "for tenant (redacted) by (redacted)", "metrics": {"accuracy": "(redacted)"}}"#,
                ),
            ),
            (
                r#"{"reward": NaN, "error": {"code": "sk-123456789"}}"#,
                Some(r#"{"reward": NaN, "error": {"code": "(redacted)"}}"#),
            ),
            ("0.10000000149011612", None),
            (r#"["10000000\\", "\"sk-123456789"]"#, Some(r#"["(redacted)\\", "\"(redacted)"]"#)),
            ("tenant 10000000, reward 0.10000000149", Some("tenant (redacted), reward 0.(redacted)149")),
        ] {
            assert_eq!(clean(&found, answer_text), left.unwrap_or(answer_text));
        }
        let shown = |text: &str| String::from_utf8(found.redact_body(text.as_bytes().to_vec())).unwrap();
        assert_eq!(
            shown(r#"{"reward": 0.10000000149011612, "sk-123456789": "sk-123456789"}"#),
            r#"{"reward": 0.10000000149011612, "(redacted)": "(redacted)"}"#
        );
        assert_eq!(shown("10000000 0.10000000149"), "(redacted) 0.(redacted)149");
    }

    #[test]
    fn words_needed_to_parse_an_answer_are_kept() {
        let found = hidden([("x-a", "s_1000000"), ("x-b", "LABEL_10"), ("x-c", "other-secret")]);
        let preserved =
            Preserved { words: vec!["s_1000000".to_owned(), "LABEL_10".to_owned()], json_in_strings: false };
        let answer_text =
            r#"[{"sample_id": "s_100000\u0030", "label": "LABEL_10", "reason": "s_1000000 other-secret"}]"#;
        let left = r#"[{"sample_id": "s_100000\u0030", "label": "LABEL_10", "reason": "(redacted) (redacted)"}]"#;
        assert_eq!(
            String::from_utf8(found.redact_answer(answer_text.as_bytes().to_vec(), || preserved)).unwrap(),
            left
        );
    }

    #[test]
    fn json_that_is_read_inside_a_string_keeps_its_numbers() {
        let found = hidden([("x-tenant", "10000000"), ("authorization", "Bearer sk-123456789")]);
        let preserved = Preserved { words: Vec::new(), json_in_strings: true };
        let content = "I know 10000000.\n```json\n{\"reasoning\": \"sk-123456789 said \\\"10000000\\\"\", \"score\": 4.10000000149}\n```";
        let answer_text = serde_json::json!({"choices": [{"message": {"content": content}}], "usage": 10000000});
        let clean = found.redact_answer(answer_text.to_string().into_bytes(), || preserved);
        let clean: serde_json::Value = serde_json::from_slice(&clean).unwrap();
        assert_eq!(clean["usage"], 10000000);
        assert_eq!(
            clean["choices"][0]["message"]["content"],
            "I know (redacted).\n```json\n{\"reasoning\": \"(redacted) said \\\"(redacted)\\\"\", \"score\": 4.10000000149}\n```"
        );
    }

    #[test]
    fn the_parts_of_basic_are_secrets_and_the_scheme_is_none() {
        let found = hidden([("authorization", &format!("Basic {}", STANDARD.encode("me:pass/word")))]);
        for answer_text in ["me:pass/word", r"pass\/word", "Basic bWU6cGFzcy93b3Jk", "bWU6cGFzcy93b3Jk"] {
            let left = clean(&found, &format!("no {answer_text}."));
            assert!(
                left.contains("(redacted)") && !left.contains("pass") && !left.contains("cGFz"),
                "{answer_text} → {left}"
            );
        }
        assert_eq!(clean(&found, "use Basic or Bearer"), "use Basic or Bearer");
    }

    #[test]
    fn long_texts_of_escapes_take_little_time() {
        let found = hidden([("x-key", &"\\".repeat(200)), ("x-other", &"%25".repeat(100))]);
        let begun = std::time::Instant::now();
        for text in ["\\".repeat(1 << 20), "%25".repeat(1 << 18), "+".repeat(1 << 20), "&amp;".repeat(1 << 18)] {
            found.redact_answer(text.clone().into_bytes(), Preserved::default);
            found.redact_answer(serde_json::json!([text]).to_string().into_bytes(), Preserved::default);
        }
        assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
    }
}
