//! Converts files of many formats to the rows of a dataset: reads, maps, filters and samples them, or
//! previews them without writing.
//!
//! Files are ndjson, JSON, CSV, TSV (each also inside gzip or zstd) or parquet. The content decides the format first,
//! the file name second.
//! The reader holds one row at a time, and of a parquet file the pages of the current rows: at most 224 MiB in
//! all. Only `unique` needs memory that grows with the number of rows: 16 bytes for each distinct key, at most
//! 24 with free slots.

mod card;
mod columns;
mod convert;
mod glob;
mod images;
mod keys;
mod mapping;
mod source;
mod variables;

pub use card::{CannotChoose, Chosen, choose};
pub use convert::{Converted, Options, Preview, PreviewColumn, convert, preview};
pub use images::{ImageCounts, ImageLimits, Images};
pub use source::{NOT_FETCHED, Ranges, Source};
