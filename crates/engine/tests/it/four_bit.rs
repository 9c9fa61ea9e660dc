//! 4-bit matrices: the fixtures' codes come out of our own quantization, and their values have one rounding.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::bf16;
use rlood_engine::backend::BackendKind;
use rlood_engine::backend::cpu::Cpu;
use rlood_engine::kernels::four_bit::{FourBit, Rounding, Scales};
use rlood_engine::kernels::isa::Isa;
use rlood_engine::kernels::threads::Threads;
use rlood_engine::load::Weights;
use rlood_engine::model::{Adapter, Policy};
use rlood_engine::quantize::{FP4, NF4, quantize};
use rlood_model_files as modelcard;
use rlood_types::spec::{ComputeDtype, QuantType};
use serde_json::{Value, json};

use crate::gradients::{as_rows, rows_of, weights};
use crate::train::{Start, TestHost, plan, rows, train_model};

const CASES: [&str; 4] = ["qwen3_nf4", "qwen3_nf4_single", "llama_nf4_skip", "llama_fp4"];

fn folder(case: &str) -> PathBuf {
    rlood_test_support::fixture(&format!("parity/{case}"))
}

/// The quantized matrices of a case: name, stored codes, and the values before quantization.
fn matrices(case: &str) -> Vec<(String, FourBit, Vec<f32>)> {
    let dir = folder(case);
    let card = modelcard::read(&dir).unwrap();
    let mut weights = Weights::open(&dir, &card);
    let header = modelcard::weights::read_header(&dir, "unquantised.safetensors").unwrap();
    let mut before = Weights::of(&dir, &header.tensors.values().cloned().collect::<Vec<_>>());
    let names = card.tensors.iter().filter(|tensor| tensor.dtype.is_four_bit()).map(|tensor| tensor.name.clone());
    let names: Vec<String> = names.collect();
    names
        .into_iter()
        .map(|name| {
            let values = before.values(&name).unwrap().0;
            (name.clone(), weights.four_bit(&name).unwrap().unwrap(), values)
        })
        .collect()
}

#[test]
fn the_codes_are_those_of_bitsandbytes() {
    for case in CASES {
        let matrices = matrices(case);
        assert!(matrices.len() >= 10, "{case}: {}", matrices.len());
        for (name, stored, values) in matrices {
            let table = if case.contains("fp4") { FP4 } else { NF4 };
            assert_eq!(stored.table, table, "{case} {name}");
            let is_double = matches!(stored.scales, Scales::Nested { .. });
            let ours = quantize(&values, table, is_double, Rounding::Bf16);
            assert!(ours.codes == stored.codes, "{case} {name}: other codes");
            match (&ours.scales, &stored.scales) {
                (Scales::Plain(ours), Scales::Plain(stored)) => assert_eq!(ours, stored, "{case} {name}"),
                (
                    Scales::Nested { codes: ours, table, offset, .. },
                    Scales::Nested { codes, table: stored_table, offset: stored_offset, .. },
                ) => {
                    let differing = table.iter().zip(stored_table.iter()).filter(|(ours, stored)| ours != stored);
                    assert_eq!(differing.collect::<Vec<_>>(), [], "{case} {name}");
                    assert!((offset - stored_offset).abs() <= 1e-6 * offset.abs(), "{offset} {stored_offset}");
                    assert!(ours == codes, "{case} {name}: other codes of scales");
                }
                _ => panic!("{case} {name}: scales of another kind"),
            }
        }
    }
}

/// The largest difference between a model's logits and those of a case.
fn apart(dir: &Path, case: &str) -> f64 {
    let expected = std::fs::read(folder(case).join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    let policy = Policy::load(dir, BackendKind::Cpu).unwrap();
    let mut apart = 0f64;
    for check in expected["logits_check"].as_array().unwrap() {
        let ids: Vec<u32> = serde_json::from_value(check["ids"].clone()).unwrap();
        let positions: Vec<usize> = serde_json::from_value(check["positions"].clone()).unwrap();
        let expected: Vec<Vec<f64>> = serde_json::from_value(check["logits"].clone()).unwrap();
        let logits = policy.logits(&ids, &positions, Adapter::Off).unwrap().concat();
        let pairs = logits.iter().zip(expected.iter().flatten());
        apart = pairs.map(|(ours, theirs)| (f64::from(*ours) - theirs).abs()).fold(apart, f64::max);
    }
    apart
}

#[test]
fn a_table_that_is_rounded_first_moves_the_logits_far_beyond_the_tolerance() {
    for case in CASES {
        let dir = folder(case);
        // The same model with the tables of its matrices in bf16, as a fallback of bitsandbytes in torch has them.
        let rounded = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(&dir).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file()) {
            std::fs::copy(entry.path(), rounded.path().join(entry.file_name())).unwrap();
        }
        let path = rounded.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        for tensors in modelcard::read(&dir).unwrap().tensors.iter().filter_map(|tensor| tensor.four_bit.as_ref()) {
            let table = &tensors.table;
            for value in bytes[table.offset_bytes as usize..][..table.size_bytes()].as_chunks_mut::<4>().0 {
                *value = bf16::from_f32(f32::from_le_bytes(*value)).to_f32().to_le_bytes();
            }
        }
        std::fs::write(path, bytes).unwrap();
        let (exact, rounded) = (apart(&dir, case), apart(rounded.path(), case));
        println!("{case}: exact {exact:.1e}, table in bf16 {rounded:.1e}");
        assert!(exact < 2e-4, "{case}: {exact}");
        assert!(rounded > 0.01, "{case}: {rounded}");
    }
}

/// Writes the same model with its matrices expanded to bf16.
fn expanded(case: &str, to: &Path) {
    let dir = folder(case);
    for entry in std::fs::read_dir(&dir).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file()) {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let card = modelcard::read(&dir).unwrap();
    let mut weights = Weights::open(&dir, &card);
    let mut header = serde_json::Map::new();
    let mut bytes: Vec<u8> = Vec::new();
    for tensor in &card.tensors {
        let values = weights.values(&tensor.name).unwrap().0;
        let begin = bytes.len();
        bytes.extend(values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()));
        assert!(values.iter().all(|value| bf16::from_f32(*value).to_f32() == *value), "{}", tensor.name);
        let entry = json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, bytes.len()]});
        header.insert(tensor.name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let all = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
    std::fs::write(to.join("model.safetensors"), all).unwrap();
    let path = to.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("quantization_config");
    std::fs::write(path, config.to_string()).unwrap();
}

/// The bits of an adapter's gradient and of the log-probs.
fn pass(dir: &Path, policy: &mut Policy) -> (Vec<u32>, Vec<u32>) {
    policy.load_lora(&dir.join("lora")).unwrap();
    let owned = rows_of(1);
    let rows = as_rows(&owned);
    let g = weights(&rows, 0);
    let mut gradient = policy.zero_gradient().unwrap();
    let scores = policy.forward_backward(&rows, 0.8, &mut |_| Ok(g.clone()), &mut gradient).unwrap();
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
    (bits(&gradient.values().unwrap()), scores.iter().flat_map(|score| bits(&score.logps)).collect())
}

#[test]
fn every_instruction_set_gives_the_bits_of_the_expanded_base() {
    for case in CASES {
        let plain = tempfile::tempdir().unwrap();
        expanded(case, plain.path());
        for isa in Isa::available() {
            for dtype in [ComputeDtype::F32, ComputeDtype::Bf16] {
                let load = |dir: &Path| {
                    let mut policy = Policy::on_cpu(dir, Cpu::with(dtype, isa, Arc::new(Threads::new(2)))).unwrap();
                    pass(&folder(case), &mut policy)
                };
                assert!(load(&folder(case)) == load(plain.path()), "{case} {isa} {dtype:?}: other bits");
            }
        }
    }
}

/// Runs a job on a model, and returns the adapter's bytes.
fn job(dir: &Path, dtype: ComputeDtype, four_bit: Option<(QuantType, bool)>) -> Vec<u8> {
    let mut plan = plan();
    plan.training.dtype = dtype;
    if let Some((quant_type, is_nested)) = four_bit {
        plan.training.load_in_4bit = true;
        plan.training.bnb_4bit_quant_type = quant_type;
        plan.training.use_bnb_nested_quant = is_nested;
    }
    let mut host = TestHost::default();
    assert_eq!(train_model(dir, &plan, rows(), Start::default(), &mut host).unwrap(), None);
    for trace in &host.traces {
        assert_eq!(trace.new_logps, trace.old_logps, "step {}: the first log-ratio is not 0", trace.step);
    }
    host.saved.last().unwrap().adapter()
}

#[test]
fn a_job_ends_with_the_adapter_of_the_expanded_base_and_of_quantizing_at_load() {
    for (case, four_bit) in [
        ("qwen3_nf4", (QuantType::Nf4, true)),
        ("qwen3_nf4_single", (QuantType::Nf4, false)),
        ("llama_fp4", (QuantType::Fp4, true)),
    ] {
        let plain = tempfile::tempdir().unwrap();
        expanded(case, plain.path());
        // The base as it was before quantization.
        let before = tempfile::tempdir().unwrap();
        expanded(case, before.path());
        std::fs::copy(folder(case).join("unquantised.safetensors"), before.path().join("model.safetensors")).unwrap();
        for dtype in [ComputeDtype::F32, ComputeDtype::Bf16] {
            let stored = job(&folder(case), dtype, None);
            assert!(
                job(plain.path(), dtype, None) == stored,
                "{case} {dtype:?}: the expanded base gives another adapter"
            );
            assert!(job(before.path(), dtype, Some(four_bit)) == stored, "{case} {dtype:?}: quantizing at load");
            assert!(job(before.path(), dtype, None) != stored, "{case} {dtype:?}: quantization has no effect");
        }
    }
}

#[test]
fn a_job_on_a_hybrid_that_is_quantized_at_load_is_exactly_on_policy() {
    let dir = folder("qwen3_5");
    for dtype in [ComputeDtype::F32, ComputeDtype::Bf16] {
        // The job checks that every first log-ratio is 0.
        let quantized = job(&dir, dtype, Some((QuantType::Nf4, true)));
        assert!(quantized == job(&dir, dtype, Some((QuantType::Nf4, true))), "{dtype:?}: the same job, other bytes");
        assert!(quantized != job(&dir, dtype, None), "{dtype:?}: quantization has no effect");
    }
}
