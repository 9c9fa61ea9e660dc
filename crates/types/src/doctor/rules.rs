//! The rules, one function each. The table in [`super`] has the sources of their thresholds.
//!
//! Longer than 500 lines: every rule is here, in the order of the table.

use super::history::{EARLY, Window};
use super::{Case, Rule, Symptom, Verdict};

/// Number of latest values of a metric in the usual window of a rule.
pub(super) const RECENT: usize = 5;
/// Position of the mean reward above which low diversity is not a problem.
const HIGH_POSITION: f64 = 0.9;
/// Minimum increase of a rising reward, as a share of the range.
const MIN_RISE: f64 = 0.02;

/// Evaluates a rule for the current state of the run.
pub(super) fn examine(rule: Rule, case: &Case<'_>) -> Verdict {
    let verdict = match rule {
        Rule::HighVariance => high_variance(case),
        Rule::KlExplosion => kl_explosion(case),
        Rule::RewardCollapse => reward_collapse(case),
        Rule::LengthExplosion => length_explosion(case),
        Rule::EmptyOutput => empty_output(case),
        Rule::RewardHacking => reward_hacking(case),
        Rule::ColdStart => cold_start(case),
        Rule::NothingToLearn => nothing_to_learn(case),
        Rule::AdapterUnchanged => adapter_unchanged(case),
        Rule::EntropyCollapse => entropy_collapse(case),
        Rule::SlowReward => slow_reward(case),
        Rule::NonFinite => non_finite(case),
        Rule::RolloutMismatch => rollout_mismatch(case),
        Rule::InvalidCalls => invalid_calls(case),
        Rule::MostlyContext => mostly_context(case),
        Rule::EpisodesAtLimits => episodes_at_limits(case),
        Rule::NoToolCalls => no_tool_calls(case),
        Rule::ForgottenEpisodes => forgotten_episodes(case),
        // `many_restarts` is raised by the server and not from metrics; see `restarts`.
        Rule::ManyRestarts => None,
    };
    // A rule returns `None` if there is not enough data.
    verdict.unwrap_or(Verdict::Hold)
}

impl Case<'_> {
    /// Returns the lowest and the highest possible reward, or those seen so far if they are not known.
    pub(super) fn range(&self) -> Option<(f64, f64)> {
        self.input.reward_range.or_else(|| self.history.seen().filter(|(low, high)| high > low))
    }

    /// Returns the position of a mean reward in its range, from 0 to 1.
    fn position(&self, reward: f64) -> Option<f64> {
        self.range().map(|(low, high)| (reward - low) / (high - low))
    }

    /// Whether the recent mean reward is close to the highest possible reward.
    fn is_near_the_top(&self) -> bool {
        let recent = self.history.last("reward", RECENT).map(|window| window.mean());
        recent.and_then(|reward| self.position(reward)).is_some_and(|position| position >= HIGH_POSITION)
    }

    fn is_rising(&self) -> bool {
        let (recent, before) = (self.history.last("reward", RECENT), self.history.before("reward", RECENT, RECENT));
        let (Some(recent), Some(before), Some((low, high))) = (recent, before, self.range()) else { return false };
        recent.mean() - before.mean() > MIN_RISE * (high - low)
    }

    /// Returns the difference between two means of five rollouts that can be due to chance: twice the standard
    /// error, at least [`MIN_RISE`].
    pub(super) fn chance_difference(&self) -> Option<f64> {
        let (low, high) = self.range()?;
        // Groups are independent of each other; completions of a group are not.
        let groups = self.input.prompts_per_rollout.max(1.0) * RECENT as f64;
        let spread = self.history.last("reward_std", RECENT).map_or(0.0, |stds| stds.mean());
        Some((2.0 * spread * (2.0 / groups).sqrt()).max(MIN_RISE * (high - low)))
    }

    /// Whether no completion has ever earned much more than the lowest reward.
    fn has_never_left_the_floor(&self) -> bool {
        let Some(best) = self.history.best_reward() else { return false };
        match self.position(best) {
            Some(position) => position <= 0.05,
            // Every reward was the same. This constant need not be the lowest possible reward if it is above 0.
            None => best <= 0.0,
        }
    }
}

fn raise(message: String, evidence: Vec<super::Observation>, fix: String) -> Option<Verdict> {
    Some(Verdict::Raise(Symptom { message, evidence, fix }))
}

fn high_variance(case: &Case<'_>) -> Option<Verdict> {
    const SPIKE: f64 = 5.0;
    const SPIKES: usize = 3;
    let input = case.input;
    let fix = format!(
        "raise rloo.num_generations (now {}) or training.prompts_per_step, lower optimizer.learning_rate (now {:e}), or raise rloo.beta (now {})",
        input.num_generations(),
        input.plan.optimizer.learning_rate,
        input.plan.rloo.beta
    );
    let norms = case.history.up_to("grad_norm", 20).filter(|norms| norms.points().len() >= 10);
    let mut spikes = 0;
    if let Some(norms) = &norms {
        let limit = (SPIKE * norms.median()).max(input.plan.optimizer.max_grad_norm);
        spikes = norms.values().filter(|norm| *norm > limit).count();
        let still = norms.values().skip(norms.points().len() - RECENT).any(|norm| norm > limit);
        if spikes >= SPIKES && still {
            let largest = norms.values().fold(0.0, f64::max);
            let message = format!(
                "{spikes} of the last {} gradient norms are more than {SPIKE} times the median {:.3}; the largest is {largest:.3}",
                norms.points().len(),
                norms.median()
            );
            let evidence = vec![
                norms.observe(&format!("values above {limit:.3}"), spikes as f64, Some(SPIKES as f64)),
                norms.observe("largest", largest, Some(limit)),
                norms.observe("median", norms.median(), None),
            ];
            return raise(message, evidence, fix);
        }
    }
    let rewards = case.history.last("reward", 10)?;
    let stds = case.history.last("reward_std", 10)?;
    let (low, high) = case.range()?;
    // Groups are independent of each other; completions of a group are not.
    let expected = stds.mean() / input.prompts_per_rollout.max(1.0).sqrt();
    let jitter = rewards.jitter();
    let floor = 0.05 * (high - low);
    if jitter > (3.0 * expected).max(floor) {
        let message = format!(
            "the mean reward jumps by {jitter:.3} from step to step; sampling {} prompts explains {expected:.3}",
            input.prompts_per_rollout
        );
        let evidence = vec![
            rewards.observe(
                "jitter of the reward (root of half the mean squared change per step)",
                jitter,
                Some((3.0 * expected).max(floor)),
            ),
            stds.observe_mean(None),
        ];
        return raise(message, evidence, fix);
    }
    let calm = spikes == 0 && jitter < (2.0 * expected).max(floor);
    Some(if calm { Verdict::Clear } else { Verdict::Hold })
}

fn kl_explosion(case: &Case<'_>) -> Option<Verdict> {
    let recent = case.history.last("kl", 3)?;
    let before = case.history.before("kl", case.history.up_to("kl", 13)?.points().len().checked_sub(3)?, 3);
    let earlier = before.as_ref().map_or(0.0, Window::mean).max(0.0);
    let kl = recent.mean();
    if kl > 3.0 || (kl > 1.0 && kl > 3.0 * earlier) {
        let message = format!(
            "the policy is {kl:.2} nats a token away from its reference (it was {earlier:.2} before): completions are about {:.0} times less likely a token than they were",
            kl.exp()
        );
        let mut evidence = vec![recent.observe_mean(Some(1.0))];
        evidence.extend(before.map(|before| before.observe("mean of the ten rollouts before these", earlier, None)));
        let fix = format!(
            "raise rloo.beta (now {}; 0.1 is a usual value against this), lower optimizer.learning_rate (now {:e}), evaluate more often, and continue from a checkpoint before step {}",
            case.input.plan.rloo.beta,
            case.input.plan.optimizer.learning_rate,
            recent.points()[0].0
        );
        return raise(message, evidence, fix);
    }
    Some(if kl < 0.5 { Verdict::Clear } else { Verdict::Hold })
}

fn reward_collapse(case: &Case<'_>) -> Option<Verdict> {
    if case.input.num_generations() < 2 {
        return None; // One completion is a group of its own.
    }
    let tied = case.history.last("frac_reward_zero_std_pre_kl", RECENT)?;
    let rewards = case.history.last("reward", RECENT)?;
    let share = tied.mean();
    // Groups of two or three completions often tie by chance: two independent draws of 0 or 1 tie half of the time.
    let position = case.position(rewards.mean()).unwrap_or(0.5).clamp(0.0, 1.0);
    let group = f64::from(case.input.num_generations());
    let by_chance = position.powf(group) + (1.0 - position).powf(group);
    let limit = f64::max(0.6, (1.0 + by_chance) / 2.0);
    if share <= limit - 0.1 || case.is_near_the_top() {
        return Some(Verdict::Clear);
    }
    // The rule `cold_start` covers a model that never earned anything.
    if share <= limit || case.is_rising() || case.has_never_left_the_floor() {
        return Some(Verdict::Hold);
    }
    let message = format!(
        "{:.0} % of the groups have equal rewards, so that they train nothing, while the mean reward is {:.3}",
        100.0 * share,
        rewards.mean()
    );
    let evidence = vec![tied.observe_mean(Some(limit)), rewards.observe_mean(None)];
    let fix = format!(
        "raise sampling.temperature (now {}) or rloo.num_generations (now {}), use more diverse or differently hard prompts, and check that the reward tells completions of one prompt apart (POST /rewards/test)",
        case.input.plan.sampling.temperature,
        case.input.num_generations()
    );
    raise(message, evidence, fix)
}

fn length_explosion(case: &Case<'_>) -> Option<Verdict> {
    let (cut, lengths) = ("completions/clipped_ratio", "completions/mean_length");
    let (cut_now, cut_then) = (case.history.last(cut, RECENT)?, case.history.early(cut)?);
    let (length_now, length_then) = (case.history.last(lengths, RECENT)?, case.history.early(lengths)?);
    if cut_now.mean() < 0.35 {
        return Some(Verdict::Clear);
    }
    let grown = cut_now.mean() - cut_then.mean() >= 0.25 && length_now.mean() >= 1.25 * length_then.mean();
    if cut_now.mean() < 0.5 || !grown {
        return Some(Verdict::Hold);
    }
    let message = format!(
        "{:.0} % of the completions are truncated at {} tokens ({:.0} % at first); their mean length grew from {:.1} to {:.1} tokens",
        100.0 * cut_now.mean(),
        case.input.plan.sampling.max_completion_length,
        100.0 * cut_then.mean(),
        length_then.mean(),
        length_now.mean()
    );
    let evidence = vec![cut_now.observe_mean(Some(0.5)), length_now.observe_mean(Some(1.25 * length_then.mean()))];
    let fix = format!(
        "raise rloo.beta (now {}: too low lets the policy drift), add a reward on the length ({{\"type\": \"length\"}}) or rloo.mask_truncated_completions, or start again with a lower optimizer.learning_rate (now {:e})",
        case.input.plan.rloo.beta, case.input.plan.optimizer.learning_rate
    );
    raise(message, evidence, fix)
}

fn empty_output(case: &Case<'_>) -> Option<Verdict> {
    let lengths = case.history.last("completions/mean_length", RECENT)?;
    let cut = case.history.last("completions/clipped_ratio", RECENT)?;
    let length = lengths.mean();
    if length > 1.5 || cut.mean() >= 0.5 {
        return Some(Verdict::Clear);
    }
    if length > 1.2 {
        return Some(Verdict::Hold);
    }
    let message = format!(
        "completions have {length:.2} tokens on average, the end-of-sequence token included: most of them are empty"
    );
    let evidence = vec![lengths.observe_mean(Some(1.2)), cut.observe_mean(Some(0.5))];
    let fix = format!(
        "raise rloo.beta (now {}), reward longer answers ({{\"type\": \"length\"}}), or start again with a lower optimizer.learning_rate (now {:e}); if it was so from the start, check the chat template and the prompts",
        case.input.plan.rloo.beta, case.input.plan.optimizer.learning_rate
    );
    raise(message, evidence, fix)
}

/// How far the training reward rose while an independent measure fell. Both changes are fractions of the reward's range.
struct Divergence {
    gain: f64,
    loss: f64,
    /// Twice the standard error of the measure's fall, or the minimum fall that counts.
    noise: f64,
    evidence: Vec<super::Observation>,
    measure: String,
}

fn reward_hacking(case: &Case<'_>) -> Option<Verdict> {
    let candidates = independent_divergences(case);
    if candidates.is_empty() {
        return None;
    }
    let gap = |candidate: &Divergence| candidate.gain + candidate.loss;
    let hacked = candidates
        .iter()
        .find(|candidate| candidate.gain > 0.02 && candidate.loss > candidate.noise.max(0.05) && gap(candidate) > 0.10);
    let Some(found) = hacked else {
        let quiet = candidates.iter().all(|candidate| candidate.loss < 0.02 || gap(candidate) < 0.05);
        return Some(if quiet { Verdict::Clear } else { Verdict::Hold });
    };
    let message = format!(
        "the training reward rose by {:.3} of its range while {} fell by {:.3}: the model may be gaming the reward",
        found.gain, found.measure, found.loss
    );
    let fix = format!(
        "make the reward stricter, so that format tricks earn nothing, raise rloo.beta (now {}), and use the best checkpoint by the independent measure (checkpoints.metric_for_best)",
        case.input.plan.rloo.beta
    );
    raise(message, found.evidence.clone(), fix)
}

fn independent_divergences(case: &Case<'_>) -> Vec<Divergence> {
    let mut found = Vec::new();
    let Some((low, high)) = case.range() else { return found };
    let width = high - low;
    if let Some(first) = case.history.early("reward").filter(|_| case.history.count("reward") >= 10)
        && let Some(last) = case.history.last("reward", RECENT)
    {
        for (name, own_width) in &case.input.independent {
            let metric = format!("rewards/{name}/mean");
            let (Some(then), Some(now)) = (case.history.early(&metric), case.history.last(&metric, RECENT)) else {
                continue;
            };
            let own_width = own_width.unwrap_or(width);
            found.push(Divergence {
                gain: (last.mean() - first.mean()) / width,
                loss: (then.mean() - now.mean()) / own_width,
                noise: 0.05,
                evidence: vec![
                    last.observe(
                        "mean of the last evaluations (limit: the mean of the first five)",
                        last.mean(),
                        Some(first.mean()),
                    ),
                    now.observe(
                        "mean of the last evaluations (limit: the mean of the first five)",
                        now.mean(),
                        Some(then.mean()),
                    ),
                ],
                measure: format!("reward '{name}' (weight 0)"),
            });
        }
    }
    found.extend(evaluation_divergence(case, width));
    found
}

/// Compares the latest evaluation with the best one before it.
fn evaluation_divergence(case: &Case<'_>, width: f64) -> Option<Divergence> {
    let (evals, trained) = (case.history.up_to("eval_reward", 24)?, case.history.up_to("reward_at_eval", 24)?);
    let &(now_step, now) = evals.points().last()?;
    let at = |step: u64| trained.points().iter().find(|(at, _)| *at == step).map(|(_, reward)| *reward);
    let trained_now = at(now_step)?;
    // The evaluation before the first step has no training reward to compare with.
    let comparable = evals.points().iter().filter(|(step, _)| *step < now_step && at(*step).is_some());
    let &(best_step, best) = comparable.max_by(|a, b| a.1.total_cmp(&b.1))?;
    let (low, high) = case.input.eval_range.or_else(|| case.range())?;
    let own_width = high - low;
    let std = case.history.up_to("eval_reward_std", 1).map_or(0.0, |std| std.latest());
    let standard_error = std * (2.0 / case.input.eval_completions.max(1.0)).sqrt() / own_width;
    let mut seen = evals.observe("reward of the last evaluation (limit: the best one before it)", now, Some(best));
    (seen.from_step, seen.to_step) = (best_step + 1, now_step);
    let mut reward = trained.observe(
        "mean reward of the last rollouts (limit: their mean at the best evaluation)",
        trained_now,
        at(best_step),
    );
    (reward.from_step, reward.to_step) = (best_step + 1, now_step);
    Some(Divergence {
        gain: (trained_now - at(best_step)?) / width,
        loss: (best - now) / own_width,
        noise: 2.0 * standard_error,
        evidence: vec![reward, seen],
        measure: "the evaluation's reward".to_owned(),
    })
}

fn cold_start(case: &Case<'_>) -> Option<Verdict> {
    const FIRST: u64 = 10;
    let rewards = case.history.up_to("reward", FIRST as usize)?;
    if !case.has_never_left_the_floor() {
        let recent = case.position(case.history.last("reward", 3)?.mean())?;
        return Some(if recent > 0.1 { Verdict::Clear } else { Verdict::Hold });
    }
    if case.history.count("reward") < FIRST {
        return None;
    }
    let message = format!(
        "after {} rollouts the mean reward has never left its floor (it is {:.3}): there is nothing to reinforce",
        case.history.count("reward"),
        rewards.mean()
    );
    let fix = "fine-tune the model on examples first (SFT), so that some completions earn a reward; or start with easier prompts, or use a reward that also gives partial credit".to_owned();
    let evidence = vec![rewards.observe_mean(case.range().map(|(low, high)| low + 0.05 * (high - low)))];
    raise(message, evidence, fix)
}

fn nothing_to_learn(case: &Case<'_>) -> Option<Verdict> {
    let first = case.history.early("reward")?;
    if case.position(first.mean())? > 0.95 && case.history.count("reward") == EARLY as u64 {
        let (_, high) = case.range()?;
        let message = format!(
            "the model earns {:.3} of at most {high:.3} from the start: there is little left to learn",
            first.mean()
        );
        let fix = "use harder prompts or a stricter reward; otherwise the job is not needed".to_owned();
        let limit = case.range().map(|(low, high)| low + 0.95 * (high - low));
        return raise(message, vec![first.observe_mean(limit)], fix);
    }
    let recent = case.position(case.history.last("reward", RECENT)?.mean())?;
    Some(if recent < 0.9 { Verdict::Clear } else { Verdict::Hold })
}

fn adapter_unchanged(case: &Case<'_>) -> Option<Verdict> {
    const LIMIT: f64 = 5e-5;
    let delta = case.history.up_to("adapter/delta_norm", RECENT)?;
    if delta.latest() >= 2.0 * LIMIT {
        return Some(Verdict::Clear);
    }
    let (first, last) = (case.history.early("reward")?, case.history.last("reward", RECENT)?);
    let still = last.mean() - first.mean() <= case.chance_difference()?;
    // Without a gradient the adapter cannot change; other rules cover that case.
    let pushed = case.history.up_to("grad_norm", 20)?.median() > 0.0;
    if delta.latest() >= LIMIT
        || case.step < case.input.plan.warm_up_steps() + case.input.plan.optimizer.warmup_steps + 20
        || !still
        || !pushed
    {
        return Some(Verdict::Hold);
    }
    let message = format!(
        "after {} steps the adapter changes the weights by {:.1e} of their norm, and the reward has not risen",
        case.step,
        delta.latest()
    );
    let evidence = vec![delta.observe("last", delta.latest(), Some(LIMIT)), last.observe_mean(Some(first.mean()))];
    let fix = format!(
        "raise optimizer.learning_rate (now {:e}; 4e-5 to 1e-4 is usual with LoRA, which learns next to nothing at 1e-6)",
        case.input.plan.optimizer.learning_rate
    );
    raise(message, evidence, fix)
}

fn entropy_collapse(case: &Case<'_>) -> Option<Verdict> {
    let entropy = case.history.last("entropy", RECENT)?;
    let mean = entropy.mean();
    if mean >= 0.05 && case.history.early("entropy").is_none_or(|early| mean >= 0.2 * early.mean())
        || case.is_near_the_top()
    {
        return Some(Verdict::Clear);
    }
    let early = case.history.early("entropy")?;
    let low = mean < 0.02 || (mean < 0.1 && mean < 0.1 * early.mean());
    let rewards = case.history.last("reward", RECENT)?;
    if !low || case.is_rising() {
        return Some(Verdict::Hold);
    }
    let message = format!(
        "the policy's entropy is {mean:.4} nats a token ({:.4} at first): completions of a prompt hardly differ, while the mean reward is {:.3}",
        early.mean(),
        rewards.mean()
    );
    let evidence = vec![entropy.observe_mean(Some((0.1 * early.mean()).clamp(0.02, 0.1))), rewards.observe_mean(None)];
    let fix = format!(
        "raise sampling.temperature (now {}), raise rloo.beta (now {}), or lower optimizer.learning_rate (now {:e})",
        case.input.plan.sampling.temperature, case.input.plan.rloo.beta, case.input.plan.optimizer.learning_rate
    );
    raise(message, evidence, fix)
}

fn slow_reward(case: &Case<'_>) -> Option<Verdict> {
    let (waits, steps) = (case.history.last("step_time/reward", RECENT)?, case.history.last("step_time", RECENT)?);
    let share = waits.mean() / steps.mean();
    if share < 0.3 {
        return Some(Verdict::Clear);
    }
    if share <= 0.5 || waits.mean() <= 1.0 {
        return Some(Verdict::Hold);
    }
    let message = format!(
        "steps wait {:.1} s of {:.1} s ({:.0} %) for rewards: the reward service is the bottleneck",
        waits.mean(),
        steps.mean(),
        100.0 * share
    );
    let evidence = vec![waits.observe_mean(Some(0.5 * steps.mean())), steps.observe_mean(None)];
    let fix = "raise the reward's max_concurrency and max_batch_samples as far as the service allows, or give the service more workers; GET /jobs/{id}/metrics?keys=rewards/NAME/latency tells which one it is".to_owned();
    raise(message, evidence, fix)
}

fn non_finite(case: &Case<'_>) -> Option<Verdict> {
    let skipped = case.history.up_to("skipped_updates", 10)?;
    let before = case.history.before("skipped_updates", 1, 1).map_or(0.0, |before| before.latest());
    if skipped.latest() > before {
        let message = format!(
            "the update of step {} was skipped, because its loss or gradient is not finite ({} skipped in all)",
            case.step,
            skipped.latest()
        );
        let mut seen = skipped.observe("last", skipped.latest(), Some(before));
        seen.from_step = case.step;
        let fix = format!(
            "lower optimizer.learning_rate (now {:e}), raise rloo.beta (now {}), keep optimizer.max_grad_norm at 1 or below (now {}), and check the model's weights",
            case.input.plan.optimizer.learning_rate, case.input.plan.rloo.beta, case.input.plan.optimizer.max_grad_norm
        );
        return raise(message, vec![seen], fix);
    }
    let calm = skipped.points().len() == 10 && skipped.points()[0].1 == skipped.latest();
    Some(if calm { Verdict::Clear } else { Verdict::Hold })
}

fn rollout_mismatch(case: &Case<'_>) -> Option<Verdict> {
    const LIMIT: f64 = 0.01;
    const STEPS: usize = 3;
    let mismatch = case.history.last("sampling/mismatch_kl", STEPS)?;
    if mismatch.values().all(|value| value > LIMIT) {
        let message = format!(
            "in {STEPS} rollouts in a row the log-probs of the rollout servers differ from those of the trained model: {:.4} nats per token",
            mismatch.mean()
        );
        let fix = "check that every rollout server has the same base model, precision and rope settings as the job, and runs with --logprobs-mode processed_logprobs; lower rollout.correction.max";
        return raise(message, vec![mismatch.observe_mean(Some(LIMIT))], fix.to_owned());
    }
    let calm = mismatch.values().all(|value| value < LIMIT / 2.0);
    Some(if calm { Verdict::Clear } else { Verdict::Hold })
}

/// Raises while the mean of a share over the last rollouts is above `limit`, and clears when it is below `calm`. `says` makes the
/// message and the fix for a share in percent.
fn share_above(
    case: &Case<'_>,
    metric: &str,
    (limit, calm): (f64, f64),
    says: impl FnOnce(f64) -> (String, &'static str),
) -> Option<Verdict> {
    let share = case.history.last(metric, RECENT)?;
    if share.mean() > limit {
        let (message, fix) = says(100.0 * share.mean());
        return raise(message, vec![share.observe_mean(Some(limit))], fix.to_owned());
    }
    Some(if share.mean() < calm { Verdict::Clear } else { Verdict::Hold })
}

fn invalid_calls(case: &Case<'_>) -> Option<Verdict> {
    share_above(case, "environment/parse_error_fraction", (0.2, 0.1), |percent| {
        let message = format!(
            "in the last {RECENT} rollouts, {percent:.0} % of the turns called tools in a way that is not valid"
        );
        let fix = "check that environment.tool_parser is that of the model's chat template, and that the tools' descriptions name every argument; a warm-up on correct calls helps a model that has never seen the form";
        (message, fix)
    })
}

fn mostly_context(case: &Case<'_>) -> Option<Verdict> {
    share_above(case, "environment/masked_fraction", (0.9, 0.85), |percent| {
        let message = format!(
            "in the last {RECENT} rollouts, {percent:.0} % of the tokens of episodes came from the environment: they are read, and teach nothing"
        );
        let fix = "let the environment answer more briefly, or lower environment.max_observation_tokens";
        (message, fix)
    })
}

fn episodes_at_limits(case: &Case<'_>) -> Option<Verdict> {
    // Shares of whole rollouts are sums of fractions, so 1 is reached up to rounding.
    share_above(case, "environment/at_limit_fraction", (0.999_999, 0.9), |_| {
        let message =
            format!("in the last {RECENT} rollouts, every episode ended at a limit, and none because it was finished");
        let fix = "raise environment.max_turns, environment.max_episode_tokens or sampling.max_completion_length (environment/stop/… says which limit it is), or let the environment end episodes earlier";
        (message, fix)
    })
}

fn no_tool_calls(case: &Case<'_>) -> Option<Verdict> {
    const ROLLOUTS: usize = 10;
    let calls = case.history.last("tools/call_frequency", 1)?;
    if calls.mean() > 0.0 {
        return Some(Verdict::Clear);
    }
    let calls = case.history.last("tools/call_frequency", ROLLOUTS)?;
    let offered = case.history.last("tools/offered", ROLLOUTS)?;
    if calls.values().any(|calls| calls > 0.0) || offered.values().any(|offered| offered < 1.0) {
        return Some(Verdict::Hold);
    }
    let message =
        format!("in the last {ROLLOUTS} rollouts no episode called a tool, although all of them offered tools");
    let fix = "check that environment.tool_parser is that of the model's chat template (environment/parse_error_fraction is 0 when calls are taken for text), name the tools in the prompt, or begin with a warm-up on rows with calls";
    raise(message, vec![calls.observe_mean(Some(0.0))], fix.to_owned())
}

fn forgotten_episodes(case: &Case<'_>) -> Option<Verdict> {
    share_above(case, "environment/restart_fraction", (0.05, 0.02), |percent| {
        let message = format!(
            "in the last {RECENT} rollouts, the environment forgot {percent:.0} % of the episodes, which began again with other samples"
        );
        let fix = "keep the environment's state across restarts (rlood env serve --state DIR), and send all requests of an episode to one instance (the header rlood-episode names it); if an action of the model is what ends the environment, let it answer with a reward instead";
        (message, fix)
    })
}
