//! The arithmetic of the decoder on rows of f32: forward and vector-Jacobian products. [`super::plain`] has the same
//! functions built from tensor operations, and tests compare the two.

use crate::kernels::attention::first_seen;
pub use crate::kernels::attention::{Group, Heads};
pub use crate::kernels::head::TokenScore;
use crate::kernels::head::factor;
use crate::kernels::mlp::Activation;

const LANES: usize = 16;

/// Dot product Σ a·b in a fixed order.
#[inline]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let mut tail = 0f32;
    for (x, y) in a_chunks.remainder().iter().zip(b_chunks.remainder()) {
        tail += x * y;
    }
    for (x, y) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] += x[lane] * y[lane];
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0] + tail
}

/// Adds a scaled vector: y += alpha·x.
#[inline]
pub fn add_scaled(y: &mut [f32], alpha: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += alpha * x;
    }
}

/// RMSNorm: out = x / √(mean(x²) + eps) ∘ weight.
#[inline]
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let r = (dot(x, x) / x.len() as f32 + eps).sqrt().recip();
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * r * w;
    }
}

/// RMSNorm of a row, in place.
#[inline]
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let r = (dot(x, x) / x.len() as f32 + eps).sqrt().recip();
    for (x, w) in x.iter_mut().zip(weight) {
        *x *= r * w;
    }
}

/// Returns dL/dx of [`rms_norm`] from dL/dout = `dy`.
#[inline]
pub fn rms_norm_vjp(x: &[f32], weight: &[f32], eps: f32, dy: &[f32], dx: &mut [f32]) {
    let n = x.len() as f32;
    let r = (dot(x, x) / n + eps).sqrt().recip();
    let mut inner = 0f32;
    for ((x, w), dy) in x.iter().zip(weight).zip(dy) {
        inner += x * w * dy;
    }
    let c = inner * r * r / n;
    for (((dx, x), w), dy) in dx.iter_mut().zip(x).zip(weight).zip(dy) {
        *dx = r * (w * dy - c * x);
    }
}

/// Adds dL/dweight of [`rms_norm`] from dL/dout = `dy`: dw += dy ∘ x·r.
#[inline]
pub fn rms_norm_weight_vjp(x: &[f32], eps: f32, dy: &[f32], dw: &mut [f32]) {
    let r = (dot(x, x) / x.len() as f32 + eps).sqrt().recip();
    for ((dw, x), dy) in dw.iter_mut().zip(x).zip(dy) {
        *dw += dy * x * r;
    }
}

/// Rounds each value to the nearest bfloat16, ties to even.
#[inline]
pub fn round_bf16(values: &mut [f32]) {
    for value in values {
        *value = half::bf16::from_f32(*value).to_f32();
    }
}

/// Applies rotary embedding to one head, with the angles of its position: (a, b) → (a·cos − b·sin, b·cos + a·sin)
/// for the two halves.
#[inline]
pub fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (a, b) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

/// The transpose of [`rotate`], which is its vector-Jacobian product.
#[inline]
pub fn rotate_back(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (a, b) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        (*a, *b) = (*a * c + *b * s, *b * c - *a * s);
    }
}

/// The activation function of a gate, and its derivative.
fn activated(activation: Activation, x: f32) -> (f32, f32) {
    match activation {
        Activation::Silu => {
            let s = 1.0 / (1.0 + (-x).exp());
            (x * s, s * (1.0 + x * (1.0 - s)))
        }
        Activation::GeluTanh => {
            let root = (2.0 / std::f32::consts::PI).sqrt();
            let t = (root * (x + 0.044_715 * x * x * x)).tanh();
            let slope = root * (1.0 + 3.0 * 0.044_715 * x * x);
            (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
        }
    }
}

/// Computes out = activation(gate) ∘ up for a row `[gate | up]`.
#[inline]
pub fn gated(activation: Activation, gate_up: &[f32], out: &mut [f32]) {
    let (gate, up) = gate_up.split_at(out.len());
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = activated(activation, *gate).0 * up;
    }
}

/// Returns dL/d`[gate | up]` of [`gated`].
#[inline]
pub fn gated_vjp(activation: Activation, gate_up: &[f32], dy: &[f32], d_gate_up: &mut [f32]) {
    let (gate, up) = gate_up.split_at(dy.len());
    let (d_gate, d_up) = d_gate_up.split_at_mut(dy.len());
    for ((((dg, du), gate), u), dy) in d_gate.iter_mut().zip(d_up).zip(gate).zip(up).zip(dy) {
        let (value, slope) = activated(activation, *gate);
        *dg = dy * u * slope;
        *du = dy * value;
    }
}

/// Computes out = x ∘ σ(gate).
#[inline]
pub fn sigmoid_gated(x: &[f32], gate: &[f32], out: &mut [f32]) {
    for ((out, x), gate) in out.iter_mut().zip(x).zip(gate) {
        *out = x / (1.0 + (-gate).exp());
    }
}

/// Computes the derivative of x ∘ σ(gate) by the gate.
#[inline]
pub fn sigmoid_gate_slope(x: &[f32], gate: &[f32], out: &mut [f32]) {
    for ((out, x), gate) in out.iter_mut().zip(x).zip(gate) {
        let s = 1.0 / (1.0 + (-gate).exp());
        *out = x * s * (1.0 - s);
    }
}

/// The derivative of c·tanh(x / c) at the point where its value is `y`.
pub fn softcap_slope(y: f32, softcap: f32) -> f32 {
    1.0 - (y / softcap) * (y / softcap)
}

/// Converts a dot product to an attention score.
fn score_of(heads: &Heads, dot: f32) -> f32 {
    let score = dot * heads.scale;
    heads.softcap.map_or(score, |softcap| softcap * (score / softcap).tanh())
}

/// Softmax in place: scores → exp(scores − max) / Σ.
#[inline]
pub fn softmax(scores: &mut [f32]) {
    let max = scores.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
    let mut sum = 0f32;
    for x in scores.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    let r = sum.recip();
    for x in scores.iter_mut() {
        *x *= r;
    }
}

/// The rows that a query attends to: some rows of the shared prompt, then some rows of its own completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Visible {
    /// Range of rows of the prompt.
    pub prompt: std::ops::Range<usize>,
    /// Range of rows after the prompt; empty for a token of the prompt.
    pub own: std::ops::Range<usize>,
}

impl Visible {
    fn rows(&self) -> impl Iterator<Item = usize> + use<> {
        self.prompt.clone().chain(self.own.clone())
    }
}

/// Computes which rows each token of a group attends to. `window` is the number of positions, its own included.
pub fn visible(group: &Group, window: Option<usize>) -> Vec<Visible> {
    let Group { prompt_len, completion_lens } = group;
    let mut list: Vec<Visible> =
        (0..*prompt_len).map(|i| Visible { prompt: first_seen(i, window)..i + 1, own: 0..0 }).collect();
    let mut start = *prompt_len;
    for len in completion_lens {
        for j in 0..*len {
            let first = first_seen(prompt_len + j, window);
            let own_first = start + first.saturating_sub(*prompt_len);
            list.push(Visible { prompt: first.min(*prompt_len)..*prompt_len, own: own_first..start + j + 1 });
        }
        start += len;
    }
    list
}

/// Causal attention within one group. `qkv` holds its rows after qk-norm and rotary
/// embedding; `out` is `[rows][q_width]`.
pub fn attention(heads: &Heads, visible: &[Visible], qkv: &[f32], out: &mut [f32]) {
    let (width, dim) = (heads.width(), heads.head_dim);
    let mut scores = Vec::new();
    for (row, visible) in visible.iter().enumerate() {
        for head in 0..heads.num_heads {
            let kv = head / heads.group_size();
            let (k_at, v_at) = (heads.q_width() + kv * dim, heads.q_width() + heads.kv_width() + kv * dim);
            let q = &qkv[row * width + head * dim..][..dim];
            scores.clear();
            scores.extend(visible.rows().map(|r| score_of(heads, dot(q, &qkv[r * width + k_at..][..dim]))));
            softmax(&mut scores);
            let out = &mut out[row * heads.q_width() + head * dim..][..dim];
            out.fill(0.0);
            for (r, p) in visible.rows().zip(&scores) {
                add_scaled(out, *p, &qkv[r * width + v_at..][..dim]);
            }
        }
    }
}

/// Keys and values of earlier tokens, `[position][k heads | v heads]`: first those of a shared prompt, then the row's
/// own. The first ones may be missing if no token's window reaches them, because a window is counted from the end.
#[derive(Clone, Copy, Debug)]
pub struct Cache<'a> {
    /// Keys and values of the prompt.
    pub prompt: &'a [f32],
    /// Keys and values of the row itself, including the current token's.
    pub own: &'a [f32],
}

/// Attention of one new token; adds in the same order as [`attention`]. `q` is after qk-norm and rotary embedding.
pub fn attention_cached(
    heads: &Heads,
    window: Option<usize>,
    q: &[f32],
    cache: Cache,
    scores: &mut Vec<f32>,
    out: &mut [f32],
) {
    let (dim, width) = (heads.head_dim, 2 * heads.kv_width());
    let (prompt_len, own_len) = (cache.prompt.len() / width, cache.own.len() / width);
    let first = window.map_or(0, |w| (prompt_len + own_len).saturating_sub(w));
    let prompt = &cache.prompt[first.min(prompt_len) * width..];
    let own = &cache.own[first.saturating_sub(prompt_len) * width..];
    let rows = || prompt.chunks_exact(width).chain(own.chunks_exact(width));
    for head in 0..heads.num_heads {
        let kv = head / heads.group_size();
        let (k_at, v_at) = (kv * dim, heads.kv_width() + kv * dim);
        let q = &q[head * dim..][..dim];
        scores.clear();
        scores.extend(rows().map(|row| score_of(heads, dot(q, &row[k_at..][..dim]))));
        softmax(scores);
        let out = &mut out[head * dim..][..dim];
        out.fill(0.0);
        for (row, p) in rows().zip(scores.iter()) {
            add_scaled(out, *p, &row[v_at..][..dim]);
        }
    }
}

/// Returns dL/dqkv of [`attention`] from dL/dout; `d_qkv` must hold zeros.
pub fn attention_vjp(heads: &Heads, visible: &[Visible], qkv: &[f32], d_out: &[f32], d_qkv: &mut [f32]) {
    let (width, dim, scale) = (heads.width(), heads.head_dim, heads.scale);
    let (mut p, mut dp, mut slopes) = (Vec::new(), Vec::new(), Vec::new());
    for (row, visible) in visible.iter().enumerate() {
        for head in 0..heads.num_heads {
            let kv = head / heads.group_size();
            let (k_at, v_at) = (heads.q_width() + kv * dim, heads.q_width() + heads.kv_width() + kv * dim);
            let q_at = row * width + head * dim;
            let q = &qkv[q_at..][..dim];
            p.clear();
            p.extend(visible.rows().map(|r| score_of(heads, dot(q, &qkv[r * width + k_at..][..dim]))));
            slopes.clear();
            let slope = |score: &f32| heads.softcap.map_or(scale, |softcap| scale * softcap_slope(*score, softcap));
            slopes.extend(p.iter().map(slope));
            softmax(&mut p);
            let d_out = &d_out[row * heads.q_width() + head * dim..][..dim];
            dp.clear();
            dp.extend(visible.rows().map(|r| dot(d_out, &qkv[r * width + v_at..][..dim])));
            let mean = dot(&p, &dp);
            for (((r, p), dp), slope) in visible.rows().zip(&p).zip(&dp).zip(&slopes) {
                let ds = p * (dp - mean) * slope;
                add_scaled(&mut d_qkv[r * width + v_at..][..dim], *p, d_out);
                add_scaled(&mut d_qkv[r * width + k_at..][..dim], ds, q);
                add_scaled(&mut d_qkv[q_at..][..dim], ds, &qkv[r * width + k_at..][..dim]);
            }
        }
    }
}

/// Computes log-softmax(logits / temperature) at `target`, and the entropy.
pub fn token_score(logits: &[f32], target: usize, temperature: f64) -> TokenScore {
    let t = factor(temperature);
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x)) * t;
    let (mut sum, mut weighted) = (0f64, 0f64);
    for x in logits {
        let z = x * t - max;
        let e = z.exp();
        sum += f64::from(e);
        weighted += f64::from(e * z);
    }
    let log_sum = sum.ln();
    TokenScore {
        logp: (f64::from(logits[target] * t - max) - log_sum) as f32,
        entropy: (log_sum - weighted / sum) as f32,
        is_top: logits[target] * t >= max,
    }
}

/// Replaces logits by dL/dlogits for an L with dL/dlogp(target) = `g`: g·(onehot − softmax)/temperature.
pub fn token_score_vjp(logits: &mut [f32], target: usize, temperature: f64, g: f32) {
    let t = factor(temperature);
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x)) * t;
    let mut sum = 0f64;
    for x in logits.iter_mut() {
        *x = (*x * t - max).exp();
        sum += f64::from(*x);
    }
    let c = (-f64::from(g) * f64::from(t) / sum) as f32;
    for x in logits.iter_mut() {
        *x *= c;
    }
    logits[target] += g * t;
}
