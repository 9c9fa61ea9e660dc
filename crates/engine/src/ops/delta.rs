//! A Gated DeltaNet layer between its projections, token by token: causal convolution, gates, the gated delta rule, gated
//! norm (arXiv 2412.06464; transformers 5.23.0, modeling_qwen3_5.py: `torch_recurrent_gated_delta_rule`,
//! `Qwen3_5RMSNormGated`), and its vector-Jacobian product.
//!
//! A row of the input is `[q heads | k heads | v heads | z heads | b | a]`.

use super::slices::{Group, dot};
pub use crate::kernels::delta::Shape;

/// Added to the sum of squares of a query or key head before its root is taken.
const UNIT_EPS: f32 = 1e-6;
/// Number of tokens between two states that the backward pass keeps.
const KEPT_EVERY: usize = 64;

/// The weights of a Gated DeltaNet layer, besides its projections.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// The sizes of the layer.
    pub shape: Shape,
    /// The weights of the convolution, `[conv_width][kernel]`; the last one belongs to the current token.
    pub conv: Vec<f32>,
    /// Logarithms of the decay rates, `[num_value_heads]`.
    pub a_log: Vec<f32>,
    /// Biases of the decays' step sizes, `[num_value_heads]`.
    pub dt_bias: Vec<f32>,
    /// The weight of the norm of each value head's output, `[value_dim]`.
    pub norm: Vec<f32>,
    /// Added to the mean square in that norm.
    pub eps: f32,
}

/// The state of one sequence, or its gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// The convolution's last inputs, `[kernel − 1][conv_width]`, the oldest first.
    pub conv: Vec<f32>,
    /// The memory of the delta rule, `[num_value_heads][key_dim][value_dim]`.
    pub memory: Vec<f32>,
}

impl State {
    /// Creates the state at the beginning of a sequence: zeros.
    pub fn new(shape: &Shape) -> State {
        State {
            conv: vec![0.0; (shape.kernel - 1) * shape.conv_width()],
            memory: vec![0.0; shape.num_value_heads * head_len(shape)],
        }
    }

    fn add(&mut self, other: &State) {
        super::slices::add_scaled(&mut self.conv, 1.0, &other.conv);
        super::slices::add_scaled(&mut self.memory, 1.0, &other.memory);
    }
}

/// The values of one token between the projections, as the delta rule reads them.
struct Token {
    /// The convolution's output before SiLU, `[conv_width]`.
    mixed: Vec<f32>,
    /// `[q | k | v]` after SiLU, with normalized queries and keys, `[conv_width]`.
    qkv: Vec<f32>,
    /// Inverse lengths of the query heads and of the key heads.
    inverse: Vec<f32>,
    /// How much each value head writes.
    beta: Vec<f32>,
    /// The factor by which each value head's memory decays.
    decay: Vec<f32>,
    /// The output of the delta rule, `[value_width]`.
    read: Vec<f32>,
}

/// Number of values in the memory of a head.
fn head_len(shape: &Shape) -> usize {
    shape.key_dim * shape.value_dim
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// The derivative of SiLU at a value.
fn silu_slope(x: f32) -> f32 {
    let s = sigmoid(x);
    s * (1.0 + x * (1.0 - s))
}

impl Weights {
    /// Computes a sequence's outputs `[tokens][value_width]` from its inputs x `[tokens][width]`, and advances its state.
    pub fn forward(&self, state: &mut State, x: &[f32], out: &mut [f32]) {
        let shape = &self.shape;
        for (x, out) in x.chunks_exact(shape.width()).zip(out.chunks_exact_mut(shape.value_width())) {
            let token = self.advance(state, x);
            for (head, out) in out.chunks_exact_mut(shape.value_dim).enumerate() {
                let read = &token.read[head * shape.value_dim..][..shape.value_dim];
                let r = (dot(read, read) / shape.value_dim as f32 + self.eps).sqrt().recip();
                let z = &x[shape.conv_width() + head * shape.value_dim..][..shape.value_dim];
                for (((out, read), weight), z) in out.iter_mut().zip(read).zip(&self.norm).zip(z) {
                    *out = read * r * weight * (z * sigmoid(*z));
                }
            }
        }
    }

    /// Reads one token into the state; returns the values on the way.
    fn advance(&self, state: &mut State, x: &[f32]) -> Token {
        let Shape { num_value_heads, key_dim, value_dim, kernel, .. } = self.shape;
        let (channels, key_width) = (self.shape.conv_width(), self.shape.key_width());
        let mut mixed = vec![0f32; channels];
        for (channel, mixed) in mixed.iter_mut().enumerate() {
            let weights = &self.conv[channel * kernel..(channel + 1) * kernel];
            for (tap, weight) in weights.iter().enumerate() {
                let input = if tap + 1 == kernel { x[channel] } else { state.conv[tap * channels + channel] };
                *mixed += weight * input;
            }
        }
        state.conv.drain(..channels);
        state.conv.extend_from_slice(&x[..channels]);
        let mut qkv: Vec<f32> = mixed.iter().map(|x| x * sigmoid(*x)).collect();
        let mut inverse = Vec::new();
        for (head, values) in qkv[..2 * key_width].chunks_exact_mut(key_dim).enumerate() {
            let r = (dot(values, values) + UNIT_EPS).sqrt().recip();
            let scale = if head < self.shape.num_key_heads { (key_dim as f32).sqrt().recip() } else { 1.0 };
            values.iter_mut().for_each(|value| *value *= r * scale);
            inverse.push(r);
        }
        let (b, a) = x[channels + self.shape.value_width()..].split_at(num_value_heads);
        let beta: Vec<f32> = b.iter().map(|b| sigmoid(*b)).collect();
        let rates = self.a_log.iter().zip(&self.dt_bias).zip(a);
        let decay: Vec<f32> = rates.map(|((a_log, bias), a)| (-a_log.exp() * softplus(a + bias)).exp()).collect();
        let mut read = vec![0f32; self.shape.value_width()];
        for (head, memory) in state.memory.chunks_exact_mut(head_len(&self.shape)).enumerate() {
            let [q, k, v] = self.heads_of(&qkv, head);
            memory.iter_mut().for_each(|value| *value *= decay[head]);
            let recalled = through(memory, k, value_dim);
            let write: Vec<f32> = v.iter().zip(&recalled).map(|(v, recalled)| (v - recalled) * beta[head]).collect();
            add_outer(memory, k, &write);
            read[head * value_dim..][..value_dim].copy_from_slice(&through(memory, q, value_dim));
        }
        Token { mixed, qkv, inverse, beta, decay, read }
    }

    /// The query, key and value of a value head in a row `[q | k | v]`.
    fn heads_of<'r>(&self, row: &'r [f32], head: usize) -> [&'r [f32]; 3] {
        let Shape { num_key_heads, num_value_heads, key_dim, value_dim, .. } = self.shape;
        let key_head = head / (num_value_heads / num_key_heads);
        let (q, rest) = row.split_at(self.shape.key_width());
        let (k, v) = rest.split_at(self.shape.key_width());
        let keys = key_head * key_dim..(key_head + 1) * key_dim;
        [&q[keys.clone()], &k[keys], &v[head * value_dim..(head + 1) * value_dim]]
    }

    /// Computes dL/dx `[tokens][width]` of [`Weights::forward`] from dL/dout = `dy`, and replaces the gradient of the state
    /// after the last token by that of the state before the first one, `start`.
    pub fn backward(&self, start: &State, x: &[f32], dy: &[f32], d_state: &mut State, dx: &mut [f32]) {
        let (width, value_width) = (self.shape.width(), self.shape.value_width());
        let count = x.len() / width;
        dx.fill(0.0);
        let mut kept = Vec::new();
        let mut state = start.clone();
        for (token, x) in x.chunks_exact(width).enumerate() {
            if token.is_multiple_of(KEPT_EVERY) {
                kept.push(state.clone());
            }
            self.advance(&mut state, x);
        }
        // The gradients of the convolution's inputs, beginning with those before the first token.
        let channels = self.shape.conv_width();
        let mut d_inputs = vec![0f32; (self.shape.kernel - 1 + count) * channels];
        d_inputs[count * channels..].copy_from_slice(&d_state.conv);
        for (chunk, mut state) in kept.into_iter().enumerate().rev() {
            let tokens = chunk * KEPT_EVERY..((chunk + 1) * KEPT_EVERY).min(count);
            let mut steps = Vec::new();
            for token in tokens.clone() {
                let before = state.memory.clone();
                let values = self.advance(&mut state, &x[token * width..(token + 1) * width]);
                steps.push((token, before, values));
            }
            for (token, before, values) in steps.into_iter().rev() {
                let (x, dx) = (&x[token * width..(token + 1) * width], &mut dx[token * width..(token + 1) * width]);
                let dy = &dy[token * value_width..(token + 1) * value_width];
                let d_mixed = self.token_vjp((x, dy), (before, &values), &mut d_state.memory, dx);
                for (channel, d_mixed) in d_mixed.into_iter().enumerate() {
                    for tap in 0..self.shape.kernel {
                        let weight = self.conv[channel * self.shape.kernel + tap];
                        d_inputs[(token + tap) * channels + channel] += weight * d_mixed;
                    }
                }
            }
        }
        let (before, own) = d_inputs.split_at((self.shape.kernel - 1) * channels);
        d_state.conv.copy_from_slice(before);
        for (dx, own) in dx.chunks_exact_mut(width).zip(own.chunks_exact(channels)) {
            dx[..channels].copy_from_slice(own);
        }
    }

    /// Computes one token's gradients of z, b and a in `dx`, and of the memory before the token.
    /// Returns the gradients of the convolution's output.
    fn token_vjp(
        &self,
        (x, dy): (&[f32], &[f32]),
        (before, token): (Vec<f32>, &Token),
        d_memory: &mut [f32],
        dx: &mut [f32],
    ) -> Vec<f32> {
        let Shape { num_key_heads, num_value_heads, key_dim, value_dim, .. } = self.shape;
        let (channels, key_width, len) = (self.shape.conv_width(), self.shape.key_width(), head_len(&self.shape));
        let gates = channels + self.shape.value_width();
        let mut d_qkv = vec![0f32; channels];
        for head in 0..num_value_heads {
            let values = head * value_dim..(head + 1) * value_dim;
            let z_at = channels + values.start;
            let (d_z, d_read) =
                self.norm_vjp(&x[z_at..z_at + value_dim], &token.read[values.clone()], &dy[values.clone()]);
            dx[z_at..z_at + value_dim].copy_from_slice(&d_z);
            let [q, k, v] = self.heads_of(&token.qkv, head);
            let (beta, decay) = (token.beta[head], token.decay[head]);
            let d_memory = &mut d_memory[head * len..(head + 1) * len];
            let before = &before[head * len..(head + 1) * len];
            let decayed: Vec<f32> = before.iter().map(|value| value * decay).collect();
            let recalled = through(&decayed, k, value_dim);
            let write: Vec<f32> = v.iter().zip(&recalled).map(|(v, recalled)| (v - recalled) * beta).collect();
            let mut after = decayed.clone();
            add_outer(&mut after, k, &write);
            add_outer(d_memory, q, &d_read);
            let d_q = rows_dot(&after, &d_read, value_dim);
            let d_write = through(d_memory, k, value_dim);
            let mut d_k = rows_dot(d_memory, &write, value_dim);
            let missed = v.iter().zip(&recalled).map(|(v, recalled)| v - recalled);
            let d_beta: f32 = d_write.iter().zip(missed).map(|(d, missed)| d * missed).sum();
            let d_v: Vec<f32> = d_write.iter().map(|d| d * beta).collect();
            let d_recalled: Vec<f32> = d_v.iter().map(|d| -d).collect();
            add_outer(d_memory, k, &d_recalled);
            d_k.iter_mut().zip(rows_dot(&decayed, &d_recalled, value_dim)).for_each(|(d, more)| *d += more);
            let d_decay = dot(d_memory, before);
            d_memory.iter_mut().for_each(|value| *value *= decay);
            let key_head = head / (num_value_heads / num_key_heads) * key_dim;
            super::slices::add_scaled(&mut d_qkv[key_head..key_head + key_dim], 1.0, &d_q);
            super::slices::add_scaled(&mut d_qkv[key_width + key_head..][..key_dim], 1.0, &d_k);
            d_qkv[2 * key_width + values.start..][..value_dim].copy_from_slice(&d_v);
            dx[gates + head] = d_beta * beta * (1.0 - beta);
            let a = x[gates + num_value_heads + head] + self.dt_bias[head];
            dx[gates + num_value_heads + head] = d_decay * decay * -self.a_log[head].exp() * sigmoid(a);
        }
        for (head, d) in d_qkv[..2 * key_width].chunks_exact_mut(key_dim).enumerate() {
            let scale = if head < num_key_heads { (key_dim as f32).sqrt().recip() } else { 1.0 };
            let unit: Vec<f32> = token.qkv[head * key_dim..][..key_dim].iter().map(|value| value / scale).collect();
            d.iter_mut().for_each(|d| *d *= scale);
            let along = dot(&unit, d);
            let r = token.inverse[head];
            d.iter_mut().zip(&unit).for_each(|(d, unit)| *d = r * (*d - unit * along));
        }
        d_qkv.iter().zip(&token.mixed).map(|(d, mixed)| d * silu_slope(*mixed)).collect()
    }

    /// Returns the gradients of the gate z and of the norm's input, for one value head.
    fn norm_vjp(&self, z: &[f32], read: &[f32], dy: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let width = read.len() as f32;
        let r = (dot(read, read) / width + self.eps).sqrt().recip();
        let (mut d_z, mut d_normed) = (Vec::new(), Vec::new());
        for (((z, read), dy), weight) in z.iter().zip(read).zip(dy).zip(&self.norm) {
            d_z.push(dy * read * r * weight * silu_slope(*z));
            d_normed.push(dy * weight * (z * sigmoid(*z)));
        }
        let along = dot(&d_normed, read) * r * r / width;
        let d_read = d_normed.iter().zip(read).map(|(d, read)| r * (d - read * along)).collect();
        (d_z, d_read)
    }

    /// Computes a packed batch: each group's prompt begins with zeros, and its completions with the prompt's last state.
    /// Returns the state after each prompt.
    pub fn forward_groups(&self, groups: &[Group], x: &[f32], out: &mut [f32]) -> Vec<State> {
        let (width, value_width) = (self.shape.width(), self.shape.value_width());
        let mut row = 0;
        let mut next = |state: &mut State, len: usize| {
            let rows = row..row + len;
            row = rows.end;
            let out = &mut out[rows.start * value_width..rows.end * value_width];
            self.forward(state, &x[rows.start * width..rows.end * width], out);
        };
        let of_group = |group: &Group| {
            let mut prompt = State::new(&self.shape);
            next(&mut prompt, group.prompt_len);
            group.completion_lens.iter().for_each(|len| next(&mut prompt.clone(), *len));
            prompt
        };
        groups.iter().map(of_group).collect()
    }

    /// Computes dL/dx of [`Weights::forward_groups`] from dL/dout = `dy`.
    pub fn backward_groups(&self, groups: &[Group], x: &[f32], dy: &[f32], dx: &mut [f32]) {
        let (width, value_width) = (self.shape.width(), self.shape.value_width());
        let mut begin = 0;
        for group in groups {
            let prompt = begin..begin + group.prompt_len;
            let mut at_end = State::new(&self.shape);
            self.forward(
                &mut at_end,
                &x[prompt.start * width..prompt.end * width],
                &mut vec![0.0; group.prompt_len * value_width],
            );
            let mut d_prompt = State::new(&self.shape);
            let mut row = prompt.end;
            let zeros = State::new(&self.shape);
            for len in &group.completion_lens {
                let (inputs, outputs) =
                    (row * width..(row + len) * width, row * value_width..(row + len) * value_width);
                let mut d_state = zeros.clone();
                self.backward(&at_end, &x[inputs.clone()], &dy[outputs], &mut d_state, &mut dx[inputs]);
                d_prompt.add(&d_state);
                row += len;
            }
            let inputs = prompt.start * width..prompt.end * width;
            let dy = &dy[prompt.start * value_width..prompt.end * value_width];
            self.backward(&zeros, &x[inputs.clone()], dy, &mut d_prompt, &mut dx[inputs]);
            begin = row;
        }
    }
}

/// Multiplies the memory `[key_dim][value_dim]`, transposed, by a vector `[key_dim]`.
fn through(memory: &[f32], vector: &[f32], value_dim: usize) -> Vec<f32> {
    let mut out = vec![0f32; value_dim];
    for (row, factor) in memory.chunks_exact(value_dim).zip(vector) {
        super::slices::add_scaled(&mut out, *factor, row);
    }
    out
}

/// Multiplies the memory `[key_dim][value_dim]` by a vector `[value_dim]`.
fn rows_dot(memory: &[f32], vector: &[f32], value_dim: usize) -> Vec<f32> {
    memory.chunks_exact(value_dim).map(|row| dot(row, vector)).collect()
}

/// Adds the outer product of two vectors: memory += k ⊗ write.
fn add_outer(memory: &mut [f32], k: &[f32], write: &[f32]) {
    for (row, k) in memory.chunks_exact_mut(write.len()).zip(k) {
        super::slices::add_scaled(row, *k, write);
    }
}
