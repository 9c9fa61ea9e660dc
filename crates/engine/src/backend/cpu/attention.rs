//! Attention over packed batches and over the cache of a generation.

use std::ops::Range;
use std::sync::{Arc, PoisonError};

use super::{Attention, AttentionBackward, CachedLayer, Cpu, Matrix};
use crate::kernels::attention::{self, Backward, Forward, Heads, Query, Segment, Visible, first_seen};
use crate::kernels::delta::State;

/// Keys and values of sequences, each after a prompt that several sequences may share. A layer with a window drops
/// positions that no later token attends to.
#[derive(Debug)]
pub struct Cache {
    heads: Heads,
    /// The attention window of each layer, in positions.
    windows: Vec<Option<usize>>,
    /// The layers with keys and values, in order; the others have states.
    with_keys: Vec<usize>,
    prompts: Vec<Arc<Prompt>>,
    rows: Vec<Row>,
    /// Ranges of sequences whose attention is computed together.
    pieces: Vec<Range<usize>>,
}

/// Keys and values of a prompt in all layers.
#[derive(Debug)]
pub struct Prompt {
    len: usize,
    layers: Vec<Segment>,
    /// The states after the prompt's last token, in layers that have one.
    states: Vec<Option<State>>,
}

impl Prompt {
    /// Returns the memory of keys, values and states in bytes.
    pub(super) fn bytes(&self) -> usize {
        let states: usize = self.states.iter().flatten().map(State::bytes).sum();
        self.layers.iter().map(Segment::bytes).sum::<usize>() + states
    }
}

#[derive(Debug)]
struct Row {
    prompt: Arc<Prompt>,
    max_new_tokens: usize,
    /// Number of new tokens for which this sequence's cache has memory.
    room: usize,
    layers: Vec<Segment>,
    /// The sequence's own states, in layers that have one.
    states: Vec<Option<State>>,
}

/// Number of new tokens for which a sequence's cache has memory initially.
const FIRST_TOKENS: usize = 32;

impl Cache {
    pub(super) fn new(heads: &Heads, layers: &[CachedLayer]) -> Cache {
        let window = |layer: &CachedLayer| match layer {
            CachedLayer::Keys(window) => *window,
            CachedLayer::State => None,
        };
        let with_keys = (0..layers.len()).filter(|layer| layers[*layer] != CachedLayer::State).collect();
        let (prompts, rows, pieces) = Default::default();
        Cache { heads: *heads, windows: layers.iter().map(window).collect(), with_keys, prompts, rows, pieces }
    }

    /// Whether some layers have states, which are known at the end of a prompt only.
    fn has_states(&self) -> bool {
        self.with_keys.len() < self.windows.len()
    }

    /// The states of all sequences in a layer that has them.
    pub(super) fn row_states(&mut self, layer: usize) -> impl Iterator<Item = &mut State> {
        self.rows.iter_mut().filter_map(move |row| row.states[layer].as_mut())
    }

    /// Takes a prompt's state in a layer out of the cache.
    pub(super) fn take_state(&mut self, prompt: usize, layer: usize) -> Option<State> {
        Arc::get_mut(self.prompts.get_mut(prompt)?)?.states[layer].take()
    }

    /// Sets a prompt's state in a layer.
    pub(super) fn set_state(&mut self, prompt: usize, layer: usize, state: State) {
        if let Some(prompt) = self.prompts.get_mut(prompt).and_then(Arc::get_mut) {
            prompt.states[layer] = Some(state);
        }
    }

    pub(super) fn announce(&mut self, lengths: &[usize]) -> usize {
        let first = self.prompts.len();
        let layers = vec![Segment::default(); self.windows.len()];
        let states = vec![None; self.windows.len()];
        let prompt = |len: &usize| Prompt { len: *len, layers: layers.clone(), states: states.clone() };
        self.prompts.extend(lengths.iter().map(|len| Arc::new(prompt(len))));
        first
    }

    /// The prompt with this index, for later prompts that begin with the same tokens.
    pub(super) fn kept(&self, prompt: usize) -> Option<Arc<Prompt>> {
        self.prompts.get(prompt).cloned()
    }

    /// Announces a prompt of `length` tokens that begins with `shared` tokens of another one; their keys and values are copied.
    /// With states, the other prompt must end there.
    pub(super) fn announce_after(&mut self, kept: &Prompt, shared: usize, length: usize) -> Option<usize> {
        if self.has_states() && shared != kept.len {
            return None;
        }
        let Cache { heads, windows, with_keys, prompts, .. } = self;
        let mut layers = vec![Segment::default(); windows.len()];
        for layer in with_keys.iter().copied() {
            let needed = first_seen(shared, windows[layer])..shared;
            layers[layer] = kept.layers[layer].beginning(heads, needed)?;
        }
        prompts.push(Arc::new(Prompt { len: length, layers, states: kept.states.clone() }));
        Some(prompts.len() - 1)
    }

    pub(super) fn fill(&mut self, first: usize, layer: usize, qkv: &Matrix) {
        let Cache { heads, windows, prompts, .. } = self;
        let mut row = 0;
        for prompt in prompts[first..].iter_mut().filter_map(Arc::get_mut) {
            // The first token after the prompt attends to more of the prompt's positions than any later one.
            let mut segment = Segment::beginning_at(first_seen(prompt.len, windows[layer]));
            let rows = row + segment.len()..row + prompt.len;
            segment.reserve(heads, rows.len());
            segment.extend(heads, &qkv.values()[rows.start * qkv.width()..rows.end * qkv.width()]);
            prompt.layers[layer] = segment;
            row += prompt.len;
        }
    }

    pub(super) fn add_rows(&mut self, prompt: usize, copies: usize, max_new_tokens: usize) {
        for _ in 0..copies {
            let layers = vec![Segment::default(); self.windows.len()];
            let prompt = self.prompts[prompt].clone();
            self.rows.push(Row { states: prompt.states.clone(), prompt, max_new_tokens, room: 0, layers });
        }
    }

    pub(super) fn close(&mut self) {
        self.prompts.clear();
    }

    pub(super) fn retain(&mut self, keep: &[bool]) {
        let mut keep = keep.iter();
        self.rows.retain(|_| keep.next().copied().unwrap_or(false));
    }
}

impl Row {
    /// Reserves memory in all layers before a token is appended to the sequence.
    fn make_room(&mut self, heads: &Heads, windows: &[Option<usize>], with_keys: &[usize]) {
        let len = with_keys.first().map_or(0, |layer| self.layers[*layer].len());
        if len < self.room {
            return;
        }
        // Doubles the capacity, up to the sequence's maximum length.
        let more = len.max(FIRST_TOKENS).min(self.max_new_tokens.saturating_sub(len).max(attention::BLOCK));
        self.room = len + more;
        for layer in with_keys.iter().copied() {
            let (segment, window) = (&mut self.layers[layer], windows[layer]);
            let most = window.map_or(usize::MAX, |window| window + attention::DROPPED_AT_ONCE);
            segment.reserve(heads, more.min(most - segment.kept().len()));
        }
    }

    /// Appends a token's keys and values in a layer. Positions outside of the token's window are dropped, since no
    /// later token attends to them.
    fn push(&mut self, heads: &Heads, layer: usize, window: Option<usize>, qkv: &[f32]) {
        let own = &mut self.layers[layer];
        let seen = Visible::of_completion(self.prompt.len, own.len(), window).own;
        own.drop_before(heads, seen.start);
        own.push(heads, qkv);
    }
}

/// Number of multiply-adds below which one thread is faster than several.
const MIN_PARALLEL: usize = 1 << 14;

/// Collects adjacent sequences of the batch that continue the same prompt; splits long runs into several ranges, so
/// that all threads have work.
fn cut(rows: &[Row], threads: usize, pieces: &mut Vec<Range<usize>>) {
    let longest = rows.len().div_ceil(2 * threads).max(2);
    pieces.clear();
    for (index, row) in rows.iter().enumerate() {
        match pieces.last_mut() {
            Some(piece) if piece.len() < longest && Arc::ptr_eq(&rows[piece.start].prompt, &row.prompt) => {
                piece.end = index + 1;
            }
            Some(_) | None => pieces.push(index..index + 1),
        }
    }
}

impl Cpu {
    /// Appends a token to each sequence and computes its attention.
    pub(super) fn attend_rows(&self, cache: &mut Cache, layer: usize, qkv: &Matrix) -> Matrix {
        let Cache { heads, windows, with_keys, rows, pieces, .. } = cache;
        let window = windows[layer];
        if with_keys.first() == Some(&layer) {
            rows.iter_mut().for_each(|row| row.make_room(heads, windows, with_keys));
            cut(rows, self.threads.count(), pieces);
        }
        let width = heads.q_width();
        let mut out = self.pool.matrix(rows.len(), width);
        let seen: usize = rows.iter().map(|row| row.prompt.len + row.layers[layer].len() + 1).sum();
        let small = seen * width < MIN_PARALLEL;
        self.threads.over(pieces, rows, (out.values_mut(), width), small, |cell, rows, out| {
            for (row, index) in rows.iter_mut().zip(cell.clone()) {
                row.push(heads, layer, window, qkv.row(index));
            }
            let Some(first) = rows.first() else { return };
            let queries = rows.iter().zip(out.chunks_exact_mut(width)).zip(cell).map(|((row, out), index)| {
                let own = &row.layers[layer];
                let visible = Visible::of_completion(row.prompt.len, own.len() - 1, window);
                Query { qkv: qkv.row(index), own, visible, out }
            });
            attention::attend(self.isa, heads, &first.prompt.layers[layer], queries);
        });
        out
    }

    /// Appends the remaining tokens of prompts to their keys and values, and computes the attention of these tokens.
    pub(super) fn attend_prompts(
        &self,
        cache: &mut Cache,
        prompts: &[(usize, usize)],
        layer: usize,
        qkv: &Matrix,
    ) -> Matrix {
        let Cache { heads, windows, prompts: cached, .. } = cache;
        let (window, width) = (windows[layer], heads.q_width());
        let mut out = self.pool.matrix(qkv.rows(), width);
        let mut row = 0;
        for (index, count) in prompts {
            if let Some(prompt) = cached.get_mut(*index).and_then(Arc::get_mut) {
                let values = &qkv.values()[row * qkv.width()..(row + count) * qkv.width()];
                prompt.layers[layer].reserve(heads, *count);
                prompt.layers[layer].extend(heads, values);
            }
            row += count;
        }
        let none = Segment::default();
        let (mut batches, mut outputs, mut row) = (Vec::new(), out.values_mut().chunks_exact_mut(width), 0);
        let mut queries: Vec<Vec<Query<'_>>> = Vec::with_capacity(prompts.len());
        for (index, count) in prompts {
            let start = cached[*index].len - count;
            let of_prompt = (0..*count).zip(outputs.by_ref()).map(|(token, out)| Query {
                qkv: qkv.row(row + token),
                own: &none,
                visible: Visible::of_prompt(start + token, window),
                out,
            });
            queries.push(of_prompt.collect());
            row += count;
        }
        for ((index, _), queries) in prompts.iter().zip(&mut queries) {
            batches.push(attention::Batch { prompt: &cached[*index].layers[layer], queries });
        }
        attention::attend_batches(&self.threads, self.isa, heads, &mut batches);
        drop(batches);
        for (index, _) in prompts {
            if let Some(prompt) = cached.get_mut(*index).and_then(Arc::get_mut) {
                prompt.layers[layer].drop_before(heads, first_seen(prompt.len, window));
            }
        }
        out
    }

    /// Computes attention in a packed batch, and the softmax's largest score and sum for each token and head.
    pub(super) fn attend_packed(&self, attention: &Attention<'_>, qkv: &Matrix) -> (Matrix, Matrix) {
        let Attention { heads, groups, visible: _, window } = *attention;
        let mut out = self.pool.matrix(qkv.rows(), heads.q_width());
        let mut softmax = self.pool.matrix(qkv.rows(), 2 * heads.num_heads);
        let forward = Forward { heads, groups, window, qkv: qkv.values() };
        let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = Some(softmax.values_mut());
        attention::attend_groups(&self.threads, self.isa, &forward, &mut segments, out.values_mut(), kept);
        (out, softmax)
    }

    /// Returns dL/dqkv of [`Cpu::attend_packed`].
    pub(super) fn attend_packed_vjp(&self, backward: &AttentionBackward<'_, Self>) -> Matrix {
        let Attention { heads, groups, visible: _, window } = backward.attention;
        let mut d_qkv = self.pool.matrix(backward.qkv.rows(), heads.width());
        let given = Backward {
            heads,
            groups,
            window,
            qkv: backward.qkv.values(),
            out: backward.out.values(),
            softmax: backward.softmax.values(),
            d_out: backward.dy.values(),
        };
        attention::attend_groups_backward(&self.threads, self.isa, &given, d_qkv.values_mut());
        d_qkv
    }
}
