//! Tests of stored alerts, training phases and ends of jobs, and of pinned checkpoints.

use rlood_store::{Claimed, TaskKind};
use rlood_types::doctor::{Alert, Observation, OnAlert, PhaseChange, Rule, Severity, TrainingPhase};
use rlood_types::event::{Event, Metrics};
use rlood_types::job::{EndingCode, State};
use rlood_types::protocol::{EventBatch, Outcome};
use rlood_types::spec::{CheckpointPlan, DatasetPlan, EvalPlan};

use crate::setting::{Setting, T0, failure, plan};

fn batch(attempt: u64, number: u64, events: Vec<Event>) -> EventBatch {
    EventBatch { attempt, batch: number, events, log: Vec::new() }
}

fn alert(rule: Rule, step: u64, since_step: u64, on_alert: OnAlert) -> Event {
    let seen = Observation {
        metric: "kl".to_owned(),
        statistic: "mean".to_owned(),
        value: 2.5,
        limit: Some(1.0),
        from_step: since_step,
        to_step: step,
    };
    Event::Alert {
        alert: Alert {
            rule,
            severity: Severity::Critical,
            step,
            since_step,
            message: "it drifts".to_owned(),
            evidence: vec![seen],
            fix: "raise rloo.beta".to_owned(),
            on_alert,
            ends: Vec::new(),
        },
    }
}

fn phase(phase: TrainingPhase, step: u64) -> Event {
    Event::TrainingPhase { change: PhaseChange { phase, from: None, step, evidence: Vec::new() } }
}

fn metrics(name: &str, value: f64) -> Metrics {
    Metrics::from([(name.to_owned(), Some(value))])
}

async fn claimed(setting: &Setting, checkpoints: CheckpointPlan) -> Claimed {
    let mut plan = plan(setting.dataset);
    plan.checkpoints = checkpoints;
    setting.job_of(&plan, 0, T0).await.unwrap();
    let worker = setting.worker().await;
    setting.claim(worker, T0).await.unwrap()
}

fn keeps(keep_last: u32, keep_best: u32, metric: &str, greater_is_better: bool) -> CheckpointPlan {
    CheckpointPlan {
        every_steps: 1,
        every_seconds: None,
        keep_last,
        keep_best,
        metric_for_best: Some(metric.to_owned()),
        greater_is_better: Some(greater_is_better),
    }
}

#[tokio::test]
async fn alerts_and_phases_are_stored_reported_and_rewound_with_their_steps() {
    let setting = Setting::new().await;
    let first = claimed(&setting, keeps(2, 1, "reward", true)).await;
    let (job, store) = (first.job, &setting.store);
    let events = vec![
        phase(TrainingPhase::Exploration, 2),
        alert(Rule::KlExplosion, 3, 2, OnAlert::Note),
        alert(Rule::ColdStart, 5, 1, OnAlert::Note),
        phase(TrainingPhase::Convergence, 5),
        Event::AlertCleared { rule: Rule::KlExplosion, raised_step: 3, step: 6 },
    ];
    store.events_append(job, &batch(1, 0, events), T0).await.unwrap();
    let told = ["job.created", "job.started", "training_phase", "alert", "alert", "training_phase", "alert_cleared"];
    assert_eq!(setting.history(job).await, told);
    let event = &store.event_page(job, 3, 1).await.unwrap()[0];
    assert_eq!(
        (&event.data["rule"], &event.data["step"], &event.data["fix"]),
        (&"kl_explosion".into(), &3.into(), &"raise rloo.beta".into())
    );
    assert_eq!(event.data["evidence"][0]["limit"], 1.0);

    let listed = |only_active| async move {
        let alerts = store.alert_list(job, only_active).await.unwrap();
        alerts.into_iter().map(|row| (row.alert.rule, row.alert.step, row.cleared_step)).collect::<Vec<_>>()
    };
    assert_eq!(listed(false).await, [(Rule::ColdStart, 5, None), (Rule::KlExplosion, 3, Some(6))]);
    assert_eq!(listed(true).await, [(Rule::ColdStart, 5, None)]);
    assert_eq!(store.training_phase(job).await.unwrap().unwrap().phase, TrainingPhase::Convergence);

    // Back to step 4: reports on later steps are deleted, and will be sent again.
    setting.publish(&first, 4, &Metrics::new()).await.unwrap();
    store.job_finish(job, 1, Outcome::Requeued, T0).await.unwrap();
    let worker = setting.worker().await;
    setting.claim(worker, T0).await.unwrap();
    assert_eq!(listed(false).await, [(Rule::KlExplosion, 3, None)]);
    assert_eq!(store.training_phase(job).await.unwrap().unwrap().phase, TrainingPhase::Exploration);
}

#[tokio::test]
async fn a_job_that_an_alert_ended_has_the_checkpoint_from_before_as_its_result() {
    let setting = Setting::new().await;
    let claimed = claimed(&setting, keeps(3, 0, "reward", true)).await;
    let (job, store) = (claimed.job, &setting.store);
    for step in [2, 4, 6] {
        setting.publish(&claimed, step, &metrics("reward", 0.1 * step as f64)).await.unwrap();
    }
    store.events_append(job, &batch(1, 0, vec![alert(Rule::KlExplosion, 7, 5, OnAlert::Stop)]), T0).await.unwrap();
    store.job_finish(job, 1, Outcome::Failed { failure: failure("alert_stop") }, T0).await.unwrap();
    let row = store.job_get(job).await.unwrap();
    let ending = row.ending.unwrap();
    assert_eq!((row.state, ending.code, ending.rule), (State::Failed, EndingCode::Alert, Some(Rule::KlExplosion)));
    let result = |ending| async move { store.checkpoint_result(job, ending).await.unwrap().map(|row| row.step) };
    assert_eq!(result(Some(&ending)).await, Some(4));
    assert_eq!(result(None).await, Some(6));
}

#[tokio::test]
async fn a_hopeless_run_that_an_alert_ended_keeps_its_newest_checkpoint() {
    // A run without any reward has not damaged its weights.
    let setting = Setting::new().await;
    let claimed = claimed(&setting, keeps(3, 0, "reward", true)).await;
    let (job, store) = (claimed.job, &setting.store);
    setting.publish(&claimed, 6, &Metrics::new()).await.unwrap();
    store.events_append(job, &batch(1, 0, vec![alert(Rule::ColdStart, 10, 1, OnAlert::Stop)]), T0).await.unwrap();
    store.job_finish(job, 1, Outcome::Failed { failure: failure("alert_stop") }, T0).await.unwrap();
    let ending = store.job_get(job).await.unwrap().ending.unwrap();
    assert_eq!(ending.good_before_step, None);
    assert_eq!(store.checkpoint_result(job, Some(&ending)).await.unwrap().unwrap().step, 6);
}

#[tokio::test]
async fn a_job_that_diverged_has_the_checkpoint_before_the_bad_weights_as_its_result() {
    let setting = Setting::new().await;
    let claimed = claimed(&setting, keeps(5, 0, "reward", true)).await;
    let (job, store) = (claimed.job, &setting.store);
    for step in [1, 2, 3] {
        setting.publish(&claimed, step, &Metrics::new()).await.unwrap();
    }
    // The weights of step 3 gave the first non-finite loss, that of step 4.
    store.events_append(job, &batch(1, 0, vec![Event::Diverged { first_step: 4, step: 6 }]), T0).await.unwrap();
    store.job_finish(job, 1, Outcome::Failed { failure: failure("diverged") }, T0).await.unwrap();
    let ending = store.job_get(job).await.unwrap().ending.unwrap();
    assert_eq!(ending.code, EndingCode::Diverged);
    assert_eq!(store.checkpoint_result(job, Some(&ending)).await.unwrap().unwrap().step, 2);
    let history = setting.history(job).await;
    assert_eq!(history[history.len() - 2..], ["diverged", "job.failed"]);
}

#[tokio::test]
async fn a_job_that_ended_early_succeeded_with_a_reason_and_its_best_checkpoint() {
    let setting = Setting::new().await;
    let claimed = claimed(&setting, keeps(2, 1, "eval_reward", true)).await;
    let (job, store) = (claimed.job, &setting.store);
    for (step, reward) in [(1, 0.3), (2, 0.9), (3, 0.5), (4, 0.4)] {
        setting.publish(&claimed, step, &metrics("eval_reward", reward)).await.unwrap();
    }
    let stop = Event::EarlyStopping {
        step: 4,
        metric: "eval_reward".to_owned(),
        best: Some(0.9),
        best_step: Some(2),
        evaluations: 2,
    };
    store.events_append(job, &batch(1, 0, vec![stop]), T0).await.unwrap();
    store.job_finish(job, 1, Outcome::Succeeded, T0).await.unwrap();
    let row = store.job_get(job).await.unwrap();
    assert_eq!((row.state, row.status_reason.as_deref()), (State::Succeeded, Some("early_stopping")));
    let ending = row.ending.unwrap();
    assert!(ending.message.contains("eval_reward has had no new best for 2 evaluations"), "{}", ending.message);
    let result = store.checkpoint_result(job, Some(&ending)).await.unwrap().unwrap();
    assert_eq!((result.step, result.best), (2, true));
    let history = setting.history(job).await;
    assert_eq!(history[history.len() - 2..], ["early_stopping", "job.succeeded"]);
}

#[tokio::test]
async fn the_best_checkpoint_follows_the_plan_s_metric_and_direction() {
    let setting = Setting::new().await;
    let claimed = claimed(&setting, keeps(1, 1, "eval_gap", false)).await;
    for (step, gap) in [(1, 0.3), (2, 0.1), (3, 0.2), (4, 0.15)] {
        let mut of_step = metrics("eval_gap", gap);
        of_step.insert("eval_reward".to_owned(), Some(gap));
        setting.publish(&claimed, step, &of_step).await.unwrap();
    }
    // A checkpoint without an evaluation does not count.
    setting.publish(&claimed, 5, &metrics("reward", 1.0)).await.unwrap();
    let store = &setting.store;
    let steps: Vec<u64> = store.checkpoint_list(claimed.job).await.unwrap().iter().map(|row| row.step).collect();
    assert_eq!(steps, [5, 2]);
    assert_eq!(store.checkpoint_best(claimed.job).await.unwrap().unwrap().step, 2);
}

#[tokio::test]
async fn a_pinned_checkpoint_is_kept_until_it_is_unpinned() {
    let setting = Setting::new().await;
    let claimed = claimed(&setting, keeps(1, 0, "reward", true)).await;
    let (job, store) = (claimed.job, &setting.store);
    let first = setting.publish(&claimed, 1, &Metrics::new()).await.unwrap();
    assert!(store.checkpoint_pin(first.id, true, T0).await.unwrap().pinned);
    assert!(store.checkpoint_pin(first.id, true, T0).await.unwrap().pinned);
    let steps = || async { store.checkpoint_list(job).await.unwrap().iter().map(|row| row.step).collect::<Vec<_>>() };
    for step in 2..=4 {
        setting.publish(&claimed, step, &Metrics::new()).await.unwrap();
    }
    assert_eq!(steps().await, [4, 1]);
    assert!(!store.checkpoint_pin(first.id, false, T0).await.unwrap().pinned);
    assert_eq!(steps().await, [4, 1]);
    let removed = setting.publish(&claimed, 5, &Metrics::new()).await.unwrap().removed;
    assert_eq!(removed.iter().map(|row| row.step).collect::<Vec<_>>(), [4, 1]);
    assert_eq!(steps().await, [5]);
    // Each change is reported once: repeating a pin has no effect.
    let history = setting.history(job).await;
    let pins: Vec<&String> = history.iter().filter(|kind| kind.contains("pinned")).collect();
    assert_eq!(pins, ["checkpoint.pinned", "checkpoint.unpinned"]);
}

#[tokio::test]
async fn the_automatic_verdict_judges_the_result_of_the_job() {
    let eval = |dataset| EvalPlan::of_dataset(DatasetPlan::new(dataset, "d1".to_owned(), 8), 1);
    for (ending, expected) in [
        (None, 6),
        (Some(alert(Rule::KlExplosion, 7, 5, OnAlert::Stop)), 4),
        (Some(alert(Rule::KlExplosion, 7, 1, OnAlert::Stop)), 0),
    ] {
        let setting = Setting::new().await;
        let mut plan = plan(setting.dataset);
        plan.checkpoints = keeps(3, 1, "reward", true);
        plan.eval = Some(eval(setting.dataset));
        setting.job_of(&plan, 0, T0).await.unwrap();
        let worker = setting.worker().await;
        let claimed = setting.claim(worker, T0).await.unwrap();
        let store = setting.store.clone().with_verdicts(true);
        // The best checkpoint by the metric is the one that the alert's evidence damages.
        for (step, reward) in [(2, 0.1), (4, 0.2), (6, 0.9), (7, 0.3)] {
            setting.publish(&claimed, step, &metrics("reward", reward)).await.unwrap();
        }
        store.events_append(claimed.job, &batch(1, 0, ending.into_iter().collect()), T0).await.unwrap();
        store.job_finish(claimed.job, 1, Outcome::Succeeded, T0).await.unwrap();
        let verdict = store.task_newest(TaskKind::Verdict, claimed.job).await.unwrap();
        assert_eq!(verdict.map_or(0, |verdict| verdict.step), expected);
    }
}
