//! Merged checkpoints as directories: dtypes, shards, tied embeddings, config, copied files, rejected merges.
//! `parity.rs` checks for every family that a merged model computes the same as base and adapter.

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use rlood_engine::backend::BackendKind;
use rlood_engine::merge::{MergeInput, Merged, MergedDtype, merge};
use rlood_engine::model::Policy;
use rlood_types::spec::{FourBitPlan, QuantType};
use safetensors::SafeTensors;
use serde_json::Value;

fn input<'a>(case: &'a Path, adapter: &'a Path, dtype: Option<MergedDtype>, out: &'a Path) -> MergeInput<'a> {
    MergeInput { model_dir: case, checkpoint_dir: adapter, is_adapter: true, dtype, four_bit: None, out_dir: out }
}

fn merged(case: &str, dtype: Option<MergedDtype>) -> (tempfile::TempDir, Merged) {
    let case = rlood_test_support::fixture(&format!("parity/{case}"));
    let out = tempfile::tempdir().unwrap();
    let made = merge(input(&case, &case.join("lora"), dtype, out.path()), &mut |_, _| true).unwrap().unwrap();
    (out, made)
}

fn json(dir: &Path, name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join(name)).unwrap()).unwrap()
}

/// Reads every tensor of a directory's files: type, shape, bytes.
fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "safetensors") {
            let bytes = std::fs::read(&path).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            for (name, view) in file.tensors() {
                all.insert(name, (format!("{:?}", view.dtype()), view.shape().to_vec(), view.data().to_vec()));
            }
        }
    }
    all
}

#[test]
fn a_weight_is_rounded_once_from_the_sum_in_f32() {
    let (exact, _) = merged("qwen3", Some(MergedDtype::Float32));
    let (rounded, made) = merged("qwen3", Some(MergedDtype::Bfloat16));
    let (exact, rounded_tensors) = (tensors(exact.path()), tensors(rounded.path()));
    assert_eq!(exact.keys().collect::<Vec<_>>(), rounded_tensors.keys().collect::<Vec<_>>());
    for (name, (dtype, shape, bytes)) in &rounded_tensors {
        let (_, exact_shape, exact_bytes) = &exact[name];
        assert_eq!((dtype.as_str(), shape), ("BF16", exact_shape), "{name}");
        let expected: Vec<u8> = exact_bytes
            .as_chunks::<4>()
            .0
            .iter()
            .flat_map(|word| bf16::from_f32(f32::from_le_bytes(*word)).to_le_bytes())
            .collect();
        assert_eq!(*bytes, expected, "{name}");
    }
    let survived = made.survived.unwrap();
    assert!(survived.fraction > 0.9 && survived.cosine > 0.9, "the fixtures' updates are large: {survived:?}");
    assert_eq!(made.dtype, MergedDtype::Bfloat16);
    let config = json(rounded.path(), "config.json");
    assert_eq!((&config["dtype"], &config["torch_dtype"]), (&"bfloat16".into(), &"bfloat16".into()));
    let base = rlood_test_support::fixture("parity/qwen3");
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        assert_eq!(
            std::fs::read(rounded.path().join(name)).unwrap(),
            std::fs::read(base.join(name)).unwrap(),
            "{name}"
        );
    }
    assert!(!rounded.path().join("adapter_config.json").exists());
}

#[test]
fn the_shards_of_the_base_are_kept_and_a_tied_head_is_not_written() {
    let (out, made) = merged("qwen3_sharded", None);
    let base = rlood_test_support::fixture("parity/qwen3_sharded");
    let (index, base_index) =
        (json(out.path(), "model.safetensors.index.json"), json(&base, "model.safetensors.index.json"));
    let config = json(out.path(), "config.json");
    let is_tied = config["tie_word_embeddings"] == true;
    let mut expected = base_index["weight_map"].as_object().unwrap().clone();
    expected.retain(|name, _| !(is_tied && name == "lm_head.weight"));
    assert_eq!(*index["weight_map"].as_object().unwrap(), expected);
    let written = tensors(out.path());
    let total: usize = written.values().map(|(_, _, bytes)| bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    assert_eq!(config["dtype"], made.dtype.as_str());
    assert_eq!(written.contains_key("lm_head.weight"), !is_tied);
}

#[test]
fn a_base_in_a_single_shard_is_merged_into_one_with_an_index() {
    const SHARD: &str = "model-00001-of-00001.safetensors";
    let case = rlood_test_support::fixture("parity/qwen3");
    let base = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(case.join(name), base.path().join(name)).unwrap();
    }
    std::fs::copy(case.join("model.safetensors"), base.path().join(SHARD)).unwrap();
    let map: BTreeMap<String, &str> = tensors(&case).into_keys().map(|name| (name, SHARD)).collect();
    let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": map});
    std::fs::write(base.path().join("model.safetensors.index.json"), index.to_string()).unwrap();

    let out = tempfile::tempdir().unwrap();
    merge(input(base.path(), &case.join("lora"), None, out.path()), &mut |_, _| true).unwrap().unwrap();
    let index = json(out.path(), "model.safetensors.index.json");
    let written = tensors(out.path());
    let expected: BTreeMap<String, &str> = written.keys().map(|name| (name.clone(), SHARD)).collect();
    assert_eq!(index["weight_map"], serde_json::json!(expected));
    Policy::load(out.path(), BackendKind::Cpu).unwrap();
    let (plain, _) = merged("qwen3", None);
    assert_eq!(tensors(plain.path()), written);
    assert!(!plain.path().join("model.safetensors.index.json").exists());
}

#[test]
fn eight_bits_are_expanded_and_the_other_parts_of_a_multimodal_checkpoint_stay() {
    let (out, made) = merged("qwen3_fp8", None);
    assert_eq!(made.dtype, MergedDtype::Bfloat16);
    assert!(tensors(out.path()).keys().all(|name| !name.ends_with("_scale_inv")));
    assert!(json(out.path(), "config.json").get("quantization_config").is_none());
    let (out, _) = merged("gemma3_vl", Some(MergedDtype::Float32));
    let base = rlood_test_support::fixture("parity/gemma3_vl");
    let names: Vec<String> = tensors(out.path()).into_keys().collect();
    let base_names: Vec<String> = tensors(&base).into_keys().filter(|name| !name.ends_with("lm_head.weight")).collect();
    assert_eq!(names, base_names);
}

#[test]
fn a_base_that_the_run_quantized_is_merged_like_one_that_is_stored_in_4_bits() {
    let case = rlood_test_support::fixture("parity/qwen3_nf4");
    let base = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(case.join(name), base.path().join(name)).unwrap();
    }
    std::fs::copy(case.join("unquantised.safetensors"), base.path().join("model.safetensors")).unwrap();
    let mut config = json(&case, "config.json");
    config.as_object_mut().unwrap().remove("quantization_config");
    std::fs::write(base.path().join("config.json"), config.to_string()).unwrap();

    let (stored, made) = merged("qwen3_nf4", None);
    assert_eq!(made.dtype, MergedDtype::Bfloat16);
    let config = json(stored.path(), "config.json");
    assert!(
        config.get("quantization_config").is_none()
            && config["torch_dtype"].as_str().unwrap_or("bfloat16") == "bfloat16"
    );
    let is_code = |name: &String| name.contains(".absmax") || name.contains(".quant_");
    let merge_of = |four_bit| {
        let out = tempfile::tempdir().unwrap();
        let lora = case.join("lora");
        let input = MergeInput { four_bit, ..input(base.path(), &lora, None, out.path()) };
        merge(input, &mut |_, _| true).unwrap().unwrap();
        tensors(out.path())
    };
    let expanded = tensors(stored.path());
    assert!(!expanded.keys().any(is_code), "{:?}", expanded.keys());
    let nested = FourBitPlan { quant_type: QuantType::Nf4, is_nested: true };
    assert!(merge_of(Some(nested)) == expanded, "other weights than those of the stored codes");
    assert!(merge_of(None) != expanded, "the base is not quantized unless the run did it");
}

#[test]
fn overflow_in_half_precision_and_mismatched_files_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let case = rlood_test_support::fixture("parity/qwen3");
    let adapter = dir.path().join("adapter");
    std::fs::create_dir(&adapter).unwrap();
    std::fs::copy(case.join("lora/adapter_model.safetensors"), adapter.join("adapter_model.safetensors")).unwrap();
    let mut config = json(&case.join("lora"), "adapter_config.json");
    config["lora_alpha"] = 1e9.into();
    std::fs::write(adapter.join("adapter_config.json"), config.to_string()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let error = merge(input(&case, &adapter, Some(MergedDtype::Float16), out.path()), &mut |_, _| true).unwrap_err();
    assert!(error.to_string().contains("not finite as float16"), "{error}");
    let other = rlood_test_support::fixture("parity/llama");
    let error = merge(input(&other, &case.join("lora"), None, out.path()), &mut |_, _| true).unwrap_err();
    assert!(error.to_string().contains("adapter"), "{error}");
    // A merge that is stopped leaves no files.
    let out = tempfile::tempdir().unwrap();
    assert_eq!(merge(input(&case, &case.join("lora"), None, out.path()), &mut |_, _| false).unwrap(), None);
}
