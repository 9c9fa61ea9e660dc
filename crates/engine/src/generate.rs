//! Continuous batching: every prompt is computed once for its G completions. A finished row leaves the batch, and the
//! rows of the next prompts join as soon as a whole group fits.

use std::collections::{HashSet, VecDeque};
use std::num::NonZeroUsize;

use super::error::Result;
use super::model::{Adapter, Choice, Chosen, DecodeState, Pick, Policy};
use super::random::Key;
use super::sampling::Sampler;
use super::text::Text;
use crate::event::FinishReason;
use crate::trajectory::Segments;
pub use rlood_types::rollout::Generated;

/// The arguments of a generation.
pub struct GenerateRequest<'a> {
    /// The prompts, in order.
    pub prompts: &'a [GeneratePrompt<'a>],
    /// Number of completions per prompt (G).
    pub num_generations: NonZeroUsize,
    /// The sampling settings for tokens.
    pub sampler: Sampler,
    /// Maximum number of tokens of a completion, including the EOS token.
    pub max_completion_length: usize,
    /// Stop strings: a completion also ends with the token that completes one of these.
    pub stop: &'a [String],
    /// The random key of the request (seed, stream and rollout index); generation extends it by
    /// row, completion and token.
    pub key: Key,
    /// All tokens that end a completion.
    pub eos_token_ids: &'a [u32],
    /// The weights to use: the policy or the reference.
    pub adapter: Adapter,
    /// Maximum number of sequences decoded concurrently; at least G for one prompt.
    pub max_rows: usize,
}

/// A prompt to generate from.
#[derive(Debug, Clone, Copy)]
pub struct GeneratePrompt<'a> {
    /// Dataset row, which is part of the random key.
    pub row: u64,
    /// Token ids of the prompt; at least one.
    pub ids: &'a [u32],
    /// Tokens that follow the prompt in all its completions, before the sampled ones. They are decoded one after another, as
    /// sampled tokens are, so that the tokens after them get the log-probs that training gives them.
    pub given: &'a [u32],
}

/// Generates G completions for each prompt, `[P][G]`, each one model segment; `None` if `stop` requested the
/// end between two tokens.
///
/// A completion is a function of (key, row, generation, weights). It does not depend on the other prompts of the
/// request, nor on `max_rows`, except for the rounding of the backend's matrix products. Its log-probs are recorded if
/// the sampler uses the whole distribution ([`Sampler::is_unfiltered`]).
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
    // Buffers reused at each step: the tokens of the sequences being decoded, and whether each sequence continues.
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
            if let Some(token) = row.given_token() {
                keep.push(true);
                tokens.push(token);
                continue;
            }
            let finish_reason = finish_reason(text, request, &row.ids)?;
            keep.push(finish_reason.is_none());
            match finish_reason {
                Some(finish_reason) => {
                    let segments = Segments::of_completion(std::mem::take(&mut row.ids), row.logps.take());
                    done[row.index] = Some(Generated { segments, finish_reason, episode: None });
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
    // Dropping the batch frees its key-value cache before training begins.
    drop(batch);
    policy.release();
    let mut done = done.into_iter().flatten();
    Ok(Some(request.prompts.iter().map(|_| done.by_ref().take(num_generations).collect()).collect()))
}

/// A completion that is still being generated.
struct LiveRow<'a> {
    /// Index of the completion in the output, prompt by prompt.
    index: usize,
    key: Key,
    /// Tokens that come first, and how many of them have been decoded.
    given: &'a [u32],
    num_given: usize,
    /// The tokens that were sampled after the given ones.
    ids: Vec<u32>,
    /// Log-probs of the sampled `ids`; `None` if the sampler filters tokens.
    logps: Option<Vec<f32>>,
    /// Tokens of prompt and completion; tracked only for the repetition penalty.
    seen: HashSet<u32>,
}

impl LiveRow<'_> {
    /// Whether the next token is sampled.
    fn is_sampled(&self) -> bool {
        self.num_given == self.given.len()
    }

    /// Returns the next token that was given, and counts it.
    fn given_token(&mut self) -> Option<u32> {
        let token = self.given.get(self.num_given).copied()?;
        self.num_given += 1;
        Some(token)
    }
}

/// The sequences being decoded, and the prompts that wait for room, with their indices.
struct Batch<'a> {
    request: &'a GenerateRequest<'a>,
    state: DecodeState,
    /// The sequences being decoded, one per row of the key-value cache.
    live: Vec<LiveRow<'a>>,
    waiting: VecDeque<(usize, &'a GeneratePrompt<'a>)>,
    /// Random picks for the next tokens of the sequences, or for the tokens after those; reused.
    picks: Vec<Pick>,
    chosen: Vec<Chosen>,
}

impl Batch<'_> {
    /// Number of waiting prompts whose completions all have room in the batch; one if no sequence is being decoded.
    fn joining(&self) -> usize {
        let room = self.request.max_rows.saturating_sub(self.live.len()) / self.request.num_generations;
        let room = if self.live.is_empty() { room.max(1) } else { room };
        room.min(self.waiting.len())
    }

    /// Adds the waiting prompts whose completions have room to the batch.
    fn join(&mut self, policy: &Policy) -> Result<()> {
        let GenerateRequest { num_generations, sampler, max_completion_length, key, .. } = *self.request;
        let num_generations = num_generations.get();
        let (penalized, unfiltered) = (!sampler.is_memoryless(), sampler.is_unfiltered());
        let mut prompts = Vec::new();
        for (index, prompt) in self.waiting.drain(..self.joining()) {
            prompts.push(prompt.ids);
            self.live.extend((0..num_generations).map(|generation| LiveRow {
                index: index * num_generations + generation,
                key: key.with(prompt.row).with(generation as u64),
                given: prompt.given,
                num_given: 0,
                ids: Vec::new(),
                logps: unfiltered.then(Vec::new),
                seen: match penalized {
                    true => prompt.ids.iter().chain(prompt.given).copied().collect(),
                    false => HashSet::new(),
                },
            }));
        }
        if prompts.is_empty() {
            return Ok(());
        }
        let most = self.request.prompts.iter().map(|prompt| prompt.given.len()).max().unwrap_or(0);
        policy.join(&mut self.state, &prompts, num_generations, most + max_completion_length)
    }

    /// Computes the random picks of the sequences' next tokens, or of the tokens `later` steps after them.
    fn find_picks(&mut self, later: usize) {
        let temperature = self.request.sampler.temperature;
        let pick = |row: &LiveRow| {
            let uniform = row.key.with((row.ids.len() + later) as u64).uniform();
            Pick { temperature, uniform }
        };
        self.picks.clear();
        self.picks.extend(self.live.iter().map(pick));
    }

    /// Appends the last chosen tokens to the sequences. The next tokens' random picks are passed along, since they do
    /// not depend on these tokens.
    fn append(&mut self, policy: &Policy, tokens: &[u32]) -> Result<()> {
        if self.request.sampler.is_memoryless() {
            self.find_picks(0);
        } else {
            self.picks.clear();
        }
        let choice = Choice { picks: &self.picks, filters: self.request.sampler.filters() };
        policy.append_and_pick(&mut self.state, tokens, choice)
    }

    /// Queues the decode step after the current one, so that a device need not wait until the host has read the current
    /// tokens. A sequence that ends with its current token computes that step in vain. The step is not queued ahead if
    /// a sequence certainly ends or if others join first.
    fn append_ahead(&mut self, policy: &Policy) -> Result<()> {
        let ends = |row: &LiveRow| row.ids.len() + 1 >= self.request.max_completion_length;
        let is_plain =
            policy.decodes_ahead() && self.request.sampler.is_memoryless() && self.live.iter().all(LiveRow::is_sampled);
        if !is_plain || self.joining() > 0 || self.live.iter().any(ends) {
            return Ok(());
        }
        self.find_picks(1);
        let choice = Choice { picks: &self.picks, filters: self.request.sampler.filters() };
        policy.append_ahead(&mut self.state, choice)
    }

    /// Chooses the next token of every sequence being decoded.
    fn choose(&mut self, policy: &Policy) -> Result<()> {
        let sampler = self.request.sampler;
        if sampler.is_memoryless() {
            self.find_picks(0);
            let choice = Choice { picks: &self.picks, filters: sampler.filters() };
            policy.choose_into(&self.state, choice, &mut self.chosen)?;
            for (row, chosen) in self.live.iter_mut().zip(&self.chosen).filter(|(row, _)| row.is_sampled()) {
                row.ids.push(chosen.token);
                if let Some(logps) = &mut row.logps {
                    logps.push(chosen.logp);
                }
            }
            return Ok(());
        }
        let mut logits = policy.next_logits(&self.state)?;
        for (position, row) in self.live.iter_mut().enumerate().filter(|(_, row)| row.is_sampled()) {
            let uniform = row.key.with(row.ids.len() as u64).uniform();
            let token = sampler.choose(logits.row_mut(position), &row.seen, uniform);
            row.ids.push(token);
            row.seen.insert(token);
        }
        Ok(())
    }
}

/// The reason why a completion ends with its last token, if it does.
fn finish_reason(text: &Text, request: &GenerateRequest<'_>, ids: &[u32]) -> Result<Option<FinishReason>> {
    if ids.last().is_some_and(|token| request.eos_token_ids.contains(token)) {
        return Ok(Some(FinishReason::Stop));
    }
    if ends_with_stop_string(text, request.stop, ids)? {
        return Ok(Some(FinishReason::Stop));
    }
    Ok((ids.len() >= request.max_completion_length).then_some(FinishReason::Length))
}

/// Whether the completion ends with a stop string. Decodes only a tail long enough for the longest stop string, so the
/// cost per token does not grow with the completion.
fn ends_with_stop_string(text: &Text, stop: &[String], ids: &[u32]) -> Result<bool> {
    let Some(longest) = stop.iter().map(String::len).max() else { return Ok(false) };
    let tail = text.decode(&ids[ids.len().saturating_sub(longest + 8)..], true)?;
    Ok(stop.iter().any(|stop| tail.contains(stop.as_str())))
}
