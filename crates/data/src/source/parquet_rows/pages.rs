//! Reads the pages of a parquet row group's columns. The size in each page's header is checked before any of the page is read.

use std::io::BufReader;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use parquet::basic::{Compression, Encoding, Type as Physical};
use parquet::bloom_filter::Sbbf;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::RowGroupReader;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;

use super::budget::{Budget, MAX_PAGE_BYTES, TooLarge};
use super::deltas::{check_counts, values};
use super::header::Header;
use super::input::Input;
use super::levels::{Longest, longest_row};
use super::unpack::Unpacker;

/// Memory in bytes of a value in the types of the crate `parquet`, without its text.
const VALUE_BYTES: u64 = 32;
/// Memory in bytes of a value in a list: its copies read ahead, in the row, and as JSON.
const LIST_VALUE_BYTES: u64 = 128;
/// Memory in bytes of the two lengths (prefix and suffix) of a delta-encoded text.
const LENGTH_BYTES: u64 = 8;
/// Number of bytes read in one call to parse a page header.
const HEADER_BYTES: usize = 512;

const PAGE_ADVICE: &str = "write the file with smaller pages (data_page_size in pyarrow)";
const DICTIONARY_ADVICE: &str = "write the file with a smaller dictionary (dictionary_pagesize_limit in pyarrow)";

/// State shared by the columns of a row group.
pub struct Shared {
    pub input: Arc<Input>,
    pub budget: Budget,
    pub unpacker: Mutex<Unpacker>,
    /// Number of rows that each column reads ahead.
    pub batch: u64,
}

/// Implements the interface of a row group that the record reader of the crate `parquet` expects.
pub struct Group<'m> {
    pub metadata: &'m ParquetMetaData,
    pub at: usize,
    pub shared: Arc<Shared>,
}

impl RowGroupReader for Group<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.metadata.row_group(self.at)
    }

    fn num_columns(&self) -> usize {
        self.metadata().num_columns()
    }

    fn get_column_page_reader(&self, i: usize) -> Result<Box<dyn PageReader>, ParquetError> {
        let column = self.metadata().column(i);
        let (offset, left) = column.byte_range();
        let descr = column.column_descr();
        Ok(Box::new(Pages {
            shared: self.shared.clone(),
            at: i,
            name: column.column_path().string(),
            codec: column.compression(),
            physical: column.column_type(),
            max_levels: (descr.max_rep_level(), descr.max_def_level()),
            offset,
            left,
            next: None,
            longest_entry: 0,
            row_so_far: Longest::default(),
        }))
    }

    fn get_column_bloom_filter(&self, _i: usize) -> Option<&Sbbf> {
        None
    }

    fn get_row_iter(&self, _projection: Option<Type>) -> Result<RowIter<'_>, ParquetError> {
        Err(ParquetError::NYI("parquet files are read by column pages, not by rows".to_owned()))
    }
}

/// Iterates over the pages of one column of a row group.
struct Pages {
    shared: Arc<Shared>,
    /// The column's index in the file.
    at: usize,
    name: String,
    codec: Compression,
    physical: Physical,
    /// The column's maximum repetition and definition levels.
    max_levels: (i16, i16),
    offset: u64,
    left: u64,
    /// The page header at `offset`, if it was already read.
    next: Option<Header>,
    /// Bytes of the longest value in the column's dictionary.
    longest_entry: u64,
    /// Values counted so far in the list row that may continue in the next page.
    row_so_far: Longest,
}

impl Pages {
    /// Reads the header of the next data or dictionary page and checks its sizes.
    fn header(&mut self) -> Result<Option<Header>, ParquetError> {
        if let Some(header) = self.next.take() {
            return Ok(Some(header));
        }
        while self.left > 0 {
            let header = Header::read(BufReader::with_capacity(HEADER_BYTES, self.shared.input.reader(self.offset)))?;
            let packed_bytes = header.packed_bytes.unsigned_abs();
            self.left = self.left.checked_sub(header.header_bytes).ok_or_else(cut_off)?;
            if packed_bytes > self.left {
                return Err(cut_off());
            }
            self.offset += header.header_bytes;
            let (what, advice) = match header.kind {
                0 | 3 => ("page", PAGE_ADVICE),
                2 => ("dictionary", DICTIONARY_ADVICE),
                // Other page types, such as indexes, are not needed to read rows.
                _ => {
                    self.pass(packed_bytes);
                    continue;
                }
            };
            let bytes = packed_bytes.max(header.unpacked_bytes.unsigned_abs());
            if bytes > MAX_PAGE_BYTES {
                return Err(TooLarge::Page { column: self.name.clone(), what, bytes, advice }.into());
            }
            return Ok(Some(header));
        }
        Ok(None)
    }

    fn pass(&mut self, bytes: u64) {
        self.offset += bytes;
        self.left -= bytes;
    }

    fn page(&mut self, header: &Header) -> Result<Page, ParquetError> {
        let (packed_bytes, unpacked_bytes) = (header.packed_bytes.unsigned_abs(), header.unpacked_bytes.unsigned_abs());
        match header.kind {
            2 => {
                // Texts are read from the page's buffer without a copy; numbers are copied.
                let (kept_bytes, each) = match self.physical {
                    Physical::BYTE_ARRAY | Physical::FIXED_LEN_BYTE_ARRAY => (unpacked_bytes, VALUE_BYTES),
                    Physical::INT96 => (0, 12),
                    _ => (0, 8),
                };
                let bytes = u64::from(header.number(1)?).saturating_mul(each).saturating_add(kept_bytes);
                let passing = packed_bytes.saturating_add(unpacked_bytes - kept_bytes);
                self.shared.budget.dictionary(self.at, &self.name, bytes, passing)?;
            }
            _ => self.shared.budget.page(self.at, &self.name, unpacked_bytes, packed_bytes)?,
        }
        let packed = self.shared.input.bytes(self.offset, packed_bytes)?;
        self.pass(packed_bytes);
        let (def, rep) = if header.kind == 3 { (header.number(5)?, header.number(6)?) } else { (0, 0) };
        let is_packed = self.codec != Compression::UNCOMPRESSED && (header.kind != 3 || header.flag(7, true));
        let buf =
            if is_packed { self.unpack(&packed, unpacked_bytes, u64::from(def) + u64::from(rep))? } else { packed };
        if def as u64 + rep as u64 > buf.len() as u64 {
            return Err(cut_off());
        }
        let page = match header.kind {
            0 => Page::DataPage {
                num_values: header.number(1)?,
                encoding: encoding(header.number(2)?)?,
                def_level_encoding: encoding(header.number(3)?)?,
                rep_level_encoding: encoding(header.number(4)?)?,
                statistics: None,
                buf,
            },
            2 => Page::DictionaryPage {
                num_values: header.number(1)?,
                encoding: encoding(header.number(2)?)?,
                is_sorted: header.flag(3, false),
                buf,
            },
            _ => Page::DataPageV2 {
                num_values: header.number(1)?,
                num_nulls: header.number(2)?,
                num_rows: header.number(3)?,
                encoding: encoding(header.number(4)?)?,
                def_levels_byte_len: def,
                rep_levels_byte_len: rep,
                is_compressed: is_packed,
                statistics: None,
                buf,
            },
        };
        self.check_values(&page)?;
        Ok(page)
    }

    fn unpack(&self, packed: &[u8], unpacked_bytes: u64, levels: u64) -> Result<Bytes, ParquetError> {
        let levels = usize::try_from(levels).map_err(|_| cut_off())?;
        let unpacked = usize::try_from(unpacked_bytes).map_err(|_| cut_off())?;
        let (first, rest) = packed.split_at_checked(levels).ok_or_else(cut_off)?;
        let rest_bytes = unpacked.checked_sub(levels).ok_or_else(cut_off)?;
        let mut out = Vec::with_capacity(unpacked);
        out.extend_from_slice(first);
        let mut unpacker = self.shared.unpacker.lock().unwrap_or_else(PoisonError::into_inner);
        unpacker.unpack(self.codec, rest, rest_bytes, &mut out)?;
        Ok(out.into())
    }

    /// Counts the memory that a page's values may need in addition to the page's bytes: for lists, and for texts that
    /// repeat prefixes of others.
    fn check_values(&mut self, page: &Page) -> Result<(), ParquetError> {
        let encoding = page.encoding();
        if page.is_dictionary_page() {
            self.longest_entry = if self.physical == Physical::BYTE_ARRAY { longest(page.buffer()) } else { 0 };
            return Ok(());
        }
        let count = u64::from(page.num_values());
        let read_ahead = match self.max_levels.0 {
            0 => count.min(self.shared.batch),
            max => {
                let row = longest_row(page, max, &mut self.row_so_far)?;
                count.min(row.saturating_mul(self.shared.batch))
            }
        };
        let mut more = 0_u64;
        if self.max_levels.0 > 0 {
            more = read_ahead.saturating_mul(LIST_VALUE_BYTES);
            if matches!(encoding, Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY) {
                more = more.saturating_add(self.row_so_far.longest.min(count).saturating_mul(self.longest_entry));
            }
        }
        if matches!(encoding, Encoding::DELTA_LENGTH_BYTE_ARRAY | Encoding::DELTA_BYTE_ARRAY) {
            check_counts(page, self.max_levels)?;
            more = more.saturating_add(count.saturating_mul(LENGTH_BYTES));
        }
        if encoding == Encoding::DELTA_BYTE_ARRAY {
            more = more.saturating_add(read_ahead.saturating_mul(page.buffer().len() as u64));
        }
        let longest = match (self.max_levels.0, self.physical, encoding) {
            (0, Physical::BYTE_ARRAY, Encoding::PLAIN) => longest(values(page, self.max_levels)?),
            (0, Physical::BYTE_ARRAY, Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY) => self.longest_entry,
            (0, Physical::BYTE_ARRAY | Physical::FIXED_LEN_BYTE_ARRAY, _) => page.buffer().len() as u64,
            (0, ..) => 0,
            // The size of the longest value of a list column is limited by the page; its copies are counted per value above.
            _ => page.buffer().len() as u64,
        };
        Ok(self.shared.budget.grow(self.at, &self.name, more, longest)?)
    }
}

impl Iterator for Pages {
    type Item = Result<Page, ParquetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>, ParquetError> {
        let Some(header) = self.header()? else { return Ok(None) };
        self.page(&header).map(Some)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>, ParquetError> {
        let Some(header) = self.header()? else { return Ok(None) };
        let number = |field: usize| header.number(field).map(|number| Some(number as usize));
        let metadata = match header.kind {
            0 => PageMetadata { num_rows: None, num_levels: number(1)?, is_dict: false },
            2 => PageMetadata { num_rows: None, num_levels: None, is_dict: true },
            _ => PageMetadata { num_rows: number(3)?, num_levels: number(1)?, is_dict: false },
        };
        self.next = Some(header);
        Ok(Some(metadata))
    }

    fn skip_next_page(&mut self) -> Result<(), ParquetError> {
        if let Some(header) = self.header()? {
            self.pass(header.packed_bytes.unsigned_abs());
        }
        Ok(())
    }
}

/// Bytes of the longest text in a sequence of length-prefixed texts.
fn longest(mut texts: &[u8]) -> u64 {
    let mut longest = 0;
    while let Some((length, rest)) = texts.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length);
        longest = longest.max(u64::from(length).min(rest.len() as u64));
        texts = rest.get(length as usize..).unwrap_or_default();
    }
    longest
}

fn encoding(number: u32) -> Result<Encoding, ParquetError> {
    Ok(match number {
        0 => Encoding::PLAIN,
        2 => Encoding::PLAIN_DICTIONARY,
        3 => Encoding::RLE,
        #[expect(deprecated, reason = "old Parquet files have levels in the encoding BIT_PACKED")]
        4 => Encoding::BIT_PACKED,
        5 => Encoding::DELTA_BINARY_PACKED,
        6 => Encoding::DELTA_LENGTH_BYTE_ARRAY,
        7 => Encoding::DELTA_BYTE_ARRAY,
        8 => Encoding::RLE_DICTIONARY,
        9 => Encoding::BYTE_STREAM_SPLIT,
        other => return Err(ParquetError::General(format!("a page has the unknown encoding {other}"))),
    })
}

fn cut_off() -> ParquetError {
    ParquetError::EOF("a page is cut off, or its sizes are wrong".to_owned())
}
