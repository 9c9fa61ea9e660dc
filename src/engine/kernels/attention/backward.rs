//! The vector-Jacobian product of attention over one prompt and the completions that share it.

use std::ops::Range;

use super::super::isa::Isa;
use super::super::simd::{self, Portable, Simd};
use super::super::threads::Shared;
use super::{BLOCK, Heads, Place, Segment, Visible, blocks, score_blocks_of, softmax, union, weigh};

/// One prompt with its completions, side by side: prompt tokens, then each completion's.
#[derive(Debug)]
pub struct Backward<'a> {
    /// Sizes.
    pub heads: &'a Heads,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Tokens of each completion.
    pub completion_lens: &'a [usize],
    /// What each token sees; own positions are counted from the completion's first.
    pub visible: &'a [Visible],
    /// `[tokens][width]`, after qk-norm and rope.
    pub qkv: &'a [f32],
    /// dL/dout `[tokens][q_width]`.
    pub d_out: &'a [f32],
}

/// dL/dqkv `[tokens][width]` for the queries, keys and values of some key heads; other columns are left alone.
pub fn attend_backward(isa: Isa, group: &Backward<'_>, kv_heads: Range<usize>, d_qkv: &Shared<f32>) {
    let Backward { heads, prompt_len, completion_lens, visible, qkv, d_out } = group;
    let tokens = prompt_len + completion_lens.iter().sum::<usize>();
    assert!(isa.is_available(), "{isa} does not run on this machine");
    assert!(qkv.len() == tokens * heads.width() && d_out.len() == tokens * heads.q_width() && visible.len() == tokens);
    assert!(kv_heads.end <= heads.num_kv_heads);
    // Safety: the rung is available, and the asserts hold the bounds.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => backward_avx512(group, kv_heads, d_qkv),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => backward_avx2(group, kv_heads, d_qkv),
            _ => backward::<Portable, 2>(group, kv_heads, d_qkv),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn backward_avx512(group: &Backward<'_>, kv_heads: Range<usize>, d_qkv: &Shared<f32>) {
    unsafe { backward::<simd::Avx512, 1>(group, kv_heads, d_qkv) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn backward_avx2(group: &Backward<'_>, kv_heads: Range<usize>, d_qkv: &Shared<f32>) {
    unsafe { backward::<simd::Avx2, 2>(group, kv_heads, d_qkv) }
}

/// Keys and values of a segment for one key head, in both layouts, and their gradients.
struct Side {
    /// Keys in blocks, values in rows.
    forward: Segment,
    /// Values in blocks, keys in rows.
    turned: Segment,
    /// `[position][padded]`
    d_keys: Vec<f32>,
    d_values: Vec<f32>,
}

impl Side {
    fn new(heads: &Heads, kv_head: usize, rows: &[f32]) -> Side {
        let one = heads.of_one();
        let mut side =
            Side { forward: Segment::default(), turned: Segment::default(), d_keys: Vec::new(), d_values: Vec::new() };
        for row in rows.chunks_exact(heads.width()) {
            let key = &row[heads.q_width() + kv_head * heads.head_dim..][..heads.head_dim];
            let value = &row[heads.q_width() + heads.kv_width() + kv_head * heads.head_dim..][..heads.head_dim];
            side.forward.push_heads(&one, key, value);
            side.turned.push_heads(&one, value, key);
        }
        side.d_keys = vec![0.0; side.forward.len() * heads.padded()];
        side.d_values = side.d_keys.clone();
        side
    }

    /// Add the gradients of keys and values to the rows they belong to.
    unsafe fn write(&self, heads: &Heads, kv_head: usize, first_row: usize, d_qkv: &Shared<f32>) {
        let rows = self.d_keys.chunks_exact(heads.padded()).zip(self.d_values.chunks_exact(heads.padded()));
        for (index, (key, value)) in rows.enumerate() {
            let at = (first_row + index) * heads.width() + heads.q_width() + kv_head * heads.head_dim;
            for (begin, values) in [(at, key), (at + heads.kv_width(), value)] {
                // Safety: the caller's; these columns are this call's own.
                let to = unsafe { d_qkv.part(begin..begin + heads.head_dim) };
                to.copy_from_slice(&values[..heads.head_dim]);
            }
        }
    }
}

/// Query heads of tokens that are computed together.
const TILE: usize = 4;

#[inline(always)]
unsafe fn backward<S: Simd, const NV: usize>(group: &Backward<'_>, kv_heads: Range<usize>, d_qkv: &Shared<f32>) {
    let Backward { heads, prompt_len, completion_lens, .. } = group;
    let width = heads.width();
    let mut scratch = Vec::new();
    for kv_head in kv_heads {
        let mut prompt = Side::new(heads, kv_head, &group.qkv[..prompt_len * width]);
        let mut nothing = Side::new(heads, kv_head, &[]);
        // Safety: the caller's, here and below.
        unsafe { tokens::<S, NV>(group, kv_head, 0..*prompt_len, &mut prompt, &mut nothing, d_qkv, &mut scratch) };
        let mut begin = *prompt_len;
        for length in *completion_lens {
            let rows = begin..begin + length;
            let mut own = Side::new(heads, kv_head, &group.qkv[rows.start * width..rows.end * width]);
            unsafe {
                tokens::<S, NV>(group, kv_head, rows, &mut prompt, &mut own, d_qkv, &mut scratch);
                own.write(heads, kv_head, begin, d_qkv);
            }
            begin += length;
        }
        unsafe { prompt.write(heads, kv_head, 0, d_qkv) };
    }
}

#[inline(always)]
unsafe fn tokens<S: Simd, const NV: usize>(
    group: &Backward<'_>,
    kv_head: usize,
    rows: Range<usize>,
    prompt: &mut Side,
    own: &mut Side,
    d_qkv: &Shared<f32>,
    scratch: &mut Vec<f32>,
) {
    let per_token = group.heads.group_size();
    let total = rows.len() * per_token;
    let mut first = 0;
    while first < total {
        let count = (total - first).min(TILE);
        let one = |i: usize| (rows.start + (first + i) / per_token, kv_head * per_token + (first + i) % per_token);
        // Safety: the caller's.
        unsafe {
            match count {
                1 => tile::<S, NV, 1>(group, std::array::from_fn(one), prompt, own, d_qkv, scratch),
                2 => tile::<S, NV, 2>(group, std::array::from_fn(one), prompt, own, d_qkv, scratch),
                3 => tile::<S, NV, 3>(group, std::array::from_fn(one), prompt, own, d_qkv, scratch),
                _ => tile::<S, NV, 4>(group, std::array::from_fn(one), prompt, own, d_qkv, scratch),
            }
        }
        first += count;
    }
}

#[inline(always)]
unsafe fn tile<S: Simd, const NV: usize, const NQ: usize>(
    group: &Backward<'_>,
    ones: [(usize, usize); NQ],
    prompt: &mut Side,
    own: &mut Side,
    d_qkv: &Shared<f32>,
    scratch: &mut Vec<f32>,
) {
    unsafe {
        let heads = group.heads;
        let (one_head, dim, padded) = (heads.of_one(), heads.head_dim, heads.padded());
        let seen = |one: &(usize, usize)| &group.visible[one.0];
        let prompt_blocks = blocks(&union(ones.iter().map(|one| seen(one).prompt.clone())));
        let own_blocks = blocks(&union(ones.iter().map(|one| seen(one).own.clone())));
        let own_at = prompt_blocks.len() * BLOCK;
        let stride = own_at + own_blocks.len() * BLOCK;
        // Probabilities, dP (then dS), and the queries' and outputs' rows padded to whole vectors.
        scratch.clear();
        scratch.resize(2 * NQ * stride + 2 * NQ * padded, 0.0);
        let p = scratch.as_mut_ptr();
        let dp = p.add(NQ * stride);
        let q_rows = dp.add(NQ * stride);
        let d_rows = q_rows.add(NQ * padded);
        for (i, (token, head)) in ones.iter().enumerate() {
            let q = &group.qkv[token * heads.width() + head * dim..][..dim];
            let d = &group.d_out[token * heads.q_width() + head * dim..][..dim];
            std::ptr::copy_nonoverlapping(q.as_ptr(), q_rows.add(i * padded), dim);
            std::ptr::copy_nonoverlapping(d.as_ptr(), d_rows.add(i * padded), dim);
        }
        let q: [*const f32; NQ] = std::array::from_fn(|i| q_rows.add(i * padded).cast_const());
        let d: [*const f32; NQ] = std::array::from_fn(|i| d_rows.add(i * padded).cast_const());
        let parts = [(prompt_blocks.clone(), 0), (own_blocks.clone(), own_at)];
        for ((range, at), side) in parts.iter().zip([&*prompt, &*own]) {
            let to = std::array::from_fn(|i| p.add(i * stride + at));
            score_blocks_of::<S, NV, NQ>(&one_head, &side.forward, range.clone(), 0, q, to);
            let to = std::array::from_fn(|i| dp.add(i * stride + at));
            score_blocks_of::<S, NV, NQ>(&one_head, &side.turned, range.clone(), 0, d, to);
        }
        let scale = heads.scale();
        for (i, one) in ones.iter().enumerate() {
            let (p, dp) = (p.add(i * stride), dp.add(i * stride));
            let parts = [
                (seen(one).prompt.clone(), prompt_blocks.start, p, prompt_blocks.len()),
                (seen(one).own.clone(), own_blocks.start, p.add(own_at), own_blocks.len()),
            ];
            let rest = S::splat(softmax::<S, NV>(scale, &parts));
            let mut mean = S::zero();
            for at in (0..stride).step_by(S::LANES) {
                let probability = S::mul(S::load(p.add(at)), rest);
                S::store(p.add(at), probability);
                mean = S::fma(probability, S::load(dp.add(at)), mean);
            }
            let mean = S::splat(S::sum(mean));
            for at in (0..stride).step_by(S::LANES) {
                let ds = S::mul(S::load(p.add(at)), S::sub(S::load(dp.add(at)), mean));
                S::store(dp.add(at), S::mul(ds, S::splat(scale)));
            }
        }
        for column in (0..padded).step_by(BLOCK) {
            let place = Place { heads: &one_head, kv_head: 0, column };
            let mut acc = [[S::zero(); NV]; NQ];
            for ((range, at), side) in parts.iter().zip([&*prompt, &*own]) {
                let ds = std::array::from_fn(|i| dp.add(i * stride + at).cast_const());
                weigh::<S, NV, NQ>(&place, &side.turned, range, ds, &mut acc);
            }
            for (i, (token, head)) in ones.iter().enumerate() {
                let mut values = [0f32; BLOCK];
                for (v, acc) in acc[i].iter().enumerate() {
                    S::store(values.as_mut_ptr().add(v * S::LANES), *acc);
                }
                let width = (dim - column).min(BLOCK);
                let begin = token * heads.width() + head * dim + column;
                d_qkv.part(begin..begin + width).copy_from_slice(&values[..width]);
            }
            for ((range, at), side) in parts.iter().zip([&mut *prompt, &mut *own]) {
                let length = side.forward.len();
                let from = |base: *mut f32| std::array::from_fn(|i| base.add(i * stride + at).cast_const());
                let rows = |rows: [*const f32; NQ]| rows.map(|row| row.add(column));
                spread::<S, NV, NQ>(range, length, padded, from(p), rows(d), side.d_values.as_mut_ptr().add(column));
                spread::<S, NV, NQ>(range, length, padded, from(dp), rows(q), side.d_keys.as_mut_ptr().add(column));
            }
        }
    }
}

/// to[position] += Σ over queries weight·row, for `NV` vectors of each position of some blocks.
#[inline(always)]
unsafe fn spread<S: Simd, const NV: usize, const NQ: usize>(
    range: &Range<usize>,
    length: usize,
    stride: usize,
    weights: [*const f32; NQ],
    rows: [*const f32; NQ],
    to: *mut f32,
) {
    unsafe {
        let mut values = [[S::zero(); NV]; NQ];
        for (i, values) in values.iter_mut().enumerate() {
            for (v, value) in values.iter_mut().enumerate() {
                *value = S::load(rows[i].add(v * S::LANES));
            }
        }
        let begin = range.start * BLOCK;
        for position in begin..(range.end * BLOCK).min(length) {
            let to = to.add(position * stride);
            let weights: [S::V; NQ] = std::array::from_fn(|i| S::splat(*weights[i].add(position - begin)));
            for v in 0..NV {
                let to = to.add(v * S::LANES);
                let mut sum = S::load(to);
                for i in 0..NQ {
                    sum = S::fma(weights[i], values[i][v], sum);
                }
                S::store(to, sum);
            }
        }
    }
}
