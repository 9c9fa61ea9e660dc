//! Compares every number of `tests/fixtures/vectors` (computed by TRL) with the engine's own functions.
//!
//! Longer than other files: one function for each section of the files, in the same order.

use std::num::NonZeroUsize;

use std::path::PathBuf;

use candle_core::{Device, Tensor};
use rlood_engine::advantage::estimator::{self, Estimate};
use rlood_engine::advantage::shape::{RewardShape, RewardStats, soft_overlong};
use rlood_engine::advantage::{
    AdvantageConfig, AdvantageRows, Advantages, RewardWeight, advantages, combine_rewards, mean, sample_std,
    sequence_kl, token_kl,
};
use rlood_engine::loss::{Denominators, LossConfig, LossRow, RowAdvantage, row_loss, total_loss};
use rlood_engine::metrics::{KlRow, RolloutRows, advantage_metrics, kl_metrics, loss_metrics, rollout_metrics};
use rlood_engine::ops::token_scores;
use rlood_engine::rollout::{Batching, TrlBatching, cut_completion, is_included};
use rlood_types::event::{FinishReason, Metrics};
use rlood_types::rollout::{RewardValue, Score};
use rlood_types::spec::trl::convert;
use rlood_types::spec::{Combine, Estimator, Loss, RewardNormalization, TieRule};
use serde_json::Value;

const TOLERANCE: f64 = 2e-5;
/// Keys that describe the file.
const ABOUT: [&str; 3] = ["schema", "reference", "tolerance"];

/// All differences, collected so that one run shows every one.
#[derive(Default)]
struct Report {
    failures: Vec<String>,
    compared: usize,
}

impl Report {
    fn number(&mut self, what: &str, actual: Option<f64>, expected: &Value) {
        self.compared += 1;
        // The reference computes in f32, where large values overflow and are not finite.
        let actual = actual.filter(|value| (*value as f32).is_finite());
        let equal = match (actual, expected.as_f64()) {
            (None, None) => expected.is_null(),
            (Some(actual), Some(expected)) => (actual - expected).abs() <= TOLERANCE * expected.abs().max(1.0),
            _ => false,
        };
        if !equal {
            self.failures.push(format!("{what}: {actual:?} instead of {expected}"));
        }
    }

    fn numbers<T: Copy + Into<Option<f64>>>(&mut self, what: &str, actual: &[T], expected: &Value) {
        let expected = array(expected);
        if actual.len() != expected.len() {
            self.failures.push(format!("{what}: {} values instead of {}", actual.len(), expected.len()));
        }
        for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
            self.number(&format!("{what}[{index}]"), (*actual).into(), expected);
        }
    }

    fn equal<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, actual: T, expected: T) {
        self.compared += 1;
        if actual != expected {
            self.failures.push(format!("{what}: {actual:?} instead of {expected:?}"));
        }
    }
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn floats(value: &Value) -> Vec<f32> {
    array(value).iter().map(|number| number.as_f64().expect("a number") as f32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    array(value).iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn integer(value: &Value) -> u64 {
    value.as_u64().expect("an integer")
}

/// One row's values, padded to the fixture's T columns beyond the completion.
fn padded(values: &[f32], width: usize) -> Vec<f64> {
    let mut padded: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
    padded.resize(width, 0.0);
    padded
}

#[expect(
    clippy::too_many_lines,
    reason = "one update from rewards to gradient, then each field of the fixture beside it"
)]
fn case(report: &mut Report, case: &Value) {
    let (config, inputs, expected) = (&case["config"], &case["inputs"], &case["expected"]);
    let rewards = array(&inputs["rewards_per_func"]);
    let num_rewards = array(&rewards[0]).len();
    let weights: Vec<RewardWeight> = (0..num_rewards)
        .map(|index| RewardWeight { weight: config["reward_weights"][index].as_f64().unwrap_or(1.0), required: true })
        .collect();
    let scores: Vec<Score> = rewards
        .iter()
        .map(|row| Score {
            values: array(row).iter().map(|v| v.as_f64().map_or(RewardValue::Missing, RewardValue::Number)).collect(),
        })
        .collect();
    let width = array(&inputs["completion_mask"][0]).len();
    let lengths: Vec<usize> =
        array(&inputs["completion_mask"]).iter().map(|mask| ids(mask).iter().sum::<u32>() as usize).collect();
    let finish_reasons: Vec<FinishReason> = array(&inputs["truncated"])
        .iter()
        .map(|truncated| if truncated == &Value::Bool(true) { FinishReason::Length } else { FinishReason::Stop })
        .collect();
    let logps = |name: &str| -> Vec<Vec<f32>> {
        array(&inputs[name]).iter().zip(&lengths).map(|(row, &length)| floats(row)[..length].to_vec()).collect()
    };
    let (old, reference, new) = (logps("old_logps"), logps("ref_logps"), logps("new_logps"));
    let mask_truncated = config["mask_truncated_completions"] == Value::Bool(true);
    let included: Vec<bool> = finish_reasons.iter().map(|reason| is_included(*reason, mask_truncated)).collect();

    let weighted: Vec<Option<f64>> =
        scores.iter().map(|score| combine_rewards(&score.values, &weights, Combine::Nansum)).collect();
    let rows = 0..lengths.len();
    let kl: Vec<f64> = rows.clone().map(|row| sequence_kl(&old[row], &reference[row], included[row])).collect();
    let token_kl: Vec<Vec<f64>> = rows.clone().map(|row| token_kl(&old[row], &reference[row], included[row])).collect();
    let beta = config["beta"].as_f64().expect("beta");
    let clip = &config["reward_clip_range"];
    let shape = RewardShape {
        normalization: RewardNormalization::None,
        clip_range: clip[0].as_f64().zip(clip[1].as_f64()),
        soft_overlong: None,
        length_penalty: 0.0,
        max_completion_length: width as u32,
    };
    let shaped = shape.shape(&weighted, &lengths, &RewardStats::default());
    let advantage_config = AdvantageConfig {
        estimator: Estimator::Rloo,
        num_generations: NonZeroUsize::new(integer(&config["num_generations"]) as usize).unwrap(),
        beta,
        normalize_advantages: config["normalize_advantages"] == Value::Bool(true),
        ties: TieRule::Equal,
    };
    let advantage_rows = AdvantageRows {
        rewards: &shaped.shaped,
        task_rewards: &shaped.task,
        token_kl: &token_kl,
        dropped: &vec![false; lengths.len()],
        greedy: &[],
        turns: &[],
    };
    let result = advantages(&advantage_rows, &advantage_config);
    let epsilon = config["epsilon"].as_f64().expect("epsilon");
    let epsilon_high = config["epsilon_high"].as_f64().unwrap_or(epsilon);
    let loss_config = LossConfig { loss: Loss::Sequence, epsilon, epsilon_high, kl: None };
    let denominators = Denominators { completions: lengths.len(), tokens: 0, max_completion_length: width };
    let losses: Vec<_> = rows
        .clone()
        .map(|row| LossRow {
            new_logps: &new[row],
            old_logps: &old[row],
            ref_logps: &reference[row],
            included: included[row],
            advantage: RowAdvantage::Sequence(result.advantages[row]),
            weight: None,
        })
        .map(|row| row_loss(&row, &loss_config, &denominators))
        .collect();

    let mut fields: Vec<&str> = expected.as_object().expect("expected").keys().map(String::as_str).collect();
    fields.retain(|field| {
        let value = &expected[*field];
        match *field {
            "mask_used" => rows.clone().for_each(|row| {
                let mask = vec![f32::from(u8::from(included[row])); lengths[row]];
                report.numbers(&format!("mask_used[{row}]"), &padded(&mask, width), &value[row]);
            }),
            "weighted_reward" => report.numbers(field, &weighted, value),
            // TRL computes no KL at beta = 0, and neither does the engine: there is nothing to compare.
            "kl_seq" => report.numbers(field, &kl, value),
            "penalized_reward" => report.numbers(field, &result.penalized_rewards, value),
            "baseline" => report.numbers(field, &result.baselines, value),
            "advantages_unnormalized" => report.numbers(field, &result.unnormalized, value),
            "advantages" => report.numbers(field, &result.advantages, value),
            "group_std" => report.numbers(field, &result.group_std, value),
            "old_logp_seq" => report.numbers(field, &losses.iter().map(|l| l.old_logp).collect::<Vec<_>>(), value),
            "new_logp_seq" => report.numbers(field, &losses.iter().map(|l| l.new_logp).collect::<Vec<_>>(), value),
            "ratio" => report.numbers(field, &losses.iter().map(|l| l.ratio).collect::<Vec<_>>(), value),
            "per_sequence_loss" => report.numbers(field, &losses.iter().map(|l| l.loss).collect::<Vec<_>>(), value),
            "loss" => report.number(field, Some(total_loss(&losses)), value),
            "grad_new_logps" => rows.clone().for_each(|row| {
                let gradient = losses[row].token_gradient();
                report.numbers(&format!("grad_new_logps[{row}]"), &padded(&gradient, width), &value[row]);
            }),
            "metrics" => {
                let reward_names: Vec<String> = (0..num_rewards).map(|index| format!("f{index}")).collect();
                let mut metrics: Metrics = rollout_metrics(&RolloutRows {
                    reward_names: &reward_names,
                    scores: &scores,
                    weighted: &weighted,
                    lengths: &lengths,
                    finish_reasons: &finish_reasons,
                });
                metrics.extend(advantage_metrics(&result));
                metrics.extend(loss_metrics(&losses));
                if beta != 0.0 {
                    let kl_rows: Vec<KlRow<'_>> = rows
                        .clone()
                        .map(|row| KlRow { old_logps: &old[row], ref_logps: &reference[row], included: included[row] })
                        .collect();
                    metrics.extend(kl_metrics(&kl_rows));
                }
                for (name, expected) in value.as_object().expect("metrics") {
                    match metrics.get(name) {
                        Some(actual) => report.number(name, *actual, expected),
                        None => report.failures.push(format!("metric {name} does not exist")),
                    }
                }
            }
            _ => return true,
        }
        false
    });
    report.equal("fields that nothing compares", fields, Vec::new());
}

fn logprob_from_logits(report: &mut Report, section: &Value) {
    let device = Device::Cpu;
    for result in array(&section["results"]) {
        let temperature = result["temperature"].as_f64().expect("temperature");
        for (row, positions) in array(&section["logits"]).iter().enumerate() {
            let logits: Vec<f32> = array(positions).iter().flat_map(floats).collect();
            let tokens = ids(&section["token_ids"][row]);
            let shape = (tokens.len(), logits.len() / tokens.len());
            let logits = Tensor::from_vec(logits, shape, &device).expect("logits");
            let scores = token_scores(&logits, &tokens, temperature).expect("log-probs");
            let logps: Vec<f64> = scores.iter().map(|score| f64::from(score.logp)).collect();
            let entropies: Vec<f64> = scores.iter().map(|score| f64::from(score.entropy)).collect();
            let at = |name: &str| format!("{name} at temperature {temperature}, row {row}");
            report.numbers(&at("token_logps"), &logps, &result["token_logps"][row]);
            report.numbers(&at("entropy"), &entropies, &result["entropy"][row]);
        }
    }
    report.equal("results", array(&section["results"]).is_empty(), false);
}

fn eos_handling(report: &mut Report, section: &Value) {
    let eos = ids(&section["eos_token_ids"]);
    let max_length = integer(&section["max_completion_length"]) as usize;
    for result in array(&section["results"]) {
        let (completion, finish_reason) = cut_completion(&ids(&result["raw"]), &eos, max_length);
        report.equal("length", completion.len() as u64, integer(&result["length"]));
        report.equal("completion_ids", completion, ids(&result["completion_ids"]));
        report.equal("truncated", Value::Bool(finish_reason == FinishReason::Length), result["truncated"].clone());
    }
}

fn sampler(report: &mut Report, run: &Value) {
    let field = |name: &str| integer(&run[name]);
    let trl = TrlBatching {
        num_rows: field("dataset_len"),
        num_generations: field("num_generations"),
        per_device_train_batch_size: field("per_device_train_batch_size"),
        world_size: field("world_size"),
        gradient_accumulation_steps: field("gradient_accumulation_steps"),
        steps_per_generation: field("steps_per_generation"),
        num_iterations: field("num_iterations"),
    };
    let batching = Batching::of_trl(&trl);
    let order = batching.epoch_completion_order(0);
    let as_u64 = |value: &Value| -> Vec<u64> { array(value).iter().map(integer).collect() };
    let first_block = &order[..(batching.prompts_per_block * batching.num_generations) as usize];
    for (field, expected) in run.as_object().expect("an object") {
        match field.as_str() {
            "dataset_len"
            | "num_generations"
            | "per_device_train_batch_size"
            | "gradient_accumulation_steps"
            | "steps_per_generation"
            | "num_iterations"
            | "world_size" => {}
            "generation_batch_size" => report.equal(field, trl.generation_batch_size(), integer(expected)),
            "unique_prompts_per_generation" => report.equal(field, batching.prompts_per_block, integer(expected)),
            "sampler_len" => report.equal(field, order.len() as u64, integer(expected)),
            "micro_steps_per_epoch" => report.equal(field, batching.slices_per_epoch(), integer(expected)),
            "optimizer_steps_per_epoch" => {
                report.equal(field, batching.optimizer_steps_per_epoch(), integer(expected));
            }
            "dropped_prompts_per_epoch" => report.equal(field, batching.dropped_rows_per_epoch(), integer(expected)),
            "generations_per_epoch" => report.equal(field, batching.blocks_per_epoch(), integer(expected)),
            "first_block" => report.equal(field, first_block.to_vec(), as_u64(expected)),
            // The file lists only the first entries; sampler_len counts all.
            "index_order" => {
                let expected = as_u64(expected);
                report.equal(field, order[..expected.len().min(order.len())].to_vec(), expected);
            }
            other => report.failures.push(format!("nothing compares {other}")),
        }
    }
}

/// Compares the advantages of every estimator on the same two groups. Some definitions differ from ours in one
/// constant; the reference's formula with that constant is checked instead.
fn estimators(report: &mut Report, section: &Value) {
    let rewards: Vec<Option<f64>> = array(&section["rewards"]).iter().map(Value::as_f64).collect();
    let group_size = integer(&section["group_size"]) as usize;
    let lengths: Vec<usize> = array(&section["completion_lengths"]).iter().map(|n| integer(n) as usize).collect();
    let greedy: Vec<Option<f64>> = array(&section["greedy_rewards_for_remax"]).iter().map(Value::as_f64).collect();
    let token_kl: Vec<Vec<f64>> = lengths.iter().map(|&length| vec![0.0; length]).collect();
    let of = |estimator: Estimator, normalize_advantages: bool| -> Advantages {
        let ties = TieRule::Equal;
        let config = AdvantageConfig {
            estimator,
            num_generations: NonZeroUsize::new(group_size).unwrap(),
            beta: 0.0,
            normalize_advantages,
            ties,
        };
        let rows = AdvantageRows {
            rewards: &rewards,
            task_rewards: &rewards,
            token_kl: &token_kl,
            dropped: &vec![false; rewards.len()],
            greedy: &greedy,
            turns: &[],
        };
        advantages(&rows, &config)
    };
    // (r − mean of the group)/(std + epsilon), with the std over the rows that `std` selects.
    let scaled = |std: &dyn Fn(&[Option<f64>]) -> f64, epsilon: f64| -> Vec<f64> {
        let scale = |group: &[Option<f64>]| {
            let divisor = std(group) + epsilon;
            estimator::dr_grpo(group, TieRule::Equal)
                .into_iter()
                .map(move |row: Option<Estimate>| row.expect("scorable").advantage / divisor)
        };
        rewards.chunks(group_size).flat_map(scale).collect()
    };
    let std = |rows: &[Option<f64>]| sample_std(&rows.iter().flatten().copied().collect::<Vec<_>>()).expect("a std");
    for (name, expected) in section.as_object().expect("an object") {
        let tokens = |report: &mut Report, actual: &Advantages| {
            for (row, (tokens, expected)) in actual.token_advantages.iter().zip(array(expected)).enumerate() {
                let mut padded = tokens.clone();
                padded.resize(array(expected).len(), 0.0);
                report.numbers(&format!("{name}[{row}]"), &padded, expected);
                let row_mean = mean(tokens).expect("tokens");
                report.equal("the row's advantage", actual.advantages[row], row_mean);
            }
        };
        match name.as_str() {
            "rewards" | "group_size" | "completion_lengths" | "greedy_rewards_for_remax" => {}
            "rloo" => report.numbers(name, &of(Estimator::Rloo, false).advantages, expected),
            "rloo_normalized_trl" => report.numbers(name, &of(Estimator::Rloo, true).advantages, expected),
            "grpo_trl_group" => report.numbers(name, &of(Estimator::Grpo, false).advantages, expected),
            "dr_grpo" => report.numbers(name, &of(Estimator::DrGrpo, false).advantages, expected),
            "remax" => report.numbers(name, &of(Estimator::Remax, false).advantages, expected),
            "reinforce_pp_tokens_no_kl" => tokens(report, &of(Estimator::ReinforcePp, false)),
            "reinforce_pp_baseline_tokens" => tokens(report, &of(Estimator::ReinforcePpBaseline, false)),
            // Not an estimator of ours: the epsilon differs, and the std is that of the batch. Its parts are compared.
            "grpo_verl" => report.numbers(name, &scaled(&std, 1e-6), expected),
            "grpo_trl_batch_std" => {
                report.numbers(name, &scaled(&|_| std(&rewards), estimator::GROUP_EPSILON), expected);
            }
            other => report.failures.push(format!("nothing compares {other}")),
        }
    }
}

/// Compares the reduction of per-token losses to one number, with the denominator of each loss.
fn loss_aggregation(report: &mut Report, section: &Value) {
    let rows: Vec<Vec<f64>> = array(&section["per_token_loss"])
        .iter()
        .zip(array(&section["mask"]))
        .map(|(losses, mask)| {
            let pairs = array(losses).iter().zip(array(mask));
            pairs
                .filter(|(_, mask)| mask.as_f64() == Some(1.0))
                .map(|(loss, _)| loss.as_f64().expect("a loss"))
                .collect()
        })
        .collect();
    let max_completion_length = integer(&section["max_completion_length"]) as usize;
    let denominators = |rows: &[Vec<f64>]| Denominators {
        completions: rows.len(),
        tokens: rows.iter().map(Vec::len).sum(),
        max_completion_length,
    };
    let aggregate = |loss: Loss, rows: &[Vec<f64>], by: Denominators| -> f64 {
        rows.iter().map(|row| row.iter().sum::<f64>() / by.of_row(loss, row.len())).sum()
    };
    let step = denominators(&rows);
    for (name, expected) in section.as_object().expect("an object") {
        let actual = match name.as_str() {
            "per_token_loss" | "mask" | "max_completion_length" => continue,
            "token_mean" => aggregate(Loss::TokenMean, &rows, step),
            "seq_mean_token_sum" => aggregate(Loss::Sequence, &rows, step),
            "seq_mean_token_mean" => aggregate(Loss::SeqMeanTokenMean, &rows, step),
            "dr_grpo_constant" => aggregate(Loss::DrGrpo, &rows, step),
            // The mistake that a single denominator per step avoids.
            "per_microbatch_token_mean_avg_of_2" => {
                let halves = rows.chunks(2).map(|half| aggregate(Loss::TokenMean, half, denominators(half)));
                let wrong = mean(&halves.collect::<Vec<_>>()).expect("halves");
                let split: f64 = rows.chunks(2).map(|half| aggregate(Loss::TokenMean, half, step)).sum();
                report.equal(
                    "a split changes nothing",
                    (split - aggregate(Loss::TokenMean, &rows, step)).abs() < 1e-12,
                    true,
                );
                report.equal("the mistake shows", (wrong - split).abs() > 1e-3, true);
                wrong
            }
            other => {
                report.failures.push(format!("nothing compares {other}"));
                continue;
            }
        };
        report.number(name, Some(actual), expected);
    }
}

fn soft_overlong_rewards(report: &mut Report, section: &Value) {
    for one in array(section) {
        let (limit, cache) = (integer(&one["L_max"]) as u32, integer(&one["L_cache"]) as u32);
        let actual = soft_overlong(integer(&one["length"]) as usize, limit, cache);
        report.number(&format!("{one}"), Some(actual), &one["reward"]);
    }
}

/// Compares whether TRL and we accept a configuration; a step that we cannot express counts as a difference, too.
fn config_validity(report: &mut Report, case: &Value) {
    let conversion = convert(&case["config"], None);
    let accepted = conversion.errors.is_empty() && conversion.unsupported.is_empty();
    let what = format!(
        "{} ({}): errors {:?}, unsupported {:?}",
        case["config"], case["why"], conversion.errors, conversion.unsupported
    );
    report.equal(&what, Value::Bool(accepted), case["ok"].clone());
}

fn folder() -> PathBuf {
    rlood_test_support::folder_of("RLOOD_VECTORS", "vectors")
}

#[test]
fn vectors() {
    let folder = folder();
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("a directory entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} holds no vectors", folder.display());
    let mut failed = Vec::new();
    for path in files {
        let file: Value =
            serde_json::from_slice(&std::fs::read(&path).expect("readable")).expect("the vectors are JSON");
        let mut run = |name: String, compare: &dyn Fn(&mut Report)| {
            let mut report = Report::default();
            compare(&mut report);
            if report.compared == 0 {
                report.failures.push("nothing was compared".into());
            }
            if report.failures.is_empty() {
                println!("vectors {name}: ok, {} numbers", report.compared);
            } else {
                println!("vectors {name}: FAILED\n  {}", report.failures.join("\n  "));
                failed.push(name);
            }
        };
        let sections = file.as_object().expect("an object of sections");
        for (name, section) in sections {
            match name.as_str() {
                "cases" => {
                    for one in array(section) {
                        run(one["name"].as_str().unwrap_or("unnamed").to_string(), &|report| case(report, one));
                    }
                }
                "logprob_from_logits" => run(name.clone(), &|report| logprob_from_logits(report, section)),
                "eos_handling" => run(name.clone(), &|report| eos_handling(report, section)),
                "sampler" => {
                    for (index, one) in array(section).iter().enumerate() {
                        run(format!("sampler {index}"), &|report| sampler(report, one));
                    }
                }
                "estimators" => run(name.clone(), &|report| estimators(report, section)),
                "loss_aggregation" => run(name.clone(), &|report| loss_aggregation(report, section)),
                "soft_overlong" => run(name.clone(), &|report| soft_overlong_rewards(report, section)),
                "config_validity" => {
                    for (index, one) in array(section).iter().enumerate() {
                        run(format!("config_validity {index}"), &|report| config_validity(report, one));
                    }
                }
                other if ABOUT.contains(&other) => {}
                other => run(other.to_string(), &|report| report.failures.push("an unknown section".into())),
            }
        }
        let known = [
            "cases",
            "logprob_from_logits",
            "eos_handling",
            "sampler",
            "estimators",
            "loss_aggregation",
            "soft_overlong",
            "config_validity",
        ];
        if !sections.keys().any(|key| known.contains(&key.as_str())) {
            failed.push(format!("{}: holds no known section", path.display()));
        }
    }
    assert!(failed.is_empty(), "these cases differ: {failed:?}");
}
