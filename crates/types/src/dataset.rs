//! Datasets, and how ndjson, CSV, TSV and JSON are parsed into them: incrementally, with the place of every bad row.
//!
//! A dataset consists of rows. A row is a JSON object with a `prompt` (a non-empty string, or a non-empty list of chat messages)
//! and any other columns, which are sent to the rewards. The canonical form is ndjson: one compact object per line, with keys in
//! their original order. [`Reader`] accepts bytes as they arrive and keeps one row in memory.
//!
//! This file is longer than others because the reader and the checks of a row share their wording and limits.

mod answer;
mod images;
mod place;
pub mod presets;
mod recipe;
mod split;

use serde_json::{Map, Value};

use crate::strict_json;
pub use answer::{Answered, COMPLETION, answered};
pub use images::{IMAGES, ImageError, ImageFormat, ImageRef, ImageSink, MAX_IMAGES_PER_ROW, SentImage, image_refs};
pub use place::RowPlace;
pub use recipe::{InvalidRecipe, Map as RecipeMap, Recipe, Unique};
use split::{CsvSplit, JsonSplit, LineSplit};

/// The column that every row needs.
pub const PROMPT: &str = "prompt";
/// Maximum size of one row, before and after conversion to canonical form, in bytes.
pub const MAX_ROW_BYTES: usize = 1024 * 1024;
/// Maximum number of bad rows that are described; further ones are only counted.
pub const MAX_ERRORS: usize = 100;
/// Maximum number of distinct columns in a dataset.
pub const MAX_COLUMNS: usize = 1000;

/// File format of uploaded rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One JSON object per line.
    Ndjson,
    /// RFC 4180, with a header line. Every value is a string.
    Csv,
    /// Like CSV, with tabs instead of commas.
    Tsv,
    /// A JSON list of rows, `[{…}, …]`, or `{"records": [{…}, …]}`.
    Json,
}

impl Format {
    /// The media types that error messages list as accepted.
    pub const ACCEPTED: &'static str = "application/x-ndjson, text/csv, text/tab-separated-values, application/json";

    /// Returns the format for a media type (lower case, without parameters).
    pub fn of_media_type(media_type: &str) -> Option<Format> {
        match media_type {
            "application/x-ndjson"
            | "application/ndjson"
            | "application/jsonl"
            | "application/x-jsonl"
            | "application/jsonlines"
            | "application/x-jsonlines"
            | "application/json-lines"
            | "text/x-ndjson"
            | "text/jsonl" => Some(Format::Ndjson),
            "text/csv" | "application/csv" => Some(Format::Csv),
            "text/tab-separated-values" | "text/tsv" => Some(Format::Tsv),
            "application/json" | "text/json" => Some(Format::Json),
            _ => None,
        }
    }

    /// Returns the format for a file name, by its extension.
    pub fn of_file_name(name: &str) -> Option<Format> {
        match name.rsplit_once('.')?.1.to_ascii_lowercase().as_str() {
            "ndjson" | "jsonl" | "jsonlines" => Some(Format::Ndjson),
            "csv" => Some(Format::Csv),
            "tsv" | "tab" => Some(Format::Tsv),
            "json" => Some(Format::Json),
            _ => None,
        }
    }
}

/// An error in one row, or in the whole dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowError {
    /// Where the row is in its file.
    pub place: RowPlace,
    /// Stable error code in snake_case.
    pub code: &'static str,
    /// Explanation of the error, and how to fix it.
    pub detail: String,
}

/// The errors of a dataset: the first [`MAX_ERRORS`] of them, and their total number.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{num_errors} bad rows")]
pub struct Rejected {
    /// Errors in the order of the rows.
    pub errors: Vec<RowError>,
    /// Total number of errors.
    pub num_errors: u64,
}

/// The result of reading a whole dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// Number of rows in the dataset.
    pub num_rows: u64,
    /// Column names, in order of first appearance.
    pub columns: Vec<String>,
}

/// Parses rows from chunks of bytes, with one row in memory at a time. Blocking. The content of the rows is not checked.
#[derive(Debug)]
pub struct RowReader {
    format: Format,
    split: Split,
    /// Number of rows so far.
    rows: u64,
    limit: usize,
    /// Column that the header of a CSV file must have.
    needed: Option<&'static str>,
    start: Vec<u8>,
    begun: bool,
    header: Option<Vec<String>>,
    /// Whether parsing has stopped at an error after which the beginning of the next row is unknown.
    stopped: bool,
}

#[derive(Debug)]
enum Split {
    Lines(LineSplit),
    Csv(CsvSplit),
    Json(JsonSplit),
}

/// Callback that receives each row with its place, or the reason why the row cannot be parsed.
pub type OnRow<'r> = dyn FnMut(RowPlace, Result<Value, RowError>) + 'r;

impl RowReader {
    /// Creates a parser for a format, with a maximum row size in bytes.
    pub fn new(format: Format, limit: usize) -> Self {
        let split = match format {
            Format::Ndjson => Split::Lines(LineSplit::new(limit)),
            Format::Csv => Split::Csv(CsvSplit::new(limit, b',')),
            Format::Tsv => Split::Csv(CsvSplit::new(limit, b'\t')),
            Format::Json => Split::Json(JsonSplit::new(limit)),
        };
        Self {
            format,
            split,
            rows: 0,
            limit,
            needed: None,
            start: Vec::new(),
            begun: false,
            header: None,
            stopped: false,
        }
    }

    /// Parses the next bytes.
    pub fn push(&mut self, bytes: &[u8], row: &mut OnRow<'_>) {
        if self.begun {
            self.split(bytes, row);
            return;
        }
        // A byte order mark is at most three bytes long, and may arrive in several chunks.
        self.start.extend_from_slice(bytes);
        if self.start.len() >= 3 {
            self.begin(row);
        }
    }

    /// Ends the input, and parses a last row without a line break.
    pub fn finish(&mut self, row: &mut OnRow<'_>) {
        if !self.begun {
            self.begin(row);
        }
        let Self { format, split, rows, limit, needed, header, stopped, start: _, begun: _ } = self;
        let mut taken = RowParser { format: *format, rows, limit: *limit, needed: *needed, header, stopped };
        match split {
            Split::Lines(lines) => lines.finish(&mut |line, text| taken.json(line, text, row)),
            Split::Csv(csv) => csv.finish(&mut |line, fields| taken.csv(line, fields, row)),
            Split::Json(json) => json.finish(&mut |line, text| taken.json(line, text, row)),
        }
    }

    fn begin(&mut self, row: &mut OnRow<'_>) {
        self.begun = true;
        let start = std::mem::take(&mut self.start);
        let mut refuse = |code: &'static str, detail: &str| {
            let place = RowPlace::Line(1);
            row(place, Err(RowError { place, code, detail: detail.to_owned() }));
            true
        };
        if start.starts_with(b"\xff\xfe") || start.starts_with(b"\xfe\xff") {
            self.stopped = refuse("encoding", "the file is UTF-16; convert it to UTF-8");
        }
        if start.starts_with(b"\x1f\x8b") {
            let detail =
                "the file is compressed with gzip: upload it with 'content-encoding: gzip', or unpack it first";
            self.stopped = refuse("gzip", detail);
        }
        self.split(start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&start), row);
    }

    fn split(&mut self, bytes: &[u8], row: &mut OnRow<'_>) {
        if self.stopped {
            return;
        }
        let Self { format, split, rows, limit, needed, header, stopped, start: _, begun: _ } = self;
        let mut taken = RowParser { format: *format, rows, limit: *limit, needed: *needed, header, stopped };
        match split {
            Split::Lines(lines) => lines.push(bytes, &mut |line, text| taken.json(line, text, row)),
            Split::Csv(csv) => csv.push(bytes, &mut |line, fields| taken.csv(line, fields, row)),
            Split::Json(json) => json.push(bytes, &mut |line, text| taken.json(line, text, row)),
        }
    }
}

/// The fields of a row that a splitter has separated, or why they cannot be separated.
type Raw<'a, T> = Result<T, split::Broken<'a>>;

/// Converts a splitter's raw rows (bytes or CSV fields) to JSON objects.
struct RowParser<'t> {
    format: Format,
    rows: &'t mut u64,
    limit: usize,
    needed: Option<&'static str>,
    header: &'t mut Option<Vec<String>>,
    stopped: &'t mut bool,
}

impl RowParser<'_> {
    /// Counts a row that begins on this line, and returns its place.
    fn next_place(&mut self, line: u64) -> RowPlace {
        *self.rows += 1;
        match self.format {
            Format::Ndjson => RowPlace::Line(line),
            Format::Csv | Format::Tsv | Format::Json => RowPlace::Row(*self.rows),
        }
    }

    fn json(&mut self, line: u64, text: Raw<'_, &[u8]>, row: &mut OnRow<'_>) {
        let place = match &text {
            // An error between two rows, in the brackets and commas of a JSON list.
            Err(broken) if broken.code == "json" => RowPlace::Line(line),
            _ => self.next_place(line),
        };
        let Some(text) = self.whole(place, text, row) else { return };
        let wrong = |code: &'static str, detail: String| Err(RowError { place, code, detail });
        let read = match strict_json::read(text) {
            Ok(value) => Ok(value),
            Err(_) if std::str::from_utf8(text).is_err() => {
                wrong("encoding", "the file is not UTF-8; save it as UTF-8".to_owned())
            }
            Err(error) => {
                let what = strict_json::error_text(&error);
                // A row of a JSON list may span several lines.
                let at = match error.line() {
                    0 | 1 => format!("column {}", error.column()),
                    later => format!("line {}, column {}", line + later as u64 - 1, error.column()),
                };
                match error.is_data() {
                    true => wrong("not_exact", format!("at {at}: {what}")),
                    false => wrong("json", format!("broken JSON at {at}: {what}")),
                }
            }
        };
        row(place, read);
    }

    fn csv(&mut self, line: u64, fields: Raw<'_, &[Vec<u8>]>, row: &mut OnRow<'_>) {
        let place = if self.header.is_none() { RowPlace::Line(line) } else { self.next_place(line) };
        let Some(fields) = self.whole(place, fields, row) else { return };
        let mut wrong = |code: &'static str, detail: String| row(place, Err(RowError { place, code, detail }));
        let mut texts = Vec::with_capacity(fields.len());
        for field in fields {
            match std::str::from_utf8(field) {
                Ok(text) => texts.push(text),
                Err(_) => return wrong("encoding", "the file is not UTF-8; save it as UTF-8".to_owned()),
            }
        }
        let Some(header) = &*self.header else {
            match csv_header(&texts, self.needed) {
                Ok(header) => *self.header = Some(header),
                Err((code, detail)) => {
                    *self.stopped = true;
                    wrong(code, detail);
                }
            }
            return;
        };
        if header.len() != texts.len() {
            let detail = format!(
                "the row has {} fields, but the header has {}: quote fields that contain commas or line breaks",
                texts.len(),
                header.len()
            );
            return wrong("field_count", detail);
        }
        let fields: Map<String, Value> =
            header.iter().cloned().zip(texts.into_iter().map(|text| Value::String(text.to_owned()))).collect();
        row(place, Ok(Value::Object(fields)));
    }

    /// Returns the row as JSON; fails if the splitter could not find the row's end.
    fn whole<T>(&mut self, place: RowPlace, raw: Raw<'_, T>, row: &mut OnRow<'_>) -> Option<T> {
        if *self.stopped {
            return None;
        }
        match raw {
            Ok(whole) => Some(whole),
            Err(split::Broken { code, detail, last }) => {
                let detail = match code {
                    "row_too_long" => format!("the row is longer than {} MiB, which is the maximum", self.limit >> 20),
                    _ => detail.to_owned(),
                };
                row(place, Err(RowError { place, code, detail }));
                *self.stopped = last;
                None
            }
        }
    }
}

fn csv_header(names: &[&str], needed: Option<&str>) -> Result<Vec<String>, (&'static str, String)> {
    let mut header: Vec<String> = Vec::with_capacity(names.len());
    for name in names.iter().map(|name| name.trim()) {
        let number = header.len() + 1;
        if name.is_empty() {
            return Err(("header", format!("column {number} of the header has no name: give it one")));
        }
        if let Some(first) = header.iter().position(|known| known == name) {
            let detail = format!(
                "columns {} and {number} of the header are both named '{}': rename one",
                first + 1,
                brief(name)
            );
            return Err(("header", detail));
        }
        header.push(name.to_owned());
    }
    if needed.is_some_and(|needed| !header.iter().any(|name| name == needed)) {
        // Every value of a CSV row is text.
        let row = header.into_iter().map(|name| (name, Value::String(String::new()))).collect();
        return Err(("missing_prompt", presets::advice(&row)));
    }
    Ok(header)
}

/// Reads a dataset from chunks of bytes.
#[derive(Debug)]
pub struct Reader {
    rows: RowReader,
    written: Rows,
}

impl Reader {
    /// Creates a reader for a format.
    pub fn new(format: Format) -> Self {
        let rows = RowReader { needed: Some(PROMPT), ..RowReader::new(format, MAX_ROW_BYTES) };
        Self { rows, written: Rows::default() }
    }

    /// Stores the images of rows with `sink`. Without it rows with images are refused.
    #[must_use]
    pub fn with_images(mut self, sink: Box<dyn ImageSink>) -> Self {
        self.written = self.written.with_images(sink);
        self
    }

    /// Reads the next bytes and appends canonical rows to `out`. After the first bad row nothing more is written, but the rest is
    /// still read to find every bad row.
    pub fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let Self { rows, written } = self;
        rows.push(bytes, &mut |place, row| written.add(place, row, out));
    }

    /// Ends the input of the reader.
    ///
    /// # Errors
    /// Returns everything that is wrong with the dataset.
    pub fn finish(mut self, out: &mut Vec<u8>) -> Result<Summary, Rejected> {
        let Self { rows, written } = &mut self;
        rows.finish(&mut |place, row| written.add(place, row, out));
        self.written.finish()
    }
}

/// Checks rows one after another, writes them in canonical form, and collects the summary.
#[derive(Debug, Default)]
pub struct Rows {
    num_rows: u64,
    columns: Vec<String>,
    errors: Vec<RowError>,
    num_errors: u64,
    images: Option<Box<dyn ImageSink>>,
}

impl Rows {
    /// Stores the images of rows with `sink`. Without it rows with images are refused.
    #[must_use]
    pub fn with_images(mut self, sink: Box<dyn ImageSink>) -> Self {
        self.images = Some(sink);
        self
    }

    /// Adds a row, or counts an error in its place. The row is appended to `out` unless an earlier row was bad.
    pub fn add(&mut self, place: RowPlace, row: Result<Value, RowError>, out: &mut Vec<u8>) {
        let checked = row.and_then(|mut value| match (self.check(&mut value), &value) {
            (Ok(()), _) => Ok(value),
            // Rows of a file can be mapped before they are checked, so the error suggests a mapping.
            (Err((code @ "missing_prompt", _)), Value::Object(row)) => {
                Err(RowError { place, code, detail: presets::advice(row) })
            }
            (Err((code, detail)), _) => Err(RowError { place, code, detail }),
        });
        match checked {
            Ok(value) => self.add_checked(place, &value, out),
            Err(RowError { place, code, detail }) => self.error(place, code, detail),
        }
    }

    /// Checks a row, and replaces its images by references.
    ///
    /// # Errors
    /// Fails with a stable code, and a text on how to fix the row.
    pub fn check(&mut self, value: &mut Value) -> Result<(), (&'static str, String)> {
        if let Value::Object(row) = value {
            // The prompt comes first, so that no image of a bad row is stored.
            check_prompt_of(row)?;
            images::resolve(row, self.images.as_deref_mut().map(|sink| sink as &mut dyn ImageSink))?;
        }
        object_of(value).map(drop)
    }

    /// Returns the number of good rows.
    pub fn num_rows(&self) -> u64 {
        self.num_rows
    }

    /// Returns the number of bad rows.
    pub fn num_errors(&self) -> u64 {
        self.num_errors
    }

    /// Adds a row that [`Rows::check`] has accepted.
    pub fn add_checked(&mut self, place: RowPlace, value: &Value, out: &mut Vec<u8>) {
        let Value::Object(row) = value else { return };
        for name in row.keys() {
            // Most rows have the same columns, so a linear search of the short column list is fast.
            if !self.columns.iter().any(|known| known == name) {
                if self.columns.len() == MAX_COLUMNS {
                    let detail =
                        format!("more than {MAX_COLUMNS} different columns; '{}' is one too many", brief(name));
                    return self.error(place, "too_many_columns", detail);
                }
                self.columns.push(name.clone());
            }
        }
        self.num_rows += 1;
        if self.num_errors == 0 {
            let begin = out.len();
            // Writing a `Value` to a `Vec` cannot fail.
            if serde_json::to_writer(&mut *out, value).is_err() || out.len() - begin > MAX_ROW_BYTES {
                out.truncate(begin);
                return self.error(place, "row_too_long", too_long());
            }
            out.push(b'\n');
        }
    }

    fn error(&mut self, place: RowPlace, code: &'static str, detail: String) {
        self.num_errors += 1;
        if self.errors.len() < MAX_ERRORS {
            self.errors.push(RowError { place, code, detail });
        }
    }

    /// Ends the rows and returns the summary.
    ///
    /// # Errors
    /// Returns everything that is wrong with the dataset.
    pub fn finish(mut self) -> Result<Summary, Rejected> {
        if self.num_rows == 0 && self.num_errors == 0 {
            self.error(
                RowPlace::File,
                "empty",
                "the dataset has no rows: at least one with a 'prompt' is needed".to_owned(),
            );
        }
        if self.num_errors > 0 {
            return Err(Rejected { errors: self.errors, num_errors: self.num_errors });
        }
        Ok(Summary { num_rows: self.num_rows, columns: self.columns })
    }
}

/// Checks one row that is sent with a job: an object, without image columns, with a usable prompt.
///
/// # Errors
/// Fails with a stable code, and a text on how to fix the row.
pub fn check_row(value: &Value) -> Result<(), (&'static str, String)> {
    let row = object_of(value)?;
    if let Some(name) = ["image", IMAGES].into_iter().find(|name| row.contains_key(*name)) {
        let detail = format!(
            "the column '{name}' contains images: upload such rows with POST /datasets, and give the job the dataset's id"
        );
        return Err(("images_unsupported", detail));
    }
    check_prompt_of(row)
}

fn object_of(value: &Value) -> Result<&Map<String, Value>, (&'static str, String)> {
    match value {
        Value::Object(row) => Ok(row),
        _ => Err(("not_an_object", format!("a row must be a JSON object, not {}", kind(value)))),
    }
}

fn check_prompt_of(row: &Map<String, Value>) -> Result<(), (&'static str, String)> {
    match row.get(PROMPT) {
        None => Err(("missing_prompt", missing_prompt(row.keys().map(String::as_str)))),
        Some(prompt) => check_prompt(prompt),
    }
}

/// Checks a prompt: a non-empty string, or a non-empty list of chat messages.
///
/// # Errors
/// Fails with a stable code, and a text on how to fix the prompt.
pub fn check_prompt(prompt: &Value) -> Result<(), (&'static str, String)> {
    match prompt {
        Value::String(text) if text.trim().is_empty() => Err(("empty_prompt", "the prompt is empty".to_owned())),
        Value::String(_) => Ok(()),
        Value::Array(messages) if messages.is_empty() => {
            Err(("empty_prompt", "the prompt is a list without messages".to_owned()))
        }
        Value::Array(messages) => {
            messages.iter().enumerate().try_for_each(|(index, message)| check_message(index, message))
        }
        other => {
            let detail = format!("the prompt is {}: it must be a string or a list of chat messages", kind(other));
            Err(("invalid_prompt", detail))
        }
    }
}

fn check_message(index: usize, message: &Value) -> Result<(), (&'static str, String)> {
    let wrong = |what: String| Err(("invalid_message", format!("message {index} of the prompt: {what}")));
    let Value::Object(message) = message else {
        return wrong(format!("the message is {}, but must be {{\"role\": …, \"content\": …}}", kind(message)));
    };
    match message.get("role") {
        Some(Value::String(role)) if !role.is_empty() => {}
        Some(_) | None => {
            return wrong("the message has no 'role': give one such as system, user or assistant".to_owned());
        }
    }
    match message.get("content") {
        Some(Value::String(_)) => Ok(()),
        Some(Value::Array(_)) => {
            wrong("its content is a list of parts: only a string is supported (text, no images)".to_owned())
        }
        Some(other) => wrong(format!("its 'content' is {}, but must be a string", kind(other))),
        None => wrong("has no 'content'".to_owned()),
    }
}

fn missing_prompt<'a>(columns: impl Iterator<Item = &'a str>) -> String {
    let columns: Vec<String> = columns.take(8).map(|name| format!("'{}'", brief(name))).collect();
    let found = if columns.is_empty() { "no columns".to_owned() } else { columns.join(", ") };
    format!("there is no 'prompt' column (found {found}): name the column that holds the prompts 'prompt'")
}

fn too_long() -> String {
    format!("a row may have at most {MAX_ROW_BYTES} bytes")
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn brief(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
