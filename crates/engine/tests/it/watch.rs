//! Evaluation on held-out rows, the best checkpoint, early stopping and alert rules, in the loop.

use std::collections::BTreeSet;

use rlood_engine::error::EngineError;
use rlood_engine::host::{PromptRow, StopReason};
use rlood_types::doctor::{OnAlert, Rule};
use rlood_types::event::{Event, SamplePhase};
use rlood_types::rollout::RewardValue;
use rlood_types::spec::{
    EarlyStoppingPlan, EvalPlan, Plan, PromptKey, RulePlan, held_out_rows, metric_names, prompt_key,
};

use crate::train::{Start, TestHost, plan, reward, rows, train};

/// A plan that evaluates two prompts every step.
fn evaluated() -> (Plan, Vec<PromptRow>) {
    let mut plan = plan();
    plan.eval = Some(EvalPlan::of_dataset(plan.dataset.clone(), 1));
    plan.training.max_steps = 8;
    plan.checkpoints.keep_best = 1;
    plan.checkpoints.metric_for_best = Some("eval_reward".to_owned());
    plan.checkpoints.greater_is_better = Some(true);
    (plan, rows()[..2].to_vec())
}

fn start(eval_rows: &[PromptRow], resume: Option<std::path::PathBuf>) -> Start {
    Start { resume, eval_rows: eval_rows.to_vec(), ..Start::default() }
}

/// A host that scores the n-th evaluation (from 0) from a table, and training completions by their text.
fn host_with_evaluations(values: &'static [f64], first: usize) -> TestHost {
    // Every evaluation scores two completions; a training step scores four.
    let mut scored = 0;
    let mut host = TestHost::default();
    let mut inner = std::mem::replace(&mut host.score, Box::new(|_| RewardValue::Missing));
    host.score = Box::new(move |sample| {
        let of_cycle = scored % 6;
        let evaluation = first + scored / 6;
        scored += 1;
        match of_cycle {
            0 | 1 => RewardValue::Number(values.get(evaluation).copied().unwrap_or(0.0)),
            _ => inner(sample),
        }
    });
    host
}

#[test]
fn held_out_rows_are_evaluated_and_never_trained() {
    let mut plan = plan();
    plan.eval = Some(EvalPlan {
        fraction: Some(0.25),
        held_out_rows: Some(2),
        ..EvalPlan::of_dataset(plan.dataset.clone(), 2)
    });
    plan.training.max_steps = 9;
    let mut host = TestHost::default();
    assert_eq!(train(&plan, rows(), Start::default(), &mut host).expect("trains"), None);
    let ids = |phase: SamplePhase| -> BTreeSet<String> {
        host.samples().into_iter().filter(|sample| sample.phase == phase).map(|sample| sample.prompt_id).collect()
    };
    let keys: Vec<PromptKey> = rows().iter().map(|row| prompt_key(&row.prompt)).collect();
    let expected: BTreeSet<String> = held_out_rows(plan.arithmetic.split, &keys, 0.25, plan.training.seed)
        .iter()
        .map(|row| format!("row_{row}"))
        .collect();
    assert_eq!((expected.len(), ids(SamplePhase::Eval)), (2, expected.clone()));
    // Nine steps of two prompts are three passes over the other six rows.
    assert_eq!(ids(SamplePhase::Train).len(), 6);
    assert!(ids(SamplePhase::Train).is_disjoint(&expected));
    let evaluations: Vec<u64> = host.metrics(SamplePhase::Eval).iter().map(|(step, _)| *step).collect();
    assert_eq!(evaluations, [0, 2, 4, 6, 8, 9]);
}

#[test]
fn an_evaluation_reports_its_gap_and_every_promised_metric_is_there() {
    let (mut plan, eval_rows) = evaluated();
    plan.training.max_steps = 2;
    let mut host = TestHost::default();
    train(&plan, rows(), start(&eval_rows, None), &mut host).expect("trains");
    let (train_metrics, eval_metrics) = (host.metrics(SamplePhase::Train), host.metrics(SamplePhase::Eval));
    let value = |of: &[(u64, rlood_types::event::Metrics)], index: usize, name: &str| of[index].1[name].unwrap();
    assert!(!eval_metrics[0].1.contains_key("eval_gap"), "nothing was trained yet");
    let trained = (value(&train_metrics, 0, "reward") + value(&train_metrics, 1, "reward")) / 2.0;
    let gap = trained - value(&eval_metrics, 2, "eval_reward");
    assert!((value(&eval_metrics, 2, "eval_gap") - gap).abs() < 1e-12);
    for name in metric_names(&plan.rewards, Some(&plan.rewards), plan.rloo.needs_reference()) {
        let of_kind = if name.starts_with("eval_") { &eval_metrics } else { &train_metrics };
        assert!(of_kind.last().expect("a step").1.contains_key(&name), "{name} is promised and not reported");
    }
    // B is zero at first, so the first update makes the first difference.
    let delta = value(&train_metrics, 0, "adapter/delta_norm");
    assert!(delta > 0.0 && delta < value(&train_metrics, 1, "adapter/delta_norm"), "{delta}");
}

#[test]
fn the_evaluation_has_rewards_of_its_own() {
    let (mut plan, eval_rows) = evaluated();
    plan.training.max_steps = 1;
    let mut own = reward("own");
    own.weight = 2.0;
    plan.eval.as_mut().expect("an evaluation").rewards = Some(vec![own]);
    let mut host = scoring(0.25);
    train(&plan, rows(), start(&eval_rows, None), &mut host).expect("trains");
    let (_, metrics) = &host.metrics(SamplePhase::Eval)[1];
    assert_eq!((metrics["eval_reward"], metrics["eval_rewards/own/mean"]), (Some(0.5), Some(0.25)));
    assert!(!metrics.contains_key("eval_rewards/score/mean"));
    // Evaluation and training use different rewards, so there is no gap between them.
    assert!(!metrics.contains_key("eval_gap"));
    let eval = host.samples().into_iter().find(|sample| sample.phase == SamplePhase::Eval).expect("a sample");
    assert_eq!(eval.rewards.keys().collect::<Vec<_>>(), ["own"]);
}

#[test]
fn the_best_evaluation_is_saved_between_two_checkpoints() {
    let (plan, eval_rows) = evaluated();
    // A checkpoint every 100 steps and at the last one, and after each evaluation that is better than all before.
    let mut host = host_with_evaluations(&[0.1, 0.5, 0.3, 0.5, 0.7, 0.2, 0.2, 0.2, 0.2], 0);
    train(&plan, rows(), start(&eval_rows, None), &mut host).expect("trains");
    assert_eq!(host.saved.iter().map(|saved| saved.step).collect::<Vec<_>>(), [1, 4, 8]);
    let mut without = plan.clone();
    without.checkpoints.keep_best = 0;
    let mut host = host_with_evaluations(&[0.1, 0.5, 0.3, 0.5, 0.7, 0.2, 0.2, 0.2, 0.2], 0);
    train(&without, rows(), start(&eval_rows, None), &mut host).expect("trains");
    assert_eq!(host.saved.iter().map(|saved| saved.step).collect::<Vec<_>>(), [8]);
}

fn early_stops(host: &TestHost) -> Vec<(u64, Option<u64>, u32)> {
    let stops = host.events.iter().filter_map(|event| match event {
        Event::EarlyStopping { step, best_step, evaluations, .. } => Some((*step, *best_step, *evaluations)),
        _ => None,
    });
    stops.collect()
}

#[test]
fn early_stopping_counts_evaluations_without_a_new_best_also_across_a_resume() {
    const VALUES: &[f64] = &[0.1, 0.5, 0.52, 0.51, 0.53, 0.9, 0.9, 0.9, 0.9];
    let (mut plan, eval_rows) = evaluated();
    plan.checkpoints.every_steps = 1;
    plan.early_stopping = Some(EarlyStoppingPlan {
        metric: "eval_reward".to_owned(),
        greater_is_better: true,
        patience: 3,
        min_delta: 0.05,
    });
    let mut whole = host_with_evaluations(VALUES, 0);
    assert_eq!(train(&plan, rows(), start(&eval_rows, None), &mut whole).expect("ends"), None);
    // 0.52, 0.51 and 0.53 are no progress of more than 0.05 over 0.5.
    assert_eq!(early_stops(&whole), [(4, Some(1), 3)]);
    let last = whole.saved.last().expect("a checkpoint");
    assert!(last.step == 4 && last.last);

    // After the checkpoint of step 2, two more evaluations end the run; the counter is part of the state.
    let resume = whole.saved.iter().find(|saved| saved.step == 2).map(|saved| saved.dir.clone());
    let mut rest = host_with_evaluations(VALUES, 2);
    // A resumed run begins with the training of step 3: the first evaluation of the cycle already ran.
    let _ = [(rest.score)(&sample()), (rest.score)(&sample())];
    train(&plan, rows(), start(&eval_rows, resume), &mut rest).expect("ends");
    assert_eq!(early_stops(&rest), [(4, Some(1), 3)]);
    assert!(rest.saved.last().expect("a checkpoint").adapter() == last.adapter());

    // Resumed from its own last checkpoint, the run ends immediately, and reports the early stop again.
    let mut over = TestHost::default();
    train(&plan, rows(), start(&eval_rows, Some(last.dir.clone())), &mut over).expect("ends");
    assert_eq!(early_stops(&over), [(4, Some(1), 3)]);
    assert!(over.metrics(SamplePhase::Train).is_empty());
}

fn sample() -> rlood_types::rollout::RewardSample {
    rlood_types::rollout::RewardSample {
        sample_id: String::new(),
        group_id: String::new(),
        prompt_id: String::new(),
        source: None,
        prompt: String::new(),
        messages: None,
        completion: String::new(),
        finish_reason: rlood_types::event::FinishReason::Stop,
        num_tokens: 1,
        completion_ids: None,
        columns: serde_json::Map::new(),
        episode: None,
    }
}

/// A plan in which no reward exceeds the floor: raises `cold_start` at step 10.
fn hopeless(on_alert: OnAlert) -> Plan {
    let mut plan = plan();
    plan.training.max_steps = 14;
    // The tiny model's text triggers other rules, so only the rule in question is enabled.
    for rule in Rule::ALL {
        let enabled = rule == Rule::ColdStart;
        plan.doctor.rules.insert(rule, RulePlan { enabled, on_alert: enabled.then_some(on_alert) });
    }
    plan
}

fn scoring(value: f64) -> TestHost {
    let mut host = TestHost::default();
    host.score = Box::new(move |_| RewardValue::Number(value));
    host
}

/// A host whose reward is 0; `length`, the plan's other reward, is at least −0.5.
fn zero() -> TestHost {
    scoring(-0.5)
}

fn alerts(host: &TestHost) -> Vec<(Rule, u64)> {
    let alerts = host.events.iter().filter_map(|event| match event {
        Event::Alert { alert } => Some((alert.rule, alert.step)),
        _ => None,
    });
    alerts.collect()
}

#[test]
fn a_logged_alert_is_reported_and_the_run_continues() {
    let mut host = zero();
    let outcome = train(&hopeless(OnAlert::Note), rows(), Start::default(), &mut host);
    assert_eq!(outcome.expect("trains"), None);
    assert_eq!(alerts(&host), [(Rule::ColdStart, 10)]);
}

#[test]
fn an_alert_pauses_the_run_once() {
    let plan = hopeless(OnAlert::Pause);
    let mut first = zero();
    let paused = Some(StopReason::Pause { reason: Some("alert:cold_start".to_owned()) });
    assert_eq!(train(&plan, rows(), Start::default(), &mut first).expect("pauses"), paused);
    assert_eq!(alerts(&first), [(Rule::ColdStart, 10)]);
    let saved = first.saved.last().expect("a checkpoint");
    assert_eq!(saved.step, 10);
    // The same episode continues, so it does not pause the run again.
    let mut second = zero();
    let start = Start { resume: Some(saved.dir.clone()), ..Start::default() };
    assert_eq!(train(&plan, rows(), start, &mut second).expect("resumes"), None);
    assert_eq!(alerts(&second), []);
}

#[test]
fn an_alert_ends_the_run_and_writes_nothing_more() {
    let mut plan = hopeless(OnAlert::Stop);
    plan.checkpoints.every_steps = 4;
    let mut host = zero();
    let error = train(&plan, rows(), Start::default(), &mut host).expect_err("ends");
    assert!(matches!(error, EngineError::Alert { rule: Rule::ColdStart, step: 10, .. }), "{error}");
    assert_eq!(host.saved.iter().map(|saved| saved.step).collect::<Vec<_>>(), [4, 8]);
}

#[test]
fn a_resumed_run_raises_the_same_alerts_as_an_uninterrupted_one() {
    let mut plan = hopeless(OnAlert::Note);
    plan.checkpoints.every_steps = 1;
    let mut whole = zero();
    train(&plan, rows(), Start::default(), &mut whole).expect("trains");
    for saved in &whole.saved[..13] {
        let mut rest = zero();
        let start = Start { resume: Some(saved.dir.clone()), ..Start::default() };
        train(&plan, rows(), start, &mut rest).expect("resumes");
        let expected: &[(Rule, u64)] = if saved.step < 10 { &[(Rule::ColdStart, 10)] } else { &[] };
        assert_eq!(alerts(&rest), expected, "resumed from step {}", saved.step);
        let last = whole.saved.last().expect("a checkpoint");
        assert!(rest.saved.last().expect("a checkpoint").adapter() == last.adapter());
    }
}
