//! Checks that each family reads config.json as transformers does.

use serde_json::{Value, json};

use crate::config::{Activation, LayerNorms, QkNorm, QueryGrowth, RopeKind};
use crate::{ModelCard, ModelDescription, TensorDtype};

fn config(case: &str, file: &str) -> Value {
    let path = rlood_test_support::fixture("parity").join(case).join(file);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn read(value: &Value) -> Result<ModelDescription, String> {
    ModelDescription::from_json("config.json", value).map_err(|error| error.to_string())
}

/// Describes a fixture's config.json after some keys are changed.
fn changed(case: &str, change: impl FnOnce(&mut Value)) -> Result<ModelDescription, String> {
    let mut value = config(case, "config.json");
    change(&mut value);
    read(&value)
}

#[test]
fn both_generations_of_transformers_say_the_same() {
    for case in [
        "gemma2",
        "gemma3_text",
        "gemma3_vl",
        "phi3",
        "phi3_partial",
        "phi3_longrope",
        "olmo3",
        "granitemoehybrid",
        "mistral3",
        "mistral3_ministral",
        "llama_dynamic",
        "qwen3_fp8",
    ] {
        assert_eq!(read(&config(case, "config.json")), read(&config(case, "config_v4.json")), "{case}");
    }
}

#[test]
fn a_released_gemma_leaves_out_whatever_is_usual() {
    let released = json!({
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024
        },
        "vision_config": {"hidden_size": 1152}
    });
    let gemma = read(&released).unwrap();
    assert_eq!((gemma.num_attention_heads, gemma.num_key_value_heads, gemma.head_dim), (8, 4, 256));
    assert_eq!((gemma.vocab_size, gemma.max_position_embeddings), (262_208, 131_072));
    assert!(gemma.is_part && gemma.tie_word_embeddings && gemma.activation == Activation::GeluTanh);
    assert_eq!((gemma.norms, gemma.qk_norm, gemma.norm_offset), (LayerNorms::AROUND, QkNorm::Head, 1.0));
    assert_eq!((gemma.rope.theta, &gemma.rope.kind), (1e6, &RopeKind::Linear { factor: 8.0 }));
    let local = gemma.local_rope.unwrap();
    assert_eq!((local.theta, local.kind), (1e4, RopeKind::Default));
    // Every sixth layer has full attention.
    let full: Vec<usize> = (0..34).filter(|layer| gemma.windows[*layer].is_none()).collect();
    assert_eq!(full, [5, 11, 17, 23, 29]);
    assert_eq!((gemma.attention_scale, gemma.attention_softcap), (1.0 / 16.0, None));

    // transformers reads both soft caps of Gemma 3, but applies only one, and that only in a checkpoint of text alone.
    let capped = |case: &str, part: Option<&str>| {
        let capped = changed(case, |value| {
            let text = match part {
                Some(part) => &mut value[part],
                None => value,
            };
            (text["attn_logit_softcapping"], text["final_logit_softcapping"]) = (json!(50.0), json!(30.0));
        });
        capped.map(|gemma| (gemma.attention_softcap, gemma.logits_softcap))
    };
    assert_eq!(capped("gemma2", None).unwrap(), (Some(50.0), Some(30.0)));
    assert_eq!(capped("gemma3_text", None).unwrap(), (None, Some(30.0)));
    assert_eq!(capped("gemma3_vl", Some("text_config")).unwrap(), (None, None));

    let second = read(&json!({
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "max_position_embeddings": 8192, "hidden_act": "gelu_pytorch_tanh"
    }));
    let second = second.unwrap();
    assert_eq!((second.attention_softcap, second.logits_softcap), (Some(50.0), Some(30.0)));
    assert_eq!((second.windows[0], second.windows[1]), (Some(4096), None));
}

#[test]
fn olmo3_reaches_a_longer_context_in_its_full_layers_alone() {
    let published = changed("olmo3", |value| {
        value.as_object_mut().unwrap().remove("rope_parameters");
        value["rope_theta"] = json!(500_000);
        value["rope_scaling"] = json!({"attention_factor": 1.2, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                                       "original_max_position_embeddings": 8192, "rope_type": "yarn"});
    });
    let published = published.unwrap();
    assert!(matches!(published.rope.kind, RopeKind::Yarn { .. }));
    assert_eq!(published.local_rope.unwrap().kind, RopeKind::Default);
}

#[test]
fn a_hybrid_has_states_in_three_of_four_layers() {
    let published = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": true,
        "text_config": {
            "hidden_size": 1024, "intermediate_size": 3584, "model_type": "qwen3_5_text", "num_hidden_layers": 24,
            "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16, "attn_output_gate": true,
            "full_attention_interval": 4, "mtp_num_hidden_layers": 1,
            "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "rope_theta": 10_000_000,
                                "rope_type": "default", "partial_rotary_factor": 0.25}
        },
        "vision_config": {"depth": 12}
    });
    let model = read(&published).unwrap();
    assert!(model.is_part && model.tie_word_embeddings && model.has_output_gate);
    assert_eq!((model.head_dim, model.rope.rotary_dim, model.norm_offset), (256, 64, 1.0));
    let net = model.delta_net.clone().unwrap();
    assert_eq!((net.conv_width(), net.value_width(), net.kernel), (6144, 2048, 4));
    assert_eq!(net.layers.iter().filter(|is_delta| **is_delta).count(), 18);
    assert!(!model.is_delta_net(3) && model.is_delta_net(4) && !model.is_delta_net(23));
    assert_eq!((model.projection_shape("q_proj"), model.projection_shape("o_proj")), ((4096, 1024), (1024, 2048)));
    let names =
        "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj";
    assert_eq!(model.module_names(), names.split(' ').collect::<Vec<_>>());
    // transformers ties the head by the key outside of text_config, which is false by default.
    let mut untied = published;
    untied.as_object_mut().unwrap().remove("tie_word_embeddings");
    assert!(!read(&untied).unwrap().tie_word_embeddings);
    let plain = changed("qwen3_5", |value| value["layer_types"] = Value::Null).unwrap();
    assert_eq!(plain, changed("qwen3_5", |_| ()).unwrap());
    let skipped = crate::read(&rlood_test_support::fixture("parity/qwen3_5_vl")).unwrap().skipped.unwrap();
    assert_eq!((skipped.count, skipped.parts), (2, vec!["model.visual".to_owned(), "mtp".to_owned()]));
    assert_eq!(crate::read(&rlood_test_support::fixture("parity/qwen3_5")).unwrap().skipped, None);
}

#[test]
fn phi3_calls_longrope_by_three_names() {
    for name in ["longrope", "su", "yarn"] {
        let phi = changed("phi3_longrope", |value| value["rope_parameters"]["rope_type"] = json!(name)).unwrap();
        let RopeKind::LongRope { attention_factor, long_factor, .. } = phi.rope.kind else { panic!("{name}") };
        assert!((attention_factor - (1.0 + 4f64.ln() / 32f64.ln()).sqrt()).abs() < 1e-12);
        assert_eq!((phi.rope.rotary_dim, long_factor.len()), (12, 6));
    }
}

#[test]
fn keys_that_would_change_the_result_are_rejected_by_name() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change, &str); 27] = [
        ("gemma3_text", |v| v["use_bidirectional_attention"] = json!(true), "use_bidirectional_attention is true"),
        ("gemma3_text", |v| v["hidden_activation"] = json!("relu"), "hidden_activation is \"relu\""),
        ("gemma3_vl", |v| v["text_config"]["model_type"] = json!("llama"), "text_config.model_type is \"llama\""),
        ("gemma3_vl", |v| v["text_config"] = Value::Null, "text_config is missing"),
        ("gemma3_vl", |v| v["text_config"]["num_hidden_layers"] = json!(0), "text_config: num_hidden_layers is 0"),
        (
            "phi3_partial",
            |v| v["rope_parameters"]["partial_rotary_factor"] = json!(1.5),
            "partial_rotary_factor is 1.5",
        ),
        ("phi3_partial", |v| v["rope_parameters"]["partial_rotary_factor"] = json!(0.7), "11 columns"),
        (
            "phi3_partial",
            |v| (v["head_dim"], v["rope_parameters"]["partial_rotary_factor"]) = (json!(20), json!(0.75)),
            "rope_parameters.partial_rotary_factor is 0.75; 15 columns",
        ),
        ("phi3_longrope", |v| v["rope_parameters"]["short_factor"] = json!([1.0]), "short_factor is [1.0]"),
        ("llama_dynamic", |v| v["rope_parameters"]["factor"] = Value::Null, "rope_parameters.factor is missing"),
        ("llama_dynamic", |v| v["partial_rotary_factor"] = json!(0.5), "partial_rotary_factor is 0.5"),
        ("granitemoehybrid", |v| v["layer_types"][1] = json!("mamba"), "layer_types is"),
        (
            "granitemoehybrid",
            |v| (v["layers_block_type"], v["layer_types"]) = (json!(["mamba", "attention", "attention"]), Value::Null),
            "layers_block_type is",
        ),
        ("granitemoehybrid", |v| v["layer_types"] = Value::Null, "layer_types is missing"),
        ("granitemoehybrid", |v| v["num_local_experts"] = json!(8), "num_local_experts is 8"),
        ("granitemoehybrid", |v| v["num_local_experts"] = Value::Null, "num_local_experts is missing"),
        ("gemma3_vl", |v| v["tie_word_embeddings"] = json!("yes"), "config.json: tie_word_embeddings is \"yes\""),
        (
            "qwen3_fp8",
            |v| v["quantization_config"]["weight_block_size"] = json!([0, 32]),
            "weight_block_size is [0,32]",
        ),
        ("qwen3_fp8", |v| v["quantization_config"]["quant_method"] = json!("gptq"), "quantization_config is"),
        ("qwen3_5", |v| v["layer_types"][1] = json!("mamba"), "layer_types is"),
        ("qwen3_5", |v| v["attn_output_gate"] = json!(false), "attn_output_gate is false"),
        ("qwen3_5", |v| v["hidden_act"] = json!("gelu_new"), "hidden_act is \"gelu_new\""),
        ("qwen3_5", |v| v["linear_num_value_heads"] = json!(3), "linear_num_key_heads (2) must divide it"),
        ("qwen3_5", |v| v["linear_conv_kernel_dim"] = json!(1), "linear_conv_kernel_dim is 1"),
        ("qwen3_5", |v| v["linear_key_head_dim"] = json!(1 << 20), "linear_key_head_dim is 1048576"),
        ("qwen3_5_vl", |v| v["text_config"]["num_experts"] = json!(8), "text_config: num_experts is 8"),
        ("qwen3_5_vl", |v| v["text_config"]["model_type"] = json!("qwen3"), "text_config.model_type is \"qwen3\""),
    ];
    for (case, change, words) in cases {
        let refused = changed(case, change).unwrap_err();
        assert!(refused.contains(words), "{case}: {refused}");
    }
}

#[test]
fn granite_without_positions_rotates_nothing() {
    let without = |value: &mut Value| value["position_embedding_type"] = Value::Null;
    assert!(changed("granitemoehybrid", without).unwrap().rotates.iter().all(|rotates| !rotates));
    assert!(changed("granitemoehybrid", |_| ()).unwrap().rotates.iter().all(|rotates| *rotates));
}

#[test]
fn granite_has_two_names_for_the_types_of_its_layers() {
    let renamed = changed("granitemoehybrid", |value| {
        value["layers_block_type"] = value["layer_types"].take();
    });
    assert_eq!(renamed, changed("granitemoehybrid", |_| ()));
}

#[test]
fn ministral_has_the_defaults_of_transformers() {
    let least = json!({"model_type": "ministral3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 262_144});
    let plain = read(&least).unwrap();
    assert_eq!((plain.rms_norm_eps, plain.tie_word_embeddings, plain.head_dim), (1e-5, false, 128));
    let RopeKind::Yarn { factor, original_max_position_embeddings, attention_factor, .. } = plain.rope.kind else {
        panic!("{:?}", plain.rope)
    };
    assert_eq!((plain.rope.theta, factor, original_max_position_embeddings), (1e6, 16.0, 16_384.0));
    assert_eq!(attention_factor, 1.0);
    assert_eq!(plain.query_growth, Some(QueryGrowth { beta: 0.1, original_max_position_embeddings: 16_384.0 }));
    // Each default ends where config.json says something else.
    let with = |more: Value| {
        let mut value = least.clone();
        value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let model = read(&value).unwrap();
        (model.rope.theta, model.rope.kind == RopeKind::Default, model.query_growth)
    };
    assert_eq!(with(json!({"rope_theta": 5e5})).0, 1e6);
    assert_eq!(with(json!({"rope_parameters": {"rope_type": "default"}})), (1e4, true, None));
    assert_eq!(with(json!({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}})), (5e5, true, None));
    assert_eq!(with(json!({"rope_scaling": {"rope_type": "default", "rope_theta": 2e4}})), (2e4, true, None));
}

#[test]
fn qwen_without_a_window_has_full_attention_in_all_layers() {
    for family in ["qwen2", "qwen3"] {
        let windows = |more: Value| {
            let mut value = json!({"model_type": family, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 256,
                "use_sliding_window": true, "max_window_layers": 1});
            value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            read(&value).unwrap().windows
        };
        assert_eq!(windows(json!({"sliding_window": null})), [None, None]);
        assert_eq!(windows(json!({})), [None, Some(4096)]);
    }
}

#[test]
fn eight_bits_are_rounded_to_the_dtype_of_the_whole_model() {
    let dtype = |case: &str, change: fn(&mut Value)| changed(case, change).unwrap().fp8_dtype;
    assert_eq!(dtype("qwen3_fp8", |_| ()), TensorDtype::Bf16);
    assert_eq!(dtype("qwen3_fp8", |value| value["dtype"] = json!("float32")), TensorDtype::F32);
    assert_eq!(dtype("qwen3_fp8", |value| value["dtype"] = Value::Null), TensorDtype::Bf16);
    let older = |value: &mut Value| (value["dtype"], value["torch_dtype"]) = (Value::Null, json!("float16"));
    assert_eq!(dtype("qwen3_fp8", older), TensorDtype::F16);
    assert_eq!(dtype("mistral3_ministral_fp8", older), TensorDtype::F16);
    let both =
        |value: &mut Value| (value["dtype"], value["text_config"]["dtype"]) = (json!("float32"), json!("float16"));
    assert_eq!(dtype("mistral3_ministral_fp8", both), TensorDtype::F32);
    let text =
        |value: &mut Value| (value["dtype"], value["text_config"]["torch_dtype"]) = (Value::Null, json!("float32"));
    assert_eq!(dtype("mistral3_ministral_fp8", text), TensorDtype::F32);
}

#[test]
fn the_head_of_a_multimodal_checkpoint_is_tied_by_the_outer_key() {
    for case in ["mistral3", "mistral3_ministral", "gemma3_vl"] {
        let tied = |outer: Value, text: Value| {
            let changed = changed(case, |value| {
                (value["tie_word_embeddings"], value["text_config"]["tie_word_embeddings"]) = (outer, text);
            });
            changed.unwrap().tie_word_embeddings
        };
        assert!(tied(json!(true), json!(false)) && tied(Value::Null, json!(false)), "{case}");
        assert!(!tied(json!(false), json!(true)), "{case}");
    }
    // Mistral3ForConditionalGeneration of transformers does not store the head that it ties.
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(rlood_test_support::fixture("parity").join("mistral3_ministral")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    let mut value = config("mistral3_ministral", "config.json");
    value["text_config"]["tie_word_embeddings"] = json!(false);
    std::fs::write(dir.path().join("config.json"), value.to_string()).unwrap();
    assert!(crate::read(dir.path()).unwrap().config.tie_word_embeddings);
    value["tie_word_embeddings"] = json!(false);
    std::fs::write(dir.path().join("config.json"), value.to_string()).unwrap();
    assert!(crate::read(dir.path()).unwrap_err().to_string().contains("lm_head.weight is missing"));
}

#[test]
fn tensors_besides_the_text_part_are_counted_and_skipped() {
    let read = |case: &str| crate::read(&rlood_test_support::fixture("parity").join(case)).unwrap();
    let skipped = read("gemma3_vl").skipped.unwrap();
    assert_eq!((skipped.count, skipped.parts), (1, vec!["vision_tower".to_owned()]));
    assert!(read("mistral3").skipped.unwrap().parts.contains(&"multi_modal_projector".to_owned()));
    let parts = read("mistral3_ministral_fp8").skipped.unwrap().parts;
    assert!(!parts.iter().any(|part| part.contains("language_model")), "{parts:?}");
    assert_eq!(read("qwen3").skipped, None);
}

#[test]
fn four_bits_of_bitsandbytes_are_read_and_its_other_formats_are_refused_by_name() {
    let card = |case: &str| crate::read(&rlood_test_support::fixture(&format!("parity/{case}"))).unwrap();
    let (nested, plain, part) = (card("qwen3_nf4"), card("qwen3_nf4_single"), card("llama_nf4_skip"));
    let format = |card: &ModelCard, name: &str| {
        let name = format!("model.layers.1.{name}.weight");
        card.tensors.iter().find(|tensor| tensor.name == name).unwrap().dtype
    };
    assert_eq!(format(&nested, "mlp.down_proj"), TensorDtype::Nf4);
    assert_eq!(format(&card("llama_fp4"), "mlp.down_proj"), TensorDtype::Fp4);
    // Skipped modules keep their precision.
    assert_eq!(format(&part, "mlp.gate_proj"), TensorDtype::Bf16);
    assert_eq!(format(&part, "self_attn.q_proj"), TensorDtype::Nf4);
    let weights = |card: &ModelCard| (card.shape().four_bit_weights, card.shape().nested_four_bit_weights);
    let linear = |card: &ModelCard| {
        let tensors = card.tensors.iter().filter(|tensor| tensor.dtype.is_four_bit());
        tensors.map(|tensor| tensor.num_elements() as u64).sum::<u64>()
    };
    assert_eq!(weights(&nested), (0, linear(&nested)));
    assert_eq!(weights(&plain), (linear(&plain), 0));
    assert_eq!(weights(&part), (0, linear(&part)));
    assert_eq!(crate::precision(&nested.tensors), Some(TensorDtype::Nf4));
    let text = |change: fn(&mut Value)| changed("qwen3_nf4", change).unwrap_err().to_string();
    for (change, words) in [
        (
            (|v: &mut Value| v["quantization_config"]["bnb_4bit_quant_storage"] = json!("bfloat16")) as fn(&mut Value),
            "bnb_4bit_quant_storage",
        ),
        (|v| v["quantization_config"]["load_in_8bit"] = json!(true), "-bnb-8bit"),
        (|v| v["quantization_config"]["quant_method"] = json!("awq"), "16-bit model that this one was made from"),
    ] {
        let error = text(change);
        assert!(error.contains("quantization_config") && error.contains(words), "{error}");
    }
}
