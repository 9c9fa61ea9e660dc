//! Requirements on rows that serve as prompts, and limits on the length of prompts.

use serde_json::Value;

use super::reader::FieldError;
use crate::dataset::check_row;

/// Maximum number of rows whose errors are listed; for the others only their number is reported.
const MAX_ROW_ERRORS: usize = 20;
/// Columns with images, which only the runtime trl can use.
const IMAGE_COLUMNS: [&str; 2] = ["image", "images"];

/// The longest prompts of a dataset, in tokens of the job's model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromptLengths {
    /// Length of the longest prompt, in tokens.
    pub longest: u64,
    /// Row of the longest prompt, from 0.
    pub longest_row: u64,
    /// Number of prompts that leave no room for a completion.
    pub too_long: u64,
}

/// Checks rows that were sent with a job: every row must be an object with a usable `prompt`. `pointer` is the JSON
/// pointer to the list.
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
        errors.push(FieldError::new(pointer, "more_errors", format!("{more} more rows have errors")));
    }
    errors
}

fn check_record(record: &Value) -> Result<(), FieldError> {
    let (code, detail) = match check_row(record) {
        Ok(()) => return Ok(()),
        Err(complaint) => complaint,
    };
    let pointer = if record.is_object() { "/prompt" } else { "" };
    let image = record.as_object().and_then(|row| image_column(row.keys().map(String::as_str)));
    Err(FieldError::new(image.map_or(pointer.to_owned(), |column| format!("/{column}")), code, detail))
}

/// Returns the first column that contains images, if any.
pub(super) fn image_column<'c>(mut columns: impl Iterator<Item = &'c str>) -> Option<&'c str> {
    columns.find(|column| IMAGE_COLUMNS.contains(column))
}

/// Returns the error text for a column with images where only text is read.
pub(super) fn image_detail(column: &str) -> String {
    format!("column '{column}': these prompts are text only, images cannot be used; leave the column out")
}

/// Returns the error text for a source with images among several.
pub(super) fn one_of_several_detail() -> String {
    "a dataset with images must be the only source of a job: store all rows as one dataset with POST /datasets"
        .to_owned()
}
