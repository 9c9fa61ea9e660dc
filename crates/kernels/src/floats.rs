//! A buffer that begins at a cache line, so that a vector never lies across two.

use std::ops::{Deref, DerefMut};

/// Values of a line.
const LINE: usize = 16;

#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

/// Whole lines of f32.
#[derive(Clone, Debug, Default)]
pub(super) struct Floats {
    lines: Vec<Line>,
}

impl Floats {
    /// At least so many values; new ones are 0.
    pub fn resize(&mut self, len: usize) {
        self.lines.resize(len.div_ceil(LINE), Line::default());
    }

    /// At least so many values, all 0.
    pub fn zeros(&mut self, len: usize) {
        self.lines.clear();
        self.resize(len);
    }

    /// Forget all; the memory stays.
    pub fn clear(&mut self) {
        self.lines.clear();
    }

    /// Drop the first so many values, whole lines of them; the memory stays.
    pub fn drop_first(&mut self, len: usize) {
        self.lines.drain(..len / LINE);
    }

    /// Make room for so many in all.
    pub fn reserve(&mut self, len: usize) {
        self.lines.reserve_exact(len.div_ceil(LINE).saturating_sub(self.lines.len()));
    }
}

impl Deref for Floats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // Safety: a line is so many values side by side.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * LINE) }
    }
}

impl DerefMut for Floats {
    fn deref_mut(&mut self) -> &mut [f32] {
        // Safety: a line is so many values side by side.
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
