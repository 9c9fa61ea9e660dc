//! The resolved plan: every default is applied and every value is checked. It is serialized into the job's row and
//! sent to the worker.
//!
//! This file is longer than others: it is the list of all settings of a plan.

mod algorithm;
mod arithmetic;
mod environment;
mod rewards;
mod rollout;
mod runtime;
mod warm_up;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::event::{OnAlert, Rule};
use crate::id::{AdapterId, CheckpointId, DatasetId};

pub use algorithm::*;
pub use arithmetic::*;
pub use environment::*;
pub use rewards::*;
pub use rollout::*;
pub use runtime::*;
pub use warm_up::*;

/// The resolved settings of a job. Every default has been filled in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// Display name of the job; null if none was given.
    pub name: Option<String>,
    /// The base model, as it was when the job was accepted.
    pub model: ModelPlan,
    /// The dataset of training prompts.
    pub dataset: DatasetPlan,
    /// Evaluation settings; null = no evaluation.
    pub eval: Option<EvalPlan>,
    /// The rewards. At least one has a weight other than 0, and names are unique.
    pub rewards: Vec<RewardPlan>,
    /// SHA-256 of each registered model that a `reward_model` reward uses, by model id, as of when the job was accepted.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reward_models: BTreeMap<String, String>,
    /// Settings of the algorithm: estimator, loss and KL penalty.
    pub rloo: RlooPlan,
    /// Sampling settings of the rollouts.
    pub sampling: SamplingPlan,
    /// Servers that sample the completions; absent = the engine that trains also samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutPlan>,
    /// The environment that episodes are played with; absent = a completion is one turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment: Option<EnvironmentPlan>,
    /// The LoRA adapter; null = full fine-tuning: every weight is trained.
    pub lora: Option<LoraPlan>,
    /// The checkpoint or adapter whose weights the run starts from; null = a fresh adapter, or the base model's weights.
    #[serde(default)]
    pub warm_start: Option<WarmStartPlan>,
    /// Supervised steps before the first RLOO step; absent = no warm-up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_up: Option<WarmUpPlan>,
    /// The optimizer and its learning-rate schedule.
    pub optimizer: OptimizerPlan,
    /// Batch sizes, number of steps, seed and precision.
    pub training: TrainingPlan,
    /// When checkpoints are saved and which ones are kept.
    pub checkpoints: CheckpointPlan,
    /// The prompts of the checkpoints' certificates; absent = the neutral ones that are part of rlood.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<CertificatePlan>,
    /// When to end before the last step; null = train all steps.
    #[serde(default)]
    pub early_stopping: Option<EarlyStoppingPlan>,
    /// Which alert rules are on, and whether an alert pauses or ends the job.
    #[serde(default)]
    pub doctor: DoctorPlan,
    /// The program that trains the job; absent = rlood's own engine.
    #[serde(default, skip_serializing_if = "RuntimePlan::is_own")]
    pub runtime: RuntimePlan,
    /// The devices that the job needs; absent = one.
    #[serde(default, skip_serializing_if = "ResourcesPlan::is_one")]
    pub resources: ResourcesPlan,
    /// The client's own labels, as key-value pairs.
    pub metadata: BTreeMap<String, String>,
    /// Amounts that follow from the settings, such as steps, completions and epochs.
    pub totals: Totals,
    /// The rules that decide the exact bits of the run; absent = those of rlood 0.1.
    #[serde(default, skip_serializing_if = "Arithmetic::is_first")]
    pub arithmetic: Arithmetic,
}

/// The base model of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelPlan {
    /// Id of the registered model, or an absolute path.
    pub id: String,
    /// SHA-256 over config, weights and tokenizer when the job was accepted. The worker refuses a model with another hash.
    pub sha256: String,
}

/// A dataset and the sources of its rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DatasetPlan {
    /// Id of the dataset.
    pub id: DatasetId,
    /// SHA-256 of the dataset's canonical rows (JSON lines), in lower-case hex.
    pub sha256: String,
    /// Number of rows in the dataset.
    pub num_rows: u64,
    /// The sources of the rows, if there are several. The rows of each source follow those of the source before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourcePlan>,
}

impl DatasetPlan {
    /// Creates the plan of a dataset with a single source.
    pub fn new(id: DatasetId, sha256: String, num_rows: u64) -> Self {
        Self { id, sha256, num_rows, sources: Vec::new() }
    }

    /// Returns the name of the source that a row comes from; `None` if there is only one source.
    pub fn source_of(&self, row: u64) -> Option<&str> {
        let mut end = 0;
        let of_row = self.sources.iter().find(|source| {
            end += source.num_rows;
            row < end
        });
        of_row.map(|source| source.name.as_str())
    }

    /// Counts how many of these rows (in ascending order) come from each source; one count of all rows if there is only one source.
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
    /// Name of the source, unique in the dataset. It is part of metric names: `sources/{name}/…`.
    pub name: String,
    /// Number of rows of the source.
    pub num_rows: u64,
    /// Weight of the source. Its share of the prompts is its weight divided by the sum of all weights.
    pub weight: f64,
}

/// Evaluation, either on a separate dataset or on rows held out of the training dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EvalPlan {
    /// The evaluation prompts. With `fraction`, this is the training dataset.
    pub dataset: DatasetPlan,
    /// Share of the training dataset that is held out for evaluation; null with a separate evaluation dataset.
    #[serde(default)]
    pub fraction: Option<f64>,
    /// Number of rows, with `fraction`, that are used for evaluation and never for training. Above 10,000 rows the worker chooses
    /// the rows, and this is the number that the fraction asks for; rows with equal prompts stay together.
    #[serde(default)]
    pub held_out_rows: Option<u64>,
    /// Optimizer steps between evaluations. The last step is always evaluated.
    pub every_steps: u64,
    /// Whether to evaluate before the first step too.
    pub before_start: bool,
    /// Completions sampled per prompt; 1 is allowed.
    pub num_generations: u32,
    /// Sampling temperature in evaluations; 0 = greedy.
    pub temperature: f64,
    /// Top-p in evaluations, greater than 0 and at most 1; null = as in training.
    #[serde(default)]
    pub top_p: Option<f64>,
    /// Top-k in evaluations; 0 = off, null = as in training.
    #[serde(default)]
    pub top_k: Option<u32>,
    /// Min-p in evaluations; 0 = off, null = as in training.
    #[serde(default)]
    pub min_p: Option<f64>,
    /// Repetition penalty in evaluations; 1 = off, null = as in training.
    #[serde(default)]
    pub repetition_penalty: Option<f64>,
    /// Rewards used in evaluations; null = the job's rewards.
    #[serde(default)]
    pub rewards: Option<Vec<RewardPlan>>,
    /// Share of the training dataset that only the verdict uses; null = none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_fraction: Option<f64>,
    /// Number of rows, with `test_fraction`, that only the verdict uses. Above 10,000 rows the worker chooses the rows, and this is
    /// the number that the fraction asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_rows: Option<u64>,
    /// Prompts that only the verdict uses; null = no separate test dataset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_dataset: Option<DatasetPlan>,
    /// A guard set: prompts on which training must not make the model worse; null = none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard: Option<GuardPlan>,
    /// Whether the server creates a verdict automatically when the job succeeds.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub auto_verdict: bool,
}

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes the value to this function by reference")]
fn is_yes(value: &bool) -> bool {
    *value
}

/// A guard set: prompts on which the trained model must not be worse than the base model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuardPlan {
    /// The prompts of the guard set. Only the verdict uses them.
    pub dataset: DatasetPlan,
    /// Rewards used on the guard set; null = those of the evaluation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewards: Option<Vec<RewardPlan>>,
    /// How far the mean reward on the guard set may fall. The lower end of the 95 % interval of the difference must
    /// be at least −margin.
    pub margin: f64,
}

impl EvalPlan {
    /// The sampling of the evaluation; settings it does not specify are those of training.
    pub fn sampling(&self, of_training: &SamplingPlan) -> SamplingPlan {
        SamplingPlan {
            temperature: self.temperature,
            top_p: self.top_p.unwrap_or(of_training.top_p),
            top_k: self.top_k.unwrap_or(of_training.top_k),
            min_p: self.min_p.unwrap_or(of_training.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(of_training.repetition_penalty),
            ..of_training.clone()
        }
    }

    /// Creates an evaluation with greedy sampling, one completion per prompt and the job's rewards, before the first step
    /// and every `every_steps` steps.
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

    /// Returns the dataset whose rows a verdict judges; `trained` is the training dataset.
    pub fn judged_dataset<'a>(&'a self, trained: &'a DatasetPlan) -> &'a DatasetPlan {
        match (&self.test_dataset, self.test_fraction) {
            (Some(test), _) => test,
            (None, Some(_)) => trained,
            (None, None) => &self.dataset,
        }
    }

    /// Iterates over every dataset that a verdict may read.
    pub fn datasets(&self) -> impl Iterator<Item = &DatasetPlan> {
        let of_guard = self.guard.as_ref().map(|guard| &guard.dataset);
        std::iter::once(&self.dataset).chain(&self.test_dataset).chain(of_guard)
    }

    /// Returns the number of prompts in one evaluation.
    pub fn num_prompts(&self) -> u64 {
        self.held_out_rows.unwrap_or(self.dataset.num_rows)
    }
}

/// Sampling settings of the rollouts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SamplingPlan {
    /// Maximum length of a completion, in tokens.
    pub max_completion_length: u32,
    /// Sampling temperature, greater than 0. It divides the logits when sampling and when computing log-probabilities.
    pub temperature: f64,
    /// Top-p (nucleus) sampling, greater than 0 and at most 1; 1 = off.
    pub top_p: f64,
    /// Top-k sampling: the number of most likely tokens to sample from; 0 = off.
    pub top_k: u32,
    /// Min-p sampling: minimum probability of a token, relative to the most likely one; 0 = off.
    pub min_p: f64,
    /// Repetition penalty; 1 = off.
    pub repetition_penalty: f64,
    /// Stop strings. A completion ends with the first of these strings and includes it.
    pub stop: Vec<String>,
    /// Extra variables for the chat template.
    pub chat_template_kwargs: serde_json::Map<String, serde_json::Value>,
}

/// The LoRA adapter that is trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoraPlan {
    /// Rank of the adapter.
    pub r: u32,
    /// Scaling numerator: the adapter's output is multiplied by alpha/r (alpha/√r with `use_rslora`).
    pub alpha: f64,
    /// Dropout probability on the adapter's input, from 0 to less than 1. Applied in the training forward pass only.
    pub dropout: f64,
    /// Names of the linear layers that get an adapter, in this order: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,
    /// down_proj. For a PEFT adapter that covers only some layers, full names such as `layers.3.self_attn.q_proj`.
    pub target_modules: Vec<String>,
    /// Whether to scale by alpha/√r instead of alpha/r (rank-stabilized LoRA).
    pub use_rslora: bool,
    /// Ranks that differ from `r`, by a name of `target_modules`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rank_pattern: BTreeMap<String, u32>,
    /// Alphas that differ from `alpha`, by a name of `target_modules`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub alpha_pattern: BTreeMap<String, f64>,
}

/// The weights that a run starts from, and the reference of its KL penalty.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WarmStartPlan {
    /// A checkpoint of another job, whose files are kept with this job. Mutually exclusive with `adapter`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointId>,
    /// An imported PEFT adapter, whose files are kept with this job. Mutually exclusive with `checkpoint`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterPlan>,
    /// The reference model of the KL penalty.
    pub reference: Reference,
}

/// A PEFT adapter that was not trained on this server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdapterPlan {
    /// Id of the stored adapter; null until the server has fetched it from the hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<AdapterId>,
    /// Hub repository that the adapter comes from, `org/name`; null for an uploaded adapter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hub: Option<String>,
    /// Branch, tag or commit of the hub repository; once the adapter has been fetched, the commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
}

/// The KL reference of a run that starts from a checkpoint or an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// The base model of the job.
    Base,
    /// A frozen copy of the weights that the run starts from.
    Initial,
}

/// The optimizer, by the precision of its moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum OptimizerKind {
    /// AdamW with moments in 32 bits.
    #[default]
    #[serde(rename = "adamw")]
    Adamw,
    /// AdamW with moments in 8 bits, quantized block by block (Dettmers et al. 2022).
    #[serde(rename = "adamw_8bit")]
    Adamw8bit,
}

/// Precision of the matrix products.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ComputeDtype {
    /// All computations use 32-bit floats.
    #[default]
    F32,
    /// Weights and inputs of matrix products are rounded to bfloat16; sums are in 32 bits.
    Bf16,
}

/// The 4-bit formats of bitsandbytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum QuantType {
    /// 4-bit NormalFloat, whose values suit normally distributed weights.
    #[default]
    Nf4,
    /// 4-bit float: a sign and three bits.
    Fp4,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

fn is_nf4(quant_type: &QuantType) -> bool {
    *quant_type == QuantType::Nf4
}

/// How linear layers are quantized when the model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FourBitPlan {
    /// The 4-bit format.
    pub quant_type: QuantType,
    /// Whether the scales of the blocks are quantized to 8 bits too.
    pub is_nested: bool,
}

impl TrainingPlan {
    /// Returns how linear layers are quantized when the model is loaded; None = they are used as they are stored.
    pub fn four_bit(&self) -> Option<FourBitPlan> {
        let plan = FourBitPlan { quant_type: self.bnb_4bit_quant_type, is_nested: self.use_bnb_nested_quant };
        self.load_in_4bit.then_some(plan)
    }
}

/// Learning-rate schedules over `max_steps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LrSchedulerType {
    /// The learning rate stays the same.
    Constant,
    /// The learning rate falls linearly to 0: lr·(1 − t/T).
    Linear,
    /// The learning rate follows a cosine to 0: lr·(1 + cos(πt/T))/2.
    Cosine,
}

/// Settings of AdamW and of the learning-rate schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OptimizerPlan {
    /// The optimizer: AdamW with moments in 32 or in 8 bits.
    #[serde(default)]
    pub kind: OptimizerKind,
    /// Peak learning rate, reached at the end of `warmup_steps`.
    pub learning_rate: f64,
    /// Decay rate of AdamW's first moment (β₁).
    pub adam_beta1: f64,
    /// Decay rate of AdamW's second moment (β₂).
    pub adam_beta2: f64,
    /// AdamW's ε, which is added to √v̂ for numerical stability.
    pub adam_epsilon: f64,
    /// Decoupled weight decay. As in transformers, it is not applied to norms and biases.
    pub weight_decay: f64,
    /// Maximum global gradient norm; larger gradients are scaled down. 0 = off.
    pub max_grad_norm: f64,
    /// Learning-rate schedule after `warmup_steps`.
    pub lr_scheduler_type: LrSchedulerType,
    /// Optimizer steps over which the learning rate rises linearly from 0 to its peak.
    pub warmup_steps: u64,
}

/// Batch sizes, number of steps, seed and precision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TrainingPlan {
    /// Prompts per optimizer step.
    pub prompts_per_step: u32,
    /// Number of RLOO optimizer steps. The steps of a `warm_up` section come before them and are not included.
    pub max_steps: u64,
    /// Random seed of sampling, data order and initialization.
    pub seed: u64,
    /// Whether each epoch uses a new random order; false = the dataset's order.
    pub shuffle_dataset: bool,
    /// Precision of the matrix products, in rollouts and in training.
    #[serde(default)]
    pub dtype: ComputeDtype,
    /// Whether linear layers are quantized to 4 bits when the model is loaded. Layers that are stored in 4 bits stay as they are.
    #[serde(default, skip_serializing_if = "is_false")]
    pub load_in_4bit: bool,
    /// The 4-bit format to which layers are quantized.
    #[serde(default, skip_serializing_if = "is_nf4")]
    pub bnb_4bit_quant_type: QuantType,
    /// Whether the scales of 4-bit weights are quantized to 8 bits too (double quantization).
    #[serde(default, skip_serializing_if = "is_false")]
    pub use_bnb_nested_quant: bool,
    /// Tokens (prompts and completions) per micro-batch, with at least one group each. The default depends on the available memory;
    /// the plan stores the value because a resumed run must split its batches as an uninterrupted run does.
    #[serde(default = "default_micro_batch_tokens")]
    pub micro_batch_tokens: u32,
    /// Whether to recompute each layer's activations in the backward pass instead of keeping them. It needs less memory, is slower
    /// and does not change the results.
    #[serde(default = "default_gradient_checkpointing")]
    pub gradient_checkpointing: bool,
    /// Number of failed attempts after which the job fails with the code `max_attempts`; default: no limit. An attempt fails when
    /// its worker dies, stops sending heartbeats or cannot use a file, whether or not it made progress. Pauses, SIGTERM,
    /// preemptions and server restarts do not count. Three failures in a row without progress always fail the job (`worker_lost`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 10_000)]
    pub max_attempts: Option<u32>,
}

/// Default number of tokens per micro-batch if there is enough memory.
pub const MICRO_BATCH_TOKENS: u32 = 4096;
/// Default on the CPU: small enough that the output of one operation is still in a cache when the next operation reads it.
pub const MICRO_BATCH_TOKENS_ON_CPU: u32 = 1024;

fn default_gradient_checkpointing() -> bool {
    true
}

fn default_micro_batch_tokens() -> u32 {
    MICRO_BATCH_TOKENS
}

/// How the certificates of checkpoints are made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CertificatePlan {
    /// Plain texts, to which no chat template is applied. Each certificate has the 8 of them on which base model and checkpoint
    /// differ most, with their texts: do not give texts that those who receive a checkpoint may not read. Texts with fewer than 2
    /// or more than 64 tokens are left out.
    pub prompts: Vec<String>,
}

/// When checkpoints are saved and which ones are kept.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointPlan {
    /// Optimizer steps between checkpoints. The last step is always saved, and so is a new best evaluation by `metric_for_best`
    /// (unless `keep_best` is 0).
    pub every_steps: u64,
    /// Seconds between checkpoints, in addition to `every_steps`; default: by steps only. A checkpoint is saved after a
    /// step if this many seconds have passed since the last checkpoint or since the attempt began. Checkpoints do not
    /// change the results of a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub every_seconds: Option<u64>,
    /// Number of newest checkpoints to keep.
    pub keep_last: u32,
    /// Number of best checkpoints to keep, by `metric_for_best`.
    pub keep_best: u32,
    /// Metric that decides which checkpoint is best; default: `eval_reward` with evaluation, otherwise `reward`.
    #[serde(default)]
    pub metric_for_best: Option<String>,
    /// Whether a higher value is better. Default: by the metric's name. Lower is better for losses, KL, gradient norms, standard
    /// deviations and fractions of missing, truncated or tied samples; higher is better for all others.
    #[serde(default)]
    pub greater_is_better: Option<bool>,
}

/// Early stopping: ends a run that no longer improves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EarlyStoppingPlan {
    /// Metric that is checked after each evaluation; default: `checkpoints.metric_for_best`.
    pub metric: String,
    /// Whether a higher value is better; default: by the metric's name, as for checkpoints.
    pub greater_is_better: bool,
    /// Number of evaluations in a row without a new best value after which the run ends.
    pub patience: u32,
    /// Minimum improvement that counts as a new best value.
    pub min_delta: f64,
}

/// Which alert rules are on, and what happens on an alert.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DoctorPlan {
    /// Effect of an alert. `note`: the alert is recorded and the run continues. `pause`: the job pauses. `stop`: the job ends, and
    /// its last good checkpoint is its result.
    pub on_alert: OnAlert,
    /// Rules with settings of their own, by rule name.
    #[serde(default)]
    pub rules: BTreeMap<Rule, RulePlan>,
}

/// Settings of one alert rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RulePlan {
    /// Whether the alert rule is on.
    pub enabled: bool,
    /// Effect of an alert of this rule; null = as `doctor.on_alert` says.
    #[serde(default)]
    pub on_alert: Option<OnAlert>,
}

/// Amounts that follow from a job's settings, such as steps and completions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Totals {
    /// Number of RLOO optimizer steps (`max_steps`).
    pub optimizer_steps: u64,
    /// Completions per optimizer step.
    pub completions_per_step: u64,
    /// Unique prompts per generation block: prompts_per_step · steps_per_generation.
    pub prompts_per_block: u64,
    /// Number of generation blocks.
    pub generation_blocks: u64,
    /// Completions that are sampled for training.
    pub completions: u64,
    /// Additional greedy completions, one per prompt (estimator `remax`).
    #[serde(default)]
    pub greedy_completions: u64,
    /// Maximum number of completions that refills of tied groups can add (`min_informative_groups`).
    #[serde(default)]
    pub max_refill_completions: u64,
    /// Passes over the dataset, possibly fractional. Refills use up the dataset faster.
    pub epochs: f64,
    /// Rows left out of each epoch because the last block would be incomplete.
    pub dropped_rows_per_epoch: u64,
    /// Maximum number of completion tokens that can be sampled, including greedy completions and refills.
    pub max_completion_tokens: u64,
}
