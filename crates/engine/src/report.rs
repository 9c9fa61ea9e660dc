//! The metrics and samples that a step and an evaluation report.

use serde_json::json;

use super::MAX_SKIPPED_IN_A_ROW;
use super::advantage::{RewardWeight, combine_rewards, is_informative, mean, sample_std, sequence_kl};
use super::block::Block;
use super::checkpoint::TrainerState;
use super::error::{EngineError, Result};
use super::host::{Rollout, RolloutCompletion, RolloutGroup};
use super::memory::peak_resident_bytes;
use super::metrics::{
    KlRow, RolloutRows, advantage_metrics, entropy, episode_metrics, kl_metrics, loss_metrics, rollout_metrics,
    sampling_metrics,
};
use super::model::{Policy, RowScore};
use super::rollout::{Batching, num_generations};
use super::run::Data;
use super::step::Update;
use crate::environment::SampleEpisode;
use crate::event::{Event, FinishReason, Metrics, Sample, SamplePhase};
use crate::spec::{DatasetPlan, Estimator, Plan, RewardNormalization, RewardPlan, SHARED_PROMPTS};

/// Wall-clock seconds that the phases of a step took.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StepSeconds {
    /// Duration of the whole step, from rollout to update.
    pub total: f64,
    /// Duration of sampling the completions.
    pub generate: f64,
    /// Time spent waiting for rewards.
    pub reward: f64,
    /// Duration of passes without gradient: old and reference log-probs.
    pub reference: f64,
    /// Duration of forward pass, backward pass and optimizer.
    pub train: f64,
    /// Duration of checkpoints written since the last step's metrics. (A step's own checkpoint is
    /// written after its metrics.)
    pub checkpoint: f64,
}

/// The values from which a step's metrics are computed.
pub(super) struct StepReport<'a> {
    pub plan: &'a Plan,
    pub block: &'a Block,
    pub update: &'a Update,
    /// The state after the step.
    pub state: &'a TrainerState,
    /// Whether the step is the first to use its rollout, so that the rollout's metrics are reported too.
    pub first_use: bool,
    pub seconds: &'a StepSeconds,
}

/// The metrics of one optimizer step, under TRL's names; values that are not finite become `None`.
pub(super) fn step_metrics(report: &StepReport<'_>) -> Metrics {
    let StepReport { plan, block, update, state, first_use, seconds } = *report;
    let values = &block.values;
    let mut metrics = Metrics::from([
        ("loss".into(), Some(update.loss)),
        ("grad_norm".into(), Some(update.grad_norm)),
        ("learning_rate".into(), Some(update.learning_rate)),
        ("num_tokens".into(), Some(state.num_tokens as f64)),
        ("epoch".into(), Some(state.epoch)),
        ("skipped_updates".into(), Some(state.skipped_updates as f64)),
    ]);
    if let Some(step) = &update.step_gradient {
        metrics.extend(loss_metrics(&step.losses));
        let included = &values.included[update.slice.clone()];
        let entropies =
            step.scores.iter().zip(included).map(|(score, included)| (score.entropies.as_slice(), *included));
        metrics.insert("entropy".into(), Some(entropy(entropies)));
        if first_use {
            let log_ratio_max = step.losses.iter().map(|row| (row.new_logp - row.old_logp).abs()).fold(0.0, f64::max);
            metrics.insert("sampling/log_ratio_max".into(), Some(log_ratio_max));
            // The policy has been updated since it sampled if blocks overlap, so the difference would
            // not measure the sampler.
            if let Some(recorded) = block.rollout.recorded_logps().filter(|_| !plan.rloo.overlap) {
                let rows = recorded[update.slice.clone()].iter().zip(&step.scores).zip(included);
                let rows = rows.filter(|(_, included)| **included);
                metrics.extend(sampling_metrics(
                    rows.map(|((recorded, score), _)| (recorded.as_slice(), score.logps.as_slice())),
                ));
            }
        }
    }
    if first_use {
        metrics.extend(rollout_metrics(&RolloutRows {
            reward_names: &reward_names(&plan.rewards),
            scores: &block.rollout.scores(),
            weighted: &values.weighted,
            lengths: &block.rollout.lengths(),
            finish_reasons: &block.rollout.finish_reasons(),
        }));
        metrics.extend(episode_metrics(&block.rollout, plan.environment.as_ref().map(|environment| environment.kind)));
        if values.results.advantages.len() == block.len() {
            metrics.extend(advantage_metrics(&values.results));
        }
        if values.ref_logps.len() == block.len() && values.old_logps.len() == block.len() {
            let rows = values.old_logps.iter().zip(&values.ref_logps).zip(&values.included);
            let rows = rows.map(|((old_logps, ref_logps), &included)| KlRow { old_logps, ref_logps, included });
            metrics.extend(kl_metrics(&rows.collect::<Vec<_>>()));
        }
    }
    if first_use {
        variant_metrics(&mut metrics, block, plan);
        let values = &block.values;
        let tied = [&*values.results.tied, &*values.results.tied_pre_kl];
        metrics.extend(source_metrics(&plan.dataset, &block.rollout, &values.weighted, tied));
    }
    time_metrics(&mut metrics, report, seconds);
    metrics.values_mut().for_each(|value| *value = value.filter(|value| value.is_finite()));
    metrics
}

/// Metrics of each dataset source that has prompts in a rollout: `sources/{name}/…`, with the names of the overall
/// metrics. `tied` says whether each group is tied after and before the KL penalty; empty for an evaluation, which
/// does not compare groups.
fn source_metrics(dataset: &DatasetPlan, rollout: &Rollout, weighted: &[Option<f64>], tied: [&[bool]; 2]) -> Metrics {
    let mut metrics = Metrics::new();
    let (lengths, finish_reasons) = (rollout.lengths(), rollout.finish_reasons());
    let num_generations = (lengths.len() / rollout.groups.len().max(1)).max(1);
    for source in &dataset.sources {
        let rows = rollout.completions().enumerate();
        let rows = rows.filter(|(_, (group, _))| dataset.source_of(group.row) == Some(&source.name));
        let rows: Vec<usize> = rows.map(|(row, _)| row).collect();
        let mut put = |name: &str, value: Option<f64>| {
            metrics.insert(format!("sources/{}/{name}", source.name), value);
        };
        put("share", Some(rows.len() as f64 / lengths.len().max(1) as f64));
        if rows.is_empty() {
            continue;
        }
        let of = |value: &dyn Fn(usize) -> Option<f64>| rows.iter().filter_map(|row| value(*row)).collect::<Vec<f64>>();
        let flag = |flag: bool| Some(f64::from(u8::from(flag)));
        let rewards = of(&|row| weighted[row]);
        put("reward", mean(&rewards));
        put("reward_std", sample_std(&rewards));
        for (name, tied) in ["frac_reward_zero_std", "frac_reward_zero_std_pre_kl"].into_iter().zip(tied) {
            if !tied.is_empty() {
                put(name, mean(&of(&|row| flag(*tied.get(row / num_generations)?))));
            }
        }
        put("completions/mean_length", mean(&of(&|row| Some(lengths[row] as f64))));
        put("completions/clipped_ratio", mean(&of(&|row| flag(finish_reasons[row] == FinishReason::Length))));
    }
    metrics
}

/// Metrics of a new rollout that only some plans report: refills, dropped groups, the
/// greedy baseline, reward normalization.
fn variant_metrics(metrics: &mut Metrics, block: &Block, plan: &Plan) {
    let (values, drawn, rloo) = (&block.values, &block.rollout.drawn, &plan.rloo);
    if rloo.num_generations.get() == 1 {
        // A group of one completion has no other reward to compare with.
        metrics.insert("frac_reward_zero_std".into(), None);
        metrics.insert("frac_reward_zero_std_pre_kl".into(), None);
    }
    if rloo.min_informative_groups > 0 {
        metrics.insert("refills".into(), Some(f64::from(drawn.refills)));
        let fraction = drawn.informative_groups as f64 / drawn.sampled_groups.max(1) as f64;
        metrics.insert("refills/informative_fraction".into(), Some(fraction));
    }
    if rloo.drop_tied_groups {
        let dropped = values.dropped.iter().filter(|dropped| **dropped).count();
        metrics.insert("dropped_fraction".into(), Some(dropped as f64 / block.len().max(1) as f64));
    }
    if rloo.estimator == Estimator::Remax {
        metrics.insert("reward_greedy".into(), mean(&values.greedy.iter().flatten().copied().collect::<Vec<_>>()));
    }
    if rloo.reward_normalization != RewardNormalization::None {
        metrics.insert("reward_normalizer/mean".into(), Some(values.reward_stats.mean));
        metrics.insert("reward_normalizer/std".into(), Some(values.reward_stats.std()));
    }
}

fn time_metrics(metrics: &mut Metrics, report: &StepReport<'_>, seconds: &StepSeconds) {
    let StepSeconds { total, generate, reward, reference, train, checkpoint } = *seconds;
    let named = [
        ("generate", generate),
        ("reward", reward),
        ("reference", reference),
        ("train", train),
        ("checkpoint", checkpoint),
    ];
    metrics.insert("step_time".into(), Some(total));
    metrics.extend(named.map(|(name, seconds)| (format!("step_time/{name}"), Some(seconds))));
    let trained: usize = report
        .block
        .rollout
        .trajectories()
        .skip(report.update.slice.start)
        .take(report.update.slice.len())
        .map(|trajectory| trajectory.num_tokens())
        .sum();
    metrics.insert("tokens_per_second/train".into(), Some(trained as f64 / train));
    // If blocks overlap, the time that this step spent sampling belongs to the next block.
    if generate > 0.0 && !report.plan.rloo.overlap {
        let sampled = report.block.num_completion_tokens() as f64;
        metrics.insert("tokens_per_second/rollout".into(), Some(sampled / generate));
    }
}

/// Inserts the peak memory of this process, and of its GPU.
pub(super) fn memory_metrics(metrics: &mut Metrics, policy: &Policy) {
    if let Some(bytes) = peak_resident_bytes() {
        metrics.insert("memory/peak_resident_bytes".into(), Some(bytes as f64));
    }
    if let Some(bytes) = policy.device_peak_bytes() {
        metrics.insert("memory/peak_device_bytes".into(), Some(bytes as f64));
    }
}

/// Keeps the metrics that are the same in every run of the plan: drops durations and memory.
pub(super) fn without_durations(metrics: &Metrics) -> Metrics {
    let of_the_machine = ["step_time", "tokens_per_second/", "memory/", "environment/latency"];
    let kept = metrics.iter().filter(|(name, _)| !of_the_machine.iter().any(|prefix| name.starts_with(prefix)));
    kept.map(|(name, value)| (name.clone(), *value)).collect()
}

fn reward_names(rewards: &[RewardPlan]) -> Vec<String> {
    rewards.iter().map(|reward| reward.name.clone()).collect()
}

/// The sample events of a block, reported when the block is first used.
pub(super) fn train_samples(step: u64, block: &Block, data: &Data, plan: &Plan) -> Result<Vec<Sample>> {
    let values = &block.values;
    let reward_names = reward_names(&plan.rewards);
    let rows = block.rollout.completions().enumerate();
    rows.map(|(row, (group, completion))| {
        Ok(Sample {
            group_id: format!("g_{}_{}", block.index, row / group.completions.len().max(1)),
            reward: values.weighted[row],
            kl: values.sequence_kl(row).filter(|kl| kl.is_finite()),
            advantage: values.results.advantages.get(row).copied().filter(|advantage| advantage.is_finite()),
            ..sample(step, SamplePhase::Train, group, completion, data, &reward_names)?
        })
    })
    .collect()
}

/// Warnings to report before the first step.
pub(super) fn first_warnings(batching: &Batching, data: &Data) -> Vec<Event> {
    let dropped = (batching.dropped_rows_per_epoch() > 0).then(|| dropped_rows_warning(batching));
    let shared =
        (data.shared_prompts > 0).then(|| shared_prompts_warning(data.shared_prompts, data.evaluated_rows.len()));
    dropped.into_iter().chain(shared).collect()
}

/// The warning that rows of the warm-up are left out.
pub(super) fn left_out_warning(left_out: usize, num_rows: usize) -> Event {
    let message = format!(
        "{left_out} of {num_rows} rows of the warm-up are left out, because their prompts are also evaluated, or compared by the verdict, which would then measure memorized answers"
    );
    let data = json!({ "left_out": left_out, "rows": num_rows });
    Event::Warning { code: "warm_up_rows_left_out".into(), message, data }
}

/// The warning that the last dataset rows of an epoch do not fill a block.
fn dropped_rows_warning(batching: &Batching) -> Event {
    let dropped = batching.dropped_rows_per_epoch();
    let message = format!(
        "{dropped} of {} prompts are left out of each epoch, because the last block of {} would be incomplete",
        batching.mixture.epoch_len(0),
        batching.prompts_per_block
    );
    let data = json!({ "dropped_rows_per_epoch": dropped, "prompts_per_block": batching.prompts_per_block });
    Event::Warning { code: "rows_dropped".into(), message, data }
}

/// The warning that an update was skipped.
pub(super) fn skipped_update_warning(step: u64, (loss, grad_norm): (f64, f64), state: &TrainerState) -> Event {
    let message = format!(
        "the update of step {step} was skipped, because its loss or gradient is not finite; {MAX_SKIPPED_IN_A_ROW} consecutive skipped updates end the job"
    );
    let data = json!({
        "step": step,
        "skipped_in_a_row": state.skipped_in_a_row,
        "loss": loss.to_string(),
        "grad_norm": grad_norm.to_string(),
    });
    Event::Warning { code: "non_finite".into(), message, data }
}

/// The warning that evaluated prompts are also trained.
fn shared_prompts_warning(shared: u64, evaluated: usize) -> Event {
    let message = format!(
        "{shared} of {evaluated} evaluation prompts are also training prompts: on these the evaluation cannot show whether the model generalizes"
    );
    Event::Warning { code: SHARED_PROMPTS.into(), message, data: json!({ "shared": shared, "evaluated": evaluated }) }
}

/// The warning that no completion of a rollout has a reward, so its steps train nothing even if
/// everything else looks normal.
pub(super) fn unscorable_warning(step: u64, samples: &[Sample]) -> Option<Event> {
    if samples.is_empty() || samples.iter().any(|sample| sample.reward.is_some()) {
        return None;
    }
    let message = format!(
        "none of the {} completions of step {step} has a reward (each is missing or does not apply), so the step trains nothing",
        samples.len()
    );
    let data = json!({ "step": step, "completions": samples.len() });
    Some(Event::Warning { code: "nothing_scorable".into(), message, data })
}

/// The warning that too many groups are tied after all refills; the step trains with the groups it has.
pub(super) fn refill_warning(step: u64, block: &Block, plan: &Plan) -> Option<Event> {
    let (wanted, drawn) = (u64::from(plan.rloo.min_informative_groups), &block.rollout.drawn);
    let num_generations = num_generations(plan).get();
    let tasks = block.values.rewards.task.chunks(num_generations);
    let informative = tasks.filter(|task| is_informative(task, num_generations, plan.arithmetic.ties)).count() as u64;
    if drawn.refills == 0 || informative >= wanted {
        return None;
    }
    let message = format!(
        "after {} refills {informative} of {} groups of step {step} have rewards that differ, not the {wanted} asked for (min_informative_groups); the step trains with them",
        drawn.refills,
        block.rollout.groups.len()
    );
    let data = json!({
        "step": step, "refills": drawn.refills, "informative_groups": informative, "min_informative_groups": wanted,
        "sampled_groups": drawn.sampled_groups,
    });
    Some(Event::Warning { code: "refills_exhausted".into(), message, data })
}

/// The completions of an evaluation, and their log-probs.
#[derive(Clone, Copy)]
pub(super) struct Evaluation<'a> {
    pub rollout: &'a Rollout,
    /// The policy's scores at the sampling temperature of training, in block order.
    pub scores: &'a [RowScore],
    /// Log-probs of the reference; empty without a reference.
    pub reference: &'a [Vec<f32>],
}

/// Metrics (prefixed `eval_`) and samples of an evaluation.
pub(super) fn evaluation(
    step: u64,
    evaluation: Evaluation<'_>,
    plan: &Plan,
    data: &Data,
) -> Result<(Metrics, Vec<Sample>)> {
    let Evaluation { rollout, scores: likely, reference } = evaluation;
    let rewards = plan.eval.as_ref().and_then(|eval| eval.rewards.as_ref()).unwrap_or(&plan.rewards);
    let reward_names: &[String] = &reward_names(rewards);
    let weights = RewardWeight::of_plan(rewards);
    let scores = rollout.scores();
    let combine = |values| combine_rewards(values, &weights, plan.rloo.combine);
    let weighted: Vec<Option<f64>> = scores.iter().map(|score| combine(&score.values)).collect();
    let mut metrics = rollout_metrics(&RolloutRows {
        reward_names,
        scores: &scores,
        weighted: &weighted,
        lengths: &rollout.lengths(),
        finish_reasons: &rollout.finish_reasons(),
    });
    metrics.extend(episode_metrics(rollout, plan.environment.as_ref().map(|environment| environment.kind)));
    metrics.insert("entropy".into(), Some(entropy(likely.iter().map(|score| (score.entropies.as_slice(), true)))));
    if !reference.is_empty() {
        let rows = likely.iter().zip(reference);
        let rows = rows.map(|(score, ref_logps)| KlRow { old_logps: &score.logps, ref_logps, included: true });
        metrics.extend(kl_metrics(&rows.collect::<Vec<_>>()));
    }
    if let Some(eval) = &plan.eval {
        metrics.extend(source_metrics(&eval.dataset, rollout, &weighted, [&[], &[]]));
    }
    let finite = |value: Option<f64>| value.filter(|value| value.is_finite());
    let metrics = metrics.into_iter().map(|(name, value)| (format!("eval_{name}"), finite(value))).collect();
    let rows = rollout.completions().enumerate();
    let samples = rows.map(|(row, (group, completion))| {
        Ok(Sample {
            group_id: format!("e_{step}_{}", group.row),
            reward: weighted[row],
            kl: reference.get(row).map(|reference| sequence_kl(&likely[row].logps, reference, true)),
            ..sample(step, SamplePhase::Eval, group, completion, data, reward_names)?
        })
    });
    Ok((metrics, samples.collect::<Result<_>>()?))
}

/// Creates a sample event with the fields that training and evaluation share; the caller sets group,
/// reward, KL and advantage.
fn sample(
    step: u64,
    phase: SamplePhase,
    group: &RolloutGroup,
    completion: &RolloutCompletion,
    data: &Data,
    reward_names: &[String],
) -> Result<Sample> {
    let (prompts, text) = (data.prompts_of(phase), &data.text);
    let values = completion.score.values.iter().map(|value| value.number());
    Ok(Sample {
        step,
        phase,
        group_id: String::new(),
        prompt_id: format!("row_{}", group.row),
        prompt: match prompts.get(group.row as usize) {
            Some(prompt) if prompt.ids == group.prompt_ids => prompt.text.clone(),
            // A recorded rollout may hold another prompt than the dataset has now: decode its tokens.
            Some(_) | None => text.decode(&group.prompt_ids, false).map_err(EngineError::from)?,
        },
        completion: match &completion.episode {
            // Special tokens are kept, because they separate the turns.
            Some(_) => text.decode(&completion.segments.ids(), false).map_err(EngineError::from)?,
            None => text.decode(completion.segments.completion()?, true).map_err(EngineError::from)?,
        },
        rewards: reward_names.iter().cloned().zip(values).collect(),
        reward: None,
        kl: None,
        advantage: None,
        finish_reason: completion.finish_reason,
        num_tokens: completion.segments.num_model_tokens() as u32,
        episode: completion.episode.as_deref().map(|episode| Box::new(SampleEpisode::of(episode))),
    })
}
