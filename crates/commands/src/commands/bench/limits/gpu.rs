//! Limits of a GPU through its driver and cuBLAS: copies within its memory, and products of random matrices (products of zeros
//! would be faster, because they need less power).

use std::time::Instant;

use half::bf16;

use super::{GemmPeak, GpuLimits};
use crate::commands::bench::BenchError;
use crate::commands::bench::timing::repeat;
use crate::config::Precision;
use crate::engine::error::EngineError;
use crate::engine::kernels::cuda::driver::{Buffer, CudaError, DType, Device, Gemm, Matrix, Order, Plain};
use crate::engine::random::{Key, Stream};

/// Number of bytes that one copy moves: far more than a cache of the GPU holds.
const COPY_BYTES: u64 = 1 << 30;

/// Numbers of rows of the square matrices to multiply; larger ones come closer to the limit.
const SIDES: [usize; 4] = [1024, 2048, 4096, 8192];

/// Number of random values that are repeated to fill a matrix.
const PATTERN: u64 = 1 << 16;

/// Number of copies or matrix products to queue before the measurement waits for the GPU.
const BATCH: usize = 10;

/// Minimum duration of a measurement in seconds, long enough for the GPU's clock to rise.
const MIN_SECONDS: f64 = 0.3;

/// Small sizes for the GPU emulator, with which tests check this code but not its speed.
const EMULATED_BYTES: u64 = 1 << 20;
const EMULATED_SIDES: [usize; 1] = [64];

/// Measures copies and matrix products; `only` restricts the products to this precision and the largest matrices.
///
/// # Errors
/// Fails when the device does not exist, or fails.
pub fn measure(ordinal: u32, only: Option<Precision>) -> Result<GpuLimits, BenchError> {
    limits(ordinal, only).map_err(|error| EngineError::from(error).into())
}

fn limits(ordinal: u32, only: Option<Precision>) -> Result<GpuLimits, CudaError> {
    let begun = Instant::now();
    let device = Device::open(ordinal as usize)?;
    let open_s = begun.elapsed().as_secs_f64();
    let properties = device.properties();
    let (major, minor) = properties.compute_capability;
    let (bytes, sides) = match properties.emulated {
        true => (EMULATED_BYTES, EMULATED_SIDES.as_slice()),
        // The source and the target of the copy both fit into the memory of a small GPU.
        false => (COPY_BYTES.min(properties.memory_bytes / 8), SIDES.as_slice()),
    };
    let sides = if only.is_some() { &sides[sides.len() - 1..] } else { sides };
    let wanted = |dtype| only.is_none_or(|only| only == dtype);
    Ok(GpuLimits {
        device: format!("cuda:{ordinal}"),
        name: properties.name.clone(),
        compute_capability: format!("{major}.{minor}"),
        multiprocessors: properties.multiprocessors,
        driver_version: properties.driver_version,
        emulated: properties.emulated,
        open_s,
        memory_bytes: properties.memory_bytes,
        copy_bytes: bytes,
        copy_gb_s: copy_gb_s(&device, bytes as usize)?,
        bf16: wanted(Precision::Bf16).then(|| peak::<bf16>(&device, sides, DType::Bf16)).transpose()?,
        f32: wanted(Precision::F32).then(|| peak::<f32>(&device, sides, DType::F32)).transpose()?,
    })
}

/// Bytes read plus bytes written per second, in 1e9.
fn copy_gb_s(device: &Device, bytes: usize) -> Result<f64, CudaError> {
    let (from, to) = (device.zeros(bytes)?, device.alloc(bytes)?);
    let timing = repeat(3, MIN_SECONDS, || {
        (0..BATCH).try_for_each(|_| device.copy(&from, 0, &to, 0, bytes))?;
        device.synchronize()
    })?;
    Ok((2 * bytes * BATCH) as f64 / timing.min_s / 1e9)
}

/// Returns the fastest product `x wᵀ` with f32 sums and results of the operands' type, as in a linear layer.
fn peak<T: Plain + From<bf16>>(device: &Device, sides: &[usize], dtype: DType) -> Result<GemmPeak, CudaError> {
    let mut best = GemmPeak { n: 0, gflop_s: 0.0 };
    for &n in sides {
        let (x, w) = (random::<T>(device, n * n, 0)?, random::<T>(device, n * n, 1)?);
        let y = device.alloc(n * n * size_of::<T>())?;
        let gemm = Gemm {
            a: Matrix::whole(&x, dtype, n, n),
            transpose_a: false,
            b: Matrix::whole(&w, dtype, n, n),
            transpose_b: true,
            c: Matrix::whole(&y, dtype, n, n),
            alpha: 1.0,
            beta: 0.0,
            order: Order::InTurn,
        };
        let timing = repeat(3, MIN_SECONDS, || {
            (0..BATCH).try_for_each(|_| device.gemm(&gemm))?;
            device.synchronize()
        })?;
        let gflop_s = 2.0 * (n as f64).powi(3) * BATCH as f64 / timing.min_s / 1e9;
        if gflop_s > best.gflop_s {
            best = GemmPeak { n, gflop_s };
        }
    }
    Ok(best)
}

/// Returns values between -1 and 1, with a period of [`PATTERN`].
fn random<T: Plain + From<bf16>>(device: &Device, count: usize, seed: u64) -> Result<Buffer, CudaError> {
    let key = Key::new(seed, Stream::Probe);
    let value = |at| T::from(bf16::from_f64(2.0 * key.with(at).uniform() - 1.0));
    let pattern: Vec<T> = (0..PATTERN.min(count as u64)).map(value).collect();
    let size = size_of::<T>();
    let buffer = device.alloc(count * size)?;
    device.write(&buffer, 0, &pattern)?;
    let mut filled = pattern.len();
    while filled < count {
        let more = filled.min(count - filled);
        device.copy(&buffer, 0, &buffer, filled * size, more * size)?;
        filled += more;
    }
    Ok(buffer)
}

#[cfg(all(test, feature = "cuda-emulator"))]
mod tests {
    use super::*;

    #[test]
    fn limits_are_positive_and_say_that_they_are_the_emulators() {
        let limits = measure(0, None).unwrap();
        assert!(limits.emulated);
        for rate in [limits.copy_gb_s, limits.bf16.unwrap().gflop_s, limits.f32.unwrap().gflop_s] {
            assert!(rate.is_finite() && rate > 0.0, "{limits:?}");
        }
        let brief = measure(0, Some(Precision::Bf16)).unwrap();
        assert!(brief.bf16.is_some() && brief.f32.is_none(), "{brief:?}");
    }

    #[test]
    fn a_matrix_is_filled_to_its_end() {
        let device = Device::open(0).unwrap();
        let count = 3 * PATTERN as usize + 5;
        let buffer = random::<f32>(&device, count, 7).unwrap();
        let values: Vec<f32> = device.download(&buffer, 0, count).unwrap();
        let pattern = &values[..PATTERN as usize];
        assert!(values.chunks(PATTERN as usize).all(|chunk| chunk == &pattern[..chunk.len()]));
        assert!(pattern.iter().any(|value| *value != pattern[0]) && pattern.iter().all(|value| value.abs() <= 1.0));
    }
}
