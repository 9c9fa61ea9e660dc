//! Parses score requests in both formats (reward contract v1 and OpenRLHF) and computes their answers.

use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error_text::with_causes;
use crate::reward_model::{Conversation, Scorer};

/// Why a score request is refused.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) code: &'static str,
    pub(super) detail: String,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, code: &'static str, detail: impl Into<String>) -> Self {
        Self { status, code, detail: detail.into() }
    }
}

/// A parsed request with samples to score.
#[derive(Debug)]
pub(super) enum Asked {
    /// A request of the reward contract v1.
    Contract { id: Option<String>, samples: Vec<Sample> },
    /// A request in OpenRLHF's format; the answer has one number per query.
    OpenRlhf(Vec<Sample>),
}

/// A sample of a reward contract request; its other fields are ignored.
#[derive(Debug, Deserialize)]
pub(super) struct Sample {
    sample_id: String,
    messages: Option<Vec<Value>>,
    prompt: Option<String>,
    completion: String,
}

#[derive(Deserialize)]
struct ContractRequest {
    version: String,
    id: Option<String>,
    samples: Vec<Sample>,
}

/// A request in OpenRLHF's format: `{query: [prompt + completion], prompts, labels}`.
#[derive(Deserialize)]
struct OpenRlhfRequest {
    query: Texts,
    #[serde(default)]
    prompts: Vec<Option<String>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Several(Vec<String>),
}

/// Parses a score request; None = the request is a ping, without samples.
pub(super) fn read(body: &Value, max_samples: usize) -> Result<Option<Asked>, Refusal> {
    let asked = match body.get("type").map(|kind| (kind, kind.as_str())) {
        Some((_, Some("reward.ping"))) => return Ok(None),
        Some((_, Some("reward.score.request"))) => read_contract(body)?,
        Some((kind, _)) => {
            let detail =
                format!("the request has the unknown type {kind}: must be reward.score.request or reward.ping");
            return Err(unprocessable("unknown_type", detail));
        }
        None if body.get("query").is_some() => read_openrlhf(body)?,
        None => {
            let detail = "neither a reward.score.request of the reward contract v1 (no 'type') nor OpenRLHF's form (no \
                          'query')";
            return Err(unprocessable("unknown_form", detail));
        }
    };
    let count = match &asked {
        Asked::Contract { samples, .. } | Asked::OpenRlhf(samples) => samples.len(),
    };
    if count > max_samples {
        let detail = format!("{count} samples, but at most {max_samples} are allowed in one request");
        return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "too_many_samples", detail));
    }
    Ok(Some(asked))
}

fn unprocessable(code: &'static str, detail: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, code, detail)
}

fn parsed<'b, T: Deserialize<'b>>(body: &'b Value) -> Result<T, Refusal> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        let at = error.path().to_string();
        unprocessable("invalid_body", format!("{at}: {}", error.into_inner()))
    })
}

fn read_contract(body: &Value) -> Result<Asked, Refusal> {
    let ContractRequest { version, id, samples } = parsed(body)?;
    if version != "1" {
        return Err(unprocessable(
            "unknown_version",
            format!("unknown version '{version}' of the contract: must be 1"),
        ));
    }
    if let Some(sample) = samples.iter().find(|sample| sample.prompt.is_none() && sample.messages.is_none()) {
        let detail = format!("sample '{}' has neither prompt nor messages", sample.sample_id);
        return Err(unprocessable("invalid_body", detail));
    }
    Ok(Asked::Contract { id, samples })
}

fn read_openrlhf(body: &Value) -> Result<Asked, Refusal> {
    let OpenRlhfRequest { query, prompts } = parsed(body)?;
    let queries = match query {
        Texts::One(query) => vec![query],
        Texts::Several(queries) => queries,
    };
    if !prompts.is_empty() && prompts.len() != queries.len() {
        let detail = format!("{} prompts for {} queries", prompts.len(), queries.len());
        return Err(unprocessable("invalid_body", detail));
    }
    let mut prompts = prompts.into_iter();
    let samples = queries.into_iter().enumerate().map(|(index, query)| {
        // A query in OpenRLHF's format is prompt + completion. If it does not begin with the given prompt, the whole query is
        // scored as one text.
        let prompt = prompts.next().flatten().filter(|prompt| query.starts_with(prompt)).unwrap_or_default();
        let completion = query[prompt.len()..].to_owned();
        Sample { sample_id: format!("query {index}"), messages: None, prompt: Some(prompt), completion }
    });
    Ok(Asked::OpenRlhf(samples.collect()))
}

/// Returns the answer to `reward.ping`: the capabilities of this server.
pub(super) fn pong(max_samples: usize) -> Value {
    json!({"max_batch_samples": max_samples, "modes": ["sync"]})
}

/// Scores the samples of a request. Blocking.
pub(super) fn answer(asked: &Asked, scorer: &Scorer) -> Result<Value, Refusal> {
    let samples = match asked {
        Asked::Contract { samples, .. } | Asked::OpenRlhf(samples) => samples,
    };
    let conversations: Vec<Conversation<'_>> = samples
        .iter()
        .map(|sample| Conversation {
            messages: sample.messages.as_deref(),
            prompt: sample.prompt.as_deref().unwrap_or_default(),
            completion: &sample.completion,
        })
        .collect();
    let scored = scorer.score(&conversations).map_err(|error| {
        let detail = with_causes(&error);
        tracing::error!(detail, "scoring failed");
        Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "model_failed", detail)
    })?;
    let scored = samples.iter().zip(scored);
    match asked {
        Asked::Contract { id, .. } => {
            let results = scored.map(|(sample, scored)| match scored {
                Ok(scored) => {
                    json!({"sample_id": sample.sample_id, "reward": scored.reward, "metrics": scored.metrics()})
                }
                Err(error) => json!({
                    "sample_id": sample.sample_id, "reward": null, "reason": with_causes(&error),
                    "error": {"code": "not_scorable", "retryable": false},
                }),
            });
            Ok(json!({"version": "1", "id": id, "results": results.collect::<Vec<Value>>()}))
        }
        Asked::OpenRlhf(_) => {
            let rewards = scored.map(|(sample, scored)| {
                scored.map(|scored| scored.reward).map_err(|error| {
                    unprocessable("not_scorable", format!("{}: {}", sample.sample_id, with_causes(&error)))
                })
            });
            Ok(json!({"rewards": rewards.collect::<Result<Vec<f64>, Refusal>>()?}))
        }
    }
}
