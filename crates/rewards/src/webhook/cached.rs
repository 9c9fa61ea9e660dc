//! Selects the samples for which no request is sent to a reward with `cache: true`: samples with a cached value, and all but the
//! first of identical samples.
//!
//! The cached values used for a rollout are recorded in the journal as if a service had answered them. A process that resumes
//! the rollout omits the same samples, so its requests equal those that were sent before.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::ScoringRun;
use crate::cache::{Cache, CacheKey, key as cache_key};
use crate::id::RewardRequestId;
use crate::journal::{JournaledRequest, key};
use crate::protocol::{JournalEntry, RewardAnswer};
use crate::rollout::RewardValue;
use crate::{Judgement, RewardFailure};

/// Round number of the journal entry with the cached values; rounds of real requests never get this high.
const CACHE_ROUND: u32 = u32::MAX;

/// The samples of a rollout that need no request to the reward service.
#[derive(Default)]
pub(super) struct Known {
    /// Cache key of each sample.
    keys: HashMap<usize, CacheKey>,
    values: HashMap<usize, Judgement>,
    /// Index of a sample → index of the first identical sample.
    duplicates: HashMap<usize, usize>,
}

/// A cached value in the journal.
#[derive(Serialize, Deserialize)]
struct CachedValue {
    index: usize,
    value: RewardValue,
    reason: Option<String>,
    metrics: Map<String, Value>,
}

impl Known {
    /// Returns whether this sample needs no request.
    pub fn contains(&self, index: usize) -> bool {
        self.values.contains_key(&index) || self.duplicates.contains_key(&index)
    }

    /// Returns the number of samples that need no request.
    pub fn count(&self) -> u64 {
        (self.values.len() + self.duplicates.len()) as u64
    }

    /// Fills in the cached values of samples that needed no request, and stores the values that the service gave in the cache.
    pub fn complete(self, cache: &Cache, judgements: &mut [Option<Judgement>]) {
        let Self { keys, values, duplicates } = self;
        for (index, judgement) in values {
            judgements[index] = Some(judgement);
        }
        for (duplicate, first) in duplicates {
            judgements[duplicate] = judgements[first].clone();
        }
        for (index, key) in keys {
            if let Some(judgement) = &judgements[index] {
                cache.insert(key, judgement);
            }
        }
    }
}

impl ScoringRun<'_> {
    /// Returns which samples at `indices` need no request; none if the reward has no cache.
    pub(super) async fn find_known(&self, indices: &[usize]) -> Result<Known, RewardFailure> {
        let Some(revision) = &self.webhook.revision else { return Ok(Known::default()) };
        let mut known = Known::default();
        let mut firsts: HashMap<CacheKey, usize> = HashMap::new();
        for &index in indices {
            let key = cache_key(revision, &self.samples[index]);
            known.keys.insert(index, key);
            match firsts.get(&key) {
                Some(first) => drop(known.duplicates.insert(index, *first)),
                None => drop(firsts.insert(key, index)),
            }
        }
        let firsts: HashSet<usize> = firsts.into_values().collect();
        known.values = self.cached_values(&known, firsts).await?;
        Ok(known)
    }

    /// Returns the cached values of samples: those that a previous attempt recorded in the journal, else those in the cache now.
    async fn cached_values(
        &self,
        known: &Known,
        indices: HashSet<usize>,
    ) -> Result<HashMap<usize, Judgement>, RewardFailure> {
        let wire = || self.wire.iter().map(String::as_str);
        let entry_key = self.webhook.journal.as_ref().map(|_| key(self.job, &self.webhook.name, CACHE_ROUND, wire()));
        let id = match self.journaled(entry_key.as_deref()) {
            Some(JournaledRequest::Answered { answer: RewardAnswer::Body { body }, .. }) => {
                let kept: Vec<CachedValue> = serde_json::from_str(&body).unwrap_or_default();
                return Ok(kept
                    .into_iter()
                    .filter(|kept| indices.contains(&kept.index))
                    .map(CachedValue::judgement)
                    .collect());
            }
            Some(JournaledRequest::Sent { id, .. }) => Some(id),
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
                self.append_to_journal(entry_key.as_deref(), entry).await?;
                id
            }
        };
        let kept: Vec<CachedValue> =
            values.iter().map(|(index, judgement)| CachedValue::of(*index, judgement)).collect();
        let answer = RewardAnswer::Body { body: serde_json::to_string(&kept).unwrap_or_default() };
        let entry = |key| JournalEntry::Answer { rollout: self.job.rollout, key, id, answer };
        self.append_to_journal(entry_key.as_deref(), entry).await?;
        Ok(values)
    }
}

impl CachedValue {
    fn of(index: usize, judgement: &Judgement) -> Self {
        let Judgement { value, error: _, reason, metrics } = judgement.clone();
        Self { index, value, reason, metrics }
    }

    fn judgement(self) -> (usize, Judgement) {
        let Self { index, value, reason, metrics } = self;
        (index, Judgement { value, error: None, reason, metrics })
    }
}
