use super::super::isa::Isa;
use super::super::rows::tests::{assert_close, assert_same, noise};
use super::super::threads::Threads;
use super::naive::Inputs;
use super::*;

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// The gradient of Σ dy·f(x) by central differences.
fn differences(x: &[f64], dy: &[f32], f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let loss = |x: &[f64]| f(x).iter().zip(dy).map(|(y, d)| y * f64::from(*d)).sum::<f64>();
    let mut x = x.to_vec();
    (0..x.len())
        .map(|at| {
            let before = x[at];
            x[at] = before + STEP;
            let above = loss(&x);
            x[at] = before - STEP;
            let below = loss(&x);
            x[at] = before;
            (above - below) / (2.0 * STEP)
        })
        .collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn scaled(count: usize, seed: u64, by: f32) -> Vec<f32> {
    noise(count, seed).iter().map(|value| value * by).collect()
}

/// A sequence with normalized queries and keys, and decays from weak to strong.
fn inputs(heads: DeltaHeads, tokens: usize, seed: u64) -> Sequence {
    let mut qkv = noise(tokens * heads.width(), seed);
    unit_heads_in_place(&Threads::new(1), Isa::Portable, &heads, &mut qkv);
    let gates = tokens * heads.num_v_heads;
    let g = noise(gates, seed + 1).iter().enumerate().map(|(at, x)| (x - 0.5) * [0.02, 0.5, 6.0][at % 3]).collect();
    Sequence {
        heads,
        qkv,
        beta: noise(gates, seed + 2).iter().map(|x| x + 0.5).collect(),
        g,
        memory: noise(heads.memory_len(), seed + 3),
        d_out: noise(tokens * heads.v_width(), seed + 4),
        d_memory: noise(heads.memory_len(), seed + 5),
    }
}

struct Sequence {
    heads: DeltaHeads,
    qkv: Vec<f32>,
    beta: Vec<f32>,
    g: Vec<f32>,
    memory: Vec<f32>,
    d_out: Vec<f32>,
    d_memory: Vec<f32>,
}

#[derive(Clone, Default)]
struct Ran {
    out: Vec<f32>,
    memory: Vec<f32>,
    kept: Vec<f32>,
}

#[derive(Clone)]
struct RanBack {
    d_qkv: Vec<f32>,
    d_beta: Vec<f32>,
    d_g: Vec<f32>,
    d_memory: Vec<f32>,
}

impl Sequence {
    fn wide(&self) -> Inputs {
        Inputs {
            heads: self.heads,
            qkv: wide(&self.qkv),
            beta: wide(&self.beta),
            g: wide(&self.g),
            memory: wide(&self.memory),
        }
    }

    /// Runs a range of the tokens from a memory.
    fn run(&self, threads: &Threads, isa: Isa, memory: &[f32], tokens: std::ops::Range<usize>) -> Ran {
        let heads = self.heads;
        let of = |values: &[f32], width: usize| values[tokens.start * width..tokens.end * width].to_vec();
        let mut ran = Ran {
            out: vec![9.0; tokens.len() * heads.v_width()],
            memory: memory.to_vec(),
            kept: vec![9.0; heads.kept_len(tokens.len())],
        };
        let mut sequences = [DeltaSequence {
            qkv: &of(&self.qkv, heads.width()),
            beta: &of(&self.beta, heads.num_v_heads),
            g: &of(&self.g, heads.num_v_heads),
            memory: &mut ran.memory,
            kept: Some(&mut ran.kept),
            out: &mut ran.out,
        }];
        run_sequences(threads, isa, &heads, &mut sequences);
        ran
    }

    fn run_back(&self, threads: &Threads, isa: Isa, kept: &[f32], with_memory: bool) -> RanBack {
        let mut back = RanBack {
            d_qkv: vec![9.0; self.qkv.len()],
            d_beta: vec![9.0; self.beta.len()],
            d_g: vec![9.0; self.g.len()],
            d_memory: self.d_memory.clone(),
        };
        let mut sequences = [DeltaBackward {
            qkv: &self.qkv,
            beta: &self.beta,
            g: &self.g,
            kept,
            d_out: &self.d_out,
            d_memory: with_memory.then_some(&mut back.d_memory),
            d_qkv: &mut back.d_qkv,
            d_beta: &mut back.d_beta,
            d_g: &mut back.d_g,
        }];
        run_sequences_backward(threads, isa, &self.heads, &mut sequences);
        back
    }
}

const SIZES: [(usize, usize, usize, usize, usize); 9] = [
    (1, 1, 1, 1, 1),
    (1, 2, 3, 5, 4),
    (2, 2, 8, 8, 64),
    (2, 6, 16, 8, 65),
    (1, 3, 20, 40, 150),
    (2, 4, 32, 16, 130),
    (1, 1, 128, 128, 200),
    (1, 2, 64, 100, 7),
    (1, 1, 40, 200, 129),
];

fn sizes() -> impl Iterator<Item = (DeltaHeads, usize)> {
    SIZES.into_iter().map(|(k, v, k_dim, v_dim, tokens)| (DeltaHeads::new(k, v, k_dim, v_dim), tokens))
}

#[test]
fn the_naive_gradients_are_finite_differences() {
    for (k_heads, v_heads, k_dim, v_dim, tokens) in [(1, 2, 3, 4, 5), (2, 4, 2, 3, 4)] {
        let sequence = inputs(DeltaHeads::new(k_heads, v_heads, k_dim, v_dim), tokens, 3);
        let given = sequence.wide();
        let dy: Vec<f32> = sequence.d_out.iter().chain(&sequence.d_memory).copied().collect();
        let naive = given.backward(&wide(&sequence.d_out), &wide(&sequence.d_memory));
        let run = |inputs: Inputs| {
            let (mut out, memory) = inputs.forward();
            out.extend(memory);
            out
        };
        let qkv = differences(&given.qkv, &dy, |x| run(Inputs { qkv: x.to_vec(), ..given.clone() }));
        let beta = differences(&given.beta, &dy, |x| run(Inputs { beta: x.to_vec(), ..given.clone() }));
        let g = differences(&given.g, &dy, |x| run(Inputs { g: x.to_vec(), ..given.clone() }));
        let memory = differences(&given.memory, &dy, |x| run(Inputs { memory: x.to_vec(), ..given.clone() }));
        let pairs = [(qkv, naive.d_qkv), (beta, naive.d_beta), (g, naive.d_g), (memory, naive.d_memory)];
        for (differences, naive) in pairs {
            assert_eq!(differences.len(), naive.len());
            for (a, b) in differences.iter().zip(&naive) {
                assert!((a - b).abs() < 1e-8, "{a} and {b}");
            }
        }
    }
}

#[test]
fn the_rule_and_its_gradients_are_the_naive_ones_on_every_isa() {
    for (heads, tokens) in sizes() {
        let sequence = inputs(heads, tokens, 11);
        let given = sequence.wide();
        let (out, memory) = given.forward();
        let zeros = vec![0.0; heads.memory_len()];
        let expected = [&wide(&sequence.d_memory), &zeros].map(|d| given.backward(&wide(&sequence.d_out), d));
        for isa in Isa::available() {
            let mut first: Option<(Ran, [RanBack; 2])> = None;
            for count in [1, 3] {
                let threads = Threads::new(count);
                let what = format!("{isa}, {heads:?}, {tokens} tokens, {count} threads");
                let ran = sequence.run(&threads, isa, &sequence.memory, 0..tokens);
                assert_close(&ran.out, &out, 2e-6, &what);
                assert_close(&ran.memory, &memory, 2e-6, &what);
                assert_same(&ran.kept[..heads.memory_len()], &sequence.memory, &what);
                let backs = [true, false].map(|with| sequence.run_back(&threads, isa, &ran.kept, with));
                for (back, expected) in backs.iter().zip(&expected) {
                    assert_close(&back.d_qkv, &expected.d_qkv, 1e-5, &format!("d_qkv, {what}"));
                    assert_close(&back.d_beta, &expected.d_beta, 1e-5, &format!("d_beta, {what}"));
                    assert_close(&back.d_g, &expected.d_g, 1e-5, &format!("d_g, {what}"));
                }
                assert_close(&backs[0].d_memory, &expected[0].d_memory, 1e-5, &what);
                let (ran_first, backs_first) = first.get_or_insert((ran.clone(), backs.clone()));
                assert_same(&ran.out, &ran_first.out, &what);
                assert_same(&ran.memory, &ran_first.memory, &what);
                for (back, first) in backs.iter().zip(backs_first) {
                    assert_same(&back.d_qkv, &first.d_qkv, &what);
                    assert_same(&back.d_beta, &first.d_beta, &what);
                    assert_same(&back.d_g, &first.d_g, &what);
                    assert_same(&back.d_memory, &first.d_memory, &what);
                }
            }
        }
    }
}

#[test]
fn a_sequence_gives_the_same_bits_in_one_call_in_parts_and_token_by_token() {
    for (heads, tokens) in sizes() {
        let sequence = inputs(heads, tokens, 21);
        for isa in Isa::available() {
            let threads = Threads::new(2);
            let whole = sequence.run(&threads, isa, &sequence.memory, 0..tokens);
            for at_once in [1, 3, 7, 64, 100] {
                let mut memory = sequence.memory.clone();
                let mut out = Vec::new();
                for first in (0..tokens).step_by(at_once) {
                    if first % KEPT_EVERY == 0 {
                        let kept = &whole.kept[first / KEPT_EVERY * heads.memory_len()..][..heads.memory_len()];
                        assert_same(&memory, kept, "a kept state");
                    }
                    let part = sequence.run(&threads, isa, &memory, first..(first + at_once).min(tokens));
                    memory = part.memory;
                    out.extend(part.out);
                }
                let what = format!("{isa}, {heads:?}, {at_once} tokens at once");
                assert_same(&out, &whole.out, &what);
                assert_same(&memory, &whole.memory, &what);
            }
        }
    }
}

#[test]
fn a_row_among_others_gives_the_bits_of_its_sequence() {
    for (heads, tokens) in sizes() {
        let tokens = tokens.min(9);
        let sequences: Vec<Sequence> = (0..5).map(|row| inputs(heads, tokens, 31 + 10 * row)).collect();
        for isa in Isa::available() {
            let threads = Threads::new(3);
            let mut memories: Vec<Vec<f32>> = sequences.iter().map(|sequence| sequence.memory.clone()).collect();
            let mut outs = vec![Vec::new(); sequences.len()];
            for token in 0..tokens {
                let gather = |of: &dyn Fn(&Sequence) -> &[f32], width: usize| -> Vec<f32> {
                    sequences.iter().flat_map(|s| of(s)[token * width..(token + 1) * width].to_vec()).collect()
                };
                let mut out = vec![9.0; sequences.len() * heads.v_width()];
                let mut memories: Vec<&mut [f32]> = memories.iter_mut().map(Vec::as_mut_slice).collect();
                let rows = DeltaRows {
                    qkv: &gather(&|s| &s.qkv, heads.width()),
                    beta: &gather(&|s| &s.beta, heads.num_v_heads),
                    g: &gather(&|s| &s.g, heads.num_v_heads),
                    memories: &mut memories,
                    out: &mut out,
                };
                run_rows(&threads, isa, &heads, rows);
                outs.iter_mut().zip(out.chunks(heads.v_width())).for_each(|(all, out)| all.extend(out));
            }
            for ((sequence, out), memory) in sequences.iter().zip(&outs).zip(&memories) {
                let whole = sequence.run(&threads, isa, &sequence.memory, 0..tokens);
                let what = format!("{isa}, {heads:?}");
                assert_same(out, &whole.out, &what);
                assert_same(memory, &whole.memory, &what);
            }
        }
    }
}

/// Runs all kernels of a layer, forward and backward.
fn all_kernels(isa: Isa, heads: DeltaHeads, tokens: usize) -> Vec<Vec<f32>> {
    let threads = Threads::new(2);
    let len = tokens * heads.width();
    let (x, dy) = (scaled(len, 1, 8.0), noise(len, 2));
    let conv = Conv::new(&noise(4 * heads.width(), 3), Some(&noise(heads.width(), 4)), 4);
    let (mut mixed, mut unit, mut d_unit, mut dx) = (vec![0.0; len], vec![0.0; len], vec![0.0; len], vec![0.0; len]);
    conv.run(&threads, isa, &mut vec![0.0; conv.state_len()], &x, &mut mixed);
    conv.vjp(&threads, isa, &x, &dy, &mut dx);
    unit_heads(&threads, isa, &heads, &mixed, &mut unit);
    unit_heads_vjp(&threads, isa, &heads, &mixed, &dy, &mut d_unit);
    let (a_log, dt_bias) = (noise(heads.num_v_heads, 5), noise(heads.num_v_heads, 6));
    let gates = Gates { a_log: &a_log, dt_bias: &dt_bias };
    let count = tokens * heads.num_v_heads;
    let (a, b) = (scaled(count, 7, 20.0), scaled(count, 8, 20.0));
    let (mut beta, mut g, mut d_a, mut d_b) = (vec![0.0; count], vec![0.0; count], vec![0.0; count], vec![0.0; count]);
    gates.run(&threads, isa, &a, &b, &mut beta, &mut g);
    let gradient = GatesGradient { a: &a, beta: &beta, d_beta: &b, d_g: &a, d_a: &mut d_a, d_b: &mut d_b };
    gates.vjp(&threads, isa, gradient);
    let mut sequence = inputs(heads, tokens, 9);
    (sequence.qkv, sequence.beta, sequence.g) = (unit.clone(), beta.clone(), g.clone());
    let ran = sequence.run(&threads, isa, &sequence.memory, 0..tokens);
    let back = sequence.run_back(&threads, isa, &ran.kept, true);
    let weight = noise(heads.v_dim, 10);
    let norm = GatedNorm { weight: &weight, eps: 1e-6 };
    let z = scaled(ran.out.len(), 11, 8.0);
    let (mut normed, mut d_x, mut d_z) = (z.clone(), z.clone(), z.clone());
    gated_norm(&threads, isa, norm, &ran.out, &z, &mut normed);
    gated_norm_vjp(&threads, isa, norm, &ran.out, &z, &sequence.d_out, &mut d_x, &mut d_z);
    let rule = [ran.out, ran.memory, ran.kept, back.d_qkv, back.d_beta, back.d_g, back.d_memory];
    let others = [mixed, dx, unit, d_unit, beta, g, d_a, d_b, normed, d_x, d_z];
    rule.into_iter().chain(others).collect()
}

#[test]
fn avx2_and_avx512_give_the_same_bits() {
    if !Isa::Avx512.is_available() {
        return;
    }
    for (heads, tokens) in sizes() {
        let kernels = all_kernels(Isa::Avx2, heads, tokens).into_iter().zip(all_kernels(Isa::Avx512, heads, tokens));
        for (number, (a, b)) in kernels.enumerate() {
            assert_same(&a, &b, &format!("result {number}, {heads:?}"));
        }
    }
}

fn naive_conv(weight: &[f32], bias: Option<&[f32]>, width: usize, x: &[f64]) -> Vec<f64> {
    let channels = weight.len() / width;
    (0..x.len())
        .map(|at| {
            let (token, channel) = (at / channels, at % channels);
            let mut sum = bias.map_or(0.0, |bias| f64::from(bias[channel]));
            for tap in 0..width {
                if token + tap + 1 >= width {
                    let input = x[(token + tap + 1 - width) * channels + channel];
                    sum += f64::from(weight[channel * width + tap]) * input;
                }
            }
            sum * sigmoid(sum)
        })
        .collect()
}

#[test]
fn convolutions_and_their_gradients_are_the_naive_ones_on_every_isa() {
    for (channels, width, tokens) in [(1, 4, 1), (3, 1, 5), (5, 4, 2), (37, 4, 9), (16, 2, 150), (600, 4, 3)] {
        let (weight, bias) = (noise(channels * width, 1), noise(channels, 2));
        let (x, dy) = (scaled(channels * tokens, 3, 6.0), noise(channels * tokens, 4));
        for bias in [None, Some(bias.as_slice())] {
            let run = |x: &[f64]| naive_conv(&weight, bias, width, x);
            let out = run(&wide(&x));
            let expected = differences(&wide(&x), &dy, run);
            for isa in Isa::available() {
                let mut first: Option<[Vec<f32>; 3]> = None;
                for count in [1, 3] {
                    let threads = Threads::new(count);
                    let conv = Conv::new(&weight, bias, width);
                    let what = format!("{isa}, {channels} channels, {width} taps, {tokens} tokens");
                    let (mut y, mut dx) = (vec![9.0; x.len()], vec![9.0; x.len()]);
                    let mut state = vec![0.0; conv.state_len()];
                    conv.run(&threads, isa, &mut state, &x, &mut y);
                    conv.vjp(&threads, isa, &x, &dy, &mut dx);
                    assert_close(&y, &out, 1e-6, &what);
                    assert_close(&dx, &expected, 1e-6, &what);
                    let same = first.get_or_insert([y.clone(), dx.clone(), state.clone()]);
                    for (a, b) in [y, dx, state].iter().zip(same) {
                        assert_same(a, b, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn a_convolution_gives_the_same_bits_in_one_call_in_parts_and_among_other_rows() {
    let (channels, tokens) = (150, 40);
    for (width, isa) in [1, 2, 4].into_iter().flat_map(|width| Isa::available().map(move |isa| (width, isa))) {
        let conv = Conv::new(&noise(channels * width, 1), Some(&noise(channels, 2)), width);
        let (threads, x) = (Threads::new(2), scaled(channels * tokens, 3, 6.0));
        let (mut whole, mut state) = (vec![0.0; x.len()], vec![0.0; conv.state_len()]);
        conv.run(&threads, isa, &mut state, &x, &mut whole);
        assert_same(&state, &x[(tokens + 1 - width) * channels..], "the state");
        for at_once in [1, 2, 3, 5, 39] {
            let (mut out, mut parts) = (vec![0.0; x.len()], vec![0.0; conv.state_len()]);
            for (x, out) in x.chunks(at_once * channels).zip(out.chunks_mut(at_once * channels)) {
                conv.run(&threads, isa, &mut parts, x, out);
            }
            assert_same(&out, &whole, "parts");
            assert_same(&parts, &state, "the state of parts");
        }
        let mut states = [vec![0.0; conv.state_len()], vec![0.5; conv.state_len()]];
        for (x, expected) in x.chunks(channels).zip(whole.chunks(channels)) {
            let mut rows: Vec<&mut [f32]> = states.iter_mut().map(Vec::as_mut_slice).collect();
            let mut out = vec![0.0; 2 * channels];
            conv.run_rows(&threads, isa, &mut rows, &[x, x].concat(), &mut out);
            assert_same(&out[..channels], expected, "rows");
        }
        assert_same(&states[0], &state, "the state of rows");
        assert_same(&states[1], &state, "the state of rows that began with other inputs");
    }
}

#[test]
fn normalized_heads_and_their_gradients_are_the_naive_ones_on_every_isa() {
    for (heads, tokens) in sizes() {
        let tokens = tokens.min(3);
        let (x, dy) = (scaled(tokens * heads.width(), 1, 4.0), noise(tokens * heads.width(), 2));
        let run = |x: &[f64]| {
            let mut y = x.to_vec();
            for row in y.chunks_mut(heads.width()) {
                for (head, x) in row[..2 * heads.k_width()].chunks_mut(heads.k_dim).enumerate() {
                    let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    let scale = if head < heads.num_k_heads { (heads.k_dim as f64).sqrt() } else { 1.0 };
                    x.iter_mut().for_each(|x| *x /= length * scale);
                }
            }
            y
        };
        let (expected, gradient) = (run(&wide(&x)), differences(&wide(&x), &dy, run));
        for isa in Isa::available() {
            let threads = Threads::new(2);
            let what = format!("{isa}, {heads:?}");
            let (mut y, mut dx) = (vec![9.0; x.len()], vec![9.0; x.len()]);
            unit_heads(&threads, isa, &heads, &x, &mut y);
            unit_heads_vjp(&threads, isa, &heads, &x, &dy, &mut dx);
            assert_close(&y, &expected, 1e-6, &what);
            assert_close(&dx, &gradient, 1e-6, &what);
            let mut in_place = x.clone();
            unit_heads_in_place(&threads, isa, &heads, &mut in_place);
            assert_same(&in_place, &y, &what);
        }
    }
}

#[test]
fn gates_and_their_gradients_are_the_naive_ones_on_every_isa() {
    for (rows, heads) in [(1, 1), (3, 5), (40, 16), (2, 48)] {
        let (a_log, dt_bias) = (scaled(heads, 1, 4.0), noise(heads, 2));
        let (a, b) = (scaled(rows * heads, 3, 12.0), scaled(rows * heads, 4, 12.0));
        let (d_beta, d_g) = (noise(rows * heads, 5), noise(rows * heads, 6));
        let beta_of = |b: &[f64]| b.iter().map(|b| sigmoid(*b)).collect::<Vec<f64>>();
        let g_of = |a: &[f64]| {
            let of = |(at, a): (usize, &f64)| {
                -f64::from(a_log[at % heads]).exp() * (a + f64::from(dt_bias[at % heads])).exp().ln_1p()
            };
            a.iter().enumerate().map(of).collect::<Vec<f64>>()
        };
        for isa in Isa::available() {
            let (threads, what) = (Threads::new(2), format!("{isa}, {rows} rows of {heads}"));
            let gates = Gates { a_log: &a_log, dt_bias: &dt_bias };
            let (mut beta, mut g) = (vec![9.0; a.len()], vec![9.0; a.len()]);
            let (mut d_a, mut d_b) = (vec![9.0; a.len()], vec![9.0; a.len()]);
            gates.run(&threads, isa, &a, &b, &mut beta, &mut g);
            let gradient =
                GatesGradient { a: &a, beta: &beta, d_beta: &d_beta, d_g: &d_g, d_a: &mut d_a, d_b: &mut d_b };
            gates.vjp(&threads, isa, gradient);
            assert_close(&beta, &beta_of(&wide(&b)), 3e-7, &what);
            for (g, expected) in g.iter().zip(g_of(&wide(&a))) {
                assert!((f64::from(*g) - expected).abs() <= 1e-6 * expected.abs(), "{what}: {g} for {expected}");
            }
            assert_close(&d_a, &differences(&wide(&a), &d_g, g_of), 1e-6, &what);
            assert_close(&d_b, &differences(&wide(&b), &d_beta, beta_of), 1e-6, &what);
        }
    }
}

#[test]
fn gates_of_huge_inputs_are_finite_and_of_nan_are_nan() {
    for isa in Isa::available() {
        let inputs = [-1e30, -100.0, -30.0, 0.0, 30.0, 100.0, 1e30, f32::NAN];
        let (mut beta, mut g) = ([9.0; 8], [9.0; 8]);
        let gates = Gates { a_log: &[0.0; 8], dt_bias: &[0.0; 8] };
        gates.run(&Threads::new(1), isa, &inputs, &inputs, &mut beta, &mut g);
        let expected = [0.0, 0.0, -9.357_623e-14, -std::f32::consts::LN_2, -30.0, -100.0, -1e30];
        for at in 0..7 {
            assert!((g[at] - expected[at]).abs() <= 1e-6 * expected[at].abs() + 1e-37, "{isa}: {} at {at}", g[at]);
            assert!((0.0..=1.0).contains(&beta[at]), "{isa}: {}", beta[at]);
        }
        assert!(g[7].is_nan() && beta[7].is_nan(), "{isa}");
    }
}

#[test]
fn gated_norms_and_their_gradients_are_the_naive_ones_on_every_isa() {
    for (rows, width) in [(1, 1), (3, 5), (5, 29), (2, 128), (4, 200)] {
        let (weight, dy) = (noise(width, 1), noise(rows * width, 2));
        let (x, z) = (noise(rows * width, 3), scaled(rows * width, 4, 10.0));
        let run = |x: &[f64], z: &[f64]| {
            let mut y = Vec::new();
            for (x, z) in x.chunks(width).zip(z.chunks(width)) {
                let r = (x.iter().map(|x| x * x).sum::<f64>() / width as f64 + f64::from(1e-5f32)).sqrt().recip();
                y.extend((0..width).map(|i| x[i] * r * f64::from(weight[i]) * z[i] * sigmoid(z[i])));
            }
            y
        };
        let (wide_x, wide_z) = (wide(&x), wide(&z));
        let d_x = differences(&wide_x, &dy, |x| run(x, &wide_z));
        let d_z = differences(&wide_z, &dy, |z| run(&wide_x, z));
        for isa in Isa::available() {
            let (threads, what) = (Threads::new(2), format!("{isa}, {rows} rows of {width}"));
            let norm = GatedNorm { weight: &weight, eps: 1e-5 };
            let (mut y, mut dx, mut dz) = (vec![9.0; x.len()], vec![9.0; x.len()], vec![9.0; x.len()]);
            gated_norm(&threads, isa, norm, &x, &z, &mut y);
            gated_norm_vjp(&threads, isa, norm, &x, &z, &dy, &mut dx, &mut dz);
            assert_close(&y, &run(&wide_x, &wide_z), 2e-6, &what);
            assert_close(&dx, &d_x, 2e-6, &what);
            assert_close(&dz, &d_z, 2e-6, &what);
        }
    }
}

#[test]
fn a_state_is_cleared_and_copied() {
    let heads = DeltaHeads::new(1, 2, 3, 5);
    let (mut state, mut other) = (DeltaState::new(&heads, 4), DeltaState::new(&heads, 4));
    assert_eq!((state.memory().len(), state.conv().len()), (30, 3 * 16));
    let (memory, conv) = state.parts_mut();
    memory.fill(2.0);
    conv.fill(3.0);
    other.copy_from(&state);
    assert!(other.memory() == [2.0; 30] && other.conv() == [3.0; 48]);
    other.clear();
    assert!(other.memory() == [0.0; 30] && other.conv() == [0.0; 48]);
    assert!(state.bytes() >= 78 * 4);
}
