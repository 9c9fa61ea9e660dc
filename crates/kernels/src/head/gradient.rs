//! Scores of a training pass, and their vector-Jacobian product: dL/dlogits = g·(onehot − softmax) / temperature.
//!
//! With softmax p and the weights W of the tokens, dL/dx = g / temperature · (W_target − Σ p·W): the sum depends on no
//! loss. [`score_for_training`] therefore computes it from the logits of the scores, as attention computes its output; a loss
//! only multiplies it later. The target's share of the sum is left out, so that 1 − p of a probable target is exact. A row
//! whose sum was not computed gets its gradient from a second pass over the vocabulary, as all rows did in rlood 0.1; the two
//! ways differ in the last bits.

use std::borrow::Cow;
use std::cell::RefCell;

use super::super::gemm::{Output, Rows, SharedInputs, backward_panels, outer_here, with_shared_inputs};
use super::super::isa::Isa;
use super::super::rows::{each_row, on_every_isa, take_turns};
use super::super::simd::Simd;
use super::super::threads::{Shared, Threads};
use super::{
    CHUNK, CHUNK_PANELS, Cell, Head, PAD, ROWS_AT_ONCE, Scores, Softmax, TokenScore, check, check_targets, compute,
    exponential, factor, score, summary,
};

/// The inputs of the head's forward pass.
#[derive(Clone, Copy, Debug)]
pub struct Forward<'a> {
    /// The input rows, `[rows, hidden]`, already normed.
    pub x: &'a [f32],
    /// The head; its weights are `[vocabulary, hidden]`.
    pub head: Head<'a>,
    /// The target token of each row.
    pub targets: &'a [u32],
    /// Divisor of the logits; above 0.
    pub temperature: f64,
}

/// The inputs of [`score_vjp`].
#[derive(Clone, Copy, Debug)]
pub struct Gradient<'a> {
    /// The inputs of the forward pass.
    pub forward: Forward<'a>,
    /// The softmax of each row, from the scores.
    pub softmax: &'a [Softmax],
    /// The rows whose sums [`score_for_training`] has computed.
    pub summed: &'a [bool],
    /// The gradient dL/dlogp of each row; rows with 0 have no gradient.
    pub g: &'a [f32],
}

/// Computes the same bits as [`score`]. For the rows in `summed` it also writes Σ e^(logit / temperature − largest)·weight over
/// all tokens but the target to `sums` `[rows, hidden]`, which [`score_vjp`] turns into dL/dx; other rows of `sums` become 0.
pub fn score_for_training(
    threads: &Threads,
    isa: Isa,
    forward: &Forward<'_>,
    summed: &[bool],
    sums: &mut [f32],
) -> Scores {
    let rows = forward.targets.len();
    check(sums, forward.head.weight, rows);
    assert_eq!(summed.len(), rows, "each row is either summed or not");
    sums.fill(0.0);
    let mut scores = Scores { tokens: vec![TokenScore::default(); rows], softmax: vec![Softmax::default(); rows] };
    for is_summed in [true, false] {
        let selected = Selected::new(forward, |row| summed[row] == is_summed);
        let of_selected = match is_summed {
            true => selected.score_and_sum(threads, isa, sums),
            false => score(threads, isa, &selected.x, forward.head, &selected.targets, forward.temperature),
        };
        for (index, row) in selected.rows.iter().enumerate() {
            scores.tokens[*row] = of_selected.tokens[index];
            scores.softmax[*row] = of_selected.softmax[index];
        }
    }
    scores
}

/// Turns the sums of [`score_for_training`] into d_x `[rows, hidden]` = dL/dx, in place; adds dL/dweight to d_weight
/// `[vocab, hidden]` if requested. Rows that were not summed get their gradient from a second pass over the vocabulary. All
/// sums are chains over the vocabulary and over the rows, in order.
pub fn score_vjp(threads: &Threads, isa: Isa, gradient: &Gradient<'_>, d_x: &mut [f32], d_weight: Option<&mut [f32]>) {
    let Gradient { forward, softmax, summed, g } = *gradient;
    let weight = forward.head.weight;
    let (rows, k) = (forward.targets.len(), weight.k());
    check(d_x, weight, rows);
    assert!(
        softmax.len() == rows && summed.len() == rows && g.len() == rows,
        "each row must have a softmax, a gradient, and either sums or none"
    );
    let t = factor(forward.temperature);
    each_row(threads, d_x, k, |row, d_x| match g[row] {
        g if g != 0.0 && summed[row] => finish(forward.head, forward.targets[row], (g * t, t), &softmax[row], d_x),
        _ => d_x.fill(0.0),
    });
    let second_pass = |is_selected: &dyn Fn(usize) -> bool, f: &mut dyn FnMut(&SecondPass<'_>)| {
        let selected = Selected::new(&forward, |row| g[row] != 0.0 && is_selected(row));
        if selected.rows.is_empty() || k == 0 {
            return;
        }
        let of_row = |row: &usize| Line {
            row: *row,
            target: forward.targets[*row] as usize,
            largest: softmax[*row].largest,
            c: (-f64::from(g[*row]) * f64::from(t) / softmax[*row].sum) as f32,
            at_target: g[*row] * t,
        };
        let lines: Vec<Line> = selected.rows.iter().map(of_row).collect();
        with_shared_inputs(threads, isa, &selected.x, lines.len(), weight, |shared_inputs| {
            f(&SecondPass { isa, x: &selected.x, shared_inputs, head: forward.head, lines: &lines, t });
        });
    };
    second_pass(&|row| !summed[row], &mut |pass| pass.inputs(threads, d_x));
    let Some(d_weight) = d_weight else { return };
    assert_eq!(d_weight.len(), weight.n() * k, "the weight of the output layer and its gradient differ in shape");
    second_pass(&|_| true, &mut |pass| pass.weights(threads, d_weight));
}

/// Computes dL/dx of a row in place, from Σ e^(logit / temperature − largest)·weight of all tokens but the target.
fn finish(head: Head<'_>, target: u32, (g, t): (f32, f32), softmax: &Softmax, sums: &mut [f32]) {
    let Softmax { largest, sum, target_logit } = *softmax;
    let of_target = f64::from(target_logit * t - largest).exp();
    let slope = head.softcap.map_or(1.0, |softcap| slope(target_logit, softcap));
    let c = (-f64::from(g) / sum) as f32;
    let at_target = (f64::from(g) * (sum - of_target) / sum) as f32 * slope;
    let mut weight = vec![0f32; sums.len()];
    head.weight.row(target as usize, &mut weight);
    for (d, weight) in sums.iter_mut().zip(&weight) {
        *d = *d * c + weight * at_target;
    }
}

/// The derivative of c·tanh(x / c): 1 − (value / c)².
fn slope(value: f32, softcap: f32) -> f32 {
    1.0 - (value / softcap) * (value / softcap)
}

/// Number of rows for which the weights are read once to compute the sums.
const MOST_ROWS: usize = 256;

thread_local! {
    /// A thread's buffers: logits of a chunk, and the sums of some rows.
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Some rows of a forward pass; copied, unless these are all rows.
struct Selected<'a> {
    rows: Vec<usize>,
    x: Cow<'a, [f32]>,
    targets: Cow<'a, [u32]>,
    head: Head<'a>,
    t: f32,
}

impl<'a> Selected<'a> {
    fn new(forward: &Forward<'a>, is_selected: impl Fn(usize) -> bool) -> Self {
        let Forward { x, head, targets, temperature } = *forward;
        let k = head.weight.k();
        check(x, head.weight, targets.len());
        check_targets(targets, head.weight);
        let rows: Vec<usize> = (0..targets.len()).filter(|row| is_selected(*row)).collect();
        let (x, targets) = if rows.len() == targets.len() {
            (Cow::Borrowed(x), Cow::Borrowed(targets))
        } else {
            let x = rows.iter().flat_map(|row| &x[row * k..(row + 1) * k]).copied().collect();
            (Cow::Owned(x), rows.iter().map(|row| targets[*row]).collect())
        };
        Selected { rows, x, targets, head, t: factor(temperature) }
    }

    /// Computes the scores of the rows, and writes their sums to `sums`, which has a row for every row of the forward pass.
    fn score_and_sum(&self, threads: &Threads, isa: Isa, sums: &mut [f32]) -> Scores {
        let (weight, count) = (self.head.weight, self.rows.len());
        let chunks = weight.n().div_ceil(CHUNK);
        let mut table = vec![Cell::default(); count * chunks];
        let mut target_logits = vec![0f32; count];
        let (cells, logits, sums) = (Shared::new(&mut table), Shared::new(&mut target_logits), Shared::new(sums));
        let at_once = rows_at_once(count, threads);
        let work = 2 * count * weight.n() * weight.k() / 16;
        with_shared_inputs(threads, isa, &self.x, count, weight, |shared_inputs| {
            take_turns(threads, count.div_ceil(at_once), work, |block| {
                let rows = block * at_once..((block + 1) * at_once).min(count);
                // Safety: each row has its own cells, logit and sums, and belongs to one block.
                let block = unsafe {
                    Block {
                        x: &self.x[rows.start * weight.k()..],
                        shared_inputs: shared_inputs.starting_at(rows.start),
                        targets: &self.targets[rows.clone()],
                        cells: cells.part(rows.start * chunks..rows.end * chunks),
                        target_logits: logits.part(rows.clone()),
                    }
                };
                SCRATCH.with_borrow_mut(|(buffer, of_block)| {
                    block.sum(isa, self.head, self.t, buffer, of_block);
                    for (row, of_row) in self.rows[rows].iter().zip(of_block.chunks_exact(weight.k().max(1))) {
                        // Safety: as above.
                        unsafe { sums.part(row * weight.k()..(row + 1) * weight.k()) }.copy_from_slice(of_row);
                    }
                });
            });
        });
        Scores::new(&table, &target_logits, self.t)
    }
}

/// The rows that one thread scores and sums up, and its results.
struct Block<'a> {
    x: &'a [f32],
    shared_inputs: SharedInputs,
    targets: &'a [u32],
    /// The softmax sums of each row and chunk, `[rows][chunks]`.
    cells: &'a mut [Cell],
    target_logits: &'a mut [f32],
}

impl Block<'_> {
    /// Goes through the vocabulary once. The sums are relative to the largest logit so far, and a larger one scales them
    /// down when it follows.
    fn sum(self, isa: Isa, head: Head<'_>, t: f32, logits: &mut Vec<f32>, sums: &mut Vec<f32>) {
        let (weight, rows, k) = (head.weight, self.targets.len(), head.weight.k());
        let chunks = weight.n().div_ceil(CHUNK);
        let mut largest = vec![f32::MIN; rows];
        sums.clear();
        sums.resize(rows * k, 0.0);
        for chunk in 0..chunks {
            let width = (weight.n() - chunk * CHUNK).min(CHUNK);
            compute(isa, (self.x, self.shared_inputs, rows), head, chunk..chunk + 1, logits);
            for (row, values) in logits.chunks_exact_mut(CHUNK).take(rows).enumerate() {
                // Safety: the slice consists of whole vectors.
                let cell = unsafe { summary(isa, &values[..width.next_multiple_of(PAD)], t, &mut []) };
                self.cells[row * chunks + chunk] = cell;
                let at_target = self.targets[row] as usize;
                let at_target = (at_target / CHUNK == chunk).then_some(at_target % CHUNK);
                if let Some(at) = at_target {
                    self.target_logits[row] = values[at];
                }
                if cell.scaled(t) > largest[row] {
                    let shrink = (f64::from(largest[row]) - f64::from(cell.scaled(t))).exp() as f32;
                    sums[row * k..(row + 1) * k].iter_mut().for_each(|sum| *sum *= shrink);
                    largest[row] = cell.scaled(t);
                }
                soften(isa, values, width, (t, largest[row], 1.0), None, head.softcap);
                if let Some(at) = at_target {
                    values[at] = 0.0;
                }
            }
            let probabilities = Rows { values: logits, width, stride: CHUNK };
            let panels = chunk * CHUNK_PANELS..((chunk + 1) * CHUNK_PANELS).min(weight.panels());
            backward_panels(isa, weight, panels, probabilities, Output { y: sums, stride: k, rows, add: true });
        }
    }
}

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

/// Gradients from logits that are computed again.
struct SecondPass<'a> {
    isa: Isa,
    /// The input rows of the lines, `[lines, hidden]`.
    x: &'a [f32],
    shared_inputs: SharedInputs,
    head: Head<'a>,
    lines: &'a [Line],
    t: f32,
}

impl SecondPass<'_> {
    /// Number of multiply-adds, in vectors.
    fn work(&self) -> usize {
        2 * self.lines.len() * self.head.weight.n() * self.head.weight.k() / 16
    }

    /// Writes dL/dx of the lines to their rows of `d_x`.
    fn inputs(&self, threads: &Threads, d_x: &mut [f32]) {
        let (weight, lines, k) = (self.head.weight, self.lines, self.head.weight.k());
        let at_once = rows_at_once(lines.len(), threads);
        let d_x = Shared::new(d_x);
        take_turns(threads, lines.len().div_ceil(at_once), self.work(), |block| {
            let first = block * at_once;
            let block = &lines[first..(first + at_once).min(lines.len())];
            SCRATCH.with_borrow_mut(|(logits, sums)| {
                sums.clear();
                sums.resize(block.len() * k, 0.0);
                for chunk in 0..weight.n().div_ceil(CHUNK) {
                    let dy = self.d_logits(first, block, chunk, logits);
                    let out = Output { y: sums, stride: k, rows: block.len(), add: true };
                    let panels = chunk * CHUNK_PANELS..((chunk + 1) * CHUNK_PANELS).min(weight.panels());
                    backward_panels(self.isa, weight, panels, dy, out);
                }
                for (line, sums) in block.iter().zip(sums.chunks_exact(k)) {
                    // Safety: each row of d_x belongs to one block of rows.
                    unsafe { d_x.part(line.row * k..(line.row + 1) * k) }.copy_from_slice(sums);
                }
            });
        });
    }

    /// Adds dL/dweight to `d_weight`.
    fn weights(&self, threads: &Threads, d_weight: &mut [f32]) {
        let (n, k) = (self.head.weight.n(), self.head.weight.k());
        let d_weight = Shared::new(d_weight);
        take_turns(threads, n.div_ceil(CHUNK), self.work(), |chunk| {
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
        for (line, values) in block.iter().zip(logits.chunks_exact_mut(CHUNK)) {
            let at_target = (line.target / CHUNK == chunk).then_some((line.target % CHUNK, line.at_target));
            soften(self.isa, values, width, (self.t, line.largest, line.c), at_target, self.head.softcap);
        }
        Rows { values: logits, width, stride: CHUNK }
    }
}

/// Number of rows of a block. It may depend on the threads: the division does not affect the sums.
fn rows_at_once(rows: usize, threads: &Threads) -> usize {
    let blocks = rows.div_ceil(MOST_ROWS).next_multiple_of(threads.count()).max(1);
    rows.div_ceil(blocks).next_multiple_of(16).max(16)
}

/// Replaces the first `width` logits of a chunk by c·e^(logit·t − largest), adds a value to one of them, and multiplies by the
/// slope of the soft cap.
fn soften(
    isa: Isa,
    logits: &mut [f32],
    width: usize,
    (t, largest, c): (f32, f32, f32),
    add: Option<(usize, f32)>,
    softcap: Option<f32>,
) {
    let mut capped = [0f32; CHUNK];
    if softcap.is_some() {
        capped[..width].copy_from_slice(&logits[..width]);
    }
    // Safety: the slice consists of whole vectors.
    unsafe { exponentials(isa, &mut logits[..width.next_multiple_of(PAD)], t, largest, c) };
    if let Some((at, value)) = add {
        logits[at] += value;
    }
    if let Some(softcap) = softcap {
        logits.iter_mut().zip(&capped[..width]).for_each(|(d, value)| *d *= slope(*value, softcap));
    }
}

on_every_isa! {
    /// Replaces each logit by c·e^(logit·t − largest).
    unsafe fn exponentials(logits: &mut [f32], t: f32, largest: f32, c: f32) = exponentials_with
}

#[inline(always)]
unsafe fn exponentials_with<S: Simd>(logits: &mut [f32], t: f32, largest: f32, c: f32) {
    unsafe {
        for at in (0..logits.len()).step_by(S::LANES) {
            let at = logits.as_mut_ptr().add(at);
            let (e, _) = exponential::<S>(at, S::splat(t), S::splat(largest));
            S::store(at, S::mul(e, S::splat(c)));
        }
    }
}
