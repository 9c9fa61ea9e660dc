//! What the code that asks for work and a driver that carries it out both speak of: errors, what is known about a device,
//! and one trait, [`Driver`]. NVIDIA's implements it, and in builds for tests the emulator; the queue names neither.
//! Addresses are trusted here: [`Device`](super::driver::Device) has checked them.

use std::fmt;

/// An error of a device, by what its caller can do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaError {
    /// There is no room for a buffer, also after the pooled memory was given back. The device goes on working.
    OutOfMemory {
        /// Bytes of the buffer; 0: the driver has no room for what a kernel itself needs.
        requested: u64,
        /// Bytes that live buffers hold.
        used: u64,
        /// Bytes that the device has, or may use.
        total: u64,
    },
    /// This build or machine cannot run on such a device: no driver, no cuBLAS, no GPU, or no kernels in the build.
    Unavailable(String),
    /// Anything else: the device's context is lost, and the process must end.
    Failed(String),
    /// The caller asked for something that makes no sense: a range outside a buffer, an unknown kernel.
    Input(String),
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CudaError::OutOfMemory { requested: 0, used, total } => {
                write!(
                    f,
                    "out of device memory: no room for what a kernel itself needs, {used} bytes in use of {total}"
                )
            }
            CudaError::OutOfMemory { requested, used, total } => {
                write!(f, "out of device memory: {requested} bytes asked for, {used} in use of {total}")
            }
            CudaError::Unavailable(why) | CudaError::Input(why) => f.write_str(why),
            CudaError::Failed(why) => write!(f, "the device failed: {why}"),
        }
    }
}

impl std::error::Error for CudaError {}

/// What is known about a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Properties {
    /// As the driver names it.
    pub name: String,
    /// Major and minor number.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a block may have, at most.
    pub shared_bytes: u32,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Of CUDA that the driver supports, as 1000 major + 10 minor; 0 in the emulator.
    pub driver_version: u32,
    /// Bytes of its memory that are in use once it was opened, where it seems that nobody else uses it: what the driver
    /// takes for the process.
    pub taken_bytes: Option<u64>,
    /// This is the CPU.
    pub emulated: bool,
}

/// The threads of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks in x, y and z. A launch without blocks does nothing.
    pub grid: [u32; 3],
    /// Threads of a block: a multiple of 32, at most 1024.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

/// The type of a buffer's elements, where kernels exist for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit floating point.
    F32,
    /// bfloat16.
    Bf16,
}

impl DType {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 => 2,
        }
    }
}

/// A product by addresses. Strides are of rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Product {
    pub a: u64,
    pub b: u64,
    pub c: u64,
    pub rows: usize,
    pub columns: usize,
    pub inner: usize,
    pub stride_a: usize,
    pub stride_b: usize,
    pub stride_c: usize,
    pub transpose_a: bool,
    pub transpose_b: bool,
    pub operands: DType,
    pub result: DType,
    pub alpha: f32,
    pub beta: f32,
}

/// A kernel that was found by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// Its number.
    pub kernel: u32,
    /// Bytes of its parameter, where they are known.
    pub param_bytes: Option<usize>,
}

/// Host memory that the device copies from.
#[derive(Debug)]
pub(super) struct Staging {
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

/// Where the device's memory comes from, in segments.
pub(super) trait Source {
    /// Reserves `bytes` of device memory; None where there is no room for them.
    fn reserve(&mut self, bytes: u64) -> Result<Option<u64>, CudaError>;
    /// Gives a segment back. Work that uses it may still be under way.
    fn release(&mut self, start: u64, bytes: u64);
    /// Lets others use the segments that were given back.
    fn released(&mut self) {}
}

/// Carries work out, in the order in which it is asked for.
pub(super) trait Driver: Source + fmt::Debug + Send {
    /// Makes this device the one that the calling thread's calls go to.
    fn enter(&self) -> Result<(), CudaError> {
        Ok(())
    }

    /// Bytes to keep free on both sides of a buffer. Where there are any, the driver hears of each buffer that is dropped.
    fn guard(&self) -> u64 {
        0
    }

    /// Notes that a buffer came to be in this block.
    fn buffer_made(&mut self, _at: u64, _block: u64, _bytes: u64) -> Result<(), CudaError> {
        Ok(())
    }

    /// Notes that a buffer was dropped.
    fn buffer_dropped(&mut self, _at: u64, _block: u64, _bytes: u64) -> Result<(), CudaError> {
        Ok(())
    }

    /// Finds a kernel by its name.
    fn find(&mut self, kernel: &str) -> Result<Found, CudaError>;

    /// Starts a kernel that was found, with the bytes of its parameter.
    fn launch(&mut self, kernel: u32, launch: Launch, params: &[u8]) -> Result<(), CudaError>;

    /// Multiplies matrices.
    fn product(&mut self, product: &Product) -> Result<(), CudaError>;

    /// Fills with zeros.
    fn zero(&mut self, to: u64, bytes: usize) -> Result<(), CudaError>;

    /// Copies within the device; the ranges do not overlap.
    fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError>;

    /// Copies to the device; the bytes may be overwritten as soon as this returns.
    fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError>;

    /// Copies a part of staging memory to the device.
    fn upload_staged(&mut self, to: u64, staging: &Staging, at: usize, bytes: usize) -> Result<(), CudaError>;

    /// Waits for all that was asked, and copies from the device.
    fn download(&mut self, from: u64, to: &mut [u8]) -> Result<(), CudaError>;

    /// Copies from the device to staging memory, to be settled before it is read.
    fn fetch(&mut self, from: u64, staging: &mut Staging, bytes: usize) -> Result<(), CudaError>;

    /// Waits for all that was asked.
    fn synchronize(&mut self) -> Result<(), CudaError>;

    /// Allocates host memory that the device can copy from and to.
    fn stage(&mut self, bytes: usize) -> Result<Staging, CudaError>;

    /// Frees it. Nothing may be copying from it or to it.
    fn unstage(&mut self, staging: Staging);

    /// Notes that all that was asked may copy from it.
    fn used(&mut self, _staging: &mut Staging) -> Result<(), CudaError> {
        Ok(())
    }

    /// Waits until nothing copies from it or to it any more.
    fn settle(&mut self, _staging: &Staging) -> Result<(), CudaError> {
        Ok(())
    }

    /// Begins to time what is asked from now on.
    fn start_timer(&mut self) -> Result<Box<dyn Timer>, CudaError>;

    /// Makes a graph of what `work` asks for, which is not carried out; None where this driver has no graphs.
    fn capture(&mut self, _work: &mut Work<'_>) -> Result<Option<Box<dyn Graph>>, CudaError> {
        Ok(None)
    }
}

/// Asks a driver for some work.
pub(super) type Work<'w> = dyn FnMut(&mut dyn Driver) -> Result<(), CudaError> + 'w;

/// Work that is started as one.
pub(super) trait Graph: fmt::Debug + Send {
    /// Starts it.
    fn start(&self) -> Result<(), CudaError>;
}

/// Two moments in a device's work.
pub(super) trait Timer: fmt::Debug + Send {
    /// Notes the second one: the end of what was asked so far.
    fn stop(&mut self) -> Result<(), CudaError>;
    /// Waits for the second moment; returns the seconds between both.
    fn seconds(&self) -> Result<f64, CudaError>;
}
