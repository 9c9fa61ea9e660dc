//! Rows of a parquet file, by the crate's row interface. Its reader may panic on a damaged file, so each step is caught.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::TreeBuilder;
use parquet::schema::types::{SchemaDescriptor, Type, TypePtr};
use rlood_types::dataset::RowError;
use serde_json::Value;

use super::{Flow, MAX_SOURCE_ROW_BYTES, Place, TakeRow, Wanted, whole};

/// What a file may say that its row group has, unpacked.
const MAX_GROUP_BYTES: i64 = 64 << 30;
/// Of a column, read ahead.
const BATCH_BYTES: i64 = 8 << 20;
/// The crate's own.
const MAX_BATCH: usize = 1024;
/// Of nested columns.
const MAX_DEPTH: usize = 100;
/// For the footer; taken as it is used.
const STACK_BYTES: usize = 1 << 30;
/// A group that unpacks to more than this, and to so many times its packed bytes, is a bomb.
const BOMB_BYTES: i64 = 256 << 20;
const BOMB_RATIO: i64 = 500;
/// pandas' own index.
const INDEX: &str = "__index_level_0__";

/// See [`super::each_row`].
pub fn each_row(mut file: File, wanted: &Wanted, take: &mut TakeRow<'_>) -> Result<(), RowError> {
    let length = file.seek(SeekFrom::End(0)).map_err(|error| whole("unreadable", error.to_string()))?;
    let mut end = [0; 4];
    let tail = length.checked_sub(4).filter(|start| *start >= 4);
    let is_whole = tail.is_some_and(|start| {
        file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut end)).is_ok() && &end == b"PAR1"
    });
    if !is_whole {
        return Err(whole("parquet", "the parquet file is cut off: upload it again, whole".to_owned()));
    }
    let reader = open(file)?;
    let schema = reader.metadata().file_metadata().schema_descr().root_schema_ptr();
    let projection = Arc::new(SchemaDescriptor::new(Arc::new(projection(&schema, wanted)?)));
    let mut row = 0;
    for group in 0..reader.metadata().num_row_groups() {
        let batch = check_group(&reader, group)?;
        let at_group = |what: String| whole("parquet", format!("row group {group} {what}"));
        let opened = catch_unwind(AssertUnwindSafe(|| reader.get_row_group(group)));
        let unreadable = |error: ParquetError| at_group(format!("cannot be read: {}", brief(&error.to_string())));
        let group_reader = opened.map_err(|_| at_group("is damaged".to_owned()))?.map_err(unreadable)?;
        let rows = catch_unwind(AssertUnwindSafe(|| {
            TreeBuilder::new().with_batch_size(batch).as_iter(projection.clone(), &*group_reader)
        }));
        let mut rows = rows.map_err(|_| at_group("is damaged".to_owned()))?.map_err(unreadable)?;
        loop {
            let next = catch_unwind(AssertUnwindSafe(|| rows.next().map(|row| row.map(|row| row.to_json_value()))));
            let value = match next {
                Ok(None) => break,
                Ok(Some(Ok(value))) => value,
                Ok(Some(Err(error))) => {
                    return Err(at_group(format!("cannot be read after row {row}: {}", brief(&error.to_string()))));
                }
                Err(_) => return Err(at_group(format!("is damaged (after row {row} of the file)"))),
            };
            row += 1;
            if take(Place { row, row_group: Some(group) }, Ok(without_index(value))) == Flow::Enough {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Reads the footer, on a large stack: the crate follows nested columns as deep as they go.
fn open(file: File) -> Result<SerializedFileReader<File>, RowError> {
    let read = || {
        let reader = SerializedFileReader::new(file).map_err(|error| {
            whole("parquet", format!("the parquet file's footer cannot be read: {}", brief(&error.to_string())))
        })?;
        match is_deeper(reader.metadata().file_metadata().schema_descr().root_schema(), MAX_DEPTH) {
            true => Err(whole("parquet", format!("its columns are nested more than {MAX_DEPTH} levels deep"))),
            false => Ok(reader),
        }
    };
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(read);
    let joined = thread.map(std::thread::JoinHandle::join).map_err(|error| whole("unreadable", error.to_string()))?;
    joined.unwrap_or_else(|_| Err(whole("parquet", "the parquet file's footer is damaged".to_owned())))
}

fn is_deeper(field: &Type, levels: usize) -> bool {
    match levels.checked_sub(1) {
        None => true,
        Some(_) if !field.is_group() => false,
        Some(left) => field.get_fields().iter().any(|field| is_deeper(field, left)),
    }
}

fn without_index(mut value: Value) -> Value {
    if let Value::Object(row) = &mut value {
        row.shift_remove(INDEX);
    }
    value
}

/// The columns that are needed, those of images refused.
fn projection(schema: &TypePtr, wanted: &Wanted) -> Result<Type, RowError> {
    // With a name that no column has, all are read: the error then lists them.
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

/// As `datasets` writes them: struct<bytes, path>.
fn is_image(field: &Type) -> bool {
    if !field.is_group() {
        return false;
    }
    let mut names: Vec<&str> = field.get_fields().iter().map(|field| field.name()).collect();
    names.sort_unstable();
    names == ["bytes", "path"]
}

/// What a group's metadata claims, before anything of it is read; how many rows of it may be held at once.
fn check_group(reader: &SerializedFileReader<File>, group: usize) -> Result<usize, RowError> {
    let metadata = reader.metadata().row_group(group);
    let bytes = metadata.total_byte_size();
    if !(0..=MAX_GROUP_BYTES).contains(&bytes) || metadata.num_rows() < 0 {
        return Err(whole("parquet", format!("row group {group} claims {bytes} bytes: the file is damaged")));
    }
    if metadata.columns().iter().any(|column| matches!(column.compression(), Compression::BROTLI(_) | Compression::LZO))
    {
        let detail =
            "the file is compressed with brotli or lzo, which are not read: write it with snappy, zstd, gzip or lz4";
        return Err(whole("parquet", detail.to_owned()));
    }
    let packed = metadata.compressed_size().max(1);
    if bytes > BOMB_BYTES && bytes / packed > BOMB_RATIO {
        return Err(whole(
            "parquet",
            format!("row group {group} unpacks to {bytes} bytes from {packed}: write it in smaller row groups"),
        ));
    }
    let per_row = bytes.checked_div(metadata.num_rows().max(1)).unwrap_or(0);
    if per_row > MAX_SOURCE_ROW_BYTES as i64 {
        return Err(whole(
            "row_too_long",
            format!("row group {group} has {per_row} bytes a row: at most 64 MiB are read"),
        ));
    }
    Ok(usize::try_from(BATCH_BYTES / per_row.max(1)).unwrap_or(1).clamp(1, MAX_BATCH))
}

fn brief(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}
