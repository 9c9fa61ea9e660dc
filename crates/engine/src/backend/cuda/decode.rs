//! Decoding: the key-value cache of a generation, and its steps, recorded as CUDA graphs that cover everything from the
//! token lookup to the choice of the next tokens. One graph serves all batches of a bucket: smaller batches are padded
//! with rows whose results are dropped. The host waits only for the chosen tokens. The next step reads them on the
//! device, so it can be queued before the host knows them.

use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};

use super::{Cuda, Tensor, Weight};
use crate::backend::{CachedLayer, Choice, Chosen, Decode, Head, Pick, Step, Stepped, Tokens};
use crate::error::{EngineError, Result};
use crate::kernels::cuda::cache;
use crate::kernels::cuda::driver::{Buffer, Device, Fetch};
use crate::kernels::cuda::gemm::Gemm;
use crate::kernels::cuda::head;
use crate::kernels::cuda::rows::{self, Dtype};
use crate::ops::slices::Heads;

/// Keys and values of sequences, in pages that are allocated with the first prompt. All positions are kept, even in
/// layers with a window.
#[derive(Debug)]
pub struct Cache {
    heads: Heads,
    /// The attention window of each layer, in positions.
    windows: Vec<Option<usize>>,
    dtype: Dtype,
    pages: Option<cache::Cache>,
    /// The token ids of the current step, then the ids it chose, in the layout of `head::begin_choose`.
    tokens: Option<Buffer>,
    /// Number of rows that the last step chose tokens for.
    chosen: usize,
    /// Toggles at each step. A graph reads host memory that must stay valid until the graph has run, and the next step
    /// does not wait for that: two buffers alternate.
    turn: bool,
}

/// Initial capacity of the buffer for token ids, in rows.
const ROWS: usize = 512;

impl Cache {
    pub(super) fn new(heads: &Heads, windows: &[Option<usize>], dtype: Dtype) -> Cache {
        let windows = windows.to_vec();
        Cache { heads: *heads, windows, dtype, pages: None, tokens: None, chosen: 0, turn: false }
    }

    /// Returns the pages of the key-value cache; allocates them on first use.
    pub(super) fn pages_on(&mut self, device: &Device) -> Result<&mut cache::Cache> {
        let pages = match self.pages.take() {
            Some(pages) => pages,
            None => cache::Cache::new(device, &self.heads, self.windows.len(), self.dtype)?,
        };
        Ok(self.pages.insert(pages))
    }

    /// Returns the buffer for a step's token ids. It is reallocated only if it has too little room for `rows` rows.
    fn room(&mut self, device: &Device, rows: usize) -> Result<&Buffer> {
        let tokens = match self.tokens.take() {
            Some(tokens) if tokens.bytes() as usize >= head::chosen_bytes(rows) => tokens,
            Some(_) | None => device.alloc(head::chosen_bytes(rows.max(ROWS).next_power_of_two()))?,
        };
        Ok(self.tokens.insert(tokens))
    }

    /// Returns the buffer with the current step's token ids.
    pub(super) fn tokens(&self) -> Result<&Buffer> {
        self.tokens.as_ref().ok_or_else(|| EngineError::Input("no step of generating tokens is in progress".to_owned()))
    }

    pub(super) fn close(&mut self) {
        if let Some(pages) = &mut self.pages {
            pages.close();
        }
    }

    pub(super) fn retain(&mut self, keep: &[bool]) {
        if let Some(pages) = &mut self.pages {
            pages.retain(keep);
        }
    }
}

/// Token ids that the device is choosing, or that were copied to the host.
#[derive(Debug)]
pub struct PendingChoice(Mutex<Landing>);

#[derive(Debug)]
enum Landing {
    /// The copy of the token ids to the host has not been requested yet.
    Begun,
    Coming {
        words: Fetch<u32>,
        rows: usize,
    },
    There(Vec<Chosen>),
}

impl PendingChoice {
    /// Creates a choice of tokens that is in progress.
    pub(super) fn begun() -> PendingChoice {
        PendingChoice(Mutex::new(Landing::Begun))
    }

    /// Waits for the chosen token ids and their log-probs.
    pub(super) fn wait(&self) -> Result<Vec<Chosen>> {
        let mut landing = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen = match std::mem::replace(&mut *landing, Landing::Begun) {
            Landing::Begun => {
                return Err(EngineError::Input("the GPU has not finished choosing the next tokens".to_owned()));
            }
            Landing::Coming { words, rows } => head::chosen_of(&words.wait()?, rows),
            Landing::There(chosen) => chosen,
        };
        *landing = Landing::There(chosen.clone());
        Ok(chosen)
    }
}

/// Number of rows of the CUDA graph that serves a batch of `rows` rows. There are few sizes, so that each graph is
/// recorded early, and none is much larger than needed.
fn bucket(rows: usize) -> usize {
    match rows {
        0..=8 => rows.next_power_of_two(),
        9..=64 => rows.next_multiple_of(8),
        65..=256 => rows.next_multiple_of(16),
        _ => rows.next_multiple_of((rows.next_power_of_two() / 16).max(32)),
    }
}

impl Cuda {
    /// Runs [`Decode::step`] as a CUDA graph.
    pub(super) fn recorded_step(
        &self,
        cache: &mut Cache,
        step: &Step<'_>,
        mut body: impl FnMut(&mut Cache, &Step<'_>) -> Result<Stepped<Cuda>>,
    ) -> Result<Stepped<Cuda>> {
        let rows = step.tokens.count();
        let bucket = bucket(rows);
        match step.tokens {
            Tokens::Known(tokens) => {
                let fill = std::iter::repeat_n(0, bucket - rows);
                let tokens: Vec<u32> = tokens.iter().copied().chain(fill).collect();
                self.device.write(cache.room(&self.device, bucket)?, 0, &tokens)?;
            }
            Tokens::Chosen(_) if cache.chosen == rows => {}
            Tokens::Chosen(_) => {
                return Err(EngineError::Input(format!(
                    "{} next tokens were chosen for {rows} sequences",
                    cache.chosen
                )));
            }
        }
        let positions: Vec<usize> =
            step.positions.iter().copied().chain(std::iter::repeat_n(0, bucket - rows)).collect();
        // Upload the rotary table and the cache's page tables first: they must not move while a graph that
        // reads them is recorded.
        self.table(step.table)?;
        cache.pages_on(&self.device)?.begin_step()?;
        // Rows that only pad the batch get any pick, since their tokens are dropped; without picks no
        // row chooses a token.
        let Choice { picks, filters } = step.choice;
        let mut picks = picks.to_vec();
        cache.chosen = picks.len();
        if !picks.is_empty() {
            picks.resize(bucket, Pick { temperature: 1.0, uniform: 0.0 });
        }
        let choice = Choice { picks: &picks, filters };
        let filled = Step { table: step.table, tokens: Tokens::Chosen(bucket), positions: &positions, choice };
        let kind = match (picks.is_empty(), filters.are_off()) {
            (true, _) => 0,
            (false, true) => 1,
            (false, false) => 2,
        };
        cache.turn = !cache.turn;
        let key = 2 * (3 * bucket as u64 + kind) + u64::from(cache.turn);
        let (out, picked) = self.device.graph(key, || body(cache, &filled))?;
        // Start to copy the chosen tokens to the host, which continues with other work meanwhile.
        let picked = match picked {
            Some(_) => {
                let words = self.device.fetch(cache.tokens()?, 0, 2 * bucket)?;
                Some(PendingChoice(Mutex::new(Landing::Coming { words, rows })))
            }
            None => None,
        };
        Ok((out.first(rows), picked))
    }
}

impl Decode for Cuda {
    type Cache = Cache;
    type PendingChoice = PendingChoice;
    type KeptPrompt = Infallible;

    fn samples_exactly(&self) -> bool {
        self.gemm == Gemm::Exact
    }

    fn embed_step(&self, table: &Weight, cache: &mut Cache, tokens: Tokens<'_>) -> Result<Tensor> {
        let out = Tensor::new(&self.device, tokens.count(), table.rows().width, Dtype::F32)?;
        rows::select_by(&self.device, table.rows(), cache.tokens()?, out.rows())?;
        Ok(out)
    }

    fn new_cache(&self, heads: &Heads, layers: &[CachedLayer]) -> Cache {
        // Models with states are refused before they are loaded.
        let window = |layer: &CachedLayer| match layer {
            CachedLayer::Keys(window) => *window,
            CachedLayer::State => None,
        };
        Cache::new(heads, &layers.iter().map(window).collect::<Vec<_>>(), self.compute())
    }

    fn add_prompts(&self, cache: &mut Cache, lengths: &[usize]) -> Result<usize> {
        Ok(cache.pages_on(&self.device)?.announce(lengths)?)
    }

    fn fill_prompts(&self, cache: &mut Cache, first: usize, layer: usize, qkv: &Tensor) -> Result<()> {
        Ok(cache.pages_on(&self.device)?.fill(first, layer, qkv.rows())?)
    }

    fn add_rows(&self, cache: &mut Cache, prompt: usize, copies: usize, max_new_tokens: usize) -> Result<()> {
        Ok(cache.pages_on(&self.device)?.add_rows(prompt, copies, max_new_tokens)?)
    }

    fn close_prompts(&self, cache: &mut Cache) {
        cache.close();
    }

    fn attend_cached(&self, heads: &Heads, cache: &mut Cache, layer: usize, qkv: &Tensor) -> Result<Tensor> {
        let window = cache.windows[layer];
        let out = Tensor::new(&self.device, qkv.count(), heads.q_width(), qkv.dtype())?;
        cache.pages_on(&self.device)?.attend(layer, window, qkv.rows(), out.rows())?;
        Ok(out)
    }

    fn retain_rows(&self, cache: &mut Cache, keep: &[bool]) {
        cache.retain(keep);
    }

    fn step(
        &self,
        cache: &mut Cache,
        step: &Step<'_>,
        body: impl FnMut(&mut Cache, &Step<'_>) -> Result<Stepped<Self>>,
    ) -> Result<Stepped<Self>> {
        self.recorded_step(cache, step, body)
    }

    fn choose(&self, x: &Tensor, head: &Head<Self>, choice: Choice<'_>, chosen: &mut Vec<Chosen>) -> Result<()> {
        *chosen = head::choose(&self.device, &self.head(&head.weight), x.rows(), choice.picks, &choice.filters)?;
        Ok(())
    }

    fn begin_choose(
        &self,
        cache: &mut Cache,
        x: impl FnOnce() -> Result<Tensor>,
        head: &Head<Self>,
        choice: Choice<'_>,
    ) -> Result<Option<PendingChoice>> {
        let Choice { picks, filters } = choice;
        head::begin_choose(&self.device, &self.head(&head.weight), x()?.rows(), picks, &filters, cache.tokens()?)?;
        Ok(Some(PendingChoice::begun()))
    }

    fn finish_choose(&self, choice: &PendingChoice) -> Result<Vec<Chosen>> {
        choice.wait()
    }
}
