//! The gradients of the gated delta rule, in chunks of 64 tokens from the last to the first.
//!
//! Within a chunk that begins with the kept state S, with γ(s→t) = exp(g[s+1] + … + g[t]) and e[t] = exp(g[first] + … +
//! g[t]), everything is a product of small matrices or the solution of a triangular system:
//! - the written values δ[t] = beta[t]·(v[t] − e[t]·Sᵀk[t] − Σ over s < t of γ(s→t)·(k[t]·k[s])·δ[s]);
//! - with G, the gradient of the state after the chunk, and f[t] = γ(t→last), their gradients
//!   dδ[t] = f[t]·Gᵀk[t] + Σ over s ≥ t of γ(t→s)·(q[s]·k[t])·d_out[s] + Σ over s > t of γ(t→s)·(k[s]·k[t])·w[s], with
//!   w[s] = −beta[s]·dδ[s], the gradient of what the key recalls;
//! - the gradients of q and k, from the states and gradients that are sums of the same terms;
//! - the gradient of the state before the chunk, e[last]·G + Σ e[s]·(q[s]⊗d_out[s] + k[s]⊗w[s]);
//! - dg[t] = dg[t+1] + q[t]·dq[t] + w[t]·v[t], with ⟨G, state after the chunk⟩ in place of dg after the last token,
//!   because the gradient of a decay is the product of the decayed state and its gradient.

use std::cell::RefCell;

use super::super::floats::Floats;
use super::super::isa::Isa;
use super::super::rows::take_turns;
use super::super::threads::{Shared, Threads};
use super::product::{CHUNK, Depth, Product, dot, exponentials, multiply, scale_rows, solve_down, solve_up, weigh};
use super::{KEPT_EVERY, Shape};

/// Consecutive tokens of one sequence after [`run_sequences`](super::rule::run_sequences), to compute their gradients.
#[derive(Debug)]
pub(super) struct DeltaBackward<'a> {
    /// The rows that were given, `[tokens][conv_width]`.
    pub qkv: &'a [f32],
    /// How much each value head wrote, `[tokens][num_value_heads]`.
    pub beta: &'a [f32],
    /// Logarithms of the decays, `[tokens][num_value_heads]`.
    pub g: &'a [f32],
    /// The kept states, `[⌈tokens / 64⌉][num_value_heads][key_dim][value_dim]`.
    pub kept: &'a [f32],
    /// The memory after the last token, `[num_value_heads][key_dim][value_dim]`.
    pub memory: &'a [f32],
    /// The gradient of the output, `[tokens][value_width]`.
    pub d_out: &'a [f32],
    /// The gradient of the memory after the last token; receives the gradient of the memory before the first token:
    /// The gradients, `[num_value_heads][key_dim][value_dim]`.
    pub d_memory: &'a mut [f32],
    /// Receives the gradient of the normalized queries and keys, and of the values, `[tokens][conv_width]`.
    pub d_qkv: &'a mut [f32],
    /// Receives the gradient of beta, `[tokens][num_value_heads]`.
    pub d_beta: &'a mut [f32],
    /// Receives the gradient of g, `[tokens][num_value_heads]`.
    pub d_g: &'a mut [f32],
}

/// A sequence whose outputs are shared by threads, each of which writes those of one key head.
struct Job<'a> {
    tokens: usize,
    qkv: &'a [f32],
    beta: &'a [f32],
    g: &'a [f32],
    kept: &'a [f32],
    memory: &'a [f32],
    d_out: &'a [f32],
    d_memory: Shared<f32>,
    d_qkv: Shared<f32>,
    d_beta: Shared<f32>,
    d_g: Shared<f32>,
}

/// The matrices of a chunk. Heads are padded to multiples of 16 values, with zeros.
#[derive(Debug, Default)]
struct Scratch {
    /// Gradients of the state, `[value heads of a key head][key][value]`.
    d_states: Floats,
    q: Floats,
    k: Floats,
    /// The keys of a chunk, `[key][64]`.
    k_columns: Floats,
    /// Dot products, `[64 tokens][64 tokens]`.
    kk: Floats,
    qk: Floats,
    /// Sums of the gradients of queries and keys over value heads.
    dq_sum: Floats,
    dk_sum: Floats,
    head: HeadScratch,
}

/// The matrices of one value head.
#[derive(Debug, Default)]
struct HeadScratch {
    v: Floats,
    d_out: Floats,
    /// The kept state, and with its rows and columns exchanged.
    state: Floats,
    state_columns: Floats,
    d_state_columns: Floats,
    /// Decays between tokens, `[later][earlier]`.
    decays: Floats,
    keys: Floats,
    queries: Floats,
    recalled: Floats,
    written: Floats,
    /// The written values, `[value][64]`.
    written_columns: Floats,
    d_written: Floats,
    d_recalled: Floats,
    from_out: Floats,
    from_recalled: Floats,
    scaled: Floats,
    dq: Floats,
    dk: Floats,
    /// e, f and beta of the tokens, `[64]` each.
    from_first: Floats,
    to_last: Floats,
    beta: Floats,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

/// Sizes of the matrices of a chunk.
#[derive(Clone, Copy)]
struct Sizes {
    shape: Shape,
    isa: Isa,
    /// Padded widths of heads.
    key: usize,
    value: usize,
    /// First token and number of tokens.
    first: usize,
    count: usize,
}

/// Computes the gradients of sequences of [`run_sequences`](super::rule::run_sequences).
///
/// # Panics
/// Panics if the length of a slice does not match the number of tokens of its sequence.
pub(super) fn run_sequences_backward(threads: &Threads, isa: Isa, shape: &Shape, sequences: &mut [DeltaBackward<'_>]) {
    let jobs: Vec<Job<'_>> = sequences
        .iter_mut()
        .map(|sequence| {
            let DeltaBackward { qkv, beta, g, kept, memory, d_out, d_memory, d_qkv, d_beta, d_g } = sequence;
            let tokens = shape.rows_of(qkv);
            let gates = [beta.len(), g.len(), d_beta.len(), d_g.len()];
            assert_eq!(gates, [tokens * shape.num_value_heads; 4], "the gates and their gradients differ in length");
            assert_eq!([memory.len(), d_memory.len()], [shape.memory_len(); 2], "a memory has the wrong length");
            assert_eq!(kept.len(), shape.kept_len(tokens), "the kept states have the wrong length");
            let lengths = (d_out.len(), d_qkv.len());
            assert_eq!(lengths, (tokens * shape.value_width(), qkv.len()), "the gradients have the wrong length");
            let (d_memory, d_qkv) = (Shared::new(d_memory), Shared::new(d_qkv));
            let (d_beta, d_g) = (Shared::new(d_beta), Shared::new(d_g));
            Job { tokens, qkv, beta, g, kept, memory, d_out, d_memory, d_qkv, d_beta, d_g }
        })
        .collect();
    let cells = jobs.len() * shape.num_key_heads;
    let tokens: usize = jobs.iter().map(|job| job.tokens).sum();
    take_turns(threads, cells, tokens * shape.memory_len(), |cell| {
        let (job, k_head) = (&jobs[cell / shape.num_key_heads], cell % shape.num_key_heads);
        SCRATCH.with_borrow_mut(|scratch| key_head(isa, shape, job, k_head, scratch));
    });
}

/// Computes the gradients of a key head and its value heads.
fn key_head(isa: Isa, shape: &Shape, job: &Job<'_>, k_head: usize, scratch: &mut Scratch) {
    let (key, value) = (shape.key_dim.next_multiple_of(16), shape.value_dim.next_multiple_of(16));
    scratch.resize(shape, key, value);
    let head_len = shape.head_len();
    let heads = k_head * shape.heads_per_key()..(k_head + 1) * shape.heads_per_key();
    for (head, d_state) in heads.clone().zip(scratch.d_states.chunks_exact_mut(key * value)) {
        // Safety: each thread accesses other heads, and all heads are inside the buffer.
        let from = unsafe { job.d_memory.part(head * head_len..(head + 1) * head_len) };
        copy_padded(from, shape.value_dim, shape.value_dim, d_state, value);
    }
    for first in (0..job.tokens).step_by(CHUNK).rev() {
        let count = (job.tokens - first).min(CHUNK);
        let sizes = Sizes { shape: *shape, isa, key, value, first, count };
        chunk(&sizes, job, k_head, scratch);
    }
    for (head, d_state) in heads.zip(scratch.d_states.chunks_exact(key * value)) {
        // Safety: each thread accesses other heads, and all heads are inside the buffer.
        let to = unsafe { job.d_memory.part(head * head_len..(head + 1) * head_len) };
        for (to, from) in to.chunks_exact_mut(shape.value_dim).zip(d_state.chunks_exact(value)) {
            to.copy_from_slice(&from[..shape.value_dim]);
        }
    }
}

impl Scratch {
    fn resize(&mut self, shape: &Shape, key: usize, value: usize) {
        let Scratch { d_states, q, k, k_columns, kk, qk, dq_sum, dk_sum, head } = self;
        // The padding must be zero; everything else is overwritten.
        d_states.zeros(shape.heads_per_key() * key * value);
        for matrix in [q, k, k_columns, dq_sum, dk_sum] {
            matrix.zeros(CHUNK * key);
        }
        for matrix in [kk, qk] {
            matrix.zeros(CHUNK * CHUNK);
        }
        head.state.zeros(key * value);
        head.state_columns.zeros(key * value);
        head.d_state_columns.zeros(key * value);
        for matrix in [&mut head.v, &mut head.d_out, &mut head.recalled, &mut head.written, &mut head.written_columns] {
            matrix.zeros(CHUNK * value);
        }
        for matrix in [&mut head.d_written, &mut head.d_recalled] {
            matrix.zeros(CHUNK * value);
        }
        for matrix in [&mut head.decays, &mut head.keys, &mut head.queries, &mut head.from_out, &mut head.from_recalled]
        {
            matrix.zeros(CHUNK * CHUNK);
        }
        head.scaled.zeros(CHUNK * key.max(value));
        for matrix in [&mut head.dq, &mut head.dk] {
            matrix.zeros(CHUNK * key);
        }
        for vector in [&mut head.from_first, &mut head.to_last, &mut head.beta] {
            vector.zeros(CHUNK);
        }
    }
}

/// Copies the first `count` values of rows to rows of another width.
fn copy_padded(from: &[f32], stride: usize, count: usize, to: &mut [f32], width: usize) {
    for (from, to) in from.chunks(stride).zip(to.chunks_exact_mut(width)) {
        to[..count].copy_from_slice(&from[..count]);
    }
}

/// Exchanges rows and columns: `to[column][row]` = `from[row][column]` for the first `rows` rows of `from`.
fn exchange(from: &[f32], width: usize, rows: usize, to: &mut [f32], to_width: usize) {
    const BLOCK: usize = 16;
    for first in (0..rows).step_by(BLOCK) {
        for column in (0..width).step_by(BLOCK) {
            for row in first..(first + BLOCK).min(rows) {
                let from = &from[row * width + column..][..BLOCK];
                for (i, value) in from.iter().enumerate() {
                    to[(column + i) * to_width + row] = *value;
                }
            }
        }
    }
}

/// Computes the gradients of a chunk of tokens for a key head and its value heads.
fn chunk(sizes: &Sizes, job: &Job<'_>, k_head: usize, scratch: &mut Scratch) {
    let Sizes { shape, isa, key, value, first, count } = *sizes;
    let (width, dim) = (shape.conv_width(), shape.key_dim);
    let rows = &job.qkv[first * width..(first + count) * width];
    let (q_at, k_at) = (k_head * dim, shape.key_width() + k_head * dim);
    copy_padded(&rows[q_at..], width, dim, &mut scratch.q, key);
    copy_padded(&rows[k_at..], width, dim, &mut scratch.k, key);
    exchange(&scratch.k, key, count, &mut scratch.k_columns, CHUNK);
    for (a, out) in [(&scratch.k, &mut scratch.kk), (&scratch.q, &mut scratch.qk)] {
        let product = Product { a, strides: (key, 1), b: &scratch.k_columns, depth: key, part: Depth::All };
        multiply(isa, out, CHUNK, count, 0.0, product);
    }
    for index in 0..shape.heads_per_key() {
        let head = k_head * shape.heads_per_key() + index;
        let Scratch { d_states, q, k, kk, qk, dq_sum, dk_sum, head: of_head, .. } = scratch;
        let d_state = &mut d_states[index * key * value..(index + 1) * key * value];
        of_head.load(sizes, job, head, kk, qk);
        of_head.write(sizes, k);
        of_head.write_backward(sizes, k, d_state);
        of_head.read_backward(sizes, q, k, d_state);
        of_head.store(sizes, job, head, q, d_state);
        of_head.step_back(sizes, q, k, d_state);
        for (sum, of_head) in [(dq_sum, &of_head.dq), (dk_sum, &of_head.dk)] {
            if index == 0 {
                sum.copy_from_slice(of_head);
            } else {
                sum.iter_mut().zip(of_head.iter()).for_each(|(sum, value)| *sum += value);
            }
        }
    }
    for token in 0..count {
        for (at, sum) in [(q_at, &scratch.dq_sum), (k_at, &scratch.dk_sum)] {
            let at = (first + token) * width + at;
            // Safety: each thread writes other heads, and all rows are inside the buffer.
            unsafe { job.d_qkv.part(at..at + dim) }.copy_from_slice(&sum[token * key..][..dim]);
        }
    }
}

/// A product whose A has contiguous rows of `width` values.
fn contiguous<'a>(a: &'a [f32], width: usize, b: &'a [f32], depth: usize, part: Depth) -> Product<'a> {
    Product { a, strides: (width, 1), b, depth, part }
}

impl HeadScratch {
    /// Loads a head's values, output gradients, state and gates, and computes its decays.
    fn load(&mut self, sizes: &Sizes, job: &Job<'_>, head: usize, kk: &[f32], qk: &[f32]) {
        let Sizes { shape, isa, key, value, first, count } = *sizes;
        let (width, dim) = (shape.conv_width(), shape.value_dim);
        let rows = &job.qkv[first * width..(first + count) * width];
        copy_padded(&rows[2 * shape.key_width() + head * dim..], width, dim, &mut self.v, value);
        let rows = &job.d_out[first * shape.value_width()..(first + count) * shape.value_width()];
        copy_padded(&rows[head * dim..], shape.value_width(), dim, &mut self.d_out, value);
        let state = &job.kept[first / KEPT_EVERY * shape.memory_len()..][head * shape.head_len()..][..shape.head_len()];
        copy_padded(state, dim, dim, &mut self.state, value);
        exchange(&self.state, value, key, &mut self.state_columns, key);
        let gates = (first..first + count).map(|token| token * shape.num_value_heads + head);
        let mut sum = 0.0;
        // Sums in f64, so that small differences of large sums stay exact.
        let sums: Vec<f64> = gates
            .clone()
            .map(|gate| {
                sum += f64::from(job.g[gate]);
                sum
            })
            .collect();
        for (token, (now, gate)) in sums.iter().zip(gates).enumerate() {
            self.beta[token] = job.beta[gate];
            self.from_first[token] = *now as f32;
            self.to_last[token] = (sum - now) as f32;
            let row = &mut self.decays[token * CHUNK..(token + 1) * CHUNK];
            for (decay, before) in row.iter_mut().zip(&sums[..=token]) {
                *decay = (now - before) as f32;
            }
            exponentials(isa, &mut row[..(token + 1).next_multiple_of(16)]);
            row[token + 1..].fill(0.0);
        }
        exponentials(isa, &mut self.from_first);
        exponentials(isa, &mut self.to_last);
        let all = count * CHUNK;
        self.keys[..all].copy_from_slice(&kk[..all]);
        weigh(isa, &mut self.keys[..all], &self.decays[..all]);
        self.queries[..all].copy_from_slice(&qk[..all]);
        weigh(isa, &mut self.queries[..all], &self.decays[..all]);
    }

    /// Computes the differences between the values and what the keys recall, and the written values.
    fn write(&mut self, sizes: &Sizes, k: &[f32]) {
        let Sizes { isa, key, value, count, .. } = *sizes;
        scale_rows(isa, k, &self.from_first[..count], &mut self.scaled, key);
        let product = Product { a: &self.scaled, strides: (key, 1), b: &self.state, depth: key, part: Depth::All };
        multiply(isa, &mut self.recalled, value, count, 0.0, product);
        for (recalled, v) in self.recalled[..count * value].iter_mut().zip(self.v.iter()) {
            *recalled = v - *recalled;
        }
        solve_down(isa, &self.keys, &self.beta[..count], &mut self.recalled, &mut self.written, value);
        exchange(&self.written, value, count, &mut self.written_columns, CHUNK);
    }

    /// Computes the gradients of the written values and of what the keys recall.
    fn write_backward(&mut self, sizes: &Sizes, k: &[f32], d_state: &[f32]) {
        let Sizes { isa, key, value, count, .. } = *sizes;
        scale_rows(isa, k, &self.to_last[..count], &mut self.scaled, key);
        let product = Product { a: &self.scaled, strides: (key, 1), b: d_state, depth: key, part: Depth::All };
        multiply(isa, &mut self.d_written, value, count, 0.0, product);
        let product =
            Product { a: &self.queries, strides: (1, CHUNK), b: &self.d_out, depth: count, part: Depth::From };
        multiply(isa, &mut self.d_written, value, count, 1.0, product);
        solve_up(isa, &self.keys, &self.beta[..count], &mut self.d_written, &mut self.d_recalled, value);
    }

    /// Computes the gradients of the queries and keys.
    fn read_backward(&mut self, sizes: &Sizes, q: &[f32], k: &[f32], d_state: &[f32]) {
        let Sizes { isa, key, value, count, .. } = *sizes;
        let columns = &self.written_columns;
        for (a, out) in [(&self.d_out, &mut self.from_out), (&self.d_recalled, &mut self.from_recalled)] {
            let product = Product { a, strides: (value, 1), b: columns, depth: value, part: Depth::All };
            multiply(isa, out, CHUNK, count, 0.0, product);
            weigh(isa, &mut out[..count * CHUNK], &self.decays[..count * CHUNK]);
        }
        // A key affects later tokens and is affected by earlier ones in the same way: both triangles together.
        let pairs = &mut self.from_recalled;
        for token in 0..count {
            pairs[token * CHUNK + token] = 0.0;
            for later in token + 1..count {
                pairs[token * CHUNK + later] = pairs[later * CHUNK + token];
            }
        }
        exchange(d_state, value, key, &mut self.d_state_columns, key);
        scale_rows(isa, &self.d_out, &self.from_first[..count], &mut self.scaled, value);
        let from_state = contiguous(&self.scaled, value, &self.state_columns, value, Depth::All);
        multiply(isa, &mut self.dq, key, count, 0.0, from_state);
        multiply(isa, &mut self.dq, key, count, 1.0, contiguous(&self.from_out, CHUNK, k, count, Depth::UpTo));
        scale_rows(isa, &self.written, &self.to_last[..count], &mut self.scaled, value);
        let from_state = contiguous(&self.scaled, value, &self.d_state_columns, value, Depth::All);
        multiply(isa, &mut self.dk, key, count, 0.0, from_state);
        scale_rows(isa, &self.d_recalled, &self.from_first[..count], &mut self.scaled, value);
        let from_state = contiguous(&self.scaled, value, &self.state_columns, value, Depth::All);
        multiply(isa, &mut self.dk, key, count, 1.0, from_state);
        let product = Product { a: &self.from_out, strides: (1, CHUNK), b: q, depth: count, part: Depth::From };
        multiply(isa, &mut self.dk, key, count, 1.0, product);
        multiply(isa, &mut self.dk, key, count, 1.0, contiguous(&self.from_recalled, CHUNK, k, count, Depth::All));
    }

    /// Writes the gradients of the values and of the gates.
    fn store(&self, sizes: &Sizes, job: &Job<'_>, head: usize, q: &[f32], d_state: &[f32]) {
        let Sizes { shape, isa, key, value, first, count } = *sizes;
        let after = match job.kept.get((first / KEPT_EVERY + 1) * shape.memory_len()..) {
            Some(next) if !next.is_empty() => next,
            _ => job.memory,
        };
        let after = after[head * shape.head_len()..][..shape.head_len()].chunks_exact(shape.value_dim);
        let mut d_g: f64 =
            after.zip(d_state.chunks_exact(value)).map(|(s, d)| f64::from(dot(isa, s, &d[..s.len()]))).sum();
        for token in (0..count).rev() {
            let (wide, narrow) = (token * value..(token + 1) * value, token * key..(token + 1) * key);
            let w = &self.d_recalled[wide.clone()];
            let d_beta = dot(isa, &self.d_written[wide.clone()], &self.recalled[wide.clone()]);
            d_g += f64::from(dot(isa, &q[narrow.clone()], &self.dq[narrow])) + f64::from(dot(isa, w, &self.v[wide]));
            let gate = (first + token) * shape.num_value_heads + head;
            let at = (first + token) * shape.conv_width() + 2 * shape.key_width() + head * shape.value_dim;
            // Safety: each thread writes other heads, and all rows are inside the buffers.
            unsafe {
                *job.d_beta.at(gate) = d_beta;
                *job.d_g.at(gate) = d_g as f32;
                let d_v = job.d_qkv.part(at..at + shape.value_dim);
                d_v.iter_mut().zip(w).for_each(|(d_v, w)| *d_v = -w);
            }
        }
    }

    /// Computes the gradient of the state before the chunk from that of the state after it.
    fn step_back(&mut self, sizes: &Sizes, q: &[f32], k: &[f32], d_state: &mut [f32]) {
        let Sizes { isa, key, value, count, .. } = *sizes;
        let decay = self.from_first[count - 1];
        for (a, d, scale) in [(q, &self.d_out, decay), (k, &self.d_recalled, 1.0)] {
            scale_rows(isa, d, &self.from_first[..count], &mut self.scaled, value);
            let product = Product { a, strides: (1, key), b: &self.scaled, depth: count, part: Depth::All };
            multiply(isa, d_state, value, key, scale, product);
        }
    }
}
