//! Parses and validates a service's answer. A sample only gets a number that the service gave for it.

use serde_json::{Map, Value};

pub use crate::callback::{name, parse};
use crate::rollout::RewardValue;
use crate::{Judgement, SampleError};

/// The parsed answer of a reward service to one request.
#[derive(Debug, PartialEq)]
pub struct Answer {
    /// One result for each sample, in the order of the request.
    pub found: Vec<Found>,
    /// Number of results for sample ids that were not requested.
    pub unknown: u64,
    /// Number of repeated results for a sample id. The first result is used.
    pub duplicates: u64,
    /// A hint for the author of the reward, if the answer looks wrong.
    pub remark: Option<String>,
}

impl Answer {
    /// Creates an answer that has exactly the requested results, and no hint.
    pub fn of(found: Vec<Found>) -> Self {
        Self { found, unknown: 0, duplicates: 0, remark: None }
    }
}

/// A service's result for one sample.
#[derive(Debug, PartialEq)]
pub enum Found {
    /// A number, "not applicable", or a final error: asking the service again would not help.
    Judged(Judgement),
    /// An error that the service marked as retryable.
    Retryable(SampleError),
    /// A value that is not a valid reward; the text says why.
    Invalid(String),
    /// The answer has no result for the sample.
    Absent,
}

/// Parses an answer in the webhook format to the request `id` for the samples `ids`. Returns an error if the answer as a
/// whole is not valid.
pub fn read(body: &[u8], id: &str, ids: &[&str]) -> Result<Answer, String> {
    let value = parse(body)?;
    let object = match value {
        Value::Array(rewards) => return in_order(&rewards, ids),
        Value::Object(object) => object,
        other => return Err(format!("the answer is {}, not an object or an array", name(&other))),
    };
    // Different requests use the same sample ids, so results of another request would be assigned to the wrong samples.
    if let Some(Value::String(other)) = object.get("id")
        && other != id
    {
        return Err("the answer's 'id' is that of another request".to_owned());
    }
    if let Some(results) = object.get("results") {
        let Value::Array(results) = results else {
            return Err(format!("the answer's 'results' is {}, not an array", name(results)));
        };
        return by_id(results, ids);
    }
    for key in ["rewards", "scores"] {
        if let Some(rewards) = object.get(key) {
            let Value::Array(rewards) = rewards else {
                return Err(format!("the answer's '{key}' is {}, not an array", name(rewards)));
            };
            return in_order(rewards, ids);
        }
    }
    if object.contains_key("reward") || object.contains_key("error") {
        if ids.len() != 1 {
            return Err(format!("the answer has one 'reward', but the request had {} samples", ids.len()));
        }
        return Ok(Answer::of(vec![result(&object)]));
    }
    Err("the answer has none of 'results', 'rewards', 'scores', 'reward'".to_owned())
}

fn in_order(rewards: &[Value], ids: &[&str]) -> Result<Answer, String> {
    if rewards.len() != ids.len() {
        return Err(format!("the answer has {} rewards for {} samples", rewards.len(), ids.len()));
    }
    Ok(Answer::of(rewards.iter().map(reward).collect()))
}

fn by_id(results: &[Value], ids: &[&str]) -> Result<Answer, String> {
    let positions: std::collections::HashMap<&str, usize> = ids.iter().enumerate().map(|(at, id)| (*id, at)).collect();
    let mut found: Vec<Option<Found>> = ids.iter().map(|_| None).collect();
    let (mut unknown, mut duplicates) = (0, 0);
    for (index, entry) in results.iter().enumerate() {
        let Value::Object(entry) = entry else {
            return Err(format!("results[{index}] is {}, not an object with 'sample_id' and 'reward'", name(entry)));
        };
        let Some(Value::String(sample_id)) = entry.get("sample_id") else {
            return Err(format!("results[{index}] has no 'sample_id'"));
        };
        match positions.get(sample_id.as_str()) {
            None => unknown += 1,
            Some(&at) if found[at].is_some() => duplicates += 1,
            Some(&at) => found[at] = Some(result(entry)),
        }
    }
    let found = found.into_iter().map(|found| found.unwrap_or(Found::Absent)).collect();
    Ok(Answer { found, unknown, duplicates, remark: None })
}

/// Parses the result of one sample, `{reward, metrics?, reason?, error?}`. An error takes precedence over a number, which is
/// often a placeholder then.
fn result(entry: &Map<String, Value>) -> Found {
    match entry.get("error") {
        None | Some(Value::Null) => {}
        Some(Value::Object(error)) => {
            let text = |key: &str, most| {
                error.get(key).and_then(Value::as_str).map(|text| text.chars().take(most).collect::<String>())
            };
            let code = text("code", 300).unwrap_or_else(|| "service_error".to_owned());
            // The maximum length of an error message leaves room for a traceback.
            let message =
                text("message", 2000).unwrap_or_else(|| format!("the service answered with the error '{code}'"));
            return if error.get("retryable") == Some(&Value::Bool(true)) {
                Found::Retryable(SampleError { code, message })
            } else {
                Found::Judged(Judgement::missing(code, message))
            };
        }
        Some(error) => {
            let said = error.as_str().map_or_else(|| error.to_string(), str::to_owned);
            let said: String = said.chars().take(300).collect();
            return Found::Judged(Judgement::missing(
                "service_error",
                format!("the service answered with the error '{said}'"),
            ));
        }
    }
    let Some(value) = entry.get("reward") else { return Found::Invalid("'reward' is missing".to_owned()) };
    let mut found = reward(value);
    if let Found::Judged(judgement) = &mut found {
        judgement.reason = entry.get("reason").and_then(Value::as_str).map(str::to_owned);
        if let Some(Value::Object(metrics)) = entry.get("metrics") {
            judgement.metrics = metrics.clone();
        }
    }
    found
}

/// Parses a reward that must be a finite number. Null is invalid, because many serializers write NaN as null.
pub fn number(value: &Value) -> Found {
    match value {
        Value::Null => Found::Invalid("the score is null, not a finite number".to_owned()),
        value => reward(value),
    }
}

/// Parses a reward that is a finite number, or null for "not applicable".
fn reward(value: &Value) -> Found {
    match value {
        Value::Null => Found::Judged(Judgement::value(RewardValue::NotApplicable)),
        Value::Number(number) => match number.as_f64() {
            Some(number) if number.is_finite() => Found::Judged(Judgement::value(RewardValue::Number(number))),
            _ => Found::Invalid(format!("the reward {number} is not finite")),
        },
        Value::String(text) => Found::Invalid(format!(
            "the reward is \"{}\", not a finite number",
            text.chars().take(40).collect::<String>()
        )),
        other => Found::Invalid(format!("the reward is {}, not a finite number", name(other))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(value: f64) -> Found {
        Found::Judged(Judgement::value(RewardValue::Number(value)))
    }

    fn found(body: &str, ids: &[&str]) -> Vec<Found> {
        read(body.as_bytes(), "rwr_1", ids).unwrap().found
    }

    #[test]
    fn every_shorthand_is_read() {
        let expected = [number(0.5), Found::Judged(Judgement::value(RewardValue::NotApplicable))];
        for body in [
            r#"{"rewards": [0.5, null]}"#,
            r#"{"scores": [0.5, null]}"#,
            "[0.5, null]",
            r#"{"version": "1", "id": "rwr_1", "results": [{"sample_id": "b", "reward": null}, {"sample_id": "a", "reward": 0.5}]}"#,
        ] {
            assert_eq!(found(body, &["a", "b"]), expected, "{body}");
        }
        assert_eq!(found(r#"{"reward": -2}"#, &["a"]), [number(-2.0)]);
    }

    #[test]
    fn an_invalid_number_does_not_affect_the_other_results() {
        for bad in ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "\"1.0\"", "true", "[1]", "{}"] {
            let body = format!(r#"{{"rewards": [1, {bad}, 3], "note": "NaN \" Infinity"}}"#);
            let found = found(&body, &["a", "b", "c"]);
            assert_eq!((&found[0], &found[2]), (&number(1.0), &number(3.0)), "{bad}");
            assert!(matches!(found[1], Found::Invalid(_)), "{bad}: {:?}", found[1]);
        }
    }

    #[test]
    fn an_invalid_answer_is_rejected_as_a_whole() {
        for (body, reason) in [
            ("<html>busy</html>", "not JSON"),
            ("", "not JSON"),
            ("[0.1]", "1 rewards for 2 samples"),
            (r#"{"rewards": [1, 2, 3]}"#, "3 rewards for 2 samples"),
            (r#"{"rewards": 1}"#, "not an array"),
            (r#"{"reward": 1}"#, "the answer has one 'reward', but the request had 2 samples"),
            ("0.5", "a number"),
            ("NaN", "a string"),
            (r#"{"ok": true}"#, "none of"),
            (r#"{"results": [0.1, 0.2]}"#, "results[0] is a number"),
            (r#"{"results": [{"reward": 1}]}"#, "no 'sample_id'"),
            (r#"{"id": "rwr_2", "rewards": [1, 2]}"#, "another request"),
        ] {
            let problem = read(body.as_bytes(), "rwr_1", &["a", "b"]).unwrap_err();
            assert!(problem.contains(reason), "{body}: {problem}");
        }
        assert!(read(&[0xff, 0xfe], "rwr_1", &["a"]).unwrap_err().contains("UTF-8"));
    }

    #[test]
    fn unknown_ids_are_counted_the_first_duplicate_wins_and_absence_shows() {
        let body = r#"{"results": [{"sample_id": "a", "reward": 1}, {"sample_id": "x", "reward": 9},
                       {"sample_id": "a", "reward": 2}]}"#;
        let answer = read(body.as_bytes(), "rwr_1", &["a", "b"]).unwrap();
        let expected = Answer { unknown: 1, duplicates: 1, ..Answer::of(vec![number(1.0), Found::Absent]) };
        assert_eq!(answer, expected);
    }

    #[test]
    fn errors_are_missing_even_beside_a_number() {
        let one = |body: &str| found(body, &["a"]).remove(0);
        let entry = |error: &str| format!(r#"{{"results": [{{"sample_id": "a", "reward": 0, "error": {error}}}]}}"#);
        let Found::Judged(judgement) = one(&entry(r#"{"code": "refused", "message": "no"}"#)) else { panic!("judged") };
        assert_eq!(judgement, Judgement::missing("refused", "no"));
        assert!(matches!(one(&entry(r#"{"code": "judge_timeout", "retryable": true}"#)), Found::Retryable(_)));
        assert!(matches!(one(&entry(r#""boom""#)), Found::Judged(Judgement { value: RewardValue::Missing, .. })));
        assert_eq!(one(&entry("null")), number(0.0));
        assert!(matches!(one(r#"{"results": [{"sample_id": "a"}]}"#), Found::Invalid(_)));
    }
}
