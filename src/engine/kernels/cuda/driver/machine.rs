//! What carries things out: a GPU, or the emulator. Addresses are trusted here; [`Device`](super::Device) checked them.

#[cfg(feature = "cuda-emulator")]
use super::super::emulated::Emulator;
use super::super::nvidia::{Gpu, Graph, Stamp};
use super::CudaError;
use super::list::{List, Op};
use super::pool::Source;

/// A kernel that was found by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Found {
    /// Its number.
    pub kernel: u32,
    /// Bytes of its parameter, where they are known.
    pub param_bytes: Option<usize>,
}

/// Host memory that the device copies from.
#[derive(Debug)]
pub(in super::super) struct Staging {
    /// Its first byte; memory of a machine, given back to it.
    pub start: *mut u8,
    /// Its size.
    pub bytes: usize,
    /// The driver's event after its last use, or null.
    pub event: *mut std::ffi::c_void,
}

// SAFETY: the pointers are to what belongs to this value alone and to no thread.
unsafe impl Send for Staging {}

impl Staging {
    /// The first `to.len()` bytes. Nothing may be copying to it.
    pub fn read(&self, to: &mut [u8]) {
        assert!(to.len() <= self.bytes, "a download lies within its staging memory");
        // SAFETY: within the memory that this value owns, as just checked.
        unsafe { std::ptr::copy_nonoverlapping(self.start, to.as_mut_ptr(), to.len()) }
    }

    /// Overwrite a part of it. Nothing may be copying from it.
    pub fn fill(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.bytes, "an upload lies within its staging memory");
        // SAFETY: within the memory that this value owns, as just checked.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at), bytes.len()) }
    }
}

/// A moment in a device's work.
#[derive(Debug)]
pub(in super::super) enum Moment {
    Nvidia(Stamp),
    #[cfg(feature = "cuda-emulator")]
    Emulated(std::time::Instant),
}

/// A GPU or the emulator.
#[derive(Debug)]
pub(in super::super) enum Machine {
    Nvidia(Box<Gpu>),
    #[cfg(feature = "cuda-emulator")]
    Emulated(Emulator),
}

macro_rules! either {
    ($machine:expr, $m:ident => $body:expr) => {
        match $machine {
            Machine::Nvidia($m) => $body,
            #[cfg(feature = "cuda-emulator")]
            Machine::Emulated($m) => $body,
        }
    };
}

impl Machine {
    /// Make this device the one that the calling thread's calls go to.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        match self {
            Machine::Nvidia(gpu) => gpu.enter(),
            #[cfg(feature = "cuda-emulator")]
            Machine::Emulated(_) => Ok(()),
        }
    }

    /// Bytes to keep free on both sides of a buffer, whose drop then is an [`Op`].
    pub(super) fn guard(&self) -> u64 {
        match self {
            Machine::Nvidia(_) => 0,
            #[cfg(feature = "cuda-emulator")]
            Machine::Emulated(_) => super::super::emulated::GUARD,
        }
    }

    pub(super) fn find(&mut self, kernel: &str) -> Result<Found, CudaError> {
        either!(self, m => m.find(kernel))
    }

    /// Carry out an op of the list.
    pub(super) fn issue(&mut self, op: &Op, list: &List, staging: Option<&Staging>) -> Result<(), CudaError> {
        match *op {
            Op::Launch { kernel, launch, at, bytes } => {
                let params = &list.params[at as usize..][..bytes as usize];
                either!(self, m => m.launch(kernel, launch, params))
            }
            Op::Upload { to, bytes, at } => match staging {
                Some(staging) => either!(self, m => m.upload_staged(to, staging, at as usize, bytes as usize)),
                None => Err(CudaError::Failed("an upload without staging memory".to_owned())),
            },
            _ => self.simple(op),
        }
    }

    /// Carry out an op that needs no bytes.
    pub(super) fn simple(&mut self, op: &Op) -> Result<(), CudaError> {
        match *op {
            Op::Zero { to, bytes } => either!(self, m => m.zero(to, bytes as usize)),
            Op::Copy { from, to, bytes } => either!(self, m => m.copy(from, to, bytes as usize)),
            Op::Product(ref product) => either!(self, m => m.product(product)),
            Op::Born { .. } | Op::Dropped { .. } => match self {
                Machine::Nvidia(_) => Ok(()),
                #[cfg(feature = "cuda-emulator")]
                Machine::Emulated(emulator) => emulator.mark(op),
            },
            Op::Launch { .. } | Op::Upload { .. } => Err(CudaError::Failed("an op without its bytes".to_owned())),
        }
    }

    pub(super) fn launch(&mut self, kernel: u32, launch: super::Launch, params: &[u8]) -> Result<(), CudaError> {
        either!(self, m => m.launch(kernel, launch, params))
    }

    /// Copy to the device; the bytes may be overwritten as soon as this returns.
    pub(super) fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        either!(self, m => m.upload(to, bytes))
    }

    /// Wait for all that was asked, and copy from the device.
    pub(super) fn download(&mut self, from: u64, to: &mut [u8]) -> Result<(), CudaError> {
        either!(self, m => m.download(from, to))
    }

    /// Copy from the device to staging memory, to be settled before it is read.
    pub(super) fn fetch(&mut self, from: u64, staging: &mut Staging, bytes: usize) -> Result<(), CudaError> {
        either!(self, m => m.fetch(from, staging, bytes))
    }

    /// The end of what was asked so far.
    pub(super) fn moment(&mut self) -> Result<Moment, CudaError> {
        match self {
            Machine::Nvidia(gpu) => gpu.stamp().map(Moment::Nvidia),
            #[cfg(feature = "cuda-emulator")]
            Machine::Emulated(_) => Ok(Moment::Emulated(std::time::Instant::now())),
        }
    }

    /// Seconds between two moments.
    pub(super) fn seconds(&mut self, from: &Moment, to: &Moment) -> Result<f64, CudaError> {
        match (self, from, to) {
            (Machine::Nvidia(gpu), Moment::Nvidia(from), Moment::Nvidia(to)) => gpu.elapsed(from, to),
            #[cfg(feature = "cuda-emulator")]
            (_, Moment::Emulated(from), Moment::Emulated(to)) => Ok(to.duration_since(*from).as_secs_f64()),
            #[cfg(feature = "cuda-emulator")]
            _ => Err(CudaError::Failed("moments of another device".to_owned())),
        }
    }

    pub(super) fn synchronize(&mut self) -> Result<(), CudaError> {
        either!(self, m => m.synchronize())
    }

    /// Host memory for uploads of a graph.
    pub(super) fn stage(&mut self, bytes: usize) -> Result<Staging, CudaError> {
        either!(self, m => m.stage(bytes))
    }

    /// Give it back. Nothing may be copying from it.
    pub(super) fn unstage(&mut self, staging: Staging) {
        either!(self, m => m.unstage(staging))
    }

    /// Note that all that was asked may copy from it.
    pub(super) fn used(&mut self, staging: &mut Staging) -> Result<(), CudaError> {
        match self {
            Machine::Nvidia(gpu) => gpu.used(staging),
            #[cfg(feature = "cuda-emulator")]
            Machine::Emulated(_) => {
                let _ = staging;
                Ok(())
            }
        }
    }

    /// Wait until nothing copies from it any more.
    pub(super) fn settle(&mut self, staging: &Staging) -> Result<(), CudaError> {
        match self {
            Machine::Nvidia(gpu) => gpu.settle(staging),
            #[cfg(feature = "cuda-emulator")]
            Machine::Emulated(_) => {
                let _ = staging;
                Ok(())
            }
        }
    }

    /// Make a graph of a list; nothing where its ops are carried out one by one.
    pub(super) fn capture(&mut self, list: &List, staging: Option<&Staging>) -> Result<Option<Graph>, CudaError> {
        match self {
            Machine::Nvidia(gpu) => gpu.begin_capture()?,
            #[cfg(feature = "cuda-emulator")]
            Machine::Emulated(_) => return Ok(None),
        }
        let issued = self.issue_all(list, staging);
        match self {
            Machine::Nvidia(gpu) => {
                let graph = gpu.end_capture();
                issued.and(graph).map(Some)
            }
            #[cfg(feature = "cuda-emulator")]
            Machine::Emulated(_) => Ok(None),
        }
    }

    /// Carry out all ops of a list.
    pub(super) fn issue_all(&mut self, list: &List, staging: Option<&Staging>) -> Result<(), CudaError> {
        list.ops.iter().try_for_each(|op| self.issue(op, list, staging))
    }

    /// Run a graph that was made of this list.
    pub(super) fn replay(
        &mut self,
        graph: Option<&Graph>,
        list: &List,
        staging: Option<&Staging>,
    ) -> Result<(), CudaError> {
        match (&mut *self, graph) {
            (Machine::Nvidia(gpu), Some(graph)) => gpu.replay(graph),
            _ => self.issue_all(list, staging),
        }
    }
}

impl Source for Machine {
    fn reserve(&mut self, bytes: u64) -> Result<Option<u64>, CudaError> {
        either!(self, m => m.reserve(bytes))
    }

    fn release(&mut self, start: u64, bytes: u64) {
        either!(self, m => m.release(start, bytes))
    }

    fn released(&mut self) {
        match self {
            Machine::Nvidia(gpu) => gpu.released(),
            #[cfg(feature = "cuda-emulator")]
            Machine::Emulated(_) => {}
        }
    }
}
