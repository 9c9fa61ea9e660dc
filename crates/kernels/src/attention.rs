//! Causal attention with grouped-query heads, sliding windows, and a prompt that several completions share. Decode,
//! prefill and training use the same arithmetic, so that a query gets the same bits in all of them.
//!
//! Keys and values are stored in segments, in blocks of 16 positions counted from the segment's own start. A query
//! attends to a range of the prompt's segment and a range of its completion's. It processes them chunk by chunk (a
//! fixed number of blocks), with a running maximum of the scores: scores are chains of fused operations over the head's
//! width, the softmax sums per lane, the output is a chain over the positions. Neither the other queries of a tile nor
//! the number of threads change any bit.

mod backward;
mod forward;
mod groups;
#[cfg(test)]
mod tests;
mod tile;

use std::ops::Range;

pub use backward::{Backward, attend_groups_backward};
pub use forward::{Batch, Query, attend, attend_batches};
pub use groups::{Forward, Group, Segments, attend_groups};

use super::floats::Floats;
use tile::Blocks;

/// Number of positions in a block of keys and values.
pub const BLOCK: usize = 16;
/// Minimum number of positions that a segment drops at a time, because the remaining ones are moved each time.
pub const DROPPED_AT_ONCE: usize = 256;

/// The sizes of an attention layer. A row of `qkv` is `[q heads | k heads | v heads]`, each head `head_dim` wide.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on the dot products of queries and keys.
    pub scale: f32,
    /// Scores become c·tanh(scaled dot product / c) if c is set.
    pub softcap: Option<f32>,
}

impl Heads {
    /// Creates sizes with the usual scale: one over the square root of a head's width.
    pub fn new(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        Self { num_heads, num_kv_heads, head_dim, scale: (head_dim as f32).powf(-0.5), softcap: None }
    }

    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key heads together.
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Width of a row of `qkv`.
    pub fn width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }

    /// Number of query heads that share a key head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// A head's width rounded up to whole vectors.
    fn padded(&self) -> usize {
        self.head_dim.next_multiple_of(BLOCK)
    }
}

/// The positions that a token attends to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Visible {
    /// Range of the prompt's positions.
    pub prompt: Range<usize>,
    /// Range of the positions in the token's own completion; empty for a token of the prompt.
    pub own: Range<usize>,
}

impl Visible {
    /// Positions for token `position` of a prompt; `window` is the number of positions, its own included.
    pub fn of_prompt(position: usize, window: Option<usize>) -> Visible {
        Visible { prompt: first_seen(position, window)..position + 1, own: 0..0 }
    }

    /// Positions for token `index` of a completion after a prompt of `prompt_len` tokens.
    pub fn of_completion(prompt_len: usize, index: usize, window: Option<usize>) -> Visible {
        let first = first_seen(prompt_len + index, window);
        Visible { prompt: first.min(prompt_len)..prompt_len, own: first.saturating_sub(prompt_len)..index + 1 }
    }
}

/// The first position that the token at `position` attends to; `window` is the number of positions, its own included.
pub fn first_seen(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |window| (position + 1).saturating_sub(window.max(1)))
}

/// Start of the block that contains a position.
fn block_start(position: usize) -> usize {
    position / BLOCK * BLOCK
}

/// The blocks that contain these positions.
fn blocks(positions: &Range<usize>) -> Range<usize> {
    if positions.is_empty() { 0..0 } else { positions.start / BLOCK..positions.end.div_ceil(BLOCK) }
}

/// The smallest range that contains all nonempty ranges.
fn union(ranges: impl Iterator<Item = Range<usize>>) -> Range<usize> {
    let seen = ranges.filter(|range| !range.is_empty());
    seen.reduce(|all, range| all.start.min(range.start)..all.end.max(range.end)).unwrap_or(0..0)
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let (start, end) = (a.start.max(b.start), a.end.min(b.end));
    start..end.max(start)
}

/// Keys and values of a range of positions in one layer, such as those of a prompt or of a completion. The first
/// positions may have been dropped. The others keep their numbers, so that a query processes them in the same chunks
/// and gets the same bits.
#[derive(Clone, Debug, Default)]
pub struct Segment {
    /// The first position that is kept, at the start of a block.
    first: usize,
    len: usize,
    /// Keys in blocks of 16 positions, `[block][k head][head_dim][16]`.
    keys: Floats,
    /// Values in blocks of 16 positions, `[block][v head][16][padded head_dim]`.
    values: Floats,
}

impl Segment {
    /// Creates an empty segment whose first block contains `position`; earlier positions count as dropped. Its
    /// [`Segment::len`] is the start of that block.
    pub fn beginning_at(position: usize) -> Segment {
        let first = block_start(position);
        Segment { first, len: first, ..Segment::default() }
    }

    /// Copies the first positions of a segment, up to the end of `needed`, which is a multiple of [`BLOCK`]; the copy may drop
    /// positions before the start of `needed`. None if the segment no longer holds all positions of `needed`.
    pub fn beginning(&self, heads: &Heads, needed: Range<usize>) -> Option<Segment> {
        assert!(needed.end.is_multiple_of(BLOCK), "a segment is copied in whole blocks");
        let first = block_start(needed.start);
        if first < self.first || needed.end > self.len {
            return None;
        }
        let mut copy = Segment::beginning_at(first);
        copy.grow(heads, needed.end);
        let from = self.place_of(first / BLOCK);
        let (keys, values) = (Self::key_stride(heads), Self::value_stride(heads));
        let copied = (needed.end - first) / BLOCK;
        copy.keys[..copied * keys].copy_from_slice(&self.keys[from * keys..][..copied * keys]);
        copy.values[..copied * values].copy_from_slice(&self.values[from * values..][..copied * values]);
        Some(copy)
    }

    /// Memory of the keys and values in bytes.
    pub fn bytes(&self) -> usize {
        (self.keys.len() + self.values.len()) * size_of::<f32>()
    }

    /// Number of positions in the segment, including dropped ones.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The positions that the segment still holds.
    pub fn kept(&self) -> Range<usize> {
        self.first..self.len
    }

    /// Whether the segment still holds these positions.
    fn has(&self, positions: &Range<usize>) -> bool {
        positions.is_empty() || (self.first <= positions.start && positions.end <= self.len)
    }

    /// Drops the blocks before a position once there are many of them; keeps the memory.
    pub fn drop_before(&mut self, heads: &Heads, position: usize) {
        let first = block_start(position.min(self.len));
        if first >= self.first + DROPPED_AT_ONCE {
            let blocks = (first - self.first) / BLOCK;
            self.keys.drop_first(blocks * Self::key_stride(heads));
            self.values.drop_first(blocks * Self::value_stride(heads));
            self.first = first;
        }
    }

    /// Whether the segment has no positions.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes all positions; keeps the memory.
    pub fn clear(&mut self) {
        (self.first, self.len) = (0, 0);
        self.keys.clear();
        self.values.clear();
    }

    /// Reserves memory for this many more positions.
    pub fn reserve(&mut self, heads: &Heads, positions: usize) {
        let blocks = (self.kept().len() + positions).div_ceil(BLOCK);
        self.keys.reserve(blocks * Self::key_stride(heads));
        self.values.reserve(blocks * Self::value_stride(heads));
    }

    /// Appends the key and value heads of one row of `qkv`.
    pub fn push(&mut self, heads: &Heads, qkv: &[f32]) {
        self.grow(heads, self.len + 1);
        self.put(heads, self.len - 1, qkv);
    }

    /// Appends the key and value heads of several rows of `qkv`.
    pub fn extend(&mut self, heads: &Heads, qkv: &[f32]) {
        let first = self.len;
        self.grow(heads, first + qkv.len() / heads.width());
        for (index, row) in qkv.chunks_exact(heads.width()).enumerate() {
            self.put(heads, first + index, row);
        }
    }

    /// Sets the number of positions; the keys and values of new ones are zeros.
    fn grow(&mut self, heads: &Heads, len: usize) {
        let blocks = (len - self.first).div_ceil(BLOCK);
        self.keys.resize(blocks * Self::key_stride(heads));
        self.values.resize(blocks * Self::value_stride(heads));
        self.len = len;
    }

    /// Writes the key and value heads of one position into the segment.
    fn put(&mut self, heads: &Heads, position: usize, qkv: &[f32]) {
        let (keys, values) = qkv[heads.q_width()..heads.width()].split_at(heads.kv_width());
        let (block, lane) = (self.place_of(position / BLOCK), position % BLOCK);
        let to = &mut self.keys[block * Self::key_stride(heads)..][..Self::key_stride(heads)];
        for (slot, key) in to[lane..].iter_mut().step_by(BLOCK).zip(keys) {
            *slot = *key;
        }
        let to = &mut self.values[block * Self::value_stride(heads)..][..Self::value_stride(heads)];
        let of_heads = to.chunks_exact_mut(BLOCK * heads.padded());
        for (to, value) in of_heads.zip(values.chunks_exact(heads.head_dim)) {
            to[lane * heads.padded()..][..heads.head_dim].copy_from_slice(value);
        }
    }

    /// Index of a block of positions in the segment's memory.
    fn place_of(&self, block: usize) -> usize {
        block - self.first / BLOCK
    }

    fn key_stride(heads: &Heads) -> usize {
        heads.kv_width() * BLOCK
    }

    fn value_stride(heads: &Heads) -> usize {
        heads.num_kv_heads * heads.padded() * BLOCK
    }

    /// The keys of a head from a block of positions on.
    fn keys(&self, heads: &Heads, head: usize, block: usize) -> Blocks {
        let stride = Self::key_stride(heads);
        Blocks { first: self.keys[self.place_of(block) * stride + head * heads.head_dim * BLOCK..].as_ptr(), stride }
    }

    /// The values of a head from a block of positions on.
    fn values(&self, heads: &Heads, head: usize, block: usize) -> Blocks {
        let stride = Self::value_stride(heads);
        Blocks { first: self.values[self.place_of(block) * stride + head * heads.padded() * BLOCK..].as_ptr(), stride }
    }
}
