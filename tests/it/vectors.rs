//! Every number of `tests/fixtures/vectors` (TRL's), through the engine's own functions.

use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use rlood::engine::advantage::{AdvantageConfig, RewardWeight, advantages, combine_rewards, sequence_kl};
use rlood::engine::loss::{LossConfig, LossRow, row_loss, total_loss};
use rlood::engine::metrics::{KlRow, RolloutRows, advantage_metrics, kl_metrics, loss_metrics, rollout_metrics};
use rlood::engine::ops::token_scores;
use rlood::engine::rollout::{Batching, TrlBatching, cut_completion, is_included};
use rlood::event::{FinishReason, Metrics};
use rlood::sample::{RewardValue, Score};
use rlood::spec::Combine;
use rlood::spec::trl::convert;
use serde_json::Value;

const TOLERANCE: f64 = 2e-5;
/// Sections that a later issue builds.
const NOT_BUILT: [&str; 3] = ["estimators", "loss_aggregation", "soft_overlong"];
/// Keys that describe the file.
const ABOUT: [&str; 3] = ["schema", "reference", "tolerance"];

/// What differs, collected so that one run shows everything.
#[derive(Default)]
struct Report {
    failures: Vec<String>,
    compared: usize,
}

impl Report {
    fn number(&mut self, what: &str, actual: Option<f64>, expected: &Value) {
        self.compared += 1;
        // The reference computes in f32: what overflows there is not a number there.
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

/// One row's values, widened to the fixture's T columns: nothing beyond the completion.
fn padded(values: &[f32], width: usize) -> Vec<f64> {
    let mut padded: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
    padded.resize(width, 0.0);
    padded
}

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
    let beta = config["beta"].as_f64().expect("beta");
    let clip = &config["reward_clip_range"];
    let advantage_config = AdvantageConfig {
        num_generations: integer(&config["num_generations"]) as usize,
        beta,
        reward_clip_range: clip[0].as_f64().zip(clip[1].as_f64()),
        normalize_advantages: config["normalize_advantages"] == Value::Bool(true),
    };
    let result = advantages(&weighted, &kl, &advantage_config);
    let epsilon = config["epsilon"].as_f64().expect("epsilon");
    let loss_config = LossConfig { epsilon, epsilon_high: config["epsilon_high"].as_f64().unwrap_or(epsilon) };
    let losses: Vec<_> = rows
        .clone()
        .map(|row| LossRow {
            new_logps: &new[row],
            old_logps: &old[row],
            included: included[row],
            advantage: result.advantages[row],
        })
        .map(|row| row_loss(&row, &loss_config, lengths.len()))
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
            // TRL computes no KL at beta = 0, and neither do we: there is nothing to compare with.
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
            "loss" => report.number(field, Some(total_loss(&losses, lengths.len())), value),
            "grad_new_logps" => rows.clone().for_each(|row| {
                let gradient = losses[row].token_gradient(lengths[row]);
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
            // Written down to a length; sampler_len counts the rest.
            "index_order" => {
                let expected = as_u64(expected);
                report.equal(field, order[..expected.len().min(order.len())].to_vec(), expected);
            }
            other => report.failures.push(format!("nothing compares {other}")),
        }
    }
}

/// TRL's verdict on a configuration, and ours; a step that cannot be expressed here would be a difference, too.
fn config_validity(report: &mut Report, case: &Value) {
    let conversion = convert(&case["config"], None);
    let accepted = conversion.errors.is_empty() && conversion.unsupported.is_empty();
    let what = format!("{} ({}): errors {:?}, unsupported {:?}", case["config"], case["why"], conversion.errors, conversion.unsupported);
    report.equal(&what, Value::Bool(accepted), case["ok"].clone());
}

fn folder() -> PathBuf {
    let default = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vectors");
    std::env::var_os("RLOOD_VECTORS").map_or(default, PathBuf::from)
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
                "config_validity" => {
                    for (index, one) in array(section).iter().enumerate() {
                        run(format!("config_validity {index}"), &|report| config_validity(report, one));
                    }
                }
                other if NOT_BUILT.contains(&other) => println!("{other}: not built"),
                other if ABOUT.contains(&other) => {}
                other => run(other.to_string(), &|report| report.failures.push("an unknown section".into())),
            }
        }
        let known = ["cases", "logprob_from_logits", "eos_handling", "sampler", "config_validity"];
        if !sections.keys().any(|key| known.contains(&key.as_str())) {
            failed.push(format!("{}: holds no known section", path.display()));
        }
    }
    assert!(failed.is_empty(), "these cases differ: {failed:?}");
}
