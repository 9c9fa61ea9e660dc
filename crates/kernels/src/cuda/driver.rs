//! A GPU as one stream of work: buffers from a pool, copies, kernels by name, cuBLAS, and bodies that run as graphs.
//!
//! All calls enqueue work and return; only [`Device::download`] and [`Device::synchronize`] wait. Only one thread at a
//! time may make calls. With the feature `cuda-emulator` the CPU emulates the device behind the same functions.

pub mod gemm;
mod list;
pub(super) mod plain;
mod pool;
mod profile;
mod queue;
#[cfg(test)]
mod tests;

use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use super::device_api::{CudaError, DType, Launch, Order, Properties};
pub use gemm::{Gemm, Matrix};
pub(super) use plain::params;
pub use plain::{Params, Plain};
pub use pool::Memory;
pub use profile::Timing;
pub use queue::Counters;

#[cfg(test)]
pub(super) use tests::device;

use super::device_api::{Driver, Staging};
use list::Op;
use queue::Queue;

/// A GPU or the emulator. Clones refer to the same device.
#[derive(Clone)]
pub struct Device(Arc<Shared>);

struct Shared {
    ordinal: usize,
    properties: Properties,
    queue: Mutex<Queue>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{} ({})", self.0.ordinal, self.0.properties.name)
    }
}

/// Memory of a device. Dropping a buffer returns its memory to the device's pool. That is safe at any time: work
/// already submitted runs before all work on the next buffer in the same memory.
#[derive(Debug)]
pub struct Buffer {
    device: Device,
    block: u64,
    pointer: u64,
    bytes: u64,
}

impl Buffer {
    /// The device address of the buffer's first byte, a multiple of 256.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// The buffer's size in bytes, as requested.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of elements that fit into the buffer.
    pub fn count<T: Plain>(&self) -> usize {
        self.bytes as usize / size_of::<T>()
    }

    /// The device that owns the buffer's memory.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The device address of an element, after checking that the buffer holds `count` elements from there.
    ///
    /// # Errors
    /// [`CudaError::Input`] if the buffer holds fewer elements.
    pub fn at<T: Plain>(&self, element: usize, count: usize) -> Result<u64, CudaError> {
        let bytes = |elements: usize| (elements as u64).saturating_mul(size_of::<T>() as u64);
        self.range(bytes(element), bytes(count))
    }

    fn range(&self, from: u64, bytes: u64) -> Result<u64, CudaError> {
        if from.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(CudaError::Input(format!(
                "{bytes} bytes from {from} on are not in a buffer of {}",
                self.bytes
            )));
        }
        Ok(self.pointer + from)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.queue().drop_buffer(self.pointer, self.block, self.bytes);
    }
}

/// Elements of a buffer that are being copied to the host.
#[derive(Debug)]
pub struct Fetch<T: Plain> {
    device: Device,
    staging: Option<Staging>,
    count: usize,
    element: PhantomData<T>,
}

impl<T: Plain> Fetch<T> {
    /// Waits until the copied elements are on the host; work submitted later may still run.
    ///
    /// # Errors
    /// [`CudaError::Failed`] if earlier work failed.
    pub fn wait(mut self) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::default(); self.count];
        if let Some(staging) = self.staging.take() {
            self.device.enter()?.finish_download(staging, Some(plain::bytes_mut(&mut values)))?;
        }
        Ok(values)
    }
}

impl<T: Plain> Drop for Fetch<T> {
    fn drop(&mut self) {
        if let Some(staging) = self.staging.take() {
            let mut queue = self.device.queue();
            // An error is reported by the next call.
            let _ = queue.bind().and_then(|()| queue.finish_download(staging, None));
        }
    }
}

impl Device {
    /// Number of devices of this machine.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] if there is no driver.
    pub fn count() -> Result<usize, CudaError> {
        #[cfg(feature = "cuda-emulator")]
        if emulate() {
            return Ok(1);
        }
        super::nvidia::count()
    }

    /// Properties of a device, without opening it.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] if there is no driver, or no such device.
    pub fn describe(ordinal: usize) -> Result<Properties, CudaError> {
        #[cfg(feature = "cuda-emulator")]
        if emulate() {
            return super::emulated::Emulator::open(ordinal).map(|(_, properties)| properties);
        }
        super::nvidia::describe(ordinal)
    }

    /// Opens a device: its context, one stream, the kernels, cuBLAS. Takes milliseconds to seconds,
    /// longest if the driver compiles the kernels for the first time. With the feature `cuda-emulator` it
    /// opens the emulator, unless `RLOOD_CUDA_EMULATOR=0`.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] if there is no such device, or something that it needs is missing.
    pub fn open(ordinal: usize) -> Result<Device, CudaError> {
        #[cfg(feature = "cuda-emulator")]
        if emulate() {
            let (emulator, properties) = super::emulated::Emulator::open(ordinal)?;
            return Ok(Device::with(ordinal, Box::new(emulator), properties));
        }
        let (gpu, properties) = super::nvidia::Gpu::open(ordinal)?;
        Ok(Device::with(ordinal, Box::new(gpu), properties))
    }

    /// Opens the emulator of a GPU with this maximum of shared memory per block.
    #[cfg(all(test, feature = "cuda-emulator"))]
    pub(super) fn open_small(shared_bytes: u32) -> Result<Device, CudaError> {
        let (emulator, properties) = super::emulated::Emulator::open_small(shared_bytes)?;
        Ok(Device::with(0, Box::new(emulator), properties))
    }

    fn with(ordinal: usize, driver: Box<dyn Driver>, properties: Properties) -> Device {
        let queue = Mutex::new(Queue::new(driver, properties.memory_bytes));
        Device(Arc::new(Shared { ordinal, properties, queue }))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self) -> Result<MutexGuard<'_, Queue>, CudaError> {
        let mut queue = self.queue();
        queue.enter()?;
        Ok(queue)
    }

    /// Index of the device.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// Properties of the device.
    pub fn properties(&self) -> &Properties {
        &self.0.properties
    }

    /// Allocates memory without initializing it.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if there is no room.
    pub fn alloc(&self, bytes: usize) -> Result<Buffer, CudaError> {
        let (pointer, block) = self.enter()?.alloc(bytes as u64)?;
        Ok(Buffer { device: self.clone(), block, pointer, bytes: bytes as u64 })
    }

    /// Allocates memory filled with zeros.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if there is no room.
    pub fn zeros(&self, bytes: usize) -> Result<Buffer, CudaError> {
        let buffer = self.alloc(bytes)?;
        self.clear(&buffer)?;
        Ok(buffer)
    }

    /// Fills a buffer with zeros.
    ///
    /// # Errors
    /// [`CudaError::Failed`] if the device failed.
    pub fn clear(&self, buffer: &Buffer) -> Result<(), CudaError> {
        self.own(buffer)?;
        if buffer.bytes == 0 {
            return Ok(());
        }
        self.enter()?.submit(Op::Zero { to: buffer.pointer, bytes: buffer.bytes })
    }

    /// Creates a buffer with these values.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if there is no room.
    pub fn upload<T: Plain>(&self, values: &[T]) -> Result<Buffer, CudaError> {
        let buffer = self.alloc(size_of_val(values))?;
        self.write(&buffer, 0, values)?;
        Ok(buffer)
    }

    /// Overwrites elements from `at` on. The values are copied before this returns.
    ///
    /// # Errors
    /// [`CudaError::Input`] if the values do not fit into the buffer.
    pub fn write<T: Plain>(&self, buffer: &Buffer, at: usize, values: &[T]) -> Result<(), CudaError> {
        self.own(buffer)?;
        let to = buffer.at::<T>(at, values.len())?;
        if values.is_empty() {
            return Ok(());
        }
        self.enter()?.upload(to, plain::bytes(values))
    }

    /// Waits for all work and reads `count` elements from `at` on.
    ///
    /// # Errors
    /// [`CudaError::Input`] if the buffer has fewer elements. [`CudaError::Failed`] if earlier work failed.
    pub fn download<T: Plain>(&self, buffer: &Buffer, at: usize, count: usize) -> Result<Vec<T>, CudaError> {
        self.own(buffer)?;
        let from = buffer.at::<T>(at, count)?;
        let mut values = vec![T::default(); count];
        if count > 0 {
            self.enter()?.download(from, plain::bytes_mut(&mut values))?;
        }
        Ok(values)
    }

    /// Starts to read `count` elements from `at` on, as they are after all work submitted so far; later work does not
    /// affect them. The host may do something else before it waits.
    ///
    /// # Errors
    /// [`CudaError::Input`] if the buffer has fewer elements.
    pub fn fetch<T: Plain>(&self, buffer: &Buffer, at: usize, count: usize) -> Result<Fetch<T>, CudaError> {
        self.own(buffer)?;
        let from = buffer.at::<T>(at, count)?;
        let staging = match count {
            0 => None,
            _ => Some(self.enter()?.fetch(from, count * size_of::<T>())?),
        };
        Ok(Fetch { device: self.clone(), staging, count, element: PhantomData })
    }

    /// Copies bytes from one buffer to another, or within one if the ranges do not overlap.
    ///
    /// # Errors
    /// [`CudaError::Input`] if a range is outside of its buffer, or the ranges overlap.
    pub fn copy(
        &self,
        from: &Buffer,
        from_byte: usize,
        to: &Buffer,
        to_byte: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        self.own(from)?;
        self.own(to)?;
        let bytes = bytes as u64;
        let source = from.range(from_byte as u64, bytes)?;
        let target = to.range(to_byte as u64, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        if source < target + bytes && target < source + bytes {
            return Err(CudaError::Input(format!("a copy of {bytes} bytes onto itself")));
        }
        self.enter()?.submit(Op::Copy { from: source, to: target, bytes })
    }

    /// Runs a kernel. Only the host functions of the kernels call this, after checking that every address in `params`
    /// is that of a live buffer with room for the kernel's accesses.
    ///
    /// # Errors
    /// [`CudaError::Input`] if there is no such kernel, or the parameter has another size.
    pub(super) fn launch<P: Params>(&self, kernel: &str, launch: Launch, params: &P) -> Result<(), CudaError> {
        self.enter()?.launch(kernel, launch, plain::param_bytes(params))
    }

    /// Computes a matrix product with cuBLAS.
    ///
    /// # Errors
    /// [`CudaError::Input`] if the shapes do not match each other or their buffers.
    pub fn gemm(&self, gemm: &Gemm<'_>) -> Result<(), CudaError> {
        for matrix in [&gemm.a, &gemm.b, &gemm.c] {
            self.own(matrix.buffer)?;
        }
        match gemm.product()? {
            Some(product) => self.enter()?.submit(Op::Product(product)),
            None => Ok(()),
        }
    }

    /// Runs a body that submits the same work each time it runs with this key, except for the content of its uploads.
    /// The first run records the work. Later runs only compare, and start all of it as one graph when the body ends. If
    /// a run differs, the work held back so far is executed immediately and the rest as it is submitted, and the next
    /// run is compared with this one. The result is always the same as without a graph; only the speed differs.
    ///
    /// The body must not wait for the device (otherwise it runs without a graph). Lengths or positions that change from
    /// run to run must be in memory, not in a launch. Buffers that it creates may outlive it.
    ///
    /// # Errors
    /// The body's errors, and [`CudaError::Input`] if a body runs within another.
    pub fn graph<T, E: From<CudaError>>(&self, key: u64, body: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.enter()?.begin(key)?;
        let abandon = Abandon(self);
        let value = body()?;
        self.enter()?.finish(key)?;
        std::mem::forget(abandon);
        Ok(value)
    }

    /// Sets whether bodies run as graphs, which is the default. Otherwise their work is executed as submitted.
    pub fn set_graphs(&self, on: bool) {
        self.queue().set_graphs(on);
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// [`CudaError::Failed`] if some of it failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.enter()?.synchronize()
    }

    /// The use of the device's memory.
    pub fn memory(&self) -> Memory {
        self.queue().memory()
    }

    /// Resets the peaks to the current use.
    pub fn reset_peak(&self) {
        self.queue().reset_peak();
    }

    /// Sets a limit on the bytes in use; larger allocations fail as if the device had no more memory.
    pub fn set_memory_limit(&self, bytes: Option<u64>) {
        self.queue().set_memory_limit(bytes);
    }

    /// Makes one allocation fail, after `allocations` successful ones, for tests.
    pub fn inject_out_of_memory(&self, allocations: u64) {
        self.queue().inject_out_of_memory(allocations);
    }

    /// Returns unused pooled memory to the driver.
    pub fn trim(&self) {
        let mut queue = self.queue();
        if queue.bind().is_ok() {
            queue.trim();
        }
    }

    /// Starts to measure how long each kernel runs on the device. Meanwhile bodies run without graphs. The host's time
    /// between launches is not counted.
    pub fn start_profile(&self) {
        self.queue().start_profile();
    }

    /// Ends the profile; returns the time of each kernel since
    /// [`start_profile`](Self::start_profile), the longest first.
    ///
    /// # Errors
    /// [`CudaError::Failed`] if some work failed.
    pub fn take_profile(&self) -> Result<Vec<Timing>, CudaError> {
        self.enter()?.take_profile()
    }

    /// Counts of the submitted work so far.
    pub fn counters(&self) -> Counters {
        self.queue().counters()
    }

    fn own(&self, buffer: &Buffer) -> Result<(), CudaError> {
        if Arc::ptr_eq(&self.0, &buffer.device.0) {
            return Ok(());
        }
        Err(CudaError::Input(format!("a buffer of {:?} was passed to {self:?}", buffer.device)))
    }
}

/// Cleans up after a body that failed or panicked, or whose end failed.
struct Abandon<'a>(&'a Device);

impl Drop for Abandon<'_> {
    fn drop(&mut self) {
        self.0.queue().abandon();
    }
}

#[cfg(feature = "cuda-emulator")]
fn emulate() -> bool {
    std::env::var_os("RLOOD_CUDA_EMULATOR").is_none_or(|value| value != "0")
}
