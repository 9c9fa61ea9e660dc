//! The RLOO loop: [`train`], top to bottom.
//!
//! Synchronous; knows token ids, not jobs or HTTP. Whoever runs it implements [`host::Host`]. The loop is here; what has a
//! name of its own lies in the modules below. Long because of the table. What computes is a [`backend`]: `cpu` with its own
//! [`kernels`], or `reference`, the oracle; `model` is the decoder over either.
//!
//! # The implementation details, and where they stand
//!
//! "vectors" and "golden" are `tests/it/{vectors,golden}.rs`: numbers of TRL 1.16's RLOOTrainer.
//!
//! | # | detail | where | test | source |
//! |---|---|---|---|---|
//! | 1 | the baseline is the mean of the *other scorable* completions of the same prompt | [`advantage::estimator::rloo`] | vectors 02, 06; `a_missing_reward_leaves_the_baseline_and_is_masked` | Ahmadian et al. 2024 (arXiv 2402.14740); TRL |
//! | 2 | a missing reward is never 0: its row leaves the baseline and has advantage 0, but counts in 1/B | [`advantage::combine_rewards`] | vectors 05, 06; `a_missing_reward_masks_only_itself` | TRL #5902 |
//! | 3 | one scorable row in a group: advantage 0 | [`advantage::estimator::rloo`] | vectors 06, 18 | TRL |
//! | 4 | KL is k1, summed over the sequence, from the sampling policy, inside the reward, after the clip | [`advantage::sequence_kl`], `penalize` | vectors 03, 14, 19; golden | Ahmadian et al. 2024; TRL |
//! | 5 | normalisation over the whole block, sample std + 1e-4, without unscorable rows | `advantage::normalize` | vectors 08, 11 | TRL |
//! | 6 | the ratio is of whole sequences, not divided by length; clipped asymmetrically if asked | [`loss::surrogate::sequence`] | vectors 12, 14; `the_gradient_is_the_slope_of_the_loss_on_every_branch` | TRL; DAPO (arXiv 2503.14476) |
//! | 7 | one denominator per optimizer step, whatever the micro-batches | [`loss::Denominators`], [`update::step_gradient`] | `no_micro_batch_split_changes_the_gradient_of_any_loss` | rloo.md |
//! | 8 | truncated and masked: KL 0, ratio 1, no gradient; still in siblings' baseline and in 1/B | [`rollout::is_included`], [`loss::row_loss`] | vectors 16; `all_truncated_and_masked_changes_no_weight` | TRL |
//! | 9 | per epoch one permutation, blocks of U prompts, the incomplete last one dropped, each block used μ·S times | [`rollout::Batching`] | vectors `sampler`; `all_slices_are_trained_once_and_then_again` | TRL's RepeatSampler |
//! | 10 | a completion ends with its first EOS, which it keeps; masks come from lengths, never from token values | [`rollout::cut_completion`], [`generate`] | vectors `eos_handling` | TRL #7039 |
//! | 11 | log-probs of logits / temperature over the full vocabulary in f32; no top-p, top-k, penalty | [`backend::Backend::score`], by [`kernels::head::score`] or [`ops::token_scores`] | vectors `logprob_from_logits`; golden (temperature 0.7) | TRL |
//! | 12 | old log-probs are those recorded at sampling where sampler and training agree bit for bit (`cpu`), else the training forward's, cut alike (`reference`): the first ratio is exactly 1 | `Run::score_block`, [`backend::Backend::samples_exactly`] | `the_first_ratio_of_a_block_is_exactly_one`; `recorded_log_probs_are_the_old_ones_where_the_sampler_is_exact`; `tests/it/bits.rs` | rloo.md |
//! | 13 | no separate pass for old log-probs where they were recorded, or the block is used once and no advantage needs the whole block first | `Run::needs_old_pass` | golden; `skipping_the_old_pass_changes_nothing` | – |
//! | 14 | the reference is the same weights with the adapter off: KL exactly 0 at step 1, on both backends; no pass at all when beta = 0 | `Run::score_block` | `the_reference_kl_is_exactly_zero_at_the_first_step` | TRL |
//! | 15 | AdamW as torch's: decoupled decay, bias correction, epsilon outside the root | [`optim::AdamW::update`] | golden; parity `adamw` | Loshchilov & Hutter 2019 |
//! | 16 | global-norm clip with max_norm/(norm + 1e-6), grad_norm reported before it | [`optim::clip_gradient_norm`] | golden | torch |
//! | 17 | schedules as transformers'; `learning_rate` is the one used in the step | [`optim::learning_rate`] | golden; `schedules_warm_up_and_decay_as_in_transformers` | transformers |
//! | 18 | a loss or gradient that is not finite skips the update; three in a row end the run | `Run::update` | `updates_that_are_not_finite_are_skipped_and_three_end_the_run` | rloo.md |
//! | 19 | reward, KL and completions metrics only on the step that first uses a block | `Run::step_metrics` | golden; `a_reused_rollout_reports_no_reward` | TRL |
//! | 20 | randomness is counted, not drawn in sequence, and a checkpoint inside a block holds its rollout, and the host's journal what was sampled since: a resumed run is the same run | [`random`], [`checkpoint`], [`host::Host::recorded`] | `tests/it/{resume,interrupt,exact}.rs` | – |
//! | 21 | prompts are templated and tokenised once; completions are never re-tokenised | [`prompts`] | golden | TRL #5224 |
//! | 22 | `grpo`: over the group's std + 1e-4 | [`advantage::estimator::grpo`] | vectors `estimators` | Shao et al. 2024 (arXiv 2402.03300); TRL |
//! | 23 | `dr_grpo`: minus the group's mean, no std | [`advantage::estimator::dr_grpo`] | vectors `estimators` | Liu et al. 2025 (arXiv 2503.20783) |
//! | 24 | `reinforce_pp`: returns of tokens, KL token by token, whitened over the block's valid tokens | [`advantage::estimator::reinforce_pp`] | vectors `estimators`; `the_kl_of_a_token_burdens_it_and_those_before_it` | Hu 2025 (arXiv 2501.03262) |
//! | 25 | `reinforce_pp_baseline`: the group's mean first | [`advantage::estimator::reinforce_pp_baseline`] | vectors `estimators` | Hu 2025 |
//! | 26 | `remax`: minus the reward of a greedy completion, an extra request a prompt | [`advantage::estimator::remax`], `Run::sample_groups` | vectors `estimators`; `remax_scores_one_greedy_completion_a_prompt_beside_the_block` | Li et al. 2023 (arXiv 2310.10505) |
//! | 27 | `reinforce`: the reward itself | [`advantage::estimator::reinforce`] | `an_unscorable_row_has_no_advantage_and_no_part_in_the_baseline_of_any_estimator` | Williams 1992 |
//! | 28 | `token_mean`: the tokens of the step are the denominator | [`loss::Denominators::of_row`] | vectors `loss_aggregation`; `no_micro_batch_split_changes_the_gradient_of_any_loss` | Yu et al. 2025, DAPO (arXiv 2503.14476) |
//! | 29 | `seq_mean_token_mean`: a completion's own tokens, then completions | [`loss::Denominators::of_row`] | the same | Shao et al. 2024 |
//! | 30 | `dr_grpo`: completions · max_completion_length, a constant | [`loss::Denominators::of_row`] | the same | Liu et al. 2025; TRL |
//! | 31 | `gspo`: the ratio to the power of 1/length | [`loss::surrogate::gspo`] | `the_gradient_of_every_loss_and_kl_estimator_is_that_of_finite_differences` | Zheng et al. 2025 (arXiv 2507.18071) |
//! | 32 | losses over tokens clip each token's ratio, and clip ratios count tokens | [`loss::surrogate::tokens`] | `clipped_ratios_are_counted_by_token_or_by_sequence` | Schulman et al. 2017 (arXiv 1707.06347) |
//! | 33 | KL in the loss: k3 or k2 of each token, divided as the loss is; then none in the reward | [`loss::kl`] | `the_gradient_of_every_loss_and_kl_estimator_is_that_of_finite_differences` | Schulman; GRPO |
//! | 34 | rewards are normalised before the clip; running mean and std are part of the checkpoint | [`advantage::shape::RewardStats`] | `running_statistics_are_those_of_all_rewards_at_once`; `every_variant_resumes_from_every_step` | – |
//! | 35 | soft overlong punishment and linear length penalty come after the clip | [`advantage::shape`] | vectors `soft_overlong`; `the_clip_comes_after_the_normalisation_and_the_length_terms_after_the_clip` | DAPO; TRL |
//! | 36 | tied = all scorable rewards of the group exactly equal, before length terms and KL (a std ≤ 1e-8 in jobs of rlood 0.1): advantages exactly 0; dropped groups leave 1/B and every normalisation | [`advantage::is_tied`], [`block::Block::shape_rewards`] | `ties_are_decided_on_whole_groups_and_never_by_what_is_left_when_one_row_is_taken_out`; `dropped_groups_leave_the_denominator` | TRL #5588 |
//! | 37 | tied groups are refilled from the cursor, which moves on; its position is part of the checkpoint | `Run::refill` | `tied_groups_are_replaced_by_the_prompts_that_come_next` | DAPO |
//! | 38 | LoRA dropout is drawn per step, token, layer and module, whatever the micro-batches, and only in the training forward | [`model::pass`] | `dropout_does_not_depend_on_the_micro_batches` | PEFT; rloo.md |
//! | 39 | 8-bit moments: block-wise dynamic quantisation, 256 values a block | [`optim::blockwise`] | `moments_in_8_bits_take_a_quarter_and_follow_those_in_32` | Dettmers et al. 2022 (arXiv 2110.02861) |
//! | 40 | full fine-tuning: the reference is a frozen copy of the first weights, none when beta = 0 | `start::begin` | `tests/it/params.rs` | rloo.md |
//! | 41 | overlap: the next block is sampled by the policy before this one is trained, its old log-probs are that policy's | [`ahead`] | `an_overlapped_block_is_sampled_by_the_policy_before_the_last_block`; `tests/it/{resume,interrupt}.rs` | Noukhovitch et al. 2024 (arXiv 2410.18252) |

pub mod advantage;
pub mod ahead;
pub mod backend;
pub mod block;
pub mod checkpoint;
mod completions;
pub mod delta;
pub mod error;
pub mod generate;
pub mod gpu;
pub mod host;
#[expect(unsafe_code, reason = "vector instructions and threads that share buffers")]
pub mod kernels;
pub mod load;
pub mod lora;
pub mod loss;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod ops;
pub mod optim;
pub mod prompts;
pub mod random;
mod refill;
mod relief;
mod report;
pub mod reward_model;
pub mod rollout;
pub mod sampling;
mod start;
mod step;
pub mod tensors;
pub mod text;
pub mod update;
pub mod watch;

use std::collections::VecDeque;
use std::time::Instant;

use self::ahead::Ahead;
use self::backend::{BackendKind, Optimizer};
use self::block::Block;
use self::checkpoint::{Snapshot, TrainerState};
use self::delta::DeltaNorm;
use self::error::{EngineError, Result};
use self::host::{Host, HostError, PromptRow, SavedCheckpoint, StepTrace, Stop, TrainInput, TrainOutcome};
use self::lora::ParameterInfo;
use self::model::Policy;
use self::optim::AdamW;
use self::prompts::TokenizedPrompt;
use self::report::StepSeconds;
use self::rollout::{Batching, Cursor};
use self::start::ReferenceModel;
use self::step::Update;
use self::text::Text;
use self::update::MicroBatching;
use crate::doctor;
use crate::event::{Event, Metrics, Phase, SamplePhase};
use crate::spec::{Plan, PromptKey, held_out_rows, prompt_key, shared_prompts};

/// Updates skipped in a row before the run is given up.
const MAX_SKIPPED_IN_A_ROW: u32 = 3;

/// Why the loop leaves before its end.
#[derive(Debug)]
enum Halt {
    Stop(Stop),
    Error(EngineError),
}

impl From<EngineError> for Halt {
    fn from(error: EngineError) -> Self {
        Halt::Error(error)
    }
}

impl From<HostError> for Halt {
    fn from(error: HostError) -> Self {
        match error {
            HostError::Stopped(stop) => Halt::Stop(stop),
            HostError::Failed(failure) => Halt::Error(EngineError::Host(failure)),
        }
    }
}

/// Run a plan to its end, or until the host says stop.
///
/// Parameters change only at the end of a step, so a stop in its middle drops the step and nothing else. Pause and shutdown
/// save the last completed step first, if it is not saved yet; cancel and a lost lease return at once.
pub fn train(input: TrainInput<'_>, host: &mut dyn Host) -> Result<TrainOutcome> {
    let mut run = match Run::load(input, host) {
        Ok(run) => run,
        Err(Halt::Stop(stop)) => return Ok(TrainOutcome::Stopped(stop)),
        Err(Halt::Error(error)) => return Err(error),
    };
    match run.all_steps() {
        Ok(()) => Ok(TrainOutcome::Finished),
        Err(Halt::Error(error)) => Err(error),
        Err(Halt::Stop(stop)) => run.stopped(stop),
    }
}

/// Everything a run holds.
struct Run<'a> {
    input: TrainInput<'a>,
    host: &'a mut dyn Host,
    plan: &'a Plan,
    policy: Policy,
    reference: ReferenceModel,
    text: Text,
    prompts: Vec<TokenizedPrompt>,
    eval_prompts: Vec<TokenizedPrompt>,
    batching: Batching,
    micro_batching: MicroBatching,
    /// The memory of the GPU was full once, and what is computed at once was halved.
    halved: bool,
    reward_names: Vec<String>,
    parameter_info: Vec<ParameterInfo>,
    optimizer: Optimizer,
    state: TrainerState,
    /// The block of the last step; the next step goes on with it unless it begins a new one.
    block: Option<Block>,
    /// With overlap: blocks that are sampled and not scored yet, in order.
    ahead: VecDeque<Ahead>,
    saved_step: u64,
    /// An evaluation or an alert since the last checkpoint.
    unsaved_verdict: bool,
    /// Rows of the dataset that train, where some are held out.
    trained_rows: Option<Vec<u64>>,
    /// Rows that are evaluated: of the evaluation dataset, or held out of the training dataset.
    evaluated_rows: Vec<u64>,
    /// Of these, rows whose prompt is trained too.
    shared_prompts: u64,
    delta_norm: Option<DeltaNorm>,
    /// The log-probs recorded at sampling are the old ones.
    samples_exactly: bool,
    doctor_settings: doctor::Settings,
    seconds: StepSeconds,
}

impl<'a> Run<'a> {
    fn load(mut input: TrainInput<'a>, host: &'a mut dyn Host) -> Result<Self, Halt> {
        let plan = input.plan;
        host.event(Event::Phase { phase: Phase::Loading, step: 0 })?;
        let backend = input.backend.map_or_else(|| BackendKind::of_device(input.device), Ok)?;
        let text = Text::load(input.model_dir).map_err(EngineError::from)?;
        let mut policy = Policy::load_dtype(input.model_dir, backend, plan.training.dtype)?;
        policy.set_gradient_checkpointing(plan.training.gradient_checkpointing);
        if let Some(warning) = start::rounding_warning(&policy, plan.training.dtype) {
            host.event(warning)?;
        }
        poll(host)?;
        let max_positions = policy.card().max_position_embeddings;
        let rows = std::mem::take(&mut input.rows);
        let eval_rows = std::mem::take(&mut input.eval_rows);
        let keys = |rows: &[PromptRow]| rows.iter().map(|row| prompt_key(&row.prompt)).collect::<Vec<PromptKey>>();
        let (keys, eval_keys) = (keys(&rows), keys(&eval_rows));
        let prompts = prompts::tokenize(&text, rows, &plan.sampling, max_positions)?;
        let eval_prompts = prompts::tokenize(&text, eval_rows, &plan.sampling, max_positions)?;
        poll(host)?;

        let fraction = plan.eval.as_ref().and_then(|eval| eval.fraction);
        let (trained_rows, evaluated_rows) = match fraction {
            None => (None, (0..eval_prompts.len() as u64).collect()),
            Some(fraction) => {
                let held_out = held_out_rows(plan.arithmetic.split, &keys, fraction, plan.training.seed);
                if held_out.is_empty() {
                    return Err(Halt::Error(EngineError::Prompts(
                        "eval.fraction can hold out nothing: all prompts are equal, and equal prompts are never divided between training and evaluation; give an evaluation dataset, or add prompts".into(),
                    )));
                }
                let trained = (0..prompts.len() as u64).filter(|row| held_out.binary_search(row).is_err());
                (Some(trained.collect::<Vec<u64>>()), held_out)
            }
        };
        let shared_prompts = match &trained_rows {
            None => shared_prompts(&keys, &eval_keys),
            Some(trained) => {
                let of_rows = |rows: &[u64]| rows.iter().filter_map(|row| keys.get(*row as usize)).collect::<Vec<_>>();
                shared_prompts(of_rows(trained), of_rows(&evaluated_rows))
            }
        };
        let num_trained = trained_rows.as_ref().map_or(prompts.len(), Vec::len);
        let batching = Batching::of_plan(plan, num_trained as u64);
        if batching.blocks_per_epoch() == 0 {
            return Err(Halt::Error(EngineError::Prompts(format!(
                "the dataset has {num_trained} prompts to train on, fewer than one generation block of {}; lower prompts_per_step or steps_per_generation, or add prompts",
                batching.prompts_per_block
            ))));
        }
        let reference = start::begin(&mut policy, &input)?;
        let (adam, state, block, ahead) = match &input.resume {
            Some(dir) => {
                let restored = checkpoint::read(dir, plan)?;
                (restored.adam, restored.state, restored.block, restored.ahead)
            }
            None => {
                let state = TrainerState { plan_sha256: checkpoint::plan_sha256(plan), ..TrainerState::default() };
                (AdamW::of_kind(plan.optimizer.kind, policy.flat().len()), state, None, None)
            }
        };
        let optimizer = Optimizer::beside(policy.flat(), AdamW { decayed: policy.decayed(), ..adam })?;
        let parameter_info = policy.parameters();
        let delta_norm = DeltaNorm::load(input.model_dir, policy.card(), policy.lora_config(), &parameter_info)?;
        let mut run = Self {
            host,
            plan,
            text,
            prompts,
            eval_prompts,
            batching,
            micro_batching: MicroBatching {
                num_generations: plan.rloo.num_generations as usize,
                max_tokens: plan.training.micro_batch_tokens as usize,
                temperature: plan.sampling.temperature,
                dropout: None,
            },
            halved: false,
            reward_names: plan.rewards.iter().map(|reward| reward.name.clone()).collect(),
            parameter_info,
            samples_exactly: policy.samples_exactly(),
            policy,
            reference,
            optimizer,
            saved_step: state.step,
            unsaved_verdict: false,
            trained_rows,
            evaluated_rows,
            shared_prompts,
            delta_norm,
            doctor_settings: doctor::Settings::of_plan(plan),
            state,
            block,
            ahead: VecDeque::new(),
            seconds: StepSeconds::default(),
            input,
        };
        run.resume_block();
        if let Some(ahead) = ahead {
            run.begin_scoring(&ahead)?;
            run.ahead.push_back(ahead);
        }
        Ok(run)
    }

    /// Advantages are not stored: they follow from rewards, their statistics and log-probs.
    fn resume_block(&mut self) {
        if let Some(block) = &mut self.block {
            block.shape_rewards_by(self.state.reward_stats, self.plan);
            block.values.fill_advantages(0..block.len(), self.plan);
        }
    }

    fn all_steps(&mut self) -> Result<(), Halt> {
        if self.batching.dropped_rows_per_epoch() > 0 && self.state.step == 0 {
            self.host.event(report::dropped_rows_warning(&self.batching))?;
        }
        if self.shared_prompts > 0 && self.state.step == 0 {
            self.host.event(report::shared_prompts_warning(self.shared_prompts, self.evaluated_rows.len()))?;
        }
        loop {
            if self.evaluation_is_due() {
                self.evaluate()?;
            }
            if self.checkpoint_is_due() {
                self.save()?;
            }
            if self.state.step >= self.plan.training.max_steps {
                return Ok(());
            }
            if self.state.evaluations.stopped {
                return self.tell_early_stopping();
            }
            self.step()?;
        }
    }

    fn evaluation_is_due(&self) -> bool {
        let Some(eval) = &self.plan.eval else { return false };
        let step = self.state.step;
        let due = match step {
            0 => eval.before_start,
            _ => step.is_multiple_of(eval.every_steps.max(1)) || step == self.plan.training.max_steps,
        };
        due && !self.evaluated_rows.is_empty() && self.state.evaluated_step != Some(step)
    }

    fn checkpoint_is_due(&self) -> bool {
        let step = self.state.step;
        if step == self.plan.training.max_steps || self.state.evaluations.stopped {
            // An attempt that goes on from its last checkpoint has nothing to add to it but an evaluation.
            return step > self.saved_step || self.unsaved_verdict;
        }
        if self.best_is_unsaved() {
            return true;
        }
        let wanted = || self.host.wants_checkpoint();
        // Weights whose loss is not finite make no good checkpoint.
        let good = self.state.skipped_in_a_row == 0;
        good && step > self.saved_step && (step.is_multiple_of(self.plan.checkpoints.every_steps.max(1)) || wanted())
    }

    /// One optimizer step: roll out if the block is new, then train one slice of it.
    fn step(&mut self) -> Result<(), Halt> {
        let started = Instant::now();
        let step = self.state.step + 1;
        let cursor = self.batching.cursor(step);
        let mut block = match self.block.take() {
            Some(block) if cursor.use_index > 0 => block,
            _ => self.new_block(step, cursor.block)?,
        };
        let update = self.update(&mut block, step, cursor);
        // Back before any stop is honoured: a checkpoint inside the block needs it.
        self.block = Some(block);
        let update = update?;
        self.seconds.total = started.elapsed().as_secs_f64();
        self.finish_step(step, cursor, update)
    }

    /// Completions, rewards, log-probs and (where they can be known before training) advantages of a block.
    fn new_block(&mut self, step: u64, index: u64) -> Result<Block, Halt> {
        self.poll()?;
        let (rollout, ahead) = match self.host.rollout(step) {
            Some(rollout) => (rollout, None),
            None if self.plan.rloo.overlap => {
                let (rollout, ahead) = self.overlapped(step, index)?;
                (rollout, Some(ahead))
            }
            None => (self.roll_out(step, index)?, None),
        };
        let mut block = Block::new(index, rollout, self.plan)?;
        block.shape_rewards(self.state.reward_stats, self.plan)?;
        match ahead {
            // Of the policy that sampled; it is another one by now.
            Some(Ahead { old_logps, ref_logps, .. }) => {
                (block.values.old_logps, block.values.ref_logps) = (old_logps, ref_logps);
            }
            None => self.score_block(&mut block)?,
        }
        let old_known = block.values.old_logps.len() == block.len();
        if old_known || !self.plan.rloo.penalizes_reward() {
            block.values.fill_advantages(0..block.len(), self.plan);
        }
        Ok(block)
    }

    /// The step is done: count it, say so, and give up if too many in a row could not be used.
    fn finish_step(&mut self, step: u64, cursor: Cursor, update: Update) -> Result<(), Halt> {
        let Some(block) = &self.block else { return Ok(()) };
        let new_tokens = if cursor.use_index == 0 { block.num_tokens() } else { 0 };
        let finite = update.is_finite();
        self.state.step = step;
        self.state.next_prompt = block.rollout.drawn.next_prompt;
        self.ahead.retain(|ahead| ahead.index > block.index);
        self.state.reward_stats = block.values.reward_stats;
        self.state.epoch = self.epochs(step);
        self.state.num_tokens += new_tokens;
        self.state.updates = self.optimizer.updates();
        self.state.skipped_in_a_row = if finite { 0 } else { self.state.skipped_in_a_row + 1 };
        self.state.skipped_updates += u64::from(!finite);

        let mut metrics = report::step_metrics(&report::StepReport {
            plan: self.plan,
            reward_names: &self.reward_names,
            block,
            update: &update,
            state: &self.state,
            first_use: cursor.use_index == 0,
            seconds: &self.seconds,
        });
        if let Some(bytes) = self.policy.device_peak_bytes() {
            metrics.insert("memory/peak_device_bytes".into(), Some(bytes as f64));
        }
        let delta_norm = match &self.delta_norm {
            Some(delta) => Some(delta.of(&self.policy.flat().values()?)),
            None => None,
        };
        if let Some(delta_norm) = delta_norm.filter(|norm| norm.is_finite()) {
            metrics.insert("adapter/delta_norm".into(), Some(delta_norm));
        }
        let samples = match cursor.use_index {
            0 => Some(report::train_samples(step, block, &self.prompts, &self.text, &self.reward_names)?),
            _ => None,
        };
        let refills = report::refill_warning(step, block, self.plan);
        self.seconds = StepSeconds::default();
        self.state.step_metrics = report::without_times(&metrics);
        self.observe(step, &update);
        self.host.event(Event::Step { step, kind: SamplePhase::Train, metrics: metrics.clone() })?;
        if let Some(samples) = samples {
            let warnings = [report::unscorable_warning(step, &samples), refills];
            self.host.event(Event::Samples { samples })?;
            for warning in warnings.into_iter().flatten() {
                self.host.event(warning)?;
            }
        }
        if !finite {
            self.host.event(report::skipped_update_warning(step, &update, &self.state))?;
        }
        if self.state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW {
            let updates = self.state.skipped_in_a_row;
            self.host.event(Event::Diverged { first_step: step + 1 - u64::from(updates), step })?;
            return Err(Halt::Error(EngineError::Diverged { updates, step }));
        }
        self.consult_doctor(step, &metrics)
    }

    /// Passes over the dataset: where refills move the cursor, by the cursor.
    fn epochs(&self, step: u64) -> f64 {
        match self.state.next_prompt {
            Some(next) if self.plan.rloo.min_informative_groups > 0 => {
                next as f64 / self.batching.num_rows.max(1) as f64
            }
            Some(_) | None => self.batching.epochs(step),
        }
    }

    fn observe(&mut self, step: u64, update: &Update) {
        let (Some(block), Some(step_gradient)) = (&self.block, &update.step_gradient) else { return };
        let slice = &update.slice;
        let in_slice = |logps: &[Vec<f32>]| logps.get(slice.clone()).unwrap_or_default().to_vec();
        let completions = || block.rollout.completions().skip(slice.start).take(slice.len());
        self.host.observe(&StepTrace {
            step,
            rows: &completions().map(|(group, _)| group.row).collect::<Vec<_>>(),
            completion_ids: &completions().map(|(_, completion)| completion.ids.clone()).collect::<Vec<_>>(),
            old_logps: &in_slice(&block.values.old_logps),
            ref_logps: &in_slice(&block.values.ref_logps),
            new_logps: &step_gradient.scores.iter().map(|score| score.logps.clone()).collect::<Vec<_>>(),
            advantages: &block.values.results.advantages[slice.clone()],
            gradient: &step_gradient.gradient,
            parameters: self.policy.flat(),
            parameter_info: &self.parameter_info,
        });
    }

    /// Write a checkpoint of the last completed step and have it published.
    fn save(&mut self) -> Result<(), Halt> {
        self.phase(Phase::Checkpoint)?;
        let started = Instant::now();
        let step = self.state.step;
        let last = step == self.plan.training.max_steps || self.state.evaluations.stopped;
        let inside_block = !step.is_multiple_of(self.batching.uses_per_block().max(1));
        let adam = self.optimizer.state()?;
        let snapshot = Snapshot {
            policy: &self.policy,
            model_dir: self.input.model_dir,
            model_name: self.input.model_name,
            adam: &adam,
            state: &self.state,
            block: self.block.as_ref().filter(|_| inside_block),
            ahead: self.ahead.front(),
        };
        let (dir, files) = checkpoint::write(self.input.scratch_dir, &snapshot)?;
        let mut metrics: Metrics = self.state.step_metrics.clone();
        // An earlier evaluation was of other weights.
        if self.state.evaluated_step == Some(step) {
            metrics.extend(self.state.eval_metrics.clone());
        }
        let published = self.host.saved(&SavedCheckpoint { dir: &dir, step, files: &files, metrics: &metrics, last });
        let removed = std::fs::remove_dir_all(&dir).map_err(|source| EngineError::Io { path: dir, source });
        published?;
        removed?;
        self.saved_step = step;
        self.unsaved_verdict = false;
        self.seconds.checkpoint += started.elapsed().as_secs_f64();
        Ok(())
    }

    /// Honour a stop: what is done and not saved yet is saved, unless nobody wants it.
    fn stopped(&mut self, stop: Stop) -> Result<TrainOutcome> {
        let wanted = match stop {
            Stop::Cancel | Stop::LeaseLost => false,
            Stop::Pause { .. } | Stop::Shutdown => {
                self.state.step > self.saved_step || (self.unsaved_verdict && self.state.step > 0)
            }
        };
        if wanted {
            match self.save() {
                Ok(()) => {}
                Err(Halt::Error(error)) => return Err(error),
                // A stronger stop came meanwhile (the lease was lost, say).
                Err(Halt::Stop(stronger)) => return Ok(TrainOutcome::Stopped(stronger)),
            }
        }
        Ok(TrainOutcome::Stopped(stop))
    }

    fn phase(&mut self, phase: Phase) -> Result<(), Halt> {
        Ok(self.host.event(Event::Phase { phase, step: self.state.step })?)
    }

    fn poll(&self) -> Result<(), Halt> {
        poll(self.host)
    }

    /// A stop was seen a moment ago; if the host took it back, the run is put down as for a shutdown: saved, to go on later.
    fn halt(&self) -> Halt {
        Halt::Stop(self.host.stop().unwrap_or(Stop::Shutdown))
    }
}

fn poll(host: &dyn Host) -> Result<(), Halt> {
    match host.stop() {
        None => Ok(()),
        Some(stop) => Err(Halt::Stop(stop)),
    }
}
