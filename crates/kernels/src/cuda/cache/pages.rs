//! Pages of device memory, allocated from larger buffers and returned when dropped.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::driver::{Buffer, CudaError, Device};
use super::super::rows::Result;

/// A pool of pages of one size.
#[derive(Debug)]
pub(super) struct Pages {
    device: Device,
    page_bytes: usize,
    stock: Mutex<Stock>,
}

#[derive(Debug, Default)]
struct Stock {
    /// Addresses of the free pages.
    free: Vec<u64>,
    slabs: Vec<Buffer>,
    count: usize,
}

/// Maximum size of a slab in bytes, unless a page is larger.
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

    /// Allocates this many pages. If there is too little memory for all, allocates none.
    pub fn take(self: &Arc<Self>, count: usize) -> Result<Vec<Page>> {
        let mut stock = self.stock();
        while stock.free.len() < count {
            self.grow(&mut stock, count)?;
        }
        let left = stock.free.len() - count;
        Ok(stock.free.split_off(left).into_iter().map(|address| Page { address, pages: self.clone() }).collect())
    }

    /// Adds half as many pages as there are, but at least the number needed now and at most a slab; fewer
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
        // The lowest addresses are used first.
        stock.free.extend((0..count).rev().map(|page| slab.pointer() + (page * self.page_bytes) as u64));
        stock.count += count;
        stock.slabs.push(slab);
        Ok(())
    }
}

/// The memory of one page.
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
