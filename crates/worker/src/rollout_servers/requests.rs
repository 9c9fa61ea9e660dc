//! Converts between the engine's requests and those of a server.

use super::client::{SampleOne, SampledOne};
use crate::engine::host::{Generated, SamplePrompt, SampleRequest};
use crate::event::FinishReason;
use crate::id::JobId;
use crate::rollout::Segments;

/// Converts a request into one per prompt. Greedy completions of a prompt are all the same, so one is requested.
pub(super) fn requests(request: &SampleRequest<'_>, adapter: &str, job: JobId) -> Vec<SampleOne> {
    let n = if request.temperature == 0.0 { 1 } else { request.num_generations.get() };
    let id = request.id;
    let one = |prompt: &SamplePrompt<'_>| SampleOne {
        adapter: adapter.to_owned(),
        prompt: prompt.ids.to_vec(),
        n,
        seed: prompt.seed,
        temperature: request.temperature,
        max_tokens: request.max_completion_length,
        stop_token_ids: request.eos_token_ids.to_vec(),
        vocab_size: request.vocab_size,
        request_id: format!("{job}.{}.{}.{}", id.step, id.round, prompt.row),
    };
    request.prompts.iter().map(one).collect()
}

/// Returns the completions of a prompt, `n` of them; greedy ones are all equal.
pub(super) fn generated(completions: Vec<SampledOne>, n: usize) -> Vec<Generated> {
    let one = |SampledOne { ids, logps, is_stopped }: SampledOne| Generated {
        segments: Segments::of_completion(ids, Some(logps)),
        finish_reason: if is_stopped { FinishReason::Stop } else { FinishReason::Length },
        episode: None,
    };
    let completions: Vec<Generated> = completions.into_iter().map(one).collect();
    completions.iter().cycle().take(n).cloned().collect()
}
