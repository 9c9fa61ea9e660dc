//! Trained parameters and precisions: full fine-tuning, LoRA dropout, 8-bit moments, bf16, warm starts.

use std::path::{Path, PathBuf};

use rlood_engine::backend::BackendKind;
use rlood_engine::error::EngineError;
use rlood_engine::model::{Adapter, Policy, Trajectory};
use rlood_engine::optim::AdamW;
use rlood_types::event::SamplePhase;
use rlood_types::id::CheckpointId;
use rlood_types::spec::{ComputeDtype, OptimizerKind, Plan, Reference, WarmStartPlan};

use crate::train::{Start, TestHost, model_dir, plan, rows, run, train};

fn full() -> Plan {
    let mut plan = plan();
    plan.lora = None;
    plan.optimizer.learning_rate = 1e-3;
    plan
}

fn dropout() -> Plan {
    let mut plan = plan();
    plan.lora.as_mut().unwrap().dropout = 0.25;
    plan
}

fn eight_bit() -> Plan {
    let mut plan = plan();
    plan.optimizer.kind = OptimizerKind::Adamw8bit;
    plan
}

fn bf16(mut plan: Plan) -> Plan {
    plan.training.dtype = ComputeDtype::Bf16;
    plan
}

fn warm(mut plan: Plan, reference: Reference) -> Plan {
    plan.warm_start = Some(WarmStartPlan { checkpoint: Some(CheckpointId::new()), adapter: None, reference });
    plan
}

fn off_policy(mut plan: Plan) -> Plan {
    plan.rloo.num_iterations = 2;
    plan.rloo.steps_per_generation = 2;
    plan
}

/// Runs a short job of this plan, and returns its host.
fn trained(plan: &Plan) -> TestHost {
    let mut host = TestHost::default();
    run(plan, &mut host);
    host
}

fn weights_of(dir: &Path) -> Vec<u8> {
    let name = if dir.join("model.safetensors").exists() { "model.safetensors" } else { "adapter_model.safetensors" };
    std::fs::read(dir.join(name)).unwrap()
}

fn from_start(plan: &Plan, start: Start) -> TestHost {
    let mut host = TestHost::default();
    assert_eq!(train(plan, rows(), start, &mut host).expect("trains"), None);
    host
}

#[test]
fn every_kind_of_run_resumes_to_the_same_bytes_and_metrics() {
    let kept = tempfile::tempdir().unwrap();
    let cases: [(&str, Plan, Option<&str>); 9] = [
        ("full", full(), None),
        (
            "full, several uses of a block, 8 bits",
            {
                let mut plan = off_policy(full());
                plan.optimizer.kind = OptimizerKind::Adamw8bit;
                plan
            },
            None,
        ),
        ("full, bf16", bf16(full()), None),
        ("dropout", dropout(), None),
        ("dropout, several uses of a block", off_policy(dropout()), None),
        ("8 bits, several uses of a block", off_policy(eight_bit()), None),
        ("bf16", bf16(plan()), None),
        ("warm start, initial reference", warm(plan(), Reference::Initial), Some("adapter")),
        ("full warm start, initial reference", warm(full(), Reference::Initial), Some("model")),
    ];
    let adapter = checkpoint_of(&plan(), kept.path(), "adapter");
    let model = checkpoint_of(&full(), kept.path(), "model");
    for (name, mut plan, initial) in cases {
        plan.training.max_steps = 5;
        plan.checkpoints.every_steps = 1;
        let initial = initial.map(|which| if which == "adapter" { adapter.clone() } else { model.clone() });
        let start = |resume| Start { resume, initial_adapter: initial.clone(), ..Start::default() };
        let whole = from_start(&plan, start(None));
        let metrics = whole.comparable_metrics();
        assert_eq!(whole.saved.len(), 5, "{name}");
        assert!(weights_of(&whole.saved[0].dir) != weights_of(&whole.saved[4].dir), "{name} trains");
        for saved in &whole.saved[..4] {
            let rest = from_start(&plan, start(Some(saved.dir.clone())));
            let last = rest.saved.last().unwrap();
            assert!(weights_of(&last.dir) == weights_of(&whole.saved[4].dir), "{name} resumed from {}", saved.step);
            assert_eq!(rest.comparable_metrics(), metrics[saved.step as usize..], "{name} from {}", saved.step);
        }
    }
}

/// Writes a checkpoint of a short run to a directory that stays.
fn checkpoint_of(plan: &Plan, under: &Path, name: &str) -> PathBuf {
    let host = trained(plan);
    let to = under.join(name);
    std::fs::create_dir(&to).unwrap();
    for entry in std::fs::read_dir(&host.saved.last().unwrap().dir).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to
}

#[test]
fn a_checkpoint_of_full_fine_tuning_is_a_model() {
    let host = trained(&full());
    let dir = &host.saved.last().unwrap().dir;
    // The checkpoint is as complete as the original model: config, tokenizer, weights under the same names.
    let card = rlood_model_files::read(dir).expect("a model directory");
    let base = rlood_model_files::read(&model_dir()).unwrap();
    assert_eq!(card.num_parameters, base.num_parameters);
    assert_eq!(card.tensors.len(), base.tensors.len());
    assert_eq!(card.eos_token_ids, base.eos_token_ids);
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    for key in ["dtype", "torch_dtype"] {
        assert!(config.get(key).is_none_or(|dtype| dtype == "float32"), "{config}");
    }
    // The checkpoint computes the same as the run after its last step.
    let policy = Policy::load(dir, BackendKind::Cpu).unwrap();
    let row = [Trajectory::of_completion(&[5, 6, 7], &[8, 9])];
    let loaded = policy.score(&row, 1.0, Adapter::Off).unwrap();
    let mut trained = Policy::load(&model_dir(), BackendKind::Cpu).unwrap();
    let first = trained.score(&row, 1.0, Adapter::Off).unwrap();
    trained.train_all(&model_dir()).unwrap();
    trained.set_parameter_values(&host.traces.last().unwrap().parameters).unwrap();
    assert_eq!(loaded, trained.score(&row, 1.0, Adapter::On).unwrap());
    assert_ne!(loaded, first);
    // Every tensor has changed.
    for info in &host.traces[0].parameter_info {
        let range = info.offset..info.offset + info.shape.iter().product::<usize>();
        let (first, last) = (&host.traces[0].parameters[range.clone()], &host.traces[2].parameters[range]);
        assert!(first != last || info.name.ends_with("k_proj.bias"), "{} did not move", info.name);
    }
}

#[test]
fn the_reference_of_full_fine_tuning_stays_where_it_began() {
    let host = trained(&full());
    // The policy equals its reference at the first step.
    assert_eq!(host.traces[0].old_logps, host.traces[0].ref_logps);
    assert_ne!(host.traces[2].old_logps, host.traces[2].ref_logps);
    assert!(host.metrics(SamplePhase::Train)[2].1["kl"].is_some_and(|kl| kl != 0.0));
    let mut plan = full();
    plan.rloo.beta = 0.0;
    assert!(trained(&plan).traces.iter().all(|trace| trace.ref_logps.is_empty()));
}

#[test]
fn the_first_ratio_is_one_without_dropout_and_not_with_it() {
    let log_ratio = |plan: &Plan| {
        let host = trained(plan);
        let metrics = host.metrics(SamplePhase::Train);
        // Steps that reuse a block do not report the metric.
        let ratios = metrics.iter().filter_map(|(_, metrics)| metrics.get("sampling/log_ratio_max").copied().flatten());
        ratios.fold(0.0, f64::max)
    };
    for plan in [plan(), full(), bf16(plan()), bf16(full()), eight_bit()] {
        assert_eq!(log_ratio(&off_policy(plan.clone())), 0.0, "{:?}", plan.training);
    }
    // A larger learning rate, so that dropping the adapter's inputs has an effect.
    let mut plan = dropout();
    plan.optimizer.learning_rate = 0.1;
    let ratio = log_ratio(&plan);
    assert!(ratio > 1e-4 && ratio.is_finite(), "{ratio}");
}

#[test]
fn bf16_rounds_what_it_says_and_little_else() {
    let ids: Vec<u32> = (4..24).collect();
    let row = [Trajectory::of_completion(&ids[..10], &ids[10..])];
    let exact = Policy::load(&model_dir(), BackendKind::Cpu).unwrap().score(&row, 1.0, Adapter::Off).unwrap();
    let policy = Policy::load_dtype(&model_dir(), BackendKind::Cpu, ComputeDtype::Bf16).unwrap();
    let rounded = policy.score(&row, 1.0, Adapter::Off).unwrap();
    assert_ne!(exact, rounded);
    for (a, b) in exact[0].logps.iter().zip(&rounded[0].logps) {
        assert!((a - b).abs() < 0.05 * a.abs().max(1.0), "{a} and {b}");
    }
    let host = trained(&bf16(plan()));
    assert!(host.warnings().contains(&"weights_rounded".to_owned()));
    assert!(!trained(&plan()).warnings().contains(&"weights_rounded".to_owned()));
    // The f32 buffer of full fine-tuning keeps what bf16 loses, so small steps add up.
    let host = trained(&bf16(full()));
    let trace = host.traces.last().unwrap();
    assert!(trace.parameters.iter().any(|v| half::bf16::from_f32(*v).to_f32() != *v));
}

#[test]
fn a_run_with_8_bit_moments_learns_like_one_with_32() {
    let losses = |kind| {
        let mut plan = plan();
        plan.optimizer.kind = kind;
        plan.training.max_steps = 30;
        plan.rloo.beta = 0.0;
        plan.sampling.max_completion_length = 3;
        let mut host = TestHost::default();
        host.score =
            Box::new(
                |sample| rlood_types::rollout::RewardValue::Number(sample.completion.matches("w1").count() as f64),
            );
        run(&plan, &mut host);
        let metrics = host.metrics(SamplePhase::Train);
        let rewards: Vec<f64> = metrics.iter().map(|(_, metrics)| metrics["reward"].unwrap()).collect();
        let size = std::fs::metadata(host.saved.last().unwrap().dir.join("optimizer.safetensors")).unwrap().len();
        (rewards, size, host.traces[0].parameters.len() as u64)
    };
    let (expected, full_bytes, parameters) = losses(OptimizerKind::Adamw);
    let (rewards, bytes, _) = losses(OptimizerKind::Adamw8bit);
    assert!(full_bytes >= 8 * parameters && bytes < full_bytes / 3, "{bytes} and {full_bytes}");
    let mean = |rewards: &[f64]| rewards.iter().sum::<f64>() / rewards.len() as f64;
    assert!(mean(&expected[20..]) > mean(&expected[..5]), "{expected:?}");
    assert!(mean(&rewards[20..]) > mean(&rewards[..5]), "{rewards:?}");
    assert!((mean(&rewards[20..]) - mean(&expected[20..])).abs() < 0.6, "{rewards:?} and {expected:?}");
    assert_eq!(AdamW::of_kind(OptimizerKind::Adamw8bit, 1000).moments.size_bytes(), 2 * (1000 + 16));
}

#[test]
fn a_warm_start_begins_with_the_weights_and_has_the_reference_it_asks_for() {
    let kept = tempfile::tempdir().unwrap();
    for (base_plan, name) in [(plan(), "adapter"), (full(), "model")] {
        let dir = checkpoint_of(&base_plan, kept.path(), name);
        let start = || Start { initial_adapter: Some(dir.clone()), ..Start::default() };
        let initial = from_start(&warm(base_plan.clone(), Reference::Initial), start());
        let base = from_start(&warm(base_plan.clone(), Reference::Base), start());
        // The first rollout is the same, since the weights are the same.
        assert_eq!(initial.traces[0].old_logps, base.traces[0].old_logps, "{name}");
        assert_ne!(initial.traces[0].old_logps, trained(&base_plan).traces[0].old_logps, "{name}");
        assert_eq!(initial.traces[0].ref_logps, initial.traces[0].old_logps, "{name}");
        assert_ne!(base.traces[0].ref_logps, base.traces[0].old_logps, "{name}");
        assert_ne!(initial.traces[2].ref_logps, initial.traces[2].old_logps, "{name}");
        let missing = train(&warm(base_plan, Reference::Base), rows(), Start::default(), &mut TestHost::default());
        assert!(matches!(missing, Err(EngineError::Input(_))), "{missing:?}");
    }
    // An adapter of another rank is rejected with a message that names the ranks; another dropout is accepted.
    let adapter = kept.path().join("adapter");
    let start = || Start { initial_adapter: Some(adapter.clone()), ..Start::default() };
    let mut other = warm(plan(), Reference::Base);
    other.lora.as_mut().unwrap().dropout = 0.5;
    from_start(&other, start());
    other.lora.as_mut().unwrap().r = 8;
    let error = train(&other, rows(), start(), &mut TestHost::default()).expect_err("refused");
    assert!(matches!(error, EngineError::Adapter(_)), "{error}");
}
