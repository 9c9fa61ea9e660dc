//! The resolved plan: every default applied, every value checked. Serialised into the job's row and sent to the worker.

mod algorithm;
mod arithmetic;
mod rewards;
mod warm_up;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::event::{OnAlert, Rule};
use crate::id::{AdapterId, CheckpointId, DatasetId};

pub use algorithm::*;
pub use arithmetic::*;
pub use rewards::*;
pub use warm_up::*;

/// Everything a run needs to know, with no default left open.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// For people.
    pub name: Option<String>,
    /// The model, as it was when the job was accepted.
    pub model: ModelPlan,
    /// The training prompts.
    pub dataset: DatasetPlan,
    /// Evaluation, if asked for.
    pub eval: Option<EvalPlan>,
    /// At least one of weight ≠ 0; names are unique.
    pub rewards: Vec<RewardPlan>,
    /// Of the registered models that score as `reward_model`, by id: SHA-256 when the job was accepted.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reward_models: BTreeMap<String, String>,
    /// The algorithm.
    pub rloo: RlooPlan,
    /// Rollouts.
    pub sampling: SamplingPlan,
    /// The adapter; null = full fine-tuning: every weight is trained.
    pub lora: Option<LoraPlan>,
    /// A checkpoint whose weights the run begins with, instead of a fresh adapter or the base model's weights.
    #[serde(default)]
    pub warm_start: Option<WarmStartPlan>,
    /// Supervised steps before RLOO's first one, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_up: Option<WarmUpPlan>,
    /// The optimizer and its schedule.
    pub optimizer: OptimizerPlan,
    /// Batches, length, seed.
    pub training: TrainingPlan,
    /// When to save and what to keep.
    pub checkpoints: CheckpointPlan,
    /// When to end before the last step, if asked for.
    #[serde(default)]
    pub early_stopping: Option<EarlyStoppingPlan>,
    /// What alerts do.
    #[serde(default)]
    pub doctor: DoctorPlan,
    /// The client's own labels.
    pub metadata: BTreeMap<String, String>,
    /// What all this amounts to.
    pub totals: Totals,
    /// The rules that decide the bits of the run; absent = those of rlood 0.1.
    #[serde(default, skip_serializing_if = "Arithmetic::is_first")]
    pub arithmetic: Arithmetic,
}

/// The base model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelPlan {
    /// As registered, or an absolute path.
    pub id: String,
    /// SHA-256 over config, weights and tokenizer when the job was accepted; the worker refuses another one.
    pub sha256: String,
}

/// A dataset and which of its columns matter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DatasetPlan {
    /// The dataset.
    pub id: DatasetId,
    /// SHA-256 of its canonical bytes.
    pub sha256: String,
    /// Rows.
    pub num_rows: u64,
    /// Where the rows come from, if from several: each source's rows lie behind those of the sources before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourcePlan>,
}

impl DatasetPlan {
    /// A dataset of one source.
    pub fn new(id: DatasetId, sha256: String, num_rows: u64) -> Self {
        Self { id, sha256, num_rows, sources: Vec::new() }
    }

    /// The source that a row comes from, if there are several.
    pub fn source_of(&self, row: u64) -> Option<&str> {
        let mut end = 0;
        let of_row = self.sources.iter().find(|source| {
            end += source.num_rows;
            row < end
        });
        of_row.map(|source| source.name.as_str())
    }

    /// How many of these rows (ascending) each source has; all of them where there is one.
    pub fn rows_by_source(&self, rows: &[u64]) -> Vec<u64> {
        let mut counts = Vec::with_capacity(self.sources.len());
        let (mut end, mut before) = (0, 0);
        for source in &self.sources {
            end += source.num_rows;
            let until = rows.partition_point(|row| *row < end);
            counts.push((until - before) as u64);
            before = until;
        }
        if self.sources.is_empty() { vec![rows.len() as u64] } else { counts }
    }
}

/// One of several sources of prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SourcePlan {
    /// Unique in the dataset; metrics are `sources/{name}/…`.
    pub name: String,
    /// Its rows.
    pub num_rows: u64,
    /// Its share of the prompts is its weight over the sum of all.
    pub weight: f64,
}

/// Evaluation on prompts of its own, or on rows held out of the training dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EvalPlan {
    /// The evaluation prompts; with `fraction` the training dataset.
    pub dataset: DatasetPlan,
    /// The share of the training dataset that is held out; null with a dataset of its own.
    #[serde(default)]
    pub fraction: Option<f64>,
    /// With `fraction`: rows that are evaluated and never trained. Above 10,000 rows the worker counts them, and this is the
    /// number that the fraction asks for: the rows of equal prompts stay together.
    #[serde(default)]
    pub held_out_rows: Option<u64>,
    /// Optimizer steps between evaluations; the last step is always evaluated.
    pub every_steps: u64,
    /// Evaluate before the first step too.
    pub before_start: bool,
    /// Completions a prompt; 1 is allowed.
    pub num_generations: u32,
    /// 0 = greedy.
    pub temperature: f64,
    /// (0, 1]; null = as in training.
    #[serde(default)]
    pub top_p: Option<f64>,
    /// 0 = off; null = as in training.
    #[serde(default)]
    pub top_k: Option<u32>,
    /// 0 = off; null = as in training.
    #[serde(default)]
    pub min_p: Option<f64>,
    /// 1 = off; null = as in training.
    #[serde(default)]
    pub repetition_penalty: Option<f64>,
    /// Rewards of its own; null = the job's.
    #[serde(default)]
    pub rewards: Option<Vec<RewardPlan>>,
    /// The share of the training dataset that only the verdict reads; null = none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_fraction: Option<f64>,
    /// With `test_fraction`: how many rows these are. Above 10,000 rows the worker chooses them, and this is the number that the
    /// fraction asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_rows: Option<u64>,
    /// Prompts that only the verdict reads; null = none of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_dataset: Option<DatasetPlan>,
    /// What training must not make worse.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard: Option<GuardPlan>,
    /// Whether the server judges the job by itself when it has succeeded.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub auto_verdict: bool,
}

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_yes(value: &bool) -> bool {
    *value
}

/// Prompts on which the trained model must not be worse than the base model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuardPlan {
    /// The prompts; only the verdict reads them.
    pub dataset: DatasetPlan,
    /// Rewards of its own; null = those of the evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewards: Option<Vec<RewardPlan>>,
    /// How far the mean reward may fall: the lower end of the difference's 95 % interval must not lie below −margin.
    pub margin: f64,
}

impl EvalPlan {
    /// Greedy, one completion a prompt, the job's rewards, before the start and every `every_steps`.
    pub fn of_dataset(dataset: DatasetPlan, every_steps: u64) -> Self {
        Self {
            dataset,
            fraction: None,
            held_out_rows: None,
            every_steps,
            before_start: true,
            num_generations: 1,
            temperature: 0.0,
            top_p: None,
            top_k: None,
            min_p: None,
            repetition_penalty: None,
            rewards: None,
            test_fraction: None,
            test_rows: None,
            test_dataset: None,
            guard: None,
            auto_verdict: true,
        }
    }

    /// The dataset whose rows a verdict judges; `trained` is the training dataset.
    pub fn judged_dataset<'a>(&'a self, trained: &'a DatasetPlan) -> &'a DatasetPlan {
        match (&self.test_dataset, self.test_fraction) {
            (Some(test), _) => test,
            (None, Some(_)) => trained,
            (None, None) => &self.dataset,
        }
    }

    /// Every dataset that a verdict may read.
    pub fn datasets(&self) -> impl Iterator<Item = &DatasetPlan> {
        let of_guard = self.guard.as_ref().map(|guard| &guard.dataset);
        std::iter::once(&self.dataset).chain(&self.test_dataset).chain(of_guard)
    }

    /// Prompts of one evaluation.
    pub fn num_prompts(&self) -> u64 {
        self.held_out_rows.unwrap_or(self.dataset.num_rows)
    }
}

/// Rollouts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SamplingPlan {
    /// Tokens.
    pub max_completion_length: u32,
    /// > 0; divides the logits in sampling and in log-probs.
    pub temperature: f64,
    /// (0, 1].
    pub top_p: f64,
    /// 0 = off.
    pub top_k: u32,
    /// 0 = off.
    pub min_p: f64,
    /// 1 = off.
    pub repetition_penalty: f64,
    /// A completion ends with the first of these strings, which it keeps.
    pub stop: Vec<String>,
    /// Given to the chat template.
    pub chat_template_kwargs: serde_json::Map<String, serde_json::Value>,
}

/// The adapter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoraPlan {
    /// Rank.
    pub r: u32,
    /// Scaling is alpha/r (alpha/√r with `use_rslora`).
    pub alpha: f64,
    /// Of the adapter's input, in the training forward only; [0, 1).
    pub dropout: f64,
    /// Which linear layers: of the model's, in this order q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj. Of a PEFT
    /// adapter that has others in some layers, `layers.3.self_attn.q_proj`.
    pub target_modules: Vec<String>,
    /// alpha/√r.
    pub use_rslora: bool,
    /// Other ranks than `r`, by a name of `target_modules`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rank_pattern: BTreeMap<String, u32>,
    /// Other alphas than `alpha`, by a name of `target_modules`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub alpha_pattern: BTreeMap<String, f64>,
}

/// Where a run's weights come from, and what its KL penalty holds on to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WarmStartPlan {
    /// A checkpoint of another job; its files are kept with this job. This or `adapter`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointId>,
    /// A PEFT adapter from elsewhere; its files are kept with this job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterPlan>,
    /// What the KL penalty is measured against.
    pub reference: Reference,
}

/// A PEFT adapter from elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdapterPlan {
    /// Its id here; null while it has not been fetched from the hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<AdapterId>,
    /// The repository of the hub that it comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hub: Option<String>,
    /// A branch, tag or commit of it; of an adapter that was fetched the commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

/// The reference of a run that begins with a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// The base model.
    Base,
    /// A frozen copy of the checkpoint's weights.
    Initial,
}

/// How the optimizer keeps its moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum OptimizerKind {
    /// AdamW, moments in 32 bits.
    #[default]
    #[serde(rename = "adamw")]
    Adamw,
    /// AdamW, moments in 8 bits, quantised block by block (Dettmers et al. 2022).
    #[serde(rename = "adamw_8bit")]
    Adamw8bit,
}

/// Precision of the matrix products.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ComputeDtype {
    /// 32 bits throughout.
    #[default]
    F32,
    /// Weights and inputs of matrix products rounded to bfloat16, sums in 32 bits.
    Bf16,
}

/// Learning-rate schedules, over `max_steps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedulerType {
    /// lr
    Constant,
    /// lr·(1 − t/T)
    Linear,
    /// lr·(1 + cos(πt/T))/2
    Cosine,
}

/// AdamW and its schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OptimizerPlan {
    /// How moments are kept.
    #[serde(default)]
    pub kind: OptimizerKind,
    /// Peak.
    pub learning_rate: f64,
    /// First moment's decay.
    pub adam_beta1: f64,
    /// Second moment's decay.
    pub adam_beta2: f64,
    /// Added to √v̂.
    pub adam_epsilon: f64,
    /// Decoupled; norms and biases do not decay, as in transformers.
    pub weight_decay: f64,
    /// Global norm; 0 = off.
    pub max_grad_norm: f64,
    /// Schedule after warm-up.
    pub lr_scheduler_type: LrSchedulerType,
    /// Linear from 0.
    pub warmup_steps: u64,
}

/// Batches, length, seed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TrainingPlan {
    /// Prompts an optimizer step.
    pub prompts_per_step: u32,
    /// Optimizer steps of RLOO; those of a warm-up come before them.
    pub max_steps: u64,
    /// Of sampling, order and initialisation.
    pub seed: u64,
    /// A new permutation each epoch; false = the dataset's order.
    pub shuffle_dataset: bool,
    /// Precision of the matrix products, in rollouts and in training.
    #[serde(default)]
    pub dtype: ComputeDtype,
    /// Tokens (prompts and completions) of one micro-batch, at least one group: chosen by the memory there is, and part of
    /// the plan, because a resumed run must split as the undisturbed one did.
    #[serde(default = "default_micro_batch_tokens")]
    pub micro_batch_tokens: u32,
    /// Each layer's activations are computed again in the backward instead of being kept: slower, and less memory. It
    /// changes no number.
    #[serde(default = "default_gradient_checkpointing")]
    pub gradient_checkpointing: bool,
    /// Failed attempts after which the job fails with the code `max_attempts`; default: no limit.
    /// An attempt fails when its worker dies or falls silent, or cannot use a file; it counts whether it made progress or not.
    /// Pauses, SIGTERM, preemptions and restarts of the server do not count. In any case three failures in a row without progress
    /// fail the job (`worker_lost`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 10_000)]
    pub max_attempts: Option<u32>,
}

/// Tokens of a micro-batch where memory does not ask for fewer.
pub const MICRO_BATCH_TOKENS: u32 = 4096;
/// The same on the CPU: what an operation writes is still in a cache when the next one reads it.
pub const MICRO_BATCH_TOKENS_ON_CPU: u32 = 1024;

fn default_gradient_checkpointing() -> bool {
    true
}

fn default_micro_batch_tokens() -> u32 {
    MICRO_BATCH_TOKENS
}

/// When to save and what to keep.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointPlan {
    /// Optimizer steps between checkpoints; the last step is always saved, and so is an evaluation that is the best so far
    /// by `metric_for_best` (unless `keep_best` is 0).
    pub every_steps: u64,
    /// Seconds between checkpoints, beside `every_steps`; default: by steps only.
    /// After a step, a checkpoint is also due when this much time has passed since the last one, or since the attempt began.
    /// Checkpoints change no number of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub every_seconds: Option<u64>,
    /// The newest N stay.
    pub keep_last: u32,
    /// The best N by `metric_for_best` stay.
    pub keep_best: u32,
    /// The metric that says which checkpoint is best; default `eval_reward` with evaluation, else `reward`.
    #[serde(default)]
    pub metric_for_best: Option<String>,
    /// Higher is better; default by the metric's name: losses, KL, gradient norms, spreads, fractions of missing, cut or
    /// tied are better low, all others high.
    #[serde(default)]
    pub greater_is_better: Option<bool>,
}

/// Ends a run that does not get better.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EarlyStoppingPlan {
    /// Looked at after each evaluation; default: `checkpoints.metric_for_best`.
    pub metric: String,
    /// Higher is better; default by the metric's name, as for checkpoints.
    pub greater_is_better: bool,
    /// Evaluations in a row without a new best that end the run.
    pub patience: u32,
    /// A new best is better by more than this.
    pub min_delta: f64,
}

/// What alerts do.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DoctorPlan {
    /// `note`: told, the run goes on; `pause`: the job pauses; `stop`: the job ends, its last good checkpoint is its result.
    pub on_alert: OnAlert,
    /// Rules that differ, by name.
    #[serde(default)]
    pub rules: BTreeMap<Rule, RulePlan>,
}

/// One rule's own settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RulePlan {
    /// false = the rule is switched off.
    pub enabled: bool,
    /// null = as `doctor.on_alert` says.
    #[serde(default)]
    pub on_alert: Option<OnAlert>,
}

/// The arithmetic of a run, echoed so that nobody is surprised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Totals {
    /// max_steps.
    pub optimizer_steps: u64,
    /// Completions an optimizer step.
    pub completions_per_step: u64,
    /// Unique prompts a generation block: prompts_per_step · steps_per_generation.
    pub prompts_per_block: u64,
    /// Rollout blocks.
    pub generation_blocks: u64,
    /// Completions sampled to be trained.
    pub completions: u64,
    /// Greedy completions beside them, one a prompt (estimator remax).
    #[serde(default)]
    pub greedy_completions: u64,
    /// Most completions that refills of tied groups can add (min_informative_groups).
    #[serde(default)]
    pub max_refill_completions: u64,
    /// Passes over the dataset (fractional); refills pass over it faster.
    pub epochs: f64,
    /// Rows left out of each epoch (incomplete last block).
    pub dropped_rows_per_epoch: u64,
    /// Most completion tokens that can be sampled, greedy completions and refills included.
    pub max_completion_tokens: u64,
}
