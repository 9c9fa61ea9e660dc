//! Evaluation as it is asked for, and which rows of the training dataset it holds out.

use std::collections::{BTreeMap, HashSet};

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::foreign::advice;
use super::reader::Reader;
use super::rewards::read_rewards;
use super::secrets::eval_secret_name;
use super::settings::EVAL;
use super::sources::{DatasetSource, read_dataset};
use super::{RewardPlan, RewardSecrets, SplitRule};

/// Evaluation, as asked for.
#[derive(Debug, Clone, Deserialize)]
pub struct EvalSpec {
    /// The evaluation prompts; None with `fraction`, or when missing or refused.
    #[serde(skip)]
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
    #[serde(skip)]
    pub rewards: Option<Vec<RewardPlan>>,
}

/// The evaluation, and the secrets of its own rewards, by [`eval_secret_name`].
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
        let weighted = field
            .value()
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .position(|source| !source["weight"].is_null());
        if let Some(item) = weighted.and_then(|index| field.items()?.into_iter().nth(index)) {
            item.fail_at("weight", "unknown_field", "an evaluation takes every row once: leave the weight out");
        }
        read_dataset(&field)
    };
    let own = reader.field("rewards");
    let (rewards, secrets) = read_rewards(&own);
    EVAL.read_rest(&reader, &mut values);
    let eval = EvalSpec { dataset, rewards: own.value().map(|_| rewards), ..values.into_plan() };
    reader.finish(advice);
    (eval, secrets.into_iter().map(|(name, secrets)| (eval_secret_name(&name), secrets)).collect())
}

/// How many of `num_rows` rows a fraction holds out: the nearest number, at least one of each side.
pub fn held_out_count(num_rows: u64, fraction: f64) -> u64 {
    ((num_rows as f64 * fraction).round() as u64).clamp(1, num_rows.saturating_sub(1).max(1))
}

/// What tells prompts apart: SHA-256 of a prompt. Chat messages are equal whatever the order of their keys.
pub type PromptKey = [u8; 32];

/// The key of a dataset's `prompt`.
pub fn prompt_key(prompt: &Value) -> PromptKey {
    let mut hasher = Sha256::new();
    hash_canonical(prompt, &mut hasher);
    hasher.finalize().into()
}

/// Hashes JSON with the keys of objects in order.
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

/// Which rows are held out, ascending. The choice depends on the rule, the seed and the prompts alone.
///
/// By [`SplitRule::RowNumber`] these are the rows with the smallest SHA-256 of seed and row number. By
/// [`SplitRule::PromptHash`] they are the rows of the prompts with the smallest SHA-256 of seed and prompt, until there are
/// [`held_out_count`] of them: the rows of equal prompts stay together, so a few more may be held out. A prompt whose rows
/// would leave none to train on is passed over; where all prompts are equal nothing is held out.
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

/// Evaluated prompts that are training prompts too.
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
            // A larger share holds out the same rows and more.
            let more = held_out_rows(rule, &prompts, 0.2, 42);
            assert!(more.len() == 20 && rows.iter().all(|row| more.contains(row)));
        }
        // Recorded with rlood 0.1: jobs of that version resume with these rows.
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
        // The same prompts in another order are split the same way.
        let turned: Vec<PromptKey> = prompts.iter().rev().copied().collect();
        let of_turned: Vec<u64> =
            held_out_rows(SplitRule::PromptHash, &turned, 0.2, 7).iter().map(|row| 89 - row).rev().collect();
        assert_eq!(of_turned, rows);
        // By row number they fall on both sides.
        let by_number = held_out_rows(SplitRule::RowNumber, &prompts, 0.2, 7);
        let trained = (0..90).filter(|row| by_number.binary_search(row).is_err()).map(|row| &prompts[row as usize]);
        assert!(shared_prompts(trained, by_number.iter().map(|row| &prompts[*row as usize])) > 0);
    }

    #[test]
    fn a_frequent_prompt_never_takes_all_rows_to_train_on() {
        for seed in 0..20 {
            let rows = held_out_rows(SplitRule::PromptHash, &keys((0..10).map(|row| u64::from(row == 3))), 0.3, seed);
            assert!((1..=9).contains(&rows.len()), "{rows:?}");
        }
        assert!(held_out_rows(SplitRule::PromptHash, &keys([5; 10].into_iter()), 0.3, 0).is_empty());
    }

    #[test]
    fn prompts_are_told_apart_by_what_they_say() {
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
    fn a_fraction_leaves_at_least_one_row_on_each_side() {
        assert_eq!(held_out_count(10, 0.01), 1);
        assert_eq!(held_out_count(10, 0.99), 9);
        assert_eq!(held_out_count(2, 0.5), 1);
    }
}
