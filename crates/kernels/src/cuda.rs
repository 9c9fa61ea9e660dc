//! Kernels for NVIDIA GPUs: one source (`cuda/device/`) that nvcc compiles and, for tests without a GPU, the C++
//! compiler behind an emulator (`testing/`). Beside each kernel stands a safe function that checks its shapes and
//! launches it; all of the backend's `unsafe` lies here.

pub mod attention;
pub mod cache;
mod device_api;
pub mod driver;
#[cfg(feature = "cuda-emulator")]
#[path = "../testing/emulated.rs"]
mod emulated;
pub mod gemm;
pub mod head;
pub mod lora;
pub mod mlp;
pub mod norm;
mod nvidia;
pub mod optim;
pub mod rope;
pub mod rows;

/// Left free on a device, bytes: what its driver takes while it runs.
pub const KEPT_FREE_BYTES: u64 = 512 << 20;
