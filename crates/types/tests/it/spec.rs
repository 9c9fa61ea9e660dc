//! Tests of which jobs are accepted, which are rejected, and with which messages.
//!
//! This file is longer than others: it has a table of rejected documents and their messages for each part of a job.

use proptest::prelude::*;
use rlood_types::spec::{
    Arithmetic, Combine, Context, DatasetFacts, FieldError, JobSpec, ModelFacts, ModelShape, PromptKey, PromptLengths,
    Resolution, RewardKind, prompt_key, resolve,
};
use serde_json::{Value, json};

const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

pub fn model() -> ModelFacts {
    ModelFacts {
        id: "org/tiny".to_owned(),
        sha256: "aa".to_owned(),
        max_position_embeddings: 512,
        num_parameters: 1_000,
        size_bytes: 2_000,
        has_chat_template: false,
        removes_reasoning: false,
        shape: Some(ModelShape {
            four_bit_weights: 0,
            nested_four_bit_weights: 0,
            hidden_size: 8,
            intermediate_size: 16,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 4,
            vocab_size: 32,
            num_windowed_layers: 0,
            window: 0,
            delta_net: None,
            has_output_gate: false,
        }),
        modules: vec!["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        beyond_gpu: None,
        foreign: None,
        reads_images: false,
    }
}

fn dataset(num_rows: u64) -> DatasetFacts {
    DatasetFacts {
        id: rlood_types::id::DatasetId::new(),
        sha256: "bb".to_owned(),
        num_rows,
        columns: vec!["prompt".to_owned(), "answer".to_owned()],
        has_chat_prompts: false,
        prompt_lengths: Some(PromptLengths { longest: 100, longest_row: 3, too_long: 0 }),
        prompt_keys: None,
        sources: Vec::new(),
        is_pending: false,
    }
}

fn minimal() -> Value {
    json!({"model": "org/tiny", "dataset": {"id": rlood_types::id::DatasetId::new()}, "rewards": [{"type": "length"}]})
}

/// Returns the minimal job with one value set; missing parents of the pointer are created.
pub fn with(pointer: &str, value: Value) -> Value {
    let mut document = minimal();
    let mut at = &mut document;
    for name in pointer.trim_start_matches('/').split('/') {
        at = match name.parse::<usize>() {
            Ok(index) => &mut at[index],
            Err(_) => &mut at[name],
        };
    }
    *at = value;
    document
}

fn context() -> Context {
    Context { model: Some(model()), dataset: Some(dataset(64)), eval_dataset: Some(dataset(4)), ..Context::default() }
}

fn errors(document: Value) -> Vec<FieldError> {
    let (spec, mut errors) = JobSpec::read(document);
    let context = Context {
        model: Some(model()),
        dataset: Some(dataset(64)),
        eval_dataset: spec.eval.as_ref().map(|_| dataset(4)),
        ..Context::default()
    };
    errors.extend(resolve(&spec, &context).err().unwrap_or_default());
    errors
}

pub fn accepted(document: Value) -> Resolution {
    let (spec, errors) = JobSpec::read(document);
    assert_eq!(errors, []);
    let context = Context {
        model: Some(model()),
        dataset: Some(dataset(64)),
        eval_dataset: spec.eval.as_ref().map(|_| dataset(4)),
        ..Context::default()
    };
    resolve(&spec, &context).unwrap()
}

/// Asserts that setting `pointer` to `value` gives exactly one error, at `at`, with this code and all these words in its text.
#[track_caller]
pub fn refused_at(pointer: &str, value: Value, at: &str, code: &str, words: &[&str]) {
    let errors = errors(with(pointer, value.clone()));
    assert_eq!(errors.len(), 1, "{pointer} = {value}: {errors:#?}");
    assert_eq!((errors[0].pointer.as_str(), errors[0].code.as_str()), (at, code), "{}", errors[0].detail);
    for word in words {
        assert!(errors[0].detail.contains(word), "'{word}' is not in: {}", errors[0].detail);
    }
}

#[track_caller]
pub fn refused(pointer: &str, value: Value, code: &str, words: &[&str]) {
    refused_at(pointer, value, pointer, code, words);
}

#[test]
fn a_minimal_job_gets_the_documented_defaults() {
    let plan = accepted(minimal()).plan;
    assert_eq!(
        (plan.rloo.num_generations.get(), plan.rloo.beta, plan.rloo.epsilon, plan.rloo.epsilon_high),
        (4, 0.05, 0.2, 0.2)
    );
    assert_eq!(
        (plan.rloo.num_iterations, plan.rloo.steps_per_generation, plan.rloo.combine),
        (1, 1, Combine::Renormalize)
    );
    assert_eq!((plan.sampling.max_completion_length, plan.sampling.temperature, plan.sampling.top_p), (256, 1.0, 1.0));
    let lora = plan.lora.as_ref().unwrap();
    assert_eq!((lora.r, lora.alpha, lora.dropout, lora.target_modules.len()), (16, 32.0, 0.0, 7));
    assert_eq!(
        (plan.optimizer.learning_rate, plan.optimizer.max_grad_norm, plan.optimizer.weight_decay),
        (5e-5, 1.0, 0.0)
    );
    assert_eq!((plan.training.prompts_per_step, plan.training.seed, plan.training.shuffle_dataset), (8, 42, true));
    assert_eq!((plan.checkpoints.every_steps, plan.checkpoints.keep_last, plan.checkpoints.keep_best), (20, 3, 1));
    assert_eq!(
        (plan.rewards[0].name.as_str(), plan.rewards[0].weight, plan.rewards[0].required),
        ("length", 1.0, true)
    );
    assert_eq!(plan.eval, None);
    // One epoch: 64 rows in blocks of 8.
    assert_eq!((plan.training.max_steps, plan.totals.epochs, plan.totals.completions), (8, 1.0, 256));
}

#[test]
fn the_example_of_the_api_page_is_accepted() {
    let plan = accepted(json!({
        "name": "terse-answers", "model": "org/tiny", "dataset": {"id": rlood_types::id::DatasetId::new()},
        "eval": {"dataset": {"id": rlood_types::id::DatasetId::new()}, "every_steps": 20, "before_start": true, "num_generations": 1},
        "rewards": [{"name": "helpful", "type": "webhook", "url": "https://rm.example/score", "secret": SECRET, "weight": 1.0},
                    {"name": "length", "type": "length", "min_words": 10, "max_words": 50, "weight": 0.1}],
        "rloo": {"num_generations": 4, "beta": 0.05, "epsilon": 0.2, "num_iterations": 1},
        "sampling": {"max_completion_length": 256, "temperature": 1.0},
        "lora": {"r": 16, "alpha": 32, "target_modules": "all-linear"},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-5, "max_grad_norm": 1.0},
        "training": {"prompts_per_step": 8, "max_steps": 200, "seed": 42},
        "checkpoints": {"every_steps": 20, "keep_last": 3, "keep_best": 1},
        "metadata": {"team": "x"}
    }))
    .plan;
    assert_eq!(plan.training.max_steps, 200);
    assert_eq!((plan.totals.epochs, plan.totals.generation_blocks, plan.totals.completions), (25.0, 200, 6400));
    let eval = plan.eval.unwrap();
    assert_eq!((eval.every_steps, eval.before_start, eval.num_generations, eval.temperature), (20, true, 1, 0.0));
    assert!(
        matches!(&plan.rewards[0].kind, RewardKind::Webhook(webhook) if webhook.service.max_concurrency == 8 && webhook.service.deadline_ms == 300_000)
    );
}

#[test]
fn all_errors_come_at_once() {
    let errors = errors(json!({
        "modle": "x", "rewards": [{"type": "lenght"}, {"type": "regex", "pattern": "("}],
        "rloo": {"num_generations": 1, "beta": "high"}, "lora": {"r": 0}, "training": {"max_steps": 0}
    }));
    let mut pointers: Vec<_> = errors.iter().map(|error| error.pointer.as_str()).collect();
    pointers.sort_unstable();
    assert_eq!(
        pointers,
        [
            "/dataset",
            "/lora/r",
            "/model",
            "/modle",
            "/rewards/0/type",
            "/rewards/1/pattern",
            "/rloo/beta",
            "/rloo/num_generations",
            "/training/max_steps"
        ]
    );
}

#[test]
fn unknown_fields_are_refused_with_the_nearest_known_one() {
    refused("/rloo/num_generation", json!(4), "unknown_field", &["did you mean 'num_generations'"]);
    refused("/metdata", json!({}), "unknown_field", &["did you mean 'metadata'"]);
    refused("/rewards/0/wieght", json!(1), "unknown_field", &["did you mean 'weight'"]);
    refused("/zzz", json!(1), "unknown_field", &["known here", "rewards"]);
    refused("/learning_rate", json!(1e-5), "unknown_field", &["/optimizer/learning_rate"]);
    refused("/training/epsilon", json!(0.2), "unknown_field", &["/rloo/epsilon"]);
}

#[test]
fn settings_for_interruptions_reach_the_plan_and_are_absent_where_they_are_not_set() {
    let mut document = with("/training/max_attempts", json!(5));
    document["checkpoints"] = json!({"every_seconds": 60});
    let plan = accepted(document).plan;
    assert_eq!((plan.training.max_attempts, plan.checkpoints.every_seconds), (Some(5), Some(60)));
    assert_eq!(plan.checkpoints.every_steps, 20, "seconds stand beside the steps");
    // Neither setting affects whether a checkpoint can be resumed from.
    let without = accepted(minimal()).plan;
    let same = |plan: &rlood_types::spec::Plan| {
        let mut identity = rlood_types::spec::resume_identity(plan);
        identity["dataset"].take();
        identity
    };
    assert_eq!(same(&plan), same(&without));
    let stored = serde_json::to_value(&without).unwrap();
    assert_eq!((stored["training"].get("max_attempts"), stored["checkpoints"].get("every_seconds")), (None, None));
}

#[test]
fn numbers_out_of_range_are_refused_with_the_reason() {
    refused("/rloo/num_generations", json!(1), "out_of_range", &["between 2 and", "not 1", "other completions"]);
    refused("/sampling/temperature", json!(0), "out_of_range", &["greater than 0", "evaluation may be greedy"]);
    refused("/lora/r", json!(0), "out_of_range", &["between 1"]);
    refused("/training/max_steps", json!(0), "out_of_range", &["between 1", "leave it out"]);
    refused("/rloo/epsilon", json!(1), "out_of_range", &["less than 1"]);
    refused("/rloo/beta", json!(-0.1), "out_of_range", &["at least 0"]);
    refused("/sampling/top_p", json!(0), "out_of_range", &["at most 1"]);
    refused("/lora/dropout", json!(1), "out_of_range", &["less than 1"]);
    refused("/training/seed", json!(-1), "out_of_range", &["between 0", "not -1"]);
    refused("/checkpoints/keep_last", json!(0), "out_of_range", &["resumes from"]);
    refused("/checkpoints/every_seconds", json!(0), "out_of_range", &["between 1", "by steps only"]);
    refused("/training/max_attempts", json!(0), "out_of_range", &["between 1 and 10000", "no limit"]);
    refused("/training/max_attempts", json!(10_001), "out_of_range", &["between 1 and 10000"]);
    refused("/rloo/reward_clip_range", json!([1, 1]), "invalid_value", &["less than the second"]);
}

#[test]
fn wrong_types_are_refused_where_they_stand() {
    refused("/rloo/num_generations", json!("4"), "invalid_type", &["a whole number", "not a string"]);
    refused("/rloo/num_generations", json!(2.5), "invalid_type", &["not 2.5"]);
    refused("/rloo", json!([]), "invalid_type", &["an object", "not a list"]);
    refused("/eval", json!(true), "invalid_type", &["not a boolean"]);
    refused_at("/metadata", json!({"a/b": 1}), "/metadata/a~1b", "invalid_type", &["not a number"]);
}

#[test]
fn a_whole_number_written_as_a_decimal_is_one() {
    assert_eq!(accepted(with("/rloo/num_generations", json!(6.0))).plan.rloo.num_generations.get(), 6);
}

#[test]
fn aliases_of_beta_are_accepted_but_not_two_at_once() {
    assert_eq!(accepted(with("/rloo/kl_coef", json!(0.1))).plan.rloo.beta, 0.1);
    assert_eq!(accepted(with("/rloo/kl_coeff", json!(0.2))).plan.rloo.beta, 0.2);
    refused_at("/rloo", json!({"beta": 0.1, "kl_coef": 0.1}), "/rloo/kl_coef", "conflict", &["'beta'"]);
}

#[test]
fn keys_of_other_trainers_are_refused_by_name() {
    for (key, words) in [
        ("value_model", "no value model"),
        ("vf_coef", "no value model"),
        ("cliprange_value", "no value model"),
        ("critic_lr", "no value model"),
        ("gamma", "advantage estimation"),
        ("lam", "advantage estimation"),
        ("cliprange", "rloo.epsilon"),
        ("use_vllm", "rollout {"),
        ("vllm_gpu_memory_utilization", "rollout {"),
        ("load_in_8bit", "8 bits"),
        ("deepspeed", "resources.devices"),
        ("per_device_train_batch_size", "prompts_per_step"),
        ("reward_funcs", "use rewards"),
    ] {
        refused(&format!("/{key}"), json!(1), "foreign_key", &[key, words]);
        refused(&format!("/rloo/{key}"), json!(1), "foreign_key", &[key, words]);
    }
    refused("/images", json!("x"), "unsupported", &["POST /datasets", "runtime \"trl\""]);
    refused("/videos", json!("x"), "unsupported", &["videos cannot be used"]);
}

#[test]
fn unimplemented_rewards_are_rejected_as_unsupported() {
    refused_at("/rewards/0", json!({"type": "judge"}), "/rewards/0/type", "unsupported", &["not supported yet"]);
}

#[test]
fn rewards_are_checked() {
    refused("/rewards", json!([]), "required", &["at least one reward"]);
    refused_at(
        "/rewards",
        json!([{"type": "length"}, {"type": "length"}]),
        "/rewards/1/name",
        "duplicate",
        &["'length'"],
    );
    refused("/rewards", json!([{"type": "length", "weight": 0}]), "invalid_value", &["every weight is 0"]);
    refused_at(
        "/rewards/0",
        json!({"type": "regex", "pattern": "(a"}),
        "/rewards/0/pattern",
        "invalid_value",
        &["regular expression", "unclosed"],
    );
    refused_at(
        "/rewards/0",
        json!({"type": "exact_match", "column": "ansewr"}),
        "/rewards/0/column",
        "missing_column",
        &["'ansewr'", "prompt, answer"],
    );
    refused_at("/rewards/0", json!({"type": "exact_match"}), "/rewards/0/column", "required", &["column"]);
    refused_at("/rewards/0", json!({"type": "contains"}), "/rewards/0/text", "required", &["column"]);
    refused_at(
        "/rewards/0",
        json!({"type": "length", "min_words": 9, "max_words": 3}),
        "/rewards/0/max_words",
        "invalid_value",
        &["no length matches"],
    );
    refused_at(
        "/rewards/0",
        json!({"type": "length", "name": "a b"}),
        "/rewards/0/name",
        "invalid_value",
        &["metric names"],
    );
    assert_eq!(
        errors(with(
            "/rewards",
            json!([{"type": "length"}, {"type": "length", "name": "l2", "weight": 0, "required": true}])
        ))
        .len(),
        1
    );
}

#[test]
fn a_webhook_s_address_and_secret_are_checked() {
    let webhook = |key: &str, value: Value| {
        let mut reward = json!({"type": "webhook", "url": "https://rm.example/score", "secret": SECRET});
        reward[key] = value;
        reward
    };
    for (key, value, words) in [
        ("url", json!("rm.example/score"), "not absolute"),
        ("url", json!("file:///etc/passwd"), "http or https"),
        ("url", json!("https://user:pw@rm.example/"), "credentials"),
        ("secret", json!("hunter2"), "whsec_"),
        ("secret", json!("whsec_AAEC"), "24 to 64"),
        ("secret", json!("whsec_!!!"), "base64"),
        ("on_invalid", json!("ignore"), "mask, zero, fail"),
    ] {
        let at = format!("/rewards/0/{key}");
        refused_at("/rewards/0", webhook(key, value), &at, "invalid_value", &[words]);
    }
    refused_at(
        "/rewards/0",
        webhook("headers", json!({"Host": "x"})),
        "/rewards/0/headers/Host",
        "invalid_value",
        &["contract itself"],
    );
}

#[test]
fn secrets_are_split_off_and_never_shown() {
    let mut document = with(
        "/rewards/0",
        json!({"type": "webhook", "name": "rm", "url": "http://127.0.0.1:9/", "secret": SECRET, "headers": {"authorization": "Bearer hush"}}),
    );
    document["dataset"] = json!({"records": [{"prompt": "a"}]});
    let (spec, errors) = JobSpec::read(document);
    assert_eq!(errors, []);
    assert_eq!(spec.secrets["rm"].secret.as_deref(), Some(SECRET));
    assert_eq!(spec.secrets["rm"].headers["authorization"], "Bearer hush");
    for shown in [spec.redacted.to_string(), format!("{spec:?}")] {
        assert!(!shown.contains("whsec_") && !shown.contains("hush"), "{shown}");
    }
}

#[test]
fn a_dataset_smaller_than_one_block_names_the_nearest_valid_value() {
    let (spec, _) = JobSpec::read(with("/rloo/steps_per_generation", json!(2)));
    let context =
        Context { model: Some(model()), dataset: Some(dataset(11)), eval_dataset: None, ..Context::default() };
    let errors = resolve(&spec, &context).unwrap_err();
    assert_eq!(
        (errors[0].pointer.as_str(), errors[0].code.as_str()),
        ("/training/prompts_per_step", "dataset_too_small")
    );
    assert!(
        errors[0].detail.contains("11 rows") && errors[0].detail.contains("nearest valid value is 5"),
        "{}",
        errors[0].detail
    );
}

#[test]
fn steps_and_epochs_follow_the_block_arithmetic() {
    let mut document = minimal();
    document["training"] = json!({"prompts_per_step": 5, "num_train_epochs": 2.5});
    document["rloo"] = json!({"steps_per_generation": 2, "num_iterations": 3, "num_generations": 2});
    // 64 rows in blocks of 10 give 6 blocks per epoch with 6 steps each.
    let plan = accepted(document).plan;
    assert_eq!((plan.training.max_steps, plan.totals.generation_blocks), (90, 15));
    assert_eq!(
        (plan.totals.prompts_per_block, plan.totals.completions_per_step, plan.totals.completions),
        (10, 10, 300)
    );
    assert_eq!((plan.totals.epochs, plan.totals.dropped_rows_per_epoch), (2.5, 4));
    refused_at(
        "/training",
        json!({"max_steps": 3, "num_train_epochs": 1}),
        "/training/num_train_epochs",
        "conflict",
        &["one of them"],
    );
}

#[test]
fn prompts_and_completions_must_fit_the_context() {
    let try_with = |document: Value, lengths: PromptLengths| {
        let (spec, errors) = JobSpec::read(document);
        assert_eq!(errors, []);
        let facts = DatasetFacts { prompt_lengths: Some(lengths), ..dataset(64) };
        resolve(
            &spec,
            &Context { model: Some(model()), dataset: Some(facts), eval_dataset: None, ..Context::default() },
        )
    };
    let long = PromptLengths { longest: 600, longest_row: 7, too_long: 2 };
    let errors = try_with(minimal(), long).unwrap_err();
    assert_eq!((errors[0].pointer.as_str(), errors[0].code.as_str()), ("/dataset", "prompt_too_long"));
    assert!(errors[0].detail.contains("2 prompts") && errors[0].detail.contains("row 7"), "{}", errors[0].detail);

    let middling = PromptLengths { longest: 400, longest_row: 0, too_long: 0 };
    let errors = try_with(with("/sampling/max_completion_length", json!(113)), middling).unwrap_err();
    assert_eq!(
        (errors[0].pointer.as_str(), errors[0].code.as_str()),
        ("/sampling/max_completion_length", "out_of_range")
    );
    assert!(errors[0].detail.contains("at most 112"), "{}", errors[0].detail);
    assert!(try_with(with("/sampling/max_completion_length", json!(112)), middling).is_ok());
    // The default length is reduced instead.
    assert_eq!(try_with(minimal(), middling).unwrap().plan.sampling.max_completion_length, 112);
}

#[test]
fn chat_prompts_need_a_chat_template() {
    let (spec, _) = JobSpec::read(minimal());
    let facts = DatasetFacts { has_chat_prompts: true, ..dataset(64) };
    let mut context = Context { model: Some(model()), dataset: Some(facts), eval_dataset: None, ..Context::default() };
    assert_eq!(resolve(&spec, &context).unwrap_err()[0].code, "no_chat_template");
    context.model = Some(ModelFacts { has_chat_template: true, ..model() });
    assert!(resolve(&spec, &context).is_ok());
}

#[test]
fn a_dataset_without_prompts_or_with_images_is_refused() {
    let (spec, _) = JobSpec::read(minimal());
    let facts = DatasetFacts { columns: vec!["question".to_owned(), "images".to_owned()], ..dataset(64) };
    let errors = resolve(
        &spec,
        &Context { model: Some(model()), dataset: Some(facts), eval_dataset: None, ..Context::default() },
    )
    .unwrap_err();
    assert_eq!(errors.iter().map(|error| error.code.as_str()).collect::<Vec<_>>(), ["missing_column", "needs_runtime"]);
    assert!(errors[0].detail.contains("question"), "{}", errors[0].detail);
}

#[test]
fn inline_records_are_checked_row_by_row() {
    let records = json!([{"prompt": "a"}, {"question": "b"}, "c", {"prompt": ""}, {"prompt": [{"role": "user"}]}, {"prompt": "d", "images": []}]);
    let (_, errors) = JobSpec::read(with("/dataset", json!({"records": records})));
    let pointers: Vec<_> = errors.iter().map(|error| error.pointer.as_str()).collect();
    assert_eq!(
        pointers,
        [
            "/dataset/records/1/prompt",
            "/dataset/records/2",
            "/dataset/records/3/prompt",
            "/dataset/records/4/prompt",
            "/dataset/records/5/images"
        ]
    );
    assert!(errors[0].detail.contains("question"), "{}", errors[0].detail);
    let (_, errors) = JobSpec::read(with("/dataset", json!({"records": []})));
    assert_eq!((errors[0].code.as_str(), errors.len()), ("empty_dataset", 1));
    let many: Vec<_> = (0..100).map(|_| json!({})).collect();
    let (_, errors) = JobSpec::read(with("/dataset", json!({"records": many})));
    assert_eq!(errors.len(), 21);
    assert!(errors[20].detail.contains("80 more"), "{}", errors[20].detail);
}

#[test]
fn doubtful_settings_are_warned_about() {
    let codes =
        |document: Value| accepted(document).warnings.into_iter().map(|warning| warning.code).collect::<Vec<_>>();
    assert_eq!(codes(with("/training/max_steps", json!(20))), Vec::<String>::new());
    assert_eq!(codes(minimal()), ["few_steps"]);
    let mut document = with("/training", json!({"max_steps": 20, "prompts_per_step": 7}));
    document["optimizer"] = json!({"learning_rate": 1e-6, "warmup_steps": 20});
    document["rewards"] = json!([{"type": "webhook", "url": "http://rm.example/", "on_invalid": "zero"}]);
    assert_eq!(
        codes(document),
        [
            "unsigned_webhook",
            "invalid_counts_as_zero",
            "incomplete_block_dropped",
            "low_learning_rate",
            "learning_rate_low_for_lora",
            "warmup_too_long"
        ]
    );
}

#[test]
fn the_estimate_counts_the_adapter() {
    let mut document = with("/lora", json!({"r": 2, "target_modules": ["down_proj", "q_proj"]}));
    document["sampling"] = json!({"max_completion_length": 10});
    let Resolution { plan, estimate, .. } = accepted(document);
    assert_eq!(plan.lora.as_ref().unwrap().target_modules, ["q_proj", "down_proj"]);
    // 2 layers · r 2 · ((8 + 16) + (16 + 8)).
    assert_eq!((estimate.trainable_parameters, estimate.optimizer_bytes), (Some(192), Some(8 * 192)));
    assert_eq!((estimate.gradient_bytes, estimate.checkpoint_bytes), (Some(4 * 192), Some(12 * 192)));
    // 2 · 4 bytes · 2 layers · 2 heads · 4 wide · (8 prompts · 112 tokens, each once, + 32 completions · 16 tokens). Space is
    // allocated in blocks of 16 tokens.
    assert_eq!(estimate.kv_cache_bytes, Some(180_224));
}

#[test]
fn labels_can_be_changed_and_nothing_else() {
    let labels = rlood_types::spec::read_labels(&json!({"name": "n", "metadata": {"a": "b"}, "priority": 5})).unwrap();
    assert_eq!(
        (labels.name.flatten().as_deref(), labels.priority, labels.metadata.unwrap()["a"].as_str()),
        (Some("n"), Some(5), "b")
    );
    let errors = rlood_types::spec::read_labels(&json!({"state": "running", "priority": 1.5})).unwrap_err();
    assert_eq!(errors.iter().map(|error| error.pointer.as_str()).collect::<Vec<_>>(), ["/priority", "/state"]);
}

/// Generates JSON of any shape, with many of the words that a job knows.
fn anything() -> impl Strategy<Value = Value> {
    let word = prop::sample::select(vec![
        "model",
        "dataset",
        "records",
        "id",
        "prompt",
        "eval",
        "rewards",
        "type",
        "webhook",
        "url",
        "secret",
        "headers",
        "name",
        "weight",
        "rloo",
        "num_generations",
        "beta",
        "kl_coef",
        "reward_clip_range",
        "sampling",
        "temperature",
        "stop",
        "lora",
        "r",
        "target_modules",
        "optimizer",
        "learning_rate",
        "training",
        "max_steps",
        "num_train_epochs",
        "seed",
        "metadata",
        "priority",
        "length",
        "regex",
        "pattern",
        "all-linear",
        "x/~",
        "",
    ]);
    let number = prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from)
    ];
    let leaf =
        prop_oneof![Just(Value::Null), any::<bool>().prop_map(Value::from), number, word.clone().prop_map(Value::from)];
    leaf.prop_recursive(5, 64, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((word.clone(), inner), 0..6).prop_map(|pairs| Value::Object(
                pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
            )),
        ]
    })
}

proptest! {
    #[test]
    fn no_document_makes_it_panic_and_every_pointer_leads_into_the_document(document in anything()) {
        let (spec, mut errors) = JobSpec::read(document.clone());
        let context = Context { model: Some(model()), dataset: Some(dataset(64)), eval_dataset: spec.eval.as_ref().map(|_| dataset(4)), ..Context::default() };
        errors.extend(resolve(&spec, &context).err().unwrap_or_default());
        for error in errors {
            // The pointer to a missing field leads to where it should be.
            let parent = error.pointer.rsplit_once('/').map_or("", |(parent, _)| parent);
            let missing_section = ["/training", "/sampling", "/rloo"].contains(&parent);
            prop_assert!(missing_section || document.pointer(parent).is_some(), "{error:?}");
        }
    }

    #[test]
    fn a_plan_submitted_again_is_the_same_plan(
        steps in 1_u64..1000, generations in 2_u32..9, beta in 0.0..1.0_f64, seed in 0_u64..(1 << 53), rslora in any::<bool>(),
    ) {
        let mut document = with("/rloo", json!({"num_generations": generations, "beta": beta}));
        document["training"] = json!({"max_steps": steps, "seed": seed, "prompts_per_step": 3});
        document["lora"] = json!({"use_rslora": rslora, "target_modules": ["v_proj", "k_proj"]});
        document["eval"] = json!({"dataset": document["dataset"]});
        let facts = dataset(64);
        let resolved = |document: Value| {
            let (spec, errors) = JobSpec::read(document);
            assert_eq!(errors, []);
            let context = Context { model: Some(model()), dataset: Some(facts.clone()), eval_dataset: Some(facts.clone()), ..Context::default() };
            resolve(&spec, &context).unwrap().plan
        };
        let plan = resolved(document);
        prop_assert_eq!(&resolved(rlood_types::spec::submittable(&plan)), &plan);
    }
}

#[test]
fn the_number_of_reported_errors_is_limited() {
    let flood: serde_json::Map<String, Value> = (0..5000).map(|n| (format!("k{n}"), Value::Null)).collect();
    let (_, errors) = JobSpec::read(Value::Object(flood));
    assert_eq!(errors.len(), 1001);
    assert!(errors.iter().any(|error| error.code == "more_errors"));
}

#[test]
fn evaluation_may_hold_out_a_fraction_and_have_rewards_of_its_own() {
    let plan = accepted(with("/eval", json!({"fraction": 0.1}))).plan;
    let eval = plan.eval.clone().unwrap();
    assert_eq!((eval.fraction, eval.held_out_rows, eval.num_prompts()), (Some(0.1), Some(6), 6));
    assert_eq!(eval.dataset, plan.dataset);
    // 58 of 64 rows train: seven blocks of eight, with two rows left over.
    assert_eq!((plan.training.max_steps, plan.totals.dropped_rows_per_epoch), (7, 2));
    let again = rlood_types::spec::submittable(&plan);
    assert_eq!(again["eval"]["fraction"], json!(0.1));
    assert!(again["eval"].get("dataset").is_none() && again["eval"].get("held_out_rows").is_none(), "{again}");

    refused_at("/eval", json!({}), "/eval/dataset", "required", &["fraction"]);
    refused_at("/eval", json!({"fraction": 1.5}), "/eval/fraction", "out_of_range", &["less than 1"]);
    let both = json!({"fraction": 0.1, "dataset": {"id": rlood_types::id::DatasetId::new()}});
    refused_at("/eval", both, "/eval/fraction", "conflict", &["not both"]);
    let document = with("/eval", json!({"fraction": 0.95}));
    let found = errors(document);
    assert!(found[0].detail.contains("holds out 61"), "{found:?}");

    let own = json!({"fraction": 0.2, "top_p": 0.9, "temperature": 1.0, "rewards": [
        {"type": "webhook", "name": "judge", "url": "https://rm.example/score", "secret": SECRET, "headers": {"x-key": "k"}}]});
    let (spec, found) = JobSpec::read(with("/eval", own.clone()));
    assert_eq!(found, []);
    assert_eq!(spec.secrets.keys().collect::<Vec<_>>(), ["eval:judge"]);
    assert!(!spec.redacted.to_string().contains("whsec_") && !spec.redacted.to_string().contains("x-key"));
    let plan = accepted(with("/eval", own)).plan;
    let eval = plan.eval.as_ref().unwrap();
    assert_eq!((eval.top_p, eval.top_k), (Some(0.9), None));
    assert_eq!(eval.rewards.as_ref().unwrap()[0].name, "judge");
    assert_eq!(rlood_types::spec::submittable(&plan)["eval"]["rewards"][0]["name"], "judge");
    let column = json!({"fraction": 0.2, "rewards": [{"type": "exact_match", "column": "reply"}]});
    refused_at("/eval", column, "/eval/rewards/0/column", "missing_column", &["reply", "answer"]);
}

#[test]
fn rows_for_the_verdict_alone_are_taken_where_there_are_enough() {
    // 64 rows are too few: a tenth of them would be 6.
    let eval = accepted(with("/eval", json!({"fraction": 0.1}))).plan.eval.unwrap();
    assert_eq!((eval.test_fraction, eval.test_rows, eval.auto_verdict), (None, None, true));
    let resolved = accepted(with("/eval", json!({"fraction": 0.1, "test_fraction": 0.2, "auto_verdict": false})));
    assert!(resolved.warnings.iter().any(|warning| warning.code == "no_test_rows"), "{:?}", resolved.warnings);
    assert!(!resolved.plan.eval.unwrap().auto_verdict);

    let (spec, found) = JobSpec::read(with("/eval", json!({"fraction": 0.1})));
    assert_eq!(found, []);
    let mut many = context();
    many.dataset.as_mut().unwrap().num_rows = 2000;
    let plan = resolve(&spec, &many).unwrap().plan;
    let eval = plan.eval.as_ref().unwrap();
    assert_eq!((eval.held_out_rows, eval.test_fraction, eval.test_rows), (Some(200), Some(0.1), Some(200)));
    // 1,600 of 2,000 rows train, in blocks of eight.
    assert_eq!(plan.training.max_steps, 200);
    // A plan that is submitted again is unchanged, even one created before such rows existed.
    let again = rlood_types::spec::submittable(&plan);
    assert_eq!((&again["eval"]["test_fraction"], again["eval"].get("test_rows")), (&json!(0.1), None));
    let mut old = serde_json::to_value(&plan).unwrap();
    for key in ["test_fraction", "test_rows"] {
        old["eval"].as_object_mut().unwrap().remove(key);
    }
    let old: rlood_types::spec::Plan = serde_json::from_value(old).unwrap();
    assert_eq!(rlood_types::spec::submittable(&old)["eval"]["test_fraction"], json!(0.0));
    let (spec, _) = JobSpec::read(with("/eval", json!({"fraction": 0.1, "test_fraction": 0})));
    let none = resolve(&spec, &many).unwrap().plan.eval.unwrap();
    assert_eq!((none.held_out_rows, none.test_fraction, none.test_rows), (Some(200), None, None));
}

#[test]
fn a_test_dataset_and_a_guard_are_read_with_their_rewards_and_refused_where_they_cannot_be() {
    let records = json!({"records": [{"prompt": "p", "answer": "a"}]});
    let guard = json!({"dataset": records, "margin": 0.05, "rewards": [
        {"type": "webhook", "name": "safe", "url": "https://rm.example/score", "secret": SECRET}]});
    let document = with("/eval", json!({"fraction": 0.1, "test_dataset": records, "guard": guard}));
    let (spec, found) = JobSpec::read(document);
    assert_eq!(found, []);
    assert_eq!(spec.secrets.keys().collect::<Vec<_>>(), ["guard:safe"]);
    assert!(!spec.redacted.to_string().contains("whsec_"));
    let facts = DatasetFacts::of_records(&[json!({"prompt": "p", "answer": "a"})]);
    let context = Context { test_dataset: Some(facts.clone()), guard_dataset: Some(facts), ..context() };
    let plan = resolve(&spec, &context).unwrap().plan;
    let eval = plan.eval.as_ref().unwrap();
    assert_eq!((eval.test_fraction, eval.test_dataset.as_ref().unwrap().num_rows), (None, 1));
    let guard = eval.guard.as_ref().unwrap();
    assert_eq!((guard.margin, guard.rewards.as_ref().unwrap()[0].name.as_str()), (0.05, "safe"));
    let again = rlood_types::spec::submittable(&plan);
    assert!(again["eval"]["guard"]["dataset"]["id"].is_string() && again["eval"]["test_dataset"]["id"].is_string());

    let both = json!({"fraction": 0.1, "test_fraction": 0.1, "test_dataset": records});
    refused_at("/eval", both, "/eval/test_dataset", "conflict", &["not both"]);
    refused_at(
        "/eval",
        json!({"fraction": 0.6, "test_fraction": 0.5}),
        "/eval/test_fraction",
        "out_of_range",
        &["below 1"],
    );
    refused_at("/eval", json!({"fraction": 0.1, "guard": {}}), "/eval/guard/dataset", "required", &["records"]);
    let odd = json!({"fraction": 0.1, "guard": {"dataset": records, "margin": -1}});
    refused_at("/eval", odd, "/eval/guard/margin", "out_of_range", &[]);
    let weighted = json!({"fraction": 0.1, "test_dataset": [{"name": "a", "records": [], "weight": 2}]});
    let (_, found) = JobSpec::read(with("/eval", weighted));
    assert!(found.iter().any(|error| error.pointer == "/eval/test_dataset/0/weight"), "{found:?}");
}

#[test]
fn a_metric_that_the_job_cannot_produce_is_refused_with_a_suggestion() {
    let plan = accepted(minimal()).plan;
    assert_eq!(plan.checkpoints.metric_for_best.as_deref(), Some("reward"));
    let plan = accepted(with("/eval", json!({"fraction": 0.1}))).plan;
    assert_eq!(plan.checkpoints.metric_for_best.as_deref(), Some("eval_reward"));
    assert_eq!(plan.checkpoints.greater_is_better, Some(true));
    assert_eq!(
        accepted(with("/checkpoints/metric_for_best", json!("kl"))).plan.checkpoints.greater_is_better,
        Some(false)
    );

    let at = "/checkpoints/metric_for_best";
    refused(at, json!("rewrad"), "unknown_metric", &["did you mean 'reward'"]);
    refused(at, json!("eval_reward"), "unknown_metric", &["no evaluation", "eval {fraction}"]);
    refused(at, json!("rewards/lenght/mean"), "unknown_metric", &["rewards/length/mean"]);
    // Durations depend on the machine, so two runs cannot be compared by them.
    refused(at, json!("step_time"), "unknown_metric", &[]);
    let mut document = with(at, json!("kl"));
    document["rloo"] = json!({"beta": 0});
    assert!(errors(document)[0].detail.contains("rloo.beta is 0"));
}

#[test]
fn early_stopping_needs_evaluations() {
    let mut document = with("/early_stopping", json!({"patience": 2, "min_delta": 0.01}));
    let found = errors(document.clone());
    assert_eq!((found[0].pointer.as_str(), found[0].code.as_str()), ("/early_stopping", "needs_eval"));
    document["eval"] = json!({"fraction": 0.1});
    let plan = accepted(document.clone()).plan;
    let stopping = plan.early_stopping.clone().unwrap();
    assert_eq!((stopping.metric.as_str(), stopping.greater_is_better), ("eval_reward", true));
    assert_eq!((stopping.patience, stopping.min_delta), (2, 0.01));
    assert_eq!(rlood_types::spec::submittable(&plan)["early_stopping"]["metric"], "eval_reward");
    document["early_stopping"]["metric"] = json!("eval_rewards/length/std");
    assert!(!accepted(document.clone()).plan.early_stopping.unwrap().greater_is_better);
    document["early_stopping"]["metric"] = json!("eval_rewrd");
    let found = errors(document);
    assert_eq!((found[0].pointer.as_str(), found[0].code.as_str()), ("/early_stopping/metric", "unknown_metric"));
    assert!(found[0].detail.contains("'eval_reward'"), "{found:?}");
}

#[test]
fn the_doctor_s_rules_are_set_by_name() {
    use rlood_types::doctor::{OnAlert, Rule};
    let doctor = json!({"on_alert": "pause", "rules": {
        "kl_explosion": {"on_alert": "stop"}, "slow_reward": false, "cold_start": {"enabled": false}}});
    let plan = accepted(with("/doctor", doctor)).plan;
    assert_eq!(plan.doctor.on_alert, OnAlert::Pause);
    let rule = |rule: Rule| plan.doctor.rules.get(&rule).map(|set| (set.enabled, set.on_alert));
    assert_eq!(rule(Rule::KlExplosion), Some((true, Some(OnAlert::Stop))));
    assert_eq!((rule(Rule::SlowReward), rule(Rule::ColdStart)), (Some((false, None)), Some((false, None))));
    assert_eq!(rule(Rule::NonFinite), None);
    let again = rlood_types::spec::submittable(&plan);
    assert_eq!(again["doctor"]["rules"]["kl_explosion"]["on_alert"], "stop");
    refused("/doctor/on_alert", json!("explode"), "invalid_value", &["note", "pause", "stop"]);
    refused("/doctor/rules/kl_explosoin", json!({}), "unknown_field", &["kl_explosion"]);
}

#[test]
fn an_adapter_s_default_learning_rate_is_fifty_times_that_of_full_fine_tuning() {
    assert_eq!(accepted(minimal()).plan.optimizer.learning_rate, 5e-5);
    assert_eq!(accepted(with("/lora", Value::Null)).plan.optimizer.learning_rate, 1e-6);
    let advice = |document: Value| {
        let warnings = accepted(document).warnings;
        warnings.into_iter().find(|warning| warning.code == "learning_rate_low_for_lora").map(|warning| warning.detail)
    };
    for rate in [1e-6, 1e-5] {
        let detail = advice(with("/optimizer/learning_rate", json!(rate))).unwrap();
        assert!(detail.contains("hidden size 8") && detail.contains("1e-4"), "{detail}");
    }
    assert_eq!(advice(minimal()), None);
    let mut full = with("/lora", Value::Null);
    full["optimizer"] = json!({"learning_rate": 1e-6});
    assert_eq!(advice(full), None);
}

#[test]
fn equal_prompts_stay_together_and_prompts_on_both_sides_are_counted() {
    let keys = |prompts: &[u64]| -> Option<Vec<PromptKey>> {
        Some(prompts.iter().map(|prompt| prompt_key(&json!(format!("prompt {prompt}")))).collect())
    };
    let with_facts = |document: Value, train: Vec<u64>, (eval, test): (&[u64], &[u64])| {
        let (spec, errors) = JobSpec::read(document);
        assert_eq!(errors, []);
        let facts = |prompts: &[u64], sha256: &str| DatasetFacts {
            prompt_keys: keys(prompts),
            sha256: sha256.to_owned(),
            ..dataset(prompts.len() as u64)
        };
        let context = Context {
            model: Some(model()),
            dataset: Some(facts(&train, "aa")),
            eval_dataset: (!eval.is_empty()).then(|| facts(eval, "bb")),
            test_dataset: (!test.is_empty()).then(|| facts(test, "cc")),
            ..Context::default()
        };
        resolve(&spec, &context)
    };
    // Forty rows of ten prompts: a tenth is one prompt with its four rows.
    let repeated: Vec<u64> = (0..40).map(|row| row % 10).collect();
    let plan = with_facts(with("/eval", json!({"fraction": 0.1})), repeated.clone(), (&[], &[])).unwrap().plan;
    assert_eq!(plan.eval.unwrap().held_out_rows, Some(4));
    assert_eq!(plan.arithmetic, Arithmetic::LATEST);
    let plan = with_facts(with("/eval", json!({"fraction": 0.05})), repeated.clone(), (&[], &[])).unwrap().plan;
    assert_eq!(plan.eval.unwrap().held_out_rows, Some(4), "half a prompt cannot be held out");
    let errors = with_facts(with("/eval", json!({"fraction": 0.1})), vec![3; 40], (&[], &[])).unwrap_err();
    assert_eq!((errors[0].pointer.as_str(), errors[0].code.as_str()), ("/eval/fraction", "nothing_to_hold_out"));

    let id = rlood_types::id::DatasetId::new;
    let own = with("/eval", json!({"dataset": {"id": id()}, "test_dataset": {"id": id()}}));
    let shared = |eval: &[u64], test: &[u64]| {
        let warnings = with_facts(own.clone(), repeated.clone(), (eval, test)).unwrap().warnings;
        let of = |code: &str| {
            warnings.iter().find(|warning| warning.code == code).map_or_else(String::new, |found| found.detail.clone())
        };
        (of("eval_prompts_in_training"), of("test_prompts_in_training"))
    };
    let (eval, test) = shared(&[8, 9, 10, 9], &[20, 1]);
    assert!(eval.starts_with("3 of 4 evaluation prompts") && test.starts_with("1 of 2 test prompts"), "{eval}, {test}");
    assert_eq!(shared(&[10, 11], &[12, 13]), (String::new(), String::new()));
}
