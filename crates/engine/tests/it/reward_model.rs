//! Compares sequence-classification checkpoints with transformers' scores. `tests/fixtures/README.md` explains the
//! files; `RLOOD_REWARD_MODELS` selects another folder. `reward_server.rs` tests the same models behind `rlood
//! reward-server` and as a job's reward.

use std::path::{Path, PathBuf};

use rlood_engine::backend::BackendKind;
use rlood_engine::reward_model::RewardModel;
use rlood_model_files::ClassifierCard;
use rlood_types::spec::ComputeDtype;
use serde_json::{Value, json};

/// Tolerance for scores relative to transformers in f32.
const TOLERANCE: f64 = 1e-4;

fn folder() -> PathBuf {
    rlood_test_support::folder_of("RLOOD_REWARD_MODELS", "reward_models")
}

fn cases() -> Vec<PathBuf> {
    let folder = folder();
    let mut cases: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("expected.json").exists())
        .collect();
    cases.sort();
    assert!(!cases.is_empty(), "no case in {}", folder.display());
    cases
}

fn expected(case: &Path) -> Vec<(Vec<u32>, Vec<f64>)> {
    let value: Value = serde_json::from_slice(&std::fs::read(case.join("expected.json")).unwrap()).unwrap();
    let ids = |case: &Value| serde_json::from_value(case["ids"].clone()).unwrap();
    let scores = |case: &Value| serde_json::from_value(case["scores"].clone()).unwrap();
    value["cases"].as_array().unwrap().iter().map(|case| (ids(case), scores(case))).collect()
}

fn worst(found: &[Vec<f32>], expected: &[(Vec<u32>, Vec<f64>)]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let pairs = found.iter().zip(expected).flat_map(|(found, (_, expected))| {
        assert_eq!(found.len(), expected.len(), "one score a label");
        found.iter().zip(expected).map(|(found, expected)| (f64::from(*found) - expected).abs())
    });
    pairs.fold(0.0, f64::max)
}

#[test]
fn every_reward_model_scores_as_transformers_does_alone_and_in_a_batch() {
    let mut failed = Vec::new();
    for case in cases() {
        let name = case.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for kind in [BackendKind::Cpu, BackendKind::Reference] {
            let checked = std::panic::catch_unwind(|| {
                let model = RewardModel::load(&case, kind, ComputeDtype::F32).map_err(|e| chain(&e))?;
                let expected = expected(&case);
                let ids: Vec<&[u32]> = expected.iter().map(|(ids, _)| ids.as_slice()).collect();
                let batch = model.scores(&ids).map_err(|e| chain(&e))?;
                let mut alone = Vec::new();
                for ids in &ids {
                    alone.extend(model.scores(&[ids]).map_err(|e| chain(&e))?);
                }
                Ok::<_, String>((worst(&alone, &expected), worst(&batch, &expected)))
            });
            match checked.unwrap_or_else(|_| Err("panicked".to_owned())) {
                Ok((alone, batch)) => {
                    println!("reward model {name}, {kind:?}: off by {alone:.1e} alone, {batch:.1e} in a batch");
                    if alone.max(batch) >= TOLERANCE {
                        failed.push(format!("{name}: off by {alone:.1e} alone, {batch:.1e} in a batch"));
                    }
                }
                Err(why) => failed.push(format!("{name}: {why}")),
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn padding_at_the_end_of_a_decoders_text_changes_no_score() {
    let model = RewardModel::load(&folder().join("qwen2"), BackendKind::Cpu, ComputeDtype::F32).unwrap();
    let (ids, _) = &expected(&folder().join("qwen2"))[1];
    let padded: Vec<u32> = ids.iter().copied().chain([3, 3, 3]).collect();
    assert_eq!(model.scores(&[ids]).unwrap(), model.scores(&[&padded]).unwrap());
}

#[test]
fn unscorable_input_is_rejected_with_a_message() {
    for name in ["qwen3", "modernbert"] {
        let model = RewardModel::load(&folder().join(name), BackendKind::Cpu, ComputeDtype::F32).unwrap();
        let unknown = model.scores(&[&[5, 400]]).unwrap_err().to_string();
        assert!(unknown.contains("token id 400 is not below vocab_size 400"), "{unknown}");
        let long = model.scores(&[&vec![5; 257]]).unwrap_err().to_string();
        assert!(long.contains("257 tokens; the reward model takes 1 to 256"), "{long}");
        assert!(model.scores(&[&[]]).is_err());
        assert!(model.scores(&[]).unwrap().is_empty());
    }
}

/// Copies a fixture and changes keys of its config.json; null removes a key.
fn changed(name: &str, changes: Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder().join(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(config.as_object_mut().unwrap().remove(key)),
            value => config[key] = value.clone(),
        }
    }
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, config.to_string()).unwrap();
    dir
}

#[test]
fn configs_of_transformers_4_and_5_give_the_same_scores() {
    let four = json!({"layer_types": null, "rope_parameters": null, "global_attn_every_n_layers": 2,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0});
    let four = changed("modernbert", four);
    let deberta = changed("deberta_v2", json!({"pos_att_type": "p2c|c2p"}));
    for (name, dir) in [("modernbert", &four), ("deberta_v2", &deberta)] {
        let of = |dir: &Path| RewardModel::load(dir, BackendKind::Cpu, ComputeDtype::F32).unwrap();
        let ids: Vec<u32> = (5..60).collect();
        assert_eq!(of(dir.path()).scores(&[&ids]).unwrap(), of(&folder().join(name)).scores(&[&ids]).unwrap());
    }
}

#[test]
fn an_unsupported_config_is_refused_by_its_key() {
    for (name, changes, expected) in [
        ("qwen3", json!({"architectures": ["Qwen3ForCausalLM"]}), "…ForSequenceClassification"),
        ("qwen3", json!({"id2label": {"0": "bad", "1": "good"}}), "score.weight has shape [1, 64]"),
        ("modernbert", json!({"norm_bias": true}), "norm_bias is true"),
        ("modernbert", json!({"classifier_pooling": "max"}), "classifier_pooling is \"max\""),
        ("modernbert", json!({"layer_types": ["sliding_attention", "full_attention"]}), "layer_types"),
        ("deberta_v2", json!({"conv_kernel_size": 3}), "conv_kernel_size is 3"),
        ("deberta_v2", json!({"pooler_hidden_size": 32}), "pooler_hidden_size is 32; this model_type supports only 64"),
        ("xlm_roberta", json!({"position_embedding_type": "relative_key"}), "the only supported value is \"absolute\""),
        ("xlm_roberta", json!({"hidden_act": "mish"}), "hidden_act is \"mish\""),
        ("llama", json!({"quantization_config": {"bits": 4}}), "quantization_config"),
    ] {
        let error = ClassifierCard::read(changed(name, changes).path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_label_is_found_by_name_or_number_and_asked_for_where_there_are_several() {
    let one = ClassifierCard::read(&folder().join("qwen3")).unwrap();
    assert_eq!(one.label_index(None), Ok(0));
    let two = ClassifierCard::read(&folder().join("llama")).unwrap();
    assert_eq!(two.labels, ["LABEL_0", "LABEL_1"]);
    assert_eq!(two.label_index(Some("LABEL_1")), Ok(1));
    assert_eq!(two.label_index(Some("1")), Ok(1));
    assert!(two.label_index(None).unwrap_err().contains("2 scores (LABEL_0, LABEL_1)"));
    assert!(two.label_index(Some("good")).unwrap_err().contains("no label 'good'"));
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
