use super::*;
use crate::spec::KlEstimator;

const LOSSES: [Loss; 5] = [Loss::Sequence, Loss::TokenMean, Loss::SeqMeanTokenMean, Loss::DrGrpo, Loss::Gspo];
const CONFIG: LossConfig = LossConfig { loss: Loss::Sequence, epsilon: 0.2, epsilon_high: 0.28, kl: None };
const STEP: Denominators = Denominators { completions: 4, tokens: 11, max_completion_length: 8 };

fn loss(new: f32, advantage: f64) -> RowLoss {
    let advantage = RowAdvantage::Sequence(advantage);
    let row =
        LossRow { new_logps: &[new], old_logps: &[-1.0], ref_logps: &[], included: true, advantage, weight: None };
    row_loss(&row, &CONFIG, &STEP)
}

/// Every loss, without a KL penalty and with each estimator.
fn configs() -> Vec<LossConfig> {
    let penalty = |estimator| Some(KlPenalty { beta: 0.3, estimator });
    let penalties = [None, penalty(KlEstimator::K1), penalty(KlEstimator::K2), penalty(KlEstimator::K3)];
    LOSSES.iter().flat_map(|&loss| penalties.map(|kl| LossConfig { loss, kl, ..CONFIG })).collect()
}

#[test]
fn the_gradient_is_the_slope_of_the_loss_on_every_branch() {
    for advantage in [1.5, -0.75, 0.0] {
        for new in [-1.5f32, -1.1, -1.0, -0.9, -0.5] {
            let h = 1.0f32 / 1024.0;
            let (above, below) = (loss(new + h, advantage), loss(new - h, advantage));
            let slope = (above.loss - below.loss) / (2.0 * f64::from(h)) / 4.0;
            let gradient = loss(new, advantage).gradient[0];
            assert!((gradient - slope).abs() < 1e-6, "new {new} advantage {advantage}: {gradient} {slope}");
        }
    }
}

#[test]
fn the_gradient_of_every_loss_and_kl_estimator_is_that_of_finite_differences() {
    // All values are multiples of 1/1024, so that a step of 1/1024 is exact in f32; no ratio is exactly
    // on a clip bound.
    let grid = |values: [f32; 4]| values.map(|value| (value * 1024.0).round() / 1024.0);
    let old = grid([-1.0, -0.75, -2.5, -0.125]);
    let reference = grid([-1.25, -0.5, -2.0, -0.25]);
    let near = grid([-0.95, -0.8, -2.45, -0.13]);
    let far = grid([-0.5, -1.5, -1.75, -0.5]);
    let h = 1.0f32 / 1024.0;
    let token_advantages = [0.5, -1.0, 0.25, -0.125];
    let advantages = [
        RowAdvantage::Sequence(1.5),
        RowAdvantage::Sequence(-0.75),
        RowAdvantage::Sequence(0.0),
        RowAdvantage::Tokens(&token_advantages),
    ];
    let mut compared = 0;
    for config in configs() {
        for new in [old, near, far] {
            for advantage in advantages {
                let of_sequence = matches!(config.loss, Loss::Sequence | Loss::Gspo);
                if of_sequence && matches!(advantage, RowAdvantage::Tokens(_)) {
                    continue;
                }
                let at = |new: [f32; 4]| {
                    let row = LossRow {
                        new_logps: &new,
                        old_logps: &old,
                        ref_logps: &reference,
                        included: true,
                        advantage,
                        weight: None,
                    };
                    row_loss(&row, &config, &STEP)
                };
                for token in 0..4 {
                    let moved = |by: f32| {
                        let mut moved = new;
                        moved[token] += by;
                        total_loss(&[at(moved)])
                    };
                    let slope = (moved(h) - moved(-h)) / (2.0 * f64::from(h));
                    let gradient = at(new).gradient[token];
                    let what = format!("{config:?} {new:?} {advantage:?} token {token}: {gradient} {slope}");
                    assert!((gradient - slope).abs() < 2e-6 * slope.abs().max(1.0), "{what}");
                    compared += 1;
                }
            }
        }
    }
    assert_eq!(compared, 4 * 3 * 4 * (3 * 4 + 2 * 3));
}

#[test]
fn a_kl_penalty_pulls_towards_the_reference_and_vanishes_at_it() {
    for estimator in [KlEstimator::K2, KlEstimator::K3] {
        let penalty = KlPenalty { beta: 0.5, estimator };
        assert_eq!(penalty.of_token(-1.0, -1.0), (0.0, 0.0));
        let (above, below) = (penalty.of_token(-0.5, -1.0), penalty.of_token(-1.5, -1.0));
        assert!(above.0 > 0.0 && below.0 > 0.0 && above.1 > 0.0 && below.1 < 0.0, "{estimator:?}");
    }
    // k1 would fail this: its slope is constant.
    assert_eq!(KlPenalty { beta: 0.5, estimator: KlEstimator::K1 }.of_token(-1.5, -1.0), (-0.25, 0.5));
}

#[test]
fn a_masked_row_has_no_gradient_whatever_the_loss() {
    for config in configs() {
        let advantage = RowAdvantage::Sequence(2.0);
        let row = LossRow {
            new_logps: &[-5.0],
            old_logps: &[-1.0],
            ref_logps: &[-2.0],
            included: false,
            advantage,
            weight: None,
        };
        let result = row_loss(&row, &config, &STEP);
        assert_eq!((result.ratio, result.gradient), (1.0, vec![0.0]), "{config:?}");
        let of_sequence = matches!(config.loss, Loss::Sequence | Loss::Gspo);
        assert_eq!((result.loss, result.num_ratios), if of_sequence { (-2.0, 1) } else { (0.0, 0) }, "{config:?}");
    }
}

#[test]
fn a_nan_log_prob_reaches_every_loss() {
    for config in configs() {
        for advantage in [0.0, 1.0].map(RowAdvantage::Sequence) {
            let row = LossRow {
                new_logps: &[f32::NAN, -1.0],
                old_logps: &[-1.0, -1.0],
                ref_logps: &[-1.0, -1.0],
                included: true,
                advantage,
                weight: None,
            };
            assert!(row_loss(&row, &config, &STEP).loss.is_nan(), "{config:?}");
        }
    }
    assert!(loss(f32::NAN, 1.0).gradient[0].is_nan());
}

#[test]
fn on_policy_all_losses_push_the_same_way() {
    let logps = [-1.0f32, -0.5, -2.0];
    for loss in LOSSES {
        let advantage = RowAdvantage::Sequence(2.0);
        let row =
            LossRow { new_logps: &logps, old_logps: &logps, ref_logps: &[], included: true, advantage, weight: None };
        let result = row_loss(&row, &LossConfig { loss, ..CONFIG }, &STEP);
        // −A divided by: completions, all tokens, completions · own tokens, completions · limit; gspo distributes
        // it over the tokens.
        let expected = match loss {
            Loss::Sequence => 2.0 / 4.0,
            Loss::TokenMean => 2.0 / 11.0,
            Loss::SeqMeanTokenMean | Loss::Gspo => 2.0 / 12.0,
            Loss::DrGrpo => 2.0 / 32.0,
        };
        assert!(result.gradient.iter().all(|entry| (entry + expected).abs() < 1e-12), "{loss:?}: {result:?}");
        assert_eq!((result.clipped_low, result.clipped_high), (0, 0));
    }
}

#[test]
fn clipped_ratios_are_counted_by_token_or_by_sequence() {
    // Two token ratios are far above the range, one is far below; the sequence ratio is above.
    let (old, new) = ([-2.0f32; 3], [-1.0f32, -1.0, -3.0]);
    let counts = |loss, advantage: f64| {
        let advantage = RowAdvantage::Sequence(advantage);
        let row = LossRow { new_logps: &new, old_logps: &old, ref_logps: &[], included: true, advantage, weight: None };
        let result = row_loss(&row, &LossConfig { loss, ..CONFIG }, &STEP);
        (result.num_ratios, result.clipped_low, result.clipped_high)
    };
    for loss in [Loss::TokenMean, Loss::SeqMeanTokenMean, Loss::DrGrpo] {
        assert_eq!((counts(loss, 1.0), counts(loss, -1.0)), ((3, 0, 2), (3, 1, 0)), "{loss:?}");
    }
    for loss in [Loss::Sequence, Loss::Gspo] {
        assert_eq!((counts(loss, 1.0), counts(loss, -1.0)), ((1, 0, 1), (1, 0, 0)), "{loss:?}");
    }
}

#[test]
fn idle_rows_have_no_gradient_and_no_other_row_is_taken_for_one() {
    let advantages = [
        RowAdvantage::Sequence(0.0),
        RowAdvantage::Sequence(0.5),
        RowAdvantage::Tokens(&[0.0, 0.0]),
        RowAdvantage::Tokens(&[0.0, -1.0]),
    ];
    let mut num_idle = 0;
    for config in configs() {
        for (advantage, included) in
            advantages.into_iter().flat_map(|advantage| [(advantage, true), (advantage, false)])
        {
            let is_idle = config.is_idle(included, Some(advantage));
            num_idle += usize::from(is_idle);
            assert_eq!(config.is_idle(included, None), !included, "the advantage is unknown");
            // The second log-prob has a ratio that overflows.
            for new in [[-1.0f32, -2.0], [-0.9, -2.1], [-0.5, 1e4]] {
                let (old_logps, ref_logps) = (&[-1.0f32, -2.0], &[-1.5f32, -1.0]);
                let row = LossRow { new_logps: &new, old_logps, ref_logps, included, advantage, weight: None };
                let has_gradient = row_loss(&row, &config, &STEP).gradient.iter().any(|entry| *entry != 0.0);
                assert!(!(is_idle && has_gradient), "{config:?}, {row:?}");
                assert!(is_idle || has_gradient || new[1] > 0.0, "{config:?}, {row:?}");
            }
        }
    }
    // 20 settings with 4 masked rows each; the 5 without a KL penalty have 2 more rows without advantage.
    assert_eq!(num_idle, 20 * 4 + 5 * 2);
}
