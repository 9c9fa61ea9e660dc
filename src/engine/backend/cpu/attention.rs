//! Attention over packed batches and over the cache of a generation.

use std::sync::Arc;

use super::{Cpu, Matrix};
use crate::engine::kernels::attention::{self, Backward, Query, Scratch, Segment, Visible, attend_backward};
use crate::engine::kernels::threads::Shared;
use crate::engine::model::packing::Packing;
use crate::engine::ops::slices::{Group, Heads};

/// Keys and values of rows, each behind a prompt that others may share.
#[derive(Debug)]
pub struct Cache {
    heads: attention::Heads,
    num_layers: usize,
    prompts: Vec<Arc<Prompt>>,
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Prompt {
    len: usize,
    layers: Vec<Segment>,
}

#[derive(Debug)]
struct Row {
    prompt: Arc<Prompt>,
    max_new_tokens: usize,
    layers: Vec<Segment>,
}

/// Tokens for which a row's cache has room at first.
const FIRST_TOKENS: usize = 32;

pub(super) fn sizes(heads: &Heads) -> attention::Heads {
    attention::Heads { num_heads: heads.num_heads, num_kv_heads: heads.num_kv_heads, head_dim: heads.head_dim }
}

impl Cache {
    pub(super) fn new(heads: &Heads, num_layers: usize) -> Cache {
        Cache { heads: sizes(heads), num_layers, prompts: Vec::new(), rows: Vec::new() }
    }

    pub(super) fn announce(&mut self, lengths: &[usize]) -> usize {
        let first = self.prompts.len();
        let layers = vec![Segment::default(); self.num_layers];
        self.prompts.extend(lengths.iter().map(|len| Arc::new(Prompt { len: *len, layers: layers.clone() })));
        first
    }

    pub(super) fn fill(&mut self, first: usize, layer: usize, qkv: &Matrix) {
        let mut row = 0;
        for prompt in self.prompts[first..].iter_mut().filter_map(Arc::get_mut) {
            let segment = &mut prompt.layers[layer];
            segment.reserve(&self.heads, prompt.len);
            for _ in 0..prompt.len {
                segment.push(&self.heads, qkv.row(row));
                row += 1;
            }
        }
    }

    pub(super) fn add_rows(&mut self, prompt: usize, copies: usize, max_new_tokens: usize) {
        for _ in 0..copies {
            let layers = vec![Segment::default(); self.num_layers];
            self.rows.push(Row { prompt: self.prompts[prompt].clone(), max_new_tokens, layers });
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
    /// Append a token's key and value.
    fn push(&mut self, heads: &attention::Heads, layer: usize, qkv: &[f32]) {
        let segment = &mut self.layers[layer];
        if segment.len() == segment.room() {
            let more = segment.len().clamp(FIRST_TOKENS, self.max_new_tokens.max(FIRST_TOKENS));
            segment.reserve(heads, more);
        }
        segment.push(heads, qkv);
    }
}

/// What the token at the end of a sequence sees, by segment.
fn visible(window: Option<usize>, prompt: usize, own: usize) -> Visible {
    let first = window.map_or(0, |window| (prompt + own).saturating_sub(window));
    Visible { prompt: first.min(prompt)..prompt, own: first.saturating_sub(prompt)..own }
}

/// Rows of the batch that continue the same prompt, side by side.
fn runs(rows: &[Row]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if Arc::ptr_eq(&rows[run.start].prompt, &row.prompt) => run.end = index + 1,
            _ => runs.push(index..index + 1),
        }
    }
    runs
}

impl Cpu {
    pub(super) fn attend_rows(&self, cache: &mut Cache, layer: usize, window: Option<usize>, qkv: &Matrix) -> Matrix {
        let Cache { heads, rows, .. } = cache;
        for (index, row) in rows.iter_mut().enumerate() {
            row.push(heads, layer, qkv.row(index));
        }
        let mut out = self.pool.matrix(rows.len(), heads.q_width());
        let width = heads.q_width();
        let shared = Shared::new(out.values_mut());
        let runs = runs(rows);
        self.threads.split(runs.len(), |part| {
            let mut scratch = Scratch::default();
            for run in &runs[part] {
                shared.with(run.start * width..run.end * width, |out| {
                    let mut outs = out.chunks_exact_mut(width);
                    let mut queries: Vec<Query<'_>> = run
                        .clone()
                        .filter_map(|index| {
                            let own = &rows[index].layers[layer];
                            let visible = visible(window, rows[index].prompt.len, own.len());
                            Some(Query { qkv: qkv.row(index), own, visible, out: outs.next()? })
                        })
                        .collect();
                    let prompt = &rows[run.start].prompt.layers[layer];
                    attention::attend(self.isa, heads, prompt, &mut queries, &mut scratch);
                });
            }
        });
        out
    }

    pub(super) fn attend_packed(
        &self,
        heads: &Heads,
        packing: &Packing,
        window: Option<usize>,
        qkv: &Matrix,
    ) -> Matrix {
        let heads = sizes(heads);
        let width = heads.q_width();
        let mut out = self.pool.matrix(qkv.rows(), width);
        let begins = begins(&packing.groups);
        let shared = Shared::new(out.values_mut());
        self.threads.split(packing.groups.len(), |part| {
            let mut scratch = Scratch::default();
            for index in part {
                let group = &packing.groups[index];
                let begin = begins[index];
                let segment = |rows: std::ops::Range<usize>| {
                    let mut segment = Segment::default();
                    segment.reserve(&heads, rows.len());
                    rows.for_each(|row| segment.push(&heads, qkv.row(row)));
                    segment
                };
                let prompt = segment(begin..begin + group.prompt_len);
                let nothing = Segment::default();
                let mut at = begin;
                shared.with(begin * width..(begin + group.len()) * width, |out| {
                    let mut outs = out.chunks_exact_mut(width);
                    let lens = std::iter::once(None).chain(group.completion_lens.iter().map(|len| Some(*len)));
                    for len in lens {
                        let own = len.map_or(Segment::default(), |len| segment(at..at + len));
                        let mut queries: Vec<Query<'_>> = (0..len.unwrap_or(group.prompt_len))
                            .filter_map(|token| {
                                let visible = match len {
                                    None => visible(window, token + 1, 0),
                                    Some(_) => visible(window, group.prompt_len, token + 1),
                                };
                                let own = if len.is_some() { &own } else { &nothing };
                                Some(Query { qkv: qkv.row(at + token), own, visible, out: outs.next()? })
                            })
                            .collect();
                        attention::attend(self.isa, &heads, &prompt, &mut queries, &mut scratch);
                        at += len.unwrap_or(group.prompt_len);
                    }
                });
            }
        });
        out
    }

    pub(super) fn attend_packed_vjp(
        &self,
        heads: &Heads,
        packing: &Packing,
        window: Option<usize>,
        qkv: &Matrix,
        dy: &Matrix,
    ) -> Matrix {
        let heads = sizes(heads);
        let mut out = self.pool.matrix(qkv.rows(), qkv.width());
        let begins = begins(&packing.groups);
        let (width, q_width) = (heads.width(), heads.q_width());
        for (group, begin) in packing.groups.iter().zip(begins) {
            let mut seen: Vec<Visible> = (0..group.prompt_len).map(|token| visible(window, token + 1, 0)).collect();
            for len in &group.completion_lens {
                seen.extend((0..*len).map(|token| visible(window, group.prompt_len, token + 1)));
            }
            let rows = begin..begin + group.len();
            let backward = Backward {
                heads: &heads,
                prompt_len: group.prompt_len,
                completion_lens: &group.completion_lens,
                visible: &seen,
                qkv: &qkv.values()[rows.start * width..rows.end * width],
                d_out: &dy.values()[rows.start * q_width..rows.end * q_width],
            };
            let shared = Shared::new(out.rows_mut(rows));
            self.threads.split(heads.num_kv_heads, |kv_heads| attend_backward(self.isa, &backward, kv_heads, &shared));
        }
        out
    }
}

/// The first token of each group.
fn begins(groups: &[Group]) -> Vec<usize> {
    groups
        .iter()
        .scan(0, |begin, group| {
            let at = *begin;
            *begin += group.len();
            Some(at)
        })
        .collect()
}
