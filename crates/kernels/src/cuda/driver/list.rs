//! What was asked of a device, in order: recorded once, compared with the next run, and carried out as one graph.

use crate::cuda::device_api::{CudaError, Driver, Graph, Launch, Product, Staging};

/// One thing for the device to do, by addresses. Bytes of parameters and uploads lie beside the list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Op {
    /// Run a kernel with the parameter at `at` of [`List::params`].
    Launch { kernel: u32, launch: Launch, at: u32, bytes: u32 },
    /// Copy from the staging memory.
    Upload { to: u64, bytes: u64, at: u64 },
    /// Fill with zeros.
    Zero { to: u64, bytes: u64 },
    /// Copy within the device; the ranges do not overlap.
    Copy { from: u64, to: u64, bytes: u64 },
    /// cuBLAS.
    Product(Product),
    /// A buffer came to be. Work only for a driver that guards what lies around it.
    Born { at: u64, block: u64, bytes: u64 },
    /// A buffer was dropped; recorded only where it is work.
    Dropped { at: u64, block: u64, bytes: u64 },
}

/// What a run of a body asked for.
#[derive(Clone, Debug, Default)]
pub(super) struct List {
    pub ops: Vec<Op>,
    /// Parameters of launches, each aligned to 8 bytes.
    pub params: Vec<u8>,
    /// Bytes of the uploads, each aligned to 16.
    pub staged: u64,
    /// The body waited for the device, so that it cannot run as one graph.
    pub waited: bool,
}

const STAGED: u64 = 16;

impl Op {
    /// Carries out an op that has no bytes beside it.
    pub(super) fn carry_out(&self, driver: &mut dyn Driver) -> Result<(), CudaError> {
        match *self {
            Op::Zero { to, bytes } => driver.zero(to, bytes as usize),
            Op::Copy { from, to, bytes } => driver.copy(from, to, bytes as usize),
            Op::Product(ref product) => driver.product(product),
            Op::Born { at, block, bytes } => driver.buffer_made(at, block, bytes),
            Op::Dropped { at, block, bytes } => driver.buffer_dropped(at, block, bytes),
            Op::Launch { .. } | Op::Upload { .. } => Err(CudaError::Failed("an op without its bytes".to_owned())),
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

    /// Keep the first `count` ops.
    pub(super) fn truncate(&mut self, count: usize) {
        for op in self.ops.drain(count..).rev() {
            match op {
                Op::Launch { at, .. } => self.params.truncate(at as usize),
                Op::Upload { at, .. } => self.staged = at,
                Op::Zero { .. } | Op::Copy { .. } | Op::Product(_) | Op::Born { .. } | Op::Dropped { .. } => {}
            }
        }
    }

    /// Whether the op with this number is this launch.
    pub(super) fn is_launch(&self, number: usize, kernel: u32, launch: Launch, params: &[u8]) -> bool {
        match self.ops.get(number) {
            Some(&Op::Launch { kernel: k, launch: l, at, bytes }) => {
                k == kernel && l == launch && self.params[at as usize..][..bytes as usize] == *params
            }
            _ => false,
        }
    }

    /// Where the staging memory holds this upload, if the op with this number is it.
    pub(super) fn is_upload(&self, number: usize, to: u64, bytes: u64) -> Option<u64> {
        match self.ops.get(number) {
            Some(&Op::Upload { to: t, bytes: b, at }) if (t, b) == (to, bytes) => Some(at),
            _ => None,
        }
    }

    /// Carries out all ops, one by one.
    pub(super) fn issue(&self, driver: &mut dyn Driver, staging: Option<&Staging>) -> Result<(), CudaError> {
        self.ops.iter().try_for_each(|op| match *op {
            Op::Launch { kernel, launch, at, bytes } => {
                driver.launch(kernel, launch, &self.params[at as usize..][..bytes as usize])
            }
            Op::Upload { to, bytes, at } => match staging {
                Some(staging) => driver.upload_staged(to, staging, at as usize, bytes as usize),
                None => Err(CudaError::Failed("an upload without staging memory".to_owned())),
            },
            ref simple => simple.carry_out(driver),
        })
    }

    /// Makes a graph of the ops; None where they are carried out one by one.
    pub(super) fn capture(
        &self,
        driver: &mut dyn Driver,
        staging: Option<&Staging>,
    ) -> Result<Option<Box<dyn Graph>>, CudaError> {
        driver.capture(&mut |driver| self.issue(driver, staging))
    }

    /// Runs the graph that was made of the ops, or carries them out one by one.
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
