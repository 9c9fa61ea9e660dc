//! A layer over the rows of a call: sequences that may continue each other, or one row of each of several sequences.

use std::cell::RefCell;

use super::super::floats::Floats;
use super::super::isa::Isa;
use super::super::rows::over_rows;
use super::super::threads::{Shared, Threads};
use super::conv::{Source, advance, conv_row};
use super::gated_norm::norm_row;
use super::gates::gates_row;
use super::rule::{DeltaRows, DeltaSequence, run_rows, run_sequences};
use super::unit::unit_row;
use super::{KEPT_EVERY, Sequence, Shape, State, Weights};

/// Number of rows of all sequences that are processed together, so that their intermediate values stay in caches.
const ROWS_AT_ONCE: usize = 512;

/// Intermediate values of some rows.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// Inputs of the delta rule, `[rows][conv_width]`.
    pub qkv: Vec<f32>,
    /// How much each head writes, `[rows][num_value_heads]`.
    pub beta: Vec<f32>,
    /// Logarithms of the decays, `[rows][num_value_heads]`.
    pub g: Vec<f32>,
    /// Outputs of the delta rule, `[rows][value_width]`.
    pub read: Vec<f32>,
}

impl Buffers {
    pub fn resize(&mut self, shape: &Shape, rows: usize) {
        self.qkv.resize(rows * shape.conv_width(), 0.0);
        self.beta.resize(rows * shape.num_value_heads, 0.0);
        self.g.resize(rows * shape.num_value_heads, 0.0);
        self.read.resize(rows * shape.value_width(), 0.0);
    }
}

thread_local! {
    /// Intermediate values of decode steps.
    static STEP: RefCell<Buffers> = RefCell::new(Buffers::default());
}

/// Rows of one sequence that are processed together with those of other sequences.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Index of the sequence.
    pub sequence: usize,
    /// First token, counted from the sequence's beginning.
    pub first: usize,
    /// Number of tokens of the call.
    pub count: usize,
}

/// Computes the layer's output `[rows][value_width]` for the input x `[rows][width]`, in which each row is
/// `[q heads | k heads | v heads | z | b | a]`. `states` has one state per sequence: the one before the sequence, read if
/// `after` is `None`, and the one after it when this returns. Rows outside all sequences are not written.
///
/// # Panics
/// Panics if lengths do not match, sequences overlap, or a sequence does not continue an earlier one.
pub fn forward(
    threads: &Threads,
    isa: Isa,
    weights: &Weights<'_>,
    sequences: &[Sequence],
    x: &[f32],
    states: &mut [State],
    out: &mut [f32],
) {
    let shape = weights.shape;
    let rows = check(weights, sequences, x, states);
    assert_eq!(out.len(), rows * shape.value_width(), "the output needs {rows} rows of {}", shape.value_width());
    let out = Shared::new(out);
    let call = Call { threads, isa, weights, sequences, x };
    let mut buffers = Buffers::default();
    for group in groups(&call) {
        run_group(&call, &group, states, None, &mut buffers, |sources, buffers, rows| {
            over_rows(threads, sources.len(), 4 * shape.value_width(), |range| {
                for index in range {
                    let read = &buffers.read[index * shape.value_width()..][..shape.value_width()];
                    let span = rows[index] * shape.value_width()..(rows[index] + 1) * shape.value_width();
                    // Safety: each thread writes other rows, and all rows are inside the buffer.
                    unsafe { norm_row(isa, weights, read, &sources[index].row()[shape.z()], out.part(span)) };
                }
            });
        });
    }
}

/// Computes the layer's output `[rows][value_width]` for one token of each of several sequences, x `[rows][width]`, and
/// updates their states, one per row. Gives the same bits as [`forward`].
///
/// # Panics
/// Panics if lengths do not match.
pub fn step(threads: &Threads, isa: Isa, weights: &Weights<'_>, x: &[f32], states: &mut [&mut State], out: &mut [f32]) {
    weights.check();
    let (shape, width, rows) = (weights.shape, weights.shape.width(), states.len());
    assert_eq!(x.len(), rows * width, "the input needs {rows} rows of {width}");
    assert_eq!(out.len(), rows * shape.value_width(), "the output needs {rows} rows of {}", shape.value_width());
    assert!(states.iter().all(|state| state.has(&shape)), "a state has another shape than the weights");
    STEP.with_borrow_mut(|buffers| {
        buffers.resize(&shape, rows);
        let before: Vec<Vec<f32>> = states.iter_mut().map(|state| std::mem::take(&mut state.conv)).collect();
        let of_rows = x.chunks_exact(width).zip(&before);
        let sources: Vec<Source<'_>> = of_rows.map(|(x, before)| Source { x, width, token: 0, before }).collect();
        prepare(threads, isa, weights, &sources, buffers);
        let mut memories: Vec<&mut [f32]> =
            states.iter_mut().map(|state| &mut state.heads[..shape.memory_len()]).collect();
        let Buffers { qkv, beta, g, read } = buffers;
        run_rows(threads, isa, &shape, DeltaRows { qkv, beta, g, memories: &mut memories, out: read });
        let shared = Shared::new(out);
        over_rows(threads, rows, 4 * shape.value_width(), |range| {
            for row in range {
                let span = row * shape.value_width()..(row + 1) * shape.value_width();
                let z = &sources[row].row()[shape.z()];
                // Safety: each thread writes other rows, and all rows are inside the buffer.
                unsafe { norm_row(isa, weights, &read[span.clone()], z, shared.part(span)) };
            }
        });
        for ((state, before), x) in states.iter_mut().zip(before).zip(x.chunks_exact(width)) {
            state.conv = before;
            advance(weights.conv, &mut state.conv, x, width, 1);
        }
    });
}

/// Checks a call's sequences; returns the number of rows.
pub(super) fn check(weights: &Weights<'_>, sequences: &[Sequence], x: &[f32], states: &[State]) -> usize {
    weights.check();
    let (shape, width) = (weights.shape, weights.shape.width());
    let rows = x.len() / width;
    assert_eq!(x.len(), rows * width, "the length of the input is not a multiple of its row's width {width}");
    assert_eq!(sequences.len(), states.len(), "the numbers of sequences and states differ");
    assert!(states.iter().all(|state| state.has(&shape)), "a state has another shape than the weights");
    let mut ranges: Vec<_> = sequences.iter().map(|s| (s.rows.start, s.rows.end)).filter(|(a, b)| a < b).collect();
    ranges.sort_unstable();
    let apart = ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0);
    assert!(apart && ranges.last().is_none_or(|range| range.1 <= rows), "sequences overlap or exceed the input");
    let ordered = sequences.iter().enumerate().all(|(index, s)| s.after.is_none_or(|after| after < index));
    assert!(ordered, "a sequence must continue an earlier one of the list");
    rows
}

/// The operands of a call over sequences.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub threads: &'a Threads,
    pub isa: Isa,
    pub weights: &'a Weights<'a>,
    pub sequences: &'a [Sequence],
    pub x: &'a [f32],
}

/// The sequences in groups that run together, in order: each sequence continues one of an earlier group. Few sequences
/// form a group, so that their memories and intermediate values stay in caches.
pub(super) fn groups(call: &Call<'_>) -> Vec<Vec<usize>> {
    let mut depths: Vec<usize> = Vec::with_capacity(call.sequences.len());
    let mut waves: Vec<Vec<usize>> = Vec::new();
    for (index, sequence) in call.sequences.iter().enumerate() {
        let depth = sequence.after.map_or(0, |after| depths[after] + 1);
        depths.push(depth);
        waves.resize_with(waves.len().max(depth + 1), Vec::new);
        waves[depth].push(index);
    }
    let size = (ROWS_AT_ONCE / KEPT_EVERY).max(call.threads.count());
    waves.iter().flat_map(|wave| wave.chunks(size).map(<[usize]>::to_vec)).collect()
}

/// Number of rows of each of several sequences that are processed together: a multiple of 64.
pub(super) fn rows_of_each(sequences: usize) -> usize {
    (ROWS_AT_ONCE / sequences.max(1) / KEPT_EVERY).max(1) * KEPT_EVERY
}

/// The rows of x that belong to parts, in order.
pub(super) fn rows_of(sequences: &[Sequence], parts: &[Part]) -> Vec<usize> {
    let of_part = |part: &Part| {
        let first = sequences[part.sequence].rows.start + part.first;
        first..first + part.count
    };
    parts.iter().flat_map(of_part).collect()
}

/// The sources of all rows of parts.
pub(super) fn sources<'a>(call: &Call<'a>, parts: &[Part], before: &'a [Vec<f32>]) -> Vec<Source<'a>> {
    let Call { weights, sequences, x, .. } = *call;
    let width = weights.shape.width();
    let of_part = |part: &Part| {
        let Part { sequence, first, count } = *part;
        let rows = &x[sequences[sequence].rows.start * width..];
        (first..first + count).map(move |token| Source { x: rows, width, token, before: &before[sequence] })
    };
    parts.iter().flat_map(of_part).collect()
}

/// Runs everything before the gated norm for a group of sequences; `finish` gets the sources of the rows of each round,
/// their intermediate values and their rows of x. Keeps the memory before every 64th token of each sequence in `kept`.
pub(super) fn run_group(
    call: &Call<'_>,
    group: &[usize],
    states: &mut [State],
    mut kept: Option<&mut [Floats]>,
    buffers: &mut Buffers,
    finish: impl Fn(&[Source<'_>], &Buffers, &[usize]),
) {
    let Call { threads, isa, weights, sequences, x } = *call;
    let shape = weights.shape;
    for index in group {
        if let Some(after) = sequences[*index].after {
            let (earlier, later) = states.split_at_mut(*index);
            later[0].copy_from(&earlier[after]);
        }
    }
    let before: Vec<Vec<f32>> = states.iter_mut().map(|state| std::mem::take(&mut state.conv)).collect();
    let mut at = 0;
    loop {
        let running: Vec<usize> = group.iter().copied().filter(|index| sequences[*index].rows.len() > at).collect();
        if running.is_empty() {
            break;
        }
        // All running sequences are at the same token.
        let count = rows_of_each(running.len());
        let part = |sequence: &usize| {
            let count = (sequences[*sequence].rows.len() - at).min(count);
            Part { sequence: *sequence, first: at, count }
        };
        let parts: Vec<Part> = running.iter().map(part).collect();
        let sources = sources(call, &parts, &before);
        buffers.resize(&shape, sources.len());
        prepare(threads, isa, weights, &sources, buffers);
        recur(threads, isa, &shape, &parts, states, kept.as_deref_mut(), buffers);
        finish(&sources, buffers, &rows_of(sequences, &parts));
        at += count;
    }
    for (state, before) in states.iter_mut().zip(before) {
        state.conv = before;
    }
    for index in group {
        let rows = &sequences[*index].rows;
        let x = &x[rows.start * shape.width()..rows.end * shape.width()];
        advance(weights.conv, &mut states[*index].conv, x, shape.width(), rows.len());
    }
}

/// Computes the inputs of the delta rule for all rows.
pub(super) fn prepare(
    threads: &Threads,
    isa: Isa,
    weights: &Weights<'_>,
    sources: &[Source<'_>],
    buffers: &mut Buffers,
) {
    let shape = weights.shape;
    let (qkv, beta, g) = (Shared::new(&mut buffers.qkv), Shared::new(&mut buffers.beta), Shared::new(&mut buffers.g));
    over_rows(threads, sources.len(), 8 * shape.conv_width(), |range| {
        for (index, source) in range.clone().zip(&sources[range]) {
            let gates = index * shape.num_value_heads..(index + 1) * shape.num_value_heads;
            // Safety: each thread writes other rows, and all rows are inside the buffers.
            unsafe {
                let row = qkv.part(index * shape.conv_width()..(index + 1) * shape.conv_width());
                conv_row(isa, weights.conv, *source, None, row);
                unit_row(isa, &shape, row);
                gates_row(isa, weights, &source.row()[shape.b().start..], beta.part(gates.clone()), g.part(gates));
            }
        }
    });
}

/// Runs the delta rule over parts of sequences, which follow each other in the buffers.
fn recur(
    threads: &Threads,
    isa: Isa,
    shape: &Shape,
    parts: &[Part],
    states: &mut [State],
    kept: Option<&mut [Floats]>,
    buffers: &mut Buffers,
) {
    let Buffers { qkv, beta, g, read } = buffers;
    let (mut qkv, mut beta, mut g) = (qkv.as_slice(), beta.as_slice(), g.as_slice());
    let mut read = read.as_mut_slice();
    let mut states = states.iter_mut().enumerate();
    let mut kept = kept.map(|kept| kept.iter_mut().enumerate());
    let mut runs: Vec<DeltaSequence<'_>> = Vec::with_capacity(parts.len());
    for part in parts {
        // The parts are in the order of the sequences.
        let Some((_, state)) = states.find(|(index, _)| *index == part.sequence) else { continue };
        let kept = kept.as_mut().and_then(|kept| kept.find(|(index, _)| *index == part.sequence)).map(|(_, kept)| {
            let first = part.first / KEPT_EVERY * shape.memory_len();
            &mut kept[first..first + shape.kept_len(part.count)]
        });
        let out = read.split_off_mut(..part.count * shape.value_width());
        runs.push(DeltaSequence {
            qkv: qkv.split_off(..part.count * shape.conv_width()).unwrap_or_default(),
            beta: beta.split_off(..part.count * shape.num_value_heads).unwrap_or_default(),
            g: g.split_off(..part.count * shape.num_value_heads).unwrap_or_default(),
            memory: &mut state.heads[..shape.memory_len()],
            kept,
            out: out.unwrap_or_default(),
        });
    }
    run_sequences(threads, isa, shape, &mut runs);
}
