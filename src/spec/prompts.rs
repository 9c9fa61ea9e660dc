//! What a row must be to serve as a prompt, and how long prompts may be.

use serde_json::{Map, Value};

use super::reader::{FieldError, shown};

/// Errors of single rows reported one by one; beyond them only their number.
const MAX_ROW_ERRORS: usize = 20;
/// Columns that only a multimodal trainer could use.
const IMAGE_COLUMNS: [&str; 6] = ["image", "images", "pixel_values", "video", "videos", "audio"];

/// The longest prompts of a dataset, in tokens of the job's model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromptLengths {
    /// Tokens of the longest one.
    pub longest: u64,
    /// The row it stands in, from 0.
    pub longest_row: u64,
    /// How many leave no room for a completion.
    pub too_long: u64,
}

/// Checks rows sent along with a job: every row an object with a usable `prompt`. `pointer` leads to the list.
pub fn check_records(records: &[Value], pointer: &str) -> Vec<FieldError> {
    if records.is_empty() {
        return vec![FieldError::new(
            pointer,
            "empty_dataset",
            "the dataset is empty: give at least one {\"prompt\": …}",
        )];
    }
    let wrong = |(row, record)| check_record(record).err().map(|error| (row, error));
    let mut all = records.iter().enumerate().filter_map(wrong);
    let mut errors: Vec<_> = all
        .by_ref()
        .take(MAX_ROW_ERRORS)
        .map(|(row, error)| FieldError { pointer: format!("{pointer}/{row}{}", error.pointer), ..error })
        .collect();
    let more = all.count();
    if more > 0 {
        errors.push(FieldError::new(
            pointer,
            "more_errors",
            format!("{more} more rows are wrong in these or other ways"),
        ));
    }
    errors
}

/// Checks one row; the error's pointer is relative to the row.
pub fn check_record(record: &Value) -> Result<(), FieldError> {
    let Some(row) = record.as_object() else {
        return Err(FieldError::new("", "invalid_type", "a row is an object: {\"prompt\": \"…\", …}"));
    };
    if let Some(column) = image_column(row.keys().map(String::as_str)) {
        return Err(FieldError::new(format!("/{column}"), "unsupported", image_detail(column)));
    }
    match row.get("prompt") {
        None => Err(FieldError::new("/prompt", "required", missing_prompt(row))),
        Some(Value::String(text)) if text.trim().is_empty() => {
            Err(FieldError::new("/prompt", "invalid_value", "the prompt is empty"))
        }
        Some(Value::String(_)) => Ok(()),
        Some(Value::Array(messages)) => check_messages(messages),
        Some(_) => Err(FieldError::new(
            "/prompt",
            "invalid_type",
            "a prompt is a string or a list of chat messages [{\"role\": \"user\", \"content\": \"…\"}]",
        )),
    }
}

fn check_messages(messages: &[Value]) -> Result<(), FieldError> {
    if messages.is_empty() {
        return Err(FieldError::new("/prompt", "invalid_value", "the list of chat messages is empty"));
    }
    for (index, message) in messages.iter().enumerate() {
        let pointer = format!("/prompt/{index}");
        if !message.get("role").is_some_and(Value::is_string) {
            return Err(FieldError::new(
                pointer,
                "invalid_value",
                "a chat message needs a role: system, user or assistant",
            ));
        }
        match message.get("content") {
            Some(Value::String(_)) => {}
            Some(Value::Array(_)) => {
                let detail = "content in parts is not supported (prompts are text only): give it as one string";
                return Err(FieldError::new(format!("{pointer}/content"), "unsupported", detail));
            }
            _ => return Err(FieldError::new(pointer, "invalid_value", "a chat message needs its content as a string")),
        }
    }
    Ok(())
}

fn missing_prompt(row: &Map<String, Value>) -> String {
    let columns: Vec<_> = row.keys().map(|key| shown(key)).collect();
    match columns.as_slice() {
        [] => "the row has no prompt: it is empty".to_owned(),
        columns => format!("the row has no column 'prompt', only: {}", columns.join(", ")),
    }
}

/// The first of the columns that hold images, if any.
pub(super) fn image_column<'c>(mut columns: impl Iterator<Item = &'c str>) -> Option<&'c str> {
    columns.find(|column| IMAGE_COLUMNS.contains(column))
}

/// What to say of such a column.
pub(super) fn image_detail(column: &str) -> String {
    format!("column '{column}': prompts are text only, images cannot be used; leave the column out")
}
