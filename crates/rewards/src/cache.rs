//! Cache of values for rewards with `cache: true`, which always give the same completion the same value. One worker process has
//! one cache for all its jobs. A value is found by the reward's revision and the sample. The revision includes the owner of the
//! job and the secrets of the service, so that no owner gets a value that the service would not have given to that owner.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::Judgement;
use crate::rollout::{RewardSample, RewardValue};
use crate::spec::RewardSecrets;

/// Approximate maximum size in bytes of each of the cache's two generations (see [`Cache`]).
const GENERATION_BYTES: usize = 32 << 20;
/// Approximate size in bytes of a cache entry, without its texts.
const ENTRY_BYTES: usize = 192;

/// Key of a cached value: a SHA-256 hash of the reward's revision and the sample.
pub type CacheKey = [u8; 32];

/// The cache of a worker, bounded in size. When the young generation is full it becomes the old one; entries of the previous
/// old generation that were not read since are dropped.
#[derive(Debug, Default)]
pub struct Cache(Mutex<Generations>);

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<CacheKey, Judgement>,
    young_bytes: usize,
    old: HashMap<CacheKey, Judgement>,
}

impl Cache {
    /// Returns the cached reward of a sample, if there is one.
    pub fn get(&self, key: &CacheKey) -> Option<Judgement> {
        let mut generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(judgement) = generations.young.get(key) {
            return Some(judgement.clone());
        }
        let judgement = generations.old.remove(key)?;
        generations.insert(*key, judgement.clone());
        Some(judgement)
    }

    /// Stores a sample's reward if it is a number or "not applicable". Missing values, and zeros that replace invalid
    /// answers, are not stored.
    pub fn insert(&self, key: CacheKey, judgement: &Judgement) {
        let is_storable = judgement.error.is_none() && judgement.value != RewardValue::Missing;
        if is_storable {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key, judgement.clone());
        }
    }
}

impl Generations {
    fn insert(&mut self, key: CacheKey, judgement: Judgement) {
        let texts = judgement.reason.as_ref().map_or(0, String::len)
            + judgement
                .metrics
                .iter()
                .map(|(name, value)| name.len() + 64 + value.as_str().map_or(0, str::len))
                .sum::<usize>();
        if self.young_bytes >= GENERATION_BYTES {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        if self.young.insert(key, judgement).is_none() {
            self.young_bytes += ENTRY_BYTES + texts;
        }
    }
}

/// Hashes everything that a reward's values depend on, except the sample: the owner (`scope`), the secrets, the reward's name,
/// and its plan with URL and parameters.
pub fn revision(scope: &str, secrets: &RewardSecrets, name: &str, plan: &impl Serialize) -> CacheKey {
    let plan = serde_json::to_vec(plan).unwrap_or_default();
    let secrets = serde_json::to_vec(secrets).unwrap_or_default();
    digest(&[scope.as_bytes(), &secrets, name.as_bytes(), &plan])
}

/// Adds the limit on a reward's values to its revision, since another job may use the same service with another limit.
pub fn bounded(revision: &CacheKey, max_abs_reward: Option<f64>) -> CacheKey {
    digest(&[revision, format!("{max_abs_reward:?}").as_bytes()])
}

/// Hashes a sample for one revision of a reward: its prompt, completion and columns, not its position in a rollout.
pub fn key(revision: &CacheKey, sample: &RewardSample) -> CacheKey {
    let RewardSample {
        sample_id: _,
        group_id: _,
        prompt_id: _,
        source: _,
        prompt,
        messages,
        completion,
        finish_reason,
        num_tokens,
        completion_ids: _,
        columns,
        // The messages have its turns.
        episode: _,
    } = sample;
    let rest = serde_json::to_vec(&(messages, finish_reason, num_tokens, columns)).unwrap_or_default();
    digest(&[revision, prompt.as_bytes(), completion.as_bytes(), &rest])
}

fn digest(parts: &[&[u8]]) -> CacheKey {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::FinishReason;

    fn sample(prompt: &str, completion: &str) -> RewardSample {
        RewardSample {
            sample_id: "s_0".into(),
            group_id: "g_0".into(),
            prompt_id: "row_0".into(),
            source: None,
            prompt: prompt.into(),
            messages: None,
            completion: completion.into(),
            finish_reason: FinishReason::Stop,
            num_tokens: 1,
            completion_ids: None,
            columns: serde_json::Map::new(),
            episode: None,
        }
    }

    #[test]
    fn a_key_names_the_reward_and_the_sample_and_not_its_place() {
        let secret = |secret: &str| RewardSecrets { secret: Some(secret.to_owned()), ..RewardSecrets::default() };
        let of = |scope, with, name, url: &str| super::revision(scope, &secret(with), name, &url);
        let revision = of("ann", "s", "r", "http://x/");
        let one = key(&revision, &sample("ab", "c"));
        assert_eq!(one, key(&revision, &RewardSample { sample_id: "s_9".into(), ..sample("ab", "c") }));
        let other_column = serde_json::Map::from_iter([("answer".to_owned(), 1.into())]);
        for other in [
            key(&revision, &sample("a", "bc")),
            key(&of("ann", "s", "r", "http://y/"), &sample("ab", "c")),
            key(&of("ann", "s", "s", "http://x/"), &sample("ab", "c")),
            key(&of("bob", "s", "r", "http://x/"), &sample("ab", "c")),
            key(&of("ann", "t", "r", "http://x/"), &sample("ab", "c")),
            key(&bounded(&revision, Some(1.0)), &sample("ab", "c")),
            key(&revision, &RewardSample { columns: other_column, ..sample("ab", "c") }),
            key(&revision, &RewardSample { finish_reason: FinishReason::Length, ..sample("ab", "c") }),
        ] {
            assert_ne!(one, other);
        }
    }

    #[test]
    fn values_are_kept_errors_are_not_and_the_size_is_bounded() {
        let cache = Cache::default();
        cache.insert([1; 32], &Judgement::value(RewardValue::NotApplicable));
        cache.insert([2; 32], &Judgement::missing("timeout", "late"));
        let zero = Judgement { value: RewardValue::Number(0.0), ..Judgement::missing("nan", "NaN") };
        cache.insert([3; 32], &zero);
        assert_eq!(cache.get(&[1; 32]), Some(Judgement::value(RewardValue::NotApplicable)));
        assert_eq!((cache.get(&[2; 32]), cache.get(&[3; 32])), (None, None));

        let long = Judgement { reason: Some("x".repeat(1 << 20)), ..Judgement::value(RewardValue::Number(0.5)) };
        for number in 10..110 {
            cache.insert([number; 32], &long);
            assert!(cache.get(&[1; 32]).is_some(), "what is used stays");
        }
        let kept = (10..110).filter(|number| cache.get(&[*number; 32]).is_some()).count();
        assert!((31..=70).contains(&kept), "{kept}");
        assert_eq!(cache.get(&[109; 32]).unwrap().value, RewardValue::Number(0.5));
    }
}
