//! Training on a GPU: parameters, gradient and moments stay on the device, and their values equal those computed on the
//! host. Runs on a GPU, or on the emulator with the feature `cuda-emulator`.

use std::path::Path;

use rlood_engine::backend::{BackendKind, Optimizer};
use rlood_engine::model::Policy;
use rlood_engine::optim::{AdamW, clip_gradient_norm};
use rlood_types::spec::{ComputeDtype, OptimizerKind, Plan};

use crate::gradients::{as_rows, fixture, rows_of, weights};
use crate::kinds::{Gemm, cuda, kinds};
use crate::train::{Start, TestHost, plan, rows, train};

const CUDA: BackendKind = BackendKind::Cuda { ordinal: 0 };

/// Whether all weights are trained, and the precision of the moments.
const KINDS: [(bool, OptimizerKind); 4] = [
    (false, OptimizerKind::Adamw),
    (false, OptimizerKind::Adamw8bit),
    (true, OptimizerKind::Adamw),
    (true, OptimizerKind::Adamw8bit),
];

#[test]
fn updates_on_the_device_have_the_bits_of_the_hosts_and_do_not_wait() {
    if !kinds().contains(&CUDA) {
        return;
    }
    for (full, kind) in KINDS {
        let cuda = cuda(0, ComputeDtype::F32, Gemm::Exact);
        let dir = fixture("qwen3");
        let mut policy = Policy::on_cuda(&dir, cuda.clone()).unwrap();
        match full {
            true => policy.train_all(&dir).unwrap(),
            false => policy.load_lora(&dir.join("lora")).unwrap(),
        }
        let plan = optimizer_plan(kind);
        let mut values = policy.parameter_values().unwrap();
        let mut adam = AdamW::of_kind(kind, values.len());
        let mut optimizer = Optimizer::from_state(policy.flat(), adam.clone()).unwrap();
        let owned = rows_of(2);
        let rows = as_rows(&owned);
        let g = weights(&rows, 0);
        for step in 1..=3 {
            let what = format!("all weights: {full}, {kind:?}, step {step}");
            let mut gradient = policy.zero_gradient().unwrap();
            policy.forward_backward(&rows, 0.8, &mut |_| Ok(g.clone()), &mut gradient).unwrap();
            let mut on_host = gradient.values().unwrap().into_owned();
            let (norm, expected) = (gradient.clip(0.5).unwrap(), clip_gradient_norm(&mut on_host, 0.5));
            assert!(expected > 0.5 && (norm - expected).abs() <= 1e-12 * expected, "{what}: {norm} and {expected}");
            assert_same(&what, &gradient.values().unwrap(), &on_host);

            let before = cuda.device().counters();
            policy.update_parameters(|flat| optimizer.update(flat, &gradient, 0.01, &plan.optimizer)).unwrap();
            let after = cuda.device().counters();
            assert_eq!((after.waits, after.uploads), (before.waits, before.uploads), "{what}");
            adam.update(&mut values, &on_host, 0.01, &plan.optimizer).unwrap();
            assert_same(&what, &policy.parameter_values().unwrap(), &values);
            assert!(*optimizer.state().unwrap() == adam, "{what}: moments");
        }
        // The matrices used for computing must contain the new values.
        let mut other = Policy::on_cuda(&dir, cuda.clone()).unwrap();
        match full {
            true => other.train_all(&dir).unwrap(),
            false => other.load_lora(&dir.join("lora")).unwrap(),
        }
        other.set_parameter_values(&values).unwrap();
        let scores = |policy: &Policy| policy.score(&rows, 1.0, rlood_engine::model::Adapter::On).unwrap();
        assert_eq!(scores(&policy), scores(&other));
    }
}

#[test]
fn a_run_resumed_on_the_device_is_the_same_run() {
    if !kinds().contains(&CUDA) {
        return;
    }
    for (full, kind) in KINDS {
        let plan = optimizer_plan(kind);
        let plan = Plan { lora: plan.lora.clone().filter(|_| !full), ..plan };
        let run = |resume: Option<&Path>| {
            let mut host = TestHost::default();
            let start = Start { resume: resume.map(Path::to_path_buf), backend: Some(CUDA), ..Start::default() };
            train(&plan, rows(), start, &mut host).unwrap();
            host
        };
        let whole = run(None);
        assert_eq!(whole.saved.len(), 3);
        let files = |host: &TestHost| {
            let dir = &host.saved.last().unwrap().dir;
            let weights = if full { "model.safetensors" } else { "adapter_model.safetensors" };
            [weights, "optimizer.safetensors", "trainer_state.json"].map(|file| std::fs::read(dir.join(file)).unwrap())
        };
        for saved in &whole.saved[..2] {
            let rest = run(Some(&saved.dir));
            assert!(files(&rest) == files(&whole), "all weights: {full}, {kind:?}, from step {}", saved.step);
            assert_eq!(rest.comparable_metrics(), whole.comparable_metrics()[saved.step as usize..]);
        }
    }
}

fn optimizer_plan(kind: OptimizerKind) -> Plan {
    let mut plan = plan();
    plan.optimizer.kind = kind;
    plan.optimizer.weight_decay = 0.1;
    plan.optimizer.max_grad_norm = 0.05;
    plan.checkpoints.every_steps = 1;
    plan
}

fn assert_same(what: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let differ = ours.iter().zip(theirs).position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(differ, None, "{what}: {:?}", differ.map(|at| (ours[at], theirs[at])));
}
