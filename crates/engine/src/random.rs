//! Counter-based random numbers: every number is a pure function of its purpose, so there is no state to save and no
//! order to keep. A rollout does not depend on the other rows of its batch, and a resumed run uses the same numbers
//! as an uninterrupted one.
//!
//! The function is a chain of SplitMix64 finalizers (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
//! generators"; the constants are David Stafford's "Mix13"), one link per word of the key.

/// The purpose of a random number. Streams never share numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Sampling of training completions.
    Train,
    /// Sampling of evaluation completions.
    Eval,
    /// Sampling of the preflight at submission.
    Probe,
    /// Initial values of parameters.
    Init,
    /// Order of the dataset.
    Order,
    /// Masks of LoRA dropout.
    Dropout,
    /// Sampling of the prompts that replace tied groups.
    Refill,
    /// Sampling of completions requested by users.
    Generate,
    /// Choice of the source of a dataset's next prompt.
    Mixture,
    /// Sampling of a verdict's completions, by both models.
    Verdict,
    /// Order of the rows of a warm-up, and its dropout.
    WarmUp,
    /// Seeds that environments get for their episodes.
    Environment,
}

/// A key for random numbers; extend it with [`Key::with`], then read numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key(u64);

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl Key {
    /// The root key of a stream.
    pub fn new(seed: u64, stream: Stream) -> Self {
        let stream: u64 = match stream {
            Stream::Train => 1,
            Stream::Eval => 2,
            Stream::Probe => 3,
            Stream::Init => 4,
            Stream::Order => 5,
            Stream::Dropout => 6,
            Stream::Refill => 7,
            Stream::Generate => 8,
            Stream::Mixture => 9,
            Stream::Verdict => 11,
            Stream::WarmUp => 10,
            Stream::Environment => 12,
        };
        Self(mix(seed.wrapping_add(GOLDEN_GAMMA))).with(stream)
    }

    /// Extends the key by one more word (rollout index, dataset row, generation, token, …).
    pub fn with(self, word: u64) -> Self {
        Self(mix(self.0.wrapping_mul(3).wrapping_add(mix(word.wrapping_add(GOLDEN_GAMMA)))))
    }

    /// The key as one 64-bit word, for a GPU that computes the same numbers.
    pub fn word(self) -> u64 {
        self.0
    }

    /// Returns 64 random bits.
    pub fn bits(self) -> u64 {
        mix(self.0 ^ GOLDEN_GAMMA)
    }

    /// Returns a uniform number in [0, 1) with 53 bits.
    pub fn uniform(self) -> f64 {
        (self.bits() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Returns a uniform number in 0..bound; `bound` ≥ 1. The bias is below bound / 2⁶⁴.
    pub fn below(self, bound: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }
}

/// The order of a dataset's rows in one epoch: a function of (seed, epoch) only.
pub fn permutation(seed: u64, epoch: u64, n: u64) -> Vec<u64> {
    shuffled(Key::new(seed, Stream::Order).with(epoch), n)
}

/// The order of one source's rows in its nth pass, for datasets with several sources: a function of (seed, source,
/// time). The first source has the same order as a dataset with a single source.
pub fn source_permutation(seed: u64, source: usize, time: u64, n: u64) -> Vec<u64> {
    match source {
        0 => permutation(seed, time, n),
        source => shuffled(Key::new(seed, Stream::Order).with(time).with(source as u64), n),
    }
}

/// Fisher–Yates shuffle over 0..n.
pub fn shuffled(key: Key, n: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i as usize, key.with(i).below(i + 1) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_holds_every_row_once_and_differs_by_epoch_and_seed() {
        let first = permutation(42, 0, 100);
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_eq!(first, permutation(42, 0, 100));
        assert_ne!(first, permutation(42, 1, 100));
        assert_ne!(first, permutation(43, 0, 100));
    }

    #[test]
    fn uniform_numbers_fill_the_interval_evenly() {
        let root = Key::new(7, Stream::Train);
        let mut bins = [0u32; 16];
        for token in 0..16_000 {
            bins[(root.with(3).with(token).uniform() * 16.0) as usize] += 1;
        }
        // The expected count is 1000, with standard deviation 31.
        assert!(bins.iter().all(|&count| (850..1150).contains(&count)), "{bins:?}");
    }

    #[test]
    fn streams_and_words_in_another_order_give_other_numbers() {
        let train = Key::new(1, Stream::Train);
        assert_ne!(train.bits(), Key::new(1, Stream::Eval).bits());
        assert_ne!(train.with(1).with(2).bits(), train.with(2).with(1).bits());
        assert_ne!(train.with(0).bits(), train.with(0).with(0).bits());
    }
}
