//! Which prompts a generation block holds, when it is used, and what a completion is (rloo.md, "Batching").

use std::num::NonZeroUsize;

use super::random;
use crate::event::FinishReason;
use crate::spec::Plan;

/// The order of the training prompts: per epoch one permutation, cut in blocks of U prompts, the incomplete last block
/// dropped, each block used μ·S times in a row (TRL's RepeatSampler, with a permutation of our own).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batching {
    /// Rows of the dataset (N).
    pub num_rows: u64,
    /// Completions a prompt (G).
    pub num_generations: u64,
    /// Unique prompts a block (U).
    pub prompts_per_block: u64,
    /// Slices a block is trained in (S): optimizer steps, or TRL's micro-steps.
    pub steps_per_generation: u64,
    /// Times all slices are trained (μ).
    pub num_iterations: u64,
    /// Slices an optimizer step; 1 in this engine, whose steps are whole (TRL counts micro-steps).
    pub gradient_accumulation_steps: u64,
    /// Of the order.
    pub seed: u64,
    /// False = the dataset's order in every epoch.
    pub shuffle: bool,
}

/// The same in TRL's terms: batches are counted in completions, steps in micro-steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrlBatching {
    /// Rows of the dataset.
    pub num_rows: u64,
    /// Completions a prompt (G).
    pub num_generations: u64,
    /// Completions a micro-step and process (B).
    pub per_device_train_batch_size: u64,
    /// Processes (W).
    pub world_size: u64,
    /// Micro-steps an optimizer step.
    pub gradient_accumulation_steps: u64,
    /// Micro-steps a generation batch (S).
    pub steps_per_generation: u64,
    /// Times a generation batch is trained (μ).
    pub num_iterations: u64,
}

impl TrlBatching {
    /// Completions a generation batch: B·W·S.
    pub fn generation_batch_size(&self) -> u64 {
        self.per_device_train_batch_size * self.world_size * self.steps_per_generation
    }
}

/// Where in the order an optimizer step stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// Generation block, from 0, over all epochs.
    pub block: u64,
    /// Which of its S slices.
    pub slice: u64,
    /// Which use of the block, from 0 to μ·S − 1; 0 = the rollout is new.
    pub use_index: u64,
}

/// Completions a prompt (G), as the plan says.
pub fn num_generations(plan: &Plan) -> NonZeroUsize {
    // A usize holds every u32 on the machines that this builds for.
    NonZeroUsize::try_from(plan.rloo.num_generations).unwrap_or(NonZeroUsize::MAX)
}

impl Batching {
    /// The order of a plan.
    pub fn of_plan(plan: &Plan, num_rows: u64) -> Self {
        let steps_per_generation = u64::from(plan.rloo.steps_per_generation);
        Self {
            num_rows,
            num_generations: num_generations(plan).get() as u64,
            prompts_per_block: u64::from(plan.training.prompts_per_step) * steps_per_generation,
            steps_per_generation,
            num_iterations: u64::from(plan.rloo.num_iterations),
            gradient_accumulation_steps: 1,
            seed: plan.training.seed,
            shuffle: plan.training.shuffle_dataset,
        }
    }

    /// TRL's batching with an unshuffled dataset.
    pub fn of_trl(trl: &TrlBatching) -> Self {
        Self {
            num_rows: trl.num_rows,
            num_generations: trl.num_generations,
            prompts_per_block: trl.generation_batch_size().checked_div(trl.num_generations).unwrap_or(0),
            steps_per_generation: trl.steps_per_generation,
            num_iterations: trl.num_iterations,
            gradient_accumulation_steps: trl.gradient_accumulation_steps,
            seed: 0,
            shuffle: false,
        }
    }

    /// Uses of one block: μ·S.
    pub fn uses_per_block(&self) -> u64 {
        self.num_iterations * self.steps_per_generation
    }

    /// Complete blocks in one epoch.
    pub fn blocks_per_epoch(&self) -> u64 {
        self.num_rows.checked_div(self.prompts_per_block).unwrap_or(0)
    }

    /// Rows left out of each epoch.
    pub fn dropped_rows_per_epoch(&self) -> u64 {
        self.num_rows - self.blocks_per_epoch() * self.prompts_per_block
    }

    /// Slices trained in one epoch (TRL's micro-steps).
    pub fn slices_per_epoch(&self) -> u64 {
        self.blocks_per_epoch() * self.uses_per_block()
    }

    /// Optimizer steps in one epoch.
    pub fn optimizer_steps_per_epoch(&self) -> u64 {
        self.slices_per_epoch().div_ceil(self.gradient_accumulation_steps.max(1))
    }

    /// The place of an optimizer step (1-based) where one slice is one step.
    pub fn cursor(&self, step: u64) -> Cursor {
        let done = step.saturating_sub(1);
        let uses = self.uses_per_block().max(1);
        let use_index = done % uses;
        Cursor { block: done / uses, slice: use_index % self.steps_per_generation.max(1), use_index }
    }

    /// Passes over the dataset after so many optimizer steps.
    pub fn epochs(&self, steps_done: u64) -> f64 {
        steps_done as f64 / self.optimizer_steps_per_epoch().max(1) as f64
    }

    /// The dataset rows of a block (U), in block order, where no refill moved the cursor; empty when the dataset is smaller
    /// than one block.
    pub fn block_rows(&self, block: u64) -> Vec<u64> {
        self.block_at(self.position_of_block(block)).0
    }

    /// Where a block begins when no refill moved the cursor. A position counts prompts over all epochs, N an epoch.
    pub fn position_of_block(&self, block: u64) -> u64 {
        let blocks = self.blocks_per_epoch().max(1);
        (block / blocks) * self.num_rows + (block % blocks) * self.prompts_per_block
    }

    /// The rows of the block that begins at this position, or with the next epoch where this one has too few left; and the
    /// position behind it. Empty when the dataset is smaller than one block.
    pub fn block_at(&self, position: u64) -> (Vec<u64>, u64) {
        if self.blocks_per_epoch() == 0 {
            return (Vec::new(), position);
        }
        let left = self.num_rows - position % self.num_rows;
        let start = if left < self.prompts_per_block { position + left } else { position };
        self.prompts_at(start, self.prompts_per_block)
    }

    /// Rows of so many prompts from this position on, across epochs, and the position behind them.
    pub fn prompts_at(&self, position: u64, count: u64) -> (Vec<u64>, u64) {
        let (mut rows, mut next, end) = (Vec::new(), position, position + count);
        while next < end && self.num_rows > 0 {
            let (epoch, start) = (next / self.num_rows, next % self.num_rows);
            let taken = (self.num_rows - start).min(end - next);
            rows.extend_from_slice(&self.epoch_order(epoch)[start as usize..(start + taken) as usize]);
            next += taken;
        }
        (rows, next)
    }

    /// One dataset row a completion, in the order of one epoch: every block μ·S times, every prompt G times.
    pub fn epoch_completion_order(&self, epoch: u64) -> Vec<u64> {
        let first = epoch * self.blocks_per_epoch();
        let mut order = Vec::new();
        for block in first..first + self.blocks_per_epoch() {
            let rows = self.block_rows(block);
            for _ in 0..self.uses_per_block() {
                for &row in &rows {
                    order.extend(std::iter::repeat_n(row, self.num_generations as usize));
                }
            }
        }
        order
    }

    fn epoch_order(&self, epoch: u64) -> Vec<u64> {
        if self.shuffle { random::permutation(self.seed, epoch, self.num_rows) } else { (0..self.num_rows).collect() }
    }
}

/// The completion in raw generated ids: up to and including the first end-of-sequence token, at most `max_length`
/// tokens. Only token ids in `eos_token_ids` end it; padding is a matter of lengths, never of values.
pub fn cut_completion(raw: &[u32], eos_token_ids: &[u32], max_length: usize) -> (Vec<u32>, FinishReason) {
    let raw = &raw[..raw.len().min(max_length)];
    match raw.iter().position(|id| eos_token_ids.contains(id)) {
        Some(end) => (raw[..=end].to_vec(), FinishReason::Stop),
        None => (raw.to_vec(), FinishReason::Length),
    }
}

/// Whether a completion takes part in KL and loss.
pub fn is_included(finish_reason: FinishReason, mask_truncated_completions: bool) -> bool {
    match finish_reason {
        FinishReason::Stop => true,
        FinishReason::Length => !mask_truncated_completions,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCHING: Batching = Batching {
        num_rows: 7,
        num_generations: 2,
        prompts_per_block: 3,
        steps_per_generation: 3,
        num_iterations: 2,
        gradient_accumulation_steps: 1,
        seed: 42,
        shuffle: true,
    };

    #[test]
    fn all_slices_are_trained_once_and_then_again() {
        let slices: Vec<(u64, u64)> = (1..=7).map(|step| BATCHING.cursor(step)).map(|c| (c.block, c.slice)).collect();
        assert_eq!(slices, [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1), (0, 2), (1, 0)]);
        assert_eq!(BATCHING.cursor(7).use_index, 0);
    }

    #[test]
    fn a_position_counts_prompts_and_blocks_skip_the_incomplete_rest_of_an_epoch() {
        let mut position = 0;
        for block in 0..6 {
            let (rows, next) = BATCHING.block_at(position);
            assert_eq!(rows, BATCHING.block_rows(block));
            // Two blocks of three in seven rows: the seventh is dropped.
            assert_eq!(next, (block / 2) * 7 + (block % 2) * 3 + 3);
            position = next;
        }
        // A refill of two takes the next rows, the rest of the epoch included, and the next block begins behind them.
        let epoch = [random::permutation(42, 0, 7), random::permutation(42, 1, 7)].concat();
        assert_eq!(BATCHING.prompts_at(6, 3), (epoch[6..9].to_vec(), 9));
        assert_eq!(BATCHING.block_at(9), (epoch[9..12].to_vec(), 12));
        assert_eq!(BATCHING.block_at(12).0, random::permutation(42, 2, 7)[..3]);
    }

    #[test]
    fn an_epoch_holds_no_row_twice_and_the_next_one_has_another_order() {
        let epoch = |first: u64| [BATCHING.block_rows(first), BATCHING.block_rows(first + 1)].concat();
        let mut rows = epoch(0);
        assert_ne!(rows, epoch(2));
        rows.sort_unstable();
        rows.dedup();
        assert_eq!(rows.len(), 6);
    }
}
