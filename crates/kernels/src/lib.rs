//! The CPU kernels, and with the feature `cuda` the GPU kernels: packed weights, the same arithmetic for any number of
//! rows and threads, and instruction sets chosen at run time. All `unsafe` code of the project is in this crate, see
//! `README.md`. The tests compare each kernel with a naive implementation.

pub mod adamw;
#[cfg(target_arch = "x86_64")]
mod amx;
pub mod attention;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod delta;
#[cfg(target_arch = "x86_64")]
mod dpbf16;
mod floats;
pub mod four_bit;
pub mod gemm;
pub mod head;
pub mod isa;
pub mod lending;
pub mod limits;
pub mod mlp;
pub mod norm;
pub mod pack;
pub mod rope;
pub mod rows;
pub mod simd;
pub mod threads;
