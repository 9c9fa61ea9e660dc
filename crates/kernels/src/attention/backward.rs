//! The vector-Jacobian product of attention in a packed batch.
//!
//! A task owns the keys and values of one key head and one chunk of positions. It processes the queries that attend to
//! the chunk, in order, and their gradients are summed in that order. Before a task adds to the gradient of a block of
//! queries, it waits until the tasks of earlier chunks have added theirs. So no sum depends on the threads, and all
//! threads are busy even with a single long sequence.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::super::floats::Floats;
use super::super::isa::Isa;
use super::super::rows::take_turns;
use super::super::simd::{self, Portable, Simd};
use super::super::threads::{Shared, Threads};
use super::groups::{Part, parts};
use super::tile::{Blocks, Lines, by_queries, cap, clear, scores, spread, transpose, weigh};
use super::{BLOCK, Group, Heads, blocks, intersection, union};

/// Number of positions in a chunk of keys and values.
const CHUNK: usize = 128;
/// Number of query heads in a block, unless one key head serves more than that.
const QUERIES_AT_ONCE: usize = 32;

/// The input of [`attend_groups_backward`]: arguments and results of [`attend_groups`](super::attend_groups).
#[derive(Clone, Copy, Debug)]
pub struct Backward<'a> {
    /// The groups (prompts with their completions) of the batch, one after another.
    pub heads: &'a Heads,
    /// The groups of the batch, one after another.
    pub groups: &'a [Group],
    /// Attention window: the number of positions a token attends to, its own included.
    pub window: Option<usize>,
    /// Input of the forward pass `[tokens][width]`, after qk-norm and rotary embedding.
    pub qkv: &'a [f32],
    /// Output of the forward pass `[tokens][q_width]`.
    pub out: &'a [f32],
    /// Largest score and sum of each softmax in the forward pass, `[tokens][num_heads][2]`.
    pub softmax: &'a [f32],
    /// The gradient dL/dout of attention's output, `[tokens][q_width]`.
    pub d_out: &'a [f32],
}

/// Computes dL/dqkv into d_qkv `[tokens][width]`.
pub fn attend_groups_backward(threads: &Threads, isa: Isa, backward: &Backward<'_>, d_qkv: &mut [f32]) {
    let Backward { heads, groups, window, qkv, out, softmax, d_out } = *backward;
    assert!(isa.is_available(), "the instruction set {isa} does not run on this machine");
    let parts = parts(groups);
    let tokens: usize = parts.iter().map(|part| part.len).sum();
    assert!(
        qkv.len() == tokens * heads.width() && d_qkv.len() == qkv.len(),
        "the number of rows of q, k and v does not match the groups of sequences"
    );
    assert!(
        out.len() == tokens * heads.q_width() && d_out.len() == out.len(),
        "the number of attention outputs does not match the groups of sequences"
    );
    assert_eq!(
        softmax.len(),
        tokens * heads.num_heads * 2,
        "the number of softmax values does not match the groups of sequences"
    );
    let at_once = (QUERIES_AT_ONCE / heads.group_size()).max(1);
    let (mut chunks, mut blocks, mut work) = (Vec::new(), 0, 0);
    let first_block: Vec<usize> = parts
        .iter()
        .map(|part| {
            let first = blocks;
            blocks += part.len.div_ceil(at_once);
            first
        })
        .collect();
    for (index, part) in parts.iter().enumerate() {
        chunks.extend((0..part.len.div_ceil(CHUNK)).map(|chunk| (index, chunk)));
        let seen = part.len / 2 + if part.is_prompt { 0 } else { part.prompt_len };
        work += part.len * seen.min(window.unwrap_or(usize::MAX)) * heads.q_width() / 4;
    }
    let turns: Vec<AtomicU32> = (0..blocks * heads.num_kv_heads).map(|_| AtomicU32::new(0)).collect();
    let job = Job {
        backward,
        parts: &parts,
        first_block: &first_block,
        at_once,
        turns: &turns,
        has_panicked: AtomicBool::new(false),
        scale: heads.scale,
        d_qkv: Shared::new(d_qkv),
    };
    // Tasks start in the order of the chunks, so that a task waits only for tasks that have started.
    take_turns(threads, chunks.len() * heads.num_kv_heads, work, |index| {
        let (part, chunk) = chunks[index / heads.num_kv_heads];
        let task = Task { job: &job, part, chunk, kv_head: index % heads.num_kv_heads };
        let _watch = Watch(&job.has_panicked);
        SCRATCH.with_borrow_mut(|scratch| {
            // Safety: the machine supports the instruction set, and `attend_groups_backward` has checked the
            // lengths of all slices.
            unsafe {
                #[cfg(target_arch = "x86_64")]
                if isa >= Isa::Avx512 {
                    return chunk_avx512(&task, scratch);
                }
                #[cfg(target_arch = "x86_64")]
                if isa >= Isa::Avx2 {
                    return chunk_avx2(&task, scratch);
                }
                chunk_with::<Portable, 2, 4, 2>(&task, scratch);
            }
        });
    });
}

/// Sets a flag if its thread panics, so that other threads do not wait forever for that thread's task.
struct Watch<'a>(&'a AtomicBool);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

struct Job<'a> {
    backward: &'a Backward<'a>,
    parts: &'a [Part],
    /// Index of the first block of queries of each prompt or completion.
    first_block: &'a [usize],
    /// Number of tokens in a block of queries.
    at_once: usize,
    /// Number of chunks that have added to the gradient of each block of queries, `[block][kv head]`.
    turns: &'a [AtomicU32],
    has_panicked: AtomicBool,
    scale: f32,
    d_qkv: Shared<f32>,
}

/// A unit of work of the backward pass: one chunk of positions and one key head.
struct Task<'a> {
    job: &'a Job<'a>,
    part: usize,
    chunk: usize,
    kv_head: usize,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

/// A thread's buffers for a chunk of keys and values, and for a block of queries.
#[derive(Default)]
struct Scratch {
    /// Keys of the chunk in blocks, `[block][head_dim][16]`.
    keys_in_blocks: Floats,
    values_in_blocks: Floats,
    /// Keys of the chunk by position, `[position][padded]`.
    keys: Floats,
    d_keys: Floats,
    d_values: Floats,
    /// The queries of the block, `[query][padded]`.
    q: Floats,
    d_out: Floats,
    d_q: Floats,
    /// Probabilities of the softmax, `[query][CHUNK]`.
    p: Floats,
    ds: Floats,
}

impl Scratch {
    /// Fills all buffers with zeros and resizes them.
    fn reset(&mut self, heads: &Heads, positions: usize, queries: usize) {
        let (dim, padded) = (heads.head_dim, heads.padded());
        let Scratch { keys_in_blocks, values_in_blocks, keys, d_keys, d_values, q, d_out, d_q, p, ds } = self;
        for values in [keys_in_blocks, values_in_blocks] {
            values.zeros(positions * dim);
        }
        for values in [keys, d_keys, d_values] {
            values.zeros(positions * padded);
        }
        for values in [q, d_out, d_q] {
            values.zeros(queries * padded);
        }
        for values in [p, ds] {
            values.resize(queries * CHUNK);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn chunk_avx512(task: &Task<'_>, scratch: &mut Scratch) {
    unsafe { chunk_with::<simd::Avx512, 8, 16, 8>(task, scratch) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn chunk_avx2(task: &Task<'_>, scratch: &mut Scratch) {
    unsafe { chunk_with::<simd::Avx2, 4, 8, 4>(task, scratch) }
}

#[inline(always)]
unsafe fn chunk_with<S: Simd, const TILE: usize, const ACC: usize, const NP: usize>(
    task: &Task<'_>,
    scratch: &mut Scratch,
) {
    let Task { job, part, chunk, kv_head } = task;
    let Backward { heads, window, qkv, .. } = job.backward;
    let (dim, padded, width) = (heads.head_dim, heads.padded(), heads.width());
    let own = &job.parts[*part];
    let positions = chunk * CHUNK..((chunk + 1) * CHUNK).min(own.len);
    let whole = positions.len().next_multiple_of(BLOCK);
    scratch.reset(heads, whole, job.at_once * heads.group_size());
    let key_column = heads.q_width() + kv_head * dim;
    for (index, position) in positions.clone().enumerate() {
        let row = &qkv[(own.row + position) * width..(own.row + position + 1) * width];
        scratch.keys[index * padded..][..dim].copy_from_slice(&row[key_column..][..dim]);
    }
    for (block, first) in positions.clone().step_by(BLOCK).enumerate() {
        let Scratch { keys_in_blocks, values_in_blocks, .. } = scratch;
        for (column, to) in [(key_column, keys_in_blocks), (key_column + heads.kv_width(), values_in_blocks)] {
            let row = |position: usize| &qkv[(own.row + position) * width + column..][..dim];
            transpose((first..positions.end).map(row), &mut to[block * BLOCK * dim..][..BLOCK * dim]);
        }
    }
    // Queries of the prompt and of its completions attend to a prompt's positions; only a completion's own queries
    // attend to a completion's.
    let parts = if own.is_prompt {
        *part..job.parts.iter().rposition(|other| other.group == own.group).map_or(*part, |last| last) + 1
    } else {
        *part..part + 1
    };
    for index in parts {
        let of_queries = &job.parts[index];
        let is_own = index == *part;
        let from = if is_own { positions.start } else { 0 };
        // The last token whose window still reaches the end of the chunk, counted in positions of the sequence.
        let end = match (window, is_own) {
            (None, _) => of_queries.len,
            (Some(window), true) => (positions.end - 1).saturating_add(*window).min(of_queries.len),
            (Some(window), false) => {
                (positions.end - 1).saturating_add(*window).saturating_sub(own.len).min(of_queries.len)
            }
        };
        for block in from / job.at_once..end.div_ceil(job.at_once) {
            let tokens = block * job.at_once..((block + 1) * job.at_once).min(of_queries.len);
            let queries = Queries { task, index, block, tokens, is_own, positions: &positions };
            // Safety: the caller guarantees what this `unsafe fn` requires.
            unsafe { queries_with::<S, TILE, ACC, NP>(&queries, scratch) };
        }
    }
    for (index, position) in positions.clone().enumerate() {
        let at = (own.row + position) * width + key_column;
        for (at, values) in [(at, &scratch.d_keys), (at + heads.kv_width(), &scratch.d_values)] {
            // Safety: only this task writes the key and value columns of this head in these rows.
            unsafe { job.d_qkv.part(at..at + dim) }.copy_from_slice(&values[index * padded..][..dim]);
        }
    }
}

/// A block of queries that attend to a chunk.
struct Queries<'a> {
    task: &'a Task<'a>,
    /// Index of the prompt or completion that the queries belong to.
    index: usize,
    /// Index of the block among those of its prompt or completion.
    block: usize,
    tokens: Range<usize>,
    /// Whether the queries belong to the same prompt or completion as the chunk.
    is_own: bool,
    /// The positions of the chunk of keys.
    positions: &'a Range<usize>,
}

impl Queries<'_> {
    fn part(&self) -> &Part {
        &self.task.job.parts[self.index]
    }

    /// Number of earlier chunks that these queries attend to, whose tasks must add to the gradient first.
    fn turn(&self) -> usize {
        let job = self.task.job;
        let window = job.backward.window;
        // The window of the block's first query reaches furthest back.
        let first = self.part().visible(self.tokens.start, window);
        let prompt_len = self.part().prompt_len;
        if self.part().is_prompt {
            return self.task.chunk - first.prompt.start / CHUNK;
        }
        let of_prompt = prompt_len.div_ceil(CHUNK) - (first.prompt.start / CHUNK).min(prompt_len.div_ceil(CHUNK));
        let of_prompt = if first.prompt.is_empty() { 0 } else { of_prompt };
        match self.is_own {
            true => of_prompt + self.task.chunk - first.own.start / CHUNK,
            false => self.task.chunk - first.prompt.start / CHUNK,
        }
    }
}

/// Copies the queries, and the gradients of their outputs, to contiguous memory.
#[inline(always)]
fn gather(queries: &Queries<'_>, scratch: &mut Scratch) {
    let Backward { heads, qkv, d_out, .. } = queries.task.job.backward;
    let (dim, padded, per_token) = (heads.head_dim, heads.padded(), heads.group_size());
    let (first_row, first_head) = (queries.part().row, queries.task.kv_head * per_token);
    for (number, token) in queries.tokens.clone().enumerate() {
        let row = first_row + token;
        for head in 0..per_token {
            let to = (number * per_token + head) * padded;
            let column = (first_head + head) * dim;
            scratch.q[to..to + dim].copy_from_slice(&qkv[row * heads.width() + column..][..dim]);
            scratch.d_out[to..to + dim].copy_from_slice(&d_out[row * heads.q_width() + column..][..dim]);
        }
    }
}

#[inline(always)]
unsafe fn queries_with<S: Simd, const TILE: usize, const ACC: usize, const NP: usize>(
    queries: &Queries<'_>,
    scratch: &mut Scratch,
) {
    let Queries { task: Task { job, kv_head, .. }, index, block, tokens, is_own, positions } = queries;
    let Backward { heads, window, out, softmax, .. } = job.backward;
    let part = queries.part();
    let (dim, padded, per_token) = (heads.head_dim, heads.padded(), heads.group_size());
    let (count, first_head, scale) = (tokens.len() * per_token, kv_head * per_token, job.scale);
    gather(queries, scratch);
    // The positions of the chunk that each query attends to, and the blocks of positions that any query attends to.
    let here = |token: usize| {
        let visible = part.visible(token, *window);
        let seen = if *is_own && !part.is_prompt { &visible.own } else { &visible.prompt };
        let here = intersection(seen, positions);
        here.start - positions.start..here.end - positions.start
    };
    let seen = blocks(&union(tokens.clone().map(here)));
    let (first, whole) = (seen.start, seen.len());
    // Safety: the caller guarantees the bounds, here and below.
    unsafe {
        let in_blocks = |values: &Floats| {
            let stride = dim * BLOCK;
            Blocks { first: values.as_ptr().add(first * stride), stride }
        };
        let (keys, values) = (in_blocks(&scratch.keys_in_blocks), in_blocks(&scratch.values_in_blocks));
        let q = Lines { first: scratch.q.as_ptr(), stride: padded };
        let d = Lines { first: scratch.d_out.as_ptr(), stride: padded };
        let p = Lines { first: scratch.p.as_mut_ptr(), stride: CHUNK };
        let ds = Lines { first: scratch.ds.as_mut_ptr(), stride: CHUNK };
        by_queries!(count, TILE, |at, NQ| scores::<S, NQ, ACC>(dim, keys, whole, q.from(at), p.from(at)));
        by_queries!(count, TILE, |at, NQ| scores::<S, NQ, ACC>(dim, values, whole, d.from(at), ds.from(at)));
        let softcap = heads.softcap.map(|softcap| softcap / scale);
        for (query, softcap) in (0..count).filter_map(|query| Some((query, softcap?))) {
            cap::<S>(p.from(query).first, whole * BLOCK, softcap);
        }
        for (number, token) in tokens.clone().enumerate() {
            let here = here(token);
            let here = here.start.saturating_sub(first * BLOCK)..here.end.saturating_sub(first * BLOCK);
            for head in 0..per_token {
                let query = number * per_token + head;
                let row = part.row + token;
                let column = row * heads.q_width() + (first_head + head) * dim;
                let mut mean = S::zero();
                for at in (0..dim).step_by(S::LANES) {
                    let out = simd::load_some::<S>(out.as_ptr().add(column + at), dim - at);
                    mean = S::fma(out, S::load(d.from(query).first.add(at)), mean);
                }
                let at = (row * heads.num_heads + first_head + head) * 2;
                let of_row = OfRow::new(&softmax[at..], S::sum(mean), (scale, softcap));
                slopes::<S>(&of_row, &here, whole, p.from(query).first, ds.from(query).first);
            }
        }
        let row = first * BLOCK * padded;
        spread::<S, NP>(padded, whole * BLOCK, count, p.read(), d, scratch.d_values.as_mut_ptr().add(row));
        spread::<S, NP>(padded, whole * BLOCK, count, ds.read(), q, scratch.d_keys.as_mut_ptr().add(row));

        let turn = queries.turn() as u32;
        let turns = &job.turns[(job.first_block[*index] + block) * heads.num_kv_heads + kv_head];
        wait(turns, turn, &job.has_panicked);
        let place = |number: usize, head: usize| (part.row + number) * heads.width() + (first_head + head) * dim;
        for (number, token) in tokens.clone().enumerate() {
            for head in 0..per_token {
                let to = &mut scratch.d_q[(number * per_token + head) * padded..][..dim];
                let at = place(token, head);
                if turn == 0 {
                    to.fill(0.0);
                } else {
                    to.copy_from_slice(job.d_qkv.part(at..at + dim));
                }
            }
        }
        let keys = Blocks { first: scratch.keys.as_ptr().add(row), stride: BLOCK * padded };
        let d_q = Lines { first: scratch.d_q.as_mut_ptr(), stride: padded };
        by_queries!(count, TILE, |at, NQ| {
            weigh::<S, NQ, ACC>(padded, keys, whole, ds.read().from(at), &[1.0; NQ], d_q.from(at));
        });
        for (number, token) in tokens.clone().enumerate() {
            for head in 0..per_token {
                let at = place(token, head);
                let from = &scratch.d_q[(number * per_token + head) * padded..][..dim];
                job.d_qkv.part(at..at + dim).copy_from_slice(from);
            }
        }
        turns.store(turn + 1, Ordering::Release);
    }
}

/// Waits until the tasks of earlier chunks have added their gradients.
fn wait(turns: &AtomicU32, turn: u32, has_panicked: &AtomicBool) {
    let mut spins = 0;
    while turns.load(Ordering::Acquire) != turn {
        assert!(!has_panicked.load(Ordering::Relaxed), "a kernel panicked on another thread");
        spins += 1;
        if spins < 1000 { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
}

/// Constants of one query head in the backward pass of its softmax.
struct OfRow {
    /// Shift in the probability p = rest·exp(scale·score + shift).
    shift: f32,
    rest: f32,
    /// Mean Σ p·dp, which equals the dot product out · d_out.
    mean: f32,
    scale: f32,
    /// Soft cap of the scores, as a bound on the unscaled scores.
    softcap: Option<f32>,
}

impl OfRow {
    fn new(softmax: &[f32], mean: f32, (scale, softcap): (f32, Option<f32>)) -> Self {
        Self { shift: softmax[0], rest: softmax[1], mean, scale, softcap }
    }
}

/// Converts scores to probabilities p, and their gradients dp to ds = scale·p·(dp − mean), with 0 for positions outside
/// of the window; multiplied by the slope of the soft cap.
#[inline(always)]
unsafe fn slopes<S: Simd>(row: &OfRow, seen: &Range<usize>, whole: usize, p: *mut f32, ds: *mut f32) {
    unsafe {
        let range = blocks(seen);
        for block in (0..whole).filter(|block| !range.contains(block)) {
            std::slice::from_raw_parts_mut(p.add(block * BLOCK), BLOCK).fill(0.0);
            std::slice::from_raw_parts_mut(ds.add(block * BLOCK), BLOCK).fill(0.0);
        }
        let (scale, shift, rest) = (S::splat(row.scale), S::splat(row.shift), S::splat(row.rest));
        let mean = S::splat(row.mean);
        for block in range {
            let (p, ds) = (p.add(block * BLOCK), ds.add(block * BLOCK));
            for at in (0..BLOCK).step_by(S::LANES) {
                // The exponential is at most e⁰ for positions in the window. Others may be larger and are
                // set to 0 below.
                let score = S::load(p.add(at));
                let x = S::fma(score, scale, shift);
                let x = S::sub(S::zero(), S::max(S::splat(-1.0), S::sub(S::zero(), x)));
                let weight = S::mul(simd::exp::<S>(x), rest);
                S::store(p.add(at), weight);
                let slope = S::mul(S::mul(weight, S::sub(S::load(ds.add(at)), mean)), scale);
                let slope = match row.softcap {
                    None => slope,
                    Some(softcap) => {
                        // The slope of c·tanh(x / c) is 1 − (value / c)².
                        let t = S::mul(score, S::splat(1.0 / softcap));
                        S::sub(slope, S::mul(slope, S::mul(t, t)))
                    }
                };
                S::store(ds.add(at), slope);
            }
            let first = block * BLOCK;
            let (begin, end) = (seen.start.saturating_sub(first), (seen.end - first).min(BLOCK));
            if begin > 0 || end < BLOCK {
                clear::<S>(p, begin, end);
                clear::<S>(ds, begin, end);
            }
        }
    }
}
