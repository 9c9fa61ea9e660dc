//! The arithmetic of episodes, on numbers worked out by hand: three episodes of one prompt, with context between their turns. They were
//! computed apart from this code, in f64, from the definitions: KL and ratio are sums over the model's tokens.

use std::num::NonZeroUsize;

use rlood_engine::advantage::estimator::Turn;
use rlood_engine::advantage::{AdvantageConfig, AdvantageRows, Advantages, advantages, token_kl};
use rlood_engine::loss::{Denominators, LossConfig, LossRow, RowAdvantage, RowLoss, row_loss, total_loss};
use rlood_types::rollout::Segment;
use rlood_types::spec::{Estimator, Loss, TieRule};
use rlood_types::trajectory::Segments;

const BETA: f64 = 0.05;
const EPSILON: f64 = 0.2;

/// A token: whether the model sampled it, and its log-probabilities under the sampling policy, the reference and the new policy.
type Token = (bool, [f32; 3]);

struct Case {
    tokens: &'static [Token],
    /// Number of the model's tokens in each turn, with the turn's reward.
    turns: &'static [(usize, f64)],
}

const CASES: [Case; 3] = [
    Case {
        tokens: &[
            (true, [-0.5, -0.6, -0.45]),
            (true, [-0.2, -0.25, -0.2]),
            (false, [-3.0, -2.0, -2.9]),
            (false, [-1.0, -1.5, -1.1]),
            (true, [-0.7, -0.6, -0.72]),
        ],
        turns: &[(2, 0.0), (1, 1.0)],
    },
    Case { tokens: &[(true, [-0.4, -0.5, -0.42]), (true, [-1.1, -1.0, -1.0])], turns: &[(2, 0.0)] },
    Case {
        tokens: &[
            (true, [-0.9, -0.8, -0.95]),
            (false, [-2.0, -2.2, -2.1]),
            (true, [-0.3, -0.35, -0.28]),
            (false, [-0.5, -0.1, -0.45]),
            (true, [-0.6, -0.65, -0.6]),
            (true, [-0.1, -0.1, -0.11]),
        ],
        turns: &[(1, 0.2), (1, 0.1), (2, 0.5)],
    },
];

/// The log-probabilities of the model's tokens, taken out of those of all tokens as the engine does it.
struct Rows {
    logps: [Vec<Vec<f32>>; 3],
}

impl Rows {
    /// `context` replaces all log-probabilities of context tokens.
    fn new(context: Option<f32>) -> Self {
        let of_model = |case: &Case, which: usize| -> Vec<f32> {
            let segment = |(id, (is_model, _)): (usize, &Token)| match is_model {
                true => Segment::Model { ids: vec![id as u32], logps: None },
                false => Segment::Context { ids: vec![id as u32] },
            };
            let segments = Segments(case.tokens.iter().enumerate().map(segment).collect());
            let all: Vec<f32> = case
                .tokens
                .iter()
                .map(|(is_model, logps)| context.filter(|_| !is_model).unwrap_or(logps[which]))
                .collect();
            segments.tokens().filter(|(_, is_model)| *is_model).map(|(id, _)| all[id as usize]).collect()
        };
        Self { logps: [0, 1, 2].map(|which| CASES.iter().map(|case| of_model(case, which)).collect()) }
    }

    fn kl(&self) -> Vec<Vec<f64>> {
        let [old, reference, _] = &self.logps;
        old.iter().zip(reference).map(|(old, reference)| token_kl(old, reference, true)).collect()
    }

    fn advantages(&self, estimator: Estimator, beta: f64) -> Advantages {
        let rewards: Vec<Option<f64>> =
            CASES.iter().map(|case| Some(case.turns.iter().map(|(_, reward)| reward).sum())).collect();
        let turn = |&(num_tokens, reward): &(usize, f64)| Turn { num_tokens, reward };
        let turns: Vec<Vec<Turn>> = CASES.iter().map(|case| case.turns.iter().map(turn).collect()).collect();
        let config = AdvantageConfig {
            estimator,
            num_generations: NonZeroUsize::new(3).unwrap(),
            beta,
            normalize_advantages: false,
            ties: TieRule::Equal,
        };
        advantages(
            &AdvantageRows {
                rewards: &rewards,
                task_rewards: &rewards,
                token_kl: &self.kl(),
                dropped: &[false; 3],
                greedy: &[],
                turns: &turns,
            },
            &config,
        )
    }

    fn losses(&self, loss: Loss, estimator: Estimator) -> Vec<RowLoss> {
        let [old, reference, new] = &self.logps;
        let results = self.advantages(estimator, BETA);
        let config = LossConfig { loss, epsilon: EPSILON, epsilon_high: EPSILON, kl: None };
        let tokens = old.iter().map(Vec::len).sum();
        let denominators = Denominators { completions: 3, tokens, max_completion_length: 8 };
        let row = |row: usize| {
            let advantage = match results.token_advantages.get(row) {
                Some(tokens) => RowAdvantage::Tokens(tokens),
                None => RowAdvantage::Sequence(results.advantages[row]),
            };
            let (new_logps, old_logps, ref_logps) = (&new[row], &old[row], &reference[row]);
            let row = LossRow { new_logps, old_logps, ref_logps, included: true, advantage, weight: None };
            row_loss(&row, &config, &denominators)
        };
        (0..3).map(row).collect()
    }
}

fn close(ours: &[f64], theirs: &[f64]) -> bool {
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(ours, theirs)| (ours - theirs).abs() < 2e-6)
}

#[test]
fn context_is_in_no_number_of_the_loss() {
    let rows = Rows::new(None);
    let kl: Vec<f64> = rows.kl().iter().map(|kl| kl.iter().sum()).collect();
    assert!(close(&kl, &[0.05, 0.0, 0.0]), "{kl:?}");
    let results = rows.advantages(Estimator::Rloo, BETA);
    let rewards: Vec<f64> = results.penalized_rewards.iter().flatten().copied().collect();
    assert!(close(&rewards, &[0.9975, 0.0, 0.8]), "{rewards:?}");
    assert!(close(&results.advantages, &[0.5975, -0.89875, 0.30125]), "{:?}", results.advantages);
    let [old, _, new] = &rows.logps;
    let sum = |logps: &[f32]| logps.iter().map(|&logp| f64::from(logp)).sum::<f64>();
    let ratios: Vec<f64> = old.iter().zip(new).map(|(old, new)| (sum(new) - sum(old)).exp()).collect();
    assert!(close(&ratios, &[1.030_455, 1.083_287, 0.960_789]), "{ratios:?}");

    for (loss, expected) in
        [(Loss::Sequence, 0.022_823), (Loss::TokenMean, -0.125_608), (Loss::SeqMeanTokenMean, 0.011_665)]
    {
        let total = total_loss(&rows.losses(loss, Estimator::Rloo));
        assert!((total - expected).abs() < 2e-6, "{loss:?}: {total} instead of {expected}");
    }
    // Whatever the model thinks of what the environment says: no bit of a loss and of its gradient changes.
    for context in [-7.5, 0.0, f32::NAN] {
        let changed = Rows::new(Some(context));
        for loss in [Loss::Sequence, Loss::TokenMean, Loss::SeqMeanTokenMean, Loss::DrGrpo, Loss::Gspo] {
            let bits = |rows: &Rows| -> Vec<(u64, Vec<u32>)> {
                let losses = rows.losses(loss, Estimator::Rloo);
                let gradient = |row: &RowLoss| row.token_gradient().iter().map(|value| value.to_bits()).collect();
                losses.iter().map(|row| (total_loss(std::slice::from_ref(row)).to_bits(), gradient(row))).collect()
            };
            assert_eq!(bits(&changed), bits(&rows), "{loss:?} with context of {context}");
        }
    }
}

#[test]
fn a_turn_has_the_advantage_of_what_it_and_later_turns_earned() {
    let rows = Rows::new(None);
    let without_kl = rows.advantages(Estimator::RlooTurns, 0.0).token_advantages;
    let expected: [&[f64]; 3] = [&[0.6, 0.6, 0.7], &[-0.9, -0.9], &[0.3, 0.1, 0.5, 0.5]];
    assert!(without_kl.iter().zip(expected).all(|(ours, theirs)| close(ours, theirs)), "{without_kl:?}");

    // The KL of a turn burdens it and the turns before it: here those of the first episode are 0.15 and −0.1, of the third
    // −0.1, 0.05 and 0.05.
    let with_kl = rows.advantages(Estimator::RlooTurns, BETA).token_advantages;
    let returns =
        [vec![1.0 - BETA * 0.05, 1.0 + BETA * 0.1], vec![0.0], vec![0.8, 0.6 - BETA * 0.1, 0.5 - BETA * 0.05]];
    for (row, case) in CASES.iter().enumerate() {
        let mut tokens = with_kl[row].iter();
        for (turn, (num_tokens, _)) in case.turns.iter().enumerate() {
            let of = |other: usize| returns[other].get(turn).copied().unwrap_or(0.0);
            let others: f64 = (0..3).filter(|other| *other != row).map(of).sum();
            let expected = vec![of(row) - others / 2.0; *num_tokens];
            assert!(close(&tokens.by_ref().take(*num_tokens).copied().collect::<Vec<_>>(), &expected), "{with_kl:?}");
        }
    }
    // The first turn has the advantage of the whole episode.
    let whole = rows.advantages(Estimator::Rloo, BETA).advantages;
    let first: Vec<f64> = with_kl.iter().map(|tokens| tokens[0]).collect();
    assert!(close(&first, &whole), "{first:?} and {whole:?}");
    let total = total_loss(&rows.losses(Loss::TokenMean, Estimator::RlooTurns));
    assert!(total.is_finite() && total != total_loss(&rows.losses(Loss::TokenMean, Estimator::Rloo)));
}
