//! Generation on the oracle: the keys and values of each token are appended, one vector per sequence and layer.

use std::convert::Infallible;
use std::sync::Arc;

use candle_core::Tensor;
use rayon::prelude::*;

use super::Reference;
use crate::backend::{CachedLayer, Choice, Chosen, Compute, Decode, Head};
use crate::error::Result;
use crate::kernels::attention::{DROPPED_AT_ONCE, first_seen};
use crate::ops::slices::{self, Cache as Seen, Heads};
use crate::ops::{self, delta};

/// Keys and values of sequences, each after a prompt that several sequences may share. A layer with a window drops
/// positions that no later token attends to.
#[derive(Debug)]
pub struct Cache {
    heads: Heads,
    /// The attention window of each layer, in positions.
    windows: Vec<Option<usize>>,
    prompts: Vec<Arc<Prompt>>,
    rows: Vec<CacheRow>,
}

/// A prompt's keys and values by layer, `[position][k heads | v heads]`.
#[derive(Debug)]
struct Prompt {
    len: usize,
    layers: Vec<Vec<f32>>,
    /// The prompt's states after its last token, in layers that have one.
    states: Vec<Option<delta::State>>,
}

#[derive(Debug)]
struct CacheRow {
    prompt: Arc<Prompt>,
    layers: Vec<Vec<f32>>,
    states: Vec<Option<delta::State>>,
}

/// Drops the oldest positions of a sequence once there are many of them, and keeps those within the window.
fn drop_unseen(own: &mut Vec<f32>, width: usize, window: usize) {
    if own.len() >= (window + DROPPED_AT_ONCE) * width {
        own.drain(..own.len() - window * width);
    }
}

impl Decode for Reference {
    type Cache = Cache;
    type PendingChoice = Infallible;
    type KeptPrompt = Infallible;

    /// The results of candle's matrix products differ in the last bits with the number of rows.
    fn samples_exactly(&self) -> bool {
        false
    }

    fn mixes_adapters(&self) -> bool {
        true
    }

    fn new_cache(&self, heads: &Heads, layers: &[CachedLayer]) -> Cache {
        let window = |layer: &CachedLayer| match layer {
            CachedLayer::Keys(window) => *window,
            CachedLayer::State => None,
        };
        let windows = layers.iter().map(window).collect();
        Cache { heads: *heads, windows, prompts: Vec::new(), rows: Vec::new() }
    }

    fn add_prompts(&self, cache: &mut Cache, lengths: &[usize]) -> Result<usize> {
        let first = cache.prompts.len();
        let count = cache.windows.len();
        let prompt =
            |len: &usize| Arc::new(Prompt { len: *len, layers: vec![Vec::new(); count], states: vec![None; count] });
        cache.prompts.extend(lengths.iter().map(prompt));
        Ok(first)
    }

    fn fill_prompts(&self, cache: &mut Cache, first: usize, layer: usize, qkv: &Tensor) -> Result<()> {
        let Cache { heads, windows, prompts, .. } = cache;
        Ok(ops::with_values(qkv, |values| {
            let mut rows = values.chunks_exact(heads.width());
            for prompt in prompts[first..].iter_mut().filter_map(Arc::get_mut) {
                // The first token after the prompt attends to more of the prompt's positions than any later one.
                let first = first_seen(prompt.len, windows[layer]);
                for row in rows.by_ref().take(prompt.len).skip(first) {
                    prompt.layers[layer].extend_from_slice(&row[heads.q_width()..]);
                }
            }
        })?)
    }

    fn add_rows(&self, cache: &mut Cache, prompt: usize, copies: usize, _: usize) -> Result<()> {
        for _ in 0..copies {
            let layers = vec![Vec::new(); cache.windows.len()];
            let prompt = cache.prompts[prompt].clone();
            cache.rows.push(CacheRow { states: prompt.states.clone(), prompt, layers });
        }
        Ok(())
    }

    fn fill_states(&self, cache: &mut Cache, first: usize, layer: usize, states: Vec<delta::State>) -> Result<()> {
        for (prompt, state) in cache.prompts[first..].iter_mut().filter_map(Arc::get_mut).zip(states) {
            prompt.states[layer] = Some(state);
        }
        Ok(())
    }

    fn delta_net_cached(
        &self,
        net: &Arc<delta::Weights>,
        cache: &mut Cache,
        layer: usize,
        x: &Tensor,
    ) -> Result<Tensor> {
        let width = net.shape.value_width();
        let mut out = vec![0f32; cache.rows.len() * width];
        ops::with_values(x, |x| {
            let states = cache.rows.iter_mut().filter_map(|row| row.states[layer].as_mut());
            for ((state, x), out) in states.zip(x.chunks_exact(net.shape.width())).zip(out.chunks_exact_mut(width)) {
                net.forward(state, x, out);
            }
        })?;
        self.tensor(out, width)
    }

    fn close_prompts(&self, cache: &mut Cache) {
        cache.prompts.clear();
    }

    fn attend_cached(&self, heads: &Heads, cache: &mut Cache, layer: usize, qkv: &Tensor) -> Result<Tensor> {
        let window = cache.windows[layer];
        let mut out = vec![0f32; cache.rows.len() * heads.q_width()];
        ops::with_values(qkv, |qkv| {
            cache
                .rows
                .par_iter_mut()
                .zip(out.par_chunks_exact_mut(heads.q_width()))
                .zip(qkv.par_chunks_exact(heads.width()))
                .for_each_init(Vec::new, |scores, ((row, out), qkv)| {
                    let (q, kv) = qkv.split_at(heads.q_width());
                    let own = &mut row.layers[layer];
                    own.extend_from_slice(kv);
                    if let Some(window) = window {
                        drop_unseen(own, kv.len(), window);
                    }
                    let seen = Seen { prompt: &row.prompt.layers[layer], own };
                    slices::attention_cached(heads, window, q, seen, scores, out);
                });
        })?;
        self.tensor(out, heads.q_width())
    }

    fn retain_rows(&self, cache: &mut Cache, keep: &[bool]) {
        let mut keep = keep.iter();
        cache.rows.retain(|_| keep.next().copied().unwrap_or(false));
    }

    fn choose(&self, x: &Tensor, head: &Head<Self>, choice: Choice<'_>, chosen: &mut Vec<Chosen>) -> Result<()> {
        let logits = self.logits(x, head)?;
        let vocab_size = logits.dim(1)?;
        let choose = |values: &[f32]| {
            let rows = values.chunks_exact(vocab_size).take(choice.picks.len()).enumerate();
            rows.map(|(row, logits)| choice.among(row, logits)).collect()
        };
        *chosen = ops::with_values(&logits, choose)?;
        Ok(())
    }

    fn finish_choose(&self, choice: &Infallible) -> Result<Vec<Chosen>> {
        match *choice {}
    }
}
