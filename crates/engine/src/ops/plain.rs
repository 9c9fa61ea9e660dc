//! The decoder's operations built from differentiable tensor operations: slow, for any device, and the oracle
//! for [`super::slices`] in tests.

use candle_core::{D, DType, Result, Tensor};

use super::slices::{Group, Heads, visible};
use crate::kernels::mlp::Activation;

/// RMSNorm over the last dimension.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + eps)?.sqrt()?)?.broadcast_mul(weight)
}

/// Maps `[gate | up]` of `[T, 2·I]` to `[T, I]`.
pub fn gated(activation: Activation, gate_up: &Tensor) -> Result<Tensor> {
    let inter = gate_up.dim(D::Minus1)? / 2;
    let gate = gate_up.narrow(D::Minus1, 0, inter)?;
    let up = gate_up.narrow(D::Minus1, inter, inter)?;
    let gate = match activation {
        Activation::Silu => gate.silu()?,
        Activation::GeluTanh => {
            let cubic = (gate.powf(3.0)? * 0.044715)?;
            let t = ((&gate + cubic)? * (2.0 / std::f64::consts::PI).sqrt())?.tanh()?;
            ((&gate * 0.5)? * (t + 1.0)?)?
        }
    };
    gate * up
}

/// Rotates `[T, heads, dim]` by `[T, dim/2]` angles.
pub fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let half = x.dim(D::Minus1)? / 2;
    let (a, b) = (x.narrow(D::Minus1, 0, half)?, x.narrow(D::Minus1, half, half)?);
    let (cos, sin) = (cos.unsqueeze(1)?, sin.unsqueeze(1)?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    Tensor::cat(&[first, second], D::Minus1)
}

/// Softmax over the last dimension.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let e = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?)
}

/// Log-softmax over the last dimension.
pub fn log_softmax(x: &Tensor) -> Result<Tensor> {
    let shifted = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    shifted.broadcast_sub(&log_sum)
}

/// Causal attention of one group: maps `qkv` `[T, width]` after qk-norm and rotary embedding to `[T, q_width]`.
pub fn attention(heads: &Heads, group: &Group, window: Option<usize>, qkv: &Tensor) -> Result<Tensor> {
    let len = qkv.dim(0)?;
    let mut mask = vec![f32::NEG_INFINITY; len * len];
    for (row, visible) in visible(group, window).into_iter().enumerate() {
        for column in visible.prompt.chain(visible.own) {
            mask[row * len + column] = 0.0;
        }
    }
    let mask = Tensor::from_vec(mask, (1, len, len), qkv.device())?.to_dtype(DType::F32)?;
    let split = |at: usize, count: usize| -> Result<Tensor> {
        qkv.narrow(1, at, count * heads.head_dim)?.reshape((len, count, heads.head_dim))?.transpose(0, 1)?.contiguous()
    };
    let q = split(0, heads.num_heads)?;
    let repeat = |x: Tensor| -> Result<Tensor> {
        let shape = (heads.num_kv_heads, heads.group_size(), len, heads.head_dim);
        x.unsqueeze(1)?.broadcast_as(shape)?.reshape((heads.num_heads, len, heads.head_dim))
    };
    let k = repeat(split(heads.q_width(), heads.num_kv_heads)?)?;
    let v = repeat(split(heads.q_width() + heads.kv_width(), heads.num_kv_heads)?)?;
    let scores = (q.matmul(&k.transpose(1, 2)?.contiguous()?)? * f64::from(heads.scale))?;
    let scores = match heads.softcap {
        Some(softcap) => ((scores / f64::from(softcap))?.tanh()? * f64::from(softcap))?,
        None => scores,
    };
    let probabilities = softmax(&scores.broadcast_add(&mask)?)?;
    probabilities.matmul(&v)?.transpose(0, 1)?.reshape((len, heads.q_width()))
}
