//! The list of work submitted to a device, in order: recorded once, compared with the next run of the same body, and
//! executed as one graph.

use crate::cuda::device_api::{CudaError, Driver, Graph, Launch, Product, Staging};

/// One operation of the device, with its addresses. The list stores parameters and uploaded bytes separately.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Op {
    /// Runs a kernel; its parameter is at offset `at` of [`List::params`].
    Launch { kernel: u32, launch: Launch, at: u32, bytes: u32 },
    /// Copies from the list's staging memory to the device.
    Upload { to: u64, bytes: u64, at: u64 },
    /// Fills device memory with zeros.
    Zero { to: u64, bytes: u64 },
    /// Copies device memory to device memory; the ranges do not overlap.
    Copy { from: u64, to: u64, bytes: u64 },
    /// A matrix product by cuBLAS.
    Product(Product),
    /// A buffer was created. An operation only for a driver that guards the memory around buffers.
    Born { at: u64, block: u64, bytes: u64 },
    /// A buffer was dropped; recorded only for a driver that guards the memory around buffers.
    Dropped { at: u64, block: u64, bytes: u64 },
}

/// The operations that a run of a body submitted.
#[derive(Clone, Debug, Default)]
pub(super) struct List {
    pub ops: Vec<Op>,
    /// Parameters of all kernel launches, each aligned to 8 bytes.
    pub params: Vec<u8>,
    /// Size of all uploads in bytes, each aligned to 16.
    pub staged: u64,
    /// Whether the body waited for the device, so that it cannot run as one graph.
    pub waited: bool,
}

const STAGED: u64 = 16;

impl Op {
    /// Executes an operation that needs no parameter and no uploaded bytes.
    pub(super) fn execute(&self, driver: &mut dyn Driver) -> Result<(), CudaError> {
        match *self {
            Op::Zero { to, bytes } => driver.zero(to, bytes as usize),
            Op::Copy { from, to, bytes } => driver.copy(from, to, bytes as usize),
            Op::Product(ref product) => driver.product(product),
            Op::Born { at, block, bytes } => driver.buffer_made(at, block, bytes),
            Op::Dropped { at, block, bytes } => driver.buffer_dropped(at, block, bytes),
            Op::Launch { .. } | Op::Upload { .. } => {
                Err(CudaError::Failed("a GPU operation was executed without its parameter or bytes".to_owned()))
            }
        }
    }
}

impl List {
    pub(super) fn launch(&mut self, kernel: u32, launch: Launch, params: &[u8]) {
        let at = self.params.len();
        self.params.extend_from_slice(params);
        self.params.resize(self.params.len().next_multiple_of(8), 0);
        self.ops.push(Op::Launch { kernel, launch, at: at as u32, bytes: params.len() as u32 });
    }

    pub(super) fn upload(&mut self, to: u64, bytes: u64) {
        self.ops.push(Op::Upload { to, bytes, at: self.staged });
        self.staged += bytes.next_multiple_of(STAGED);
    }

    /// Keeps the first `count` operations of the list.
    pub(super) fn truncate(&mut self, count: usize) {
        for op in self.ops.drain(count..).rev() {
            match op {
                Op::Launch { at, .. } => self.params.truncate(at as usize),
                Op::Upload { at, .. } => self.staged = at,
                Op::Zero { .. } | Op::Copy { .. } | Op::Product(_) | Op::Born { .. } | Op::Dropped { .. } => {}
            }
        }
    }

    /// Whether operation `number` of the list is this kernel launch.
    pub(super) fn is_launch(&self, number: usize, kernel: u32, launch: Launch, params: &[u8]) -> bool {
        match self.ops.get(number) {
            Some(&Op::Launch { kernel: k, launch: l, at, bytes }) => {
                k == kernel && l == launch && self.params[at as usize..][..bytes as usize] == *params
            }
            _ => false,
        }
    }

    /// The offset of an upload in the staging memory, if operation `number` of the list is this upload.
    pub(super) fn is_upload(&self, number: usize, to: u64, bytes: u64) -> Option<u64> {
        match self.ops.get(number) {
            Some(&Op::Upload { to: t, bytes: b, at }) if (t, b) == (to, bytes) => Some(at),
            _ => None,
        }
    }

    /// Executes all operations of the list, one by one.
    pub(super) fn issue(&self, driver: &mut dyn Driver, staging: Option<&Staging>) -> Result<(), CudaError> {
        self.ops.iter().try_for_each(|op| match *op {
            Op::Launch { kernel, launch, at, bytes } => {
                driver.launch(kernel, launch, &self.params[at as usize..][..bytes as usize])
            }
            Op::Upload { to, bytes, at } => match staging {
                Some(staging) => driver.upload_staged(to, staging, at as usize, bytes as usize),
                None => Err(CudaError::Failed("an upload to the GPU has no staging memory".to_owned())),
            },
            ref simple => simple.execute(driver),
        })
    }

    /// Creates a CUDA graph of the operations; None if they must be executed one by one.
    pub(super) fn capture(
        &self,
        driver: &mut dyn Driver,
        staging: Option<&Staging>,
    ) -> Result<Option<Box<dyn Graph>>, CudaError> {
        driver.capture(&mut |driver| self.issue(driver, staging))
    }

    /// Starts the CUDA graph of the operations, or executes them one by one if there is none.
    pub(super) fn replay(
        &self,
        graph: Option<&dyn Graph>,
        driver: &mut dyn Driver,
        staging: Option<&Staging>,
    ) -> Result<(), CudaError> {
        match graph {
            Some(graph) => graph.start(),
            None => self.issue(driver, staging),
        }
    }
}
