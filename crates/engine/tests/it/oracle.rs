//! Compares the forward pass with candle-transformers' own models as a second oracle.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, qwen3};
use rlood_engine::model::{Adapter, Policy};
use rlood_engine::random::{Key, Stream};
use serde::de::DeserializeOwned;

use crate::kinds::kinds;

fn fixture(name: &str) -> PathBuf {
    rlood_test_support::fixture("parity").join(name)
}

/// Parses a config; candle knows only the keys of transformers 4.
fn config<T: DeserializeOwned>(dir: &Path) -> T {
    serde_json::from_slice(&std::fs::read(dir.join("config_v4.json")).unwrap()).unwrap()
}

fn weights(dir: &Path) -> VarBuilder<'static> {
    let mut tensors = std::collections::HashMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            tensors.extend(candle_core::safetensors::load(path, &Device::Cpu).unwrap());
        }
    }
    VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)
}

fn sequence(length: usize) -> Vec<u32> {
    let key = Key::new(length as u64, Stream::Probe);
    (0..length as u64).map(|i| 4 + key.with(i).below(316) as u32).collect()
}

fn assert_same_logits(name: &str, mut theirs: impl FnMut(&Tensor) -> Tensor) {
    let policies = kinds().into_iter().map(|kind| (kind, Policy::load(&fixture(name), kind).unwrap()));
    let policies: Vec<_> = policies.collect();
    for length in [1, 2, 17, 60] {
        let ids = sequence(length);
        let input = Tensor::new(ids.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let theirs = theirs(&input).flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (kind, policy) in &policies {
            let ours = policy.logits(&ids, &[length - 1], Adapter::Off).unwrap();
            assert_eq!(ours[0].len(), theirs.len());
            for (ours, theirs) in ours[0].iter().zip(&theirs) {
                assert!((ours - theirs).abs() < 2e-4, "{name}, {kind:?}, {length} tokens: {ours} and {theirs}");
            }
        }
    }
}

#[test]
fn qwen3_agrees_with_candle_transformers() {
    for name in ["qwen3", "qwen3_bf16", "qwen3_sharded"] {
        let dir = fixture(name);
        let mut model = qwen3::ModelForCausalLM::new(&config(&dir), weights(&dir)).unwrap();
        assert_same_logits(name, |input| {
            model.clear_kv_cache();
            model.forward(input, 0).unwrap()
        });
    }
}

#[test]
fn llama_agrees_with_candle_transformers() {
    // The fixture llama3rope has a head_dim of its own, which candle does not support.
    let dir = fixture("llama");
    let config = config::<llama::LlamaConfig>(&dir).into_config(false);
    let model = llama::Llama::load(weights(&dir), &config).unwrap();
    assert_same_logits("llama", |input| {
        let mut cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu).unwrap();
        model.forward(input, 0, &mut cache).unwrap()
    });
}
