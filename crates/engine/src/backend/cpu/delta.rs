//! Gated DeltaNet layers over packed batches and over the states of a generation.

use super::attention::Cache;
use super::{Cpu, Matrix};
use crate::kernels::attention::Group;
use crate::kernels::delta::{self, Conv, Sequence, Shape, State, Weights};
use crate::ops;

/// The weights of a Gated DeltaNet layer, besides its projections.
#[derive(Debug)]
pub struct DeltaNet {
    shape: Shape,
    conv: Conv,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    norm: Vec<f32>,
    eps: f32,
}

impl DeltaNet {
    /// Arranges the weights as the kernels read them.
    pub(super) fn new(weights: ops::delta::Weights) -> DeltaNet {
        let ops::delta::Weights { shape, conv, a_log, dt_bias, norm, eps } = weights;
        DeltaNet { shape, conv: Conv::new(&conv, None, shape.kernel), a_log, dt_bias, norm, eps }
    }

    fn weights(&self) -> Weights<'_> {
        let DeltaNet { shape, conv, a_log, dt_bias, norm, eps } = self;
        Weights { shape: *shape, conv, a_log, dt_bias, norm, eps: *eps }
    }
}

/// The sequences of a packed batch: each prompt, followed by its completions.
fn sequences(groups: &[Group]) -> Vec<Sequence> {
    let mut sequences: Vec<Sequence> = Vec::new();
    let mut row = 0;
    for group in groups {
        let prompt = sequences.len();
        let mut add = |len: usize, after: Option<usize>| {
            sequences.push(Sequence { rows: row..row + len, after });
            row += len;
        };
        add(group.prompt_len, None);
        group.completion_lens.iter().for_each(|len| add(*len, Some(prompt)));
    }
    sequences
}

impl Cpu {
    /// Computes a packed batch; also returns the states after the prompts.
    pub(super) fn delta_packed(&self, net: &DeltaNet, groups: &[Group], x: &Matrix) -> (Matrix, Vec<State>) {
        let sequences = sequences(groups);
        let mut states = vec![State::new(&net.shape); sequences.len()];
        let mut out = self.pool.matrix(x.rows(), net.shape.value_width());
        delta::forward(&self.threads, self.isa, &net.weights(), &sequences, x.values(), &mut states, out.values_mut());
        let is_prompt = |(_, sequence): &(State, &Sequence)| sequence.after.is_none();
        let of_prompts = states.into_iter().zip(&sequences).filter(is_prompt).map(|(state, _)| state);
        (out, of_prompts.collect())
    }

    /// Returns dL/dx of [`Cpu::delta_packed`].
    pub(super) fn delta_packed_vjp(&self, net: &DeltaNet, groups: &[Group], x: &Matrix, dy: &Matrix) -> Matrix {
        let mut dx = self.pool.matrix(x.rows(), x.width());
        let sequences = sequences(groups);
        let (threads, isa) = (&self.threads, self.isa);
        delta::backward(threads, isa, &net.weights(), &sequences, x.values(), dy.values(), dx.values_mut());
        dx
    }

    /// Appends a token to each sequence's state.
    pub(super) fn delta_rows(&self, net: &DeltaNet, cache: &mut Cache, layer: usize, x: &Matrix) -> Matrix {
        let mut out = self.pool.matrix(x.rows(), net.shape.value_width());
        let mut states: Vec<&mut State> = cache.row_states(layer).collect();
        delta::step(&self.threads, self.isa, &net.weights(), x.values(), &mut states, out.values_mut());
        out
    }

    /// Appends the remaining tokens of prompts, given as (index, number of tokens), to their states.
    pub(super) fn delta_prompts(
        &self,
        net: &DeltaNet,
        cache: &mut Cache,
        prompts: &[(usize, usize)],
        layer: usize,
        x: &Matrix,
    ) -> Matrix {
        let mut out = self.pool.matrix(x.rows(), net.shape.value_width());
        let mut row = 0;
        let sequence = |(_, count): &(usize, usize)| {
            row += count;
            Sequence { rows: row - count..row, after: None }
        };
        let sequences: Vec<Sequence> = prompts.iter().map(sequence).collect();
        let state = |(prompt, _): &(usize, usize)| cache.take_state(*prompt, layer);
        let of_prompts = prompts.iter().map(state).map(|state| state.unwrap_or_else(|| State::new(&net.shape)));
        let mut states: Vec<State> = of_prompts.collect();
        let weights = net.weights();
        delta::forward(&self.threads, self.isa, &weights, &sequences, x.values(), &mut states, out.values_mut());
        for ((prompt, _), state) in prompts.iter().zip(states) {
            cache.set_state(*prompt, layer, state);
        }
        out
    }
}
