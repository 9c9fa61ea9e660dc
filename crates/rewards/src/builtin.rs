//! Built-in rewards: pure functions of a completion and the other columns of its row.
//!
//! This file holds one short function for each built-in reward, with its tests, and is longer than others for that reason.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use futures::future::BoxFuture;
use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

use super::{BuildError, Counts, JobContext, Judged, Judgement, Limit, Reward, RewardFailure, SampleError};
use crate::rollout::{RewardSample, RewardValue};
use crate::spec::{
    BlankReference, FormatPlan, Formula, LengthPlan, MathEqualPlan, RepetitionPlan, RewardKind, RewardPlan,
    SampleTemplate, SimilarityMetric, SoftOverlongPlan, StringOperation,
};

mod json;
mod length;
mod math;
#[cfg(test)]
mod rules;
mod similarity;
mod tags;
mod watch;

/// Maximum size in bytes of a regular expression from a job, after compilation.
const REGEX_SIZE_LIMIT: usize = 1 << 20;

/// A built-in reward, computed in this process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Builtin {
    name: String,
    check: Arc<Check>,
    blank: BlankReference,
    limit: Limit,
    /// Number of threads that are computing this reward.
    running: Arc<AtomicUsize>,
}

#[derive(Debug)]
enum Check {
    Length(LengthPlan),
    ExactMatch {
        column: String,
        ignore_case: bool,
    },
    Contains {
        needle: Needle,
        ignore_case: bool,
    },
    NumberMatch {
        column: String,
        tolerance: f64,
    },
    Regex(Regex),
    Compare {
        texts: Texts,
        operation: StringOperation,
    },
    TextSimilarity {
        texts: Texts,
        metric: SimilarityMetric,
    },
    MathEqual(MathEqualPlan),
    JsonSchema(json::JsonCheck),
    Repetition(RepetitionPlan),
    SoftOverlong(SoftOverlongPlan),
    Format(FormatPlan),
    Multi {
        graders: BTreeMap<String, Builtin>,
        formula: Box<Formula>,
    },
    /// The reward that the environment gave.
    Episode,
}

#[derive(Debug)]
enum Needle {
    Column(String),
    Text(String),
}

/// Templates of the two texts that a grader compares: the input and the reference.
#[derive(Debug)]
struct Texts {
    input: SampleTemplate,
    reference: SampleTemplate,
}

impl Texts {
    fn new(input: &str, reference: &str) -> Result<Self, String> {
        Ok(Self { input: SampleTemplate::new(input)?, reference: SampleTemplate::new(reference)? })
    }

    /// Renders the input and the reference. Returns `None` when the reference is blank and the reward does not
    /// apply to blank references.
    fn of(&self, sample: &RewardSample, blank: BlankReference) -> Result<Option<(String, String)>, SampleError> {
        let variables = SampleTemplate::variables(sample);
        let failed = |why| no_value("template_failed", format!("the template cannot be rendered for this row: {why}"));
        let input = self.input.render(&variables).map_err(failed)?;
        let is_null = || self.reference.value(&variables).is_ok_and(|value| value.is_null());
        let reference = match self.reference.render(&variables) {
            Err(_) if blank == BlankReference::NotApplicable && is_null() => None,
            rendered => unless_blank(Some(rendered.map_err(failed)?), blank),
        };
        Ok(reference.map(|reference| (input, reference)))
    }
}

impl Builtin {
    /// Creates a built-in reward from its plan.
    pub fn of_plan(plan: &RewardPlan) -> Result<Self, BuildError> {
        let blank = plan.blank_reference.unwrap_or(BlankReference::Compare);
        Ok(Self { limit: Limit::of(plan.max_abs_reward), ..Self::new(&plan.name, &plan.kind, blank)? })
    }

    pub(super) fn new(name: &str, kind: &RewardKind, blank: BlankReference) -> Result<Self, BuildError> {
        let error = |detail: String| BuildError { reward: name.to_owned(), detail };
        let check = match kind {
            RewardKind::Length(plan) => Check::Length(plan.clone()),
            RewardKind::ExactMatch(plan) => {
                Check::ExactMatch { column: plan.column.clone(), ignore_case: plan.ignore_case }
            }
            RewardKind::Contains(plan) => {
                let needle = match (&plan.column, &plan.text) {
                    (Some(column), None) => Needle::Column(column.clone()),
                    (None, Some(text)) => Needle::Text(text.clone()),
                    _ => return Err(error("exactly one of 'column' and 'text' is required".to_owned())),
                };
                Check::Contains { needle, ignore_case: plan.ignore_case }
            }
            RewardKind::NumberMatch(plan) => {
                Check::NumberMatch { column: plan.column.clone(), tolerance: plan.tolerance }
            }
            RewardKind::Regex(plan) => Check::Regex(
                RegexBuilder::new(&plan.pattern)
                    .size_limit(REGEX_SIZE_LIMIT)
                    .build()
                    .map_err(|why| error(format!("the pattern is not valid: {why}")))?,
            ),
            RewardKind::RewardModel(_) => return Err(error("a reward model is not a built-in reward".to_owned())),
            RewardKind::StringCheck(plan) => Check::Compare {
                texts: Texts::new(&plan.input, &plan.reference).map_err(error)?,
                operation: plan.operation,
            },
            RewardKind::TextSimilarity(plan) => Check::TextSimilarity {
                texts: Texts::new(&plan.input, &plan.reference).map_err(error)?,
                metric: plan.evaluation_metric,
            },
            RewardKind::MathEqual(plan) => Check::MathEqual(plan.clone()),
            RewardKind::JsonSchema(plan) => Check::JsonSchema(json::JsonCheck::new(plan).map_err(error)?),
            RewardKind::Repetition(plan) => Check::Repetition(plan.clone()),
            RewardKind::SoftOverlong(plan) => Check::SoftOverlong(plan.clone()),
            RewardKind::Format(plan) => Check::Format(plan.clone()),
            RewardKind::Environment => Check::Episode,
            RewardKind::Multi(plan) => {
                let grader =
                    |(name, kind): (&String, &RewardKind)| Ok((name.clone(), Builtin::new(name, kind, blank)?));
                Check::Multi {
                    graders: plan.graders.iter().map(grader).collect::<Result<_, BuildError>>()?,
                    formula: Box::new(Formula::parse(&plan.calculate_output).map_err(error)?),
                }
            }
            RewardKind::Webhook(_)
            | RewardKind::Openrlhf(_)
            | RewardKind::Slime(_)
            | RewardKind::Llamafactory(_)
            | RewardKind::TeiPredict(_)
            | RewardKind::TeiRerank(_)
            | RewardKind::VllmClassify(_)
            | RewardKind::VllmScore(_)
            | RewardKind::VllmPooling(_)
            | RewardKind::SglangClassify(_)
            | RewardKind::HfTextClassification(_)
            | RewardKind::OpenaiJudge(_)
            | RewardKind::HttpTemplate(_)
            | RewardKind::Python(_) => return Err(error("a reward service is not a built-in reward".to_owned())),
        };
        let (name, check, running) = (name.to_owned(), Arc::new(check), Arc::default());
        Ok(Self { name, check, blank, limit: Limit::default(), running })
    }

    /// Computes the reward of one sample's completion.
    pub fn judge_one(&self, sample: &RewardSample) -> Judgement {
        let judgement = match &*self.check {
            Check::Multi { graders, formula } => multi(graders, formula, sample),
            _ => {
                let value = self.value(sample);
                value.map_or_else(|error| Judgement::missing(error.code, error.message), Judgement::value)
            }
        };
        self.limit.apply(judgement)
    }

    /// Computes the rewards of completions on the current thread until `stop` is set or the time `until` is reached. Completions
    /// that have no reward by then are missing at the end of the list.
    pub fn judge_until(&self, samples: &[RewardSample], stop: &AtomicBool, until: Instant) -> Vec<Judgement> {
        let may_continue = |_: &&RewardSample| !stop.load(Ordering::Relaxed) && Instant::now() < until;
        samples.iter().take_while(may_continue).map(|sample| self.judge_one(sample)).collect()
    }

    fn value(&self, sample: &RewardSample) -> Result<RewardValue, SampleError> {
        let RewardSample { completion, columns, .. } = sample;
        let blank = self.blank;
        match &*self.check {
            Check::Length(plan) => Ok(RewardValue::Number(length::length(sample, plan))),
            Check::ExactMatch { column, ignore_case } => with_column(columns, column, blank, |reference| {
                Ok(yes_no(folded(completion.trim(), *ignore_case) == folded(reference.trim(), *ignore_case)))
            }),
            Check::Contains { needle, ignore_case } => {
                let contains = |needle: &str| {
                    Ok(yes_no(folded(completion, *ignore_case).contains(&folded(needle.trim(), *ignore_case))))
                };
                match needle {
                    Needle::Column(column) => with_column(columns, column, blank, contains),
                    Needle::Text(text) => contains(text),
                }
            }
            Check::NumberMatch { column, tolerance } => with_column(columns, column, blank, |reference| {
                let reference = last_number(reference).ok_or_else(|| {
                    no_value("column_not_a_number", format!("the column '{column}' of this row contains no number"))
                })?;
                let number = last_number(completion);
                Ok(yes_no(number.is_some_and(|number| (number - reference).abs() <= *tolerance)))
            }),
            Check::Regex(regex) => Ok(yes_no(regex.is_match(completion))),
            Check::Compare { texts, operation } => {
                let Some((input, reference)) = texts.of(sample, blank)? else { return Ok(RewardValue::NotApplicable) };
                Ok(yes_no(match operation {
                    StringOperation::Eq => input == reference,
                    StringOperation::Ne => input != reference,
                    StringOperation::Like => input.contains(&reference),
                    StringOperation::Ilike => input.to_lowercase().contains(&reference.to_lowercase()),
                }))
            }
            Check::TextSimilarity { texts, metric } => {
                let Some((input, reference)) = texts.of(sample, blank)? else { return Ok(RewardValue::NotApplicable) };
                Ok(RewardValue::Number(similarity::similarity(&input, &reference, *metric)))
            }
            Check::MathEqual(plan) => with_column(columns, &plan.column, blank, |reference| {
                let Some(reference) = unless_blank(Some(math::reference_answer(reference)), blank) else {
                    return Ok(RewardValue::NotApplicable);
                };
                let answer = math::final_answer(completion, plan.answer);
                Ok(yes_no(answer.is_some_and(|answer| math::equal(&answer, &reference, plan.tolerance))))
            }),
            Check::JsonSchema(check) => check.value(completion, columns, blank),
            Check::Repetition(plan) => Ok(RewardValue::Number(length::repetition(completion, plan))),
            Check::SoftOverlong(plan) => Ok(RewardValue::Number(length::soft_overlong(sample.num_tokens, plan))),
            Check::Format(plan) => Ok(RewardValue::Number(tags::format(completion, plan))),
            Check::Episode => match sample.episode.as_ref().and_then(|episode| episode.total) {
                Some(total) => Ok(RewardValue::Number(total)),
                None => Err(no_value("no_reward", "the environment gave this episode no reward".to_owned())),
            },
            // `judge_one` also reports the details of each grader; here only the combined value is needed.
            Check::Multi { graders, formula } => Ok(multi(graders, formula, sample).value),
        }
    }
}

impl Reward for Builtin {
    fn judge<'a>(
        &'a self,
        _: &'a JobContext,
        samples: &'a [RewardSample],
    ) -> BoxFuture<'a, Result<Judged, RewardFailure>> {
        Box::pin(async move {
            let judgements = watch::judge(self, samples, watch::SAMPLE_LIMIT).await?;
            Ok(Judged { judgements, counts: Counts::default() })
        })
    }

    fn is_grading(&self) -> bool {
        self.running.load(Ordering::Relaxed) > 0
    }
}

/// Combines the values of several graders by a formula. If one grader has no value or does not apply, the whole reward has no value
/// or does not apply.
fn multi(graders: &BTreeMap<String, Builtin>, formula: &Formula, sample: &RewardSample) -> Judgement {
    let mut scores = BTreeMap::new();
    for (name, grader) in graders {
        let judgement = grader.judge_one(sample);
        match judgement.value {
            RewardValue::Number(score) => scores.insert(name.as_str(), score),
            RewardValue::NotApplicable | RewardValue::Missing => return judgement,
        };
    }
    let mut judgement = match formula.value(&scores) {
        Ok(value) => Judgement::value(RewardValue::Number(value)),
        Err(why) => Judgement::missing("formula_without_value", why),
    };
    judgement.metrics = scores.into_iter().map(|(name, score)| (name.to_owned(), score.into())).collect();
    judgement
}

fn no_value(code: &str, message: String) -> SampleError {
    SampleError { code: code.to_owned(), message }
}

fn yes_no(yes: bool) -> RewardValue {
    RewardValue::Number(if yes { 1.0 } else { 0.0 })
}

fn folded(text: &str, ignore_case: bool) -> String {
    if ignore_case { text.to_lowercase() } else { text.to_owned() }
}

/// Computes a reward from the reference answer in a column of the dataset. A row without a usable reference is "not applicable".
fn with_column(
    columns: &Map<String, Value>,
    column: &str,
    blank: BlankReference,
    value: impl FnOnce(&str) -> Result<RewardValue, SampleError>,
) -> Result<RewardValue, SampleError> {
    let text = match blank {
        BlankReference::NotApplicable if !columns.contains_key(column) => None,
        BlankReference::NotApplicable | BlankReference::Compare => text_column(columns, column)?,
    };
    match unless_blank(text, blank) {
        Some(text) => value(&text),
        None => Ok(RewardValue::NotApplicable),
    }
}

/// Returns the reference answer unless it is blank and blank references are not compared.
fn unless_blank(reference: Option<String>, blank: BlankReference) -> Option<String> {
    reference.filter(|text| blank == BlankReference::Compare || !text.trim().is_empty())
}

/// Returns the value of a row's column as text; `None` for null, which means that the reward does not apply to this row.
fn text_column(columns: &Map<String, Value>, column: &str) -> Result<Option<String>, SampleError> {
    match columns.get(column) {
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Null) => Ok(None),
        Some(Value::Number(number)) => Ok(Some(number.to_string())),
        Some(Value::Bool(value)) => Ok(Some(value.to_string())),
        Some(Value::Array(_) | Value::Object(_)) => Err(no_value(
            "column_not_text",
            format!("the column '{column}' of this row is a list or an object; it must be a string or a number"),
        )),
        None => {
            let there = columns.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            Err(no_value(
                "column_missing",
                format!(
                    "this row has no column '{column}'; its columns are: {}",
                    if there.is_empty() { "none" } else { &there }
                ),
            ))
        }
    }
}

/// Returns the last number in a text, with its sign (also U+2212), decimals, exponent, and commas
/// between groups of three digits.
pub fn last_number(text: &str) -> Option<f64> {
    static NUMBER: std::sync::LazyLock<Regex> = std::sync::LazyLock::new(|| {
        Regex::new(r"(?:\d{1,3}(?:,\d{3})+\b|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?")
            .expect("a constant pattern")
    });
    let found = NUMBER.find_iter(text).last()?;
    let magnitude: f64 = found.as_str().replace(',', "").parse().ok()?;
    // A minus is a sign unless it follows an operand: "x = -3" is −3, "5-3" ends with 3.
    let mut before = text[..found.start()].chars().rev();
    let negative = matches!(before.next(), Some('-' | '−'))
        && !before.next().is_some_and(|c| c.is_alphanumeric() || matches!(c, ')' | ']' | '.'));
    Some(if negative { -magnitude } else { magnitude })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::spec::{ContainsPlan, MatchPlan, NumberMatchPlan, RegexPlan};

    pub(super) fn sample(completion: &str) -> RewardSample {
        RewardSample {
            sample_id: "s_0".into(),
            group_id: "g_0".into(),
            prompt_id: "row_0".into(),
            source: None,
            prompt: "What?".into(),
            messages: None,
            completion: completion.into(),
            finish_reason: crate::event::FinishReason::Stop,
            num_tokens: 3,
            completion_ids: None,
            columns: Map::new(),
            episode: None,
        }
    }

    fn value(kind: RewardKind, completion: &str, columns: Value) -> Judgement {
        let Value::Object(columns) = columns else { panic!("columns are an object") };
        Builtin::new("r", &kind, BlankReference::Compare)
            .unwrap()
            .judge_one(&RewardSample { columns, ..sample(completion) })
    }

    /// Parses the settings of a reward in the same way as the settings of a job.
    fn read(reward: Value) -> RewardKind {
        crate::spec::read_single_reward(&json!({"reward": reward})).unwrap().0.kind
    }

    fn number(kind: RewardKind, completion: &str, columns: Value) -> f64 {
        value(kind, completion, columns).value.number().unwrap()
    }

    #[test]
    fn length_is_the_seeds_band_and_sentence_end() {
        let score =
            |text: &str| number(read(json!({"type": "length", "min_words": 3, "max_words": 5})), text, json!({}));
        assert_eq!(score("one two"), -0.5);
        assert_eq!(score("one two."), 0.0);
        assert_eq!(score("one two three"), 1.0);
        assert_eq!(score("  one two three four five.  \n"), 1.5);
        assert_eq!(score("one two three four five six"), 0.0);
        assert_eq!(score("one two three four five six!"), 0.5);
        assert_eq!(score(""), -0.5);
    }

    #[test]
    fn exact_match_trims_and_compares_numbers_as_text() {
        let kind = |ignore_case| RewardKind::ExactMatch(MatchPlan { column: "answer".into(), ignore_case });
        assert_eq!(number(kind(false), " 42\n", json!({"answer": 42})), 1.0);
        assert_eq!(number(kind(false), "Yes", json!({"answer": "yes"})), 0.0);
        assert_eq!(number(kind(true), "Yes", json!({"answer": " yes "})), 1.0);
        assert_eq!(value(kind(false), "x", json!({"answer": null})).value, RewardValue::NotApplicable);
        let missing = value(kind(false), "x", json!({"reference": "x"}));
        assert_eq!(missing.value, RewardValue::Missing);
        assert!(missing.error.unwrap().message.contains("no column 'answer'; its columns are: reference"));
        assert_eq!(value(kind(false), "x", json!({"answer": ["x"]})).error.unwrap().code, "column_not_text");
    }

    #[test]
    fn contains_searches_a_column_or_a_text() {
        let kind = |column: Option<&str>, text: Option<&str>| {
            RewardKind::Contains(ContainsPlan {
                column: column.map(Into::into),
                text: text.map(Into::into),
                ignore_case: true,
            })
        };
        assert_eq!(number(kind(Some("key"), None), "The Answer", json!({"key": "answer"})), 1.0);
        assert_eq!(number(kind(None, Some("PARIS")), "in Paris.", json!({})), 1.0);
        assert_eq!(number(kind(None, Some("rome")), "in Paris.", json!({})), 0.0);
        assert_eq!(value(kind(Some("key"), None), "x", json!({})).value, RewardValue::Missing);
        assert!(Builtin::new("r", &kind(None, None), BlankReference::Compare).is_err());
    }

    #[test]
    fn number_match_compares_the_last_number() {
        let kind = |tolerance| RewardKind::NumberMatch(NumberMatchPlan { column: "answer".into(), tolerance });
        assert_eq!(number(kind(0.0), "3 + 4 = 7.", json!({"answer": "#### 7"})), 1.0);
        assert_eq!(number(kind(0.0), "no idea", json!({"answer": 7})), 0.0);
        assert_eq!(number(kind(0.01), "about 3.14", json!({"answer": 3.145})), 1.0);
        assert_eq!(value(kind(0.0), "7", json!({"answer": "seven"})).error.unwrap().code, "column_not_a_number");
    }

    #[test]
    fn the_last_number_is_read_as_people_write_it() {
        for (text, expected) in [
            ("1,234,567.5 dollars", Some(1_234_567.5)),
            ("$1,234", Some(1234.0)),
            ("x = -3", Some(-3.0)),
            ("−12", Some(-12.0)),
            ("5-3", Some(3.0)),
            ("5 - -3", Some(-3.0)),
            ("+8", Some(8.0)),
            (".5", Some(0.5)),
            ("The answer is 42.", Some(42.0)),
            ("1e3", Some(1000.0)),
            ("1, 2, 3", Some(3.0)),
            ("12,34", Some(34.0)),
            ("50%", Some(50.0)),
            ("none", None),
            ("", None),
        ] {
            assert_eq!(last_number(text), expected, "{text}");
        }
    }

    #[test]
    fn regex_finds_and_a_broken_pattern_is_an_error_not_a_panic() {
        let kind = |pattern: &str| RewardKind::Regex(RegexPlan { pattern: pattern.into() });
        assert_eq!(number(kind(r"^\d+$"), "123", json!({})), 1.0);
        assert_eq!(number(kind(r"^\d+$"), "12a", json!({})), 0.0);
        assert!(Builtin::new("r", &kind("("), BlankReference::Compare).unwrap_err().detail.contains("pattern"));
        assert!(Builtin::new("r", &kind(r"\w{1000}{1000}"), BlankReference::Compare).is_err());
    }

    #[test]
    fn string_check_compares_templated_texts() {
        let check = |operation: &str, completion: &str, columns: Value| {
            let reference = "{{ item.answer }}";
            value(
                read(json!({"type": "string_check", "reference": reference, "operation": operation})),
                completion,
                columns,
            )
        };
        for (operation, completion, answer, expected) in [
            ("eq", "Paris", "Paris", 1.0),
            ("eq", "Paris ", "Paris", 0.0),
            ("ne", "Paris", "Rome", 1.0),
            ("ne", "Paris", "Paris", 0.0),
            ("like", "It is Paris.", "Paris", 1.0),
            ("like", "It is paris.", "Paris", 0.0),
            ("ilike", "It is paris.", "PARIS", 1.0),
            ("ilike", "It is Rome.", "PARIS", 0.0),
        ] {
            let judgement = check(operation, completion, json!({"answer": answer}));
            assert_eq!(judgement.value.number(), Some(expected), "{operation} {completion} {answer}");
        }
        assert_eq!(check("eq", "x", json!({})).error.unwrap().code, "template_failed");
    }

    #[test]
    fn math_equal_reads_the_final_answer_and_the_columns() {
        let kind = || read(json!({"type": "math_equal", "column": "answer"}));
        assert_eq!(number(kind(), r"So it is \boxed{\frac{1}{2}}.", json!({"answer": "0.5"})), 1.0);
        assert_eq!(number(kind(), "So it is 7", json!({"answer": "3 + 4\n#### 7"})), 1.0);
        assert_eq!(number(kind(), "I do not know", json!({"answer": 7})), 0.0);
        assert_eq!(value(kind(), "7", json!({"answer": null})).value, RewardValue::NotApplicable);
        assert_eq!(value(kind(), "7", json!({})).error.unwrap().code, "column_missing");
    }

    #[test]
    fn multi_is_a_formula_over_graders() {
        let kind = |formula: &str| {
            read(json!({"type": "multi", "calculate_output": formula, "graders": {
                "right": {"type": "string_check", "name": "right", "reference": "{{ item.answer }}", "operation": "like"},
                "short": {"type": "length", "min_words": 1, "max_words": 3, "sentence_bonus": 0}
            }}))
        };
        let judgement = value(kind("0.8 * right + 0.2 * short"), "it is 7 I think", json!({"answer": "7"}));
        assert_eq!(judgement.value.number(), Some(0.8));
        assert_eq!(judgement.metrics, *json!({"right": 1.0, "short": 0.0}).as_object().unwrap());
        assert_eq!(
            value(kind("right / short"), "it is 7 I think", json!({"answer": "7"})).error.unwrap().code,
            "formula_without_value"
        );
        assert_eq!(value(kind("right"), "7", json!({})).error.unwrap().code, "template_failed");
    }

    #[test]
    fn text_similarity_grades_templates() {
        let reward =
            json!({"type": "text_similarity", "reference": "{{ item.answer }}", "evaluation_metric": "rouge_l"});
        assert_eq!(number(read(reward), "the cat sat", json!({"answer": "The cat sat."})), 1.0);
    }
}
