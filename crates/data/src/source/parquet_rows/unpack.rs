//! Decompresses the bytes of a parquet page, never to more than its header says: some codecs of the crate `parquet` continue as
//! long as there is input.

use std::io::Read;

use flate2::read::MultiGzDecoder;
use parquet::basic::Compression;
use parquet::errors::ParquetError;

/// Decompresses parquet pages; shared by all columns.
pub struct Unpacker {
    zstd: zstd::bulk::Decompressor<'static>,
    snappy: snap::raw::Decoder,
}

impl Unpacker {
    pub fn new() -> std::io::Result<Unpacker> {
        Ok(Unpacker { zstd: zstd::bulk::Decompressor::new()?, snappy: snap::raw::Decoder::new() })
    }

    /// Decompresses a page and appends exactly `bytes` bytes to `out`.
    pub fn unpack(
        &mut self,
        codec: Compression,
        packed: &[u8],
        bytes: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), ParquetError> {
        // A page without bytes contains only nulls.
        if bytes == 0 {
            return Ok(());
        }
        let start = out.len();
        let into = |out: &mut Vec<u8>| out.resize(start + bytes, 0);
        let space = |out: &mut Vec<u8>, decode: &mut dyn FnMut(&mut [u8]) -> Result<usize, ParquetError>| {
            into(out);
            decode(out.get_mut(start..).unwrap_or_default())
        };
        let done = match codec {
            Compression::SNAPPY => space(out, &mut |to| self.snappy.decompress(packed, to).map_err(broken))?,
            Compression::ZSTD(_) => space(out, &mut |to| self.zstd.decompress_to_buffer(packed, to).map_err(broken))?,
            Compression::LZ4_RAW => space(out, &mut |to| lz4_flex::block::decompress_into(packed, to).map_err(broken))?,
            Compression::GZIP(_) => stream(MultiGzDecoder::new(packed), bytes, out)?,
            Compression::LZ4 => match space(out, &mut |to| hadoop(packed, to)) {
                Ok(done) if done == bytes => done,
                // Old writers used the codec name LZ4 for either an LZ4 frame or a plain LZ4 block.
                _ => {
                    out.truncate(start);
                    match stream(lz4_flex::frame::FrameDecoder::new(packed), bytes, out) {
                        Ok(done) => done,
                        Err(_) => {
                            out.truncate(start);
                            space(out, &mut |to| lz4_flex::block::decompress_into(packed, to).map_err(broken))?
                        }
                    }
                }
            },
            other => return Err(ParquetError::General(format!("the compression {other} is not supported"))),
        };
        if done == bytes { Ok(()) } else { Err(broken("the unpacked size differs from the one in the page's header")) }
    }
}

fn stream(from: impl Read, bytes: usize, out: &mut Vec<u8>) -> Result<usize, ParquetError> {
    // Reading one more byte shows whether the decompressed data is longer than the page's header says.
    from.take(bytes as u64 + 1).read_to_end(out).map_err(broken)
}

/// Decompresses LZ4 blocks in Hadoop's framing: before each block, its unpacked and packed size, four bytes each.
fn hadoop(mut packed: &[u8], to: &mut [u8]) -> Result<usize, ParquetError> {
    let mut done = 0;
    while let Some((sizes, rest)) = packed.split_first_chunk::<8>() {
        let [a, b, c, d, e, f, g, h] = *sizes;
        let (unpacked, size) = (u32::from_be_bytes([a, b, c, d]) as usize, u32::from_be_bytes([e, f, g, h]) as usize);
        let block = rest.get(..size).ok_or_else(|| broken("a compressed LZ4 block is cut off"))?;
        let into = to.get_mut(done..done + unpacked).ok_or_else(|| broken("a compressed LZ4 block is too long"))?;
        if lz4_flex::block::decompress_into(block, into).map_err(broken)? != unpacked {
            return Err(broken("a compressed LZ4 block has another size than its frame says"));
        }
        done += unpacked;
        packed = rest.get(size..).unwrap_or_default();
    }
    if packed.is_empty() { Ok(done) } else { Err(broken("a compressed LZ4 block is cut off")) }
}

fn broken(what: impl std::fmt::Display) -> ParquetError {
    ParquetError::General(format!("a page cannot be unpacked: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::basic::{GzipLevel, ZstdLevel};
    use std::io::Write;

    #[test]
    fn a_page_unpacks_to_what_its_header_says_and_to_nothing_else() {
        let text: Vec<u8> = (0..50_000_u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        let gzip = {
            let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            to.write_all(&text).unwrap();
            to.finish().unwrap()
        };
        let raw = lz4_flex::block::compress(&text);
        let halves = text.chunks(text.len() / 2).flat_map(|half| {
            let block = lz4_flex::block::compress(half);
            [&(half.len() as u32).to_be_bytes()[..], &(block.len() as u32).to_be_bytes(), &block].concat()
        });
        let frame = {
            let mut to = lz4_flex::frame::FrameEncoder::new(Vec::new());
            to.write_all(&text).unwrap();
            to.finish().unwrap()
        };
        let packed = [
            (Compression::SNAPPY, snap::raw::Encoder::new().compress_vec(&text).unwrap()),
            (Compression::ZSTD(ZstdLevel::default()), zstd::encode_all(&text[..], 1).unwrap()),
            (Compression::GZIP(GzipLevel::default()), gzip),
            (Compression::LZ4_RAW, raw.clone()),
            (Compression::LZ4, halves.collect()),
            (Compression::LZ4, frame),
            (Compression::LZ4, raw),
        ];
        let mut unpacker = Unpacker::new().unwrap();
        for (codec, packed) in packed {
            let mut out = b"levels".to_vec();
            unpacker.unpack(codec, &packed, text.len(), &mut out).unwrap();
            assert!(out.starts_with(b"levels") && out[6..] == text, "{codec}");
            for lie in [text.len() - 1, text.len() + 1, 10] {
                let mut out = Vec::new();
                assert!(unpacker.unpack(codec, &packed, lie, &mut out).is_err(), "{codec} {lie}");
                assert!(out.capacity() <= 2 * text.len() + 64, "{codec} {lie}: {}", out.capacity());
            }
            assert!(unpacker.unpack(codec, b"nonsense", 100, &mut Vec::new()).is_err());
        }
    }
}
