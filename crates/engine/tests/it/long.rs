//! Long completions on the CPU: they decode and train, sampling and training agree bit for bit however long they are, and
//! memory grows with their length, no faster. Each length in a process of its own, whose high-water mark (VmHWM) counts.

use std::path::PathBuf;
use std::process::Command;

use rlood_engine::backend::BackendKind;
use rlood_engine::memory::peak_resident_bytes;
use rlood_engine::model::{Adapter, Pick, Policy, Trajectory};
use rlood_engine::random::{Key, Stream};
use rlood_types::spec::ComputeDtype;
use rlood_types::spec::LoraPlan;

const CHILD: &str = "RLOOD_TEST_LONG_CHILD";
/// Four times the length may take so many times the memory above the base.
const GROWTH: f64 = 4.6;

/// The bundled model; nothing below the loop asks how many positions it was trained on.
fn tiny() -> Policy {
    let dir = rlood_test_support::tiny_model();
    let mut policy = Policy::load_dtype(&dir, BackendKind::Cpu, ComputeDtype::Bf16).unwrap();
    policy.add_lora(&LoraPlan::all_linear(16, 32.0), 1).unwrap();
    policy
}

/// Sample a completion of so many tokens and train on it; the norm of its gradient.
fn decode_and_train(policy: &Policy, length: usize) -> f64 {
    let key = Key::new(11, Stream::Probe);
    let prompt: Vec<u32> = (0..32).map(|i| 4 + key.with(i).below(300) as u32).collect();
    let mut state = policy.begin(Adapter::On);
    policy.join(&mut state, &[&prompt], 1, length).unwrap();
    let (mut completion, mut recorded) = (Vec::new(), Vec::new());
    for step in 0..length {
        let uniform = key.with(1).with(step as u64).uniform();
        let chosen = policy.choose(&state, &[Pick { temperature: 1.0, uniform }]).unwrap()[0];
        completion.push(chosen.token);
        recorded.push(chosen.logp);
        if step + 1 < length {
            policy.append(&mut state, &[chosen.token]).unwrap();
        }
    }
    drop(state);
    let row = Trajectory::of_completion(&prompt, &completion);
    let mut gradient = policy.zero_gradient().unwrap();
    let g = vec![vec![-1.0 / length as f32; length]];
    let scores = policy.forward_backward(&[row], 1.0, &mut |_| Ok(g.clone()), &mut gradient).unwrap();
    let differ = scores[0].logps.iter().zip(&recorded).position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(differ, None, "the first token whose recorded log-prob is not that of the training forward");
    gradient.clip(0.0).unwrap()
}

/// Only in a process that [`measure`] started.
#[test]
fn child() {
    let Some(argument) = std::env::var_os(CHILD) else { return };
    let argument = argument.into_string().unwrap();
    let (length, file) = argument.split_once(':').unwrap();
    let policy = tiny();
    decode_and_train(&policy, 16);
    let base = peak_resident_bytes().unwrap();
    let started = std::time::Instant::now();
    let norm = decode_and_train(&policy, length.parse().unwrap());
    assert!(norm.is_finite() && norm > 0.0, "{norm}");
    let seconds = started.elapsed().as_secs_f64();
    std::fs::write(PathBuf::from(file), format!("{base} {} {seconds}", peak_resident_bytes().unwrap())).unwrap();
}

/// Bytes above the base.
fn measure(length: usize) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("peak");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "long::child", "--test-threads=1"])
        .env(CHILD, format!("{length}:{}", file.display()))
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{length} tokens: {}", String::from_utf8_lossy(&said));
    let text = std::fs::read_to_string(&file).unwrap();
    let numbers: Vec<f64> = text.split(' ').map(|number| number.parse().unwrap()).collect();
    let above = (numbers[1] - numbers[0]) as u64;
    println!("long {length}: {:.1} MiB above the base, {:.1} s", above as f64 / f64::from(1 << 20), numbers[2]);
    above
}

fn assert_linear(length: usize) {
    let (shorter, longer) = (measure(length / 4), measure(length));
    let growth = longer as f64 / shorter as f64;
    println!("long {length}: {growth:.2} times the memory of a quarter of it");
    assert!(growth <= GROWTH, "{longer} bytes at {length} tokens, {shorter} at {}: {growth:.2}", length / 4);
}

#[test]
fn a_completion_of_4096_tokens_decodes_and_trains_in_linear_memory() {
    assert_linear(4096);
}

#[test]
#[ignore = "a minute and more: attention over 16,384 tokens"]
fn a_completion_of_16384_tokens_decodes_and_trains_in_linear_memory() {
    assert_linear(16384);
}
