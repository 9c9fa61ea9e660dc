//! Checks the numbers of values in parquet pages with delta-encoded texts: the crate `parquet` allocates memory for as many text
//! lengths as the page claims before it reads one.

use parquet::basic::Encoding;
use parquet::column::page::Page;
use parquet::errors::ParquetError;

/// Rejects a parquet page that has more texts than its header says. `max_levels` are the column's maximum
/// repetition and definition levels.
pub fn check_counts(page: &Page, max_levels: (i16, i16)) -> Result<(), ParquetError> {
    let streams = match page.encoding() {
        Encoding::DELTA_LENGTH_BYTE_ARRAY => 1,
        // The encoding DELTA_BYTE_ARRAY has two streams of numbers: the lengths of the prefixes and of the suffixes.
        Encoding::DELTA_BYTE_ARRAY => 2,
        _ => return Ok(()),
    };
    let most = u64::from(page.num_values());
    let mut bytes = values(page, max_levels)?;
    for _ in 0..streams {
        bytes = behind_stream(bytes, most)?;
    }
    Ok(())
}

/// Returns the bytes of a parquet page after its repetition and definition levels.
pub fn values(page: &Page, (max_rep, max_def): (i16, i16)) -> Result<&[u8], ParquetError> {
    let (bytes, encodings) = match page {
        Page::DataPage { buf, rep_level_encoding, def_level_encoding, .. } => {
            (&buf[..], [(max_rep, rep_level_encoding), (max_def, def_level_encoding)])
        }
        Page::DataPageV2 { buf, rep_levels_byte_len, def_levels_byte_len, .. } => {
            let levels = (*rep_levels_byte_len as usize).checked_add(*def_levels_byte_len as usize);
            return levels.and_then(|levels| buf.get(levels..)).ok_or_else(broken);
        }
        Page::DictionaryPage { buf, .. } => return Ok(buf),
    };
    encodings.into_iter().filter(|(max, _)| *max > 0).try_fold(bytes, |bytes, (max, encoding)| {
        let levels = match encoding {
            Encoding::RLE => {
                let length = bytes.first_chunk::<4>().ok_or_else(broken)?;
                u64::from(u32::from_le_bytes(*length)) + 4
            }
            _ => {
                let width = 16 - max.unsigned_abs().leading_zeros();
                (u64::from(page.num_values()) * u64::from(width)).div_ceil(8)
            }
        };
        usize::try_from(levels).ok().and_then(|levels| bytes.get(levels..)).ok_or_else(broken)
    })
}

/// Returns the bytes after a stream of delta-packed numbers, which may hold at most `most` numbers.
fn behind_stream(mut bytes: &[u8], most: u64) -> Result<&[u8], ParquetError> {
    let (block, groups, count) = (number(&mut bytes)?, number(&mut bytes)?, number(&mut bytes)?);
    // Skips the first value of the stream, which precedes the blocks.
    number(&mut bytes)?;
    if count > most {
        return Err(broken());
    }
    let group_values = block.checked_div(groups).ok_or_else(broken)?;
    let mut left = count.saturating_sub(1);
    while left > 0 {
        // Skips the block's smallest difference, which precedes the bit widths.
        number(&mut bytes)?;
        let groups = usize::try_from(groups).map_err(|_| broken())?;
        let (widths, mut rest) = bytes.split_at_checked(groups).ok_or_else(broken)?;
        for width in widths.iter().filter(|_| group_values > 0) {
            if left == 0 {
                break;
            }
            left = left.saturating_sub(group_values);
            let packed = (u64::from(*width)).checked_mul(group_values).ok_or_else(broken)? / 8;
            // The last group of values in a stream may be shorter than the others.
            let packed = usize::try_from(packed).map_err(|_| broken())?.min(rest.len());
            rest = rest.get(packed..).unwrap_or_default();
        }
        if group_values == 0 {
            return Err(broken());
        }
        bytes = rest;
    }
    Ok(bytes)
}

fn number(bytes: &mut &[u8]) -> Result<u64, ParquetError> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first().ok_or_else(broken)?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(broken())
}

fn broken() -> ParquetError {
    ParquetError::General(
        "a page of delta-encoded texts has a different number of values than its header says".to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_stream_is_found_and_too_many_are_refused() {
        // A stream of delta-packed numbers with blocks of 128 values in 4 groups. It has 5 values: the first value, and a block
        // whose first group has one bit per value. More bytes follow.
        let stream = [&[0x80, 1, 4, 5, 2][..], &[0, 1, 0, 0, 0], &[0xff; 4], b"rest"].concat();
        assert_eq!(behind_stream(&stream, 5).unwrap(), b"rest");
        assert!(behind_stream(&stream, 4).is_err());
        // A stream with only one value has no block.
        assert_eq!(behind_stream(&[0x80, 1, 4, 1, 2, 9], 5).unwrap(), [9]);
        for cut in 0..10 {
            assert!(behind_stream(&stream[..cut], 5).is_err(), "{cut}");
        }
        assert!(behind_stream(&[0, 0, 5, 0, 0, 0, 0], 5).is_err());
        // A stream whose block claims 2^40 values in one group must be rejected quickly.
        let huge = [&[0x80, 0x80, 0x80, 0x80, 0x80, 0x20][..], &[1, 0x80, 0x80, 0x80, 0x80, 4, 0], &[0, 0]].concat();
        assert!(behind_stream(&huge, u64::MAX).unwrap().is_empty());
    }
}
