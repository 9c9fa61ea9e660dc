//! Overlap: while the rewards of one block are outstanding, the next one is sampled, by the policy as it is before the block
//! is trained. Each block but the first is therefore off-policy by one block; its old log-probs are those of the policy that
//! sampled it, and the ratio corrects for the rest. What is sampled when follows from the steps alone, never from how fast
//! a reward answers.

use serde::{Deserialize, Serialize};

use super::host::{Drawn, Rollout, RolloutId, SampledGroup, ScoreRequest};
use super::model::Row;
use super::random::{Key, Stream};
use super::sampling::Sampler;
use super::{Halt, Run};
use crate::spec::Estimator;

/// A block that is sampled and not scored yet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ahead {
    /// Which block, from 0, over all epochs.
    pub index: u64,
    /// The optimizer step that begins it.
    pub step: u64,
    /// The cursor behind its prompts.
    pub next_prompt: u64,
    /// Its groups, in block order.
    pub groups: Vec<SampledGroup>,
    /// One greedy completion a prompt; empty but for remax.
    pub greedy: Vec<SampledGroup>,
    /// Per-token log-probs of the policy that sampled it, one entry a completion.
    #[serde(skip)]
    pub old_logps: Vec<Vec<f32>>,
    /// Per-token log-probs of the reference; empty when beta = 0.
    #[serde(skip)]
    pub ref_logps: Vec<Vec<f32>>,
}

impl Ahead {
    /// Completion lengths in tokens, in block order.
    pub fn lengths(&self) -> Vec<usize> {
        self.groups.iter().flat_map(|group| &group.completions).map(|completion| completion.ids.len()).collect()
    }

    fn parts(&self) -> [(RolloutId, &[SampledGroup]); 2] {
        let id = RolloutId::train(self.step);
        [(id, &self.groups), (id.greedy(), &self.greedy)]
    }
}

impl Run<'_> {
    /// The block that begins with this step, scored, with its log-probs; the one behind it is sampled meanwhile.
    pub(super) fn overlapped(&mut self, step: u64, index: u64) -> Result<(Rollout, Ahead), Halt> {
        if self.ahead.front().is_none_or(|ahead| ahead.index != index) {
            // The first block of a run, or of one that goes on where no checkpoint foresaw it.
            self.ahead.clear();
            let position = self.state.next_prompt.unwrap_or_else(|| self.batching.position_of_block(index));
            self.sample_ahead(step, index, position)?;
        }
        let next_step = step + self.batching.uses_per_block();
        if let [ahead] = self.ahead.make_contiguous()
            && next_step <= self.plan.training.max_steps
        {
            let position = ahead.next_prompt;
            self.sample_ahead(next_step, index + 1, position)?;
        }
        // Stays in its place until its first step is done: a checkpoint on the way out needs it.
        let Some(ahead) = self.ahead.front().cloned() else { return Err(self.halt()) };
        let rollout = self.scored(&ahead)?;
        Ok((rollout, ahead))
    }

    /// Samples a block with the policy as it is, has its scoring begun, and computes its log-probs.
    fn sample_ahead(&mut self, step: u64, index: u64, position: u64) -> Result<(), Halt> {
        self.poll()?;
        let (rows, next_prompt) = self.batching.block_at(position);
        let rows = self.dataset_rows(rows);
        let key = Key::new(self.plan.training.seed, Stream::Train).with(index);
        let id = RolloutId::train(step);
        let sampling = &self.plan.sampling;
        let groups = self.sampled_groups(id, &rows, key, Sampler::new(sampling, sampling.temperature))?;
        let greedy = match self.plan.rloo.estimator {
            Estimator::Remax => self.sampled_groups(id.greedy(), &rows, key, Sampler::new(sampling, 0.0))?,
            _ => Vec::new(),
        };
        let mut ahead =
            Ahead { index, step, next_prompt, groups, greedy, old_logps: Vec::new(), ref_logps: Vec::new() };
        self.begin_scoring(&ahead)?;
        // Now, while the policy is the one that sampled.
        let prompts: Vec<Vec<u32>> = rows.iter().map(|&row| self.prompts[row as usize].ids.clone()).collect();
        let recorded: Option<Vec<Vec<f32>>> = ahead
            .groups
            .iter()
            .flat_map(|group| &group.completions)
            .map(|completion| completion.logps.clone().filter(|logps| logps.len() == completion.ids.len()))
            .collect();
        let completions = ahead.groups.iter().zip(&prompts).flat_map(|(group, prompt)| {
            group.completions.iter().map(move |completion| Row { prompt, completion: &completion.ids })
        });
        let completions: Vec<Row<'_>> = completions.collect();
        let (old_logps, ref_logps) = self.logps_of(&completions, recorded, true)?;
        (ahead.old_logps, ahead.ref_logps) = (old_logps, ref_logps);
        self.ahead.push_back(ahead);
        Ok(())
    }

    /// Hands a block to the rewards, without waiting for them.
    pub(super) fn begin_scoring(&mut self, ahead: &Ahead) -> Result<(), Halt> {
        for (id, groups) in ahead.parts() {
            if !groups.is_empty() {
                let samples = self.reward_samples(id, groups)?;
                self.host.begin_score(&ScoreRequest { id, samples: &samples })?;
            }
        }
        Ok(())
    }

    /// Waits for the rewards of a block.
    fn scored(&mut self, ahead: &Ahead) -> Result<Rollout, Halt> {
        let [(id, groups), (greedy_id, greedy)] = ahead.parts();
        let mut groups = self.score_sampled(id, groups)?;
        if !greedy.is_empty() {
            for (group, greedy) in groups.iter_mut().zip(self.score_sampled(greedy_id, greedy)?) {
                group.greedy = greedy.completions.into_iter().next();
            }
        }
        let drawn = Drawn { next_prompt: Some(ahead.next_prompt), ..Drawn::default() };
        Ok(Rollout { groups, drawn })
    }
}
