//! Evaluation as it is asked for, and which rows of the training dataset it holds out.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::document::{DatasetSource, read_dataset};
use super::foreign::advice;
use super::reader::Reader;
use super::rewards::read_rewards;
use super::secrets::eval_secret_name;
use super::sections::MAX_STEPS;
use super::{RewardPlan, RewardSecrets};

/// Evaluation, as asked for.
#[derive(Debug, Clone)]
pub struct EvalSpec {
    /// The evaluation prompts; None with `fraction`, or when missing or refused.
    pub dataset: Option<DatasetSource>,
    /// The share of the training dataset to hold out instead.
    pub fraction: Option<f64>,
    /// Optimizer steps between evaluations.
    pub every_steps: u64,
    /// Evaluate before the first step too.
    pub before_start: bool,
    /// Completions a prompt.
    pub num_generations: u32,
    /// 0 = greedy.
    pub temperature: f64,
    /// None = as in training.
    pub top_p: Option<f64>,
    /// None = as in training.
    pub top_k: Option<u32>,
    /// None = as in training.
    pub min_p: Option<f64>,
    /// None = as in training.
    pub repetition_penalty: Option<f64>,
    /// Rewards of its own; None = the job's.
    pub rewards: Option<Vec<RewardPlan>>,
}

/// The evaluation, and the secrets of its own rewards, by [`eval_secret_name`].
pub(super) fn read_eval(reader: Reader<'_>) -> (EvalSpec, BTreeMap<String, RewardSecrets>) {
    let fraction_field = reader.field("fraction");
    let fraction = fraction_field.number("greater than 0 and less than 1", |value| value > 0.0 && value < 1.0);
    let dataset = if fraction_field.value().is_some() {
        if reader.field("dataset").value().is_some() {
            fraction_field.fail("conflict", "give either a dataset or a fraction of the training dataset, not both");
        }
        None
    } else {
        read_dataset(&reader.required(
            "dataset",
            "evaluation needs prompts: {\"id\": …} or {\"records\": […]}, or \"fraction\": 0.1 to hold out a share of the training dataset",
        ))
    };
    let own = reader.field("rewards");
    let (rewards, secrets) = read_rewards(&own);
    let unit = |value: f64| value > 0.0 && value <= 1.0;
    let eval = EvalSpec {
        dataset,
        fraction,
        every_steps: reader.field("every_steps").whole(1..=MAX_STEPS).unwrap_or(20),
        before_start: reader.field("before_start").bool().unwrap_or(true),
        num_generations: reader.field("num_generations").whole(1..=1024).unwrap_or(1),
        temperature: reader
            .field("temperature")
            .number("at least 0 (0 = greedy) and at most 100", |value| (0.0..=100.0).contains(&value))
            .unwrap_or(0.0),
        top_p: reader.field("top_p").number("greater than 0 and at most 1 (1 = off)", unit),
        top_k: reader.field("top_k").whole(0..=u64::from(u32::MAX)),
        min_p: reader
            .field("min_p")
            .number("at least 0 (0 = off) and less than 1", |value| (0.0..1.0).contains(&value)),
        repetition_penalty: reader
            .field("repetition_penalty")
            .number("greater than 0 (1 = off) and at most 10", |value| value > 0.0 && value <= 10.0),
        rewards: own.value().map(|_| rewards),
    };
    reader.finish(advice);
    (eval, secrets.into_iter().map(|(name, secrets)| (eval_secret_name(&name), secrets)).collect())
}

/// How many of `num_rows` rows a fraction holds out: the nearest number, at least one of each side.
pub fn held_out_count(num_rows: u64, fraction: f64) -> u64 {
    ((num_rows as f64 * fraction).round() as u64).clamp(1, num_rows.saturating_sub(1).max(1))
}

/// Which rows are held out, ascending: those with the smallest SHA-256 of seed and row number, so that the choice depends on
/// nothing else.
pub fn held_out_rows(num_rows: u64, fraction: f64, seed: u64) -> Vec<u64> {
    let mut keyed: Vec<([u8; 32], u64)> =
        (0..num_rows).map(|row| (Sha256::digest(format!("held out {seed} {row}")).into(), row)).collect();
    keyed.sort_unstable();
    let mut rows: Vec<u64> =
        keyed.into_iter().take(held_out_count(num_rows, fraction) as usize).map(|(_, row)| row).collect();
    rows.sort_unstable();
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_held_out_rows_follow_from_the_seed_alone() {
        let rows = held_out_rows(100, 0.1, 42);
        assert_eq!(rows.len(), 10);
        assert!(rows.windows(2).all(|pair| pair[0] < pair[1]) && rows.iter().all(|row| *row < 100));
        assert_eq!(rows, held_out_rows(100, 0.1, 42));
        assert_ne!(rows, held_out_rows(100, 0.1, 43));
        // A larger share holds out the same rows and more.
        let more = held_out_rows(100, 0.2, 42);
        assert!(more.len() == 20 && rows.iter().all(|row| more.contains(row)));
    }

    #[test]
    fn a_fraction_leaves_at_least_one_row_on_each_side() {
        assert_eq!(held_out_count(10, 0.01), 1);
        assert_eq!(held_out_count(10, 0.99), 9);
        assert_eq!(held_out_count(2, 0.5), 1);
    }
}
