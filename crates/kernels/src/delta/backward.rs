//! The gradients of the gated delta rule.

use super::super::isa::Isa;
use super::super::threads::Threads;
use super::Shape;
use super::naive::Inputs;

/// A whole call of [`run_sequences`](super::run_sequences) for one sequence, to compute its gradients.
#[derive(Debug)]
pub struct DeltaBackward<'a> {
    /// The rows that were given, `[tokens][width]`.
    pub qkv: &'a [f32],
    /// How much each value head wrote, `[tokens][num_value_heads]`.
    pub beta: &'a [f32],
    /// Logarithms of the decays, `[tokens][num_value_heads]`.
    pub g: &'a [f32],
    /// The kept states, `[⌈tokens / 64⌉][num_value_heads][key_dim][value_dim]`.
    pub kept: &'a [f32],
    /// The gradient of the output, `[tokens][num_value_heads · value_dim]`.
    pub d_out: &'a [f32],
    /// The gradient of the memory after the last token; receives the gradient of the memory before the first token:
    /// `[num_value_heads][key_dim][value_dim]`.
    pub d_memory: &'a mut [f32],
    /// Receives the gradient of the normalized queries and keys, and of the values, `[tokens][width]`.
    pub d_qkv: &'a mut [f32],
    /// Receives the gradient of beta, `[tokens][num_value_heads]`.
    pub d_beta: &'a mut [f32],
    /// Receives the gradient of g, `[tokens][num_value_heads]`.
    pub d_g: &'a mut [f32],
}

/// Computes the gradients of sequences of [`run_sequences`](super::run_sequences).
///
/// # Panics
/// Panics if the length of a slice does not match the number of tokens of its sequence.
pub fn run_sequences_backward(_: &Threads, _: Isa, shape: &Shape, sequences: &mut [DeltaBackward<'_>]) {
    for sequence in sequences {
        let tokens = shape.rows_of(sequence.qkv);
        if tokens == 0 {
            continue;
        }
        let wide = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<f64>>();
        let inputs = Inputs {
            heads: *shape,
            qkv: wide(sequence.qkv),
            beta: wide(sequence.beta),
            g: wide(sequence.g),
            memory: wide(&sequence.kept[..shape.memory_len()]),
        };
        let d_memory = wide(sequence.d_memory);
        let all = inputs.backward(&wide(sequence.d_out), &d_memory);
        let copy = |to: &mut [f32], from: &[f64]| to.iter_mut().zip(from).for_each(|(to, from)| *to = *from as f32);
        copy(sequence.d_qkv, &all.d_qkv);
        copy(sequence.d_beta, &all.d_beta);
        copy(sequence.d_g, &all.d_g);
        copy(sequence.d_memory, &all.d_memory);
    }
}
