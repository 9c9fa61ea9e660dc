//! Asks a server with OpenAI's API for the log-probabilities of given tokens, in whichever way the server can.
//!
//! | way | servers |
//! |---|---|
//! | `prompt_logprobs` | vLLM |
//! | `echo` with `logprobs` | rlood, and others whose `/v1/completions` has both |
//! | one token at a time, which `logit_bias` forces | llama.cpp, which ignores `echo` |
//! | the greedy continuation of the prompt's text, with `logprobs` | servers that take no token ids |

use std::time::Duration;

use rlood_client::{Client, Error};
use rlood_types::certificate::{Asked, Certificate, CertifiedPrompt, Measured};
use serde_json::{Value, json};

use crate::error::CliError;

/// Extra time that a server has for an answer: it may have to load the model first.
const WORK: Duration = Duration::from_secs(240);
/// Bias that makes a token certain.
const FORCE: f64 = 100.0;

/// A model of a server.
pub struct Asker<'a> {
    /// Client whose address ends in `/v1`.
    pub api: &'a Client,
    /// Client of the address without `/v1`, where `/tokenize` is.
    pub root: &'a Client,
    /// Name of the model at the server.
    pub model: &'a str,
}

/// The tokens that a server makes of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tokens {
    /// The ids of the tokens.
    Ids(Vec<u32>),
    /// Only the number of the tokens.
    Count(u64),
    /// The server does not say.
    Unknown,
}

impl Tokens {
    /// Whether these may be the tokens with these ids.
    pub fn may_be(&self, ids: &[u32]) -> bool {
        match self {
            Tokens::Ids(found) => found == ids,
            Tokens::Count(count) => *count == ids.len() as u64,
            Tokens::Unknown => true,
        }
    }
}

impl Asker<'_> {
    /// Asks for the log-probabilities of all prompts of a certificate, the same way for each.
    ///
    /// # Errors
    /// Fails when the server cannot be reached, does not know the model, or gives no log-probabilities in any way.
    pub async fn measure(&self, certificate: &Certificate) -> Result<(Asked, Vec<Measured>), CliError> {
        let mut refusals = Vec::new();
        for way in [Asked::PromptLogprobs, Asked::Echo, Asked::ForcedTokens, Asked::SampledTokens] {
            let mut measured: Vec<Measured> = Vec::new();
            for prompt in &certificate.prompts {
                match self.one(way, prompt).await {
                    Ok(Some(logps)) => measured.push(logps),
                    Ok(None) if measured.is_empty() => break,
                    Ok(None) => measured.push(Vec::new()),
                    // Another way may need less of the server. A missing model or key ends all of them.
                    Err(Error::Refused { problem, .. }) if !matches!(problem.status, 401 | 403 | 404 | 429) => {
                        refusals.push(problem.detail.clone());
                        break;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            if measured.len() == certificate.prompts.len() {
                return Ok((way, measured));
            }
        }
        refusals.dedup();
        let mut text = "the server gives no log-probabilities of given tokens: it must have /v1/completions with prompt_logprobs, echo, or logit_bias and logprobs".to_owned();
        for refusal in refusals {
            text.push_str(&format!("\n  the server says: {}", refusal.trim()));
        }
        Err(CliError::Failed(text))
    }

    /// Asks for one prompt; None if the server does not answer what was asked.
    async fn one(&self, way: Asked, prompt: &CertifiedPrompt) -> Result<Option<Measured>, Error> {
        let ids = prompt.ids();
        match way {
            Asked::PromptLogprobs => {
                let choice = self.complete(json!({"prompt": ids, "prompt_logprobs": 0})).await?;
                Ok(of_prompt_logprobs(&choice["prompt_logprobs"], &ids))
            }
            Asked::Echo => {
                let choice = self.complete(json!({"prompt": ids, "echo": true, "logprobs": 1})).await?;
                Ok(of_echo(&choice["logprobs"], ids.len()))
            }
            Asked::ForcedTokens => self.forced(&ids).await,
            Asked::SampledTokens => {
                let asked = json!({"prompt": prompt.text, "max_tokens": prompt.continuation.len(), "logprobs": 5});
                Ok(of_sampled(&self.complete(asked).await?, prompt))
            }
            Asked::Files => Ok(None),
        }
    }

    /// Asks for each token with the tokens before it as the prompt.
    async fn forced(&self, ids: &[u32]) -> Result<Option<Measured>, Error> {
        let mut measured = Vec::with_capacity(ids.len());
        for (index, id) in ids.iter().enumerate().skip(1) {
            let before = ids.get(..index).unwrap_or_default();
            let bias = json!({id.to_string(): FORCE});
            let choice = self.complete(json!({"prompt": before, "logit_bias": bias, "logprobs": 1})).await?;
            measured.push(of_forced(&choice, *id));
        }
        Ok(measured.iter().any(Option::is_some).then_some(measured))
    }

    /// Sends a request for one greedy token, unless `more` says otherwise, and returns the first choice.
    async fn complete(&self, more: Value) -> Result<Value, Error> {
        Ok(self.completion(more).await?["choices"][0].take())
    }

    async fn completion(&self, more: Value) -> Result<Value, Error> {
        let mut body = json!({
            "model": self.model, "max_tokens": 1, "temperature": 0, "top_p": 1, "seed": 0,
            "return_token_ids": true,
        });
        if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
            body.extend(more);
        }
        Ok(self.api.raw_ask(&["completions"]).body(&body).work(WORK).send().await?.value)
    }

    /// Asks what the server makes of texts, special tokens such as BOS included.
    ///
    /// # Errors
    /// Fails when the server cannot be reached.
    pub async fn tokenize(&self, certificate: &Certificate) -> Result<Vec<Tokens>, CliError> {
        let mut tokens = Vec::new();
        let mut has_route = true;
        for (text, _) in certificate.texts() {
            let mut found = Tokens::Unknown;
            if has_route {
                // vLLM reads `prompt` and `add_special_tokens`, llama.cpp `content` and `add_special`.
                let body = json!({
                    "model": self.model, "prompt": text, "content": text, "add_special_tokens": true, "add_special": true,
                });
                found = match self.root.raw_ask(&["tokenize"]).body(&body).send().await {
                    Ok(answer) => ids_of(&answer.value["tokens"]).map_or(Tokens::Unknown, Tokens::Ids),
                    Err(Error::Refused { .. } | Error::NotUnderstood { .. }) => Tokens::Unknown,
                    Err(error) => return Err(error.into()),
                };
                has_route = found != Tokens::Unknown;
            }
            if !has_route {
                found = match self.completion(json!({"prompt": text})).await {
                    Ok(answer) => of_usage(&answer),
                    Err(Error::Refused { .. }) => Tokens::Unknown,
                    Err(error) => return Err(error.into()),
                };
            }
            tokens.push(found);
        }
        Ok(tokens)
    }
}

fn ids_of(tokens: &Value) -> Option<Vec<u32>> {
    tokens.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// The tokens of a prompt by the answer to it: their ids from vLLM, their number from every server.
fn of_usage(answer: &Value) -> Tokens {
    match (ids_of(&answer["choices"][0]["prompt_token_ids"]), answer["usage"]["prompt_tokens"].as_u64()) {
        (Some(ids), _) => Tokens::Ids(ids),
        (None, Some(count)) => Tokens::Count(count),
        (None, None) => Tokens::Unknown,
    }
}

/// vLLM: `[null, {"86": {"logprob": …}}, …]`.
fn of_prompt_logprobs(list: &Value, ids: &[u32]) -> Option<Measured> {
    let list = list.as_array().filter(|list| list.len() == ids.len())?;
    Some(list.iter().zip(ids).skip(1).map(|(entry, id)| entry[id.to_string()]["logprob"].as_f64()).collect())
}

/// `echo`: `token_logprobs` of prompt and one more token, the first one null.
fn of_echo(logprobs: &Value, num_tokens: usize) -> Option<Measured> {
    let list = logprobs["token_logprobs"].as_array()?;
    // A server that ignores `echo` sends the log-prob of the new token alone.
    let is_echo = list.len() >= num_tokens && list.first().is_some_and(Value::is_null);
    is_echo.then(|| list.iter().take(num_tokens).skip(1).map(Value::as_f64).collect())
}

/// The log-probability of a forced token. A server may leave out a token that is not whole UTF-8.
fn of_forced(choice: &Value, id: u32) -> Option<f64> {
    // llama.cpp: as in chat, with ids.
    let entry = &choice["logprobs"]["content"][0];
    let all = std::iter::once(entry).chain(entry["top_logprobs"].as_array().into_iter().flatten());
    if let Some(found) = all.into_iter().find(|entry| entry["id"].as_u64() == Some(u64::from(id))) {
        return found["logprob"].as_f64();
    }
    let is_forced = ids_of(&choice["token_ids"]).is_some_and(|ids| ids == [id])
        || choice["logprobs"]["tokens"][0].as_str() == Some(&format!("token_id:{id}"));
    choice["logprobs"]["token_logprobs"][0].as_f64().filter(|_| is_forced)
}

/// The log-probabilities of a greedy continuation, up to its first token that is not the certificate's.
fn of_sampled(choice: &Value, prompt: &CertifiedPrompt) -> Option<Measured> {
    let logprobs = &choice["logprobs"];
    let (tokens, logps) = (logprobs["tokens"].as_array()?, logprobs["token_logprobs"].as_array()?);
    let mut measured = vec![None; prompt.prompt_ids.len().saturating_sub(1)];
    measured.resize(prompt.trained.len(), None);
    let places = measured.iter_mut().skip(prompt.prompt_ids.len().saturating_sub(1));
    for (index, (place, expected)) in places.zip(&prompt.continuation).enumerate() {
        if tokens.get(index).and_then(Value::as_str) != Some(expected) {
            // The other tokens that the server names here may include the certificate's. What follows has another prefix.
            *place = logprobs["top_logprobs"][index][expected].as_f64();
            break;
        }
        *place = logps.get(index).and_then(Value::as_f64);
    }
    Some(measured)
}
