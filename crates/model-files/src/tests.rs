//! Reads model directories, intact and damaged.
//!
//! Longer than other files: each test is one table of cases, all based on copies of the same fixtures.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::template::ChatTemplate;
use super::text::{Prompt, Text, TextError};
use super::*;

fn fixture(name: &str) -> PathBuf {
    rlood_test_support::fixture("parity").join(name)
}

/// Copies a fixture into a temporary folder, where the test may damage it.
fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    dir
}

fn edit(dir: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = dir.join(file);
    let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

fn error(dir: &Path) -> String {
    read(dir).unwrap_err().to_string()
}

#[test]
fn a_card_says_what_is_known() {
    let card = read(&fixture("qwen3")).unwrap();
    assert_eq!(card.config.family, "qwen3");
    assert_eq!(card.eos_token_ids, [2]);
    assert_eq!(card.max_position_embeddings, 256);
    assert_eq!(card.num_parameters, 217_920);
    assert_eq!(precision(&card.tensors).map(TensorDtype::name), Some("f32"));
    let mut mixed = card.tensors.clone();
    mixed.iter_mut().filter(|tensor| tensor.shape.len() == 2).for_each(|tensor| tensor.dtype = TensorDtype::F8E4M3);
    assert_eq!(precision(&mixed).map(TensorDtype::name), Some("fp8"), "the norms are still f32");
    assert_eq!(precision(&[]), None);
    assert_eq!(card.config.head_dim, 32);
    let names: Vec<&str> = card.files.iter().map(|f| f.name.as_str()).collect();
    let expected =
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(names, expected);
    assert_eq!(read(&fixture("qwen3_sharded")).unwrap().files.len(), 9);
}

#[test]
fn the_fingerprint_changes_with_any_file_that_matters_and_with_no_other() {
    let dir = copy("qwen3");
    let first = fingerprint(dir.path()).unwrap();
    assert_eq!(first.len(), 64);
    std::fs::write(dir.path().join("README.md"), "x").unwrap();
    assert_eq!(fingerprint(dir.path()).unwrap(), first);
    let mut bytes = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let second = fingerprint(dir.path()).unwrap();
    assert_ne!(second, first);
    std::fs::write(dir.path().join("chat_template.jinja"), "{{ messages }}").unwrap();
    assert_ne!(fingerprint(dir.path()).unwrap(), second);
}

#[test]
fn unsupported_settings_are_rejected_with_key_and_value() {
    for (key, value) in [
        ("model_type", json!("gemma4")),
        ("model_type", json!(7)),
        ("architectures", json!(["LlamaForSequenceClassification"])),
        ("hidden_act", json!("gelu")),
        ("attn_logit_softcapping", json!(50.0)),
        ("final_logit_softcapping", json!(30.0)),
        ("partial_rotary_factor", json!(0.5)),
        ("quantization_config", json!({"quant_method": "gptq"})),
        ("logits_scaling", json!(2.0)),
        ("residual_multiplier", json!(0.5)),
        ("num_experts", json!(8)),
        ("rope_parameters.rope_type", json!("proportional")),
        ("rope_parameters.partial_rotary_factor", json!(0.25)),
        ("rope_parameters.full_attention", json!({"rope_theta": 1e4})),
        ("layer_types", json!(["chunked_attention"])),
        ("layer_types", json!(["full_attention"])),
        ("hidden_size", json!(-64)),
        ("hidden_size", json!(1e300)),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(31)),
        ("vocab_size", json!("320")),
        ("rms_norm_eps", json!(0)),
        ("tie_word_embeddings", json!("yes")),
        ("num_hidden_layers", json!(200_000_000)),
        ("eos_token_id", json!(["</s>"])),
    ] {
        let dir = copy("qwen3");
        edit(dir.path(), "config.json", |config| {
            let mut place = config;
            for part in key.split('.') {
                place = &mut place[part];
            }
            *place = value.clone();
        });
        let error = error(dir.path());
        assert!(error.contains(key), "{key} = {value}: {error}");
        assert!(error.contains(brief(&value).as_str()) || error.contains("; "), "{key} = {value}: {error}");
        assert!(error.starts_with("config.json: "), "{error}");
    }
    // Neutral values must be accepted.
    let dir = copy("qwen3");
    edit(dir.path(), "config.json", |config| {
        for (key, value) in [
            ("attn_logit_softcapping", Value::Null),
            ("partial_rotary_factor", json!(1.0)),
            ("num_experts", json!(0)),
            ("alibi", json!(false)),
            ("some_future_key", json!("x")),
        ] {
            config[key] = value;
        }
    });
    read(dir.path()).unwrap();
}

#[test]
fn rope_is_read_from_both_spellings() {
    for (config, kind) in [
        (
            json!({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e4}),
            RopeKind::Linear { factor: 4.0 },
        ),
        (
            json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                   "original_max_position_embeddings": 32}}),
            RopeKind::Yarn {
                factor: 4.0,
                original_max_position_embeddings: 32.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor: 0.1 * 4f64.ln() + 1.0,
                truncate: true,
            },
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": null, "mscale": 1.0, "mscale_all_dim": 0.5,
                   "original_max_position_embeddings": 32, "beta_fast": 16, "truncate": false}}),
            RopeKind::Yarn {
                factor: 8.0,
                original_max_position_embeddings: 32.0,
                beta_fast: 16.0,
                beta_slow: 1.0,
                attention_factor: (0.1 * 8f64.ln() + 1.0) / (0.05 * 8f64.ln() + 1.0),
                truncate: false,
            },
        ),
    ] {
        let mut all = json!({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
            "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 256});
        for (key, value) in config.as_object().unwrap() {
            all[key] = value.clone();
        }
        assert_eq!(
            ModelDescription::from_json("config.json", &all).unwrap().rope,
            Rope { theta: 1e4, rotary_dim: 16, kind }
        );
    }
}

#[test]
fn rope_without_a_key_its_type_needs_is_refused_by_that_key() {
    let complete = |rope_type: &str| {
        json!({"rope_type": rope_type, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32})
    };
    let read = |rope: &Value| {
        let all = json!({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
            "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 256, "rope_parameters": rope});
        ModelDescription::from_json("config.json", &all)
    };
    let needed: [(&str, &[&str]); 3] = [
        ("linear", &["factor"]),
        ("yarn", &["factor", "original_max_position_embeddings"]),
        ("llama3", &["factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"]),
    ];
    for (rope_type, keys) in needed {
        read(&complete(rope_type)).unwrap();
        for key in keys {
            let mut rope = complete(rope_type);
            rope.as_object_mut().unwrap().remove(*key);
            let error = read(&rope).unwrap_err().to_string();
            assert_eq!(error, format!("config.json: rope_parameters.{key} is missing; it must be set"));
        }
    }
}

#[test]
fn a_size_out_of_bounds_is_refused_with_the_bounds() {
    for (key, value) in
        [("num_hidden_layers", json!(1e9)), ("vocab_size", json!(1u64 << 40)), ("hidden_size", json!(0))]
    {
        let mut all = json!({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
            "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 256});
        all[key] = value;
        let error = ModelDescription::from_json("config.json", &all).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains("from 1 to 268435456"), "{error}");
    }
}

#[test]
fn sliding_windows_follow_each_family() {
    let base = json!({"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
        "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 256});
    let windows = |extra: Value| {
        let mut all = base.clone();
        for (key, value) in extra.as_object().unwrap() {
            all[key] = value.clone();
        }
        ModelDescription::from_json("config.json", &all).map(|c| c.windows)
    };
    let w = Some(8);
    assert_eq!(windows(json!({"model_type": "mistral", "sliding_window": 8})).unwrap(), [w, w, w]);
    assert_eq!(windows(json!({"model_type": "mistral", "sliding_window": null})).unwrap(), [None; 3]);
    assert_eq!(windows(json!({"model_type": "mistral"})).unwrap(), [Some(4096); 3]);
    assert_eq!(windows(json!({"model_type": "llama", "sliding_window": 8})).unwrap(), [None; 3]);
    assert_eq!(windows(json!({"model_type": "qwen2", "sliding_window": 8})).unwrap(), [None; 3]);
    let qwen = json!({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 2});
    assert_eq!(windows(qwen).unwrap(), [None, None, w]);
    let types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    let qwen = json!({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": true, "layer_types": types});
    assert_eq!(windows(qwen).unwrap(), [w, None, w]);
    assert!(windows(json!({"model_type": "qwen3", "sliding_window": 8, "layer_types": types})).is_err());
}

#[test]
fn a_family_reads_its_own_keys_and_no_other_family_does() {
    let base = json!({"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
        "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 256});
    let read = |family: &str, extra: Value| {
        let mut all = base.clone();
        all["model_type"] = json!(family);
        for (key, value) in extra.as_object().unwrap() {
            all[key] = value.clone();
        }
        ModelDescription::from_json("config.json", &all)
    };
    for (key, value) in [
        ("no_rope_layers", json!([1, 1, 1, 0])),
        ("residual_multiplier", json!(0.5)),
        ("attention_multiplier", json!(0.2)),
    ] {
        let error = read("llama", json!({key: value})).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
    let smollm3 = read("smollm3", json!({})).unwrap();
    assert_eq!(
        (smollm3.rotates, smollm3.tie_word_embeddings, smollm3.rope.theta),
        (vec![true, true, true, false], true, 2e6)
    );
    let own =
        read("smollm3", json!({"no_rope_layers": [0, 1, 1, 1, 1], "use_sliding_window": true, "sliding_window": 8}))
            .unwrap();
    assert_eq!((own.rotates, own.windows), (vec![false, true, true, true], vec![Some(8), None, None, None]));
    for wrong in [json!([1, 1, 1]), json!([1, 1, 1, 2]), json!("all")] {
        let error = read("smollm3", json!({"no_rope_layers": wrong})).unwrap_err().to_string();
        assert!(error.contains("no_rope_layers") && error.contains("num_hidden_layers"), "{error}");
    }
    let granite = read("granite", json!({"attention_multiplier": 0.2, "logits_scaling": 8})).unwrap();
    assert_eq!((granite.attention_scale, granite.logits_divisor, granite.residual_multiplier), (0.2, 8.0, 1.0));
    assert!(granite.beyond_gpu().is_some() && read("llama", json!({})).unwrap().beyond_gpu().is_none());
    let olmo2 = read("olmo2", json!({})).unwrap();
    let names: Vec<String> = olmo2.tensors().into_iter().map(|(name, _)| name).collect();
    assert!(names.contains(&"model.layers.3.post_feedforward_layernorm.weight".to_owned()));
    assert!(!names.iter().any(|name| name.contains("input_layernorm")), "{names:?}");
    let shape = |name: &str| olmo2.tensors().into_iter().find(|(known, _)| known == name).unwrap().1;
    assert_eq!(
        (shape("model.layers.0.self_attn.q_norm.weight"), shape("model.layers.0.self_attn.k_norm.weight")),
        (vec![64], vec![32])
    );
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1});
    let growth = read("ministral3", json!({"head_dim": 16, "rope_parameters": yarn})).unwrap().query_growth.unwrap();
    assert_eq!([0, 15].map(|position| growth.factor(position)), [1.0, 1.0]);
    assert!((growth.factor(40) - (1.0 + 0.1 * 3f32.ln())).abs() < 1e-6);
}

/// Moves the second tensor of a kind to the position of the first one.
fn share_the_bytes_of_two_tensors(bytes: &mut Vec<u8>) {
    in_header(bytes, |header| {
        let mut header: Value = serde_json::from_str(header).unwrap();
        header["model.layers.1.mlp.up_proj.weight"] = header["model.layers.0.mlp.up_proj.weight"].clone();
        header.to_string()
    });
}

/// Replaces the header in front of the same data.
fn in_header(bytes: &mut Vec<u8>, change: impl FnOnce(&str) -> String) {
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = change(std::str::from_utf8(&bytes[8..data]).unwrap()).into_bytes();
    let length = (header.len() as u64).to_le_bytes();
    bytes.splice(..data, length.into_iter().chain(header));
}

#[test]
fn damaged_weights_are_errors_that_name_the_file_and_the_tensor() {
    let spoil = |change: &dyn Fn(&mut Vec<u8>)| {
        let dir = copy("qwen3");
        let path = dir.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        change(&mut bytes);
        std::fs::write(path, bytes).unwrap();
        let error = error(dir.path());
        assert!(error.starts_with("model.safetensors: "), "{error}");
        error
    };
    let rename = |bytes: &mut Vec<u8>, from: &str, to: &str| {
        let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
    };
    assert!(spoil(&|b| b.clear()).contains("too few"));
    assert!(spoil(&|b| b.truncate(7)).contains("too few"));
    assert!(spoil(&|b| b.truncate(b.len() - 1)).contains("claims bytes"));
    assert!(spoil(&|b| b[..8].copy_from_slice(&u64::MAX.to_le_bytes())).contains("18446744073709551615"));
    assert!(spoil(&|b| b[..8].copy_from_slice(&99_999_999u64.to_le_bytes())).contains("99999999"));
    assert!(spoil(&|b| b[8] = b'x').contains("not JSON"));
    assert!(spoil(&|b| b.extend(b"tail")).contains("the file has 4 bytes after the last tensor"));
    assert!(
        spoil(&|b| in_header(b, |h| format!("{{\"model.norm.weight\":1,{}", &h[1..])))
            .contains("duplicate key 'model.norm.weight'")
    );
    let numbered = |h: &str| h.replace("{\"format\":\"pt\"}", "{\"format\":1}");
    assert!(spoil(&|b| in_header(b, numbered)).contains("the header's __metadata__ must be an object of strings"));
    assert!(spoil(&share_the_bytes_of_two_tensors).contains("tensors overlap"));
    assert!(spoil(&|b| rename(b, "layers.2.mlp.up_proj", "layers.2.mlp.up_proX")).contains("layers.2.mlp.up_proj"));
    assert!(spoil(&|b| rename(b, "\"shape\":[320,64]", "\"shape\":[64,320]")).contains("[64, 320]"));
    assert!(spoil(&|b| rename(b, "\"shape\":[320,64]", "\"shape\":[320,65]")).contains("does not have the size"));
    assert!(spoil(&|b| rename(b, "\"dtype\":\"F32\"", "\"dtype\":\"I32\"")).contains("stored as I32"));

    let dir = copy("qwen3");
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    assert!(error(dir.path()).contains("model.safetensors.index.json"));
    std::fs::write(dir.path().join("pytorch_model.bin"), "x").unwrap();
    assert!(error(dir.path()).contains("save_pretrained"));

    let dir = copy("qwen3_sharded");
    edit(dir.path(), "model.safetensors.index.json", |i| i["weight_map"]["lm_head.weight"] = json!("../x.safetensors"));
    assert!(error(dir.path()).contains("plain file name"));
    std::fs::remove_file(dir.path().join("model-00002-of-00004.safetensors")).unwrap();
    edit(dir.path(), "model.safetensors.index.json", |i| {
        i["weight_map"].as_object_mut().unwrap().remove("lm_head.weight");
        i["weight_map"]["model.norm.weight"] = json!("model-00002-of-00004.safetensors");
    });
    assert!(error(dir.path()).starts_with("model-00002-of-00004.safetensors: is missing"));
}

#[test]
fn a_missing_or_damaged_tokenizer_is_an_error() {
    let dir = copy("qwen3");
    std::fs::write(dir.path().join("tokenizer.json"), "{\"model\": 3").unwrap();
    assert!(error(dir.path()).starts_with("tokenizer.json: is not a tokenizer"));
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    assert!(error(dir.path()).starts_with("tokenizer.json: is missing"));
    let dir = copy("qwen3");
    std::fs::write(dir.path().join("tokenizer.json"), "{\"model\": {}}").unwrap();
    assert!(matches!(Text::load(dir.path()), Err(TextError::Files(e)) if e.file == "tokenizer.json"));
    assert!(error(&dir.path().join("nowhere")).contains("is not a directory"));
}

#[test]
fn a_head_that_differs_from_the_embedding_is_not_tied_whatever_config_json_says() {
    let dir = copy("llama_own_head");
    let own = read(dir.path()).unwrap();
    assert!(!own.config.tie_word_embeddings);
    let of = |name: &str| own.tensors.iter().find(|tensor| tensor.name == name).unwrap();
    let (embedding, head) = (of("model.embed_tokens.weight"), of("lm_head.weight"));
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let from = embedding.offset_bytes as usize;
    bytes.copy_within(from..from + embedding.size_bytes(), head.offset_bytes as usize);
    std::fs::write(path, bytes).unwrap();
    let same = read(dir.path()).unwrap();
    assert!(same.config.tie_word_embeddings);
    assert_eq!(own.num_parameters - same.num_parameters, head.num_elements() as u64);
}

#[test]
fn reading_garbage_never_panics() {
    let dir = copy("qwen3");
    for file in
        ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]
    {
        let path = dir.path().join(file);
        let good = std::fs::read(&path).unwrap();
        let span = good.len().min(4000);
        for i in 0..60usize {
            let mut bytes = good.clone();
            bytes[(i * 7919) % span] = (i * 31) as u8;
            bytes[(i * 104_729) % span] ^= 1 << (i % 8);
            if i % 5 == 0 {
                bytes.truncate((i * 613) % span);
            }
            std::fs::write(&path, bytes).unwrap();
            let _ = read(dir.path());
        }
        for text in ["", "null", "[]", "{}", "[[[[", "{\"chat_template\": 5}", "\u{feff}{}"] {
            std::fs::write(&path, text).unwrap();
            let _ = read(dir.path());
        }
        std::fs::write(&path, "[".repeat(100_000)).unwrap();
        assert!(read(dir.path()).is_err());
        std::fs::write(&path, good).unwrap();
    }
    read(dir.path()).unwrap();
}

#[test]
fn the_ids_that_end_a_completion_are_those_of_trl() {
    let dir = copy("qwen3");
    edit(dir.path(), "generation_config.json", |g| g["eos_token_id"] = json!([7, 2, 7]));
    edit(dir.path(), "config.json", |c| c["eos_token_id"] = json!(9));
    edit(dir.path(), "tokenizer_config.json", |t| t["eos_token"] = json!({"content": "<|endoftext|>"}));
    // If generation_config.json exists, the value in config.json is ignored.
    assert_eq!(read(dir.path()).unwrap().eos_token_ids, [7, 2, 0]);
    edit(dir.path(), "generation_config.json", |g| g["eos_token_id"] = Value::Null);
    assert_eq!(read(dir.path()).unwrap().eos_token_ids, [0]);
    edit(dir.path(), "tokenizer_config.json", |t| t["eos_token"] = Value::Null);
    assert!(error(dir.path()).contains("eos_token_id"));
    std::fs::remove_file(dir.path().join("generation_config.json")).unwrap();
    assert_eq!(read(dir.path()).unwrap().eos_token_ids, [9]);
    edit(dir.path(), "config.json", |c| c["eos_token_id"] = Value::Null);
    assert!(error(dir.path()).contains("eos_token_id"));
}

#[test]
fn an_eos_id_beyond_the_vocabulary_is_refused_by_its_key() {
    for file in ["generation_config.json", "config.json"] {
        let dir = copy("qwen3");
        edit(dir.path(), file, |g| g["eos_token_id"] = json!([2, 100_000]));
        let error = error(dir.path());
        assert!(error.starts_with(&format!("{file}: eos_token_id holds 100000")), "{error}");
    }
}

#[test]
fn a_rope_theta_that_is_not_positive_is_refused_be_it_used_or_not() {
    for theta in [json!(0), json!(-1e4), json!("x")] {
        for rope in [json!({"rope_theta": theta}), json!({"rope_theta": theta, "rope_parameters": {"rope_theta": 1e4}})]
        {
            let mut all = json!({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
                "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 256});
            all.as_object_mut().unwrap().extend(rope.as_object().unwrap().clone());
            let error = ModelDescription::from_json("config.json", &all).unwrap_err().to_string();
            assert!(error.starts_with("config.json: rope_theta is "), "{error}");
        }
    }
}

#[test]
fn special_files_are_rejected_before_they_are_opened() {
    let model = copy("qwen3");
    let names =
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"];
    let index = ["chat_template.jinja", "special_tokens_map.json"];
    for name in names.into_iter().chain(index) {
        let dir = copy("qwen3");
        let path = dir.path().join(name);
        let _ = std::fs::remove_file(&path);
        // Reading this pipe would block the test forever, because it has no writer.
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        let found = error(dir.path());
        assert!(found.starts_with(&format!("{name}: is a pipe")), "{found}");
        assert!(!classifier::is_classifier(dir.path()));
    }
    // The fingerprint also covers files that the model card does not need.
    let card = read(model.path()).unwrap();
    let path = model.path().join("config.json");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let found = fingerprint_files(model.path(), &card.files).unwrap_err().to_string();
    assert!(found.starts_with("config.json: is a directory"), "{found}");
}

#[test]
fn a_prompt_gets_its_special_tokens_once() {
    let text = Text::load(&fixture("llama")).unwrap();
    let kwargs = Map::new();
    // The tokenizer adds a BOS (0) to a text; the template writes its own.
    let plain = text.prompt_ids(&Prompt::Text("Hello".into()), &kwargs).unwrap();
    assert_eq!(plain.iter().filter(|id| **id == 0).count(), 1);
    let chat = Prompt::from_value(&json!([{"role": "user", "content": "Hello"}])).unwrap();
    let chat = text.prompt_ids(&chat, &kwargs).unwrap();
    assert_eq!((chat[0], chat.iter().filter(|id| **id == 0).count()), (0, 1));
    for wrong in [json!(3), json!([1]), json!([{"content": "x"}]), json!({"role": "user"})] {
        assert!(matches!(Prompt::from_value(&wrong), Err(TextError::Prompt)));
    }
}

#[test]
fn messages_without_a_template_are_refused() {
    let dir = copy("qwen3");
    edit(dir.path(), "tokenizer_config.json", |t| t["chat_template"] = Value::Null);
    let text = Text::load(dir.path()).unwrap();
    let messages = [json!({"role": "user", "content": "x"})];
    assert!(matches!(text.render_chat(&messages, true, &Map::new()), Err(TextError::NoChatTemplate)));
    std::fs::write(dir.path().join("chat_template.jinja"), "{{ messages[0].content }}!").unwrap();
    assert_eq!(Text::load(dir.path()).unwrap().render_chat(&messages, true, &Map::new()).unwrap(), "x!");
}

fn render(source: &str, kwargs: Value) -> Result<String, TextError> {
    let tokens = vec![("eos_token".to_owned(), "</s>".to_owned())];
    let template = ChatTemplate::new(source.to_owned(), tokens)?;
    Ok(template.render(&[json!({"role": "user", "content": "hi"})], true, kwargs.as_object().unwrap())?)
}

#[test]
fn tools_reach_the_template_by_their_own_argument_only() {
    let source =
        "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% elif tools is none %}none{% endif %}";
    let template = ChatTemplate::new(source.to_owned(), Vec::new()).unwrap();
    let tools = [json!({"type": "function", "function": {"name": "f"}})];
    let render = |tools: &[Value]| template.render_with_tools(&[], tools, true, &Map::new()).unwrap();
    assert_eq!(render(&tools), r#"{"type": "function", "function": {"name": "f"}}"#);
    assert_eq!(render(&[]), "none");
    let error = render_error(&template, json!({"tools": []}));
    assert!(error.contains("chat_template_kwargs must not contain 'tools'"), "{error}");
}

fn render_error(template: &ChatTemplate, kwargs: Value) -> String {
    template.render(&[], true, kwargs.as_object().unwrap()).unwrap_err().to_string()
}

#[test]
fn texts_of_special_tokens_encode_as_ordinary_text() {
    let text = Text::load(&fixture("qwen3")).unwrap();
    let end = text.token_to_id("<|im_end|>").unwrap();
    assert_eq!(text.encode("a<|im_end|>", false).unwrap().last(), Some(&end));
    let plain = text.encode_as_text("a<|im_end|>").unwrap();
    assert!(!plain.contains(&end));
    assert_eq!(text.decode(&plain, false).unwrap(), "a<|im_end|>");
    let special: Vec<String> = text.marked_special().into_iter().map(|token| token.text).collect();
    assert_eq!(special, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]);
    // The fixture encodes each of these bytes as one token, and a character may have several.
    assert_eq!(text.end_of_tokens("zqzq", 4).unwrap(), None);
    assert_eq!(text.end_of_tokens("zqzq", 2).unwrap(), Some(2));
    assert_eq!(text.end_of_tokens("zé", 2).unwrap(), Some(1));
    assert_eq!(text.end_of_tokens("zq", 0).unwrap(), Some(0));
}

#[test]
fn templates_render_as_jinja_does_in_transformers() {
    let data = json!({"x": {"b": 1, "a": ["é<&>'\"", null, true, 1.5]}, "enable_thinking": false});
    for (source, expected) in [
        ("{{ x | tojson }}", "{\"b\": 1, \"a\": [\"é<&>'\\\"\", null, true, 1.5]}"),
        ("{{ x.b | tojson(indent=2) }}", "1"),
        ("{{ x | tojson(indent=1) }}", "{\n \"b\": 1,\n \"a\": [\n  \"é<&>'\\\"\",\n  null,\n  true,\n  1.5\n ]\n}"),
        ("{{ true }} {{ none }} {{ [1, 'a', none] }} {{ {'k': false} }}", "True None [1, 'a', None] {'k': False}"),
        ("{% if tools is none and not tools %}no{% endif %}", "no"),
        ("{% if tools is iterable and tools | length > 0 %}tools{% endif %}none", "none"),
        (
            "{{ 'a' is iterable }} {{ [] is iterable }} {{ x is iterable }} {{ 1 is iterable }} {{ y is iterable }}",
            "True True True False True",
        ),
        ("{% if enable_thinking is defined and enable_thinking is false %}quiet{% endif %}", "quiet"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% for m in messages %}{% if loop.index > 5 %}{% break %}{% endif %}{{ m['role'] }}{% endfor %}", "user"),
        ("{{ 'a b'.split(' ')[-1].upper() + eos_token }}", "B</s>"),
        ("{% for k, v in x.items() %}{{ k }}{% endfor %}", "ba"),
        ("{{ 'a,b,c'.rsplit(',', 1) }}", "['a,b', 'c']"),
        ("{{ 'a b  c '.rsplit(None, 1) }}", "['a b', 'c']"),
        ("{{ ' a  b '.rsplit() }}", "['a', 'b']"),
        ("{{ 'a,b,c'.rsplit(',', maxsplit=1) }}", "['a,b', 'c']"),
        ("{{ 'a,b'.rsplit(',', 0) }}", "['a,b']"),
        ("{{ 'a=b=c'.partition('=') }}", "['a', '=', 'b=c']"),
        ("{{ 'a=b=c'.rpartition('=') }}", "['a=b', '=', 'c']"),
        ("{{ 'abc'.partition('=') }}", "['abc', '', '']"),
        ("{{ 'abc'.rpartition('=') }}", "['', '', 'abc']"),
        ("{{ 'abc'.removeprefix('ab') }}", "c"),
        ("{{ 'abc'.removesuffix('bc') }}", "a"),
        ("{{ 'abc'.removesuffix('x') }}", "abc"),
        ("{{ 'éa'.index('a') }}", "1"),
        ("{{ 'aba'.rindex('a') }}", "2"),
        ("{{ 'aBc'.swapcase() }}", "AbC"),
        ("{{ '7'.zfill(3) }}", "007"),
        ("{{ '-7'.zfill(4) }}", "-007"),
        ("{{ 'é'.ljust(3, '*') }}", "é**"),
        ("{{ 'a'.rjust(3) }}", "  a"),
        ("{{ 'ab'.center(5, '.') }}", "..ab."),
        ("{{ 'abc'.center(6, '.') }}", ".abc.."),
        ("{{ 'abc'.ljust(2) }}", "abc"),
        ("{{ messages[0].content.startswith('h') }}", "True"),
        (
            "{%- set ns = namespace(n=0) -%}{%- for i in range(3) -%}{%- set ns.n = ns.n + i -%}{%- endfor -%}{{ ns.n }}",
            "3",
        ),
        ("{{ undefined_name }}{{ messages[0].missing }}", ""),
        ("{{ add_generation_prompt }}", "True"),
        ("a{% generation %}b{{ 1 + 1 }}{% endgeneration %}c", "ab2c"),
        ("a  {%- generation -%}  b  {%- endgeneration -%}  c", "abc"),
        ("a\n  {%generation%}\nb\n{%+ endgeneration %}\nc", "a\nb\nc"),
        ("{% set generation = 'kept' %}{{ generation }} {{ '{%' }} generation", "kept {% generation"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% if true %}!{% endif %}{% endgeneration %}{% endfor %}",
            "hi!",
        ),
    ] {
        assert_eq!(render(source, data.clone()).unwrap(), expected, "{source}");
    }
    assert_eq!(render("{{ strftime_now('%Y') }}", data).unwrap().len(), 4);
}

#[test]
fn a_template_cannot_run_forever_or_read_files() {
    for source in [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('no') }}",
        "{{ 'x' * 100000000000 }}",
        "{{ strftime_now('%&') }}",
        "{% if",
        "{{ messages | nosuchfilter }}",
    ] {
        assert!(matches!(render(source, json!({})), Err(TextError::Template(_))), "{source}");
    }
}

#[test]
fn no_chat_template_takes_all_memory_stack_or_time() {
    let rendered = |source: &str| render(source, json!({})).map_err(|error| error.to_string());
    rlood_test_support::templates::every_costly_template_fails_soon(rendered, false);
}
