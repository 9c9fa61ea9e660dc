//! Whether a completion is JSON that a schema accepts.

use serde_json::{Map, Value};

use super::{no_value, yes_no};
use crate::reward::SampleError;
use crate::sample::RewardValue;
use crate::spec::{BlankReference, JsonSchema, JsonSchemaPlan};

/// A compiled check.
#[derive(Debug)]
pub(super) struct JsonCheck {
    schema: Option<JsonSchema>,
    column: Option<String>,
    fenced: bool,
}

impl JsonCheck {
    pub(super) fn new(plan: &JsonSchemaPlan) -> Result<Self, String> {
        let schema = plan.schema.as_ref().map(JsonSchema::new).transpose()?;
        Ok(Self { schema, column: plan.column.clone(), fenced: plan.fenced })
    }

    /// 1 or 0; no value where the row's own schema is none, not applicable where it is null.
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
                // In CSV files a schema is text.
                let parsed = schema.as_str().map(serde_json::from_str::<Value>);
                let schema = match parsed {
                    None => schema.clone(),
                    Some(Ok(parsed)) => parsed,
                    Some(Err(why)) => {
                        return Err(no_value("column_not_a_schema", format!("the column '{column}': {why}")));
                    }
                };
                if schema.is_null() {
                    return Ok(RewardValue::NotApplicable);
                }
                let invalid = |why| no_value("column_not_a_schema", format!("the column '{column}': {why}"));
                Some(JsonSchema::new(&schema).map_err(invalid)?)
            }
        };
        let text = self.fenced.then(|| fence(completion)).flatten().unwrap_or(completion).trim();
        let Ok(value) = serde_json::from_str::<Value>(text) else { return Ok(yes_no(false)) };
        Ok(yes_no(own.as_ref().or(self.schema.as_ref()).is_none_or(|schema| schema.accepts(&value))))
    }
}

/// Inside of the last block between ```json (or ```) and ```.
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
    fn no_schema_takes_any_json_and_none_is_fetched() {
        let any = check(json!({"schema": null, "column": null, "fenced": true}));
        assert_eq!(any.value("[1]", &Map::new(), BlankReference::Compare).unwrap().number(), Some(1.0));
        assert_eq!(any.value("[1", &Map::new(), BlankReference::Compare).unwrap().number(), Some(0.0));
        for reference in ["https://example.org/schema.json", "file:///etc/passwd"] {
            assert!(JsonSchema::new(&json!({"$ref": reference})).is_err(), "{reference}");
        }
    }
}
