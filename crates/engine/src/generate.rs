//! Continuous batching: every prompt is computed once for its G completions, a row that ends leaves the batch, and the next
//! prompts' rows join as soon as a whole group fits.

use std::collections::{HashSet, VecDeque};
use std::num::NonZeroUsize;

use super::error::Result;
use super::model::{Adapter, Choice, Chosen, DecodeState, Pick, Policy};
use super::random::Key;
use super::sampling::Sampler;
use super::text::Text;
use crate::event::FinishReason;
pub use crate::sample::Generated;
use crate::trajectory::Segments;

/// What to sample.
pub struct GenerateRequest<'a> {
    /// The prompts, in order.
    pub prompts: &'a [GeneratePrompt<'a>],
    /// Completions a prompt (G).
    pub num_generations: NonZeroUsize,
    /// How a token is chosen.
    pub sampler: Sampler,
    /// Tokens a completion may have, the end-of-sequence token included.
    pub max_completion_length: usize,
    /// A completion also ends with the token that completes one of these.
    pub stop: &'a [String],
    /// Seed, stream and rollout index; narrowed here by row, generation and token.
    pub key: Key,
    /// Every token that ends a completion.
    pub eos_token_ids: &'a [u32],
    /// The policy or the reference.
    pub adapter: Adapter,
    /// Sequences decoded at once, at the most; but at least one prompt's G.
    pub max_rows: usize,
}

/// One prompt.
#[derive(Debug, Clone, Copy)]
pub struct GeneratePrompt<'a> {
    /// Dataset row: part of the randomness.
    pub row: u64,
    /// At least one token.
    pub ids: &'a [u32],
}

/// G completions for each prompt, `[P][G]`, each one model segment; `None` when `stop` said so between two tokens.
///
/// A completion is a function of (key, row, generation, weights): it does not depend on which other prompts are in the
/// request, nor on `max_rows`, but for the rounding of the backend's matrix products. Its log-probs are recorded where the
/// sampler draws from the whole distribution ([`Sampler::is_unfiltered`]).
pub fn generate(
    policy: &Policy,
    text: &Text,
    request: &GenerateRequest<'_>,
    stop: &dyn Fn() -> bool,
) -> Result<Option<Vec<Vec<Generated>>>> {
    let num_generations = request.num_generations.get();
    let mut batch = Batch {
        request,
        state: policy.begin(request.adapter),
        live: Vec::new(),
        waiting: request.prompts.iter().enumerate().collect(),
        picks: Vec::new(),
        chosen: Vec::new(),
    };
    let mut done: Vec<Option<Generated>> = vec![None; request.prompts.len() * num_generations];
    // Of the live rows, reused: their tokens, and whether they go on.
    let (mut tokens, mut keep) = (Vec::new(), Vec::new());
    loop {
        if stop() {
            return Ok(None);
        }
        batch.join(policy)?;
        if batch.live.is_empty() {
            break;
        }
        batch.choose(policy)?;
        tokens.clear();
        keep.clear();
        for row in &mut batch.live {
            let finish_reason = finish_reason(text, request, &row.ids)?;
            keep.push(finish_reason.is_none());
            match finish_reason {
                Some(finish_reason) => {
                    let segments = Segments::of_completion(std::mem::take(&mut row.ids), row.logps.take());
                    done[row.index] = Some(Generated { segments, finish_reason });
                }
                None => tokens.extend(row.ids.last()),
            }
        }
        if tokens.len() < batch.live.len() {
            policy.retain(&mut batch.state, &keep)?;
            let mut kept = keep.iter().copied();
            batch.live.retain(|_| kept.next().unwrap_or(false));
        }
        batch.append(policy, &tokens)?;
        batch.append_ahead(policy)?;
    }
    // The cache makes room for what comes next.
    drop(batch);
    policy.release();
    let mut done = done.into_iter().flatten();
    Ok(Some(request.prompts.iter().map(|_| done.by_ref().take(num_generations).collect()).collect()))
}

/// A sequence that still grows.
struct LiveRow {
    /// Index in the output: prompt-major.
    index: usize,
    key: Key,
    ids: Vec<u32>,
    /// Of `ids`; `None` when the sampler filters.
    logps: Option<Vec<f32>>,
    /// Tokens of prompt and completion; kept only for the repetition penalty.
    seen: HashSet<u32>,
}

/// What grows, and the prompts that wait for room, with their indices.
struct Batch<'a> {
    request: &'a GenerateRequest<'a>,
    state: DecodeState,
    /// One a row of the state.
    live: Vec<LiveRow>,
    waiting: VecDeque<(usize, &'a GeneratePrompt<'a>)>,
    /// Of the live rows' next tokens, or of those after them; reused.
    picks: Vec<Pick>,
    chosen: Vec<Chosen>,
}

impl Batch<'_> {
    /// Prompts that have room with all their rows; one when nothing is live.
    fn joining(&self) -> usize {
        let room = self.request.max_rows.saturating_sub(self.live.len()) / self.request.num_generations;
        let room = if self.live.is_empty() { room.max(1) } else { room };
        room.min(self.waiting.len())
    }

    /// Take in the waiting prompts that have room.
    fn join(&mut self, policy: &Policy) -> Result<()> {
        let GenerateRequest { num_generations, sampler, max_completion_length, key, .. } = *self.request;
        let num_generations = num_generations.get();
        let (penalised, unfiltered) = (!sampler.is_memoryless(), sampler.is_unfiltered());
        let mut prompts = Vec::new();
        for (index, prompt) in self.waiting.drain(..self.joining()) {
            prompts.push(prompt.ids);
            self.live.extend((0..num_generations).map(|generation| LiveRow {
                index: index * num_generations + generation,
                key: key.with(prompt.row).with(generation as u64),
                ids: Vec::new(),
                logps: unfiltered.then(Vec::new),
                seen: if penalised { prompt.ids.iter().copied().collect() } else { HashSet::new() },
            }));
        }
        if prompts.is_empty() {
            return Ok(());
        }
        policy.join(&mut self.state, &prompts, num_generations, max_completion_length)
    }

    /// Picks of the live rows' next tokens, or of those that come so much later.
    fn find_picks(&mut self, later: usize) {
        let temperature = self.request.sampler.temperature;
        let pick = |row: &LiveRow| {
            let uniform = row.key.with((row.ids.len() + later) as u64).uniform();
            Pick { temperature, uniform }
        };
        self.picks.clear();
        self.picks.extend(self.live.iter().map(pick));
    }

    /// Append the last tokens of the live rows; what comes next is known already but for the tokens.
    fn append(&mut self, policy: &Policy, tokens: &[u32]) -> Result<()> {
        if self.request.sampler.is_memoryless() {
            self.find_picks(0);
        } else {
            self.picks.clear();
        }
        let choice = Choice { picks: &self.picks, filters: self.request.sampler.filters() };
        policy.append_and_pick(&mut self.state, tokens, choice)
    }

    /// Queue the step after the one under way, so that a device need not wait until the host has seen its tokens. A row that
    /// ends with its token takes that step in vain; so not where one certainly ends, nor where others join before.
    fn append_ahead(&mut self, policy: &Policy) -> Result<()> {
        let ends = |row: &LiveRow| row.ids.len() + 1 >= self.request.max_completion_length;
        let is_plain = policy.decodes_ahead() && self.request.sampler.is_memoryless();
        if !is_plain || self.joining() > 0 || self.live.iter().any(ends) {
            return Ok(());
        }
        self.find_picks(1);
        let choice = Choice { picks: &self.picks, filters: self.request.sampler.filters() };
        policy.append_ahead(&mut self.state, choice)
    }

    /// Every live row gets its next token.
    fn choose(&mut self, policy: &Policy) -> Result<()> {
        let sampler = self.request.sampler;
        if sampler.is_memoryless() {
            self.find_picks(0);
            let choice = Choice { picks: &self.picks, filters: sampler.filters() };
            policy.choose_into(&self.state, choice, &mut self.chosen)?;
            for (row, chosen) in self.live.iter_mut().zip(&self.chosen) {
                row.ids.push(chosen.token);
                if let Some(logps) = &mut row.logps {
                    logps.push(chosen.logp);
                }
            }
            return Ok(());
        }
        let mut logits = policy.next_logits(&self.state)?;
        for (position, row) in self.live.iter_mut().enumerate() {
            let uniform = row.key.with(row.ids.len() as u64).uniform();
            let token = sampler.choose(logits.row_mut(position), &row.seen, uniform);
            row.ids.push(token);
            row.seen.insert(token);
        }
        Ok(())
    }
}

/// Why a completion that just got its last token ends, if it does.
fn finish_reason(text: &Text, request: &GenerateRequest<'_>, ids: &[u32]) -> Result<Option<FinishReason>> {
    if ids.last().is_some_and(|token| request.eos_token_ids.contains(token)) {
        return Ok(Some(FinishReason::Stop));
    }
    if ends_with_stop_string(text, request.stop, ids)? {
        return Ok(Some(FinishReason::Stop));
    }
    Ok((ids.len() >= request.max_completion_length).then_some(FinishReason::Length))
}

/// Whether one of the stop strings is complete. Only a tail that can hold the longest of them is decoded, so the cost a
/// token does not grow with the completion.
fn ends_with_stop_string(text: &Text, stop: &[String], ids: &[u32]) -> Result<bool> {
    let Some(longest) = stop.iter().map(String::len).max() else { return Ok(false) };
    let tail = text.decode(&ids[ids.len().saturating_sub(longest + 8)..], true)?;
    Ok(stop.iter().any(|stop| tail.contains(stop.as_str())))
}
