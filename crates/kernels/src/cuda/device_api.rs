//! The types shared by the callers and the drivers of a device: errors, device properties, and one trait, [`Driver`].
//! NVIDIA's driver implements it, and in test builds the emulator; the queue depends on neither. Addresses are trusted
//! here, because [`Device`](super::driver::Device) has checked them.

use std::fmt;

/// An error of a device; the variants correspond to what the caller can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaError {
    /// There is no room for a buffer, even after the pooled memory was freed. The device still works.
    OutOfMemory {
        /// Size of the buffer in bytes; 0 if the driver has no room for memory that a kernel itself needs.
        requested: u64,
        /// Bytes that live buffers hold.
        used: u64,
        /// Bytes that the device has, or may use.
        total: u64,
    },
    /// This build or machine cannot use such a device: no driver, no cuBLAS, no GPU, or no kernels in the build.
    Unavailable(String),
    /// Any other failure: the device's context is lost, and the process must end.
    Failed(String),
    /// The caller passed invalid arguments: a range outside of a buffer, an unknown kernel.
    Input(String),
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CudaError::OutOfMemory { requested: 0, used, total } => {
                write!(
                    f,
                    "out of device memory: no room for memory that a kernel itself needs, {used} of {total} bytes in use"
                )
            }
            CudaError::OutOfMemory { requested, used, total } => {
                write!(f, "out of device memory: {requested} bytes requested, {used} of {total} in use")
            }
            CudaError::Unavailable(why) | CudaError::Input(why) => f.write_str(why),
            CudaError::Failed(why) => write!(f, "the device failed: {why}"),
        }
    }
}

impl std::error::Error for CudaError {}

/// Properties of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Properties {
    /// The driver's name for the device.
    pub name: String,
    /// Compute capability: major and minor number.
    pub compute_capability: (u32, u32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// Maximum shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Memory of the device in bytes.
    pub memory_bytes: u64,
    /// Version of CUDA that the driver supports, as 1000 major + 10 minor; 0 in the emulator.
    pub driver_version: u32,
    /// Bytes of device memory in use after opening it, if no other process seems to use it: the driver's own
    /// memory for this process.
    pub taken_bytes: Option<u64>,
    /// Whether this is the emulator, which runs on the CPU.
    pub emulated: bool,
}

/// The number of blocks and threads of a kernel launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Number of blocks in x, y and z. A launch without blocks does nothing.
    pub grid: [u32; 3],
    /// Number of threads in a block: a multiple of 32, at most 1024.
    pub block: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared: u32,
}

/// The type of a buffer's elements, for kernels that support both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit IEEE floating point.
    F32,
    /// bfloat16: 8 bits of exponent.
    Bf16,
}

impl DType {
    /// Size of an element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 => 2,
        }
    }
}

/// When a matrix product runs, relative to the work around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// After all earlier work, and before all later work.
    #[default]
    InTurn,
    /// After all earlier work, possibly at the same time as the following products that are [`Order::Beside`].
    Aside,
    /// Possibly before the end of the latest product that is [`Order::Aside`].
    Beside,
}

/// A matrix product given by addresses. Strides are the distances between rows.
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
    pub order: Order,
}

/// A kernel of the module, found by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// Index that the driver launches the kernel by.
    pub kernel: u32,
    /// Size of the kernel's parameter in bytes, if known.
    pub param_bytes: Option<usize>,
}

/// Staging memory: host memory that the device copies from and to.
#[derive(Debug)]
pub(super) struct Staging {
    /// Address of the first byte; the driver allocated the memory and frees it.
    pub start: *mut u8,
    /// Size of the memory in bytes.
    pub bytes: usize,
    /// The driver's event after the last use of the memory, or null.
    pub event: *mut std::ffi::c_void,
}

// SAFETY: the pointers refer to objects that belong only to this value and to no thread.
unsafe impl Send for Staging {}

impl Staging {
    /// Reads the first `to.len()` bytes. No copy into this memory may be in progress.
    pub fn read(&self, to: &mut [u8]) {
        assert!(to.len() <= self.bytes, "a download from the GPU must lie within its staging memory");
        // SAFETY: the range is within the memory that this value owns, as just checked.
        unsafe { std::ptr::copy_nonoverlapping(self.start, to.as_mut_ptr(), to.len()) }
    }

    /// Overwrites a part of the memory. No copy from this memory may be in progress.
    pub fn fill(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.bytes, "an upload to the GPU must lie within its staging memory");
        // SAFETY: the range is within the memory that this value owns, as just checked.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at), bytes.len()) }
    }
}

/// Provides the memory pool with device memory, in segments.
pub(super) trait Source {
    /// Reserves a segment of `bytes` of device memory; None if there is no room.
    fn reserve(&mut self, bytes: u64) -> Result<Option<u64>, CudaError>;
    /// Gives a segment back to the driver. Kernels already submitted may still use its memory.
    fn release(&mut self, start: u64, bytes: u64);
    /// Makes the memory of all segments given back so far available to other users of the device.
    fn released(&mut self) {}
}

/// A device's driver, which executes submitted work in order.
pub(super) trait Driver: Source + fmt::Debug + Send {
    /// Makes this device the target of the calling thread's calls.
    fn enter(&self) -> Result<(), CudaError> {
        Ok(())
    }

    /// Number of guard bytes to keep free on both sides of each buffer, to detect writes out of bounds. If not 0, the
    /// driver is informed of each new and dropped buffer.
    fn guard(&self) -> u64 {
        0
    }

    /// Tells a driver with guard bytes that a buffer was created in this block of memory.
    fn buffer_made(&mut self, _at: u64, _block: u64, _bytes: u64) -> Result<(), CudaError> {
        Ok(())
    }

    /// Tells a driver with guard bytes that a buffer was dropped.
    fn buffer_dropped(&mut self, _at: u64, _block: u64, _bytes: u64) -> Result<(), CudaError> {
        Ok(())
    }

    /// Finds a kernel by its name.
    fn find(&mut self, kernel: &str) -> Result<Found, CudaError>;

    /// Starts a kernel; `params` holds the bytes of its parameter.
    fn launch(&mut self, kernel: u32, launch: Launch, params: &[u8]) -> Result<(), CudaError>;

    /// Computes a matrix product with cuBLAS, or the emulator's replacement.
    fn product(&mut self, product: &Product) -> Result<(), CudaError>;

    /// Fills device memory with zeros.
    fn zero(&mut self, to: u64, bytes: usize) -> Result<(), CudaError>;

    /// Copies device memory to device memory; the ranges do not overlap.
    fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError>;

    /// Copies bytes to the device; they may be overwritten as soon as this returns.
    fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError>;

    /// Copies a part of staging memory to the device.
    fn upload_staged(&mut self, to: u64, staging: &Staging, at: usize, bytes: usize) -> Result<(), CudaError>;

    /// Waits for all submitted work, then copies bytes from the device.
    fn download(&mut self, from: u64, to: &mut [u8]) -> Result<(), CudaError>;

    /// Copies from the device to staging memory; call `settle` before reading the staging memory.
    fn fetch(&mut self, from: u64, staging: &mut Staging, bytes: usize) -> Result<(), CudaError>;

    /// Waits for all submitted work.
    fn synchronize(&mut self) -> Result<(), CudaError>;

    /// Allocates host memory that the device can copy from and to.
    fn stage(&mut self, bytes: usize) -> Result<Staging, CudaError>;

    /// Frees staging memory. No copy from or to it may be in progress.
    fn unstage(&mut self, staging: Staging);

    /// Notes that the work submitted so far may copy from this staging memory, so that `settle` waits for it.
    fn used(&mut self, _staging: &mut Staging) -> Result<(), CudaError> {
        Ok(())
    }

    /// Waits until no copy from or to this staging memory is in progress.
    fn settle(&mut self, _staging: &Staging) -> Result<(), CudaError> {
        Ok(())
    }

    /// Starts a timer for the work submitted from now on.
    fn start_timer(&mut self) -> Result<Box<dyn Timer>, CudaError>;

    /// Creates a CUDA graph of the work that `work` submits, without executing it; None if this driver has no graphs.
    fn capture(&mut self, _work: &mut Work<'_>) -> Result<Option<Box<dyn Graph>>, CudaError> {
        Ok(None)
    }
}

/// A function that submits work to a driver.
pub(super) type Work<'w> = dyn FnMut(&mut dyn Driver) -> Result<(), CudaError> + 'w;

/// A CUDA graph: recorded work that is started as a whole.
pub(super) trait Graph: fmt::Debug + Send {
    /// Starts the work recorded in the graph.
    fn start(&self) -> Result<(), CudaError>;
}

/// A timer between two points in a device's work.
pub(super) trait Timer: fmt::Debug + Send {
    /// Stops the timer at the end of the work submitted so far.
    fn stop(&mut self) -> Result<(), CudaError>;
    /// Waits until the device has reached the second point; returns the seconds between both.
    fn seconds(&self) -> Result<f64, CudaError>;
}
