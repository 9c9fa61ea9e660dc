//! A GPU as one stream of work: buffers from a pool, copies, kernels by name, cuBLAS, and bodies that run as graphs.
//!
//! All calls enqueue and return; only [`Device::download`] and [`Device::synchronize`] wait. Calls are to come from one
//! thread at a time. With the feature `cuda-emulator` the device is the CPU behind the same functions.

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

pub use super::device_api::{CudaError, DType, Launch, Properties};
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

/// A GPU. Clones are the same device.
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

/// Memory of a device; dropped, it goes back to the device's pool. That is safe at any time: work already asked for
/// comes before all work on what gets the memory next.
#[derive(Debug)]
pub struct Buffer {
    device: Device,
    block: u64,
    pointer: u64,
    bytes: u64,
}

impl Buffer {
    /// The device's address of its first byte, a multiple of 256.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// Its size, as it was asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many elements fit.
    pub fn count<T: Plain>(&self) -> usize {
        self.bytes as usize / size_of::<T>()
    }

    /// Whose memory it is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The device's address of an element, after a check that `count` elements lie there.
    ///
    /// # Errors
    /// [`CudaError::Input`]: they do not.
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

/// Elements on their way from the device.
#[derive(Debug)]
pub struct Fetch<T: Plain> {
    device: Device,
    staging: Option<Staging>,
    count: usize,
    element: PhantomData<T>,
}

impl<T: Plain> Fetch<T> {
    /// Wait until they are there; later work may go on.
    ///
    /// # Errors
    /// [`CudaError::Failed`]: work asked for before failed.
    pub fn wait(mut self) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::default(); self.count];
        if let Some(staging) = self.staging.take() {
            self.device.enter()?.land(staging, Some(plain::bytes_mut(&mut values)))?;
        }
        Ok(values)
    }
}

impl<T: Plain> Drop for Fetch<T> {
    fn drop(&mut self) {
        if let Some(staging) = self.staging.take() {
            let mut queue = self.device.queue();
            // An error shows with the next call.
            let _ = queue.bind().and_then(|()| queue.land(staging, None));
        }
    }
}

impl Device {
    /// How many devices there are.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`]: no driver.
    pub fn count() -> Result<usize, CudaError> {
        #[cfg(feature = "cuda-emulator")]
        if emulate() {
            return Ok(1);
        }
        super::nvidia::count()
    }

    /// What the driver tells of a device, without opening it.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`]: no driver, or no such device.
    pub fn describe(ordinal: usize) -> Result<Properties, CudaError> {
        #[cfg(feature = "cuda-emulator")]
        if emulate() {
            return super::emulated::Emulator::open(ordinal).map(|(_, properties)| properties);
        }
        super::nvidia::describe(ordinal)
    }

    /// Open a device: its context, one stream, the kernels, cuBLAS. Takes from milliseconds to seconds, the more where
    /// the driver compiles the kernels for the first time. With the feature `cuda-emulator` it is the emulator, unless
    /// `RLOOD_CUDA_EMULATOR=0`.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`]: there is no such device, or something that it needs is missing.
    pub fn open(ordinal: usize) -> Result<Device, CudaError> {
        #[cfg(feature = "cuda-emulator")]
        if emulate() {
            let (emulator, properties) = super::emulated::Emulator::open(ordinal)?;
            return Ok(Device::with(ordinal, Box::new(emulator), properties));
        }
        let (gpu, properties) = super::nvidia::Gpu::open(ordinal)?;
        Ok(Device::with(ordinal, Box::new(gpu), properties))
    }

    /// The emulator of a GPU whose blocks have no more shared memory than this.
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

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// What is known about it.
    pub fn properties(&self) -> &Properties {
        &self.0.properties
    }

    /// Memory whose contents are anything.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn alloc(&self, bytes: usize) -> Result<Buffer, CudaError> {
        let (pointer, block) = self.enter()?.alloc(bytes as u64)?;
        Ok(Buffer { device: self.clone(), block, pointer, bytes: bytes as u64 })
    }

    /// Memory filled with zeros.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn zeros(&self, bytes: usize) -> Result<Buffer, CudaError> {
        let buffer = self.alloc(bytes)?;
        self.clear(&buffer)?;
        Ok(buffer)
    }

    /// Fill a buffer with zeros.
    ///
    /// # Errors
    /// [`CudaError::Failed`].
    pub fn clear(&self, buffer: &Buffer) -> Result<(), CudaError> {
        self.own(buffer)?;
        if buffer.bytes == 0 {
            return Ok(());
        }
        self.enter()?.ask(Op::Zero { to: buffer.pointer, bytes: buffer.bytes })
    }

    /// A buffer of these values.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn upload<T: Plain>(&self, values: &[T]) -> Result<Buffer, CudaError> {
        let buffer = self.alloc(size_of_val(values))?;
        self.write(&buffer, 0, values)?;
        Ok(buffer)
    }

    /// Overwrite elements from `at` on. The values are copied before this returns.
    ///
    /// # Errors
    /// [`CudaError::Input`]: they do not fit.
    pub fn write<T: Plain>(&self, buffer: &Buffer, at: usize, values: &[T]) -> Result<(), CudaError> {
        self.own(buffer)?;
        let to = buffer.at::<T>(at, values.len())?;
        if values.is_empty() {
            return Ok(());
        }
        self.enter()?.upload(to, plain::bytes(values))
    }

    /// Wait for all work and read `count` elements from `at` on.
    ///
    /// # Errors
    /// [`CudaError::Input`]: there are not as many. [`CudaError::Failed`]: work asked for earlier failed.
    pub fn download<T: Plain>(&self, buffer: &Buffer, at: usize, count: usize) -> Result<Vec<T>, CudaError> {
        self.own(buffer)?;
        let from = buffer.at::<T>(at, count)?;
        let mut values = vec![T::default(); count];
        if count > 0 {
            self.enter()?.download(from, plain::bytes_mut(&mut values))?;
        }
        Ok(values)
    }

    /// Begin to read `count` elements from `at` on: as they are after all work asked for so far, whatever is asked for
    /// later. The host may do something else before it waits for them.
    ///
    /// # Errors
    /// [`CudaError::Input`]: there are not as many.
    pub fn fetch<T: Plain>(&self, buffer: &Buffer, at: usize, count: usize) -> Result<Fetch<T>, CudaError> {
        self.own(buffer)?;
        let from = buffer.at::<T>(at, count)?;
        let staging = match count {
            0 => None,
            _ => Some(self.enter()?.fetch(from, count * size_of::<T>())?),
        };
        Ok(Fetch { device: self.clone(), staging, count, element: PhantomData })
    }

    /// Copy bytes from one buffer to another, or within one where the ranges do not overlap.
    ///
    /// # Errors
    /// [`CudaError::Input`]: a range is not in its buffer, or they overlap.
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
        self.enter()?.ask(Op::Copy { from: source, to: target, bytes })
    }

    /// Run a kernel. Only what lies beside the kernels calls this, after checking that every address in `params` is
    /// that of a live buffer with room for what the kernel does there.
    ///
    /// # Errors
    /// [`CudaError::Input`]: no such kernel, or a parameter of another size.
    pub(super) fn launch<P: Params>(&self, kernel: &str, launch: Launch, params: &P) -> Result<(), CudaError> {
        self.enter()?.launch(kernel, launch, plain::param_bytes(params))
    }

    /// A product of matrices by cuBLAS.
    ///
    /// # Errors
    /// [`CudaError::Input`]: shapes that do not fit together or into their buffers.
    pub fn gemm(&self, gemm: &Gemm<'_>) -> Result<(), CudaError> {
        for matrix in [&gemm.a, &gemm.b, &gemm.c] {
            self.own(matrix.buffer)?;
        }
        match gemm.product()? {
            Some(product) => self.enter()?.ask(Op::Product(product)),
            None => Ok(()),
        }
    }

    /// Run a body whose work on the device is the same each time that it is run with this key, except for what it
    /// uploads. The first run notes what was asked; later ones only compare, and start all of it as one graph when the
    /// body ends. Where a run differs, what was held back is carried out at once and the rest as it comes, and the next
    /// run is compared with this one: the result is the same as without a graph in any case, the speed is not.
    ///
    /// The body must not wait for the device (it then runs as usual, without a graph), and lengths or positions that
    /// change from run to run have to be in memory, not in a launch. Buffers that it makes may outlive it.
    ///
    /// # Errors
    /// The body's, and [`CudaError::Input`] where a body is run within another.
    pub fn graph<T, E: From<CudaError>>(&self, key: u64, body: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.enter()?.begin(key)?;
        let abandon = Abandon(self);
        let value = body()?;
        self.enter()?.finish(key)?;
        std::mem::forget(abandon);
        Ok(value)
    }

    /// Whether bodies run as graphs; they do by default. Without, they run as usual.
    pub fn set_graphs(&self, on: bool) {
        self.queue().set_graphs(on);
    }

    /// Wait for all work.
    ///
    /// # Errors
    /// [`CudaError::Failed`]: some of it failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.enter()?.synchronize()
    }

    /// What its memory holds.
    pub fn memory(&self) -> Memory {
        self.queue().memory()
    }

    /// Let the peaks begin anew from what is in use.
    pub fn reset_peak(&self) {
        self.queue().reset_peak();
    }

    /// Refuse buffers beyond as many bytes in use, as if the device had no more.
    pub fn set_memory_limit(&self, bytes: Option<u64>) {
        self.queue().set_memory_limit(bytes);
    }

    /// Refuse, once, the buffer after `allocations` more: for tests of what then happens.
    pub fn inject_out_of_memory(&self, allocations: u64) {
        self.queue().inject_out_of_memory(allocations);
    }

    /// Give pooled memory that nothing uses back to the driver.
    pub fn trim(&self) {
        let mut queue = self.queue();
        if queue.bind().is_ok() {
            queue.trim();
        }
    }

    /// From now on, note how long each kernel takes on the device. Bodies run without graphs meanwhile, and the host's
    /// time between launches is not counted.
    pub fn start_profile(&self) {
        self.queue().start_profile();
    }

    /// What kernels took since [`start_profile`](Self::start_profile), the longest first; ends the profile.
    ///
    /// # Errors
    /// [`CudaError::Failed`]: some work failed.
    pub fn take_profile(&self) -> Result<Vec<Timing>, CudaError> {
        self.enter()?.take_profile()
    }

    /// How much was asked of it so far.
    pub fn counters(&self) -> Counters {
        self.queue().counters()
    }

    fn own(&self, buffer: &Buffer) -> Result<(), CudaError> {
        if Arc::ptr_eq(&self.0, &buffer.device.0) {
            return Ok(());
        }
        Err(CudaError::Input(format!("a buffer of {:?} was given to {self:?}", buffer.device)))
    }
}

/// Ends a body that failed or panicked, or whose end failed.
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
