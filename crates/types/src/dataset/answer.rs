//! The answer in a row: the final assistant turn, which a warm-up learns from.

use serde_json::{Map, Value, json};

use super::{PROMPT, brief};

/// The column with the answer, if the prompt does not end with it.
pub const COMPLETION: &str = "completion";

/// A prompt and the assistant turn that follows it.
#[derive(Debug, Clone, PartialEq)]
pub enum Answered {
    /// Prompt and answer as plain text.
    Text {
        /// Text of the prompt.
        prompt: String,
        /// Text of the answer.
        completion: String,
    },
    /// Chat messages; the last one is the assistant's answer.
    Chat(Vec<Value>),
}

/// Returns the answer that a row teaches. Either its prompt ends with an assistant turn, or the column `completion` has the answer:
/// a text, or a list with the assistant's message.
///
/// # Errors
/// Fails with a stable code and how to fix the row, if it has no answer, an empty one, or two.
pub fn answered(prompt: &Value, columns: &Map<String, Value>) -> Result<Answered, (&'static str, String)> {
    let completion = match columns.get(COMPLETION) {
        None | Some(Value::Null) => None,
        Some(completion) => Some(text_of(completion)?),
    };
    match (prompt, completion) {
        (Value::String(_), None) => Err(no_answer(columns)),
        (Value::String(prompt), Some(completion)) => Ok(Answered::Text { prompt: prompt.clone(), completion }),
        (Value::Array(messages), completion) => {
            let ends_with_answer = messages.last().is_some_and(is_assistants);
            match (completion, ends_with_answer) {
                (None, false) => Err(no_answer(columns)),
                (Some(_), true) => {
                    let detail =
                        "the prompt ends with an assistant's turn, and there is a completion too: keep one of them";
                    Err(("two_answers", detail.to_owned()))
                }
                (None, true) => {
                    let last = messages.last().and_then(|last| last["content"].as_str()).unwrap_or_default();
                    check_text(last)?;
                    if messages.len() == 1 {
                        let detail = "the prompt has no turn before the assistant's: add the user's message";
                        return Err(("missing_prompt", detail.to_owned()));
                    }
                    Ok(Answered::Chat(messages.clone()))
                }
                (Some(completion), false) => {
                    let answer = json!({"role": "assistant", "content": completion});
                    Ok(Answered::Chat(messages.iter().cloned().chain([answer]).collect()))
                }
            }
        }
        (_, _) => Err(("invalid_prompt", format!("the {PROMPT} must be a string or a list of chat messages"))),
    }
}

fn is_assistants(message: &Value) -> bool {
    message["role"] == "assistant"
}

/// Returns the answer in the column `completion`: a text, or a list with the assistant's message.
fn text_of(completion: &Value) -> Result<String, (&'static str, String)> {
    let text = match completion {
        Value::String(text) => Some(text),
        Value::Array(messages) => match messages.as_slice() {
            [message] if is_assistants(message) => match &message["content"] {
                Value::String(text) => Some(text),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    };
    let Some(text) = text else {
        let detail =
            "the completion must be a string, or a list with one message of the assistant whose content is a string";
        return Err(("invalid_completion", detail.to_owned()));
    };
    check_text(text)?;
    Ok(text.clone())
}

fn check_text(text: &str) -> Result<(), (&'static str, String)> {
    match text.trim().is_empty() {
        true => Err(("empty_completion", "the assistant's turn is empty: the warm-up cannot learn from it".to_owned())),
        false => Ok(()),
    }
}

fn no_answer(columns: &Map<String, Value>) -> (&'static str, String) {
    let names: Vec<String> = columns.keys().take(8).map(|name| format!("'{}'", brief(name))).collect();
    let found = if names.is_empty() { "no columns at all".to_owned() } else { names.join(", ") };
    let detail = format!(
        "there is no assistant turn to learn from (found {found}): end the messages with the assistant's, or name the column that holds the answer, \"map\": {{\"prompt\": \"…\", \"completion\": \"…\"}}"
    );
    ("missing_completion", detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(row: Value) -> Result<Answered, &'static str> {
        let Value::Object(mut row) = row else { return Err("not an object") };
        let prompt = row.shift_remove("prompt").unwrap_or_default();
        answered(&prompt, &row).map_err(|(code, _)| code)
    }

    #[test]
    fn the_answer_is_the_last_turn_or_the_completion() {
        let user = json!({"role": "user", "content": "2+2?"});
        let assistant = json!({"role": "assistant", "content": "4"});
        let chat = Ok(Answered::Chat(vec![user.clone(), assistant.clone()]));
        assert_eq!(of(json!({"prompt": [user, assistant]})), chat);
        assert_eq!(of(json!({"prompt": [user], "completion": "4"})), chat);
        assert_eq!(of(json!({"prompt": [user], "completion": [assistant]})), chat);
        let text = Answered::Text { prompt: "2+2=".into(), completion: "4".into() };
        assert_eq!(of(json!({"prompt": "2+2=", "completion": "4", "level": 1})), Ok(text));
        for (row, code) in [
            (json!({"prompt": "2+2="}), "missing_completion"),
            (json!({"prompt": "2+2=", "completion": null}), "missing_completion"),
            (json!({"prompt": [user], "level": 1}), "missing_completion"),
            (json!({"prompt": [user, assistant], "completion": "4"}), "two_answers"),
            (json!({"prompt": [assistant]}), "missing_prompt"),
            (json!({"prompt": [user], "completion": " "}), "empty_completion"),
            (json!({"prompt": [user, {"role": "assistant", "content": ""}]}), "empty_completion"),
            (json!({"prompt": [user], "completion": [user]}), "invalid_completion"),
            (json!({"prompt": [user], "completion": 4}), "invalid_completion"),
        ] {
            assert_eq!(of(row.clone()), Err(code), "{row}");
        }
    }
}
