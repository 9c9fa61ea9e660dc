//! Long completions on the CPU: they can be decoded and trained, sampling and training agree bit for bit at any length,
//! and memory grows at most linearly with the length. Each length runs in a child process, whose peak memory (VmHWM) is
//! measured. Beyond a sliding window, sampling and training agree on every exact backend.

use std::path::PathBuf;
use std::process::Command;

use rlood_engine::backend::BackendKind;
use rlood_engine::memory::peak_resident_bytes;
use rlood_engine::model::{Adapter, Pick, Policy, Trajectory};
use rlood_engine::random::{Key, Stream};
use rlood_types::spec::ComputeDtype;
use rlood_types::spec::LoraPlan;

use crate::gradients::{architectures, as_rows, fixture, random_ids};
use crate::kinds::{kinds, load_exact};

const CHILD: &str = "RLOOD_TEST_LONG_CHILD";
/// Maximum growth of the memory above the base if the length grows four times.
const GROWTH: f64 = 4.6;

/// Loads the bundled model. The loop does not check how many positions it was trained on.
fn tiny() -> Policy {
    let dir = rlood_test_support::tiny_model();
    let mut policy = Policy::load_dtype(&dir, BackendKind::Cpu, ComputeDtype::Bf16).unwrap();
    policy.add_lora(&LoraPlan::all_linear(16, 32.0), 1).unwrap();
    policy
}

/// Samples a completion of `length` tokens for each copy of each prompt, prompt by prompt, with log-probs.
fn sample(policy: &Policy, prompts: &[&[u32]], copies: usize, length: usize) -> Vec<(Vec<u32>, Vec<f32>)> {
    let key = Key::new(11, Stream::Probe);
    let mut state = policy.begin(Adapter::On);
    policy.join(&mut state, prompts, copies, length).unwrap();
    let mut rows = vec![(Vec::new(), Vec::new()); prompts.len() * copies];
    for step in 0..length as u64 {
        let uniform = |row: usize| key.with(1 + row as u64).with(step).uniform();
        let picks: Vec<Pick> = (0..rows.len()).map(|row| Pick { temperature: 1.0, uniform: uniform(row) }).collect();
        let chosen = policy.choose(&state, &picks).unwrap();
        for ((completion, logps), chosen) in rows.iter_mut().zip(&chosen) {
            completion.push(chosen.token);
            logps.push(chosen.logp);
        }
        let tokens: Vec<u32> = chosen.iter().map(|chosen| chosen.token).collect();
        policy.append(&mut state, &tokens).unwrap();
    }
    rows
}

/// Index of the first token whose log-prob at sampling differs from the training forward's.
fn first_difference(sampled: &[f32], scored: &[f32]) -> Option<usize> {
    assert_eq!(sampled.len(), scored.len());
    sampled.iter().zip(scored).position(|(a, b)| a.to_bits() != b.to_bits())
}

/// Samples a completion of `length` tokens and trains on it; returns the norm of the gradient.
fn decode_and_train(policy: &Policy, length: usize) -> f64 {
    let key = Key::new(11, Stream::Probe);
    let prompt: Vec<u32> = (0..32).map(|i| 4 + key.with(i).below(300) as u32).collect();
    let (completion, recorded) = sample(policy, &[&prompt], 1, length).remove(0);
    let row = Trajectory::of_completion(&prompt, &completion);
    let mut gradient = policy.zero_gradient().unwrap();
    let g = vec![vec![-1.0 / length as f32; length]];
    let scores = policy.forward_backward(&[row], 1.0, &mut |_| Ok(g.clone()), &mut gradient).unwrap();
    assert_eq!(first_difference(&recorded, &scores[0].logps), None);
    gradient.clip(0.0).unwrap()
}

/// Prompts and completions much longer than windows of 8 tokens, so that the cache drops most positions. The oracle is
/// left out, because it sums in another order.
#[test]
fn sampling_far_beyond_a_window_agrees_with_training() {
    let prompts = [random_ids(30, 600), random_ids(31, 3)];
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    for kind in kinds() {
        for name in architectures(kind).filter(|name| ["mistral", "gemma2", "gemma3_text", "olmo3"].contains(name)) {
            let mut policy = load_exact(&fixture(name), kind, ComputeDtype::F32);
            assert!(policy.card().config.windows.contains(&Some(8)), "{name}");
            policy.load_lora(&fixture(name).join("lora")).unwrap();
            let sampled = sample(&policy, &prompts, 2, 620);
            let of_prompt = |(row, (ids, _)): (usize, &(Vec<u32>, Vec<f32>))| (prompts[row / 2].to_vec(), ids.clone());
            let owned: Vec<(Vec<u32>, Vec<u32>)> = sampled.iter().enumerate().map(of_prompt).collect();
            let scores = policy.score(&as_rows(&owned), 1.0, Adapter::On).unwrap();
            for (row, ((_, sampled), score)) in sampled.iter().zip(&scores).enumerate() {
                let what = format!("{name}, {kind:?}, row {row}");
                if policy.samples_exactly() {
                    assert_eq!(first_difference(sampled, &score.logps), None, "{what}");
                }
                let worst = sampled.iter().zip(&score.logps).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < 1e-4, "{what}: {worst}");
            }
        }
    }
}

/// Does something only in a process that [`measure`] started.
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

/// Peak memory above the base, in bytes.
fn measure(length: usize) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("peak");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "long::child", "--test-threads=1"])
        .env(CHILD, format!("{length}:{}", file.display()))
        .output()
        .unwrap();
    let printed = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{length} tokens: {}", String::from_utf8_lossy(&printed));
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
