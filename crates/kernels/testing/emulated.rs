//! The emulator as a device: its memory is the host's, and kernels run when they are launched.
//!
//! It is stricter than a GPU: new and dropped buffers are filled with 0xff (NaN), and the memory around a buffer is
//! checked after each kernel and when the buffer is dropped.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::time::{Duration, Instant};

use half::bf16;

use super::device_api::{CudaError, DType, Driver, Found, Launch, Product, Properties, Source, Staging, Timer};

/// Number of guard bytes on both sides of a buffer, to detect writes out of bounds.
const GUARD: u64 = 256;
/// The byte that fills free memory, new buffers and the space around them.
const UNWRITTEN: u8 = 0xff;
/// Memory of the emulated device, in bytes.
const MEMORY_BYTES: u64 = 16 << 30;
const SHARED_BYTES: u32 = 227 << 10;

unsafe extern "C" {
    fn rlood_emulator_find(name: *const c_char, name_bytes: usize, param_bytes: *mut usize) -> i32;
    fn rlood_emulator_launch(
        kernel: i32,
        params: *const u8,
        grid: *const u32,
        block: u32,
        shared: u32,
        most_shared: u32,
    ) -> *const c_char;
}

/// A kernel's parameter with the alignment that kernels expect.
#[repr(C, align(16))]
struct Aligned([u8; 4096]);

/// The state of the emulated device.
#[derive(Debug)]
pub(super) struct Emulator {
    /// Names of the kernels that `find` returned, by index.
    names: BTreeMap<u32, String>,
    /// Buffers in use: the address of each block, with the sizes of the block and of the buffer.
    live: BTreeMap<u64, (u64, u64)>,
    /// Maximum shared memory of a block, in bytes.
    shared_bytes: u32,
}

impl Emulator {
    pub(super) fn open(ordinal: usize) -> Result<(Emulator, Properties), CudaError> {
        if ordinal != 0 {
            return Err(CudaError::Unavailable(format!("cuda:{ordinal}: the emulator is one device, cuda:0")));
        }
        let properties = Properties {
            name: "emulator".to_owned(),
            compute_capability: (8, 0),
            multiprocessors: 4,
            shared_bytes: SHARED_BYTES,
            memory_bytes: MEMORY_BYTES,
            driver_version: 0,
            taken_bytes: Some(0),
            emulated: true,
        };
        let emulator = Emulator { names: BTreeMap::new(), live: BTreeMap::new(), shared_bytes: SHARED_BYTES };
        Ok((emulator, properties))
    }

    /// Opens an emulator with this maximum of shared memory per block, which may be less than a GPU's.
    #[cfg(test)]
    pub(super) fn open_small(shared_bytes: u32) -> Result<(Emulator, Properties), CudaError> {
        let (emulator, properties) = Emulator::open(0)?;
        Ok((Emulator { shared_bytes, ..emulator }, Properties { shared_bytes, ..properties }))
    }
}

impl Driver for Emulator {
    fn guard(&self) -> u64 {
        GUARD
    }

    fn find(&mut self, name: &str) -> Result<Found, CudaError> {
        let mut param_bytes = 0;
        // SAFETY: the arguments are the name, its length, and a pointer to a local variable.
        let kernel = unsafe { rlood_emulator_find(name.as_ptr().cast(), name.len(), &raw mut param_bytes) };
        let kernel =
            u32::try_from(kernel).map_err(|_| CudaError::Input(format!("there is no GPU kernel named {name}")))?;
        self.names.insert(kernel, name.to_owned());
        Ok(Found { kernel, param_bytes: Some(param_bytes) })
    }

    fn launch(&mut self, kernel: u32, launch: Launch, params: &[u8]) -> Result<(), CudaError> {
        let mut aligned = Aligned([0; 4096]);
        aligned.0[..params.len()].copy_from_slice(params);
        let Launch { grid, block, shared } = launch;
        // SAFETY: the kernel was found, and its parameter has the size that it was compiled with. The caller has
        // checked the addresses in it, as for a GPU.
        let message = unsafe {
            let params = aligned.0.as_ptr();
            rlood_emulator_launch(kernel as i32, params, grid.as_ptr(), block, shared, self.shared_bytes)
        };
        let name = self.names.get(&kernel).map_or("?", String::as_str);
        if !message.is_null() {
            // SAFETY: the message is a zero-terminated string that stays valid until this thread's next launch.
            let message = unsafe { CStr::from_ptr(message) }.to_string_lossy();
            return Err(CudaError::Failed(format!("{name}: {message}")));
        }
        for (&at, &(block, bytes)) in &self.live {
            check(at, block, bytes).map_err(|place| CudaError::Failed(format!("{name} wrote {place}")))?;
        }
        Ok(())
    }

    fn buffer_made(&mut self, at: u64, block: u64, bytes: u64) -> Result<(), CudaError> {
        fill(at, block);
        self.live.insert(at, (block, bytes));
        Ok(())
    }

    fn buffer_dropped(&mut self, at: u64, block: u64, bytes: u64) -> Result<(), CudaError> {
        self.live.remove(&at);
        let intact = check(at, block, bytes);
        fill(at, block);
        intact.map_err(|place| CudaError::Failed(format!("something wrote {place}")))
    }

    fn zero(&mut self, to: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: `to` is a range of a live buffer, checked by Device.
        unsafe { std::ptr::write_bytes(to as *mut u8, 0, bytes) };
        Ok(())
    }

    fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: both are ranges of live buffers that do not overlap, checked by Device.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    fn upload(&mut self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        // SAFETY: `to` is a range of a live buffer, checked by Device.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        Ok(())
    }

    fn upload_staged(&mut self, to: u64, staging: &Staging, at: usize, bytes: usize) -> Result<(), CudaError> {
        assert!(at + bytes <= staging.bytes, "an upload lies within its staging memory");
        // SAFETY: copies from the staging memory to a range of a live buffer.
        unsafe { std::ptr::copy_nonoverlapping(staging.start.add(at), to as *mut u8, bytes) };
        Ok(())
    }

    fn download(&mut self, from: u64, to: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: `from` is a range of a live buffer, checked by Device.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), CudaError> {
        Ok(())
    }

    fn stage(&mut self, bytes: usize) -> Result<Staging, CudaError> {
        Ok(Staging { start: reserve(bytes) as *mut u8, bytes, event: std::ptr::null_mut() })
    }

    fn unstage(&mut self, staging: Staging) {
        release(staging.start as u64, staging.bytes);
    }

    fn fetch(&mut self, from: u64, staging: &mut Staging, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= staging.bytes, "a download lies within its staging memory");
        // SAFETY: copies from a range of a live buffer to the staging memory.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, staging.start, bytes) };
        Ok(())
    }

    fn start_timer(&mut self) -> Result<Box<dyn Timer>, CudaError> {
        Ok(Box::new(Stopwatch { from: Instant::now(), took: None }))
    }

    /// Computes the matrix product in a plain loop. The order of the sums differs from cuBLAS's, which
    /// is not fixed anyway.
    fn product(&mut self, product: &Product) -> Result<(), CudaError> {
        let Product { rows, columns, inner, transpose_a, transpose_b, alpha, beta, .. } = *product;
        for row in 0..rows {
            for column in 0..columns {
                let mut sum = 0.0_f32;
                for k in 0..inner {
                    let a = if transpose_a { k * product.stride_a + row } else { row * product.stride_a + k };
                    let b = if transpose_b { column * product.stride_b + k } else { k * product.stride_b + column };
                    sum += load(product.a, product.operands, a) * load(product.b, product.operands, b);
                }
                let c = row * product.stride_c + column;
                let before = if beta == 0.0 { 0.0 } else { beta * load(product.c, product.result, c) };
                store(product.c, product.result, c, alpha * sum + before);
            }
        }
        Ok(())
    }
}

impl Source for Emulator {
    fn reserve(&mut self, bytes: u64) -> Result<Option<u64>, CudaError> {
        Ok(Some(reserve(bytes as usize)).filter(|&start| start != 0))
    }

    fn release(&mut self, start: u64, bytes: u64) {
        release(start, bytes as usize);
    }
}

/// A timer of the emulator, whose work runs immediately.
#[derive(Debug)]
struct Stopwatch {
    from: Instant,
    took: Option<Duration>,
}

impl Timer for Stopwatch {
    fn stop(&mut self) -> Result<(), CudaError> {
        self.took = Some(self.from.elapsed());
        Ok(())
    }

    fn seconds(&self) -> Result<f64, CudaError> {
        self.took
            .map(|took| took.as_secs_f64())
            .ok_or_else(|| CudaError::Failed("a timer that was not stopped".to_owned()))
    }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1), 4096).ok()
}

/// Allocates memory; returns 0 if there is none.
fn reserve(bytes: usize) -> u64 {
    // SAFETY: the layout is not empty.
    layout(bytes).map_or(0, |layout| unsafe { alloc(layout) } as u64)
}

fn release(start: u64, bytes: usize) {
    if let Some(layout) = layout(bytes) {
        // SAFETY: `reserve` allocated the memory with the same layout.
        unsafe { dealloc(start as *mut u8, layout) }
    }
}

fn fill(at: u64, bytes: u64) {
    // SAFETY: the pool has just allocated this block or is about to free it.
    unsafe { std::ptr::write_bytes(at as *mut u8, UNWRITTEN, bytes as usize) }
}

/// Checks that nothing was written around a buffer; the error says where.
fn check(at: u64, block: u64, bytes: u64) -> Result<(), String> {
    // SAFETY: the block is in use; the buffer begins GUARD bytes after the start of the block.
    let block = unsafe { std::slice::from_raw_parts(at as *const u8, block as usize) };
    let (front, rest) = block.split_at(GUARD as usize);
    let back = &rest[bytes as usize..];
    if let Some(place) = front.iter().position(|&byte| byte != UNWRITTEN) {
        return Err(format!("{} bytes before a buffer of {bytes}", GUARD as usize - place));
    }
    if let Some(place) = back.iter().position(|&byte| byte != UNWRITTEN) {
        return Err(format!("at byte {} of a buffer of {bytes}", bytes as usize + place));
    }
    Ok(())
}

fn load(matrix: u64, dtype: DType, at: usize) -> f32 {
    // SAFETY: an element of a matrix in a live buffer, checked by Gemm.
    unsafe {
        match dtype {
            DType::F32 => (matrix as *const f32).add(at).read_unaligned(),
            DType::Bf16 => (matrix as *const bf16).add(at).read_unaligned().to_f32(),
        }
    }
}

fn store(matrix: u64, dtype: DType, at: usize, value: f32) {
    // SAFETY: an element of a matrix in a live buffer, checked by Gemm.
    unsafe {
        match dtype {
            DType::F32 => (matrix as *mut f32).add(at).write_unaligned(value),
            DType::Bf16 => (matrix as *mut bf16).add(at).write_unaligned(bf16::from_f32(value)),
        }
    }
}
