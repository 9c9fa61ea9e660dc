//! Verdicts: whether the trained model is better than the base model on the same rows.
//!
//! The server samples both models in the process of the served models, and passes their answers as a [`JudgeTask`] to a child
//! process (`rlood_worker::judge`), which calls the rewards and reports its results row by row ([`JudgeLine`]). [`VerdictResult::of`], a pure function over [`statistics`],
//! derives the result from the rows.

pub mod statistics;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use self::statistics::{Direction, FEWEST_ROWS, Method, paired, pass_at_k};
use crate::event::FinishReason;
use crate::id::JobId;
use crate::one_shot::ChildLine;
use crate::preflight::verdict::{combined_range, range_of};
use crate::spec::{Plan, RewardPlan, RewardSecrets, usual_temperature};

pub use crate::spec::VerdictSampling;

/// Maximum number of won and of lost rows that a result includes. The verdict's rows include all of them.
const EXAMPLES: usize = 3;

/// The task of a verdict process, sent to its standard input as one line of JSON.
#[derive(Serialize, Deserialize)]
pub struct JudgeTask {
    /// Id of the job, which requests to rewards contain.
    pub job: JobId,
    /// Step of the checkpoint.
    pub step: u64,
    /// The job's resolved plan, which has an evaluation.
    pub plan: Plan,
    /// Secrets of the rewards, by the names under which they are stored.
    pub secrets: BTreeMap<String, RewardSecrets>,
    /// Addresses that reward requests may reach in addition to public ones.
    pub allow_outgoing: Vec<String>,
    /// Directories of the reward models, by model id.
    pub reward_models: BTreeMap<String, String>,
    /// Source of the rows.
    pub rows_from: RowsFrom,
    /// The test rows, then those of the guard set, on which training must not make the model worse.
    pub rows: Vec<AnsweredRow>,
    /// How both models were sampled, and which reward passes.
    pub sampling: VerdictSampling,
}

/// A dataset row with the answers of both models, before they are judged.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AnsweredRow {
    /// The set that the row belongs to.
    pub set: RowSet,
    /// Number of the row in its dataset, from 0.
    pub row: u64,
    /// The prompt as both models saw it.
    pub prompt: String,
    /// The chat messages, if the prompt is a chat.
    pub messages: Option<Value>,
    /// All other columns of the row.
    pub columns: Map<String, Value>,
    /// The base model's answers.
    pub base: Vec<SampledText>,
    /// The trained model's answers.
    pub trained: Vec<SampledText>,
}

/// A completion before it is judged.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SampledText {
    /// Text of the completion, without special tokens.
    pub text: String,
    /// Token ids, including the end-of-sequence token.
    pub ids: Vec<u32>,
    /// Why the completion ended.
    pub finish_reason: FinishReason,
}

/// Returns the sampling of the job's evaluation; several completions per row are never greedy. A completion passes with the highest
/// possible reward, if that is known.
pub fn usual_sampling(plan: &Plan) -> VerdictSampling {
    let ranges: Vec<_> = judging_rewards(plan).iter().map(range_of).collect();
    let num_generations = plan.eval.as_ref().map_or(1, |eval| eval.num_generations);
    VerdictSampling {
        num_generations,
        temperature: usual_temperature(plan, num_generations),
        pass_threshold: combined_range(judging_rewards(plan), &ranges).map(|(_, highest)| highest),
    }
}

/// Returns the rewards that judge the test rows: those of the evaluation, or the job's.
pub fn judging_rewards(plan: &Plan) -> &[RewardPlan] {
    plan.eval_rewards().unwrap_or(&plan.rewards)
}

/// Returns the rewards that judge the guard set: its own, or those of the test rows.
pub fn guarding_rewards(plan: &Plan) -> &[RewardPlan] {
    plan.guard_rewards().unwrap_or_else(|| judging_rewards(plan))
}

/// Source of the rows of a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RowsFrom {
    /// Rows of the training dataset that were set aside for the verdict (`eval.test_fraction`).
    TestFraction,
    /// A separate test dataset (`eval.test_dataset`).
    TestDataset,
    /// The evaluation's rows, which were also used to choose the checkpoint.
    Eval,
}

/// A line of the verdict process's output.
pub type JudgeLine = ChildLine<VerdictRow, JudgeReport>;

/// The last line of a verdict process: its result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JudgeReport {
    /// The comparison of the two models was completed.
    Judged(Box<VerdictResult>),
    /// The process judged no row, for this reason.
    Failed(VerdictError),
}

/// Why a verdict failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VerdictError {
    /// Stable error code in snake_case.
    pub code: String,
    /// Human-readable message in English.
    pub message: String,
}

/// The set that a row belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RowSet {
    /// The test rows, which decide the verdict.
    Test,
    /// The rows of the guard set.
    Guard,
}

/// Outcome of a row: the trained model compared with the base model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RowOutcome {
    /// The trained model has a higher reward.
    Won,
    /// The trained model has a lower reward.
    Lost,
    /// Both models have the same reward.
    Tied,
    /// One of the models has no reward, so the row does not count.
    Missing,
}

/// A row judged with both models.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VerdictRow {
    /// The set that the row belongs to.
    pub set: RowSet,
    /// Number of the row in its dataset, from 0.
    pub row: u64,
    /// Outcome of the row for the trained model.
    pub outcome: RowOutcome,
    /// The trained model's reward minus the base model's; null = one is missing.
    pub difference: Option<f64>,
    /// The prompt as both models saw it.
    pub prompt: String,
    /// The base model's answers.
    pub base: Answers,
    /// The trained model's answers.
    pub trained: Answers,
}

impl VerdictRow {
    /// Compares the answers of both models.
    pub fn new(set: RowSet, row: u64, prompt: String, base: Answers, trained: Answers) -> Self {
        let difference = trained.reward.zip(base.reward).map(|(trained, base)| match trained - base {
            // Two equal means of the same rewards, summed in a different order, may differ by this rounding error.
            rounding if rounding.abs() < 1e-12 => 0.0,
            difference => difference,
        });
        let outcome = match difference {
            None => RowOutcome::Missing,
            Some(difference) if difference > 0.0 => RowOutcome::Won,
            Some(difference) if difference < 0.0 => RowOutcome::Lost,
            Some(_) => RowOutcome::Tied,
        };
        Self { set, row, outcome, difference, prompt, base, trained }
    }
}

/// One model's answers to a row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Answers {
    /// Mean of the rewards that are not missing; null = all are missing.
    pub reward: Option<f64>,
    /// The completions of the row.
    pub completions: Vec<JudgedText>,
}

impl Answers {
    /// Averages the rewards of completions.
    pub fn new(completions: Vec<JudgedText>) -> Self {
        let reward = mean(completions.iter().filter_map(|text| text.reward));
        Self { reward, completions }
    }
}

/// A completion with its reward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JudgedText {
    /// Text of the completion, without special tokens.
    pub completion: String,
    /// The weighted reward; null = missing.
    pub reward: Option<f64>,
    /// Length in tokens, including the end-of-sequence token.
    pub num_tokens: u64,
    /// Why the completion ended.
    pub finish_reason: FinishReason,
}

/// The conclusion of a verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VerdictWord {
    /// The trained model is better: the 95 % interval of the difference is above 0.
    Better,
    /// No difference was shown: 0 is inside the 95 % interval.
    NoDifference,
    /// The trained model is worse: the 95 % interval is below 0.
    Worse,
    /// The reward on the guard set may have fallen by more than the allowed margin.
    GuardFell,
    /// There are too few rows for a conclusion.
    TooFewRows,
}

/// The comparison of the two models, and its conclusion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VerdictResult {
    /// The conclusion of the verdict.
    pub verdict: VerdictWord,
    /// Summary of the result in one sentence.
    pub summary: String,
    /// Limitations of the result; null = none known.
    pub note: Option<String>,
    /// Source of the rows.
    pub rows_from: RowsFrom,
    /// Whether the rows were also used to choose the checkpoint. The difference is then probably overestimated.
    pub optimistic: bool,
    /// How both models were sampled.
    pub sampling: VerdictSampling,
    /// Results on the test rows.
    #[serde(flatten)]
    pub test: PairedRows,
    /// Results on the guard set; null = the job has no guard set.
    pub guard: Option<GuardResult>,
    /// Some rows on which the trained model had a higher reward.
    pub won_examples: Vec<VerdictRow>,
    /// Some rows on which the trained model had a lower reward.
    pub lost_examples: Vec<VerdictRow>,
}

/// Results of both models on the same rows. Rows are the statistical unit: a row's completions are averaged first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PairedRows {
    /// Number of rows with a reward for both models.
    pub rows: u64,
    /// Number of rows left out because a reward is missing.
    pub missing_rows: u64,
    /// Results of the base model.
    pub base: ModelScore,
    /// Results of the trained model.
    pub trained: ModelScore,
    /// Mean difference in reward, trained minus base.
    pub difference: f64,
    /// 95 % interval of the difference, as [low, high]; null = fewer than 20 rows.
    pub interval: Option<[f64; 2]>,
    /// The statistical method that was used.
    pub method: Method,
    /// Two-sided p-value of the exact test; null = the interval decided.
    pub p_value: Option<f64>,
    /// Number of rows on which the trained model has a higher reward.
    pub won: u64,
    /// Number of rows on which the trained model has a lower reward.
    pub lost: u64,
    /// Number of rows with equal rewards.
    pub tied: u64,
}

/// One model's results on the rows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelScore {
    /// Mean reward over the rows; null = no rows.
    pub mean: Option<f64>,
    /// Pass@k for k = 1, 2, 4, … up to the number of completions; null = one completion per row, or no known passing reward.
    pub pass_at: Option<Vec<PassAt>>,
}

/// The probability that at least one of `k` completions passes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PassAt {
    /// Number of completions (k).
    pub k: u32,
    /// Mean probability over the rows, from 0 to 1.
    pub chance: f64,
}

/// Results on the guard set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuardResult {
    /// How far the mean reward on the guard set may fall.
    pub margin: f64,
    /// Whether the reward may have fallen further, that is, whether the interval's lower end is below −margin; null = too few rows.
    pub fell: Option<bool>,
    /// The comparison on the guard set.
    #[serde(flatten)]
    pub rows: PairedRows,
}

impl PairedRows {
    fn of(rows: &[&VerdictRow], sampling: VerdictSampling) -> (Self, Direction) {
        let counted: Vec<&VerdictRow> = rows.iter().copied().filter(|row| row.difference.is_some()).collect();
        let differences: Vec<f64> = counted.iter().filter_map(|row| row.difference).collect();
        let result = paired(&differences);
        let count = |outcome| counted.iter().filter(|row| row.outcome == outcome).count() as u64;
        let score = |answers: fn(&VerdictRow) -> &Answers| ModelScore {
            mean: mean(counted.iter().filter_map(|row| answers(row).reward)),
            pass_at: pass_at(counted.iter().map(|row| answers(row)), sampling),
        };
        let compared = Self {
            rows: counted.len() as u64,
            missing_rows: (rows.len() - counted.len()) as u64,
            base: score(|row| &row.base),
            trained: score(|row| &row.trained),
            difference: result.difference,
            interval: result.interval,
            method: result.method,
            p_value: result.p_value,
            won: count(RowOutcome::Won),
            lost: count(RowOutcome::Lost),
            tied: count(RowOutcome::Tied),
        };
        (compared, result.direction)
    }
}

/// Computes pass@k for 1, 2, 4, … and the number of completions, over rows without missing rewards.
fn pass_at<'a>(answers: impl Iterator<Item = &'a Answers>, sampling: VerdictSampling) -> Option<Vec<PassAt>> {
    let (threshold, most) = (sampling.pass_threshold?, sampling.num_generations);
    if most < 2 {
        return None;
    }
    let counts: Vec<(u64, u64)> = answers
        .filter(|answers| answers.completions.iter().all(|text| text.reward.is_some()))
        .map(|answers| {
            let passes = |text: &&JudgedText| text.reward.is_some_and(|reward| reward >= threshold - 1e-9);
            (answers.completions.len() as u64, answers.completions.iter().filter(passes).count() as u64)
        })
        .filter(|(samples, _)| *samples >= u64::from(most))
        .collect();
    let tries = std::iter::successors(Some(1), |k| Some(k * 2)).take_while(|k| *k < most).chain([most]);
    tries
        .map(|k| {
            let chances = counts.iter().map(|(samples, passed)| pass_at_k(*samples, *passed, k.into()));
            Some(PassAt { k, chance: mean(chances)? })
        })
        .collect()
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0_u64), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / count as f64)
}

impl VerdictResult {
    /// Derives the result from the judged rows.
    pub fn of(rows: &[VerdictRow], plan: &Plan, rows_from: RowsFrom, sampling: VerdictSampling) -> Self {
        let of_set = |set| rows.iter().filter(|row| row.set == set).collect::<Vec<_>>();
        let (test, direction) = PairedRows::of(&of_set(RowSet::Test), sampling);
        let guard = plan.eval.as_ref().and_then(|eval| eval.guard.as_ref()).map(|guard| {
            let (rows, _) = PairedRows::of(&of_set(RowSet::Guard), sampling);
            GuardResult { margin: guard.margin, fell: rows.interval.map(|[low, _]| low < -guard.margin), rows }
        });
        let verdict = conclude(direction, guard.as_ref());
        let optimistic = rows_from == RowsFrom::Eval;
        let examples = |outcome, largest: fn(f64) -> f64| {
            let mut rows: Vec<&VerdictRow> =
                rows.iter().filter(|row| row.set == RowSet::Test && row.outcome == outcome).collect();
            let size = |row: &VerdictRow| largest(row.difference.unwrap_or_default());
            rows.sort_by(|one, other| size(other).total_cmp(&size(one)));
            rows.into_iter().take(EXAMPLES).cloned().collect()
        };
        Self {
            verdict,
            summary: summary(verdict, &test, guard.as_ref()),
            note: note(&test, guard.as_ref(), optimistic),
            rows_from,
            optimistic,
            sampling,
            won_examples: examples(RowOutcome::Won, |difference| difference),
            lost_examples: examples(RowOutcome::Lost, |difference| -difference),
            test,
            guard,
        }
    }
}

/// The test rows decide first. A guard set whose reward fell overrides every conclusion but "worse".
fn conclude(direction: Direction, guard: Option<&GuardResult>) -> VerdictWord {
    let fell = guard.map(|guard| guard.fell);
    match (direction, fell) {
        (Direction::TooFewRows, _) => VerdictWord::TooFewRows,
        (Direction::Down, _) => VerdictWord::Worse,
        (Direction::Up | Direction::Unclear, Some(Some(true))) => VerdictWord::GuardFell,
        (Direction::Up | Direction::Unclear, Some(None)) => VerdictWord::TooFewRows,
        (Direction::Up, None | Some(Some(false))) => VerdictWord::Better,
        (Direction::Unclear, None | Some(Some(false))) => VerdictWord::NoDifference,
    }
}

fn summary(verdict: VerdictWord, test: &PairedRows, guard: Option<&GuardResult>) -> String {
    let compared = |rows: &PairedRows| {
        let mean = |score: &ModelScore| score.mean.unwrap_or_default();
        let interval =
            rows.interval.map_or_else(String::new, |[low, high]| format!(", 95 % interval {low:+.3} to {high:+.3}"));
        format!(
            "mean reward {:.3} of the base model, {:.3} of the trained model on {} rows (difference {:+.3}{interval})",
            mean(&rows.base),
            mean(&rows.trained),
            rows.rows,
            rows.difference
        )
    };
    match (verdict, guard) {
        (VerdictWord::Better, _) => format!("The trained model is better: {}.", compared(test)),
        (VerdictWord::NoDifference, _) => format!("No difference was shown: {}.", compared(test)),
        (VerdictWord::Worse, _) => format!("The trained model is worse: {}.", compared(test)),
        (VerdictWord::GuardFell, Some(guard)) => format!(
            "The reward on the guard set may have fallen by more than {}: {}. On the test rows: {}.",
            guard.margin,
            compared(&guard.rows),
            compared(test)
        ),
        (VerdictWord::GuardFell | VerdictWord::TooFewRows, guard) => {
            let few = match guard {
                Some(guard) if test.rows >= FEWEST_ROWS as u64 => format!("the guard set has {}", guard.rows.rows),
                Some(_) | None => format!("there are {}", test.rows),
            };
            format!("Too few rows: a verdict needs at least {FEWEST_ROWS} with a reward of both models, and {few}.")
        }
    }
}

fn note(test: &PairedRows, guard: Option<&GuardResult>, optimistic: bool) -> Option<String> {
    let mut notes = Vec::new();
    if optimistic {
        notes.push("these rows also chose this checkpoint: optimistic".to_owned());
    }
    let missing = test.missing_rows + guard.map_or(0, |guard| guard.rows.missing_rows);
    if missing > 0 {
        notes.push(format!("{missing} rows are left out because a reward is missing"));
    }
    (!notes.is_empty()).then(|| notes.join("; "))
}

#[cfg(test)]
mod tests;
