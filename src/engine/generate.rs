//! Batched decoding with a KV cache: every prompt is prefilled once for its G completions, every row ends by itself and
//! then leaves the batch.

use std::collections::HashSet;

use super::error::Result;
use super::model::{Adapter, DecodeState, Logits, Policy};
use super::random::Key;
use super::sampling::Sampler;
use super::text::Text;
use crate::event::FinishReason;
pub use crate::sample::Generated;

/// What to sample.
pub struct GenerateRequest<'a> {
    /// The prompts, in order.
    pub prompts: &'a [GeneratePrompt<'a>],
    /// Completions a prompt (G).
    pub num_generations: usize,
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
    /// Sequences decoded at once; at least one prompt's G are.
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

/// G completions for each prompt, `[P][G]`; `None` when `stop` said so between two tokens.
///
/// A completion is a function of (key, row, generation, weights): it does not depend on which other prompts are in the
/// request, nor on `max_rows`, but for the rounding of the backend's matrix products.
pub fn generate(
    policy: &Policy,
    text: &Text,
    request: &GenerateRequest<'_>,
    stop: &dyn Fn() -> bool,
) -> Result<Option<Vec<Vec<Generated>>>> {
    let prompts_at_once = (request.max_rows / request.num_generations.max(1)).max(1);
    let mut completions = Vec::with_capacity(request.prompts.len());
    for prompts in request.prompts.chunks(prompts_at_once) {
        match generate_batch(policy, text, request, prompts, stop)? {
            Some(batch) => completions.extend(batch),
            None => return Ok(None),
        }
    }
    Ok(Some(completions))
}

/// A sequence that still grows.
struct LiveRow {
    /// Index in the batch's output: prompt-major.
    index: usize,
    key: Key,
    ids: Vec<u32>,
    /// Tokens of prompt and completion; kept only for the repetition penalty.
    seen: HashSet<u32>,
}

fn generate_batch(
    policy: &Policy,
    text: &Text,
    request: &GenerateRequest<'_>,
    prompts: &[GeneratePrompt<'_>],
    stop: &dyn Fn() -> bool,
) -> Result<Option<Vec<Vec<Generated>>>> {
    let num_generations = request.num_generations;
    let ids: Vec<&[u32]> = prompts.iter().map(|prompt| prompt.ids).collect();
    let penalised = request.sampler.repetition_penalty != 1.0;
    let mut live: Vec<LiveRow> = Vec::with_capacity(prompts.len() * num_generations);
    for prompt in prompts {
        for generation in 0..num_generations {
            live.push(LiveRow {
                index: live.len(),
                key: request.key.with(prompt.row).with(generation as u64),
                ids: Vec::new(),
                seen: if penalised { prompt.ids.iter().copied().collect() } else { HashSet::new() },
            });
        }
    }
    let mut done: Vec<Option<Generated>> = vec![None; live.len()];
    if stop() {
        return Ok(None);
    }
    let (mut state, mut logits): (DecodeState, Logits) =
        policy.prefill(&ids, num_generations, request.max_completion_length, request.adapter)?;
    loop {
        let mut tokens = Vec::with_capacity(live.len());
        let mut keep = Vec::with_capacity(live.len());
        for (position, row) in live.iter_mut().enumerate() {
            let uniform = row.key.with(row.ids.len() as u64).uniform();
            let token = request.sampler.choose(logits.row_mut(position), &row.seen, uniform);
            row.ids.push(token);
            if penalised {
                row.seen.insert(token);
            }
            let finish_reason = finish_reason(text, request, &row.ids)?;
            keep.push(finish_reason.is_none());
            match finish_reason {
                Some(finish_reason) => {
                    done[row.index] = Some(Generated { ids: std::mem::take(&mut row.ids), finish_reason });
                }
                None => tokens.push(token),
            }
        }
        if tokens.is_empty() {
            break;
        }
        if stop() {
            return Ok(None);
        }
        if tokens.len() < live.len() {
            policy.retain(&mut state, &keep)?;
            let mut kept = keep.iter().copied();
            live.retain(|_| kept.next().unwrap_or(false));
        }
        logits = policy.decode(&mut state, &tokens)?;
    }
    let mut done = done.into_iter().flatten();
    Ok(Some(prompts.iter().map(|_| done.by_ref().take(num_generations).collect()).collect()))
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
