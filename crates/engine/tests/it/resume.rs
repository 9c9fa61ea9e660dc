//! A run that was stopped and resumed must equal an uninterrupted run: equal adapter bytes, equal metrics.

use rlood_engine::checkpoint::verify;
use rlood_engine::error::EngineError;
use rlood_engine::host::StopReason;
use rlood_types::event::{Phase, SamplePhase};
use rlood_types::spec::{EvalPlan, LrSchedulerType, Plan};

use crate::train::{Start, TestHost, plan, rows, train, train_model};

/// Blocks of two slices, each trained twice; 10 steps are two and a half blocks and cross an epoch boundary.
fn off_policy() -> Plan {
    let mut plan = plan();
    plan.rloo.num_iterations = 2;
    plan.rloo.steps_per_generation = 2;
    plan.rloo.normalize_advantages = true;
    plan.optimizer.lr_scheduler_type = LrSchedulerType::Cosine;
    plan.training.max_steps = 10;
    plan.checkpoints.every_steps = 1;
    plan
}

/// The off-policy plan with overlap: each block is sampled before the previous one is trained.
fn overlapped() -> Plan {
    let mut plan = off_policy();
    plan.rloo.overlap = true;
    plan
}

fn resumed_from(plan: &Plan, dir: &std::path::Path) -> TestHost {
    let mut host = TestHost::default();
    let start = Start { resume: Some(dir.to_path_buf()), ..Start::default() };
    assert_eq!(train(plan, rows(), start, &mut host).expect("resumes"), None);
    host
}

#[test]
fn resuming_from_every_step_gives_the_same_bytes_and_metrics() {
    for plan in [off_policy(), overlapped(), {
        let mut plan = plan();
        plan.training.max_steps = 5;
        plan.checkpoints.every_steps = 1;
        plan
    }] {
        let mut whole = TestHost::default();
        train(&plan, rows(), Start::default(), &mut whole).expect("trains");
        let steps = plan.training.max_steps as usize;
        assert_eq!(whole.saved.len(), steps);
        let metrics = whole.comparable_metrics();
        for saved in &whole.saved[..steps - 1] {
            let rest = resumed_from(&plan, &saved.dir);
            let last = rest.saved.last().expect("a checkpoint");
            assert!(last.last && last.step == plan.training.max_steps);
            assert!(last.adapter() == whole.saved[steps - 1].adapter(), "resumed from step {}", saved.step);
            assert_eq!(rest.comparable_metrics(), metrics[saved.step as usize..], "resumed from step {}", saved.step);
        }
        // If nothing were trained, nothing would be compared.
        assert!(whole.saved[0].adapter() != whole.saved[steps - 1].adapter());
    }
}

/// Covers a family with windows and soft caps, one with fused projections, one with multipliers, one whose rotary
/// angles depend on the length, and one with states instead of keys and values.
#[test]
fn every_kind_of_family_resumes_with_the_same_bytes() {
    for (name, modules) in [
        ("gemma2", ["q_proj", "up_proj", "down_proj"]),
        ("phi3_partial", ["qkv_proj", "gate_up_proj", "down_proj"]),
        ("granitemoehybrid", ["v_proj", "input_linear", "output_linear"]),
        ("llama_dynamic", ["q_proj", "k_proj", "o_proj"]),
        ("qwen3_5", ["q_proj", "in_proj_qkv", "in_proj_a"]),
        ("qwen3_5_vl", ["in_proj_z", "in_proj_b", "out_proj"]),
    ] {
        let dir = rlood_test_support::fixture("parity").join(name);
        let mut plan = plan();
        plan.lora.as_mut().expect("lora").target_modules = modules.map(String::from).to_vec();
        plan.sampling.max_completion_length = 24;
        plan.training.max_steps = 4;
        plan.checkpoints.every_steps = 1;
        let run = |resume: Option<std::path::PathBuf>| {
            let mut host = TestHost::default();
            let start = Start { resume, ..Start::default() };
            train_model(&dir, &plan, rows(), start, &mut host).unwrap_or_else(|error| panic!("{name}: {error}"));
            host
        };
        let whole = run(None);
        let rest = run(Some(whole.saved[1].dir.clone()));
        assert!(rest.saved.last().unwrap().adapter() == whole.saved[3].adapter(), "{name}");
        assert_eq!(rest.comparable_metrics(), whole.comparable_metrics()[2..], "{name}");
        assert!(whole.saved[0].adapter() != whole.saved[3].adapter(), "{name}");
        for metrics in whole.comparable_metrics() {
            let text = format!("{metrics:?}");
            assert!(text.contains("sampling/log_ratio_max"), "{name}: {text}");
        }
    }
}

#[test]
fn a_pause_in_any_phase_saves_the_last_step_and_loses_nothing() {
    pause_in_any_phase(off_policy());
}

#[test]
fn a_pause_in_any_phase_of_an_overlapped_run_loses_nothing() {
    pause_in_any_phase(overlapped());
}

fn pause_in_any_phase(mut plan: Plan) {
    plan.checkpoints.every_steps = 100;
    let dataset = plan.dataset.clone();
    plan.eval = Some(EvalPlan { before_start: false, ..EvalPlan::of_dataset(dataset, 5) });
    let start = |resume| Start { resume, eval_rows: rows()[..2].to_vec(), ..Start::default() };
    let mut whole = TestHost::default();
    train(&plan, rows(), start(None), &mut whole).expect("trains");
    let expected = whole.saved[0].adapter();
    // (phase, steps done when it began, poll in it); a block begins after steps 4 and 8.
    let places = [
        (Phase::Loading, 0, 1),
        (Phase::Rollout, 0, 1),
        (Phase::Rollout, 4, 1),
        (Phase::Rollout, 4, 3),
        (Phase::Reward, 4, 1),
        (Phase::Train, 4, 1),
        (Phase::Train, 4, 2),
        (Phase::Train, 6, 1),
        (Phase::Train, 7, 1),
        (Phase::Eval, 5, 1),
        (Phase::Eval, 5, 2),
    ];
    for (phase, step, poll) in places {
        for stop in [StopReason::Pause { reason: None }, StopReason::Shutdown] {
            let at = format!("{phase:?} after step {step}, poll {poll}");
            let mut first = TestHost::stopping_at(phase, step, poll, stop.clone());
            let outcome = train(&plan, rows(), start(None), &mut first).expect("stops");
            assert_eq!(outcome, Some(stop), "{at}");
            let saved: Vec<u64> = first.saved.iter().map(|saved| saved.step).collect();
            assert_eq!(saved, if step == 0 { vec![] } else { vec![step] }, "{at}");
            let resume = first.saved.last().map(|saved| saved.dir.clone());
            let mut second = TestHost::default();
            train(&plan, rows(), start(resume), &mut second).expect("resumes");
            assert!(second.saved.last().expect("a checkpoint").adapter() == expected, "{at}");
            let evaluations = [first.metrics(SamplePhase::Eval), second.metrics(SamplePhase::Eval)].concat();
            assert_eq!(evaluations.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [5, 10], "{at}");
        }
    }
}

#[test]
fn a_cancel_or_a_lost_lease_writes_nothing() {
    for stop in [StopReason::Cancel, StopReason::LeaseLost] {
        for (phase, step, poll) in
            [(Phase::Loading, 0, 1), (Phase::Rollout, 4, 2), (Phase::Reward, 4, 1), (Phase::Train, 5, 1)]
        {
            let mut plan = off_policy();
            plan.checkpoints.every_steps = 100;
            let mut host = TestHost::stopping_at(phase, step, poll, stop.clone());
            let outcome = train(&plan, rows(), Start::default(), &mut host).expect("stops");
            assert_eq!(outcome, Some(stop.clone()), "{phase:?}");
            assert!(host.saved.is_empty());
        }
    }
}

#[test]
fn a_damaged_or_foreign_checkpoint_is_refused() {
    let mut plan = off_policy();
    plan.training.max_steps = 3;
    let mut host = TestHost::default();
    train(&plan, rows(), Start::default(), &mut host).expect("trains");
    let dir = &host.saved[0].dir;
    verify(dir).expect("whole");

    let refused = |plan: &Plan| {
        let start = Start { resume: Some(dir.clone()), ..Start::default() };
        let error = train(plan, rows(), start, &mut TestHost::default()).expect_err("refused");
        assert!(matches!(error, EngineError::Checkpoint(_)), "{error}");
        error.to_string()
    };
    let mut other = plan.clone();
    other.training.seed = 43;
    assert!(refused(&other).contains("seed"));
    let optimizer = dir.join("optimizer.safetensors");
    let bytes = std::fs::read(&optimizer).expect("bytes");
    let mut flipped = bytes.clone();
    *flipped.last_mut().expect("a byte") ^= 1;
    std::fs::write(&optimizer, &flipped).expect("written");
    assert!(verify(dir).is_err());
    assert!(refused(&plan).contains("optimizer.safetensors differs"));
    std::fs::write(&optimizer, &bytes[..bytes.len() - 1]).expect("written");
    assert!(verify(dir).is_err());
    std::fs::remove_file(&optimizer).expect("removed");
    assert!(refused(&plan).contains("optimizer.safetensors is missing"));
    std::fs::write(&optimizer, &bytes).expect("written");
    verify(dir).expect("whole again");
    std::fs::remove_file(dir.join("manifest.json")).expect("removed");
    assert!(refused(&plan).contains("manifest.json is missing"));
}
