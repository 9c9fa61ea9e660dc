//! Sampling on rollout servers: the adapter is exported after each update, and the host asks the servers for completions.
//!
//! The engine gives the host what is needed to check a server: a few token sequences with their log-probs under the base model and
//! under the exported adapter. It never trusts a server's log-probs as old log-probs: those are computed again before training.

use std::num::NonZeroUsize;
use std::path::Path;

use tempfile::TempDir;

use super::certificate;
use super::error::EngineError;
use super::host::{Generated, RolloutId, RunEnd};
use super::model::{Adapter, Policy};
use super::random::Key;
use super::rollouts::Rollouts;
use super::run::{Data, Model};
use crate::event::SamplePhase;
use crate::spec::Plan;

/// Number of probe sequences, and of tokens in each.
const PROBES: usize = 4;
const PROBE_TOKENS: usize = 48;
/// Number of bits of a seed. JSON numbers are exact up to 2^53.
const SEED_BITS: u32 = 53;

/// A request for completions from rollout servers.
#[derive(Debug)]
pub struct SampleRequest<'a> {
    /// The rollout that the completions belong to.
    pub id: RolloutId,
    /// The prompts, in order.
    pub prompts: &'a [SamplePrompt<'a>],
    /// Number of completions per prompt.
    pub num_generations: NonZeroUsize,
    /// The sampling temperature; 0 = greedy.
    pub temperature: f64,
    /// Maximum number of tokens of a completion, including the end-of-sequence token.
    pub max_completion_length: usize,
    /// All tokens that end a completion.
    pub eos_token_ids: &'a [u32],
    /// Number of different token ids of the model.
    pub vocab_size: usize,
    /// The weights to sample with.
    pub adapter: &'a ExportedAdapter,
}

/// A prompt to sample from.
#[derive(Debug, Clone, Copy)]
pub struct SamplePrompt<'a> {
    /// Dataset row of the prompt.
    pub row: u64,
    /// Token ids of the prompt; at least one.
    pub ids: &'a [u32],
    /// Seed of the first completion; the seeds of the others follow it. A function of the job's seed, the rollout and the row.
    pub seed: u64,
}

/// The current adapter as a PEFT directory, and the log-probs by which a server's copy of it is checked.
#[derive(Debug)]
pub struct ExportedAdapter {
    /// Number of optimizer updates behind the weights.
    pub updates: u64,
    /// Number of optimizer steps done when the adapter was exported.
    pub step: u64,
    /// Directory of the adapter. It lasts as long as this value.
    pub dir: TempDir,
    /// Number of tokens that a server must be able to read: the longest prompt with its completion, or a probe.
    pub max_tokens: usize,
    /// Sequences of token ids, each with at least 2.
    pub probes: Vec<Vec<u32>>,
    /// Log-probs in nats of each token but the first of each probe, under the base model.
    pub base_logps: Vec<Vec<f32>>,
    /// The same under the exported adapter.
    pub logps: Vec<Vec<f32>>,
}

/// Samples completions for these dataset rows on rollout servers.
pub(super) fn sample(
    rollouts: &mut Rollouts<'_>,
    id: RolloutId,
    rows: &[u64],
    key: Key,
    temperature: f64,
    num_generations: NonZeroUsize,
) -> Result<Vec<Vec<Generated>>, RunEnd> {
    let (updates, step) = (rollouts.model.optimizer.updates(), rollouts.steps_done);
    let known = rollouts.model.exported.take().filter(|exported| exported.updates == updates);
    let exported = match known {
        Some(exported) => exported,
        None => export(rollouts.model, rollouts.data, rollouts.plan, rollouts.scratch_dir, step)?,
    };
    let prompts = rollouts.data.prompts_of(id.phase);
    let prompt = |&row: &u64| SamplePrompt {
        row,
        ids: &prompts[row as usize].ids,
        seed: seed(key.with(row), num_generations.get() as u64),
    };
    let prompts: Vec<SamplePrompt<'_>> = rows.iter().map(prompt).collect();
    let sampled = rollouts.host.sample(&SampleRequest {
        id,
        prompts: &prompts,
        num_generations,
        temperature,
        max_completion_length: rollouts.plan.sampling.max_completion_length as usize,
        eos_token_ids: rollouts.data.text.eos_token_ids(),
        vocab_size: rollouts.model.policy.card().config.vocab_size,
        adapter: &exported,
    });
    rollouts.model.exported = Some(exported);
    let sampled = sampled?;
    let whole = |completions: &Vec<Generated>| completions.len() == num_generations.get();
    if sampled.len() != rows.len() || !sampled.iter().all(whole) {
        let message = format!("the host sampled {} groups for {} prompts", sampled.len(), rows.len());
        return Err(RunEnd::Failed(EngineError::Input(message)));
    }
    Ok(sampled)
}

/// Writes the current adapter, and computes the log-probs of the probes.
fn export(
    model: &Model,
    data: &Data,
    plan: &Plan,
    scratch_dir: &Path,
    step: u64,
) -> Result<ExportedAdapter, EngineError> {
    let io = |source| EngineError::Io { path: scratch_dir.to_owned(), source };
    std::fs::create_dir_all(scratch_dir).map_err(io)?;
    let dir = tempfile::Builder::new().prefix(".rollout-").tempdir_in(scratch_dir).map_err(io)?;
    let policy = &model.policy;
    policy.save_lora(dir.path(), &plan.model.id)?;
    let probes = probes(data, policy);
    let logps = |adapter| {
        let probes: Vec<&[u32]> = probes.iter().map(Vec::as_slice).collect();
        certificate::logps(policy, &probes, adapter, &|| false)
    };
    let (base_logps, logps) = (logps(Adapter::Off)?, logps(Adapter::On)?);
    let longest = |phase| data.prompts_of(phase).iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
    let longest = longest(SamplePhase::Train).max(longest(SamplePhase::Eval));
    // A server also reads the probes, and samples at least one token after them.
    let longest_probe = probes.iter().map(|probe| probe.len() + 1).max().unwrap_or(0);
    let max_tokens = (longest + plan.sampling.max_completion_length as usize).max(longest_probe);
    Ok(ExportedAdapter { updates: model.optimizer.updates(), step, dir, max_tokens, probes, base_logps, logps })
}

/// Builds probes from the training prompts, which are joined where they are too short.
fn probes(data: &Data, policy: &Policy) -> Vec<Vec<u32>> {
    let prompts = data.prompts_of(SamplePhase::Train);
    let length = PROBE_TOKENS.min(policy.card().max_position_embeddings.saturating_sub(1)).max(2);
    let probe = |first: usize| {
        let ids = prompts.iter().cycle().skip(first).take(PROBE_TOKENS).flat_map(|prompt| prompt.ids.iter().copied());
        ids.take(length).collect::<Vec<u32>>()
    };
    (0..PROBES.min(prompts.len())).map(probe).filter(|probe| probe.len() >= 2).collect()
}

/// Returns a seed that is at least `num_generations` away from the seeds of other keys, or equal to one.
fn seed(key: Key, num_generations: u64) -> u64 {
    let spacing = num_generations.next_power_of_two();
    (key.bits() >> (64 - SEED_BITS + spacing.trailing_zeros())) * spacing
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Stream;

    #[test]
    fn seeds_are_exact_in_json_and_leave_room_for_every_completion() {
        for num_generations in [1, 4, 5, 64] {
            let seeds: Vec<u64> =
                (0..200).map(|row| seed(Key::new(7, Stream::Train).with(row), num_generations)).collect();
            assert!(seeds.iter().all(|seed| seed + num_generations < 1 << SEED_BITS));
            let mut sorted = seeds.clone();
            sorted.sort_unstable();
            assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] >= num_generations), "{num_generations}");
            assert_eq!(seeds[3], seed(Key::new(7, Stream::Train).with(3), num_generations));
        }
    }
}
