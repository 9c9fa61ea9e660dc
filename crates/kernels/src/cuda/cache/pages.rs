//! Pages of the key-value cache in device memory, allocated from larger buffers and returned to the pool when dropped.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::driver::{Buffer, CudaError, Device};
use super::super::rows::Result;

/// A pool of equally large pages.
#[derive(Debug)]
pub(super) struct Pages {
    device: Device,
    page_bytes: usize,
    stock: Mutex<Stock>,
}

#[derive(Debug, Default)]
struct Stock {
    /// Device addresses of the free pages.
    free: Vec<u64>,
    slabs: Vec<Buffer>,
    count: usize,
}

/// Maximum size in bytes of a slab, a buffer that is divided into pages; larger only if a single page is.
const SLAB_BYTES: usize = 256 << 20;

impl Pages {
    pub fn new(device: &Device, page_bytes: usize) -> Pages {
        Pages { device: device.clone(), page_bytes: page_bytes.next_multiple_of(256), stock: Mutex::default() }
    }

    pub fn bytes(&self) -> usize {
        self.stock().count * self.page_bytes
    }

    fn stock(&self) -> MutexGuard<'_, Stock> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes this many pages from the pool. If there is too little memory for all, takes none.
    pub fn take(self: &Arc<Self>, count: usize) -> Result<Vec<Page>> {
        let mut stock = self.stock();
        while stock.free.len() < count {
            self.grow(&mut stock, count)?;
        }
        let left = stock.free.len() - count;
        Ok(stock.free.split_off(left).into_iter().map(|address| Page { address, pages: self.clone() }).collect())
    }

    /// Enlarges the pool by half, but at least by the pages needed now and at most by a slab; by fewer pages
    /// if memory is scarce.
    fn grow(&self, stock: &mut Stock, needed: usize) -> Result<()> {
        let most = (SLAB_BYTES / self.page_bytes).max(1);
        let least = (needed - stock.free.len()).min(most);
        let mut count = (stock.count / 2).clamp(least.max(8.min(most)), most);
        let slab = loop {
            match self.device.alloc(count * self.page_bytes) {
                Err(CudaError::OutOfMemory { .. }) if count > 1 => count = count.div_ceil(2),
                slab => break slab?,
            }
        };
        // Push the addresses in descending order, so that the lowest ones are taken first.
        stock.free.extend((0..count).rev().map(|page| slab.pointer() + (page * self.page_bytes) as u64));
        stock.count += count;
        stock.slabs.push(slab);
        Ok(())
    }
}

/// The memory of one page; dropping the page returns it to the pool.
#[derive(Debug)]
pub(super) struct Page {
    address: u64,
    pages: Arc<Pages>,
}

impl Page {
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.pages.stock().free.push(self.address);
    }
}
