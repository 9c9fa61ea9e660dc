//! A GPU accessed through NVIDIA's driver and cuBLAS, which are both loaded when the first device is opened.
//!
//! It uses one stream, and a second one for products that run beside others; the driver's memory pool keeps freed memory. After
//! `enter`, any thread may make calls, but only one at a time.
//!
//! Longer than 500 lines: all calls of the driver that compute or move memory, each a few lines with its reason to be safe.

mod handles;
mod open;

use std::cell::Cell;
use std::ffi::{CString, c_int, c_void};
use std::ptr;

use cudarc::cublas::{result as blas, sys as blas_sys};
use cudarc::driver::sys::{CUfunction_attribute, CUresult};
use cudarc::driver::{result, sys};

use super::KEPT_FREE_BYTES;
use super::device_api::{CudaError, DType, Driver, Found, Graph, Launch, Order, Product, Source, Staging, Timer, Work};
use handles::{EventPair, GraphExec};
pub(super) use open::{count, describe};

/// Size in bytes of each piece of pinned memory for uploads.
const PIECE_BYTES: usize = 8 << 20;
const PIECES: usize = 4;
/// Size in bytes of each piece of pinned memory for downloads.
const LANDING_BYTES: usize = 4 << 20;
/// Dynamic shared memory that a kernel may use without setting an attribute, in bytes.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;

thread_local! {
    /// The CUDA context that is current for this thread.
    static CURRENT: Cell<sys::CUcontext> = const { Cell::new(ptr::null_mut()) };
}

/// A kernel of the loaded module.
#[derive(Debug)]
struct Function {
    handle: sys::CUfunction,
    name: String,
    /// Dynamic shared memory in bytes that the kernel's attribute permits so far.
    shared: u32,
}

/// Pinned memory for uploads, in pieces that are used in turn.
#[derive(Debug, Default)]
struct Ring {
    pieces: Vec<Staging>,
    current: usize,
    used: usize,
}

/// cuBLAS for a stream.
#[derive(Debug)]
struct Blas {
    handle: blas_sys::cublasHandle_t,
    workspace: u64,
}

/// A second stream, for products that are [`Order::Aside`].
#[derive(Debug)]
struct Side {
    stream: sys::CUstream,
    blas: Blas,
    /// The event that a product on this stream waits for, and the event of its end.
    fork: sys::CUevent,
    end: sys::CUevent,
    /// Whether the main stream has not waited yet for the end of the latest product aside.
    is_apart: bool,
}

/// A GPU that was opened.
#[derive(Debug)]
pub(super) struct Gpu {
    /// The CUDA context: retained until the process ends, because it stays the current context of threads.
    context: sys::CUcontext,
    stream: sys::CUstream,
    pool: sys::CUmemoryPool,
    module: sys::CUmodule,
    functions: Vec<Function>,
    blas: Blas,
    side: Side,
    ring: Ring,
    landings: Vec<Staging>,
    /// Whether a kernel may start before the one before it has ended; see `wait_for_earlier_work` in prelude.cuh.
    overlapping: bool,
    /// Whether to wait after each kernel, so that an error names the kernel that caused it.
    careful: bool,
    capturing: bool,
}

// SAFETY: handles of the driver and of cuBLAS belong to no thread; &mut serializes calls.
unsafe impl Send for Gpu {}

/// Adds the name of the driver's function to an error.
fn driver_result<T>(what: &str, outcome: Result<T, result::DriverError>) -> Result<T, CudaError> {
    outcome.map_err(|error| CudaError::Failed(format!("{what}: {error}")))
}

/// Converts an error of a call for which the driver may need memory: for code that is loaded lazily,
/// or the threads' stacks.
fn of_driver(what: &str, error: result::DriverError) -> CudaError {
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => out_of_memory(),
        _ => CudaError::Failed(format!("{what}: {error}")),
    }
}

/// The error if the driver has no memory for something other than a buffer.
fn out_of_memory() -> CudaError {
    let (free, total) = result::mem_get_info().unwrap_or((0, 0));
    CudaError::OutOfMemory { requested: 0, used: (total - free) as u64, total: total as u64 }
}

impl Gpu {
    /// Finds room in the ring of upload memory that no copy reads from: the piece and the offset in it.
    fn room(&mut self, bytes: usize) -> Result<(usize, usize), CudaError> {
        if self.ring.pieces.is_empty() {
            let piece = self.stage(PIECE_BYTES)?;
            self.ring.pieces.push(piece);
        }
        if self.ring.used + bytes > PIECE_BYTES {
            let full = self.ring.current;
            // SAFETY: the event belongs to the piece, the stream to this device.
            driver_result("cuEventRecord", unsafe {
                result::event::record(self.ring.pieces[full].event.cast(), self.stream)
            })?;
            let next = (full + 1) % PIECES;
            if next == self.ring.pieces.len() {
                let piece = self.stage(PIECE_BYTES)?;
                self.ring.pieces.push(piece);
            } else {
                settle(&self.ring.pieces[next])?;
            }
            self.ring.current = next;
            self.ring.used = 0;
        }
        let at = self.ring.used;
        self.ring.used = (at + bytes).next_multiple_of(16);
        Ok((self.ring.current, at))
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

    /// Lets the main stream wait for the product aside, if there is one. Returns whether there was.
    fn join(&mut self) -> Result<bool, CudaError> {
        if !std::mem::take(&mut self.side.is_apart) {
            return Ok(false);
        }
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event and the stream belong to this device.
        driver_result("cuStreamWaitEvent", unsafe { result::stream::wait_event(self.stream, self.side.end, flags) })?;
        Ok(true)
    }

    /// Lets the second stream wait for all work of the main stream.
    fn fork(&mut self) -> Result<(), CudaError> {
        self.join()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event and both streams belong to this device.
        unsafe {
            driver_result("cuEventRecord", result::event::record(self.side.fork, self.stream))?;
            driver_result("cuStreamWaitEvent", result::stream::wait_event(self.side.stream, self.side.fork, flags))
        }
    }

    fn begin_capture(&mut self) -> Result<(), CudaError> {
        self.join()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream belongs to this device, and no capture is in progress:
        // end_capture follows each begin_capture.
        driver_result("cuStreamBeginCapture", unsafe { result::stream::begin_capture(self.stream, mode) })?;
        self.capturing = true;
        Ok(())
    }

    fn end_capture(&mut self) -> Result<GraphExec, CudaError> {
        self.capturing = false;
        let joined = self.join();
        // SAFETY: a capture is in progress; the graph is destroyed once, after the executable graph
        // was created from it.
        unsafe {
            let graph = driver_result("cuStreamEndCapture", result::stream::end_capture(self.stream))?;
            if let Err(error) = joined {
                let _ = result::graph::destroy(graph);
                return Err(error);
            }
            let made = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            let graph = made.map_err(|error| of_driver("cuGraphInstantiate", error))?;
            let made = GraphExec { graph, stream: self.stream };
            result::graph::upload(made.graph, self.stream).map_err(|error| of_driver("cuGraphUpload", error))?;
            Ok(made)
        }
    }
}

impl Driver for Gpu {
    fn enter(&self) -> Result<(), CudaError> {
        if CURRENT.get() == self.context { Ok(()) } else { bind(self.context) }
    }

    fn find(&mut self, name: &str) -> Result<Found, CudaError> {
        // Finding a kernel may report errors of earlier work, and loads its code if this was not done yet.
        let not_found = |error: result::DriverError| match error.0 {
            CUresult::CUDA_ERROR_NOT_FOUND => CudaError::Input(format!("there is no GPU kernel named {name}")),
            _ => of_driver(&format!("cuModuleGetFunction {name}"), error),
        };
        let terminated = CString::new(name)
            .map_err(|_| CudaError::Input("the name of a GPU kernel contains a zero byte".to_owned()))?;
        // SAFETY: the module is loaded.
        let handle = unsafe { result::module::get_function(self.module, terminated) }.map_err(not_found)?;
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the function was just found; the pointers refer to two local variables.
        let info = unsafe { sys::cuFuncGetParamInfo(handle, 0, &raw mut offset, &raw mut bytes) }.result();
        let kernel = self.functions.len() as u32;
        self.functions.push(Function { handle, name: name.to_owned(), shared: SHARED_WITHOUT_ASKING });
        Ok(Found { kernel, param_bytes: info.is_ok().then_some(bytes) })
    }

    fn launch(&mut self, kernel: u32, launch: Launch, params: &[u8]) -> Result<(), CudaError> {
        let joined = self.join()?;
        let function = self.functions.get_mut(kernel as usize);
        let function = function.ok_or_else(|| {
            CudaError::Failed(format!("GPU kernel number {kernel} was launched before its name was looked up"))
        })?;
        let Launch { grid, block, shared } = launch;
        // After a wait for another stream, a kernel starts when all before it has ended.
        let overlapping_now = self.overlapping && !joined;
        // SAFETY: the function was found in the module. The driver copies the parameter before it returns; its size is
        // the one that the function takes (the queue compared them). The caller has checked the addresses in it.
        let launched = unsafe {
            if shared > function.shared {
                let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                let allowed = result::function::set_function_attribute(function.handle, attribute, shared as i32);
                driver_result(
                    &format!("{}: setting the limit of {shared} bytes of shared memory", function.name),
                    allowed,
                )?;
                function.shared = shared;
            }
            let mut arguments = [params.as_ptr().cast_mut().cast::<c_void>()];
            let mut overlapping = sys::CUlaunchAttribute {
                id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                pad: [0; 4],
                value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            };
            let config = sys::CUlaunchConfig {
                gridDimX: grid[0],
                gridDimY: grid[1],
                gridDimZ: grid[2],
                blockDimX: block,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: shared,
                hStream: self.stream,
                attrs: &raw mut overlapping,
                numAttrs: overlapping_now.into(),
            };
            sys::cuLaunchKernelEx(&raw const config, function.handle, arguments.as_mut_ptr(), ptr::null_mut()).result()
        };
        let launched = match launched {
            // SAFETY: the stream belongs to this device.
            Ok(()) if self.careful && !self.capturing => unsafe { result::stream::synchronize(self.stream) },
            launched => launched,
        };
        launched.map_err(|error| of_driver(&function.name, error))
    }

    fn zero(&mut self, to: u64, bytes: usize) -> Result<(), CudaError> {
        self.join()?;
        // SAFETY: `to` is a range of a live buffer, checked by Device.
        driver_result("cuMemsetD8Async", unsafe { result::memset_d8_async(to, 0, bytes, self.stream) })
    }

    fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        self.join()?;
        // SAFETY: both addresses are ranges of live buffers, checked by Device.
        driver_result("cuMemcpyDtoDAsync", unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) })
    }

    /// Copies bytes through the ring of pinned memory, piece by piece.
    fn upload(&mut self, mut to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        self.join()?;
        for piece in bytes.chunks(PIECE_BYTES) {
            let (index, at) = self.room(piece.len())?;
            self.ring.pieces[index].fill(at, piece);
            // SAFETY: copies from pinned memory, which is not reused before its event, to a range of a live buffer.
            driver_result("cuMemcpyHtoDAsync", unsafe {
                let from = self.ring.pieces[index].start.add(at);
                sys::cuMemcpyHtoDAsync_v2(to, from.cast(), piece.len(), self.stream).result()
            })?;
            to += piece.len() as u64;
        }
        Ok(())
    }

    fn upload_staged(&mut self, to: u64, staging: &Staging, at: usize, bytes: usize) -> Result<(), CudaError> {
        self.join()?;
        assert!(at + bytes <= staging.bytes, "an upload to the GPU must lie within its staging memory");
        // SAFETY: copies from pinned memory, which is overwritten only after its event, to a range of a live buffer.
        driver_result("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, staging.start.add(at).cast(), bytes, self.stream).result()
        })
    }

    /// Copies from the device through pinned memory: while one piece is read, the next one is copied.
    fn download(&mut self, from: u64, to: &mut [u8]) -> Result<(), CudaError> {
        while self.landings.len() < to.len().div_ceil(LANDING_BYTES).min(2) {
            let landing = self.stage(LANDING_BYTES)?;
            self.landings.push(landing);
        }
        let mut landings = std::mem::take(&mut self.landings);
        let outcome = self.download_through(&mut landings, from, to);
        self.landings = landings;
        outcome
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        self.join()?;
        // SAFETY: the stream belongs to this device.
        driver_result("cuStreamSynchronize", unsafe { result::stream::synchronize(self.stream) })
    }

    /// Allocates pinned memory with its event.
    fn stage(&mut self, bytes: usize) -> Result<Staging, CudaError> {
        // SAFETY: memory and event belong to the returned value until `unstage`.
        let start = driver_result("cuMemHostAlloc", unsafe { result::malloc_host(bytes.max(1), 0) })?;
        let event = driver_result("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING))?;
        Ok(Staging { start: start.cast(), bytes, event: event.cast() })
    }

    fn unstage(&mut self, staging: Staging) {
        // SAFETY: `stage` allocated the memory and the event; no copy from it is in progress. Both are lost with the
        // CUDA context if that has failed.
        unsafe {
            let _ = result::free_host(staging.start.cast());
            let _ = result::event::destroy(staging.event.cast());
        }
    }

    fn used(&mut self, staging: &mut Staging) -> Result<(), CudaError> {
        self.join()?;
        // SAFETY: the event belongs to the staging memory, the stream to this device.
        driver_result("cuEventRecord", unsafe { result::event::record(staging.event.cast(), self.stream) })
    }

    fn settle(&mut self, staging: &Staging) -> Result<(), CudaError> {
        settle(staging)
    }

    /// Starts to copy from the device to pinned memory; `settle` must be called before it is read.
    fn fetch(&mut self, from: u64, staging: &mut Staging, bytes: usize) -> Result<(), CudaError> {
        self.join()?;
        assert!(bytes <= staging.bytes, "a download from the GPU must lie within its staging memory");
        // SAFETY: copies from a range of a live buffer to pinned memory that is read only after its event.
        driver_result("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(staging.start.cast(), from, bytes, self.stream).result()
        })?;
        self.used(staging)
    }

    fn start_timer(&mut self) -> Result<Box<dyn Timer>, CudaError> {
        self.join()?;
        Ok(Box::new(EventPair::begin(self.stream)?))
    }

    fn capture(&mut self, work: &mut Work<'_>) -> Result<Option<Box<dyn Graph>>, CudaError> {
        self.begin_capture()?;
        let issued = work(self);
        let graph = self.end_capture();
        issued.and(graph).map(|graph| Some(Box::new(graph) as Box<dyn Graph>))
    }

    /// Computes a matrix product with cuBLAS, which uses column-major order: row-major `c = a b` is its `c' = b' a'`.
    fn product(&mut self, product: &Product) -> Result<(), CudaError> {
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
        let aside = self.overlapping && product.order == Order::Aside;
        if aside {
            self.fork()?;
        } else if product.order != Order::Beside {
            self.join()?;
        }
        let handle = if aside { self.side.blas.handle } else { self.blas.handle };
        // SAFETY: the matrices are in live buffers, checked by Gemm, and the sizes fit into c_int.
        let outcome = unsafe {
            blas::gemm_ex(
                handle,
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
        if aside {
            // SAFETY: the event and the stream belong to this device.
            driver_result("cuEventRecord", unsafe { result::event::record(self.side.end, self.side.stream) })?;
            self.side.is_apart = true;
        }
        outcome.map_err(|error| match error.0 {
            blas_sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED => out_of_memory(),
            _ => failed("cublasGemmEx", error),
        })
    }
}

impl Source for Gpu {
    fn reserve(&mut self, bytes: u64) -> Result<Option<u64>, CudaError> {
        let (free, _) = driver_result("cuMemGetInfo", result::mem_get_info())?;
        if (free as u64) < bytes.saturating_add(KEPT_FREE_BYTES) {
            return Ok(None);
        }
        // SAFETY: the allocated memory is used on this stream only.
        match unsafe { result::malloc_async(self.stream, bytes as usize) } {
            Ok(start) => Ok(Some(start)),
            Err(result::DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(error) => driver_result("cuMemAllocAsync", Err(error)),
        }
    }

    fn release(&mut self, start: u64, _bytes: u64) {
        // SAFETY: `reserve` allocated the memory, and no live buffer is in it. An error is reported by the next call.
        let _ = unsafe { result::free_async(start, self.stream) };
    }

    fn released(&mut self) {
        // SAFETY: stream and memory pool belong to this device. An error is reported by the next call.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::mem_pool::trim_to(self.pool, 0);
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: each handle was created once and is destroyed once, after the stream's work has ended. If the context
        // has failed, these calls fail too, and the process ends.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            for staging in self.ring.pieces.drain(..).chain(self.landings.drain(..)).collect::<Vec<_>>() {
                self.unstage(staging);
            }
            let _ = result::stream::synchronize(self.side.stream);
            for Blas { handle, workspace } in [&self.blas, &self.side.blas] {
                let _ = blas::destroy_handle(*handle);
                let _ = result::free_async(*workspace, self.stream);
            }
            for event in [self.side.fork, self.side.end] {
                let _ = result::event::destroy(event);
            }
            let _ = result::stream::destroy(self.side.stream);
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
    // SAFETY: the event belongs to the staging memory; an event that was never recorded counts as complete.
    driver_result("cuEventSynchronize", unsafe { result::event::synchronize(staging.event.cast()) })
}

fn bind(context: sys::CUcontext) -> Result<(), CudaError> {
    // SAFETY: the context is retained for as long as its device is open.
    driver_result("cuCtxSetCurrent", unsafe { result::ctx::set_current(context) })?;
    CURRENT.set(context);
    Ok(())
}
