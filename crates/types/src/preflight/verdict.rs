//! Interprets the figures of a preflight. The thresholds are rules of thumb for when a job usually wastes its time.

use super::{Finding, FindingCode, PreflightReport};
use crate::spec::{Plan, RewardPlan, low_lora_rate};

/// Fraction of missing values above which a required reward cannot be trained on. A running job warns at the same fraction.
pub const MISSING_FRACTION: f64 = 0.2;
/// Position of the mean reward in its range up to which the base model counts as never scoring.
pub const FLOOR: f64 = 0.01;
/// Position of the mean reward in its range from which there is nothing to learn (rloo.md's doctor: > 95 % of the maximum).
pub const CEILING: f64 = 0.95;
/// Fraction of tied groups above which a job trains little (rloo.md's doctor: reward collapse).
pub const TIED_FRACTION: f64 = 0.6;
/// Fraction of tied groups with a single text from which the cause is the sampling and not the reward.
pub const IDENTICAL_FRACTION: f64 = 0.5;
/// Fraction of truncated completions above which rewards measure the truncation rather than the answer.
pub const TRUNCATED_FRACTION: f64 = 0.2;
/// Fraction of a step spent waiting for rewards above which the rewards are the bottleneck.
pub const REWARD_TIME_FRACTION: f64 = 0.5;
/// Wait for rewards below which they are never reported as the bottleneck, in seconds.
pub const REWARD_SECONDS: f64 = 0.5;

/// Returns the lowest and highest value of a reward whose type declares them; `None` for services.
pub fn range_of(reward: &RewardPlan) -> Option<(f64, f64)> {
    reward.kind.bounds()
}

/// Returns the range of the weighted sum; `ranges` is in the plan's order. `None` if a reward with a weight has no known range.
pub fn combined_range(rewards: &[RewardPlan], ranges: &[Option<(f64, f64)>]) -> Option<(f64, f64)> {
    let counted = rewards.iter().zip(ranges).filter(|(reward, _)| reward.weight != 0.0);
    counted.map(|(reward, range)| range.map(|range| (reward.weight, range))).try_fold((0.0, 0.0), |(low, high), one| {
        let (weight, (from, to)) = one?;
        Some((low + (weight * from).min(weight * to), high + (weight * from).max(weight * to)))
    })
}

/// Returns all problems of the job, worst first; only `ready` if there are none.
pub fn verdict(report: &PreflightReport, plan: &Plan) -> Vec<Finding> {
    let rules = [not_measured, reward_not_usable];
    if let Some(finding) = rules.iter().find_map(|rule| rule(report, plan)) {
        return vec![finding];
    }
    let level = level(report, plan);
    let ends = matches!(level.as_ref().map(|finding| finding.code), Some(FindingCode::NothingToLearn));
    let mut findings: Vec<Finding> = level.into_iter().collect();
    if !ends {
        findings.extend(ties(report, plan));
    }
    findings.extend(truncation(report, plan));
    findings.extend(bottleneck(report, plan));
    findings.extend(low_rate(report, plan));
    if findings.is_empty() {
        let detail = match (report.reward, report.tied_groups_fraction) {
            (Some(reward), Some(tied)) => {
                format!("the mean reward is {reward:.3}, and in {} of the groups all rewards are equal", percent(tied))
            }
            _ => "the preflight found no problem".to_owned(),
        };
        let fix = if report.complete {
            "submit the job"
        } else {
            "submit the job, or run the preflight with fewer prompts or more time to measure the rest"
        };
        findings.push(finding(FindingCode::Ready, detail, fix));
    }
    findings
}

fn finding(code: FindingCode, detail: String, fix: impl Into<String>) -> Finding {
    Finding { code, detail, fix: fix.into() }
}

fn percent(fraction: f64) -> String {
    format!("{:.0} %", fraction * 100.0)
}

fn not_measured(report: &PreflightReport, plan: &Plan) -> Option<Finding> {
    if report.completions > 0 {
        return None;
    }
    Some(match &report.error {
        Some(error) => finding(
            FindingCode::NotMeasured,
            error.message.clone(),
            "fix what the error names: the job itself would end the same way",
        ),
        None => finding(
            FindingCode::NotMeasured,
            format!(
                "no prompt had all of its {} completions sampled and scored within the time limit",
                plan.rloo.num_generations
            ),
            "run the preflight with a longer probe_timeout_s; to make the job itself faster, lower sampling.max_completion_length or use a faster device",
        ),
    })
}

fn reward_not_usable(report: &PreflightReport, plan: &Plan) -> Option<Finding> {
    let missing = |reward: &&RewardPlan| {
        let probed = report.rewards.get(&reward.name);
        reward.required && probed.and_then(|probed| probed.missing_fraction).is_some_and(|part| part > MISSING_FRACTION)
    };
    let reward = plan.rewards.iter().find(missing)?;
    let part = report.rewards.get(&reward.name)?.missing_fraction?;
    let mut detail = format!("reward '{}' has no value for {} of the completions", reward.name, percent(part));
    if let Some(warning) = report.warnings.iter().find(|warning| warning.contains(&format!("'{}'", reward.name))) {
        detail = format!("{detail} ({warning})");
    }
    let fix = "try the reward with POST /rewards/test and correct it: completions without a value train nothing";
    Some(finding(FindingCode::RewardNotUsable, detail, fix))
}

fn low_rate(report: &PreflightReport, plan: &Plan) -> Option<Finding> {
    let (detail, fix) = low_lora_rate(plan.lora.as_ref()?, report.hidden_size?, plan.optimizer.learning_rate)?;
    Some(finding(FindingCode::LearningRateLowForLora, detail, fix))
}

/// Checks for a mean reward at the lowest or the highest end of its range.
fn level(report: &PreflightReport, plan: &Plan) -> Option<Finding> {
    let reward = report.reward?;
    let constant = report.reward_std == Some(0.0);
    // Without a known range, only a constant reward is conclusive: a model that never scores gets 0 or less.
    let (at_floor, at_ceiling, of_what) = match report.reward_range {
        Some((low, high)) if high > low => {
            let part = (reward - low) / (high - low);
            (
                part <= FLOOR,
                part >= CEILING,
                format!("{} of the way from the lowest reward {low} to the highest {high}", percent(part)),
            )
        }
        Some(_) | None => {
            (constant && reward <= 0.0, constant && reward > 0.0, "the same reward for every completion".to_owned())
        }
    };
    if at_floor {
        return Some(finding(
            FindingCode::SftFirst,
            format!("the base model never scores: its mean reward is {reward:.3}, {of_what}"),
            match plan.warm_up {
                None => {
                    "let the job learn from good answers first (warm_up: {dataset, steps}), start with easier prompts, or give a partial reward for partial success"
                }
                Some(_) => {
                    "the preflight samples the base model, without the job's warm_up: check in the first evaluation after the warm-up whether the job's answers earn these rewards"
                }
            },
        ));
    }
    if at_ceiling {
        return Some(finding(
            FindingCode::NothingToLearn,
            format!("the base model's mean reward is {reward:.3} already, {of_what}"),
            "use harder prompts, or a reward that still tells good answers from better ones",
        ));
    }
    let (low, high) = plan.rloo.reward_clip_range.filter(|(low, high)| reward <= *low || reward >= *high)?;
    Some(finding(
        FindingCode::NothingToLearn,
        format!(
            "the mean reward {reward:.3} is outside rloo.reward_clip_range [{low}, {high}], where all rewards become equal"
        ),
        "widen rloo.reward_clip_range, or leave it out",
    ))
}

fn ties(report: &PreflightReport, plan: &Plan) -> Option<Finding> {
    let tied = report.tied_groups_fraction.filter(|tied| *tied > TIED_FRACTION)?;
    let identical = report.identical_groups_fraction.unwrap_or(0.0);
    if identical / tied >= IDENTICAL_FRACTION {
        let sampling = &plan.sampling;
        let narrow = sampling.top_k > 0 || sampling.top_p < 1.0 || sampling.min_p > 0.0;
        let fix = if narrow {
            format!("raise sampling.temperature above {}, or turn top_p, top_k and min_p off", sampling.temperature)
        } else {
            format!("raise sampling.temperature above {}: 1.0 and more is usual in training", sampling.temperature)
        };
        return Some(finding(
            FindingCode::RaiseTemperature,
            format!(
                "in {} of the groups all {} completions are the same text, so there is nothing to compare",
                percent(identical),
                plan.rloo.num_generations
            ),
            fix,
        ));
    }
    Some(finding(
        FindingCode::TiedGroups,
        format!(
            "in {} of the groups all rewards are equal, mostly with different completions: they train nothing",
            percent(tied)
        ),
        "use prompts that the model solves sometimes, a reward with more levels, or a higher rloo.num_generations",
    ))
}

fn truncation(report: &PreflightReport, plan: &Plan) -> Option<Finding> {
    let truncated = report.truncated_fraction.filter(|truncated| *truncated > TRUNCATED_FRACTION)?;
    let limit = plan.sampling.max_completion_length;
    Some(finding(
        FindingCode::RaiseMaxCompletionLength,
        format!("{} of the completions are truncated at {limit} tokens", percent(truncated)),
        format!(
            "raise sampling.max_completion_length (for example to {}, if the model's context allows it), or ask for shorter answers",
            limit.saturating_mul(2)
        ),
    ))
}

fn bottleneck(report: &PreflightReport, plan: &Plan) -> Option<Finding> {
    let seconds = report.step_seconds?;
    let total = seconds.total.unwrap_or(seconds.generate + seconds.reward);
    if seconds.reward < REWARD_SECONDS || seconds.reward / total <= REWARD_TIME_FRACTION {
        return None;
    }
    let slowest = report
        .rewards
        .iter()
        .max_by(|(_, a), (_, b)| a.latency_p50_s.unwrap_or(0.0).total_cmp(&b.latency_p50_s.unwrap_or(0.0)));
    let name = slowest.map_or_else(String::new, |(name, _)| format!(", '{name}' the slowest"));
    let services = plan.rewards.iter().filter_map(|reward| reward.kind.service());
    let concurrency = services.map(|service| service.max_concurrency);
    let fix = match concurrency.max() {
        Some(most) => format!(
            "make the reward service faster or run more instances of it, then raise max_concurrency (now {most}) and max_batch_samples"
        ),
        None => "use a cheaper reward".to_owned(),
    };
    Some(finding(
        FindingCode::RewardIsTheBottleneck,
        format!("a step waits {:.1} s of its {total:.1} s for rewards{name}", seconds.reward),
        fix,
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::preflight::{PreflightError, PreflightReward, StepSeconds};

    fn reward(value: serde_json::Value) -> RewardPlan {
        serde_json::from_value(value).unwrap()
    }

    fn regex(weight: f64) -> RewardPlan {
        reward(json!({"name": "r", "weight": weight, "required": weight != 0.0, "type": "regex", "pattern": "x"}))
    }

    fn webhook() -> RewardPlan {
        reward(json!({"name": "w", "weight": 1.0, "required": true, "type": "webhook", "url": "http://x/",
            "max_concurrency": 8, "max_batch_samples": 32, "max_batch_bytes": 1_000_000, "timeout_ms": 1, "deadline_ms": 1,
            "max_tries": 1, "max_invalid_tries": 1, "on_invalid": "mask", "max_outage_s": 1}))
    }

    /// Returns a test job with one reward between 0 and 1.
    fn plan() -> Plan {
        let document = json!({"model": "m", "dataset": {"records": [{"prompt": "p"}]},
            "rewards": [{"type": "regex", "pattern": "x", "name": "r"}], "training": {"prompts_per_step": 1}});
        crate::spec::example::resolved(document)
    }

    /// Returns a test report without problems.
    fn good() -> PreflightReport {
        PreflightReport {
            complete: true,
            prompts: 8,
            completions: 32,
            reward: Some(0.4),
            reward_std: Some(0.5),
            reward_range: Some((0.0, 1.0)),
            rewards: BTreeMap::from([(
                "r".into(),
                PreflightReward { missing_fraction: Some(0.0), ..Default::default() },
            )]),
            missing_fraction: Some(0.0),
            tied_groups_fraction: Some(0.25),
            identical_groups_fraction: Some(0.125),
            truncated_fraction: Some(0.1),
            step_seconds: Some(StepSeconds { generate: 2.0, reward: 0.1, train: Some(1.0), total: Some(3.1) }),
            ..PreflightReport::default()
        }
    }

    fn codes(change: impl FnOnce(&mut PreflightReport)) -> Vec<FindingCode> {
        let mut report = good();
        change(&mut report);
        verdict(&report, &plan()).into_iter().map(|finding| finding.code).collect()
    }

    #[test]
    fn a_job_without_faults_is_ready() {
        assert_eq!(codes(|_| ()), [FindingCode::Ready]);
        assert_eq!(codes(|report| report.complete = false), [FindingCode::Ready]);
    }

    #[test]
    fn a_model_that_never_scores_needs_sft_first() {
        assert_eq!(codes(|report| report.reward = Some(FLOOR)), [FindingCode::SftFirst]);
        assert_eq!(codes(|report| report.reward = Some(FLOOR + 0.02)), [FindingCode::Ready]);
        // Without a range, a constant reward is conclusive, and one that varies is not.
        let constant = |report: &mut PreflightReport, reward| {
            (report.reward_range, report.reward, report.reward_std) = (None, Some(reward), Some(0.0));
        };
        assert_eq!(codes(|report| constant(report, -1.0)), [FindingCode::SftFirst]);
        assert_eq!(codes(|report| constant(report, 0.0)), [FindingCode::SftFirst]);
        assert_eq!(codes(|report| constant(report, 3.0)), [FindingCode::NothingToLearn]);
        assert_eq!(codes(|report| (report.reward_range, report.reward) = (None, Some(-3.0))), [FindingCode::Ready]);
    }

    #[test]
    fn a_model_that_scores_nearly_everything_has_nothing_to_learn() {
        assert_eq!(codes(|report| report.reward = Some(CEILING)), [FindingCode::NothingToLearn]);
        assert_eq!(codes(|report| report.reward = Some(CEILING - 0.01)), [FindingCode::Ready]);
        // A model with the highest reward everywhere has ties for that reason, and not because of the sampling.
        let all = |report: &mut PreflightReport| {
            report.reward = Some(1.0);
            (report.tied_groups_fraction, report.identical_groups_fraction) = (Some(1.0), Some(1.0));
        };
        assert_eq!(codes(all), [FindingCode::NothingToLearn]);
    }

    #[test]
    fn a_clip_range_beside_the_rewards_leaves_nothing_to_learn() {
        let mut plan = plan();
        plan.rloo.reward_clip_range = Some((0.5, 1.0));
        assert_eq!(verdict(&good(), &plan)[0].code, FindingCode::NothingToLearn);
    }

    #[test]
    fn equal_completions_ask_for_a_higher_temperature_and_equal_rewards_for_other_prompts() {
        let ties = |tied: f64, identical: f64| {
            codes(|report| {
                (report.tied_groups_fraction, report.identical_groups_fraction) = (Some(tied), Some(identical));
            })
        };
        assert_eq!(ties(0.8, 0.8 * IDENTICAL_FRACTION), [FindingCode::RaiseTemperature]);
        assert_eq!(ties(0.8, 0.8 * IDENTICAL_FRACTION - 0.01), [FindingCode::TiedGroups]);
        assert_eq!(ties(TIED_FRACTION + 0.01, 0.0), [FindingCode::TiedGroups]);
        assert_eq!(ties(TIED_FRACTION, TIED_FRACTION), [FindingCode::Ready]);
    }

    #[test]
    fn truncated_completions_need_a_higher_maximum_length() {
        let cut = codes(|report| report.truncated_fraction = Some(TRUNCATED_FRACTION + 0.01));
        assert_eq!(cut, [FindingCode::RaiseMaxCompletionLength]);
        assert_eq!(codes(|report| report.truncated_fraction = Some(TRUNCATED_FRACTION)), [FindingCode::Ready]);
    }

    #[test]
    fn rewards_that_take_most_of_a_step_are_the_bottleneck() {
        let step = |reward: f64, train: Option<f64>| {
            codes(|report| {
                let total = train.map(|train| 2.0 + reward + train);
                report.step_seconds = Some(StepSeconds { generate: 2.0, reward, train, total });
            })
        };
        assert_eq!(step(3.1, Some(1.0)), [FindingCode::RewardIsTheBottleneck]);
        assert_eq!(step(2.9, Some(1.0)), [FindingCode::Ready]);
        assert_eq!(step(2.1, None), [FindingCode::RewardIsTheBottleneck]);
        let quick = |report: &mut PreflightReport| {
            let reward = REWARD_SECONDS - 0.01;
            report.step_seconds = Some(StepSeconds { generate: 0.01, reward, train: None, total: None });
        };
        assert_eq!(codes(quick), [FindingCode::Ready]);
    }

    #[test]
    fn a_reward_without_values_is_the_first_finding() {
        let missing = |fraction: f64| {
            codes(|report| {
                report.rewards.get_mut("r").unwrap().missing_fraction = Some(fraction);
                report.truncated_fraction = Some(1.0);
            })
        };
        assert_eq!(missing(MISSING_FRACTION + 0.01), [FindingCode::RewardNotUsable]);
        assert_eq!(missing(MISSING_FRACTION), [FindingCode::RaiseMaxCompletionLength]);
    }

    #[test]
    fn an_unmeasured_preflight_reports_its_reason() {
        let error = PreflightError { code: "model_invalid".into(), message: "the model cannot be used".into() };
        let mut report = PreflightReport::default();
        assert!(verdict(&report, &plan())[0].detail.contains("time limit"));
        report.error = Some(error);
        let findings = verdict(&report, &plan());
        assert_eq!((findings.len(), findings[0].code), (1, FindingCode::NotMeasured));
        assert_eq!(findings[0].detail, "the model cannot be used");
    }

    #[test]
    fn ranges_add_up_by_weight_and_are_unknown_with_one_that_is() {
        let length = reward(json!({"name": "l", "weight": 0.5, "required": true, "type": "length",
            "min_words": 1, "max_words": 5, "sentence_bonus": 0.5}));
        assert_eq!(range_of(&length), Some((-0.5, 1.5)));
        let range = |rewards: &[RewardPlan]| combined_range(rewards, &rewards.iter().map(range_of).collect::<Vec<_>>());
        assert_eq!(range(&[regex(2.0), length.clone()]), Some((-0.25, 2.75)));
        assert_eq!(range(&[regex(-1.0)]), Some((-1.0, 0.0)));
        assert_eq!(range(&[regex(1.0), webhook()]), None);
        let metric = RewardPlan { weight: 0.0, ..webhook() };
        assert_eq!(range(&[regex(1.0), metric]), Some((0.0, 1.0)));
        assert_eq!(combined_range(&[webhook()], &[Some((0.0, 10.0))]), Some((0.0, 10.0)));
    }
}
