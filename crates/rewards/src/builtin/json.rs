//! A reward for completions that are JSON and match a schema.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value};

use super::{no_value, yes_no};
use crate::SampleError;
use crate::rollout::RewardValue;
use crate::spec::{BlankReference, JsonSchema, JsonSchemaPlan};

/// Maximum number of JSON schemas from dataset rows that are kept compiled in memory.
const MAX_ROW_SCHEMAS: usize = 256;

/// A compiled `json_schema` reward.
#[derive(Debug)]
pub(super) struct JsonCheck {
    schema: Option<JsonSchema>,
    column: Option<String>,
    fenced: bool,
    rows: RowSchemas,
}

/// The compiled JSON schemas of dataset rows, by the schema's text; an error for a schema that cannot be compiled.
#[derive(Debug, Default)]
struct RowSchemas(Mutex<HashMap<String, Result<Arc<JsonSchema>, String>>>);

impl RowSchemas {
    /// Returns the compiled form of a JSON schema, from memory if it was compiled before.
    fn get(&self, schema: &Value) -> Result<Arc<JsonSchema>, String> {
        let text = schema.to_string();
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&text).cloned();
        known.unwrap_or_else(|| {
            let compiled = JsonSchema::new(schema).map(Arc::new);
            let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if known.len() >= MAX_ROW_SCHEMAS {
                known.clear();
            }
            known.insert(text, compiled.clone());
            compiled
        })
    }
}

impl JsonCheck {
    pub(super) fn new(plan: &JsonSchemaPlan) -> Result<Self, String> {
        let schema = plan.schema.as_ref().map(JsonSchema::new).transpose()?;
        Ok(Self { schema, column: plan.column.clone(), fenced: plan.fenced, rows: RowSchemas::default() })
    }

    /// Returns 1 if the completion matches the schema, else 0; an error if the row's schema is not valid; not applicable
    /// if it is null.
    pub(super) fn value(
        &self,
        completion: &str,
        columns: &Map<String, Value>,
        blank: BlankReference,
    ) -> Result<RewardValue, SampleError> {
        let own = match &self.column {
            None => None,
            Some(column) => {
                let schema = columns.get(column);
                let is_blank = schema.is_none_or(|schema| schema.as_str().is_some_and(|text| text.trim().is_empty()));
                if is_blank && blank == BlankReference::NotApplicable {
                    return Ok(RewardValue::NotApplicable);
                }
                let schema =
                    schema.ok_or_else(|| no_value("column_missing", format!("this row has no column '{column}'")))?;
                // A row's JSON schema may be a string, because CSV files have no other values.
                let parsed = schema.as_str().map(serde_json::from_str::<Value>);
                let schema = match parsed {
                    None => schema.clone(),
                    Some(Ok(parsed)) => parsed,
                    Some(Err(why)) => {
                        return Err(no_value(
                            "column_not_a_schema",
                            format!("the JSON schema in the column '{column}' cannot be used: {why}"),
                        ));
                    }
                };
                if schema.is_null() {
                    return Ok(RewardValue::NotApplicable);
                }
                let invalid = |why| {
                    no_value(
                        "column_not_a_schema",
                        format!("the JSON schema in the column '{column}' cannot be used: {why}"),
                    )
                };
                Some(self.rows.get(&schema).map_err(invalid)?)
            }
        };
        let text = self.fenced.then(|| fence(completion)).flatten().unwrap_or(completion).trim();
        let Ok(value) = serde_json::from_str::<Value>(text) else { return Ok(yes_no(false)) };
        let Some(schema) = own.as_deref().or(self.schema.as_ref()) else { return Ok(yes_no(true)) };
        schema.accepts(&value).map(yes_no).map_err(|why| no_value("schema_too_costly", why.to_string()))
    }
}

/// Returns the content of a completion's last code block between ```json (or ```) and ```.
fn fence(text: &str) -> Option<&str> {
    let end = text.rfind("```")?;
    let start = text[..end].rfind("```")?;
    let inside = &text[start + 3..end];
    let (language, body) = inside.split_once('\n').unwrap_or(("", inside));
    if language.trim().is_empty() || language.trim().eq_ignore_ascii_case("json") { Some(body) } else { None }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(plan: Value) -> JsonCheck {
        JsonCheck::new(&serde_json::from_value(plan).unwrap()).unwrap()
    }

    #[test]
    fn a_schema_accepts_or_not() {
        let schema =
            json!({"type": "object", "required": ["sum"], "properties": {"sum": {"type": "integer", "minimum": 0}}});
        let check = check(json!({"schema": schema, "column": null, "fenced": true}));
        for (completion, expected) in [
            (r#"{"sum": 4}"#, 1.0),
            (" {\"sum\": 4, \"x\": 1}\n", 1.0),
            ("Here:\n```json\n{\"sum\": 4}\n```\nDone.", 1.0),
            ("```\n{\"sum\": 4}\n```", 1.0),
            (r#"{"sum": -1}"#, 0.0),
            (r#"{"sum": "4"}"#, 0.0),
            ("{}", 0.0),
            ("4", 0.0),
            ("sum: 4", 0.0),
            ("", 0.0),
            ("```", 0.0),
            (r#"{"sum": NaN}"#, 0.0),
        ] {
            assert_eq!(
                check.value(completion, &Map::new(), BlankReference::Compare).unwrap().number(),
                Some(expected),
                "{completion}"
            );
        }
    }

    #[test]
    fn a_row_may_have_a_schema_of_its_own() {
        let check = check(json!({"schema": null, "column": "schema", "fenced": false}));
        let value =
            |schema: Value| check.value("3", &Map::from_iter([("schema".to_owned(), schema)]), BlankReference::Compare);
        assert_eq!(value(json!({"type": "integer"})).unwrap().number(), Some(1.0));
        assert_eq!(value(json!("{\"type\": \"string\"}")).unwrap().number(), Some(0.0));
        assert_eq!(value(json!(null)).unwrap(), RewardValue::NotApplicable);
        assert_eq!(value(json!({"type": "nothing"})).unwrap_err().code, "column_not_a_schema");
        assert_eq!(value(json!("{")).unwrap_err().code, "column_not_a_schema");
        assert_eq!(check.value("3", &Map::new(), BlankReference::Compare).unwrap_err().code, "column_missing");
    }

    #[test]
    fn a_rows_schema_that_asks_for_too_much_work_is_an_error_of_the_row() {
        let check = check(json!({"schema": null, "column": "schema", "fenced": false}));
        let value = |schema: Value, completion: &str| {
            check
                .value(completion, &Map::from_iter([("schema".to_owned(), schema)]), BlankReference::NotApplicable)
                .unwrap_err()
        };
        let step = |number: usize| {
            let below = json!({"$ref": format!("#/$defs/a{}", number - 1)});
            (format!("a{number}"), json!({"allOf": [below, below]}))
        };
        let definitions: Map<String, Value> = (1..=45).map(step).chain([("a0".to_owned(), json!({}))]).collect();
        let doubling = json!({"$defs": definitions, "$ref": "#/$defs/a45"});
        let error = value(doubling.clone(), "1");
        assert!(error.code == "column_not_a_schema" && error.message.contains("too much work"), "{error:?}");
        assert_eq!(value(json!(doubling.to_string()), "1").code, "column_not_a_schema");
        let recursive = json!({"allOf": [{"items": {"$ref": "#"}}, {"items": {"$ref": "#"}}]});
        let deep = format!("{}{}", "[".repeat(100), "]".repeat(100));
        assert_eq!(value(recursive, &deep).code, "schema_too_costly");
    }

    #[test]
    fn without_a_schema_any_json_is_valid_and_no_schema_is_fetched() {
        let any = check(json!({"schema": null, "column": null, "fenced": true}));
        assert_eq!(any.value("[1]", &Map::new(), BlankReference::Compare).unwrap().number(), Some(1.0));
        assert_eq!(any.value("[1", &Map::new(), BlankReference::Compare).unwrap().number(), Some(0.0));
        for reference in ["https://example.org/schema.json", "file:///etc/passwd"] {
            assert!(JsonSchema::new(&json!({"$ref": reference})).is_err(), "{reference}");
        }
    }
}
