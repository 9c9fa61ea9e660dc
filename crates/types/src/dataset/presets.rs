//! Mappings for common dataset layouts, such as GSM8K's question and answer. An error message suggests them; they are never applied
//! automatically.

use serde_json::{Map, Value, json};

use super::brief;

type Row = Map<String, Value>;

/// Returns the mapping for rows of verl and SkyRL, which have a prompt: it adds a column `ground_truth` for the rewards.
pub fn ground_truth_map(row: &Row) -> Option<Value> {
    if row.contains_key("ground_truth") {
        return None;
    }
    let inside = |name: &&str| row.get(*name).is_some_and(|column| !column["ground_truth"].is_null());
    let column = ["reward_model", "reward_spec"].into_iter().find(inside)?;
    Some(json!({"columns": {"ground_truth": format!("{column}.ground_truth")}}))
}

/// Returns the mapping for these columns, if the layout is known.
pub fn known_layout_map(row: &Row) -> Option<Value> {
    let has = |name: &str| row.contains_key(name);
    let text = |name: &str| row.get(name).is_some_and(Value::is_string);
    if text("question") && has("answer") {
        let is_gsm8k = row.get("answer").and_then(Value::as_str).is_some_and(|answer| answer.contains("####"));
        let answer = match is_gsm8k {
            true => "{{ answer.split('####')[-1] | trim | replace(',', '') }}",
            false => "answer",
        };
        return Some(json!({"prompt": "question", "columns": {"ground_truth": answer}}));
    }
    if text("problem") && (has("solution") || has("answer")) {
        let truth = if has("answer") { "answer" } else { "solution" };
        return Some(json!({"prompt": "problem", "columns": {"ground_truth": truth}}));
    }
    if has("messages") {
        return Some(json!({"prompt": "messages", "cut_answer": true}));
    }
    if has("conversations") {
        return Some(json!({"prompt": "conversations", "cut_answer": true}));
    }
    if text("instruction") {
        let prompt =
            if has("input") { "{{ instruction }}{% if input %}\n\n{{ input }}{% endif %}" } else { "instruction" };
        return Some(json!({"prompt": prompt}));
    }
    ["text", "query", "input", "problem_statement"]
        .into_iter()
        .find(|name| text(name))
        .map(|name| json!({"prompt": name}))
}

/// Returns the error text for a row without a prompt.
pub fn advice(row: &Row) -> String {
    let columns: Vec<String> = row.keys().take(20).map(|name| format!("'{}'", brief(name))).collect();
    let found = if columns.is_empty() { "no columns".to_owned() } else { columns.join(", ") };
    match known_layout_map(row) {
        Some(map) => format!("there is no 'prompt' column (found {found}): give a mapping, here \"map\": {map}"),
        None => {
            format!(
                "there is no 'prompt' column (found {found}): name the column that holds the prompts, \"map\": {{\"prompt\": \"…\"}}"
            )
        }
    }
}
