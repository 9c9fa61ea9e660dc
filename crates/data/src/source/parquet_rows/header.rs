//! Parses the headers of parquet pages, which are in Thrift's compact protocol. The crate `parquet` reports a page's size only
//! after unpacking the page, which is too late to limit the memory.

use std::io::Read;

use parquet::errors::ParquetError;

/// Maximum size in bytes of a page header. Writers store the page's smallest and largest value there, cut to a few KiB.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Maximum nesting depth of Thrift structures in a page header: page, data page, statistics.
const MAX_DEPTH: usize = 8;

/// The parsed header of a parquet page.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Header {
    /// The page type: 0 = data, 1 = index, 2 = dictionary, 3 = data of version 2.
    pub kind: i64,
    /// Size of the page in bytes after unpacking.
    pub unpacked_bytes: i64,
    /// Size of the page in bytes in the file, packed.
    pub packed_bytes: i64,
    /// The fields of the header part that is specific to the page type, by Thrift field number; booleans are 0 and 1.
    fields: [Option<i64>; 8],
    /// Size of the page header itself in bytes.
    pub header_bytes: u64,
}

impl Header {
    /// Parses a page header from the start of `from`.
    pub fn read(from: impl Read) -> Result<Header, ParquetError> {
        let mut input = Input { from: from.take(MAX_HEADER_BYTES), read: 0 };
        let mut header = Header { kind: -1, unpacked_bytes: -1, packed_bytes: -1, ..Header::default() };
        input.structure(0, &mut |path, value| match *path {
            [1] => header.kind = value,
            [2] => header.unpacked_bytes = value,
            [3] => header.packed_bytes = value,
            // A page has exactly one of these structures, depending on its type.
            [5 | 7 | 8, field] => {
                if let Some(slot) = usize::try_from(field).ok().and_then(|field| header.fields.get_mut(field)) {
                    *slot = Some(value);
                }
            }
            _ => {}
        })?;
        header.header_bytes = input.read;
        if header.unpacked_bytes < 0 || header.packed_bytes < 0 {
            return Err(broken("the size of the page is missing in the header"));
        }
        Ok(header)
    }

    /// Returns a required number of the page header.
    pub fn number(&self, field: usize) -> Result<u32, ParquetError> {
        let number = self.fields.get(field).copied().flatten();
        number
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| broken("a required number of the header is missing"))
    }

    /// Returns an optional boolean of the page header.
    pub fn flag(&self, field: usize, default: bool) -> bool {
        self.fields.get(field).copied().flatten().map_or(default, |value| value != 0)
    }
}

struct Input<R> {
    from: R,
    read: u64,
}

impl<R: Read> Input<R> {
    fn byte(&mut self) -> Result<u8, ParquetError> {
        let mut byte = [0];
        self.from.read_exact(&mut byte).map_err(ParquetError::from)?;
        self.read += 1;
        Ok(byte[0])
    }

    fn skip(&mut self, bytes: u64) -> Result<(), ParquetError> {
        let skipped = std::io::copy(&mut (&mut self.from).take(bytes), &mut std::io::sink())?;
        self.read += skipped;
        if skipped == bytes { Ok(()) } else { Err(broken("the header of the page is too long, or cut off")) }
    }

    fn varint(&mut self) -> Result<u64, ParquetError> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(broken("a number in the header has too many bytes"))
    }

    fn number(&mut self) -> Result<i64, ParquetError> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// Passes each number of a Thrift structure and of its nested structures to `take`, with the path of field numbers to it.
    fn structure(&mut self, depth: usize, take: &mut dyn FnMut(&[i64], i64)) -> Result<(), ParquetError> {
        if depth > MAX_DEPTH {
            return Err(broken("the header is nested too deep"));
        }
        let mut field = 0;
        loop {
            let byte = self.byte()?;
            let kind = byte & 0x0f;
            if kind == 0 {
                return Ok(());
            }
            field = match byte >> 4 {
                0 => self.number()?,
                delta => field + i64::from(delta),
            };
            match kind {
                1 | 2 => take(&[field], i64::from(kind == 1)),
                4..=6 => take(&[field], self.number()?),
                12 => self.structure(depth + 1, &mut |path, value| {
                    // The numbers of deeper structures (statistics) are not needed.
                    if let [inner] = *path {
                        take(&[field, inner], value);
                    }
                })?,
                kind => self.pass(kind, depth)?,
            }
        }
    }

    /// Skips a value of a Thrift structure.
    fn pass(&mut self, kind: u8, depth: usize) -> Result<(), ParquetError> {
        match kind {
            1..=3 => self.skip(1),
            4..=6 => self.varint().map(drop),
            7 => self.skip(8),
            8 => {
                let length = self.varint()?;
                self.skip(length)
            }
            9 | 10 if depth < MAX_DEPTH => {
                let byte = self.byte()?;
                let count = if byte >> 4 == 15 { self.varint()? } else { u64::from(byte >> 4) };
                (0..count).try_for_each(|_| self.pass(byte & 0x0f, depth + 1))
            }
            12 => self.structure(depth + 1, &mut |_, _| {}),
            _ => Err(broken("a field of the header has an unknown type")),
        }
    }
}

fn broken(what: &str) -> ParquetError {
    ParquetError::General(format!("a page's header is damaged: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_tells_sizes_and_the_fields_of_its_kind() {
        // The header of a data page: 1000 bytes unpacked, 300 packed; 5 values, encoding 3; statistics with a text;
        // then an unknown list.
        let statistics = [0x18, 2, b'h', b'i', 0x00];
        let page = [&[0x15, 10, 0x15, 6, 0x15, 6, 0x15, 6, 0x1c][..], &statistics, &[0x00]].concat();
        let bytes =
            [&[0x15, 0, 0x15, 0xd0, 0x0f, 0x15, 0xd8, 0x04, 0x2c][..], &page, &[0x49, 0x25, 2, 4, 0x00]].concat();
        let header = Header::read(&[&bytes[..], b"what follows"].concat()[..]).unwrap();
        assert_eq!((header.kind, header.unpacked_bytes, header.packed_bytes), (0, 1000, 300));
        assert_eq!((header.number(1).unwrap(), header.number(2).unwrap()), (5, 3));
        assert!(header.number(7).is_err() && header.flag(7, true));
        assert_eq!(header.header_bytes, bytes.len() as u64);
        for end in 0..bytes.len() {
            assert!(Header::read(&bytes[..end]).is_err());
        }
        // Parsing a list that claims 2^63 members ends at the end of the input.
        let endless = [&[0x19, 0xf5][..], &[0xff; 8], &[0x7f]].concat();
        assert!(Header::read(&endless[..]).is_err());
    }
}
