//! Reward models that run in this process. The worker implements loading and running; this crate does not depend on the engine.

use std::sync::Arc;

use futures::future::BoxFuture;
use tokio::sync::OnceCell;

use super::{BuildError, Counts, JobContext, Judged, Judgement, Limit, Reward, RewardFailure};
use crate::rollout::RewardSample;
use crate::spec::RewardModelPlan;

/// Number of samples that a reward model scores between two checks whether the caller has stopped waiting.
const CHUNK_SAMPLES: usize = 16;

/// Finds and loads reward models. The calls block.
pub trait LocalModels: Send + Sync {
    /// Loads the reward model that a plan names. The error message says what the user can do.
    fn load(&self, plan: &RewardModelPlan) -> Result<Arc<dyn LocalModel>, String>;
}

/// A loaded reward model. The calls block.
pub trait LocalModel: Send + Sync {
    /// Returns one judgement for each sample, in order; an error when the model itself fails.
    fn judge(&self, samples: &[RewardSample]) -> Result<Vec<Judgement>, String>;
}

/// A reward computed by a model on this machine. The model is loaded at first use.
pub struct Local {
    name: String,
    plan: RewardModelPlan,
    models: Arc<dyn LocalModels>,
    model: OnceCell<Arc<dyn LocalModel>>,
    limit: Limit,
}

impl Local {
    /// Creates the reward from its plan; the model is loaded later.
    pub fn new(name: &str, plan: &RewardModelPlan, models: Option<Arc<dyn LocalModels>>) -> Result<Self, BuildError> {
        let models = models.ok_or_else(|| BuildError {
            reward: name.to_owned(),
            detail:
                "a reward_model runs on a worker's device, not here: test it with POST /jobs/validate?probe=true, or \
                     serve it with `rlood reward-server` and use it as a webhook"
                    .to_owned(),
        })?;
        Ok(Self { name: name.to_owned(), plan: plan.clone(), models, model: OnceCell::new(), limit: Limit::default() })
    }

    /// Sets the maximum absolute value of this reward.
    #[must_use]
    pub fn bounded(self, max_abs_reward: Option<f64>) -> Self {
        Self { limit: Limit::of(max_abs_reward), ..self }
    }

    fn unusable(&self, detail: impl std::fmt::Display) -> RewardFailure {
        RewardFailure::Unusable { reward: self.name.clone(), detail: detail.to_string() }
    }

    async fn model(&self) -> Result<&Arc<dyn LocalModel>, RewardFailure> {
        let load = || async {
            let (models, plan) = (self.models.clone(), self.plan.clone());
            let loaded = tokio::task::spawn_blocking(move || models.load(&plan)).await;
            loaded.map_err(|error| self.unusable(error))?.map_err(|error| self.unusable(error))
        };
        self.model.get_or_try_init(load).await
    }
}

impl Reward for Local {
    fn judge<'a>(
        &'a self,
        _: &'a JobContext,
        samples: &'a [RewardSample],
    ) -> BoxFuture<'a, Result<Judged, RewardFailure>> {
        Box::pin(async move {
            let model = self.model().await?;
            let mut judgements = Vec::with_capacity(samples.len());
            for chunk in samples.chunks(CHUNK_SAMPLES) {
                let (model, chunk) = (model.clone(), chunk.to_vec());
                let judged = tokio::task::spawn_blocking(move || model.judge(&chunk)).await;
                let judged = judged.map_err(|error| self.unusable(error))?.map_err(|error| self.unusable(error))?;
                judgements.extend(judged.into_iter().map(|judgement| self.limit.apply(judgement)));
            }
            Ok(Judged { judgements, counts: Counts::default() })
        })
    }

    fn prepare(&self) -> BoxFuture<'_, Result<(), RewardFailure>> {
        Box::pin(async move { self.model().await.map(drop) })
    }
}
