//! Attention within each group of a packed batch: a prompt followed by the completions that continue it.

use super::super::isa::Isa;
use super::super::rows::take_turns;
use super::super::threads::{Shared, Threads};
use super::forward::{Token, attend_head_here};
use super::tile::transpose;
use super::{BLOCK, Heads, Segment, Visible};

/// A prompt and the completions that continue it: prompt tokens, then each completion's.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Number of tokens of the prompt.
    pub prompt_len: usize,
    /// Number of tokens of each completion.
    pub completion_lens: Vec<usize>,
}

impl Group {
    /// Total number of tokens in the group.
    pub fn len(&self) -> usize {
        self.prompt_len + self.completion_lens.iter().sum::<usize>()
    }

    /// Whether the group has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One sequence of tokens in a packed batch: a prompt or a completion.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Index of the group that this prompt or completion belongs to.
    pub group: usize,
    /// Index of the prompt among all parts; the part's own index if it is a prompt.
    pub prompt: usize,
    /// Row of the part's first token in the batch.
    pub row: usize,
    /// Number of tokens of this prompt or completion.
    pub len: usize,
    /// Number of tokens of the group's prompt.
    pub prompt_len: usize,
    /// Whether the part is a prompt.
    pub is_prompt: bool,
}

impl Part {
    /// The positions that one of the part's tokens attends to.
    pub fn visible(&self, index: usize, window: Option<usize>) -> Visible {
        match self.is_prompt {
            true => Visible::of_prompt(index, window),
            false => Visible::of_completion(self.prompt_len, index, window),
        }
    }
}

/// Lists prompts and completions of the groups, in the order of their rows.
pub(super) fn parts(groups: &[Group]) -> Vec<Part> {
    let (mut parts, mut row) = (Vec::new(), 0);
    for (group, Group { prompt_len, completion_lens }) in groups.iter().enumerate() {
        let (prompt, prompt_len) = (parts.len(), *prompt_len);
        parts.push(Part { group, prompt, row, len: prompt_len, prompt_len, is_prompt: true });
        row += prompt_len;
        for len in completion_lens {
            parts.push(Part { group, prompt, row, len: *len, prompt_len, is_prompt: false });
            row += len;
        }
    }
    parts
}

/// Keys and values of a packed batch, kept between calls to reuse their memory.
#[derive(Debug, Default)]
pub struct Segments {
    segments: Vec<Segment>,
    empty: Segment,
    /// The attention sizes that the memory was allocated for.
    heads: Option<Heads>,
}

/// Arguments of attention over a packed batch.
#[derive(Clone, Copy, Debug)]
pub struct Forward<'a> {
    /// Sizes of the attention heads.
    pub heads: &'a Heads,
    /// The groups of the batch, one after another.
    pub groups: &'a [Group],
    /// Attention window: the number of positions a token attends to, its own included.
    pub window: Option<usize>,
    /// Rows `[q heads | k heads | v heads]` of the batch, `[tokens][width]`, after qk-norm and rotary embedding.
    pub qkv: &'a [f32],
}

/// Number of tokens in a task, a thread's unit of work.
const TOKENS_AT_ONCE: usize = 32;
/// Number of rows whose keys and values one task copies to segments.
const ROWS_AT_ONCE: usize = 8 * BLOCK;

/// Computes attention out `[tokens][q_width]`, and if `softmax` is given the values
/// that [`attend_groups_backward`](super::attend_groups_backward) needs, `[tokens][num_heads][2]`.
pub fn attend_groups(
    threads: &Threads,
    isa: Isa,
    forward: &Forward<'_>,
    segments: &mut Segments,
    out: &mut [f32],
    softmax: Option<&mut [f32]>,
) {
    let Forward { heads, groups, window, qkv } = *forward;
    let parts = parts(groups);
    let tokens: usize = parts.iter().map(|part| part.len).sum();
    assert!(
        qkv.len() == tokens * heads.width() && out.len() == tokens * heads.q_width(),
        "the number of rows of q, k and v does not match the groups of sequences"
    );
    assert!(softmax.as_ref().is_none_or(|softmax| softmax.len() == tokens * heads.num_heads * 2));
    segments.fill(threads, heads, &parts, qkv);
    let Segments { segments, empty, heads: _ } = &*segments;
    let mut tasks: Vec<(usize, usize)> = Vec::new();
    let mut work = 0;
    for (index, part) in parts.iter().enumerate() {
        tasks.extend((0..part.len).step_by(TOKENS_AT_ONCE).map(|first| (index, first)));
        let seen = part.len / 2 + if part.is_prompt { 0 } else { part.prompt_len };
        work += part.len * seen.min(window.unwrap_or(usize::MAX)) * heads.q_width() / 8;
    }
    // The last tokens of a sequence attend to the most positions, so their tasks come first.
    tasks.reverse();
    let out = Shared::new(out);
    let softmax = softmax.map(Shared::new);
    take_turns(threads, tasks.len() * heads.num_kv_heads, work, |index| {
        let (part_index, first) = tasks[index / heads.num_kv_heads];
        let part = &parts[part_index];
        let tokens: Vec<Token> = (first..(first + TOKENS_AT_ONCE).min(part.len))
            .map(|index| {
                let row = part.row + index;
                // Safety: the lengths of all slices were checked above.
                let (out, softmax) = unsafe {
                    let softmax = softmax.as_ref().map(|softmax| softmax.at(row * heads.num_heads * 2));
                    (out.at(row * heads.q_width()), softmax.unwrap_or(std::ptr::null_mut()))
                };
                let own = if part.is_prompt { empty } else { &segments[part_index] };
                Token {
                    q: qkv[row * heads.width()..].as_ptr(),
                    own,
                    visible: part.visible(index, window),
                    out,
                    softmax,
                }
            })
            .collect();
        // Safety: a token attends only to its prompt and to its completion up to itself; each token's head
        // belongs to one task.
        unsafe {
            attend_head_here(isa, heads, &segments[part.prompt], &tokens, index % heads.num_kv_heads);
        }
    });
}

impl Segments {
    /// Copies keys and values to one segment per prompt and completion.
    fn fill(&mut self, threads: &Threads, heads: &Heads, parts: &[Part], qkv: &[f32]) {
        if self.heads.replace(*heads) != Some(*heads) {
            self.segments.clear();
        }
        self.segments.truncate(parts.len());
        self.segments.resize_with(parts.len(), Segment::default);
        let mut tasks = Vec::new();
        for (index, (segment, part)) in self.segments.iter_mut().zip(parts).enumerate() {
            // The unused positions of the last block must hold zeros, since a segment may still hold those
            // of an earlier batch.
            let stale = (part.len / BLOCK).min(segment.len().div_ceil(BLOCK));
            segment.grow(heads, stale * BLOCK);
            segment.grow(heads, part.len);
            tasks.extend((0..part.len).step_by(ROWS_AT_ONCE).map(|first| (index, first)));
        }
        let segments: Vec<(Shared<f32>, Shared<f32>)> = self
            .segments
            .iter_mut()
            .map(|segment| (Shared::new(&mut segment.keys), Shared::new(&mut segment.values)))
            .collect();
        take_turns(
            threads,
            tasks.len(),
            parts.iter().map(|part| part.len).sum::<usize>() * heads.kv_width(),
            |index| {
                let (part, first) = tasks[index];
                let (keys, values) = &segments[part];
                let (dim, padded, kv_width) = (heads.head_dim, heads.padded(), heads.kv_width());
                let row = |position: usize| {
                    &qkv[(parts[part].row + position) * heads.width()..][heads.q_width()..heads.width()]
                };
                let end = (first + ROWS_AT_ONCE).min(parts[part].len);
                for positions in (first..end).step_by(BLOCK).map(|first| first..(first + BLOCK).min(end)) {
                    let block = positions.start / BLOCK;
                    // Safety: the segment was grown to the part's length, and each block of positions
                    // belongs to one task.
                    unsafe {
                        let stride = Segment::key_stride(heads);
                        let to = keys.part(block * stride..(block + 1) * stride);
                        transpose(positions.clone().map(|position| &row(position)[..kv_width]), to);
                        for (lane, position) in positions.enumerate() {
                            let to = values.at(block * Segment::value_stride(heads) + lane * padded);
                            for (head, value) in row(position)[kv_width..].chunks_exact(dim).enumerate() {
                                std::ptr::copy_nonoverlapping(value.as_ptr(), to.add(head * BLOCK * padded), dim);
                            }
                        }
                    }
                }
            },
        );
    }
}
