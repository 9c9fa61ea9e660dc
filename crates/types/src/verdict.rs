//! Verdicts: is the trained model better than the base model, on the same rows?
//!
//! The server hands a [`JudgeTask`] to a process of its own (`rlood_worker::judge`), which samples both models, asks the rewards
//! and tells row by row what it found ([`JudgeLine`]). What follows from the rows is decided by [`VerdictResult::of`], a pure
//! function over [`statistics`].

pub mod statistics;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use self::statistics::{Direction, FEWEST_ROWS, Method, paired, pass_at_k};
use crate::event::FinishReason;
use crate::id::JobId;
use crate::one_shot::ChildLine;
use crate::probe::verdict::{combined_range, range_of};
use crate::spec::{Plan, RewardPlan, RewardSecrets};

pub use crate::spec::VerdictSampling;

/// Rows won and lost that a result shows; all of them are in the verdict's rows.
const EXAMPLES: usize = 3;

/// What to judge; goes to the child's standard input as one line of JSON.
#[derive(Serialize, Deserialize)]
pub struct JudgeTask {
    /// The job, for the requests to rewards.
    pub job: JobId,
    /// The checkpoint's step.
    pub step: u64,
    /// The job as resolved; it has an evaluation.
    pub plan: Plan,
    /// By the names that secrets are kept under.
    pub secrets: BTreeMap<String, RewardSecrets>,
    /// What the rewards' requests may reach, beside public addresses.
    pub allow_outgoing: Vec<String>,
    /// The model's directory.
    pub model_dir: PathBuf,
    /// Where reward models lie, by their ids.
    pub reward_models: BTreeMap<String, String>,
    /// The checkpoint's directory.
    pub checkpoint_dir: PathBuf,
    /// Where the rows come from.
    pub rows_from: RowsFrom,
    /// The rows, with their numbers in their dataset.
    pub rows: Vec<(u64, Map<String, Value>)>,
    /// The rows of the guard.
    pub guard_rows: Vec<(u64, Map<String, Value>)>,
    /// How to sample and what passes.
    pub sampling: VerdictSampling,
    /// What the process may use, bytes; None = unknown.
    pub memory_limit_bytes: Option<u64>,
}

/// The sampling of the job's evaluation; a completion passes with the highest reward that can be, where that is known.
pub fn usual_sampling(plan: &Plan) -> VerdictSampling {
    let eval = plan.eval.as_ref();
    let ranges: Vec<_> = judging_rewards(plan).iter().map(range_of).collect();
    VerdictSampling {
        num_generations: eval.map_or(1, |eval| eval.num_generations),
        temperature: eval.map_or(0.0, |eval| eval.temperature),
        pass_threshold: combined_range(judging_rewards(plan), &ranges).map(|(_, highest)| highest),
    }
}

/// The rewards that judge the test rows: the evaluation's own, or the job's.
pub fn judging_rewards(plan: &Plan) -> &[RewardPlan] {
    plan.eval_rewards().unwrap_or(&plan.rewards)
}

/// The rewards that judge the guard's rows: its own, or those of the test rows.
pub fn guarding_rewards(plan: &Plan) -> &[RewardPlan] {
    plan.guard_rewards().unwrap_or_else(|| judging_rewards(plan))
}

/// Where the rows of a verdict come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RowsFrom {
    /// Rows of the training dataset that were set aside for the verdict (`eval.test_fraction`).
    TestFraction,
    /// A dataset of their own (`eval.test_dataset`).
    TestDataset,
    /// The evaluation's rows, which also chose the checkpoint.
    Eval,
}

/// A line of the child's report.
pub type JudgeLine = ChildLine<VerdictRow, JudgeReport>;

/// What came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JudgeReport {
    /// The result.
    Judged(Box<VerdictResult>),
    /// Nothing was judged: why.
    Failed(VerdictError),
}

/// Why there is no verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VerdictError {
    /// Stable, snake_case.
    pub code: String,
    /// For people.
    pub message: String,
}

/// Which rows a row belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RowSet {
    /// The rows that decide.
    Test,
    /// The guard's.
    Guard,
}

/// How the trained model did on a row, beside the base model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RowOutcome {
    /// A higher reward than the base model.
    Won,
    /// A lower one.
    Lost,
    /// The same.
    Tied,
    /// One of the two has no reward: the row does not count.
    Missing,
}

/// One row, judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VerdictRow {
    /// Which rows it belongs to.
    pub set: RowSet,
    /// Its number in its dataset.
    pub row: u64,
    /// How the trained model did.
    pub outcome: RowOutcome,
    /// The trained model's reward less the base model's; null where one is missing.
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
            // Means of the same rewards, added up in another order.
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
    /// The mean of the rewards that are not missing; null where all are.
    pub reward: Option<f64>,
    /// Each completion.
    pub completions: Vec<JudgedText>,
}

impl Answers {
    /// Averages the rewards of completions.
    pub fn new(completions: Vec<JudgedText>) -> Self {
        let reward = mean(completions.iter().filter_map(|text| text.reward));
        Self { reward, completions }
    }
}

/// One completion, judged.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JudgedText {
    /// The text, without special tokens.
    pub completion: String,
    /// The weighted reward; null = missing.
    pub reward: Option<f64>,
    /// Its tokens, the one that ends it included.
    pub num_tokens: u64,
    /// Why it ended.
    pub finish_reason: FinishReason,
}

/// What a verdict says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VerdictWord {
    /// The trained model is better: the interval lies above 0.
    Better,
    /// No difference was shown: 0 lies in the interval.
    NoDifference,
    /// The trained model is worse: the interval lies below 0.
    Worse,
    /// The guard's reward may have fallen by more than its margin.
    GuardFell,
    /// There are too few rows to say anything.
    TooFewRows,
}

/// The comparison of the two models, and what follows from it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VerdictResult {
    /// What it says.
    pub verdict: VerdictWord,
    /// One sentence for people.
    pub summary: String,
    /// What limits it; null = nothing known.
    pub note: Option<String>,
    /// Where the rows come from.
    pub rows_from: RowsFrom,
    /// The rows also chose the checkpoint, so the difference is likely too high.
    pub optimistic: bool,
    /// How both models were sampled.
    pub sampling: VerdictSampling,
    /// The test rows.
    #[serde(flatten)]
    pub test: PairedRows,
    /// The guard; null without one.
    pub guard: Option<GuardResult>,
    /// A few rows that the trained model won.
    pub won_examples: Vec<VerdictRow>,
    /// A few rows that it lost.
    pub lost_examples: Vec<VerdictRow>,
}

/// Both models on the same rows. Rows are the unit: completions of a row are averaged first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PairedRows {
    /// Rows with a reward of both models.
    pub rows: u64,
    /// Rows left out because a reward is missing.
    pub missing_rows: u64,
    /// The base model.
    pub base: ModelScore,
    /// The trained model.
    pub trained: ModelScore,
    /// The mean difference, trained less base.
    pub difference: f64,
    /// The 95 % interval of the difference; null with fewer than 20 rows.
    pub interval: Option<[f64; 2]>,
    /// How it was judged.
    pub method: Method,
    /// Of the exact test, two-sided; null where the interval decided.
    pub p_value: Option<f64>,
    /// Rows with a higher reward.
    pub won: u64,
    /// Rows with a lower reward.
    pub lost: u64,
    /// Rows with the same reward.
    pub tied: u64,
}

/// One model on the rows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelScore {
    /// The mean reward of the rows; null without rows.
    pub mean: Option<f64>,
    /// Pass@k for k of 1, 2, 4, … and the number of completions; null with one completion a row, or where the reward that passes is
    /// unknown.
    pub pass_at: Option<Vec<PassAt>>,
}

/// The chance that at least one of `k` completions passes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PassAt {
    /// Completions.
    pub k: u32,
    /// The mean chance over the rows.
    pub chance: f64,
}

/// The guard's rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuardResult {
    /// How far the reward may fall.
    pub margin: f64,
    /// Whether it may have fallen further: the interval's lower end lies below −margin; null with too few rows.
    pub fell: Option<bool>,
    /// The comparison.
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

/// Pass@k for 1, 2, 4, … and the number of completions, over rows of which no reward is missing.
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
    /// What the judged rows say.
    pub fn of(rows: &[VerdictRow], plan: &Plan, rows_from: RowsFrom, sampling: VerdictSampling) -> Self {
        let of_set = |set| rows.iter().filter(|row| row.set == set).collect::<Vec<_>>();
        let (test, direction) = PairedRows::of(&of_set(RowSet::Test), sampling);
        let guard = plan.eval.as_ref().and_then(|eval| eval.guard.as_ref()).map(|guard| {
            let (rows, _) = PairedRows::of(&of_set(RowSet::Guard), sampling);
            GuardResult { margin: guard.margin, fell: rows.interval.map(|[low, _]| low < -guard.margin), rows }
        });
        let verdict = word(direction, guard.as_ref());
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

/// The test rows speak first; a guard that fell takes back everything but "worse".
fn word(direction: Direction, guard: Option<&GuardResult>) -> VerdictWord {
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
            "The guard's reward may have fallen by more than {}: {}. On the test rows: {}.",
            guard.margin,
            compared(&guard.rows),
            compared(test)
        ),
        (VerdictWord::GuardFell | VerdictWord::TooFewRows, guard) => {
            let few = match guard {
                Some(guard) if test.rows >= FEWEST_ROWS as u64 => format!("the guard has {}", guard.rows.rows),
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
