//! Chooses the next token of each row from the head's logits, by argmax or by sampling.

use std::cell::RefCell;

use super::super::gemm::{Output, SharedInputs, Term, forward_panels};
use super::super::isa::Isa;
use super::super::pack::PANEL;
use super::super::rows::{on_every_isa, over_rows};
use super::super::simd::Simd;
use super::super::threads::{Shared, Threads};
use super::{CHUNK, CHUNK_PANELS, Cell, Head, PAD, Total, check, exponential, factor, stream, summary};

/// The settings with which a row's token is chosen: temperature and random number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pick {
    /// Divisor of the logits; 0 takes the largest logit.
    pub temperature: f64,
    /// The random number in [0, 1) that selects the token.
    pub uniform: f64,
}

/// The chosen token of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chosen {
    /// Id of the chosen token.
    pub token: u32,
    /// Log-probability of the token at the temperature of the choice, in nats; at temperature 1 if
    /// the choice was greedy.
    pub logp: f32,
}

/// Chooses one token per row of x `[rows, hidden]`, which is already normed. Temperature 0 takes the largest logit (the
/// lowest id of several, never a NaN). Otherwise it takes the first token at which the sum of its probability and those
/// of all lower ids exceeds `uniform`. `logp` equals, bit for bit, the result of [`score`](super::score) for the token
/// at that temperature. The results replace the content of `chosen`.
pub fn choose(threads: &Threads, isa: Isa, x: &[f32], head: Head<'_>, picks: &[Pick], chosen: &mut Vec<Chosen>) {
    TABLE.with_borrow_mut(|table| choose_with(table, threads, isa, (x, head), picks, chosen));
}

thread_local! {
    static TABLE: RefCell<Table> = RefCell::default();
}

/// The softmax sums of every row while its token is chosen; the memory is reused.
#[derive(Default)]
struct Table {
    /// The sums of each chunk of the vocabulary, `[rows][chunks]`.
    cells: Vec<Cell>,
    /// Sum Σ eᶻ of each panel of the vocabulary, `[rows][panels]`.
    sums: Vec<f32>,
}

fn choose_with(
    table: &mut Table,
    threads: &Threads,
    isa: Isa,
    (x, head): (&[f32], Head<'_>),
    picks: &[Pick],
    chosen: &mut Vec<Chosen>,
) {
    let weight = head.weight;
    let (rows, chunks, panels) = (picks.len(), weight.n().div_ceil(CHUNK), weight.panels());
    check(x, weight, rows);
    assert!(weight.n() > 0, "the vocabulary has no token to choose");
    let Table { cells: table, sums } = table;
    table.resize(rows * chunks, Cell::default());
    sums.resize(rows * panels, 0.0);
    let (cells, panel_sums) = (Shared::new(table), Shared::new(sums));
    stream(threads, isa, x, head, rows, &|part| {
        let of_chunk = part.chunk * CHUNK_PANELS..((part.chunk + 1) * CHUNK_PANELS).min(panels);
        for (row, values) in part.rows.clone().zip(part.logits.chunks(part.stride)) {
            let t = factor(picks[row].temperature);
            // Safety: each part writes only the sums of its own rows and chunk.
            unsafe {
                let sums = panel_sums.part(row * panels + of_chunk.start..row * panels + of_chunk.end);
                *cells.at(row * chunks + part.chunk) = summary(isa, part.padded(values), t, sums);
            }
        }
    });
    chosen.clear();
    chosen.resize(rows, Chosen { token: 0, logp: 0.0 });
    let shared = Shared::new(chosen);
    over_rows(threads, rows, PANEL * weight.k(), |range| {
        for row in range {
            let of_row = Row {
                isa,
                x: &x[row * weight.k()..(row + 1) * weight.k()],
                head,
                cells: &table[row * chunks..(row + 1) * chunks],
                panels: &sums[row * panels..(row + 1) * panels],
            };
            // Safety: each row has one element, and one thread.
            unsafe { *shared.at(row) = of_row.choose(picks[row]) };
        }
    });
}

/// A row with its softmax sums, from which a token is chosen.
struct Row<'a> {
    isa: Isa,
    x: &'a [f32],
    head: Head<'a>,
    cells: &'a [Cell],
    panels: &'a [f32],
}

impl Row<'_> {
    fn choose(&self, pick: Pick) -> Chosen {
        let total = Total::new(self.cells, factor(pick.temperature));
        let (token, logit) = if pick.temperature == 0.0 { self.largest() } else { self.draw(&total, pick.uniform) };
        Chosen { token: token as u32, logp: total.logp(logit) }
    }

    /// Recomputes the logits of a panel of the vocabulary, −∞ after the last token; with the same bits as before.
    fn logits(&self, panel: usize) -> [f32; PANEL] {
        let mut logits = [f32::NEG_INFINITY; PANEL];
        let weight = self.head.weight;
        let term = Term { x: self.x, stride: weight.k(), weight };
        let out = Output { y: &mut logits, stride: PANEL, rows: 1, add: false };
        forward_panels(self.isa, &term, SharedInputs::default(), None, panel..panel + 1, out);
        let valid = (weight.n() - panel * PANEL).min(PANEL);
        self.head.cap(self.isa, &mut logits);
        logits[valid..].fill(f32::NEG_INFINITY);
        logits
    }

    /// Returns the first of the row's largest logits, with its token.
    fn largest(&self) -> (usize, f32) {
        let mut best = 0;
        for (chunk, cell) in self.cells.iter().enumerate() {
            if cell.largest > self.cells[best].largest {
                best = chunk;
            }
        }
        let largest = self.cells[best].largest;
        for panel in best * CHUNK_PANELS..((best + 1) * CHUNK_PANELS).min(self.panels.len()) {
            let logits = self.logits(panel);
            let valid = (self.head.weight.n() - panel * PANEL).min(PANEL);
            if let Some(index) = logits[..valid].iter().position(|logit| *logit == largest) {
                return (panel * PANEL + index, largest);
            }
        }
        // All logits of the row are NaN.
        (0, f32::NAN)
    }

    /// Samples a token: finds the chunk of the vocabulary, then the panel of the chunk, then the token of the panel.
    fn draw(&self, total: &Total, uniform: f64) -> (usize, f32) {
        let shares = self.cells.iter().map(|cell| total.share(cell).0 * f64::from(cell.sum));
        let (chunk, before) = invert(shares, uniform * total.sum);
        let cell = &self.cells[chunk];
        let rest = (uniform * total.sum - before) / total.share(cell).0;
        let first = chunk * CHUNK_PANELS;
        let of_chunk = &self.panels[first..(first + CHUNK_PANELS).min(self.panels.len())];
        let (panel, before) = invert(of_chunk.iter().map(|sum| f64::from(*sum)), rest);
        let (panel, rest) = (first + panel, rest - before);
        let logits = self.logits(panel);
        let mut weights = [0f32; PANEL];
        // Safety: a panel consists of whole vectors.
        unsafe { exponentials(self.isa, &logits, total.t, cell.scaled(total.t), &mut weights) };
        let valid = (self.head.weight.n() - panel * PANEL).min(PANEL);
        let (index, _) = invert(weights[..valid].iter().map(|weight| f64::from(*weight)), rest);
        (panel * PANEL + index, logits[index])
    }
}

on_every_isa! {
    /// Computes e^(logit·t − shift) for a panel of logits, with the same bits as in the softmax sums.
    unsafe fn exponentials(logits: &[f32; PANEL], t: f32, shift: f32, out: &mut [f32; PANEL]) = exponentials_with
}

#[inline(always)]
unsafe fn exponentials_with<S: Simd>(logits: &[f32; PANEL], t: f32, shift: f32, out: &mut [f32; PANEL]) {
    const { assert!(PANEL.is_multiple_of(PAD)) };
    unsafe {
        for at in (0..PANEL).step_by(S::LANES) {
            let (e, _) = exponential::<S>(logits.as_ptr().add(at), S::splat(t), S::splat(shift));
            S::store(out.as_mut_ptr().add(at), e);
        }
    }
}

/// Finds the first index at which the cumulative weight exceeds `target`, and the sum before it; if rounding leaves
/// none, the last index with a positive weight.
fn invert(weights: impl Iterator<Item = f64>, target: f64) -> (usize, f64) {
    let (mut sum, mut last) = (0.0, (0, 0.0));
    for (index, weight) in weights.enumerate() {
        let next = sum + weight;
        if next > target {
            return (index, sum);
        }
        if next > sum {
            last = (index, sum);
        }
        sum = next;
    }
    last
}
