//! Tests that every operation of the OpenAPI document has a method, and that those with an `Idempotency-Key` send one.

use serde_json::Value;

/// Operations whose method has another name, or none, with the reason.
const OTHERWISE: &[(&str, Option<&str>)] = &[
    // These methods download to files.
    ("get_adapter", Some("download_adapter")),
    ("get_rollout_adapter_file", Some("download_rollout_adapter_file")),
    ("get_archive", Some("download_archive")),
    ("get_content", Some("download_dataset")),
    ("get_file", Some("download_file")),
    ("get_image", Some("download_image")),
    ("get_export_archive", Some("download_export_archive")),
    ("get_export_file", Some("download_export_file")),
    // The same operations with the model in the path.
    ("get_served_model_of", None),
    ("create_chat_completion_of", None),
    ("create_completion_of", None),
    ("tokenize_of", None),
    ("detokenize_of", None),
    ("tokenizer_info_of", None),
    // The whole URL is in a reward request, with its token.
    ("get_reward_image", None),
    // Sessions use a cookie for browsers; programs use their key.
    ("open_session", None),
    ("end_session", None),
];

/// Returns the source of the method of this name, up to the next one.
fn source_of<'s>(sources: &'s str, name: &str) -> Option<&'s str> {
    let begin = ["pub async fn ", "pub fn "].iter().find_map(|kind| sources.find(&format!("{kind}{name}(")))?;
    let rest = &sources[begin..];
    Some(rest[1..].split("\n    }\n").next().unwrap_or(rest))
}

#[test]
fn every_operation_has_a_method_and_creating_ones_send_a_key() {
    let root = rlood_test_support::in_repository("crates/client");
    let document = std::fs::read_to_string(root.join("../../openapi/openapi.json")).unwrap();
    let document: Value = serde_json::from_str(&document).unwrap();
    let mut sources = String::new();
    for entry in std::fs::read_dir(root.join("src/api")).unwrap() {
        sources.push_str(&std::fs::read_to_string(entry.unwrap().path()).unwrap());
    }
    let (mut operations, mut missing) = (0, Vec::new());
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let Some(name) = operation["operationId"].as_str() else { continue };
            operations += 1;
            let name = match OTHERWISE.iter().find(|(id, _)| *id == name) {
                // HEAD has the id of its GET.
                _ if method == "head" => continue,
                Some((_, None)) => continue,
                Some((_, Some(other))) => *other,
                None => name,
            };
            let Some(source) = source_of(&sources, name) else {
                missing.push(format!("{method} {path}: no method {name}"));
                continue;
            };
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            let is_key =
                |parameter: &Value| parameter["name"].as_str().unwrap().eq_ignore_ascii_case("idempotency-key");
            if parameters.iter().any(is_key) != source.contains("post_once(") {
                missing.push(format!("{method} {path}: {name} and its Idempotency-Key"));
            }
        }
    }
    assert!(operations > 60 && missing.is_empty(), "{operations} operations:\n{}", missing.join("\n"));
}
