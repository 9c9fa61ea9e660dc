//! Source files: detects their format and reads their rows one after another.

#[cfg(feature = "parquet")]
mod parquet_rows;
mod ranges;

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use flate2::bufread::MultiGzDecoder;
use rlood_types::dataset::{Format, RowError, RowPlace, RowReader};
use serde_json::Value;

/// Maximum size of a source row, in bytes, before columns are dropped from it.
pub const MAX_SOURCE_ROW_BYTES: usize = 64 << 20;
/// Number of bytes read from a file in one call.
const PIECE_BYTES: usize = 64 << 10;
/// Bytes at the start of a file that decide its format.
const DETECT_BYTES: usize = 4096;

pub use ranges::Ranges;
use ranges::Remote;

/// The error code for a remote file of which the needed parts could not be fetched, or are too large.
pub const NOT_FETCHED: &str = "not_fetched";

/// A source file with rows.
#[derive(Debug, Clone)]
pub struct Source {
    /// The file name shown in errors; its extension decides the format if the content does not.
    pub name: String,
    at: At,
    /// Whether only the beginning of the file is here, whose last row may be incomplete.
    is_cut: bool,
}

/// The location of a file's bytes.
#[derive(Debug, Clone)]
enum At {
    Path(PathBuf),
    Elsewhere(Arc<Remote>),
}

impl Source {
    /// Creates a source for a local file.
    pub fn file(name: impl Into<String>, path: impl Into<PathBuf>) -> Source {
        Source { name: name.into(), at: At::Path(path.into()), is_cut: false }
    }

    /// Marks the local file as the beginning of a larger one: a last row that may be incomplete is left out.
    #[must_use]
    pub fn cut(self) -> Source {
        Source { is_cut: true, ..self }
    }

    /// Whether only the beginning of the file is here.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Creates a source for a remote parquet file, of which only the parts that the first rows need are fetched.
    pub fn elsewhere(name: impl Into<String>, ranges: impl Ranges + 'static) -> Source {
        Source { name: name.into(), at: At::Elsewhere(Arc::new(Remote::new(Box::new(ranges)))), is_cut: false }
    }

    /// Returns how long fetching parts of a remote file has taken.
    pub fn waited(&self) -> Duration {
        match &self.at {
            At::Path(_) => Duration::ZERO,
            At::Elsewhere(remote) => remote.waited(),
        }
    }
}

/// The position of a row in a source file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The row's number in its file, from 1.
    pub row: u64,
    /// The row group in a parquet file, from 0.
    pub row_group: Option<usize>,
}

/// Whether the reader of rows should continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    More,
    Enough,
}

/// A function that receives each row of a file, or the error about it.
pub type TakeRow<'t> = dyn FnMut(Place, Result<Value, RowError>) -> Flow + 't;

/// The compression of a whole file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packing {
    None,
    Gzip,
    Zstd,
}

/// The columns of a parquet file that a conversion needs.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// Columns to read; None means all.
    #[cfg_attr(not(feature = "parquet"), expect(dead_code, reason = "only parquet files are read by column"))]
    pub only: Option<Vec<String>>,
    /// Columns to leave out, if the file has them.
    pub without: Vec<String>,
    /// Columns to leave out if they contain images, which no template can read.
    pub images: Vec<String>,
}

impl Wanted {
    /// Returns whether a column must be read.
    #[cfg(feature = "parquet")]
    pub fn reads(&self, name: &str, is_image: bool) -> bool {
        let named = |list: &[String]| list.iter().any(|known| known == name);
        self.only.as_deref().is_none_or(named) && !named(&self.without) && !(is_image && named(&self.images))
    }
}

/// Passes the rows of a file to `take` until `take` wants no more. Checks the flag `stop` between chunks of the file, even if
/// they contain no rows.
///
/// # Errors
/// Fails if the file as a whole cannot be read.
pub fn each_row(
    source: &Source,
    hint: Option<Format>,
    wanted: &Wanted,
    stop: &dyn Fn() -> bool,
    take: &mut TakeRow<'_>,
) -> Result<(), RowError> {
    let path = match &source.at {
        At::Path(path) => path,
        At::Elsewhere(remote) => return remote_parquet(remote.clone(), wanted, take),
    };
    let mut file =
        File::open(path).map_err(|error| whole("unreadable", format!("the file cannot be opened: {error}")))?;
    let mut start = [0; 8];
    let read = read_full(&mut file, &mut start).map_err(unreadable)?;
    let start = start.get(..read).unwrap_or_default();
    if start.starts_with(b"PAR1") {
        return parquet(file, wanted, take);
    }
    if source.name.ends_with(".parquet") {
        return Err(whole("parquet", "the file is not a parquet file: it does not begin with PAR1".to_owned()));
    }
    if start.starts_with(b"ARROW1") || source.name.ends_with(".arrow") {
        return Err(whole("format", "Arrow files are not supported: write parquet (to_parquet())".to_owned()));
    }
    if start.starts_with(b"PK\x03\x04") || start.starts_with(b"BZh") || start.starts_with(b"\xfd7zXZ") {
        return Err(whole(
            "format",
            "zip, bz2 and xz are not supported: unpack the file, or pack it with gzip or zstd".to_owned(),
        ));
    }
    let packing = match start {
        [0x1f, 0x8b, ..] => Packing::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Packing::Zstd,
        _ => Packing::None,
    };
    file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    let file = BufReader::with_capacity(PIECE_BYTES, file);
    let mut bytes: Box<dyn Read> = match packing {
        Packing::None => Box::new(file),
        Packing::Gzip => Box::new(MultiGzDecoder::new(file)),
        Packing::Zstd => Box::new(zstd::Decoder::with_buffer(file).map_err(unreadable)?),
    };
    let broken = |error: io::Error| match packing {
        Packing::None => unreadable(error),
        Packing::Gzip => {
            whole("gzip", format!("the gzip data is broken or incomplete ({error}): pack and upload it again"))
        }
        Packing::Zstd => {
            whole("zstd", format!("the zstd data is broken or incomplete ({error}): pack and upload it again"))
        }
    };
    let mut start = vec![0; DETECT_BYTES];
    let read = read_full(&mut bytes, &mut start).map_err(broken)?;
    start.truncate(read);
    let name = source.name.trim_end_matches(".gz").trim_end_matches(".zst").trim_end_matches(".zstd");
    if start.starts_with(b"PAR1") {
        return Err(whole(
            "format",
            "the file is a compressed parquet file: decompress it, parquet has its own compression".to_owned(),
        ));
    }
    let format = Format::of_file_name(name)
        .or(hint)
        .map_or_else(|| detect_text_format(&start), |named| corrected(named, &start));
    let mut bytes = Content { bytes, is_cut: source.is_cut };
    texts(format, &start, &mut bytes, take, (&broken, stop))
}

/// The unpacked content of a file. The end of a file that was cut off is no error.
struct Content {
    bytes: Box<dyn Read>,
    is_cut: bool,
}

impl Content {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.bytes.read(into) {
            Err(error) if self.is_cut && error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            read => read,
        }
    }
}

/// Detects a `.json` file that is really ndjson (one object per line), which is common.
fn corrected(named: Format, start: &[u8]) -> Format {
    match (named, detect_text_format(start)) {
        (Format::Json, Format::Ndjson) => Format::Ndjson,
        (Format::Ndjson, Format::Json) if start.trim_ascii_start().starts_with(b"[") => Format::Json,
        (named, _) => named,
    }
}

fn detect_text_format(start: &[u8]) -> Format {
    let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
    let first_line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    match text.first() {
        Some(b'[') => Format::Json,
        Some(b'{') => {
            let rest: Vec<u8> =
                text.iter().skip(1).copied().filter(|byte| !byte.is_ascii_whitespace()).take(10).collect();
            if rest == b"\"records\":" { Format::Json } else { Format::Ndjson }
        }
        _ if first_line.contains(&b'\t') && !first_line.contains(&b',') => Format::Tsv,
        _ => Format::Csv,
    }
}

fn texts(
    format: Format,
    start: &[u8],
    bytes: &mut Content,
    take: &mut TakeRow<'_>,
    (broken, stop): (&dyn Fn(io::Error) -> RowError, &dyn Fn() -> bool),
) -> Result<(), RowError> {
    let mut reader = RowReader::new(format, MAX_SOURCE_ROW_BYTES);
    let row = std::cell::Cell::new(0_u64);
    let mut enough = Flow::More;
    let mut one = |enough: &mut Flow, read: Result<Value, RowError>| {
        if *enough == Flow::More {
            row.set(row.get() + 1);
            *enough = take(Place { row: row.get(), row_group: None }, read);
        }
    };
    reader.push(start, &mut |_, read| one(&mut enough, read));
    let (mut since_row, mut rows_before) = (0, row.get());
    let mut piece = vec![0; PIECE_BYTES];
    while enough == Flow::More && !stop() {
        let read = match bytes.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(broken(error)),
        };
        since_row = if row.get() == rows_before { since_row + read } else { 0 };
        rows_before = row.get();
        if since_row > 2 * MAX_SOURCE_ROW_BYTES {
            return Err(whole("row_too_long", "no row ends within 128 MiB: a row may have at most 64 MiB".to_owned()));
        }
        reader.push(piece.get(..read).unwrap_or_default(), &mut |_, read| one(&mut enough, read));
    }
    if enough == Flow::More && !stop() && !bytes.is_cut {
        reader.finish(&mut |_, read| one(&mut enough, read));
    }
    Ok(())
}

#[cfg(feature = "parquet")]
fn parquet(file: File, wanted: &Wanted, take: &mut TakeRow<'_>) -> Result<(), RowError> {
    parquet_rows::each_row(file, wanted, take)
}

#[cfg(feature = "parquet")]
fn remote_parquet(remote: Arc<Remote>, wanted: &Wanted, take: &mut TakeRow<'_>) -> Result<(), RowError> {
    parquet_rows::each_remote_row(remote, wanted, take)
}

#[cfg(not(feature = "parquet"))]
fn parquet(_file: File, _wanted: &Wanted, _take: &mut TakeRow<'_>) -> Result<(), RowError> {
    Err(without_parquet())
}

#[cfg(not(feature = "parquet"))]
fn remote_parquet(_remote: Arc<Remote>, _wanted: &Wanted, _take: &mut TakeRow<'_>) -> Result<(), RowError> {
    Err(without_parquet())
}

#[cfg(not(feature = "parquet"))]
fn without_parquet() -> RowError {
    let detail = "the file is a parquet file, and this rlood was built without parquet: build it \
                  with `cargo build --release --features parquet`";
    whole("format", detail.to_owned())
}

fn read_full(from: &mut dyn Read, into: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match from.read(rest) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn unreadable(error: io::Error) -> RowError {
    whole("unreadable", format!("the file cannot be read: {error}"))
}

/// Creates an error about a file, not about one of its rows.
pub fn whole(code: &'static str, detail: String) -> RowError {
    RowError { place: RowPlace::File, code, detail }
}
