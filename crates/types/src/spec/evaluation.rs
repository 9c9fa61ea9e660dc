//! The requested evaluation, and which rows of the training dataset it holds out.

use std::collections::{BTreeMap, HashSet};

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::foreign::advice;
use super::reader::{Field, Reader};
use super::rewards::read_rewards;
use super::secrets::{eval_secret_name, guard_secret_name};
use super::settings::{DEFAULT_MARGIN, EVAL, Range};
use super::sources::{DatasetSource, read_dataset};
use super::{RewardPlan, RewardSecrets, SplitRule};

/// The evaluation section of a job, as requested.
#[derive(Debug, Clone, Deserialize)]
pub struct EvalSpec {
    /// The evaluation prompts; `None` = with `fraction`, missing or rejected.
    #[serde(skip)]
    pub dataset: Option<DatasetSource>,
    /// Share of the training dataset to hold out instead of a dataset.
    pub fraction: Option<f64>,
    /// Optimizer steps between evaluations.
    pub every_steps: u64,
    /// Whether to evaluate before the first step too.
    pub before_start: bool,
    /// Completions sampled per prompt.
    pub num_generations: u32,
    /// Sampling temperature; 0 = greedy.
    pub temperature: f64,
    /// Top-p; `None` = as in training.
    pub top_p: Option<f64>,
    /// Top-k; `None` = as in training.
    pub top_k: Option<u32>,
    /// Min-p; `None` = as in training.
    pub min_p: Option<f64>,
    /// Repetition penalty; `None` = as in training.
    pub repetition_penalty: Option<f64>,
    /// Rewards used in evaluations; `None` = the job's rewards.
    #[serde(skip)]
    pub rewards: Option<Vec<RewardPlan>>,
    /// Share of the training dataset that only the verdict uses; 0 = none, `None` = 0.1 with `fraction`.
    pub test_fraction: Option<f64>,
    /// Prompts that only the verdict uses, instead of a share of the training dataset.
    #[serde(skip)]
    pub test_dataset: Option<DatasetSource>,
    /// The guard set (prompts on which training must not make the model worse); `None` = none.
    #[serde(skip)]
    pub guard: Option<GuardSpec>,
    /// Whether the server creates a verdict automatically when the job succeeds.
    pub auto_verdict: bool,
}

impl EvalSpec {
    /// Returns the share of the training dataset that only the verdict uses.
    pub fn wanted_test_fraction(&self) -> f64 {
        let default = if self.fraction.is_some() && self.test_dataset.is_none() { DEFAULT_TEST_FRACTION } else { 0.0 };
        self.test_fraction.unwrap_or(default)
    }
}

/// A requested guard set: prompts on which training must not make the model worse.
#[derive(Debug, Clone)]
pub struct GuardSpec {
    /// The prompts of the guard set; `None` = missing or rejected.
    pub dataset: Option<DatasetSource>,
    /// Rewards used on the guard set; `None` = those of the evaluation.
    pub rewards: Option<Vec<RewardPlan>>,
    /// How far the mean reward on the guard set may fall.
    pub margin: f64,
}

/// Default share of the training dataset that only the verdict uses, if `eval.fraction` is given.
pub const DEFAULT_TEST_FRACTION: f64 = 0.1;
/// Minimum number of rows of a test set. A smaller set has too little statistical power to be worth taking from training.
pub const FEWEST_TEST_ROWS: u64 = 50;
/// Maximum number of rows of a test set that is taken from the training dataset.
pub const MOST_TEST_ROWS: u64 = 500;

/// Reads the evaluation, and the secrets of its own rewards by the names under which they are stored.
pub(super) fn read_eval(reader: Reader<'_>) -> (EvalSpec, BTreeMap<String, RewardSecrets>) {
    let mut values = EVAL.read_first(&reader);
    let fraction = reader.entry("fraction");
    let dataset = if fraction.value().is_some() {
        if reader.field("dataset").value().is_some() {
            fraction.fail("conflict", "give either a dataset or a fraction of the training dataset, not both");
        }
        None
    } else {
        let field = reader.required(
            "dataset",
            "evaluation needs prompts: {\"id\": …} or {\"records\": […]}, or \"fraction\": 0.1 to hold out a share of the training dataset",
        );
        read_unweighted(&field)
    };
    let test = reader.field("test_dataset");
    if test.value().is_some() && reader.field("test_fraction").value().is_some_and(|share| share.as_f64() != Some(0.0))
    {
        test.fail("conflict", "give either a test dataset or a test fraction of the training dataset, not both");
    }
    let test_dataset = test.value().and_then(|_| read_unweighted(&test));
    let (guard, guard_secrets) = match reader.field("guard").object() {
        Some(guard) => {
            let (guard, secrets) = read_guard(guard);
            (Some(guard), secrets)
        }
        None => (None, BTreeMap::new()),
    };
    let own = reader.field("rewards");
    let (rewards, secrets) = read_rewards(&own);
    EVAL.read_rest(&reader, &mut values);
    let rewards = own.value().map(|_| rewards);
    let eval = EvalSpec { dataset, rewards, test_dataset, guard, ..values.into_plan() };
    if let (Some(fraction), Some(test)) = (eval.fraction, eval.test_fraction)
        && fraction + test >= 1.0
    {
        let detail = format!(
            "fraction ({fraction}) and test_fraction ({test}) leave no rows to train on: their sum must be below 1"
        );
        reader.entry("test_fraction").fail("out_of_range", detail);
    }
    reader.finish(advice);
    let own = secrets.into_iter().map(|(name, secrets)| (eval_secret_name(&name), secrets));
    let of_guard = guard_secrets.into_iter().map(|(name, secrets)| (guard_secret_name(&name), secrets));
    (eval, own.chain(of_guard).collect())
}

/// Reads an evaluation dataset, whose rows are all used once, so that weights of sources are rejected.
fn read_unweighted(field: &Field<'_>) -> Option<DatasetSource> {
    let sources = field.value().and_then(Value::as_array).into_iter().flatten();
    let weighted = sources.into_iter().position(|source| !source["weight"].is_null());
    if let Some(item) = weighted.and_then(|index| field.items()?.into_iter().nth(index)) {
        item.fail_at("weight", "unknown_field", "an evaluation uses every row once: leave the weight out");
    }
    read_dataset(field)
}

fn read_guard(reader: Reader<'_>) -> (GuardSpec, BTreeMap<String, RewardSecrets>) {
    let field = reader.required("dataset", "a guard needs prompts: {\"id\": …} or {\"records\": […]}");
    let dataset = read_unweighted(&field);
    let own = reader.field("rewards");
    let (rewards, secrets) = read_rewards(&own);
    let margin = reader.field("margin");
    let margin = margin.value().map_or(Some(DEFAULT_MARGIN), |_| margin.number_in(Range::at_least(0.0)));
    reader.finish(advice);
    let rewards = own.value().map(|_| rewards);
    (GuardSpec { dataset, rewards, margin: margin.unwrap_or(DEFAULT_MARGIN) }, secrets)
}

/// Returns how many of `num_rows` rows a fraction holds out: the nearest number, with at least one row on each side.
pub fn held_out_count(num_rows: u64, fraction: f64) -> u64 {
    ((num_rows as f64 * fraction).round() as u64).clamp(1, num_rows.saturating_sub(1).max(1))
}

/// Identity of a prompt: its SHA-256. Chat messages are equal whatever the order of their keys.
pub type PromptKey = [u8; 32];

/// Returns the identity of the prompt in a dataset row.
pub fn prompt_key(prompt: &Value) -> PromptKey {
    let mut hasher = Sha256::new();
    hash_canonical(prompt, &mut hasher);
    hasher.finalize().into()
}

/// Hashes JSON with the keys of objects in sorted order.
fn hash_canonical(value: &Value, hasher: &mut Sha256) {
    match value {
        Value::Array(items) => {
            hasher.update(format!("[{}", items.len()));
            items.iter().for_each(|item| hash_canonical(item, hasher));
        }
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_unstable_by_key(|(key, _)| key.as_str());
            hasher.update(format!("{{{}", entries.len()));
            for (key, value) in entries {
                hasher.update(format!("{}:{key}", key.len()));
                hash_canonical(value, hasher);
            }
        }
        Value::String(text) => hasher.update(format!("\"{}:{text}", text.len())),
        Value::Null | Value::Bool(_) | Value::Number(_) => hasher.update(format!("={value};")),
    }
}

/// Returns the held-out rows, in ascending order. The choice depends only on the rule, the seed and the prompts.
///
/// With [`SplitRule::RowNumber`] these are the rows with the smallest SHA-256 of seed and row number. With
/// [`SplitRule::PromptHash`] they are the rows of the prompts with the smallest SHA-256 of seed and prompt, until there are
/// [`held_out_count`] of them. The rows of equal prompts stay together, so a few more rows may be held out. A prompt whose rows
/// would leave none to train on is skipped; if all prompts are equal, nothing is held out.
pub fn held_out_rows(rule: SplitRule, prompts: &[PromptKey], fraction: f64, seed: u64) -> Vec<u64> {
    let num_rows = prompts.len() as u64;
    let wanted = held_out_count(num_rows, fraction) as usize;
    let mut keyed: Vec<(PromptKey, u64)> = match rule {
        SplitRule::RowNumber => {
            (0..num_rows).map(|row| (Sha256::digest(format!("held out {seed} {row}")).into(), row)).collect()
        }
        SplitRule::PromptHash => {
            let of_seed = |key: &PromptKey| -> PromptKey {
                Sha256::new().chain_update(format!("held out {seed} ")).chain_update(key).finalize().into()
            };
            prompts.iter().map(of_seed).zip(0..).collect()
        }
    };
    keyed.sort_unstable();
    let mut rows = Vec::with_capacity(wanted);
    for equal in keyed.chunk_by(|one, next| one.0 == next.0) {
        if rows.len() >= wanted {
            break;
        }
        if rows.len() + equal.len() < prompts.len() {
            rows.extend(equal.iter().map(|(_, row)| *row));
        }
    }
    rows.sort_unstable();
    rows
}

/// Returns how many of `num_rows` rows only the verdict uses: the fraction's number, at most [`MOST_TEST_ROWS`]; 0 if that
/// is fewer than [`FEWEST_TEST_ROWS`].
pub fn test_count(num_rows: u64, fraction: f64) -> u64 {
    let wanted = (num_rows as f64 * fraction).round() as u64;
    if wanted < FEWEST_TEST_ROWS { 0 } else { wanted.min(MOST_TEST_ROWS) }
}

/// Returns the rows that only the verdict uses, in ascending order and disjoint from `held_out` (ascending). The choice depends
/// only on the prompts and the seed: the rows of the prompts with the smallest SHA-256 of seed and prompt, as many as the fraction
/// asks for, at most 500.
///
/// The rows of equal prompts stay together. A prompt is skipped if its rows would make more than 500, or would leave none to train
/// on. If fewer than 50 rows remain, there are none.
pub fn test_rows(prompts: &[PromptKey], held_out: &[u64], fraction: f64, seed: u64) -> Vec<u64> {
    let wanted = test_count(prompts.len() as u64, fraction) as usize;
    let most = wanted.max(MOST_TEST_ROWS as usize).min(prompts.len().saturating_sub(held_out.len() + 1));
    let of_seed = |key: &PromptKey| -> PromptKey {
        Sha256::new().chain_update(format!("verdict {seed} ")).chain_update(key).finalize().into()
    };
    // Under [`SplitRule::RowNumber`], rows with the same prompt may be used both for evaluation and for training.
    let evaluated: HashSet<&PromptKey> = held_out.iter().filter_map(|row| prompts.get(*row as usize)).collect();
    let mut keyed: Vec<(PromptKey, u64)> = prompts
        .iter()
        .zip(0..)
        .filter(|(key, _)| !evaluated.contains(key))
        .map(|(key, row)| (of_seed(key), row))
        .collect();
    keyed.sort_unstable();
    let mut rows = Vec::with_capacity(wanted);
    for equal in keyed.chunk_by(|one, next| one.0 == next.0) {
        if rows.len() >= wanted {
            break;
        }
        if rows.len() + equal.len() <= most {
            rows.extend(equal.iter().map(|(_, row)| *row));
        }
    }
    if (rows.len() as u64) < FEWEST_TEST_ROWS {
        rows.clear();
    }
    rows.sort_unstable();
    rows
}

/// Counts the evaluated prompts that are also training prompts.
pub fn shared_prompts<'k>(
    trained: impl IntoIterator<Item = &'k PromptKey>,
    evaluated: impl IntoIterator<Item = &'k PromptKey>,
) -> u64 {
    let trained: HashSet<&PromptKey> = trained.into_iter().collect();
    evaluated.into_iter().filter(|key| trained.contains(key)).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const RECORDED: [u64; 5] = [11, 16, 48, 92, 98];

    fn keys(prompts: impl Iterator<Item = u64>) -> Vec<PromptKey> {
        prompts.map(|prompt| prompt_key(&json!(format!("prompt {prompt}")))).collect()
    }

    #[test]
    fn the_held_out_rows_follow_from_the_seed_alone() {
        let prompts = keys(0..100);
        for rule in [SplitRule::RowNumber, SplitRule::PromptHash] {
            let rows = held_out_rows(rule, &prompts, 0.1, 42);
            assert_eq!(rows.len(), 10);
            assert!(rows.windows(2).all(|pair| pair[0] < pair[1]) && rows.iter().all(|row| *row < 100));
            assert_eq!(rows, held_out_rows(rule, &prompts, 0.1, 42));
            assert_ne!(rows, held_out_rows(rule, &prompts, 0.1, 43));
            // A larger share holds out the same rows and additional ones.
            let more = held_out_rows(rule, &prompts, 0.2, 42);
            assert!(more.len() == 20 && rows.iter().all(|row| more.contains(row)));
        }
        // The expected rows were recorded with rlood 0.1. Jobs of that version resume with these rows.
        assert_eq!(held_out_rows(SplitRule::RowNumber, &prompts, 0.05, 42), RECORDED);
    }

    #[test]
    fn equal_prompts_fall_on_the_same_side_wherever_their_rows_stand() {
        let prompts = keys((0..90).map(|row| row % 30));
        let rows = held_out_rows(SplitRule::PromptHash, &prompts, 0.2, 7);
        assert_eq!(rows.len(), 18);
        let is_held_out = |row: u64| rows.binary_search(&row).is_ok();
        assert!(
            (0..30).all(|row| is_held_out(row) == is_held_out(row + 30) && is_held_out(row) == is_held_out(row + 60))
        );
        let trained = (0..90).filter(|row| !is_held_out(*row)).map(|row| &prompts[row as usize]);
        assert_eq!(shared_prompts(trained, rows.iter().map(|row| &prompts[*row as usize])), 0);
        // The same prompts in another order are split in the same way.
        let turned: Vec<PromptKey> = prompts.iter().rev().copied().collect();
        let of_turned: Vec<u64> =
            held_out_rows(SplitRule::PromptHash, &turned, 0.2, 7).iter().map(|row| 89 - row).rev().collect();
        assert_eq!(of_turned, rows);
        // [`SplitRule::RowNumber`] puts equal prompts on both sides.
        let by_number = held_out_rows(SplitRule::RowNumber, &prompts, 0.2, 7);
        let trained = (0..90).filter(|row| by_number.binary_search(row).is_err()).map(|row| &prompts[row as usize]);
        assert!(shared_prompts(trained, by_number.iter().map(|row| &prompts[*row as usize])) > 0);
    }

    #[test]
    fn a_frequent_prompt_always_leaves_rows_to_train_on() {
        for seed in 0..20 {
            let rows = held_out_rows(SplitRule::PromptHash, &keys((0..10).map(|row| u64::from(row == 3))), 0.3, seed);
            assert!((1..=9).contains(&rows.len()), "{rows:?}");
        }
        assert!(held_out_rows(SplitRule::PromptHash, &keys([5; 10].into_iter()), 0.3, 0).is_empty());
    }

    #[test]
    fn prompts_are_identified_by_their_content() {
        let chat = json!([{"role": "user", "content": "2+2="}]);
        assert_eq!(prompt_key(&chat), prompt_key(&json!([{"content": "2+2=", "role": "user"}])));
        let others = [
            json!("2+2="),
            json!("2+2= "),
            json!([{"role": "system", "content": "2+2="}]),
            json!([]),
            json!([{"role": "user", "content": "2+2="}, {"role": "user", "content": ""}]),
        ];
        let mut all: Vec<PromptKey> = others.iter().chain([&chat]).map(prompt_key).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 6);
    }

    #[test]
    fn the_test_rows_are_rows_of_their_own_between_50_and_500() {
        for (num_rows, expected) in [(100, 0), (494, 0), (500, 50), (2000, 200), (20_000, 500)] {
            let prompts = keys(0..num_rows);
            let held_out = held_out_rows(SplitRule::PromptHash, &prompts, 0.2, 42);
            let rows = test_rows(&prompts, &held_out, 0.1, 42);
            assert_eq!((rows.len() as u64, test_count(num_rows, 0.1)), (expected, expected), "{num_rows}");
            assert!(rows.iter().all(|row| held_out.binary_search(row).is_err()));
            assert!(rows.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(rows.is_empty() || rows != test_rows(&prompts, &held_out, 0.1, 43));
        }
    }

    #[test]
    fn equal_prompts_are_never_divided_between_test_and_training() {
        let prompts = keys((0..900).map(|row| row % 300));
        let held_out = held_out_rows(SplitRule::RowNumber, &prompts, 0.1, 7);
        let rows = test_rows(&prompts, &held_out, 0.1, 7);
        assert!(rows.len() >= 90 && rows.len() <= 92, "{}", rows.len());
        let is_test = |row: &u64| rows.binary_search(row).is_ok();
        let others = (0..900).filter(|row| !is_test(row)).map(|row| &prompts[row as usize]);
        assert_eq!(shared_prompts(others, rows.iter().map(|row| &prompts[*row as usize])), 0);
        // Nine tenths of the rows have one prompt, so too few others remain for a test set.
        assert!(test_rows(&keys((0..600).map(|row| if row < 560 { 0 } else { row })), &[], 0.1, 7).is_empty());
    }

    #[test]
    fn a_fraction_leaves_at_least_one_row_on_each_side() {
        assert_eq!(held_out_count(10, 0.01), 1);
        assert_eq!(held_out_count(10, 0.99), 9);
        assert_eq!(held_out_count(2, 0.5), 1);
    }
}
