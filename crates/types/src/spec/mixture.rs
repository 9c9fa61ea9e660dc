//! How the prompts of several sources take turns.

use super::plan::SourcePlan;

/// The shares of a dataset's sources. An epoch ends when the largest source has been seen once; every other source gives as many prompts
/// in the same time as its weight asks for, and begins again where it is exhausted.
///
/// In the first e epochs source s gives ⌊e·n·w_s/w + ½⌋ prompts, where n and w are the largest source's rows and weight. So the shares
/// are those of the weights to within one prompt a source, in any number of epochs.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// In the dataset's order.
    sources: Vec<Share>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Share {
    num_rows: u64,
    /// Prompts an epoch.
    per_epoch: f64,
}

impl Mixture {
    /// One source: an epoch is its rows.
    pub fn single(num_rows: u64) -> Self {
        Self { sources: vec![Share { num_rows, per_epoch: num_rows as f64 }] }
    }

    /// Of sources with these rows and weights. One without rows gives nothing.
    pub fn new(sources: impl IntoIterator<Item = (u64, f64)>) -> Self {
        let sources: Vec<(u64, f64)> = sources.into_iter().collect();
        // The first of the largest.
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

    /// Of a dataset's sources, of which so many rows each are trained; without sources all rows are one.
    pub fn of_sources(sources: &[SourcePlan], trained_rows: &[u64]) -> Self {
        match sources {
            [] => Self::single(trained_rows.iter().sum()),
            sources => Self::new(trained_rows.iter().copied().zip(sources.iter().map(|source| source.weight))),
        }
    }

    /// Rows of each source.
    pub fn rows(&self) -> impl Iterator<Item = u64> {
        self.sources.iter().map(|share| share.num_rows)
    }

    /// Rows of all sources.
    pub fn num_rows(&self) -> u64 {
        self.rows().sum()
    }

    /// Prompts that each source gives before this epoch.
    pub fn given_before(&self, epoch: u64) -> Vec<u64> {
        self.sources.iter().map(|share| share.before(epoch)).collect()
    }

    /// Prompts before this epoch.
    pub fn start(&self, epoch: u64) -> u64 {
        self.sources.iter().map(|share| share.before(epoch)).sum()
    }

    /// Prompts of this epoch.
    pub fn epoch_len(&self, epoch: u64) -> u64 {
        self.start(epoch + 1) - self.start(epoch)
    }

    /// Prompts of the shortest epoch that there may be.
    pub fn shortest_epoch(&self) -> u64 {
        self.sources.iter().map(|share| share.per_epoch as u64).sum()
    }

    /// The epoch that a prompt belongs to, by its number over all epochs; 0 when there are no rows.
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
        // A share that is no whole number is right over several epochs.
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
