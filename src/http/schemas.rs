//! JSON Schema files of the contracts of rewards and of environments, extracted from the OpenAPI document, which is their only
//! source.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// File name and OpenAPI schema name of each schema file.
const FILES: [(&str, &str); 16] = [
    ("request.schema.json", "RewardRequest"),
    ("answer.schema.json", "RewardAnswer"),
    ("accepted.schema.json", "RewardAccepted"),
    ("callback.schema.json", "RewardCallback"),
    ("callback-answer.schema.json", "RewardCallbackTaken"),
    ("ping.schema.json", "RewardPing"),
    ("ping-answer.schema.json", "RewardPong"),
    ("env-reset.schema.json", "EnvironmentReset"),
    ("env-reset-answer.schema.json", "EnvironmentResetAnswer"),
    ("env-step.schema.json", "EnvironmentStep"),
    ("env-step-answer.schema.json", "EnvironmentStepAnswer"),
    ("env-close.schema.json", "EnvironmentClose"),
    ("env-accepted.schema.json", "EnvironmentAccepted"),
    ("env-callback.schema.json", "EnvironmentCallback"),
    ("env-ping.schema.json", "EnvironmentPing"),
    ("env-ping-answer.schema.json", "EnvironmentPong"),
];
const REF: &str = "#/components/schemas/";

/// Returns each file's name and text, as `rlood openapi --schemas DIR` writes them and as `openapi/reward-contract` contains them.
pub fn contract_schemas() -> Vec<(&'static str, String)> {
    let document = serde_json::to_value(super::openapi()).unwrap_or_default();
    let schemas = &document["components"]["schemas"];
    let file = |(file, name): (&'static str, &str)| (file, format!("{:#}\n", schema(schemas, file, name)));
    FILES.map(file).into()
}

/// Returns one OpenAPI schema as a JSON Schema document with all schemas that it refers to.
fn schema(schemas: &Value, file: &str, name: &str) -> Value {
    let contract = if file.starts_with("env-") { "environment" } else { "reward" };
    let mut whole = Map::from_iter([
        ("$schema".to_owned(), json!("https://json-schema.org/draft/2020-12/schema")),
        ("$id".to_owned(), json!(format!("urn:rlood:{contract}-contract:1:{file}"))),
        ("title".to_owned(), json!(name)),
    ]);
    let root = within(&schemas[name]);
    let (mut defs, mut open) = (Map::new(), names(&root));
    while let Some(next) = open.pop_first() {
        if !defs.contains_key(&next) {
            let def = within(&schemas[&next]);
            open.extend(names(&def));
            defs.insert(next, def);
        }
    }
    whole.extend(root.as_object().cloned().unwrap_or_default());
    defs.sort_keys();
    if !defs.is_empty() {
        whole.insert("$defs".to_owned(), Value::Object(defs));
    }
    Value::Object(whole)
}

/// Rewrites the references of a schema so that they point into the same file.
fn within(schema: &Value) -> Value {
    match schema {
        Value::Object(fields) => fields
            .iter()
            .map(|(key, value)| match (key.as_str(), value.as_str().and_then(|target| target.strip_prefix(REF))) {
                ("$ref", Some(name)) => (key.clone(), json!(format!("#/$defs/{name}"))),
                _ => (key.clone(), within(value)),
            })
            .collect(),
        Value::Array(items) => items.iter().map(within).collect(),
        other => other.clone(),
    }
}

/// Returns the names of the schemas that a schema refers to.
fn names(schema: &Value) -> BTreeSet<String> {
    match schema {
        Value::Object(fields) => {
            let own = fields.get("$ref").and_then(Value::as_str).and_then(|target| target.strip_prefix("#/$defs/"));
            fields.values().flat_map(names).chain(own.map(str::to_owned)).collect()
        }
        Value::Array(items) => items.iter().flat_map(names).collect(),
        _ => BTreeSet::new(),
    }
}
