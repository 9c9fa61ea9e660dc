//! How the prompts of several sources are interleaved.

use super::plan::SourcePlan;

/// The shares of a dataset's sources. An epoch ends when the largest source has been used once. In the same time, every other
/// source provides as many prompts as its weight requires, and starts over when it is exhausted.
///
/// In the first e epochs source s provides ⌊e·n·w_s/w + ½⌋ prompts, where n and w are the largest source's rows and weight. The
/// shares therefore match the weights to within one prompt per source, for any number of epochs.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// Shares of the sources, in the dataset's order.
    sources: Vec<Share>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Share {
    num_rows: u64,
    /// Number of prompts per epoch.
    per_epoch: f64,
}

impl Mixture {
    /// Creates the mixture of a single source, whose epoch is its rows.
    pub fn single(num_rows: u64) -> Self {
        Self { sources: vec![Share { num_rows, per_epoch: num_rows as f64 }] }
    }

    /// Creates the mixture of sources with these rows and weights. A source without rows provides nothing.
    pub fn new(sources: impl IntoIterator<Item = (u64, f64)>) -> Self {
        let sources: Vec<(u64, f64)> = sources.into_iter().collect();
        // If several sources are the largest, the first of them counts.
        let largest = sources.iter().rev().max_by_key(|(rows, _)| *rows).copied().unwrap_or_default();
        let share = |&(num_rows, weight): &(u64, f64)| {
            let per_epoch = if num_rows == 0 { 0.0 } else { largest.0 as f64 * weight / largest.1 };
            Share { num_rows, per_epoch }
        };
        Self { sources: sources.iter().map(share).collect() }
    }

    /// Whether all epochs have the same number of prompts.
    pub fn is_even(&self) -> bool {
        self.sources.iter().all(|share| share.per_epoch.fract() == 0.0)
    }

    /// Creates the mixture of a dataset's sources, given the number of trained rows of each. Without sources, all
    /// rows form one source.
    pub fn of_sources(sources: &[SourcePlan], trained_rows: &[u64]) -> Self {
        match sources {
            [] => Self::single(trained_rows.iter().sum()),
            sources => Self::new(trained_rows.iter().copied().zip(sources.iter().map(|source| source.weight))),
        }
    }

    /// Iterates over the number of rows of each source.
    pub fn rows(&self) -> impl Iterator<Item = u64> {
        self.sources.iter().map(|share| share.num_rows)
    }

    /// Returns the number of rows of all sources together.
    pub fn num_rows(&self) -> u64 {
        self.rows().sum()
    }

    /// Returns how many prompts each source has provided before this epoch.
    pub fn given_before(&self, epoch: u64) -> Vec<u64> {
        self.sources.iter().map(|share| share.before(epoch)).collect()
    }

    /// Returns the number of prompts before this epoch.
    pub fn start(&self, epoch: u64) -> u64 {
        self.sources.iter().map(|share| share.before(epoch)).sum()
    }

    /// Returns the number of prompts in this epoch.
    pub fn epoch_len(&self, epoch: u64) -> u64 {
        self.start(epoch + 1) - self.start(epoch)
    }

    /// Returns the number of prompts in the shortest possible epoch.
    pub fn shortest_epoch(&self) -> u64 {
        self.sources.iter().map(|share| share.per_epoch as u64).sum()
    }

    /// Returns the epoch of a prompt by its number over all epochs; 0 if there are no rows.
    pub fn epoch_of(&self, position: u64) -> u64 {
        let expected: f64 = self.sources.iter().map(|share| share.per_epoch).sum();
        if expected <= 0.0 {
            return 0;
        }
        let mut epoch = (position as f64 / expected) as u64;
        while epoch > 0 && self.start(epoch) > position {
            epoch -= 1;
        }
        while self.start(epoch + 1) <= position {
            epoch += 1;
        }
        epoch
    }
}

impl Share {
    fn before(self, epoch: u64) -> u64 {
        (epoch as f64 * self.per_epoch + 0.5) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_has_epochs_of_its_rows() {
        let mixture = Mixture::single(7);
        assert_eq!((mixture.start(3), mixture.epoch_len(5), mixture.shortest_epoch()), (21, 7, 7));
        assert_eq!([0, 6, 7, 20, 21].map(|position| mixture.epoch_of(position)), [0, 0, 1, 2, 3]);
        assert_eq!(Mixture::single(0).epoch_of(5), 0);
    }

    #[test]
    fn without_weights_of_their_own_sources_are_seen_once_an_epoch() {
        let mixture = Mixture::new([(7473, 7473.0), (12, 12.0), (500, 500.0)]);
        assert_eq!(mixture.given_before(1), [7473, 12, 500]);
        assert_eq!(mixture.given_before(1000), [7_473_000, 12_000, 500_000]);
    }

    #[test]
    fn the_largest_source_is_seen_once_an_epoch_and_the_shares_are_the_weights() {
        let mixture = Mixture::new([(8, 3.0), (100, 5.0), (8, 2.0)]);
        assert_eq!(mixture.given_before(1), [60, 100, 40]);
        // A fractional share is exact over several epochs.
        let mixture = Mixture::new([(8, 3.0), (8, 1.0)]);
        assert_eq!((1..=4).map(|epoch| mixture.given_before(epoch)[1]).collect::<Vec<_>>(), [3, 5, 8, 11]);
        assert_eq!(mixture.given_before(4)[0], 32);
        let lengths: Vec<u64> = (0..3).map(|epoch| mixture.epoch_len(epoch)).collect();
        assert_eq!((lengths.as_slice(), mixture.shortest_epoch()), ([11, 10, 11].as_slice(), 10));
    }

    #[test]
    fn every_position_lies_in_its_epoch() {
        let mixture = Mixture::new([(8, 3.0), (5, 0.7), (0, 4.0), (8, 1.0)]);
        assert_eq!(mixture.given_before(9)[2], 0, "a source without rows gives nothing");
        for position in 0..500 {
            let epoch = mixture.epoch_of(position);
            assert!(mixture.start(epoch) <= position && position < mixture.start(epoch + 1), "{position}: {epoch}");
        }
    }
}
