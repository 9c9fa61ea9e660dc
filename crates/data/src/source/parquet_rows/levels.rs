//! Finds the number of values of the longest row in a parquet page of lists, from the page's repetition levels: a few bytes may
//! encode a row of a billion values.

use parquet::basic::Encoding;
use parquet::column::page::Page;
use parquet::errors::ParquetError;

/// Counts the values of each row of a list column over its pages; a row may continue in the next page.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Longest {
    row: u64,
    /// Number of values in the longest row so far.
    pub longest: u64,
}

impl Longest {
    fn add(&mut self, begins: bool, values: u64) {
        match begins {
            // A column without repetition levels has one value per row.
            true => self.row = values.min(1),
            false => self.row = self.row.saturating_add(values),
        }
        self.longest = self.longest.max(self.row);
    }
}

/// Returns the number of values of the longest row that ends or continues in a page.
pub fn longest_row(page: &Page, max_level: i16, rows: &mut Longest) -> Result<u64, ParquetError> {
    rows.longest = rows.row;
    let width = 16 - max_level.unsigned_abs().leading_zeros();
    let (levels, is_known) = match page {
        Page::DataPage { buf, rep_level_encoding: Encoding::RLE, .. } => {
            let (length, rest) = buf.split_first_chunk::<4>().ok_or_else(cut_off)?;
            (rest.get(..u32::from_le_bytes(*length) as usize).ok_or_else(cut_off)?, true)
        }
        Page::DataPageV2 { buf, rep_levels_byte_len, .. } => {
            (buf.get(..*rep_levels_byte_len as usize).ok_or_else(cut_off)?, true)
        }
        _ => (&[][..], false),
    };
    match is_known {
        true => count_levels(levels, width, u64::from(page.num_values()), rows)?,
        // The old encoding of levels (BIT_PACKED) uses at least a bit per level, so the page's size limits the number of values.
        false => rows.longest = u64::from(page.num_values()),
    }
    Ok(rows.longest)
}

/// Counts the values per row in the encoding RLE of levels: runs of one level and bit-packed groups of eight levels, in any order.
fn count_levels(mut levels: &[u8], width: u32, mut values: u64, rows: &mut Longest) -> Result<(), ParquetError> {
    let bytes = width.div_ceil(8) as usize;
    while values > 0 {
        let (mut head, mut shift) = (0_u64, 0);
        loop {
            let (byte, rest) = levels.split_first().ok_or_else(cut_off)?;
            levels = rest;
            head |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
            if shift > 35 {
                return Err(cut_off());
            }
        }
        if head & 1 == 0 {
            let (level, rest) = levels.split_at_checked(bytes).ok_or_else(cut_off)?;
            let run = (head >> 1).min(values);
            rows.add(level.iter().all(|byte| *byte == 0), run);
            (levels, values) = (rest, values - run);
            if head >> 1 == 0 {
                return Err(cut_off());
            }
            continue;
        }
        let packed = usize::try_from(head >> 1).ok().and_then(|groups| groups.checked_mul(width as usize));
        // The last bit-packed group of a page may be truncated.
        let packed = packed.ok_or_else(cut_off)?.min(levels.len());
        let (group, rest) = levels.split_at_checked(packed).ok_or_else(cut_off)?;
        if group.is_empty() {
            return Err(cut_off());
        }
        let count = (group.len() as u64 * 8 / u64::from(width)).min(values);
        for at in 0..count {
            let bit = |bit: u64| group.get((bit / 8) as usize).is_some_and(|byte| byte >> (bit % 8) & 1 == 1);
            let from = at * u64::from(width);
            rows.add(!(from..from + u64::from(width)).any(bit), 1);
        }
        (levels, values) = (rest, values - count);
    }
    Ok(())
}

fn cut_off() -> ParquetError {
    ParquetError::EOF("a page's repetition levels are cut off".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_row_is_found_in_runs_and_in_packed_levels() {
        let longest = |levels: &[u8], width, values| {
            let mut rows = Longest::default();
            count_levels(levels, width, values, &mut rows).map(|()| rows.longest)
        };
        // Levels of one row that begins and continues for a billion values.
        assert_eq!(longest(&[2, 0, 0x80, 0xa8, 0xd6, 0xb9, 0x07, 1], 1, 1_000_000_001).unwrap(), 1_000_000_001);
        // Levels of ten rows with one value each.
        assert_eq!(longest(&[20, 0], 1, 10).unwrap(), 1);
        // Levels 0 1 1 0 1 0 0 0, bit-packed with two bits each.
        assert_eq!(longest(&[3, 0b0001_0100, 0b0000_0001], 2, 8).unwrap(), 3);
        for cut in [&[][..], &[2], &[3], &[0x80], &[0, 1], &[0xff; 9]] {
            assert!(longest(cut, 1, 8).is_err(), "{cut:?}");
        }
    }

    #[test]
    fn a_row_goes_on_in_the_next_page() {
        let mut rows = Longest::default();
        count_levels(&[2, 0, 10, 1], 1, 6, &mut rows).unwrap();
        assert_eq!(rows, Longest { row: 6, longest: 6 });
        rows.longest = rows.row;
        count_levels(&[8, 1, 4, 0], 1, 6, &mut rows).unwrap();
        assert_eq!(rows, Longest { row: 1, longest: 10 });
    }
}
