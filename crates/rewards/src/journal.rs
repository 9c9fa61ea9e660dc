//! Where a request is written down before it is sent, and its answer before it is used: what makes a run that was
//! interrupted ask for nothing twice. Whoever runs the job implements it; [`super::Rewards`] without one keeps nothing.

use futures::future::BoxFuture;
use sha2::{Digest, Sha256};

use super::{JobContext, RewardFailure};
use crate::callback::{CallbackTerms, Chunk, Later};
use crate::digest::Sha256Digest;
use crate::protocol::{JournalEntry, RewardAnswer};

/// A journal of reward requests.
pub trait Journal: Send + Sync {
    /// What a former attempt wrote down under this key.
    fn find(&self, key: &str) -> Option<Journalled>;

    /// Writes down; returns when it is durable. Entries are kept in the order of the calls.
    fn append(&self, entry: JournalEntry) -> BoxFuture<'_, Result<(), Unrecorded>>;

    /// Where services may send answers later; `None`: nowhere.
    fn callbacks(&self) -> Option<&CallbackTerms> {
        None
    }

    /// What a service sent for this request beyond the first `seen` entries, as soon as there is something; never, unless
    /// there is something.
    fn arrived<'a>(&'a self, _id: &'a str, _seen: usize) -> BoxFuture<'a, Result<Chunk, Unrecorded>> {
        Box::pin(std::future::pending())
    }
}

/// A request of a former attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Journalled {
    /// Perhaps sent; not answered as far as is known: goes again, the same id and bytes.
    Sent {
        /// `rwr_…`
        id: String,
        /// As sent, but for the token of its callback.
        body: String,
        /// What is known, where its answer may come later.
        later: Option<Later>,
    },
    /// Answered: never goes again.
    Answered {
        /// `rwr_…`
        id: String,
        /// What came of it.
        answer: RewardAnswer,
    },
}

/// The journal takes no more entries: the claim is lost, or the server refuses them. Nothing may be sent or used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the journal takes no more entries")]
pub struct Unrecorded;

impl Unrecorded {
    /// As the failure of a reward.
    pub(super) fn of(self, reward: &str) -> RewardFailure {
        RewardFailure::Unrecorded { reward: reward.to_owned() }
    }
}

/// Names what is asked, whatever id it is asked under: the same samples of the same rollout, asked for the `round`th time
/// because earlier answers left them open, have the same key in every attempt; all others have another one.
pub(super) fn key<'a>(job: &JobContext, reward: &str, round: u32, samples: impl Iterator<Item = &'a str>) -> String {
    let rollout = &job.rollout;
    let mut hasher = Sha256::new();
    hasher.update(format!(
        "{:?}/{}/{}/{:?}/{round}/{}/{reward}",
        rollout.phase,
        rollout.step,
        rollout.round,
        rollout.part,
        reward.len()
    ));
    for sample in samples {
        hasher.update((sample.len() as u64).to_le_bytes());
        hasher.update(sample);
    }
    Sha256Digest::from(hasher).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::RolloutId;

    #[test]
    fn a_key_names_the_samples_their_rollout_and_the_round_and_nothing_else() {
        let job = |rollout| JobContext { job: crate::id::JobId::new(), rollout, probe: false };
        let of =
            |rollout, reward: &str, round, samples: &[&str]| key(&job(rollout), reward, round, samples.iter().copied());
        let train = RolloutId::train(3);
        let one = of(train, "r", 0, &["ab", "c"]);
        assert_eq!(one, of(train, "r", 0, &["ab", "c"]), "it does not depend on the moment");
        let others = [
            of(train, "r", 0, &["a", "bc"]),
            of(train, "r", 1, &["ab", "c"]),
            of(train, "s", 0, &["ab", "c"]),
            of(RolloutId::train(4), "r", 0, &["ab", "c"]),
            of(RolloutId::eval(3), "r", 0, &["ab", "c"]),
            of(train.round(1), "r", 0, &["ab", "c"]),
            of(train.greedy(), "r", 0, &["ab", "c"]),
        ];
        for (index, other) in others.iter().enumerate() {
            assert_ne!(*other, one, "{index}");
        }
    }
}
