//! A buffer aligned to cache lines, so that a vector never spans two lines.

use std::ops::{Deref, DerefMut};

use super::pack::zeros_in_huge_pages;

/// Number of values in a cache line.
const LINE: usize = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

/// The cache lines of the buffer, each of 16 f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Floats {
    lines: Vec<Line>,
}

impl Floats {
    /// Allocates zeros, on Linux in huge pages where the kernel has them.
    pub fn in_huge_pages(len: usize) -> Floats {
        Floats { lines: zeros_in_huge_pages(len.div_ceil(LINE)) }
    }

    /// Resizes the buffer to at least this many values; new ones are 0.
    pub fn resize(&mut self, len: usize) {
        self.lines.resize(len.div_ceil(LINE), Line::default());
    }

    /// Resizes the buffer to at least this many values, all 0.
    pub fn zeros(&mut self, len: usize) {
        self.lines.clear();
        self.resize(len);
    }

    /// Removes all values from the buffer; keeps its memory.
    pub fn clear(&mut self) {
        self.lines.clear();
    }

    /// Drops the first `len` values, a multiple of the line size; keeps the memory.
    pub fn drop_first(&mut self, len: usize) {
        self.lines.drain(..len / LINE);
    }

    /// Reserves memory in the buffer for this many values in total.
    pub fn reserve(&mut self, len: usize) {
        self.lines.reserve_exact(len.div_ceil(LINE).saturating_sub(self.lines.len()));
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // Safety: a line is an array of LINE values without padding.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * LINE) }
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        // Safety: a line is an array of LINE values without padding.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * LINE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_begin_at_a_line_and_new_ones_are_zero() {
        let mut floats = Floats::default();
        floats.resize(5);
        assert_eq!((floats.len(), floats.as_ptr() as usize % 64), (16, 0));
        floats.fill(3.0);
        floats.resize(17);
        assert_eq!((floats[15], floats[16], floats.len()), (3.0, 0.0, 32));
        floats[16] = 2.0;
        floats.drop_first(16);
        assert_eq!((floats[0], floats.len()), (2.0, 16));
        floats.zeros(16);
        assert_eq!(floats[..], [0.0; 16]);
    }
}
