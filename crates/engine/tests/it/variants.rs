//! The variants of the algorithm in the loop: estimators, losses, KL in the loss, shaped rewards, refills.

use std::num::{NonZeroU32, NonZeroUsize};

use rlood_engine::advantage::mean;
use rlood_engine::backend::BackendKind;
use rlood_engine::host::{Rollout, RolloutCompletion, RolloutGroup, RolloutId};
use rlood_engine::loss::kl::KlPenalty;
use rlood_engine::loss::{Denominators, LossConfig, LossRow, RowAdvantage, row_loss};
use rlood_engine::model::{Policy, Trajectory};
use rlood_engine::update::{MicroBatching, StepGradient, step_gradient};
use rlood_types::event::{FinishReason, SamplePhase};
use rlood_types::rollout::{RewardSample, RewardValue, Score, Segments};
use rlood_types::spec::LoraPlan;
use rlood_types::spec::{Estimator, KlEstimator, KlIn, Loss, Plan, RewardNormalization};

use crate::train::{Start, TestHost, model_dir, plan, rows, run, train, value};

const LOSSES: [Loss; 5] = [Loss::Sequence, Loss::TokenMean, Loss::SeqMeanTokenMean, Loss::DrGrpo, Loss::Gspo];

fn row_of(sample: &RewardSample) -> u64 {
    sample.prompt_id.trim_start_matches("row_").parse().expect("a row")
}

/// A reward that differs between completions of odd rows, but not between those of even rows.
fn odd_rows_teach(sample: &RewardSample) -> RewardValue {
    let index: u64 = sample.sample_id.trim_start_matches("s_").parse().expect("a number");
    let text: u64 = sample.completion.bytes().map(u64::from).sum();
    let odd = row_of(sample) % 2 == 1;
    RewardValue::Number(if odd { (index % 2) as f64 + (text % 5) as f64 / 10.0 } else { 1.0 })
}

/// The plan of [`plan`] with every estimator and loss, KL in reward and loss, shaped rewards and refills.
fn variants() -> Vec<(String, Plan)> {
    let mut variants = Vec::new();
    let mut add = |name: &str, change: &dyn Fn(&mut Plan)| {
        let mut plan = plan();
        change(&mut plan);
        variants.push((name.to_owned(), plan));
    };
    add("rloo", &|_| {});
    add("grpo with its loss", &|plan| {
        plan.rloo.estimator = Estimator::Grpo;
        plan.rloo.loss = Loss::SeqMeanTokenMean;
        plan.rloo.kl_in = KlIn::Loss;
        plan.rloo.kl_estimator = KlEstimator::K3;
    });
    add("dr_grpo with its loss", &|plan| {
        plan.rloo.estimator = Estimator::DrGrpo;
        plan.rloo.loss = Loss::DrGrpo;
        plan.rloo.kl_in = KlIn::Loss;
        plan.rloo.kl_estimator = KlEstimator::K2;
    });
    add("reinforce_pp", &|plan| {
        plan.rloo.estimator = Estimator::ReinforcePp;
        plan.rloo.loss = Loss::TokenMean;
    });
    add("reinforce_pp_baseline", &|plan| {
        plan.rloo.estimator = Estimator::ReinforcePpBaseline;
        plan.rloo.loss = Loss::TokenMean;
        plan.rloo.kl_in = KlIn::Loss;
        plan.rloo.kl_estimator = KlEstimator::K2;
    });
    add("remax of one completion", &|plan| {
        plan.rloo.estimator = Estimator::Remax;
        plan.rloo.num_generations = NonZeroU32::MIN;
    });
    add("reinforce of one completion with gspo and running normalization", &|plan| {
        plan.rloo.estimator = Estimator::Reinforce;
        plan.rloo.num_generations = NonZeroU32::MIN;
        plan.rloo.loss = Loss::Gspo;
        plan.rloo.reward_normalization = RewardNormalization::Running;
    });
    add("refills, dropped groups, batch normalization and length terms", &|plan| {
        plan.rloo.min_informative_groups = 2;
        plan.rloo.max_refills = 2;
        plan.rloo.drop_tied_groups = true;
        plan.rloo.reward_normalization = RewardNormalization::Batch;
        plan.rloo.soft_overlong = Some(3);
        plan.rloo.length_penalty = 0.1;
        plan.rloo.reward_clip_range = Some((-1.0, 1.0));
    });
    variants
}

#[test]
fn every_variant_resumes_from_every_step() {
    for (name, mut plan) in variants() {
        for (num_iterations, steps_per_generation) in [(1, 1), (2, 2)] {
            plan.rloo.num_iterations = num_iterations;
            plan.rloo.steps_per_generation = steps_per_generation;
            plan.training.max_steps = if num_iterations == 1 { 3 } else { 5 };
            plan.checkpoints.every_steps = 1;
            let mut whole = TestHost::scoring(odd_rows_teach);
            run(&plan, &mut whole);
            let steps = plan.training.max_steps as usize;
            let metrics = whole.comparable_metrics();
            assert!(whole.saved[0].adapter() != whole.saved[steps - 1].adapter(), "{name} trains nothing");
            for saved in &whole.saved[..steps - 1] {
                let mut rest = TestHost::scoring(odd_rows_teach);
                let start = Start { resume: Some(saved.dir.clone()), ..Start::default() };
                assert_eq!(train(&plan, rows(), start, &mut rest).expect("resumes"), None);
                let at = format!("{name}, μ {num_iterations}, resumed from step {}", saved.step);
                assert_eq!(rest.comparable_metrics(), metrics[saved.step as usize..], "{at}");
                assert!(rest.saved.last().expect("a checkpoint").adapter() == whole.saved[steps - 1].adapter(), "{at}");
                let samples = rest.samples();
                assert_eq!(samples, whole.samples()[whole.samples().len() - samples.len()..], "{at}");
            }
        }
    }
}

/// A policy whose log-probs differ from the recorded ones, so that ratios are not 1.
fn moved_policy() -> Policy {
    let mut policy = Policy::load(&model_dir(), BackendKind::Cpu).expect("the model");
    policy.add_lora(&LoraPlan::all_linear(4, 8.0), 7).expect("an adapter");
    let values = policy.parameter_values().expect("values");
    let moved: Vec<f32> = values.iter().enumerate().map(|(i, v)| v + (i % 11) as f32 * 0.01).collect();
    policy.set_parameter_values(&moved).expect("as many");
    policy
}

#[test]
fn no_micro_batch_split_changes_the_gradient_of_any_loss() {
    let policy = moved_policy();
    let completions: Vec<Vec<u32>> =
        (0..8u32).map(|row| (0..=row % 5).map(|t| 3 + (row * 7 + t * 5) % 60).collect()).collect();
    let rows: Vec<Trajectory<'_>> =
        completions.iter().map(|completion| Trajectory::of_completion(&[5, 6, 7], completion)).collect();
    let lengths = completions.iter().map(Vec::len);
    let denominators = Denominators { completions: 8, tokens: lengths.sum(), max_completion_length: 6 };
    let token_advantages: Vec<Vec<f64>> = completions
        .iter()
        .enumerate()
        .map(|(row, ids)| (0..ids.len()).map(|token| 0.3 * (row as f64 - 3.5) + 0.1 * token as f64).collect())
        .collect();
    let penalty = |estimator| Some(KlPenalty { beta: 0.2, estimator });
    for loss in LOSSES {
        for kl in [None, penalty(KlEstimator::K2), penalty(KlEstimator::K3)] {
            let config = LossConfig { loss, epsilon: 0.2, epsilon_high: 0.28, kl };
            let gradient = |max_tokens: usize| -> (usize, StepGradient) {
                let batching = MicroBatching {
                    num_generations: NonZeroUsize::new(2).unwrap(),
                    max_tokens,
                    temperature: 0.9,
                    dropout: None,
                };
                let mut batches = 0;
                let mut losses = |range: std::ops::Range<usize>, scores: &[rlood_engine::model::RowScore]| {
                    batches += 1;
                    let rows = range.zip(scores).map(|(row, score)| {
                        let shifted = |by: f32| score.logps.iter().map(|logp| logp + by).collect::<Vec<f32>>();
                        let advantage = match loss {
                            Loss::Sequence | Loss::Gspo => RowAdvantage::Sequence(token_advantages[row][0]),
                            Loss::TokenMean | Loss::SeqMeanTokenMean | Loss::DrGrpo => {
                                RowAdvantage::Tokens(&token_advantages[row])
                            }
                        };
                        let row = LossRow {
                            new_logps: &score.logps,
                            old_logps: &shifted(0.02 * (row % 3) as f32),
                            ref_logps: &shifted(0.1),
                            included: row != 5,
                            advantage,
                            weight: None,
                        };
                        row_loss(&row, &config, &denominators)
                    });
                    rows.collect()
                };
                let step = step_gradient(&policy, &rows, &batching, &[], &mut losses, &|| false);
                (batches, step.expect("trains").expect("not stopped"))
            };
            let (one, whole) = gradient(1000);
            let (four, cut) = gradient(1);
            assert_eq!((one, four), (1, 4));
            let (whole_gradient, cut_gradient) = (whole.gradient.values().unwrap(), cut.gradient.values().unwrap());
            let largest = whole_gradient.iter().fold(0f32, |a, b| a.max(b.abs()));
            assert!(largest > 1e-4, "{config:?}: {largest}");
            for (a, b) in whole_gradient.iter().zip(&*cut_gradient) {
                assert!((a - b).abs() <= 1e-5 * largest, "{config:?}: {a} {b}");
            }
            assert_eq!(whole.losses.len(), cut.losses.len());
        }
    }
}

#[test]
fn remax_scores_one_greedy_completion_a_prompt_beside_the_block() {
    let score = |sample: &RewardSample| sample.completion.bytes().map(f64::from).sum::<f64>() % 11.0;
    let mut plan = plan();
    plan.rloo.estimator = Estimator::Remax;
    plan.rloo.beta = 0.0;
    plan.training.max_steps = 2;
    let mut host = TestHost::scoring(move |sample| RewardValue::Number(score(sample)));
    run(&plan, &mut host);
    let asked: Vec<(RolloutId, usize)> = host.requests.iter().map(|(id, samples)| (*id, samples.len())).collect();
    let (first, second) = (RolloutId::train(1), RolloutId::train(2));
    assert_eq!(asked, [(first, 4), (first.greedy(), 2), (second, 4), (second.greedy(), 2)]);
    for (step, trace) in host.traces.iter().enumerate() {
        let [sampled, greedy] = &host.requests[2 * step..2 * step + 2] else { panic!("two requests a step") };
        for (row, sample) in sampled.1.iter().enumerate() {
            assert_eq!(sample.prompt_id, greedy.1[row / 2].prompt_id);
            assert_eq!(trace.advantages[row], score(sample) - score(&greedy.1[row / 2]));
        }
        let rewards: Vec<f64> = greedy.1.iter().map(score).collect();
        let metrics = host.metrics(SamplePhase::Train);
        assert_eq!(value(&metrics, step as u64 + 1, "reward_greedy"), mean(&rewards).expect("two"));
    }
    // Greedy completions are counted, but never trained, and are not among the samples.
    assert_eq!(host.samples().len(), 8);
    let tokens: u32 = host.requests.iter().flat_map(|(_, samples)| samples).map(|sample| sample.num_tokens).sum();
    let prompts: usize =
        host.requests.iter().flat_map(|(_, samples)| samples).map(|sample| prompt_tokens(row_of(sample))).sum();
    assert_eq!(value(&host.metrics(SamplePhase::Train), 2, "num_tokens"), f64::from(tokens) + prompts as f64);
}

/// Number of tokens of a prompt; in this model every word is a token.
fn prompt_tokens(row: u64) -> usize {
    rows()[row as usize].prompt.as_str().expect("a text").split(' ').count()
}

#[test]
fn tied_groups_are_replaced_by_the_prompts_that_come_next() {
    let mut plan = plan();
    plan.training.shuffle_dataset = false;
    plan.training.max_steps = 3;
    plan.rloo.min_informative_groups = 2;
    let mut host = TestHost::scoring(odd_rows_teach);
    run(&plan, &mut host);
    // Blocks 0, 1: row 0 is tied, so is 2, and 3 replaces it. Then 4, 5: 6 is tied, 7 replaces it. Then
    // the next epoch begins.
    let rows: Vec<Vec<u64>> = host.traces.iter().map(|trace| trace.rows.clone()).collect();
    assert_eq!(rows, [[3, 3, 1, 1], [7, 7, 5, 5], [3, 3, 1, 1]]);
    let metrics = host.metrics(SamplePhase::Train);
    for (step, epoch) in [(1, 0.5), (2, 1.0), (3, 1.5)] {
        assert_eq!(value(&metrics, step, "epoch"), epoch);
        assert_eq!(value(&metrics, step, "refills"), 2.0);
        assert_eq!(value(&metrics, step, "refills/informative_fraction"), 0.5);
        assert_eq!(value(&metrics, step, "frac_reward_zero_std_pre_kl"), 0.0);
    }
    let first = RolloutId::train(1);
    let asked: Vec<(RolloutId, usize)> =
        host.requests.iter().take(3).map(|(id, samples)| (*id, samples.len())).collect();
    assert_eq!(asked, [(first, 4), (first.round(1), 2), (first.round(2), 2)]);
    assert!(host.warnings().is_empty(), "{:?}", host.warnings());
    // All samples are counted, but only the block's are reported.
    assert_eq!(host.samples().len(), 12);
    let sampled = host.requests.iter().flat_map(|(_, samples)| samples);
    let tokens: usize = sampled.map(|sample| sample.num_tokens as usize + prompt_tokens(row_of(sample))).sum();
    assert_eq!(value(&metrics, 3, "num_tokens"), tokens as f64);
}

#[test]
fn refills_end_after_max_refills_with_a_warning() {
    let mut plan = plan();
    plan.training.shuffle_dataset = false;
    plan.training.max_steps = 2;
    plan.rloo.min_informative_groups = 1;
    let mut host = TestHost::scoring(|_| RewardValue::Number(1.0));
    run(&plan, &mut host);
    assert_eq!(host.requests.len(), 10);
    assert_eq!(host.warnings(), ["refills_exhausted", "refills_exhausted"]);
    // The first block stays as sampled; four refills of two used the rest of the epoch and two more prompts.
    assert_eq!(host.traces[0].rows, [0, 0, 1, 1]);
    assert_eq!(host.traces[1].rows, [2, 2, 3, 3]);
    assert_eq!(value(&host.metrics(SamplePhase::Train), 1, "epoch"), 1.25);
}

#[test]
fn without_tied_groups_dynamic_sampling_is_the_plain_run() {
    let mut plan = plan();
    let scored = || {
        TestHost::scoring(|sample| {
            RewardValue::Number(sample.sample_id.len() as f64 + f64::from(sample.sample_id.ends_with(['1', '3'])))
        })
    };
    let (mut plain, mut dynamic) = (scored(), scored());
    run(&plan, &mut plain);
    plan.rloo.min_informative_groups = 2;
    run(&plan, &mut dynamic);
    assert!(plain.saved[0].adapter() == dynamic.saved[0].adapter());
    assert_eq!(plain.samples(), dynamic.samples());
}

/// Two prompts with two completions each; the rewards of the first group are equal, those of the second are not.
fn half_tied(_step: u64) -> Option<Rollout> {
    let completion = |first: u32, reward: f64| RolloutCompletion {
        segments: Segments::of_completion(vec![first, 11, 12], None),
        finish_reason: FinishReason::Length,
        score: Score { values: vec![RewardValue::Number(reward)] },
        episode: None,
    };
    let group = |row: u64, rewards: [f64; 2]| RolloutGroup {
        row,
        prompt_ids: vec![3, 4],
        completions: vec![completion(10, rewards[0]), completion(20, rewards[1])],
        greedy: None,
    };
    Some(Rollout { groups: vec![group(0, [1.0, 1.0]), group(1, [0.0, 1.0])], ..Rollout::default() })
}

#[test]
fn dropped_groups_leave_the_denominator() {
    for loss in LOSSES {
        let mut plan = plan();
        plan.rloo.beta = 0.0;
        plan.rloo.loss = loss;
        plan.training.max_steps = 1;
        plan.optimizer.max_grad_norm = 0.0;
        let gradient = |plan: &Plan, rollout: fn(u64) -> Option<Rollout>| {
            let mut host = TestHost::with_rollouts(rollout);
            run(plan, &mut host);
            (host.traces[0].gradient.clone(), host.metrics(SamplePhase::Train))
        };
        let (kept, metrics) = gradient(&plan, half_tied);
        assert!(!metrics[0].1.contains_key("dropped_fraction"));
        plan.rloo.drop_tied_groups = true;
        let (dropped, metrics) = gradient(&plan, half_tied);
        assert_eq!(value(&metrics, 1, "dropped_fraction"), 0.5);
        assert_eq!(value(&metrics, 1, "frac_reward_zero_std_pre_kl"), 0.5);
        plan.training.prompts_per_step = 1;
        let (alone, _) = gradient(&plan, |step| {
            half_tied(step).map(|rollout| Rollout { groups: rollout.groups[1..].to_vec(), ..Rollout::default() })
        });
        let largest = alone.iter().fold(0f32, |a, b| a.max(b.abs()));
        assert!(largest > 1e-4, "{loss:?}");
        for ((kept, dropped), alone) in kept.iter().zip(&dropped).zip(&alone) {
            assert!((dropped - alone).abs() <= 1e-5 * largest, "{loss:?}");
            assert!((2.0 * kept - alone).abs() <= 1e-5 * largest, "{loss:?}");
        }
    }
}

#[test]
fn all_groups_dropped_change_no_weight() {
    let mut plan = plan();
    plan.rloo.drop_tied_groups = true;
    plan.rloo.kl_in = KlIn::Loss;
    plan.rloo.kl_estimator = KlEstimator::K3;
    let mut host = TestHost::scoring(|_| RewardValue::Number(1.0));
    run(&plan, &mut host);
    for trace in &host.traces {
        assert!(trace.gradient.iter().all(|entry| *entry == 0.0));
    }
    assert_eq!(value(&host.metrics(SamplePhase::Train), 2, "loss"), 0.0);
}

#[test]
fn kl_in_the_loss_leaves_the_rewards_alone_and_pulls_on_the_weights() {
    let mut plan = plan();
    plan.rloo.beta = 0.0;
    let mut without = TestHost::default();
    run(&plan, &mut without);
    for estimator in [KlEstimator::K2, KlEstimator::K3] {
        plan.rloo.beta = 1.0;
        plan.rloo.kl_in = KlIn::Loss;
        plan.rloo.kl_estimator = estimator;
        let mut with = TestHost::default();
        run(&plan, &mut with);
        // The policy equals the reference at the first step, so the KL penalty has no gradient.
        assert_eq!(with.traces[0].gradient, without.traces[0].gradient);
        assert_eq!(with.traces[1].advantages, without.traces[1].advantages);
        assert_ne!(with.traces[1].gradient, without.traces[1].gradient, "{estimator:?}");
        let metrics = with.metrics(SamplePhase::Train);
        assert_eq!(value(&metrics, 2, "frac_reward_zero_std"), value(&metrics, 2, "frac_reward_zero_std_pre_kl"));
        assert!(value(&metrics, 2, "kl_k3") > 0.0 && with.samples()[4].kl.is_some());
    }
}

#[test]
fn a_running_normalizer_counts_every_reward_so_far() {
    let mut plan = plan();
    plan.rloo.reward_normalization = RewardNormalization::Running;
    plan.rloo.beta = 0.0;
    let mut host = TestHost::default();
    run(&plan, &mut host);
    let metrics = host.metrics(SamplePhase::Train);
    let samples = host.samples();
    for step in 1..=3u64 {
        let so_far: Vec<f64> = samples.iter().filter(|s| s.step <= step).filter_map(|s| s.reward).collect();
        let expected = mean(&so_far).expect("rewards");
        assert!((value(&metrics, step, "reward_normalizer/mean") - expected).abs() < 1e-12);
        let std = rlood_engine::advantage::sample_std(&so_far).expect("two and more");
        assert!((value(&metrics, step, "reward_normalizer/std") - std).abs() < 1e-12);
        // The expected advantages are leave-one-out over the normalized rewards.
        let of_step: Vec<_> = samples.iter().filter(|s| s.step == step).collect();
        let [a, b] = [of_step[0], of_step[1]].map(|s| s.reward.expect("a reward"));
        let advantage = of_step[0].advantage.expect("an advantage");
        assert!((advantage - (a - b) / (std + 1e-4)).abs() < 1e-9);
    }
}

/// Two prompts with two completions each, with different lengths and equal rewards.
fn equal_rewards(_step: u64) -> Option<Rollout> {
    let completion = |length: u32| RolloutCompletion {
        segments: Segments::of_completion((10..10 + length).collect(), None),
        finish_reason: FinishReason::Length,
        score: Score { values: vec![RewardValue::Number(1.0)] },
        episode: None,
    };
    let group = |row: u64, lengths: [u32; 2]| RolloutGroup {
        row,
        prompt_ids: vec![3, 4],
        completions: lengths.map(completion).to_vec(),
        greedy: None,
    };
    Some(Rollout { groups: vec![group(0, [1, 4]), group(1, [6, 5])], ..Rollout::default() })
}

#[test]
fn length_terms_prefer_the_shorter_of_equal_completions() {
    let mut plan = plan();
    plan.rloo.beta = 0.0;
    plan.training.max_steps = 1;
    let advantages = |plan: &Plan| {
        let mut host = TestHost::with_rollouts(equal_rewards);
        run(plan, &mut host);
        // Ties are decided on the task rewards, so such groups are tied.
        assert_eq!(value(&host.metrics(SamplePhase::Train), 1, "frac_reward_zero_std_pre_kl"), 1.0);
        host.traces[0].advantages.clone()
    };
    assert_eq!(advantages(&plan), [0.0; 4]);
    // A penalty of 0.1 per token, because the limit is 6.
    plan.rloo.length_penalty = 0.6;
    for (actual, expected) in advantages(&plan).iter().zip([0.3, -0.3, -0.1, 0.1]) {
        assert!((actual - expected).abs() < 1e-12, "{actual} instead of {expected}");
    }
    // No penalty up to 4 tokens, −1 at 6.
    plan.rloo.length_penalty = 0.0;
    plan.rloo.soft_overlong = Some(2);
    for (actual, expected) in advantages(&plan).iter().zip([0.0, 0.0, -0.5, 0.5]) {
        assert!((actual - expected).abs() < 1e-12, "{actual} instead of {expected}");
    }
}

#[test]
fn one_completion_a_prompt_has_no_tied_fraction() {
    let mut plan = plan();
    plan.rloo.estimator = Estimator::Reinforce;
    plan.rloo.num_generations = NonZeroU32::MIN;
    let mut host = TestHost::default();
    run(&plan, &mut host);
    assert!(host.metrics(SamplePhase::Train).iter().all(|(_, metrics)| metrics["frac_reward_zero_std"].is_none()));
    assert!(host.traces.iter().all(|trace| trace.gradient.iter().any(|entry| *entry != 0.0)));
}
