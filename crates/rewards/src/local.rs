//! A reward model in this process: the seam to whoever loads and runs it (the engine, which rewards know nothing of).

use std::sync::Arc;

use futures::future::BoxFuture;
use tokio::sync::OnceCell;

use super::{BuildError, Counts, JobContext, Judged, Judgement, Limit, Reward, RewardFailure};
use crate::sample::RewardSample;
use crate::spec::RewardModelPlan;

/// Samples scored between two looks at whether anybody still waits.
const CHUNK_SAMPLES: usize = 16;

/// Finds and loads reward models. Blocks.
pub trait LocalModels: Send + Sync {
    /// The model of a plan; the error says in words what to do.
    fn load(&self, plan: &RewardModelPlan) -> Result<Arc<dyn LocalModel>, String>;
}

/// A reward model that is loaded. Blocks.
pub trait LocalModel: Send + Sync {
    /// One judgement a sample, in order; an error when the model itself fails.
    fn judge(&self, samples: &[RewardSample]) -> Result<Vec<Judgement>, String>;
}

/// A reward computed by a model on this machine; loaded when it is first needed.
pub struct Local {
    name: String,
    plan: RewardModelPlan,
    models: Arc<dyn LocalModels>,
    model: OnceCell<Arc<dyn LocalModel>>,
    limit: Limit,
}

impl Local {
    /// Makes the reward of a plan.
    pub fn new(name: &str, plan: &RewardModelPlan, models: Option<Arc<dyn LocalModels>>) -> Result<Self, BuildError> {
        let models = models.ok_or_else(|| BuildError {
            reward: name.to_owned(),
            detail:
                "a reward_model runs on a worker's device, not here: try it with POST /jobs/validate?probe=true, or \
                     serve it with `rlood reward-server` and name it as a webhook"
                    .to_owned(),
        })?;
        Ok(Self { name: name.to_owned(), plan: plan.clone(), models, model: OnceCell::new(), limit: Limit::default() })
    }

    /// Takes no value that is further from 0 than this.
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
                judgements.extend(judged.into_iter().map(|judgement| self.limit.hold(judgement)));
            }
            Ok(Judged { judgements, counts: Counts::default() })
        })
    }

    fn prepare(&self) -> BoxFuture<'_, Result<(), RewardFailure>> {
        Box::pin(async move { self.model().await.map(drop) })
    }
}
