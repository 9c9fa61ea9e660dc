//! The language-model head over a packed weight `[vocab, hidden]`, streamed: the logits of a chunk of the vocabulary and
//! some rows lie in a buffer that stays in the cache, `[rows, vocab]` is never held.
//!
//! Of each row and chunk its largest logit, Σ eᶻ and Σ eᶻ·z are kept, z = logit / temperature less the chunk's largest,
//! and combined in the order of the chunks. Chunks are the same whatever the rows and threads, so a row's result depends
//! on the row alone, and what [`choose`] reports is what [`score`] gives.

mod choose;
mod gradient;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ops::Range;

pub use choose::{Chosen, Pick, choose};
pub use gradient::{Gradient, score_vjp};

use super::gemm::{Laid, Output, Term, forward, forward_panels, with_laid};
use super::isa::Isa;
use super::pack::{PANEL, PackedMatrix};
use super::rows::{each_row, on_every_rung, take_turns};
use super::simd::{Simd, exp, tanh};
use super::threads::{Shared, Threads};

/// Outputs of a chunk.
const CHUNK: usize = 512;
/// Panels of a chunk.
const CHUNK_PANELS: usize = CHUNK / PANEL;
/// Rows whose logits of a chunk are computed together.
const ROWS_AT_ONCE: usize = 128;
/// Logits of a thread at a time.
const LOGITS_AT_ONCE: usize = ROWS_AT_ONCE * CHUNK;

/// What the distribution of a row says of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenScore {
    /// Log-probability of the token, in nats.
    pub logp: f32,
    /// Entropy of the distribution, in nats.
    pub entropy: f32,
}

/// What makes the probabilities of a row sum to 1: p = e^(logit / temperature − largest) / sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalizer {
    /// The largest logit / temperature.
    pub largest: f32,
    /// Σ e^(logit / temperature − largest)
    pub sum: f64,
}

/// Which tokens a draw may take, of those of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Filters {
    /// Keep the K most probable, and whatever is as probable as the last of them; 0 = off.
    pub top_k: u32,
    /// Keep the most probable tokens whose mass reaches it; 1 = off.
    pub top_p: f64,
    /// Drop tokens below min_p times the most probable one's probability; 0 = off.
    pub min_p: f64,
}

impl Filters {
    /// All tokens.
    pub const OFF: Self = Self { top_k: 0, top_p: 1.0, min_p: 0.0 };

    /// Whether they leave all tokens.
    pub fn are_off(&self) -> bool {
        self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }
}

/// One element a row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// Of the targets.
    pub tokens: Vec<TokenScore>,
    /// What [`score_vjp`] wants.
    pub normalizers: Vec<Normalizer>,
}

/// What makes logits of rows.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// `[vocab, hidden]`
    pub weight: &'a PackedMatrix,
    /// Logits are c·tanh(x · weightᵀ / c), where there is a c.
    pub softcap: Option<f32>,
}

impl<'a> Head<'a> {
    /// Logits are the products themselves.
    pub fn of(weight: &'a PackedMatrix) -> Self {
        Self { weight, softcap: None }
    }

    /// Products → logits, in whole vectors.
    fn cap(&self, isa: Isa, products: &mut [f32]) {
        if let Some(softcap) = self.softcap {
            // Safety: whole vectors.
            unsafe { cap(isa, products, softcap) };
        }
    }
}

/// log-softmax(logits / temperature) at each row's target, and the entropy. x `[rows, hidden]` is normed already;
/// targets are below `weight.n()`, the temperature is above 0.
pub fn score(threads: &Threads, isa: Isa, x: &[f32], head: Head<'_>, targets: &[u32], temperature: f64) -> Scores {
    let (rows, weight) = (targets.len(), head.weight);
    check(x, weight, rows);
    assert!(targets.iter().all(|target| (*target as usize) < weight.n()), "a target is no token");
    let chunks = weight.n().div_ceil(CHUNK);
    let mut table = vec![Cell::default(); rows * chunks];
    let mut logits = vec![0f32; rows];
    let (cells, at_target) = (Shared::new(&mut table), Shared::new(&mut logits));
    let t = factor(temperature);
    stream(threads, isa, x, head, rows, &|part| {
        for (row, values) in part.rows.clone().zip(part.logits.chunks(part.stride)) {
            let target = targets[row] as usize;
            // Safety: a cell is one part's, and so is a row's target.
            unsafe {
                *cells.at(row * chunks + part.chunk) = summary(isa, part.padded(values), t, &mut []);
                if target / CHUNK == part.chunk {
                    *at_target.at(row) = values[target % CHUNK];
                }
            }
        }
    });
    let mut scores = Scores::default();
    for (cells, logit) in table.chunks_exact(chunks.max(1)).zip(&logits) {
        let total = Total::new(cells, t);
        scores.tokens.push(TokenScore { logp: total.logp(*logit), entropy: total.entropy() });
        scores.normalizers.push(Normalizer { largest: total.largest, sum: total.sum });
    }
    scores
}

/// out `[rows, vocab]` = the logits, for samplers that need all of them. The same bits as in [`score`].
pub fn logits(threads: &Threads, isa: Isa, x: &[f32], head: Head<'_>, out: &mut [f32]) {
    let weight = head.weight;
    let rows = out.len().checked_div(weight.n()).unwrap_or(0);
    check(x, weight, rows);
    let terms = [Term { x, stride: weight.k(), weight }];
    forward(threads, isa, &terms, None, Output { y: out, stride: weight.n(), rows, add: false });
    if head.softcap.is_some() {
        each_row(threads, out, weight.n(), |_, row| {
            // Lane by lane the same as in whole vectors.
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

/// 1 / temperature, bounded so that a logit times it is finite; 1 where the temperature is 0.
pub fn factor(temperature: f64) -> f32 {
    if temperature == 0.0 { 1.0 } else { (1.0 / temperature).min(1e30) as f32 }
}

/// The logits of some rows and one chunk.
struct Part<'a> {
    rows: Range<usize>,
    chunk: usize,
    /// Outputs of the chunk.
    width: usize,
    /// `[rows][stride]`, the chunk's first logit at the beginning; −∞ from `width` to the end of a vector. The last row
    /// ends with the chunk.
    logits: &'a [f32],
    stride: usize,
}

impl Part<'_> {
    /// The logits of one row in whole vectors.
    fn padded<'a>(&self, values: &'a [f32]) -> &'a [f32] {
        &values[..self.width.next_multiple_of(PAD)]
    }
}

/// Logits are padded to this.
const PAD: usize = 16;

thread_local! {
    static LOGITS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Every row with every chunk, in any order on any threads.
fn stream(threads: &Threads, isa: Isa, x: &[f32], head: Head<'_>, rows: usize, f: &(dyn Fn(Part<'_>) + Sync)) {
    let weight = head.weight;
    let chunks = weight.n().div_ceil(CHUNK);
    let blocks = rows.div_ceil(ROWS_AT_ONCE);
    if blocks == 0 || chunks == 0 {
        return;
    }
    // With few rows several chunks at once, so that the rows are laid out less often; enough parts for all threads.
    let by_size = LOGITS_AT_ONCE / (rows.min(ROWS_AT_ONCE) * CHUNK);
    let by_threads = chunks * blocks / (threads.count() * if threads.count() == 1 { 1 } else { 6 });
    let chunks_at_once = by_size.min(by_threads).clamp(1, 16);
    let spans = chunks.div_ceil(chunks_at_once);
    let work = rows * weight.n() * weight.k() / 16;
    with_laid(threads, isa, x, rows, weight, |laid| {
        take_turns(threads, spans * blocks, work, |index| {
            // A span's weights meet all rows while they are in the cache.
            let (span, block) = (index / blocks, index % blocks);
            let rows = block * ROWS_AT_ONCE..((block + 1) * ROWS_AT_ONCE).min(rows);
            let span = span * chunks_at_once..((span + 1) * chunks_at_once).min(chunks);
            LOGITS.with_borrow_mut(|buffer| {
                let stride = span.len() * CHUNK;
                let inputs = (&x[rows.start * weight.k()..], laid.starting_at(rows.start), rows.len());
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

/// The logits of so many rows of x and some chunks into `buffer`, `[rows][chunks][512]`, padded.
fn compute(
    isa: Isa,
    (x, laid, rows): (&[f32], Laid, usize),
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
    forward_panels(isa, &term, laid, None, panels, Output { y: buffer, stride, rows, add: false });
    for row in buffer.chunks_exact_mut(stride).take(rows) {
        head.cap(isa, &mut row[..width.next_multiple_of(PAD)]);
        row[width..width.next_multiple_of(PAD)].fill(f32::NEG_INFINITY);
    }
}

on_every_rung! {
    /// In place: x → c·tanh(x / c).
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

/// What is kept of a row and a chunk.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    /// The largest logit, NaN left out.
    largest: f32,
    /// Σ eᶻ, z = logit·t − largest·t
    sum: f32,
    /// Σ eᶻ·z
    weighted: f32,
}

impl Cell {
    /// The largest logit times `t`, finite.
    fn scaled(&self, t: f32) -> f32 {
        (self.largest * t).max(f32::MIN)
    }
}

on_every_rung! {
    /// The summary of some logits, whole vectors of them; Σ eᶻ of each panel into `panels`, as many as it has.
    unsafe fn summary(logits: &[f32], t: f32, panels: &mut [f32]) -> Cell = summary_with
}

#[inline(always)]
unsafe fn summary_with<S: Simd>(logits: &[f32], t: f32, panels: &mut [f32]) -> Cell {
    unsafe {
        let mut largest = S::splat(f32::NEG_INFINITY);
        for at in (0..logits.len()).step_by(S::LANES) {
            // The larger is the second where the first is NaN.
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

/// eᶻ and z = logit·t − shift, no lower than −87; NaN stays NaN.
#[inline(always)]
unsafe fn exponential<S: Simd>(logits: *const f32, t: S::V, shift: S::V) -> (S::V, S::V) {
    unsafe {
        let z = S::max(S::splat(-87.0), S::sub(S::mul(S::load(logits), t), shift));
        (exp::<S>(z), z)
    }
}

/// The chunks of a row together.
struct Total {
    /// The largest logit, scaled.
    largest: f32,
    /// Σ e^(logit·t − largest)
    sum: f64,
    /// Σ e^(logit·t − largest)·(logit·t − largest)
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

    /// What the sums of a chunk are multiplied by, and its logarithm.
    fn share(&self, cell: &Cell) -> (f64, f64) {
        let shift = f64::from(cell.scaled(self.t)) - f64::from(self.largest);
        (shift.exp(), shift)
    }

    fn logp(&self, logit: f32) -> f32 {
        (f64::from(logit * self.t - self.largest) - self.sum.ln()) as f32
    }

    fn entropy(&self) -> f32 {
        (self.sum.ln() - self.weighted / self.sum) as f32
    }
}
