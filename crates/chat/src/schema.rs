//! The part of JSON Schema (draft 2020-12) that describes the arguments of tools.
//!
//! Known are `type`, `enum`, `const`, `properties`, `required`, `additionalProperties`, `items`, `anyOf`, `oneOf` (as `anyOf`),
//! `allOf`, `nullable`, the bounds of numbers and lengths, and booleans as schemas. Other keywords, `$ref` among them, hold for every
//! value: the tool itself has the last word.

use serde_json::{Map, Value};

use crate::turn::shortened;

/// Maximum nesting depth of a schema.
const MAX_DEPTH: usize = 32;

/// Checks that a schema is not nested too deeply.
///
/// # Errors
/// Fails with the reason.
pub(crate) fn check_depth(schema: &Value) -> Result<(), String> {
    fn fits(value: &Value, left: usize) -> bool {
        match value {
            Value::Array(items) => left > 0 && items.iter().all(|item| fits(item, left - 1)),
            Value::Object(fields) => left > 0 && fields.values().all(|field| fits(field, left - 1)),
            _ => true,
        }
    }
    if fits(schema, MAX_DEPTH) { Ok(()) } else { Err(format!("the schema is nested deeper than {MAX_DEPTH} levels")) }
}

/// Checks a value. The schema's depth must have been checked.
///
/// # Errors
/// Fails at the first difference, with a message for the model.
pub(crate) fn check(schema: &Value, value: &Value) -> Result<(), String> {
    check_at(schema, value, "")
}

/// How a value is called in a message: the arguments as a whole, or one of them.
fn named(place: &str) -> String {
    if place.is_empty() { "the arguments".to_owned() } else { format!("'{place}'") }
}

fn check_at(schema: &Value, value: &Value, place: &str) -> Result<(), String> {
    let fields = match schema {
        Value::Bool(false) => return Err(format!("{} must be left out", named(place))),
        Value::Object(fields) => fields,
        _ => return Ok(()),
    };
    if value.is_null() && fields.get("nullable") == Some(&Value::Bool(true)) {
        return Ok(());
    }
    let types = types_of(fields);
    if !types.is_empty() && !types.iter().any(|kind| is_of_type(value, kind)) {
        return Err(format!("{} must be of type {}, not {}", named(place), types.join(" or "), type_of(value)));
    }
    check_choices(fields, value, place)?;
    check_bounds(fields, value, place)?;
    check_combined(fields, value, place)?;
    match value {
        Value::Object(given) => check_object(fields, given, place),
        Value::Array(items) => {
            let Some(schema) = fields.get("items") else { return Ok(()) };
            items.iter().enumerate().try_for_each(|(i, item)| check_at(schema, item, &format!("{place}[{i}]")))
        }
        _ => Ok(()),
    }
}

fn check_choices(fields: &Map<String, Value>, value: &Value, place: &str) -> Result<(), String> {
    let choices: Vec<&Value> = match (fields.get("enum"), fields.get("const")) {
        (Some(Value::Array(choices)), _) => choices.iter().collect(),
        (_, Some(only)) => vec![only],
        _ => return Ok(()),
    };
    if choices.iter().any(|choice| is_same(choice, value)) {
        return Ok(());
    }
    let shown: Vec<String> = choices.iter().take(20).map(|choice| shortened(&choice.to_string())).collect();
    let more = if choices.len() > shown.len() { ", …" } else { "" };
    Err(format!("{} must be one of {}{more}", named(place), shown.join(", ")))
}

/// Whether two values are the same to JSON Schema, for which 1 and 1.0 are one number.
fn is_same(one: &Value, other: &Value) -> bool {
    one == other || matches!((one.as_f64(), other.as_f64()), (Some(a), Some(b)) if a == b)
}

fn check_bounds(fields: &Map<String, Value>, value: &Value, place: &str) -> Result<(), String> {
    let bound = |name: &str| fields.get(name).and_then(Value::as_f64);
    let (amount, unit, names) = match value {
        Value::Number(number) => (number.as_f64(), "", ["minimum", "maximum"]),
        Value::String(text) => (Some(text.chars().count() as f64), " characters", ["minLength", "maxLength"]),
        Value::Array(items) => (Some(items.len() as f64), " entries", ["minItems", "maxItems"]),
        _ => return Ok(()),
    };
    let Some(amount) = amount else { return Ok(()) };
    let [least, most] = names.map(bound);
    let verb = if unit.is_empty() { "be" } else { "have" };
    if let Some(least) = least.filter(|least| amount < *least) {
        return Err(format!("{} must {verb} at least {least}{unit}", named(place)));
    }
    if let Some(most) = most.filter(|most| amount > *most) {
        return Err(format!("{} must {verb} at most {most}{unit}", named(place)));
    }
    if value.is_number() {
        if let Some(least) = bound("exclusiveMinimum").filter(|least| amount <= *least) {
            return Err(format!("{} must be above {least}", named(place)));
        }
        if let Some(most) = bound("exclusiveMaximum").filter(|most| amount >= *most) {
            return Err(format!("{} must be below {most}", named(place)));
        }
    }
    Ok(())
}

fn check_combined(fields: &Map<String, Value>, value: &Value, place: &str) -> Result<(), String> {
    if let Some(Value::Array(all)) = fields.get("allOf") {
        all.iter().try_for_each(|schema| check_at(schema, value, place))?;
    }
    for name in ["anyOf", "oneOf"] {
        let Some(Value::Array(any)) = fields.get(name) else { continue };
        let mut first = None;
        let fits = any.iter().any(|schema| match check_at(schema, value, place) {
            Ok(()) => true,
            Err(error) => {
                first.get_or_insert(error);
                false
            }
        });
        if let Some(error) = first.filter(|_| !fits) {
            return Err(error);
        }
    }
    Ok(())
}

fn check_object(fields: &Map<String, Value>, given: &Map<String, Value>, place: &str) -> Result<(), String> {
    let inner = |name: &str| if place.is_empty() { name.to_owned() } else { format!("{place}.{name}") };
    for name in fields.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
        if !given.contains_key(name) {
            return Err(format!("the argument '{}' is missing", inner(name)));
        }
    }
    let properties = fields.get("properties").and_then(Value::as_object);
    let others = fields.get("additionalProperties").unwrap_or(&Value::Null);
    for (name, value) in given {
        match properties.and_then(|properties| properties.get(name)) {
            Some(schema) => check_at(schema, value, &inner(name))?,
            None if *others == Value::Bool(false) => {
                return Err(format!("the argument '{}' is unknown", shortened(&inner(name))));
            }
            None => check_at(others, value, &shortened(&inner(name)))?,
        }
    }
    Ok(())
}

/// The values of `type`, as a list.
fn types_of(fields: &Map<String, Value>) -> Vec<&str> {
    match fields.get("type") {
        Some(Value::String(kind)) => vec![kind],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

fn is_of_type(value: &Value, kind: &str) -> bool {
    match kind {
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        // A type of another vocabulary, such as Python's `dict`, is not checked.
        _ => true,
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Types that a schema allows, also those of `anyOf`, `oneOf`, `enum` and `const`.
fn allowed_types<'s>(schema: &'s Value, allowed: &mut Vec<&'s str>, left: usize) {
    let Some(fields) = schema.as_object() else { return };
    allowed.extend(types_of(fields));
    if fields.get("nullable") == Some(&Value::Bool(true)) {
        allowed.push("null");
    }
    let choices = fields.get("enum").and_then(Value::as_array).into_iter().flatten().chain(fields.get("const"));
    if !fields.contains_key("type") {
        for choice in choices {
            allowed.push(type_of(choice));
        }
    }
    if left > 0 {
        for any in ["anyOf", "oneOf", "allOf"].iter().filter_map(|name| fields.get(*name)?.as_array()) {
            any.iter().for_each(|schema| allowed_types(schema, allowed, left - 1));
        }
    }
}

/// Reads an argument that the model wrote as plain text, by its schema. A text that does not fit the schema's types stays a text, so
/// that the check names the error. Without a schema the argument is a text.
pub(crate) fn typed(schema: &Value, text: &str) -> Value {
    let mut allowed = Vec::new();
    allowed_types(schema, &mut allowed, MAX_DEPTH);
    let trimmed = text.trim();
    let read = match trimmed {
        // Models write Python's words as well.
        "None" if allowed.contains(&"null") => Some(Value::Null),
        "True" | "False" if allowed.contains(&"boolean") => Some(Value::Bool(trimmed == "True")),
        _ => serde_json::from_str::<Value>(trimmed).ok(),
    };
    let is_allowed = |value: &Value| {
        !value.is_string() && allowed.iter().any(|kind| *kind == type_of(value) || is_integer_for(value, kind))
    };
    read.filter(is_allowed).unwrap_or_else(|| Value::String(text.to_owned()))
}

fn is_integer_for(value: &Value, kind: &str) -> bool {
    kind == "integer" && value.is_number()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_checked_by_the_schema() {
        let schema = json!({
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 1, "maximum": 9},
                "b": {"type": ["string", "null"], "maxLength": 3},
                "c": {"enum": ["x", 2]},
                "d": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "maxItems": 2},
                "e": {"anyOf": [{"type": "boolean"}, {"type": "object", "required": ["f"]}]},
            },
            "required": ["a"],
            "additionalProperties": false,
        });
        for good in [
            json!({"a": 1}),
            json!({"a": 2.0, "b": null, "c": 2.0, "d": [0.5, 1], "e": {"f": 1}}),
            json!({"a": 9, "b": "äöü", "c": "x", "d": [], "e": false}),
        ] {
            assert_eq!(check(&schema, &good), Ok(()));
        }
        for (wrong, message) in [
            (json!({}), "the argument 'a' is missing"),
            (json!({"a": "1"}), "'a' must be of type integer, not string"),
            (json!({"a": 1.5}), "'a' must be of type integer, not number"),
            (json!({"a": 0}), "'a' must be at least 1"),
            (json!({"a": 10}), "'a' must be at most 9"),
            (json!({"a": 1, "b": "abcd"}), "'b' must have at most 3 characters"),
            (json!({"a": 1, "b": 1}), "'b' must be of type string or null, not number"),
            (json!({"a": 1, "c": 3}), "'c' must be one of \"x\", 2"),
            (json!({"a": 1, "d": [1, 0]}), "'d[1]' must be above 0"),
            (json!({"a": 1, "d": [1, 1, 1]}), "'d' must have at most 2 entries"),
            (json!({"a": 1, "e": 1}), "'e' must be of type boolean, not number"),
            (json!({"a": 1, "z": 1}), "the argument 'z' is unknown"),
            (json!([]), "the arguments must be of type object, not array"),
        ] {
            assert_eq!(check(&schema, &wrong), Err(message.to_owned()));
        }
        assert_eq!(check(&Value::Null, &json!({"any": 1})), Ok(()));
        assert_eq!(check(&json!(false), &json!(1)), Err("the arguments must be left out".to_owned()));
    }

    #[test]
    fn a_schema_has_a_largest_depth() {
        let mut deep = json!({});
        for _ in 0..40 {
            deep = json!({"items": deep});
        }
        assert!(check_depth(&deep).is_err());
        assert!(check_depth(&json!({"items": {"items": {}}})).is_ok());
    }

    #[test]
    fn plain_texts_become_values_by_the_schema() {
        for (schema, text, expected) in [
            (json!({"type": "string"}), "7", json!("7")),
            (json!({"type": "integer"}), "7", json!(7)),
            (json!({"type": "integer"}), " 7\n", json!(7)),
            (json!({"type": "integer"}), "seven", json!("seven")),
            (json!({"type": "number"}), "1e3", json!(1000.0)),
            (json!({"type": "boolean"}), "True", json!(true)),
            (json!({"type": "boolean"}), "false", json!(false)),
            (json!({"type": ["string", "null"]}), "null", json!(null)),
            (json!({"type": ["string", "null"]}), "5", json!("5")),
            (json!({"type": "string", "nullable": true}), "None", json!(null)),
            (json!({"anyOf": [{"type": "integer"}, {"type": "string"}]}), "5", json!(5)),
            (json!({"anyOf": [{"type": "integer"}, {"type": "string"}]}), "x", json!("x")),
            (json!({"type": "array"}), "[1, \"a\"]", json!([1, "a"])),
            (json!({"type": "object"}), "{\"a\": 1}", json!({"a": 1})),
            (json!({"enum": [1, 2]}), "2", json!(2)),
            (Value::Null, "7", json!("7")),
        ] {
            assert_eq!(typed(&schema, text), expected, "{schema} {text}");
        }
    }
}
