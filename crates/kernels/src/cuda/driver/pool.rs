//! Manages device memory. The driver provides it in segments, from which blocks are allocated; a freed block is merged
//! with free neighbors. All work is on one stream, so the memory of a block can be reused as soon as
//! the block is dropped.
//!
//! The state depends only on the sequence of calls: equal training steps get equal addresses, as CUDA graphs require.

use std::collections::{BTreeMap, BTreeSet};

use crate::cuda::device_api::{CudaError, Source};

/// Granularity and alignment of memory blocks, in bytes.
const GRAIN: u64 = 512;
/// Blocks up to this size in bytes come from their own segments, so that a small long-lived block does not
/// split a large segment.
const SMALL: u64 = 1 << 20;
const SMALL_SEGMENT: u64 = 8 << 20;
/// Minimum and maximum size in bytes of a segment for large blocks; between them, its size is 1/16 of
/// the memory already reserved.
const LARGE_SEGMENT: [u64; 2] = [32 << 20, 1 << 30];
/// Granularity of memory segments in bytes: the page size of a GPU.
const PAGE: u64 = 2 << 20;

/// Memory segments of the driver, and their free parts.
#[derive(Debug, Default)]
struct Arena {
    segments: BTreeMap<u64, u64>,
    free: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl Arena {
    fn insert(&mut self, start: u64, bytes: u64) {
        self.free.insert(start, bytes);
        self.by_size.insert((bytes, start));
    }

    fn remove(&mut self, start: u64, bytes: u64) {
        self.free.remove(&start);
        self.by_size.remove(&(bytes, start));
    }

    /// Takes a block of `bytes` from the smallest free part that holds it; from the first one if
    /// several are equally small.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let (size, start) = *self.by_size.range((bytes, 0)..).next()?;
        self.remove(start, size);
        if size > bytes {
            self.insert(start + bytes, size - bytes);
        }
        Some(start)
    }

    /// Takes the block of memory at exactly this address, if it is free.
    fn take_at(&mut self, start: u64, bytes: u64) -> bool {
        let Some((&from, &size)) = self.free.range(..=start).next_back() else { return false };
        if start + bytes > from + size {
            return false;
        }
        self.remove(from, size);
        if start > from {
            self.insert(from, start - from);
        }
        if from + size > start + bytes {
            self.insert(start + bytes, from + size - start - bytes);
        }
        true
    }

    fn give(&mut self, mut start: u64, mut bytes: u64) {
        let Some((&first, &length)) = self.segments.range(..=start).next_back() else { return };
        if let Some((&from, &size)) = self.free.range(first..start).next_back()
            && from + size == start
        {
            self.remove(from, size);
            start = from;
            bytes += size;
        }
        if start + bytes < first + length
            && let Some(&size) = self.free.get(&(start + bytes))
        {
            self.remove(start + bytes, size);
            bytes += size;
        }
        self.insert(start, bytes);
    }

    fn add(&mut self, start: u64, bytes: u64) {
        self.segments.insert(start, bytes);
        self.insert(start, bytes);
    }

    /// Removes and returns the segments in which no block is in use.
    fn whole(&mut self) -> Vec<(u64, u64)> {
        let whole: Vec<(u64, u64)> = self
            .segments
            .iter()
            .filter(|(start, bytes)| self.free.get(start) == Some(bytes))
            .map(|(&s, &b)| (s, b))
            .collect();
        for &(start, bytes) in &whole {
            self.segments.remove(&start);
            self.remove(start, bytes);
        }
        whole
    }
}

/// The use of a device's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Size of all buffers in use.
    pub used: u64,
    /// Peak of `used` since [`reset_peak`](super::Device::reset_peak).
    pub peak: u64,
    /// Memory reserved from the driver: buffers in use, and memory kept for later ones.
    pub reserved: u64,
    /// Peak of `reserved` since [`reset_peak`](super::Device::reset_peak).
    pub reserved_peak: u64,
    /// Total memory of the device in bytes.
    pub total: u64,
}

/// The memory pool of a device.
#[derive(Debug)]
pub(super) struct Pool {
    small: Arena,
    large: Arena,
    memory: Memory,
    limit: Option<u64>,
}

impl Pool {
    pub(super) fn new(total: u64) -> Pool {
        let memory = Memory { total, ..Memory::default() };
        Pool { small: Arena::default(), large: Arena::default(), memory, limit: None }
    }

    /// The size of the memory block for a buffer of `bytes`; None if it overflows.
    pub(super) fn block(bytes: u64) -> Option<u64> {
        bytes.max(1).checked_next_multiple_of(GRAIN)
    }

    pub(super) fn memory(&self) -> Memory {
        Memory { total: self.total(), ..self.memory }
    }

    fn total(&self) -> u64 {
        self.limit.map_or(self.memory.total, |limit| limit.min(self.memory.total))
    }

    pub(super) fn reset_peak(&mut self) {
        self.memory.peak = self.memory.used;
        self.memory.reserved_peak = self.memory.reserved;
    }

    pub(super) fn set_limit(&mut self, limit: Option<u64>) {
        self.limit = limit;
    }

    fn arena(&mut self, block: u64) -> &mut Arena {
        if block <= SMALL { &mut self.small } else { &mut self.large }
    }

    fn count(&mut self, block: u64) {
        self.memory.used += block;
        self.memory.peak = self.memory.peak.max(self.memory.used);
    }

    fn over_limit(&self, block: u64) -> bool {
        self.limit.is_some_and(|limit| self.memory.used.saturating_add(block) > limit)
    }

    /// Takes a memory block, from the free parts or from a new segment.
    pub(super) fn take(&mut self, block: u64, source: &mut dyn Source) -> Result<u64, CudaError> {
        if self.over_limit(block) {
            return Err(self.full(block));
        }
        let start = match self.arena(block).take(block) {
            Some(start) => start,
            None => {
                self.grow(block, source)?;
                self.arena(block).take(block).expect("the memory pool has just added a segment that holds the block")
            }
        };
        self.count(block);
        Ok(start)
    }

    /// Takes the memory block at this address, if it is free.
    pub(super) fn take_at(&mut self, start: u64, block: u64) -> bool {
        let taken = !self.over_limit(block) && self.arena(block).take_at(start, block);
        if taken {
            self.count(block);
        }
        taken
    }

    pub(super) fn give(&mut self, start: u64, block: u64) {
        self.memory.used -= block;
        self.arena(block).give(start, block);
    }

    /// Adds a segment that holds the block: of the usual size, or of the block's own size after unused
    /// segments were given back.
    fn grow(&mut self, block: u64, source: &mut dyn Source) -> Result<(), CudaError> {
        let exact = block.next_multiple_of(PAGE);
        let usual = match block <= SMALL {
            true => SMALL_SEGMENT,
            false => (self.memory.reserved / 16).clamp(LARGE_SEGMENT[0], LARGE_SEGMENT[1]).next_multiple_of(PAGE),
        };
        let usual = exact.max(usual);
        let mut found = source.reserve(usual)?.map(|start| (start, usual));
        if found.is_none() {
            self.trim_all(source);
            for bytes in [usual, exact] {
                if found.is_none() {
                    found = source.reserve(bytes)?.map(|start| (start, bytes));
                }
            }
        }
        let (start, bytes) = found.ok_or_else(|| self.full(block))?;
        self.memory.reserved += bytes;
        self.memory.reserved_peak = self.memory.reserved_peak.max(self.memory.reserved);
        self.arena(block).add(start, bytes);
        Ok(())
    }

    fn full(&self, block: u64) -> CudaError {
        CudaError::OutOfMemory { requested: block, used: self.memory.used, total: self.total() }
    }

    /// Gives segments of large blocks back to the driver if none of their blocks is in use.
    pub(super) fn trim(&mut self, source: &mut dyn Source) {
        let whole = self.large.whole();
        self.give_back(whole, source);
    }

    /// Gives all segments back to the driver in which no block is in use, including those of small blocks.
    pub(super) fn trim_all(&mut self, source: &mut dyn Source) {
        let whole = self.small.whole().into_iter().chain(self.large.whole()).collect();
        self.give_back(whole, source);
    }

    fn give_back(&mut self, segments: Vec<(u64, u64)>, source: &mut dyn Source) {
        if segments.is_empty() {
            return;
        }
        for (start, bytes) in segments {
            source.release(start, bytes);
            self.memory.reserved -= bytes;
        }
        source.released();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fake driver that hands out consecutive addresses, up to a number of bytes.
    struct Fake {
        next: u64,
        left: u64,
    }

    impl Source for Fake {
        fn reserve(&mut self, bytes: u64) -> Result<Option<u64>, CudaError> {
            if bytes > self.left {
                return Ok(None);
            }
            self.left -= bytes;
            self.next += bytes;
            Ok(Some(self.next - bytes))
        }
        fn release(&mut self, _: u64, bytes: u64) {
            self.left += bytes;
        }
        fn released(&mut self) {}
    }

    fn pool(total: u64) -> (Pool, Fake) {
        (Pool::new(total), Fake { next: 1 << 30, left: total })
    }

    #[test]
    fn equal_calls_get_equal_addresses() {
        let (mut pool, mut fake) = pool(1 << 30);
        let kept = pool.take(512, &mut fake).unwrap();
        let mut step = || {
            let sizes = [512, 2048, 3 << 20, 512, 1 << 20, 5 << 20];
            let blocks: Vec<u64> = sizes.iter().map(|&size| pool.take(size, &mut fake).unwrap()).collect();
            for i in [3, 0, 5, 1, 2, 4] {
                pool.give(blocks[i], sizes[i]);
            }
            blocks
        };
        let first = step();
        assert_eq!(first, step());
        assert_eq!(first, step());
        assert!(!first.contains(&kept));
    }

    #[test]
    fn live_blocks_never_overlap_and_freed_neighbors_join() {
        let (mut pool, mut fake) = pool(1 << 30);
        let mut live: Vec<(u64, u64)> = Vec::new();
        let mut state = 7_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for _ in 0..4000 {
            if live.len() > 40 || (!live.is_empty() && random(2) == 0) {
                let (start, block) = live.swap_remove(random(live.len() as u64) as usize);
                pool.give(start, block);
            } else {
                let scale = 1 << random(13);
                let block = Pool::block(1 + random(2000) * scale).unwrap();
                let start = pool.take(block, &mut fake).unwrap();
                assert_eq!(start % GRAIN, 0);
                assert!(live.iter().all(|&(from, size)| start + block <= from || from + size <= start));
                live.push((start, block));
            }
            assert_eq!(pool.memory().used, live.iter().map(|(_, block)| block).sum::<u64>());
        }
        for (start, block) in live {
            pool.give(start, block);
        }
        pool.trim(&mut fake);
        assert!(pool.memory().reserved > 0 && pool.memory().reserved.is_multiple_of(SMALL_SEGMENT));
        pool.trim_all(&mut fake);
        assert_eq!(pool.memory().reserved, 0);
        assert_eq!(fake.left, 1 << 30);
    }

    #[test]
    fn a_block_is_taken_at_its_address_only_while_it_is_free() {
        let (mut pool, mut fake) = pool(1 << 30);
        let a = pool.take(1024, &mut fake).unwrap();
        pool.give(a, 1024);
        assert!(pool.take_at(a + 512, 512));
        assert!(!pool.take_at(a, 1024));
        assert!(pool.take_at(a, 512));
        pool.give(a, 512);
        pool.give(a + 512, 512);
        assert_eq!(pool.take(1024, &mut fake).unwrap(), a);
    }

    #[test]
    fn unused_segments_are_returned_before_an_allocation_fails() {
        let (mut pool, mut fake) = pool(64 << 20);
        let a = pool.take(40 << 20, &mut fake).unwrap();
        assert!(matches!(pool.take(30 << 20, &mut fake), Err(CudaError::OutOfMemory { requested, used, total })
            if requested == 30 << 20 && used == 40 << 20 && total == 64 << 20));
        pool.give(a, 40 << 20);
        pool.take(50 << 20, &mut fake).unwrap();
        assert_eq!(pool.memory().reserved, 50 << 20);
        assert_eq!(pool.memory().reserved_peak, 50 << 20);
    }

    #[test]
    fn a_limit_is_kept_to_the_byte_and_the_peak_is_remembered() {
        let (mut pool, mut fake) = pool(64 << 20);
        pool.set_limit(Some(2048));
        let a = pool.take(1024, &mut fake).unwrap();
        let b = pool.take(1024, &mut fake).unwrap();
        assert!(matches!(pool.take(512, &mut fake), Err(CudaError::OutOfMemory { total: 2048, .. })));
        pool.give(a, 1024);
        pool.take(512, &mut fake).unwrap();
        assert_eq!((pool.memory().used, pool.memory().peak), (1536, 2048));
        pool.reset_peak();
        pool.give(b, 1024);
        assert_eq!((pool.memory().used, pool.memory().peak), (512, 1536));
    }
}
