//! The causal convolution over each channel of `[q | k | v]`, followed by SiLU.

use std::cell::RefCell;
use std::ops::Range;

use super::super::isa::Isa;
use super::super::mlp::silu;
use super::super::rows::{on_every_isa, over_rows};
use super::super::simd::{Simd, load_some, store_some};
use super::super::threads::{Shared, Threads};

/// Number of tokens of a part of the gradient's work; the last inputs of the next part are computed twice.
const TOKENS_AT_ONCE: usize = 64;
/// Number of channels of a part of the gradient's work.
const CHANNELS_AT_ONCE: usize = 512;

/// A causal depthwise convolution with frozen weights, followed by SiLU:
/// out`[t][c]` = silu(bias`[c]` + Σⱼ weight`[c][j]`·x`[t − width + 1 + j][c]`). Inputs before the sequence are zeros.
#[derive(Clone, Debug, PartialEq)]
pub struct Conv {
    /// The weights, `[width][channels]`; the last tap belongs to the current token.
    taps: Vec<f32>,
    bias: Option<Vec<f32>>,
    width: usize,
    channels: usize,
}

thread_local! {
    /// Gradients before SiLU of the last tokens, `[width][CHANNELS_AT_ONCE]`.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl Conv {
    /// Creates a convolution from PyTorch's weight `[channels][1][width]` and bias `[channels]`.
    ///
    /// # Panics
    /// Panics if `width` is 0, or the length of a slice does not match.
    pub fn new(weight: &[f32], bias: Option<&[f32]>, width: usize) -> Conv {
        assert!(width > 0 && weight.len().is_multiple_of(width), "the convolution's weight is not [channels][{width}]");
        let channels = weight.len() / width;
        assert!(bias.is_none_or(|bias| bias.len() == channels), "the convolution's bias needs {channels} values");
        let taps = (0..width).flat_map(|tap| (0..channels).map(move |channel| weight[channel * width + tap])).collect();
        Conv { taps, bias: bias.map(<[f32]>::to_vec), width, channels }
    }

    /// Number of taps.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of channels.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Number of values in the state, `[width − 1][channels]`: the last inputs, the oldest first.
    pub fn state_len(&self) -> usize {
        (self.width - 1) * self.channels
    }

    /// Computes out `[tokens][channels]` for x `[tokens][channels]` of one sequence. `state` contains the last inputs
    /// before the call, and those of this call afterwards.
    ///
    /// # Panics
    /// Panics if the lengths do not match.
    pub fn run(&self, threads: &Threads, isa: Isa, state: &mut [f32], x: &[f32], out: &mut [f32]) {
        let (tokens, channels) = (self.tokens(x, out), self.channels);
        assert_eq!(state.len(), self.state_len(), "the convolution's state has the wrong length");
        let (before, shared) = (&*state, Shared::new(out));
        over_rows(threads, tokens, self.width * channels, |range| {
            for token in range {
                // Safety: each thread writes other rows, and all rows are inside the buffer.
                unsafe { conv_row(isa, self, before, x, token, shared.part(token * channels..(token + 1) * channels)) };
            }
        });
        self.advance(state, x);
    }

    /// Computes out `[rows][channels]` for one token of each of several sequences, x `[rows][channels]`, and updates
    /// their states.
    ///
    /// # Panics
    /// Panics if the lengths do not match.
    pub fn run_rows(&self, threads: &Threads, isa: Isa, states: &mut [&mut [f32]], x: &[f32], out: &mut [f32]) {
        let (rows, channels) = (self.tokens(x, out), self.channels);
        assert_eq!(rows, states.len(), "the numbers of rows and of states of the convolution differ");
        assert!(
            states.iter().all(|state| state.len() == self.state_len()),
            "a convolution's state has the wrong length"
        );
        let (shared, states) = (Shared::new(out), Shared::new(states));
        over_rows(threads, rows, self.width * channels, |range| {
            for row in range {
                let span = row * channels..(row + 1) * channels;
                // Safety: each thread accesses other rows and states, and all are inside the buffers.
                unsafe {
                    let state = &mut *states.part(row..row + 1)[0];
                    conv_row(isa, self, state, &x[span.clone()], 0, shared.part(span.clone()));
                    self.advance(state, &x[span]);
                }
            }
        });
    }

    /// Computes dx `[tokens][channels]` from dL/dout = `dy` `[tokens][channels]`, for a whole sequence x
    /// `[tokens][channels]` that began with a state of zeros.
    ///
    /// # Panics
    /// Panics if the lengths do not match.
    pub fn vjp(&self, threads: &Threads, isa: Isa, x: &[f32], dy: &[f32], dx: &mut [f32]) {
        let tokens = self.tokens(x, dx);
        assert_eq!(x.len(), dy.len(), "the convolution's input and the gradient of its output differ in length");
        let parts = self.channels.div_ceil(CHANNELS_AT_ONCE);
        let dx = Shared::new(dx);
        let cells = tokens.div_ceil(TOKENS_AT_ONCE) * parts;
        over_rows(threads, cells, self.width * TOKENS_AT_ONCE * CHANNELS_AT_ONCE, |range| {
            for cell in range {
                let (first, part) = (cell / parts * TOKENS_AT_ONCE, cell % parts * CHANNELS_AT_ONCE);
                let range = first..(first + TOKENS_AT_ONCE).min(tokens);
                let channels = part..(part + CHANNELS_AT_ONCE).min(self.channels);
                SCRATCH.with_borrow_mut(|scratch| {
                    scratch.resize(self.width * CHANNELS_AT_ONCE, 0.0);
                    // Safety: each cell writes other tokens and channels, inside the buffer; the sizes were checked.
                    unsafe { vjp_part(isa, self, x, dy, range, channels, scratch, dx) };
                });
            }
        });
    }

    fn tokens(&self, x: &[f32], out: &[f32]) -> usize {
        let tokens = x.len().checked_div(self.channels).unwrap_or(0);
        assert!(
            x.len() == tokens * self.channels && out.len() == x.len(),
            "the convolution's input and output are not [tokens][{}]",
            self.channels
        );
        tokens
    }

    /// Replaces the oldest inputs of a state with those of x.
    fn advance(&self, state: &mut [f32], x: &[f32]) {
        let keep = state.len().saturating_sub(x.len());
        state.copy_within(state.len() - keep.., 0);
        let from = x.len() - (state.len() - keep);
        state[keep..].copy_from_slice(&x[from..]);
    }

    /// The inputs that tap `tap` reads for a token, of all channels.
    fn inputs<'a>(&self, state: &'a [f32], x: &'a [f32], token: usize, tap: usize) -> &'a [f32] {
        let (at, before) = (token + tap, self.width - 1);
        let from = if at < before { &state[at * self.channels..] } else { &x[(at - before) * self.channels..] };
        &from[..self.channels]
    }
}

on_every_isa! {
    unsafe fn conv_row(conv: &Conv, state: &[f32], x: &[f32], token: usize, out: &mut [f32]) = conv_with
}
on_every_isa! {
    unsafe fn vjp_part(
        conv: &Conv,
        x: &[f32],
        dy: &[f32],
        tokens: Range<usize>,
        channels: Range<usize>,
        scratch: &mut [f32],
        dx: Shared<f32>,
    ) = vjp_with
}

#[inline(always)]
unsafe fn conv_with<S: Simd>(conv: &Conv, state: &[f32], x: &[f32], token: usize, out: &mut [f32]) {
    unsafe {
        let first = conv.inputs(state, x, token, 0).as_ptr();
        for at in (0..conv.channels).step_by(S::LANES) {
            let rest = conv.channels - at;
            let bias = conv.bias.as_ref().map_or(S::zero(), |bias| load_some::<S>(bias.as_ptr().add(at), rest));
            let tap = load_some::<S>(conv.taps.as_ptr().add(at), rest);
            let mut sum = S::fma(tap, load_some::<S>(first.add(at), rest), bias);
            for tap in 1..conv.width {
                let input = conv.inputs(state, x, token, tap).as_ptr();
                let weight = load_some::<S>(conv.taps.as_ptr().add(tap * conv.channels + at), rest);
                sum = S::fma(weight, load_some::<S>(input.add(at), rest), sum);
            }
            store_some::<S>(out.as_mut_ptr().add(at), silu::<S>(sum).0, rest);
        }
    }
}

/// Walks back over the tokens: computes the gradient before SiLU of a token, then the gradient of the input
/// of the same token, which the token and the next ones read.
#[inline(always)]
unsafe fn vjp_with<S: Simd>(
    conv: &Conv,
    x: &[f32],
    dy: &[f32],
    tokens: Range<usize>,
    channels: Range<usize>,
    scratch: &mut [f32],
    dx: Shared<f32>,
) {
    let (width, all) = (conv.width, conv.channels);
    let total = x.len() / all;
    unsafe {
        scratch.fill(0.0);
        for token in (tokens.start..(tokens.end + width - 1).min(total)).rev() {
            let slot = scratch.as_mut_ptr().add(token % width * CHANNELS_AT_ONCE);
            for at in channels.clone().step_by(S::LANES) {
                let rest = channels.end - at;
                let taps = conv.taps.as_ptr().add(at);
                let mut sum = conv.bias.as_ref().map_or(S::zero(), |bias| load_some::<S>(bias.as_ptr().add(at), rest));
                for tap in (width - 1).saturating_sub(token)..width {
                    let input = x.as_ptr().add((token + tap + 1 - width) * all + at);
                    let weight = load_some::<S>(taps.add(tap * all), rest);
                    sum = S::fma(weight, load_some::<S>(input, rest), sum);
                }
                let slope = silu::<S>(sum).1;
                let d = S::mul(load_some::<S>(dy.as_ptr().add(token * all + at), rest), slope);
                let slot = slot.add(at - channels.start);
                store_some::<S>(slot, d, rest);
                if token >= tokens.end {
                    continue;
                }
                let mut sum = S::zero();
                for later in (token..(token + width).min(total)).rev() {
                    let weight = load_some::<S>(taps.add((width - 1 - (later - token)) * all), rest);
                    let d = scratch.as_ptr().add(later % width * CHANNELS_AT_ONCE + at - channels.start);
                    sum = S::fma(weight, load_some::<S>(d, rest), sum);
                }
                store_some::<S>(dx.at(token * all + at), sum, rest);
            }
        }
    }
}
