//! Built-in rewards: pure functions of the completion and the row's other columns.

use futures::future::BoxFuture;
use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

use super::{BuildError, Counts, JobContext, Judged, Judgement, Reward, RewardFailure, SampleError};
use crate::sample::{RewardSample, RewardValue};
use crate::spec::{LengthPlan, RewardKind};

/// Largest compiled size of a user's pattern, bytes.
const REGEX_SIZE_LIMIT: usize = 1 << 20;

/// A reward computed in this process.
#[derive(Debug)]
pub struct Builtin {
    check: Check,
}

#[derive(Debug)]
enum Check {
    Length(LengthPlan),
    ExactMatch { column: String, ignore_case: bool },
    Contains { needle: Needle, ignore_case: bool },
    NumberMatch { column: String, tolerance: f64 },
    Regex(Regex),
}

#[derive(Debug)]
enum Needle {
    Column(String),
    Text(String),
}

impl Builtin {
    /// Makes a built-in reward from its plan.
    pub fn new(name: &str, kind: &RewardKind) -> Result<Self, BuildError> {
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
                    _ => return Err(error("give either 'column' or 'text'".to_owned())),
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
            RewardKind::Webhook(_) => return Err(error("a webhook is not built in".to_owned())),
            RewardKind::RewardModel(_) => return Err(error("a reward model is not built in".to_owned())),
        };
        Ok(Self { check })
    }

    /// Judges one completion.
    pub fn judge_one(&self, completion: &str, columns: &Map<String, Value>) -> Judgement {
        let value = match &self.check {
            Check::Length(plan) => Ok(RewardValue::Number(length(completion, plan))),
            Check::ExactMatch { column, ignore_case } => text_column(columns, column).map(|reference| {
                reference.map_or(RewardValue::NotApplicable, |reference| {
                    yes_no(folded(completion.trim(), *ignore_case) == folded(reference.trim(), *ignore_case))
                })
            }),
            Check::Contains { needle, ignore_case } => {
                let needle = match needle {
                    Needle::Column(column) => text_column(columns, column),
                    Needle::Text(text) => Ok(Some(text.clone())),
                };
                needle.map(|needle| {
                    needle.map_or(RewardValue::NotApplicable, |needle| {
                        yes_no(folded(completion, *ignore_case).contains(&folded(needle.trim(), *ignore_case)))
                    })
                })
            }
            Check::NumberMatch { column, tolerance } => match text_column(columns, column) {
                Err(missing) => Err(missing),
                Ok(None) => Ok(RewardValue::NotApplicable),
                Ok(Some(reference)) => match last_number(&reference) {
                    None => Err(no_value(
                        "column_not_a_number",
                        format!("the column '{column}' of this row contains no number"),
                    )),
                    Some(reference) => Ok(yes_no(
                        last_number(completion).is_some_and(|number| (number - reference).abs() <= *tolerance),
                    )),
                },
            },
            Check::Regex(regex) => Ok(yes_no(regex.is_match(completion))),
        };
        value.map_or_else(|error| Judgement::missing(error.code, error.message), Judgement::value)
    }
}

impl Reward for Builtin {
    fn judge<'a>(
        &'a self,
        _: &'a JobContext,
        samples: &'a [RewardSample],
    ) -> BoxFuture<'a, Result<Judged, RewardFailure>> {
        let judgements = samples.iter().map(|sample| self.judge_one(&sample.completion, &sample.columns)).collect();
        Box::pin(std::future::ready(Ok(Judged { judgements, counts: Counts::default() })))
    }
}

/// The seeds' band of words: 1 inside, −0.5 below, 0 above; the bonus for a sentence's end.
fn length(completion: &str, plan: &LengthPlan) -> f64 {
    let words = completion.split_whitespace().count() as u64;
    let band = if words < u64::from(plan.min_words) {
        -0.5
    } else if words <= u64::from(plan.max_words) {
        1.0
    } else {
        0.0
    };
    let is_sentence = completion.trim_end().ends_with(['.', '!', '?']);
    band + if is_sentence { plan.sentence_bonus } else { 0.0 }
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

/// The column as text; `None` where it is null (the reward does not apply to this row).
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

/// The last number of a text: signs (also U+2212), decimals, an exponent, commas between groups of three digits.
pub fn last_number(text: &str) -> Option<f64> {
    static NUMBER: std::sync::LazyLock<Regex> = std::sync::LazyLock::new(|| {
        Regex::new(r"(?:\d{1,3}(?:,\d{3})+\b|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?")
            .expect("a constant pattern")
    });
    let found = NUMBER.find_iter(text).last()?;
    let magnitude: f64 = found.as_str().replace(',', "").parse().ok()?;
    // A minus is a sign unless it stands behind an operand: "x = -3" is −3, "5-3" ends with 3.
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

    fn value(kind: RewardKind, completion: &str, columns: Value) -> Judgement {
        let Value::Object(columns) = columns else { panic!("columns are an object") };
        Builtin::new("r", &kind).unwrap().judge_one(completion, &columns)
    }

    fn number(kind: RewardKind, completion: &str, columns: Value) -> f64 {
        value(kind, completion, columns).value.number().unwrap()
    }

    #[test]
    fn length_is_the_seeds_band_and_sentence_end() {
        let score = |text: &str| {
            let plan = LengthPlan { min_words: 3, max_words: 5, sentence_bonus: 0.5 };
            number(RewardKind::Length(plan), text, json!({}))
        };
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
        assert!(Builtin::new("r", &kind(None, None)).is_err());
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
        assert!(Builtin::new("r", &kind("(")).unwrap_err().detail.contains("pattern"));
        assert!(Builtin::new("r", &kind(r"\w{1000}{1000}")).is_err());
    }
}
