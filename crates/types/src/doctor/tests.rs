//! Tests every rule against recorded runs (`tests/fixtures/doctor`: real jobs on the bundled model, created by `record.py` there).

use std::num::NonZeroU32;

use serde_json::{Value, json};

use super::*;
use crate::spec::example::resolved;
use crate::spec::{Plan, RulePlan};

/// A job, with facts about its rewards from a recording instead of the rewards themselves.
#[derive(Clone)]
struct Facts {
    plan: Plan,
    reward_range: Option<(f64, f64)>,
    eval_completions: f64,
    independent: Option<String>,
}

impl Facts {
    fn input(&self) -> RuleInput<'_> {
        RuleInput {
            reward_range: self.reward_range,
            eval_range: self.reward_range,
            eval_completions: self.eval_completions,
            independent: self.independent.iter().map(|name| (name.as_str(), Some(1.0))).collect(),
            ..RuleInput::of_plan(&self.plan)
        }
    }
}

/// Returns the facts that all recorded jobs share.
fn facts() -> Facts {
    let plan = resolved(json!({
        "model": "m", "dataset": {"records": vec![json!({"prompt": "p"}); 32]}, "rewards": [{"type": "length"}],
        "rloo": {"num_generations": 8, "beta": 0.01}, "sampling": {"max_completion_length": 6},
        "optimizer": {"learning_rate": 1.5e-3, "warmup_steps": 5}, "training": {"prompts_per_step": 32, "max_steps": 40},
    }));
    Facts { plan, reward_range: Some((0.0, 1.0)), eval_completions: 256.0, independent: None }
}

/// A recorded run: its facts, and its metrics in the order in which the doctor receives them.
struct Recording {
    facts: Facts,
    metrics: Vec<(u64, Metrics)>,
}

fn recording(name: &str) -> Recording {
    let path = rlood_test_support::fixture(&format!("doctor/{name}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file: Value = serde_json::from_str(&text).unwrap();
    let mut facts = facts();
    let number = |key: &str| file["settings"][key].as_f64();
    let plan = &mut facts.plan;
    if let Some(prompts) = number("prompts_per_rollout") {
        plan.training.prompts_per_step = prompts as u32;
    }
    plan.rloo.num_generations =
        number("num_generations").map_or(plan.rloo.num_generations, |number| NonZeroU32::new(number as u32).unwrap());
    plan.training.max_steps = number("max_steps").map_or(plan.training.max_steps, |number| number as u64);
    plan.optimizer.max_grad_norm = number("max_grad_norm").unwrap_or(plan.optimizer.max_grad_norm);
    plan.optimizer.warmup_steps = number("warmup_steps").map_or(plan.optimizer.warmup_steps, |number| number as u64);
    facts.reward_range = number("highest_reward").map(|high| (0.0, high));
    facts.independent = file["settings"]["independent"].as_str().map(str::to_owned);
    let mut metrics = Vec::new();
    for row in file["metrics"].as_array().unwrap() {
        let step = row["step"].as_u64().unwrap();
        let all = row.as_object().unwrap().iter().filter(|(name, _)| *name != "step");
        let (eval, train): (Metrics, Metrics) =
            all.map(|(name, value)| (name.clone(), value.as_f64())).partition(|(name, _)| name.starts_with("eval_"));
        metrics.extend([train, eval].into_iter().filter(|of_kind| !of_kind.is_empty()).map(|of_kind| (step, of_kind)));
    }
    Recording { facts, metrics }
}

impl Recording {
    fn findings(&self) -> Vec<(u64, Finding)> {
        let mut doctor = Doctor::default();
        let observed = self.metrics.iter().map(|(step, metrics)| {
            let findings = doctor.observe(*step, metrics, &self.facts.input());
            findings.into_iter().map(|finding| (*step, finding)).collect::<Vec<_>>()
        });
        observed.flatten().collect()
    }

    /// Returns the raised alerts as `(rule, step)`, in order.
    fn alerts(&self) -> Vec<(&'static str, u64)> {
        let raised = self.findings().into_iter().filter_map(|(_, finding)| match finding {
            Finding::Raised(alert) => Some((alert.rule.as_str(), alert.step)),
            Finding::Cleared { .. } | Finding::Phase(_) => None,
        });
        raised.collect()
    }
}

const HEALTHY: [&str; 5] = ["healthy_42", "healthy_1", "healthy_2", "healthy_3", "healthy_4"];

#[test]
fn healthy_runs_raise_nothing_and_go_through_the_three_phases() {
    for name in HEALTHY {
        let recording = recording(name);
        assert_eq!(recording.alerts(), [], "{name}");
        let phases: Vec<TrainingPhase> = recording
            .findings()
            .into_iter()
            .filter_map(|(_, finding)| match finding {
                Finding::Phase(change) => Some(change.phase),
                Finding::Raised(_) | Finding::Cleared { .. } => None,
            })
            .collect();
        use TrainingPhase::{Convergence, Exploitation, Exploration};
        assert_eq!(phases, [Exploration, Exploitation, Convergence], "{name}");
    }
}

/// The alerts that each unhealthy run raises, in order. No other alert may be raised.
const UNHEALTHY: &[(&str, &[(&str, u64)])] = &[
    (
        "kl_explosion",
        &[
            ("kl_explosion", 5),
            ("reward_collapse", 7),
            ("high_variance", 12),
            ("empty_output", 14),
            ("entropy_collapse", 15),
        ],
    ),
    ("tied_groups", &[("reward_collapse", 5), ("entropy_collapse", 5), ("kl_explosion", 14), ("high_variance", 21)]),
    (
        "small_batches",
        &[
            ("kl_explosion", 8),
            ("reward_collapse", 9),
            ("high_variance", 17),
            ("high_variance", 30),
            ("length_explosion", 37),
        ],
    ),
    ("length_explosion", &[("reward_collapse", 5), ("high_variance", 12), ("length_explosion", 14)]),
    ("reward_hacking", &[("reward_collapse", 5), ("reward_hacking", 10)]),
    ("cold_start", &[("cold_start", 10)]),
    ("nothing_to_learn", &[("nothing_to_learn", 5)]),
    ("adapter_unchanged", &[("adapter_unchanged", 25)]),
    ("slow_reward", &[("slow_reward", 5)]),
    ("non_finite", &[("non_finite", 2)]),
];

#[test]
fn unhealthy_runs_raise_exactly_the_expected_alerts() {
    let mut differences = Vec::new();
    for (name, expected) in UNHEALTHY {
        let found = recording(name).alerts();
        if found != *expected {
            differences.push(format!("{name}: {found:?}, not {expected:?}"));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn every_rule_is_raised_by_a_recording_and_explained_in_the_table() {
    let table = include_str!("../doctor.rs");
    for rule in Rule::ALL {
        let name = rule.as_str();
        // No recorded run has rollout servers: `a_mismatch_of_three_steps_is_an_alert` covers that rule.
        let is_recorded = UNHEALTHY.iter().any(|(_, alerts)| alerts.iter().any(|(raised, _)| *raised == name));
        // Nor do they have episodes: `shares_of_episodes_are_alerts` covers those rules.
        let is_of_episodes = OF_EPISODES.iter().any(|(of, ..)| *of == rule);
        assert!(is_recorded || is_of_episodes || rule == Rule::RolloutMismatch, "{name} has no recording");
        assert!(table.contains(&format!("//! | `{name}` |")), "{name} is not in the table");
        assert_eq!(serde_json::to_value(rule).unwrap(), name);
    }
}

#[test]
fn an_alert_carries_numbers_steps_and_the_settings_to_change() {
    for (name, _) in UNHEALTHY {
        for (step, finding) in recording(name).findings() {
            let Finding::Raised(alert) = finding else { continue };
            let first = alert.evidence.first().expect("evidence");
            assert!(first.from_step <= first.to_step && first.to_step <= step, "{name}: {alert:?}");
            assert_eq!((alert.since_step, alert.step), (first.from_step, step), "{name}");
            assert!(alert.evidence.iter().all(|seen| seen.value.is_finite()), "{name}: {alert:?}");
            // Each fix names one of our settings or another remedy.
            let known = ["rloo.", "optimizer.", "sampling.", "max_concurrency", "SFT", "prompts"];
            assert!(known.iter().any(|word| alert.fix.contains(word)), "{}", alert.fix);
        }
    }
}

#[test]
fn a_doctor_restored_from_json_continues_unchanged() {
    let not_timed = |findings: Vec<(u64, Finding)>| -> Vec<(u64, Finding)> {
        let timed = |finding: &Finding| matches!(finding, Finding::Raised(alert) if alert.rule == Rule::SlowReward);
        findings.into_iter().filter(|(_, finding)| !timed(finding)).collect()
    };
    for (name, _) in UNHEALTHY {
        let recording = recording(name);
        let mut doctor = Doctor::default();
        let mut resumed = Vec::new();
        for (step, metrics) in &recording.metrics {
            resumed.extend(
                doctor.observe(*step, metrics, &recording.facts.input()).into_iter().map(|found| (*step, found)),
            );
            let stored = serde_json::to_string(&doctor).unwrap();
            // Durations depend on the machine, so they are not part of the trainer state.
            assert!(!stored.contains("step_time"), "{name}");
            doctor = serde_json::from_str(&stored).unwrap();
        }
        assert_eq!(not_timed(resumed), not_timed(recording.findings()), "{name}");
    }
}

/// Observes steps with one metric; the reward stays in the middle of its range.
fn observe_kl(doctor: &mut Doctor, step: u64, kl: f64, facts: &Facts) -> Vec<Finding> {
    let metrics = Metrics::from([("kl".to_owned(), Some(kl)), ("reward".to_owned(), Some(0.5))]);
    let findings = doctor.observe(step, &metrics, &facts.input());
    findings.into_iter().filter(|finding| !matches!(finding, Finding::Phase(_))).collect()
}

#[test]
fn an_alert_is_raised_once_an_episode_and_again_after_it_cleared() {
    let facts = facts();
    let mut doctor = Doctor::default();
    let mut told = Vec::new();
    let kls = [0.1, 0.1, 0.1, 4.0, 4.0, 4.0, 0.8, 0.8, 0.8, 0.1, 0.1, 0.1, 0.1, 5.0, 5.0];
    for (step, kl) in (1..).zip(kls) {
        for finding in observe_kl(&mut doctor, step, kl, &facts) {
            told.push(match finding {
                Finding::Raised(alert) => format!("{step} raised {}", alert.rule.as_str()),
                Finding::Cleared { rule, raised_step } => format!("{step} cleared {} of {raised_step}", rule.as_str()),
                Finding::Phase(_) => continue,
            });
        }
    }
    // 0.8 is between the thresholds, so nothing changes. The ten values before still contain the first episode at step 14.
    assert_eq!(told, ["4 raised kl_explosion", "11 cleared kl_explosion of 4", "15 raised kl_explosion"]);
}

#[test]
fn a_rule_that_is_off_raises_nothing_and_another_may_stop_the_run() {
    let mut facts = facts();
    facts.plan.doctor.rules.insert(Rule::KlExplosion, RulePlan { enabled: false, on_alert: None });
    let mut doctor = Doctor::default();
    assert!((1..6).all(|step| observe_kl(&mut doctor, step, 9.0, &facts).is_empty()));
    facts.plan.doctor.on_alert = OnAlert::Pause;
    facts.plan.doctor.rules.insert(Rule::KlExplosion, RulePlan { enabled: true, on_alert: Some(OnAlert::Stop) });
    let findings = observe_kl(&mut doctor, 6, 9.0, &facts);
    let [Finding::Raised(alert)] = findings.as_slice() else { panic!("{findings:?}") };
    assert_eq!((alert.on_alert, alert.severity), (OnAlert::Stop, Severity::Critical));
    assert_eq!(facts.input().on_alert(Rule::ColdStart), Some(OnAlert::Pause));
}

#[test]
fn without_a_known_range_the_rewards_seen_are_the_range() {
    // A service whose rewards are between −3 and 2. If all rewards are −3, that is not known to be the lowest until a
    // better one is seen.
    let facts = Facts { reward_range: None, ..facts() };
    let raised = |lowest: f64, highest: f64, mean: f64| -> Vec<&'static str> {
        let mut doctor = Doctor::default();
        let mut raised = Vec::new();
        for step in 1..=10 {
            let metrics = Metrics::from([
                ("reward".to_owned(), Some(mean)),
                ("reward_std".to_owned(), Some(0.1)),
                ("reward_min".to_owned(), Some(lowest)),
                ("reward_max".to_owned(), Some(highest)),
            ]);
            for finding in doctor.observe(step, &metrics, &facts.input()) {
                if let Finding::Raised(alert) = finding {
                    raised.push(alert.rule.as_str());
                }
            }
        }
        raised
    };
    assert_eq!(raised(-3.0, 2.0, -2.9), ["cold_start"]);
    assert_eq!(raised(-3.0, 2.0, 1.9), ["nothing_to_learn"]);
    assert_eq!(raised(-3.0, 2.0, 0.5), [""; 0]);
    assert_eq!(raised(0.0, 0.0, 0.0), ["cold_start"]);
    assert_eq!(raised(0.7, 0.7, 0.7), [""; 0]);
}

#[test]
fn a_falling_evaluation_beside_a_rising_reward_is_hacking_unless_it_is_noise() {
    let raised = |fall: f64, completions: f64| -> bool {
        let facts = Facts { eval_completions: completions, ..facts() };
        let mut doctor = Doctor::default();
        let mut raised = false;
        for step in 1..=30u64 {
            let reward = 0.3 + 0.02 * step as f64;
            let train = Metrics::from([("reward".to_owned(), Some(reward)), ("reward_std".to_owned(), Some(0.4))]);
            let mut findings = doctor.observe(step, &train, &facts.input());
            if step % 10 == 0 {
                let eval = 0.5 - fall * (step as f64 / 10.0 - 1.0);
                let eval =
                    Metrics::from([("eval_reward".to_owned(), Some(eval)), ("eval_reward_std".to_owned(), Some(0.5))]);
                findings.extend(doctor.observe(step, &eval, &facts.input()));
            }
            raised |= findings
                .iter()
                .any(|finding| matches!(finding, Finding::Raised(alert) if alert.rule == Rule::RewardHacking));
        }
        raised
    };
    assert!(raised(0.1, 256.0));
    // The evaluation stays the same or rises.
    assert!(!raised(0.0, 256.0) && !raised(-0.1, 256.0));
    // Eight completions cannot distinguish a fall of 0.2 from chance: twice the standard error is 0.5.
    assert!(!raised(0.1, 8.0));
}

#[test]
fn one_completion_a_prompt_is_no_tied_group() {
    let mut facts = facts();
    facts.plan.rloo.num_generations = NonZeroU32::MIN;
    let mut doctor = Doctor::default();
    for step in 1..=12 {
        let metrics =
            Metrics::from([("reward".to_owned(), Some(0.5)), ("frac_reward_zero_std_pre_kl".to_owned(), Some(1.0))]);
        let findings = doctor.observe(step, &metrics, &facts.input());
        assert!(!findings.iter().any(|finding| matches!(finding, Finding::Raised(_))), "{findings:?}");
    }
}

#[test]
fn a_mismatch_of_three_steps_is_an_alert() {
    let facts = facts();
    let mut doctor = Doctor::default();
    let mut raised = Vec::new();
    for (step, mismatch) in
        (1..).zip([0.02, 0.02, 0.005, 0.02, 0.03, 0.04, 0.04, 0.004, 0.003, 0.002, 0.02, 0.02, 0.02])
    {
        let metrics = Metrics::from([("sampling/mismatch_kl".to_owned(), Some(mismatch))]);
        for finding in doctor.observe(step, &metrics, &facts.input()) {
            match finding {
                Finding::Raised(alert) => raised.push((step, alert.rule, alert.since_step)),
                Finding::Cleared { rule, raised_step } => raised.push((step, rule, raised_step)),
                Finding::Phase(_) => {}
            }
        }
    }
    let rule = Rule::RolloutMismatch;
    assert_eq!(raised, [(6, rule, 4), (10, rule, 6), (13, rule, 11)]);
}

/// A metric with a value that raises an alert and one that clears it.
type Values = (&'static str, f64, f64);

/// The rules of episodes, each with its window and its metrics.
const OF_EPISODES: [(Rule, usize, [Values; 2]); 5] = [
    (Rule::InvalidCalls, 5, [("environment/parse_error_fraction", 0.21, 0.09), ("reward", 0.5, 0.5)]),
    (Rule::MostlyContext, 5, [("environment/masked_fraction", 0.91, 0.84), ("reward", 0.5, 0.5)]),
    (Rule::EpisodesAtLimits, 5, [("environment/at_limit_fraction", 1.0, 0.8), ("reward", 0.5, 0.5)]),
    (Rule::NoToolCalls, 10, [("tools/call_frequency", 0.0, 0.25), ("tools/offered", 1.0, 1.0)]),
    (Rule::ForgottenEpisodes, 5, [("environment/restart_fraction", 0.06, 0.01), ("reward", 0.5, 0.5)]),
];

#[test]
fn shares_of_episodes_are_alerts() {
    let facts = facts();
    for (rule, window, metrics) in OF_EPISODES {
        let mut doctor = Doctor::default();
        let mut observe = |step: u64, calm: bool| -> Vec<(Rule, bool)> {
            let value = |(name, high, low): &Values| ((*name).to_owned(), Some(if calm { *low } else { *high }));
            let findings = doctor.observe(step, &metrics.iter().map(value).collect(), &facts.input());
            let seen = findings.into_iter().filter_map(|finding| match finding {
                Finding::Raised(alert) => Some((alert.rule, true)),
                Finding::Cleared { rule, .. } => Some((rule, false)),
                Finding::Phase(_) => None,
            });
            seen.filter(|(seen, _)| *seen == rule).collect()
        };
        let steps = window as u64;
        for step in 1..steps {
            assert_eq!(observe(step, false), [], "{rule:?} at step {step}");
        }
        assert_eq!(observe(steps, false), [(rule, true)]);
        assert_eq!(observe(steps + 1, false), [], "an alert is raised once");
        let cleared = (1..=2 * steps).find(|step| observe(steps + 1 + step, true) == [(rule, false)]);
        assert!(cleared.is_some(), "{rule:?} is cleared");
    }
    // Episodes without tools have no calls to miss.
    let mut doctor = Doctor::default();
    let metrics =
        Metrics::from([("tools/call_frequency".to_owned(), Some(0.0)), ("tools/offered".to_owned(), Some(0.0))]);
    assert!((1..30).all(|step| doctor.observe(step, &metrics, &facts.input()).is_empty()));
}
