//! A generation block: the completions of U prompts, with all values that stay constant while the block is trained.

use std::borrow::Cow;
use std::ops::Range;

use rlood_types::rollout::Score;

use super::advantage::estimator::Turn;
use super::advantage::shape::{RewardShape, RewardStats, ShapedRewards};
use super::advantage::{
    AdvantageConfig, AdvantageRows, Advantages, RewardWeight, advantages, combine_rewards, is_tied, reward_factor,
    sequence_kl, token_kl,
};
use super::error::{EngineError, Result};
use super::host::{Rollout, RolloutCompletion, RolloutGroup};
use super::loss::{Denominators, LossConfig, RowAdvantage};
use super::rollout::{is_included, num_generations};
use crate::environment::EpisodeTurn;
use crate::event::FinishReason;
use crate::spec::{Estimator, Plan, RewardKind};
use crate::trajectory::Trajectory;

/// Log-probs of model tokens, one entry per completion, in block order.
pub type Logps = Vec<Vec<f32>>;

/// A scored rollout and the values computed from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    /// Index of the block, from 0, over all epochs.
    pub index: u64,
    /// Prompts, completions and scores.
    pub rollout: Rollout,
    /// The computed values, one entry per completion.
    pub values: BlockValues,
}

/// Values of a block, one entry per completion, in block order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BlockValues {
    /// The weighted reward of each completion; `None` = unscorable.
    pub weighted: Vec<Option<f64>>,
    /// Each completion's reward after normalization and clip, and the same with its length terms.
    pub rewards: ShapedRewards,
    /// The statistics that normalized the rewards.
    pub reward_stats: RewardStats,
    /// Shaped rewards of the greedy completions, one per group; empty unless the estimator is remax.
    pub greedy: Vec<Option<f64>>,
    /// The turns of each episode, with their parts of the reward; empty unless the estimator is rloo_turns.
    pub turns: Vec<Vec<Turn>>,
    /// Completion lengths in model tokens.
    pub lengths: Vec<usize>,
    /// False for truncated completions that are masked.
    pub included: Vec<bool>,
    /// True for the completions of tied groups that are dropped.
    pub dropped: Vec<bool>,
    /// Per-token log-probs of the policy that sampled, for the completions computed so far.
    pub old_logps: Vec<Vec<f32>>,
    /// Per-token log-probs of the reference; empty when beta = 0.
    pub ref_logps: Vec<Vec<f32>>,
    /// The advantages of the groups computed so far.
    pub results: Advantages,
}

impl Block {
    /// Creates a block of a rollout, without log-probs, shaped rewards and advantages. The rollout
    /// must hold whole groups.
    pub fn new(index: u64, rollout: Rollout, plan: &Plan) -> Result<Self> {
        let num_generations = num_generations(plan).get();
        let prompts = plan.training.prompts_per_step as usize * plan.rloo.steps_per_generation as usize;
        let whole = |group: &RolloutGroup| group.completions.len() == num_generations && !group.prompt_ids.is_empty();
        if rollout.groups.len() != prompts || !rollout.groups.iter().all(whole) {
            return Err(EngineError::Input(format!(
                "a rollout must hold {prompts} prompts of at least one token with {num_generations} completions each; block {index} has {} prompts",
                rollout.groups.len()
            )));
        }
        let completions = || rollout.groups.iter().flat_map(|group| &group.completions);
        for completion in completions() {
            // Fails here, not when samples are reported, for a completion that has other segments than
            // one of the model. Only episodes have others.
            if completion.episode.is_none() {
                completion.segments.completion()?;
            }
        }
        if completions().any(|completion| completion.score.values.len() != plan.rewards.len()) {
            return Err(EngineError::Input(format!(
                "each completion must have {} scores, one for every reward",
                plan.rewards.len()
            )));
        }
        let weights = RewardWeight::of_plan(&plan.rewards);
        let values = BlockValues {
            weighted: completions()
                .map(|completion| combine_rewards(&completion.score.values, &weights, plan.rloo.combine))
                .collect(),
            turns: turns(&rollout, plan, &weights),
            lengths: rollout.lengths(),
            included: completions()
                .map(|completion| is_included(completion.finish_reason, plan.rloo.mask_truncated_completions))
                .collect(),
            ..BlockValues::default()
        };
        Ok(Self { index, rollout, values })
    }

    /// Shapes the rewards of a new block. `before` counts the rewards of all earlier blocks. Plans from before the
    /// limit `max_abs_reward` existed may have rewards whose sums or squares overflow: this is an error here, before
    /// such rewards are trained on.
    pub fn shape_rewards(&mut self, before: RewardStats, plan: &Plan) -> Result<()> {
        let stats = RewardShape::of_plan(plan).stats(before, &self.values.weighted);
        let not_finite = |what: String| Err(EngineError::StateNotFinite { what });
        if !stats.is_finite() {
            return not_finite(format!(
                "the {} that rloo.reward_normalization computes of the rewards",
                if stats.mean.is_finite() { "variance" } else { "mean" }
            ));
        }
        self.shape_rewards_by(stats, plan);
        let BlockValues { weighted, rewards, greedy, .. } = &self.values;
        let sums = weighted.iter().zip(&rewards.shaped);
        // A clip can hide an infinite sum, but NaN is always an error.
        let is_wrong = |(weighted, shaped): (&Option<f64>, &Option<f64>)| {
            weighted.is_some_and(f64::is_nan) || shaped.is_some_and(|shaped| !shaped.is_finite())
        };
        match (sums.map(is_wrong).position(|wrong| wrong), greedy.iter().flatten().all(|greedy| greedy.is_finite())) {
            (None, true) => Ok(()),
            (Some(row), _) => {
                let group = row / num_generations(plan);
                let prompt = self.rollout.groups.get(group).map_or(0, |group| group.row);
                not_finite(format!("the weighted sum of the rewards of a completion of row {prompt}"))
            }
            (None, false) => not_finite("the weighted sum of the rewards of a greedy completion".to_owned()),
        }
    }

    /// Shapes the rewards of a block with reward statistics that already include them.
    pub fn shape_rewards_by(&mut self, stats: RewardStats, plan: &Plan) {
        let shape = RewardShape::of_plan(plan);
        let (values, num_generations) = (&mut self.values, num_generations(plan).get());
        let ties = plan.arithmetic.ties;
        values.reward_stats = stats;
        values.rewards = shape.shape(&values.weighted, &values.lengths, &stats);
        let groups = values.rewards.task.chunks(num_generations);
        let dropped =
            |task: &[Option<f64>]| vec![plan.rloo.drop_tied_groups && is_tied(task, num_generations, ties); task.len()];
        values.dropped = groups.flat_map(dropped).collect();
        let weights = RewardWeight::of_plan(&plan.rewards);
        let greedy = |completion: &RolloutCompletion| {
            let weighted = combine_rewards(&completion.score.values, &weights, plan.rloo.combine)?;
            Some(shape.task_reward(weighted, &stats) + shape.length_term(completion.segments.num_model_tokens()))
        };
        let greedy = self.rollout.groups.iter().map(|group| group.greedy.as_ref().and_then(greedy));
        values.greedy = if plan.rloo.estimator == Estimator::Remax { greedy.collect() } else { Vec::new() };
    }

    /// Number of completions in the block.
    pub fn len(&self) -> usize {
        self.values.weighted.len()
    }

    /// Whether the block has no completions.
    pub fn is_empty(&self) -> bool {
        self.values.weighted.is_empty()
    }

    /// Number of prompt and completion tokens. A prompt counts once per completion, as in TRL; tokens sampled outside
    /// of the block are included.
    pub fn num_tokens(&self) -> u64 {
        let own: u64 = self.rollout.trajectories().map(|trajectory| trajectory.num_tokens() as u64).sum();
        own + self.rollout.drawn.extra_tokens
    }

    /// Number of completion tokens, including those sampled outside of the block.
    pub fn num_completion_tokens(&self) -> u64 {
        let own: u64 = self.rollout.lengths().into_iter().map(|length| length as u64).sum();
        own + self.rollout.drawn.extra_completion_tokens
    }
}

/// Returns the turns of all episodes, if the estimator needs them.
fn turns(rollout: &Rollout, plan: &Plan, weights: &[RewardWeight]) -> Vec<Vec<Turn>> {
    if plan.rloo.estimator != Estimator::RlooTurns {
        return Vec::new();
    }
    let paid = plan.rewards.iter().position(|reward| matches!(reward.kind, RewardKind::Environment));
    let of_episode = |completion: &RolloutCompletion| -> Vec<Turn> {
        let values = &completion.score.values;
        let pays = |at: &usize| values.get(*at).is_some_and(|value| value.number().is_some());
        let factor = paid.filter(pays).map_or(0.0, |at| reward_factor(values, weights, plan.rloo.combine, at));
        let turns = completion.episode.iter().flat_map(|episode| &episode.turns);
        let turn = |turn: &EpisodeTurn| Turn {
            num_tokens: turn.num_tokens as usize,
            reward: turn.reward.map_or(0.0, |reward| factor * reward),
        };
        turns.map(turn).collect()
    };
    rollout.groups.iter().flat_map(|group| &group.completions).map(of_episode).collect()
}

impl BlockValues {
    /// Computes the advantages of the groups in `rows`, in order. Their log-probs must be known if
    /// the reward includes KL.
    pub fn fill_advantages(&mut self, rows: Range<usize>, plan: &Plan) {
        let config = AdvantageConfig::of_plan(plan);
        let token_kl: Vec<Vec<f64>> = rows.clone().map(|row| self.token_kl(row)).collect();
        let num_generations = config.num_generations.get();
        let groups = rows.start / num_generations..rows.end.div_ceil(num_generations);
        let advantages = advantages(
            &AdvantageRows {
                rewards: &self.rewards.shaped[rows.clone()],
                task_rewards: &self.rewards.task[rows.clone()],
                token_kl: &token_kl,
                dropped: &self.dropped[rows.clone()],
                greedy: self.greedy.get(groups).unwrap_or_default(),
                turns: self.turns.get(rows.clone()).unwrap_or_default(),
            },
            &config,
        );
        self.results.append(advantages);
    }

    /// Computes old − reference log-prob of each trained token of a completion; zeros while one of the two is unknown.
    fn token_kl(&self, row: usize) -> Vec<f64> {
        match (self.old_logps.get(row), self.ref_logps.get(row)) {
            (Some(old), Some(reference)) => token_kl(old, reference, self.included[row]),
            (_, None) | (None, _) if self.included[row] => vec![0.0; self.lengths[row]],
            (_, None) | (None, _) => Vec::new(),
        }
    }

    /// The denominators of an optimizer step's losses, known before its micro-batches run.
    pub fn denominators(&self, rows: Range<usize>, plan: &Plan) -> Denominators {
        let kept = || rows.clone().filter(|&row| !self.dropped[row]);
        Denominators {
            completions: kept().count(),
            tokens: kept().filter(|&row| self.included[row]).map(|row| self.lengths[row]).sum(),
            max_completion_length: plan.max_tokens_after_prompt() as usize,
        }
    }

    /// The advantage that a completion trains with.
    pub fn advantage(&self, row: usize) -> RowAdvantage<'_> {
        match self.results.token_advantages.get(row) {
            Some(tokens) => RowAdvantage::Tokens(tokens),
            None => RowAdvantage::Sequence(self.results.advantages[row]),
        }
    }

    /// Whether a completion has no gradient whatever its new log-probs are. False while its advantage is unknown.
    pub fn is_idle(&self, row: usize, loss: &LossConfig) -> bool {
        let advantage = (row < self.results.advantages.len()).then(|| self.advantage(row));
        loss.is_idle(self.included[row] && !self.dropped[row], advantage)
    }

    /// The KL estimate Σ (old − reference log-prob) of a completion; `None` without a reference or before
    /// the log-probs are known.
    pub fn sequence_kl(&self, row: usize) -> Option<f64> {
        let (old, reference) = (self.old_logps.get(row)?, self.ref_logps.get(row)?);
        Some(sequence_kl(old, reference, self.included[row]))
    }
}

impl Rollout {
    /// The token sequence (prompt and completion) of every completion, in block order.
    pub fn trajectories(&self) -> impl Iterator<Item = Trajectory<'_>> {
        self.completions().map(|(group, completion)| Trajectory::new(&group.prompt_ids, &completion.segments))
    }

    /// Every completion with its group, in block order.
    pub fn completions(&self) -> impl Iterator<Item = (&RolloutGroup, &RolloutCompletion)> {
        self.groups.iter().flat_map(|group| group.completions.iter().map(move |completion| (group, completion)))
    }

    /// Log-probs of the model tokens that the sampler recorded, in block order; `None` unless
    /// every completion has them.
    pub fn recorded_logps(&self) -> Option<Logps> {
        self.completions().map(|(_, completion)| completion.segments.logps().map(Cow::into_owned)).collect()
    }

    /// The scores that the rewards gave each completion, in block order.
    pub fn scores(&self) -> Vec<Score> {
        self.completions().map(|(_, completion)| completion.score.clone()).collect()
    }

    /// Completion lengths in model tokens, in block order.
    pub fn lengths(&self) -> Vec<usize> {
        self.completions().map(|(_, completion)| completion.segments.num_model_tokens()).collect()
    }

    /// The reason why each completion ended, in block order.
    pub fn finish_reasons(&self) -> Vec<FinishReason> {
        self.completions().map(|(_, completion)| completion.finish_reason).collect()
    }
}
