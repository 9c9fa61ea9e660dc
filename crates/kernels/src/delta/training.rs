//! The gradients of a layer over the rows of a call.
//!
//! Nothing is kept from the forward pass. For each group of sequences, from the last to the first, a first pass over the
//! rows computes it again, keeps the memory before every 64th token, and writes the outputs of the delta rule to the
//! columns of z in the result, which are not needed until the second pass. That one goes from the last rows to the first.

use super::super::floats::Floats;
use super::super::isa::Isa;
use super::super::rows::{over_rows, take_turns};
use super::super::threads::{Shared, Threads};
use super::backward::{DeltaBackward, run_sequences_backward};
use super::conv::{Source, advance, conv_row, input_gradients};
use super::gated_norm::norm_vjp_row;
use super::gates::{GatesGradient, gates_row, gates_vjp_row};
use super::layer::{Buffers, Call, Part, check, groups, rows_of, rows_of_each, run_group, sources};
use super::unit::{unit_row, unit_vjp_row};
use super::{KEPT_EVERY, Sequence, Shape, State, Weights};

/// Number of channels of a part of the convolution's gradient.
const CHANNELS_AT_ONCE: usize = 256;

/// Intermediate values of some rows, and their gradients.
#[derive(Debug, Default)]
struct Gradients {
    values: Buffers,
    /// Outputs of the convolution before SiLU, then their gradients: `[rows][conv_width]`.
    mixed: Vec<f32>,
    d_qkv: Vec<f32>,
    d_beta: Vec<f32>,
    d_g: Vec<f32>,
    /// Gradients of the outputs of the delta rule, `[rows][value_width]`.
    d_read: Vec<f32>,
}

/// The gradient of a [`State`].
#[derive(Clone, Debug, Default)]
struct StateGradient {
    conv: Vec<f32>,
    memory: Vec<f32>,
}

/// Computes the gradient of [`forward`](super::forward): dL/dx = `d_x` `[rows][width]` from its input x `[rows][width]` and
/// dL/dout = `d_out` `[rows][value_width]`. Sequences without `after` begin with a state of zeros. The gradients of the
/// states with which several sequences continue the same one are added in the order of the list. Rows outside all
/// sequences are not written.
///
/// Allocates three times the memory of each sequence, and `num_value_heads · key_dim · value_dim` values for every 64
/// tokens of the sequences that run together (8, or the number of threads if that is more).
///
/// # Panics
/// Panics if lengths do not match, sequences overlap, or a sequence does not continue an earlier one.
pub fn backward(
    threads: &Threads,
    isa: Isa,
    weights: &Weights<'_>,
    sequences: &[Sequence],
    x: &[f32],
    d_out: &[f32],
    d_x: &mut [f32],
) {
    let shape = weights.shape;
    let mut states = vec![State::new(&shape); sequences.len()];
    let rows = check(weights, sequences, x, &states);
    assert_eq!(d_out.len(), rows * shape.value_width(), "the output's gradient has the wrong length");
    assert_eq!(d_x.len(), x.len(), "the input and its gradient differ in length");
    let call = Call { threads, isa, weights, sequences, x };
    let groups = groups(&call);
    let mut gradients = Gradients::default();
    // The states that other sequences continue.
    for group in &groups {
        let is_continued = |index: &usize| sequences.iter().any(|other| other.after == Some(*index));
        let continued: Vec<usize> = group.iter().copied().filter(is_continued).collect();
        run_group(&call, &continued, &mut states, None, &mut gradients.values, |_, _, _| ());
    }
    let before = starts(&call);
    let mut d_states = vec![StateGradient::default(); sequences.len()];
    for group in groups.iter().rev() {
        for index in group {
            begin_gradient(&call, *index, &mut d_states);
        }
        let kept = keep_states(&call, group, &mut states, &mut gradients.values, d_x);
        let count = rows_of_each(group.len());
        let rounds = group.iter().map(|index| sequences[*index].rows.len().div_ceil(count)).max().unwrap_or(0);
        for round in 0..rounds {
            let part = |sequence: &usize| {
                let len = sequences[*sequence].rows.len();
                let first = (len.div_ceil(count).checked_sub(round + 1)?) * count;
                Some(Part { sequence: *sequence, first, count: (len - first).min(count) })
            };
            let parts: Vec<Part> = group.iter().filter_map(part).collect();
            parts_backward(&call, &parts, (&kept, &states), (&before, d_out), &mut d_states, &mut gradients, d_x);
        }
    }
}

/// Computes the gradient of the state with which a sequence ends: the sum over those that continue it, in order.
fn begin_gradient(call: &Call<'_>, index: usize, d_states: &mut [StateGradient]) {
    let shape = call.weights.shape;
    let mut sum = StateGradient {
        conv: vec![0.0; (shape.kernel - 1) * shape.conv_width()],
        memory: vec![0.0; shape.memory_len()],
    };
    for (later, _) in call.sequences.iter().enumerate().filter(|(_, later)| later.after == Some(index)) {
        let of_later = std::mem::take(&mut d_states[later]);
        sum.conv.iter_mut().zip(&of_later.conv).for_each(|(sum, d)| *sum += d);
        sum.memory.iter_mut().zip(&of_later.memory).for_each(|(sum, d)| *sum += d);
    }
    d_states[index] = sum;
}

/// Runs the sequences of a group; returns the memory before every 64th token of each. Writes the outputs of the delta
/// rule to the columns of z of `d_x`.
fn keep_states(
    call: &Call<'_>,
    group: &[usize],
    states: &mut [State],
    buffers: &mut Buffers,
    d_x: &mut [f32],
) -> Vec<Floats> {
    let shape = call.weights.shape;
    let mut kept: Vec<Floats> = vec![Floats::default(); call.sequences.len()];
    for index in group {
        kept[*index] = Floats::in_huge_pages(shape.kept_len(call.sequences[*index].rows.len()));
        if call.sequences[*index].after.is_none() {
            states[*index] = State::new(&shape);
        }
    }
    let d_x = Shared::new(d_x);
    run_group(call, group, states, Some(&mut kept), buffers, |sources, buffers, rows| {
        over_rows(call.threads, sources.len(), shape.value_width(), |range| {
            for index in range {
                let first = rows[index] * shape.width();
                // Safety: each thread writes other rows, and all rows are inside the buffer.
                let to = unsafe { d_x.part(first + shape.z().start..first + shape.z().end) };
                to.copy_from_slice(&buffers.read[index * shape.value_width()..][..shape.value_width()]);
            }
        });
    });
    kept
}

/// The convolution's last inputs before each sequence, from zeros.
fn starts(call: &Call<'_>) -> Vec<Vec<f32>> {
    let (conv, shape, width) = (call.weights.conv, call.weights.shape, call.weights.shape.width());
    let mut starts = vec![vec![0.0; (shape.kernel - 1) * shape.conv_width()]; call.sequences.len()];
    for (index, sequence) in call.sequences.iter().enumerate() {
        let Some(after) = sequence.after else { continue };
        let rows = &call.sequences[after].rows;
        let mut state = starts[after].clone();
        advance(conv, &mut state, &call.x[rows.start * width..rows.end * width], width, rows.len());
        starts[index] = state;
    }
    starts
}

/// Computes the gradients of parts of sequences; those of later parts are in `d_states`.
fn parts_backward(
    call: &Call<'_>,
    parts: &[Part],
    kept: (&[Floats], &[State]),
    (before, d_out): (&[Vec<f32>], &[f32]),
    d_states: &mut [StateGradient],
    gradients: &mut Gradients,
    d_x: &mut [f32],
) {
    let shape = call.weights.shape;
    let sources = sources(call, parts, before);
    let rows = rows_of(call.sequences, parts);
    gradients.values.resize(&shape, rows.len());
    for buffer in [&mut gradients.mixed, &mut gradients.d_qkv] {
        buffer.resize(rows.len() * shape.conv_width(), 0.0);
    }
    for buffer in [&mut gradients.d_beta, &mut gradients.d_g] {
        buffer.resize(rows.len() * shape.num_value_heads, 0.0);
    }
    gradients.d_read.resize(rows.len() * shape.value_width(), 0.0);
    begin(call, &sources, &rows, d_out, gradients, d_x);
    rule_backward(call, parts, kept, d_states, gradients);
    end(call, &sources, &rows, gradients, d_x);
    convolve_back(call, parts, d_states, gradients, d_x);
}

/// Computes the inputs of the delta rule again, and the gradients of its outputs and of z.
fn begin(
    call: &Call<'_>,
    sources: &[Source<'_>],
    rows: &[usize],
    d_out: &[f32],
    gradients: &mut Gradients,
    d_x: &mut [f32],
) {
    let Call { threads, isa, weights, .. } = *call;
    let shape = weights.shape;
    let (conv_width, heads, value_width) = (shape.conv_width(), shape.num_value_heads, shape.value_width());
    let Buffers { qkv, beta, g, read } = &mut gradients.values;
    let (qkv, beta, g, read) = (Shared::new(qkv), Shared::new(beta), Shared::new(g), Shared::new(read));
    let (mixed, d_read) = (Shared::new(&mut gradients.mixed), Shared::new(&mut gradients.d_read));
    let d_x = Shared::new(d_x);
    over_rows(threads, rows.len(), 8 * conv_width, |range| {
        for index in range {
            let (source, row) = (&sources[index], rows[index]);
            let (wide, gates) = (index * conv_width..(index + 1) * conv_width, index * heads..(index + 1) * heads);
            let narrow = index * value_width..(index + 1) * value_width;
            let z = row * shape.width() + shape.z().start..row * shape.width() + shape.z().end;
            // Safety: each thread accesses other rows, and all rows are inside the buffers.
            unsafe {
                let (mixed, qkv) = (mixed.part(wide.clone()), qkv.part(wide));
                conv_row(isa, weights.conv, *source, Some(mixed), qkv);
                unit_row(isa, &shape, qkv);
                gates_row(isa, weights, &source.row()[shape.b().start..], beta.part(gates.clone()), g.part(gates));
                let (read, d_z) = (read.part(narrow.clone()), d_x.part(z));
                read.copy_from_slice(d_z);
                let d_out = &d_out[row * value_width..(row + 1) * value_width];
                norm_vjp_row(isa, weights, read, &source.row()[shape.z()], d_out, d_read.part(narrow), d_z);
            }
        }
    });
}

/// Computes the gradients of the delta rule.
fn rule_backward(
    call: &Call<'_>,
    parts: &[Part],
    (kept, ends): (&[Floats], &[State]),
    d_states: &mut [StateGradient],
    gradients: &mut Gradients,
) {
    let shape = call.weights.shape;
    let Gradients { values, d_qkv, d_beta, d_g, d_read, .. } = gradients;
    let (mut d_qkv, mut d_beta, mut d_g) = (d_qkv.as_mut_slice(), d_beta.as_mut_slice(), d_g.as_mut_slice());
    let mut d_states = d_states.iter_mut().enumerate();
    let mut first = 0;
    let mut runs: Vec<DeltaBackward<'_>> = Vec::with_capacity(parts.len());
    for part in parts {
        // The parts are in the order of the sequences.
        let Some((_, d_state)) = d_states.find(|(index, _)| *index == part.sequence) else { continue };
        let rows = |width: usize| first * width..(first + part.count) * width;
        let (wide, heads) = (part.count * shape.conv_width(), part.count * shape.num_value_heads);
        let states = part.first / KEPT_EVERY * shape.memory_len();
        let next = states + shape.kept_len(part.count);
        let is_last = part.first + part.count == call.sequences[part.sequence].rows.len();
        let after = if is_last { &ends[part.sequence].heads[..] } else { &kept[part.sequence][next..] };
        runs.push(DeltaBackward {
            qkv: &values.qkv[rows(shape.conv_width())],
            beta: &values.beta[rows(shape.num_value_heads)],
            g: &values.g[rows(shape.num_value_heads)],
            kept: &kept[part.sequence][states..next],
            memory: &after[..shape.memory_len()],
            d_out: &d_read[rows(shape.value_width())],
            d_memory: &mut d_state.memory,
            d_qkv: d_qkv.split_off_mut(..wide).unwrap_or_default(),
            d_beta: d_beta.split_off_mut(..heads).unwrap_or_default(),
            d_g: d_g.split_off_mut(..heads).unwrap_or_default(),
        });
        first += part.count;
    }
    run_sequences_backward(call.threads, call.isa, &shape, &mut runs);
}

/// Computes the gradients of b and a, and those of the convolution's outputs.
fn end(call: &Call<'_>, sources: &[Source<'_>], rows: &[usize], gradients: &mut Gradients, d_x: &mut [f32]) {
    let Call { threads, isa, weights, .. } = *call;
    let shape: Shape = weights.shape;
    let Gradients { mixed, d_qkv, d_beta, d_g, .. } = gradients;
    let (mixed, d_x) = (Shared::new(mixed), Shared::new(d_x));
    over_rows(threads, rows.len(), 4 * shape.conv_width(), |range| {
        for index in range {
            let wide = index * shape.conv_width()..(index + 1) * shape.conv_width();
            let gates = index * shape.num_value_heads..(index + 1) * shape.num_value_heads;
            let first = rows[index] * shape.width() + shape.b().start;
            // Safety: each thread writes other rows, and all rows are inside the buffers.
            unsafe {
                unit_vjp_row(isa, &shape, mixed.part(wide.clone()), &d_qkv[wide]);
                let gradient = GatesGradient {
                    ba: &sources[index].row()[shape.b().start..],
                    d_beta: &d_beta[gates.clone()],
                    d_g: &d_g[gates],
                    d_ba: d_x.part(first..first + 2 * shape.num_value_heads),
                };
                gates_vjp_row(isa, weights, gradient);
            }
        }
    });
}

/// Computes the gradients of the convolution's inputs.
fn convolve_back(
    call: &Call<'_>,
    parts: &[Part],
    d_states: &mut [StateGradient],
    gradients: &Gradients,
    d_x: &mut [f32],
) {
    let Call { threads, isa, weights, sequences, .. } = *call;
    let shape = weights.shape;
    let channels = shape.conv_width();
    let mut first = 0;
    let mut d_states = d_states.iter_mut().enumerate();
    let mut places = Vec::with_capacity(parts.len());
    for part in parts {
        let Some((_, d_state)) = d_states.find(|(index, _)| *index == part.sequence) else { continue };
        places.push((part, first, Shared::new(&mut d_state.conv)));
        first += part.count;
    }
    let (blocks, d_x) = (channels.div_ceil(CHANNELS_AT_ONCE), Shared::new(d_x));
    take_turns(threads, places.len() * blocks, first * channels * shape.kernel, |cell| {
        let (part, first, carry) = places[cell / blocks];
        let from = cell % blocks * CHANNELS_AT_ONCE;
        let row = sequences[part.sequence].rows.start + part.first;
        // Safety: the part's rows are inside all buffers, and each cell has its own channels of its part.
        unsafe {
            let to = (d_x.at(row * shape.width()), shape.width());
            let d_out = gradients.mixed[first * channels..].as_ptr();
            let of_cell = from..(from + CHANNELS_AT_ONCE).min(channels);
            input_gradients(isa, weights.conv, part.count, of_cell, d_out, carry.at(0), to);
        }
    });
}
