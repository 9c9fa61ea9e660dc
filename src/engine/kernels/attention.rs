//! Causal attention with grouped-query heads, sliding windows and a prompt that several completions share: decode,
//! prefill and training by the same arithmetic, so that a query gives the same bits in all of them.
//!
//! Keys and values lie in segments of blocks of 16 positions counted from the segment's own start. A query sees a range of
//! the prompt's segment and a range of its completion's. Its scores are chains over the head's width; its softmax sums
//! lane by lane over the blocks, the prompt's first; its output is a chain over the positions.

mod backward;

use std::ops::Range;

pub use backward::{Backward, attend_backward};

use super::isa::Isa;
use super::simd::{self, Portable, Simd};

/// Positions in a block.
pub const BLOCK: usize = 16;

/// Sizes of attention. A row of `qkv` is `[q heads | k heads | v heads]`, each head `head_dim` wide.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl Heads {
    /// Width of all query heads.
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key heads.
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Width of a row of `qkv`.
    pub fn width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }

    /// Query heads a key head serves.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Dot products are multiplied by this.
    pub fn scale(&self) -> f32 {
        (self.head_dim as f32).powf(-0.5)
    }

    /// The sizes of one key head alone.
    fn of_one(&self) -> Heads {
        Heads { num_heads: 1, num_kv_heads: 1, head_dim: self.head_dim }
    }

    /// A head's width in whole vectors.
    fn padded(&self) -> usize {
        self.head_dim.div_ceil(BLOCK) * BLOCK
    }
}

/// Keys and values of some positions in one layer.
#[derive(Clone, Debug, Default)]
pub struct Segment {
    len: usize,
    /// `[block][k head][head_dim][16]`
    keys: Vec<f32>,
    /// `[position][v head][padded head_dim]`
    values: Vec<f32>,
}

impl Segment {
    /// Positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions for which there is memory.
    pub fn room(&self) -> usize {
        match self.values.len().checked_div(self.len) {
            Some(width) => self.values.capacity() / width.max(1),
            None => 0,
        }
    }

    /// Make room for so many more positions.
    pub fn reserve(&mut self, heads: &Heads, positions: usize) {
        let blocks = (self.len + positions).div_ceil(BLOCK);
        self.keys.reserve_exact((blocks * BLOCK * heads.kv_width()).saturating_sub(self.keys.len()));
        self.values.reserve_exact(positions * heads.num_kv_heads * heads.padded());
    }

    /// Append the key and value heads of one row of `qkv`.
    pub fn push(&mut self, heads: &Heads, qkv: &[f32]) {
        let (keys, values) = qkv[heads.q_width()..heads.width()].split_at(heads.kv_width());
        self.push_heads(heads, keys, values);
    }

    fn push_heads(&mut self, heads: &Heads, keys: &[f32], values: &[f32]) {
        let (block, lane) = (self.len / BLOCK, self.len % BLOCK);
        if lane == 0 {
            self.keys.resize((block + 1) * heads.kv_width() * BLOCK, 0.0);
        }
        let at = block * heads.kv_width() * BLOCK + lane;
        for (slot, key) in self.keys[at..].iter_mut().step_by(BLOCK).zip(keys) {
            *slot = *key;
        }
        for head in values.chunks_exact(heads.head_dim) {
            self.values.extend_from_slice(head);
            self.values.resize(self.values.len() + heads.padded() - heads.head_dim, 0.0);
        }
        self.len += 1;
    }

    fn block(&self, heads: &Heads, block: usize, head: usize) -> *const f32 {
        let at = (block * heads.num_kv_heads + head) * heads.head_dim * BLOCK;
        self.keys[at..at + heads.head_dim * BLOCK].as_ptr()
    }

    fn value(&self, heads: &Heads, position: usize, head: usize) -> *const f32 {
        let at = (position * heads.num_kv_heads + head) * heads.padded();
        self.values[at..at + heads.padded()].as_ptr()
    }
}

/// What a token may look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visible {
    /// Positions of the prompt's segment.
    pub prompt: Range<usize>,
    /// Positions of its own segment; for a token of the prompt none.
    pub own: Range<usize>,
}

/// One token's query.
#[derive(Debug)]
pub struct Query<'a> {
    /// `[q heads | …]`
    pub qkv: &'a [f32],
    /// Its completion's segment; for a token of the prompt an empty one.
    pub own: &'a Segment,
    /// What it sees.
    pub visible: Visible,
    /// `[q heads]`
    pub out: &'a mut [f32],
}

/// Buffers that grow to what the longest query needs.
#[derive(Debug, Default)]
pub struct Scratch {
    /// `[query][prompt blocks | own blocks][16]`
    probabilities: Vec<f32>,
}

/// Attention of queries that share a prompt.
pub fn attend(isa: Isa, heads: &Heads, prompt: &Segment, queries: &mut [Query<'_>], scratch: &mut Scratch) {
    assert!(isa.is_available(), "{isa} does not run on this machine");
    for query in queries.iter() {
        assert!(query.visible.prompt.end <= prompt.len() && query.visible.own.end <= query.own.len());
        assert!(query.qkv.len() >= heads.q_width() && query.out.len() >= heads.q_width());
        assert!(!query.visible.prompt.is_empty() || !query.visible.own.is_empty(), "a query sees nothing");
    }
    // Safety: the rung is available, and the asserts above hold the bounds.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => attend_avx512(heads, prompt, queries, scratch),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => attend_avx2(heads, prompt, queries, scratch),
            _ => attend_with::<Portable, 2, 4>(heads, prompt, queries, scratch),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn attend_avx512(heads: &Heads, prompt: &Segment, queries: &mut [Query<'_>], scratch: &mut Scratch) {
    unsafe { attend_with::<simd::Avx512, 1, 2>(heads, prompt, queries, scratch) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn attend_avx2(heads: &Heads, prompt: &Segment, queries: &mut [Query<'_>], scratch: &mut Scratch) {
    unsafe { attend_with::<simd::Avx2, 2, 4>(heads, prompt, queries, scratch) }
}

/// Queries (of any head of a key head's group) that are computed together.
const TILE: usize = 4;

/// One query head of one token.
#[derive(Clone, Copy)]
struct One {
    token: usize,
    head: usize,
}

/// `NV` vectors make a block, `WIDE` two of them.
#[inline(always)]
unsafe fn attend_with<S: Simd, const NV: usize, const WIDE: usize>(
    heads: &Heads,
    prompt: &Segment,
    queries: &mut [Query<'_>],
    scratch: &mut Scratch,
) {
    let group = heads.group_size();
    for kv_head in 0..heads.num_kv_heads {
        let total = queries.len() * group;
        let mut first = 0;
        while first < total {
            let count = (total - first).min(TILE);
            let one = |i: usize| One { token: (first + i) / group, head: kv_head * group + (first + i) % group };
            // Safety: the caller's.
            unsafe {
                match count {
                    1 => tile::<S, NV, WIDE, 1>(heads, prompt, queries, kv_head, std::array::from_fn(one), scratch),
                    2 => tile::<S, NV, WIDE, 2>(heads, prompt, queries, kv_head, std::array::from_fn(one), scratch),
                    3 => tile::<S, NV, WIDE, 3>(heads, prompt, queries, kv_head, std::array::from_fn(one), scratch),
                    _ => tile::<S, NV, WIDE, 4>(heads, prompt, queries, kv_head, std::array::from_fn(one), scratch),
                }
            }
            first += count;
        }
    }
}

fn union(ranges: impl Iterator<Item = Range<usize>>) -> Range<usize> {
    let mut all = usize::MAX..0;
    for range in ranges.filter(|range| !range.is_empty()) {
        all = all.start.min(range.start)..all.end.max(range.end);
    }
    if all.start >= all.end { 0..0 } else { all }
}

fn blocks(positions: &Range<usize>) -> Range<usize> {
    positions.start / BLOCK..positions.end.div_ceil(BLOCK)
}

#[inline(always)]
unsafe fn tile<S: Simd, const NV: usize, const WIDE: usize, const NQ: usize>(
    heads: &Heads,
    prompt: &Segment,
    queries: &mut [Query<'_>],
    kv_head: usize,
    ones: [One; NQ],
    scratch: &mut Scratch,
) {
    unsafe {
        let visible = |one: &One| &queries[one.token].visible;
        let prompt_blocks = blocks(&union(ones.iter().map(|one| visible(one).prompt.clone())));
        let own_blocks = blocks(&union(ones.iter().map(|one| visible(one).own.clone())));
        let stride = (prompt_blocks.len() + own_blocks.len()) * BLOCK;
        if scratch.probabilities.len() < NQ * stride {
            scratch.probabilities.resize(NQ * stride, 0.0);
        }
        let p = scratch.probabilities.as_mut_ptr();
        let own_at = prompt_blocks.len() * BLOCK;
        let q: [*const f32; NQ] =
            std::array::from_fn(|i| queries[ones[i].token].qkv.as_ptr().add(ones[i].head * heads.head_dim));
        let shared = ones.iter().all(|one| std::ptr::eq(queries[one.token].own, queries[ones[0].token].own));

        score_blocks_of::<S, NV, NQ>(
            heads,
            prompt,
            prompt_blocks.clone(),
            kv_head,
            q,
            std::array::from_fn(|i| p.add(i * stride)),
        );
        if shared {
            let to = std::array::from_fn(|i| p.add(i * stride + own_at));
            score_blocks_of::<S, NV, NQ>(heads, queries[ones[0].token].own, own_blocks.clone(), kv_head, q, to);
        } else {
            for (i, one) in ones.iter().enumerate() {
                let query = &queries[one.token];
                let to = p.add(i * stride + own_at + (blocks(&query.visible.own).start - own_blocks.start) * BLOCK);
                score_blocks_of::<S, NV, 1>(heads, query.own, blocks(&query.visible.own), kv_head, [q[i]], [to]);
            }
        }
        let mut rest: [f32; NQ] = [0.0; NQ];
        for (i, one) in ones.iter().enumerate() {
            let Visible { prompt, own } = &queries[one.token].visible;
            let parts = [
                (prompt.clone(), prompt_blocks.start, p.add(i * stride), prompt_blocks.len()),
                (own.clone(), own_blocks.start, p.add(i * stride + own_at), own_blocks.len()),
            ];
            rest[i] = softmax::<S, NV>(heads.scale(), &parts);
        }
        let weights = Weights { own_at, stride, shared, prompt_blocks, own_blocks, rest };
        let padded = heads.padded();
        for column in (0..padded - padded % (2 * BLOCK)).step_by(2 * BLOCK) {
            outputs::<S, WIDE, NQ>(heads, prompt, queries, kv_head, &ones, column, p, &weights);
        }
        if padded % (2 * BLOCK) != 0 {
            outputs::<S, NV, NQ>(heads, prompt, queries, kv_head, &ones, padded - BLOCK, p, &weights);
        }
    }
}

/// The probabilities of a tile.
struct Weights<const NQ: usize> {
    /// Where those of the own segments begin.
    own_at: usize,
    /// From one query's to the next.
    stride: usize,
    /// All queries have the same own segment.
    shared: bool,
    prompt_blocks: Range<usize>,
    own_blocks: Range<usize>,
    /// What makes their sum 1.
    rest: [f32; NQ],
}

/// `NV` vectors of the outputs of a tile, from `column` on.
#[expect(clippy::too_many_arguments, reason = "the end of its only caller, compiled for two widths")]
#[inline(always)]
unsafe fn outputs<S: Simd, const NV: usize, const NQ: usize>(
    heads: &Heads,
    prompt: &Segment,
    queries: &mut [Query<'_>],
    kv_head: usize,
    ones: &[One; NQ],
    column: usize,
    p: *const f32,
    weights: &Weights<NQ>,
) {
    unsafe {
        let Weights { own_at, stride, shared, prompt_blocks, own_blocks, rest } = weights;
        let from = |i: usize| p.add(i * stride);
        let place = Place { heads, kv_head, column };
        let mut acc = [[S::zero(); NV]; NQ];
        weigh::<S, NV, NQ>(&place, prompt, prompt_blocks, std::array::from_fn(from), &mut acc);
        if *shared {
            let own = queries[ones[0].token].own;
            weigh::<S, NV, NQ>(&place, own, own_blocks, std::array::from_fn(|i| from(i).add(*own_at)), &mut acc);
        } else {
            for (i, one) in ones.iter().enumerate() {
                let query = &queries[one.token];
                let range = blocks(&query.visible.own);
                let from = from(i).add(own_at + (range.start - own_blocks.start) * BLOCK);
                let mut alone = [acc[i]];
                weigh::<S, NV, 1>(&place, query.own, &range, [from], &mut alone);
                acc[i] = alone[0];
            }
        }
        for (i, one) in ones.iter().enumerate() {
            let mut values = [0f32; 2 * BLOCK];
            for (v, acc) in acc[i].iter().enumerate() {
                S::store(values.as_mut_ptr().add(v * S::LANES), S::mul(*acc, S::splat(rest[i])));
            }
            let width = (heads.head_dim - column).min(NV * S::LANES);
            let out = &mut queries[one.token].out[one.head * heads.head_dim + column..][..width];
            out.copy_from_slice(&values[..width]);
        }
    }
}

/// Unscaled dot products of queries with the keys of some blocks.
#[inline(always)]
unsafe fn score_blocks_of<S: Simd, const NV: usize, const NQ: usize>(
    heads: &Heads,
    segment: &Segment,
    range: Range<usize>,
    kv_head: usize,
    q: [*const f32; NQ],
    to: [*mut f32; NQ],
) {
    unsafe {
        let mut done = 0;
        while done < range.len() {
            let at = range.start + done;
            // Several blocks at once where there are: a chain alone waits for itself.
            if range.len() - done >= 4 {
                let keys = std::array::from_fn(|b| segment.block(heads, at + b, kv_head));
                score_blocks::<S, NV, NQ, 4>(heads.head_dim, keys, q, to.map(|to| to.add(done * BLOCK)));
                done += 4;
            } else {
                score_blocks::<S, NV, NQ, 1>(
                    heads.head_dim,
                    [segment.block(heads, at, kv_head)],
                    q,
                    to.map(|to| to.add(done * BLOCK)),
                );
                done += 1;
            }
        }
    }
}

#[inline(always)]
unsafe fn score_blocks<S: Simd, const NV: usize, const NQ: usize, const NB: usize>(
    head_dim: usize,
    keys: [*const f32; NB],
    q: [*const f32; NQ],
    to: [*mut f32; NQ],
) {
    unsafe {
        let mut acc = [[[S::zero(); NV]; NB]; NQ];
        for d in 0..head_dim {
            let mut key = [[S::zero(); NV]; NB];
            for (b, key) in key.iter_mut().enumerate() {
                for (v, key) in key.iter_mut().enumerate() {
                    *key = S::load(keys[b].add(d * BLOCK + v * S::LANES));
                }
            }
            for i in 0..NQ {
                let q = S::splat(*q[i].add(d));
                for b in 0..NB {
                    for v in 0..NV {
                        acc[i][b][v] = S::fma(q, key[b][v], acc[i][b][v]);
                    }
                }
            }
        }
        for i in 0..NQ {
            for b in 0..NB {
                for v in 0..NV {
                    S::store(to[i].add(b * BLOCK + v * S::LANES), acc[i][b][v]);
                }
            }
        }
    }
}

/// Scores → exp(scale·(score − largest)), 0 where a position is not seen; returns 1 / their sum.
#[inline(always)]
unsafe fn softmax<S: Simd, const NV: usize>(scale: f32, parts: &[(Range<usize>, usize, *mut f32, usize); 2]) -> f32 {
    unsafe {
        let mut largest = f32::NEG_INFINITY;
        for (seen, first, p, _) in parts {
            for position in seen.clone() {
                largest = largest.max(*p.add(position - first * BLOCK));
            }
        }
        let (shift, scale) = (S::splat(-largest * scale), S::splat(scale));
        let mut sum = S::zero();
        for (seen, first, p, count) in parts {
            for block in 0..*count {
                let begin = (first + block) * BLOCK;
                let p = p.add(block * BLOCK);
                let whole = seen.start <= begin && begin + BLOCK <= seen.end;
                if !whole && (seen.end <= begin || begin + BLOCK <= seen.start) {
                    // Not seen at all: another query of the tile sees it.
                    std::slice::from_raw_parts_mut(p, BLOCK).fill(0.0);
                    continue;
                }
                for v in 0..NV {
                    let p = p.add(v * S::LANES);
                    S::store(p, simd::exp::<S>(S::fma(S::load(p), scale, shift)));
                }
                if !whole {
                    for lane in (0..BLOCK).filter(|lane| !seen.contains(&(begin + lane))) {
                        *p.add(lane) = 0.0;
                    }
                }
                for v in 0..NV {
                    sum = S::add(sum, S::load(p.add(v * S::LANES)));
                }
            }
        }
        1.0 / S::sum(sum)
    }
}

/// Which columns of which head's values.
struct Place<'a> {
    heads: &'a Heads,
    kv_head: usize,
    column: usize,
}

/// acc += Σ over the positions of some blocks p·value.
#[inline(always)]
unsafe fn weigh<S: Simd, const NV: usize, const NQ: usize>(
    place: &Place<'_>,
    segment: &Segment,
    range: &Range<usize>,
    p: [*const f32; NQ],
    acc: &mut [[S::V; NV]; NQ],
) {
    let begin = range.start * BLOCK;
    let end = (range.end * BLOCK).min(segment.len());
    if begin >= end {
        return;
    }
    unsafe {
        let stride = place.heads.num_kv_heads * place.heads.padded();
        let mut value = segment.value(place.heads, begin, place.kv_head).add(place.column);
        for position in 0..end - begin {
            let mut values = [S::zero(); NV];
            for (v, to) in values.iter_mut().enumerate() {
                *to = S::load(value.add(v * S::LANES));
            }
            for i in 0..NQ {
                let p = S::splat(*p[i].add(position));
                for v in 0..NV {
                    acc[i][v] = S::fma(p, values[v], acc[i][v]);
                }
            }
            value = value.wrapping_add(stride);
        }
    }
}
