//! Overlap: while the rewards of one block are computed, the engine samples the next block, with the policy from before
//! the current block is trained. Each block except the first is therefore off-policy by one block. Its old log-probs
//! are those of the policy that sampled it, and the ratio corrects for the difference. The sampling order depends only
//! on the steps, never on how fast a reward service answers.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::host::{BlockSampling, Rollout, RolloutId, RunEnd, SampledGroup, ScoreRequest};
use super::rollouts::Rollouts;
use super::run::Run;
use super::scoring::BlockLogps;
use crate::trajectory::Trajectory;

/// A generation block whose completions are sampled but not scored yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ahead {
    /// Index of the generation block, from 0, over all epochs.
    pub index: u64,
    /// The first optimizer step that trains on the block.
    pub step: u64,
    /// Position in the shuffled prompts after this block's prompts.
    pub next_prompt: u64,
    /// The prompts with their sampled completions, in block order.
    pub groups: Vec<SampledGroup>,
    /// One greedy completion per prompt; empty unless the estimator is remax.
    pub greedy: Vec<SampledGroup>,
    /// Per-token log-probs of the policy that sampled the block, one entry per completion.
    #[serde(skip)]
    pub old_logps: Vec<Vec<f32>>,
    /// Per-token log-probs of the reference; empty when beta = 0.
    #[serde(skip)]
    pub ref_logps: Vec<Vec<f32>>,
}

impl Ahead {
    /// Completion lengths in model tokens, in block order.
    pub fn lengths(&self) -> Vec<usize> {
        self.groups
            .iter()
            .flat_map(|group| &group.completions)
            .map(|completion| completion.segments.num_model_tokens())
            .collect()
    }

    fn parts(&self) -> [(RolloutId, &[SampledGroup]); 2] {
        let id = RolloutId::train(self.step);
        [(id, &self.groups), (id.greedy(), &self.greedy)]
    }
}

/// Returns the scored block that begins with this step, with its log-probs; samples the following block meanwhile.
pub(super) fn next_block(run: &mut Run<'_>, step: u64, index: u64) -> Result<(Rollout, BlockLogps), RunEnd> {
    if run.progress.ahead.front().is_none_or(|ahead| ahead.index != index) {
        // No block was sampled ahead: this is the first block of a run, or of a resumed run
        // whose checkpoint holds none.
        run.progress.ahead.clear();
        let position = run.schedule.position_of_block(index, &run.progress.state);
        sample(run, step, index, position)?;
    }
    let next_step = step + run.schedule.batching.uses_per_block();
    if let [ahead] = run.progress.ahead.make_contiguous()
        && next_step <= run.plan.total_steps()
    {
        let position = ahead.next_prompt;
        sample(run, next_step, index + 1, position)?;
    }
    // The block stays in the queue of sampled blocks until its first step is done: a checkpoint written before
    // that must include it.
    let Some(ahead) = run.progress.ahead.front().cloned() else { return Err(run.host.stopped()) };
    let rollout = wait_for_scores(&mut run.rollouts(), &ahead)?;
    // Use the log-probs from sampling time: the policy has been trained since, and computing them now
    // would give other values.
    Ok((rollout, BlockLogps { old: ahead.old_logps, reference: ahead.ref_logps }))
}

/// Samples a block with the current policy, starts its scoring, and computes its log-probs.
fn sample(run: &mut Run<'_>, step: u64, index: u64, position: u64) -> Result<(), RunEnd> {
    run.host.poll()?;
    let (rows, next_prompt) = run.schedule.batching.block_at(position);
    let rows = run.data.dataset_rows(rows);
    let id = RolloutId::train(step);
    let mut rollouts = run.rollouts();
    let key = rollouts.train_key(index);
    let groups = rollouts.sample(id, &rows, key)?;
    let greedy = rollouts.sample_greedy(id, &rows, key)?;
    let mut ahead = Ahead { index, step, next_prompt, groups, greedy, old_logps: Vec::new(), ref_logps: Vec::new() };
    begin_scoring(&mut rollouts, &ahead)?;
    // Compute the old log-probs now, while the policy is still the one that sampled.
    let prompts: Vec<Vec<u32>> = rows.iter().map(|&row| run.data.prompts[row as usize].ids.clone()).collect();
    let trajectories = ahead.groups.iter().zip(&prompts).flat_map(|(group, prompt)| {
        group.completions.iter().map(move |completion| Trajectory::new(prompt, &completion.segments))
    });
    let trajectories: Vec<Trajectory<'_>> = trajectories.collect();
    let recorded = trajectories.iter().map(|trajectory| trajectory.segments.logps().map(Cow::into_owned)).collect();
    let BlockLogps { old, reference } = run.scorer().block_logps(&trajectories, recorded, true)?;
    (ahead.old_logps, ahead.ref_logps) = (old, reference);
    run.progress.ahead.push_back(ahead);
    Ok(())
}

/// Sends the completions of a block to the rewards without waiting for the scores.
pub(super) fn begin_scoring(rollouts: &mut Rollouts<'_>, ahead: &Ahead) -> Result<(), RunEnd> {
    for (id, groups) in ahead.parts() {
        if !groups.is_empty() {
            let samples = rollouts.reward_samples(id, groups)?;
            rollouts.host.begin_score(&ScoreRequest { id, samples: &samples })?;
        }
    }
    Ok(())
}

fn wait_for_scores(rollouts: &mut Rollouts<'_>, ahead: &Ahead) -> Result<Rollout, RunEnd> {
    let id = RolloutId::train(ahead.step);
    let mut groups = rollouts.score(id, &ahead.groups)?;
    rollouts.score_greedy(id, &ahead.greedy, &mut groups)?;
    let drawn = BlockSampling { next_prompt: Some(ahead.next_prompt), ..BlockSampling::default() };
    Ok(Rollout { groups, drawn })
}
