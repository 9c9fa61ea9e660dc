//! The language-model head over a packed weight `[vocab, hidden]`, streamed: a buffer that stays in the cache holds the
//! logits of a chunk of the vocabulary and some rows; `[rows, vocab]` is never in memory.
//!
//! For each row and chunk, the largest logit, Σ eᶻ and Σ eᶻ·z are kept, with z = logit / temperature minus the chunk's
//! largest, and combined in the order of the chunks. Chunks do not depend on rows and threads. A row's result therefore
//! depends only on that row, and [`choose`] reports the same log-probs as [`score`].
//!
//! A training pass ([`score_for_training`]) also sums up Σ eᶻ·weight over the tokens, on which dL/dx depends, whatever the
//! loss is: the logits are not computed again after the loss is known.

mod choose;
mod gradient;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ops::Range;

pub use choose::{Chosen, Pick, choose};
pub use gradient::{Forward, Gradient, score_for_training, score_vjp};

use super::gemm::{Output, SharedInputs, Term, forward, forward_panels, with_shared_inputs};
use super::isa::Isa;
use super::pack::{PANEL, PackedMatrix};
use super::rows::{each_row, on_every_isa, take_turns};
use super::simd::{Simd, exp, tanh};
use super::threads::{Shared, Threads};

/// Number of tokens in a chunk of the vocabulary.
const CHUNK: usize = 512;
/// Number of panels in a chunk of the vocabulary.
const CHUNK_PANELS: usize = CHUNK / PANEL;
/// Number of rows whose logits of a chunk are computed together.
const ROWS_AT_ONCE: usize = 128;
/// Number of logits in the buffer of a thread.
const LOGITS_AT_ONCE: usize = ROWS_AT_ONCE * CHUNK;

/// The score of a token in the distribution of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenScore {
    /// Log-probability of the token, in nats.
    pub logp: f32,
    /// Entropy of the distribution, in nats.
    pub entropy: f32,
    /// Whether no other token has a larger logit / temperature.
    pub is_top: bool,
}

/// The softmax of a row: p = e^(logit / temperature − largest) / sum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Softmax {
    /// The largest logit / temperature.
    pub largest: f32,
    /// The sum Σ e^(logit / temperature − largest).
    pub sum: f64,
    /// The logit of the target, before the division by the temperature.
    pub target_logit: f32,
}

/// Filters that restrict which tokens of a row may be sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Filters {
    /// Keep the K most probable tokens, and all tokens as probable as the last of them; 0 = off.
    pub top_k: u32,
    /// Keep the most probable tokens whose total probability reaches this value; 1 = off.
    pub top_p: f64,
    /// Drop tokens below min_p times the probability of the most probable one; 0 = off.
    pub min_p: f64,
}

impl Filters {
    /// Filters that keep all tokens.
    pub const OFF: Self = Self { top_k: 0, top_p: 1.0, min_p: 0.0 };

    /// Whether the filters keep all tokens.
    pub fn are_off(&self) -> bool {
        self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }
}

/// The scores of a batch of rows, one element per row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// The scores of the target tokens.
    pub tokens: Vec<TokenScore>,
    /// The softmax of each row, for [`score_vjp`].
    pub softmax: Vec<Softmax>,
}

impl Scores {
    /// Computes scores from the softmax sums of all chunks, `[rows][chunks]`, and the targets' logits.
    fn new(cells: &[Cell], target_logits: &[f32], t: f32) -> Scores {
        let chunks = cells.len().checked_div(target_logits.len()).unwrap_or(0);
        let rows = cells.chunks_exact(chunks.max(1)).zip(target_logits);
        let of_row = |(cells, logit): (&[Cell], &f32)| {
            let total = Total::new(cells, t);
            let (logp, entropy, is_top) = (total.logp(*logit), total.entropy(), total.is_top(*logit));
            let softmax = Softmax { largest: total.largest, sum: total.sum, target_logit: *logit };
            (TokenScore { logp, entropy, is_top }, softmax)
        };
        let (tokens, softmax) = rows.map(of_row).unzip();
        Scores { tokens, softmax }
    }
}

/// The language-model head, which computes logits from normed rows.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// The head's matrix `[vocab, hidden]`.
    pub weight: &'a PackedMatrix,
    /// Logits become c·tanh(x · weightᵀ / c) if c is set.
    pub softcap: Option<f32>,
}

impl<'a> Head<'a> {
    /// A head without a soft cap.
    pub fn of(weight: &'a PackedMatrix) -> Self {
        Self { weight, softcap: None }
    }

    /// Applies the soft cap to products of head and rows, in whole vectors.
    fn cap(&self, isa: Isa, products: &mut [f32]) {
        if let Some(softcap) = self.softcap {
            // Safety: the slice consists of whole vectors.
            unsafe { cap(isa, products, softcap) };
        }
    }
}

/// Computes the log-prob of each row's target, log-softmax(logits / temperature), and the entropy. x `[rows, hidden]`
/// is already normed; targets are below `weight.n()`, the temperature is above 0.
pub fn score(threads: &Threads, isa: Isa, x: &[f32], head: Head<'_>, targets: &[u32], temperature: f64) -> Scores {
    let (rows, weight) = (targets.len(), head.weight);
    check(x, weight, rows);
    check_targets(targets, weight);
    let chunks = weight.n().div_ceil(CHUNK);
    let mut table = vec![Cell::default(); rows * chunks];
    let mut logits = vec![0f32; rows];
    let (cells, at_target) = (Shared::new(&mut table), Shared::new(&mut logits));
    let t = factor(temperature);
    stream(threads, isa, x, head, rows, &|part| {
        for (row, values) in part.rows.clone().zip(part.logits.chunks(part.stride)) {
            let target = targets[row] as usize;
            // Safety: each part writes only the cells and targets of its own rows and chunk.
            unsafe {
                *cells.at(row * chunks + part.chunk) = summary(isa, part.padded(values), t, &mut []);
                if target / CHUNK == part.chunk {
                    *at_target.at(row) = values[target % CHUNK];
                }
            }
        }
    });
    Scores::new(&table, &logits, t)
}

/// Computes the logits as out `[rows, vocab]`, for samplers that need all of them. The bits are the
/// same as in [`score`].
pub fn logits(threads: &Threads, isa: Isa, x: &[f32], head: Head<'_>, out: &mut [f32]) {
    let weight = head.weight;
    let rows = out.len().checked_div(weight.n()).unwrap_or(0);
    check(x, weight, rows);
    let terms = [Term { x, stride: weight.k(), weight }];
    forward(threads, isa, &terms, None, Output { y: out, stride: weight.n(), rows, add: false });
    if head.softcap.is_some() {
        each_row(threads, out, weight.n(), |_, row| {
            // Process the end of a row in a padded copy: a lane's bits do not depend on the others.
            let mut padded = [0f32; PAD];
            for values in row.chunks_mut(PAD) {
                padded[..values.len()].copy_from_slice(values);
                head.cap(isa, &mut padded);
                values.copy_from_slice(&padded[..values.len()]);
            }
        });
    }
}

fn check(x: &[f32], weight: &PackedMatrix, rows: usize) {
    assert_eq!(x.len(), rows * weight.k(), "x is not so many rows as wide as the weight");
}

fn check_targets(targets: &[u32], weight: &PackedMatrix) {
    assert!(targets.iter().all(|target| (*target as usize) < weight.n()), "a target token is not in the vocabulary");
}

/// 1 / temperature, bounded so that its product with a logit is finite; 1 if the temperature is 0.
pub fn factor(temperature: f64) -> f32 {
    if temperature == 0.0 { 1.0 } else { (1.0 / temperature).min(1e30) as f32 }
}

/// The logits of some rows and one chunk of the vocabulary.
struct Part<'a> {
    rows: Range<usize>,
    chunk: usize,
    /// Number of tokens in the chunk.
    width: usize,
    /// The logits `[rows][stride]`, with the chunk's first logit at the beginning; −∞ from `width` to the end of a
    /// vector. The last row ends with the chunk.
    logits: &'a [f32],
    stride: usize,
}

impl Part<'_> {
    /// The logits of one row in whole vectors.
    fn padded<'a>(&self, values: &'a [f32]) -> &'a [f32] {
        &values[..self.width.next_multiple_of(PAD)]
    }
}

/// Number of logits that each row is padded to a multiple of.
const PAD: usize = 16;

thread_local! {
    static LOGITS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Computes all logits, and calls `f` for every pair of row block and chunk of the vocabulary, in any
/// order on any threads.
fn stream(threads: &Threads, isa: Isa, x: &[f32], head: Head<'_>, rows: usize, f: &(dyn Fn(Part<'_>) + Sync)) {
    let weight = head.weight;
    let chunks = weight.n().div_ceil(CHUNK);
    let blocks = rows.div_ceil(ROWS_AT_ONCE);
    if blocks == 0 || chunks == 0 {
        return;
    }
    // Few rows are processed with several chunks of the vocabulary together, so that the rows are packed less often;
    // there must be enough parts for all threads.
    let by_size = LOGITS_AT_ONCE / (rows.min(ROWS_AT_ONCE) * CHUNK);
    let by_threads = chunks * blocks / (threads.count() * if threads.count() == 1 { 1 } else { 6 });
    let chunks_at_once = by_size.min(by_threads).clamp(1, 16);
    let spans = chunks.div_ceil(chunks_at_once);
    let work = rows * weight.n() * weight.k() / 16;
    with_shared_inputs(threads, isa, x, rows, weight, |shared_inputs| {
        take_turns(threads, spans * blocks, work, |index| {
            // Multiply the weights of these chunks with all rows while they are in the cache.
            let (span, block) = (index / blocks, index % blocks);
            let rows = block * ROWS_AT_ONCE..((block + 1) * ROWS_AT_ONCE).min(rows);
            let span = span * chunks_at_once..((span + 1) * chunks_at_once).min(chunks);
            LOGITS.with_borrow_mut(|buffer| {
                let stride = span.len() * CHUNK;
                let inputs = (&x[rows.start * weight.k()..], shared_inputs.starting_at(rows.start), rows.len());
                compute(isa, inputs, head, span.clone(), buffer);
                for (at, chunk) in span.enumerate() {
                    let width = (weight.n() - chunk * CHUNK).min(CHUNK);
                    let logits = &buffer[at * CHUNK..];
                    let length = (rows.len() - 1) * stride + CHUNK;
                    f(Part { rows: rows.clone(), chunk, width, logits: &logits[..length], stride });
                }
            });
        });
    });
}

/// Computes the logits of some rows of x and some chunks of the vocabulary
/// into `buffer`, `[rows][chunks][512]`, padded.
fn compute(
    isa: Isa,
    (x, shared_inputs, rows): (&[f32], SharedInputs, usize),
    head: Head<'_>,
    chunks: Range<usize>,
    buffer: &mut Vec<f32>,
) {
    let weight = head.weight;
    let stride = chunks.len() * CHUNK;
    let panels = chunks.start * CHUNK_PANELS..(chunks.end * CHUNK_PANELS).min(weight.panels());
    if buffer.len() < rows * stride {
        buffer.resize(rows * stride, 0.0);
    }
    let width = weight.n().min(chunks.end * CHUNK) - chunks.start * CHUNK;
    let term = Term { x, stride: weight.k(), weight };
    forward_panels(isa, &term, shared_inputs, None, panels, Output { y: buffer, stride, rows, add: false });
    for row in buffer.chunks_exact_mut(stride).take(rows) {
        head.cap(isa, &mut row[..width.next_multiple_of(PAD)]);
        row[width..width.next_multiple_of(PAD)].fill(f32::NEG_INFINITY);
    }
}

on_every_isa! {
    /// Applies the soft cap c·tanh(x / c) to logits in place.
    unsafe fn cap(values: &mut [f32], softcap: f32) = cap_with
}

#[inline(always)]
unsafe fn cap_with<S: Simd>(values: &mut [f32], softcap: f32) {
    unsafe {
        for at in (0..values.len()).step_by(S::LANES) {
            let at = values.as_mut_ptr().add(at);
            let t = tanh::<S>(S::mul(S::load(at), S::splat(1.0 / softcap)));
            S::store(at, S::mul(t, S::splat(softcap)));
        }
    }
}

/// The softmax sums of a row over one chunk of the vocabulary.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    /// The largest logit of the chunk; NaN is ignored.
    largest: f32,
    /// Sum Σ eᶻ with z = logit·t − largest·t, where t = 1/temperature.
    sum: f32,
    /// Weighted sum Σ eᶻ·z.
    weighted: f32,
}

impl Cell {
    /// The chunk's largest logit times `t`, finite.
    fn scaled(&self, t: f32) -> f32 {
        (self.largest * t).max(f32::MIN)
    }
}

on_every_isa! {
    /// Computes the softmax sums of a chunk's logits, in whole vectors; writes Σ eᶻ of each panel to `panels`.
    unsafe fn summary(logits: &[f32], t: f32, panels: &mut [f32]) -> Cell = summary_with
}

#[inline(always)]
unsafe fn summary_with<S: Simd>(logits: &[f32], t: f32, panels: &mut [f32]) -> Cell {
    unsafe {
        let mut largest = S::splat(f32::NEG_INFINITY);
        for at in (0..logits.len()).step_by(S::LANES) {
            // The CPU's max returns the second operand if one is NaN.
            largest = S::max(S::load(logits.as_ptr().add(at)), largest);
        }
        let mut cell = Cell { largest: S::largest(largest), sum: 0.0, weighted: 0.0 };
        let (shift, t) = (S::splat(cell.scaled(t)), S::splat(t));
        let (mut sum, mut weighted) = (S::zero(), S::zero());
        for (panel, logits) in logits.chunks(PANEL).enumerate() {
            let mut of_panel = S::zero();
            for at in (0..logits.len()).step_by(S::LANES) {
                let (e, z) = exponential::<S>(logits.as_ptr().add(at), t, shift);
                of_panel = S::add(of_panel, e);
                weighted = S::fma(e, z, weighted);
            }
            if let Some(to) = panels.get_mut(panel) {
                *to = S::sum(of_panel);
            }
            sum = S::add(sum, of_panel);
        }
        cell.sum = S::sum(sum);
        cell.weighted = S::sum(weighted);
        cell
    }
}

/// Computes eᶻ and z = logit·t − shift of a vector of logits, with z at least −87; NaN stays NaN.
#[inline(always)]
unsafe fn exponential<S: Simd>(logits: *const f32, t: S::V, shift: S::V) -> (S::V, S::V) {
    unsafe {
        let z = S::max(S::splat(-87.0), S::sub(S::mul(S::load(logits), t), shift));
        (exp::<S>(z), z)
    }
}

/// The softmax sums of a row over the whole vocabulary, merged from those of its chunks.
struct Total {
    /// The largest logit of the row, times 1 / temperature `t`.
    largest: f32,
    /// Sum Σ e^(logit·t − largest).
    sum: f64,
    /// Weighted sum Σ e^(logit·t − largest)·(logit·t − largest).
    weighted: f64,
    t: f32,
}

impl Total {
    fn new(cells: &[Cell], t: f32) -> Total {
        let largest = cells.iter().fold(f32::MIN, |largest, cell| largest.max(cell.scaled(t)));
        let mut total = Total { largest, sum: 0.0, weighted: 0.0, t };
        for cell in cells {
            let (share, shift) = total.share(cell);
            total.sum += share * f64::from(cell.sum);
            total.weighted += share * (f64::from(cell.weighted) + shift * f64::from(cell.sum));
        }
        total
    }

    /// The factor that a chunk's sums are multiplied with in the total, and its logarithm.
    fn share(&self, cell: &Cell) -> (f64, f64) {
        let shift = f64::from(cell.scaled(self.t)) - f64::from(self.largest);
        (shift.exp(), shift)
    }

    fn logp(&self, logit: f32) -> f32 {
        (f64::from(logit * self.t - self.largest) - self.sum.ln()) as f32
    }

    fn is_top(&self, logit: f32) -> bool {
        logit * self.t >= self.largest
    }

    fn entropy(&self) -> f32 {
        (self.sum.ln() - self.weighted / self.sum) as f32
    }
}
