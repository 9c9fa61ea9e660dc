//! The forward pass of attention, for queries that share a prompt.

use std::cell::RefCell;
use std::ops::Range;

use super::super::floats::Floats;
use super::super::isa::Isa;
use super::super::rows::take_turns;
use super::super::simd::{self, Portable, Simd};
use super::super::threads::Threads;
use super::tile::{Lines, by_queries, cap, clear, hide, scores, weigh};
use super::{BLOCK, Heads, Segment, Visible, blocks, intersection, union};

/// Number of blocks in a chunk, chosen such that one head's keys and values of a chunk stay in the second-level cache.
const CHUNK: usize = 16;
/// Number of query heads that read the keys together.
const QUERIES_AT_ONCE: usize = 64;

/// The query heads of one token, with what they attend to.
#[derive(Debug)]
pub struct Query<'a> {
    /// The row `[q heads | k heads | v heads]` of the token; only the query heads are read.
    pub qkv: &'a [f32],
    /// Keys and values of the token's own completion; empty for a token of the prompt.
    pub own: &'a Segment,
    /// The positions that the token attends to.
    pub visible: Visible,
    /// The attention output of the token, one slice per query head.
    pub out: &'a mut [f32],
}

/// Queries of several tokens that share a prompt.
#[derive(Debug)]
pub struct Batch<'a, 'b> {
    /// The prompt's keys and values.
    pub prompt: &'a Segment,
    /// The queries that attend to this prompt.
    pub queries: &'b mut [Query<'a>],
}

/// A thread's buffers for a tile of queries.
#[derive(Debug, Default)]
struct Scratch {
    /// Softmax probabilities of a tile of queries and a chunk of positions, `[query][position]`.
    probabilities: Floats,
    /// Weighted sums of the values before division by the softmax sum, `[query][padded head dimension]`.
    outputs: Floats,
    /// Sums of the softmax, one per vector lane: `[query][16]`.
    sums: Floats,
    /// Largest attention score of each query so far.
    largest: Vec<f32>,
    /// Queries in contiguous memory, `[query][padded]`.
    inputs: Floats,
    /// Tokens of the current call; empty between calls.
    tokens: Vec<Token>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

/// The addresses of one token's query, keys and output, with checked bounds.
#[derive(Clone, Debug)]
pub(super) struct Token {
    pub q: *const f32,
    pub own: *const Segment,
    pub visible: Visible,
    pub out: *mut f32,
    /// Destination of the largest score (scaled, negated) and 1 / Σ for each query head; null if not needed.
    pub softmax: *mut f32,
}

// Safety: each token's pointers are passed to a thread together with the one head that this thread may write.
unsafe impl Send for Token {}
unsafe impl Sync for Token {}

fn token(heads: &Heads, prompt: &Segment, query: &mut Query<'_>) -> Token {
    let Query { qkv, own, visible, out } = query;
    assert!(prompt.has(&visible.prompt) && own.has(&visible.own), "a query attends to missing positions");
    assert!(!visible.prompt.is_empty() || !visible.own.is_empty(), "a query attends to no position");
    assert!(qkv.len() >= heads.q_width() && out.len() >= heads.q_width());
    let (q, out) = (qkv.as_ptr(), out.as_mut_ptr());
    Token { q, own: *own, visible: visible.clone(), out, softmax: std::ptr::null_mut() }
}

/// Attention of queries that share a prompt, on the calling thread, with its own buffers.
pub fn attend<'a>(isa: Isa, heads: &Heads, prompt: &Segment, queries: impl Iterator<Item = Query<'a>>) {
    SCRATCH.with_borrow_mut(|scratch| {
        let mut tokens = std::mem::take(&mut scratch.tokens);
        tokens.extend(queries.map(|mut query| token(heads, prompt, &mut query)));
        for kv_head in 0..heads.num_kv_heads {
            // Safety: the bounds were checked when the tokens were created, and the memory of their
            // queries lives for 'a.
            unsafe { attend_head(isa, heads, prompt, &tokens, kv_head, scratch) };
        }
        tokens.clear();
        scratch.tokens = tokens;
    });
}

/// Attention of several batches with all threads, as in a decode step.
pub fn attend_batches(threads: &Threads, isa: Isa, heads: &Heads, batches: &mut [Batch<'_, '_>]) {
    let mut tokens = Vec::new();
    let mut parts = Vec::new();
    let mut work = 0;
    let queries: usize = batches.iter().map(|batch| batch.queries.len()).sum();
    // Split into enough parts for all threads, but none smaller than a tile of queries.
    let wanted = (queries * heads.num_kv_heads).div_ceil(4 * threads.count());
    let at_once = wanted.max(8usize.div_ceil(heads.group_size()));
    for (index, batch) in batches.iter_mut().enumerate() {
        let first = tokens.len();
        for query in batch.queries.iter_mut() {
            work += (query.visible.prompt.len() + query.visible.own.len()) * heads.q_width() / 4;
            tokens.push(token(heads, batch.prompt, query));
        }
        for begin in (first..tokens.len()).step_by(at_once) {
            parts.push((index, begin..(begin + at_once).min(tokens.len())));
        }
    }
    let prompts: Vec<&Segment> = batches.iter().map(|batch| batch.prompt).collect();
    take_turns(threads, parts.len() * heads.num_kv_heads, work, |index| {
        let (batch, range) = &parts[index / heads.num_kv_heads];
        let kv_head = index % heads.num_kv_heads;
        SCRATCH.with_borrow_mut(|scratch| {
            // Safety: the bounds were checked when the tokens were created, and each token's head belongs to one part.
            unsafe { attend_head(isa, heads, prompts[*batch], &tokens[range.clone()], kv_head, scratch) };
        });
    });
}

/// Runs [`attend_head`] with the thread's own buffers.
pub(super) unsafe fn attend_head_here(isa: Isa, heads: &Heads, prompt: &Segment, tokens: &[Token], head: usize) {
    // Safety: the caller guarantees what this `unsafe fn` requires.
    SCRATCH.with_borrow_mut(|scratch| unsafe { attend_head(isa, heads, prompt, tokens, head, scratch) });
}

/// Computes the query heads of several tokens that share one key head.
///
/// # Safety
/// The segments hold the positions that the tokens attend to, the tokens' pointers are valid for the heads' widths, and
/// no other thread writes these heads.
unsafe fn attend_head(
    isa: Isa,
    heads: &Heads,
    prompt: &Segment,
    tokens: &[Token],
    kv_head: usize,
    scratch: &mut Scratch,
) {
    assert!(isa.is_available(), "the instruction set {isa} does not run on this machine");
    let job = Job { heads, scale: heads.scale, prompt, kv_head };
    for tokens in tokens.chunks((QUERIES_AT_ONCE / heads.group_size()).max(1)) {
        // Safety: the machine supports the instruction set; the rest is guaranteed by the caller.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            if isa >= Isa::Avx512 {
                attend_avx512(&job, tokens, scratch);
                continue;
            }
            #[cfg(target_arch = "x86_64")]
            if isa >= Isa::Avx2 {
                attend_avx2(&job, tokens, scratch);
                continue;
            }
            attend_with::<Portable, 2, 4>(&job, tokens, scratch);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn attend_avx512(job: &Job<'_>, tokens: &[Token], scratch: &mut Scratch) {
    unsafe { attend_with::<simd::Avx512, 8, 16>(job, tokens, scratch) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn attend_avx2(job: &Job<'_>, tokens: &[Token], scratch: &mut Scratch) {
    unsafe { attend_with::<simd::Avx2, 4, 8>(job, tokens, scratch) }
}

struct Job<'a> {
    heads: &'a Heads,
    scale: f32,
    prompt: &'a Segment,
    kv_head: usize,
}

/// Processes the prompt's chunks of positions for all queries, then each run of queries with its own completion.
#[inline(always)]
unsafe fn attend_with<S: Simd, const TILE: usize, const ACC: usize>(
    job: &Job<'_>,
    tokens: &[Token],
    scratch: &mut Scratch,
) {
    let heads = job.heads;
    let (per_token, dim, padded) = (heads.group_size(), heads.head_dim, heads.padded());
    let count = tokens.len() * per_token;
    scratch.probabilities.resize(TILE * CHUNK * BLOCK);
    scratch.inputs.zeros(count * padded);
    scratch.outputs.zeros(count * padded);
    scratch.sums.zeros(count * BLOCK);
    scratch.largest.clear();
    scratch.largest.resize(count, f32::NEG_INFINITY);
    let first_head = job.kv_head * per_token;
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        for (token, to) in tokens.iter().zip(scratch.inputs.chunks_exact_mut(per_token * padded)) {
            for (head, to) in to.chunks_exact_mut(padded).enumerate() {
                std::ptr::copy_nonoverlapping(token.q.add((first_head + head) * dim), to.as_mut_ptr(), dim);
            }
        }
        segment_with::<S, TILE, ACC>(job, tokens, 0, job.prompt, |visible| &visible.prompt, scratch);
        let mut first = 0;
        for run in tokens.chunk_by(|a, b| std::ptr::eq(a.own, b.own)) {
            segment_with::<S, TILE, ACC>(job, run, first, &*run[0].own, |visible| &visible.own, scratch);
            first += run.len() * per_token;
        }
        for (index, token) in tokens.iter().enumerate() {
            for head in 0..per_token {
                let query = index * per_token + head;
                let mut sum = S::zero();
                for at in (0..BLOCK).step_by(S::LANES) {
                    sum = S::add(sum, S::load(scratch.sums.as_ptr().add(query * BLOCK + at)));
                }
                let rest = 1.0 / S::sum(sum);
                let from = scratch.outputs.as_mut_ptr().add(query * padded);
                for at in (0..padded).step_by(S::LANES) {
                    S::store(from.add(at), S::mul(S::load(from.add(at)), S::splat(rest)));
                }
                let head = first_head + head;
                std::ptr::copy_nonoverlapping(from.cast_const(), token.out.add(head * dim), dim);
                if !token.softmax.is_null() {
                    *token.softmax.add(2 * head) = -scratch.largest[query] * job.scale;
                    *token.softmax.add(2 * head + 1) = rest;
                }
            }
        }
    }
}

/// Processes one segment of keys and values, chunk by chunk, for the queries from index `first` on.
#[inline(always)]
unsafe fn segment_with<S: Simd, const TILE: usize, const ACC: usize>(
    job: &Job<'_>,
    tokens: &[Token],
    first: usize,
    segment: &Segment,
    seen: impl Fn(&Visible) -> &Range<usize> + Copy,
    scratch: &mut Scratch,
) {
    let per_token = job.heads.group_size();
    let all = blocks(&union(tokens.iter().map(|token| seen(&token.visible).clone())));
    for chunk in all.start / CHUNK..all.end.div_ceil(CHUNK) {
        let chunk = intersection(&(chunk * CHUNK..(chunk + 1) * CHUNK), &all);
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe {
            by_queries!(tokens.len() * per_token, TILE, |at, NQ| {
                let of_tile = &tokens[at / per_token..(at + NQ).div_ceil(per_token)];
                let of_tile = blocks(&union(of_tile.iter().map(|token| seen(&token.visible).clone())));
                let blocks = intersection(&chunk, &of_tile);
                if !blocks.is_empty() {
                    let seen = |i: usize| seen(&tokens[(at + i) / per_token].visible);
                    chunk_with::<S, NQ, ACC>(job, segment, blocks, seen, first + at, scratch);
                }
            });
        }
    }
}

/// Processes the blocks of a chunk of positions for a tile of queries from index `first` on.
#[inline(always)]
unsafe fn chunk_with<'a, S: Simd, const NQ: usize, const ACC: usize>(
    job: &Job<'_>,
    segment: &Segment,
    blocks: Range<usize>,
    seen: impl Fn(usize) -> &'a Range<usize>,
    first: usize,
    scratch: &mut Scratch,
) {
    let heads = job.heads;
    let padded = heads.padded();
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        let p = Lines { first: scratch.probabilities.as_mut_ptr(), stride: CHUNK * BLOCK };
        let q = Lines { first: scratch.inputs.as_ptr(), stride: padded }.from(first);
        let keys = segment.keys(heads, job.kv_head, blocks.start);
        scores::<S, NQ, ACC>(heads.head_dim, keys, blocks.len(), q, p);
        if let Some(softcap) = heads.softcap {
            for i in 0..NQ {
                cap::<S>(p.from(i).first, blocks.len() * BLOCK, softcap / job.scale);
            }
        }
        let mut alpha = [1.0; NQ];
        for (i, alpha) in alpha.iter_mut().enumerate() {
            let positions = blocks.start * BLOCK..blocks.end * BLOCK;
            let here = intersection(seen(i), &positions);
            let row = std::slice::from_raw_parts_mut(p.from(i).first, positions.len());
            if here.is_empty() {
                row.fill(0.0);
                continue;
            }
            let here = here.start - positions.start..here.end - positions.start;
            let query = first + i;
            let sums = scratch.sums.as_mut_ptr().add(query * BLOCK);
            *alpha = soften::<S>(row, &here, job.scale, &mut scratch.largest[query], sums);
        }
        let values = segment.values(heads, job.kv_head, blocks.start);
        let acc = Lines { first: scratch.outputs.as_mut_ptr(), stride: padded }.from(first);
        weigh::<S, NQ, ACC>(padded, values, blocks.len(), p.read(), &alpha, acc);
    }
}

/// Converts scores to exp(scale·(score − largest)), with 0 for positions outside of the window, and adds them to
/// `sums`, lane by lane. Returns the factor to multiply earlier sums with if the largest score has changed.
#[inline(always)]
unsafe fn soften<S: Simd>(row: &mut [f32], seen: &Range<usize>, scale: f32, largest: &mut f32, sums: *mut f32) -> f32 {
    let blocks = blocks(seen);
    row[..blocks.start * BLOCK].fill(0.0);
    row[blocks.end * BLOCK..].fill(0.0);
    let lanes = |block: usize| {
        let first = block * BLOCK;
        (seen.start.saturating_sub(first), (seen.end - first).min(BLOCK))
    };
    // Safety: the caller guarantees what this `unsafe fn` requires.
    unsafe {
        let p = row.as_mut_ptr();
        for block in [blocks.start, blocks.end - 1] {
            let (begin, end) = lanes(block);
            if begin > 0 || end < BLOCK {
                hide::<S>(p.add(block * BLOCK), begin, end);
            }
        }
        let mut top = S::splat(f32::NEG_INFINITY);
        for at in (blocks.start * BLOCK..blocks.end * BLOCK).step_by(S::LANES) {
            top = S::max(S::load(p.add(at)), top);
        }
        let before = *largest;
        *largest = before.max(S::largest(top));
        let mut alpha = 1.0;
        if *largest != before {
            alpha = S::first(simd::exp::<S>(S::splat((before - *largest) * scale)));
            for at in (0..BLOCK).step_by(S::LANES) {
                S::store(sums.add(at), S::mul(S::load(sums.add(at)), S::splat(alpha)));
            }
        }
        let (shift, scale) = (S::splat(-*largest * scale), S::splat(scale));
        // A block has 16 positions, so at most two vectors.
        let mut sum = [S::zero(); 2];
        for (v, sum) in sum.iter_mut().enumerate().take(BLOCK / S::LANES) {
            *sum = S::load(sums.add(v * S::LANES));
        }
        for block in blocks {
            let p = p.add(block * BLOCK);
            for at in (0..BLOCK).step_by(S::LANES) {
                S::store(p.add(at), simd::exp::<S>(S::fma(S::load(p.add(at)), scale, shift)));
            }
            let (begin, end) = lanes(block);
            if begin > 0 || end < BLOCK {
                clear::<S>(p, begin, end);
            }
            for (v, sum) in sum.iter_mut().enumerate().take(BLOCK / S::LANES) {
                *sum = S::add(*sum, S::load(p.add(v * S::LANES)));
            }
        }
        for (v, sum) in sum.iter().enumerate().take(BLOCK / S::LANES) {
            S::store(sums.add(v * S::LANES), *sum);
        }
        alpha
    }
}
