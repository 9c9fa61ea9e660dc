//! The fields of requests: read, checked, and turned into a request for a serving process. Fields that would change the answer
//! and are not supported are refused; others that rlood does not know are ignored and named in a header.

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::Facts;
use crate::http::error::{Code, Problem, shortened};
use crate::openai::{SamplingFields, TextOrList};
use crate::serving::ServedRequest;

/// Names the fields of the request that were ignored because rlood does not know them.
const X_RLOOD_IGNORED: HeaderName = HeaderName::from_static("x-rlood-ignored");
/// Fields that do not change the answer.
const WITHOUT_EFFECT: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
    "reasoning_effort",
    "moderation",
    "prediction",
    "parallel_tool_calls",
    "tool_choice",
    "tools",
    "functions",
    "function_call",
    "response_format",
    "audio",
    "modalities",
    "web_search_options",
    "best_of",
    "suffix",
];
/// Maximum number of answers to a prompt.
const MAX_ANSWERS: u32 = 8;
/// Maximum number of stop strings.
const MAX_STOPS: usize = 16;
/// Maximum number of most probable tokens that are sent for each token.
pub(super) const MAX_TOP: u32 = 20;

/// A request's fields, and the names of those that are ignored.
#[derive(Debug)]
pub(super) struct Fields<T> {
    pub own: T,
    pub sampling: SamplingFields,
    ignored: Vec<String>,
}

/// An error in a field.
pub(super) fn invalid(field: &str, code: &str, detail: impl Into<String>) -> Problem {
    let detail = detail.into();
    Problem::new(Code::InvalidBody, detail.clone()).item(format!("/{field}"), code, detail)
}

impl<T: DeserializeOwned> Fields<T> {
    /// Reads a body. `names` are the fields of `T`.
    ///
    /// # Errors
    /// Fails at the first field that has the wrong type, or asks for something that is not supported.
    pub(super) fn read(body: &Map<String, Value>, names: &[&str]) -> Result<Self, Problem> {
        refuse(body, names)?;
        let value = Value::Object(body.clone());
        let own = of_value(&value)?;
        let sampling = of_value(&value)?;
        let is_known = |name: &str| {
            names.contains(&name) || SamplingFields::NAMES.contains(&name) || WITHOUT_EFFECT.contains(&name)
        };
        let ignored = body.iter().filter(|(name, value)| !is_known(name) && !value.is_null());
        let ignored = ignored.map(|(name, _)| name.clone()).collect();
        Ok(Self { own, sampling, ignored })
    }
}

impl<T> Fields<T> {
    /// Adds the header that names the ignored fields.
    pub(super) fn mark(&self, response: &mut Response) {
        let name = |name: &String| shortened(&name.replace(|c: char| !c.is_ascii_graphic() || c == ',', "?"));
        let names: Vec<String> = self.ignored.iter().take(50).map(name).collect();
        if let Ok(value) = HeaderValue::from_str(&names.join(", "))
            && !names.is_empty()
        {
            response.headers_mut().insert(X_RLOOD_IGNORED, value);
        }
    }
}

/// Reads a value; the error names the field.
pub(super) fn of_value<T: DeserializeOwned>(value: &Value) -> Result<T, Problem> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { String::new() } else { path.replace(['.', '['], "/").replace(']', "") };
        let inner = error.into_inner().to_string();
        // A missing field is named by serde, since its path is that of the whole body.
        let missing = inner.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        match missing {
            Some(name) if field.is_empty() => invalid(name, "missing", format!("the field '{name}' is required")),
            _ => invalid(&field, "invalid_type", format!("{}: {}", field.replace('/', "."), shortened(&inner))),
        }
    })
}

/// Refuses fields that would change the answer and are not supported.
fn refuse(body: &Map<String, Value>, names: &[&str]) -> Result<(), Problem> {
    let unsupported = |field: &str, detail: &str| Err(invalid(field, "unsupported_value", detail));
    let given = |name: &str| body.get(name).filter(|value| !value.is_null());
    let is_empty = |value: &Value| match value {
        Value::Array(items) => items.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(on) => !on,
        Value::Null => true,
        Value::Number(_) => false,
    };
    let uses = |name: &str| given(name).is_some_and(|value| !is_empty(value));
    let choice = given("tool_choice");
    if uses("tools") && !names.contains(&"tools") && choice.and_then(Value::as_str) != Some("none") {
        return unsupported("tools", "tools need a chat: use /v1/chat/completions");
    }
    if uses("tools") && choice.is_some_and(|choice| !matches!(choice.as_str(), Some("auto" | "none"))) {
        let detail = "tool_choice must be 'auto' or 'none': the model cannot be forced to call a tool";
        return unsupported("tool_choice", detail);
    }
    for name in ["functions", "audio", "web_search_options", "suffix"] {
        if uses(name) {
            return unsupported(name, &format!("the field '{name}' is not supported: leave it out"));
        }
    }
    let modalities = given("modalities").and_then(Value::as_array);
    if modalities.is_some_and(|modalities| modalities.iter().any(|kind| kind.as_str() != Some("text"))) {
        return unsupported("modalities", "only the modality 'text' is supported");
    }
    let format = given("response_format").map(|format| format.get("type").and_then(Value::as_str));
    if format.is_some_and(|kind| kind != Some("text")) {
        let detail = "only the response format 'text' is supported: ask for JSON in the prompt, and parse the text";
        return unsupported("response_format", detail);
    }
    let constrained = body.iter().find(|(name, value)| {
        !is_empty(value) && (name.starts_with("guided_") || matches!(name.as_str(), "structured_outputs" | "grammar"))
    });
    if let Some((name, _)) = constrained {
        return unsupported(name, &format!("constrained decoding ('{name}') is not supported: leave the field out"));
    }
    if uses("use_beam_search") {
        return unsupported("use_beam_search", "beam search is not supported: leave the field out");
    }
    let number = |name: &str| given(name).and_then(Value::as_u64);
    if number("best_of").is_some_and(|best| best > number("n").unwrap_or(1)) {
        return unsupported("best_of", "best_of above n is not supported: sample n answers, and choose among them");
    }
    Ok(())
}

/// A number within bounds, or its default.
fn bounded(field: &str, given: Option<f64>, default: f64, least: f64, most: f64) -> Result<f64, Problem> {
    match given {
        None => Ok(default),
        Some(value) if value >= least && value <= most => Ok(value),
        Some(value) => {
            Err(invalid(field, "out_of_range", format!("{field} is {value}: must be from {least} to {most}")))
        }
    }
}

/// The request for a prompt: its ids, and the settings of the fields. `max_tokens` and log-probs are the caller's.
///
/// # Errors
/// Fails at the first field that is out of range.
pub(super) fn request(sampling: &SamplingFields, facts: &Facts) -> Result<ServedRequest, Problem> {
    let SamplingFields { n, stop, top_k, logit_bias, seed, .. } = sampling;
    let num_choices = n.unwrap_or(1);
    if !(1..=MAX_ANSWERS).contains(&num_choices) {
        return Err(invalid("n", "out_of_range", format!("n is {num_choices}: must be from 1 to {MAX_ANSWERS}")));
    }
    let stop = match stop {
        None => Vec::new(),
        Some(TextOrList::One(stop)) => vec![stop.clone()],
        Some(TextOrList::Several(stops)) => stops.clone(),
    };
    if stop.len() > MAX_STOPS || stop.iter().any(String::is_empty) {
        let detail = format!("stop has {} strings: must be at most {MAX_STOPS}, none of them empty", stop.len());
        return Err(invalid("stop", "invalid", detail));
    }
    let top_k = match top_k {
        None | Some(-1 | 0) => 0,
        Some(k) => u32::try_from(*k).map_err(|_| {
            invalid("top_k", "out_of_range", format!("top_k is {k}: must be at least 1, or 0 or -1 for off"))
        })?,
    };
    let vocab_size = facts.card.config.vocab_size;
    let mut biases = Vec::new();
    for (token, bias) in logit_bias.iter().flatten() {
        let field = format!("logit_bias/{token}");
        let id: u32 = token.parse().ok().filter(|id| (*id as usize) < vocab_size).ok_or_else(|| {
            let detail = format!("'{}' is not a token id: must be a number below {vocab_size}", shortened(token));
            invalid(&field, "invalid_token", detail)
        })?;
        biases.push((id, bounded(&field, Some(*bias), 0.0, -100.0, 100.0)? as f32));
    }
    let top_p = bounded("top_p", sampling.top_p, 1.0, 0.0, 1.0)?;
    let penalty = bounded("repetition_penalty", sampling.repetition_penalty, 1.0, 0.0, 100.0)?;
    if penalty == 0.0 {
        return Err(invalid("repetition_penalty", "out_of_range", "repetition_penalty is 0: must be above 0"));
    }
    Ok(ServedRequest {
        num_choices,
        temperature: bounded("temperature", sampling.temperature, 1.0, 0.0, 2.0)?,
        // With 0, only the most probable token is left.
        top_p: top_p.max(f64::MIN_POSITIVE),
        top_k,
        min_p: bounded("min_p", sampling.min_p, 0.0, 0.0, 1.0)?,
        repetition_penalty: penalty,
        presence_penalty: bounded("presence_penalty", sampling.presence_penalty, 0.0, -2.0, 2.0)?,
        frequency_penalty: bounded("frequency_penalty", sampling.frequency_penalty, 0.0, -2.0, 2.0)?,
        logit_bias: biases,
        // Any number may be a seed, also a negative one.
        seed: seed.map_or_else(random_seed, i64::cast_unsigned),
        stop,
        keeps_stop: sampling.include_stop_str_in_output.unwrap_or(false),
        ignores_eos: sampling.ignore_eos.unwrap_or(false),
        shows_special: !sampling.skip_special_tokens.unwrap_or(true),
        stream: sampling.stream.unwrap_or(false),
        ..ServedRequest::default()
    })
}

/// A seed for a request without one.
fn random_seed() -> u64 {
    ulid::Ulid::generate().random() as u64
}

/// Fails if an id is not one of the model's.
pub(super) fn check_ids(field: &str, ids: &[u32], facts: &Facts) -> Result<(), Problem> {
    let vocab_size = facts.card.config.vocab_size;
    match ids.iter().find(|id| **id as usize >= vocab_size) {
        None => Ok(()),
        Some(id) => {
            let detail = format!("token id {id} is not below the model's vocab_size {vocab_size}");
            Err(invalid(field, "invalid_token", detail))
        }
    }
}

/// Checks the tokens of a prompt, and limits those of the answer to the model's context.
///
/// # Errors
/// Fails if the prompt is empty, has unknown ids, or leaves no room for `wanted` tokens.
pub(super) fn fit(
    ids: &[u32],
    (field, wanted): (&str, Option<u64>),
    default: u64,
    facts: &Facts,
) -> Result<u32, Problem> {
    let context = facts.card.max_position_embeddings as u64;
    if ids.is_empty() {
        return Err(invalid("prompt", "empty_prompt", "the prompt has no tokens: write some text"));
    }
    check_ids("prompt", ids, facts)?;
    let length = ids.len() as u64;
    let room = context.saturating_sub(length);
    let too_long = |detail: String| {
        let field = if wanted.is_some() && length < context { field } else { "messages" };
        Err(invalid(field, "context_length_exceeded", detail))
    };
    let most = match wanted {
        Some(most) if most > room => {
            return too_long(format!(
                "this model's maximum context length is {context} tokens, but the prompt has {length} and {field} is {most}: shorten the prompt, or lower {field} to at most {room}"
            ));
        }
        Some(most) => most,
        None if room == 0 => {
            return too_long(format!(
                "this model's maximum context length is {context} tokens, but the prompt has {length}: shorten the prompt"
            ));
        }
        None => default.min(room),
    };
    Ok(u32::try_from(most).unwrap_or(u32::MAX))
}
