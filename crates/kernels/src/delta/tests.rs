use super::super::isa::Isa;
use super::super::rows::tests::{assert_close, assert_same, noise};
use super::super::threads::Threads;
use super::backward::{DeltaBackward, run_sequences_backward};
use super::naive::Inputs;
use super::rule::{DeltaRows, DeltaSequence, run_rows, run_sequences};
use super::*;

mod layers;

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

/// Tokens with queries and keys of length 1, and decays from weak to strong.
fn inputs(heads: Shape, tokens: usize, seed: u64) -> Tokens {
    let mut qkv = noise(tokens * heads.conv_width(), seed);
    for row in qkv.chunks_mut(heads.conv_width()) {
        for head in row[..2 * heads.key_width()].chunks_mut(heads.key_dim) {
            let length = head.iter().map(|x| x * x).sum::<f32>().sqrt();
            head.iter_mut().for_each(|x| *x /= length);
        }
    }
    let gates = tokens * heads.num_value_heads;
    let g = noise(gates, seed + 1).iter().enumerate().map(|(at, x)| (x - 0.5) * [0.02, 0.5, 6.0][at % 3]).collect();
    Tokens {
        heads,
        qkv,
        beta: noise(gates, seed + 2).iter().map(|x| x + 0.5).collect(),
        g,
        memory: noise(heads.memory_len(), seed + 3),
        d_out: noise(tokens * heads.value_width(), seed + 4),
        d_memory: noise(heads.memory_len(), seed + 5),
    }
}

struct Tokens {
    heads: Shape,
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

impl Tokens {
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
            out: vec![9.0; tokens.len() * heads.value_width()],
            memory: memory.to_vec(),
            kept: vec![9.0; heads.kept_len(tokens.len())],
        };
        let mut sequences = [DeltaSequence {
            qkv: &of(&self.qkv, heads.conv_width()),
            beta: &of(&self.beta, heads.num_value_heads),
            g: &of(&self.g, heads.num_value_heads),
            memory: &mut ran.memory,
            kept: Some(&mut ran.kept),
            out: &mut ran.out,
        }];
        run_sequences(threads, isa, &heads, &mut sequences);
        ran
    }

    fn run_back(&self, threads: &Threads, isa: Isa, ran: &Ran) -> RanBack {
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
            kept: &ran.kept,
            memory: &ran.memory,
            d_out: &self.d_out,
            d_memory: &mut back.d_memory,
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

/// A shape with a convolution of 4 taps.
fn shape_of(num_key_heads: usize, num_value_heads: usize, key_dim: usize, value_dim: usize) -> Shape {
    Shape { num_key_heads, num_value_heads, key_dim, value_dim, kernel: 4 }
}

fn sizes() -> impl Iterator<Item = (Shape, usize)> {
    SIZES.into_iter().map(|(k, v, key_dim, value_dim, tokens)| (shape_of(k, v, key_dim, value_dim), tokens))
}

#[test]
fn the_naive_gradients_are_finite_differences() {
    for (k_heads, v_heads, key_dim, value_dim, tokens) in [(1, 2, 3, 4, 5), (2, 4, 2, 3, 4)] {
        let sequence = inputs(shape_of(k_heads, v_heads, key_dim, value_dim), tokens, 3);
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
        let expected = given.backward(&wide(&sequence.d_out), &wide(&sequence.d_memory));
        for isa in Isa::available() {
            let mut first: Option<(Ran, RanBack)> = None;
            for count in [1, 3] {
                let threads = Threads::new(count);
                let what = format!("{isa}, {heads:?}, {tokens} tokens, {count} threads");
                let ran = sequence.run(&threads, isa, &sequence.memory, 0..tokens);
                assert_close(&ran.out, &out, 2e-6, &what);
                assert_close(&ran.memory, &memory, 2e-6, &what);
                assert_same(&ran.kept[..heads.memory_len()], &sequence.memory, &what);
                let back = sequence.run_back(&threads, isa, &ran);
                assert_close(&back.d_qkv, &expected.d_qkv, 1e-5, &format!("d_qkv, {what}"));
                assert_close(&back.d_beta, &expected.d_beta, 1e-5, &format!("d_beta, {what}"));
                assert_close(&back.d_g, &expected.d_g, 1e-5, &format!("d_g, {what}"));
                assert_close(&back.d_memory, &expected.d_memory, 1e-5, &what);
                let (ran_first, back_first) = first.get_or_insert((ran.clone(), back.clone()));
                assert_same(&ran.out, &ran_first.out, &what);
                assert_same(&ran.memory, &ran_first.memory, &what);
                assert_same(&back.d_qkv, &back_first.d_qkv, &what);
                assert_same(&back.d_beta, &back_first.d_beta, &what);
                assert_same(&back.d_g, &back_first.d_g, &what);
                assert_same(&back.d_memory, &back_first.d_memory, &what);
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
        let sequences: Vec<Tokens> = (0..5).map(|row| inputs(heads, tokens, 31 + 10 * row)).collect();
        for isa in Isa::available() {
            let threads = Threads::new(3);
            let mut memories: Vec<Vec<f32>> = sequences.iter().map(|sequence| sequence.memory.clone()).collect();
            let mut outs = vec![Vec::new(); sequences.len()];
            for token in 0..tokens {
                let gather = |of: &dyn Fn(&Tokens) -> &[f32], width: usize| -> Vec<f32> {
                    sequences.iter().flat_map(|s| of(s)[token * width..(token + 1) * width].to_vec()).collect()
                };
                let mut out = vec![9.0; sequences.len() * heads.value_width()];
                let mut memories: Vec<&mut [f32]> = memories.iter_mut().map(Vec::as_mut_slice).collect();
                let rows = DeltaRows {
                    qkv: &gather(&|s| &s.qkv, heads.conv_width()),
                    beta: &gather(&|s| &s.beta, heads.num_value_heads),
                    g: &gather(&|s| &s.g, heads.num_value_heads),
                    memories: &mut memories,
                    out: &mut out,
                };
                run_rows(&threads, isa, &heads, rows);
                outs.iter_mut().zip(out.chunks(heads.value_width())).for_each(|(all, out)| all.extend(out));
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
