//! Defines which prompts a generation block holds, which steps use it, and where a
//! completion ends (rloo.md, "Batching").

use std::num::NonZeroUsize;

use super::random::{Key, Stream, shuffled, source_permutation};
use crate::event::FinishReason;
use crate::spec::{Mixture, Plan};

/// The order of the training prompts. Each epoch has one permutation, split into blocks of U prompts; an incomplete
/// last block is dropped, and each block is used μ·S times in a row (TRL's RepeatSampler, with our own permutation). If
/// the rows come from several sources, a permutation by seed and epoch decides the source of each prompt, and each
/// source has its own permutation of rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Batching {
    /// Number of rows of the dataset (N), and how its sources alternate.
    pub mixture: Mixture,
    /// Number of completions per prompt (G).
    pub num_generations: u64,
    /// Number of unique prompts per block (U).
    pub prompts_per_block: u64,
    /// Number of slices that a block is trained in (S): optimizer steps, or TRL's micro-steps.
    pub steps_per_generation: u64,
    /// How many times all slices are trained (μ).
    pub num_iterations: u64,
    /// Number of slices per optimizer step; 1 in this engine, whose steps are whole (TRL counts micro-steps).
    pub gradient_accumulation_steps: u64,
    /// Seed of the order.
    pub seed: u64,
    /// Whether to shuffle the prompts; false = the dataset's order in every epoch.
    pub shuffle: bool,
}

/// The batching in TRL's terms: batches are counted in completions, steps in micro-steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrlBatching {
    /// Number of rows of the dataset.
    pub num_rows: u64,
    /// Number of completions per prompt (G).
    pub num_generations: u64,
    /// Number of completions per micro-step and process (B).
    pub per_device_train_batch_size: u64,
    /// Number of processes (W).
    pub world_size: u64,
    /// Number of micro-steps per optimizer step.
    pub gradient_accumulation_steps: u64,
    /// Number of micro-steps per generation batch (S).
    pub steps_per_generation: u64,
    /// How many times a generation batch is trained (μ).
    pub num_iterations: u64,
}

impl TrlBatching {
    /// Number of completions per generation batch: B·W·S.
    pub fn generation_batch_size(&self) -> u64 {
        self.per_device_train_batch_size * self.world_size * self.steps_per_generation
    }
}

/// The position of an optimizer step: its generation block, the slice of that block, and how often the block was used before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// Index of the generation block, from 0, over all epochs.
    pub block: u64,
    /// Index of the slice that the step trains within its block, below S.
    pub slice: u64,
    /// Number of times the block was used before this step, from 0 to μ·S − 1; 0 = the rollout is new.
    pub use_index: u64,
}

/// Number of completions per prompt (G) of a job's plan.
pub fn num_generations(plan: &Plan) -> NonZeroUsize {
    // A usize holds every u32 on the supported machines.
    NonZeroUsize::try_from(plan.rloo.num_generations).unwrap_or(NonZeroUsize::MAX)
}

impl Batching {
    /// The order of training prompts for a job's plan.
    pub fn of_plan(plan: &Plan, mixture: Mixture) -> Self {
        let steps_per_generation = u64::from(plan.rloo.steps_per_generation);
        Self {
            mixture,
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
            mixture: Mixture::single(trl.num_rows),
            num_generations: trl.num_generations,
            prompts_per_block: trl.generation_batch_size().checked_div(trl.num_generations).unwrap_or(0),
            steps_per_generation: trl.steps_per_generation,
            num_iterations: trl.num_iterations,
            gradient_accumulation_steps: trl.gradient_accumulation_steps,
            seed: 0,
            shuffle: false,
        }
    }

    /// Number of uses of one block: μ·S.
    pub fn uses_per_block(&self) -> u64 {
        self.num_iterations * self.steps_per_generation
    }

    /// Number of complete blocks in the first epoch. With several sources, the number of prompts per source may differ
    /// by one between epochs.
    pub fn blocks_per_epoch(&self) -> u64 {
        self.blocks_of(0)
    }

    /// Whether every epoch has at least one complete block.
    pub fn fills_a_block(&self) -> bool {
        self.prompts_per_block > 0 && self.mixture.shortest_epoch() >= self.prompts_per_block
    }

    fn blocks_of(&self, epoch: u64) -> u64 {
        self.mixture.epoch_len(epoch).checked_div(self.prompts_per_block).unwrap_or(0)
    }

    /// Number of prompts left out of the first epoch.
    pub fn dropped_rows_per_epoch(&self) -> u64 {
        self.mixture.epoch_len(0) - self.blocks_per_epoch() * self.prompts_per_block
    }

    /// Number of slices trained in one epoch (TRL's micro-steps).
    pub fn slices_per_epoch(&self) -> u64 {
        self.blocks_per_epoch() * self.uses_per_block()
    }

    /// Number of optimizer steps in one epoch.
    pub fn optimizer_steps_per_epoch(&self) -> u64 {
        self.slices_per_epoch().div_ceil(self.gradient_accumulation_steps.max(1))
    }

    /// The position of an optimizer step (1-based), if one slice is one step.
    pub fn cursor(&self, step: u64) -> Cursor {
        let done = step.saturating_sub(1);
        let uses = self.uses_per_block().max(1);
        let use_index = done % uses;
        Cursor { block: done / uses, slice: use_index % self.steps_per_generation.max(1), use_index }
    }

    /// Number of passes over the dataset after `steps_done` optimizer steps.
    pub fn epochs(&self, steps_done: u64) -> f64 {
        steps_done as f64 / self.optimizer_steps_per_epoch().max(1) as f64
    }

    /// The dataset rows of a block (U), in block order, if no refill consumed prompts; empty if the dataset is
    /// smaller than one block.
    pub fn block_rows(&self, block: u64) -> Vec<u64> {
        self.block_at(self.position_of_block(block)).0
    }

    /// The position at which a block begins if no refill consumed prompts. A position counts prompts over all epochs.
    pub fn position_of_block(&self, block: u64) -> u64 {
        let (mut epoch, mut within) = (0, block);
        if self.mixture.is_even() {
            let blocks = self.blocks_per_epoch().max(1);
            (epoch, within) = (block / blocks, block % blocks);
        } else if self.fills_a_block() {
            while within >= self.blocks_of(epoch) {
                within -= self.blocks_of(epoch);
                epoch += 1;
            }
        }
        self.mixture.start(epoch) + within * self.prompts_per_block
    }

    /// Number of passes over the dataset at a position; an epoch ends with its last block.
    pub fn epochs_at(&self, position: u64) -> f64 {
        let epoch = self.mixture.epoch_of(position.saturating_sub(1));
        let trained = (self.blocks_of(epoch) * self.prompts_per_block).max(1);
        let within = position.saturating_sub(self.mixture.start(epoch));
        epoch as f64 + (within as f64 / trained as f64).min(1.0)
    }

    /// Returns the rows of the block that begins at this position, or with the next epoch if this one has too few
    /// prompts left; and the position after it. Empty if an epoch is smaller than one block.
    pub fn block_at(&self, position: u64) -> (Vec<u64>, u64) {
        if !self.fills_a_block() {
            return (Vec::new(), position);
        }
        self.prompts_at(self.block_start(position), self.prompts_per_block)
    }

    fn block_start(&self, position: u64) -> u64 {
        let end = self.mixture.start(self.mixture.epoch_of(position) + 1);
        if end - position < self.prompts_per_block { end } else { position }
    }

    /// Returns the rows of `count` prompts from this position on, across epochs, and the position after them.
    pub fn prompts_at(&self, position: u64, count: u64) -> (Vec<u64>, u64) {
        let (mut rows, mut next, end) = (Vec::new(), position, position + count);
        while next < end && self.mixture.num_rows() > 0 {
            let epoch = self.mixture.epoch_of(next);
            let (begin, over) = (self.mixture.start(epoch), self.mixture.start(epoch + 1));
            let taken = over.min(end) - next;
            let start = (next - begin) as usize;
            rows.extend_from_slice(&self.epoch_order(epoch)[start..start + taken as usize]);
            next += taken;
        }
        (rows, next)
    }

    /// The dataset row of each completion, in the order of one epoch: every block μ·S times, every prompt G times.
    pub fn epoch_completion_order(&self, epoch: u64) -> Vec<u64> {
        let start = self.mixture.start(epoch);
        let mut order = Vec::new();
        for block in 0..self.blocks_of(epoch) {
            let (rows, _) = self.block_at(start + block * self.prompts_per_block);
            for _ in 0..self.uses_per_block() {
                for &row in &rows {
                    order.extend(std::iter::repeat_n(row, self.num_generations as usize));
                }
            }
        }
        order
    }

    /// The dataset rows of an epoch's prompts, in order.
    fn epoch_order(&self, epoch: u64) -> Vec<u64> {
        let (before, after) = (self.mixture.given_before(epoch), self.mixture.given_before(epoch + 1));
        let mut first_row = 0;
        // The dataset rows that each source contributes in this epoch.
        let given: Vec<Vec<u64>> = (0..)
            .zip(self.mixture.rows())
            .zip(before.into_iter().zip(after))
            .map(|((source, num_rows), (from, to))| {
                first_row += num_rows;
                self.source_order(source, num_rows, from, to).map(|row| first_row - num_rows + row).collect()
            })
            .collect();
        if let [only] = given.as_slice() {
            return only.clone();
        }
        let mut sources: Vec<usize> = Vec::new();
        for (source, rows) in given.iter().enumerate() {
            sources.extend(std::iter::repeat_n(source, rows.len()));
        }
        let order = shuffled(Key::new(self.seed, Stream::Mixture).with(epoch), sources.len() as u64);
        let mut given: Vec<_> = given.into_iter().map(Vec::into_iter).collect();
        order.into_iter().filter_map(|slot| given[sources[slot as usize]].next()).collect()
    }

    /// The rows of a source from prompt index `from` to `to`, counted over all epochs. The source repeats its rows,
    /// each time in another order.
    fn source_order(&self, source: usize, num_rows: u64, from: u64, to: u64) -> impl Iterator<Item = u64> {
        let (seed, shuffle) = (self.seed, self.shuffle);
        // If the source has no rows, `from` and `to` are 0.
        let times = from / num_rows.max(1)..to.div_ceil(num_rows.max(1));
        times
            .flat_map(move |time| match shuffle {
                true => source_permutation(seed, source, time, num_rows),
                false => (0..num_rows).collect(),
            })
            .skip((from % num_rows.max(1)) as usize)
            .take((to - from) as usize)
    }
}

/// Cuts generated ids to the completion: up to and including the first EOS token, at most `max_length` tokens. Only ids
/// in `eos_token_ids` end it; padding is determined by lengths, never by token values.
pub fn cut_completion(raw: &[u32], eos_token_ids: &[u32], max_length: usize) -> (Vec<u32>, FinishReason) {
    let raw = &raw[..raw.len().min(max_length)];
    match raw.iter().position(|id| eos_token_ids.contains(id)) {
        Some(end) => (raw[..=end].to_vec(), FinishReason::Stop),
        None => (raw.to_vec(), FinishReason::Length),
    }
}

/// Whether a completion contributes to KL and loss.
pub fn is_included(finish_reason: FinishReason, mask_truncated_completions: bool) -> bool {
    match finish_reason {
        FinishReason::Stop => true,
        FinishReason::Length => !mask_truncated_completions,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::permutation;

    fn batching(mixture: Mixture) -> Batching {
        Batching {
            mixture,
            num_generations: 2,
            prompts_per_block: 3,
            steps_per_generation: 3,
            num_iterations: 2,
            gradient_accumulation_steps: 1,
            seed: 42,
            shuffle: true,
        }
    }

    fn seven() -> Batching {
        batching(Mixture::single(7))
    }

    #[test]
    fn all_slices_are_trained_once_and_then_again() {
        let slices: Vec<(u64, u64)> = (1..=7).map(|step| seven().cursor(step)).map(|c| (c.block, c.slice)).collect();
        assert_eq!(slices, [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1), (0, 2), (1, 0)]);
        assert_eq!(seven().cursor(7).use_index, 0);
    }

    #[test]
    fn a_position_counts_prompts_and_blocks_skip_the_incomplete_rest_of_an_epoch() {
        let mut position = 0;
        for block in 0..6 {
            let (rows, next) = seven().block_at(position);
            assert_eq!(rows, seven().block_rows(block));
            // An epoch of seven rows has two blocks of three; the seventh row is dropped.
            assert_eq!(next, (block / 2) * 7 + (block % 2) * 3 + 3);
            position = next;
        }
        // A refill of two prompts takes the next rows, including the rest of the epoch, and the next
        // block begins after them.
        let epoch = [permutation(42, 0, 7), permutation(42, 1, 7)].concat();
        assert_eq!(seven().prompts_at(6, 3), (epoch[6..9].to_vec(), 9));
        assert_eq!(seven().block_at(9), (epoch[9..12].to_vec(), 12));
        assert_eq!(seven().block_at(12).0, permutation(42, 2, 7)[..3]);
    }

    #[test]
    fn an_epoch_holds_no_row_twice_and_the_next_one_has_another_order() {
        let epoch = |first: u64| [seven().block_rows(first), seven().block_rows(first + 1)].concat();
        let mut rows = epoch(0);
        assert_ne!(rows, epoch(2));
        rows.sort_unstable();
        rows.dedup();
        assert_eq!(rows.len(), 6);
    }

    #[test]
    fn several_sources_take_turns_by_the_seed_alone_and_each_begins_again_when_it_is_exhausted() {
        // The three sources have the dataset rows 0 to 4, 5 to 104, and 105 to 112.
        let mixed = |prompts_per_block| Batching {
            prompts_per_block,
            ..batching(Mixture::new([(5, 3.0), (100, 5.0), (8, 2.0)]))
        };
        let three = mixed(3);
        let (rows, next) = three.prompts_at(0, 600);
        assert_eq!((rows.len(), next), (600, 600));
        assert_eq!(mixed(7).prompts_at(0, 600).0, rows, "whatever the size of a block");
        assert_ne!(Batching { seed: 43, ..three.clone() }.prompts_at(0, 600).0, rows);
        for epoch in rows.chunks(200) {
            let mut largest: Vec<u64> = epoch.iter().copied().filter(|row| (5..105).contains(row)).collect();
            largest.sort_unstable();
            assert_eq!(largest, (5..105).collect::<Vec<_>>(), "an epoch sees the largest source once");
            assert_eq!(epoch.iter().filter(|row| **row < 5).count(), 60);
        }
        // Every five prompts of the source with five rows are all of its rows, each time in another order.
        let small: Vec<u64> = rows.iter().copied().filter(|row| *row < 5).collect();
        let mut orders: Vec<&[u64]> = small.chunks(5).collect();
        for order in &orders {
            let mut sorted = order.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4]);
        }
        orders.sort_unstable();
        orders.dedup();
        assert!(orders.len() > 20, "36 times of 120 orders: {}", orders.len());
        assert_eq!(small[..5], permutation(42, 0, 5), "the first source is shuffled as if it were alone");
        // Blocks take their rows from the same order of prompts.
        let mut position = 0;
        for block in 0..200 {
            let (found, next) = three.block_at(position);
            assert_eq!(found, three.block_rows(block));
            position = next;
        }
        assert_eq!(three.epochs_at(198), 1.0, "66 blocks of three; two prompts are dropped");
        assert_eq!((three.epochs_at(0), three.epochs_at(99), three.epochs_at(299)), (0.0, 0.5, 1.5));
    }

    #[test]
    fn shares_that_are_no_whole_numbers_move_by_one_prompt_and_no_more() {
        let mixed = batching(Mixture::new([(8, 3.0), (8, 1.0)]));
        let rows = mixed.prompts_at(0, 32 * 1000).0;
        let second = rows.iter().filter(|row| **row >= 8).count();
        assert_eq!(second, 8000);
        let mut position = 0;
        for block in 0..500 {
            assert_eq!(mixed.position_of_block(block), mixed.block_start(position), "block {block}");
            position = mixed.block_at(position).1;
        }
    }
}
