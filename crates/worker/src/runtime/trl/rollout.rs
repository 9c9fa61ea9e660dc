//! Puts the ranks' parts of a rollout together, and computes what the job reports of it: rewards, samples, metrics.
//!
//! Rank r has completions r·n to (r+1)·n of the rollout, and a group of one prompt's completions may span ranks.

use std::collections::BTreeMap;

use serde_json::Value;

use super::message::Part;
use crate::engine::advantage::shape::RewardStats;
use crate::engine::block::Block;
use crate::engine::error::EngineError;
use crate::engine::host::{BlockSampling, Rollout, RolloutCompletion, RolloutGroup};
use crate::engine::metrics::{RolloutRows, rollout_metrics};
use crate::engine::prompts::TokenizedPrompt;
use crate::engine::text::Text;
use crate::event::{Metrics, Sample, SamplePhase};
use crate::rollout::{Generated, RewardSample, SampledGroup, Score};
use crate::spec::Plan;

/// Metrics of TRL that a step reports. All others are computed from the completions here.
const OF_TRL: [&str; 9] =
    ["loss", "grad_norm", "learning_rate", "num_tokens", "epoch", "kl", "entropy", "frac_reward_zero_std", "step_time"];
const OF_TRL_PREFIX: &str = "clip_ratio/";

/// Returns the groups of a rollout whose parts the ranks have sampled. `rows` are the dataset rows of all completions, in order.
///
/// # Errors
/// Says what is wrong with the parts.
pub(super) fn groups_of(plan: &Plan, rows: &[u64], parts: &[&Part]) -> Result<Vec<SampledGroup>, String> {
    let completions: Vec<&Generated> = parts.iter().flat_map(|part| &part.completions).collect();
    if completions.len() != rows.len() {
        return Err(format!("{} completions were sampled for {} rows", completions.len(), rows.len()));
    }
    let limit = plan.sampling.max_completion_length as usize;
    let is_valid =
        |completion: &Generated| completion.segments.completion().is_ok_and(|ids| (1..=limit).contains(&ids.len()));
    if let Some(place) = completions.iter().position(|completion| !is_valid(completion)) {
        return Err(format!("completion {place} does not have 1 to {limit} tokens"));
    }
    let size = plan.rloo.num_generations.get() as usize;
    let groups = rows.chunks(size).zip(completions.chunks(size));
    let groups = groups.map(|(rows, completions)| SampledGroup {
        row: rows[0],
        completions: completions.iter().map(|completion| (*completion).clone()).collect(),
        prompt_ids: None,
    });
    Ok(groups.collect())
}

/// Checks the dataset rows of a rollout's completions: the size of a block, in whole groups of one row each.
pub(super) fn check_rows(plan: &Plan, rows: &[u64], num_rows: usize) -> Result<(), String> {
    let size = plan.rloo.num_generations.get() as usize;
    let block = plan.training.prompts_per_step as usize * plan.rloo.steps_per_generation as usize * size;
    if rows.len() != block {
        return Err(format!("a rollout has {} completions instead of {block}", rows.len()));
    }
    if let Some(row) = rows.iter().find(|row| **row >= num_rows as u64) {
        return Err(format!("a rollout names row {row} of a dataset with {num_rows} rows"));
    }
    match rows.chunks(size).all(|group| group.iter().all(|row| *row == group[0])) {
        true => Ok(()),
        false => Err("the completions of a group have different prompts".to_owned()),
    }
}

/// Returns the recorded part of each rank; `None` if the journal's rollout is of other rows or of another number of ranks.
pub(super) fn recorded_parts(
    rows: &[u64],
    recorded: (Vec<SampledGroup>, Vec<Value>),
    ranks: usize,
) -> Option<Vec<Part>> {
    let (groups, samplers) = recorded;
    let of_groups = groups.iter().flat_map(|group| group.completions.iter().map(|_| group.row));
    if samplers.len() != ranks || !of_groups.eq(rows.iter().copied()) {
        return None;
    }
    let completions: Vec<Generated> = groups.into_iter().flat_map(|group| group.completions).collect();
    let each = completions.len() / ranks.max(1);
    let parts = completions.chunks(each.max(1)).zip(samplers);
    Some(parts.map(|(completions, sampler)| Part { completions: completions.to_vec(), sampler }).collect())
}

/// A rollout that is being scored or trained on.
pub(super) struct Scored {
    block: Block,
    samples: Vec<RewardSample>,
}

/// Returns the completions as rewards receive them, in the rollout's order.
pub(super) fn reward_samples(
    plan: &Plan,
    text: &Text,
    prompts: &[TokenizedPrompt],
    groups: &[SampledGroup],
) -> Result<Vec<RewardSample>, EngineError> {
    let mut samples = Vec::new();
    for (index, SampledGroup { row, completions, .. }) in groups.iter().enumerate() {
        let prompt = &prompts[*row as usize];
        for completion in completions {
            let ids = completion.segments.completion()?;
            samples.push(RewardSample {
                source: plan.dataset.source_of(*row).map(str::to_owned),
                sample_id: format!("s_{}", samples.len()),
                group_id: format!("g_{index}"),
                prompt_id: format!("row_{row}"),
                prompt: prompt.text.clone(),
                messages: prompt.messages.clone(),
                completion: text.decode(ids, true)?,
                finish_reason: completion.finish_reason,
                num_tokens: u32::try_from(ids.len()).unwrap_or(u32::MAX),
                completion_ids: Some(ids.to_vec()),
                columns: prompt.columns.clone(),
                episode: None,
            });
        }
    }
    Ok(samples)
}

impl Scored {
    /// Combines the scores of a rollout into one reward per completion.
    ///
    /// # Errors
    /// Fails if a combined reward is not finite.
    pub(super) fn new(
        plan: &Plan,
        index: u64,
        (groups, samples): (Vec<SampledGroup>, Vec<RewardSample>),
        scores: Vec<Score>,
        prompts: &[TokenizedPrompt],
    ) -> Result<Self, EngineError> {
        let mut scores = scores.into_iter();
        let groups = groups.into_iter().map(|SampledGroup { row, completions, .. }| RolloutGroup {
            row,
            prompt_ids: prompts[row as usize].ids.clone(),
            completions: completions
                .into_iter()
                .zip(scores.by_ref())
                .map(|(Generated { segments, finish_reason, episode }, score)| RolloutCompletion {
                    segments,
                    finish_reason,
                    score,
                    episode,
                })
                .collect(),
            greedy: None,
        });
        let rollout = Rollout { groups: groups.collect(), drawn: BlockSampling::default() };
        let mut block = Block::new(index, rollout, plan)?;
        block.shape_rewards(RewardStats::default(), plan)?;
        Ok(Self { block, samples })
    }

    /// Returns the reward that the trainer gets for each completion; `None` = unscorable.
    pub(super) fn rewards(&self) -> &[Option<f64>] {
        &self.block.values.rewards.shaped
    }

    /// Returns the metrics of the rollout: rewards and completions.
    pub(super) fn metrics(&self, plan: &Plan) -> Metrics {
        let names: Vec<String> = plan.rewards.iter().map(|reward| reward.name.clone()).collect();
        rollout_metrics(&RolloutRows {
            reward_names: &names,
            scores: &self.block.rollout.scores(),
            weighted: &self.block.values.weighted,
            lengths: &self.block.rollout.lengths(),
            finish_reasons: &self.block.rollout.finish_reasons(),
        })
    }

    /// Returns the samples of the rollout, whose first step is `step`.
    pub(super) fn samples(&self, plan: &Plan, step: u64, advantages: &[Option<f64>]) -> Vec<Sample> {
        let completions = self.block.rollout.completions().enumerate().zip(&self.samples);
        let samples = completions.map(|((place, (group, completion)), sample)| {
            let values = plan.rewards.iter().zip(&completion.score.values);
            Sample {
                step,
                phase: SamplePhase::Train,
                group_id: format!("g_{}_{}", self.block.index, place / group.completions.len().max(1)),
                prompt_id: sample.prompt_id.clone(),
                prompt: sample.prompt.clone(),
                completion: sample.completion.clone(),
                rewards: values.map(|(reward, value)| (reward.name.clone(), value.number())).collect(),
                reward: self.block.values.weighted.get(place).copied().flatten(),
                // TRL reports the KL divergence of the whole rollout only.
                kl: None,
                advantage: advantages.get(place).copied().flatten(),
                finish_reason: sample.finish_reason,
                num_tokens: sample.num_tokens,
                episode: None,
            }
        });
        samples.collect()
    }
}

/// Returns the metrics of TRL that a step reports.
pub(super) fn trainer_metrics(values: BTreeMap<String, Option<f64>>) -> Metrics {
    let is_reported = |name: &str| OF_TRL.contains(&name) || name.starts_with(OF_TRL_PREFIX);
    values.into_iter().filter(|(name, _)| is_reported(name) && name.len() <= 100).collect()
}
