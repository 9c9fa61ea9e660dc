//! Certificates: what they hold, and whether the comparison finds each fault of a server that is simulated here with the engine.

use std::path::Path;

use rlood_engine::backend::BackendKind;
use rlood_engine::certificate::{Certifier, logps};
use rlood_engine::model::{Adapter, Policy};
use rlood_engine::text::Text;
use rlood_types::certificate::{
    Certificate, Comparison, FILE, Finding, MAX_PROMPTS, Measured, compare, default_tolerance,
};
use rlood_types::spec::{CertificatePlan, ComputeDtype, LoraPlan, Plan};

use crate::train::{Start, TestHost, plan, rows, train};

/// Makes an adapter on the bundled model. Its values are as large as after this many steps at the default learning rate, since a
/// step of AdamW moves a value by at most that rate.
fn trained(steps: u32, use_rslora: bool) -> (Policy, Text) {
    trained_on(&rlood_test_support::tiny_model(), steps, use_rslora)
}

fn trained_on(dir: &Path, steps: u32, use_rslora: bool) -> (Policy, Text) {
    let mut policy = Policy::load_dtype(dir, BackendKind::Cpu, ComputeDtype::F32).unwrap();
    let targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let target_modules = targets.map(str::to_owned).to_vec();
    let lora = LoraPlan {
        r: 16,
        alpha: 32.0,
        dropout: 0.0,
        target_modules,
        use_rslora,
        rank_pattern: Default::default(),
        alpha_pattern: Default::default(),
    };
    policy.add_lora(&lora, 7).unwrap();
    let size = 5e-5 * steps as f32;
    let mut values = policy.parameter_values().unwrap();
    for parameter in policy.parameters().into_iter().filter(|parameter| parameter.name.contains("lora_B")) {
        let length: usize = parameter.shape.iter().product();
        for (index, value) in values[parameter.offset..parameter.offset + length].iter_mut().enumerate() {
            // Signs without a pattern, from the bits of a product (Knuth's multiplicative hash).
            let bits = (parameter.offset as u32 + index as u32).wrapping_mul(2_654_435_761);
            *value = if bits >> 31 == 0 { size } else { -size };
        }
    }
    policy.set_parameter_values(&values).unwrap();
    (policy, Text::load(dir).unwrap())
}

/// The bundled model with weights that bf16 cannot hold. Its own are bf16 already, so that f32 and bf16 differ only on instruction
/// sets that round inputs to bf16.
fn finer_model() -> tempfile::TempDir {
    const NAME: &str = "model.safetensors";
    let (from, to) = (rlood_test_support::tiny_model(), tempfile::tempdir().unwrap());
    for entry in std::fs::read_dir(&from).unwrap().map(|entry| entry.unwrap()) {
        std::fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
    }
    let mut tensors = candle_core::safetensors::load(from.join(NAME), &candle_core::Device::Cpu).unwrap();
    for tensor in tensors.values_mut() {
        *tensor = tensor.to_dtype(candle_core::DType::F32).unwrap().affine(1.0 + 1.0 / 700.0, 0.0).unwrap();
    }
    candle_core::safetensors::save(&tensors, to.path().join(NAME)).unwrap();
    to
}

fn certify(policy: &mut Policy, text: &Text, plan: &Plan) -> Certificate {
    let dir = rlood_test_support::tiny_model();
    let mut certifier = Certifier::new(text, &dir, policy.card().max_position_embeddings, plan).unwrap();
    certifier.certify(policy, text, (plan, "tiny", 1), &|| false).unwrap()
}

fn measure(certificate: &Certificate, policy: &Policy, adapter: Adapter) -> Vec<Measured> {
    let ids: Vec<Vec<u32>> = certificate.prompts.iter().map(|prompt| prompt.ids()).collect();
    let ids: Vec<&[u32]> = ids.iter().map(Vec::as_slice).collect();
    let rows = logps(policy, &ids, adapter, &|| false).unwrap();
    rows.into_iter().map(|row| row.into_iter().map(|logp| Some(f64::from(logp))).collect()).collect()
}

fn judged(certificate: &Certificate, measured: &[Measured]) -> Comparison {
    compare(certificate, measured, default_tolerance(certificate.dtype))
}

/// The base model, the checkpoint and wrong scales, for adapters of 1, 20 and 200 steps.
#[test]
fn every_scale_is_recognized_whatever_the_size_of_the_update() {
    for (steps, use_rslora) in [(1, false), (20, false), (200, false), (1, true), (200, true)] {
        let (mut policy, text) = trained(steps, use_rslora);
        let before = policy.parameter_values().unwrap();
        let certificate = certify(&mut policy, &text, &plan());
        assert_eq!(policy.parameter_values().unwrap(), before, "the adapter is unchanged");
        assert_eq!(certificate.prompts.len(), MAX_PROMPTS);
        let equal = judged(&certificate, &measure(&certificate, &policy, Adapter::On));
        assert_eq!(equal.finding, Finding::Equal, "{steps} {equal:?}");
        assert_eq!(equal.difference, 0.0, "scoring gives the same bits again");
        let base = judged(&certificate, &measure(&certificate, &policy, Adapter::Off));
        assert_eq!(base.finding, Finding::BaseModel, "{steps} {base:?}");
        // 0.25 is the scale of a program that ignores rsLoRA with r = 16; 0.8 and 3 are in no certificate. An update as large as the
        // largest here is too far from linear for a scale between those that are recorded.
        let factors = [2.0, 0.5, 0.25, 0.8, 3.0];
        for factor in factors.into_iter().take(if steps < 200 { 5 } else { 3 }) {
            let finding = if factor == 2.0 { Finding::AppliedTwice } else { Finding::WrongScale };
            let measured = policy.with_adapter_scaled(factor, |policy| Ok(measure(&certificate, policy, Adapter::On)));
            let found = judged(&certificate, &measured.unwrap());
            assert_eq!(found.finding, finding, "{steps} steps, factor {factor}: {found:?}");
            assert!((found.scale - factor).abs() < 0.05 * factor, "{steps} steps, factor {factor}: {found:?}");
        }
    }
}

/// Weights in bf16 are too coarse for the update of a single step, and show for that of many.
#[test]
fn a_lower_precision_is_reported_or_hides_the_effect() {
    let model = finer_model();
    let bf16 = |steps: u32| {
        let (mut policy, text) = trained_on(model.path(), steps, false);
        let certificate = certify(&mut policy, &text, &plan());
        let dir = tempfile::tempdir().unwrap();
        policy.save_lora(dir.path(), "tiny").unwrap();
        let mut coarse = Policy::load_dtype(model.path(), BackendKind::Cpu, ComputeDtype::Bf16).unwrap();
        coarse.load_lora(dir.path()).unwrap();
        let on = judged(&certificate, &measure(&certificate, &coarse, Adapter::On));
        (on, judged(&certificate, &measure(&certificate, &coarse, Adapter::Off)))
    };
    let (on, off) = bf16(1);
    assert_eq!((on.finding, off.finding), (Finding::CannotTell, Finding::CannotTell), "{on:?} {off:?}");
    let (on, off) = bf16(2000);
    assert_eq!((on.finding, off.finding), (Finding::LowPrecision, Finding::BaseModel), "{on:?} {off:?}");
}

#[test]
fn other_weights_are_no_scale() {
    let (mut policy, text) = trained(200, false);
    let certificate = certify(&mut policy, &text, &plan());
    let mut values = policy.parameter_values().unwrap();
    values.iter_mut().for_each(|value| *value = -*value * 40.0);
    policy.set_parameter_values(&values).unwrap();
    let found = judged(&certificate, &measure(&certificate, &policy, Adapter::On));
    assert_eq!(found.finding, Finding::OtherWeights, "{found:?}");
}

fn of_checkpoint(dir: &Path) -> Certificate {
    Certificate::read(&std::fs::read(dir.join(FILE)).unwrap()).unwrap()
}

#[test]
fn every_checkpoint_has_a_certificate_of_its_weights() {
    let mut plan = plan();
    plan.checkpoints.every_steps = 1;
    for full in [false, true] {
        if full {
            plan.lora = None;
        }
        let mut host = TestHost::default();
        assert_eq!(train(&plan, rows(), Start::default(), &mut host).expect("trains"), None);
        assert!(host.saved.len() > 1);
        for saved in &host.saved {
            let certificate = of_checkpoint(&saved.dir);
            assert_eq!(certificate.step, saved.step);
            let named: Vec<&str> = certificate.files.iter().map(|file| file.name.as_str()).collect();
            match full {
                true => assert_eq!(named, ["model.safetensors"]),
                false => assert_eq!(named, ["adapter_config.json", "adapter_model.safetensors"]),
            }
            assert!(certificate.effect.max_nats > 0.0, "{:?}", certificate.effect);
            let known = certificate.prompts.iter().all(|prompt| prompt.base.iter().all(Option::is_some));
            assert_eq!(known, !full);
        }
    }
}

#[test]
fn a_job_may_bring_its_own_prompts() {
    let (mut policy, text) = trained(1, false);
    let own = vec!["1 + 1 =".to_owned(), "x".repeat(5000)];
    let plan = Plan { certificate: Some(CertificatePlan { prompts: own }), ..plan() };
    let certificate = certify(&mut policy, &text, &plan);
    let texts: Vec<&str> = certificate.prompts.iter().map(|prompt| prompt.text.as_str()).collect();
    assert_eq!(texts, ["1 + 1 ="], "the other one is too long");
}
