//! Converts source files to the rows of a dataset, or previews the first rows.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rlood_types::dataset::{
    Format, InvalidRecipe, MAX_ERRORS, MAX_ROW_BYTES, Recipe, RecipeMap, Rejected, RowError, RowPlace, Rows, Summary,
    presets,
};
use serde_json::Value;

use super::columns::{kind, unknown};
use super::images::Images;
use super::keys::Keys;
use super::mapping::{Mapped, Mapping};
use super::source::{Flow, NOT_FETCHED, Place, Source, Wanted, each_row, whole};

/// Bytes buffered before each write.
const WRITE_BYTES: usize = 256 << 10;
/// How long a preview may search for rows that pass the filter `where` of the conversion.
const PREVIEW_SEARCH_TIME: Duration = Duration::from_millis(200);

/// Limits and defaults of a conversion.
#[derive(Debug, Clone, Copy)]
pub struct Options<'o> {
    /// The format that the upload's media type names; file names and file content take precedence.
    pub format: Option<Format>,
    /// Whether a text prompt becomes a chat message if the settings (`map`) do not say: true if the model has a chat template,
    /// or is not known.
    pub chat_default: bool,
    /// Whether rows must have answers, as for a warm-up: a column `completion`, or a chat whose last message is the answer.
    pub answers: bool,
    /// The maximum total size in bytes of the dataset's rows.
    pub max_bytes: u64,
    /// Another thread sets this to true to cancel the conversion.
    pub cancelled: &'o AtomicBool,
    /// Stores the images of rows; `None` = rows with images are refused.
    pub images: Option<&'o Images>,
}

/// The result of writing a dataset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted {
    /// A summary of the dataset's rows.
    pub summary: Summary,
    /// Number of source rows that were read.
    pub rows_read: u64,
}

/// A preview of the first rows of the source files.
#[derive(Debug, Clone, PartialEq)]
pub struct Preview {
    /// The columns found in the source's first rows.
    pub columns: Vec<PreviewColumn>,
    /// The first rows as the source has them.
    pub source_rows: Vec<Value>,
    /// The first rows after mapping and filtering.
    pub rows: Vec<Value>,
    /// A suggested mapping of the columns: set if the mapped rows have no prompt, or if a reward would not find the answer.
    pub suggested_map: Option<Value>,
    /// The errors found in the first rows.
    pub rejected: Option<Rejected>,
}

/// A column of a source file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreviewColumn {
    /// The column's name as the source spells it.
    pub name: String,
    /// The type of the first value that is not null: `text`, `number`, `boolean`, `list`, `object` or `null`.
    pub kind: &'static str,
}

/// Converts and writes the rows of all source files, in order: ndjson, one compact object per line.
///
/// # Errors
/// Reports everything that is wrong with the recipe, the files and the rows (the first [`MAX_ERRORS`]), a dataset that
/// is too large, and cancellation.
pub fn convert(
    sources: &[Source],
    recipe: &Recipe,
    options: &Options<'_>,
    out: &mut dyn Write,
) -> Result<Converted, Rejected> {
    let mapping = compile(recipe, options)?;
    let mut sample = match recipe.seed.zip(recipe.limit) {
        Some((seed, limit)) => {
            let mut count = 0;
            let mut counting = Pass::new(mapping.as_ref(), options);
            counting.run(sources, &mut |_| {
                count += 1;
                Ok(Flow::More)
            })?;
            Sample::Drawn { seed, left: limit.min(count), of: count, at: 0 }
        }
        None => Sample::First(recipe.limit.unwrap_or(u64::MAX)),
    };
    let mut pass = Pass::new(mapping.as_ref(), options);
    let mut writer =
        Writer { out, rows: rows_of(options), buffer: Vec::new(), written: 0, max_bytes: options.max_bytes };
    pass.run(sources, &mut |row| match sample.next() {
        Choice::Take => writer.take(row),
        Choice::Leave => Ok(Flow::More),
        Choice::End => Ok(Flow::Enough),
    })?;
    let rows_read = pass.rows_read;
    let summary = writer.finish()?;
    Ok(Converted { summary, rows_read })
}

/// Returns the writer of rows, which stores the images if the options say where.
fn rows_of(options: &Options<'_>) -> Rows {
    match options.images {
        Some(images) => Rows::default().with_images(Box::new(images.clone())),
        None => Rows::default(),
    }
}

/// Previews the first rows of the source files: as they are, and after mapping. Writes nothing and reads only as much as it needs.
///
/// # Errors
/// Fails if the recipe or a file cannot be used at all. Errors in rows are part of the result.
pub fn preview(sources: &[Source], recipe: &Recipe, options: &Options<'_>, rows: usize) -> Result<Preview, Rejected> {
    let begun = Instant::now();
    let is_late = || begun.elapsed() > PREVIEW_SEARCH_TIME + waited(sources);
    let (mut columns, mut source_rows): (Vec<PreviewColumn>, Vec<Value>) = (Vec::new(), Vec::new());
    for source in sources {
        let mut error = None;
        let images = recipe.map.as_ref().and_then(|map| map.drop.clone()).unwrap_or_default();
        each_row(source, options.format, &Wanted { images, ..Wanted::default() }, &is_late, &mut |place, row| {
            match row {
                Ok(row) => {
                    note_columns(&mut columns, &row);
                    source_rows.push(row);
                }
                Err(found) => error = Some(with_position(source, place, found)),
            }
            let enough = source_rows.len() >= rows || error.is_some() || is_late();
            if enough { Flow::Enough } else { Flow::More }
        })
        .or_else(|found| {
            if is_enough(&found, &source_rows) { Ok(()) } else { Err(rejected(in_file(source, found))) }
        })?;
        if let Some(error) = error {
            return Err(rejected(error));
        }
        if source_rows.len() >= rows {
            break;
        }
    }
    if source_rows.is_empty() && !is_late() {
        let detail = match sources.iter().any(Source::is_cut) {
            true => "the first row does not end within the part of the file that a preview reads",
            false => "there are no rows: at least one is required",
        };
        return Err(rejected(whole("empty", detail.to_owned())));
    }
    let first = source_rows.first().and_then(Value::as_object);
    let has_prompt = first.is_some_and(|row| row.contains_key("prompt"));
    let names_prompt = recipe.map.as_ref().is_some_and(|map| map.prompt.is_some());
    let suggested_map = match has_prompt {
        true => first.filter(|_| recipe.map.is_none()).and_then(presets::ground_truth_map),
        false => first.filter(|_| !names_prompt).and_then(presets::known_layout_map),
    };
    let mapping = compile(recipe, options)?;
    let mut pass = Pass::new(mapping.as_ref(), options);
    pass.is_late = &is_late;
    let mut checked = rows_of(options);
    let (mut mapped, limit) = (Vec::new(), rows.min(usize::try_from(recipe.limit.unwrap_or(u64::MAX)).unwrap_or(rows)));
    let ended = pass.run(sources, &mut |mut row| {
        checked.check(&mut row).map_err(|(code, detail)| whole(code, detail))?;
        mapped.push(row);
        Ok(if mapped.len() >= limit { Flow::Enough } else { Flow::More })
    });
    let ended = ended.err().filter(|ended| !ended.errors.iter().all(|error| is_enough(error, &source_rows)));
    Ok(Preview { columns, source_rows, rows: mapped, suggested_map, rejected: ended })
}

/// Whether an error only says that no more of a remote file is fetched, although the preview already has rows to show.
fn is_enough(error: &RowError, rows: &[Value]) -> bool {
    error.code == NOT_FETCHED && !rows.is_empty()
}

/// How long the preview waited for remote files. That time does not count against the preview's time limit.
fn waited(sources: &[Source]) -> Duration {
    sources.iter().map(Source::waited).sum()
}

fn note_columns(columns: &mut Vec<PreviewColumn>, row: &Value) {
    let Value::Object(row) = row else { return };
    for (name, value) in row {
        match columns.iter_mut().find(|column| column.name == *name) {
            Some(column) if column.kind == "null" => column.kind = kind(value),
            Some(_) => {}
            None => columns.push(PreviewColumn { name: name.clone(), kind: kind(value) }),
        }
    }
}

fn compile(recipe: &Recipe, options: &Options<'_>) -> Result<Option<Mapping>, Rejected> {
    let refuse = |error: InvalidRecipe| rejected(whole("invalid_map", error.to_string()));
    recipe.check().map_err(refuse)?;
    let (map, plain) = (recipe.map.as_ref(), RecipeMap::default());
    if options.answers {
        let mapping = Mapping::new(map.unwrap_or(&plain), options.chat_default).map_err(refuse)?;
        return Ok(Some(mapping.with_chat_prompts()));
    }
    map.map(|map| Mapping::new(map, options.chat_default)).transpose().map_err(refuse)
}

fn rejected(error: RowError) -> Rejected {
    Rejected { errors: vec![error], num_errors: 1 }
}

/// Prefixes the error about a row with the row's position: `row 17 (data/train.parquet, row group 0): …`.
fn with_position(source: &Source, place: Place, error: RowError) -> RowError {
    let group = place.row_group.map_or_else(String::new, |group| format!(", row group {group}"));
    let detail = format!("row {} ({}{group}): {}", place.row, source.name, error.detail);
    whole(error.code, detail)
}

fn in_file(source: &Source, error: RowError) -> RowError {
    RowError { detail: format!("{}: {}", source.name, error.detail), ..error }
}

/// One pass over the source files, which maps and filters their rows.
struct Pass<'p> {
    mapping: Option<&'p Mapping>,
    options: &'p Options<'p>,
    keys: Keys,
    seen: BTreeSet<String>,
    errors: Vec<RowError>,
    num_errors: u64,
    rows_read: u64,
    /// Whether a preview has used up its time.
    is_late: &'p dyn Fn() -> bool,
}

impl<'p> Pass<'p> {
    fn new(mapping: Option<&'p Mapping>, options: &'p Options<'p>) -> Self {
        let (keys, seen, errors) = (Keys::new(), BTreeSet::new(), Vec::new());
        Self { mapping, options, keys, seen, errors, num_errors: 0, rows_read: 0, is_late: &|| false }
    }

    fn run(
        &mut self,
        sources: &[Source],
        take: &mut dyn FnMut(Value) -> Result<Flow, RowError>,
    ) -> Result<(), Rejected> {
        let wanted = self.mapping.map_or_else(Wanted::default, |mapping| Wanted {
            only: mapping.needed(),
            without: mapping.unread().to_vec(),
            images: mapping.dropped().to_vec(),
        });
        // A parquet file's rows contain only the requested columns. The columns that were left out exist too, so
        // they count as seen.
        if sources.iter().any(|source| source.name.ends_with(".parquet")) {
            self.seen.extend(wanted.without.iter().chain(&wanted.images).cloned());
        }
        let mut flow = Flow::More;
        for source in sources {
            if flow == Flow::Enough {
                break;
            }
            let (cancelled, is_late) = (self.options.cancelled, self.is_late);
            let stop = || cancelled.load(Ordering::Relaxed) || is_late();
            each_row(source, self.options.format, &wanted, &stop, &mut |place, row| {
                flow = self.one(source, place, row, take);
                flow
            })
            .map_err(|error| rejected(in_file(source, error)))?;
        }
        if self.options.cancelled.load(Ordering::Relaxed) && self.num_errors == 0 {
            self.error(whole("cancelled", "the conversion of the dataset was cancelled".to_owned()));
        }
        if self.num_errors == 0 && self.rows_read > 0 {
            self.check_names();
        }
        match self.num_errors {
            0 => Ok(()),
            num_errors => Err(Rejected { errors: std::mem::take(&mut self.errors), num_errors }),
        }
    }

    fn one(
        &mut self,
        source: &Source,
        place: Place,
        row: Result<Value, RowError>,
        take: &mut dyn FnMut(Value) -> Result<Flow, RowError>,
    ) -> Flow {
        if self.options.cancelled.load(Ordering::Relaxed) {
            self.error(whole("cancelled", "the conversion of the dataset was cancelled".to_owned()));
            return Flow::Enough;
        }
        if (self.is_late)() {
            return Flow::Enough;
        }
        self.rows_read += 1;
        match row.and_then(|row| self.map(row)) {
            Ok(None) => Flow::More,
            Ok(Some(row)) => match take(row) {
                Ok(flow) => flow,
                // These two errors stop the conversion, because no later row can be stored either.
                Err(error) if error.code == "too_large" || error.code == "unwritable" => {
                    self.error(error);
                    Flow::Enough
                }
                Err(error) => self.record_error(with_position(source, place, error)),
            },
            Err(error) => self.record_error(with_position(source, place, error)),
        }
    }

    /// Maps a source row to a dataset row. Returns None if the filter `where` drops the row.
    fn map(&mut self, row: Value) -> Result<Option<Value>, RowError> {
        let Some(mapping) = self.mapping else {
            if let Some(fields) = row.as_object().filter(|row| !row.contains_key("prompt")) {
                return Err(whole("missing_prompt", presets::advice(fields)));
            }
            return Ok(Some(row));
        };
        if let Value::Object(fields) = &row {
            for name in fields.keys() {
                if !self.seen.contains(name) && self.seen.len() < rlood_types::dataset::MAX_COLUMNS {
                    self.seen.insert(name.clone());
                }
            }
        }
        match mapping.apply(row)? {
            Mapped::Left => Ok(None),
            Mapped::Row(row, None) => Ok(Some(row)),
            Mapped::Row(row, Some(key)) => Ok(self.keys.insert(&key).then_some(row)),
        }
    }

    /// Reports an error for each column name in the settings that no row had.
    fn check_names(&mut self) {
        let Some(mapping) = self.mapping else { return };
        for (at, name) in mapping.referenced_columns() {
            if name != "prompt" && !self.seen.contains(&name) {
                let detail = format!("{at}: {}", unknown(&name, self.seen.iter().map(String::as_str)));
                self.error(whole("unknown_column", detail));
            }
        }
    }

    /// Records the error about a row. Stops reading after many errors if not a single row could be used.
    fn record_error(&mut self, error: RowError) -> Flow {
        let hopeless = self.num_errors + 1 == self.rows_read && self.num_errors >= MAX_ERRORS as u64;
        self.error(error);
        if !hopeless {
            return Flow::More;
        }
        let detail =
            format!("none of the first {} rows of the file can be used: the rest was not read", self.rows_read);
        self.errors.push(whole("not_read_further", detail));
        Flow::Enough
    }

    fn error(&mut self, error: RowError) {
        self.num_errors += 1;
        if self.errors.len() < MAX_ERRORS {
            self.errors.push(error);
        }
    }
}

/// Chooses which of the mapped rows are written, if the settings limit their number.
enum Sample {
    /// Writes this many rows from the beginning.
    First(u64),
    /// Writes a random sample: `left` of the remaining `of - at` rows, each subset equally likely (Knuth, The Art of Computer
    /// Programming 2, 3.4.2, algorithm S).
    Drawn { seed: u64, left: u64, of: u64, at: u64 },
}

enum Choice {
    Take,
    Leave,
    End,
}

impl Sample {
    fn next(&mut self) -> Choice {
        match self {
            Sample::First(0) => Choice::End,
            Sample::First(left) => {
                *left -= 1;
                Choice::Take
            }
            Sample::Drawn { left: 0, .. } => Choice::End,
            Sample::Drawn { seed, left, of, at } => {
                let to_come = of.saturating_sub(*at).max(1);
                let draw = below(splitmix64(seed.wrapping_add(splitmix64(*at))), to_come);
                *at += 1;
                if draw < *left {
                    *left -= 1;
                    Choice::Take
                } else {
                    Choice::Leave
                }
            }
        }
    }
}

/// Maps 64 random bits to a number below `end`.
fn below(bits: u64, end: u64) -> u64 {
    ((u128::from(bits) * u128::from(end)) >> 64) as u64
}

/// The mixing function of SplitMix64 (Steele, Lea, Flood 2014).
fn splitmix64(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Writes dataset rows in their canonical form (compact JSON, one row per line).
struct Writer<'w> {
    out: &'w mut dyn Write,
    rows: Rows,
    buffer: Vec<u8>,
    written: u64,
    max_bytes: u64,
}

impl Writer<'_> {
    fn take(&mut self, mut row: Value) -> Result<Flow, RowError> {
        self.rows.check(&mut row).map_err(|(code, detail)| whole(code, detail))?;
        let before = self.buffer.len();
        let errors = self.rows.num_errors();
        self.rows.add_checked(RowPlace::File, &row, &mut self.buffer);
        if self.rows.num_errors() > errors {
            let bytes = row.to_string().len();
            let detail = if bytes > MAX_ROW_BYTES {
                too_long(&row, bytes)
            } else {
                "the dataset's rows have too many different columns".to_owned()
            };
            return Err(whole("row_too_long", detail));
        }
        self.written += (self.buffer.len() - before) as u64;
        if self.written > self.max_bytes {
            let detail =
                format!("the mapped rows have more than {} bytes: set limit, or keep fewer columns", self.max_bytes);
            return Err(whole("too_large", detail));
        }
        if self.buffer.len() >= WRITE_BYTES {
            self.flush()?;
        }
        Ok(Flow::More)
    }

    fn flush(&mut self) -> Result<(), RowError> {
        let done = self.out.write_all(&self.buffer);
        self.buffer.clear();
        done.map_err(|error| whole("unwritable", format!("the rows cannot be written: {error}")))
    }

    fn finish(mut self) -> Result<Summary, Rejected> {
        self.flush().map_err(rejected)?;
        self.rows.finish()
    }
}

/// Returns the name and the size in bytes of a row's largest column, for an error message.
fn largest(row: &Value) -> Option<(String, usize)> {
    let row = row.as_object()?;
    row.iter().map(|(name, value)| (name.clone(), value.to_string().len())).max_by_key(|(_, bytes)| *bytes)
}

/// Formats the error for a row that is too long.
fn too_long(row: &Value, bytes: usize) -> String {
    let largest = largest(row).map_or_else(String::new, |(name, bytes)| {
        format!(
            ": the column '{}' alone has {bytes}; drop it with map.drop, or shorten it",
            super::columns::shorten(&name)
        )
    });
    format!("the row has {bytes} bytes, the maximum is {MAX_ROW_BYTES}{largest}")
}
