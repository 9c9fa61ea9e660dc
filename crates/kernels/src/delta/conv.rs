//! The causal convolution over each channel of `[q | k | v]`, with SiLU.

use std::ops::Range;

use super::super::mlp::silu;
use super::super::rows::on_every_isa;
use super::super::simd::{Simd, load_some, store_some};

/// A causal depthwise convolution with frozen weights:
/// out`[t][c]` = bias`[c]` + Σⱼ weight`[c][j]`·x`[t − width + 1 + j][c]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Conv {
    /// The weights, `[width][channels]`; the last tap belongs to the current token.
    taps: Vec<f32>,
    bias: Option<Vec<f32>>,
    width: usize,
    channels: usize,
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

    /// Number of taps of the convolution.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of channels that are convolved.
    pub fn channels(&self) -> usize {
        self.channels
    }
}

/// One token of a sequence: where its inputs are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'a> {
    /// Rows of the input from the sequence's first token on, each `width` wide.
    pub x: &'a [f32],
    pub width: usize,
    /// Index of the token in the sequence.
    pub token: usize,
    /// The convolution's last inputs before the sequence, `[taps − 1][channels]`.
    pub before: &'a [f32],
}

impl<'a> Source<'a> {
    /// The token's own row of the input.
    pub fn row(&self) -> &'a [f32] {
        &self.x[self.token * self.width..(self.token + 1) * self.width]
    }

    /// The inputs of all channels that a tap reads.
    fn input(&self, conv: &Conv, tap: usize) -> &'a [f32] {
        let (at, before) = (self.token + tap, conv.width - 1);
        let from = if at < before { &self.before[at * conv.channels..] } else { &self.x[(at - before) * self.width..] };
        &from[..conv.channels]
    }
}

/// The convolution's last inputs after `tokens` tokens of a sequence, from those before it.
pub(super) fn advance(conv: &Conv, state: &mut [f32], x: &[f32], width: usize, tokens: usize) {
    let (channels, kept) = (conv.channels, (conv.width - 1).saturating_sub(tokens));
    state.copy_within(state.len() - kept * channels.., 0);
    for (slot, state) in state.chunks_exact_mut(channels).enumerate().skip(kept) {
        let token = slot + tokens + 1 - conv.width;
        state.copy_from_slice(&x[token * width..][..channels]);
    }
}

on_every_isa! {
    /// Computes one token of the convolution, of all channels, with SiLU. `mixed` receives the values before SiLU.
    ///
    /// # Safety
    /// `out` and `mixed` have one value for each channel.
    pub(super) unsafe fn conv_row(conv: &Conv, source: Source<'_>, mixed: Option<&mut [f32]>, out: &mut [f32])
        = conv_with
}
on_every_isa! {
    /// Computes the gradients of the inputs of some channels, from the last token to the first. `d_out` begins
    /// with the gradient of the first token's output, `[tokens][channels]`. `carry` `[taps − 1][channels]` contains the
    /// gradients of the last inputs from later tokens, and afterwards those of the last inputs before the first token.
    /// The gradients go to `dx`, in rows `width` wide.
    ///
    /// # Safety
    /// `d_out` is valid for `tokens` rows of all channels, `dx` for `tokens` rows, and `carry` for its rows; no other
    /// thread accesses these channels of `carry` and `dx`.
    pub(super) unsafe fn input_gradients(
        conv: &Conv,
        tokens: usize,
        channels: Range<usize>,
        d_out: *const f32,
        carry: *mut f32,
        dx: (*mut f32, usize),
    ) = gradients_with
}

#[inline(always)]
unsafe fn conv_with<S: Simd>(conv: &Conv, source: Source<'_>, mixed: Option<&mut [f32]>, out: &mut [f32]) {
    /// The usual number of taps, for which all addresses stay in registers.
    const USUAL: usize = 4;
    let (taps, mixed) = (conv.taps.as_ptr(), mixed.map(<[f32]>::as_mut_ptr));
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        if conv.width == USUAL {
            let inputs: [_; USUAL] = std::array::from_fn(|tap| source.input(conv, tap).as_ptr());
            let weights: [_; USUAL] = std::array::from_fn(|tap| taps.add(tap * conv.channels));
            silu_of_sums::<S>(conv, mixed, out, |bias, at, rest| {
                let mut sum = bias;
                for (weight, input) in weights.iter().zip(&inputs) {
                    sum = S::fma(load_some::<S>(weight.add(at), rest), load_some::<S>(input.add(at), rest), sum);
                }
                sum
            });
        } else {
            silu_of_sums::<S>(conv, mixed, out, |bias, at, rest| {
                let mut sum = bias;
                for tap in 0..conv.width {
                    let weight = load_some::<S>(taps.add(tap * conv.channels + at), rest);
                    sum = S::fma(weight, load_some::<S>(source.input(conv, tap).as_ptr().add(at), rest), sum);
                }
                sum
            });
        }
    }
}

/// Computes SiLU of the sums that begin with the bias.
#[inline(always)]
unsafe fn silu_of_sums<S: Simd>(
    conv: &Conv,
    mixed: Option<*mut f32>,
    out: &mut [f32],
    sum: impl Fn(S::V, usize, usize) -> S::V,
) {
    unsafe {
        for at in (0..conv.channels).step_by(S::LANES) {
            let rest = conv.channels - at;
            let bias = conv.bias.as_ref().map_or(S::zero(), |bias| load_some::<S>(bias.as_ptr().add(at), rest));
            let sum = sum(bias, at, rest);
            if let Some(mixed) = mixed {
                store_some::<S>(mixed.add(at), sum, rest);
            }
            store_some::<S>(out.as_mut_ptr().add(at), silu::<S>(sum).0, rest);
        }
    }
}

#[inline(always)]
unsafe fn gradients_with<S: Simd>(
    conv: &Conv,
    tokens: usize,
    channels: Range<usize>,
    d_out: *const f32,
    carry: *mut f32,
    (dx, width): (*mut f32, usize),
) {
    let (all, last) = (conv.channels, conv.width - 1);
    unsafe {
        for token in (0..tokens).rev() {
            for at in channels.clone().step_by(S::LANES) {
                let rest = channels.end - at;
                let d = load_some::<S>(d_out.add(token * all + at), rest);
                // Each slot of the carry takes the value of the slot before it, and this token's share.
                let mut before = S::zero();
                for slot in 0..last {
                    let place = carry.add(slot * all + at);
                    let after = load_some::<S>(place, rest);
                    let weight = load_some::<S>(conv.taps.as_ptr().add(slot * all + at), rest);
                    store_some::<S>(place, S::fma(weight, d, before), rest);
                    before = after;
                }
                let weight = load_some::<S>(conv.taps.as_ptr().add(last * all + at), rest);
                store_some::<S>(dx.add(token * width + at), S::fma(weight, d, before), rest);
            }
        }
    }
}
