//! The RLOO loop: [`train`], top to bottom.
//!
//! The loop is synchronous and works on token ids; it does not know jobs or HTTP. The caller implements [`host::Host`].
//! The loop is in this file, a single step in `step.rs`, the state of a run in `run.rs`. A sequence is a
//! [`trajectory::Trajectory`]. A [`backend`] computes: `cpu` with our own [`kernels`], `cuda` on a GPU, or `reference`,
//! the oracle; [`model`] is the decoder over any of them.
//!
//! # Implementation details, with code, test and source
//!
//! "vectors" and "golden" are `tests/it/{vectors,golden}.rs`: numbers of TRL 1.16's RLOOTrainer.
//!
//! | # | detail | where | test | source |
//! |---|---|---|---|---|
//! | 1 | the baseline is the mean of the *other scorable* completions of the same prompt | [`advantage::estimator::rloo`] | vectors 02, 06; `a_missing_reward_leaves_the_baseline_and_is_masked` | Ahmadian et al. 2024 (arXiv 2402.14740); TRL |
//! | 2 | a missing reward is never 0: its row is left out of the baseline and has advantage 0, but counts in 1/B | [`advantage::combine_rewards`] | vectors 05, 06; `a_missing_reward_masks_only_itself` | TRL #5902 |
//! | 3 | one scorable row in a group: advantage 0 | [`advantage::estimator::rloo`] | vectors 06, 18 | TRL |
//! | 4 | KL is k1, summed over the sequence, from the sampling policy, inside the reward, after the clip | [`advantage::sequence_kl`], `penalize` | vectors 03, 14, 19; golden | Ahmadian et al. 2024; TRL |
//! | 5 | normalization over the whole block, sample std + 1e-4, without unscorable rows | `advantage::normalize` | vectors 08, 11 | TRL |
//! | 6 | the ratio is of whole sequences, not divided by length; clipped asymmetrically if asked | [`loss::surrogate::sequence`] | vectors 12, 14; `the_gradient_is_the_slope_of_the_loss_on_every_branch` | TRL; DAPO (arXiv 2503.14476) |
//! | 7 | one denominator per optimizer step, whatever the micro-batches | [`loss::Denominators`], [`update::step_gradient`] | `no_micro_batch_split_changes_the_gradient_of_any_loss` | rloo.md |
//! | 8 | truncated and masked: KL 0, ratio 1, no gradient; still in siblings' baseline and in 1/B | [`rollout::is_included`], [`loss::row_loss`] | vectors 16; `all_truncated_and_masked_changes_no_weight` | TRL |
//! | 9 | per epoch one permutation, blocks of U prompts, the incomplete last one dropped, each block used μ·S times | [`rollout::Batching`] | vectors `sampler`; `all_slices_are_trained_once_and_then_again` | TRL's RepeatSampler |
//! | 10 | a completion ends with its first EOS, which it keeps; masks come from lengths, never from token values | [`rollout::cut_completion`], [`generate`] | vectors `eos_handling` | TRL #7039 |
//! | 11 | log-probs of logits / temperature over the full vocabulary in f32; no top-p, top-k, penalty | [`backend::Compute::score`], by [`kernels::head::score`] or [`ops::token_scores`] | vectors `logprob_from_logits`; golden (temperature 0.7) | TRL |
//! | 12 | old log-probs are those recorded at sampling where sampler and training agree bit for bit (`cpu`), else those of the training forward, split in the same way (`reference`): the first ratio is exactly 1 | `scoring::Scorer::block_logps`, [`backend::Decode::samples_exactly`] | `the_first_ratio_of_a_block_is_exactly_one`; `recorded_log_probs_are_the_old_ones_where_the_sampler_is_exact`; `tests/it/bits.rs` | rloo.md |
//! | 13 | no separate pass for old log-probs where they were recorded, or the block is used once and no advantage needs the whole block first | `run::Schedule::needs_old_pass` | golden; `skipping_the_old_pass_changes_nothing` | – |
//! | 14 | the reference is the same weights with the adapter off: KL exactly 0 at step 1, on both backends; no pass at all when beta = 0 | `scoring::Scorer::reference_logps` | `the_reference_kl_is_exactly_zero_at_the_first_step` | TRL |
//! | 15 | AdamW as torch's: decoupled decay, bias correction, epsilon outside the root | [`optim::AdamW::update`] | golden; parity `adamw` | Loshchilov & Hutter 2019 |
//! | 16 | global-norm clip with max_norm/(norm + 1e-6), grad_norm reported before it | [`optim::clip_gradient_norm`] | golden | torch |
//! | 17 | schedules as transformers'; `learning_rate` is the one used in the step | [`optim::learning_rate`] | golden; `schedules_warm_up_and_decay_as_in_transformers` | transformers |
//! | 18 | a loss or gradient that is not finite skips the update; three in a row end the run | `step::update_weights` | `updates_that_are_not_finite_are_skipped_and_three_end_the_run` | rloo.md |
//! | 19 | reward, KL and completions metrics only on the step that first uses a block | `report::step_metrics` | golden; `a_reused_rollout_reports_no_reward` | TRL |
//! | 20 | random numbers come from counters, not from a sequence; a checkpoint inside a block holds its rollout, and the host's journal the samples since then: a resumed run equals an uninterrupted one | [`random`], [`checkpoint`], [`host::Host::recorded`] | `tests/it/{resume,interrupt}.rs`, the service's `tests/it/exact.rs` | – |
//! | 21 | prompts are rendered and tokenized once; completions are never re-tokenized | [`prompts`] | golden | TRL #5224 |
//! | 22 | `grpo`: over the group's std + 1e-4 | [`advantage::estimator::grpo`] | vectors `estimators` | Shao et al. 2024 (arXiv 2402.03300); TRL |
//! | 23 | `dr_grpo`: minus the group's mean, no std | [`advantage::estimator::dr_grpo`] | vectors `estimators` | Liu et al. 2025 (arXiv 2503.20783) |
//! | 24 | `reinforce_pp`: returns of tokens, KL token by token, whitened over the block's valid tokens | [`advantage::estimator::reinforce_pp`] | vectors `estimators`; `the_kl_of_a_token_burdens_it_and_those_before_it` | Hu 2025 (arXiv 2501.03262) |
//! | 25 | `reinforce_pp_baseline`: the group's mean first | [`advantage::estimator::reinforce_pp_baseline`] | vectors `estimators` | Hu 2025 |
//! | 26 | `remax`: minus the reward of a greedy completion, one more request per prompt | [`advantage::estimator::remax`], `rollouts::Rollouts::groups` | vectors `estimators`; `remax_scores_one_greedy_completion_a_prompt_beside_the_block` | Li et al. 2023 (arXiv 2310.10505) |
//! | 27 | `reinforce`: the reward itself | [`advantage::estimator::reinforce`] | `an_unscorable_row_has_no_advantage_and_no_part_in_the_baseline_of_any_estimator` | Williams 1992 |
//! | 28 | `token_mean`: the tokens of the step are the denominator | [`loss::Denominators::of_row`] | vectors `loss_aggregation`; `no_micro_batch_split_changes_the_gradient_of_any_loss` | Yu et al. 2025, DAPO (arXiv 2503.14476) |
//! | 29 | `seq_mean_token_mean`: a completion's own tokens, then completions | [`loss::Denominators::of_row`] | the same | Shao et al. 2024 |
//! | 30 | `dr_grpo`: completions · max_completion_length, a constant | [`loss::Denominators::of_row`] | the same | Liu et al. 2025; TRL |
//! | 31 | `gspo`: the ratio to the power of 1/length | [`loss::surrogate::gspo`] | `the_gradient_of_every_loss_and_kl_estimator_is_that_of_finite_differences` | Zheng et al. 2025 (arXiv 2507.18071) |
//! | 32 | losses over tokens clip each token's ratio, and clip ratios count tokens | [`loss::surrogate::tokens`] | `clipped_ratios_are_counted_by_token_or_by_sequence` | Schulman et al. 2017 (arXiv 1707.06347) |
//! | 33 | KL in the loss: k3 or k2 of each token, divided as the loss is; then none in the reward | [`loss::kl`] | `the_gradient_of_every_loss_and_kl_estimator_is_that_of_finite_differences` | Schulman; GRPO |
//! | 34 | rewards are normalized before the clip; running mean and std are part of the checkpoint | [`advantage::shape::RewardStats`] | `running_statistics_are_those_of_all_rewards_at_once`; `every_variant_resumes_from_every_step` | – |
//! | 35 | soft overlong punishment and linear length penalty come after the clip | [`advantage::shape`] | vectors `soft_overlong`; `the_clip_comes_after_the_normalization_and_the_length_terms_after_the_clip` | DAPO; TRL |
//! | 36 | tied = all scorable rewards of the group exactly equal, before length terms and KL (a std ≤ 1e-8 in jobs of rlood 0.1): advantages exactly 0; dropped groups do not count in 1/B and in any normalization | [`advantage::is_tied`], [`block::Block::shape_rewards`] | `ties_are_decided_on_whole_groups_and_never_by_what_is_left_when_one_row_is_taken_out`; `dropped_groups_leave_the_denominator` | TRL #5588 |
//! | 37 | tied groups are replaced by the next prompts; the position is part of the checkpoint | `refill::refill` | `tied_groups_are_replaced_by_the_prompts_that_come_next` | DAPO |
//! | 38 | LoRA dropout is random per step, token, layer and module, whatever the micro-batches, and only in the training forward | [`model::pass`] | `dropout_does_not_depend_on_the_micro_batches` | PEFT; rloo.md |
//! | 39 | 8-bit moments: block-wise dynamic quantization, 256 values per block | [`optim::blockwise`] | `moments_in_8_bits_take_a_quarter_and_follow_those_in_32` | Dettmers et al. 2022 (arXiv 2110.02861) |
//! | 40 | full fine-tuning: the reference is a frozen copy of the first weights, none when beta = 0 | `start::begin` | `tests/it/params.rs` | rloo.md |
//! | 41 | overlap: the next block is sampled by the policy before this one is trained, its old log-probs are that policy's | [`ahead`] | `an_overlapped_block_is_sampled_by_the_policy_before_the_last_block`; `tests/it/{resume,interrupt}.rs` | Noukhovitch et al. 2024 (arXiv 2410.18252) |
//! | 42 | warm-up: cross-entropy on answers, one denominator a step, through the same head; then a fresh optimizer | `warm_up`, [`loss::cross_entropy`] | `tests/it/warm_up.rs` against torch and PEFT | Ouyang et al. 2022 (arXiv 2203.02155) |
//! | 43 | rollout servers: old log-probs are always the trained model's own; importance weights multiply the policy's terms after the clip and before a KL penalty in the loss; a masked row keeps its reward in its siblings' baseline and its place in 1/B | [`mismatch`], `rollouts::Rollouts::sample_on_servers` | `tests/it/servers.rs` | TRL's GRPOTrainer (`vllm_importance_sampling_*`) |
//! | 44 | episodes: only the model's own tokens have log-probs, KL, ratio, entropy and gradient; what the environment says is context and is not projected to the vocabulary | [`rlood_types::trajectory`], `episodes` | `context_is_in_no_number_of_the_loss`, `tests/it/episodes.rs` | TRL's GRPOTrainer (`tool_mask`) |
//! | 45 | `rloo_turns`: the rewards from a turn on, minus the mean of the other episodes' from the same turn on, 0 for those without it | [`advantage::estimator::rloo_turns`] | `context_is_in_no_number_of_the_loss`, `a_turn_has_the_advantage_of_what_it_and_later_turns_earned` | arXiv 2505.11821 |

pub mod advantage;
pub mod ahead;
pub mod answers;
pub mod backend;
pub mod block;
pub mod certificate;
pub mod checkpoint;
pub mod delta;
pub mod episodes;
pub mod error;
mod evaluate;
pub mod generate;
pub mod gguf;
pub mod gpu;
pub mod host;
pub mod load;
pub mod lora;
pub mod loss;
pub mod memory;
pub mod merge;
pub mod metrics;
pub mod mismatch;
pub mod model;
pub mod ops;
pub mod optim;
pub mod prompts;
pub mod quantize;
pub mod random;
mod refill;
mod relief;
mod report;
pub mod reward_model;
pub mod rollout;
mod rollouts;
mod run;
pub mod sampling;
mod saving;
mod scoring;
pub mod serving;
mod start;
mod step;
pub mod tensors;
pub mod text;
pub mod update;
mod warm_up;
pub mod watch;

pub use rlood_kernels as kernels;

use rlood_model_files as modelcard;
use rlood_types::{dataset, digest, doctor, environment, event, failpoint, job, protocol, spec, trajectory};

use self::host::{Host, RunEnd, TrainInput};
use self::run::Run;

/// Number of consecutive skipped updates after which the run fails.
const MAX_SKIPPED_IN_A_ROW: u32 = 3;

/// Runs a plan until its last step, which is saved; until the host requests a stop; or until the run fails.
///
/// Parameters change only at the end of a step, so a stop within a step drops only that step. Pause and shutdown first
/// save the last completed step, if it is not saved yet; cancel and a lost lease return immediately.
///
/// # Errors
/// Says why the run ended before its last step.
pub fn train(input: TrainInput<'_>, host: &mut dyn Host) -> Result<(), RunEnd> {
    let mut run = Run::load(input, host)?;
    match all_steps(&mut run) {
        Err(RunEnd::Stopped(reason)) => Err(saving::stop(&mut run, reason)),
        end => end,
    }
}

fn all_steps(run: &mut Run<'_>) -> Result<(), RunEnd> {
    if run.progress.state.step == 0 {
        for warning in report::first_warnings(&run.schedule.batching, &run.data) {
            run.host.event(warning)?;
        }
    }
    loop {
        if evaluate::is_due(run) {
            evaluate::evaluate(run)?;
        }
        if saving::is_due(run) {
            saving::save(run)?;
        }
        if run.progress.state.step >= run.plan.total_steps() {
            return Ok(());
        }
        if run.progress.state.evaluations.stopped {
            return watch::report_early_stop(&run.progress, run.host, run.plan);
        }
        match &run.plan.warm_up {
            Some(warm_up) if run.progress.state.step < warm_up.steps => warm_up::train_step(run, warm_up)?,
            Some(_) | None => step::train_step(run)?,
        }
    }
}
