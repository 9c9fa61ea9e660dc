//! Kernels for NVIDIA GPUs. One source (`cuda/device/`) is compiled by nvcc and, for tests without a GPU, by the C++
//! compiler for an emulator (`testing/`). Each kernel has a safe function that checks its shapes and launches it; all
//! `unsafe` code of the backend is in this module.

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

/// GPU memory left free in bytes, for the driver's own use at run time.
pub const KEPT_FREE_BYTES: u64 = 512 << 20;
