//! The gated delta rule itself, token by token.
//!
//! The columns of a head's memory do not depend on each other, so vectors run along them, and a thread works on
//! one block of columns, which stays in the first-level cache. One pass over the block applies the update of the previous
//! token, reads that token's output, applies the decay of the current token, and reads what its key recalls. Every sum
//! is a chain over the rows of the memory, in order, and every value of the memory sees the same operations in any
//! division of a sequence into calls.

use std::cell::RefCell;

use super::super::floats::Floats;
use super::super::isa::Isa;
use super::super::rows::{on_every_isa, take_turns};
use super::super::simd::{Simd, exp, load_some, store_some};
use super::super::threads::Threads;
use super::{KEPT_EVERY, Shape};

/// Number of tokens from which a block of the memory is copied to contiguous memory.
const WORTH_A_COPY: usize = 8;

/// Consecutive tokens of one sequence, with normalized queries and keys.
#[derive(Debug)]
pub(super) struct DeltaSequence<'a> {
    /// Rows `[q heads | k heads | v heads]` of the tokens, `[tokens][width]`.
    pub qkv: &'a [f32],
    /// How much each value head writes, `[tokens][num_value_heads]`.
    pub beta: &'a [f32],
    /// Logarithms of the decays, at most 0, `[tokens][num_value_heads]`.
    pub g: &'a [f32],
    /// The memory before the first token, and after the last token afterwards: `[num_value_heads][key_dim][value_dim]`.
    pub memory: &'a mut [f32],
    /// Receives the memory before every 64th token, beginning with the first token of the call:
    /// `[⌈tokens / 64⌉][num_value_heads][key_dim][value_dim]`, as [`run_sequences_backward`](super::backward::run_sequences_backward) needs it.
    pub kept: Option<&'a mut [f32]>,
    /// Receives the output, `[tokens][num_value_heads · value_dim]`.
    pub out: &'a mut [f32],
}

/// One token of each of several sequences, as in a decode step, with normalized queries and keys.
#[derive(Debug)]
pub(super) struct DeltaRows<'a, 'b> {
    /// Rows `[q heads | k heads | v heads]`, `[rows][width]`.
    pub qkv: &'a [f32],
    /// How much each value head writes, `[rows][num_value_heads]`.
    pub beta: &'a [f32],
    /// Logarithms of the decays, at most 0, `[rows][num_value_heads]`.
    pub g: &'a [f32],
    /// The memory of each row's sequence, `[num_value_heads][key_dim][value_dim]`; updated.
    pub memories: &'b mut [&'a mut [f32]],
    /// Receives the output, `[rows][num_value_heads · value_dim]`.
    pub out: &'a mut [f32],
}

/// The addresses of consecutive tokens of one sequence, with checked bounds.
#[derive(Clone, Copy)]
struct Walk {
    tokens: usize,
    qkv: *const f32,
    beta: *const f32,
    g: *const f32,
    memory: *mut f32,
    /// Null if no states are kept.
    kept: *mut f32,
    out: *mut f32,
}

// Safety: each thread accesses the pointers of one head's block of columns, and different blocks do not overlap.
unsafe impl Send for Walk {}
unsafe impl Sync for Walk {}

thread_local! {
    /// A block of columns of a head's memory.
    static SCRATCH: RefCell<Floats> = RefCell::new(Floats::default());
}

/// Applies the gated delta rule to sequences. For each token and value head, with the memory S `[key_dim][value_dim]`:
/// S ← exp(g)·S; δ = beta·(v − Sᵀk); S ← S + k⊗δ; out = Sᵀq.
///
/// # Panics
/// Panics if the length of a slice does not match the number of tokens of its sequence.
pub(super) fn run_sequences(threads: &Threads, isa: Isa, shape: &Shape, sequences: &mut [DeltaSequence<'_>]) {
    let walks: Vec<Walk> = sequences
        .iter_mut()
        .map(|sequence| {
            let DeltaSequence { qkv, beta, g, memory, kept, out } = sequence;
            let tokens = shape.rows_of(qkv);
            check(shape, tokens, [beta.len(), g.len()], out.len());
            assert_eq!(memory.len(), shape.memory_len(), "a sequence's memory has the wrong length");
            let kept_len = kept.as_ref().map_or(shape.kept_len(tokens), |kept| kept.len());
            assert_eq!(kept_len, shape.kept_len(tokens), "a sequence's kept states have the wrong length");
            Walk {
                tokens,
                qkv: qkv.as_ptr(),
                beta: beta.as_ptr(),
                g: g.as_ptr(),
                memory: memory.as_mut_ptr(),
                kept: kept.as_mut().map_or(std::ptr::null_mut(), |kept| kept.as_mut_ptr()),
                out: out.as_mut_ptr(),
            }
        })
        .collect();
    walk_all(threads, isa, shape, &walks);
}

/// Applies the gated delta rule to one token of each of several sequences; gives the same bits as [`run_sequences`].
///
/// # Panics
/// Panics if the length of a slice does not match the number of rows.
pub(super) fn run_rows(threads: &Threads, isa: Isa, shape: &Shape, rows: DeltaRows<'_, '_>) {
    let DeltaRows { qkv, beta, g, memories, out } = rows;
    let count = shape.rows_of(qkv);
    check(shape, count, [beta.len(), g.len()], out.len());
    assert_eq!(count, memories.len(), "the numbers of rows and of memories differ");
    assert!(memories.iter().all(|memory| memory.len() == shape.memory_len()), "a row's memory has the wrong length");
    let of_rows = qkv.chunks_exact(shape.conv_width()).zip(out.chunks_exact_mut(shape.value_width()));
    let gates = beta.chunks_exact(shape.num_value_heads).zip(g.chunks_exact(shape.num_value_heads));
    let walks: Vec<Walk> = of_rows
        .zip(gates)
        .zip(memories.iter_mut())
        .map(|(((qkv, out), (beta, g)), memory)| Walk {
            tokens: 1,
            qkv: qkv.as_ptr(),
            beta: beta.as_ptr(),
            g: g.as_ptr(),
            memory: memory.as_mut_ptr(),
            kept: std::ptr::null_mut(),
            out: out.as_mut_ptr(),
        })
        .collect();
    walk_all(threads, isa, shape, &walks);
}

fn check(shape: &Shape, rows: usize, gates: [usize; 2], out: usize) {
    assert_eq!(gates, [rows * shape.num_value_heads; 2], "beta and g need one value for each row and value head");
    assert_eq!(out, rows * shape.value_width(), "the output needs {rows} rows of {}", shape.value_width());
}

/// Runs every block of columns of every head of every sequence.
fn walk_all(threads: &Threads, isa: Isa, shape: &Shape, walks: &[Walk]) {
    let columns = if isa >= Isa::Avx512 { 64 } else { 16 };
    let blocks = shape.value_dim.div_ceil(columns);
    let cells = walks.len() * shape.num_value_heads * blocks;
    let tokens: usize = walks.iter().map(|walk| walk.tokens).sum();
    take_turns(threads, cells, tokens * shape.memory_len(), |cell| {
        let (walk, rest) = (&walks[cell / (shape.num_value_heads * blocks)], cell % (shape.num_value_heads * blocks));
        let first = rest % blocks * columns;
        let block = Block { head: rest / blocks, first, count: (shape.value_dim - first).min(columns) };
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.resize(shape.key_dim * columns);
            // Safety: the bounds were checked when the walks were created; each cell has its own head's columns.
            unsafe { walk_block(isa, shape, walk, block, scratch) };
        });
    });
}

/// A block of columns of a value head's memory.
#[derive(Clone, Copy)]
struct Block {
    head: usize,
    first: usize,
    count: usize,
}

on_every_isa! {
    unsafe fn walk_block(shape: &Shape, walk: &Walk, block: Block, scratch: &mut [f32]) = walk_with
}

#[inline(always)]
unsafe fn walk_with<S: Simd>(shape: &Shape, walk: &Walk, block: Block, scratch: &mut [f32]) {
    unsafe {
        match block.count.div_ceil(S::LANES) {
            1 => walk_vectors::<S, 1>(shape, walk, block, scratch),
            2 => walk_vectors::<S, 2>(shape, walk, block, scratch),
            _ => walk_vectors::<S, 4>(shape, walk, block, scratch),
        }
    }
}

/// Copies rows of `count` values between buffers with different strides.
unsafe fn copy_rows(from: (*const f32, usize), to: (*mut f32, usize), rows: usize, count: usize) {
    for row in 0..rows {
        // Safety: the caller guarantees what this `unsafe fn` requires.
        unsafe { std::ptr::copy_nonoverlapping(from.0.add(row * from.1), to.0.add(row * to.1), count) };
    }
}

/// Walks over all tokens with one block of columns, `N` vectors wide.
#[inline(always)]
unsafe fn walk_vectors<S: Simd, const N: usize>(shape: &Shape, walk: &Walk, block: Block, scratch: &mut [f32]) {
    let (rows, width) = (shape.key_dim, N * S::LANES);
    let at = block.head * shape.head_len() + block.first;
    unsafe {
        let memory = (walk.memory.add(at), shape.value_dim);
        let is_copied = block.count != width || walk.tokens >= WORTH_A_COPY;
        let state = if is_copied { (scratch.as_mut_ptr(), width) } else { memory };
        if is_copied {
            scratch[..rows * width].fill(0.0);
            copy_rows((memory.0, memory.1), state, rows, block.count);
        }
        for first in (0..walk.tokens).step_by(KEPT_EVERY) {
            if !walk.kept.is_null() {
                let kept = walk.kept.add(first / KEPT_EVERY * shape.memory_len() + at);
                copy_rows((state.0, state.1), (kept, shape.value_dim), rows, block.count);
            }
            walk_tokens::<S, N>(shape, walk, block, state, first..(first + KEPT_EVERY).min(walk.tokens));
        }
        if is_copied {
            copy_rows((state.0, state.1), memory, rows, block.count);
        }
    }
}

/// Walks over some tokens with one block of columns, which contains the memory after all of them afterwards.
#[inline(always)]
unsafe fn walk_tokens<S: Simd, const N: usize>(
    shape: &Shape,
    walk: &Walk,
    block: Block,
    state: (*mut f32, usize),
    tokens: std::ops::Range<usize>,
) {
    unsafe {
        let k_head = block.head / shape.heads_per_key();
        let (q_at, k_at) = (k_head * shape.key_dim, shape.key_width() + k_head * shape.key_dim);
        let v_at = 2 * shape.key_width() + block.head * shape.value_dim + block.first;
        let store = |token: usize, out: [S::V; N]| {
            let to = walk.out.add(token * shape.value_width() + block.head * shape.value_dim + block.first);
            for (n, value) in out.into_iter().enumerate() {
                store_some::<S>(to.add(n * S::LANES), value, block.count.saturating_sub(n * S::LANES));
            }
        };
        let start = walk.qkv.add(tokens.start * shape.conv_width());
        let mut last = Token { q: start.add(q_at), k: start.add(k_at), delta: [S::zero(); N] };
        for token in tokens.clone() {
            let row = walk.qkv.add(token * shape.conv_width());
            let k = row.add(k_at);
            let gate = token * shape.num_value_heads + block.head;
            let decay = exp::<S>(S::splat(*walk.g.add(gate)));
            let recalled = if token == tokens.start {
                pass::<S, N, false, true>(state, shape.key_dim, &last, k, decay).1
            } else {
                let (out, recalled) = pass::<S, N, true, true>(state, shape.key_dim, &last, k, decay);
                store(token - 1, out);
                recalled
            };
            let beta = S::splat(*walk.beta.add(gate));
            for (n, delta) in last.delta.iter_mut().enumerate() {
                let rest = block.count.saturating_sub(n * S::LANES);
                let v = load_some::<S>(row.add(v_at + n * S::LANES), rest);
                *delta = S::mul(beta, S::sub(v, recalled[n]));
            }
            (last.q, last.k) = (row.add(q_at), k);
        }
        store(tokens.end - 1, pass::<S, N, true, false>(state, shape.key_dim, &last, last.k, S::zero()).0);
    }
}

/// A token whose update of the memory is due.
struct Token<S: Simd, const N: usize> {
    q: *const f32,
    k: *const f32,
    delta: [S::V; N],
}

/// Passes once over a block of the memory, `[rows][N vectors]`: with `UPDATE`, applies the update of the previous token
/// and reads its output; with `READ`, applies the decay of the next token and reads what its key recalls. Returns the
/// output and what is recalled.
#[inline(always)]
unsafe fn pass<S: Simd, const N: usize, const UPDATE: bool, const READ: bool>(
    (state, stride): (*mut f32, usize),
    rows: usize,
    last: &Token<S, N>,
    k: *const f32,
    decay: S::V,
) -> ([S::V; N], [S::V; N]) {
    unsafe {
        let (mut out, mut recalled) = ([S::zero(); N], [S::zero(); N]);
        for row in 0..rows {
            let at = state.add(row * stride);
            let (last_k, last_q, k) = (S::splat(*last.k.add(row)), S::splat(*last.q.add(row)), S::splat(*k.add(row)));
            for n in 0..N {
                let at = at.add(n * S::LANES);
                let mut value = S::load(at);
                if UPDATE {
                    value = S::fma(last_k, last.delta[n], value);
                    out[n] = S::fma(last_q, value, out[n]);
                }
                if READ {
                    value = S::mul(value, decay);
                    recalled[n] = S::fma(k, value, recalled[n]);
                }
                S::store(at, value);
            }
        }
        (out, recalled)
    }
}
