//! Warm-ups: equal to torch and PEFT, exact after every interruption; and RLOO after a warm-up equals RLOO in a job
//! that begins with the warmed weights.

use std::path::{Path, PathBuf};

use rlood_engine::backend::BackendKind;
use rlood_engine::error::EngineError;
use rlood_engine::host::{PromptRow, StopReason};
use rlood_engine::model::{Adapter, Policy};
use rlood_types::dataset::answered;
use rlood_types::event::{Event, Phase, SamplePhase};
use rlood_types::id::{CheckpointId, DatasetId};
use rlood_types::spec::{
    ComputeDtype, DatasetPlan, EvalPlan, LoraPlan, LrSchedulerType, OptimizerKind, Plan, Reference, WarmStartPlan,
    WarmUpPlan, WarmUpReference, prompt_key,
};
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};

use crate::kinds::kinds;
use crate::train::{Start, TestHost, model_dir, plan, rows, train, train_model};

/// Relative tolerance of losses; the fixtures hold torch's own numbers.
const LOSS: f64 = 1e-5;
/// Absolute tolerance of weights after five updates of about the learning rate each.
const WEIGHTS: f32 = 2e-5;

fn row(value: &Value) -> PromptRow {
    let Value::Object(mut columns) = value.clone() else { panic!("{value}") };
    PromptRow { prompt: columns.shift_remove("prompt").unwrap(), columns }
}

fn warm_up_of(num_rows: u64, steps: u64, batch_size: u32, reference: WarmUpReference) -> WarmUpPlan {
    let dataset = DatasetPlan::new(DatasetId::new(), "answers".into(), num_rows);
    WarmUpPlan { dataset, steps, batch_size, learning_rate: 0.02, reference, longest_row_tokens: None }
}

/// Six rows made of the tiny model's words, all of them texts.
fn answers() -> Vec<PromptRow> {
    let rows = [
        ("w0 w1", "w2 w3"),
        ("w5", "w6"),
        ("w7 w8", "w9 w10 w11"),
        ("w0 w1", "w4"),
        ("w3", "w4 w5 w6 w7"),
        ("w12 w13", "w14"),
    ];
    rows.map(|(prompt, completion)| row(&json!({"prompt": prompt, "completion": format!(" {completion}")}))).to_vec()
}

/// A plan with four warm-up steps, then three RLOO steps.
fn warmed(reference: WarmUpReference) -> Plan {
    Plan { warm_up: Some(warm_up_of(6, 4, 4, reference)), ..plan() }
}

fn start() -> Start {
    Start { warm_up_rows: answers(), ..Start::default() }
}

fn run(plan: &Plan, start: Start) -> TestHost {
    let mut host = TestHost::default();
    assert_eq!(train(plan, rows(), start, &mut host).expect("trains"), None);
    host
}

fn weights_of(dir: &Path) -> Vec<u8> {
    let name = if dir.join("model.safetensors").exists() { "model.safetensors" } else { "adapter_model.safetensors" };
    std::fs::read(dir.join(name)).unwrap()
}

fn at(host: &TestHost, step: u64) -> PathBuf {
    host.saved
        .iter()
        .find(|saved| saved.step == step)
        .unwrap_or_else(|| panic!("no checkpoint of step {step}"))
        .dir
        .clone()
}

#[test]
fn a_warm_up_is_that_of_torch_and_peft() {
    let folder = rlood_test_support::fixture("warm_up");
    let mut cases: Vec<PathBuf> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    cases.sort();
    assert!(cases.len() >= 3, "{cases:?}");
    for case in cases {
        for kind in kinds() {
            // Splitting into single rows gives the same sums except for rounding.
            for micro_batch_tokens in [4096, 16] {
                check_case(&case, kind, micro_batch_tokens);
            }
        }
    }
}

fn check_case(case: &Path, kind: BackendKind, micro_batch_tokens: u32) {
    let expected: Value = serde_json::from_slice(&std::fs::read(case).unwrap()).unwrap();
    let at = format!("{} on {kind:?}, {micro_batch_tokens} tokens", case.display());
    let model_dir = rlood_test_support::fixture("parity").join(expected["model"].as_str().unwrap());
    let settings = &expected["settings"];
    let number = |name: &str| settings[name].as_f64().unwrap();
    let full = expected["full"] == true;
    let mut plan = plan();
    let steps = settings["steps"].as_u64().unwrap();
    plan.lora = (!full).then(|| {
        let modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        LoraPlan { target_modules: modules.map(String::from).to_vec(), ..LoraPlan::all_linear(4, 8.0) }
    });
    plan.warm_up = Some(WarmUpPlan {
        learning_rate: if full { 5e-4 } else { number("learning_rate") },
        ..warm_up_of(7, steps, settings["batch_size"].as_u64().unwrap() as u32, WarmUpReference::Base)
    });
    plan.optimizer.adam_beta1 = number("adam_beta1");
    plan.optimizer.adam_beta2 = number("adam_beta2");
    plan.optimizer.adam_epsilon = number("adam_epsilon");
    plan.optimizer.weight_decay = number("weight_decay");
    plan.optimizer.max_grad_norm = number("max_grad_norm");
    plan.training.shuffle_dataset = false;
    plan.training.micro_batch_tokens = micro_batch_tokens;
    // The settings of the following RLOO steps, such as temperature and schedule, have no effect on the warm-up.
    plan.training.max_steps = 1;
    plan.sampling.temperature = 0.7;
    plan.optimizer.lr_scheduler_type = LrSchedulerType::Linear;
    plan.rloo.beta = 0.0;
    let reference = Reference::Base;
    plan.warm_start =
        (!full).then(|| WarmStartPlan { checkpoint: Some(CheckpointId::new()), adapter: None, reference });
    let rows: Vec<PromptRow> = expected["rows"].as_array().unwrap().iter().map(row).collect();

    let text = rlood_engine::text::Text::load(&model_dir).unwrap();
    for (row, tokens) in rows.iter().zip(expected["tokens"].as_array().unwrap()) {
        let answered = answered(&row.prompt, &row.columns).unwrap();
        let (prompt, answer) = text.answered_ids(&answered, &Map::new()).unwrap();
        assert_eq!(
            (json!(prompt), json!(answer)),
            (tokens["prompt"].clone(), tokens["answer"].clone()),
            "{at}: {row:?}"
        );
    }

    let mut host = TestHost::default();
    let prompts = ["one", "two"].map(|prompt| PromptRow { prompt: json!(prompt), columns: Map::new() }).to_vec();
    let start = Start {
        warm_up_rows: rows,
        initial_adapter: (!full).then(|| model_dir.join("lora")),
        backend: Some(kind),
        ..Start::default()
    };
    train_model(&model_dir, &plan, prompts, start, &mut host).unwrap_or_else(|error| panic!("{at}: {error}"));
    let metrics = host.metrics(SamplePhase::Train);
    for (name, key) in [("warm_up/loss", "losses"), ("warm_up/grad_norm", "grad_norms")] {
        for ((_, metrics), expected) in metrics.iter().zip(expected[key].as_array().unwrap()) {
            let (found, expected) = (metrics[name].unwrap(), expected.as_f64().unwrap());
            assert!((found - expected).abs() <= 10.0 * LOSS * expected.abs(), "{at}: {name} {found} {expected}");
            assert!(
                name != "warm_up/loss" || (found - expected).abs() <= LOSS * expected.abs(),
                "{at}: {found} {expected}"
            );
        }
    }
    let file = if full { "model.safetensors" } else { "adapter_model.safetensors" };
    let found = std::fs::read(self::at(&host, steps).join(file)).unwrap();
    let expected = std::fs::read(case.with_extension("safetensors")).unwrap();
    let (found, expected) = (SafeTensors::deserialize(&found).unwrap(), SafeTensors::deserialize(&expected).unwrap());
    let values = |tensors: &SafeTensors<'_>, name: &str| -> Vec<f32> {
        let tensor = tensors.tensor(name).unwrap_or_else(|error| panic!("{at}: {name}: {error}"));
        tensor.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    assert!(full || found.len() == expected.len(), "{at}");
    let mut worst = 0f32;
    for name in expected.names() {
        let (found, expected) = (values(&found, name), values(&expected, name));
        assert_eq!(found.len(), expected.len());
        worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(worst, f32::max);
    }
    println!("{at}: weights differ by at most {worst:.1e}");
    assert!(worst <= WEIGHTS, "{at}: weights differ by {worst}");
}

/// The share of the answers' tokens whose logit is the largest, by the full logits of a checkpoint's weights.
fn accuracy_of(checkpoint: &Path, kind: BackendKind) -> f64 {
    let mut policy = Policy::load(&model_dir(), kind).unwrap();
    policy.load_lora(checkpoint).unwrap();
    let text = rlood_engine::text::Text::load(&model_dir()).unwrap();
    let (mut top, mut tokens) = (0, 0);
    for row in answers() {
        let answered = answered(&row.prompt, &row.columns).unwrap();
        let (prompt, answer) = text.answered_ids(&answered, &Map::new()).unwrap();
        let before: Vec<usize> = (0..answer.len()).map(|token| prompt.len() + token - 1).collect();
        let logits = policy.logits(&[prompt, answer.clone()].concat(), &before, Adapter::On).unwrap();
        for (logits, token) in logits.iter().zip(&answer) {
            top += usize::from(logits.iter().all(|logit| *logit <= logits[*token as usize]));
            tokens += 1;
        }
    }
    top as f64 / tokens as f64
}

#[test]
fn the_token_accuracy_is_the_share_of_answer_tokens_that_the_model_would_choose() {
    let mut plan = warmed(WarmUpReference::Base);
    plan.checkpoints.every_steps = 1;
    // Every step trains on all six rows.
    plan.warm_up = Some(warm_up_of(6, 16, 6, WarmUpReference::Base));
    for kind in kinds() {
        let host = run(&plan, Start { backend: Some(kind), ..start() });
        let metrics = host.metrics(SamplePhase::Train);
        let reported = |step: usize| metrics[step - 1].1["warm_up/token_accuracy"].unwrap();
        for step in [2, 9, 16] {
            // A step reports the accuracy of the weights before its update.
            let expected = accuracy_of(&at(&host, step as u64 - 1), kind);
            assert!((reported(step) - expected).abs() < 1e-12, "{kind:?}: {} {expected}", reported(step));
        }
        assert!(reported(16) > reported(1), "{kind:?}: it learns: {} to {}", reported(1), reported(16));
        assert!(!metrics[16].1.contains_key("warm_up/token_accuracy"));
    }
}

/// Every kind of run with a warm-up.
fn variants() -> Vec<(&'static str, Plan)> {
    let base = || warmed(WarmUpReference::Warmed);
    let with = |change: fn(&mut Plan)| {
        let mut plan = base();
        change(&mut plan);
        plan
    };
    let full = |plan: &mut Plan| {
        plan.lora = None;
        plan.optimizer.learning_rate = 1e-3;
        plan.warm_up.as_mut().unwrap().learning_rate = 1e-3;
    };
    let mut all = vec![
        ("warmed reference", base()),
        ("base reference", warmed(WarmUpReference::Base)),
        ("no reference", with(|plan| plan.rloo.beta = 0.0)),
        ("several uses of a block", with(|plan| (plan.rloo.num_iterations, plan.rloo.steps_per_generation) = (2, 2))),
        ("overlap", with(|plan| (plan.rloo.overlap, plan.rloo.steps_per_generation) = (true, 2))),
        ("dropout", with(|plan| plan.lora.as_mut().unwrap().dropout = 0.25)),
        ("8 bits", with(|plan| plan.optimizer.kind = OptimizerKind::Adamw8bit)),
        ("bf16", with(|plan| plan.training.dtype = ComputeDtype::Bf16)),
        (
            "gradient checkpointing, small micro-batches",
            with(|plan| {
                plan.training.gradient_checkpointing = true;
                plan.training.micro_batch_tokens = 16;
            }),
        ),
    ];
    for reference in [WarmUpReference::Warmed, WarmUpReference::Base] {
        let mut plan = warmed(reference);
        full(&mut plan);
        all.push((if reference == WarmUpReference::Base { "full, base reference" } else { "full" }, plan));
    }
    for (_, plan) in &mut all {
        plan.training.max_steps = 5;
        plan.checkpoints.every_steps = 1;
    }
    all
}

#[test]
fn resuming_from_every_step_gives_the_same_bytes_and_metrics() {
    for (name, plan) in variants() {
        let whole = run(&plan, start());
        let steps: Vec<u64> = whole.saved.iter().map(|saved| saved.step).collect();
        assert_eq!(steps, (1..=9).collect::<Vec<_>>(), "{name}: the job counts on from its warm-up");
        let metrics = whole.comparable_metrics();
        let last = weights_of(&at(&whole, 9));
        for saved in &whole.saved[..8] {
            let rest = run(&plan, Start { resume: Some(saved.dir.clone()), ..start() });
            assert!(weights_of(&at(&rest, 9)) == last, "{name}: resumed from step {}", saved.step);
            assert_eq!(
                rest.comparable_metrics(),
                metrics[saved.step as usize..],
                "{name}: resumed from {}",
                saved.step
            );
            let reference = saved.dir.join("reference.safetensors").exists();
            assert_eq!(reference, saved.step > 4 && plan.has_warmed_reference(), "{name}: step {}", saved.step);
        }
        for (step, metrics) in &metrics {
            assert_eq!(metrics.contains_key("warm_up/loss"), *step <= 4, "{name}: step {step}");
            assert_eq!(metrics.contains_key("loss"), *step > 4, "{name}: step {step}");
        }
        let losses: Vec<f64> = metrics[..4].iter().map(|(_, metrics)| metrics["warm_up/loss"].unwrap()).collect();
        assert!(losses[3] < losses[0], "{name}: it learns: {losses:?}");
        let uses = plan.rloo.num_iterations * plan.rloo.steps_per_generation;
        for (step, metrics) in &metrics[4..] {
            let exact = plan.lora.as_ref().is_none_or(|lora| lora.dropout == 0.0) && !plan.rloo.overlap;
            if exact && (step - 5).is_multiple_of(u64::from(uses)) {
                assert_eq!(metrics["sampling/log_ratio_max"], Some(0.0), "{name}: step {step}");
            }
        }
        let kl = metrics[4].1.get("kl_sequence").copied().flatten();
        match plan.warm_up.as_ref().unwrap().reference {
            _ if plan.rloo.beta == 0.0 => assert_eq!(kl, None, "{name}"),
            WarmUpReference::Warmed => assert_eq!(kl, Some(0.0), "{name}: the reference is the warmed policy"),
            WarmUpReference::Base => assert_ne!(kl, Some(0.0), "{name}: the reference is the base model"),
        }
    }
}

#[test]
fn rloo_after_a_warm_up_equals_a_job_that_starts_from_the_warmed_weights() {
    for (name, plan) in variants() {
        let whole = run(&plan, start());
        let reference = match plan.warm_up.as_ref().unwrap().reference {
            WarmUpReference::Base => Reference::Base,
            WarmUpReference::Warmed => Reference::Initial,
        };
        let warm_start = WarmStartPlan { checkpoint: Some(CheckpointId::new()), adapter: None, reference };
        let alone = Plan { warm_up: None, warm_start: Some(warm_start), ..plan };
        let rest = run(&alone, Start { initial_adapter: Some(at(&whole, 4)), ..Start::default() });
        for step in 1..=5 {
            assert!(weights_of(&at(&rest, step)) == weights_of(&at(&whole, 4 + step)), "{name}: step {step}");
        }
        let own: Vec<_> = whole.comparable_metrics().into_iter().skip(4).map(|(_, metrics)| metrics).collect();
        let theirs: Vec<_> = rest.comparable_metrics().into_iter().map(|(_, metrics)| metrics).collect();
        assert_eq!(own, theirs, "{name}");
    }
}

#[test]
fn a_stop_anywhere_in_the_warm_up_loses_nothing() {
    let mut plan = warmed(WarmUpReference::Warmed);
    plan.checkpoints.every_steps = 3;
    // Each row is a micro-batch, so that the stop arrives between two of them.
    plan.training.micro_batch_tokens = 1;
    let whole = run(&plan, start());
    let saved: Vec<u64> = whole.saved.iter().map(|saved| saved.step).collect();
    assert_eq!(saved, [3, 4, 6, 7], "every third step, the end of the warm-up, and the last step");
    let expected = weights_of(&at(&whole, 7));
    for (phase, step, poll) in [
        (Phase::Loading, 0, 1),
        (Phase::Loading, 0, 3),
        (Phase::Train, 0, 1),
        (Phase::Train, 0, 3),
        (Phase::Train, 1, 2),
        (Phase::Train, 3, 1),
        (Phase::Train, 3, 4),
        (Phase::Rollout, 4, 1),
        (Phase::Train, 5, 1),
    ] {
        for stop in [StopReason::Pause { reason: None }, StopReason::Shutdown, StopReason::LeaseLost] {
            let lost = stop == StopReason::LeaseLost;
            let at_place = format!("{phase:?} after step {step}, poll {poll}, {stop:?}");
            let mut first = TestHost::stopping_at(phase, step, poll, stop.clone());
            assert_eq!(train(&plan, rows(), start(), &mut first).expect("stops"), Some(stop), "{at_place}");
            let resume = first.saved.last().map(|saved| saved.dir.clone());
            let done = first.saved.last().map_or(0, |saved| saved.step);
            assert_eq!(done, if lost { [0, 0, 0, 3, 4, 4][step as usize] } else { step }, "{at_place}");
            let second = run(&plan, Start { resume, ..start() });
            assert!(weights_of(&at(&second, 7)) == expected, "{at_place}");
        }
    }
}

#[test]
fn evaluation_before_the_start_comes_before_and_behind_the_warm_up() {
    let mut plan = warmed(WarmUpReference::Warmed);
    let dataset = plan.dataset.clone();
    plan.eval = Some(EvalPlan { num_generations: 2, temperature: 1.0, ..EvalPlan::of_dataset(dataset, 2) });
    let host = run(&plan, Start { eval_rows: rows()[..2].to_vec(), ..start() });
    let evaluated =
        |host: &TestHost| -> Vec<u64> { host.metrics(SamplePhase::Eval).into_iter().map(|(step, _)| step).collect() };
    assert_eq!(evaluated(&host), [0, 4, 6, 7], "the base, the warmed weights, every second step of RLOO, the last");
    plan.eval.as_mut().unwrap().before_start = false;
    let host = run(&plan, Start { eval_rows: rows()[..2].to_vec(), ..start() });
    assert_eq!(evaluated(&host), [6, 7]);
}

#[test]
fn the_answers_of_evaluated_prompts_are_not_learned() {
    let chat = |question: &str, answer: &str| {
        row(&json!({"prompt": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}))
    };
    let key = |row: &PromptRow| rlood_engine::answers::prompt_key_of(row);
    assert_eq!(key(&chat("a", "b")), key(&chat("a", "c")), "whatever the answer");
    assert_eq!(key(&chat("a", "b")), key(&row(&json!({"prompt": [{"role": "user", "content": "a"}]}))));
    assert_ne!(key(&chat("a", "b")), key(&chat("b", "b")));

    // One of the two evaluated prompts is the prompt of two rows.
    let mut plan = warmed(WarmUpReference::Base);
    plan.eval = Some(EvalPlan::of_dataset(plan.dataset.clone(), 100));
    plan.warm_up.as_mut().unwrap().batch_size = 6;
    let eval_rows = || vec![row(&json!({"prompt": "w0 w1"})), row(&json!({"prompt": "w20"}))];
    let host = run(&plan, Start { eval_rows: eval_rows(), ..start() });
    let left_out = host.events.iter().find_map(|event| match event {
        Event::Warning { code, data, .. } if code == "warm_up_rows_left_out" => Some(data.clone()),
        _ => None,
    });
    assert_eq!(left_out, Some(json!({"left_out": 2, "rows": 6})));
    // The run equals that of the other rows.
    let others = answers().into_iter().filter(|row| row.prompt != "w0 w1").collect();
    let without = run(&plan, Start { warm_up_rows: others, eval_rows: eval_rows(), ..Start::default() });
    assert!(weights_of(&at(&host, 7)) == weights_of(&at(&without, 7)));
    assert!(!without.warnings().contains(&"warm_up_rows_left_out".to_owned()));
    let all = Start { eval_rows: answers(), ..start() };
    let error = train(&plan, rows(), all, &mut TestHost::default()).unwrap_err();
    assert!(error.to_string().contains("all rows are also evaluated"), "{error}");

    // So is a run whose verdict compares the models on that prompt, from whatever step it resumes.
    plan.eval = None;
    plan.checkpoints.every_steps = 1;
    let judged = |resume| {
        let judged_keys = vec![prompt_key(&json!("w0 w1")), prompt_key(&json!("w20"))];
        run(&plan, Start { judged_keys, resume, ..start() })
    };
    let whole = judged(None);
    assert!(whole.warnings().contains(&"warm_up_rows_left_out".to_owned()));
    assert!(weights_of(&at(&whole, 4)) == weights_of(&at(&without, 4)));
    for step in [1, 3] {
        assert!(weights_of(&at(&judged(Some(at(&whole, step))), 7)) == weights_of(&at(&whole, 7)), "from step {step}");
    }
    assert!(weights_of(&at(&run(&plan, start()), 4)) != weights_of(&at(&without, 4)));
}

#[test]
fn a_warm_up_may_follow_a_warm_start() {
    let first = run(&plan(), Start::default());
    for (of_start, reference) in [
        (Reference::Base, WarmUpReference::Base),
        (Reference::Initial, WarmUpReference::Base),
        (Reference::Initial, WarmUpReference::Warmed),
    ] {
        let name = format!("{of_start:?}, {reference:?}");
        let mut plan = warmed(reference);
        plan.checkpoints.every_steps = 1;
        plan.warm_start =
            Some(WarmStartPlan { checkpoint: Some(CheckpointId::new()), adapter: None, reference: of_start });
        let start = |resume| Start { resume, initial_adapter: Some(first.saved[0].dir.clone()), ..start() };
        let whole = run(&plan, start(None));
        let fresh = run(&warmed(reference), self::start());
        assert!(weights_of(&at(&whole, 4)) != weights_of(&at(&fresh, 4)), "{name}: it begins elsewhere");
        for step in [2, 4, 6] {
            let rest = run(&plan, start(Some(at(&whole, step))));
            assert!(weights_of(&at(&rest, 7)) == weights_of(&at(&whole, 7)), "{name}: from step {step}");
        }
    }
}

#[test]
fn a_row_without_an_answer_is_rejected_by_its_number() {
    let refused = |bad: Value, words: &[&str]| {
        let mut answers = answers();
        answers[2] = row(&bad);
        let start = Start { warm_up_rows: answers, ..Start::default() };
        let error = train(&warmed(WarmUpReference::Base), rows(), start, &mut TestHost::default()).unwrap_err();
        assert!(matches!(error, EngineError::Prompts(_)), "{error}");
        let error = error.to_string();
        assert!(error.contains("row 2 ") && words.iter().all(|word| error.contains(word)), "{error}");
    };
    refused(json!({"prompt": "w1 w2"}), &["no assistant turn"]);
    refused(json!({"prompt": "w1 w2", "completion": ""}), &["empty"]);
    refused(json!({"prompt": "w1", "completion": "w1 ".repeat(5000)}), &["tokens", "at most"]);
    let error = train(&warmed(WarmUpReference::Base), rows(), Start::default(), &mut TestHost::default()).unwrap_err();
    assert!(error.to_string().contains("no rows"), "{error}");
}

#[test]
fn a_checkpoint_of_another_warm_up_is_refused_and_steps_that_are_not_finite_are_skipped() {
    let mut plan = warmed(WarmUpReference::Warmed);
    plan.checkpoints.every_steps = 1;
    let whole = run(&plan, start());
    for change in [
        (|warm_up| warm_up.steps = 5) as fn(&mut WarmUpPlan),
        |warm_up| warm_up.batch_size = 5,
        |warm_up| warm_up.learning_rate = 0.01,
        |warm_up| warm_up.dataset.sha256 = "other".into(),
        |warm_up| warm_up.reference = WarmUpReference::Base,
    ] {
        let mut other = plan.clone();
        change(other.warm_up.as_mut().unwrap());
        let start = Start { resume: Some(at(&whole, 6)), ..start() };
        let error = train(&other, rows(), start, &mut TestHost::default()).unwrap_err();
        assert!(error.to_string().contains("warm-up"), "{error}");
    }
    // A value that is only measured is not part of the hash.
    let mut counted = plan.clone();
    counted.warm_up.as_mut().unwrap().longest_row_tokens = Some(9);
    run(&counted, Start { resume: Some(at(&whole, 6)), ..start() });

    plan.warm_up.as_mut().unwrap().learning_rate = 1.0;
    plan.optimizer.max_grad_norm = 0.0;
    plan.optimizer.adam_epsilon = 1e-30;
    plan.lora = None;
    plan.optimizer.weight_decay = 1e30;
    let mut host = TestHost::default();
    let error = train(&plan, rows(), start(), &mut host).unwrap_err();
    assert!(matches!(error, EngineError::Diverged { .. }), "{error}");
    assert!(host.warnings().iter().filter(|code| *code == "non_finite").count() == 3, "{:?}", host.warnings());
    assert!(host.events.iter().any(|event| matches!(event, Event::Diverged { .. })));
}
