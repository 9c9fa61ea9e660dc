//! vLLM's client and the checks of a server, over exchanges with vLLM 0.32. Numbers are compared with those of the own engine.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::future::join_all;

use super::super::client::{RolloutClient, SampleOne, ServerError};
use super::super::prepare::{Checked, Preparation, Tolerance, Version};
use super::super::publish;
use super::super::vllm::Vllm;
use super::exchanges::{Kind, Server, server};
use crate::engine::backend::BackendKind;
use crate::engine::certificate::logps;
use crate::engine::model::{Adapter, Policy};
use crate::reward::client::Pace;
use crate::spec::ComputeDtype;
use rlood_types::trajectory::Trajectory;

/// Largest difference between vLLM's log-probs and ours in f32, in nats; about 1e-5 was measured.
const TOLERANCE: f32 = 5e-5;
const ADAPTER: &str = "rlood-test-a1-s1-000000000000";

fn model_dir() -> PathBuf {
    rlood_test_support::fixture("parity/qwen3")
}

fn probe() -> Vec<u32> {
    (0..40).map(|place| 5 + (place * 37) % 250).collect()
}

/// Our log-probs of each token but the first.
fn ours(adapter: Option<&Path>, ids: &[u32]) -> Vec<f32> {
    let mut policy = Policy::load(&model_dir(), BackendKind::Cpu).unwrap();
    if let Some(adapter) = adapter {
        policy.load_lora(adapter).unwrap();
    }
    let which = if adapter.is_some() { Adapter::On } else { Adapter::Off };
    logps(&policy, &[ids], which, &|| false).unwrap().remove(0)
}

fn difference(one: &[f32], other: &[f32]) -> f32 {
    assert_eq!(one.len(), other.len());
    one.iter().zip(other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
}

fn client(server: &Server, key: Option<&'static str>) -> Vllm {
    let http = crate::reward::http_client::client_builder().build().unwrap();
    Vllm::new(http, &server.url, key.map(|key| key.parse().unwrap()))
}

/// Copies a parity adapter into the test's folder, and returns its path.
fn adapter(server: &Server, fixture: &str, name: &str) -> String {
    let (from, to) = (model_dir().join(fixture), server.dir.path().join(name));
    std::fs::create_dir(&to).unwrap();
    for file in publish::FILES {
        std::fs::copy(from.join(file), to.join(file)).unwrap();
    }
    to.display().to_string()
}

fn request(n: usize, seed: u64, temperature: f64) -> SampleOne {
    SampleOne {
        adapter: ADAPTER.to_owned(),
        prompt: probe()[..12].to_vec(),
        n,
        seed,
        temperature,
        max_tokens: 12,
        stop_token_ids: vec![2, 3],
        vocab_size: 320,
        request_id: format!("test.{seed}"),
    }
}

/// Prepares a server for an adapter in `dir`, of which the log-probs are to be those of a parity adapter.
async fn prepare(client: Vllm, dir: &str, fixture: &str) -> Result<Checked, ServerError> {
    let probes = vec![probe()];
    let version = Version {
        name: ADAPTER.to_owned(),
        dir: PathBuf::from(dir),
        base_logps: vec![ours(None, &probes[0])],
        logps: vec![ours(Some(&model_dir().join(fixture)), &probes[0])],
        probes,
        max_tokens: 100,
    };
    let preparation = Preparation {
        client: Arc::new(client),
        checked: None,
        version: Arc::new(version),
        path: dir.to_owned(),
        prefix: "rlood-test-".to_owned(),
        kept: Vec::new(),
        tolerance: Tolerance::of(ComputeDtype::F32),
        pace: Pace::new(0.01).unwrap(),
    };
    preparation.run().await
}

#[tokio::test]
async fn base_and_adapter_have_our_log_probs() {
    let Some(server) = server("scores", Kind::Processed).await else { return };
    let client = client(&server, None);
    assert!(client.health().await.unwrap().starts_with("0.32"));
    assert_eq!(client.inventory().await.unwrap().base, "base");
    let path = adapter(&server, "lora", "one");
    client.load(ADAPTER, &path).await.unwrap();
    client.load(ADAPTER, &path).await.unwrap();
    let other = client.load(ADAPTER, &adapter(&server, "lora_rs", "two")).await.unwrap_err();
    assert!(matches!(&other, ServerError::Unfit(why) if why.contains("another adapter")), "{other}");
    let inventory = client.inventory().await.unwrap();
    assert!(
        inventory.max_model_len.is_some() && inventory.adapters.contains(&(ADAPTER.to_owned(), path)),
        "{inventory:?}"
    );
    let (base, lora) = (client.score("base", &probe()).await.unwrap(), client.score(ADAPTER, &probe()).await.unwrap());
    assert!(difference(&base, &ours(None, &probe())) < TOLERANCE);
    assert!(difference(&lora, &ours(Some(&model_dir().join("lora")), &probe())) < TOLERANCE);
    client.unload(ADAPTER).await.unwrap();
    client.unload(ADAPTER).await.unwrap();
    let gone = client.sample(&request(1, 1, 1.0)).await.unwrap_err();
    assert!(matches!(gone, ServerError::NoAdapter(_)), "{gone}");
}

#[tokio::test]
async fn the_ith_completion_has_the_seed_plus_i_and_log_probs_of_its_temperature() {
    let Some(server) = server("seeds", Kind::Processed).await else { return };
    let client = client(&server, None);
    client.load(ADAPTER, &adapter(&server, "lora_rs", "one")).await.unwrap();
    let group = client.sample(&request(4, 5, 0.7)).await.unwrap();
    for (index, completion) in group.iter().enumerate() {
        let alone = client.sample(&request(1, 5 + index as u64, 0.7)).await.unwrap();
        assert_eq!(alone, std::slice::from_ref(completion));
    }
    let mut policy = Policy::load(&model_dir(), BackendKind::Cpu).unwrap();
    policy.load_lora(&model_dir().join("lora_rs")).unwrap();
    for completion in &group {
        let prompt = request(1, 0, 1.0).prompt;
        let row = Trajectory::of_completion(&prompt, &completion.ids);
        let ours = policy.score(&[row], 0.7, Adapter::On).unwrap().remove(0).logps;
        assert!(difference(&completion.logps, &ours) < TOLERANCE);
        assert_eq!(completion.is_stopped, completion.ids.last().is_some_and(|id| [2, 3].contains(id)));
    }
    let greedy = client.sample(&request(1, 0, 0.0)).await.unwrap();
    assert_eq!(greedy.len(), 1);
    client.unload(ADAPTER).await.unwrap();
}

#[tokio::test]
async fn a_server_is_prepared_when_base_mode_and_adapter_are_right() {
    let Some(server) = server("prepared", Kind::Processed).await else { return };
    let path = adapter(&server, "lora", "one");
    let checked = prepare(client(&server, None), &path, "lora").await.unwrap();
    assert_eq!((checked.base.as_str(), checked.unknown_version), ("base", None));
    client(&server, None).unload(ADAPTER).await.unwrap();
}

#[tokio::test]
async fn an_adapter_that_the_server_accepts_with_another_scale_is_found_by_its_log_probs() {
    let Some(server) = server("scale", Kind::Processed).await else { return };
    let path = adapter(&server, "lora", "one");
    let config = Path::new(&path).join(publish::FILES[0]);
    let text = std::fs::read_to_string(&config).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value["lora_alpha"] = serde_json::json!(value["lora_alpha"].as_f64().unwrap() * 2.0);
    std::fs::write(&config, value.to_string()).unwrap();
    let error = prepare(client(&server, None), &path, "lora").await.unwrap_err();
    assert!(matches!(&error, ServerError::Unfit(why) if why.contains("differ from ours")), "{error}");
    client(&server, None).unload(ADAPTER).await.unwrap();
}

#[tokio::test]
async fn an_adapter_with_nan_and_a_missing_directory_are_named() {
    let Some(server) = server("nan", Kind::Mortal).await else { return };
    let client = client(&server, None);
    let missing = client.load(ADAPTER, &server.dir.path().join("nowhere").display().to_string()).await.unwrap_err();
    assert!(matches!(missing, ServerError::NoDirectory(_)), "{missing}");
    let path = adapter(&server, "lora", "one");
    let weights = Path::new(&path).join(publish::FILES[1]);
    let mut bytes = std::fs::read(&weights).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&weights, bytes).unwrap();
    client.load(ADAPTER, &path).await.unwrap();
    let error = client.score(ADAPTER, &probe()).await.unwrap_err();
    assert!(matches!(error, ServerError::NotFinite(_)), "{error}");
    client.unload(ADAPTER).await.unwrap();
}

#[tokio::test]
async fn a_directory_that_is_deleted_before_it_is_unloaded_ends_the_server() {
    let Some(server) = server("deleted", Kind::Mortal).await else { return };
    let client = client(&server, None);
    let names: Vec<String> = (0..6).map(|number| format!("rlood-test-a1-s{number}-000000000000")).collect();
    for name in &names {
        client.load(name, &adapter(&server, "lora", name)).await.unwrap();
    }
    // The first one has left the server's cache of four.
    std::fs::remove_dir_all(server.dir.path().join(&names[0])).unwrap();
    let gone = client.sample(&SampleOne { adapter: names[0].clone(), ..request(1, 1, 1.0) }).await.unwrap_err();
    assert!(matches!(gone, ServerError::Down(_)), "{gone}");
    let health = client.health().await.unwrap_err();
    assert!(matches!(health, ServerError::Down(_)), "{health}");
}

#[tokio::test]
async fn raw_log_probs_are_refused_with_the_flag_to_set() {
    let Some(server) = server("raw", Kind::Raw).await else { return };
    let path = adapter(&server, "lora", "one");
    let error = prepare(client(&server, None), &path, "lora").await.unwrap_err();
    assert!(matches!(&error, ServerError::Unfit(why) if why.contains("--logprobs-mode processed_logprobs")), "{error}");
}

#[tokio::test]
async fn a_wrong_api_key_and_a_full_queue_are_told_apart_from_failures() {
    let Some(server) = server("guarded", Kind::Guarded).await else { return };
    let wrong = client(&server, Some("Bearer wrong")).inventory().await.unwrap_err();
    assert!(matches!(&wrong, ServerError::Unfit(why) if why.contains("api_key")), "{wrong}");
    let right = client(&server, Some("Bearer secret"));
    right.load(ADAPTER, &adapter(&server, "lora", "one")).await.unwrap();
    let requests: Vec<SampleOne> = (0..8).map(|seed| request(1, seed, 1.0)).collect();
    let answers = join_all(requests.iter().map(|request| right.sample(request))).await;
    let busy = answers.iter().filter(|answer| matches!(answer, Err(ServerError::Busy { .. }))).count();
    assert!(busy > 0 && answers.iter().any(Result::is_ok), "{answers:?}");
    assert!(answers.iter().all(|answer| matches!(answer, Ok(_) | Err(ServerError::Busy { .. }))), "{answers:?}");
    right.unload(ADAPTER).await.unwrap();
}
