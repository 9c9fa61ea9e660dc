//! Writes parquet files page by page, with sizes that may be wrong on purpose.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{Compression, Encoding};
use parquet::column::page::{CompressedPage, Page, PageWriter};
use parquet::file::metadata::{
    ColumnChunkMetaData, FileMetaData, ParquetMetaData, ParquetMetaDataWriter, RowGroupMetaData,
};
use parquet::file::writer::{SerializedPageWriter, TrackedWrite};
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::SchemaDescriptor;

/// A page as the file will contain it.
pub struct Written {
    pub is_dictionary: bool,
    pub encoding: Encoding,
    pub values: u32,
    /// The unpacked size that the header claims.
    pub unpacked_bytes: usize,
    pub packed: Vec<u8>,
}

impl Written {
    /// Creates a data page of texts.
    pub fn data(values: u32, unpacked_bytes: usize, packed: Vec<u8>) -> Written {
        Written { is_dictionary: false, encoding: Encoding::PLAIN, values, unpacked_bytes, packed }
    }
}

/// Writes one row group with these columns.
pub fn write(path: &Path, schema: &str, rows: i64, columns: Vec<(Compression, Vec<Written>)>) {
    let schema = Arc::new(SchemaDescriptor::new(Arc::new(parse_message_type(schema).unwrap())));
    let mut out = TrackedWrite::new(BufWriter::new(File::create(path).unwrap()));
    out.write_all(b"PAR1").unwrap();
    let mut chunks = Vec::new();
    for (at, (compression, pages)) in columns.into_iter().enumerate() {
        let start = out.bytes_written() as i64;
        let (mut dictionary, mut first, mut values, mut unpacked) = (None, None, 0, 0);
        for page in pages {
            let buf = page.packed.into();
            let (num_values, encoding) = (page.values, page.encoding);
            let is_dictionary = page.is_dictionary;
            let held = match is_dictionary {
                true => Page::DictionaryPage { buf, num_values, encoding, is_sorted: false },
                false => Page::DataPage {
                    buf,
                    num_values,
                    encoding,
                    def_level_encoding: Encoding::RLE,
                    rep_level_encoding: Encoding::RLE,
                    statistics: None,
                },
            };
            let mut writer = SerializedPageWriter::new(&mut out);
            let offset = writer.write_page(CompressedPage::new(held, page.unpacked_bytes)).unwrap().offset as i64;
            (if is_dictionary { &mut dictionary } else { &mut first }).get_or_insert(offset);
            values += if is_dictionary { 0 } else { i64::from(num_values) };
            unpacked += page.unpacked_bytes as i64;
        }
        let builder = ColumnChunkMetaData::builder(schema.column(at))
            .set_compression(compression)
            .set_num_values(values)
            .set_total_compressed_size(out.bytes_written() as i64 - start)
            .set_total_uncompressed_size(unpacked)
            .set_data_page_offset(first.unwrap())
            .set_dictionary_page_offset(dictionary);
        chunks.push(builder.build().unwrap());
    }
    let bytes = chunks.iter().map(ColumnChunkMetaData::uncompressed_size).sum();
    let group = RowGroupMetaData::builder(schema.clone()).set_num_rows(rows).set_total_byte_size(bytes);
    let group = group.set_column_metadata(chunks).build().unwrap();
    let metadata = ParquetMetaData::new(FileMetaData::new(1, rows, None, None, schema, None), vec![group]);
    ParquetMetaDataWriter::new_with_tracked(out, &metadata).finish().unwrap();
}

/// Encodes a text as it appears in a page.
pub fn text(bytes: usize) -> Vec<u8> {
    let mut text = (bytes as u32).to_le_bytes().to_vec();
    text.resize(bytes + 4, b'a');
    text
}

/// Creates a text that compresses about a hundred times.
pub fn mixed(bytes: usize) -> Vec<u8> {
    let mut text = text(bytes);
    let characters = noise(bytes / 64).into_iter().map(|byte| b'a' + byte % 16);
    text.iter_mut().skip(4).zip(characters).for_each(|(byte_at, character)| *byte_at = character);
    text
}

/// Creates random bytes, which do not compress.
pub fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    let next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(next).take(bytes).collect()
}

/// Packs many zeros without holding them unpacked.
pub fn packed_zeros(codec: Compression, bytes: u64) -> Vec<u8> {
    let mut zeros = std::io::repeat(0).take(bytes);
    match codec {
        Compression::ZSTD(_) => zstd::encode_all(zeros, 1).unwrap(),
        Compression::GZIP(_) => {
            let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            std::io::copy(&mut zeros, &mut to).unwrap();
            to.finish().unwrap()
        }
        Compression::LZ4 => {
            let mut to = lz4_flex::frame::FrameEncoder::new(Vec::new());
            std::io::copy(&mut zeros, &mut to).unwrap();
            to.finish().unwrap()
        }
        other => panic!("{other} is not packed here"),
    }
}
