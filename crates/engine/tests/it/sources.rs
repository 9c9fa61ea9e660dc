//! Training on several sources: checks rows, shares and metrics of each source, and that a resumed run
//! gives the same bytes.

use std::collections::BTreeMap;

use rlood_types::event::SamplePhase;
use rlood_types::rollout::RewardValue;
use rlood_types::spec::{EvalPlan, Plan, SourcePlan};

use crate::train::{Start, TestHost, plan, rows, train};

/// Rows 0 to 4 and 5 to 7; three prompts of the first source to one of the second.
fn mixed() -> Plan {
    let mut plan = plan();
    let source = |name: &str, num_rows, weight| SourcePlan { name: name.to_owned(), num_rows, weight };
    plan.dataset.sources = vec![source("large", 5, 3.0), source("small", 3, 1.0)];
    plan.training.max_steps = 12;
    plan.checkpoints.every_steps = 1;
    plan
}

/// A reward of 1 for the small source's rows, and a function of the completion's bytes for the others.
fn host() -> TestHost {
    TestHost::scoring(|sample| match sample.source.as_deref() {
        Some("small") => RewardValue::Number(1.0),
        Some("large") => RewardValue::Number(f64::from(sample.completion.bytes().map(u32::from).sum::<u32>() % 7)),
        other => panic!("{other:?}"),
    })
}

fn trained(plan: &Plan, start: Start) -> TestHost {
    let mut host = host();
    assert_eq!(train(plan, rows(), start, &mut host).expect("trains"), None);
    host
}

#[test]
fn prompts_follow_the_weights_of_the_sources_and_metrics_are_per_source() {
    let plan = mixed();
    let host = trained(&plan, Start::default());
    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    for (_, samples) in &host.requests {
        for sample in samples.iter().step_by(2) {
            let row: u64 = sample.prompt_id["row_".len()..].parse().unwrap();
            assert_eq!(sample.source.as_deref(), Some(if row < 5 { "large" } else { "small" }));
            *seen.entry(if row < 5 { "large" } else { "small" }).or_default() += 1;
        }
    }
    // 24 prompts in blocks of two: epochs of 5 + 1⅔.
    assert!((17..=19).contains(&seen["large"]), "{seen:?}");
    for (step, metrics) in host.metrics(SamplePhase::Train) {
        let value = |name: &str| metrics.get(name).copied().flatten();
        let shares = [value("sources/large/share").unwrap(), value("sources/small/share").unwrap()];
        assert_eq!(shares.iter().sum::<f64>(), 1.0);
        assert_eq!(value("sampling/log_ratio_max"), Some(0.0), "step {step}");
        if shares[1] == 0.0 {
            assert_eq!(metrics.get("sources/small/reward"), None, "step {step}: nothing of it was asked");
            continue;
        }
        assert_eq!(value("sources/small/reward"), Some(1.0));
        assert_eq!(value("sources/small/frac_reward_zero_std_pre_kl"), Some(1.0));
        if shares[0] > 0.0 {
            let large = value("sources/large/reward").unwrap();
            assert!((shares[0] * large + shares[1] - value("reward").unwrap()).abs() < 1e-12, "step {step}");
        }
        assert!(value("sources/small/completions/mean_length").unwrap() > 0.0);
    }
    let epochs: Vec<f64> =
        host.metrics(SamplePhase::Train).iter().map(|(_, metrics)| metrics["epoch"].unwrap()).collect();
    assert!(epochs.windows(2).all(|pair| pair[0] < pair[1]) && epochs[2] == 1.0, "{epochs:?}");
}

#[test]
fn resuming_from_every_step_gives_the_same_bytes_and_metrics() {
    let plan = mixed();
    let whole = trained(&plan, Start::default());
    let metrics = whole.comparable_metrics();
    for saved in &whole.saved[..11] {
        let rest = trained(&plan, Start { resume: Some(saved.dir.clone()), ..Start::default() });
        assert!(rest.saved.last().unwrap().adapter() == whole.saved[11].adapter(), "resumed from step {}", saved.step);
        assert_eq!(rest.comparable_metrics(), metrics[saved.step as usize..], "resumed from step {}", saved.step);
    }
    let mut other = mixed();
    other.dataset.sources[1].weight = 2.0;
    let mut host = host();
    let start = Start { resume: Some(whole.saved[3].dir.clone()), ..Start::default() };
    train(&other, rows(), start, &mut host).expect_err("other weights are another run");
}

#[test]
fn held_out_rows_are_distinguished_too() {
    let mut plan = mixed();
    plan.eval = Some(EvalPlan { fraction: Some(0.25), ..EvalPlan::of_dataset(plan.dataset.clone(), 6) });
    let host = trained(&plan, Start::default());
    let held_out: Vec<&str> = host
        .requests
        .iter()
        .filter(|(id, _)| id.phase == SamplePhase::Eval && id.step == 0)
        .flat_map(|(_, samples)| samples.iter().map(|sample| sample.prompt_id.as_str()))
        .collect();
    assert_eq!(held_out.len(), 2);
    let trains_one = host.requests.iter().filter(|(id, _)| id.phase == SamplePhase::Train);
    assert!(trains_one.flat_map(|(_, samples)| samples).all(|sample| !held_out.contains(&sample.prompt_id.as_str())));
    let metrics = host.metrics(SamplePhase::Eval);
    let share = |name: &str| metrics[0].1[&format!("eval_sources/{name}/share")].unwrap();
    assert_eq!(share("large") + share("small"), 1.0);
}
