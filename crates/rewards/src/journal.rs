//! The journal of reward requests: records each request before it is sent and each answer before it is used, so that an interrupted
//! run repeats no request. The worker implements the journal; without one, [`super::Rewards`] records nothing.

use futures::future::BoxFuture;
use sha2::{Digest, Sha256};

use super::{JobContext, RewardFailure};
use crate::callback::{CallbackTerms, Chunk, Later};
use crate::digest::Sha256Digest;
use crate::protocol::{JournalEntry, RewardAnswer};

/// A journal of reward requests.
pub trait Journal: Send + Sync {
    /// Returns the reward request that a previous attempt at the job recorded under this key.
    fn find(&self, key: &str) -> Option<JournaledRequest>;

    /// Appends an entry to the journal, and returns when the entry is durable. Entries keep the order of the calls.
    fn append(&self, entry: JournalEntry) -> BoxFuture<'_, Result<(), JournalClosed>>;

    /// Returns the callback address and its limits for services that answer later; `None` when callbacks are not possible.
    fn callbacks(&self) -> Option<&CallbackTerms> {
        None
    }

    /// Waits for results that a service has sent to the callback address of a request, beyond the first `seen` ones. Does not
    /// return while there are none.
    fn arrived<'a>(&'a self, _id: &'a str, _seen: usize) -> BoxFuture<'a, Result<Chunk, JournalClosed>> {
        Box::pin(std::future::pending())
    }
}

/// A reward request that a previous attempt at the job recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JournaledRequest {
    /// The request may have been sent, and no answer was recorded. The worker sends it again with the same id and body.
    Sent {
        /// Id of the request, `rwr_…`.
        id: String,
        /// Body of the request as sent, without the callback token.
        body: String,
        /// The service's promise (202) to answer later, if it made one.
        later: Option<Later>,
    },
    /// The answer was recorded. The request is not sent again.
    Answered {
        /// Id of the request, `rwr_…`.
        id: String,
        /// The answer as it was recorded.
        answer: RewardAnswer,
    },
}

/// Error: the journal accepts no more entries, because the worker lost its claim on the job or the server rejects them. The worker
/// must not send requests or use answers anymore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the journal of reward requests accepts no more entries")]
pub struct JournalClosed;

impl JournalClosed {
    /// Converts a closed journal into the failure of a reward.
    pub(super) fn of(self, reward: &str) -> RewardFailure {
        RewardFailure::JournalClosed { reward: reward.to_owned() }
    }
}

/// Returns the key of a reward request in the journal. The same samples of the same rollout in the same `round` (the number of
/// earlier requests that brought no result for them) have the same key in every attempt; any other request has another key.
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
    use crate::rollout::RolloutId;

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
