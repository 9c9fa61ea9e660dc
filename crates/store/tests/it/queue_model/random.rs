//! Pseudorandom choices that a seed reproduces.

/// The pseudorandom number generator SplitMix64.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed ^ 0x5bf0_3635_dcd1_f867)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 to `end` (exclusive).
    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    pub(super) fn one_in(&mut self, number: usize) -> bool {
        self.below(number) == 0
    }

    pub(super) fn from(&mut self, low: i64, high: i64) -> i64 {
        low + self.below((high - low + 1) as usize) as i64
    }

    pub(super) fn pick<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        if of.is_empty() { None } else { Some(of[self.below(of.len())].clone()) }
    }
}
