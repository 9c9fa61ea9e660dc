//! Generation: prompts are computed once and their keys and values shared; each row appends its own.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::Tensor;
use rayon::prelude::*;

use super::packing::Packing;
use super::pass::Pass;
use super::{Adapter, Logits, Policy};
use crate::engine::error::{EngineError, Result};
use crate::engine::ops;
use crate::engine::ops::slices::{self, Cache, Heads};
use crate::spec::footprint::PREFILL_TOKENS;

/// Sequences in the middle of generation: their KV cache and lengths.
#[derive(Debug)]
pub struct DecodeState {
    adapter: Adapter,
    max_new_tokens: usize,
    rows: Vec<CacheRow>,
}

/// Keys and values of a prompt: by layer, `[position][k heads | v heads]`.
#[derive(Debug)]
struct PromptCache {
    len: usize,
    layers: Vec<Vec<f32>>,
}

#[derive(Debug)]
struct CacheRow {
    prompt: Arc<PromptCache>,
    /// Tokens appended so far.
    len: usize,
    /// By layer, as in the prompt.
    layers: Vec<Vec<f32>>,
}

impl DecodeState {
    /// How many rows are live.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether no row is live.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Each live row's length in tokens, prompt included.
    pub fn lengths(&self) -> Vec<usize> {
        self.rows.iter().map(|row| row.prompt.len + row.len).collect()
    }
}

/// Tokens for which a row's cache has room at first.
const FIRST_TOKENS: usize = 32;

impl Policy {
    /// Compute every distinct prompt once and share its KV among `num_copies` rows each, prompt-major
    /// (row p·G + g). Returns the logits after the prompts, one row a copy.
    pub fn prefill(
        &self,
        prompts: &[&[u32]],
        num_copies: usize,
        max_new_tokens: usize,
        adapter: Adapter,
    ) -> Result<(DecodeState, Logits)> {
        let mut number: HashMap<&[u32], usize> = HashMap::new();
        let mut distinct: Vec<&[u32]> = Vec::new();
        for (index, prompt) in prompts.iter().enumerate() {
            if prompt.is_empty() {
                return Err(EngineError::Input(format!("prompt {index} is empty; at least one token is needed")));
            }
            number.entry(prompt).or_insert_with(|| {
                distinct.push(prompt);
                distinct.len() - 1
            });
        }
        let (mut caches, mut logits) = (Vec::new(), Vec::new());
        let mut rest = distinct.as_slice();
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = rest.iter().take_while(|p| {
                tokens += p.len();
                tokens <= PREFILL_TOKENS as usize
            });
            let (chunk, after) = rest.split_at(fits.count().max(1));
            let (chunk_caches, chunk_logits) = self.prefill_chunk(chunk, adapter)?;
            caches.extend(chunk_caches);
            logits.extend(chunk_logits);
            rest = after;
        }

        let vocab_size = self.head.vocab_size();
        let mut values = Vec::with_capacity(prompts.len() * num_copies * vocab_size);
        let mut rows = Vec::with_capacity(prompts.len() * num_copies);
        let row_width = 2 * self.heads().kv_width();
        for prompt in prompts {
            let index = number[prompt];
            for _ in 0..num_copies {
                values.extend_from_slice(&logits[index * vocab_size..(index + 1) * vocab_size]);
                let room = max_new_tokens.min(FIRST_TOKENS) * row_width;
                let layers = (0..self.layers.len()).map(|_| Vec::with_capacity(room)).collect();
                rows.push(CacheRow { prompt: Arc::clone(&caches[index]), len: 0, layers });
            }
        }
        Ok((DecodeState { adapter, max_new_tokens, rows }, Logits { values, vocab_size }))
    }

    fn prefill_chunk(&self, prompts: &[&[u32]], adapter: Adapter) -> Result<(Vec<Arc<PromptCache>>, Vec<f32>)> {
        let packing = Packing::sequences(prompts, &self.windows, |n| self.rope.table(n));
        let heads = self.heads();
        let mut caches: Vec<PromptCache> =
            prompts.iter().map(|p| PromptCache { len: p.len(), layers: Vec::new() }).collect();
        let mut x = self.embed(&packing.ids)?;
        for layer in &self.layers {
            let (y, qkv) = layer.forward(&x, &packing, Pass::inference(adapter))?;
            x = y;
            ops::with_values(&qkv, |values| {
                let mut rows = values.chunks_exact(heads.width());
                for cache in &mut caches {
                    let mut kept = Vec::with_capacity(cache.len * 2 * heads.kv_width());
                    for row in rows.by_ref().take(cache.len) {
                        kept.extend_from_slice(&row[heads.q_width()..]);
                    }
                    cache.layers.push(kept);
                }
            })?;
        }
        let mut end = 0;
        let last = prompts.iter().map(|p| {
            end += p.len();
            end as u32 - 1
        });
        let last = Tensor::from_vec(last.collect::<Vec<u32>>(), prompts.len(), x.device())?;
        let logits = self.head.logits(&x.index_select(&last, 0)?)?.flatten_all()?.to_vec1()?;
        Ok((caches.into_iter().map(Arc::new).collect(), logits))
    }

    /// Append one token to every live row; returns the next logits.
    pub fn decode(&self, state: &mut DecodeState, tokens: &[u32]) -> Result<Logits> {
        let vocab_size = self.head.vocab_size();
        if tokens.len() != state.rows.len() {
            let detail = format!("{} tokens for {} live rows", tokens.len(), state.rows.len());
            return Err(EngineError::Input(detail));
        }
        if tokens.is_empty() {
            return Ok(Logits { values: Vec::new(), vocab_size });
        }
        let heads = self.heads();
        let positions = state.lengths();
        let table = self.rope.table(positions.iter().max().map_or(1, |p| p + 1));
        let pass = Pass::inference(state.adapter);
        let room = state.max_new_tokens;
        let mut x = self.embed(tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let qkv = layer.project(&x, &table, &positions, pass)?;
            let attended =
                ops::with_values(&qkv, |qkv| attend(&heads, layer.window, index, room, qkv, &mut state.rows))?;
            let attended = Tensor::from_vec(attended, (tokens.len(), heads.q_width()), x.device())?;
            x = layer.finish(&x, &attended, pass)?;
        }
        for row in &mut state.rows {
            row.len += 1;
        }
        let values = self.head.logits(&x)?.flatten_all()?.to_vec1()?;
        Ok(Logits { values, vocab_size })
    }

    /// Keep the rows marked true; the others leave the batch.
    pub fn retain(&self, state: &mut DecodeState, keep: &[bool]) -> Result<()> {
        if keep.len() != state.rows.len() {
            let detail = format!("{} marks for {} live rows", keep.len(), state.rows.len());
            return Err(EngineError::Input(detail));
        }
        let mut keep = keep.iter();
        state.rows.retain(|_| keep.next().copied().unwrap_or(false));
        Ok(())
    }
}

/// Work below which one thread is faster.
const MIN_PARALLEL: usize = 1 << 16;

/// Append each row's key and value, and attend. Returns `[rows][q_width]`.
fn attend(
    heads: &Heads,
    window: Option<usize>,
    layer: usize,
    max_new_tokens: usize,
    qkv: &[f32],
    rows: &mut [CacheRow],
) -> Vec<f32> {
    let mut out = vec![0f32; rows.len() * heads.q_width()];
    let work: usize = rows.iter().map(|row| (row.prompt.len + row.len) * heads.q_width()).sum();
    let one = |scores: &mut Vec<f32>, ((row, out), qkv): ((&mut CacheRow, &mut [f32]), &[f32])| {
        let (q, kv) = qkv.split_at(heads.q_width());
        let own = &mut row.layers[layer];
        if own.len() == own.capacity() {
            let more = (own.len() / kv.len()).clamp(FIRST_TOKENS, max_new_tokens.max(FIRST_TOKENS));
            own.reserve_exact(more * kv.len());
        }
        own.extend_from_slice(kv);
        let cache = Cache { prompt: &row.prompt.layers[layer], own };
        slices::attention_cached(heads, window, q, cache, scores, out);
    };
    if work < MIN_PARALLEL {
        let mut scores = Vec::new();
        let rows = rows.iter_mut().zip(out.chunks_exact_mut(heads.q_width())).zip(qkv.chunks_exact(heads.width()));
        rows.for_each(|row| one(&mut scores, row));
    } else {
        rows.par_iter_mut()
            .zip(out.par_chunks_exact_mut(heads.q_width()))
            .zip(qkv.par_chunks_exact(heads.width()))
            .for_each_init(Vec::new, |scores, row| one(scores, row));
    }
    out
}
