//! Reads the rows of a parquet file with the record reader of the crate `parquet`. The crate may panic on a damaged file, so each
//! step catches panics. Our own modules read the pages and keep the memory below 256 MiB whatever the file claims.

mod budget;
mod deltas;
mod header;
mod input;
mod levels;
mod pages;
mod unpack;

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::{
    ParquetMetaData, ParquetMetaDataOptions, ParquetMetaDataReader, ParquetStatisticsPolicy, RowGroupMetaData,
};
use parquet::record::reader::TreeBuilder;
use parquet::record::{Field, Row};
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, Type, TypePtr};
use rlood_types::dataset::RowError;
use serde_json::Value;

use super::ranges::Remote;
use super::{Flow, MAX_SOURCE_ROW_BYTES, NOT_FETCHED, Place, TakeRow, Wanted, whole};
use budget::{Budget, TooLarge};
use input::Input;
use pages::{Group, Shared};
use unpack::Unpacker;

/// Maximum size in bytes after unpacking that a row group's metadata may claim.
const MAX_GROUP_BYTES: i64 = 64 << 30;
/// Maximum size in bytes of a parquet file's footer (its metadata); decoded, the footer takes a few times as much memory.
const MAX_FOOTER_BYTES: u64 = 16 << 20;
/// Target size in bytes of the values that one column reads ahead.
const BATCH_BYTES: i64 = 8 << 20;
/// Maximum number of values that all columns together read ahead.
const BATCH_VALUES: usize = 128 << 10;
/// Maximum number of rows read ahead: the batch size of the crate `parquet`.
const MAX_BATCH: usize = 1024;
/// Maximum nesting depth of columns.
const MAX_DEPTH: usize = 100;
/// Stack size for parsing a parquet file's footer; only pages that are touched use memory.
const STACK_BYTES: usize = 1 << 30;
/// A row group that unpacks to more than this and to more than [`BOMB_RATIO`] times its packed size is treated
/// as a decompression bomb.
const BOMB_BYTES: i64 = 256 << 20;
const BOMB_RATIO: i64 = 500;
/// Bytes of a remote parquet file that are fetched in advance: its end, and the start of each column.
const TAIL_BYTES: u64 = 256 << 10;
const STARTS_BYTES: u64 = 4 << 20;
const MIN_START_BYTES: u64 = 32 << 10;
/// The index column that pandas adds to a parquet file.
const INDEX: &str = "__index_level_0__";

/// Reads the rows of a local parquet file. See [`super::each_row`].
pub fn each_row(file: File, wanted: &Wanted, take: &mut TakeRow<'_>) -> Result<(), RowError> {
    rows_of(Arc::new(Input::File(file)), wanted, take)
}

/// Reads the rows of a remote parquet file.
pub fn each_remote_row(remote: Arc<Remote>, wanted: &Wanted, take: &mut TakeRow<'_>) -> Result<(), RowError> {
    let input = Arc::new(Input::Remote(remote));
    rows_of(input.clone(), wanted, take).map_err(|error| match input.take_failure() {
        Some(failure) => whole(NOT_FETCHED, failure),
        None => error,
    })
}

fn rows_of(input: Arc<Input>, wanted: &Wanted, take: &mut TakeRow<'_>) -> Result<(), RowError> {
    let metadata = open(&input)?;
    let schema = metadata.file_metadata().schema_descr().root_schema_ptr();
    let columns = Arc::new(SchemaDescriptor::new(Arc::new(projection(&schema, wanted)?)));
    let mut row = 0;
    for group in 0..metadata.num_row_groups() {
        let mut batch = check_group(metadata.row_group(group), group, columns.num_columns())?;
        expect_columns(&input, metadata.row_group(group), &columns)
            .map_err(|error| whole("unreadable", error.to_string()))?;
        let first = row;
        loop {
            let reading = Reading { input: &input, metadata: &metadata, columns: &columns, group, batch };
            match reading.rows(first, &mut row, take) {
                Ok(Flow::More) => break,
                Ok(Flow::Enough) => return Ok(()),
                // The memory limit was reached because some rows are much longer than most. Reading continues after the last row,
                // with fewer rows read ahead.
                Err(Stopped::TooLarge(TooLarge::Together { .. })) if batch > 1 => batch = (batch / 16).max(1),
                Err(Stopped::TooLarge(error)) => return Err(whole("parquet", format!("row group {group}: {error}"))),
                Err(Stopped::Damaged(what)) => return Err(whole("parquet", format!("row group {group}: {what}"))),
            }
        }
    }
    Ok(())
}

/// The reason why reading a row group stopped.
enum Stopped {
    TooLarge(TooLarge),
    Damaged(String),
}

/// The state of reading one row group.
struct Reading<'r> {
    input: &'r Arc<Input>,
    metadata: &'r ParquetMetaData,
    columns: &'r SchemaDescPtr,
    group: usize,
    /// Number of rows that each column of the row group reads ahead.
    batch: usize,
}

impl Reading<'_> {
    /// Passes the rows of a row group to `take`. The row group starts after row `first` of the file; rows up to `row` were passed
    /// earlier and are skipped.
    fn rows(&self, first: u64, row: &mut u64, take: &mut TakeRow<'_>) -> Result<Flow, Stopped> {
        let group = self.metadata.row_group(self.group);
        let unpacker =
            Unpacker::new().map_err(|error| Stopped::Damaged(format!("the data cannot be unpacked: {error}")))?;
        let (budget, unpacker) =
            (Budget::new(group.num_columns(), self.metadata.memory_size() as u64), Mutex::new(unpacker));
        let shared = Arc::new(Shared { input: self.input.clone(), budget, unpacker, batch: self.batch as u64 });
        let pages = Group { metadata: self.metadata, at: self.group, shared: shared.clone() };
        let rows = catch_panic(|| TreeBuilder::new().with_batch_size(self.batch).as_iter(self.columns.clone(), &pages));
        let mut rows = rows.ok_or_else(damaged)?.map_err(|error| stopped(&error, String::new))?;
        let given = *row - first;
        for at in 0.. {
            // The record reader of the crate is already one row ahead, so a batch is read one row earlier than expected.
            let is_last_of_batch = (at + 1) % self.batch as u64 == 0;
            if is_last_of_batch {
                shared.budget.begin_batch();
            }
            let next = catch_panic(|| rows.next().map(|read| read.map(|read| (at >= given).then(|| value(read)))));
            if is_last_of_batch {
                shared.budget.end_batch();
            }
            let found = match next {
                Some(None) => break,
                Some(Some(Ok(found))) => found,
                Some(Some(Err(error))) => return Err(stopped(&error, || format!(" after row {row}"))),
                None => return Err(Stopped::Damaged(format!("the data is damaged (after row {row} of the file)"))),
            };
            let Some(found) = found else { continue };
            *row += 1;
            if take(Place { row: *row, row_group: Some(self.group) }, Ok(found)) == Flow::Enough {
                return Ok(Flow::Enough);
            }
        }
        Ok(Flow::More)
    }
}

/// Runs a function of the crate `parquet` and returns None if it panicked.
fn catch_panic<T>(step: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(step)).ok()
}

fn damaged() -> Stopped {
    Stopped::Damaged("the data is damaged".to_owned())
}

fn stopped(error: &ParquetError, at: impl FnOnce() -> String) -> Stopped {
    match TooLarge::of(error) {
        Some(error) => Stopped::TooLarge(error.clone()),
        None => Stopped::Damaged(format!("the data cannot be read{}: {}", at(), brief(&error.to_string()))),
    }
}

/// Converts a parquet row to JSON; texts are moved, not copied.
fn value(row: Row) -> Value {
    let field = |(name, field): (String, Field)| {
        let value = match field {
            Field::Str(text) => Value::String(text),
            Field::Group(row) => value(row),
            other => other.to_json_value(),
        };
        (name, value)
    };
    Value::Object(row.into_columns().into_iter().filter(|(name, _)| name != INDEX).map(field).collect())
}

/// Reads a parquet file's footer on a large stack, because the crate `parquet` recurses into nested columns without a depth limit.
fn open(input: &Arc<Input>) -> Result<ParquetMetaData, RowError> {
    let footer = footer(input)?;
    let read = move || {
        let options = ParquetMetaDataOptions::new()
            .with_column_stats_policy(ParquetStatisticsPolicy::SkipAll)
            .with_encoding_stats_policy(ParquetStatisticsPolicy::SkipAll)
            .with_size_stats_policy(ParquetStatisticsPolicy::SkipAll);
        let metadata =
            ParquetMetaDataReader::decode_metadata_with_options(&footer, Some(&options)).map_err(|error| {
                whole("parquet", format!("the parquet file's footer cannot be read: {}", brief(&error.to_string())))
            })?;
        match is_deeper(metadata.file_metadata().schema_descr().root_schema(), MAX_DEPTH) {
            true => Err(whole(
                "parquet",
                format!("the parquet file's columns are nested more than {MAX_DEPTH} levels deep"),
            )),
            false => Ok(metadata),
        }
    };
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(read);
    let joined = thread.map(std::thread::JoinHandle::join).map_err(|error| whole("unreadable", error.to_string()))?;
    joined.unwrap_or_else(|_| Err(whole("parquet", "the parquet file's footer is damaged".to_owned())))
}

/// Reads the bytes of a parquet file's footer. The footer's length and the mark PAR1 follow it at the end of the file.
fn footer(input: &Input) -> Result<bytes::Bytes, RowError> {
    let unreadable = |error: std::io::Error| whole("unreadable", format!("the file cannot be read: {error}"));
    let cut_off = || whole("parquet", "the parquet file is cut off: upload it again, whole".to_owned());
    let size = input.size().map_err(unreadable)?;
    let end = size.checked_sub(8).filter(|end| *end >= 4).ok_or_else(cut_off)?;
    let tail = size.saturating_sub(TAIL_BYTES)..size;
    input.expect(std::slice::from_ref(&tail)).map_err(unreadable)?;
    let last = input.bytes(end, 8).map_err(unreadable)?;
    let (length, magic) = last.split_first_chunk::<4>().ok_or_else(cut_off)?;
    match magic {
        b"PAR1" => {}
        b"PARE" => {
            return Err(whole("parquet", "the parquet file is encrypted: write it without encryption".to_owned()));
        }
        _ => return Err(cut_off()),
    }
    let length = u64::from(u32::from_le_bytes(*length));
    let start = end.checked_sub(length).filter(|start| *start >= 4).ok_or_else(cut_off)?;
    if length > MAX_FOOTER_BYTES {
        let detail = format!(
            "the parquet file's footer has {length} bytes, at most 16 MiB are read: write the file in fewer row groups, or fewer columns"
        );
        return Err(whole("parquet", detail));
    }
    input.bytes(start, length).map_err(unreadable)
}

/// Fetches the start of all needed columns of a remote file in one call, before they are read one by one.
fn expect_columns(input: &Input, group: &RowGroupMetaData, columns: &SchemaDescPtr) -> std::io::Result<()> {
    if !matches!(input, Input::Remote(_)) {
        return Ok(());
    }
    let each = (STARTS_BYTES / (columns.num_columns().max(1) as u64)).max(MIN_START_BYTES);
    let is_read =
        |path: &parquet::schema::types::ColumnPath| columns.columns().iter().any(|column| column.path() == path);
    let starts = group.columns().iter().filter(|column| is_read(column.column_path())).filter_map(|column| {
        let (start, length) = catch_panic(|| column.byte_range())?;
        Some(start..start.saturating_add(length.min(each)))
    });
    input.expect(&starts.collect::<Vec<_>>())
}

fn is_deeper(field: &Type, levels: usize) -> bool {
    match levels.checked_sub(1) {
        None => true,
        Some(_) if !field.is_group() => false,
        Some(left) => field.get_fields().iter().any(|field| is_deeper(field, left)),
    }
}

/// Selects the columns to read; rejects columns that hold images.
fn projection(schema: &TypePtr, wanted: &Wanted) -> Result<Type, RowError> {
    // If a wanted name matches no column, all columns are read, so that the error can list them.
    let known = |name: &String| name == "prompt" || schema.get_fields().iter().any(|field| field.name() == name);
    let all = Wanted { only: None, ..wanted.clone() };
    let misses = |only: &Vec<String>| !only.iter().all(|name| known(name) || name.contains('.'));
    let wanted = if wanted.only.as_ref().is_some_and(misses) { &all } else { wanted };
    let reads = |field: &&TypePtr| wanted.reads(field.name(), is_image(field));
    let fields: Vec<TypePtr> = schema.get_fields().iter().filter(reads).cloned().collect();
    if let Some(image) = fields.iter().find(|field| is_image(field)) {
        let detail =
            format!("the column '{}' holds images: only text can be trained on; drop it with map.drop", image.name());
        return Err(whole("images_unsupported", detail));
    }
    let group = Type::group_type_builder(schema.name()).with_fields(fields).build();
    group.map_err(|error| whole("parquet", brief(&error.to_string())))
}

/// Returns whether a column contains images as the library `datasets` writes them: struct<bytes, path>.
fn is_image(field: &Type) -> bool {
    if !field.is_group() {
        return false;
    }
    let mut names: Vec<&str> = field.get_fields().iter().map(|field| field.name()).collect();
    names.sort_unstable();
    names == ["bytes", "path"]
}

/// Checks the sizes in a row group's metadata before any of its data is read. Returns the number of rows to read ahead.
fn check_group(metadata: &RowGroupMetaData, group: usize, columns: usize) -> Result<usize, RowError> {
    let bytes = metadata.total_byte_size();
    if !(0..=MAX_GROUP_BYTES).contains(&bytes) || metadata.num_rows() < 0 {
        return Err(whole("parquet", format!("row group {group} claims {bytes} bytes: the file is damaged")));
    }
    if metadata.columns().iter().any(|column| matches!(column.compression(), Compression::BROTLI(_) | Compression::LZO))
    {
        let detail = "the file is compressed with brotli or lzo, which are not supported: write it with snappy, zstd, gzip or lz4";
        return Err(whole("parquet", detail.to_owned()));
    }
    let packed = metadata.compressed_size().max(1);
    if bytes > BOMB_BYTES && bytes / packed > BOMB_RATIO {
        return Err(whole(
            "parquet",
            format!("row group {group} unpacks to {bytes} bytes from {packed}: write the file in smaller row groups"),
        ));
    }
    let per_row = bytes.checked_div(metadata.num_rows().max(1)).unwrap_or(0);
    if per_row > MAX_SOURCE_ROW_BYTES as i64 {
        return Err(whole(
            "row_too_long",
            format!("row group {group} has {per_row} bytes a row, but a row may have at most 64 MiB"),
        ));
    }
    let rows = usize::try_from(BATCH_BYTES / per_row.max(1)).unwrap_or(1);
    Ok(rows.min(BATCH_VALUES / columns.max(1)).clamp(1, MAX_BATCH))
}

fn brief(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}
