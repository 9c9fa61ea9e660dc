//! From files of many formats to the rows of a dataset: read, mapped, filtered, sampled; or looked at without keeping anything.
//!
//! Files are ndjson, JSON, CSV, TSV (each also inside gzip or zstd) or parquet, told by their content first and by their name second.
//! One row is held at a time, and of parquet the pages that its columns stand in, 224 MiB of all that at most. What grows with the rows are
//! 16 bytes, at most 24 with the table's free places, for each distinct key of `unique`.

mod card;
mod columns;
mod convert;
mod glob;
mod keys;
mod mapping;
mod source;

pub use card::{CannotChoose, Chosen, choose};
pub use convert::{Converted, Options, Preview, PreviewColumn, convert, preview};
pub use source::{NOT_FETCHED, Ranges, Source};
