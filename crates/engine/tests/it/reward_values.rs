//! Runs with rewards that are missing, not finite, or too large.

use rlood_engine::error::EngineError;
use rlood_types::event::SamplePhase;
use rlood_types::rollout::{RewardSample, RewardValue};
use rlood_types::spec::{Combine, RewardNormalization};

use crate::train::{Start, TestHost, plan, reward, rows, run, train};

#[test]
fn rewards_whose_squares_overflow_end_the_run_before_training() {
    for (normalization, combine, value, what) in [
        (RewardNormalization::Running, Combine::Renormalize, 1e200, "computes of the rewards"),
        (RewardNormalization::Batch, Combine::Renormalize, 1e200, "computes of the rewards"),
        (
            RewardNormalization::None,
            Combine::Nansum,
            f64::MAX,
            "the weighted sum of the rewards of a completion of row",
        ),
    ] {
        // A plan from before the limit `max_abs_reward` existed.
        let mut plan = plan();
        plan.rloo.reward_normalization = normalization;
        plan.rloo.combine = combine;
        plan.rewards = vec![reward("a")];
        plan.rewards[0].weight = 2.0;
        let mut sign = -1.0;
        let mut host = TestHost::scoring(move |_| {
            sign = -sign;
            RewardValue::Number(sign * value)
        });
        let error = train(&plan, rows(), Start::default(), &mut host).unwrap_err();
        assert!(matches!(&error, EngineError::StateNotFinite { what: named } if named.contains(what)), "{error}");
        assert!(host.metrics(SamplePhase::Train).is_empty(), "no step was done");
    }
}

#[test]
fn rows_with_a_blank_reference_train_nothing_and_the_run_continues() {
    let plan = plan();
    // Every other prompt has no value.
    let blank = |sample: &RewardSample| sample.prompt_id.ends_with(['1', '3', '5', '7', '9']);
    let mut count = 0.0;
    let mut host = TestHost::scoring(move |sample| {
        count += 1.0;
        if blank(sample) { RewardValue::NotApplicable } else { RewardValue::Number(count) }
    });
    run(&plan, &mut host);
    let samples = host.samples();
    let (without, with): (Vec<_>, Vec<_>) =
        samples.iter().partition(|sample| sample.prompt_id.ends_with(['1', '3', '5', '7', '9']));
    assert!(!without.is_empty() && !with.is_empty());
    assert!(without.iter().all(|sample| sample.reward.is_none() && sample.advantage == Some(0.0)));
    assert!(
        with.iter().all(|sample| sample.reward.is_some()) && with.iter().any(|sample| sample.advantage != Some(0.0))
    );
}
