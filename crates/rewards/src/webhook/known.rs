//! Samples that need not be asked about, for rewards with `cache: true`: those whose value is known, and all but the first
//! of those that are alike.
//!
//! What was known when a rollout was scored is written down in the journal as if a service had answered it: a process that
//! goes on there leaves out the same samples, so that its requests are those that were sent.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Asking;
use crate::cache::{Cache, CacheKey, key as cache_key};
use crate::id::RewardRequestId;
use crate::journal::{Journalled, key};
use crate::protocol::{JournalEntry, RewardAnswer};
use crate::sample::RewardValue;
use crate::{Judgement, RewardFailure};

/// No service is asked so often: the round of the entry that says what was known.
const ROUND: u32 = u32::MAX;

/// See the module.
#[derive(Default)]
pub(super) struct Known {
    /// Of every sample that could be asked about.
    keys: HashMap<usize, CacheKey>,
    values: HashMap<usize, Judgement>,
    /// A sample, and the first one like it.
    twins: HashMap<usize, usize>,
}

/// A known value, as the journal keeps it.
#[derive(Serialize, Deserialize)]
struct Kept {
    index: usize,
    value: RewardValue,
    reason: Option<String>,
    metrics: Map<String, Value>,
}

impl Known {
    /// Nobody needs to be asked about this sample.
    pub fn contains(&self, index: usize) -> bool {
        self.values.contains_key(&index) || self.twins.contains_key(&index)
    }

    /// Samples that nobody is asked about.
    pub fn number(&self) -> u64 {
        (self.values.len() + self.twins.len()) as u64
    }

    /// Fills in what was known, and keeps what is known now.
    pub fn complete(self, cache: &Cache, judgements: &mut [Option<Judgement>]) {
        let Self { keys, values, twins } = self;
        for (index, judgement) in values {
            judgements[index] = Some(judgement);
        }
        for (twin, first) in twins {
            judgements[twin] = judgements[first].clone();
        }
        for (index, key) in keys {
            if let Some(judgement) = &judgements[index] {
                cache.put(key, judgement);
            }
        }
    }
}

impl Asking<'_> {
    /// What is known of the samples at `indices`; nothing where the reward has no cache.
    pub(super) async fn known(&self, indices: &[usize]) -> Result<Known, RewardFailure> {
        let Some(revision) = &self.webhook.revision else { return Ok(Known::default()) };
        let mut known = Known::default();
        let mut firsts: HashMap<CacheKey, usize> = HashMap::new();
        for &index in indices {
            let key = cache_key(revision, &self.samples[index]);
            known.keys.insert(index, key);
            match firsts.get(&key) {
                Some(first) => drop(known.twins.insert(index, *first)),
                None => drop(firsts.insert(key, index)),
            }
        }
        let firsts: HashSet<usize> = firsts.into_values().collect();
        known.values = self.written_down(&known, firsts).await?;
        Ok(known)
    }

    /// The known values of these samples: those that a former attempt went on with, else those of the cache.
    async fn written_down(
        &self,
        known: &Known,
        indices: HashSet<usize>,
    ) -> Result<HashMap<usize, Judgement>, RewardFailure> {
        let wire = || self.wire.iter().map(String::as_str);
        let entry_key = self.webhook.journal.as_ref().map(|_| key(self.job, &self.webhook.name, ROUND, wire()));
        let id = match self.journalled(entry_key.as_deref()) {
            Some(Journalled::Answered { answer: RewardAnswer::Body { body }, .. }) => {
                let kept: Vec<Kept> = serde_json::from_str(&body).unwrap_or_default();
                return Ok(kept
                    .into_iter()
                    .filter(|kept| indices.contains(&kept.index))
                    .map(Kept::judgement)
                    .collect());
            }
            Some(Journalled::Sent { id, .. }) => Some(id),
            _ => None,
        };
        let cache = &self.webhook.client.cache;
        let values: HashMap<usize, Judgement> =
            indices.into_iter().filter_map(|index| Some((index, cache.get(known.keys.get(&index)?)?))).collect();
        let id = match id {
            Some(id) => id,
            None => {
                let id = RewardRequestId::new().to_string();
                let (rollout, reward) = (self.job.rollout, self.webhook.name.clone());
                let body = json!({ "type": "cache" }).to_string();
                let entry = |key| JournalEntry::Request { rollout, reward, key, id: id.clone(), body, later: None };
                self.write_down(entry_key.as_deref(), entry).await?;
                id
            }
        };
        let kept: Vec<Kept> = values.iter().map(|(index, judgement)| Kept::of(*index, judgement)).collect();
        let answer = RewardAnswer::Body { body: serde_json::to_string(&kept).unwrap_or_default() };
        let entry = |key| JournalEntry::Answer { rollout: self.job.rollout, key, id, answer };
        self.write_down(entry_key.as_deref(), entry).await?;
        Ok(values)
    }
}

impl Kept {
    fn of(index: usize, judgement: &Judgement) -> Self {
        let Judgement { value, error: _, reason, metrics } = judgement.clone();
        Self { index, value, reason, metrics }
    }

    fn judgement(self) -> (usize, Judgement) {
        let Self { index, value, reason, metrics } = self;
        (index, Judgement { value, error: None, reason, metrics })
    }
}
