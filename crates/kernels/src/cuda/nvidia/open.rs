//! Opens a GPU: loads the driver and cuBLAS, checks the device, and loads its kernels.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;

use cudarc::cublas::{result as blas, sys as blas_sys};
use cudarc::driver::sys::{CUdevice_attribute, CUresult};
use cudarc::driver::{result, sys};

use super::{Blas, Gpu, Ring, Side, bind, driver_result, failed};
use crate::cuda::device_api::{CudaError, Properties};

/// The bytes of the compiled kernels, with the alignment that the driver expects of a module.
#[repr(C, align(64))]
struct Image<T: ?Sized>(T);

/// The kernels for several GPUs. The driver selects the matching machine code, or compiles the PTX. Empty in
/// a build without nvcc.
static KERNELS: &Image<[u8]> = &Image(*include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin")));
/// Size of cuBLAS's workspace in bytes, as NVIDIA recommends for Hopper. It has a fixed address, as graphs require.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Upper bound of the memory in bytes that opening a GPU takes; if more is in use, other processes use it.
const MOST_TAKEN_BYTES: u64 = 2 << 30;
/// The oldest supported driver. It has all functions called here (cuEventElapsedTime_v2 is from CUDA 12.8) and at least
/// the compiler's major version, because an older driver does not load its machine code.
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

fn unavailable<T>(what: &str, outcome: Result<T, result::DriverError>) -> Result<T, CudaError> {
    outcome.map_err(|error| match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            CudaError::Unavailable(format!("{what}: the GPU's memory is full, other processes use it"))
        }
        CUresult::CUDA_ERROR_NO_DEVICE => {
            CudaError::Unavailable(format!("{what}: the driver sees no GPU (does CUDA_VISIBLE_DEVICES hide them?)"))
        }
        _ => CudaError::Unavailable(format!("{what}: {error}")),
    })
}

/// Loads the driver. The binding panics if the library is missing, so its presence is checked first.
fn driver() -> Result<c_int, CudaError> {
    // SAFETY: opens a shared library of the system.
    if !unsafe { sys::is_culib_present() } {
        let why = "there is no NVIDIA driver on this machine: libcuda.so.1 was not found";
        return Err(CudaError::Unavailable(why.to_owned()));
    }
    unavailable("the NVIDIA driver did not start", result::init())?;
    let mut version = 0;
    // SAFETY: the pointer refers to a local variable.
    unavailable("the NVIDIA driver did not report its version", unsafe {
        sys::cuDriverGetVersion(&raw mut version).result()
    })?;
    Ok(version)
}

/// Number of GPUs that the driver lists.
pub(in super::super) fn count() -> Result<usize, CudaError> {
    driver()?;
    let count = unavailable("the NVIDIA driver did not report the number of devices", result::device::get_count())?;
    Ok(count as usize)
}

/// Properties of a GPU that is not opened.
pub(in super::super) fn describe(ordinal: usize) -> Result<Properties, CudaError> {
    let version = driver()?;
    let device = unavailable("the GPU was not found", result::device::get(ordinal as c_int))?;
    Ok(Properties { driver_version: version as u32, ..properties(device)? })
}

impl Gpu {
    pub(in super::super) fn open(ordinal: usize) -> Result<(Gpu, Properties), CudaError> {
        let version = driver()?;
        let spoken = |version: c_int| format!("{}.{}", version / 1000, version % 1000 / 10);
        if version < OLDEST_DRIVER {
            return Err(CudaError::Unavailable(format!(
                "the NVIDIA driver supports CUDA {}, {} is required",
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
        let found = unavailable("the NVIDIA driver did not report the number of devices", result::device::get_count())?
            as usize;
        if ordinal >= found {
            return Err(CudaError::Unavailable(format!("there is no cuda:{ordinal}: the driver shows {found} GPUs")));
        }
        if KERNELS.0.is_empty() {
            return Err(CudaError::Unavailable(
                "this build contains no CUDA kernels: it was built with RLOOD_CUDA_STUB=1, for checks only".to_owned(),
            ));
        }
        let device = unavailable("the GPU was not found", result::device::get(ordinal as c_int))?;
        let mut properties = properties(device)?;
        properties.driver_version = version as u32;
        let (major, minor) = properties.compute_capability;
        if major < 8 {
            return Err(CudaError::Unavailable(format!(
                "cuda:{ordinal} ({}) has compute capability {major}.{minor}, 8.0 is required",
                properties.name
            )));
        }
        // SAFETY: a device of this driver; each handle is used in the context in which it was created.
        let gpu = unsafe {
            let context = unavailable("the GPU's context could not be created", result::primary_ctx::retain(device))?;
            bind(context)?;
            let stream =
                driver_result("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?;
            let pool = driver_result("cuDeviceGetDefaultMemPool", result::device::get_default_mem_pool(device))?;
            let mut keep = u64::MAX;
            let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            driver_result(
                "cuMemPoolSetAttribute",
                result::mem_pool::set_attribute(pool, threshold, (&raw mut keep).cast()),
            )?;
            let module = load(&format!("CUDA {}", spoken(version)))?;
            let blas = blas(stream)?;
            let side = side()?;
            Gpu {
                context,
                stream,
                pool,
                module,
                functions: Vec::new(),
                blas,
                side,
                ring: Ring::default(),
                landings: Vec::new(),
                overlapping: major >= 9 && std::env::var_os("RLOOD_CUDA_OVERLAP").is_none_or(|value| value != "0"),
                careful: std::env::var_os("RLOOD_CUDA_SYNC").is_some_and(|value| value == "1"),
                capturing: false,
            }
        };
        if let Ok((free, total)) = result::mem_get_info() {
            properties.taken_bytes = Some((total - free) as u64).filter(|taken| *taken < MOST_TAKEN_BYTES);
        }
        Ok((gpu, properties))
    }
}

/// Opens cuBLAS for a stream.
///
/// # Safety
/// The stream belongs to the current context, and outlives the result.
unsafe fn blas(stream: sys::CUstream) -> Result<Blas, CudaError> {
    // SAFETY: the handle is used in the current context; the workspace is memory of the stream.
    unsafe {
        let handle = blas::create_handle().map_err(|error| failed("cublasCreate", error))?;
        blas::set_stream(handle, stream.cast()).map_err(|error| failed("cublasSetStream", error))?;
        // Keep partial sums of a product in 32 bits even if the result is bf16.
        let math = blas_sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        blas_sys::cublasSetMathMode(handle, math).result().map_err(|error| failed("cublasSetMathMode", error))?;
        let workspace = driver_result("cuMemAllocAsync", result::malloc_async(stream, WORKSPACE_BYTES))?;
        blas_sys::cublasSetWorkspace_v2(handle, workspace as *mut c_void, WORKSPACE_BYTES)
            .result()
            .map_err(|error| failed("cublasSetWorkspace", error))?;
        Ok(Blas { handle, workspace })
    }
}

/// Creates the second stream.
///
/// # Safety
/// A context is current.
unsafe fn side() -> Result<Side, CudaError> {
    let event = || driver_result("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING));
    let stream = driver_result("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?;
    // SAFETY: the stream was just created in the current context.
    let blas = unsafe { blas(stream) }?;
    Ok(Side { stream, blas, fork: event()?, end: event()?, is_apart: false })
}

fn properties(device: sys::CUdevice) -> Result<Properties, CudaError> {
    // SAFETY: a device of this driver.
    let attribute = |attribute| unsafe {
        unavailable("the GPU did not report an attribute", result::device::get_attribute(device, attribute))
            .map(|value| value as u32)
    };
    Ok(Properties {
        name: unavailable("the GPU did not report its name", result::device::get_name(device))?,
        compute_capability: (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        // SAFETY: a device of this driver.
        memory_bytes: unavailable("the GPU did not report its memory", unsafe { result::device::total_mem(device) })?
            as u64,
        driver_version: 0,
        taken_bytes: None,
        emulated: false,
    })
}

/// Loads the kernels into the device. If the build has no machine code for this GPU, the driver compiles them; it
/// caches the result on disk.
fn load(driver: &str) -> Result<sys::CUmodule, CudaError> {
    const LOG_BYTES: usize = 4096;
    let mut log = vec![0_u8; LOG_BYTES];
    let mut options =
        [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(LOG_BYTES - 1)];
    let mut module = ptr::null_mut();
    // SAFETY: the image contains its own length, the pointer refers to a local variable, and there are as many options
    // as values; the log has one byte more than the driver may write.
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
