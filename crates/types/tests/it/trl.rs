//! Tests of the translation of TRL configurations: what is translated, what is rejected as TRL does, and what is explained by name.
//!
//! This file is longer than others: it has one table of cases for each part of the translation.

use proptest::prelude::*;
use rlood_types::spec::JobSpec;
use rlood_types::spec::format::Format;
use rlood_types::spec::trl::{Conversion, convert};
use serde_json::{Value, json};

/// Returns the configuration with a model, a dataset of `rows` rows and a reward.
fn run(config: Value, rows: usize) -> Value {
    let records: Vec<_> = (0..rows).map(|row| json!({"prompt": format!("row {row}")})).collect();
    json!({"config": config, "model": "m", "dataset": {"records": records}, "rewards": [{"type": "length"}]})
}

fn converted(config: Value) -> Conversion {
    convert(&run(config, 64), None)
}

fn at<'v>(conversion: &'v Conversion, pointer: &str) -> &'v Value {
    conversion.spec.pointer(pointer).unwrap_or(&Value::Null)
}

fn refused_keys(conversion: &Conversion) -> Vec<&str> {
    conversion.unsupported.iter().map(|remark| remark.key.as_str()).collect()
}

fn ignored_keys(conversion: &Conversion) -> Vec<&str> {
    conversion.ignored.iter().map(|remark| remark.key.as_str()).collect()
}

#[test]
fn trl_s_defaults_are_written_out() {
    let conversion = converted(json!({}));
    assert!(conversion.errors.is_empty() && conversion.unsupported.is_empty() && conversion.ignored.is_empty());
    // RLOOConfig of TRL 1.16 and TrainingArguments of transformers 5: 8 completions per step are 4 prompts of 2.
    for (pointer, expected) in [
        ("/rloo/num_generations", json!(2)),
        ("/rloo/beta", json!(0.05)),
        ("/rloo/epsilon", json!(0.2)),
        ("/rloo/num_iterations", json!(1)),
        ("/rloo/steps_per_generation", json!(1)),
        ("/rloo/normalize_advantages", json!(false)),
        ("/rloo/combine", json!("nansum")),
        ("/sampling/max_completion_length", json!(512)),
        ("/sampling/temperature", json!(1)),
        ("/optimizer/learning_rate", json!(1e-6)),
        ("/optimizer/lr_scheduler_type", json!("linear")),
        ("/optimizer/max_grad_norm", json!(1.0)),
        ("/training/prompts_per_step", json!(4)),
        ("/training/num_train_epochs", json!(3.0)),
        ("/training/seed", json!(42)),
        ("/training/shuffle_dataset", json!(true)),
        ("/checkpoints/every_steps", json!(500)),
        ("/checkpoints/keep_last", json!(1000)),
        ("/lora", Value::Null),
        ("/model", json!("m")),
    ] {
        assert_eq!(at(&conversion, pointer), &expected, "{pointer}");
    }
    assert!(conversion.spec.get("lora").is_some(), "TRL without PEFT trains every weight");
}

#[test]
fn the_seed_s_configuration_runs_as_it_is() {
    let config = json!({
        "output_dir": "./rloo_output", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 100,
        "learning_rate": 1e-5, "fp16": false, "bf16": true, "optim": "adamw_8bit", "num_generations": 4,
        "max_completion_length": 128, "kl_coef": 0.05
    });
    let conversion = converted(config);
    assert!(conversion.errors.is_empty() && conversion.unsupported.is_empty(), "{conversion:?}");
    assert_eq!(ignored_keys(&conversion), ["output_dir"]);
    assert_eq!(at(&conversion, "/training/prompts_per_step"), 1);
    assert_eq!(at(&conversion, "/training/max_steps"), 100);
    assert_eq!(at(&conversion, "/training/dtype"), "bf16");
    assert_eq!(at(&conversion, "/optimizer/kind"), "adamw_8bit");
    assert_eq!(at(&conversion, "/rloo/beta"), 0.05);
    assert_eq!(at(&conversion, "/sampling/max_completion_length"), 128);
}

#[test]
fn every_spelling_of_beta_is_read_and_two_at_once_are_refused() {
    for key in ["beta", "kl_coef", "kl_coeff"] {
        assert_eq!(at(&converted(json!({key: 0.25})), "/rloo/beta"), 0.25, "{key}");
    }
    let conversion = converted(json!({"beta": 0.1, "kl_coeff": 0.2}));
    assert_eq!(conversion.errors[0].pointer, "/config/kl_coeff");
    assert_eq!(conversion.errors[0].code, "conflict");
}

#[test]
fn micro_steps_become_optimizer_steps() {
    // (B, GA, S, G) → prompts per step, optimizer steps per block: S/GA, B·GA/G.
    for (b, ga, s, g, prompts, steps) in
        [(8, 1, 2, 2, 4, 2), (3, 2, 2, 6, 1, 1), (8, 2, 4, 2, 8, 2), (4, 2, 6, 2, 4, 3), (1, 4, 4, 4, 1, 1)]
    {
        let config = json!({"per_device_train_batch_size": b, "gradient_accumulation_steps": ga, "steps_per_generation": s, "num_generations": g});
        let conversion = converted(config.clone());
        assert!(conversion.errors.is_empty() && conversion.unsupported.is_empty(), "{config}: {conversion:?}");
        assert_eq!(at(&conversion, "/training/prompts_per_step"), prompts, "{config}");
        assert_eq!(at(&conversion, "/rloo/steps_per_generation"), steps, "{config}");
    }
    let conversion = converted(json!({"generation_batch_size": 32, "world_size": 2}));
    assert_eq!(at(&conversion, "/training/prompts_per_step"), 8);
    assert_eq!(at(&conversion, "/rloo/steps_per_generation"), 2);
}

#[test]
fn batches_that_are_no_whole_optimizer_steps_are_refused_with_the_nearest_that_are() {
    let conversion =
        converted(json!({"steps_per_generation": 4, "gradient_accumulation_steps": 3, "num_generations": 4}));
    assert_eq!(refused_keys(&conversion), ["steps_per_generation"]);
    assert!(conversion.unsupported[0].reason.contains("3 and 6"), "{}", conversion.unsupported[0].reason);
    assert_eq!(at(&conversion, "/training/prompts_per_step"), &Value::Null);
    // A group of 6 would span two optimizer steps of 3.
    let config = json!({"per_device_train_batch_size": 3, "steps_per_generation": 2, "num_generations": 6});
    let conversion = converted(config);
    assert_eq!(refused_keys(&conversion), ["gradient_accumulation_steps"]);
    assert!(
        conversion.unsupported[0].reason.ends_with("gradient_accumulation_steps 2"),
        "{:?}",
        conversion.unsupported
    );
}

#[test]
fn divisibility_errors_name_the_nearest_valid_values() {
    for (config, key, words) in [
        (
            json!({"num_generations": 3}),
            "num_generations",
            vec!["num_generations 2 and 4", "per_device_train_batch_size 6 and 9"],
        ),
        (json!({"generation_batch_size": 12}), "generation_batch_size", vec!["8 and 16"]),
        (
            json!({"num_generations_eval": 3, "eval_strategy": "steps", "eval_steps": 1}),
            "num_generations_eval",
            vec!["num_generations_eval 2 and 4", "per_device_eval_batch_size 6 and 9"],
        ),
        (json!({"num_generations": 1}), "num_generations", vec!["at least 2"]),
    ] {
        let conversion = converted(config.clone());
        assert_eq!(conversion.errors.len(), 1, "{config}: {:?}", conversion.errors);
        let error = &conversion.errors[0];
        assert_eq!(error.pointer, format!("/config/{key}"));
        assert!(words.iter().all(|word| error.detail.contains(word)), "{}", error.detail);
    }
}

#[test]
fn four_bit_bases_are_converted_from_each_place_where_trl_names_them() {
    let training = |config: Value| {
        let conversion = converted(config);
        assert!(conversion.errors.is_empty() && conversion.unsupported.is_empty(), "{conversion:?}");
        let training = conversion.spec["training"].clone();
        ["load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"].map(|key| training[key].clone())
    };
    let nf4 = json!({"load_in_4bit": true, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true,
                     "bnb_4bit_compute_dtype": "bfloat16"});
    let nested = [json!(true), json!("nf4"), json!(true)];
    assert_eq!(training(json!({"load_in_4bit": true, "use_bnb_nested_quant": true})), nested);
    assert_eq!(training(json!({"quantization_config": nf4})), nested);
    assert_eq!(training(json!({"model_init_kwargs": {"quantization_config": nf4}})), nested);
    // BitsAndBytesConfig has other defaults than TRL.
    let fp4 = [json!(true), json!("fp4"), json!(false)];
    assert_eq!(training(json!({"model_init_kwargs": {"load_in_4bit": true}})), fp4);
    assert_eq!(training(json!({"load_in_4bit": true, "bnb_4bit_quant_type": "fp4"})), fp4);
    for refused in [json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}), json!({"use_qlora": true})] {
        let conversion = converted(refused);
        assert!(conversion.unsupported[0].reason.contains("load_in_4bit"), "{:?}", conversion.unsupported);
    }
}

#[test]
fn keys_that_only_trl_can_do_select_its_runtime() {
    for config in [
        json!({"load_in_8bit": true}),
        json!({"quantization_config": {"load_in_8bit": true}}),
        json!({"model_init_kwargs": {"load_in_8bit": true}}),
        json!({"model_init_kwargs": {"quantization_config": {"load_in_8bit": true}}}),
    ] {
        let conversion = converted(config);
        assert!(conversion.errors.is_empty() && conversion.unsupported.is_empty(), "{conversion:?}");
        assert_eq!(conversion.spec["runtime"], json!({"name": "trl", "load_in_8bit": true}));
    }
    let zero = |stage: u64, device: &str| json!({"deepspeed": {"zero_optimization": {"stage": stage, "offload_param": {"device": device}}}});
    let conversion = converted(zero(3, "cpu"));
    assert_eq!(conversion.spec["runtime"], json!({"name": "trl", "zero_stage": 3, "offload": true}));
    assert_eq!(conversion.warnings.last().unwrap().code, "deepspeed_devices");
    let ranks = converted(json!({"load_in_8bit": true, "world_size": 2}));
    assert_eq!(ranks.spec["resources"], json!({"devices": 2}));
    for (refused, words) in [(zero(1, "cpu"), "stages 2 and 3"), (zero(3, "nvme"), "memory of the CPU")] {
        let conversion = converted(refused);
        assert!(conversion.unsupported[0].reason.contains(words), "{:?}", conversion.unsupported);
    }
    assert_eq!(converted(json!({})).spec.get("runtime"), None);
}

#[test]
fn vllm_of_trl_becomes_rollout_servers() {
    let rollout = |config: Value| {
        let conversion = convert(&json!({"config": config, "model": "m"}), Some(100));
        (conversion.spec["rollout"].clone(), conversion)
    };
    let (found, _) = rollout(json!({"use_vllm": true, "vllm_gpu_memory_utilization": 0.5}));
    assert_eq!(found, json!({"engine": "vllm", "colocate": true, "memory_share": 0.5}));
    let (found, conversion) = rollout(json!({"use_vllm": true, "vllm_mode": "server", "vllm_server_port": 8001}));
    assert_eq!(found, json!({"engine": "vllm", "servers": [{"url": "http://127.0.0.1:8001"}]}));
    assert!(conversion.warnings.iter().any(|warning| warning.code == "rollout_server"));
    let url = "http://10.0.0.7:8000";
    let (found, _) = rollout(json!({"use_vllm": true, "vllm_mode": "server", "vllm_server_base_url": url}));
    assert_eq!(found["servers"], json!([{ "url": url }]));

    // The whole of RLOOConfig's defaults, as a dump has them.
    let defaults = json!({
        "use_vllm": true, "vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_enable_sleep_mode": false,
        "vllm_structured_outputs_regex": null, "vllm_server_base_url": null, "vllm_server_host": "0.0.0.0",
        "vllm_server_port": 8000, "vllm_server_timeout": 240.0, "vllm_group_port": 51216,
        "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": null, "vllm_tensor_parallel_size": 1
    });
    let (_, conversion) = rollout(defaults);
    assert!(conversion.unsupported.is_empty() && conversion.errors.is_empty(), "{conversion:?}");
    for (key, value) in [
        ("vllm_tensor_parallel_size", json!(2)),
        ("vllm_model_impl", json!("transformers")),
        ("vllm_structured_outputs_regex", json!("[0-9]+")),
        ("vllm_importance_sampling_cap", json!(2.0)),
    ] {
        let (_, conversion) = rollout(json!({"use_vllm": true, key: value}));
        assert_eq!(conversion.unsupported.iter().map(|remark| remark.key.as_str()).collect::<Vec<_>>(), [key]);
    }
    let (_, conversion) = rollout(json!({"use_vllm": true, "vllm_mode": "remote"}));
    assert_eq!(conversion.errors[0].pointer, "/config/vllm_mode");
    let (found, conversion) = rollout(json!({"use_vllm": false, "vllm_tensor_parallel_size": 4}));
    assert!(found.is_null() && conversion.unsupported.is_empty() && conversion.ignored.len() == 1);
}

#[test]
fn unsupported_keys_are_explained_by_name() {
    let foreign = json!({
        "deepspeed": "ds_z3.json", "fsdp": "full_shard",
        "fsdp_config": {"version": 2}, "sync_ref_model": true, "ref_model_sync_steps": 64, "use_qlora": true, "fp16": true,
        "optim": "adafactor", "lr_scheduler_type": "polynomial", "push_to_hub": true, "neftune_noise_alpha": 5,
        "generation_kwargs": {"num_beams": 4}, "model_init_kwargs": {"variant": "x"}, "reward_model_path": "org/rm",
        "dataset_name": "trl-lib/tldr", "max_prompt_length": 512, "whiten_rewards": true, "num_generatoins": 4,
        "resume_from_checkpoint": "last", "loss_type": "dapo"
    });
    let keys: Vec<String> = foreign.as_object().unwrap().keys().cloned().collect();
    let document = json!({"config": foreign, "model": "m"});
    let conversion = convert(&document, None);
    let refused = refused_keys(&conversion);
    for key in keys {
        let prefix = format!("{key}.");
        assert!(refused.iter().any(|refused| *refused == key || refused.starts_with(&prefix)), "{key} in {refused:?}");
    }
    for remark in &conversion.unsupported {
        assert!(remark.reason.len() > 20 && remark.reason.is_char_boundary(20), "{remark:?}");
    }
    let reason = |key: &str| conversion.unsupported.iter().find(|remark| remark.key == key).unwrap().reason.clone();
    assert!(reason("num_generatoins").contains("did you mean 'num_generations'"));
    assert!(reason("deepspeed").contains("send its content"));
    assert!(reason("use_qlora").contains("load_in_4bit"));
    assert!(reason("dataset_name").contains("POST /datasets"));
}

#[test]
fn named_reward_functions_become_rewards_with_instructions() {
    let of = |config: Value| {
        let conversion = convert(&json!({"config": config, "model": "m", "dataset": {"id": "ds_1"}}), None);
        assert!(conversion.errors.is_empty() && conversion.unsupported.is_empty(), "{conversion:?}");
        conversion
    };
    let conversion = of(json!({
        "reward_funcs": ["accuracy_reward", "my_lib.rewards.custom", "<function brevity at 0x7f00>", "get_soft_overlong_punishment",
            "org/reward-model", "other.rewards.custom", "lib/more.py:tidy"],
        "reward_weights": [1, 0.5, 0, 1, 1, 1, 1]
    }));
    let expected = json!([
        {"type": "webhook", "name": "accuracy_reward", "url": "http://127.0.0.1:8090/accuracy_reward", "completion_ids": true, "weight": 1},
        {"type": "python", "file": "my_lib/rewards.py", "function": "custom", "weight": 0.5},
        {"type": "python", "file": "rewards.py", "function": "brevity", "weight": 0},
        {"type": "soft_overlong", "max_tokens": 1280, "cache_tokens": 256, "weight": 1},
        {"type": "reward_model", "model": "org/reward-model", "weight": 1},
        {"type": "python", "file": "other/rewards.py", "function": "custom", "name": "custom_2", "weight": 1},
        {"type": "python", "file": "lib/more.py", "function": "tidy", "weight": 1}
    ]);
    assert_eq!(conversion.spec["rewards"], expected);
    let (spec, errors) = JobSpec::read(json!({"rewards": expected}));
    let of_rewards: Vec<_> = errors.iter().filter(|error| error.pointer.starts_with("/rewards")).collect();
    assert!(of_rewards.is_empty() && spec.rewards[2].name == "brevity", "{of_rewards:?}");
    let warned = |code: &str, part: &str| {
        conversion
            .warnings
            .iter()
            .any(|w| w.code == code && w.pointer == "/config/reward_funcs" && w.detail.contains(part))
    };
    assert!(warned("reward_to_be_served", "rlood reward serve trl.rewards:accuracy_reward"));
    assert!(warned("reward_runs_python", "rlood reward serve my_lib/rewards.py:custom"));
    assert!(warned("reward_file_assumed", "the file of 'brevity' is not named"));
    assert_eq!(of(json!({"reward_funcs": "my.module.func"})).spec["rewards"][0]["file"], "my/module.py");
    let both = converted(json!({"reward_funcs": ["x"]}));
    assert!(ignored_keys(&both).contains(&"reward_funcs") && both.spec["rewards"] == json!([{"type": "length"}]));
    let bad = convert(&json!({"config": {"reward_funcs": [3]}, "model": "m"}), None);
    assert!(bad.errors[0].detail.contains("must name functions"), "{:?}", bad.errors);
}

#[test]
fn a_temperature_of_sampling_alone_is_refused_and_the_same_one_is_not() {
    let refused = |given: Value| {
        let conversion = convert(&json!({"config": given, "model": "m"}), None);
        refused_keys(&conversion).contains(&"generation_kwargs.temperature")
    };
    assert!(refused(json!({"temperature": 1.0, "generation_kwargs": {"temperature": 0.5}})));
    assert!(refused(json!({"generation_kwargs": {"temperature": 0.5}})));
    assert!(!refused(json!({"temperature": 0.5, "generation_kwargs": {"temperature": 0.5, "top_k": 5}})));
}

#[test]
fn columns_that_trl_would_hide_from_rewards_are_reported() {
    let told = |given: Value| {
        let conversion = convert(&json!({"config": given, "model": "m"}), None);
        conversion.warnings.iter().any(|warning| warning.pointer.ends_with("/remove_unused_columns"))
    };
    assert!(told(json!({"remove_unused_columns": true})) && !told(json!({"remove_unused_columns": false})));
}

/// Returns every field of the released dataclasses with its default.
fn released() -> Value {
    serde_json::from_str(&std::fs::read_to_string(rlood_test_support::fixture("trl/defaults.json")).unwrap()).unwrap()
}

#[test]
fn every_field_of_the_release_is_known_and_harmless_at_its_default() {
    let released = released();
    let mut config = released["rloo_config"].clone();
    assert!(config.as_object().unwrap().len() > 150);
    let conversion = converted(config.clone());
    assert!(conversion.errors.is_empty() && conversion.unsupported.is_empty(), "{conversion:?}");
    assert!(ignored_keys(&conversion).contains(&"logging_steps"));
    for (pointer, value) in converted(json!({})).spec.as_object().unwrap() {
        if pointer != "dataset" {
            assert_eq!(
                &conversion.spec[pointer], value,
                "a default written out is the same as one left out: {pointer}"
            );
        }
    }
    // Adds ModelConfig, because TRL's script accepts both together.
    config.as_object_mut().unwrap().extend(released["model_config"].as_object().unwrap().clone());
    let conversion = converted(config);
    assert!(conversion.errors.is_empty() && conversion.unsupported.is_empty(), "{conversion:?}");
    assert_eq!(at(&conversion, "/lora"), &Value::Null);
    let conversion = convert(&json!({"peft_config": released["lora_config"]}), None);
    assert!(conversion.errors.is_empty() && conversion.unsupported.is_empty(), "{conversion:?}");
}

#[test]
fn no_field_of_the_release_is_unknown_at_any_value() {
    let released = released();
    for (key, _) in released["rloo_config"].as_object().unwrap() {
        let conversion = converted(json!({key: "nonsense"}));
        for remark in &conversion.unsupported {
            assert!(!remark.reason.contains("not a key"), "{remark:?}");
        }
    }
}

#[test]
fn adapters_are_read_from_a_lora_config_and_from_flat_keys() {
    let peft = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/base", "r": 4, "lora_alpha": 16,
        "lora_dropout": 0.1, "target_modules": ["q_proj", "o_proj"], "use_rslora": true, "bias": "none", "init_lora_weights": true,
        "inference_mode": true, "modules_to_save": null, "rank_pattern": {}, "loftq_config": {}, "use_dora": false
    });
    let expected =
        json!({"r": 4, "alpha": 16, "dropout": 0.1, "target_modules": ["q_proj", "o_proj"], "use_rslora": true});
    for document in [
        json!({"config": {}, "peft_config": peft}),
        json!({"config": {"peft_config": peft}}),
        json!({"lora_config": peft, "beta": 0.1}),
    ] {
        let conversion = convert(&document, None);
        assert!(conversion.errors.is_empty() && conversion.unsupported.is_empty(), "{conversion:?}");
        assert_eq!(at(&conversion, "/lora"), &expected);
        assert_eq!(at(&conversion, "/model"), "org/base");
    }
    // Defaults of PEFT, and of TRL's ModelConfig.
    let conversion = convert(&json!({"peft_config": {}}), None);
    assert_eq!(
        at(&conversion, "/lora"),
        &json!({"r": 8, "alpha": 8, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"], "use_rslora": false})
    );
    let conversion = converted(
        json!({"use_peft": true, "lora_r": 32, "lora_target_modules": ["all-linear"], "disable_dropout": true}),
    );
    assert_eq!(
        at(&conversion, "/lora"),
        &json!({"r": 32, "alpha": 32, "dropout": 0.0, "target_modules": "all-linear", "use_rslora": false})
    );
    let conversion = converted(json!({"lora_r": 32}));
    assert_eq!(conversion.warnings[0].code, "peft_assumed");
    assert_eq!(at(&converted(json!({"use_peft": false, "lora_r": 32})), "/lora"), &Value::Null);
    // Options that are not plain LoRA.
    let document = json!({"peft_config": {"peft_type": "LORA", "use_dora": true, "bias": "all", "modules_to_save": ["lm_head"], "rank": 3}});
    assert_eq!(refused_keys(&convert(&document, None)), ["use_dora", "bias", "modules_to_save", "rank"]);
    let document = json!({"peft_config": {"peft_type": "IA3"}});
    assert_eq!(refused_keys(&convert(&document, None)), ["peft_type"]);
}

#[test]
fn the_schedule_uses_the_known_length_of_the_run() {
    // 64 rows with 4 prompts per step: 16 steps per epoch, 48 in total.
    let conversion = converted(
        json!({"warmup_ratio": 0.1, "eval_strategy": "epoch", "save_strategy": "epoch", "lr_scheduler_type": "cosine"}),
    );
    assert!(conversion.unsupported.is_empty(), "{:?}", conversion.unsupported);
    assert_eq!(at(&conversion, "/optimizer/warmup_steps"), 5);
    assert_eq!(at(&conversion, "/optimizer/lr_scheduler_type"), "cosine");
    assert_eq!(at(&conversion, "/eval/every_steps"), 16);
    assert_eq!(at(&conversion, "/checkpoints/every_steps"), 16);
    // Without the dataset, only max_steps determines the length.
    let config = json!({"warmup_ratio": 0.1, "save_steps": 0.25});
    assert_eq!(refused_keys(&convert(&config, None)), ["save_steps", "warmup_ratio"]);
    let conversion = convert(&json!({"warmup_ratio": 0.1, "save_steps": 0.25, "max_steps": 30}), None);
    assert_eq!(at(&conversion, "/optimizer/warmup_steps"), 3);
    assert_eq!(at(&conversion, "/checkpoints/every_steps"), 8);
    assert_eq!(at(&conversion, "/training/max_steps"), 30);
    assert_eq!(at(&conversion, "/training/num_train_epochs"), &Value::Null);
    // transformers' constant schedule has no warm-up.
    let conversion = converted(json!({"lr_scheduler_type": "constant", "warmup_steps": 7}));
    assert_eq!(at(&conversion, "/optimizer/warmup_steps"), &Value::Null);
    assert_eq!(ignored_keys(&conversion), ["warmup_steps"]);
    let conversion = converted(json!({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7}));
    assert_eq!(
        (at(&conversion, "/optimizer/lr_scheduler_type"), at(&conversion, "/optimizer/warmup_steps")),
        (&json!("constant"), &json!(7))
    );
}

#[test]
fn evaluation_samples_as_training_does() {
    let mut document =
        run(json!({"eval_strategy": "steps", "eval_steps": 5, "eval_on_start": true, "temperature": 0.7}), 8);
    document["eval_dataset"] = json!([{"prompt": "held out"}]);
    let conversion = convert(&document, None);
    let expected = json!({"every_steps": 5, "before_start": true, "num_generations": 2, "temperature": 0.7, "dataset": {"records": [{"prompt": "held out"}]}});
    assert_eq!(at(&conversion, "/eval"), &expected);
    // eval_steps defaults to logging_steps, which TRL sets to 10.
    assert_eq!(at(&converted(json!({"eval_strategy": "steps"})), "/eval/every_steps"), 10);
    let conversion = converted(json!({"eval_strategy": false, "eval_steps": 5}));
    assert_eq!((at(&conversion, "/eval"), ignored_keys(&conversion)), (&Value::Null, vec!["eval_steps"]));
}

#[test]
fn reward_weights_go_to_the_rewards() {
    let mut document = run(json!({"reward_weights": [0.7, 0.3]}), 8);
    assert_eq!(convert(&document, None).errors[0].pointer, "/config/reward_weights");
    document["rewards"] = json!([{"type": "length"}, {"type": "regex", "pattern": "x"}]);
    let conversion = convert(&document, None);
    assert_eq!(at(&conversion, "/rewards/0/weight"), 0.7);
    assert_eq!(at(&conversion, "/rewards/1/weight"), 0.3);
    let conversion = convert(&json!({"reward_weights": [0.7, 0.3]}), None);
    assert_eq!(conversion.warnings[0].code, "weights_to_be_added");
}

#[test]
fn numbers_written_as_text_are_numbers() {
    // PyYAML reads 1e-6 as text, and TRL accepts it.
    let text = "learning_rate: '1e-6'\nbeta: \"0.04\"\nmax_steps: '20'\nshuffle_dataset: 'false'\neval_strategy: no\n";
    let conversion = convert(&Format::Yaml.read(text).unwrap(), None);
    assert!(conversion.errors.is_empty(), "{:?}", conversion.errors);
    assert_eq!(at(&conversion, "/optimizer/learning_rate"), 1e-6);
    assert_eq!(at(&conversion, "/rloo/beta"), 0.04);
    assert_eq!(at(&conversion, "/training/max_steps"), 20);
    assert_eq!(at(&conversion, "/training/shuffle_dataset"), false);
}

#[test]
fn errors_of_the_job_point_to_the_submitted_key() {
    let conversion = converted(json!({"temperature": 0, "kl_coef": -1, "top_p": 2}));
    assert!(conversion.errors.is_empty(), "TRL does not check them: {:?}", conversion.errors);
    let (_, errors) = JobSpec::read(conversion.spec.clone());
    let pointers: Vec<String> = errors.into_iter().map(|error| conversion.at_submitted_key(error).pointer).collect();
    for pointer in ["/config/kl_coef", "/config/temperature", "/config/top_p"] {
        assert!(pointers.iter().any(|found| found == pointer), "{pointer} in {pointers:?}");
    }
}

#[test]
fn a_value_that_is_not_a_configuration_is_rejected() {
    for document in [json!(null), json!([]), json!("x"), json!({"config": 3}), json!({"config": {}, "beta": 0.1})] {
        assert!(!convert(&document, None).errors.is_empty(), "{document}");
    }
}

/// Generates JSON of any shape, with many of the words that a TRL configuration knows.
fn anything() -> impl Strategy<Value = Value> {
    let word = prop::sample::select(vec![
        "config",
        "peft_config",
        "lora_config",
        "model",
        "dataset",
        "eval_dataset",
        "rewards",
        "records",
        "id",
        "beta",
        "kl_coef",
        "num_generations",
        "num_generations_eval",
        "generation_batch_size",
        "steps_per_generation",
        "gradient_accumulation_steps",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "world_size",
        "eval_strategy",
        "eval_steps",
        "save_steps",
        "save_strategy",
        "warmup_ratio",
        "warmup_steps",
        "max_steps",
        "num_train_epochs",
        "reward_weights",
        "generation_kwargs",
        "model_init_kwargs",
        "lr_scheduler_type",
        "optim",
        "use_vllm",
        "vllm_mode",
        "lora_r",
        "target_modules",
        "exclude_modules",
        "reward_clip_range",
        "temperature",
        "seed",
        "use_peft",
        "bf16",
        "fp16",
        "steps",
        "epoch",
        "best",
        "no",
        "cosine",
        "nonsense",
    ]);
    let number = prop_oneof![
        any::<f64>(),
        (-3i64..20).prop_map(|n| n as f64),
        prop::sample::select(vec![1e6, 999_983.0, 1e300, 0.1, -0.0])
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        number.prop_map(Value::from),
        word.clone().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 64, 8, move |inner| {
        let key = prop_oneof![9 => word.clone().prop_map(str::to_owned), 1 => any::<String>()];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..12).prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn no_document_makes_the_translation_panic(document in anything(), rows in prop::option::of(0..100u64)) {
        let conversion = convert(&document, rows);
        let (_, errors) = JobSpec::read(conversion.spec.clone());
        for error in errors {
            let _ = conversion.at_submitted_key(error);
        }
    }
}

#[test]
fn trl_s_learning_rate_is_kept_with_an_adapter_and_a_warning() {
    let peft = json!({"r": 16, "lora_alpha": 32, "target_modules": "all-linear"});
    let told = |document: Value| {
        let conversion = converted(document);
        let warning = conversion.warnings.iter().find(|warning| warning.code == "learning_rate_low_for_lora").cloned();
        (at(&conversion, "/optimizer/learning_rate").clone(), warning)
    };
    let (rate, warning) = told(json!({"peft_config": peft}));
    let warning = warning.unwrap();
    assert!(rate == 1e-6 && warning.detail.contains("TRL's default learning rate of 1e-6 is kept"), "{warning:?}");
    assert!(warning.detail.contains("5e-5"), "{warning:?}");
    let (rate, warning) = told(json!({"learning_rate": 1e-5, "peft_config": peft}));
    assert!(rate == 1e-5 && warning.unwrap().detail.contains("the run's learning rate"));
    assert_eq!(told(json!({"learning_rate": 5e-5, "peft_config": peft})).1, None);
    // Without an adapter every weight is trained, for which this rate is appropriate.
    assert_eq!(told(json!({})).1, None);
}
