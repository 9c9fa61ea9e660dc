//! The local reward models of a job: found by their registered ids, loaded once per attempt, on the worker's device.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value};

use super::{Conversation, Scorer, ScorerError, ScorerOptions};
use crate::engine::backend::BackendKind;
use crate::engine::error::EngineError;
use crate::error_text::with_causes;
use crate::modelcard::ClassifierCard;
use crate::reward::Judgement;
use crate::reward::local::{LocalModel, LocalModels};
use crate::rollout::{RewardSample, RewardValue};
use crate::spec::{Plan, RewardModelPlan};

/// The local reward models of one attempt at a job. Rewards with the same plan share one loaded model.
#[derive(Debug)]
pub struct LocalRewardModels {
    device: String,
    /// Directory of each model by id, and whether its files were verified against the job.
    dirs: Mutex<BTreeMap<String, (PathBuf, bool)>>,
    /// SHA-256 of each model by id, at the time when the job was accepted.
    fingerprints: BTreeMap<String, String>,
    /// Additional variables for the chat templates of the trained model and the reward models.
    chat_template_kwargs: Map<String, Value>,
    loaded: Mutex<HashMap<String, Arc<Scorer>>>,
}

impl LocalRewardModels {
    /// Creates the reward models of a job for a device (`cpu`, `cuda:0`), without loading them; `paths` maps ids to directories.
    pub fn new(device: &str, paths: BTreeMap<String, String>, plan: &Plan) -> Self {
        Self {
            device: device.to_owned(),
            dirs: Mutex::new(paths.into_iter().map(|(id, path)| (id, (PathBuf::from(path), false))).collect()),
            fingerprints: plan.reward_models.clone(),
            chat_template_kwargs: plan.sampling.chat_template_kwargs.clone(),
            loaded: Mutex::default(),
        }
    }

    /// Sets the directories of reward models whose files were verified against the job.
    pub fn set_verified(&self, dirs: BTreeMap<String, PathBuf>) {
        let mut known = self.dirs.lock().unwrap_or_else(PoisonError::into_inner);
        known.extend(dirs.into_iter().map(|(id, dir)| (id, (dir, true))));
    }

    fn scorer(&self, plan: &RewardModelPlan) -> Result<Arc<Scorer>, String> {
        let RewardModelPlan { model, label, format, max_length, dtype } = plan;
        let dir = self.dirs.lock().unwrap_or_else(PoisonError::into_inner).get(model).cloned();
        let (dir, is_verified) = dir.ok_or_else(|| format!("the reward model '{model}' is no longer registered"))?;
        if !dir.is_dir() {
            return Err(format!("the directory of the reward model '{model}' is not on this machine"));
        }
        // The lock is held while a model is loading, so that callers that need the same model wait for it.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let key = format!("{plan:?}");
        if let Some(scorer) = loaded.get(&key) {
            return Ok(scorer.clone());
        }
        let card = ClassifierCard::read(&dir).map_err(|error| error.to_string())?;
        if let Some(sha256) = self.fingerprints.get(model)
            && !is_verified
            && card.fingerprint(&dir).map_err(|error| error.to_string())? != *sha256
        {
            return Err(format!(
                "the files of the reward model '{model}' have changed since the job was submitted: restore them, or \
                 register the model again and submit a new job"
            ));
        }
        let options = ScorerOptions {
            dir,
            backend: BackendKind::of_device(&self.device).map_err(|error| error.to_string())?,
            dtype: *dtype,
            label: label.clone(),
            format: *format,
            max_length: *max_length,
            chat_template_kwargs: self.chat_template_kwargs.clone(),
        };
        let scorer = Arc::new(Scorer::load(&options).map_err(|error| without_paths(&error))?);
        loaded.insert(key, scorer.clone());
        Ok(scorer)
    }
}

impl LocalModels for LocalRewardModels {
    fn load(&self, plan: &RewardModelPlan) -> Result<Arc<dyn LocalModel>, String> {
        Ok(self.scorer(plan)?)
    }
}

impl LocalModel for Scorer {
    fn judge(&self, samples: &[RewardSample]) -> Result<Vec<Judgement>, String> {
        let conversations: Vec<Conversation<'_>> = samples
            .iter()
            .map(|sample| Conversation {
                messages: sample.messages.as_ref().and_then(Value::as_array).map(Vec::as_slice),
                prompt: &sample.prompt,
                completion: &sample.completion,
            })
            .collect();
        let scored = self.score(&conversations).map_err(|error| with_causes(&error))?;
        let judgements = scored.into_iter().map(|scored| match scored {
            Ok(scored) => {
                Judgement { metrics: scored.metrics(), ..Judgement::value(RewardValue::Number(scored.reward)) }
            }
            Err(error) => Judgement::missing("not_scorable", with_causes(&error)),
        });
        Ok(judgements.collect())
    }
}

/// Formats an error for the job's user, without paths of this machine.
fn without_paths(error: &ScorerError) -> String {
    match error {
        ScorerError::Model(EngineError::Io { source, .. }) => {
            format!("a file of the reward model cannot be read: {source}")
        }
        other => with_causes(other),
    }
}
