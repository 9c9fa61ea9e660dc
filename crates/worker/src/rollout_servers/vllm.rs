//! vLLM's HTTP API, as far as a rollout server is concerned (vLLM 0.32; facts with sources in `docs/guides/rollout-servers.md`).
//!
//! vLLM accepts unknown fields and checks almost nothing in an adapter: every answer is checked here, and every adapter by its
//! log-probs in [`super::fleet`].

use std::time::Duration;

use futures::FutureExt;
use reqwest::header::{AUTHORIZATION, HeaderValue};
use reqwest::{Client, Method, Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{Inventory, Reply, RolloutClient, SampleOne, SampledOne, ServerError};
use crate::error_text::with_causes;

/// Time limits of a call that answers at once, of loading an adapter, and of sampling or scoring.
const SHORT: Duration = Duration::from_secs(30);
const LOADING: Duration = Duration::from_secs(120);
const SAMPLING: Duration = Duration::from_secs(3600);
/// Maximum size of an answer in bytes.
const MAX_BYTES: usize = 256 << 20;
/// Maximum length of a server's message in our messages, in characters.
const MAX_MESSAGE_CHARS: usize = 400;
/// How far above 0 rounding may lift a log-prob.
const MAX_LOGP: f32 = 1e-6;

/// The client of one vLLM server.
pub(super) struct Vllm {
    http: Client,
    url: String,
    authorization: Option<HeaderValue>,
}

/// An answer with a status and a body, whatever the status.
struct Answer {
    status: StatusCode,
    body: Vec<u8>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
struct ModelEntry {
    id: String,
    #[serde(default)]
    root: Option<String>,
    #[serde(default)]
    parent: Option<String>,
    #[serde(default)]
    max_model_len: Option<usize>,
}

#[derive(Deserialize)]
struct Completions {
    model: String,
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    index: usize,
    #[serde(default)]
    finish_reason: Option<String>,
    #[serde(default)]
    token_ids: Option<Vec<u32>>,
    #[serde(default)]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(default)]
    logprobs: Option<TokenLogprobs>,
    #[serde(default)]
    prompt_logprobs: Option<Vec<Option<Value>>>,
}

#[derive(Deserialize)]
struct TokenLogprobs {
    token_logprobs: Vec<Option<f32>>,
}

impl Vllm {
    /// Creates the client of the server at `url`, with the value of its authorization header.
    pub(super) fn new(http: Client, url: &str, authorization: Option<HeaderValue>) -> Self {
        Self { http, url: url.trim_end_matches('/').to_owned(), authorization }
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        timeout: Duration,
    ) -> Result<Answer, ServerError> {
        let mut request = self.http.request(method, format!("{}{path}", self.url)).timeout(timeout);
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization.clone());
        }
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = request.send().await.map_err(|error| unsent(&error))?;
        let status = response.status();
        let retry_after = retry_after(&response);
        let body = read(response).await?;
        let answer = Answer { status, body };
        match answer.failure(retry_after) {
            Some(error) => Err(error),
            None => Ok(answer),
        }
    }

    async fn complete(&self, mut body: Value, model: &str) -> Result<Vec<Choice>, ServerError> {
        // Every setting is given: the model's generation_config.json would supply the others.
        for (name, value) in [
            ("top_p", json!(1)),
            ("top_k", json!(0)),
            ("min_p", json!(0)),
            ("repetition_penalty", json!(1)),
            ("logprobs", json!(0)),
            ("return_token_ids", json!(true)),
            ("return_tokens_as_token_ids", json!(true)),
            ("model", json!(model)),
        ] {
            body[name] = value;
        }
        let answer = self.call(Method::POST, "/v1/completions", Some(&body), SAMPLING).await?;
        let completions: Completions = answer.json()?;
        if completions.model != model {
            return Err(ServerError::Invalid(format!("it is from the model '{}', not '{model}'", completions.model)));
        }
        Ok(completions.choices)
    }
}

impl RolloutClient for Vllm {
    fn health(&self) -> Reply<'_, String> {
        async {
            self.call(Method::GET, "/health", None, SHORT).await?;
            let version: Value = self.call(Method::GET, "/version", None, SHORT).await?.json()?;
            match version["version"].as_str() {
                Some(version) => Ok(version.to_owned()),
                None => Err(ServerError::Unfit("its /version has no version: it is not a vLLM server".to_owned())),
            }
        }
        .boxed()
    }

    fn inventory(&self) -> Reply<'_, Inventory> {
        async {
            let models: Models = self.call(Method::GET, "/v1/models", None, SHORT).await?.json()?;
            let mut inventory = Inventory::default();
            for ModelEntry { id, root, parent, max_model_len } in models.data {
                match parent {
                    Some(_) => inventory.adapters.push((id, root.unwrap_or_default())),
                    None if inventory.base.is_empty() => {
                        (inventory.base, inventory.max_model_len) = (id, max_model_len);
                    }
                    // Other names of the same base model (`--served-model-name a b`).
                    None => {}
                }
            }
            if inventory.base.is_empty() {
                return Err(ServerError::Unfit("its /v1/models has no base model".to_owned()));
            }
            Ok(inventory)
        }
        .boxed()
    }

    fn load<'a>(&'a self, name: &'a str, path: &'a str) -> Reply<'a, ()> {
        async move {
            // `load_inplace` stays on the adapter, which is then read from disk again in every engine step.
            let body = json!({"lora_name": name, "lora_path": path, "load_inplace": false});
            match self.call(Method::POST, "/v1/load_lora_adapter", Some(&body), LOADING).await {
                Ok(_) => Ok(()),
                Err(ServerError::Invalid(why)) if why.contains("has already been loaded") => {
                    // The answer to an earlier request was lost.
                    let known = self.inventory().await?.adapters;
                    match known.iter().any(|(known, root)| known == name && root == path) {
                        true => Ok(()),
                        false => {
                            Err(ServerError::Unfit(format!("the server has another adapter with the name '{name}'")))
                        }
                    }
                }
                Err(error) => Err(error),
            }
        }
        .boxed()
    }

    fn unload<'a>(&'a self, name: &'a str) -> Reply<'a, ()> {
        async move {
            let body = json!({"lora_name": name});
            match self.call(Method::POST, "/v1/unload_lora_adapter", Some(&body), SHORT).await {
                Ok(_) | Err(ServerError::NoAdapter(_)) => Ok(()),
                Err(error) => Err(error),
            }
        }
        .boxed()
    }

    fn score<'a>(&'a self, model: &'a str, ids: &'a [u32]) -> Reply<'a, Vec<f32>> {
        async move {
            let body = json!({"prompt": ids, "max_tokens": 1, "temperature": 1, "prompt_logprobs": 0, "seed": 0});
            let choices = self.complete(body, model).await?;
            let listed = choices.first().and_then(|choice| choice.prompt_logprobs.as_ref());
            let Some(listed) = listed.filter(|listed| listed.len() == ids.len()) else {
                return Err(ServerError::Invalid(format!("it has no log-prob for each of {} tokens", ids.len())));
            };
            let of_token = |(id, entry): (&u32, &Option<Value>)| {
                let logp = entry.as_ref()?.get(id.to_string())?.get("logprob")?.as_f64()?;
                Some(logp as f32).filter(|logp| logp.is_finite())
            };
            let logps: Option<Vec<f32>> = ids.iter().zip(listed).skip(1).map(of_token).collect();
            logps.ok_or_else(|| ServerError::Invalid("a token of the prompt has no finite log-prob".to_owned()))
        }
        .boxed()
    }

    fn sample<'a>(&'a self, request: &'a SampleOne) -> Reply<'a, Vec<SampledOne>> {
        async move {
            // With `ignore_eos` only our own list ends a completion, whatever the model's generation_config.json says.
            let body = json!({
                "prompt": request.prompt, "n": request.n, "seed": request.seed, "temperature": request.temperature,
                "max_tokens": request.max_tokens, "ignore_eos": true, "stop_token_ids": request.stop_token_ids, "request_id": request.request_id,
            });
            let choices = self.complete(body, &request.adapter).await?;
            completions(request, choices).map_err(ServerError::Invalid)
        }
        .boxed()
    }
}

/// Checks the choices of an answer against the request, and returns them in order.
fn completions(request: &SampleOne, mut choices: Vec<Choice>) -> Result<Vec<SampledOne>, String> {
    choices.sort_by_key(|choice| choice.index);
    if choices.len() != request.n || choices.iter().enumerate().any(|(index, choice)| choice.index != index) {
        return Err(format!("it has {} completions, not {}", choices.len(), request.n));
    }
    choices.into_iter().map(|choice| completion(request, choice)).collect()
}

fn completion(request: &SampleOne, choice: Choice) -> Result<SampledOne, String> {
    if choice.prompt_token_ids.as_ref().is_some_and(|ids| *ids != request.prompt) {
        return Err("its prompt has other tokens than the request's".to_owned());
    }
    let (Some(ids), Some(logprobs)) = (choice.token_ids, choice.logprobs) else {
        return Err("a completion has no token ids or no log-probs".to_owned());
    };
    let logps: Option<Vec<f32>> = logprobs.token_logprobs.into_iter().collect();
    let logps = logps.ok_or("a token has no log-prob")?;
    if ids.is_empty() || ids.len() != logps.len() || ids.len() > request.max_tokens {
        let (ids, logps, most) = (ids.len(), logps.len(), request.max_tokens);
        return Err(format!("a completion has {ids} token ids and {logps} log-probs (at most {most})"));
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= request.vocab_size) {
        return Err(format!("the token id {id} is not below the vocabulary's size {}", request.vocab_size));
    }
    if let Some(logp) = logps.iter().find(|logp| !logp.is_finite() || **logp > MAX_LOGP) {
        return Err(format!("{logp} is not a log-prob"));
    }
    let ends = |id: &u32| request.stop_token_ids.contains(id);
    let is_stopped = match choice.finish_reason.as_deref() {
        Some("stop") => true,
        Some("length") => false,
        other => return Err(format!("a completion ended with '{}'", other.unwrap_or("no reason"))),
    };
    let (last, before) = ids.split_last().ok_or("a completion is empty")?;
    if before.iter().any(ends) || ends(last) != is_stopped {
        return Err("a completion does not end with its first end-of-sequence token".to_owned());
    }
    Ok(SampledOne { ids, logps, is_stopped })
}

impl Answer {
    fn json<T: serde::de::DeserializeOwned>(&self) -> Result<T, ServerError> {
        serde_json::from_slice(&self.body)
            .map_err(|error| ServerError::Invalid(format!("it is not the expected JSON: {error}")))
    }

    /// The error that the answer reports; `None` for a success.
    fn failure(&self, retry_after: Option<Duration>) -> Option<ServerError> {
        if self.status.is_success() {
            return None;
        }
        let message = self.message();
        let says = |words: &str| message.contains(words);
        Some(match self.status.as_u16() {
            401 | 403 => ServerError::Unfit(format!(
                "the server refuses the API key ({}): give it as rollout.servers[].api_key", self.status
            )),
            429 => ServerError::Busy { retry_after },
            503 if says("busy") => ServerError::Busy { retry_after },
            404 if says("No adapter found for") => ServerError::NoDirectory(message),
            404 if says("does not exist") || says("cannot be found") => ServerError::NoAdapter(message),
            404 => ServerError::Unfit(
                "the server has no routes for adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
                    .to_owned(),
            ),
            400 if says("Out of range float values") => ServerError::NotFinite(message),
            400 if says("has already been loaded") => ServerError::Invalid(message),
            400..=499 => ServerError::Unfit(format!("the server rejects the request ({}): {message}", self.status)),
            500 if says("Call to add_lora method failed") => ServerError::Unfit(format!(
                "the server cannot load the adapter (its --max-lora-rank must be at least the job's lora.r): {message}"
            )),
            _ => ServerError::Down(format!("the server answered {}: {message}", self.status)),
        })
    }

    fn message(&self) -> String {
        let value: Value = serde_json::from_slice(&self.body).unwrap_or(Value::Null);
        // An error is an object, except for a wrong API key, where it is a string.
        let message = value["error"]["message"].as_str().or(value["error"].as_str()).or(value["detail"].as_str());
        let text = String::from_utf8_lossy(&self.body);
        message.unwrap_or(&text).chars().filter(|c| !c.is_control()).take(MAX_MESSAGE_CHARS).collect()
    }
}

async fn read(mut response: Response) -> Result<Vec<u8>, ServerError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| unsent(&error))? {
        if body.len() + chunk.len() > MAX_BYTES {
            return Err(ServerError::Invalid(format!("it is larger than {MAX_BYTES} bytes")));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// The error of a request that got no whole answer.
fn unsent(error: &reqwest::Error) -> ServerError {
    match crate::reward::http_client::refusal(error) {
        Some(refused) => ServerError::Unfit(format!("{refused}: the operator can add the address to --allow-outgoing")),
        None if error.is_timeout() => ServerError::Down("the server did not answer in time".to_owned()),
        None => ServerError::Down(format!("the server cannot be reached: {}", with_causes(&error))),
    }
}

fn retry_after(response: &Response) -> Option<Duration> {
    let seconds: u64 = response.headers().get("retry-after")?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds.min(300)))
}
