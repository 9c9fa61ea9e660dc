//! The vector-Jacobian product of the scores: d logits = g·(onehot − softmax) / temperature, one chunk of
//! the vocabulary after another.

use std::cell::RefCell;

use super::super::gemm::{Output, Rows, SharedInputs, backward_panels, outer_here, with_shared_inputs};
use super::super::isa::Isa;
use super::super::rows::{on_every_isa, take_turns};
use super::super::simd::Simd;
use super::super::threads::{Shared, Threads};
use super::{CHUNK, CHUNK_PANELS, Head, Normalizer, PAD, ROWS_AT_ONCE, check, compute, exponential, factor};

/// The inputs of [`score_vjp`]: the arguments of [`score`](super::score) and its results, one element per row.
#[derive(Clone, Copy, Debug)]
pub struct Gradient<'a> {
    /// The input rows, `[rows, hidden]`.
    pub x: &'a [f32],
    /// The head of the forward pass.
    pub head: Head<'a>,
    /// The target token of each row.
    pub targets: &'a [u32],
    /// Divisor of the logits; above 0.
    pub temperature: f64,
    /// The normalizers returned by [`score`](super::score).
    pub normalizers: &'a [Normalizer],
    /// The gradient dL/dlogp; rows with 0 are skipped.
    pub g: &'a [f32],
}

/// Computes d_x `[rows, hidden]` = dL/dx, and d_weight `[vocab, hidden]` += dL/dweight if requested. The sums are
/// chains over the vocabulary and over the rows, in order.
pub fn score_vjp(threads: &Threads, isa: Isa, gradient: &Gradient<'_>, d_x: &mut [f32], d_weight: Option<&mut [f32]>) {
    let Gradient { x, head, targets, temperature, normalizers, g } = *gradient;
    let weight = head.weight;
    let (rows, k) = (targets.len(), weight.k());
    check(x, weight, rows);
    check(d_x, weight, rows);
    assert!(
        normalizers.len() == rows && g.len() == rows,
        "the logits must have one normalizer and one gradient for each row"
    );
    assert!(targets.iter().all(|target| (*target as usize) < weight.n()), "a target token is not in the vocabulary");
    d_x.fill(0.0);
    let live: Vec<usize> = (0..rows).filter(|row| g[*row] != 0.0).collect();
    if live.is_empty() || k == 0 {
        return;
    }
    let gathered: Vec<f32>;
    let x = if live.len() == rows {
        x
    } else {
        gathered = live.iter().flat_map(|row| &x[row * k..(row + 1) * k]).copied().collect();
        &gathered
    };
    let t = factor(temperature);
    let lines: Vec<Line> = live
        .iter()
        .map(|row| Line {
            row: *row,
            target: targets[*row] as usize,
            largest: normalizers[*row].largest,
            c: (-f64::from(g[*row]) * f64::from(t) / normalizers[*row].sum) as f32,
            at_target: g[*row] * t,
        })
        .collect();
    with_shared_inputs(threads, isa, x, lines.len(), weight, |shared_inputs| {
        let job = Job { isa, x, shared_inputs, head, lines: &lines, t };
        job.inputs(threads, d_x);
        if let Some(d_weight) = d_weight {
            assert_eq!(
                d_weight.len(),
                weight.n() * k,
                "the weight of the output layer and its gradient differ in shape"
            );
            job.weights(threads, d_weight);
        }
    });
}

/// Number of rows for which the weights are read once to compute d_x.
const MOST_ROWS: usize = 256;

/// A row whose gradient dL/dlogp is not 0.
struct Line {
    row: usize,
    target: usize,
    largest: f32,
    /// The factor −g / temperature, divided by the sum of exponentials.
    c: f32,
    /// The value g / temperature, which is added at the target token.
    at_target: f32,
}

struct Job<'a> {
    isa: Isa,
    /// The input rows with a gradient, `[lines, hidden]`.
    x: &'a [f32],
    shared_inputs: SharedInputs,
    head: Head<'a>,
    lines: &'a [Line],
    t: f32,
}

thread_local! {
    /// A thread's buffers: logits of a chunk, and dL/dx of some rows.
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl Job<'_> {
    fn chunks(&self) -> usize {
        self.head.weight.n().div_ceil(CHUNK)
    }

    /// Number of multiply-adds of one product, in vectors.
    fn work(&self) -> usize {
        self.lines.len() * self.head.weight.n() * self.head.weight.k() / 16
    }

    fn inputs(&self, threads: &Threads, d_x: &mut [f32]) {
        let (k, lines) = (self.head.weight.k(), self.lines);
        // The number of blocks may depend on the threads: the division does not affect the sums.
        let blocks = lines.len().div_ceil(MOST_ROWS).next_multiple_of(threads.count());
        let at_once = lines.len().div_ceil(blocks).next_multiple_of(16);
        let d_x = Shared::new(d_x);
        take_turns(threads, lines.len().div_ceil(at_once), 2 * self.work(), |block| {
            let first = block * at_once;
            let block = &lines[first..(first + at_once).min(lines.len())];
            SCRATCH.with_borrow_mut(|(logits, sums)| {
                sums.clear();
                sums.resize(block.len() * k, 0.0);
                for chunk in 0..self.chunks() {
                    let dy = self.d_logits(first, block, chunk, logits);
                    let out = Output { y: sums, stride: k, rows: block.len(), add: true };
                    let panels = chunk * CHUNK_PANELS..((chunk + 1) * CHUNK_PANELS).min(self.head.weight.panels());
                    backward_panels(self.isa, self.head.weight, panels, dy, out);
                }
                for (line, sums) in block.iter().zip(sums.chunks_exact(k)) {
                    // Safety: each row of d_x belongs to one block of rows.
                    unsafe { d_x.part(line.row * k..(line.row + 1) * k) }.copy_from_slice(sums);
                }
            });
        });
    }

    fn weights(&self, threads: &Threads, d_weight: &mut [f32]) {
        let k = self.head.weight.k();
        let d_weight = Shared::new(d_weight);
        take_turns(threads, self.chunks(), 2 * self.work(), |chunk| {
            SCRATCH.with_borrow_mut(|(logits, _)| {
                for (index, block) in self.lines.chunks(ROWS_AT_ONCE).enumerate() {
                    let first = index * ROWS_AT_ONCE;
                    let dy = self.d_logits(first, block, chunk, logits);
                    let begin = chunk * CHUNK * k;
                    // Safety: each chunk of d_weight is written by a single call.
                    let to = unsafe { d_weight.part(begin..begin + dy.width * k) };
                    let x = Rows { values: &self.x[first * k..], width: k, stride: k };
                    outer_here(self.isa, block.len(), dy, x, to);
                }
            });
        });
    }

    /// Computes the gradient dL/dlogits of some rows and one chunk of the vocabulary.
    fn d_logits<'a>(&self, first: usize, block: &[Line], chunk: usize, logits: &'a mut Vec<f32>) -> Rows<'a> {
        let k = self.head.weight.k();
        let width = (self.head.weight.n() - chunk * CHUNK).min(CHUNK);
        let inputs = (&self.x[first * k..], self.shared_inputs.starting_at(first), block.len());
        compute(self.isa, inputs, self.head, chunk..chunk + 1, logits);
        let mut capped = [0f32; CHUNK];
        let capped = &mut capped[..width.next_multiple_of(PAD)];
        for (line, values) in block.iter().zip(logits.chunks_exact_mut(CHUNK)) {
            let of_row = &mut values[..capped.len()];
            if self.head.softcap.is_some() {
                capped.copy_from_slice(of_row);
            }
            // Safety: the slice consists of whole vectors.
            unsafe { soften(self.isa, of_row, self.t, line.largest, line.c) };
            if line.target / CHUNK == chunk {
                values[line.target % CHUNK] += line.at_target;
            }
            if let Some(softcap) = self.head.softcap {
                // The slope of c·tanh(x / c) is 1 − (value / c)².
                for (d, value) in values.iter_mut().zip(&*capped).take(width) {
                    *d *= 1.0 - (value / softcap) * (value / softcap);
                }
            }
        }
        Rows { values: logits, width, stride: CHUNK }
    }
}

on_every_isa! {
    /// Replaces each logit by its softmax part of the gradient, c·e^(logit·t − largest).
    unsafe fn soften(logits: &mut [f32], t: f32, largest: f32, c: f32) = soften_with
}

#[inline(always)]
unsafe fn soften_with<S: Simd>(logits: &mut [f32], t: f32, largest: f32, c: f32) {
    unsafe {
        for at in (0..logits.len()).step_by(S::LANES) {
            let at = logits.as_mut_ptr().add(at);
            let (e, _) = exponential::<S>(at, S::splat(t), S::splat(largest));
            S::store(at, S::mul(e, S::splat(c)));
        }
    }
}
