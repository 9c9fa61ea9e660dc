//! The OpenAPI document equals the committed one, is complete, and has no dangling references.

use serde_json::Value;

fn document() -> Value {
    serde_json::to_value(rlood::http::openapi()).unwrap()
}

#[test]
fn the_committed_document_is_what_the_handlers_say() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi/openapi.json");
    let now = rlood::http::openapi().to_pretty_json().unwrap();
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed.trim_end() == now.trim_end(),
        "openapi/openapi.json is old: run `cargo run --release -- openapi > openapi/openapi.json`"
    );
}

/// Every operation as (path, method, operation).
fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let mut found = Vec::new();
    for part in ["paths", "webhooks"] {
        for (path, item) in document[part].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                found.push((path.clone(), method.clone(), operation.clone()));
            }
        }
    }
    found
}

#[test]
fn every_operation_is_described_and_fails_with_a_problem() {
    let document = document();
    assert_eq!(document["openapi"], "3.1.0");
    let tags: Vec<&str> =
        document["tags"].as_array().unwrap().iter().map(|tag| tag["name"].as_str().unwrap()).collect();
    let mut ids = std::collections::BTreeSet::new();
    for (path, method, operation) in operations(&document) {
        let at = format!("{method} {path}");
        assert!(operation["summary"].as_str().is_some_and(|text| !text.is_empty()), "{at} has no summary");
        assert!(
            tags.contains(&operation["tags"][0].as_str().unwrap()),
            "{at} has an unknown tag {}",
            operation["tags"]
        );
        let id = operation["operationId"].as_str().unwrap_or_else(|| panic!("{at} has no operationId"));
        assert!(ids.insert(id.to_owned()), "{at}: operationId {id} twice");
        // Routes of the OpenAI API answer errors in its form.
        let is_openai = operation["tags"][0] == "Serving";
        let (error, kind) = match is_openai {
            true => ("OpenAiError", "application/json"),
            false => ("Problem", "application/problem+json"),
        };
        if path.starts_with('/') {
            let expected = format!("#/components/responses/{error}");
            assert_eq!(operation["responses"]["default"]["$ref"], expected, "{at}");
        }
        for (status, response) in operation["responses"].as_object().unwrap() {
            if status.starts_with('4') && path.starts_with('/') {
                let content = response["content"].as_object().unwrap();
                assert_eq!(content.keys().collect::<Vec<_>>(), [kind], "{at} {status}");
            }
        }
    }
}

#[test]
fn every_reference_has_a_target() {
    fn check(document: &Value, value: &Value) {
        match value {
            Value::Object(fields) => {
                if let Some(Value::String(target)) = fields.get("$ref") {
                    let pointer = target.strip_prefix('#').unwrap();
                    assert!(document.pointer(pointer).is_some(), "{target} has no target");
                }
                fields.values().for_each(|value| check(document, value));
            }
            Value::Array(values) => values.iter().for_each(|value| check(document, value)),
            _ => {}
        }
    }
    let document = document();
    check(&document, &document);
}

#[test]
fn the_reward_contract_is_part_of_it() {
    let document = document();
    let request = &document["webhooks"]["reward.score.request"]["post"];
    let body = request["requestBody"]["content"]["application/json"]["schema"]["$ref"].as_str().unwrap();
    let schema = document.pointer(body.strip_prefix('#').unwrap()).unwrap();
    for field in ["type", "version", "id", "timestamp", "job", "reward", "deadline_ms", "reply", "samples"] {
        assert!(schema["properties"].get(field).is_some(), "{field} in {schema}");
    }
    assert!(document["webhooks"]["reward.ping"]["post"].is_object());
    let sample = &document["components"]["schemas"]["RewardRequestSample"]["properties"];
    for field in [
        "sample_id",
        "group_id",
        "prompt_id",
        "messages",
        "prompt",
        "completion",
        "finish_reason",
        "num_tokens",
        "columns",
    ] {
        assert!(sample.get(field).is_some(), "{field} in {sample}");
    }
}

#[test]
fn the_pinned_routes_exist() {
    let document = document();
    for (method, path) in [
        ("post", "/datasets"),
        ("get", "/datasets"),
        ("get", "/datasets/{id}"),
        ("delete", "/datasets/{id}"),
        ("get", "/datasets/{id}/rows"),
        ("get", "/datasets/{id}/content"),
        ("post", "/models"),
        ("get", "/models"),
        ("get", "/models/{id}"),
        ("delete", "/models/{id}"),
        ("get", "/jobs/{id}/checkpoints"),
        ("get", "/jobs/{id}/adapter"),
        ("get", "/checkpoints/{id}"),
        ("get", "/checkpoints/{id}/files/{name}"),
        ("head", "/checkpoints/{id}/files/{name}"),
        ("get", "/checkpoints/{id}/manifest.json"),
        ("get", "/checkpoints/{id}/archive.tar"),
        ("get", "/livez"),
        ("get", "/readyz"),
        ("get", "/metrics"),
        ("get", "/openapi.json"),
        ("get", "/workers"),
        ("post", "/jobs"),
        ("get", "/jobs"),
        ("get", "/jobs/{id}"),
        ("patch", "/jobs/{id}"),
        ("delete", "/jobs/{id}"),
    ] {
        assert!(document["paths"][path].get(method).is_some(), "{method} {path}");
    }
}
