//! A GPU behind NVIDIA's driver and cuBLAS, both looked up when the first device is opened.
//!
//! One stream of its own, no events but those of staging memory, and the driver's pool keeps what it once had. Calls of
//! the driver may come from any thread after [`Gpu::enter`], from one at a time.
//!
//! Longer than other files: all calls of the driver and of cuBLAS, and with them their `unsafe`, stand in this one place.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::ptr;

use cudarc::cublas::{result as blas, sys as blas_sys};
use cudarc::driver::sys::{CUdevice_attribute, CUfunction_attribute, CUresult};
use cudarc::driver::{result, sys};

use super::driver::gemm::{DType, Product};
use super::driver::list::Launch;
use super::driver::machine::{Found, Staging};
use super::driver::{CudaError, Properties};
use crate::spec::footprint::CUDA_KEPT_FREE_BYTES;

/// Bytes where the driver expects a module.
#[repr(C, align(64))]
struct Image<T: ?Sized>(T);

/// The kernels for several GPUs, of which the driver takes what fits, or compiles their PTX; empty in a build without nvcc.
static KERNELS: &Image<[u8]> = &Image(*include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin")));
/// Bytes of pinned memory that uploads go through, a piece at a time.
const PIECE_BYTES: usize = 8 << 20;
const PIECES: usize = 4;
/// Bytes of pinned memory that downloads go through, a piece at a time.
const LANDING_BYTES: usize = 4 << 20;
/// What NVIDIA recommends for Hopper; a fixed address, as graphs need.
const WORKSPACE_BYTES: usize = 32 << 20;
/// What a process takes of a GPU by opening it is less; where more is taken, others use it.
const MOST_TAKEN_BYTES: u64 = 2 << 30;
/// Dynamic shared memory that a kernel may have without asking.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;
/// The driver that is needed: the oldest that has all functions called here (cuEventElapsedTime_v2 is CUDA 12.8's), and of
/// the compiler's major version, whose machine code an older one does not load.
const OLDEST_DRIVER: c_int = {
    let compiled = match option_env!("RLOOD_CUDA_MAJOR") {
        Some(major) => match c_int::from_str_radix(major, 10) {
            Ok(major) => 1000 * major,
            Err(_) => 0,
        },
        None => 0,
    };
    if compiled > 12080 { compiled } else { 12080 }
};

thread_local! {
    /// The context that this thread's calls go to.
    static CURRENT: Cell<sys::CUcontext> = const { Cell::new(ptr::null_mut()) };
}

/// A kernel.
#[derive(Debug)]
struct Function {
    handle: sys::CUfunction,
    name: String,
    /// Dynamic shared memory that it may have by now.
    shared: u32,
}

/// Pinned memory for uploads, used in turn.
#[derive(Debug, Default)]
struct Ring {
    pieces: Vec<Staging>,
    current: usize,
    used: usize,
}

/// A graph, ready to run.
#[derive(Debug)]
pub(super) struct Graph(sys::CUgraphExec);

// SAFETY: handles of the driver belong to no thread.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by end_capture and destroyed once; the driver keeps it until a run under way has ended.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}

/// A moment in the stream.
#[derive(Debug)]
pub(super) struct Stamp(sys::CUevent);

// SAFETY: handles of the driver belong to no thread.
unsafe impl Send for Stamp {}

impl Drop for Stamp {
    fn drop(&mut self) {
        // SAFETY: made by `stamp` and destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// The device.
#[derive(Debug)]
pub(super) struct Gpu {
    /// Retained until the process ends: threads go on having it as their current one.
    context: sys::CUcontext,
    stream: sys::CUstream,
    pool: sys::CUmemoryPool,
    module: sys::CUmodule,
    functions: Vec<Function>,
    blas: blas_sys::cublasHandle_t,
    workspace: u64,
    ring: Ring,
    landings: Vec<Staging>,
    /// Wait after each kernel, so that an error names the kernel that caused it.
    careful: bool,
    capturing: bool,
}

// SAFETY: handles of the driver and of cuBLAS belong to no thread; &mut keeps calls one after another.
unsafe impl Send for Gpu {}

/// Say what the driver was asked for when it failed.
fn did<T>(what: &str, outcome: Result<T, result::DriverError>) -> Result<T, CudaError> {
    outcome.map_err(|error| CudaError::Failed(format!("{what}: {error}")))
}

/// The same, where the driver may need memory of its own for a kernel: code that is loaded late, the threads' stacks.
fn of_driver(what: &str, error: result::DriverError) -> CudaError {
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => no_room(),
        _ => CudaError::Failed(format!("{what}: {error}")),
    }
}

/// There is no room, and not for a buffer.
fn no_room() -> CudaError {
    let (free, total) = result::mem_get_info().unwrap_or((0, 0));
    CudaError::OutOfMemory { requested: 0, used: (total - free) as u64, total: total as u64 }
}

fn unavailable<T>(what: &str, outcome: Result<T, result::DriverError>) -> Result<T, CudaError> {
    outcome.map_err(|error| match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            CudaError::Unavailable(format!("{what}: its memory is full, other processes use it"))
        }
        CUresult::CUDA_ERROR_NO_DEVICE => {
            CudaError::Unavailable(format!("{what}: it sees no GPU (does CUDA_VISIBLE_DEVICES hide them?)"))
        }
        _ => CudaError::Unavailable(format!("{what}: {error}")),
    })
}

/// Look the driver up. The library panics where it is missing, so it is looked for first.
fn driver() -> Result<c_int, CudaError> {
    // SAFETY: opens a shared library of the system.
    if !unsafe { sys::is_culib_present() } {
        let why = "there is no NVIDIA driver on this machine: libcuda.so.1 was not found";
        return Err(CudaError::Unavailable(why.to_owned()));
    }
    unavailable("the NVIDIA driver did not start", result::init())?;
    let mut version = 0;
    // SAFETY: a place for the result.
    unavailable("the NVIDIA driver did not tell its version", unsafe {
        sys::cuDriverGetVersion(&raw mut version).result()
    })?;
    Ok(version)
}

/// How many GPUs there are.
pub(super) fn count() -> Result<usize, CudaError> {
    driver()?;
    let count = unavailable("the NVIDIA driver did not count its devices", result::device::get_count())?;
    Ok(count as usize)
}

/// What the driver tells of a GPU that is not in use.
pub(super) fn describe(ordinal: usize) -> Result<Properties, CudaError> {
    let version = driver()?;
    let device = unavailable("the GPU was not found", result::device::get(ordinal as c_int))?;
    Ok(Properties { driver_version: version as u32, ..properties(device)? })
}

impl Gpu {
    pub(super) fn open(ordinal: usize) -> Result<(Gpu, Properties), CudaError> {
        let version = driver()?;
        let spoken = |version: c_int| format!("{}.{}", version / 1000, version % 1000 / 10);
        if version < OLDEST_DRIVER {
            return Err(CudaError::Unavailable(format!(
                "the NVIDIA driver supports CUDA {}, {} is needed",
                spoken(version),
                spoken(OLDEST_DRIVER)
            )));
        }
        // SAFETY: opens a shared library of the system.
        if !unsafe { blas_sys::is_culib_present() } {
            return Err(CudaError::Unavailable(
                "libcublas was not found: install CUDA's cuBLAS, or add the folder that holds libcublas.so.13 or .12 to \
                 LD_LIBRARY_PATH"
                    .to_owned(),
            ));
        }
        let found = unavailable("the NVIDIA driver did not count its devices", result::device::get_count())? as usize;
        if ordinal >= found {
            return Err(CudaError::Unavailable(format!("there is no cuda:{ordinal}: the driver shows {found} GPUs")));
        }
        if KERNELS.0.is_empty() {
            return Err(CudaError::Unavailable(
                "this build holds no CUDA kernels: it was made with RLOOD_CUDA_STUB=1, for checks only".to_owned(),
            ));
        }
        let device = unavailable("the GPU was not found", result::device::get(ordinal as c_int))?;
        let mut properties = properties(device)?;
        properties.driver_version = version as u32;
        let (major, minor) = properties.compute_capability;
        if major < 8 {
            return Err(CudaError::Unavailable(format!(
                "cuda:{ordinal} ({}) has compute capability {major}.{minor}, 8.0 is needed",
                properties.name
            )));
        }
        // SAFETY: a device of this driver; each handle is used in the context that it was made in.
        let gpu = unsafe {
            let context = unavailable("the GPU's context was not made", result::primary_ctx::retain(device))?;
            bind(context)?;
            let stream = did("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?;
            let pool = did("cuDeviceGetDefaultMemPool", result::device::get_default_mem_pool(device))?;
            let mut keep = u64::MAX;
            let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            did("cuMemPoolSetAttribute", result::mem_pool::set_attribute(pool, threshold, (&raw mut keep).cast()))?;
            let module = load(&format!("CUDA {}", spoken(version)))?;
            let handle = blas::create_handle().map_err(|error| failed("cublasCreate", error))?;
            blas::set_stream(handle, stream.cast()).map_err(|error| failed("cublasSetStream", error))?;
            // Sums of parts of a product stay in 32 bits, also where it writes bf16.
            let math = blas_sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
            blas_sys::cublasSetMathMode(handle, math).result().map_err(|error| failed("cublasSetMathMode", error))?;
            let workspace = did("cuMemAllocAsync", result::malloc_async(stream, WORKSPACE_BYTES))?;
            blas_sys::cublasSetWorkspace_v2(handle, workspace as *mut c_void, WORKSPACE_BYTES)
                .result()
                .map_err(|error| failed("cublasSetWorkspace", error))?;
            Gpu {
                context,
                stream,
                pool,
                module,
                functions: Vec::new(),
                blas: handle,
                workspace,
                ring: Ring::default(),
                landings: Vec::new(),
                careful: std::env::var_os("RLOOD_CUDA_SYNC").is_some_and(|value| value == "1"),
                capturing: false,
            }
        };
        if let Ok((free, total)) = result::mem_get_info() {
            properties.taken_bytes = Some((total - free) as u64).filter(|taken| *taken < MOST_TAKEN_BYTES);
        }
        Ok((gpu, properties))
    }

    pub(super) fn enter(&self) -> Result<(), CudaError> {
        if CURRENT.get() == self.context { Ok(()) } else { bind(self.context) }
    }

    pub(super) fn find(&mut self, name: &str) -> Result<Found, CudaError> {
        // Errors of earlier work may be told here too, and a kernel's code is loaded only now.
        let not_found = |error: result::DriverError| match error.0 {
            CUresult::CUDA_ERROR_NOT_FOUND => CudaError::Input(format!("there is no kernel named {name}")),
            _ => of_driver(&format!("cuModuleGetFunction {name}"), error),
        };
        let terminated =
            CString::new(name).map_err(|_| CudaError::Input("a kernel's name with a zero byte".to_owned()))?;
        // SAFETY: the module is loaded.
        let handle = unsafe { result::module::get_function(self.module, terminated) }.map_err(not_found)?;
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the function was just found; two places for the results.
        let told = unsafe { sys::cuFuncGetParamInfo(handle, 0, &raw mut offset, &raw mut bytes) }.result();
        let kernel = self.functions.len() as u32;
        self.functions.push(Function { handle, name: name.to_owned(), shared: SHARED_WITHOUT_ASKING });
        Ok(Found { kernel, param_bytes: told.is_ok().then_some(bytes) })
    }

    pub(super) fn launch(&mut self, kernel: u32, launch: Launch, params: &[u8]) -> Result<(), CudaError> {
        let function = self.functions.get_mut(kernel as usize);
        let function = function.ok_or_else(|| CudaError::Failed(format!("kernel {kernel} was not found before")))?;
        let Launch { grid, block, shared } = launch;
        // SAFETY: the function was found in the module. The driver copies the parameter, which has the size that the
        // function takes (the queue compared them), before it returns; the addresses in it are the caller's to check.
        let launched = unsafe {
            if shared > function.shared {
                let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                let allowed = result::function::set_function_attribute(function.handle, attribute, shared as i32);
                did(&format!("{}: {shared} bytes of shared memory", function.name), allowed)?;
                function.shared = shared;
            }
            let mut arguments = [params.as_ptr().cast_mut().cast::<c_void>()];
            let grid = (grid[0], grid[1], grid[2]);
            result::launch_kernel(function.handle, grid, (block, 1, 1), shared, self.stream, &mut arguments)
        };
        let launched = match launched {
            // SAFETY: the stream is this device's.
            Ok(()) if self.careful && !self.capturing => unsafe { result::stream::synchronize(self.stream) },
            launched => launched,
        };
        launched.map_err(|error| of_driver(&function.name, error))
    }

    pub(super) fn zero(&mut self, to: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: a range of a live buffer, as Device checked.
        did("cuMemsetD8Async", unsafe { result::memset_d8_async(to, 0, bytes, self.stream) })
    }

    pub(super) fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: ranges of live buffers, as Device checked.
        did("cuMemcpyDtoDAsync", unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) })
    }

    /// Copy through the ring, a piece at a time.
    pub(super) fn upload(&mut self, mut to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        for piece in bytes.chunks(PIECE_BYTES) {
            let (index, at) = self.room(piece.len())?;
            self.ring.pieces[index].fill(at, piece);
            // SAFETY: pinned memory that is not used again before its event, to a range of a live buffer.
            did("cuMemcpyHtoDAsync", unsafe {
                let from = self.ring.pieces[index].start.add(at);
                sys::cuMemcpyHtoDAsync_v2(to, from.cast(), piece.len(), self.stream).result()
            })?;
            to += piece.len() as u64;
        }
        Ok(())
    }

    /// Room in the ring that nothing copies from: which piece, and where in it.
    fn room(&mut self, bytes: usize) -> Result<(usize, usize), CudaError> {
        if self.ring.pieces.is_empty() {
            let piece = self.stage(PIECE_BYTES)?;
            self.ring.pieces.push(piece);
        }
        if self.ring.used + bytes > PIECE_BYTES {
            let full = self.ring.current;
            // SAFETY: the event belongs to the piece, the stream is this device's.
            did("cuEventRecord", unsafe { result::event::record(self.ring.pieces[full].event.cast(), self.stream) })?;
            let next = (full + 1) % PIECES;
            if next == self.ring.pieces.len() {
                let piece = self.stage(PIECE_BYTES)?;
                self.ring.pieces.push(piece);
            } else {
                self.settle(&self.ring.pieces[next])?;
            }
            self.ring.current = next;
            self.ring.used = 0;
        }
        let at = self.ring.used;
        self.ring.used = (at + bytes).next_multiple_of(16);
        Ok((self.ring.current, at))
    }

    pub(super) fn upload_staged(
        &mut self,
        to: u64,
        staging: &Staging,
        at: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        assert!(at + bytes <= staging.bytes, "an upload lies within its staging memory");
        // SAFETY: within pinned memory that is overwritten only after its event, to a range of a live buffer.
        did("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, staging.start.add(at).cast(), bytes, self.stream).result()
        })
    }

    /// Copy through pinned memory: while one piece is read, the next one comes.
    pub(super) fn download(&mut self, from: u64, to: &mut [u8]) -> Result<(), CudaError> {
        while self.landings.len() < to.len().div_ceil(LANDING_BYTES).min(2) {
            let landing = self.stage(LANDING_BYTES)?;
            self.landings.push(landing);
        }
        let mut landings = std::mem::take(&mut self.landings);
        let outcome = self.download_through(&mut landings, from, to);
        self.landings = landings;
        outcome
    }

    fn download_through(&mut self, landings: &mut [Staging], from: u64, to: &mut [u8]) -> Result<(), CudaError> {
        let (count, bytes) = (landings.len().max(1), to.len());
        let pieces = bytes.div_ceil(LANDING_BYTES);
        let mut fetch = |piece: usize, landing: &mut Staging| {
            let at = piece * LANDING_BYTES;
            self.fetch(from + at as u64, landing, LANDING_BYTES.min(bytes - at))
        };
        for (piece, landing) in landings.iter_mut().enumerate().take(pieces) {
            fetch(piece, landing)?;
        }
        for (piece, to) in to.chunks_mut(LANDING_BYTES).enumerate() {
            let landing = &mut landings[piece % count];
            settle(landing)?;
            landing.read(to);
            if piece + count < pieces {
                fetch(piece + count, landing)?;
            }
        }
        Ok(())
    }

    pub(super) fn synchronize(&mut self) -> Result<(), CudaError> {
        // SAFETY: the stream is this device's.
        did("cuStreamSynchronize", unsafe { result::stream::synchronize(self.stream) })
    }

    /// Pinned memory with its event.
    pub(super) fn stage(&mut self, bytes: usize) -> Result<Staging, CudaError> {
        // SAFETY: both belong to the value, until `unstage`.
        let start = did("cuMemHostAlloc", unsafe { result::malloc_host(bytes.max(1), 0) })?;
        let event = did("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING))?;
        Ok(Staging { start: start.cast(), bytes, event: event.cast() })
    }

    pub(super) fn unstage(&mut self, staging: Staging) {
        // SAFETY: from `stage`; nothing copies from it any more. Both are lost with the context if that has failed.
        unsafe {
            let _ = result::free_host(staging.start.cast());
            let _ = result::event::destroy(staging.event.cast());
        }
    }

    pub(super) fn used(&mut self, staging: &mut Staging) -> Result<(), CudaError> {
        // SAFETY: the event belongs to the staging memory, the stream is this device's.
        did("cuEventRecord", unsafe { result::event::record(staging.event.cast(), self.stream) })
    }

    pub(super) fn settle(&self, staging: &Staging) -> Result<(), CudaError> {
        settle(staging)
    }

    /// Start copying to pinned memory, which is to be settled before it is read.
    pub(super) fn fetch(&mut self, from: u64, staging: &mut Staging, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= staging.bytes, "a download lies within its staging memory");
        // SAFETY: from a range of a live buffer to pinned memory that is read after its event.
        did("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(staging.start.cast(), from, bytes, self.stream).result()
        })?;
        self.used(staging)
    }

    /// An event that tells when it is reached.
    pub(super) fn stamp(&mut self) -> Result<Stamp, CudaError> {
        let event = did("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        let stamp = Stamp(event);
        // SAFETY: an event and the stream of this device.
        did("cuEventRecord", unsafe { result::event::record(event, self.stream) })?;
        Ok(stamp)
    }

    /// Seconds from one to the other, once both were reached.
    pub(super) fn elapsed(&mut self, from: &Stamp, to: &Stamp) -> Result<f64, CudaError> {
        // SAFETY: events of this device.
        let milliseconds = did("cuEventElapsedTime", unsafe {
            result::event::synchronize(to.0).and_then(|()| result::event::elapsed(from.0, to.0))
        })?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    pub(super) fn reserve(&mut self, bytes: u64) -> Result<Option<u64>, CudaError> {
        let (free, _) = did("cuMemGetInfo", result::mem_get_info())?;
        if (free as u64) < bytes.saturating_add(CUDA_KEPT_FREE_BYTES) {
            return Ok(None);
        }
        // SAFETY: the memory is used on this stream only.
        match unsafe { result::malloc_async(self.stream, bytes as usize) } {
            Ok(start) => Ok(Some(start)),
            Err(result::DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(error) => did("cuMemAllocAsync", Err(error)),
        }
    }

    pub(super) fn release(&mut self, start: u64, _bytes: u64) {
        // SAFETY: from `reserve`, and no live buffer lies in it. An error shows with the next call.
        let _ = unsafe { result::free_async(start, self.stream) };
    }

    pub(super) fn released(&mut self) {
        // SAFETY: this device's stream and pool. An error shows with the next call.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::mem_pool::trim_to(self.pool, 0);
        }
    }

    pub(super) fn begin_capture(&mut self) -> Result<(), CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is this device's, and nothing captures it: end_capture follows each begin_capture.
        did("cuStreamBeginCapture", unsafe { result::stream::begin_capture(self.stream, mode) })?;
        self.capturing = true;
        Ok(())
    }

    pub(super) fn end_capture(&mut self) -> Result<Graph, CudaError> {
        self.capturing = false;
        // SAFETY: a capture is under way; the graph is destroyed once, after the executable one was made of it.
        unsafe {
            let graph = did("cuStreamEndCapture", result::stream::end_capture(self.stream))?;
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            let made = Graph(made.map_err(|error| of_driver("cuGraphInstantiate", error))?);
            result::graph::upload(made.0, self.stream).map_err(|error| of_driver("cuGraphUpload", error))?;
            Ok(made)
        }
    }

    pub(super) fn replay(&mut self, graph: &Graph) -> Result<(), CudaError> {
        // SAFETY: a graph of this device.
        unsafe { result::graph::launch(graph.0, self.stream) }.map_err(|error| of_driver("cuGraphLaunch", error))
    }

    /// cuBLAS counts columns first: row-major `c = a b` is its `c' = b' a'`.
    pub(super) fn product(&mut self, product: &Product) -> Result<(), CudaError> {
        let Product { a, b, c, rows, columns, inner, stride_a, stride_b, stride_c, .. } = *product;
        let operation = |transposed: bool| match transposed {
            true => blas_sys::cublasOperation_t::CUBLAS_OP_T,
            false => blas_sys::cublasOperation_t::CUBLAS_OP_N,
        };
        let dtype = |dtype: DType| match dtype {
            DType::F32 => blas_sys::cudaDataType_t::CUDA_R_32F,
            DType::Bf16 => blas_sys::cudaDataType_t::CUDA_R_16BF,
        };
        let (alpha, beta) = (product.alpha, product.beta);
        // SAFETY: matrices that lie in live buffers, as Gemm checked, with sizes that fit c_int.
        let outcome = unsafe {
            blas::gemm_ex(
                self.blas,
                operation(product.transpose_b),
                operation(product.transpose_a),
                columns as c_int,
                rows as c_int,
                inner as c_int,
                (&raw const alpha).cast(),
                b as *const c_void,
                dtype(product.operands),
                stride_b as c_int,
                a as *const c_void,
                dtype(product.operands),
                stride_a as c_int,
                (&raw const beta).cast(),
                c as *mut c_void,
                dtype(product.result),
                stride_c as c_int,
                blas_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                blas_sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        };
        outcome.map_err(|error| match error.0 {
            blas_sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED => no_room(),
            _ => failed("cublasGemmEx", error),
        })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: each handle was made once and is destroyed once, after the stream's work has ended. Where the context
        // has failed these fail too, and the process ends.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            for staging in self.ring.pieces.drain(..).chain(self.landings.drain(..)).collect::<Vec<_>>() {
                self.unstage(staging);
            }
            let _ = blas::destroy_handle(self.blas);
            let _ = result::free_async(self.workspace, self.stream);
            let _ = result::stream::synchronize(self.stream);
            let _ = result::mem_pool::trim_to(self.pool, 0);
            let _ = result::module::unload(self.module);
            let _ = result::stream::destroy(self.stream);
        }
    }
}

fn failed(what: &str, error: blas::CublasError) -> CudaError {
    CudaError::Failed(format!("{what}: {error}"))
}

fn settle(staging: &Staging) -> Result<(), CudaError> {
    // SAFETY: the event belongs to the staging memory; one that was never recorded counts as done.
    did("cuEventSynchronize", unsafe { result::event::synchronize(staging.event.cast()) })
}

fn bind(context: sys::CUcontext) -> Result<(), CudaError> {
    // SAFETY: a context that is retained for as long as its device is open.
    did("cuCtxSetCurrent", unsafe { result::ctx::set_current(context) })?;
    CURRENT.set(context);
    Ok(())
}

fn properties(device: sys::CUdevice) -> Result<Properties, CudaError> {
    // SAFETY: a device of this driver.
    let attribute = |attribute| unsafe {
        unavailable("the GPU did not tell an attribute", result::device::get_attribute(device, attribute))
            .map(|value| value as u32)
    };
    Ok(Properties {
        name: unavailable("the GPU did not tell its name", result::device::get_name(device))?,
        compute_capability: (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        // SAFETY: a device of this driver.
        memory_bytes: unavailable("the GPU did not tell its memory", unsafe { result::device::total_mem(device) })?
            as u64,
        driver_version: 0,
        taken_bytes: None,
        emulated: false,
    })
}

/// Load the kernels. For a GPU that the build did not know the driver compiles them; it keeps the result on disk for the
/// next time.
fn load(driver: &str) -> Result<sys::CUmodule, CudaError> {
    const LOG_BYTES: usize = 4096;
    let mut log = vec![0_u8; LOG_BYTES];
    let mut options =
        [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(LOG_BYTES - 1)];
    let mut module = ptr::null_mut();
    // SAFETY: an image that tells its own length, a place for the result, and as many options as values; the log has one
    // byte more than the driver may write.
    let loaded = unsafe {
        let (image, count) = (KERNELS.0.as_ptr().cast(), options.len() as c_uint);
        sys::cuModuleLoadDataEx(&raw mut module, image, count, options.as_mut_ptr(), values.as_mut_ptr()).result()
    };
    match loaded {
        Ok(()) => Ok(module),
        Err(result::DriverError(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION)) => Err(CudaError::Unavailable(format!(
            "the NVIDIA driver ({driver}) is older than the compiler of this build's kernels: update the driver"
        ))),
        Err(error) => {
            let log = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy).unwrap_or_default();
            Err(CudaError::Unavailable(format!("the driver did not compile the kernels: {error} {}", log.trim())))
        }
    }
}
