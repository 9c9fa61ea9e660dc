//! Limits how much is computed concurrently, so that memory is bounded whatever the batch size. The limits change
//! results only by the rounding of sums. They are constants or part of the plan, because a resumed run must split its
//! batches as an uninterrupted run does. [`footprint`] uses the same limits.

use std::num::NonZeroUsize;
use std::ops::Range;

use super::model::Policy;
use crate::spec::{OptimizerKind, footprint};

/// Splits rows into micro-batches of whole groups with at most `max_tokens` tokens each, but at least one group.
///
/// `tokens` has one entry per row; groups of `num_generations` rows are contiguous.
pub fn micro_batches(tokens: &[usize], num_generations: NonZeroUsize, max_tokens: usize) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    let (mut start, mut sum) = (0, 0);
    for (index, group) in tokens.chunks(num_generations.get()).enumerate() {
        let group_start = index * num_generations.get();
        let group_tokens: usize = group.iter().sum();
        if group_start > start && sum + group_tokens > max_tokens {
            batches.push(start..group_start);
            (start, sum) = (group_start, 0);
        }
        sum += group_tokens;
    }
    if start < tokens.len() {
        batches.push(start..tokens.len());
    }
    batches
}

/// Number of sequences that generation may decode concurrently, if each grows to `tokens_per_row` tokens (prompt
/// included), in addition to the trained parameters and their moments.
pub fn generation_rows(policy: &Policy, optimizer: OptimizerKind, tokens_per_row: usize) -> usize {
    let (card, dtype) = (policy.card(), policy.dtype());
    let held = footprint::held_bytes(dtype, card.num_parameters, optimizer, policy.flat().len() as u64);
    footprint::generation_rows(policy.place(), dtype, &card.shape(), held, tokens_per_row as u64) as usize
}

/// Peak resident set size of this process in bytes, if the system reports it (Linux).
pub fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_hold_whole_groups_up_to_the_budget() {
        const G: NonZeroUsize = NonZeroUsize::MIN.saturating_add(1);
        let tokens = [3, 3, 3, 3, 9, 9, 1, 1];
        assert_eq!(micro_batches(&tokens, G, 12), [0..4, 4..6, 6..8]);
        assert_eq!(micro_batches(&tokens, G, 1), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(micro_batches(&tokens, G, 30), [0..6, 6..8]);
        assert_eq!(micro_batches(&tokens, G, 32).len(), 1);
        assert!(micro_batches(&[], G, 12).is_empty());
    }
}
