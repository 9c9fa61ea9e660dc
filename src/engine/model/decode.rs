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
use crate::engine::sampling;
use crate::spec::footprint::PREFILL_TOKENS;

/// How the head itself chooses a row's next token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pick {
    /// Divides the logits; 0 = greedy: the first of the largest.
    pub temperature: f64,
    /// In [0, 1): which token, by inversion of the cumulative distribution; not read when greedy.
    pub uniform: f64,
}

/// The token that was chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chosen {
    /// Its id.
    pub token: u32,
    /// Its log-prob in nats, of logits / temperature over the full vocabulary (temperature 1 when greedy).
    pub logp: f32,
}

/// Sequences in the middle of generation: their KV cache, lengths, and what their next tokens are chosen from.
#[derive(Debug)]
pub struct DecodeState {
    adapter: Adapter,
    rows: Vec<CacheRow>,
    /// The residual stream behind each row's last token `[rows, hidden]`; `None` when no row is live.
    last: Option<Tensor>,
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
    /// Tokens that may be appended.
    max_new_tokens: usize,
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

    fn expect_rows(&self, what: &str, count: usize) -> Result<()> {
        if count == self.rows.len() {
            return Ok(());
        }
        Err(EngineError::Input(format!("{count} {what} for {} live rows", self.rows.len())))
    }
}

/// Tokens for which a row's cache has room at first.
const FIRST_TOKENS: usize = 32;

impl Policy {
    /// A state without rows.
    pub fn begin(&self, adapter: Adapter) -> DecodeState {
        DecodeState { adapter, rows: Vec::new(), last: None }
    }

    /// Whether [`Policy::choose`] gives bit for bit the log-probs of [`Policy::score`] and of the training forward, whatever
    /// the batch: then those recorded at sampling are the old log-probs. These kernels agree within about 1e-5.
    pub fn samples_exactly(&self) -> bool {
        false
    }

    /// Compute the prompts, each distinct one once, and append `num_copies` rows each, prompt-major; they share its keys and
    /// values, and await their first token. Errors where a prompt is empty or holds an unknown token.
    pub fn join(
        &self,
        state: &mut DecodeState,
        prompts: &[&[u32]],
        num_copies: usize,
        max_new_tokens: usize,
    ) -> Result<()> {
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
        if prompts.is_empty() || num_copies == 0 {
            return Ok(());
        }
        let (mut caches, mut last) = (Vec::new(), Vec::new());
        let mut rest = distinct.as_slice();
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = rest.iter().take_while(|p| {
                tokens += p.len();
                tokens <= PREFILL_TOKENS as usize
            });
            let (chunk, after) = rest.split_at(fits.count().max(1));
            let (chunk_caches, chunk_last) = self.prefill_chunk(chunk, state.adapter)?;
            caches.extend(chunk_caches);
            last.push(chunk_last);
            rest = after;
        }
        let of_row: Vec<usize> =
            prompts.iter().flat_map(|prompt| std::iter::repeat_n(number[prompt], num_copies)).collect();
        let last = select(&Tensor::cat(&last, 0)?, of_row.iter().copied())?;
        state.last = Some(match &state.last {
            Some(before) => Tensor::cat(&[before, &last], 0)?,
            None => last,
        });
        let room = max_new_tokens.min(FIRST_TOKENS) * 2 * self.heads().kv_width();
        state.rows.extend(of_row.into_iter().map(|index| CacheRow {
            prompt: Arc::clone(&caches[index]),
            len: 0,
            max_new_tokens,
            layers: (0..self.layers.len()).map(|_| Vec::with_capacity(room)).collect(),
        }));
        Ok(())
    }

    /// The logits of every live row's next token.
    pub fn next_logits(&self, state: &DecodeState) -> Result<Logits> {
        let vocab_size = self.head.vocab_size();
        let values = match &state.last {
            Some(last) => self.head.logits(last)?.flatten_all()?.to_vec1()?,
            None => Vec::new(),
        };
        Ok(Logits { values, vocab_size })
    }

    /// Every live row's next token, chosen from its whole distribution; one pick a row. Nothing is appended.
    pub fn choose(&self, state: &DecodeState, picks: &[Pick]) -> Result<Vec<Chosen>> {
        state.expect_rows("picks", picks.len())?;
        let logits = self.next_logits(state)?;
        let chosen = picks.iter().enumerate().map(|(row, pick)| {
            let logits = logits.row(row);
            let token = sampling::draw(logits, pick.temperature, pick.uniform);
            let temperature = if pick.temperature == 0.0 { 1.0 } else { pick.temperature };
            Chosen { token, logp: slices::token_score(logits, token as usize, temperature).logp }
        });
        Ok(chosen.collect())
    }

    fn prefill_chunk(&self, prompts: &[&[u32]], adapter: Adapter) -> Result<(Vec<Arc<PromptCache>>, Tensor)> {
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
        let ends = prompts.iter().map(|p| {
            end += p.len();
            end - 1
        });
        let last = select(&x, ends)?;
        Ok((caches.into_iter().map(Arc::new).collect(), last))
    }

    /// Append one token to every live row; the next choice is made behind it.
    pub fn append(&self, state: &mut DecodeState, tokens: &[u32]) -> Result<()> {
        state.expect_rows("tokens", tokens.len())?;
        if tokens.is_empty() {
            return Ok(());
        }
        let heads = self.heads();
        let positions = state.lengths();
        let table = self.rope.table(positions.iter().max().map_or(1, |p| p + 1));
        let pass = Pass::inference(state.adapter);
        let mut x = self.embed(tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let qkv = layer.project(&x, &table, &positions, pass)?;
            let attended = ops::with_values(&qkv, |qkv| attend(&heads, layer.window, index, qkv, &mut state.rows))?;
            let attended = Tensor::from_vec(attended, (tokens.len(), heads.q_width()), x.device())?;
            x = layer.finish(&x, &attended, pass)?;
        }
        for row in &mut state.rows {
            row.len += 1;
        }
        state.last = Some(x);
        Ok(())
    }

    /// Keep the rows marked true, in their order; the others leave the batch.
    pub fn retain(&self, state: &mut DecodeState, keep: &[bool]) -> Result<()> {
        state.expect_rows("marks", keep.len())?;
        let mut kept = keep.iter().enumerate().filter(|(_, keep)| **keep).map(|(row, _)| row).peekable();
        state.last = match &state.last {
            Some(last) if kept.peek().is_some() => Some(select(last, kept)?),
            Some(_) | None => None,
        };
        let mut keep = keep.iter();
        state.rows.retain(|_| keep.next().copied().unwrap_or(false));
        Ok(())
    }
}

/// Some rows of a matrix.
fn select(matrix: &Tensor, rows: impl Iterator<Item = usize>) -> Result<Tensor> {
    let rows: Vec<u32> = rows.map(|row| row as u32).collect();
    let count = rows.len();
    Ok(matrix.index_select(&Tensor::from_vec(rows, count, matrix.device())?, 0)?)
}

/// Work below which one thread is faster.
const MIN_PARALLEL: usize = 1 << 16;

/// Append each row's key and value, and attend. Returns `[rows][q_width]`.
fn attend(heads: &Heads, window: Option<usize>, layer: usize, qkv: &[f32], rows: &mut [CacheRow]) -> Vec<f32> {
    let mut out = vec![0f32; rows.len() * heads.q_width()];
    let work: usize = rows.iter().map(|row| (row.prompt.len + row.len) * heads.q_width()).sum();
    let one = |scores: &mut Vec<f32>, ((row, out), qkv): ((&mut CacheRow, &mut [f32]), &[f32])| {
        let (q, kv) = qkv.split_at(heads.q_width());
        let own = &mut row.layers[layer];
        if own.len() == own.capacity() {
            let more = (own.len() / kv.len()).clamp(FIRST_TOKENS, row.max_new_tokens.max(FIRST_TOKENS));
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
