//! The CPU's kernels: packed weights, one arithmetic whatever the number of rows and threads, a ladder of instruction
//! sets chosen at run time; and with the feature `cuda` a GPU's. All of the project's `unsafe` lies here, see `README.md`; each
//! kernel stands beside a naive twin in its tests.

pub mod adamw;
#[cfg(target_arch = "x86_64")]
mod amx;
pub mod attention;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(target_arch = "x86_64")]
mod dpbf16;
mod floats;
pub mod gemm;
pub mod head;
pub mod isa;
pub mod limits;
pub mod mlp;
pub mod norm;
pub mod pack;
pub mod rope;
pub mod rows;
pub mod simd;
pub mod threads;
