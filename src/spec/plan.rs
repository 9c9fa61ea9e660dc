//! The resolved plan: every default applied, every value checked. Serialised into the job's row and sent to the worker.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::doctor::{OnAlert, Rule};
use crate::id::{CheckpointId, DatasetId};

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
    /// The algorithm.
    pub rloo: RlooPlan,
    /// Rollouts.
    pub sampling: SamplingPlan,
    /// The adapter; null = full fine-tuning: every weight is trained.
    pub lora: Option<LoraPlan>,
    /// A checkpoint whose weights the run begins with, instead of a fresh adapter or the base model's weights.
    #[serde(default)]
    pub warm_start: Option<WarmStartPlan>,
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
}

/// Evaluation on prompts of its own, or on rows held out of the training dataset.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EvalPlan {
    /// The evaluation prompts; with `fraction` the training dataset.
    pub dataset: DatasetPlan,
    /// The share of the training dataset that is held out; null with a dataset of its own.
    #[serde(default)]
    pub fraction: Option<f64>,
    /// With `fraction`: rows that are evaluated and never trained.
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
        }
    }

    /// Prompts of one evaluation.
    pub fn num_prompts(&self) -> u64 {
        self.held_out_rows.unwrap_or(self.dataset.num_rows)
    }
}

/// Under which name the secrets of an evaluation's own reward are kept, beside those of the job's rewards.
pub fn eval_secret_name(reward: &str) -> String {
    format!("eval:{reward}")
}

/// One reward: what to call and how it weighs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RewardPlan {
    /// Unique in the job; metrics are `rewards/{name}/…`.
    pub name: String,
    /// 0 = metric only.
    pub weight: f64,
    /// A missing value makes the sample unscorable (`true`), or counts as not applicable. Never true at weight 0.
    pub required: bool,
    /// What it is.
    #[serde(flatten)]
    pub kind: RewardKind,
}

/// The rewards there are. Secrets and header values travel apart ([`RewardSecrets`]).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RewardKind {
    /// Contract v1 over HTTP.
    Webhook(WebhookPlan),
    /// The seeds' word band and sentence end.
    Length(LengthPlan),
    /// 1 if the trimmed completion equals the trimmed column, else 0.
    ExactMatch(MatchPlan),
    /// 1 if the completion contains the column's (or the given) text, else 0.
    Contains(ContainsPlan),
    /// 1 if the last number of the completion equals the column's, else 0.
    NumberMatch(NumberMatchPlan),
    /// 1 if the pattern is found in the completion, else 0.
    Regex(RegexPlan),
}

/// A reward service that speaks contract v1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WebhookPlan {
    /// http or https.
    pub url: String,
    /// Given to the service as it is.
    #[serde(default)]
    pub params: serde_json::Map<String, serde_json::Value>,
    /// Requests in flight at once.
    pub max_concurrency: u32,
    /// Samples in one request; a larger group is split.
    pub max_batch_samples: u32,
    /// Bytes of one request's body.
    pub max_batch_bytes: u64,
    /// Of one try, ms.
    pub timeout_ms: u64,
    /// Of one request with all its tries, ms; sent in the body.
    pub deadline_ms: u64,
    /// Tries in a row for transport errors, 408, 425, 429 and 5xx.
    pub max_tries: u32,
    /// Tries for answers that are not valid.
    pub max_invalid_tries: u32,
    /// What an invalid answer means for its samples.
    pub on_invalid: OnInvalid,
    /// How long a service may be down before the job pauses, s.
    pub max_outage_s: u64,
}

/// What becomes of samples whose answer is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnInvalid {
    /// Missing.
    Mask,
    /// 0, by the client's explicit choice.
    Zero,
    /// The job fails.
    Fail,
}

/// Band of lengths, after the seeds: 1 inside, −0.5 below, 0 above; +0.5 for a sentence's end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LengthPlan {
    /// Words (whitespace-separated), inclusive.
    pub min_words: u32,
    /// Words, inclusive.
    pub max_words: u32,
    /// Added when the completion ends with `.`, `!` or `?`.
    pub sentence_bonus: f64,
}

/// Compare with a column.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MatchPlan {
    /// The dataset column that holds the reference.
    pub column: String,
    /// Compare without regard to case.
    pub ignore_case: bool,
}

/// Search for text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ContainsPlan {
    /// The dataset column that holds the text; exclusive with `text`.
    pub column: Option<String>,
    /// The text itself.
    pub text: Option<String>,
    /// Compare without regard to case.
    pub ignore_case: bool,
}

/// Compare the last number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NumberMatchPlan {
    /// The dataset column that holds the reference.
    pub column: String,
    /// Largest absolute difference that still counts.
    pub tolerance: f64,
}

/// Search for a pattern (Rust's regex syntax: linear time).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RegexPlan {
    /// The pattern.
    pub pattern: String,
}

/// What must not be shown: kept apart from the plan, sent only to the worker that holds the claim.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RewardSecrets {
    /// `whsec_…`; absent = unsigned.
    pub secret: Option<String>,
    /// Sent with every request.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

impl std::fmt::Debug for RewardSecrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RewardSecrets(redacted)")
    }
}

/// How missing and inapplicable rewards combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Combine {
    /// Weights of applicable rewards are scaled up; a missing required reward makes the sample unscorable.
    Renormalize,
    /// As TRL: missing contributes 0, nothing is scaled, unscorable only when all are missing.
    Nansum,
}

/// The algorithm (`rloo.md`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RlooPlan {
    /// Completions a prompt, ≥ 2; the estimators reinforce and remax allow 1.
    pub num_generations: u32,
    /// KL coefficient; 0 = no reference pass.
    pub beta: f64,
    /// Lower clip: ratio ≥ 1 − epsilon.
    pub epsilon: f64,
    /// Upper clip: ratio ≤ 1 + epsilon_high.
    pub epsilon_high: f64,
    /// Passes over a block (μ).
    pub num_iterations: u32,
    /// Optimizer steps a block (S).
    pub steps_per_generation: u32,
    /// (A − mean)/(std + 1e-4) over the block.
    pub normalize_advantages: bool,
    /// On the weighted reward, before KL.
    pub reward_clip_range: Option<(f64, f64)>,
    /// Truncated completions get mask 0.
    pub mask_truncated_completions: bool,
    /// How several rewards become one.
    pub combine: Combine,
    /// From rewards to advantages.
    #[serde(default)]
    pub estimator: Estimator,
    /// From ratios and advantages to a number.
    #[serde(default)]
    pub loss: Loss,
    /// Where the KL penalty is: subtracted from the reward, or a term of the loss.
    #[serde(default)]
    pub kl_in: KlIn,
    /// k1 in the reward; k3 or k2 in the loss.
    #[serde(default)]
    pub kl_estimator: KlEstimator,
    /// Leave out groups of equal rewards (before length terms and KL); they would train on KL alone.
    #[serde(default)]
    pub drop_tied_groups: bool,
    /// Tokens before max_completion_length over which a penalty grows from 0 to 1 (DAPO); null = off.
    #[serde(default)]
    pub soft_overlong: Option<u32>,
    /// λ of the length penalty λ·num_tokens/max_completion_length, subtracted after the clip.
    #[serde(default)]
    pub length_penalty: f64,
    /// Groups of a block whose rewards must not be tied: tied ones are replaced by new prompts until then; 0 = off.
    #[serde(default)]
    pub min_informative_groups: u32,
    /// The most rounds of such replacements a block.
    #[serde(default = "default_max_refills")]
    pub max_refills: u32,
    /// (r − mean)/(std + 1e-4) of the weighted reward, before the clip.
    #[serde(default)]
    pub reward_normalization: RewardNormalization,
}

/// Rounds of refills unless told otherwise.
pub const MAX_REFILLS: u32 = 4;

fn default_max_refills() -> u32 {
    MAX_REFILLS
}

impl RlooPlan {
    /// Whether the KL penalty is part of the reward; with beta = 0 there is none.
    pub fn penalizes_reward(&self) -> bool {
        self.beta != 0.0 && self.kl_in == KlIn::Reward
    }

    /// Whether advantages depend on the whole block, and not on their group alone.
    pub fn whitens_advantages(&self) -> bool {
        self.normalize_advantages || self.estimator.has_token_advantages()
    }
}

/// How a reward becomes an advantage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Estimator {
    /// Minus the mean of the other completions of the prompt.
    #[default]
    Rloo,
    /// Minus the mean of the group, over its std.
    Grpo,
    /// Minus the mean of the group.
    DrGrpo,
    /// Return of each token with its KL, whitened over the block.
    ReinforcePp,
    /// The same, minus the mean of the group first.
    ReinforcePpBaseline,
    /// Minus the reward of the prompt's greedy completion.
    Remax,
    /// The reward itself.
    Reinforce,
}

impl Estimator {
    /// Whether every token has an advantage of its own.
    pub fn has_token_advantages(self) -> bool {
        matches!(self, Estimator::ReinforcePp | Estimator::ReinforcePpBaseline)
    }

    /// Whether one completion a prompt is enough.
    pub fn allows_one_generation(self) -> bool {
        matches!(self, Estimator::Reinforce | Estimator::Remax)
    }
}

/// What is clipped, and what its sum is divided by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Ratio of the whole completion, mean over completions.
    #[default]
    Sequence,
    /// Ratio of each token, mean over the tokens of the step (PPO, DAPO).
    TokenMean,
    /// Ratio of each token, mean over a completion's tokens, then over completions (GRPO).
    SeqMeanTokenMean,
    /// Ratio of each token, sum over completions · max_completion_length (Dr. GRPO).
    DrGrpo,
    /// Ratio of the completion to the power of 1/length, mean over completions.
    Gspo,
}

impl Loss {
    /// Whether a completion has one ratio.
    pub fn has_sequence_ratio(self) -> bool {
        matches!(self, Loss::Sequence | Loss::Gspo)
    }
}

/// Where the KL penalty is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlIn {
    /// Subtracted from the reward: of the sequence, or of each token where the estimator has token advantages.
    #[default]
    Reward,
    /// A term of the loss, of each token (GRPO).
    Loss,
}

/// How KL is estimated from sampled tokens (Schulman).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// log π − log π_ref.
    #[default]
    K1,
    /// Half its square.
    K2,
    /// π_ref/π − 1 − log(π_ref/π).
    K3,
}

/// By what rewards are normalised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewardNormalization {
    /// Nothing.
    #[default]
    None,
    /// Mean and std of the block.
    Batch,
    /// Mean and std of all rewards so far; they are part of the checkpoint.
    Running,
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
    /// Of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; in this order.
    pub target_modules: Vec<String>,
    /// alpha/√r.
    pub use_rslora: bool,
}

/// Where a run's weights come from, and what its KL penalty holds on to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WarmStartPlan {
    /// A checkpoint of another job; its files are kept with this job.
    pub checkpoint: CheckpointId,
    /// What the KL penalty is measured against.
    pub reference: Reference,
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
    /// Decoupled.
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
    /// Optimizer steps in all.
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
}

/// Tokens of a micro-batch where memory does not ask for fewer.
pub const MICRO_BATCH_TOKENS: u32 = 4096;

fn default_micro_batch_tokens() -> u32 {
    MICRO_BATCH_TOKENS
}

/// When to save and what to keep.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointPlan {
    /// Optimizer steps between checkpoints; the last step is always saved, and so is an evaluation that is the best so far
    /// by `metric_for_best` (unless `keep_best` is 0).
    pub every_steps: u64,
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
