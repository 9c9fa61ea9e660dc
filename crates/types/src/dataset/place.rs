//! The place of a row in its file, as errors name it.

use std::fmt;

/// The place of a row in its file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RowPlace {
    /// The file as a whole, or a place that the error's text names.
    #[default]
    File,
    /// A line, counted from 1: a row of an ndjson file, the header of a CSV file, or a place between the rows of a JSON file.
    Line(u64),
    /// A row of a CSV, TSV or JSON file, counted from 1. A CSV file's header is not counted.
    Row(u64),
}

impl fmt::Display for RowPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RowPlace::File => Ok(()),
            RowPlace::Line(line) => write!(f, "line {line}"),
            RowPlace::Row(row) => write!(f, "row {row}"),
        }
    }
}
