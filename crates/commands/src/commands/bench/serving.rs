//! Generation over `/v1`: clients that ask at once, beside the same generation without HTTP.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::BoxFuture;
use reqwest::Client;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::decode::Generation;
use super::{BenchError, Setting, io};
use crate::config::ServeConfig;

/// Number of clients that ask at once.
const CLIENTS: usize = 16;
/// Number of tokens of each answer.
const TOKENS: usize = 128;

/// A server that runs in this process.
pub struct Server {
    /// The address that it listens on.
    pub addr: SocketAddr,
    /// Shuts the server down.
    pub stop: BoxFuture<'static, ()>,
}

/// Starts an API server in this process; the error says why it did not start. The caller has it: this crate is below the server.
pub type StartServer = fn(ServeConfig) -> BoxFuture<'static, Result<Server, String>>;

/// Results of the serving part.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ServingFigures {
    /// Number of clients that ask at once.
    pub clients: usize,
    /// Number of tokens of each answer.
    pub tokens: usize,
    /// Tokens per second of the same generation without HTTP, prefill included.
    pub decode_tok_s: f64,
    /// Tokens per second of all answers that come as one object.
    pub whole_tok_s: f64,
    /// The same as a share of the generation without HTTP.
    pub whole_ratio: f64,
    /// Tokens per second of all answers that come as streams.
    pub stream_tok_s: f64,
    /// The same as a share of the generation without HTTP.
    pub stream_ratio: f64,
    /// The 95th percentile of the time to the first token, in seconds.
    pub first_token_p95_s: f64,
    /// Duration of prefill and three steps without HTTP, in seconds.
    pub prefill_and_3_steps_s: f64,
}

/// Measures generation without HTTP, then starts a server and asks it.
///
/// # Errors
/// Fails when the engine, the server or a request fails.
pub fn measure(setting: &Setting<'_>, start: StartServer) -> Result<ServingFigures, BenchError> {
    let bench = Generation::load(setting)?;
    let times = setting.args.steps.max(3) as usize;
    let alone = bench.batch((CLIENTS, 1), TOKENS, times, |_| Ok(()))?;
    drop(bench);
    let runtime = tokio::runtime::Runtime::new().map_err(io("start the threads of the server"))?;
    let load = runtime.block_on(asked(setting, start, times))?;
    Ok(ServingFigures {
        clients: CLIENTS,
        tokens: TOKENS,
        decode_tok_s: alone.tok_s,
        whole_tok_s: load.whole_tok_s,
        whole_ratio: load.whole_tok_s / alone.tok_s,
        stream_tok_s: load.stream_tok_s,
        stream_ratio: load.stream_tok_s / alone.tok_s,
        first_token_p95_s: load.first_token_p95_s,
        prefill_and_3_steps_s: alone.prefill_s + 3.0 * alone.decode_step_s,
    })
}

struct Load {
    whole_tok_s: f64,
    stream_tok_s: f64,
    first_token_p95_s: f64,
}

fn failed(error: impl std::fmt::Display) -> BenchError {
    BenchError::Job(format!("the server of the benchmark: {error}"))
}

/// Starts a server on a free port, and measures how fast it answers.
async fn asked(setting: &Setting<'_>, start: StartServer, times: usize) -> Result<Load, BenchError> {
    let data = tempfile::tempdir().map_err(io("create a directory for the server"))?;
    let mut config = ServeConfig::loopback(data.path()).map_err(failed)?;
    config.devices = Vec::new();
    config.threads = u32::try_from(setting.threads()).unwrap_or(u32::MAX);
    config.serving.devices = vec![setting.args.device];
    config.serving.dtype = setting.dtype();
    let server = start(config).await.map_err(failed)?;
    let url = format!("http://{}", server.addr);
    let http = Client::builder().no_proxy().build().map_err(failed)?;
    let model = json!({"id": "bench", "source": setting.model_dir});
    let registered = http.post(format!("{url}/models")).json(&model).send().await.map_err(failed)?;
    registered.error_for_status().map_err(failed)?;
    let prompts = setting.prompts(CLIENTS);
    let body = |prompt: &Vec<u32>, stream: bool| json!({"model": "bench", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": true, "seed": 1, "stream": stream});
    let url = format!("{url}/v1/completions");
    let round = async |stream: bool| -> Result<(f64, Vec<f64>), BenchError> {
        let begun = Instant::now();
        let ask = |prompt| ask(&http, &url, body(prompt, stream), begun);
        let firsts = futures::future::try_join_all(prompts.iter().map(ask)).await?;
        Ok((begun.elapsed().as_secs_f64(), firsts.iter().map(Duration::as_secs_f64).collect()))
    };
    // The first round loads the model.
    round(false).await?;
    let (mut whole, mut streamed, mut firsts) = (f64::INFINITY, f64::INFINITY, Vec::new());
    for _ in 0..times {
        whole = whole.min(round(false).await?.0);
        let (took, first) = round(true).await?;
        streamed = streamed.min(took);
        firsts.extend(first);
    }
    firsts.sort_by(f64::total_cmp);
    server.stop.await;
    let tokens = (CLIENTS * TOKENS) as f64;
    let place = (firsts.len() * 95).div_ceil(100).saturating_sub(1);
    Ok(Load {
        whole_tok_s: tokens / whole,
        stream_tok_s: tokens / streamed,
        first_token_p95_s: firsts.get(place).copied().unwrap_or_default(),
    })
}

/// Sends one request; returns the time from `begun` to the first token of a stream, or to the whole answer.
async fn ask(http: &Client, url: &str, body: Value, begun: Instant) -> Result<Duration, BenchError> {
    let answer = http.post(url).json(&body).send().await.map_err(failed)?.error_for_status().map_err(failed)?;
    let mut bytes = answer.bytes_stream();
    let mut first = None;
    let mut last = Vec::new();
    while let Some(chunk) = bytes.next().await {
        last = chunk.map_err(failed)?.to_vec();
        first.get_or_insert_with(|| begun.elapsed());
    }
    let is_complete = match body["stream"] == true {
        true => last.ends_with(b"[DONE]\n\n"),
        false => last.ends_with(b"}"),
    };
    match (first, is_complete) {
        (Some(first), true) => Ok(first),
        _ => Err(failed("an answer was cut")),
    }
}
