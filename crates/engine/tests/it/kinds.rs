//! The backends on which the engine's tests run.

use std::path::Path;

use rlood_engine::backend::BackendKind;
use rlood_engine::gpu;
use rlood_engine::model::Policy;
use rlood_types::spec::ComputeDtype;

/// All backends of this build and machine. The GPU backend is included in a build with CUDA if there is a GPU, or with
/// the feature `cuda-emulator` on the CPU. `RLOOD_TEST_BACKEND` (cpu, reference or cuda) selects one backend.
pub fn kinds() -> Vec<BackendKind> {
    let mut kinds = vec![("cpu", BackendKind::Cpu), ("reference", BackendKind::Reference)];
    if gpu::list().is_ok_and(|gpus| !gpus.is_empty()) {
        kinds.push(("cuda", BackendKind::Cuda { ordinal: 0 }));
    }
    let asked = std::env::var("RLOOD_TEST_BACKEND").ok();
    kinds.retain(|(name, _)| asked.as_ref().is_none_or(|asked| asked == name));
    assert!(!kinds.is_empty(), "RLOOD_TEST_BACKEND={asked:?} is not here");
    kinds.into_iter().map(|(_, kind)| kind).collect()
}

/// The backends whose sampling and training agree bit for bit; GPUs with exact products.
pub fn exact_kinds() -> Vec<BackendKind> {
    kinds().into_iter().filter(|kind| *kind != BackendKind::Reference).collect()
}

/// Loads a model on one of [`exact_kinds`], with exact products in every precision.
pub fn load_exact(dir: &Path, kind: BackendKind, dtype: ComputeDtype) -> Policy {
    #[cfg(feature = "cuda")]
    if let BackendKind::Cuda { ordinal } = kind {
        return Policy::on_cuda(dir, cuda(ordinal, dtype, Gemm::Exact)).unwrap();
    }
    Policy::load_dtype(dir, kind, dtype).unwrap()
}

#[cfg(feature = "cuda")]
pub use rlood_engine::kernels::cuda::gemm::Gemm;

/// Opens a device for this test alone.
#[cfg(feature = "cuda")]
pub fn cuda(ordinal: u32, dtype: ComputeDtype, gemm: Gemm) -> rlood_engine::backend::cuda::Cuda {
    use rlood_engine::backend::cuda::Cuda;
    use rlood_engine::kernels::cuda::driver::Device;
    Cuda::with(Device::open(ordinal as usize).unwrap(), dtype, gemm)
}
