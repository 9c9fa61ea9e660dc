//! 4-bit matrices: the fixtures' codes come out of our own quantization, and their values have one rounding.

use std::path::{Path, PathBuf};

use half::bf16;
use rlood_engine::backend::BackendKind;
use rlood_engine::kernels::four_bit::{FourBit, Rounding, Scales};
use rlood_engine::load::Weights;
use rlood_engine::model::{Adapter, Policy};
use rlood_engine::quantize::{FP4, NF4, quantize};
use rlood_model_files as modelcard;
use serde_json::Value;

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
