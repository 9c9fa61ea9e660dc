//! Late answers of reward services and environments: the address they are sent to, the token that authorizes them, and how they are parsed.
//! This module has only types and rules: `http` receives the answers, `store` keeps them, `worker` fetches them and
//! `reward` waits for them.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::Sha256;

/// Maximum number of errors that are reported for one body.
const MAX_FLAWS: usize = 100;

/// Base URL to which reward services may send late answers, and the key from which their tokens are derived.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallbackTerms {
    /// The server's public address, without a trailing slash; null = callbacks are not offered to services.
    pub public_url: Option<String>,
    /// The server's secret key. Tokens are derived from it, so they do not have to be stored.
    pub key: String,
}

impl std::fmt::Debug for CallbackTerms {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallbackTerms").field("public_url", &self.public_url).finish_non_exhaustive()
    }
}

impl CallbackTerms {
    /// Returns the URL to which an environment must send its answer to the question `id`.
    pub fn environment_address(&self, id: &str) -> Option<String> {
        self.public_url.as_ref().map(|url| format!("{url}/environment-callbacks/{id}"))
    }

    /// Returns the URL to which the answer to the request `id` must be sent.
    pub fn address(&self, id: &str) -> Option<String> {
        self.public_url.as_ref().map(|url| format!("{url}/reward-callbacks/{id}"))
    }

    /// Returns the URL of an image of a job's dataset, which is valid for seven to eight days. It is the same all day.
    pub fn image_url(&self, job: &str, sha256: &str, now_s: i64) -> Option<String> {
        const DAY_S: i64 = 86_400;
        let expires = (now_s / DAY_S).saturating_add(8).saturating_mul(DAY_S);
        let token = self.image_token(job, sha256, expires);
        self.public_url
            .as_ref()
            .map(|url| format!("{url}/reward-images/{job}/{sha256}?expires={expires}&token={token}"))
    }

    /// Returns the token of an image's URL that is valid until `expires`, Unix time in seconds.
    pub fn image_token(&self, job: &str, sha256: &str, expires: i64) -> String {
        self.mac(&["reward-image", job, sha256, &expires.to_string()])
    }

    /// Returns the token that the answer must carry. It is always the same for the same request id.
    pub fn token(&self, id: &str) -> String {
        self.mac(&["reward-callback", id])
    }

    /// Returns the HMAC of the parts, joined by dots, which ids and digests do not have.
    fn mac(&self, parts: &[&str]) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.key.as_bytes()).expect("HMAC takes keys of any length");
        mac.update(parts.join(".").as_bytes());
        URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes())
    }
}

/// A request whose answer may come later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Later {
    /// Time until the request's deadline, in milliseconds.
    pub left_ms: u64,
    /// Ids of the samples in the request. For a question to an environment the name of its answer, `env.reset` or `env.step`.
    pub sample_ids: Vec<String>,
    /// Set once the service has accepted the request or has sent results. The request then need not be sent again.
    #[serde(default)]
    pub accepted: Option<Accepted>,
}

/// A service has accepted a request and will answer later (status 202).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// URL of the results, as given by the service; null = none.
    #[serde(default)]
    pub status_url: Option<String>,
    /// Time until the service expects to be done, in milliseconds after the 202; null = unknown.
    #[serde(default)]
    pub eta_ms: Option<u64>,
}

/// A part of a service's late answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// Entries in the order in which they were given. A sample id can occur twice.
    pub entries: Vec<Entry>,
    /// Whether this is the last part of the answer.
    pub done: bool,
}

/// A service's result for one sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Id of the sample, as in the request.
    pub sample_id: String,
    /// The whole result `{sample_id, reward, …}` as JSON.
    pub result: String,
}

/// An error in a part of a service's late answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// JSON pointer to the error.
    pub pointer: String,
    /// Stable error code in snake_case.
    pub code: &'static str,
    /// Explanation of the error, and how to fix it.
    pub detail: String,
}

impl Chunk {
    /// Parses a callback's body for the request `id`.
    ///
    /// # Errors
    /// Returns all errors, at most 100. Nothing of a body with errors is stored.
    pub fn read(body: &[u8], id: &str) -> Result<Self, Vec<Flaw>> {
        let mut flaws = Flaws::default();
        let value = parse(body).map_err(|why| vec![flaw("", "syntax", format!("the body is not JSON: {why}"))])?;
        let Value::Object(body) = value else {
            let detail = format!("the body must be an object {{results, done}}, not {}", name(&value));
            return Err(vec![flaw("", "invalid_type", detail)]);
        };
        match body.get("id") {
            None | Some(Value::Null) => {}
            Some(Value::String(given)) if given == id => {}
            Some(_) => flaws.push(
                "/id",
                "invalid_value",
                format!("the body is for another request: this is the callback address of {id}"),
            ),
        }
        let done = match body.get("done") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(done)) => *done,
            Some(other) => {
                flaws.push(
                    "/done",
                    "invalid_type",
                    format!("the field 'done' must be true or false, not {}", name(other)),
                );
                false
            }
        };
        let mut entries = Vec::new();
        match body.get("results") {
            Some(Value::Array(results)) => {
                for (index, result) in results.iter().enumerate() {
                    entries.extend(read_entry(result, &format!("/results/{index}"), &mut flaws));
                }
            }
            Some(other) => flaws.push("/results", "invalid_type", format!("must be a list, not {}", name(other))),
            None if done => {}
            None => {
                let detail = "give the results as a list of {sample_id, reward}; the short forms of a synchronous answer have no sample ids";
                flaws.push("/results", "required", detail.to_owned());
            }
        }
        if flaws.0.is_empty() { Ok(Self { entries, done }) } else { Err(flaws.0) }
    }
}

fn read_entry(value: &Value, pointer: &str, flaws: &mut Flaws) -> Option<Entry> {
    let Value::Object(entry) = value else {
        let detail = format!("a result must be an object with sample_id and reward, not {}", name(value));
        flaws.push(pointer, "invalid_type", detail);
        return None;
    };
    check_value(entry, pointer, flaws);
    match entry.get("sample_id") {
        Some(Value::String(sample_id)) => {
            Some(Entry { sample_id: sample_id.clone(), result: Value::Object(entry.clone()).to_string() })
        }
        Some(other) => {
            let detail = format!("the sample's id must be a string as in the request, not {}", name(other));
            flaws.push(&format!("{pointer}/sample_id"), "invalid_type", detail);
            None
        }
        None => {
            flaws.push(
                &format!("{pointer}/sample_id"),
                "required",
                "give the sample's id as it was in the reward request".to_owned(),
            );
            None
        }
    }
}

/// Checks that a result has an error, or a `reward` that is a finite number or null.
fn check_value(entry: &Map<String, Value>, pointer: &str, flaws: &mut Flaws) {
    match entry.get("error") {
        None | Some(Value::Null) => {}
        Some(Value::Object(_) | Value::String(_)) => return,
        Some(other) => {
            let detail =
                format!("the error of a result must be an object {{code, message, retryable}}, not {}", name(other));
            return flaws.push(&format!("{pointer}/error"), "invalid_type", detail);
        }
    }
    let at = format!("{pointer}/reward");
    match entry.get("reward") {
        Some(Value::Null) => {}
        Some(Value::Number(number)) if number.as_f64().is_some_and(f64::is_finite) => {}
        Some(Value::String(text)) => {
            let text: String = text.chars().take(40).collect();
            flaws.push(&at, "invalid_value", format!("must be a finite number or null, not \"{text}\""));
        }
        Some(other) => {
            flaws.push(&at, "invalid_value", format!("must be a finite number or null, not {}", name(other)))
        }
        None => flaws.push(
            &at,
            "required",
            "the reward must be a finite number, null (does not apply), or an error".to_owned(),
        ),
    }
}

#[derive(Default)]
struct Flaws(Vec<Flaw>);

impl Flaws {
    fn push(&mut self, pointer: &str, code: &'static str, detail: String) {
        if self.0.len() < MAX_FLAWS {
            self.0.push(flaw(pointer, code, detail));
        }
    }
}

fn flaw(pointer: &str, code: &'static str, detail: String) -> Flaw {
    Flaw { pointer: pointer.to_owned(), code, detail }
}

/// Names the JSON type of a value for an error message.
pub fn name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Parses JSON. If its only errors are numbers that JSON does not have (NaN, Infinity, 1e999, as Python's `json` writes them), they
/// become strings, so that the error can name their index and the other samples keep their values.
///
/// # Errors
/// Returns why a service's answer is not JSON, and its first characters.
pub fn parse(body: &[u8]) -> Result<Value, String> {
    let text = std::str::from_utf8(body).map_err(|_| "the answer is not UTF-8".to_owned())?;
    let text = text.trim_start_matches('\u{feff}');
    serde_json::from_str(text).or_else(|why| serde_json::from_str(&quote_non_finite(text)).map_err(|_| why)).map_err(
        |why| {
            let start: String = text.trim_start().chars().take(60).collect();
            format!("the answer is not JSON ({why}); it begins with: {start}")
        },
    )
}

fn quote_non_finite(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 16);
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' => string_length(rest),
            _ if is_word(first) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            _ => first.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        if is_word(first) && token.parse::<f64>().is_ok_and(|number| !number.is_finite()) {
            quoted.push_str(&format!("\"{token}\""));
        } else {
            quoted.push_str(token);
        }
        rest = after;
    }
    quoted
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.')
}

/// Returns the length in bytes of the JSON string at the beginning of `text`, including its quotes.
fn string_length(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flaws(body: &str) -> Vec<String> {
        let flaws = Chunk::read(body.as_bytes(), "rwr_1").unwrap_err();
        flaws.into_iter().map(|flaw| format!("{} {}", flaw.pointer, flaw.code)).collect()
    }

    #[test]
    fn a_token_belongs_to_one_request_of_one_server() {
        let terms = |key: &str| CallbackTerms { public_url: Some("https://r.example".into()), key: key.into() };
        assert_eq!(terms("k").token("rwr_1"), terms("k").token("rwr_1"));
        assert_ne!(terms("k").token("rwr_1"), terms("k").token("rwr_2"));
        assert_ne!(terms("k").token("rwr_1"), terms("l").token("rwr_1"));
        assert_eq!(terms("k").token("rwr_1").len(), 43);
        assert_eq!(terms("k").address("rwr_1").unwrap(), "https://r.example/reward-callbacks/rwr_1");
        assert!(!format!("{:?}", terms("hidden")).contains("hidden"));
    }

    #[test]
    fn a_chunk_has_results_or_is_marked_as_the_last() {
        let read = |body: &str| Chunk::read(body.as_bytes(), "rwr_1").unwrap();
        let chunk = read(r#"{"id": "rwr_1", "results": [{"sample_id": "s_1", "reward": 0.1, "reason": "so"}]}"#);
        assert_eq!(chunk.entries[0].result, r#"{"sample_id":"s_1","reward":0.1,"reason":"so"}"#);
        assert!(!chunk.done);
        assert_eq!(read(r#"{"done": true}"#), Chunk { entries: Vec::new(), done: true });
        let error = r#"{"results": [{"sample_id": "s_1", "reward": null, "error": {"code": "busy", "retryable": true}}, {"sample_id": "s_2", "reward": null}]}"#;
        assert_eq!(read(error).entries.len(), 2);
    }

    #[test]
    fn every_error_has_its_pointer() {
        assert_eq!(flaws("nonsense"), [" syntax"]);
        assert_eq!(flaws("[1, 2]"), [" invalid_type"]);
        assert_eq!(flaws("{}"), ["/results required"]);
        assert_eq!(flaws(r#"{"rewards": [1, 2]}"#), ["/results required"]);
        assert_eq!(
            flaws(r#"{"results": {}, "done": 1, "id": "rwr_2"}"#),
            ["/id invalid_value", "/done invalid_type", "/results invalid_type"]
        );
        let entries = r#"{"results": [{"sample_id": "a", "reward": NaN}, {"sample_id": "b", "reward": 1e999}, {"sample_id": "c"},
            {"reward": 1}, {"sample_id": 1, "reward": 1}, 0.5, {"sample_id": "d", "error": 7}, {"sample_id": "e", "reward": "1"}]}"#;
        assert_eq!(
            flaws(entries),
            [
                "/results/0/reward invalid_value",
                "/results/1/reward invalid_value",
                "/results/2/reward required",
                "/results/3/sample_id required",
                "/results/4/sample_id invalid_type",
                "/results/5 invalid_type",
                "/results/6/error invalid_type",
                "/results/7/reward invalid_value"
            ]
        );
    }
}
