//! How much work is done at once, so that memory is bounded whatever the batch. None of it changes a number but by the
//! rounding of sums; the limits are constants or part of the plan, because a resumed run must split as the undisturbed
//! one did. [`footprint`] counts with the same ones.

use std::num::NonZeroUsize;
use std::ops::Range;

use super::model::Policy;
use crate::spec::{OptimizerKind, footprint};

/// Cut rows into micro-batches of whole groups with at most `max_tokens` tokens each, or one group.
///
/// `tokens` has one entry a row; groups of `num_generations` rows are contiguous.
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

/// Sequences that generation may decode at once, where each may grow to `tokens_per_row` tokens (prompt included), beside
/// what is trained and its moments.
pub fn generation_rows(policy: &Policy, optimizer: OptimizerKind, tokens_per_row: usize) -> usize {
    let (card, dtype) = (policy.card(), policy.dtype());
    let held = footprint::held_bytes(dtype, card.num_parameters, optimizer, policy.flat().len() as u64);
    footprint::generation_rows(policy.place(), dtype, &card.config.shape(), held, tokens_per_row as u64) as usize
}

/// The largest resident size of this process so far, in bytes, where the system tells it (Linux).
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
