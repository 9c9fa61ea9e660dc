//! Tests of the rules that a plan sets for built-in rewards (blank references, limit of values), and of
//! older plans without these rules.

use serde_json::{Value, json};

use super::Builtin;
use super::tests::sample;
use crate::Judgement;
use crate::rollout::{RewardSample, RewardValue};
use crate::spec::RewardPlan;

/// Builds a built-in reward from a plan as the current version stores it.
fn of_now(reward: Value) -> Builtin {
    let plan = crate::spec::read_single_reward(&json!({"reward": reward})).unwrap().0;
    Builtin::of_plan(&plan).unwrap()
}

/// Builds a built-in reward from a plan as older versions stored it: without a limit of values and without a
/// rule for blank references.
fn of_before(reward: Value) -> Builtin {
    let plan = crate::spec::read_single_reward(&json!({"reward": reward})).unwrap().0;
    let mut plan = serde_json::to_value(plan).unwrap();
    for field in ["max_abs_reward", "blank_reference"] {
        plan.as_object_mut().unwrap().shift_remove(field);
    }
    let old: RewardPlan = serde_json::from_value(plan.clone()).unwrap();
    assert_eq!(
        serde_json::to_string(&old).unwrap(),
        plan.to_string(),
        "a stored plan of a reward is serialized as it was"
    );
    Builtin::of_plan(&old).unwrap()
}

fn judged(builtin: &Builtin, completion: &str, columns: Value) -> Judgement {
    let Value::Object(columns) = columns else { panic!("columns are an object") };
    builtin.judge_one(&RewardSample { columns, ..sample(completion) })
}

/// Returns one reward of each type that compares with a reference in the column `key`.
fn comparing() -> Vec<Value> {
    let template = "{{ item.key }}";
    let mut all = vec![
        json!({"type": "exact_match", "column": "key"}),
        json!({"type": "contains", "column": "key"}),
        json!({"type": "number_match", "column": "key"}),
        json!({"type": "math_equal", "column": "key"}),
        json!({"type": "json_schema", "column": "key"}),
        json!({"type": "text_similarity", "reference": template, "evaluation_metric": "rouge_l"}),
    ];
    for operation in ["eq", "ne", "like", "ilike"] {
        all.push(json!({"type": "string_check", "reference": template, "operation": operation}));
    }
    let graders = json!({"a": {"type": "contains", "column": "key"}, "b": {"type": "length"}});
    all.push(json!({"type": "multi", "graders": graders, "calculate_output": "a + b"}));
    all
}

#[test]
fn no_reward_applies_to_a_blank_reference() {
    for reward in comparing() {
        let builtin = of_now(reward.clone());
        for blank in [json!(""), json!(" "), json!("\t\r\n"), json!("\u{a0}\u{3000}"), Value::Null] {
            for completion in ["", " ", "any 1"] {
                let judgement = judged(&builtin, completion, json!({"key": blank}));
                assert_eq!((judgement.value, judgement.error), (RewardValue::NotApplicable, None), "{reward} {blank}");
            }
        }
    }
    // A row without the reference column has no reference either. A template reports an error for a missing column instead, because
    // the name may be mistyped.
    for reward in comparing() {
        let judgement = judged(&of_now(reward.clone()), "any", json!({"other": 1}));
        match reward.get("reference") {
            None => assert_eq!(judgement.value, RewardValue::NotApplicable, "{reward}"),
            Some(_) => assert_eq!(judgement.error.unwrap().code, "template_failed", "{reward}"),
        }
    }
    // A reference whose marked answer (after `####`) is blank counts as blank.
    let math = of_now(json!({"type": "math_equal", "column": "key"}));
    assert_eq!(judged(&math, "7", json!({"key": "3 + 4\n#### "})).value, RewardValue::NotApplicable);
    // References that are not blank are compared, including 0 and false.
    let contains = of_now(json!({"type": "contains", "column": "key"}));
    for (key, expected) in [(json!(0), 1.0), (json!(false), 0.0), (json!(" a "), 1.0), (json!("-"), 0.0)] {
        assert_eq!(judged(&contains, "a 0", json!({"key": key})).value.number(), Some(expected), "{key}");
    }
    assert_eq!(judged(&contains, "a", json!({"key": [1]})).error.unwrap().code, "column_not_text");
    let number = of_now(json!({"type": "number_match", "column": "key"}));
    assert_eq!(judged(&number, "7", json!({"key": "seven"})).error.unwrap().code, "column_not_a_number");
}

#[test]
fn a_job_without_the_rule_still_compares_blank_references() {
    let values = comparing().into_iter().map(|reward| {
        let judgement = judged(&of_before(reward), "", json!({"key": " "}));
        judgement.value.number().ok_or_else(|| judgement.error.unwrap().code)
    });
    let expected: Vec<Result<f64, String>> = vec![
        Ok(1.0),
        Ok(1.0),
        Err("column_not_a_number".to_owned()),
        Ok(0.0),
        Err("column_not_a_schema".to_owned()),
        Ok(0.0),
        Ok(0.0),
        Ok(1.0),
        Ok(0.0),
        Ok(0.0),
        Ok(0.5),
    ];
    assert_eq!(values.collect::<Vec<_>>(), expected);
    // A plan with `blank_reference: compare` asks for the rule of older versions: blank references are compared.
    let asked = of_now(json!({"type": "contains", "column": "key", "blank_reference": "compare"}));
    assert_eq!(judged(&asked, "any", json!({"key": ""})).value.number(), Some(1.0));
    assert_eq!(judged(&asked, "any", json!({})).error.unwrap().code, "column_missing");
}

#[test]
fn a_value_beyond_the_limit_is_missing_with_an_error() {
    let multi = |formula: &str, limit: Value| {
        json!({"type": "multi", "graders": {"a": {"type": "length", "unit": "tokens", "min_tokens": 3, "max_tokens": 3}},
               "calculate_output": formula, "max_abs_reward": limit})
    };
    for (formula, limit, expected) in [
        ("a * 1e6", Value::Null, Some(1e6)),
        ("a * -1e6", Value::Null, Some(-1e6)),
        ("a * 1000001", Value::Null, None),
        ("a * -1e9", Value::Null, None),
        ("a * 1e9", json!(1e9), Some(1e9)),
        ("a * 2", json!(1.5), None),
    ] {
        let judgement = judged(&of_now(multi(formula, limit)), "x", json!({}));
        assert_eq!(judgement.value.number(), expected, "{formula}");
        if let Some(error) = judgement.error {
            assert!(error.code == "invalid_value" && error.message.contains("max_abs_reward"), "{error:?}");
        }
    }
    assert_eq!(judged(&of_before(multi("a * 1e300", Value::Null)), "x", json!({})).value.number(), Some(1e300));
}
