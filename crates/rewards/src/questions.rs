//! Questions about episodes: their names, which are the same in every attempt at a job, and the journal that records each question
//! before it is asked and its answer before it is used.

use std::future::Future;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::RewardFailure;
use crate::digest::Sha256Digest;
use crate::environment::EpisodeId;
use crate::id::JobId;
use crate::journal::{Journal, JournaledRequest};
use crate::protocol::{JournalEntry, RewardAnswer};
use crate::rollout::RolloutId;

/// Number of hexadecimal digits of ids that are hashes.
const ID_DIGITS: usize = 26;

/// Returns a short name that is a hash of the text.
pub(crate) fn short_hash(text: &str) -> String {
    let mut digits = hex::encode(Sha256::digest(text.as_bytes()));
    digits.truncate(ID_DIGITS);
    digits
}

/// Returns the name of an episode on its server, the same for all its attempts.
pub(crate) fn episode_name(job: JobId, rollout: RolloutId, episode: &EpisodeId) -> String {
    let RolloutId { phase, step, round, part } = rollout;
    let of = format!("{job} {phase:?} {step} {round} {part:?} {} {}", episode.row, episode.index);
    format!("ep_{}", short_hash(&of))
}

/// The questions of one job to one kind of service.
pub(crate) struct Questions {
    /// Name of the service in the journal and in messages.
    pub name: String,
    pub job: JobId,
    pub journal: Option<Arc<dyn Journal>>,
}

/// A question that is asked once, unless its answer gets lost.
pub(crate) struct Question {
    /// Key in the journal: the same in every attempt at the job, and different for every other question.
    pub key: String,
    /// Id of the question, which is a hash of the key.
    pub id: String,
    pub rollout: RolloutId,
}

impl Questions {
    /// Returns the question of a rollout that `what` describes.
    pub fn question(&self, rollout: RolloutId, prefix: &str, what: &str) -> Question {
        let RolloutId { phase, step, round, part } = rollout;
        let of = format!("{} {} {phase:?} {step} {round} {part:?} {what}", self.name, self.job);
        let key = Sha256Digest::of(of.as_bytes()).to_string();
        let id = format!("{prefix}_{}", short_hash(&key));
        Question { key, id, rollout }
    }

    /// Returns the question about an episode that `what` describes.
    pub fn about(&self, rollout: RolloutId, episode: &EpisodeId, prefix: &str, what: &str) -> Question {
        let EpisodeId { row, index, attempt } = episode;
        self.question(rollout, prefix, &format!("{row} {index} {attempt} {what}"))
    }

    /// Returns the answer that an earlier attempt at the job recorded.
    pub fn recorded(&self, question: &Question) -> Option<RewardAnswer> {
        match self.journal.as_ref()?.find(&question.key)? {
            JournaledRequest::Answered { answer, .. } => Some(answer),
            JournaledRequest::Sent { .. } => None,
        }
    }

    /// Returns the recorded answer to a question, or records the question, asks it and records the answer.
    ///
    /// # Errors
    /// Fails if asking fails, or nothing can be recorded anymore.
    pub async fn ask(
        &self,
        question: &Question,
        body: String,
        asking: impl Future<Output = Result<RewardAnswer, RewardFailure>>,
    ) -> Result<RewardAnswer, RewardFailure> {
        if let Some(answer) = self.recorded(question) {
            return Ok(answer);
        }
        let Question { key, id, rollout } = question;
        let (key, id, rollout) = (key.clone(), id.clone(), *rollout);
        let is_known = self.journal.as_ref().is_some_and(|journal| journal.find(&key).is_some());
        if !is_known {
            let (reward, key, id) = (self.name.clone(), key.clone(), id.clone());
            self.append(JournalEntry::Request { rollout, reward, key, id, body, later: None }).await?;
        }
        let answer = asking.await?;
        self.append(JournalEntry::Answer { rollout, key, id, answer: answer.clone() }).await?;
        Ok(answer)
    }

    async fn append(&self, entry: JournalEntry) -> Result<(), RewardFailure> {
        let Some(journal) = &self.journal else { return Ok(()) };
        journal.append(entry).await.map_err(|closed| closed.of(&self.name))
    }
}
