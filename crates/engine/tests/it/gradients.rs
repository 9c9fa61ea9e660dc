//! Compares gradients with finite differences, and checks that results do not depend on the division of work:
//! micro-batches, shared prompts, the KV cache, the other rows of a batch. Runs on every backend; `bits.rs` checks what
//! is equal bit for bit.

use std::path::PathBuf;

use rlood_engine::backend::BackendKind;
use rlood_engine::model::pass::{RowDropout, TrainedRows};
use rlood_engine::model::{Adapter, Flat, Policy, Trajectory};
use rlood_engine::random::{Key, Stream};
use rlood_types::spec::LoraPlan;

use crate::kinds::kinds;

const ARCHITECTURES: [&str; 17] = [
    "qwen3",
    "qwen2",
    "llama",
    "llama3rope",
    "llama_bias",
    "mistral",
    "smollm3",
    "granite",
    "olmo2",
    "ministral3",
    "gemma2",
    "gemma3_text",
    "phi3_partial",
    "olmo3",
    "granitemoehybrid",
    "qwen3_5",
    "qwen3_5_vl",
];

/// The architectures that a backend supports; a GPU has no kernels for some.
pub fn architectures(kind: BackendKind) -> impl Iterator<Item = &'static str> {
    let beyond_gpu = |name| rlood_model_files::read(&fixture(name)).unwrap().config.beyond_gpu().is_some();
    let is_gpu = matches!(kind, BackendKind::Cuda { .. });
    ARCHITECTURES.into_iter().filter(move |name| !is_gpu || !beyond_gpu(name))
}

/// Whether all weights of an architecture can be trained; those of Gated DeltaNet layers cannot.
pub fn trains_in_full(name: &str) -> bool {
    rlood_model_files::read(&fixture(name)).unwrap().config.delta_net.is_none()
}

pub fn fixture(name: &str) -> PathBuf {
    rlood_test_support::fixture("parity").join(name)
}

/// Loads a model with an adapter whose A and B are both nonzero.
fn policy(name: &str, kind: BackendKind) -> Policy {
    let dir = fixture(name);
    let mut policy = Policy::load(&dir, kind).unwrap();
    policy.load_lora(&dir.join("lora")).unwrap();
    policy
}

pub fn random_ids(seed: u64, count: usize) -> Vec<u32> {
    let key = Key::new(seed, Stream::Probe);
    (0..count as u64).map(|i| 4 + key.with(i).below(316) as u32).collect()
}

/// Prompts and completions of several lengths; the first two and the last two rows share a prompt.
pub fn rows_of(seed: u64) -> Vec<(Vec<u32>, Vec<u32>)> {
    [(0, 7, 9), (0, 7, 4), (1, 3, 12), (2, 11, 1), (2, 11, 6)]
        .iter()
        .enumerate()
        .map(|(i, (prompt, p, c))| (random_ids(seed + prompt, *p), random_ids(seed + 100 + i as u64, *c)))
        .collect()
}

pub fn as_rows(rows: &[(Vec<u32>, Vec<u32>)]) -> Vec<Trajectory<'_>> {
    rows.iter().map(|(prompt, completion)| Trajectory::of_completion(prompt, completion)).collect()
}

/// A different dL/dlogp for each token, so that swapped rows are detected.
pub fn weights(rows: &[Trajectory], offset: usize) -> Vec<Vec<f32>> {
    let weight = |row: usize, token: usize| ((row * 7 + token * 3) % 11) as f32 / 5.0 - 1.0;
    rows.iter()
        .enumerate()
        .map(|(r, row)| (0..row.num_model_tokens()).map(|t| weight(r + offset, t)).collect())
        .collect()
}

fn loss(policy: &Policy, rows: &[Trajectory]) -> f64 {
    let scores = policy.score(rows, 0.8, Adapter::On).unwrap();
    let pairs = scores.iter().zip(weights(rows, 0)).flat_map(|(s, w)| s.logps.clone().into_iter().zip(w));
    pairs.map(|(p, w)| f64::from(p) * f64::from(w)).sum()
}

fn gradient(policy: &Policy, rows: &[Trajectory], offset: usize, into: &mut Flat) {
    let g = weights(rows, offset);
    let scores = policy.forward_backward(rows, 0.8, &mut |_| Ok(g.clone()), into).unwrap();
    assert_eq!(scores, policy.score(rows, 0.8, Adapter::On).unwrap());
}

fn values(flat: &Flat) -> Vec<f32> {
    flat.values().unwrap().into_owned()
}

pub fn norm(values: &[f32]) -> f64 {
    values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt()
}

/// Compares the gradient of every parameter with central differences, along the gradient and along its largest entry.
///
/// Runs on the oracle, whose operations `ops/tests.rs` compares with autograd, and on a GPU or the emulator: there only
/// along the gradient, in the first and the last layer. Most of the time is spent in forward passes.
fn assert_gradients_are_differences(name: &str, kind: BackendKind, policy: &mut Policy, step: f64) {
    let name = &format!("{name}, {kind:?}");
    let owned = rows_of(1);
    let rows = as_rows(&owned);
    let start = policy.parameter_values().unwrap();
    let mut gradient_all = policy.zero_gradient().unwrap();
    gradient(policy, &rows, 0, &mut gradient_all);
    let gradient_all = values(&gradient_all);
    assert!(gradient_all.iter().all(|g| g.is_finite()), "{name}");
    let mut worst = 0f64;
    let (oracle, slow) = (kind == BackendKind::Reference, kind != BackendKind::Cpu);
    // The CPU kernels sum in single chains of f32, so their losses have more noise: up to 1.7e-2 for small differences.
    // `precision.rs` compares the same gradients with the oracle's at 1e-5.
    let tolerance = if oracle { 2e-2 } else { 4e-2 };
    for info in policy.parameters() {
        if slow && [".layers.1.", ".layers.2."].iter().any(|layer| info.name.contains(layer)) {
            continue;
        }
        let range = info.offset..info.offset + info.shape.iter().product::<usize>();
        let part = &gradient_all[range.clone()];
        let size = norm(part);
        // A bias on the keys shifts all scores of a query equally except for the rotation, so its
        // gradient may be small.
        let least = if info.name.ends_with("k_proj.bias") { 1e-4 } else { 1e-2 };
        assert!(size > least, "{name}: {} has no gradient", info.name);
        let largest = (0..part.len()).max_by(|a, b| part[*a].abs().total_cmp(&part[*b].abs())).unwrap();
        let mut one = vec![0f64; part.len()];
        one[largest] = 1.0;
        let along = part.iter().map(|g| f64::from(*g) / size).collect::<Vec<f64>>();
        for direction in [along, one].into_iter().take(if slow { 1 } else { 2 }) {
            let mut at = |sign: f64| {
                let mut values = start.clone();
                for (value, d) in values[range.clone()].iter_mut().zip(&direction) {
                    *value += (sign * step * d) as f32;
                }
                policy.set_parameter_values(&values).unwrap();
                loss(policy, &rows)
            };
            let difference = (at(1.0) - at(-1.0)) / (2.0 * step);
            let analytic: f64 = part.iter().zip(&direction).map(|(g, d)| f64::from(*g) * d).sum();
            let error = (difference - analytic).abs() / analytic.abs().max(0.5);
            assert!(error < tolerance, "{name}: {}: {analytic} but differences give {difference}", info.name);
            worst = worst.max(error);
        }
    }
    policy.set_parameter_values(&start).unwrap();
    println!("gradients {name}: worst relative error against finite differences {worst:.1e}");
}

/// All architectures on all backends.
fn each() -> impl Iterator<Item = (&'static str, BackendKind)> {
    kinds().into_iter().flat_map(|kind| architectures(kind).map(move |name| (name, kind)))
}

#[test]
fn every_lora_parameter_gets_the_gradient_of_finite_differences() {
    for (name, kind) in each() {
        // The norm after a Gated DeltaNet makes the loss curved, so the differences must be small.
        let step = if trains_in_full(name) { 4e-3 } else { 5e-4 };
        assert_gradients_are_differences(name, kind, &mut policy(name, kind), step);
    }
}

#[test]
fn every_weight_gets_the_gradient_of_finite_differences() {
    let mut kinds = std::collections::BTreeSet::new();
    for (name, kind) in each() {
        let dir = fixture(name);
        let mut policy = Policy::load(&dir, kind).unwrap();
        if !trains_in_full(name) {
            let error = policy.train_all(&dir).unwrap_err().to_string();
            assert!(error.contains("linear_attention") && error.contains("lora"), "{name}: {error}");
            continue;
        }
        let base = policy.score(&as_rows(&rows_of(1)), 0.8, Adapter::On).unwrap();
        policy.train_all(&dir).unwrap();
        assert_eq!(policy.score(&as_rows(&rows_of(1)), 0.8, Adapter::On).unwrap(), base);
        assert_eq!(policy.flat().len() as u64, policy.card().num_parameters, "{name}: every weight is trained");
        assert_gradients_are_differences(&format!("{name}, all weights"), kind, &mut policy, 1e-3);
        let tied = policy.card().config.tie_word_embeddings;
        kinds.extend(policy.parameters().into_iter().map(|info| {
            let kind = info.name.rsplit("layers.0.").next().unwrap_or_default().to_owned();
            if kind == "model.embed_tokens.weight" { format!("{kind} tied {tied}") } else { kind }
        }));
    }
    // Every kind of parameter that the architectures have occurred.
    for kind in [
        "model.embed_tokens.weight tied true",
        "model.embed_tokens.weight tied false",
        "lm_head.weight",
        "model.norm.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.bias",
        "self_attn.o_proj.bias",
        "mlp.gate_proj.bias",
        "mlp.down_proj.bias",
        "mlp.down_proj.weight",
    ] {
        assert!(kinds.contains(kind), "{kind} is in none of the architectures: {kinds:?}");
    }
}

#[test]
fn the_gradient_through_dropout_is_that_of_what_is_left() {
    // The gradient must match the differences of the masked forward pass as a function of the parameters.
    for (name, kind) in each().filter(|(name, _)| ["qwen3", "llama_bias"].contains(name)) {
        let mut policy = policy(name, kind);
        let name = format!("{name}, {kind:?}");
        policy.set_lora_dropout(0.3);
        let owned = rows_of(1);
        let rows = as_rows(&owned);
        let dropout = Some(RowDropout { key: Key::new(5, Stream::Dropout).with(1), first_row: 0 });
        let start = policy.parameter_values().unwrap();
        let g = weights(&rows, 0);
        let run = |policy: &Policy, into: &mut Flat| -> f64 {
            let scores = policy
                .forward_backward_with(
                    &rows,
                    0.8,
                    &TrainedRows { dropout, second_pass: &[] },
                    &mut |_| Ok(g.clone()),
                    into,
                )
                .unwrap();
            let pairs = scores.iter().zip(&g).flat_map(|(s, w)| s.logps.clone().into_iter().zip(w.clone()));
            pairs.map(|(p, w)| f64::from(p) * f64::from(w)).sum()
        };
        let mut all = policy.zero_gradient().unwrap();
        let dropped = run(&policy, &mut all);
        let all = values(&all);
        assert!((dropped - loss(&policy, &rows)).abs() > 1e-3, "{name}: something is dropped");
        for info in policy.parameters() {
            let range = info.offset..info.offset + info.shape.iter().product::<usize>();
            let part = &all[range.clone()];
            let (size, step) = (norm(part), 4e-3);
            let mut scratch = policy.zero_gradient().unwrap();
            let mut at = |sign: f64| {
                let mut values = start.clone();
                for (value, g) in values[range.clone()].iter_mut().zip(part) {
                    *value += (sign * step * f64::from(*g) / size) as f32;
                }
                policy.set_parameter_values(&values).unwrap();
                run(&policy, &mut scratch)
            };
            let difference = (at(1.0) - at(-1.0)) / (2.0 * step);
            let error = (difference - size).abs() / size.max(0.5);
            assert!(error < 2e-2, "{name}: {}: {size} but differences give {difference}", info.name);
        }
        policy.set_parameter_values(&start).unwrap();
    }
}

#[test]
fn rows_without_a_gradient_change_no_bit_in_a_second_pass() {
    // Backends may leave out work for these rows. A row that has a gradient gets it there too, with other last bits.
    for (name, kind) in each().filter(|(name, _)| ["qwen3", "gemma2"].contains(name)) {
        let policy = policy(name, kind);
        let owned = rows_of(3);
        let rows = as_rows(&owned);
        let mut g = weights(&rows, 0);
        g[1].fill(0.0);
        g[3].fill(0.0);
        let run = |second_pass: &[bool]| {
            let (mut gradient, options) = (policy.zero_gradient().unwrap(), TrainedRows { dropout: None, second_pass });
            let scores = policy.forward_backward_with(&rows, 0.8, &options, &mut |_| Ok(g.clone()), &mut gradient);
            (scores.unwrap(), values(&gradient))
        };
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
        let (scores, gradient) = run(&[]);
        assert!(norm(&gradient) > 0.0, "{name}, {kind:?}");
        for second_pass in [&[false, true, false, true, false][..], &[false, true]] {
            let (again, found) = run(second_pass);
            assert_eq!((again, bits(&found)), (scores.clone(), bits(&gradient)), "{name}, {kind:?}, {second_pass:?}");
        }
        for second_pass in [&[true, true][..], &[true; 5]] {
            let (again, found) = run(second_pass);
            assert_eq!(again, scores, "{name}, {kind:?}, {second_pass:?}");
            let difference: Vec<f32> = found.iter().zip(&gradient).map(|(a, b)| a - b).collect();
            assert!(norm(&difference) < 1e-5 * norm(&gradient), "{name}, {kind:?}, {second_pass:?}");
        }
    }
}

#[test]
fn dropout_does_not_depend_on_the_micro_batches() {
    for kind in kinds() {
        assert_dropout_does_not_depend_on_the_micro_batches(kind);
    }
}

fn assert_dropout_does_not_depend_on_the_micro_batches(kind: BackendKind) {
    let mut policy = policy("qwen3", kind);
    policy.set_lora_dropout(0.5);
    let owned = rows_of(2);
    let rows = as_rows(&owned);
    let key = Key::new(7, Stream::Dropout).with(3);
    let run = |key: Key, cuts: &[usize]| {
        let (mut gradient, mut scores) = (policy.zero_gradient().unwrap(), Vec::new());
        let mut begin = 0;
        for end in cuts.iter().copied().chain([rows.len()]) {
            let g = weights(&rows[begin..end], begin);
            let dropout = Some(RowDropout { key, first_row: begin });
            let rows = &rows[begin..end];
            scores.extend(
                policy
                    .forward_backward_with(
                        rows,
                        0.8,
                        &TrainedRows { dropout, second_pass: &[] },
                        &mut |_| Ok(g.clone()),
                        &mut gradient,
                    )
                    .unwrap(),
            );
            begin = end;
        }
        (values(&gradient), scores)
    };
    let (whole, scores) = run(key, &[]);
    // Splits inside and between the groups that share a prompt.
    for cuts in [&[1, 2, 3, 4][..], &[2, 3][..], &[1, 4][..]] {
        let (split, split_scores) = run(key, cuts);
        let difference: Vec<f32> = whole.iter().zip(&split).map(|(a, b)| a - b).collect();
        assert!(norm(&difference) < 1e-5 * norm(&whole), "{kind:?} cut at {cuts:?}");
        for (a, b) in scores.iter().zip(&split_scores) {
            assert!(a.logps.iter().zip(&b.logps).all(|(a, b)| (a - b).abs() < 1e-5), "{kind:?} cut at {cuts:?}");
        }
    }
    // Another step drops other values; without a key nothing is dropped.
    let (other, _) = run(Key::new(7, Stream::Dropout).with(4), &[]);
    let difference: Vec<f32> = whole.iter().zip(&other).map(|(a, b)| a - b).collect();
    assert!(norm(&difference) > 0.1 * norm(&whole));
    let mut plain = policy.zero_gradient().unwrap();
    gradient(&policy, &rows, 0, &mut plain);
}

#[test]
fn the_micro_batch_split_changes_no_gradient() {
    for (name, kind) in each() {
        let policy = policy(name, kind);
        let owned = rows_of(2);
        let rows = as_rows(&owned);
        let mut whole = policy.zero_gradient().unwrap();
        gradient(&policy, &rows, 0, &mut whole);
        let whole = values(&whole);
        // Splits inside and between the groups that share a prompt.
        for cuts in [&[1, 2, 3, 4][..], &[2, 3][..], &[1, 4][..]] {
            let mut split = policy.zero_gradient().unwrap();
            let mut begin = 0;
            for end in cuts.iter().copied().chain([rows.len()]) {
                gradient(&policy, &rows[begin..end], begin, &mut split);
                begin = end;
            }
            let difference: Vec<f32> = whole.iter().zip(&values(&split)).map(|(a, b)| a - b).collect();
            let error = norm(&difference) / norm(&whole);
            assert!(error < 1e-5, "{name}, {kind:?} cut at {cuts:?}: {error}");
        }
    }
}

#[test]
fn empty_completions_and_zero_gradients_are_harmless() {
    for kind in kinds() {
        assert_empty_completions_and_zero_gradients_are_harmless(kind);
    }
}

fn assert_empty_completions_and_zero_gradients_are_harmless(kind: BackendKind) {
    let policy = policy("qwen3", kind);
    let rows = [Trajectory::of_completion(&[5, 6], &[]), Trajectory::of_completion(&[5, 6], &[7])];
    let scores = policy.score(&rows, 1.0, Adapter::On).unwrap();
    assert_eq!(scores[0].logps.len(), 0);
    assert_eq!(scores[1].logps.len(), 1);
    let mut gradient = policy.zero_gradient().unwrap();
    policy.forward_backward(&rows, 1.0, &mut |_| Ok(vec![vec![], vec![0.0]]), &mut gradient).unwrap();
    assert!(values(&gradient).iter().all(|g| *g == 0.0));
    assert!(policy.score(&[], 1.0, Adapter::On).unwrap().is_empty());
    // Invalid rows must give an error.
    assert!(policy.score(&[Trajectory::of_completion(&[], &[1])], 1.0, Adapter::On).is_err());
    assert!(policy.score(&[Trajectory::of_completion(&[1], &[320])], 1.0, Adapter::On).is_err());
    assert!(policy.score(&[Trajectory::of_completion(&[320], &[1])], 1.0, Adapter::On).is_err());
    assert!(policy.forward_backward(&rows, 1.0, &mut |_| Ok(vec![vec![]]), &mut gradient).is_err());
}

#[test]
fn a_fresh_adapter_is_the_base_model_and_follows_its_seed() {
    for kind in kinds() {
        assert_a_fresh_adapter_is_the_base_model_and_follows_its_seed(kind);
    }
}

fn assert_a_fresh_adapter_is_the_base_model_and_follows_its_seed(kind: BackendKind) {
    let mut policy = Policy::load(&fixture("qwen2"), kind).unwrap();
    let owned = rows_of(3);
    let base = policy.score(&as_rows(&owned), 1.0, Adapter::Off).unwrap();
    policy.add_lora(&LoraPlan::all_linear(4, 8.0), 42).unwrap();
    assert_eq!(policy.score(&as_rows(&owned), 1.0, Adapter::On).unwrap(), base);
    let first = policy.parameter_values().unwrap();
    policy.add_lora(&LoraPlan::all_linear(4, 8.0), 42).unwrap();
    assert_eq!(policy.parameter_values().unwrap(), first);
    policy.add_lora(&LoraPlan::all_linear(4, 8.0), 43).unwrap();
    assert_ne!(policy.parameter_values().unwrap(), first);
    for info in policy.parameters() {
        let part = &first[info.offset..info.offset + info.shape.iter().product::<usize>()];
        if info.name.ends_with("lora_B.weight") {
            assert!(part.iter().all(|v| *v == 0.0));
        } else {
            // A is uniform in ±1/√in, with variance 1/(3·in).
            let variance = norm(part).powi(2) / part.len() as f64 * 3.0 * info.shape[1] as f64;
            assert!((0.7..1.3).contains(&variance), "{}: {variance}", info.name);
        }
    }
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
    row.iter().map(|x| f64::from(x - max) - sum.ln()).collect()
}

fn assert_rows_agree(what: &str, a: &[f32], b: &[f32], tolerance: f64) {
    for (a, b) in log_softmax(a).iter().zip(log_softmax(b)) {
        assert!((a - b).abs() < tolerance * b.abs().max(1.0), "{what}: {a} and {b}");
    }
}

#[test]
fn cached_generation_equals_the_full_forward_whatever_the_batch() {
    for (name, kind) in each() {
        let policy = policy(name, kind);
        // The norm after a Gated DeltaNet amplifies the differences between products of the oracle.
        let tolerance = if trains_in_full(name) { 1e-5 } else { 5e-5 };
        let name = format!("{name}, {kind:?}");
        // Longer than Mistral's window of 8; the first and third are the same prompt.
        let prompts = [random_ids(10, 11), random_ids(11, 2), random_ids(10, 11), random_ids(12, 19)];
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let mut state = policy.begin(Adapter::On);
        policy.join(&mut state, &prompts, 3, 40).unwrap();
        let mut logits = policy.next_logits(&state).unwrap();
        assert_eq!((state.len(), logits.len()), (12, 12));
        let mut sequences: Vec<Vec<u32>> = (0..12).map(|row| prompts[row / 3].to_vec()).collect();
        for step in 0..40u64 {
            for (row, sequence) in sequences.iter().enumerate() {
                if step % 3 == 0 || row == 0 {
                    let full = policy.logits(sequence, &[sequence.len() - 1], Adapter::On).unwrap();
                    assert_rows_agree(&format!("{name} step {step} row {row}"), logits.row(row), &full[0], tolerance);
                }
            }
            if step == 10 || step == 20 {
                // Every other row leaves.
                let keep: Vec<bool> = (0..sequences.len()).map(|row| row % 2 == 0).collect();
                policy.retain(&mut state, &keep).unwrap();
                let mut keep = keep.into_iter();
                sequences.retain(|_| keep.next().unwrap());
            }
            let tokens: Vec<u32> = (0..sequences.len()).map(|row| random_ids(step * 50 + row as u64, 1)[0]).collect();
            for (sequence, token) in sequences.iter_mut().zip(&tokens) {
                sequence.push(*token);
            }
            policy.append(&mut state, &tokens).unwrap();
            logits = policy.next_logits(&state).unwrap();
        }
        assert_eq!(sequences.len(), 3);
        // A row alone gives the same result as among others.
        let (prompt, rest) = sequences[0].split_at(prompts[0].len());
        let mut state = policy.begin(Adapter::On);
        policy.join(&mut state, &[prompt], 1, 40).unwrap();
        for token in rest {
            policy.append(&mut state, &[*token]).unwrap();
        }
        let alone = policy.next_logits(&state).unwrap();
        assert_rows_agree(&name, alone.row(0), logits.row(0), tolerance);
        assert!(policy.append(&mut state, &[1, 2]).is_err());
    }
}
